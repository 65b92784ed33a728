"""Sampling in Triton, from logits to tokens: penalties, bias, grammar mask, temperature, top-k, top-p, min-p, a draw,
log-probabilities.

    scores = (logits - the largest) / temperature
    kept = those of scores that are no lower than
        the k-th largest                                    top-k: Fan et al. 2018, arXiv:1805.04833
        the last that is needed for the mass p              top-p: Holtzman et al. 2019, arXiv:1904.09751
        log(min_p)                                          min-p: Nguyen et al. 2024, arXiv:2407.01082
    kept = those of kept that are nearest to their mean     typical-p: Meister et al. 2022, arXiv:2202.00666
    token = argmax of kept + Gumbel noise                   a draw from softmax(kept): see `sampling.draw`

The reference is `sampling.py`, with two differences. Of tokens that tie at the edge of top-p all stay (there it depends on the
order of a sort). The noise is made by `logarithm.gumbel`. The top tokens of a filtered distribution are left to `sampling.py`.
Typical-p compares a token's information content with the entropy: they differ as much as its score and the mean score.

Passes over all logits, for rows with usual filters:

1. `survey`: the model's own log-sum-exp, and the largest of every 32 allowed logits (a *bucket*).
2. `weigh`, for greedy rows, and rows with top-p and no top-k: the mass of all tokens.

Then `filter`: the m-th largest of the buckets' maxima is exceeded by at least m logits, and hardly by many more. Those are
gathered, out of the few buckets that have any, and filters and draw go on among them. The gathered count and mass tell whether all
that a filter may keep is among them, so a row is never wrong, but may be slow. Few candidates are each compared with each other,
which takes no more steps than a search for a threshold takes barriers.

A row whose top-p keeps more is narrowed down by all programs together (`fused_narrowing`). One with a large top-k finds its
threshold by bisection over the bits of a float, each step a pass over the row (`row_logits`). Such rows are drawn in one more pass
over all tokens, as rows without filters are (`draw`). Exact noise takes 150 instructions, so there all tokens get noise that is off
by a known bound, and only those that may be the largest are compared exactly (`settle`).

Penalties change logits between survey and filter (`fused_penalties`), and `settle` puts the old ones back.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import Compilation
from .dependent_launch import begin_early, wait
from .dispatch import on_nvidia
from .fused_narrowing import narrow
from .fused_noise import NEARLY, gumbel_of_ids, nearly_exp, nearly_gumbel_of_quads
from .fused_penalties import change, put_back
from .row_logits import (
    LOWEST,
    PER_ROW,
    STRIDES,
    WARPS,
    Given,
    compilations_of,
    far_limit,
    far_typical,
    key_of,
    logits_at,
    lowest_logit,
    lowest_score,
    middle_of,
    row_logits,
    threshold_of,
    value_of,
)
from .sampling import Draws, Penalties

SPLIT = 4096  # logits per program of `survey`, `weigh` and `draw`
CAPACITY = 2048  # most logits that are gathered for a row
AT_ONCE = 2048  # logits that `filter` loads at once: with more, its registers leave no room for a second program
WANTED = 512  # at least so many are gathered without top-k
FEW = 256  # so many or fewer gathered logits are each compared with each other
DRAW_PARTS = 4  # parts of a program of `draw`: programs that find their row finished take time, too
VAGUE = tl.constexpr(1 << 30)  # more than there are tokens
SCANNED = tl.constexpr(128)  # tokens that `settle` compares at once
RESTORED = tl.constexpr(512)  # entries of penalties that it puts back at once


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled token of every row with its log-probabilities, [rows] each."""

    tokens: Tensor  # int64: -1 where a row's logits are NaN or infinite, so that nothing could be sampled
    logprobs: Tensor  # float32, under the model's own distribution; NaN where the token is -1
    final: Tensor  # float32, under the filtered distribution that was drawn from; greedy: under that of all allowed tokens


