"""Fused operations against the bytes that they have to move, and sampling against one read of the logits."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from penstock.benchmarks.gpu_measure import Bench, Call, replaced
from penstock.benchmarks.gpu_report import Line, failed
from penstock.kernels import (
    beam,
    codes,
    dispatch,
    experts,
    fused_chunked_delta,
    linear,
    operations,
    paging,
    quantized,
    reference,
    sampling,
)
from penstock.kernels.fused_gated_delta import Inputs
from penstock.kernels.fused_sampling import sample
from penstock.kernels.linear import Invariance, Weight
from penstock.kernels.sampling import Draws, Penalties
from penstock.kernels.spans import RecurrentStates, Spans
from penstock.shard.host_pages import HostPages, page_bytes

SECTION = "operations"
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, SIZE, VOCABULARY = 4096, 14336, 32, 8, 128, 128256
SAMPLING = 3.0  # times one read of 256 x 128k logits, with top-k, top-p and penalties


def measure(bench: Bench) -> None:
    """Measures everything; experts last, since most of their time goes into compiling twenty kernels."""
    with dispatch.forced("triton"):
        sizes = (4,) if bench.tiny else (1, 256, 8192)
        parts = [partial(part, tokens=tokens) for part in (elementwise, few_bits, invariant, mixture) for tokens in sizes]
        bench.each(SECTION, (sample_logits, beams, moves, offloading, chunks, *parts))


def _bfloat16(bench: Bench, *shape: int) -> Tensor:
    return torch.randn(*shape, device=bench.device).bfloat16()


def elementwise(bench: Bench, tokens: int) -> None:
    """Elementwise operations between a layer's matrix products."""
    hidden, intermediate = (64, 96) if bench.tiny else (HIDDEN, INTERMEDIATE)
    weight = _bfloat16(bench, hidden)
    size = tokens * hidden * 2
    count = bench.copies(size)
    states = [(_bfloat16(bench, tokens, hidden), _bfloat16(bench, tokens, hidden)) for _ in range(count)]
    bench.moved(SECTION, f"norm, {tokens} tokens", [partial(operations.rms_norm, x, weight, 1e-5) for x, _ in states], 2 * size)
    calls: list[Call] = [partial(operations.add_rms_norm, x, residual, weight, 1e-5) for x, residual in states]
    bench.moved(SECTION, f"norm with residual, {tokens} tokens", calls, 4 * size)
    del states
    size = tokens * intermediate * 2
    gates = [_bfloat16(bench, tokens, 2 * intermediate) for _ in range(bench.copies(3 * size))]
    bench.moved(SECTION, f"SwiGLU, {tokens} tokens", [partial(operations.gated, gate) for gate in gates], 3 * size)
    del gates
    _rotary(bench, tokens)


def _rotary(bench: Bench, tokens: int) -> None:
    heads, kv_heads, size = (2, 1, 16) if bench.tiny else (HEADS, KV_HEADS, SIZE)
    width = (heads + 2 * kv_heads) * size
    count = bench.copies(4 * tokens * width)
    frequencies = 1.0 / 500000.0 ** (torch.arange(0, size, 2, device=bench.device).float() / size)
    table = reference.rotary_table(frequencies, torch.arange(tokens, device=bench.device), torch.bfloat16)
    cache = torch.zeros(count * tokens, 2, kv_heads, size, dtype=torch.bfloat16, device=bench.device)
    slots = torch.randperm(len(cache), device=bench.device).view(count, tokens)
    joints = [_bfloat16(bench, tokens, width) for _ in range(count)]
    calls = [
        partial(operations.rotate_and_write, joint, table, some, cache, None, None, 1e-5)
        for joint, some in zip(joints, slots, strict=True)
    ]
    moved = 2 * tokens * width * 2 + table.nbytes + 8 * tokens
    bench.moved(SECTION, f"rotary and write to the cache, {tokens} tokens", [*calls], moved)


def mixture(bench: Bench, tokens: int) -> None:
    """A mixture-of-experts layer of Qwen3-30B-A3B, against the weights of the chosen experts; in bfloat16 and quantized."""
    number, count, hidden, size = (4, 2, 64, 32) if bench.tiny else (128, 8, 2048, 768)
    for kind in ("", *codes.BITS):
        gate_ups = [_stored(bench, kind, 2 * size, hidden)] * number  # equal ones: laid out, each has memory of its own
        downs = [_stored(bench, kind, hidden, size)] * number
        _experts(bench, experts.lay_out(gate_ups, downs, torch.bfloat16), kind, tokens, (number, count, hidden))


def _stored(bench: Bench, kind: str, outputs: int, inputs: int) -> Tensor | codes.QuantizedWeight:
    weight = _bfloat16(bench, outputs, inputs)
    return codes.quantize(weight, kind) if kind else weight


