"""How much to speculate: what drafts are worth for each sequence, and how many a step gets. Ints and floats; knows no sequence, no
model and no clock, so that all ranks that are told the same decide the same.

A draft is worth the probability that it is accepted: so many tokens more does the step bring. A step of B drafts for S sequences
takes seconds(B, rounds) and brings S + (the sum of what its drafts are worth). What is best is the highest of tokens per second,
none at all included; and what a latency target asks for comes before that (AdaServe: Li et al. 2025, arXiv:2501.12162).
"""

import heapq
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

# Of the statistics of acceptance. Depths beyond the last count as the last; ranks beyond it are worth nothing.
DEPTHS = 8
RANKS = 8
FORGET = 0.95  # what a trial weighs after the next one of its kind: some 20 of a sequence count ...
FORGET_ALL = 0.99  # ... and some 100 of all sequences together
FADE = 0.98  # what is known of a depth weighs after a step whose drafts ended above: else nobody would see that it has changed
PRIORS = [0.6 * 0.5**rank for rank in range(RANKS)]  # by rank, when those before were refused, before anything is known
TRUST = 8.0  # what is known from elsewhere weighs as much as so many trials
# A gain over not speculating that is within what measured costs are wrong by is none.
MARGIN = 1.03
FLOOR = 0.02  # tokens that a draft has to be worth to be considered
LEAST = 0.2  # tokens that each draft of a chain has to be worth where nobody knows what steps cost
# Steps without a draft after which a sequence gets one, to see whether guesses have become better; doubled each time they have not.
PATIENCE = 16
MOST_PATIENCE = 256
PROBING = 0.01  # of all time may go to that


@dataclass(slots=True)
class SuccessRate:
    """How often something came true, lately."""

    tried: float = 0.0
    true: float = 0.0

    def observe(self, true: bool, forget: float) -> None:
        """One trial. forget: what those before it weigh from now on."""
        self.tried = self.tried * forget + 1
        self.true = self.true * forget + true

    def fade(self) -> None:
        """There was none, though there could have been."""
        self.tried *= FADE
        self.true *= FADE

    def blended(self, known: float) -> float:
        """Its probability. known: as it is elsewhere."""
        return (TRUST * known + self.true) / (TRUST + self.tried)


class Acceptance:
    """How often drafts of a sequence were accepted, by depth and by rank among siblings, and how long none were tried."""

    def __init__(self, before: "Acceptance | None" = None) -> None:
        """before: what is known of other sequences, as it is whenever this is asked."""
        self._before = before
        self._forget = FORGET if before is not None else FORGET_ALL
        self._odds = [
            [SuccessRate() for _ in range(RANKS)] for _ in range(DEPTHS)
        ]  # of each, when those with lower ranks were refused
        self.waited = 0  # steps without a draft
        self.patience = PATIENCE
        self._trees = 0  # observed
        self._chain: tuple[tuple[int, int, int], DraftValue] | None = None  # of the last answer, and what it was computed from

    def observe(self, ranks: Listing[int], widths: Listing[int]) -> None:
        """A verified tree; see `Tree.trial`."""
        self._trees += 1
        for depth, width in enumerate(widths):
            good = ranks[depth] if depth < len(ranks) else width
            for rank, odds in enumerate(self._odds[min(depth, DEPTHS - 1)][: min(width, good + 1)]):
                odds.observe(rank == good, self._forget)
        for odds in self._odds[len(widths)] if 0 < len(widths) < DEPTHS else ():
            odds.fade()
        if self._before is not None:
            self._before.observe(ranks, widths)
        if widths:
            self.patience = PATIENCE if ranks else min(2 * self.patience, MOST_PATIENCE)

    def shares(self, depths: int, width: int = RANKS) -> list[list[float]]:
        """By depth and rank, the first `width` of these: the probability that of the siblings there the one with this rank is
        accepted, if it comes to them. No rank has more than the one before it.

        Where little was tried it is as at the depth above, and at the first depth as with other sequences.
        """
        known = self._first(width)
        result = [_shares(known)] if depths else []
        for depth in range(1, depths):
            if depth < DEPTHS:
                known = [odds.blended(share) for odds, share in zip(self._odds[depth][:width], known, strict=True)]
            result.append(_shares(known))
        return result

    def _first(self, width: int) -> list[float]:
        """By rank, after the sequence's last token: the probability of each, when those before it were refused."""
        known = self._before._first(width) if self._before is not None else PRIORS[:width]
        return [odds.blended(share) for odds, share in zip(self._odds[0][:width], known, strict=True)]

    def chain(self, most: int) -> "DraftValue":
        """Of the drafts of a chain."""
        asked = most, self._trees, self._before._trees if self._before is not None else 0
        if self._chain is None or self._chain[0] != asked:
            gains = list(accumulate((share[0] for share in self.shares(most, 1)), lambda reached, share: reached * share))
            self._chain = asked, DraftValue(gains, list(range(1, most + 1)))
        return self._chain[1]

    def tree(self, most: int, depth: int, width: int = RANKS) -> "DraftValue":
        """Of so many drafts at most, the best ones first, in a tree no deeper and with no more siblings than that."""
        width = min(width, RANKS)
        shares = self.shares(depth, width)
        worth = DraftValue([], [])
        waiting = [(-shares[0][0], 1, 0, 1.0)] if depth and width else []  # (-gain, depth, rank, what reaches its parent)
        while waiting and len(worth.gains) < most:
            gain, rounds, rank, reached = heapq.heappop(waiting)
            worth.gains.append(-gain)
            worth.rounds.append(rounds)
            if rank + 1 < width:
                heapq.heappush(waiting, (-reached * shares[rounds - 1][rank + 1], rounds, rank + 1, reached))
            if rounds < depth:
                heapq.heappush(waiting, (gain * shares[rounds][0], rounds + 1, 0, -gain))
        return worth


