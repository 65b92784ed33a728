"""Sparse attention to the tokens that an indexer has chosen, in Triton: the accelerator's counterpart of `indexed`.

Scores are computed by the items of the dense plan, which look at all keys, and torch picks the top-k. Each query token then becomes
a row of its own over pages of one token each: the chosen ones. Steps in which no token sees more than it may attend to need none of
this. Where pools are chosen, pages are pools, and the incomplete one comes last. Where blocks are chosen, each key head has rows of
its own, over the pages that these blocks consist of, which must be whole ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy
import torch
from torch import Tensor

from . import paged_attention as paged
from . import work_list
from .attention import AttentionOptions, Row
from .indexed import BlockSelection, TokenSelection
from .layout import AttentionLayout
from .transfer import to_device

# Scores that are computed at once, and how many bytes each takes with the top-k selection.
SCORES = 1 << 25
SCORE_BYTES = 12
CHOSEN_BYTES = 4  # bytes per chosen token
# Most tokens that are attended at once: a table of their chosen ones takes 8 MiB.
TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive tokens of a step that choose and attend at once."""

    first: int
    length: int  # keys of the token that sees most, rounded up to a whole block
    tables: Tensor  # [tokens, 1] int64: where each one's page table begins among the step's
    plan: paged.Plan  # attention to the chosen; its tables have room for `most` tokens each, and every layer writes them

    @property
    def tokens(self) -> slice:
        """These tokens among the step's."""
        return slice(self.first, self.first + len(self.tables))


@dataclass(frozen=True, slots=True)
class Plan(paged.Plan):
    """The plan of a step in which some tokens see more than they may attend to."""

    parts: tuple[Part, ...]

    def pages_of(self, part: Part, places: Tensor) -> Tensor:
        """Pages at entries `places` of their tokens' page tables; arbitrary ones for entries beyond the end."""
        return self.pages[(part.tables + places).clamp_(max=len(self.pages) - 1)]


def plan(whole: paged.Plan, rows: Sequence[Row], layout: AttentionLayout) -> Plan:
    """The sparse plan of a step. whole: its dense plan, for layers without windows."""
    most, own_kind = layout.most, whole.launches[0].kind
    block = layout.block or max(1, layout.members)
    device, page_size = whole.buffer.device, whole.page_size
    widths = numpy.array([work_list.width(row, page_size) for row in rows])
    queries = [row.queries for row in rows]
    offsets = numpy.repeat(widths.cumsum() - widths, queries)
    positions = work_list.positions_of(rows)
    # The last of its blocks may be incomplete.
    seen = numpy.where(positions < most, positions + 1, most - block + positions % block + 1)
    if layout.members:  # the chosen pools are complete, and one more, incomplete, may follow
        seen = numpy.where(positions < most, positions + 1, most + (positions + 1) % block)
    lengths = numpy.repeat([row.context + row.queries for row in rows], queries)
    kind, size = (replace(own_kind, kv_heads=1), page_size) if layout.block else (own_kind, block)
    count = max(1, min(TOKENS, SCORES // int(lengths.max())))
    parts, alike = [], dict[bytes, paged.Plan]()  # most parts of a long prompt are alike: their tokens all see as many as they may
    for first in range(0, len(seen), count):
        own = slice(first, first + count)
        shown = seen[own].tobytes()
        if shown not in alike:
            alike[shown] = paged.plan_single_tokens(
                seen[own], most // size + (layout.members > 0), kind, device, layout.dtype, size
            )
        tables = to_device(torch.from_numpy(offsets[own]), device).unsqueeze(1)
        longest = max(most, int(lengths[own].max()))
        parts.append(Part(first, -(-longest // block) * block, tables, alike[shown]))
    return Plan(**{field.name: getattr(whole, field.name) for field in fields(whole)}, parts=tuple(parts))


def attention(query: Tensor, cache: Tensor, plan: Plan, how: AttentionOptions) -> Tensor:
    """As `paged_attention.attention`, sparse: over a cache of latents with the indexer's keys behind them, or for heads that choose
    blocks or pools."""
    if isinstance(how.asked, BlockSelection):
        return _by_blocks(query, cache, plan, how, how.asked)
    asked = how.asked
    assert asked is not None
    found = query.new_empty(*query.shape[:2], how.latent or query.shape[2]) if len(plan.parts) > 1 else None
    for part in plan.parts:
        own = part.plan.chosen(_chosen(asked, asked.held(cache, query.shape[2]), plan, part))
        answer = paged.attention(query[part.tokens], cache, own, how)
        if found is None:
            return answer
        found[part.tokens] = answer  # part by part: all parts' outputs and the whole would take twice the memory
        del answer
    assert found is not None
    return found


def _chosen(asked: TokenSelection, keys: Tensor, plan: Plan, part: Part) -> Tensor:
    """Slots, or pools, that the part's tokens attend to, int32."""
    from .fused_index import scores

    if part.first not in asked.chosen:
        found = scores(asked, keys, plan, part.first, len(part.tables), part.length)
        # For a token that sees fewer, the last ones are arbitrary, and nobody looks at them.
        best = asked.best(found, plan.positions[part.tokens, None])
        asked.chosen[part.first] = (_slots(best * asked.members, plan, part) // asked.members).int().flatten()
    return asked.chosen[part.first]


def _slots(places: Tensor, plan: Plan, part: Part) -> Tensor:
    """Cache slots of these positions of their tokens' rows."""
    return plan.pages_of(part, places // plan.page_size) * plan.page_size + places % plan.page_size


def _by_blocks(query: Tensor, cache: Tensor, plan: Plan, how: AttentionOptions, asked: BlockSelection) -> Tensor:
    """Attention where each key head chooses blocks: head by head, since each has its own pages, and several ranks have few each."""
    found, ratio = torch.empty_like(query, memory_format=torch.contiguous_format), query.shape[1] // cache.shape[2]
    for part in plan.parts:
        for head in range(cache.shape[2]):
            heads, key_head = slice(head * ratio, (head + 1) * ratio), slice(head, head + 1)
            scales = how.scales[:, key_head].contiguous() if how.scales is not None else None
            sinks = how.sinks[heads] if how.sinks is not None else None
            own = part.plan.chosen(_pages(asked, head, plan, part))
            alone = replace(how, scales=scales, sinks=sinks, asked=None)
            found[part.tokens, heads] = paged.attention(query[part.tokens, heads], cache[:, :, key_head], own, alone)
    return found


def _pages(asked: BlockSelection, head: int, plan: Plan, part: Part) -> Tensor:
    """Pages of the blocks that a key head of the part's tokens attends to, in ascending order, int32, equally many for each
    token."""
    from .fused_index import products

    found = products(asked.queries[:, head].contiguous(), asked.keys, plan, part.first, len(part.tables), part.length)
    best = asked.prefer(found.view(len(found), -1, asked.block).amax(2), plan.positions[part.tokens, None])
    # For a token that sees fewer, the last ones are blocks that it doesn't see, and nobody looks at them.
    blocks, each = best.topk(asked.most // asked.block).indices.sort(1).values, asked.block // plan.page_size
    places = (blocks.unsqueeze(2) * each + torch.arange(each, device=best.device)).flatten(1)
    return plan.pages_of(part, places).flatten()
