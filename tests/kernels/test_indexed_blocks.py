"""Sparse attention to blocks of tokens that an indexer selects for each key head (MiniMax M3), by the reference and by Triton's
kernels, compared with a softmax in float64 over the selected blocks."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from penstock.kernels import dispatch, indexed_attention, operations, ragged, reference
from penstock.kernels.attention import AttentionOptions, Row
from penstock.kernels.indexed import BlockSelection
from penstock.kernels.layout import AttentionLayout, LayerKind

from .test_paged_attention import DEVICE, TOLERANCE, random_cache, random_paged_rows, slots_of_row, token_ranges, unused_slot_value

SIZE, BLOCK = 16, 8
SHAPES = [(1, 0), (1, 40), (1, 300), (3, 2), (5, 70), (70, 33), (20, 10), (1, 19), (2, 23)]


@pytest.fixture(autouse=True)
def automatic_dispatch(poisoned_float_outputs: None) -> Iterator[None]:
    yield
    dispatch.force("")


class AttentionCase:
    """Rows over random keys and values and an indexer's random keys, in the order of a plan of one of the routes. Slots that no row
    uses are NaN where Triton reads; the reference masks what it has read."""

    def __init__(
        self,
        rows: list[Row],
        page_size: int,
        blocks: int,
        route: str,
        *,
        kv_heads: int = 2,
        ratio: int = 4,
        local: int = 1,
        dtype: torch.dtype = torch.float32,
        cached: torch.dtype | None = None,
        sinks: bool = False,
    ) -> None:
        dispatch.force(route)
        torch.manual_seed(len(rows) + blocks)
        self.page_size, self.most, self.ratio = page_size, blocks * BLOCK, ratio
        kinds = (LayerKind(0, kv_heads, ratio, SIZE),)
        layout = AttentionLayout(page_size, kinds, dtype, DEVICE, most=self.most, block=BLOCK, sinks=sinks)
        order, self.plan = ragged.plan(rows, layout)
        self.rows = [rows[i] for i in order]
        caches = [random_cache(rows, page_size, shape, unused_slot_value(route)) for shape in ((2, kv_heads, SIZE), (1, 1, SIZE))]
        self.cache, keys = (each.to(cached or dtype).to(DEVICE) for each in caches)
        tokens, heads = sum(row.queries for row in rows), kv_heads * ratio
        self.query = torch.randn(tokens, heads, SIZE).to(dtype).to(DEVICE)
        queries = torch.randn(tokens, kv_heads + 1, SIZE).to(dtype).to(DEVICE)[:, :kv_heads]  # a view of a wider tensor
        self.selection = BlockSelection(queries, keys, self.most, BLOCK, local)
        self.scales = (torch.rand(2, kv_heads) + 0.5).to(DEVICE) if cached else None
        self.sinks = torch.randn(heads).to(DEVICE) if sinks else None

    def check(self) -> None:
        needs_selection = ragged.needs_selection(self.plan, self.most)
        assert needs_selection == any(row.context + row.queries > self.most for row in self.rows)
        options = AttentionOptions(0, 0.3, scales=self.scales, sinks=self.sinks, asked=self.selection if needs_selection else None)
        found = ragged.attention(self.query, self.cache, self.plan, options)
        expected = [self._exact(row, own.start) for row, own in token_ranges(self.rows)]
        tolerance = TOLERANCE[self.query.dtype]
        torch.testing.assert_close(found.double().cpu(), torch.cat(expected), rtol=tolerance, atol=tolerance)

    def _exact(self, row: Row, start: int) -> Tensor:
        slots = slots_of_row(row, self.page_size)
        indexer_keys = self.selection.keys[slots].double().cpu().flatten(1)
        cached = self.cache[slots].double().cpu()
        if self.scales is not None:
            cached = cached * self.scales.double().cpu()[..., None]
        answers = []
        for i in range(row.queries):
            last = row.context + i
            answers.append(
                torch.stack([self._of_head(start + i, head, last, cached, indexer_keys) for head in range(self.query.shape[1])])
            )
        return torch.stack(answers)

    def _of_head(self, token: int, head: int, last: int, cached: Tensor, indexer_keys: Tensor) -> Tensor:
        kv_head = head // self.ratio
        scores = indexer_keys[: last + 1] @ self.selection.queries[token, kv_head].double().cpu()
        best = {block: float(part.max()) for block, part in enumerate(scores.split(BLOCK))}
        best |= {block: torch.inf for block in best if last // BLOCK - block < self.selection.local}
        chosen = sorted(best, key=lambda block: -best[block])[: self.most // BLOCK]
        selected = [key for key in range(last + 1) if key // BLOCK in chosen]
        logits = cached[selected, 0, kv_head] @ self.query[token, head].double().cpu() * 0.3
        if self.sinks is not None:
            logits = torch.cat((logits, self.sinks[head : head + 1].double().cpu()))
        return logits.softmax(0)[: len(selected)] @ cached[selected, 1, kv_head]


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize(("page_size", "blocks", "local"), [(1, 3, 1), (4, 3, 2), (8, 5, 1), (8, 1, 1), (2, 12, 12)])
def test_mixed_rows_match_exact_attention_to_selected_blocks(page_size: int, blocks: int, local: int, route: str) -> None:
    """Decodes and chains, some of which see more tokens than they may attend to."""
    case = AttentionCase(
        random_paged_rows(SHAPES, page_size, random.Random(blocks), sharing=0.3), page_size, blocks, route, local=local
    )
    assert isinstance(case.plan, indexed_attention.Plan) == (route == "triton")
    case.check()


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize(("kv_heads", "ratio"), [(1, 1), (1, 16), (4, 2)])
def test_numbers_of_heads_match_exact_attention_to_selected_blocks(kv_heads: int, ratio: int, route: str) -> None:
    """Also in a long prompt chunk, of which the reference computes 64 tokens at a time."""
    AttentionCase(random_paged_rows([(90, 30), (1, 90)], 8, random.Random(5)), 8, 4, route, kv_heads=kv_heads, ratio=ratio).check()


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_rows_within_the_limit_need_no_selection(route: str) -> None:
    """Nor do layers without an indexer."""
    case = AttentionCase(random_paged_rows([(1, 31), (7, 20)], 8, random.Random(6)), 8, 4, route)
    assert not isinstance(case.plan, indexed_attention.Plan)
    case.check()


def test_layers_without_an_indexer_attend_to_all_tokens() -> None:
    """In a step in which other layers select blocks."""
    case = AttentionCase(random_paged_rows([(1, 100), (3, 40)], 8, random.Random(6)), 8, 3, "triton")
    assert isinstance(case.plan, indexed_attention.Plan)
    _, whole = ragged.plan(case.rows, AttentionLayout(8, (LayerKind(0, 2, 4, SIZE),), torch.float32, DEVICE))
    found, expected = (ragged.attention(case.query, case.cache, plan, AttentionOptions(0, 0.3)) for plan in (case.plan, whole))
    assert found.equal(expected)
    assert found.isfinite().all()


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_16_bit_and_fp8_caches_match_exact_attention_to_selected_blocks(route: str) -> None:
    rows = random_paged_rows([(1, 100), (3, 40), (1, 5)], 8, random.Random(2))
    AttentionCase(rows, 8, 3, route, dtype=torch.bfloat16).check()
    AttentionCase(rows, 8, 3, route, dtype=torch.float16, cached=torch.float8_e4m3fn).check()


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_attention_sinks_match_exact_attention_to_selected_blocks(route: str) -> None:
    AttentionCase(random_paged_rows([(1, 100), (3, 40), (1, 5)], 8, random.Random(2)), 8, 3, route, sinks=True).check()


def test_selection_in_parts_matches_exact_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where scores for all tokens at once would take too much memory."""
    monkeypatch.setattr(indexed_attention, "SCORES", 1000)
    case = AttentionCase(random_paged_rows(SHAPES, 8, random.Random(3)), 8, 3, "triton")
    assert isinstance(case.plan, indexed_attention.Plan)
    assert len(case.plan.parts) > 30
    case.check()


