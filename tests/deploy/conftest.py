"""One server for all tests of deploy/: started by the very line that docs/deploy.md begins with, and, where this machine can do
that, shut in as the manifests promise of a container: PID 1 of its own, another user, no capabilities, nothing writable but /tmp.
"""

import http.client
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.launcher.machine import free_port
from penstock.tests import serving
from penstock.tests.deploy import walk

NAMESPACES = ["unshare", "--user", "--map-user=10001", "--map-group=10001", "--keep-caps", "--mount", "--pid", "--mount-proc"]
NAMESPACES += ["--fork", "--kill-child"]
SHUT_IN = r"""
for mount in $(cut -d' ' -f5 /proc/self/mountinfo | sort -u); do
    case $mount in /proc*|/dev*|/sys*) ;; *) mount -o remount,bind,ro "$mount" 2>/dev/null || true ;; esac
done
mount -t tmpfs tmpfs /tmp
cd /
! touch "$0" 2>/dev/null || exit 77
exec setpriv --bounding-set -all --inh-caps -all --ambient-caps -all --no-new-privs env -i "$@"
"""


@dataclass(frozen=True, slots=True)
class Running:
    port: int
    pid: int  # of the launcher
    shut_in: bool


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    """A server that is ready; at its end it must end well."""
    [line] = [block.text for block in walk.blocks() if block.tags == ("serve",)]
    port, shut_in = free_port(), can_be_shut_in()
    command = ["env", "-i", *environment(port), *line.split()]
    if shut_in:
        command = [*NAMESPACES, "bash", "-euc", SHUT_IN, str(walk.PAGE), *command[2:]]
    with serving.scratch() as folder, (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + serving.START
            while not answers(port):
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(serving.POLL)
            launcher = child(process.pid) if shut_in else process.pid
            yield Running(port, launcher, shut_in)
            os.kill(launcher, signal.SIGTERM)
            assert process.wait(serving.STOP) == 0, (folder / "log").read_text()
        finally:
            process.kill()  # all that it has started ends with it
            process.wait()


@pytest.fixture(scope="session")
def server(running: Running) -> int:
    """Its port."""
    return running.port


def can_be_shut_in() -> bool:
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return False
    if Path(sys.prefix).resolve().is_relative_to("/tmp"):  # which it doesn't see
        return False
    return subprocess.run([*NAMESPACES, "true"], capture_output=True, timeout=30).returncode == 0


def environment(port: int) -> list[str]:
    """As a container's: nothing of ours but where programs are."""
    return [f"PATH={walk.path()}", f"PORT={port}", "HOME=/tmp", "HF_HOME=/tmp/hub", "THREADS=1"]


def child(pid: int) -> int:
    """The one process that it has started."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def answers(port: int) -> bool:
    """Whether /health says 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
