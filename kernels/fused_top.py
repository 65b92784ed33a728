"""The largest logits of every row, and its log-sum-exp, in Triton in one pass, and from these the continuations of beam searches,
for `beam.py`.

    normalizer = log sum exp(logits)                        of a row
    sum = logit - normalizer + the beam's score             of a continuation

A program of `top` finds the `count` largest of SPLIT logits. A program of `expand` merges those of all rows of one search: lists
that are in order already, so it takes the largest head again and again. Of equal ones the first are taken.
"""

from collections.abc import Sequence

import numpy
import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import Compilation
from .transfer import to_device

SPLIT = 4096  # logits per program
WARPS = 8
LISTS = 1024  # most lists (rows x parts of a row) that are merged for one search
MERGE_WARPS = 4
ROWS = 32  # rows per program of `normalize`
FIELDS = tl.constexpr(6)  # of a search, see `expand_kernel`


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


@triton.jit
def _normalizers(totals, inside, parts):  # type: ignore[no-untyped-def]
    """Log-sum-exp of all parts of some rows, by pointers to each row's first part. Parts are added up one after the other, so that
    the bits are the same in every kernel."""
    peak = tl.load(totals, mask=inside, other=0.0)
    for part in range(1, parts):
        peak = tl.maximum(peak, tl.load(totals + part, mask=inside, other=0.0))
    shift = tl.where(peak == float("-inf"), 0.0, peak)  # where all are -inf the difference would be NaN
    sums = tl.exp(tl.load(totals, mask=inside, other=0.0) - shift)
    for part in range(1, parts):
        sums += tl.exp(tl.load(totals + part, mask=inside, other=0.0) - shift)
    return shift + tl.log(sums)


