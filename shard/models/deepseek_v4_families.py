"""DeepSeek V4 (DeepSeek-AI 2026): a sliding window in each layer, in most of them compressed entries for earlier tokens,
hyper-connections, and mixture of experts, with hash routing in the first layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .compression import CompressedLatent
from .fields import AGAIN, COMPRESSED, SLIDING, Config, expect, number, said, shown, whole
from .parts import common
from .ropes import ROPES, rope, with_only_rope
from .shape import Shape, Unsupported
from .traits import HyperConnections, Mixture, Quantization, Rope

# transformers' defaults.
DEEPSEEK_V4: Config = {
    "max_position_embeddings": 1_048_576,
    "moe_intermediate_size": 2048,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "n_routed_experts": 256,
    "sliding_window": 128,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
}
SPARSE, HEAVY = COMPRESSED
# Names of the fields in older config.json files, and defaults.
RATES = {SPARSE: ("compress_rate_csa", 4), HEAVY: ("compress_rate_hca", 128)}
RATIOS = {0: SLIDING, 4: SPARSE, 128: HEAVY}  # how `compress_ratios` names them
LARGEST_RATE = 1 << 16
FP4_EXPERTS = Quantization(method="fp8", kind="fp4", group=32)
NVFP4_EXPERTS = Quantization(method="modelopt", kind="nvfp4", group=16)
MAIN, COMPRESS = "main", "compress"  # rotary embeddings: of layers with a window alone, and of others
HASHED = "hash_moe"
SCORES = ("sqrtsoftplus", "sigmoid")
HASHED_LAYERS = 3
LIMIT = 10.0


def _deepseek_v4(config: Config) -> Shape:
    expect(said(config), num_key_value_heads=1, n_shared_experts=1, norm_topk_prob=True, topk_method="noaux_tc")
    expect(said(config), attention_bias=False, mlp_bias=False)
    given = DEEPSEEK_V4 | said(config)
    base = common(given | {"intermediate_size": given["moe_intermediate_size"]} | dict.fromkeys(ROPES))
    kinds, turned = _kinds(given), _turned(given)
    main, compress = _ropes(given, base.max_positions)
    if base.heads % given["o_groups"]:
        raise Unsupported(f"config.json says o_groups {given['o_groups']}, of {base.heads} attention heads: {AGAIN}")
    rates, compressing = _rates(given, {*kinds}), {*kinds} != {SLIDING}
    window, limit = whole("sliding_window", given["sliding_window"], 1, 1 << 30), number(given, "swiglu_limit", LIMIT)
    latent = CompressedLatent(
        size=base.head_size,
        turned=turned,
        plain=base.head_size - turned,
        values=base.head_size,
        queries=given["q_lora_rank"],
        epsilon=base.norm_epsilon,
        window=window,
        groups=given["o_groups"],
        rank=given["o_lora_rank"],
        index_heads=given["index_n_heads"],
        index_size=given["index_head_dim"],
        index_most=given["index_topk"],
        rates=tuple(rates.get(kind, 0) for kind in kinds),
        overlapping=frozenset(layer for layer, kind in enumerate(kinds) if kind == SPARSE),
    )
    if latent.overlapping and latent.index_size < turned:
        raise Unsupported(
            f"config.json says index_head_dim {latent.index_size}, and {turned} features of a head turn: an index needs as many"
        )
    return replace(
        base,
        latent=latent,
        windows=tuple(window if kind == SLIDING else 0 for kind in kinds),
        rope=compress if compressing else main,
        local_rope=main if compressing and SLIDING in kinds else None,
        rotary_neighbours=True,
        sinks="sinks",
        hyper=HyperConnections(
            count=given["hc_mult"],
            magnitude=2.0,
            epsilon=number(given, "hc_eps", 1e-6),
            rounds=given["hc_sinkhorn_iters"],
        ),
        mixtures=_mixtures(given, base, limit),
        original=True,
        quantization=_experts_beside(base.quantization, given),
    )


def _kinds(given: Config) -> list[str]:
    """The kind of each layer: by name, by its entry of compress_ratios, or by the default pattern."""
    layers, kinds, ratios = given["num_hidden_layers"], given.get("layer_types"), given.get("compress_ratios")
    if kinds is None and ratios is not None:
        known = isinstance(ratios, list) and all(type(ratio) is int and ratio in RATIOS for ratio in ratios)
        if not known or len(ratios) < layers:
            raise Unsupported(
                f"config.json says compress_ratios {shown(ratios)}, one of {', '.join(map(str, RATIOS))} is needed for each of "
                f"num_hidden_layers: {AGAIN}"
            )
        kinds = [RATIOS[ratio] for ratio in ratios]
    kinds = kinds or [HEAVY if layer < 2 or layer % 2 == 0 else SPARSE for layer in range(layers)]
    unknown = sorted({*map(str, kinds)} - {SLIDING, *COMPRESSED})
    if unknown:
        has = f"{SLIDING}, {SPARSE} and {HEAVY}"
        raise Unsupported(f"layer_types {', '.join(unknown)} are not supported: for this family the decoder has {has}")
    return list(kinds[:layers])


def _rates(given: Config, kinds: set[str]) -> dict[str, int]:
    """Compression rates: tokens of an entry, for each of these kinds of layers that has entries."""
    named = given.get("compress_rates", {})
    if not isinstance(named, dict):
        raise Unsupported(f"config.json says compress_rates {shown(named)}, an object is needed: {AGAIN}")
    found = {}
    for kind in kinds & {*RATES}:
        older, usual = RATES[kind]
        if older not in given and named and kind not in named:
            raise Unsupported(f"config.json says compress_rates {shown(named)}, of which {kind} is missing: {AGAIN}")
        found[kind] = whole(f"compress_rates of {kind}", given.get(older, named.get(kind, usual)), 1, LARGEST_RATE)
    return found


def _turned(given: Config) -> int:
    """Features of a head that rotate, its last ones."""
    size, part = given["head_dim"], given.get("partial_rotary_factor")
    if part is None:
        turned = whole("qk_rope_head_dim", given.get("qk_rope_head_dim", size * 64 // 512), 0, size)
    else:
        turned = int(size * number(given, "partial_rotary_factor", most=1.0))
    if turned < 2 or turned % 2 or turned > size:
        raise Unsupported(f"config.json means that {turned} of {size} features of a head turn, an even number is needed: {AGAIN}")
    return turned


def _ropes(given: Config, positions: int) -> tuple[Rope, Rope]:
    """The rotary embeddings of layers with a window alone, and of others, which may be scaled."""
    names = [name for name in ROPES if given.get(name)]
    if len(names) > 1:
        raise Unsupported("config.json has both rope_parameters and rope_scaling: leave one of them")
    values = given[names[0]] if names else {}
    if not isinstance(values, dict):
        raise Unsupported(f"config.json says {names[0]} {shown(values)}, an object is needed: {AGAIN}")
    if isinstance(values.get(MAIN), dict) and isinstance(values.get(COMPRESS), dict):
        return tuple(_rope(values[name], positions) for name in (MAIN, COMPRESS))  # type: ignore[return-value]
    scaled = {name: value for name, value in values.items() if name not in (MAIN, COMPRESS)}
    if (scaled.get("rope_type") or scaled.get("type")) == "yarn":
        scaled.setdefault("attention_factor", 1.0)
    theta = number(given, "compress_rope_theta", 160_000.0)
    return Rope(theta=number(given, "rope_theta", 10_000.0)), _rope(scaled | {"rope_theta": theta}, positions)


def _rope(values: Mapping[str, Any], positions: int) -> Rope:
    number(values, "rope_theta")  # which has no default here
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in ("default", "linear", "yarn"):
        raise Unsupported(f"rotary scaling {kind!r} is not supported: for this family the decoder has default, linear and yarn")
    return rope(with_only_rope({"max_position_embeddings": positions}, values))


def _mixtures(given: Config, base: Shape, limit: float) -> tuple[Mixture, ...]:
    """The mixture of experts of each layer."""
    layers, hashed = base.layers, given.get("num_hash_layers", HASHED_LAYERS)
    whole("num_hash_layers", hashed, 0, 1 << 12)
    kinds = given.get("mlp_layer_types")
    kinds = [HASHED if layer < hashed else "moe" for layer in range(layers)] if kinds is None else kinds
    known = isinstance(kinds, list) and len(kinds) >= layers and {HASHED, "moe"}.issuperset(map(str, kinds))
    if not known:
        raise Unsupported(
            f"config.json says mlp_layer_types {shown(kinds)}, {HASHED!r} or 'moe' is needed for each of num_hidden_layers: {AGAIN}"
        )
    scores = given.get("scoring_func", SCORES[0])
    if scores not in SCORES:
        raise Unsupported(f"scoring_func {shown(scores)} is not supported: for this family the decoder has {' and '.join(SCORES)}")
    size = given["moe_intermediate_size"]
    usual = Mixture(
        experts=given["n_routed_experts"],
        chosen=given["num_experts_per_tok"],
        size=size,
        normalized=True,
        scores=scores,
        correction="gate.e_score_correction_bias",
        factor=number(given, "routed_scaling_factor", 1.5),
        shared=size,
        shared_name="shared_experts",
        shared_gate="",
        limit=limit,
        shared_limit=limit,
        form="before",
        quantization=_experts_bits(given, base.quantization),
    )
    told = replace(usual, hashed=True, correction="")
    return tuple(told if kind == HASHED else usual for kind in kinds[:layers])


def _experts_bits(given: Config, beside: Quantization | None) -> Quantization | None:
    """The experts' quantization, where it differs from that of other weights. NVIDIA's checkpoints have a field of their own."""
    named, theirs = _said_of_experts(given, "expert_dtype"), _said_of_experts(given, "moe_quant_algo")
    if beside is None or (theirs is None and named in (None, "fp8")):
        return None
    if theirs not in (None, "NVFP4") or named not in (None, "fp4", "fp8") or beside.method != "fp8":
        name, value = ("expert_dtype", named) if theirs in (None, "NVFP4") else ("moe_quant_algo", theirs)
        raise Unsupported(
            f"{name} {shown(value)} is not supported beside {beside.method}: the decoder has fp4 and NVFP4 beside fp8"
        )
    return NVFP4_EXPERTS if theirs else FP4_EXPERTS


def _said_of_experts(given: Config, name: str) -> Any:
    """What config.json says, which may have the field within its quantization_config; None: nothing."""
    inner = given.get("quantization_config")
    named = inner.get(name) if isinstance(inner, dict) else None
    return given.get(name) if named is None else named


def _experts_beside(how: Quantization | None, given: Config) -> Quantization | None:
    """The quantization with that of experts. The first config.json of V4 Flash does not say theirs: then it is seen in the
    checkpoint, and the plan counts with more bits."""
    unsaid = how is not None and how.method == "fp8" and _said_of_experts(given, "expert_dtype") is None
    experts = _experts_bits(given, how) or (FP4_EXPERTS if unsaid else None)
    return replace(how, others=(experts,)) if how and experts else how


DEEPSEEK_V4_ONES = {"DeepseekV4ForCausalLM": _deepseek_v4}
