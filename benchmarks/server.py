"""A server that a benchmark asks, and the CPU time that it takes: neighbours on a shared machine disturb that least. Linux only."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.bench.local import Local


@contextmanager
def serving(*flags: str) -> Iterator[Local]:
    """`penstock serve` with these flags, ready; it ends afterwards."""
    with tempfile.TemporaryDirectory(prefix="penstock-benchmark-") as folder, Local(flags, Path(folder) / "log") as server:
        yield server
        server.stop()


def tree_cpu(root: int) -> float:
    """CPU seconds that a process and its living descendants have used."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    ticks = os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                values = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = int(values[1])
            used[int(entry.name)] = (int(values[11]) + int(values[12])) / ticks

    def below(pid: int) -> bool:
        while pid in parents and pid != root:
            pid = parents[pid]
        return pid == root

    return sum(seconds for pid, seconds in used.items() if below(pid))
