"""MLA prefill in the expanded (multi-head) form by Triton: what `expanded` is in plain torch. No GPU has run it yet.

Scratch is laid out as a paged KV cache: one row's keys after the other's, and in each slot the keys of some heads, their values,
and behind these, stored once, the rotary features that the keys of all heads share. So `paged_attention` reads it like any other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy
import torch
from torch import Tensor

from . import paged_attention as paged
from .attention import Array, AttentionOptions, Row, slots_of
from .expanded import MIN_QUERIES_TRITON, Part, Plan, attention, heads_at_once, most_bytes
from .layout import AttentionLayout, Expansion, LayerKind
from .transfer import to_device

PAGE = 128  # keys per page of scratch, so that each tile of keys lies in one page
SCRATCH = 256 << 20  # bytes of expanded keys and values at once, unless a single head's of a long context are more


def apart(expansion: Expansion) -> bool:
    """Whether the shared rotary features get a product of their own: where that halves the main one, whose size is padded to a
    power of two."""
    own, whole = max(expansion.plain, expansion.values), max(expansion.plain + expansion.turned, expansion.values)
    return (own - 1).bit_length() < (whole - 1).bit_length()


def size_of(expansion: Expansion) -> int:
    """Features of a value, and of a key without separate rotary features: equal, so zeros may pad one of them."""
    return max(expansion.plain + (0 if apart(expansion) else expansion.turned), expansion.values)


def width_of(expansion: Expansion) -> int:
    """Elements of a head's key and value together."""
    return 2 * size_of(expansion)


def most_keys(expansion: Expansion, dtype: torch.dtype) -> int:
    """The most keys of rows that are computed together: as many as `SCRATCH` has room for with all heads."""
    return SCRATCH // (width_of(expansion) * dtype.itemsize * expansion.heads)


def scratch_bytes(expansion: Expansion, tokens: int, total: int, dtype: torch.dtype) -> int:
    """The most bytes of scratch that expansion takes in a step of so many tokens, in sequences of up to `total`, a copy of their
    latents included."""
    rows = max(1, tokens // MIN_QUERIES_TRITON)
    keys = max(total, min(rows * total, most_keys(expansion, dtype))) + rows * PAGE
    width = width_of(expansion) * dtype.itemsize
    beside = keys * dtype.itemsize * (expansion.latent + 2 * expansion.turned)
    return most_bytes(expansion, keys, width, SCRATCH) + beside


def kind_of(expansion: Expansion, heads: int) -> LayerKind:
    """The kind of layer that so many expanded heads are for `paged_attention`."""
    turned = expansion.turned if apart(expansion) else 0
    return LayerKind(0, heads, 1, size_of(expansion) + turned, turned=turned)


def compile_for(layout: AttentionLayout, total: int) -> None:
    """Computes rows for each number of heads that sequences of up to `total` tokens are expanded for at once: each number has
    kernels of its own, whose compilation the first long context would wait for."""
    assert layout.expansion is not None
    own, keys = layout.expansion, MIN_QUERIES_TRITON
    few, many = paged.MANY_ENTRIES // 2, max(MIN_QUERIES_TRITON, paged.MANY_ENTRIES)  # queries: partials are merged in two ways
    shapes = (
        (layout.page_size, 1, 1, own.latent + own.turned),  # one page, that all contexts consist of
        (many, own.heads, own.plain + own.turned),
        (own.heads, own.plain, own.latent),
        (own.heads, own.latent, own.values),
    )
    cache, query, to_keys, to_values = (torch.zeros(shape, dtype=layout.dtype, device=layout.device) for shape in shapes)
    while keys <= total:
        for queries in (few, many):
            row = Row(queries, max(0, keys - queries), [0] * -(-max(keys, queries) // layout.page_size))
            [part] = plan([row], layout, 0)
            attention(query[:queries], cache, Plan(0, None, [part]), AttentionOptions(0, 1.0), to_keys, to_values, attend)
        if part.heads == 1:
            break
        # the fewest keys of which there is no room for so many heads
        keys = SCRATCH // (part.heads * width_of(own) * layout.dtype.itemsize) // PAGE * PAGE + 1


def plan(rows: Sequence[Row], layout: AttentionLayout, first: int) -> list[Part]:
    """As `expanded.plan`, but a part has as many rows as there is room for with all heads."""
    assert layout.expansion is not None
    expansion, parts = layout.expansion, []
    width = width_of(expansion) * layout.dtype.itemsize
    for some in _fitting(rows, most_keys(expansion, layout.dtype)):
        slots = numpy.concatenate([_slots(row, layout.page_size) for row in some])
        heads = heads_at_once(expansion, len(slots), width, SCRATCH)
        kind, queries = kind_of(expansion, heads), sum(row.queries for row in some)
        own = paged.plan(_laid(some), PAGE, [kind], layout.device, dtype=layout.dtype, share=False)
        parts.append(Part(first, first + queries, to_device(torch.from_numpy(slots), layout.device), heads, own))
        first += queries
    return parts


def _fitting(rows: Sequence[Row], room: int) -> Iterator[Sequence[Row]]:
    """Runs of neighbouring rows with at most `room` keys together, padded to pages; a longer row is alone."""
    begin = keys = 0
    for i, row in enumerate(rows):
        own = -(-(row.context + row.queries) // PAGE) * PAGE
        if i > begin and keys + own > room:
            yield rows[begin:i]
            begin, keys = i, 0
        keys += own
    yield rows[begin:]


def _slots(row: Row, page_size: int) -> Array:
    """Cache slots of the row's keys, the last one repeated up to the end of its last page of scratch."""
    own = slots_of([row], page_size)[0]
    return numpy.pad(own, (0, -len(own) % PAGE), mode="edge")


def _laid(rows: Sequence[Row]) -> list[Row]:
    """The rows with page tables of scratch, one row after the other."""
    result, begin = [], 0
    for row in rows:
        end = begin + -(-(row.context + row.queries) // PAGE)
        result.append(replace(row, pages=range(begin, end)))
        begin = end
    return result


def attend(query: Tensor, latents: Tensor, part: Part, scale: float, to_keys: Tensor, to_values: Tensor, out: Tensor) -> None:
    """As `expanded.attend`, for any number of rows."""
    plan, count = part.plan, part.heads
    assert plan is not None
    kind, (own, latent), made = plan.launches[0].kind, to_keys.shape[1:], to_values.shape[2]
    size, shared = kind.size - kind.turned, latents[:, latent:]
    width = 2 * count * size
    whole = kind.size - shared.shape[1] == own and made == size  # else the padding must be zero
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
    """Queries padded with zeros where keys are: before separate rotary features, or at the end."""
    lacking = kind.size - query.shape[2]
    if not lacking:
        return query
    before = own if kind.turned else query.shape[2]
    zeros = query.new_zeros(*query.shape[:2], lacking)
    return torch.cat((query[..., :before], zeros, query[..., before:]), 2)
