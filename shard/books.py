"""Bookkeeping of a rank: which groups there are, in which batches, which KV pages they hold, and what was reported to the router.
All ranks keep the same books: the same commands and tokens lead to the same state. Knows no model and no logits.
"""

from array import array
from collections.abc import Container, Iterable
from collections.abc import Sequence as Listing
from itertools import islice

from .cache import Cache
from .decoding.strategy import NOT_FINITE
from .forks import BeamForks
from .host_pages import HostPages
from .outcome import Outcome
from .pages import PagePool
from .prefix import PrefixCache
from .prompts import Prompts
from .sequence import Group, Sequence
from .step import Run, Span


class Books:
    """The groups, batches and KV pages of one pool."""

    def __init__(self, pool: PagePool, cache: Cache, prefix_caching: bool, states: int | None, host: HostPages | None) -> None:
        """states: slots of recurrent states for the prefix cache, see `PrefixCache`; host: host memory for pages evicted from the
        pool, if any."""
        self.prefixes = PrefixCache(pool, states, host.places if host else 0, self.renew, prefix_caching)
        self.prompts = Prompts(pool, cache, self.prefixes, self.renew)
        self.forks = BeamForks(pool, cache, self.renew)
        self.batches: dict[int, dict[int, Group]] = {}  # of each batch its groups by uid, in order; none is empty
        self.groups: dict[int, Group] = {}  # of all batches, by uid
        self.changed: dict[int, Group] = {}  # groups whose standing may have changed, by uid
        self.moved = (0, 0)  # pages copied to host memory, and from there, since the last report
        self._pool = pool
        self._cache = cache
        self._host = host

    def members(self, batches: Iterable[int]) -> list[Group]:
        """The groups of these batches; unknown batches are skipped."""
        return [group for uid in dict.fromkeys(batches) if uid in self.batches for group in self.batches[uid].values()]

    def has(self, group: Group) -> bool:
        """Whether this very group is still there: another one may have its uid."""
        return self.groups.get(group.uid) is group

    def living(self, runs: Listing[Run]) -> list[Run]:
        """The runs whose groups are still there."""
        groups = self.groups
        return [run for run in runs if groups.get(run.group.uid) is run.group]

    def touch(self, runs: Listing[Run]) -> None:
        """Notes that the standing of the runs' groups may have changed."""
        self.changed |= {run.group.uid: run.group for run in runs}

    def join(self, batch: int, group: Group) -> None:
        """Adds a new group to a batch."""
        self.groups[group.uid] = self.changed[group.uid] = group
        self._place(batch, group)

    def concat(self, into: int, batches: Listing[int]) -> None:
        """Moves the groups of `batches` to the end of `into`."""
        for uid in batches:
            if uid != into and uid in self.batches:
                for group in self.batches.pop(uid).values():
                    self._place(into, group)

    def _place(self, batch: int, group: Group) -> None:
        group.batch = batch
        self.batches.setdefault(batch, {})[group.uid] = group

    def extend(self, group: Group, spans: Listing[Span]) -> None:
        """Allocates pages for spans, which count as computed from here on. Raises OutOfPages: then the group can only be
        dropped."""
        size = self._pool.page_size
        lacking: list[tuple[array[int], int]] = []
        for span in spans:
            sequence = span.sequence
            sequence.computed = end = span.start + len(span.tokens)
            if end > len(sequence.pages) * size:
                lacking.append((sequence.pages, -(-end // size) - len(sequence.pages)))
        if lacking:
            fresh = iter(self._pool.take(sum([count for _, count in lacking])))
            for pages, count in lacking:
                pages.extend(islice(fresh, count))
            group.counted = -1

    def renew(self, inherited: Container[int] = ()) -> None:
        """Prepares newly allocated pages; must be called before anything is written to or read from them. Old contents are copied
        to host memory, if the prefix cache may find them again, and zeroed; pages found on the host are copied back. inherited:
        pages that the next step overwrites as a whole, which need not be zeroed."""
        pages = self._pool.taken()
        if not pages:
            return
        if self._host is None:
            self._cache.clear(pages, inherited)
            return
        saves, loads = self.prefixes.offload.moves()
        self._host.save(saves)
        self._cache.clear(pages, inherited)
        self._host.load(loads)
        self.moved = (self.moved[0] + len(saves), self.moved[1] + len(loads))

    def publish(self, computed: Iterable[tuple[Group, Sequence]]) -> None:
        """Adds the full, computed pages of sequences of these groups to the prefix cache."""
        size = self._pool.page_size
        for group, sequence in computed if self.prefixes.enabled else ():
            published = sequence.node.depth if sequence.node else 0
            if sequence.computed >= (published + 1) * size:
                self.prefixes.publish(sequence)
                group.counted = -1

    def withdraw(self, group: Group) -> None:
        """Removes the group's pages from the prefix cache."""
        for sequence in group.sequences:
            self.prefixes.withdraw(sequence)

    def end(self, group: Group, ended: Listing[Sequence]) -> None:
        """Ends sequences of the group; with the last one, the group is dropped."""
        if len(ended) == len(group.sequences):
            self.drop(group)
        else:
            for sequence in ended:
                self.prompts.end(group, sequence)

    def end_choice(self, group: Group, choice: int) -> None:
        """Ends one of the group's choices, if it has that; with the last one, the group is dropped."""
        if choice in group.waiting:
            group.waiting.remove(choice)
            if not group.waiting:
                self.drop(group)
        elif not group.waiting and group.search is None:  # beams become choices only when they are complete
            self.end(group, [sequence for sequence in group.sequences if sequence.choice == choice])
            if self.has(group) and not group.lacking:  # else the next step settles it, or fails it if the pool is full
                self.prompts.settle(group)
        self.changed[group.uid] = group

    def fail(self, group: Group, why: str, outcome: Outcome) -> None:
        """Fails the group. What it computed stays in the prefix cache, unless non-finite logits are the reason."""
        outcome.fail(group, why)
        if why == NOT_FINITE:
            self.withdraw(group)
        self.drop(group)

    def drop(self, group: Group) -> Group:
        """Removes the group and releases its pages; its tokens stay in it."""
        home = self.batches[group.batch]
        del self.groups[group.uid], home[group.uid]
        if not home:
            del self.batches[group.batch]
        self.forks.disown(group)
        for sequence in group.sequences:
            self._pool.release(sequence.pages)
            sequence.clear()
        group.decodes = False
        return group

    def report(self, outcome: Outcome) -> None:
        """Reports the standing of groups where it has changed."""
        size = self._pool.page_size
        for uid, group in self.changed.items():
            if uid in self.groups:
                standing = group.standing(size)
                if standing != group.reported:
                    group.reported = standing
                    outcome.standing.append((uid, *standing))
        self.changed.clear()
        outcome.free, outcome.cached = self._pool.free, self._pool.cached
        (outcome.saved, outcome.loaded), self.moved = self.moved, (0, 0)
