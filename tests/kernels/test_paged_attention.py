"""Triton's paged attention compared with a softmax in float64, for all mixtures of rows; and its plans: every key is read exactly
once.

Without a GPU the kernels run in Triton's interpreter, which is slow, so batches are tiny. Cache slots that no row uses, and outputs
before they are written, are NaN.
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

from .test_attention import shapes_within_chunks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
pytestmark = pytest.mark.usefixtures("poisoned_float_outputs")


def random_paged_rows(
    shapes: Sequence[tuple[int, int]],
    page_size: int,
    rng: random.Random,
    trees: float = 0.0,
    sharing: float = 0.0,
    whole: float = 0.0,
) -> list[Row]:
    """Rows of (queries, context). whole: the share of rows with bidirectional attention; sharing: probability that a row shares its
    first pages with an earlier one, as far as their contexts allow."""
    widths = [work_list.width(Row(queries, context, ()), page_size) + rng.randint(0, 1) for queries, context in shapes]
    free = list(range(1, sum(widths) + 1))
    rng.shuffle(free)
    rows: list[Row] = []
    for (queries, context), width in zip(shapes, widths, strict=True):
        shared: list[int] = []
        if rows and rng.random() < sharing:
            other = rng.choice(rows)
            max_shared = min(context, other.context) // page_size
            shared = list(other.pages[: rng.choice([max_shared, rng.randint(0, max_shared)])])
        pages = [*shared, *(free.pop() for _ in range(width - len(shared)))]
        tree = queries <= NODES and rng.random() < trees
        parents = [rng.randint(-1, i - 1) for i in range(queries)] if tree else None
        rows.append(Row(queries, context, pages, parents, whole=not tree and whole > 0 and rng.random() < whole))
    return rows


def slots_of_row(row: Row, page_size: int) -> list[int]:
    return [row.pages[i // page_size] * page_size + i % page_size for i in range(row.context + row.queries)]


def random_cache(rows: Sequence[Row], page_size: int, shape: Sequence[int], unused: float = torch.nan) -> Tensor:
    """[slots, *shape]: random numbers in the slots of rows, `unused` in all others."""
    used = sorted({slot for row in rows for slot in slots_of_row(row, page_size)})
    cache = torch.full(((max(page for row in rows for page in row.pages) + 1) * page_size, *shape), unused)
    cache[used] = torch.randn(len(used), *shape)
    return cache


def unused_slot_value(route: str) -> float:
    """What slots of no row hold: NaN where Triton reads. The reference masks what it has read, so there it must be finite."""
    return torch.nan if route == "triton" else 100.0


def token_ranges(rows: Iterable[Row]) -> Iterator[tuple[Row, slice]]:
    """Each row, with the slice of its tokens in a step."""
    start = 0
    for row in rows:
        yield row, slice(start, start + row.queries)
        start += row.queries


def visibility_mask(row: Row) -> Tensor:
    """[queries, keys]: which keys each query sees, apart from windows."""
    ancestors, _ = plain.ancestry(row.parents if row.parents is not None else range(-1, row.queries - 1))
    return torch.cat((torch.ones(row.queries, row.context, dtype=torch.bool), torch.tensor(ancestors)), 1)


def exact_attention(
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
    visible = visibility_mask(row)
    depths = visible[:, row.context :].sum(1) - 1
    positions = torch.cat((torch.arange(row.context), row.context + depths))
    visible |= row.whole and joined
    query_positions = positions[row.context :, None]
    if window:
        visible &= positions >= query_positions // window * window if chunked else query_positions - positions < window
    cached_per_query_head = cached.repeat_interleave(query.shape[1] // cached.shape[2], 2)
    keys, values = cached_per_query_head[:, 0], cached_per_query_head[:, -1, :, : latent or None]
    logits = torch.einsum("qhs,khs->hqk", query, keys) * scale
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks[:, None, None].expand(-1, row.queries, 1)), 2)
    return torch.einsum("hqk,khs->qhs", logits.softmax(-1)[:, :, : len(cached)], values)


class AttentionCase:
    """Rows over a cache of random numbers; slots of no row are NaN."""

    def __init__(
        self,
        rows: list[Row],
        page_size: int,
        *,
        kv_heads: int = 1,
        ratio: int = 2,
        size: int = 64,
        dtype: torch.dtype = torch.float32,
        fp8: bool = False,
        sinks: bool = False,
        latent: int = 0,
        seed: int = 0,
        joined: Sequence[int] = (),
        chunked: bool = False,
    ) -> None:
        """chunked: windows are chunks instead of sliding."""
        self.joined, self.chunked = joined, chunked
        torch.manual_seed(seed)
        self.rows, self.page_size, self.kv_heads, self.ratio, self.size, self.dtype = rows, page_size, kv_heads, ratio, size, dtype
        self.latent = latent
        cache = random_cache(rows, page_size, (1, 1, size) if latent else (2, kv_heads, size))
        self.cache = cache.to(torch.float8_e4m3fn if fp8 else dtype).to(DEVICE)
        self.scales = torch.rand(2, kv_heads, device=DEVICE) + 0.5 if fp8 and not latent else None
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

    def attend(self, step: paged_attention.Plan, window: int = 0, softcap: float = 0.0) -> Tensor:
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
                exact_attention(
                    part,
                    cache[slots_of_row(row, self.page_size)],
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
        found = self.attend(step, window, softcap)
        assert found.dtype == self.dtype
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(found.double().cpu(), self.expected(window, softcap), rtol=tolerance, atol=tolerance)
        return step


MIXED = [(1, 0), (1, 1), (1, 600), (1, 129), (2, 0), (5, 70), (16, 33), (40, 20)]


@pytest.mark.parametrize("window", [0, 1, 40, 200])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
def test_mixed_rows_match_exact_attention(page_size: int, window: int) -> None:
    rng = random.Random(page_size + window)
    AttentionCase(random_paged_rows(MIXED, page_size, rng, trees=0.5, sharing=0.3), page_size).check(window)


@pytest.mark.parametrize("ratio", [1, 2, 4, 7, 8])
@pytest.mark.parametrize("size", [8, 64, 80, 96, 128, 256])
def test_head_sizes_and_query_heads_per_key_head_match_exact_attention(size: int, ratio: int) -> None:
    rows = random_paged_rows([(1, 150), (3, 20), (9, 0)], 4, random.Random(size), trees=0.5)
    AttentionCase(rows, 4, kv_heads=2 if ratio < 4 else 1, ratio=ratio, size=size).check(window=31 if ratio == 2 else 0)


@pytest.mark.parametrize(("latent", "heads", "heads_per_program"), [(32, 4, 4), (96, 6, 2), (512, 16, 16)])
def test_mla_latents_match_exact_attention(latent: int, heads: int, heads_per_program: int) -> None:
    """Latents are keys and values in one, but for the last features of the keys (the rotary ones); separate programs compute parts
    of the heads."""
    rows = random_paged_rows([(1, 300), (1, 33), (5, 70), (20, 10)], 16, random.Random(heads), trees=0.4, sharing=0.5)
    rotary = 64 if latent == 512 else 24
    AttentionCase(
        rows, 16, kv_heads=heads // heads_per_program, ratio=heads_per_program, size=latent + rotary, latent=latent
    ).check()


def test_16_bit_and_fp8_mla_latents_match_exact_attention() -> None:
    rows = random_paged_rows([(1, 100), (3, 40)], 64, random.Random(2))
    AttentionCase(rows, 64, kv_heads=2, ratio=4, size=80, latent=64, dtype=torch.bfloat16).check()
    AttentionCase(rows, 64, kv_heads=2, ratio=4, size=80, latent=64, dtype=torch.float16, fp8=True).check()


@pytest.mark.parametrize("shape", [(1, 300), (128, 0), (300, 10), (100, 250)])
def test_single_row_of_several_items_or_tiles_matches_exact_attention(shape: tuple[int, int]) -> None:
    """Contexts that are cut into items, and prompt chunks of several tiles."""
    AttentionCase(random_paged_rows([shape], 64, random.Random(1)), 64, ratio=1).check()


def test_keys_before_all_windows_are_not_read() -> None:
    window = 40
    case = AttentionCase(random_paged_rows([(1, 203), (5, 150), (20, 130)], 16, random.Random(0), trees=0.5), 16)
    expected = case.expected(window)
    for row in case.rows:
        case.cache[slots_of_row(row, 16)[: row.context - window + 1]] = torch.nan
    torch.testing.assert_close(case.attend(case.plan(window), window).double().cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("page_size", "fixed", "chunk"), [(1, 0, 16), (1, 0, 64), (16, 0, 16), (16, 128, 64), (16, 0, 256), (64, 0, 64), (256, 0, 256)]
)
def test_chunked_attention_matches_exact_attention(page_size: int, fixed: int, chunk: int) -> None:
    """Rows that share pages, in the same attention chunk and in different ones, and a draft tree. Keys before the chunks are not
    read."""
    rng = random.Random(page_size + chunk)
    shapes = [(1, 600), (1, 3 * chunk - 1), (1, 3 * chunk - 2), (1, 600), *shapes_within_chunks(rng, chunk, 6, 600)]
    rows = random_paged_rows(shapes, page_size, rng, sharing=0.8)
    if not fixed:  # some rows read the keys of their chunk together
        parts = work_list.segments(work_list.table(rows, page_size, 60), LayerKind(chunk, 2, 2, 64, chunked=True), TILES)
        assert chunk == page_size or chunk < 256 or parts[:, work_list.SHARED].any()
    rows.append(replace(random_paged_rows([(9, chunk + 3)], page_size, rng)[0], parents=[-1, 0, 1, 0, 2, 2, 1, 0, 5]))
    rows[-1] = replace(rows[-1], pages=[page + max(max(row.pages) for row in rows[:-1]) for page in rows[-1].pages])
    case = AttentionCase(rows, page_size, chunked=True)
    case.check(chunk, fixed=fixed)
    case.check(0, fixed=fixed)
    expected = case.expected(chunk)
    visible_slots = {slot for row in rows for slot in slots_of_row(row, page_size)[row.context // chunk * chunk :]}
    case.cache[[slot for slot in range(len(case.cache)) if slot not in visible_slots]] = torch.nan
    found = case.attend(case.plan(chunk, fixed=fixed), chunk)
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("nodes", [2, 33, 64, 65, 128])
@pytest.mark.parametrize("window", [0, 3])
def test_draft_trees_match_exact_attention(nodes: int, window: int) -> None:
    AttentionCase(random_paged_rows([(nodes, 45)], 16, random.Random(nodes), trees=1), 16, ratio=1).check(window)


def test_trees_of_more_than_128_nodes_are_refused() -> None:
    row = Row(129, 0, range(1, 10), list(range(-1, 128)))
    with pytest.raises(ValueError, match="at most 128 nodes, not 129"):
        plan([row], 16, [LayerKind(0, 1, 1, 64)], DEVICE, dtype=torch.float32)


@pytest.mark.parametrize(("page_size", "window", "joined"), [(16, 0, [0]), (3, 40, [40]), (16, 40, [0]), (64, 200, [0, 200])])
def test_rows_with_bidirectional_attention_match_exact_attention(page_size: int, window: int, joined: list[int]) -> None:
    """In layers of some windows only, beside trees and chains, cut into tiles and items."""
    rng = random.Random(page_size + window)
    shapes = [(1, 40), (5, 70), (16, 33), (40, 20), (150, 60)]
    rows = random_paged_rows(shapes, page_size, rng, trees=0.2, sharing=0.5, whole=0.7)
    rows[-1] = replace(rows[-1], whole=True)
    AttentionCase(rows, page_size, joined=joined).check(window)
    AttentionCase(rows, page_size, ratio=4, joined=joined, sinks=True).check(window, softcap=3.0, fixed=128)


@pytest.mark.parametrize("window", [0, 60])
def test_logit_softcap_matches_exact_attention(window: int) -> None:
    case = AttentionCase(random_paged_rows([(1, 200), (20, 30)], 16, random.Random(2)), 16)
    case.query.mul_(8)  # so that logits reach the cap
    case.check(window, softcap=3.0)


@pytest.mark.parametrize("window", [0, 60])
def test_attention_sinks_count_once_in_cut_rows_and_shared_prefixes(window: int) -> None:
    rows = random_paged_rows([(1, 500), (1, 490), (1, 0), (20, 30), (9, 40)], 16, random.Random(12), sharing=0.8, trees=0.5)
    step = AttentionCase(rows, 16, kv_heads=2, ratio=3, sinks=True).check(window)
    assert window or len(step.launches[window].entries)
    AttentionCase(rows, 16, ratio=4, dtype=torch.float16, sinks=True, fp8=True).check(window)


def test_extreme_attention_sinks_take_all_weight_or_none() -> None:
    case = AttentionCase(random_paged_rows([(1, 300), (3, 20)], 16, random.Random(13)), 16, sinks=True)
    step = case.plan()
    assert case.sinks is not None
    case.sinks.fill_(1e4)
    assert case.attend(step).abs().max() < 1e-20
    case.sinks.fill_(-1e4)
    found, case.sinks = case.attend(step), None
    torch.testing.assert_close(found, case.attend(step))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_dtypes_match_exact_attention(dtype: torch.dtype) -> None:
    rows = random_paged_rows([(1, 300), (1, 5), (7, 90), (70, 40)], 16, random.Random(3), trees=0.4)
    AttentionCase(rows, 16, ratio=4, size=64, dtype=dtype).check()


def test_fp8_cache_with_scales_matches_exact_attention() -> None:
    rows = random_paged_rows([(1, 300), (7, 90)], 64, random.Random(4))
    AttentionCase(rows, 64, kv_heads=2, size=64, dtype=torch.float16, fp8=True).check()


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("page_size", [16, 128])
def test_rows_with_shared_prefixes_match_exact_attention(page_size: int, window: int) -> None:
    rng = random.Random(page_size)
    rows = random_paged_rows([(1, 300), *[(1, 290 + i) for i in range(5)], (4, 310), (1, 40)], page_size, rng, sharing=0.9)
    step = AttentionCase(rows, page_size).check(window)
    assert len(step.listed) > len(step.positions)


@pytest.mark.parametrize("seed", range(6))
def test_random_batches_match_exact_attention(seed: int) -> None:
    rng = random.Random(seed)
    shapes = [
        (rng.choice([1, 1, 1, 2, rng.randint(2, 16), rng.randint(1, 70)]), rng.choice([0, rng.randint(0, 300)])) for _ in range(5)
    ]
    page_size = rng.choice([1, 4, 16, 64, 256])
    rows = random_paged_rows(shapes, page_size, rng, trees=0.4, sharing=0.5)
    case = AttentionCase(rows, page_size, ratio=rng.choice([1, 2, 4, 7]), size=rng.choice([64, 80]), seed=seed)
    case.check(rng.choice([0, 0, 17, 150]), processors=rng.choice([1, 4, 100]))


def test_triton_matches_the_cpu_reference() -> None:
    rows = random_paged_rows([(1, 30), (1, 31), (1, 250), (6, 40), (70, 9)], 16, random.Random(5))
    rows = [rows[i] for i in plain.order(rows)]
    case = AttentionCase(rows, 16)
    case.cache.nan_to_num_()  # the reference needs finite values where it masks
    kinds = tuple(LayerKind(window, 2, 2, case.size) for window in (0, 40))
    blocks = plain.blocks(rows, AttentionLayout(16, kinds, torch.float32, torch.device("cpu")))
    for window in (0, 40):
        expected = plain.attention(case.query.cpu(), case.cache.cpu(), blocks, AttentionOptions(window, case.size**-0.5))
        torch.testing.assert_close(case.attend(case.plan(window), window).cpu(), expected, rtol=1e-5, atol=1e-5)


def test_fixed_item_lengths_make_a_rows_result_bit_identical_in_any_batch() -> None:
    rng = random.Random(6)
    rows = random_paged_rows([(1, 500), (1, 20), (5, 300), (1, 400)], 16, rng, sharing=1.0)
    together = AttentionCase(rows, 16)
    whole = together.attend(together.plan(fixed=128))
    torch.testing.assert_close(whole.double().cpu(), together.expected(), rtol=1e-5, atol=1e-5)
    alone = AttentionCase(rows[:1], 16)
    alone.query, alone.cache = together.query[:1], together.cache
    assert alone.attend(alone.plan(fixed=128, processors=50)).equal(whole[:1])


def test_plan_with_reserved_capacity_is_overwritten_by_another_in_place() -> None:
    """As captured graphs need it: same grids, same addresses, other contents."""
    tiles = tiles_of(LayerKind(0, 2, 4, 64), torch.float32)[:2]
    room = Capacity(tokens=20, listed=40, pages=80, tiles={0: tiles}, items={0: (8, 4)}, entries=20, pieces=60, trees=True)
    first = AttentionCase(random_paged_rows([(1, 300), (3, 20)], 16, random.Random(7)), 16)
    other = AttentionCase(
        random_paged_rows([(1, 10), (12, 280), (1, 128), (1, 500)], 16, random.Random(8), trees=0.5, sharing=0.5), 16
    )
    step = first.check(capacity=room)
    buffer = step.buffer.data_ptr()
    assert other.plan(capacity=room, into=step) is step
    assert step.buffer.data_ptr() == buffer
    torch.testing.assert_close(other.attend(step).double().cpu(), other.expected(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="can't take the place"):
        other.plan(into=step)
    with pytest.raises(ValueError, match="room for 20"):
        AttentionCase(random_paged_rows([(21, 0)], 16, random.Random(7)), 16).plan(capacity=room)


def test_one_plan_serves_layers_of_several_kinds() -> None:
    """Each kind has tiles, items and partials of its own, also after another plan's contents have replaced them."""
    kinds = [LayerKind(0, 1, 8, 32), LayerKind(31, 4, 2, 16), LayerKind(64, 2, 1, 300)]
    shapes = [(1, 300), (3, 20), (9, 280), (1, 128)]
    layout = AttentionLayout(16, tuple(kinds), torch.float32, DEVICE)
    room = ragged.capacity(layout, 14, 4, 400, 400, mixed=True, trees=True)
    assert set(room.items) == {0, 31, 64}
    plans = []
    for seed in range(2):
        rows = random_paged_rows(shapes, 16, random.Random(seed), trees=0.5, sharing=0.5)
        into = plans[0] if seed else None
        plans.append(plan(rows, 16, kinds, DEVICE, dtype=torch.float32, processors=3, capacity=room, into=into))
        for kind in kinds:
            case = AttentionCase(rows, 16, kv_heads=kind.kv_heads, ratio=kind.ratio, size=kind.size)
            found = case.attend(plans[0], kind.window)
            torch.testing.assert_close(found.double().cpu(), case.expected(kind.window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "mixed", "invariant", "launched"),
    [
        (1, False, False, [16]),
        (4, False, False, [16]),
        (16, False, False, [64]),
        (40, False, False, [64]),
        (64, False, False, [64]),
        (4, True, False, [16]),
        (16, True, False, [16, 64]),
        (64, True, False, [16, 64, 128]),
        (64, False, True, [64]),
        (64, True, True, [64]),
    ],
)
def test_graphs_launch_only_tile_shapes_that_their_steps_use(
    tokens: int, mixed: bool, invariant: bool, launched: list[int]
) -> None:
    """Even where all rows share a prefix: then they are one segment."""
    kinds = (LayerKind(0, 2, 4, 64),)
    layout = AttentionLayout(16, kinds, torch.bfloat16, DEVICE, invariant=invariant)
    room = ragged.capacity(layout, tokens, tokens, 1000, 64 * tokens, mixed)
    assert [tile.rows for tile in room.tiles[0]] == launched
    assert min(room.items[0]) > 0
    fixed = ragged.FIXED if invariant else 0
    for seed, sharing in itertools.product(range(6), (0.0, 0.5, 1.0)):
        rng = random.Random(seed)
        single = rng.randint(1, tokens) if mixed else tokens
        shapes = [(1, rng.randint(0, 900)) for _ in range(single)] + [(tokens - single, 0)] * (single < tokens)
        rows = random_paged_rows(shapes, 16, rng, sharing=sharing)
        plan(rows, 16, kinds, DEVICE, dtype=torch.bfloat16, fixed=fixed, capacity=room)  # raises if the capacity is too small


