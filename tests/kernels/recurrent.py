"""Checks shared by the tests of recurrent layers (linear attention, state spaces, short convolutions), whatever their update
rule."""

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
    """A recurrent layer with random weights: penstock's implementation, and what transformers computes for the same layer. It may
    have no recurrent state besides the convolution state. `tolerance`: for `check`."""

    taps: Tensor
    tolerance: float

    @property
    @abstractmethod
    def memory(self) -> tuple[int, int, int]:
        """Size of a recurrent state: heads, features of keys, features of values."""

    @abstractmethod
    def inputs(self, tokens: int) -> tuple[Tensor, ...]:
        """Views of columns of a wider tensor that is NaN elsewhere. The first ones go into the convolution."""

    @abstractmethod
    def run(self, inputs: tuple[Tensor, ...], spans: Spans, states: RecurrentStates) -> Tensor:
        """penstock's outputs; updates the states."""

    @abstractmethod
    def expected(self, inputs: tuple[Tensor, ...], window: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """transformers' results for one span: outputs, new convolution state and new recurrent state."""

    def size(self, found: Tensor, more: float = 0.0) -> float:
        """Factor of the absolute tolerances: for sums of many products, some of them large, it is the largest output, plus
        `more`."""
        return 1.0

    def states(self, slots: int) -> RecurrentStates:
        channels, width = self.taps.shape
        windows = torch.randn(slots, width - 1, channels).to(self.taps)
        return RecurrentStates(windows, torch.randn(slots, *self.memory, device=DEVICE))


def poisoned_views(taps: Tensor, tokens: int, features: int) -> tuple[Tensor, Tensor]:
    """For `Rule.inputs`: the convolution's inputs, and so many more features of each token, as views of a wider tensor of NaN."""
    channels = len(taps)
    parent = torch.full((tokens, channels + features + 9), torch.nan).to(taps)
    parent[:, 2 : channels + 2] = torch.randn(tokens, channels)
    parent[:, channels + 5 : channels + 5 + features] = 2 * torch.randn(tokens, features)
    return parent[:, 2 : channels + 2], parent[:, channels + 5 : channels + 5 + features]


def random_span_lengths(rng: random.Random) -> list[int]:
    """Tokens of some spans: many are decodes, others prompt chunks."""
    return [rng.choice([1, 1, 1, rng.randint(2, 9), rng.randint(10, 200)]) for _ in range(rng.randint(1, 6))]


def make_spans(lengths: list[int], slots: list[int], fresh: list[int], accepted: list[int] | None = None) -> Spans:
    starts = [0, *itertools.accumulate(lengths)]
    return Spans(tuple(lengths), *(torch.tensor(numbers, device=DEVICE) for numbers in (starts, slots, fresh, accepted or lengths)))


def copy_states(states: RecurrentStates) -> RecurrentStates:
    return RecurrentStates(states.windows.clone(), states.memories.clone())


def check_against_oracle(layer: Rule, lengths: list[int], rng: random.Random, padding: int = 0) -> None:
    """Compares outputs and states with the oracle's. States lie in scattered slots; those of fresh sequences hold NaN before.
    States in other slots must not change."""
    inputs, states = layer.inputs(sum(lengths) + padding), layer.states(len(lengths) + 3)
    slots = rng.sample(range(1, len(lengths) + 3), len(lengths))
    fresh = [rng.randint(0, 1) for _ in lengths]
    for slot, is_fresh in zip(slots, fresh, strict=True):
        if is_fresh:
            states.windows[slot] = states.memories[slot] = torch.nan
    before = copy_states(states)
    if padding:
        inputs[0][-padding:] = torch.nan
    result = layer.run(inputs, make_spans(lengths, slots, fresh), states)
    assert result.dtype == layer.taps.dtype
    starts = [0, *itertools.accumulate(lengths)]
    tolerance = layer.tolerance
    for start, end, slot, is_fresh in zip(starts, starts[1:], slots, fresh, strict=False):
        window, memory = (torch.zeros_like(part[slot]) if is_fresh else part[slot] for part in (before.windows, before.memories))
        found, window, memory = layer.expected(tuple(part[start:end] for part in inputs), window, memory)
        scale = layer.size(found, more=1.0)
        torch.testing.assert_close(result[start:end].float(), found, rtol=tolerance, atol=tolerance * scale)
        torch.testing.assert_close(states.memories[slot], memory, rtol=tolerance, atol=tolerance * scale)
        assert states.windows[slot].float().equal(window)
    assert not result[starts[-1] :].any()
    unused = [slot for slot in range(1, len(before.windows)) if slot not in slots]
    assert states.windows[unused].equal(before.windows[unused])
    assert states.memories[unused].equal(before.memories[unused])


def check_chunking(layer: Rule, inputs: tuple[Tensor, ...], rng: random.Random) -> None:
    """Two sequences of 115 tokens have the same outputs and states when they are computed in chunks and in other slots. In
    float32."""
    states = layer.states(4)
    whole = layer.run(inputs, make_spans([115, 115], [1, 2], [1, 1]), states)
    chunked_states, computed = layer.states(4), [0, 0]
    limits, scale = [115, 115], layer.size(whole)
    while computed != limits:
        lengths = [min(rng.choice([1, 2, 3, 64, 70]), limit - start) for start, limit in zip(computed, limits, strict=True)]
        sequences = [i for i in (0, 1) if lengths[i]]
        rows = [row for i in sequences for row in range(115 * i + computed[i], 115 * i + computed[i] + lengths[i])]
        spans = make_spans([lengths[i] for i in sequences], [3 - i for i in sequences], [int(not computed[i]) for i in sequences])
        outputs = layer.run(tuple(part[rows] for part in inputs), spans, chunked_states)
        torch.testing.assert_close(outputs, whole[rows], rtol=1e-5, atol=1e-5 * scale)
        computed = [start + length for start, length in zip(computed, lengths, strict=True)]
    torch.testing.assert_close(chunked_states.memories[[3, 2]], states.memories[[1, 2]], rtol=1e-5, atol=1e-5 * scale)
    assert chunked_states.windows[[3, 2]].equal(states.windows[[1, 2]])


def check_padding(layer: Rule) -> None:
    """The state in slot 0, which padding uses, may hold anything before and after; the outputs of padding are finite all the
    same."""
    states = layer.states(3)
    states.memories[0] = states.windows[0] = torch.nan
    states.memories[2] = states.windows[2] = torch.nan
    before = copy_states(states)
    result = layer.run(layer.inputs(4), make_spans([1, 1, 1], [1, 0, 0], [0, 0, 0]), states)
    assert result.isfinite().all()
    for found, old in ((states.windows, before.windows), (states.memories, before.memories)):
        assert found[1].isfinite().all()
        assert not found.numel() or not found[1].equal(old[1])
        assert found[2].isnan().all()


def check_drafts(layer: Rule, lengths: list[int], equal_spans: int, rng: random.Random, tolerance: float) -> None:
    """Outputs of spans with draft tokens equal those of spans without, and the states are those after each span's last token that
    is no draft. equal_spans: number of additional spans with equal lengths, which are batched."""
    accepted = [rng.randint(1, length) for length in lengths]
    lengths, accepted = [*lengths, *[7] * equal_spans], [*accepted, *[3] * equal_spans]
    slots, fresh = rng.sample(range(1, SLOTS), len(lengths)), [rng.randint(0, 1) for _ in lengths]
    states, inputs = layer.states(SLOTS), layer.inputs(sum(lengths))
    without_drafts, accepted_only = copy_states(states), copy_states(states)
    found = layer.run(inputs, make_spans(lengths, slots, fresh, accepted), states)
    expected = layer.run(inputs, make_spans(lengths, slots, fresh), without_drafts)
    starts = [0, *itertools.accumulate(lengths)]
    kept = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, accepted, strict=False)])
    layer.run(tuple(part[kept] for part in inputs), make_spans(accepted, slots, fresh), accepted_only)
    size = layer.size(expected.float(), more=1.0)
    torch.testing.assert_close(found, expected, atol=tolerance * size, rtol=tolerance)
    torch.testing.assert_close(states.windows, accepted_only.windows, atol=0, rtol=0)
    torch.testing.assert_close(states.memories, accepted_only.memories, atol=tolerance * size, rtol=tolerance)
    assert not without_drafts.windows.equal(accepted_only.windows)
    assert not without_drafts.memories.numel() or not torch.allclose(without_drafts.memories, accepted_only.memories, atol=0.1)
