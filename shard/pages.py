"""Who holds which page of the key/value cache. Pure Python ints: all ranks run it on the same commands and agree.

A page is shared by its reference count. A shared page is read-only; writes go only to slots at or beyond `computed` of a
page that one sequence holds alone.
"""

from collections.abc import Iterable

# Page 0 is never given away: padding points there, and it stays zero.
PADDING = 0


class OutOfPages(Exception):
    """More pages are wanted than are free. Whoever asked gets none of them."""


class PagePool:
    """Pages 1 to `pages` of `page_size` tokens each."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self._free = list(range(pages, 0, -1))  # the last is taken first, so that low ids, and memory, are reused
        self._references = [0] * (pages + 1)

    @property
    def free(self) -> int:
        """Pages that can be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages, each held once. Raises OutOfPages, and takes none, if there are fewer."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages are needed, {len(self._free)} of {self.pages} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of `pages`, which are held already."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free and can't be shared"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each of `pages`; those without one are free."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is released twice"
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)

    def extend(self, pages: list[int], tokens: int) -> None:
        """Appends to `pages`, a sequence's own, what `tokens` tokens need. Raises OutOfPages, and changes nothing, if it can't."""
        pages += self.take(max(0, -(-tokens // self.page_size) - len(pages)))
