"""Everything that is said of penstock on a GPU, measured in one go: correctness first, then speed, with ceilings of the same run.

    make bench WHAT=gpu                                   all sections, within ten minutes on an H200
    python benchmarks/gpu.py --only attention,model       some of them; ceilings are measured in any case
    python benchmarks/gpu.py --json F --markdown F        numbers, and tables for docs/performance.md
    python benchmarks/gpu.py --device cpu --tiny          without a GPU: does it run? (in Triton's interpreter; speeds mean nothing)

    ceilings      copy and read bandwidth, products of matrices, launches
    correctness   every kernel against float64, or against the plain branch on a CPU; new shapes in each run
    attention     decode, prefill, skewed rows, trees, shared prefixes; beside torch's SDPA and FlexAttention, FlashInfer, and the
                  Triton kernels of vLLM and SGLang, where they are installed (gpu_peers.py says how)
    operations    norms, SwiGLU, rotary, page copies against their bytes; sampling and beams against one read of the logits
    tokens        greedy tokens of the demo model by Triton and by plain torch
    model         whole decode steps of an 8 B model with made-up weights
    server        the share of time that the device waits between steps, with HTTP and 256 streams in front
    tuning        only if asked for, instead of the others: what would be faster with other tiles
    profile       only if asked for: the kernels of decode steps of the model, and how long each works

How it is measured stands in gpu_measure.py. Medians, with the 10th and 90th percentile. Every section is a process of its own: one
that fails, or takes far too long, says so, and the others run. The exit code is 1 if a result was wrong (not if a speed goal was
missed). FlashInfer compiles for minutes when it is used first: once with --only attention before the run that counts.

Where the package isn't installed: `mkdir -p build && ln -sfn .. build/penstock`, and PYTHONPATH=$PWD/build. The section `server`
needs all that pyproject.toml lists, `tokens` and `model` need llguidance, all of them torch, triton, numpy and safetensors.
gpu_first.sh runs all of it, and the tests of kernels, on a machine that is there for some minutes. Numbers are written after every
section, so that a run that is ended early leaves those it has.
"""

import argparse
import importlib
import math
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.benchmarks import gpu_report as report

BEGAN = time.perf_counter()  # before torch is imported, which may take a quarter of a minute
MINUTES = 9.5  # of all sections together
GRACE = 60.0  # seconds that a section may exceed its time before it is killed: it checks the clock between measurements
SLACK = 15.0  # seconds that the last sections may exceed the time of all
LEAST = 20.0  # least seconds for which a section is started: starting Python, torch and CUDA takes ten
Rates = tuple[float, float, float]  # of copies and reads (bytes a second) and of products (FLOP a second)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the run, and the function that measures it."""

    share: float  # of the time of a whole run, roughly
    module: str
    function: str = "measure"
    check: bool = False  # its results must be right
    usual: bool = True  # it runs unless others are asked for
    patience: float = 0.0  # seconds after which it is killed; 0: by its share


SECTIONS = {
    "ceilings": Section(0.05, "gpu_ceilings"),
    "correctness": Section(0.22, "gpu_checks", check=True),  # most of it is compiling
    "attention": Section(0.28, "gpu_attention"),
    "operations": Section(0.1, "gpu_operations"),
    "tokens": Section(0.08, "gpu_model", "tokens", check=True),
    "model": Section(0.12, "gpu_model", "steps"),
    "server": Section(0.15, "gpu_server", patience=400.0),  # it has time limits of its own, and ends what it has started
    "tuning": Section(0.95, "gpu_tuning", usual=False),
    "profile": Section(0.1, "gpu_profile", usual=False),
}
USUAL = [name for name, section in SECTIONS.items() if section.usual]


def main() -> int:
    """See the module. Exit code 1 if anything was wrong."""
    options = _options()
    from penstock.benchmarks import gpu_report as report

    lines: list[report.Line] = []
    facts: dict[str, str] = {}
    rates: Rates | None = None
    left = [name for name in SECTIONS if name == "ceilings" or name in options.only]
    while left:
        seconds, patience = times(left, BEGAN + 60 * options.minutes - time.perf_counter())
        name = left.pop(0)
        if patience < LEAST:  # a run that is killed from outside would have no table at all
            lines.append(report.failed(name, "the section", "no time was left for it", 1.0, check=SECTIONS[name].check))
            continue
        print(f"{name} (about {seconds:.0f} s)", flush=True)
        for kind, value in _isolated(name, options, rates, seconds, patience):
            if kind == "line":
                lines.append(value)
            elif kind == "facts":
                facts |= value
            else:
                rates = value
        _save(options, lines, facts)  # a run that is killed from outside keeps what it has measured
    print(f"{report.table(lines)}\n\n{report.digest(lines, facts)}")
    return report.sum_up(lines)


