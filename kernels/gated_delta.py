"""Linear attention by the gated delta rule, over ragged spans of tokens (Yang et al. 2024, arXiv:2412.06464).

A head has a memory, a matrix [key size, value size], which is zero before a sequence's first token. Each token lets it fade, takes
out what it holds under the token's key, and puts the token's value there instead, by the strength of a gate:

    memory = exp(rate * softplus(fade + offset)) * memory
    memory = memory + key^T * strongest * sigmoid(strength) * (value - key * memory)
    output = query * memory

`strongest` is 1, or 2 where what is under a key may come back with its sign turned (Grazzi et al. 2024, arXiv:2411.12537).

Fades may also be of each feature of a key by itself, which is a row of the memory (Kimi Team 2025, arXiv:2510.26692). And they may
have a bound, which is below 0: exp(bound * sigmoid(-rate * (fade + offset))) is what they leave of a memory then (GLM 5 Next).

Queries, keys and values come out of a convolution over the last few tokens, each channel by itself, through silu; queries and keys
are divided by their lengths, queries by the root of their number of features as well.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from . import reference
from .dispatch import triton_for
from .spans import Spans, States

LENGTH_EPSILON = 1e-6  # added to squared lengths of queries and keys
CHUNK = 64  # tokens whose changes of a memory are found together
# The same where each feature of a key fades by itself, and by which power of e it does so at most, as far as anybody can see: what
# all of them do to it, and what undoes that, must be numbers of 64 bits.
FEW, FARTHEST = 16, -40.0


def gated_delta(
    mixed: Tensor,
    strengths: Tensor,
    fades: Tensor,
    taps: Tensor,
    rates: Tensor,
    offsets: Tensor,
    spans: Spans,
    states: States,
    strongest: float = 1.0,
    bound: float = 0.0,
) -> Tensor:
    """What the tokens of `spans` find, [tokens, value heads, value size] in mixed's type; `states` of their slots go on, in place.

    mixed: [tokens, channels], what goes into the convolution: all heads' queries, then keys, then values; of key heads each serves
    as many value heads, one after the other; strengths: [tokens, value heads]; fades: as many, or as many for each feature of a
    key; these three may be columns of something wider; taps: [channels, width], the last for the token itself; rates: [value heads]
    float32, which are negative; offsets: of fades, float32; bound: of these, 0: they have none.

    What comes out of the convolution is rounded to mixed's type; all behind it is float32. Of tokens behind the last span the
    result is 0, and what slot 0 holds is never looked at.
    """
    if triton_for(mixed):
        from .fused_chunked_delta import attend_in_chunks
        from .fused_gated_delta import Inputs

        inputs = Inputs(mixed, strengths, fades, taps, None, rates, offsets, None, LENGTH_EPSILON, (bound, strongest))
        out = torch.empty(len(mixed), *states.memories.shape[1::2], dtype=mixed.dtype, device=mixed.device)
        return attend_in_chunks(inputs, spans, states, out)
    strong = strengths.float().sigmoid().mul_(strongest).t().unsqueeze(2)  # [heads, tokens, 1]
    far = (fades.float() + offsets).view(len(mixed), len(rates), -1)
    far = rates[:, None] * (-far if bound else functional.softplus(far))
    fading = (far.sigmoid().mul_(bound) if bound else far).transpose(0, 1)  # [heads, tokens, 1 or key size]
    rule = advanced if fading.shape[2] == 1 else advanced_by_features

    def advance(memory: Tensor, features: tuple[Tensor, Tensor, Tensor], own: slice) -> Tensor:
        return rule(memory, *features, fading[:, own], strong[:, own])

    return walk(mixed, taps, None, spans, states, _parts, advance)


def walk(
    mixed: Tensor,
    taps: Tensor,
    biases: Tensor | None,
    spans: Spans,
    states: States,
    parts: Callable[[Tensor, int, int, int], tuple[Tensor, Tensor, Tensor]],
    advance: Callable[[Tensor, tuple[Tensor, Tensor, Tensor], slice], Tensor],
) -> Tensor:
    """What all tokens of `spans` find, as `gated_delta` says, by some rule.

    biases: [channels], of the convolution; parts: queries, keys and values of what comes out of that, as `split` has them; advance:
    what some tokens of a sequence find, by its memory, which becomes that behind them; by their parts; and by where they are.
    """
    heads, key_size, value_size = states.memories.shape[1:]
    result = mixed.new_zeros(len(mixed), heads, value_size)
    slots = spans.slots.tolist()
    for piece, found in convolved(mixed, taps, biases, spans, states):
        features = functional.silu(found, inplace=True).to(mixed.dtype).float()
        queries, keys, values = parts(features, heads, key_size, value_size)
        for place, slot in enumerate(slots[piece.first : piece.first + piece.count]):
            start = piece.start + place * piece.length
            own = slice(start + piece.begin, start + piece.end)
            # A view of the memory: to gather and scatter all takes longer than what is done with them.
            memory = states.memories[slot] if piece.sure else states.memories[slot].clone()
            result[own] = advance(memory, (queries[place], keys[place], values[place]), own).transpose(0, 1)
    return result


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of neighbouring spans of the same length that go together."""

    first: int  # span
    count: int  # spans
    start: int  # the first one's first token
    length: int  # of each span
    begin: int  # of each span from this token ...
    end: int  # ... to that
    sure: bool  # their states go on; guesses, which all of a span are in one piece, leave them as they are

    def rows(self, whole: Tensor) -> Tensor:
        """Of numbers of all tokens these, a view [spans, tokens, size]."""
        own = whole[self.start : self.start + self.count * self.length]
        return own.view(self.count, self.length, -1)[:, self.begin : self.end]


