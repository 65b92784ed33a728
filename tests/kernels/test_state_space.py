"""Linear attention by state spaces equals transformers' Mamba-2, however sequences are cut, by torch and by Triton's kernels."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as oracle

from penstock.kernels import choose
from penstock.kernels import state_space as module
from penstock.kernels.gated_delta import Spans, States, gated_norm
from penstock.kernels.state_space import state_space
from penstock.tests.kernels.test_gated_delta import DEVICE, TOLERANCES, spans_of

LIMITS = (0.05, 3.0)


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

    groups: int
    heads: int
    key_size: int
    value_size: int
    taps: Tensor
    biases: Tensor
    rates: Tensor
    offsets: Tensor
    skips: Tensor
    limits: tuple[float, float]

    def states(self, slots: int) -> States:
        channels, width = self.taps.shape
        windows = torch.randn(slots, width - 1, channels).to(self.taps)
        return States(windows, torch.randn(slots, self.heads, self.key_size, self.value_size, device=DEVICE))

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Mixed and steps: columns of something wider that holds no numbers elsewhere."""
        channels, heads = len(self.taps), self.heads
        whole = torch.full((tokens, channels + heads + 9), torch.nan).to(self.taps)
        whole[:, 2 : channels + 2] = torch.randn(tokens, channels)
        whole[:, channels + 5 : channels + 5 + heads] = 2 * torch.randn(tokens, heads)
        return whole[:, 2 : channels + 2], whole[:, channels + 5 : channels + 5 + heads]


def layer_of(chance: random.Random, dtype: torch.dtype, most: int = 64, most_heads: int = 4) -> Layer:
    groups = chance.randint(1, most_heads)
    heads = groups * chance.randint(1, most_heads)
    key_size, value_size = chance.randint(8, most), chance.randint(8, most)
    channels = 2 * groups * key_size + heads * value_size
    taps, biases = (torch.randn(channels, *more).to(DEVICE, dtype) for more in ((chance.randint(2, 5),), ()))
    rates, offsets, skips = -4 * torch.rand(heads) ** 4, torch.randn(heads) - 2, torch.randn(heads)
    each = (part.to(DEVICE) for part in (rates, offsets, skips))
    return Layer(groups, heads, key_size, value_size, taps, biases, *each, chance.choice((LIMITS, module.UNLIMITED)))


def run(layer: Layer, inputs: tuple[Tensor, ...], spans: Spans, states: States) -> Tensor:
    mixed, steps = inputs
    own = layer.taps, layer.biases, layer.rates, layer.offsets, layer.skips, layer.limits
    return state_space(mixed, steps, *own, spans, states)


