"""`penstock bench --chaos`: a server of our own whose shards are killed and stopped under load. Its clients notice nothing.

Every answer is compared with the one that the same request got before the first fault, then without guesses: where the server
speculates, that changes nothing either. What is left when all have been answered is looked for, too: pages, processes, sockets,
memory that grows. The router is left alone: who kills it cuts its connections, so that nothing could be compared.
"""

import asyncio
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy
from rich.console import Console

from .local import Held, Local

Json = dict[str, Any]

STEP_TIMEOUT = 2.0  # seconds after which a stopped shard is noticed, unless the operator's flags say otherwise
RECOVERY = 300.0  # seconds that a recovery may take
LONGEST = 600.0  # seconds that a request may take, faults and all
SETTLE = 10.0  # seconds after the last answer in which everything must have been given back
SAMPLE = 1.0  # seconds between two looks at memory
CUT = 0.1  # share of requests whose client leaves in the middle
SLACK = 3  # files that a process may have more of than before: a metric's page, a log
LENGTH = 80  # tokens of an answer
MATURE = 5.0  # seconds after which what a process' memory does means anything
OLD = 60.0  # the same where shards are killed: each new one fills its caches anew
GROWTH = 64 * 2**20  # bytes that it may grow after its first minute, or the first half of a shorter life
STEP, STEEPEST = 8 * 2**20, 2**20 / 60  # where nothing is killed: so many bytes, and so many more a second
TOKENS, COUNT = "list of tokens", "count of tokens"  # what is kept of an answer beside the text of each choice
RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "legs": {"type": "integer", "maximum": 8}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done to the server."""

    seconds: float
    clients: int
    every: float  # seconds between the end of a recovery and the next fault, on average; 0: no faults
    seed: int
    think: float = 0.0  # seconds that a client waits, on average, until it asks again


@dataclass(slots=True)
class Found:
    """What came of it."""

    answers: int = 0
    cut: int = 0  # by their clients
    wrong: list[Json] = field(default_factory=list)  # answers that differ: the request, what came, what should have come
    errors: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)  # seconds
    longest_pause: float = 0.0  # between two events of a stream
    drafted: int = 0  # tokens that were guessed ...
    accepted: int = 0  # ... and were right
    leaks: list[str] = field(default_factory=list)
    memory: dict[int, list[tuple[float, int]]] = field(default_factory=dict)  # of each process: moments and bytes
    names: dict[int, str] = field(default_factory=dict)  # of the processes

    @property
    def good(self) -> bool:
        """Nobody noticed, and nothing is left."""
        return bool(self.answers) and not (self.wrong or self.errors or self.leaks)


def requests() -> list[tuple[str, Json]]:
    """One of each kind that is decoded in its own way, each of which has one right answer."""
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    endless = {"max_tokens": LENGTH, "ignore_eos": True, **streamed}
    schema = {"type": "json_schema", "json_schema": {"name": "record", "schema": RECORD}}
    chat = {"messages": [{"role": "user", "content": "Give me a record of a dog as JSON."}], "max_tokens": LENGTH, **streamed}
    stops = {"max_new_tokens": LENGTH, "details": True, "stop": ["ear"], "seed": 3, "temperature": 0.9}
    numbers = {"type": "regex", "value": "(one|two|three)( and (one|two|three))*"}
    bound = {"max_new_tokens": LENGTH, "details": True, "grammar": numbers}
    again = "One dog, two dogs, three dogs. " * 6  # what comes is easily guessed
    return [
        ("/v1/completions", {"prompt": "Once upon a time", "temperature": 0, **endless}),
        ("/v1/completions", {"prompt": "Tell me a story of a dog. " * 8, "temperature": 0.9, "seed": 1, "top_p": 0.9, **endless}),
        ("/v1/completions", {"prompt": "There was", "n": 2, "temperature": 1.0, "seed": 2, "presence_penalty": 0.5, **endless}),
        ("/v1/completions", {"prompt": "Once there was a", "num_beams": 3, "n": 2, **endless}),
        ("/v1/completions", {"prompt": again, "temperature": 0, **endless}),
        ("/v1/completions", {"prompt": again, "n": 2, "temperature": 0.5, "seed": 5, **endless}),
        ("/generate_stream", {"inputs": "The end is", "parameters": stops}),
        ("/generate_stream", {"inputs": again, "parameters": {**bound, "seed": 6, "temperature": 0.7}}),
        ("/v1/chat/completions", {**chat, "temperature": 1.0, "seed": 4, "response_format": schema}),
        ("/v1/chat/completions", {**chat, "temperature": 1.0, "n": 2, "seed": 7, "response_format": schema}),
        *(("/v1/completions", {"prompt": f"Number {n}", "temperature": n % 2, "seed": n, **endless}) for n in range(4)),
    ]


def unguessed(body: Json) -> Json:
    """The same request, for which nothing is guessed."""
    if "parameters" in body:
        return {**body, "parameters": {**body["parameters"], "speculate": 0}}
    return {**body, "speculate": 0}


class Stream:
    """The events of an answer, as they come."""

    def __init__(self) -> None:
        self.data = b""
        self.pause = 0.0  # the longest between two reads of events; what only keeps the connection alive is none

    async def read(self, response: aiohttp.ClientResponse, leave_after: int = 0) -> bool:
        """All of it. Leaves after so many reads, if that is not 0; False then."""
        last, count = 0.0, 0
        async for chunk in response.content.iter_any():
            self.data += chunk
            if chunk.startswith(b":"):
                continue
            now = time.monotonic()
            self.pause, last, count = max(self.pause, now - last if last else 0.0), now, count + 1
            if count == leave_after:
                return False
        return True

    def answer(self) -> dict[str, str]:
        """The text of each choice, with the reason why it ended, and how many tokens there were: some have no text. Raises
        ValueError for what is no answer, or not all of one."""
        texts: dict[str, str] = {}
        open_choices: set[str] = set()
        done = False
        for line in self.data.decode().split("\n"):  # and nowhere else: JSON may have line separators of Unicode in it
            if not line.startswith("data:"):
                continue
            if done:
                raise ValueError(f"something after the end: {line}")
            if line.rstrip() == "data: [DONE]":
                done = True
                continue
            event = json.loads(line.removeprefix("data:"))
            if "error" in event:
                raise ValueError(f"an error event: {line}")
            if "token" in event:
                texts["0"] = texts.get("0", "") + event["token"]["text"] + (event["generated_text"] or "")
                texts[TOKENS] = f"{texts.get(TOKENS, '')} {event['token']['id']}"
                done = event["generated_text"] is not None
                if details := event.get("details"):
                    texts[COUNT] = f"{details['finish_reason']} {details['generated_tokens']} {details['input_length']}"
            for choice in event.get("choices", ()):
                text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                index = str(choice["index"])
                texts[index] = texts.get(index, "") + text + (choice["finish_reason"] or "")
                (open_choices.discard if choice["finish_reason"] else open_choices.add)(index)
            if usage := event.get("usage"):
                texts[COUNT] = f"{usage['completion_tokens']} {usage['prompt_tokens']}"
        if open_choices or not (done and texts):
            raise ValueError(f"the stream ended before the answer did: {self.data[-200:].decode(errors='replace')}")
        return texts


class Chaos:
    """Load, faults and what is seen of both."""

    def __init__(self, server: Local, plan: Plan, console: Console) -> None:
        self.found = Found()
        self._server = server
        self._plan = plan
        self._console = console
        self._dice = random.Random(plan.seed)
        self._asked = requests()
        self._expected: list[dict[str, str]] = []
        self._began = self._end = 0.0  # of the load

    async def run(self) -> None:
        """All of it. Raises ValueError where the server does not do what is needed before the first fault."""
        async with self._connections() as self._session:
            self._expected = [await self._ask(path, unguessed(body)) for path, body in self._asked]
        async with self._connections() as self._session:
            await self._settled()
            before = self._server.held()
        async with self._connections() as self._session:
            await self._load()
        async with self._connections() as self._session:
            left = await self._settled()
            self._leaks(left, before, self._server.held())
            seen = await self._metrics()
            self.found.drafted = int(seen["penstock_drafted_tokens_total"])
            self.found.accepted = int(seen["penstock_accepted_tokens_total"])

    def _connections(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0)
        return aiohttp.ClientSession(self._server.url, connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    async def _load(self) -> None:
        self._began = time.monotonic()
        self._end = self._began + self._plan.seconds
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.gather(self._faults(), *(self._client() for _ in range(self._plan.clients)))
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    async def _ask(self, path: str, body: Json) -> dict[str, str]:
        """Without faults."""
        stream = Stream()
        async with self._session.post(path, json=body) as response:
            await stream.read(response)
            if response.status != 200:
                raise ValueError(f"{path} was answered {response.status}: {stream.data.decode()[:200]}")
        return stream.answer()

    async def _client(self) -> None:
        """Asks again when it has its answer."""
        while time.monotonic() < self._end:
            await asyncio.sleep(self._dice.uniform(0, 2 * self._plan.think))
            index = self._dice.randrange(len(self._asked))
            path, body = self._asked[index]
            stream = Stream()
            leave_after = self._dice.randint(1, 20) if self._dice.random() < CUT else 0
            try:
                async with asyncio.timeout(LONGEST), self._session.post(path, json=body) as response:
                    whole = await stream.read(response, leave_after)
                    if response.status != 200:
                        raise ValueError(f"status {response.status}: {stream.data.decode()[:200]}")
                if not whole:
                    self.found.cut += 1
                    continue
                answer = stream.answer()
            except (aiohttp.ClientError, ValueError, TimeoutError) as error:
                self.found.errors.append(f"{path} {json.dumps(body)[:80]}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.1)
                continue
            self.found.answers += 1
            self.found.longest_pause = max(self.found.longest_pause, stream.pause)
            if answer != self._expected[index]:
                self.found.wrong.append({"path": path, "body": body, "came": answer, "expected": self._expected[index]})

    async def _faults(self) -> None:
        """One after the other, each on shards that are whole again and have computed for a while."""
        while self._plan.every:
            await asyncio.sleep(self._plan.every * self._dice.uniform(0.5, 1.5))
            if time.monotonic() >= self._end:
                return
            shards = {name: pid for name, pid in self._server.processes().items() if name.startswith("shard")}
            name = self._dice.choice(sorted(shards))
            number = self._dice.choice((signal.SIGKILL, signal.SIGSTOP))
            began = time.monotonic()
            with suppress(ProcessLookupError):
                os.kill(shards[name], number)
            self.found.faults[number.name] += 1
            await self._lost_and_found(began)
            self.found.recoveries.append(time.monotonic() - began)
            self._console.print(
                f"{began - self._began:7.1f} s: {name}: {number.name}, ready after {self.found.recoveries[-1]:.1f} s"
            )

    async def _lost_and_found(self, began: float) -> None:
        """Returns when the router has noticed, and is ready again."""
        for ready in (False, True):
            while await self._ready() != ready:
                if time.monotonic() - began > RECOVERY:
                    raise ValueError(f"the shards did not come back within {RECOVERY:g} s" if ready else "a fault was not noticed")
                await asyncio.sleep(0.02)

    async def _ready(self) -> bool:
        async with self._session.get("/health/ready") as response:
            return response.status == 200

    async def _watch(self) -> None:
        """Memory, until it is cancelled."""
        while True:
            ready = await self._ready()  # those that load have not got what they will have
            for name, one in self._server.held().items() if ready else ():
                self.found.names[one.pid] = name
                self.found.memory.setdefault(one.pid, []).append((time.monotonic() - self._began, one.memory))
            await asyncio.sleep(SAMPLE)

    async def _metrics(self) -> dict[str, float]:
        async with self._session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}

    async def _settled(self) -> dict[str, float]:
        """What is still held by requests, by name, when nobody asks any more: nothing, within SETTLE."""
        deadline = time.monotonic() + SETTLE
        while True:
            seen = await self._metrics()
            left = {name: seen[f"penstock_{name}"] for name in ("waiting", "running", "pages_held")}
            left["pages_missing"] = seen["penstock_pages_total"] - seen["penstock_pages_free"]
            left = {name: count for name, count in left.items() if count}
            if not left or time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.1)

    def _leaks(self, left: dict[str, float], before: dict[str, Held], after: dict[str, Held]) -> None:
        self.found.leaks += [f"{name}: {count:g} when nobody asked any more" for name, count in left.items()]
        if after.keys() != before.keys():
            self.found.leaks.append(f"processes: {', '.join(sorted(before))} before, {', '.join(sorted(after))} afterwards")
        for name in before.keys() & after.keys():
            for what in ("files", "sockets"):
                had, has = getattr(before[name], what), getattr(after[name], what)
                if has > had + SLACK:
                    self.found.leaks.append(f"{what} of the {name}: {had} before, {has} afterwards")
        for pid, samples in self.found.memory.items():
            late = settled(samples)
            grown, most = growth(late), GROWTH if self._plan.every else STEP + STEEPEST * age(late)
            if age(samples) >= mature(self._plan) and grown > most:
                self.found.leaks.append(
                    f"memory of the {self.found.names[pid]} grew by {grown / 2**20:.1f} MiB in {age(late):.0f} s once it was warm"
                )


def mature(plan: Plan) -> float:
    """Seconds that a process has to have lived before its memory is judged."""
    return OLD if plan.every else MATURE


def age(samples: Sequence[tuple[float, int]]) -> float:
    """Seconds for which a process was looked at."""
    return samples[-1][0] - samples[0][0]


def settled(samples: Sequence[tuple[float, int]]) -> Sequence[tuple[float, int]]:
    """Without the time in which a process fills its caches: the first minute, or the first half of a shorter run."""
    warm = min(samples[0][0] + 60, (samples[0][0] + samples[-1][0]) / 2)
    return [sample for sample in samples if sample[0] >= warm]


def growth(samples: Sequence[tuple[float, int]]) -> float:
    """Bytes by which the last quarter is above the first one, in the middle of each: one sample alone says nothing."""
    sizes = [size for _, size in samples]
    part = max(1, len(sizes) // 4)
    return float(numpy.median(sizes[-part:]) - numpy.median(sizes[:part]))


def slope(samples: Sequence[tuple[float, int]]) -> float:
    """MiB a minute, as a straight line through them has it."""
    moments, sizes = numpy.array(samples, dtype=float).T
    return float(numpy.polyfit(moments, sizes, 1)[0]) * 60 / 2**20


def difference(came: dict[str, str], expected: dict[str, str]) -> str:
    """Where the first choice that differs does so, or the list or count of tokens, and what stands there in both."""
    for index in sorted(came.keys() | expected.keys()):
        own, other = came.get(index, ""), expected.get(index, "")
        if own != other:
            shorter = min(len(own), len(other))
            same = next((place for place in range(shorter) if own[place] != other[place]), shorter)
            which = f"choice {index}" if index.isdigit() else f"the {index}"
            return f"{which} has {own[same : same + 40]!r} after {same} characters, not {other[same : same + 40]!r}"
    return "nothing differs"


async def play(server: Local, plan: Plan, console: Console) -> Found:
    """The whole of it, with a server that is ready."""
    chaos = Chaos(server, plan, console)
    await chaos.run()
    return chaos.found


def main(plan: Plan, flags: Sequence[str], out: Path | None, console: Console) -> int:
    """Runs it. Returns the exit code: 1 if anybody noticed anything. Raises local.Failed or ValueError, which say why it can't."""
    several = ("--max-concurrent-requests", str(max(128, 2 * plan.clients)), "--max-restarts", "1000000")
    exact = ("--dtype", "float32")  # in 16 bits who else is in a batch decides near ties, which are many
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as folder:
        with Local([*several, *exact, "--step-timeout", str(STEP_TIMEOUT), *flags], Path(folder) / "log") as server:
            try:
                found = asyncio.run(play(server, plan, console))
                code = server.stop()
            except BaseException:
                console.print(server.log.read_text(errors="replace")[-4000:], markup=False)
                raise
        if code:
            found.errors.append(f"penstock serve ended with exit code {code}")
        if not found.good:
            console.print(server.log.read_text(errors="replace")[-4000:], markup=False)
    for line in told(plan, found):
        print(line)
    if out is not None:
        out.write_text(json.dumps(report(plan, found), indent=1))
    return int(not found.good)