def test_ties_of_block_scores_select_the_first_blocks_after_the_local_one() -> None:
    selection = BlockSelection(torch.zeros(2, 2, SIZE), torch.zeros(1, 1, 1, SIZE), 2 * BLOCK, BLOCK, 1)
    mask = torch.zeros(1, 1, 2, 5 * BLOCK)
    mask[:, :, 0, 4 * BLOCK :] = -torch.inf
    found = selection.masked(torch.randn(1, 5 * BLOCK, SIZE), 0, 2, mask)
    assert found is not None
    selected = found[0].isfinite().unflatten(2, (5, BLOCK)).all(3)
    assert selected.tolist() == [[[True, False, False, True, False], [True, False, False, False, True]]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "heads"), [(16, 1), (128, 4), (10, 3)])
def test_indexer_norm_rotary_and_cache_write_match_the_reference(size: int, heads: int, dtype: torch.dtype) -> None:
    """For a cache without values. Negative slots are not written."""
    torch.manual_seed(size)
    tokens, slots = 5, torch.tensor([3, -1, 7, 0, 11], device=DEVICE)
    joint, gains = torch.randn(tokens, (heads + 1) * size), torch.randn(2, size)
    joint, gains = joint.to(dtype).to(DEVICE), gains.to(dtype).to(DEVICE)
    table = reference.rotary_table(torch.rand(size // 2), torch.arange(tokens) * 7, dtype).to(DEVICE)
    found = []
    for route in ("reference", "triton"):
        dispatch.force(route)
        cache = torch.zeros(13, 1, 1, size, device=DEVICE).to(dtype)
        queries = operations.rotate_and_write(joint.clone(), table, slots, cache, gains[0], gains[1], 1e-6)
        found.append((queries.float().cpu(), cache.float().cpu().flatten(1)))
    (queries, cache), (other_queries, other_cache) = found
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.06}[dtype]
    torch.testing.assert_close(other_queries, queries, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(other_cache, cache, rtol=tolerance, atol=tolerance)
    assert queries.shape == (tokens, heads, size)
    exact = reference.rotate(reference.rms_norm(joint[2, heads * size :].view(1, 1, size), gains[1], 1e-6), table[2:3])
    torch.testing.assert_close(cache[7], exact.float().cpu().flatten(), rtol=tolerance, atol=tolerance)
    assert sorted(cache.any(1).nonzero().flatten().tolist()) == [0, 3, 7, 11]
