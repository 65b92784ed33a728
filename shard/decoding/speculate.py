"""Speculative decoding: a step computes a sequence's last token and some draft tokens after it, and keeps those that plain decoding
would have emitted; see docs/speculation.md. Which proposer made the drafts, and how many there are, is decided elsewhere: this
module finds them in the sequences."""

from collections.abc import Sequence as Listing

from ..sequence import Group, Sequence
from ..step import Span
from .sampler import Pick, Row
from .strategy import NOT_FINITE, Emitted, Finish, Verdict
from .tree import Tree, moves
from .verify import accept, rows


class Speculate:
    """The strategy of speculative decoding; see Strategy. How rows are sampled depends on the verification rule: see
    `verify.pick`."""

    def draft(self, group: Group) -> list[Span]:
        """For each sequence, the tokens not computed yet, then its drafts."""
        spans = []
        for sequence in group.sequences:
            lacking, tree = sequence.tokens[sequence.computed :], sequence.draft
            tokens, parents = [*lacking, *tree.tokens], tree.query(len(lacking))
            spans.append(Span(sequence, sequence.computed, tokens, parents=parents, wanted=1 + len(tree), drafts=len(tree)))
        return spans

    def rows(self, group: Group) -> list[Row]:
        """For each sequence: after its last token, then after each draft."""
        return [row for sequence in group.sequences for row in rows(group, sequence, sequence.draft)]

    def judge(self, group: Group, picks: Listing[Pick | None]) -> Verdict:
        """Keeps the accepted tokens, and moves their keys and values to the slots where plain decoding would have written them."""
        emitted, ended = list[Emitted](), list[Sequence]()
        moved, trials = list[tuple[Sequence, int, int]](), list[tuple[int, int]]()
        first = drafted = kept = 0
        for sequence in group.sequences:
            tree, sequence.draft, sequence.tried = sequence.draft, Tree(), ()
            accepted = accept(group, sequence, tree, picks[first : first + 1 + len(tree)])
            first += 1 + len(tree)
            start = len(sequence.tokens)  # the position of the first draft
            if not accepted.picks:
                return Verdict(failure=NOT_FINITE)
            for place, pick in enumerate(accepted.picks, 1):
                sequence.tokens.append(pick.token)
                finish = accepted.finish if place == len(accepted.picks) else Finish.NOT
                emitted.append(Emitted(sequence.choice, pick, finish))
            # Recurrent state never advances over drafts: with such a state, accepted drafts are computed again in the next step.
            sequence.computed -= len(tree) - (0 if sequence.state else len(accepted.path))
            moved += [(sequence, start + source, start + target) for source, target in moves(accepted.path)]
            if accepted.finish:
                ended.append(sequence)
            if sequence.acceptance is not None:
                ranks, widths = tree.trial(accepted.right)
                if len(accepted.right) > len(accepted.path):
                    del widths[len(ranks) :]  # the sequence ended: nothing is learned of the drafts after that
                sequence.acceptance.observe(ranks, widths)
                trials.append((len(widths), len(ranks)))
            drafted += len(tree)
            kept += len(accepted.path)
        return Verdict(emitted, ended, moves=moved, drafted=drafted, accepted=kept, trials=trials)