def report(plan: Plan, found: Found) -> Json:
    """Everything, for --json."""
    return {
        "seconds": plan.seconds,
        "clients": plan.clients,
        "seed": plan.seed,
        "answers": found.answers,
        "cut": found.cut,
        "faults": dict(found.faults),
        "recovery_seconds": found.recoveries,
        "longest_pause_seconds": found.longest_pause,
        "drafted": found.drafted,
        "accepted": found.accepted,
        "wrong": found.wrong,
        "errors": found.errors,
        "leaks": found.leaks,
        "memory": {f"{found.names[pid]} ({pid})": samples for pid, samples in found.memory.items()},
    }


def told(plan: Plan, found: Found) -> list[str]:
    """The same for people."""
    faults = ", ".join(f"{count} {name}" for name, count in sorted(found.faults.items())) or "none"
    lines = [
        f"faults: {faults}; recoveries: {max(found.recoveries, default=0):.1f} s at most",
        f"answers: {found.answers} of {plan.clients} clients; wrong: {len(found.wrong)}; errors: {len(found.errors)}; "
        f"cut by their clients: {found.cut}",
        f"longest pause of a stream: {found.longest_pause:.2f} s",
    ]
    if found.drafted:
        lines.append(f"guesses: {found.drafted}; right: {found.accepted}")
    for pid, samples in found.memory.items():
        late = settled(samples)
        if age(samples) >= mature(plan):
            lines.append(
                f"memory of the {found.names[pid]} ({pid}): {samples[0][1] / 2**20:.0f} MiB, {samples[-1][1] / 2**20:.0f} after "
                f"{age(samples):.0f} s; slope once it was warm: {slope(late):+.2f} MiB/min"
            )
    lines += [
        f"wrong: {wrong['path']} {json.dumps(wrong['body'])[:100]}: {difference(wrong['came'], wrong['expected'])}"
        for wrong in found.wrong[:5]
    ]
    lines += [f"error: {error}" for error in found.errors[:5]]
    lines.append("left behind: " + ("; ".join(found.leaks) or "no page, process, socket or file"))
    return lines
