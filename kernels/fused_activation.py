"""SwiGLU and GeGLU (Shazeer 2020, arXiv:2002.05202) in Triton, and activations as other kernels have them within.

    out[token, i] = act(gate_up[token, i]) * gate_up[token, size + i]        act: silu, or gelu by its tanh approximation

A program computes BLOCK_SIZE outputs of one token. The reference is `reference.gated`; results are rounded to the dtype where they
are there, except with a clamp, where they are rounded once.
"""

import triton
import triton.language as tl
from torch import Tensor

from .compilation import Compilation
from .reference import PLAIN, Activation

BLOCK_SIZE = 1024
WARPS = 4


@triton.jit
def silu_or_gelu(gate: tl.tensor, GELU: tl.constexpr) -> tl.tensor:
    """silu, or gelu by its tanh approximation. gate: float32. Gelu's (1 + tanh(x)) / 2 is 1 / (1 + exp(-2 x))."""
    inner = gate
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    return gate / (1.0 + tl.exp(-inner))


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), as in torch linear beyond 20. Where exp(x) is small, the first terms of the series: rounding would take
    digits from 1 + exp(x), below -17 all of them. x: float32."""
    power = tl.exp(tl.minimum(x, 20.0))
    small = power * (1.0 - power * (0.5 - power * (1.0 / 3.0 - power * 0.25)))
    return tl.where(x > 20.0, x, tl.where(power < 0.03, small, tl.log(1.0 + power)))


@triton.jit
def limited(gate: tl.tensor, up: tl.tensor, LIMIT: tl.constexpr, STEEP: tl.constexpr, BEHIND: tl.constexpr) -> tl.tensor:
    """As `reference.gated` with a clamp. gate, up: float32."""
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    if not BEHIND:
        gate = tl.minimum(gate, LIMIT)
    steepness: tl.constexpr = 1.702 if STEEP else 1.0
    gate = gate / (1.0 + tl.exp(-steepness * gate))
    if BEHIND:
        gate = tl.minimum(gate, LIMIT)
    more: tl.constexpr = 1.0 if STEEP else 0.0
    return gate * (up + more)


@triton.jit
def product_epilogue(
    result: tl.tensor,  # float32: a product's outputs; with GATED, those of the gates
    other: tl.tensor,  # likewise, of what the gates multiply; unused without GATED
    bias: tl.tensor,  # [OUTPUTS], twice as long with GATED; unused without BIASED
    output: tl.tensor,  # indices of these outputs, in a shape that broadcasts with the result's
    wanted: tl.tensor,  # likewise: whether they exist
    OUTPUTS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BIASED: tl.constexpr,
) -> tl.tensor:
    """The epilogue of a product: biases and gates."""
    if BIASED:
        result += tl.load(bias + output, mask=wanted, other=0.0).to(tl.float32)
        if GATED:
            other += tl.load(bias + OUTPUTS + output, mask=wanted, other=0.0).to(tl.float32)
    if GATED:
        result = silu_or_gelu(result, GELU) * other
    return result


@triton.jit
def gated_kernel(
    gate_up: tl.tensor,  # [tokens, 2 * size]
    out: tl.tensor,  # [tokens, size]
    size: tl.tensor,
    gate_up_stride: tl.tensor,
    out_stride: tl.tensor,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    LIMIT: tl.constexpr,  # 0: no clamp
    STEEP: tl.constexpr,
    BEHIND: tl.constexpr,
) -> None:
    """BLOCK elements of one token. Tokens are the first axis of the grid, which may have 2^31 programs."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + token * gate_up_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * gate_up_stride + size + column, mask=inside, other=0.0).to(tl.float32)
    if LIMIT > 0:
        found = limited(gate, up, LIMIT, STEEP, BEHIND)
    else:
        found = silu_or_gelu(gate, GELU).to(gate_up.dtype.element_ty).to(tl.float32) * up
    tl.store(out + token * out_stride + column, found.to(out.dtype.element_ty), mask=inside)


def gated(gate_up: Tensor, out: Tensor, how: Activation = PLAIN) -> Tensor:
    """`reference.gated` into `out`. gate_up: [tokens, 2 * size], out: [tokens, size], views whose last dimension is dense."""
    tokens, size = out.shape
    assert gate_up.shape == (tokens, 2 * size)
    assert gate_up.stride(1) == out.stride(1) == 1
    if tokens:
        grid = (tokens, triton.cdiv(size, BLOCK_SIZE))
        strides = gate_up.stride(0), out.stride(0)
        gated_kernel[grid](gate_up, out, size, *strides, BLOCK=BLOCK_SIZE, **how.own, num_warps=WARPS, enable_fp_fusion=False)
    return out


def compilations() -> list[Compilation]:
    """Each dtype of weights with each activation."""
    return [
        Compilation(
            kernel=gated_kernel,
            name=f"{'geglu' if how.gelu else 'swiglu'} {dtype}{' limited' * (how.limit > 0)}",
            types={
                "gate_up": f"*{dtype}",
                "out": f"*{dtype}",
                "size": "i32:16",
                "gate_up_stride": "i32:16",
                "out_stride": "i32:16",
            },
            constants={"BLOCK": BLOCK_SIZE, **how.own},
            warps=WARPS,
            hot=True,
        )
        for dtype in ("bf16", "fp16", "fp32")
        for how in (PLAIN, Activation(gelu=True), Activation(limit=7.0))
    ]
