"""Paged attention against memory bandwidth, matrix throughput, variants of itself, and other implementations."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from penstock.benchmarks.gpu_latents import DEEPSEEK, TINY, Latents
from penstock.benchmarks.gpu_measure import Bench, Call, replaced
from penstock.benchmarks.gpu_peers import PEERS, Missing
from penstock.benchmarks.gpu_report import Line, Timing, failed
from penstock.benchmarks.gpu_worlds import Shape, World, tree
from penstock.kernels import paged_attention
from penstock.kernels.attention import Row

SECTION = "attention"
STREAMING = 0.92  # of the copy bandwidth, 64 rows of 4,096 tokens
SMALL = {"FlashInfer": 1.0, "vLLM's Triton": 1.5, "SGLang's Triton": 2.0}  # how many times as fast, with little work
TORCH = ("SDPA flash", "SDPA cuDNN")
SKEWED = 1.10  # times the time of the same bytes evenly spread
VERIFYING = {16: 1.05, 64: 1.4}  # nodes: times the time of one token
PREFILL = 0.75  # of the throughput of matrix products
DIFFERENCE = 0.02  # tolerated between a peer's outputs and ours: two roundings of bfloat16 around 1


def measure(bench: Bench) -> None:
    """Measures everything; other implementations last: after an illegal memory access of one of them, nothing can be measured."""
    bench.each(SECTION, (decode, prefill, latents, skewed, verification, small, shared, compiled))
    bench.each(SECTION, bench.later)


def world_of(bench: Bench, rows: Sequence[Row], shape: Shape | None = None, shared: int = 0, share: bool = True) -> World:
    """A world with so many copies that none is in the cache when its turn comes."""
    shape = shape or _shape(bench)
    tokens = shared + sum(row.context + row.queries - shared for row in rows)
    return World(shape, rows, bench.copies(tokens * shape.key_bytes), bench.device, shared, share=share)


def _shape(bench: Bench, page_size: int = 16) -> Shape:
    return Shape(kv_heads=1, ratio=2, size=64, page_size=page_size) if bench.tiny else Shape(page_size=page_size)


def _length(bench: Bench, tokens: int) -> int:
    return max(1, tokens // 128) if bench.tiny else tokens


def even_rows(bench: Bench, count: int, tokens: int) -> list[Row]:
    """Rows that decode with so many keys, their own token's included."""
    return [Row(1, _length(bench, tokens) - 1, ())] * (min(count, 3) if bench.tiny else count)


def calls_of(world: World) -> list[Call]:
    """Attention by our kernels, on each of the world's copies."""
    return [partial(world.attend, plan) for plan in world.plans()]


def _timed(bench: Bench, world: World) -> Timing:
    return bench.time(calls_of(world))


def _peers(bench: Bench, what: str, world: World, own: Timing, goals: dict[str, float], names: Sequence[str]) -> None:
    """Times other implementations, after everything else."""
    bench.later.append(lambda bench: _compared(bench, what, world, own, goals, names))


def _compared(bench: Bench, what: str, world: World, own: Timing, goals: dict[str, float], names: Sequence[str]) -> None:
    expected = world.attend(world.plans()[0])
    for name in names:
        if bench.late():
            return
        goal = goals.get(name)
        line = f"{what}: {name}"
        try:
            answers = PEERS[name](world)
            found = answers[0]().reshape(expected.shape)
            apart = (found.float() - expected.float()).abs().max().item()
            took = bench.time(answers)
        except Missing as missing:
            bench.add(failed(SECTION, line, str(missing), goal))
        except Exception as problem:  # a peer's fault is not ours
            bench.add(failed(SECTION, line, problem, goal))
        else:
            note = "" if apart <= DIFFERENCE else f"answers differ by {apart:.2g}"
            ratio = took.seconds / own.seconds
            bench.add(Line(section=SECTION, what=line, timing=took, ratio=ratio, against="of ours", goal=goal, note=note))


def decode(bench: Bench) -> None:
    """Decode, 64 rows of 4,096 tokens: bound by reading keys and values."""
    for page_size in (16, 64):
        world = world_of(bench, even_rows(bench, 64, 4096), _shape(bench, page_size))
        own = _streamed(bench, f"64 x 4k, pages of {page_size}", world, STREAMING)
        if page_size == 16:
            _peers(bench, f"64 x 4k, pages of {page_size}", world, own, {"FlashInfer": 1.0}, [*SMALL, *TORCH])
    shape = replace(_shape(bench), eight_bits=True)
    _streamed(bench, "64 x 4k, a cache of 8 bits", world_of(bench, even_rows(bench, 64, 4096), shape))


def _streamed(bench: Bench, what: str, world: World, goal: float | None = None) -> Timing:
    return bench.moved(SECTION, what, calls_of(world), world.bytes, goal)


def small(bench: Bench) -> None:
    """Few rows of few keys, where good splitting and a quick start matter."""
    for count in (1, 4, 16):
        for tokens in (512, 2048):
            if bench.late():
                return
            what = f"{count} x {tokens}"
            world = world_of(bench, even_rows(bench, count, tokens))
            own = _streamed(bench, what, world)
            _peers(bench, what, world, own, SMALL, [*SMALL, "SDPA flash"])


