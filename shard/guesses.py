"""What is guessed of each sequence for a step: how much, by the budget, and what, by the proposers. Alike on all ranks.

Where there is a draft model only rank 0 asks it, and tells the others. Pages for what it computes are taken by all.
"""

from collections.abc import Callable
from collections.abc import Sequence as Listing
from typing import Protocol

import torch
from torch import Tensor

from ..proto.speculation import Speculation
from .decoding.budget import Acceptance, Allowance, DraftDemand, DraftValue, Probes, divide, worthwhile
from .decoding.growth import BestFirstTree, Drafting, LayeredTree, Model, TreeShape
from .decoding.proposers import Asked, Lookup, Merged, Proposed, Proposer
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
    """A draft model as an engine has it, on the rank that samples. `rounds` counts its runs; `later` are the seconds of those that
    were not a step's first."""

    rounds: int
    later: float
    recorded: bool  # whether its steps are worth graphs of their own

    @property
    def features(self) -> int:
        """How many the target has to keep of each token; 0: it goes by none."""

    @property
    def token_bytes(self) -> int:
        """What a token takes for it: keys and values of its own, and features."""

    def resize(self, pages: int, page_size: int, features: Tensor | None = None) -> None:
        """Starts anew with an empty cache of that size. features: where the target's are, [slots, features], if it goes by them."""

    def forget(self, pages: Listing[int]) -> None:
        """What is in these pages is nobody's any more."""

    def compile(self, rows: int) -> None:
        """Makes steps of up to so many tokens ready to run."""

    def record(self, record: Record, extent: GraphExtent, progress: Callable[[str], None]) -> None:
        """Makes graphs of its steps, if that is worth it; see `forward`."""


