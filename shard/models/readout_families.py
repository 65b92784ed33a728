"""Shapes of draft heads that predict tokens from the target's last hidden state, without layers or a KV cache of their own. Imports
no torch: the launcher plans with them.

Medusa (Cai et al. 2024, arXiv:2401.10774) has a head for each position after the model's own next token. In the MLP speculator
(Wertheimer et al. 2024, arXiv:2404.19124) each head continues from the previous head's state and the token in between. Both read
the output of the target's last norm.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isqrt

from .fields import ELSE, Config, boolean, shown, whole
from .shape import Unsupported

SPECULATOR = "MLPSpeculatorPreTrainedModel"
HEADS = "medusa_num_heads"
OUTPUTS = "medusa_outputs"  # not a field of config.json, but set by `with_sizes`: whether heads have LM heads of their own
PREFIXES = ("", "medusa_head.", "medusa_heads.", "medusa.")  # prefixes of Medusa's tensor names; its authors use none
FIRST = "0.0.linear.weight"  # the first of these tensors
MOST_LEVELS = 127  # the most drafts of a step
MOST_BLOCKS = 1 << 6
MOST_SIZE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadoutShape(ABC):
    """All draft heads together."""

    architecture: str
    hidden: int  # of the target
    vocabulary: int  # of the target
    levels: int  # number of heads, one for each level of a tree, which is the greatest depth

    @abstractmethod
    def parameters(self) -> int:
        """Elements of all weights."""

    @property
    def feature_elements(self) -> int:
        """As of `Shape`."""
        return self.hidden

    def kv_elements(self, ranks: int) -> int:
        """As of `Shape`: none."""
        return 0

    def weight_bytes(self, ranks: int, item: int, device: str, dtype: str, packed: bool) -> int:
        """As of `Shape`: no table is held twice, and none has fewer bits."""
        return self.parameters() * item

    @property
    def described(self) -> str:
        """Its name and parameters, for people."""
        return f"{self.architecture}, {self.levels} heads, {self.parameters() / 1e6:,.1f} M parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaShape(ReadoutShape):
    """Medusa: residual blocks, and an LM head for each head."""

    blocks: int  # of each head
    outputs: bool  # each head has an LM head; else all use the target's

    def parameters(self) -> int:
        """See ReadoutShape."""
        block, output = self.hidden**2 + self.hidden, self.vocabulary * self.hidden
        return self.levels * (self.blocks * block + self.outputs * output)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculatorShape(ReadoutShape):
    """The MLP speculator: for each head an embedding table, a projection, a norm and an LM head."""

    inner: int  # width of states and embedding tables
    tied: bool  # all heads share them, except for the first projection
    scaled: bool  # the first head's input is normalized

    def parameters(self) -> int:
        """See ReadoutShape."""
        sets = 1 if self.tied else self.levels
        projections = self.hidden + (min(self.levels - 1, 1) if self.tied else self.levels - 1) * self.inner
        return sets * 2 * (self.vocabulary + 1) * self.inner + projections * self.inner


def is_readout(config: Config) -> bool:
    """Whether a parsed config.json describes such heads. A whole model's may, too, if heads come with it."""
    return HEADS in config or _is_speculator(config)


def stands_alone(config: Config) -> bool:
    """Whether it describes heads without a model."""
    return is_readout(config) and "num_attention_heads" not in config


def head_count(config: Config) -> int:
    """The number of heads that it describes. Raises Unsupported."""
    name = "n_predict" if _is_speculator(config) else HEADS
    return whole(name, config.get(name), 1, MOST_LEVELS)


def readout_shape(config: Config, hidden: int, vocabulary: int) -> ReadoutShape:
    """The shape of such heads, for a target of that hidden size and vocabulary. Raises Unsupported."""
    return (_speculator if _is_speculator(config) else _medusa)(config, hidden, vocabulary)


def with_sizes(config: Config, elements: Mapping[str, int]) -> Config:
    """The config with the sizes of Medusa's heads, which it doesn't name, from their tensors. elements: of each tensor; {}: weights
    are random, for heads without LM heads. Raises Unsupported where there are tensors, but none of Medusa's."""
    if _is_speculator(config):
        return config
    if not elements:
        return config | {OUTPUTS: False}
    prefix = prefix_of(elements.__contains__)
    if prefix is None:
        raise Unsupported(
            f"config.json says {HEADS} {shown(config[HEADS])}, and no tensor is named {FIRST}, as Medusa's first is: is the "
            "download complete?"
        )
    hidden = isqrt(elements[f"{prefix}{FIRST}"])
    output = elements.get(f"{prefix}0.{_blocks(config)}.weight", 0)
    return config | {"hidden_size": hidden, OUTPUTS: output > 0} | ({"vocab_size": output // max(1, hidden)} if output else {})


def prefix_of(has: Callable[[str], bool]) -> str | None:
    """The prefix of Medusa's tensor names. has: whether there is a tensor of that name; None: there is none of Medusa's."""
    return next((prefix for prefix in PREFIXES if has(f"{prefix}{FIRST}")), None)


def _is_speculator(config: Config) -> bool:
    names = config.get("architectures")
    return config.get("model_type") == "mlp_speculator" or (isinstance(names, list) and SPECULATOR in names)


def _medusa(config: Config, hidden: int, vocabulary: int) -> ReadoutShape:
    for name, wanted in (("hidden_size", hidden), ("vocab_size", vocabulary)):
        _check_fit("Medusa's heads", name, config.get(name, wanted), wanted)
    return MedusaShape(
        architecture="Medusa",
        hidden=hidden,
        vocabulary=vocabulary,
        levels=head_count(config),
        blocks=_blocks(config),
        outputs=boolean(OUTPUTS, config.get(OUTPUTS, True)),
    )


def _blocks(config: Config) -> int:
    return whole("medusa_num_layers", config.get("medusa_num_layers"), 1, MOST_BLOCKS)


def _speculator(config: Config, hidden: int, vocabulary: int) -> ReadoutShape:
    for name, wanted in (("emb_dim", hidden), ("vocab_size", vocabulary)):
        _check_fit("the MLP speculator", name, config.get(name), wanted)
    return SpeculatorShape(
        architecture="MLP speculator",
        hidden=hidden,
        vocabulary=vocabulary,
        levels=head_count(config),
        inner=whole("inner_dim", config.get("inner_dim"), 0, MOST_SIZE) or hidden,
        tied=boolean("tie_weights", config.get("tie_weights", False)),
        scaled=boolean("scale_input", config.get("scale_input", False)),
    )


def _check_fit(what: str, name: str, own: object, wanted: int) -> None:
    if own != wanted:
        raise Unsupported(f"{name} of {what} is {shown(own)}, and for this model it must be {wanted}: {ELSE}")
