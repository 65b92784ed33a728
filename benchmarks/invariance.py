"""How many answers depend on who else is in the batch, and what it costs that none does (`--batch-invariant`): the demo model on a
CPU, one thread, over HTTP.

    python benchmarks/invariance.py                      two minutes
    python benchmarks/invariance.py --dtype float32      where numbers of 32 bits hide nearly all of it

Greedy and seeded requests and beams come one by one, then all at once. Goal: with the flag every token and every log-probability is
the same. The cost is in CPU time of the server's whole process tree for the same tokens, with the flag and without.
"""

import argparse
import asyncio
import random
import statistics
import sys
from typing import Any

from penstock.bench.flags import checked, count
from penstock.benchmarks.server import serving, tree_cpu
from penstock.benchmarks.streams import Client, client

STREAMS = (1, 8, 32)
NEW = 64  # tokens of an answer, where the cost is measured
WORDS = "once upon a time there was little fox who liked rain and green hills sum of long river".split()  # noqa: SIM905


def asked(number: int) -> dict[str, Any]:
    """A request: greedy, seeded or with three beams."""
    dice = random.Random(number)
    kinds: list[dict[str, Any]] = [{}, {"do_sample": True, "temperature": 1.2, "top_p": 0.9, "seed": number}, {"num_beams": 3}]
    text = " ".join(dice.choice(WORDS) for _ in range(dice.randint(3, 60)))
    return {"inputs": text, "parameters": {"max_new_tokens": dice.randint(5, 60), "details": True, **kinds[number % 3]}}


class Clients:
    """Clients of one server."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def ask(self, body: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Tokens, and their log-probabilities and score."""
        details = (await self._client.post("/generate", body))["details"]
        tokens = details["tokens"]
        return [token["id"] for token in tokens], [token["logprob"] for token in tokens] + [details.get("score", 0.0)]

    async def compare(self, requests: int) -> tuple[int, int]:
        """How many answers differ between alone and in a batch: by tokens, and by any number."""
        bodies = [asked(number) for number in range(requests)]
        alone = [await self.ask(body) for body in bodies]
        crowd = await asyncio.gather(*map(self.ask, bodies))
        pairs = [*zip(alone, crowd, strict=True)]
        return sum(one[0] != other[0] for one, other in pairs), sum(one != other for one, other in pairs)

    async def stream(self, streams: int, dice: random.Random) -> int:
        """Tokens of `streams` greedy answers at once."""
        parameters = {"max_new_tokens": NEW, "details": True}
        bodies = [{"inputs": " ".join(dice.choices(WORDS, k=60)), "parameters": parameters} for _ in range(streams)]
        return sum(len(tokens) for tokens, _ in await asyncio.gather(*map(self.ask, bodies)))


async def measure(port: int, pid: int, requests: int, rounds: int) -> tuple[tuple[int, int], dict[int, float]]:
    """What differs, and tokens per CPU-second by the number of streams."""
    async with client(port) as asked:
        clients, dice = Clients(asked), random.Random(1)
        different = await clients.compare(requests)
        speeds: dict[int, list[float]] = {streams: [] for streams in STREAMS}
        for _ in range(rounds):
            for streams, found in speeds.items():
                before = tree_cpu(pid)
                tokens = await clients.stream(streams, dice)
                found.append(tokens / max(0.01, tree_cpu(pid) - before))
    return different, {streams: statistics.median(found) for streams, found in speeds.items()}


def main() -> int:
    """See the module. Exit code 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="default: %(default)s")
    parser.add_argument("--requests", type=checked(count), default=60, help="that are compared (default: %(default)s)")
    parser.add_argument("--rounds", type=checked(count), default=5, help="how often the cost is measured (default: %(default)s)")
    options = parser.parse_args()
    found = []
    for flags in ([], ["--batch-invariant"]):
        with serving("--dtype", options.dtype, "--threads", "1", *flags) as server:
            found.append(asyncio.run(measure(server.port, server.pid, options.requests, options.rounds)))
    (usual, fast), (invariant, slow) = found
    print(f"of {options.requests} answers in {options.dtype} others in a crowd than alone, by tokens / by any number:")
    print(f"  usual {usual[0]} / {usual[1]}; --batch-invariant {invariant[0]} / {invariant[1]}")
    print("tokens per CPU-second, usual / --batch-invariant:")
    for streams in STREAMS:
        costs = fast[streams] / slow[streams]
        print(f"  {streams:2} streams: {fast[streams]:6.0f} / {slow[streams]:6.0f}, {costs:.2f} times the CPU time")
    print(f"goal: none differs: {'met' if not invariant[1] else 'MISSED'}")
    return int(invariant[1] > 0)


if __name__ == "__main__":
    sys.exit(main())
