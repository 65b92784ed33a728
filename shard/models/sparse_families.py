"""Model families with mixtures of experts. A new family is a new entry in `SPARSE`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .dense_families import BEHIND, MISTRAL, OLMO, ernie, exaone4, granite, hunyuan, qwen3, with_thetas
from .fields import AGAIN, BLOCKS, FULL, SIZES, SLIDING, Config, expect, number, shown, whole
from .parts import biased, cap, common, layer_kinds, layers_of, uniform_windows, windows_of
from .ropes import rope, ropes_by_kind, rotary_size, with_only_rope, with_rope
from .shape import PLAIN, Shape, Unsupported
from .traits import Gates, HeadIndex, Mixture, Quantization

# transformers' defaults, which some checkpoints rely on.
AFMOE: Config = {
    "head_dim": 128,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1408,
    "num_dense_layers": 1,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "num_shared_experts": 2,
    "global_attn_every_n_layers": 4,
    "sliding_window": 1024,
}
AROUND_AFMOE = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
FLEX_OLMO: Config = {"max_position_embeddings": 4096, "rope_theta": 5e5, "num_experts": 7, "num_experts_per_tok": 5}
GLM_MOE: Config = {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
MINIMAX: Config = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196_608, "rope_theta": 5e6}
MINIMAX_3: Config = MINIMAX | {
    "num_key_value_heads": 4,
    "max_position_embeddings": 524_288,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "intermediate_size": 3072,
    "dense_intermediate_size": 12_288,
    "shared_intermediate_size": 3072,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_block_size": 128,
    "index_topk_blocks": 16,
    "index_local_blocks": 1,
}
SPARSE_ATTENTION = {  # its names of these fields in sparse_attention_config
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
MINIMAX_INDEX = "self_attn.index_", "self_attn.indexer."  # the prefix of its tensor names, and that of transformers' modules
GPT_OSS: Config = {
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "swiglu_limit": 7.0,
    "rope_theta": 150_000.0,
    "attention_bias": True,
}
GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
EXAONE_MOE: Config = {
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
SOLAR: Config = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "moe_intermediate_size": 1280,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
}
HY_3: Config = {
    "rope_theta": 11_158_840.0,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
MELLUM: Config = {
    "num_local_experts": 64,
    "moe_intermediate_size": 896,
    "norm_topk_prob": True,
    "max_position_embeddings": 131_072,
    "sliding_window": 1024,
    "num_key_value_heads": 4,
}
GRANITE_MOE: Config = {"num_local_experts": 8, "num_experts_per_tok": 2}
PLAIN_MLP, EXPERTS = "dense", "sparse"  # values of `mlp_layer_types`
MOE_LAYERS = {"start_index": 1, "end_index": -1, "interval": 1}  # ERNIE's fields, moe_layer_*, and defaults
STEEP = 1.702  # alpha of gpt-oss's gates


def _mixtral(config: Config) -> Shape:
    """Mixtral: experts in every layer."""
    base = common(MISTRAL | {"rms_norm_eps": 1e-5, "rope_theta": 1e6} | config)
    mixture = Mixture(
        experts=config.get("num_local_experts", 8),
        chosen=config.get("num_experts_per_tok", 2),
        size=base.intermediate,
        normalized=True,
        name="block_sparse_moe",
        names=("w1", "w3", "w2"),
    )
    return replace(base, mixtures=(mixture,) * base.layers, windows=uniform_windows(config, base.layers))


def _qwen3_moe(config: Config) -> Shape:
    """Qwen 3 MoE: experts in every layer, or in some. All layers have a sliding window, if any."""
    size = config["hidden_size"] // config["num_attention_heads"]  # of a head, which need not be said, unlike in Qwen 3
    base = qwen3({"num_key_value_heads": 4, "head_dim": size} | config | {"max_window_layers": 0})
    experts: int = config.get("num_experts") or config.get("num_local_experts", 128)
    mixture = Mixture(
        experts=experts,
        chosen=config.get("num_experts_per_tok", 8),
        size=config.get("moe_intermediate_size", 768),
        normalized=config.get("norm_topk_prob", False),
    )
    return mixed(base, config, mixture)


def _olmoe(config: Config) -> Shape:
    """OLMoE: experts in every layer, and one norm over all queries of a token, and over all its keys (Muennighoff et al. 2024,
    arXiv:2409.02060)."""
    base = _olmos_experts(OLMO | {"max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8} | config)
    return replace(base, qkv_limit=cap(config, "clip_qkv", None))


def _flex_olmo(config: Config) -> Shape:
    """FlexOlmo: OLMo 2 with experts in every layer (Shi et al. 2025, arXiv:2507.07024)."""
    return replace(_olmos_experts(FLEX_OLMO | config), norms=BEHIND)


def _olmos_experts(given: Config) -> Shape:
    base = biased(common(given), given)
    mixture = Mixture(
        experts=given["num_experts"],
        chosen=given["num_experts_per_tok"],
        size=base.intermediate,
        normalized=given.get("norm_topk_prob", False),
    )
    return replace(base, mixtures=(mixture,) * base.layers, joint_qk_norm=True)


def _glm4_moe(config: Config) -> Shape:
    """GLM 4.5 and later. Half of each head rotates."""
    bias = config.get("attention_bias", False)
    base = common(GLM_MOE | config)
    turned, norms = rotary_size(config, base.head_size, 0.5), config.get("use_qk_norm", False)
    base = replace(base, qkv_bias=bias, qk_norm=norms, rotary_size=turned)
    return scored(base, {"first_k_dense_replace": 1, "norm_topk_prob": True, "n_shared_experts": 1} | config)


def _dots1(config: Config) -> Shape:
    """dots.llm1: Qwen 3 with DeepSeek V3's experts."""
    base = biased(common({"num_key_value_heads": 32} | config), config)
    last = config.get("max_window_layers", 62)
    slides = last is not None and config.get("sliding_window", 4096)
    kinds = layer_kinds(config, base.layers, lambda layer: slides and layer >= last)
    return scored(replace(base, qk_norm=True, windows=windows_of(config, kinds)), config)


