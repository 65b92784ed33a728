"""Three replicas of a model behind one router: who gets what, and that nobody notices when one of them dies, comes or goes.

Real processes. Placement alone: tests/router/test_placement.py; deaths in any order: tests/router/test_fleet.py.
"""

import asyncio
import os
import random
import re
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import pytest

from penstock.tests.inprocess import LIGHT
from penstock.tests.serving import START, Server, scratch, serve
from penstock.tests.test_recovery import generated, requests, status, told
from penstock.tests.test_server import idle, metrics, talk, until

Json = dict[str, Any]

SIZE = ("--page-size", "4", "--kv-pages", "4096", "--max-batch-prefill-tokens", "64")
ADMIN = {"Authorization": "Bearer boss"}
SYSTEM = 64  # tokens of a system prompt
USERS, REQUESTS, TOGETHER = 100, 480, 24


@pytest.fixture(scope="module")
def three() -> Iterator[Server]:
    with serve(str(LIGHT), "--replicas", "3", "--admin-key", "boss", *SIZE) as server:
        yield server


async def states(session: aiohttp.ClientSession) -> dict[str, str]:
    async with session.get("/admin/replicas", headers=ADMIN) as response:
        assert response.status == 200, await response.text()
        return {replica["name"]: replica["state"] for replica in (await response.json())["replicas"]}


async def until_ready(session: aiohttp.ClientSession, *names: str) -> None:
    """Returns when all of these are."""
    async with asyncio.timeout(START):
        while not {name for name, state in (await states(session)).items() if state == "ready"}.issuperset(names):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def until_three(session: aiohttp.ClientSession) -> None:
    await until_ready(session, "0", "1", "2")


async def given(session: aiohttp.ClientSession) -> dict[str, float]:
    """Requests of each replica so far."""
    async with session.get("/metrics") as response:
        text = await response.text()
    found: dict[str, float] = {}
    for labels, count in re.findall(r"penstock_placements_total{(.*)} (.*)", text):
        name = re.findall(r'replica="(.*?)"', labels)[0]
        found[name] = found.get(name, 0.0) + float(count)
    return found


def test_shared_prefixes_are_found_and_load_is_even(three: Server) -> None:
    chance = random.Random(7)
    systems = [chance.choices(range(300, 2000), k=SYSTEM) for _ in range(10)]
    users = [chance.choice(systems) for _ in range(USERS)]

    async def work(session: aiohttp.ClientSession) -> None:
        await until_three(session)

        async def ask() -> int:
            prompt = chance.choice(users) + chance.choices(range(300, 2000), k=chance.randint(3, 12))
            body = {"prompt": prompt, "max_tokens": chance.choice((2, 4, 8)), "ignore_eos": True}
            async with session.post("/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                cached: int = (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]
                return cached

        found: list[int] = []
        # In waves: of a stream of one request for one that has ended, a replica that the machine starves rightly gets less.
        for _ in range(REQUESTS // TOGETHER):
            found += await asyncio.gather(*(ask() for _ in range(TOGETHER)))
        assert sum(cached >= SYSTEM for cached in found) >= 0.9 * REQUESTS  # really, as the shards say
        counts = await given(session)
        assert sum(counts.values()) == REQUESTS
        assert max(counts.values()) <= 1.2 * REQUESTS / 3
        assert min(counts.values()) >= 0.8 * REQUESTS / 3

    talk(three, work)


def through(server: Server, trouble: Callable[[aiohttp.ClientSession], Awaitable[None]]) -> None:
    """Everything is answered as if nothing had happened, and the server is ready all the time."""

    async def work(session: aiohttp.ClientSession) -> None:
        await until_three(session)

        async def answers() -> list[dict[int, str]]:
            return list(await asyncio.gather(*(told(session, path, body) for path, body in requests())))

        async def watch() -> None:
            while True:
                assert await status(session, "/health/ready") == 200
                await asyncio.sleep(0.05)

        expected = await answers()
        again, watching = asyncio.create_task(answers()), asyncio.create_task(watch())
        await generated(session, 200)
        await trouble(session)
        assert await again == expected
        assert not watching.done()
        watching.cancel()
        await until(session, idle, 5)

    talk(server, work)


def test_a_replica_that_is_killed_loses_no_stream_and_comes_back(three: Server) -> None:
    async def kill(session: aiohttp.ClientSession) -> None:
        os.kill(three.child("shard-1-0"), signal.SIGKILL)
        await until(session, lambda seen: seen["penstock_moved_requests_total"] > 2, 10)

    through(three, kill)

    async def back(session: aiohttp.ClientSession) -> None:
        await until_three(session)
        seen = await metrics(session)
        assert seen["penstock_restarts_total"] == 1
        before = await given(session)
        await asyncio.gather(*(told(session, path, body) for path, body in requests()))
        assert (await given(session))["1"] > before["1"]

    talk(three, back)
    assert "penstock: replica 1 shard 0 was killed by SIGKILL" in three.log
    assert "penstock: starting replica 1 again now" in three.log
    assert "penstock: replica 1 is ready again after" in three.log
    assert three.log.count("INFO replica 1 shard 0: loaded") == 2  # the name that JSON lines have, too


def test_a_replica_joins_and_others_leave_and_no_stream_is_lost(three: Server) -> None:
    with scratch() as folder:
        group = Server(folder, str(LIGHT), "--no-router", "--shard-uds-path", str(folder / "group"), *SIZE)
        try:
            through(three, lambda session: come_and_go(session, f"unix:{folder / 'group'}-0"))
            assert f"a router finds them with --replica unix:{folder / 'group'}-0" in group.log
            group.stop()
            assert "streams go on elsewhere" in group.log
            assert "running streams get" not in group.log  # no router is here that could wait for them
        finally:
            group.kill()


async def come_and_go(session: aiohttp.ClientSession, address: str) -> None:
    """A fourth joins; of the others one is drained, one leaves at once; the fourth leaves, the first is there again."""
    async with session.post("/admin/replicas", headers=ADMIN, json={"address": address, "name": "fourth"}) as response:
        assert response.status == 202, await response.text()
    await until_ready(session, "fourth")
    async with session.post("/admin/replicas/0/drain", headers=ADMIN, json={"move": True}) as response:
        assert (response.status, (await response.json())["requests"]) == (202, 0)
    async with session.delete("/admin/replicas/2", headers=ADMIN) as response:
        assert [each["name"] for each in (await response.json())["replicas"]] == ["0", "1", "fourth"]
    await told(session, *requests()[0])
    async with session.get("/admin/replicas", headers=ADMIN) as response:
        first = next(each for each in (await response.json())["replicas"] if each["name"] == "0")
    async with session.delete("/admin/replicas/0", headers=ADMIN) as response:
        assert response.status == 200
    async with session.delete("/admin/replicas/0", headers=ADMIN) as response:
        assert response.status == 404
    async with session.post("/admin/replicas", headers=ADMIN, json={"address": f"unix:{first['addresses'][0]}"}) as response:
        assert (response.status, (await response.json())["name"]) == (202, "3")
    await until_ready(session, "3")
    async with session.delete("/admin/replicas/fourth", headers=ADMIN) as response:
        assert response.status == 200
