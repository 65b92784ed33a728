"""`DraftBudget`: learns the cost of drafts on simulated devices whose costs are known. The shards' own code (`divide`) decides with
it how many drafts each sequence gets."""

import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from penstock.router.cost import Cost, Work
from penstock.router.drafting import LEAST_TRIAL, PLAIN, TRIAL, Allowance, DraftBudget, needed
from penstock.router.policies import Measured, fit
from penstock.shard.decoding.budget import Acceptance, DraftDemand, LinearCost, Probes, divide

CHAIN = 4
KEYS = 300  # that each sequence attends to
BEGUN = 9  # steps until the cost without drafts is known: then the fading sums reach KNOWN


@dataclass
class Device:
    """A step takes the longer of `memory`, to read the weights, and `token` for each token. All times are in milliseconds."""

    memory: float
    token: float
    row: float = 0.0
    key: float = 0.0
    first: float = 0.0  # fixed cost of a step with drafts, which takes another code path
    round: float = 0.0  # a run of the draft model
    opening: float = 0.0  # extra time of its first run in a step
    noise: float = 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(5))

    def seconds(self, sequences: int, drafts: int, prompt: int = 0) -> float:
        """Time of a step of the model that is served, without the draft model."""
        tokens = sequences + drafts + prompt
        busy = max(self.memory, self.token * tokens) + self.row * (sequences + drafts) + self.key * sequences * KEYS
        return (busy + self.first * (drafts > 0)) * self.chance.uniform(1 - self.noise, 1 + self.noise) / 1e3


MEMORY_BOUND = Device(memory=10.0, token=0.1, row=0.01, key=1e-4)  # like GPUs: some 100 tokens are free
COMPUTE_BOUND = Device(memory=1.0, token=1.0, row=0.3)  # like a CPU: no token is free
FIXED_COST = Device(memory=4.0, token=0.25, row=0.02, first=3.0)  # memory-bound, and steps without drafts have a faster code path


class Server:
    """A scheduler's `DraftBudget` and a shard's division of it among sequences. rate: the probability that a draft is accepted."""

    def __init__(
        self, device: Device, rate: float, draft_model: bool = False, make: Callable[..., DraftBudget] = DraftBudget
    ) -> None:
        self.device, self.rate, self.draft_model = device, rate, draft_model
        cost = Cost(512, device.seconds(0, 0, 512))
        self.cost, self.drafting = cost, make(cost, 4096, CHAIN)
        self.prior = Acceptance()
        self.probes = Probes()
        self.trackers: list[Acceptance] = []
        self.chance = random.Random(3)

    def learn_prompts(self) -> None:
        """Learns from steps that compute prompts of several lengths."""
        for tokens in (20, 100, 400, 60, 250):
            keys = tokens * tokens / 2
            self._learn(Measured(tokens, int(keys), 0, 0, 1, self.device.seconds(0, 0, tokens)))

    def run(self, sequences: int, steps: int) -> tuple[float, float, float]:
        """Returns tokens per second, the same without drafts, and the mean number of drafts per sequence and step."""
        self.trackers = [*self.trackers, *(Acceptance(self.prior) for _ in range(sequences))][:sequences]
        tokens = drafted = 0
        seconds = plain_seconds = 0.0
        for _ in range(steps):
            allowed = self.drafting.allow(sequences, sequences * KEYS, Work())
            counts, rounds = self._divide(allowed)
            drafts = sum(counts)
            step_seconds = self.device.seconds(sequences, drafts)
            draft_seconds = (rounds * self.device.round + self.device.opening) / 1e3 if drafts and self.draft_model else 0.0
            accepted = sum(self._accepted(tracker, count) for tracker, count in zip(self.trackers, counts, strict=True))
            self._learn(
                Measured(
                    decode_tokens=sequences + drafts,
                    decode_keys=(sequences + drafts) * KEYS,
                    rows=sequences + drafts,
                    seconds=step_seconds + draft_seconds,
                    drafted=drafts,
                    accepted=accepted,
                    rounds=rounds if drafts and self.draft_model else 0,
                    draft_seconds=draft_seconds,
                    later_seconds=(rounds - 1) * self.device.round / 1e3 if draft_seconds else 0.0,
                )
            )
            tokens += sequences + accepted
            drafted += drafts
            seconds += step_seconds + draft_seconds
            plain_seconds += self.device.seconds(sequences, 0)
        return tokens / seconds, sequences * steps / plain_seconds, drafted / sequences / steps

    def _divide(self, allowed: Allowance) -> tuple[list[int], int]:
        if not allowed.most:
            return [0] * len(self.trackers), 0
        cost = LinearCost(allowed.step, allowed.draft, allowed.round, allowed.first)
        demands = [DraftDemand(tracker.chain(CHAIN)) for tracker in self.trackers]
        return self.probes.add(self.trackers, *divide(demands, cost, allowed.most), cost)

    def _accepted(self, tracker: Acceptance, count: int) -> int:
        right = 0
        while right < count and self.chance.random() < self.rate:
            right += 1
        if count:
            tracker.observe([0] * right, [1] * count)
        return right

    def _learn(self, step: Measured) -> None:
        fit(self.cost, step)
        self.drafting.learn(step)


