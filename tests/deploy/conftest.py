"""One server for all tests of deploy/: started by the first command in docs/deploy.md, and, where this machine can do it, in a
sandbox like the manifests' containers: a PID namespace, another user, no capabilities, nothing writable but /tmp.
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
from penstock.tests.deploy import deploy_page

NAMESPACES = ["unshare", "--user", "--map-user=10001", "--map-group=10001", "--keep-caps", "--mount", "--pid", "--mount-proc"]
NAMESPACES += ["--fork", "--kill-child"]
SANDBOX_SCRIPT = r"""
for mount in $(cut -d' ' -f5 /proc/self/mountinfo | sort -u); do
    case $mount in /proc*|/dev*|/sys*) ;; *) mount -o remount,bind,ro "$mount" 2>/dev/null || true ;; esac
done
mount -t tmpfs tmpfs /tmp
cd /
! touch "$0" 2>/dev/null || exit 77
exec setpriv --bounding-set -all --inh-caps -all --ambient-caps -all --no-new-privs env -i "$@"
"""


@dataclass(frozen=True, slots=True)
class RunningServer:
    port: int
    pid: int  # of the launcher
    sandboxed: bool


@pytest.fixture(scope="session")
def running() -> Iterator[RunningServer]:
    """A server that is ready. It must exit with code 0 on SIGTERM."""
    [line] = [block.text for block in deploy_page.blocks() if block.tags == ("serve",)]
    port, sandboxed = free_port(), can_be_sandboxed()
    command = ["env", "-i", *environment(port), *line.split()]
    if sandboxed:
        command = [*NAMESPACES, "bash", "-euc", SANDBOX_SCRIPT, str(deploy_page.PAGE), *command[2:]]
    with serving.scratch() as folder, (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + serving.START
            while not is_healthy(port):
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(serving.POLL)
            launcher = child(process.pid) if sandboxed else process.pid
            yield RunningServer(port, launcher, sandboxed)
            os.kill(launcher, signal.SIGTERM)
            assert process.wait(serving.STOP) == 0, (folder / "log").read_text()
        finally:
            process.kill()  # all processes that it has started end with it
            process.wait()


@pytest.fixture(scope="session")
def server(running: RunningServer) -> int:
    """The running server's port."""
    return running.port


def can_be_sandboxed() -> bool:
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return False
    if Path(sys.prefix).resolve().is_relative_to("/tmp"):  # the sandbox has a /tmp of its own
        return False
    return subprocess.run([*NAMESPACES, "true"], capture_output=True, timeout=30).returncode == 0


def environment(port: int) -> list[str]:
    """A container's environment variables: of this process's own, only PATH."""
    return [f"PATH={deploy_page.path()}", f"PORT={port}", "HOME=/tmp", "HF_HOME=/tmp/hub", "THREADS=1"]


def child(pid: int) -> int:
    """The pid of its only child process."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def is_healthy(port: int) -> bool:
    """Whether /health answers 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
