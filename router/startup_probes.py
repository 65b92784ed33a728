"""Answers health probes while the router's own modules and the tokenizer are still being imported, which takes a second or two.

Standard library only, so that it is imported at once. It has three answers: unhealthy, not ready, and alive.
"""

import json
import selectors
import socket
import threading
from contextlib import suppress
from time import monotonic

LONGEST_HEAD = 8192  # bytes of a request that are read
PATIENCE = 0.2  # seconds that one client may take: the next one waits as long
SHORTEST = 0.001  # least timeout of a socket: 0 would mean non-blocking
STAGE = {"stage": "starting the router", "progress": None}
NOT_YET = {"error": "unhealthy", "error_type": "healthcheck", **STAGE}
NOT_READY = {"ready": False, **STAGE}
ALIVE = {"live": True}


class StartupProbes:
    """Answers on a listening socket, on a thread of its own, until `relieve` is called."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._bell, self._relief = socket.socketpair()
        self._thread = threading.Thread(target=self._stand, name="startup probes", daemon=True)
        self._thread.start()

    def relieve(self) -> None:
        """Stops: later connections are not answered here. May be called again."""
        self._relief.close()
        self._thread.join()

    def _stand(self) -> None:
        with self._bell, selectors.DefaultSelector() as selector:
            for source in (self._listening, self._bell):
                selector.register(source, selectors.EVENT_READ)
            while not any(key.fileobj is self._bell for key, _ in selector.select()):
                with suppress(OSError):  # the client left again
                    visitor, _ = self._listening.accept()
                    with visitor:
                        _answer(visitor)


def _answer(visitor: socket.socket) -> None:
    end = monotonic() + PATIENCE
    head = b""
    while b"\r\n\r\n" not in head and len(head) < LONGEST_HEAD:
        if head and monotonic() >= end:  # a client that has sent all of it at once may have waited for this thread
            return
        received = _receive(visitor, end)
        if not received:
            return
        head += received
    method, path, *_ = *head.split(b" ", 2), b"", b""
    alive = path.split(b"?")[0] == b"/health/live"
    content = json.dumps(ALIVE if alive else NOT_READY if path == b"/health/ready" else NOT_YET).encode()
    status = b"200 OK" if alive else b"503 Service Unavailable\r\nRetry-After: 1"
    length = b"Content-Length: %d\r\nContent-Type: application/json; charset=utf-8" % len(content)
    visitor.sendall(b"HTTP/1.1 %b\r\n%b\r\nConnection: close\r\n\r\n%b" % (status, length, b"" if method == b"HEAD" else content))
    visitor.shutdown(socket.SHUT_WR)
    # Unread data when a socket closes resets the connection, and the answer is lost.
    while monotonic() < end and _receive(visitor, end):
        pass


def _receive(visitor: socket.socket, end: float) -> bytes:
    """The next data. Raises TimeoutError if none comes by `end`."""
    visitor.settimeout(max(end - monotonic(), SHORTEST))
    return visitor.recv(LONGEST_HEAD)
