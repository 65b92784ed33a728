"""A process whose lines a test reads."""

import re
import subprocess
from collections.abc import Sequence


class Reading:
    """A harness process, and what it has written so far."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []

    def until(self, pattern: str) -> str:
        """Reads on to the line that matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if re.search(pattern, line):
                return line
        raise AssertionError(f"no {pattern!r} in {self.lines}")

    def end(self) -> int:
        """Reads the rest and waits. The exit code."""
        assert self.process.stdout is not None
        self.lines += [line.rstrip() for line in self.process.stdout]
        return self.process.wait(timeout=30)
