"""Penalties and logit biases in Triton, for the tokens that they name. The reference is `sampling.penalize`.

    logit = logit / repetition if logit > 0 else logit * repetition         of each token that was there before
    logit = logit - count * frequency - (count > 0) * presence              count: how often it is in the output
    logit = logit + bias

New logits take the places of the old ones, until the row's token is drawn; then `settle` puts these back, which were kept by entry.
So no other kernel has to know of penalties: a row of 1,000 entries reads and writes as many logits and nothing else. Of a bucket's
32 logits the largest is known already (`survey`). It is looked for again only where an old logit was the largest, or a new one is
larger.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import EARLY_TARGETS, Compilation
from .dependent_launch import begin_early, wait
from .row_logits import is_allowed
from .sampling import LARGEST, Penalties

ENTRIES = 1024  # entries of a row that a program works on at once; not fewer than it has threads, or several would have the same
BUCKETS = 64  # buckets whose largest logits it looks for at once
WARPS = 8
MOST = tl.constexpr(LARGEST)


@triton.jit(
    do_not_specialize=["biased", "mask_stride"],
    do_not_specialize_on_alignment=["starts", "ids", "counts", "biases", "repetition", "frequency", "presence"],
)
def penalize_kernel(
    logits: tl.tensor,  # [rows, vocabulary] float32, in and out
    mask: tl.tensor,  # [rows, words] int32: what a grammar allows; unused with a stride of 0
    maxima: tl.tensor,  # [rows, buckets] float32, in and out: the largest allowed logit of each 32
    olds: tl.tensor,  # [entries] float32, out: logits as they were
    found: tl.tensor,  # [entries] int32: room for a list
    starts: tl.tensor,  # [rows + 1] int32, see `sampling.Penalties`
    ids: tl.tensor,
    counts: tl.tensor,
    biases: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    biased: tl.tensor,  # entries that have a bias: none, or all
    vocabulary: tl.tensor,
    stride: tl.tensor,
    mask_stride: tl.tensor,
    buckets: tl.tensor,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Writes new logits of one row."""
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    mask += row * mask_stride
    maxima += row * buckets
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    factor, by_count, by_presence = tl.load(repetition + row), tl.load(frequency + row), tl.load(presence + row)
    number = tl.zeros((), tl.int32)  # of buckets that are listed in `found`, from `start` on
    for first in range(start, end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        inside = entry < end
        token = tl.load(ids + entry, mask=inside, other=0)
        count = tl.load(counts + entry, mask=inside, other=-1)
        bias = tl.load(biases + entry, mask=inside & (entry < biased), other=0.0)
        bucket = token // 32
        old = tl.load(logits + token, mask=inside, other=0.0)
        largest = tl.load(maxima + bucket, mask=inside, other=0.0)
        words = tl.load(mask + bucket, mask=inside & (bucket < mask_stride), other=-1)
        new = tl.where(old > 0, tl.div_rn(old, factor), old * factor)
        new = tl.clamp(new, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
        new = tl.where(count >= 0, new, old)
        new -= tl.maximum(count, 0).to(tl.float32) * by_count
        new -= tl.where(count > 0, by_presence, 0.0)
        new += bias
        tl.store(olds + entry, old, mask=inside)
        tl.store(logits + token, new, mask=inside)
        listed = inside & is_allowed(words, token) & ((old >= largest) | (new > largest))
        to = number + tl.cumsum(listed.to(tl.int32), 0) - listed.to(tl.int32)
        tl.store(found + start + to, bucket, mask=listed)
        number += tl.sum(listed.to(tl.int32), 0)
    tl.debug_barrier()  # what other threads have listed, and new logits, are read next
    for first in range(0, number, AT_ONCE):
        place = first + tl.arange(0, AT_ONCE)
        bucket = tl.load(found + start + place, mask=place < number, other=0)
        words = tl.load(mask + bucket, mask=(place < number) & (bucket < mask_stride), other=-1)
        token = bucket[:, None] * 32 + tl.arange(0, 32)[None, :]
        values = tl.load(logits + token, mask=(place < number)[:, None] & (token < vocabulary), other=float("-inf"))
        values = tl.where(is_allowed(words[:, None], token), values, float("-inf"))
        tl.store(maxima + bucket, tl.max(values, 1), mask=place < number)


@triton.jit
def put_back(logits, olds, starts, ids, row, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes a row's old logits again."""
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    for first in range(start, end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        token = tl.load(ids + entry, mask=entry < end, other=0)
        tl.store(logits + token, tl.load(olds + entry, mask=entry < end, other=0.0), mask=entry < end)


def change(logits: Tensor, penalties: Penalties, mask: Tensor | None, maxima: Tensor) -> Tensor:
    """Changes logits [rows, vocabulary] float32 and their `maxima` [rows, buckets]. Returns the old logits, by entries. mask: as
    for `sampling.allow`."""
    rows, vocabulary = logits.shape
    olds, found = torch.empty_like(penalties.ids, dtype=torch.float32), torch.empty_like(penalties.ids)
    penalize_kernel[(rows,)](
        logits, mask if mask is not None else found, maxima, olds, found, penalties.starts, penalties.ids, penalties.counts,
        penalties.biases, penalties.repetition, penalties.frequency, penalties.presence, len(penalties.biases), vocabulary,
        logits.stride(0), mask.stride(0) if mask is not None else 0, maxima.shape[1], BLOCK=ENTRIES, AT_ONCE=BUCKETS,
        num_warps=WARPS, enable_fp_fusion=False, **begin_early(logits.device),
    )  # fmt: skip
    return olds


def compilations() -> list[Compilation]:
    """For the vocabulary of Llama 3."""
    types = dict.fromkeys(("logits", "maxima", "olds", "biases", "repetition", "frequency", "presence"), "*fp32")
    types |= dict.fromkeys(("mask", "found", "starts", "ids", "counts"), "*i32")
    types |= dict.fromkeys(("vocabulary", "stride", "buckets"), "i32:16") | dict.fromkeys(("biased", "mask_stride"), "i32")
    return [
        Compilation(
            kernel=penalize_kernel,
            name=f"sampling penalize{' early' * early}",
            types=types,
            constants={"BLOCK": ENTRIES, "AT_ONCE": BUCKETS, "EARLY": early},
            warps=WARPS,
            early=early,
            targets=EARLY_TARGETS if early else (),
        )
        for early in (False, True)
    ]
