"""A server of our own on this machine: `penstock serve` as a child, its processes, and what they hold of the machine.

Knows processes and /proc (Linux), not what is asked of the server.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

START = 600.0  # seconds until it is ready, which with a large model takes long
STOP = 60.0
POLL = 0.02
PROC = Path("/proc")
HOST = "127.0.0.1"
RANK = re.compile(r'"rank": ?(\d+)')  # in a shard's settings, on its command line


class Failed(Exception):
    """The server did not start, or ended by itself. One line."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds."""

    pid: int
    memory: int  # resident bytes
    peak: int  # the most that it ever was
    files: int  # open, sockets included
    sockets: int


class Local:
    """The launcher and whatever it starts. As a context it is ready, and ends at the end."""

    def __init__(
        self,
        flags: Sequence[str],
        log: Path,
        *,
        module: str = "penstock.launcher",
        environment: Mapping[str, str] | None = None,
        start: float = START,
    ) -> None:
        """module: what stands for the launcher; environment: instead of ours; start: seconds until it has to be ready."""
        self.log = log
        self.port = _free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.answered = self.ready = 0.0  # seconds after its start when /health was answered first, and with 200
        self._start = start
        self._began = time.monotonic()
        command = [sys.executable, "-m", module, "serve", *flags, "--hostname", HOST, "--port", str(self.port)]
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> "Local":
        try:
            self._wait_until_ready()
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.kill()  # and the kernel everything that it has started
            self._process.wait()

    def _wait_until_ready(self) -> None:
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > self._began + self._start:
                lines = self.log.read_text(errors="replace").splitlines() or ["it said nothing"]
                raise Failed(f"penstock serve did not start: {lines[-1]}")
            time.sleep(POLL)

    def _is_ready(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
        except urllib.error.HTTPError:
            ready = False
        except OSError:  # nobody is there
            return False
        else:
            ready = True
        moment = time.monotonic() - self._began
        self.answered = self.answered or moment
        self.ready = moment if ready else 0.0
        return ready

    @property
    def pid(self) -> int:
        """The launcher's."""
        return self._process.pid

    def stop(self) -> int:
        """Asks it to end. Returns the exit code."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP)
        except subprocess.TimeoutExpired:
            raise Failed(f"penstock serve did not end within {STOP:g} s of SIGTERM") from None

    def processes(self) -> dict[str, int]:
        """The pids of those that live, by what they are: "launcher", "router", "shard 0"..."""
        found = {"launcher": self.pid}
        for path in PROC.glob("[0-9]*"):
            with suppress(OSError):
                if _parent(path) == self.pid:
                    found[_role((path / "cmdline").read_bytes().decode(errors="replace"))] = int(path.name)
        return found

    def held(self) -> dict[str, Held]:
        """By each of them."""
        found = {}
        for name, pid in self.processes().items():
            with suppress(OSError):  # it has just ended
                found[name] = held(pid)
        return found


def held(pid: int) -> Held:
    """Raises OSError if there is no such process."""
    status = dict(line.split(":", 1) for line in (PROC / str(pid) / "status").read_text().splitlines())
    kilobytes = [int(status.get(name, "0 kB").split()[0]) for name in ("VmRSS", "VmHWM")]
    sockets = files = 0
    for path in (PROC / str(pid) / "fd").iterdir():
        with suppress(OSError):  # that of the folder itself
            sockets += os.readlink(path).startswith("socket:")
            files += 1
    return Held(pid, kilobytes[0] * 1024, kilobytes[1] * 1024, files, sockets)


def _role(line: str) -> str:
    if "penstock.shard" in line:
        rank = RANK.search(line)
        return f"shard {rank[1] if rank else '?'}"
    return "router" if "penstock.router" in line else "other: " + line.replace("\0", " ")[:60]


def status(path: Path) -> list[str]:
    """Of a process or a thread, by its folder in /proc: what `stat` says behind its name (proc(5)). OSError: it has ended."""
    return (path / "stat").read_text().rpartition(")")[2].split()


def _parent(path: Path) -> int:
    """0 for one that has ended and was not taken leave of."""
    fields = status(path)
    return 0 if fields[0] in "ZX" else int(fields[1])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
