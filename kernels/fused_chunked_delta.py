"""The chunked form of linear attention for prefill, as Triton kernels: the gated delta rule in its WY representation (Yang et al.
2024, arXiv:2412.06464, section 3) and state spaces in their dual form (Dao and Gu 2024, arXiv:2405.21060, section 6). For
definitions see `gated_delta` and `state_space`. Knows tensors only.

The recurrent form (`fused_gated_delta`) computes one token after the other. Here three kernels compute a span in chunks of tokens:

    features   convolution and silu, of all tokens and channels in parallel
    systems    for each chunk and head, in parallel, what doesn't depend on the recurrent state: masked query-key products times
               decays, and the inverse of the triangular matrix by which a token's update depends on earlier ones of its chunk
    walk       chunk after chunk, with a block of a head's state in registers: five products of small matrices each

With keys K, queries Q and values V of a chunk, the state S before it, decay(i, j) the product of decays after token j up to token
i, decay(i) that from the chunk's beginning to token i, and A(i, j) = beta(i) decay(i, j) K(i)K(j)' for j < i, the updates U of
tokens (what each adds under its key) and their outputs O are:

    U = (I + A)^-1 beta (V - decay K S)
    O = decay Q S + tril(decay(i, j) QK') U
    S = decay(last) S + (decay(last, j) K)' U

For state spaces U is step * V. Logarithms of decays are summed for each pair of tokens separately: a small difference of two large
cumulative sums would be inexact. The convolution's output is rounded to the model's dtype, so that the single products of queries
and keys are exact, and only their sums are rounded.
"""

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import JITFunction, knobs

from . import fused_gated_delta
from .compilation import AMD, NVIDIA, Compilation
from .fused_gated_delta import Inputs, biases_of, log_decay, silu, update_windows
from .fused_short_convolution import convolved
from .spans import CHUNKED_FROM, RecurrentStates, Spans

# Tokens per chunk. Per token, the walk's operations with the state don't depend on the chunk's length, but those among tokens grow
# with it: with 64, products would take most of the time, with 16 their latency. One warp inverts a matrix of 32, and scratch takes
# half as much as with 64. An estimate that no GPU has measured.
CHUNK = 32
TOKENS, CHANNELS = 32, 128  # per program of the convolution
PART = 32  # features of keys that a program of `chunk_systems_kernel` holds in registers at once
INTERPRET = bool(knobs.runtime.interpret)  # in Triton's interpreter a dot of bfloat16 is garbage, so operands are widened there
# Indices of a token's factors: see `Scratch.factors`.
READS, ASKS, PUTS, LEFT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


class Tile(NamedTuple):
    """Launch parameters of `chunk_systems_kernel` and `chunk_state_kernel`."""

    precision: str  # of matrix products, Triton's `input_precision`
    block: int  # value features per program of `chunk_state_kernel`: with 32, 32 heads of 128 make 128 programs for one sequence
    warps: int  # per program of `chunk_state_kernel`
    stages: int  # of its software pipeline
    system_warps: int  # per program of `chunk_systems_kernel`


def tile_of(dtype: torch.dtype, amd: bool) -> Tile:
    """The tile for models of that dtype. For bfloat16, operands of products are rounded to TF32: the error is a third, or less, of
    that of rounding keys and values to bfloat16, but twice that of rounding them to float16. Other dtypes use 3xTF32, which takes
    more registers. AMD's matrix units multiply float32 as it is."""
    if amd:
        return Tile("ieee", 16, 4, 1 if dtype == torch.float32 else 2, 1)
    return Tile("tf32", 32, 8, 2, 1) if dtype == torch.bfloat16 else Tile("tf32x3", 16, 8, 1, 2)


class Scratch(NamedTuple):
    """Intermediate tensors of the tokens that are computed in chunks, the first of which has index 0."""

    features: Tensor  # [tokens, channels] in the model's dtype: output of convolution and silu
    solutions: Tensor | None  # [heads, tokens, CHUNK] float32: each token's row of its chunk's (I + A)^-1 beta; None: state spaces
    seen: Tensor  # likewise its row of tril(decay(i, j) QK'), for state spaces times steps
    # [4, heads, tokens] float32, including decays and L2 normalization: factors of a key where it READS from the state, of a query
    # where it ASKS the state, of a key where its update is PUT into the state at the chunk's end; and the decay since the chunk's
    # beginning, which is what is LEFT of the state before it.
    factors: Tensor


