"""Linear attention by the gated delta rule, over ragged spans of tokens (Yang et al. 2024, arXiv:2412.06464).

Each head keeps a recurrent state, a matrix [key size, value size] that is zero before a sequence's first token. Each token decays
it, then replaces what it returns for the token's key by the token's value, to the extent of the update strength beta:

    state = exp(rate * softplus(fade + offset)) * state             the first factor is the decay
    state = state + key^T * beta * (value - key * state)            beta = strongest * sigmoid(strength)
    output = query * state

`strongest`, the upper bound of beta, is 1, or 2 where the value under a key may change its sign (negative eigenvalues of the state
transition: Grazzi et al. 2024, arXiv:2411.12537).

There may be one decay per feature of a key, that is per row of the state (Kimi Delta Attention: Kimi Team 2025, arXiv:2510.26692).
And the logarithms of decays may have a lower bound, below 0: the decay is then exp(bound * sigmoid(-rate * (fade + offset))) (GLM 5
Next).

Queries, keys and values come from a causal depthwise convolution over the last few tokens, through silu; queries and keys are
L2-normalized, and queries are also divided by the square root of their number of features.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from . import reference
from .dispatch import triton_for
from .spans import RecurrentStates, Spans

LENGTH_EPSILON = 1e-6  # added to squared L2 norms of queries and keys
CHUNK = 64  # tokens whose state updates are computed together
# Tokens of a chunk where each feature of a key has a decay of its own, and the least logarithm of a decay, below which it makes no
# visible difference: the product of a chunk's decays, and its inverse, must be representable in float64.
FEW, LEAST_LOG_DECAY = 16, -40.0


def gated_delta(
    mixed: Tensor,
    strengths: Tensor,
    fades: Tensor,
    taps: Tensor,
    rates: Tensor,
    offsets: Tensor,
    spans: Spans,
    states: RecurrentStates,
    strongest: float = 1.0,
    bound: float = 0.0,
) -> Tensor:
    """The outputs of the tokens of `spans`, [tokens, value heads, value size] in mixed's dtype. Updates `states` in place.

    mixed: [tokens, channels], the convolution's input: all heads' queries, then keys, then values; each key head is shared by
    equally many consecutive value heads; strengths: [tokens, value heads], betas before the sigmoid; fades: [tokens, value heads],
    or [tokens, value heads * key size] where each feature of a key has its own decay; these three may be columns of a wider tensor;
    taps: [channels, width], weights of the convolution, the last for the token itself; rates: [value heads] float32, negative;
    offsets: float32, biases of fades; strongest: upper bound of beta; bound: lower bound of the logarithms of decays; 0: none.

    The convolution's output is rounded to mixed's dtype; everything after it is float32. Tokens after the last span (padding) have
    output 0, and the contents of slot 0 are never used.
    """
    if triton_for(mixed):
        from .fused_chunked_delta import attend_in_chunks
        from .fused_gated_delta import Inputs

        inputs = Inputs(mixed, strengths, fades, taps, None, rates, offsets, None, LENGTH_EPSILON, (bound, strongest))
        return attend_in_chunks(inputs, spans, states)
    strong = strengths.float().sigmoid().mul_(strongest).t().unsqueeze(2)  # [heads, tokens, 1]
    far = (fades.float() + offsets).view(len(mixed), len(rates), -1)
    far = rates[:, None] * (-far if bound else functional.softplus(far))
    fading = (far.sigmoid().mul_(bound) if bound else far).transpose(0, 1)  # [heads, tokens, 1 or key size]
    rule = advance_chunk if fading.shape[2] == 1 else advance_chunk_by_features

    def advance(memory: Tensor, features: tuple[Tensor, Tensor, Tensor], own: slice) -> Tensor:
        return rule(memory, *features, fading[:, own], strong[:, own])

    return run_recurrence(mixed, taps, None, spans, states, _parts, advance)


def run_recurrence(
    mixed: Tensor,
    taps: Tensor,
    biases: Tensor | None,
    spans: Spans,
    states: RecurrentStates,
    parts: Callable[[Tensor, int, int, int], tuple[Tensor, Tensor, Tensor]],
    advance: Callable[[Tensor, tuple[Tensor, Tensor, Tensor], slice], Tensor],
) -> Tensor:
    """The outputs of the tokens of `spans`, as in `gated_delta`, for any update rule: convolution and recurrence, piece by piece.

    biases: [channels], of the convolution; parts: splits the convolution's output into queries, keys and values, shaped as `split`
    shapes them; advance: outputs of some tokens of one sequence, from its state, which it updates in place, from their queries,
    keys and values, and from their place among the step's tokens.
    """
    heads, key_size, value_size = states.memories.shape[1:]
    result = mixed.new_zeros(len(mixed), heads, value_size)
    slots = spans.slots.tolist()
    for piece, found in causal_convolution(mixed, taps, biases, spans, states):
        features = functional.silu(found, inplace=True).to(mixed.dtype).float()
        queries, keys, values = parts(features, heads, key_size, value_size)
        for place, slot in enumerate(slots[piece.first : piece.first + piece.count]):
            start = piece.start + place * piece.length
            own = slice(start + piece.begin, start + piece.end)
            # A view of the state: to gather and scatter states would take longer than the computation.
            memory = states.memories[slot] if piece.sure else states.memories[slot].clone()
            result[own] = advance(memory, (queries[place], keys[place], values[place]), own).transpose(0, 1)
    return result


@dataclass(frozen=True, slots=True)
class Piece:
    """The same range of tokens in each of some neighbouring spans of equal length, computed together."""

    first: int  # index of the first span
    count: int  # number of spans
    start: int  # first token of the first span, in the step
    length: int  # tokens of each span
    begin: int  # within each span, the first token of the piece ...
    end: int  # ... and the one after its last
    sure: bool  # the tokens update states; False: drafts, all of a span in one piece, which leave states as they are

    def rows(self, whole: Tensor) -> Tensor:
        """The piece's part of a tensor of all tokens: a view [spans, tokens, size]."""
        own = whole[self.start : self.start + self.count * self.length]
        return own.view(self.count, self.length, -1)[:, self.begin : self.end]


