"""Inputs of a step that only the device knows, since the step before has just sampled them: tokens, and, in beam search, the pages
of the beams that are continued. Knows tensors and ints only.

One Triton launch each where `dispatch.triton_for` says so; the torch branch is the reference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from .dispatch import triton_for
from .paging import held
from .transfer import to_device

FIELDS = 8  # of an entry: see `Unknown`


@dataclass(frozen=True, slots=True)
class Unknown:
    """What is filled in, on the device.

    entries: [entries, FIELDS] int32, each with
        source      its row among what was sampled
        token       where its token goes, in the step's tokens
        pages       where its page table begins that is filled in, in the step's page tables
        first       where the tables of the beams it may continue begin, in `tables`
        count       pages that are filled in
        target      the page that takes over what is in the continued beam's last page; -1: it continues no beam
        filled      slots of that page that are taken over; the others are zeroed
        unused
    tables: int32, of each beam that may be continued: as many pages as are filled in, then its last page, or any if `filled` is 0.
    """

    entries: Tensor
    tables: Tensor
    beams: bool  # whether any entry continues a beam


def unknown(device: torch.device, entries: Sequence[Sequence[int]], tables: Sequence[int]) -> Unknown:
    """Of lists, by one copy to the device."""
    ints = numpy.fromiter(chain(*entries, tables), numpy.int32)
    given = to_device(torch.from_numpy(ints), device)
    size = len(entries) * FIELDS
    return Unknown(given[:size].view(-1, FIELDS), given[size:], any(entry[5] >= 0 for entry in entries))


def unknown_tokens(device: torch.device, sources: NDArray[numpy.int64], tokens: NDArray[numpy.int64]) -> Unknown:
    """The same where no beams are continued, of each entry's `source` and `token`."""
    entries = numpy.zeros((len(tokens), FIELDS), numpy.int32)
    entries[:, 0], entries[:, 1], entries[:, 5] = sources, tokens, -1
    given = to_device(torch.from_numpy(entries), device)
    return Unknown(given, given[:0].view(-1), False)


def fill(tokens: Tensor, pages: Tensor | None, wanted: Unknown, picked: Tensor, parents: Tensor | None) -> None:
    """Fills in tokens, and page tables of beams. Where no token could be sampled it is 0: the result is thrown away.

    tokens: [tokens] int64; pages: int32, None: there are no beams; picked: [rows] int64, -1: none could be sampled; parents: [rows]
    int64, index of the beam that each row continues.
    """
    if triton_for(tokens):
        from .fused_lookahead import fill as fused

        fused(tokens, pages if wanted.beams else None, wanted.entries, wanted.tables, picked, parents)
        return
    source, token, place, first, count, *_ = wanted.entries.long().unbind(1)
    tokens.index_copy_(0, token, picked.index_select(0, source).clamp_(min=0))
    if pages is not None and parents is not None:
        begins = (first + parents[source] * (count + 1)).tolist()
        for to, begin, size in zip(place.tolist(), begins, count.tolist(), strict=True):
            pages[to : to + size] = wanted.tables[begin : begin + size]


def inherit(pages: Tensor, wanted: Unknown, parents: Tensor) -> None:
    """Copies what is in the last pages of the beams that are continued, in every layer, and zeroes the rest of the targets.

    pages: [layers, pages, page_size, width], dense but for the layers. Targets are distinct and no sources.
    """
    if triton_for(pages):
        from .fused_lookahead import inherit as fused

        fused(pages, wanted.entries, wanted.tables, parents)
        return
    source, _, _, first, count, target, filled, _ = wanted.entries.long().unbind(1)
    lasts, tables, part = (first + parents[source] * (count + 1) + count).tolist(), wanted.tables.tolist(), held(pages)
    for last, to, size in zip(lasts, target.tolist(), filled.tolist(), strict=True):
        if to >= 0:
            part[:, to, :size] = part[:, tables[last], :size]
            part[:, to, size:] = 0
