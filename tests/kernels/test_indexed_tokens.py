"""Sparse attention to single tokens that an indexer selects (DeepSeek V3.2), by the reference and by Triton's kernels, compared
with a softmax in float64 over the selected tokens; and the indexer's keys, scores and plans."""

import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from penstock.kernels import dispatch, fused_index, indexed_attention, operations, paged_attention, ragged
from penstock.kernels.attention import AttentionOptions, Row
from penstock.kernels.indexed import TokenSelection
from penstock.kernels.layout import AttentionLayout, LayerKind

from .test_paged_attention import (
    DEVICE,
    TOLERANCE,
    random_cache,
    random_paged_rows,
    slots_of_row,
    token_ranges,
    unused_slot_value,
    visibility_mask,
)

LATENT, ROTARY, HEADS, SIZE = 32, 16, 16, 24  # HEADS, SIZE: of the indexer
SHAPES = [(1, 0), (1, 40), (1, 300), (3, 2), (5, 70), (70, 33), (20, 10), (1, 19)]


@pytest.fixture(autouse=True)
def automatic_dispatch(poisoned_float_outputs: None) -> Iterator[None]:
    yield
    dispatch.force("")


class AttentionCase:
    """Rows over a cache of random numbers, in the order of a plan of one of the routes. Slots that no row uses are NaN where Triton
    reads; the reference masks what it has read."""

    def __init__(
        self,
        rows: list[Row],
        page_size: int,
        most: int,
        route: str,
        dtype: torch.dtype = torch.float32,
        cached: torch.dtype | None = None,
    ) -> None:
        dispatch.force(route)
        torch.manual_seed(len(rows))
        self.page_size, self.most = page_size, most
        layout = AttentionLayout(
            page_size=page_size,
            kinds=(LayerKind(0, 1, 4, LATENT + ROTARY, True),),
            dtype=dtype,
            device=DEVICE,
            latent=LATENT,
            most=most,
        )
        order, self.plan = ragged.plan(rows, layout)
        self.rows = [rows[i] for i in order]
        cache = random_cache(rows, page_size, (1, 1, LATENT + ROTARY + SIZE), unused_slot_value(route))
        self.cache = cache.to(cached or dtype).to(DEVICE)
        tokens = sum(row.queries for row in rows)
        self.query = torch.randn(tokens, 4, LATENT + ROTARY).to(dtype).to(DEVICE)
        queries, weights = torch.randn(tokens, HEADS, SIZE).to(dtype), torch.randn(tokens, HEADS)
        self.selection = TokenSelection(queries.to(DEVICE), weights.to(DEVICE), most)

    def check(self) -> None:
        found = ragged.attention(self.query, self.cache, self.plan, AttentionOptions(0, 0.3, latent=LATENT, asked=self.selection))
        expected = [self._exact(row, tokens) for row, tokens in token_ranges(self.rows)]
        tolerance = TOLERANCE[self.query.dtype]
        torch.testing.assert_close(found.double().cpu(), torch.cat(expected), rtol=tolerance, atol=tolerance)

    def _exact(self, row: Row, tokens: slice) -> Tensor:
        cached, visible = self.cache[slots_of_row(row, self.page_size)].double().cpu().flatten(1), visibility_mask(row)
        queries, weights = self.selection.queries[tokens].double().cpu(), self.selection.weights[tokens].double().cpu()
        scores = torch.einsum("qhk,qh->qk", torch.einsum("qhs,ks->qhk", queries, cached[:, LATENT + ROTARY :]).relu(), weights)
        logits = torch.einsum("qhs,ks->qhk", self.query[tokens].double().cpu(), cached[:, : LATENT + ROTARY]) * 0.3
        for query in range(row.queries):
            visible_tokens = visible[query].nonzero().flatten().tolist()
            best = sorted(visible_tokens, key=lambda key: -float(scores[query, key]))[: self.most]
            others = [key for key in range(row.context + row.queries) if key not in best]
            logits[query, :, others] = -torch.inf
        return torch.einsum("qhk,ks->qhs", logits.softmax(-1), cached[:, :LATENT])


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize(("page_size", "most"), [(1, 20), (3, 20), (16, 40), (64, 129), (16, 1)])
def test_mixed_rows_match_exact_attention_to_selected_tokens(page_size: int, most: int, route: str) -> None:
    """Decodes, chains and trees, some of which see more tokens than they may attend to."""
    case = AttentionCase(random_paged_rows(SHAPES, page_size, random.Random(most), trees=0.5, sharing=0.3), page_size, most, route)
    assert isinstance(case.plan, indexed_attention.Plan) == (route == "triton")
    case.check()


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_long_prompt_chunk_matches_exact_attention_to_selected_tokens(route: str) -> None:
    """The reference computes 64 tokens at a time."""
    AttentionCase(random_paged_rows([(150, 30), (1, 90)], 16, random.Random(5)), 16, 50, route).check()