def causal_convolution(
    mixed: Tensor, taps: Tensor, biases: Tensor | None, spans: Spans, states: RecurrentStates
) -> Iterator[tuple[Piece, Tensor]]:
    """The convolution's output, piece by piece: [spans, tokens, channels] float32. Moves the convolution's windows past all tokens
    that are not drafts; zeroes the states of sequences that begin."""
    factors = taps.t().contiguous().float()
    for slot, fresh in zip(spans.slots.tolist(), spans.fresh.tolist(), strict=True):
        if fresh or not slot:
            states.windows[slot] = 0.0
            states.memories[slot] = 0.0
    for piece in _pieces(spans.lengths, spans.sure.tolist()):
        own = spans.slots[piece.first : piece.first + piece.count]
        yield piece, _causal_convolution(piece.rows(mixed), factors, biases, states.windows, own, piece.sure)


def _pieces(lengths: tuple[int, ...], sure: list[int]) -> Iterator[Piece]:
    first = start = 0
    for (length, kept), run in itertools.groupby(zip(lengths, sure, strict=True)):
        count = len(list(run))
        together = count if kept <= CHUNK else 1
        for span in range(0, count, together):
            own = first + span, together, start + span * length, length
            for cut in range(0, kept, CHUNK):
                yield Piece(*own, cut, min(cut + CHUNK, kept), sure=True)
            if kept < length:
                yield Piece(*own, kept, length, sure=False)
        first, start = first + count, start + count * length


def _causal_convolution(rows: Tensor, factors: Tensor, biases: Tensor | None, windows: Tensor, slots: Tensor, sure: bool) -> Tensor:
    """The convolution of `rows` [spans, tokens, channels]; factors: [width, channels] float32; sure: windows are updated."""
    length = rows.shape[1]
    seen = torch.cat((windows[slots], rows), 1)
    if sure:
        windows.index_copy_(0, slots, seen[:, length:])
    seen = seen.float()
    total = seen[:, :length] * factors[0]
    for place in range(1, len(factors)):
        total.addcmul_(seen[:, place : place + length], factors[place])
    return total if biases is None else total.add_(biases)