def convolved(mixed: Tensor, taps: Tensor, biases: Tensor | None, spans: Spans, states: States) -> Iterator[tuple[Piece, Tensor]]:
    """What comes out of the convolution, piece by piece: [spans, tokens, channels] float32. Windows become those behind all that is
    sure; of sequences that begin memories become zero."""
    factors = taps.t().contiguous().float()
    for slot, fresh in zip(spans.slots.tolist(), spans.fresh.tolist(), strict=True):
        if fresh or not slot:
            states.windows[slot] = 0.0
            states.memories[slot] = 0.0
    for piece in _pieces(spans.lengths, spans.sure.tolist()):
        own = spans.slots[piece.first : piece.first + piece.count]
        yield piece, _convolved(piece.rows(mixed), factors, biases, states.windows, own, piece.sure)


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


def _convolved(rows: Tensor, factors: Tensor, biases: Tensor | None, windows: Tensor, slots: Tensor, sure: bool) -> Tensor:
    """Of rows [spans, tokens, channels]; factors: [width, channels] float32."""
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
    """As `split` has them, queries and keys by their lengths."""
    both, values = split(features, heads, key_size, value_size)
    scale = both.square().sum(-1, keepdim=True).add_(LENGTH_EPSILON).rsqrt_()
    scale[:, :, 0] *= key_size**-0.5
    return *each_head(both * scale, heads), values


def split(features: Tensor, heads: int, key_size: int, value_size: int) -> tuple[Tensor, Tensor]:
    """Of [spans, tokens, channels]: [spans, tokens, queries and keys, key heads, key size], [spans, value heads, tokens, size]."""
    spans, tokens, channels = features.shape
    both, values = features.split_with_sizes((channels - heads * value_size, heads * value_size), 2)
    return both.view(spans, tokens, 2, -1, key_size), values.view(spans, tokens, heads, value_size).transpose(1, 2)


