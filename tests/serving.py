"""A real server for tests: `penstock serve` as a process of its own, and what it leaves behind, which is nothing.

Knows processes and HTTP; not what a model answers.
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

START = 60.0  # seconds until it is ready, on a busy machine
STOP = 30.0  # seconds until it has ended
POLL = 0.02


class Server:
    """A launcher and whatever it starts. Its temporary files go to `folder`/run, its working directory is `folder`/here.

    With `environment` it is `text-generation-launcher`, and that is all it is told beside the flags and PORT.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),  # of the command, which runs it elsewhere
        port: int = 0,
    ) -> None:
        self.folder = folder
        self.runs, self.here = folder / "run", folder / "here"
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        for each in (self.runs, self.here):
            each.mkdir(exist_ok=True)
        self._log = folder / f"log-{self.port}"
        if environment is None:
            # Not as the model is stored: what is compared with transformers, or with other batches, wants 32 bits.
            own = ("serve", "--hostname", "127.0.0.1", "--port", str(self.port), "--device", "cpu", "--threads", "1")
            own += ("--dtype", "float32")
            command, told = ["penstock.launcher", *own], {}
        else:
            command, told = ["penstock.launcher.tgi"], {**environment, "PORT": str(self.port)}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", *command, *flags],
                env={**os.environ, "TMPDIR": str(self.runs), **told},
                cwd=self.here,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._known: dict[int, str] = {}

    @property
    def log(self) -> str:
        """All that it has written."""
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
        """The status of /health; 0 while nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def children(self) -> dict[int, str]:
        """Every live process that it has started, directly or not, with its command line."""
        processes = _processes()
        mine = {pid for pid, start in self._known.items() if pid in processes and processes[pid].start == start}
        if self.process.poll() is None:  # else its pid may be another's
            mine.add(self.process.pid)
        while more := {pid for pid, each in processes.items() if each.parent in mine} - mine:
            mine |= more
        # Those whose parent has died have another one by now, but its folder in their settings.
        mine |= {pid for pid, each in processes.items() if str(self.runs) in each.line}
        mine.discard(self.process.pid)
        self._known |= {pid: processes[pid].start for pid in mine}
        return {pid: processes[pid].line for pid in mine}

    def child(self, name: str) -> int:
        """The pid of the one child whose command line contains `name`."""
        [pid] = [pid for pid, line in self.children().items() if name in line]
        return pid

    def wait_until_alone(self, seconds: float) -> None:
        """Returns when no child lives any more."""
        deadline = time.monotonic() + seconds
        while left := self.children():
            assert time.monotonic() < deadline, left
            time.sleep(POLL)

    def stop(self, number: int = signal.SIGINT) -> None:
        """Asks it to end, and checks that it does, with exit code 0, and with nothing left."""
        self.children()
        self.process.send_signal(number)
        self.check_end(0)

    def check_end(self, code: int) -> None:
        """It ends by itself now, with this exit code, and nothing is left."""
        assert self.process.wait(STOP) == code, self.log
        self.wait_until_alone(0)
        assert [*self.runs.iterdir(), *self.here.iterdir()] == []

    def kill(self) -> None:
        """Ends what is left of it after a failure."""
        left = self.children()
        self.process.kill()
        self.process.wait()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for servers, gone afterwards. Sockets need a short path, which TMPDIR may not be."""
    with tempfile.TemporaryDirectory(prefix="serving-", dir="/tmp") as folder:
        yield Path(folder)


@contextmanager
def serve(
    *flags: str, folder: Path | None = None, stop: int = signal.SIGINT, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A server that is ready. At the end it is stopped by that signal, unless it has ended already, and must leave nothing.

    `folder` is for a test that starts several servers in the same place. `environment`: see Server.
    """
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
    """A `penstock` command that ends by itself; its temporary files go to `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "penstock.launcher", command, *arguments],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=START,
    )


class _Process(NamedTuple):
    parent: int
    start: str  # when; tells it from a later one of the same pid
    line: str


def _processes() -> dict[int, _Process]:
    """Every process that has not ended, by its pid."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):  # it has ended while we looked
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if fields[0] not in "ZX":
                    found[int(path.name)] = _Process(int(fields[1]), fields[19], line)
    return found
