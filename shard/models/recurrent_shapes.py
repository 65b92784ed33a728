"""The part of a `Shape` that describes layers with recurrent state: linear attention, state spaces and short convolutions. Holds no
tensor, like `Shape`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

# Matrices of a layer that may be quantized: outputs on a rank, inputs, and inputs on a rank.
Matrices = list[tuple[int, int, int]]


def lora_elements(matrices: Matrices) -> int:
    """Elements of a LoRA adapter of rank 1 that changes these matrices."""
    return sum(outputs + own for outputs, _, own in matrices)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape(ABC):
    """Layers with a recurrent state per sequence, of fixed size however long the sequence is, in place of attention or beside it:
    at least the last inputs of a convolution."""

    name: ClassVar[str]  # for people
    layers: frozenset[int]
    width: int  # of the causal convolution: tokens that it spans, the present one included
    along: bool = False  # the layers have attention as well, side by side with it

    @property
    @abstractmethod
    def divided(self) -> tuple[dict[str, int], dict[str, int]]:
        """Sizes that ranks must divide equally, by name, and those of which several ranks may hold the same part."""

    @abstractmethod
    def channels(self, ranks: int) -> int:
        """Channels of the convolution on a rank."""

    @abstractmethod
    def matrices(self, ranks: int, hidden: int) -> Matrices:
        """The projection to the convolution's channels and the output gate, and the output projection."""

    @abstractmethod
    def adapted(self, ranks: int, hidden: int, apart: bool) -> int:
        """Elements of a LoRA adapter of rank 1 in a layer, at most: as many for each matrix as for the fused product that it is
        part of.

        apart: projections to few outputs are in a product of their own.
        """

    @abstractmethod
    def beside(self, ranks: int, hidden: int) -> int:
        """Other parameters of a layer on a rank, what is in `floats` included."""

    def memory(self, ranks: int) -> tuple[int, int, int]:
        """A layer's recurrent state of a sequence on a rank, besides the convolution's: heads, features of keys, features of
        values. In float32."""
        return 0, 0, 0

    def floats(self, ranks: int) -> int:
        """Parameters held in float32."""
        return 0

    @property
    def rule(self) -> int:
        """Operations per token and element of the recurrent state."""
        return 0

    def squares(self, ranks: int) -> int:
        """Numbers per token that ranks sum up in a layer, for norms over features that they share."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolutionShape(RecurrentShape):
    """Gated short convolutions (Liquid AI 2025, arXiv:2511.23404), without a recurrent state besides their last inputs."""

    name: ClassVar[str] = "short convolutions"
    size: int  # channels
    biased: bool = False  # as have the matrices before and after it

    @property
    def divided(self) -> tuple[dict[str, int], dict[str, int]]:
        """See `RecurrentShape`."""
        return {"channels of short convolutions": self.size}, {}

    def channels(self, ranks: int) -> int:
        """See `RecurrentShape`."""
        return self.size // ranks

    def matrices(self, ranks: int, hidden: int) -> Matrices:
        """See `RecurrentShape`."""
        own = self.channels(ranks)
        return [(3 * own, hidden, hidden), (hidden, self.size, own)]

    def adapted(self, ranks: int, hidden: int, apart: bool) -> int:
        """See `RecurrentShape`."""
        return lora_elements(self.matrices(ranks, hidden))

    def beside(self, ranks: int, hidden: int) -> int:
        """The convolution's taps, and biases."""
        own = self.channels(ranks)
        return self.width * own + self.biased * (4 * own + hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionShape(RecurrentShape):
    """Linear attention: each head keeps a recurrent state of fixed size, after a convolution. It is updated by the gated delta rule
    (Yang et al. 2024, arXiv:2412.06464)."""

    name: ClassVar[str] = "linear attention"
    key_heads: int  # and as many query heads
    value_heads: int  # a multiple of the key heads: consecutive ones share a key head
    key_size: int
    value_size: int
    joint: int = 1  # matrices in the checkpoint that make up its input projections
    apart: bool = False  # each of these leads to one part (queries, keys, ...)
    strongest: float = 1.0  # the upper bound of beta, the update strength
    sigmoid: bool = False  # the output gate goes through sigmoid, instead of silu

    @property
    def divided(self) -> tuple[dict[str, int], dict[str, int]]:
        """See `RecurrentShape`."""
        return {"key heads of linear attention": self.key_heads, "heads of linear attention": self.value_heads}, {}

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Features of queries, keys and values, of all heads together."""
        keys = self.key_heads * self.key_size
        return keys, keys, self.value_heads * self.value_size

    def keys(self, ranks: int) -> int:
        """Key heads of a rank. Of fewer heads than ranks, several ranks in a row have the same one."""
        return max(1, self.key_heads // ranks)

    def channels(self, ranks: int) -> int:
        """Channels of queries, keys and values, heads one after the other."""
        return 2 * self.keys(ranks) * self.key_size + self.sizes[-1] // ranks

    def memory(self, ranks: int) -> tuple[int, int, int]:
        """See `RecurrentShape`."""
        return self.value_heads // ranks, self.key_size, self.value_size

    def matrices(self, ranks: int, hidden: int) -> Matrices:
        """See `RecurrentShape`."""
        values = self.sizes[-1]
        own = values // ranks
        return [(self.channels(ranks) + own, hidden, hidden), (hidden, values, own)]

    def adapted(self, ranks: int, hidden: int, apart: bool) -> int:
        """See `RecurrentShape`."""
        first, back = self.matrices(ranks, hidden)
        return self.joint * (2 * self.value_heads // ranks + lora_elements([first])) + lora_elements([back])

    def beside(self, ranks: int, hidden: int) -> int:
        """Projections to beta and decay, the convolution, the norm, and what is in `floats`."""
        return 2 * self.value_heads // ranks * hidden + self.width * self.channels(ranks) + self.value_size + self.floats(ranks)

    def floats(self, ranks: int) -> int:
        """Decay rates, and biases of decays."""
        return 2 * self.value_heads // ranks

    @property
    def rule(self) -> int:
        """A token reads the recurrent state twice, and updates it."""
        return 6


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceShape(LinearAttentionShape):
    """State spaces (Mamba-2: Dao and Gu 2024, arXiv:2405.21060), whose key heads are called groups."""

    limits: tuple[float, float]  # of the time steps
    home: str = "mamba"  # module that holds the tensors
    normal: bool = True  # a norm follows, and the output gate is applied before it
    factors: tuple[float, ...] = (1.0,) * 5  # factors of gates, values, keys, queries and time steps

    @property
    def divided(self) -> tuple[dict[str, int], dict[str, int]]:
        """See `RecurrentShape`."""
        return {"heads of linear attention": self.value_heads}, {"key heads of linear attention": self.key_heads}

    def adapted(self, ranks: int, hidden: int, apart: bool) -> int:
        """See `RecurrentShape`. Time steps are a part of the matrix that leads to the others."""
        first, back = self.matrices(ranks, hidden)
        return apart * hidden + self.value_heads // ranks + lora_elements([first]) + lora_elements([back])

    def beside(self, ranks: int, hidden: int) -> int:
        """Projections to time steps, the convolution, the norm, and what is in `floats`."""
        heads, channels = self.value_heads // ranks, self.channels(ranks)
        return heads * hidden + (self.width + 1) * channels + self.normal * heads * self.value_size + self.floats(ranks)

    def floats(self, ranks: int) -> int:
        """Decay rates, biases of time steps, and the skip connection (D)."""
        return 3 * self.value_heads // ranks

    @property
    def rule(self) -> int:
        """A token reads the recurrent state once, and updates it."""
        return 4

    def squares(self, ranks: int) -> int:
        """Of groups that are divided among several ranks."""
        return self.key_heads if self.normal and self.key_heads < ranks else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaShape(LinearAttentionShape):
    """Kimi Delta Attention: the gated delta rule with a decay for each feature of a key (Kimi Team 2025, arXiv:2510.26692). Keys
    and values of a head have the same size. Decays and output gates are computed through low-rank projections, whose rank is the
    head size."""

    bound: float = 0.0  # lower bound of the logarithms of decays, see `kernels.gated_delta`; 0: there is none

    def matrices(self, ranks: int, hidden: int) -> Matrices:
        """The projection to the convolution's channels alone, and the output projection."""
        values = self.sizes[-1]
        return [(self.channels(ranks), hidden, hidden), (hidden, values, values // ranks)]

    def adapted(self, ranks: int, hidden: int, apart: bool) -> int:
        """See `RecurrentShape`. Projections to queries, keys, values, the ranks of decays and gates, and beta are one product."""
        few, own = self.value_size, self.sizes[-1] // ranks
        gating = 2 * few + self.value_heads // ranks
        first, back = self.matrices(ranks, hidden)
        return 6 * (gating + lora_elements([first])) + lora_elements([(own, few, few)] * 2) + lora_elements([back])

    def beside(self, ranks: int, hidden: int) -> int:
        """Projections to beta, the low-rank ones of decays and gates, the convolution, the norm, and what is in `floats`."""
        heads, few, own = self.value_heads // ranks, self.value_size, self.sizes[-1] // ranks
        made = (heads + 2 * few) * hidden + 2 * few * own
        return made + self.width * self.channels(ranks) + few + self.floats(ranks)

    def floats(self, ranks: int) -> int:
        """Decay rates of heads, and decay biases of features."""
        return (self.value_heads + self.sizes[-1]) // ranks
