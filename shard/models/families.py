"""Which architectures there are: how a Hugging Face config.json becomes a `Shape`. Data for the one decoder.

Knows no tensor and imports no torch, so that the launcher can plan with it. A new family is a new entry in `FAMILIES`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Config = dict[str, Any]

# What the fields of a config.json may be, so that one that lies is found before anything is computed with it. Bounds are far beyond
# every model there is, and far below where an allocation or a loop over them would never end.
SIZES = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 12,
    "max_position_embeddings": 1 << 30,
    "sliding_window": 1 << 30,
    "max_window_layers": 1 << 12,
}
MAY_BE_NULL = ("num_key_value_heads", "head_dim", "sliding_window", "max_window_layers")  # and means that there is none
AGAIN = "is it the model's own? Download it again"
FULL, SLIDING = "full_attention", "sliding_attention"  # of `layer_types`
SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
WITH_IMAGES = ("Gemma3ForConditionalGeneration",)  # whose text is described by itself
BESIDE_TEXT = ("tie_word_embeddings", "quantization_config")  # and these fields are beside that
# What transformers calls a model where its architecture's name doesn't say so.
MODEL_TYPES = dict.fromkeys(("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), "gemma3_text")
# transformers' defaults, which some checkpoints rely on.
GEMMA: Config = {"head_dim": 256, "tie_word_embeddings": True, "max_position_embeddings": 8192}
GEMMA3: Config = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "max_position_embeddings": 131_072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


class Unsupported(ValueError):
    """The model can't be served; the message names what is missing and the remedy, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding. `kind` "default" uses nothing but theta."""

    theta: float = 10000.0
    kind: str = "default"  # "default", "linear", "llama3", "yarn"
    factor: float = 1.0
    original_positions: int = 8192  # that the model was first trained on: llama3's and yarn's
    # Turns over these positions: waves with more stay as they are, with less they are stretched, and those between interpolated.
    many_turns: float = 4.0
    few_turns: float = 1.0
    whole: bool = True  # yarn's: these bounds are rounded to whole pairs of features
    amplitude: float = 1.0  # of all cosines and sines

    @property
    def reach(self) -> int:
        """Positions that it is made for, where it says so: yarn is added to a config.json whose number of positions stays."""
        return int(self.original_positions * self.factor) if self.kind == "yarn" else 0


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
    local_rope: Rope | None = None  # of the layers with a window, where it is another
    attention_scale: float  # of the products of queries and keys
    softcap: float = 0.0  # which those come near to at most; 0: none
    final_softcap: float = 0.0  # of the model's logits
    embedding_factor: float = 1.0  # what rows of the embedding table are multiplied by
    residual_factor: float = 1.0  # and what attention and MLP come to, before it is added
    logit_divisor: float = 1.0  # what logits are divided by
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of every query and key head before rotary
    two_norms: bool = False  # attention and MLP have one behind them, too
    centered_norms: bool = False  # norms' gains are stored less 1
    joined: bool = False  # queries, keys and values are one tensor in the checkpoint, and so are gates and what they let through
    gelu: bool = False  # of the MLP's gates, approximated by tanh, instead of silu

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

    @property
    def rotary_elements(self) -> int:
        """Elements of the cosines and sines of all positions, which every rank has."""
        return 2 * self.max_positions * self.head_size * (2 if self.local_rope else 1)

    def parameters(self, ranks: int = 1, tables: int | None = None) -> int:
        """Elements of all weights on one rank. `tables`: how often the vocabulary's table is held, if not as in the checkpoint."""
        heads, kv_heads = self.heads // ranks, self.kv_heads // ranks
        qkv = (heads + 2 * kv_heads) * self.head_size
        attention = self.hidden * qkv + heads * self.head_size * self.hidden + self.qkv_bias * qkv + self.output_bias * self.hidden
        mlp = 3 * self.hidden * self.intermediate // ranks + self.mlp_bias * (2 * self.intermediate // ranks + self.hidden)
        norms = (4 if self.two_norms else 2) * self.hidden + 2 * self.qk_norm * self.head_size
        held = tables or (1 if self.tied else 2)
        return self.layers * (attention + mlp + norms) + held * self.vocabulary_slice(ranks) * self.hidden + self.hidden


