"""What the wire costs: a router's client and shards of 1, 2 and 4 ranks whose engine computes nothing.

    python benchmarks/wire.py                       as many steps as make steady medians, half a minute
    python benchmarks/wire.py --ranks 1 --steps 2000

The processes, the messages and the threads are the real ones; a step is a sleep, in which, as while a GPU computes, Python is
free to do other things. With one step of lookahead a step begins as soon as the one before has ended: the gap between them is
measured in the thread that executes, from the engine's return to its next call, building the reply included. Without
lookahead, and with steps of no length, the whole round trip is measured, on the stream and by unary calls.
"""

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import uvloop

from penstock.bench.flags import at_least, checked, count, numbers
from penstock.proto import rpc, settings
from penstock.proto import shard_pb2 as wire
from penstock.router.shards import CHANNEL_OPTIONS, GrpcShards
from penstock.shard.__main__ import serve
from penstock.shard.config import ShardConfig
from penstock.shard.decoding.sampler import Pick
from penstock.shard.decoding.strategy import Emitted, Finish
from penstock.shard.outcome import Outcome
from penstock.shard.service import Service

SEQUENCES = 256
STEP = 4000  # microseconds: what 8B parameters take on a large GPU, one row
GOAL = 200.0  # microseconds between two steps: 5 % of one
WARMUP = wire.WarmupRequest(max_step_tokens=SEQUENCES, max_step_rows=SEQUENCES)


class NullEngine:
    """A stub engine: answers every decode of 256 sequences with the same tokens, after as many microseconds as the batch's name
    says."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._measured = 0  # how often
        self._outcome = Outcome(
            emitted=[(1000 + row, Emitted(0, Pick(100 * row, -0.5 * row), Finish.NOT)) for row in range(SEQUENCES)],
            standing=[(1000 + row, 20, 2, 0) for row in range(0, SEQUENCES, 16)],  # one in 16 has begun a page
            free=100_000,
        )
        self._begun: list[int] = []  # nanoseconds
        self._ended: list[int] = []
        self._used = 0.0  # seconds of all this process's threads
        self.pool = SimpleNamespace(free=100_000)
        self.device = "none"
        self.decoder = SimpleNamespace(shape=SimpleNamespace(vocabulary=128_000, max_positions=8192, recurrent=None))

    underway = None
    overlaps = False

    def enter(self) -> None:
        """It has no device."""

    def begin_decode(self, batches: Iterable[int], allowance: object) -> "Future[Outcome]":
        """A step, which is over at once; there are no drafts."""
        self._begun.append(time.perf_counter_ns())
        [microseconds] = batches
        if microseconds:
            time.sleep(microseconds / 1e6)
        self._ended.append(time.perf_counter_ns())
        landed: Future[Outcome] = Future()
        landed.set_result(self._outcome)
        return landed

    def clear(self) -> None:
        """Writes what was measured since the last time."""
        self._measured += 1
        gaps = [(begun - ended) / 1e3 for begun, ended in zip(self._begun[1:], self._ended, strict=False)]
        result = {"gaps": gaps, "cpu": time.process_time() - self._used}
        scratch = self._folder / f"{self._measured}.new"
        scratch.write_text(json.dumps(result))
        scratch.rename(self._folder / str(self._measured))
        self._begun, self._ended, self._used = [], [], time.process_time()


class NullService(Service):
    """A service without memory to measure."""

    def _measure(self, request: wire.WarmupRequest) -> wire.WarmupReply:
        return wire.WarmupReply(pages=1, page_size=16)


def load(config: ShardConfig, tell: Callable[[str], None]) -> Any:
    """Stands in for loading a model."""
    while config.rank and not Path(config.relay).exists():  # ranks that load a model meet here, after rank 0 has begun to listen
        time.sleep(0.01)
    return NullEngine(Path(config.folder))


class Ranks:
    """Shard processes, and their measurements."""

    def __init__(self, count: int, folder: Path) -> None:
        self.folders = [folder / f"rank-{rank}" for rank in range(count)]
        self.sockets = [f"{folder}/socket-{rank}" for rank in range(count)]
        self._cleared = 0
        self._processes = []
        for rank, own in enumerate(self.folders):
            own.mkdir()
            config = ShardConfig(
                folder=str(own), model="null", rank=rank, ranks=count, socket=self.sockets[rank], relay=f"{folder}/relay"
            )
            command = [sys.executable, __file__, "--shard", settings.dump(config)]
            self._processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))

    async def measured(self) -> list[dict[str, Any]]:
        """By rank: what was measured between the last two ClearCache."""
        self._cleared += 1
        paths = [folder / str(self._cleared) for folder in self.folders]
        while True:
            if all(path.exists() for path in paths):
                return [json.loads(path.read_text()) for path in paths]
            await asyncio.sleep(0.01)

    def stop(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            process.wait(10)


def decode(microseconds: int, step: int = 0) -> wire.Command:
    """A step of that length."""
    return wire.Command(decode=wire.DecodeRequest(step=step, batches=[microseconds]))


async def on_the_stream(shards: GrpcShards, ranks: Ranks, steps: int, microseconds: int, ahead: int) -> dict[str, Any]:
    """Runs steps on the stream, with `ahead` of them in flight beside the oldest."""
    await shards.execute(wire.Command(clear_cache=wire.ClearCacheRequest()))
    await ranks.measured()
    used, trips = time.process_time(), []
    underway: deque[tuple[float, asyncio.Future[wire.Reply]]] = deque()
    for step in range(steps + ahead):
        if step < steps:
            underway.append((time.perf_counter(), shards.execute(decode(microseconds))))
        if step >= ahead:
            sent, reply = underway.popleft()
            assert len((await reply).step.tokens) == SEQUENCES
            trips.append((time.perf_counter() - sent) * 1e6)
    own = (time.process_time() - used) / steps * 1e6
    await shards.execute(wire.Command(clear_cache=wire.ClearCacheRequest()))
    found = await ranks.measured()
    return {
        "router": own,
        "shards": [rank["cpu"] / steps * 1e6 for rank in found],
        "trips": trips,
        "gaps": [r["gaps"] for r in found],
    }


async def by_calls(ranks: Ranks, steps: int) -> dict[str, Any]:
    """Steps of no length, each a unary call."""
    async with grpc.aio.insecure_channel(f"unix:{ranks.sockets[0]}", options=CHANNEL_OPTIONS) as channel:
        stub = rpc.Stub(channel)
        await stub.ClearCache(wire.ClearCacheRequest(step=1))
        await ranks.measured()
        used, trips = time.process_time(), []
        for step in range(steps):
            sent = time.perf_counter()
            await stub.Decode(decode(0, step + 2).decode)
            trips.append((time.perf_counter() - sent) * 1e6)
        own = (time.process_time() - used) / steps * 1e6
        await stub.ClearCache(wire.ClearCacheRequest(step=1))
        found = await ranks.measured()
    return {"router": own, "shards": [rank["cpu"] / steps * 1e6 for rank in found], "trips": trips}


async def measure(count: int, steps: int) -> dict[str, Any]:
    """All measurements, for so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(count, Path(folder))
        shards = GrpcShards(ranks.sockets)
        try:
            await shards.connect()
            await shards.warm_up(WARMUP)
            await ranks.measured()
            await on_the_stream(shards, ranks, 50, 0, 0)  # warm-up of libraries
            ahead = await on_the_stream(shards, ranks, steps, STEP, 1)
            alone = await on_the_stream(shards, ranks, steps, 0, 0)
            await shards.close()
            await ranks.measured()  # the end of the stream clears, too
            return {"ahead": ahead, "alone": alone, "calls": await by_calls(ranks, steps)}
        finally:
            await shards.close()
            ranks.stop()


