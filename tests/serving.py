"""A real server for tests: runs `penstock serve` as a separate process, and checks that it leaves no processes and files behind.

Knows processes and HTTP, but not what a model answers.
"""

import http.client
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from penstock.launcher.machine import free_port

START = 60.0  # seconds until the server is ready, at most, on a busy machine
STOP = 30.0  # seconds until it has exited, at most
POLL = 0.02


class Server:
    """A launcher and the processes that it starts. Its temporary files go to `folder`/run, its working directory is `folder`/here.

    With `environment` the command is `text-generation-launcher`, configured by these variables, PORT and the flags only.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),  # put before the command, to run it in another network namespace
        port: int = 0,
    ) -> None:
        self.folder = folder
        self.run_folder, self.working_folder = folder / "run", folder / "here"
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        for each in (self.run_folder, self.working_folder):
            each.mkdir(exist_ok=True)
        self._log = folder / f"log-{self.port}"
        if environment is None:
            # Not the dtype that the model is stored in: comparisons with transformers, or between batches, need 32 bits.
            own = ("serve", "--hostname", "127.0.0.1", "--port", str(self.port), "--device", "cpu", "--threads", "1")
            own += ("--dtype", "float32")
            command, variables = ["penstock.launcher", *own], {}
        else:
            command, variables = ["penstock.launcher.tgi"], {**environment, "PORT": str(self.port)}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", *command, *flags],
                env={**os.environ, "TMPDIR": str(self.run_folder), **variables},
                cwd=self.working_folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._start_times: dict[int, str] = {}

    @property
    def log(self) -> str:
        """Everything that it has written to stdout and stderr."""
        return self._log.read_text()

    def wait_until_ready(self) -> None:
        """Returns when /health answers 200."""
        deadline = time.monotonic() + START
        while self.health() != 200:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(POLL)
        self.children()

    def health(self) -> int:
        """The status of /health; 0 while nothing listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def children(self) -> dict[int, str]:
        """Every live process that it has started, directly or indirectly: pid to command line."""
        processes = _processes()
        mine = {pid for pid, start in self._start_times.items() if pid in processes and processes[pid].start == start}
        if self.process.poll() is None:  # else its pid may belong to another process
            mine.add(self.process.pid)
        while more := {pid for pid, each in processes.items() if each.parent in mine} - mine:
            mine |= more
        # Processes whose parent has died were adopted by another, but have this server's folder in their settings.
        mine |= {pid for pid, each in processes.items() if str(self.run_folder) in each.line}
        mine.discard(self.process.pid)
        self._start_times |= {pid: processes[pid].start for pid in mine}
        return {pid: processes[pid].line for pid in mine}

    def child(self, name: str) -> int:
        """The pid of the one child whose command line contains `name`."""
        [pid] = [pid for pid, line in self.children().items() if name in line]
        return pid

    def wait_until_no_children(self, seconds: float) -> None:
        """Returns when no child is alive; fails after `seconds`."""
        deadline = time.monotonic() + seconds
        while left := self.children():
            assert time.monotonic() < deadline, left
            time.sleep(POLL)

    def stop(self, number: int = signal.SIGINT) -> None:
        """Sends a signal, and checks that it exits with code 0 and leaves nothing behind."""
        self.children()
        self.process.send_signal(number)
        self.check_end(0)

    def check_end(self, code: int) -> None:
        """Waits until it exits, and checks that the exit code is `code` and that no processes or files are left."""
        assert self.process.wait(STOP) == code, self.log
        self.wait_until_no_children(0)
        assert [*self.run_folder.iterdir(), *self.working_folder.iterdir()] == []

    def kill(self) -> None:
        """Kills all of its processes that are left after a failure."""
        left = self.children()
        self.process.kill()
        self.process.wait()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder for servers. Unix sockets need a short path, and TMPDIR may be long."""
    with tempfile.TemporaryDirectory(prefix="serving-", dir="/tmp") as folder:
        yield Path(folder)


@contextmanager
def serve(
    *flags: str, folder: Path | None = None, stop: int = signal.SIGINT, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A server that is ready. At the end it is stopped by the signal `stop`, unless it has exited already, and must leave nothing
    behind.

    `folder` is for tests that start several servers in the same folder. `environment`: see Server."""
    with scratch() as own:
        server = Server(folder or own, *flags, environment=environment)
        try:
            server.wait_until_ready()
            yield server
            if server.process.poll() is None:
                server.stop(stop)
        finally:
            server.kill()


def run(command: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a `penstock` command that exits by itself; its temporary files go to `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "penstock.launcher", command, *arguments],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=START,
    )


class _Process(NamedTuple):
    parent: int
    start: str  # when it started; distinguishes it from a later process with the same pid
    line: str


def _processes() -> dict[int, _Process]:
    """Every process that has not exited, by pid."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):  # it exited meanwhile
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if fields[0] not in "ZX":
                    found[int(path.name)] = _Process(int(fields[1]), fields[19], line)
    return found
