"""Prefix cache: a trie (radix tree) of KV pages whose edges are the tokens of one full page. Knows pages, no sequence and no
tensor.

A page's keys and values follow from its tokens and from all before them, so a path from the root identifies the content of its last
page exactly; nothing is hashed. Paths with different cache keys have different roots and never meet.

Whoever holds a page of the trie holds those on the way to it: what a sequence computes is put below the node of its page before,
and where the trie has a page of the same content already the sequence uses that one instead. So a page that nobody holds has
nothing below it that anybody holds, and pages, which are released last first, are evicted leaf first.

With recurrent layers a page is of no use without the state after it. A few nodes have a state (`states`), and only prefixes that
end at these are found.

With KV offload to host memory (`offload`), an evicted page stays in the trie, and is copied back when it is found. All nodes below
it are evicted ones, too.
"""

from array import array
from collections.abc import Callable
from typing import Protocol

from .offload import Offload
from .pages import PagePool, page_table


class Node:
    """A full page, identified by its tokens and its parent; a root is identified by its cache key and has no page."""

    __slots__ = ("attached", "children", "copy", "depth", "key", "page", "parent", "state")

    def __init__(self, key: bytes, page: int, parent: "Node | None") -> None:
        self.key = key
        self.page = page  # 0: it has none, or none on the device any more
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent else 0  # pages from the root to here, this one included
        self.children: dict[bytes, Node] = {}
        self.attached = True  # can be found
        self.state = 0  # slot of the recurrent state after its page; 0: none
        self.copy = 0  # place of its copy in host memory; 0: none


class Holder(Protocol):
    """What has tokens and pages for them: a sequence."""

    tokens: "array[int]"
    cache_key: str
    computed: int  # tokens whose keys and values are in `pages`, or will be when this step is over
    pages: "array[int]"
    state: int
    node: Node | None  # of its last full page; None: it has none in the trie


