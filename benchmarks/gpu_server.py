"""The server in front of an 8 B model with made-up weights: how long the device waits between steps while 256 answers are streamed.

The shard is the real one, with events around the work of each step (`gpu_busy.py`); requests come over HTTP, are sampled, turned
into text and streamed. All streams have begun when the measurement begins, and none ends before it does.
"""

import asyncio
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from penstock.benchmarks.gpu_measure import Bench
from penstock.benchmarks.gpu_model import write
from penstock.benchmarks.gpu_report import Line, failed, timing
from penstock.benchmarks.gpu_shard import BUSY

SECTION = "the server in front"
IDLE = 0.02  # of the time between the first launch of a step and that of the next
STREAMS, SECONDS = 256, 8.0
PROMPT, NEW = 64, 1900  # tokens
START = 240.0  # seconds until it must be ready


def measure(bench: Bench) -> None:
    """Starts it, asks it, ends it."""
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as folder:
        model = write(Path(folder) / "model", bench.tiny)
        _tokenizer(model)
        with open(Path(folder) / "log", "w+") as log:
            try:
                _serve(bench, Path(folder), model, log)
            except Exception as problem:  # what the server said goes with it
                log.seek(0)
                lines = log.read().splitlines()
                print("\n".join(f"    | {line}" for line in lines[-12:]), flush=True)
                bench.add(failed(SECTION, "idle between steps", problem, IDLE))


def _tokenizer(folder: Path) -> None:
    """As many tokens as the model has, each a word: text is made of all that is drawn."""
    import tokenizers

    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = {f"Ġw{i}": i for i in range(vocabulary)}
    model = tokenizers.models.BPE(vocab=words, merges=[])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))


def _serve(bench: Bench, folder: Path, model: Path, log: IO[str]) -> None:
    streams, seconds = (3, 1.0) if bench.tiny else (STREAMS, SECONDS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = {
        "--port": port,
        "--hostname": "127.0.0.1",
        "--load-format": "dummy",
        "--device": bench.device.type,
        "--dtype": "float32" if bench.tiny else "bfloat16",
        "--max-total-tokens": 2048,
        "--max-concurrent-requests": streams,
        "--cuda-graphs": streams,  # the only size that is needed while all streams run
    }
    arguments = [str(part) for pair in flags.items() for part in pair]
    command = [sys.executable, "-m", "penstock.benchmarks.gpu_shard", "serve", str(model), *arguments]
    told = folder / "busy"
    # Numbers and the server are made in one process each: an interpreter's variable must not make its kernels slow.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {BUSY: str(told)}
    began = time.perf_counter()
    server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        _wait(server, port)
        print(f"    ready after {time.perf_counter() - began:.0f} s", flush=True)
        shard = int(told.read_text())
        tokens = asyncio.run(_ask(port, shard, streams, seconds))
        found = _read(told)
    finally:
        server.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(30)
        if server.poll() is None:
            server.kill()
    _report(bench, found, streams, tokens / seconds)


def _wait(server: "subprocess.Popen[bytes]", port: int) -> None:
    began = time.perf_counter()
    while time.perf_counter() - began < START:
        if server.poll() is not None:
            raise RuntimeError(f"penstock did not start: exit code {server.returncode}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with suppress(OSError):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        connection.close()
        time.sleep(0.1)
    raise RuntimeError(f"penstock was not ready after {START:.0f} s")


async def _ask(port: int, shard: int, streams: int, seconds: float) -> int:
    """Lets the shard note when it works while all streams run; how many tokens came in that time."""
    from penstock.benchmarks.streams import Answer, client, prompt

    dice = random.Random(0)
    answers = [Answer(time.perf_counter()) for _ in range(streams)]
    async with client(port) as asked:
        tasks = [
            asyncio.create_task(asked.ask(prompt(dice, PROMPT, 256), NEW, answer, temperature=0.8, top_p=0.95, seed=i))
            for i, answer in enumerate(answers)
        ]
        while not all(answer.moments for answer in answers):
            _check(tasks)
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        os.kill(shard, signal.SIGUSR1)
        began = time.perf_counter()
        await asyncio.sleep(seconds)
        os.kill(shard, signal.SIGUSR2)
        ended = time.perf_counter()
        _check(tasks)
        if any(task.done() for task in tasks):
            raise RuntimeError(f"answers of {NEW} tokens ended within {seconds:g} s: ask for longer ones")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return sum(began <= moment < ended for answer in answers for moment in answer.moments)


def _check(tasks: "list[asyncio.Task[Any]]") -> None:
    for task in tasks:
        if task.done() and task.exception() is not None:
            raise RuntimeError(f"a stream failed: {task.exception()!r}")


def _read(told: Path) -> dict[str, list[float]]:
    for _ in range(200):
        found = json.loads(told.read_text())
        if isinstance(found, dict):
            return found
        time.sleep(0.05)
    raise RuntimeError("the shard did not tell when its device worked")


def _report(bench: Bench, found: dict[str, list[float]], streams: int, rate: float) -> None:
    busy, gaps = found["busy"], found["gaps"]
    if not gaps:
        raise RuntimeError("there were no two steps to measure between")
    share = sum(gaps) / (sum(gaps) + sum(busy[: len(gaps)]))
    what = f"idle between steps, {streams} streams"
    note = f"{len(busy)} steps, {statistics.median(busy) * 1e3:.2f} ms of work in the median"
    gap = timing(gaps, "wall")
    bench.add(Line(section=SECTION, what=what, timing=gap, ratio=share, against="of the time", goal=IDLE, most=True, note=note))
    # Chunks that came: a chunk may hold several tokens where the client is slower than the server.
    bench.add(Line(section=SECTION, what=f"{streams} streams", value=rate, unit="chunks/s"))