def skewed(bench: Bench) -> None:
    """One long row among many short ones, against the same keys evenly spread."""
    long, short = _length(bench, 32768), _length(bench, 512)
    count = len(even_rows(bench, 64, 512))
    total = long + (count - 1) * short
    uneven = _timed(bench, world_of(bench, [Row(1, long - 1, ()), *[Row(1, short - 1, ())] * (count - 1)]))
    even = _timed(bench, world_of(bench, [Row(1, total // count - 1, ())] * count))
    what, ratio = "one row of 32k among 63 of 512", uneven.seconds / even.seconds
    bench.add(Line(section=SECTION, what=what, timing=uneven, ratio=ratio, against="of even rows", goal=SKEWED, most=True))


def verification(bench: Bench) -> None:
    """Verification of draft trees on 4,096 tokens, against one token each; few nodes with the tile for many rows, too. A note gives
    the time of the arithmetic alone, at the throughput of matrix products."""
    for count in (1, 8, 64):
        plain = _timed(bench, world_of(bench, even_rows(bench, count, 4096)))
        for nodes, goal in VERIFYING.items():
            if bench.late():
                return
            rows = [Row(nodes, row.context, (), tree(nodes)) for row in even_rows(bench, count, 4096)]
            world = world_of(bench, rows)
            note = f"operations alone: {world.operations / bench.product_rate / plain.seconds:.2f}"
            _against_one(bench, f"{nodes} nodes on 4k, {count} rows", _timed(bench, world), plain, goal, note)
        rows = [Row(16, row.context, (), tree(16)) for row in even_rows(bench, count, 4096)]
        tiles_of = paged_attention.tiles_of
        with replaced(paged_attention, "tiles_of", lambda *given, tiles_of=tiles_of: tiles_of(*given)[::2]):
            took = _timed(bench, world_of(bench, rows))
        _against_one(bench, f"16 nodes on 4k, {count} rows, by the tile of many", took, plain)


def _against_one(bench: Bench, what: str, took: Timing, plain: Timing, goal: float | None = None, note: str = "") -> None:
    ratio, against = took.seconds / plain.seconds, "of one token"
    bench.add(Line(section=SECTION, what=what, timing=took, ratio=ratio, against=against, goal=goal, most=True, note=note))


def prefill(bench: Bench) -> None:
    """A prompt of 8,192 tokens at once, and the last chunk of one."""
    tokens, chunk = _length(bench, 8192), _length(bench, 512)
    for what, row, goal in (
        ("causal prefill of 8k", Row(tokens, 0, ()), PREFILL),
        ("a chunk of 512 on 7.5k", Row(chunk, tokens - chunk, ()), None),
    ):
        world = world_of(bench, [row])
        took = _timed(bench, world)
        rate, against = world.operations / took.seconds, "of the product's rate"
        value, ratio = rate / 1e12, rate / bench.product_rate
        bench.add(
            Line(section=SECTION, what=what, timing=took, value=value, unit="TFLOP/s", ratio=ratio, against=against, goal=goal)
        )
        names = [*TORCH, "FlashInfer", "vLLM's Triton"]
        goals = {"SDPA cuDNN": 0.95, "vLLM's Triton": 1.25} if goal else {}
        _peers(bench, what, world, took, goals, names)


def latents(bench: Bench) -> None:
    """The same of DeepSeek's latents, 16 heads, expanded and as they are, with the products before and behind; and a chunk that is
    so short for its context that arithmetic says to expand costs about what it saves. By that `expanded.MIN_QUERIES_TRITON` and
    `MARGIN` have to be set."""
    tokens, chunk = _length(bench, 8192), _length(bench, 192)
    for what, row in (
        ("causal prefill of 8k to expanded latents", Row(tokens, 0, ())),
        ("a chunk of 512 on 7.5k to expanded latents", Row(_length(bench, 512), _length(bench, 7680), ())),
        ("a chunk of 192 on 8k to expanded latents", Row(chunk, tokens, ())),
    ):
        pages = range(-(-(row.context + row.queries) // 16))
        world = Latents(TINY if bench.tiny else DEEPSEEK, [replace(row, pages=pages)], 16, torch.bfloat16, bench.device)
        expanded, absorbed = (bench.time([partial(world.found, world.plan(fewest)[1])]) for fewest in (1, 1 << 30))
        ratio = expanded.seconds / absorbed.seconds
        bench.add(Line(section=SECTION, what=what, timing=expanded, ratio=ratio, against="of attention to latents"))


def shared(bench: Bench) -> None:
    """64 rows that share a prefix of 4,096 tokens, and have 64 each of their own: read together and separately."""
    common = _length(bench, 4096) // 16 * 16
    count = len(even_rows(bench, 64, 64))
    rows = [Row(1, common + _length(bench, 64) - 1, ())] * count
    apart = _timed(bench, world_of(bench, rows, shared=common, share=False))
    world = world_of(bench, rows, shared=common)
    together = _streamed(bench, "64 rows share 4k, against the bytes of one", world)
    what, ratio = "64 rows share 4k", together.seconds / apart.seconds
    bench.add(
        Line(section=SECTION, what=what, timing=together, ratio=ratio, against="of reading each", note="the cache helps both")
    )


def compiled(bench: Bench) -> None:
    """FlexAttention, which takes long to compile: decode over pages of 128, which is its block, and a prompt."""
    cases = [("64 x 4k, pages of 128", even_rows(bench, 64, 4096)), ("causal prefill of 8k", [Row(_length(bench, 8192), 0, ())])]
    for what, rows in cases:
        if bench.late():
            return
        world = world_of(bench, rows, _shape(bench, 128))
        _peers(bench, what, world, _timed(bench, world), {}, ["FlexAttention"])