def scored(base: Shape, config: Config) -> Shape:
    """The shape with DeepSeek V3's experts after the first layers: sigmoid scores with a correction bias, and a shared expert
    (DeepSeek-AI 2024, arXiv:2412.19437)."""
    size, experts = config.get("moe_intermediate_size", 1408), config.get("n_routed_experts", 128)
    groups, groups_chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    if experts % groups or not groups <= experts // 2 or groups_chosen > groups:
        raise Unsupported(
            f"config.json says n_group {groups} and topk_group {groups_chosen}, of {experts} experts, of which each group has as "
            f"many, and two at least: {AGAIN}"
        )
    mixture = Mixture(
        experts=experts,
        chosen=config.get("num_experts_per_tok", 8),
        size=size,
        normalized=config.get("norm_topk_prob", False),
        scores="sigmoid",
        correction="gate.e_score_correction_bias",
        groups=groups,
        groups_chosen=groups_chosen,
        factor=number(config, "routed_scaling_factor", 1.0),
        shared=size * (config.get("n_shared_experts") or 0),
        shared_name="shared_experts",
        shared_gate="",
    )
    dense = config.get("first_k_dense_replace") or 0
    return replace(base, mixtures=tuple(mixture if layer >= dense else None for layer in range(base.layers)))


def scored_by_kinds(base: Shape, given: Config) -> Shape:
    """The same, where config.json may say which layers have experts."""
    base, kinds = scored(base, given), given.get("mlp_layer_types")
    if kinds is None:
        return base
    return replace(base, mixtures=by_kinds(kinds, scored(base, given | {"first_k_dense_replace": 0}).mixtures[0], base.layers))


def by_kinds(kinds: Any, mixture: Mixture | None, layers: int) -> tuple[Mixture | None, ...]:
    """The mixture for each layer that has experts by `mlp_layer_types`."""
    if not isinstance(kinds, list) or len(kinds) != layers or not {PLAIN_MLP, EXPERTS}.issuperset(map(str, kinds)):
        raise Unsupported(
            f"config.json says mlp_layer_types {shown(kinds)}, {PLAIN_MLP!r} or {EXPERTS!r} is needed for each of "
            f"num_hidden_layers: {AGAIN}"
        )
    return tuple(mixture if kind == EXPERTS else None for kind in kinds)


