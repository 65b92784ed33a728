"""The router as a process: when it listens, how it ends, what it writes."""

import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.proto.settings import dump
from penstock.router.__main__ import listen, raise_limit
from penstock.router.config import RouterConfig

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|ERROR) router: .+")


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., str]:
    """Settings of a router with a byte tokenizer, whose shards never come."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    def make(**changes: Any) -> str:
        values = {
            "folder": str(tmp_path),
            "model": "fake",
            "groups": ((str(tmp_path / "socket"),),),
            "hostname": "127.0.0.1",
            "port": port,
        }
        return dump(RouterConfig(**{**values, **changes}))

    return make


@contextmanager
def router(argument: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "penstock.router", argument]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def health(argument: str, patience: float = 10.0, anybody: bool = False, host: str = "127.0.0.1") -> tuple[int, bytes]:
    """Status and body of /health, as soon as the router itself listens; or anybody."""
    end = time.monotonic() + patience
    while True:
        connection = http.client.HTTPConnection(host, json.loads(argument)["port"], timeout=5)
        try:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            body = answer.read()
            if anybody or b"starting the router" not in body:
                return answer.status, body
        except ConnectionRefusedError:
            pass
        finally:
            connection.close()
        assert time.monotonic() < end, "nobody listens"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_listens_before_its_shards_do_and_stops_when_told(settings: Callable[..., str], number: int) -> None:
    argument = settings()
    with router(argument) as process:
        status, body = health(argument)
        assert status == 503
        assert b"waiting for the shards" in body
        process.send_signal(number)
        output, _ = process.communicate(timeout=10)
    assert process.returncode == 0, output
    assert all(LINE.fullmatch(line) for line in output.splitlines()), output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_answers_before_it_is_there_and_stops_when_told(settings: Callable[..., str], number: int) -> None:
    argument = settings()
    with router(argument) as process:
        status, body = health(argument, anybody=True)
        process.send_signal(number)
        output, _ = process.communicate(timeout=10)
    assert (status, json.loads(body)["stage"]) == (503, "starting the router")
    assert process.returncode == 0, output


def test_a_signal_within_a_callback_of_the_garbage_collector_is_not_lost(settings: Callable[..., str]) -> None:
    """As imports have them, while most starts are told to stop; Python ignores exceptions there."""
    script = (
        "import os, signal, sys, time, weakref\n"
        "from penstock.router import __main__ as router\n"
        "def stop(_):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(0.1)\n"
        "def listen(config):\n"
        "    lost = set()\n"
        "    watch = weakref.ref(lost, stop)\n"
        "    del lost\n"
        "    time.sleep(60)\n"
        "router.listen = listen\n"
        "sys.exit(router.main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, settings()], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(("requests", "told"), [(100, False), (201, True)])
def test_too_few_open_files_are_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, requests: int, told: bool
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 300))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: None)
    raise_limit(requests)
    assert ("201 requests in flight need as many open files, and 300 are allowed here" in caplog.text) == told


def test_log_lines_can_be_json(settings: Callable[..., str]) -> None:
    argument = settings(json_output=True)
    with router(argument) as process:
        health(argument)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=10)
    lines = [json.loads(line) for line in output.splitlines()]
    assert lines[0]["message"].startswith("listening on http://127.0.0.1:")
    assert {line["name"] for line in lines} == {"router"}


def test_an_address_of_ipv6_is_told_as_urls_have_it(settings: Callable[..., str]) -> None:
    argument = settings(hostname="::1")
    with router(argument) as process:
        health(argument, host="::1")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=10)
    assert f"listening on http://[::1]:{json.loads(argument)['port']}\n" in output


def test_a_port_in_use_is_one_line_with_the_remedy(settings: Callable[..., str]) -> None:
    argument = settings()
    with socket.create_server(("127.0.0.1", json.loads(argument)["port"])), router(argument) as process:
        output, _ = process.communicate(timeout=10)
    assert process.returncode == 2
    assert LINE.fullmatch(output.strip())
    assert "is in use: stop who uses it, or choose another with --port" in output


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [('{"folderr": "."}', "RouterConfig has no setting folderr"), ("@nowhere", "nowhere"), ("{", "cannot be read")],
)
def test_settings_that_cannot_be_read_are_one_line(argument: str, complaint: str) -> None:
    with router(argument) as process:
        output, _ = process.communicate(timeout=10)
    assert process.returncode == 2
    assert complaint in output
    assert len(output.splitlines()) == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel of Linux does it")
def test_it_dies_with_its_parent(settings: Callable[..., str]) -> None:
    argument = settings()
    start = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", start, sys.executable, "-m", "penstock.router", argument]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        health(argument)
        parent.kill()
    end = time.monotonic() + 5
    while _alive(child):
        assert time.monotonic() < end, "it has survived its parent"
        time.sleep(0.02)


def _alive(process: int) -> bool:
    """A zombie, whom nobody has waited for yet, is dead."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z" and os.getpid() != process


@pytest.mark.parametrize(("hostname", "reached"), [("::", ["127.0.0.1", "::1"]), ("::1", ["::1"]), ("127.0.0.1", ["127.0.0.1"])])
def test_who_listens_everywhere_does_so_for_both_versions_of_ip(hostname: str, reached: list[str]) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("there is no IPv6")
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    with listen(RouterConfig(folder="", model="m", hostname=hostname, port=port)):
        answers = []
        for address in ("127.0.0.1", "::1"):
            try:
                socket.create_connection((address, port), timeout=5).close()
                answers.append(address)
            except ConnectionRefusedError:
                pass
    assert answers == reached
