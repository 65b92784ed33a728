"""Shared harness for tests of recurrent layers (linear attention, state spaces, short convolutions), whatever their update rule."""

import itertools
import random
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from penstock.kernels.spans import RecurrentStates, Spans

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SLOTS = 12


class Rule(ABC):
    """A layer with random weights and this update rule, and what transformers computes for the same; it may have no recurrent
    state. `tolerance`: for `check`."""

    taps: Tensor
    tolerance: float

    @property
    @abstractmethod
    def memory(self) -> tuple[int, int, int]:
        """Heads, features of keys, features of values."""

    @abstractmethod
    def inputs(self, tokens: int) -> tuple[Tensor, ...]:
        """Columns of something wider that holds no numbers elsewhere, of which the first go into the convolution."""

    @abstractmethod
    def run(self, inputs: tuple[Tensor, ...], spans: Spans, states: RecurrentStates) -> Tensor:
        """Ours."""

    @abstractmethod
    def expected(self, inputs: tuple[Tensor, ...], window: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Theirs, of one span: what its tokens find, the new window and the new memory."""

    def size(self, found: Tensor, more: float = 0.0) -> float:
        """By which absolute tolerances grow: of sums of many products, some of them large, that of the largest, and more."""
        return 1.0

    def states(self, slots: int) -> RecurrentStates:
        channels, width = self.taps.shape
        windows = torch.randn(slots, width - 1, channels).to(self.taps)
        return RecurrentStates(windows, torch.randn(slots, *self.memory, device=DEVICE))


def wide(taps: Tensor, tokens: int, more: int) -> tuple[Tensor, Tensor]:
    """As `Rule.inputs`: what goes into the convolution, and `more` numbers of each token."""
    channels = len(taps)
    whole = torch.full((tokens, channels + more + 9), torch.nan).to(taps)
    whole[:, 2 : channels + 2] = torch.randn(tokens, channels)
    whole[:, channels + 5 : channels + 5 + more] = 2 * torch.randn(tokens, more)
    return whole[:, 2 : channels + 2], whole[:, channels + 5 : channels + 5 + more]


def random_lengths(chance: random.Random) -> list[int]:
    """Tokens of some spans: many decode, others are chunks of prompts."""
    return [chance.choice([1, 1, 1, chance.randint(2, 9), chance.randint(10, 200)]) for _ in range(chance.randint(1, 6))]


def spans_of(lengths: list[int], slots: list[int], fresh: list[int], sure: list[int] | None = None) -> Spans:
    starts = [0, *itertools.accumulate(lengths)]
    return Spans(tuple(lengths), *(torch.tensor(numbers, device=DEVICE) for numbers in (starts, slots, fresh, sure or lengths)))


def copied(states: RecurrentStates) -> RecurrentStates:
    return RecurrentStates(states.windows.clone(), states.memories.clone())


def check(layer: Rule, lengths: list[int], chance: random.Random, padding: int = 0) -> None:
    """Against the oracle, from scattered slots, some of them poisoned; what isn't anybody's stays."""
    inputs, states = layer.inputs(sum(lengths) + padding), layer.states(len(lengths) + 3)
    slots = chance.sample(range(1, len(lengths) + 3), len(lengths))
    fresh = [chance.randint(0, 1) for _ in lengths]
    for slot, new in zip(slots, fresh, strict=True):
        if new:
            states.windows[slot] = states.memories[slot] = torch.nan
    before = copied(states)
    if padding:
        inputs[0][-padding:] = torch.nan
    result = layer.run(inputs, spans_of(lengths, slots, fresh), states)
    assert result.dtype == layer.taps.dtype
    starts = [0, *itertools.accumulate(lengths)]
    tolerance = layer.tolerance
    for start, end, slot, new in zip(starts, starts[1:], slots, fresh, strict=False):
        window, memory = (torch.zeros_like(each[slot]) if new else each[slot] for each in (before.windows, before.memories))
        found, window, memory = layer.expected(tuple(each[start:end] for each in inputs), window, memory)
        size = layer.size(found, more=1.0)
        torch.testing.assert_close(result[start:end].float(), found, rtol=tolerance, atol=tolerance * size)
        torch.testing.assert_close(states.memories[slot], memory, rtol=tolerance, atol=tolerance * size)
        assert states.windows[slot].float().equal(window)
    assert not result[starts[-1] :].any()
    others = [slot for slot in range(1, len(before.windows)) if slot not in slots]
    assert states.windows[others].equal(before.windows[others])
    assert states.memories[others].equal(before.memories[others])


def check_cuts(layer: Rule, inputs: tuple[Tensor, ...], chance: random.Random) -> None:
    """Two sequences of 115 tokens come to the same in pieces, and in other slots. In float32."""
    states = layer.states(4)
    whole = layer.run(inputs, spans_of([115, 115], [1, 2], [1, 1]), states)
    cut, done = layer.states(4), [0, 0]
    limits, size = [115, 115], layer.size(whole)
    while done != limits:
        lengths = [min(chance.choice([1, 2, 3, 64, 70]), limit - had) for had, limit in zip(done, limits, strict=True)]
        which = [i for i in (0, 1) if lengths[i]]
        rows = [row for i in which for row in range(115 * i + done[i], 115 * i + done[i] + lengths[i])]
        spans = spans_of([lengths[i] for i in which], [3 - i for i in which], [int(not done[i]) for i in which])
        found = layer.run(tuple(each[rows] for each in inputs), spans, cut)
        torch.testing.assert_close(found, whole[rows], rtol=1e-5, atol=1e-5 * size)
        done = [had + more for had, more in zip(done, lengths, strict=True)]
    torch.testing.assert_close(cut.memories[[3, 2]], states.memories[[1, 2]], rtol=1e-5, atol=1e-5 * size)
    assert cut.windows[[3, 2]].equal(states.windows[[1, 2]])


def check_padding(layer: Rule) -> None:
    """Slot 0 may hold anything, before and after; what padding finds is a number all the same."""
    states = layer.states(3)
    states.memories[0] = states.windows[0] = torch.nan
    states.memories[2] = states.windows[2] = torch.nan
    before = copied(states)
    result = layer.run(layer.inputs(4), spans_of([1, 1, 1], [1, 0, 0], [0, 0, 0]), states)
    assert result.isfinite().all()
    for found, old in ((states.windows, before.windows), (states.memories, before.memories)):
        assert found[1].isfinite().all()
        assert not found.numel() or not found[1].equal(old[1])
        assert found[2].isnan().all()


def check_speculation(layer: Rule, lengths: list[int], alike: int, chance: random.Random, tolerance: float) -> None:
    """What tokens find is what they find where none is a guess, and states are those behind the last that is none. alike: so many
    spans more that are alike, which go together."""
    sure = [chance.randint(1, length) for length in lengths]
    lengths, sure = [*lengths, *[7] * alike], [*sure, *[3] * alike]
    slots, fresh = chance.sample(range(1, SLOTS), len(lengths)), [chance.randint(0, 1) for _ in lengths]
    states, inputs = layer.states(SLOTS), layer.inputs(sum(lengths))
    whole, first = copied(states), copied(states)
    found = layer.run(inputs, spans_of(lengths, slots, fresh, sure), states)
    expected = layer.run(inputs, spans_of(lengths, slots, fresh), whole)
    starts = [0, *itertools.accumulate(lengths)]
    kept = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, sure, strict=False)])
    layer.run(tuple(part[kept] for part in inputs), spans_of(sure, slots, fresh), first)
    size = layer.size(expected.float(), more=1.0)
    torch.testing.assert_close(found, expected, atol=tolerance * size, rtol=tolerance)
    torch.testing.assert_close(states.windows, first.windows, atol=0, rtol=0)
    torch.testing.assert_close(states.memories, first.memories, atol=tolerance * size, rtol=tolerance)
    assert not whole.windows.equal(first.windows)
    assert not whole.memories.numel() or not torch.allclose(whole.memories, first.memories, atol=0.1)