@triton.jit(do_not_specialize=["rows", "parts"])
def normalize_kernel(
    totals: tl.tensor,  # [rows, parts] float32, from `top_kernel`
    normalizers: tl.tensor,  # [rows] float32, out
    rows: tl.tensor,
    parts: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Log-sum-exp of BLOCK rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    tl.store(normalizers + row, _normalizers(totals + row * parts, inside, parts), mask=inside)


@triton.jit(
    do_not_specialize=["parts", "count", "all_heirs", "ends_stride"], do_not_specialize_on_alignment=["sets", "ends", "scores"]
)
def expand_kernel(
    values: tl.tensor,  # [rows, parts, count] float32, from `top_kernel`
    ids: tl.tensor,  # [rows, parts, count] int64, from `top_kernel`
    totals: tl.tensor,  # [rows, parts] float32, from `top_kernel`
    # [sets, FIELDS] int32: first row, number of rows, candidates, width, place of its first heir, end tokens
    sets: tl.tensor,
    ends: tl.tensor,  # [sets, most end tokens] int32
    scores: tl.tensor,  # [rows] float32
    found: tl.tensor,  # [4, sets, count] float64, out: see `beam.Continuations`
    heirs: tl.tensor,  # [2, heirs] int64, out: tokens and parents
    parts: tl.tensor,
    count: tl.tensor,
    all_heirs: tl.tensor,
    ends_stride: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    """The best continuations of the rows of one search, and those of them that live on."""
    which = tl.program_id(0)
    sets += which * FIELDS
    start, rows, most = tl.load(sets), tl.load(sets + 1), tl.load(sets + 2)
    width, heir, end_tokens = tl.load(sets + 3), tl.load(sets + 4), tl.load(sets + 5)
    ends += which * ends_stride
    place = tl.arange(0, SIZE)
    lists = rows * parts
    inside = place < lists
    row = start + place // parts
    normalizer = _normalizers(totals + row * parts, inside, parts)
    score = tl.load(scores + row, mask=inside, other=0.0)
    bad = tl.max((inside & ~(tl.abs(normalizer) < float("inf"))).to(tl.int32), 0) > 0
    first = (start * parts + place).to(tl.int64) * count  # of each list
    position = tl.zeros([SIZE], tl.int32)
    heads = tl.load(values + first, mask=inside, other=float("-inf")) - normalizer + score
    heads = tl.where(inside, heads, float("-inf"))
    found += which * count
    apart = tl.num_programs(0).to(tl.int64) * count
    last_heir = heir + width
    for rank in range(count):
        best = tl.max(heads, 0)
        chosen = tl.minimum(tl.min(tl.where(heads == best, place, SIZE), 0), lists - 1)  # of NaNs none is the largest
        mine = place == chosen
        at = (start * parts + chosen).to(tl.int64) * count + tl.sum(tl.where(mine, position, 0), 0)
        token = tl.load(ids + at)
        parent = chosen // parts
        logprob = tl.load(values + at) - tl.sum(tl.where(mine, normalizer, 0.0), 0)
        tl.store(found + rank, tl.where(bad, float("nan"), best).to(tl.float64))
        tl.store(found + apart + rank, (start + parent).to(tl.float64))
        tl.store(found + 2 * apart + rank, token.to(tl.float64))
        tl.store(found + 3 * apart + rank, logprob.to(tl.float64))
        over = rank >= most
        for end in range(end_tokens):
            over = over | (tl.load(ends + end) == token)
        lives = (over == 0) & (heir < last_heir)
        tl.store(heirs + heir, token, mask=lives)
        tl.store(heirs + all_heirs + heir, parent.to(tl.int64), mask=lives)
        heir += lives.to(tl.int32)
        position += mine.to(tl.int32)
        following = tl.load(values + first + position, mask=inside & mine & (position < count), other=float("-inf"))
        heads = tl.where(mine, following - normalizer + score, heads)
    for surplus in range(heir, last_heir):  # nobody uses these, but they must be some token and some beam
        tl.store(heirs + surplus, tl.full((), 0, tl.int64))
        tl.store(heirs + all_heirs + surplus, tl.full((), 0, tl.int64))


def top_of_parts(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` largest logits of each part of every row, with their ids: [rows, parts, count] float32 and int64; the parts'
    log-sum-exps, [rows, parts]. Which ids come with -inf is arbitrary, and one may come several times.

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
    return values, ids, totals


def top(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """For every row its `count` largest logits, and some more (those of each part of it), with their ids: [rows, n] float32 and
    int64, n at least `count`; log-sum-exp [rows]. See `top_of_parts`."""
    values, ids, totals = top_of_parts(logits, count)
    rows, parts = totals.shape
    normalizers = torch.empty(rows, device=logits.device)
    if rows:
        normalize_kernel[(triton.cdiv(rows, ROWS),)](
            totals, normalizers, rows, parts, BLOCK=ROWS, num_warps=1, enable_fp_fusion=False
        )
    return values.flatten(1), ids.flatten(1), normalizers


def mergeable(logits: Tensor, rows: int) -> bool:
    """Whether `expand` can merge the lists of a search of so many rows."""
    return bool(rows * triton.cdiv(logits.shape[1], SPLIT) <= LISTS)


def expand(
    logits: Tensor, scores: Sequence[float], sets: Sequence[tuple[int, int, int, int]], ends: Sequence[Sequence[int]], count: int
) -> tuple[Tensor, Tensor]:
    """As `beam.continuations`: [4, sets, count] float64, and tokens and parents of those that live on, [2, heirs] int64. One copy
    to the device, two launches.

    sets: (first row, rows, candidates, width) of each, `mergeable`; ends: its end tokens.
    """
    device = logits.device
    values, ids, totals = top_of_parts(logits, count)
    most = max(map(len, ends))
    numbers, listed, heirs = list[int](), list[int](), 0
    for (start, rows, candidates, width), own in zip(sets, ends, strict=True):
        numbers += start, rows, candidates, width, heirs, len(own)
        listed += *own, *[0] * (most - len(own))
        heirs += width
    ints = numpy.array([*numbers, *listed], numpy.int32)
    given = to_device(torch.from_numpy(numpy.concatenate((ints, numpy.array(scores, numpy.float32).view(numpy.int32)))), device)
    found = torch.empty(4, len(sets), count, dtype=torch.float64, device=device)
    alive = torch.empty(2, heirs, dtype=torch.int64, device=device)
    expand_kernel[(len(sets),)](
        values, ids, totals, given, given[len(numbers) :], given[len(ints) :].view(torch.float32), found, alive, totals.shape[1],
        count, heirs, most, SIZE=LISTS, num_warps=MERGE_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return found, alive


def compilations() -> list[Compilation]:
    """All kernels."""
    pointers = {"logits": "*fp32", "values": "*fp32", "ids": "*i64", "totals": "*fp32"}
    numbers = {"vocabulary": "i32:16", "stride": "i32:16", "count": "i32"}
    merged = {"sets": "*i32", "ends": "*i32", "scores": "*fp32", "found": "*fp64", "heirs": "*i64"}
    others = {"parts": "i32", "rows": "i32", "all_heirs": "i32", "ends_stride": "i32", "normalizers": "*fp32"}
    types = pointers | numbers | merged | others
    return [
        Compilation(kernel=top_kernel, name="top", types=types, constants={"SIZE": SPLIT}, warps=WARPS),
        Compilation(kernel=normalize_kernel, name="top normalizers", types=types, constants={"BLOCK": ROWS}, warps=1),
        Compilation(kernel=expand_kernel, name="beam expansion", types=types, constants={"SIZE": LISTS}, warps=MERGE_WARPS),
    ]