class TestCheckDetectsPlantedFaults:
    """Each fault is small, and makes the check fail that passes without it."""

    def make_case(self) -> AttentionCase:
        return AttentionCase(random_paged_rows([(1, 290), (6, 20)], 16, random.Random(9), trees=1.0), 16)

    def assert_check_fails(self) -> None:
        with pytest.raises(AssertionError):
            self.make_case().check(40)
        with pytest.raises(AssertionError):
            self.make_case().check()

    def test_check_passes_without_a_fault(self) -> None:
        self.make_case().check(40)

    def test_tree_mask_that_shows_all_earlier_nodes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(work_list, "masks", lambda row: [(2 * (1 << i) - 1, 0) for i in range(row.queries)])
        self.assert_check_fails()

    def test_last_key_of_an_item_that_is_not_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuts = work_list._cuts

        def short(*arguments: Any) -> Any:
            which, begins, ends = cuts(*arguments)
            return which, begins, ends - 1

        monkeypatch.setattr(work_list, "_cuts", short)
        self.assert_check_fails()

    def test_key_that_is_read_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuts = work_list._cuts

        def twice(*arguments: Any) -> Any:
            which, begins, ends = cuts(*arguments)
            return numpy.append(which, which[-1]), numpy.append(begins, ends[-1] - 1), numpy.append(ends, ends[-1])

        monkeypatch.setattr(work_list, "_cuts", twice)
        self.assert_check_fails()

    def test_page_table_of_another_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pages = paged_attention._pages
        monkeypatch.setattr(paged_attention, "_pages", lambda table: pages(table)[::-1].copy())
        self.assert_check_fails()

    def test_partial_result_that_is_not_merged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = work_list.work

        def work_without_a_partial(*arguments: object) -> Work:
            result = original(*arguments)  # type: ignore[arg-type]
            return Work(result.items, result.entries - [0, 0, 1], result.pieces)

        monkeypatch.setattr(work_list, "work", work_without_a_partial)
        with pytest.raises(AssertionError):
            self.make_case().check()


