"""Who comes before the router can answer is told so, and nobody is lost when it takes over."""

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


def ask(listening: socket.socket, path: str, method: str = "GET", body: bytes | None = None) -> tuple[int, bytes, str | None]:
    connection = http.client.HTTPConnection(*listening.getsockname(), timeout=10)
    connection.request(method, path, body)
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers["Retry-After"]


@pytest.mark.usefixtures("probes")
def test_probes(listening: socket.socket) -> None:
    status, body, after = ask(listening, "/health")
    assert (status, json.loads(body)["error"], json.loads(body)["stage"], after) == (503, "unhealthy", "starting the router", "1")
    assert json.loads(ask(listening, "/health/ready")[1])["ready"] is False
    assert ask(listening, "/health/live?x=1") == (200, b'{"live": true}', None)
    assert ask(listening, "/", "HEAD") == (503, b"", "1")


@pytest.mark.usefixtures("probes")
def test_a_request_that_came_too_soon(listening: socket.socket) -> None:
    """Its body is more than is read of it, and the answer comes all the same."""
    assert ask(listening, "/generate", "POST", b"x" * 100_000)[0] == 503


@pytest.mark.usefixtures("probes")
def test_who_is_still_sending_gets_the_answer(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is closed while something is unread is reset, and what was on its way is lost."""
    monkeypatch.setattr(module, "PATIENCE", 10.0)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.settimeout(10)
        client.connect(listening.getsockname())
        client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 10_000_000)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100).startswith(b"HTTP/1.1 503 ")


def test_who_has_said_all_is_answered_however_late(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time may be over since this thread had none: reading modules keeps the interpreter to itself."""
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    with socket.create_connection(listening.getsockname(), 10) as client:
        client.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        probes = StartupProbes(listening)
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
        probes.relieve()


@pytest.mark.usefixtures("probes")
def test_those_who_say_nothing_or_nonsense_hold_nobody_up(listening: socket.socket) -> None:
    silent = [socket.create_connection(listening.getsockname()) for _ in range(3)]
    silent[0].sendall(b"\0\xff\r\n\r\n")
    silent[1].close()
    assert ask(listening, "/health/live")[0] == 200
    for one in silent:
        one.close()


@pytest.mark.parametrize("head", [b"GET /health HTTP/1.1\r\nHost: x", b"POST / HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_who_trickles_holds_nobody_up(listening: socket.socket, probes: StartupProbes, head: bytes) -> None:
    over = threading.Event()

    def trickle() -> None:
        with socket.create_connection(listening.getsockname()) as slow, suppress(OSError):
            slow.sendall(head)
            while not over.wait(0.02):
                slow.sendall(b"x")

    trickling = threading.Thread(target=trickle)
    trickling.start()
    try:
        time.sleep(0.1)
        assert ask(listening, "/health/live")[0] == 200
        over_soon = threading.Thread(target=probes.relieve)
        over_soon.start()
        over_soon.join(10)
        assert not over_soon.is_alive()
    finally:
        over.set()
        trickling.join()


def test_who_comes_after_it_was_relieved_waits_for_the_next(listening: socket.socket, probes: StartupProbes) -> None:
    probes.relieve()
    probes.relieve()
    with socket.create_connection(listening.getsockname()) as visitor:
        taken, _ = listening.accept()
        taken.sendall(b"x")
        taken.close()
        assert visitor.recv(10) == b"x"


def test_it_is_there_before_anything_heavy() -> None:
    heavy = {"aiohttp", "grpc", "tokenizers", "jinja2", "llguidance"}
    code = f"import sys, penstock.router.__main__; print(*{heavy} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
