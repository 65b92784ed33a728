"""Sampling in Triton, from logits to tokens: penalties, bias, grammar mask, temperature, top-k, top-p, min-p, a draw,
log-probabilities.

    scores = (logits - the largest) / temperature
    kept = those of scores that are no lower than
        the k-th largest                                    top-k: Fan et al. 2018, arXiv:1805.04833
        the last that is needed for the mass p              top-p: Holtzman et al. 2019, arXiv:1904.09751
        log(min_p)                                          min-p: Nguyen et al. 2024, arXiv:2407.01082
    token = argmax of kept + Gumbel noise                   a draw from softmax(kept): see `sampling.draw`

The reference is `sampling.py`, with two differences. Of tokens that tie at the edge of top-p all stay (there it depends on the
order of a sort). The noise is made by `logarithm.gumbel`. Typical-p and the top tokens of a filtered distribution are left to
`sampling.py`.

Passes over all logits, for rows with usual filters:

1. `survey`: the model's own log-sum-exp, and the largest of every 32 allowed logits (a *bucket*).
2. `weigh`, for rows with top-p and no top-k: the mass of all tokens.

Then `filter`: the m-th largest of the buckets' maxima is exceeded by at least m logits, and hardly by many more. Those are
gathered, out of the few buckets that have any, and filters and draw go on among them. The gathered count and mass tell whether all
that a filter may keep is among them, so a row is never wrong, but may be slow.

A row whose filters keep more finds its threshold by bisection over the bits of a float, each step a pass over the row, and is drawn
in one more pass with noise for all tokens, as rows without filters are (`draw`). Penalties are applied in place, and undone at the
end (`fused_penalties`).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import AMD, NVIDIA, Compilation
from .dispatch import on_nvidia
from .fused_noise import gumbel_of_ids, gumbel_of_quads
from .fused_penalties import penalize_, restore_
from .sampling import Draws, Penalties

SPLIT = 4096  # logits per program of `survey`, `weigh` and `draw`
CAPACITY = 2048  # most logits that are gathered for a row
AT_ONCE = 2048  # logits that `filter` loads at once: with more, its registers leave no room for a second program
WANTED = 512  # at least so many are gathered, or twice top-k
RENEWED = 64  # bucket maxima per program of `renew`, of 32 logits each
WARPS = 8
LOWEST = tl.constexpr(-0x80000000)
# Arguments with one number per row or program: their alignment depends on the number of rows, and doesn't matter.
PER_ROW = [
    "temperature", "top_k", "top_p", "floors", "seeds", "choices", "positions", "tokens", "bests", "thresholds", "finals",
    "noisiest", "ids", "scores_of", "sums",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled token of every row with its log-probabilities, [rows] each."""

    tokens: Tensor  # int64: -1 where a row's logits are NaN or infinite, so that nothing could be sampled
    logprobs: Tensor  # float32, under the model's own distribution; NaN where the token is -1
    final: Tensor  # float32, under the filtered distribution that was drawn from; greedy: 0


