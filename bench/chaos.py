"""`penstock bench --chaos`: fault injection. Shards of a local server are killed and stopped under load, and clients must not
notice.

Every answer is compared with the one that the same request got before the first fault, and without speculative decoding, which must
not change answers either. Afterwards leaks are looked for: pages, processes, sockets, growing memory. The router is left alone:
killing it would cut all connections, so that nothing could be compared.
"""

import asyncio
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp
from rich.console import Console

from .chaos_report import Found, Plan, grown, report, summary
from .chaos_requests import Json, Stream, requests, undrafted
from .local_server import Failed, HeldResources, LocalServer

READY = "/health/ready"  # the path of the readiness probe
STEP_TIMEOUT = 2.0  # seconds after which a stopped shard is noticed, unless the operator's flags say otherwise
RECOVERY = 300.0  # seconds that a recovery may take
LONGEST = 600.0  # seconds that a request may take, including faults
SETTLE = 10.0  # seconds after the last answer within which everything must have been released
SAMPLE = 1.0  # seconds between two samples of memory
CUT = 0.1  # share of requests whose client disconnects in the middle
SLACK = 3  # files that a process may have more of than before: a metric's page, a log


class Chaos:
    """A run: load, faults and the observations of both."""

    def __init__(self, server: LocalServer, plan: Plan, console: Console, key: str = "") -> None:
        """key: the API key that the server asks for."""
        self.found = Found()
        self._server = server
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._plan = plan
        self._console = console
        self._dice = random.Random(plan.seed)
        self._asked = requests()
        self._expected: list[dict[str, str]] = []
        self._began = self._end = 0.0  # of the load

    async def run(self) -> None:
        """Performs the run. Raises ValueError or aiohttp.ClientError where the server does not work before the first fault."""
        async with self._connections() as self._session:
            self._expected = [await self._ask(path, undrafted(body)) for path, body in self._asked]
        async with self._connections() as self._session:
            await self._settled()
            before = self._server.held()
        try:
            async with self._connections() as self._session:
                await self._load()
            async with self._connections() as self._session:
                left = await self._settled()
                self._leaks(left, before, self._server.held())
                seen = await self._metrics()
                self.found.drafted = int(seen["penstock_drafted_tokens_total"])
                self.found.accepted = int(seen["penstock_accepted_tokens_total"])
        except (ValueError, aiohttp.ClientError) as error:  # the server is gone, or will not be ready again: reported with the rest
            self.found.errors.append(f"the run ended early: {type(error).__name__}: {error}")

    def _connections(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        return aiohttp.ClientSession(self._server.url, connector=connector, headers=self._headers, timeout=timeout)

    async def _load(self) -> None:
        self._began = time.monotonic()
        self._end = self._began + self._plan.seconds
        watching = asyncio.create_task(self._watch())
        tasks = [asyncio.create_task(one) for one in (self._faults(), *(self._client() for _ in range(self._plan.clients)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in (watching, *tasks):
                task.cancel()
            await asyncio.gather(watching, *tasks, return_exceptions=True)

    async def _ask(self, path: str, body: Json) -> dict[str, str]:
        """The answer to a request, without faults. Raises ValueError."""
        stream = Stream()
        async with self._session.post(path, json=body) as response:
            await stream.read(response)
            if response.status != 200:
                raise ValueError(f"{path} was answered {response.status}: {stream.data.decode()[:200]}")
        return stream.answer()

    async def _client(self) -> None:
        """A client that sends its next request when it has its answer."""
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
        """Injects faults one after the other, each when the shards are whole again and have computed for a while."""
        while self._plan.every:
            pause = self._plan.every * self._dice.uniform(0.5, 1.5)
            if time.monotonic() + pause >= self._end:
                return
            await asyncio.sleep(pause)
            shards = {name: pid for name, pid in self._server.processes().items() if "shard" in name}
            if not shards:
                raise ValueError("the server has no shards any more")
            name = self._dice.choice(sorted(shards))
            number = self._dice.choice((signal.SIGKILL, signal.SIGSTOP))
            began = time.monotonic()
            with suppress(ProcessLookupError):
                os.kill(shards[name], number)
            self.found.faults[number.name] += 1
            await self._lost_and_found(began, _probe(name))
            self.found.recoveries.append(time.monotonic() - began)
            self._console.print(
                f"{began - self._began:7.1f} s: {name}: {number.name}, ready after {self.found.recoveries[-1]:.1f} s"
            )

    async def _lost_and_found(self, began: float, probe: str) -> None:
        """Returns when the router has noticed the fault, and is ready again."""
        for ready in (False, True):
            while await self._ready(probe) != ready:
                if time.monotonic() - began > RECOVERY:
                    raise ValueError(f"the shards did not come back within {RECOVERY:g} s" if ready else "a fault was not noticed")
                await asyncio.sleep(0.02)

    async def _ready(self, probe: str = READY) -> bool:
        async with self._session.get(probe) as response:
            return response.status == 200

    async def _watch(self) -> None:
        """Samples memory until it is cancelled."""
        while True:
            ready = await self._ready()  # loading shards do not have all their memory yet
            for name, one in self._server.held().items() if ready else ():
                samples = self.found.memory.setdefault(f"{name} ({one.pid})", [])
                samples.append((time.monotonic() - self._began, one.memory))
            await asyncio.sleep(SAMPLE)

    async def _metrics(self) -> dict[str, float]:
        async with self._session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}

    async def _settled(self) -> dict[str, float]:
        """What is still held, by name, after the last request: nothing, within SETTLE."""
        deadline = time.monotonic() + SETTLE
        while True:
            seen = await self._metrics()
            left = {name: seen[f"penstock_{name}"] for name in ("waiting", "running", "pages_held")}
            left["pages_missing"] = seen["penstock_pages_total"] - seen["penstock_pages_free"]
            left = {name: count for name, count in left.items() if count}
            if not left or time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.1)

    def _leaks(self, left: dict[str, float], before: dict[str, HeldResources], after: dict[str, HeldResources]) -> None:
        self.found.leaks += [f"{name}: {count:g} when nobody asked any more" for name, count in left.items()]
        if after.keys() != before.keys():
            self.found.leaks.append(f"processes: {', '.join(sorted(before))} before, {', '.join(sorted(after))} afterwards")
        for name in before.keys() & after.keys():
            for what in ("files", "sockets"):
                had, has = getattr(before[name], what), getattr(after[name], what)
                if has > had + SLACK:
                    self.found.leaks.append(f"{what} of the {name}: {had} before, {has} afterwards")
        self.found.leaks += grown(self._plan, self.found)


def _probe(shard: str) -> str:
    """The path of the readiness probe of a shard's replica, by the shard's name."""
    return f"{READY}?replica={shard.split()[1]}" if shard.startswith("replica") else READY


async def play(server: LocalServer, plan: Plan, console: Console, key: str = "") -> Found:
    """Performs a run with a server that is ready."""
    chaos = Chaos(server, plan, console, key)
    await chaos.run()
    return chaos.found


def main(plan: Plan, flags: Sequence[str], out: Path | None, console: Console, key: str = "") -> int:
    """Runs the command. Returns the exit code: 1 if anything was noticed. Raises local_server.Failed, ValueError or
    aiohttp.ClientError, which say why it cannot run. key: the API key that the server takes from the environment."""
    several = ("--max-concurrent-requests", str(max(128, 2 * plan.clients)), "--max-restarts", "1000000")
    exact = ("--dtype", "float32")  # in 16 bits the rest of the batch decides near ties, which are many
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as folder:
        with LocalServer([*several, *exact, "--step-timeout", str(STEP_TIMEOUT), *flags], Path(folder) / "log") as server:
            try:
                found = asyncio.run(play(server, plan, console, key))
            except BaseException:
                console.print(server.log.read_text(errors="replace")[-4000:], markup=False)
                raise
            try:
                if code := server.stop():
                    found.errors.append(f"penstock serve ended with exit code {code}")
            except Failed as error:
                found.errors.append(str(error))
        if not found.good:
            console.print(server.log.read_text(errors="replace")[-4000:], markup=False)
    for line in summary(plan, found):
        print(line)
    if out is not None:
        out.write_text(json.dumps(report(plan, found), indent=1))
    return int(not found.good)
