"""More clients than a server takes, and clients that neither send nor read. Real processes; sizes are those of a test.

10,000 connections: benchmarks/overload.py.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from penstock.bench.local import HOST, Local
from penstock.benchmarks.overload import MIB, gather, raised
from penstock.tests.router.test_stream import post
from penstock.tests.serving import scratch

IDLE, SLOW = 6.0, 1.0  # seconds; a crowd that gathers takes longer than two on a busy machine, and nobody may be cut meanwhile
LIMIT, CONNECTIONS = 128, 1000
GROWTH = 60 * MIB  # of the router; 14 are usual
TIMEOUTS = ("--idle-timeout", str(IDLE), "--slow-client-timeout", str(SLOW))


@pytest.fixture(scope="module")
def server() -> Iterator[Local]:
    flags = ("demo-draft", "--device", "cpu", "--threads", "1", "--page-size", "4", "--kv-pages", "4096", *TIMEOUTS)
    with scratch() as folder, Local([*flags, "--max-concurrent-requests", str(LIMIT)], folder / "log") as server:
        yield server
        assert server.stop() == 0


def metric(text: str, name: str) -> float:
    [line] = [line for line in text.splitlines() if line.startswith(name + " ")]
    return float(line.split()[1])


async def get(server: Local, path: str) -> str:
    reader, writer = await asyncio.open_connection(HOST, server.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    return answer


def test_a_client_that_does_not_read_loses_its_stream(server: Local) -> None:
    async def test() -> None:
        chat = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "ignore_eos": True, "stream": True}
        reader, writer = await post(server.port, "/v1/chat/completions", {**chat, "max_tokens": 900, "logprobs": True})
        await reader.readuntil(b"\r\n\r\n")  # and nothing more
        began = time.monotonic()
        while metric(seen := await get(server, "/metrics"), "penstock_slow_clients") == 0:
            assert time.monotonic() < began + 30
            await asyncio.sleep(0.1)
        assert time.monotonic() - began >= SLOW
        with pytest.raises((ConnectionError, AssertionError)):
            assert (await reader.read()).endswith(b"0\r\n\r\n")
        writer.close()
        for name in ("penstock_running", "penstock_waiting", "penstock_pages_held"):
            while metric(seen, name):  # pages come back with the shard's next answer
                assert time.monotonic() < began + 30, name
                seen = await get(server, "/metrics")

    asyncio.run(test())
    assert server.log.read_text().count("its stream is closed") == 1


def test_a_connection_without_a_whole_request_is_closed(server: Local) -> None:
    async def visit(sent: bytes) -> None:
        reader, writer = await asyncio.open_connection(HOST, server.port)
        began = time.monotonic()

        async def trickle() -> None:  # a header that never ends
            while sent:
                await asyncio.sleep(IDLE / 4)
                writer.write(b"a")

        writer.write(sent)
        trickling = asyncio.create_task(trickle())
        answer = b""
        async with asyncio.timeout(20):
            with suppress(ConnectionResetError):  # a byte may come when nobody reads it any more
                while part := await reader.read(1000):
                    answer += part
        trickling.cancel()
        writer.close()
        assert IDLE - 0.1 <= time.monotonic() - began < IDLE + 8
        assert answer.count(b"HTTP/1.1 ") == sent.count(b"\r\n\r\n")

    async def test() -> None:
        begun = (b"", b"POST /generate HTTP/1.1\r\nHost: x\r\n", b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\nGET /")
        await asyncio.gather(*(visit(sent) for sent in begun))

    asyncio.run(test())


def test_everybody_is_answered_though_most_are_too_many(server: Local, capsys: pytest.CaptureFixture[str]) -> None:
    connections = raised(CONNECTIONS)
    crowd = asyncio.run(gather(server, connections, 12))
    assert set(crowd.answers) == {"200", "429"}, crowd
    assert crowd.answers.total() == connections
    assert crowd.answers["200"] >= LIMIT
    assert (crowd.endless, crowd.unfinished) == (0, 0)
    with capsys.disabled():
        print(f"\n{connections} connections: the router's memory grew by {crowd.growth / MIB:.0f} MiB")
    assert crowd.growth < GROWTH
    assert json.loads(asyncio.run(get(server, "/health/ready")).partition("\r\n\r\n")[2])["ready"]
