"""The router's scheduler with a shard whose steps overlap, under random traffic: the page counts that replies give for the next
step are never exceeded, so no request fails for lack of pages.
"""

import random
from collections import deque
from concurrent.futures import Future
from typing import Any

import pytest

from penstock.proto import shard_pb2 as wire
from penstock.router.policies import ChunkedPrefill
from penstock.router.prefix_keys import PrefixKeys
from penstock.router.scheduler import Action, Bounds, Decode, Filter, Job, Prefill, Report, Scheduler, most_pages
from penstock.shard.decoding.hypotheses import Search
from penstock.shard.messages import group_from, paused_to
from penstock.shard.outcome import Outcome
from penstock.shard.sequence import Sampling
from penstock.tests.shard import tiny
from penstock.tests.shard.audited_engine import AuditedEngine
from penstock.tests.shard.audited_engine import audited_engine as audited_engine  # a fixture
from penstock.tests.shard.driver import message

MAX_ROUNDS = 20_000  # after which a run counts as stuck
BATCH = 1


class RandomTraffic:
    """Requests that arrive, are cancelled and end at random, with few pages. The shard checks its page bookkeeping in every
    step."""

    def __init__(self, engine_type: type[AuditedEngine], seed: int, beam_share: float) -> None:
        """beam_share: the fraction of requests that are beam searches."""
        self.beam_share = beam_share
        self.rng = rng = random.Random(seed)
        self.page_size, pages = rng.choice((1, 2, 4)), rng.randint(4, 40)
        budget, sequences = rng.choice((1, 2, 7, 16, 64)), rng.choice((1, 2, 5, 64))
        bounds = Bounds(pages=pages, page_size=self.page_size, step_tokens=budget, sequences=sequences, headroom=rng.choice((1, 8)))
        self.prefix_keys = PrefixKeys(self.page_size, 16)
        self.bounds, self.scheduler = bounds, Scheduler(bounds, ChunkedPrefill(budget))
        self.engine = engine_type(pages, self.page_size, rng.random() < 0.7, ahead=True)
        self.to_arrive = rng.randint(1, 20)  # requests that are still to arrive
        self.groups: dict[int, wire.Group] = {}
        self.running: dict[int, set[int]] = {}  # uid to unfinished choices
        self.unanswered: deque[tuple[Action, Any]] = deque()
        self.begun = False  # the step after the one that was answered last had begun by then
        self.overlapped = self.preemptions = 0

    def run(self) -> None:
        for _ in range(MAX_ROUNDS):
            if not (self.to_arrive or self.running or self.unanswered):
                break
            if self.to_arrive and self.rng.random() < 0.3:
                self._add_request()
            if self.running and self.rng.random() < 0.02:
                self._cancel_request()
            decodes = all(isinstance(action, Decode) for action, _ in self.unanswered)
            action = self.scheduler.next() if len(self.unanswered) < 2 + (self.begun and decodes) else None
            if action is not None:
                self.unanswered.append((action, self._execute(action)))
            elif self.unanswered:
                self._process_reply(*self.unanswered.popleft())
            else:
                assert not self.running, "a running request is never scheduled"
        else:
            raise AssertionError("stuck")
        self.engine.land()
        assert self.engine.pool.free == self.bounds.pages

    def _add_request(self) -> None:
        uid, rng = self.to_arrive, self.rng
        self.to_arrive -= 1
        total = rng.randint(2, max(2, min(self.bounds.pages * self.page_size, 60)))
        length = rng.randint(1, total - 1)
        choices = min(rng.choice((1, 1, 3)), self.bounds.sequences)
        if most_pages(length, total - length, choices, self.page_size) > self.bounds.pages:
            choices = 1
        search, width = None, rng.randint(2, 4)
        if rng.random() < self.beam_share and self.scheduler.admissible(length, total - length, width):
            search, choices = Search(width, 1), 1
        tokens = [0] * rng.randint(0, length - 1)
        tokens += [rng.randrange(3) for _ in range(length - len(tokens))]
        more: Any = {"choices": choices, "end_ids": rng.choice([(), (3,)]), "search": search}
        self.groups[uid] = message(tiny.group(uid, tokens, total - length, Sampling(seed=uid % 3), **more))
        self.running[uid] = set(range(search.width if search else choices))
        job = Job(uid, length, total - length, len(self.running[uid]), float(-uid))
        if self.engine.books.prefixes.enabled:
            job.prefix_keys = self.prefix_keys.of(tuple(tokens), "")
        self.scheduler.arrive(job)

    def _cancel_request(self) -> None:
        uid = self.rng.choice(sorted(self.running))
        del self.running[uid]
        self.scheduler.cancel(uid)

    def _execute(self, action: Action) -> Any:
        if isinstance(action, Filter):
            self.engine.filter(action.drop)
            self.engine.end(action.end)
            paused = [paused_to(group, self.page_size) for group in self.engine.pause(action.pause)]
            self.preemptions += len(paused)
            return paused, self.engine.pool.free, self.engine.pool.cached
        if self.rng.random() < 0.2:
            self.engine.land()  # the command arrives late, after the step has landed
        if isinstance(action, Prefill):
            groups = [group_from(self.groups[uid]) for uid in action.new]
            return self.engine.begin_prefill(BATCH, groups, action.chunks, action.tokens, [BATCH] if action.decode else [])
        return self.engine.begin_decode([BATCH])

    def _process_reply(self, action: Action, reply: Any) -> None:
        if isinstance(action, Filter):
            paused, free, cached = reply
            for one in paused:
                del self.groups[one.uid].continuations[:]
                self.groups[one.uid].continuations.extend(one.continuations)
            self.scheduler.paused(free, cached, [(one.uid, one.grow, one.lacking) for one in paused])
            return
        assert isinstance(reply, Future)
        if not reply.done():
            self.engine.land()
        outcome: Outcome = reply.result()
        assert not outcome.failed, "the scheduler was promised pages that are not free"
        self.begun = outcome.ahead
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


@pytest.mark.parametrize("beam_share", [0.0, 0.5])
def test_no_request_runs_out_of_pages_while_steps_overlap(audited_engine: type[AuditedEngine], beam_share: float) -> None:
    overlapped = preemptions = 0
    for seed in range(250):
        traffic = RandomTraffic(audited_engine, seed, beam_share)
        traffic.run()
        overlapped, preemptions = overlapped + traffic.overlapped, preemptions + traffic.preemptions
    assert overlapped > 1000
    assert preemptions > 20
