"""What attention has to do in a step, cut into items of similar length: pure ints, no tensors. Hundreds of rows a step are too many
for Python's loops, so ints are in arrays wherever there are as many as rows.

A *segment* is some query tokens that all look at the same range of keys: those of one row, or those of several rows whose page
tables begin alike (beams, samples, a common prompt), which then read the common pages once. A segment that is long for this
step is cut into several *items*. What a token gets from several items is merged later by log-sum-exp: such an item writes
*partials*, one for each of its tokens; any other writes the answer itself.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import numpy

from .attention import Row, depths
from .layout import Kind

# What a segment's `tree` may say instead of a token: `paged_kernels` has these, too.
ORDERED, WHOLE = -1, -2
# Nodes of a tree: two 64-bit words say whom a node sees.
NODES = 128
# Items begin at a multiple of this many keys wherever pages are as long, so that no tile of keys spans two pages.
ALIGNMENT = 128
# Items that a processor works on at once, of small tiles: two keep memory busy (measured on an H200, 2026-11-26, as all of these: 8
# rows of 4,096 keys in 41.7 us, 49.2 with one, 54.1 with three, of which one has to wait). Of the largest one has room.
ITEMS_PER_PROCESSOR = 2
# Keys below which a processor gets one item: with two more time goes into merging (one row of 4,096 keys: 15.0 and 17.5 us).
SHORT = 192
# Keys below which an item is not worth cutting: starting and merging one costs about as much (one row of 512 keys: 9.5 us, 11.7
# with items of 256).
SHORTEST_ITEM = 128
LARGE = 128  # rows of a tile of which a processor has one program at a time
# How much longer items may become, in such steps, lest some have to wait for a place beside others.
STRETCH, STEP = 1.5, 64
SOONER = 1.1  # how many times as soon shorter items should end, for all that is merged then
# Keys that rows must have in common to read them together: the merge that follows costs about as much as reading these.
SHORTEST_RUN = 128


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of one program's work, and how it is compiled."""

    rows: int  # query tokens x query heads of a key head
    keys: int
    warps: int
    stages: int


class Run(NamedTuple):
    """Pages `begin` to `end`, which are the same in the tables of all `members`."""

    members: list[int]
    begin: int
    end: int


Array: TypeAlias = "numpy.ndarray[Any, numpy.dtype[numpy.int64]]"


class Segment(NamedTuple):
    """Query tokens that look at the same range of keys. The fields of an item but for the last two."""

    first: int  # of its query tokens in the table of tokens
    queries: int  # how many
    pages: int  # where its page table begins
    begin: int  # first key
    end: int  # after the last key
    context: int  # keys before this one are computed earlier, and all its queries see them (but for a window)
    # ORDERED: keys after those are seen in order of position; WHOLE: all its queries see them all; else the row's first token, and
    # masks say who sees whom.
    tree: int
    tile: int  # which one
    shared: bool  # its tokens have other segments besides


class Item(NamedTuple):
    """Eight ints of a program. No queries: nothing to do."""

    first: int
    queries: int
    pages: int
    begin: int
    end: int
    context: int
    tree: int
    partial: int  # where its first token's partial goes; -1: what it finds is the answer


@dataclass(frozen=True, slots=True)
class Work:
    """The items of a step for one window, and how to merge what they find."""

    items: tuple[Array, ...]  # per tile [items, fields of Item], the longest first
    entries: Array  # [tokens, 3]: token, place of its first piece in `pieces`, number of them
    pieces: Array  # partials, token by token; there are as many partials


@dataclass(frozen=True, slots=True)
class Table:
    """What all windows have in common."""

    rows: Sequence[Row]
    page_size: int
    queries: Array  # per row
    contexts: Array
    starts: Array  # per row: its first query token
    offsets: Array  # per row: where its page table begins
    positions: Array  # per query token
    tokens: Array  # all query tokens in order, then those of each run
    runs: list[tuple[Run, int]]  # and where a run's tokens begin in `tokens`
    own: Array  # per row: its first key that is in no run


