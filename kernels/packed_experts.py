"""Mixture-of-experts products with quantized weights, in Triton: tiles as in `fused_experts`, codes as in `fused_quantized`.

Knows tensors only. The reference is `experts.LoopedExperts`. Programs dequantize their outputs' codes as they read them, for any
number of rows: experts that many tokens choose dequantize them once for every tile. A program computes COLUMNS outputs of one
tile; formulas are those of the two modules.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .codes import BITS, QuantizedWeight, zeros_of
from .compilation import VENDORS, Compilation
from .dispatch import on_nvidia
from .fused_activation import limited, silu_or_gelu
from .fused_experts import few_pairs, find
from .fused_quantized import (
    LEAST_RUN,
    RUN,
    TYPES,
    format_constants,
    paired,
    read_factors,
    read_scales,
    scale_type,
    whole,
    zeros_at,
)
from .fused_skinny_gemm import INTERPRET, dot
from .reference import PLAIN, Activation
from .small_floats import fp4_pair, scale_at, scaled_nvfp4
from .small_integers import code_values

WARPS = 4


@triton.jit
def add_run(
    result: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    wanted: tl.tensor,
    run: tl.tensor,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    MIDDLE: tl.constexpr,
    WIDEN: tl.constexpr,
    CUDA: tl.constexpr,
) -> tl.tensor:
    """Adds the products of one run of inputs (see `fused_quantized.RUN`), whose halves are `first` and `second`, or all of which is
    `first`. codes: of the outputs; scales, zeros: of their first block. OUTPUTS: rows of an expert's matrix, which may be more than
    are wanted."""
    held = tl.load(codes + run * WIDTH, mask=wanted[:, None], other=0)
    begin = run * RUN // BLOCK * OUTPUTS
    if KIND == "nvfp4":
        low, high = scaled_nvfp4(held, scales + begin, wanted, OUTPUTS, first.dtype, CUDA)
        result = dot(second, high, dot(first, low, result, WIDEN), WIDEN)
    else:
        result = add_scaled(
            result, first, second, held, scales + begin, zeros + begin, wanted, OUTPUTS, BLOCK, RUN, WIDTH, KIND, ZEROS, MIDDLE,
            WIDEN, CUDA,
        )  # fmt: skip
    return result


@triton.jit
def add_scaled(
    result: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    held: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    wanted: tl.tensor,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    MIDDLE: tl.constexpr,
    WIDEN: tl.constexpr,
    CUDA: tl.constexpr,
) -> tl.tensor:
    """The same with loaded codes `held`, whose products are scaled block by block. scales, zeros: of the run's first block."""
    zero = zeros_at(zeros, wanted, ZEROS, MIDDLE)
    part = tl.zeros(result.shape, tl.float32)
    if WIDTH == RUN:
        part = dot(first, code_values(held, zero, KIND).to(first.dtype), part, WIDEN)
    else:
        if KIND == "fp4" and CUDA:
            low, high = fp4_pair(held, first.dtype)
        else:
            low, high = code_values(held & 15, zero, KIND).to(first.dtype), held
        part = dot(first, low, part, WIDEN)
        if RUN > BLOCK:  # halves have scales of their own
            result += part * scale_at(scales, wanted, KIND, CUDA)[None, :]
            scales += OUTPUTS
            zero = zeros_at(zeros + OUTPUTS, wanted, ZEROS, MIDDLE)
            part = tl.zeros(result.shape, tl.float32)
        if KIND != "fp4" or not CUDA:
            high = code_values(held >> 4, zero, KIND).to(first.dtype)
        part = dot(second, high, part, WIDEN)
    return result + part * scale_at(scales, wanted, KIND, CUDA)[None, :]


