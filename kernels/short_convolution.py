"""Gated short convolutions, over ragged spans of tokens: LFM2's (Liquid AI 2025, arXiv:2511.23404).

A token sees what went into the convolution of a few tokens before it, each channel by itself, and the result goes through a gate.
Of a sequence nothing is remembered but a window of that: `spans.States` whose memories have no numbers.
"""

import torch
from torch import Tensor

from .dispatch import triton_for
from .gated_delta import convolved
from .spans import Spans, States


def short_convolution(mixed: Tensor, gates: Tensor, taps: Tensor, biases: Tensor | None, spans: Spans, states: States) -> Tensor:
    """gates times what comes out of the convolution, [tokens, channels] in mixed's type; windows in `states` go on, in place.

    mixed: [tokens, channels], what goes in; gates: the same; both may be columns of something wider; taps: [channels, width], the
    last for the token itself; biases: [channels]. Of tokens behind the last span the result is 0, and what slot 0 holds is never
    looked at.
    """
    if triton_for(mixed):
        from .fused_short_convolution import convolve

        out = torch.empty(mixed.shape, dtype=mixed.dtype, device=mixed.device)
        known = spans.starts, spans.slots, spans.fresh, spans.sure, states.windows
        return convolve(mixed, gates, taps, biases, *known, max(spans.lengths), out)
    result = mixed.new_zeros(mixed.shape)
    for piece, found in convolved(mixed, taps, biases, spans, states):
        torch.mul(found.to(mixed.dtype), piece.rows(gates), out=piece.rows(result))
    return result
