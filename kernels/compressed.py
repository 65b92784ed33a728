"""Attention of DeepSeek V4: over a sliding window of keys, and over compressed KV entries that each stand for many tokens (see
`entries`). The torch route, for CPUs; `compressed_attention` is Triton's. Knows tensors and ints, no sequence and no page pool.

A token sees the keys of the last `window` positions, its own included, and the entries whose last token is not behind it: all of
them, or those that an indexer scores best (`indexed.scores`). Keys and entries are rows of one tensor, since a layer's slots are
whole numbers of rows: a slot's first row is a key, its second an entry, where one ends there. For chains only, whose tokens stand
by their positions.

What tokens see is expressed in positions; slots are looked up in the step's page tables when they are needed, since for beams only
the device may know these.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy
import torch
from torch import Tensor

from . import attention as plain
from . import shared_prefixes, work_list
from .attention import AttentionOptions, Row
from .entries import CompletedEntries
from .indexed import TokenSelection, scores
from .layout import AttentionLayout
from .transfer import to_device

# Attention logits that are computed at once: the more keys, the fewer queries.
LOGITS = 1 << 24
LOGIT_BYTES = 16  # bytes per logit, with its mask and what is derived from both


@dataclass(frozen=True, slots=True)
class EntrySelection(TokenSelection):
    """An indexer's queries and head weights for choosing compressed entries; `most` counts entries. Its keys are in their slots,
    from `first` on: neither behind latents nor in a tensor of their own."""

    first: int = 0  # offset of the indexer's keys within a slot


@dataclass(frozen=True, slots=True)
class Places:
    """Positions of a step's tokens, and where to find the slots of the tokens before them."""

    tables: Tensor  # [tokens] int64: where each one's page table begins among the step's concatenated tables
    own: Tensor  # [tokens] int64: their positions
    closing: dict[int, Tensor]  # for each compression rate (tokens per entry): indices of the tokens that complete an entry
    page_size: int
    found: dict[tuple[int, bool], CompletedEntries] = field(default_factory=dict)  # cache of `ends`

    def slots(self, pages: Tensor, tables: Tensor, places: Tensor) -> Tensor:
        """Slots of positions `places` by page tables that begin at `tables`. pages: all of the step's, one table after the
        other."""
        return pages[tables + places // self.page_size].long() * self.page_size + places % self.page_size

    def ends(self, pages: Tensor, rate: int, before: bool) -> CompletedEntries:
        """The entries that the step's tokens complete. before: an entry is also made of the `rate` tokens before its own."""
        if (rate, before) not in self.found:
            tokens = self.closing[rate]
            firsts = self.own[tokens] - (rate - 1)
            count = 2 * rate if before else rate
            places = firsts.unsqueeze(1) + torch.arange(rate - count, rate, device=firsts.device)
            slots = self.slots(pages, self.tables[tokens, None], places.clamp(min=0))
            self.found[rate, before] = CompletedEntries(slots.masked_fill_(places < 0, -1), firsts)
        return self.found[rate, before]


def token_places(rows: Sequence[Row], layout: AttentionLayout) -> Places:
    """The positions of a step's tokens. rows: in the order in which they stand in the step."""
    own = work_list.positions_of(rows)
    widths = numpy.array([work_list.width(row, layout.page_size) for row in rows], numpy.int64)
    tables = numpy.repeat(widths.cumsum() - widths, [row.queries for row in rows])
    closing = {rate: numpy.flatnonzero((own + 1) % rate == 0) for rate, _ in layout.entries}
    parts = (tables, own, *closing.values())
    buffer = to_device(torch.from_numpy(numpy.concatenate(parts)), layout.device)
    first, second, *others = torch.split(buffer, [*map(len, parts)])
    return Places(first, second, dict(zip(closing, others, strict=True)), layout.page_size)


@dataclass(frozen=True, slots=True)
class Tile:
    """Query tokens that are attended together: rows of equally many queries, or a stretch of one long row."""

    start: int  # index of its first token in the step
    rows: int  # number of rows
    queries: int  # queries of each row


@dataclass(frozen=True, slots=True)
class View:
    """The keys and entries that the rows of a tile see."""

    keys: Tensor  # [rows, keys] slots
    entries: Tensor  # [rows, entries] slots
    seen: Tensor  # [rows, queries, keys]: which of the keys each query sees
    whole: Tensor  # [rows, queries, 1]: number of complete entries at each query, which sees at most these


@dataclass(frozen=True, slots=True)
class Plan(shared_prefixes.Plan):
    """The attention plan of a step, for all layers. Layers with a sliding window alone use `blocks`."""

    tiles: list[Tile]
    places: Places
    pages: Tensor
    window: int
    longest: int  # tokens of the longest row, with its context
    views: dict[tuple[int, int], View]


def plan(rows: Sequence[Row], layout: AttentionLayout) -> tuple[list[int], Plan]:
    """The order in which `rows` have to stand in the step, and its plan."""
    order = plain.order(rows)
    ordered = [rows[i] for i in order]
    near = tuple(kind for kind in layout.kinds if kind.window)
    blocks = plain.blocks(ordered, replace(layout, kinds=near)) if near else []
    longest = max(row.context + row.queries for row in rows) if rows else 0
    seen = layout.near + longest // min(rate for rate, _ in layout.entries)
    most = max(1, min(plain.TILE, LOGITS // (layout.ratio * seen)))
    tables = (row.pages[: work_list.width(row, layout.page_size)] for row in ordered)
    pages = torch.tensor([*chain.from_iterable(tables)], dtype=torch.int64, device=layout.device)
    tiles = [*_tiles(ordered, layout, most)]
    return order, Plan([], blocks, [], tiles, token_places(ordered, layout), pages, layout.near, longest, {})


def _tiles(rows: Sequence[Row], layout: AttentionLayout, most: int) -> Iterator[Tile]:
    """The tiles of a step. most: queries of one."""
    start = 0
    for part in plain.split(rows, layout.elements):
        queries = part[0].queries
        if queries <= most:
            yield Tile(start, len(part), queries)
        else:
            for row in range(len(part)):
                for first in range(0, queries, most):
                    yield Tile(start + row * queries + first, 1, min(most, queries - first))
        start += len(part) * queries


def attention(query: Tensor, cache: Tensor, plan: Plan, how: AttentionOptions, rate: int, asked: EntrySelection | None) -> Tensor:
    """Attention over window and entries: [tokens, heads, size]. query: of the same shape; cache: a layer, [slots, 1, 1, width];
    rate: tokens per entry; asked: the indexer's queries; None: all entries are seen."""
    heads, size = query.shape[1:]
    rows = cache.view(-1, size)
    each, answers = cache.shape[3] // size, []  # rows per slot
    for tile in plan.tiles:
        view = _view(plan, tile, rate)
        seen = torch.cat((view.seen, _chosen(plan, tile, view, cache, asked)), 2)
        slots = torch.cat((view.keys * each, view.entries * each + 1), 1)
        keys = rows.index_select(0, slots.flatten()).view(tile.rows, 1, -1, size)
        own = query[tile.start : tile.start + tile.rows * tile.queries]
        hidden = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
        sinks = how.sinks.repeat(tile.queries).view(1, -1, 1) if how.sinks is not None else None
        mask = hidden.repeat_interleave(heads, 1).unsqueeze(1)
        found = plain.attention_with_sinks(
            plain.packed_heads(own, tile.rows, 1), keys, keys, mask, scale=how.scale, softcap=0.0, sinks=sinks
        )
        answers.append(plain.unpacked_heads(found, tile.queries))
    return answers[0] if len(answers) == 1 else torch.cat(answers)


def _view(plan: Plan, tile: Tile, rate: int) -> View:
    if (tile.start, rate) not in plan.views:
        plan.views[tile.start, rate] = _made(plan, tile, rate)
    return plan.views[tile.start, rate]


def _made(plan: Plan, tile: Tile, rate: int) -> View:
    own = slice(tile.start, tile.start + tile.rows * tile.queries)
    places = plan.places.own[own].view(tile.rows, tile.queries)
    tables = plan.places.tables[own].view(tile.rows, tile.queries)[:, :1]
    last, device = places[:, -1:], places.device
    longest = int(last.max()) + 1
    count = min(longest, plan.window + tile.queries - 1)
    keys = last - count + 1 + torch.arange(count, device=device)
    behind = places.unsqueeze(2) - keys.unsqueeze(1)
    seen = (keys.unsqueeze(1) >= 0) & (behind >= 0) & (behind < plan.window)
    ends = (torch.arange(longest // rate, device=device) * rate + rate - 1).expand(tile.rows, -1)
    return View(
        plan.places.slots(plan.pages, tables, keys.clamp(min=0)),
        plan.places.slots(plan.pages, tables, torch.minimum(ends, last)),
        seen,
        ((places + 1) // rate).unsqueeze(2),
    )


def _chosen(plan: Plan, tile: Tile, view: View, cache: Tensor, asked: EntrySelection | None) -> Tensor:
    """Which entries each query sees: [rows, queries, entries]. All complete ones, or the indexer's top ones among them."""
    count = view.entries.shape[1]
    seen = torch.arange(count, device=view.whole.device) < view.whole
    if asked is None or count <= asked.most:
        return seen
    keys = cache[..., asked.first :].flatten(1)[:, : asked.queries.shape[2]][view.entries]
    found = scores(*asked.of(tile.start, tile.rows, tile.queries), keys).masked_fill_(~seen, -torch.inf)
    best = found.sort(dim=2, descending=True, stable=True).indices[:, :, : asked.most]
    return seen & torch.zeros_like(seen).scatter_(2, best, True)
