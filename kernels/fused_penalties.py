"""Penalties and logit biases in Triton, for the tokens that they name; the logits stay as they are. The reference is
`sampling.penalize`.

    logit = logit / repetition if logit > 0 else logit * repetition         of each token that was there before
    logit = logit - count * frequency - (count > 0) * presence              count: how often it is in the output
    logit = logit + bias

A token that they name has a *mark*: bit i of word w of its row is token 32 w + i. Its new logit stands beside the logits, in the
*slot* that the number of marks before its own tells, where readers find it instead of the old one. So whoever reads all logits
reads a thirty-second more; counts and new logits fill few cache lines; and nothing is kept or cleared from step to step.

One program does all of this for a row, before anything else reads the logits: it sets marks with atomics, sums them up, counts
occurrences by slot, and computes new logits. Where a token occurs several times, several threads write the same number. For every
32 tokens it also keeps the largest new logit, so that a reader needs the single ones only where it needs single tokens.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import EARLY_TARGETS, Compilation
from .dependent_launch import begin_early, wait
from .sampling import LARGEST, Penalties

ENTRIES = 2048  # entries of `Penalties` that a program works on at once
WARPS = 8
MOST = tl.constexpr(LARGEST)
PLANES = tl.constexpr(3)  # of `marks`: marks, slots of each word's first mark, keys of the largest new logits
NOTHING = tl.constexpr(-0x7F800001)  # the key of -inf


@triton.jit
def key_of(value):  # type: ignore[no-untyped-def]
    """Integers in the order of the floats; both zeros map to one."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):  # type: ignore[no-untyped-def]
    """The float of a `key_of`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _ones(words):  # type: ignore[no-untyped-def]
    """How many bits of each int32 are set. The compiler knows it as one instruction."""
    bits = words.to(tl.uint32, bitcast=True)
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    return ((((bits + (bits >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def slots(words, firsts, token):  # type: ignore[no-untyped-def]
    """Where new logits of tokens with a mark stand. words: of `marks`; firsts: the slots of their first marks."""
    return firsts + _ones(words & ~(-1 << (token % 32).to(tl.int32)))


@triton.jit
def _slots(marks, words, token, inside):  # type: ignore[no-untyped-def]
    place = marks + token // 32
    return slots(tl.load(place, mask=inside, other=0), tl.load(place + words, mask=inside, other=0), token)


@triton.jit
def _range(rows, entries, row, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the entries of a row begin and end, given the sorted rows of all entries."""
    target = row + tl.arange(0, 2)
    low, size = tl.zeros([2], tl.int32), tl.zeros([2], tl.int32) + entries
    most = entries
    while most > 0:  # each is in [low, low + size]; twice for a million entries
        step = tl.maximum((size + BLOCK - 1) // BLOCK, 1)
        place = tl.arange(0, BLOCK)[None, :] * step[:, None]
        found = tl.load(rows + low[:, None] + place, mask=place < size[:, None], other=0x7FFFFFFF)
        before = tl.sum((found < target[:, None]).to(tl.int32), 1)
        skipped = tl.where(before > 0, (before - 1) * step + 1, 0)
        size = tl.where(before > 0, tl.minimum(step - 1, size - skipped), 0)
        low += skipped
        most = tl.max(size, 0)
    return tl.min(low, 0), tl.max(low, 0)


@triton.jit
def _mark(marks, ids, start, end, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sets the marks of some entries of a row."""
    for first in range(start, end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        token = tl.load(ids + entry, mask=entry < end, other=0)
        tl.atomic_or(marks + token // 32, (1 << (token % 32)).to(tl.int32), mask=entry < end, sem="relaxed")


@triton.jit
def _raise(marks, mask, words, mask_stride, token, value, inside):  # type: ignore[no-untyped-def]
    """Raises the largest of each 32 tokens to new logits of those that a grammar allows."""
    allowed = tl.load(mask + token // 32, mask=inside & (token // 32 < mask_stride), other=-1)
    inside = inside & (((allowed >> (token % 32).to(tl.int32)) & 1) != 0)
    tl.atomic_max(marks + 2 * words + token // 32, key_of(value), mask=inside, sem="relaxed")


@triton.jit(
    do_not_specialize=["entries", "biased", "mask_stride"],
    do_not_specialize_on_alignment=["extras", "rows", "ids", "output", "bias_rows", "bias_ids", "bias_values"],
)
def penalize_kernel(
    logits: tl.tensor,  # [rows, vocabulary] float32
    mask: tl.tensor,  # [rows, words] int32: what a grammar allows; unused with a stride of 0
    marks: tl.tensor,  # [rows, PLANES, words] int32, out
    changes: tl.tensor,  # [entries + biases] float32, out: new logits by slots
    counts: tl.tensor,  # [entries + biases] int32: room for counts
    extras: tl.tensor,  # [entries + biases] float32: room for biases; unused if there are none
    rows: tl.tensor,  # [entries], sorted
    ids: tl.tensor,
    output: tl.tensor,  # [entries] float32: 1 if that occurrence is counted
    bias_rows: tl.tensor,  # [biases], sorted
    bias_ids: tl.tensor,
    bias_values: tl.tensor,
    repetition: tl.tensor,  # [rows]
    frequency: tl.tensor,
    presence: tl.tensor,
    entries: tl.tensor,
    biased: tl.tensor,  # how many biases
    stride: tl.tensor,
    words: tl.tensor,
    mask_stride: tl.tensor,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Marks, slots and new logits of one row."""
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    mask += row * mask_stride
    marks += row * PLANES * words
    place = tl.arange(0, WORDS)
    tl.store(marks + place, 0, mask=place < words)
    tl.store(marks + 2 * words + place, NOTHING, mask=place < words)
    start, end = _range(rows, entries, row, BLOCK // 2)
    bias_start, bias_end = _range(bias_rows, biased, row, BLOCK // 2)
    base, top = start + bias_start, end + bias_end
    extra = tl.where(bias_end > bias_start, top, 0)  # slots before that have a bias, or 0
    if top > base:
        for first in range(base, top, BLOCK):
            slot = first + tl.arange(0, BLOCK)
            tl.store(counts + slot, 0, mask=slot < top)
            tl.store(extras + slot, 0.0, mask=slot < extra)
        tl.debug_barrier()  # what other threads have written is read or changed next, here and below
        _mark(marks, ids, start, end, BLOCK)
        _mark(marks, bias_ids, bias_start, bias_end, BLOCK)
        tl.debug_barrier()
        number = _ones(tl.load(marks + place, mask=place < words, other=0))
        tl.store(marks + words + place, base + tl.cumsum(number, 0) - number, mask=place < words)
        tl.debug_barrier()
        factor, by_count, by_presence = tl.load(repetition + row), tl.load(frequency + row), tl.load(presence + row)
        if (by_count != 0.0) | (by_presence != 0.0):
            for first in range(start, end, BLOCK):
                entry = first + tl.arange(0, BLOCK)
                counted = tl.load(output + entry, mask=entry < end, other=0.0).to(tl.int32)
                token = tl.load(ids + entry, mask=entry < end, other=0)
                slot = _slots(marks, words, token, entry < end)
                tl.atomic_add(counts + slot, counted, mask=(entry < end) & (counted != 0), sem="relaxed")
        for first in range(bias_start, bias_end, BLOCK):
            entry = first + tl.arange(0, BLOCK)
            token = tl.load(bias_ids + entry, mask=entry < bias_end, other=0)
            bias = tl.load(bias_values + entry, mask=entry < bias_end, other=0.0)
            slot = _slots(marks, words, token, entry < bias_end)
            value = tl.load(logits + token, mask=entry < bias_end, other=0.0) + bias
            tl.store(extras + slot, bias, mask=entry < bias_end)
            tl.store(changes + slot, tl.where(value == 0.0, 0.0, value), mask=entry < bias_end)
        tl.debug_barrier()
        for first in range(start, end, BLOCK):
            entry = first + tl.arange(0, BLOCK)
            inside = entry < end
            token = tl.load(ids + entry, mask=inside, other=0)
            value = tl.load(logits + token, mask=inside, other=0.0)
            slot = _slots(marks, words, token, inside)
            count = tl.load(counts + slot, mask=inside, other=0).to(tl.float32)
            value = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
            value = tl.clamp(value, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
            value -= count * by_count
            value -= tl.where(count > 0, by_presence, 0.0)
            value += tl.load(extras + slot, mask=inside & (slot < extra), other=0.0)
            value = tl.where(value == 0.0, 0.0, value)
            tl.store(changes + slot, value, mask=inside)
            _raise(marks, mask, words, mask_stride, token, value, inside)
        tl.debug_barrier()
        for first in range(bias_start, bias_end, BLOCK):
            entry = first + tl.arange(0, BLOCK)
            token = tl.load(bias_ids + entry, mask=entry < bias_end, other=0)
            value = tl.load(changes + _slots(marks, words, token, entry < bias_end), mask=entry < bias_end, other=0.0)
            _raise(marks, mask, words, mask_stride, token, value, entry < bias_end)


@dataclass(frozen=True, slots=True)
class Changes:
    """Logits that penalties and biases have changed."""

    marks: Tensor  # [rows, PLANES, words] int32: bits of tokens; the slot of each word's first token; key of its largest new logit
    logits: Tensor  # [entries + biases] float32: the new ones by slots


def change(logits: Tensor, penalties: Penalties, mask: Tensor | None) -> Changes:
    """Logits [rows, vocabulary] float32 that penalties and biases change. mask: as for `sampling.allow`; the largest new logits
    are those of allowed tokens."""
    entries, biased = len(penalties.ids), len(penalties.bias_ids)
    words = triton.cdiv(logits.shape[1], 512) * 16
    marks = torch.empty(len(logits), PLANES.value, words, dtype=torch.int32, device=logits.device)
    changes, extras = torch.empty(2, entries + biased, device=logits.device).unbind()
    penalize_kernel[(len(logits),)](
        logits, mask if mask is not None else marks, marks, changes, torch.empty_like(changes, dtype=torch.int32), extras,
        penalties.rows, penalties.ids, penalties.output, penalties.bias_rows, penalties.bias_ids, penalties.bias_values,
        penalties.repetition, penalties.frequency, penalties.presence, entries, biased, logits.stride(0), words,
        mask.stride(0) if mask is not None else 0, WORDS=triton.next_power_of_2(words), BLOCK=ENTRIES, num_warps=WARPS,
        enable_fp_fusion=False, **begin_early(logits.device),
    )  # fmt: skip
    return Changes(marks, changes)


def compilations() -> list[Compilation]:
    """For the vocabulary of Llama 3."""
    types = dict.fromkeys(("logits", "changes", "extras", "output", "bias_values", "repetition", "frequency", "presence"), "*fp32")
    types |= dict.fromkeys(("rows", "ids", "bias_rows", "bias_ids"), "*i64") | dict.fromkeys(("mask", "marks", "counts"), "*i32")
    types |= dict.fromkeys(("stride", "words"), "i32:16") | dict.fromkeys(("mask_stride", "entries", "biased"), "i32")
    return [
        Compilation(
            kernel=penalize_kernel,
            name=f"sampling penalize{' early' * early}",
            types=types,
            constants={"WORDS": 4096, "BLOCK": ENTRIES, "EARLY": early},
            warps=WARPS,
            early=early,
            targets=EARLY_TARGETS if early else (),
        )
        for early in (False, True)
    ]
