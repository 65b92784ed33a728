"""Linear attention by the gated delta rule equals transformers', however sequences are cut, by torch and by Triton's kernels."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_5 import modeling_qwen3_5 as oracle

from penstock.kernels import choose
from penstock.kernels import gated_delta as module
from penstock.kernels.gated_delta import Spans, States, gated_delta, gated_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What kernels write to holds no numbers before."""

    def empty(*arguments: Any, **options: Any) -> Tensor:
        return honest(*arguments, **options).fill_(torch.nan)

    honest = torch.empty
    monkeypatch.setattr(module.torch, "empty", empty)
    choose.force("reference")
    yield
    choose.force("")


@dataclass(frozen=True)
class Layer:
    """Sizes, and what belongs to a layer."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: Tensor
    rates: Tensor
    offsets: Tensor

    def states(self, slots: int) -> States:
        channels, width = self.taps.shape
        windows = torch.randn(slots, width - 1, channels).to(self.taps)
        return States(windows, torch.randn(slots, self.value_heads, self.key_size, self.value_size, device=DEVICE))

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Mixed, strengths and fades: columns of something wider that holds no numbers elsewhere."""
        channels, heads = len(self.taps), self.value_heads
        whole = torch.full((tokens, channels + 2 * heads + 9), torch.nan).to(self.taps)
        whole[:, 2 : channels + 2] = torch.randn(tokens, channels)
        whole[:, channels + 5 : channels + 5 + 2 * heads] = 2 * torch.randn(tokens, 2 * heads)
        return whole[:, 2 : channels + 2], *whole[:, channels + 5 : channels + 5 + 2 * heads].chunk(2, 1)


def layer_of(chance: random.Random, dtype: torch.dtype, most: int = 64, heads: int = 4) -> Layer:
    key_heads = chance.randint(1, heads)
    value_heads = key_heads * chance.randint(1, heads)
    key_size, value_size = chance.randint(8, most), chance.randint(8, most)
    taps = torch.randn(2 * key_heads * key_size + value_heads * value_size, chance.randint(2, 5)).to(DEVICE, dtype)
    rates, offsets = -16 * torch.rand(value_heads) ** 4, torch.randn(value_heads)
    return Layer(key_heads, value_heads, key_size, value_size, taps, rates.to(DEVICE), offsets.to(DEVICE))


def spans_of(lengths: list[int], slots: list[int], fresh: list[int], sure: list[int] | None = None) -> Spans:
    starts = [0, *itertools.accumulate(lengths)]
    return Spans(tuple(lengths), *(torch.tensor(numbers, device=DEVICE) for numbers in (starts, slots, fresh, sure or lengths)))


def run(layer: Layer, inputs: tuple[Tensor, Tensor, Tensor], spans: Spans, states: States) -> Tensor:
    return gated_delta(*inputs, layer.taps, layer.rates, layer.offsets, spans, states)


