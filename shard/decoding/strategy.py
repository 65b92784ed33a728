"""How a group goes on: three verbs. A new method of decoding is a new file with a class that has them."""

from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from ..sequence import Group, Sequence
from ..step import Span
from .sampler import Pick, Row

NOT_FINITE = "the model's logits are not finite numbers: non_finite_logits"


class Finish(IntEnum):
    """Why a sequence ended, in the numbers of the wire."""

    NOT = 0
    END = 1  # its last token is one of the group's end tokens
    LENGTH = 2  # max_new_tokens are there


def finish_of(group: Group, pick: Pick, generated: int) -> Finish:
    """Whether a sequence ends with this token, after which it has generated so many."""
    if pick.complete or pick.token in group.end_ids:
        return Finish.END
    return Finish.LENGTH if generated >= group.max_new_tokens else Finish.NOT


@dataclass(slots=True)  # many a step: frozen ones take three times as long to make
class Emitted:
    """A new token of one of a group's sequences."""

    choice: int
    pick: Pick
    finish: Finish


@dataclass(slots=True)  # many a step: frozen ones take three times as long to make
class Child:
    """A beam that lives on: a parent's tokens, and another."""

    parent: Sequence
    token: int
    score: float
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Grown:
    """What a step made of beams, as (rank of the beam before, token, score)."""

    live: list[tuple[int, int, float]]  # best first
    complete: list[tuple[int, int, float]]  # that were completed and are among the best
    length: int  # generated tokens of each, with this one


@dataclass(slots=True)
class Verdict:
    """What a step meant for a group."""

    emitted: list[Emitted]
    ended: list[Sequence]  # nothing more will come of them
    children: list[Child] = field(default_factory=list)  # what takes the place of all sequences, if there are any
    scores: list[float] | None = None  # of the answers of a search that has ended
    grown: Grown | None = None
    searched: int = 0  # tokens of each beam of a search that goes on
    failure: str = ""  # why the group can't go on
    moves: list[tuple[Sequence, int, int]] = field(default_factory=list)  # keys and values, from place to place, in this order
    drafted: int = 0  # drafts that were computed ...
    accepted: int = 0  # ... and those of them that stay
    trials: list[tuple[int, int]] = field(default_factory=list)  # of each sequence: depths at which there were any to stay; did


class Strategy(Protocol):
    """Stateless: what a group remembers is in its sequences."""

    def draft(self, group: Group) -> list[Span]:
        """The spans to run in the next decode step, each on top of what its sequence has computed. Every wanted row is sampled as
        `rows` says."""

    def rows(self, group: Group) -> list[Row]:
        """How logits become picks: one per wanted row of `draft`; or one per waiting choice, all from the prompt's last row. For
        beams, whose picks come from all rows together, as many candidates as their search looks at."""

    def judge(self, group: Group, picks: Listing[Pick | None]) -> Verdict:
        """Takes the picks of the rows into the group's sequences, whose spans are computed. Choices that waited have begun."""
