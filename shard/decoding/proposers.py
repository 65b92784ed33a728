"""Who proposes drafts. A proposer is asked for many sequences at once, and may propose nothing for some of them.

What it proposes never changes what is emitted (by the rule `gumbel`) or its distribution (by `rejection`), only how soon. All ranks
have to propose the same: a proposer that only one of them can ask has to be told of by it.
"""

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..sequence import Group, Sequence
from .lookup import NgramIndex, look_up
from .tree import Tree, merge
from .verify import Draft, certain


@dataclass(frozen=True, slots=True)
class Asked:
    """What is wanted for a sequence."""

    group: Group
    sequence: Sequence
    nodes: int  # the most drafts
    depth: int  # the most of them on a path


@dataclass(frozen=True, slots=True)
class Proposed:
    """For a step."""

    drafts: list[Draft]  # one for each that was asked for
    probabilities: Tensor | None = None  # [sources, vocabulary] float32, that `Draft.drawn` speaks of


class Proposer(Protocol):
    """One way to guess."""

    def propose(self, asked: Listing[Asked]) -> Proposed:
        """At most what is asked for."""


class Merged:
    """Several proposers, whose paths make one tree per sequence; the most probable nodes stay. Not for `rejection`: what is cut off
    depends on what was drawn."""

    def __init__(self, proposers: Listing[Proposer]) -> None:
        self._proposers = proposers

    def propose(self, asked: Listing[Asked]) -> Proposed:
        """See Proposer."""
        trees: list[list[Tree]] = [[] for _ in asked]
        for proposer in self._proposers:
            for own, draft in zip(trees, proposer.propose(asked).drafts, strict=True):
                own.append(draft.tree)
        return Proposed([Draft(merge(own).cut(one.nodes)) for own, one in zip(trees, asked, strict=True)])


class Lookup:
    """What followed when a sequence's last tokens came before."""

    def propose(self, asked: Listing[Asked]) -> Proposed:
        """See Proposer."""
        drafts = []
        for one in asked:
            repeats = one.sequence.repeats = one.sequence.repeats or NgramIndex()
            repeats.follow(one.sequence.tokens)
            drafts.append(certain(look_up(repeats, one.nodes, one.depth)))
        return Proposed(drafts)
