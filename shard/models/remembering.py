"""What `Shape` says of layers that remember something of a sequence. Knows no tensor, as that."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

# Such as may have few bits, of a layer: outputs on a rank, inputs, and those on a rank.
Matrices = list[tuple[int, int, int]]


def changed(matrices: Matrices) -> int:
    """Elements of an adapter of rank 1 that changes these."""
    return sum(outputs + own for outputs, _, own in matrices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembering(ABC):
    """Of layers that remember something of a sequence, of the same size however long it is, instead of attending to keys that are
    cached, or besides: at least what last came into a convolution."""

    name: ClassVar[str]  # for people
    layers: frozenset[int]
    width: int  # tokens that the convolution sees, the last one included
    along: bool = False  # they attend as well, side by side with it

    @property
    @abstractmethod
    def divided(self) -> tuple[dict[str, int], dict[str, int]]:
        """What ranks must have equal parts of, by name, and of what several may have the same."""

    @abstractmethod
    def channels(self, ranks: int) -> int:
        """Of the convolution on a rank."""

    @abstractmethod
    def matrices(self, ranks: int, hidden: int) -> Matrices:
        """To the convolution's channels and what gates the result, and back."""

    @abstractmethod
    def adapted(self, ranks: int, hidden: int, apart: bool) -> int:
        """Elements of an adapter of rank 1 in a layer, at most: as many for each matrix as the product that it is part of has.

        apart: what few outputs go by is in a product of its own.
        """

    @abstractmethod
    def beside(self, ranks: int, hidden: int) -> int:
        """Elements of what else a layer has on a rank, what is `wide` included."""

    def memory(self, ranks: int) -> tuple[int, int, int]:
        """What a layer remembers of a sequence on a rank besides: heads, features of keys, features of values. In float32."""
        return 0, 0, 0

    def wide(self, ranks: int) -> int:
        """Elements that are in float32."""
        return 0

    @property
    def rule(self) -> int:
        """Operations of a token with each number of its memory."""
        return 0

    def squares(self, ranks: int) -> int:
        """Numbers of a token that ranks add up in a layer, for norms over what several of them have."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution(Remembering):
    """Short convolutions between two gates (Liquid AI 2025, arXiv:2511.23404), with nothing behind them."""

    name: ClassVar[str] = "short convolutions"
    size: int  # channels
    biased: bool = False  # and so are the matrices before and behind it

    @property
    def divided(self) -> tuple[dict[str, int], dict[str, int]]:
        """As that of `Remembering`."""
        return {"channels of short convolutions": self.size}, {}

    def channels(self, ranks: int) -> int:
        """As that of `Remembering`."""
        return self.size // ranks

    def matrices(self, ranks: int, hidden: int) -> Matrices:
        """As that of `Remembering`."""
        own = self.channels(ranks)
        return [(3 * own, hidden, hidden), (hidden, self.size, own)]

    def adapted(self, ranks: int, hidden: int, apart: bool) -> int:
        """As that of `Remembering`."""
        return changed(self.matrices(ranks, hidden))

    def beside(self, ranks: int, hidden: int) -> int:
        """Taps, and biases."""
        own = self.channels(ranks)
        return self.width * own + self.biased * (4 * own + hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(Remembering):
    """Linear attention: what a token finds in those before it is in a memory of fixed size for each head, behind the convolution.
    By the gated delta rule (Yang et al. 2024, arXiv:2412.06464), or with limits by state spaces (Dao and Gu 2024,
    arXiv:2405.21060), whose key heads are called groups."""

    name: ClassVar[str] = "linear attention"
    key_heads: int  # and as many of queries
    value_heads: int  # several of them, one after the other, for each key head
    key_size: int
    value_size: int
    limits: tuple[float, float] | None = None  # of the steps of state spaces
    home: str = "mamba"  # what has their tensors
    normal: bool = True  # a norm is behind them, and what gates the result goes before that
    joint: int = 1  # matrices that lead to all of it
    apart: bool = False  # each of which leads to one part
    strongest: float = 1.0  # of the delta rule: what strengths come near to at most
    sigmoid: bool = False  # what gates the result goes through that, instead of silu
    factors: tuple[float, ...] = (1.0,) * 5  # of what gates the result, values, keys, queries and steps of state spaces

    @property
    def divided(self) -> tuple[dict[str, int], dict[str, int]]:
        """As that of `Remembering`."""
        keys, values = {"key heads of linear attention": self.key_heads}, {"heads of linear attention": self.value_heads}
        return (values, keys) if self.limits else (keys | values, {})

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Features of queries, keys and values, of all heads together."""
        keys = self.key_heads * self.key_size
        return keys, keys, self.value_heads * self.value_size

    def keys(self, ranks: int) -> int:
        """Key heads of a rank. Of fewer groups than ranks, several ranks in a row have the same one."""
        return max(1, self.key_heads // ranks)

    def channels(self, ranks: int) -> int:
        """Queries, keys and values, heads one after the other."""
        return 2 * self.keys(ranks) * self.key_size + self.sizes[-1] // ranks

    def memory(self, ranks: int) -> tuple[int, int, int]:
        """As that of `Remembering`."""
        return self.value_heads // ranks, self.key_size, self.value_size

    def matrices(self, ranks: int, hidden: int) -> Matrices:
        """As that of `Remembering`."""
        values = self.sizes[-1]
        own = values // ranks
        return [(self.channels(ranks) + own, hidden, hidden), (hidden, values, own)]

    def adapted(self, ranks: int, hidden: int, apart: bool) -> int:
        """As that of `Remembering`."""
        gating = (1 if self.limits else 2) * self.value_heads // ranks
        first, back = self.matrices(ranks, hidden)
        twice = hidden * (apart and self.limits is not None)  # steps are a part of the matrix that leads to the others
        return self.joint * (gating + changed([first])) + twice + changed([back])

    def beside(self, ranks: int, hidden: int) -> int:
        """Strengths and fades, or steps, the convolution, the norm, and what is `wide`."""
        heads, channels = self.value_heads // ranks, self.channels(ranks)
        if self.limits:
            norm = self.normal * heads * self.value_size
            return heads * hidden + (self.width + 1) * channels + norm + self.wide(ranks)
        return 2 * heads * hidden + self.width * channels + self.value_size + self.wide(ranks)

    def wide(self, ranks: int) -> int:
        """Rates, offsets, and skips of state spaces."""
        return (3 if self.limits else 2) * self.value_heads // ranks

    @property
    def rule(self) -> int:
        """A token asks its memory once, or twice, and puts something in."""
        return 4 if self.limits else 6

    def squares(self, ranks: int) -> int:
        """Of groups of which several ranks have parts."""
        return self.key_heads if self.normal and self.key_heads < ranks else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FineLinear(Linear):
    """The gated delta rule where each feature of a key fades by itself (Kimi Team 2025, arXiv:2510.26692). Heads have as many
    features of keys as of values. How far all fades, and what gates the result, are made of as many features as a head has."""

    bound: float = 0.0  # of fades, see `kernels.gated_delta`; 0: they have none

    def matrices(self, ranks: int, hidden: int) -> Matrices:
        """To the convolution's channels alone, and back."""
        values = self.sizes[-1]
        return [(self.channels(ranks), hidden, hidden), (hidden, values, values // ranks)]

    def adapted(self, ranks: int, hidden: int, apart: bool) -> int:
        """As that of `Remembering`. Queries, keys, values, what fades and gates are made of, and strengths are of one product."""
        few, own = self.value_size, self.sizes[-1] // ranks
        gating = 2 * few + self.value_heads // ranks
        first, back = self.matrices(ranks, hidden)
        return 6 * (gating + changed([first])) + changed([(own, few, few)] * 2) + changed([back])

    def beside(self, ranks: int, hidden: int) -> int:
        """Strengths, what fades and gates are made of and by, the convolution, the norm, and what is `wide`."""
        heads, few, own = self.value_heads // ranks, self.value_size, self.sizes[-1] // ranks
        made = (heads + 2 * few) * hidden + 2 * few * own
        return made + self.width * self.channels(ranks) + few + self.wide(ranks)

    def wide(self, ranks: int) -> int:
        """Rates, and offsets of each feature."""
        return (self.value_heads + self.sizes[-1]) // ranks
