"""The inputs of layers with recurrent state (linear attention, state spaces, short convolutions): the spans of tokens in a step,
and the states of sequences. Knows no update rule."""

from dataclasses import dataclass

from torch import Tensor

# Fewest tokens of a span that accelerators compute chunk by chunk. An estimate that no GPU has measured: recurrently each token
# takes about a microsecond; a chunk of 32 takes two, and three more kernel launches with their first loads take 20.
CHUNKED_FROM = 64


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentStates:
    """One layer's recurrent states of all sequences, by slot. Slot 0 belongs to no sequence: it is that of padding."""

    windows: Tensor  # [slots, width - 1, channels] in the model's dtype: the last inputs of the causal convolution, oldest first
    memories: Tensor  # [slots, value heads, key size, value size] float32: the recurrent states


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """The spans of a step: consecutive new tokens of one sequence each, one span after the other. Padding may follow the last."""

    lengths: tuple[int, ...]  # tokens of each span, none is 0
    starts: Tensor  # [spans + 1] int64: the first token of each span, and the end of the last
    slots: Tensor  # [spans] int64: state slots of their sequences; all different, but padding has 0
    fresh: Tensor  # [spans] int64: 1: the span begins its sequence, so the slot's contents are to be ignored
    sure: Tensor  # [spans] int64: tokens that update the state, 1 or more; those after them are drafts, whose updates are dropped