def shape(config: Config) -> Shape:
    """The shape of the model that `config` (a parsed config.json) describes.

    Raises Unsupported for an architecture, an activation or a rotary embedding that the decoder doesn't have, and for a
    field that is missing.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Unsupported(f"config.json says architectures {names!r}, a list of names is needed: download the model again")
    for name in names:
        if name in FAMILIES:
            try:
                own = _text(config) if name in WITH_IMAGES else config
                _check(own, name)
                return _sound(FAMILIES[name](own), own.get("layer_types"))
            except KeyError as error:
                raise Unsupported(f"config.json of a {name} lacks {error}: is it complete?") from None
    asked = ", ".join(names) or "none named"
    raise Unsupported(f"architecture {asked} is not supported: this version serves {', '.join(sorted(FAMILIES))}")


def _text(config: Config) -> Config:
    """Of a model that has images as well, what is about text: all that is served of it."""
    own = config["text_config"]
    if not isinstance(own, dict):
        raise Unsupported(f"config.json says text_config {_shown(own)}, an object is needed: {AGAIN}")
    return {name: config[name] for name in BESIDE_TEXT if name in config} | own | {"architectures": config["architectures"]}


def _check(config: Config, architecture: str) -> None:
    """Raises Unsupported if a field that we read can't be what it says."""
    kind, own = config.get("model_type"), MODEL_TYPES.get(architecture, architecture.removesuffix("ForCausalLM").lower())
    if kind not in (None, own):
        raise Unsupported(
            f"config.json says model_type {_shown(kind)}, and architecture {architecture}, which is {own!r}: transformers goes by "
            f"the first, penstock by the second; {AGAIN}"
        )
    for name, most in SIZES.items():
        value = config.get(name, 1)
        least = 0 if name in ("sliding_window", "max_window_layers") else 1
        if value is None and name in MAY_BE_NULL:
            continue
        if type(value) is not int or not least <= value <= most:
            raise Unsupported(f"config.json says {name} {_shown(value)}, an integer from {least} to {most} is needed: {AGAIN}")
    for name in SWITCHES:
        if not isinstance(config.get(name, False), bool):
            raise Unsupported(f"config.json says {name} {_shown(config[name])}, true or false is needed: {AGAIN}")
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != config["num_hidden_layers"]):
        raise Unsupported(f"config.json says layer_types {_shown(kinds)}, a name for each of num_hidden_layers is needed: {AGAIN}")


def _number(values: Mapping[str, Any], name: str, default: float | None = None, most: float = 1e12) -> float:
    """A number above 0. Raises KeyError if it is not there and has no default."""
    value = values[name] if default is None else values.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and 0 < value <= most):
        raise Unsupported(f"config.json says {name} {_shown(value)}, a number above 0 up to {most:g} is needed: {AGAIN}")
    return float(value)


def _shown(value: object) -> str:
    return repr(value)[:40]


def _sound(found: Shape, kinds: list[Any] | None) -> Shape:
    """The same. Raises Unsupported if its numbers contradict each other, or the `kinds` of layers that config.json names."""
    if found.heads % found.kv_heads:
        raise Unsupported(
            f"config.json says {found.heads} attention heads and {found.kv_heads} key/value heads, of which the first must be a "
            f"multiple: {AGAIN}"
        )
    if found.head_size < 2 or found.head_size % 2:
        raise Unsupported(f"config.json means heads of {found.head_size} numbers, an even number is needed: {AGAIN}")
    unknown = set(map(str, kinds or ())) - {FULL, SLIDING}
    if unknown:
        raise Unsupported(f"layer_types {', '.join(sorted(unknown))} are not supported: the decoder has full and sliding attention")
    for layer, (kind, window) in enumerate(zip(kinds or (), found.windows, strict=False)):
        if (kind == SLIDING) != (window > 0):
            raise Unsupported(
                f"config.json says layer_types {kind!r} for layer {layer}, and by its other fields that layer's window is "
                f"{window or 'none'} (see sliding_window, use_sliding_window): {AGAIN}"
            )
    return found


def _common(config: Config, activation: str = "hidden_act", activations: tuple[str, ...] = ("silu",)) -> Shape:
    """What is the same for all. activation: the field that names it, one of `activations`, of which the first is assumed."""
    named = config.get(activation) or activations[0]
    if named not in activations:
        raise Unsupported(f"{activation} {_shown(named)} is not supported: for this family the decoder has {activations[0]}")
    if config.get("quantization_config"):
        raise Unsupported("quantized checkpoints are not supported: use the model's unquantized weights")
    heads, hidden, layers = config["num_attention_heads"], config["hidden_size"], config["num_hidden_layers"]
    rope = _rope(config)
    head_size = config.get("head_dim") or hidden // heads
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
        norm_epsilon=_number(config, "rms_norm_eps", 1e-6, 1.0),
        max_positions=max(config.get("max_position_embeddings", 2048), rope.reach),
        tied=config.get("tie_word_embeddings", False),
        rope=rope,
        windows=(0,) * layers,
    )


