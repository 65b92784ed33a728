"""A tree of drafts: tokens that may follow a sequence's last one. Plain ints; knows no sequence, no page and no model.

    the last token ──┬── 0 ──┬── 1 ── 2        node i holds tokens[i]; parents[i] < i, and -1 is the sequence's last token
                     │       └── 3             depth-first, and of siblings the most probable first: so the most probable chain
                     └── 4                     stands in the first slots, and nothing has to move when it is accepted

A path comes once: siblings hold different tokens. A chain is a tree.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from itertools import accumulate

from ...kernels import attention

# Drafts in a tree. Together with the sequence's last token they are the 128 nodes whose ancestors attention has bits for.
MOST_NODES = 127
ROOT = -1


@dataclass(frozen=True, slots=True)
class Drawn:
    """One try: a token that was proposed to follow."""

    token: int
    source: int  # the row of the step's draft probabilities that it was drawn from; -1: it was certain to be proposed


@dataclass(frozen=True, slots=True)
class Tree:
    """Made by `chain`, `lay` and `merge`, which see to the order."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()  # of the whole path to each node, as its proposer sees it; no node's is above its parent's

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether no node has a sibling. Nothing is a chain, too."""
        return self.parents == tuple(range(-1, len(self) - 1))

    @property
    def depths(self) -> list[int]:
        """0 for what follows the sequence's last token."""
        return attention.depths(self.parents)

    @property
    def children(self) -> list[list[int]]:
        """Of the sequence's last token, then of every node: `children[1 + i]` are those of node i."""
        found: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents):
            found[parent + 1].append(node)
        return found

    def query(self, lacking: int) -> list[int] | None:
        """The parents of a span that holds a sequence's `lacking` last tokens, then the nodes; None where it is a chain."""
        if self.is_chain:
            return None
        return [*range(-1, lacking - 1), *(lacking + parent for parent in self.parents)]

    def accepted(self, picked: Listing[int | None]) -> list[int]:
        """The path that follows the tokens picked after the sequence's last token (`picked[0]`) and after every node
        (`picked[1 + i]`), as far as there are nodes for them."""
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
        """What an accepted path says of the drafts: of each of its nodes the rank among its siblings; and the number of siblings
        at each depth where there were any to be accepted, one more than ranks if the last ones were all refused."""
        children = self.children
        families = [children[node + 1] for node in (ROOT, *path)]
        ranks = [family.index(node) for family, node in zip(families, path, strict=False)]
        return ranks, [len(family) for family in families if family]

    def cut(self, nodes: int) -> "Tree":
        """The most probable so many nodes, which are a tree. Their order stays."""
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
    """Tokens one after the other. logprobs: of each after those before it."""
    listed = tuple(tokens)
    each = [0.0] * len(listed) if logprobs is None else list(logprobs)
    assert len(each) == len(listed)
    return Tree(listed, tuple(range(-1, len(listed) - 1)), tuple(accumulate(each)))


def lay(tokens: Listing[int], parents: Listing[int], logprobs: Listing[float]) -> tuple[Tree, list[int]]:
    """The tree of nodes that stand in any order, parents before their children; and for each of its nodes the number that it had.

    logprobs: of whole paths. One that is above its parent's, as rounding makes them, is lowered to it.
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
    """All paths of all trees, each once. A path that several propose is as probable as the surest of them says."""
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
    """What an accepted path asks for: (from, to) in slots after the sequence's last token, in the order in which they are to be
    moved, one after the other. Nothing, if the path is the first chain."""
    return [(node, place) for place, node in enumerate(path) if node != place]
