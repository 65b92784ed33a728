"""The draft budget: drafts go to the sequences that gain most, and to none if that is faster; latency targets come first;
speculation that was switched off is probed, and returns when it pays."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from penstock.shard.decoding import budget
from penstock.shard.decoding.budget import (
    DEPTHS,
    FLOOR,
    MARGIN,
    MOST_PATIENCE,
    PATIENCE,
    PROBING,
    RANKS,
    Acceptance,
    DraftDemand,
    DraftValue,
    LinearCost,
    Probes,
    divide,
)

SEEDS = range(40)


@dataclass(frozen=True)
class SteppedCost:
    """A device that computes `at_once` tokens at a time: one more token takes another second."""

    at_once: int

    def seconds(self, drafts: int, rounds: int) -> float:
        """See LinearCost."""
        return 1.0 + (4 + drafts) // self.at_once + 0.1 * rounds


def draft_value(chance: random.Random, most: int) -> DraftValue:
    gains = sorted((chance.random() for _ in range(chance.randint(0, most))), reverse=True)
    return DraftValue(gains, [chance.randint(1, 3) for _ in gains])


def cost(chance: random.Random) -> LinearCost | SteppedCost:
    if chance.random() < 0.5:
        return SteppedCost(chance.randint(1, 9))
    return LinearCost(1.0, chance.choice([0.0, 0.05, 0.3, 1.0]), chance.choice([0.0, 0.1, 0.5]))


def rate(demands: Sequence[DraftDemand], counts: Sequence[int], rounds: int, price: LinearCost | SteppedCost) -> float:
    """Tokens per second, with at most so many draft rounds."""
    tokens = float(len(demands))
    for demand, count in zip(demands, counts, strict=True):
        reachable_gains = [gain for gain, own in zip(demand.value.gains, demand.value.rounds, strict=True) if own <= rounds]
        assert count <= len(reachable_gains)
        tokens += sum(reachable_gains[:count])
    return tokens / price.seconds(sum(counts), rounds)


# Dividing


@pytest.mark.parametrize("seed", SEEDS)
def test_no_division_of_the_budget_gives_more_tokens_per_second(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with all possible divisions."""
    monkeypatch.setattr(budget, "MARGIN", 1.0)
    monkeypatch.setattr(budget, "FLOOR", 0.0)
    chance = random.Random(seed)
    demands = [DraftDemand(draft_value(chance, 4)) for _ in range(chance.randint(1, 3))]
    price, most = cost(chance), chance.randint(0, 8)
    best = 0.0
    for rounds in range(4):
        max_counts = [sum(own <= rounds for own in demand.value.rounds) for demand in demands]
        for division in itertools.product(*(range(count + 1) for count in max_counts)):
            if sum(division) <= most:
                best = max(best, rate(demands, division, rounds, price))
    assert rate(demands, *divide(demands, price, most), price) == pytest.approx(best)


@pytest.mark.parametrize("seed", SEEDS)
def test_division_stays_within_the_budget_and_is_never_slower_than_no_drafts(seed: int) -> None:
    chance = random.Random(seed)
    demands = [DraftDemand(draft_value(chance, 9)) for _ in range(chance.randint(0, 9))]
    price, most = cost(chance), chance.randint(0, 30)
    counts, rounds = divide(demands, price, most)
    assert sum(counts) <= most
    assert all(0 <= count <= len(demand.value.gains) for count, demand in zip(counts, demands, strict=True))
    if any(counts):
        assert rate(demands, counts, rounds, price) > MARGIN * rate(demands, [0] * len(demands), 0, price)
    assert (counts, rounds) == divide(demands, price, most)


def test_drafts_with_a_gain_below_the_floor_are_not_made() -> None:
    assert divide([DraftDemand(DraftValue([0.5, FLOOR / 2], [1, 2]))], LinearCost(1.0, 0.0), 4) == ([1], 1)


def test_ties_are_broken_by_the_order_of_sequences() -> None:
    """So all ranks decide the same."""
    demands = [DraftDemand(DraftValue([0.5, 0.5, 0.5], [1, 1, 1])) for _ in range(3)]
    assert divide(demands, LinearCost(1.0, 0.0), 4) == ([3, 1, 0], 1)


