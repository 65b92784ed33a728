"""The state space model of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060) as linear attention, over ragged spans of tokens.

As in `gated_delta` each head keeps a recurrent state, a matrix [key size, value size] that is zero before a sequence's first token.
Each token decays it and adds the token's value under its key; the time step sets both the decay and the size of the update:

    step = softplus(step + offset), within limits
    state = exp(rate * step) * state + key^T * step * value
    output = query * state + skip * value

In the paper queries are called C, keys B, values x, steps dt, rates A and skips D; groups are key heads. Queries, keys and values
come from a causal depthwise convolution with biases over the last few tokens, through silu.
"""

from torch import Tensor
from torch.nn import functional

from .dispatch import triton_for
from .gated_delta import advance_chunk, repeat_key_heads, run_recurrence, split
from .spans import RecurrentStates, Spans


def state_space(
    mixed: Tensor,
    steps: Tensor,
    taps: Tensor,
    biases: Tensor,
    rates: Tensor,
    offsets: Tensor,
    skips: Tensor,
    limits: tuple[float, float],
    spans: Spans,
    states: RecurrentStates,
) -> Tensor:
    """As `gated_delta.gated_delta`, with time steps [tokens, value heads], biases [channels] of the convolution, skips [value
    heads] float32, and limits: the least and the largest time step."""
    if triton_for(mixed):
        from .fused_chunked_delta import attend_in_chunks
        from .fused_gated_delta import Inputs

        inputs = Inputs(mixed, None, steps, taps, biases, rates, offsets, skips, 0.0, limits)
        return attend_in_chunks(inputs, spans, states)
    far = functional.softplus(steps.float() + offsets).clamp_(*limits).t().unsqueeze(2)  # [heads, tokens, 1]
    fading, skipping = rates[:, None, None] * far, skips[:, None, None]

    def advance(memory: Tensor, features: tuple[Tensor, Tensor, Tensor], own: slice) -> Tensor:
        queries, keys, values = features
        return advance_chunk(memory, queries, keys, far[:, own] * values, fading[:, own]).addcmul_(skipping, values)

    return run_recurrence(mixed, taps, biases, spans, states, _parts, advance)


def _parts(features: Tensor, heads: int, key_size: int, value_size: int) -> tuple[Tensor, Tensor, Tensor]:
    both, values = split(features, heads, key_size, value_size)
    return *repeat_key_heads(both, heads), values
