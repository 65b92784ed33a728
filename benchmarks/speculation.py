"""Speculation against plain decoding, one core: tokens per CPU-second and forwards saved.

    python benchmarks/speculation.py                the embedded demo model and its draft model, then what one shard gets of it

Through the server: so many clients, each of which asks for one story after the other as a chat, with `speculate` 0 and without it
in turns. The ratio is the geometric mean of the rounds', with its standard error: on a shared machine a single one may be a tenth
off.
Inside one shard (`speculation_engine.py`): an oracle against the closed form, look-up on repetitive text, and trees against chains
of as many nodes.
"""

import argparse
import asyncio
import math
import statistics
from collections.abc import Sequence
from itertools import islice

from penstock.bench.flags import checked, count
from penstock.bench.local_server import LocalServer
from penstock.benchmarks import speculation_engine
from penstock.benchmarks.server import serving, tree_cpu
from penstock.benchmarks.streams import client
from penstock.demo.lessons import Question, questions

DRAFTING = "draft=demo-draft,tokens=8"
STREAMS = (1, 2, 4, 8, 16, 32)
GOAL_STEPS, GOAL_NEVER_BELOW = 1.5, 0.97
FEWEST = 8  # stories in a run, and at least two of each client
COUNTERS = ("penstock_generated_tokens_total", "penstock_drafted_tokens_total", "penstock_accepted_tokens_total")


async def run(
    server: LocalServer, asked: Sequence[Question], clients: int, most: int, speculate: int | None
) -> tuple[float, list[float]]:
    """CPU seconds, and the increase of the counters. most: tokens of an answer."""
    async with client(server.port) as session:

        async def user(own: Sequence[Question]) -> None:
            for one in own:
                body = {"messages": list(one.messages), "max_tokens": most, "temperature": 0}
                await session.post("/v1/chat/completions", body if speculate is None else body | {"speculate": speculate})

        before, began = await session.metrics(), tree_cpu(server.pid)
        await asyncio.gather(*(user(asked[number::clients]) for number in range(clients)))
        seconds = tree_cpu(server.pid) - began
        after = await session.metrics()
    return seconds, [after[name] - before[name] for name in COUNTERS]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new", type=checked(count), default=128, help="tokens of an answer, at most (default: %(default)s)")
    parser.add_argument(
        "--rounds",
        type=int,
        default=12,
        help="how often the server is measured; a shard, whose noise is less: a quarter (%(default)s)",
    )
    parser.add_argument("--speculate", default=DRAFTING, help="as the server's flag (default: %(default)s)")
    parser.add_argument("--only", choices=["server", "shard"], help="one half of it")
    options = parser.parse_args()
    if options.only != "shard":
        print(f"--speculate {options.speculate}")
        print(f"{'streams':>8}{'plain':>10}{'speculated':>10}{'ratio':>8}{'+-':>7}{'tokens a step':>16}{'right':>8}")
        with serving("--threads", "1", "--speculate", options.speculate, "--max-total-tokens", "1024") as server:
            for streams in STREAMS:
                line(server, streams, options.new, options.rounds)
    if options.only != "server":
        speculation_engine.main(options.new, max(1, options.rounds // 4))


def line(server: LocalServer, streams: int, new: int, rounds: int) -> None:
    """Measures and prints one number of streams."""
    plain, speculated, steps, right = [], [], [], []
    stories = questions(streams, "story")
    count = max(FEWEST, 2 * streams)
    for turn in range(-1, rounds):
        found = {}
        for speculate in (0, None) if turn % 2 else (None, 0):
            found[speculate] = asyncio.run(run(server, list(islice(stories, count)), streams, new, speculate))
        (slow, (told, *_)), (fast, (tokens, drafted, accepted)) = found[0], found[None]
        if turn >= 0:
            plain.append(told / max(slow, 0.01))
            speculated.append(tokens / max(fast, 0.01))
            steps.append(tokens / max(1.0, tokens - accepted))
            right.append(accepted / max(1.0, drafted))
    logs = [math.log(fast / slow) for fast, slow in zip(speculated, plain, strict=True)]
    ratio, error = math.exp(statistics.fmean(logs)), statistics.pstdev(logs) / math.sqrt(max(1, rounds - 1))
    saved = statistics.median(steps)
    verdicts = [f"goal {GOAL_NEVER_BELOW:.2f}x {'met' if ratio >= GOAL_NEVER_BELOW else 'MISSED'}"]
    if streams == 1:
        verdicts.append(f"goal {GOAL_STEPS} tokens a step {'met' if saved >= GOAL_STEPS else 'MISSED'}")
    print(
        f"{streams:8}{statistics.median(plain):10.0f}{statistics.median(speculated):10.0f}{ratio:7.3f}x{error:7.3f}{saved:16.2f}"
        f"{statistics.median(right):8.0%}  {', '.join(verdicts)}",
        flush=True,
    )


if __name__ == "__main__":
    main()
