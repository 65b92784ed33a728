"""Mixture-of-experts families in which layers with a sliding window differ from those with full attention: one of the two kinds has
no rotary embedding, or they have heads of their own. A new family is a new entry in `SLIDING_ONES`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .fields import AGAIN, FULL, SIZES, SLIDING, Config, expect, number, said, shown, whole
from .parts import biased, common, layer_kinds, layers_of, windows_of
from .ropes import rope, ropes_by_kind, rotary_size, with_only_rope, with_rope
from .shape import Shape, Unsupported
from .sparse_families import EXPERTS, PLAIN_MLP, by_kinds, mixed, one_for_all, scored_by_kinds
from .traits import Gates, Keys, Mixture

# transformers' defaults.
FLINT: Config = {
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "sliding_window": 513,
    "num_experts": 256,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 1024,
    "norm_topk_prob": True,
    "mlp_only_layers": [0, 1],
}
KOLIBRI: Config = {
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "sliding_window": 513,
    "num_experts": 384,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
AROUND_KOLIBRI = ("input_layernorm", "post_attn_norm", "post_attention_layernorm", "post_ffn_norm")
LAGUNA: Config = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "gating": True,
}
LAGUNA_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
GATINGS = {True: True, "per-head": True, "per-element": False}  # whether there is one gate for each head
MIMO: Config = {
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
}
STEP_3: Config = {
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 11_264,
    "num_hidden_layers": 45,
    "vocab_size": 128_815,
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1280,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "share_expert_dim": 1280,
}
STEP_3_FIELDS = {  # its names of fields, and the usual ones
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
STEP_3_NAMES = (  # transformers' names of its tensors, and its own
    ("mlp.gate.e_score_correction_bias", "moe.router_bias"),
    ("mlp.gate.", "moe.gate."),
    ("mlp.experts.", "moe."),
    ("mlp.shared_experts.", "share_expert."),
)
MIMO_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
}


def _flint(config: Config) -> Shape:
    """Flint: Qwen 3's attention with sinks, a sliding window in most layers, and full attention without a rotary embedding in the
    others. Experts have sigmoid scores, and there is a shared expert."""
    given = FLINT | said(config)
    base = biased(common(given), given)
    kinds = layer_kinds(given, base.layers, lambda layer: layer > 1 and layer % 4 != 1 and layer < base.layers - 1)
    mixture = replace(one_for_all(given, given["norm_topk_prob"]), scores="sigmoid", shared_gate="")
    return replace(
        mixed(base, given, mixture),
        qk_norm=True,
        sinks="softmax_offset",
        windows=windows_of(given, kinds),
        nope_layers=layers_of(kinds, FULL),
    )


def _kolibri(config: Config) -> Shape:
    """Kolibri: norms before and after attention and experts, which are in every layer, with a shared expert. Layers with full
    attention have no rotary embedding."""
    given = KOLIBRI | config
    given |= {"num_experts": given.get("num_local_experts") or given["num_experts"]}
    base = common(given | {"intermediate_size": given["moe_intermediate_size"]})
    kinds = layer_kinds(given, base.layers, lambda layer: (layer + 1) % 5 > 0)
    mixture = replace(
        one_for_all(given, given.get("norm_topk_prob", False)),
        scores="sigmoid",
        correction=".moe.router.expert_bias",
        by_logits=True,
        shared_name="shared_experts",
        shared_gate="",
    )
    return replace(
        base,
        mixtures=(mixture,) * base.layers,
        qk_norm=True,
        norms=AROUND_KOLIBRI,
        windows=windows_of(given, kinds),
        nope_layers=layers_of(kinds, FULL),
    )


def _laguna(config: Config) -> Shape:
    """Poolside's Laguna: layers with a sliding window and those with full attention may differ in query heads and in the rotary
    part of each head; attention is gated through softplus. Experts are chosen by sigmoid scores with a correction bias; there is a
    shared expert."""
    expect(
        said(config),
        moe_apply_router_weight_on_input=False,
        moe_router_use_sigmoid=True,
        moe_router_score_func="sigmoid",
        swa_attention_sink_enabled=False,
    )
    if config.get("moe_router_logit_softcapping") not in (None, 0, 0.0):
        raise Unsupported(f"moe_router_logit_softcapping {shown(config['moe_router_logit_softcapping'])} is not supported")
    given = LAGUNA | config
    full, local = ropes_by_kind(_ropes_apart(with_rope(said(config), LAGUNA_ROPES)), 5e5, 1e4)
    base = biased(common(with_only_rope(given, full)), given)
    kinds, gating = layer_kinds(given, base.layers, lambda layer: False), given["gating"]
    if not isinstance(gating, bool | str) or gating not in GATINGS:
        raise Unsupported(f"gating {shown(gating)} is not supported: the decoder has {', '.join(map(shown, GATINGS))}")
    mixture = replace(
        one_for_all(given, normalized=True),
        scores="sigmoid",
        correction="experts.e_score_correction_bias",
        factor=number(given, "moe_routed_scaling_factor", 1.0),
        shared_gate="",
    )
    slides, heads = SLIDING in kinds, _heads_by_kind(given, kinds)
    parts = [rotary_size({"rope_parameters": own}, base.head_size) for own in (full, local)]
    return replace(
        base,
        heads=heads[SLIDING if slides else FULL],
        global_keys=Keys(heads=base.kv_heads, size=base.head_size, queries=heads[FULL], turned=parts[0]) if slides else None,
        mixtures=by_kinds(given.get("mlp_layer_types") or [PLAIN_MLP, *[EXPERTS] * (base.layers - 1)], mixture, base.layers),
        qk_norm=True,
        modules=(("mlp.shared_expert.", "mlp.shared_experts."),),
        gates=Gates(name="g_proj", by_head=GATINGS[gating], softplus=True),
        windows=windows_of(given, kinds),
        local_rope=rope(with_only_rope(given, local)) if slides else None,
        rotary_size=parts[slides],
    )


def _ropes_apart(config: Config) -> Config:
    """The config with rotary parameters common to all kinds of layers repeated for each kind."""
    ropes = config.get("rope_parameters")
    if not isinstance(ropes, dict) or not any(isinstance(own, dict) for own in ropes.values()):
        return config
    common = {name: value for name, value in ropes.items() if not isinstance(value, dict)}
    return config | {"rope_parameters": {kind: common | own for kind, own in ropes.items() if isinstance(own, dict)}}


def _heads_by_kind(given: Config, kinds: list[Any]) -> dict[Any, int]:
    """Query heads of layers with full attention, and of those with a sliding window."""
    name, every = "num_attention_heads_per_layer", int(given["num_attention_heads"])
    counts = given.get(name) or [every] * len(kinds)
    if not isinstance(counts, list) or len(counts) != len(kinds):
        raise Unsupported(f"config.json says {name} {shown(counts)}, a number for each layer is needed: {AGAIN}")
    found = dict[Any, int]()
    for kind, count in zip(kinds, counts, strict=True):
        if found.setdefault(str(kind), whole(name, count, 1, SIZES["num_attention_heads"])) != count:
            raise Unsupported(f"{name} {shown(counts)} is not supported: the decoder has as many in all layers of a kind")
    return {kind: found.get(kind, every) for kind in (FULL, SLIDING)}


def _mimo(config: Config) -> Shape:
    """Xiaomi's MiMo V2 Flash: layers with a sliding window have twice as many key heads, and sinks; values are smaller than keys.
    Partial rotary embedding."""
    given = MIMO | _mimos_own(said(config))
    if (window := given.get("sliding_window_size")) is not None:  # which does not count the token itself
        given |= {"sliding_window": window + 1}
    full, local = ropes_by_kind(_ropes_apart(with_rope(given, MIMO_ROPES)), 5e6, 1e4)
    base = common(with_only_rope(given, full))
    parts = {rotary_size({"rope_parameters": one}, base.head_size, 0.334) for one in (full, local)}
    if len(parts) > 1:
        raise Unsupported("partial_rotary_factor differs between kinds of layers, which is not supported: the decoder has one")
    kinds = layer_kinds(given, base.layers, lambda layer: layer > 0 and (layer + 1) % 6 > 0)
    values = given["v_head_dim"] if given["v_head_dim"] != base.head_size else 0
    if values > base.head_size:
        raise Unsupported(
            f"config.json says v_head_dim {values} and head_dim {base.head_size}, of which the second is no less: {AGAIN}"
        )
    dense = [PLAIN_MLP if layer == 0 else EXPERTS for layer in range(base.layers)]
    found = scored_by_kinds(replace(base, qkv_bias=given.get("attention_bias", False)), {"mlp_layer_types": dense} | given)
    return replace(
        found,
        kv_heads=2 * base.kv_heads,
        global_keys=Keys(heads=base.kv_heads, size=base.head_size, value_size=values),
        value_size=values,
        sinks="attention_sink_bias",
        local_sinks=True,
        windows=windows_of({"sliding_window": 129} | given, kinds),
        local_rope=rope(with_only_rope(given, local)),
        rotary_size=parts.pop(),
        factors=(("self_attn.v_proj", number({"attention_value_scale": 0.707} | config, "attention_value_scale", 1.0)),),
    )


def _mimos_own(config: Config) -> Config:
    """The config with transformers' fields filled in from those of the hub's config.json. transformers does not read the latter."""
    layers, heads = config["num_hidden_layers"], int(config.get("num_key_value_heads") or MIMO["num_key_value_heads"])
    expect(
        config,
        swa_num_key_value_heads=2 * heads,
        swa_head_dim=config.get("head_dim", MIMO["head_dim"]),
        swa_v_head_dim=config.get("v_head_dim", MIMO["v_head_dim"]),
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
    )
    found: Config = {}
    for theirs, ours, words in (
        ("hybrid_layer_pattern", "layer_types", (FULL, SLIDING)),
        ("moe_layer_freq", "mlp_layer_types", (PLAIN_MLP, EXPERTS)),
    ):
        if (pattern := config.get(theirs)) is not None:
            if not isinstance(pattern, list) or len(pattern) != layers or not all(one in (0, 1) for one in pattern):
                raise Unsupported(f"config.json says {theirs} {shown(pattern)}, 0 or 1 for each layer is needed: {AGAIN}")
            found[ours] = [words[one] for one in pattern]
    if "layernorm_epsilon" in config:
        found["rms_norm_eps"] = config["layernorm_epsilon"]
    if any(name in config for name in ("rope_theta", "swa_rope_theta", "partial_rotary_factor")):
        part = {"partial_rotary_factor": config.get("partial_rotary_factor", MIMO_ROPES[FULL]["partial_rotary_factor"])}
        thetas = zip((FULL, SLIDING), ("rope_theta", "swa_rope_theta"), strict=True)
        found["rope_parameters"] = {
            kind: part | {"rope_theta": config.get(name, MIMO_ROPES[kind]["rope_theta"])} for kind, name in thetas
        }
    return found | config


def step_3(config: Config) -> Shape:
    """StepFun's Step 3.7 Flash: layers with a sliding window and those with full attention differ in query heads and in the rotary
    part of each head; attention has a gate for each head. Experts are chosen by sigmoid scores with a correction bias, there is a
    shared expert; gates are clamped, with limits that differ by layer."""
    given = STEP_3 | _steps_own(said(config))
    full, local = ropes_by_kind(given, 1e4, 1e4)
    base = biased(common(with_only_rope(given | {"hidden_act": "silu"}, full)), given)
    layers, heads = base.layers, int(given["num_attention_heads"])
    kinds = layer_kinds(given, layers, lambda layer: False)
    slides = SLIDING in kinds
    limits, shared = (_limits(given, name, layers) for name in ("swiglu_limits", "swiglu_limits_shared"))
    mixture = Mixture(
        experts=given["n_routed_experts"],
        chosen=given["num_experts_per_tok"],
        size=given["moe_intermediate_size"],
        normalized=True,
        scores="sigmoid",
        correction="gate.e_score_correction_bias",
        factor=number(given, "moe_router_scaling_factor", 1.0),
        shared=given["share_expert_dim"],
        shared_name="shared_experts",
        shared_gate="",
        form="behind",
    )
    usual = [PLAIN_MLP if layer < 3 else EXPERTS for layer in range(layers)]
    sparse = by_kinds(given.get("mlp_layer_types") or usual, mixture, layers)
    parts = [rotary_size({"rope_parameters": own}, base.head_size) for own in (full, local)]
    return replace(
        base,
        heads=int(given.get("num_sliding_attention_heads") or heads) if slides else heads,
        global_keys=Keys(heads=base.kv_heads, size=base.head_size, queries=heads, turned=parts[0]) if slides else None,
        mixtures=tuple(
            one and replace(one, limit=limit, shared_limit=other) for one, limit, other in zip(sparse, limits, shared, strict=True)
        ),
        mlp_limits=shared,
        mlp_form="behind",
        attention_scale=number(given, "query_pre_attn_scalar", base.head_size) ** -0.5,
        qk_norm=True,
        centered_norms=True,
        gates=Gates(name="g_proj", by_head=True),
        windows=windows_of(given, kinds),
        local_rope=rope(with_only_rope(given, local)) if slides else None,
        rotary_size=parts[slides],
        aliases=STEP_3_NAMES,
    )


def _limits(given: Config, name: str, layers: int) -> tuple[float, ...]:
    """The limit of each layer; 0: none."""
    found = given.get(name)
    found = [0.0] * layers if found is None else found
    if not isinstance(found, list) or len(found) != layers:
        raise Unsupported(f"config.json says {name} {shown(found)}, a number for each layer is needed: {AGAIN}")
    return tuple(number({name: one}, name) if one else 0.0 for one in found)


def _steps_own(config: Config) -> Config:
    """The config with transformers' fields filled in from those of the hub's config.json."""
    expect(
        config,
        moe_router_activation="sigmoid",
        use_moe_router_bias=True,
        use_head_wise_attn_gate=True,
        norm_expert_weight=True,
        zero_centered=True,
        use_bidirectional_attention=False,
        mlp_bias=False,
    )
    found: Config = {ours: config[theirs] for theirs, ours in STEP_3_FIELDS.items() if theirs in config}
    for name in found:
        whole(name, found[name], 1, SIZES[name])
    layers, more = config["num_hidden_layers"], config.get("num_nextn_predict_layers", 0)
    for name in ("mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "rope_theta", "partial_rotary_factors"):
        if isinstance(config.get(name), list) and type(more) is int and len(config[name]) == layers + more:
            found[name] = config[name][:layers]
    named = config.get("moe_layers_enum")
    if named is not None and "mlp_layer_types" not in config:
        numbers = str(named).strip("[]").split(",") if isinstance(named, (str, list)) else [""]
        if not all(one.strip().isdecimal() for one in numbers):
            raise Unsupported(f"config.json says moe_layers_enum {shown(named)}, numbers of layers are needed: {AGAIN}")
        found["mlp_layer_types"] = [EXPERTS if layer in set(map(int, numbers)) else PLAIN_MLP for layer in range(layers)]
    other = config.get("attention_other_setting")
    if isinstance(other, dict) and "num_sliding_attention_heads" not in config and "num_attention_heads" in other:
        name = "num_sliding_attention_heads"
        found[name] = whole(name, other["num_attention_heads"], 1, SIZES[name])
    return config | found | _steps_ropes(config | found)


def _steps_ropes(config: Config) -> Config:
    """Rotary parameters for each kind of layers, from lists with an entry for each layer."""
    kinds = config.get("layer_types") or [FULL] * config["num_hidden_layers"]
    ropes = config.get("rope_parameters")
    if isinstance(ropes, dict) and all(isinstance(ropes.get(kind), dict) for kind in kinds):
        return {"rope_parameters": {kind: ropes.get(kind, {"rope_theta": 1e4}) for kind in (FULL, SLIDING)}}
    found: dict[str, Config] = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in (FULL, SLIDING)}
    for name, ours in (("rope_theta", "rope_theta"), ("partial_rotary_factors", "partial_rotary_factor")):
        values = config.get(name)
        values = values if isinstance(values, list) else [] if values is None else [values] * len(kinds)
        if values and len(values) != len(kinds):
            raise Unsupported(f"config.json says {name} {shown(values)}, a number for each layer is needed: {AGAIN}")
        for kind, value in reversed([*zip(map(str, kinds), values, strict=False)]):
            found.setdefault(kind, {})[ours] = value
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict):
        found[FULL] |= scaling
    return {"rope_parameters": found, "rope_scaling": None}


SLIDING_ONES: dict[str, Callable[[Config], Shape]] = {
    "FlintForCausalLM": _flint,
    "Kolibri1ForCausalLM": _kolibri,
    "LagunaForCausalLM": _laguna,
    "MiMoV2FlashForCausalLM": _mimo,
}