def test_many_drafts_while_memory_bound_and_none_while_compute_bound() -> None:
    server = Server(MEMORY_BOUND, 0.7)
    server.learn_prompts()
    for _ in range(2):  # the load rises, and falls
        rate, plain, drafts = server.run(1, 150)
        assert rate > 2.2 * plain
        assert drafts > 0.7 * CHAIN
        server.run(256, 60)
        rate, plain, drafts = server.run(256, 40)
        assert rate >= 0.97 * plain
        assert drafts < 0.1


@pytest.mark.parametrize(
    "device", [MEMORY_BOUND, COMPUTE_BOUND, FIXED_COST], ids=["memory-bound", "compute-bound", "high-fixed-cost"]
)
@pytest.mark.parametrize(("rate", "draft"), [(0.0, 0.0), (0.4, 0.5), (0.8, 0.0), (0.8, 4.0)])
def test_drafting_is_never_slower_than_no_drafts_at_any_load(device: Device, rate: float, draft: float) -> None:
    server = Server(Device(device.memory, device.token, device.row, device.key, device.first, draft, 0.1), rate, draft > 0)
    server.learn_prompts()
    for sequences in (1, 4, 32, 8, 1):
        server.run(sequences, 50)  # learning at a new load takes some steps
        fast, plain, _ = server.run(sequences, 120)
        assert fast >= 0.97 * plain, (sequences, fast / plain)


def test_speedup_with_a_high_fixed_cost_is_close_to_the_best_possible() -> None:
    server = Server(FIXED_COST, 0.8)
    server.learn_prompts()
    server.run(1, 100)
    rate, plain, drafts = server.run(1, 200)
    expected = sum(0.8**depth for depth in range(CHAIN + 1)) / (
        1 + (FIXED_COST.first + FIXED_COST.row * CHAIN) / (FIXED_COST.memory + FIXED_COST.row)
    )
    assert rate / plain == pytest.approx(expected, rel=0.08)
    assert drafts > 0.9 * CHAIN


class AssumesFreeDrafts(DraftBudget):
    """Reports that drafts cost nothing."""

    def allow(self, decodes: int, keys: float, prompts: Work) -> Allowance:
        found = super().allow(decodes, keys, prompts)
        return Allowance(found.step, 0.0, 0.0, 0.0, 4096, found.target)


class OverestimatesDrafts(DraftBudget):
    """Reports that each draft takes as long as a step."""

    def allow(self, decodes: int, keys: float, prompts: Work) -> Allowance:
        found = super().allow(decodes, keys, prompts)
        return Allowance(found.step, 0.0, found.step, 0.0, found.most, found.target)


@pytest.mark.parametrize(
    ("make", "device", "sequences", "most"),
    [(AssumesFreeDrafts, COMPUTE_BOUND, 16, 0.8), (OverestimatesDrafts, MEMORY_BOUND, 1, 1.2)],
    ids=["free-drafts", "overestimated-drafts"],
)
def test_simulated_server_is_slower_with_wrong_draft_costs(
    make: Callable[..., DraftBudget], device: Device, sequences: int, most: float
) -> None:
    server = Server(device, 0.7, make=make)
    server.learn_prompts()
    server.run(sequences, 60)
    rate, plain, _ = server.run(sequences, 100)
    assert rate < most * plain


def allowances(drafting: DraftBudget, sequences: int, count: int, device: Device, most: int = CHAIN) -> Iterable[Allowance]:
    """Allowances of `count` steps in which every sequence has as many drafts as it may."""
    for _ in range(count):
        found = drafting.allow(sequences, 0.0, Work())
        drafts = min(found.most, most * sequences)
        seconds = device.seconds(sequences, drafts)
        drafting.learn(Measured(decode_tokens=sequences + drafts, drafted=drafts, accepted=drafts, seconds=seconds))
        yield found


def test_steps_without_drafts_begin_a_new_load_and_recur_after_a_fixed_number_of_steps() -> None:
    device = Device(memory=10.0, token=0.1)
    drafting = DraftBudget(Cost(512, 0.05), 4096, CHAIN)
    without_drafts = [i for i, found in enumerate(allowances(drafting, 4, 2 * PLAIN + 20, device)) if not found.most]
    assert without_drafts == [*range(BEGUN), BEGUN + PLAIN, BEGUN + 1 + 2 * PLAIN]


