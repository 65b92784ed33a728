"""The work list of the attention kernel: a step's attention split along queries and keys (split-KV, as in flash decoding) into
items of similar length, one for each program. Pure ints, no tensors; a step may have hundreds of rows, too many for Python loops,
so whatever has as many entries as rows is a numpy array.

A *segment* is some query tokens that all look at the same range of keys: those of one row, or those of several rows whose page
tables begin alike (beams, samples, a common prompt), which then read the common pages once. A segment that is long for this step is
cut into several *items*. Outputs of a token from several items are merged later by log-sum-exp: such an item writes *partials*, one
for each of its tokens; any other writes the final output itself.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy

from .attention import Row, depths
from .layout import LayerKind

# Values of a segment's `tree` where it isn't the first token of a tree: causal, and bidirectional. `paged_kernels` knows them as
# well.
CAUSAL, WHOLE = -1, -2
# Most nodes of a draft tree: two 64-bit words hold a node's mask of ancestors.
NODES = 128
# Items begin at multiples of this many keys, so that, wherever pages are at least as long, no tile of keys spans two pages.
ALIGNMENT = 128
# Items of small tiles that a processor (SM) works on at once: two keep memory busy (measured on an H200, 2026-11-26, as all figures
# here: 8 rows of 4,096 keys in 41.7 us, 49.2 with one, 54.1 with three, of which one has to wait). There is room for one item of
# the largest tile.
ITEMS_PER_PROCESSOR = 2
# Keys per item, as a multiple of the shortest item's, below which a processor gets one item, not two, of which merging takes longer
# than is won (one row of 4,096 keys: 15.0 and 17.5 us).
SHORT = 1.5
# Keys below which an item is not worth cutting: starting and merging one costs about as much (one row of 512 keys: 9.5 us, 11.7
# with items of 256).
SHORTEST_ITEM = 128
LARGE = 128  # rows of a tile so large that a processor runs one program at a time
# Factor by which items may be stretched, in increments of STEP keys, so that none has to wait for a free processor.
STRETCH, STEP = 1.5, 64
SOONER = 1.1  # factor by which shorter items would have to finish sooner to be worth their merging
# Shortest common prefix of rows, in keys, that is read once for all: the merge that follows costs about as much as reading these.
SHORTEST_RUN = 128
ROWS = attrgetter("rows")


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile of queries and keys that one program computes at a time, and how the program is compiled."""

    rows: int  # query tokens x query heads that share a key head
    keys: int
    warps: int
    stages: int
    shortest: int = 0  # keys below which an item of it is not worth cutting; 0: SHORTEST_ITEM


class Run(NamedTuple):
    """Pages that several rows have in common: `begin` to `end` in the page tables of all `members`."""

    members: list[int]
    begin: int
    end: int


Array: TypeAlias = "numpy.ndarray[Any, numpy.dtype[numpy.int64]]"


class Segment(NamedTuple):
    """Query tokens that look at the same range of keys. All fields but the last two are those of an item, too."""

    first: int  # index of its first query token in `Table.tokens`
    queries: int  # number of query tokens
    pages: int  # where its page table begins in the concatenated tables
    begin: int  # first key
    end: int  # after the last key
    context: int  # keys before this one were computed in earlier steps, and all its queries see them (within the window)
    # Who sees the keys from `context` on. CAUSAL: queries not before them; WHOLE: every query sees all (bidirectional); else the
    # index of the row's first token: masks say which nodes of the tree a query sees.
    tree: int
    tile: int  # index of its tile in the kind's list of tiles
    shared: bool  # its tokens have further segments, so outputs must be merged


class Item(NamedTuple):
    """The eight ints that one program of `paged_kernels.attend` reads. queries = 0: nothing to do (padding). Fields as in
    `Segment`."""

    first: int
    queries: int
    pages: int
    begin: int
    end: int
    context: int
    tree: int
    partial: int  # where its first token's partial goes; -1: its output is final


