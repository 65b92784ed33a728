"""Whole decode steps of an 8 B model with random weights, by the shard's own engine, against the bytes and operations they take.

    floor    max(weights / copy bandwidth, their operations / rate of products) + keys and values / copy bandwidth

`step` is the time between steps of an engine that is asked for the next step as soon as it takes one: planning on the host, the
model, sampling, tokens back on the host, as far as they don't overlap. `device` is the time that the device works, by its own
clock.

Also checks that Triton gives the same greedy tokens as plain torch, on the trained model that ships: where they differ, the two
most probable tokens must have been nearly tied.
"""

import json
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.benchmarks.gpu_busy import Busy, watch
from penstock.benchmarks.gpu_measure import Bench, replaced
from penstock.benchmarks.gpu_report import Line, failed, timing
from penstock.kernels import dependent_launch, dispatch, fused_skinny_gemm, linear
from penstock.launcher.hub import DEMO_FOLDER
from penstock.shard.config import ShardConfig
from penstock.shard.decoding.sampler import Pick
from penstock.shard.engine import Engine
from penstock.shard.forward import GraphExtent
from penstock.shard.graphs import Recorder
from penstock.shard.loading import load
from penstock.shard.outcome import Outcome
from penstock.shard.sequence import Group, Sampling, sequences

SECTION = "a whole decode step, 8 B"
TOKENS = "greedy tokens by Triton and by plain torch"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SMALL = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY = {**LLAMA, **SMALL, "num_key_value_heads": 1, "head_dim": 32}
# (rows, context): share of the floor
GOALS = {(1, 1024): 0.88, (32, 1024): 0.85, (256, 1024): 0.85}
CASES = (*GOALS, (1, 8192), (32, 8192), (256, 8192))
SOONEST = 4e-3  # seconds of a step of one row at 1,024 tokens, at most
PAGE = 16
STEPS, WARM = 40, 5
# Differences of log-probabilities below which two tokens count as tied: some units in the last place of logits around 10.
NEAR = {"float32": 1e-3, "bfloat16": 0.15}


