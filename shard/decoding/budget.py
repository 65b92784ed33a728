"""The speculation budget: what draft tokens are worth for each sequence, by how often its drafts were accepted, and how many drafts
a step gets. Ints and floats; knows no sequence, no model and no clock, so that all ranks that get the same numbers decide the same.

A draft is worth the probability that it is accepted: that many more tokens does the step bring. A step of B drafts for S sequences
takes seconds(B, rounds) and brings S + (the sum of what its drafts are worth). The best number of drafts, possibly none, is the one
with the most tokens per second; what a latency target needs comes before that (AdaServe: Li et al. 2025, arXiv:2501.12162).
"""

import heapq
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from itertools import accumulate

# Of the acceptance statistics. Depths beyond the last count as the last; ranks among siblings beyond it are worth nothing.
DEPTHS = 8
RANKS = 8
FORGET = 0.95  # weight of a trial after the next one of its kind: some 20 trials of a sequence count ...
FORGET_ALL = 0.99  # ... and some 100 of all sequences together
FADE = 0.98  # weight of a depth's statistics after a step whose drafts ended above it: else a change there would go unnoticed
# acceptance of each rank when the ranks before were rejected, before anything is known
PRIORS = [0.6 * 0.5**rank for rank in range(RANKS)]
TRUST = 8.0  # a prior estimate weighs as much as this many trials
# A gain over not speculating must be larger than this, the error of measured costs.
MARGIN = 1.03
FLOOR = 0.02  # expected tokens that a draft must bring to be considered
LEAST = 0.2  # expected tokens that each draft of a chain must bring where step costs are unknown
# Steps without drafts after which a sequence gets a trial draft, to see whether acceptance has improved; doubled after each
# rejected one.
PATIENCE = 16
MOST_PATIENCE = 256
PROBING = 0.01  # share of all time that trial drafts may take


@dataclass(slots=True)
class SuccessRate:
    """An exponentially decayed success rate of recent trials."""

    tried: float = 0.0
    true: float = 0.0

    def observe(self, true: bool, forget: float) -> None:
        """Counts one trial. forget: weight of the earlier trials from now on."""
        self.tried = self.tried * forget + 1
        self.true = self.true * forget + true

    def fade(self) -> None:
        """Decays the statistics after a step without a trial, though there could have been one."""
        self.tried *= FADE
        self.true *= FADE

    def blended(self, known: float) -> float:
        """The success probability, blended with a prior. known: the prior."""
        return (TRUST * known + self.true) / (TRUST + self.tried)


class Acceptance:
    """A sequence's draft acceptance statistics, by depth and by rank among siblings, and how many steps it has had no drafts."""

    def __init__(self, before: "Acceptance | None" = None) -> None:
        """before: statistics of all sequences together, the prior; they keep changing."""
        self._before = before
        self._forget = FORGET if before is not None else FORGET_ALL
        self._rates = [
            [SuccessRate() for _ in range(RANKS)] for _ in range(DEPTHS)
        ]  # of each rank, given that lower ranks were rejected
        self.waited = 0  # consecutive steps without drafts
        self.patience = PATIENCE
        self._trees = 0  # trees observed
        # the last result of `chain`, and what it was computed from
        self._chain: tuple[tuple[int, int, int], DraftValue] | None = None

    def observe(self, ranks: Listing[int], widths: Listing[int]) -> None:
        """Counts a verified tree. ranks, widths: see `Tree.trial`."""
        self._trees += 1
        for depth, width in enumerate(widths):
            good = ranks[depth] if depth < len(ranks) else width
            for rank, rate in enumerate(self._rates[min(depth, DEPTHS - 1)][: min(width, good + 1)]):
                rate.observe(rank == good, self._forget)
        for rate in self._rates[len(widths)] if 0 < len(widths) < DEPTHS else ():
            rate.fade()
        if self._before is not None:
            self._before.observe(ranks, widths)
        if widths:
            self.patience = PATIENCE if ranks else min(2 * self.patience, MOST_PATIENCE)

    def shares(self, depths: int, width: int = RANKS) -> list[list[float]]:
        """By depth and rank, the first `width` ranks: the probability that the sibling of this rank is accepted, given that its
        parent is. Non-increasing in rank.

        Where there were few trials it is as at the depth above, and at the first depth as for other sequences.
        """
        known = self._first(width)
        result = [_shares(known)] if depths else []
        for depth in range(1, depths):
            if depth < DEPTHS:
                known = [rate.blended(share) for rate, share in zip(self._rates[depth][:width], known, strict=True)]
            result.append(_shares(known))
        return result

    def _first(self, width: int) -> list[float]:
        """For the first depth, by rank: the acceptance of each, given that the ranks before it were rejected."""
        known = self._before._first(width) if self._before is not None else PRIORS[:width]
        return [rate.blended(share) for rate, share in zip(self._rates[0][:width], known, strict=True)]

    def chain(self, most: int) -> "DraftValue":
        """The value of the drafts of a chain, up to `most` of them."""
        asked = most, self._trees, self._before._trees if self._before is not None else 0
        if self._chain is None or self._chain[0] != asked:
            gains = list(accumulate((share[0] for share in self.shares(most, 1)), lambda reached, share: reached * share))
            self._chain = asked, DraftValue(gains, list(range(1, most + 1)))
        return self._chain[1]

    def tree(self, most: int, depth: int, width: int = RANKS) -> "DraftValue":
        """The value of up to `most` drafts, the best ones first, in a tree of at most this depth and this many siblings."""
        width = min(width, RANKS)
        shares = self.shares(depth, width)
        value = DraftValue([], [])
        # (-gain, depth, rank, probability that its parent is accepted)
        waiting = [(-shares[0][0], 1, 0, 1.0)] if depth and width else []
        while waiting and len(value.gains) < most:
            gain, rounds, rank, reached = heapq.heappop(waiting)
            value.gains.append(-gain)
            value.rounds.append(rounds)
            if rank + 1 < width:
                heapq.heappush(waiting, (-reached * shares[rounds - 1][rank + 1], rounds, rank + 1, reached))
            if rounds < depth:
                heapq.heappush(waiting, (gain * shares[rounds][0], rounds + 1, 0, -gain))
        return value


