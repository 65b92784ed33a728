"""Which architectures there are: how a Hugging Face config.json becomes a `Shape`. Data for the one decoder.

Knows no tensor and imports no torch, so that the launcher can plan with it. A new family is a new entry in `FAMILIES`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Config = dict[str, Any]


class Unsupported(ValueError):
    """The model can't be served; the message names what is missing and the remedy, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding. `kind` "default" uses nothing but theta."""

    theta: float = 10000.0
    kind: str = "default"  # "default", "linear", "llama3"
    factor: float = 1.0
    low_frequency_factor: float = 1.0  # the rest is llama3's
    high_frequency_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Everything that the decoder needs to know about a model. Sizes are numbers of elements."""

    architecture: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    norm_epsilon: float
    max_positions: int
    tied: bool  # the output matrix is the embedding table
    rope: Rope
    windows: tuple[int, ...]  # per layer: positions that a token may look back, itself included; 0: all
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of every query and key head before rotary

    def check_ranks(self, ranks: int) -> None:
        """Raises Unsupported unless the model can be divided into `ranks` equal slices."""
        for name, size in (
            ("attention heads", self.heads),
            ("key/value heads", self.kv_heads),
            ("intermediate features", self.intermediate),
        ):
            if size % ranks:
                fitting = [str(n) for n in range(1, size + 1) if not (self.heads % n or self.kv_heads % n or self.intermediate % n)]
                raise Unsupported(f"{size} {name} can't be divided by {ranks} ranks: use --num-shard {', '.join(fitting)}")

    def vocabulary_slice(self, ranks: int) -> int:
        """Rows of the embedding table and of the output matrix per rank; the last rank's may be partly padding."""
        return -(-self.vocabulary // ranks)

    def kv_elements(self, ranks: int) -> int:
        """Elements of keys and values that one token takes on one rank, all layers."""
        return 2 * self.layers * self.kv_heads // ranks * self.head_size

    def parameters(self, ranks: int = 1, tables: int | None = None) -> int:
        """Elements of all weights on one rank. `tables`: how often the vocabulary's table is held, if not as in the checkpoint."""
        heads, kv_heads = self.heads // ranks, self.kv_heads // ranks
        qkv = (heads + 2 * kv_heads) * self.head_size
        attention = self.hidden * qkv + heads * self.head_size * self.hidden + self.qkv_bias * qkv + self.output_bias * self.hidden
        mlp = 3 * self.hidden * self.intermediate // ranks + self.mlp_bias * (2 * self.intermediate // ranks + self.hidden)
        norms = 2 * self.hidden + 2 * self.qk_norm * self.head_size
        held = tables or (1 if self.tied else 2)
        return self.layers * (attention + mlp + norms) + held * self.vocabulary_slice(ranks) * self.hidden + self.hidden


def shape(config: Config) -> Shape:
    """The shape of the model that `config` (a parsed config.json) describes.

    Raises Unsupported for an architecture, an activation or a rotary embedding that the decoder doesn't have, and for a
    field that is missing.
    """
    names = config.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            try:
                return FAMILIES[name](config)
            except KeyError as error:
                raise Unsupported(f"config.json of a {name} lacks {error}: is it complete?") from None
    asked = ", ".join(names) or "none named"
    raise Unsupported(f"architecture {asked} is not supported: this version serves {', '.join(sorted(FAMILIES))}")


def _common(config: Config) -> Shape:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise Unsupported(f"hidden_act {activation!r} is not supported: the decoder has silu (SwiGLU)")
    if config.get("quantization_config"):
        raise Unsupported("quantized checkpoints are not supported: use the model's unquantized weights")
    heads, hidden, layers = config["num_attention_heads"], config["hidden_size"], config["num_hidden_layers"]
    return Shape(
        architecture=config["architectures"][0],
        vocabulary=config["vocab_size"],
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or hidden // heads,
        intermediate=config["intermediate_size"],
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        max_positions=config.get("max_position_embeddings", 2048),
        tied=config.get("tie_word_embeddings", False),
        rope=_rope(config),
        windows=(0,) * layers,
    )


def _rope(config: Config) -> Rope:
    # transformers 5 writes one `rope_parameters`; earlier versions `rope_theta` and, for scaled ones, `rope_scaling`.
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = values.get("rope_type") or values.get("type") or "default"
    theta = float(values.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=float(values["factor"]))
    if kind == "llama3":
        return Rope(
            theta=theta,
            kind=kind,
            factor=float(values["factor"]),
            low_frequency_factor=float(values["low_freq_factor"]),
            high_frequency_factor=float(values["high_freq_factor"]),
            original_positions=int(values["original_max_position_embeddings"]),
        )
    raise Unsupported(f"rotary scaling {kind!r} is not supported: the decoder has default, linear and llama3")


def _llama(config: Config) -> Shape:
    bias = config.get("attention_bias", False)
    return replace(_common(config), qkv_bias=bias, output_bias=bias, mlp_bias=config.get("mlp_bias", False))


def _mistral(config: Config) -> Shape:
    base = _common({"num_key_value_heads": 8, **config})
    return replace(base, windows=(config.get("sliding_window", 4096) or 0,) * base.layers)


def _qwen(config: Config) -> Shape:
    """Both generations slide in the layers from `max_window_layers` on, if at all."""
    base = _common(config)
    if not config.get("use_sliding_window") or not config.get("sliding_window"):
        return base
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= config["max_window_layers"] else "full_attention" for layer in range(base.layers)
    ]
    return replace(base, windows=tuple(config["sliding_window"] if kind == "sliding_attention" else 0 for kind in kinds))


def _qwen2(config: Config) -> Shape:
    return replace(_qwen(config), qkv_bias=True)


def _qwen3(config: Config) -> Shape:
    bias = config.get("attention_bias", False)
    return replace(_qwen({"head_dim": 128, **config}), qk_norm=True, qkv_bias=bias, output_bias=bias)


FAMILIES: dict[str, Callable[[Config], Shape]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
