"""The router's scheduler and a shard whose steps overlap: what replies say of the next step, too, keeps every promise of pages."""

import random
from collections import deque
from concurrent.futures import Future
from typing import Any

import pytest

from penstock.proto import shard_pb2 as wire
from penstock.router.policies import ChunkedPrefill
from penstock.router.prefix_keys import PrefixKeys
from penstock.router.scheduler import Action, Bounds, Filter, Job, Prefill, Report, Scheduler, most_pages
from penstock.shard.decoding.hypotheses import Search
from penstock.shard.messages import group_from, paused_to
from penstock.shard.outcome import Outcome
from penstock.shard.sequence import Sampling
from penstock.tests.shard import tiny
from penstock.tests.shard.audited_engine import AuditedEngine
from penstock.tests.shard.audited_engine import audited_engine as audited_engine  # a fixture
from penstock.tests.shard.driver import message

ROUNDS = 20_000  # after which a world counts as stuck
BATCH = 1


class World:
    """Requests that come, leave and end at random, in little room. The shard checks its books with every step."""

    def __init__(self, kind: type[AuditedEngine], seed: int, beams: float) -> None:
        """beams: how many requests, of all, search."""
        self.beams = beams
        self.chance = chance = random.Random(seed)
        self.size, pages = chance.choice((1, 2, 4)), chance.randint(4, 40)
        budget, sequences = chance.choice((1, 2, 7, 16, 64)), chance.choice((1, 2, 5, 64))
        bounds = Bounds(pages=pages, page_size=self.size, step_tokens=budget, sequences=sequences, headroom=chance.choice((1, 8)))
        self.prefix_keys = PrefixKeys(self.size, 16)
        self.bounds, self.scheduler = bounds, Scheduler(bounds, ChunkedPrefill(budget))
        self.engine = kind(pages, self.size, chance.random() < 0.7, ahead=True)
        self.left = chance.randint(1, 20)  # that are still to come
        self.asked: dict[int, wire.Group] = {}
        self.running: dict[int, set[int]] = {}  # choices
        self.unheard: deque[tuple[Action, Any]] = deque()
        self.overlapped = self.pauses = 0

    def run(self) -> None:
        for _ in range(ROUNDS):
            if not (self.left or self.running or self.unheard):
                break
            if self.left and self.chance.random() < 0.3:
                self._arrive()
            if self.running and self.chance.random() < 0.02:
                self._leave()
            action = self.scheduler.next() if len(self.unheard) < 2 else None
            if action is not None:
                self.unheard.append((action, self._execute(action)))
            elif self.unheard:
                self._hear(*self.unheard.popleft())
            else:
                assert not self.running, "somebody is forgotten"
        else:
            raise AssertionError("stuck")
        self.engine.land()
        assert self.engine.pool.free == self.bounds.pages

    def _arrive(self) -> None:
        uid, chance = self.left, self.chance
        self.left -= 1
        total = chance.randint(2, max(2, min(self.bounds.pages * self.size, 60)))
        length = chance.randint(1, total - 1)
        choices = min(chance.choice((1, 1, 3)), self.bounds.sequences)
        if most_pages(length, total - length, choices, self.size) > self.bounds.pages:
            choices = 1
        search, width = None, chance.randint(2, 4)
        if chance.random() < self.beams and self.scheduler.admissible(length, total - length, width):
            search, choices = Search(width, 1), 1
        tokens = [0] * chance.randint(0, length - 1)
        tokens += [chance.randrange(3) for _ in range(length - len(tokens))]
        more: Any = {"choices": choices, "end_ids": chance.choice([(), (3,)]), "search": search}
        self.asked[uid] = message(tiny.group(uid, tokens, total - length, Sampling(seed=uid % 3), **more))
        self.running[uid] = set(range(search.width if search else choices))
        job = Job(uid, length, total - length, len(self.running[uid]), float(-uid))
        if self.engine.books.prefixes is not None:
            job.prefix_keys = self.prefix_keys.of(tuple(tokens), "")
        self.scheduler.arrive(job)

    def _leave(self) -> None:
        uid = self.chance.choice(sorted(self.running))
        del self.running[uid]
        self.scheduler.cancel(uid)

    def _execute(self, action: Action) -> Any:
        if isinstance(action, Filter):
            self.engine.filter(action.drop)
            self.engine.end(action.end)
            paused = [paused_to(group, self.size) for group in self.engine.pause(action.pause)]
            self.pauses += len(paused)
            return paused, self.engine.pool.free, self.engine.pool.cached
        if self.chance.random() < 0.2:
            self.engine.land()  # the command comes late
        if isinstance(action, Prefill):
            groups = [group_from(self.asked[uid]) for uid in action.new]
            return self.engine.begin_prefill(BATCH, groups, action.chunks, action.tokens, [BATCH] if action.decode else [])
        return self.engine.begin_decode([BATCH])

    def _hear(self, action: Action, reply: Any) -> None:
        if isinstance(action, Filter):
            paused, free, cached = reply
            for one in paused:
                del self.asked[one.uid].continuations[:]
                self.asked[one.uid].continuations.extend(one.continuations)
            self.scheduler.paused(free, cached, [(one.uid, one.grow, one.lacking) for one in paused])
            return
        assert isinstance(reply, Future)
        if not reply.done():
            self.engine.land()
        outcome: Outcome = reply.result()
        assert not outcome.failed, "pages were promised that there are not"
        self.overlapped += outcome.ahead
        uids, held, grow, lacking = zip(*outcome.standing, strict=True) if outcome.standing else ((), (), (), ())
        report = Report(
            free=outcome.free, cached=outcome.cached, uids=uids, held=held, grow=grow, lacking=lacking,
            finished=self._finished(outcome), prompt_tokens=outcome.prompt_tokens, decode_tokens=outcome.decode_tokens,
            ahead=outcome.ahead,
        )  # fmt: skip
        self.scheduler.report(report)

    def _finished(self, outcome: Outcome) -> list[int]:
        searched = {uid for uid, _ in outcome.scored} & self.running.keys()
        found = [(uid, one.choice) for uid, one in outcome.emitted if one.finish and uid in self.running.keys() - searched]
        found += [(uid, choice) for uid in sorted(searched) for choice in sorted(self.running[uid])]
        for uid, choice in found:
            self.running[uid].discard(choice)
            if not self.running[uid]:
                del self.running[uid]
        return [uid for uid, _ in found]


@pytest.mark.parametrize("beams", [0.0, 0.5])
def test_promises_of_pages_are_kept_while_steps_overlap(audited_engine: type[AuditedEngine], beams: float) -> None:
    overlapped = pauses = 0
    for seed in range(250):
        world = World(audited_engine, seed, beams)
        world.run()
        overlapped, pauses = overlapped + world.overlapped, pauses + world.pauses
    assert overlapped > 1000
    assert pauses > 20