@dataclass(frozen=True, slots=True)
class Work:
    """The items of a step for one kind of layers, and how to merge their partials."""

    items: tuple[Array, ...]  # per tile [items, fields of Item], the longest first
    entries: Array  # [tokens, 3] for tokens with partials: token, place of its first piece in `pieces`, number of pieces
    pieces: Array  # indices of all partials, grouped by token


@dataclass(frozen=True, slots=True)
class Table:
    """What the work lists of all windows have in common: a step's rows as arrays."""

    rows: Sequence[Row]
    page_size: int
    queries: Array  # per row: number of query tokens
    contexts: Array  # per row: number of keys computed before
    starts: Array  # per row: index of its first query token in the step
    widths: Array  # per row, where there are any: number of pages that it uses ...
    offsets: Array  # ... and where these begin in the concatenated tables
    positions: Array  # per query token
    tokens: Array  # indices of all query tokens in order, then once more those of each run
    runs: list[tuple[Run, int]]  # page runs that rows share, each with where its tokens begin in `tokens`
    own: Array  # per row: its first key that is in no run
    trees: list[int]  # rows that are draft trees
    single: bool  # every row has one query token


def table(rows: Sequence[Row], page_size: int, most: int) -> Table:
    """The table of a step. most: query tokens of a row up to which it may share keys with others (a row of more fills a tile of its
    own anyway); 0: nothing is shared."""
    counts = [row.queries for row in rows]
    queries, contexts, total = _ints(counts), _ints([row.context for row in rows]), sum(counts)
    trees = [i for i, row in enumerate(rows) if row.parents is not None]
    single = total == len(rows) and not trees
    starts, widths = numpy.arange(total) if single else _before(queries), -(-(contexts + queries) // page_size)
    positions = contexts if single else _positions(rows, starts, contexts, queries, trees)
    own, again, ends = numpy.zeros(len(rows), numpy.int64), list[int](), list[int]()
    runs, count = list[tuple[Run, int]](), total
    for run in shared_runs(rows, page_size, most):
        runs.append((run, count))
        again += run.members
        ends += [run.end * page_size] * len(run.members)
        count += len(run.members) if single else int(queries[run.members].sum())
    own[again] = ends  # of a row in several runs, the last one's
    tokens = numpy.arange(count)
    if again:
        tokens[total:] = again if single else _ranges(starts[again], queries[again])
    offsets = _before(widths)
    return Table(rows, page_size, queries, contexts, starts, widths, offsets, positions, tokens, runs, own, trees, single)


def single_token_table(seen: Array, apart: int, page_size: int) -> Table:
    """The table of rows of one token each. seen: keys that each one sees; apart: entries of a page table, the same for each."""
    count, none = numpy.arange(len(seen)), numpy.zeros_like(seen)
    return Table((), page_size, none + 1, seen - 1, count, none[:0], count * apart, seen - 1, count, [], none, [], True)


def positions_of(rows: Sequence[Row]) -> Array:
    """Position of each query token in its sequence."""
    queries = _ints([row.queries for row in rows])
    trees = [i for i, row in enumerate(rows) if row.parents is not None]
    return _positions(rows, _before(queries), _ints([row.context for row in rows]), queries, trees)


def _positions(rows: Sequence[Row], starts: Array, contexts: Array, queries: Array, trees: Sequence[int]) -> Array:
    positions = _ranges(contexts, queries)
    for i in trees:
        positions[starts[i] : starts[i] + queries[i]] = rows[i].context + _ints(depths(rows[i].parents or ()))
    return positions


def _ints(values: Sequence[int]) -> Array:
    return numpy.array(values, numpy.int64)


def _before(counts: Array) -> Array:
    """Exclusive cumulative sum: for each count the sum of those before it."""
    sums: Array = counts.cumsum()
    return sums - counts


def _ranges(starts: "Array | int", counts: Array) -> Array:
    """`counts[i]` consecutive ints from `starts[i]`, concatenated for all i."""
    shifts: Array = (starts - _before(counts)).repeat(counts)
    return numpy.arange(len(shifts)) + shifts


def width(row: Row, page_size: int) -> int:
    """Number of pages that a row uses: its page table may be longer."""
    return -(-(row.context + row.queries) // page_size)


def masks(row: Row) -> list[tuple[int, int]]:
    """Ancestor masks of a tree, two words of 64 bits for each node: bit i of the first says whether it sees node i, bit i of the
    second whether it sees node 64 + i. Raises ValueError for more than NODES nodes."""
    if row.parents is None or row.queries > NODES:
        raise ValueError(f"a tree has at most {NODES} nodes, not {row.queries}")
    sees: list[int] = []
    for i, parent in enumerate(row.parents):
        sees.append((sees[parent] if parent >= 0 else 0) | 1 << i)
    return [(bits & (1 << 64) - 1, bits >> 64) for bits in sees]


def shared_runs(rows: Sequence[Row], page_size: int, most: int) -> Iterator[Run]:
    """Runs of pages that rows of at most `most` query tokens have in common: a walk down the radix tree of their page tables. A run
    comes after the one that it continues."""
    first = [row.pages[0] for row in rows if row.context >= page_size]
    if not most or len({*first}) == len(first):  # most steps: no two have a page in common
        return
    able = [i for i, row in enumerate(rows) if row.queries <= most]
    full = [row.context // page_size if row.settled is None else row.settled for row in rows]
    least = -(-SHORTEST_RUN // page_size)
    waiting = [(able, 0, 0)]  # rows, first page of their next run, page up to which they are known to be alike
    while waiting:
        members, begin, alike = waiting.pop()
        same: dict[int, list[int]] = {}
        for i in members:
            if full[i] > alike:
                same.setdefault(rows[i].pages[alike], []).append(i)
        for together in same.values():
            if len(together) < 2:
                continue
            own = [full[i] for i in together]
            least_full = min(own)
            end = alike + common_pages([rows[i].pages[alike:least_full] for i in together])
            long = end - begin >= least
            if long:
                yield Run(together, begin, end)
            if end < max(own):
                waiting.append((together, end if long else begin, end))


def common_pages(tables: Sequence[Any]) -> int:
    """Length of the common prefix of page tables of equal length: all lists, or all arrays."""
    low, high = min(tables), max(tables)  # the prefix that these two share is common to all
    if low == high:
        return len(low)
    alike, differ = 0, len(low) + 1
    while differ - alike > 1:
        middle = (alike + differ) // 2
        if low[alike:middle] == high[alike:middle]:
            alike = middle
        else:
            differ = middle
    return alike


def tile_of(tiles: Sequence[Tile], rows: int) -> int:
    """Index of the smallest tile with at least so many rows, else of the last."""
    return min(bisect_left(tiles, rows, key=ROWS), len(tiles) - 1)


def segments(table: Table, kind: LayerKind, tiles: Sequence[Tile]) -> Array:
    """All segments in layers of that kind: [segments, fields of Segment]."""
    own = _own_segments(table, kind, tiles)
    common = [*_common_segments(table, kind, tiles)]
    return numpy.concatenate((numpy.array(common, numpy.int64), own)) if common else own


def _common_segments(table: Table, kind: LayerKind, tiles: Sequence[Tile]) -> Iterator[Segment]:
    for run, first in table.runs:
        for members, begin, end in _seen(table, run, kind):
            count = len(members) if table.single else int(table.queries[members].sum())
            tile = tile_of(tiles, count * kind.ratio)
            most = tiles[tile].rows // kind.ratio
            for at in range(0, count if begin < end else 0, most):
                pages = int(table.offsets[members[0]])
                yield Segment(first + at, min(most, count - at), pages, begin, end, end, CAUSAL, tile, True)
            first += count


def _own_segments(table: Table, kind: LayerKind, tiles: Sequence[Tile]) -> Array:
    window, row, taken, first, count = kind.window, *_parts(table, kind, tiles)
    lowest, context = table.positions[first], table.contexts[row]
    result = numpy.empty((len(first), len(Segment._fields)), numpy.int64)
    result[:, FIRST], result[:, QUERIES], result[:, PAGES], result[:, CONTEXT] = first, count, table.offsets[row], context
    # A node's ancestors stand before it, in a tree as well.
    result[:, END] = context + count if table.single else context + first - table.starts[row] + count
    result[:, TREE], result[:, TILE], result[:, SHARED] = CAUSAL, taken, 0
    for i in table.trees:
        for k in numpy.flatnonzero(row == i):
            result[k, TREE] = table.starts[i]
            lowest[k] = table.positions[first[k] : first[k] + count[k]].min()
    begin = table.own[row]
    if kind.chunked:
        begin = numpy.maximum(begin, context // window * window)
    elif window:
        begin = numpy.maximum(begin, (lowest - window + 1) // ALIGNMENT * ALIGNMENT)
    result[:, BEGIN] = begin
    if kind.joined and any(one.whole for one in table.rows):
        whole = numpy.array([one.whole for one in table.rows])[row]
        result[whole, TREE], result[whole, END] = WHOLE, (table.contexts + table.queries)[row][whole]
    if table.runs:
        together = numpy.zeros(len(table.rows), numpy.int64)
        seen = [part for run, _ in table.runs for part in _seen(table, run, kind)]
        together[[i for members, first_key, last_key in seen if first_key < last_key for i in members]] = 1
        result[:, SHARED] = together[row]
    return result


def _parts(table: Table, kind: LayerKind, tiles: Sequence[Tile]) -> "tuple[Array | slice, Array | int, Array, Array]":
    """Of each segment of a row's own: the row, the tile, its first query token, and how many it has. A row of one token is one."""
    if table.single:
        return slice(None), tile_of(tiles, kind.ratio), table.starts, table.queries
    sizes = _ints([tile.rows for tile in tiles])
    taken = numpy.minimum(sizes.searchsorted(table.queries * kind.ratio), len(tiles) - 1)
    most = sizes[taken] // kind.ratio
    parts = -(-table.queries // most)  # segments of each row
    row = numpy.arange(len(parts)).repeat(parts)
    at = _ranges(0, parts) * most[row]
    return row, taken[row], table.starts[row] + at, numpy.minimum(most[row], table.queries[row] - at)


def _seen(table: Table, run: Run, kind: LayerKind) -> list[tuple[list[int], int, int]]:
    """Groups of a run's members with the keys of the run that the group reads: members, first key, key after the last. One group
    with sliding windows; where windows are fixed chunks, one for each chunk, whose members all see the same keys."""
    begin, end = run.begin * table.page_size, run.end * table.page_size
    if not kind.chunked:
        if kind.window:
            nearest = min(table.rows[i].context for i in run.members) - kind.window + 1
            begin = max(begin, nearest // ALIGNMENT * ALIGNMENT)
        return [(run.members, begin, end)]
    chunks = groupby(run.members, key=lambda i: table.rows[i].context // kind.window * kind.window)
    return [([*members], max(begin, first), end) for first, members in chunks]


def longest(parts: Array, kv_heads: int, processors: int, tiles: Sequence[Tile]) -> int:
    """The most keys of an item, so that all processors finish at about the same time. parts: from `segments`."""
    lengths = parts[:, END] - parts[:, BEGIN]
    total = int(lengths.sum()) * kv_heads
    large = all(tile.rows >= LARGE or place not in parts[:, TILE] for place, tile in enumerate(tiles))
    places = processors if large else processors * ITEMS_PER_PROCESSOR
    shortest = min(tile.shortest or SHORTEST_ITEM for tile in tiles)
    share = -(-total // (places if total >= places * SHORT * shortest else processors))
    step = min(ALIGNMENT, shortest)
    limit = -(-max(share, shortest) // step) * step
    # If there are a few items more than places, these begin only when others end. Where slightly longer items all find a place,
    # take those.
    candidates = range(limit, int(STRETCH * limit) + 1, STEP)  # the longer the items, the fewer
    found = bisect_left(candidates, True, key=lambda most: int((-(-lengths // most)).sum()) * kv_heads <= places)
    if found < len(candidates) and SOONER * _ended(lengths, limit, places // kv_heads) > candidates[found]:
        return candidates[found]
    return limit


def _ended(lengths: Array, limit: int, places: int) -> int:
    """Makespan in keys of items of at most `limit` keys, if those in excess of `places` are queued behind the shortest ones."""
    counts = -(-lengths // limit)
    items = numpy.sort(numpy.repeat(-(-lengths // numpy.maximum(counts, 1)), counts))
    behind = items[: 2 * max(0, len(items) - places)]
    return max(limit, int((behind + behind[::-1]).max(initial=0)))


def work(table: Table, parts: Array, tiles: Sequence[Tile], limit: int, fixed: bool) -> Work:
    """The items of all segments, of at most `limit` keys, and their merge list. fixed: cut at multiples of `limit`, so that a row's
    cuts don't depend on what else is in the step."""
    if not fixed and not parts[:, SHARED].any() and (parts[:, END] - parts[:, BEGIN]).max(initial=0) <= limit:
        return _uncut(parts, len(tiles))
    which, begins, ends = _cuts(parts, _ints([tile.keys for tile in tiles]), limit, fixed)
    pieces = numpy.bincount(which)  # number of items of each segment
    parts = parts[which]
    merged = (parts[:, SHARED] > 0) | (pieces[which] > 1)
    queries = parts[:, QUERIES] * merged
    tokens = table.tokens[_ranges(parts[:, FIRST], queries)]  # token of each partial
    items, taken = parts[:, :8], parts[:, TILE].copy()
    items[:, BEGIN], items[:, END], items[:, PARTIAL] = begins, ends, numpy.where(merged, _before(queries), -1)
    longest_first = (begins - ends).argsort(kind="stable")
    counts = numpy.bincount(tokens)  # partials of each token
    own = counts.nonzero()[0]
    entries = numpy.empty((len(own), 3), numpy.int64)
    entries[:, 0], entries[:, 1], entries[:, 2] = own, _before(counts)[own], counts[own]
    return Work(
        items=_of_tiles(items[longest_first], taken[longest_first], len(tiles)),
        entries=entries,
        pieces=tokens.argsort(kind="stable"),
    )


def _uncut(parts: Array, tiles: int) -> Work:
    """The same where no segment is cut, and none shared: most steps of many rows."""
    items = parts[(parts[:, BEGIN] - parts[:, END]).argsort(kind="stable"), :8]
    taken = items[:, TILE].copy()
    items[:, PARTIAL] = -1
    return Work(_of_tiles(items, taken, tiles), numpy.zeros((0, 3), numpy.int64), numpy.zeros(0, numpy.int64))


def _of_tiles(items: Array, taken: Array, tiles: int) -> tuple[Array, ...]:
    return tuple(items[taken == tile] for tile in range(tiles)) if tiles > 1 else (items,)


FIRST, QUERIES, PAGES, BEGIN, END, CONTEXT, TREE, TILE, SHARED = range(len(Segment._fields))
PARTIAL = TILE  # index of this field in an item, where a segment has its tile


def _cuts(parts: Array, keys: Array, limit: int, fixed: bool) -> tuple[Array, Array, Array]:
    """For every item: its segment, first key, and the key after its last. keys: keys of each tile."""
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
    at = start[which] + _ranges(0, cuts) * length[which]
    return which, numpy.maximum(at, begin[which]), numpy.minimum(at + length[which], end[which])