def _rope(config: Config) -> Rope:
    # transformers 5 writes one `rope_parameters`; earlier versions `rope_theta` and, for scaled ones, `rope_scaling`.
    found = [_rope_of(config, name) for name in ("rope_parameters", "rope_scaling") if config.get(name)]
    if len(found) == 2 and found[0] != found[1]:
        raise Unsupported(
            f"config.json has both rope_parameters ({_shown(config['rope_parameters'])}) and rope_scaling "
            f"({_shown(config['rope_scaling'])}), and they differ: leave one of them"
        )
    return found[0] if found else _rope_of(config, "")


def _rope_of(config: Config, field: str) -> Rope:
    """What one of the two fields says."""
    values = config.get(field) or {}
    if not isinstance(values, dict):
        raise Unsupported(f"config.json says {field} {_shown(values)}, an object is needed: {AGAIN}")
    nested = next((name for name, value in values.items() if isinstance(value, dict)), None)
    if nested is not None:
        raise Unsupported(f"config.json says {field} for {nested!r} by itself: the decoder has one rotary embedding for all layers")
    kind = values.get("rope_type") or values.get("type") or "default"
    theta = _number(values if values.get("rope_theta") is not None else config, "rope_theta", 10000.0)
    if kind in ("default", "dynamic"):  # "dynamic" changes what lies beyond max_position_embeddings, where nothing is served
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=_number(values, "factor"))
    if kind == "llama3":
        return Rope(
            theta=theta,
            kind=kind,
            factor=_number(values, "factor"),
            original_positions=int(_number(values, "original_max_position_embeddings")),
            many_turns=_number(values, "high_freq_factor"),
            few_turns=_number(values, "low_freq_factor"),
        )
    if kind == "yarn":
        return _yarn(config, values, theta)
    raise Unsupported(f"rotary scaling {kind!r} is not supported: the decoder has default, linear, dynamic, llama3 and yarn")


def _yarn(config: Config, values: Mapping[str, Any], theta: float) -> Rope:
    """Peng et al. 2023, arXiv:2309.00071, with transformers' names and defaults."""
    factor, whole = _number(values, "factor"), values.get("truncate", True)
    first, second = (_number(values, name) if values.get(name) else 0.0 for name in ("mscale", "mscale_all_dim"))

    def logarithmic(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    amplitude = logarithmic(first) / logarithmic(second) if first and second else logarithmic(1.0)
    if not isinstance(whole, bool):
        raise Unsupported(f"config.json says truncate {_shown(whole)}, true or false is needed: {AGAIN}")
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_positions=int(_number(values, "original_max_position_embeddings", float(config["max_position_embeddings"]))),
        many_turns=_number(values, "beta_fast", 32.0),
        few_turns=_number(values, "beta_slow", 1.0),
        whole=whole,
        amplitude=_number(values, "attention_factor", amplitude),
    )


def _llama(config: Config) -> Shape:
    bias = config.get("attention_bias", False)
    return replace(_common(config), qkv_bias=bias, output_bias=bias, mlp_bias=config.get("mlp_bias", False))


def _mistral(config: Config) -> Shape:
    base = _common({"num_key_value_heads": 8, **config})
    return replace(base, windows=(config.get("sliding_window", 4096) or 0,) * base.layers)


def _qwen(config: Config) -> Shape:
    """Both generations slide in the layers from `max_window_layers` on, if at all."""
    base = _common(config)
    window = config.get("sliding_window", 4096)  # transformers' own defaults, here and below
    if not config.get("use_sliding_window") or not window:
        return base
    first = config.get("max_window_layers", 28)
    if first is None:
        raise Unsupported(f"config.json says use_sliding_window, and max_window_layers null: {AGAIN}")
    kinds = config.get("layer_types") or [SLIDING if layer >= first else FULL for layer in range(base.layers)]
    return replace(base, windows=tuple(window if kind == SLIDING else 0 for kind in kinds))


def _qwen2(config: Config) -> Shape:
    return replace(_qwen(config), qkv_bias=True)


def _qwen3(config: Config) -> Shape:
    bias = config.get("attention_bias", False)
    return replace(_qwen({"head_dim": 128, **config}), qk_norm=True, qkv_bias=bias, output_bias=bias)