def _shares(rate: Listing[float]) -> list[float]:
    """Unconditional acceptance of each rank, from its acceptance given that those before it were rejected."""
    result: list[float] = []
    left = 1.0
    for own in rate:
        result.append(min(left * own, result[-1] if result else 1.0))
        left *= 1 - own
    return result


@dataclass(frozen=True, slots=True)
class DraftValue:
    """What the drafts that a sequence may get are worth, in the order in which it gets them."""

    gains: list[float]  # expected accepted tokens that each adds to a step; non-increasing
    rounds: list[int]  # draft model runs that each needs: its depth, from 1 on


@dataclass(frozen=True, slots=True)
class DraftDemand:
    """A sequence's demand for drafts in a step."""

    value: DraftValue
    needed: float = 0.0  # tokens that this step must bring to meet its latency target; 0: it has no target


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A linear cost model, which the router fits to measured steps. Seconds."""

    step: float  # a step without drafts
    draft: float  # the verification of each draft
    round: float = 0.0  # each run of the draft model
    first: float = 0.0  # added if there are any drafts: such a step takes another path through the model

    def seconds(self, drafts: int, rounds: int) -> float:
        """Seconds of a step with this many drafts, for which the draft model ran `rounds` times. Non-decreasing in both."""
        return self.step + self.draft * drafts + self.round * rounds + (self.first if drafts else 0.0)


@dataclass(frozen=True, slots=True)
class Allowance:
    """What the router allows a step's drafts to take, the same on all ranks."""

    cost: LinearCost
    most: int  # the most drafts in all
    # by uid, as in `DraftDemand`; sequences not listed have no latency target
    needed: dict[int, float] = field(default_factory=dict)


def divide(demands: Listing[DraftDemand], cost: LinearCost, most: int) -> tuple[list[int], int]:
    """The number of drafts for each sequence, `most` in all, and the number of rounds: no tree may be deeper.

    First come sequences with a latency target, the most urgent first, until their expected tokens meet it. Then whoever gains most,
    as long as that increases tokens per second by more than the error of costs.
    """
    counts = [0] * len(demands)
    left, expected, rounds = most, float(len(demands)), 0
    for i in sorted((i for i, demand in enumerate(demands) if demand.needed > 1), key=lambda i: (-demands[i].needed, i)):
        value, own = demands[i].value, 1.0
        while own < demands[i].needed and counts[i] < len(value.gains) and left:
            own += value.gains[counts[i]]
            rounds = max(rounds, value.rounds[counts[i]])
            counts[i] += 1
            left -= 1
        expected += own - 1
    rest = [
        (gain, i, own_rounds)
        for i, demand in enumerate(demands)
        for gain, own_rounds in zip(demand.value.gains[counts[i] :], demand.value.rounds[counts[i] :], strict=True)
        if gain >= FLOOR
    ]
    rest.sort(key=lambda one: -one[0])  # ties stay in order: a sequence's first draft before its second
    taken, rounds = _most_per_second(rest, cost, most - left, left, expected, rounds)
    for i in taken:
        counts[i] += 1
    return counts, rounds


def _most_per_second(
    rest: Listing[tuple[float, int, int]], cost: LinearCost, given: int, left: int, expected: float, rounds: int
) -> tuple[list[int], int]:
    """The sequences that get one more draft, each as often as it does, and the number of rounds. rest: (gain, sequence, rounds), by
    decreasing gain."""
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
    """The number of drafts of a chain for a sequence where step costs are unknown. Counts its steps without drafts, and grants a
    trial draft after some of them."""
    count = sum(gain >= LEAST for gain in acceptance.chain(most).gains)
    acceptance.waited = 0 if count else acceptance.waited + 1
    if most and acceptance.waited >= acceptance.patience:
        acceptance.waited, count = 0, 1
    return count


class Probes:
    """Trial drafts for sequences that have had none for long: without them an improved acceptance would go unnoticed."""

    def __init__(self) -> None:
        self._saved = 0.0  # seconds saved up for trials

    def add(self, acceptances: Listing[Acceptance], counts: list[int], rounds: int, cost: LinearCost) -> tuple[list[int], int]:
        """`counts` and `rounds` of a step, with one more draft for the sequence that is longest beyond its patience, if the time
        budget allows. Counts the steps without drafts."""
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
