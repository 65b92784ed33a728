"""The recurrent form of linear attention (gated delta rule and state spaces), and the gated norm after it, as Triton kernels. For
definitions and papers see `gated_delta` and `state_space`. Knows tensors only.

    state = exp(decay) * state                              [key size, value size], of one head
    change = beta * (value - key * state)                   state spaces: step * value
    state = state + key^T * change
    out = query * state                                     state spaces: + skip * value

One program goes through all tokens of a span with a part of one head's recurrent state in registers, token by token. That is all a
decode step needs: it reads and writes every state once. The tokens of a long prompt would wait for each other, though, each about a
microsecond in every layer (estimated, not measured): `fused_chunked_delta` computes those, unless each feature of a key has its own
decay.
"""

import itertools
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton import JITFunction

from .compilation import Compilation
from .fused_activation import softplus
from .spans import RecurrentStates, Spans

# Value features per program of one warp. With 16, and keys of 128 features, a thread holds 64 elements of the state and does most
# of a token's sums by itself; and one sequence's 32 heads of 128 make 256 programs.
BLOCK = 16
COPIED = 512  # channels per program of the kernel that updates convolution windows
TILE = 2048  # elements per program of the norm: 16 per thread
# Compiled variants: whether the delta rule, whether a decay for each feature of a key, whether decays have a lower bound.
RULES = ((True, False, False), (True, True, False), (True, True, True), (False, False, False))


class Inputs(NamedTuple):
    """Inputs and parameters of a layer's recurrence: see `gated_delta.gated_delta` and `state_space.state_space`."""

    mixed: Tensor
    strengths: Tensor | None  # only of the delta rule
    fades: Tensor  # for state spaces, the time steps
    taps: Tensor
    biases: Tensor | None  # of the convolution, only of state spaces
    rates: Tensor
    offsets: Tensor
    skips: Tensor | None  # only of state spaces
    epsilon: float  # added to squared L2 norms of queries and keys
    limits: tuple[float, float]  # delta rule: `bound` and `strongest`; state spaces: least and largest time step


@triton.jit
def silu(x: tl.tensor) -> tl.tensor:
    return x / (1.0 + tl.exp(-x))


