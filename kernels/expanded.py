"""Attention of a prompt's long chunks to latents that are expanded first, to keys and values of each head, as its authors compute
prompts (DeepSeek-AI 2024, arXiv:2405.04434); in plain torch. `expanded_attention` does the same by Triton.

To attend to latents as they are takes latent + turned and latent multiplications for a query, a key and a head; to a head's own
keys and values it takes plain + turned and values, 3.4 times fewer in DeepSeek's models. To expand a latent takes latent * (plain +
values) for a head, however many queries see it; and as much saves each query, which otherwise is brought to the size of a latent,
as is what it finds from there. So it pays where queries are many for the keys before them: see `pays`.

What is expanded lies in scratch, of as many heads at once as there is room for, and is forgotten. Heads know nothing of each other,
so nothing has to be merged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from . import attention as plain
from . import batch_invariant, shared_prefixes
from .attention import Block, How, Row
from .dispatch import triton_on
from .layout import Expansion, Kind, Layout

if TYPE_CHECKING:
    from . import paged_attention as paged

# Queries of a row that is expanded, at least. Measured 2026-11-27 on a shared Xeon, one thread, float32, DeepSeek V2 Lite's heads in
# two layers, ms by latents and expanded: 32 queries 6.4 and 6.8, 64 9.6 and 9.1, 128 21.1 and 16.9. Accelerators have more to do
# side by side before launches are nothing; a guess, since none has been asked.
FEWEST = 64
FEWEST_BY_TRITON = 256
# How many times the multiplications that are saved among keys must outweigh those that expand a context. There, behind 4,000 tokens:
# 128 queries 344 and 420, 192 491 and 455, 256 667 and 552; arithmetic says 171.
MARGIN = 1.0
# Bytes of expanded keys and values at once; one head's may be more, of a long context. There, 2,048 queries behind 2,000: 1,743 ms
# with 4 MiB, 1,748 with 32, 2,240 with 256, which no cache holds; two threads want more than 4.
SCRATCH = 32 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that are computed together."""

    start: int  # their first token in the step
    stop: int  # and the one after their last
    slots: Tensor  # [keys] int64: of their latents, row by row
    heads: int  # of which keys and values are there at once
    plan: "Block | paged.Plan"  # over keys in that order


@dataclass(frozen=True, slots=True)
class Plan:
    """A step in which some rows are expanded."""

    first: int  # tokens of the others, which stand first
    others: "shared_prefixes.Plan | batch_invariant.Plan | paged.Plan | None"  # None: there are none
    parts: Sequence[Part]


def pays(row: Row, expansion: Expansion, by_triton: bool) -> bool:
    """Whether it is to be expanded: a chain whose tables are known, with queries enough."""
    if row.parents is not None or row.whole or row.settled is not None:
        return False
    pairs = row.queries * row.context + row.queries * (row.queries + 1) // 2
    each = expansion.plain + expansion.values
    saved, spent = pairs * (2 * expansion.latent - each), row.context * expansion.latent * each
    return row.queries >= (FEWEST_BY_TRITON if by_triton else FEWEST) and saved > MARGIN * spent


def chosen(rows: Sequence[Row], layout: Layout) -> list[int]:
    """The rows of a step that are to be expanded."""
    if layout.expansion is None or any(row.settled is not None for row in rows):  # the device is told where tables of these are
        return []
    by_triton = triton_on(layout.device)
    return [i for i, row in enumerate(rows) if pays(row, layout.expansion, by_triton)]


def together(expansion: Expansion, keys: int, width: int, room: int) -> int:
    """Heads that are expanded at once: a divisor of all, the largest that has room. width: bytes of a head's key and value."""
    counts = (count for count in range(expansion.heads, 0, -1) if expansion.heads % count == 0)
    return next((count for count in counts if count * keys * width <= room), 1)


