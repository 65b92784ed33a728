"""Sparse attention to pools of tokens that an indexer selects (GLM 5 Next), by the reference and by Triton's kernels, compared with
a softmax in float64 over the selected pools; and the pools' keys, which are gated means of the tokens' keys."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from penstock.kernels import dispatch, fused_pools, indexed_attention, ragged
from penstock.kernels.attention import AttentionOptions, Row
from penstock.kernels.indexed import PoolSelection
from penstock.kernels.layout import AttentionLayout, LayerKind
from penstock.kernels.pools import write_pools

from .test_paged_attention import DEVICE, TOLERANCE, random_paged_rows, slots_of_row

LATENT, HEADS, SIZE = 32, 16, 24  # HEADS, SIZE: of the indexer
SHAPES = [(1, 0), (1, 40), (1, 300), (3, 2), (5, 70), (70, 33), (20, 10), (1, 19), (1, 47), (2, 63)]


@pytest.fixture(autouse=True)
def automatic_dispatch(poisoned_float_outputs: None) -> Iterator[None]:
    yield
    dispatch.force("")


def check_against_exact(
    rows: list[Row], page_size: int, pool: int, most: int, route: str, dtype: torch.dtype = torch.float32
) -> None:
    """Slots that no row uses are NaN where Triton reads."""
    dispatch.force(route)
    torch.manual_seed(most)
    kinds = (LayerKind(0, 1, 4, LATENT, True),)
    layout = AttentionLayout(page_size, kinds, dtype, torch.device(DEVICE), latent=LATENT, most=most, members=pool)
    order, plan = ragged.plan(rows, layout)
    rows = [rows[i] for i in order]
    used = sorted({slot for row in rows for slot in slots_of_row(row, page_size)})
    slots, slot_shape = (max(page for row in rows for page in row.pages) + 1) * page_size, (1, 1, LATENT + 2 * SIZE)
    cache = torch.full((slots, *slot_shape), torch.nan if route == "triton" else 100.0)
    cache[used] = torch.randn(len(used), *slot_shape)
    cache = cache.to(dtype).to(DEVICE)
    tokens = sum(row.queries for row in rows)
    query = torch.randn(tokens, 4, LATENT).to(dtype).to(DEVICE)
    selection = PoolSelection(
        torch.randn(tokens, HEADS, SIZE).to(DEVICE, dtype), torch.randn(tokens, HEADS).to(DEVICE), most, members=pool
    )
    needs_selection = any(row.context + row.queries > most for row in rows)
    assert isinstance(plan, indexed_attention.Plan) == (route == "triton" and needs_selection)
    found = ragged.attention(
        query, cache, plan, AttentionOptions(0, 0.3, latent=LATENT, asked=selection if needs_selection else None)
    )
    expected, start = [], 0
    for row in rows:
        cached = cache[slots_of_row(row, page_size)].double().cpu().flatten(1)
        for position in range(row.context, row.context + row.queries):
            token = slice(start, start + 1)
            attended = attended_tokens(selection, token, cached[:, LATENT : LATENT + SIZE], position)
            logits = query[token][0].double().cpu() @ cached[attended, :LATENT].t() * 0.3
            expected.append(logits.softmax(-1) @ cached[attended, :LATENT])
            start += 1
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double().cpu(), torch.stack(expected), rtol=tolerance, atol=tolerance)


def attended_tokens(selection: PoolSelection, token: slice, keys: Tensor, position: int) -> list[int]:
    """The tokens that the one at a position attends to: those of the best pools, and of the last, incomplete one."""
    complete, pool = (position + 1) // selection.members, selection.members
    products = selection.queries[token][0].double().cpu() @ keys[pool - 1 : complete * pool : pool].t()
    scores = (products.relu() * selection.weights[token][0].double().cpu()[:, None]).sum(0)
    best = sorted(range(complete), key=lambda pool_index: -float(scores[pool_index]))[: selection.most // pool]
    return [*(pool_index * pool + i for pool_index in sorted(best) for i in range(pool)), *range(complete * pool, position + 1)]


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize(
    ("page_size", "pool", "most"), [(16, 16, 32), (16, 4, 24), (64, 16, 48), (3, 3, 27), (12, 6, 6), (8, 2, 300)]
)
def test_mixed_rows_match_exact_attention_to_selected_pools(page_size: int, pool: int, most: int, route: str) -> None:
    """Decodes and chains, some of which see more tokens than they may attend to."""
    check_against_exact(random_paged_rows(SHAPES, page_size, random.Random(most), sharing=0.3), page_size, pool, most, route)


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_pages_that_hold_whole_tiles_of_pools_match_exact_attention(route: str) -> None:
    """Items of long rows that are cut begin within a page."""
    check_against_exact(random_paged_rows([(1, 900), (2, 700), (1, 400)], 256, random.Random(7)), 256, 16, 64, route)


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_long_prompt_chunk_matches_exact_attention_to_selected_pools(route: str) -> None:
    """The reference computes 64 tokens at a time."""
    check_against_exact(random_paged_rows([(150, 30), (1, 90)], 16, random.Random(5)), 16, 8, 48, route)


def test_selection_in_parts_matches_exact_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where scores for all tokens at once would take too much memory."""
    monkeypatch.setattr(indexed_attention, "SCORES", 1000)
    check_against_exact(random_paged_rows(SHAPES, 16, random.Random(3)), 16, 8, 32, "triton")