def times(left: Sequence[str], remaining: float) -> tuple[float, float]:
    """Seconds that the first of the sections `left` should take, and after which it is killed. remaining: of all sections' time."""
    seconds = max(0.0, remaining) * SECTIONS[left[0]].share / sum(SECTIONS[name].share for name in left)
    return seconds, min(SECTIONS[left[0]].patience or seconds + GRACE, remaining + SLACK)


def _save(options: argparse.Namespace, lines: "Sequence[report.Line]", facts: dict[str, str]) -> None:
    from penstock.benchmarks import gpu_report as report

    if options.json:
        report.save(options.json, lines, {**facts, "seed": options.seed, "command": " ".join(sys.argv)})
    if options.markdown:
        words = [facts.get("device", "?"), f"torch {facts.get('torch', '?')}", f"triton {facts.get('triton', '?')}"]
        options.markdown.write_text(report.markdown(lines, ", ".join(words)))


def _isolated(
    name: str, options: argparse.Namespace, rates: Rates | None, seconds: float, patience: float
) -> list[tuple[str, Any]]:
    """A section's results, from a process of its own: an illegal memory access ends all work of its process on the device.
    patience: seconds after which it is killed."""
    from penstock.benchmarks.gpu_report import failed

    began = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, options, rates, seconds, sender))
    process.start()
    sender.close()
    told: list[tuple[str, Any]] = []
    why = ""
    try:
        with suppress(EOFError):
            while receiver.poll(max(0.0, began + patience - time.perf_counter())):
                told.append(receiver.recv())
            why = "it took far too long and was ended"
    finally:
        if why or sys.exc_info()[0] is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    if not why and process.exitcode:
        why = f"its process ended with exit code {process.exitcode}"
    if why:
        told.append(("line", failed(name, "the section", why, 1.0, check=SECTIONS[name].check)))
    print(f"  {name}: {time.perf_counter() - began:.0f} s {why}", flush=True)
    return told


def _child(name: str, options: argparse.Namespace, rates: Rates | None, seconds: float, sender: Connection) -> None:
    os.setsid()  # so that what it starts can be killed with it
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined: before any of the imports below
    import torch

    from penstock.benchmarks import gpu_ceilings, gpu_measure, gpu_report

    if options.peers:
        sys.path.append(str(options.peers.resolve()))
    device = torch.device(options.device)
    bench = gpu_measure.Bench(device, options.tiny, lambda line: sender.send(("line", line)), seconds, options.minutes / MINUTES)
    if rates is not None:
        bench.copy_rate, bench.read_rate, bench.product_rate = rates
    if name != "ceilings" and (rates is None or any(map(math.isnan, rates))):
        bench.note = "the ceilings were not measured: ratios to them mean nothing"
    try:
        with torch.inference_mode():
            section(name, options.seed)(bench)
    except Exception as problem:  # with its traceback, which only this process has
        traceback.print_exc()
        bench.add(gpu_report.failed(name, "the section", problem, 1.0, check=SECTIONS[name].check))
    if bench.late():
        bench.add(gpu_report.Line(section=name, what="the section", note="its time was over: what was left was left out"))
    if name == "ceilings":
        sender.send(("rates", (bench.copy_rate, bench.read_rate, bench.product_rate)))
        sender.send(("facts", gpu_ceilings.facts(bench)))


def section(name: str, seed: int) -> Callable[[Any], None]:
    """Imported where it runs: one that lacks a package does not affect the others."""
    asked = SECTIONS[name]
    found = getattr(importlib.import_module(f"penstock.benchmarks.{asked.module}"), asked.function)
    return partial(found, seed=seed) if name == "correctness" else found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", type=_words, default=USUAL, help="sections, joined by commas (default: all but tuning and profile)"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all sections together (default {MINUTES:g})")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, each once: to see that it runs")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="of shapes and numbers (default: a new one)")
    parser.add_argument("--peers", type=Path, help="a folder with packages, or single files of them, to compare with")
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    parser.add_argument("--markdown", type=Path, help="write tables there, too")
    options = parser.parse_args()
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu needs --tiny: the interpreter takes hours for anything else")
    if options.device == "cuda" and not _has_gpu():
        parser.error("torch sees no GPU: --device cpu --tiny tries everything in Triton's interpreter")
    return options


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _words(text: str) -> list[str]:
    found = text.split(",")
    strange = [word for word in found if word not in SECTIONS]
    if strange:
        raise argparse.ArgumentTypeError(f"no section is called {strange[0]!r}: there are {', '.join(SECTIONS)}")
    return found


if __name__ == "__main__":
    sys.exit(main())
