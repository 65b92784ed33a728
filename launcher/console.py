"""What the operator sees: our own lines, and those of the children with the name of the one who wrote them in front.

With `json_output` every line is a JSON object: a child's own passes unchanged, anything else is wrapped in one.
"""

import json
import sys
import threading
import time
from typing import TextIO

from ..proto.process import moment


class Console:
    """Whole lines only, from any thread."""

    def __init__(self, json_output: bool, out: TextIO | None = None, error: TextIO | None = None) -> None:
        self._json_output = json_output
        self._out = out or sys.stdout
        self._error = error or sys.stderr
        self._lock = threading.Lock()

    def say(self, message: str) -> None:
        """To stdout: how things go."""
        self._write(self._out, self._wrap("INFO", "launcher", message) if self._json_output else f"penstock: {message}")

    def complain(self, message: str) -> None:
        """To stderr: what went wrong."""
        self._write(self._error, self._wrap("ERROR", "launcher", message) if self._json_output else f"penstock: {message}")

    def relay(self, name: str, line: str, error: bool) -> None:
        """A line that the child called `name` wrote to its stdout, or (`error`) to its stderr."""
        stream = self._error if error else self._out
        if not self._json_output:
            self._write(stream, f"[{name}] {line}")
        elif line.startswith("{"):
            self._write(stream, line)
        else:
            self._write(stream, self._wrap("INFO", name, line))

    def _wrap(self, level: str, name: str, message: str) -> str:
        return json.dumps({"timestamp": moment(time.time()), "level": level, "name": name, "message": message}, ensure_ascii=False)

    def _write(self, stream: TextIO, line: str) -> None:
        with self._lock:
            try:
                stream.write(line + "\n")
                stream.flush()
            except OSError:
                # Whoever read our output has gone (`penstock serve | head`), or the disk is full. The server goes on without lines;
                # it is stopped by a signal.
                return