@triton.jit(do_not_specialize=STRIDES, do_not_specialize_on_alignment=["peaks", "sums"])
def survey_kernel(
    logits: tl.tensor,  # [rows, vocabulary] float32
    mask: tl.tensor,  # [rows, words] int32; unused with a stride of 0
    maxima: tl.tensor,  # [rows, 32 programs' maxima]
    peaks: tl.tensor,  # [rows, programs]
    sums: tl.tensor,  # [rows, programs]
    vocabulary: tl.tensor,
    stride: tl.tensor,
    mask_stride: tl.tensor,
    MASKED: tl.constexpr,
    SIZE: tl.constexpr,
    CUDA: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Surveys SIZE logits of one row: their maximum and sum of exponentials; and the bucket maxima of allowed ones."""
    wait(EARLY)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = part * (SIZE // 32) + tl.arange(0, SIZE // 32)
    column = places[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = tl.load(logits + row * stride + column, mask=column < vocabulary, other=float("-inf"))
    if MASKED:
        allowed = tl.load(mask + row * mask_stride + places, mask=(places * 32 < vocabulary) & (places < mask_stride), other=-1)
        bits = allowed[:, None] & (1 << tl.arange(0, 32))[None, :]
        largest = tl.max(tl.where(bits != 0, values, float("-inf")), 1)
        peak = tl.max(values)
    else:
        largest = tl.max(values, 1)
        peak = tl.max(largest, 0)
    # Where all are -inf the difference would be NaN.
    sum_of_part = tl.sum(tl.sum(nearly_exp(values - tl.where(peak == float("-inf"), 0.0, peak), CUDA), 1), 0)
    tl.store(peaks + row * tl.num_programs(1) + part, peak)
    tl.store(sums + row * tl.num_programs(1) + part, sum_of_part)
    tl.store(maxima + row * tl.num_programs(1) * (SIZE // 32) + places, largest)


@triton.jit
def _largest(  # type: ignore[no-untyped-def]
    given, largest, best, buckets, vocabulary, MASKED: tl.constexpr,
    BUCKETS: tl.constexpr
):  # fmt: skip
    """The first token whose logit is `best`, the largest of the maxima `largest`."""
    found = tl.min(tl.where(largest == best, tl.arange(0, BUCKETS), buckets - 1), 0)
    column = found * 32 + tl.arange(0, 32)
    inside = column < vocabulary
    values = logits_at(given, column, inside, MASKED)
    return tl.min(tl.where(inside & (values == best), column, vocabulary - 1), 0)


@triton.jit(do_not_specialize=STRIDES, do_not_specialize_on_alignment=[*PER_ROW, "peaks"])
def weigh_kernel(
    logits: tl.tensor,  # [rows, vocabulary] float32
    mask: tl.tensor,
    maxima: tl.tensor,  # [rows, buckets]
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    peaks: tl.tensor,  # [rows, programs], out: the largest allowed logit of a part
    sums: tl.tensor,  # [rows, programs], out: mass of a part, its largest having 1
    vocabulary: tl.tensor,
    stride: tl.tensor,
    mask_stride: tl.tensor,
    MASKED: tl.constexpr,
    SIZE: tl.constexpr,
    CUDA: tl.constexpr,
) -> None:
    """Sums the mass of SIZE logits of one row, if it is greedy, or its filters need the mass of all tokens."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    if (heat == 0.0) | ((tl.load(top_k + row) == 0) & (tl.load(top_p + row) < 1.0)):
        place = row * tl.num_programs(1) + part
        peak = tl.max(tl.load(maxima + place * (SIZE // 32) + tl.arange(0, SIZE // 32)), 0)
        column = part * SIZE + tl.arange(0, SIZE)
        given = row_logits(logits, mask, row, stride, mask_stride)
        values = logits_at(given, column, column < vocabulary, MASKED)
        # Where all are -inf the difference would be NaN.
        inverse = tl.div_rn(1.0, tl.where(heat == 0.0, 1.0, heat))
        masses = nearly_exp((values - tl.where(peak == float("-inf"), 0.0, peak)) * inverse, CUDA)
        tl.store(peaks + place, peak)
        tl.store(sums + place, tl.sum(masses, 0))


@triton.jit
def _pivot(largest, filled, best, wanted):  # type: ignore[no-untyped-def]
    """A float that at least `wanted` of the bucket maxima `largest` are not below, and few more than that; and how many. If there
    are too few it is the lowest of those that are `filled`, finite.

    By bisection: first of what lies between numbers, which takes some seven steps; then of their bits, which takes 32 at most.
    """
    low = key_of(tl.min(tl.where(filled, largest, best), 0)).to(tl.int64)
    high = key_of(best).to(tl.int64)
    number = tl.sum(filled.to(tl.int32), 0)
    step = 0
    while (low < high) & (number > wanted + wanted // 2):
        middle = middle_of(low, high)
        if step < 12:
            between = value_of(low.to(tl.int32)) * 0.5 + value_of(high.to(tl.int32)) * 0.5
            middle = tl.maximum(tl.minimum(key_of(between).to(tl.int64), high), low + 1)
        many = tl.sum((largest >= value_of(middle.to(tl.int32))).to(tl.int32), 0)
        if many >= wanted:
            low, number = middle, many
        else:
            high = middle - 1
        step += 1
    return value_of(low.to(tl.int32)), number


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    given, listed, buckets, best, heat, pivot, scores_to, masses_to, ids_to,
    vocabulary,
    MASKED: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Stores scores, masses and ids of all tokens of the listed buckets that are not below `pivot`, up to CAP. Returns how many
    there are, and whether no token of these buckets is below the pivot."""
    count = tl.zeros((), tl.int32)
    above = tl.zeros((), tl.int32)
    for start in range(0, buckets * 32, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < buckets * 32
        column = tl.load(listed + place // 32, mask=inside, other=0) * 32 + place % 32
        values = logits_at(given, column, inside & (column < vocabulary), MASKED)
        possible = values > float("-inf")
        taken = possible & (values >= pivot)
        # Both counts in one number: BLOCK is far below 2^16.
        number = taken.to(tl.int32)
        to = count + tl.cumsum(number, 0) - number
        scores = tl.div_rn(values - best, heat)
        stored = taken & (to < CAP)
        tl.store(scores_to + to, scores, mask=stored)
        tl.store(masses_to + to, tl.exp(scores), mask=stored)
        tl.store(ids_to + to, column, mask=stored)
        both = tl.sum(number + (possible.to(tl.int32) << 16), 0)
        count += both & 0xFFFF
        above += both >> 16
    return count, above == count


@triton.jit
def _weighed(peaks, sums, parts, best, heat, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The mass of a row's first `parts` parts, from `weigh_kernel`, where the largest logit, `best`, has 1."""
    part = tl.arange(0, PARTS)
    inside = part < parts
    tops = tl.load(peaks + part, mask=inside, other=float("-inf"))
    masses = tl.load(sums + part, mask=inside, other=0.0)
    return tl.sum(masses * tl.exp(tl.div_rn(tops - best, heat)), 0)


@triton.jit
def _mean(kept, scores, masses):  # type: ignore[no-untyped-def]
    """The mean score of tokens that are kept, and their mass."""
    most = tl.sum(tl.where(kept, masses, 0.0), 0)
    # A finite logit far below the best one has a score of -inf.
    return tl.div_rn(tl.sum(tl.where(kept & (scores > float("-inf")), masses * scores, 0.0), 0), most), most


@triton.jit
def _drawn(kept, scores, masses, ids, seed, choice, position, CUDA: tl.constexpr):  # type: ignore[no-untyped-def]
    """The token that is drawn of those kept, and its log-probability among these."""
    noisy = tl.where(kept, scores + gumbel_of_ids(seed, choice, position, ids, CUDA), float("-inf"))
    chosen = tl.min(tl.where(kept & (noisy == tl.max(noisy, 0)), ids, 0x7FFFFFFF), 0)
    own = tl.max(tl.where(kept & (ids == chosen), scores, float("-inf")), 0)
    return chosen, own - tl.log(tl.sum(tl.where(kept, masses, 0.0), 0))


@triton.jit
def _among_few(  # type: ignore[no-untyped-def]
    gathered, gathered_masses, gathered_ids, count, everything, edge, k, p, floor, share, total, seed, choice, position,
    FEW: tl.constexpr, CUDA: tl.constexpr
):  # fmt: skip
    """Filters `count` gathered tokens, at most FEW, and draws one: whether all that may be kept is among them, the token, and its
    log-probability. Each is compared with each: how many are above it, and with what mass."""
    slot = tl.arange(0, FEW)
    full = slot < count
    scores = tl.load(gathered + slot, mask=full, other=float("-inf"))
    masses = tl.load(gathered_masses + slot, mask=full, other=0.0)
    ids = tl.load(gathered_ids + slot, mask=full, other=0)
    higher, mass_above = tl.zeros([FEW], tl.int32), tl.zeros([FEW], tl.float32)
    for start in range(0, count, 16):
        other = start + tl.arange(0, 16)
        their_scores = tl.load(gathered + other, mask=other < count, other=float("-inf"))
        their_masses = tl.load(gathered_masses + other, mask=other < count, other=0.0)
        above = their_scores[:, None] > scores[None, :]
        higher += tl.sum(above.to(tl.int32), 0)
        mass_above += tl.sum(tl.where(above, their_masses[:, None], 0.0), 0)
    usable = full & ((scores > edge) | everything)
    kept = usable & ((k == 0) | (higher < k))
    if k > 0:
        total = tl.sum(tl.where(kept, masses, 0.0), 0)
    mass = tl.sum(tl.where(usable, masses, 0.0), 0)
    enough = everything | (floor > edge)
    if k > 0:
        enough = everything | (tl.sum(usable.to(tl.int32), 0) >= k)
    elif p < 1.0:
        enough = everything | (mass >= p * total)
    kept = kept & (mass_above < tl.where(p < 1.0, p * total, float("inf"))) & (scores >= floor)
    if share < 1.0:
        lowest, (mean, most) = tl.min(tl.where(kept, scores, float("inf")), 0), _mean(kept, scores, masses)
        nearer = tl.zeros([FEW], tl.float32)
        for start in range(0, count, 16):
            other = start + tl.arange(0, 16)
            theirs = tl.load(gathered + other, mask=other < count, other=float("-inf"))
            their_masses = tl.load(gathered_masses + other, mask=other < count, other=0.0)
            near = (theirs >= lowest)[:, None] & (tl.abs(theirs - mean)[:, None] < tl.abs(scores - mean)[None, :])
            nearer += tl.sum(tl.where(near, their_masses[:, None], 0.0), 0)
        kept = kept & (nearer < share * most)
    chosen, final = _drawn(kept, scores, masses, ids, seed, choice, position, CUDA)
    return enough, chosen, final


@triton.jit
def _among_many(  # type: ignore[no-untyped-def]
    gathered, gathered_masses, gathered_ids, count, everything, edge, k, p, floor, share, total, seed, choice, position,
    CAP: tl.constexpr, CUDA: tl.constexpr
):  # fmt: skip
    """As `_among_few`, for up to CAP tokens: by bisection for thresholds."""
    slot = tl.arange(0, CAP)
    full = slot < count
    scores = tl.load(gathered + slot, mask=full, other=float("-inf"))
    masses = tl.load(gathered_masses + slot, mask=full, other=0.0)
    ids = tl.load(gathered_ids + slot, mask=full, other=0)
    keys = key_of(scores)
    usable = full & ((scores > edge) | everything)
    weights = tl.where(usable, masses, 0.0)
    threshold = tl.full((), LOWEST, tl.int32)
    enough = everything | (floor > edge)
    if k > 0:
        enough = everything | (tl.sum(usable.to(tl.int32), 0) >= k)
        threshold = threshold_of(keys, tl.where(usable, 1.0, 0.0), tl.minimum(k, CAP).to(tl.float32))
        weights = tl.where(keys >= threshold, weights, 0.0)
        total = tl.sum(weights, 0)
    elif p < 1.0:
        enough = everything | (tl.sum(weights, 0) >= p * total)
    if p < 1.0:
        threshold = tl.maximum(threshold, threshold_of(keys, weights, p * total))
    kept = usable & (keys >= threshold) & (scores >= floor)
    if share < 1.0:
        mean, most = _mean(kept, scores, masses)
        nearness = key_of(-tl.abs(scores - mean))
        kept = kept & (nearness >= threshold_of(nearness, tl.where(kept, masses, 0.0), share * most))
    chosen, final = _drawn(kept, scores, masses, ids, seed, choice, position, CUDA)
    return enough, chosen, final


@triton.jit(do_not_specialize=["parts", *STRIDES], do_not_specialize_on_alignment=[*PER_ROW, "peaks"])
def filter_kernel(
    logits: tl.tensor,  # [rows, vocabulary] float32
    mask: tl.tensor,
    maxima: tl.tensor,  # [rows, buckets]
    temperature: tl.tensor,  # [rows]; 0: greedy
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    typical_p: tl.tensor,
    seeds: tl.tensor,
    choices: tl.tensor,
    positions: tl.tensor,
    peaks: tl.tensor,  # [rows, parts], from `weigh_kernel`
    sums: tl.tensor,  # [rows, parts], from `weigh_kernel`
    listed: tl.tensor,  # [rows, buckets] int32
    gathered: tl.tensor,  # [rows, CAP] float32
    gathered_masses: tl.tensor,  # [rows, CAP] float32
    gathered_ids: tl.tensor,  # [rows, CAP] int32
    tokens: tl.tensor,  # [rows] int64, out: -1 where `draw` has to go over all logits
    bests: tl.tensor,  # [rows] float32, out: the largest logit
    limits: tl.tensor,  # [rows] float32, out: the lowest logit that stays
    uppers: tl.tensor,  # [rows] float32, out: what logits that stay are below
    finals: tl.tensor,  # [rows] float32, out: the token's log-probability
    lows: tl.tensor,  # [rows] float32, out: what is not above the limit, if `narrow` is to find it
    highs: tl.tensor,  # [rows] float32, out: what is above the limit
    targets: tl.tensor,  # [rows] float32, out: the mass of what is not below the limit; 0: not to be found
    vocabulary: tl.tensor,
    stride: tl.tensor,
    mask_stride: tl.tensor,
    buckets: tl.tensor,
    parts: tl.tensor,  # 0: not weighed
    MASKED: tl.constexpr,
    BUCKETS: tl.constexpr,
    PARTS: tl.constexpr,
    CAP: tl.constexpr,
    FEW: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
    CUDA: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Filters and samples one row among its gathered candidates, if these suffice; else leaves it to `draw`, with its limit."""
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    given = row_logits(logits, mask, row, stride, mask_stride)
    place = tl.arange(0, BUCKETS)
    largest = tl.load(maxima + row * buckets + place, mask=place < buckets, other=float("-inf"))
    heat, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    floor, share = lowest_score(min_p, row), tl.load(typical_p + row)
    best = tl.max(largest, 0)
    tl.store(bests + row, best)
    tl.store(limits + row, float("-inf"))
    tl.store(tokens + row, -1)
    tl.store(targets + row, 0.0)
    tl.store(uppers + row, float("inf"))
    if heat == 0.0:
        chosen = _largest(given, largest, best, buckets, vocabulary, MASKED, BUCKETS)
        tl.store(tokens + row, chosen.to(tl.int64))
        tl.store(finals + row, -tl.log(_weighed(peaks + row * parts, sums + row * parts, parts, best, 1.0, PARTS)))
    elif (k > 0) | (p < 1.0) | (floor > float("-inf")) | (share < 1.0):
        wanted = tl.minimum(tl.where(k > 0, k + k // 4 + 16, LEAST), CAP).to(tl.int32)
        filled = largest > float("-inf")
        pivot, few = _pivot(largest, filled, best, wanted)
        gathered += row * CAP
        gathered_masses += row * CAP
        gathered_ids += row * CAP
        listed += row * buckets
        number = (filled & (largest >= pivot)).to(tl.int32)
        tl.store(listed + tl.cumsum(number, 0) - number, place, mask=number != 0)
        tl.debug_barrier()  # what other threads have listed is read next
        count, everything = _gather(
            given, listed, few, best, heat, pivot, gathered,
            gathered_masses, gathered_ids, vocabulary,
            MASKED, CAP, BLOCK,
        )  # fmt: skip
        everything = everything & (few == tl.sum(filled.to(tl.int32), 0))
        tl.debug_barrier()  # and what they have gathered
        # The highest score that what was left behind may have: rounded, it may tie with gathered ones.
        edge = tl.div_rn(value_of(key_of(pivot) - 1) - best, heat)
        wanted_parts = tl.where((k == 0) & (p < 1.0), parts, 0)
        total = _weighed(peaks + row * parts, sums + row * parts, wanted_parts, best, heat, PARTS)
        seed, choice, position = tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row)
        enough = (count <= CAP) & ((k > 0) | (p >= 1.0) | (parts > 0))
        chosen, final = tl.zeros((), tl.int32), tl.zeros((), tl.float32)
        if enough:
            if count <= FEW:
                enough, chosen, final = _among_few(
                    gathered, gathered_masses, gathered_ids, count, everything, edge, k, p, floor, share, total,
                    seed, choice, position,
                    FEW, CUDA,
                )  # fmt: skip
            else:
                enough, chosen, final = _among_many(
                    gathered, gathered_masses, gathered_ids, count, everything, edge, k, p, floor, share, total,
                    seed, choice, position,
                    CAP, CUDA,
                )  # fmt: skip
        if enough:
            tl.store(tokens + row, tl.minimum(chosen, vocabulary - 1).to(tl.int64))
            tl.store(finals + row, final)
        elif (wanted_parts > 0) & (share >= 1.0):
            # All tokens below `low` together have less than the mass that top-p leaves out; those above `pivot` have too little.
            low = tl.log((1.0 - p) * total / vocabulary) - 0.01
            tl.store(lows + row, best + tl.minimum(low, 0.0) * heat - 1e-6 * tl.abs(best))
            tl.store(highs + row, tl.where(count <= CAP, pivot, value_of(key_of(best) + 1)))
            tl.store(targets + row, p * total)
        else:
            least = far_limit(given, best, heat, k, p, vocabulary, MASKED, 2 * BLOCK)
            limit = lowest_logit(best, heat, 0.0, tl.maximum(least, key_of(floor)))
            if share < 1.0:
                mean, radius = far_typical(given, best, heat, limit, share, vocabulary, MASKED, 2 * BLOCK)
                limit = tl.maximum(limit, lowest_logit(best, heat, mean, key_of(-radius)))
                tl.store(uppers + row, lowest_logit(best, heat, mean, key_of(radius) + 1))
            tl.store(limits + row, limit)


@triton.jit(do_not_specialize=["parts", *STRIDES], do_not_specialize_on_alignment=PER_ROW)
def draw_kernel(
    logits: tl.tensor,  # [rows, vocabulary] float32
    mask: tl.tensor,
    temperature: tl.tensor,
    seeds: tl.tensor,
    choices: tl.tensor,
    positions: tl.tensor,
    tokens: tl.tensor,  # [rows]: only rows with -1 are worked on
    bests: tl.tensor,
    limits: tl.tensor,
    uppers: tl.tensor,
    noisiest: tl.tensor,  # [rows, parts] float32, out: the largest score plus noise, off by less than NEARLY
    ids: tl.tensor,  # [rows, parts] int32, out: its token; less VAGUE if others may have more
    sums: tl.tensor,  # [rows, parts] float32, out: sum of exp(score) of all that stay
    vocabulary: tl.tensor,
    stride: tl.tensor,
    mask_stride: tl.tensor,
    parts: tl.tensor,
    MASKED: tl.constexpr,
    SIZE: tl.constexpr,
    OWN: tl.constexpr,
    CUDA: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Draws among OWN parts of SIZE logits of a row by Gumbel noise, for rows that `filter` has not finished: those that the noise
    makes largest, as far as it is known here."""
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(tokens + row) < 0:
        best, limit, upper = tl.load(bests + row), tl.load(limits + row), tl.load(uppers + row)
        heat, seed = tl.load(temperature + row), tl.load(seeds + row)
        choice, position = tl.load(choices + row), tl.load(positions + row)
        given = row_logits(logits, mask, row, stride, mask_stride)
        for part in range(tl.program_id(1) * OWN, tl.minimum((tl.program_id(1) + 1) * OWN, parts)):
            quads = part * (SIZE // 4) + tl.arange(0, SIZE // 4)
            column = part * SIZE + tl.arange(0, SIZE)
            values = logits_at(given, column, column < vocabulary, MASKED)
            noise = nearly_gumbel_of_quads(seed, choice, position, quads, CUDA)
            scores = (values - best) * tl.div_rn(1.0, heat)
            kept = (values >= limit) & (values < upper)
            noisy = tl.where(kept, scores + noise, float("-inf"))
            largest = tl.max(noisy, 0)
            near = noisy >= largest - 2 * NEARLY
            chosen = tl.minimum(tl.min(tl.where(near, column, 0x7FFFFFFF), 0), vocabulary - 1)
            others = (tl.sum(near.to(tl.int32), 0) > 1) & (largest > float("-inf"))
            place = row * parts + part
            tl.store(noisiest + place, largest)
            tl.store(ids + place, tl.where(others, chosen - VAGUE, chosen))
            tl.store(sums + place, tl.sum(tl.where(kept, nearly_exp(scores, CUDA), 0.0), 0))


@triton.jit
def _exactly(  # type: ignore[no-untyped-def]
    given, column, inside, best, heat, limit, upper, seed, choice, position, MASKED:
    tl.constexpr, CUDA: tl.constexpr
):  # fmt: skip
    """Scores of some tokens, and these with noise, -inf where `limit` or `upper` excludes them; both to the last bit."""
    values = logits_at(given, column, inside, MASKED)
    scores = tl.div_rn(values - best, heat)
    noisy = scores + gumbel_of_ids(seed, choice, position, column, CUDA)
    return scores, tl.where(inside & (values >= limit) & (values < upper), noisy, float("-inf"))


@triton.jit(
    do_not_specialize=STRIDES, do_not_specialize_on_alignment=[*PER_ROW, "peaks", "masses", "logprobs", "olds", "starts", "entries"]
)
def settle_kernel(
    logits: tl.tensor,  # [rows, vocabulary] float32
    mask: tl.tensor,
    temperature: tl.tensor,
    seeds: tl.tensor,
    choices: tl.tensor,
    positions: tl.tensor,
    bests: tl.tensor,
    limits: tl.tensor,
    uppers: tl.tensor,
    peaks: tl.tensor,  # [rows, parts], from `survey_kernel`
    masses: tl.tensor,  # [rows, parts], from `survey_kernel`
    noisiest: tl.tensor,  # [rows, parts], from `draw_kernel`, for rows whose token is -1
    ids: tl.tensor,
    sums: tl.tensor,
    tokens: tl.tensor,  # [rows] int64, in and out: -1 where the row's logits are NaN or infinite
    finals: tl.tensor,  # [rows] float32, in and out
    logprobs: tl.tensor,  # [rows] float32, out: NaN where the token is -1
    olds: tl.tensor,  # [entries], from `fused_penalties.change`; unused without CHANGED, as the following two
    starts: tl.tensor,  # [rows + 1], of these
    entries: tl.tensor,  # [entries], of these: tokens
    vocabulary: tl.tensor,
    parts: tl.tensor,
    stride: tl.tensor,
    mask_stride: tl.tensor,
    MASKED: tl.constexpr,
    CHANGED: tl.constexpr,
    SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    CUDA: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Combines the parts of one row: its token, and the log-probabilities of that."""
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SIZE)
    inside, place = part < parts, row * parts + part
    token = tl.load(tokens + row)
    own = tl.load(peaks + place, mask=inside, other=float("-inf"))
    own += tl.log(tl.load(masses + place, mask=inside, other=1.0))
    given = row_logits(logits, mask, row, stride, mask_stride)
    if token < 0:
        best, limit, upper = tl.load(bests + row), tl.load(limits + row), tl.load(uppers + row)
        heat, seed = tl.load(temperature + row), tl.load(seeds + row)
        choice, position = tl.load(choices + row), tl.load(positions + row)
        noisy = tl.load(noisiest + place, mask=inside, other=float("-inf"))
        near = inside & (noisy >= tl.max(noisy, 0) - 2 * NEARLY)
        column = tl.load(ids + place, mask=near, other=0)
        vague = near & (column < 0)
        column = tl.where(vague, 0, column)
        scores, noisy = _exactly(
            given,
            column,
            near & ~vague,
            best,
            heat,
            limit,
            upper,
            seed,
            choice,
            position,
            MASKED,
            CUDA,
        )
        largest = tl.max(noisy, 0)
        chosen = tl.min(tl.where(near & ~vague & (noisy == largest), column, 0x7FFFFFFF), 0)
        score = tl.max(tl.where(column == chosen, scores, float("-inf")), 0)
        # Where several tokens of a part may be the largest, all are compared: in about one part of ten thousand.
        number = tl.sum(vague.to(tl.int32), 0)
        while number > 0:
            first = tl.min(tl.where(vague, part, parts), 0)
            for start in range(0, SPLIT, SCANNED):
                scanned = first * SPLIT + start + tl.arange(0, SCANNED)
                their_scores, theirs = _exactly(
                    given, scanned, scanned < vocabulary, best,
                    heat, limit, upper, seed, choice, position, MASKED, CUDA,
                )  # fmt: skip
                most = tl.max(theirs, 0)
                other = tl.min(tl.where(theirs == most, scanned, 0x7FFFFFFF), 0)
                better = (most > largest) | ((most == largest) & (other < chosen))
                score = tl.where(better, tl.max(tl.where(scanned == other, their_scores, float("-inf")), 0), score)
                largest, chosen = tl.where(better, most, largest), tl.where(better, other, chosen)
            vague = vague & (part != first)
            number -= 1
        token = tl.minimum(chosen, vocabulary - 1).to(tl.int64)
        tl.store(finals + row, score - tl.log(tl.sum(tl.load(sums + place, mask=inside, other=0.0), 0)))
    if CHANGED:
        tl.debug_barrier()  # no thread reads new logits any more
        put_back(given.logits, olds, starts, entries, row, RESTORED)
        tl.debug_barrier()  # the token's old logit, which another thread may have written, is read next
    peak = tl.max(own, 0)
    normalizer = peak + tl.log(tl.sum(tl.exp(own - peak), 0))
    normalizer = tl.where(tl.abs(normalizer) < float("inf"), normalizer, float("nan"))
    tl.store(logprobs + row, tl.load(given.logits + token) - normalizer)
    tl.store(tokens + row, tl.where(normalizer == normalizer, token, -1))


def sample(
    logits: Tensor, draws: Draws, penalties: Penalties | None, mask: Tensor | None, weighed: bool = True, far: bool = True
) -> Sampled:
    """Samples one token for every row.

    logits: [rows, vocabulary] float32, its last dimension dense, and each row in memory of its own: with penalties they are
    changed, and put back; draws: of all rows, a temperature of 0 is greedy; penalties: of as many rows; mask:
    [rows, words] int32, bit i of word w allows token 32 w + i; weighed: without it, rows that have top-p and no top-k are slow, and
    greedy ones have no final log-probability; far: there are rows of the first kind.
    """
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, SPLIT)
    device = logits.device
    peaks, sums = torch.empty(2, rows, parts, device=device).unbind()
    maxima = torch.empty(rows, parts * (SPLIT // 32), device=device)
    given = Given(logits, mask)
    survey_kernel[(rows, parts)](
        *given.tensors, maxima, peaks, sums, vocabulary, *given.strides, **given.constants, SIZE=SPLIT, CUDA=on_nvidia(device),
        num_warps=WARPS, enable_fp_fusion=False, **begin_early(device),
    )  # fmt: skip
    changed = (peaks, peaks, peaks)
    if penalties is not None:
        changed = change(logits, penalties, mask, maxima), penalties.starts, penalties.ids
    tokens, finals, found, *drawn = _choose(given, draws, maxima, parts, weighed, far)
    logprobs = torch.empty(rows, device=device)
    settle_kernel[(rows,)](
        *given.tensors, draws.temperature, draws.seeds, draws.choices, draws.positions, *found, peaks, sums, *drawn, tokens,
        finals, logprobs, *changed, vocabulary, parts, *given.strides, **given.constants, SIZE=triton.next_power_of_2(parts),
        SPLIT=SPLIT, CHANGED=penalties is not None, CUDA=on_nvidia(device), num_warps=1, enable_fp_fusion=False,
        **begin_early(device),
    )  # fmt: skip
    return Sampled(tokens, logprobs, finals)


def _choose(given: Given, draws: Draws, maxima: Tensor, parts: int, weighed: bool, far: bool) -> tuple[Any, ...]:
    """Tokens and their log-probabilities; what is known of each row; and, for rows whose token is -1, what `draw` has found in each
    part."""
    rows, vocabulary = given.logits.shape
    device = given.logits.device
    peaks, masses = torch.empty(2, rows, parts, device=device).unbind()
    if weighed:
        weigh_kernel[(rows, parts)](
            *given.tensors, maxima, draws.temperature, draws.top_k, draws.top_p, peaks, masses, vocabulary, *given.strides,
            **given.constants, SIZE=SPLIT, CUDA=on_nvidia(device), num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    listed = torch.empty(rows, maxima.shape[1], dtype=torch.int32, device=device)
    gathered, gathered_masses = torch.empty(2, rows, CAPACITY, device=device).unbind()
    gathered_ids = torch.empty(rows, CAPACITY, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    bests, limits, uppers, finals, *bracket = torch.empty(7, rows, device=device).unbind()
    found = bests, limits, uppers  # the largest logits, the lowest that stay, and what these are below
    keys = (draws.seeds, draws.choices, draws.positions)
    filter_kernel[(rows,)](
        *given.tensors, maxima, draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.typical_p, *keys, peaks, masses,
        listed, gathered, gathered_masses, gathered_ids, tokens, *found, finals, *bracket, vocabulary,
        *given.strides, maxima.shape[1], parts if weighed else 0, **given.constants,
        BUCKETS=triton.next_power_of_2(maxima.shape[1]), PARTS=triton.next_power_of_2(parts), CAP=CAPACITY,
        FEW=min(FEW, CAPACITY), LEAST=WANTED, BLOCK=AT_ONCE, CUDA=on_nvidia(device), num_warps=WARPS, enable_fp_fusion=False,
        **begin_early(device),
    )  # fmt: skip
    if weighed and far:
        narrow(given, draws, bests, bracket, limits, SPLIT, 2 * AT_ONCE)
    noisiest, sums = torch.empty(2, rows, parts, device=device).unbind()
    ids = torch.empty(rows, parts, dtype=torch.int32, device=device)
    draw_kernel[(rows, triton.cdiv(parts, DRAW_PARTS))](
        *given.tensors, draws.temperature, *keys, tokens, *found, noisiest, ids, sums, vocabulary, *given.strides, parts,
        **given.constants, SIZE=SPLIT, OWN=DRAW_PARTS, CUDA=on_nvidia(device), num_warps=WARPS, enable_fp_fusion=False,
        **begin_early(device),
    )  # fmt: skip
    return tokens, finals, found, noisiest, ids, sums


def compilations() -> list[Compilation]:
    """With a grammar's mask, the harder case, and without; the vocabulary of Llama 3, and the largest there are."""
    split, plain = {"MASKED": True, "SIZE": SPLIT}, {"MASKED": False, "SIZE": SPLIT}
    few = {"MASKED": True, "BUCKETS": 4096, "PARTS": 32, "CAP": CAPACITY, "FEW": FEW, "LEAST": WANTED, "BLOCK": AT_ONCE}
    cases = [
        ("survey", survey_kernel, split, WARPS),
        ("survey plain", survey_kernel, plain, WARPS),
        ("weigh", weigh_kernel, split, WARPS),
        ("filter", filter_kernel, few, WARPS),
        ("filter plain", filter_kernel, {**few, **plain}, WARPS),
        ("filter 262144", filter_kernel, {**few, "BUCKETS": 8192}, WARPS),
        ("draw", draw_kernel, {**split, "OWN": DRAW_PARTS}, WARPS),
        ("draw plain", draw_kernel, {**plain, "OWN": DRAW_PARTS}, WARPS),
        ("settle", settle_kernel, {**split, "SIZE": 64, "SPLIT": SPLIT, "CHANGED": True}, 1),
        ("settle plain", settle_kernel, {**plain, "SIZE": 64, "SPLIT": SPLIT, "CHANGED": False}, 1),
    ]
    return compilations_of(cases)
