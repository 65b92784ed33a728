"""Page allocator of the KV cache (vLLM: block manager), with reference counts. Pure Python ints: all ranks run it on the same
commands and agree.

A page is held by any number of sequences, which is its reference count. A shared page is read-only; writes go only to slots at or
beyond `computed` of a page that one sequence holds alone. A page that nobody holds is free; if it is kept, its content is cached
and it is evicted only when there is no other, the least recently held first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listing

# Page 0 is never allocated: padding points there, and it stays zero.
PADDING = 0


def page_table(pages: Iterable[int] = ()) -> "array[int]":
    """A sequence's pages, in order: int32, so that the tables of a step are concatenated without an object for each page."""
    return array("i", pages)


class OutOfPages(Exception):
    """More pages are wanted than are free. The caller gets none of them."""


class PagePool:
    """Pages 1 to `pages` of `page_size` tokens each."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self.evicted: Callable[[int], object] = lambda page: None  # called with a cached page that is evicted
        self._unused = list(range(pages, 0, -1))  # a stack: low ids, and their memory, are reused first
        self._references = [0] * (pages + 1)
        self._kept = bytearray(pages + 1)
        # Kept and held by nobody, in the order in which they were released. A plain dict would look for its first entry among all
        # those that were deleted before it.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._taken: list[int] = []

    @property
    def free(self) -> int:
        """Pages that can be taken, cached ones included."""
        return len(self._unused) + len(self._cached)

    @property
    def cached(self) -> int:
        """Free pages whose content is cached."""
        return len(self._cached)

    def take(self, count: int) -> list[int]:
        """Allocates `count` pages, each held once. Raises OutOfPages, and takes none, if there are fewer."""
        if count > self.free:
            raise OutOfPages(f"the pool is full: {count} pages are needed, {self.free} of {self.pages} are free")
        taken = [self._unused.pop() if self._unused else self._evict() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        self._taken += taken
        return taken

    def taken(self) -> list[int]:
        """Pages allocated since the last call, still with what former holders left there."""
        taken, self._taken = self._taken, []
        return taken

    def share(self, pages: Listing[int]) -> None:
        """Adds a reference to each of `pages`, which are held or cached."""
        for page in pages:
            if not self._references[page]:
                assert page in self._cached, f"page {page} is free and can't be shared"
                del self._cached[page]
            self._references[page] += 1

    def release(self, pages: Listing[int]) -> None:
        """Drops a reference to each of `pages`, which follow each other in a sequence. The last goes first: so a cached page is
        never evicted before those that follow it."""
        for page in reversed(pages):
            assert self._references[page] > 0, f"page {page} is released twice"
            self._references[page] -= 1
            if not self._references[page]:
                if self._kept[page]:
                    self._cached[page] = None
                else:
                    self._unused.append(page)

    def extend(self, pages: "array[int]", tokens: int) -> None:
        """Appends to `pages`, a sequence's own, the pages that `tokens` tokens need. Raises OutOfPages, and changes nothing, if it
        can't."""
        pages.extend(self.take(max(0, -(-tokens // self.page_size) - len(pages))))

    def keep(self, page: int) -> None:
        """Marks a held page: it stays cached when nobody holds it any more."""
        assert self._references[page] > 0, f"page {page} is free and can't be kept"
        self._kept[page] = True

    def forget(self, page: int) -> None:
        """Unmarks a page: its content is not cached any more."""
        self._kept[page] = False
        if page in self._cached:
            del self._cached[page]
            self._unused.append(page)

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self._kept[page] = False
        self.evicted(page)
        return page
