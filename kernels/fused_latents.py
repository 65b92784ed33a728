"""MLA (DeepSeek-AI 2024, arXiv:2405.04434) between its projections and attention, in one Triton kernel: RMS norm of the latent,
rotary embedding of the rotary features of queries and keys, and the KV cache write.

    query[token, head, -turned:] = rotate(query[token, head, -turned:])                 in place
    cache[slots[token]] = rms_norm(latents[token, :size]), rotate(latents[token, size:])

Of a token's programs the first computes the latent, each other some query heads. Defined by
`operations.rotate_and_write_latents`; rounds to the dtype in the same places.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .compilation import EARLY_TARGETS, EIGHT_BIT_TARGETS, WARP, Compilation
from .dependent_launch import begin_early, wait
from .fused_rotary import clamped_for_cache, most_of, rotated

# Query heads per program; more where these have fewer features than the program has threads: queries are changed in place, so no
# two threads may hold the same feature (see `fused_hyper_connections`).
HEADS = 16
WARPS = 4


@triton.jit
def angles(table, token, TURNED: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Indices of the first half of the rotary features, padded; their mask; a token's cosines and sines, the same for both
    halves."""
    half = tl.arange(0, HALF)
    within = half < TURNED // 2
    angle = table + token * 2 * TURNED + half
    cosine = tl.load(angle, mask=within, other=0.0).to(tl.float32)
    sine = tl.load(angle + TURNED + TURNED // 2, mask=within, other=0.0).to(tl.float32)
    return half, within, cosine, sine


@triton.jit
def turn(place, inside, cosine, sine, TURNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rotates features in place. place: pointers to the first halves; the other halves are TURNED // 2 behind them."""
    low, high = tl.load(place, mask=inside, other=0.0), tl.load(place + TURNED // 2, mask=inside, other=0.0)
    low, high = rotated(low, high, cosine, sine)
    tl.store(place, low, mask=inside)
    tl.store(place + TURNED // 2, high, mask=inside)


@triton.jit
def keep(kept, half, within, low, high, TURNED: tl.constexpr, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes both halves of rotated features to the cache. MOST: as in `latents_kernel`."""
    tl.store(kept + half, clamped_for_cache(low, MOST).to(kept.dtype.element_ty), mask=within)
    tl.store(kept + TURNED // 2 + half, clamped_for_cache(high, MOST).to(kept.dtype.element_ty), mask=within)


@triton.jit
def latents_kernel(
    query: tl.tensor,  # [tokens, heads, OTHERS + TURNED], dense within a token; the last TURNED features are rotary
    latents: tl.tensor,  # [tokens, SIZE + TURNED]
    gains: tl.tensor,  # [SIZE], of the norm
    table: tl.tensor,  # [tokens, 2, 1, TURNED], dense: cosines and sines
    slots: tl.tensor,  # [tokens]; -1: nothing is written
    cache: tl.tensor,  # [slots, SIZE + TURNED]
    heads: tl.tensor,
    query_stride: tl.tensor,
    latent_stride: tl.tensor,
    cache_stride: tl.tensor,
    epsilon: tl.tensor,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    OTHERS: tl.constexpr,
    TURNED: tl.constexpr,
    HALF: tl.constexpr,  # half of TURNED, rounded up to a power of two
    HEADS: tl.constexpr,
    MOST: tl.constexpr,  # largest number of an 8-bit cache's dtype; 0: the cache has the latents' dtype
    EARLY: tl.constexpr,
) -> None:
    """One program: the latent of a token (program 0 of axis 1), or HEADS of its query heads."""
    wait(EARLY)
    token = tl.program_id(0).to(tl.int64)
    half, within, cosine, sine = angles(table, token, TURNED, HALF)
    if tl.program_id(1) > 0:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        inside = (head < heads)[:, None] & within[None, :]
        place = query + token * query_stride + head[:, None] * (OTHERS + TURNED) + OTHERS + half[None, :]
        turn(place, inside, cosine[None, :], sine[None, :], TURNED)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            feature = tl.arange(0, PADDED)
            held = feature < SIZE
            own = latents + token * latent_stride
            row = tl.load(own + feature, mask=held, other=0.0)
            wide = row.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)
            gain = tl.load(gains + feature, mask=held, other=0.0).to(tl.float32)
            row = ((wide * scale).to(row.dtype).to(tl.float32) * gain).to(row.dtype)
            low = tl.load(own + SIZE + half, mask=within, other=0.0)
            high = tl.load(own + SIZE + TURNED // 2 + half, mask=within, other=0.0)
            low, high = rotated(low, high, cosine, sine)
            kept = cache + slot * cache_stride
            tl.store(kept + feature, clamped_for_cache(row, MOST).to(cache.dtype.element_ty), mask=held)
            keep(kept + SIZE, half, within, low, high, TURNED, MOST)


def rotate_and_write_latents(
    query: Tensor, latents: Tensor, gains: Tensor, table: Tensor, slots: Tensor, cache: Tensor, epsilon: float
) -> None:
    """See `operations.rotate_and_write_latents`. query: each token dense; latents: each row dense, not changed; table: dense."""
    tokens, heads, width = query.shape
    assert query.stride()[1:] == (width, 1)
    assert latents.stride(1) == 1
    assert table.is_contiguous()
    assert cache.stride(3) == 1
    if tokens:
        turned = latents.shape[1] - len(gains)
        constants = constants_of(len(gains), turned, most_of(cache, query.dtype))
        turning = triton.cdiv(heads, constants["HEADS"]) if turned else 0
        latents_kernel[(tokens, 1 + turning)](
            query,
            latents,
            gains,
            table,
            slots,
            cache,
            heads,
            query.stride(0),
            latents.stride(0),
            cache.stride(0),
            epsilon,
            **constants,
            OTHERS=width - turned,
            num_warps=WARPS,
            enable_fp_fusion=False,
            **begin_early(query.device),
        )


def constants_of(size: int, turned: int, most: float) -> dict[str, Any]:
    """Constants that `latents_kernel` shares with other kernels."""
    half = max(1, triton.next_power_of_2(turned // 2))
    return {
        "SIZE": size,
        "PADDED": triton.next_power_of_2(size),
        "TURNED": turned,
        "HALF": half,
        "HEADS": max(HEADS, WARP * WARPS // half),
        "MOST": most,
    }


def compilations() -> list[Compilation]:
    """Kernels for the sizes of DeepSeek and Mistral, and for an 8-bit cache."""
    found = []
    cases = [("bf16", 512, 0.0, False), ("bf16", 512, 448.0, False), ("fp32", 256, 0.0, False), ("bf16", 512, 0.0, True)]
    for dtype, size, most, early in cases:
        pointers = dict.fromkeys(("query", "latents", "gains", "table"), f"*{dtype}")
        pointers |= {"slots": "*i64", "cache": "*fp8e4nv" if most else f"*{dtype}"}
        numbers = {"heads": "i32", "query_stride": "i32:16", "latent_stride": "i32:16", "cache_stride": "i32:16", "epsilon": "fp32"}
        constants: dict[str, object] = {**constants_of(size, 64, most), "OTHERS": 128, "EARLY": early}
        found.append(
            Compilation(
                kernel=latents_kernel,
                name=f"latents {size} {dtype}{' fp8' * (most > 0)}{' early' * early}",
                types=pointers | numbers,
                constants=constants,
                warps=WARPS,
                early=early,
                hot=True,
                targets=EIGHT_BIT_TARGETS if most else EARLY_TARGETS if early else (),
            )
        )
    return found
