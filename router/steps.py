"""The steps of one rank group, from when it is met until it is lost: asked for ahead, answered in order.

Here the scheduler's words become the shards', and theirs become the scheduler's. What tokens mean for streams is the batcher's.
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

LEAD = 0.01  # seconds before the expected end of a step when the next is sent: late enough for new requests to be in it
# The same where it is planned and launched before that end. Steps would stop to overlap as soon as that took longer: what is sent
# late is answered late, and the next is sent later still.
OVERLAPPING_LEAD = 0.03

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Underway:
    """A command that the shards have not answered."""

    action: Action
    sent: float
    reply: "asyncio.Future[shard_pb2.Reply]"

    @property
    def step(self) -> bool:
        """Whether it computes something."""
        return not isinstance(self.action, Filter)


class Steps:
    """See the module."""

    def __init__(
        self,
        scheduler: Scheduler,
        shards: Shards,
        streams: Mapping[int, Stream],
        metrics: Metrics,
        fail: Callable[[int, Exception, str], None],
    ) -> None:
        """streams: all that need something of the shards, by uid; fail: ends one of them, and says of what kind that is."""
        self.scheduler = scheduler
        self._shards = shards
        self._streams = streams
        self._metrics = metrics
        self._fail = fail
        self._underway: deque[Underway] = deque()
        self._free = 0.0  # when the shards had answered the last command
        self._last: dict[str, float] = {}  # seconds of the last step, by kind: what the next is expected to take

    @property
    def underway(self) -> bool:
        """Whether there is something to be answered."""
        return bool(self._underway)

    def send(self, steps: int) -> None:
        """Asks for what is next, until so many steps are under way."""
        while (ahead := sum(one.step for one in self._underway)) < steps:
            action = self.scheduler.next()
            if action is None:
                return
            now = monotonic()
            self._underway.append(Underway(action, now, self._shards.execute(self._command(action, now, ahead))))

    def send_due(self) -> None:
        """Asks for what the shards should not wait for until tokens are delivered: the next step, and where they plan it while the
        one under way computes, the one after that, if it is due. Not where there may be drafts: those steps don't overlap, and who
        needs how many goes by what was delivered."""
        due = False
        if self._underway and self._shards.info.overlaps:
            oldest = self._underway[0]
            drafts = getattr(oldest.action, "allowance", None) is not None
            due = not drafts and self._until_due(oldest, self._free) <= 0
        self.send(2 if due else 1)

    async def answer(self) -> shard_pb2.StepReply | None:
        """Sends the next step shortly before the oldest command is answered, and tells the scheduler what the reply says. Returns
        it if it has tokens to deliver. Raises Broken when the shards are lost."""
        oldest = self._underway[0]
        began = max(oldest.sent, self._free)
        await self._near_end(oldest, began)
        self.send(2)
        reply = await oldest.reply
        self._free = monotonic()
        self._underway.popleft()
        return self._report(oldest.action, self._free - began, reply)

    async def _near_end(self, oldest: Underway, began: float) -> None:
        """Waits until a step will end soon, if the last one of its kind tells."""
        seconds = self._until_due(oldest, began)
        if seconds > 0:
            await asyncio.wait([oldest.reply], timeout=seconds)

    def _until_due(self, oldest: Underway, began: float) -> float:
        """Seconds until the one after it should be sent."""
        lead = OVERLAPPING_LEAD if self._shards.info.overlaps else LEAD
        return began + self._last.get(_kind(oldest.action), 0.0) - lead - monotonic()

    def _command(self, action: Action, now: float, ahead: int) -> shard_pb2.Command:
        """ahead: steps that are under way."""
        if isinstance(action, Filter):
            return command(action)
        new = action.new if isinstance(action, Prefill) else ()
        groups = [group for uid in new if (group := self._group(self._streams[uid], now)) is not None]
        drafts = action.allowance
        return command(action, groups, None if drafts is None else allowance_of(drafts, self._streams, now, ahead))

    def _group(self, stream: Stream, now: float) -> shard_pb2.Group | None:
        """A request that begins, or goes on where it was paused. None: it can't be said to the shards, and ends."""
        stream.started = stream.run.started = stream.started or now
        try:
            return group_of(stream)
        except (ValueError, TypeError):  # a value that was not refused, and should have been: it is one request's fault
            logger.exception("request %s fails: the shards can't be asked for it", stream.run.name)
            self.scheduler.forget(stream.uid)
            self._fail(stream.uid, Broken("the shards can't be asked for this request"), "generation")
            return None

    def _report(self, action: Action, seconds: float, reply: shard_pb2.Reply) -> shard_pb2.StepReply | None:
        """Tells the scheduler what a reply says. Returns it if it has tokens to deliver."""
        if isinstance(action, Filter):
            told = reply.filter
            for paused in told.paused:
                stream = self._streams.get(paused.uid)
                if stream is not None:  # what was computed of a prompt that begins anew will be found, instead of what was found
                    stream.continuations, stream.cached = tuple(paused.continuations), 0
            self.scheduler.paused(told.free, told.cached, [(paused.uid, paused.grow, paused.lacking) for paused in told.paused])
            self._metrics.paused(len(action.pause))
            self._metrics.step(action, seconds, None)
            return None
        step = reply.step
        self.scheduler.report(report_of(step, self._finished(step)))
        self._last[_kind(action)] = seconds
        self._metrics.step(action, seconds, step)
        return step

    def _finished(self, step: shard_pb2.StepReply) -> list[int]:
        """The uid of each choice that has ended on the shards, unless it was given up here before."""
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
                finished += [uid] * stream.request.sequences  # of which the scheduler counts each
        return finished


def _kind(action: Action) -> str:
    """Of steps that take about the same time."""
    match action:
        case Decode():
            return "decode"
        case Prefill(decode=decode):
            return "mixed" if decode else "prefill"
        case Filter():
            return "filter"
