"""Starting, watching and stopping, with stand-ins for the router and the shards."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.launcher import machine
from penstock.launcher.restarts import LONGEST_DELAY, WINDOW, Restarts
from penstock.launcher.watching import ECHO
from penstock.tests.launcher.reading import Reading

HARNESS = str(Path(__file__).with_name("harness.py"))


class Launcher(Reading):
    """The launcher's harness."""

    def __init__(self, *behaviours: str, grace: float = 5, restarts: int = 0, pipe: str = "", replicas: bool = False) -> None:
        port = machine.free_port()
        super().__init__(
            [sys.executable, HARNESS, str(port), str(grace), str(restarts), pipe, "1" if replicas else "", *behaviours]
        )

    def pids(self, name: str = "") -> list[int]:
        return [int(line.rpartition(" ")[2]) for line in self.lines if f"{name} has pid" in line]

    def up(self, count: int) -> None:
        """Reads on until it is ready and so many processes have said who they are: of a shard that may come later."""
        self.until("^penstock: ready$")
        while len(self.pids()) < count:
            self.until("has pid")

    def position(self, pattern: str) -> int:
        found = [number for number, line in enumerate(self.lines) if re.search(pattern, line)]
        assert len(found) == 1, (pattern, self.lines)
        return found[0]


@pytest.fixture
def launch() -> Iterator[Callable[..., Launcher]]:
    started: list[Launcher] = []

    def start(*behaviours: str, **settings: Any) -> Launcher:
        started.append(Launcher(*behaviours, **settings))
        return started[-1]

    yield start
    for launcher in started:
        launcher.process.kill()
        launcher.process.wait()
        assert launcher.process.stdout is not None
        launcher.process.stdout.close()


