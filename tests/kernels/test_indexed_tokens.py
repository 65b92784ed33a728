"""Attention to tokens that an index has chosen equals a softmax in float64 over those, by torch and by Triton's kernels."""

import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from penstock.kernels import dispatch, fused_index, indexed, indexed_attention, operations, paged_attention, ragged
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

LATENT, TURNED, HEADS, SIZE = 32, 16, 16, 24  # HEADS, SIZE: of the index
SHAPES = [(1, 0), (1, 40), (1, 300), (3, 2), (5, 70), (70, 33), (20, 10), (1, 19)]


@pytest.fixture(autouse=True)
def _clean(poisoned_float_outputs: None) -> Iterator[None]:
    yield
    dispatch.force("")


class AttentionCase:
    """Rows over a cache of random numbers, in the order of a plan by one of the routes. What Triton reads holds no numbers in slots
    of no row; torch masks what it has read."""

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
            kinds=(LayerKind(0, 1, 4, LATENT + TURNED, True),),
            dtype=dtype,
            device=DEVICE,
            latent=LATENT,
            most=most,
        )
        order, self.plan = ragged.plan(rows, layout)
        self.rows = [rows[i] for i in order]
        cache = random_cache(rows, page_size, (1, 1, LATENT + TURNED + SIZE), unused_slot_value(route))
        self.cache = cache.to(cached or dtype).to(DEVICE)
        tokens = sum(row.queries for row in rows)
        self.query = torch.randn(tokens, 4, LATENT + TURNED).to(dtype).to(DEVICE)
        queries, weights = torch.randn(tokens, HEADS, SIZE).to(dtype), torch.randn(tokens, HEADS)
        self.asked = TokenSelection(queries.to(DEVICE), weights.to(DEVICE), most)

    def check(self) -> None:
        found = ragged.attention(self.query, self.cache, self.plan, AttentionOptions(0, 0.3, latent=LATENT, asked=self.asked))
        expected = [self._exact(row, own) for row, own in token_ranges(self.rows)]
        tolerance = TOLERANCE[self.query.dtype]
        torch.testing.assert_close(found.double().cpu(), torch.cat(expected), rtol=tolerance, atol=tolerance)

    def _exact(self, row: Row, own: slice) -> Tensor:
        cached, visible = self.cache[slots_of_row(row, self.page_size)].double().cpu().flatten(1), visibility_mask(row)
        asking, weights = self.asked.queries[own].double().cpu(), self.asked.weights[own].double().cpu()
        scores = torch.einsum("qhk,qh->qk", torch.einsum("qhs,ks->qhk", asking, cached[:, LATENT + TURNED :]).relu(), weights)
        logits = torch.einsum("qhs,ks->qhk", self.query[own].double().cpu(), cached[:, : LATENT + TURNED]) * 0.3
        for query in range(row.queries):
            seen = visible[query].nonzero().flatten().tolist()
            best = sorted(seen, key=lambda key: -float(scores[query, key]))[: self.most]
            others = [key for key in range(row.context + row.queries) if key not in best]
            logits[query, :, others] = -torch.inf
        return torch.einsum("qhk,ks->qhs", logits.softmax(-1), cached[:, :LATENT])


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize(("page_size", "most"), [(1, 20), (3, 20), (16, 40), (64, 129), (16, 1)])
def test_a_mixture(page_size: int, most: int, route: str) -> None:
    """Of decodes, chains and trees, some of which see more than they may attend to."""
    case = AttentionCase(random_paged_rows(SHAPES, page_size, random.Random(most), trees=0.5, sharing=0.3), page_size, most, route)
    assert isinstance(case.plan, indexed_attention.Plan) == (route == "triton")
    case.check()


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_a_long_chunk(route: str) -> None:
    """Of which a CPU looks at 64 tokens at a time."""
    AttentionCase(random_paged_rows([(150, 30), (1, 90)], 16, random.Random(5)), 16, 50, route).check()