def each_head(both: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Queries and keys of all value heads, [spans, heads, tokens, size] each."""
    queries, keys = both.repeat_interleave(heads // both.shape[3], 3).transpose(1, 3).unbind(2)
    return queries, keys


def advanced(memory: Tensor, queries: Tensor, keys: Tensor, values: Tensor, fading: Tensor, strong: Tensor | None = None) -> Tensor:
    """What some tokens of a sequence find, [heads, tokens, value size]; `memory` becomes that behind them.

    strong, fading: [heads, tokens, 1], how far values take the place of what is under their keys, and by which power of e all
    fades before that; without `strong` they are added to it.

    Token by token is how rules are written, but it reads and writes the memory for each. What tokens put into the memory in the
    place of something depends on what those before them of the same chunk have put there, by a triangular matrix: solving it gives
    all at once (Yang et al. 2024, arXiv:2406.06484). What is added depends on nothing (Dao and Gu 2024, arXiv:2405.21060).
    """
    if keys.shape[1] == 1:
        memory *= _kept(fading)
        changes = values if strong is None else strong * (values - keys @ memory)
        memory.baddbmm_(keys.transpose(1, 2), changes)
        return queries @ memory
    # Whole fading in 64 bits: of two large sums a small difference may be wanted.
    faded = fading.double().cumsum(1)  # [heads, tokens, 1], of what was there before the chunk
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


def advanced_by_features(memory: Tensor, queries: Tensor, keys: Tensor, values: Tensor, fading: Tensor, strong: Tensor) -> Tensor:
    """The same where each feature of a key fades by itself, [heads, tokens, key size]: a few tokens at once."""
    parts = zip(*(torch.split(part, FEW, 1) for part in (queries, keys, values, fading, strong)), strict=True)
    return torch.cat([_advanced_few(memory, *part) for part in parts], 1)


def _advanced_few(memory: Tensor, queries: Tensor, keys: Tensor, values: Tensor, fading: Tensor, strong: Tensor) -> Tensor:
    if keys.shape[1] == 1:
        memory *= _kept(fading).transpose(1, 2)
        memory.baddbmm_(keys.transpose(1, 2), strong * (values - keys @ memory))
        return queries @ memory
    faded = fading.double().clamp_(min=FARTHEST).cumsum(1)
    left, risen = _kept(faded), (keys * (-faded).exp()).transpose(1, 2)
    among, between = ((part * faded.exp() @ risen).tril_().float() for part in (keys, queries))
    changes = strong * (values - (keys * left) @ memory)
    changes = torch.linalg.solve_triangular(among.mul_(strong), changes, upper=False, unitriangular=True)
    found = ((queries * left) @ memory).baddbmm_(between, changes)
    memory *= left[:, -1:].transpose(1, 2)
    memory.baddbmm_((keys * _kept(faded[:, -1:] - faded)).transpose(1, 2), changes)
    return found


def _kept(fading: Tensor) -> Tensor:
    """exp(fading), or 0 where that is too little to be seen: a CPU takes many times as long for numbers that have fewer bits."""
    return torch.threshold_(fading.exp().float(), 1e-20, 0.0)


def gated_norm(x: Tensor, gates: Tensor, gains: Tensor, epsilon: float, before: bool = False, sigmoid: bool = False) -> Tensor:
    """`reference.rms_norm` of x times silu(gates), which is computed in float32, or times their sigmoid. before: of that product
    the norm, instead. x, gates: [rows, size] or [tokens, heads, size]; gains: [size], or [heads, size]; all of one type, the
    result's."""
    if triton_for(x):
        from .fused_gated_delta import gated_norm as fused

        return fused(x, gates, gains, epsilon, before, sigmoid, torch.empty(x.shape, dtype=x.dtype, device=x.device))
    factors: Tensor = gates.float().sigmoid() if sigmoid else functional.silu(gates.float())
    if before:
        gated = factors.mul_(x)
        return scaled(gated, gated.square().mean(-1, keepdim=True), gains, epsilon)
    return factors.mul_(reference.rms_norm(x, gains, epsilon)).to(x.dtype)


def scaled(x: Tensor, squares: Tensor, gains: Tensor, epsilon: float) -> Tensor:
    """The norm of x [..., size] in float32, which is overwritten, by the mean of its squares; in the type of gains."""
    return x.mul_(squares.add_(epsilon).rsqrt_()).to(gains.dtype).mul_(gains)