def with_experts(base: Shape, **fields: Any) -> Shape:
    """The shape with these fields of all its mixtures replaced."""
    return replace(base, mixtures=tuple(mixture and replace(mixture, **fields) for mixture in base.mixtures))


def _exaone_moe(config: Config) -> Shape:
    """K-EXAONE: EXAONE 4's attention with pre-norm, and experts after the first layer."""
    fields = {"n_routed_experts": config.get("num_experts", 64), "n_shared_experts": config.get("num_shared_experts", 1)}
    found = scored_by_kinds(replace(exaone4(config), norms=PLAIN), EXAONE_MOE | config | fields)
    return with_experts(found, correction="e_score_correction_bias")


def _afmoe(config: Config) -> Shape:
    """Arcee's Trinity: gated attention, norms before and after attention and MLP, and experts after the first layers. Layers with
    full attention have no rotary embedding."""
    expect(config, attention_bias=False, route_norm=True, score_func="sigmoid", n_group=1)
    given = AFMOE | config
    base, every = common(given), given["global_attn_every_n_layers"]
    kinds = layer_kinds(given, base.layers, lambda layer: (layer + 1) % every > 0)
    fields = {
        "n_routed_experts": given["num_experts"],
        "n_shared_experts": given["num_shared_experts"],
        "norm_topk_prob": True,
        "routed_scaling_factor": number(given, "route_scale", 1.0),
        "first_k_dense_replace": given["num_dense_layers"],
    }
    found = with_experts(scored(base, given | fields), router="router.gate", correction="expert_bias")
    return replace(
        found,
        gates=Gates(name="gate_proj"),
        qk_norm=True,
        norms=AROUND_AFMOE,
        windows=windows_of(given, kinds),
        nope_layers=layers_of(kinds, FULL),
        embedding_factor=base.hidden**0.5 if given.get("mup_enabled") else 1.0,
    )


def _solar_open(config: Config) -> Shape:
    """Solar Open: GLM 4.5's experts in every layer, and Llama's attention."""
    size = {"intermediate_size": config.get("moe_intermediate_size", SOLAR["moe_intermediate_size"])}
    given = SOLAR | config | size
    return replace(scored(common(given), given | {"first_k_dense_replace": 0}), qkv_bias=given.get("attention_bias", False))


def _hy_v3(config: Config) -> Shape:
    """Tencent's Hy 3: Qwen 3's attention, and experts after the first layer."""
    shared = config.get("num_shared_experts", 1)
    expect(config, mlp_bias=False)
    base = replace(biased(common(HY_3 | config), config), qk_norm=True)
    fields = {"n_routed_experts": config.get("num_experts", 192), "n_shared_experts": shared}
    factor = {"routed_scaling_factor": number(config, "router_scaling_factor", 2.826)}
    found = scored_by_kinds(base, HY_3 | config | fields | factor)
    found = replace(found, modules=(("mlp.shared_mlp.", "mlp.shared_experts."),))
    return with_experts(found, router="router.gate", correction="expert_bias", shared_name="shared_mlp")


def _hunyuan_moe(config: Config) -> Shape:
    """Hunyuan A13B: experts in every layer, with a shared expert. Layers may differ in the number of experts per token."""
    base = hunyuan(config)
    counts = config.get("moe_topk", config.get("num_experts_per_tok", 1))
    counts = counts if isinstance(counts, list) else [counts] * base.layers
    if len(counts) < base.layers or not all(type(count) is int and count > 0 for count in counts):
        raise Unsupported(
            f"config.json says moe_topk {shown(config.get('moe_topk'))}, a number above 0 is needed, or one for each layer: {AGAIN}"
        )
    for name, only in (("moe_intermediate_size", base.intermediate), ("num_shared_expert", 1)):
        said = config.get(name)
        if said is not None and any(value != only for value in (said if isinstance(said, list) else [said])):
            raise Unsupported(f"{name} {shown(said)} is not supported: for this family the decoder has {only} in each layer")
    mixture = Mixture(
        experts=config.get("num_experts", 1),
        chosen=1,
        size=base.intermediate,
        normalized=True,
        shared=base.intermediate,
        shared_name="shared_mlp",
        shared_gate="",
        precise=True,
        router="gate.wg",
    )
    return replace(base, mixtures=tuple(replace(mixture, chosen=count) for count in counts[: base.layers]))


