"""Profile of decode steps: the kernels of steps of an 8 B model with random weights, and their times, by torch's profiler.

Steps run from a graph, as they do in a server. Reported is a kernel's share of all kernels' time; the gaps between them are in
`gpu.py`'s section `model`.
"""

import tempfile
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from penstock.benchmarks.gpu_measure import Bench
from penstock.benchmarks.gpu_model import GOALS, begin, extent_of, made_up
from penstock.benchmarks.gpu_report import Line, Timing
from penstock.kernels import dispatch
from penstock.shard.engine import Engine
from penstock.shard.graphs import Recorder

SECTION = "kernels of a decode step, 8 B"
STEPS, WARM = 10, 3
MOST = 16  # kernels that are listed
NAME = 70  # characters of a name


def measure(bench: Bench) -> None:
    """Each case that has a goal."""
    with dispatch.forced("triton"), tempfile.TemporaryDirectory(prefix="penstock-gpu-") as folder:
        engine = made_up(bench, Path(folder))
        for rows, context in [(2, 40)] if bench.tiny else GOALS:
            if bench.late():
                return
            extent = extent_of(rows, context + 2 * (STEPS + WARM))
            engine.resize(extent.pages)
            begin(engine, rows, context)
            if bench.device.type == "cuda":
                engine.record(Recorder(), extent, lambda stage: None)
            _profile(bench, engine, f"{rows} x {context}")
            engine.resize(0)


def _profile(bench: Bench, engine: Engine, what: str) -> None:
    _steps(engine, WARM)
    activity = ProfilerActivity.CUDA if bench.device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as found:
        _steps(engine, STEPS)
        bench.synchronize()
    kernels = [(average.key, average.self_device_time_total / 1e6 / STEPS, average.count) for average in found.key_averages()]
    kernels.sort(key=lambda kernel: -kernel[1])
    all_of_them = sum(seconds for _, seconds, _ in kernels)
    for name, seconds, count in kernels[:MOST]:
        mean = seconds * STEPS / count
        each = Timing(mean, mean, mean, count, "graph")
        share = seconds / all_of_them if all_of_them else 0.0
        line = Line(section=SECTION, what=f"{what}: {name[:NAME]}", timing=each, value=count / STEPS, unit="a step", ratio=share)
        bench.add(line)
    bench.add(Line(section=SECTION, what=f"{what}: all kernels", value=all_of_them * 1e3, unit="ms a step"))


def _steps(engine: Engine, count: int) -> None:
    for step in [engine.begin_decode([0]) for _ in range(count)]:
        engine.land()
        step.result()
