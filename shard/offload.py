"""Which pages have a copy in the host's memory: of those that can be found again, when others take them. Plain ints, as in `pages`:
all ranks run it on the same commands and agree. `host_pages` has the copies.

A copy stays when its page comes back, so that it costs nothing to take that page once more. When a place is needed, the one goes
whose page was taken least recently, be it there again or not. Pages are taken leaf first, so a copy that is all there is of a page
is never given up before those that follow it.
"""

from collections.abc import Callable
from collections.abc import Sequence as Listing
from typing import Generic, Protocol, TypeVar


class Copied(Protocol):
    """A page that can be found: a node of the trie."""

    page: int  # on the device; 0: others have taken it, and the copy alone is left
    copy: int  # the place of its copy; 0: there is none


Node = TypeVar("Node", bound=Copied)


class Offload(Generic[Node]):
    """Places 1 to `places` for a page each."""

    def __init__(self, places: int, lost: Callable[[Node], object]) -> None:
        """lost: is told of a copy that was given up."""
        self.held: dict[int, Node] = {}  # by place, the one whose page was taken least recently first
        self._lost = lost
        self._unused = list(range(places, 0, -1))
        self._saves: list[tuple[int, int]] = []
        self._loads: list[tuple[int, int]] = []
        self._loading: set[int] = set()  # places that nothing else may be copied to before what is there has been

    def save(self, node: Node) -> bool:
        """Its page is taken. Returns whether there is a copy."""
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
        """Pages for these, whose copies alone are left, and go there with the next `moves`, at once. take: so many pages."""
        self._loading = {node.copy for node in nodes}
        pages = list(take(len(nodes)))
        for node, page in zip(nodes, pages, strict=True):
            node.page = page
            self._loads.append((node.copy, page))
        return pages

    def drop(self, node: Node) -> None:
        """Nobody will ask for it."""
        place, node.copy = node.copy, 0
        if place:
            del self.held[place]
            self._unused.append(place)

    def moves(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """What has to be copied, in order: first all (page, place) to the host, then all (place, page) from it."""
        saves, self._saves = self._saves, []
        loads, self._loads = self._loads, []
        self._loading = set()
        return saves, loads

    def _take(self) -> int:
        """A place; 0: there is none."""
        if not self._unused:
            node = next((node for place, node in self.held.items() if place not in self._loading), None)
            if node is None:
                return 0
            self.drop(node)
            self._lost(node)
        return self._unused.pop()
