"""Batch-invariant GEMM in Triton: the product of any number of rows with a weight, where no row's result depends on the others by a
single bit: not on how many they are, where it stands among them, or what they hold. Knows tensors only.

    out[row, o] = bias[o] + sum over i of x[row, i] * weight[o, i]          in ascending order of i

torch's own product is not like that: for another number of rows cuBLAS takes another kernel, with other tiles or with sums split
among programs, and sums in another order are rounded differently (He et al. 2025, Thinking Machines Lab, "Defeating Nondeterminism
in LLM Inference"). Here one program makes the whole sum of an output, in float32, inputs in ascending order, and the tile depends
on dtype, weight and device alone. Rows of another stride or alignment are loaded by other instructions, but multiplied by the same.
The price is that few rows are computed as a whole tile.

Another kind of device or another version of Triton may give other bits.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import GENERATIONS, Compilation
from .fused_skinny_gemm import INTERPRET, dot
from .paged_attention import TARGETS, device_class

# Row tiles that share a pass over the weight, so that it is read from memory once for all of them. What the programs that run at
# once, some 300, read of rows and weight is least where their part of the result is about square.
BAND = 16


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile that one program computes, and how the program is compiled."""

    rows: int
    columns: int  # outputs
    depth: int  # inputs at a time
    warps: int
    stages: int


def tile_of(dtype: torch.dtype, generation: int, inputs: int) -> Tile:
    """The tile for these products. generation: of `paged_attention.device_class`. Nothing here may depend on the rows: their
    results would.

    Not measured yet. 64 rows are the least that four warps of Hopper multiply at once; with more, steps of few rows would wait for
    the tensor cores instead of the weight. With 64 outputs instead of 128 more processors would have a program where there are few
    rows, but prompts would read a third more from L2. Two programs fit on a processor, three on an A100's.
    """
    if dtype == torch.float32:  # float32 products are computed in registers, except on AMD
        tile = Tile(64, 64, 32, 4, 2) if generation == 0 else Tile(64, 64, 16, 4, 5)
    elif generation == 0:  # as in attention: little shared memory, and many waves to hide latency
        tile = Tile(64, 64, 128, 4, 2)
    elif generation == 8:
        tile = Tile(64, 128, 32, 4, 5)
    else:
        tile = Tile(64, 128, 64, 4, 4)
    # Rows of a weight that are not aligned to 16 bytes are loaded number by number, and an address takes two registers.
    return tile if inputs * dtype.itemsize % 16 == 0 else replace(tile, depth=16)


@triton.jit(do_not_specialize=["rows"])
def invariant_kernel(
    out: tl.tensor,  # [rows, outputs]
    x: tl.tensor,  # [rows, inputs]
    weight: tl.tensor,  # [outputs, inputs]
    bias: tl.tensor,  # [outputs]; unused without BIASED
    rows: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    BAND: tl.constexpr,
    BIASED: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """COLUMNS outputs of ROWS rows. Neighbouring programs are the tiles of a band with the same outputs, then with the next."""
    ACROSS: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    top = tl.program_id(0) // (BAND * ACROSS) * BAND
    height = tl.minimum((rows + ROWS - 1) // ROWS - top, BAND)  # the last band may be lower
    place = tl.program_id(0) - top * ACROSS
    row = ((top + place % height) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    output = (place // height * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    asked, wanted = row < rows, output < OUTPUTS
    deep = tl.arange(0, DEPTH)
    from_x = x + row[:, None] * x_stride + deep[None, :]
    from_weight = weight + output[:, None] * INPUTS + deep[None, :]
    result = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, INPUTS, DEPTH, num_stages=STAGES):
        within = deep < INPUTS - first
        if INPUTS % DEPTH == 0:
            values = tl.load(from_x + first, mask=asked[:, None], other=0.0)
        else:
            values = tl.load(from_x + first, mask=asked[:, None] & within[None, :], other=0.0)
        if INPUTS % DEPTH == 0 and OUTPUTS % COLUMNS == 0:
            part = tl.load(from_weight + first)
        else:
            part = tl.load(from_weight + first, mask=wanted[:, None] & within[None, :], other=0.0)
        result = dot(values, part, result, WIDEN)
    if BIASED:
        result += tl.load(bias + output, mask=wanted, other=0.0).to(tl.float32)[None, :]
    to = out + row[:, None] * out_stride + output[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=asked[:, None] & wanted[None, :])


def product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Writes to `out`, [rows, outputs], the product of x [rows, inputs] and weight [outputs, inputs] transposed, plus bias
    [outputs].

    All are of one dtype: bfloat16, float16 or float32. x and out are views whose last dimension is dense; weight is dense.
    """
    rows, inputs = x.shape
    outputs = out.shape[1]
    assert rows == len(out), f"{rows} rows into {len(out)}"
    assert weight.shape == (outputs, inputs)
    assert bias is None or bias.shape == (outputs,)
    assert x.dtype == weight.dtype == out.dtype == (bias.dtype if bias is not None else out.dtype)
    assert weight.is_contiguous()
    assert x.stride(1) == out.stride(1) == 1
    if out.numel():
        tile = tile_of(x.dtype, device_class(x.device), inputs)
        invariant_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.columns),)](
            out,
            x,
            weight,
            bias if bias is not None else weight,
            rows,
            x.stride(0),
            out.stride(0),
            **_constants(inputs, outputs, tile, bias is not None),
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=True,
        )
    return out


def _constants(inputs: int, outputs: int, tile: Tile, biased: bool) -> dict[str, Any]:
    return {
        "INPUTS": inputs,
        "OUTPUTS": outputs,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "STAGES": tile.stages,
        "BAND": BAND,
        "BIASED": biased,
        "WIDEN": INTERPRET,
    }


def compilations() -> list[Compilation]:
    """The products of an 8 B model's layer and its vocabulary, biases, other dtypes, and odd sizes."""
    cases = {
        "queries": (4096, 6144, False, torch.bfloat16),
        "gates": (4096, 28672, False, torch.bfloat16),
        "down": (14336, 4096, False, torch.bfloat16),
        "vocabulary": (4096, 128256, False, torch.bfloat16),
        "biased": (3584, 4608, True, torch.bfloat16),
        "odd, biased": (2000, 1000, True, torch.bfloat16),
        "very odd": (2001, 1001, True, torch.bfloat16),
        "fp16": (4096, 6144, False, torch.float16),
        "fp32": (4096, 6144, False, torch.float32),
        "fp32 odd, biased": (2000, 1000, True, torch.float32),
        "fp32 very odd": (2001, 1001, True, torch.float32),
    }
    shorts = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    found = []
    for (name, (inputs, outputs, biased, dtype)), (generation, targets) in itertools.product(cases.items(), TARGETS.items()):
        tile = tile_of(dtype, generation, inputs)
        constants = _constants(inputs, outputs, tile, biased) | {"WIDEN": False}
        numbers = {"rows": "i32"} | dict.fromkeys(("x_stride", "out_stride"), "i32" if "very odd" in name else "i32:16")
        found.append(
            Compilation(
                kernel=invariant_kernel,
                name=f"invariant {name} {GENERATIONS[generation]}".rstrip(),
                types=dict.fromkeys(("out", "x", "weight", "bias"), f"*{shorts[dtype]}") | numbers,
                constants=constants,
                warps=tile.warps,
                stages=tile.stages,
                fuse=True,
                hot=True,
                targets=targets,
            )
        )
    return found
