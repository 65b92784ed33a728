"""Device idle time with the whole server in front: an 8 B model with random weights, while 256 answers are streamed over HTTP.

The shard is the real one, with events around the work of each step (`gpu_busy.py`); requests come over HTTP, are sampled,
detokenized and streamed. All streams have begun when the measurement begins, and none ends before it does.
"""

import asyncio
import json
import os
import random
import signal
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.bench.local_server import Failed, LocalServer, status
from penstock.benchmarks.gpu_busy import LATE
from penstock.benchmarks.gpu_measure import Bench
from penstock.benchmarks.gpu_model import write
from penstock.benchmarks.gpu_report import Line, failed, timing
from penstock.benchmarks.gpu_shard import BUSY
from penstock.benchmarks.server import cpu_of

SECTION = "the server in front"
IDLE = 0.02  # of the time between the first launch of a step and that of the next
STREAMS, SECONDS = 256, 8.0
PROMPT, NEW = 64, 1900  # tokens
START = 240.0  # seconds until it must be ready
LONGEST = 8  # longest waits, which are listed


def measure(bench: Bench) -> None:
    """Starts the server, sends requests, and ends it."""
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as folder:
        model = write(Path(folder) / "model", bench.tiny)
        _tokenizer(model)
        log = Path(folder) / "log"
        try:
            _serve(bench, model, log, Path(folder) / "busy")
        except Exception as problem:  # printed with the server's last log lines
            print("\n".join(f"    | {line}" for line in log.read_text().splitlines()[-12:]), flush=True)
            bench.add(failed(SECTION, "idle between steps", problem, IDLE))


def _tokenizer(folder: Path) -> None:
    """A tokenizer with as many tokens as the model has, each a word, so that all sampled tokens become text."""
    import tokenizers

    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = {f"Ġw{i}": i for i in range(vocabulary)}
    model = tokenizers.models.BPE(vocab=words, merges=[])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))


def _serve(bench: Bench, model: Path, log: Path, told: Path) -> None:
    """told: the file to which the shard writes how long its device worked."""
    streams, seconds = (3, 1.0) if bench.tiny else (STREAMS, SECONDS)
    flags = {
        "--load-format": "dummy",
        "--device": bench.device.type,
        "--dtype": "float32" if bench.tiny else "bfloat16",
        "--max-total-tokens": 2048,
        "--max-concurrent-requests": streams,
        "--cuda-graphs": streams,  # the only size that is needed while all streams run
    }
    arguments = [str(model), *(str(part) for pair in flags.items() for part in pair)]
    # Numbers and the server are each made in one process: an interpreter's variable must not make its kernels slow.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {BUSY: str(told)}
    with LocalServer(arguments, log, module="penstock.benchmarks.gpu_shard", environment=environment, start=START) as server:
        print(f"    ready after {server.ready:.0f} s", flush=True)
        tokens = asyncio.run(_ask(server.port, int(told.read_text()), streams, seconds))
        found = _read(told)
        with suppress(Failed):
            server.stop()
    _report(bench, found, streams, tokens / seconds)


async def _ask(port: int, shard: int, streams: int, seconds: float) -> int:
    """Has the shard measure while all streams run; returns how many tokens came in that time."""
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
        began, worked = time.perf_counter(), _worked(shard)
        await asyncio.sleep(seconds)
        os.kill(shard, signal.SIGUSR2)
        ended = time.perf_counter()
        for name, cpu in sorted(_worked(shard).items()):
            if (share := (cpu - worked.get(name, 0.0)) / (ended - began)) > 0.02:
                print(f"    {name}: {share:.2f} of a processor", flush=True)
        _check(tasks)
        if any(task.done() for task in tasks):
            raise RuntimeError(f"answers of {NEW} tokens ended within {seconds:g} s: ask for longer ones")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return sum(began <= moment < ended for answer in answers for moment in answer.moments)


def _worked(shard: int) -> dict[str, float]:
    """CPU seconds so far of each thread of the launcher's processes and of this one."""
    found = {}
    launcher = status(Path(f"/proc/{shard}"))[1]
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for pid in (*children, str(os.getpid())):
        name = "the shard" if int(pid) == shard else "this client" if int(pid) == os.getpid() else "the router"
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # it has ended
                found[f"{name}, thread {task.name}"] = cpu_of(status(task))
    return found


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
    for name in LATE:  # the positions of the longest may hint at the cause
        ratio = sum(found[name]) / (sum(gaps) + sum(busy[: len(gaps)]))
        longest = sorted(range(len(gaps)), key=found[name].__getitem__)[: -LONGEST - 1 : -1]
        note = ", ".join(f"step {place}: {found[name][place] * 1e3:.1f} ms" for place in longest)
        bench.add(Line(section=SECTION, what=f"of it waiting for {name}", ratio=ratio, against="of the time", note=note))
    # A chunk may hold several tokens where the client is slower than the server.
    bench.add(Line(section=SECTION, what=f"{streams} streams", value=rate, unit="chunks/s"))
