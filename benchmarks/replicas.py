"""Does throughput grow with replicas? The demo model on the CPU, one thread a replica, over HTTP; prompts begin as chats do.

    python benchmarks/replicas.py              a minute
    python benchmarks/replicas.py --most 8     up to so many replicas

Goal: as many times the throughput of one replica as there are replicas, or cores if these are fewer, less a fifth. Router and
clients need a part of the cores, too: where there are few, that part is what is missing.
"""

import argparse
import asyncio
import random
import sys
import time

from penstock.bench.flags import checked, count, positive
from penstock.benchmarks.server import serving
from penstock.benchmarks.streams import Answer, Client, client, prompt, running
from penstock.launcher.machine import cores

SYSTEM, OWN, NEW = 256, 32, 64  # tokens of system prompts, of what users add, of answers
GOAL = 0.8


async def user(asked: Client, dice: random.Random, systems: list[list[int]], answers: list[Answer]) -> None:
    """One request after the other, until it is cancelled."""
    while True:
        answer = Answer(time.perf_counter())
        answers.append(answer)
        await asked.ask(dice.choice(systems) + prompt(dice, OWN), NEW, answer)


async def measure(port: int, replicas: int, streams: int, seconds: float) -> tuple[float, float, float]:
    """Tokens a second, the share of prompt tokens that were cached, the largest share of requests of a replica relative to the
    mean."""
    dice = random.Random(1)
    systems = [prompt(dice, SYSTEM) for _ in range(10)]
    async with client(port) as asked:
        while (await asked.metrics())["penstock_replicas_ready"] < replicas:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        answers: list[Answer] = []
        async with running(user(asked, dice, systems, answers) for _ in range(streams)):
            await asyncio.sleep(seconds / 4)
            before, began = await asked.metrics(), time.perf_counter()
            await asyncio.sleep(seconds)
            after, took = await asked.metrics(), time.perf_counter() - began
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}
    given: dict[str, float] = {}
    for name, value in gained.items():
        if name.startswith("penstock_placements_total{"):
            replica = name.split('replica="')[1].split('"')[0]
            given[replica] = given.get(replica, 0.0) + value
    cached, computed = gained["penstock_cached_prompt_tokens_total"], gained["penstock_prompt_tokens_total"]
    largest = max(given.values()) * replicas / sum(given.values()) if given else 1.0
    return gained["penstock_generated_tokens_total"] / took, cached / max(1.0, cached + computed), largest


def main() -> int:
    """See the module. Exit code 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=checked(count), default=3, help="replicas (default 3)")
    parser.add_argument("--streams", type=checked(count), default=24, help="users at once (default 24)")
    parser.add_argument("--seconds", type=checked(positive), default=8.0, help="of each measurement (default 8)")
    options = parser.parse_args()
    print(f"{cores()} cores; {options.streams} users, prompts of {SYSTEM} + {OWN} tokens, answers of {NEW}")
    print(f"{'replicas':>8}{'tokens/s':>12}{'times one':>12}{'cached':>10}{'largest share':>16}")
    alone, met = 0.0, True
    for replicas in range(1, options.most + 1):
        with serving("--replicas", str(replicas), "--threads", "1") as server:
            speed, cached, largest = asyncio.run(measure(server.port, replicas, options.streams, options.seconds))
        alone = alone or speed
        met = met and speed >= GOAL * min(replicas, cores()) * alone
        print(f"{replicas:8}{speed:12.0f}{speed / alone:11.2f}x{cached:10.1%}{largest:15.2f}x", flush=True)
    print(f"goal >= {GOAL} x the smaller of replicas and cores: {'met' if met else 'MISSED'}")
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