def expected(layer: Layer, inputs: tuple[Tensor, Tensor, Tensor], window: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What transformers makes of one span: what its tokens find, the new window and the new memory."""
    mixed, strengths, fades = (each.float() for each in inputs)
    seen = torch.cat((window.float(), mixed))
    features = oracle.causal_conv1d_fn(seen.t()[None], layer.taps.float(), activation="silu")[0, :, len(window) :].t()
    parts = (
        features.to(layer.taps.dtype)
        .float()
        .tensor_split((layer.key_heads * layer.key_size, 2 * layer.key_heads * layer.key_size), 1)
    )
    sizes = layer.key_size, layer.key_size, layer.value_size
    heads = [part.reshape(1, len(mixed), -1, size) for part, size in zip(parts, sizes, strict=True)]
    decay = layer.rates * functional.softplus(fades + layer.offsets)
    found, memory = oracle.torch_recurrent_gated_delta_rule(  # the other way of theirs adds up whole fading in 32 bits
        *heads,
        decay[None],
        strengths.sigmoid()[None],
        initial_state=memory[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return found[0], seen[len(mixed) :], memory[0]


def check(layer: Layer, lengths: list[int], chance: random.Random, padding: int = 0) -> None:
    """Against the oracle, from scattered slots, some of them poisoned; what isn't anybody's stays."""
    inputs, states = layer.inputs(sum(lengths) + padding), layer.states(len(lengths) + 3)
    slots = chance.sample(range(1, len(lengths) + 3), len(lengths))
    fresh = [chance.randint(0, 1) for _ in lengths]
    for slot, new in zip(slots, fresh, strict=True):
        if new:
            states.windows[slot] = states.memories[slot] = torch.nan
    before = States(states.windows.clone(), states.memories.clone())
    if padding:
        inputs[0][-padding:] = torch.nan
    result = run(layer, inputs, spans_of(lengths, slots, fresh), states)
    assert result.dtype == layer.taps.dtype
    starts = [0, *itertools.accumulate(lengths)]
    tolerance = TOLERANCES[layer.taps.dtype]
    for start, end, slot, new in zip(starts, starts[1:], slots, fresh, strict=False):
        window, memory = (torch.zeros_like(each[slot]) if new else each[slot] for each in (before.windows, before.memories))
        found, window, memory = expected(layer, tuple(each[start:end] for each in inputs), window, memory)
        torch.testing.assert_close(result[start:end].float(), found, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(states.memories[slot], memory, rtol=tolerance, atol=tolerance)
        assert states.windows[slot].float().equal(window)
    assert not result[starts[-1] :].any()
    others = [slot for slot in range(1, len(before.windows)) if slot not in slots]
    assert states.windows[others].equal(before.windows[others])
    assert states.memories[others].equal(before.memories[others])


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_it_is_transformers(dtype: torch.dtype, chance: random.Random) -> None:
    for _ in range(4):
        lengths = [chance.choice([1, 1, 1, chance.randint(2, 9), chance.randint(10, 200)]) for _ in range(chance.randint(1, 6))]
        check(layer_of(chance, dtype), lengths, chance, chance.randint(0, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_is_transformers_by_triton(dtype: torch.dtype, chance: random.Random) -> None:
    """The interpreter cuts bfloat16 off instead of rounding."""
    pytest.importorskip("triton")
    choose.force("triton")
    check(layer_of(chance, dtype, 40, 2), [1, chance.randint(2, 7), chance.randint(1, 3)], chance, 2)


def test_cutting_a_sequence_changes_nothing(chance: random.Random) -> None:
    """Nor do its neighbours, and tokens that let all fade: chunks add up how much."""
    layer = layer_of(chance, torch.float32)
    inputs, states = layer.inputs(230), layer.states(4)
    inputs[2][::9] = 2000.0
    whole = run(layer, inputs, spans_of([115, 115], [1, 2], [1, 1]), states)
    cut, done = layer.states(4), [0, 0]
    limits = [115, 115]
    while done != limits:
        lengths = [min(chance.choice([1, 2, 3, 64, 70]), limit - had) for had, limit in zip(done, limits, strict=True)]
        which = [i for i in (0, 1) if lengths[i]]
        rows = [row for i in which for row in range(115 * i + done[i], 115 * i + done[i] + lengths[i])]
        spans = spans_of([lengths[i] for i in which], [3 - i for i in which], [int(not done[i]) for i in which])
        found = run(layer, tuple(each[rows] for each in inputs), spans, cut)
        torch.testing.assert_close(found, whole[rows], rtol=1e-5, atol=1e-5)
        done = [had + more for had, more in zip(done, lengths, strict=True)]
    torch.testing.assert_close(cut.memories[[3, 2]], states.memories[[1, 2]], rtol=1e-5, atol=1e-5)
    assert cut.windows[[3, 2]].equal(states.windows[[1, 2]])


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_padding_has_a_slot_of_its_own(route: str, chance: random.Random) -> None:
    """Which may hold anything, before and after; what it finds is a number all the same."""
    choose.force(route)
    layer = layer_of(chance, torch.float32, 20, 2)
    states = layer.states(3)
    states.memories[0] = states.windows[0] = torch.nan
    states.memories[2] = states.windows[2] = torch.nan
    before = states.memories.clone()
    result = run(layer, layer.inputs(4), spans_of([1, 1, 1], [1, 0, 0], [0, 0, 0]), states)
    assert result.isfinite().all()
    assert states.memories[1].isfinite().all()
    assert not states.memories[1].equal(before[1])
    assert states.memories[2].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "route"), [*((dtype, "reference") for dtype in TOLERANCES), (torch.float32, "triton"), (torch.float16, "triton")]
)
def test_gated_norm(dtype: torch.dtype, route: str, chance: random.Random) -> None:
    choose.force(route)
    size, heads = chance.randint(8, 70), chance.randint(1, 5)
    norm = oracle.Qwen3_5RMSNormGated(size, eps=1e-3).to(DEVICE, dtype)
    torch.nn.init.normal_(norm.weight)
    whole = torch.full((3, 2 * heads * size + 5), torch.nan).to(DEVICE, dtype)
    whole[:, 5:] = 2 * torch.randn(3, 2 * heads * size)
    x, gates = whole[:, 5:].view(3, 2 * heads, size).split(heads, 1)
    with torch.no_grad():
        wanted = norm(x, gates)
        found = gated_norm(x, gates, norm.weight, 1e-3), gated_norm(x[:, 0], gates[:, 0], norm.weight, 1e-3)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found[0], wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[1], wanted[:, 0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("way", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_forget_guesses(way: str, dtype: torch.dtype, chance: random.Random) -> None:
    """What tokens find is what they find where none is a guess, and states are those behind the last that is none."""
    choose.force(way)
    layer = layer_of(chance, dtype, most=24)
    lengths = [chance.choice((1, 2, 5, 5, 5, 70, 130)) for _ in range(6)]
    sure = [chance.randint(1, length) for length in lengths]
    lengths, sure = [*lengths, 7, 7, 7], [*sure, 3, 3, 3]
    slots, fresh = chance.sample(range(1, 12), len(lengths)), [chance.randint(0, 1) for _ in lengths]
    states, inputs = layer.states(12), layer.inputs(sum(lengths))
    whole = States(states.windows.clone(), states.memories.clone())
    first = States(states.windows.clone(), states.memories.clone())
    found = run(layer, inputs, spans_of(lengths, slots, fresh, sure), states)
    expected = run(layer, inputs, spans_of(lengths, slots, fresh), whole)
    starts = [0, *itertools.accumulate(lengths)]
    kept = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, sure, strict=False)])
    run(layer, tuple(part[kept] for part in inputs), spans_of(sure, slots, fresh), first)  # type: ignore[arg-type]
    tolerance = 10 * TOLERANCES[dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(states.windows, first.windows, atol=0, rtol=0)
    torch.testing.assert_close(states.memories, first.memories, atol=tolerance, rtol=tolerance)
    assert not torch.allclose(whole.memories, first.memories, atol=0.1)
