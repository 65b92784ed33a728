"""Triton's attention over pages equals a softmax in float64, whatever a step is made of; and its plans read every key once.

Without a GPU the kernels run in Triton's interpreter, which is slow: worlds are tiny. What no row uses holds no numbers, and
neither do outputs before they are written.
"""

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from penstock.kernels import attention as plain
from penstock.kernels import compilation, dependent_launch, paged_attention, ragged, work_list
from penstock.kernels.attention import AttentionOptions, Row
from penstock.kernels.layout import AttentionLayout, LayerKind
from penstock.kernels.paged_attention import Capacity, attention, plan, tiles_of
from penstock.kernels.work_list import NODES, SHORTEST_RUN, Item, Segment, Table, Tile, Work

from .test_attention import within_chunks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
pytestmark = pytest.mark.usefixtures("unwritten")


def rows_of(
    shapes: Sequence[tuple[int, int]],
    page_size: int,
    chance: random.Random,
    trees: float = 0.0,
    sharing: float = 0.0,
    whole: float = 0.0,
) -> list[Row]:
    """Rows of (queries, context). whole: how many are that; sharing: how likely a row begins like an earlier one, as far as their
    contexts allow."""
    widths = [work_list.width(Row(queries, context, ()), page_size) + chance.randint(0, 1) for queries, context in shapes]
    free = list(range(1, sum(widths) + 1))
    chance.shuffle(free)
    rows: list[Row] = []
    for (queries, context), width in zip(shapes, widths, strict=True):
        alike: list[int] = []
        if rows and chance.random() < sharing:
            other = chance.choice(rows)
            most = min(context, other.context) // page_size
            alike = list(other.pages[: chance.choice([most, chance.randint(0, most)])])
        pages = [*alike, *(free.pop() for _ in range(width - len(alike)))]
        tree = queries <= NODES and chance.random() < trees
        parents = [chance.randint(-1, i - 1) for i in range(queries)] if tree else None
        rows.append(Row(queries, context, pages, parents, whole=not tree and whole > 0 and chance.random() < whole))
    return rows


