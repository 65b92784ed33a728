"""Matrix products of one row, or of a few, with quantized weights, in Triton, without tensor cores (see `fused_quantized`, whose
form of weights is read). Knows tensors only.

    out[row, o] = factors[o] * sum over blocks b of scales[b, o] * sum over i in b of x[row, i] * (codes[o, i] - zeros[b, o])

A program computes a few outputs over all inputs, as in `fused_gemv`. Tiles for tensor cores advance by one block of inputs at a
time, so an int4 weight of 4,096 inputs took 64 steps of 0.6 us each, most of it waiting: for loads, barriers, and numbers on their
way to the tensor cores. Here a thread reads PIECE bytes of every output at a time, all of one block (in NVFP4 of two, one for each
half of the bytes), unpacks them where they are, and scales their sum: nothing is shared but the result. Codes are exact in float16,
and all else is float32.

Measured on an H200, 2026-11-27, us of 6144 x 4096 (before: the tile for tensor cores; cut: split-K in 4 parts; bfloat16 16.9):

             1 row: before  here     2 rows: before  here     4 rows: here  cut
    int4              42.0  10.6               41.7  17.5             38.0  17.6
    int8              26.4  10.4               26.7  15.9             36.2  18.4
    fp8               21.5  10.4               21.5  16.7             36.9  17.7
    fp4               66.2  10.9               65.8  18.3             37.3  24.6
    NVFP4             23.7  12.5               23.7  19.6             40.9  18.7
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import VENDORS, Compilation
from .dispatch import on_nvidia
from .small_floats import as_scale, fp4_pair_to_float16, fp4_to_float16, fp8_pair, fp8_to_float16, scale_at
from .small_integers import pair

PIECE = 8  # bytes of an output that a thread reads at a time: so many 16-bit inputs are one load, too


class Shape(NamedTuple):
    """The tile of a program, outputs x bytes of each at a time, and how it is compiled."""

    columns: int
    width: int
    warps: int
    stages: int  # 1: loads in flight are held in registers


# For one row or two. Others were slower: (2, 2048) 11.5 us in int4, (8, 1024) 13.1, with 8 warps 12.5, (8, 512) in 3 stages 14.4.
SHAPE = Shape(4, 2048, 4, 1)
MOST = 2  # rows, which are kept in registers beside the codes


@triton.jit(do_not_specialize=["rows"])
def few_rows_kernel(
    out: tl.tensor,  # [rows, OUTPUTS], dense
    x: tl.tensor,  # [rows, INPUTS]
    codes: tl.tensor,  # [OUTPUTS, INPUTS] bytes, or half as many
    scales: tl.tensor,  # [INPUTS / BLOCK, OUTPUTS] float32, for 4-bit floats bytes or `words`
    zeros: tl.tensor,  # the same, bytes; unused without ZEROS
    factors: tl.tensor,  # [OUTPUTS] float32; unused without FACTORS
    bias: tl.tensor,  # [OUTPUTS]; unused without BIASED
    rows: tl.tensor,
    x_stride: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    WIDTH: tl.constexpr,  # bytes of a run
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    MIDDLE: tl.constexpr,
    FACTORS: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    CUDA: tl.constexpr,
) -> None:
    """COLUMNS outputs of ROWS rows."""
    LENGTH: tl.constexpr = INPUTS // RUN * WIDTH  # bytes of an output
    EVEN: tl.constexpr = LENGTH % (PIECES * PIECE) == 0 and OUTPUTS % COLUMNS == 0
    # Tensors are [rows, outputs, pieces, PIECE], the last of which a thread holds, or sums without the last.
    row = tl.arange(0, ROWS)[:, None, None]
    output = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :, None]
    asked, wanted = row < rows, output < OUTPUTS
    place = tl.arange(0, PIECES)[None, None, :] * PIECE
    byte = tl.arange(0, PIECE)[None, None, None, :]
    from_x = x + row.to(tl.int64) * x_stride
    from_codes = codes + output.to(tl.int64) * LENGTH
    sums = tl.zeros([ROWS, COLUMNS, PIECES], tl.float32)
    for begin in tl.range(0, LENGTH, PIECES * PIECE, num_stages=STAGES):
        start = begin + place
        within = start < LENGTH
        held_at = wanted & within
        there = (asked & within)[:, :, :, None]
        run, inside = start // WIDTH, start % WIDTH
        block = run * RUN // BLOCK * OUTPUTS + output
        codes_at = (from_codes + start)[:, :, :, None] + byte
        first_at = (from_x + run * RUN + inside)[:, :, :, None] + byte
        held = tl.load(codes_at, cache_modifier=".cg") if EVEN else tl.load(codes_at, mask=held_at[:, :, :, None], other=0)
        first = tl.load(first_at) if EVEN and ROWS == 1 else tl.load(first_at, mask=there, other=0.0)
        second = first
        if WIDTH < RUN:
            second = tl.load(first_at + WIDTH) if EVEN and ROWS == 1 else tl.load(first_at + WIDTH, mask=there, other=0.0)
        # Unless a block is all inputs: its scale is the result's.
        scale = _scales(scales + block, held_at, EVEN) if BLOCK < INPUTS else 1.0
        other = _scales(scales + block + OUTPUTS, held_at, EVEN) if KIND == "nvfp4" else 1.0
        zero = tl.full([1, COLUMNS, PIECES], MIDDLE, tl.int32)
        if ZEROS:
            zero = _scales(zeros + block, held_at, EVEN).to(tl.int32)
        part = tl.zeros_like(sums)
        if KIND == "nvfp4":
            low, high = _fp4_halves(held, CUDA)
            bit = inside // 16 * 8
            sums += _products(first, low, part) * _nvfp4_scale(scale, bit)
            sums += _products(second, high, part) * _nvfp4_scale(other, bit)
        else:
            if WIDTH < RUN:
                if KIND == "fp4":
                    low, high = _fp4_halves(held, CUDA)
                else:
                    low, high = pair(held, zero[:, :, :, None], tl.float16, KIND, CUDA)
                part = _products(second, high, _products(first, low, part))
            else:
                part = _products(first, _numbers(held, zero[:, :, :, None], KIND, CUDA), part)
            if BLOCK < INPUTS:
                part *= as_scale(scale, KIND, False)
            sums += part
    result = tl.sum(sums, 2)
    row, output = tl.arange(0, ROWS)[:, None], tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    asked, wanted = row < rows, output < OUTPUTS
    if BLOCK >= INPUTS:
        result *= scale_at(scales + output, wanted, KIND, False)
    if FACTORS:
        result *= tl.load(factors + output, mask=wanted, other=0.0)
    if BIASED:
        result += tl.load(bias + output, mask=wanted, other=0.0).to(tl.float32)
    tl.store(out + row * OUTPUTS + output, result.to(out.dtype.element_ty), mask=asked & wanted)


@triton.jit
def _nvfp4_scale(word: tl.tensor, bit: tl.tensor) -> tl.tensor:
    """The scale in some bits of a word, for `_fp4_halves`, and 2**8 times smaller (see `read_factors`)."""
    return fp8_to_float16(word.to(tl.int32) >> bit & 255).to(tl.float32) * 16384.0


@triton.jit
def _scales(place: tl.tensor, wanted: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """Scales or zero points."""
    return tl.load(place) if EVEN else tl.load(place, mask=wanted, other=0)


@triton.jit
def _products(x: tl.tensor, numbers: tl.tensor, sums: tl.tensor) -> tl.tensor:
    """sums + the products along the last dimension, PIECE long, which a thread holds: one after the other, each an instruction.
    `tl.sum` would take half as many more."""
    x0, x1, x2, x3, x4, x5, x6, x7 = _eight(x)
    n0, n1, n2, n3, n4, n5, n6, n7 = _eight(numbers)
    sums += x0 * n0
    sums += x1 * n1
    sums += x2 * n2
    sums += x3 * n3
    sums += x4 * n4
    sums += x5 * n5
    sums += x6 * n6
    return sums + x7 * n7


@triton.jit
def _eight(values: tl.tensor) -> tl.tensor:
    """The eight parts of a tensor along its last dimension, in float32."""
    even, odd = _halves(values.to(tl.float32))
    even_0, even_1 = _halves(even)
    odd_0, odd_1 = _halves(odd)
    v0, v4 = _halves(even_0)
    v2, v6 = _halves(even_1)
    v1, v5 = _halves(odd_0)
    v3, v7 = _halves(odd_1)
    return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
def _halves(values: tl.tensor) -> tl.tensor:
    """The even and the odd places of the last dimension. If two, they are numbers each."""
    A: tl.constexpr = values.shape[0]
    B: tl.constexpr = values.shape[1]
    C: tl.constexpr = values.shape[2]
    D: tl.constexpr = values.shape[3] // 2
    first, second = tl.split(tl.reshape(values, [A, B, C, D, 2]) if D > 1 else values)
    return first, second


@triton.jit
def _fp4_halves(codes: tl.tensor, CUDA: tl.constexpr) -> tl.tensor:
    """4-bit floats of bytes' low halves, and of their high ones, as `fp4_to_float16` gives them."""
    if CUDA:
        low, high = fp4_pair_to_float16(codes)
    else:
        low, high = fp4_to_float16(codes & 15), fp4_to_float16(codes >> 4)
    return low, high


