"""Drafting with a draft model: grows a tree (or chain) of draft tokens from its logits, in rounds over all sequences at once. What
computes the logits is behind the protocol `Model`.

For `gumbel` a node's children are the top tokens by the draft model's logits with the noise that the target will sample with at the
same output position: where the two models agree, they draw the same token. A child's probability is taken from the same perturbed
logits, and from the logits themselves where there is no noise. For `rejection` children are independent draws from the draft
model's distribution, which may repeat.
"""

from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.sampling import first_largest
from ..sequence import Sequence
from .proposers import DraftRequest, Proposal
from .sampler import Row, draws_of, noised, penalized
from .tree import ROOT, DraftToken, lay
from .verify import Draft, VerificationRule, distributions, propose, row


@dataclass(slots=True)  # created many times a step: frozen ones take three times as long
class Frontier:
    """Nodes of a sequence's growing tree after which the draft model's logits are wanted."""

    sequence: Sequence
    tokens: Listing[int]  # of all nodes so far, in the order in which they were added
    parents: Listing[int]  # of each node; -1: the sequence's last token
    nodes: Listing[int]  # the nodes wanted; in the first round [-1]. None is wanted twice.


class Model(Protocol):
    """A draft model. It may cache what it computes of a sequence, as far as it has been asked for it."""

    def ready(self, sequences: Listing[Sequence]) -> list[bool]:
        """Which sequences it can draft for in this step. The others lag too far behind to be computed at once; part of that is
        computed here."""

    def logits(self, wanted: Listing[Frontier]) -> Tensor:
        """Logits after the wanted nodes, one group of nodes after the other: [nodes of all, the target's vocabulary] float32; -inf
        for tokens that it doesn't know, and that a grammar excludes. Nodes that were wanted before are computed already; what it
        lacks of the sequence it computes first."""


