"""Skinny GEMM in Triton: the product of few rows with a weight, fused with what stands before and after it in a decoder: the RMS
norm of the rows, SwiGLU (or GeGLU) of the outputs, the residual addition. Knows tensors only.

    y = rms_norm(x) @ weight.T + bias                   without a norm: x @ weight.T + bias
    out = y, or act(y[:, :outputs]) * y[:, outputs:], or out + y, or [PARTS, rows, outputs] partial sums of y

A program computes a tile of outputs of all rows, over all inputs or one part of them.

With few rows the cost is reading the weight, a hundredth of a millisecond, and then launches count: a decoder's layer takes nine of
them instead of ten, and with one row (`fused_gemv`) seven. The norm of several rows is a launch before: within, where operands of
the tensor cores come from memory without a detour, it took twice the time of the product (measured on an H200, 2026-11-26: gate and
up of an 8 B model in 117 us, by torch in 57).

The weight's rows are the M dimension of the tensor cores, of which Hopper's take 64 at least, and a step's rows are N, which may be
small: so both operands come from shared memory, where with few rows as M only the instructions of older processors would do, by way
of registers. Where that makes too few programs to saturate memory, inputs are split among several programs (split-K), and whoever
adds the product to something adds up their sums, as the norm behind does. Measured on an H200, 2026-11-26, us of the layers of an 8
B model in bfloat16 (before: programs of 32 outputs with rows as M; uncut, cut: this kernel without and with split-K, * with 6
stages instead of 4; torch's is cuBLAS):

                            16 rows: before  uncut   cut in 2, 4   torch    32 rows: uncut   cut in 2, 4   torch
    queries, keys, values                            14.5, 15.9     15.8                     15.3, 16.9     16.2
    attention's output               12.1    11.3*   10.2, 10.1     13.6             11.7*   10.5, 10.6     14.0
    down                             34.9    32.6*   30.8, 29.9     32.8             33.6*   31.1, 30.9     33.7
    vocabulary                      244.8   243.5                  252.4            249.2                  266.3
    gate and up, with SwiGLU                 56.6                   58.6             57.1                   59.9

Gate and up, measured on 2026-11-27, are by torch with the activation behind the product. More than 32 rows were not measured.
"""

import itertools
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from . import fused_gemv
from .compilation import GENERATIONS, Compilation
from .fused_activation import product_epilogue
from .fused_norm import rms_norm
from .paged_attention import TARGETS, device_class, processors_of

# In Triton's interpreter a dot of bfloat16 gives wrong results, so operands are widened to float32 there.
INTERPRET = bool(knobs.runtime.interpret)
# Rows of a step: the least height of a program's tile, and the most rows it takes.
LEAST, MOST = 16, 64
# Split-K factors, and the least inputs of a part: shorter parts are over before the first loads have arrived.
PARTS, SHORTEST = (1, 2, 4), 512
# Inputs of a part from which more pieces in flight pay: down in two parts of 7,168 takes 30.1 us instead of 30.8 with 32 rows, 29.3
# instead of 30.1 with 16, attention's output in two of 2,048 10.6 instead of 10.4, 10.1 instead of 10.0 (H200, 2026-11-27).
LONG = 4096
WARPS = 4


