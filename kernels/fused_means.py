"""`means.write_means` in Triton, which is the reference: index keys, and those of pools that are complete.

    cache[slots[token]] = keys[token]                                                   unless it is the last of its pool, else
    cache[slots[token]] = rotate(rms_norm(mean of the keys of its pool's MEMBERS tokens))

One program for each token.
"""

import triton
import triton.language as tl
from torch import Tensor

from .compilation import EIGHT_BIT_TARGETS, Compilation
from .fused_latents import angles
from .fused_pools import read
from .fused_rotary import clamped_for_cache, most_of, rotated

WARPS = 4


@triton.jit
def means_kernel(
    keys: tl.tensor,  # [tokens, SIZE]
    gains: tl.tensor,  # [SIZE] float32
    table: tl.tensor,  # [tokens, 2, 1, SIZE], dense
    slots: tl.tensor,  # [tokens]
    cache: tl.tensor,  # [slots, SIZE], dense
    keys_stride: tl.tensor,
    epsilon: tl.tensor,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,  # half of SIZE, rounded up to a power of two
    MEMBERS: tl.constexpr,  # tokens of a pool
    PLACES: tl.constexpr,  # MEMBERS, rounded up to a power of two
    MOST: tl.constexpr,  # the largest number of an 8-bit cache; 0: the cache has the dtype of the keys
) -> None:
    """Writes one token's key, or its pool's key if it is the last of a pool. Keys of the pool's tokens that are in the same launch
    are read from the inputs: they may not be in the cache yet."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        half, member = tl.arange(0, HALF), tl.arange(0, PLACES)
        held = half < SIZE // 2
        kept, own = cache + slot * SIZE + half, keys + token * keys_stride + half
        low = tl.load(own, mask=held, other=0.0)
        high = tl.load(own + SIZE // 2, mask=held, other=0.0)
        if slot % MEMBERS == MEMBERS - 1:
            behind = MEMBERS - 1 - member  # how many tokens before this one
            known = (member < MEMBERS)[:, None] & held[None, :]
            other = tl.load(slots + token - behind, mask=(behind >= 0) & (token >= behind), other=-1)
            here = (other == slot - behind)[:, None]
            from_step = keys + (token - behind)[:, None] * keys_stride + half[None, :]
            from_cache = cache + (slot - behind)[:, None] * SIZE + half[None, :]
            lows = read(from_step, from_cache, known & here, known & ~here, MOST)
            highs = read(from_step + SIZE // 2, from_cache + SIZE // 2, known & here, known & ~here, MOST)
            kind = low.dtype
            wide_low, wide_high = (tl.sum(lows, 0) / MEMBERS).to(kind), (tl.sum(highs, 0) / MEMBERS).to(kind)
            low_part, high_part = wide_low.to(tl.float32), wide_high.to(tl.float32)
            squares = tl.sum(low_part * low_part, 0) + tl.sum(high_part * high_part, 0)
            scale = tl.rsqrt(squares / SIZE + epsilon)
            low_gain = tl.load(gains + half, mask=held, other=0.0)
            high_gain = tl.load(gains + SIZE // 2 + half, mask=held, other=0.0)
            wide_low = ((low_part * scale).to(kind).to(tl.float32) * low_gain).to(kind)
            wide_high = ((high_part * scale).to(kind).to(tl.float32) * high_gain).to(kind)
            _, _, cosine, sine = angles(table, token, SIZE, HALF)
            low, high = rotated(wide_low, wide_high, cosine, sine)
        tl.store(kept, clamped_for_cache(low, MOST).to(cache.dtype.element_ty), mask=held)
        tl.store(kept + SIZE // 2, clamped_for_cache(high, MOST).to(cache.dtype.element_ty), mask=held)


def write_means(keys: Tensor, gains: Tensor, table: Tensor, slots: Tensor, cache: Tensor, members: int, epsilon: float) -> None:
    """`means.write_means`."""
    size = keys.shape[1]
    assert all(x.is_contiguous() for x in (gains, table, slots, cache))
    assert keys.stride(1) == 1
    assert size % 2 == 0
    if len(keys):
        means_kernel[(len(keys),)](
            keys,
            gains,
            table,
            slots,
            cache,
            keys.stride(0),
            epsilon,
            **_constants(members, size, most_of(cache, keys.dtype)),
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


def _constants(members: int, size: int, most: float) -> dict[str, object]:
    return {
        "SIZE": size,
        "HALF": triton.next_power_of_2(size // 2),
        "MEMBERS": members,
        "PLACES": triton.next_power_of_2(members),
        "MOST": most,
    }


def compilations() -> list[Compilation]:
    """Qwen 4 Exp's indexer; its config.json has no usual sizes."""
    found = []
    for dtype, most in (("bf16", 0.0), ("bf16", 448.0), ("fp32", 0.0)):
        types = {"keys": f"*{dtype}", "gains": "*fp32", "table": f"*{dtype}", "slots": "*i64"}
        types |= {"cache": "*fp8e4nv" if most else f"*{dtype}", "keys_stride": "i32:16", "epsilon": "fp32"}
        found.append(
            Compilation(
                kernel=means_kernel,
                name=f"means {dtype}{' fp8' * (most > 0)}",
                types=types,
                constants=_constants(16, 128, most),
                warps=WARPS,
                hot=True,
                targets=EIGHT_BIT_TARGETS if most else (),
            )
        )
    return found