def _mellum(config: Config) -> Shape:
    """Mellum: Qwen 3's experts; layers with a sliding window have another rotary embedding."""
    full, local = ropes_by_kind(config, 5e5, 1e4)
    given = with_only_rope(MELLUM | config, full)
    base = _qwen3_moe({name: value for name, value in given.items() if name not in ("layer_types", "sliding_window")})
    kinds, own = layer_kinds(given, base.layers, lambda layer: False), given.get("mlp_layer_types")
    local_rope = rope(with_only_rope(given, local)) if SLIDING in kinds else None
    mixtures = by_kinds(own, base.mixtures[0], base.layers) if own is not None else base.mixtures
    return replace(base, windows=windows_of(given, kinds), local_rope=local_rope, mixtures=mixtures)


def _minimax_m2(config: Config) -> Shape:
    """MiniMax M2: experts in every layer; one norm over all queries of a token, and over all its keys. Partial rotary embedding."""
    base = common(MINIMAX | config)
    part = {"partial_rotary_factor": config["rotary_dim"] / base.head_size} if "rotary_dim" in config else {}
    mixture = Mixture(
        experts=config.get("num_local_experts", 256),
        chosen=config.get("num_experts_per_tok", 8),
        size=base.intermediate,
        normalized=True,
        scores="sigmoid",
        correction="e_score_correction_bias",
        name="block_sparse_moe",
        names=("w1", "w3", "w2"),
    )
    turned = rotary_size(part | config, base.head_size)
    return replace(base, mixtures=(mixture,) * base.layers, joint_qk_norm=True, rotary_size=turned)


def _minimax_m3(config: Config) -> Shape:
    """MiniMax M3: experts after the first layers, with a shared expert; gates of experts and MLPs are clamped. In some layers an
    index chooses blocks of tokens."""
    sparse = config.get("sparse_attention_config") or {}
    if not isinstance(sparse, dict):
        raise Unsupported(f"config.json says sparse_attention_config {shown(sparse)}, an object is needed: {AGAIN}")
    given = MINIMAX_3 | config | {ours: sparse[theirs] for ours, theirs in SPARSE_ATTENTION.items() if theirs in sparse}
    for name in SPARSE_ATTENTION:
        whole(name, given[name], 1, SIZES[name])
    expect(given, swiglu_alpha=STEEP)
    layers = given["num_hidden_layers"]
    base = common({name: value for name, value in given.items() if name != "layer_types"} | {"hidden_act": "silu"})
    turned = rotary_size(given, base.head_size)
    if "rotary_dim" in config and turned != min(given["rotary_dim"], base.head_size):
        raise Unsupported(
            f"config.json says rotary_dim {shown(given['rotary_dim'])}, and by partial_rotary_factor {turned} features of a head "
            f"turn, as in transformers: say {given['rotary_dim'] / base.head_size:g} there if the former is meant"
        )
    limit = number(given, "swiglu_limit", 7.0)
    mixture = Mixture(
        experts=given["num_local_experts"],
        chosen=given["num_experts_per_tok"],
        size=given["intermediate_size"],
        normalized=True,
        scores="sigmoid",
        correction="e_score_correction_bias",
        factor=number(given, "routed_scaling_factor", 2.0),
        shared=given["shared_intermediate_size"],
        shared_name="shared_experts",
        shared_gate="",
        limit=limit,
        shared_limit=limit,
        name="block_sparse_moe",
        names=("w1", "w3", "w2"),
    )
    experts = _by_flags(given, "mlp_layer_types", given.get("moe_layer_freq"), (PLAIN_MLP, EXPERTS), EXPERTS, layers)
    chosen = _by_flags(given, "layer_types", sparse.get("sparse_attention_freq"), (FULL, BLOCKS), FULL, layers)
    return replace(
        base,
        intermediate=given["dense_intermediate_size"],
        mixtures=tuple(mixture if kind == EXPERTS else None for kind in experts),
        mlp_limits=(limit,) * base.layers,
        blocks=_blocks_of(given, base, layers_of(chosen, BLOCKS)),
        aliases=(MINIMAX_INDEX,),
        modules=(("block_sparse_moe.", "mlp."), MINIMAX_INDEX),
        qk_norm=True,
        centered_norms=True,
        rotary_size=turned,
    )


