"""More clients than a server accepts, and clients that neither send nor read. Real processes, with small numbers.

10,000 connections: benchmarks/overload.py.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from penstock.bench.local_server import HOST, LocalServer
from penstock.benchmarks.overload import MIB, gather, raised
from penstock.tests.router.test_stream import post
from penstock.tests.serving import scratch

IDLE_TIMEOUT, SLOW_CLIENT_TIMEOUT = (
    6.0,
    1.0,
)  # seconds; opening all connections takes more than two on a busy machine, and none may be closed meanwhile
CONCURRENT, CONNECTIONS = 128, 1000
MOST_GROWTH = 60 * MIB  # of the router's memory; 14 MiB are usual
TIMEOUTS = ("--idle-timeout", str(IDLE_TIMEOUT), "--slow-client-timeout", str(SLOW_CLIENT_TIMEOUT))


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    flags = ("demo-draft", "--device", "cpu", "--threads", "1", "--page-size", "4", "--kv-pages", "4096", *TIMEOUTS)
    with scratch() as folder, LocalServer([*flags, "--max-concurrent-requests", str(CONCURRENT)], folder / "log") as server:
        yield server
        assert server.stop() == 0


def metric(text: str, name: str) -> float:
    [line] = [line for line in text.splitlines() if line.startswith(name + " ")]
    return float(line.split()[1])


async def get(server: LocalServer, path: str) -> str:
    reader, writer = await asyncio.open_connection(HOST, server.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    return answer


def test_client_that_does_not_read_loses_its_stream_after_the_timeout(server: LocalServer) -> None:
    async def test() -> None:
        chat = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "ignore_eos": True, "stream": True}
        reader, writer = await post(server.port, "/v1/chat/completions", {**chat, "max_tokens": 900, "logprobs": True})
        await reader.readuntil(b"\r\n\r\n")  # reads the headers, and nothing more
        began = time.monotonic()
        while metric(metrics_text := await get(server, "/metrics"), "penstock_slow_clients") == 0:
            assert time.monotonic() < began + 30
            await asyncio.sleep(0.1)
        assert time.monotonic() - began >= SLOW_CLIENT_TIMEOUT
        with pytest.raises((ConnectionError, AssertionError)):
            assert (await reader.read()).endswith(b"0\r\n\r\n")
        writer.close()
        for name in ("penstock_running", "penstock_waiting", "penstock_pages_held"):
            while metric(metrics_text, name):  # pages are freed with the shard's next reply
                assert time.monotonic() < began + 30, name
                metrics_text = await get(server, "/metrics")

    asyncio.run(test())
    assert server.log.read_text().count("its stream is closed") == 1


def test_connection_without_a_complete_request_is_closed_after_the_idle_timeout(server: LocalServer) -> None:
    async def connect_and_wait(sent: bytes) -> None:
        reader, writer = await asyncio.open_connection(HOST, server.port)
        began = time.monotonic()

        async def trickle() -> None:  # a header that never ends
            while sent:
                await asyncio.sleep(IDLE_TIMEOUT / 4)
                writer.write(b"a")

        writer.write(sent)
        trickling = asyncio.create_task(trickle())
        answer = b""
        async with asyncio.timeout(20):
            with suppress(ConnectionResetError):  # the server may receive a byte after it has closed
                while received := await reader.read(1000):
                    answer += received
        trickling.cancel()
        writer.close()
        assert IDLE_TIMEOUT - 0.1 <= time.monotonic() - began < IDLE_TIMEOUT + 8
        assert answer.count(b"HTTP/1.1 ") == sent.count(b"\r\n\r\n")

    async def test() -> None:
        incomplete_requests = (b"", b"POST /generate HTTP/1.1\r\nHost: x\r\n", b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\nGET /")
        await asyncio.gather(*(connect_and_wait(sent) for sent in incomplete_requests))

    asyncio.run(test())


def test_each_of_a_thousand_connections_gets_200_or_429_within_bounded_memory(
    server: LocalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    connections = raised(CONNECTIONS)
    result = asyncio.run(gather(server, connections, 12))
    assert set(result.answers) == {"200", "429"}, result
    assert result.answers.total() == connections
    assert result.answers["200"] >= CONCURRENT
    assert (result.endless, result.unfinished) == (0, 0)
    with capsys.disabled():
        print(f"\n{connections} connections: the router's memory grew by {result.growth / MIB:.0f} MiB")
    assert result.growth < MOST_GROWTH
    assert json.loads(asyncio.run(get(server, "/health/ready")).partition("\r\n\r\n")[2])["ready"]
