"""Starting, watching and stopping, with stand-ins for the router and the shards."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.launcher import machine, serve
from penstock.launcher.console import Console

HARNESS = str(Path(__file__).with_name("harness.py"))


class Launcher:
    """A harness process, and what it has written so far."""

    def __init__(self, *behaviours: str, grace: float = 5) -> None:
        port = machine.free_port(0)
        self.process = subprocess.Popen(
            [sys.executable, HARNESS, str(port), str(grace), *behaviours],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []

    def until(self, pattern: str) -> str:
        """Reads on to the line that matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if re.search(pattern, line):
                return line
        raise AssertionError(f"no {pattern!r} in {self.lines}")

    def end(self) -> int:
        """Reads the rest and waits. The exit code."""
        assert self.process.stdout is not None
        self.lines += [line.rstrip() for line in self.process.stdout]
        return self.process.wait(timeout=30)

    def pids(self) -> list[int]:
        return [int(line.rpartition(" ")[2]) for line in self.lines if "has pid" in line]

    def position(self, pattern: str) -> int:
        found = [number for number, line in enumerate(self.lines) if re.search(pattern, line)]
        assert len(found) == 1, (pattern, self.lines)
        return found[0]


@pytest.fixture
def launch() -> Iterator[Callable[..., Launcher]]:
    started: list[Launcher] = []

    def start(*behaviours: str, grace: float = 5) -> Launcher:
        started.append(Launcher(*behaviours, grace=grace))
        return started[-1]

    yield start
    for launcher in started:
        launcher.process.kill()
        launcher.process.wait()
        assert launcher.process.stdout is not None
        launcher.process.stdout.close()


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # one that has ended, and whose parent has not looked yet, is still listed
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(lives(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_asked_to_stop(launch: Callable[..., Launcher], number: int) -> None:
    launcher = launch("serves+drains", "runs", "runs")
    launcher.until("^penstock: ready$")
    launcher.process.send_signal(number)
    assert launcher.end() == 0
    assert len(launcher.pids()) == 3
    assert gone(launcher.pids(), 0)
    assert any(line.startswith("[shard 1] shard-1 has pid") for line in launcher.lines)
    # one line per stage, whatever its percentage
    assert [line for line in launcher.lines if "loading" in line] == ["penstock: loading weights 10 %"]
    # the router drains with its shards still there
    stopped = launcher.position(r"^\[router\] router stops")
    for rank in (0, 1):
        assert launcher.position(rf"^\[shard {rank}\] .* was asked to stop") > stopped


def test_nohup_is_respected(launch: Callable[..., Launcher]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited by the launcher
    try:
        launcher = launch("serves", "runs")
    finally:
        signal.signal(signal.SIGHUP, before)
    launcher.until("^penstock: ready$")
    launcher.process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == 0
    assert any(line.startswith("penstock: SIGTERM") for line in launcher.lines)
    assert not any("SIGHUP" in line for line in launcher.lines)


def test_a_second_signal_stops_at_once(launch: Callable[..., Launcher]) -> None:
    launcher = launch("serves+stubborn", "runs", grace=60)
    launcher.until("^penstock: ready$")
    launcher.process.send_signal(signal.SIGINT)
    launcher.until("router was asked to stop")
    launcher.process.send_signal(signal.SIGINT)  # at once: what a wrapper passes on, not impatience
    time.sleep(serve.ECHO + 0.1)
    assert launcher.process.poll() is None
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.end() == 1
    assert gone(launcher.pids(), 0)
    assert any("stopped at once" in line for line in launcher.lines)


def test_what_does_not_stop_in_time_is_killed(launch: Callable[..., Launcher]) -> None:
    launcher = launch("serves+stubborn", "runs", grace=0)
    launcher.until("^penstock: ready$")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == 1
    assert gone(launcher.pids(), 0)
    assert "penstock: router did not stop within 1 s: killed" in launcher.lines


@pytest.mark.parametrize(("code", "expected"), [(3, 1), (2, 2)])
def test_a_failed_shard_ends_everything(launch: Callable[..., Launcher], code: int, expected: int) -> None:
    launcher = launch("serves", "runs", f"fails+{code}")
    assert launcher.end() == expected
    assert gone(launcher.pids(), 0)
    told = launcher.position(rf"^penstock: shard 1 ended with exit code {code}, its last words:$")
    expected_words = [
        "    2026-11-21T00:00:00Z ERROR shard 1: in its log",
        "    Traceback of a fault",
        "    ValueError: what went wrong",
    ]
    assert sorted(launcher.lines[told + 1 : told + 4]) == expected_words  # stdout and stderr come through two pipes


def test_a_killed_router_ends_everything(launch: Callable[..., Launcher]) -> None:
    launcher = launch("serves", "runs")
    launcher.until("^penstock: ready$")
    [router] = [int(line.rpartition(" ")[2]) for line in launcher.lines if line.startswith("[router] router has pid")]
    os.kill(router, signal.SIGKILL)
    assert launcher.end() == 1
    assert gone(launcher.pids(), 0)
    assert any(line.startswith("penstock: router was killed by SIGKILL") for line in launcher.lines)


def test_sigkill_leaves_no_orphan(launch: Callable[..., Launcher]) -> None:
    # the stand-ins do nothing for it themselves
    launcher = launch("serves", "runs", "runs")
    launcher.until("^penstock: ready$")
    launcher.process.kill()
    launcher.end()
    assert len(launcher.pids()) == 3
    assert gone(launcher.pids(), 5)


# its pipes are left to the garbage collector: nobody reads them any more
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_if_the_second_start_fails_the_first_child_is_not_left_behind(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    first = serve.Command("router", ["/bin/sh", "-c", f"echo $$ > {pid_file}; exec sleep 60"])
    server = serve.Server(
        router=first,
        shards=[serve.Command("shard 0", [str(tmp_path / "nothing")])],
        environment=dict(os.environ),
        console=Console(json_output=False),
        health=("127.0.0.1", 9),
        ready=lambda: None,
        grace=0,
    )
    with pytest.raises(FileNotFoundError):
        server.run()
    assert not pid_file.exists() or not pid_file.read_text() or gone([int(pid_file.read_text())], 1)