@triton.jit
def log_decay(fade, rate, least, most, DELTA: tl.constexpr, BOUNDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The logarithm of what is left of a recurrent state, of a decay input with its bias added; and the time step of state spaces.
    least, most: as in `recurrent_kernel`."""
    step = fade
    if BOUNDED:
        decay = least / (1.0 + tl.exp(rate * fade))
    else:
        step = softplus(fade)
        if not DELTA:
            step = tl.minimum(tl.maximum(step, least), most)
        decay = rate * step
    return decay, step


@triton.jit
def _factors(taps, channel, within, WIDTH: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights of the convolution: [ROWS, channels], 0 beyond its width."""
    row = tl.arange(0, ROWS)[:, None]
    return tl.load(taps + channel[None, :] * WIDTH + row, mask=(row < WIDTH) & within[None, :], other=0.0)


@triton.jit
def biases_of(biases, channel, within, DELTA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Biases of the convolution: [channels]; 0 with DELTA, which has none."""
    found = 0.0
    if not DELTA:
        found = tl.load(biases + channel, mask=within, other=0.0).to(tl.float32)
    return found


@triton.jit
def _fades(numbers, head, deep, within, KEY: tl.constexpr, EACH: tl.constexpr):  # type: ignore[no-untyped-def]
    """A head's decay input (or its bias), one number; with EACH one per feature of its keys: [KEYS], 0 beyond them."""
    return tl.load(numbers + head * KEY + deep, mask=within, other=0.0) if EACH else tl.load(numbers + head)


@triton.jit
def _convolved(own, stride, window, channels, i, first, channel, within, factors, bias, WIDTH: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some channels of a span's token i after convolution and silu, float32. own: pointer to the token's input; window: inputs
    before the span, WIDTH - 1 rows; first: the first of these rows that is used (the others count as 0)."""
    row = tl.arange(0, ROWS)[:, None]
    column, inside = channel[None, :], (i + row >= WIDTH - 1) & (row < WIDTH) & within[None, :]
    outside = (i + row >= first) & (i + row < WIDTH - 1) & within[None, :]
    values = tl.load(window + (i + row) * channels + column, mask=outside, other=0.0)
    values = tl.load(own + (row - (WIDTH - 1)) * stride + column, mask=inside, other=values)
    total = tl.sum(values.to(tl.float32) * factors.to(tl.float32), 0)
    return silu(total + bias).to(own.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["starts", "slots", "fresh", "sure"])
def recurrent_kernel(
    out: tl.tensor,  # [tokens, heads, VALUE], dense
    mixed: tl.tensor,  # [tokens, channels]
    strengths: tl.tensor,  # [tokens, heads]
    fades: tl.tensor,  # [tokens, heads], or with EACH [tokens, heads * KEY]
    taps: tl.tensor,  # [channels, WIDTH], dense
    biases: tl.tensor,  # [channels], dense
    rates: tl.tensor,  # [heads] float32
    offsets: tl.tensor,  # biases of fades: [heads] float32, or with EACH [heads * KEY]
    skips: tl.tensor,  # [heads] float32
    starts: tl.tensor,  # [spans + 1]
    slots: tl.tensor,  # [spans]; 0: padding, whose state is neither read nor written
    fresh: tl.tensor,  # as in `spans.Spans`
    sure: tl.tensor,
    windows: tl.tensor,  # [slots, WIDTH - 1, channels], each slot dense
    memories: tl.tensor,  # [slots, heads, KEY, VALUE] float32, each slot dense
    tokens: tl.tensor,
    ratio: tl.tensor,  # value heads per key head
    channels: tl.tensor,
    mixed_stride: tl.tensor,
    strengths_stride: tl.tensor,
    fades_stride: tl.tensor,
    windows_stride: tl.tensor,
    memories_stride: tl.tensor,
    epsilon: tl.tensor,
    least: tl.tensor,  # least time step; with BOUNDED the lower bound of the logarithms of decays
    most: tl.tensor,  # largest time step; with DELTA the upper bound of beta
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    WIDTH: tl.constexpr,
    DELTA: tl.constexpr,  # delta rule, without biases and skips; else state space, without strengths
    EACH: tl.constexpr,  # each feature of a key has its own decay
    BOUNDED: tl.constexpr,
    KEYS: tl.constexpr,  # KEY rounded up to a power of two
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # WIDTH rounded up to a power of two
) -> None:
    """One program: all tokens of a span, BLOCK features of a value head. Those of the last span also zero the padding after it."""
    span, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    start, end, slot = tl.load(starts + span), tl.load(starts + span + 1), tl.load(slots + span)
    known = (slot > 0) & (tl.load(fresh + span) == 0)
    first, depth = tl.where(known, 0, WIDTH - 1), tl.where(known, KEY, 0)
    deep, feature = tl.arange(0, KEYS), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    within, wanted = deep < KEY, feature < VALUE
    query_channel, value_channel = head // ratio * KEY + deep, channels - heads * VALUE + head * VALUE + feature
    key_channel = query_channel + (channels - heads * VALUE) // 2
    query_factors = _factors(taps, query_channel, within, WIDTH, ROWS)
    key_factors = _factors(taps, key_channel, within, WIDTH, ROWS)
    value_factors = _factors(taps, value_channel, wanted, WIDTH, ROWS)
    query_bias, key_bias = biases_of(biases, query_channel, within, DELTA), biases_of(biases, key_channel, within, DELTA)
    value_bias = biases_of(biases, value_channel, wanted, DELTA)
    rate, offset = tl.load(rates + head), _fades(offsets, head, deep, within, KEY, EACH)
    window = windows + slot * windows_stride
    place = memories + slot * memories_stride + (head * KEY + deep[:, None]) * VALUE + feature[None, :]
    memory = tl.load(place, mask=(deep[:, None] < depth) & wanted[None, :], other=0.0)
    length = (end - start).to(tl.int32)
    kept = tl.load(sure + span).to(tl.int32)
    # Two passes, over committed tokens and over drafts: storing the state within one loop would leave its addresses no registers.
    for drafted in range(2):
        for i in range(tl.where(drafted == 0, 0, kept), tl.where(drafted == 0, kept, length)):
            token = start + i
            own = mixed + token * mixed_stride
            query = _convolved(
                own, mixed_stride, window, channels, i, first, query_channel, within, query_factors, query_bias, WIDTH, ROWS
            )
            key = _convolved(own, mixed_stride, window, channels, i, first, key_channel, within, key_factors, key_bias, WIDTH, ROWS)
            value = _convolved(
                own, mixed_stride, window, channels, i, first, value_channel, wanted, value_factors, value_bias, WIDTH, ROWS
            )
            if DELTA:
                query *= tl.rsqrt(tl.sum(query * query, 0) + epsilon) * (KEY**-0.5)
                key *= tl.rsqrt(tl.sum(key * key, 0) + epsilon)
                beta = most / (1.0 + tl.exp(-tl.load(strengths + token * strengths_stride + head).to(tl.float32)))
            fade = _fades(fades + token * fades_stride, head, deep, within, KEY, EACH).to(tl.float32) + offset
            decay, step = log_decay(fade, rate, least, most, DELTA, BOUNDED)
            memory *= tl.exp(decay)[:, None] if EACH else tl.exp(decay)
            change = (value - tl.sum(memory * key[:, None], 0)) * beta if DELTA else step * value
            memory += key[:, None] * change[None, :]
            found = tl.sum(memory * query[:, None], 0)
            if not DELTA:
                found += tl.load(skips + head) * value
            tl.store(out + (token * heads + head) * VALUE + feature, found.to(out.dtype.element_ty), mask=wanted)
        if (drafted == 0) & (slot > 0):
            tl.store(place, memory, mask=within[:, None] & wanted[None, :])
    if span == tl.num_programs(0) - 1:
        for i in range((tokens - end).to(tl.int32)):
            nothing = tl.zeros([BLOCK], out.dtype.element_ty)
            tl.store(out + ((end + i) * heads + head) * VALUE + feature, nothing, mask=wanted)


@triton.jit(do_not_specialize_on_alignment=["starts", "slots", "fresh", "sure"])
def convolution_window_kernel(
    mixed: tl.tensor,  # [tokens, channels]
    starts: tl.tensor,  # this and the following as in `recurrent_kernel`
    slots: tl.tensor,
    fresh: tl.tensor,
    sure: tl.tensor,
    windows: tl.tensor,
    channels: tl.tensor,
    mixed_stride: tl.tensor,
    windows_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Moves convolution windows past a span's committed tokens, after all kernels that read them. One program: BLOCK channels of a
    span."""
    span = tl.program_id(0)
    start, slot = tl.load(starts + span), tl.load(slots + span)
    end = start + tl.load(sure + span)
    if slot > 0:
        first = start - tl.where(tl.load(fresh + span) == 0, WIDTH - 1, 0)
        channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
        row = tl.arange(0, ROWS)[:, None]
        wanted = (row < WIDTH - 1) & (channel < channels)
        token = end - (WIDTH - 1) + row
        window = windows + slot * windows_stride + channel
        source = tl.where(token >= start, mixed + token * mixed_stride + channel, window + (end - start + row) * channels)
        values = tl.load(source, mask=wanted & (token >= first), other=0.0)
        tl.debug_barrier()  # rows shift within the window: no thread may write before all have read
        tl.store(window + row * channels, values, mask=wanted)


def check_layout(inputs: Inputs, states: RecurrentStates, out: Tensor) -> None:
    """Asserts the strides and dtypes that the kernels rely on."""
    mixed, strengths, (key_size, value_size) = inputs.mixed, inputs.strengths, states.memories.shape[2:]
    assert mixed.stride(1) == inputs.fades.stride(1) == 1
    assert strengths is None or strengths.stride(1) == 1
    assert out.is_contiguous()
    assert inputs.taps.is_contiguous()
    assert states.windows.stride()[1:] == (mixed.shape[1], 1)
    assert states.memories.stride()[1:] == (key_size * value_size, value_size, 1)
    assert mixed.dtype == states.windows.dtype == out.dtype


def walk(inputs: Inputs, spans: Spans, states: RecurrentStates, tokens: int, out: Tensor) -> None:
    """Writes the outputs of the tokens of `spans` to `out`, and zeros after the last span up to `tokens`. Updates recurrent states,
    but not convolution windows: see `update_windows`.

    Strides as in `check_layout`; other tensors are dense. There is at least one span.
    """
    check_layout(inputs, states, out)
    mixed, strengths, fades, taps, biases, rates, offsets, skips, epsilon, limits = inputs
    (channels, width), (heads, key_size, value_size) = taps.shape, states.memories.shape[1:]
    recurrent_kernel[(len(spans.lengths), heads, triton.cdiv(value_size, BLOCK))](
        out,
        mixed,
        strengths,
        fades,
        taps,
        biases,
        rates,
        offsets,
        skips,
        spans.starts,
        spans.slots,
        spans.fresh,
        spans.sure,
        states.windows,
        states.memories,
        tokens,
        heads * 2 * key_size // (channels - heads * value_size),
        channels,
        mixed.stride(0),
        strengths.stride(0) if strengths is not None else 0,
        fades.stride(0),
        states.windows.stride(0),
        states.memories.stride(0),
        epsilon,
        *limits,
        KEY=key_size,
        VALUE=value_size,
        WIDTH=width,
        DELTA=strengths is not None,
        EACH=fades.shape[1] > heads,
        BOUNDED=strengths is not None and limits[0] < 0,
        KEYS=triton.next_power_of_2(key_size),
        BLOCK=BLOCK,
        ROWS=triton.next_power_of_2(width),
        num_warps=1,
        enable_fp_fusion=True,
    )


def update_windows(mixed: Tensor, spans: Spans, windows: Tensor) -> None:
    """Moves convolution windows past each span's committed tokens. To be called after the launch of all kernels that read them."""
    channels, before = mixed.shape[1], windows.shape[1]
    assert mixed.stride(1) == 1
    assert windows.stride()[1:] == (channels, 1)
    convolution_window_kernel[(len(spans.slots), triton.cdiv(channels, COPIED))](
        mixed,
        spans.starts,
        spans.slots,
        spans.fresh,
        spans.sure,
        windows,
        channels,
        mixed.stride(0),
        windows.stride(0),
        WIDTH=before + 1,
        BLOCK=COPIED,
        ROWS=triton.next_power_of_2(before),
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["rows"])
def gated_norm_kernel(
    x: tl.tensor,  # [outer, inner, size], the last dimension dense
    gates: tl.tensor,
    gains: tl.tensor,  # [inner, size]
    out: tl.tensor,  # [outer, inner, size], dense
    rows: tl.tensor,  # outer * inner
    inner: tl.tensor,
    x_outer: tl.tensor,  # strides
    x_inner: tl.tensor,
    gates_outer: tl.tensor,
    gates_inner: tl.tensor,
    gains_inner: tl.tensor,  # 0: the same gains for all of `inner`
    epsilon: tl.tensor,
    SIZE: tl.constexpr,
    BEFORE: tl.constexpr,  # gates are applied before the norm
    SIGMOID: tl.constexpr,  # gates go through sigmoid, instead of silu
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """The RMS norm with a gate: see `gated_delta.gated_norm`. One program: ROWS rows."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    outer, place = row // inner, row % inner
    inside = (row < rows) & (column < SIZE)
    wide = tl.load(x + outer * x_outer + place * x_inner + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gates + outer * gates_outer + place * gates_inner + column, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(gains + place * gains_inner + column, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / (1.0 + tl.exp(-gate)) if SIGMOID else silu(gate)
    if BEFORE:
        wide *= factor
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + epsilon)[:, None]
    normal = ((wide * scale).to(x.dtype.element_ty).to(tl.float32) * gain).to(x.dtype.element_ty).to(tl.float32)
    if not BEFORE:
        normal *= factor
    tl.store(out + row * SIZE + column, normal.to(out.dtype.element_ty), mask=inside)


def gated_norm(x: Tensor, gates: Tensor, gains: Tensor, epsilon: float, before: bool, sigmoid: bool, out: Tensor) -> Tensor:
    """`gated_delta.gated_norm` into `out`, which is dense. x, gates, gains: views whose last dimension is dense."""
    assert x.stride(-1) == gates.stride(-1) == gains.stride(-1) == 1
    assert out.is_contiguous()
    size, inner = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    rows = x.shape[0] * inner
    if rows:
        block, height, warps = _tile(size)
        gated_norm_kernel[(triton.cdiv(rows, height),)](
            x,
            gates,
            gains,
            out,
            rows,
            inner,
            x.stride(0),
            x.stride(1) if inner > 1 else 0,
            gates.stride(0),
            gates.stride(1) if inner > 1 else 0,
            gains.stride(0) if gains.dim() == 2 and inner > 1 else 0,
            epsilon,
            SIZE=size,
            BEFORE=before,
            SIGMOID=sigmoid,
            BLOCK=block,
            ROWS=height,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return out


def _tile(size: int) -> tuple[int, int, int]:
    """Of the norm: a row's size rounded up to a power of two, rows per program, and warps per program."""
    block = triton.next_power_of_2(size)
    return block, max(1, TILE // block), max(4, min(16, block * 4 // TILE))


def compilations() -> list[Compilation]:
    """Heads of Qwen3-Next and Qwen 3.5, 16 of keys and 32 of values with 128 features each, which are columns of one fused product;
    of Kimi Linear, 32 of both, and of GLM 5 Next, whose decays have a lower bound; and of Granite 4 H Tiny and Small, 48 and 128 of
    64 features, which share keys of 128."""
    found = []
    for dtype, (delta, each, bounded) in itertools.product(("bf16", "fp32"), RULES):
        rule, nothing = ("gated delta", ("biases", "skips")) if delta else ("state space", ("strengths",))
        rule = f"{rule}{' by features' * each}{' bounded' * bounded}"
        types = dict.fromkeys(("out", "mixed", "strengths", "fades", "taps", "biases", "windows"), f"*{dtype}")
        types |= dict.fromkeys(("rates", "offsets", "skips", "memories"), "*fp32")
        types |= dict.fromkeys(("starts", "slots", "fresh", "sure"), "*i64") | dict.fromkeys(("tokens", "ratio"), "i32")
        strides = ("mixed_stride", "strengths_stride", "fades_stride", "windows_stride", "memories_stride")
        types |= dict.fromkeys(("channels", *strides), "i32:16") | dict.fromkeys(("epsilon", "least", "most"), "fp32")
        sizes = {"KEY": 128, "VALUE": 128 if delta else 64, "WIDTH": 4, "KEYS": 128, "BLOCK": BLOCK, "ROWS": 4}
        how: dict[str, object] = {"DELTA": delta, "EACH": each, "BOUNDED": bounded, **dict.fromkeys(nothing), **sizes}
        found.append(_hot(recurrent_kernel, f"{rule} {dtype}", types, how, 1))
        if bounded:
            continue
        if delta and not each:
            window: dict[str, object] = {"WIDTH": 4, "BLOCK": COPIED, "ROWS": 4}
            found.append(_hot(convolution_window_kernel, f"{rule} windows {dtype}", types, window, 4))
        for size in (128,) if delta else (3072, 8192):
            block, height, warps = _tile(size)
            apart = ("inner", "x_outer", "x_inner", "gates_outer", "gates_inner", "gains_inner")
            norm = dict.fromkeys(("x", "gates", "gains", "out"), f"*{dtype}") | dict.fromkeys(apart, "i32:16")
            norm |= {"rows": "i32", "epsilon": "fp32"}
            constants: dict[str, object] = {"SIZE": size, "BEFORE": not delta, "SIGMOID": each, "BLOCK": block, "ROWS": height}
            found.append(_hot(gated_norm_kernel, f"gated norm {size} {dtype}{' by sigmoid' * each}", norm, constants, warps))
    return found


def _hot(kernel: JITFunction, name: str, types: dict[str, str], constants: dict[str, object], warps: int) -> Compilation:
    fuse = kernel is recurrent_kernel
    return Compilation(kernel=kernel, name=name, types=types, constants=constants, warps=warps, fuse=fuse, hot=True)
