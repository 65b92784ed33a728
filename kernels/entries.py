"""Entries, each of which stands for so many tokens in a row, from a sequence's beginning on (DeepSeek V4). Knows tensors only.

An entry is a mean of its tokens' features, which softmaxes of their gates weigh, feature by feature. It may be one of two series
of them: the first of its own tokens, and the other of as many before these, which belong to the entry before it. Behind a norm its
last features turn, as those of a key at its first token's position. It stands where its last token's first series was, of which no
other entry is made: who sees that token sees the entry, and guesses that are refused leave nothing behind.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import triton_for
from .operations import write
from .partial_rotary import turn
from .reference import rms_norm


@dataclass(frozen=True, slots=True)
class Ends:
    """A step's tokens by which entries end."""

    # [ends, rate or 2 * rate] int64: slots of the tokens of each, with those before them or not; -1: there are none
    members: Tensor
    firsts: Tensor  # [ends] int64: positions of the first of its own


@dataclass(frozen=True, slots=True)
class Making:
    """What entries of some size are made by."""

    first: int  # where in a slot the first series stands: what is weighed, then gates, and then the other series alike
    places: Tensor  # [series, rate, size] float32: what is added to gates by a token's place among as many
    gains: Tensor  # [size], of the norm
    epsilon: float

    @property
    def size(self) -> int:
        """Features of an entry."""
        return len(self.gains)


def write_series(slots: Tensor, rows: Tensor, cache: Tensor) -> None:
    """Of a step's tokens. rows: [tokens, features]; slots: [tokens], distinct; cache: that part of a layer's slots, [slots, 1, 1,
    features]. On an accelerator by torch, where no slot may be negative: steps with entries are not padded."""
    if triton_for(rows):
        cache.flatten(1).index_copy_(0, slots, rows)
    else:
        write(slots, rows, cache)


def write_entries(cache: Tensor, ends: Ends, making: Making, table: Tensor) -> None:
    """Of tokens whose series are in the cache. cache: a layer, [slots, 1, 1, width]; table: of `reference.rotary_table`, of each
    entry's position."""
    if not len(ends.members):
        return None
    if triton_for(cache):
        from .fused_entries import write_entries as fused

        return fused(cache, ends.members, making.first, making.places, making.gains, making.epsilon, table)
    series, rate, size = making.places.shape
    parts = [_read(cache, ends.members[:, -rate:], making, 0)]
    if series > 1:
        parts.append(_read(cache, ends.members[:, :rate], making, 1))
    values, gates = (torch.cat(both, 1) for both in zip(*parts, strict=True))
    found = (gates.softmax(1) * values).sum(1).to(cache.dtype)
    normal = rms_norm(found, making.gains, making.epsilon).unsqueeze(1)
    turn(normal, table)
    write(ends.members[:, -1], normal.squeeze(1), cache[..., making.first : making.first + size])
    return None


def _read(cache: Tensor, members: Tensor, making: Making, series: int) -> tuple[Tensor, Tensor]:
    """What is weighed, and by what: [ends, rate, size] float32."""
    first = making.first + 2 * making.size * series
    rows = cache.flatten(1)[:, first : first + 2 * making.size][members.clamp(min=0)].float()
    gates = rows[..., making.size :] + making.places[series]
    return rows[..., : making.size], gates.masked_fill_((members < 0).unsqueeze(2), -torch.inf)
