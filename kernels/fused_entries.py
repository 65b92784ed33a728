"""`entries.write_entries` in Triton, which is the reference: compressed KV entries (DeepSeek V4).

    entry = sum of softmax(gates + places) * values         over the entry's members, feature by feature
    cache[last member] = rms_norm(entry), its last features rotated

A program for each entry goes through its members, TOGETHER at a time, with an online softmax, as attention goes through keys.
"""

import triton
import triton.language as tl
from torch import Tensor

from .compilation import Compilation
from .fused_latents import angles
from .fused_rotary import rotated

TOGETHER = 4  # tokens at once: with 512 features each 16 numbers a thread, three times
WARPS = 4


@triton.jit
def entries_kernel(
    cache: tl.tensor,  # [slots, width]
    members: tl.tensor,  # [entries, SERIES * RATE]
    places: tl.tensor,  # [SERIES, RATE, SIZE] float32, dense
    gains: tl.tensor,  # [SIZE]
    table: tl.tensor,  # [entries, 2, 1, TURNED], dense
    cache_stride: tl.tensor,
    offset: tl.tensor,
    epsilon: tl.tensor,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TURNED: tl.constexpr,
    HALF: tl.constexpr,  # half of the rotary features, rounded up to a power of two
    RATE: tl.constexpr,
    SERIES: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    """Makes and writes one entry."""
    entry = tl.program_id(0).to(tl.int64)
    feature, member = tl.arange(0, PADDED), tl.arange(0, TOGETHER)
    held = feature < SIZE
    best = tl.full([PADDED], float("-inf"), tl.float32)
    total, sums = tl.zeros([PADDED], tl.float32), tl.zeros([PADDED], tl.float32)
    for begin in range(0, SERIES * RATE, TOGETHER):
        number = begin + member
        slot = tl.load(members + entry * (SERIES * RATE) + number, mask=number < SERIES * RATE, other=-1).to(tl.int64)
        there = (slot >= 0)[:, None] & held[None, :]
        # Tokens before an entry's own contribute their second series.
        before = (number < (SERIES - 1) * RATE).to(tl.int32)
        own = cache + slot[:, None] * cache_stride + offset + (before * 2 * SIZE)[:, None] + feature[None, :]
        values = tl.load(own, mask=there, other=0.0).to(tl.float32)
        gates = tl.load(own + SIZE, mask=there, other=0.0).to(tl.float32)
        place = before * RATE + number % RATE
        gates += tl.load(places + place[:, None] * SIZE + feature[None, :], mask=there, other=0.0)
        gates = tl.where(there, gates, float("-inf"))
        higher = tl.maximum(best, tl.max(gates, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(gates - base[None, :])
        fade = tl.exp(best - base)
        total = total * fade + tl.sum(weights, 0)
        sums = sums * fade + tl.sum(weights * values, 0)
        best = higher
    kept = cache + tl.load(members + entry * (SERIES * RATE) + SERIES * RATE - 1).to(tl.int64) * cache_stride + offset
    found = (sums / tl.where(held, total, 1.0)).to(cache.dtype.element_ty)
    wide = found.to(tl.float32)
    scale = tl.rsqrt(tl.sum(tl.where(held, wide * wide, 0.0), 0) / SIZE + epsilon)
    gain = tl.load(gains + feature, mask=held, other=0.0).to(tl.float32)
    normal = ((wide * scale).to(found.dtype).to(tl.float32) * gain).to(found.dtype)
    tl.debug_barrier()  # all threads have read before any writes
    tl.store(kept + feature, normal, mask=held)
    tl.debug_barrier()  # rotary features are read again, perhaps by other threads, and by two of them, before they are written
    half, within, cosine, sine = angles(table, entry, TURNED, HALF)
    low_at, high_at = kept + SIZE - TURNED + half, kept + SIZE - TURNED // 2 + half
    low, high = tl.load(low_at, mask=within, other=0.0), tl.load(high_at, mask=within, other=0.0)
    tl.debug_barrier()
    low, high = rotated(low, high, cosine, sine)
    tl.store(low_at, low, mask=within)
    tl.store(high_at, high, mask=within)


def write_entries(cache: Tensor, members: Tensor, first: int, places: Tensor, gains: Tensor, epsilon: float, table: Tensor) -> None:
    """`entries.write_entries`, with the fields of `CompletedEntries` and `EntryParameters`. All tensors
    dense but the cache, whose slots are."""
    assert all(x.is_contiguous() for x in (members, places, gains, table))
    assert cache.stride(3) == 1
    series, rate, size = places.shape
    entries_kernel[(len(members),)](
        cache,
        members,
        places,
        gains,
        table,
        cache.stride(0),
        first,
        epsilon,
        **_constants(size, table.shape[-1], rate, series),
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def _constants(size: int, turned: int, rate: int, series: int) -> dict[str, object]:
    return {
        "SIZE": size,
        "PADDED": triton.next_power_of_2(size),
        "TURNED": turned,
        "HALF": max(1, triton.next_power_of_2(turned // 2)),
        "RATE": rate,
        "SERIES": series,
        "TOGETHER": TOGETHER,
    }


def compilations() -> list[Compilation]:
    """DeepSeek V4's: entries of 128 tokens, of 4 and the 4 before, and an indexer's."""
    found = []
    for dtype, size, rate, series in (("bf16", 512, 128, 1), ("bf16", 512, 4, 2), ("bf16", 128, 4, 2), ("fp32", 512, 4, 2)):
        types = {"cache": f"*{dtype}", "members": "*i64", "places": "*fp32", "gains": f"*{dtype}", "table": f"*{dtype}"}
        types |= {"cache_stride": "i32:16", "offset": "i32:16", "epsilon": "fp32"}
        found.append(
            Compilation(
                kernel=entries_kernel,
                name=f"entries {size} {dtype} of {rate}{' and those before' * (series > 1)}",
                types=types,
                constants=_constants(size, 64, rate, series),
                warps=WARPS,
                hot=True,
            )
        )
    return found
