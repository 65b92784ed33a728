"""Hashed n-gram embeddings of Qwen 4 Exp: which embedding table rows a token's n-grams map to, the gates with which residual
streams take up what is looked up, and the convolution behind that. Knows tensors only.

On a CPU by torch; on an accelerator by `fused_ngrams`.
"""

import torch
from torch import Tensor
from torch.nn import functional

from . import reference
from .dispatch import triton_for
from .gated_delta import causal_convolution
from .ngram_hashes import NgramHashes
from .reference import lane_invariant
from .spans import RecurrentStates, Spans

LEAST = 1e-6  # lower bound of a gate's logit before its square root is taken


def rows_of(tokens: Tensor, before: Tensor, spans: Spans, hashes: NgramHashes) -> Tensor:
    """Rows of the layers' embedding tables, by hashes of n-grams: [layers, tokens, heads of all n-gram lengths].

    tokens: [tokens]; before: [spans, most - 1], the tokens before each span, `hashes.end` where there are none. For padding behind
    the last span the result is arbitrary valid rows.
    """
    if triton_for(tokens):
        from .fused_ngrams import rows_of as fused

        return fused(tokens, before, spans, hashes)
    every = torch.arange(len(tokens), device=tokens.device)
    own = torch.searchsorted(spans.starts[1:], every, right=True).clamp_(max=len(before) - 1)  # the span of each token
    place, count = every - spans.starts[own], before.shape[1]
    found = [tokens]
    for back in range(1, count + 1):
        within = tokens[(every - back).clamp_(min=0)]
        token = torch.where(place >= back, within, before[own, (count - back + place).clamp_(max=count - 1)])
        # An end-of-text token hides all tokens before it.
        found.append(torch.where(found[-1] == hashes.end, hashes.end, token) if back > 1 else token)
    mixed, rows = found[0] * hashes.multipliers[:, :1], list[Tensor]()
    for back, sizes, offsets in zip(range(1, count + 1), hashes.sizes.unbind(1), hashes.offsets.unbind(1), strict=True):
        mixed = mixed ^ (found[back] * hashes.multipliers[:, back, None])
        rows.append(mixed.unsqueeze(2) % sizes.unsqueeze(1) + offsets.unsqueeze(1))
    return torch.cat(rows, 2)


def opened(joint: Tensor, streams: Tensor, gains: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """What each stream takes of the looked-up value through its gate, [tokens, count * hidden], and the RMS norm of that, stream by
    stream.

    joint: [tokens, (count + 1) * hidden], a key for each stream, and the value shared by all; streams: [tokens, count, hidden];
    gains: [3, count, hidden] float32, of the norms of keys, of streams, and of what these take. All dense.
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


def take(streams: Tensor, taken: Tensor, normal: Tensor, taps: Tensor, apart: int, spans: Spans, states: RecurrentStates) -> None:
    """Adds to streams, [tokens, count, hidden], what they have taken, and a causal convolution of its norm, through silu.
    Convolution windows in `states` are updated in place.

    taken, normal: from `opened`; taps: [channels, reach + 1], the last for the token itself; dilated: taps are 0 but for every
    `apart`-th from the last.
    """
    if triton_for(streams):
        from .fused_ngrams import take as fused

        return fused(streams, taken, normal, taps, apart, spans, states.windows)
    whole = streams.view(len(streams), -1)
    for piece, found in causal_convolution(normal, taps, None, spans, states):
        sums = piece.rows(whole)
        sums += (lane_invariant(functional.silu, found) + piece.rows(taken)).to(sums.dtype)
    return None
