"""Heads that read what may come next off what their model makes of a token, without layers, keys or values of their own. Imports
no torch: the launcher plans with them.

Medusa (Cai et al. 2024, arXiv:2401.10774) has a head for each place behind the model's own next token. The MLP speculator
(Wertheimer et al. 2024, arXiv:2404.19124) goes on from head to head by the tokens in between. Both go by what the model's last norm
gives.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isqrt

from .fields import ELSE, Config, boolean, shown, whole
from .shape import Unsupported

SPECULATOR = "MLPSpeculatorPreTrainedModel"
HEADS = "medusa_num_heads"
OUTPUTS = "medusa_outputs"  # no field of any config.json: whether heads have output matrices; see `with_sizes`
PREFIXES = ("", "medusa_head.", "medusa_heads.", "medusa.")  # of names of Medusa's tensors, which its makers have none of
FIRST = "0.0.linear.weight"  # of these
MOST_LEVELS = 127  # as many drafts as a step may have
MOST_BLOCKS = 1 << 6
MOST_SIZE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadoutShape(ABC):
    """Of all heads together."""

    architecture: str
    hidden: int  # of the model: what the first head goes by
    vocabulary: int  # the model's
    levels: int  # heads, each for one token more: so deep a tree may be

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
    """Blocks that add to what they see, and an output matrix behind them."""

    blocks: int  # of each head
    outputs: bool  # each head has such a matrix; else all take the model's

    def parameters(self) -> int:
        """See ReadoutShape."""
        block, output = self.hidden**2 + self.hidden, self.vocabulary * self.hidden
        return self.levels * (self.blocks * block + self.outputs * output)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculatorShape(ReadoutShape):
    """For each head an embedding table, a projection, a norm and an output matrix."""

    inner: int  # what heads make, and the width of tables
    tied: bool  # all heads have the same ones; but the first projection is another
    scaled: bool  # what the first head goes by is normalized

    def parameters(self) -> int:
        """See ReadoutShape."""
        sets = 1 if self.tied else self.levels
        projections = self.hidden + (min(self.levels - 1, 1) if self.tied else self.levels - 1) * self.inner
        return sets * 2 * (self.vocabulary + 1) * self.inner + projections * self.inner


def is_readout(config: Config) -> bool:
    """Whether a parsed config.json describes such heads. That of a whole model may, too, beside the model."""
    return HEADS in config or _is_speculator(config)


def stands_alone(config: Config) -> bool:
    """Whether it describes them, and no model."""
    return is_readout(config) and "num_attention_heads" not in config


def levels_of(config: Config) -> int:
    """How many heads it describes. Raises Unsupported."""
    name = "n_predict" if _is_speculator(config) else HEADS
    return whole(name, config.get(name), 1, MOST_LEVELS)


def readout_shape(config: Config, hidden: int, vocabulary: int) -> ReadoutShape:
    """Of such heads, for a model of that hidden size and vocabulary. Raises Unsupported."""
    return (_speculator if _is_speculator(config) else _medusa)(config, hidden, vocabulary)


def with_sizes(config: Config, elements: Mapping[str, int]) -> Config:
    """The same, and where it is Medusa's, which names no sizes, with those of its tensors. elements: how many each tensor has; {}:
    they will be made up, for heads without output matrices. Raises Unsupported where there are others, and none of Medusa's."""
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
    """What names of Medusa's tensors begin with. has: whether there is one of that name; None: there is none of Medusa's."""
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
        levels=levels_of(config),
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
        levels=levels_of(config),
        inner=whole("inner_dim", config.get("inner_dim"), 0, MOST_SIZE) or hidden,
        tied=boolean("tie_weights", config.get("tie_weights", False)),
        scaled=boolean("scale_input", config.get("scale_input", False)),
    )


def _check_fit(what: str, name: str, own: object, wanted: int) -> None:
    if own != wanted:
        raise Unsupported(f"{name} of {what} is {shown(own)}, and for this model it must be {wanted}: {ELSE}")
