"""Drives the scheduler through random workloads on a simulated shard, and asserts the rules of `router/scheduler.py`.

A workload is small, so that pages, tokens and sequences are scarce and violations occur quickly. It keeps its own state of jobs and
pages: of the scheduler it only uses the actions, until the end. Up to two commands are in flight, and events occur between them and
their replies, as they do in the server.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.router.cost import Cost
from penstock.router.policies import ChunkedPrefill, Policy, WholePrefill, largest_step
from penstock.router.scheduler import Action, Bounds, Decode, Filter, Job, Prefill, Report, Scheduler, most_pages
from penstock.simulator.shard import Asked, IntegerShard, Outcome, Released, prefix_keys

Make = Callable[[Bounds, Policy], Scheduler]
ROUNDS = 20_000  # events after which a workload counts as stuck


@dataclass
class Score:
    """What a policy costs. Lower is better."""

    steps: int = 0  # forwards
    waits: int = 0  # steps from each arrival to its first token, summed
    pauses: int = 0
    restored: int = 0  # tokens computed a second time


@dataclass
class Client:
    """A job as its client knows it."""

    job: Job
    group: Asked
    arrived: int  # in which step
    running: set[int]  # choices whose end was not reported yet
    overtaken: int = 0
    paused: bool = False
    started: bool = False  # its first tokens were reported

    @property
    def order(self) -> tuple[float, int]:
        return self.job.rank, self.job.uid


@dataclass
class Sent:
    """A command that was executed; its reply is in flight."""

    action: Action
    outcome: Outcome | Released
    first: set[int]  # groups that get their first tokens with it


@dataclass
class Workload:
    """One random workload: `run` simulates it until all jobs have ended."""

    seed: int
    make: Make
    score: Score = field(default_factory=Score)

    def __post_init__(self) -> None:
        self.random = choose = random.Random(self.seed)
        page_size = choose.choice((1, 2, 4, 16))
        self.bounds = Bounds(
            pages=choose.randint(2, 40),
            page_size=page_size,
            step_tokens=choose.choice((1, 2, 7, 16, 64)),
            sequences=choose.choice((1, 2, 5, 64)),
            overtakes=choose.choice((1, 3, 16)),
            headroom=choose.choice((1, 8, 32)),
        )
        self.policy = self._policy()
        self.shard = IntegerShard(self.bounds.pages, page_size, prefix_caching=choose.random() < 0.7)
        self.scheduler = self.make(self.bounds, self.policy)
        self.queue: dict[int, Client] = {}  # waiting, preempted ones included
        self.live: dict[int, Client] = {}  # admitted, not cancelled, and its end was not reported yet
        self.cancelled: list[int] = []  # cancelled while live, not dropped yet
        self.ended_choices: list[tuple[int, int]] = []  # single choices ended early by their clients, not ended on the shard yet
        self.resumes: dict[int, tuple[tuple[int, int], ...]] = {}
        self.in_flight: deque[Sent] = deque()
        self.free = self.bounds.pages
        self.grow: dict[int, int] = {}  # by the last reply; of live jobs except those whose preemption is in flight
        self.joined: set[int] = set()  # jobs that were admitted since the shard last reported how many pages they may take
        self.decoding: set[int] = set()  # live jobs that decode, by the last reply
        self.max_in_flight = choose.choice((1, 2))
        self.arrivals = choose.randint(1, 25)
        self.arrival_probability = choose.choice((0.05, 0.3, 0.9))
        self.cancel_probability = choose.choice((0.0, 0.02, 0.2))
        self.tenants = choose.choice(([""], ["a", "b"]))

    def _policy(self) -> Policy:
        step = self.bounds.step_tokens
        kind = self.random.choice(("tokens", "time", "pause"))
        if kind == "pause":
            return WholePrefill(step, self.random.choice((0.0, 0.3, 1.2)), self.random.choice((1, 5, 20)))
        return ChunkedPrefill(step, Cost(8, 0.008) if kind == "time" else None, self.random.choice((0.0, 0.01)))

    def run(self) -> None:
        uid = rounds = 0
        while uid < self.arrivals or self.queue or self.live or self.cancelled or self.ended_choices or self.in_flight:
            rounds += 1
            assert rounds < ROUNDS, "nothing ends any more"
            if uid < self.arrivals and self.random.random() < self.arrival_probability:
                uid += 1
                self._arrive(uid)
            self._cancel_at_random()
            action = self.scheduler.next() if len(self.in_flight) < self.max_in_flight else None
            if action is not None:
                self._execute(action)
            elif self.in_flight:
                self._receive(self.in_flight.popleft())
            else:
                assert not self.queue, "it sleeps while a job waits"
                assert not self.live, "it sleeps while a job runs"
        assert self.scheduler.next() is None
        assert self.shard.free == self.bounds.pages == self.scheduler.free, "pages are lost"
        scheduler = self.scheduler
        assert (scheduler.waiting, scheduler.running, scheduler.paused_jobs) == (0, 0, 0), "jobs are lost"
        self.score.steps += self.shard.steps

    # Clients

    def _arrive(self, uid: int) -> None:
        job = self._job(uid)
        ends_at = [self.random.choice((0, self.random.randint(1, job.max_new_tokens))) for _ in range(job.choices)]
        prefix = [(self.random.choice("ab"), self.random.randint(1, job.prompt_tokens))] if self.random.random() < 0.5 else []
        group = Asked(
            uid=uid, prompt=job.prompt_tokens, most=job.max_new_tokens, choices=job.choices, ends_at=ends_at, prefix=prefix
        )
        if self.shard.pool.caching:
            job.prefix_keys = prefix_keys(group, self.bounds.page_size)
        self.queue[uid] = Client(job, group, self.shard.steps, set(range(job.choices)))
        self.scheduler.arrive(job)

    def _job(self, uid: int) -> Job:
        """A random job that can run, if need be alone."""
        bounds = self.bounds
        choices = self.random.choice((1, 1, 1, min(3, bounds.sequences)))
        longest = max(2, min(bounds.pages * bounds.page_size // choices, 200))
        while True:
            tokens = self.random.randint(2, self.random.choice((longest, min(8, longest))))
            prompt = self.random.randint(1, self.random.choice((tokens - 1, min(3, tokens - 1))))
            if most_pages(prompt, tokens - prompt, choices, bounds.page_size) <= bounds.pages:
                break
            choices = 1
        rank = float(self.shard.steps + self.random.choice((0, 0, 0, 5, 60)))
        return Job(uid, prompt, tokens - prompt, choices, rank, self.random.choice(self.tenants))

    def _cancel_at_random(self) -> None:
        """At random, cancels a job, or ends one of its choices early."""
        if self.random.random() >= self.cancel_probability or not (self.queue or self.live):
            return
        uid = self.random.choice([*self.queue, *self.live])
        client = self.queue.get(uid) or self.live[uid]
        if len(client.running) > 1 and client.started and self.random.random() < 0.7:
            choice = self.random.choice(sorted(client.running))
            client.running.discard(choice)
            if uid in self.grow:  # else it has no pages
                self.ended_choices.append((uid, choice))
            self.scheduler.end(uid, choice)
            return
        if self.queue.pop(uid, None) is None:
            if uid in self.grow:  # else its preemption is in flight
                self.cancelled.append(uid)
                self.ended_choices = [end for end in self.ended_choices if end[0] != uid]
            self._forget(uid)
        self.scheduler.cancel(uid)

    def _forget(self, uid: int) -> None:
        self.live.pop(uid, None)
        self.grow.pop(uid, None)
        self.joined.discard(uid)
        self.decoding.discard(uid)

    # Commands

    def _execute(self, action: Action) -> None:
        if self.cancelled or self.ended_choices:
            assert isinstance(action, Filter), "cancelled groups come first"
        if isinstance(action, Filter):
            self._filter(action)
            return
        if isinstance(action, Prefill):
            self._admit(action)
            self._check_prompts(action)
            new = [self._group(uid) for uid in action.new]
            outcome = self.shard.prefill(new, action.chunks, action.tokens, action.decode)
            assert outcome.prompt_tokens <= action.tokens, "over the budget"
        else:
            assert isinstance(action, Decode)
            outcome = self.shard.decode()
        assert self.shard.largest <= largest_step(self.bounds.step_tokens, self.bounds.sequences), "more than was warmed up"
        self.in_flight.append(Sent(action, outcome, set(outcome.first)))

    def _filter(self, action: Filter) -> None:
        assert action.drop or action.pause or action.end, "a filter for nobody"
        assert action.drop == tuple(self.cancelled), "cancelled groups are dropped, and no others"
        assert action.end == tuple(self.ended_choices), "choices that nobody wants are ended, and no others"
        self.cancelled.clear()
        self.ended_choices.clear()
        if action.pause:
            assert sum(self.grow.values()) > self.free, "a pause that nobody needs"
            rest = [self.live[uid].order for uid in self.grow if uid not in action.pause]
            assert rest, "the first is paused"
            assert all(self.live[uid].order > max(rest) for uid in action.pause), "an older one is paused"
        released = self.shard.filter(action.drop, action.pause, action.end)
        self.score.pauses += len(released.paused)
        for uid in action.pause:
            self.grow.pop(uid)
            self.joined.discard(uid)
            self.decoding.discard(uid)
        self.in_flight.append(Sent(action, released, set()))

    def _group(self, uid: int) -> Asked:
        """The group as it joins the batch: from the start, or resumed after its preemption."""
        client = self.live[uid]
        resumes = self.resumes.pop(uid, ())
        kept = tuple((choice, count) for choice, count in resumes if choice in client.running)
        return Asked(**{name: getattr(client.group, name) for name in Asked.__slots__} | {"continuations": kept})

    def _admit(self, action: Prefill) -> None:
        for uid in action.new:
            client = self.queue.pop(uid)  # KeyError: it does not wait
            self.live[uid] = client
            self.grow[uid] = client.job.grow
            self.joined.add(uid)
            client.paused = False
            running = sum(len(self.live[other].running) for other in self.grow)
            assert running <= self.bounds.sequences, "more than may run"
            for other in self.queue.values():
                if other.order < client.order and other.job.tenant == client.job.tenant and other.job.uid not in action.new:
                    alone = not any(self.live[uid].order < other.order for uid in self.grow)  # else it may wait for older ones
                    other.overtaken += alone
                    assert not (other.paused and alone), "a paused one is overtaken"
                    assert other.overtaken <= self.bounds.overtakes, "overtaken too often"
        assert sum(self.grow.values()) <= self.free, "pages are promised twice"

    def _check_prompts(self, action: Prefill) -> None:
        assert action.chunks
        assert {uid for uid, _ in action.chunks} <= set(self.live)
        if self.policy.mixes:
            assert action.decode or not self.decoding, "a running group waits for a prompt"
        first, most = action.chunks[0]
        named = [self.live[uid].order for uid, _ in action.chunks]
        assert self.live[first].order == min(named), "the oldest prompt does not come first"
        assert most >= max(1, action.tokens // 2), "the oldest prompt gets less than half"

    # Replies

    def _receive(self, sent: Sent) -> None:
        self._cancel_at_random()
        if isinstance(sent.outcome, Released):
            self._receive_filter(sent.outcome)
        else:
            self._receive_step(sent.outcome, sent.first)

    def _receive_filter(self, released: Released) -> None:
        self.free = released.free
        self.resumes |= released.continuations
        for uid, _, _ in released.paused:
            client = self.live.pop(uid, None)
            if client is not None:  # else cancelled in the meantime
                client.paused = True
                client.overtaken = 0
                self.queue[uid] = client
        self.scheduler.paused(released.free, released.cached, released.paused)

    def _receive_step(self, outcome: Outcome, first: set[int]) -> None:
        self.free = outcome.free
        for uid in first & self.live.keys():
            client = self.live[uid]
            client.started = True
            self.score.waits += self.shard.steps - client.arrived
        self.score.restored += outcome.restored_tokens
        finished = []
        for uid, choice in outcome.finished:
            client = self.live.get(uid) or self.queue.get(uid)  # type: ignore[assignment]
            if client is not None and choice in client.running:
                client.running.discard(choice)
                finished.append(uid)
                if not client.running:
                    self._forget(uid)
        for uid, grow, lacking in zip(outcome.uids, outcome.grow, outcome.lacking, strict=True):
            if uid in self.grow:
                assert uid not in self.joined or grow <= self.grow[uid], "less is shared than was counted on"
                self.joined.discard(uid)
                self.grow[uid] = grow
                self.decoding |= set() if lacking else {uid}
        self.scheduler.report(
            Report(
                free=outcome.free,
                cached=outcome.cached,
                uids=outcome.uids,
                held=outcome.held,
                grow=outcome.grow,
                lacking=outcome.lacking,
                finished=finished,
                failed=outcome.failed,
                seconds=0.001 + 0.001 * (outcome.prompt_tokens + outcome.decode_tokens),
                prompt_tokens=outcome.prompt_tokens,
                cached_tokens=outcome.cached_tokens,
                decode_tokens=outcome.decode_tokens,
                prompt_keys=outcome.prompt_keys,
                decode_keys=outcome.decode_keys,
                rows=outcome.rows,
            )
        )


def simulate(seeds: range, make: Make = Scheduler) -> Score:
    """Simulates one workload for each seed. Raises AssertionError or KeyError if a rule is broken."""
    score = Score()
    for seed in seeds:
        try:
            Workload(seed, make, score).run()
        except (AssertionError, KeyError) as error:
            error.add_note(f"in the world of seed {seed}")
            raise
    return score
