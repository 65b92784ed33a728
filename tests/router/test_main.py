"""The router as a process: when it listens, how it ends, and its log and error lines."""

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
from penstock.router import process
from penstock.router.__main__ import listen, raise_limit
from penstock.router.config import RouterConfig
from penstock.router.shards import GrpcShards

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|ERROR) router: .+")


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., str]:
    """Settings of a router with a byte tokenizer, whose shards never start."""
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


def health(argument: str, patience: float = 10.0, any_answer: bool = False, host: str = "127.0.0.1") -> tuple[int, bytes]:
    """Status and body of /health as soon as the router itself answers; with `any_answer`, as soon as there is any answer."""
    end = time.monotonic() + patience
    while True:
        connection = http.client.HTTPConnection(host, json.loads(argument)["port"], timeout=5)
        try:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            body = answer.read()
            if any_answer or b"starting the router" not in body:
                return answer.status, body
        except ConnectionRefusedError:
            pass
        finally:
            connection.close()
        assert time.monotonic() < end, "nobody listens"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_router_answers_503_before_its_shards_start_and_stops_on_a_signal(settings: Callable[..., str], number: int) -> None:
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
def test_startup_probe_answers_503_and_a_signal_during_the_start_stops_the_router(
    settings: Callable[..., str], number: int
) -> None:
    argument = settings()
    with router(argument) as process:
        status, body = health(argument, any_answer=True)
        process.send_signal(number)
        output, _ = process.communicate(timeout=10)
    assert (status, json.loads(body)["stage"]) == (503, "starting the router")
    assert process.returncode == 0, output


def test_signal_within_a_garbage_collector_callback_is_not_lost(settings: Callable[..., str]) -> None:
    """Imports cause such callbacks, and most starts are stopped during imports; Python ignores exceptions there."""
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


@pytest.mark.parametrize(("requests", "logged"), [(100, False), (201, True)])
def test_too_low_limit_on_open_files_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, requests: int, logged: bool
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 300))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: None)
    raise_limit(requests)
    assert ("201 requests in flight need as many open files, and 300 are allowed here" in caplog.text) == logged


def test_log_lines_are_json_with_json_output(settings: Callable[..., str]) -> None:
    argument = settings(json_output=True)
    with router(argument) as process:
        health(argument)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=10)
    lines = [json.loads(line) for line in output.splitlines()]
    assert lines[0]["message"].startswith("listening on http://127.0.0.1:")
    assert {line["name"] for line in lines} == {"router"}


def test_ipv6_address_is_logged_in_brackets_as_in_urls(settings: Callable[..., str]) -> None:
    argument = settings(hostname="::1")
    with router(argument) as process:
        health(argument, host="::1")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=10)
    assert f"listening on http://[::1]:{json.loads(argument)['port']}\n" in output


def test_port_in_use_exits_with_code_2_and_one_line_with_the_remedy(settings: Callable[..., str]) -> None:
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
def test_unreadable_settings_exit_with_code_2_and_one_line(argument: str, complaint: str) -> None:
    with router(argument) as process:
        output, _ = process.communicate(timeout=10)
    assert process.returncode == 2
    assert complaint in output
    assert len(output.splitlines()) == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel of Linux does it")
def test_router_dies_with_its_parent_process(settings: Callable[..., str]) -> None:
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
    """Whether a process runs. A zombie, for which no process has waited yet, counts as dead."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z" and os.getpid() != process


@pytest.mark.parametrize(("hostname", "reached"), [("::", ["127.0.0.1", "::1"]), ("::1", ["::1"]), ("127.0.0.1", ["127.0.0.1"])])
def test_wildcard_ipv6_address_accepts_ipv4_and_ipv6_connections(hostname: str, reached: list[str]) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("there is no IPv6")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with listen(RouterConfig(folder="", model="m", hostname=hostname, port=port)):
        answers = []
        for address in ("127.0.0.1", "::1"):
            try:
                socket.create_connection((address, port), timeout=5).close()
                answers.append(address)
            except ConnectionRefusedError:
                pass
    assert answers == reached


def test_hang_reports_name_a_group_as_the_launcher_does_also_after_it_joined_again(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    config = RouterConfig(folder="", model="m", groups=(("unix:/a",), ("unix:/b",)), hang_reports=str(tmp_path / "pipe"))
    with os.fdopen(os.open(tmp_path / "pipe", os.O_RDWR), encoding="utf-8") as pipe:
        for name, address in (("again", "unix:/b"), ("1", "unix:/elsewhere"), ("0", "unix:/a")):
            shards = process._connect(config, name, (address,))
            assert isinstance(shards, GrpcShards)
            shards._hung(0, 2.0)
        assert [pipe.readline().split(" ")[0] for _ in range(2)] == ["1", "0"]  # the launcher has not started the one elsewhere
