"""What layers are told of a token's n-grams (Qwen 4 Exp): which rows of tables these stand for, how far streams open themselves to
what is looked up, and the convolution behind that. Knows tensors only.

On a CPU by torch; on an accelerator by `fused_ngrams`.
"""

import torch
from torch import Tensor
from torch.nn import functional

from . import reference
from .dispatch import triton_for
from .gated_delta import convolved
from .hashes import Hashes
from .reference import by_lanes
from .spans import Spans, States

LEAST = 1e-6  # of what streams are opened by, before its root is taken


def rows_of(tokens: Tensor, before: Tensor, spans: Spans, hashes: Hashes) -> Tensor:
    """Rows of the layers' tables: [layers, tokens, heads of all lengths].

    tokens: [tokens]; before: [spans, most - 1], what is before each span, `hashes.end` where nothing is. Of tokens behind the last
    span the result is some rows that there are.
    """
    if triton_for(tokens):
        from .fused_ngrams import rows_of as fused

        return fused(tokens, before, spans, hashes)
    every = torch.arange(len(tokens), device=tokens.device)
    own = torch.searchsorted(spans.starts[1:], every, right=True).clamp_(max=len(before) - 1)  # the span of each
    place, count = every - spans.starts[own], before.shape[1]
    found = [tokens]
    for back in range(1, count + 1):
        within = tokens[(every - back).clamp_(min=0)]
        token = torch.where(place >= back, within, before[own, (count - back + place).clamp_(max=count - 1)])
        # Behind an end of a text there is nothing of what was before it.
        found.append(torch.where(found[-1] == hashes.end, hashes.end, token) if back > 1 else token)
    mixed, rows = found[0] * hashes.multipliers[:, :1], list[Tensor]()
    for back, sizes, offsets in zip(range(1, count + 1), hashes.sizes.unbind(1), hashes.offsets.unbind(1), strict=True):
        mixed = mixed ^ (found[back] * hashes.multipliers[:, back, None])
        rows.append(mixed.unsqueeze(2) % sizes.unsqueeze(1) + offsets.unsqueeze(1))
    return torch.cat(rows, 2)


def opened(joint: Tensor, streams: Tensor, gains: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """What each stream takes of a value, [tokens, count * hidden], and the norm of that, stream by stream.

    joint: [tokens, (count + 1) * hidden], a key for each stream, and the value of all; streams: [tokens, count, hidden]; gains:
    [3, count, hidden] float32, of norms of keys, of streams, and of what these take. All dense.
    """
    if triton_for(joint):
        from .fused_ngrams import opened as fused

        return fused(joint, streams, gains, epsilon, LEAST)
    tokens, count, hidden = streams.shape
    keys, value = joint[:, : count * hidden].view(tokens, count, hidden), joint[:, count * hidden :].view(tokens, 1, hidden)
    products = reference.rms_norm(keys, gains[0], epsilon).float() * reference.rms_norm(streams, gains[1], epsilon)
    found = products.sum(2, keepdim=True) * hidden**-0.5
    found = found.abs().clamp_(min=LEAST).sqrt_().mul_(found.sign())
    taken = (torch.sigmoid(found) * value).to(joint.dtype)
    return taken.flatten(1), reference.rms_norm(taken, gains[2], epsilon).flatten(1)


def take(streams: Tensor, taken: Tensor, normal: Tensor, taps: Tensor, apart: int, spans: Spans, states: States) -> None:
    """Adds to streams, [tokens, count, hidden], what they have taken, and what a convolution of its norm comes to, through silu.
    Windows in `states` go on, in place.

    taken, normal: of `opened`; taps: [channels, reach + 1], the last for the token itself, of which but each one `apart` places
    from it is 0.
    """
    if triton_for(streams):
        from .fused_ngrams import take as fused

        known = spans.starts, spans.slots, spans.fresh, spans.sure, states.windows
        return fused(streams, taken, normal, taps, apart, *known, max(spans.lengths))
    whole = streams.view(len(streams), -1)
    for piece, found in convolved(normal, taps, None, spans, states):
        sums = piece.rows(whole)
        sums += (by_lanes(functional.silu, found) + piece.rows(taken)).to(sums.dtype)
    return None
