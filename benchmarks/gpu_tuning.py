"""What the kernels leave to be chosen, tried: shapes of tiles, how finely rows are cut, which products go by a kernel of ours.

Each line says how long something takes in units of what is in use now; below 1 is better. What to change stands in `found in`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from penstock.benchmarks.gpu_attention import even_rows, world_of
from penstock.benchmarks.gpu_measure import Bench, Call, replaced
from penstock.benchmarks.gpu_report import Line, failed
from penstock.benchmarks.gpu_worlds import World, tree
from penstock.kernels import (
    choose,
    codes,
    fused_product,
    fused_quantized,
    fused_vector,
    operations,
    paged_attention,
    quantized,
    work,
)
from penstock.kernels.attention import Row
from penstock.kernels.linear import Exact, Product, plain
from penstock.kernels.work import Tile

SECTION = "tuning"
TILES, CUTS, PRODUCT, VECTOR = "paged_attention", "work.ITEMS_PER_PROCESSOR", "fused_product._constants", "fused_vector._shape"
# Rows, keys, warps, stages.
ONE = [(64, 64, 4, 5), (16, 64, 4, 5), (16, 64, 4, 7), (16, 128, 4, 3), (16, 128, 4, 4), (16, 64, 2, 5), (16, 64, 8, 5)]
FEW = [(64, 64, 4, 4), (64, 32, 4, 5), (64, 64, 8, 5), (64, 128, 8, 4)]
MANY = [(128, 64, 8, 5), (128, 64, 8, 4), (128, 128, 8, 5), (64, 64, 4, 5), (64, 64, 4, 4), (64, 128, 4, 4)]
ITEMS = (1, 3, 4, 6, 8)
# Outputs and inputs of a program's tile, stages, warps.
PRODUCTS = [(32, 256, 4, 4), (32, 256, 5, 4), (32, 128, 5, 4), (16, 256, 4, 4), (16, 512, 4, 4), (64, 128, 4, 4), (32, 256, 4, 8)]
# The same of one row's, with warps before stages.
VECTORS = [(16, 512, 4, 4), (8, 1024, 4, 4), (4, 1024, 4, 1), (8, 1024, 4, 1), (4, 2048, 8, 1), (2, 2048, 4, 1), (4, 512, 2, 1)]
# Of an 8 B model: outputs, inputs, behind a norm, with SwiGLU, added to the stream.
SHAPES = {
    "queries, keys, values": (6144, 4096, True, False, False),
    "attention's output": (4096, 4096, False, False, True),
    "gate and up": (14336, 4096, True, True, False),
    "down": (4096, 14336, False, False, True),
    "vocabulary": (128256, 4096, False, False, False),
}


def measure(bench: Bench) -> None:
    """The most telling first: the section ends when its time is over."""
    with choose.forced("triton"):
        cases = {
            "64 x 4k": (0, ONE, even_rows(bench, 64, 4096)),
            "prefill of 8k": (2, MANY, [Row(64 if bench.tiny else 8192, 0, ())]),
            "1 x 2k": (0, ONE, even_rows(bench, 1, 2048)),
            "16 nodes on 4k": (1, FEW, [Row(16, row.context, (), tree(16)) for row in even_rows(bench, 1, 4096)]),
        }
        parts: list[Callable[[Bench], object]] = [partial(_products, name=name) for name in SHAPES]
        parts += [partial(_tiles, what=what, kind=kind, tried=tried, rows=rows) for what, (kind, tried, rows) in cases.items()]
        parts += [partial(_few_bits, kind=kind) for kind in codes.BITS]
        for count, tokens in ((64, 4096), (16, 2048), (256, 1024), (1, 8192)):
            parts.append(partial(_cuts, count=count, tokens=tokens))
        bench.each(SECTION, parts)


def _compare(bench: Bench, what: str, where: str, usual: float, calls: Callable[[], Sequence[Call]]) -> None:
    if bench.late():
        return
    try:
        took = bench.time(calls())
    except Exception as problem:  # it may not fit: shared memory, registers
        bench.add(failed(SECTION, what, problem))
        return
    note = f"found in {where}"
    bench.add(Line(section=SECTION, what=what, timing=took, ratio=took.seconds / usual, against="of what is in use", note=note))


def _attending(made: World) -> list[Call]:
    return [partial(made.attend, plan) for plan in made.plans()]


def _tiles(bench: Bench, what: str, kind: int, tried: Sequence[tuple[int, int, int, int]], rows: Sequence[Row]) -> None:
    made, honest = world_of(bench, rows), paged_attention.tiles_of
    usual = bench.time(_attending(made)).seconds

    def tiles_of(tile: Tile, *shape: Any) -> tuple[Tile, ...]:
        tiles = list(honest(*shape))
        tiles[kind] = tile
        return tuple(tiles)

    for one in tried[:2] if bench.tiny else tried:
        tile = Tile(*one)
        with (
            replaced(paged_attention, "tiles_of", partial(tiles_of, tile)),
            replaced(paged_attention, "for_singles", lambda *shape, tile=tile: (tile,)),
        ):
            _compare(bench, f"{what}: tile of {one}", TILES, usual, lambda: _attending(made))


def _cuts(bench: Bench, count: int, tokens: int) -> None:
    made = world_of(bench, even_rows(bench, count, tokens))
    usual = bench.time(_attending(made)).seconds
    for items in ITEMS[:1] if bench.tiny else ITEMS:
        with replaced(work, "ITEMS_PER_PROCESSOR", items):
            _compare(bench, f"{count} x {tokens}: {items} items for a processor", CUTS, usual, lambda: _attending(made))


def _products(bench: Bench, name: str) -> None:
    outputs, inputs, norm, gated, add = SHAPES[name]
    if bench.tiny:
        outputs, inputs = 32, 48
    size = 2 * outputs * inputs * (1 + gated)
    weights = [_made(bench, outputs * (1 + gated), inputs) for _ in range(bench.copies(size))]
    gains = _made(bench, inputs) if norm else None
    for rows in (1, 2) if bench.tiny else (1, fused_product.ROWS):
        x, out = _made(bench, rows, inputs), _made(bench, rows, outputs)
        how = {"gains": gains, "epsilon": 1e-5, "gated": gated, "add": add}

        def ours(x: torch.Tensor = x, out: torch.Tensor = out, how: dict[str, Any] = how) -> list[Call]:
            return [partial(fused_product.product, x, weight, None, out, **how) for weight in weights]

        took = bench.time(ours())
        what, ratio = f"{name}, {rows} rows", size / bench.copy_rate / took.seconds
        bench.add(Line(section=SECTION, what=what, timing=took, ratio=ratio, against="of the weight's bytes at the copy's rate"))
        apart = [partial(_apart, x, plain(weight, None), gains, gated) for weight in weights]
        _compare(bench, f"{what}: by torch's product", "linear.FEW", took.seconds, lambda apart=apart: apart)  # type: ignore[misc]
        if rows == 1:
            for shape in VECTORS[:1] if bench.tiny else VECTORS:
                with replaced(fused_vector, "_shape", lambda *given, shape=shape: fused_vector.Shape(*shape)):
                    _compare(bench, f"{what}: shape of {shape}", VECTOR, took.seconds, ours)
            continue
        for columns, depth, stages, warps in PRODUCTS[:1] if bench.tiny else PRODUCTS:
            chosen = {"COLUMNS": columns, "DEPTH": 16 if bench.tiny else depth, "STAGES": stages}
            with (
                replaced(fused_product, "_constants", partial(_chosen, fused_product._constants, chosen)),
                replaced(fused_product, "WARPS", warps),
            ):
                _compare(bench, f"{what}: tile of {(columns, depth, stages, warps)}", PRODUCT, took.seconds, ours)


def _few_bits(bench: Bench, kind: str) -> None:
    """From how many rows on a weight is better unpacked first."""
    outputs, inputs = (48, 64) if bench.tiny else SHAPES["queries, keys, values"][:2]
    rounded = codes.quantize(_made(bench, outputs, inputs), kind)
    size = outputs * inputs * codes.BITS[kind] // 8
    weights = [quantized.lay_out(rounded, None, Exact.USUAL, torch.bfloat16) for _ in range(bench.copies(size))]
    for rows in (3,) if bench.tiny else (16, 64, 128, 256, 512):
        x = _made(bench, rows, inputs)
        calls = [partial(weight, x) for weight in weights]
        with replaced(fused_quantized, "MOST", rows):
            took = bench.time(calls)
        what = f"{kind}, {rows} rows"
        bench.add(Line(section=SECTION, what=f"{what}, of codes", timing=took))
        with replaced(fused_quantized, "MOST", 0):
            _compare(bench, f"{what}: unpacked first", "fused_quantized.MOST", took.seconds, lambda calls=calls: calls)  # type: ignore[misc]


def _chosen(honest: Callable[..., dict[str, Any]], chosen: dict[str, Any], *given: Any) -> dict[str, Any]:
    return honest(*given) | chosen


def _made(bench: Bench, *shape: int) -> torch.Tensor:
    scaled: torch.Tensor = torch.randn(*shape, device=bench.device) * shape[-1] ** -0.5
    return scaled.bfloat16()


def _apart(x: torch.Tensor, product: Product, gains: torch.Tensor | None, gated: bool) -> torch.Tensor:
    """What is done one after the other, the sum by the norm that follows."""
    if gains is not None:
        x = operations.rms_norm(x, gains, 1e-5)
    found: torch.Tensor = product(x)
    return operations.gated(found) if gated else found
