"""What attention has to do in a step, cut into items of similar length: pure ints, no tensors.

A *segment* is some query tokens that all look at the same range of keys: those of one row, or those of several rows whose page
tables begin alike (beams, samples, a common prompt), which then read the common pages once. A segment that is long for this
step is cut into several *items*. What a token gets from several items is merged later by log-sum-exp: such an item writes
*partials*, one for each of its tokens; any other writes the answer itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .attention import Row

# Nodes of a tree: two 64-bit words say whom a node sees.
NODES = 128
# Items begin at a multiple of this many keys wherever pages are as long, so that no tile of keys spans two pages.
ALIGNMENT = 128
# Items that a processor should get: two even out what is not divisible. More are shorter, and each costs a merge.
ITEMS_PER_PROCESSOR = 2
# Keys below which an item is not worth cutting: starting and merging one costs about as much. Not measured yet.
SHORTEST_ITEM = 128
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


class Segment(NamedTuple):
    """Query tokens that look at the same range of keys. The fields of an item but for the last two."""

    first: int  # of its query tokens in the table of tokens
    queries: int  # how many
    pages: int  # where its page table begins
    begin: int  # first key
    end: int  # after the last key
    context: int  # keys before this one are computed earlier, and all its queries see them (but for a window)
    tree: int  # -1: keys after those are seen in order of position; else the row's first token, and masks say who sees whom
    kind: int  # which tile
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

    items: tuple[list[Item], ...]  # per tile, the longest first
    entries: list[tuple[int, int, int]]  # token, place of its first piece in `pieces`, number of them
    pieces: list[int]  # partials, token by token; there are as many partials


@dataclass(frozen=True, slots=True)
class Table:
    """What all windows have in common."""

    rows: Sequence[Row]
    page_size: int
    starts: list[int]  # per row: its first query token
    offsets: list[int]  # per row: where its page table begins
    positions: list[int]  # per query token
    tokens: list[int]  # all query tokens in order, then those of each run
    runs: list[tuple[Run, int]]  # and where a run's tokens begin in `tokens`
    own: list[int]  # per row: its first key that is in no run


def table(rows: Sequence[Row], page_size: int, most: int) -> Table:
    """most: queries of a row that may share; a row of more fills a tile of its own anyway. 0: nothing is shared."""
    starts: list[int] = []
    offsets: list[int] = []
    positions: list[int] = []
    place = 0
    for row in rows:
        starts.append(len(positions))
        offsets.append(place)
        place += width(row, page_size)
        if row.parents is None:
            positions += range(row.context, row.context + row.queries)
        else:
            positions += [row.context + depth for depth in ancestry_depths(row)]
    tokens = list(range(len(positions)))
    own = [0] * len(rows)
    runs = []
    for run in _runs(rows, page_size, most):
        runs.append((run, len(tokens)))
        for i in run.members:
            tokens += range(starts[i], starts[i] + rows[i].queries)
            own[i] = run.end * page_size
    return Table(rows, page_size, starts, offsets, positions, tokens, runs, own)


def width(row: Row, page_size: int) -> int:
    """Pages of a row that are in use: its table may be longer."""
    return -(-(row.context + row.queries) // page_size)


def ancestry_depths(row: Row) -> list[int]:
    """How deep each node of a tree is; a chain's are 0, 1, 2..."""
    if row.parents is None:
        return list(range(row.queries))
    depths: list[int] = []
    for parent in row.parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def masks(row: Row) -> list[tuple[int, int]]:
    """Per node of a tree two words of 64 bits: bit i of the first says whether it sees node i, of the second node 64 + i."""
    if row.parents is None or row.queries > NODES:
        raise ValueError(f"a tree has at most {NODES} nodes, not {row.queries}")
    sees: list[int] = []
    for i, parent in enumerate(row.parents):
        sees.append((sees[parent] if parent >= 0 else 0) | 1 << i)
    return [(bits & (1 << 64) - 1, bits >> 64) for bits in sees]