@triton.jit
def _numbers(codes: tl.tensor, zero: tl.tensor, KIND: tl.constexpr, CUDA: tl.constexpr) -> tl.tensor:
    """8-bit codes in float32, without their scales. An integer becomes one by `or`, added to 2**23: a conversion takes the time of
    four other instructions."""
    if KIND == "fp8":
        return (fp8_pair(codes) if CUDA else fp8_to_float16(codes)).to(tl.float32)
    return (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (zero + 8388608).to(tl.float32)


def product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    factors: Tensor | None,
    bias: Tensor | None,
    constants: dict[str, Any],
) -> Tensor:
    """The product of 1 to MOST rows with a weight in `fused_quantized`'s form. constants: its `format_constants`."""
    assert x.stride(1) == 1
    rows, outputs = len(x), len(codes)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    high = triton.next_power_of_2(rows)
    shape = _shape(codes.shape[1], torch.version.hip is not None)
    few_rows_kernel[(triton.cdiv(outputs, shape.columns),)](
        out,
        x,
        codes,
        scales,
        zeros if zeros is not None else codes,
        factors if factors is not None else scales,
        bias if bias is not None else out,
        rows,
        x.stride(0),
        **constants,
        **_constants(outputs, high, bias is not None, shape),
        CUDA=on_nvidia(x.device),
        num_warps=shape.warps,
        num_stages=shape.stages,
        enable_fp_fusion=True,
    )
    return out


