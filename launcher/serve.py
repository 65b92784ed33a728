"""The life of a server: start everything at once, tell how it goes, start again what dies, stop everything when the operator asks.

The router and the shards are two parts: each dies and is started again as a whole, and neither with the other. What dies before the
server was ready for the first time, or too often, or by the operator's fault, ends it.

The main thread owns all decisions, and starts all processes; other threads only put events into its queue.
"""

import http.client
import json
import os
import queue
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from . import processes
from .console import Console
from .mistake import Mistake
from .processes import Child
from .restarts import WINDOW, Restarts

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # that ask to stop
POLL = 0.05  # seconds between two looks at /health while the model loads
ECHO = 0.5  # seconds in which a second signal is the first again: `timeout` and others pass on what the terminal sends to all
GRACE = 5.0  # seconds from SIGTERM to SIGKILL, beyond what running streams are given; also from SIGKILL to the end
NOTICE = 0.3  # seconds after which the router knows that its shards are gone, and no longer says that it is ready
HEALTH, READY = "/health", "/health/ready"  # what is asked until it answers 200: at first, and after something has died


@dataclass(frozen=True, slots=True)
class Command:
    """A process to be started."""

    name: str
    arguments: Sequence[str]


@dataclass(frozen=True, slots=True)
class Signal:
    number: int


@dataclass(frozen=True, slots=True)
class Stage:
    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    attempt: int  # which of those who watched has seen it


@dataclass(frozen=True, slots=True)
class Hung:
    """The router complains of shards that answer nothing."""

    since: float  # when it had met them
    text: str


Event = Signal | Stage | Ready | Hung | Child  # a Child: it has ended


class Part:
    """Processes that live and die together."""

    def __init__(self, name: str, commands: Sequence[Command], limit: int, leftovers: Sequence[Path] = ()) -> None:
        """leftovers: files that they may have left when they were killed."""
        self.name = name
        self.children: list[Child] = []
        self.started = 0.0
        self.due: float | None = None  # when it shall be started again
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
            self.children.append(processes.start(command.name, command.arguments, environment))

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


