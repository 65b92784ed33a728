"""Processes that are killed or stopped under load: every answer is the same as without the fault.

Real processes and a trained model. Which request is suspected, and what happens to the queue meanwhile:
tests/router/test_recovery.py.
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

from penstock.tests.inprocess import SMALL_MODEL
from penstock.tests.serving import Server, serve
from penstock.tests.test_server import is_idle, metrics, post, until_metrics, with_session

Json = dict[str, Any]

RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "legs": {"type": "integer", "maximum": 8}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}
LENGTH = 80  # tokens
FLAGS = ("--page-size", "4", "--kv-pages", "4096", "--max-batch-prefill-tokens", "32", "--step-timeout", "1.5")
POISON_MAX_TOKENS = 77  # max_tokens of a request that kills the shard, see SITECUSTOMIZE
# sitecustomize.py, which every Python process imports that has it on its path: the shard dies in each step of the poison request.
SITECUSTOMIZE = f"""
import os, signal, sys
if "penstock.shard" in sys.orig_argv:
    from penstock.shard.engine import Engine
    def deadly(method):
        def run(self, *arguments):
            if any(group.max_new_tokens == {POISON_MAX_TOKENS} for group in self.books.groups.values()):
                os.kill(os.getpid(), signal.SIGKILL)
            return method(self, *arguments)
        return run
    Engine.begin_prefill, Engine.begin_decode = deadly(Engine.begin_prefill), deadly(Engine.begin_decode)
"""


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One rank. A request with max_tokens POISON_MAX_TOKENS kills its shard."""
    folder = tmp_path_factory.mktemp("poison")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        with serve(str(SMALL_MODEL), *FLAGS, "--max-restarts", "9") as server:
            yield server


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Server]:
    """Two ranks, with overlapping steps as on GPUs."""
    with serve(str(SMALL_MODEL), "--num-shard", "2", "--overlap", "on", *FLAGS) as server:
        yield server


