"""GEMV in Triton: the product of one row with a weight, fused with what stands before and after it in a decoder: the RMS norm,
SwiGLU (or GeGLU), the residual addition. `fused_skinny_gemm` is for several rows. Knows tensors only.

    y = (x * gains) @ weight.T / rms(x) + bias          without a norm: x @ weight.T + bias
    out = y, or act(y[:outputs]) * y[outputs:], or out + y

A program computes a few outputs, over all inputs.

One row is no work for tensor cores: what counts is how much of the weight is in flight. So its numbers are multiplied where they
arrive, in registers, and summed across a program at the end.

Measured on an H200, 2026-11-26, us of the layers of an 8 B model (bfloat16; behind a norm, with SwiGLU, added to the residual, as
they are there), and as a fraction of the memory's copy rate:

    queries, keys, values   14.8  0.79      torch's own  15.2
    attention's output      10.5  0.75                   13.5
    gate and up             56.5  0.97                   56.6
    down                    29.3  0.94                   32.0
    vocabulary             231.1  1.06                  247.8
"""

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import VENDORS, Compilation
from .fused_activation import product_epilogue


class Shape(NamedTuple):
    """The tile of a program, outputs x inputs at a time, and how it is compiled."""

    columns: int
    depth: int
    warps: int
    stages: int  # 1: loads in flight are held in registers


# With gates two weights are in flight; with at least MANY_OUTPUTS outputs there are so many programs that starting them counts.
# Added to the residual, which is read first: attention's output with a program for each output, all inputs at once, 9.4 us, STAGED
# 10.5; down with DEEP 28.4, STAGED 28.7 (H200, 2026-11-27).
STAGED, GATED, MANY = Shape(16, 512, 4, 4), Shape(4, 1024, 4, 1), Shape(4, 2048, 8, 1)
SINGLE, DEEP = Shape(1, 4096, 8, 1), Shape(8, 1024, 4, 1)
MANY_OUTPUTS = 1 << 15


@triton.jit
def _weights(place: tl.tensor, held: tl.tensor, EVEN: tl.constexpr, STAGES: tl.constexpr) -> tl.tensor:
    """Loads a tile of the weight, in float32: [COLUMNS, DEPTH]. It is read once, so L1 is left to the row, which all read."""
    CACHE: tl.constexpr = ".cg" if STAGES == 1 else ""
    part = tl.load(place, cache_modifier=CACHE) if EVEN else tl.load(place, mask=held, other=0.0, cache_modifier=CACHE)
    return part.to(tl.float32)


