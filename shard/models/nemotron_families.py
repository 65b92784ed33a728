"""NVIDIA's Nemotron H (2025, arXiv:2504.03624) and Nemotron 3: each layer is only one of state space (Mamba-2), attention, MLP and
experts."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

from .fields import AGAIN, FULL, LINEAR, Config, expect, number, shown
from .hybrid_families import limits, state_spaces
from .parts import common, layers_of
from .recurrent_shapes import StateSpaceShape
from .shape import Shape, Unsupported
from .sparse_families import scored, with_experts

MLP, EXPERTS = "mlp", "moe"  # kinds of layers, besides the usual ones
LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}
# transformers' defaults, which some checkpoints rely on.
NEMOTRON: Config = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "intermediate_size": 21_504,
    "layer_norm_epsilon": 1e-5,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "norm_topk_prob": True,
}
FORMERLY = {  # fields with an older name, which takes precedence, and defaults
    "n_groups": ("mamba_n_groups", 8),
    "conv_kernel": ("mamba_d_conv", 4),
    "time_step_min": ("mamba_dt_min", 0.001),
    "use_conv_bias": ("mamba_conv_bias", True),
    "time_step_limit": ("mamba_dt_limit", None),
}
ALWAYS: Config = {  # what the decoder has, or transformers, which doesn't read some of these
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "use_conv_bias": True,
    **dict.fromkeys(("use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias", "tie_word_embeddings"), False),
    "sliding_window": None,
}


def _nemotron_h(config: Config) -> Shape:
    """Nemotron H: no layer has a rotary embedding."""
    given = NEMOTRON | config
    given |= {name: given.get(other, given.get(name, usual)) for name, (other, usual) in FORMERLY.items()}
    expect(given, **ALWAYS)
    kinds = _kinds(given)
    base = common(
        given | {"num_hidden_layers": len(kinds), "rms_norm_eps": number(given, "layer_norm_epsilon"), "hidden_act": "silu"}
    )
    recurrent = layers_of(kinds, LINEAR)
    found = replace(
        _with_experts(base, given, kinds) if EXPERTS in kinds else base,
        recurrent=_linear(given, recurrent) if recurrent else None,
        nope_layers=frozenset(range(base.layers)),
        without_attention=layers_of(kinds, MLP, EXPERTS),
        without_mlp=layers_of(kinds, FULL, LINEAR),
        attention_name="mixer",
        norms=("norm", "", "norm", ""),
        last_norm="norm_f",
        table="embeddings",
        ungated="relu2",
        mlp_name="mixer",
        mlp_parts=("", "", "up_proj", "down_proj"),
    )
    if not found.attending:
        raise Unsupported(f"config.json means no layer that attends, the decoder needs one: {AGAIN}")
    return found


def _kinds(given: Config) -> list[str]:
    """The kind of each layer, by names, or by letters as before transformers 5."""
    kinds: Any = given.get("layers_block_type", given.get("layer_types"))
    if kinds is None:
        pattern = given["hybrid_override_pattern"]
        kinds = [LETTERS.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else pattern
    named = {"mamba": LINEAR, "attention": FULL} | {kind: kind for kind in LETTERS.values()}
    if not isinstance(kinds, list) or not kinds or not set(named).issuperset(map(str, kinds)):
        raise Unsupported(
            f"config.json says layers {shown(kinds)} (see layers_block_type, hybrid_override_pattern), each is to be one of "
            f"{', '.join(LETTERS.values())}: {AGAIN}"
        )
    return [named[kind] for kind in kinds]


def _linear(given: Config, layers: frozenset[int]) -> StateSpaceShape:
    """The state spaces. transformers keeps time steps above `time_step_min`, and doesn't read `time_step_limit`."""
    if limits(given["time_step_limit"]) != (0.0, inf):
        raise Unsupported(
            f"time_step_limit {shown(given['time_step_limit'])} is not supported: for this family the decoder has none but "
            "time_step_min"
        )
    least = number(given, "time_step_min") if given["time_step_min"] else 0.0
    features = given["mamba_num_heads"] * given["mamba_head_dim"]
    fields = {
        "mamba_n_heads": given["mamba_num_heads"],
        "mamba_d_head": given["mamba_head_dim"],
        "mamba_n_groups": given["n_groups"],
        "mamba_d_state": given["ssm_state_size"],
        "mamba_d_conv": given["conv_kernel"],
    }
    return replace(state_spaces(fields, layers, features), limits=(least, inf), home="mixer")


def _with_experts(base: Shape, given: Config, kinds: list[str]) -> Shape:
    """The shape with experts in the layers of that kind."""
    found = with_experts(
        scored(base, given | {"first_k_dense_replace": 0}),
        name="mixer",
        names=("", "up_proj", "down_proj"),
        latent=given.get("moe_latent_size") or 0,
        shared=given["moe_shared_expert_intermediate_size"],
    )
    return replace(
        found,
        mixtures=tuple(mixture if kind == EXPERTS else None for mixture, kind in zip(found.mixtures, kinds, strict=True)),
    )


NEMOTRON_H: dict[str, Callable[[Config], Shape]] = {"NemotronHForCausalLM": _nemotron_h}