def lives(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter while it is being read
        return False
    # one that has ended, and whose parent has not looked yet, is still listed
    return status.rpartition(")")[2].split()[0] != "Z"


def gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(lives(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT])
def test_it_serves_until_it_is_asked_to_stop(launch: Callable[..., Launcher], number: int) -> None:
    launcher = launch("serves+drains", "runs", "runs")
    launcher.up(3)
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


def test_a_shard_that_is_lost_while_the_router_drains_is_named_and_its_group_ends(launch: Callable[..., Launcher]) -> None:
    launcher = launch("serves+stubborn", "runs", "runs", grace=60)
    launcher.up(3)
    shards = launcher.pids("shard-0") + launcher.pids("shard-1")
    launcher.process.send_signal(signal.SIGTERM)
    launcher.until("router was asked to stop")
    os.kill(shards[1], signal.SIGKILL)
    launcher.until("^penstock: shard 1 was killed by SIGKILL")
    assert gone(shards, 5)
    os.kill(launcher.pids("router")[0], signal.SIGKILL)  # which ends the drain
    assert launcher.end() == 0
    assert not any("shard 0 was killed" in line for line in launcher.lines)  # that was us


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


def test_before_it_was_ready_no_stream_is_promised_anything(launch: Callable[..., Launcher]) -> None:
    launcher = launch("runs", "runs")
    launcher.until("shard-0 has pid")
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.end() == 0
    assert "penstock: SIGINT: it ends before it was ready; once more stops at once" in launcher.lines


def test_a_second_signal_stops_at_once(launch: Callable[..., Launcher]) -> None:
    launcher = launch("serves+stubborn", "runs", grace=60)
    launcher.until("^penstock: ready$")
    launcher.process.send_signal(signal.SIGINT)
    launcher.until("router was asked to stop")
    launcher.process.send_signal(signal.SIGINT)  # at once: what a wrapper passes on, not impatience
    time.sleep(ECHO + 0.1)
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
    assert sorted(launcher.lines[told + 1 :]) == expected_words  # and nothing below; stdout and stderr come through two pipes


def test_shards_that_are_given_up_are_gone_before_the_router_is_asked_to_stop(launch: Callable[..., Launcher]) -> None:
    """It would wait for those that wait for the lost one, and its streams would end untold."""
    launcher = launch("serves+stubborn", "runs", "runs", grace=60)
    launcher.up(3)
    shards = launcher.pids("shard-0") + launcher.pids("shard-1")
    os.kill(shards[1], signal.SIGKILL)
    launcher.until("router was asked to stop")
    assert gone(shards, 0)
    assert launcher.end() == 1


def test_a_killed_router_ends_everything(launch: Callable[..., Launcher]) -> None:
    launcher = launch("serves", "runs")
    launcher.until("^penstock: ready$")
    [router] = [int(line.rpartition(" ")[2]) for line in launcher.lines if line.startswith("[router] router has pid")]
    os.kill(router, signal.SIGKILL)
    assert launcher.end() == 1
    assert gone(launcher.pids(), 0)
    assert any(line.startswith("penstock: router was killed by SIGKILL") for line in launcher.lines)


def test_killed_shards_are_started_again_and_the_router_stays(launch: Callable[..., Launcher]) -> None:
    launcher = launch("serves", "runs", "runs", restarts=2)
    launcher.up(3)
    for restart in (1, 2):
        os.kill(launcher.pids("shard-1")[-1], signal.SIGKILL)
        launcher.until(f"^penstock: starting the shards again now: restart {restart} of at most 2 within 10 minutes$")
        launcher.until("^penstock: ready again after")
        while min(len(launcher.pids(name)) for name in ("shard-0", "shard-1")) <= restart:
            launcher.until("has pid")  # on a busy machine these lines come late
    assert [len(launcher.pids(name)) for name in ("router", "shard-0", "shard-1")] == [1, 3, 3]
    assert gone(launcher.pids("shard-0")[:-1] + launcher.pids("shard-1")[:-1], 0)
    os.kill(launcher.pids("shard-0")[-1], signal.SIGKILL)
    assert launcher.end() == 1
    assert gone(launcher.pids(), 0)
    assert "penstock: the shards died more than 2 times within 10 minutes (--max-restarts): the server ends" in launcher.lines


def test_a_replica_that_dies_is_started_again_alone_and_given_up_alone(launch: Callable[..., Launcher], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    launcher = launch("serves", "runs", "runs", restarts=1, replicas=True, pipe=str(pipe))
    launcher.up(3)
    with pipe.open("w") as complaints:
        complaints.write(f"1 {time.monotonic()} shard rank 0 has not answered for 2 s\n")
        complaints.write(f"7 {time.monotonic()} shard rank 0 has not answered for 2 s\n")  # somebody else's: nobody's business
    launcher.until("^penstock: the router has lost replica 1: shard rank 0 has not answered for 2 s$")
    launcher.until("^penstock: starting replica 1 again now: restart 1 of at most 1 within 10 minutes$")
    launcher.until("^penstock: replica 1 is ready again after")
    while len(launcher.pids("shard-1")) < 2:
        launcher.until("has pid")
    os.kill(launcher.pids("shard-1")[-1], signal.SIGKILL)
    launcher.until("^penstock: replica 1 died more than 1 times within 10 minutes .--max-restarts.: the other replicas go on$")
    os.kill(launcher.pids("shard-0")[-1], signal.SIGKILL)
    launcher.until("^penstock: starting replica 0 again now")
    launcher.until("^penstock: replica 0 is ready again after")
    assert launcher.process.poll() is None
    while len(launcher.pids("shard-0")) < 2:
        launcher.until("has pid")
    os.kill(launcher.pids("shard-0")[-1], signal.SIGKILL)  # the last one
    assert launcher.end() == 1
    assert any("replica 0 died more than 1 times" in line and line.endswith("the server ends") for line in launcher.lines)
    assert gone(launcher.pids(), 0)


def test_a_killed_router_is_started_again_and_the_shards_stay(launch: Callable[..., Launcher]) -> None:
    launcher = launch("serves", "runs", restarts=1)
    launcher.up(2)
    os.kill(launcher.pids("router")[0], signal.SIGKILL)
    launcher.until("^penstock: ready again after")
    assert [len(launcher.pids(name)) for name in ("router", "shard-0")] == [2, 1]
    launcher.process.kill()  # those that were started again are no orphans either
    launcher.end()
    assert gone(launcher.pids(), 5)


def test_a_signal_while_something_is_started_again_ends_everything(launch: Callable[..., Launcher]) -> None:
    launcher = launch("serves+drains", "runs", restarts=3)
    launcher.up(2)
    os.kill(launcher.pids("shard-0")[0], signal.SIGKILL)
    launcher.until("starting the shards again")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == 0
    assert gone(launcher.pids(), 0)


def test_shards_of_which_the_router_complains_are_started_again_but_not_twice(
    launch: Callable[..., Launcher], tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    launcher = launch("serves", "runs", restarts=1, pipe=str(pipe))
    launcher.up(2)
    met = time.monotonic()
    os.kill(launcher.pids("shard-0")[0], signal.SIGSTOP)
    with pipe.open("w") as complaints:
        for _ in range(3):
            complaints.write(f"0 {met} shard rank 0 has not answered for 2 s\n")
    launcher.until("^penstock: the router has lost the shards: shard rank 0 has not answered for 2 s$")
    launcher.until("^penstock: ready again after")
    while len(launcher.pids("shard-0")) < 2:
        launcher.until("has pid")  # on a busy machine that comes late
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == 0
    assert len(launcher.pids("shard-0")) == 2
    assert gone(launcher.pids(), 0)


def test_what_does_not_come_up_is_tried_more_and_more_slowly() -> None:
    restarts = Restarts(12)
    assert [restarts.died(float(now)) for now in range(11)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, *[LONGEST_DELAY] * 4]
    restarts.ready()
    assert restarts.died(20.0) == 0.0
    assert restarts.died(21.0) is None
    assert restarts.died(WINDOW + 5.5) is not None
    assert restarts.count == 12 - 6 + 1
    assert Restarts(0).died(0.0) is None


def test_sigkill_leaves_no_orphan(launch: Callable[..., Launcher]) -> None:
    # the stand-ins do nothing for it themselves
    launcher = launch("serves", "runs", "runs")
    launcher.up(3)
    launcher.process.kill()
    launcher.end()
    assert len(launcher.pids()) == 3
    assert gone(launcher.pids(), 5)


def test_if_the_second_start_fails_the_first_child_is_not_left_behind(launch: Callable[..., Launcher], tmp_path: Path) -> None:
    launcher = launch(f"serves+records+{tmp_path}+{{}}", "absent")
    assert launcher.end() == 1
    assert any("FileNotFoundError" in line for line in launcher.lines), launcher.lines
    assert gone([int(file.name.removeprefix("router")) for file in tmp_path.iterdir()], 1)
