"""What drafts cost is learned of simulated devices whose costs are known, and the shards' own budget decides with it."""

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
KEYS = 300  # that each sequence sees
BEGUN = 9  # steps after which those without drafts are known: sums that fade reach KNOWN


@dataclass
class Device:
    """Reads its weights in `memory` seconds, computes a token in `token`; what takes longer counts. Milliseconds."""

    memory: float
    token: float
    row: float = 0.0
    key: float = 0.0
    first: float = 0.0  # a step with drafts takes another way
    round: float = 0.0  # of the draft model
    opening: float = 0.0  # that its first one takes beyond that
    noise: float = 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(5))

    def seconds(self, sequences: int, drafts: int, prompt: int = 0) -> float:
        """Of the model that is served."""
        tokens = sequences + drafts + prompt
        busy = max(self.memory, self.token * tokens) + self.row * (sequences + drafts) + self.key * sequences * KEYS
        return (busy + self.first * (drafts > 0)) * self.chance.uniform(1 - self.noise, 1 + self.noise) / 1e3


MEMORY_BOUND = Device(memory=10.0, token=0.1, row=0.01, key=1e-4)  # as GPUs: some 100 tokens are free
COMPUTING = Device(memory=1.0, token=1.0, row=0.3)  # as a CPU: nothing is free
STEEP = Device(memory=4.0, token=0.25, row=0.02, first=3.0)  # and without drafts it has a shorter way


class Server:
    """A scheduler's `DraftBudget` and a shard's budget, with one sequence after the other. rate: how many drafts are right."""

    def __init__(
        self, device: Device, rate: float, draft_model: bool = False, make: Callable[..., DraftBudget] = DraftBudget
    ) -> None:
        self.device, self.rate, self.draft_model = device, rate, draft_model
        cost = Cost(512, device.seconds(0, 0, 512))
        self.cost, self.drafting = cost, make(cost, 4096, CHAIN)
        self.before = Acceptance()
        self.probes = Probes()
        self.trackers: list[Acceptance] = []
        self.chance = random.Random(3)

    def prompts(self) -> None:
        """Some steps that compute them, of several lengths."""
        for tokens in (20, 100, 400, 60, 250):
            keys = tokens * tokens / 2
            self._told(Measured(tokens, int(keys), 0, 0, 1, self.device.seconds(0, 0, tokens)))

    def run(self, sequences: int, steps: int) -> tuple[float, float, float]:
        """Tokens per second; the same without drafts; drafts of a sequence in a step, on average."""
        self.trackers = [*self.trackers, *(Acceptance(self.before) for _ in range(sequences))][:sequences]
        tokens = drafted = 0
        seconds = plainly = 0.0
        for _ in range(steps):
            allowed = self.drafting.allow(sequences, sequences * KEYS, Work())
            counts, rounds = self._divide(allowed)
            own = sum(counts)
            took = self.device.seconds(sequences, own)
            proposing = (rounds * self.device.round + self.device.opening) / 1e3 if own and self.draft_model else 0.0
            kept = sum(self._accepted(tracker, count) for tracker, count in zip(self.trackers, counts, strict=True))
            self._told(
                Measured(
                    decode_tokens=sequences + own,
                    decode_keys=(sequences + own) * KEYS,
                    rows=sequences + own,
                    seconds=took + proposing,
                    drafted=own,
                    accepted=kept,
                    rounds=rounds if own and self.draft_model else 0,
                    draft_seconds=proposing,
                    later_seconds=(rounds - 1) * self.device.round / 1e3 if proposing else 0.0,
                )
            )
            tokens += sequences + kept
            drafted += own
            seconds += took + proposing
            plainly += self.device.seconds(sequences, 0)
        return tokens / seconds, sequences * steps / plainly, drafted / sequences / steps

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

    def _told(self, step: Measured) -> None:
        fit(self.cost, step)
        self.drafting.learn(step)


def test_many_drafts_where_the_device_waits_for_its_memory_and_none_where_it_computes() -> None:
    server = Server(MEMORY_BOUND, 0.7)
    server.prompts()
    for _ in range(2):  # the load rises, and falls
        rate, plain, drafts = server.run(1, 150)
        assert rate > 2.2 * plain
        assert drafts > 0.7 * CHAIN
        server.run(256, 60)
        rate, plain, drafts = server.run(256, 40)
        assert rate >= 0.97 * plain
        assert drafts < 0.1


@pytest.mark.parametrize("device", [MEMORY_BOUND, COMPUTING, STEEP], ids=["memory", "computing", "steep"])
@pytest.mark.parametrize(("rate", "draft"), [(0.0, 0.0), (0.4, 0.5), (0.8, 0.0), (0.8, 4.0)])
def test_never_slower_at_any_load(device: Device, rate: float, draft: float) -> None:
    server = Server(Device(device.memory, device.token, device.row, device.key, device.first, draft, 0.1), rate, draft > 0)
    server.prompts()
    for sequences in (1, 4, 32, 8, 1):
        server.run(sequences, 50)  # what it learns at a load that is new takes some steps
        fast, plain, _ = server.run(sequences, 120)
        assert fast >= 0.97 * plain, (sequences, fast / plain)


