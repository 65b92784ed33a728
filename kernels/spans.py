"""What layers that remember something of sequences are told of a step's, and where they keep it. Knows no rule by which they do."""

from dataclasses import dataclass

from torch import Tensor

# Tokens of a span from which on accelerators take it by chunks. An estimate that no GPU has measured: token by token each takes
# about a microsecond; by chunks 32 take two, and three more launches with their first loads 20.
LONG = 64


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
    sure: Tensor  # [spans] int64: how many of its tokens states go on by, 1 or more; those behind are guesses, which states forget