def test_latents_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From where an index's keys stand behind them: a long prompt's are large, and they are values, too."""
    attended: list[tuple[int, int]] = []
    attention = functional.scaled_dot_product_attention

    def attending(query: Tensor, keys: Tensor, values: Tensor, *rest: Any, **options: Any) -> Tensor:
        attended.append((keys.data_ptr(), values.data_ptr()))
        return attention(query, keys, values, *rest, **options)

    case = AttentionCase(random_paged_rows([(150, 30)], 16, random.Random(5)), 16, 50, "reference")
    monkeypatch.setattr(functional, "scaled_dot_product_attention", attending)
    case.check()
    assert len(attended) == 3
    assert all(keys == values for keys, values in attended)


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_nobody_sees_more(route: str) -> None:
    """Then nobody is asked."""
    case = AttentionCase(random_paged_rows([(1, 30), (7, 20)], 16, random.Random(6)), 16, 31, route)
    assert not isinstance(case.plan, indexed_attention.Plan)
    case.check()


@pytest.mark.parametrize("route", ["reference", "triton"])
def test_short_types(route: str) -> None:
    rows = random_paged_rows([(1, 100), (3, 40), (1, 5)], 16, random.Random(2))
    AttentionCase(rows, 16, 24, route, torch.bfloat16).check()
    AttentionCase(rows, 16, 24, route, torch.float16, torch.float8_e4m3fn).check()


def test_tokens_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not all scores have room at once."""
    monkeypatch.setattr(indexed_attention, "SCORES", 1000)
    case = AttentionCase(random_paged_rows(SHAPES, 16, random.Random(3), trees=0.5), 16, 30, "triton")
    assert isinstance(case.plan, indexed_attention.Plan)
    assert [len(part.tables) for part in case.plan.parts] == [3] * 34
    case.check()


def test_what_parts_find_is_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long prompt it is hundreds of megabytes, which no measured step takes twice."""
    held: list[weakref.ref[Tensor]] = []
    attention = paged_attention.attention

    def attending(*given: Any, **options: Any) -> Tensor:
        assert not [answer for answer in held if answer() is not None]
        answer: Tensor = attention(*given, **options)
        held.append(weakref.ref(answer))
        return answer

    monkeypatch.setattr(indexed_attention, "SCORES", 1000)
    monkeypatch.setattr(paged_attention, "attention", attending)
    AttentionCase(random_paged_rows([(20, 70), (1, 90)], 16, random.Random(3)), 16, 30, "triton").check()
    assert len(held) == 3


def test_parts_that_are_alike_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long prompt nearly all are: each took milliseconds. What is planned is what rows of one token each are given."""
    monkeypatch.setattr(indexed_attention, "TOKENS", 10)
    case = AttentionCase(random_paged_rows([(1, 90), (60, 15)], 16, random.Random(3)), 16, 30, "triton")
    assert isinstance(case.plan, indexed_attention.Plan)
    plans = [part.plan for part in case.plan.parts]
    assert len(plans) == 7
    assert len({id(plan) for plan in plans}) == 4  # that of the last one, and two with some that see fewer
    rows = [Row(1, keys - 1, range(30)) for keys in [30, *range(16, 25)]]
    expected = paged_attention.plan(rows, 1, [LayerKind(0, 1, 4, LATENT + TURNED, True)], DEVICE, dtype=torch.float32, share=False)
    assert not any(map(len, expected.launches[0].items[1:]))
    for found, items in zip(plans[0].launches[0].items, expected.launches[0].items, strict=False):
        assert found[:, [0, 1, 3, 4, 5, 6, 7]].tolist() == items[:, [0, 1, 3, 4, 5, 6, 7]].tolist()
        assert found[:, 2].tolist() == (found[:, 0] * 30).tolist()
    assert plans[0].positions.tolist() == expected.positions.tolist()
    case.check()


