"""Speculative decoding: a step computes a sequence's last token and some drafts of what follows, and keeps those that plain
decoding would have emitted; see docs/speculation.md. Who proposes drafts, and how many, is not known here: they are in the
sequences.
"""

from collections.abc import Sequence as Listing

from ..sequence import Group
from ..step import Span
from .sampler import Pick, Row
from .strategy import NOT_FINITE, Emitted, Finish, Verdict
from .tree import Tree, moves
from .verify import accept, rows


class Speculate:
    """See Strategy. How rows are picked is the rule's business: see `verify.pick`."""

    def draft(self, group: Group) -> list[Span]:
        """What is lacking of each sequence, and its drafts."""
        spans = []
        for sequence in group.sequences:
            lacking, tree = sequence.tokens[sequence.computed :], sequence.draft
            tokens = [*lacking, *tree.tokens]
            spans.append(Span(sequence, sequence.computed, tokens, tree.query(len(lacking)), 1 + len(tree), len(tree)))
        return spans

    def rows(self, group: Group) -> list[Row]:
        """Of each sequence's last token, then of its drafts."""
        return [row for sequence in group.sequences for row in rows(group, sequence, sequence.draft)]

    def judge(self, group: Group, picks: Listing[Pick | None]) -> Verdict:
        """Keeps what plain decoding would have emitted, and moves it to where plain decoding would have put it."""
        verdict = Verdict([], [])
        first = 0
        for sequence in group.sequences:
            tree, sequence.draft, sequence.tried = sequence.draft, Tree(), ()
            accepted = accept(group, sequence, tree, picks[first : first + 1 + len(tree)])
            first += 1 + len(tree)
            start = len(sequence.tokens)  # of the drafts' slots
            if not accepted.picks:
                return Verdict([], [], failure=NOT_FINITE)
            for place, pick in enumerate(accepted.picks, 1):
                sequence.tokens.append(pick.token)
                finish = accepted.finish if place == len(accepted.picks) else Finish.NOT
                verdict.emitted.append(Emitted(sequence.choice, pick, finish))
            # What a sequence remembers goes on by no guess, so of such a one those that are right are computed once more.
            sequence.computed -= len(tree) - (0 if sequence.state else len(accepted.path))
            verdict.moves += [(sequence, start + source, start + target) for source, target in moves(accepted.path)]
            if accepted.finish:
                verdict.ended.append(sequence)
            if sequence.acceptance is not None:
                ranks, widths = tree.trial(accepted.right)
                if len(accepted.right) > len(accepted.path):
                    del widths[len(ranks) :]  # an end says nothing of the drafts after it
                sequence.acceptance.observe(ranks, widths)
                verdict.trials.append((len(widths), len(ranks)))
            verdict.drafted += len(tree)
            verdict.accepted += len(accepted.path)
        return verdict