class Shape(NamedTuple):
    """The shape of a program's tile of the weight."""

    columns: int  # outputs
    depth: int  # inputs at a time
    stages: int


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    out: tl.tensor,  # [rows, outputs], of x's dtype or wider, with ADD the residual; or split-K sums [PARTS, rows, outputs]
    x: tl.tensor,  # [rows, inputs]
    weight: tl.tensor,  # [outputs, inputs]; GATED: [2 * outputs, inputs], gates first
    bias: tl.tensor,  # as long as weight; unused without BIASED
    rows: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    part_stride: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    ADD: tl.constexpr,
    BIASED: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """COLUMNS outputs of all rows, over one part of the inputs."""
    LENGTH: tl.constexpr = (INPUTS + PARTS * DEPTH - 1) // (PARTS * DEPTH) * DEPTH
    EVEN: tl.constexpr = INPUTS % (PARTS * DEPTH) == 0 and OUTPUTS % COLUMNS == 0
    part = tl.program_id(1)
    output, row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    asked, wanted = row < rows, output < OUTPUTS
    deep = part * LENGTH + tl.arange(0, DEPTH)
    from_x = x + row[:, None] * x_stride + deep[None, :]
    from_weight = weight + output.to(tl.int64)[:, None] * INPUTS + deep[None, :]
    result = tl.zeros([COLUMNS, ROWS], tl.float32)
    other = tl.zeros([COLUMNS, ROWS], tl.float32)
    for first in tl.range(0, LENGTH, DEPTH, num_stages=STAGES):
        within = deep < INPUTS - first
        if INPUTS % (PARTS * DEPTH) == 0:
            values = tl.load(from_x + first, mask=asked[:, None], other=0.0)
        else:
            values = tl.load(from_x + first, mask=asked[:, None] & within[None, :], other=0.0)
        result = dot(_piece(from_weight + first, wanted, within, EVEN), values, result, WIDEN)
        if GATED:
            other = dot(_piece(from_weight + first + OUTPUTS * INPUTS, wanted, within, EVEN), values, other, WIDEN)
    first_part = output + part * OUTPUTS < OUTPUTS  # the first part adds the bias
    result = product_epilogue(result, other, bias, output[:, None], first_part[:, None], OUTPUTS, GATED, GELU, BIASED)
    place = out + part * part_stride + row[None, :] * out_stride + output[:, None]
    held = asked[None, :] & wanted[:, None]
    if ADD:
        result += tl.load(place, mask=held, other=0.0).to(tl.float32)
    if PARTS == 1:
        result = result.to(x.dtype.element_ty)
    tl.store(place, result.to(out.dtype.element_ty), mask=held)


@triton.jit
def _piece(place: tl.tensor, wanted: tl.tensor, within: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """Loads a tile of the weight: [COLUMNS, DEPTH]."""
    return tl.load(place) if EVEN else tl.load(place, mask=wanted[:, None] & within[None, :], other=0.0)


@triton.jit
def dot(left: tl.tensor, right: tl.tensor, sums: tl.tensor, WIDEN: tl.constexpr) -> tl.tensor:
    """sums + left @ right.T, accumulated in float32."""
    if WIDEN:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, tl.trans(right), sums, input_precision="ieee")


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    gains: Tensor | None = None,
    epsilon: float = 0.0,
    gated: bool = False,
    gelu: bool = False,
    add: bool = False,
) -> Tensor:
    """Writes to `out`, [rows, outputs], or with `add` adds to it, the product of x [rows, inputs] of at most MOST rows.

    weight: [outputs, inputs], dense; gains: the rows are normalized first (`operations.rms_norm`); gated: weight is [2 * outputs,
    inputs], and `reference.gated` is applied to its product, with or without gelu. x and out are views whose last dimension is
    dense; results are rounded to x's dtype, also where out is wider. out may be [parts, rows, outputs] float32 instead, without
    gates: split-K sums that add up to the product (`parts_of`).
    """
    rows, inputs = x.shape
    outputs, parts = out.shape[-1], len(out) if out.dim() == 3 else 1
    assert rows == out.shape[-2] <= MOST, f"{rows} rows into {out.shape[-2]}"
    assert weight.shape == (outputs * (1 + gated), inputs)
    assert weight.is_contiguous()
    assert x.stride(1) == out.stride(-1) == 1
    assert parts == 1 or not (gated or add)
    if rows == 1 == parts:
        return fused_gemv.product(x, weight, bias, out, gains=gains, epsilon=epsilon, gated=gated, gelu=gelu, add=add)
    if rows:
        if gains is not None:
            x = rms_norm(x, gains, epsilon, torch.empty_like(x))
        constants = _constants(rows, inputs, outputs, parts, gated, x.element_size(), *_machine(x.device))
        product_kernel[(triton.cdiv(outputs, constants["COLUMNS"]), parts)](
            out,
            x,
            weight,
            bias if bias is not None else weight,
            rows,
            x.stride(0),
            out.stride(-2),
            out.stride(0) if parts > 1 else 0,
            **constants,
            GATED=gated,
            GELU=gelu,
            ADD=add,
            BIASED=bias is not None,
            WIDEN=INTERPRET,
            num_warps=WARPS,
            num_stages=constants["STAGES"],
            enable_fp_fusion=True,
        )
    return out


