"""MLA prefill in the expanded (multi-head) form, in plain torch: for long chunks of a prompt, cached latents are up-projected to
each head's keys and values, as the authors of MLA compute prompts (DeepSeek-AI 2024, arXiv:2405.04434). `expanded_attention` does
the same by Triton. Decode and short chunks use the absorbed form, which attends to the latents themselves.

For a query, a key and a head the absorbed form takes latent + turned multiplications for the logit and latent for the value; the
expanded form takes plain + turned and values, 3.4 times fewer in DeepSeek's models. To expand a latent takes latent * (plain +
values) for a head, however many queries see it; each query saves as much, as in the absorbed form it is projected to the size of a
latent, and its output back from there. So expansion pays where queries are many for the context before them: see `worthwhile`.

Expanded keys and values lie in scratch memory, for as many heads at once as there is room for, and are not cached.
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

# Fewest queries of a row that is expanded. CPU ms in absorbed and expanded form, `benchmarks/latents.py`, 2026-11-27, Xeon-amx, one
# thread, float32: 32 queries 5.4 and 6.0, 64 9.0 and 8.9, 128 20.3 and 14.8. Accelerators need more work before kernel launches
# are negligible; theirs is an estimate that has not been measured.
MIN_QUERIES = 64
MIN_QUERIES_TRITON = 256
# How many times the multiplications that attention saves must outweigh those that expand the context. On a context of 2,048 tokens
# 128 queries take 168 and 206 ms, 192 take 263 and 232; in bfloat16, on 4,096, 192 take 155 and 129. By arithmetic the break-even
# is at 171 queries. On accelerators an estimate, on the safe side: their tiles for latents are small.
MARGIN = 1.0
# Bytes of expanded keys and values at once, unless a single head's of a long context are more. With more they don't stay in the
# CPU's caches (2,048 queries on 2,000: 1.75 s with 4 and with 32 MiB, 2.2 with 256), with less there are too few heads for many
# threads.
SCRATCH = 32 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """Expanded rows that are computed together: one row by torch, several by Triton."""

    start: int  # their first token in the step
    stop: int  # and the one after their last
    slots: Tensor  # [keys] int64: cache slots of their latents, row by row
    heads: int  # heads that are expanded at once
    plan: "paged.Plan | None"  # attention plan over keys in that order; None: one row, by torch


@dataclass(frozen=True, slots=True)
class Plan:
    """The attention plan of a step in which some rows are computed in the expanded form."""

    first: int  # number of tokens of the other rows, which stand first
    others: "shared_prefixes.Plan | batch_invariant.Plan | paged.Plan | None"  # plan of the other rows; None: there are none
    parts: Sequence[Part]


def worthwhile(row: Row, expansion: Expansion, by_triton: bool) -> bool:
    """Whether the row is to be expanded: a causal chain whose page table is final, with enough queries."""
    if row.parents is not None or row.whole or row.settled is not None:
        return False
    pairs = row.queries * row.context + row.queries * (row.queries + 1) // 2
    each = expansion.plain + expansion.values
    saved, spent = pairs * (2 * expansion.latent - each), row.context * expansion.latent * each
    return row.queries >= (MIN_QUERIES_TRITON if by_triton else MIN_QUERIES) and saved > MARGIN * spent


def rows_to_expand(rows: Sequence[Row], layout: AttentionLayout) -> list[int]:
    """The rows of a step that are to be expanded."""
    by_triton = triton_on(layout.device)
    # Page tables that aren't final (beams) are known to the device only. torch returns log-sum-exps, needed below, on CPUs only.
    unable = any(row.settled is not None for row in rows) or not (by_triton or layout.device.type == "cpu")
    if layout.expansion is None or unable:
        return []
    return [i for i, row in enumerate(rows) if worthwhile(row, layout.expansion, by_triton)]


def heads_at_once(expansion: Expansion, keys: int, width: int, room: int) -> int:
    """Heads that are expanded at once: the largest divisor of all heads that fits into `room` bytes, or 1. width: bytes of one key
    and value of a head."""
    counts = (count for count in range(expansion.heads, 0, -1) if expansion.heads % count == 0)
    return next((count for count in counts if count * keys * width <= room), 1)


def scratch_bytes(expansion: Expansion, total: int, dtype: torch.dtype) -> int:
    """The most bytes of scratch that expansion takes in sequences of up to `total` tokens, a copy of their latents included."""
    width = 2 * size_of(expansion) * dtype.itemsize
    return most_bytes(expansion, total, width, SCRATCH) + total * dtype.itemsize * (expansion.latent + expansion.turned)


def most_bytes(expansion: Expansion, keys: int, width: int, room: int) -> int:
    """The most bytes that expanded keys and values take at once, for up to `keys` keys: with fewer, more heads may be expanded at
    once."""
    return min(expansion.heads * keys * width, max(room, keys * width))


def size_of(expansion: Expansion) -> int:
    """Features of expanded keys and values for torch's attention, which on CPUs needs both sizes to be equal: zeros pad one of
    them."""
    return max(expansion.plain + expansion.turned, expansion.values)


def plan(rows: Sequence[Row], layout: AttentionLayout, first: int) -> list[Part]:
    """The parts of rows that are to be expanded, which stand one after the other from token `first` on: one part per row."""
    assert layout.expansion is not None
    expansion, parts = layout.expansion, []
    for row in rows:
        slots = to_device(torch.from_numpy(plain.slots_of([row], layout.page_size)[0]), layout.device)
        heads = heads_at_once(expansion, len(slots), 2 * size_of(expansion) * layout.dtype.itemsize, SCRATCH)
        parts.append(Part(first, first + row.queries, slots, heads, None))
        first += row.queries
    return parts


Attend: TypeAlias = Callable[[Tensor, Tensor, Part, float, Tensor, Tensor, Tensor], None]


def attention(
    query: Tensor, cache: Tensor, plan: Plan, how: AttentionOptions, to_keys: Tensor, to_values: Tensor, attend: Attend
) -> Tensor:
    """Softmax attention of the rows that are expanded: [tokens, heads, values].

    query: [tokens, heads, plain + turned], of these rows; cache: a layer of latents, [slots, 1, 1, latent + turned], this step's
    included; to_keys, to_values: the up-projections, [heads, plain, latent] and [heads, latent, values]; attend: `attend` below, or
    `expanded_attention.attend`.
    """
    found = query.new_empty(*query.shape[:2], to_values.shape[2])
    for part in plan.parts:
        latents = plain.gather(cache, part.slots, 1, query.dtype, None)[0][0, 0]  # [keys, latent + turned]
        own = slice(part.start - plan.first, part.stop - plan.first)
        attend(query[own], latents, part, how.scale, to_keys, to_values, found[own])
    return found


def attend(query: Tensor, latents: Tensor, part: Part, scale: float, to_keys: Tensor, to_values: Tensor, out: Tensor) -> None:
    """Attention of a part, which is one row. latents: [keys, latent + turned]; out: the part's result of `attention`."""
    count, latent = part.heads, to_keys.shape[2]
    own, made, asked = to_keys.shape[1], to_values.shape[2], query.shape[2]
    size = max(asked, made)
    keys, values = latents.new_zeros(2, 1, count, len(latents), size)
    keys[0, :, :, own:asked] = latents[:, latent:]
    spread = functional.pad(query, (0, size - asked)).transpose(0, 1).unsqueeze(0)  # [1, heads, queries, size]
    for first in range(0, query.shape[1], count):
        # One head at a time: torch's batched products of many heads copy an operand or the result. Measured 2026-11-27 on Xeon-amx,
        # 4 heads' keys of 4,096 latents: 1.9 ms instead of 3.1 in bfloat16, 11.7 instead of 16.1 in float32.
        for place, head in enumerate(range(first, first + count)):
            torch.mm(latents[:, :latent], to_keys[head].t(), out=keys[0, place, :, :own])
            torch.mm(latents[:, :latent], to_values[head], out=values[0, place, :, :made])
        some = slice(first, first + count)
        out[:, some] = _causal(spread[:, some], keys, values, scale)[0, :, :, :made].transpose(0, 1)


def _causal(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention, where the queries' own keys are the last ones. All [1, heads, tokens, size].

    Attention to the context and, causally, to the queries' own keys is computed separately and merged by log-sum-exp: so torch
    needs no mask, and takes many queries at once. Measured on the same machine, 2 heads, 4,096 queries: 22 ms instead of 58 in
    tiles of 64 with masks in bfloat16, 94 instead of 121 in float32.
    """
    context = keys.shape[2] - query.shape[2]
    attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found, weight = attended(query, keys[:, :, context:], values[:, :, context:], is_causal=True, scale=scale)
    if not context:
        return found  # type: ignore[no-any-return]
    before, other = attended(query, keys[:, :, :context], values[:, :, :context], scale=scale)
    both = torch.logaddexp(weight, other)
    return found * (weight - both).exp().unsqueeze(3) + before * (other - both).exp().unsqueeze(3)  # type: ignore[no-any-return]
