"""Attention over ragged rows in pages equals a plain softmax in float64, row by row: chains and trees, with windows and without,
rows that begin alike and rows that do not."""

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


class Paged:
    """Rows over a cache of random numbers; what no row uses holds numbers as well. sharing: how likely a row begins with pages of
    another, as far as their contexts allow."""

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
        counts = [-(-(queries + context) // page_size) + rng.randint(0, spare) for queries, context in shapes]
        pages = list(range(1, sum(counts) + 1))
        rng.shuffle(pages)
        rows: list[Row] = []
        for (queries, context), count in zip(shapes, counts, strict=True):
            parents = [rng.randint(-1, i - 1) for i in range(queries)] if rng.random() < trees else None
            alike: Sequence[int] = ()
            if rows and rng.random() < sharing:
                other = rng.choice(rows)
                most = min(context, other.context) // page_size
                alike = other.pages[: rng.choice([most, rng.randint(0, most)])]
            own = [*alike, *(pages.pop() for _ in range(count - len(alike)))]
            rows.append(Row(queries, context, own, parents, whole=parents is None and rng.random() < whole))
        self.rows_as_given = rows
        self.rows = [rows[i] for i in order(rows)]
        self.cache = torch.randn((sum(counts) + 1) * page_size, 2, KV_HEADS, SIZE)

    def layout(self, group: int = 2, window: int = 0, sinking: bool = False) -> AttentionLayout:
        """Of layers with that window and of such without, where `group` query heads share a key head."""
        kinds = [
            LayerKind(one, KV_HEADS, group, SIZE, joined=one in self.joined, chunked=one in self.chunked)
            for one in sorted({0, window})
        ]
        return AttentionLayout(self.page_size, tuple(kinds), torch.float32, CPU, sinks=sinking)

    def slots(self, row: Row) -> list[int]:
        return [row.pages[i // self.page_size] * self.page_size + i % self.page_size for i in range(row.context + row.queries)]

    def check(self, group: int, window: int, sinking: bool = False) -> shared_prefixes.Plan:
        """Against the plain way; `group` query heads share a key head. Returns how it was computed."""
        query = torch.randn(sum(row.queries for row in self.rows), KV_HEADS * group, SIZE)
        sinks = torch.randn(KV_HEADS * group) * 2 if sinking else None
        found, plan = self.found(query, window, sinks)
        expected = [
            plain(
                part, self.cache[self.slots(row)], row, window, sinks, row.whole and window in self.joined, window in self.chunked
            )
            for part, row in zip(query.split([row.queries for row in self.rows]), self.rows, strict=True)
        ]
        torch.testing.assert_close(found, torch.cat(expected).float())
        return plan

    def found(self, query: Tensor, window: int, sinks: Tensor | None = None) -> tuple[Tensor, shared_prefixes.Plan]:
        """The answers of `query`, whose tokens stand in the order of the rows, and how they were computed."""
        order, plan = shared_prefixes.plan(self.rows, self.layout(query.shape[1] // KV_HEADS, window, sinks is not None))
        parts = query.split([row.queries for row in self.rows])
        answers = shared_prefixes.attention(
            torch.cat([parts[i] for i in order]), self.cache, plan, AttentionOptions(window, SIZE**-0.5, sinks=sinks)
        )
        found = dict(zip(order, answers.split([self.rows[i].queries for i in order]), strict=True))
        return torch.cat([found[i] for i in range(len(found))]), plan


def plain(
    query: Tensor,
    cached: Tensor,
    row: Row,
    window: int,
    sinks: Tensor | None = None,
    whole: bool = False,
    chunked: bool = False,
) -> Tensor:
    """query: [queries, heads, size], cached: [length, 2, kv_heads, size]; every sum on its own, in float64."""
    result = torch.zeros_like(query, dtype=torch.float64)
    group = query.shape[1] // KV_HEADS
    parents = row.parents if row.parents is not None else list(range(-1, row.queries - 1))
    for i in range(row.queries):
        path = [i]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        position = row.context + len(path) - 1
        back = position % window + 1 if chunked else window  # so far it may look
        seen = [k for k in range(row.context) if not window or position - k < back]
        seen += [row.context + node for steps, node in enumerate(path) if not window or steps < back]
        if whole:
            seen += range(position + 1, row.context + row.queries)
        keys, values = cached[seen].double().unbind(1)
        for head in range(query.shape[1]):
            logits = keys[:, head // group] @ query[i, head].double() * SIZE**-0.5
            more = logits.new_tensor([float(sinks[head])] if sinks is not None else [])
            weights = torch.cat((logits, more)).softmax(0)
            result[i, head] = weights[: len(logits)] @ values[:, head // group]
    return result


SHAPES = [(1, 0), (1, 1), (1, 40), (1, 41), (1, 90), (1, 93), (7, 0), (7, 30), (7, 31), (3, 5), (3, 200), (20, 4), (1, 63), (1, 65)]


@pytest.mark.parametrize("trees", [0.0, 0.6])
@pytest.mark.parametrize("window", [0, 1, 5, 50])
@pytest.mark.parametrize(("page_size", "group"), [(1, 1), (3, 2), (16, 4)])
def test_ragged_rows_equal_plain_attention(page_size: int, group: int, window: int, trees: float) -> None:
    Paged(SHAPES, page_size, trees, spare=2).check(group, window)


@pytest.mark.parametrize("window", [0, 30, 100])
@pytest.mark.parametrize("shape", [(64, 0), (65, 0), (130, 0), (130, 70), (64, 1), (200, 3)])
def test_a_long_chain_alone(shape: tuple[int, int], window: int) -> None:
    """As long prompts are: cut into tiles, some of which see all and some a part."""
    Paged([shape], 16).check(2, window)


@pytest.mark.parametrize("joined", [(0,), (50,), (0, 5, 50)])
@pytest.mark.parametrize("window", [0, 5, 50])
@pytest.mark.parametrize("trees", [0.0, 0.4])
def test_whole_rows(window: int, trees: float, joined: tuple[int, ...]) -> None:
    """In layers of some windows, beside others of as many queries and of other sizes."""
    shapes = [*SHAPES, (70, 0), (70, 33), (130, 5), (7, 12), (7, 40), (20, 8)]
    Paged(shapes, 16, trees, spare=1, whole=0.5, joined=joined).check(2, window)
    Paged(shapes, 3, trees, seed=1, sharing=0.5, whole=0.7, joined=joined).check(4, window, sinking=True)
    Paged([(200, 30)], 16, whole=1, joined=joined).check(1, window)


def within_chunks(rng: random.Random, chunk: int, count: int, longest: int) -> list[tuple[int, int]]:
    """Shapes of rows that go beyond no chunk's end."""
    contexts = [rng.choice([0, chunk - 1, chunk, rng.randint(0, longest)]) for _ in range(count)]
    return [(rng.choice([1, 1, 1, rng.randint(1, chunk - context % chunk)]), context) for context in contexts]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("chunk", [4, 16, 100])
def test_chunks(chunk: int, seed: int) -> None:
    """Beside layers that see all, of rows with contexts of one chunk, and of several."""
    rng = random.Random(seed)
    shapes = within_chunks(rng, chunk, 14, 3 * chunk)
    for window in (chunk, 0):
        paged = Paged(shapes, rng.choice([1, 3, 16]), seed=seed, spare=1, sharing=0.4, chunked=(chunk,))
        assert not paged.check(rng.choice([1, 2, 4]), window, sinking=seed % 2 > 0).levels
    Paged([(100, 200)], 16, chunked=(100,)).check(2, 100)


def test_a_tree_within_a_chunk() -> None:
    """Its nodes' places may lie beyond: positions are what counts."""
    paged = Paged([(13, 34), (5, 32), (1, 3), (9, 0)], 16, chunked=(16,))
    parents = [[-1, 0, 1, 2, 3, 4, 5, 0, 1, 1, 2, 8, 0], None, None, [-1, *range(8)]]
    rows = [replace(row, parents=own) for row, own in zip(paged.rows_as_given, parents, strict=True)]
    paged.rows = [rows[i] for i in order(rows)]
    paged.check(2, 16)


@pytest.mark.parametrize("seed", range(6))
def test_random_rows(seed: int) -> None:
    rng = random.Random(seed)
    shapes = [(rng.choice([1, 1, 1, 2, 5, rng.randint(1, 80)]), rng.choice([0, rng.randint(0, 150)])) for _ in range(12)]
    Paged(shapes, rng.choice([1, 3, 16]), trees=0.3, seed=seed, spare=1).check(rng.choice([1, 2, 4]), rng.choice([0, 9]))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("group", [1, 4])
def test_sinks(group: int, window: int) -> None:
    """In tiles of heads, by heads, and along a long chain; rows that begin alike each read all by themselves."""
    assert not Paged(SHAPES, 16, trees=0.6, spare=2, sharing=0.8).check(group, window, sinking=True).levels
    Paged([(130, 70)], 16).check(group, window, sinking=True)


@pytest.fixture
def unbundled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rows have of their own is too much for a bundle."""
    monkeypatch.setattr(shared_prefixes, "ALONE", 0)


@pytest.mark.usefixtures("unbundled")
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("seed", range(4))
def test_rows_that_begin_alike(seed: int, page_size: int, group: int) -> None:
    """Some of them decode and read what they have in common together; others have more queries and do not."""
    rng = random.Random(seed)
    shapes = [(rng.choice([1, 1, 1, 4]), rng.randint(150, 700)) for _ in range(10)]
    plan = Paged(shapes, page_size, trees=0.5, seed=seed, spare=1, sharing=0.8).check(group, 0)
    assert plan.levels
    assert not plan.bundles


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("seed", range(4))
def test_bundles(monkeypatch: pytest.MonkeyPatch, seed: int, page_size: int, group: int) -> None:
    """Of some rows that begin alike, beside others that read by runs, and others yet that have more queries. With a bundle to each
    block and with several, as memory allows."""
    monkeypatch.setattr(kernel, "BLOCK_ELEMENTS", [1, BLOCK_ELEMENTS][seed % 2])
    monkeypatch.setattr(shared_prefixes, "ALONE", 300 * SIZE)
    monkeypatch.setattr(shared_prefixes, "TOGETHER", 4 * group)
    rng = random.Random(seed)
    shapes = [(rng.choice([1, 1, 1, 4]), rng.randint(150, 700)) for _ in range(20)]
    plan = Paged(shapes, page_size, trees=0.5, seed=seed, spare=1, sharing=0.8).check(group, 0)
    assert plan.bundles
    assert all(2 <= block.queries <= 4 for block in plan.bundles)


def beams(widths: Sequence[int], common_keys: int) -> Paged:
    """Groups of rows on pages of 16 that begin alike; of the two or three pages behind that some share the first."""
    paged = Paged([(1, common_keys + i % 29) for i in range(sum(widths))], 16)
    full, rows = common_keys // 16, paged.rows_as_given
    place = 0
    for wide in widths:
        first, *others = range(place, place + wide)
        for i in others:
            alike = full + (i % 2 and min(rows[first].context, rows[i].context) // 16 - full)
            rows[i] = replace(rows[i], pages=[*rows[first].pages[:alike], *rows[i].pages[alike:]])
        place += wide
    paged.rows = rows
    return paged


def test_beams_are_bundles() -> None:
    """All groups of a width in one block; where they are too many for a tile or have too much of their own, by runs."""
    plan = beams([4, 4, 1, 4, 3, 8, 9], 160).check(2, 0)
    assert [(block.start, block.rows, block.queries) for block in plan.bundles] == [(0, 1, 3), (3, 3, 4), (15, 1, 8)]
    assert [[(block.rows, block.queries) for block in level.blocks] for level in plan.levels] == [[(1, 9)]]
    assert not beams([4, 4], 160).check(8, 0).bundles
    assert not beams([4, 4], shared_prefixes.LONGEST - 16).check(2, 0).bundles
    assert not Paged([(1, 128 + shared_prefixes.ALONE // SIZE)] * 4, 16, sharing=1.0).check(2, 0).levels  # all is common


def test_bundles_below_a_run() -> None:
    """What beams of two groups have in common is a run, and the rest of each group is a bundle."""
    paged = beams([4, 4, 4], 480)
    first = paged.rows[0].pages[:10]
    paged.rows = [replace(row, pages=[*first, *row.pages[10:]]) if i < 8 else row for i, row in enumerate(paged.rows)]
    plan = paged.check(4, 0)
    assert [[(block.rows, block.queries, block.views[0].length) for block in level.blocks] for level in plan.levels] == [
        [(1, 8, 160)]
    ]
    assert sorted((block.rows, block.queries) for block in plan.bundles) in ([(1, 4), (2, 4)], [(3, 4)])
    assert not plan.blocks


@pytest.mark.parametrize("widths", [[1, 1], [4, 4, 3], [4, 1, 9]])
def test_one_token_more(widths: Sequence[int]) -> None:
    """The plan that follows sees what a new plan sees: of single rows, bundles and runs."""
    paged = beams(widths, 160)
    order, plan = shared_prefixes.plan(paged.rows, paged.layout())
    longer = []
    for row in paged.rows:
        pages = list(row.pages)
        if (row.context + 1) % 16 == 0:
            pages = [*row.pages, len(paged.cache) // 16]
            paged.cache = torch.cat((paged.cache, torch.randn(16, 2, KV_HEADS, SIZE)))
        longer.append(replace(row, context=row.context + 1, pages=pages))
    paged.rows = longer
    following = shared_prefixes.follow(plan, torch.tensor([paged.slots(longer[i])[-1] for i in order]))
    assert following is not None
    query = torch.randn(len(longer), 2 * KV_HEADS, SIZE)
    answers = shared_prefixes.attention(query[order], paged.cache, following, AttentionOptions(0, SIZE**-0.5))
    torch.testing.assert_close(answers[torch.tensor(order).argsort()], paged.found(query, 0)[0])


def test_the_check_finds_that_a_bundle_sees_a_neighbours_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = beams([4, 4], 160)
    assert paged.check(2, 0).bundles
    honest = shared_prefixes._see

    def too_much(seen: kernel.Array, *given: Any) -> None:
        honest(seen, *given)
        seen[0] = seen[1] = seen[0] | seen[1]

    monkeypatch.setattr(shared_prefixes, "_see", too_much)
    with pytest.raises(AssertionError):
        paged.check(2, 0)


@pytest.mark.usefixtures("unbundled")
def test_nested_beginnings() -> None:
    """Beams under a prompt that others share as well, another prompt of that length, and a row alone."""
    paged = Paged([(1, 320), (1, 800), (1, 810), (1, 330), (1, 325), (1, 48), (2, 400)], 16, spare=1)
    one, two, three, four, five, short, pair = paged.rows_as_given
    paged.rows = [
        one,
        replace(two, pages=[*one.pages[:20], *two.pages[20:]]),
        replace(three, pages=[*one.pages[:20], *two.pages[20:50], *three.pages[50:]]),
        four,
        replace(five, pages=[*four.pages[:20], *five.pages[20:]]),
        short,
        replace(pair, pages=[*one.pages[:20], *pair.pages[20:]]),
    ]
    plan = paged.check(2, 0)
    read = [[(block.rows, block.queries, block.views[0].length) for block in level.blocks] for level in plan.levels]
    assert read == [[(1, 2, 320), (1, 3, 320)], [(1, 2, 480)]]
    assert sum(block.rows * block.views[0].length for block in plan.blocks) < 700  # of 2,700 keys


@pytest.mark.parametrize("bundled", [False, True])
@pytest.mark.parametrize(("dtype", "stored"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float8_e4m3fn)])
def test_beginnings_in_other_numbers(
    dtype: torch.dtype, stored: torch.dtype, bundled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together or each alone: the same, up to rounding."""
    monkeypatch.setattr(shared_prefixes, "ALONE", 1 << 20 if bundled else 0)
    paged = Paged([(1, 400)] * 5, 16, sharing=1.0, seed=4)
    query, cache = torch.randn(5, 2 * KV_HEADS, SIZE).to(dtype), paged.cache.to(stored)
    scales = torch.tensor([[0.5, 2.0], [1.0, 0.25]]) if stored != dtype else None

    def found() -> Tensor:
        order, plan = shared_prefixes.plan(paged.rows, paged.layout())
        assert bool(plan.bundles if bundled else plan.levels) == (shared_prefixes.shared_runs is honest)
        return shared_prefixes.attention(query[order], cache, plan, AttentionOptions(0, SIZE**-0.5, scales=scales))[
            torch.tensor(order).argsort()
        ]

    honest = shared_prefixes.shared_runs
    together = found()
    monkeypatch.setattr(shared_prefixes, "shared_runs", lambda *_: ())
    torch.testing.assert_close(together, found(), rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("unbundled")
def test_the_check_finds_common_keys_that_are_forgotten_or_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = Paged([(1, 320)] * 3, 16, sharing=1.0, seed=3)
    assert paged.check(2, 0).levels
    honest = shared_prefixes._merge
    for fault in (lambda *_: None, lambda *given: (honest(*given), honest(*given))):
        monkeypatch.setattr(shared_prefixes, "_merge", fault)
        with pytest.raises(AssertionError):
            paged.check(2, 0)


def test_the_check_finds_a_mask_that_hides_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_tree(parents: Sequence[int]) -> tuple[list[list[bool]], list[int]]:
        return [[True] * len(parents) for _ in parents], ancestry(parents)[1]

    monkeypatch.setattr(kernel, "ancestry", open_tree)
    with pytest.raises(AssertionError):
        Paged(SHAPES, 16, trees=0.6).check(2, 0)


def test_what_a_row_does_not_see_may_be_anything() -> None:
    """Slots of other rows and beyond a row's end have no weight at all, so answers don't change by a bit."""
    paged = Paged(SHAPES, 16, spare=2)
    query = torch.randn(sum(row.queries for row in paged.rows), KV_HEADS, SIZE)
    plan = blocks(paged.rows, paged.layout())
    before = attention(query, paged.cache, plan, AttentionOptions(0, 1.0))
    used = {slot for row in paged.rows for slot in paged.slots(row)}
    paged.cache[[slot for slot in range(len(paged.cache)) if slot not in used]] = 1e30
    assert attention(query, paged.cache, plan, AttentionOptions(0, 1.0)).equal(before)


def test_blocks_are_of_equal_rows_and_bounded_size() -> None:
    rng = random.Random(1)
    shapes = [(rng.choice([1, 1, 1, 4]), rng.randint(0, 1500)) for _ in range(200)]
    rows = Paged(shapes, 16).rows
    layout = AttentionLayout(16, (LayerKind(0, KV_HEADS, 1, 64),), torch.float32, CPU)
    plan, elements = blocks(rows, layout), layout.elements
    place = 0
    for block in plan:
        own = rows[place : place + block.rows]
        place += block.rows
        assert {row.queries for row in own} == {block.queries}
        assert block.views[0].length == max(row.queries + row.context for row in own)
        padding = sum(block.views[0].length - row.queries - row.context for row in own) * elements
        assert padding * (3 + block.queries) <= 4 * PADDING
        assert block.rows == 1 or block.rows * block.views[0].length * elements <= BLOCK_ELEMENTS
        assert len(block.views[0].slots) == block.rows * block.views[0].length
    assert place == len(rows)
    starts = [block.start for block in plan]
    assert starts == [sum(block.rows * block.queries for block in plan[:i]) for i in range(len(plan))]
    assert len(plan) < 100  # rows do share blocks


def test_ancestry() -> None:
    sees, depths = ancestry([-1, 0, 0, 2, -1])
    assert depths == [0, 1, 1, 2, 0]
    assert [[i for i, seen in enumerate(row) if seen] for row in sees] == [[0], [0, 1], [0, 2], [0, 2, 3], [4]]
