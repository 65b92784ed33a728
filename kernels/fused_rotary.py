"""Rotary embedding (Su et al. 2021, arXiv:2104.09864) and KV cache write, in Triton, in one pass over the joint product of
queries, keys and values: the norm of query and key heads (or of all, where a model has it), the rotation, and the write of keys and
values to their slots.

    low, high = halves of norm(x)                                   of each query head and key head x of a token
    x = low * cosine - high * sine, high * cosine + low * sine      queries in place
    cache[slots[token]] = keys, values                              divided by scales where the cache has 8 bits

A program takes some heads of one token, queries first, then keys, then values. The reference is `operations.rotate_and_write`;
results are rounded to the dtype where they are there.
"""

from collections.abc import Collection

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import EARLY_TARGETS, EIGHT_BIT_TARGETS, Compilation
from .dependent_launch import begin_early, wait

# Elements per program, of several heads: 16 a thread in 4 warps.
TILE = 2048
WARPS = 4


@triton.jit
def _normal(low, high, low_gains, high_gains, SIZE: tl.constexpr, epsilon):  # type: ignore[no-untyped-def]
    """RMS norm of some heads, given as halves, times gains. low, high: [heads, half], in the tensors' dtype."""
    dtype = low.dtype
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    squares = tl.sum(wide_low * wide_low, 1) + tl.sum(wide_high * wide_high, 1)
    scale = tl.rsqrt(squares / SIZE + epsilon)[:, None]
    low = ((wide_low * scale).to(dtype).to(tl.float32) * low_gains).to(dtype)
    high = ((wide_high * scale).to(dtype).to(tl.float32) * high_gains).to(dtype)
    return low, high


@triton.jit
def _gains(queries, keys, is_query, is_key):  # type: ignore[no-untyped-def]
    """The norms' gains of query and key heads, and 1 for others: [heads, half] float32. Each is loaded by itself, by a tile of
    pointers: if `where` chose pointers the compiler would know no alignment, and a row of them would come in another layout."""
    of_queries = tl.load(queries + tl.zeros_like(is_query).to(tl.int32), mask=is_query, other=1.0)
    of_keys = tl.load(keys + tl.zeros_like(is_key).to(tl.int32), mask=is_key, other=1.0)
    return tl.where(is_query, of_queries, of_keys).to(tl.float32)


@triton.jit
def rotated(low, high, cosine, sine):  # type: ignore[no-untyped-def]
    """Rotates both halves of some features, in the tensors' dtype, by angles in float32."""
    dtype = low.dtype
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    turned_low = ((wide_low * cosine).to(dtype).to(tl.float32) - wide_high * sine).to(dtype)
    turned_high = ((wide_high * cosine).to(dtype).to(tl.float32) + wide_low * sine).to(dtype)
    return turned_low, turned_high


def most_of(cache: Tensor, dtype: torch.dtype) -> float:
    """MOST of `clamped_for_cache` for keys and values of `dtype`."""
    return torch.finfo(cache.dtype).max if cache.dtype != dtype else 0.0


