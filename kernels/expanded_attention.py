"""Attention of a prompt's long chunks to expanded latents, by Triton: what `expanded` is in plain torch. No GPU has run it yet.

Scratch is a cache of pages: rows side by side, of a slot the keys of some heads, their values, and behind these what all keys have
in common. So `paged_attention` needs not know where they come from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy
import torch
from torch import Tensor

from . import paged_attention as paged
from .attention import AttentionOptions, Row, slots_of
from .expanded import FEWEST_BY_TRITON, Part, most_bytes, together
from .layout import AttentionLayout, Expansion, LayerKind
from .transfer import to_device

PAGE = 128  # keys of a page of scratch: a tile lies in one
SCRATCH = 256 << 20  # bytes of expanded keys and values at once; one head's may be more, of a long context


def apart(expansion: Expansion) -> bool:
    """What all keys have in common is multiplied by itself, where that spares half of a product: those are of powers of 2."""
    own, whole = max(expansion.plain, expansion.values), max(expansion.plain + expansion.turned, expansion.values)
    return (own - 1).bit_length() < (whole - 1).bit_length()


def size_of(expansion: Expansion) -> int:
    """Of a value, and of a key but for what stands apart: the same, so one of them may end with zeros."""
    return max(expansion.plain + (0 if apart(expansion) else expansion.turned), expansion.values)


def width_of(expansion: Expansion) -> int:
    """Numbers of a head's key and value."""
    return 2 * size_of(expansion)


def most_keys(expansion: Expansion, dtype: torch.dtype) -> int:
    """Of rows that are computed together: there is room for them with all heads."""
    return SCRATCH // (width_of(expansion) * dtype.itemsize * expansion.heads)


def scratch_bytes(expansion: Expansion, tokens: int, total: int, dtype: torch.dtype) -> int:
    """The most that it takes in a step of so many tokens, in sequences of up to `total`, with a copy of their latents."""
    rows = max(1, tokens // FEWEST_BY_TRITON)
    keys = max(total, min(rows * total, most_keys(expansion, dtype))) + rows * PAGE
    width = width_of(expansion) * dtype.itemsize
    beside = keys * dtype.itemsize * (expansion.latent + 2 * expansion.turned)
    return most_bytes(expansion, keys, width, SCRATCH) + beside


def kind_of(expansion: Expansion, heads: int) -> LayerKind:
    """Of so many of them."""
    turned = expansion.turned if apart(expansion) else 0
    return LayerKind(0, heads, 1, size_of(expansion) + turned, turned=turned)


def plan(rows: Sequence[Row], layout: AttentionLayout, first: int) -> list[Part]:
    """As `expanded.plan`: as many rows together as there is room for with all heads."""
    assert layout.expansion is not None
    expansion, parts = layout.expansion, []
    width = width_of(expansion) * layout.dtype.itemsize
    for some in _fitting(rows, most_keys(expansion, layout.dtype)):
        slots = numpy.concatenate([_slots(row, layout.page_size) for row in some])
        heads = together(expansion, len(slots), width, SCRATCH)
        kind, queries = kind_of(expansion, heads), sum(row.queries for row in some)
        own = paged.plan(_laid(some), PAGE, [kind], layout.device, dtype=layout.dtype, share=False)
        parts.append(Part(first, first + queries, to_device(torch.from_numpy(slots), layout.device), heads, own))
        first += queries
    return parts


def _fitting(rows: Sequence[Row], room: int) -> Iterator[Sequence[Row]]:
    """Rows side by side with so many keys all together; a longer one is by itself."""
    begin = keys = 0
    for i, row in enumerate(rows):
        own = -(-(row.context + row.queries) // PAGE) * PAGE
        if i > begin and keys + own > room:
            yield rows[begin:i]
            begin, keys = i, 0
        keys += own
    yield rows[begin:]


def _slots(row: Row, page_size: int) -> "numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]":
    """Of its keys, and any up to the end of its last page of scratch."""
    own = slots_of([row], page_size)[0]
    return numpy.pad(own, (0, -len(own) % PAGE), mode="edge")


def _laid(rows: Sequence[Row]) -> list[Row]:
    """The same on pages of scratch, one row behind the other."""
    result, begin = [], 0
    for row in rows:
        end = begin + -(-(row.context + row.queries) // PAGE)
        result.append(replace(row, pages=range(begin, end)))
        begin = end
    return result


def attend(query: Tensor, latents: Tensor, part: Part, scale: float, to_keys: Tensor, to_values: Tensor, out: Tensor) -> None:
    """As `expanded.attend`, of any number of rows."""
    plan, count = part.plan, part.heads
    assert plan is not None
    kind, (own, latent), made = plan.launches[0].kind, to_keys.shape[1:], to_values.shape[2]
    size, shared = kind.size - kind.turned, latents[:, latent:]
    width = 2 * count * size
    whole = own == made == size  # else some of it stays zero
    scratch = (latents.new_empty if whole else latents.new_zeros)(len(latents), width + kind.turned)
    cache = scratch[:, :width].view(-1, 2, count, size)
    if kind.turned:
        scratch[:, width:] = shared
    else:
        cache[:, 0, :, own : own + shared.shape[1]] = shared.unsqueeze(1)
    asked, how = _asked(query, own, kind), AttentionOptions(0, scale, turned=kind.turned)
    keys, values = (held.transpose(0, 1) for held in (cache[:, 0, :, :own], cache[:, 1, :, :made]))
    made_of = latents[:, :latent].expand(count, -1, -1)
    for head in range(0, query.shape[1], count):
        some = slice(head, head + count)
        torch.bmm(made_of, to_keys[some].transpose(1, 2), out=keys)
        torch.bmm(made_of, to_values[some], out=values)
        out[:, some] = paged.attention(asked[:, some], cache, plan, how)[..., :made]


def _asked(query: Tensor, own: int, kind: LayerKind) -> Tensor:
    """Queries with zeros where keys have some: behind what is made of latents, or behind all."""
    lacking = kind.size - query.shape[2]
    if not lacking:
        return query
    before = own if kind.turned else query.shape[2]
    zeros = query.new_zeros(*query.shape[:2], lacking)
    return torch.cat((query[..., :before], zeros, query[..., before:]), 2)