def _shape(length: int, amd: bool) -> Shape:
    """The tile for outputs of `length` bytes."""
    width = min(SHAPE.width, max(64, triton.next_power_of_2(length)))
    return SHAPE._replace(width=width, warps=SHAPE.warps // 2 if amd else SHAPE.warps)


def _constants(outputs: int, rows: int, biased: bool, shape: Shape) -> dict[str, Any]:
    return {
        "OUTPUTS": outputs,
        "BIASED": biased,
        "ROWS": rows,
        "COLUMNS": shape.columns,
        "PIECES": shape.width // PIECE,
        "PIECE": PIECE,
        "STAGES": shape.stages,
    }


def compilation(
    name: str, rows: int, outputs: int, biased: bool, constants: dict[str, Any], pointers: dict[str, str], kind: str
) -> Compilation:
    """The kernel for so many rows, for a kind of accelerator (a key of VENDORS). constants, pointers: `fused_quantized`'s."""
    shape = _shape(constants["INPUTS"] // constants["RUN"] * constants["WIDTH"], kind == "amd")
    return Compilation(
        kernel=few_rows_kernel,
        name=f"few rows {name}",
        types=pointers | {"rows": "i32", "x_stride": "i32:16"},
        constants={**constants, **_constants(outputs, rows, biased, shape), "CUDA": kind != "amd"},
        warps=shape.warps,
        stages=shape.stages,
        fuse=True,
        hot=True,
        targets=VENDORS[kind],
    )
