"""What each of our processes does on its start: die with its parent, write a log. Does not know what the process is for."""

import ctypes
import json
import logging
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends, however it ends. Does nothing outside Linux.

    To be called first of all: a parent that has died before is not noticed. The kernel takes the *thread* that started this
    process for its parent, so the parent has to start it from a thread that stays.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl: {os.strerror(error)}")
    if os.getppid() != parent:  # it died between the two calls
        os.kill(os.getpid(), signal.SIGKILL)


def configure_logging(name: str, json_output: bool) -> None:
    """All of stdlib logging goes to stdout, from INFO on: `2026-11-21T02:30:00.123Z INFO router: message`."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_JsonLine(name) if json_output else _Line(name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)


def _moment(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


class _Line(logging.Formatter):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_moment(record)} {record.levelname} {self._name}: {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonLine(_Line):
    def format(self, record: logging.LogRecord) -> str:
        values = {
            "timestamp": _moment(record),
            "level": record.levelname,
            "name": self._name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values)
