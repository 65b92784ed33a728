"""Server process for benchmarks, and its CPU time, which neighbours on a shared machine disturb least. Linux only."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.bench.local_server import LocalServer, status


@contextmanager
def serving(*flags: str) -> Iterator[LocalServer]:
    """A ready `penstock serve` with these flags; it ends afterwards."""
    with tempfile.TemporaryDirectory(prefix="penstock-benchmark-") as folder, LocalServer(flags, Path(folder) / "log") as server:
        yield server
        server.stop()


def cpu_of(fields: list[str]) -> float:
    """CPU seconds, of a `status`."""
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tree_cpu(root: int) -> float:
    """CPU seconds that a process and its living descendants have used."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                values = status(entry)
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = int(values[1])
            used[int(entry.name)] = cpu_of(values)

    def below(pid: int) -> bool:
        while pid in parents and pid != root:
            pid = parents[pid]
        return pid == root

    return sum(seconds for pid, seconds in used.items() if below(pid))
