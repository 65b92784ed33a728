"""Step pipeline of one rank group, from connection to loss: sends commands ahead of replies and handles replies in order.

It translates the scheduler's actions into commands, and replies into reports. What tokens mean for streams is the batcher's.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic

from ..proto import shard_pb2
from .commands import allowance_of, command, group_of
from .metrics import Metrics
from .replies import report_of
from .request import Broken
from .scheduler import Action, Decode, Filter, Prefill, Scheduler
from .shards import Shards
from .streams import Stream

LEAD = 0.01  # seconds before the expected end of a step when the next is sent: late enough for new requests to join it
# The same for shards that overlap steps, which plan and launch the next before that end. Steps would stop overlapping as soon as
# planning took longer: what is sent late is answered late, and the next is sent later still.
OVERLAPPING_LEAD = 0.03
# Decode steps that are shorter may be over before a reply has reached the router and the next command the shards.
SHORT = 0.01

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Underway:
    """A command that the shards have not answered yet."""

    action: Action
    sent: float
    reply: "asyncio.Future[shard_pb2.Reply]"

    @property
    def step(self) -> bool:
        """Whether it computes something."""
        return not isinstance(self.action, Filter)


class Steps:
    """The commands in flight to one rank group, and their replies; see the module."""

    def __init__(
        self,
        scheduler: Scheduler,
        shards: Shards,
        streams: Mapping[int, Stream],
        metrics: Metrics,
        fail: Callable[[int, Exception], None],
    ) -> None:
        """streams: all that need something of the shards, by uid; fail: ends one of them with an error."""
        self.scheduler = scheduler
        self._shards = shards
        self._streams = streams
        self._metrics = metrics
        self._fail = fail
        self._underway: deque[Underway] = deque()
        self._free = 0.0  # when the last command was answered
        self._begun = False  # whether, by the last reply, the shards have begun the next step, and count it as computed
        self._last: dict[str, float] = {}  # seconds of the last step, by kind: the expected duration of the next

    @property
    def underway(self) -> bool:
        """Whether a command waits for its reply."""
        return bool(self._underway)

    def send(self, steps: int) -> None:
        """Sends what the scheduler wants next, until `steps` steps are in flight."""
        while (ahead := sum(one.step for one in self._underway)) < steps:
            action = self.scheduler.next()
            if action is None:
                return
            if not isinstance(action, Filter):
                self._metrics.requested(action)
            now = monotonic()
            self._underway.append(Underway(action, now, self._shards.execute(self._command(action, now, ahead))))

    def send_due(self) -> None:
        """Sends what the shards should not wait for while tokens are delivered: the next step, and, where they overlap steps, the
        one after that, if it is due. Not where there may be drafts: those steps don't overlap, and how many drafts each stream gets
        depends on what was delivered."""
        due = False
        if self._underway and self._shards.info.overlaps:
            oldest = self._underway[0]
            drafts = not isinstance(oldest.action, Filter) and oldest.action.allowance is not None
            due = not drafts and self._until_due(oldest, self._free) <= 0
        self.send(2 if due else 1)
        if due and self._decodes_briefly():
            self.send(3)

    def _decodes_briefly(self) -> bool:
        """Whether a third step may be in flight: the first one has begun, so groups have told how many pages they may take in two
        more, and all are short. While there are prompts they don't tell: beams that have begun take more pages than prompts."""
        decodes = all(isinstance(one.action, Decode) for one in self._underway)
        return self._begun and decodes and self._last.get("decode", SHORT) < SHORT

    async def answer(self) -> shard_pb2.StepReply | None:
        """Sends the next step shortly before the oldest command is answered, and reports the reply to the scheduler. Returns the
        reply if it has tokens to deliver. Raises Broken when the shards are lost."""
        oldest = self._underway[0]
        began = max(oldest.sent, self._free)
        await self._near_end(oldest, began)
        self.send(2)
        try:
            reply = await oldest.reply
        except Broken:
            for one in self._underway:
                if not isinstance(one.action, Filter):
                    self._metrics.lost(one.action)
            raise
        self._free = monotonic()
        self._underway.popleft()
        return self._report(oldest.action, self._free - began, reply)

    async def _near_end(self, oldest: Underway, began: float) -> None:
        """Waits until shortly before the expected end of a step, judged by the last one of its kind."""
        seconds = self._until_due(oldest, began)
        if seconds > 0:
            await asyncio.wait([oldest.reply], timeout=seconds)

    def _until_due(self, oldest: Underway, began: float) -> float:
        """Seconds until the step after it should be sent."""
        lead = OVERLAPPING_LEAD if self._shards.info.overlaps else LEAD
        return began + self._last.get(_kind(oldest.action), 0.0) - lead - monotonic()

    def _command(self, action: Action, now: float, ahead: int) -> shard_pb2.Command:
        """ahead: steps in flight."""
        if isinstance(action, Filter):
            return command(action)
        new = action.new if isinstance(action, Prefill) else ()
        groups = [group for uid in new if (group := self._group(self._streams[uid], now)) is not None]
        drafts = action.allowance
        return command(action, groups, None if drafts is None else allowance_of(drafts, self._streams, now, ahead))

    def _group(self, stream: Stream, now: float) -> shard_pb2.Group | None:
        """The message for a request that begins or resumes. None: it can't be encoded, and the request fails."""
        stream.started = stream.run.started = stream.started or now
        try:
            return group_of(stream)
        except (ValueError, TypeError):  # a value that validation should have refused: only this request fails
            logger.exception("request %s fails: the shards can't be asked for it", stream.run.name)
            self.scheduler.forget(stream.uid)
            self._fail(stream.uid, Broken("the shards can't be asked for this request"))
            return None

    def _report(self, action: Action, seconds: float, reply: shard_pb2.Reply) -> shard_pb2.StepReply | None:
        """Reports a reply to the scheduler. Returns it if it has tokens to deliver."""
        if isinstance(action, Filter):
            filtered = reply.filter
            for paused in filtered.paused:
                stream = self._streams.get(paused.uid)
                # a restarted prompt finds its own computed pages in the cache: earlier cache hits don't count
                if stream is not None:
                    stream.continuations, stream.cached = tuple(paused.continuations), 0
            self.scheduler.paused(
                filtered.free, filtered.cached, [(paused.uid, paused.grow, paused.lacking) for paused in filtered.paused]
            )
            self._metrics.paused(len(action.pause))
            self._metrics.step(action, seconds, None)
            return None
        step = reply.step
        self.scheduler.report(report_of(step, self._finished(step)))
        self._last[_kind(action)], self._begun = seconds, step.ahead
        self._metrics.step(action, seconds, step)
        return step

    def _finished(self, step: shard_pb2.StepReply) -> list[int]:
        """The uid of each choice that has ended on the shards, unless it was ended here before."""
        finished: list[int] = []
        if any(step.finishes):
            for uid, index, finish in zip(step.uids, step.choices, step.finishes, strict=True):
                stream = self._streams.get(uid)
                if finish and stream is not None and stream.choices[index].running:
                    stream.choices[index].running = False
                    finished += [uid] if stream.request.beams is None else ()
        for uid in step.scored_uids:
            stream = self._streams.get(uid)
            if stream is not None:
                finished += [uid] * stream.request.sequences  # the scheduler counts each beam
        return finished


def _kind(action: Action) -> str:
    """Class of steps that take about the same time."""
    match action:
        case Decode():
            return "decode"
        case Prefill(decode=decode):
            return "mixed" if decode else "prefill"
        case Filter():
            return "filter"
