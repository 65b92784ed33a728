"""Gated short causal convolutions over ragged spans of tokens: LFM2's (Liquid AI 2025, arXiv:2511.23404).

A depthwise convolution over the last few tokens, whose result is multiplied by a gate. A sequence's only state is a window of the
convolution's last inputs: `spans.RecurrentStates` with empty recurrent states.
"""

import torch
from torch import Tensor

from .dispatch import triton_for
from .gated_delta import causal_convolution
from .spans import RecurrentStates, Spans


def short_convolution(
    mixed: Tensor, gates: Tensor, taps: Tensor, biases: Tensor | None, spans: Spans, states: RecurrentStates
) -> Tensor:
    """gates times the convolution of mixed, [tokens, channels] in mixed's dtype; windows in `states` are updated in place.

    mixed: [tokens, channels], input of the convolution; gates: the same; both may be columns of something wider; taps: [channels,
    width], the last for the token itself; biases: [channels]. For tokens behind the last span the result is 0, and the content of
    slot 0 is never used.
    """
    if triton_for(mixed):
        from .fused_short_convolution import convolve

        return convolve(mixed, gates, taps, biases, spans, states.windows)
    result = mixed.new_zeros(mixed.shape)
    for piece, found in causal_convolution(mixed, taps, biases, spans, states):
        torch.mul(found.to(mixed.dtype), piece.rows(gates), out=piece.rows(result))
    return result
