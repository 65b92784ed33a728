"""Beam search with the exact semantics of transformers' generate(num_beams=...); see docs/beam-search.md.

Every live beam is a sequence of the group, best first. A step runs one token of each, and considers the best of all their
continuations: those that end a beam and rank among the first `width` become complete hypotheses, the best `width` of the others
live on.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Listing
from operator import attrgetter

from ..sequence import Group, Sequence
from ..step import Span
from .expansion import Candidate
from .hypotheses import Hypothesis, Path, Search
from .sample import sampling_of
from .sampler import Pick, Row
from .strategy import NOT_FINITE, Emitted, Finish, Grown, Verdict, finish_of

SCORE = attrgetter("score")
NOTHING = "no continuation of any beam is possible"


class BeamSearch:
    """The strategy of beam search; see Strategy."""

    def draft(self, group: Group) -> list[Span]:
        """One token of each beam: its last."""
        return [Span(s, s.computed, s.tokens[s.computed :]) for s in group.sequences]

    def rows(self, group: Group) -> list[Row]:
        """One row for each beam; the first step has one, after the prompt. A beam's rank is part of its noise's key."""
        sampling = sampling_of(group, group.sequences[0].tokens)
        return [
            Row(sampling, s.tokens, s.prompt_length, rank, group.top_n, counts=s.counts) for rank, s in enumerate(group.sequences)
        ]

    def judge(self, group: Group, picks: Listing[Pick | None]) -> Verdict:
        """Turns candidates into live beams and complete hypotheses. The picks are Candidates, in the order in which they are
        considered."""
        search, ends = _search(group), group.end_ids
        length = group.sequences[0].generated + 1
        last = length >= group.max_new_tokens
        live: list[Candidate] = []
        complete: list[Candidate] = []
        for rank, candidate in enumerate(picks):
            if candidate is None:
                return Verdict(failure=NOT_FINITE)
            assert isinstance(candidate, Candidate)
            if not (last or candidate.complete or candidate.token in ends):
                live.append(candidate)
            elif rank < search.width:
                complete.append(candidate)
        live.sort(key=SCORE, reverse=True)
        del live[search.width :]
        fresh = [_hypothesis(group, candidate, length) for candidate in complete]
        if fresh:
            search.keep(fresh)
        grown = _grown(search, live, zip(complete, fresh, strict=True), length) if search.watched else None
        if not live and not search.kept:
            return Verdict(failure=NOTHING)
        if not live or search.over(live[0].score, length, group.max_new_tokens):
            answers = search.kept[: search.wanted]
            rows = [row for choice, answer in enumerate(answers) for row in _rest(choice, answer, search.streamed)]
            return Verdict(rows, list(group.sequences), scores=[answer.score for answer in answers], grown=grown)
        emitted = _certain(group, live)
        search.streamed += len(emitted)
        return Verdict(emitted, children=live, grown=grown, searched=length)


def _search(group: Group) -> Search:
    assert group.search is not None
    return group.search


def _path(sequence: Sequence) -> Path:
    assert sequence.path is not None
    return sequence.path


def _hypothesis(group: Group, candidate: Candidate, length: int) -> Hypothesis:
    parent = group.sequences[candidate.row]
    tokens = parent.tokens[parent.prompt_length :]
    tokens.append(candidate.token)
    path = _path(parent).copy()
    path.append(candidate.score, candidate.logprob, candidate.top, group.top_n > 0)
    ended = finish_of(group, candidate, length) is Finish.END
    return Hypothesis(tokens, path, _search(group).final(candidate.score, length), ended)


def _certain(group: Group, live: Listing[Candidate]) -> list[Emitted]:
    """New tokens that are certain to be in the answer: the longest common prefix of the live beams and the kept hypotheses, beyond
    what was emitted before."""
    search, emitted = _search(group), []
    first, texts = live[0], [group.sequences[one.row].tokens for one in live]
    parent, path = group.sequences[first.row], _path(group.sequences[first.row])
    for place in range(search.streamed, parent.generated + 1):
        newest = place == parent.generated
        tokens = [one.token for one in live] if newest else [text[parent.prompt_length + place] for text in texts]
        token = tokens[0]
        same = tokens.count(token) == len(tokens) and all(
            place < len(kept.tokens) and kept.tokens[place] == token for kept in search.kept
        )
        if not same:
            break
        top = first.top if newest else (path.tops[place] if path.tops else ())
        emitted.append(Emitted(0, Pick(token, first.logprob if newest else path.logprobs[place], top), Finish.NOT))
    return emitted


def _rest(choice: int, answer: Hypothesis, streamed: int) -> list[Emitted]:
    """The tokens to emit at the end. Part of the best answer has been streamed (`streamed`); the others are emitted whole."""
    path, last = answer.path, len(answer.tokens) - 1
    finish = Finish.END if answer.ended else Finish.LENGTH
    return [
        Emitted(
            choice,
            Pick(answer.tokens[place], path.logprobs[place], path.tops[place] if path.tops else ()),
            finish if place == last else Finish.NOT,
        )
        for place in range(0 if choice else streamed, len(answer.tokens))
    ]


def _grown(search: Search, live: Listing[Candidate], complete: Iterable[tuple[Candidate, Hypothesis]], length: int) -> Grown:
    kept = {id(one) for one in search.kept}  # compared by identity, since others may have the same score
    return Grown(
        [(one.row, one.token, one.score) for one in live],
        [(one.row, one.token, fresh.score) for one, fresh in complete if id(fresh) in kept],
        length,
    )