def _granite(config: Config) -> Shape:
    """Llama, scaled (Yang et al. 2022, arXiv:2203.03466)."""
    names = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    attention, embedding, residual, logits = (_number(config, name, 1.0) for name in names)
    return replace(
        _llama(config), attention_scale=attention, embedding_factor=embedding, residual_factor=residual, logit_divisor=logits
    )


def _phi3(config: Config) -> Shape:
    """Also Phi 4."""
    for values in (config, config.get("rope_parameters"), config.get("rope_scaling")):
        part = values.get("partial_rotary_factor", 1.0) if isinstance(values, dict) else 1.0
        if part != 1:
            raise Unsupported(f"partial_rotary_factor {_shown(part)} is not supported: the decoder turns whole heads")
    base = _common(config)
    return replace(base, joined=True, windows=(config.get("sliding_window") or 0,) * base.layers)


def _gemma(config: Config, activation: str = "hidden_act") -> Shape:
    """The first generation, which said "gelu" and meant its approximation, and what all of them have in common."""
    if config.get("use_bidirectional_attention"):
        raise Unsupported("use_bidirectional_attention is not supported: the decoder's tokens see those before them")
    approximated = ("gelu_pytorch_tanh", "gelu") if activation == "hidden_act" else ("gelu_pytorch_tanh",)
    bias = config.get("attention_bias", False)
    base = _common(GEMMA | config, activation, approximated)
    factor = base.hidden**0.5
    return replace(base, gelu=True, centered_norms=True, embedding_factor=factor, qkv_bias=bias, output_bias=bias)


def _gemma2(config: Config) -> Shape:
    """Every other layer slides."""
    base = _gemma({"num_attention_heads": 8, "num_key_value_heads": 4} | config, "hidden_activation")
    window = config.get("sliding_window", 4096) or 0
    kinds = config.get("layer_types") or [FULL if layer % 2 else SLIDING for layer in range(base.layers)]
    return replace(
        base,
        two_norms=True,
        windows=tuple(window if kind == SLIDING else 0 for kind in kinds),
        attention_scale=_number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        softcap=_cap(config, "attn_logit_softcapping", 50.0),
        final_softcap=_cap(config, "final_logit_softcapping", 30.0),
    )


def _cap(config: Config, name: str, default: float) -> float:
    """null: there is none."""
    value = config.get(name, default)
    return 0.0 if value is None else _number({name: value}, name)


def _gemma3(config: Config) -> Shape:
    """One layer in six sees all, and has another rotary embedding than those that slide."""
    full, local = _ropes_by_kind(config)
    pattern, layers = config.get("sliding_window_pattern", 6), config.get("num_hidden_layers", 26)
    if type(pattern) is not int or pattern < 1:
        raise Unsupported(f"config.json says sliding_window_pattern {_shown(pattern)}, an integer from 1 on is needed: {AGAIN}")
    kinds = [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]
    base = _gemma2({"layer_types": kinds} | GEMMA3 | config | {"rope_parameters": full, "rope_scaling": None})
    return replace(base, qk_norm=True, local_rope=_rope_of({"rope_parameters": local}, "rope_parameters"))


def _ropes_by_kind(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is said of the rotary embedding of layers that see all, and of those that slide."""
    named, scaling = config.get("rope_parameters"), config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise Unsupported(f"config.json says rope_scaling {_shown(scaling)}, an object is needed: {AGAIN}")
    if named is None:  # as before transformers 5
        named = {
            FULL: {"rope_theta": config.get("rope_theta"), **scaling},
            SLIDING: {"rope_theta": config.get("rope_local_base_freq")},
        }
    elif scaling:
        raise Unsupported("config.json has both rope_parameters and rope_scaling: leave one of them")
    if not isinstance(named, dict) or not all(isinstance(value, dict) for value in named.values()):
        raise Unsupported(f"config.json says rope_parameters {_shown(named)}, an object for each kind of layers is needed: {AGAIN}")
    unknown = set(named) - {FULL, SLIDING}
    if unknown:
        raise Unsupported(
            f"config.json says rope_parameters for {', '.join(sorted(unknown))}: the decoder has {FULL} and {SLIDING}"
        )
    full, local = named.get(FULL, {}), named.get(SLIDING, {})
    return full | {"rope_theta": full.get("rope_theta") or 1e6}, local | {"rope_theta": local.get("rope_theta") or 1e4}


FAMILIES: dict[str, Callable[[Config], Shape]] = {
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3,
    "GraniteForCausalLM": _granite,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