def _experts(bench: Bench, laid_out: experts.Experts, kind: str, tokens: int, sizes: tuple[int, int, int]) -> None:
    number, count, hidden = sizes
    x = _bfloat16(bench, tokens, hidden)
    routed = [experts.route(torch.randn(tokens, number, device=bench.device), count, True) for _ in range(16)]
    chosen = sum(len(set(numbers.flatten().tolist())) for _, numbers in routed) / len(routed)
    calls: list[Call] = [partial(laid_out, x, *route) for route in routed]
    held = sum(weight.bytes if isinstance(weight, Weight) else weight.nbytes for weight in laid_out.weights)
    what = f"{count} of {number} experts{f' of {kind}' if kind else ''}, {tokens} tokens"
    bench.moved(SECTION, what, calls, round(held * chosen / number))


def few_bits(bench: Bench, tokens: int) -> None:
    """The quantized QKV projection of an 8 B model, against the codes' bytes or the time of the arithmetic."""
    outputs, inputs = (64, 96) if bench.tiny else (6144, HIDDEN)
    x = _bfloat16(bench, tokens, inputs)
    for kind in codes.BITS:
        rounded = codes.quantize(torch.randn(outputs, inputs, device=bench.device), kind)
        size = quantized.lay_out(rounded, None, Invariance.USUAL, torch.bfloat16).bytes
        weights = [quantized.lay_out(rounded, None, Invariance.USUAL, torch.bfloat16) for _ in range(bench.copies(size))]
        took = bench.time([partial(weight, x) for weight in weights])
        floor = max(size / bench.copy_rate, 2 * tokens * outputs * inputs / bench.product_rate)
        what = f"product of {tokens} tokens with weights of {kind}"
        bench.add(Line(section=SECTION, what=what, timing=took, ratio=floor / took.seconds, against="its floor"))


def invariant(bench: Bench, tokens: int) -> None:
    """The batch-invariant product, for the QKV projection of an 8 B model, against torch's."""
    outputs, inputs = (64, 96) if bench.tiny else (6144, HIDDEN)
    x, size = _bfloat16(bench, tokens, inputs), 2 * outputs * inputs
    weights = [_bfloat16(bench, outputs, inputs) for _ in range(bench.copies(size))]
    usual = bench.time([partial(linear.plain(weight, None), x) for weight in weights])
    took = bench.time([partial(linear.invariant(weight, None), x) for weight in weights])
    what = f"product of {tokens} tokens that depends on no other row"
    bench.add(Line(section=SECTION, what=what, timing=took, ratio=usual.seconds / took.seconds, against="of torch's own product"))


def moves(bench: Bench) -> None:
    """Beam forks (page copies) and commits of draft trees (slot moves), of all layers at once."""
    layers, page_size, width, count = (2, 4, 32, 4) if bench.tiny else (32, 16, 2 * KV_HEADS * SIZE, 64)
    pages = torch.zeros(layers, 4 * count, page_size, width, dtype=torch.bfloat16, device=bench.device)
    order = torch.randperm(4 * count, device=bench.device)
    filled = torch.full((count,), page_size, device=bench.device)
    halves = [(order[:count], order[count : 2 * count]), (order[2 * count : 3 * count], order[3 * count :])]
    calls: list[Call] = [partial(paging.copy_pages, pages, *half, filled) for half in halves]
    size = 2 * layers * count * page_size * width * 2
    bench.moved(SECTION, f"{count} pages copied in {layers} layers", calls, size)
    slots = pages.view(layers, -1, width)
    orders = torch.randperm(slots.shape[1], device=bench.device).view(-1, 2, 4 * count)  # each has other slots
    starts = torch.arange(0, 4 * count + 1, 4, device=bench.device)
    moved = 2 * layers * 4 * count * width * 2
    what = f"4 slots moved in each of {count} rows in {layers} layers"
    bench.moved(SECTION, what, [partial(paging.move_slots, slots, order[0], order[1], starts) for order in orders], moved)


