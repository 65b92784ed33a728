"""The product of few rows with a weight, by Triton, with what stands before and after it in a decoder: the norm of the rows, SwiGLU
(or GeGLU) of the outputs, the sum with the residual stream. Knows tensors only.

Few rows cost what reading the weight costs, a hundredth of a millisecond, and then launches count: a decoder's layer takes nine of
them instead of ten, and of one row (`fused_vector`) seven. The norm of several rows comes before: within, where operands of the
matrix units come from memory without a detour, it took twice the time of the product (measured on an H200, 2026-11-26: gate and up
of an 8 B model in 117 us, by torch in 57).
"""

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from . import fused_vector
from .compilation import Compilation
from .fused_activation import behind_product
from .fused_norm import rms_norm

# In Triton's interpreter a dot of bfloat16 is garbage, so operands are widened there.
INTERPRET = bool(knobs.runtime.interpret)
# Rows of a program's tile: the least of a product on the matrix units.
ROWS = 16
# Programs below which they are made of fewer outputs, so that more processors have one.
PROGRAMS = 128
WARPS = 4


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    out: tl.tensor,  # [rows, outputs]; with ADD it holds what is added to
    x: tl.tensor,  # [rows, inputs]
    weight: tl.tensor,  # [outputs, inputs]; GATED: [2 * outputs, inputs], gates first
    bias: tl.tensor,  # as long as weight; unused without BIASED
    rows: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
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
    """One program: COLUMNS outputs of all rows."""
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    asked, wanted = row < rows, output < OUTPUTS
    deep = tl.arange(0, DEPTH)
    from_x = x + row[:, None] * x_stride + deep[None, :]
    from_weight = weight + output.to(tl.int64)[:, None] * INPUTS + deep[None, :]
    result = tl.zeros([ROWS, COLUMNS], tl.float32)
    other = tl.zeros([ROWS, COLUMNS], tl.float32)
    EVEN: tl.constexpr = INPUTS % DEPTH == 0 and OUTPUTS % COLUMNS == 0
    for first in tl.range(0, INPUTS, DEPTH, num_stages=STAGES):
        within = deep < INPUTS - first
        if INPUTS % DEPTH == 0:
            values = tl.load(from_x + first, mask=asked[:, None], other=0.0)
        else:
            values = tl.load(from_x + first, mask=asked[:, None] & within[None, :], other=0.0)
        result = dot(values, _part(from_weight + first, wanted, within, EVEN), result, WIDEN)
        if GATED:
            other = dot(values, _part(from_weight + first + OUTPUTS * INPUTS, wanted, within, EVEN), other, WIDEN)
    result = behind_product(result, other, bias, output, wanted, OUTPUTS, GATED, GELU, BIASED)
    place = out + row[:, None] * out_stride + output[None, :]
    held = asked[:, None] & wanted[None, :]
    if ADD:
        result += tl.load(place, mask=held, other=0.0).to(tl.float32)
    tl.store(place, result.to(out.dtype.element_ty), mask=held)


@triton.jit
def _part(place: tl.tensor, wanted: tl.tensor, within: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """A part of the weight: [COLUMNS, DEPTH]."""
    return tl.load(place) if EVEN else tl.load(place, mask=wanted[:, None] & within[None, :], other=0.0)


@triton.jit
def dot(left: tl.tensor, right: tl.tensor, sums: tl.tensor, WIDEN: tl.constexpr) -> tl.tensor:
    """sums + left @ right.T, in float32."""
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
    """`out`, [rows, outputs], becomes (with `add`: becomes more by) the product of x [rows, inputs], at most ROWS rows.

    weight: [outputs, inputs], dense; gains: the rows are normalized first (`operations.rms_norm`); gated: weight is [2 * outputs,
    inputs], and `reference.gated` is taken of its product, with or without gelu. x and out are views whose last dimension is dense.
    """
    rows, inputs = x.shape
    outputs = out.shape[1]
    assert rows == len(out) <= ROWS, f"{rows} rows into {len(out)}"
    assert weight.shape == (outputs * (1 + gated), inputs)
    assert weight.is_contiguous()
    assert x.stride(1) == out.stride(1) == 1
    if rows == 1:
        return fused_vector.product(x, weight, bias, out, gains=gains, epsilon=epsilon, gated=gated, gelu=gelu, add=add)
    if rows:
        if gains is not None:
            x = rms_norm(x, gains, epsilon, torch.empty_like(x))
        amd = torch.version.hip is not None
        constants = _constants(inputs, outputs, gated, add, bias is not None, amd)
        constants["GELU"] = gelu
        product_kernel[(triton.cdiv(outputs, constants["COLUMNS"]),)](
            out,
            x,
            weight,
            bias if bias is not None else weight,
            rows,
            x.stride(0),
            out.stride(0),
            **constants,
            num_warps=WARPS,
            num_stages=constants["STAGES"],
            enable_fp_fusion=True,
        )
    return out


def _constants(inputs: int, outputs: int, gated: bool, add: bool, biased: bool, amd: bool) -> dict[str, Any]:
    # 16 KiB of weight at a time, and two or three such pieces under way for each program.
    columns, depth, stages = (32, 128, 5) if gated else (32, 256, 4)
    return {
        "INPUTS": inputs,
        "OUTPUTS": outputs,
        "ROWS": ROWS,
        "COLUMNS": columns if outputs >= columns * PROGRAMS else 16,
        "DEPTH": min(depth, max(16, triton.next_power_of_2(inputs))),
        "STAGES": 2 if amd else stages,  # as in attention: little shared memory, and many waves to hide latency
        "GATED": gated,
        "ADD": add,
        "BIASED": biased,
        "WIDEN": INTERPRET,
    }


def compilations() -> list[Compilation]:
    """Those of one row, of several."""
    found = []
    for case, (kind, targets) in itertools.product(fused_vector.CASES, fused_vector.KINDS.items()):
        constants = _constants(case.inputs, case.outputs, case.gated, case.add, case.biased, kind == "amd")
        constants |= {"GELU": case.gelu, "WIDEN": False}
        pointers = dict.fromkeys(("out", "x", "weight", "bias"), "*bf16")
        numbers = {"rows": "i32", "x_stride": "i32:16", "out_stride": "i32:16"}
        found.append(
            Compilation(
                kernel=product_kernel,
                name=f"product {case.name} {kind}".rstrip(),
                signature=pointers | numbers,
                constants=constants,
                warps=WARPS,
                stages=constants["STAGES"],
                fuse=True,
                hot=True,
                targets=targets,
            )
        )
    return found