def test_only_the_first_trial_is_made_while_drafts_pay() -> None:
    drafting = DraftBudget(Cost(512, 0.05), 4096, CHAIN)
    found_allowances = list(allowances(drafting, 4, 400, Device(memory=10.0, token=0.1, row=0.2)))
    assert sum(found.draft == 0.0 for found in found_allowances) == TRIAL, "the first"


def test_rare_trials_with_zero_costs_are_made_while_drafts_do_not_pay() -> None:
    device = Device(memory=0.0, token=1.0, first=2.0)
    drafting = DraftBudget(Cost(512, 0.5), 4096, CHAIN)
    found_allowances = list(allowances(drafting, 16, 1000, device))
    without_drafts = [not found.most for found in found_allowances]
    steps = LEAST_TRIAL  # the trial length with many sequences
    assert without_drafts[BEGUN : BEGUN + steps] == [False] * steps
    assert [found.draft for found in found_allowances[BEGUN : BEGUN + steps]] == [0.0] * steps, "or nobody would try any"
    assert 0.9 < sum(without_drafts) / len(without_drafts) < 0.995


def test_trials_avoid_steps_after_prompts_unless_prompts_never_stop() -> None:
    """`found.draft` is 0 only in trials."""
    device = Device(memory=0.0, token=1.0, first=2.0)  # drafts do not pay here
    for every, expected in ((30, True), (4, False), (4, True)):
        drafting, trials, since = DraftBudget(Cost(512, 0.05), 4096, CHAIN), [], 0
        for count in range(40 if not expected else 120):
            if count % every == 0:
                drafting.learn(Measured(prompt_tokens=10, decode_tokens=2, seconds=device.seconds(2, 0, 10)))
                since = 0
            [found] = allowances(drafting, 2, 1, device)
            since += 1
            trials += [since] if found.most and not found.draft else []
        assert bool(trials) == expected
        assert every < 10 or min(trials) > 8


@pytest.mark.parametrize("pays", [False, True])
def test_first_trial_at_a_higher_load_is_delayed_if_drafts_lost_at_a_lower_one(pays: bool) -> None:
    device = Device(memory=10.0, token=0.01) if pays else Device(memory=0.0, token=1.0, first=2.0)
    drafting = DraftBudget(Cost(512, 0.5), 4096, CHAIN)
    list(allowances(drafting, 2, 100, device))
    more = [bool(found.most) for found in allowances(drafting, 16, 1000, device)]
    assert any(more[:10]) == pays
    assert any(more)


@pytest.mark.parametrize(
    ("first", "each", "initial", "least", "most"),
    [(3.0, 0.02, 1, 5, 8), (0.0, 1.2, 8, 2, 4)],
    ids=["eight-are-best", "three-are-best"],
)
def test_reported_costs_vary_so_that_other_numbers_of_drafts_are_tried(
    first: float, each: float, initial: int, least: int, most: int
) -> None:
    device = Device(memory=4.0, token=0.0, row=each, first=first)
    drafting = DraftBudget(Cost(1, 0.003), 4096, 8)
    found, drafts = drafting.allow(1, 0.0, Work()), 0
    for step in range(400):
        if step < 60:  # always the same number at first
            drafts = initial if step > 2 else 0
        else:
            drafts = max(range(9), key=lambda count: rate_of(found, count)) if found.most else 0
        seconds = device.seconds(1, drafts)
        drafting.learn(Measured(decode_tokens=1 + drafts, drafted=drafts, accepted=drafts, seconds=seconds))
        found = drafting.allow(1, 0.0, Work())
    assert least <= max(range(9), key=lambda count: rate_of(found, count)) <= most


def rate_of(found: Allowance, drafts: int) -> float:
    """Tokens per second if eight of ten drafts are accepted."""
    tokens = sum(0.8**depth for depth in range(drafts + 1))
    return tokens / (found.step + found.first * (drafts > 0) + found.draft * drafts)


def test_drafting_stops_if_it_is_slower_although_the_costs_say_that_it_pays() -> None:
    drafting = DraftBudget(Cost(512, 0.05), 4096, CHAIN)
    without_drafts = []
    for _ in range(300):
        found = drafting.allow(1, 0.0, Work())
        drafts = min(found.most, CHAIN)
        # None is accepted, which the costs don't show, and the shards that divide the budget have not noticed.
        drafting.learn(Measured(decode_tokens=1 + drafts, drafted=drafts, seconds=0.010 + 0.001 * drafts))
        without_drafts.append(not found.most)
    assert sum(without_drafts[30:]) > 0.9 * len(without_drafts[30:])


