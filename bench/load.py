"""Open-loop and closed-loop load. Open: requests are sent at their arrival times, whatever is still being answered. Closed: a
number of clients, each of which sends its next request when it has its answer.

Only the open loop shows what a server that is too slow does to those who wait: in a closed one the clients wait along with it.
"""

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from .client import CLOCK, NOT_AWAITED, REFUSED, Client
from .prompts import Prompt
from .record import Record
from .traffic import Arrivals

TICK = 0.02  # seconds between checks of how late this process is
BURST = 256  # overdue requests that are started in one go; with more, none would be sent before the last is started
AGAIN = 0.1  # seconds after which a client of a closed loop retries where nobody listened
SLACK = 1e-3  # seconds: asyncio's timers are no finer


@dataclass(frozen=True, slots=True)
class Extent:
    """When a stage ends, and from when on its requests are measured."""

    seconds: float = 0.0  # 0: ends after `requests` instead
    requests: int = 0
    warm_seconds: float = 0.0
    warm_requests: int = 0
    drain: float = 60.0  # seconds that the last answers get

    def more(self, elapsed: float, counted: int) -> bool:
        """Whether another request is sent, after so many that are measured."""
        return elapsed < self.seconds + self.warm_seconds if self.seconds else counted < self.requests

    def counts(self, elapsed: float, index: int) -> bool:
        """Whether a request that was to be sent then is measured."""
        return elapsed >= self.warm_seconds and index >= self.warm_requests


@dataclass(slots=True)
class Stage:
    """One rate, or one number of clients, and its measurements."""

    kind: str  # "rate" or "concurrency"
    value: float
    began: float = 0.0  # when measuring began: with the first measured request, if there is one
    closed: float = 0.0  # when its duration was over; 0: it ended with its last answer
    ended: float = 0.0  # when the last answer was complete
    records: list[Record] = field(default_factory=list)  # all that were sent
    counted: list[Record] = field(default_factory=list)  # those that are measured
    lags: list[float] = field(default_factory=list)  # seconds by which this process was late, checked every TICK
    cpu: float = 0.0  # share of one core that this process used
    partial: bool = False  # it was interrupted: only what had ended by then is measured

    def interrupt(self) -> None:
        """Drops requests under way from the measurement: that they have not ended is no failure."""
        self.partial = True
        self.counted = [record for record in self.counted if record.ended and record.error != NOT_AWAITED]


class Load:
    """The load generator, which runs stages one after the other."""

    def __init__(self, client: Client, prompts: Iterator[Prompt], extent: Extent, arrivals: Arrivals, seed: int) -> None:
        self._client = client
        self._prompts = prompts
        self._extent = extent
        self._arrivals = arrivals
        self._seed = seed

    async def run(self, stage: Stage, most: int = 0) -> None:
        """Runs a stage and fills it in. `most`: requests in flight, in an open loop; 0: no limit."""
        watch = asyncio.create_task(_watch(stage.lags))
        used, start = time.process_time(), CLOCK()
        gc.collect()
        gc.disable()  # a garbage collection would delay all timestamps
        try:
            if stage.kind == "rate":
                await self._open(stage, start, most)
            else:
                await self._closed(stage, start)
        except asyncio.CancelledError:
            stage.interrupt()
            raise
        finally:
            gc.enable()
            stage.ended = CLOCK()
            stage.began = stage.began or min(start + self._extent.warm_seconds, stage.closed or stage.ended)
            stage.cpu = (time.process_time() - used) / (stage.ended - start)
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch

    async def _open(self, stage: Stage, start: float, most: int) -> None:
        room = asyncio.Semaphore(most) if most else None
        async with _team() as tasks:
            for offset in self._arrivals.moments(stage.value, random.Random(self._seed)):
                if not self._extent.more(offset, len(stage.counted)):
                    break
                wait = start + offset - CLOCK()
                if wait > SLACK or not len(tasks) % BURST:
                    await asyncio.sleep(max(wait, 0.0))
                record = self._record(stage, start, start + offset)
                tasks.append(asyncio.create_task(self._one(record, room)))
            if self._extent.seconds:
                await asyncio.sleep(start + self._extent.seconds + self._extent.warm_seconds - CLOCK())
                stage.closed = CLOCK()
            await self._drain(tasks)

    async def _one(self, record: Record, room: asyncio.Semaphore | None) -> None:
        prompt = next(self._prompts)
        if room is None:
            await self._client.ask(prompt, record)
            return
        record.error = "not sent"  # unless there is room before everything ends
        async with room:
            record.error = ""
            await self._client.ask(prompt, record)

    async def _closed(self, stage: Stage, start: float) -> None:
        async def work() -> None:
            while self._extent.more(CLOCK() - start, len(stage.counted)):
                prompt, record = next(self._prompts), self._record(stage, start, CLOCK())
                await self._client.ask(prompt, record)
                if record.error == REFUSED:  # at once: the next would be, too, and this process would do nothing else
                    await asyncio.sleep(AGAIN)

        async with _team() as tasks:
            tasks += [asyncio.create_task(work()) for _ in range(int(stage.value))]
            if self._extent.seconds:
                await asyncio.wait(tasks, timeout=self._extent.seconds + self._extent.warm_seconds)
                stage.closed = CLOCK()
            await self._drain(tasks)

    def _record(self, stage: Stage, start: float, intended: float) -> Record:
        record = Record(intended)
        if self._extent.counts(intended - start, len(stage.records)):
            stage.began = stage.began or intended
            stage.counted.append(record)
        stage.records.append(record)
        return record

    async def _drain(self, tasks: list[asyncio.Task[None]]) -> None:
        """Waits for requests under way, and cancels those that take too long."""
        if tasks:
            seconds = None if not self._extent.seconds else self._extent.drain
            _, left = await asyncio.wait(tasks, timeout=seconds)
            for task in left:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.result()


@asynccontextmanager
async def _team() -> AsyncIterator[list[asyncio.Task[None]]]:
    """A list of tasks that are cancelled when the stage ends or is interrupted: their session ends with it."""
    tasks: list[asyncio.Task[None]] = []
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _watch(lags: list[float]) -> None:
    """Records how late this process is for its timers. Runs until it is cancelled."""
    while True:
        before = CLOCK()
        await asyncio.sleep(TICK)
        lags.append(CLOCK() - before - TICK)
