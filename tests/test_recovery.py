"""Processes that are killed or stopped under load: every answer is the one that it would have been.

Real processes and a trained model. Who is to blame, and what becomes of the queue meanwhile: tests/router/test_recovery.py.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from penstock.tests.inprocess import LIGHT
from penstock.tests.serving import Server, serve
from penstock.tests.test_server import idle, metrics, post, talk, until

Json = dict[str, Any]

RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "legs": {"type": "integer", "maximum": 8}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}
LENGTH = 80  # tokens
FLAGS = ("--page-size", "4", "--kv-pages", "4096", "--max-batch-prefill-tokens", "32", "--step-timeout", "1.5")
DEADLY = 77  # max_tokens of a request that kills the shard, see POISON
# Read by every Python process that has it on its path: the shard dies in each step of the deadly request.
POISON = f"""
import os, signal, sys
if "penstock.shard" in sys.orig_argv:
    from penstock.shard.engine import Engine
    def deadly(method):
        def run(self, *arguments):
            if any(group.max_new_tokens == {DEADLY} for group in self.books.groups.values()):
                os.kill(os.getpid(), signal.SIGKILL)
            return method(self, *arguments)
        return run
    Engine.begin_prefill, Engine.begin_decode = deadly(Engine.begin_prefill), deadly(Engine.begin_decode)
"""


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It can be poisoned."""
    folder = tmp_path_factory.mktemp("poison")
    (folder / "sitecustomize.py").write_text(POISON)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        with serve(str(LIGHT), *FLAGS, "--max-restarts", "9") as server:
            yield server


@pytest.fixture(scope="module")
def two() -> Iterator[Server]:
    """Its ranks leave steps under way, as they do on GPUs."""
    with serve(str(LIGHT), "--num-shard", "2", "--overlap", "on", *FLAGS) as server:
        yield server


def requests() -> list[tuple[str, Json]]:
    """One of each kind, and a crowd."""
    endless = {"max_tokens": LENGTH, "ignore_eos": True, "stream": True}
    asked: list[tuple[str, Json]] = [
        ("/v1/completions", {"prompt": "Once upon a time", "temperature": 0, **endless}),
        ("/v1/completions", {"prompt": "Tell me a story of a dog. " * 8, "temperature": 0.9, "seed": 1, "top_p": 0.9, **endless}),
        ("/v1/completions", {"prompt": "There was", "n": 2, "temperature": 1.0, "seed": 2, "presence_penalty": 0.5, **endless}),
        ("/v1/completions", {"prompt": "Once there was a", "num_beams": 3, "n": 2, **endless}),
        ("/generate_stream", {"inputs": "The end is", "parameters": {"max_new_tokens": LENGTH, "stop": ["ear"], "seed": 3}}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "Give me a record of a dog as JSON."}],
                "max_tokens": LENGTH,
                "temperature": 1.0,
                "seed": 4,
                "stream": True,
                "response_format": {"type": "json_schema", "json_schema": {"name": "record", "schema": RECORD}},
            },
        ),
    ]
    crowd = [{"prompt": f"Number {number}", "temperature": number % 2, "seed": number, **endless} for number in range(9)]
    return asked + [("/v1/completions", body) for body in crowd]


async def told(session: aiohttp.ClientSession, path: str, body: Json) -> dict[int, str]:
    """The text of each choice, and why it ended. Errors are failures."""
    texts: dict[int, str] = {}
    async with session.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        lines = (await response.text()).splitlines()  # with a comment now and then, if a recovery takes long
        for data in [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]:
            event = {"choices": []} if data == "[DONE]" else json.loads(data)
            assert "error" not in event, event
            if path == "/generate_stream":
                texts[0] = texts.get(0, "") + event["token"]["text"] + (event["generated_text"] or "")
            for choice in event.get("choices", ()):
                text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                texts[choice["index"]] = texts.get(choice["index"], "") + text + (choice["finish_reason"] or "")
    return texts


async def status(session: aiohttp.ClientSession, path: str) -> int:
    async with session.get(path) as response:
        return response.status


