"""The largest logits of every row, and its log-sum-exp, in Triton in one pass, for `beam.py`.

A program finds the `count` largest of SPLIT logits; torch then sorts those of all programs of a row, and adds up their sums. Of
equal logits the first are taken.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import Compilation

SPLIT = 4096  # logits per program
WARPS = 8


@triton.jit(do_not_specialize=["count"])
def top_kernel(
    logits: tl.tensor,  # [rows, vocabulary] float32
    values: tl.tensor,  # [rows, programs, count] float32, out: descending
    ids: tl.tensor,  # [rows, programs, count] int64, out
    totals: tl.tensor,  # [rows, programs] float32, out: log-sum-exp
    vocabulary: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    """Largest of SIZE logits of one row. The maximum is removed again and again: cheaper than a sort while `count` is small."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * SIZE + tl.arange(0, SIZE)
    left = tl.load(logits + row * stride + column, mask=column < vocabulary, other=float("-inf"))
    peak = tl.max(left, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)  # where all are -inf the difference would be NaN
    place = row * tl.num_programs(1) + part
    tl.store(totals + place, shift + tl.log(tl.sum(tl.exp(left - shift), 0)))
    for i in range(count):
        largest = tl.max(left, 0)
        chosen = tl.min(tl.where(left == largest, column, 0x7FFFFFFF), 0)
        tl.store(values + place * count + i, largest)
        tl.store(ids + place * count + i, tl.minimum(chosen, vocabulary - 1).to(tl.int64))
        left = tl.where(column == chosen, float("-inf"), left)


def top(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """For every row its `count` largest logits, and some more (those of each part of it), with their ids: [rows, n] float32 and
    int64, n at least `count`; log-sum-exp [rows]. Which ids come with -inf is arbitrary, and one may come several times.

    logits: [rows, vocabulary] float32, its last dimension dense.
    """
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, SPLIT)
    values = torch.empty(rows, parts, count, device=logits.device)
    ids = torch.empty(rows, parts, count, dtype=torch.int64, device=logits.device)
    totals = torch.empty(rows, parts, device=logits.device)
    if rows:
        top_kernel[(rows, parts)](
            logits, values, ids, totals, vocabulary, logits.stride(0), count, SIZE=SPLIT, num_warps=WARPS, enable_fp_fusion=False
        )
    return values.flatten(1), ids.flatten(1), totals.logsumexp(-1)


def compilations() -> list[Compilation]:
    """The only kernel."""
    pointers = {"logits": "*fp32", "values": "*fp32", "ids": "*i64", "totals": "*fp32"}
    numbers = {"vocabulary": "i32:16", "stride": "i32:16", "count": "i32"}
    return [Compilation(kernel=top_kernel, name="top", types=pointers | numbers, constants={"SIZE": SPLIT}, warps=WARPS)]
