"""DeepSeek V4's attention to a sliding window of keys and to compressed entries, in Triton: the accelerator's counterpart of
`compressed`.

As with tokens that an indexer has chosen (`indexed_attention`), each query token is a row of its own, over pages of one row each of
a layer's keys and entries: first the entries that it sees, then the keys of its window. The host knows how many there are; which
they are is looked up on the device, once for all layers that see all entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy
import torch
from torch import Tensor

from . import paged_attention as paged
from . import work_list
from .attention import AttentionOptions, Row
from .compressed import EntrySelection, Places, token_places
from .fused_index import scores
from .indexed_attention import SCORES, TOKENS
from .layout import AttentionLayout

# Most table entries (rows of keys and entries) of tokens that are attended at once: 32 MiB.
ROWS = 1 << 23


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive tokens of a step that are attended at once."""

    first: int
    plan: paged.Plan  # attention to what they see; its tables have room for `apart` rows each
    apart: int
    tables: Tensor  # [tokens, 1] int64: where each one's page table begins among the step's
    places: Tensor  # [tokens, 1] int64: positions
    entries: Tensor  # [tokens, 1] int64: number of entries that each one sees
    longest: int  # tokens of the longest of their rows
    found: list[Tensor] = field(default_factory=list)  # their tables, cached where they are the same for all layers

    @property
    def tokens(self) -> slice:
        """These tokens among the step's."""
        return slice(self.first, self.first + len(self.tables))


@dataclass(frozen=True, slots=True)
class Plan(paged.Plan):
    """The attention plan of a step, for all layers. Layers with a sliding window alone use `launches`."""

    places: Places
    window: int
    parts: dict[tuple[int, int], list[Part]]  # by (tokens per entry, entries that a token attends to; 0: all)


def plan(whole: paged.Plan, rows: Sequence[Row], layout: AttentionLayout) -> Plan:
    """The step's plan. whole: its plan for layers with a window and, for the indexer's scores, without."""
    places = token_places(rows, layout)
    own = work_list.positions_of(rows)
    lengths = numpy.repeat([row.context + row.queries for row in rows], [row.queries for row in rows])
    parts = {kind: _parts(whole, own, lengths, places, kind, layout) for kind in layout.entries}
    given = {each.name: getattr(whole, each.name) for each in fields(whole)}
    return Plan(**given, places=places, window=layout.near, parts=parts)


def _parts(
    whole: paged.Plan,
    own: work_list.Array,
    lengths: work_list.Array,
    places: Places,
    kind: tuple[int, int],
    layout: AttentionLayout,
) -> list[Part]:
    rate, most = kind
    entries = (own + 1) // rate
    entries = numpy.minimum(entries, most) if most else entries
    seen = entries + numpy.minimum(own + 1, layout.near)
    device, found = whole.buffer.device, list[Part]()
    widest, longest = int(seen.max(initial=1)), int(lengths.max(initial=1))
    count = max(1, min(TOKENS, ROWS // widest, SCORES // max(1, longest // rate)))
    counts = ((places.own + 1) // rate).clamp_(max=most or longest).unsqueeze(1)
    for first in range(0, len(own), count):
        tokens = slice(first, first + count)
        apart = int(seen[tokens].max())
        planned = paged.plan_single_tokens(seen[tokens], apart, whole.launches[0].kind, device, layout.dtype)
        each = places.tables[tokens, None], places.own[tokens, None], counts[tokens]
        found.append(Part(first, planned, apart, *each, int(lengths[tokens].max())))
    return found


def attention(query: Tensor, cache: Tensor, plan: Plan, how: AttentionOptions, rate: int, asked: EntrySelection | None) -> Tensor:
    """As `compressed.attention`."""
    size, most = query.shape[2], asked.most if asked is not None else 0
    rows, own = cache.view(-1, 1, 1, size), replace(how, window=0, latent=size)
    parts = plan.parts[rate, most]
    found = torch.empty_like(query) if len(parts) > 1 else None
    for part in parts:
        tables = _tables(plan, part, cache, cache.shape[3] // size, rate, asked)
        answer = paged.attention(query[part.tokens], rows, part.plan.chosen(tables), own)
        if found is None:
            return answer
        found[part.tokens] = answer
    assert found is not None
    return found


def _tables(plan: Plan, part: Part, cache: Tensor, each: int, rate: int, asked: EntrySelection | None) -> Tensor:
    """Tables of the rows that the part's tokens see, int32, `apart` for each. each: rows per slot."""
    choosing = asked is not None and part.longest // rate > asked.most
    if part.found and not choosing:
        return part.found[0]
    column = torch.arange(part.apart, device=cache.device)
    entry, far = column.expand(len(part.tables), -1), column < part.entries
    if asked is not None and choosing:
        length = part.longest // rate * rate
        values = scores(asked, cache[..., asked.first :], plan, part.first, len(part.tables), length)
        # For a token that sees fewer, the last ones are arbitrary, and nobody looks at them.
        best = values.topk(min(asked.most, values.shape[1])).indices
        entry = best.gather(1, entry.clamp(max=best.shape[1] - 1))
    nearest = (part.places - plan.window + 1).clamp_(min=0)
    places = torch.where(far, entry * rate + rate - 1, nearest + column - part.entries)
    places = torch.minimum(places, part.places)  # beyond what a token sees: arbitrary
    found = (plan.places.slots(plan.pages, part.tables, places) * each + far).int().flatten()
    if not choosing:
        part.found.append(found)
    return found
