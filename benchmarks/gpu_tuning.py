"""Autotuning experiments for the GPU kernels: tile shapes, how finely rows are split, and which GEMMs use our own kernels.

Each line gives a time relative to the setting in use now; below 1 is better. What to change is named in `found in`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from penstock.benchmarks.gpu_attention import calls_of, even_rows, world_of
from penstock.benchmarks.gpu_measure import Bench, Call, replaced
from penstock.benchmarks.gpu_report import Line, failed
from penstock.benchmarks.gpu_worlds import tree
from penstock.kernels import (
    codes,
    dispatch,
    fused_gemv,
    fused_quantized,
    fused_skinny_gemm,
    operations,
    paged_attention,
    quantized,
    work_list,
)
from penstock.kernels.attention import Row
from penstock.kernels.linear import Invariance, Weight
from penstock.kernels.work_list import Tile

SECTION = "tuning"
TILES, CUTS, PRODUCT, VECTOR = "paged_attention", "work_list.ITEMS_PER_PROCESSOR", "fused_skinny_gemm._shape", "fused_gemv._shape"
# Rows, keys, warps, stages.
ONE = [(64, 64, 4, 5), (16, 64, 4, 5), (16, 64, 4, 7), (16, 128, 4, 3), (16, 128, 4, 4), (16, 64, 2, 5), (16, 64, 8, 5)]
FEW = [(64, 64, 4, 4), (64, 32, 4, 5), (64, 64, 8, 5), (64, 128, 8, 4)]
MANY = [(128, 64, 8, 5), (128, 64, 8, 4), (128, 128, 8, 5), (64, 64, 4, 5), (64, 64, 4, 4), (64, 128, 4, 4)]
ITEMS = (1, 3, 4, 6, 8)
# Outputs and inputs of a program's tile, stages, warps; rows.
PRODUCTS = [(64, 128, 4, 4), (64, 128, 6, 4), (64, 64, 8, 4), (64, 256, 3, 4), (128, 64, 4, 4), (128, 128, 3, 8)]
ROWS = (16, 32, 64)
# The same for one row (GEMV), with warps before stages.
VECTORS = [(16, 512, 4, 4), (8, 1024, 4, 4), (4, 1024, 4, 1), (8, 1024, 4, 1), (4, 2048, 8, 1), (2, 2048, 4, 1), (4, 512, 2, 1)]
# Of an 8 B model: outputs, inputs, preceded by a norm, with SwiGLU, added to the residual stream.
SHAPES = {
    "queries, keys, values": (6144, 4096, True, False, False),
    "attention's output": (4096, 4096, False, False, True),
    "gate and up": (14336, 4096, True, True, False),
    "down": (4096, 14336, False, False, True),
    "vocabulary": (128256, 4096, False, False, False),
}


def measure(bench: Bench) -> None:
    """The most telling measurements first: the section ends when its time is over."""
    with dispatch.forced("triton"):
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


def _tiles(bench: Bench, what: str, kind: int, tried: Sequence[tuple[int, int, int, int]], rows: Sequence[Row]) -> None:
    made, honest = world_of(bench, rows), paged_attention.tiles_of
    usual = bench.time(calls_of(made)).seconds

    def tiles_of(tile: Tile, *shape: Any) -> tuple[Tile, ...]:
        tiles = list(honest(*shape))
        tiles[kind] = tile
        return tuple(tiles)

    for one in tried[:2] if bench.tiny else tried:
        tile = Tile(*one)
        with (
            replaced(paged_attention, "tiles_of", partial(tiles_of, tile)),
            replaced(paged_attention, "decode_tiles", lambda *shape, tile=tile: (tile,)),
        ):
            _compare(bench, f"{what}: tile of {one}", TILES, usual, lambda: calls_of(made))


def _cuts(bench: Bench, count: int, tokens: int) -> None:
    made = world_of(bench, even_rows(bench, count, tokens))
    usual = bench.time(calls_of(made)).seconds
    for items in ITEMS[:1] if bench.tiny else ITEMS:
        with replaced(work_list, "ITEMS_PER_PROCESSOR", items):
            _compare(bench, f"{count} x {tokens}: {items} items for a processor", CUTS, usual, lambda: calls_of(made))


def _products(bench: Bench, name: str) -> None:
    outputs, inputs, norm, gated, add = SHAPES[name]
    if bench.tiny:
        outputs, inputs = 32, 48
    size = 2 * outputs * inputs * (1 + gated)
    weights = [Weight(_made(bench, outputs * (1 + gated), inputs)) for _ in range(bench.copies(size))]
    gains = _made(bench, inputs) if norm else None
    for rows in (1, 2) if bench.tiny else (1, *ROWS):
        x, sums, behind = _made(bench, rows, inputs), _made(bench, rows, outputs), _made(bench, outputs)
        given = x, gains, gated, (sums, behind) if add else None
        ours = [partial(_together, weight, *given) for weight in weights]
        took = bench.time(ours)
        what = f"{name}, {rows} rows{', with the norm behind' * (add and rows > 1)}"
        ratio, against = size / bench.copy_rate / took.seconds, "of the weight's bytes at the copy's rate"
        bench.add(Line(section=SECTION, what=what, timing=took, ratio=ratio, against=against))
        apart = [partial(_apart, weight, *given) for weight in weights]
        _compare(bench, f"{what}: by torch's product", "linear.FEW", took.seconds, lambda apart=apart: apart)  # type: ignore[misc]
        if rows == 1:
            _shapes_of_one(bench, what, took.seconds, ours)
        else:
            _shapes(bench, what, took.seconds, ours, add)


def _shapes_of_one(bench: Bench, what: str, usual: float, ours: Sequence[Call]) -> None:
    for one in VECTORS[:1] if bench.tiny else VECTORS:
        with replaced(fused_gemv, "_shape", lambda *given, one=one: fused_gemv.Shape(*one)):
            _compare(bench, f"{what}: shape of {one}", VECTOR, usual, lambda: ours)


def _shapes(bench: Bench, what: str, usual: float, ours: Sequence[Call], add: bool) -> None:
    """add: the product may be split along its inputs (split-K)."""
    for parts in fused_skinny_gemm.PARTS if add and not bench.tiny else (1,):  # tiny ones have too few inputs for several
        with replaced(fused_skinny_gemm, "PARTS", (parts,)):
            if add:
                _compare(bench, f"{what}: in {parts} parts", "fused_skinny_gemm._parts", usual, lambda: ours)
            for *one, warps in PRODUCTS[:1] if bench.tiny else PRODUCTS:
                with (
                    replaced(fused_skinny_gemm, "_shape", lambda *given, one=one: fused_skinny_gemm.Shape(*one)),
                    replaced(fused_skinny_gemm, "WARPS", warps),
                ):
                    _compare(bench, f"{what}: in {parts} parts, tile of {(*one, warps)}", PRODUCT, usual, lambda: ours)


def _few_bits(bench: Bench, kind: str) -> None:
    """From how many rows on dequantizing a weight first is faster."""
    outputs, inputs = (48, 64) if bench.tiny else SHAPES["queries, keys, values"][:2]
    rounded = codes.quantize(_made(bench, outputs, inputs), kind)
    size = outputs * inputs * codes.BITS[kind] // 8
    weights = [quantized.lay_out(rounded, None, Invariance.USUAL, torch.bfloat16) for _ in range(bench.copies(size))]
    for rows in (3,) if bench.tiny else (16, 64, 128, 256, 512):
        x = _made(bench, rows, inputs)
        calls = [partial(weight, x) for weight in weights]
        with replaced(fused_quantized, "MOST", rows):
            took = bench.time(calls)
        what = f"{kind}, {rows} rows"
        bench.add(Line(section=SECTION, what=f"{what}, of codes", timing=took))
        with replaced(fused_quantized, "MOST", 0):
            _compare(bench, f"{what}: unpacked first", "fused_quantized.MOST", took.seconds, lambda calls=calls: calls)  # type: ignore[misc]


def _made(bench: Bench, *shape: int) -> torch.Tensor:
    scaled: torch.Tensor = torch.randn(*shape, device=bench.device) * shape[-1] ** -0.5
    return scaled.bfloat16()


Added = tuple[torch.Tensor, torch.Tensor]  # the residual that a product is added to, and gains of the norm after it


def _together(weight: Weight, x: torch.Tensor, gains: torch.Tensor | None, gated: bool, added: Added | None) -> torch.Tensor:
    """Fused, as `Stream` does with few rows."""
    if added is None:
        return weight.streamed(x, gains=gains, epsilon=1e-5, gated=gated)
    parts, (sums, behind) = weight.add(x, added[0]), added
    if len(x) == 1:
        return sums
    return operations.rms_norm(sums, behind, 1e-5) if parts is None else operations.add_rms_norm(parts, sums, behind, 1e-5)


def _apart(weight: Weight, x: torch.Tensor, gains: torch.Tensor | None, gated: bool, added: Added | None) -> torch.Tensor:
    """Unfused, one operation after the other; with one row the residual sum belongs to the following norm, which is not counted."""
    if gains is not None:
        x = operations.rms_norm(x, gains, 1e-5)
    found = weight.product(x)
    if added is not None and len(x) > 1:
        return operations.add_rms_norm(found, *added, 1e-5)
    return operations.gated(found) if gated else found