@triton.jit
def _chunk(nth, kept, length, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Begin and end of the nth chunk of a span. Drafts, the tokens from `kept` on, begin a new chunk."""
    sure = tl.cdiv(kept, CHUNK)
    begin = tl.where(nth < sure, nth * CHUNK, kept + (nth - sure) * CHUNK)
    return begin, tl.minimum(begin + CHUNK, tl.where(nth < sure, kept, length))


@triton.jit
def _product(left, right, sums, PRECISION: tl.constexpr, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The matrix product, added to `sums` in float32."""
    if WIDEN:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision=PRECISION)


@triton.jit
def _round_operand(x, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rounds an operand of a product: for TF32 to 11 significant bits, since tensor cores would truncate the others. NaN stays
    NaN."""
    if PRECISION == "tf32":
        near = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, near, x)
    return x


@triton.jit(do_not_specialize=["base"], do_not_specialize_on_alignment=["starts", "slots", "fresh"])
def chunk_convolution_kernel(
    features: tl.tensor,  # [tokens, channels], dense
    mixed: tl.tensor,  # [tokens, channels]
    taps: tl.tensor,  # [channels, WIDTH], dense
    biases: tl.tensor,  # [channels], dense; unused with DELTA
    starts: tl.tensor,  # [spans + 1]
    slots: tl.tensor,  # [spans]; 0: padding, whose window is not read
    fresh: tl.tensor,
    windows: tl.tensor,  # [slots, WIDTH - 1, channels], each slot dense
    base: tl.tensor,  # first token of the first span, which has index 0 in `features`
    channels: tl.tensor,
    mixed_stride: tl.tensor,
    windows_stride: tl.tensor,
    WIDTH: tl.constexpr,
    DELTA: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The causal convolution and silu. One program: TOKENS tokens of a span, BLOCK channels."""
    span = tl.program_id(0)
    start, end, slot = tl.load(starts + span), tl.load(starts + span + 1), tl.load(slots + span)
    first = tl.where((slot > 0) & (tl.load(fresh + span) == 0), 0, WIDTH - 1)  # first row of the window that is used
    place = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)[:, None]  # in the span
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = channel < channels
    inside = there & (place < end - start)
    row, window = start + place, windows + slot * windows_stride
    total = convolved(mixed, mixed_stride, window, channels, row, place, first, channel, there, inside, taps, WIDTH, TOKENS, BLOCK)
    if not DELTA:
        total += biases_of(biases, channel, there, DELTA)
    target = features + (row - base) * channels + channel
    tl.store(target, silu(total).to(features.dtype.element_ty), mask=inside)