def offloading(bench: Bench) -> None:
    """KV offload: pages to host memory and back, of all layers, beside one copy of as many bytes. Saving delays steps only while
    the pages are gathered."""
    layers, page_size, width, count = (2, 4, 32, 4) if bench.tiny else (32, 16, 2 * KV_HEADS * SIZE, 64)
    pages = torch.zeros(layers, 4 * count, page_size, width, dtype=torch.bfloat16, device=bench.device)
    host, places, size = HostPages([pages], count), range(1, count + 1), count * page_bytes([pages])
    parts = torch.randperm(4 * count).view(4, count).tolist()
    near = torch.empty(size, dtype=torch.uint8, device=bench.device)
    far = torch.empty(size, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    plain = bench.time([partial(near.copy_, far, non_blocking=True)], graph=False)
    for what, calls in (
        ("gathered for the host", [partial(host.save, list(zip(part, places, strict=True))) for part in parts]),
        ("from the host", [partial(host.load, list(zip(places, part, strict=True))) for part in parts]),
    ):
        took, name = bench.time(calls, graph=False), f"{count} pages of {layers} layers {what}"
        ratio, against = plain.seconds / took.seconds, "of a copy's rate from the host"
        rate = size / took.seconds / 1e9
        bench.add(Line(section=SECTION, what=name, timing=took, value=rate, unit="GB/s", ratio=ratio, against=against))


def chunks(bench: Bench) -> None:
    """A prompt's tokens in a layer of linear attention by chunks, token by token, to find the right `spans.CHUNKED_FROM`. Heads
    of Qwen3-Next and of Granite 4 H Tiny."""
    for rule, delta, sizes in (("the gated delta rule", True, (16, 32, 128, 128)), ("state spaces", False, (1, 48, 128, 64))):
        for tokens in (40,) if bench.tiny else (16, 32, 64, 128, 512, 4096):
            layer = _layer(bench, delta, (1, 2, 16, 16) if bench.tiny else sizes, tokens)
            count = bench.copies(sum(part.nbytes for part in (layer.inputs.mixed, layer.states.memories)))
            calls = [layer, *(_layer(bench, delta, (1, 2, 16, 16) if bench.tiny else sizes, tokens) for _ in range(count - 1))]
            with replaced(fused_chunked_delta, "CHUNKED_FROM", tokens + 1):
                one_by_one = bench.time(calls)
            with replaced(fused_chunked_delta, "CHUNKED_FROM", 1):
                took = bench.time(calls)
            ratio, what = one_by_one.seconds / took.seconds, f"{rule}, a prompt of {tokens} tokens by chunks"
            bench.add(Line(section=SECTION, what=what, timing=took, ratio=ratio, against="times as fast as token by token"))


@dataclass(frozen=True, slots=True)
class Layer:
    """Of linear attention, when called."""

    inputs: Inputs
    spans: Spans
    states: RecurrentStates

    def __call__(self) -> None:
        fused_chunked_delta.attend_in_chunks(self.inputs, self.spans, self.states)


def _layer(bench: Bench, delta: bool, sizes: tuple[int, int, int, int], tokens: int) -> Layer:
    """One sequence that begins. sizes: heads of keys and of values, features of both."""
    key_heads, heads, key_size, value_size = sizes
    channels, device = 2 * key_heads * key_size + heads * value_size, bench.device
    taps, biases = _bfloat16(bench, channels, 4), None if delta else _bfloat16(bench, channels)
    rates, offsets, skips = -torch.rand(heads, device=device), torch.randn(heads, device=device), torch.ones(heads, device=device)
    mixed, fades = _bfloat16(bench, tokens, channels), _bfloat16(bench, tokens, heads)
    strengths, limits = (_bfloat16(bench, tokens, heads), (0.0, 1.0)) if delta else (None, (0.0, math.inf))
    inputs = Inputs(mixed, strengths, fades, taps, biases, rates, offsets, None if delta else skips, 1e-6 if delta else 0.0, limits)
    spans = Spans((tokens,), *(torch.tensor(part, device=device) for part in ([0, tokens], [1], [1], [tokens])))
    memories = torch.zeros(2, heads, key_size, value_size, device=device)
    states = RecurrentStates(torch.zeros(2, 3, channels, dtype=torch.bfloat16, device=device), memories)
    return Layer(inputs, spans, states)


def sample_logits(bench: Bench) -> None:
    """256 rows, as in a large batch; for comparison plain torch, and FlashInfer."""
    rows, vocabulary = (3, 300) if bench.tiny else (256, VOCABULARY)
    logits = [_peaked(bench, rows, vocabulary) for _ in range(bench.copies(4 * rows * vocabulary))]
    once = logits[0].nbytes / bench.read_rate
    plain = {"temperature": 0.8, "top_k": 0, "top_p": 1.0}
    filtered = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
    penalties = _penalties(bench, rows, vocabulary)
    greedy = {**plain, "temperature": 0.0}
    cases: list[tuple[str, dict[str, float], Penalties | None, float | None]] = [
        ("greedy", greedy, None, None),
        ("greedy, final log-probabilities", {**greedy, "told": 1.0}, None, None),
        ("drawn from all", plain, None, None),
        ("top-k 50, top-p 0.9", filtered, None, SAMPLING),
        ("top-p 0.95 alone", {**plain, "top_p": 0.95}, None, None),
        ("typical-p 0.95 alone", {**plain, "typical_p": 0.95}, None, None),
        ("top-k 10, top-p 0.95, typical-p 0.95", {**filtered, "top_k": 10, "top_p": 0.95, "typical_p": 0.95}, None, None),
        ("top-k 50, top-p 0.9, penalties on 1,000 tokens a row", filtered, penalties, SAMPLING),
    ]
    size = f"{rows} x {vocabulary}"
    for what, fields, penalized, goal in cases:
        draws = _draws(bench, rows, fields)
        far = fields["top_p"] < 1 and not fields["top_k"]
        took = bench.time([partial(sample, one, draws, penalized, None, far or "told" in fields, far) for one in logits])
        ratio, against = took.seconds / once, "of one read"
        bench.add(
            Line(section=SECTION, what=f"sampling {size}, {what}", timing=took, ratio=ratio, against=against, goal=goal, most=True)
        )
        if penalized is None and goal is not None:
            _sampling_peers(bench, f"sampling {size}, {what}", logits, draws, took.seconds)


def _sampling_peers(bench: Bench, what: str, logits: list[Tensor], draws: Draws, own: float) -> None:
    def plainly(one: Tensor) -> None:
        for part in sampling.filtered(one, draws):
            sampling.draw(part, draws)

    found = bench.time([partial(plainly, one) for one in logits], graph=False)
    line = f"{what}: plain torch"
    bench.add(Line(section=SECTION, what=line, timing=found, ratio=found.seconds / own, against="of ours"))
    line = f"{what}: FlashInfer"
    try:
        if find_spec("flashinfer") is None:
            bench.add(failed(SECTION, line, "not installed", 1.0))
            return
        function: Callable[..., Any] = __import__("flashinfer.sampling").sampling.top_k_top_p_sampling_from_logits
        heat = float(draws.temperature[0])
        k, p = draws.top_k.int(), draws.top_p
        found = bench.time([lambda one=one: function(one / heat, k, p, filter_apply_order="top_k_first") for one in logits])  # type: ignore[misc]
        bench.add(Line(section=SECTION, what=line, timing=found, ratio=found.seconds / own, against="of ours", goal=1.0))
    except Exception as problem:  # a peer's fault is not ours
        bench.add(failed(SECTION, line, problem, 1.0))


def _peaked(bench: Bench, rows: int, vocabulary: int) -> Tensor:
    """Logits like those of models: a few tokens stand out."""
    logits = torch.randn(rows, vocabulary, device=bench.device) * 2
    some = torch.randint(0, vocabulary, (rows, 30), device=bench.device)
    return logits.scatter_add_(1, some, torch.rand(rows, 30, device=bench.device) * 12)


def _draws(bench: Bench, rows: int, fields: dict[str, float]) -> Draws:
    def column(value: float) -> Tensor:
        return torch.full((rows,), value, device=bench.device)

    places = torch.arange(rows, device=bench.device)
    return Draws(
        temperature=column(fields["temperature"]),
        top_k=column(fields["top_k"]).long(),
        top_p=column(fields["top_p"]),
        min_p=column(0.0),
        typical_p=column(fields.get("typical_p", 1.0)),
        seeds=places * 77,
        choices=places * 0,
        positions=places,
    )


def _penalties(bench: Bench, rows: int, vocabulary: int) -> Penalties:
    entries, device = 20 if bench.tiny else 1000, bench.device
    return Penalties(
        starts=torch.arange(0, (rows + 1) * entries, entries, dtype=torch.int32, device=device),
        ids=torch.rand(rows, vocabulary, device=device).topk(entries).indices.int().flatten(),
        counts=torch.randint(0, 2, (rows * entries,), dtype=torch.int32, device=device),
        biases=torch.empty(0, device=device),
        repetition=torch.full((rows,), 1.1, device=device),
        frequency=torch.full((rows,), 0.1, device=device),
        presence=torch.full((rows,), 0.1, device=device),
    )


def beams(bench: Bench) -> None:
    """Beam search: the best continuations of 64 sets of four rows, and the five most probable tokens of 256."""
    rows, vocabulary = (4, 300) if bench.tiny else (256, VOCABULARY)
    logits = [_peaked(bench, rows, vocabulary) for _ in range(bench.copies(4 * rows * vocabulary))]
    once, scores = logits[0].nbytes / bench.read_rate, torch.randn(rows, device=bench.device)
    starts = list(range(0, rows + 1, 4))
    # The sets' rows come from the host: that can't be captured.
    cases: list[tuple[str, list[Call], bool]] = [
        ("best 8 continuations of 4 beams each", [partial(beam.candidates, one, scores, starts, 8) for one in logits], False),
        ("the 5 most probable", [partial(beam.most_probable, one, 5) for one in logits], True),
    ]
    for what, calls, graph in cases:
        took = bench.time(calls, graph)
        ratio, against = took.seconds / once, "of one read"
        bench.add(Line(section=SECTION, what=f"{what}, {rows} x {vocabulary}", timing=took, ratio=ratio, against=against))
