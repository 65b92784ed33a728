"""Families some of whose layers have linear attention. A new one is a new entry in `HYBRID`."""

from collections.abc import Callable
from dataclasses import replace

from .fields import AGAIN, LINEAR, Config, shown
from .parts import biased, common, kinds_of
from .ropes import rotary_size
from .shape import Linear, Shape, Unsupported
from .sparse_families import mixed, one_for_all

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
    kinds = kinds_of(config, base.layers, lambda layer: (layer + 1) % config["full_attention_interval"] > 0, LINEAR)
    layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
    if len(layers) == base.layers:
        raise Unsupported(f"config.json means layers of linear attention alone, the decoder needs one that attends to all: {AGAIN}")
    return replace(
        base,
        linear=_linear(config, layers) if layers else None,
        attention_gates=True,
        qk_norm=True,
        centered_norms=True,
        rotary_size=rotary_size(config, base.head_size, 0.25),
    )


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


HYBRID: dict[str, Callable[[Config], Shape]] = {
    "Qwen3NextForCausalLM": _qwen3_next,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
}
