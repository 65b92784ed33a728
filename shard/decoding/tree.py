"""A tree of draft tokens that may follow a sequence's last one. Plain ints; knows no sequence, no page and no model.

    the last token ──┬── 0 ──┬── 1 ── 2        node i holds tokens[i]; parents[i] < i, and -1 is the sequence's last token
                     │       └── 3             depth-first, and of siblings the most probable first: so the most probable chain
                     └── 4                     is in the first slots, and nothing has to be moved when it is accepted

Each path occurs once: siblings hold different tokens. A chain is a tree.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from itertools import accumulate

from ...kernels import attention

# The most drafts in a tree. With the sequence's last token they are the 128 nodes that attention's ancestor bit masks cover.
MOST_NODES = 127
ROOT = -1


@dataclass(frozen=True, slots=True)
class DraftToken:
    """A draft token together with the distribution that it was drawn from."""

    token: int
    source: int  # row of the step's draft probabilities that it was drawn from; -1: it was proposed with certainty


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree of drafts in depth-first order, which `chain`, `lay` and `merge` establish."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()  # of the whole path to each node by its proposer; no node's is above its parent's

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether no node has a sibling; also true of an empty tree."""
        return self.parents == tuple(range(-1, len(self) - 1))

    @property
    def depths(self) -> list[int]:
        """The depth of each node; 0 directly after the sequence's last token."""
        return attention.depths(self.parents)

    @property
    def children(self) -> list[list[int]]:
        """The children of the sequence's last token, then of every node: `children[1 + i]` are those of node i."""
        found: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents):
            found[parent + 1].append(node)
        return found

    def query(self, lacking: int) -> list[int] | None:
        """The parents for a span of the sequence's `lacking` last tokens followed by the nodes; None for a chain."""
        if self.is_chain:
            return None
        return [*range(-1, lacking - 1), *(lacking + parent for parent in self.parents)]

    def accepted(self, picked: Listing[int | None]) -> list[int]:
        """The accepted path: nodes that match the tokens picked after the sequence's last token (`picked[0]`) and after every node
        (`picked[1 + i]`)."""
        place = {(parent, token): node for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))}
        path: list[int] = []
        node = ROOT
        while True:
            token = picked[node + 1]
            if token is None or (node, token) not in place:
                return path
            node = place[node, token]
            path.append(node)

    def trial(self, path: Listing[int]) -> tuple[list[int], list[int]]:
        """The acceptance trials of a verified tree: for each accepted node its rank among its siblings; and the number of siblings
        at each depth where one could be accepted, one more than ranks if the last siblings were all rejected."""
        children = self.children
        families = [children[node + 1] for node in (ROOT, *path)]
        ranks = [family.index(node) for family, node in zip(families, path, strict=False)]
        return ranks, [len(family) for family in families if family]

    def cut(self, nodes: int) -> "Tree":
        """The tree of the `nodes` most probable nodes, in the same order."""
        if len(self) <= nodes:
            return self
        best = sorted(range(len(self)), key=lambda node: (-self.logprobs[node], node))[:nodes]  # a parent before its children
        kept = sorted(best)
        number = {ROOT: ROOT} | {node: i for i, node in enumerate(kept)}
        return Tree(
            tuple(self.tokens[node] for node in kept),
            tuple(number[self.parents[node]] for node in kept),
            tuple(self.logprobs[node] for node in kept),
        )


def chain(tokens: Iterable[int], logprobs: Iterable[float] | None = None) -> Tree:
    """A chain of tokens. logprobs: of each, given those before it."""
    listed = tuple(tokens)
    each = [0.0] * len(listed) if logprobs is None else list(logprobs)
    assert len(each) == len(listed)
    return Tree(listed, tuple(range(-1, len(listed) - 1)), tuple(accumulate(each)))


def lay(tokens: Listing[int], parents: Listing[int], logprobs: Listing[float]) -> tuple[Tree, list[int]]:
    """Lays out nodes given in any order, parents before children, depth-first; returns the tree, and for each of its nodes the old
    index.

    logprobs: of whole paths. One above its parent's, as rounding produces them, is lowered to it.
    """
    lowered: list[float] = []
    families: list[list[int]] = [[] for _ in range(len(tokens) + 1)]
    for node, (parent, logprob) in enumerate(zip(parents, logprobs, strict=True)):
        assert ROOT <= parent < node, f"node {node} stands before its parent {parent}"
        lowered.append(min(logprob, lowered[parent] if parent >= 0 else 0.0))
        families[parent + 1].append(node)
    if all(len(family) <= 1 for family in families):
        return Tree(tuple(tokens), tuple(parents), tuple(lowered)), list(range(len(tokens)))
    order: list[int] = []
    waiting = [ROOT]
    while waiting:
        node = waiting.pop()
        if node != ROOT:
            order.append(node)
        waiting += sorted(families[node + 1], key=lambda child: (-lowered[child], child), reverse=True)
    number = {ROOT: ROOT} | {node: i for i, node in enumerate(order)}
    return (
        Tree(
            tuple(tokens[node] for node in order),
            tuple(number[parents[node]] for node in order),
            tuple(lowered[node] for node in order),
        ),
        order,
    )


def merge(trees: Iterable[Tree]) -> Tree:
    """The union of all trees' paths. A path that several propose gets the highest of their probabilities."""
    place: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    logprobs: list[float] = []
    for tree in trees:
        number = {ROOT: ROOT}
        for node, (token, parent, logprob) in enumerate(zip(tree.tokens, tree.parents, tree.logprobs, strict=True)):
            key = number[parent], token
            if key not in place:
                place[key] = len(tokens)
                tokens.append(token)
                parents.append(key[0])
                logprobs.append(logprob)
            number[node] = place[key]
            logprobs[place[key]] = max(logprobs[place[key]], logprob)
    return lay(tokens, parents, logprobs)[0]


def moves(path: Listing[int]) -> list[tuple[int, int]]:
    """The KV cache moves for an accepted path: (from, to) as slots after the sequence's last token, to be done one after the other
    in this order. Empty if the path is the first chain."""
    return [(node, place) for place, node in enumerate(path) if node != place]
