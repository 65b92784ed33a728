"""Beams part: who lives on keeps or shares pages, who doesn't gives them back. Knows pages and sequences, no logits."""

from collections import Counter
from collections.abc import Sequence as Listing

from .cache import Cache
from .decoding.strategy import Child
from .pages import PagePool
from .sequence import Group, Sequence


class Forks:
    """Of the groups on one pool. What a step has to copy is copied at once."""

    def __init__(self, pool: PagePool, cache: Cache) -> None:
        self.copied = 0  # rows, in all
        self._pool = pool
        self._cache = cache
        self._copies: list[tuple[int, int, int]] = []  # source page, target page, rows

    def fork(self, group: Group, children: Listing[Child], tops: bool) -> None:
        """The children take the places of the group's sequences, which are computed all but for the new tokens. A parent's full
        pages are shared among its children; the rows of its last, partial one are copied for all but the last of them.
        Raises OutOfPages: then the group can only be dropped."""
        left = Counter(id(child.parent) for child in children)
        for sequence in group.sequences:
            if id(sequence) not in left:
                self._pool.release(sequence.pages)
                sequence.clear()
        group.counted = -1
        full, rows = divmod(children[0].parent.computed, self._pool.page_size)
        fresh = iter(self._pool.take(len(children) - len(left)) if rows else ())
        grown: list[Sequence] = []
        for rank, child in enumerate(children):
            left[id(child.parent)] -= 1
            sequence = child.parent
            if left[id(child.parent)]:
                sequence = child.parent.twin(full)
                self._pool.share(sequence.pages)
                if rows:
                    sequence.pages.append(next(fresh))
                    self._copies.append((child.parent.pages[full], sequence.pages[full], rows))
            sequence.choice = rank
            grown.append(sequence)
        for sequence, child in zip(grown, children, strict=True):
            sequence.tokens.append(child.token)
            assert sequence.path is not None
            sequence.path.append(child.score, child.logprob, child.top, tops)
        group.sequences = grown

    def copy(self) -> None:
        """To be called when all groups of a step have parted."""
        if self._copies:
            self._cache.clear(self._pool.taken())
            self._cache.copy(self._copies)
            self.copied += sum(rows for _, _, rows in self._copies)
            self._copies = []
