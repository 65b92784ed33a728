"""Draft heads that predict tokens from the target's last hidden state (Medusa, MLP speculator), with their weights: see
`readout_families`.

A head's *state* after a token is a row of numbers. The first head computes it from the target's features of the token before the
sequence's last one, and from the last one itself; the next head from that state and a draft, and so on. Logits follow from states.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import sqrt

from torch import Tensor
from torch.nn import functional

from ...kernels.linear import Invariance, Weight
from ..weights import Source
from .decoder import OUTPUTS, Decoder, lm_head_name
from .readout_families import MedusaShape, ReadoutShape, SpeculatorShape, prefix_of

EPSILON = 1e-6  # of the norms in the MLP speculator


class ReadoutHead(ABC):
    """All heads, one for each level of a tree, of which 0 follows the sequence's last token."""

    by_tokens: bool  # whether states depend on the drafted tokens

    def __init__(self, shape: ReadoutShape) -> None:
        self.shape = shape

    @abstractmethod
    def after(self, level: int, states: Tensor, tokens: Tensor) -> Tensor:
        """States of that level after `tokens` [rows]: [rows, ...]. states: of the previous level; at level 0 features, [rows,
        hidden]."""

    @abstractmethod
    def logits(self, level: int, states: Tensor) -> Tensor:
        """Logits after these states: [rows, vocabulary] float32, a tensor that the caller may overwrite."""

    @abstractmethod
    def weights(self) -> Iterator[Weight]:
        """All matrices."""


class MedusaHead(ReadoutHead):
    """Medusa: each head predicts from the features alone, whatever was drafted before it, by residual SiLU blocks and an LM head.
    Heads without LM heads use the target's, as in text-generation-inference."""

    by_tokens = False

    def __init__(self, shape: MedusaShape, source: Source, target: Decoder, whole: Source) -> None:
        """whole: the target's checkpoint, since with several ranks each has a part of the LM head."""
        super().__init__(shape)
        hidden, size = (shape.hidden, shape.hidden), (shape.vocabulary, shape.hidden)
        prefix = prefix_of(source.has) or ""
        names = [[f"{prefix}{level}.{block}" for block in range(shape.blocks + 1)] for level in range(shape.levels)]
        self._blocks = [
            [
                Weight(
                    source.tensor(f"{name}.linear.weight", hidden),
                    source.tensor(f"{name}.linear.bias", hidden[:1]),
                    Invariance.GUESS,
                )
                for name in own[:-1]
            ]
            for own in names
        ]
        self._target = None if source.has(f"{names[0][-1]}.weight") else target
        if self._target is None:
            self._outputs = [Weight(source.tensor(f"{own[-1]}.weight", size), exact=Invariance.GUESS) for own in names]
        else:
            self._outputs = [_output(target, whole)] * shape.levels

    def after(self, level: int, states: Tensor, tokens: Tensor) -> Tensor:
        """See ReadoutHead: states stay the features."""
        return states

    def logits(self, level: int, states: Tensor) -> Tensor:
        """See ReadoutHead."""
        for block in self._blocks[level]:
            states = states + functional.silu(block(states))
        if self._target is not None and self._outputs[level] is self._target.head:
            states = self._target.precise(states)
        found = self._outputs[level](states)
        return found.float() if self._target is None else self._target.scaled(found)

    def weights(self) -> Iterator[Weight]:
        """See ReadoutHead."""
        for own in self._blocks:
            yield from own
        yield from self._outputs


class MlpSpeculatorHead(ReadoutHead):
    """The MLP speculator: each head's state is a norm and GELU of a weighted sum of the previous state's projection and the token's
    embedding, with weights such that in the end the features count as much as all tokens together."""

    by_tokens = True

    def __init__(self, shape: SpeculatorShape, source: Source) -> None:
        super().__init__(shape)
        self._scaled = shape.scaled
        sets, inner, size = 1 if shape.tied else shape.levels, shape.inner, (shape.vocabulary, shape.inner)
        share = 0.5 ** (0.5 / shape.levels)
        self._state_share, self._token_share = share, sqrt((1 - share**2) * inner / 2)
        projections = min(shape.levels, 2) if shape.tied else shape.levels

        def named(part: str, number: int) -> str:
            return f"speculator.{part}.{number}.weight"

        self._tables = [source.tensor(named("emb", i), size) for i in range(sets)]
        self._projections = [
            Weight(source.tensor(named("proj", i), (inner, inner if i else shape.hidden)), exact=Invariance.GUESS)
            for i in range(projections)
        ]
        self._gains = [source.tensor(named("ln", i), (inner,)) for i in range(sets)]
        self._biases = [source.tensor(f"speculator.ln.{i}.bias", (inner,)) for i in range(sets)]
        self._outputs = [Weight(source.tensor(named("head", i), size), exact=Invariance.GUESS) for i in range(sets)]

    def after(self, level: int, states: Tensor, tokens: Tensor) -> Tensor:
        """See ReadoutHead."""
        if not level and self._scaled:
            states = functional.rms_norm(states, states.shape[1:], eps=EPSILON) / sqrt(2)
        own, projection = (min(level, len(parts) - 1) for parts in (self._tables, self._projections))
        embedded = functional.embedding(tokens, self._tables[own])
        sums = self._projections[projection](states) * self._state_share + embedded * self._token_share
        return functional.gelu(functional.rms_norm(sums, sums.shape[1:], self._gains[own], EPSILON) + self._biases[own])

    def logits(self, level: int, states: Tensor) -> Tensor:
        """See ReadoutHead."""
        return self._outputs[min(level, len(self._outputs) - 1)](states).float()

    def weights(self) -> Iterator[Weight]:
        """See ReadoutHead."""
        yield from self._projections
        yield from self._outputs


def _output(target: Decoder, whole: Source) -> Weight:
    """The target's whole LM head."""
    if target.ranks.size == 1:
        return target.head
    shape = target.shape
    bias = whole.tensor(f"{OUTPUTS[0].removesuffix('weight')}bias", (shape.vocabulary,)) if shape.logit_bias else None
    return Weight(whole.tensor(lm_head_name(whole, shape), (shape.vocabulary, shape.hidden)), bias, Invariance.GUESS)


def readout_head(shape: ReadoutShape, source: Source, target: Decoder, whole: Source) -> ReadoutHead:
    """The heads of that shape. source: their checkpoint; whole: the target's."""
    if isinstance(shape, MedusaShape):
        return MedusaHead(shape, source, target, whole)
    assert isinstance(shape, SpeculatorShape)
    return MlpSpeculatorHead(shape, source)