def test_graphs_have_no_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is known before anything is planned in vain."""
    case = AttentionCase(random_paged_rows([(1, 30)], 16, random.Random(6)), 16, 31, "triton")
    layout = AttentionLayout(16, (LayerKind(0, 1, 4, LATENT + TURNED, True),), torch.float32, DEVICE, latent=LATENT, most=31)
    room = ragged.capacity(layout, 4, 4, 100, 32, mixed=False)
    assert ragged.plan(case.rows, layout, room)
    monkeypatch.setattr(paged_attention, "plan", lambda *rows, **options: pytest.fail("planned in vain"))
    with pytest.raises(ragged.CapacityExceeded, match="no more than the 31"):
        ragged.plan([Row(1, 31, case.rows[0].pages)], layout, room)


def test_of_equal_scores_the_first_are_chosen() -> None:
    asked = TokenSelection(torch.zeros(2, HEADS, SIZE), torch.ones(2, HEADS), 3)
    hidden = torch.zeros(1, 1, 2, 6)
    hidden[:, :, :, 1] = -torch.inf
    found = indexed.narrowed(asked, torch.randn(1, 6, SIZE), 0, 2, hidden)
    assert found is not None
    assert found[0, 0].isfinite().tolist() == [[True, False, True, True, False, False]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "turned", "heads"), [(24, 16, 18), (128, 64, 5), (8, 8, 1)])
def test_the_norm_rotation_and_write(size: int, turned: int, heads: int, dtype: torch.dtype) -> None:
    """Negative slots are written nowhere; of a slot nothing else is."""
    torch.manual_seed(size)
    tokens, slots = 5, torch.tensor([3, -1, 7, 0, 11], device=DEVICE)
    queries, keys = torch.randn(tokens, heads, size), torch.randn(tokens, size) * 3 + 1
    norm = torch.randn(2, size)
    queries, keys, norm = (x.to(dtype).to(DEVICE) for x in (queries, keys, norm))
    table = operations.reference.rotary_table(torch.rand(turned // 2), torch.arange(tokens) * 7, dtype).to(DEVICE)
    found = []
    for route in ("reference", "triton"):
        dispatch.force(route)
        cache = torch.zeros(13, 1, 1, 10 + size, device=DEVICE).to(dtype)
        own = queries.clone()
        operations.rotate_and_write_index(own, keys.clone(), norm, table, slots, cache[..., 10:])
        found.append((own.float(), cache.float().flatten(1)))
    (own, cache), (others, other_cache) = found
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.04}[dtype]
    torch.testing.assert_close(others, own, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(other_cache, cache, rtol=tolerance, atol=tolerance)
    exact = functional.layer_norm(keys[0].double(), (size,), norm[0].double(), norm[1].double(), 1e-6)
    torch.testing.assert_close(cache[3, 10 + turned :].double(), exact[turned:], rtol=tolerance, atol=tolerance)
    assert not cache[:, :10].any()
    assert sorted(cache.any(1).nonzero().flatten().tolist()) == [0, 3, 7, 11]


def test_a_cache_of_eight_bits_holds_the_largest_it_can() -> None:
    """Numbers that it has: Triton's interpreter rounds 1.97 to 1."""
    norm = torch.tensor([[1e5, 1e5, 0, 0], [0, 0, 1.5, -2]], device=DEVICE)
    keys, queries = torch.tensor([[1.0, -1, 1, -1]], device=DEVICE), torch.zeros(1, 1, 4, device=DEVICE)
    table = operations.reference.rotary_table(torch.zeros(1), torch.zeros(1), torch.float32).to(DEVICE)
    for route in ("reference", "triton"):
        dispatch.force(route)
        cache = torch.zeros(2, 1, 1, 4, device=DEVICE).to(torch.float8_e4m3fn)
        operations.rotate_and_write_index(queries, keys, norm, table, torch.ones(1, dtype=torch.int64, device=DEVICE), cache)
        assert cache.float().flatten().tolist() == [0, 0, 0, 0, 448, -448, 1.5, -2]


def test_scores_of_what_is_hidden_are_lowest() -> None:
    case = AttentionCase(random_paged_rows(SHAPES, 16, random.Random(4), trees=1.0), 16, 30, "triton")
    assert isinstance(case.plan, indexed_attention.Plan)
    tokens = len(case.query)
    found = fused_index.scores(case.asked, case.cache[..., LATENT + TURNED :], case.plan, 0, tokens, 400).cpu()
    for row, own in token_ranges(case.rows):
        visible = functional.pad(visibility_mask(row), (0, 400 - row.context - row.queries))
        assert found[own].isfinite().equal(visible)


def _launched(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments and options of the kernel that gives scores."""
    given: dict[str, Any] = {}
    options: dict[str, Any] = {}

    class Kernel:
        def __getitem__(self, grid: object) -> Any:
            return launch

    def launch(*arguments: Any, **how: Any) -> None:
        given.update(zip(names, arguments, strict=False))
        options.update(how)

    names = fused_index.scores_kernel.arg_names
    case = AttentionCase(random_paged_rows([(1, 40)], 16, random.Random(4)), 16, 30, "triton")
    assert isinstance(case.plan, indexed_attention.Plan)
    monkeypatch.setattr(fused_index, "scores_kernel", Kernel())
    fused_index.scores(case.asked, case.cache[..., LATENT + TURNED :], case.plan, 0, 1, 41)
    return given, options


def test_scores_are_compiled_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes from step to step is not looked at, whether it is 1 or divisible by 16: each would be compiled anew."""
    kernel = fused_index.scores_kernel
    told = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)
    given, _ = _launched(monkeypatch)
    assert {name for name, value in given.items() if isinstance(value, int)} == set(told["do_not_specialize"])


def test_scores_are_compiled_as_they_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    _, options = _launched(monkeypatch)
    gate = next(one for one in fused_index.compilations() if one.name == "scores 64 heads 64 keys")
    assert (options["num_warps"], options["num_stages"]) == (gate.warps, gate.stages)
