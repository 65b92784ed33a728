"""A subprocess whose output a test reads line by line."""

import re
import subprocess
from collections.abc import Sequence


class MonitoredProcess:
    """A subprocess, and the lines that it has written so far."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []

    def read_until(self, pattern: str) -> str:
        """Reads on until a line matches `pattern`, and returns that line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if re.search(pattern, line):
                return line
        raise AssertionError(f"no {pattern!r} in {self.lines}")

    def wait_for_exit(self) -> int:
        """Reads the rest of the output and waits for the exit; returns the exit code."""
        assert self.process.stdout is not None
        self.lines += [line.rstrip() for line in self.process.stdout]
        return self.process.wait(timeout=30)
