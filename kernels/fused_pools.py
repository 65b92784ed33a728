"""`pools.write_pools` in Triton, which is the reference: index keys and gates, and the keys of pools that are complete.

    cache[slots[token]] = keys[token], gates[token]                                     and if it is the last of its pool,
    cache[slots[token]] = sum of softmax(gates + places) * keys, gates[token]           over its MEMBERS tokens, feature by feature

One program for each token.
"""

import triton
import triton.language as tl
from torch import Tensor

from .compilation import EIGHT_BIT_TARGETS, Compilation
from .fused_rotary import clamped_for_cache, most_of

WARPS = 4


@triton.jit
def pools_kernel(
    keys: tl.tensor,  # [tokens, SIZE], dense
    gates: tl.tensor,  # as `keys`
    places: tl.tensor,  # [MEMBERS, SIZE] float32, dense
    slots: tl.tensor,  # [tokens]
    cache: tl.tensor,  # [slots, 2 * SIZE]
    cache_stride: tl.tensor,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    MEMBERS: tl.constexpr,  # tokens of a pool
    PLACES: tl.constexpr,  # MEMBERS, rounded up to a power of two
    MOST: tl.constexpr,  # the largest number of an 8-bit cache; 0: the cache has the dtype of the keys
) -> None:
    """Writes one token's key and gate, and its pool's key if it is the last of a pool. Keys and gates of the pool's tokens that are
    in the same launch are read from the inputs: they may not be in the cache yet."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        feature, member = tl.arange(0, PADDED), tl.arange(0, PLACES)
        held = feature < SIZE
        kept = cache + slot * cache_stride + feature
        key = tl.load(keys + token * SIZE + feature, mask=held, other=0.0)
        gate = tl.load(gates + token * SIZE + feature, mask=held, other=0.0)
        tl.store(kept + SIZE, clamped_for_cache(gate, MOST).to(cache.dtype.element_ty), mask=held)
        if slot % MEMBERS == MEMBERS - 1:
            behind = MEMBERS - 1 - member  # how many tokens before this one
            known = (member < MEMBERS)[:, None] & held[None, :]
            other = tl.load(slots + token - behind, mask=(behind >= 0) & (token >= behind), other=-1)
            here = (other == slot - behind)[:, None]
            from_step = (token - behind)[:, None] * SIZE + feature[None, :]
            from_cache = cache + (slot - behind)[:, None] * cache_stride + feature[None, :]
            own = read(keys + from_step, from_cache, known & here, known & ~here, MOST)
            opening = read(gates + from_step, from_cache + SIZE, known & here, known & ~here, MOST)
            opening += tl.load(places + member[:, None] * SIZE + feature[None, :], mask=known, other=0.0)
            opening = tl.where(known, opening, float("-inf"))
            weights = tl.where(known, tl.exp(opening - tl.max(tl.where(held[None, :], opening, 0.0), 0)[None, :]), 0.0)
            key = (tl.sum(weights * own, 0) / tl.where(held, tl.sum(weights, 0), 1.0)).to(key.dtype)
        tl.store(kept, clamped_for_cache(key, MOST).to(cache.dtype.element_ty), mask=held)


@triton.jit
def read(step, cache, here, there, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """A number as it is, or will be, in the cache, from the step's inputs where it isn't certain to be there yet."""
    own = clamped_for_cache(tl.load(step, mask=here, other=0.0), MOST).to(cache.dtype.element_ty).to(tl.float32)
    return tl.where(here, own, tl.load(cache, mask=there, other=0.0).to(tl.float32))


def write_pools(keys: Tensor, gates: Tensor, places: Tensor, slots: Tensor, cache: Tensor) -> None:
    """`pools.write_pools`. All tensors dense but the cache, whose keys and gates are."""
    assert all(x.is_contiguous() for x in (keys, gates, places, slots))
    assert cache.stride(3) == 1
    if len(keys):
        pools_kernel[(len(keys),)](
            keys,
            gates,
            places,
            slots,
            cache,
            cache.stride(0),
            **_constants(len(places), places.shape[1], most_of(cache, keys.dtype)),
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


def _constants(members: int, size: int, most: float) -> dict[str, object]:
    return {
        "SIZE": size,
        "PADDED": triton.next_power_of_2(size),
        "MEMBERS": members,
        "PLACES": triton.next_power_of_2(members),
        "MOST": most,
    }


def compilations() -> list[Compilation]:
    """GLM 5 Next's."""
    found = []
    for dtype, most in (("bf16", 0.0), ("bf16", 448.0), ("fp32", 0.0)):
        types = {"keys": f"*{dtype}", "gates": f"*{dtype}", "places": "*fp32", "slots": "*i64"}
        types |= {"cache": "*fp8e4nv" if most else f"*{dtype}", "cache_stride": "i32:16"}
        found.append(
            Compilation(
                kernel=pools_kernel,
                name=f"pools {dtype}{' fp8' * (most > 0)}",
                types=types,
                constants=_constants(16, 128, most),
                warps=WARPS,
                hot=True,
                targets=EIGHT_BIT_TARGETS if most else (),
            )
        )
    return found