class Server:
    """A router and its shards. `run` starts them, and returns when nothing of them is left."""

    def __init__(
        self,
        *,
        router: Command,
        shards: Sequence[Command],
        environment: Mapping[str, str],
        console: Console,
        health: tuple[str, int],  # where the router's /health is asked
        ready: Callable[[], None],  # called once, when it first answers 200
        grace: float,  # seconds that running streams get
        max_restarts: int = 0,  # of each part within the time that `restarts` counts
        leftovers: Sequence[Path] = (),  # files that the shards leave when they are killed
        complaints: Path | None = None,  # a named pipe in which the router says that the shards hang
    ) -> None:
        self._router = Part("the router", [router], max_restarts)
        self._shards = Part("the shards", shards, max_restarts, leftovers)
        self._parts = (self._router, self._shards)  # the router first: it listens while the shards load
        self._environment = environment
        self._console = console
        self._health = health
        self._ready = ready
        self._grace = grace
        self._complaints = complaints
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._gone: set[Child] = set()
        self._asked = -ECHO  # when the operator asked to stop
        self._attempt = 0  # who watches /health for us
        self._served = False  # it was ready once
        self._lost = 0.0  # when something died since it was ready; 0: nothing

    def run(self) -> int:
        """The exit code: 0 after a stop that was asked for, 1 if a part failed, 2 if it failed by the operator's fault."""
        with _signals() as inbox:
            try:
                for part in self._parts:
                    part.start(self._environment)
                # Threads from here on: a process with one thread forks most safely.
                threading.Thread(target=_watch_signals, args=(inbox, self._events.put), daemon=True).start()
                if self._complaints is not None:
                    threading.Thread(target=_watch_complaints, args=(self._complaints, self._events.put), daemon=True).start()
                for part in self._parts:
                    self._follow(part)
                self._watch(HEALTH, 0.0)
                return self._supervise()
            finally:
                for part in self._parts:
                    part.kill()

    def _supervise(self) -> int:
        code = None
        while code is None:
            match self._next():
                case Stage(text):
                    self._console.say(text)
                case Ready(attempt) if attempt == self._attempt:
                    self._came_up()
                case Signal(number):
                    self._asked = time.monotonic()
                    self._console.say(
                        f"{signal.Signals(number).name}: running streams get up to {self._grace:g} s; once more stops at once"
                    )
                    code = self._stop(self._grace)
                case Hung(since, text) if self._shards.children and since >= self._shards.started:
                    self._console.complain(f"the router has lost the shards: {text}")
                    code = self._died(self._shards, 1)
                case Child() as child:
                    self._gone.add(child)
                    part = next((part for part in self._parts if child in part.children), None)
                    if part is not None:  # else we have killed it
                        self._console.complain(child.verdict())
                        code = self._died(part, child.process.returncode)
        return code

    def _next(self) -> Event:
        """The next event. Until it comes, parts are started again when they are due."""
        while True:
            due = min((part.due for part in self._parts if part.due is not None), default=None)
            try:
                return self._events.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
            except queue.Empty:
                for part in self._parts:
                    if part.due is not None and part.due <= time.monotonic():
                        self._restart(part)

    def _came_up(self) -> None:
        for part in self._parts:
            part.restarts.ready()
        if self._served:
            self._console.say(f"ready again after {time.monotonic() - self._lost:.1f} s")
        else:
            self._served = True
            self._ready()
        self._lost = 0.0

    def _died(self, part: Part, exit_code: int) -> int | None:
        """A part has failed. It will be started again, unless that is hopeless: then the server ends, with the exit code."""
        now = time.monotonic()
        self._lost = self._lost or now
        delay = part.restarts.died(now) if self._served and exit_code != 2 else None
        if delay is None:
            if self._served and exit_code != 2:
                often = f"more than {part.limit} times within {WINDOW / 60:g} minutes"
                self._console.complain(f"{part.name} died {often} (--max-restarts): the server ends")
            self._stop(0)
            return 2 if exit_code == 2 else 1
        if not part.kill():
            self._console.complain(f"{part.name} can't be killed: the server ends")
            return 1
        part.due = now + delay
        self._console.say(
            f"starting {part.name} again {f'in {delay:g} s' if delay else 'now'}: restart {part.restarts.count} of at most "
            f"{part.limit} within {WINDOW / 60:g} minutes"
        )
        return None

    def _restart(self, part: Part) -> None:
        try:
            part.start(self._environment)
        except OSError as error:  # no memory, too many processes
            self._console.complain(f"{part.name} can't be started: {error}")
            part.kill()
            delay = part.restarts.died(time.monotonic())
            if delay is None:
                raise Mistake(f"{part.name} can't be started again: {error}") from None
            part.due = time.monotonic() + delay
            return
        self._follow(part)
        self._watch(READY, NOTICE)

    def _follow(self, part: Part) -> None:
        for child in part.children:
            processes.follow(child, self._console, self._events.put)

    def _watch(self, path: str, delay: float) -> None:
        """Ready comes when `path` answers 200, unless something dies before."""
        self._attempt = attempt = self._attempt + 1

        def watch() -> None:
            time.sleep(delay)
            _watch_health(*self._health, path, self._events.put, lambda: self._attempt == attempt)
            self._events.put(Ready(attempt))

        threading.Thread(target=watch, daemon=True).start()

    def _stop(self, grace: float) -> int:
        """The router first: it drains, for which it needs the shards; then these, rank 0 last, as the others follow it.

        0, or 1 if they were not given their time.
        """
        for part, seconds in ((self._router, grace + GRACE), (self._shards, GRACE)):
            for child in reversed(part.children):
                child.terminate()
            if not self._wait(part.children, seconds):
                return 1
        return 0

    def _wait(self, children: Collection[Child], seconds: float) -> bool:
        """True when all `children` have ended; False when the time is up, or the operator is impatient."""
        deadline = time.monotonic() + seconds
        while not self._gone.issuperset(children):
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                late = ", ".join(child.name for child in children if child not in self._gone)
                self._console.complain(f"{late} did not stop within {seconds:g} s: killed")
                return False
            if isinstance(event, Signal) and time.monotonic() > self._asked + ECHO:
                self._console.complain("stopped at once: running streams are cut off")
                return False
            if isinstance(event, Child):
                self._gone.add(event)
        return True


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """Within, the signals that ask to stop become bytes in the socket, a byte of its number for each.

    A handler in Python would not do: one that comes in the moment before the main thread waits for the queue runs only when
    that wait is over.
    """
    inbox, outbox = socket.socketpair()
    outbox.setblocking(False)
    # nohup ignores SIGHUP for us, and means it. SIGINT is ignored for whatever a script starts with `&`, without meaning it.
    wanted = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, frame: None) for number in wanted}
    signal.set_wakeup_fd(outbox.fileno())
    try:
        yield inbox
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        outbox.close()  # the thread that reads the inbox ends


def _watch_signals(inbox: socket.socket, put: Callable[[Event], None]) -> None:
    with inbox:
        while numbers := inbox.recv(16):
            for number in numbers:
                if number in SIGNALS:
                    put(Signal(number))


def _watch_complaints(path: Path, put: Callable[[Event], None]) -> None:
    """Each line of the pipe is one: see `RouterConfig.complaints`. Opened to be written as well, else it ends with a router."""
    with os.fdopen(os.open(path, os.O_RDWR), encoding="utf-8", errors="replace") as pipe:
        for line in pipe:
            since, _, text = line.rstrip("\n").partition(" ")
            with suppress(ValueError):
                put(Hung(float(since), text))


def _watch_health(host: str, port: int, path: str, put: Callable[[Event], None], wanted: Callable[[], bool]) -> None:
    """Asks until the answer is 200, or nobody wants to know any more. Puts a Stage when a new one is named."""
    last = ""
    while wanted():
        status, stage = health(host, port, path)
        if status == 200:
            return
        kind = re.sub(r"[\d.,]+ ?%?", "", stage)  # "loading weights 40 %" is the stage that 30 % was
        if stage and kind != last:
            put(Stage(stage))
            last = kind
        time.sleep(POLL)


def health(host: str, port: int, path: str = HEALTH) -> tuple[int, str]:
    """Status of a probe and the stage it names; (0, "") while nobody answers."""
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()
    try:
        values = json.loads(body or b"null")
    except ValueError:
        values = None
    stage = values.get("stage") if isinstance(values, dict) else None
    return answer.status, stage if isinstance(stage, str) else ""