@dataclass(slots=True)
class GrowingTree:
    """A draft tree under construction: nodes in the order in which they were added."""

    asked: DraftRequest
    fixed: bool  # its shape may not depend on what is drawn
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the whole path to each node
    depths: list[int] = field(default_factory=list)  # 0 directly after the sequence's last token
    place: dict[tuple[int, int], int] = field(default_factory=dict)  # (parent, token) > node
    drawn: dict[int, list[DraftToken]] = field(default_factory=dict)  # draws, by parent
    layer: list[int] = field(default_factory=lambda: [ROOT])  # nodes added last
    open: list[int] = field(default_factory=lambda: [ROOT])  # nodes that have no children yet and may get some

    def path(self, node: int) -> list[int]:
        """The tokens from the root to a node."""
        tokens = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def best(self, nodes: Listing[int]) -> list[int]:
        """Those of `nodes` that are among the most probable of all, as many as are asked for in the tree."""
        order = sorted(range(len(self.tokens)), key=lambda node: (-self.logprobs[node], node))
        kept = {ROOT, *order[: self.asked.nodes]}
        return [node for node in nodes if node in kept]

    def expand(self, nodes: Listing[int]) -> None:
        """Marks nodes as expanded: their children are added next."""
        self.open = [node for node in self.open if node not in nodes]
        self.layer = []

    def add(self, parent: int, token: int, logprob: float) -> None:
        """Adds a child unless it is there. logprob: of the token, given its parent."""
        if (parent, token) in self.place:
            return
        node = self.place[parent, token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.logprobs.append(logprob + (self.logprobs[parent] if parent >= 0 else 0.0))
        self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
        self.layer.append(node)
        if self.depths[node] + 1 < self.asked.depth:
            self.open.append(node)


@dataclass(slots=True)  # created many times a step: frozen ones take three times as long
class Place:
    """A node that is to be expanded."""

    growing: GrowingTree
    node: int
    width: int  # children wanted


class TreeShape(Protocol):
    """A growth policy: decides which nodes are expanded in each round."""

    rounds: int  # the most rounds

    def children(self, growing: GrowingTree) -> list[tuple[int, int]]:
        """The nodes to expand in the next round, with the number of children for each; empty: the tree is complete."""


class LayeredTree:
    """A tree of fixed width by layer, <k1, ..., km>: every node of layer i gets k_i children. A chain is <1, ..., 1>."""

    def __init__(self, widths: Listing[int]) -> None:
        self.widths = tuple(widths)
        self.rounds = len(self.widths)

    def children(self, growing: GrowingTree) -> list[tuple[int, int]]:
        """See TreeShape. If the tree exceeds what is asked for, the least probable nodes are left out; where the shape may not
        depend on what is drawn, layers are narrower and fewer instead."""
        if not growing.layer:
            return []
        depth = growing.depths[growing.layer[0]] + 1 if growing.layer[0] != ROOT else 0
        widths = self._narrowed(growing.asked.nodes) if growing.fixed else self.widths
        if depth >= min(len(widths), growing.asked.depth):
            return []
        return [(node, widths[depth]) for node in (growing.layer if growing.fixed else growing.best(growing.layer))]

    def _narrowed(self, nodes: int) -> list[int]:
        """The widths, reduced so that there are at most this many nodes."""
        widths: list[int] = []
        layer = 1
        for width in self.widths:
            own = min(width, nodes // layer)
            if not own:
                break
            widths.append(own)
            layer *= own
            nodes -= layer
        return widths


class BestFirstTree:
    """A dynamic tree: in every round the most probable unexpanded nodes are expanded, and of all nodes the most probable are kept.
    Not for `rejection`: what is expanded and kept depends on what was drawn."""

    def __init__(self, rounds: int, deepest: int = 0, together: int = 4, width: int = 4) -> None:
        """deepest: the greatest depth, if not the number of rounds; together: nodes expanded in one round; width: children of
        each."""
        self.rounds = rounds
        self._deepest = deepest or rounds
        self._together = together
        self._width = width

    def children(self, growing: GrowingTree) -> list[tuple[int, int]]:
        """See TreeShape. Nodes whose children could not be kept are not expanded."""
        able = [node for node in growing.open if node == ROOT or growing.depths[node] + 1 < self._deepest]
        own = {node: growing.logprobs[node] if node != ROOT else 0.0 for node in growing.best(able)}
        best = sorted(own, key=lambda node: (-own[node], node))
        return [(node, self._width) for node in best[: self._together]]


class Drafting:
    """A proposer that grows trees from a draft model's logits."""

    def __init__(self, model: Model, shape: TreeShape, rule: VerificationRule = VerificationRule.GUMBEL) -> None:
        assert rule is not VerificationRule.REJECTION or isinstance(shape, LayeredTree), (
            "rejection needs a shape that doesn't depend on draws"
        )
        self._model = model
        self._shape = shape
        self._rule = rule

    def propose(self, asked: Listing[DraftRequest]) -> Proposal:
        """See Proposer."""
        growing = [GrowingTree(one, self._rule is VerificationRule.REJECTION) for one in asked]
        ready = self._model.ready([one.sequence for one in asked])
        able = [one for one, there in zip(growing, ready, strict=True) if there and one.asked.nodes and one.asked.depth]
        probabilities: list[Tensor] = []
        for _ in range(self._shape.rounds):
            chosen = [(one, self._shape.children(one)) for one in able]
            chosen = [(one, some) for one, some in chosen if some]
            if not chosen:
                break
            self._round(chosen, probabilities)
        drafts = [_draft(one) for one in growing]
        return Proposal(drafts, torch.cat(probabilities) if probabilities else None)

    def _round(self, chosen: Listing[tuple[GrowingTree, list[tuple[int, int]]]], probabilities: list[Tensor]) -> None:
        """Expands nodes, given as (node, number of children). probabilities: the distributions drawn from so far; extended here."""
        logits = self._model.logits(
            [Frontier(one.asked.sequence, one.tokens, one.parents, [node for node, _ in some]) for one, some in chosen]
        )
        places = [Place(one, node, width) for one, some in chosen for node, width in some]
        rows = [row(place.growing.asked.group, place.growing.asked.sequence, place.growing.path(place.node)) for place in places]
        for one, some in chosen:
            one.expand([node for node, _ in some])
        drawn = [i for i, own in enumerate(rows) if self._rule is VerificationRule.REJECTION and own.sampling.temperature > 0]
        sure = sorted(set(range(len(rows))) - set(drawn))
        if not drawn:
            _add_best(places, logits, rows)
        elif sure:
            _add_best([places[i] for i in sure], logits[sure], [rows[i] for i in sure])
        if drawn:
            first = sum(map(len, probabilities))
            probabilities.append(_add_drawn([places[i] for i in drawn], logits[drawn], [rows[i] for i in drawn], first))


def _add_best(places: Listing[Place], logits: Tensor, rows: Listing[Row]) -> None:
    tokens, logprobs = best(logits, rows, max(place.width for place in places))
    for place, own, values in zip(places, tokens.tolist(), logprobs.tolist(), strict=True):
        for token, logprob in zip(own[: place.width], values[: place.width], strict=True):
            if logprob > -torch.inf:
                place.growing.add(place.node, token, logprob)


def _add_drawn(places: Listing[Place], logits: Tensor, rows: Listing[Row], first: int) -> Tensor:
    """Adds drawn children; returns the distributions drawn from, of which row 0 is source number `first`."""
    probabilities = distributions(logits, rows)
    tokens = propose(probabilities, draws_of(rows, logits.device), max(place.width for place in places))
    logprobs = probabilities.gather(1, tokens).log()
    for source, (place, own, values) in enumerate(zip(places, tokens.tolist(), logprobs.tolist(), strict=True), first):
        place.growing.drawn[place.node] = [DraftToken(token, source) for token in own[: place.width]]
        for token, logprob in zip(own[: place.width], values[: place.width], strict=True):
            place.growing.add(place.node, token, logprob)
    return probabilities


def _draft(growing: GrowingTree) -> Draft:
    """The draft for the target: laid out depth-first, and cut to what was asked for."""
    tree, order = lay(growing.tokens, growing.parents, growing.logprobs)
    if not growing.drawn:
        return Draft(tree.cut(growing.asked.nodes))
    return Draft(tree, tuple(tuple(growing.drawn.get(node, ())) for node in (ROOT, *order)))


def best(logits: Tensor, rows: Listing[Row], width: int) -> tuple[Tensor, Tensor]:
    """The top tokens of each row under its sampling noise, and their log-probabilities given the noise: [rows, width] each, or
    narrower for a smaller vocabulary; -inf where a row's filters leave no more."""
    found = []
    for part, noisy in noised(penalized(logits, rows), rows):
        columns, values = _largest(noisy.log_softmax(-1), width)
        found.append((part.rows, columns if part.ids is None else part.ids.gather(1, columns), values))
    if len(found) == 1:  # of all rows, in their order
        return found[0][1:]
    ids = torch.zeros(len(rows), width, dtype=torch.int64, device=logits.device)
    logprobs = torch.full((len(rows), width), -torch.inf, device=logits.device)
    for lines, tokens, values in found:
        ids[lines, : values.shape[1]], logprobs[lines, : values.shape[1]] = tokens, values
    return ids, logprobs


def _largest(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Columns and values of each row's largest numbers: [rows, width] each, or fewer if the row is shorter."""
    if width == 1:
        columns = first_largest(scores).unsqueeze(1)
        return columns, scores.gather(1, columns)
    values, columns = scores.topk(min(width, scores.shape[1]))
    return columns, values
