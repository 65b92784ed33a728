"""The interface of decoding strategies (plain sampling, speculative decoding, beam search): three methods that say which spans a
group runs, how its logits are sampled, and what the tokens lead to. A new method of decoding is a new file with a class that has
them."""

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from ..sequence import Group, Sequence
from ..step import Span
from .expansion import Candidate
from .sampler import Pick, Row

NOT_FINITE = "the model's logits are not finite numbers: non_finite_logits"


class Finish(IntEnum):
    """Why a sequence ended, by the wire protocol's numbers."""

    NOT = 0
    END = 1  # its last token is one of the group's end tokens
    LENGTH = 2  # max_new_tokens is reached


def finish_of(group: Group, pick: Pick, generated: int) -> Finish:
    """Whether a sequence ends with this token. generated: its output tokens, this one included."""
    if pick.complete or pick.token in group.end_ids:
        return Finish.END
    return Finish.LENGTH if generated >= group.max_new_tokens else Finish.NOT


@dataclass(slots=True)  # created many times a step: frozen ones take three times as long
class Emitted:
    """A new output token of one of a group's sequences."""

    choice: int
    pick: Pick
    finish: Finish


@dataclass(frozen=True, slots=True)
class Grown:
    """What a beam search step led to, for clients that watch the beams. Each entry: (rank of the parent beam, token, score)."""

    live: list[tuple[int, int, float]]  # best first
    complete: list[tuple[int, int, float]]  # completed in this step, and among the best complete ones
    length: int  # output tokens of each, the new one included


@dataclass(slots=True)
class Verdict:
    """The outcome of a step for a group: new tokens, ended sequences, surviving beams, and the moves in the KV cache."""

    emitted: Listing[Emitted] = ()
    ended: Listing[Sequence] = ()  # nothing more comes of them: their pages are freed
    children: Listing[Candidate] = ()  # of surviving beams, which replace all sequences, if there are any
    scores: list[float] | None = None  # of the answers, once a beam search has ended
    grown: Grown | None = None
    searched: int = 0  # output tokens of each beam, while a beam search goes on
    failure: str = ""  # why the group can't go on
    # (sequence, from, to): positions whose keys and values are moved, in this order
    moves: Listing[tuple[Sequence, int, int]] = ()
    drafted: int = 0  # draft tokens that were verified ...
    accepted: int = 0  # ... and those that were accepted
    # per sequence: (depths at which there were drafts to accept, depths at which one was accepted)
    trials: Listing[tuple[int, int]] = ()


class Strategy(Protocol):
    """A decoding strategy. Stateless: a group's state is in its sequences."""

    def draft(self, group: Group) -> list[Span]:
        """The spans to run in the next decode step, each following what its sequence has computed. Every wanted row is sampled as
        `rows` says."""

    def rows(self, group: Group) -> list[Row]:
        """Sampling parameters: one row for each wanted row of `draft`; or one for each choice that waits, all sampled from the
        prompt's last row. In beam search the picks are candidates instead, chosen among all rows together, as many as the search
        considers."""

    def judge(self, group: Group, picks: Listing[Pick | None]) -> Verdict:
        """Applies the rows' picks to the group's sequences, whose spans are computed by now. Choices that waited have begun."""