def test_reference_copies_latents_once_for_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied without the indexer's keys, which lie behind them in the cache. For a long prompt they are large."""
    attended: list[tuple[int, int]] = []
    attention = functional.scaled_dot_product_attention

    def recording(query: Tensor, keys: Tensor, values: Tensor, *rest: Any, **options: Any) -> Tensor:
        attended.append((keys.data_ptr(), values.data_ptr()))
        return attention(query, keys, values, *rest, **options)

    case = AttentionCase(random_paged_rows([(150, 30)], 16, random.Random(5)), 16, 50, "reference")
    monkeypatch.setattr(functional, "scaled_dot_product_attention", recording)
    case.check()
    assert len(attended) == 3
    assert all(keys == values for keys, values in attended)


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_rows_within_the_limit_need_no_selection(route: str) -> None:
    case = AttentionCase(random_paged_rows([(1, 30), (7, 20)], 16, random.Random(6)), 16, 31, route)
    assert not isinstance(case.plan, indexed_attention.Plan)
    case.check()


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_16_bit_and_fp8_caches_match_exact_attention_to_selected_tokens(route: str) -> None:
    rows = random_paged_rows([(1, 100), (3, 40), (1, 5)], 16, random.Random(2))
    AttentionCase(rows, 16, 24, route, torch.bfloat16).check()
    AttentionCase(rows, 16, 24, route, torch.float16, torch.float8_e4m3fn).check()


def test_selection_in_parts_matches_exact_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where scores for all tokens at once would take too much memory."""
    monkeypatch.setattr(indexed_attention, "SCORES", 1000)
    case = AttentionCase(random_paged_rows(SHAPES, 16, random.Random(3), trees=0.5), 16, 30, "triton")
    assert isinstance(case.plan, indexed_attention.Plan)
    assert [len(part.tables) for part in case.plan.parts] == [3] * 34
    case.check()


def test_partial_results_are_freed_before_the_next_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a long prompt they take hundreds of megabytes, and the step that measures memory holds them only once."""
    results: list[weakref.ref[Tensor]] = []
    attention = paged_attention.attention

    def recording(*given: Any, **options: Any) -> Tensor:
        assert not [answer for answer in results if answer() is not None]
        answer: Tensor = attention(*given, **options)
        results.append(weakref.ref(answer))
        return answer

    monkeypatch.setattr(indexed_attention, "SCORES", 1000)
    monkeypatch.setattr(paged_attention, "attention", recording)
    AttentionCase(random_paged_rows([(20, 70), (1, 90)], 16, random.Random(3)), 16, 30, "triton").check()
    assert len(results) == 3


def test_equal_parts_share_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a long prompt nearly all parts are equal, and planning each took milliseconds. The plan is that of rows of one token
    each."""
    monkeypatch.setattr(indexed_attention, "TOKENS", 10)
    case = AttentionCase(random_paged_rows([(1, 90), (60, 15)], 16, random.Random(3)), 16, 30, "triton")
    assert isinstance(case.plan, indexed_attention.Plan)
    plans = [part.plan for part in case.plan.parts]
    assert len(plans) == 7
    assert len({id(plan) for plan in plans}) == 4  # those of the last part and of two parts in which some tokens see fewer
    rows = [Row(1, keys - 1, range(30)) for keys in [30, *range(16, 25)]]
    expected = paged_attention.plan(rows, 1, [LayerKind(0, 1, 4, LATENT + ROTARY, True)], DEVICE, dtype=torch.float32, share=False)
    assert not any(map(len, expected.launches[0].items[1:]))
    for found, items in zip(plans[0].launches[0].items, expected.launches[0].items, strict=False):
        assert found[:, [0, 1, 3, 4, 5, 6, 7]].tolist() == items[:, [0, 1, 3, 4, 5, 6, 7]].tolist()
        assert found[:, 2].tolist() == (found[:, 0] * 30).tolist()
    assert plans[0].positions.tolist() == expected.positions.tolist()
    case.check()


def test_graph_capacity_refuses_steps_that_need_a_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is planned in vain."""
    case = AttentionCase(random_paged_rows([(1, 30)], 16, random.Random(6)), 16, 31, "triton")
    layout = AttentionLayout(16, (LayerKind(0, 1, 4, LATENT + ROTARY, True),), torch.float32, DEVICE, latent=LATENT, most=31)
    room = ragged.capacity(layout, 4, 4, 100, 32, mixed=False)
    assert ragged.plan(case.rows, layout, room)
    monkeypatch.setattr(paged_attention, "plan", lambda *rows, **options: pytest.fail("planned in vain"))
    with pytest.raises(ragged.CapacityExceeded, match="no more than the 31"):
        ragged.plan([Row(1, 31, case.rows[0].pages)], layout, room)


def test_ties_of_scores_select_the_first_tokens() -> None:
    selection = TokenSelection(torch.zeros(2, HEADS, SIZE), torch.ones(2, HEADS), 3)
    mask = torch.zeros(1, 1, 2, 6)
    mask[:, :, :, 1] = -torch.inf
    found = selection.masked(torch.randn(1, 6, SIZE), 0, 2, mask)
    assert found is not None
    assert found[0, 0].isfinite().tolist() == [[True, False, True, True, False, False]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "rotary", "heads"), [(24, 16, 18), (128, 64, 5), (8, 8, 1)])
