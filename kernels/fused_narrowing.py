"""The threshold of a top-p that reaches far into a row, found by all programs together, in Triton; for `fused_sampling`.

`filter` knows two numbers between which the limit of such a row is. Two passes sum the mass above PIVOTS numbers between them
(`narrow`), a third one lists the tokens that are left between two of these (`list_between`), and `finish` finds the threshold among
them. Where too many are left, it goes over the row for each bit of a float.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import Compilation
from .dispatch import on_nvidia
from .fused_noise import nearly_exp
from .row_logits import (
    LOWEST,
    PER_ROW,
    STRIDES,
    WARPS,
    Given,
    compilations_of,
    far_limit,
    key_of,
    logits_at,
    lowest_logit,
    lowest_score,
    row_logits,
    threshold_of,
)
from .sampling import Draws

PIVOTS = tl.constexpr(16)  # numbers that `narrow` compares each logit with
SLOTS = tl.constexpr(128)  # most tokens that are listed for a part
ROUNDS = 2  # of `narrow`
PARTS_AT_ONCE = 4  # parts of a program of `narrow` and `list_between`: most have nothing to do


@triton.jit
def _between(low, high, i):  # type: ignore[no-untyped-def]
    """The i-th of PIVOTS numbers from `low` on, in equal distances; the last one is before `high`."""
    return tl.where(i == 0, low, tl.where(i == PIVOTS, high, low + (high - low) * (i.to(tl.float32) / PIVOTS)))


@triton.jit
def _narrowed(lows, highs, targets, sums, row, parts, rounds, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers between which a row's limit is after some rounds of `narrow`. The lower one is -inf if all tokens stay."""
    low, high, target = tl.load(lows + row), tl.load(highs + row), tl.load(targets + row)
    part, pivot = tl.arange(0, PARTS), tl.arange(0, PIVOTS)
    for i in range(rounds):
        place = ((i * tl.num_programs(0) + row) * parts + part[:, None]) * PIVOTS + pivot[None, :]
        masses = tl.sum(tl.load(sums + place, mask=part[:, None] < parts, other=0.0), 0)
        found = tl.max(tl.where(masses >= target, pivot, -1), 0)
        below, above = _between(low, high, tl.maximum(found, 0)), _between(low, high, tl.maximum(found, 0) + 1)
        low, high = tl.where(found < 0, float("-inf"), below), tl.where(found < 0, low, above)
        rounds = tl.where(found < 0, 0, rounds)
    return low, high


@triton.jit
def _part(given, part, best, heat, vocabulary, SIZE: tl.constexpr, MASKED: tl.constexpr, CUDA: tl.constexpr):  # type: ignore[no-untyped-def]
    """The logits of a part, and their masses, the largest of the row having 1."""
    column = part * SIZE + tl.arange(0, SIZE)
    values = logits_at(given, column, column < vocabulary, MASKED)
    return values, nearly_exp((values - best) * tl.div_rn(1.0, heat), CUDA)


