"""What a part of a layer sees of a token's residual streams where each of their features has a gate, and what each stream gets of
what the part comes to (Qwen 4 Exp). Knows tensors only.

Streams are normalized, each by itself. A matrix makes a few features of all of them, and another one of these gates for all, which
go through a sigmoid; what is seen is the mean of what they let through. What is given follows from the same norms.

On a CPU by torch; on an accelerator a launch before the products and one behind them (`fused_gated_hyper_connections`).
"""

import torch
from torch import Tensor

from . import reference
from .dispatch import triton_for
from .reference import by_lanes


def spread(streams: Tensor, more: Tensor | None, given: Tensor | None, gains: Tensor, epsilon: float) -> Tensor:
    """The norms of all streams, side by side: [tokens, count * hidden].

    streams: [tokens, count, hidden], to which more [tokens, hidden], what the last part came to, is added first, in place, by the
    shares that it gives, [tokens, count] float32; without either nothing is. gains: [count, hidden] float32. All dense.
    """
    if triton_for(streams):
        from .fused_gated_hyper_connections import spread as fused

        return fused(streams, more, given, gains, epsilon)
    if more is not None and given is not None:
        streams.copy_(streams.float() + given.unsqueeze(2) * more.float().unsqueeze(1))
    return reference.rms_norm(streams, gains, epsilon).flatten(1)


def gathered(normal: Tensor, gates: Tensor, giving: Tensor | None, count: int) -> tuple[Tensor, Tensor | None]:
    """What is seen, [tokens, hidden], and what is given, [tokens, count] float32.

    normal: of `spread`; gates: [tokens, count * hidden], before their sigmoid; giving: [tokens, count], likewise, perhaps columns
    of something wider; None: nothing is given. What is given is up to 2.
    """
    if triton_for(normal):
        from .fused_gated_hyper_connections import gathered as fused

        return fused(normal, gates, giving, count)
    seen = (by_lanes(torch.sigmoid, gates.float()) * normal).view(len(normal), count, -1).mean(1).to(normal.dtype)
    return seen, None if giving is None else torch.sigmoid(giving.float()).mul_(2)
