"""Speculative decoding: how many draft tokens each sequence gets in a step, by the budget, and which, by the proposers. The same on
all ranks.

A draft model runs on rank 0 only, which broadcasts the drafts. Pages for what it computes are allocated on all ranks.
"""

from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..proto.speculation import Speculation
from .decoding.budget import Acceptance, Allowance, DraftDemand, DraftValue, Probes, divide, worthwhile
from .decoding.growth import BestFirstTree, Drafting, LayeredTree, Model, TreeShape
from .decoding.proposers import DraftRequest, MergedProposer, NgramProposer, Proposal, Proposer
from .decoding.tree import Tree
from .decoding.verify import Draft, VerificationRule, room
from .forward import GraphExtent, Record
from .masks import Masks
from .pages import OutOfPages, PagePool
from .parallel import Ranks
from .sequence import Group, Sequence

# Runs of the draft model for a tree that grows best first.
ROUNDS = 8


class DraftModel(Model, Protocol):
    """A draft model as the engine uses it, on the rank that samples. `rounds` counts its forward passes; `later` are the seconds of
    those that were not a step's first."""

    rounds: int
    later: float
    recorded: bool  # whether its steps are worth CUDA graphs of their own

    @property
    def features(self) -> int:
        """Hidden features of each token that the target has to keep for it (EAGLE-style drafts); 0: it uses none."""

    @property
    def token_bytes(self) -> int:
        """Bytes per token for it: its own keys and values, and features."""

    def resize(self, pages: int, page_size: int, features: Tensor | None = None) -> None:
        """Starts anew with an empty cache of that size. features: where the target's are, [slots, features], if it uses them."""

    def forget(self, pages: Listing[int]) -> None:
        """The contents of these pages are no longer valid."""

    def compile(self, rows: int) -> None:
        """Compiles what steps of up to `rows` tokens need."""

    def record(self, record: Record, extent: GraphExtent, progress: Callable[[str], None]) -> None:
        """Records CUDA graphs of its steps, if that is worth it; see `forward`."""


