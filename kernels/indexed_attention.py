"""Attention to the tokens that an index has chosen, in Triton: what `indexed` means on a CPU, on an accelerator.

Scores are computed by the items of a plan that looks at all keys, and the best are picked by torch. Each token is then a row of its
own, whose pages are of one token each: those that it has chosen. Steps of which no token sees more than that need none of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy
import torch
from torch import Tensor

from . import paged_attention as paged
from . import work
from .attention import How, Row
from .transfer import to_device

# Scores that are computed at once, and how many bytes one takes with what picking the best of them does.
SCORES = 1 << 25
SCORE_BYTES = 12
CHOSEN_BYTES = 4  # of one that is chosen
# Tokens at most whose chosen ones are looked at at once: a table of theirs takes 8 MiB.
TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Part:
    """Some tokens of a step, one after the other."""

    first: int
    length: int  # keys of the one that sees most
    tables: Tensor  # [tokens, 1] int64: where each one's page table begins in the step's
    plan: paged.Plan  # of what they have chosen; whose tables are `most` ints each, and written by every layer


@dataclass(frozen=True, slots=True)
class Plan(paged.Plan):
    """A step with tokens that see more than they may attend to."""

    parts: tuple[Part, ...]


def plan(whole: paged.Plan, rows: Sequence[Row], most: int, dtype: torch.dtype) -> Plan:
    """whole: the step's plan, of layers without windows; most: tokens that one attends to; dtype: of queries."""
    device, page_size, layers = whole.buffer.device, whole.page_size, whole.launches[0].kind
    widths = numpy.array([work.width(row, page_size) for row in rows])
    queries = [row.queries for row in rows]
    offsets = numpy.repeat(widths.cumsum() - widths, queries)
    seen = numpy.minimum(work.positions_of(rows) + 1, most)
    lengths = numpy.repeat([row.context + row.queries for row in rows], queries)
    count = max(1, min(TOKENS, SCORES // int(lengths.max())))
    parts, alike = [], dict[bytes, paged.Plan]()  # of a long prompt most parts are: their tokens all see as many as they may
    for first in range(0, len(seen), count):
        own = slice(first, first + count)
        kind = seen[own].tobytes()
        if kind not in alike:
            alike[kind] = paged.plan_singles(seen[own], most, layers, device, dtype)
        tables = to_device(torch.from_numpy(offsets[own]), device).unsqueeze(1)
        parts.append(Part(first, max(most, int(lengths[own].max())), tables, alike[kind]))
    return Plan(**{field.name: getattr(whole, field.name) for field in fields(whole)}, parts=tuple(parts))


def attention(query: Tensor, cache: Tensor, plan: Plan, how: How) -> Tensor:
    """As `paged_attention.attention`, of a cache of latents with an index's keys behind them."""
    from .fused_index import scores

    asked = how.asked
    assert asked is not None
    found = query.new_empty(*query.shape[:2], how.latent) if len(plan.parts) > 1 else None
    for part in plan.parts:
        count = len(part.tables)
        if part.first not in asked.chosen:
            best = scores(asked, cache[..., query.shape[2] :], plan, part.first, count, part.length).topk(asked.most).indices
            # Of a token that sees fewer the last ones are anything, and nobody looks at them.
            places = (part.tables + best // plan.page_size).clamp_(max=len(plan.pages) - 1)
            slots = plan.pages[places] * plan.page_size + best % plan.page_size
            asked.chosen[part.first] = slots.int().flatten()
        own = part.plan.chosen(asked.chosen[part.first])
        answer = paged.attention(query[part.first : part.first + count], cache, own, how)
        if found is None:
            return answer
        found[part.first : part.first + count] = answer  # at once: all parts' and the whole take twice the memory
        del answer
    assert found is not None
    return found
