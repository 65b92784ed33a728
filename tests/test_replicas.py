"""Three replicas of a model behind one router: where requests are placed, and that no stream is lost when a replica dies, joins
or leaves.

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

from penstock.tests.inprocess import SMALL_MODEL
from penstock.tests.serving import START, Server, scratch, serve
from penstock.tests.test_recovery import answer_texts, requests, status, until_generated
from penstock.tests.test_server import is_idle, metrics, until_metrics, with_session

Json = dict[str, Any]

FLAGS = ("--page-size", "4", "--kv-pages", "4096", "--max-batch-prefill-tokens", "64")
ADMIN = {"Authorization": "Bearer boss"}
SYSTEM_TOKENS = 64  # tokens of a system prompt
USERS, REQUESTS, CONCURRENT = 100, 480, 24


@pytest.fixture(scope="module")
def three_replicas() -> Iterator[Server]:
    with serve(str(SMALL_MODEL), "--replicas", "3", "--admin-key", "boss", *FLAGS) as server:
        yield server


async def states(session: aiohttp.ClientSession) -> dict[str, str]:
    async with session.get("/admin/replicas", headers=ADMIN) as response:
        assert response.status == 200, await response.text()
        return {replica["name"]: replica["state"] for replica in (await response.json())["replicas"]}


async def until_ready(session: aiohttp.ClientSession, *names: str) -> None:
    """Returns when the replicas with these names are ready."""
    async with asyncio.timeout(START):
        while not {name for name, state in (await states(session)).items() if state == "ready"}.issuperset(names):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def until_all_ready(session: aiohttp.ClientSession) -> None:
    await until_ready(session, "0", "1", "2")


async def placements(session: aiohttp.ClientSession) -> dict[str, float]:
    """The number of requests placed on each replica so far."""
    async with session.get("/metrics") as response:
        text = await response.text()
    found: dict[str, float] = {}
    for labels, count in re.findall(r"penstock_placements_total{(.*)} (.*)", text):
        name = re.findall(r'replica="(.*?)"', labels)[0]
        found[name] = found.get(name, 0.0) + float(count)
    return found


def test_requests_go_where_their_prefix_is_cached_and_load_is_even(three_replicas: Server) -> None:
    rng = random.Random(7)
    system_prompts = [rng.choices(range(300, 2000), k=SYSTEM_TOKENS) for _ in range(10)]
    users = [rng.choice(system_prompts) for _ in range(USERS)]

    async def work(session: aiohttp.ClientSession) -> None:
        await until_all_ready(session)

        async def send(system_prompt: list[int]) -> int:
            prompt = system_prompt + rng.choices(range(300, 2000), k=rng.randint(3, 12))
            body = {"prompt": prompt, "max_tokens": rng.choice((2, 4, 8)), "ignore_eos": True}
            async with session.post("/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                cached: int = (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]
                return cached

        # One after the other, so that no replica is busier than others: each prompt goes to the only replica that has it.
        for fresh in (True, False, False):
            assert [await send(prompt) < SYSTEM_TOKENS for prompt in system_prompts] == [fresh] * len(system_prompts)
        before = await placements(session)
        cached_tokens: list[int] = []
        # In waves: if each finished request was replaced by a new one, a replica with too little CPU time would rightly get fewer.
        for _ in range(REQUESTS // CONCURRENT):
            cached_tokens += await asyncio.gather(*(send(rng.choice(users)) for _ in range(CONCURRENT)))
        assert sum(cached >= SYSTEM_TOKENS for cached in cached_tokens) >= 0.9 * REQUESTS  # as counted by the shards
        counts = {name: count - before[name] for name, count in (await placements(session)).items()}
        assert sum(counts.values()) == REQUESTS
        assert max(counts.values()) <= 1.2 * REQUESTS / 3
        assert min(counts.values()) >= 0.8 * REQUESTS / 3

    with_session(three_replicas, work)


def check_no_disturbance(server: Server, disturb: Callable[[aiohttp.ClientSession], Awaitable[None]]) -> None:
    """While `disturb` runs, all answers are the same as without it, and the server stays ready."""

    async def work(session: aiohttp.ClientSession) -> None:
        await until_all_ready(session)

        async def answers() -> list[dict[int, str]]:
            return list(await asyncio.gather(*(answer_texts(session, path, body) for path, body in requests())))

        async def watch_probe() -> None:
            while True:
                assert await status(session, "/health/ready") == 200
                await asyncio.sleep(0.05)

        expected = await answers()
        again, watching = asyncio.create_task(answers()), asyncio.create_task(watch_probe())
        await until_generated(session, 200)
        await disturb(session)
        assert await again == expected
        assert not watching.done()
        watching.cancel()
        await until_metrics(session, is_idle, 5)

    with_session(server, work)


def test_killed_replica_loses_no_stream_and_is_restarted(three_replicas: Server) -> None:
    async def kill(session: aiohttp.ClientSession) -> None:
        os.kill(three_replicas.child("shard-1-0"), signal.SIGKILL)
        await until_metrics(session, lambda values: values["penstock_moved_requests_total"] > 2, 10)

    check_no_disturbance(three_replicas, kill)

    async def check_restarted(session: aiohttp.ClientSession) -> None:
        await until_all_ready(session)
        values = await metrics(session)
        assert values["penstock_restarts_total"] == 1
        before = await placements(session)
        await asyncio.gather(*(answer_texts(session, path, body) for path, body in requests()))
        assert (await placements(session))["1"] > before["1"]

    with_session(three_replicas, check_restarted)
    assert "penstock: replica 1 shard 0 was killed by SIGKILL" in three_replicas.log
    assert "penstock: starting replica 1 again now" in three_replicas.log
    assert "penstock: replica 1 is ready again after" in three_replicas.log
    assert three_replicas.log.count("INFO replica 1 shard 0: loaded") == 2  # the name used in JSON lines, too


def test_replicas_join_drain_and_leave_without_losing_a_stream(three_replicas: Server) -> None:
    with scratch() as folder:
        rank_group = Server(folder, str(SMALL_MODEL), "--no-router", "--shard-uds-path", str(folder / "group"), *FLAGS)
        try:
            check_no_disturbance(three_replicas, lambda session: come_and_go(session, f"unix:{folder / 'group'}-0"))
            assert f"a router finds them with --replica unix:{folder / 'group'}-0" in rank_group.log
            rank_group.stop()
            assert "streams go on elsewhere" in rank_group.log
            assert "running streams get" not in rank_group.log  # this command has no router that could wait for them
        finally:
            rank_group.kill()


async def come_and_go(session: aiohttp.ClientSession, address: str) -> None:
    """A fourth replica joins; one of the others is drained, one leaves at once; the drained one joins again, and the fourth
    leaves."""
    async with session.post("/admin/replicas", headers=ADMIN, json={"address": address, "name": "fourth"}) as response:
        assert response.status == 202, await response.text()
    await until_ready(session, "fourth")
    async with session.post("/admin/replicas/0/drain", headers=ADMIN, json={"move": True}) as response:
        assert (response.status, (await response.json())["requests"]) == (202, 0)
    async with session.delete("/admin/replicas/2", headers=ADMIN) as response:
        assert [each["name"] for each in (await response.json())["replicas"]] == ["0", "1", "fourth"]
    await answer_texts(session, *requests()[0])
    async with session.get("/admin/replicas", headers=ADMIN) as response:
        drained = next(each for each in (await response.json())["replicas"] if each["name"] == "0")
    async with session.delete("/admin/replicas/0", headers=ADMIN) as response:
        assert response.status == 200
    async with session.delete("/admin/replicas/0", headers=ADMIN) as response:
        assert response.status == 404
    async with session.post("/admin/replicas", headers=ADMIN, json={"address": drained["addresses"][0]}) as response:
        assert (response.status, (await response.json())["name"]) == (202, "3")
    await until_ready(session, "3")
    async with session.delete("/admin/replicas/fourth", headers=ADMIN) as response:
        assert response.status == 200
