"""`StartupProbes`: clients that connect before the router can answer get a 503, slow and silent ones delay no other, and later
connections are left to the router."""

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from penstock.router import startup_probes as module
from penstock.router.startup_probes import StartupProbes


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def probes(listening: socket.socket) -> Iterator[StartupProbes]:
    found = StartupProbes(listening)
    yield found
    found.relieve()


def request(listening: socket.socket, path: str, method: str = "GET", body: bytes | None = None) -> tuple[int, bytes, str | None]:
    connection = http.client.HTTPConnection(*listening.getsockname(), timeout=10)
    connection.request(method, path, body)
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers["Retry-After"]


@pytest.mark.usefixtures("probes")
def test_health_and_other_paths_are_answered_during_the_start(listening: socket.socket) -> None:
    status, body, after = request(listening, "/health")
    assert (status, after) == (503, "1")
    stage = {"stage": "starting the router", "progress": None}
    assert json.loads(body) == {"error": "unhealthy", "error_type": "healthcheck", **stage}  # TGI's, and where the start stands
    assert json.loads(request(listening, "/health/ready")[1])["ready"] is False
    assert request(listening, "/health/live?x=1") == (200, b'{"live": true}', None)
    assert request(listening, "/", "HEAD") == (503, b"", "1")


@pytest.mark.usefixtures("probes")
def test_request_with_a_large_body_gets_a_503_during_the_start(listening: socket.socket) -> None:
    """Even if its body is longer than what is read of it."""
    assert request(listening, "/generate", "POST", b"x" * 100_000)[0] == 503


@pytest.mark.usefixtures("probes")
def test_client_that_is_still_sending_its_body_gets_the_503(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is closed with unread data is reset, and a response in transit would be lost."""
    monkeypatch.setattr(module, "PATIENCE", 10.0)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.settimeout(10)
        client.connect(listening.getsockname())
        client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 10_000_000)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100).startswith(b"HTTP/1.1 503 ")


def test_complete_request_is_answered_after_its_time_limit(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time may be over because this thread could not run: importing modules blocks the interpreter."""
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    with socket.create_connection(listening.getsockname(), 10) as client:
        client.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        probes = StartupProbes(listening)
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
        probes.relieve()


@pytest.mark.usefixtures("probes")
def test_silent_and_malformed_connections_do_not_block_others(listening: socket.socket) -> None:
    silent = [socket.create_connection(listening.getsockname()) for _ in range(3)]
    silent[0].sendall(b"\0\xff\r\n\r\n")
    silent[1].close()
    assert request(listening, "/health/live")[0] == 200
    for one in silent:
        one.close()


@pytest.mark.parametrize("head", [b"GET /health HTTP/1.1\r\nHost: x", b"POST / HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_client_that_sends_bytes_slowly_blocks_neither_others_nor_relieve(
    listening: socket.socket, probes: StartupProbes, head: bytes
) -> None:
    over = threading.Event()

    def send_slowly() -> None:
        with socket.create_connection(listening.getsockname()) as slow, suppress(OSError):
            slow.sendall(head)
            while not over.wait(0.02):
                slow.sendall(b"x")

    sender = threading.Thread(target=send_slowly)
    sender.start()
    try:
        time.sleep(0.1)
        assert request(listening, "/health/live")[0] == 200
        relieving = threading.Thread(target=probes.relieve)
        relieving.start()
        relieving.join(10)
        assert not relieving.is_alive()
    finally:
        over.set()
        sender.join()


def test_connections_after_relieve_are_left_to_the_next_server(listening: socket.socket, probes: StartupProbes) -> None:
    probes.relieve()
    probes.relieve()
    with socket.create_connection(listening.getsockname()) as visitor:
        accepted, _ = listening.accept()
        accepted.sendall(b"x")
        accepted.close()
        assert visitor.recv(10) == b"x"


def test_router_module_imports_no_heavy_dependency() -> None:
    heavy = {"aiohttp", "grpc", "tokenizers", "jinja2", "llguidance"}
    code = f"import sys, penstock.router.__main__; print(*{heavy} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
