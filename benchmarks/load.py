"""Requests that come when they like, against a static batch: the demo model on the CPU, asked over HTTP.

    python benchmarks/load.py                   three minutes

    saturation   tokens a second when there are always more requests than run at once
    open loop    requests at random (Poisson), at 80 % of that rate, whoever is still being answered
    static       as many requests as ran on average in a step of the open loop, begun together, the next when all have ended

Goal: the open loop has at least 0.95 of the static batch's tokens a second. The same per CPU second of the server is printed beside
it: neighbours on the machine disturb that less, but it does not see a server that waits.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.bench.flags import checked, count, positive
from penstock.benchmarks.server import serving, tree_cpu
from penstock.benchmarks.streams import Answer, Client, client, forever, prompt, running

LOAD, GOAL = 0.8, 0.95


@dataclass(frozen=True)
class Shape:
    """The shape of every request, in tokens."""

    prompt: int
    new: int


@dataclass
class Open:
    """Results of the open loop."""

    tokens: float  # a second
    cheap: float  # tokens per CPU second of the server
    rows: float  # sequences in a step, on average
    ttft: list[float]
    gaps: list[float]


async def saturation(asked: Client, shape: Shape, clients: int, seconds: float, dice: random.Random) -> float:
    """Tokens a second."""
    answers: list[Answer] = []
    async with running(forever(asked, dice, shape.prompt, shape.new, answers) for _ in range(clients)):
        await asyncio.sleep(seconds / 4)  # until the batch is full, and its requests are out of phase
        began = time.perf_counter()
        await asyncio.sleep(seconds)
        ended = time.perf_counter()
    return _tokens(answers, began, ended) / (ended - began)


async def open_loop(asked: Client, shape: Shape, rate: float, seconds: float, dice: random.Random, pid: int) -> Open:
    """`rate` requests a second. Counting begins when it is running steadily, and ends before it runs dry."""
    tasks: list[asyncio.Task[Answer]] = []
    start = time.perf_counter()
    arrival, began, before, used = start, 0.0, (0.0, 0.0), 0.0
    while arrival < start + 1.25 * seconds:
        arrival += dice.expovariate(rate)
        await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
        tasks.append(asyncio.create_task(asked.ask(prompt(dice, shape.prompt), shape.new)))
        if not began and arrival > start + seconds / 4:
            before, used, began = await _steps(asked), tree_cpu(pid), time.perf_counter()
    after, used, ended = await _steps(asked), tree_cpu(pid) - used, time.perf_counter()
    answers = await asyncio.gather(*tasks)
    rows = (after[0] - before[0]) / (after[1] - before[1])
    gaps = [gap for answer in answers for gap in answer.gaps(began, ended)]
    tokens = _tokens(answers, began, ended)
    return Open(tokens / (ended - began), tokens / used, rows, [answer.ttft for answer in answers], gaps)


async def _steps(asked: Client) -> tuple[float, float]:
    """Tokens generated and steps taken, so far."""
    metrics = await asked.metrics()
    steps = sum(value for name, value in metrics.items() if name.startswith("tgi_batch_inference_count"))
    return metrics["penstock_generated_tokens_total"], steps


async def static(asked: Client, shape: Shape, rows: float, seconds: float, dice: random.Random, pid: int) -> tuple[float, float]:
    """Tokens a second, and per CPU second, of static batches of `rows` requests; interpolated between whole numbers."""
    less = math.floor(rows)
    speeds, cheap = [], []
    for size in (less, less + 1):
        rounds: list[float] = []
        began, used = time.perf_counter(), tree_cpu(pid)
        while size and (time.perf_counter() < began + seconds / 2 or len(rounds) < 3):
            prompts = [prompt(dice, shape.prompt) for _ in range(size)]
            first = time.perf_counter()
            await asyncio.gather(*(asked.ask(tokens, shape.new) for tokens in prompts))
            rounds.append(size * shape.new / (time.perf_counter() - first))
        speeds.append(statistics.median(rounds) if rounds else 0.0)
        cheap.append(len(rounds) * size * shape.new / (tree_cpu(pid) - used) if rounds else 0.0)
    part = rows - less
    return speeds[0] + part * (speeds[1] - speeds[0]), cheap[0] + part * (cheap[1] - cheap[0])


def _tokens(answers: list[Answer], began: float, ended: float) -> int:
    return sum(began <= moment < ended for answer in answers for moment in answer.moments)


def row(name: str, most: float, loop: Open, batch: float, cheap: float) -> str:
    """A row of the table; waits in milliseconds."""
    ttft, gaps = statistics.quantiles(loop.ttft, n=100), statistics.quantiles(loop.gaps, n=100)
    cells = [f"{value:.0f}" for value in (most, loop.tokens, batch)]
    cells += [f"{loop.tokens / batch:.3f}", f"{loop.cheap / cheap:.3f}", f"{loop.rows:.2f}"]
    cells += [f"{seconds * 1e3:.1f}" for seconds in (ttft[49], ttft[98], gaps[49], gaps[98])]
    return f"{name:15}" + "".join(f"{cell:>12}" for cell in cells)


async def measure(port: int, pid: int, options: argparse.Namespace) -> list[dict[str, float]]:
    """All three in turns, since machines are shared. Prints a line for each round."""
    shape, dice, rounds = Shape(options.prompt, options.new), random.Random(0), []
    async with client(port) as asked:
        await saturation(asked, shape, options.batch, 1.0, dice)
        names = ["saturation", "open loop", "static", "ratio", "of CPU time", "rows", "first p50", "p99", "gap p50", "p99"]
        print(f"{'tokens a second':15}" + "".join(f"{name:>12}" for name in names))
        for turn in range(options.rounds):
            most = await saturation(asked, shape, 2 * options.batch, options.seconds / 4, dice)
            loop = await open_loop(asked, shape, LOAD * most / options.new, options.seconds, dice, pid)
            batch, cheap = await static(asked, shape, loop.rows, options.seconds / 2, dice, pid)
            print(row(f"round {turn + 1}", most, loop, batch, cheap), flush=True)
            found = {"saturation": most, "open": loop.tokens, "static": batch, "rows": loop.rows}
            rounds.append({**found, "ratio": loop.tokens / batch, "cpu_ratio": loop.cheap / cheap})
    return rounds


def main() -> int:
    """See the module. Exit code 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=checked(count), default=16, help="most sequences at once (default 16)")
    parser.add_argument("--prompt", type=checked(count), default=64, help="tokens of each prompt (default 64)")
    parser.add_argument("--new", type=checked(count), default=96, help="tokens of each answer (default 96)")
    parser.add_argument("--seconds", type=checked(positive), default=8.0, help="of an open loop (default 8)")
    parser.add_argument(
        "--rounds", type=int, default=8, help="medians of them count, since machines change their speed (default 8)"
    )
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    options = parser.parse_args()
    flags = ["--threads", "1", "--max-batch-size", str(options.batch), "--max-concurrent-requests", "1000"]
    with serving(*flags) as server:
        rounds = asyncio.run(measure(server.port, server.pid, options))
    ratio = statistics.median(found["ratio"] for found in rounds)
    print(f"goal open loop / static >= {GOAL}: {ratio:.3f} {'met' if ratio >= GOAL else 'MISSED'}")
    if options.json:
        options.json.write_text(json.dumps(rounds, indent=2))
    return int(ratio < GOAL)


if __name__ == "__main__":
    sys.exit(main())
