"""Linear attention by the gated delta rule, over ragged spans of tokens (Yang et al. 2024, arXiv:2412.06464).

A head has a memory, a matrix [key size, value size], which is zero before a sequence's first token. Each token lets it fade, takes
out what it holds under the token's key, and puts the token's value there instead, by the strength of a gate:

    memory = exp(rate * softplus(fade + offset)) * memory
    memory = memory + key^T * sigmoid(strength) * (value - key * memory)
    output = query * memory

Queries, keys and values come out of a convolution over the last few tokens, each channel by itself, through silu; queries and keys
are divided by their lengths, queries by the root of their number of features as well.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """Of one layer: what sequences remember, by slot. Slot 0 is nobody's."""

    windows: Tensor  # [slots, width - 1, channels] in the model's type: what last came into the convolution, the oldest first
    memories: Tensor  # [slots, value heads, key size, value size] float32


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Of a step's tokens, which lie one span after the other; behind the last there may be padding."""

    lengths: tuple[int, ...]  # tokens of each, none is 0
    starts: Tensor  # [spans + 1] int64: where each begins, and where the last ends
    slots: Tensor  # [spans] int64: of their sequences' states; no two have the same, but those of padding have 0
    fresh: Tensor  # [spans] int64: 1: begins its sequence, so whatever is in the slot is no state of it