def _runs(rows: Sequence[Row], page_size: int, most: int) -> Iterator[Run]:
    """Longer runs come after those that they continue."""
    able = [i for i, row in enumerate(rows) if row.queries <= most]
    full = [row.context // page_size for row in rows]
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
            end = _common(rows, together, alike, min(full[i] for i in together))
            if end - begin >= least:
                yield Run(together, begin, end)
                waiting.append((together, end, end))
            else:
                waiting.append((together, begin, end))


def _common(rows: Sequence[Row], members: list[int], begin: int, end: int) -> int:
    """Up to which page before `end` the tables of `members` are alike, given that they are before `begin`."""
    tables = [list(rows[i].pages[begin:end]) for i in members]
    low, high = min(tables), max(tables)  # whatever all others share, these two do
    alike, differ = 0, end - begin + 1
    while differ - alike > 1:
        middle = (alike + differ) // 2
        if low[alike:middle] == high[alike:middle]:
            alike = middle
        else:
            differ = middle
    return begin + alike


def kind_of(tiles: Sequence[Tile], rows: int) -> int:
    """The smallest tile that holds so many rows, or the largest."""
    return next((kind for kind, tile in enumerate(tiles) if tile.rows >= rows), len(tiles) - 1)


def segments(table: Table, window: int, tiles: Sequence[Tile], ratio: int) -> list[Segment]:
    """ratio: query heads of a key head."""
    return [*_common_segments(table, window, tiles, ratio), *_own_segments(table, window, tiles, ratio)]


def _common_segments(table: Table, window: int, tiles: Sequence[Tile], ratio: int) -> Iterator[Segment]:
    for run, first in table.runs:
        begin, end = run.begin * table.page_size, run.end * table.page_size
        begin = _first_key(begin, min(table.rows[i].context for i in run.members), window)
        if begin >= end:
            continue
        pages = table.offsets[run.members[0]]
        count = sum(table.rows[i].queries for i in run.members)
        kind = kind_of(tiles, count * ratio)
        most = tiles[kind].rows // ratio
        for at in range(0, count, most):
            yield Segment(first + at, min(most, count - at), pages, begin, end, end, -1, kind, True)


def _own_segments(table: Table, window: int, tiles: Sequence[Tile], ratio: int) -> Iterator[Segment]:
    together = _reading_together(table, window)
    for i, row in enumerate(table.rows):
        start = table.starts[i]
        kind = kind_of(tiles, row.queries * ratio)
        most = tiles[kind].rows // ratio
        tree = -1 if row.parents is None else start
        for at in range(0, row.queries, most):
            count = min(most, row.queries - at)
            lowest = table.positions[start + at] if tree < 0 else min(table.positions[start + at : start + at + count])
            begin = _first_key(table.own[i], lowest, window)
            end = row.context + at + count  # a node's ancestors are before it, in a tree as well
            yield Segment(start + at, count, table.offsets[i], begin, end, row.context, tree, kind, i in together)


def _reading_together(table: Table, window: int) -> set[int]:
    """Rows some of whose keys are read together with other rows."""
    return {
        i
        for run, _ in table.runs
        for begin in [_first_key(run.begin * table.page_size, min(table.rows[i].context for i in run.members), window)]
        if begin < run.end * table.page_size
        for i in run.members
    }


def _first_key(begin: int, position: int, window: int) -> int:
    """The first key from `begin` that a query at `position` may see, or a few before it."""
    return max(begin, (position - window + 1) // ALIGNMENT * ALIGNMENT) if window else begin


def longest(parts: Sequence[Segment], kv_heads: int, processors: int) -> int:
    """Keys of the longest item that lets all processors finish at about the same time."""
    total = sum(part.end - part.begin for part in parts) * kv_heads
    share = -(-total // (processors * ITEMS_PER_PROCESSOR))
    return -(-max(share, SHORTEST_ITEM) // ALIGNMENT) * ALIGNMENT


def work(table: Table, parts: Sequence[Segment], tiles: Sequence[Tile], limit: int, fixed: bool) -> Work:
    """Items of at most `limit` keys. fixed: cut at its multiples, so that a row's cuts don't depend on its neighbours."""
    items: tuple[list[Item], ...] = tuple([] for _ in tiles)
    found: dict[int, list[int]] = {}
    partials = 0
    for part in parts:
        cuts = list(_cuts(part, tiles[part.kind].keys, limit, fixed))
        merged = part.shared or len(cuts) > 1
        for begin, end in cuts:
            partial = partials if merged else -1
            items[part.kind].append(Item(part.first, part.queries, part.pages, begin, end, part.context, part.tree, partial))
            if merged:
                for token in table.tokens[part.first : part.first + part.queries]:
                    found.setdefault(token, []).append(partials)
                    partials += 1
    for kind in items:
        kind.sort(key=lambda item: item.begin - item.end)
    entries: list[tuple[int, int, int]] = []
    pieces: list[int] = []
    for token, own in found.items():
        entries.append((token, len(pieces), len(own)))
        pieces += own
    return Work(items, entries, pieces)


def _cuts(part: Segment, keys: int, limit: int, fixed: bool) -> Iterator[tuple[int, int]]:
    begin, end = part.begin, part.end
    if fixed:
        inner = range((begin // limit + 1) * limit, end, limit)
        yield from zip([begin, *inner], [*inner, end], strict=True)
        return
    parts = -(-(end - begin) // limit)
    length = -(-(end - begin) // (parts * keys)) * keys
    for at in range(begin, end, length):
        yield at, min(at + length, end)