def test_no_drafts_are_made_if_they_cost_as_much_as_steps() -> None:
    certain = Acceptance()
    for _ in range(99):
        certain.observe([0] * 4, [1] * 4)
    demands = [DraftDemand(certain.chain(4)) for _ in range(8)]
    assert divide(demands, LinearCost(0.001, 0.001), 99) == ([0] * 8, 0)
    assert divide(demands, LinearCost(1.0, 0.001), 99) == ([4] * 8, 4)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_latency_target_comes_before_throughput(seed: int) -> None:
    """Sequences with a target get the drafts that they need, the most urgent first, as far as the budget allows."""
    chance = random.Random(seed)
    demands = [
        DraftDemand(draft_value(chance, 6), chance.choice([0.0, 0.0, chance.uniform(0, 4)])) for _ in range(chance.randint(1, 6))
    ]
    most = chance.randint(0, 12)
    counts, _ = divide(demands, LinearCost(1.0, 5.0), most)  # drafts never increase throughput
    left = most
    for i in sorted(range(len(demands)), key=lambda i: -demands[i].needed):
        own = 1.0
        wanted = 0
        while own < demands[i].needed and wanted < min(left, len(demands[i].value.gains)):
            own += demands[i].value.gains[wanted]
            wanted += 1
        assert counts[i] == wanted
        left -= wanted


def test_budget_left_by_latency_targets_goes_to_the_largest_gain() -> None:
    slow, fast = DraftValue([0.3, 0.2], [1, 2]), DraftValue([0.9, 0.8, 0.7], [1, 2, 3])
    assert divide([DraftDemand(fast), DraftDemand(slow, needed=1.2)], LinearCost(1.0, 0.01), 2) == ([1, 1], 1)
    assert divide([DraftDemand(fast), DraftDemand(slow)], LinearCost(1.0, 0.01), 2) == ([2, 0], 2)
    assert divide([DraftDemand(fast), DraftDemand(slow, needed=1.2)], LinearCost(1.0, 0.01), 9) == ([3, 2], 3)


# Acceptance


def chain_of(rates: Sequence[float], chance: random.Random) -> tuple[list[int], list[int]]:
    """Ranks and widths of a verified chain as long as `rates`, each draft accepted with its probability."""
    accepted = 0
    while accepted < len(rates) and chance.random() < rates[accepted]:
        accepted += 1
    return [0] * accepted, [1] * min(accepted + 1, len(rates))


def test_acceptance_is_learned_by_depth() -> None:
    rates, chance, tracker = [0.9, 0.7, 0.4], random.Random(5), Acceptance()
    sums = [0.0] * 3
    for i in range(3000):
        tracker.observe(*chain_of(rates, chance))
        if i >= 100:
            sums = [total + own[0] for total, own in zip(sums, tracker.shares(3), strict=True)]
    found = [total / 2900 for total in sums]
    assert found == pytest.approx(rates, abs=0.1)
    value = tracker.chain(3)
    assert value.gains == sorted(value.gains, reverse=True)
    assert value.rounds == [1, 2, 3]


def test_acceptance_is_learned_by_rank() -> None:
    chance, tracker = random.Random(5), Acceptance()
    for _ in range(300):
        [rank] = chance.choices([0, 1, 2, None], [0.5, 0.25, 0.1, 0.15])
        tracker.observe([] if rank is None else [rank], [3])
    [shares] = tracker.shares(1)
    assert shares[:3] == pytest.approx([0.5, 0.25, 0.1], abs=0.15)
    assert tracker.tree(3, 1, 3).gains == pytest.approx(shares[:3])


def test_old_observations_are_forgotten() -> None:
    """Soon for a sequence, later for all sequences together."""
    all_sequences = Acceptance()
    for tracker, trials in ((Acceptance(all_sequences), 60), (all_sequences, 300)):
        for _ in range(500):
            tracker.observe([0], [1])
        for _ in range(trials):
            tracker.observe([], [1])
        assert tracker.shares(1)[0][0] < 0.2
        for _ in range(trials):
            tracker.observe([0], [1])
        assert tracker.shares(1)[0][0] > 0.8


def test_acceptance_of_untried_depths_approaches_that_of_the_depth_above() -> None:
    """Otherwise bad luck at some depth would end all drafts of that depth for ever."""
    tracker = Acceptance()
    for _ in range(20):
        tracker.observe([0, 0], [1, 1, 1])
    assert tracker.shares(3)[2][0] < 0.5 * tracker.shares(3)[1][0]
    for _ in range(200):
        tracker.observe([0, 0], [1, 1])
    assert tracker.shares(3)[2][0] > 0.9 * tracker.shares(3)[1][0]


