"""Drives the scheduler through random worlds, against a shard of integers, and holds what `router/scheduler.py` promises.

A world is small, so that everything is scarce and violations come quickly. It keeps its own books: it never asks the
scheduler what it thinks, only what it wants done. Events fall between a step and its report, as they do in the server.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.router.scheduler import Action, Bounds, Decode, Filter, Job, Prefill, Scheduler, largest_step, prompt_share
from penstock.tests.router.fakes import Model, Progress, Row


@dataclass
class Score:
    """What a policy costs. Lower is better."""

    steps: int = 0  # forwards
    waits: int = 0  # steps from each arrival to its first token, summed
    tokens: int = 0  # generated


@dataclass
class Asked:
    """A job as its client knows it."""

    uid: int
    prompt: int
    most: int
    arrived: int  # step
    overtaken: int = 0


@dataclass
class World:
    """One random world: `run` plays it to its end."""

    seed: int
    make: Callable[[Bounds], Scheduler]
    score: Score = field(default_factory=Score)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        page_size = self.random.choice((1, 2, 4, 16))
        pages = self.random.randint(1, 40)
        capacity = max(2, pages * page_size)
        self.bounds = Bounds(
            pages=max(pages, 2 // page_size),
            page_size=page_size,
            step_tokens=self.random.choice((1, 2, 7, 16, 64)),
            total_tokens=self.random.choice((capacity, self.random.randint(2, capacity), 4 * capacity)),
            groups=self.random.choice((1, 2, 5, 64)),
            overtakes=self.random.choice((1, 3, 16)),
        )
        self.longest = min(self.bounds.pages * page_size, self.bounds.total_tokens)
        self.model = Model(self.bounds.pages, page_size)
        self.scheduler = self.make(self.bounds)
        self.queue: dict[int, Asked] = {}
        self.live: dict[int, Asked] = {}  # admitted, neither ended nor cancelled
        self.left: list[int] = []  # cancelled while live, not dropped yet
        self.arrivals = self.random.randint(1, 25)
        self.pressure = self.random.choice((0.05, 0.3, 0.9))
        self.impatience = self.random.choice((0.0, 0.02, 0.2))

    def run(self) -> None:
        uid = 0
        idle = 0
        while uid < self.arrivals or self.queue or self.live or self.left:
            if uid < self.arrivals and self.random.random() < self.pressure:
                uid += 1
                self._arrive(uid)
            self._cancel()
            action = self.scheduler.next()
            if action is None:
                assert not self.queue, "it sleeps while a job waits"
                assert not self.live, "it sleeps while a job runs"
                idle += 1
                assert idle < 10_000
                continue
            self._act(action)
        assert self.scheduler.next() is None
        assert self.model.free == self.bounds.pages == self.scheduler.free, "pages are lost"
        assert (self.scheduler.waiting, self.scheduler.running, self.scheduler.held) == (0, 0, 0), "jobs are lost"
        self.score.steps += self.model.steps

    def _arrive(self, uid: int) -> None:
        tokens = self.random.randint(2, self.random.choice((self.longest, min(8, self.longest))))
        prompt = self.random.randint(1, tokens - 1)
        self.queue[uid] = Asked(uid, prompt, tokens - prompt, self.model.steps)
        self.scheduler.arrive(Job(uid, prompt, tokens - prompt))

    def _cancel(self) -> None:
        if self.random.random() >= self.impatience or not (self.queue or self.live):
            return
        uid = self.random.choice([*self.queue, *self.live])
        if self.queue.pop(uid, None) is None:
            del self.live[uid]
            self.left.append(uid)
        self.scheduler.cancel(uid)

    def _act(self, action: Action) -> None:
        if self.left:
            assert action == Filter(tuple(self.left)), "cancelled groups come first"
            self.model.filter(action.drop)
            self.left.clear()
            self._cancel()
            self.scheduler.report(free=self.model.free)
            return
        assert isinstance(action, Prefill | Decode), "a filter for nobody"
        self._report(self._forward(action))

    def _forward(self, action: Prefill | Decode) -> list[Row]:
        decodes = sum(group.decodable for group in self.model.groups.values())
        chunks = action.chunks if isinstance(action, Prefill) else ()
        assert action.batch == 1
        assert isinstance(action, Decode) or action.decode == (decodes > 0), "a running group waits for a prompt"
        share = prompt_share(self.bounds.step_tokens)
        room = max(self.bounds.step_tokens - decodes, share)
        used = sum(length for _, length in chunks)
        assert used <= room, "over the budget"
        self._admit(action.new if isinstance(action, Prefill) else ())
        rows = self.model.step(chunks, decode=decodes > 0)
        assert self.model.largest <= largest_step(self.bounds.step_tokens, self.bounds.groups), "more than was warmed up"
        if used < room:
            assert all(group.decodable for group in self.model.groups.values()), "a prompt is held back"
            oldest = next(iter(self.queue.values()), None)
            assert oldest is None or not self._fits(oldest), "the oldest fits and waits"
        return rows

    def _admit(self, new: tuple[int, ...]) -> None:
        for uid in new:
            asked = self.queue.pop(uid)  # KeyError: it does not wait
            assert self._allowed([*self.live.values(), asked]), "beyond the operator's bounds"
            self.live[uid] = asked
            ends_at = self.random.choice((0, self.random.randint(1, asked.most)))
            self.model.add(Progress(uid, asked.prompt, asked.most, ends_at))
            for earlier in self.queue.values():
                if earlier.uid < uid:
                    earlier.overtaken += 1
                    assert earlier.overtaken <= self.bounds.overtakes, "overtaken too often"

    def _allowed(self, jobs: list[Asked]) -> bool:
        """By the operator. Whether pages suffice is for the model to say."""
        return sum(job.prompt + job.most for job in jobs) <= self.bounds.total_tokens and len(jobs) <= self.bounds.groups

    def _fits(self, asked: Asked) -> bool:
        """Whether a job could be admitted, if all that run reach their full length."""
        jobs = [*self.live.values(), asked]
        pages = sum(-(-(job.prompt + job.most) // self.bounds.page_size) for job in jobs)
        return pages <= self.bounds.pages and self._allowed(jobs)

    def _report(self, rows: list[Row]) -> None:
        uids = list(self.model.groups)
        held = [self.model.held(uid) for uid in uids]
        grow = [self.model.grow(uid) for uid in uids]
        free = self.model.free
        self._cancel()  # between the step and its report
        self.score.tokens += len(rows)
        for row in rows:
            if row.position == 0 and row.uid in self.live:
                self.score.waits += self.model.steps - self.live[row.uid].arrived
        ended = [row.uid for row in rows if row.finish]
        for uid in ended:
            self.live.pop(uid, None)
        self.scheduler.report(free=free, uids=uids, held=held, grow=grow, ended=ended)


def simulate(worlds: range, make: Callable[[Bounds], Scheduler] = Scheduler) -> Score:
    """Plays one world for each seed. AssertionError or KeyError: a promise is broken."""
    score = Score()
    for seed in worlds:
        try:
            World(seed, make, score).run()
        except (AssertionError, KeyError) as error:
            error.add_note(f"in the world of seed {seed}")
            raise
    return score