def scratch_bytes(expansion: Expansion, total: int, dtype: torch.dtype) -> int:
    """The most that it takes in sequences of up to so many tokens, with a copy of their latents."""
    width = 2 * size_of(expansion) * dtype.itemsize
    heads = together(expansion, total, width, SCRATCH)
    return total * (heads * width + dtype.itemsize * (expansion.latent + expansion.turned))


def size_of(expansion: Expansion) -> int:
    """Of keys and values, as torch attends to them: on CPUs it wants both to be equal, so one of them ends with zeros."""
    return max(expansion.plain + expansion.turned, expansion.values)


def plan(rows: Sequence[Row], layout: Layout, first: int) -> list[Part]:
    """Of rows that are to be expanded, which stand one after the other from token `first` on."""
    assert layout.expansion is not None
    expansion, parts, size = layout.expansion, [], size_of(layout.expansion)
    own = Layout(layout.page_size, (Kind(0, expansion.heads, 1, size),), layout.dtype, layout.device)
    for row in rows:
        [block] = plain.blocks([row], own, first)
        slots = block.views[0].slots
        heads = together(expansion, len(slots), 2 * size * layout.dtype.itemsize, SCRATCH)
        parts.append(Part(first, first + row.queries, slots, heads, block))
        first += row.queries
    return parts


Attend: TypeAlias = Callable[[Tensor, Tensor, Part, float, Tensor, Tensor, Tensor], None]


def attention(query: Tensor, cache: Tensor, plan: Plan, how: How, to_keys: Tensor, to_values: Tensor, attend: Attend) -> Tensor:
    """Softmax attention of the tokens that are expanded: [tokens, heads, values].

    query: [tokens, heads, plain + turned], theirs; cache: a layer of latents, [slots, 1, 1, latent + turned], this step's included;
    to_keys: [heads, plain, latent]; to_values: [heads, latent, values]; attend: as below, or by Triton.
    """
    found = query.new_empty(*query.shape[:2], to_values.shape[2])
    for part in plan.parts:
        latents = plain.gather(cache, part.slots, 1, query.dtype, None)[0][0, 0]  # [keys, latent + turned]
        own = slice(part.start - plan.first, part.stop - plan.first)
        attend(query[own], latents, part, how.scale, to_keys, to_values, found[own])
    return found


def expand(latents: Tensor, to_keys: Tensor, to_values: Tensor, keys: Tensor, values: Tensor) -> None:
    """Writes some heads' keys, but for what they have in common, and values: [heads, keys, plain], [heads, keys, values]."""
    latents = latents[:, : to_keys.shape[2]].expand(len(to_keys), -1, -1)
    torch.bmm(latents, to_keys.transpose(1, 2), out=keys)
    torch.bmm(latents, to_values, out=values)


def attend(query: Tensor, latents: Tensor, part: Part, scale: float, to_keys: Tensor, to_values: Tensor, out: Tensor) -> None:
    """A part of one row. out: as the result of `attention`."""
    assert isinstance(part.plan, Block)
    view, count, latent = part.plan.views[0], part.heads, to_keys.shape[2]
    own, made, asked = to_keys.shape[1], to_values.shape[2], query.shape[2]
    size = max(asked, made)
    keys, values = latents.new_zeros(2, 1, count, len(latents), size)
    keys[0, :, :, own:asked] = latents[:, latent:]
    spread = functional.pad(query, (0, size - asked)).transpose(0, 1).unsqueeze(0)  # [1, heads, queries, size]
    mask = view.mask.to(query.dtype) if view.mask is not None else None
    attended = partial(plain.torchs(query.device), scale=scale)
    for head in range(0, query.shape[1], count):
        some = slice(head, head + count)
        expand(latents, to_keys[some], to_values[some], keys[0, :, :, :own], values[0, :, :, :made])
        if view.tiled and mask is not None:
            found = plain.attend_tiles(attended, spread[:, some], keys, values, mask)
        else:
            found = attended(spread[:, some], keys, values, mask)
        out[:, some] = found[0, :, :, :made].transpose(0, 1)