# Plans, without launching kernels.

TILES = (Tile(16, 64, 4, 2), Tile(64, 64, 4, 2), Tile(128, 64, 8, 2))


def random_rows(rng: random.Random, page_size: int) -> list[Row]:
    shapes = [
        (
            rng.choice([1, 1, 1, 1, 1, rng.randint(2, 16), rng.randint(1, 128), rng.randint(1, 300)]),
            rng.choice([0, 1, context]),
        )
        for context in [rng.choice([50, 400, 3000]) * rng.randint(1, 3) for _ in range(rng.randint(1, 8))]
    ]
    return random_paged_rows(shapes, page_size, rng, trees=0.3, sharing=rng.choice([0, 0.9]))


def cut_into_items(
    rows: list[Row], page_size: int, window: int, ratio: int, processors: int, kv_heads: int = 2
) -> tuple[Table, list[Segment], Work, int]:
    table = work_list.table(rows, page_size, (TILES[-1].rows - 1) // ratio)
    parts = work_list.segments(table, LayerKind(window, kv_heads, ratio, 64), TILES)
    limit = work_list.longest(parts, kv_heads, processors, TILES)
    return table, [Segment(*part) for part in parts.tolist()], work_list.work(table, parts, TILES, limit, False), limit


def items_of(found: Work) -> list[list[Item]]:
    return [[Item(*item) for item in kind.tolist()] for kind in found.items]


def test_random_plans_read_every_key_once_and_keep_items_within_the_limit() -> None:
    rng = random.Random(10)
    plans_with_runs = plans_with_partials = 0
    for _ in range(3000):
        page_size = rng.choice([1, 3, 16, 64, 128, 192, 256])
        rows = random_rows(rng, page_size)
        window, ratio = rng.choice([0, 0, 1, 100, 1000]), rng.choice([1, 2, 4, 7, 8])
        table, _, work, limit = cut_into_items(rows, page_size, window, ratio, rng.choice([1, 8, 132]))
        check_coverage(table, work, window)
        check_items(table, work, page_size, ratio, limit)
        plans_with_runs += bool(table.runs)
        plans_with_partials += bool(len(work.pieces))
    assert plans_with_runs > 120
    assert plans_with_partials > 300


def check_coverage(table: Table, work: Work, window: int) -> None:
    """For each token, the key ranges of its items are contiguous, lie in its row's own pages, and cover all keys that it may
    see."""
    all_pages = [page for row in table.rows for page in row.pages[: work_list.width(row, table.page_size)]]
    ranges: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    partials: dict[int, list[int]] = defaultdict(list)
    for item in (item for kind in items_of(work) for item in kind):
        for i, token in enumerate(table.tokens[item.first : item.first + item.queries]):
            ranges[token].append((item.begin, item.end, item.pages))
            if item.partial >= 0:
                partials[token].append(item.partial + i)
    for row, start, offset in zip(table.rows, table.starts, table.offsets, strict=True):
        for i in range(row.queries):
            own = sorted(ranges[start + i])
            lowest = max(0, table.positions[start + i] - window + 1) if window else 0
            assert own[0][0] <= lowest
            for before, after in pairwise(own):  # before its window there may be gaps, but no key is read twice
                assert before[1] == after[0] or before[1] < after[0] <= lowest
            assert row.context + i + 1 <= own[-1][1] <= row.context + row.queries
            for begin, end, pages in own:
                low, high = begin // table.page_size, -(-end // table.page_size)
                assert all_pages[pages + low : pages + high] == all_pages[offset + low : offset + high]
            assert len(partials[start + i]) == (len(own) if len(own) > 1 else 0)
    merged = {token: work.pieces[at : at + count].tolist() for token, at, count in work.entries.tolist()}
    assert {token: sorted(own) for token, own in partials.items() if own} == {token: sorted(own) for token, own in merged.items()}
    assert sorted(work.pieces) == list(range(len(work.pieces)))


def check_items(table: Table, work: Work, page_size: int, ratio: int, limit: int) -> None:
    for tile, kind in zip(TILES, items_of(work), strict=True):
        lengths = [item.end - item.begin for item in kind]
        assert lengths == sorted(lengths, reverse=True)
        for item in kind:
            assert 0 < item.end - item.begin <= limit
            assert 0 < item.queries * ratio <= tile.rows
            assert page_size % tile.keys or not item.begin % tile.keys  # no tile of keys spans two such pages
            assert item.tree < 0 or item.tree <= table.tokens[item.first]


def test_shared_pages_are_read_once_unless_too_short_for_a_merge() -> None:
    rng = random.Random(11)
    run_count = 0
    for _ in range(300):
        page_size = rng.choice([1, 16, 64])
        shapes = [(rng.choice([1, 1, 4]), rng.randint(0, 2000)) for _ in range(8)]
        rows = random_paged_rows(shapes, page_size, rng, sharing=0.8)
        table, parts, _, _ = cut_into_items(rows, page_size, 0, 4, 8)  # at most 8 * 4 queries, times 4 heads: one tile
        reads = Counter(
            rows[table.offsets.tolist().index(part.pages)].pages[page]
            for part in parts
            for page in range(part.begin // page_size, -(-part.end // page_size))
        )
        for page, count in reads.items():
            if count > 1:  # rows read pages separately that are too few to be worth a merge
                owner = next(i for i, row in enumerate(rows) if page in row.pages[: row.context // page_size])
                depth = rows[owner].pages.index(page)
                runs = [run for run, _ in table.runs if owner in run.members and run.begin <= depth]
                begin = max((run.end if run.end <= depth else run.begin for run in runs), default=0)
                assert (depth - begin) * page_size < SHORTEST_RUN
        run_count += len(table.runs)
    assert run_count > 300


def test_rows_of_one_token_are_planned_as_any_others() -> None:
    """They skip what is needed for several tokens per row: the result is the same, number for number."""
    rng = random.Random(21)
    for _ in range(200):
        page_size, window = rng.choice([1, 16, 64]), rng.choice([0, 128, 1000])
        shapes = [(1, rng.choice([rng.randint(0, 40), rng.randint(0, 3000)])) for _ in range(rng.randint(1, 30))]
        rows = random_paged_rows(shapes, page_size, rng, sharing=rng.choice([0.0, 0.7]))
        kind = LayerKind(window, 2, rng.choice([1, 8]), 64, chunked=window > 0 and rng.random() < 0.3)
        table = work_list.table(rows, page_size, 60 // kind.ratio)
        assert table.single
        assert table.starts.tolist() == list(range(len(rows)))
        assert table.positions.tolist() == [row.context for row in rows]
        members = [i for run, _ in table.runs for i in run.members]
        assert table.tokens.tolist() == [*range(len(rows)), *members]
        parts = work_list.segments(table, kind, TILES)
        assert parts.tolist() == work_list.segments(replace(table, single=False), kind, TILES).tolist()


def test_work_that_needs_no_cuts_is_the_same_without_looking_for_them() -> None:
    rng = random.Random(23)
    for _ in range(50):
        shapes = [(rng.choice([1, 1, 5, 40]), rng.randint(0, 3000)) for _ in range(rng.randint(1, 20))]
        table = work_list.table(random_paged_rows(shapes, 16, rng, trees=0.3), 16, 0)
        parts = work_list.segments(table, LayerKind(0, 2, 4, 64), TILES)
        limit = int((parts[:, work_list.END] - parts[:, work_list.BEGIN]).max())
        whole = work_list.work(table, parts, TILES, limit, False)
        searched = work_list.work(table, parts, TILES, -(-limit // 128) * 128, True)  # cut at multiples of more than any row's keys
        assert [items.tolist() for items in whole.items] == [items.tolist() for items in searched.items]
        assert whole.entries.shape == searched.entries.shape == (0, 3)
        assert whole.pieces.shape == searched.pieces.shape == (0,)
        assert len(work_list.work(table, parts, TILES, limit - 1, False).pieces)  # one key less, and a segment is cut


def test_a_reused_plan_equals_a_new_one() -> None:
    """Whatever it held before: only what is behind its page tables stays, which no item refers to."""
    rng = random.Random(22)
    kinds = [LayerKind(0, 2, 4, 64), LayerKind(40, 2, 4, 64)]
    layout = AttentionLayout(16, tuple(kinds), torch.float32, DEVICE)
    room = ragged.capacity(layout, 24, 8, 800, 400, mixed=True, trees=True)
    held = plan([], 16, kinds, DEVICE, dtype=torch.float32, processors=3, capacity=room)
    for _ in range(60):
        shapes = [(rng.choice([1, 1, 3]), rng.choice([rng.randint(0, 30), rng.randint(0, 700)])) for _ in range(rng.randint(1, 8))]
        rows = random_paged_rows(shapes, 16, rng, trees=rng.choice([0.0, 0.5]), sharing=0.5)
        options = {"dtype": torch.float32, "processors": 3, "capacity": room}
        fresh = plan(rows, 16, kinds, DEVICE, **options)  # type: ignore[arg-type]
        assert plan(rows, 16, kinds, DEVICE, **options, into=held) is held  # type: ignore[arg-type]
        used = sum(work_list.width(row, 16) for row in rows)
        end = len(held.buffer) - len(held.pages) + used
        assert held.pages[:used].tolist() == [page for row in rows for page in row.pages[: work_list.width(row, 16)]]
        assert held.buffer[:end].equal(fresh.buffer[:end])


def test_nested_shared_prefixes_form_nested_runs() -> None:
    """Beams under a prompt that other rows share as well; a short run does not hide a longer one after it."""
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


def test_long_row_is_cut_into_items_and_short_rows_beside_it_are_not() -> None:
    rows = random_paged_rows([(1, 32768), *[(1, 512)] * 63, (200, 0)], 16, random.Random(12))
    _, _, work, limit = cut_into_items(rows, 16, 0, 4, 132, 8)
    assert limit <= 2048
    assert Counter(item.first for item in items_of(work)[0]) == {0: -(-32769 // limit), **dict.fromkeys(range(1, 64), 1)}
    assert {item.partial for item in items_of(work)[2]} == {-1}
    assert work.entries[:, 0].tolist() == [0]


LLAMA_LAYERS = LayerKind(0, 8, 4, 128)  # of Llama 3 8B
LLAMA_TILES = tiles_of(LLAMA_LAYERS, torch.bfloat16)
H200 = 132  # multiprocessors


def segments_of(shapes: list[tuple[int, int]]) -> tuple[Table, Any]:
    """Table and segments of rows without shared prefixes, in Llama's layers."""
    table = work_list.table(random_paged_rows(shapes, 16, random.Random(13)), 16, 31)
    return table, work_list.segments(table, LLAMA_LAYERS, LLAMA_TILES)


def items_on_an_h200(shapes: list[tuple[int, int]]) -> Work:
    table, parts = segments_of(shapes)
    return work_list.work(table, parts, LLAMA_TILES, work_list.longest(parts, LLAMA_LAYERS.kv_heads, H200, LLAMA_TILES), False)


def test_equal_rows_that_fill_the_device_are_not_cut() -> None:
    found = items_on_an_h200([(1, 4096)] * 64)
    assert len(found.items[0]) == 64
    assert not len(found.pieces)


@pytest.mark.parametrize(("capability", "generation"), [((8, 0), 8), ((8, 9), 8), ((9, 0), 9), ((10, 3), 9), ((12, 0), 8)])
def test_devices_with_little_shared_memory_use_small_tiles(
    capability: tuple[int, int], generation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workstation's Blackwell has less than half of Hopper's shared memory: launches with Hopper's tiles would fail."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert paged_attention.device_class(torch.device("cuda", 0)) == generation


def test_early_launched_kernels_are_compiled_for_every_gpu_that_launches_kernels_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each tile shape: kernels that are launched early have code of their own."""
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
        used = (
            *paged_attention.tiles_of(kind, torch.bfloat16, generation),
            *paged_attention.decode_tiles(kind, torch.bfloat16, 9, 1),
        )
        wanted = {(tile.rows, tile.keys, tile.stages) for tile in (used if generation == 9 else used[:3])}
        assert tiles == (wanted if begins else set()), name
    dependent_launch._able.cache_clear()


def test_compilations_have_unique_names_and_all_kernel_parameters() -> None:
    found = paged_attention.compilations()
    assert len({one.name for one in found}) == len(found)
    for one in found:
        assert [*one.signature, *one.constants] == list(one.kernel.arg_names)


@pytest.mark.parametrize(
    ("shapes", "programs"),
    [
        ([(1, 4095)] * 8, 256),  # four items for each row and key head: two for each of 132 multiprocessors
        ([(5, 4095)] * 8, 256),  # 4,100 keys don't get a fifth, which would start when all others end
        ([(1, 4095)], 128),  # little work for so many: one for each multiprocessor
        ([(512, 7680)], 128),  # of the largest tile, one fits on a multiprocessor
        ([(8192, 0)], 2048),  # enough without cutting
    ],
)
def test_rows_are_cut_into_as_many_items_as_run_at_once(shapes: list[tuple[int, int]], programs: int) -> None:
    assert LLAMA_LAYERS.kv_heads * sum(map(len, items_on_an_h200(shapes).items)) == programs


def test_decode_tiles_on_hopper_depend_on_the_number_of_rows() -> None:
    """Few rows use the smallest tile, more rows that of 64 rows alone, unless the cache is quantized to 8 bits. Rows with shared
    prefixes always have a tile that holds several of them."""

    def tile_rows(tokens: int, kv_heads: int = 8, ratio: int = 4, generation: int = 9, fp8: bool = False) -> list[int]:
        kind = LayerKind(0, kv_heads, ratio, 128)
        return [tile.rows for tile in paged_attention.decode_tiles(kind, torch.bfloat16, generation, tokens, fp8)]

    assert tile_rows(1) == tile_rows(4) == [16]
    assert tile_rows(5) == tile_rows(64) == tile_rows(256) == [64]
    assert tile_rows(64, fp8=True) == [16, 64]
    assert tile_rows(64, generation=8) == [16, 64, 128]
    assert tile_rows(64, kv_heads=1, ratio=16) == [64]
    assert tile_rows(64, kv_heads=1, ratio=16, fp8=True) == [16, 64]
    assert tile_rows(64, kv_heads=1, ratio=64)[-1] == 128
    assert len(paged_attention.decode_tiles(LLAMA_LAYERS, torch.float32, 9, 64)) == 3


def test_tile_of_lean_steps_is_the_smallest_where_all_its_programs_stay_busy() -> None:
    def rows(tokens: int, kv_heads: int = 8, fp8: bool = False) -> int:
        kind = LayerKind(0, kv_heads, 4, 128)
        return paged_attention.lean_tile(kind, torch.bfloat16, 9, tokens, H200, fp8).rows

    assert rows(32) == rows(197) == rows(512, kv_heads=1) == 64
    assert rows(198) == rows(512) == rows(32, fp8=True) == 16


def test_item_length_does_not_depend_on_how_many_tile_shapes_a_graph_has() -> None:
    """With fewer tile shapes the last one is smaller, but still not taken for one that fills a multiprocessor."""
    _, parts = segments_of([(12, 29988)])
    assert work_list.longest(parts, LLAMA_LAYERS.kv_heads, H200, LLAMA_TILES) == work_list.longest(
        parts, LLAMA_LAYERS.kv_heads, H200, LLAMA_TILES[:2]
    )


@pytest.mark.parametrize(("lengths", "stretched"), [([4100] * 8, True), ([9000, *[520] * 30], False)])
def test_items_are_lengthened_only_where_the_launch_ends_sooner(lengths: list[int], stretched: bool) -> None:
    """A few short items may run after others that are short."""
    _, parts = segments_of([(5, length - 5) for length in lengths])
    share = -(-sum(lengths) * LLAMA_LAYERS.kv_heads // (2 * H200))
    assert (work_list.longest(parts, LLAMA_LAYERS.kv_heads, H200, LLAMA_TILES) > -(-share // 128) * 128) is stretched


def test_merge_of_one_head_at_a_time_uses_one_compilation_for_all_step_sizes() -> None:
    """With several heads at once other multiplications are contracted, and a token's bits would depend on the batch."""
    for heads, size in itertools.product((8, 32), (64, 80, 128, 256)):
        found = [paged_attention._merge_constants(heads, size, False, 1, entries) for entries in (1, 63, 64, 500)]
        assert all(one == found[0] for one in found)


@pytest.mark.parametrize("heads", [3, 6])
def test_merge_of_several_heads_handles_head_counts_that_are_not_a_multiple(heads: int) -> None:
    """With 70 tokens, four heads are merged at once."""
    rows = random_paged_rows([(1, 300)] * 70, 16, random.Random(heads), sharing=1.0)
    case = AttentionCase(rows, 16, kv_heads=heads, ratio=1)
    torch.testing.assert_close(case.attend(case.plan()).double().cpu(), case.expected(), rtol=1e-5, atol=1e-5)