@triton.jit
def _inverse(above, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The inverse of I + A. above: A's transpose, strictly upper triangular. Row by row (forward substitution): powers of A, which
    would take fewer steps, grow beyond the precision of float32 sums where keys are similar."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    found = tl.where(row == column, 1.0, 0.0)
    for i in range(1, CHUNK):
        own = tl.sum(tl.where(column == i, above, 0.0), 1)  # A's row i
        found = tl.where(row == i, found - tl.sum(own[:, None] * found, 0)[None, :], found)
    return found


@triton.jit(do_not_specialize=["base", "count"], do_not_specialize_on_alignment=["starts", "sure"])
def chunk_systems_kernel(
    solutions: tl.tensor,
    seen: tl.tensor,
    factors: tl.tensor,
    features: tl.tensor,
    strengths: tl.tensor,  # [tokens, heads]; unused without DELTA
    fades: tl.tensor,  # [tokens, heads]; for state spaces, time steps
    rates: tl.tensor,  # [heads]
    offsets: tl.tensor,  # [heads]
    starts: tl.tensor,
    sure: tl.tensor,
    base: tl.tensor,
    count: tl.tensor,  # tokens in `features`
    ratio: tl.tensor,  # value heads per key head
    channels: tl.tensor,
    values: tl.tensor,  # number of channels that are values
    strengths_stride: tl.tensor,
    fades_stride: tl.tensor,
    epsilon: tl.tensor,
    least: tl.tensor,  # this and `most` as in `recurrent_kernel`
    most: tl.tensor,
    KEY: tl.constexpr,
    DELTA: tl.constexpr,
    BOUNDED: tl.constexpr,
    PART: tl.constexpr,  # features of keys held at once
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Fills `Scratch` but for its features. One program: a chunk of a span, and a value head. Products and decays of two tokens
    are [earlier token, later token] here."""
    span, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    start, kept = tl.load(starts + span), tl.load(sure + span).to(tl.int32)
    length = (tl.load(starts + span + 1) - start).to(tl.int32)
    begin, end = _chunk(tl.program_id(2), kept, length, CHUNK)
    if begin < length:
        place, deep = begin + tl.arange(0, CHUNK), tl.arange(0, PART)
        there, token = place < end, start + place
        own = features + (token - base)[:, None] * channels + head // ratio * KEY
        met, alike = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
        query_length, key_length = tl.zeros([CHUNK], tl.float32) + epsilon, tl.zeros([CHUNK], tl.float32) + epsilon
        for first in range(0, KEY, PART):
            feature = (first + deep)[None, :]
            inside = there[:, None] & (feature < KEY)
            query = tl.load(own + feature, mask=inside, other=0.0)
            key = tl.load(own + feature + (channels - values) // 2, mask=inside, other=0.0)
            met = _product(key, tl.trans(query), met, PRECISION, WIDEN)
            if DELTA:
                alike = _product(key, tl.trans(key), alike, PRECISION, WIDEN)
                wide, asking = key.to(tl.float32), query.to(tl.float32)
                key_length += tl.sum(wide * wide, 1)
                query_length += tl.sum(asking * asking, 1)
        rate = tl.load(rates + head)
        fade = tl.load(fades + token * fades_stride + head, mask=there, other=0.0).to(tl.float32) + tl.load(offsets + head)
        decay, step = log_decay(fade, rate, least, most, DELTA, BOUNDED)
        decay = tl.where(there, decay, 0.0)
        row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
        later = tl.where(column > row, decay[None, :], 0.0)
        between = tl.exp(tl.cumsum(later, 1))  # [earlier, later]
        left, rest = tl.exp(tl.cumsum(decay, 0)), tl.exp(tl.sum(later, 1))
        met *= between
        at = head.to(tl.int64) * count + token - base
        tile = at[:, None] * CHUNK + column
        if DELTA:
            key_scale, query_scale = tl.rsqrt(key_length), tl.rsqrt(query_length) * (KEY**-0.5)
            strength = tl.load(strengths + token * strengths_stride + head, mask=there, other=0.0).to(tl.float32)
            beta = most / (1.0 + tl.exp(-strength))
            among = alike * between * key_scale[:, None] * (key_scale * beta)[None, :]
            inverse = _inverse(tl.where(row < column, among, 0.0), CHUNK)
            tl.store(solutions + tile, _round_operand(inverse * beta[None, :], PRECISION), mask=there[:, None])
            met *= key_scale[:, None] * query_scale[None, :]
            reads, asks, puts = left * key_scale, left * query_scale, rest * key_scale
            tl.store(factors + at + READS * heads * count, reads, mask=there)
        else:
            met *= step[:, None]
            asks, puts = left, rest * step
        tl.store(seen + tile, _round_operand(tl.trans(tl.where(row <= column, met, 0.0)), PRECISION), mask=there[:, None])
        tl.store(factors + at + ASKS * heads * count, asks, mask=there)
        tl.store(factors + at + PUTS * heads * count, puts, mask=there)
        tl.store(factors + at + LEFT * heads * count, left, mask=there)


@triton.jit(do_not_specialize=["base", "count"], do_not_specialize_on_alignment=["starts", "slots", "fresh", "sure"])
def chunk_state_kernel(
    out: tl.tensor,  # [tokens, heads, VALUE], dense
    features: tl.tensor,
    solutions: tl.tensor,
    seen: tl.tensor,
    factors: tl.tensor,
    skips: tl.tensor,  # [heads]; unused with DELTA
    starts: tl.tensor,
    slots: tl.tensor,
    fresh: tl.tensor,
    sure: tl.tensor,
    memories: tl.tensor,  # [slots, heads, KEY, VALUE] float32, each slot dense
    base: tl.tensor,
    count: tl.tensor,
    ratio: tl.tensor,
    channels: tl.tensor,
    memories_stride: tl.tensor,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    DELTA: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Goes through a span chunk by chunk and updates its recurrent state. One program: BLOCK features of a value head, all chunks
    of a span."""
    span, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    start, slot = tl.load(starts + span), tl.load(slots + span)
    length, kept = (tl.load(starts + span + 1) - start).to(tl.int32), tl.load(sure + span).to(tl.int32)
    deep, feature = tl.arange(0, KEYS), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    within, wanted = deep < KEY, feature < VALUE
    query_channel, value_channel = head // ratio * KEY + deep, channels - heads * VALUE + head * VALUE + feature
    key_channel = query_channel + (channels - heads * VALUE) // 2
    depth = tl.where((slot > 0) & (tl.load(fresh + span) == 0), KEY, 0)
    home = memories + slot * memories_stride + (head * KEY + deep[:, None]) * VALUE + feature[None, :]
    memory = tl.load(home, mask=(deep[:, None] < depth) & wanted[None, :], other=0.0)
    ranked, first = tl.arange(0, CHUNK), head.to(tl.int64) * count + start - base
    for drafted in range(2):  # committed tokens, then drafts
        stop = tl.where(drafted == 0, kept, length)
        for begin in range(tl.where(drafted == 0, 0, kept), stop, CHUNK):
            place = begin + ranked
            there, at = place < stop, first + place
            own = features + (start - base + place)[:, None] * channels
            inside, tile = there[:, None] & within[None, :], at[:, None] * CHUNK + ranked[None, :]
            key = tl.load(own + key_channel[None, :], mask=inside, other=0.0).to(tl.float32)
            query = tl.load(own + query_channel[None, :], mask=inside, other=0.0).to(tl.float32)
            value = tl.load(own + value_channel[None, :], mask=there[:, None] & wanted[None, :], other=0.0).to(tl.float32)
            change, before = value, _round_operand(memory, PRECISION)
            found = tl.dot(query, before, input_precision=PRECISION)
            if DELTA:
                reads = tl.load(factors + at + READS * heads * count, mask=there, other=0.0)
                change -= reads[:, None] * tl.dot(key, before, input_precision=PRECISION)
                solution = tl.load(solutions + tile, mask=there[:, None], other=0.0)
                change = tl.dot(solution, _round_operand(change, PRECISION), input_precision=PRECISION)
            asks = tl.load(factors + at + ASKS * heads * count, mask=there, other=0.0)
            met = tl.load(seen + tile, mask=there[:, None], other=0.0)
            found *= asks[:, None]
            found = tl.dot(met, _round_operand(change, PRECISION), found, input_precision=PRECISION)
            if not DELTA:
                found += tl.load(skips + head) * value
            answer = out + ((start + place)[:, None] * heads + head) * VALUE + feature[None, :]
            tl.store(answer, found.to(out.dtype.element_ty), mask=there[:, None] & wanted[None, :])
            puts = tl.load(factors + at + PUTS * heads * count, mask=there, other=0.0)
            memory *= tl.load(factors + first + tl.minimum(begin + CHUNK, stop) - 1 + LEFT * heads * count)
            memory = tl.dot(tl.trans(key), _round_operand(puts[:, None] * change, PRECISION), memory, input_precision=PRECISION)
        if (drafted == 0) & (slot > 0):
            tl.debug_barrier()  # in a small state several threads may have read the element that one writes
            tl.store(home, memory, mask=within[:, None] & wanted[None, :])


def attend_in_chunks(inputs: Inputs, spans: Spans, states: RecurrentStates) -> Tensor:
    """Computes `gated_delta.gated_delta`, or without strengths `state_space.state_space`. mixed, strengths and fades of inputs:
    last dimension dense; windows, memories: each slot dense; the rest: dense. There is at least one span.

    From the first long span to the last one all are computed in chunks, those before and after them by the recurrent kernel:
    prompts of a step stand together, so that takes at most four launches more. CUDA graphs are captured with one-token spans.
    """
    mixed = inputs.mixed
    out = torch.empty(len(mixed), *states.memories.shape[1::2], dtype=mixed.dtype, device=mixed.device)
    first, last = _long(spans.lengths) if inputs.fades.shape[1] == states.memories.shape[1] else (0, 0)
    starts, end = [0, *itertools.accumulate(spans.lengths)], len(spans.lengths)
    for begin, stop in ((0, first), (last, end)) if first < last else ((0, end),):
        if begin < stop:
            tokens = len(out) if stop == end else starts[stop]
            fused_gated_delta.walk(inputs, _between(spans, begin, stop), states, tokens, out)
    if first < last:
        _by_chunks(inputs, _between(spans, first, last), states, starts[first], starts[last], out)
        if last == end:
            out[starts[end] :].zero_()
    update_windows(mixed, spans, states.windows)
    return out


def _long(lengths: tuple[int, ...]) -> tuple[int, int]:
    """Indices of the first long span, and of the one after the last; (0, 0): there are none. Long spans have at least
    `CHUNKED_FROM` tokens."""
    long = [i for i, length in enumerate(lengths) if length >= CHUNKED_FROM]
    return (long[0], long[-1] + 1) if long else (0, 0)


def _between(spans: Spans, begin: int, stop: int) -> Spans:
    if (begin, stop) == (0, len(spans.lengths)):
        return spans
    each = (part[begin:stop] for part in (spans.slots, spans.fresh, spans.sure))
    return Spans(spans.lengths[begin:stop], spans.starts[begin : stop + 1], *each)


def scratch(inputs: Inputs, heads: int, tokens: int) -> Scratch:
    """Uninitialized scratch for so many tokens."""
    mixed = inputs.mixed
    seen, factors = (torch.empty(shape, device=mixed.device) for shape in ((heads, tokens, CHUNK), (4, heads, tokens)))
    features = torch.empty(tokens, mixed.shape[1], dtype=mixed.dtype, device=mixed.device)
    return Scratch(features, torch.empty_like(seen) if inputs.strengths is not None else None, seen, factors)


def _by_chunks(inputs: Inputs, spans: Spans, states: RecurrentStates, base: int, end: int, out: Tensor) -> None:
    """Computes all of `spans`, which are the step's tokens from `base` to `end`, in chunks."""
    mixed, strengths, fades, _, _, rates, offsets, skips, epsilon, limits = inputs
    fused_gated_delta.check_layout(inputs, states, out)
    channels, (heads, key_size, value_size) = mixed.shape[1], states.memories.shape[1:]
    values, longest, delta = heads * value_size, max(spans.lengths), strengths is not None
    own = scratch(inputs, heads, end - base)
    _convolve(inputs, spans, states, base, own.features)
    ratio = heads * 2 * key_size // (channels - values)
    tile = tile_of(mixed.dtype, torch.version.hip is not None)
    shared = {"KEY": key_size, "DELTA": delta, "CHUNK": CHUNK, "PRECISION": tile.precision}
    # One more chunk than for the longest span's length, since drafts begin a new one.
    chunk_systems_kernel[(len(spans.lengths), heads, triton.cdiv(longest, CHUNK) + 1)](
        own.solutions,
        own.seen,
        own.factors,
        own.features,
        strengths,
        fades,
        rates,
        offsets,
        spans.starts,
        spans.sure,
        base,
        end - base,
        ratio,
        channels,
        values,
        strengths.stride(0) if strengths is not None else 0,
        fades.stride(0),
        epsilon,
        *limits,
        BOUNDED=delta and limits[0] < 0,
        PART=PART,
        WIDEN=INTERPRET,
        num_warps=tile.system_warps,
        enable_fp_fusion=True,
        **shared,
    )
    chunk_state_kernel[(len(spans.lengths), heads, triton.cdiv(value_size, tile.block))](
        out,
        own.features,
        own.solutions,
        own.seen,
        own.factors,
        skips,
        spans.starts,
        spans.slots,
        spans.fresh,
        spans.sure,
        states.memories,
        base,
        end - base,
        ratio,
        channels,
        states.memories.stride(0),
        VALUE=value_size,
        KEYS=max(16, triton.next_power_of_2(key_size)),  # 16 is the minimum of a dot on matrix units
        BLOCK=tile.block,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=True,
        **shared,
    )


def _convolve(inputs: Inputs, spans: Spans, states: RecurrentStates, base: int, features: Tensor) -> None:
    """Launches `chunk_convolution_kernel`, which writes `features`."""
    channels, width = inputs.taps.shape
    chunk_convolution_kernel[(len(spans.lengths), triton.cdiv(channels, CHANNELS), triton.cdiv(max(spans.lengths), TOKENS))](
        features,
        inputs.mixed,
        inputs.taps,
        inputs.biases,
        spans.starts,
        spans.slots,
        spans.fresh,
        states.windows,
        base,
        channels,
        inputs.mixed.stride(0),
        states.windows.stride(0),
        WIDTH=width,
        DELTA=inputs.strengths is not None,
        TOKENS=TOKENS,
        BLOCK=CHANNELS,
        num_warps=4,
        enable_fp_fusion=True,
    )


class Heads(NamedTuple):
    """The shape of a model's linear attention heads that kernels are compiled for ahead of time."""

    name: str
    delta: bool
    key_size: int
    value_size: int


# Those of Qwen3-Next and Qwen 3.5; of Granite 4 H Tiny and Small; of the largest Falcon H1.
COMPILED = (
    Heads("delta", True, 128, 128),
    Heads("state spaces", False, 128, 64),
    Heads("state spaces of 256", False, 256, 64),
)
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def compilations() -> list[Compilation]:
    """Kernels for bfloat16 and float32, whose products have different precisions, which also differ between AMD and NVIDIA."""
    found = []
    for heads, (name, dtype), amd in itertools.product(COMPILED, TYPES.items(), (False, True)):
        tile = tile_of(dtype, amd)
        shared = {"KEY": heads.key_size, "DELTA": heads.delta, "CHUNK": CHUNK, "PRECISION": tile.precision}
        how: dict[str, object] = {**shared, "BOUNDED": False, "PART": PART, "WIDEN": False}
        walked: dict[str, object] = {**shared, "VALUE": heads.value_size, "KEYS": heads.key_size, "BLOCK": tile.block}
        targets = AMD if amd else NVIDIA
        found += [
            _compilation(chunk_systems_kernel, f"systems {heads.name}", name, targets, how, tile.system_warps),
            _compilation(chunk_state_kernel, f"walk {heads.name}", name, targets, walked, tile.warps, tile.stages),
        ]
    for delta, name in itertools.product((True, False), TYPES):
        sizes: dict[str, object] = {"WIDTH": 4, "DELTA": delta, "TOKENS": TOKENS, "BLOCK": CHANNELS}
        found.append(_compilation(chunk_convolution_kernel, f"features{' biased' * (not delta)}", name, (), sizes, 4))
    return found


def _compilation(
    kernel: JITFunction, name: str, dtype: str, targets: tuple[str, ...], how: dict[str, object], warps: int, stages: int = 2
) -> Compilation:
    """A compilation. float32 kernels, which few models are served with, may spill registers."""
    types = dict.fromkeys(("out", "mixed", "strengths", "fades", "taps", "biases", "windows", "features"), f"*{dtype}")
    types |= dict.fromkeys(("rates", "offsets", "skips", "memories", "solutions", "seen", "factors"), "*fp32")
    types |= dict.fromkeys(("starts", "slots", "fresh", "sure"), "*i64") | dict.fromkeys(("base", "count", "ratio"), "i32")
    sizes = ("channels", "values", "mixed_stride", "strengths_stride", "fades_stride", "windows_stride", "memories_stride")
    types |= dict.fromkeys(sizes, "i32:16") | dict.fromkeys(("epsilon", "least", "most"), "fp32")
    nothing = ("biases", "skips") if how["DELTA"] else ("strengths", "solutions")
    constants: dict[str, object] = dict.fromkeys(part for part in nothing if part in kernel.arg_names)
    constants |= how
    return Compilation(
        kernel=kernel,
        name=f"chunks {name} {dtype}{' amd' * (targets == AMD)}",
        types=types,
        constants=constants,
        warps=warps,
        stages=stages,
        fuse=True,
        hot=dtype != "fp32",
        targets=targets,
    )
