"""Simulated KV page pool with a prefix cache, as counts: a trie without objects per page. Knows paths and numbers; no group, no
token.

Content that may be shared is a path of named segments. A segment is a `Chain` of pages, of which the first so many exist, and the
first so many of those are held. Whoever holds a page holds all pages before it, so that a few integers per chain say everything.

Unused chains are evicted least recently used first, each from its end. A chain's unused end counts as used whenever somebody
releases its beginning: the one difference to a trie that knows single pages.
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

ENDLESS = 1 << 60

Names = Iterable[tuple[Hashable, int]]  # segments: a name, and the page where it ends


@dataclass(slots=True, eq=False)
class Chain:
    """A segment. Positions are pages, counted from the beginning of the path."""

    parent: "Chain | None"
    key: tuple[int, Hashable]
    start: int
    end: int  # pages from start to here exist
    pinned: int  # those from start to here are held
    holds: dict[int, int] = field(default_factory=dict)  # by position: number of holds up to there
    children: "dict[tuple[int, Hashable], Chain]" = field(default_factory=dict)
    users: int = 0  # holds that have it in their path


@dataclass(slots=True, eq=False)
class Hold:
    """What one sequence, or the common part of several, holds: full pages of a path, and perhaps a page that is not full yet."""

    path: list[tuple[Chain, int]]  # each with the position up to which it is followed
    start: int  # pages before this belong to another hold
    pages: int  # position: full pages from start to here are held
    own: int = 0  # private pages: 0 or 1

    @property
    def held(self) -> int:
        """Pages held."""
        return self.pages - self.start + self.own


class Pages:
    """The pool. `caching`: pages that are released stay in the trie until others are needed."""

    def __init__(self, pages: int, caching: bool = True) -> None:
        self.pages = pages
        self.unused = pages
        self.cached = 0  # in the trie, held by nobody
        self.evicted = 0  # so far
        self.caching = caching
        self._root = Chain(None, (0, None), 0, 0, 0)
        # chains with pages that nobody holds. The least recently used first, children before parents
        self._stale: dict[Chain, None] = {}

    @property
    def free(self) -> int:
        """Pages that can be taken."""
        return self.unused + self.cached

    def hold(self, names: Names, below: Hold | None = None, start: int = 0) -> Hold:
        """A hold of nothing yet. `below`: the hold that it continues, from page `start` on, where that one's path ends."""
        hold = Hold([], start, start)
        if self.caching:
            chain, position = below.path[-1] if below and below.path else (self._root, 0)
            for name, end in names:
                if end > position:
                    chain = self._child(chain, position, name)
                    chain.users += 1
                    hold.path.append((chain, end))
                    position = end
        return hold

    def known(self, hold: Hold, limit: int) -> int:
        """Up to which page, at most `limit`, its path exists already."""
        position = hold.pages
        for chain, end in hold.path:
            if end > position:
                position = max(position, min(chain.end, end))
                if position < end or position >= limit:
                    break
        return min(position, limit)

    def adopt(self, hold: Hold, position: int) -> None:
        """Holds cached pages, up to `position`. A page that it had begun to compute itself is released."""
        self.unused += hold.own
        hold.own = 0
        self._follow(hold, position)

    def compute(self, hold: Hold, position: int, own: int) -> None:
        """Allocates missing full pages up to `position`, which enter the cache, and `own` private pages beyond."""
        needed = position - hold.pages - hold.own + own
        assert needed <= self.free, f"pages overcommitted: {needed} are needed, {self.free} are free"
        self.unused += hold.own
        self._follow(hold, position)
        self._take(own)
        hold.own = own

    def release(self, hold: Hold) -> None:
        """Releases all of a hold, which is not used again."""
        self.unused += hold.own
        if not self.caching:
            self.unused += hold.pages - hold.start
        for chain, end in reversed(hold.path):
            chain.users -= 1
            if hold.pages > chain.start:
                self._loosen(chain, min(end, hold.pages))
            self._forget(chain)
        hold.path, hold.own, hold.pages = [], 0, hold.start

    def withdraw(self, hold: Hold, name: Hashable) -> None:
        """Releases it, and drops its last segment from the cache, if that has this name: one that nobody shares."""
        chain = hold.path[-1][0] if hold.path else self._root
        self.release(hold)
        if chain.key[1] == name:
            self._wither(chain)

    def audit(self) -> None:
        """Recounts everything. AssertionError: the books are wrong."""
        held = sum(chain.pinned - chain.start for chain in self.chains())
        cached = sum(chain.end - chain.pinned for chain in self.chains())
        assert cached == self.cached, "cached pages"
        assert self.unused >= 0, "more pages than there are"
        assert held + cached + self.unused <= self.pages, "pages twice"
        for chain in self.chains():
            assert chain.pinned == max(chain.holds, default=chain.start)
            assert (chain.end > chain.pinned) == (chain in self._stale)
            assert chain.parent is not None
            assert chain.end == chain.start or chain.parent is self._root or chain.parent.end >= chain.start, "a hole in a path"
            assert chain.users or chain.children or chain.end > chain.start, "nobody needs it"

    def chains(self, below: Chain | None = None) -> Iterator[Chain]:
        """All chains."""
        for child in (below or self._root).children.values():
            yield child
            yield from self.chains(child)

    def _child(self, chain: Chain, position: int, name: Hashable) -> Chain:
        key = (position, name)
        child = chain.children.get(key)
        if child is None:
            child = chain.children[key] = Chain(chain, key, position, position, position)
        return child

    def _follow(self, hold: Hold, position: int) -> None:
        """Holds all pages up to `position`, and allocates those that do not exist."""
        if position <= hold.pages:
            return
        if not self.caching:
            self._take(position - hold.pages)
        else:
            for chain, end in hold.path:
                if position <= chain.start:
                    break
                if hold.pages < end:
                    self._tighten(chain, hold.pages, min(end, position))
        hold.pages = position

    def _tighten(self, chain: Chain, before: int, after: int) -> None:
        if before > chain.start:
            self._unhold(chain, before)
        chain.holds[after] = chain.holds.get(after, 0) + 1
        if after > chain.pinned:
            self.cached -= min(after, chain.end) - chain.pinned
            chain.pinned = after
            if after >= chain.end:
                self._stale.pop(chain, None)
                missing, chain.end = after - chain.end, after
                self._take(missing)

    def _loosen(self, chain: Chain, position: int) -> None:
        self._unhold(chain, position)
        pinned = max(chain.holds, default=chain.start) if position == chain.pinned else chain.pinned
        self.cached += chain.pinned - pinned
        chain.pinned = pinned
        if chain.end > pinned:
            self._stale.pop(chain, None)
            self._stale[chain] = None

    @staticmethod
    def _unhold(chain: Chain, position: int) -> None:
        if chain.holds[position] == 1:
            del chain.holds[position]
        else:
            chain.holds[position] -= 1

    def _take(self, count: int) -> None:
        while self.unused < count:
            chain = next(iter(self._stale), None)
            assert chain is not None, f"pages overcommitted: {count} are needed, {self.unused} are unused, none is cached"
            evicted = min(chain.end - chain.pinned, count - self.unused)
            self.evicted += evicted
            self._drop(chain, evicted)
        self.unused -= count

    def _wither(self, chain: Chain) -> None:
        for child in list(chain.children.values()):
            self._wither(child)
        if chain in self._stale:
            self._drop(chain, chain.end - chain.pinned)

    def _drop(self, chain: Chain, count: int) -> None:
        """Frees the last pages of a chain."""
        chain.end -= count
        self.cached -= count
        self.unused += count
        if chain.end == chain.pinned:
            del self._stale[chain]
            self._forget(chain)

    def _forget(self, chain: Chain) -> None:
        """Removes chains that are empty and in no path."""
        while chain.parent is not None and not (chain.users or chain.children or chain.end > chain.start):
            chain.parent.children.pop(chain.key, None)
            chain = chain.parent
