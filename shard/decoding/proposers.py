"""Draft proposers: the interface, n-gram lookup, and the merging of several. A proposer is asked for many sequences at once, and
may propose nothing for some of them.

Proposals never change the emitted tokens (by the rule `gumbel`) or their distribution (by `rejection`), only the speed. All ranks
need the same proposals: a proposer that only one rank can run has to send them to the others.
"""

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..sequence import Group, Sequence
from .lookup import NgramIndex, look_up
from .tree import Tree, merge
from .verify import Draft, deterministic_draft

# Tokens that are indexed for look-up in a step, some 5 us each: of each sequence, and of all together where some lack more than
# that, which wait for their drafts.
SHORT, CATCH_UP = 128, 2048


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request for drafts for one sequence."""

    group: Group
    sequence: Sequence
    nodes: int  # the most draft tokens
    depth: int  # the greatest depth


@dataclass(frozen=True, slots=True)
class Proposal:
    """The drafts proposed in a step."""

    drafts: list[Draft]  # one for each request
    probabilities: Tensor | None = None  # the distributions that `Draft.drawn` refers to


class Proposer(Protocol):
    """A source of draft tokens."""

    def propose(self, asked: Listing[DraftRequest]) -> Proposal:
        """A draft for each request, at most as large as asked for."""


class MergedProposer:
    """Several proposers whose paths are merged into one tree for each sequence; the most probable nodes are kept. Not for
    `rejection`: what is cut off depends on what was drawn."""

    def __init__(self, proposers: Listing[Proposer]) -> None:
        self._proposers = proposers

    def propose(self, asked: Listing[DraftRequest]) -> Proposal:
        """See Proposer."""
        trees: list[list[Tree]] = [[] for _ in asked]
        for proposer in self._proposers:
            for own, draft in zip(trees, proposer.propose(asked).drafts, strict=True):
                own.append(draft.tree)
        return Proposal([Draft(merge(own).cut(one.nodes)) for own, one in zip(trees, asked, strict=True)])


class NgramProposer:
    """N-gram lookup in the sequence's own tokens (see `lookup`)."""

    def propose(self, asked: Listing[DraftRequest]) -> Proposal:
        """See Proposer."""
        drafts, left = [], CATCH_UP
        for one in asked:
            index = one.sequence.ngram_index = one.sequence.ngram_index or NgramIndex()
            left -= index.follow(one.sequence.tokens, max(left, SHORT))
            whole = len(index.tokens) == len(one.sequence.tokens)
            drafts.append(deterministic_draft(look_up(index, one.nodes, one.depth)) if whole else Draft())
        return Proposal(drafts)
