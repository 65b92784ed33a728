"""What a cached prefix saves, and what parallel samples cost: a random model of 200 M parameters on one CPU thread.

python benchmarks/prefix.py                   two minutes
python benchmarks/prefix.py --only look-up    the trie alone, in this process

look-up   key and look-up of a cached prompt of 4096 tokens in the trie of the shard: microseconds of CPU
first     seconds to the first token of a prompt of 4000 tokens over HTTP, when it is new and when it was asked before
samples   one request with n=8 against eight greedy requests and one prefill: CPU seconds of the server's processes
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import torch

from penstock.bench.flags import checked, count
from penstock.benchmarks import checkpoint
from penstock.benchmarks.server import serving, tree_cpu
from penstock.benchmarks.streams import Client, client, prompt
from penstock.shard.pages import PagePool, page_table
from penstock.shard.prefix import Node, PrefixCache

PAGE = 16
LOOK_UP_GOAL = 200.0  # microseconds
FIRST_GOAL = 25.0  # a new prompt takes so many times as long as a cached one
SAMPLES_GOAL = 1.05  # n=8 against eight greedy requests and one prefill
LONG, NEW = 4000, 64  # tokens
SHARED = 32 * PAGE + 1  # tokens of the prompt of the samples: one of them is not cached
VOCABULARY = checkpoint.SHAPE["vocab_size"]


@dataclass
class Holder:
    """A sequence, as far as the trie uses one."""

    tokens: "array[int]"
    cache_key: str = ""
    computed: int = 0
    pages: "array[int]" = field(default_factory=page_table)
    state: int = 0
    node: Node | None = None


def look_up(tokens: int, rounds: int) -> list[float]:
    """Microseconds of each look-up in a trie that has the prompt and 50 others with common prefixes."""
    dice = random.Random(0)
    pages = tokens // PAGE
    pool = PagePool(pages * 60, PAGE)
    prefixes = PrefixCache(pool)
    asked = array("I", prompt(dice, tokens, VOCABULARY))
    for turn in range(51):
        other = asked[: tokens - turn * 5 * PAGE] + array("I", prompt(dice, turn * 5 * PAGE, VOCABULARY))
        holder = Holder(other, computed=tokens, pages=page_table(pool.take(pages)))
        prefixes.publish(holder)
        pool.release(holder.pages)
    taken = []
    for _ in range(rounds):
        holder = Holder(array("I", asked))
        began = time.perf_counter()
        found = prefixes.adopt(holder, tokens)
        taken.append((time.perf_counter() - began) * 1e6)
        assert found == tokens, found
        pool.release(holder.pages)
    return taken


async def first(port: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds to the first token of prompts when they are new, and again afterwards."""
    dice = random.Random(1)
    cold, warm = [], []
    async with client(port) as asked:
        await asked.ask(prompt(dice, 100, VOCABULARY), 2)
        for _ in range(rounds):
            tokens = prompt(dice, LONG, VOCABULARY)
            cold.append((await asked.ask(tokens, 1)).ttft)
            warm += [(await asked.ask(tokens, 1)).ttft for _ in range(3)]
    return cold, warm


async def samples(port: int, pid: int, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """CPU seconds of n=8 for a new prompt, of eight greedy requests for one that is cached, and of one prefill."""
    dice = random.Random(2)
    parallel, greedy, prefill = [], [], []
    async with client(port) as asked:
        for _ in range(rounds):
            before = tree_cpu(pid)
            answer = await asked.ask(prompt(dice, SHARED, VOCABULARY), NEW, n=8, temperature=1.0, seed=dice.randrange(1 << 30))
            parallel.append(tree_cpu(pid) - before)
            assert answer.tokens == 8 * NEW, answer.tokens
            tokens = prompt(dice, SHARED, VOCABULARY)
            before = tree_cpu(pid)
            await asked.ask(tokens, 1)
            prefill.append(tree_cpu(pid) - before)
            before = tree_cpu(pid)
            await _eight(asked, tokens)
            greedy.append(tree_cpu(pid) - before)
    return parallel, greedy, prefill


async def _eight(asked: Client, tokens: list[int]) -> None:
    answers = await asyncio.gather(*(asked.ask(tokens, NEW) for _ in range(8)))
    assert all(answer.tokens == NEW for answer in answers)


def goal(what: str, found: float, bound: float, most: bool = True) -> bool:
    """Prints a line, and returns whether it is met."""
    met = found <= bound if most else found >= bound
    print(f"goal {what} {'<=' if most else '>='} {bound:g}: {found:.3g} {'met' if met else 'MISSED'}")
    return met


def main() -> int:
    """See the module. Exit code 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["look-up", "first", "samples"], help="one of the three")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmark"), help="where the random-weight model is kept")
    parser.add_argument("--rounds", type=checked(count), default=3)
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    options = parser.parse_args()
    met, found = True, {}
    if options.only in (None, "look-up"):
        taken = look_up(4096, 300)
        found["look-up"] = taken
        print(f"4096 tokens, {4096 // PAGE} pages: p50 {statistics.median(taken):.0f} us, most {max(taken):.0f} us")
        met &= goal("key and look-up, microseconds", statistics.median(taken), LOOK_UP_GOAL)
    if options.only != "look-up":
        folder = checkpoint.write(options.folder.absolute() / "random-200m-float32", torch.float32)
        with serving(str(folder), "--threads", "1", "--max-total-tokens", "4096") as server:
            if options.only in (None, "first"):
                cold, warm = asyncio.run(first(server.port, options.rounds))
                found |= {"cold": cold, "warm": warm}
                new, cached = statistics.median(cold), statistics.median(warm)
                print(f"first token of {LONG} tokens: new {new:.2f} s, cached {cached:.3f} s")
                met &= goal("new / cached", new / cached, FIRST_GOAL, most=False)
            if options.only in (None, "samples"):
                parallel, greedy, prefill = asyncio.run(samples(server.port, server.pid, options.rounds))
                found |= {"parallel": parallel, "greedy": greedy, "prefill": prefill}
                eight, apart, before = map(statistics.median, (parallel, greedy, prefill))
                print(
                    f"n=8, {SHARED} + {NEW} tokens: {eight:.2f} CPU s; eight greedy requests {apart:.2f} s and one prefill "
                    f"{before:.2f} s"
                )
                met &= goal("n=8 / (eight greedy + one prefill)", eight / (apart + before), SAMPLES_GOAL)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