def _by_flags(config: Config, name: str, flags: Any, kinds: tuple[str, str], usual: str, layers: int) -> list[str]:
    """The kind of each layer, from a list of kinds, or of flags, which select the second kind."""
    found = config.get(name)
    if found is None and isinstance(flags, list):
        found = [kinds[bool(flag)] for flag in flags]
    found = [usual] * layers if found is None and flags is None else found
    if not isinstance(found, list) or len(found) != layers or not set(kinds).issuperset(map(str, found)):
        raise Unsupported(
            f"config.json says {name} {shown(found if found is not None else flags)}, {kinds[0]!r} or {kinds[1]!r} is needed for "
            f"each of num_hidden_layers: {AGAIN}"
        )
    return found


def _blocks_of(given: Config, base: Shape, layers: frozenset[int]) -> HeadIndex | None:
    if not layers:
        return None
    heads, size, local = given["index_n_heads"], given["index_head_dim"], given["index_local_blocks"]
    if heads != base.kv_heads or size != base.head_size or not 1 <= local <= given["index_topk_blocks"]:
        raise Unsupported(
            f"config.json says index_n_heads {heads}, index_head_dim {size} and index_local_blocks {local}: the decoder has as "
            "many heads of an index as key heads, of the same size, and chooses one of the last blocks at least"
        )
    block = given["index_block_size"]
    most = given["index_topk_blocks"] * block
    return HeadIndex(layers=layers, heads=heads, size=size, most=most, block=block, local=local)


def _ernie_moe(config: Config) -> Shape:
    """ERNIE 4.5: experts in some layers, with a shared expert."""
    base = ernie({"num_key_value_heads": 4, "head_dim": None} | config)
    size = config.get("moe_intermediate_size", 1536)
    mixture = Mixture(
        experts=config.get("moe_num_experts", 64),
        chosen=config.get("moe_k", 6),
        size=size,
        normalized=True,
        correction="moe_statics.e_score_correction_bias",
        shared=size * config.get("moe_num_shared_experts", 2),
        shared_name="shared_experts",
        shared_gate="",
    )
    first, last, step = (config.get(f"moe_layer_{name}", usual) for name, usual in MOE_LAYERS.items())
    last = base.layers - 1 if last == -1 else last
    sparse = [(layer + 1) % step == 0 and first <= layer <= last for layer in range(base.layers)]
    return replace(base, mixtures=tuple(mixture if each else None for each in sparse))


# transformers' defaults.
QWEN2_EXPERTS: Config = {
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}


def _qwen2_moe(config: Config) -> Shape:
    """Qwen 2 MoE: experts with a shared expert. Every other one of the first layers has a sliding window, if any."""
    base = common({"num_key_value_heads": 16, "max_position_embeddings": 32_768} | config)
    mixture = one_for_all(QWEN2_EXPERTS | config, config.get("norm_topk_prob", False))
    last = config.get("max_window_layers", 28)
    if last is None:
        raise Unsupported(f"config.json says max_window_layers null, a number of layers is needed: {AGAIN}")
    slides = bool(config.get("use_sliding_window"))
    kinds = layer_kinds(config, base.layers, lambda layer: slides and layer < last and layer % 2 == 0)
    windows = windows_of(config if slides else {"sliding_window": 0}, kinds)
    return replace(mixed(base, config, mixture), qkv_bias=config.get("qkv_bias", True), windows=windows)


def one_for_all(config: Config, normalized: bool) -> Mixture:
    """Qwen's experts, with a gated shared expert."""
    return Mixture(
        experts=config["num_experts"],
        chosen=config["num_experts_per_tok"],
        size=config["moe_intermediate_size"],
        normalized=normalized,
        shared=config["shared_expert_intermediate_size"],
    )


def mixed(base: Shape, config: Config, mixture: Mixture) -> Shape:
    """The shape with experts in every layer, or in some."""
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise Unsupported(f"config.json says mlp_only_layers {shown(dense)}, a list of numbers is needed: {AGAIN}")
    sparse = [layer not in dense and (layer + 1) % step == 0 for layer in range(base.layers)]
    return replace(base, mixtures=tuple(mixture if each else None for each in sparse))