def test_costs_of_a_step_and_its_drafts_are_learned() -> None:
    device = Device(memory=10.0, token=0.01, row=0.5, first=2.0)
    drafting = DraftBudget(Cost(512, 0.05), 4096, CHAIN)
    for most in (4, 1, 2, 3) * 30:
        list(allowances(drafting, 4, 2, device, most))
    [found] = allowances(drafting, 4, 1, device)
    assert (found.step, found.first, found.draft) == pytest.approx((0.012, 0.002, 0.0005), rel=0.15)


def test_draft_model_time_is_not_attributed_to_the_target_models_steps() -> None:
    cost = Cost(512, 0.05)
    drafting = DraftBudget(cost, 4096, CHAIN)
    for drafts in (0, 0, 0, *(4,) * 30):
        step = Measured(
            decode_tokens=1 + drafts,
            drafted=drafts,
            seconds=0.010 + 0.008 * (drafts > 0),
            rounds=drafts,
            draft_seconds=0.002 * drafts,
            later_seconds=0.002 * max(drafts - 1, 0),
        )
        fit(cost, step)
        drafting.learn(step)
    found = drafting.allow(1, 0.0, Work())
    assert (found.step, found.round) == pytest.approx((0.010, 0.002), rel=0.01)
    assert found.first + 4 * found.draft < 0.0015


def test_four_drafts_are_used_although_the_draft_models_first_run_is_expensive() -> None:
    """Four drafts pay, and one hardly does: if the first run's time counted for every run, no more than one would ever be tried."""
    gains = []
    for seed in range(3, 7):
        server = Server(Device(memory=2.0, token=0.02, round=0.4, opening=0.9, noise=0.05), 0.85, draft_model=True)
        server.chance.seed(seed)
        server.learn_prompts()
        draft_seconds = plain_seconds = 0.0
        for _ in range(8):  # requests
            server.trackers = []
            speed, plain, _ = server.run(1, 60)
            draft_seconds, plain_seconds = draft_seconds + 1 / speed, plain_seconds + 1 / plain
        gains.append(plain_seconds / draft_seconds)
    assert statistics.fmean(gains) > 1.5  # 1.65 at best


def test_draft_allowance_shrinks_with_the_prompt_tokens_of_the_step() -> None:
    device = Device(memory=10.0, token=0.01, row=0.5)
    cost = Cost(512, 0.05)
    drafting = DraftBudget(cost, 512, CHAIN, target=0.05)
    list(allowances(drafting, 8, 60, device))
    alone = drafting.allow(8, 0.0, Work()).most
    some = drafting.allow(8, 0.0, Work(100, 5000, 50)).most
    many = drafting.allow(8, 0.0, Work(500, 125_000, 250)).most
    assert alone > some > many
    assert many <= 512 - 8 - 500
    assert drafting.allow(8, 0.0, Work(504, 125_000, 250)).most == 0, "no more tokens than were warmed up"
    assert drafting.allow(8, 0.0, Work(100)).step > drafting.allow(8, 0.0, Work()).step


def test_draft_allowance_is_bounded_by_the_step_time_target() -> None:
    device = Device(memory=10.0, token=0.01, row=1.0)
    for target, most in ((0.0, 39), (0.030, 19), (0.001, 11)):  # without a target 50 ms; and no less than a step without drafts
        drafting = DraftBudget(Cost(512, 0.05), 4096, 64, target)
        list(allowances(drafting, 1, 80, device, 8))
        assert drafting.allow(1, 0.0, Work()).most == pytest.approx(most, abs=2)


def test_needed_tokens_follow_the_stream_latency_target_and_steps_in_flight() -> None:
    assert needed(1.0, 20, 0.05, 0.02, 0) == pytest.approx(0.4), "ahead of its target"
    assert needed(1.0, 15, 0.05, 0.02, 0) == pytest.approx(5.4)
    assert needed(1.0, 15, 0.05, 0.04, 1) == pytest.approx(4.8), "a step that is under way brings one"
    assert needed(0.0, 10, 0.05, 0.02, 0) == 0.0


def test_single_plain_step_measured_as_nearly_zero_seconds_does_not_stop_drafting() -> None:
    """That happens when the end of the step before is noticed late. Drafts that pay must continue."""
    server = Server(MEMORY_BOUND, rate=0.9)
    server.learn_prompts()
    server.run(2, 400)
    server.drafting.learn(Measured(decode_tokens=2, decode_keys=2 * KEYS, rows=2, seconds=1e-5))
    _, _, drafts = server.run(2, 50)
    assert drafts > 2