@triton.jit(do_not_specialize=["parts", "rounds", *STRIDES], do_not_specialize_on_alignment=PER_ROW)
def narrow_kernel(
    logits: tl.tensor,  # [rows, vocabulary] float32
    mask: tl.tensor,
    temperature: tl.tensor,
    bests: tl.tensor,
    lows: tl.tensor,  # [rows] float32, from `filter_kernel`
    highs: tl.tensor,
    targets: tl.tensor,
    sums: tl.tensor,  # [rounds, rows, parts, PIVOTS] float32, out: mass that is not below each of PIVOTS numbers
    vocabulary: tl.tensor,
    stride: tl.tensor,
    mask_stride: tl.tensor,
    parts: tl.tensor,
    rounds: tl.tensor,  # before this one
    MASKED: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    OWN: tl.constexpr,
    CUDA: tl.constexpr,
) -> None:
    """One round for OWN parts of one row, if its limit is to be found."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(targets + row) > 0.0:
        low, high = _narrowed(lows, highs, targets, sums, row, parts, rounds, PARTS)
        best, heat = tl.load(bests + row), tl.load(temperature + row)
        pivot = tl.arange(0, PIVOTS)
        pivots = _between(low, high, pivot)
        given = row_logits(logits, mask, row, stride, mask_stride)
        sums += (rounds * tl.num_programs(0) + row) * parts * PIVOTS
        for part in range(tl.program_id(1) * OWN, tl.minimum((tl.program_id(1) + 1) * OWN, parts)):
            values, masses = _part(given, part, best, heat, vocabulary, SIZE, MASKED, CUDA)
            above = tl.where(values[None, :] >= pivots[:, None], masses[None, :], 0.0)
            tl.store(sums + part * PIVOTS + pivot, tl.sum(above, 1))


@triton.jit(do_not_specialize=["parts", "rounds", *STRIDES], do_not_specialize_on_alignment=PER_ROW)
def list_between_kernel(
    logits: tl.tensor,  # [rows, vocabulary] float32
    mask: tl.tensor,
    temperature: tl.tensor,
    bests: tl.tensor,
    lows: tl.tensor,
    highs: tl.tensor,
    targets: tl.tensor,
    sums: tl.tensor,  # [rounds, rows, parts, PIVOTS] float32, from `narrow_kernel`
    found: tl.tensor,  # [rows, parts, SLOTS] float32, out: logits between the numbers that rounds have found
    counts: tl.tensor,  # [rows, parts] int32, out: how many
    higher: tl.tensor,  # [rows, parts] float32, out: mass of those above
    vocabulary: tl.tensor,
    stride: tl.tensor,
    mask_stride: tl.tensor,
    parts: tl.tensor,
    rounds: tl.tensor,
    MASKED: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    OWN: tl.constexpr,
    CUDA: tl.constexpr,
) -> None:
    """Lists what is left of OWN parts of one row, if its limit is to be found."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(targets + row) > 0.0:
        low, high = _narrowed(lows, highs, targets, sums, row, parts, rounds, PARTS)
        best, heat = tl.load(bests + row), tl.load(temperature + row)
        given = row_logits(logits, mask, row, stride, mask_stride)
        for part in range(tl.program_id(1) * OWN, tl.minimum((tl.program_id(1) + 1) * OWN, parts)):
            values, masses = _part(given, part, best, heat, vocabulary, SIZE, MASKED, CUDA)
            taken = (values >= low) & (values < high) & (values > float("-inf"))
            number = taken.to(tl.int32)
            to, place = tl.cumsum(number, 0) - number, row * parts + part
            tl.store(found + place * SLOTS + to, values, mask=taken & (to < SLOTS))
            tl.store(counts + place, tl.sum(number, 0))
            tl.store(higher + place, tl.sum(tl.where(values >= high, masses, 0.0), 0))


