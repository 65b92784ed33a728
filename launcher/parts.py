"""Parts of a server, the router or a rank group: processes that live and die together. Also the events that happen to them.

A rank group on several machines is a subclass (`leader.py`): events of other machines reach it by `hear`.
"""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import processes
from .processes import Child
from .restarts import Restarts

GRACE = 5.0  # seconds from SIGTERM to SIGKILL, beyond what running streams are given; also from SIGKILL to the process's end


@dataclass(frozen=True, slots=True)
class Command:
    """A process to be started."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)  # in addition to the common environment


@dataclass(frozen=True, slots=True)
class Signal:
    number: int


@dataclass(frozen=True, slots=True)
class Stage:
    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    part: "Part"  # the part that was watched
    attempt: int  # the number of the start that the watching thread belongs to


@dataclass(frozen=True, slots=True)
class Hung:
    """The router's report that a replica's shards do not respond."""

    replica: str
    since: float  # when the router had connected to them
    text: str


@dataclass(frozen=True, slots=True)
class RemoteEvent:
    """A message of another machine that concerns a part. The part decides what follows from it."""

    part: "Part"
    what: object


@dataclass(frozen=True, slots=True)
class Failed:
    """A part has died though none of its local processes has ended. in_vain: it is not restarted."""

    text: str
    exit_code: int = 1
    in_vain: bool = False


@dataclass(frozen=True, slots=True)
class StartNow:
    """The part can be started now."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Another machine is asked to stop, so this one stops too."""

    text: str


Event = Signal | Stage | Ready | Hung | Child | RemoteEvent  # a Child: it has ended
Outcome = Failed | StartNow | StopRequested | None


class Part:
    """Processes that live and die together: the router or a rank group. It may extend to other machines: see `leader.py`."""

    def __init__(self, name: str, commands: Sequence[Command], limit: int, leftovers: Sequence[Path] = ()) -> None:
        """leftovers: files to remove before each start, which killed processes may have left."""
        self.name = name
        self.children: list[Child] = []
        self.started = 0.0
        self.lost = 0.0  # when it died, if it has not been ready since; 0: it runs
        self.due: float | None = None  # when it is to be restarted
        self.attempt = 0  # number of the current watching thread
        self.hopeless = False  # it is not restarted
        self.restarts = Restarts(limit)
        self._commands = commands
        self._leftovers = leftovers

    def start(self, environment: Mapping[str, str]) -> None:
        """Starts the processes. If one fails to start, those started before it are among `children`."""
        for path in self._leftovers:
            path.unlink(missing_ok=True)
        self.due, self.started = None, time.monotonic()
        for command in self._commands:
            self.children.append(processes.start(command.name, command.arguments, {**environment, **command.environment}))

    def attend(self, put: Callable[["Event"], None]) -> None:
        """From now on, messages of other machines are put into the supervisor's queue."""

    def hear(self, what: object) -> Outcome:
        """What follows from a message that was put."""

    def terminate(self) -> None:
        """Asks all processes to end, rank 0 last, as the others follow it."""
        for child in reversed(self.children):
            child.terminate()

    def close(self, exit_code: int) -> None:
        """Called when the server has ended."""

    def kill(self) -> bool:
        """Kills all processes. Returns when they are gone; False if one does not end."""
        for child in self.children:
            child.kill()
        deadline = time.monotonic() + GRACE
        try:
            for child in self.children:
                child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        self.children.clear()
        return True