def _parts(features: Tensor, heads: int, key_size: int, value_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, shaped as by `split` and `repeat_key_heads`; queries and keys are L2-normalized, queries scaled."""
    both, values = split(features, heads, key_size, value_size)
    scale = both.square().sum(-1, keepdim=True).add_(LENGTH_EPSILON).rsqrt_()
    scale[:, :, 0] *= key_size**-0.5
    return *repeat_key_heads(both * scale, heads), values


def split(features: Tensor, heads: int, key_size: int, value_size: int) -> tuple[Tensor, Tensor]:
    """Splits [spans, tokens, channels] into queries and keys, [spans, tokens, 2, key heads, key size], and values, [spans, value
    heads, tokens, value size]."""
    spans, tokens, channels = features.shape
    both, values = features.split_with_sizes((channels - heads * value_size, heads * value_size), 2)
    return both.view(spans, tokens, 2, -1, key_size), values.view(spans, tokens, heads, value_size).transpose(1, 2)


def repeat_key_heads(both: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Queries and keys, repeated for the value heads that share them: [spans, heads, tokens, size] each."""
    queries, keys = both.repeat_interleave(heads // both.shape[3], 3).transpose(1, 3).unbind(2)
    return queries, keys


def advance_chunk(
    memory: Tensor, queries: Tensor, keys: Tensor, values: Tensor, fading: Tensor, strong: Tensor | None = None
) -> Tensor:
    """The outputs of a chunk of a sequence's tokens, [heads, tokens, value size]. Updates the recurrent state `memory` in place.

    fading, strong: [heads, tokens, 1], logarithms of decays, and betas of the delta rule; without `strong`, values are added to the
    state (linear attention with decay).

    The recurrent form would read and write the state for each token. By the delta rule a token's update depends on those of earlier
    tokens of the chunk, through a triangular matrix: one triangular solve gives all of them (the WY representation: Yang et al.
    2024, arXiv:2406.06484). Without it updates don't depend on each other (Dao and Gu 2024, arXiv:2405.21060).
    """
    if keys.shape[1] == 1:
        memory *= _kept(fading)
        changes = values if strong is None else strong * (values - keys @ memory)
        memory.baddbmm_(keys.transpose(1, 2), changes)
        return queries @ memory
    # Cumulative sums in float64: a small difference of two large ones may be needed.
    faded = fading.double().cumsum(1)  # [heads, tokens, 1], since the chunk's beginning
    between = _kept((faded - faded.transpose(1, 2)).clamp_(max=0.0))  # [heads, tokens, earlier tokens]
    left = _kept(faded)
    changes = values
    if strong is not None:
        changes = strong * (values - left * (keys @ memory))
        among = (keys @ keys.transpose(1, 2)).mul_(between).mul_(strong)
        changes = torch.linalg.solve_triangular(among, changes, upper=False, unitriangular=True)
    found = (queries @ memory).mul_(left)
    found.baddbmm_((queries @ keys.transpose(1, 2)).mul_(between).tril_(), changes)
    memory *= left[:, -1:]
    memory.baddbmm_((keys * _kept(faded[:, -1:] - faded)).transpose(1, 2), changes)
    return found


def advance_chunk_by_features(
    memory: Tensor, queries: Tensor, keys: Tensor, values: Tensor, fading: Tensor, strong: Tensor
) -> Tensor:
    """As `advance_chunk`, in chunks of `FEW` tokens, where each feature of a key has its own decay: [heads, tokens, key size]."""
    parts = zip(*(torch.split(part, FEW, 1) for part in (queries, keys, values, fading, strong)), strict=True)
    return torch.cat([_advance_short_chunk(memory, *part) for part in parts], 1)


def _advance_short_chunk(memory: Tensor, queries: Tensor, keys: Tensor, values: Tensor, fading: Tensor, strong: Tensor) -> Tensor:
    if keys.shape[1] == 1:
        memory *= _kept(fading).transpose(1, 2)
        memory.baddbmm_(keys.transpose(1, 2), strong * (values - keys @ memory))
        return queries @ memory
    faded = fading.double().clamp_(min=LEAST_LOG_DECAY).cumsum(1)
    left, risen = _kept(faded), (keys * (-faded).exp()).transpose(1, 2)
    among, between = ((part * faded.exp() @ risen).tril_().float() for part in (keys, queries))
    changes = strong * (values - (keys * left) @ memory)
    changes = torch.linalg.solve_triangular(among.mul_(strong), changes, upper=False, unitriangular=True)
    found = ((queries * left) @ memory).baddbmm_(between, changes)
    memory *= left[:, -1:].transpose(1, 2)
    memory.baddbmm_((keys * _kept(faded[:, -1:] - faded)).transpose(1, 2), changes)
    return found


def _kept(fading: Tensor) -> Tensor:
    """exp(fading) in float32, 0 where it is negligible: CPUs are many times slower with denormal numbers."""
    return torch.threshold_(fading.exp().float(), 1e-20, 0.0)


def gated_norm(x: Tensor, gates: Tensor, gains: Tensor, epsilon: float, before: bool = False, sigmoid: bool = False) -> Tensor:
    """The RMS norm of x (`reference.rms_norm`) times silu(gates), or their sigmoid, which are computed in float32. before: the gate
    is applied before the norm instead. x, gates: [rows, size] or [tokens, heads, size]; gains: [size], or [heads, size]; all of one
    dtype, the result's."""
    if triton_for(x):
        from .fused_gated_delta import gated_norm as fused

        return fused(x, gates, gains, epsilon, before, sigmoid, torch.empty(x.shape, dtype=x.dtype, device=x.device))
    factors: Tensor = gates.float().sigmoid() if sigmoid else functional.silu(gates.float())
    if before:
        gated = factors.mul_(x)
        return scaled(gated, gated.square().mean(-1, keepdim=True), gains, epsilon)
    return factors.mul_(reference.rms_norm(x, gains, epsilon)).to(x.dtype)


def scaled(x: Tensor, squares: Tensor, gains: Tensor, epsilon: float) -> Tensor:
    """RMS-normalizes float32 x [..., size], in place, with the mean of its squares given; in the dtype of gains."""
    return x.mul_(squares.add_(epsilon).rsqrt_()).to(gains.dtype).mul_(gains)