def _granite_moe(config: Config) -> Shape:
    """Granite 3's small models: experts in every layer."""
    given = GRANITE_MOE | config
    return with_granites_experts(granite(given), given, shared=0)


def _granite_moe_shared(config: Config) -> Shape:
    """Granite MoE with a shared expert in each layer, if any."""
    given = GRANITE_MOE | config
    return with_granites_experts(granite(given), given, shared=given.get("shared_intermediate_size", 0))


def _granite_moe_swa(config: Config) -> Shape:
    """The same with full attention in one layer of four, and attention sinks."""
    given = GRANITE_MOE | {"shared_intermediate_size": 0, "sliding_window": 128} | config
    return with_thetas(_granite_moe_shared(given), given)


def with_granites_experts(base: Shape, given: Config, shared: int) -> Shape:
    """The shape with experts in every layer, if there are any; shared: intermediate features of the shared expert, 0: there is
    none."""
    mixture = Mixture(
        experts=given["num_local_experts"],
        chosen=given["num_experts_per_tok"],
        size=given["intermediate_size"],
        normalized=True,
        shared=shared,
        shared_name="shared_mlp",
        shared_gate="",
        stacked=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        name="",
        router="block_sparse_moe.router.layer",
    )
    if mixture.experts and not mixture.chosen:
        raise Unsupported(f"config.json says num_experts_per_tok 0, of {mixture.experts} experts: {AGAIN}")
    return replace(
        base,
        mixtures=(mixture if mixture.experts else None,) * base.layers,
        mlp_name="shared_mlp",
        mlp_parts=("input_linear", "", "", "output_linear"),
        joined=("input_linear",),
    )


def _gpt_oss(config: Config) -> Shape:
    """gpt-oss (OpenAI 2025, arXiv:2508.10925): a sliding window in every other layer, attention sinks; experts with biases, clamped
    gates, and MXFP4 weights."""
    given = with_rope(GPT_OSS | config, GPT_OSS_ROPE)
    stored, few = config.get("quantization_config"), None
    if isinstance(stored, dict) and stored.get("quant_method") == "mxfp4":
        del given["quantization_config"]
        few = Quantization(method="mxfp4", kind="fp4", group=32)
    base = biased(common(given), given)
    alpha = number(given, "swiglu_alpha", STEEP)
    if alpha != STEEP:
        raise Unsupported(f"config.json says swiglu_alpha {alpha:g}, which is not supported: the decoder has {STEEP}")
    mixture = Mixture(
        experts=given["num_local_experts"],
        chosen=given["num_experts_per_tok"],
        size=base.intermediate,
        normalized=True,
        quantization=few,
        biased=True,
        limit=number(given, "swiglu_limit"),
        interleaved=True,
        router="router",
    )
    windows = windows_of(given, layer_kinds(given, base.layers, lambda layer: layer % 2 == 0))
    return replace(base, windows=windows, mixtures=(mixture,) * base.layers, sinks="sinks")


SPARSE: dict[str, Callable[[Config], Shape]] = {
    "AfmoeForCausalLM": _afmoe,
    "Dots1ForCausalLM": _dots1,
    "Ernie4_5_MoeForCausalLM": _ernie_moe,
    "ExaoneMoeForCausalLM": _exaone_moe,
    "FlexOlmoForCausalLM": _flex_olmo,
    "Glm4MoeForCausalLM": _glm4_moe,
    "GptOssForCausalLM": _gpt_oss,
    "GraniteMoeForCausalLM": _granite_moe,
    "GraniteMoeSWAForCausalLM": _granite_moe_swa,
    "GraniteMoeSharedForCausalLM": _granite_moe_shared,
    "HYV3ForCausalLM": _hy_v3,
    "HunYuanMoEV1ForCausalLM": _hunyuan_moe,
    "MellumForCausalLM": _mellum,
    "MiniMaxM2ForCausalLM": _minimax_m2,
    "MiniMaxM3VLForCausalLM": _minimax_m3,
    "MixtralForCausalLM": _mixtral,
    "OlmoeForCausalLM": _olmoe,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "SolarOpenForCausalLM": _solar_open,
}