def write(folder: Path, tiny: bool) -> Path:
    """A model's folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY if tiny else LLAMA))
    return folder


def steps(bench: Bench) -> None:
    """Every case, without graphs and from one."""
    cuda = bench.device.type == "cuda"
    busy = watch(cuda)
    with dispatch.forced("triton"), tempfile.TemporaryDirectory(prefix="penstock-gpu-") as folder:
        engine = made_up(bench, Path(folder))
        cases = [(2, 40)] if bench.tiny else CASES
        for waits, (rows, context) in [*((False, case) for case in cases), *((True, case) for case in cases if cuda)]:
            if bench.late():
                return
            try:
                _case(bench, engine, busy, rows, context, waits)
            except Exception as problem:  # the compiler's errors have no common base class
                traceback.print_exc()
                goal = GOALS.get((rows, context)) if not waits else None
                bench.add(failed(SECTION, f"{rows} x {context}{', no kernel begins early' * waits}", problem, goal))
            engine.resize(0)
            if cuda:
                torch.cuda.empty_cache()


def made_up(bench: Bench, folder: Path) -> Engine:
    """An engine with random weights."""
    began = time.perf_counter()
    dtype = "float32" if bench.tiny else "bfloat16"
    model = write(folder, bench.tiny)
    engine = load(
        ShardConfig(folder=str(model), model="8b", device=bench.device.type, dtype=dtype, load_format="dummy"), lambda stage: None
    )
    took = time.perf_counter() - began
    print(f"    made up weights of {engine.decoder.weight_bytes / 1e9:.1f} GB in {took:.0f} s", flush=True)
    return engine


def extent_of(rows: int, total: int) -> GraphExtent:
    """Extent of decode steps of so many sequences, which grow to `total` tokens each."""
    return GraphExtent(rows, rows, total, rows * -(-total // PAGE), (rows,))


def _case(bench: Bench, engine: Engine, busy: Busy, rows: int, context: int, waits: bool) -> None:
    """waits: disable early starts of kernels (programmatic dependent launch), and measure nothing else."""
    cuda = bench.device.type == "cuda"
    extent = extent_of(rows, context + 6 * (STEPS + WARM))
    need = extent.pages * PAGE * engine.token_bytes
    if cuda and need > 0.9 * torch.cuda.mem_get_info()[0]:
        if not waits:
            why = f"keys and values of {need / 1e9:.0f} GB do not fit"
            bench.add(failed(SECTION, f"{rows} x {context}", why, GOALS.get((rows, context))))
        return
    engine.resize(extent.pages)
    begin(engine, rows, context)
    if waits:
        with replaced(dependent_launch, "enabled", False):
            engine.record(Recorder(), extent, lambda stage: None)
            _measured(bench, engine, busy, rows, context, "graph, no kernel begins early")
        return
    _measured(bench, engine, busy, rows, context, "eager")
    if not cuda:
        return
    engine.record(Recorder(), extent, lambda stage: None)
    before = engine.forward.replayed
    _measured(bench, engine, busy, rows, context, "graph")
    if engine.forward.replayed == before:
        bench.add(failed(SECTION, f"{rows} x {context}, graph", "the graph was never used: steps ran eager"))
    for way, where, name, value in _other_ways(rows):
        with replaced(where, name, value):
            engine.record(Recorder(), extent, lambda stage: None)
            _measured(bench, engine, busy, rows, context, f"graph, {way}")


def _other_ways(rows: int) -> Iterator[tuple[str, Any, str, int]]:
    """Alternatives for products of few rows, and what to set for them."""
    if rows <= linear.FEW:
        yield "products by torch", linear, "FEW", 0  # norms, products and sums one after the other
        if rows > 1:
            yield "no product in parts", fused_skinny_gemm, "SHORTEST", sys.maxsize


def begin(engine: Engine, rows: int, context: int) -> None:
    """Adds groups whose prompts count as computed: keys and values are random numbers."""
    dice = random.Random(rows + context)
    vocabulary = engine.decoder.shape.vocabulary
    groups = []
    for uid in range(rows):
        begun, waiting = sequences([dice.randrange(vocabulary) for _ in range(context)], 1, [(0, [1])])
        groups.append(Group(uid, begun, waiting, Sampling(), engine.decoder.shape.max_positions - context, frozenset()))
    refused = engine.prefill(0, groups, [], 0, []).failed
    assert not refused, refused
    for group in groups:
        [sequence] = group.sequences
        engine.pool.extend(sequence.pages, context)
        sequence.computed, group.decodes = context, True
    engine.decode([0])  # clears newly allocated pages
    with torch.inference_mode():
        for layer in engine.cache.layers.values():
            layer.normal_()
            layer[:PAGE] = 0  # padding


def _measured(bench: Bench, engine: Engine, busy: Busy, rows: int, context: int, way: str) -> None:
    samples, steps = [], []
    for step in range(2 if bench.tiny else STEPS + WARM):
        if step == (0 if bench.tiny else WARM):
            busy.reset()
        began = time.perf_counter()
        steps.append(engine.begin_decode([0]))  # which returns when the step before is over
        if step >= WARM or bench.tiny:
            samples.append(time.perf_counter() - began)
    engine.land()
    outcomes = [step.result() for step in steps]
    for outcome in outcomes:
        if outcome.failed or len(outcome.emitted) != rows:
            raise RuntimeError(f"a step failed: {outcome.failed[:1] or len(outcome.emitted)}")
    keys = statistics.mean(outcome.decode_keys for outcome in outcomes[-len(samples) :])  # more than `context`: rows have grown
    floor = _floor(bench, engine, rows, keys)
    own, what = timing(samples, "wall"), f"{rows} x {context}, {way}"
    ratio, goal = floor / own.seconds, GOALS.get((rows, context)) if way == "graph" else None
    rate = rows / own.seconds
    against = "floor / step"
    step_line = Line(
        section=SECTION, what=f"{what}: step", timing=own, value=rate, unit="tokens/s", ratio=ratio, against=against, goal=goal
    )
    bench.add(step_line)
    if goal is not None and rows == 1 and floor < SOONEST:  # set for an H200: slower memory can't reach it
        what_soon, ratio = f"{what}: step in units of {SOONEST * 1e3:g} ms", own.seconds / SOONEST
        bench.add(Line(section=SECTION, what=what_soon, ratio=ratio, against="", goal=1.0, most=True))
    worked = timing(busy.read()["busy"], "wall" if way == "eager" else "graph")
    ratio, note = floor / worked.seconds, "launches included" if way == "eager" else ""
    bench.add(Line(section=SECTION, what=f"{what}: device", timing=worked, ratio=ratio, against="floor / device", note=note))


def _floor(bench: Bench, engine: Engine, rows: int, keys: float) -> float:
    """Least seconds of a step. keys: that all rows together read in a layer."""
    shape = engine.decoder.shape
    # only some rows of the embedding table are read
    read = shape.parameters(1) - (0 if shape.tied else shape.vocabulary * shape.hidden)
    size = engine.decoder.embedding.dtype.itemsize
    products = max(read * size / bench.copy_rate, 2 * read * rows / bench.product_rate)
    return products + keys * engine.token_bytes / bench.copy_rate


def tokens(bench: Bench) -> None:
    """The demo model, in both types that matter."""
    dice = random.Random(0)
    count, new = (2, 3) if bench.tiny else (48, 160)
    prompts = [[dice.randrange(3, 2048) for _ in range(dice.randint(2, 6 if bench.tiny else 300))] for _ in range(count)]
    for dtype, begins in [("float32", False)] if bench.tiny else [*((dtype, True) for dtype in NEAR), ("bfloat16", False)]:
        with replaced(dependent_launch, "enabled", begins):
            found = _greedy(bench, "triton", dtype, prompts, new)
        expected = _greedy(bench, "reference", dtype, prompts, new)
        apart, ties, compared = compare(found, expected, NEAR[dtype])
        what = f"demo model, {dtype}{', no kernel begins early' * (not begins)}: prompts that part without a near tie"
        note = f"{ties} near ties in {compared} tokens"
        bench.add(Line(section=TOKENS, what=what, ratio=float(apart), goal=0.0, most=True, check=True, note=note))


def compare(found: Sequence[Sequence[Pick]], expected: Sequence[Sequence[Pick]], near: float) -> tuple[int, int, int]:
    """(prompts whose tokens differ where one was clearly better, prompts that differ at a near tie, compared tokens): what follows
    a difference is another text, and is not compared."""
    apart = ties = compared = 0
    for ours, theirs in zip(found, expected, strict=True):
        for own, other in zip(ours, theirs, strict=True):
            compared += 1
            if own.token == other.token:
                continue
            better = dict(other.top)
            tie = own.token in better and other.logprob - better[own.token] < near
            ties, apart = ties + tie, apart + (not tie)
            break
    return apart, ties, compared


@torch.inference_mode()
def _greedy(bench: Bench, kernels: str, dtype: str, prompts: Sequence[Sequence[int]], new: int) -> list[list[Pick]]:
    with dispatch.forced(kernels):
        config = ShardConfig(folder=str(DEMO_FOLDER), model="demo", device=bench.device.type, dtype=dtype, prefix_caching=False)
        engine = load(config, lambda stage: None)
        total = max(map(len, prompts)) + new
        pages = len(prompts) * -(-total // PAGE)
        engine.resize(pages)
        if bench.device.type == "cuda" and kernels == "triton":
            sizes = (*range(1, len(prompts), 3), len(prompts))
            engine.record(Recorder(), GraphExtent(len(prompts), len(prompts), total, pages, sizes), lambda stage: None)
        return _answers(engine, prompts, new)


def _answers(engine: Engine, prompts: Sequence[Sequence[int]], new: int) -> list[list[Pick]]:
    groups = []
    for uid, prompt in enumerate(prompts):
        begun, waiting = sequences(prompt, 1)
        groups.append(Group(uid, begun, waiting, Sampling(), new, frozenset(), top_n=20))  # digits tie by ten
    chunks = [(uid, len(prompt)) for uid, prompt in enumerate(prompts)]
    answers: list[list[Pick]] = [[] for _ in prompts]
    step = engine.begin_prefill(0, groups, chunks, sum(map(len, prompts)), [])
    while engine.books.groups:
        following = engine.begin_decode([0])  # on top of the last one, where the device allows
        _take(step.result(), answers)
        step = following
    engine.land()
    _take(step.result(), answers)
    return answers


def _take(outcome: Outcome, answers: list[list[Pick]]) -> None:
    if outcome.failed:
        raise RuntimeError(outcome.failed[0][1])
    for uid, emitted in outcome.emitted:
        answers[uid].append(emitted.pick)
