"""Families whose norms take the mean away. A new one is a new entry in `LAYER_NORM`."""

from collections.abc import Callable
from dataclasses import replace

from .fields import FULL, Config, number
from .parts import biased, cap, common, kinds_of, pattern_of, windows_of
from .ropes import rotary_size
from .shape import Shape, Unsupported

# transformers' defaults, which some checkpoints rely on.
COHERE: Config = {"max_position_embeddings": 8192, "tie_word_embeddings": True, "rope_theta": 5e5}
STABLELM: Config = {"num_key_value_heads": 32, "max_position_embeddings": 4096}
STARCODER2: Config = {"num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True}
BEFORE_BOTH = ("input_layernorm", "", "", "")


def _common(config: Config, epsilon: str, activation: str = "silu") -> Shape:
    """epsilon: the name of the norms'."""
    base = common(config | {"rms_norm_eps": number(config, epsilon, 1e-5, 1.0)}, "hidden_act", (activation,))
    return replace(base, layer_norms=True)


def _cohere(config: Config) -> Shape:
    """Command R. Neighbours turn together."""
    if config.get("use_qk_norm"):
        raise Unsupported("use_qk_norm is not supported: for this family the decoder has none")
    base = biased(_common(COHERE | config, "layer_norm_eps"), config)
    return replace(
        base,
        # The first Command R says 8,192 where others say how far they go, and 131,072 here, for which it was trained.
        max_positions=max(base.max_positions, int(number(config, "model_max_length", 1.0, 1 << 30))),
        norms=BEFORE_BOTH,
        parallel=True,
        rotary_neighbours=True,
        logit_divisor=1 / number(config, "logit_scale", 0.0625),
    )


def _cohere2(config: Config) -> Shape:
    """Command R7B and A. One layer in four sees all, and has no rotary embedding."""
    base = _cohere({"rope_theta": 1e4} | config)
    kinds = kinds_of(config, base.layers, lambda layer: (layer + 1) % pattern_of(config, 4) > 0)
    still = frozenset(layer for layer, kind in enumerate(kinds) if kind == FULL)
    return replace(base, windows=windows_of(config, kinds), unturned=still)


def _olmo(config: Config) -> Shape:
    """The first generation: Llama, but for its norms, of which config.json says nothing, and what it clips."""
    base = biased(common(config | {"rms_norm_eps": 1e-5}), config)
    return replace(base, layer_norms=True, plain_norms=True, qkv_limit=cap(config, "clip_qkv", None))


def _stablelm(config: Config) -> Shape:
    """A quarter of each head turns."""
    if config.get("qk_layernorm"):
        raise Unsupported("qk_layernorm is not supported: for this family the decoder has none")
    base = _common(STABLELM | config, "layer_norm_eps")
    parallel = config.get("use_parallel_residual", False)
    return replace(
        base,
        norm_bias=True,
        parallel=parallel,
        norms=BEFORE_BOTH if parallel else base.norms,
        rotary_size=rotary_size(config, base.head_size, 0.25),
        qkv_bias=config.get("use_qkv_bias", False),
    )


def _starcoder2(config: Config) -> Shape:
    """All layers slide, if any."""
    base, bias = _common(STARCODER2 | config, "norm_epsilon", "gelu_pytorch_tanh"), config.get("use_bias", True)
    return replace(
        base,
        norm_bias=True,
        ungated="gelu",
        mlp_parts=("", "", "c_fc", "c_proj"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        windows=(config.get("sliding_window") or 0,) * base.layers,
    )


def _nemotron(config: Config) -> Shape:
    """Minitron and Nemotron Mini. Gains of norms are stored less 1, and half of each head turns."""
    base = _squared(config | {"layer_norm_eps": number(config, "norm_eps", 1e-5, 1.0)}, 4096)
    return replace(base, centered_norms=True, rotary_size=rotary_size(config, base.head_size, 0.5))


def _jais2(config: Config) -> Shape:
    return _squared({"attention_bias": True, "mlp_bias": True} | config, 8192)


def _squared(config: Config, positions: int) -> Shape:
    """Without gates, by squares; positions: how many there are where nothing is said."""
    base = biased(_common({"max_position_embeddings": positions} | config, "layer_norm_eps", "relu2"), config)
    return replace(base, norm_bias=True, ungated="relu2", mlp_bias=config.get("mlp_bias", False))


LAYER_NORM: dict[str, Callable[[Config], Shape]] = {
    "CohereForCausalLM": _cohere,
    "Cohere2ForCausalLM": _cohere2,
    "Jais2ForCausalLM": _jais2,
    "NemotronForCausalLM": _nemotron,
    "OlmoForCausalLM": _olmo,
    "StableLmForCausalLM": _stablelm,
    "Starcoder2ForCausalLM": _starcoder2,
}
