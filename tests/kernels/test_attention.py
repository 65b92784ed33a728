"""The reference attention over ragged rows in pages compared with a plain softmax in float64, row by row: chains and trees, with
and without windows, with and without shared prefixes."""

import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels import attention as kernel
from penstock.kernels import shared_prefixes
from penstock.kernels.attention import BLOCK_ELEMENTS, PADDING, AttentionOptions, Row, ancestry, attention, blocks, order
from penstock.kernels.layout import AttentionLayout, LayerKind

CPU = torch.device("cpu")
KV_HEADS = 2
SIZE = 8


class PagedRows:
    """Rows over a cache of random numbers, which slots of no row hold as well. sharing: probability that a row shares its first
    pages with an earlier one, as far as their contexts allow."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        page_size: int,
        trees: float = 0.0,
        seed: int = 0,
        spare: int = 0,
        sharing: float = 0.0,
        whole: float = 0.0,
        joined: Collection[int] = (),
        chunked: Collection[int] = (),
    ) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.page_size, self.joined, self.chunked = page_size, joined, chunked
        page_counts = [-(-(queries + context) // page_size) + rng.randint(0, spare) for queries, context in shapes]
        pages = list(range(1, sum(page_counts) + 1))
        rng.shuffle(pages)
        rows: list[Row] = []
        for (queries, context), page_count in zip(shapes, page_counts, strict=True):
            parents = [rng.randint(-1, i - 1) for i in range(queries)] if rng.random() < trees else None
            shared: Sequence[int] = ()
            if rows and rng.random() < sharing:
                other = rng.choice(rows)
                max_shared = min(context, other.context) // page_size
                shared = other.pages[: rng.choice([max_shared, rng.randint(0, max_shared)])]
            own = [*shared, *(pages.pop() for _ in range(page_count - len(shared)))]
            rows.append(Row(queries, context, own, parents, whole=parents is None and rng.random() < whole))
        self.rows_in_given_order = rows
        self.rows = [rows[i] for i in order(rows)]
        self.cache = torch.randn((sum(page_counts) + 1) * page_size, 2, KV_HEADS, SIZE)

    def layout(self, group: int = 2, window: int = 0, with_sinks: bool = False) -> AttentionLayout:
        """Of layers with that window and of layers without one, where `group` query heads share a key head."""
        kinds = [
            LayerKind(kind_window, KV_HEADS, group, SIZE, joined=kind_window in self.joined, chunked=kind_window in self.chunked)
            for kind_window in sorted({0, window})
        ]
        return AttentionLayout(self.page_size, tuple(kinds), torch.float32, CPU, sinks=with_sinks)

    def slots(self, row: Row) -> list[int]:
        return [row.pages[i // self.page_size] * self.page_size + i % self.page_size for i in range(row.context + row.queries)]

    def check(self, group: int, window: int, with_sinks: bool = False) -> shared_prefixes.Plan:
        """Compares with the plain attention; `group` query heads share a key head. Returns the plan that was used."""
        query = torch.randn(sum(row.queries for row in self.rows), KV_HEADS * group, SIZE)
        sinks = torch.randn(KV_HEADS * group) * 2 if with_sinks else None
        found, plan = self.attend(query, window, sinks)
        expected = [
            plain_attention(
                part, self.cache[self.slots(row)], row, window, sinks, row.whole and window in self.joined, window in self.chunked
            )
            for part, row in zip(query.split([row.queries for row in self.rows]), self.rows, strict=True)
        ]
        torch.testing.assert_close(found, torch.cat(expected).float())
        return plan

    def attend(self, query: Tensor, window: int, sinks: Tensor | None = None) -> tuple[Tensor, shared_prefixes.Plan]:
        """Attention for `query`, whose tokens are in the order of the rows, and the plan that was used."""
        order, plan = shared_prefixes.plan(self.rows, self.layout(query.shape[1] // KV_HEADS, window, sinks is not None))
        parts = query.split([row.queries for row in self.rows])
        answers = shared_prefixes.attention(
            torch.cat([parts[i] for i in order]), self.cache, plan, AttentionOptions(window, SIZE**-0.5, sinks=sinks)
        )
        found = dict(zip(order, answers.split([self.rows[i].queries for i in order]), strict=True))
        return torch.cat([found[i] for i in range(len(found))]), plan


def plain_attention(
    query: Tensor,
    cached: Tensor,
    row: Row,
    window: int,
    sinks: Tensor | None = None,
    whole: bool = False,
    chunked: bool = False,
) -> Tensor:
    """query: [queries, heads, size], cached: [length, 2, kv_heads, size]; each query and head by itself, in float64."""
    result = torch.zeros_like(query, dtype=torch.float64)
    group = query.shape[1] // KV_HEADS
    parents = row.parents if row.parents is not None else list(range(-1, row.queries - 1))
    for i in range(row.queries):
        path = [i]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        position = row.context + len(path) - 1
        span = position % window + 1 if chunked else window  # visible positions, its own included
        visible = [k for k in range(row.context) if not window or position - k < span]
        visible += [row.context + node for steps, node in enumerate(path) if not window or steps < span]
        if whole:
            visible += range(position + 1, row.context + row.queries)
        keys, values = cached[visible].double().unbind(1)
        for head in range(query.shape[1]):
            logits = keys[:, head // group] @ query[i, head].double() * SIZE**-0.5
            sink_logits = logits.new_tensor([float(sinks[head])] if sinks is not None else [])
            weights = torch.cat((logits, sink_logits)).softmax(0)
            result[i, head] = weights[: len(logits)] @ values[:, head // group]
    return result


SHAPES = [(1, 0), (1, 1), (1, 40), (1, 41), (1, 90), (1, 93), (7, 0), (7, 30), (7, 31), (3, 5), (3, 200), (20, 4), (1, 63), (1, 65)]


@pytest.mark.parametrize("trees", [0.0, 0.6])
@pytest.mark.parametrize("window", [0, 1, 5, 50])
@pytest.mark.parametrize(("page_size", "group"), [(1, 1), (3, 2), (16, 4)])
def test_ragged_rows_match_plain_attention(page_size: int, group: int, window: int, trees: float) -> None:
    PagedRows(SHAPES, page_size, trees, spare=2).check(group, window)


@pytest.mark.parametrize("window", [0, 30, 100])
@pytest.mark.parametrize("shape", [(64, 0), (65, 0), (130, 0), (130, 70), (64, 1), (200, 3)])
def test_single_long_prompt_chunk_matches_plain_attention(shape: tuple[int, int], window: int) -> None:
    """It is computed in tiles, some of which see all keys and some only a part."""
    PagedRows([shape], 16).check(2, window)


@pytest.mark.parametrize("joined", [(0,), (50,), (0, 5, 50)])
@pytest.mark.parametrize("window", [0, 5, 50])
@pytest.mark.parametrize("trees", [0.0, 0.4])
def test_rows_with_bidirectional_attention_match_plain_attention(window: int, trees: float, joined: tuple[int, ...]) -> None:
    """In layers of some windows only, beside rows with as many queries and with other numbers of queries."""
    shapes = [*SHAPES, (70, 0), (70, 33), (130, 5), (7, 12), (7, 40), (20, 8)]
    PagedRows(shapes, 16, trees, spare=1, whole=0.5, joined=joined).check(2, window)
    PagedRows(shapes, 3, trees, seed=1, sharing=0.5, whole=0.7, joined=joined).check(4, window, with_sinks=True)
    PagedRows([(200, 30)], 16, whole=1, joined=joined).check(1, window)


def shapes_within_chunks(rng: random.Random, chunk: int, count: int, longest: int) -> list[tuple[int, int]]:
    """Shapes of rows that cross no end of an attention chunk."""
    contexts = [rng.choice([0, chunk - 1, chunk, rng.randint(0, longest)]) for _ in range(count)]
    return [(rng.choice([1, 1, 1, rng.randint(1, chunk - context % chunk)]), context) for context in contexts]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("chunk", [4, 16, 100])
def test_chunked_attention_matches_plain_attention(chunk: int, seed: int) -> None:
    """With layers of full attention beside; contexts are within one chunk, or span several."""
    rng = random.Random(seed)
    shapes = shapes_within_chunks(rng, chunk, 14, 3 * chunk)
    for window in (chunk, 0):
        batch = PagedRows(shapes, rng.choice([1, 3, 16]), seed=seed, spare=1, sharing=0.4, chunked=(chunk,))
        assert not batch.check(rng.choice([1, 2, 4]), window, with_sinks=seed % 2 > 0).levels
    PagedRows([(100, 200)], 16, chunked=(100,)).check(2, 100)


def test_draft_tree_in_chunked_attention_uses_positions_not_cache_slots() -> None:
    """The cache slots of its nodes may lie beyond the chunk's end."""
    batch = PagedRows([(13, 34), (5, 32), (1, 3), (9, 0)], 16, chunked=(16,))
    parents = [[-1, 0, 1, 2, 3, 4, 5, 0, 1, 1, 2, 8, 0], None, None, [-1, *range(8)]]
    rows = [replace(row, parents=own) for row, own in zip(batch.rows_in_given_order, parents, strict=True)]
    batch.rows = [rows[i] for i in order(rows)]
    batch.check(2, 16)