class Speculator:
    """Drafting and verification settings of one engine: `rule` verifies what `proposer` proposes; `probabilities` are the draft
    distributions of the last step, for rejection sampling."""

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        speculation: Speculation | None = None,
        drafter: DraftModel | None = None,
        masks: Masks | None = None,
        levels: int = 0,
    ) -> None:
        """drafter: on rank 0, if there is a draft model; masks: grammar masks for its drafts; levels: the deepest tree that it can
        draft, known to all ranks; 0: no limit of its own."""
        self._speculation = speculation or Speculation()
        self._ranks = ranks
        self._device = device
        self._acceptance = Acceptance()  # of all sequences
        self._probes = Probes()
        self.drafter = drafter
        self.rule = VerificationRule(self._speculation.verify)
        self._deepest = min(levels or ROUNDS, ROUNDS)  # depth of a tree that grows best first
        self.proposer = _proposer(self._speculation, masks.kept_by(drafter) if masks and drafter else drafter, self._deepest)
        self.probabilities: Tensor | None = None

    @property
    def most(self) -> int:
        """Most drafts of a sequence in a step."""
        return self._speculation.most

    @property
    def trees(self) -> bool:
        """Whether drafts may be trees, not only chains."""
        return not self._speculation.chain

    @staticmethod
    def allowed(allowance: Allowance | None) -> bool:
        """Whether there may be drafts in a step."""
        return allowance is None or allowance.most > 0

    def ask(self, groups: Listing[Group], allowance: Allowance | None, pool: PagePool, chunk: int = 0) -> list[DraftRequest]:
        """How many drafts each sequence gets in the next step: limited by its group, by its pages, and by what they are worth.
        chunk: length of attention chunks in positions, for layers with chunked attention; 0: none."""
        asked = self._asked(groups, allowance, pool.page_size, chunk)
        return [one for one in asked if _extend(one, pool)] if self._speculation.draft else asked

    def propose(self, asked: Listing[DraftRequest]) -> tuple[int, float]:
        """Gives the sequences their drafts. Returns how often the draft model ran, and the seconds of its runs after the first."""
        rounds, later = (self.drafter.rounds, self.drafter.later) if self.drafter else (0, 0.0)
        several = self._ranks.size > 1 and self._speculation.draft  # n-grams are looked up on each rank by itself
        proposed = self._broadcast(asked) if several else self.proposer.propose(asked)
        self.probabilities = proposed.probabilities
        for one, draft in zip(asked, proposed.drafts, strict=True):
            one.sequence.draft, one.sequence.tried = draft.tree, draft.drawn
        return (self.drafter.rounds - rounds, self.drafter.later - later) if self.drafter else (0, 0.0)

    def forget(self, asked: Listing[DraftRequest]) -> None:
        """Drafting failed, so that there are no drafts: the draft model computes these sequences anew."""
        for one in asked:
            one.sequence.draft_progress = None
            if self.drafter:
                self.drafter.forget(one.sequence.pages)

    def _asked(self, groups: Listing[Group], allowance: Allowance | None, page_size: int, chunk: int) -> list[DraftRequest]:
        able, acceptances = list[DraftRequest](), list[Acceptance]()  # as much as each sequence may get
        for group in groups:
            for sequence in group.sequences:
                sequence.acceptance = sequence.acceptance or Acceptance(self._acceptance)
                depth = min(room(group, sequence), _before_border(sequence, chunk)) if chunk else room(group, sequence)
                if depth and group.drafts:
                    able.append(DraftRequest(group, sequence, min(group.drafts, _left(group, sequence, page_size)), depth))
                    acceptances.append(sequence.acceptance)
        if allowance is None:
            counts = [worthwhile(own, min(one.nodes, one.depth)) for own, one in zip(acceptances, able, strict=True)]
            rounds = max(counts, default=0)
        else:
            demands = [
                DraftDemand(self._worth(own, one), allowance.needed.get(one.group.uid, 0.0))
                for own, one in zip(acceptances, able, strict=True)
            ]
            counts, rounds = self._probes.add(acceptances, *divide(demands, allowance.cost, allowance.most), allowance.cost)
        return [replace(one, nodes=count, depth=min(one.depth, rounds)) for one, count in zip(able, counts, strict=True) if count]

    def _worth(self, acceptance: Acceptance, most: DraftRequest) -> DraftValue:
        """What drafts are worth for a sequence, by the shape of their tree."""
        asked = self._speculation
        if not asked.nodes and max(asked.widths, default=1) == 1:
            return acceptance.chain(min(most.nodes, most.depth, max(len(asked.widths), asked.ngram) or most.nodes))
        layers = max(self._deepest if asked.nodes else len(asked.widths), asked.ngram)
        return acceptance.tree(most.nodes, min(most.depth, layers), max(asked.widths, default=most.nodes))

    def _broadcast(self, asked: Listing[DraftRequest]) -> Proposal:
        """The drafts that rank 0 proposes, broadcast to all ranks."""
        proposed = self.proposer.propose(asked) if self.drafter else Proposal([Draft() for _ in asked])
        codes: list[int] = []
        for one, draft in zip(asked, proposed.drafts, strict=True):
            padding = [0] * (one.nodes - len(draft.tree))
            codes += [len(draft.tree), *draft.tree.tokens, *padding, *draft.tree.parents, *padding]
        received = iter(self._ranks.broadcast(torch.tensor(codes, device=self._device)).tolist())
        if self.drafter:
            return proposed
        return Proposal([Draft(_read(next(received), [next(received) for _ in range(2 * one.nodes)])) for one in asked])


def _proposer(asked: Speculation, model: Model | None, deepest: int) -> Proposer:
    if model is None:
        return NgramProposer()
    shape: TreeShape = BestFirstTree(ROUNDS, deepest) if asked.nodes else LayeredTree(asked.widths)
    drafting = Drafting(model, shape, VerificationRule(asked.verify))
    return MergedProposer([drafting, NgramProposer()]) if asked.ngram else drafting


def _left(group: Group, sequence: Sequence, page_size: int) -> int:
    """Nodes that a draft tree may have in the pages that the sequence may come to hold: `Group.grow` covers no others."""
    return -(-group.last // page_size) * page_size - len(sequence.tokens)


def _before_border(sequence: Sequence, chunk: int) -> int:
    """How deep a draft tree may be before the end of an attention chunk: it can't be cut there."""
    return chunk - 1 - (len(sequence.tokens) - 1) % chunk


def _extend(one: DraftRequest, pool: PagePool) -> bool:
    """Allocates pages for all nodes; returns False, and takes none, if there are too few."""
    try:
        before = len(one.sequence.pages)
        pool.extend(one.sequence.pages, len(one.sequence.tokens) + one.nodes)
    except OutOfPages:
        return False
    if len(one.sequence.pages) > before:
        one.group.counted = -1
    return True


def _read(count: int, codes: Listing[int]) -> Tree:
    """A tree decoded from rank 0's broadcast; the probabilities of its nodes are not needed any more."""
    half = len(codes) // 2
    return Tree(tuple(codes[:count]), tuple(codes[half : half + count]), (0.0,) * count)
