"""Timing harness of `gpu.py`: repetitions timed by CUDA events, from CUDA graphs, over more memory than the cache holds.

What is measured is a list of calls that do the same work on different memory. All of them, repeated until they take some
milliseconds, are captured in one graph: so neither the CPU's launches nor what an earlier call left in the cache make a call faster
or slower than it is in a step. Where a call can't be captured, calls are timed one by one, with the cache flushed before. On a CPU,
where only Triton's interpreter runs, everything is called once, to see that it runs.
"""

import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from penstock.benchmarks.gpu_report import Line, Timing, failed, timing

Call = Callable[[], object]

GRAPH = 3e-3  # seconds that one replay should take
MOST_CALLS = 400  # in one graph
SECONDS = 0.3  # of repetitions
MOST, LEAST = 50, 5  # repetitions
COPIES = 64  # most copies of a call's memory
LAUNCHING = 1_000_000  # cycles, half a millisecond: longer than a CPU takes to launch a graph


class Bench:
    """A device, its measured ceilings, and the time that is left."""

    def __init__(
        self, device: torch.device, tiny: bool, tell: Callable[[Line], object], seconds: float = math.inf, effort: float = 1.0
    ) -> None:
        """tell: called with every line; seconds: after which a section should end; effort: factor for the time of repetitions."""
        self.device = device
        self.tiny = tiny
        self.effort = effort
        self.note = ""  # what is wrong with the ceilings
        self._tell = tell
        self.copy_rate = self.read_rate = math.nan  # bytes a second
        self.product_rate = math.nan  # FLOP a second
        self.later: list[Callable[[Bench], object]] = []  # parts of a section that run after all others
        self._stop = time.perf_counter() + seconds
        cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 1 << 10
        self._scratch = torch.empty(2 * cache if device.type == "cuda" else 1, dtype=torch.uint8, device=device)
        self._rotated = 4 * cache

    def add(self, line: Line) -> None:
        """Reports a line, and prints it to show progress."""
        if self.tiny and not line.check:
            line = replace(line, goal=None)  # speeds of an interpreter mean nothing
        if self.note and not line.check:
            line = replace(line, goal=None, note=f"{line.note} {self.note}".strip())
        self._tell(line)
        ratio = "" if line.ratio is None else f"{line.ratio:.3f} {line.against}"
        took = "" if line.timing is None else f"{line.timing.seconds * 1e6:.1f} us"
        print(f"    {line.what}: {' '.join(filter(None, [took, ratio, line.verdict, line.note]))}", flush=True)

    def each(self, section: str, parts: Sequence[Callable[["Bench"], object]], whole: bool = False) -> None:
        """Runs parts of a section, until its time is over unless `whole`. A failure of one is reported, and the others run."""
        for part in parts:
            if not whole and self.late():
                return
            try:
                part(self)
            except Exception as problem:
                traceback.print_exc()
                self.add(failed(section, getattr(part, "__name__", "a part"), problem, 1.0))

    def late(self) -> bool:
        """Whether the section's time is over: what is left of it is left out."""
        return self.seconds_left() <= 0

    def seconds_left(self) -> float:
        """Seconds until the section should end."""
        return self._stop - time.perf_counter()

    def copies(self, size: int) -> int:
        """How many copies of `size` bytes are needed, for none of them to be in the cache when its turn comes again."""
        return 2 if self.tiny else max(1, min(COPIES, -(-self._rotated // max(size, 1))))

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, calls: Sequence[Call], graph: bool = True) -> Timing:
        """Time of one call. All calls are made at least once before."""
        for call in calls:
            call()
        self.synchronize()
        if self.device.type != "cuda":
            return timing([clocked(call) for call in calls], "wall")
        rough = min(_once(calls, self.flush) for _ in range(2)) / len(calls)
        if graph:
            try:
                return self._by_graph(calls, rough)
            except RuntimeError:  # it can't be captured: it copies from the host, or waits for the device
                self.synchronize()
        return self._one_by_one(calls, rough)

    def moved(self, section: str, what: str, calls: Sequence[Call], size: int, goal: float | None = None) -> Timing:
        """Times calls that have `size` bytes to move each, and reports their rate beside that of copies."""
        took = self.time(calls)
        rate = size / took.seconds
        self.add(
            Line(
                section=section,
                what=what,
                timing=took,
                value=rate / 1e9,
                unit="GB/s",
                ratio=rate / self.copy_rate,
                against="of the copy bandwidth",
                goal=goal,
                note="too little to fill the device" if size < 8 << 20 else "",
            )
        )
        return took

    def flush(self) -> None:
        """Evicts everything that a call needs from the cache."""
        self._scratch.zero_()

    def occupy(self) -> None:
        """`flush`, and keeps the device busy until the host has launched a graph, so that the graph starts without a gap."""
        self.flush()
        if self.device.type == "cuda":
            torch.cuda._sleep(LAUNCHING)  # type: ignore[no-untyped-call]

    def _by_graph(self, calls: Sequence[Call], rough: float) -> Timing:
        most = max(1, MOST_CALLS // len(calls))
        rounds = max(1, min(most, round(GRAPH / (rough * len(calls)))))
        graph = _captured(calls, rounds)
        took = min(_once([graph.replay], self.occupy) for _ in range(2))
        if took < GRAPH / 2 and rounds < most:  # launched one by one it took longer than from a graph
            graph.reset()
            rounds = min(most, round(rounds * GRAPH / took))
            graph = _captured(calls, rounds)
        count = rounds * len(calls)
        samples = self._repeat(lambda: _once([graph.replay], self.occupy) / count)
        graph.reset()
        return timing(samples, "graph")

    def _one_by_one(self, calls: Sequence[Call], rough: float) -> Timing:
        samples = self._repeat(lambda: sum(_once([call], self.flush) for call in calls) / len(calls))
        return timing(samples, "eager")

    def _repeat(self, sample: Callable[[], float]) -> list[float]:
        samples: list[float] = []
        began = time.perf_counter()
        while len(samples) < LEAST or (len(samples) < MOST and time.perf_counter() - began < SECONDS * self.effort):
            samples.append(sample())
        return samples


@contextmanager
def replaced(module: Any, name: str, value: object) -> Iterator[None]:
    """Replaces a module's attribute for a while."""
    honest = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, honest)


def clocked(call: Call) -> float:
    """Wall-clock seconds of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _captured(calls: Sequence[Call], rounds: int) -> torch.cuda.CUDAGraph:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
    except RuntimeError:
        _recover(graph, stream)
        raise
    graph.replay()
    return graph


_broken: list[torch.cuda.CUDAGraph] = []  # kept: torch's allocator still refers to them


def _recover(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """Recovers from a failed capture: torch is still on its stream, and refuses to draw random numbers outside of it."""
    _broken.append(graph)
    torch.cuda.set_stream(stream)
    generator = torch.cuda.default_generators[stream.device_index]
    generator.graphsafe_set_state(torch.Generator(stream.device).graphsafe_get_state())


def _once(calls: Sequence[Call], before: Call) -> float:
    """Seconds on the device between the first launch and the end of the last."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before()
    start.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
