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
import signal
import statistics
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp

from penstock.benchmarks import speculation_engine
from penstock.benchmarks.cpu import serve, tree_cpu
from penstock.demo.grammar import Question, questions

DEMO = Path(__file__).parents[1] / "demo" / "model"
DRAFTING = "draft=demo-draft,tokens=8"
STREAMS = (1, 2, 4, 8, 16, 32)
GOAL_STEPS, GOAL_NEVER_BELOW = 1.5, 0.97
FEWEST = 8  # stories in a run, and at least two of each client
COUNTERS = ("penstock_generated_tokens_total", "penstock_drafted_tokens_total", "penstock_accepted_tokens_total")


class Server:
    """Ours."""

    def __init__(self, log: Path, speculate: str) -> None:
        self._log = open(log, "w")  # noqa: SIM115 - the server writes to it until `stop`
        flags = ["--threads", "1", "--speculate", speculate, "--max-total-tokens", "1024"]
        self._process, self._port, _ = serve([str(DEMO), *flags], self._log)

    def run(self, asked: Sequence[Question], clients: int, most: int, speculate: int | None) -> tuple[float, list[float]]:
        """CPU seconds, and what the counters went up by. most: tokens of an answer."""
        return asyncio.run(self._run(asked, clients, most, speculate))

    async def _run(self, asked: Sequence[Question], clients: int, most: int, speculate: int | None) -> tuple[float, list[float]]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3600)) as session:

            async def client(own: Sequence[Question]) -> None:
                for one in own:
                    body = {"model": "", "messages": list(one.messages), "max_tokens": most, "temperature": 0}
                    await self._post(session, body if speculate is None else body | {"speculate": speculate})

            before, began = await self._counters(session), tree_cpu(self._process.pid)
            await asyncio.gather(*(client(asked[number::clients]) for number in range(clients)))
            seconds = tree_cpu(self._process.pid) - began
            after = await self._counters(session)
        return seconds, [late - early for late, early in zip(after, before, strict=True)]

    async def _post(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        async with session.post(f"http://127.0.0.1:{self._port}/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                raise SystemExit(f"penstock answered {answer.status}: {await answer.text()}")
            await answer.read()

    async def _counters(self, session: aiohttp.ClientSession) -> list[float]:
        async with session.get(f"http://127.0.0.1:{self._port}/metrics") as answer:
            lines = dict(line.rsplit(" ", 1) for line in (await answer.text()).splitlines() if not line.startswith("#"))
        return [float(lines.get(name, 0)) for name in COUNTERS]

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)
        self._log.close()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer, at most (default: %(default)s)")
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
        print(f"{'streams':>8}{'plain':>10}{'guessed':>10}{'ratio':>8}{'+-':>7}{'tokens a step':>16}{'right':>8}")
        with tempfile.TemporaryDirectory() as scratch:
            server = Server(Path(scratch) / "penstock.log", options.speculate)
            try:
                for streams in STREAMS:
                    line(server, streams, options.new, options.rounds)
            finally:
                server.stop()
    if options.only != "server":
        speculation_engine.main(options.new, max(1, options.rounds // 4))


def line(server: Server, streams: int, new: int, rounds: int) -> None:
    """Measures and prints one number of streams."""
    plain, guessed, steps, right = [], [], [], []
    stories = questions(streams, "story")
    count = max(FEWEST, 2 * streams)
    for turn in range(-1, rounds):
        found = {}
        for speculate in (0, None) if turn % 2 else (None, 0):
            found[speculate] = server.run(list(islice(stories, count)), streams, new, speculate)
        (slow, (told, *_)), (fast, (tokens, drafted, accepted)) = found[0], found[None]
        if turn >= 0:
            plain.append(told / max(slow, 0.01))
            guessed.append(tokens / max(fast, 0.01))
            steps.append(tokens / max(1.0, tokens - accepted))
            right.append(accepted / max(1.0, drafted))
    logs = [math.log(fast / slow) for fast, slow in zip(guessed, plain, strict=True)]
    ratio, error = math.exp(statistics.fmean(logs)), statistics.pstdev(logs) / math.sqrt(max(1, rounds - 1))
    saved = statistics.median(steps)
    verdicts = [f"goal {GOAL_NEVER_BELOW:.2f}x {'met' if ratio >= GOAL_NEVER_BELOW else 'MISSED'}"]
    if streams == 1:
        verdicts.append(f"goal {GOAL_STEPS} tokens a step {'met' if saved >= GOAL_STEPS else 'MISSED'}")
    print(
        f"{streams:8}{statistics.median(plain):10.0f}{statistics.median(guessed):10.0f}{ratio:7.3f}x{error:7.3f}{saved:16.2f}"
        f"{statistics.median(right):8.0%}  {', '.join(verdicts)}",
        flush=True,
    )


if __name__ == "__main__":
    main()
