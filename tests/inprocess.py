"""The router's batcher over a real shard in the same process: real model, real pages, real scheduler; no HTTP, no gRPC.

For tests that need all of these together and run them many times.
"""

import asyncio
import queue
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from penstock.proto import shard_pb2
from penstock.router import bounds
from penstock.router.batcher import Batcher
from penstock.router.config import RouterConfig
from penstock.router.drafting import DraftBudget
from penstock.router.metrics import Metrics
from penstock.router.policies import Policy
from penstock.router.request import Request, Token
from penstock.router.scheduler import Action, Bounds, Scheduler
from penstock.router.text import Tokenizer
from penstock.shard.config import ShardConfig
from penstock.shard.loading import load
from penstock.shard.relay import Sender
from penstock.shard.service import Service

DEMO_MODEL = Path(__file__).parents[1] / "demo" / "model"
SMALL_MODEL = DEMO_MODEL.with_name("draft")  # half as deep and wide, same tokenizer: for tests in which any trained model will do


class NoGrpcContext:
    """The gRPC context of calls that are made without gRPC."""

    def abort(self, code: object, details: str) -> None:
        raise AssertionError(details)


class InProcessShards:
    """`router.shards.Shards` without other processes: the stream of commands stays in this one."""

    def __init__(self, service: Service) -> None:
        self.stage = "ready"
        self.steps = 0
        self.lost: asyncio.Future[None] = asyncio.Future()
        self._service = service
        self._commands: queue.SimpleQueue[shard_pb2.Command | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[asyncio.Future[shard_pb2.Reply]] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._read, daemon=True)

    @property
    def info(self) -> shard_pb2.InfoReply:
        return self._service.Info(shard_pb2.InfoRequest(), NoGrpcContext())

    async def connect(self) -> None:
        pass

    async def warm_up(self, request: shard_pb2.WarmupRequest) -> shard_pb2.WarmupReply:
        reply = self._service.Warmup(request, NoGrpcContext())
        self._thread.start()
        return reply

    async def load_adapter(self, request: shard_pb2.LoadAdapterRequest) -> shard_pb2.LoadAdapterReply:
        return self._service.LoadAdapter(request, NoGrpcContext())

    def execute(self, command: shard_pb2.Command) -> "asyncio.Future[shard_pb2.Reply]":
        self.steps += 1
        getattr(command, command.WhichOneof("kind")).step = self.steps
        reply = self._loop.create_future()
        self._replies.put(reply)
        self._commands.put(command)
        return reply

    def _read(self) -> None:
        for reply in self._service.Steps(iter(self._commands.get, None), NoGrpcContext()):
            self._loop.call_soon_threadsafe(_set_result, self._replies.get(), reply)

    async def forget(self) -> None:
        raise AssertionError("it is never lost")

    async def close(self) -> None:
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)


def _set_result(future: "asyncio.Future[shard_pb2.Reply]", reply: shard_pb2.Reply) -> None:
    if not future.done():
        future.set_result(reply)


class PreemptingScheduler(Scheduler):
    """Preempts jobs at random though memory suffices, until each was preempted `least_preemptions` times. Jobs that decode are
    preempted at once, since with draft tokens an answer takes few steps; others with a probability."""

    least_preemptions = 2

    def __init__(self, bounds: Bounds, policy: Policy, draft_budget: DraftBudget | None = None) -> None:
        super().__init__(bounds, policy, draft_budget)
        self.preemptions: Counter[int] = Counter()
        self._random = random.Random(1)

    def next(self) -> Action | None:
        idle = not self._filters and not self._dropped and not self._ended
        remaining = [job for job in self._running.values() if self.preemptions[job.uid] < self.least_preemptions]
        if idle and remaining and (self._random.random() < 0.8 or not all(job.lacking for job in remaining)):
            sample = self._random.sample(remaining, self._random.randint(1, len(remaining)))
            victims = [job for job in remaining if job in sample or not job.lacking]
            self.preemptions.update(job.uid for job in victims)
            return self._take_back(victims)
        return super().next()


def run(
    test: Callable[[Batcher], Awaitable[Any]],
    *,
    folder: Path = DEMO_MODEL,
    scheduler: type[Scheduler] = Scheduler,
    shard: dict[str, Any] | None = None,
    router: dict[str, Any] | None = None,
) -> Any:
    """Runs `test` with a started batcher and returns its result. Afterwards every page must be free."""

    async def main() -> Any:
        settings = ShardConfig(folder=str(folder), model="test", **(shard or {}))
        service = Service(settings, lambda code: None)
        service.start(load(settings, lambda stage: None), Sender.__new__(Sender))
        bounds.Scheduler, original_scheduler = scheduler, bounds.Scheduler  # type: ignore[misc]
        try:
            batcher = Batcher(
                RouterConfig(folder=str(folder), model="test", **(router or {})),
                Tokenizer(folder),
                InProcessShards(service),
                Metrics(),
            )
            async with asyncio.timeout(120):
                await batcher.start()
                result = await test(batcher)
                while metric_value(batcher, "penstock_pages_free") < metric_value(batcher, "penstock_pages_total"):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                await batcher.close()
        finally:
            bounds.Scheduler = original_scheduler  # type: ignore[misc]
        return result

    return asyncio.run(main())


def metric_value(batcher: Batcher, name: str) -> float:
    """The value of a metric without labels."""
    lines = batcher._metrics.render().decode().splitlines()
    return float(next(line.rsplit(" ", 1)[1] for line in lines if line.startswith(name + " ")))


async def generate_tokens(batcher: Batcher, request: Request) -> list[list[int]]:
    """The token ids of each choice."""
    answers: list[list[int]] = [[] for _ in range(request.choices)]
    async with aclosing(batcher.submit(request)) as stream:
        async for items in stream:
            for item in items:
                if isinstance(item, Token):
                    answers[item.choice].append(item.id)
    return answers


async def generate_all(batcher: Batcher, requests: Sequence[Request]) -> list[list[list[int]]]:
    """generate_tokens for all requests at once."""
    return await asyncio.gather(*(generate_tokens(batcher, request) for request in requests))
