"""The supervisor in a process of its own (`run_supervisor.py`), with fake router and shard processes.

It starts them, restarts those that die, drains on signals, and leaves no process behind.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.launcher import machine, processes
from penstock.launcher.event_sources import ECHO
from penstock.launcher.restarts import LONGEST_DELAY, WINDOW, Restarts
from penstock.tests.launcher.monitored_process import MonitoredProcess

RUN_SUPERVISOR = str(Path(__file__).with_name("run_supervisor.py"))


class Launcher(MonitoredProcess):
    """A supervisor of fake processes, in a process of its own."""

    def __init__(self, *behaviours: str, grace: float = 5, restarts: int = 0, pipe: str = "", replicas: bool = False) -> None:
        port = machine.free_port()
        super().__init__(
            [sys.executable, RUN_SUPERVISOR, str(port), str(grace), str(restarts), pipe, "1" if replicas else "", *behaviours]
        )

    def pids(self, name: str = "") -> list[int]:
        return [int(line.rpartition(" ")[2]) for line in self.lines if f"{name} has pid" in line]

    def read_until_up(self, count: int) -> None:
        """Reads on until the server is ready and `count` processes have logged their pids: a shard may do so later than that."""
        self.read_until("^penstock: ready$")
        while len(self.pids()) < count:
            self.read_until("has pid")

    def line_number(self, pattern: str) -> int:
        matching = [number for number, line in enumerate(self.lines) if re.search(pattern, line)]
        assert len(matching) == 1, (pattern, self.lines)
        return matching[0]


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


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter while it is being read
        return False
    # a zombie, which its parent has not waited for yet, is still listed
    return status.rpartition(")")[2].split()[0] != "Z"


def all_ended(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT])
def test_stop_signal_drains_the_router_before_the_shards_stop(launch: Callable[..., Launcher], number: int) -> None:
    launcher = launch("serves+drains", "runs", "runs")
    launcher.read_until_up(3)
    launcher.process.send_signal(number)
    assert launcher.wait_for_exit() == 0
    assert len(launcher.pids()) == 3
    assert all_ended(launcher.pids(), 0)
    assert any(line.startswith("[shard 1] shard-1 has pid") for line in launcher.lines)
    # one line per loading stage, whatever its percentage
    assert [line for line in launcher.lines if "loading" in line] == ["penstock: loading weights 10 %"]
    # the shards are told to stop only after the router has drained
    router_stopped = launcher.line_number(r"^\[router\] router stops")
    for rank in (0, 1):
        assert launcher.line_number(rf"^\[shard {rank}\] .* was asked to stop") > router_stopped


def test_shard_crash_during_drain_is_logged_and_ends_its_rank_group(launch: Callable[..., Launcher]) -> None:
    launcher = launch("serves+stubborn", "runs", "runs", grace=60)
    launcher.read_until_up(3)
    shards = launcher.pids("shard-0") + launcher.pids("shard-1")
    launcher.process.send_signal(signal.SIGTERM)
    launcher.read_until("router was asked to stop")
    os.kill(shards[1], signal.SIGKILL)
    launcher.read_until("^penstock: shard 1 was killed by SIGKILL")
    assert all_ended(shards, 5)
    os.kill(launcher.pids("router")[0], signal.SIGKILL)  # a dead router ends the drain
    assert launcher.wait_for_exit() == 0
    assert not any("shard 0 was killed" in line for line in launcher.lines)  # the supervisor killed it: no crash is reported


def test_sighup_is_ignored_under_nohup(launch: Callable[..., Launcher]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited by the launcher
    try:
        launcher = launch("serves", "runs")
    finally:
        signal.signal(signal.SIGHUP, before)
    launcher.read_until("^penstock: ready$")
    launcher.process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait_for_exit() == 0
    assert any(line.startswith("penstock: SIGTERM") for line in launcher.lines)
    assert not any("SIGHUP" in line for line in launcher.lines)


def test_signal_before_readiness_is_logged_without_a_drain_timeout(launch: Callable[..., Launcher]) -> None:
    launcher = launch("runs", "runs")
    launcher.read_until("shard-0 has pid")
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait_for_exit() == 0
    assert "penstock: SIGINT: it ends before it was ready; once more stops at once" in launcher.lines


def test_second_signal_stops_at_once_unless_it_echoes_the_first(launch: Callable[..., Launcher]) -> None:
    launcher = launch("serves+stubborn", "runs", grace=60)
    launcher.read_until("^penstock: ready$")
    launcher.process.send_signal(signal.SIGINT)
    launcher.read_until("router was asked to stop")
    launcher.process.send_signal(signal.SIGINT)  # within ECHO: a wrapper's copy of the first signal, not a second request
    time.sleep(ECHO + 0.1)
    assert launcher.process.poll() is None
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait_for_exit() == 1
    assert all_ended(launcher.pids(), 0)
    assert any("stopped at once" in line for line in launcher.lines)


def test_process_that_outlives_the_grace_period_is_killed(launch: Callable[..., Launcher]) -> None:
    launcher = launch("serves+stubborn", "runs", grace=0)
    launcher.read_until("^penstock: ready$")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait_for_exit() == 1
    assert all_ended(launcher.pids(), 0)
    assert "penstock: router did not stop within 1 s: killed" in launcher.lines


@pytest.mark.parametrize(("code", "expected"), [(3, 1), (2, 2)])
def test_shard_exit_before_readiness_ends_the_server_and_quotes_its_log(
    launch: Callable[..., Launcher], code: int, expected: int
) -> None:
    launcher = launch("runs", "runs", f"fails+{code}")  # the router never says that it is ready, however late the shard fails
    assert launcher.wait_for_exit() == expected
    assert all_ended(launcher.pids(), 0)
    reason_line = launcher.line_number(rf"^penstock: shard 1 ended with exit code {code}, its last words:$")
    last_log_lines = [
        "    2026-11-21T00:00:00Z ERROR shard 1: in its log",
        "    Traceback of a fault",
        "    ValueError: what went wrong",
    ]
    assert (
        sorted(launcher.lines[reason_line + 1 :]) == last_log_lines
    )  # nothing follows them; stdout and stderr come through two pipes, in any order


def test_given_up_shards_are_killed_before_the_router_is_told_to_stop(launch: Callable[..., Launcher]) -> None:
    """Otherwise the router would wait for shards that wait for the dead rank, and its streams would end without an error."""
    launcher = launch("serves+stubborn", "runs", "runs", grace=60)
    launcher.read_until_up(3)
    shards = launcher.pids("shard-0") + launcher.pids("shard-1")
    os.kill(shards[1], signal.SIGKILL)
    launcher.read_until("router was asked to stop")
    assert all_ended(shards, 0)
    assert launcher.wait_for_exit() == 1


def test_router_crash_ends_the_server_without_restarts(launch: Callable[..., Launcher]) -> None:
    launcher = launch("serves", "runs")
    launcher.read_until("^penstock: ready$")
    [router] = [int(line.rpartition(" ")[2]) for line in launcher.lines if line.startswith("[router] router has pid")]
    os.kill(router, signal.SIGKILL)
    assert launcher.wait_for_exit() == 1
    assert all_ended(launcher.pids(), 0)
    assert any(line.startswith("penstock: router was killed by SIGKILL") for line in launcher.lines)


def test_killed_shard_restarts_its_rank_group_until_max_restarts(launch: Callable[..., Launcher]) -> None:
    launcher = launch("serves", "runs", "runs", restarts=2)
    launcher.read_until_up(3)
    for restart in (1, 2):
        os.kill(launcher.pids("shard-1")[-1], signal.SIGKILL)
        launcher.read_until(f"^penstock: starting the shards again now: restart {restart} of at most 2 within 10 minutes$")
        launcher.read_until("^penstock: ready again after")
        while min(len(launcher.pids(name)) for name in ("shard-0", "shard-1")) <= restart:
            launcher.read_until("has pid")  # on a busy machine these lines may come late
    assert [len(launcher.pids(name)) for name in ("router", "shard-0", "shard-1")] == [1, 3, 3]
    assert all_ended(launcher.pids("shard-0")[:-1] + launcher.pids("shard-1")[:-1], 0)
    os.kill(launcher.pids("shard-0")[-1], signal.SIGKILL)
    assert launcher.wait_for_exit() == 1
    assert all_ended(launcher.pids(), 0)
    assert "penstock: the shards died more than 2 times within 10 minutes (--max-restarts): the server ends" in launcher.lines


def test_dead_replica_is_restarted_and_given_up_without_the_others(launch: Callable[..., Launcher], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    launcher = launch("serves", "runs", "runs", restarts=1, replicas=True, pipe=str(pipe))
    launcher.read_until_up(3)
    with pipe.open("w") as hang_reports:
        hang_reports.write(f"1 {time.monotonic()} shard rank 0 has not answered for 2 s\n")
        hang_reports.write(f"7 {time.monotonic()} shard rank 0 has not answered for 2 s\n")  # an unknown replica: ignored
    launcher.read_until("^penstock: the router has lost replica 1: shard rank 0 has not answered for 2 s$")
    launcher.read_until("^penstock: starting replica 1 again now: restart 1 of at most 1 within 10 minutes$")
    launcher.read_until("^penstock: replica 1 is ready again after")
    while len(launcher.pids("shard-1")) < 2:
        launcher.read_until("has pid")
    os.kill(launcher.pids("shard-1")[-1], signal.SIGKILL)
    launcher.read_until("^penstock: replica 1 died more than 1 times within 10 minutes .--max-restarts.: the other replicas go on$")
    os.kill(launcher.pids("shard-0")[-1], signal.SIGKILL)
    launcher.read_until("^penstock: starting replica 0 again now")
    launcher.read_until("^penstock: replica 0 is ready again after")
    assert launcher.process.poll() is None
    while len(launcher.pids("shard-0")) < 2:
        launcher.read_until("has pid")
    os.kill(launcher.pids("shard-0")[-1], signal.SIGKILL)  # the last replica
    assert launcher.wait_for_exit() == 1
    assert any("replica 0 died more than 1 times" in line and line.endswith("the server ends") for line in launcher.lines)
    assert all_ended(launcher.pids(), 0)


def test_group_that_has_left_the_router_is_not_ready_again(launch: Callable[..., Launcher]) -> None:
    launcher = launch("serves+left", "runs", "runs", restarts=2, replicas=True)
    launcher.read_until_up(3)
    for count, when in ((2, "now"), (3, "in 0.5 s")):
        os.kill(launcher.pids("shard-1")[-1], signal.SIGKILL)
        launcher.read_until(f"^penstock: starting replica 1 again {when}: restart")
        while len(launcher.pids("shard-1")) < count:
            launcher.read_until("has pid")
        time.sleep(0.5)  # the router has been asked by then
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait_for_exit() == 0
    assert not any("ready again" in line for line in launcher.lines)


@pytest.mark.parametrize("replicas", [True, False])
def test_replica_that_cannot_be_started_again_is_given_up(launch: Callable[..., Launcher], tmp_path: Path, replicas: bool) -> None:
    """The exit code is 1: with 2 a service manager would not try again."""
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    launcher = launch("serves", f"by+{python}", *["runs"] * replicas, restarts=1, replicas=replicas)
    launcher.read_until_up(2 + replicas)
    python.unlink()
    os.kill(launcher.pids("shard-0")[-1], signal.SIGKILL)
    name = "replica 0" if replicas else "the shards"
    launcher.read_until(f"^penstock: {name} can't be started: .*No such file or directory")
    if replicas:
        launcher.read_until("^penstock: replica 0 died more than 1 times .*: the other replicas go on$")
        assert launcher.process.poll() is None
        launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait_for_exit() == (0 if replicas else 1)
    assert all_ended(launcher.pids(), 1)


def test_killed_router_is_restarted_and_the_shards_stay(launch: Callable[..., Launcher]) -> None:
    launcher = launch("serves", "runs", restarts=1)
    launcher.read_until_up(2)
    os.kill(launcher.pids("router")[0], signal.SIGRTMIN + 6)  # which has no name
    launcher.read_until("^penstock: ready again after")
    assert [len(launcher.pids(name)) for name in ("router", "shard-0")] == [2, 1]
    assert f"penstock: router was killed by signal {signal.SIGRTMIN + 6}" in launcher.lines
    launcher.process.kill()  # restarted processes must not be orphaned either
    launcher.wait_for_exit()
    assert all_ended(launcher.pids(), 5)


def test_stop_signal_during_a_restart_ends_the_server(launch: Callable[..., Launcher]) -> None:
    launcher = launch("serves+drains", "runs", restarts=3)
    launcher.read_until_up(2)
    os.kill(launcher.pids("shard-0")[0], signal.SIGKILL)
    launcher.read_until("starting the shards again")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait_for_exit() == 0
    assert all_ended(launcher.pids(), 0)


def test_hung_shards_reported_several_times_are_restarted_once(launch: Callable[..., Launcher], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    launcher = launch("serves", "runs", restarts=2, pipe=str(pipe))
    launcher.read_until_up(2)
    connected_at = time.monotonic()
    os.kill(launcher.pids("shard-0")[0], signal.SIGSTOP)
    with pipe.open("w") as hang_reports:
        for _ in range(3):
            hang_reports.write(f"0 {connected_at} shard rank 0 has not answered for 2 s\n")
    launcher.read_until("^penstock: the router has lost the shards: shard rank 0 has not answered for 2 s$")
    launcher.read_until("^penstock: ready again after")
    while len(launcher.pids("shard-0")) < 2:
        launcher.read_until("has pid")  # on a busy machine this line may come late
    with pipe.open("w") as hang_reports:  # a late report of the first shards does not concern the second ones
        hang_reports.write(f"0 {connected_at} shard rank 0 has not answered for 3 s\n")
        hang_reports.write(f"0 {time.monotonic()} shard rank 0 has not answered for 4 s\n")
    launcher.read_until("^penstock: the router has lost the shards: shard rank 0 has not answered for [34] s$")
    assert launcher.lines[-1].endswith("for 4 s")
    launcher.read_until("^penstock: ready again after")
    while len(launcher.pids("shard-0")) < 3:
        launcher.read_until("has pid")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait_for_exit() == 0
    assert len(launcher.pids("shard-0")) == 3
    assert all_ended(launcher.pids(), 0)


def test_restart_delay_doubles_to_its_maximum_and_restarts_are_limited() -> None:
    restarts = Restarts(12)
    assert [restarts.died(float(now)) for now in range(11)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, *[LONGEST_DELAY] * 4]
    restarts.ready()
    assert restarts.died(20.0) == 0.0
    assert restarts.died(21.0) is None
    assert restarts.died(WINDOW + 5.5) is not None
    assert restarts.count == 12 - 6 + 1
    assert Restarts(0).died(0.0) is None


def test_sigkill_of_the_launcher_leaves_no_orphans(launch: Callable[..., Launcher]) -> None:
    # the fake processes do nothing to end themselves
    launcher = launch("serves", "runs", "runs")
    launcher.read_until_up(3)
    launcher.process.kill()
    launcher.wait_for_exit()
    assert len(launcher.pids()) == 3
    assert all_ended(launcher.pids(), 5)


def test_child_runs_in_the_root_if_the_working_directory_has_been_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    child = processes.start("child", [sys.executable, "-S", "-c", "import os; print(os.getcwd())"], os.environ)
    assert child.process.communicate(timeout=30) == ("/\n", "")


def test_failed_start_of_a_shard_ends_the_router_already_started(launch: Callable[..., Launcher], tmp_path: Path) -> None:
    launcher = launch(f"serves+records+{tmp_path}+{{}}", "absent")
    assert launcher.wait_for_exit() == 1
    assert any("FileNotFoundError" in line for line in launcher.lines), launcher.lines
    assert all_ended([int(file.name.removeprefix("router")) for file in tmp_path.iterdir()], 1)
