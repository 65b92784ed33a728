"""Process supervision of a server: starts router and shards at once, reports progress, restarts what dies, and stops everything.

The router and each rank group (a replica) are parts: each dies and is restarted as a whole, independently of the others. A part
that dies before the server was first ready, or too often, or by the operator's fault, ends the server; of several replicas the last
one.

The main thread makes all decisions and starts all processes; other threads only put events into its queue (`event_sources.py`).
"""

import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from . import processes
from .console import Console
from .event_sources import ECHO, HEALTH, READY, signals, watch_hang_reports, watch_health, watch_signals
from .parts import GRACE, Event, Failed, Hung, Outcome, Part, Ready, RemoteEvent, Signal, Stage, StartNow, StopRequested
from .processes import Child
from .restarts import WINDOW

NOTICE = 0.3  # seconds within which the router notices that its shards are gone, and stops reporting that it is ready


class Supervisor:
    """The supervisor of a router and its rank groups. `run` starts them, and returns when no process of them is left."""

    def __init__(
        self,
        *,
        router: Part | None,  # None: started elsewhere
        groups: Mapping[str, Part],  # by their numbers in the router's settings; those started elsewhere are not among them
        environment: Mapping[str, str],
        console: Console,
        health: tuple[str, int],  # host and port of the router's /health
        ready: Callable[[], None],  # called once, when /health first answers 200
        grace: float,  # seconds that running streams get after a signal
        hang_reports: Path | None = None,  # a named pipe by which the router reports hung shards
    ) -> None:
        self._router = router
        self._groups = groups
        # The router first: it listens while the shards load.
        self._parts = [*([router] if router is not None else ()), *groups.values()]
        self._environment = environment
        self._console = console
        self._health = health
        self._ready = ready
        self._grace = grace
        self._hang_reports = hang_reports
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._gone: set[Child] = set()
        self._asked = -ECHO  # when the operator asked to stop
        self._served = False  # the server has been ready once

    def run(self) -> int:
        """Runs the server to its end. Returns the exit code: 0 after a stop that was asked for, 1 if a part failed, 2 if it failed
        by the operator's fault."""
        code = 1
        with signals() as inbox:
            try:
                for part in self._parts:
                    part.start(self._environment)
                # Threads from here on: a process with one thread forks most safely.
                threading.Thread(target=watch_signals, args=(inbox, self._events.put), daemon=True).start()
                if self._hang_reports is not None:
                    threading.Thread(target=watch_hang_reports, args=(self._hang_reports, self._events.put), daemon=True).start()
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
                case Part() as due:
                    code = self._restart(due)
                case Stage(text):
                    self._console.info(text)
                case Ready(part, attempt) if attempt == part.attempt:
                    self._came_up(part)
                case Signal(number):
                    self._asked = time.monotonic()
                    self._console.info(f"{signal.Signals(number).name}: {self._promise}; once more stops at once")
                    code = self._stop(self._grace)
                case Hung(replica, since, text):
                    group = self._groups.get(replica)
                    if group is not None and group.children and since >= group.started:
                        self._console.error(f"the router has lost {group.name}: {text}")
                        code = self._died(group, 1)
                case RemoteEvent(part, what):
                    code = self._heed(part, part.hear(what))
                case Child() as child:
                    self._gone.add(child)
                    own = next((part for part in self._parts if child in part.children), None)
                    if own is not None:  # else we have killed it
                        code = self._fell(own, child)
        return code

    def _next(self) -> Event | Part:
        """The next event, or a part that is due to be restarted before one comes."""
        parts: dict[float, Part] = {part.due: part for part in self._parts if part.due is not None}
        if not parts:
            return self._events.get()
        due = min(parts)
        try:
            return self._events.get(timeout=max(0.0, due - time.monotonic()))
        except queue.Empty:
            return parts[due]

    def _begin(self) -> None:
        """The server is ready for the first time."""
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
            self._console.info(f"{which}ready again after {time.monotonic() - part.lost:.1f} s")
        part.lost = 0.0

    def _heed(self, part: Part, outcome: Outcome) -> int | None:
        """Handles what a part concluded from another machine's message. Returns an exit code if the server ends."""
        match outcome:
            case Failed(text, exit_code, in_vain):
                self._console.error(text)
                if not in_vain:
                    return self._died(part, exit_code)
                self._stop(0)
                return exit_code
            case StartNow() if not part.children and part.due is None:
                return self._restart(part)
            case StopRequested(text):
                self._asked = time.monotonic()
                self._console.info(f"{text}: {self._promise}; a signal here stops at once")
                return self._stop(self._grace)
        return None

    def _fell(self, part: Part, child: Child) -> int | None:
        """Handles the unexpected end of one of a part's processes. If it was starting, its verdict is printed last, below what
        others log while they are stopped."""
        if self._served:
            self._console.error(child.verdict())
        code = self._died(part, child.process.returncode)
        if not self._served:
            self._console.error(child.verdict())
        return code

    def _died(self, part: Part, exit_code: int) -> int | None:
        """Handles the death of a part: schedules a restart, or gives it up. Returns an exit code if the server ends."""
        now = time.monotonic()
        part.lost = part.lost or now
        if self._router is None and now > part.started + WINDOW:
            part.restarts.ready()  # nobody reports readiness then, but it has lived long enough
        delay = part.restarts.died(now) if self._served and exit_code != 2 else None
        if delay is None:
            return self._give_up(part, exit_code)
        if not part.kill():
            self._console.error(f"{part.name} can't be killed: the server ends")
            return 1
        part.due = now + delay
        self._console.info(
            f"starting {part.name} again {f'in {delay:g} s' if delay else 'now'}: restart {part.restarts.count} of at most "
            f"{part.restarts.limit} within {WINDOW / 60:g} minutes"
        )
        return None

    def _give_up(self, part: Part, exit_code: int) -> int | None:
        """Gives a part up. Returns an exit code if the server cannot do without it."""
        part.hopeless = True
        spared = self._served and part is not self._router and not all(group.hopeless for group in self._groups.values())
        if self._served and exit_code != 2:
            why = f"died more than {part.restarts.limit} times within {WINDOW / 60:g} minutes (--max-restarts)"
            self._console.error(f"{part.name} {why}: {'the other replicas go on' if spared else 'the server ends'}")
        # Ranks waiting for a lost one may do so for long, and so would the router's streams, which are to get an error.
        gone = self._served and part is not self._router and part.kill()
        if spared and gone:
            return None
        self._stop(0)
        return 2 if exit_code == 2 else 1

    def _restart(self, part: Part) -> int | None:
        """Starts a part again. Returns an exit code if the server ends, since that has failed too often."""
        try:
            part.start(self._environment)
        except OSError as error:  # no memory, too many processes
            self._console.error(f"{part.name} can't be started: {error}")
            return self._died(part, 1)
        self._follow(part)
        if part is self._router:
            self._watch(part, READY, NOTICE)
        elif self._router is not None and self._served:  # otherwise it is still watched from its start
            [name] = [name for name, group in self._groups.items() if group is part]
            self._watch(part, f"{READY}?group={name}", NOTICE)
        return None

    def _follow(self, part: Part) -> None:
        for child in part.children:
            processes.follow(child, self._console, self._events.put)

    def _watch(self, part: Part, path: str, delay: float) -> None:
        """Starts a thread that puts Ready when `path` answers 200, unless the part dies before."""
        part.attempt = attempt = part.attempt + 1

        def watch() -> None:
            time.sleep(delay)
            watch_health(*self._health, path, self._events.put, lambda: part.attempt == attempt)
            self._events.put(Ready(part, attempt))

        threading.Thread(target=watch, daemon=True).start()

    @property
    def _promise(self) -> str:
        """What will happen to streams when the operator stops the server, for the log."""
        if not self._served:
            return "it ends before it was ready"
        if self._router is None:
            return "streams go on elsewhere, if the router has another replica (POST /admin/replicas/NAME/drain there comes first)"
        return f"running streams get up to {self._grace:g} s"

    def _stop(self, grace: float) -> int:
        """Stops the router first, since draining needs the shards; then the shards, rank 0 last, as the others follow it.

        Returns 0, or 1 if they were not given their time.
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
        """Waits until all `children` have ended. Returns False when the time is up, or when a second signal comes."""
        deadline = time.monotonic() + seconds
        while not self._gone.issuperset(children):
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                late = ", ".join(child.name for child in children if child not in self._gone)
                self._console.error(f"{late} did not stop within {seconds:g} s: killed")
                return False
            if isinstance(event, Signal) and time.monotonic() > self._asked + ECHO:
                self._console.error("stopped at once: running streams are cut off")
                return False
            if isinstance(event, Child):
                self._gone.add(event)
                if event not in children:
                    self._lost_meanwhile(event)
            if isinstance(event, RemoteEvent) and isinstance(lost := event.part.hear(event.what), Failed):
                self._console.error(lost.text)
                event.part.kill()  # then the router ends its streams with an error
        return True

    def _lost_meanwhile(self, child: Child) -> None:
        """Handles the unexpected end of a process while others are waited for. The rest of its part is killed: ranks waiting for a
        lost one may do so for long, and the router's streams with them."""
        part = next((part for part in self._parts if child in part.children), None)
        # else we have killed it, or the server ends because of a failure that was reported
        if part is not None and self._asked > 0:
            self._console.error(child.verdict())
            part.kill()
