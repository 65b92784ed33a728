"""Attention to a sliding window of keys and to compressed entries (DeepSeek V4), by the reference and by Triton's kernels, compared
with a softmax in float64; and the entries, which are gated means, and partial rotary embedding."""

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

KEY, HEADS, SIZE, INDEX_HEADS = 16, 4, 8, 16  # SIZE: of the indexer's keys
SHAPES = [(1, 0), (1, 40), (1, 100), (3, 2), (5, 70), (20, 10), (1, 19), (70, 33)]


@pytest.fixture(autouse=True)
def automatic_dispatch(poisoned_float_outputs: None) -> Iterator[None]:
    yield
    dispatch.force("")


def check_against_exact(
    rows: list[Row], page_size: int, rate: int, most: int, near: int, route: str, dtype: torch.dtype = torch.float32
) -> None:
    """Slots that no row uses are NaN where Triton reads. most: entries that a token attends to; 0: all."""
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
    selection = EntrySelection(queries, weights, most, members=rate, first=2 * KEY) if most else None
    options = AttentionOptions(0, 0.3, sinks=sinks, latent=KEY)
    found = ragged.attention_with_entries(query, cache, plan, options, rate, selection)
    expected, start = [], 0
    for row in rows:
        row_cache = cache[slots_of_row(row, page_size)].double().cpu().flatten(1)
        for position in range(row.context, row.context + row.queries):
            attended = [*range((position + 1) // rate)]
            if selection is not None and len(attended) > most:
                products = queries[start].double().cpu() @ row_cache[rate - 1 :: rate, 2 * KEY : 2 * KEY + SIZE].t()
                scores = (products.relu() * weights[start].double().cpu()[:, None]).sum(0)[: len(attended)]
                attended = sorted(scores.argsort(descending=True, stable=True)[:most].tolist())
            ends = [entry * rate + rate - 1 for entry in attended]
            keys = torch.cat((row_cache[max(0, position - near + 1) : position + 1, :KEY], row_cache[ends, KEY : 2 * KEY]))
            logits = torch.cat((query[start].double().cpu() @ keys.t() * 0.3, sinks.double().cpu().unsqueeze(1)), 1)
            expected.append(logits.softmax(-1)[:, :-1] @ keys)
            start += 1
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double().cpu(), torch.stack(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize(
    ("page_size", "rate", "most", "near"), [(16, 4, 3, 8), (4, 16, 0, 5), (1, 3, 2, 1), (16, 1, 4, 30), (8, 128, 0, 300)]
)
def test_mixed_rows_match_exact_attention_to_window_and_entries(
    page_size: int, rate: int, most: int, near: int, route: str
) -> None:
    """Decodes and chains, some of which see more entries than they may attend to."""
    shapes = SHAPES if route == "reference" else SHAPES[:-1]
    check_against_exact(random_paged_rows(shapes, page_size, random.Random(most), sharing=0.3), page_size, rate, most, near, route)


def test_tables_and_logits_in_parts_match_exact_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where page tables, or logits, for all tokens at once would take too much memory."""
    rows = random_paged_rows(SHAPES[:-1], 16, random.Random(3))
    for module, name in ((compressed_attention, "ROWS"), (compressed, "LOGITS")):
        monkeypatch.setattr(module, name, 500)
    for route in ("reference", "triton"):
        check_against_exact(rows, 16, 4, 3, 8, route)
        check_against_exact(rows, 16, 8, 0, 8, route)


def test_bfloat16_matches_exact_attention_to_window_and_entries() -> None:
    for route in ("reference", "triton"):
        check_against_exact(
            random_paged_rows([(1, 100), (3, 40), (1, 5)], 16, random.Random(2)), 16, 4, 5, 8, route, torch.bfloat16
        )


def test_graph_capacity_refuses_layers_with_entries() -> None:
    dispatch.force("triton")
    layout = AttentionLayout(
        16, (LayerKind(0, 1, 4, KEY, True),), torch.float32, torch.device(DEVICE), KEY, near=8, entries=((4, 0),)
    )
    capacity = ragged.capacity(layout, 4, 4, 64, 16, mixed=False)
    with pytest.raises(ragged.CapacityExceeded, match="how many entries"):
        ragged.plan([], layout, capacity)


def rotate_last_features(x: Tensor, angles: Tensor, inverse: bool = False) -> Tensor:
    """Rotates the last features of rows, in float64. The two features of a pair are half of them apart."""
    size = 2 * len(angles)
    unrotated, low, high = x[..., :-size], x[..., -size : -size // 2], x[..., -size // 2 :]
    cosine, sine = angles.cos(), -angles.sin() if inverse else angles.sin()
    return torch.cat((unrotated, low * cosine - high * sine, high * cosine + low * sine), -1)


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rate", "series", "page_size"), [(4, 2, 16), (8, 1, 4), (3, 2, 1), (1, 2, 4), (5, 1, 3)])
def test_entries_are_gated_means_however_the_sequence_is_chunked(
    rate: int, series: int, page_size: int, dtype: torch.dtype, route: str
) -> None:
    """And with any page size."""
    dispatch.force(route)
    torch.manual_seed(rate)
    size, length, frequencies = 12, 3 * rate + 2, torch.rand(2)
    position_biases, gains = torch.randn(series, rate, size).to(DEVICE), torch.randn(size).to(DEVICE, dtype)
    parameters = EntryParameters(5, position_biases, gains, 1e-2)
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
        entries.write_entries(cache, ends, parameters, rotary_table(frequencies.to(DEVICE), ends.firsts, dtype))
        start = end
    result, inputs = cache.double().cpu().flatten(1)[slots.cpu()], rows.double().cpu().view(length, series, 2, size)
    assert not result[:, :5].any()
    position_biases, gains = position_biases.double().cpu(), gains.double().cpu()
    for first in range(0, length - rate + 1, rate):
        parts = [(inputs[first : first + rate, 0, 0], inputs[first : first + rate, 0, 1] + position_biases[0])]
        if series > 1 and first:
            before = slice(first - rate, first)
            parts.append((inputs[before, 1, 0], inputs[before, 1, 1] + position_biases[1]))
        values, gates = (torch.cat(both) for both in zip(*parts, strict=True))
        mean = (gates.softmax(0) * values).sum(0)
        normalized = mean * (mean.square().mean() + 1e-2).rsqrt() * gains
        tolerance = 3 * TOLERANCE[dtype]
        expected = rotate_last_features(normalized, first * frequencies.double())
        torch.testing.assert_close(result[first + rate - 1, 5 : 5 + size], expected, rtol=tolerance, atol=tolerance)
    others = [i for i in range(length) if (i + 1) % rate]
    assert result[others, 5:].equal(rows.double().cpu()[others])


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partial_rotary_embedding_and_its_inverse_match_float64(dtype: torch.dtype, route: str) -> None:
    """With and without norms. Keys are written to the cache, those of padding are not."""
    dispatch.force(route)
    torch.manual_seed(1)
    positions, frequencies, tolerance = torch.tensor([3, 0, 7]), torch.rand(3), 2 * TOLERANCE[dtype]
    x, gains = torch.randn(3, 5, 20).to(dtype).to(DEVICE), torch.randn(20).to(DEVICE, dtype)
    table = rotary_table(frequencies, positions, dtype).to(DEVICE)
    angles = torch.outer(positions, frequencies).double()
    for epsilon, inverse in ((1e-2, False), (0.0, True), (0.0, False)):
        found, exact = x.clone(), x.double().cpu()
        partial_rotary.rotate_last(found, table, epsilon, inverse)
        normalized = exact * (exact.square().mean(-1, keepdim=True) + epsilon).rsqrt() if epsilon else exact
        for token, token_angles in enumerate(angles):
            torch.testing.assert_close(
                found[token].double().cpu(),
                rotate_last_features(normalized[token], token_angles, inverse),
                rtol=tolerance,
                atol=tolerance,
            )
    cache = torch.zeros(6, 1, 1, 23, dtype=dtype, device=DEVICE)
    partial_rotary.write_keys(x[:, 0], gains, table, torch.tensor([4, -1, 2]).to(DEVICE), cache[..., :20], 1e-2)
    expected, exact = torch.zeros(6, 23, dtype=torch.float64), x[:, 0].double().cpu()
    normalized = exact * (exact.square().mean(-1, keepdim=True) + 1e-2).rsqrt() * gains.double().cpu()
    for token, slot in ((0, 4), (2, 2)):
        expected[slot, :20] = rotate_last_features(normalized[token], angles[token])
    torch.testing.assert_close(cache.double().cpu().flatten(1), expected, rtol=tolerance, atol=tolerance)


def test_ahead_of_time_signatures_match_the_kernels_parameters() -> None:
    for compilation in (*fused_entries.compilations(), *fused_partial_rotary.compilations()):
        assert list(compilation.signature) == [name for name in compilation.kernel.arg_names if name not in compilation.constants]