def expected(layer: Layer, inputs: tuple[Tensor, ...], window: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What transformers makes of one span, token by token: what its tokens find, the new window and the new memory."""
    mixed, steps = (each.float() for each in inputs)
    seen = torch.cat((window.float(), mixed))
    features = oracle.causal_conv1d_fn(seen.t()[None], layer.taps.float(), layer.biases.float(), activation="silu")
    rounded = features[0, :, len(window) :].t().to(layer.taps.dtype).float()
    keys = layer.groups * layer.key_size
    queries, keys, values = rounded.split((keys, keys, layer.heads * layer.value_size), 1)
    # Theirs limits steps in chunks alone: given as they are to be.
    far = functional.softplus(steps + layer.offsets).clamp(*layer.limits)
    state, found = memory.transpose(1, 2)[None].clone(), []
    wide = (-1, layer.value_size)
    for query, key, value, step in zip(queries, keys, values, far, strict=True):
        found.append(
            oracle.mamba2_selective_state_update(
                state,
                value.view(1, layer.heads, layer.value_size),
                step[None, :, None].expand(1, *wide),
                layer.rates[:, None, None].expand(*wide, layer.key_size),
                key.view(1, layer.groups, layer.key_size),
                query.view(1, layer.groups, layer.key_size),
                layer.skips[:, None].expand(*wide),
            )[0]
        )
    return torch.stack(found), seen[len(mixed) :], state[0].transpose(1, 2)


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
    tolerance = 2 * TOLERANCES[layer.taps.dtype]
    for start, end, slot, new in zip(starts, starts[1:], slots, fresh, strict=False):
        window, memory = (torch.zeros_like(each[slot]) if new else each[slot] for each in (before.windows, before.memories))
        found, window, memory = expected(layer, tuple(each[start:end] for each in inputs), window, memory)
        size = found.abs().max().item() + 1  # sums of many products, some of them large: steps may be
        torch.testing.assert_close(result[start:end].float(), found, rtol=tolerance, atol=tolerance * size)
        torch.testing.assert_close(states.memories[slot], memory, rtol=tolerance, atol=tolerance * size)
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


def test_it_is_transformers_chunks(chance: random.Random) -> None:
    """Which limit steps by themselves."""
    layer = layer_of(chance, torch.float32)
    mixed, steps = layer.inputs(150)
    result = run(layer, (mixed, steps), spans_of([150], [1], [1]), layer.states(2))
    features = oracle.causal_conv1d_fn(mixed.t()[None], layer.taps, layer.biases, activation="silu")[0].t()
    keys = layer.groups * layer.key_size
    parts = features.split((keys, keys, layer.heads * layer.value_size), 1)
    counts = layer.groups, layer.groups, layer.heads
    queries, keys, values = (part.reshape(1, 150, count, -1) for part, count in zip(parts, counts, strict=True))
    rule = {"dt_bias": layer.offsets, "dt_softplus": True, "dt_limit": layer.limits, "D": layer.skips}
    found = oracle.mamba2_chunk_scan(values, steps[None], layer.rates, keys, queries, 32, **rule)[0]
    torch.testing.assert_close(result, found, rtol=1e-4, atol=1e-4 * found.abs().max().item())


def test_cutting_a_sequence_changes_nothing(chance: random.Random) -> None:
    """Nor do its neighbours, and tokens that let all fade: chunks add up how much."""
    layer = layer_of(chance, torch.float32)
    inputs, states = layer.inputs(230), layer.states(4)
    inputs[1][::9] = 200.0
    whole = run(layer, inputs, spans_of([115, 115], [1, 2], [1, 1]), states)
    cut, done = layer.states(4), [0, 0]
    limits, size = [115, 115], whole.abs().max().item()
    while done != limits:
        lengths = [min(chance.choice([1, 2, 3, 64, 70]), limit - had) for had, limit in zip(done, limits, strict=True)]
        which = [i for i in (0, 1) if lengths[i]]
        rows = [row for i in which for row in range(115 * i + done[i], 115 * i + done[i] + lengths[i])]
        spans = spans_of([lengths[i] for i in which], [3 - i for i in which], [int(not done[i]) for i in which])
        found = run(layer, tuple(each[rows] for each in inputs), spans, cut)
        torch.testing.assert_close(found, whole[rows], rtol=1e-5, atol=1e-5 * size)
        done = [had + more for had, more in zip(done, lengths, strict=True)]
    torch.testing.assert_close(cut.memories[[3, 2]], states.memories[[1, 2]], rtol=1e-5, atol=1e-5 * size)
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


@pytest.mark.parametrize("way", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_forget_guesses(way: str, dtype: torch.dtype, chance: random.Random) -> None:
    """What tokens find is what they find where none is a guess, and states are those behind the last that is none."""
    choose.force(way)
    layer = layer_of(chance, dtype, most=20)
    lengths = [chance.choice((1, 2, 5, 5, 5, 70)) for _ in range(4)]
    sure = [chance.randint(1, length) for length in lengths]
    lengths, sure = [*lengths, 7, 7], [*sure, 3, 3]
    slots, fresh = chance.sample(range(1, 9), len(lengths)), [chance.randint(0, 1) for _ in lengths]
    states, inputs = layer.states(9), layer.inputs(sum(lengths))
    whole, first = (States(states.windows.clone(), states.memories.clone()) for _ in range(2))
    found = run(layer, inputs, spans_of(lengths, slots, fresh, sure), states)
    expected = run(layer, inputs, spans_of(lengths, slots, fresh), whole)
    starts = [0, *itertools.accumulate(lengths)]
    kept = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, sure, strict=False)])
    run(layer, tuple(part[kept] for part in inputs), spans_of(sure, slots, fresh), first)
    tolerance, size = 2 * TOLERANCES[dtype], expected.float().abs().max().item() + 1
    torch.testing.assert_close(found, expected, atol=tolerance * size, rtol=tolerance)
    torch.testing.assert_close(states.windows, first.windows, atol=0, rtol=0)
    torch.testing.assert_close(states.memories, first.memories, atol=tolerance * size, rtol=tolerance)
    assert not torch.allclose(whole.memories, first.memories, atol=0.1)


@pytest.mark.parametrize(
    ("dtype", "route"), [*((dtype, "reference") for dtype in TOLERANCES), (torch.float32, "triton"), (torch.float16, "triton")]
)
@pytest.mark.parametrize("groups", [1, 3])
def test_gated_norm(groups: int, dtype: torch.dtype, route: str, chance: random.Random) -> None:
    """Gates go before it, and each group has a part of the gains."""
    choose.force(route)
    size = chance.choice((1, 7, chance.randint(8, 70), 3000))
    norm = oracle.GraniteMoeHybridRMSNormGated(groups * size, size, eps=1e-3).to(DEVICE, dtype)
    torch.nn.init.normal_(norm.weight)
    whole = torch.full((3, 2 * groups * size + 5), torch.nan).to(DEVICE, dtype)
    whole[:, 5:] = 2 * torch.randn(3, 2 * groups * size)
    x, gates = whole[:, 5:].chunk(2, 1)
    with torch.no_grad():
        wanted = norm(x, gates)
        found = gated_norm(x.unflatten(1, (groups, -1)), gates.unflatten(1, (groups, -1)), norm.weight.view(groups, -1), 1e-3, True)
    torch.testing.assert_close(found.flatten(1), wanted, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