@triton.jit
def vector_kernel(
    out: tl.tensor,  # [outputs]; with ADD it holds the residual
    x: tl.tensor,  # [inputs]
    weight: tl.tensor,  # [outputs, inputs]; GATED: [2 * outputs, inputs], gates first
    gains: tl.tensor,  # [inputs]; unused without NORM
    bias: tl.tensor,  # as long as weight; unused without BIASED
    epsilon: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    ADD: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    """COLUMNS outputs."""
    EVEN: tl.constexpr = INPUTS % DEPTH == 0 and OUTPUTS % COLUMNS == 0
    output = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    wanted = output < OUTPUTS
    from_weight = weight + output.to(tl.int64)[:, None] * INPUTS
    before = tl.zeros([COLUMNS], tl.float32)
    if ADD:  # loaded by all threads that hold an output, before one of them writes it
        before = tl.load(out + output, mask=wanted, other=0.0).to(tl.float32)
        tl.debug_barrier()
    deep = tl.arange(0, DEPTH)[None, :]  # two-dimensional, so that rows and weights are in the same threads
    sums = tl.zeros([COLUMNS, DEPTH], tl.float32)
    others = tl.zeros([COLUMNS, DEPTH], tl.float32)
    squares = tl.zeros([1, DEPTH], tl.float32)
    for first in tl.range(0, INPUTS, DEPTH, num_stages=STAGES):
        within = deep < INPUTS - first
        held = wanted[:, None] & within
        part = _weights(from_weight + first + deep, held, EVEN, STAGES)
        other = part
        if GATED:
            other = _weights(from_weight + first + deep + OUTPUTS * INPUTS, held, EVEN, STAGES)
        values = tl.load(x + first + deep, mask=within, other=0.0).to(tl.float32)
        if NORM:
            squares += values * values
            values *= tl.load(gains + first + deep, mask=within, other=0.0).to(tl.float32)
        sums += part * values
        if GATED:
            others += other * values
    result = tl.sum(sums, 1)
    other = tl.sum(others, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / INPUTS + epsilon)
        result *= scale
        other *= scale
    result = product_epilogue(result, other, bias, output, wanted, OUTPUTS, GATED, GELU, BIASED)
    tl.store(out + output, (result + before).to(x.dtype.element_ty).to(out.dtype.element_ty), mask=wanted)


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
    """As `fused_skinny_gemm.product`, for one row."""
    inputs, outputs = x.shape[1], out.shape[1]
    shape = _shape(inputs, outputs, gated, add, torch.version.hip is not None)
    vector_kernel[(triton.cdiv(outputs, shape.columns),)](
        out,
        x,
        weight,
        gains if gains is not None else weight,
        bias if bias is not None else weight,
        epsilon,
        **_constants(inputs, outputs, shape),
        NORM=gains is not None,
        GATED=gated,
        GELU=gelu,
        ADD=add,
        BIASED=bias is not None,
        num_warps=shape.warps,
        num_stages=shape.stages,
        enable_fp_fusion=True,
    )
    return out


def _shape(inputs: int, outputs: int, gated: bool, add: bool, amd: bool) -> Shape:
    if gated:
        shape = GATED
    elif add:
        shape = SINGLE if inputs <= SINGLE.depth else DEEP
    else:
        shape = MANY if outputs >= MANY_OUTPUTS and inputs % MANY.depth == 0 else STAGED
    return shape._replace(depth=min(shape.depth, max(64, triton.next_power_of_2(inputs))), stages=1 if amd else shape.stages)


def _constants(inputs: int, outputs: int, shape: Shape) -> dict[str, object]:
    return {"INPUTS": inputs, "OUTPUTS": outputs, "COLUMNS": shape.columns, "DEPTH": shape.depth, "STAGES": shape.stages}


class Case(NamedTuple):
    """A product that is compiled ahead of time."""

    name: str
    inputs: int
    outputs: int
    norm: bool = False
    gated: bool = False
    gelu: bool = False
    add: bool = False
    biased: bool = False


# The products of an 8 B model's layer, its vocabulary, Gemma's gates, and one with biases and odd numbers.
CASES = (
    Case("queries", 4096, 6144, norm=True),
    Case("output", 4096, 4096, add=True),
    Case("gated", 4096, 14336, norm=True, gated=True),
    Case("down", 14336, 4096, add=True),
    Case("vocabulary", 4096, 128256),
    Case("gemma's", 3584, 14336, norm=True, gated=True, gelu=True),
    Case("odd, biased", 2000, 1000, norm=True, gated=True, biased=True),
)


def compilations() -> list[Compilation]:
    """All cases."""
    found = []
    for case, (kind, targets) in itertools.product(CASES, VENDORS.items()):
        shape = _shape(case.inputs, case.outputs, case.gated, case.add, kind == "amd")
        constants = _constants(case.inputs, case.outputs, shape)
        constants |= {"NORM": case.norm, "GATED": case.gated, "GELU": case.gelu, "ADD": case.add, "BIASED": case.biased}
        pointers = dict.fromkeys(("out", "x", "weight", "gains", "bias"), "*bf16")
        pointers |= {"gains": "*fp32"} if case.gelu else {}  # as Gemma's are
        found.append(
            Compilation(
                kernel=vector_kernel,
                name=f"vector {case.name} {kind}".rstrip(),
                types={**pointers, "epsilon": "fp32"},
                constants=constants,
                warps=shape.warps,
                stages=shape.stages,
                fuse=True,
                hot=True,
                targets=targets,
            )
        )
    return found
