"""KV offload policy: which evicted pages of the prefix cache have a copy in host memory. Plain ints, as in `pages`: all ranks run
it on the same commands and agree. `host_pages` has the copies.

A copy stays when its page comes back, so that evicting that page again costs nothing. When a place is needed, the one is dropped
whose page was evicted least recently, be it back or not. Pages are evicted leaf first, so a copy that is all there is of a page is
never dropped before those that follow it.
"""

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Listing
from typing import Generic, Protocol, TypeVar


class OffloadablePage(Protocol):
    """A cached page: a node of the trie."""

    page: int  # on the device; 0: it was evicted, and only the copy is left
    copy: int  # the place of its copy; 0: there is none


Node = TypeVar("Node", bound=OffloadablePage)


class Offload(Generic[Node]):
    """Assigns host places 1 to `places`, one page each."""

    def __init__(self, places: int, lost: Callable[[Node], object]) -> None:
        """lost: called with a node whose copy was dropped."""
        self.held: OrderedDict[int, Node] = OrderedDict()  # by place, least recently evicted first; as in `PagePool`
        self._lost = lost
        self._unused = list(range(places, 0, -1))
        self._saves: list[tuple[int, int]] = []
        self._loads: list[tuple[int, int]] = []
        self._loading: set[int] = set()  # places that must not be overwritten before their copy is loaded

    def save(self, node: Node) -> bool:
        """Called when its page is evicted. Returns whether there is a copy."""
        if node.copy:
            del self.held[node.copy]
        else:
            node.copy = self._take()
            if not node.copy:
                return False
            self._saves.append((node.page, node.copy))
        self.held[node.copy] = node
        return True

    def load(self, nodes: Listing[Node], take: Callable[[int], Listing[int]]) -> list[int]:
        """Allocates pages for nodes that have only copies, which the next `moves` load all at once. take: allocates pages."""
        self._loading = {node.copy for node in nodes}
        pages = list(take(len(nodes)))
        for node, page in zip(nodes, pages, strict=True):
            node.page = page
            self._loads.append((node.copy, page))
        return pages

    def drop(self, node: Node) -> None:
        """Drops a node's copy, which nobody can find any more."""
        place, node.copy = node.copy, 0
        if place:
            del self.held[place]
            self._unused.append(place)

    def moves(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Pending copies, in order: first all (page, place) to the host, then all (place, page) from it."""
        saves, self._saves = self._saves, []
        loads, self._loads = self._loads, []
        self._loading = set()
        return saves, loads

    def _take(self) -> int:
        """A free place; 0: there is none."""
        if not self._unused:
            node = next((node for place, node in self.held.items() if place not in self._loading), None)
            if node is None:
                return 0
            self.drop(node)
            self._lost(node)
        return self._unused.pop()