def requests() -> list[tuple[str, Json]]:
    """One request of each kind, and nine simple ones."""
    full_length = {"max_tokens": LENGTH, "ignore_eos": True, "stream": True}
    bodies: list[tuple[str, Json]] = [
        ("/v1/completions", {"prompt": "Once upon a time", "temperature": 0, **full_length}),
        (
            "/v1/completions",
            {"prompt": "Tell me a story of a dog. " * 8, "temperature": 0.9, "seed": 1, "top_p": 0.9, **full_length},
        ),
        ("/v1/completions", {"prompt": "There was", "n": 2, "temperature": 1.0, "seed": 2, "presence_penalty": 0.5, **full_length}),
        ("/v1/completions", {"prompt": "Once there was a", "num_beams": 3, "n": 2, **full_length}),
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
    simple = [{"prompt": f"Number {number}", "temperature": number % 2, "seed": number, **full_length} for number in range(9)]
    return bodies + [("/v1/completions", body) for body in simple]


async def answer_texts(session: aiohttp.ClientSession, path: str, body: Json) -> dict[int, str]:
    """The text of each choice, followed by its finish reason. Fails on errors."""
    texts: dict[int, str] = {}
    async with session.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        lines = (await response.text()).splitlines()  # with comment lines in between, if recovery takes long
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
    """Returns when /health/ready is 200, or not if `ready` is False; a refused connection counts as not ready."""
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


async def until_generated(session: aiohttp.ClientSession, count: int) -> None:
    """Returns when `count` more tokens have been generated."""
    name = "penstock_generated_tokens_total"
    goal = (await metrics(session))[name] + count
    await until_metrics(session, lambda values: values[name] >= goal, 20)


@pytest.mark.parametrize(("name", "rank", "most_requests"), [("one_rank", 0, None), ("two_ranks", 1, 3)])
def test_streams_continue_with_the_same_tokens_after_a_shard_is_killed_or_stopped(
    name: str, rank: int, most_requests: int | None, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(name)
    bodies = requests()[:most_requests]

    async def answers(session: aiohttp.ClientSession) -> list[dict[int, str]]:
        return list(await asyncio.gather(*(answer_texts(session, path, body) for path, body in bodies)))

    async def work(session: aiohttp.ClientSession) -> None:
        expected = await answers(session)
        assert len(expected[2]) == 2
        for restarts, number in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
            again = asyncio.create_task(answers(session))
            await until_generated(session, 10 * len(bodies) * restarts)
            os.kill(server.child(f'"rank":{rank},'), number)
            await until_ready(session, ready=False)
            assert (await status(session, "/health"), await status(session, "/health/live")) == (200, 200)
            waiting = asyncio.create_task(answer_texts(session, *bodies[0]))
            assert await again == expected
            assert await waiting == expected[0]
            values = await metrics(session)
            assert values["penstock_restarts_total"] == restarts
            assert values["penstock_replayed_requests_total"] > 2
            await until_metrics(session, is_idle, 2)
        assert values["penstock_recovery_seconds_count"] == 2
        assert values["penstock_restored_tokens_total"] > 100

    with_session(server, work)
    assert f"penstock: shard {rank} was killed by SIGKILL" in server.log
    assert "penstock: the router has lost the shards: shard rank 0 has not answered for" in server.log
    assert server.log.count("penstock: ready again after") == 2
    assert "ERROR router" not in server.log


def test_killed_router_is_restarted_and_reconnects_to_the_same_shards(one_rank: Server) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        expected = await answer_texts(session, *requests()[0])
        shard, router = one_rank.child("penstock.shard"), one_rank.child("router.json")
        broken = [asyncio.create_task(answer_texts(session, path, body)) for path, body in requests()]
        await until_metrics(session, lambda values: values["penstock_running"] > 5, 10)
        os.kill(router, signal.SIGKILL)
        began = time.monotonic()
        for failure in await asyncio.gather(*broken, return_exceptions=True):
            assert isinstance(failure, aiohttp.ClientError)
        await until_ready(session)
        assert time.monotonic() - began < 10
        assert one_rank.child("penstock.shard") == shard
        assert one_rank.child("router.json") != router
        await until_metrics(session, is_idle, 5)
        assert await answer_texts(session, *requests()[0]) == expected

    with_session(one_rank, work)


def test_request_that_kills_the_shard_each_time_fails_alone(one_rank: Server) -> None:
    others = requests()[-2:]
    deadly = {"prompt": "x", "max_tokens": POISON_MAX_TOKENS, "ignore_eos": True}

    async def work(session: aiohttp.ClientSession) -> None:
        expected = [await answer_texts(session, path, body) for path, body in others]
        before = (await metrics(session))["penstock_restarts_total"]
        failing = asyncio.create_task(post(session, "/v1/completions", deadly))
        await until_ready(session, ready=False)
        found = asyncio.gather(*(answer_texts(session, path, body) for path, body in others))
        with pytest.raises(AssertionError, match="again and again"):
            await failing
        assert await found == expected
        restarts = (await metrics(session))["penstock_restarts_total"] - before
        assert 2 <= restarts <= 3  # 3 if others ran with it at the second death, and so were suspected too
        await until_metrics(session, is_idle, 2)

    with_session(one_rank, work)


def test_sigterm_during_recovery_ends_all_processes(one_rank: Server) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
        running = asyncio.create_task(post(session, "/v1/completions", body))
        await until_metrics(session, lambda values: values["penstock_running"] > 0, 10)
        os.kill(one_rank.child("penstock.shard"), signal.SIGKILL)
        await until_ready(session, ready=False)
        one_rank.process.send_signal(signal.SIGTERM)
        with pytest.raises(AssertionError, match="shuts down"):
            await running

    with_session(one_rank, work)
    one_rank.check_end(0)


def test_sigkilled_launcher_leaves_no_restarted_process(two_ranks: Server) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        os.kill(two_ranks.child('"rank":0'), signal.SIGKILL)
        await until_ready(session, ready=False)
        os.kill(two_ranks.child("router.json"), signal.SIGKILL)
        while len(two_ranks.children()) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    with_session(two_ranks, work)
    two_ranks.process.kill()
    two_ranks.process.wait()
    two_ranks.wait_until_no_children(5)
