"""Correctness checks of every kernel against float64, or against the plain torch branch on the CPU, before anything is timed.

Shapes are drawn anew in each run, from a seed that is printed. Output buffers are filled with NaN before. An error is given as a
share of its tolerance: |found - expected| / (tolerance + tolerance * |expected|), the largest anywhere.
"""

import itertools
import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.benchmarks import gpu_told
from penstock.benchmarks.gpu_latents import DEEPSEEK, GLM, TINY, Latents
from penstock.benchmarks.gpu_measure import Bench
from penstock.benchmarks.gpu_report import Line, failed
from penstock.benchmarks.gpu_worlds import Shape
from penstock.kernels import (
    adapters,
    beam,
    codes,
    compressed,
    dispatch,
    entries,
    experts,
    fused_quantized,
    fused_skinny_gemm,
    gated_delta,
    hopper_attention,
    hyper_connections,
    linear,
    low_rank,
    noise,
    operations,
    paged_attention,
    paging,
    partial_rotary,
    pools,
    quantized,
    ragged,
    reference,
    sampling,
    short_convolution,
    state_space,
)
from penstock.kernels.attention import AttentionOptions, Row, ancestry
from penstock.kernels.attention import order as in_order
from penstock.kernels.fused_routing import PAIRS, sort
from penstock.kernels.fused_sampling import sample
from penstock.kernels.layout import AttentionLayout
from penstock.kernels.layout import kind as like
from penstock.kernels.linear import Invariance
from penstock.kernels.paged_attention import Capacity
from penstock.kernels.reference import Activation, HyperConnectionWeights
from penstock.kernels.sampling import Draws, Penalties
from penstock.kernels.spans import CHUNKED_FROM, RecurrentStates, Spans
from penstock.shard.host_pages import HostPages

SECTION = "correctness"
# Tolerances of attention: outputs are means of numbers around 1.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Tolerances of elementwise operations, whose steps are rounded to the type one after the other.
ROUNDINGS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SHAPES = 4  # of steps of attention, in one part
SUMS = 2e-4  # tolerance of sums in float32: tensor cores truncate part of each 16 inputs
FEW = (2, 16, 17, 32, 33, 64)  # rows of products: as many as tiles have, and one more
MIXTURES = ((8, 2), (128, 8))  # experts, and how many of them a token uses
# Recurrent layers, with heads of keys, heads of values for each, features of keys and of values, and taps.
REMEMBERED = {
    "the gated delta rule": (16, 2, 128, 128, 4),
    "the gated delta rule by features": (32, 1, 128, 128, 4),
    "state spaces": (1, 48, 128, 64, 4),
    "short convolutions": (0, 0, 0, 2048, 3),
}
CHUNKED = ("the gated delta rule", "state spaces")  # of long spans, by kernels of their own
WORKERS = 8
THREADS = 2  # of each, for what is computed on the host
PATIENCE = 30.0  # seconds that checks may exceed the section's time
LONGEST = 90.0  # seconds until the next result, or a process counts as killed
E4M3 = 0.07  # of a value's size: half a unit of three bits of mantissa is 1/16
DIFFERENT = 1e-3  # share of rows for which a different token may be sampled: sums are rounded differently on another device

Check = Callable[[Bench, random.Random], float]


