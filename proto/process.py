"""Process setup common to all of ours: death with the parent, logging, available memory.

Does not know what the process is for.
"""

import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PROC = Path("/proc")
SYSTEM = Path("/sys")


def die_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends. To be called first of all: a parent that has died before is
    not noticed."""
    bound_to(os.getppid())()


def bound_to(parent: int) -> Callable[[], None]:
    """A function that a child calls, perhaps before its program begins: from then on the kernel kills the child when its parent
    ends, however it ends. It does nothing outside Linux.

    The kernel regards the *thread* that started a child as its parent, so that has to be one that stays.
    """
    if not sys.platform.startswith("linux"):
        return lambda: None
    libc = ctypes.CDLL(None, use_errno=True)  # here, since nothing should be loaded between fork and exec

    def bind() -> None:
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"prctl: {os.strerror(error)}")
        if os.getppid() != parent:  # it died before that
            os._exit(1)

    return bind


def configure_logging(name: str, json_output: bool, level: str = "info", context: Callable[[], Mapping[str, str]] = dict) -> None:
    """Sends all of stdlib logging to stdout, from `level` on: `2026-11-21T02:30:00.123Z INFO router: message`.

    JSON lines also have what `context` returns while they are written, and what is passed as `extra={"values": {...}}`.
    """
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_JsonLine(name, context) if json_output else _Line(name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def moment(seconds: float) -> str:
    """A Unix time as in log lines."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(seconds % 1 * 1000):03d}Z"


class _Line(logging.Formatter):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        line = f"{moment(record.created)} {record.levelname} {self._name}: {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonLine(_Line):
    def __init__(self, name: str, context: Callable[[], Mapping[str, str]]) -> None:
        super().__init__(name)
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        values = {
            "timestamp": moment(record.created),
            "level": record.levelname,
            "name": self._name,
            "message": record.getMessage(),
            **self._context(),
            **getattr(record, "values", {}),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values)


def available_memory() -> int:
    """MemAvailable, or what the container's limit leaves, whichever is less."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in lines_of(PROC / "meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
    return min([available, *_cgroup_headroom()])


def _cgroup_headroom() -> list[int]:
    """Limit minus use, for every control group above us (version 2), or for ours (version 1)."""
    room = []
    for folder in control_groups("memory"):
        for limit, use, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            text = "".join(lines_of(folder / limit)).strip()
            if text.isdigit():
                used = int("".join(lines_of(folder / use)) or 0)
                # Cached files count as used, but are reclaimable.
                used -= sum(int(line.split()[1]) for line in lines_of(folder / "memory.stat") if line.split()[0] == cache)
                room.append(max(0, int(text) - used))
    return room


def control_groups(controller: str) -> list[Path]:
    """Our control group and those above it, as far as visible in this container."""
    root = SYSTEM / "fs/cgroup"
    folders = []
    for line in lines_of(PROC / "self/cgroup"):
        _, controllers, path = line.strip().split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        own = base / path.lstrip("/")
        folders += [folder for folder in (own, *own.parents) if folder.is_relative_to(base) and folder.is_dir()]
    return folders


def lines_of(path: Path) -> list[str]:
    """The lines of a file of /proc or /sys; [] where the kernel or the container has no such file."""
    try:
        return os.fsdecode(path.read_bytes()).splitlines()  # a command line or a group's name may be no UTF-8
    except OSError:
        return []
