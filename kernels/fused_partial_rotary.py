"""`partial_rotary` in Triton, which is the reference: an RMS norm of each head x, where asked for, and the rotation of its last
features alone, in place or into the cache.

    x = x / rms(x) * gains
    low, high = halves of x's last TURNED features
    x's last TURNED features = low * cosine - high * sine, high * cosine + low * sine       `back`: with -sine

A program takes HEADS heads of one token.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .compilation import WARP, Compilation
from .fused_latents import angles
from .fused_rotary import rotated

# Numbers per program where heads have norms: 32 a thread.
NUMBERS = 4096
WARPS = 4


@triton.jit
def partial_rotary_kernel(
    x: tl.tensor,  # [tokens, heads, SIZE], dense within a token
    target: tl.tensor,  # the same, or a cache, [slots, SIZE]
    gains: tl.tensor,  # [SIZE]; unused without KEPT
    table: tl.tensor,  # [tokens, 2, 1, TURNED], dense
    slots: tl.tensor,  # [tokens]; unused without KEPT
    heads: tl.tensor,
    stride: tl.tensor,  # of tokens of x
    target_stride: tl.tensor,  # of tokens, or slots, of target
    epsilon: tl.tensor,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TURNED: tl.constexpr,
    HALF: tl.constexpr,  # half of the rotary features, rounded up to a power of two
    HEADS: tl.constexpr,
    NORMAL: tl.constexpr,
    KEPT: tl.constexpr,  # keys: their norm has gains, and they are written to the cache; else heads are changed in place
    BACK: tl.constexpr,
) -> None:
    """Normalizes and rotates HEADS heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row = token
    there = head < heads
    if KEPT:
        row = tl.load(slots + token).to(tl.int64)
        there = head < tl.where(row >= 0, heads, 0)
    half, within, cosine, sine = angles(table, token, TURNED, HALF)
    if BACK:
        sine = -sine
    own = x + token * stride + head[:, None] * SIZE
    kept = target + row * target_stride + head[:, None] * SIZE
    low_at, high_at = SIZE - TURNED + half, SIZE - TURNED // 2 + half
    inside = there[:, None] & within[None, :]
    low, high = tl.load(own + low_at[None, :], mask=inside, other=0.0), tl.load(own + high_at[None, :], mask=inside, other=0.0)
    if NORMAL:
        feature = tl.arange(0, PADDED)
        held = there[:, None] & (feature < SIZE)[None, :]
        whole = tl.load(own + feature[None, :], mask=held, other=0.0)
        tl.debug_barrier()  # all threads have read before any writes
        wide = whole.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + epsilon)[:, None]
        still = _normal(whole, scale, gains, feature, feature < SIZE, KEPT)
        low = _normal(low, scale, gains, low_at, within, KEPT)
        high = _normal(high, scale, gains, high_at, within, KEPT)
        tl.store(kept + feature[None, :], still, mask=held & (feature < SIZE - TURNED)[None, :])
    else:
        tl.debug_barrier()
    low, high = rotated(low, high, cosine[None, :], sine[None, :])
    tl.store(kept + low_at[None, :], low, mask=inside)
    tl.store(kept + high_at[None, :], high, mask=inside)


@triton.jit
def _normal(row, scale, gains, feature, held, GAINED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some features of each head, normalized, in the dtype of the heads."""
    found = (row.to(tl.float32) * scale).to(row.dtype)
    if GAINED:
        gain = tl.load(gains + feature, mask=held, other=0.0).to(tl.float32)
        found = (found.to(tl.float32) * gain[None, :]).to(row.dtype)
    return found


def rotate_last(x: Tensor, table: Tensor, epsilon: float, back: bool) -> None:
    """`partial_rotary.rotate_last`."""
    assert x.is_contiguous()
    assert table.is_contiguous()
    tokens, heads, size = x.shape
    constants = _constants(size, table.shape[-1], heads, normal=epsilon > 0, back=back)
    if tokens:
        partial_rotary_kernel[(tokens, triton.cdiv(heads, constants["HEADS"]))](
            x, x, x, table, x, heads, heads * size, heads * size, epsilon, **constants, num_warps=WARPS, enable_fp_fusion=False
        )


def write_keys(keys: Tensor, gains: Tensor, table: Tensor, slots: Tensor, cache: Tensor, epsilon: float) -> None:
    """`partial_rotary.write_keys`. keys: each token dense; the cache's keys, too."""
    assert keys.stride(1) == 1
    assert cache.stride(3) == 1
    assert table.is_contiguous()
    if len(keys):
        constants = _constants(keys.shape[1], table.shape[-1], 1, normal=True, kept=True)
        partial_rotary_kernel[(len(keys), 1)](
            keys,
            cache,
            gains,
            table,
            slots,
            1,
            keys.stride(0),
            cache.stride(0),
            epsilon,
            **constants,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


def _constants(size: int, turned: int, heads: int, normal: bool = False, kept: bool = False, back: bool = False) -> dict[str, Any]:
    half, padded = max(1, triton.next_power_of_2(turned // 2)), triton.next_power_of_2(size)
    together = max(1, NUMBERS // padded) if normal else WARP * WARPS // half
    return {
        "SIZE": size,
        "PADDED": padded,
        "TURNED": turned,
        "HALF": half,
        "HEADS": max(1, min(together, triton.next_power_of_2(heads))),
        "NORMAL": normal,
        "KEPT": kept,
        "BACK": back,
    }


def compilations() -> list[Compilation]:
    """DeepSeek V4's queries, keys, attention outputs, and queries of its indexer."""
    found = []
    for name, dtype, heads, constants in (
        ("queries", "bf16", 64, _constants(512, 64, 64, normal=True)),
        ("queries fp32", "fp32", 64, _constants(512, 64, 64, normal=True)),
        ("keys", "bf16", 1, _constants(512, 64, 1, normal=True, kept=True)),
        ("back", "bf16", 64, _constants(512, 64, 64, back=True)),
        ("index", "bf16", 64, _constants(128, 64, 64)),
    ):
        types = dict.fromkeys(("x", "target", "gains", "table"), f"*{dtype}")
        types["slots"] = "*i64" if constants["KEPT"] else f"*{dtype}"
        numbers = {"heads": "i32", "stride": "i32:16", "target_stride": "i32:16", "epsilon": "fp32"}
        # With one head, Triton specializes on that number, as on a constant.
        own = dict(constants, heads=heads) if heads == 1 else dict(constants)
        found.append(
            Compilation(
                kernel=partial_rotary_kernel,
                name=f"turning {name}",
                types=types | numbers,
                constants=own,
                warps=WARPS,
                hot=True,
            )
        )
    return found
