"""Replays a trace against the router's scheduler, like the router's loop, with simulated shards and a simulated clock.

The duration of a step follows from `Speed`. The next is requested shortly before the one in flight ends, so that the shards never
wait, and whatever the scheduler decides takes effect one step late: as in router/steps.py.
"""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..router.admission import admits
from ..router.policies import Policy
from ..router.scheduler import DELAYS, Action, Bounds, Decode, Filter, Job, Prefill, Report, Scheduler
from .machines import Speed
from .measures import Measures
from .shard import Asked, Continuations, IntegerShard, Outcome, Released, prefix_keys
from .trace import Request

LEAD = 0.01  # seconds before the end of a step when the next is requested


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The simulated server."""

    speed: Speed
    bounds: Bounds
    policy: Policy | None = None  # by default, the scheduler's own
    prefix_caching: bool = True
    concurrent: int = 0  # requests in flight from which on others are refused, but for tenants that have few; 0: no limit
    lookahead: bool = True  # a step is requested before the one in flight is answered
    lead: float = LEAD
    ttft_goal: float = 2.0  # seconds; a request is good if it keeps both ...
    itl_goal: float = 0.1  # ... this one on average


@dataclass(slots=True, eq=False)
class Live:
    """A request in flight."""

    uid: int
    request: Request
    asked: Asked
    left: int  # choices that have not ended
    started: float = -1.0  # when the first step began that computed something of it
    first: float = -1.0  # time of its first token
    last: float = -1.0  # time of its last token before it was preempted
    continuations: Continuations = ()


@dataclass(slots=True)
class Underway:
    """A command in flight."""

    action: Action
    done: Outcome | Released
    began: float
    ends: float


class Replay:
    """Replay of one trace: `run` returns its measures."""

    def __init__(self, setting: Setting, requests: Sequence[Request]) -> None:
        self.scheduler = Scheduler(setting.bounds, setting.policy) if setting.policy else Scheduler(setting.bounds)
        self.shard = IntegerShard(setting.bounds.pages, setting.bounds.page_size, setting.prefix_caching)
        self.measures = Measures(setting.bounds.pages, setting.ttft_goal, setting.itl_goal)
        self._setting = setting
        self._requests = requests
        self._arrived = 0
        self._live: dict[int, Live] = {}
        self._in_flight: Counter[str] = Counter()  # of these, by tenant; none has zero
        self._underway: deque[Underway] = deque()
        self._decoding: dict[str, int] = {}  # sequences that were in the last decode step and go on, by priority
        self._steady: set[int] = set()  # uids of their requests
        self._joined: dict[int, Live] = {}  # requests that will be in the next decode step, but were not in the last
        self._ticked = 0.0  # when that ended
        self._now = 0.0
        self._free = 0.0  # when the shards will be idle

    def run(self) -> Measures:
        """Plays the whole trace."""
        began = time.perf_counter()
        while self._arrived < len(self._requests) or self._live:
            self._send(1)
            if not self._underway:
                assert self._arrived < len(self._requests), "the scheduler sleeps while requests wait"
                self._now = max(self._now, self._requests[self._arrived].arrival)
                self._sample(self.shard.free, self.shard.pool.cached)  # nothing ran until now
                self._arrive()
                continue
            oldest = self._underway[0]
            if self._setting.lookahead:
                self._arrivals(oldest.ends - self._setting.lead)
                self._send(2)
            self._arrivals(oldest.ends)
            self._underway.popleft()
            self._now = oldest.ends
            self._answer(oldest)
        self.measures.seconds, self.measures.real_seconds = self._now, time.perf_counter() - began
        return self.measures

    # Requests

    def _arrivals(self, until: float) -> None:
        while self._arrived < len(self._requests) and self._requests[self._arrived].arrival <= until:
            self._arrive()
        self._now = max(self._now, until)

    def _arrive(self) -> None:
        request = self._requests[self._arrived]
        self._arrived += 1
        self._now = max(self._now, request.arrival)
        uid, setting = self._arrived, self._setting
        if not self.scheduler.admissible(request.prompt, request.max_new_tokens, request.choices):
            self.measures.impossible += 1
        elif setting.concurrent and not admits(self._in_flight, setting.concurrent, request.tenant):
            self.measures.refused += 1
        else:
            asked = Asked(
                uid=uid,
                prompt=request.prompt,
                most=request.max_new_tokens,
                choices=request.choices,
                ends_at=request.outputs,
                prefix=request.prefix,
            )
            self._live[uid] = Live(uid, request, asked, request.choices)
            self._in_flight[request.tenant] += 1
            job = Job(
                uid,
                request.prompt,
                request.max_new_tokens,
                choices=request.choices,
                rank=request.arrival + DELAYS[request.priority],
                tenant=request.tenant,
                prefix_keys=prefix_keys(asked, setting.bounds.page_size) if setting.prefix_caching else (),
            )
            self.scheduler.arrive(job)

    # Commands

    def _send(self, steps: int) -> None:
        """Requests what is next, until `steps` steps are in flight."""
        while sum(not isinstance(one.action, Filter) for one in self._underway) < steps:
            action = self.scheduler.next()
            if action is None:
                return
            done = self._execute(action)
            seconds = self._setting.speed.seconds(done) if isinstance(done, Outcome) else 0.0
            began = max(self._now, self._free)
            self._free = began + seconds
            self._underway.append(Underway(action, done, began, self._free))

    def _execute(self, action: Action) -> Outcome | Released:
        match action:
            case Prefill():
                return self.shard.prefill([self._asked(uid) for uid in action.new], action.chunks, action.tokens, action.decode)
            case Decode():
                return self.shard.decode()
            case Filter():
                return self.shard.filter(action.drop, action.pause, action.end)

    def _asked(self, uid: int) -> Asked:
        live = self._live[uid]
        return replace(live.asked, continuations=live.continuations) if live.continuations else live.asked

    # Answers

    def _answer(self, command: Underway) -> None:
        done, scheduler = command.done, self.scheduler
        if isinstance(done, Released):
            self._pause(done)
            scheduler.paused(done.free, done.cached, done.paused)
        else:
            self._tokens(command.began, done)
            scheduler.report(report(done, command.ends - command.began))
        self._sample(done.free, done.cached)

    def _sample(self, free: int, cached: int) -> None:
        self.measures.sample(self._now, free, cached, self.scheduler.running, self.scheduler.waiting)

    def _tokens(self, began: float, done: Outcome) -> None:
        """Records who got a token, and how long after the one before."""
        measures, now = self.measures, self._now
        measures.step(done, now - began)
        if done.decode_tokens:
            self._gaps(done.decode_tokens)
        for uid in done.computed:
            live = self._live[uid]
            if live.started < 0:
                live.started = began
                measures.begin(live.request.priority, began - live.request.arrival)
        for uid in done.first:
            live = self._live[uid]
            live.first = live.last = now
            measures.first(live.request.priority, now - live.request.arrival)
            self._joined[uid] = live
        for uid in done.restored:
            self._joined[uid] = self._live[uid]
        for uid, _ in done.finished:
            self._finish(self._live[uid])

    def _gaps(self, tokens: int) -> None:
        """Sequences that decoded in the last decode step, too, share their gap; the others have one of their own."""
        measures, now = self.measures, self._now
        for priority, count in self._decoding.items():
            measures.gap(priority, now - self._ticked, count)
        for uid, live in self._joined.items():
            measures.gap(live.request.priority, now - live.last, live.left)
            self._count(live, live.left)
            self._steady.add(uid)
        self._joined.clear()
        self._ticked = now
        assert sum(self._decoding.values()) == tokens, "the shard decodes others"

    def _count(self, live: Live, more: int) -> None:
        priority = live.request.priority
        self._decoding[priority] = self._decoding.get(priority, 0) + more

    def _finish(self, live: Live) -> None:
        """One of its choices has ended."""
        live.left -= 1
        if live.uid in self._steady:
            self._count(live, -1)
        if not live.left:
            request = live.request
            self._joined.pop(live.uid, None)
            self._steady.discard(live.uid)
            del self._live[live.uid]
            self._in_flight -= Counter((request.tenant,))  # drops zeros
            arrived = request.arrival
            self.measures.finish(request.priority, live.first - arrived, self._now - arrived, max(request.outputs))

    def _pause(self, done: Released) -> None:
        for uid, continuations in done.continuations.items():
            live = self._live[uid]
            live.continuations = continuations
            self.measures.pauses += 1
            if uid in self._steady:
                self._steady.discard(uid)
                self._count(live, -live.left)
                live.last = self._ticked
            else:
                self._joined.pop(uid, None)


def report(done: Outcome, seconds: float) -> Report:
    """A step as a report to the scheduler."""
    return Report(
        free=done.free,
        cached=done.cached,
        uids=done.uids,
        held=done.held,
        grow=done.grow,
        lacking=done.lacking,
        finished=[uid for uid, _ in done.finished],
        seconds=seconds,
        prompt_tokens=done.prompt_tokens,
        cached_tokens=done.cached_tokens,
        decode_tokens=done.decode_tokens,
        prompt_keys=done.prompt_keys,
        decode_keys=done.decode_keys,
        rows=done.rows,
    )