def test_acceptance_of_a_new_sequence_starts_with_that_of_all() -> None:
    all_sequences = Acceptance()
    fresh = Acceptance(all_sequences)
    assert fresh.shares(1) == Acceptance().shares(1)
    for _ in range(60):
        all_sequences.observe([0], [1])
    assert fresh.shares(3)[2][0] == pytest.approx(all_sequences.shares(1)[0][0])
    for _ in range(60):
        fresh.observe([], [1])
    assert fresh.shares(1)[0][0] < 0.2


@pytest.mark.parametrize("seed", SEEDS)
def test_shares_are_probabilities_and_gains_are_those_of_the_best_tree(seed: int) -> None:
    chance, tracker = random.Random(seed), Acceptance()
    for _ in range(chance.randint(0, 60)):
        widths = [chance.randint(1, RANKS + 3) for _ in range(chance.randint(1, DEPTHS + 3))]
        ranks = [chance.randrange(width) for width in widths[: chance.randint(0, len(widths))]]
        tracker.observe(ranks, widths[: len(ranks) + 1])
    depth, width, most = chance.randint(0, 4), chance.randint(0, 4), chance.randint(0, 30)
    shares = tracker.shares(depth)
    for own in shares:
        assert own == sorted(own, reverse=True)
        assert min(own) >= 0
        assert sum(own) <= 1 + 1e-9
    layers: list[list[tuple[float, int]]] = [[(1.0, 0)]]
    for level, own in enumerate(shares, 1):
        layers.append([(reached * share, level) for reached, _ in layers[-1] for share in own[:width]])
    wanted = sorted((one for layer in layers[1:] for one in layer), reverse=True)[:most]
    found = tracker.tree(most, depth, width)
    assert found.gains == pytest.approx([gain for gain, _ in wanted])
    assert max(found.rounds, default=0) <= depth
    assert len(found.rounds) == len(found.gains)
    if width:
        assert tracker.tree(depth, depth, 1).gains == pytest.approx(tracker.chain(depth).gains)


def test_gains_of_a_chain_match_the_closed_form() -> None:
    """Leviathan et al. 2023: (1 - a^(k + 1)) / (1 - a) tokens per step."""
    certain = Acceptance()
    a = certain.shares(1)[0][0]
    assert 1 + sum(certain.chain(5).gains) == pytest.approx((1 - a**6) / (1 - a))


# Switched off, and on again


def test_sequences_without_drafts_are_probed_with_growing_patience() -> None:
    """No more than one in a step; less often after failed probes, as often as before after a successful one."""
    trackers, probes = [Acceptance() for _ in range(5)], Probes()
    probe_steps: list[list[int]] = [[] for _ in trackers]
    for step in range(3000):
        counts, rounds = probes.add(trackers, [0] * 5, 0, LinearCost(1.0, 0.005))
        assert sum(counts) == rounds <= 1
        for i, count in enumerate(counts):
            if count:
                probe_steps[i].append(step)
                trackers[i].observe([], [1])
    for own in probe_steps:
        gaps = [later - earlier for earlier, later in itertools.pairwise([-1, *own])]
        assert gaps[0] <= PATIENCE + 5
        assert MOST_PATIENCE <= gaps[-1] <= MOST_PATIENCE + 5
    trackers[0].observe([0], [1])
    assert trackers[0].patience == PATIENCE


@pytest.mark.parametrize("price", [LinearCost(1.0, 0.5), LinearCost(1.0, 0.03, 0.2), LinearCost(1.0, 0.0, 0.0)])
def test_probes_take_at_most_a_hundredth_of_the_time(price: LinearCost) -> None:
    trackers, probes = [Acceptance() for _ in range(40)], Probes()
    seconds = 0.0
    for _ in range(1000):
        counts, rounds = probes.add(trackers, [0] * 40, 0, price)
        seconds += price.seconds(sum(counts), rounds)
    assert 1000 <= seconds <= 1000 * (1 + PROBING)
    assert any(tracker.waited < 1000 for tracker in trackers)


def test_sequences_with_drafts_are_not_probed() -> None:
    trackers, probes = [Acceptance(), Acceptance()], Probes()
    for _ in range(3 * PATIENCE):
        counts, rounds = probes.add(trackers, [2, 0], 2, LinearCost(1.0, 0.01))
        assert (counts[0], rounds) == (2, 2)
        assert trackers[0].waited == 0


