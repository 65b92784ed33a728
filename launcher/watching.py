"""What other threads put into a launcher's queue of events: signals, complaints of the router, how the server comes up."""

import http.client
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .parts import Hung, Signal, Stage

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # that ask to stop
ECHO = 0.5  # seconds in which a second signal is the first again: `timeout` and others pass on what the terminal sends to all
POLL = 0.05  # seconds between two looks at /health while the model loads
HEALTH, READY = "/health", "/health/ready"  # what is asked until it answers 200: at first, and after something has died


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


def watch_signals(inbox: socket.socket, put: Callable[[Signal], None]) -> None:
    with inbox:
        while numbers := inbox.recv(16):
            for number in numbers:
                if number in SIGNALS:
                    put(Signal(number))


def watch_complaints(path: Path, put: Callable[[Hung], None]) -> None:
    """Each line of the pipe is one: see `RouterConfig.complaints`. Opened to be written as well, else it ends with a router."""
    with os.fdopen(os.open(path, os.O_RDWR), encoding="utf-8", errors="replace") as pipe:
        for line in pipe:
            replica, since, text = (*line.rstrip("\n").split(" ", 2), "", "")[:3]
            with suppress(ValueError):
                put(Hung(replica, float(since), text))


def watch_health(host: str, port: int, path: str, put: Callable[[Stage], None], wanted: Callable[[], bool]) -> None:
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
