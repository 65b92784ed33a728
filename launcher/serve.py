"""The life of a server: start everything at once, tell how it goes, stop everything when one part ends or the operator asks.

The main thread owns all decisions; other threads only put events into its queue.
"""

import http.client
import json
import queue
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from . import processes
from .console import Console
from .processes import Child

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # that ask to stop
POLL = 0.05  # seconds between two looks at /health while the model loads
ECHO = 0.5  # seconds in which a second signal is the first again: `timeout` and others pass on what the terminal sends to all
GRACE = 5.0  # seconds from SIGTERM to SIGKILL, beyond what running streams are given


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
    pass


Event = Signal | Stage | Ready | Child  # a Child: it has ended


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
    ) -> None:
        self._router = router
        self._shards = shards
        self._environment = environment
        self._console = console
        self._health = health
        self._ready = ready
        self._grace = grace
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._gone: set[Child] = set()
        self._asked = -ECHO  # when the operator asked to stop

    def run(self) -> int:
        """The exit code: 0 after a stop that was asked for, 1 if a part failed, 2 if it failed by the operator's fault."""
        with _signals() as inbox:
            children: list[Child] = []
            try:
                # The router first: it listens while the shards load. Should a start fail, those before it are in the list.
                commands = (self._router, *self._shards)
                children.extend(processes.start(command.name, command.arguments, self._environment) for command in commands)
                # Threads from here on, no earlier: a process with one thread forks safely.
                threading.Thread(target=_watch_signals, args=(inbox, self._events.put), daemon=True).start()
                for child in children:
                    processes.follow(child, self._console, self._events.put)
                threading.Thread(target=_watch_health, args=(*self._health, self._events.put), daemon=True).start()
                return self._supervise(children)
            finally:
                for child in children:
                    child.kill()
                for child in children:
                    child.process.wait()

    def _supervise(self, children: Sequence[Child]) -> int:
        while True:
            match self._events.get():
                case Stage(text):
                    self._console.say(text)
                case Ready():
                    self._ready()
                case Signal(number):
                    self._asked = time.monotonic()
                    self._console.say(
                        f"{signal.Signals(number).name}: running streams get up to {self._grace:g} s; once more stops at once"
                    )
                    return self._stop(children[:1], children[1:], self._grace)
                case Child() as child:
                    self._console.complain(child.verdict())
                    self._gone.add(child)
                    self._stop(children[:1], children[1:], 0)
                    return 2 if child.process.returncode == 2 else 1

    def _stop(self, first: Sequence[Child], then: Sequence[Child], grace: float) -> int:
        """The router first: it drains, for which it needs the shards; then these, rank 0 last, as the others follow it.

        0, or 1 if they were not given their time.
        """
        for children, seconds in ((first, grace + GRACE), (then, GRACE)):
            for child in reversed(children):
                child.terminate()
            if not self._wait(children, seconds):
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


def _watch_health(host: str, port: int, put: Callable[[Event], None]) -> None:
    """Asks /health until it answers 200. Puts a Stage when it names a new one, and Ready at the end."""
    last = ""
    while True:
        status, stage = health(host, port)
        if status == 200:
            put(Ready())
            return
        kind = re.sub(r"[\d.,]+ ?%?", "", stage)  # "loading weights 40 %" is the stage that 30 % was
        if stage and kind != last:
            put(Stage(stage))
            last = kind
        time.sleep(POLL)


def health(host: str, port: int) -> tuple[int, str]:
    """Status of /health and the stage it names; (0, "") while nobody answers."""
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", "/health")
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
