"""Grouped GEMMs in Triton, for a mixture of experts and for LoRA adapters: tokens of the same expert side by side in tiles, all
experts in one launch.

    inner[pair] = act(x[token] @ gate[expert].T) * (x[token] @ up[expert].T)        first launch, for each pair of token and expert
    out[pair] = shares[pair] * (inner[pair] @ down[expert].T)                       second

Knows tensors only. The references are `experts.LoopedExperts` and `low_rank.LoopedLowRank`. Pairs of a token and an expert are
sorted by expert; a tile is up to ROWS pairs of one, and a program computes COLUMNS outputs of a tile. Programs find their tiles
themselves, since the host doesn't know what was chosen: as many are launched as there can be, and superfluous ones exit at once (as
in vLLM's fused_moe, which pads instead).
"""

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import Compilation
from .fused_activation import limited, silu_or_gelu
from .fused_skinny_gemm import INTERPRET, dot
from .reference import PLAIN, Activation

WARPS = 4


@triton.jit
def find(starts: tl.tensor, tile: tl.tensor, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    """The expert of a tile, EXPERTS if there is no such tile, and where the tile begins among the sorted pairs."""
    slot = tl.arange(0, SLOTS)
    begins = tl.load(starts + slot, mask=slot < EXPERTS, other=0).to(tl.int32)
    ends = tl.load(starts + slot + 1, mask=slot < EXPERTS, other=0).to(tl.int32)
    tiles = (ends - begins + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(slot < expert, tiles, 0), 0)
    start = tl.sum(tl.where(slot == expert, begins, 0), 0)
    return expert, start + (tile - before) * ROWS


@triton.jit
def experts_kernel(
    out: tl.tensor,  # [pairs, outputs]
    x: tl.tensor,  # [pairs / TOGETHER, inputs]
    weight: tl.tensor,  # [experts, outputs, inputs]; GATED: [experts, 2 * outputs, inputs], gates first
    bias: tl.tensor,  # [experts, outputs], or twice as many; unused without BIASED
    order: tl.tensor,  # [pairs], pairs sorted by expert
    starts: tl.tensor,  # [experts + 1], where each expert's pairs begin in `order`
    shares: tl.tensor,  # [pairs] float32, router weights of results; unused with GATED, SQUARED and ADD
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,  # EXPERTS, rounded up to a power of two
    TOGETHER: tl.constexpr,  # pairs that share a row of x
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    LIMIT: tl.constexpr,
    STEEP: tl.constexpr,
    BEHIND: tl.constexpr,
    SQUARED: tl.constexpr,  # squared ReLU instead of gates, as `reference.squared`
    BIASED: tl.constexpr,
    ADD: tl.constexpr,  # adds to what is in `out`
    WIDEN: tl.constexpr,
) -> None:
    """COLUMNS outputs of one tile of an expert's tokens, with bias, activation, router weight or sum as epilogue."""
    expert, first_place = find(starts, tl.program_id(1), EXPERTS, SLOTS, ROWS)
    if expert < EXPERTS:
        place = first_place + tl.arange(0, ROWS)
        asked = place < tl.load(starts + expert + 1).to(tl.int32)
        pair = tl.load(order + place, mask=asked, other=0).to(tl.int64)
        output = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        wanted = output < OUTPUTS
        deep = tl.arange(0, DEPTH)
        from_x = x + (pair // TOGETHER)[:, None] * INPUTS + deep[None, :]
        from_weight = weight + expert.to(tl.int64) * ((1 + GATED) * OUTPUTS * INPUTS)
        from_weight += output.to(tl.int64)[:, None] * INPUTS + deep[None, :]
        result = tl.zeros([ROWS, COLUMNS], tl.float32)
        other = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in tl.range(0, INPUTS, DEPTH, num_stages=STAGES):
            within = deep < INPUTS - first
            values = tl.load(from_x + first, mask=asked[:, None] & within[None, :], other=0.0)
            held = wanted[:, None] & within[None, :]
            result = dot(values, tl.load(from_weight + first, mask=held, other=0.0), result, WIDEN)
            if GATED:
                other = dot(values, tl.load(from_weight + first + OUTPUTS * INPUTS, mask=held, other=0.0), other, WIDEN)
        to = out + pair[:, None] * OUTPUTS + output[None, :]
        if BIASED:
            from_bias = bias + expert * ((1 + GATED) * OUTPUTS) + output
            result += tl.load(from_bias, mask=wanted, other=0.0).to(tl.float32)[None, :]
            if GATED:
                other += tl.load(from_bias + OUTPUTS, mask=wanted, other=0.0).to(tl.float32)[None, :]
        if GATED:
            result = limited(result, other, LIMIT, STEEP, BEHIND) if LIMIT > 0 else silu_or_gelu(result, GELU) * other
        elif SQUARED:
            result = tl.maximum(result, 0.0) * tl.maximum(result, 0.0)
        elif ADD:
            result += tl.load(to, mask=asked[:, None] & wanted[None, :], other=0.0).to(tl.float32)
        else:
            result *= tl.load(shares + pair, mask=asked, other=0.0)[:, None]
        tl.store(to, result.to(out.dtype.element_ty), mask=asked[:, None] & wanted[None, :])


def experts(
    x: Tensor,
    order: Tensor,
    starts: Tensor,
    shares: Tensor,
    gate_up: Tensor,
    down: Tensor,
    biases: tuple[Tensor, Tensor] | None,
    gates: Activation = PLAIN,
    invariant: bool = False,
) -> Tensor:
    """Output of every expert for its tokens, times its router weight: [pairs, hidden].

    x: [tokens, hidden]; order: [pairs], sorted by expert; starts: [experts + 1], where each expert's pairs begin there; shares:
    [tokens, experts of a token] float32, router weights; gate_up: [experts, 2 * size, hidden], gates first; down: [experts, hidden,
    size]; biases: [experts, 2 * size] and [experts, hidden]; gates: the activation; `squared` ones have no gates in gate_up;
    invariant: one tile shape for all numbers of pairs, so that no result depends on others (batch invariance). All dense.
    """
    number, hidden, size = down.shape
    assert gate_up.shape == (number, (2 - gates.squared) * size, hidden)
    assert shares.shape[0] == len(x)
    assert len(order) == shares.numel()
    assert all(tensor.is_contiguous() for tensor in (x, order, starts, shares, gate_up, down))
    inner = torch.empty(len(order), size, dtype=x.dtype, device=x.device)
    out = torch.empty(len(order), hidden, dtype=x.dtype, device=x.device)
    first, second = biases or (None, None)
    if len(order):
        how: dict[str, Any] = {"together": shares.shape[1], "gated": not gates.squared, "gates": gates}
        _product(inner, x, gate_up, order, starts, shares, bias=first, invariant=invariant, **how)
        _product(out, inner, down, order, starts, shares, bias=second, invariant=invariant)
    return out


def add_products(out: Tensor, x: Tensor, weight: Tensor, order: Tensor, starts: Tensor, invariant: bool) -> None:
    """Adds to `out` [rows, outputs] the products of x [rows, inputs] with the matrices of `weight` [matrices, outputs, inputs].

    order: [rows], sorted by matrix; starts: [matrices + 1], where each one's rows begin there: rows before the first are left as
    they are. invariant: as in `experts`. All dense.
    """
    assert all(tensor.is_contiguous() for tensor in (out, x, weight, order, starts))
    if len(x):
        _product(out, x, weight, order, starts, out, add=True, invariant=invariant)


def _product(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    order: Tensor,
    starts: Tensor,
    shares: Tensor,
    *,
    bias: Tensor | None = None,
    together: int = 1,
    gated: bool = False,
    gates: Activation = PLAIN,
    add: bool = False,
    invariant: bool = False,
) -> None:
    pairs, outputs = out.shape
    number, inputs = len(weight), weight.shape[2]
    few, amd = few_pairs(pairs, number, invariant), torch.version.hip is not None
    constants = _constants(few, number, together, inputs, outputs, gated, x.element_size(), amd) | gates.constants
    constants |= {"ADD": add, "BIASED": bias is not None}
    rows = constants["ROWS"]
    # Every expert that has pairs has at most one tile that is not full.
    grid = triton.cdiv(outputs, constants["COLUMNS"]), min(number, pairs) + pairs // rows
    experts_kernel[grid](
        out,
        x,
        weight,
        bias if bias is not None else weight,
        order,
        starts,
        shares,
        **constants,
        num_warps=WARPS,
        num_stages=constants["STAGES"],
        enable_fp_fusion=True,
    )


def few_pairs(pairs: int, number: int, invariant: bool) -> bool:
    """Whether tiles have few rows: with few pairs per expert the cost is that of reading its weight. invariant: one tile shape for
    all."""
    return pairs <= 16 * number and not invariant


def _constants(
    few: bool, number: int, together: int, inputs: int, outputs: int, gated: bool, item: int, amd: bool
) -> dict[str, Any]:
    # With many pairs the tile is as high as lets two programs fit on a processor.
    depth = (128 if few else 64) * 2 // max(2, item)  # the same number of bytes for any dtype: shared memory is the limit
    return {
        "EXPERTS": number,
        "SLOTS": triton.next_power_of_2(number),
        "TOGETHER": together,
        "INPUTS": inputs,
        "OUTPUTS": outputs,
        "ROWS": 16 if few else 64,
        "COLUMNS": 32 if item > 2 or (few and gated) else 64,  # products without tensor cores need more registers
        "DEPTH": min(depth, max(16, triton.next_power_of_2(inputs))),
        "STAGES": 2 if amd else 4 if few else 3,
        "GATED": gated,
        "WIDEN": INTERPRET,
    }


def compilations() -> list[Compilation]:
    """Qwen3's 128 experts, Mixtral's 8 and gpt-oss's 32, for few tokens and for many; one in float32, whose tiles are the largest
    in bytes; Nemotron 3 Nano's 128 without gates; adapters of an 8 B model."""
    models = {
        "128 x 768": (128, 8, 2048, 768, "bf16"),
        "8 x 14336": (8, 2, 4096, 14336, "bf16"),
        "8 x 14336 fp32": (8, 2, 4096, 14336, "fp32"),
        "32 x 2880 biased": (32, 4, 2880, 2880, "bf16"),  # and with clamped gates
        "128 x 1856 squared": (128, 6, 2688, 1856, "bf16"),
    }
    kinds = {"": ("sm_80", "sm_90", "sm_100"), "amd": ("gfx942",)}
    heights = {"few": True, "many": False}
    found = []
    for (model, (number, count, hidden, size, dtype)), (height, few), inward, kind in itertools.product(
        models.items(), heights.items(), (True, False), kinds
    ):
        inputs, outputs = (hidden, size) if inward else (size, hidden)
        together, item = count if inward else 1, 4 if dtype == "fp32" else 2
        biased, squared = "biased" in model, inward and "squared" in model
        gated = inward and not squared
        constants = _constants(few, number, together, inputs, outputs, gated, item, kind == "amd")
        constants |= {"ADD": False, "BIASED": biased, **Activation(limit=7.0 * biased, squared=squared).constants}
        name = f"experts {model} {'gated' if gated else 'up' if inward else 'down'} {height} {kind}".rstrip()
        found.append(_compilation(name, constants, dtype, "fp32", kinds[kind]))
    sizes = (4096, 16), (16, 6144), (64, 28672)
    for (inputs, outputs), (height, few), kind in itertools.product(sizes, heights.items(), kinds):
        constants = _constants(few, 8, 1, inputs, outputs, False, 2, kind == "amd")
        constants |= {"ADD": True, "BIASED": False, **PLAIN.constants}
        name = f"adapters {inputs} to {outputs} {height} {kind}".rstrip()
        found.append(_compilation(name, constants, "bf16", "bf16", kinds[kind]))
    return found


def _compilation(name: str, constants: dict[str, Any], dtype: str, shares: str, targets: tuple[str, ...]) -> Compilation:
    pointers = dict.fromkeys(("out", "x", "weight", "bias"), f"*{dtype}") | {
        "order": "*i64",
        "starts": "*i64",
        "shares": f"*{shares}",
    }
    constants = constants | {"WIDEN": False}
    return Compilation(
        kernel=experts_kernel,
        name=name,
        types=pointers,
        constants=constants,
        warps=WARPS,
        stages=constants["STAGES"],
        fuse=True,
        hot=True,
        targets=targets,
    )