def parts_of(x: Tensor, weight: Tensor) -> int:
    """The best split-K factor of their product, where the caller adds up the parts."""
    return _parts(len(x), weight.shape[1], weight.shape[0], _machine(x.device)[1]) if len(x) > 1 else 1


@cache
def _machine(device: torch.device) -> tuple[int, int]:
    """The device's class (`paged_attention.device_class`) and its processors (SMs): cached, since a step needs them hundreds of
    times."""
    return device_class(device), processors_of(device)


def _parts(rows: int, inputs: int, outputs: int, processors: int) -> int:
    """The smallest split-K factor that gives three of four processors a program: two do that for 4,096 outputs on an H200, and
    four, with twice as much to be added up, are no faster."""
    tiles = triton.cdiv(outputs, _columns(rows))
    able = [parts for parts in PARTS if parts == 1 or inputs >= parts * SHORTEST]
    return next((parts for parts in able if 4 * tiles * parts >= 3 * processors), able[-1])


def _columns(rows: int) -> int:
    """Outputs of a tile. With more rows it has twice the outputs and half the inputs at a time, so that all programs together read
    rows half as often."""
    return 64 if rows <= 32 else 128


def _shape(rows: int, inputs: int, outputs: int, parts: int, gated: bool, generation: int, processors: int) -> Shape:
    """16 KiB of the weight at a time, and three such pieces in flight while a fourth is multiplied, for two programs on a
    processor; five for one that has the processor alone and LONG inputs or more. Measured on Hopper."""
    columns = _columns(rows)
    if gated and generation == 9 and rows <= LEAST:
        shape = Shape(64, 256, 3)
    elif gated:
        shape = Shape(64, 64, 4)
    elif generation == 9 and parts * triton.cdiv(outputs, columns) <= processors and inputs >= parts * LONG:
        shape = Shape(columns, 8192 // columns, 6)
    else:
        shape = Shape(columns, 8192 // columns, 4)
    return shape if generation else shape._replace(stages=2)  # as in attention: little shared memory, and many waves hide latency


def _constants(
    rows: int, inputs: int, outputs: int, parts: int, gated: bool, size: int, generation: int, processors: int
) -> dict[str, Any]:
    """size: bytes of a number."""
    columns, depth, stages = _shape(rows, inputs, outputs, parts, gated, generation, processors)
    return {
        "INPUTS": inputs,
        "OUTPUTS": outputs,
        "PARTS": parts,
        "ROWS": max(LEAST, triton.next_power_of_2(rows)),
        "COLUMNS": columns,
        "DEPTH": min(2 * depth // size, max(16, triton.next_power_of_2(triton.cdiv(inputs, parts)))),
        "STAGES": stages,
    }


def compilations() -> list[Compilation]:
    """All cases with up to 16, 32 and 64 rows."""
    found = []
    for case, rows, (generation, targets) in itertools.product(fused_gemv.CASES, (16, 32, 64), TARGETS.items()):
        parts = _parts(rows, case.inputs, case.outputs, 132) if case.add else 1
        constants = _constants(rows, case.inputs, case.outputs, parts, case.gated, 2, generation, 132)
        constants |= {"GATED": case.gated, "GELU": case.gelu, "ADD": case.add and parts == 1, "BIASED": case.biased, "WIDEN": False}
        pointers = {"out": "*fp32" if parts > 1 else "*bf16"} | dict.fromkeys(("x", "weight", "bias"), "*bf16")
        numbers = {"rows": "i32"} | dict.fromkeys(("x_stride", "out_stride", "part_stride"), "i32:16")
        found.append(
            Compilation(
                kernel=product_kernel,
                name=f"product {case.name} {rows} {GENERATIONS[generation]}".rstrip(),
                types=pointers | numbers,
                constants=constants,
                warps=WARPS,
                stages=constants["STAGES"],
                fuse=True,
                hot=True,
                targets=targets,
            )
        )
    return found
