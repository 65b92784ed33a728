"""The launcher's output: its own lines, and its children's with the name of the process in front.

With `json_output` every line is a JSON object: a child's own passes unchanged, anything else is wrapped in one.
"""

import atexit
import json
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from ..proto.process import moment

ROOM = 1 << 20  # characters of lines that wait for a slow reader
OWN = '{"timestamp": '  # so begin the JSON lines of our processes (`proto.process`); libraries print other things with braces
LAST_WORDS = 1.0  # seconds that lines still get when the process ends


class Console:
    """Writes whole lines from any thread. Once children run, `detach` keeps a slow reader of the output from blocking anybody."""

    def __init__(self, json_output: bool, out: TextIO | None = None, error: TextIO | None = None) -> None:
        self._json_output = json_output
        self._out = out or sys.stdout
        self._error = error or sys.stderr
        self._lock = threading.Lock()
        self._backlogs: dict[TextIO, LineBuffer] = {}  # by stream, once detached

    def detach(self) -> None:
        """From now on lines are written by threads, and nobody waits for them: a pipe that nobody reads, or a terminal halted with
        Ctrl-S, costs lines, which are counted. Otherwise the children would block in turn, the router with all its streams."""
        with self._lock:
            if self._backlogs:
                return
            out = LineBuffer(self._out, self._lost)
            # One thread where both go to the same place (`2>&1`): it keeps the order.
            error = out if _same(self._out, self._error) else LineBuffer(self._error, self._lost)
            self._backlogs = {self._out: out, self._error: error}
        atexit.register(self._finish)

    def info(self, message: str) -> None:
        """To stdout: progress."""
        self._write(self._out, self._own("INFO", message))

    def error(self, message: str) -> None:
        """To stderr: errors."""
        self._write(self._error, self._own("ERROR", message))

    def relay(self, name: str, line: str, error: bool) -> None:
        """Passes on a line that the child called `name` wrote to its stdout, or (`error`) to its stderr."""
        stream = self._error if error else self._out
        if not self._json_output:
            self._write(stream, f"[{name}] {line}")
        elif line.startswith(OWN):
            self._write(stream, line)
        else:
            self._write(stream, self._wrap("INFO", name, line))

    def _own(self, level: str, message: str) -> str:
        """A line of the launcher itself."""
        return self._wrap(level, "launcher", message) if self._json_output else f"penstock: {message}"

    def _wrap(self, level: str, name: str, message: str) -> str:
        return json.dumps({"timestamp": moment(time.time()), "level": level, "name": name, "message": message})

    def _lost(self, lines: int) -> str:
        return self._own("WARNING", f"{lines} lines were dropped here: nobody read them in time")

    def _finish(self) -> None:
        deadline = time.monotonic() + LAST_WORDS
        for backlog in self._backlogs.values():
            backlog.finish(deadline)

    def _write(self, stream: TextIO, line: str) -> None:
        with self._lock:
            if self._backlogs:
                self._backlogs[stream].put(line)
                return
            # The reader of our output has gone (`penstock serve | head`), or the disk is full. The server goes on without output;
            # it is stopped by a signal.
            with suppress(OSError):
                stream.write(line + "\n")
                stream.flush()


class LineBuffer:
    """A bounded buffer of lines that a thread writes. Lines that find no room are dropped, and so are all until the buffered ones
    are written: one gap, which is reported, instead of many."""

    def __init__(self, stream: TextIO, lost: Callable[[int], str]) -> None:
        """lost: the line that reports how many are missing."""
        self._stream = stream
        self._lost = lost
        self._lines: deque[str] = deque()
        self._size = 0  # of the lines with their ends, including the one being written
        self._dropped = 0  # since the last buffered line
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, line: str) -> None:
        """Adds a line, without blocking."""
        text = line + "\n"
        with self._changed:
            if self._dropped or (self._size and self._size + len(text) > ROOM):
                self._dropped += 1
                return
            self._lines.append(text)
            self._size += len(text)
            self._changed.notify_all()

    def finish(self, deadline: float) -> None:
        """Returns when all is written, or at the deadline."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._size or self._dropped), timeout=max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._lines or self._dropped))
                if self._lines:
                    text = self._lines.popleft()
                else:
                    text = self._lost(self._dropped) + "\n"
                    self._size += len(text)
                    self._dropped = 0
            with suppress(OSError, ValueError):  # as above, or the stream was closed
                self._write(text)
            with self._changed:
                self._size -= len(text)
                self._changed.notify_all()

    def _write(self, text: str) -> None:
        try:
            descriptor = self._stream.fileno()
        except OSError:  # a stream in memory
            self._stream.write(text)
            return
        # Past the stream object: one that is being written to when the process ends would keep Python from ending cleanly.
        left = memoryview(text.encode(self._stream.encoding, "backslashreplace"))
        while left:
            try:
                left = left[os.write(descriptor, left) :]
            except BlockingIOError:  # another process that shares the file has made it non-blocking
                waiting = select.poll()
                waiting.register(descriptor, select.POLLOUT)
                waiting.poll()


def _same(one: TextIO, other: TextIO) -> bool:
    """Whether both go to the same file, pipe or terminal."""
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except (OSError, ValueError):
        return one is other
