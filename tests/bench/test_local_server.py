"""The local server of `penstock bench --chaos`, with a fake in place of the launcher."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.bench import chaos, local_server


def test_server_is_killed_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom penstock.bench.local_server import LocalServer\n"
        "local = LocalServer([], Path(sys.argv[1]), module='penstock.tests.launcher.fake_child')\n"
        "print(local.pid, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        os.kill(server, 0)
        process.kill()
    deadline = time.monotonic() + 10
    while is_running(server):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("settings", "role", "probe"),
    [
        ('{"folder":"x","rank":1,"ranks":2}', "shard 1", "/health/ready"),
        ('{"name":"replica 1 shard 0","rank":0}', "replica 1 shard 0", "/health/ready?replica=1"),
    ],
)
def test_each_shard_has_a_role_of_its_own_and_the_probe_of_its_replica(settings: str, role: str, probe: str) -> None:
    """While one replica is ready, so is the server: that another one is lost shows only in that one's probe."""
    assert local_server._role(f"python\0-m\0penstock.shard\0{settings}\0") == role
    assert chaos._probe(role) == probe


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
