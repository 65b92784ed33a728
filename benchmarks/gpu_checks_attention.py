"""Checks of attention kernels, of every kind, against float64 or the CPU."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.benchmarks.gpu_comparisons import (
    ROUNDINGS,
    TOLERANCES,
    TYPES,
    Check,
    error,
    poisoned,
)
from penstock.benchmarks.gpu_latents import DEEPSEEK, GLM, TINY, Latents
from penstock.benchmarks.gpu_measure import Bench
from penstock.benchmarks.gpu_worlds import Shape
from penstock.kernels import (
    compressed,
    dispatch,
    entries,
    hopper_attention,
    paged_attention,
    partial_rotary,
    ragged,
    reference,
)
from penstock.kernels.attention import AttentionOptions, Row, ancestry
from penstock.kernels.attention import order as in_order
from penstock.kernels.layout import AttentionLayout
from penstock.kernels.layout import kind as like
from penstock.kernels.paged_attention import Capacity

SHAPES = 4  # of steps of attention, in one part


def checks(bench: Bench) -> dict[str, Check]:
    """All of these, by name."""
    found: dict[str, Check] = {}
    for name, dtype in TYPES.items():
        for part in range(1 if bench.tiny else 4 if dtype == torch.bfloat16 else 2):
            found[f"attention, {name}, part {part + 1}"] = partial(attention, dtype=dtype, eight_bits=False)
    found["attention, cache of 8 bits"] = partial(attention, dtype=torch.bfloat16, eight_bits=True)
    for name, dtype in TYPES.items():
        found[f"compressed attention, {name}"] = partial(compressed_attention, dtype=dtype)
        found[f"latents, absorbed and expanded, {name}"] = partial(expanded, dtype=dtype)
    if bench.device.type == "cuda":
        found["attention from a graph that takes other plans"] = replayed
        found["attention of many rows from a graph that takes other plans"] = partial(replayed, trees=False)
        for page_size, dtype in [*((size, torch.bfloat16) for size in hopper_attention.PAGES), (16, torch.float16)]:
            short = str(dtype).removeprefix("torch.")
            name = f"attention of many rows, warp-specialized, {short}, pages of {page_size}"
            found[name] = partial(many_rows, page_size=page_size, dtype=dtype)
    return found


def attention(bench: Bench, chance: random.Random, dtype: torch.dtype, eight_bits: bool) -> float:
    """Attention for rows of all kinds, at every size of heads and pages."""
    sizes, pages = ([64, 80], [4, 16]) if bench.tiny else ([64, 80, 96, 128, 256], [1, 3, 16, 64, 128, 256])
    worst = 0.0
    turns, first = 2 if bench.tiny else SHAPES, chance.randrange(30)
    for turn in range(first, first + turns):
        if bench.late() and turn > first:
            print(f"    attention, {dtype}: time for {turn - first} of {turns} shapes only", flush=True)
            break
        size, page_size = sizes[turn % len(sizes)], pages[turn % len(pages)]
        kv_heads, ratio = chance.choice([(1, 2), (2, 1)] if bench.tiny else [(1, 8), (2, 4), (2, 7), (8, 1), (4, 5)])
        shape = Shape(kv_heads=kv_heads, ratio=ratio, size=size, page_size=page_size, dtype=dtype, eight_bits=eight_bits)
        rows = _rows(chance, page_size, 40 if bench.tiny else 1500, 3 if bench.tiny else 9)
        window = chance.choice([0, 0, 1, 33, 300])
        softcap = chance.choice([0.0, 0.0, 3.0])
        worst = max(worst, _attended(bench, shape, rows, window, softcap, chance.random() < 0.3))
    return worst


def many_rows(bench: Bench, chance: random.Random, page_size: int, dtype: torch.dtype) -> float:
    """Prompts, and trees beside them, by the warp-specialized kernel for Hopper: work items of the device's default length,
    unsplit, all split.

    The cache is a part of its slots' heads; the heads beside them, and what follows the last key, are NaN.
    """
    kv_heads, ratio = chance.choice([(1, 8), (2, 4), (2, 7), (4, 5), (8, 4)])  # 17 queries fill more than the smaller tiles
    shape = Shape(kv_heads=kv_heads, ratio=ratio, page_size=page_size, dtype=dtype)
    kind, how, worst = replace(shape.kind(), joined=True), AttentionOptions(0, shape.size**-0.5), 0.0
    for trees, processors in itertools.product((0.0, 0.8), (None, 1, 999)):
        queries = [700, 64, *(chance.randint(17, chance.choice([40, 128, 700])) for _ in range(chance.randint(0, 5)))]
        rows = _rows(chance, page_size, 2800, len(queries), trees=trees, queries=queries)
        own, _, query = _contents(bench, shape, rows)
        cache = torch.full((len(own), 2, kv_heads + 1, shape.size), torch.nan, dtype=dtype, device=bench.device)[:, :, 1:]
        cache.copy_(own)
        with poisoned():
            plan = paged_attention.plan(rows, page_size, [kind], bench.device, dtype=dtype, processors=processors)
            found = paged_attention.attention(query, cache, plan, how)
        wrong = error(found, _exact(query, cache, None, None, rows, page_size, 0, 0.0), TOLERANCES[dtype])
        taken = hopper_attention.able(query, cache, kind, plan.launches[0].tiles[-1], page_size, how)
        counts = [(row.queries, row.context) for row in rows], [len(items) for items in plan.launches[0].items]
        print(f"    {'by' if taken else 'NOT by'} warps of different work: {wrong:.2g} tolerances, {shape}, {counts}", flush=True)
        worst = max(worst, wrong)
    return worst


def _rows(
    chance: random.Random, page_size: int, longest: int, count: int, trees: float = 0.3, queries: Sequence[int] = ()
) -> list[Row]:
    """Single queries, chunks, trees and images, some of which share prefixes, on shuffled pages. trees: share of the short rows
    that are trees; queries: of each row, if given."""
    drawn = [chance.choice([1, 1, 1, chance.randint(2, 16), chance.randint(1, longest // 4)]) for _ in range(count)]
    queries = queries or drawn
    shapes = [(some, chance.choice([0, chance.randint(0, longest)])) for some in queries]
    free = list(range(1, 2 + sum(-(-(some + context) // page_size) for some, context in shapes)))
    chance.shuffle(free)
    rows: list[Row] = []
    for some, context in shapes:
        width = -(-(some + context) // page_size)
        other = chance.choice(rows) if rows and chance.random() < 0.4 else None
        alike = list(other.pages[: min(context, other.context) // page_size]) if other else []
        table = [*alike, *(free.pop() for _ in range(width - len(alike)))]
        grown = some <= 128 and chance.random() < trees
        parents = [chance.randint(-1, i - 1) for i in range(some)] if grown else None
        rows.append(Row(some, context, table, parents, whole=not grown and chance.random() < 0.2))
    return rows


def _attended(bench: Bench, shape: Shape, rows: Sequence[Row], window: int, softcap: float, sinking: bool) -> float:
    cache, scales, query = _contents(bench, shape, rows)
    sinks = torch.randn(shape.heads, device=bench.device) * 2 if sinking else None
    with poisoned():
        kind = replace(shape.kind(window), joined=True)
        plan = paged_attention.plan(rows, shape.page_size, [kind], bench.device, dtype=shape.dtype)
        found = paged_attention.attention(query, cache, plan, AttentionOptions(window, shape.size**-0.5, softcap, scales, sinks))
    wrong = error(found, _exact(query, cache, scales, sinks, rows, shape.page_size, window, softcap), TOLERANCES[shape.dtype])
    if not wrong <= 1:
        print(f"    wrong by {wrong:.2g} tolerances: {shape}, window {window}, softcap {softcap:g}, sinks {sinking}", flush=True)
    return wrong


def _contents(bench: Bench, shape: Shape, rows: Sequence[Row]) -> tuple[Tensor, Tensor | None, Tensor]:
    """Cache, scales and queries. Slots of no row are NaN."""
    used = sorted({slot for row in rows for slot in _slots(row, shape.page_size)})
    slots = (max(page for row in rows for page in row.pages) + 1) * shape.page_size
    cache = torch.full((slots, 2, shape.kv_heads, shape.size), torch.nan)
    cache[used] = torch.randn(len(used), 2, shape.kv_heads, shape.size)
    scales = torch.rand(2, shape.kv_heads, device=bench.device) + 0.5 if shape.eight_bits else None
    joint = torch.randn(sum(row.queries for row in rows), shape.kv_heads * (shape.ratio + 2), shape.size).to(shape.dtype)
    stored = cache.to(torch.float8_e4m3fn if shape.eight_bits else shape.dtype).to(bench.device)
    return stored, scales, joint.to(bench.device)[:, : shape.heads]


def _slots(row: Row, page_size: int) -> list[int]:
    return [row.pages[i // page_size] * page_size + i % page_size for i in range(row.context + row.queries)]


def _exact(
    query: Tensor,
    cache: Tensor,
    scales: Tensor | None,
    sinks: Tensor | None,
    rows: Sequence[Row],
    page_size: int,
    window: int,
    softcap: float,
) -> Tensor:
    """In float64: [tokens, heads, size]."""
    answers, start = [], 0
    for row in rows:
        stored = _taken(cache, row, page_size)
        wide = stored.double() if scales is None else stored.double() * scales.double()[:, :, None]
        answers.append(_softmax(query[start : start + row.queries].double(), wide, sinks, row, window, softcap))
        start += row.queries
    return torch.cat(answers)


def _taken(cache: Tensor, row: Row, page_size: int) -> Tensor:
    """A row's keys and values. torch can't index 8-bit floats, but bytes."""
    slots = torch.tensor(_slots(row, page_size), device=cache.device)
    return cache[slots] if cache.element_size() > 1 else cache.view(torch.uint8)[slots].view(cache.dtype)


def _softmax(query: Tensor, cached: Tensor, sinks: Tensor | None, row: Row, window: int, softcap: float) -> Tensor:
    """query: [queries, heads, size]; cached: [length, 2, kv_heads, size]; sinks: [heads]."""
    ancestors, depths = ancestry(row.parents if row.parents is not None else range(-1, row.queries - 1))
    positions = torch.tensor([*range(row.context), *(row.context + depth for depth in depths)], device=query.device)
    open_ = torch.ones(row.queries, row.context, dtype=torch.bool, device=query.device)
    visible = torch.cat((open_, torch.tensor(ancestors, device=query.device) | row.whole), 1)
    if window:
        visible &= positions[row.context :, None] - positions < window
    keys, values = cached.repeat_interleave(query.shape[1] // cached.shape[2], 2).unbind(1)
    logits = torch.einsum("qhs,khs->hqk", query, keys) * query.shape[2] ** -0.5
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks.double()[:, None, None].expand(-1, row.queries, 1)), 2)
    return torch.einsum("hqk,khs->qhs", logits.softmax(-1)[:, :, : len(cached)], values)


def replayed(bench: Bench, chance: random.Random, trees: bool = True) -> float:
    """A captured attention is replayed with the plans of other steps."""
    shape = Shape(kv_heads=2, ratio=4)
    steps = [_rows(chance, shape.page_size, 300 if trees else 1500, 4, trees=0.3 if trees else 0.0) for _ in range(3)]
    tokens = max(sum(row.queries for row in rows) for rows in steps)
    tiles = paged_attention.tiles_of(shape.kind(), shape.dtype, paged_attention.device_class(bench.device))
    room = Capacity(tokens, 3 * tokens, 1000, {0: tiles}, {0: (400,) * len(tiles)}, tokens, 4000 + 16 * tokens, trees)
    sizes = (shape.page_size, [replace(shape.kind(), joined=True)], bench.device)
    options: dict[str, Any] = {"dtype": shape.dtype, "capacity": room}
    joint = max(page for rows in steps for row in rows for page in row.pages) + 1
    cache = torch.randn(joint * shape.page_size, 2, shape.kv_heads, shape.size, device=bench.device).to(shape.dtype)
    query = torch.randn(tokens, shape.heads, shape.size, device=bench.device).to(shape.dtype)
    plan = paged_attention.plan(steps[0], *sizes, **options)
    paged_attention.attention(query, cache, plan, AttentionOptions(0, shape.size**-0.5))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = paged_attention.attention(query, cache, plan, AttentionOptions(0, shape.size**-0.5))
    worst = 0.0
    for rows in steps[::-1]:
        output.fill_(torch.nan)
        paged_attention.plan(rows, *sizes, **options, into=plan)
        graph.replay()
        count = sum(row.queries for row in rows)
        worst = max(
            worst, error(output[:count], _exact(query, cache, None, None, rows, shape.page_size, 0, 0.0), TOLERANCES[shape.dtype])
        )
    return worst


def compressed_attention(bench: Bench, chance: random.Random, dtype: torch.dtype) -> float:
    """Compressed attention: a sliding window, and compressed entries, chosen by an index or all, against the CPU."""
    kinds = (4, 20, 16), (128, 0, chance.choice([1, 16, 64]))
    return max(_compressed(bench, chance, dtype, *kind) for kind in kinds)


def _compressed(bench: Bench, chance: random.Random, dtype: torch.dtype, rate: int, most: int, page_size: int) -> float:
    """Rotated queries, cache contents, compressed entries, and the attention output, rotated back."""
    size, turned, index, heads, longest = (32, 8, 16, 4, 200) if bench.tiny else (512, 64, 128, 32, 1500)
    rows = [replace(row, whole=False) for row in _rows(chance, page_size, longest, 5, trees=0.0)]
    rows = [rows[i] for i in in_order(rows)]
    tokens, series = sum(row.queries for row in rows), 2 if most else 1
    own = torch.tensor([slot for row in rows for slot in _slots(row, page_size)[row.context :]])
    slots = (max(page for row in rows for page in row.pages) + 1) * page_size
    sizes = (slots, 1, 1, (1 + 2 * series) * size), (tokens, 2 * series * size), (tokens, heads, size), (tokens, 64, index), (size,)
    angles = reference.rotary_table(torch.rand(turned // 2), torch.arange(max(slots, tokens)), torch.float32)
    held = [*(torch.randn(*each) for each in sizes), angles]
    places, sinks, weights = torch.randn(series, rate, size), torch.randn(heads), torch.randn(tokens, 64)

    def found(device: torch.device, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """seen: the cache that is attended to, so that an entry's rounding chooses no other entries; None: what is written."""
        cache, made, query, queries, gains, table = (x.to(device, dtype, copy=True) for x in held)
        layout = AttentionLayout(
            page_size, (like(0, heads, 1, size, True),), dtype, device, size, near=128, entries=((rate, most),)
        )
        _, plan = ragged.plan(rows, layout)
        partial_rotary.rotate_last(query, table[:tokens], 1e-6)
        entries.write_series(own.to(device), made, cache[..., size:])
        making = entries.EntryParameters(size, places.to(device), gains, 1e-6)
        ends = ragged.completed_entries(plan, rate, series > 1)
        entries.write_entries(cache, ends, making, table.index_select(0, ends.firsts))
        asked = compressed.EntrySelection(queries, weights.to(device), most, members=rate, first=size) if most else None
        how = AttentionOptions(0, size**-0.5, sinks=sinks.to(device), latent=size)
        answer = ragged.attention_with_entries(query, cache if seen is None else seen, plan, how, rate, asked)
        partial_rotary.rotate_last(answer, table[:tokens], back=True)
        return cache.cpu(), answer.cpu()

    with poisoned():
        ours = found(bench.device)
    with dispatch.forced("reference"):
        theirs = found(torch.device("cpu"), ours[0])
    return max(error(*pair, ROUNDINGS[dtype]) for pair in zip(ours, theirs, strict=True))


def expanded(bench: Bench, chance: random.Random, dtype: torch.dtype) -> float:
    """Chunks of prompts, of which some see heads' own keys and values, beside decodes. Answers are means of products that are
    rounded before."""
    worst = 0.0
    for own, page_size in [(TINY, 4)] if bench.tiny else [(DEEPSEEK, 16), (GLM, 64)]:
        queries = (1, 30, 3) if bench.tiny else (1, 300, 1, chance.randint(200, 900), 20)
        rows = _rows(chance, page_size, 60 if bench.tiny else 1500, len(queries), trees=0.0, queries=queries)
        world = Latents(own, [replace(row, whole=False) for row in rows], page_size, dtype, bench.device)
        order, plan = world.plan(fewest=20)
        with poisoned():
            found = world.found(plan)
        worst = max(worst, error(found, world.exact(order), ROUNDINGS[dtype]))
    return worst
