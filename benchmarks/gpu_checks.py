"""Correctness checks of every kernel against float64, or against the plain torch branch on the CPU, before anything is timed.

Shapes are drawn anew in each run, from a seed that is printed. Output buffers are filled with NaN before. An error is given as a
share of its tolerance: |found - expected| / (tolerance + tolerance * |expected|), the largest anywhere.
"""

import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from penstock.benchmarks import gpu_checks_attention, gpu_checks_layers, gpu_checks_products, gpu_checks_sampling
from penstock.benchmarks.gpu_comparisons import Check
from penstock.benchmarks.gpu_measure import Bench
from penstock.benchmarks.gpu_report import Line, failed
from penstock.kernels import dispatch

SECTION = "correctness"
WORKERS = 8
THREADS = 2  # of each, for what is computed on the host
PATIENCE = 30.0  # seconds that checks may exceed the section's time
LONGEST = 90.0  # seconds until the next result, or a process counts as killed


def measure(bench: Bench, seed: int) -> None:
    """A line per check; errors beyond the tolerance are WRONG. On a GPU in several processes: most of the time goes into
    compiling."""
    print(f"    seed {seed}", flush=True)
    names = [*checks(bench)]
    if bench.device.type != "cuda":
        for name in names:
            bench.add(checked(bench, seed, name))
        return
    workers = max(1, min(WORKERS, (os.cpu_count() or 2) // 2))
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=1) as pool:
        stop = time.perf_counter() + bench.seconds_left()
        gather(bench, pool.imap_unordered(_worked, [(stop, seed, name) for name in names]), names)


def gather(bench: Bench, found: Any, names: Sequence[str]) -> None:
    """Reports lines as they come. found: an iterator of a pool, which waits for ever for a process that was killed.

    A check that hangs must hide no others: those missing in the end are reported by name.
    """
    missing = dict.fromkeys(names)
    while missing:
        try:
            line = found.next(timeout=max(1.0, min(LONGEST, bench.seconds_left() + PATIENCE)))
        except multiprocessing.TimeoutError:
            break
        del missing[line.what]
        bench.add(line)
    for name in missing:
        bench.add(failed(SECTION, name, "its process was killed, or takes far too long", 1.0, check=True))


def _worked(what: tuple[float, int, str]) -> Line:
    """Runs in a process of a pool; the clock is common to all processes."""
    stop, seed, name = what
    torch.set_num_threads(THREADS)
    with torch.inference_mode():
        return checked(Bench(torch.device("cuda"), False, print, stop - time.perf_counter()), seed, name)


def checked(bench: Bench, seed: int, name: str) -> Line:
    """Runs one check. What it does depends on the seed and its name alone."""
    chance = random.Random(f"{seed} {name}")
    torch.manual_seed(chance.randrange(1 << 32))
    try:
        with dispatch.forced("triton"):
            found = checks(bench)[name](bench, chance)
    except Exception as problem:  # the others still run
        traceback.print_exc()
        return failed(SECTION, name, problem, 1.0, check=True)
    return Line(section=SECTION, what=name, ratio=found, against="of the tolerance", goal=1.0, most=True, check=True)


def checks(bench: Bench) -> dict[str, Check]:
    """All checks, by name."""
    parts = gpu_checks_attention, gpu_checks_layers, gpu_checks_products, gpu_checks_sampling
    return {name: check for part in parts for name, check in part.checks(bench).items()}
