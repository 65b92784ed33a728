"""Linear attention by the gated delta rule, over ragged spans of tokens (Yang et al. 2024, arXiv:2412.06464).

A head has a memory, a matrix [key size, value size], which is zero before a sequence's first token. Each token lets it fade, takes
out what it holds under the token's key, and puts the token's value there instead, by the strength of a gate:

    memory = exp(rate * softplus(fade + offset)) * memory
    memory = memory + key^T * sigmoid(strength) * (value - key * memory)
    output = query * memory

Queries, keys and values come out of a convolution over the last few tokens, each channel by itself, through silu; queries and keys
are divided by their lengths, queries by the root of their number of features as well.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from . import reference
from .choose import triton_for


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """Of one layer: what sequences remember, by slot. Slot 0 is nobody's."""

    windows: Tensor  # [slots, width - 1, channels] in the model's type: what last came into the convolution, the oldest first
    memories: Tensor  # [slots, value heads, key size, value size] float32


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Of a step's tokens, which lie one span after the other; behind the last there may be padding."""

    lengths: tuple[int, ...]  # tokens of each, none is 0
    starts: Tensor  # [spans + 1] int64: where each begins, and where the last ends
    slots: Tensor  # [spans] int64: of their sequences' states; no two have the same, but those of padding have 0
    fresh: Tensor  # [spans] int64: 1: begins its sequence, so whatever is in the slot is no state of it


LENGTH_EPSILON = 1e-6  # added to squared lengths of queries and keys
CHUNK = 64  # tokens whose changes of a memory are found together