def quantiles(values: list[float]) -> str:
    """Median and 99th percentile."""
    return f"{statistics.median(values):5.0f} us, p99 {statistics.quantiles(values, n=100)[98]:5.0f}"


def report(count: int, found: dict[str, Any]) -> bool:
    """Prints a table. Returns whether the goal is met."""
    gaps: list[list[float]] = found["ahead"]["gaps"]
    widest = max(statistics.median(rank) for rank in gaps)
    print(f"{count} rank{'s' if count > 1 else ''}, {SEQUENCES} sequences, medians")
    for rank, values in enumerate(gaps):
        print(f"  gap between steps of {STEP} us, one ahead, rank {rank}: {quantiles(values)}")
    print(f"  goal: {GOAL:.0f} us, {100 * GOAL / STEP:.0f} % of a step: {widest:.0f} us, {'met' if widest <= GOAL else 'MISSED'}")
    for name, key in (("one ahead", "ahead"), ("alone, stream", "alone"), ("alone, unary", "calls")):
        row = found[key]
        shards = ", ".join(f"{value:.0f}" for value in row["shards"])
        trip = "" if key == "ahead" else f"; round trip {quantiles(row['trips'])}"
        print(f"  CPU of a step, {name}: router {row['router']:.0f} us, shards {shards} us{trip}")
    sys.stdout.flush()
    return widest <= GOAL


def main() -> None:
    """See the module. Exit code 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=checked(numbers(count)), default="1,2,4", help="of the rank groups, comma-separated")
    parser.add_argument("--steps", type=checked(at_least(3)), default=1000, help="of each kind")
    parser.add_argument("--shard", help=argparse.SUPPRESS)  # this process is a shard: its settings
    asked = parser.parse_args()
    if asked.shard:
        serve(settings.load(ShardConfig, asked.shard), NullService, load)
    met = True
    for ranks in asked.ranks:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            met &= report(ranks, runner.run(measure(ranks, asked.steps)))
    sys.exit(not met)


if __name__ == "__main__":
    main()