def test_what_is_gained_is_most_of_what_can_be() -> None:
    server = Server(STEEP, 0.8)
    server.prompts()
    server.run(1, 100)
    rate, plain, drafts = server.run(1, 200)
    expected = sum(0.8**depth for depth in range(CHAIN + 1)) / (1 + (STEEP.first + STEEP.row * CHAIN) / (STEEP.memory + STEEP.row))
    assert rate / plain == pytest.approx(expected, rel=0.08)
    assert drafts > 0.9 * CHAIN


class Blind(DraftBudget):
    """Believes that drafts are free."""

    def allow(self, decodes: int, keys: float, prompts: Work) -> Allowance:
        found = super().allow(decodes, keys, prompts)
        return Allowance(found.step, 0.0, 0.0, 0.0, 4096, found.target)


class Careful(DraftBudget):
    """Believes that each takes as long as a step."""

    def allow(self, decodes: int, keys: float, prompts: Work) -> Allowance:
        found = super().allow(decodes, keys, prompts)
        return Allowance(found.step, 0.0, found.step, 0.0, found.most, found.target)


@pytest.mark.parametrize(
    ("make", "device", "sequences", "most"),
    [(Blind, COMPUTING, 16, 0.8), (Careful, MEMORY_BOUND, 1, 1.2)],
    ids=["slower", "no gain"],
)
def test_these_checks_find_wrong_costs(make: Callable[..., DraftBudget], device: Device, sequences: int, most: float) -> None:
    server = Server(device, 0.7, make=make)
    server.prompts()
    server.run(sequences, 60)
    rate, plain, _ = server.run(sequences, 100)
    assert rate < most * plain


def allowances(drafting: DraftBudget, sequences: int, count: int, device: Device, most: int = CHAIN) -> Iterable[Allowance]:
    """Of steps in which every sequence takes what it may."""
    for _ in range(count):
        found = drafting.allow(sequences, 0.0, Work())
        drafts = min(found.most, most * sequences)
        seconds = device.seconds(sequences, drafts)
        drafting.learn(Measured(decode_tokens=sequences + drafts, drafted=drafts, accepted=drafts, seconds=seconds))
        yield found


def test_a_new_load_begins_without_drafts_and_where_they_are_usual_they_are_left_out_now_and_then() -> None:
    device = Device(memory=10.0, token=0.1)
    drafting = DraftBudget(Cost(512, 0.05), 4096, CHAIN)
    off = [i for i, found in enumerate(allowances(drafting, 4, 2 * PLAIN + 20, device)) if not found.most]
    assert off == [*range(BEGUN), BEGUN + PLAIN, BEGUN + 1 + 2 * PLAIN]


def test_where_drafts_are_usual_nobody_needs_a_trial() -> None:
    drafting = DraftBudget(Cost(512, 0.05), 4096, CHAIN)
    told = list(allowances(drafting, 4, 400, Device(memory=10.0, token=0.1, row=0.2)))
    assert sum(found.draft == 0.0 for found in told) == TRIAL, "the first"


def test_where_drafts_are_none_there_are_trials_now_and_then() -> None:
    device = Device(memory=0.0, token=1.0, first=2.0)
    drafting = DraftBudget(Cost(512, 0.5), 4096, CHAIN)
    told = list(allowances(drafting, 16, 1000, device))
    off = [not found.most for found in told]
    steps = LEAST_TRIAL  # of many sequences
    assert off[BEGUN : BEGUN + steps] == [False] * steps
    assert [found.draft for found in told[BEGUN : BEGUN + steps]] == [0.0] * steps, "or nobody would try any"
    assert 0.9 < sum(off) / len(off) < 0.995


def test_trials_keep_away_from_prompts_unless_there_are_always_some() -> None:
    """`found.draft` is 0 in trials alone."""
    device = Device(memory=0.0, token=1.0, first=2.0)  # where nobody believes in drafts
    for every, tries in ((30, True), (4, False), (4, True)):
        drafting, trials, since = DraftBudget(Cost(512, 0.05), 4096, CHAIN), [], 0
        for count in range(40 if not tries else 120):
            if count % every == 0:
                drafting.learn(Measured(prompt_tokens=10, decode_tokens=2, seconds=device.seconds(2, 0, 10)))
                since = 0
            [found] = allowances(drafting, 2, 1, device)
            since += 1
            trials += [since] if found.most and not found.draft else []
        assert bool(trials) == tries
        assert every < 10 or min(trials) > 8


@pytest.mark.parametrize("pays", [False, True])
def test_what_fewer_sequences_lost_by_is_not_tried_at_once(pays: bool) -> None:
    device = Device(memory=10.0, token=0.01) if pays else Device(memory=0.0, token=1.0, first=2.0)
    drafting = DraftBudget(Cost(512, 0.5), 4096, CHAIN)
    list(allowances(drafting, 2, 100, device))
    more = [bool(found.most) for found in allowances(drafting, 16, 1000, device)]
    assert any(more[:10]) == pays
    assert any(more)


