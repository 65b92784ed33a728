"""Matrix products with quantized (4 and 8-bit) weights, in Triton. Knows tensors only.

    out[row, o] = factors[o] * sum over blocks b of scales[b, o] * sum over i in b of x[row, i] * (codes[o, i] - zeros[b, o])

A program computes COLUMNS outputs of ROWS rows, a run of inputs at a time. Codes are multiplied without their scales, integers
minus their zero point or small floats, which bfloat16 and float16 hold exactly; the sums of a block are scaled in float32. Blocks
of 16 would be short products, so NVFP4's codes are scaled first, which is exact, too (`small_floats`). One row or two need no
tensor cores (`fused_quantized_gemv`). Up to MOST rows every program dequantizes its outputs' codes as it reads them; for more rows
the whole weight is dequantized first, for torch's own product.

A program's steps follow one another, each a run, and take 0.4 to 0.8 us. So with few programs inputs are divided among several
(split-K), whose sums a second launch adds. Measured on an H200, 2026-11-27, us of 6144 x 4096 (bfloat16 takes 17.3, 17.8, 23.7):

             16 rows: uncut  in 2, 4, 8          64 rows: uncut  in 2, 4       dequantized first    256 rows: uncut  first
    int4               42.3  25.8, 18.9, 21.9              65.3  42.2, 29.9                 37.2               84.3   43.6
    int8               27.6  19.4, 18.5, 20.1              37.6  31.1, 32.9                 38.5               78.5   44.5
    fp8                21.6  17.9, 17.8, 19.1              38.3  30.9, 28.9                 39.3               84.2   46.6
    fp4                65.9  38.0, 25.7, 24.6              83.5  52.4, 43.8                 39.7              147.3   46.0
    NVFP4              23.9  19.0, 19.1, 20.2              28.5  24.3, 20.2                 36.1               53.9   42.4

Two 4-bit codes share a byte, those of a run's first half with those of its second, so that each half is a product of its own and
nothing has to be interleaved.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from . import fused_quantized_gemv
from .codes import BITS, FP4_BLOCKS, MIDDLES, QuantizedWeight, factors_of
from .compilation import VENDORS, Compilation
from .dispatch import on_nvidia
from .fused_skinny_gemm import INTERPRET, dot
from .linear import Product
from .small_floats import FP8_FACTOR, scale_at, scaled_nvfp4, words
from .small_integers import code_values, pair

MOST = 64  # most rows for this kernel, which reads every code once for each 64 of them
TYPES = {torch.bfloat16, torch.float16}  # dtypes of rows that tensor cores support
RUN = 128  # most inputs at a time; they share a scale, or are whole blocks of NVFP4
LEAST_RUN = 32
PROGRAMS = 128  # programs below which each gets fewer outputs, so that more processors have one
# Parts that inputs are divided into (split-K), and from how many programs on there are enough. A part has at least SHORTEST runs.
PARTS, ENOUGH, SHORTEST = (1, 2, 4, 8), 512, 4
SUMMED = 512  # numbers of a program of `sum_kernel`
UNPACKED = 32  # outputs of a program of `unpack_kernel`
WARPS = 4


@triton.jit(do_not_specialize=["rows"])
def quantized_kernel(
    out: tl.tensor,  # [rows, OUTPUTS], dense; with PARTS > 1 their sums, [PARTS, rows, OUTPUTS] float32
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
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    WIDEN: tl.constexpr,
    CUDA: tl.constexpr,
) -> None:
    """COLUMNS outputs of ROWS rows, over one part of the inputs."""
    LENGTH: tl.constexpr = (INPUTS // RUN + PARTS - 1) // PARTS  # runs of a part
    part_number = tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    asked, wanted = row < rows, output < OUTPUTS
    place = tl.arange(0, WIDTH)
    from_x = x + row.to(tl.int64)[:, None] * x_stride + place[None, :]
    from_codes = codes + output.to(tl.int64)[:, None] * (INPUTS // RUN * WIDTH) + place[None, :]
    result = tl.zeros([ROWS, COLUMNS], tl.float32)
    for run in tl.range(part_number * LENGTH, tl.minimum((part_number + 1) * LENGTH, INPUTS // RUN), num_stages=STAGES):
        held = tl.load(from_codes + run * WIDTH, mask=wanted[:, None], other=0)
        block = run * RUN // BLOCK * OUTPUTS + output
        first = tl.load(from_x + run * RUN, mask=asked[:, None], other=0.0)
        second = first
        if WIDTH < RUN:
            second = tl.load(from_x + run * RUN + WIDTH, mask=asked[:, None], other=0.0)
        if KIND == "nvfp4":
            low, high = scaled_nvfp4(held, scales + block, wanted, OUTPUTS, first.dtype, CUDA)
            result = dot(second, high, dot(first, low, result, WIDEN), WIDEN)
        else:
            zero = zeros_at(zeros + block, wanted, ZEROS, MIDDLE)
            part = tl.zeros([ROWS, COLUMNS], tl.float32)
            if WIDTH < RUN:
                low, high = pair(held, zero, first.dtype, KIND, CUDA)
                part = dot(second, high, dot(first, low, part, WIDEN), WIDEN)
            else:
                part = dot(first, code_values(held, zero, KIND).to(first.dtype), part, WIDEN)
            result += part * scale_at(scales + block, wanted, KIND, CUDA)[None, :]
    if FACTORS:
        result *= tl.load(factors + output, mask=wanted, other=0.0)[None, :]
    if BIASED:
        first_part = output + part_number * OUTPUTS < OUTPUTS  # the first part adds the bias
        result += tl.load(bias + output, mask=first_part, other=0.0).to(tl.float32)[None, :]
    to = out + (row + part_number * rows).to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=asked[:, None] & wanted[None, :])


@triton.jit
def sum_kernel(out: tl.tensor, sums: tl.tensor, numbers: tl.tensor, PARTS: tl.constexpr, SIZE: tl.constexpr) -> None:
    """Adds PARTS sums, [PARTS, numbers], to `numbers` results."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    held = place < numbers
    result = tl.zeros([SIZE], tl.float32)
    for part in tl.static_range(PARTS):
        result += tl.load(sums + part * numbers.to(tl.int64) + place, mask=held, other=0.0)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=held)


