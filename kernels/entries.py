"""Compressed KV entries of DeepSeek V4: one entry for each `rate` consecutive tokens, counted from a sequence's beginning. Knows
tensors only.

An entry is an average of its tokens' features, weighted feature by feature by the softmax of their gates. It may be made of two
series of them: the first of its own tokens, and the second of as many tokens before these, which belong to the previous entry.
After an RMS norm its last features are rotated, as those of a key at its first token's position. It is stored where its last
token's first series was, of which no other entry is made: who sees that token sees the entry, and rejected draft tokens leave
nothing behind.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import triton_for
from .operations import write
from .partial_rotary import rotate_last
from .reference import rms_norm


@dataclass(frozen=True, slots=True)
class CompletedEntries:
    """The compressed entries that a step's tokens complete."""

    # [ends, rate or 2 * rate] int64: slots of the tokens of each entry, with those before its own or without; -1: there is none
    members: Tensor
    firsts: Tensor  # [ends] int64: position of the first of an entry's own tokens


@dataclass(frozen=True, slots=True)
class EntryParameters:
    """The parameters by which entries of one size are made from their tokens."""

    first: int  # offset of the first series within a slot: values, then gates, then the other series alike
    places: Tensor  # [series, rate, size] float32: added to gates by a token's place among those of its entry
    gains: Tensor  # [size], gains of the norm
    epsilon: float

    @property
    def size(self) -> int:
        """Number of features of an entry."""
        return len(self.gains)


def write_series(slots: Tensor, rows: Tensor, cache: Tensor) -> None:
    """Writes the series (values and gates) of a step's tokens. rows: [tokens, features]; slots: [tokens], distinct; cache: that
    part of a layer's slots, [slots, 1, 1, features]. On an accelerator by torch, where no slot may be negative: steps with entries
    are not padded."""
    if triton_for(rows):
        cache.flatten(1).index_copy_(0, slots, rows)
    else:
        write(slots, rows, cache)


def write_entries(cache: Tensor, ends: CompletedEntries, making: EntryParameters, table: Tensor) -> None:
    """Writes the entries that a step completes, from series that are in the cache already. cache: a layer, [slots, 1, 1, width];
    table: of `reference.rotary_table`, for each entry's position."""
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
    rotate_last(normal, table)
    write(ends.members[:, -1], normal.squeeze(1), cache[..., making.first : making.first + size])
    return None


def _read(cache: Tensor, members: Tensor, making: EntryParameters, series: int) -> tuple[Tensor, Tensor]:
    """Values and gates of one series of each entry, two tensors [ends, rate, size] float32; gates of missing tokens are -inf."""
    first = making.first + 2 * making.size * series
    rows = cache.flatten(1)[:, first : first + 2 * making.size][members.clamp(min=0)].float()
    gates = rows[..., making.size :] + making.places[series]
    return rows[..., : making.size], gates.masked_fill_((members < 0).unsqueeze(2), -torch.inf)