@triton.jit
def packed_kernel(
    out: tl.tensor,  # [pairs, outputs]
    x: tl.tensor,  # [pairs / TOGETHER, inputs]
    codes: tl.tensor,  # [experts, outputs, inputs] bytes, or half as many; GATED: 2 * outputs, gates first
    scales: tl.tensor,  # [experts, inputs / BLOCK, outputs] float32, for 4-bit floats bytes or `words`; GATED: 2 * outputs
    zeros: tl.tensor,  # the same, bytes; unused without ZEROS
    factors: tl.tensor,  # [experts, outputs] float32, or twice as many; unused without FACTORS
    bias: tl.tensor,  # [experts, outputs], or twice as many; unused without BIASED
    order: tl.tensor,  # [pairs], pairs sorted by expert
    starts: tl.tensor,  # [experts + 1], where each expert's pairs begin in `order`
    shares: tl.tensor,  # [pairs] float32, router weights of results; unused with GATED and SQUARED
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    WIDTH: tl.constexpr,  # bytes of a run
    ZEROS: tl.constexpr,
    MIDDLE: tl.constexpr,
    FACTORS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    LIMIT: tl.constexpr,
    STEEP: tl.constexpr,
    BEHIND: tl.constexpr,
    SQUARED: tl.constexpr,
    BIASED: tl.constexpr,
    WIDEN: tl.constexpr,
    CUDA: tl.constexpr,
) -> None:
    """COLUMNS outputs of one tile of an expert's tokens, with the activation (first product) or the router weight (second) as
    epilogue."""
    ALL: tl.constexpr = (1 + GATED) * OUTPUTS
    expert, first_place = find(starts, tl.program_id(1), EXPERTS, SLOTS, ROWS)
    if expert < EXPERTS:
        place = first_place + tl.arange(0, ROWS)
        asked = place < tl.load(starts + expert + 1).to(tl.int32)
        pair = tl.load(order + place, mask=asked, other=0).to(tl.int64)
        output = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        wanted = output < OUTPUTS
        wide = tl.arange(0, WIDTH)
        from_x = x + (pair // TOGETHER)[:, None] * INPUTS + wide[None, :]
        own = codes + expert.to(tl.int64) * (ALL * (INPUTS // RUN * WIDTH))
        own += output.to(tl.int64)[:, None] * (INPUTS // RUN * WIDTH) + wide[None, :]
        blocks = expert.to(tl.int64) * (ALL * (INPUTS // BLOCK)) + output
        result = tl.zeros([ROWS, COLUMNS], tl.float32)
        other = tl.zeros([ROWS, COLUMNS], tl.float32)
        for run in tl.range(0, INPUTS // RUN, num_stages=STAGES):
            first = tl.load(from_x + run * RUN, mask=asked[:, None], other=0.0)
            second = first
            if WIDTH < RUN:
                second = tl.load(from_x + run * RUN + WIDTH, mask=asked[:, None], other=0.0)
            result = add_run(
                result, first, second, own, scales + blocks, zeros + blocks, wanted, run, ALL, BLOCK, RUN, WIDTH, KIND, ZEROS,
                MIDDLE, WIDEN, CUDA,
            )  # fmt: skip
            if GATED:
                later = blocks + OUTPUTS
                other = add_run(
                    other, first, second, own + OUTPUTS * (INPUTS // RUN * WIDTH), scales + later, zeros + later, wanted, run, ALL,
                    BLOCK, RUN, WIDTH, KIND, ZEROS, MIDDLE, WIDEN, CUDA,
                )  # fmt: skip
        if FACTORS:
            from_factors = factors + expert * ALL + output
            result *= tl.load(from_factors, mask=wanted, other=0.0)[None, :]
            if GATED:
                other *= tl.load(from_factors + OUTPUTS, mask=wanted, other=0.0)[None, :]
        if BIASED:
            from_bias = bias + expert * ALL + output
            result += tl.load(from_bias, mask=wanted, other=0.0).to(tl.float32)[None, :]
            if GATED:
                other += tl.load(from_bias + OUTPUTS, mask=wanted, other=0.0).to(tl.float32)[None, :]
        if GATED:
            result = limited(result, other, LIMIT, STEEP, BEHIND) if LIMIT > 0 else silu_or_gelu(result, GELU) * other
        elif SQUARED:
            result = tl.maximum(result, 0.0) * tl.maximum(result, 0.0)
        else:
            # Loaded again, in other words so that neither they nor their addresses are kept: ptxas would spill to fit one more
            # program.
            asked = first_place + tl.arange(0, ROWS) < tl.load(starts + expert + 1, cache_modifier=".ca").to(tl.int32)
            pair = tl.load(order + first_place + tl.arange(0, ROWS), mask=asked, other=0, cache_modifier=".ca").to(tl.int64)
            result *= tl.load(shares + pair, mask=asked, other=0.0)[:, None]
        to = out + pair[:, None] * OUTPUTS + output[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=asked[:, None] & wanted[None, :])


@dataclass(frozen=True, slots=True)
class Packed:
    """The quantized matrices of all experts, [experts, outputs, inputs], as the kernel reads them."""

    kind: str
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    factors: Tensor | None
    inputs: int
    block: int

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that it holds."""
        return [tensor for tensor in (self.codes, self.scales, self.zeros, self.factors) if tensor is not None]


def pack(weights: Sequence[QuantizedWeight], dtype: torch.dtype) -> Packed | None:
    """Packs the matrices of all experts for products with rows of `dtype`. None if blocks are too short or differ, if inputs are
    reordered, or if tensor cores don't support `dtype`."""
    first = weights[0]
    kind, block, inputs = first.kind, first.block, first.codes.shape[1]
    found = [read_factors(weight) for weight in weights]
    factors = [one for one in found if one is not None]
    alike = all(weight.kind == kind and weight.block == block for weight in weights) and len(factors) in (0, len(weights))
    run = _run(kind, inputs, block)
    ordered = any(weight.order is not None for weight in weights)
    if not alike or ordered or run < LEAST_RUN or dtype not in TYPES:
        return None
    shifted = any(weight.zeros is not None for weight in weights)
    return Packed(
        kind=kind,
        codes=torch.stack([paired(weight.codes, run) if BITS[kind] == 4 else weight.codes for weight in weights]),
        scales=torch.stack([read_scales(weight, run) for weight in weights]),
        zeros=torch.stack([zeros_of(weight).t() for weight in weights]).contiguous() if shifted else None,
        factors=torch.stack(factors) if factors else None,
        inputs=inputs,
        block=block,
    )


def _run(kind: str, inputs: int, block: int) -> int:
    """Inputs that are processed at once: the largest power of two up to RUN that divides the inputs and a block, or whose halves
    are a block each where codes have 4 bits; for NVFP4 as many whole blocks as fit."""
    if kind == "nvfp4":
        return min(RUN, whole(inputs, block))
    run = min(RUN, inputs & -inputs)
    within = block & -block
    return min(run, 2 * block if BITS[kind] == 4 and within == block else within)


def experts(
    x: Tensor,
    order: Tensor,
    starts: Tensor,
    shares: Tensor,
    gate_up: Packed,
    down: Packed,
    biases: tuple[Tensor, Tensor] | None,
    gates: Activation = PLAIN,
    invariant: bool = False,
) -> Tensor:
    """As `fused_experts.experts`."""
    size, hidden = down.inputs, gate_up.inputs
    assert all(tensor.is_contiguous() for tensor in (x, order, starts, shares))
    inner = torch.empty(len(order), size, dtype=x.dtype, device=x.device)
    out = torch.empty(len(order), hidden, dtype=x.dtype, device=x.device)
    first, second = biases or (None, None)
    how, plain = {"GATED": not gates.squared, **gates.constants}, {"GATED": False, **PLAIN.constants}
    if len(order):
        _product(inner, x, gate_up, order, starts, shares, first, shares.shape[1], how, invariant)
        _product(out, inner, down, order, starts, shares, second, 1, plain, invariant)
    return out


def _product(
    out: Tensor,
    x: Tensor,
    weight: Packed,
    order: Tensor,
    starts: Tensor,
    shares: Tensor,
    bias: Tensor | None,
    together: int,
    how: dict[str, Any],
    invariant: bool,
) -> None:
    pairs, outputs = out.shape
    number = len(weight.codes)
    run = _run(weight.kind, weight.inputs, weight.block)
    meant_by = format_constants(weight.kind, weight.inputs, weight.block, run, weight.zeros is not None, weight.factors is not None)
    tile = _tile(few_pairs(pairs, number, invariant), how["GATED"], torch.version.hip is not None)
    grid = triton.cdiv(outputs, tile["COLUMNS"]), min(number, pairs) + pairs // tile["ROWS"]
    packed_kernel[grid](
        out,
        x,
        weight.codes,
        weight.scales,
        weight.zeros if weight.zeros is not None else weight.codes,
        weight.factors if weight.factors is not None else weight.scales,
        bias if bias is not None else out,
        order,
        starts,
        shares,
        EXPERTS=number,
        SLOTS=triton.next_power_of_2(number),
        TOGETHER=together,
        OUTPUTS=outputs,
        BIASED=bias is not None,
        WIDEN=INTERPRET,
        CUDA=on_nvidia(x.device),
        **meant_by,
        **tile,
        **how,
        num_warps=WARPS,
        num_stages=tile["STAGES"],
        enable_fp_fusion=True,
    )


def _tile(few: bool, gated: bool, amd: bool) -> dict[str, int]:
    """The tile of one launch. With few pairs per expert the cost is that of reading codes."""
    return {"ROWS": 16 if few else 64, "COLUMNS": 64 if few and not gated else 32, "STAGES": 2 if amd else 4 if few else 3}


def compilations() -> list[Compilation]:
    """gpt-oss's experts, whole and half of them, Qwen3's 128 in 8 bits and as NVFP4, also an eighth of those, and Mixtral's 8 in 4
    bits. Nemotron 3 Nano's have no gates."""
    models = {  # experts, chosen, inputs, outputs, kind, block, zeros
        "32 x 2880 fp4": (32, 4, 2880, 2880, "fp4", 32, False),
        "32 x 1440 fp4": (32, 4, 1440, 2880, "fp4", 32, False),
        "128 x 768 fp8": (128, 8, 2048, 768, "fp8", 128, False),
        "128 x 768 nvfp4": (128, 8, 2048, 768, "nvfp4", 16, False),
        "128 x 96 nvfp4": (128, 8, 96, 2048, "nvfp4", 16, False),
        "8 x 14336 int4": (8, 2, 4096, 14336, "int4", 64, True),
        "8 x 14336 int8": (8, 2, 4096, 14336, "int8", 4096, False),
        "128 x 1856 fp8 squared": (128, 6, 2688, 1856, "fp8", 128, False),
    }
    found = []
    for (model, case), few, inward, kindred in itertools.product(models.items(), (True, False), (True, False), VENDORS):
        number, chosen, inputs, outputs, kind, block, zeros = case
        biased, squared = kind == "fp4", inward and "squared" in model
        gated = inward and not squared
        part = "gated" if gated else "up" if inward else "down"
        tile = _tile(few, gated, kindred == "amd")
        run = _run(kind, inputs, block)
        constants = {
            "EXPERTS": number,
            "SLOTS": triton.next_power_of_2(number),
            "TOGETHER": chosen if inward else 1,
            "OUTPUTS": outputs,
            "BIASED": biased,
            "GATED": gated,
            **Activation(limit=7.0 if biased and gated else 0.0, squared=squared).constants,
            "WIDEN": False,
            "CUDA": kindred != "amd",
            **format_constants(kind, inputs, block, run, zeros, kind == "nvfp4"),
            **tile,
        }
        pointers = dict.fromkeys(("out", "x", "bias"), "*bf16") | dict.fromkeys(("order", "starts"), "*i64")
        pointers |= {"codes": "*u8", "scales": scale_type(kind, run), "zeros": "*u8", "shares": "*fp32", "factors": "*fp32"}
        found.append(
            Compilation(
                kernel=packed_kernel,
                name=f"packed {model} {part} {'few' if few else 'many'} {kindred}".rstrip(),
                types=pointers,
                constants=constants,
                warps=WARPS,
                stages=tile["STAGES"],
                fuse=True,
                hot=True,
                targets=VENDORS[kindred],
            )
        )
    return found