async def until_ready(session: aiohttp.ClientSession, ready: bool = True, seconds: float = 20) -> None:
    """Returns when the probe says so; a connection that is refused says no."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if (await status(session, "/health/ready") == 200) == ready:
                return
        except aiohttp.ClientError:
            if not ready:
                return
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def generated(session: aiohttp.ClientSession, count: int) -> None:
    """Returns after so many more tokens."""
    name = "penstock_generated_tokens_total"
    goal = (await metrics(session))[name] + count
    await until(session, lambda seen: seen[name] >= goal, 20)


@pytest.mark.parametrize(("name", "last", "crowd"), [("one", 0, None), ("two", 1, 3)])
def test_streams_go_on_where_they_were_when_a_shard_is_killed_or_stopped(
    name: str, last: int, crowd: int | None, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(name)
    asked = requests()[:crowd]

    async def answers(session: aiohttp.ClientSession) -> list[dict[int, str]]:
        return list(await asyncio.gather(*(told(session, path, body) for path, body in asked)))

    async def work(session: aiohttp.ClientSession) -> None:
        expected = await answers(session)
        assert len(expected[2]) == 2
        for restarts, number in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
            again = asyncio.create_task(answers(session))
            await generated(session, 10 * len(asked) * restarts)
            os.kill(server.child(f'"rank":{last},'), number)
            await until_ready(session, ready=False)
            assert (await status(session, "/health"), await status(session, "/health/live")) == (200, 200)
            waiting = asyncio.create_task(told(session, *asked[0]))
            assert await again == expected
            assert await waiting == expected[0]
            seen = await metrics(session)
            assert seen["penstock_restarts_total"] == restarts
            assert seen["penstock_replayed_requests_total"] > 2
            await until(session, idle, 2)
        assert seen["penstock_recovery_seconds_count"] == 2
        assert seen["penstock_restored_tokens_total"] > 100

    talk(server, work)
    assert f"penstock: shard {last} was killed by SIGKILL" in server.log
    assert "penstock: the router has lost the shards: shard rank 0 has not answered for" in server.log
    assert server.log.count("penstock: ready again after") == 2
    assert "ERROR router" not in server.log


def test_a_killed_router_comes_back_to_its_shards(one: Server) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        expected = await told(session, *requests()[0])
        shard, router = one.child("penstock.shard"), one.child("router.json")
        cut = [asyncio.create_task(told(session, path, body)) for path, body in requests()]
        await until(session, lambda seen: seen["penstock_running"] > 5, 10)
        os.kill(router, signal.SIGKILL)
        began = time.monotonic()
        for failure in await asyncio.gather(*cut, return_exceptions=True):
            assert isinstance(failure, aiohttp.ClientError)
        await until_ready(session)
        assert time.monotonic() - began < 10
        assert one.child("penstock.shard") == shard
        assert one.child("router.json") != router
        await until(session, idle, 5)
        assert await told(session, *requests()[0]) == expected

    talk(one, work)


def test_a_request_that_kills_the_shard_whenever_it_runs_fails_alone(one: Server) -> None:
    others = requests()[-2:]
    deadly = {"prompt": "x", "max_tokens": DEADLY, "ignore_eos": True}

    async def work(session: aiohttp.ClientSession) -> None:
        expected = [await told(session, path, body) for path, body in others]
        before = (await metrics(session))["penstock_restarts_total"]
        failing = asyncio.create_task(post(session, "/v1/completions", deadly))
        await until_ready(session, ready=False)
        found = asyncio.gather(*(told(session, path, body) for path, body in others))
        with pytest.raises(AssertionError, match="again and again"):
            await failing
        assert await found == expected
        restarts = (await metrics(session))["penstock_restarts_total"] - before
        assert 2 <= restarts <= 3  # before and after others were suspected with it
        await until(session, idle, 2)

    talk(one, work)


def test_a_signal_in_the_middle_of_a_recovery_ends_everything(one: Server) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        endless = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
        running = asyncio.create_task(post(session, "/v1/completions", endless))
        await until(session, lambda seen: seen["penstock_running"] > 0, 10)
        os.kill(one.child("penstock.shard"), signal.SIGKILL)
        await until_ready(session, ready=False)
        one.process.send_signal(signal.SIGTERM)
        with pytest.raises(AssertionError, match="shuts down"):
            await running

    talk(one, work)
    one.check_end(0)


def test_after_sigkill_of_the_launcher_no_process_that_was_started_again_lives(two: Server) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        os.kill(two.child('"rank":0'), signal.SIGKILL)
        await until_ready(session, ready=False)
        os.kill(two.child("router.json"), signal.SIGKILL)
        while len(two.children()) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    talk(two, work)
    two.process.kill()
    two.process.wait()
    two.wait_until_alone(5)
