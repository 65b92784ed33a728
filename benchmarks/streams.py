"""HTTP client of the benchmarks: streamed completions, with the time of each token. Prompts are token ids; answers have a fixed
length.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

VOCABULARY = 2048  # of the demo model


@dataclass
class Answer:
    """The timing of one request. Seconds of time.perf_counter."""

    began: float
    moments: list[float] = field(default_factory=list)  # of each token
    tokens: int = 0  # as the server counted them

    @property
    def ttft(self) -> float:
        """Seconds until the first token."""
        return self.moments[0] - self.began

    def gaps(self, first: float = 0.0, last: float = float("inf")) -> list[float]:
        """Seconds between tokens, of those that came between two times."""
        pairs = pairwise(self.moments)
        return [after - before for before, after in pairs if first <= before and after <= last]


class Client:
    """A client of a server on this machine."""

    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self._session = session
        self._url = f"http://127.0.0.1:{port}"

    async def ask(self, prompt: list[int], new: int, answer: Answer | None = None, **fields: Any) -> Answer:
        """Streams `new` tokens of each choice, into `answer` if given. Greedy unless `fields` say otherwise."""
        body = {"model": "", "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True, **fields}
        body["stream_options"] = {"include_usage": True}
        answer = answer or Answer(time.perf_counter())
        async with self._session.post(self._url + "/v1/completions", json=body) as reply:
            if reply.status != 200:
                raise SystemExit(f"penstock answered {reply.status}: {await reply.text()}")
            async for line in reply.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if event.get("choices"):
                    answer.moments.append(time.perf_counter())
                answer.tokens = (event.get("usage") or {}).get("completion_tokens", answer.tokens)
        return answer

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """An answer in one piece."""
        async with self._session.post(self._url + path, json={"model": "", **body}) as reply:
            if reply.status != 200:
                raise SystemExit(f"penstock answered {reply.status}: {await reply.text()}")
            return await reply.json()

    async def metrics(self) -> dict[str, float]:
        """Values of /metrics, by name with labels."""
        async with self._session.get(self._url + "/metrics") as reply:
            lines = (await reply.text()).splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


@asynccontextmanager
async def client(port: int) -> AsyncIterator[Client]:
    """A client with as many connections as are needed."""
    timeout = aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Client(session, port)


@asynccontextmanager
async def running(coroutines: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Runs coroutines in the background of the block."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    yield
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def prompt(dice: random.Random, tokens: int, vocabulary: int = VOCABULARY) -> list[int]:
    """A random prompt, which is in no cache."""
    return [dice.randrange(3, vocabulary) for _ in range(tokens)]


async def forever(asked: Client, dice: random.Random, tokens: int, new: int, answers: list[Answer]) -> None:
    """One request after the other, until it is cancelled. The last of `answers` is not complete."""
    while True:
        answers.append(Answer(time.perf_counter()))
        await asked.ask(prompt(dice, tokens), new, answers[-1])
