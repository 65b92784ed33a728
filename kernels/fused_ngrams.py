"""`ngrams` in Triton, which is the reference: table rows of n-grams, the gates of streams, and the convolution behind them.

    hash = id * m[0] ^ id before * m[1] ^ ...                       of n-grams of each length; m: a layer's multipliers
    row = hash % size of the head's table + where it begins
    taken[i] = sigmoid(signed root of (norm(key i) * norm(stream i) / sqrt(SIZE))) * value
    streams = streams + taken + silu(convolution of norm(taken))

Programs of rows and of the convolution share a prompt's tokens, TOKENS each; gates have a program for each stream of a token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import Compilation
from .fused_gated_delta import update_windows
from .fused_gated_hyper_connections import normalized, tile
from .ngram_hashes import NgramHashes
from .spans import Spans

TOKENS, CHANNELS = 16, 128  # tile of a program, as in `fused_short_convolution`


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["ids", "before", "starts"])
def rows_kernel(
    out: tl.tensor,  # [layers, tokens, COUNT, HEADS], dense; int64, as all here
    ids: tl.tensor,  # [tokens]
    before: tl.tensor,  # [spans, COUNT], dense
    starts: tl.tensor,  # [spans + 1]
    multipliers: tl.tensor,  # [layers, COUNT + 1]
    sizes: tl.tensor,  # [layers, COUNT, HEADS]
    offsets: tl.tensor,  # as `sizes`
    tokens: tl.tensor,
    end: tl.tensor,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,  # HEADS, rounded up to a power of two
    TOKENS: tl.constexpr,
) -> None:
    """Table rows of TOKENS tokens of one span, in one layer."""
    span, layer = tl.program_id(0), tl.program_id(2)
    start, stop = tl.load(starts + span), tl.load(starts + span + 1)
    place = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)  # place in the span
    inside = place < stop - start
    head = tl.arange(0, PADDED)
    there = head < HEADS
    row = out + ((layer * tokens + start + place) * COUNT)[:, None] * HEADS + head[None, :]
    last = tl.load(ids + start + place, mask=inside, other=0)
    mixed = last * tl.load(multipliers + layer * (COUNT + 1))
    for back in tl.static_range(1, COUNT + 1):
        token = tl.load(before + span * COUNT + COUNT - back + place, mask=inside & (place < back), other=0)
        token = tl.load(ids + start + place - back, mask=inside & (place >= back), other=token)
        if back > 1:
            token = tl.where(last == end, end, token)
        mixed ^= token * tl.load(multipliers + layer * (COUNT + 1) + back)
        own = (layer * COUNT + back - 1) * HEADS + head
        size, offset = tl.load(sizes + own, mask=there, other=1), tl.load(offsets + own, mask=there, other=0)
        found = mixed[:, None] % size[None, :] + offset[None, :]
        tl.store(row + (back - 1) * HEADS, found, mask=inside[:, None] & there[None, :])
        last = token


@triton.jit
def gate_kernel(
    joint: tl.tensor,  # [tokens, (COUNT + 1) * SIZE], dense
    streams: tl.tensor,  # [tokens, COUNT, SIZE], dense
    gains: tl.tensor,  # [3, COUNT, SIZE] float32, dense
    taken: tl.tensor,  # [tokens, COUNT, SIZE], dense
    normal: tl.tensor,  # as `taken`
    epsilon: tl.tensor,
    least: tl.tensor,
    root: tl.tensor,  # SIZE ** -0.5, the scale of dot products
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Gates one stream of one token."""
    token, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    place, gain = (token * COUNT + stream) * SIZE + column, gains + stream * SIZE + column
    row = joint + token * (COUNT + 1) * SIZE + column
    key = tl.load(row + stream * SIZE, mask=inside, other=0.0)
    own = tl.load(streams + place, mask=inside, other=0.0)
    value = tl.load(row + COUNT * SIZE, mask=inside, other=0.0).to(tl.float32)
    key = normalized(key, tl.load(gain, mask=inside, other=0.0), SIZE, epsilon)
    own = normalized(own, tl.load(gain + COUNT * SIZE, mask=inside, other=0.0), SIZE, epsilon)
    found = tl.sum(key.to(tl.float32) * own.to(tl.float32), 0) * root
    size = tl.sqrt(tl.maximum(tl.abs(found), least))
    found = tl.where(found > 0, size, tl.where(found < 0, -size, 0.0))
    part = (value / (1.0 + tl.exp(-found))).to(taken.dtype.element_ty)
    tl.store(taken + place, part, mask=inside)
    last = tl.load(gain + 2 * COUNT * SIZE, mask=inside, other=0.0)
    tl.store(normal + place, normalized(part, last, SIZE, epsilon), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["starts", "slots", "fresh"])