@triton.jit
def zeros_at(place: tl.tensor, wanted: tl.tensor, ZEROS: tl.constexpr, MIDDLE: tl.constexpr) -> tl.tensor:
    """Zero points of some outputs: [outputs, 1]."""
    return (tl.load(place, mask=wanted, other=0).to(tl.int32) if ZEROS else tl.where(wanted, MIDDLE, 0))[:, None]


@triton.jit
def unpack_kernel(
    out: tl.tensor,  # [outputs, INPUTS]
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    factors: tl.tensor,
    outputs: tl.tensor,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    WIDTH: tl.constexpr,  # bytes of a run
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    MIDDLE: tl.constexpr,
    FACTORS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Dequantizes one run of COLUMNS outputs."""
    run = tl.program_id(1)
    output = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    wanted = output < outputs
    place = tl.arange(0, WIDTH)
    line = output.to(tl.int64)[:, None]
    held = tl.load(codes + line * (INPUTS // RUN * WIDTH) + run * WIDTH + place[None, :], mask=wanted[:, None], other=0)
    block = run * RUN // BLOCK * outputs + output
    if KIND == "nvfp4":
        first, second = scaled_nvfp4(held, scales + block, wanted, outputs, tl.float32, False)
    else:
        zero = zeros_at(zeros + block, wanted, ZEROS, MIDDLE)
        scale = scale_at(scales + block, wanted, KIND, False)[:, None]
        first = code_values(held & 15 if WIDTH < RUN else held, zero, KIND).to(tl.float32) * scale
        second = code_values(held >> 4, zero, KIND).to(tl.float32) * scale if WIDTH < RUN else first
    if FACTORS:
        factor = tl.load(factors + output, mask=wanted, other=0.0)[:, None]
        first, second = first * factor, second * factor
    to = out + line * INPUTS + run * RUN + place[None, :]
    tl.store(to, first.to(out.dtype.element_ty), mask=wanted[:, None])
    if WIDTH < RUN:
        tl.store(to + WIDTH, second.to(out.dtype.element_ty), mask=wanted[:, None])


def by_triton(
    codes: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, invariant: bool = False
) -> tuple[Product, Sequence[Tensor | None]] | None:
    """The product with rows of `dtype`, and the tensors it reads. None if blocks are too short, or if tensor cores don't support
    `dtype`. invariant: one tile shape for all numbers of rows, so that none depends on others (batch invariance)."""
    outputs, inputs = codes.codes.shape
    run = _run(codes.kind, inputs, codes.block)
    if run < LEAST_RUN or dtype not in TYPES:
        return None
    held = paired(codes.codes, run) if BITS[codes.kind] == 4 else codes.codes.contiguous()
    scales, factors = read_scales(codes, run), read_factors(codes)
    zeros = codes.zeros.t().contiguous() if codes.zeros is not None else None
    constants = format_constants(codes.kind, inputs, codes.block, run, zeros is not None, factors is not None)

    def unpacked() -> Tensor:
        weight = torch.empty(outputs, inputs, dtype=dtype, device=held.device)
        grid = triton.cdiv(outputs, UNPACKED), inputs // run
        unpack_kernel[grid](
            weight, held, scales, zeros if zeros is not None else held, factors if factors is not None else scales, outputs,
            **constants, COLUMNS=UNPACKED, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        return weight

    def product(x: Tensor) -> Tensor:
        rows = len(x)
        if rows > MOST and not invariant:
            return functional.linear(x, unpacked(), bias)
        if 0 < rows <= fused_quantized_gemv.MOST and not invariant:
            return fused_quantized_gemv.product(x, held, scales, zeros, factors, bias, constants)
        assert x.stride(1) == 1
        out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
        tile = _tile(MOST if invariant else rows, outputs, codes.kind, torch.version.hip is not None)
        if rows:
            grid = triton.cdiv(outputs, tile["COLUMNS"]), triton.cdiv(rows, tile["ROWS"])
            parts = 1 if invariant else _parts(grid[0] * grid[1], inputs // run)
            sums = torch.empty(parts, rows, outputs, dtype=torch.float32, device=x.device) if parts > 1 else out
            quantized_kernel[*grid, parts](
                sums,
                x,
                held,
                scales,
                zeros if zeros is not None else held,
                factors if factors is not None else scales,
                bias if bias is not None else out,
                rows,
                x.stride(0),
                **constants,
                OUTPUTS=outputs,
                BIASED=bias is not None,
                **tile,
                PARTS=parts,
                WIDEN=INTERPRET,
                CUDA=on_nvidia(x.device),
                num_warps=WARPS,
                num_stages=tile["STAGES"],
                enable_fp_fusion=True,
            )
            if parts > 1:
                sum_kernel[(triton.cdiv(out.numel(), SUMMED),)](
                    out, sums, out.numel(), PARTS=parts, SIZE=SUMMED, num_warps=WARPS, enable_fp_fusion=False
                )
        return out

    return product, (held, scales, zeros, factors, bias)


def _run(kind: str, inputs: int, block: int) -> int:
    """Inputs that are processed at once: the largest power of two up to RUN that divides a block, or for NVFP4 that consists of
    whole blocks."""
    return whole(inputs, block) if kind == "nvfp4" else min(RUN, block & -block)


def whole(inputs: int, block: int) -> int:
    """The largest power of two up to RUN that divides the inputs, where these are whole blocks of NVFP4; else 0."""
    return min(RUN, inputs & -inputs) if block % FP4_BLOCKS["nvfp4"] == 0 else 0


def read_scales(codes: QuantizedWeight, run: int) -> Tensor:
    """Scales in the form that kernels read."""
    if codes.kind == "nvfp4":
        return words(codes.refined(FP4_BLOCKS["nvfp4"]).scales, run)
    scales = codes.scales.t()
    if codes.kind == "fp4":  # their exponents
        scales = (scales.view(torch.int32) >> 23).to(torch.uint8)
    elif codes.kind == "fp8":
        scales = scales * FP8_FACTOR
    return scales.contiguous()


def read_factors(codes: QuantizedWeight) -> Tensor | None:
    """Factors in the form that kernels read, where those of NVFP4 undo that its scaled codes are 2**8 times too small."""
    return factors_of(codes) * FP8_FACTOR if codes.kind == "nvfp4" else codes.factors


def paired(codes: Tensor, run: int) -> Tensor:
    """4-bit codes [out, in] as bytes [out, in / 2]: in each the same place of a run's first and of its second half."""
    low, high = codes.view(len(codes), -1, 2, run // 2).unbind(2)
    return (low | (high << 4)).flatten(1)


def format_constants(kind: str, inputs: int, block: int, run: int, zeros: bool, factors: bool) -> dict[str, Any]:
    """The compile-time constants that describe a weight's format."""
    return {
        "INPUTS": inputs,
        "BLOCK": run // 2 if kind == "nvfp4" else block,  # inputs whose scales are one word
        "RUN": run,
        "WIDTH": run * BITS[kind] // 8,
        "KIND": kind,
        "ZEROS": zeros,
        "MIDDLE": MIDDLES.get(kind, 0),
        "FACTORS": factors,
    }


def scale_type(kind: str, run: int) -> str:
    """Triton's type of the pointer to scales."""
    return {"fp4": "*u8", "nvfp4": f"*{'u' if run == 32 else 'i'}{run // 4}"}.get(kind, "*fp32")


def _tile(rows: int, outputs: int, kind: str, amd: bool) -> dict[str, int]:
    """The tile of one launch. With few rows the cost is that of reading codes: small tiles, with many loads in flight."""
    high = 16 if rows <= 16 else 64
    wide = 32 if kind == "fp4" and high == 64 else 64  # else ptxas would spill
    while wide > 16 and high == 16 and outputs < wide * PROGRAMS:
        wide //= 2
    return {"ROWS": high, "COLUMNS": wide, "STAGES": 2 if amd else 4 if high == 16 else 3}


def _parts(programs: int, runs: int) -> int:
    """The number of parts that inputs are divided into, for so many programs for each part."""
    possible = [parts for parts in PARTS if runs >= parts * SHORTEST]
    return next((parts for parts in possible if programs * parts >= ENOUGH), possible[-1] if possible else 1)


def compilations() -> list[Compilation]:
    """Matrices of an 8 B model, for one row and for many, in the formats of checkpoints."""
    cases = {  # kind, block, zeros, inputs, outputs, type of rows
        "int4": ("int4", 128, False, 4096, 6144, "bf16"),
        "int4, zeros": ("int4", 64, True, 4096, 6144, "fp16"),
        "int4, short blocks": ("int4", 32, True, 2048, 1000, "bf16"),
        "int8": ("int8", 14336, False, 14336, 4096, "bf16"),
        "fp8": ("fp8", 4096, False, 4096, 28672, "bf16"),
        "fp8, blocks": ("fp8", 128, False, 14336, 4096, "bf16"),
        "fp4": ("fp4", 32, False, 4096, 6144, "bf16"),
        "nvfp4": ("nvfp4", 16, False, 4096, 6144, "bf16"),
        "nvfp4, short runs": ("nvfp4", 16, False, 2720, 1000, "fp16"),
    }
    found = [
        Compilation(
            kernel=sum_kernel,
            name=f"sum of parts {kindred}".rstrip(),
            types={"out": "*bf16", "sums": "*fp32", "numbers": "i32:16"},
            constants={"PARTS": 4, "SIZE": SUMMED},
            warps=WARPS,
            targets=targets,
        )
        for kindred, targets in VENDORS.items()
    ]
    for (name, (kind, block, zeros, inputs, outputs, dtype)), (kindred, targets) in itertools.product(
        cases.items(), VENDORS.items()
    ):
        run = _run(kind, inputs, block)
        meant_by = format_constants(kind, inputs, block, run, zeros, kind == "nvfp4")
        pointers = {"out": f"*{dtype}", "codes": "*u8", "scales": scale_type(kind, run), "zeros": "*u8", "factors": "*fp32"}
        unpacking = {**meant_by, "COLUMNS": UNPACKED}
        found.append(
            Compilation(
                kernel=unpack_kernel,
                name=f"unpack {name} {kindred}".rstrip(),
                types=pointers | {"outputs": "i32:16"},
                constants=dict(unpacking),
                warps=WARPS,
                targets=targets,
            )
        )
        pointers |= {"x": f"*{dtype}", "bias": f"*{dtype}"}
        found += [
            fused_quantized_gemv.compilation(f"{name} {rows} {kindred}".rstrip(), rows, outputs, zeros, meant_by, pointers, kindred)
            for rows in range(1, fused_quantized_gemv.MOST + 1)
        ]
        for rows in (1, MOST):
            tile = _tile(rows, outputs, kind, kindred == "amd")
            parts = _parts(triton.cdiv(outputs, tile["COLUMNS"]), inputs // run)
            constants = {
                **meant_by,
                "OUTPUTS": outputs,
                "BIASED": zeros,
                **tile,
                "PARTS": parts,
                "WIDEN": False,
                "CUDA": kindred != "amd",
            }
            numbers = {"rows": "i32", "x_stride": "i32:16"}
            found.append(
                Compilation(
                    kernel=quantized_kernel,
                    name=f"quantized {name} {rows} {kindred}".rstrip(),
                    types=pointers | numbers | ({"out": "*fp32"} if parts > 1 else {}),
                    constants=dict(constants),
                    warps=WARPS,
                    stages=tile["STAGES"],
                    fuse=True,
                    hot=True,
                    targets=targets,
                )
            )
    return found
