"""A local server under test: `penstock serve` as a child process, its processes, and the resources that they hold.

Knows processes and /proc (Linux), not what the server is asked.
"""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

START = 600.0  # seconds until it is ready, which takes long with a large model
STOP = 60.0
POLL = 0.02
PROC = Path("/proc")
PR_SET_PDEATHSIG = 1  # linux/prctl.h
HOST = "127.0.0.1"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy of the environment reaches this machine's ports
# In a shard's settings, on its command line: its name, if there are several replicas, and its rank.
NAME, RANK = re.compile(r'"name": ?"(replica \S+ shard \d+)"'), re.compile(r'"rank": ?(\d+)')


class Failed(Exception):
    """The server did not start, or ended by itself. The message is one line."""


@dataclass(frozen=True, slots=True)
class HeldResources:
    """The resources that a process holds."""

    pid: int
    memory: int  # resident bytes
    peak: int  # maximum resident bytes
    files: int  # open, sockets included
    sockets: int


class LocalServer:
    """The launcher and all that it starts. As a context it waits until the server is ready, and kills it in the end."""

    def __init__(
        self,
        flags: Sequence[str],
        log: Path,
        *,
        module: str = "penstock.launcher",
        environment: Mapping[str, str] | None = None,
        start: float = START,
    ) -> None:
        """module: runs instead of the launcher; environment: instead of this process's; start: seconds until it must be ready."""
        self.log = log
        self.port = _free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.answered = self.ready = 0.0  # seconds after its start when /health first answered, and first answered 200
        self._start = start
        self._began = time.monotonic()
        command = [sys.executable, "-P", "-m", module, "serve", *flags, "--hostname", HOST, "--port", str(self.port)]
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with(os.getpid()),
            )

    def __enter__(self) -> "LocalServer":
        try:
            self._wait_until_ready()
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.kill()  # and the kernel kills everything that it has started
            self._process.wait()

    def _wait_until_ready(self) -> None:
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > self._began + self._start:
                lines = self.log.read_text(errors="replace").splitlines() or ["it said nothing"]
                raise Failed(f"penstock serve did not start: {lines[-1]}")
            time.sleep(POLL)

    def _is_ready(self) -> bool:
        try:
            DIRECT.open(f"{self.url}/health", timeout=5).close()
        except urllib.error.HTTPError:
            ready = False
        except OSError:  # nothing listens yet
            return False
        else:
            ready = True
        moment = time.monotonic() - self._began
        self.answered = self.answered or moment
        self.ready = moment if ready else 0.0
        return ready

    @property
    def pid(self) -> int:
        """The launcher's process id."""
        return self._process.pid

    def stop(self) -> int:
        """Asks it to end. Returns the exit code. Raises Failed."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP)
        except subprocess.TimeoutExpired:
            raise Failed(f"penstock serve did not end within {STOP:g} s of SIGTERM") from None

    def processes(self) -> dict[str, int]:
        """Process ids of the running ones, by role: "launcher", "router", "shard 0", or "replica 0 shard 0"..."""
        found = {"launcher": self.pid}
        for path in PROC.glob("[0-9]*"):
            with suppress(OSError):
                if _parent(path) == self.pid:
                    found[_role((path / "cmdline").read_bytes().decode(errors="replace"))] = int(path.name)
        return found

    def held(self) -> dict[str, HeldResources]:
        """The resources that each process holds."""
        found = {}
        for name, pid in self.processes().items():
            with suppress(OSError):  # it has just ended
                found[name] = held(pid)
        return found


def _die_with(parent: int) -> Callable[[], None]:
    """A function to run in a child before its program: the kernel kills the child when this process ends, however it ends."""
    prctl = ctypes.CDLL(None).prctl

    def bind() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return bind


def held(pid: int) -> HeldResources:
    """The resources of a process. Raises OSError if there is no such process."""
    status = dict(line.split(":", 1) for line in (PROC / str(pid) / "status").read_text().splitlines())
    kilobytes = [int(status.get(name, "0 kB").split()[0]) for name in ("VmRSS", "VmHWM")]
    sockets = files = 0
    for path in (PROC / str(pid) / "fd").iterdir():
        with suppress(OSError):  # the descriptor of the folder itself
            sockets += os.readlink(path).startswith("socket:")
            files += 1
    return HeldResources(pid, kilobytes[0] * 1024, kilobytes[1] * 1024, files, sockets)


def _role(line: str) -> str:
    if "penstock.shard" in line:
        name, rank = NAME.search(line), RANK.search(line)
        return name[1] if name else f"shard {rank[1] if rank else '?'}"
    return "router" if "penstock.router" in line else "other: " + line.replace("\0", " ")[:60]


def status(path: Path) -> list[str]:
    """The fields of `stat` behind the name (proc(5)), of a process or a thread, by its folder in /proc. Raises OSError if it has
    ended."""
    return (path / "stat").read_text().rpartition(")")[2].split()


def _parent(path: Path) -> int:
    """The parent's process id; 0 for a zombie."""
    fields = status(path)
    return 0 if fields[0] in "ZX" else int(fields[1])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