def slots_of(row: Row, page_size: int) -> list[int]:
    return [row.pages[i // page_size] * page_size + i % page_size for i in range(row.context + row.queries)]


def cache_of(rows: Sequence[Row], page_size: int, shape: Sequence[int], nothing: float = torch.nan) -> Tensor:
    """[slots, *shape]: random numbers in the slots of rows, `nothing` in all others."""
    used = sorted({slot for row in rows for slot in slots_of(row, page_size)})
    cache = torch.full(((max(page for row in rows for page in row.pages) + 1) * page_size, *shape), nothing)
    cache[used] = torch.randn(len(used), *shape)
    return cache


def nothing_by(route: str) -> float:
    """What slots of no row may hold: torch masks what it has read."""
    return torch.nan if route == "triton" else 100.0


def spans_of(rows: Iterable[Row]) -> Iterator[tuple[Row, slice]]:
    """Rows, with their tokens in a step."""
    start = 0
    for row in rows:
        yield row, slice(start, start + row.queries)
        start += row.queries


def visible_of(row: Row) -> Tensor:
    """[queries, keys]: which keys its queries see, but for windows."""
    ancestors, _ = plain.ancestry(row.parents if row.parents is not None else range(-1, row.queries - 1))
    return torch.cat((torch.ones(row.queries, row.context, dtype=torch.bool), torch.tensor(ancestors)), 1)


def exact(
    query: Tensor,
    cached: Tensor,
    row: Row,
    window: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
    latent: int = 0,
    joined: bool = False,
    chunked: bool = False,
) -> Tensor:
    """query: [queries, heads, size], cached: [length, 2 or 1, kv_heads, size], sinks: [heads], all in float64."""
    visible = visible_of(row)
    depths = visible[:, row.context :].sum(1) - 1
    positions = torch.cat((torch.arange(row.context), row.context + depths))
    visible |= row.whole and joined
    own = positions[row.context :, None]
    if window:
        visible &= positions >= own // window * window if chunked else own - positions < window
    every = cached.repeat_interleave(query.shape[1] // cached.shape[2], 2)
    keys, values = every[:, 0], every[:, -1, :, : latent or None]
    logits = torch.einsum("qhs,khs->hqk", query, keys) * scale
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks[:, None, None].expand(-1, row.queries, 1)), 2)
    return torch.einsum("hqk,khs->qhs", logits.softmax(-1)[:, :, : len(cached)], values)


class World:
    """Rows over a cache of random numbers; slots of no row hold none."""

    def __init__(
        self,
        rows: list[Row],
        page_size: int,
        *,
        kv_heads: int = 1,
        ratio: int = 2,
        size: int = 64,
        dtype: torch.dtype = torch.float32,
        eight_bits: bool = False,
        sinks: bool = False,
        latent: int = 0,
        seed: int = 0,
        joined: Sequence[int] = (),
        chunked: bool = False,
    ) -> None:
        """chunked: windows don't slide."""
        self.joined, self.chunked = joined, chunked
        torch.manual_seed(seed)
        self.rows, self.page_size, self.kv_heads, self.ratio, self.size, self.dtype = rows, page_size, kv_heads, ratio, size, dtype
        self.latent = latent
        cache = cache_of(rows, page_size, (1, 1, size) if latent else (2, kv_heads, size))
        self.cache = cache.to(torch.float8_e4m3fn if eight_bits else dtype).to(DEVICE)
        self.scales = torch.rand(2, kv_heads, device=DEVICE) + 0.5 if eight_bits and not latent else None
        joint = torch.randn(sum(row.queries for row in rows), kv_heads * (ratio + 2), size).to(dtype).to(DEVICE)
        self.query = joint[:, : kv_heads * ratio]
        self.sinks = torch.randn(kv_heads * ratio, device=DEVICE) * 2 if sinks else None

    def plan(self, window: int = 0, **options: object) -> paged_attention.Plan:
        defaults: dict[str, object] = {"processors": 3, "dtype": self.dtype}
        kinds = [
            LayerKind(one, self.kv_heads, self.ratio, self.size, self.latent > 0, one in self.joined, self.chunked and one > 0)
            for one in sorted({0, window})
        ]
        return plan(self.rows, self.page_size, kinds, DEVICE, **{**defaults, **options})  # type: ignore[arg-type]

    def found(self, step: paged_attention.Plan, window: int = 0, softcap: float = 0.0) -> Tensor:
        return attention(
            self.query, self.cache, step, AttentionOptions(window, self.size**-0.5, softcap, self.scales, self.sinks, self.latent)
        )

    def expected(self, window: int = 0, softcap: float = 0.0) -> Tensor:
        cache = self.cache.double().cpu()
        if self.scales is not None:
            cache = cache * self.scales.double().cpu()[:, :, None]
        parts = self.query.double().cpu().split([row.queries for row in self.rows])
        sinks = self.sinks.double().cpu() if self.sinks is not None else None
        scale, joined = self.size**-0.5, window in self.joined
        return torch.cat(
            [
                exact(
                    part,
                    cache[slots_of(row, self.page_size)],
                    row,
                    window,
                    scale,
                    softcap,
                    sinks,
                    self.latent,
                    joined,
                    self.chunked,
                )
                for part, row in zip(parts, self.rows, strict=True)
            ]
        )

    def check(self, window: int = 0, softcap: float = 0.0, **options: object) -> paged_attention.Plan:
        step = self.plan(window, **options)
        found = self.found(step, window, softcap)
        assert found.dtype == self.dtype
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(found.double().cpu(), self.expected(window, softcap), rtol=tolerance, atol=tolerance)
        return step


MIXED = [(1, 0), (1, 1), (1, 600), (1, 129), (2, 0), (5, 70), (16, 33), (40, 20)]


@pytest.mark.parametrize("window", [0, 1, 40, 200])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
def test_a_mixture(page_size: int, window: int) -> None:
    chance = random.Random(page_size + window)
    World(rows_of(MIXED, page_size, chance, trees=0.5, sharing=0.3), page_size).check(window)


@pytest.mark.parametrize("ratio", [1, 2, 4, 7, 8])
@pytest.mark.parametrize("size", [8, 64, 80, 96, 128, 256])
def test_heads(size: int, ratio: int) -> None:
    rows = rows_of([(1, 150), (3, 20), (9, 0)], 4, random.Random(size), trees=0.5)
    World(rows, 4, kv_heads=2 if ratio < 4 else 1, ratio=ratio, size=size).check(window=31 if ratio == 2 else 0)


@pytest.mark.parametrize(("latent", "heads", "together"), [(32, 4, 4), (96, 6, 2), (512, 16, 16)])
def test_latents(latent: int, heads: int, together: int) -> None:
    """Whose keys are values, too, but for their last features; parts of the heads go by programs of their own."""
    rows = rows_of([(1, 300), (1, 33), (5, 70), (20, 10)], 16, random.Random(heads), trees=0.4, sharing=0.5)
    turned = 64 if latent == 512 else 24
    World(rows, 16, kv_heads=heads // together, ratio=together, size=latent + turned, latent=latent).check()


def test_latents_of_few_bits() -> None:
    rows = rows_of([(1, 100), (3, 40)], 64, random.Random(2))
    World(rows, 64, kv_heads=2, ratio=4, size=80, latent=64, dtype=torch.bfloat16).check()
    World(rows, 64, kv_heads=2, ratio=4, size=80, latent=64, dtype=torch.float16, eight_bits=True).check()


@pytest.mark.parametrize("shape", [(1, 300), (128, 0), (300, 10), (100, 250)])
def test_one_row(shape: tuple[int, int]) -> None:
    """Contexts that are cut, and chunks of several tiles."""
    World(rows_of([shape], 64, random.Random(1)), 64, ratio=1).check()


def test_what_is_before_all_windows_may_be_anything() -> None:
    window = 40
    world = World(rows_of([(1, 203), (5, 150), (20, 130)], 16, random.Random(0), trees=0.5), 16)
    expected = world.expected(window)
    for row in world.rows:
        world.cache[slots_of(row, 16)[: row.context - window + 1]] = torch.nan
    torch.testing.assert_close(world.found(world.plan(window), window).double().cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("page_size", "fixed", "chunk"), [(1, 0, 16), (1, 0, 64), (16, 0, 16), (16, 128, 64), (16, 0, 256), (64, 0, 64), (256, 0, 256)]
)
def test_chunks(page_size: int, fixed: int, chunk: int) -> None:
    """Of rows that share pages, in the same chunk and not, and of which one is a tree. What is before may be anything."""
    chance = random.Random(page_size + chunk)
    shapes = [(1, 600), (1, 3 * chunk - 1), (1, 3 * chunk - 2), (1, 600), *within_chunks(chance, chunk, 6, 600)]
    rows = rows_of(shapes, page_size, chance, sharing=0.8)
    if not fixed:  # some read together what they see
        parts = work_list.segments(work_list.table(rows, page_size, 60), LayerKind(chunk, 2, 2, 64, chunked=True), TILES)
        assert chunk == page_size or chunk < 256 or parts[:, work_list.SHARED].any()
    rows.append(replace(rows_of([(9, chunk + 3)], page_size, chance)[0], parents=[-1, 0, 1, 0, 2, 2, 1, 0, 5]))
    rows[-1] = replace(rows[-1], pages=[page + max(max(row.pages) for row in rows[:-1]) for page in rows[-1].pages])
    world = World(rows, page_size, chunked=True)
    world.check(chunk, fixed=fixed)
    world.check(0, fixed=fixed)
    expected = world.expected(chunk)
    seen = {slot for row in rows for slot in slots_of(row, page_size)[row.context // chunk * chunk :]}
    world.cache[[slot for slot in range(len(world.cache)) if slot not in seen]] = torch.nan
    found = world.found(world.plan(chunk, fixed=fixed), chunk)
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("nodes", [2, 33, 64, 65, 128])
@pytest.mark.parametrize("window", [0, 3])
def test_trees(nodes: int, window: int) -> None:
    World(rows_of([(nodes, 45)], 16, random.Random(nodes), trees=1), 16, ratio=1).check(window)


def test_a_tree_has_at_most_128_nodes() -> None:
    row = Row(129, 0, range(1, 10), list(range(-1, 128)))
    with pytest.raises(ValueError, match="at most 128 nodes, not 129"):
        plan([row], 16, [LayerKind(0, 1, 1, 64)], DEVICE, dtype=torch.float32)


@pytest.mark.parametrize(("page_size", "window", "joined"), [(16, 0, [0]), (3, 40, [40]), (16, 40, [0]), (64, 200, [0, 200])])
def test_whole_rows(page_size: int, window: int, joined: list[int]) -> None:
    """In layers of some windows, beside trees and chains, cut into tiles and pieces."""
    chance = random.Random(page_size + window)
    shapes = [(1, 40), (5, 70), (16, 33), (40, 20), (150, 60)]
    rows = rows_of(shapes, page_size, chance, trees=0.2, sharing=0.5, whole=0.7)
    rows[-1] = replace(rows[-1], whole=True)
    World(rows, page_size, joined=joined).check(window)
    World(rows, page_size, ratio=4, joined=joined, sinks=True).check(window, softcap=3.0, fixed=128)


@pytest.mark.parametrize("window", [0, 60])
def test_a_capped_logit(window: int) -> None:
    world = World(rows_of([(1, 200), (20, 30)], 16, random.Random(2)), 16)
    world.query.mul_(8)  # so that the cap matters
    world.check(window, softcap=3.0)


@pytest.mark.parametrize("window", [0, 60])
def test_sinks(window: int) -> None:
    """Of rows that are cut into pieces and that begin alike, too: each sink counts once."""
    rows = rows_of([(1, 500), (1, 490), (1, 0), (20, 30), (9, 40)], 16, random.Random(12), sharing=0.8, trees=0.5)
    step = World(rows, 16, kv_heads=2, ratio=3, sinks=True).check(window)
    assert window or len(step.launches[window].entries)
    World(rows, 16, ratio=4, dtype=torch.float16, sinks=True, eight_bits=True).check(window)


def test_a_sink_far_above_or_below_all_logits() -> None:
    """All goes there, or nothing."""
    world = World(rows_of([(1, 300), (3, 20)], 16, random.Random(13)), 16, sinks=True)
    step = world.plan()
    assert world.sinks is not None
    world.sinks.fill_(1e4)
    assert world.found(step).abs().max() < 1e-20
    world.sinks.fill_(-1e4)
    found, world.sinks = world.found(step), None
    torch.testing.assert_close(found, world.found(step))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_types(dtype: torch.dtype) -> None:
    rows = rows_of([(1, 300), (1, 5), (7, 90), (70, 40)], 16, random.Random(3), trees=0.4)
    World(rows, 16, ratio=4, size=64, dtype=dtype).check()


def test_a_cache_of_eight_bits() -> None:
    rows = rows_of([(1, 300), (7, 90)], 64, random.Random(4))
    World(rows, 64, kv_heads=2, size=64, dtype=torch.float16, eight_bits=True).check()


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("page_size", [16, 128])
def test_rows_that_begin_alike(page_size: int, window: int) -> None:
    chance = random.Random(page_size)
    rows = rows_of([(1, 300), *[(1, 290 + i) for i in range(5)], (4, 310), (1, 40)], page_size, chance, sharing=0.9)
    step = World(rows, page_size).check(window)
    assert len(step.listed) > len(step.positions)


@pytest.mark.parametrize("seed", range(6))
def test_anything(seed: int) -> None:
    chance = random.Random(seed)
    shapes = [
        (chance.choice([1, 1, 1, 2, chance.randint(2, 16), chance.randint(1, 70)]), chance.choice([0, chance.randint(0, 300)]))
        for _ in range(5)
    ]
    page_size = chance.choice([1, 4, 16, 64, 256])
    rows = rows_of(shapes, page_size, chance, trees=0.4, sharing=0.5)
    world = World(rows, page_size, ratio=chance.choice([1, 2, 4, 7]), size=chance.choice([64, 80]), seed=seed)
    world.check(chance.choice([0, 0, 17, 150]), processors=chance.choice([1, 4, 100]))


def test_it_agrees_with_what_a_cpu_computes() -> None:
    rows = rows_of([(1, 30), (1, 31), (1, 250), (6, 40), (70, 9)], 16, random.Random(5))
    rows = [rows[i] for i in plain.order(rows)]
    world = World(rows, 16)
    world.cache.nan_to_num_()  # there, what is masked must be finite
    kinds = tuple(LayerKind(window, 2, 2, world.size) for window in (0, 40))
    blocks = plain.blocks(rows, AttentionLayout(16, kinds, torch.float32, torch.device("cpu")))
    for window in (0, 40):
        expected = plain.attention(world.query.cpu(), world.cache.cpu(), blocks, AttentionOptions(window, world.size**-0.5))
        torch.testing.assert_close(world.found(world.plan(window), window).cpu(), expected, rtol=1e-5, atol=1e-5)


def test_fixed_cuts_make_a_row_independent_of_its_neighbours() -> None:
    chance = random.Random(6)
    rows = rows_of([(1, 500), (1, 20), (5, 300), (1, 400)], 16, chance, sharing=1.0)
    together = World(rows, 16)
    whole = together.found(together.plan(fixed=128))
    torch.testing.assert_close(whole.double().cpu(), together.expected(), rtol=1e-5, atol=1e-5)
    alone = World(rows[:1], 16)
    alone.query, alone.cache = together.query[:1], together.cache
    assert alone.found(alone.plan(fixed=128, processors=50)).equal(whole[:1])


def test_a_plan_with_room_takes_the_place_of_another() -> None:
    """As captured graphs need it: same grids, same addresses, other contents."""
    tiles = tiles_of(LayerKind(0, 2, 4, 64), torch.float32)[:2]
    room = Capacity(tokens=20, listed=40, pages=80, tiles={0: tiles}, items={0: (8, 4)}, entries=20, pieces=60, trees=True)
    first = World(rows_of([(1, 300), (3, 20)], 16, random.Random(7)), 16)
    other = World(rows_of([(1, 10), (12, 280), (1, 128), (1, 500)], 16, random.Random(8), trees=0.5, sharing=0.5), 16)
    step = first.check(capacity=room)
    buffer = step.buffer.data_ptr()
    step.become(other.plan(capacity=room))
    assert step.buffer.data_ptr() == buffer
    torch.testing.assert_close(other.found(step).double().cpu(), other.expected(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="can't take the place"):
        step.become(other.plan())
    with pytest.raises(ValueError, match="room for 20"):
        World(rows_of([(21, 0)], 16, random.Random(7)), 16).plan(capacity=room)


def test_layers_of_several_kinds_go_by_one_plan() -> None:
    """Each with tiles, items and partials of its own, in a plan that takes another's place."""
    kinds = [LayerKind(0, 1, 8, 32), LayerKind(31, 4, 2, 16), LayerKind(64, 2, 1, 300)]
    shapes = [(1, 300), (3, 20), (9, 280), (1, 128)]
    layout = AttentionLayout(16, tuple(kinds), torch.float32, DEVICE)
    room = ragged.capacity(layout, 14, 4, 400, 400, mixed=True, trees=True)
    assert set(room.items) == {0, 31, 64}
    plans = []
    for seed in range(2):
        rows = rows_of(shapes, 16, random.Random(seed), trees=0.5, sharing=0.5)
        plans.append(plan(rows, 16, kinds, DEVICE, dtype=torch.float32, processors=3, capacity=room))
        if seed:
            plans[0].become(plans[1])
        for kind in kinds:
            world = World(rows, 16, kv_heads=kind.kv_heads, ratio=kind.ratio, size=kind.size)
            found = world.found(plans[0], kind.window)
            torch.testing.assert_close(found.double().cpu(), world.expected(kind.window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "mixed", "invariant", "launched"),
    [
        (1, False, False, [16]),
        (4, False, False, [16]),
        (16, False, False, [64]),
        (40, False, False, [64]),
        (64, False, False, [16, 64]),
        (4, True, False, [16]),
        (16, True, False, [16, 64]),
        (64, True, False, [16, 64, 128]),
        (64, False, True, [64]),
        (64, True, True, [64]),
    ],
)
def test_graphs_launch_no_tile_that_no_step_of_theirs_takes(tokens: int, mixed: bool, invariant: bool, launched: list[int]) -> None:
    """Even where all rows have a prefix in common: they are one segment then."""
    kinds = (LayerKind(0, 2, 4, 64),)
    layout = AttentionLayout(16, kinds, torch.bfloat16, DEVICE, invariant=invariant)
    room = ragged.capacity(layout, tokens, tokens, 1000, 64 * tokens, mixed)
    assert [tile.rows for tile in room.tiles[0]] == launched
    assert min(room.items[0]) > 0
    fixed = ragged.FIXED if invariant else 0
    for seed, sharing in itertools.product(range(6), (0.0, 0.5, 1.0)):
        chance = random.Random(seed)
        single = chance.randint(1, tokens) if mixed else tokens
        shapes = [(1, chance.randint(0, 900)) for _ in range(single)] + [(tokens - single, 0)] * (single < tokens)
        rows = rows_of(shapes, 16, chance, sharing=sharing)
        plan(rows, 16, kinds, DEVICE, dtype=torch.bfloat16, fixed=fixed, capacity=room)  # it has room


class TestFaultsAreFound:
    """Each is small, and fails the check that passes without it."""

    def world(self) -> World:
        return World(rows_of([(1, 290), (6, 20)], 16, random.Random(9), trees=1.0), 16)

    def fails(self) -> None:
        with pytest.raises(AssertionError):
            self.world().check(40)
        with pytest.raises(AssertionError):
            self.world().check()

    def test_none(self) -> None:
        self.world().check(40)

    def test_a_tree_that_is_open(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(work_list, "masks", lambda row: [(2 * (1 << i) - 1, 0) for i in range(row.queries)])
        self.fails()

    def test_a_key_that_nobody_reads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuts = work_list._cuts

        def short(*arguments: Any) -> Any:
            which, begins, ends = cuts(*arguments)
            return which, begins, ends - 1

        monkeypatch.setattr(work_list, "_cuts", short)
        self.fails()

    def test_a_key_that_is_read_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuts = work_list._cuts

        def twice(*arguments: Any) -> Any:
            which, begins, ends = cuts(*arguments)
            return numpy.append(which, which[-1]), numpy.append(begins, ends[-1] - 1), numpy.append(ends, ends[-1])

        monkeypatch.setattr(work_list, "_cuts", twice)
        self.fails()

    def test_pages_of_another_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pages = paged_attention._pages
        monkeypatch.setattr(paged_attention, "_pages", lambda rows, page_size: pages(rows, page_size)[::-1].copy())
        self.fails()

    def test_a_partial_that_is_not_merged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        honest = work_list.work

        def forgetful(*arguments: object) -> Work:
            result = honest(*arguments)  # type: ignore[arg-type]
            return Work(result.items, result.entries - [0, 0, 1], result.pieces)

        monkeypatch.setattr(work_list, "work", forgetful)
        with pytest.raises(AssertionError):
            self.world().check()


# Plans, without kernels.

TILES = (Tile(16, 64, 4, 2), Tile(64, 64, 4, 2), Tile(128, 64, 8, 2))


def random_rows(chance: random.Random, page_size: int) -> list[Row]:
    shapes = [
        (
            chance.choice([1, 1, 1, 1, 1, chance.randint(2, 16), chance.randint(1, 128), chance.randint(1, 300)]),
            chance.choice([0, 1, context]),
        )
        for context in [chance.choice([50, 400, 3000]) * chance.randint(1, 3) for _ in range(chance.randint(1, 8))]
    ]
    return rows_of(shapes, page_size, chance, trees=0.3, sharing=chance.choice([0, 0.9]))


def cut(
    rows: list[Row], page_size: int, window: int, ratio: int, processors: int, kv_heads: int = 2
) -> tuple[Table, list[Segment], Work, int]:
    table = work_list.table(rows, page_size, (TILES[-1].rows - 1) // ratio)
    parts = work_list.segments(table, LayerKind(window, kv_heads, ratio, 64), TILES)
    limit = work_list.longest(parts, kv_heads, processors, TILES)
    return table, [Segment(*part) for part in parts.tolist()], work_list.work(table, parts, TILES, limit, False), limit


def items_of(found: Work) -> list[list[Item]]:
    return [[Item(*item) for item in kind.tolist()] for kind in found.items]


def test_every_key_is_read_once_and_no_item_is_too_long() -> None:
    chance = random.Random(10)
    shared = split = 0
    for _ in range(3000):
        page_size = chance.choice([1, 3, 16, 64, 128, 192, 256])
        rows = random_rows(chance, page_size)
        window, ratio = chance.choice([0, 0, 1, 100, 1000]), chance.choice([1, 2, 4, 7, 8])
        table, _, found, limit = cut(rows, page_size, window, ratio, chance.choice([1, 8, 132]))
        check_coverage(table, found, window)
        check_items(table, found, page_size, ratio, limit)
        shared += bool(table.runs)
        split += bool(len(found.pieces))
    assert shared > 120
    assert split > 300


def check_coverage(table: Table, found: Work, window: int) -> None:
    """Of every token: its items' keys are side by side, are in its own pages, and are all that it may see."""
    flat = [page for row in table.rows for page in row.pages[: work_list.width(row, table.page_size)]]
    ranges: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    partials: dict[int, list[int]] = defaultdict(list)
    for item in (item for kind in items_of(found) for item in kind):
        for i, token in enumerate(table.tokens[item.first : item.first + item.queries]):
            ranges[token].append((item.begin, item.end, item.pages))
            if item.partial >= 0:
                partials[token].append(item.partial + i)
    for row, start, offset in zip(table.rows, table.starts, table.offsets, strict=True):
        for i in range(row.queries):
            own = sorted(ranges[start + i])
            lowest = max(0, table.positions[start + i] - window + 1) if window else 0
            assert own[0][0] <= lowest
            for before, after in pairwise(own):  # beyond its window there may be nothing, but never anything twice
                assert before[1] == after[0] or before[1] < after[0] <= lowest
            assert row.context + i + 1 <= own[-1][1] <= row.context + row.queries
            for begin, end, pages in own:
                low, high = begin // table.page_size, -(-end // table.page_size)
                assert flat[pages + low : pages + high] == flat[offset + low : offset + high]
            assert len(partials[start + i]) == (len(own) if len(own) > 1 else 0)
    merged = {token: found.pieces[at : at + count].tolist() for token, at, count in found.entries.tolist()}
    assert {token: sorted(own) for token, own in partials.items() if own} == {token: sorted(own) for token, own in merged.items()}
    assert sorted(found.pieces) == list(range(len(found.pieces)))


def check_items(table: Table, found: Work, page_size: int, ratio: int, limit: int) -> None:
    for tile, kind in zip(TILES, items_of(found), strict=True):
        lengths = [item.end - item.begin for item in kind]
        assert lengths == sorted(lengths, reverse=True)
        for item in kind:
            assert 0 < item.end - item.begin <= limit
            assert 0 < item.queries * ratio <= tile.rows
            assert page_size % tile.keys or not item.begin % tile.keys  # a tile of keys never spans two such pages
            assert item.tree < 0 or item.tree <= table.tokens[item.first]


def test_shared_pages_are_read_once() -> None:
    chance = random.Random(11)
    together = 0
    for _ in range(300):
        page_size = chance.choice([1, 16, 64])
        shapes = [(chance.choice([1, 1, 4]), chance.randint(0, 2000)) for _ in range(8)]
        rows = rows_of(shapes, page_size, chance, sharing=0.8)
        table, parts, _, _ = cut(rows, page_size, 0, 4, 8)  # at most 8 * 4 queries, times 4 heads: one tile
        reads = Counter(
            rows[table.offsets.tolist().index(part.pages)].pages[page]
            for part in parts
            for page in range(part.begin // page_size, -(-part.end // page_size))
        )
        for page, times in reads.items():
            if times > 1:  # what several rows read after all is too little to be worth a merge
                owner = next(i for i, row in enumerate(rows) if page in row.pages[: row.context // page_size])
                depth = rows[owner].pages.index(page)
                runs = [run for run, _ in table.runs if owner in run.members and run.begin <= depth]
                begin = max((run.end if run.end <= depth else run.begin for run in runs), default=0)
                assert (depth - begin) * page_size < SHORTEST_RUN
        together += len(table.runs)
    assert together > 300


def test_nested_runs() -> None:
    """Beams under a prompt that others share as well; a short run does not hide a longer one behind it."""
    prompt, beams = list(range(1, 21)), list(range(100, 130))
    rows = [
        Row(1, 16 * len(pages), [*pages, 500 + i]) for i, pages in enumerate([prompt, prompt + beams, prompt + beams, [9, 8, 7]])
    ]
    table = work_list.table(rows, 16, 16)
    assert [run for run, _ in table.runs] == [([0, 1, 2], 0, 20), ([1, 2], 20, 50)]
    assert table.own.tolist() == [320, 800, 800, 0]
    assert table.tokens[4:].tolist() == [0, 1, 2, 1, 2]
    short = [Row(1, 16 * len(pages), [*pages, 500 + i]) for i, pages in enumerate([[1, 2], [1, *beams], [1, *beams]])]
    assert [run for run, _ in work_list.table(short, 16, 16).runs] == [([1, 2], 0, 31)]


def test_a_long_row_among_short_ones_is_cut_and_they_are_not() -> None:
    rows = rows_of([(1, 32768), *[(1, 512)] * 63, (200, 0)], 16, random.Random(12))
    _, _, found, limit = cut(rows, 16, 0, 4, 132, 8)
    assert limit <= 2048
    assert Counter(item.first for item in items_of(found)[0]) == {0: -(-32769 // limit), **dict.fromkeys(range(1, 64), 1)}
    assert {item.partial for item in items_of(found)[2]} == {-1}
    assert found.entries[:, 0].tolist() == [0]


LLAMA = LayerKind(0, 8, 4, 128)  # of Llama 3's layers with 8 B parameters
LLAMAS = tiles_of(LLAMA, torch.bfloat16)
H200 = 132  # processors


def parts_of(shapes: list[tuple[int, int]]) -> tuple[Table, Any]:
    """Their table and segments in such layers, of rows that have nothing in common."""
    table = work_list.table(rows_of(shapes, 16, random.Random(13)), 16, 31)
    return table, work_list.segments(table, LLAMA, LLAMAS)


def cut_on_an_h200(shapes: list[tuple[int, int]]) -> Work:
    table, parts = parts_of(shapes)
    return work_list.work(table, parts, LLAMAS, work_list.longest(parts, LLAMA.kv_heads, H200, LLAMAS), False)


def test_equal_rows_that_fill_the_device_are_not_cut() -> None:
    found = cut_on_an_h200([(1, 4096)] * 64)
    assert len(found.items[0]) == 64
    assert not len(found.pieces)


@pytest.mark.parametrize(("capability", "generation"), [((8, 0), 8), ((8, 9), 8), ((9, 0), 9), ((10, 3), 9), ((12, 0), 8)])
def test_tiles_are_small_where_shared_memory_is(
    capability: tuple[int, int], generation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workstation's Blackwell has less than half of Hopper's: its tiles would not even be launched."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert paged_attention.device_class(torch.device("cuda", 0)) == generation


def test_kernels_begin_early_on_no_gpu_for_which_they_are_not_compiled_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each tile: what begins early has code of its own."""
    for name in compilation.NVIDIA:
        capability = divmod(int(name.removeprefix("sm_")), 10)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, own=capability: own)
        dependent_launch._able.cache_clear()
        device = torch.device("cuda", 0)
        begins, generation = dependent_launch.on(device), paged_attention.device_class(device)
        assert (name in compilation.EARLY_TARGETS) == begins, name
        tiles = {
            (one.constants["ROWS"], one.constants["KEYS"], one.stages)
            for one in paged_attention.compilations()
            if one.early and name in one.targets and one.kernel is paged_attention.attend
        }
        kind = LayerKind(0, 8, 4, 128)
        wanted = {(tile.rows, tile.keys, tile.stages) for tile in paged_attention.tiles_of(kind, torch.bfloat16, generation)}
        assert tiles == (wanted if begins else set()), name
    dependent_launch._able.cache_clear()


def test_compilations_have_their_own_names_and_all_constants() -> None:
    found = paged_attention.compilations()
    assert len({one.name for one in found}) == len(found)
    for one in found:
        assert [*one.signature, *one.constants] == list(one.kernel.arg_names)


@pytest.mark.parametrize(
    ("shapes", "programs"),
    [
        ([(1, 4095)] * 8, 256),  # four items of each row and key head: two places for each of 132 processors
        ([(5, 4095)] * 8, 256),  # 4,100 keys are no reason for a fifth, which would begin when all others end
        ([(1, 4095)], 128),  # little for so many: one for each processor
        ([(512, 7680)], 128),  # of the largest tile one is on a processor
        ([(8192, 0)], 2048),  # there are enough
    ],
)
def test_items_have_places_at_once(shapes: list[tuple[int, int]], programs: int) -> None:
    assert LLAMA.kv_heads * sum(map(len, cut_on_an_h200(shapes).items)) == programs


def test_tiles_of_single_queries() -> None:
    """On Hopper few rows have the smallest, more that of 64 rows, and so many that all of a processor's three go on until the end
    the smallest beside it. Rows that share a prefix always have one that holds some of them."""

    def rows(tokens: int, kv_heads: int = 8, ratio: int = 4, generation: int = 9, eight_bits: bool = False) -> list[int]:
        kind = LayerKind(0, kv_heads, ratio, 128)
        return [tile.rows for tile in paged_attention.decode_tiles(kind, torch.bfloat16, generation, tokens, H200, eight_bits)]

    assert rows(1) == rows(4) == [16]
    assert rows(5) == rows(64) == rows(197) == [64]
    assert rows(198) == rows(256) == [16, 64]
    assert rows(64, eight_bits=True) == [16, 64]
    assert rows(64, generation=8) == [16, 64, 128]
    assert rows(64, kv_heads=1, ratio=16) == [64]
    assert rows(64, kv_heads=1, ratio=16, eight_bits=True) == [16, 64]
    assert rows(64, kv_heads=1, ratio=64)[-1] == 128
    assert len(paged_attention.decode_tiles(LLAMA, torch.float32, 9, 64, H200)) == 3


def test_graphs_of_checks_are_cut_as_steps_are() -> None:
    """Few tiles of a graph don't make the last of them one that fills a processor."""
    _, parts = parts_of([(12, 29988)])
    assert work_list.longest(parts, LLAMA.kv_heads, H200, LLAMAS) == work_list.longest(parts, LLAMA.kv_heads, H200, LLAMAS[:2])


@pytest.mark.parametrize(("lengths", "stretched"), [([4100] * 8, True), ([9000, *[520] * 30], False)])
def test_items_become_longer_only_where_that_ends_sooner(lengths: list[int], stretched: bool) -> None:
    """A few that are short may come behind others that are short."""
    _, parts = parts_of([(5, length - 5) for length in lengths])
    share = -(-sum(lengths) * LLAMA.kv_heads // (2 * H200))
    assert (work_list.longest(parts, LLAMA.kv_heads, H200, LLAMAS) > -(-share // 128) * 128) is stretched


def test_what_is_merged_one_at_a_time_is_merged_alike_in_all_steps() -> None:
    """With several heads at once other multiplications are contracted, and a token's bits would depend on its neighbours."""
    for heads, size in itertools.product((8, 32), (64, 80, 128, 256)):
        found = [paged_attention._merge_constants(heads, size, False, 1, entries) for entries in (1, 63, 64, 500)]
        assert all(one == found[0] for one in found)


@pytest.mark.parametrize("heads", [3, 6])
def test_heads_that_are_merged_together_need_not_be_divisible(heads: int) -> None:
    """Of 70 tokens four heads at once."""
    rows = rows_of([(1, 300)] * 70, 16, random.Random(heads), sharing=1.0)
    world = World(rows, 16, kv_heads=heads, ratio=1)
    torch.testing.assert_close(world.found(world.plan()).double().cpu(), world.expected(), rtol=1e-5, atol=1e-5)