@triton.jit
def _key(value):  # type: ignore[no-untyped-def]
    """Integers in the order of the floats; both zeros map to one."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _middle(low, high):  # type: ignore[no-untyped-def]
    """The midpoint of two int64, rounded up."""
    return low + ((high - low + 1) >> 1)


@triton.jit
def _threshold(keys, weights, target):  # type: ignore[no-untyped-def]
    """The largest key at which the weights of all keys not below it sum up to `target`; the lowest int32 if none does."""
    low, high = tl.full((), -0x80000000, tl.int64), tl.full((), 0x7FFFFFFF, tl.int64)
    for _ in range(32):
        middle = _middle(low, high)
        enough = tl.sum(tl.where(keys.to(tl.int64) >= middle, weights, 0.0), 0) >= target
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def _allowed(mask, column, inside, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which of a row's tokens its grammar allows; bit i of word w is token 32 w + i."""
    if MASKED:
        words = tl.load(mask + column // 32, mask=inside, other=0)
        inside = inside & (((words >> (column % 32)) & 1) != 0)
    return inside


@triton.jit
def _values(logits, column, vocabulary, allowed, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adjacent logits of a row, with -inf for those that its grammar doesn't allow."""
    if MASKED:  # masked by its bits, each would be loaded alone, not four at a time
        values = tl.load(logits + column, mask=column < vocabulary, other=float("-inf"))
        values = tl.where(allowed, values, float("-inf"))
    else:
        values = tl.load(logits + column, mask=allowed, other=float("-inf"))
    return values


@triton.jit(do_not_specialize_on_alignment=["peaks", "sums"])
def survey_kernel(
    logits: tl.tensor,  # [rows, vocabulary] float32
    mask: tl.tensor,  # [rows, words] int32; unused without MASKED
    maxima: tl.tensor,  # [rows, 32 programs' maxima]
    peaks: tl.tensor,  # [rows, programs]
    sums: tl.tensor,  # [rows, programs]
    vocabulary: tl.tensor,
    stride: tl.tensor,
    mask_stride: tl.tensor,
    MASKED: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Surveys SIZE logits of one row: their maximum, sum of exponentials, and bucket maxima."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = part * (SIZE // 32) + tl.arange(0, SIZE // 32)
    column = places[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = column < vocabulary
    values = tl.load(logits + row * stride + column, mask=inside, other=float("-inf"))
    peak = tl.max(tl.max(values, 1), 0)
    # Where all are -inf the difference would be NaN.
    sum_of_part = tl.sum(tl.sum(tl.exp(values - tl.where(peak == float("-inf"), 0.0, peak)), 1), 0)
    tl.store(peaks + row * tl.num_programs(1) + part, peak)
    tl.store(sums + row * tl.num_programs(1) + part, sum_of_part)
    allowed = _allowed(mask + row * mask_stride, column, inside, MASKED)
    largest = tl.max(tl.where(allowed, values, float("-inf")), 1)
    tl.store(maxima + row * tl.num_programs(1) * (SIZE // 32) + places, largest)


@triton.jit(do_not_specialize=["entries"])
def renew_kernel(
    logits: tl.tensor,  # [rows, vocabulary] float32
    mask: tl.tensor,
    maxima: tl.tensor,  # [rows, buckets]
    rows: tl.tensor,  # [entries]
    ids: tl.tensor,
    entries: tl.tensor,
    vocabulary: tl.tensor,
    stride: tl.tensor,
    mask_stride: tl.tensor,
    buckets: tl.tensor,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Recomputes the maxima of buckets whose logits penalties or biases have changed. Several tokens of a bucket write the same
    value. BLOCK entries per program."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    row, place = tl.load(rows + entry, mask=inside, other=0), tl.load(ids + entry, mask=inside, other=0) // 32
    column = place[:, None] * 32 + tl.arange(0, 32)[None, :]
    allowed = inside[:, None] & (column < vocabulary)
    allowed = _allowed(mask + row[:, None] * mask_stride, column, allowed, MASKED)
    values = tl.load(logits + row[:, None] * stride + column, mask=allowed, other=float("-inf"))
    tl.store(maxima + row * buckets + place, tl.max(values, 1), mask=inside)


@triton.jit
def _largest(logits, mask, largest, best, buckets, vocabulary, MASKED: tl.constexpr, BUCKETS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first token whose logit is `best`, the largest of the maxima `largest`."""
    found = tl.min(tl.where(largest == best, tl.arange(0, BUCKETS), buckets - 1), 0)
    column = found * 32 + tl.arange(0, 32)
    allowed = _allowed(mask, column, column < vocabulary, MASKED)
    values = tl.load(logits + column, mask=allowed, other=float("-inf"))
    return tl.min(tl.where(allowed & (values == best), column, vocabulary - 1), 0)


@triton.jit(do_not_specialize_on_alignment=[*PER_ROW, "peaks"])
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
) -> None:
    """Sums the mass of SIZE logits of one row, if its filters need the mass of all tokens."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    if (heat > 0.0) & (tl.load(top_k + row) == 0) & (tl.load(top_p + row) < 1.0):
        place = row * tl.num_programs(1) + part
        peak = tl.max(tl.load(maxima + place * (SIZE // 32) + tl.arange(0, SIZE // 32)), 0)
        column = part * SIZE + tl.arange(0, SIZE)
        allowed = _allowed(mask + row * mask_stride, column, column < vocabulary, MASKED)
        values = _values(logits + row * stride, column, vocabulary, allowed, MASKED)
        # Where all are -inf the difference would be NaN.
        masses = tl.exp(tl.div_rn(values - tl.where(peak == float("-inf"), 0.0, peak), heat))
        tl.store(peaks + place, peak)
        tl.store(sums + place, tl.sum(masses, 0))


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    logits, mask, listed, buckets, best, heat, pivot, scores_to, ids_to, vocabulary, MASKED: tl.constexpr, CAP: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Stores scores and ids of all tokens of the listed buckets that are not below `pivot`, up to CAP. Returns how many there are,
    and whether no token of these buckets is below the pivot."""
    count = tl.zeros((), tl.int32)
    below = tl.zeros((), tl.int32)
    for start in range(0, buckets * 32, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < buckets * 32
        column = tl.load(listed + place // 32, mask=inside, other=0) * 32 + place % 32
        allowed = _allowed(mask, column, inside & (column < vocabulary), MASKED)
        values = tl.load(logits + column, mask=allowed, other=float("-inf"))
        possible = allowed & (values > float("-inf"))
        taken = possible & (_key(values) >= pivot)
        number = taken.to(tl.int32)
        to = count + tl.cumsum(number, 0) - number
        tl.store(scores_to + to, tl.div_rn(values - best, heat), mask=taken & (to < CAP))
        tl.store(ids_to + to, column, mask=taken & (to < CAP))
        count += tl.sum(number, 0)
        below += tl.sum(possible.to(tl.int32), 0)
    return count, below == count


@triton.jit
def _weight_above(  # type: ignore[no-untyped-def]
    logits, mask, best, heat, least, vocabulary, MASSES: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    """Mass (or number, without MASSES) of all tokens whose score's key is not below `least` (int64)."""
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        allowed = _allowed(mask, column, column < vocabulary, MASKED)
        scores = tl.div_rn(_values(logits, column, vocabulary, allowed, MASKED) - best, heat)
        weights = tl.exp(scores) if MASSES else 1.0
        sums += tl.where(allowed & (_key(scores).to(tl.int64) >= least), weights, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _far_threshold(  # type: ignore[no-untyped-def]
    logits, mask, best, heat, target, vocabulary, least, MASSES: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    """`_threshold` over all tokens of the row; at least `least`, which is the result if nothing above it reaches the target."""
    low, high = least.to(tl.int64), tl.full((), 0x7FFFFFFF, tl.int64)
    for _ in range(32):
        middle = _middle(low, high)
        enough = _weight_above(logits, mask, best, heat, middle, vocabulary, MASSES, MASKED, BLOCK) >= target
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def _far_limit(logits, mask, best, heat, k, p, vocabulary, MASKED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The key of the lowest score that top-k and top-p keep, of all tokens of the row."""
    threshold = tl.full((), LOWEST, tl.int32)
    if k > 0:
        target = tl.minimum(k, vocabulary).to(tl.float32)
        threshold = _far_threshold(logits, mask, best, heat, target, vocabulary, threshold, False, MASKED, BLOCK)
    if p < 1.0:
        target = p * _weight_above(logits, mask, best, heat, threshold.to(tl.int64), vocabulary, True, MASKED, BLOCK)
        threshold = _far_threshold(logits, mask, best, heat, target, vocabulary, threshold, True, MASKED, BLOCK)
    return threshold


@triton.jit
def _weighed(peaks, sums, parts, best, heat, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The mass of a row's first `parts` parts, from `weigh_kernel`, where the largest logit, `best`, has 1."""
    part = tl.arange(0, PARTS)
    inside = part < parts
    tops = tl.load(peaks + part, mask=inside, other=float("-inf"))
    masses = tl.load(sums + part, mask=inside, other=0.0)
    return tl.sum(masses * tl.exp(tl.div_rn(tops - best, heat)), 0)


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=[*PER_ROW, "peaks"])
def filter_kernel(
    logits: tl.tensor,  # [rows, vocabulary] float32
    mask: tl.tensor,
    maxima: tl.tensor,  # [rows, buckets]
    temperature: tl.tensor,  # [rows]; 0: greedy
    top_k: tl.tensor,
    top_p: tl.tensor,
    floors: tl.tensor,  # log(min_p)
    seeds: tl.tensor,
    choices: tl.tensor,
    positions: tl.tensor,
    peaks: tl.tensor,  # [rows, parts], from `weigh_kernel`
    sums: tl.tensor,  # [rows, parts], from `weigh_kernel`
    listed: tl.tensor,  # [rows, buckets] int32
    gathered: tl.tensor,  # [rows, CAP] float32
    gathered_ids: tl.tensor,  # [rows, CAP] int32
    tokens: tl.tensor,  # [rows] int64, out: -1 where `draw` has to go over all logits
    bests: tl.tensor,  # [rows] float32, out: the largest logit
    thresholds: tl.tensor,  # [rows] int32, out: key of the lowest score that stays
    finals: tl.tensor,  # [rows] float32, out: the token's log-probability
    vocabulary: tl.tensor,
    stride: tl.tensor,
    mask_stride: tl.tensor,
    buckets: tl.tensor,
    parts: tl.tensor,  # 0: not weighed
    MASKED: tl.constexpr,
    BUCKETS: tl.constexpr,
    PARTS: tl.constexpr,
    CAP: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
    CUDA: tl.constexpr,
) -> None:
    """Filters and samples one row among its gathered candidates, if these suffice; else leaves it to `draw`, with its threshold."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    mask += row * mask_stride
    place = tl.arange(0, BUCKETS)
    largest = tl.load(maxima + row * buckets + place, mask=place < buckets, other=float("-inf"))
    best = tl.max(largest, 0)
    heat, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    floor = tl.load(floors + row)
    tl.store(bests + row, best)
    tl.store(thresholds + row, LOWEST)
    tl.store(tokens + row, -1)
    if heat == 0.0:
        chosen = _largest(logits, mask, largest, best, buckets, vocabulary, MASKED, BUCKETS)
        tl.store(tokens + row, chosen.to(tl.int64))
        tl.store(finals + row, 0.0)
    elif (k > 0) | (p < 1.0) | (floor > float("-inf")):
        wanted = tl.minimum(tl.maximum(2 * k, LEAST), CAP).to(tl.float32)
        pivot = _threshold(_key(largest), tl.where(place < buckets, 1.0, 0.0), wanted)
        gathered += row * CAP
        gathered_ids += row * CAP
        listed += row * buckets
        filled = (place < buckets) & (largest > float("-inf"))
        chosen_buckets = filled & (_key(largest) >= pivot)
        number = chosen_buckets.to(tl.int32)
        tl.store(listed + tl.cumsum(number, 0) - number, place, mask=chosen_buckets)
        few = tl.sum(number, 0)
        tl.debug_barrier()  # what other threads have listed is read next
        count, everything = _gather(
            logits, mask, listed, few, best, heat, pivot, gathered, gathered_ids, vocabulary, MASKED, CAP, BLOCK
        )
        everything = everything & (few == tl.sum(filled.to(tl.int32), 0))
        tl.debug_barrier()  # and what they have gathered
        # Of the gathered only those above the lowest count: what was left behind may tie with that.
        slot = tl.arange(0, CAP)
        full = slot < tl.minimum(count, CAP)
        scores = tl.load(gathered + slot, mask=full, other=float("-inf"))
        ids = tl.load(gathered_ids + slot, mask=full, other=0)
        keys = _key(scores)
        least = tl.min(tl.where(full, keys, 0x7FFFFFFF), 0)
        usable = full & ((keys > least) | everything)
        enough = count <= CAP
        threshold = tl.full((), LOWEST, tl.int32)
        weights = tl.where(usable, tl.exp(scores), 0.0)
        wanted_parts = tl.where((k == 0) & (p < 1.0), parts, 0)
        total = _weighed(peaks + row * parts, sums + row * parts, wanted_parts, best, heat, PARTS)
        enough = enough & ((k > 0) | (p >= 1.0) | (parts > 0))
        if k > 0:
            enough = enough & (everything | (tl.sum(usable.to(tl.int32), 0) >= k))
            threshold = _threshold(keys, tl.where(usable, 1.0, 0.0), tl.minimum(k, CAP).to(tl.float32))
            weights = tl.where(keys >= threshold, weights, 0.0)
            total = tl.sum(weights, 0)
        if p < 1.0:
            enough = enough & ((k > 0) | everything | (tl.sum(weights, 0) >= p * total))
            threshold = tl.maximum(threshold, _threshold(keys, weights, p * total))
        if (k == 0) & (p >= 1.0):
            enough = enough & (everything | (_key(floor) > least))
        if enough:
            kept = usable & (keys >= threshold) & (scores >= floor)
            noise = gumbel_of_ids(tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row), ids, CUDA)
            noisy = tl.where(kept, scores + noise, float("-inf"))
            chosen = tl.min(tl.where(kept & (noisy == tl.max(noisy, 0)), ids, 0x7FFFFFFF), 0)
            own = tl.max(tl.where(full & (ids == chosen), scores, float("-inf")), 0)
            tl.store(tokens + row, tl.minimum(chosen, vocabulary - 1).to(tl.int64))
            tl.store(finals + row, own - tl.log(tl.sum(tl.where(kept, tl.exp(scores), 0.0), 0)))
        else:
            tl.store(thresholds + row, _far_limit(logits, mask, best, heat, k, p, vocabulary, MASKED, 2 * BLOCK))


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def draw_kernel(
    logits: tl.tensor,  # [rows, vocabulary] float32
    mask: tl.tensor,
    temperature: tl.tensor,
    floors: tl.tensor,
    seeds: tl.tensor,
    choices: tl.tensor,
    positions: tl.tensor,
    tokens: tl.tensor,  # [rows]: only rows with -1 are worked on
    bests: tl.tensor,
    thresholds: tl.tensor,
    noisiest: tl.tensor,  # [rows, programs] float32, out: the largest score plus noise
    ids: tl.tensor,  # [rows, programs] int64, out: its token
    scores_of: tl.tensor,  # [rows, programs] float32, out: its score without noise
    sums: tl.tensor,  # [rows, programs] float32, out: sum of exp(score) of all that stay
    vocabulary: tl.tensor,
    stride: tl.tensor,
    mask_stride: tl.tensor,
    MASKED: tl.constexpr,
    SIZE: tl.constexpr,
    CUDA: tl.constexpr,
) -> None:
    """Draws among SIZE logits of one row by Gumbel noise, for rows that `filter` has not finished."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(tokens + row) < 0:
        quads = part * (SIZE // 4) + tl.arange(0, SIZE // 4)
        noise = gumbel_of_quads(tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row), quads, CUDA)
        column = part * SIZE + tl.arange(0, SIZE)
        allowed = _allowed(mask + row * mask_stride, column, column < vocabulary, MASKED)
        values = _values(logits + row * stride, column, vocabulary, allowed, MASKED)
        scores = tl.div_rn(values - tl.load(bests + row), tl.load(temperature + row))
        kept = allowed & (_key(scores) >= tl.load(thresholds + row)) & (scores >= tl.load(floors + row))
        noisy = tl.where(kept, scores + noise, float("-inf"))
        largest = tl.max(noisy, 0)
        chosen = tl.min(tl.where(noisy == largest, column, 0x7FFFFFFF), 0)
        chosen = tl.minimum(chosen, vocabulary - 1)
        place = row * tl.num_programs(1) + part
        tl.store(noisiest + place, largest)
        tl.store(ids + place, chosen.to(tl.int64))
        tl.store(scores_of + place, tl.max(tl.where(column == chosen, scores, float("-inf")), 0))
        tl.store(sums + place, tl.sum(tl.where(kept, tl.exp(scores), 0.0), 0))


@triton.jit(do_not_specialize_on_alignment=[*PER_ROW, "peaks", "masses", "logprobs"])
def settle_kernel(
    logits: tl.tensor,  # [rows, vocabulary] float32
    peaks: tl.tensor,  # [rows, parts], from `survey_kernel`
    masses: tl.tensor,  # [rows, parts], from `survey_kernel`
    noisiest: tl.tensor,  # [rows, parts], from `draw_kernel`, for rows whose token is -1
    ids: tl.tensor,
    scores_of: tl.tensor,
    sums: tl.tensor,
    tokens: tl.tensor,  # [rows] int64, in and out: -1 where the row's logits are NaN or infinite
    finals: tl.tensor,  # [rows] float32, in and out
    logprobs: tl.tensor,  # [rows] float32, out: NaN where the token is -1
    parts: tl.tensor,
    stride: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    """Combines the parts of one row: its token, and the log-probabilities of that."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SIZE)
    inside, place = part < parts, row * parts + part
    token = tl.load(tokens + row)
    if token < 0:
        noisy = tl.load(noisiest + place, mask=inside, other=float("-inf"))
        best = tl.minimum(tl.argmax(noisy, 0), parts - 1)  # of NaNs none is the largest
        token = tl.load(ids + row * parts + best)
        total = tl.sum(tl.load(sums + place, mask=inside, other=0.0), 0)
        tl.store(finals + row, tl.load(scores_of + row * parts + best) - tl.log(total))
    own = tl.load(peaks + place, mask=inside, other=float("-inf"))
    own += tl.log(tl.load(masses + place, mask=inside, other=1.0))
    peak = tl.max(own, 0)
    normalizer = peak + tl.log(tl.sum(tl.exp(own - peak), 0))
    normalizer = tl.where(tl.abs(normalizer) < float("inf"), normalizer, float("nan"))
    tl.store(logprobs + row, tl.load(logits + row * stride + token) - normalizer)
    tl.store(tokens + row, tl.where(normalizer == normalizer, token, -1))


def sample(logits: Tensor, draws: Draws, penalties: Penalties | None, mask: Tensor | None, weighed: bool = True) -> Sampled:
    """Samples one token for every row.

    logits: [rows, vocabulary] float32, its last dimension dense; modified on the way if there are penalties, restored afterwards;
    draws: of all rows, a temperature of 0 is greedy, typical_p is ignored; penalties: of as many rows, biases of distinct tokens;
    mask: [rows, words] int32, bit i of word w allows token 32 w + i; weighed: without it, rows that have top-p and no top-k are
    slow.
    """
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, SPLIT)
    device = logits.device
    peaks, sums = torch.empty(2, rows, parts, device=device).unbind()
    maxima = torch.empty(rows, parts * (SPLIT // 32), device=device)
    masked, mask_stride = mask is not None, mask.stride(0) if mask is not None else 0
    words = mask if mask is not None else logits
    survey_kernel[(rows, parts)](
        logits, words, maxima, peaks, sums, vocabulary, logits.stride(0), mask_stride, MASKED=masked, SIZE=SPLIT, num_warps=WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    saved = None
    if penalties is not None:
        saved = penalize_(logits, penalties)
        for touched_rows, touched in ((penalties.rows, penalties.ids), (penalties.bias_rows, penalties.bias_ids)):
            if len(touched):
                renew_kernel[(triton.cdiv(len(touched), RENEWED),)](
                    logits, words, maxima, touched_rows, touched, len(touched), vocabulary, logits.stride(0), mask_stride,
                    maxima.shape[1], MASKED=masked, BLOCK=RENEWED, enable_fp_fusion=False,
                )  # fmt: skip
    tokens, finals, *drawn = _choose(logits, draws, mask, maxima, parts, weighed)
    if penalties is not None and saved is not None:
        restore_(logits, penalties, saved)
    logprobs = torch.empty(rows, device=device)
    settle_kernel[(rows,)](
        logits, peaks, sums, *drawn, tokens, finals, logprobs, parts, logits.stride(0), SIZE=triton.next_power_of_2(parts),
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return Sampled(tokens, logprobs, finals)


def _choose(logits: Tensor, draws: Draws, mask: Tensor | None, maxima: Tensor, parts: int, weighed: bool) -> tuple[Tensor, ...]:
    """Tokens and their log-probabilities, and, for rows whose token is -1, what `draw` has found in each part."""
    rows, vocabulary = logits.shape
    device = logits.device
    masked, mask_stride = mask is not None, mask.stride(0) if mask is not None else 0
    mask = mask if mask is not None else logits
    peaks, masses = torch.empty(2, rows, parts, device=device).unbind()
    if weighed:
        weigh_kernel[(rows, parts)](
            logits, mask, maxima, draws.temperature, draws.top_k, draws.top_p, peaks, masses, vocabulary, logits.stride(0),
            mask_stride, MASKED=masked, SIZE=SPLIT, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    listed = torch.empty(rows, maxima.shape[1], dtype=torch.int32, device=device)
    gathered = torch.empty(rows, CAPACITY, device=device)
    gathered_ids = torch.empty(rows, CAPACITY, dtype=torch.int32, device=device)
    tokens, thresholds = torch.empty(rows, dtype=torch.int64, device=device), torch.empty(rows, dtype=torch.int32, device=device)
    bests, finals = torch.empty(2, rows, device=device).unbind()
    floors = draws.min_p.log()
    keys = (draws.seeds, draws.choices, draws.positions)
    cuda = on_nvidia(device)
    filter_kernel[(rows,)](
        logits, mask, maxima, draws.temperature, draws.top_k, draws.top_p, floors, *keys, peaks, masses, listed, gathered,
        gathered_ids, tokens, bests, thresholds, finals, vocabulary, logits.stride(0), mask_stride, maxima.shape[1],
        parts if weighed else 0, MASKED=masked, BUCKETS=triton.next_power_of_2(maxima.shape[1]),
        PARTS=triton.next_power_of_2(parts), CAP=CAPACITY, LEAST=WANTED, BLOCK=AT_ONCE, CUDA=cuda, num_warps=WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    noisiest, scores, sums = torch.empty(3, rows, parts, device=device).unbind()
    ids = torch.empty(rows, parts, dtype=torch.int64, device=device)
    draw_kernel[(rows, parts)](
        logits, mask, draws.temperature, floors, *keys, tokens, bests, thresholds, noisiest, ids, scores, sums, vocabulary,
        logits.stride(0), mask_stride, MASKED=masked, SIZE=SPLIT, CUDA=cuda, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens, finals, noisiest, ids, scores, sums


_TYPES = {
    "logits": "*fp32", "mask": "*i32", "maxima": "*fp32", "peaks": "*fp32", "sums": "*fp32", "vocabulary": "i32:16",
    "stride": "i32:16", "mask_stride": "i32", "rows": "*i64", "ids": "*i64", "entries": "i32", "temperature": "*fp32",
    "top_k": "*i64", "top_p": "*fp32", "floors": "*fp32", "seeds": "*i64", "choices": "*i64", "positions": "*i64",
    "gathered": "*fp32", "gathered_ids": "*i32", "tokens": "*i64", "bests": "*fp32", "thresholds": "*i32", "finals": "*fp32",
    "buckets": "i32:16", "listed": "*i32", "noisiest": "*fp32", "scores_of": "*fp32", "masses": "*fp32", "logprobs": "*fp32",
    "parts": "i32",
}  # fmt: skip


def compilations() -> list[Compilation]:
    """With a grammar's mask, the harder case; the vocabulary of Llama 3, and the largest there are."""
    split = {"MASKED": True, "SIZE": SPLIT}
    few = {"MASKED": True, "BUCKETS": 4096, "PARTS": 32, "CAP": CAPACITY, "LEAST": WANTED, "BLOCK": AT_ONCE}
    cases = [
        ("survey", survey_kernel, {**split}, WARPS),
        ("renew", renew_kernel, {"MASKED": True, "BLOCK": RENEWED}, 4),
        ("weigh", weigh_kernel, split, WARPS),
        ("filter", filter_kernel, {**few, "CUDA": True}, WARPS),
        ("filter amd", filter_kernel, {**few, "CUDA": False}, WARPS),
        ("filter 262144", filter_kernel, {**few, "CUDA": True, "BUCKETS": 8192}, WARPS),
        ("filter 262144 amd", filter_kernel, {**few, "CUDA": False, "BUCKETS": 8192}, WARPS),
        ("draw", draw_kernel, {**split, "CUDA": True}, WARPS),
        ("draw amd", draw_kernel, {**split, "CUDA": False}, WARPS),
        ("settle", settle_kernel, {"SIZE": 64}, 1),
    ]
    return [
        Compilation(
            kernel=kernel,
            name=f"sampling {name}",
            types=_TYPES,
            constants=dict(constants),
            warps=warps,
            targets=(NVIDIA if constants["CUDA"] else AMD) if "CUDA" in constants else (),
        )
        for name, kernel, constants, warps in cases
    ]