@pytest.mark.parametrize(
    ("first", "each", "begins", "least", "most"), [(3.0, 0.02, 1, 5, 8), (0.0, 1.2, 8, 2, 4)], ids=["8 are best", "3 are best"]
)
def test_another_number_of_drafts_is_tried_where_it_is_always_the_same(
    first: float, each: float, begins: int, least: int, most: int
) -> None:
    device = Device(memory=4.0, token=0.0, row=each, first=first)
    drafting = DraftBudget(Cost(1, 0.003), 4096, 8)
    found, drafts = drafting.allow(1, 0.0, Work()), 0
    for step in range(400):
        if step < 60:  # by chance, so far
            drafts = begins if step > 2 else 0
        else:
            drafts = max(range(9), key=lambda count: rate_of(found, count)) if found.most else 0
        seconds = device.seconds(1, drafts)
        drafting.learn(Measured(decode_tokens=1 + drafts, drafted=drafts, accepted=drafts, seconds=seconds))
        found = drafting.allow(1, 0.0, Work())
    assert least <= max(range(9), key=lambda count: rate_of(found, count)) <= most


def rate_of(found: Allowance, drafts: int) -> float:
    """Tokens per second if eight of ten drafts are right."""
    tokens = sum(0.8**depth for depth in range(drafts + 1))
    return tokens / (found.step + found.first * (drafts > 0) + found.draft * drafts)


def test_drafts_that_lose_end_even_if_costs_say_that_they_pay() -> None:
    drafting = DraftBudget(Cost(512, 0.05), 4096, CHAIN)
    off = []
    for _ in range(300):
        found = drafting.allow(1, 0.0, Work())
        drafts = min(found.most, CHAIN)
        # None is accepted, which costs say nothing of; and who divides them has not noticed.
        drafting.learn(Measured(decode_tokens=1 + drafts, drafted=drafts, seconds=0.010 + 0.001 * drafts))
        off.append(not found.most)
    assert sum(off[30:]) > 0.9 * len(off[30:])


def test_costs_are_found() -> None:
    device = Device(memory=10.0, token=0.01, row=0.5, first=2.0)
    drafting = DraftBudget(Cost(512, 0.05), 4096, CHAIN)
    for most in (4, 1, 2, 3) * 30:
        list(allowances(drafting, 4, 2, device, most))
    [found] = allowances(drafting, 4, 1, device)
    assert (found.step, found.first, found.draft) == pytest.approx((0.012, 0.002, 0.0005), rel=0.15)


def test_runs_of_the_draft_model_are_no_part_of_the_models_steps() -> None:
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


def test_the_first_run_of_the_draft_model_may_be_dear() -> None:
    """Four drafts pay, and one hardly does: who takes that one's time for what each of them takes never finds out."""
    gains = []
    for seed in range(3, 7):
        server = Server(Device(memory=2.0, token=0.02, round=0.4, opening=0.9, noise=0.05), 0.85, draft_model=True)
        server.chance.seed(seed)
        server.prompts()
        took = plainly = 0.0
        for _ in range(8):  # answers
            server.trackers = []
            speed, plain, _ = server.run(1, 60)
            took, plainly = took + 1 / speed, plainly + 1 / plain
        gains.append(plainly / took)
    assert statistics.fmean(gains) > 1.5  # 1.65 at best


def test_prompts_come_first() -> None:
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


def test_drafts_do_not_make_a_step_much_longer_than_it_may_be() -> None:
    device = Device(memory=10.0, token=0.01, row=1.0)
    for target, most in ((0.0, 39), (0.030, 19), (0.001, 11)):  # without one 50 ms; and as long as it takes without drafts
        drafting = DraftBudget(Cost(512, 0.05), 4096, 64, target)
        list(allowances(drafting, 1, 80, device, 8))
        assert drafting.allow(1, 0.0, Work()).most == pytest.approx(most, abs=2)


def test_needed() -> None:
    assert needed(1.0, 20, 0.05, 0.02, 0) == pytest.approx(0.4), "ahead of its target"
    assert needed(1.0, 15, 0.05, 0.02, 0) == pytest.approx(5.4)
    assert needed(1.0, 15, 0.05, 0.04, 1) == pytest.approx(4.8), "a step that is under way brings one"
    assert needed(0.0, 10, 0.05, 0.02, 0) == 0.0


def test_a_step_that_seems_to_have_taken_no_time_does_not_make_those_without_drafts_seem_fast() -> None:
    """The end of the one before it was noticed late. Drafts that pay stay usual."""
    server = Server(MEMORY_BOUND, rate=0.9)
    server.prompts()
    server.run(2, 400)
    server.drafting.learn(Measured(decode_tokens=2, decode_keys=2 * KEYS, rows=2, seconds=1e-5))
    _, _, drafts = server.run(2, 50)
    assert drafts > 2