class Guesses:
    """`rule` verifies what `proposer` proposes; `probabilities` are those of the last step's drafts, for the rule `rejection`."""

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        speculation: Speculation | None = None,
        drafter: DraftModel | None = None,
        masks: Masks | None = None,
        levels: int = 0,
    ) -> None:
        """drafter: on rank 0, if there is a draft model; masks: what its guesses keep grammars by; levels: how deep its trees may
        be, known to all ranks; 0: as deep as they grow."""
        self._speculation = speculation or Speculation()
        self._ranks = ranks
        self._device = device
        self._acceptance = Acceptance()  # of all sequences
        self._probes = Probes()
        self.drafter = drafter
        self.rule = VerificationRule(self._speculation.verify)
        self._deepest = min(levels or ROUNDS, ROUNDS)  # of a tree that grows best first
        self.proposer = _proposer(self._speculation, masks.kept_by(drafter) if masks and drafter else drafter, self._deepest)
        self.probabilities: Tensor | None = None

    @property
    def most(self) -> int:
        """Drafts of a sequence."""
        return self._speculation.most

    @property
    def trees(self) -> bool:
        """Whether they may be other than chains."""
        return not self._speculation.chain

    @staticmethod
    def allowed(allowance: Allowance | None) -> bool:
        """Whether there may be any in a step."""
        return allowance is None or allowance.most > 0

    def ask(self, groups: Listing[Group], allowance: Allowance | None, pool: PagePool, chunk: int = 0) -> list[Asked]:
        """How much is guessed in the next step: as much as a group may have, its sequences may still take, and is worth it. chunk:
        of positions of which some layers see no others; 0: there are none."""
        asked = self._asked(groups, allowance, pool.page_size, chunk)
        return [one for one in asked if _extend(one, pool)] if self._speculation.draft else asked

    def propose(self, asked: Listing[Asked]) -> tuple[int, float]:
        """Gives the sequences their drafts. Returns how often the draft model ran, and the seconds of its runs after the first."""
        rounds, later = (self.drafter.rounds, self.drafter.later) if self.drafter else (0, 0.0)
        proposed = self._told(asked) if self._speculation.draft else self.proposer.propose(asked)
        self.probabilities = proposed.probabilities
        for one, draft in zip(asked, proposed.drafts, strict=True):
            one.sequence.draft, one.sequence.tried = draft.tree, draft.drawn
        return (self.drafter.rounds - rounds, self.drafter.later - later) if self.drafter else (0, 0.0)

    def forget(self, asked: Listing[Asked]) -> None:
        """Proposing broke off, so that nothing is guessed: the draft model begins anew with these sequences."""
        for one in asked:
            one.sequence.draft_progress = None
            if self.drafter:
                self.drafter.forget(one.sequence.pages)

    def _asked(self, groups: Listing[Group], allowance: Allowance | None, page_size: int, chunk: int) -> list[Asked]:
        able = []
        for group in groups:
            for sequence in group.sequences:
                sequence.acceptance = sequence.acceptance or Acceptance(self._acceptance)
                depth = min(room(group, sequence), _before_border(sequence, chunk)) if chunk else room(group, sequence)
                if depth and group.drafts:
                    most = min(group.drafts, _left(group, sequence, page_size))
                    able.append((group, sequence, sequence.acceptance, most, depth))
        if allowance is None:
            counts = [worthwhile(acceptance, min(most, depth)) for _, _, acceptance, most, depth in able]
            rounds = max(counts, default=0)
        else:
            wishes = [
                DraftDemand(self._worth(acceptance, most, depth), allowance.needed.get(group.uid, 0.0))
                for group, _, acceptance, most, depth in able
            ]
            acceptances = [acceptance for _, _, acceptance, _, _ in able]
            counts, rounds = self._probes.add(acceptances, *divide(wishes, allowance.cost, allowance.most), allowance.cost)
        return [
            Asked(group, sequence, count, min(depth, rounds))
            for (group, sequence, _, _, depth), count in zip(able, counts, strict=True)
            if count
        ]

    def _worth(self, acceptance: Acceptance, nodes: int, depth: int) -> DraftValue:
        """Of what is proposed for a sequence."""
        asked = self._speculation
        if not asked.nodes and max(asked.widths, default=1) == 1:
            return acceptance.chain(min(nodes, depth, max(len(asked.widths), asked.ngram) or nodes))
        layers = max(self._deepest if asked.nodes else len(asked.widths), asked.ngram)
        return acceptance.tree(nodes, min(depth, layers), max(asked.widths, default=nodes))

    def _told(self, asked: Listing[Asked]) -> Proposed:
        """What rank 0 proposes."""
        if self._ranks.size == 1:
            return self.proposer.propose(asked)
        proposed = self.proposer.propose(asked) if self.drafter else Proposed([Draft() for _ in asked])
        codes: list[int] = []
        for one, draft in zip(asked, proposed.drafts, strict=True):
            padding = [0] * (one.nodes - len(draft.tree))
            codes += [len(draft.tree), *draft.tree.tokens, *padding, *draft.tree.parents, *padding]
        told = iter(self._ranks.tell(torch.tensor(codes, device=self._device)).tolist())
        if self.drafter:
            return proposed
        return Proposed([Draft(_read(next(told), [next(told) for _ in range(2 * one.nodes)])) for one in asked])


def _proposer(asked: Speculation, model: Model | None, deepest: int) -> Proposer:
    if model is None:
        return Lookup()
    growth: TreeShape = BestFirstTree(ROUNDS, deepest) if asked.nodes else LayeredTree(asked.widths)
    drafting = Drafting(model, growth, VerificationRule(asked.verify))
    return Merged([drafting, Lookup()]) if asked.ngram else drafting


def _left(group: Group, sequence: Sequence, page_size: int) -> int:
    """Nodes that a tree may have in the pages that the sequence may come to hold: `Group.grow` covers no others."""
    return -(-group.last // page_size) * page_size - len(sequence.tokens)


def _before_border(sequence: Sequence, chunk: int) -> int:
    """How deep a tree may be where a chunk of positions ends: it can't be cut there."""
    return chunk - 1 - (len(sequence.tokens) - 1) % chunk


def _extend(one: Asked, pool: PagePool) -> bool:
    """Pages for all nodes; False, and none, if there are too few."""
    try:
        before = len(one.sequence.pages)
        pool.extend(one.sequence.pages, len(one.sequence.tokens) + one.nodes)
    except OutOfPages:
        return False
    if len(one.sequence.pages) > before:
        one.group.counted = -1
    return True


def _read(count: int, codes: Listing[int]) -> Tree:
    """A tree as rank 0 told it; how probable its nodes are doesn't matter any more."""
    half = len(codes) // 2
    return Tree(tuple(codes[:count]), tuple(codes[half : half + count]), (0.0,) * count)
