"""Gated short convolutions in Triton. `short_convolution` is the reference. Knows tensors only.

    out[t] = gates[t] * (bias + sum over i of taps[:, i] * mixed[t - (WIDTH - 1) + i])      before the span: the window's rows

A program computes TOKENS tokens of a span, CHANNELS channels of them. No token waits for another, so programs share a prompt's
tokens, too. Windows are written by a launch of their own, when all programs that read them are done.
"""

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import Compilation
from .fused_gated_delta import update_windows
from .spans import Spans

# Tile of a program; a decode step's spans have one token each, but little is computed in vain.
TOKENS, CHANNELS = 16, 128


@triton.jit
def convolved(  # type: ignore[no-untyped-def]
    mixed,
    stride,
    window,  # [WIDTH - 1, channels]: inputs before it, those from row `first` on valid
    channels,
    row,  # [TOKENS, 1] int64: of mixed
    place,  # [TOKENS, 1]: in the span
    first,
    channel,  # [1, BLOCK]
    there,  # [1, BLOCK]
    inside,  # [TOKENS, BLOCK]
    taps,  # [channels, WIDTH], dense
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The causal convolution of some tokens of a span, some channels: [TOKENS, BLOCK] float32."""
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for tap in tl.static_range(WIDTH):
        back = WIDTH - 1 - tap
        before = window + (place + tap) * channels + channel
        values = tl.load(before, mask=inside & (place < back) & (place + tap >= first), other=0.0)
        values = tl.load(mixed + (row - back) * stride + channel, mask=inside & (place >= back), other=values)
        total += values.to(tl.float32) * tl.load(taps + channel * WIDTH + tap, mask=there, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["starts", "slots", "fresh"])
def convolution_kernel(
    out: tl.tensor,  # [tokens, channels], dense
    mixed: tl.tensor,  # [tokens, channels]
    gates: tl.tensor,
    taps: tl.tensor,  # [channels, WIDTH], dense
    biases: tl.tensor,  # [channels], dense; unused without BIASED
    starts: tl.tensor,  # [spans + 1]
    slots: tl.tensor,  # [spans]; 0: padding, nothing is read there
    fresh: tl.tensor,
    windows: tl.tensor,  # [slots, WIDTH - 1, channels], each slot dense
    tokens: tl.tensor,
    channels: tl.tensor,
    mixed_stride: tl.tensor,
    gates_stride: tl.tensor,
    windows_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """TOKENS tokens of one span, BLOCK channels; with the last span, also some of the padding behind it."""
    span, part = tl.program_id(0), tl.program_id(2)
    start, end, slot = tl.load(starts + span), tl.load(starts + span + 1), tl.load(slots + span)
    first = tl.where((slot > 0) & (tl.load(fresh + span) == 0), 0, WIDTH - 1)  # first valid row of the window
    place = part * TOKENS + tl.arange(0, TOKENS)[:, None]  # place in the span
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = channel < channels
    inside = there & (place < end - start)
    row = start + place
    window = windows + slot * windows_stride
    total = convolved(mixed, mixed_stride, window, channels, row, place, first, channel, there, inside, taps, WIDTH, TOKENS, BLOCK)
    if BIASED:
        total += tl.load(biases + channel, mask=there, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    gate = tl.load(gates + row * gates_stride + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * channels + channel, (total.to(kind).to(tl.float32) * gate).to(kind), mask=inside)
    if span == tl.num_programs(0) - 1:
        for i in range(part, (tokens - end).to(tl.int32), tl.num_programs(2)):
            tl.store(out + (end + i) * channels + channel, tl.zeros([1, BLOCK], kind), mask=there)


def convolve(
    mixed: Tensor,
    gates: Tensor,
    taps: Tensor,
    biases: Tensor | None,
    spans: Spans,
    windows: Tensor,
) -> Tensor:
    """`short_convolution.short_convolution`. mixed and gates: their last dimension dense; windows: each slot dense; the rest:
    dense. At least one span."""
    (tokens, channels), width = mixed.shape, taps.shape[1]
    assert mixed.stride(1) == gates.stride(1) == 1
    assert taps.is_contiguous()
    assert windows.stride()[1:] == (channels, 1)
    assert mixed.dtype == gates.dtype == windows.dtype
    out = torch.empty(mixed.shape, dtype=mixed.dtype, device=mixed.device)
    grid = len(spans.slots), triton.cdiv(channels, CHANNELS), triton.cdiv(max(spans.lengths), TOKENS)
    convolution_kernel[grid](
        out,
        mixed,
        gates,
        taps,
        biases,
        spans.starts,
        spans.slots,
        spans.fresh,
        windows,
        tokens,
        channels,
        mixed.stride(0),
        gates.stride(0),
        windows.stride(0),
        WIDTH=width,
        BIASED=biases is not None,
        TOKENS=TOKENS,
        BLOCK=CHANNELS,
        num_warps=4,
        enable_fp_fusion=True,
    )
    update_windows(mixed, spans, windows)
    return out


def compilations() -> list[Compilation]:
    """LFM2's three taps, gates being columns of one product."""
    found = []
    for dtype, biased in itertools.product(("bf16", "fp32"), (False, True)):
        types = dict.fromkeys(("out", "mixed", "gates", "taps", "biases", "windows"), f"*{dtype}")
        types |= dict.fromkeys(("starts", "slots", "fresh"), "*i64") | {"tokens": "i32"}
        types |= dict.fromkeys(("channels", "mixed_stride", "gates_stride", "windows_stride"), "i32:16")
        nothing: dict[str, object] = {} if biased else {"biases": None}
        sizes: dict[str, object] = {"WIDTH": 3, "BIASED": biased, "TOKENS": TOKENS, "BLOCK": CHANNELS}
        found.append(
            Compilation(
                kernel=convolution_kernel,
                name=f"short convolution {dtype}{' biased' * biased}",
                types=types,
                constants=nothing | sizes,
                fuse=True,
                hot=True,
            )
        )
    return found