def measure(bench: Bench, seed: int) -> None:
    """A line per check; errors beyond the tolerance are WRONG. On a GPU in several processes: most of the time goes into
    compiling."""
    print(f"    seed {seed}", flush=True)
    names = [*checks(bench)]
    if bench.device.type != "cuda":
        for name in names:
            bench.add(checked(bench, seed, name))
        return
    workers = max(1, min(WORKERS, (os.cpu_count() or 2) // 2))
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=1) as pool:
        stop = time.perf_counter() + bench.seconds_left()
        gather(bench, pool.imap_unordered(_worked, [(stop, seed, name) for name in names]), names)


def gather(bench: Bench, found: Any, names: Sequence[str]) -> None:
    """Reports lines as they come. found: an iterator of a pool, which waits for ever for a process that was killed.

    A check that hangs must hide no others: those missing in the end are reported by name.
    """
    missing = dict.fromkeys(names)
    while missing:
        try:
            line = found.next(timeout=max(1.0, min(LONGEST, bench.seconds_left() + PATIENCE)))
        except multiprocessing.TimeoutError:
            break
        del missing[line.what]
        bench.add(line)
    for name in missing:
        bench.add(failed(SECTION, name, "its process was killed, or takes far too long", 1.0, check=True))


def _worked(what: tuple[float, int, str]) -> Line:
    """Runs in a process of a pool; the clock is common to all processes."""
    stop, seed, name = what
    torch.set_num_threads(THREADS)
    with torch.inference_mode():
        return checked(Bench(torch.device("cuda"), False, print, stop - time.perf_counter()), seed, name)


def checked(bench: Bench, seed: int, name: str) -> Line:
    """Runs one check. What it does depends on the seed and its name alone."""
    chance = random.Random(f"{seed} {name}")
    torch.manual_seed(chance.randrange(1 << 32))
    try:
        with dispatch.forced("triton"):
            found = checks(bench)[name](bench, chance)
    except Exception as problem:  # the others still run
        traceback.print_exc()
        return failed(SECTION, name, problem, 1.0, check=True)
    return Line(section=SECTION, what=name, ratio=found, against="of the tolerance", goal=1.0, most=True, check=True)


def checks(bench: Bench) -> dict[str, Check]:
    """All checks, by name."""
    found: dict[str, Check] = {}
    types = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
    for name, dtype in types.items():
        for part in range(1 if bench.tiny else 4 if dtype == torch.bfloat16 else 2):
            found[f"attention, {name}, part {part + 1}"] = partial(attention, dtype=dtype, eight_bits=False)
    found["attention, cache of 8 bits"] = partial(attention, dtype=torch.bfloat16, eight_bits=True)
    for name, dtype in types.items():
        found[f"norms and gates, {name}"] = partial(elementwise, dtype=dtype)
        found[f"rotary and write, {name}"] = partial(rotary, dtype=dtype, eight_bits=False)
        found[f"streams with gates, and n-grams, {name}"] = partial(told, dtype=dtype)
        found[f"a window and entries, {name}"] = partial(entered, dtype=dtype)
        found[f"latents, and what they are expanded to, {name}"] = partial(expanded, dtype=dtype)
    found["products of few rows"] = products
    found["products of few rows in parts, with the norm behind"] = parts
    for name, dtype in types.items():
        found[f"products whose rows depend on no other, {name}"] = partial(invariant_products, dtype=dtype)
    found["routes to experts"] = routes
    found["products of experts"] = mixtures
    for kind in codes.BITS:
        found[f"products of experts of few bits, {kind}"] = partial(mixtures, kind=kind)
    found["products of adapters"] = adapted
    for rule in REMEMBERED:
        found[f"what is remembered, by {rule}"] = partial(remembered, rule=rule)
    for rule, (name, dtype) in itertools.product(CHUNKED, types.items()):
        found[f"what is remembered of long spans, by {rule}, {name}"] = partial(
            remembered, rule=rule, dtype=dtype, shortest=CHUNKED_FROM
        )
    found["norms behind memories"] = gated_norms
    for kind in codes.BITS:
        found[f"products with weights of few bits, {kind}"] = partial(few_bits, kind=kind)
    if bench.device.type == "cuda":
        found["attention from a graph that takes other plans"] = replayed
        found["attention of many rows from a graph that takes other plans"] = partial(replayed, trees=False)
        for page_size, dtype in [*((size, torch.bfloat16) for size in hopper_attention.PAGES), (16, torch.float16)]:
            short = str(dtype).removeprefix("torch.")
            name = f"attention of many rows by warps of different work, {short}, pages of {page_size}"
            found[name] = partial(many_rows, page_size=page_size, dtype=dtype)
        # The interpreter rounds to 8 bits wrongly.
        found["rotary and write, cache of 8 bits"] = partial(rotary, dtype=torch.bfloat16, eight_bits=True)
    found["page copies and slot moves"] = copies
    found["pages to the host and back"] = offloaded
    found["noise, to the last bit, of a CPU's"] = noises
    found["sampling: share of rows that differ from a CPU's"] = tokens
    found["beam candidates and the most probable"] = best
    return found


def error(found: Tensor, expected: Tensor, tolerance: float) -> float:
    """The largest error, as a share of the tolerance; infinite where there is NaN."""
    if found.shape != expected.shape:
        raise ValueError(f"{tuple(found.shape)} where {tuple(expected.shape)} is expected")
    if not found.numel():
        return 0.0
    found, expected = found.double().to(expected.device), expected.double()
    share = (found - expected).abs() / (tolerance + tolerance * expected.abs())
    return float(share.nan_to_num(nan=torch.inf).max())


def relative_error(found: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """For sums of many products, whose errors are in proportion to the largest."""
    largest = expected.abs().max()
    return error(found / largest, expected / largest, ROUNDINGS[dtype])


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills uninitialized allocations with NaN."""
    honest = torch.empty

    def empty(*arguments: Any, **options: Any) -> Tensor:
        result: Tensor = honest(*arguments, **options)
        return result.fill_(torch.nan) if result.is_floating_point() and result.element_size() > 1 else result

    torch.empty = empty
    try:
        yield
    finally:
        torch.empty = honest


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
        plan.become(paged_attention.plan(rows, *sizes, **options))
        graph.replay()
        count = sum(row.queries for row in rows)
        worst = max(
            worst, error(output[:count], _exact(query, cache, None, None, rows, shape.page_size, 0, 0.0), TOLERANCES[shape.dtype])
        )
    return worst


def _wide(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (torch.randn(*shape, device=device) * 2).to(dtype)


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight.double()


def elementwise(bench: Bench, chance: random.Random, dtype: torch.dtype) -> float:
    """Norms, with and without the residual, SwiGLU and GeGLU, gates with a limit, and hyper-connections."""
    worst, tolerance = 0.0, ROUNDINGS[dtype]
    for size in (7, chance.randint(30, 80)) if bench.tiny else (7, chance.randint(30, 1100), 4096, 8192):
        rows = chance.randint(1, 3 if bench.tiny else 300)
        x, residual = (_wide(rows, size, dtype=dtype, device=bench.device) for _ in range(2))
        weight, epsilon = _wide(size, dtype=dtype, device=bench.device), 1e-5
        with poisoned():
            worst = max(worst, error(operations.rms_norm(x, weight, epsilon), _norm(x, weight, epsilon), tolerance))
            sums = (x.double() + residual.double()).to(dtype)
            found = operations.add_rms_norm(x, residual, weight, epsilon)
            worst = max(worst, error(found, _norm(sums, weight, epsilon), tolerance), error(residual, sums, tolerance))
            both = _wide(rows, 2 * size, dtype=dtype, device=bench.device)
            for how in (
                reference.PLAIN,
                Activation(True),
                *(Activation(limit=0.7, form=form) for form in ("steep", "before", "behind")),
            ):
                worst = max(worst, error(operations.gated(both, how), reference.gated(both.double(), how), tolerance))
        worst = max(worst, _mixed(bench, rows, size, dtype), _crossed(bench, rows, size, dtype), _pooled(bench, rows, dtype))
    return worst


def _mixed(bench: Bench, rows: int, size: int, dtype: torch.dtype) -> float:
    """Hyper-connections of four streams, to which a layer's output is added first."""
    streams, more = (_wide(*shape, dtype=dtype, device=bench.device).contiguous() for shape in ((rows, 4, size), (rows, size)))
    given, matrix, both = (torch.randn(*shape, device=bench.device) for shape in ((rows, 4), (8, 4 * size), (2, 8)))
    shares = HyperConnectionWeights(matrix * size**-0.5, both[0], both[1], magnitude=2.0, epsilon=1e-6)
    wide = streams.double() + given.double().unsqueeze(2) * more.double().unsqueeze(1)
    with poisoned():
        mixed, found = hyper_connections.mix(streams, more, given, shares, 1e-5)
    with dispatch.forced("reference"):  # of the streams as they were rounded
        seen, gives = hyper_connections.mix(streams.float(), None, None, shares, 1e-5)
    assert gives is not None
    assert found is not None
    tolerance = ROUNDINGS[dtype]
    return max(error(streams, wide, tolerance), error(mixed, seen, tolerance), error(found, gives, tolerance))


def _crossed(bench: Bench, rows: int, size: int, dtype: torch.dtype) -> float:
    """Hyper-connections whose four streams become mixtures of each other, against the CPU."""
    streams, more = (_wide(*shape, dtype=dtype, device=bench.device).contiguous() for shape in ((rows, 4, size), (rows, size)))
    matrix, both, given = (torch.randn(*shape, device=bench.device) for shape in ((24, 4 * size), (2, 24), (rows, 20)))
    shares = HyperConnectionWeights(matrix * size**-0.5, both[0], both[1], magnitude=2.0, epsilon=1e-6, rounds=20)
    own, far = streams.to("cpu", copy=True), replace(shares, matrix=shares.matrix.cpu(), scale=both[0].cpu(), base=both[1].cpu())
    with poisoned():
        mixed, found = hyper_connections.mix(streams, more, given, shares, 1e-5)
        mean, _ = hyper_connections.mix(streams, None, None, None, 1e-5)
    with dispatch.forced("reference"):
        hyper_connections.mix(own, more.cpu(), given.cpu(), far, 1e-5)
        seen, gives = hyper_connections.mix(streams.cpu().float(), None, None, far, 1e-5)  # of the streams as they were rounded
    assert found is not None
    assert gives is not None
    pairs = (streams, own), (mixed, seen), (found, gives), (mean, streams.double().mean(1))
    return max(error(ours.cpu(), theirs.cpu(), ROUNDINGS[dtype]) for ours, theirs in pairs)


def _pooled(bench: Bench, rows: int, dtype: torch.dtype) -> float:
    """Keys of an index's pools, against the CPU."""
    keys, gates = (torch.randn(rows, 128).to(dtype) for _ in range(2))
    places, cache, slots = torch.randn(16, 128), torch.randn(512, 1, 1, 256).to(dtype), torch.arange(13, 13 + rows)
    own = cache.to(bench.device, copy=True)
    keys, gates, places, slots = (x.to(bench.device) for x in (keys, gates, places, slots))
    with poisoned():
        pools.write_pools(keys, gates, places, slots, own)
    with dispatch.forced("reference"):
        pools.write_pools(keys.cpu(), gates.cpu(), places.cpu(), slots.cpu(), cache)
    return error(own.cpu(), cache, ROUNDINGS[dtype])


def told(bench: Bench, chance: random.Random, dtype: torch.dtype) -> float:
    """See `gpu_told`, against the CPU."""
    worst = 0.0
    for run in gpu_told.runs(chance, dtype, bench.tiny):
        with poisoned():
            ours = run(bench.device)
        with dispatch.forced("reference"):
            theirs = run(torch.device("cpu"))
        worst = max(worst, *(error(one.cpu(), other, ROUNDINGS[dtype]) for one, other in zip(ours, theirs, strict=True)))
    return worst


def entered(bench: Bench, chance: random.Random, dtype: torch.dtype) -> float:
    """Compressed attention: a sliding window, and compressed entries, chosen by an index or all, against the CPU."""
    kinds = (4, 20, 16), (128, 0, chance.choice([1, 16, 64]))
    return max(_entered(bench, chance, dtype, *kind) for kind in kinds)


def _entered(bench: Bench, chance: random.Random, dtype: torch.dtype, rate: int, most: int, page_size: int) -> float:
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


def _sizes(bench: Bench, chance: random.Random) -> list[tuple[int, int]]:
    """Inputs and outputs of products of few rows."""
    return [(40, 33), (64, 48)] if bench.tiny else [(4096, 6144), (14336, 4096), (chance.randint(30, 1100), chance.randint(1, 999))]


def products(bench: Bench, chance: random.Random) -> float:
    """Skinny GEMMs with and without fused prologues and epilogues."""
    worst, dtype = 0.0, torch.bfloat16
    kinds = ((False, False, False), (True, False, False), (True, True, False), (False, False, True))
    for inputs, outputs in _sizes(bench, chance):
        cases = [*itertools.product((1, chance.choice([2, 3, 16])), kinds), *((rows, chance.choice(kinds)) for rows in FEW[2:])]
        for rows, (norm, gated, add) in cases:
            x, out = (_wide(rows, size, dtype=dtype, device=bench.device) for size in (inputs, outputs))
            weight = _wide(outputs * (1 + gated), inputs, dtype=dtype, device=bench.device) * inputs**-0.5
            bias = _wide(len(weight), dtype=dtype, device=bench.device) if chance.random() < 0.5 else None
            gains = _wide(inputs, dtype=dtype, device=bench.device) if norm else None
            expected = (x.double() if gains is None else _norm(x, gains, 1e-5)) @ weight.double().T
            expected += bias.double() if bias is not None else 0
            if gated:
                gate, up = expected.chunk(2, -1)
                expected = gate * gate.sigmoid() * up
            if add:
                expected += out.double()
            else:
                out.fill_(torch.nan)
            fused_skinny_gemm.product(x, weight, bias, out, gains=gains, epsilon=1e-5, gated=gated, add=add)
            worst = max(worst, relative_error(out, expected, dtype))
    return worst


def parts(bench: Bench, chance: random.Random) -> float:
    """Split-K products: the sum of the parts, the residual stream with it added, and the norm of that."""
    worst, dtype = 0.0, torch.bfloat16
    for (inputs, outputs), rows in itertools.product(_sizes(bench, chance), FEW):
        x, residual = (_wide(rows, size, dtype=dtype, device=bench.device) for size in (inputs, outputs))
        weight = _wide(outputs, inputs, dtype=dtype, device=bench.device) * inputs**-0.5
        bias, gains = (_wide(outputs, dtype=dtype, device=bench.device) for _ in range(2))
        out = torch.full((chance.choice([2, 4]), rows, outputs), torch.nan, device=bench.device)
        fused_skinny_gemm.product(x, weight, bias, out)
        expected = x.double() @ weight.double().T + bias.double()
        largest = expected.abs().max()
        worst = max(worst, error(out.double().sum(0) / largest, expected / largest, SUMS))
        expected += residual.double()
        with poisoned():
            found = operations.add_rms_norm(out, residual, gains, 1e-5)
        worst = max(worst, relative_error(residual, expected, dtype), error(found, _norm(residual, gains, 1e-5), ROUNDINGS[dtype]))
    return worst


def invariant_products(bench: Bench, chance: random.Random, dtype: torch.dtype) -> float:
    """Batch-invariant products against float64, and bit-identical for some of the rows by themselves."""
    worst = 0.0
    for inputs, outputs in [(40, 33)] if bench.tiny else [(4096, 6144), (14336, 4096), (chance.randint(30, 1100), 999)]:
        rows = 5 if bench.tiny else 600
        x = _wide(rows, inputs, dtype=dtype, device=bench.device)
        weight = _wide(outputs, inputs, dtype=dtype, device=bench.device) * inputs**-0.5
        product = linear.invariant(weight, None)
        found, expected = product(x), x.double() @ weight.double().T
        worst = max(worst, relative_error(found, expected, dtype))
        for first, count in ((0, 1), (3, 1), (1, chance.randint(2, rows - 1))):
            if not product(x[first : first + count].clone()).equal(found[first : first + count]):
                return torch.inf
    return worst


def adapted(bench: Bench, chance: random.Random) -> float:
    """LoRA adapters of different ranks, for rows that use one of them or none."""
    worst, dtype, device = 0.0, torch.bfloat16, bench.device
    inputs, outputs = (24, 17) if bench.tiny else (chance.randint(100, 5000), chance.randint(100, 5000))
    ranks = (3, 16) if bench.tiny else (8, 64, 16, 100)
    pairs = [(_wide(rank, inputs, dtype=dtype, device=device), _wide(outputs, rank, dtype=dtype, device=device)) for rank in ranks]
    pairs = [(down * inputs**-0.5, up * len(down) ** -0.5) for down, up in pairs]
    lora = low_rank.lay_out(pairs)
    assert lora is not None
    for rows in (1, 9) if bench.tiny else (1, 64, 3000):
        x, out = _wide(rows, inputs, dtype=dtype, device=device).contiguous(), _wide(rows, outputs, dtype=dtype, device=device)
        out, numbers = out.contiguous(), torch.randint(-1, len(ranks), (rows,), device=device)
        expected = out.double()
        for number, (down, up) in enumerate(pairs):
            own = numbers == number
            expected[own] += x[own].double() @ down.double().T @ up.double().T
        lora.add(x, out, adapters.choose(numbers, len(ranks)))
        worst = max(worst, relative_error(out, expected, dtype))
    return worst


def few_bits(bench: Bench, chance: random.Random, kind: str) -> float:
    """Quantized products of few rows, of many, and of so many that the weight is dequantized first."""
    worst = 0.0
    for dtype, rows in itertools.product((torch.bfloat16, torch.float16), (1, 40, fused_quantized.MOST + 1)):
        inputs, outputs = (64, 17) if bench.tiny else (chance.choice([2048, 4096, 14336]), chance.randint(1, 6144))
        rounded = codes.quantize(torch.randn(outputs, inputs, device=bench.device) * inputs**-0.5, kind)
        if kind not in codes.FP4_BLOCKS:
            rounded = rounded.refined(rounded.block // chance.choice([1, 2]))
        bias = _wide(outputs, dtype=dtype, device=bench.device) if chance.random() < 0.5 else None
        x = _wide(rows, inputs, dtype=dtype, device=bench.device)
        expected = x.double() @ codes.dequantized(rounded, torch.float64).T + (bias.double() if bias is not None else 0)
        found = quantized.lay_out(rounded, bias, Invariance.USUAL, dtype)(x)
        worst = max(worst, relative_error(found, expected, dtype))
    return worst


def routes(bench: Bench, chance: random.Random) -> float:
    """Router weights of experts, against the CPU, and pairs sorted by expert."""
    worst = 0.0
    for number, count, sets in ((8, 2, (1, 1, 2)), (128, 8, (1, 1, 2)), (160, 6, (8, 3, 1)), (256, 8, (8, 4, 2))):
        logits, correction = torch.randn(chance.randint(1, 99), number), torch.rand(number)
        how: dict[str, Any] = {"count": count, "normalized": True, "sigmoid": chance.random() < 0.5, "sets": sets}
        how["by_logits"] = how["sigmoid"] and chance.random() < 0.5
        with poisoned():
            shares, chosen = experts.route(logits.to(bench.device), correction=correction.to(bench.device), **how)
            order, starts = sort(chosen[: PAIRS // count], number)
        with dispatch.forced("reference"):
            expected, _ = experts.route(logits, correction=correction, **how)
        numbers, places = chosen[: PAIRS // count].flatten().sort(stable=True)
        begins = torch.searchsorted(numbers, torch.arange(number + 1, device=bench.device))
        exact = order.equal(places) and starts.equal(begins)
        worst = max(worst, error(shares.sort(-1).values, expected.sort(-1).values, 2e-6) if exact else torch.inf)
    return worst


def mixtures(bench: Bench, chance: random.Random, kind: str = "") -> float:
    """Experts that many tokens choose, few, and none; if quantized, with biases and limits, too."""
    worst, dtype, device = 0.0, torch.bfloat16, bench.device
    hidden, size = (24, 17) if bench.tiny else (chance.randint(100, 3000), chance.randint(100, 1000))
    if kind:
        hidden, size = (64, 32) if bench.tiny else (32 * chance.randint(4, 90), 32 * chance.randint(4, 30))
    limit = 7.0 if kind else 0.0
    for number, count in ((5, 2),) if bench.tiny else MIXTURES:
        gate_ups = [_wide(2 * size, hidden, dtype=dtype, device=device) * hidden**-0.5 for _ in range(number)]
        downs = [_wide(hidden, size, dtype=dtype, device=device) * size**-0.5 for _ in range(number)]
        biases = [_wide(number, width, dtype=dtype, device=device) for width in (2 * size, hidden)]
        if kind:
            few = [[codes.quantize(weight, kind) for weight in weights] for weights in (gate_ups, downs)]
            gate_ups, downs = ([codes.dequantized(weight, torch.float64) for weight in weights] for weights in few)
            laid_out = experts.lay_out(few[0], few[1], dtype, (biases[0], biases[1]), Activation(limit=limit))
        else:
            laid_out = experts.lay_out(gate_ups, downs, dtype)
            biases = [torch.zeros_like(bias) for bias in biases]
        for tokens in (1, 9) if bench.tiny else (1, 64, 3000):
            x = _wide(tokens, hidden, dtype=dtype, device=device)
            logits = torch.randn(tokens, number, device=device)
            logits[: tokens // 2, 0] += 9
            shares, chosen = experts.route(logits, count, True)
            expected = torch.zeros(tokens, hidden, dtype=torch.float64, device=device)
            for expert, (gate_up, down) in enumerate(zip(gate_ups, downs, strict=True)):
                rows, places = (chosen == expert).nonzero(as_tuple=True)
                inner = x[rows].double() @ gate_up.double().T + biases[0][expert].double()
                made = reference.gated(inner, Activation(limit=limit)) @ down.double().T + biases[1][expert].double()
                expected.index_add_(0, rows, made * shares[rows, places, None].double())
            with poisoned():
                found = laid_out(x, shares, chosen)
            worst = max(worst, relative_error(found, expected, dtype))
    return worst


def remembered(bench: Bench, chance: random.Random, rule: str, dtype: torch.dtype = torch.bfloat16, shortest: int = 2) -> float:
    """Recurrent layers for sequences that begin or go on, with drafts, and with padding after them: outputs and new states, against
    the CPU. shortest: least tokens of two of them."""
    key_heads, ratio, key_size, value_size, taps = REMEMBERED[rule]
    if bench.tiny:
        key_heads, ratio, key_size, value_size = min(1, key_heads), min(2, ratio), min(12, key_size), 20
    heads = key_heads * ratio
    if bench.tiny and dtype == torch.bfloat16:  # which the interpreter cuts off instead of rounding
        dtype = torch.float32
    channels = 2 * key_heads * key_size + max(1, heads) * value_size
    longest = shortest + (20 if bench.tiny else 300)
    lengths = [1, chance.randint(shortest, longest), chance.randint(2, 9), chance.randint(shortest, longest), 1]
    tokens = sum(lengths) + chance.randint(0, 3)
    fading = heads * (key_size if rule.endswith("features") else 1)
    joint = torch.randn(tokens, 2 * channels + heads + fading).to(dtype)
    weights = [torch.randn(channels, taps).to(dtype), torch.randn(channels).to(dtype), -torch.rand(heads)]
    weights += torch.randn(fading), torch.randn(heads)
    strongest, bound = chance.choice([1.0, 2.0]), chance.choice([0.0, -5.0])
    windows = torch.randn(9, taps - 1, channels).to(dtype)
    states = RecurrentStates(windows, torch.randn(9, heads, key_size, value_size))
    numbers = [
        [0, *itertools.accumulate(lengths)],
        chance.sample(range(1, 9), len(lengths)),
        [chance.randint(0, 1) for _ in lengths],
        [chance.randint(1, length) for length in lengths],
    ]

    def found(device: torch.device) -> list[Tensor]:
        own = RecurrentStates(*(part.to(device, copy=True) for part in (states.windows, states.memories)))
        spans = Spans(tuple(lengths), *(torch.tensor(some, device=device) for some in numbers))
        x, (kernel, biases, rates, offsets, skips) = joint.to(device), (weight.to(device) for weight in weights)
        mixed, more = x[:, :channels], x[:, 2 * channels :]
        if not heads:
            answer = short_convolution.short_convolution(mixed, x[:, channels : 2 * channels], kernel, biases, spans, own)
        elif rule == "state spaces":
            how = kernel, biases, rates, offsets, skips, (0.1, 2.0)
            answer = state_space.state_space(mixed, more[:, :heads], *how, spans, own)
        else:
            strengths, fades = torch.split(more, [heads, fading], 1)
            answer = gated_delta.gated_delta(mixed, strengths, fades, kernel, rates, offsets, spans, own, strongest, bound)
        return [part.cpu() for part in (answer, own.windows, own.memories)]

    with poisoned():
        ours = found(bench.device)
    with dispatch.forced("reference"):
        answer, windows, memories = found(torch.device("cpu"))
    if not ours[1].equal(windows):
        return torch.inf
    return max(relative_error(ours[0], answer, dtype), relative_error(ours[2], memories, dtype) if heads else 0.0)


def gated_norms(bench: Bench, chance: random.Random) -> float:
    """Gated norms of heads and of groups, with the gate after the norm or before it."""
    worst, dtype = 0.0, torch.bfloat16
    for heads, size in ((3, 20),) if bench.tiny else ((32, 128), (1, 3072), (8, 1024)):
        tokens = chance.randint(1, 4 if bench.tiny else 300)
        x, gates = (_wide(tokens, 2 * heads * size, dtype=dtype, device=bench.device)[:, : heads * size] for _ in range(2))
        x, gates = x.view(tokens, heads, size), gates.view(tokens, heads, size)
        for before, sigmoid, gains in ((False, False, (size,)), (False, True, (size,)), (True, False, (heads, size))):
            weight = _wide(*gains, dtype=dtype, device=bench.device)
            factors = gates.double().sigmoid() * (1.0 if sigmoid else gates.double())
            expected = _norm(x.double() * factors, weight, 1e-5) if before else _norm(x, weight, 1e-5) * factors
            found = gated_delta.gated_norm(x, gates, weight, 1e-5, before, sigmoid)
            worst = max(worst, relative_error(found, expected, dtype))
    return worst


def rotary(bench: Bench, chance: random.Random, dtype: torch.dtype, eight_bits: bool) -> float:
    """Rotary embedding, with norms of heads and without; some tokens are padding. Queries by themselves, too."""
    worst, device = 0.0, bench.device
    for size in (16, 80) if bench.tiny else (64, 80, 96, 128, 256):
        heads, kv_heads = chance.choice([(2, 1), (4, 4), (3, 1)])
        tokens = chance.randint(1, 4 if bench.tiny else 200)
        joint = _wide(tokens, (heads + 2 * kv_heads) * size, dtype=dtype, device=device)
        frequencies = 1.0 / 10000.0 ** (torch.arange(0, size, 2).float() / size)
        table = reference.rotary_table(frequencies, torch.arange(tokens) * 3, dtype).to(device)
        slots = torch.tensor(
            [slot if chance.random() < 0.8 else -1 for slot in chance.sample(range(2 * tokens), tokens)], device=device
        )
        weights = [_wide(size, dtype=dtype, device=device) if chance.random() < 0.5 else None] * 2
        scales = torch.rand(2, kv_heads, device=device) + 0.5 if eight_bits else None
        cache = torch.zeros(2 * tokens, 2, kv_heads, size, dtype=torch.float8_e4m3fn if eight_bits else dtype, device=device)
        queries, stored = _turned(joint, table, heads, kv_heads, weights[0])
        # Between its steps it rounds as torch does, and a difference may be much smaller than its operands: plain torch is up to
        # 2.2 roundings from this, one time in six above one.
        tolerance = 4 * ROUNDINGS[dtype]
        alone = operations.rotate(joint[:, : heads * size].clone(), table, weights[0], 1e-5)
        worst = max(worst, error(alone, queries, tolerance))
        found = operations.rotate_and_write(joint, table, slots, cache, weights[0], weights[1], 1e-5, scales)
        worst = max(worst, error(found, queries, tolerance))
        expected = torch.zeros(cache.shape, dtype=torch.float64, device=device)
        expected[slots[slots >= 0]] = stored[slots >= 0]
        back = cache.double() if scales is None else cache.double() * scales.double()[:, :, None]
        worst = max(worst, error(back, expected, E4M3 if eight_bits else tolerance))
    return worst


def _turned(joint: Tensor, table: Tensor, heads: int, kv_heads: int, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Queries [tokens, heads, size], and keys and values [tokens, 2, kv_heads, size], in float64."""
    size = joint.shape[1] // (heads + 2 * kv_heads)
    every = joint.double().view(len(joint), -1, size)
    turned = every[:, : heads + kv_heads]
    if weight is not None:
        turned = _norm(turned, weight, 1e-5)
    half = size // 2
    swapped = torch.cat((turned[..., half:], turned[..., :half]), -1)
    turned = turned * table[:, 0].double() + swapped * table[:, 1].double()
    return turned[:, :heads], torch.stack((turned[:, heads:], every[:, heads + kv_heads :]), 1)


def copies(bench: Bench, chance: random.Random) -> float:
    """Page copies and slot moves: exactly what the plain branch does on a CPU."""
    wrong = 0.0
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        layers, count, page_size, width = (
            3,
            12,
            chance.choice([1, 4, 16]),
            chance.choice([8, 48] if bench.tiny else [48, 2048, 4100]),
        )
        pages = torch.randint(0, 100, (layers, count, page_size, width)).to(dtype)
        places = chance.sample(range(count), 8)
        filled = [chance.randint(0, page_size) for _ in range(4)]
        columns = torch.tensor([places[:4], places[4:], filled])
        wrong += _differ(bench, pages, columns, torch.empty(0, dtype=torch.int64))
        slots = pages.view(layers, count * page_size, width)
        order = chance.sample(range(count * page_size), min(count * page_size, 10) // 2 * 2)
        starts = torch.tensor(sorted({0, len(order) // 4, len(order) // 2}))
        wrong += _differ(bench, slots, torch.tensor([order[::2], order[1::2]]), starts)
    return wrong


def _differ(bench: Bench, before: Tensor, columns: Tensor, starts: Tensor) -> float:
    """Elements that differ between device and CPU. columns: sources, targets, and for pages the filled tokens."""
    own, plain = before.to(bench.device, copy=True), before.clone()
    _change(own, columns.to(bench.device), starts.to(bench.device))
    with dispatch.forced("reference"):
        _change(plain, columns, starts)
    return float((own.cpu() != plain).sum())


def _change(x: Tensor, columns: Tensor, starts: Tensor) -> None:
    if x.dim() == 4:
        paging.copy_pages(x, columns[0], columns[1], columns[2])
    else:
        paging.move_slots(x, columns[0], columns[1], starts)


def offloaded(bench: Bench, chance: random.Random) -> float:
    """KV offload: numbers that differ when they come back, while the device goes on writing to their pages."""
    parts = [torch.randn(layers, 40, 16, width, device=bench.device).bfloat16() for layers, width in ((4, 2048), (3, 576), (1, 7))]
    host, wrong = HostPages(parts, 32), 0.0
    for _ in range(4):
        pages, places, targets = chance.sample(range(40), 20), chance.sample(range(1, 33), 20), chance.sample(range(40), 20)
        before = [part[:, pages].clone() for part in parts]
        host.save(list(zip(pages, places, strict=True)))
        for part in parts:
            part.add_(1)
        host.load(list(zip(places, targets, strict=True)))
        wrong += sum(float((part[:, targets] != was).sum()) for part, was in zip(parts, before, strict=True))
    return wrong


def noises(bench: Bench, chance: random.Random) -> float:
    """Gumbel noise: numbers that differ in any bit, of all tokens and of each by its id."""
    rows, vocabulary = (2, 100) if bench.tiny else (16, 128256)
    keys = torch.stack([torch.randint(-(1 << 63), (1 << 63) - 1, (rows,)), torch.arange(rows) % 5, torch.arange(rows) * 77])
    seeds, choices, positions = keys.to(bench.device)
    ids = torch.arange(vocabulary, device=bench.device).repeat(rows, 1)
    with poisoned():
        found = noise.gumbel_all(seeds, choices, positions, vocabulary), noise.gumbel(seeds, choices, positions, ids)
    with dispatch.forced("reference"):
        expected = noise.gumbel_all(keys[0], keys[1], keys[2], vocabulary)
    return float(sum((one.cpu().view(torch.int32) != expected.view(torch.int32)).sum() for one in found))


def tokens(bench: Bench, chance: random.Random) -> float:
    """Rows for which another token is sampled than on a CPU, as a share of the tolerance; infinite for a wrong probability."""
    rows, vocabulary = (6, 300) if bench.tiny else (384, 32000)
    logits = torch.randn(rows, vocabulary) * 3
    draws, penalties, mask = _asked(rows, vocabulary, chance)
    penalized = sampling.allow(sampling.penalize(logits, penalties), mask)
    with dispatch.forced("reference"):
        expected, final = _drawn(penalized, draws)
    device = bench.device
    own = logits.to(device)
    found = sample(own, _moved(draws, device), _moved(penalties, device), mask.to(device))
    same = found.tokens.cpu() == expected
    logprobs = logits.log_softmax(-1).gather(1, expected.unsqueeze(1)).squeeze(1)
    off = max(error(found.logprobs.cpu()[same], logprobs[same], 1e-4), error(found.final.cpu()[same], final[same], 1e-4))
    if off > 1 or not own.cpu().equal(logits):
        return float("inf")
    return float((~same).sum()) / max(1.0, DIFFERENT * rows)


def _moved(columns: Any, device: torch.device) -> Any:
    return replace(columns, **{name: getattr(columns, name).to(device) for name in columns.__dataclass_fields__})


def _asked(rows: int, vocabulary: int, chance: random.Random) -> tuple[Draws, Penalties, Tensor]:
    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor([chance.choice(values) for _ in range(rows)])

    draws = Draws(
        temperature=column([0.0, 0.5, 1.0, 1.3]),
        top_k=column([0, 0, 1, 20, 200]).long(),
        top_p=column([1.0, 1.0, 0.5, 0.9, 0.99]),
        min_p=column([0.0, 0.0, 0.01, 0.2]),
        typical_p=torch.ones(rows),
        seeds=torch.randint(-(1 << 63), (1 << 63) - 1, (rows,)),
        choices=torch.arange(rows) % 3,
        positions=torch.arange(rows) * 7,
    )
    entries = 20 * rows
    bias_rows = torch.arange(0, rows, 2)
    penalties = Penalties(
        rows=torch.randint(0, rows, (entries,)),
        ids=torch.randint(0, vocabulary, (entries,)),
        output=(torch.rand(entries) < 0.6).float(),
        repetition=torch.rand(rows) + 0.7,
        frequency=torch.randn(rows),
        presence=torch.randn(rows),
        bias_rows=bias_rows,
        bias_ids=torch.randint(0, vocabulary, (len(bias_rows),)),
        bias_values=torch.randn(len(bias_rows)) * 5,
    )
    mask = torch.randint(-(1 << 31), 1 << 31, (rows, -(-vocabulary // 32))).int()
    mask[:, 0] |= 1  # every row allows at least one token
    return draws, penalties, mask


def _drawn(logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Tokens, and log-probabilities in the distribution that was sampled from, by plain torch."""
    chosen, final = logits.argmax(-1), torch.zeros(len(logits))
    rows = (draws.temperature > 0).nonzero().squeeze(1)
    own = draws.take(rows)
    for part in sampling.filtered(logits[rows], own):
        columns = sampling.draw(part, own).unsqueeze(1)
        chosen[rows[part.rows]] = (columns if part.ids is None else part.ids.gather(1, columns)).squeeze(1)
        final[rows[part.rows]] = part.scores.log_softmax(-1).gather(1, columns).squeeze(1)
    return chosen, final


def best(bench: Bench, chance: random.Random) -> float:
    """Scores, rows and tokens of the best continuations; without ties they have one order."""
    count, vocabulary = (5, 200) if bench.tiny else (40, 128256)
    logits, scores = torch.randn(count, vocabulary) * 2, torch.randn(count)
    starts = [0, *sorted(chance.sample(range(1, count), 3)), count]
    own = beam.candidates(logits.to(bench.device), scores.to(bench.device), starts, 8)
    top = beam.most_probable(logits.to(bench.device), 5)
    with dispatch.forced("reference"):
        expected, plain = beam.candidates(logits, scores, starts, 8), beam.most_probable(logits, 5)
    worst = max(error(own[0].cpu(), expected[0], 1e-4), error(top[0].cpu(), plain[0], 1e-4))
    ids = sum(
        int((mine.cpu() != theirs).sum()) for mine, theirs in [(own[1], expected[1]), (own[2], expected[2]), (top[1], plain[1])]
    )
    return worst if ids <= 2 else float("inf")  # two sums may round to one number, and then swap places
