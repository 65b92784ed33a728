"""The life of a server: start everything at once, tell how it goes, start again what dies, stop everything when the operator asks.

The router and each rank group (a replica) are parts: each dies and is started again as a whole, and none with another. What dies
before the server was ready for the first time, or too often, or by the operator's fault, ends it; of several replicas the last.

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
from dataclasses import dataclass, field
from pathlib import Path

from . import processes
from .console import Console
from .mistake import Mistake
from .processes import Child
from .restarts import WINDOW, Restarts

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # that ask to stop
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
    """Processes that live and die together. It may have others on other machines: see `spread.py`."""

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


class Server:
    """A router and its rank groups. `run` starts them, and returns when nothing of them is left."""

    def __init__(
        self,
        *,
        router: Command | None,  # None: it is somebody else's
        groups: Mapping[str, Part],  # by the names of the replicas that they are; the others are somebody else's
        environment: Mapping[str, str],
        console: Console,
        health: tuple[str, int],  # where the router's /health is asked
        ready: Callable[[], None],  # called once, when it first answers 200
        grace: float,  # seconds that running streams get
        max_restarts: int = 0,  # of the router within the time that `restarts` counts
        complaints: Path | None = None,  # a named pipe in which the router says that shards hang
    ) -> None:
        self._router = Part("the router", [router], max_restarts) if router is not None else None
        self._groups = groups
        # The router first: it listens while the shards load.
        self._parts = [*([self._router] if self._router is not None else ()), *groups.values()]
        self._environment = environment
        self._console = console
        self._health = health
        self._ready = ready
        self._grace = grace
        self._complaints = complaints
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._gone: set[Child] = set()
        self._asked = -ECHO  # when the operator asked to stop
        self._served = False  # it was ready once

    def run(self) -> int:
        """The exit code: 0 after a stop that was asked for, 1 if a part failed, 2 if it failed by the operator's fault."""
        code = 1
        with signals() as inbox:
            try:
                for part in self._parts:
                    part.start(self._environment)
                # Threads from here on: a process with one thread forks most safely.
                threading.Thread(target=watch_signals, args=(inbox, self._events.put), daemon=True).start()
                if self._complaints is not None:
                    threading.Thread(target=_watch_complaints, args=(self._complaints, self._events.put), daemon=True).start()
                for part in self._parts:
                    self._follow(part)
                    part.attend(self._events.put)
                if self._router is not None:
                    self._watch(self._router, HEALTH, 0.0)
                else:
                    self._begin()
                code = self._supervise()
                return code
            finally:
                for part in self._parts:
                    part.kill()
                    part.close(code)

    def _supervise(self) -> int:
        code = None
        while code is None:
            match self._next():
                case Stage(text):
                    self._console.say(text)
                case Ready(part, attempt) if attempt == part.attempt:
                    self._came_up(part)
                case Signal(number):
                    self._asked = time.monotonic()
                    self._console.say(f"{signal.Signals(number).name}: {self._promise}; once more stops at once")
                    code = self._stop(self._grace)
                case Hung(replica, since, text):
                    group = self._groups.get(replica)
                    if group is not None and group.children and since >= group.started:
                        self._console.complain(f"the router has lost {group.name}: {text}")
                        code = self._died(group, 1)
                case Elsewhere(spread, what):
                    code = self._heed(spread, spread.hear(what))
                case Child() as child:
                    self._gone.add(child)
                    own = next((part for part in self._parts if child in part.children), None)
                    if own is not None:  # else we have killed it
                        code = self._fell(own, child)
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

    def _begin(self) -> None:
        """It serves, for the first time."""
        for part in self._parts:
            part.restarts.ready()
        self._served = True
        self._ready()

    def _came_up(self, part: Part) -> None:
        if not self._served:
            self._begin()
        part.restarts.ready()
        if part.lost:
            which = f"{part.name} is " if len(self._groups) > 1 else ""
            self._console.say(f"{which}ready again after {time.monotonic() - part.lost:.1f} s")
        part.lost = 0.0

    def _heed(self, part: Part, outcome: Outcome) -> int | None:
        """What another machine has said."""
        match outcome:
            case Failed(text, exit_code, in_vain):
                self._console.complain(text)
                if not in_vain:
                    return self._died(part, exit_code)
                self._stop(0)
                return exit_code
            case Again() if not part.children and part.due is None:
                self._restart(part)
            case Leave(text):
                self._asked = time.monotonic()
                self._console.say(f"{text}: {self._promise}; a signal here stops at once")
                return self._stop(self._grace)
        return None

    def _fell(self, part: Part, child: Child) -> int | None:
        """A process of a part has ended by itself. Of a start that fails this comes last, below what others say while they are
        stopped."""
        if self._served:
            self._console.complain(child.verdict())
        code = self._died(part, child.process.returncode)
        if not self._served:
            self._console.complain(child.verdict())
        return code

    def _died(self, part: Part, exit_code: int) -> int | None:
        """A part has failed. It will be started again, unless that is hopeless: then the server ends, with the exit code, if it
        can't do without."""
        now = time.monotonic()
        part.lost = part.lost or now
        if self._router is None and now > part.started + WINDOW:
            part.restarts.ready()  # nobody tells us so, but it has lived long enough
        delay = part.restarts.died(now) if self._served and exit_code != 2 else None
        if delay is None:
            return self._give_up(part, exit_code)
        if not part.kill():
            self._console.complain(f"{part.name} can't be killed: the server ends")
            return 1
        part.due = now + delay
        self._console.say(
            f"starting {part.name} again {f'in {delay:g} s' if delay else 'now'}: restart {part.restarts.count} of at most "
            f"{part.limit} within {WINDOW / 60:g} minutes"
        )
        return None

    def _give_up(self, part: Part, exit_code: int) -> int | None:
        """A part is not started again."""
        part.hopeless = True
        spared = self._served and part is not self._router and not all(group.hopeless for group in self._groups.values())
        if self._served:
            why = f"died more than {part.limit} times within {WINDOW / 60:g} minutes (--max-restarts)"
            ends = "the other replicas go on" if spared else "the server ends"
            if exit_code != 2:
                self._console.complain(f"{part.name} {why}: {ends}")
        # Ranks that wait for a lost one may do so for long, and the router's streams, which shall be told, with them.
        gone = self._served and part is not self._router and part.kill()
        if spared and gone:
            return None
        self._stop(0)
        return 2 if exit_code == 2 else 1

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
        if part is self._router:
            self._watch(part, READY, NOTICE)
        elif self._router is not None and self._served:  # else it is watched from the beginning
            [name] = [name for name, group in self._groups.items() if group is part]
            self._watch(part, f"{READY}?replica={name}", NOTICE)

    def _follow(self, part: Part) -> None:
        for child in part.children:
            processes.follow(child, self._console, self._events.put)

    def _watch(self, part: Part, path: str, delay: float) -> None:
        """Ready comes when `path` answers 200, unless the part dies before."""
        part.attempt = attempt = part.attempt + 1

        def watch() -> None:
            time.sleep(delay)
            _watch_health(*self._health, path, self._events.put, lambda: part.attempt == attempt)
            self._events.put(Ready(part, attempt))

        threading.Thread(target=watch, daemon=True).start()

    @property
    def _promise(self) -> str:
        """What becomes of streams when the operator stops this."""
        if not self._served:
            return "it ends before it was ready"
        if self._router is None:
            return "streams go on elsewhere, if the router has another replica (POST /admin/replicas/NAME/drain there comes first)"
        return f"running streams get up to {self._grace:g} s"

    def _stop(self, grace: float) -> int:
        """The router first: it drains, for which it needs the shards; then these, rank 0 last, as the others follow it.

        0, or 1 if they were not given their time.
        """
        for parts, seconds in (
            ([self._router] if self._router is not None else [], grace + GRACE),
            (self._groups.values(), GRACE),
        ):
            for part in parts:
                part.terminate()
            if not self._wait([child for part in parts for child in part.children], seconds):
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
                if event not in children:
                    self._lost_meanwhile(event)
            if isinstance(event, Elsewhere) and isinstance(lost := event.part.hear(event.what), Failed):
                self._console.complain(lost.text)
                event.part.kill()  # the router cuts its streams then
        return True

    def _lost_meanwhile(self, child: Child) -> None:
        """A process has ended unasked while others are waited for. Its part ends as well: ranks that wait for a lost one may do so
        for long, and the router's streams with them."""
        part = next((part for part in self._parts if child in part.children), None)
        if part is not None and self._asked > 0:  # else we have killed it, or all ends since something has failed, which is told
            self._console.complain(child.verdict())
            part.kill()


@contextmanager
def signals() -> Iterator[socket.socket]:
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


def watch_signals(inbox: socket.socket, put: Callable[[Event], None]) -> None:
    with inbox:
        while numbers := inbox.recv(16):
            for number in numbers:
                if number in SIGNALS:
                    put(Signal(number))


def _watch_complaints(path: Path, put: Callable[[Event], None]) -> None:
    """Each line of the pipe is one: see `RouterConfig.complaints`. Opened to be written as well, else it ends with a router."""
    with os.fdopen(os.open(path, os.O_RDWR), encoding="utf-8", errors="replace") as pipe:
        for line in pipe:
            replica, since, text = (*line.rstrip("\n").split(" ", 2), "", "")[:3]
            with suppress(ValueError):
                put(Hung(replica, float(since), text))


def _watch_health(host: str, port: int, path: str, put: Callable[[Event], None], wanted: Callable[[], bool]) -> None:
    """Asks until the answer is 200, or 404 (a replica that has left the router), or nobody wants to know any more. Puts a Stage
    when a new one is named."""
    last = ""
    while wanted():
        status, stage = health(host, port, path)
        if status in (200, 404):
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
