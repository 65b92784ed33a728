"""The logits of a row as kernels of sampling see them, without those that a grammar doesn't allow; and thresholds among them, for
`fused_sampling` and `fused_narrowing`.

A threshold is the key of a score, an int32 that orders like the float (`key_of`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .compilation import AMD, EARLY_TARGETS, NVIDIA, VENDORS, Compilation

LOWEST = tl.constexpr(-0x80000000)
WARPS = 8  # of kernels that load thousands of logits at once
# Arguments with one number per row or program: their alignment depends on the number of rows, and doesn't matter.
PER_ROW = [
    "temperature", "top_k", "top_p", "min_p", "typical_p", "seeds", "choices", "positions", "tokens", "bests", "limits", "finals",
    "uppers", "noisiest", "ids", "sums", "lows", "highs", "targets",
]  # fmt: skip
STRIDES = ["mask_stride"]  # of what there may not be
TYPES = {  # of arguments of all kernels on logits
    "logits": "*fp32", "mask": "*i32", "maxima": "*fp32", "peaks": "*fp32", "sums": "*fp32",
    "vocabulary": "i32:16", "stride": "i32:16", "mask_stride": "i32", "temperature": "*fp32",
    "top_k": "*i64", "top_p": "*fp32", "min_p": "*fp32", "seeds": "*i64", "choices": "*i64", "positions": "*i64",
    "gathered": "*fp32", "gathered_masses": "*fp32", "gathered_ids": "*i32", "tokens": "*i64", "bests": "*fp32",
    "limits": "*fp32", "finals": "*fp32", "buckets": "i32:16", "listed": "*i32", "noisiest": "*fp32", "ids": "*i32",
    "lows": "*fp32", "highs": "*fp32", "targets": "*fp32",
    "found": "*fp32", "counts": "*i32", "higher": "*fp32", "rounds": "i32", "masses": "*fp32", "logprobs": "*fp32", "parts": "i32",
    "olds": "*fp32", "starts": "*i32", "entries": "*i32", "typical_p": "*fp32", "uppers": "*fp32",
}  # fmt: skip


class Given:
    """Logits and a grammar's mask, as kernels take them."""

    def __init__(self, logits: Tensor, mask: Tensor | None) -> None:
        self.logits = logits
        self.tensors = logits, mask if mask is not None else logits
        self.strides = logits.stride(0), mask.stride(0) if mask is not None else 0
        self.constants = {"MASKED": mask is not None}


@triton.jit
def key_of(value):  # type: ignore[no-untyped-def]
    """Integers in the order of the floats; both zeros map to one."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):  # type: ignore[no-untyped-def]
    """The float of a `key_of`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


class RowLogits(NamedTuple):
    """Pointers to what is given of one row."""

    logits: tl.tensor
    mask: tl.tensor  # [words] int32; unused without MASKED
    mask_stride: tl.tensor  # words


@triton.jit
def row_logits(logits, mask, row, stride, mask_stride):  # type: ignore[no-untyped-def]
    """What is given of a row (int64)."""
    return RowLogits(logits + row * stride, mask + row * mask_stride, mask_stride)


@triton.jit
def is_allowed(words, token):  # type: ignore[no-untyped-def]
    """Whether a grammar allows tokens, by the words of its mask that hold their bits."""
    return ((words >> (token % 32)) & 1) != 0