def gated_delta(
    mixed: Tensor,
    strengths: Tensor,
    fades: Tensor,
    taps: Tensor,
    rates: Tensor,
    offsets: Tensor,
    spans: Spans,
    states: States,
) -> Tensor:
    """What the tokens of `spans` find, [tokens, value heads, value size] in mixed's type; `states` of their slots go on, in place.

    mixed: [tokens, channels], what goes into the convolution: all heads' queries, then keys, then values; of key heads each serves
    as many value heads, one after the other; strengths, fades: [tokens, value heads]; these three may be columns of something
    wider; taps: [channels, width], the last for the token itself; rates, offsets: [value heads] float32, rates are negative.

    What comes out of the convolution is rounded to mixed's type; all behind it is float32. Of tokens behind the last span the
    result is 0, and what slot 0 holds is never looked at.
    """
    if triton_for(mixed):
        from .fused_gated_delta import gated_delta as fused

        inputs = mixed, strengths, fades, taps, rates, offsets
        out = torch.empty(len(mixed), *states.memories.shape[1::2], dtype=mixed.dtype, device=mixed.device)
        known = spans.starts, spans.slots, spans.fresh, states.windows, states.memories
        return fused(*inputs, *known, LENGTH_EPSILON, out)
    forgotten = spans.slots[(spans.fresh != 0) | (spans.slots == 0)]
    states.windows.index_fill_(0, forgotten, 0.0)
    states.memories.index_fill_(0, forgotten, 0.0)
    heads, key_size, value_size = states.memories.shape[1:]
    features = _convolved(mixed, taps, spans, states.windows).float()
    both, values = features[:, : -heads * value_size], features[:, -heads * value_size :]
    both = both.view(len(mixed), 2, -1, key_size)
    both = both * both.square().sum(-1, keepdim=True).add_(LENGTH_EPSILON).rsqrt_()
    queries, keys = both.repeat_interleave(heads // both.shape[2], 2).transpose(0, 2).unbind(1)  # [heads, tokens, key size]
    queries = queries * key_size**-0.5
    values = values.view(-1, heads, value_size).transpose(0, 1)
    strong = strengths.float().sigmoid().t().unsqueeze(2)  # [heads, tokens, 1]
    fading = (rates * functional.softplus(fades.float() + offsets)).t().unsqueeze(2)
    result = mixed.new_zeros(len(mixed), heads, value_size)
    start = 0
    for slot, length in zip(spans.slots.tolist(), spans.lengths, strict=True):
        memory = states.memories[slot]  # a view: to gather and scatter those of all spans takes longer than what is done with them
        for first in range(start, start + length, CHUNK):
            own = slice(first, min(first + CHUNK, start + length))
            found = _advanced(memory, queries[:, own], keys[:, own], values[:, own], strong[:, own], fading[:, own])
            result[own] = found.transpose(0, 1)
        start += length
    return result


def _convolved(mixed: Tensor, taps: Tensor, spans: Spans, windows: Tensor) -> Tensor:
    """[tokens, channels] in mixed's type, undefined behind the last span. Spans of equal lengths go together."""
    width, result = taps.shape[1], torch.zeros_like(mixed)
    factors = taps.t().float()
    lengths = torch.tensor(spans.lengths, device=mixed.device)
    for length in sorted(set(spans.lengths)):
        [which] = torch.where(lengths == length)
        slots = spans.slots[which]
        rows = spans.starts[which, None] + torch.arange(length, device=mixed.device)
        seen = torch.cat((windows[slots], mixed[rows]), 1)
        windows.index_copy_(0, slots, seen[:, length:])
        seen = seen.float()
        total = seen[:, :length] * factors[0]
        for place in range(1, width):
            total.addcmul_(seen[:, place : place + length], factors[place])
        result[rows] = functional.silu(total).to(mixed.dtype)
    return result


def _advanced(memory: Tensor, queries: Tensor, keys: Tensor, values: Tensor, strong: Tensor, fading: Tensor) -> Tensor:
    """What some tokens of a sequence find, [heads, tokens, value size]; `memory` becomes that behind them.

    Token by token is how the rule is written, but it reads and writes the memory for each. What tokens put into the memory
    depends on what those before them of the same chunk have put there, by a triangular matrix: solving it gives all at once (Yang
    et al. 2024, arXiv:2406.06484).
    """
    if keys.shape[1] == 1:
        memory *= _kept(fading)
        memory.baddbmm_(keys.transpose(1, 2), strong * (values - keys @ memory))
        return queries @ memory
    # Whole fading in 64 bits: of two large sums a small difference may be wanted.
    faded = fading.double().cumsum(1)  # [heads, tokens, 1], of what was there before the chunk
    between = _kept((faded - faded.transpose(1, 2)).clamp_(max=0.0))  # [heads, tokens, earlier tokens]
    left = _kept(faded)
    changes = strong * (values - left * (keys @ memory))
    among = (keys @ keys.transpose(1, 2)).mul_(between).mul_(strong)
    changes = torch.linalg.solve_triangular(among, changes, upper=False, unitriangular=True)
    found = (queries @ memory).mul_(left)
    found.baddbmm_((queries @ keys.transpose(1, 2)).mul_(between).tril_(), changes)
    memory *= left[:, -1:]
    memory.baddbmm_((keys * _kept(faded[:, -1:] - faded)).transpose(1, 2), changes)
    return found


def _kept(fading: Tensor) -> Tensor:
    """exp(fading), or 0 where that is too little to be seen: a CPU takes many times as long for numbers that have fewer bits."""
    return torch.threshold_(fading.exp().float(), 1e-20, 0.0)


def gated_norm(x: Tensor, gates: Tensor, gains: Tensor, epsilon: float) -> Tensor:
    """`reference.rms_norm` of x times silu(gates), which is computed in float32. x, gates: [rows, size] or [tokens, heads, size];
    gains: [size]; all of one type, the result's."""
    if triton_for(x):
        from .fused_gated_delta import gated_norm as fused

        return fused(x, gates, gains, epsilon, torch.empty(x.shape, dtype=x.dtype, device=x.device))
    factors: Tensor = functional.silu(gates.float())
    return factors.mul_(reference.rms_norm(x, gains, epsilon)).to(x.dtype)
