"""Partial rotary embedding for DeepSeek V4: only the last features of each head are rotated. Keys double as values there, so the
attention output is rotated back. Knows tensors only.

Features that are rotated as a pair are half of those features apart. By torch on a CPU, on an accelerator one launch each
(`fused_partial_rotary`).
"""

import torch
from torch import Tensor

from . import reference
from .dispatch import triton_for
from .operations import write


def rotate_last(x: Tensor, table: Tensor, epsilon: float = 0.0, back: bool = False) -> None:
    """Rotates the last features of each head, in place, as many as the table has; before that, an RMS norm of the head, without
    gains.

    x: [tokens, heads, size], dense; table: of `reference.rotary_table`; epsilon: of the norm; 0: no norm; back: rotates by the
    negative angles.
    """
    if triton_for(x):
        from .fused_partial_rotary import rotate_last as fused

        return fused(x, table, epsilon, back)
    if epsilon:
        wide = x.float()
        x.copy_(wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt())
    if back:
        table = torch.stack((table[:, 0], -table[:, 1]), 1)
    reference.rotate(x[..., x.shape[2] - table.shape[3] :], table)
    return None


def write_keys(keys: Tensor, gains: Tensor, table: Tensor, slots: Tensor, cache: Tensor, epsilon: float) -> None:
    """The RMS norm of keys, with gains, their rotation, and the write to the cache.

    keys: [tokens, size]; gains: [size]; slots: [tokens], distinct; where negative (padding) nothing is written; cache: the first
    part of a layer's slots, [slots, 1, 1, size].
    """
    if triton_for(keys):
        from .fused_partial_rotary import write_keys as fused

        return fused(keys, gains, table, slots, cache, epsilon)
    normal = reference.rms_norm(keys, gains, epsilon).unsqueeze(1)
    rotate_last(normal, table)
    write(slots, normal.squeeze(1), cache)
    return None