def test_sequence_that_exceeds_its_patience_most_is_probed_first() -> None:
    trackers, probes = [Acceptance() for _ in range(3)], Probes()
    for tracker, waited in zip(trackers, (3, 5, 4), strict=True):
        tracker.waited = tracker.patience + waited
    trackers[0].patience += 1
    tried = [probes.add(trackers, [0] * 3, 0, LinearCost(1.0, 0.001, 0.0))[0] for _ in range(3)]
    assert tried == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]


class SimulatedSequences:
    """Simulated sequences whose drafts are accepted with given probabilities, on a device with a given cost."""

    def __init__(self, seed: int, sequences: int, rates: Sequence[float], price: LinearCost | SteppedCost, most: int = 4) -> None:
        self._chance = random.Random(seed)
        self.trackers = [Acceptance() for _ in range(sequences)]
        self.rates = list(rates)
        self._probes = Probes()
        self.price = price
        self._most = most
        self.tokens = self.seconds = 0.0
        self.drafts = 0

    def run(self, steps: int) -> "SimulatedSequences":
        """Runs so many steps, with counters reset."""
        self.tokens = self.seconds = 0.0
        self.drafts = 0
        for _ in range(steps):
            counts, rounds = divide([DraftDemand(one.chain(self._most)) for one in self.trackers], self.price, 999)
            counts, rounds = self._probes.add(self.trackers, counts, rounds, self.price)
            self.seconds += self.price.seconds(sum(counts), rounds)
            self.drafts += sum(counts)
            for tracker, count, own in zip(self.trackers, counts, self.rates, strict=True):
                ranks, widths = chain_of([own] * count, self._chance)
                tracker.observe(ranks, widths)
                self.tokens += 1 + len(ranks)
        return self

    @property
    def relative_throughput(self) -> float:
        """Tokens per second, relative to those without speculation."""
        return self.tokens / self.seconds / (len(self.trackers) / self.price.seconds(0, 0))


@pytest.mark.parametrize("seed", range(20))
def test_speculation_is_never_slower_than_none(seed: int) -> None:
    """Whatever the acceptance rates and costs are, once they are known."""
    chance = random.Random(seed)
    count = chance.choice([1, 2, 8, 32])
    draft = chance.choice([0.002, 0.02, 0.1, 0.5])
    price = LinearCost(1.0 + count * draft, draft, chance.choice([0.0, 0.1]))  # each sequence is a token of the step itself
    simulation = SimulatedSequences(seed, count, [chance.choice([0.0, 0.3, 0.6, 0.9]) for _ in range(count)], price)
    simulation.run(60)
    assert simulation.run(200).relative_throughput > 0.97


def test_speculation_pays_where_it_can() -> None:
    """At least nine tenths of the optimum: (1 - a^(k + 1)) / (1 - a) over the cost."""
    price = LinearCost(1.0, 0.02, 0.05)
    simulation = SimulatedSequences(1, 1, [0.8], price).run(3000)
    assert simulation.relative_throughput > 0.9 * (1 - 0.8**5) / (1 - 0.8) / price.seconds(4, 4)


def test_speculation_stops_under_load_and_returns() -> None:
    simulation = SimulatedSequences(2, 8, [0.8] * 8, LinearCost(1.0, 0.005))
    assert simulation.run(200).drafts > 200 * 8 * 3
    simulation.price = LinearCost(1.0, 0.5)
    assert simulation.run(200).drafts < 200 / 8
    simulation.price = LinearCost(1.0, 0.005)
    assert simulation.run(50).drafts > 50 * 8 * 3


def test_speculation_stops_where_nothing_is_accepted_and_returns() -> None:
    simulation = SimulatedSequences(3, 4, [0.9, 0.9, 0.0, 0.9], LinearCost(1.0, 0.06))
    simulation.run(200)
    assert simulation.trackers[2].shares(1)[0][0] < 0.4
    simulation.rates = [0.0, 0.0, 0.9, 0.0]
    simulation.run(MOST_PATIENCE + 400)
    assert simulation.trackers[2].shares(1)[0][0] > 0.6
    assert simulation.run(200).drafts < 200 * (4 + 3)


def test_speculation_does_not_return_without_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """This shows that the test above depends on probes."""
    monkeypatch.setattr(budget, "PATIENCE", 10**9)
    monkeypatch.setattr(budget, "MOST_PATIENCE", 10**9)
    simulation = SimulatedSequences(3, 1, [0.0], LinearCost(1.0, 0.06))
    simulation.run(200)
    simulation.rates = [0.9]
    assert simulation.run(MOST_PATIENCE + 400).drafts == 0
