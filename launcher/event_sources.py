"""Event sources of the launcher's queue, run on threads: signals, the router's reports of hung shards, and readiness polling."""

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

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # signals that ask to stop
ECHO = 0.5  # seconds in which a second signal counts as the first: `timeout` and others pass on what the terminal sends to all
POLL = 0.05  # seconds between two polls of /health while the model loads
AWAY = 1.0  # and while the router has no replica of the rank group
HEALTH, READY = "/health", "/health/ready"  # paths polled until they answer 200: at first, and after a restart


@contextmanager
def signals() -> Iterator[socket.socket]:
    """Inside the context, signals that ask to stop are written to the socket, each as a byte of its number.

    A Python handler would not do: one that arrives in the moment before the main thread waits for the queue runs only when that
    wait is over.
    """
    inbox, outbox = socket.socketpair()
    outbox.setblocking(False)
    # nohup ignores SIGHUP for us, on purpose. SIGINT is ignored for whatever a script starts with `&`, not on purpose.
    wanted = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, frame: None) for number in wanted}
    signal.set_wakeup_fd(outbox.fileno())
    try:
        yield inbox
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        outbox.close()  # so that the thread that reads the inbox ends


def watch_signals(inbox: socket.socket, put: Callable[[Signal], None]) -> None:
    with inbox:
        while numbers := inbox.recv(16):
            for number in numbers:
                if number in SIGNALS:
                    put(Signal(number))


def watch_hang_reports(path: Path, put: Callable[[Hung], None]) -> None:
    """Puts a Hung for each line of the pipe: see `RouterConfig.hang_reports`. It is opened for writing too, or it would end with a
    router."""
    with os.fdopen(os.open(path, os.O_RDWR), encoding="utf-8", errors="replace") as pipe:
        for line in pipe:
            replica, since, text = (*line.rstrip("\n").split(" ", 2), "", "")[:3]
            with suppress(ValueError):
                put(Hung(replica, float(since), text))


def watch_health(host: str, port: int, path: str, put: Callable[[Stage], None], wanted: Callable[[], bool]) -> None:
    """Polls until the answer is 200 or `wanted` is False: 404 is that of a replica that has left the router, and may join again.
    Puts a Stage when a new one is named."""
    last = ""
    while wanted():
        status, stage = health(host, port, path)
        if status == 200:
            return
        kind = re.sub(r"[\d.,]+ ?%?", "", stage)  # "loading weights 40 %" is the same stage as 30 %
        if stage and kind != last:
            put(Stage(stage))
            last = kind
        time.sleep(AWAY if status == 404 else POLL)


def health(host: str, port: int, path: str = HEALTH) -> tuple[int, str]:
    """Status of a probe and the stage that it names; (0, "") while nobody answers."""
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
