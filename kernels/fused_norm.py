"""RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467) in Triton, over whole hidden states, with the residual or split-K parts
added first, or over every head. Knows tensors only.

    residual = residual + sum of x's parts                          where there is a residual; rounded to the dtype
    out = weight * residual / sqrt(mean(residual^2) + epsilon)      over the last dimension; without a residual that of x

A program holds whole rows in registers: one hidden state, or the heads of some tokens. The references are `reference.rms_norm` and
`operations.add_rms_norm`; results are rounded to the dtype where they are there.
"""

import triton
import triton.language as tl
from torch import Tensor

from .compilation import Compilation

# Elements per program: 2048 in 4 warps are 16 a thread.
TILE = 2048


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x: tl.tensor,  # [outer, inner, size], the last dimension dense; or split-K PARTS of [outer, size], to be summed
    residual: tl.tensor,  # [outer, size], overwritten with residual + x; x without ADD
    weight: tl.tensor,  # [size]
    out: tl.tensor,  # [outer, inner, size]
    rows: tl.tensor,  # outer * inner
    inner: tl.tensor,
    x_part: tl.tensor,  # strides
    x_outer: tl.tensor,
    x_inner: tl.tensor,
    residual_outer: tl.tensor,
    out_outer: tl.tensor,
    out_inner: tl.tensor,
    epsilon: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Normalizes ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    outer, place = (row // inner).to(tl.int64), row % inner
    inside = (row < rows) & (column < SIZE)
    factor = tl.load(weight + column, mask=column < SIZE, other=0.0)  # before the sum, which all wait for
    from_x = x + outer * x_outer + place * x_inner + column
    wide = tl.load(from_x, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        for part in tl.static_range(1, PARTS):
            wide += tl.load(from_x + part * x_part, mask=inside, other=0.0)
        sums = residual + outer * residual_outer + column
        values = (wide + tl.load(sums, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(sums, values, mask=inside)
        wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + epsilon)[:, None]
    normal = (wide * scale).to(residual.dtype.element_ty).to(tl.float32) * factor.to(tl.float32)
    tl.store(out + outer * out_outer + place * out_inner + column, normal.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, out: Tensor, residual: Tensor | None = None) -> Tensor:
    """`reference.rms_norm` of [rows, size] or [tokens, heads, size] into `out`, which may be x; with a residual,
    `operations.add_rms_norm`, into x only if that is no split-K parts. All are views whose last dimension is dense."""
    cut = 1 if residual is not None and x.dim() == 3 else 0
    assert x.shape[cut:] == out.shape
    assert x.dim() in (2, 3)
    assert x.stride(-1) == out.stride(-1) == weight.stride(0) == 1
    assert residual is None or (residual.shape == out.shape and out.dim() == 2 and residual.stride(-1) == 1)
    size, inner = out.shape[-1], out.shape[1] if out.dim() == 3 else 1
    rows = out.shape[0] * inner
    if not rows:
        return out
    block, height, warps = _tile(size, inner)
    norm_kernel[(triton.cdiv(rows, height),)](
        x,
        residual if residual is not None else x,
        weight,
        out,
        rows,
        inner,
        x.stride(0) if cut else 0,
        x.stride(cut),
        x.stride(1) if inner > 1 else 0,
        residual.stride(0) if residual is not None else 0,
        out.stride(0),
        out.stride(1) if inner > 1 else 0,
        epsilon,
        SIZE=size,
        BLOCK=block,
        ROWS=height,
        ADD=residual is not None,
        PARTS=len(x) if cut else 1,
        num_warps=warps,
        enable_fp_fusion=False,
    )
    return out


def _tile(size: int, inner: int) -> tuple[int, int, int]:
    """Width and height of a program's tile, and its warps. A whole hidden state has a program of its own, heads share one."""
    block = triton.next_power_of_2(size)
    assert block <= 32768, f"a norm over {size} elements does not fit into a program's registers"
    height = max(1, TILE // block) if inner > 1 else 1
    return block, height, min(16, max(1, block * height // 512))


def compilations() -> list[Compilation]:
    """The sizes of Llama and Qwen, and of their heads; Gemma's gains have 32 bits; split-K parts."""
    cases = [(1024, 1, True), (4096, 1, False), (4096, 1, True), (8192, 1, True), (16384, 1, True), (64, 8, False), (128, 8, False)]
    found = []
    kinds = [*((case, "*bf16", 1) for case in cases), ((3584, 1, True), "*fp32", 1)]
    kinds += [((size, 1, True), "*bf16", parts) for size, parts in ((4096, 2), (5120, 2), (2048, 4))]
    for (size, inner, add), gains, parts in kinds:
        block, height, warps = _tile(size, inner)
        pointers = dict.fromkeys(("x", "residual", "out"), "*bf16") | {"weight": gains} | ({"x": "*fp32"} if parts > 1 else {})
        strides = dict.fromkeys(("x_part", "x_outer", "x_inner", "residual_outer", "out_outer", "out_inner"), "i32:16")
        constants = {"SIZE": size, "BLOCK": block, "ROWS": height, "ADD": add, "PARTS": parts}
        found.append(
            Compilation(
                kernel=norm_kernel,
                name=f"norm {'add ' if add else ''}{size} x {inner}{f' of {parts} parts' if parts > 1 else ''}",
                types=pointers | {"rows": "i32", "inner": "i32"} | strides | {"epsilon": "fp32"},
                constants=dict(constants),
                warps=warps,
                hot=True,
            )
        )
    return found