def table(rows: Sequence[Row], page_size: int, most: int) -> Table:
    """most: queries of a row that may share; a row of more fills a tile of its own anyway. 0: nothing is shared."""
    queries, contexts = _ints([row.queries for row in rows]), _ints([row.context for row in rows])
    starts, widths = _before(queries), -(-(contexts + queries) // page_size)
    positions = _positions(rows, starts, contexts, queries)
    own = numpy.zeros_like(queries)
    tokens, runs, count = [numpy.arange(len(positions))], [], len(positions)
    for run in runs_of(rows, page_size, most):
        runs.append((run, count))
        tokens.append(_ranges(starts[run.members], queries[run.members]))
        count += len(tokens[-1])
        own[run.members] = run.end * page_size
    return Table(rows, page_size, queries, contexts, starts, _before(widths), positions, numpy.concatenate(tokens), runs, own)


def singles(seen: Array, apart: int, page_size: int) -> Table:
    """Of rows of one token each, which see so many keys; tables are `apart`."""
    count = numpy.arange(len(seen))
    return Table((), page_size, numpy.ones_like(seen), seen - 1, count, count * apart, seen - 1, count, [], numpy.zeros_like(seen))


def positions_of(rows: Sequence[Row]) -> Array:
    """Per query token."""
    queries = _ints([row.queries for row in rows])
    return _positions(rows, _before(queries), _ints([row.context for row in rows]), queries)


def _positions(rows: Sequence[Row], starts: Array, contexts: Array, queries: Array) -> Array:
    positions = _ranges(contexts, queries)
    for i, row in enumerate(rows):
        if row.parents is not None:
            positions[starts[i] : starts[i] + row.queries] = row.context + _ints(depths(row.parents))
    return positions


def _ints(values: Sequence[int]) -> Array:
    return numpy.array(values, numpy.int64)


def _before(counts: Array) -> Array:
    """The sum of all counts before each."""
    return numpy.cumsum(counts) - counts


def _ranges(starts: Array, counts: Array) -> Array:
    """start, start + 1, ... for each, so many of them, one after the other."""
    return numpy.arange(counts.sum()) + numpy.repeat(starts - _before(counts), counts)


def width(row: Row, page_size: int) -> int:
    """Pages of a row that are in use: its table may be longer."""
    return -(-(row.context + row.queries) // page_size)


def masks(row: Row) -> list[tuple[int, int]]:
    """Per node of a tree two words of 64 bits: bit i of the first says whether it sees node i, of the second node 64 + i."""
    if row.parents is None or row.queries > NODES:
        raise ValueError(f"a tree has at most {NODES} nodes, not {row.queries}")
    sees: list[int] = []
    for i, parent in enumerate(row.parents):
        sees.append((sees[parent] if parent >= 0 else 0) | 1 << i)
    return [(bits & (1 << 64) - 1, bits >> 64) for bits in sees]


def runs_of(rows: Sequence[Row], page_size: int, most: int) -> Iterator[Run]:
    """What rows of at most so many queries have in common. Runs come after those that they continue."""
    able = [i for i, row in enumerate(rows) if row.queries <= most]
    full = [row.context // page_size if row.settled is None else row.settled for row in rows]
    least = -(-SHORTEST_RUN // page_size)
    waiting = [(able, 0, 0)]  # rows, where their next run begins, up to where they are known to be alike
    while waiting:
        members, begin, alike = waiting.pop()
        same: dict[int, list[int]] = {}
        for i in members:
            if full[i] > alike:
                same.setdefault(rows[i].pages[alike], []).append(i)
        for together in same.values():
            if len(together) < 2:
                continue
            least_full = min(full[i] for i in together)
            end = alike + common_pages([list(rows[i].pages[alike:least_full]) for i in together])
            if end - begin >= least:
                yield Run(together, begin, end)
                waiting.append((together, end, end))
            else:
                waiting.append((together, begin, end))


def common_pages(tables: Sequence[list[int]]) -> int:
    """With how many pages all of these begin, which are equally long."""
    low, high = min(tables), max(tables)  # whatever all others share, these two do
    alike, differ = 0, len(low) + 1
    while differ - alike > 1:
        middle = (alike + differ) // 2
        if low[alike:middle] == high[alike:middle]:
            alike = middle
        else:
            differ = middle
    return alike


def tile_of(tiles: Sequence[Tile], rows: int) -> int:
    """The smallest tile that holds so many rows, or the largest."""
    return next((place for place, tile in enumerate(tiles) if tile.rows >= rows), len(tiles) - 1)


def segments(table: Table, kind: Kind, tiles: Sequence[Tile]) -> Array:
    """[segments, fields of Segment], in layers of that kind."""
    common = numpy.array([*_common_segments(table, kind, tiles)], numpy.int64)
    own = _own_segments(table, kind, tiles)
    return numpy.concatenate((common.reshape(-1, len(Segment._fields)), own))


def _common_segments(table: Table, kind: Kind, tiles: Sequence[Tile]) -> Iterator[Segment]:
    for run, first in table.runs:
        for members, begin, end in _seen(table, run, kind):
            count = int(table.queries[members].sum())
            tile = tile_of(tiles, count * kind.ratio)
            most = tiles[tile].rows // kind.ratio
            for at in range(0, count if begin < end else 0, most):
                pages = int(table.offsets[members[0]])
                yield Segment(first + at, min(most, count - at), pages, begin, end, end, ORDERED, tile, True)
            first += count


def _own_segments(table: Table, kind: Kind, tiles: Sequence[Tile]) -> Array:
    sizes, window = _ints([tile.rows for tile in tiles]), kind.window
    taken = numpy.minimum(numpy.searchsorted(sizes, table.queries * kind.ratio), len(tiles) - 1)
    most = sizes[taken] // kind.ratio
    parts = -(-table.queries // most)  # segments of each row
    row = numpy.repeat(numpy.arange(len(parts)), parts)
    at = _ranges(numpy.zeros_like(parts), parts) * most[row]
    first = table.starts[row] + at
    count = numpy.minimum(most[row], table.queries[row] - at)
    tree = numpy.full(len(row), ORDERED)
    lowest = table.positions[first]
    for i in [i for i, one in enumerate(table.rows) if one.parents is not None]:
        for k in numpy.flatnonzero(row == i):
            tree[k], lowest[k] = table.starts[i], table.positions[first[k] : first[k] + count[k]].min()
    begin = table.own[row]
    if kind.chunked:
        begin = numpy.maximum(begin, table.contexts[row] // window * window)
    elif window:
        begin = numpy.maximum(begin, (lowest - window + 1) // ALIGNMENT * ALIGNMENT)
    context = table.contexts[row]
    end = context + at + count  # a node's ancestors are before it, in a tree as well
    if kind.joined and any(one.whole for one in table.rows):
        whole = numpy.array([one.whole for one in table.rows])[row]
        tree[whole], end[whole] = WHOLE, (table.contexts + table.queries)[row[whole]]
    together = numpy.zeros(len(parts), numpy.int64)
    for run, _ in table.runs:
        for members, first_key, last_key in _seen(table, run, kind):
            together[members] |= first_key < last_key
    return numpy.stack((first, count, table.offsets[row], begin, end, context, tree, taken[row], together[row]), 1)


def _seen(table: Table, run: Run, kind: Kind) -> Iterator[tuple[list[int], int, int]]:
    """Members of a run, side by side, with the first key of it that any of them may see, and the one after the last. Where windows
    don't slide, all of them see the same."""
    begin, end = run.begin * table.page_size, run.end * table.page_size
    if not kind.chunked:
        yield run.members, _first_key(begin, min(table.rows[i].context for i in run.members), kind.window), end
        return
    for first, members in groupby(run.members, key=lambda i: table.rows[i].context // kind.window * kind.window):
        yield [*members], max(begin, first), end


def _first_key(begin: int, position: int, window: int) -> int:
    """The first key from `begin` that a query at `position` may see, or a few before it."""
    return max(begin, (position - window + 1) // ALIGNMENT * ALIGNMENT) if window else begin


def longest(parts: Array, kv_heads: int, processors: int, tiles: Sequence[Tile]) -> int:
    """Keys of the longest item that lets all processors finish at about the same time. parts: of `segments`."""
    lengths = parts[:, END] - parts[:, BEGIN]
    total = int(lengths.sum()) * kv_heads
    large = bool((_ints([tile.rows for tile in tiles])[parts[:, TILE]] >= LARGE).all())
    places = processors if large else processors * ITEMS_PER_PROCESSOR
    share = -(-total // (places if total >= places * SHORT else processors))
    limit = -(-max(share, SHORTEST_ITEM) // ALIGNMENT) * ALIGNMENT
    # A few items more than there are places for would begin when others end. Where slightly longer ones have places, they do.
    candidates = range(limit, int(STRETCH * limit) + 1, STEP)  # the longer, the fewer items
    found = bisect_left(candidates, True, key=lambda most: int((-(-lengths // most)).sum()) * kv_heads <= places)
    if found < len(candidates) and SOONER * _ended(lengths, limit, places // kv_heads) > candidates[found]:
        return candidates[found]
    return limit


def _ended(lengths: Array, limit: int, places: int) -> int:
    """Keys until the last of items of at most `limit` has ended, if those that are too many come behind the shortest."""
    counts = -(-lengths // limit)
    items = numpy.sort(numpy.repeat(-(-lengths // numpy.maximum(counts, 1)), counts))
    behind = items[: 2 * max(0, len(items) - places)]
    return max(limit, int((behind + behind[::-1]).max(initial=0)))


def work(table: Table, parts: Array, tiles: Sequence[Tile], limit: int, fixed: bool) -> Work:
    """Items of at most `limit` keys. fixed: cut at its multiples, so that a row's cuts don't depend on its neighbours."""
    which, begins, ends = _cuts(parts, _ints([tile.keys for tile in tiles]), limit, fixed)
    pieces = numpy.bincount(which, minlength=len(parts))  # items of each segment
    merged = ((parts[:, SHARED] > 0) | (pieces > 1))[which]
    queries = numpy.where(merged, parts[which, QUERIES], 0)
    partials = _before(queries)
    items = parts[which, :8]
    items[:, BEGIN], items[:, END], items[:, PARTIAL] = begins, ends, numpy.where(merged, partials, -1)
    longest_first = numpy.argsort(begins - ends, kind="stable")
    taken = parts[which, TILE][longest_first]
    tokens = table.tokens[_ranges(parts[which, FIRST], queries)]  # of each partial
    order = numpy.argsort(tokens, kind="stable")
    own, places, counts = numpy.unique(tokens[order], return_index=True, return_counts=True)
    return Work(
        items=tuple(items[longest_first[taken == tile]] for tile in range(len(tiles))),
        entries=numpy.stack((own, places, counts), 1),
        pieces=order,
    )


FIRST, QUERIES, PAGES, BEGIN, END, CONTEXT, TREE, TILE, SHARED = range(len(Segment._fields))
PARTIAL = TILE  # of an item, where a segment has its tile


def _cuts(parts: Array, keys: Array, limit: int, fixed: bool) -> tuple[Array, Array, Array]:
    """Of every item: its segment, first key and the one after its last. keys: of each tile."""
    begin, end = parts[:, BEGIN], parts[:, END]
    if fixed:
        length = numpy.full(len(parts), limit)
        start = begin // limit * limit
    else:
        count, tile = -(-(end - begin) // limit), keys[parts[:, TILE]]
        length = -(-(end - begin) // (count * tile)) * tile
        start = begin
    cuts = -(-(end - start) // length)
    which = numpy.repeat(numpy.arange(len(parts)), cuts)
    at = start[which] + _ranges(numpy.zeros_like(cuts), cuts) * length[which]
    return which, numpy.maximum(at, begin[which]), numpy.minimum(at + length[which], end[which])