def ngram_convolution_kernel(
    streams: tl.tensor,  # [tokens, channels], dense
    taken: tl.tensor,  # as `streams`
    normal: tl.tensor,  # as `streams`
    taps: tl.tensor,  # [channels, REACH + 1], dense
    starts: tl.tensor,  # [spans + 1]
    slots: tl.tensor,  # [spans]; 0: padding, nothing is read there
    fresh: tl.tensor,
    windows: tl.tensor,  # [slots, REACH, channels], each slot dense
    channels: tl.tensor,
    windows_stride: tl.tensor,
    REACH: tl.constexpr,
    APART: tl.constexpr,  # only every APART-th tap from the last is not 0
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The convolution of TOKENS tokens of one span, BLOCK channels, and its addition to the streams."""
    span = tl.program_id(0)
    start, end, slot = tl.load(starts + span), tl.load(starts + span + 1), tl.load(slots + span)
    first = tl.where((slot > 0) & (tl.load(fresh + span) == 0), 0, REACH)  # first valid row of the window
    place = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)[:, None]  # place in the span
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = channel < channels
    inside = there & (place < end - start)
    row = (start + place) * channels + channel
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for back in tl.static_range(0, REACH + 1, APART):
        before = place - back + REACH  # row of the window
        held = inside & (place < back) & (before >= first)
        values = tl.load(windows + slot * windows_stride + before * channels + channel, mask=held, other=0.0)
        values = tl.load(normal + row - back * channels, mask=inside & (place >= back), other=values)
        factor = tl.load(taps + channel * (REACH + 1) + REACH - back, mask=there, other=0.0)
        total += values.to(tl.float32) * factor.to(tl.float32)
    more = total / (1.0 + tl.exp(-total)) + tl.load(taken + row, mask=inside, other=0.0).to(tl.float32)
    kind = streams.dtype.element_ty
    sums = tl.load(streams + row, mask=inside, other=0.0).to(tl.float32) + more.to(kind).to(tl.float32)
    tl.store(streams + row, sums.to(kind), mask=inside)


def rows_of(tokens: Tensor, before: Tensor, spans: Spans, hashes: NgramHashes) -> Tensor:
    """As `ngrams.rows_of`. At least one span."""
    assert all(x.is_contiguous() for x in (tokens, before, hashes.multipliers, hashes.sizes, hashes.offsets))
    layers, count, heads = hashes.sizes.shape
    out = torch.zeros(layers, len(tokens), count * heads, dtype=torch.int64, device=tokens.device)  # zeros for padding, too
    rows_kernel[(len(spans.slots), triton.cdiv(max(spans.lengths), TOKENS), layers)](
        out,
        tokens,
        before,
        spans.starts,
        hashes.multipliers,
        hashes.sizes,
        hashes.offsets,
        len(tokens),
        hashes.end,
        **_constants(count, heads),
        num_warps=1,
        enable_fp_fusion=True,
    )
    return out


def _constants(count: int, heads: int) -> dict[str, object]:
    return {"COUNT": count, "HEADS": heads, "PADDED": triton.next_power_of_2(heads), "TOKENS": TOKENS}


def opened(joint: Tensor, streams: Tensor, gains: Tensor, epsilon: float, least: float) -> tuple[Tensor, Tensor]:
    """As `ngrams.opened`."""
    tokens, count, size = streams.shape
    assert all(x.is_contiguous() for x in (joint, streams, gains))
    taken, normal = (torch.empty(tokens, count * size, dtype=joint.dtype, device=joint.device) for _ in range(2))
    if tokens:
        block, warps = tile(size)
        gate_kernel[(tokens, count)](
            joint,
            streams,
            gains,
            taken,
            normal,
            epsilon,
            least,
            size**-0.5,
            COUNT=count,
            SIZE=size,
            BLOCK=block,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return taken, normal


def take(streams: Tensor, taken: Tensor, normal: Tensor, taps: Tensor, apart: int, spans: Spans, windows: Tensor) -> None:
    """As `ngrams.take`. At least one span."""
    channels, width = taps.shape
    assert all(x.is_contiguous() for x in (streams, taken, normal, taps))
    assert windows.stride()[1:] == (channels, 1)
    assert streams.dtype == taken.dtype == normal.dtype == windows.dtype
    grid = len(spans.slots), triton.cdiv(channels, CHANNELS), triton.cdiv(max(spans.lengths), TOKENS)
    ngram_convolution_kernel[grid](
        streams,
        taken,
        normal,
        taps,
        spans.starts,
        spans.slots,
        spans.fresh,
        windows,
        channels,
        windows.stride(0),
        REACH=width - 1,
        APART=apart,
        TOKENS=TOKENS,
        BLOCK=CHANNELS,
        num_warps=4,
        enable_fp_fusion=True,
    )
    update_windows(normal, spans, windows)


def compilations() -> list[Compilation]:
    """Qwen 4 Exp's: four streams, and a dilated convolution of four taps three places apart."""
    (block, warps), known = tile(2048), ("out", "ids", "before", "starts", "multipliers", "sizes", "offsets")
    found = [
        Compilation(
            kernel=rows_kernel,
            name="rows of n-grams",
            types=dict.fromkeys(known, "*i64") | {"tokens": "i32", "end": "i32"},
            constants=_constants(2, 8),
            warps=1,
            fuse=True,
        )
    ]
    for dtype in ("bf16", "fp32"):
        pointers = dict.fromkeys(("joint", "streams", "taken", "normal"), f"*{dtype}") | {"gains": "*fp32"}
        found.append(
            Compilation(
                kernel=gate_kernel,
                name=f"opening {dtype}",
                types=pointers | dict.fromkeys(("epsilon", "least", "root"), "fp32"),
                constants={"COUNT": 4, "SIZE": 2048, "BLOCK": block},
                warps=warps,
                hot=True,
            )
        )
        types = dict.fromkeys(("streams", "taken", "normal", "taps"), f"*{dtype}")
        types |= dict.fromkeys(("starts", "slots", "fresh"), "*i64") | {"windows": f"*{dtype}"}
        found.append(
            Compilation(
                kernel=ngram_convolution_kernel,
                name=f"taking {dtype}",
                types=types | dict.fromkeys(("channels", "windows_stride"), "i32:16"),
                constants={"REACH": 9, "APART": 3, "TOKENS": TOKENS, "BLOCK": CHANNELS},
                fuse=True,
                hot=True,
            )
        )
    return found
