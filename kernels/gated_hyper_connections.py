"""Gated hyper-connections of Qwen 4 Exp: each part of a layer reads the mean of a token's residual streams, each feature scaled by
a gate, and its output is added to each stream with a weight. Knows tensors only.

Each stream is RMS-normalized by itself. A low-rank pair of matrices makes the gates of all features from all streams, through a
sigmoid; the mean of the gated streams is the part's input. Write shares are computed from the same norms.

On a CPU by torch; on an accelerator a launch before the products and one behind them (`fused_gated_hyper_connections`).
"""

import torch
from torch import Tensor

from . import reference
from .dispatch import triton_for
from .reference import lane_invariant


def spread(streams: Tensor, more: Tensor | None, given: Tensor | None, gains: Tensor, epsilon: float) -> Tensor:
    """The RMS norms of all streams, side by side: [tokens, count * hidden].

    streams: [tokens, count, hidden], to which `more` [tokens, hidden], the output of the last part, is added first, in place, with
    its write shares `given`, [tokens, count] float32; nothing is added without either. gains: [count, hidden] float32. All dense.
    """
    if triton_for(streams):
        from .fused_gated_hyper_connections import spread as fused

        return fused(streams, more, given, gains, epsilon)
    if more is not None and given is not None:
        streams.copy_(streams.float() + given.unsqueeze(2) * more.float().unsqueeze(1))
    return reference.rms_norm(streams, gains, epsilon).flatten(1)


def gathered(normal: Tensor, gates: Tensor, giving: Tensor | None, count: int) -> tuple[Tensor, Tensor | None]:
    """The input of the next part, [tokens, hidden], and the write shares of its output, [tokens, count] float32.

    normal: of `spread`; gates: [tokens, count * hidden], before their sigmoid; giving: [tokens, count], logits of write shares,
    perhaps columns of something wider; None: there are none. Write shares are at most 2.
    """
    if triton_for(normal):
        from .fused_gated_hyper_connections import gathered as fused

        return fused(normal, gates, giving, count)
    seen = (lane_invariant(torch.sigmoid, gates.float()) * normal).view(len(normal), count, -1).mean(1).to(normal.dtype)
    return seen, None if giving is None else torch.sigmoid(giving.float()).mul_(2)
