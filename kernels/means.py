"""Pooled index keys of Qwen 4 Exp: a key for each pool of consecutive tokens, counted from a sequence's beginning, by which an
indexer chooses the whole pool for sparse attention (see `indexed`). Knows tensors only.

A pool's key is the mean of its tokens' keys, RMS-normalized, and rotated as its first token's would be. It overwrites its last
token's own key: a pool's score is computed as one of that token, and who sees that token sees the pool. Pages hold whole pools, so
that the other tokens of one are found by slots alone.
"""

from torch import Tensor

from . import reference
from .dispatch import triton_for
from .operations import write
from .pools import members_of


def write_means(keys: Tensor, gains: Tensor, table: Tensor, slots: Tensor, cache: Tensor, members: int, epsilon: float) -> None:
    """Writes a step's index keys to the cache, and the keys of the pools of `members` tokens that these tokens complete.

    keys: [tokens, size], perhaps columns of something wider; gains: [size] float32; table: [tokens, 2, 1, size], of
    `reference.rotary_table`, for the position of the first token of each one's pool; slots: [tokens], distinct, those of a sequence
    in its order; where negative (padding) nothing is written; cache: [slots, 1, 1, size], dense.
    """
    if triton_for(keys):
        from .fused_means import write_means as fused

        return fused(keys, gains, table, slots, cache, members, epsilon)
    write(slots, keys.contiguous(), cache)
    ending = ((slots >= 0) & (slots % members == members - 1)).nonzero().flatten()
    if not len(ending):
        return None
    ends = slots[ending]
    means = members_of(cache, ends, members).mean(1).to(keys.dtype)
    found = reference.rms_norm(means, gains, epsilon).to(keys.dtype)
    reference.rotate(found.unsqueeze(1), table[ending])
    write(ends, found, cache)
    return None
