"""Hybrid model families: linear attention, state spaces (Mamba-2) or short convolutions in some layers, attention in the others. A
new family is a new entry in `HYBRID`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from .dense_families import BEHIND, granite, llama
from .fields import AGAIN, FULL, LINEAR, SHORT, SLIDING, Config, expect, number, said, shown
from .parts import biased, common, layer_kinds, layers_of, windows_of
from .recurrent_shapes import LinearAttentionShape, ShortConvolutionShape, StateSpaceShape
from .ropes import ROPES, rope_of_kind, ropes_by_kind, rotary_size, with_rope
from .shape import PLAIN, Shape, Unsupported
from .sparse_families import GRANITE_MOE, mixed, one_for_all, with_granites_experts
from .traits import Gates, Mixture

# transformers' defaults, which some checkpoints rely on.
QWEN: Config = {
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
EXPERTS: Config = {"num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
QWEN3_NEXT: Config = QWEN | EXPERTS | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True}
QWEN3_5: Config = QWEN | {"num_key_value_heads": 4}
QWEN3_5_MOE: Config = QWEN | EXPERTS | {"num_experts": 256, "num_experts_per_tok": 8}
MAMBA: Config = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2}
GRANITE: Config = MAMBA | GRANITE_MOE | {"shared_intermediate_size": 1024}
BAMBA: Config = MAMBA | {"num_key_value_heads": 8, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5}
FALCON_H1: Config = MAMBA | {
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 1024,
}
LFM2: Config = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "conv_L_cache": 3,
}
LFM3: Config = {
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_L_cache": 7,
    "sliding_window": 256,
}
LFM3_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
AROUND_LFM3 = ("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")
LFM2_MOE: Config = {
    "num_attention_heads": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
}
OLMO_HYBRID: Config = {"max_position_embeddings": 65_536, "linear_conv_kernel_dim": 4}
# transformers' names of norms, and the hub's, which transformers also writes, even for layers with attention.
OLMO_HYBRID_NAMES = (("input_layernorm", "attention_layer_norm"), ("post_attention_layernorm", "feedforward_layer_norm"))
ENDLESS = 1e300  # from this number on there is no limit
# Fields that Qwen 3.5's config.json may have and transformers does not read.
ALWAYS = {"attn_output_gate": True, "norm_topk_prob": True}


def _qwen3_next(config: Config) -> Shape:
    """Qwen3-Next: experts in every layer, or in some, with a shared expert."""
    given = QWEN3_NEXT | config
    base = replace(hybrid(given, 2), joined=("in_proj_qkvz", "in_proj_ba"))
    return mixed(base, given, one_for_all(given, given["norm_topk_prob"]))


def _qwen3_5(config: Config) -> Shape:
    expect(config, **ALWAYS)
    return replace(hybrid(QWEN3_5 | config, 4), joined=("in_proj_qkv",))


def _qwen3_5_moe(config: Config) -> Shape:
    """Qwen 3.5 MoE: experts in every layer."""
    expect(config, **ALWAYS)
    given = QWEN3_5_MOE | config
    base = hybrid(given | {"intermediate_size": given["moe_intermediate_size"]}, 4)
    return replace(base, joined=("in_proj_qkv",), mixtures=(one_for_all(given, normalized=True),) * base.layers)


def hybrid(config: Config, joint: int, turned: float = 0.25) -> Shape:
    """Qwen's hybrid: one layer of `full_attention_interval` has attention, with gated output and partial rotary embedding, `turned`
    of each head by default; joint: see `LinearAttentionShape`."""
    base = biased(common(config), config)
    layers = linear_layers(
        layer_kinds(config, base.layers, lambda layer: (layer + 1) % config["full_attention_interval"] > 0, LINEAR)
    )
    return replace(
        base,
        recurrent=_linear(config, layers, joint) if layers else None,
        gates=Gates(),
        qk_norm=True,
        centered_norms=True,
        rotary_size=rotary_size(config, base.head_size, turned),
    )


def _olmo_hybrid(config: Config) -> Shape:
    """OLMo Hybrid: OLMo 3's attention in one layer of four, without sliding windows, and linear attention with pre-norm in the
    others. Its theta may be null: then there is no rotary embedding."""
    given = OLMO_HYBRID | config
    values: Any = next((given[name] for name in ROPES if given.get(name)), {})
    still = isinstance(values, dict) and values.get("rope_theta", given.get("rope_theta", 0)) is None
    base = common(given | dict.fromkeys(ROPES) if still else given)
    usual = [FULL if layer % 4 == 3 else LINEAR for layer in range(base.layers)]
    kinds = given.get("layer_types") or (usual if FULL in usual else [*usual[1:], FULL])
    heads = {f"linear_num_{part}_heads": given.get(f"linear_num_{part}_heads") or base.heads for part in ("key", "value")}
    key_size = given.get("linear_key_head_dim") or int(0.75 * base.hidden / heads["linear_num_key_heads"])
    sizes = {"linear_key_head_dim": key_size, "linear_value_head_dim": given.get("linear_value_head_dim") or 2 * key_size}
    layers, strongest = linear_layers(kinds), 2.0 if given.get("linear_allow_neg_eigval", True) else 1.0
    return replace(
        biased(base, given),
        recurrent=replace(_linear(given | heads | sizes, layers, 6), apart=True, strongest=strongest) if layers else None,
        joint_qk_norm=True,
        norms=BEHIND,
        recurrent_norms=PLAIN,
        nope_layers=frozenset(range(base.layers)) if still else frozenset(),
        aliases=OLMO_HYBRID_NAMES,
    )


def linear_layers(kinds: Sequence[Any], own: str = LINEAR) -> frozenset[int]:
    """The layers of this kind, which have no attention. Raises Unsupported if all are."""
    layers = layers_of(kinds, own)
    if len(layers) == len(kinds):
        named = own.replace("_", " ")
        raise Unsupported(f"config.json means layers of {named} alone, the decoder needs one that attends to all: {AGAIN}")
    return layers


def _linear(config: Config, layers: frozenset[int], joint: int) -> LinearAttentionShape:
    found = LinearAttentionShape(
        layers=layers,
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_size=config["linear_key_head_dim"],
        value_size=config["linear_value_head_dim"],
        width=config["linear_conv_kernel_dim"],
        joint=joint,
    )
    if found.value_heads % found.key_heads:
        raise Unsupported(
            f"config.json says linear_num_value_heads {found.value_heads} and linear_num_key_heads {found.key_heads}, of which the "
            f"first must be a multiple: {AGAIN}"
        )
    return found


def _granite_hybrid(config: Config) -> Shape:
    """Granite 4: state spaces in most layers, or in none; a shared expert, with routed experts or alone."""
    given, turning = GRANITE | config, config.get("position_embedding_type")
    if turning not in (None, "nope", "rope"):
        raise Unsupported(
            f"position_embedding_type {shown(turning)} is not supported: for this family the decoder has nope and rope"
        )
    base = granite(given | {"intermediate_size": given["shared_intermediate_size"]})
    layers = linear_layers(layer_kinds(config, base.layers, lambda layer: True, LINEAR))
    return replace(
        with_granites_experts(base, given, shared=base.intermediate),
        recurrent=state_spaces(given, layers, given["mamba_expand"] * given["hidden_size"]) if layers else None,
        nope_layers=frozenset(range(0 if turning == "rope" else base.layers)),
    )


def _bamba(config: Config) -> Shape:
    """Bamba: state spaces in all layers but those that config.json lists, and MLPs. Half of each head rotates: transformers reads
    the fraction from rope_parameters and no other field."""
    given = BAMBA | config | {"partial_rotary_factor": 0.5}
    base = llama(given)
    attending = config.get("attn_layer_indices") or []
    if not isinstance(attending, list) or not all(type(layer) is int for layer in attending):
        raise Unsupported(f"config.json says attn_layer_indices {shown(attending)}, a list of numbers is needed: {AGAIN}")
    layers = linear_layers([FULL if layer in attending else LINEAR for layer in range(base.layers)])
    return replace(
        base,
        recurrent=state_spaces(given, layers, given["mamba_expand"] * given["hidden_size"]) if layers else None,
        rotary_size=rotary_size(given, base.head_size),
        norms=("input_layernorm", "", "pre_ff_layernorm", ""),
        last_norm="final_layernorm",
        mlp_name="feed_forward",
    )


def state_spaces(config: Config, layers: frozenset[int], features: int) -> StateSpaceShape:
    """Mamba-2 (Dao and Gu 2024, arXiv:2405.21060). features: of the values of all heads."""
    heads, groups = config["mamba_n_heads"], config["mamba_n_groups"]
    size = config.get("mamba_d_head", "auto")
    if features % heads or size not in ("auto", features // heads):
        raise Unsupported(
            f"config.json says mamba_n_heads {heads} and mamba_d_head {shown(size)}, and by mamba_expand and hidden_size there "
            f"are {features} features: {AGAIN}"
        )
    if heads % groups:
        raise Unsupported(
            f"config.json says mamba_n_heads {heads} and mamba_n_groups {groups}, of which the first must be a multiple: {AGAIN}"
        )
    expect(config, mamba_conv_bias=True, mamba_proj_bias=False)
    return StateSpaceShape(
        layers=layers,
        key_heads=groups,
        value_heads=heads,
        key_size=config["mamba_d_state"],
        value_size=features // heads,
        width=config["mamba_d_conv"],
        limits=limits(config.get("time_step_limit")),
    )


def limits(given: Any) -> tuple[float, float]:
    """The limits of time steps; null: none. transformers 5 writes infinity as an object, and Nemotron 3 Ultra has 1e308."""
    ends = [0.0, inf] if given is None else given
    if isinstance(ends, list) and len(ends) == 2:
        least, most = (end.get("__float__") if isinstance(end, dict) else end for end in ends)
        endless = most == "Infinity" or (isinstance(most, float) and most >= ENDLESS)
        if least == 0 and endless:
            return 0.0, inf
        name = "time_step_limit"
        low = number({name: least}, name) if least else 0.0
        high = inf if endless else number({name: most}, name)
        if low < high:
            return low, high
    raise Unsupported(f"config.json says time_step_limit {shown(given)}, two numbers are needed, the least and the most: {AGAIN}")


def _lfm2(config: Config) -> Shape:
    """LFM2: short convolutions in most layers. The MLP's size may be a number of which two thirds are meant."""
    layers, attending = config["num_hidden_layers"], config.get("full_attn_idxs")
    if attending is not None and not (isinstance(attending, list) and all(type(layer) is int for layer in attending)):
        raise Unsupported(f"config.json says full_attn_idxs {shown(attending)}, a list of numbers is needed: {AGAIN}")
    size: int = config.get("block_ff_dim") or config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim", True):
        size = int(2 * size / 3)
        if config.get("block_ffn_dim_multiplier", 1.0) is not None:
            unit: int = config.get("block_multiple_of", 256)
            size = -(-int(number(config, "block_ffn_dim_multiplier", 1.0) * size) // unit) * unit
    kinds = layer_kinds(config, layers, lambda layer: attending is not None and layer not in attending, SHORT)
    return _short(config | {"intermediate_size": size}, kinds)


def _short(config: Config, kinds: list[Any]) -> Shape:
    """What LFM2 and 3 have in common: short convolutions in the layers of this kind, and attention with norms of query and key
    heads in the others."""
    given = LFM2 | config
    tied, epsilon = given.get("tie_embedding", given["tie_word_embeddings"]), number(given, "norm_eps", most=1.0)
    base = common(given | {"tie_word_embeddings": tied, "rms_norm_eps": epsilon, "hidden_act": "silu"})
    layers, biased = linear_layers(kinds, SHORT), given.get("conv_bias", False)
    return replace(
        base,
        recurrent=ShortConvolutionShape(layers=layers, width=given["conv_L_cache"], size=base.hidden, biased=biased)
        if layers
        else None,
        qk_norm=True,
        attention_parts=("q_layernorm", "k_layernorm", "out_proj"),
        norms=("operator_norm", "", "ffn_norm", ""),
        last_norm="embedding_norm",
        mlp_name="feed_forward",
        mlp_parts=("", "w1", "w3", "w2"),
        joined=("in_proj",),
    )


def _lfm3(config: Config) -> Shape:
    """LFM3: sliding-window attention in one layer of four, and full attention in another, with gated heads; norms before and after
    all parts."""
    given = LFM3 | config
    layers = given["num_hidden_layers"]
    usual = [FULL if layer % 4 == 2 else SHORT if layer % 4 or not layer else SLIDING for layer in range(layers)]
    kinds = given.get("layer_types") or usual
    full, local = ropes_by_kind(with_rope(said(given), LFM3_ROPES), 1e6, 1e4)
    base = replace(biased(_short(given | {"rope_parameters": None}, kinds), given), rope=rope_of_kind(full))
    return replace(
        base,
        local_rope=rope_of_kind(local) if SLIDING in kinds else None,
        windows=windows_of(given, kinds),
        gates=Gates(name="gate_proj", by_head=True) if given.get("use_attention_gate", True) else None,
        modules=(("self_attn.gate_proj", "self_attn.g_proj"),),
        attention_parts=("q_norm", "k_norm", "o_proj"),
        norms=AROUND_LFM3 if given.get("use_sandwich_norm", True) else base.norms,
    )


def _lfm2_moe(config: Config) -> Shape:
    """LFM2 MoE: LFM2 with experts after the first layers, chosen by sigmoid scores with a correction bias."""
    given = LFM2_MOE | config
    kinds = given["layer_types"]
    if kinds is None:
        raise Unsupported(f"config.json says layer_types null, a name for each of num_hidden_layers is needed: {AGAIN}")
    base = _short(given, kinds)
    mixture = Mixture(
        experts=given["num_experts"],
        chosen=given["num_experts_per_tok"],
        size=given["moe_intermediate_size"],
        normalized=given.get("norm_topk_prob", True),
        scores="sigmoid",
        correction="expert_bias" if given.get("use_expert_bias", True) else "",
        factor=number(given, "routed_scaling_factor", 1.0),
        least=1e-6,
        name="feed_forward",
        names=("w1", "w3", "w2"),
    )
    sparse = (layer >= given["num_dense_layers"] for layer in range(base.layers))
    return replace(base, mixtures=tuple(mixture if each else None for each in sparse))


def _falcon_h1(config: Config) -> Shape:
    """Falcon H1: state spaces and attention in parallel in every layer, and scaling factors of all projections (Zuo et al. 2025,
    arXiv:2507.22448)."""
    given = FALCON_H1 | config
    expect(given, attention_bias=False, mlp_bias=False, projectors_bias=False)
    normal = given.get("mamba_rms_norm", False)
    if normal and given.get("mamba_norm_before_gate", True):
        raise Unsupported("mamba_norm_before_gate true is not supported where mamba_rms_norm is true: the decoder has false")
    base = common(given)
    features = given["mamba_d_ssm"] or given["mamba_expand"] * base.hidden
    before, into, asked, out, behind = (
        number(given, f"{name}_multiplier", 1.0) for name in ("attention_in", "ssm_in", "key", "attention_out", "ssm_out")
    )
    gates, down = _factors(given, "mlp_multipliers", 2)
    attention = {"q": before, "k": before * asked, "v": before, "o": out}
    factors = {f"self_attn.{name}_proj": factor for name, factor in attention.items()}
    factors |= {"feed_forward.gate_proj": gates, "feed_forward.down_proj": down, "mamba.out_proj": behind}
    return replace(
        base,
        recurrent=replace(
            state_spaces(given, frozenset(range(base.layers)), features),
            along=True,
            normal=normal,
            factors=tuple(into * factor for factor in _factors(given, "ssm_multipliers", 5)),
        ),
        factors=tuple(factors.items()),
        embedding_factor=number(given, "embedding_multiplier", 1.0),
        logit_divisor=1 / number(given, "lm_head_multiplier", 1.0),
        norms=("input_layernorm", "", "pre_ff_layernorm", ""),
        last_norm="final_layernorm",
        mlp_name="feed_forward",
    )


def _factors(config: Config, name: str, count: int) -> list[float]:
    given = config.get(name)
    if given is None:
        return [1.0] * count
    if not isinstance(given, list) or len(given) != count:
        raise Unsupported(f"config.json says {name} {shown(given)}, a list of {count} numbers is needed: {AGAIN}")
    return [number({name: factor}, name) for factor in given]


HYBRID: dict[str, Callable[[Config], Shape]] = {
    "BambaForCausalLM": _bamba,
    "FalconH1ForCausalLM": _falcon_h1,
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
    "Lfm2ForCausalLM": _lfm2,
    "Lfm2MoeForCausalLM": _lfm2_moe,
    "Lfm3ForCausalLM": _lfm3,
    "OlmoHybridForCausalLM": _olmo_hybrid,
    "Qwen3NextForCausalLM": _qwen3_next,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
}
