"""A part of a server, the router or a rank group: processes that live and die together. And what happens to it, as events.

A part of several machines is a subclass (`leader.py`): what happens elsewhere comes to it by `hear`.
"""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import processes
from .processes import Child
from .restarts import Restarts

GRACE = 5.0  # seconds from SIGTERM to SIGKILL, beyond what running streams are given; also from SIGKILL to the end


@dataclass(frozen=True, slots=True)
class Command:
    """A process to be started."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)  # beside what all processes have


@dataclass(frozen=True, slots=True)
class Signal:
    number: int


@dataclass(frozen=True, slots=True)
class Stage:
    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    part: "Part"  # that was watched
    attempt: int  # which of those who watched it has seen it


@dataclass(frozen=True, slots=True)
class Hung:
    """The router complains of shards that answer nothing."""

    replica: str
    since: float  # when it had met them
    text: str


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Something that concerns a part has happened on another machine. The part says what follows from it."""

    part: "Part"
    what: object


@dataclass(frozen=True, slots=True)
class Failed:
    """A part has died, though none of our own processes has ended. In vain: it is not started again."""

    text: str
    exit_code: int = 1
    in_vain: bool = False


@dataclass(frozen=True, slots=True)
class Again:
    """A part can be started now."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Another machine is asked to stop: so are we."""

    text: str


Event = Signal | Stage | Ready | Hung | Child | Elsewhere  # a Child: it has ended
Outcome = Failed | Again | Leave | None


class Part:
    """Processes that live and die together. It may have others on other machines: see `leader.py`."""

    def __init__(self, name: str, commands: Sequence[Command], limit: int, leftovers: Sequence[Path] = ()) -> None:
        """leftovers: files that they may have left when they were killed."""
        self.name = name
        self.children: list[Child] = []
        self.started = 0.0
        self.lost = 0.0  # when it died and was not ready since; 0: it is well
        self.due: float | None = None  # when it shall be started again
        self.attempt = 0  # who watches it for us
        self.hopeless = False  # it is not started again
        self.limit = limit
        self.restarts = Restarts(limit)
        self._commands = commands
        self._leftovers = leftovers

    def start(self, environment: Mapping[str, str]) -> None:
        """Those that were started before another's start failed are among `children`."""
        for path in self._leftovers:
            path.unlink(missing_ok=True)
        self.due, self.started = None, time.monotonic()
        for command in self._commands:
            self.children.append(processes.start(command.name, command.arguments, {**environment, **command.environment}))

    def attend(self, put: Callable[["Event"], None]) -> None:
        """From now on what happens elsewhere is put there."""

    def hear(self, what: object) -> Outcome:
        """What follows from something that was put."""

    def terminate(self) -> None:
        """Asks all to end, rank 0 last, as the others follow it."""
        for child in reversed(self.children):
            child.terminate()

    def close(self, exit_code: int) -> None:
        """It is over."""

    def kill(self) -> bool:
        """Returns when nothing of it is left; False if something won't go."""
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
