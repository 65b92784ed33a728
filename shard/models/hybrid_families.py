"""Families some of whose layers have linear attention. A new one is a new entry in `HYBRID`."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

from .dense_families import granite, llama
from .fields import AGAIN, FULL, LINEAR, Config, number, shown
from .parts import biased, common, kinds_of
from .ropes import rotary_size
from .shape import Linear, Shape, Unsupported
from .sparse_families import GRANITE_MOE, mixed, one_for_all, with_granites_experts

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
ALWAYS = ("attn_output_gate", "norm_topk_prob")  # what Qwen 3.5 may say of itself, and transformers doesn't read


def _qwen3_next(config: Config) -> Shape:
    """Experts in every layer, or in some, of which one is for all tokens."""
    given = QWEN3_NEXT | config
    base = replace(_hybrid(given), joined=("in_proj_qkvz", "in_proj_ba"))
    return mixed(base, given, one_for_all(given, given["norm_topk_prob"]))


def _qwen3_5(config: Config) -> Shape:
    _check(config)
    return replace(_hybrid(QWEN3_5 | config), joined=("in_proj_qkv",))


def _qwen3_5_moe(config: Config) -> Shape:
    """Experts in every layer."""
    _check(config)
    given = QWEN3_5_MOE | config
    base = _hybrid(given | {"intermediate_size": given["moe_intermediate_size"]})
    return replace(base, joined=("in_proj_qkv",), mixtures=(one_for_all(given, normalized=True),) * base.layers)


def _check(config: Config) -> None:
    for name in ALWAYS:
        if config.get(name, True) is not True:
            raise Unsupported(f"{name} {shown(config[name])} is not supported: for this family the decoder has true")


def _hybrid(config: Config) -> Shape:
    """Qwen's: one layer of so many attends to all, through gates, and a part of its heads turns."""
    base = biased(common(config), config)
    layers = _linear_layers(
        kinds_of(config, base.layers, lambda layer: (layer + 1) % config["full_attention_interval"] > 0, LINEAR)
    )
    return replace(
        base,
        linear=_linear(config, layers) if layers else None,
        attention_gates=True,
        qk_norm=True,
        centered_norms=True,
        rotary_size=rotary_size(config, base.head_size, 0.25),
    )


def _linear_layers(kinds: list[Any]) -> frozenset[int]:
    layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
    if len(layers) == len(kinds):
        raise Unsupported(f"config.json means layers of linear attention alone, the decoder needs one that attends to all: {AGAIN}")
    return layers


def _linear(config: Config, layers: frozenset[int]) -> Linear:
    found = Linear(
        layers=layers,
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_size=config["linear_key_head_dim"],
        value_size=config["linear_value_head_dim"],
        width=config["linear_conv_kernel_dim"],
    )
    if found.value_heads % found.key_heads:
        raise Unsupported(
            f"config.json says linear_num_value_heads {found.value_heads} and linear_num_key_heads {found.key_heads}, of which the "
            f"first must be a multiple: {AGAIN}"
        )
    return found


def _granite_hybrid(config: Config) -> Shape:
    """Granite 4: state spaces in most layers, or in none, and one expert for all tokens, with others beside it or alone."""
    given, turning = GRANITE | config, config.get("position_embedding_type")
    if turning not in (None, "nope", "rope"):
        raise Unsupported(
            f"position_embedding_type {shown(turning)} is not supported: for this family the decoder has nope and rope"
        )
    base = granite(given | {"intermediate_size": given["shared_intermediate_size"]})
    layers = _linear_layers(kinds_of(config, base.layers, lambda layer: True, LINEAR))
    return replace(
        with_granites_experts(base, given, shared=base.intermediate),
        linear=_state_spaces(given, layers) if layers else None,
        unturned=frozenset(range(0 if turning == "rope" else base.layers)),
    )


def _bamba(config: Config) -> Shape:
    """State spaces, but in the layers that config.json counts, and MLPs. Half of each head turns: transformers reads of that what
    stands in rope_parameters, and no other field."""
    given = BAMBA | config | {"partial_rotary_factor": 0.5}
    base = llama(given)
    attending = config.get("attn_layer_indices") or []
    if not isinstance(attending, list) or not all(type(layer) is int for layer in attending):
        raise Unsupported(f"config.json says attn_layer_indices {shown(attending)}, a list of numbers is needed: {AGAIN}")
    layers = _linear_layers([FULL if layer in attending else LINEAR for layer in range(base.layers)])
    return replace(
        base,
        linear=_state_spaces(given, layers) if layers else None,
        rotary_size=rotary_size(given, base.head_size),
        norms=("input_layernorm", "", "pre_ff_layernorm", ""),
        last_norm="final_layernorm",
        mlp_name="feed_forward",
    )


def _state_spaces(config: Config, layers: frozenset[int]) -> Linear:
    """Mamba-2's (Dao and Gu 2024, arXiv:2405.21060)."""
    heads, groups, features = config["mamba_n_heads"], config["mamba_n_groups"], config["mamba_expand"] * config["hidden_size"]
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
    for name, usual in (("mamba_conv_bias", True), ("mamba_proj_bias", False)):
        if config.get(name, usual) is not usual:
            raise Unsupported(f"{name} {shown(config[name])} is not supported: the decoder has {str(usual).lower()}")
    return Linear(
        layers=layers,
        key_heads=groups,
        value_heads=heads,
        key_size=config["mamba_d_state"],
        value_size=features // heads,
        width=config["mamba_d_conv"],
        limits=_limits(config.get("time_step_limit")),
    )


def _limits(given: Any) -> tuple[float, float]:
    """null: there are none. transformers 5 writes what is infinite as an object."""
    ends = [0.0, inf] if given is None else given
    if isinstance(ends, list) and len(ends) == 2:
        least, most = (end.get("__float__") if isinstance(end, dict) else end for end in ends)
        endless = most in (inf, "Infinity")
        if least == 0 and endless:
            return 0.0, inf
        name = "time_step_limit"
        low = number({name: least}, name) if least else 0.0
        high = inf if endless else number({name: most}, name)
        if low < high:
            return low, high
    raise Unsupported(f"config.json says time_step_limit {shown(given)}, two numbers are needed, the least and the most: {AGAIN}")


HYBRID: dict[str, Callable[[Config], Shape]] = {
    "BambaForCausalLM": _bamba,
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
    "Qwen3NextForCausalLM": _qwen3_next,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
}
