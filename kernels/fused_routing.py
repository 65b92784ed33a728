"""Top-k routing of a mixture of experts, and sorting of (token, expert) pairs by expert, in Triton: two launches instead of a dozen
small ones, which take as long as reading the weights of few experts. The reference is `experts.py`.

    scores = softmax(logits), or sigmoid(logits), or sqrt(softplus(logits))
    chosen = the COUNT highest of scores + correction           with groups: within the OPEN ones whose BEST best add up highest
    shares = factor * scores[chosen] / sum of scores[chosen]

Routing has a program of one warp for each token; pairs are sorted by a single program, which compares each with all. Knows tensors
only. Of equal scores those of the first experts are taken, however many tokens there are.
"""

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import Compilation
from .fused_activation import softplus

PAIRS = 256  # most pairs that one program sorts; more are sorted by torch
PART = 32  # pairs that all others are compared with at once
WARPS = 8


@triton.jit
def limited_to_groups(
    judged: tl.tensor,
    slot: tl.tensor,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
    SETS: tl.constexpr,
    OPEN: tl.constexpr,
    BEST: tl.constexpr,
    ZEROED: tl.constexpr,
) -> tl.tensor:
    """Group-limited routing: `judged`, with -inf, or 0, outside of the OPEN expert groups with the highest sums of their BEST best
    experts, one or two. SETS: a power of two; some groups may have no experts."""
    number = tl.arange(0, SETS)
    own = tl.where((slot // SIZE)[None, :] == number[:, None], judged[None, :], float("-inf"))
    first = tl.argmax(own, 1)
    sums = tl.max(own, 1)
    if BEST == 2:
        sums += tl.max(tl.where(slot[None, :] == first[:, None], float("-inf"), own), 1)
    result = tl.zeros([SLOTS], tl.float32) if ZEROED else tl.full([SLOTS], float("-inf"), tl.float32)
    for _ in tl.static_range(OPEN):
        best = tl.argmax(sums, 0)
        result = tl.where(slot // SIZE == best, judged, result)
        sums = tl.where(number == best, float("-inf"), sums)
    return result


@triton.jit
def route_kernel(
    shares: tl.tensor,  # [tokens, COUNT] float32, out
    chosen: tl.tensor,  # [tokens, COUNT] int64, out
    logits: tl.tensor,  # [tokens, EXPERTS]
    correction: tl.tensor,  # [EXPERTS] float32; unused without CORRECTED
    factor: tl.tensor,
    least: tl.tensor,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    COUNT: tl.constexpr,
    PLACES: tl.constexpr,
    SETS: tl.constexpr,
    OPEN: tl.constexpr,
    BEST: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    ZEROED: tl.constexpr,
    ROOTED: tl.constexpr,
) -> None:
    """Routes one token. PLACES, SLOTS: powers of two, at least COUNT and EXPERTS."""
    token = tl.program_id(0).to(tl.int64)
    slot, place = tl.arange(0, SLOTS), tl.arange(0, PLACES)
    there = slot < EXPERTS
    logit = tl.load(logits + token * EXPERTS + slot, mask=there, other=float("-inf")).to(tl.float32)
    if ROOTED:
        scores = tl.sqrt(softplus(logit))
    elif SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logit))
    else:
        scores = tl.exp(logit - tl.max(logit, 0))
    scores = tl.where(there, scores, 0.0)
    if not SIGMOID and not ROOTED:
        scores /= tl.sum(scores, 0)
    judged = logit if BY_LOGITS else scores
    if CORRECTED:
        judged += tl.load(correction + slot, mask=there, other=0.0)
    judged = tl.where(there & (judged == judged), judged, float("-inf"))  # of NaNs the first experts are taken
    if OPEN < SETS:
        judged = limited_to_groups(judged, slot, SLOTS, EXPERTS // SETS, triton.next_power_of_2(SETS), OPEN, BEST, ZEROED)
        judged = tl.where(there, judged, float("-inf"))
    held = tl.zeros([PLACES], tl.float32)
    for i in tl.static_range(COUNT):
        best = tl.argmax(judged, 0)
        held = tl.where(place == i, tl.sum(tl.where(slot == best, scores, 0.0), 0), held)
        tl.store(chosen + token * COUNT + i, best.to(tl.int64))
        judged = tl.where(slot == best, float("-inf"), judged)
    if NORMALIZED:
        held /= tl.sum(held, 0) + least
    tl.store(shares + token * COUNT + place, held * factor, mask=place < COUNT)


@triton.jit(do_not_specialize=["pairs"])
def sort_kernel(
    order: tl.tensor,  # [pairs] int64, out
    starts: tl.tensor,  # [EXPERTS + 1] int64, out
    numbers: tl.tensor,  # [pairs] int64
    pairs: tl.tensor,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """Stable sort of all pairs by counting those before each, in a single program. SLOTS, SIZE: at least EXPERTS + 1 and pairs."""
    pair, slot = tl.arange(0, SIZE), tl.arange(0, SLOTS)
    own = tl.load(numbers + pair, mask=pair < pairs, other=EXPERTS).to(tl.int32)
    place = tl.zeros([SIZE], tl.int32)
    before = tl.zeros([SLOTS], tl.int32)
    for first in range(0, SIZE, PART):
        other = first + tl.arange(0, PART)
        number = tl.load(numbers + other, mask=other < pairs, other=EXPERTS).to(tl.int32)
        earlier = (number[None, :] == own[:, None]) & (other[None, :] < pair[:, None])
        place += tl.sum(((number[None, :] < own[:, None]) | earlier).to(tl.int32), 1)
        before += tl.sum((number[None, :] < slot[:, None]).to(tl.int32), 1)
    tl.store(order + place, pair.to(tl.int64), mask=pair < pairs)
    tl.store(starts + slot, before.to(tl.int64), mask=slot <= EXPERTS)


def route(
    logits: Tensor,
    count: int,
    normalized: bool,
    sigmoid: bool,
    correction: Tensor | None,
    sets: tuple[int, int, int],
    factor: float,
    least: float,
    by_logits: bool,
    zeroed: bool,
    rooted: bool,
) -> tuple[Tensor, Tensor]:
    """As `experts.route`."""
    tokens, experts = logits.shape
    shares = torch.empty(tokens, count, device=logits.device)
    chosen = torch.empty(tokens, count, dtype=torch.int64, device=logits.device)
    if tokens:
        constants = _constants(experts, count, sets, sigmoid, correction is not None, normalized, by_logits, zeroed, rooted)
        route_kernel[(tokens,)](
            shares,
            chosen,
            logits.contiguous(),
            correction if correction is not None else shares,
            factor,
            least,
            **constants,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return shares, chosen


def _constants(
    experts: int,
    count: int,
    sets: tuple[int, int, int],
    sigmoid: bool,
    corrected: bool,
    normalized: bool,
    by_logits: bool = False,
    zeroed: bool = False,
    rooted: bool = False,
) -> dict[str, Any]:
    return {
        "EXPERTS": experts,
        "SLOTS": triton.next_power_of_2(experts),
        "COUNT": count,
        "PLACES": triton.next_power_of_2(count),
        "SETS": sets[0],
        "OPEN": sets[1],
        "BEST": sets[2],
        "SIGMOID": sigmoid,
        "CORRECTED": corrected,
        "NORMALIZED": normalized,
        "BY_LOGITS": by_logits,
        "ZEROED": zeroed,
        "ROOTED": rooted,
    }


def sort(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Up to PAIRS pairs sorted by expert, stably; and where each expert's pairs begin, [experts + 1]."""
    pairs = chosen.numel()
    order = torch.empty(pairs, dtype=torch.int64, device=chosen.device)
    starts = torch.empty(experts + 1, dtype=torch.int64, device=chosen.device)
    size = max(triton.next_power_of_2(pairs), PART)
    sort_kernel[(1,)](
        order,
        starts,
        chosen.contiguous(),
        pairs,
        EXPERTS=experts,
        SLOTS=triton.next_power_of_2(experts + 1),
        SIZE=size,
        PART=PART,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return order, starts


def compilations() -> list[Compilation]:
    """Qwen3's experts, gpt-oss's, DeepSeek's in groups, DeepSeek V4's with roots, A.X K2's, where those of other groups count as 0,
    Kolibri's by logits, and as many as LongCat's, of which it sorts fewer."""
    found = []
    pointers = {"shares": "*fp32", "chosen": "*i64", "correction": "*fp32"} | dict.fromkeys(("factor", "least"), "fp32")
    for name, experts, count, sets, scored in (
        ("128 of 8", 128, 8, (1, 1, 2), False),
        ("32 of 4", 32, 4, (1, 1, 2), False),
        ("160 of 6 in sets", 160, 6, (8, 3, 1), False),
        ("256 of 8 in sets", 256, 8, (8, 4, 2), True),
        ("128 of 8 in sets, others 0", 128, 8, (8, 4, 2), True),
        ("384 of 6 by logits", 384, 6, (1, 1, 2), True),
        ("768 of 12", 768, 12, (1, 1, 2), True),
        ("256 of 6 by roots", 256, 6, (1, 1, 2), True),
    ):
        ways = (name.endswith(end) for end in ("logits", "0", "roots"))
        constants = _constants(experts, count, sets, scored and not name.endswith("roots"), scored, True, *ways)
        found.append(
            Compilation(
                kernel=route_kernel,
                name=f"route {name}",
                types=pointers | {"logits": "*fp32" if scored else "*bf16"},
                constants=constants,
                warps=1,
                hot=True,
            )
        )
    for experts, size in itertools.product((32, 256, 512), (PART, PAIRS)):
        sizes = {"EXPERTS": experts, "SLOTS": triton.next_power_of_2(experts + 1), "SIZE": size, "PART": PART}
        found.append(
            Compilation(
                kernel=sort_kernel,
                name=f"sort {size} by {experts}",
                types=dict.fromkeys(("order", "starts", "numbers"), "*i64") | {"pairs": "i32"},
                constants=sizes,
                warps=WARPS,
                hot=True,
            )
        )
    return found