def test_bfloat16_matches_exact_attention_to_selected_pools() -> None:
    for route in ("reference", "triton"):
        check_against_exact(random_paged_rows([(1, 100), (3, 40), (1, 5)], 16, random.Random(2)), 16, 4, 24, route, torch.bfloat16)


def test_layers_without_an_indexer_reuse_the_previous_selection() -> None:
    """The selection is made once. It does not include the incomplete pool, which is always visible."""
    selection = PoolSelection(torch.randn(2, HEADS, SIZE), torch.randn(2, HEADS), 4, members=2)
    mask = torch.tensor([[0.0] * 8 + [-torch.inf], [0.0] * 9]).view(1, 1, 2, 9)
    found = selection.masked(torch.randn(1, 9, 2 * SIZE), 0, 2, mask)
    reused = selection.masked(torch.empty(1, 9, 0), 0, 2, mask)
    assert found is not None
    assert reused is not None
    assert found.equal(reused)
    assert [row.isfinite().sum().item() for row in found[0, 0]] == [4, 5]
    assert found[0, 0, 1, 8] == 0


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize(("dtype", "cached"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.float8_e4m3fn)])
@pytest.mark.parametrize(("pool", "size"), [(4, 24), (3, 7), (16, 128)])
def test_pool_keys_are_gated_means_however_the_sequence_is_chunked(
    pool: int, size: int, dtype: torch.dtype, cached: torch.dtype | None, route: str
) -> None:
    """A pool's key is stored in the slot of its last token. Tokens of padding are not written, nor is the rest of a slot."""
    if cached and route == "triton":
        pytest.skip("the interpreter rounds to 8 bits wrongly where there is a carry")
    torch.manual_seed(pool)
    dispatch.force(route)
    rng, length = random.Random(size), 3 * pool + 1
    # Numbers that 8 bits can hold.
    keys, gates = ((torch.randn(2 * length, size) * 2).round().to(dtype) for _ in "kg")
    position_biases = torch.randn(pool, size)
    pages = [[2, 5, 1, 3], [4, 8, 6, 7]]
    slots = torch.tensor([[token_keys[i // pool] * pool + i % pool for i in range(length)] for token_keys in pages])
    cache = torch.zeros(9 * pool, 1, 1, 5 + 2 * size).to(cached or dtype).to(DEVICE)
    starts = [0, 0]
    while min(starts) < length:  # tokens of both sequences, and one of padding
        ends = [min(length, start + rng.randint(0, 2 * pool)) for start in starts]
        rows = [*(i for start, end in zip(starts[:1], ends[:1], strict=True) for i in range(start, end)), 0]
        rows += [length + i for i in range(starts[1], ends[1])]
        written_slots = torch.tensor([*slots[0, starts[0] : ends[0]].tolist(), -1, *slots[1, starts[1] : ends[1]].tolist()])
        write_pools(*(x.to(DEVICE) for x in (keys[rows], gates[rows], position_biases, written_slots)), cache[..., 5:])
        starts = ends
    result = cache.float().flatten(1).cpu()
    expected = torch.zeros_like(result)
    for sequence in range(2):
        token_keys, token_gates = (x[sequence * length : (sequence + 1) * length].double() for x in (keys, gates))
        expected[slots[sequence], 5:] = torch.cat((token_keys, token_gates), 1).float()
        for end in range(pool - 1, length, pool):
            members = slice(end - pool + 1, end + 1)
            weights = (token_gates[members] + position_biases).softmax(0)
            expected[slots[sequence, end], 5 : 5 + size] = (weights * token_keys[members]).sum(0).float()
    tolerance = 0.07 if cached else TOLERANCE[dtype]
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    assert not functional.relu(result[:, :5]).any()


def test_ahead_of_time_signatures_match_the_kernels_parameters() -> None:
    for compilation in fused_pools.compilations():
        assert list(compilation.signature) == [name for name in compilation.kernel.arg_names if name not in compilation.constants]
