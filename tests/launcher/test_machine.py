"""Cores, memory and CPU features, read from made-up trees of /proc and /sys; ports of this machine."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.launcher import machine
from penstock.launcher.errors import UsageError
from penstock.proto import process


@pytest.fixture
def system_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root for /proc and /sys: 4 CPUs on 2 cores, 1 GiB of memory available, no control groups, no GPU."""
    monkeypatch.setattr(process, "PROC", tmp_path / "proc")
    monkeypatch.setattr(process, "SYSTEM", tmp_path / "sys")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        write_file(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings + "\n")
    write_file(tmp_path / "proc/meminfo", "MemTotal: 2097152 kB\nMemAvailable:    1048576 kB\n")
    write_file(tmp_path / "proc/cpuinfo", "processor : 0\nflags\t\t: fpu avx2\n")
    return tmp_path


def write_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_cores_and_memory_without_control_groups(system_tree: Path) -> None:
    assert machine.inspect() == machine.Machine(cores=2, memory=1 << 30, fast_bfloat16=False)


def test_fast_bfloat16_is_detected_by_cpu_flags(system_tree: Path) -> None:
    write_file(system_tree / "proc/cpuinfo", "flags\t\t: fpu avx512_bf16 amx_bf16\n")
    assert machine.inspect().fast_bfloat16


def test_cores_are_limited_by_cpu_affinity(system_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
    assert machine.cores() == 1


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 2), ("100000 100000", 1), ("150000 100000", 1), ("20000 100000", 1)])
def test_cores_are_limited_by_a_cgroup_v2_quota(system_tree: Path, quota: str, cores: int) -> None:
    write_file(system_tree / "proc/self/cgroup", "0::/pod/container\n")
    write_file(system_tree / "sys/fs/cgroup/pod/container/memory.current", "0")
    write_file(system_tree / "sys/fs/cgroup/pod/cpu.max", quota + "\n")
    assert machine.cores() == cores


def test_memory_is_limited_by_cgroup_v2(system_tree: Path) -> None:
    """The parent group's limit holds for its children; the page cache of files (inactive_file) does not count as used."""
    write_file(system_tree / "proc/self/cgroup", "0::/pod/container\n")
    write_file(system_tree / "sys/fs/cgroup/pod/container/memory.max", "max\n")
    write_file(system_tree / "sys/fs/cgroup/pod/memory.max", f"{512 << 20}\n")
    write_file(system_tree / "sys/fs/cgroup/pod/memory.current", f"{200 << 20}\n")
    write_file(system_tree / "sys/fs/cgroup/pod/memory.stat", f"anon 5\ninactive_file {100 << 20}\n")
    assert process.available_memory() == 412 << 20


def test_cores_and_memory_are_limited_by_cgroup_v1(system_tree: Path) -> None:
    write_file(system_tree / "proc/self/cgroup", "9:name=systemd:/\n3:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc\n")
    # inside a container, its own group is mounted at the root
    write_file(system_tree / "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{256 << 20}\n")
    write_file(system_tree / "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{56 << 20}\n")
    write_file(system_tree / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    write_file(system_tree / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert process.available_memory() == 200 << 20
    assert machine.cores() == 2


def test_error_for_a_port_in_use_names_the_process() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(UsageError, match=rf"port {port} is in use by process {os.getpid()} \(.+\): choose another with --port"):
            machine.check_port("0.0.0.0", port)
    machine.check_port("0.0.0.0", port)


def test_error_for_a_port_in_use_shows_a_command_line_that_is_no_utf8() -> None:
    script = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    command = [sys.executable, "-c", script, b"\xff"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        with pytest.raises(UsageError, match=rf"in use by process {other.pid} \("):
            machine.check_port("127.0.0.1", int(other.stdout.readline()))
        other.communicate("\n")


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UsageError, match=r"can't listen on 192\.0\.2\.1: .*; --hostname takes an address of this machine, or 0"):
        machine.check_port("192.0.2.1", 3000)