@pytest.mark.parametrize("seed", range(6))
def test_random_rows_match_plain_attention(seed: int) -> None:
    rng = random.Random(seed)
    shapes = [(rng.choice([1, 1, 1, 2, 5, rng.randint(1, 80)]), rng.choice([0, rng.randint(0, 150)])) for _ in range(12)]
    PagedRows(shapes, rng.choice([1, 3, 16]), trees=0.3, seed=seed, spare=1).check(rng.choice([1, 2, 4]), rng.choice([0, 9]))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("group", [1, 4])
def test_attention_sinks_match_plain_attention_and_disable_shared_prefixes(group: int, window: int) -> None:
    """By tiles of heads, head by head, and in a long prompt chunk."""
    assert not PagedRows(SHAPES, 16, trees=0.6, spare=2, sharing=0.8).check(group, window, with_sinks=True).levels
    PagedRows([(130, 70)], 16).check(group, window, with_sinks=True)


@pytest.fixture
def without_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rows are bundled: any number of own keys is too many."""
    monkeypatch.setattr(shared_prefixes, "ALONE", 0)


@pytest.mark.usefixtures("without_bundles")
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("seed", range(4))
def test_shared_prefixes_are_read_together_and_match_plain_attention(seed: int, page_size: int, group: int) -> None:
    """Decode rows read their shared prefix together; rows with several queries do not."""
    rng = random.Random(seed)
    shapes = [(rng.choice([1, 1, 1, 4]), rng.randint(150, 700)) for _ in range(10)]
    plan = PagedRows(shapes, page_size, trees=0.5, seed=seed, spare=1, sharing=0.8).check(group, 0)
    assert plan.levels
    assert not plan.bundles


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("seed", range(4))
def test_bundles_match_plain_attention(monkeypatch: pytest.MonkeyPatch, seed: int, page_size: int, group: int) -> None:
    """Bundles of rows with a shared prefix, beside rows that read it in runs and rows with several queries; with one bundle for
    each block and with several, as memory allows."""
    monkeypatch.setattr(kernel, "BLOCK_ELEMENTS", [1, BLOCK_ELEMENTS][seed % 2])
    monkeypatch.setattr(shared_prefixes, "ALONE", 300 * SIZE)
    monkeypatch.setattr(shared_prefixes, "TOGETHER", 4 * group)
    rng = random.Random(seed)
    shapes = [(rng.choice([1, 1, 1, 4]), rng.randint(150, 700)) for _ in range(20)]
    plan = PagedRows(shapes, page_size, trees=0.5, seed=seed, spare=1, sharing=0.8).check(group, 0)
    assert plan.bundles
    assert all(2 <= block.queries <= 4 for block in plan.bundles)


def beam_groups(widths: Sequence[int], common_keys: int) -> PagedRows:
    """Groups of single-query rows with a shared prefix of `common_keys` keys, on pages of 16; some rows also share the first of the
    two or three pages after it."""
    batch = PagedRows([(1, common_keys + i % 29) for i in range(sum(widths))], 16)
    full, rows = common_keys // 16, batch.rows_in_given_order
    first_row = 0
    for width in widths:
        leader, *others = range(first_row, first_row + width)
        for i in others:
            shared = full + (i % 2 and min(rows[leader].context, rows[i].context) // 16 - full)
            rows[i] = replace(rows[i], pages=[*rows[leader].pages[:shared], *rows[i].pages[shared:]])
        first_row += width
    batch.rows = rows
    return batch


def test_beams_of_equal_width_form_one_block_of_bundles() -> None:
    """Groups that are too large for a tile, or whose rows have too many keys of their own, are read in runs."""
    plan = beam_groups([4, 4, 1, 4, 3, 8, 9], 160).check(2, 0)
    assert [(block.start, block.rows, block.queries) for block in plan.bundles] == [(0, 1, 3), (3, 3, 4), (15, 1, 8)]
    assert [[(block.rows, block.queries) for block in level.blocks] for level in plan.levels] == [[(1, 9)]]
    assert not beam_groups([4, 4], 160).check(8, 0).bundles
    assert not beam_groups([4, 4], shared_prefixes.LONGEST - 16).check(2, 0).bundles
    assert not PagedRows([(1, 128 + shared_prefixes.ALONE // SIZE)] * 4, 16, sharing=1.0).check(2, 0).levels  # all keys are shared


def beam_groups_with_a_run() -> PagedRows:
    """Of three groups two share their first pages."""
    batch = beam_groups([4, 4, 4], 480)
    first = batch.rows[0].pages[:10]
    batch.rows = [replace(row, pages=[*first, *row.pages[10:]]) if i < 8 else row for i, row in enumerate(batch.rows)]
    return batch


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("in_run", [False, True])
def test_numbers_that_are_not_finite_stay_in_their_row_of_a_bundle(value: float, in_run: bool) -> None:
    """Rows of a bundle may be those of different requests."""
    batch = beam_groups_with_a_run() if in_run else beam_groups([4, 3], 160)
    query = torch.randn(len(batch.rows), 4 * KV_HEADS, SIZE)
    expected, plan = batch.attend(query, 0)
    assert plan.bundles
    assert bool(plan.levels) == in_run
    batch.cache[batch.slots(batch.rows[2])[-1]] = value
    found, _ = batch.attend(query, 0)
    assert found[2].isnan().any()
    others = [i for i in range(len(batch.rows)) if i != 2]
    torch.testing.assert_close(found[others], expected[others])


def test_bundles_within_a_run_match_plain_attention() -> None:
    """The prefix that beams of two groups share is a run, and the rest of each group is a bundle."""
    plan = beam_groups_with_a_run().check(4, 0)
    assert [[(block.rows, block.queries, block.views[0].length) for block in level.blocks] for level in plan.levels] == [
        [(1, 8, 160)]
    ]
    assert sorted((block.rows, block.queries) for block in plan.bundles) in ([(1, 4), (2, 4)], [(3, 4)])
    assert not plan.blocks


@pytest.mark.parametrize("widths", [[1, 1], [4, 4, 3], [4, 1, 9]])
def test_plan_for_the_following_token_matches_a_new_plan(widths: Sequence[int]) -> None:
    """For single rows, bundles and runs."""
    batch = beam_groups(widths, 160)
    order, plan = shared_prefixes.plan(batch.rows, batch.layout())
    longer = []
    for row in batch.rows:
        pages = list(row.pages)
        if (row.context + 1) % 16 == 0:
            pages = [*row.pages, len(batch.cache) // 16]
            batch.cache = torch.cat((batch.cache, torch.randn(16, 2, KV_HEADS, SIZE)))
        longer.append(replace(row, context=row.context + 1, pages=pages))
    batch.rows = longer
    following = shared_prefixes.follow(plan, torch.tensor([batch.slots(longer[i])[-1] for i in order]))
    assert following is not None
    query = torch.randn(len(longer), 2 * KV_HEADS, SIZE)
    answers = shared_prefixes.attention(query[order], batch.cache, following, AttentionOptions(0, SIZE**-0.5))
    torch.testing.assert_close(answers[torch.tensor(order).argsort()], batch.attend(query, 0)[0])


def test_check_detects_a_bundle_that_sees_another_rows_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = beam_groups([4, 4], 160)
    assert batch.check(2, 0).bundles
    original = shared_prefixes._see

    def too_much(visible: kernel.Array, *given: Any) -> None:
        original(visible, *given)
        visible[0] = visible[1] = visible[0] | visible[1]

    monkeypatch.setattr(shared_prefixes, "_see", too_much)
    with pytest.raises(AssertionError):
        batch.check(2, 0)


@pytest.mark.usefixtures("without_bundles")
def test_nested_shared_prefixes_are_read_level_by_level() -> None:
    """Beams under a prompt that other rows share, another prompt of equal length, and a row that shares nothing."""
    batch = PagedRows([(1, 320), (1, 800), (1, 810), (1, 330), (1, 325), (1, 48), (2, 400)], 16, spare=1)
    one, two, three, four, five, short, pair = batch.rows_in_given_order
    batch.rows = [
        one,
        replace(two, pages=[*one.pages[:20], *two.pages[20:]]),
        replace(three, pages=[*one.pages[:20], *two.pages[20:50], *three.pages[50:]]),
        four,
        replace(five, pages=[*four.pages[:20], *five.pages[20:]]),
        short,
        replace(pair, pages=[*one.pages[:20], *pair.pages[20:]]),
    ]
    plan = batch.check(2, 0)
    read = [[(block.rows, block.queries, block.views[0].length) for block in level.blocks] for level in plan.levels]
    assert read == [[(1, 2, 320), (1, 3, 320)], [(1, 2, 480)]]
    assert sum(block.rows * block.views[0].length for block in plan.blocks) < 700  # of 2,700 keys


@pytest.mark.parametrize("bundled", [False, True])
@pytest.mark.parametrize(("dtype", "cache_dtype"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float8_e4m3fn)])
def test_16_bit_and_fp8_shared_prefixes_match_rows_read_separately(
    dtype: torch.dtype, cache_dtype: torch.dtype, bundled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal up to rounding."""
    monkeypatch.setattr(shared_prefixes, "ALONE", 1 << 20 if bundled else 0)
    batch = PagedRows([(1, 400)] * 5, 16, sharing=1.0, seed=4)
    query, cache = torch.randn(5, 2 * KV_HEADS, SIZE).to(dtype), batch.cache.to(cache_dtype)
    scales = torch.tensor([[0.5, 2.0], [1.0, 0.25]]) if cache_dtype != dtype else None

    def attend() -> Tensor:
        order, plan = shared_prefixes.plan(batch.rows, batch.layout())
        assert bool(plan.bundles if bundled else plan.levels) == (shared_prefixes.shared_runs is original)
        return shared_prefixes.attention(query[order], cache, plan, AttentionOptions(0, SIZE**-0.5, scales=scales))[
            torch.tensor(order).argsort()
        ]

    original = shared_prefixes.shared_runs
    together = attend()
    monkeypatch.setattr(shared_prefixes, "shared_runs", lambda *_: ())
    torch.testing.assert_close(together, attend(), rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("without_bundles")
def test_check_detects_shared_keys_that_are_skipped_or_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = PagedRows([(1, 320)] * 3, 16, sharing=1.0, seed=3)
    assert batch.check(2, 0).levels
    original = shared_prefixes._merge
    for fault in (lambda *_: None, lambda *given: (original(*given), original(*given))):
        monkeypatch.setattr(shared_prefixes, "_merge", fault)
        with pytest.raises(AssertionError):
            batch.check(2, 0)


def test_check_detects_a_tree_mask_that_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_tree(parents: Sequence[int]) -> tuple[list[list[bool]], list[int]]:
        return [[True] * len(parents) for _ in parents], ancestry(parents)[1]

    monkeypatch.setattr(kernel, "ancestry", open_tree)
    with pytest.raises(AssertionError):
        PagedRows(SHAPES, 16, trees=0.6).check(2, 0)


def test_values_in_masked_slots_do_not_change_results() -> None:
    """Slots of other rows and beyond a row's end have a weight of exactly 0, so results stay bit-identical."""
    batch = PagedRows(SHAPES, 16, spare=2)
    query = torch.randn(sum(row.queries for row in batch.rows), KV_HEADS, SIZE)
    plan = blocks(batch.rows, batch.layout())
    before = attention(query, batch.cache, plan, AttentionOptions(0, 1.0))
    used = {slot for row in batch.rows for slot in batch.slots(row)}
    batch.cache[[slot for slot in range(len(batch.cache)) if slot not in used]] = 1e30
    assert attention(query, batch.cache, plan, AttentionOptions(0, 1.0)).equal(before)


def test_blocks_group_rows_with_equal_queries_within_size_and_padding_limits() -> None:
    rng = random.Random(1)
    shapes = [(rng.choice([1, 1, 1, 4]), rng.randint(0, 1500)) for _ in range(200)]
    rows = PagedRows(shapes, 16).rows
    layout = AttentionLayout(16, (LayerKind(0, KV_HEADS, 1, 64),), torch.float32, CPU)
    plan, elements = blocks(rows, layout), layout.elements
    first_row = 0
    for block in plan:
        block_rows = rows[first_row : first_row + block.rows]
        first_row += block.rows
        assert {row.queries for row in block_rows} == {block.queries}
        assert block.views[0].length == max(row.queries + row.context for row in block_rows)
        padding = sum(block.views[0].length - row.queries - row.context for row in block_rows) * elements
        assert padding * (3 + block.queries) <= 4 * PADDING
        assert block.rows == 1 or block.rows * block.views[0].length * elements <= BLOCK_ELEMENTS
        assert len(block.views[0].slots) == block.rows * block.views[0].length
    assert first_row == len(rows)
    starts = [block.start for block in plan]
    assert starts == [sum(block.rows * block.queries for block in plan[:i]) for i in range(len(plan))]
    assert len(plan) < 100  # many rows share a block


def test_ancestry_gives_visible_ancestors_and_depths_of_tree_nodes() -> None:
    masks, depths = ancestry([-1, 0, 0, 2, -1])
    assert depths == [0, 1, 1, 2, 0]
    assert [[i for i, visible in enumerate(mask) if visible] for mask in masks] == [[0], [0, 1], [0, 2], [0, 2, 3], [4]]