@triton.jit(do_not_specialize=["parts", "rounds", *STRIDES], do_not_specialize_on_alignment=PER_ROW)
def finish_kernel(
    logits: tl.tensor,  # [rows, vocabulary] float32
    mask: tl.tensor,
    temperature: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    bests: tl.tensor,
    lows: tl.tensor,
    highs: tl.tensor,
    targets: tl.tensor,
    sums: tl.tensor,
    found: tl.tensor,  # [rows, parts, SLOTS] float32, from `list_between_kernel`
    counts: tl.tensor,  # [rows, parts] int32
    higher: tl.tensor,  # [rows, parts] float32
    limits: tl.tensor,  # [rows] float32, out
    vocabulary: tl.tensor,
    stride: tl.tensor,
    mask_stride: tl.tensor,
    parts: tl.tensor,
    rounds: tl.tensor,
    MASKED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CUDA: tl.constexpr,
) -> None:
    """Finds a row's limit among what is listed, if it is to be found."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    if target > 0.0:
        best, heat, floor = tl.load(bests + row), tl.load(temperature + row), lowest_score(min_p, row)
        low, high = _narrowed(lows, highs, targets, sums, row, parts, rounds, PARTS)
        part = tl.arange(0, PARTS)
        numbers = tl.load(counts + row * parts + part, mask=part < parts, other=0)
        least = tl.full((), LOWEST, tl.int32)
        if tl.max(numbers, 0) > SLOTS:
            p, k = tl.load(top_p + row), tl.zeros((), tl.int64)
            given = row_logits(logits, mask, row, stride, mask_stride)
            least = far_limit(given, best, heat, k, p, vocabulary, MASKED, BLOCK)
        elif low > float("-inf"):
            above = tl.sum(tl.load(higher + row * parts + part, mask=part < parts, other=0.0), 0)
            slot = tl.arange(0, PARTS * SLOTS)
            inside = slot // SLOTS < parts
            full = slot % SLOTS < tl.load(counts + row * parts + slot // SLOTS, mask=inside, other=0)
            scores = tl.div_rn(tl.load(found + row * parts * SLOTS + slot, mask=full, other=float("-inf")) - best, heat)
            masses = tl.where(full, tl.exp(scores), 0.0)
            least = key_of(tl.min(tl.where(full, scores, 0.0), 0))
            least = tl.maximum(least, threshold_of(key_of(scores), masses, target - above))
            # By rounding those above may have all that is wanted: then no key is too high for the threshold. They all stay.
            least = tl.minimum(least, key_of(tl.div_rn(high - best, heat)))
        tl.store(limits + row, lowest_logit(best, heat, 0.0, tl.maximum(least, key_of(floor))))


def narrow(given: Given, draws: Draws, bests: Tensor, bracket: Sequence[Tensor], limits: Tensor, split: int, block: int) -> None:
    """Finds the `limits` of rows that `filter` has left to this, with what it knows in `bracket`. split: logits of a part; block:
    logits that are loaded at once in a pass over a whole row."""
    (rows, vocabulary), device = given.logits.shape, given.logits.device
    parts = triton.cdiv(vocabulary, split)
    sums = torch.empty(ROUNDS, rows, parts, PIVOTS.value, device=device)
    found, higher = torch.empty(rows, parts, SLOTS.value, device=device), torch.empty(rows, parts, device=device)
    counts = torch.empty(rows, parts, dtype=torch.int32, device=device)
    known = (*given.tensors, draws.temperature, bests, *bracket, sums)
    constants = {**given.constants, "PARTS": triton.next_power_of_2(parts), "CUDA": on_nvidia(device)}
    grid = rows, triton.cdiv(parts, PARTS_AT_ONCE)
    for i in range(ROUNDS):
        narrow_kernel[grid](
            *known, vocabulary, *given.strides, parts, i, **constants, SIZE=split, OWN=PARTS_AT_ONCE, num_warps=WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
    list_between_kernel[grid](
        *known, found, counts, higher, vocabulary, *given.strides, parts, ROUNDS, **constants, SIZE=split, OWN=PARTS_AT_ONCE,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    finish_kernel[(rows,)](
        *given.tensors, draws.temperature, draws.top_p, draws.min_p, bests, *bracket, sums, found, counts, higher, limits,
        vocabulary, *given.strides, parts, ROUNDS, **constants, BLOCK=block, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def compilations() -> list[Compilation]:
    """With a grammar's mask, and one without."""
    shape = {"MASKED": True, "SIZE": 4096, "PARTS": 32, "OWN": PARTS_AT_ONCE, "BLOCK": 4096}
    cases = [
        ("narrow", narrow_kernel, shape, WARPS),
        ("narrow plain", narrow_kernel, {**shape, "MASKED": False}, WARPS),
        ("list between", list_between_kernel, shape, WARPS),
        ("finish", finish_kernel, shape, WARPS),
    ]
    return compilations_of(cases)
