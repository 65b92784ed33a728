"""Attention of a prompt's long chunks to latents that are expanded first, to keys and values of each head, as its authors compute
prompts (DeepSeek-AI 2024, arXiv:2405.04434); in plain torch. `expanded_attention` does the same by Triton.

To attend to latents as they are takes latent + turned and latent multiplications for a query, a key and a head; to a head's own
keys and values it takes plain + turned and values, 3.4 times fewer in DeepSeek's models. To expand a latent takes latent * (plain +
values) for a head, however many queries see it; and as much saves each query, which otherwise is brought to the size of a latent,
as is what it finds from there. So it pays where queries are many for the keys before them: see `pays`.

What is expanded lies in scratch, of as many heads at once as there is room for, and is forgotten.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from . import attention as plain
from . import batch_invariant, shared_prefixes
from .attention import AttentionOptions, Row
from .dispatch import triton_on
from .layout import AttentionLayout, Expansion
from .transfer import to_device

if TYPE_CHECKING:
    from . import paged_attention as paged

# Queries of a row that is expanded, at least. CPU ms by latents and expanded, `benchmarks/latents.py`, 2026-11-27, Xeon-amx, one
# thread, float32: 32 queries 5.4 and 6.0, 64 9.0 and 8.9, 128 20.3 and 14.8. Accelerators have more to do at once before launches
# are nothing; a guess, since none has been asked.
FEWEST = 64
FEWEST_BY_TRITON = 256
# How many times the multiplications that are saved among keys must outweigh those that expand a context. Behind 2,048 tokens 128
# queries take 168 and 206 ms, 192 263 and 232; in bfloat16, behind 4,096, 192 take 155 and 129. Arithmetic says 171. On
# accelerators a guess, which is on the safe side: their tiles of latents are small.
MARGIN = 1.0
# Bytes of expanded keys and values at once; one head's may be more, of a long context. More leave the caches (2,048 queries behind
# 2,000: 1.75 s with 4 and with 32 MiB, 2.2 with 256), less are too few heads for many threads.
SCRATCH = 32 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that are computed together."""

    start: int  # their first token in the step
    stop: int  # and the one after their last
    slots: Tensor  # [keys] int64: of their latents, row by row
    heads: int  # of which keys and values are there at once
    plan: "paged.Plan | None"  # over keys in that order; None: of one row, by torch


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


def chosen(rows: Sequence[Row], layout: AttentionLayout) -> list[int]:
    """The rows of a step that are to be expanded."""
    by_triton = triton_on(layout.device)
    # The device is told where tables of some are; and torch tells the sums that are wanted below on CPUs only.
    unable = any(row.settled is not None for row in rows) or not (by_triton or layout.device.type == "cpu")
    if layout.expansion is None or unable:
        return []
    return [i for i, row in enumerate(rows) if pays(row, layout.expansion, by_triton)]


def together(expansion: Expansion, keys: int, width: int, room: int) -> int:
    """Heads that are expanded at once: a divisor of all, the largest that has room. width: bytes of a head's key and value."""
    counts = (count for count in range(expansion.heads, 0, -1) if expansion.heads % count == 0)
    return next((count for count in counts if count * keys * width <= room), 1)


def scratch_bytes(expansion: Expansion, total: int, dtype: torch.dtype) -> int:
    """The most that it takes in sequences of up to so many tokens, with a copy of their latents."""
    width = 2 * size_of(expansion) * dtype.itemsize
    return most_bytes(expansion, total, width, SCRATCH) + total * dtype.itemsize * (expansion.latent + expansion.turned)


def most_bytes(expansion: Expansion, keys: int, width: int, room: int) -> int:
    """The most that expanded keys and values take at once, of so many keys or fewer, of which there may be more heads."""
    return min(expansion.heads * keys * width, max(room, keys * width))


def size_of(expansion: Expansion) -> int:
    """Of keys and values, as torch attends to them: on CPUs it wants both to be equal, so one of them ends with zeros."""
    return max(expansion.plain + expansion.turned, expansion.values)


def plan(rows: Sequence[Row], layout: AttentionLayout, first: int) -> list[Part]:
    """Of rows that are to be expanded, which stand one after the other from token `first` on."""
    assert layout.expansion is not None
    expansion, parts = layout.expansion, []
    for row in rows:
        slots = to_device(torch.from_numpy(plain.slots_of([row], layout.page_size)[0]), layout.device)
        heads = together(expansion, len(slots), 2 * size_of(expansion) * layout.dtype.itemsize, SCRATCH)
        parts.append(Part(first, first + row.queries, slots, heads, None))
        first += row.queries
    return parts


Attend: TypeAlias = Callable[[Tensor, Tensor, Part, float, Tensor, Tensor, Tensor], None]


def attention(
    query: Tensor, cache: Tensor, plan: Plan, how: AttentionOptions, to_keys: Tensor, to_values: Tensor, attend: Attend
) -> Tensor:
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


def attend(query: Tensor, latents: Tensor, part: Part, scale: float, to_keys: Tensor, to_values: Tensor, out: Tensor) -> None:
    """A part of one row. out: as the result of `attention`."""
    count, latent = part.heads, to_keys.shape[2]
    own, made, asked = to_keys.shape[1], to_values.shape[2], query.shape[2]
    size = max(asked, made)
    keys, values = latents.new_zeros(2, 1, count, len(latents), size)
    keys[0, :, :, own:asked] = latents[:, latent:]
    spread = functional.pad(query, (0, size - asked)).transpose(0, 1).unsqueeze(0)  # [1, heads, queries, size]
    for first in range(0, query.shape[1], count):
        # One by one: torch's products of many heads at once copy what they multiply, or what they find. Measured 2026-11-27 on
        # Xeon-amx, 4 heads' keys of 4,096 latents: 1.9 ms instead of 3.1 in bfloat16, 11.7 instead of 16.1 in float32.
        for place, head in enumerate(range(first, first + count)):
            torch.mm(latents[:, :latent], to_keys[head].t(), out=keys[0, place, :, :own])
            torch.mm(latents[:, :latent], to_values[head], out=values[0, place, :, :made])
        some = slice(first, first + count)
        out[:, some] = _causal(spread[:, some], keys, values, scale)[0, :, :, :made].transpose(0, 1)


def _causal(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Queries see all keys before theirs, which are the last ones. All [1, heads, tokens, size].

    What they find before all of theirs and among these is merged by log-sum-exp: so torch needs no mask, and may take many queries
    at once. Measured there, 2 heads, 4,096 queries: 22 ms instead of 58 in tiles of 64 with masks in bfloat16, 94 instead of 121 in
    float32.
    """
    context = keys.shape[2] - query.shape[2]
    attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found, weight = attended(query, keys[:, :, context:], values[:, :, context:], is_causal=True, scale=scale)
    if not context:
        return found  # type: ignore[no-any-return]
    before, other = attended(query, keys[:, :, :context], values[:, :, :context], scale=scale)
    both = torch.logaddexp(weight, other)
    return found * (weight - both).exp().unsqueeze(3) + before * (other - both).exp().unsqueeze(3)  # type: ignore[no-any-return]