def _shares(odds: Listing[float]) -> list[float]:
    """Of all, from each one's when those before it were refused."""
    result: list[float] = []
    left = 1.0
    for own in odds:
        result.append(min(left * own, result[-1] if result else 1.0))
        left *= 1 - own
    return result


@dataclass(frozen=True, slots=True)
class DraftValue:
    """Of the drafts that a sequence may get, in the order in which it gets them."""

    gains: list[float]  # tokens that each adds to what a step is expected to bring; none is more than the one before
    rounds: list[int]  # of the draft model that each takes: its depth, from 1 on


@dataclass(frozen=True, slots=True)
class DraftDemand:
    """What a sequence could use."""

    worth: DraftValue
    needed: float = 0.0  # tokens that this step has to bring, by its latency target; 0: it has none


class Cost(Protocol):
    """What a step takes."""

    def seconds(self, drafts: int, rounds: int) -> float:
        """With so many drafts, for which the draft model ran so often. Never less with more."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """As the router fits it to measured steps."""

    step: float  # without drafts
    draft: float  # each: to be verified
    round: float = 0.0  # each run of the draft model
    first: float = 0.0  # that there are any: a step with drafts takes another way through the model

    def seconds(self, drafts: int, rounds: int) -> float:
        """See Cost."""
        return self.step + self.draft * drafts + self.round * rounds + (self.first if drafts else 0.0)


@dataclass(frozen=True, slots=True)
class Allowance:
    """What the router says of a step's drafts, alike on all ranks."""

    cost: LinearCost
    most: int  # drafts in all
    needed: dict[int, float] = field(default_factory=dict)  # by uid, as in `DraftDemand`; others have no latency target


def divide(wishes: Listing[DraftDemand], cost: Cost, most: int) -> tuple[list[int], int]:
    """How many drafts each sequence gets, `most` in all, and in how many rounds: no tree is to be deeper.

    First those with a latency target, the most urgent first, until what they are expected to get is what they need. Then whoever
    gains most, as long as that makes more tokens per second, by more than costs are wrong by.
    """
    counts = [0] * len(wishes)
    left, expected, rounds = most, float(len(wishes)), 0
    for i in sorted((i for i, wish in enumerate(wishes) if wish.needed > 1), key=lambda i: (-wishes[i].needed, i)):
        worth, own = wishes[i].worth, 1.0
        while own < wishes[i].needed and counts[i] < len(worth.gains) and left:
            own += worth.gains[counts[i]]
            rounds = max(rounds, worth.rounds[counts[i]])
            counts[i] += 1
            left -= 1
        expected += own - 1
    rest = [
        (gain, i, own_rounds)
        for i, wish in enumerate(wishes)
        for gain, own_rounds in zip(wish.worth.gains[counts[i] :], wish.worth.rounds[counts[i] :], strict=True)
        if gain >= FLOOR
    ]
    rest.sort(key=lambda one: -one[0])  # what is equal stays in order: nobody's second before its first
    taken, rounds = _most_per_second(rest, cost, most - left, left, expected, rounds)
    for i in taken:
        counts[i] += 1
    return counts, rounds


def _most_per_second(
    rest: Listing[tuple[float, int, int]], cost: Cost, given: int, left: int, expected: float, rounds: int
) -> tuple[list[int], int]:
    """Who gets one draft more, as often as it does; and rounds. rest: (gain, whose, rounds), the highest gain first."""
    best: tuple[list[int], int] = ([], rounds)
    highest = MARGIN * expected / cost.seconds(given, rounds)
    for limit in sorted({max(rounds, own) for _, _, own in rest}):
        taken = [(gain, i) for gain, i, own in rest if own <= limit][:left]
        tokens, count = expected, 0
        for number, (gain, _) in enumerate(taken, 1):
            tokens += gain
            rate = tokens / cost.seconds(given + number, limit)
            if rate > highest:
                highest, count = rate, number
        if count:
            best = ([i for _, i in taken[:count]], limit)
    return best


def worthwhile(acceptance: Acceptance, most: int) -> int:
    """How many drafts of a chain a sequence gets where nobody knows what steps cost. Counts the steps that it has none, after some
    of which it gets one, to see."""
    count = sum(gain >= LEAST for gain in acceptance.chain(most).gains)
    acceptance.waited = 0 if count else acceptance.waited + 1
    if most and acceptance.waited >= acceptance.patience:
        acceptance.waited, count = 0, 1
    return count


class Probes:
    """Drafts for sequences that have had none for long: without trials nobody would see that guesses have become better."""

    def __init__(self) -> None:
        self._saved = 0.0  # seconds that may be spent

    def add(self, acceptances: Listing[Acceptance], counts: list[int], rounds: int, cost: Cost) -> tuple[list[int], int]:
        """`counts` and `rounds` of a step, with one draft more for the sequence that has waited longest beyond its patience, if
        there is time for it. Counts the steps that they wait."""
        for acceptance, count in zip(acceptances, counts, strict=True):
            acceptance.waited = 0 if count else acceptance.waited + 1
        drafts = sum(counts)
        plain = cost.seconds(drafts, rounds)
        price = cost.seconds(drafts + 1, max(rounds, 1)) - plain
        self._saved = min(self._saved + PROBING * plain, price)
        late = [
            (acceptance.patience - acceptance.waited, i)
            for i, acceptance in enumerate(acceptances)
            if acceptance.waited >= acceptance.patience
        ]
        if not late or self._saved < price:
            return counts, rounds
        _, chosen = min(late)
        acceptances[chosen].waited = 0
        self._saved -= price
        return [count + (i == chosen) for i, count in enumerate(counts)], max(rounds, 1)
