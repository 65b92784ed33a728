"""What the model families have in common: parts of a `Shape` from a Hugging Face config.json."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .fields import AGAIN, FULL, SLIDING, Config, number, shown
from .quantization import quantization
from .ropes import rope
from .shape import Shape, Unsupported


def common(config: Config, activation: str = "hidden_act", activations: tuple[str, ...] = ("silu",)) -> Shape:
    """The shape of a plain decoder with these sizes. activation: the field with the activation, one of `activations`, of which the
    first is the default."""
    named = config.get(activation) or activations[0]
    if named not in activations:
        raise Unsupported(f"{activation} {shown(named)} is not supported: for this family the decoder has {activations[0]}")
    heads, hidden, layers = config["num_attention_heads"], config["hidden_size"], config["num_hidden_layers"]
    turning = rope(config)
    head_size = config.get("head_dim") or hidden // heads
    if head_size < 2 or head_size % 2:
        raise Unsupported(f"config.json means heads of {head_size} numbers, an even number is needed: {AGAIN}")
    return Shape(
        architecture=config["architectures"][0],
        vocabulary=config["vocab_size"],
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=head_size,
        attention_scale=head_size**-0.5,
        intermediate=config["intermediate_size"],
        norm_epsilon=number(config, "rms_norm_eps", 1e-6, 1.0),
        max_positions=max(config.get("max_position_embeddings", 2048), turning.reach),
        tied=config.get("tie_word_embeddings", False),
        rope=turning,
        mixtures=(None,) * layers,
        windows=(0,) * layers,
        quantization=quantization(config),
    )


def biased(base: Shape, config: Config) -> Shape:
    """The same, with biases in attention if `attention_bias` says so."""
    bias = config.get("attention_bias", False)
    return replace(base, qkv_bias=bias, output_bias=bias)


def layer_kinds(config: Config, layers: int, slides: Callable[[int], bool], kind: str = SLIDING) -> list[Any]:
    """The kind of each layer: sliding window, or another `kind`, or full attention. slides: the default for a layer, where
    config.json doesn't say."""
    return config.get("layer_types") or [kind if slides(layer) else FULL for layer in range(layers)]


def layers_of(kinds: Sequence[Any], *named: str) -> frozenset[int]:
    """The layers of these kinds."""
    return frozenset(layer for layer, kind in enumerate(kinds) if kind in named)


def windows_of(config: Config, kinds: list[Any]) -> tuple[int, ...]:
    """The sliding window of each layer, by its kind. Raises Unsupported if there is one, and its size is not given."""
    window = config.get("sliding_window", 4096) or 0
    if SLIDING in kinds and not window:
        raise Unsupported(
            f"config.json says sliding_window {shown(config['sliding_window'])}, and there are layers that slide: {AGAIN}"
        )
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def nope_layers(config: Config, layers: int, turning: Any) -> frozenset[int]:
    """The layers without a rotary embedding. turning: for each layer 1 if it has one; None: the default pattern."""
    if turning is None:
        interval = config.get("no_rope_layer_interval", 4)
        turning = [int((layer + 1) % interval > 0) for layer in range(layers)]
    if not isinstance(turning, list) or len(turning) < layers or not all(type(one) is int for one in turning):
        raise Unsupported(
            f"config.json says no_rope_layers {shown(turning)}, 0 or 1 for each of num_hidden_layers is needed: {AGAIN}"
        )
    return frozenset(layer for layer in range(layers) if not turning[layer])


def uniform_windows(config: Config, layers: int, usual: int | None = None) -> tuple[int, ...]:
    """The sliding windows of layers that all have the same one, if any; usual: the default size."""
    return (config.get("sliding_window", usual) or 0,) * layers


def cap(config: Config, name: str, default: float | None) -> float:
    """A soft cap, or another limit; null: there is none."""
    value = config.get(name, default)
    return 0.0 if value is None else number({name: value}, name)


def pattern_of(config: Config, usual: int) -> int:
    """The interval at which a layer has full attention."""
    pattern = config.get("sliding_window_pattern", usual)
    if type(pattern) is not int or pattern < 1:
        raise Unsupported(f"config.json says sliding_window_pattern {shown(pattern)}, an integer from 1 on is needed: {AGAIN}")
    return pattern