@triton.jit
def clamped_for_cache(x, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """For an 8-bit cache: clamps to MOST, since larger numbers would become NaN. MOST = 0: unchanged."""
    if MOST > 0:
        x = tl.clamp(x.to(tl.float32), -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def rotary_kernel(
    joint: tl.tensor,  # [tokens, (heads + 2 * kv_heads) * size]; SHARED, KEYS: [tokens, (heads + kv_heads) * size]
    table: tl.tensor,  # [tokens, 2, 1, size], dense
    slots: tl.tensor,  # [tokens]
    cache: tl.tensor,  # [slots, 2, kv_heads, size], dense within a slot
    query_weight: tl.tensor,  # [size], unused without NORM
    key_weight: tl.tensor,
    scales: tl.tensor,  # [2, kv_heads] float32, unused without SCALED
    heads: tl.tensor,
    kv_heads: tl.tensor,
    joint_stride: tl.tensor,
    cache_stride: tl.tensor,
    epsilon: tl.tensor,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,  # half a head, rounded up to a power of two
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    VALUES: tl.constexpr,  # values have a norm, too
    SHARED: tl.constexpr,  # values are the keys before norm and rotation
    SCALED: tl.constexpr,
    WRITES: tl.constexpr,  # there are keys and values; without them there is no cache, and there are no slots
    KEYS: tl.constexpr,  # there are no values
    MOST: tl.constexpr,  # the largest number of an 8-bit cache; 0: the cache has the dtype of the keys
    EARLY: tl.constexpr,
) -> None:
    """HEADS of all the heads of one token: queries first, then keys, then values."""
    wait(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    half = tl.arange(0, HALF)[None, :]
    within = half < SIZE // 2
    inside = (head < heads + (1 if KEYS else 2) * kv_heads) & within
    is_query, is_value = head < heads, head >= heads + kv_heads
    source = tl.where(is_value, head - kv_heads, head) if SHARED else head
    place = joint + token * joint_stride + source * SIZE + half
    slot = tl.load(slots + token).to(tl.int64) if WRITES else -1  # in flight together with all else
    low = tl.load(place, mask=inside, other=0.0)
    high = tl.load(place + SIZE // 2, mask=inside, other=0.0)
    turned_low, turned_high = low, high
    if NORM:
        of_query, of_key = is_query & within, (head >= heads) & (head < heads + kv_heads) & within
        low_gains = _gains(query_weight + half, key_weight + half, of_query, of_key)
        far = SIZE // 2 + half
        high_gains = _gains(query_weight + far, key_weight + far, of_query, of_key)
        turned_low, turned_high = _normal(low, high, low_gains, high_gains, SIZE, epsilon)
    if VALUES:
        low, high = turned_low, turned_high
    angle = table + token * 2 * SIZE + half
    cosine = tl.load(angle, mask=within, other=0.0).to(tl.float32)
    sine = tl.load(angle + SIZE + SIZE // 2, mask=within, other=0.0).to(tl.float32)
    turned_low, turned_high = rotated(turned_low, turned_high, cosine, sine)
    low, high = tl.where(is_value, low, turned_low), tl.where(is_value, high, turned_high)
    tl.store(place, low, mask=inside & is_query)
    tl.store(place + SIZE // 2, high, mask=inside & is_query)
    if slot >= 0:
        kept = cache + slot * cache_stride + (head - heads) * SIZE + half
        written = inside & (head >= heads)
        if MOST > 0:
            wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
            if SCALED:
                scale = tl.load(scales + head - heads, mask=(head >= heads) & (head < heads + 2 * kv_heads), other=1.0)
                wide_low = tl.div_rn(wide_low, scale + tl.zeros_like(wide_low))
                wide_high = tl.div_rn(wide_high, scale + tl.zeros_like(wide_high))
            tl.store(kept, clamped_for_cache(wide_low, MOST).to(cache.dtype.element_ty), mask=written)
            tl.store(kept + SIZE // 2, clamped_for_cache(wide_high, MOST).to(cache.dtype.element_ty), mask=written)
        else:
            tl.store(kept, low.to(cache.dtype.element_ty), mask=written)
            tl.store(kept + SIZE // 2, high.to(cache.dtype.element_ty), mask=written)


def rotate_and_write(
    joint: Tensor,
    table: Tensor,
    slots: Tensor,
    cache: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    epsilon: float,
    scales: Tensor | None = None,
    normal_values: bool = False,
    shared: bool = False,
) -> Tensor:
    """`operations.rotate_and_write`: queries are rotated in place, keys and values only in the cache.

    joint: its last dimension dense; table: dense; cache: each slot dense.
    """
    tokens, (_, kinds, kv_heads, size) = len(joint), cache.shape
    assert query_weight is not None or not normal_values
    assert cache.stride()[1:] == (kv_heads * size, size, 1)
    heads = joint.shape[1] // size - (1 if shared else kinds) * kv_heads
    how = query_weight, key_weight, epsilon, scales, normal_values, shared, kinds == 1
    if tokens:
        _launch(joint, table, slots, cache, heads, kv_heads, cache.stride(0), *how)
    return joint[:, : heads * size].view(tokens, heads, size)


def rotate(queries: Tensor, table: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """`operations.rotate`: the same without keys, so that nothing is written to a cache."""
    tokens, size = len(queries), table.shape[-1]
    heads = queries.shape[1] // size
    if tokens:
        slots = torch.empty(0, dtype=torch.int64, device=queries.device)
        _launch(queries, table, slots, queries, heads, 0, 0, weight, weight, epsilon, None, False, False, False)
    return queries.view(tokens, heads, size)


def _launch(
    joint: Tensor,
    table: Tensor,
    slots: Tensor,
    cache: Tensor,
    heads: int,
    kv_heads: int,
    cache_stride: int,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    epsilon: float,
    scales: Tensor | None,
    normal_values: bool,
    shared: bool,
    keys: bool,
) -> None:
    size = table.shape[-1]
    assert size % 2 == 0
    assert joint.stride(1) == 1
    assert table.is_contiguous()
    half, at_once = _tile(size)
    rotary_kernel[(len(joint), triton.cdiv(heads + (1 if keys else 2) * kv_heads, at_once))](
        joint,
        table,
        slots,
        cache,
        query_weight if query_weight is not None else table,
        key_weight if key_weight is not None else table,
        scales if scales is not None else table,
        heads,
        kv_heads,
        joint.stride(0),
        cache_stride,
        epsilon,
        SIZE=size,
        HALF=half,
        HEADS=at_once,
        NORM=query_weight is not None,
        VALUES=normal_values,
        SHARED=shared,
        SCALED=scales is not None,
        WRITES=kv_heads > 0,
        KEYS=keys,
        MOST=most_of(cache, joint.dtype),
        num_warps=WARPS,
        enable_fp_fusion=False,
        **begin_early(joint.device),
    )


def _tile(size: int) -> tuple[int, int]:
    """The tile of a program: half a head rounded up to a power of two, and number of heads."""
    half = triton.next_power_of_2(size // 2)
    return half, max(1, TILE // (2 * half))


def compilations() -> list[Compilation]:
    """All head sizes of models, with the norm and without; an 8-bit cache; queries alone."""
    found = []
    cases: list[tuple[int, str, Collection[str]]] = [
        *((64, "bf16", ()), (80, "fp16", ()), (96, "bf16", ()), (128, "bf16", ()), (128, "fp32", ()), (192, "bf16", ())),
        *((128, "bf16", ("norm",)), (256, "bf16", ("norm",)), (512, "bf16", ("norm", "shared"))),
        *((128, "bf16", ("fp8",)), (128, "bf16", ("early",)), (128, "bf16", ("norm", "keys"))),
        *((256, "bf16", ("norm", "queries")), (512, "bf16", ("norm", "queries"))),
        (136, "bf16", ("unaligned",)),  # with ALiBi: halves of heads begin at multiples of 8 bytes, and Hopper spills 8 bytes
    ]
    for size, dtype, traits in cases:
        names = ("norm", "shared", "fp8", "early", "queries", "unaligned", "keys")
        norm, shared, small, early, alone, unaligned, keys = (name in traits for name in names)
        pointers = dict.fromkeys(("joint", "table", "query_weight", "key_weight"), f"*{dtype}")
        pointers |= {"slots": "*i64", "scales": "*fp32", "cache": "*fp8e4nv" if small else f"*{dtype}"}
        numbers = {"heads": "i32", "kv_heads": "i32", "joint_stride": "i32:16", "cache_stride": "i32:16", "epsilon": "fp32"}
        constants: dict[str, object] = {
            "SIZE": size,
            "HALF": _tile(size)[0],
            "HEADS": _tile(size)[1],
            "NORM": norm,
            "VALUES": shared,
            "SHARED": shared,
            "SCALED": small,
            "WRITES": not alone,
            "KEYS": keys,
        }
        constants |= {"MOST": 448.0 if small else 0.0, "EARLY": early}
        kind = f"rotary{' and write' * (not alone)}{' norm' * norm}{' shared' * shared}{' keys' * keys}"
        found.append(
            Compilation(
                kernel=rotary_kernel,
                name=f"{kind} {size} {dtype}{' fp8' * small}{' early' * early}",
                types=pointers | numbers,
                constants=constants,
                warps=WARPS,
                early=early,
                hot=not unaligned,
                targets=EIGHT_BIT_TARGETS if small else EARLY_TARGETS if early else (),
            )
        )
    return found
