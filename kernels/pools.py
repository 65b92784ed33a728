"""Pooled index keys of GLM 5 Next: a key for each pool of consecutive tokens, counted from a sequence's beginning, by which an
indexer chooses the whole pool for sparse attention (see `indexed`). Knows tensors only.

A pool's key is an average of its tokens' keys, weighted feature by feature by the softmax of their gates. It overwrites its last
token's own key: a pool's score is computed as one of that token, and who sees that token sees the pool. Pages hold whole pools, so
that the other tokens of one are found by slots alone.
"""

import torch
from torch import Tensor

from .dispatch import triton_for
from .operations import write
from .reference import lane_invariant


def write_pools(keys: Tensor, gates: Tensor, places: Tensor, slots: Tensor, cache: Tensor) -> None:
    """Writes a step's keys and gates to the cache, and the keys of the pools that these tokens complete.

    keys, gates: [tokens, size]; places: [pool, size] float32, added to gates by a token's place in its pool; slots: [tokens],
    distinct, those of a sequence in its order; where negative (padding) nothing is written; cache: the part of a layer behind the
    latents, [slots, 1, 1, 2 * size], keys first.
    """
    if triton_for(keys):
        from .fused_pools import write_pools as fused

        return fused(keys, gates, places, slots, cache)
    pool, size = places.shape
    write(slots, torch.cat((keys, gates), 1), cache)
    ends = slots[(slots >= 0) & (slots % pool == pool - 1)]
    if not len(ends):
        return None
    own, opening = members_of(cache, ends, pool).view(len(ends), pool, 2, size).unbind(2)
    opening = opening + places
    weights = lane_invariant(torch.exp, opening - opening.amax(1, keepdim=True))
    found = (weights * own).sum(1) / weights.sum(1)
    write(ends, found.to(keys.dtype), cache[..., :size])
    return None


def members_of(cache: Tensor, ends: Tensor, count: int) -> Tensor:
    """Contents of the `count` slots that end with each of `ends`, itself included: [ends, count, features] float32."""
    slots = (ends.unsqueeze(1) + torch.arange(1 - count, 1, device=ends.device)).flatten()
    held = cache.flatten(1).view(torch.uint8 if cache.dtype.itemsize == 1 else cache.dtype)  # torch cannot index 8-bit floats
    return held[slots].view(cache.dtype).float().view(len(ends), count, -1)