def test_indexer_norm_rotary_and_cache_write_match_the_reference(size: int, rotary: int, heads: int, dtype: torch.dtype) -> None:
    """Negative slots are not written, nor is the rest of a slot."""
    torch.manual_seed(size)
    tokens, slots = 5, torch.tensor([3, -1, 7, 0, 11], device=DEVICE)
    queries, keys = torch.randn(tokens, heads, size), torch.randn(tokens, size) * 3 + 1
    norm = torch.randn(2, size)
    queries, keys, norm = (x.to(dtype).to(DEVICE) for x in (queries, keys, norm))
    table = operations.reference.rotary_table(torch.rand(rotary // 2), torch.arange(tokens) * 7, dtype).to(DEVICE)
    found = []
    for route in ("reference", "triton"):
        dispatch.force(route)
        cache = torch.zeros(13, 1, 1, 10 + size, device=DEVICE).to(dtype)
        reference_queries = queries.clone()
        operations.rotate_and_write_index(reference_queries, keys.clone(), norm, table, slots, cache[..., 10:])
        found.append((reference_queries.float(), cache.float().flatten(1)))
    (reference_queries, cache), (other_queries, other_cache) = found
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.04}[dtype]
    torch.testing.assert_close(other_queries, reference_queries, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(other_cache, cache, rtol=tolerance, atol=tolerance)
    exact = functional.layer_norm(keys[0].double(), (size,), norm[0].double(), norm[1].double(), 1e-6)
    torch.testing.assert_close(cache[3, 10 + rotary :].double(), exact[rotary:], rtol=tolerance, atol=tolerance)
    assert not cache[:, :10].any()
    assert sorted(cache.any(1).nonzero().flatten().tolist()) == [0, 3, 7, 11]


def test_fp8_cache_write_of_indexer_keys_saturates() -> None:
    """With numbers that fp8 has: Triton's interpreter rounds 1.97 to 1."""
    norm = torch.tensor([[1e5, 1e5, 0, 0], [0, 0, 1.5, -2]], device=DEVICE)
    keys, queries = torch.tensor([[1.0, -1, 1, -1]], device=DEVICE), torch.zeros(1, 1, 4, device=DEVICE)
    table = operations.reference.rotary_table(torch.zeros(1), torch.zeros(1), torch.float32).to(DEVICE)
    for route in ("reference", "triton"):
        dispatch.force(route)
        cache = torch.zeros(2, 1, 1, 4, device=DEVICE).to(torch.float8_e4m3fn)
        operations.rotate_and_write_index(queries, keys, norm, table, torch.ones(1, dtype=torch.int64, device=DEVICE), cache)
        assert cache.float().flatten().tolist() == [0, 0, 0, 0, 448, -448, 1.5, -2]


def test_scores_of_invisible_tokens_are_minus_infinity() -> None:
    case = AttentionCase(random_paged_rows(SHAPES, 16, random.Random(4), trees=1.0), 16, 30, "triton")
    assert isinstance(case.plan, indexed_attention.Plan)
    tokens = len(case.query)
    found = fused_index.scores(case.selection, case.cache[..., LATENT + ROTARY :], case.plan, 0, tokens, 400).cpu()
    for row, row_tokens in token_ranges(case.rows):
        visible = functional.pad(visibility_mask(row), (0, 400 - row.context - row.queries))
        assert found[row_tokens].isfinite().equal(visible)


def _recorded_launch(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments and options of the launch of the scores kernel."""
    given: dict[str, Any] = {}
    options: dict[str, Any] = {}

    class Kernel:
        def __getitem__(self, grid: object) -> Any:
            return launch

    def launch(*arguments: Any, **launch_options: Any) -> None:
        given.update(zip(names, arguments, strict=False))
        options.update(launch_options)

    names = fused_index.scores_kernel.arg_names
    case = AttentionCase(random_paged_rows([(1, 40)], 16, random.Random(4)), 16, 30, "triton")
    assert isinstance(case.plan, indexed_attention.Plan)
    monkeypatch.setattr(fused_index, "scores_kernel", Kernel())
    fused_index.scores(case.selection, case.cache[..., LATENT + ROTARY :], case.plan, 0, 1, 41)
    return given, options


def test_scores_kernel_is_specialized_on_no_integer_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """They change from step to step: Triton would compile the kernel anew for values that are 1 or divisible by 16."""
    kernel = fused_index.scores_kernel
    attributes = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)
    given, _ = _recorded_launch(monkeypatch)
    assert {name for name, value in given.items() if isinstance(value, int)} == set(attributes["do_not_specialize"])


def test_scores_launch_matches_the_ahead_of_time_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    _, options = _recorded_launch(monkeypatch)
    gate = next(one for one in fused_index.compilations() if one.name == "scores 64 heads 64 keys")
    assert (options["num_warps"], options["num_stages"]) == (gate.warps, gate.stages)
