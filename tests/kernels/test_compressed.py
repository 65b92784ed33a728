"""Attention to a window of keys and to entries equals a softmax in float64 over those, and entries are the means that they should
be, by torch and by Triton's kernels."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from penstock.kernels import (
    compressed,
    compressed_attention,
    dispatch,
    entries,
    fused_entries,
    fused_partial_rotary,
    partial_rotary,
    ragged,
)
from penstock.kernels.attention import AttentionOptions, Row
from penstock.kernels.compressed import EntrySelection
from penstock.kernels.entries import EntryParameters
from penstock.kernels.layout import AttentionLayout, LayerKind
from penstock.kernels.reference import rotary_table

from .test_paged_attention import DEVICE, TOLERANCE, random_paged_rows, slots_of_row

KEY, HEADS, SIZE, INDEX_HEADS = 16, 4, 8, 16  # SIZE: of an index
SHAPES = [(1, 0), (1, 40), (1, 100), (3, 2), (5, 70), (20, 10), (1, 19), (70, 33)]


@pytest.fixture(autouse=True)
def _clean(poisoned_float_outputs: None) -> Iterator[None]:
    yield
    dispatch.force("")


def check(rows: list[Row], page_size: int, rate: int, most: int, near: int, route: str, dtype: torch.dtype = torch.float32) -> None:
    """What Triton reads holds no numbers in slots of no row. most: entries that are chosen; 0: all."""
    dispatch.force(route)
    torch.manual_seed(most)
    layout = AttentionLayout(
        page_size,
        (LayerKind(0, 1, HEADS, KEY, True),),
        dtype,
        torch.device(DEVICE),
        KEY,
        sinks=True,
        near=near,
        entries=((rate, most),),
    )
    order, plan = ragged.plan(rows, layout)
    assert isinstance(plan, compressed_attention.Plan if route == "triton" else compressed.Plan)
    rows = [rows[i] for i in order]
    used = sorted({slot for row in rows for slot in slots_of_row(row, page_size)})
    cache = torch.full(((max(page for row in rows for page in row.pages) + 1) * page_size, 1, 1, 3 * KEY), torch.nan)
    cache[used] = torch.randn(len(used), 1, 1, 3 * KEY)
    cache = (cache if route == "triton" else cache.nan_to_num(100.0)).to(dtype).to(DEVICE)
    tokens = sum(row.queries for row in rows)
    query, sinks = torch.randn(tokens, HEADS, KEY).to(DEVICE, dtype), torch.randn(HEADS).to(DEVICE)
    queries, weights = torch.randn(tokens, INDEX_HEADS, SIZE).to(DEVICE, dtype), torch.randn(tokens, INDEX_HEADS).to(DEVICE)
    asked = EntrySelection(queries, weights, most, members=rate, first=2 * KEY) if most else None
    how = AttentionOptions(0, 0.3, sinks=sinks, latent=KEY)
    found = ragged.attention_with_entries(query, cache, plan, how, rate, asked)
    expected, start = [], 0
    for row in rows:
        held = cache[slots_of_row(row, page_size)].double().cpu().flatten(1)
        for place in range(row.context, row.context + row.queries):
            seen = [*range((place + 1) // rate)]
            if asked is not None and len(seen) > most:
                products = queries[start].double().cpu() @ held[rate - 1 :: rate, 2 * KEY : 2 * KEY + SIZE].t()
                scores = (products.relu() * weights[start].double().cpu()[:, None]).sum(0)[: len(seen)]
                seen = sorted(scores.argsort(descending=True, stable=True)[:most].tolist())
            ends = [entry * rate + rate - 1 for entry in seen]
            keys = torch.cat((held[max(0, place - near + 1) : place + 1, :KEY], held[ends, KEY : 2 * KEY]))
            logits = torch.cat((query[start].double().cpu() @ keys.t() * 0.3, sinks.double().cpu().unsqueeze(1)), 1)
            expected.append(logits.softmax(-1)[:, :-1] @ keys)
            start += 1
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double().cpu(), torch.stack(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize(
    ("page_size", "rate", "most", "near"), [(16, 4, 3, 8), (4, 16, 0, 5), (1, 3, 2, 1), (16, 1, 4, 30), (8, 128, 0, 300)]
)
def test_a_mixture(page_size: int, rate: int, most: int, near: int, route: str) -> None:
    """Of decodes and chains, some of which see more entries than they may attend to."""
    shapes = SHAPES if route == "reference" else SHAPES[:-1]
    check(random_paged_rows(shapes, page_size, random.Random(most), sharing=0.3), page_size, rate, most, near, route)


def test_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not all tokens' tables, or logits, have room at once."""
    rows = random_paged_rows(SHAPES[:-1], 16, random.Random(3))
    for module, name in ((compressed_attention, "ROWS"), (compressed, "LOGITS")):
        monkeypatch.setattr(module, name, 500)
    for route in ("reference", "triton"):
        check(rows, 16, 4, 3, 8, route)
        check(rows, 16, 8, 0, 8, route)


def test_short_types() -> None:
    for route in ("reference", "triton"):
        check(random_paged_rows([(1, 100), (3, 40), (1, 5)], 16, random.Random(2)), 16, 4, 5, 8, route, torch.bfloat16)


def test_a_graph_has_no_room_for_it() -> None:
    dispatch.force("triton")
    layout = AttentionLayout(
        16, (LayerKind(0, 1, 4, KEY, True),), torch.float32, torch.device(DEVICE), KEY, near=8, entries=((4, 0),)
    )
    capacity = ragged.capacity(layout, 4, 4, 64, 16, mixed=False)
    with pytest.raises(ragged.CapacityExceeded, match="how many entries"):
        ragged.plan([], layout, capacity)