class PrefixCache:
    """The prefix cache of one pool."""

    def __init__(
        self,
        pool: PagePool,
        states: int | None = None,
        copies: int = 0,
        renew: Callable[[], object] = lambda: None,
        enabled: bool = True,
    ) -> None:
        """states: the most recurrent states to be kept, of models whose pages are of no use without one; copies: pages that fit in
        host memory, of other models; renew: performs pending copies; enabled: without it nothing is published, so nothing is
        found."""
        assert states is None or not copies
        self.enabled = enabled
        self.states: dict[int, Node] = {}  # by slot, least recently found first
        self.most = states
        self.offload: Offload[Node] = Offload(copies, self._copy_dropped)
        self._pool = pool
        self._renew = renew
        self._roots: dict[bytes, Node] = {}
        self._nodes: dict[int, Node] = {}  # by page
        pool.evicted = self._evicted

    def adopt(self, holder: Holder, limit: int) -> int:
        """Gives `holder` the cached pages of its next tokens, up to `limit` tokens, if they reach further than what it has
        computed. Returns how many tokens further."""
        node = holder.node or self._roots.get(holder.cache_key.encode())
        if node is None or not node.attached:
            return 0
        first, size = node.depth, self._pool.page_size
        found = self._walk(node, holder, limit)
        while self.most is not None and found and not found[-1].state:
            found.pop()
        if (first + len(found)) * size <= holder.computed:
            return 0
        found, pages = self._hold(found)
        gained = (first + len(found)) * size - holder.computed
        if gained <= 0:
            self._pool.release(pages)
            return 0
        self._pool.release(holder.pages[first:])
        holder.pages[first:] = page_table(pages)
        holder.computed += gained
        holder.node = found[-1]
        if holder.node.state:
            holder.state = holder.node.state
            self.states[holder.state] = self.states.pop(holder.state)
        return gained

    def _hold(self, path: list[Node]) -> tuple[list[Node], list[int]]:
        """As much of the path as there are pages for, and these pages, each with one more reference. Evicted ones are loaded from
        the host."""
        here = [node.page for node in path if node.page]
        self._pool.share(here)
        path = path[: len(here) + self._pool.free]
        back = path[len(here) :]
        if back:
            here += self.offload.load(back, self._pool.take)
            self._renew()  # before others get these pages, or places
        for node in back:
            self._place(node, node.page)
        return path, here

    def known(self, holder: Holder, limit: int) -> int:
        """How many of its first `limit` tokens are in cached pages, with or without a recurrent state after them."""
        root = self._roots.get(holder.cache_key.encode())
        return self._pool.page_size * len(self._walk(root, holder, limit)) if root is not None else 0

    def remember(self, holder: Holder) -> None:
        """Keeps the recurrent state after all of its tokens so far, which are full pages, so that they can be found. The sequence
        gets a copy of the state before it goes on."""
        node = holder.node
        if node is None or not node.attached or node.state or node.depth * self._pool.page_size != holder.computed:
            return
        if len(self.states) == self.most:
            self._drop_state(next(iter(self.states.values())))
        node.state, self.states[holder.state] = holder.state, node

    def _drop_state(self, node: Node) -> None:
        if node.state:
            del self.states[node.state]
            node.state = 0

    def publish(self, holder: Holder) -> None:
        """Adds all full pages of `holder` to the trie; where the trie has equal ones already, it uses these instead of its own."""
        self._publish(holder, swap=True)

    def announce(self, holder: Holder) -> None:
        """Like `publish`, before the pages are computed by the step that is planned; a page that would have to be swapped for an
        equal one is left for later, since the step writes to it."""
        self._publish(holder, swap=False)

    def withdraw(self, holder: Holder) -> None:
        """Removes the pages of `holder` from the trie, and what was computed on top of them."""
        top = holder.node
        if top is None or not top.attached:
            return
        while top.depth > 1 and top.parent:
            top = top.parent
        self._forget(top)

    def clear(self) -> None:
        """Empties the trie."""
        for top in [top for root in self._roots.values() for top in root.children.values()]:
            self._forget(top)

    def _forget(self, top: Node) -> None:
        self._cut(top)
        below = [top]
        while below:
            node = below.pop()
            below += node.children.values()
            node.attached = False
            self._drop_state(node)
            self.offload.drop(node)
            if node.page:
                del self._nodes[node.page]
                self._pool.forget(node.page)

    def _walk(self, node: Node, holder: Holder, limit: int) -> list[Node]:
        """The nodes of the holder's pages below `node`, up to `limit` tokens."""
        found, size = [], self._pool.page_size
        for start in range(node.depth * size, limit - size + 1, size):
            child = node.children.get(holder.tokens[start : start + size].tobytes())
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def _publish(self, holder: Holder, swap: bool) -> None:
        size = self._pool.page_size
        known = min(holder.computed, len(holder.tokens))  # the next step may be in flight, without a token that is not known yet
        if known < size or not self.enabled:
            return
        node = holder.node or self._root(holder.cache_key.encode())
        while node.attached and known >= (node.depth + 1) * size:
            start, page = node.depth * size, holder.pages[node.depth]
            key = holder.tokens[start : start + size].tobytes()
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, 0, node)
            if not child.page:
                self._place(child, page)
            elif child.page != page:
                if not swap:
                    break
                self._pool.share([child.page])
                self._pool.release([page])
                holder.pages[node.depth] = child.page
            holder.node = node = child

    def _root(self, key: bytes) -> Node:
        return self._roots.get(key) or self._roots.setdefault(key, Node(key, 0, None))

    def _place(self, node: Node, page: int) -> None:
        assert page not in self._nodes, f"page {page} has two contents"
        node.page, self._nodes[page] = page, node
        self._pool.keep(page)

    def _cut(self, node: Node) -> None:
        """Takes a node, and with it those below it, from its parent."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        if not parent.depth and not parent.children:
            del self._roots[parent.key]

    def _evicted(self, page: int) -> None:
        """Called when the pool evicts the page."""
        node = self._nodes.pop(page)
        assert not any(child.page for child in node.children.values()), f"page {page} is taken before those that follow it"
        saved = self.offload.save(node)
        node.page = 0
        if not saved:
            self._forget(node)

    def _copy_dropped(self, node: Node) -> None:
        """Called when a node's copy was dropped."""
        if not node.page:
            assert not node.children, "a copy is given up before those that follow it"
            self._forget(node)
