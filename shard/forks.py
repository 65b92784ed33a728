"""Beam search's page bookkeeping: surviving beams keep or share KV pages (copy on write), the others release them. Knows pages and
sequences, no logits.

While a step is in flight only the device knows which beams survive. Then there are *heirs*: as many sequences as will survive, each
with a page of its own for what comes next. When the step lands they take the places of the group's sequences.
"""

from array import array
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Listing

from ..kernels.work_list import common_pages
from .cache import Cache
from .decoding.expansion import Candidate
from .pages import PADDING, PagePool, page_table
from .sequence import Group, Sequence
from .step import BeamFront, Span


def heirs(group: Group, width: int, page_size: int, source: int) -> list[Span]:
    """The heirs of a group whose step is in flight, and their next tokens, sampled as its rows from `source` on. Until it is known
    which beams they continue, they have no full pages but those that all beams share, and no references to these."""
    beams, first = group.sequences, group.sequences[0]
    full = first.computed // page_size
    group.settled = common_pages([beam.pages[:full] for beam in beams])
    front = BeamFront(beams, group.settled)
    pages = first.pages[: group.settled] + page_table([PADDING]) * (full - group.settled)
    group.heirs = [
        Sequence(array("I"), first.prompt_length, rank, first.cache_key, first.adapter, first.pictures, first.computed, pages[:])
        for rank in range(width)
    ]
    return [Span(heir, first.computed, (0,), source + rank, front) for rank, heir in enumerate(group.heirs)]


class BeamForks:
    """Forks beams of the groups on one pool. Page copies of a step are made together."""

    def __init__(self, pool: PagePool, cache: Cache, renew: Callable[[], object]) -> None:
        """renew: prepares newly allocated pages."""
        self.copied = 0  # rows copied for forks in all, without those that heirs take over
        self._pool = pool
        self._cache = cache
        self._renew = renew
        self._copies: list[tuple[int, int, int]] = []  # source page, target page, rows

    def fork(self, group: Group, children: Listing[Candidate]) -> None:
        """The children take the places of the group's sequences, which are computed all but for the new tokens. A parent's full
        pages are shared among its children; the rows of its last, partial one are copied for all but the last of them, or are
        copied already for heirs. Raises OutOfPages: then the group can only be dropped."""
        group.counted = -1
        group.sequences = self._inherited(group, children) if group.heirs else self._forked(group, children)
        for sequence, child in zip(group.sequences, children, strict=True):
            sequence.tokens.append(child.token)
            assert sequence.path is not None
            sequence.path.append(child.score, child.logprob, child.top, group.top_n > 0)

    def _forked(self, group: Group, children: Listing[Candidate]) -> list[Sequence]:
        full, rows = divmod(group.sequences[0].computed, self._pool.page_size)
        left = Counter(child.row for child in children)
        for row, sequence in enumerate(group.sequences):
            if row not in left:
                self._pool.release(sequence.pages)
                sequence.clear()
        fresh = iter(self._pool.take(len(children) - len(left)) if rows else ())
        grown: list[Sequence] = []
        for rank, child in enumerate(children):
            left[child.row] -= 1
            parent = sequence = group.sequences[child.row]
            if left[child.row]:
                sequence = parent.twin(full)
                self._pool.share(sequence.pages)
                if rows:
                    sequence.pages.append(next(fresh))
                    self._copies.append((parent.pages[full], sequence.pages[full], rows))
            sequence.choice = rank
            grown.append(sequence)
        return grown

    def _inherited(self, group: Group, children: Listing[Candidate]) -> list[Sequence]:
        full = group.sequences[0].computed // self._pool.page_size
        parents = {child.row for child in children}
        # If as many beams live on, the pages that all share keep their number of references.
        settled = group.settled if len(children) == len(group.sequences) else 0
        for row, sequence in enumerate(group.sequences):
            self._pool.release(sequence.pages[full if row in parents else settled :])
        # A parent has one reference to its full pages: its first heir takes over that, and its tokens; the others add one each.
        living = group.heirs[: len(children)]
        for heir, child in zip(living, children, strict=True):
            parent = group.sequences[child.row]
            heir.pages[:full], heir.node = parent.pages[:full], parent.node
            if child.row in parents:
                parents.remove(child.row)
                heir.tokens, heir.path, heir.counts = parent.tokens, parent.path, parent.counts
            else:
                assert parent.path is not None
                self._pool.share(heir.pages[settled:full])
                heir.tokens, heir.path = parent.tokens[:], parent.path.copy()
                heir.counts = parent.counts.copy() if parent.counts else None
        self._disown(group.heirs[len(children) :], full)
        group.heirs = []
        group.counted = group.settled + len({page for heir in living for page in heir.pages[group.settled :]})
        return living

    def disown(self, group: Group) -> None:
        """Releases the heirs' own pages and drops them."""
        self._disown(group.heirs, group.sequences[0].computed // self._pool.page_size)
        group.heirs = []

    def _disown(self, heirs: Listing[Sequence], full: int) -> None:
        for heir in heirs:
            self._pool.release(heir.pages[full:])
            heir.clear()

    def copy(self) -> None:
        """Makes the collected copies, once all groups of a step have forked."""
        if self._copies:
            self._renew()
            self._cache.copy(self._copies)
            self.copied += sum(rows for _, _, rows in self._copies)
            self._copies = []