def turned(x: Tensor, angles: Tensor, back: bool = False) -> Tensor:
    """The last features of rows, two of which are half of them apart, in float64."""
    size = 2 * len(angles)
    still, low, high = x[..., :-size], x[..., -size : -size // 2], x[..., -size // 2 :]
    cosine, sine = angles.cos(), -angles.sin() if back else angles.sin()
    return torch.cat((still, low * cosine - high * sine, high * cosine + low * sine), -1)


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rate", "series", "page_size"), [(4, 2, 16), (8, 1, 4), (3, 2, 1), (1, 2, 4), (5, 1, 3)])
def test_entries(rate: int, series: int, page_size: int, dtype: torch.dtype, route: str) -> None:
    """However a sequence is cut, and whatever pages it has."""
    dispatch.force(route)
    torch.manual_seed(rate)
    size, length, frequencies = 12, 3 * rate + 2, torch.rand(2)
    places, gains = torch.randn(series, rate, size).to(DEVICE), torch.randn(size).to(DEVICE, dtype)
    making = EntryParameters(5, places, gains, 1e-2)
    rows = torch.randn(length, 2 * series * size).to(dtype).to(DEVICE)
    pages = random.Random(rate).sample(range(1, 40), -(-length // page_size))
    cache = torch.zeros(40 * page_size, 1, 1, 5 + 2 * series * size, dtype=dtype, device=DEVICE)
    slots = torch.tensor([pages[i // page_size] * page_size + i % page_size for i in range(length)]).to(DEVICE)
    kinds = (LayerKind(0, 1, 4, 16, True),)
    layout = AttentionLayout(page_size, kinds, dtype, torch.device(DEVICE), 16, near=4, entries=((rate, series - 1),))
    start = 0
    while start < length:
        end = min(length, start + random.Random(start).randint(1, 2 * rate))
        _, plan = ragged.plan([Row(end - start, start, pages)], layout)
        entries.write_series(slots[start:end], rows[start:end], cache[..., 5:])
        ends = ragged.completed_entries(plan, rate, series > 1)
        entries.write_entries(cache, ends, making, rotary_table(frequencies.to(DEVICE), ends.firsts, dtype))
        start = end
    held, wide = cache.double().cpu().flatten(1)[slots.cpu()], rows.double().cpu().view(length, series, 2, size)
    assert not held[:, :5].any()
    places, gains = places.double().cpu(), gains.double().cpu()
    for first in range(0, length - rate + 1, rate):
        parts = [(wide[first : first + rate, 0, 0], wide[first : first + rate, 0, 1] + places[0])]
        if series > 1 and first:
            before = slice(first - rate, first)
            parts.append((wide[before, 1, 0], wide[before, 1, 1] + places[1]))
        values, gates = (torch.cat(both) for both in zip(*parts, strict=True))
        mean = (gates.softmax(0) * values).sum(0)
        normal = mean * (mean.square().mean() + 1e-2).rsqrt() * gains
        tolerance = 3 * TOLERANCE[dtype]
        expected = turned(normal, first * frequencies.double())
        torch.testing.assert_close(held[first + rate - 1, 5 : 5 + size], expected, rtol=tolerance, atol=tolerance)
    others = [i for i in range(length) if (i + 1) % rate]
    assert held[others, 5:].equal(rows.double().cpu()[others])


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_turn_and_turn_back(dtype: torch.dtype, route: str) -> None:
    """Behind norms or not; keys go to the cache, and those of padding nowhere."""
    dispatch.force(route)
    torch.manual_seed(1)
    positions, frequencies, tolerance = torch.tensor([3, 0, 7]), torch.rand(3), 2 * TOLERANCE[dtype]
    x, gains = torch.randn(3, 5, 20).to(dtype).to(DEVICE), torch.randn(20).to(DEVICE, dtype)
    table = rotary_table(frequencies, positions, dtype).to(DEVICE)
    angles = torch.outer(positions, frequencies).double()
    for epsilon, back in ((1e-2, False), (0.0, True), (0.0, False)):
        found, wide = x.clone(), x.double().cpu()
        partial_rotary.rotate_last(found, table, epsilon, back)
        normal = wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt() if epsilon else wide
        for token, own in enumerate(angles):
            torch.testing.assert_close(
                found[token].double().cpu(), turned(normal[token], own, back), rtol=tolerance, atol=tolerance
            )
    cache = torch.zeros(6, 1, 1, 23, dtype=dtype, device=DEVICE)
    partial_rotary.write_keys(x[:, 0], gains, table, torch.tensor([4, -1, 2]).to(DEVICE), cache[..., :20], 1e-2)
    expected, wide = torch.zeros(6, 23, dtype=torch.float64), x[:, 0].double().cpu()
    normal = wide * (wide.square().mean(-1, keepdim=True) + 1e-2).rsqrt() * gains.double().cpu()
    for token, slot in ((0, 4), (2, 2)):
        expected[slot, :20] = turned(normal[token], angles[token])
    torch.testing.assert_close(cache.double().cpu().flatten(1), expected, rtol=tolerance, atol=tolerance)


def test_it_is_compiled_as_it_is_launched() -> None:
    for one in (*fused_entries.compilations(), *fused_partial_rotary.compilations()):
        assert list(one.signature) == [name for name in one.kernel.arg_names if name not in one.constants]
