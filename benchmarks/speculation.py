"""Guessing by lookup (`--speculate`) against plain decoding on the same server, one core: tokens per CPU-second and forwards saved.

    python benchmarks/speculation.py                the embedded demo model

Requests with `speculate` 0 and without it take turns, at several numbers of streams; medians are printed. Two kinds of text: what
the model says by itself, and lists that it repeats from its prompt.
"""

import argparse
import asyncio
import signal
import statistics
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

from penstock.benchmarks.cpu import serve, tree_cpu

DEMO = Path(__file__).parents[1] / "demo" / "model"
DRAFTS = 8
STREAMS = (1, 2, 4, 8, 16, 32)
GOAL_REPEATED, GOAL_NEVER_BELOW = 2.5, 0.97
STORY = "Tell me a story about a cat called {name}."
REPEATED = "One, two, three, four, five, six, seven, eight, nine, ten. Number {name}. " * 6
COUNTERS = ("penstock_generated_tokens_total", "penstock_drafted_tokens_total", "penstock_accepted_tokens_total")


class Server:
    """Ours."""

    def __init__(self, log: Path) -> None:
        self._log = open(log, "w")  # noqa: SIM115 - the server writes to it until `stop`
        flags = ["--threads", "1", "--speculate", str(DRAFTS), "--max-total-tokens", "1024"]
        self._process, self._port, _ = serve([str(DEMO), *flags], self._log)

    def run(self, prompts: list[str], new: int, speculate: int) -> tuple[float, list[float]]:
        """CPU seconds, and what the counters went up by."""
        return asyncio.run(self._run(prompts, new, speculate))

    async def _run(self, prompts: list[str], new: int, speculate: int) -> tuple[float, list[float]]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3600)) as session:
            before, began = await self._counters(session), tree_cpu(self._process.pid)
            bodies = [
                {"model": "", "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "speculate": speculate}
                for prompt in prompts
            ]
            await asyncio.gather(*(self._post(session, body) for body in bodies))
            seconds = tree_cpu(self._process.pid) - began
            after = await self._counters(session)
        return seconds, [late - early for late, early in zip(after, before, strict=True)]

    async def _post(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        async with session.post(f"http://127.0.0.1:{self._port}/v1/completions", json=body) as answer:
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
    parser.add_argument("--new", type=int, default=160, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="how often everything is measured (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        server = Server(Path(scratch) / "penstock.log")
        try:
            for name, text in (("stories", STORY), ("repeated lists", REPEATED)):
                print(f"{name}: {'streams':>8}{'plain':>10}{'guessed':>10}{'ratio':>8}{'tokens a step':>16}{'right':>8}")
                for streams in STREAMS:
                    line(server, name, text, streams, options.new, options.rounds)
        finally:
            server.stop()


def line(server: Server, name: str, text: str, streams: int, new: int, rounds: int) -> None:
    """Measures and prints one number of streams."""
    plain, guessed, steps, right = [], [], [], []
    for turn in range(-1, rounds):
        # Prompts that differ, so that neither finds the other's.
        slow, _ = server.run([text.format(name=f"{turn} {stream}") for stream in range(streams)], new, 0)
        fast, (tokens, drafted, accepted) = server.run(
            [text.format(name=f"{stream} {turn}") for stream in range(streams)], new, DRAFTS
        )
        if turn >= 0:
            plain.append(streams * new / max(slow, 0.01))
            guessed.append(streams * new / max(fast, 0.01))
            steps.append(tokens / max(1.0, tokens - accepted))
            right.append(accepted / max(1.0, drafted))
    ratio = statistics.median(guessed) / statistics.median(plain)
    goal = GOAL_REPEATED if name != "stories" and streams == 1 else GOAL_NEVER_BELOW
    told = f"goal {goal:.2f}x {'met' if ratio >= goal else 'MISSED'}"
    print(
        f"{' ' * len(name)}  {streams:8}{statistics.median(plain):10.0f}{statistics.median(guessed):10.0f}{ratio:7.2f}x"
        f"{statistics.median(steps):16.2f}{statistics.median(right):8.0%}  {told}",
        flush=True,
    )


if __name__ == "__main__":
    main()