@triton.jit
def logits_at(given, column, inside, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits of a row; with MASKED, -inf for tokens that its grammar doesn't allow. Bit i of word w is token 32 w + i."""
    # Masked by its bits, each would be loaded alone, not four at a time.
    values = tl.load(given.logits + column, mask=inside, other=float("-inf"))
    if MASKED:
        words = tl.load(given.mask + column // 32, mask=inside & (column // 32 < given.mask_stride), other=-1)
        values = tl.where(is_allowed(words, column), values, float("-inf"))
    return values


@triton.jit
def lowest_score(min_p, row):  # type: ignore[no-untyped-def]
    """The lowest score that min-p keeps. The same as torch's logarithm on the device."""
    share = tl.load(min_p + row)
    return tl.where(share > 0.0, tl.log(tl.where(share > 0.0, share, 1.0)), float("-inf"))


@triton.jit
def middle_of(low, high):  # type: ignore[no-untyped-def]
    """The midpoint of two int64, rounded up."""
    return low + ((high - low + 1) >> 1)


@triton.jit
def threshold_of(keys, weights, target):  # type: ignore[no-untyped-def]
    """The largest key at which the weights of all keys not below it sum up to `target`; the lowest int32 if none does."""
    low, high = tl.full((), -0x80000000, tl.int64), tl.full((), 0x7FFFFFFF, tl.int64)
    for _ in range(32):
        middle = middle_of(low, high)
        enough = tl.sum(tl.where(keys.to(tl.int64) >= middle, weights, 0.0), 0) >= target
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def _weight_above(  # type: ignore[no-untyped-def]
    given, best, heat, least, vocabulary, MASSES: tl.constexpr, MASKED:
    tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Mass (or number, without MASSES) of all tokens whose score's key is not below `least` (int64)."""
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        values = logits_at(given, column, column < vocabulary, MASKED)
        scores = tl.div_rn(values - best, heat)
        weights = tl.exp(scores) if MASSES else 1.0
        possible = values > float("-inf")
        sums += tl.where(possible & (key_of(scores).to(tl.int64) >= least), weights, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _far_threshold(  # type: ignore[no-untyped-def]
    given, best, heat, target, vocabulary, least, MASSES: tl.constexpr,
    MASKED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """`threshold_of` over all tokens of the row; at least `least`, which is the result if nothing above it reaches the target."""
    low, high = least.to(tl.int64), tl.full((), 0x7FFFFFFF, tl.int64)
    for _ in range(32):
        middle = middle_of(low, high)
        weight = _weight_above(given, best, heat, middle, vocabulary, MASSES, MASKED, BLOCK)
        enough = weight >= target
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def far_limit(  # type: ignore[no-untyped-def]
    given, best, heat, k, p, vocabulary, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    """The key of the lowest score that top-k and top-p keep, of all tokens of the row."""
    threshold = tl.full((), LOWEST, tl.int32)
    if k > 0:
        target = tl.minimum(k, vocabulary).to(tl.float32)
        threshold = _far_threshold(given, best, heat, target, vocabulary, threshold, False, MASKED, BLOCK)
    if p < 1.0:
        least = threshold.to(tl.int64)
        target = p * _weight_above(given, best, heat, least, vocabulary, True, MASKED, BLOCK)
        threshold = _far_threshold(given, best, heat, target, vocabulary, threshold, True, MASKED, BLOCK)
    return threshold


@triton.jit
def lowest_logit(best, heat, mean, least):  # type: ignore[no-untyped-def]
    """The lowest logit whose score, less `mean`, has a key that is not below `least`: scores never fall where logits rise. A number
    above the best if there is none."""
    low, high = tl.full((), -0x80000000, tl.int64), key_of(best).to(tl.int64) + 1
    for _ in range(33):
        middle = low + ((high - low) >> 1)
        value = tl.maximum(value_of(middle.to(tl.int32)), float("-inf"))  # there are NaNs below
        enough = key_of(tl.div_rn(value - best, heat) - mean) >= least
        low, high = tl.where(enough, low, middle + 1), tl.where(enough, middle, high)
        low = tl.minimum(low, high)
    return tl.maximum(value_of(high.to(tl.int32)), float("-inf"))


@triton.jit
def _kept_scores(given, best, heat, limit, column, vocabulary, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores of tokens that are not below `limit`, -inf for all others."""
    values = logits_at(given, column, column < vocabulary, MASKED)
    return tl.where((values >= limit) & (values > float("-inf")), tl.div_rn(values - best, heat), float("-inf"))


@triton.jit
def far_typical(  # type: ignore[no-untyped-def]
    given, best, heat, limit, share, vocabulary, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    """The mean of the scores of all tokens of the row that are not below `limit`, and the distance from it within which these have
    a share of their mass."""
    sums, products = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        scores = _kept_scores(given, best, heat, limit, start + tl.arange(0, BLOCK), vocabulary, MASKED)
        sums += tl.exp(scores)
        products += tl.where(scores > float("-inf"), tl.exp(scores) * scores, 0.0)
    total = tl.sum(sums, 0)
    mean = tl.div_rn(tl.sum(products, 0), total)
    low, high = tl.zeros((), tl.int32), tl.full((), 0x7F800000, tl.int32)  # bits of a distance, which order as it does
    while low < high:
        middle = low + ((high - low) >> 1)
        near = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            scores = _kept_scores(given, best, heat, limit, start + tl.arange(0, BLOCK), vocabulary, MASKED)
            near += tl.where(tl.abs(scores - mean) <= middle.to(tl.float32, bitcast=True), tl.exp(scores), 0.0)
        enough = tl.sum(near, 0) >= share * total
        low, high = tl.where(enough, low, middle + 1), tl.where(enough, middle, high)
    return mean, high.to(tl.float32, bitcast=True)


def compilations_of(cases: Sequence[tuple[str, Any, dict[str, Any], int]]) -> list[Compilation]:
    """Of kernels on logits: name, kernel, constants (and some that it may not have), warps."""
    later = tuple(target for target in NVIDIA if target not in EARLY_TARGETS)
    early = {"": later, "early": EARLY_TARGETS, "amd": AMD}
    return [
        Compilation(
            kernel=kernel,
            name=" ".join(["sampling", name, *filter(None, [kind])]),
            types=TYPES,
            constants={
                name: value
                for name, value in {**constants, "CUDA": kind != "amd", "EARLY": kind == "early"}.items()
                if name in kernel.arg_names
            },
            warps=warps,
            early=kind == "early",
            targets=own,
        )
        for name, kernel, constants, warps in cases
        for kind, own in (early if "EARLY" in kernel.arg_names else VENDORS).items()
    ]
