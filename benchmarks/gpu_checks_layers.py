"""Checks of the other operations of layers, of recurrent layers, and of what moves cached keys and values."""

import itertools
import random
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from penstock.benchmarks import gpu_checks_ngrams
from penstock.benchmarks.gpu_comparisons import (
    ROUNDINGS,
    TYPES,
    Check,
    error,
    exact_norm,
    poisoned,
    random_values,
    relative_error,
)
from penstock.benchmarks.gpu_measure import Bench
from penstock.kernels import (
    dispatch,
    gated_delta,
    hyper_connections,
    operations,
    paging,
    pools,
    reference,
    short_convolution,
    state_space,
)
from penstock.kernels.reference import Activation, HyperConnectionWeights
from penstock.kernels.spans import CHUNKED_FROM, RecurrentStates, Spans
from penstock.shard.host_pages import HostPages

# Recurrent layers, with heads of keys, heads of values for each, features of keys and of values, and taps.
RECURRENT = {
    "the gated delta rule": (16, 2, 128, 128, 4),
    "the gated delta rule by features": (32, 1, 128, 128, 4),
    "state spaces": (1, 48, 128, 64, 4),
    "short convolutions": (0, 0, 0, 2048, 3),
}
CHUNKED = ("the gated delta rule", "state spaces")  # of long spans, by kernels of their own
E4M3 = 0.07  # of a value's size: half a unit of three bits of mantissa is 1/16


def checks(bench: Bench) -> dict[str, Check]:
    """All of these, by name."""
    found: dict[str, Check] = {}
    for name, dtype in TYPES.items():
        found[f"norms and gates, {name}"] = partial(elementwise, dtype=dtype)
        found[f"rotary and write, {name}"] = partial(rotary, dtype=dtype, eight_bits=False)
        found[f"gated hyper-connections and n-gram embeddings, {name}"] = partial(ngrams_and_streams, dtype=dtype)
    for rule in RECURRENT:
        found[f"recurrent layers, {rule}"] = partial(recurrent, rule=rule)
    for rule, (name, dtype) in itertools.product(CHUNKED, TYPES.items()):
        found[f"recurrent layers, long spans, {rule}, {name}"] = partial(recurrent, rule=rule, dtype=dtype, shortest=CHUNKED_FROM)
    found["norms behind recurrent layers"] = gated_norms
    if bench.device.type == "cuda":  # the interpreter rounds to 8 bits wrongly
        found["rotary and write, cache of 8 bits"] = partial(rotary, dtype=torch.bfloat16, eight_bits=True)
    return found | {"page copies and slot moves": copies, "pages to the host and back": offloaded}


def elementwise(bench: Bench, chance: random.Random, dtype: torch.dtype) -> float:
    """Norms, with and without the residual, SwiGLU and GeGLU, gates with a limit, and hyper-connections."""
    worst, tolerance = 0.0, ROUNDINGS[dtype]
    for size in (7, chance.randint(30, 80)) if bench.tiny else (7, chance.randint(30, 1100), 4096, 8192):
        rows = chance.randint(1, 3 if bench.tiny else 300)
        x, residual = (random_values(rows, size, dtype=dtype, device=bench.device) for _ in range(2))
        weight, epsilon = random_values(size, dtype=dtype, device=bench.device), 1e-5
        with poisoned():
            worst = max(worst, error(operations.rms_norm(x, weight, epsilon), exact_norm(x, weight, epsilon), tolerance))
            sums = (x.double() + residual.double()).to(dtype)
            found = operations.add_rms_norm(x, residual, weight, epsilon)
            worst = max(worst, error(found, exact_norm(sums, weight, epsilon), tolerance), error(residual, sums, tolerance))
            both = random_values(rows, 2 * size, dtype=dtype, device=bench.device)
            for how in (
                reference.PLAIN,
                Activation(True),
                *(Activation(limit=0.7, form=form) for form in ("steep", "before", "behind")),
            ):
                worst = max(worst, error(operations.gated(both, how), reference.gated(both.double(), how), tolerance))
        worst = max(worst, _mixed(bench, rows, size, dtype), _crossed(bench, rows, size, dtype), _pooled(bench, rows, dtype))
    return worst


def _mixed(bench: Bench, rows: int, size: int, dtype: torch.dtype) -> float:
    """Hyper-connections of four streams, to which a layer's output is added first."""
    streams, more = (
        random_values(*shape, dtype=dtype, device=bench.device).contiguous() for shape in ((rows, 4, size), (rows, size))
    )
    given, matrix, both = (torch.randn(*shape, device=bench.device) for shape in ((rows, 4), (8, 4 * size), (2, 8)))
    shares = HyperConnectionWeights(matrix * size**-0.5, both[0], both[1], magnitude=2.0, epsilon=1e-6)
    wide = streams.double() + given.double().unsqueeze(2) * more.double().unsqueeze(1)
    with poisoned():
        mixed, found = hyper_connections.mix(streams, more, given, shares, 1e-5)
    with dispatch.forced("reference"):  # of the streams as they were rounded
        seen, gives = hyper_connections.mix(streams.float(), None, None, shares, 1e-5)
    assert gives is not None
    assert found is not None
    tolerance = ROUNDINGS[dtype]
    return max(error(streams, wide, tolerance), error(mixed, seen, tolerance), error(found, gives, tolerance))


def _crossed(bench: Bench, rows: int, size: int, dtype: torch.dtype) -> float:
    """Hyper-connections whose four streams become mixtures of each other, against the CPU."""
    streams, more = (
        random_values(*shape, dtype=dtype, device=bench.device).contiguous() for shape in ((rows, 4, size), (rows, size))
    )
    matrix, both, given = (torch.randn(*shape, device=bench.device) for shape in ((24, 4 * size), (2, 24), (rows, 20)))
    shares = HyperConnectionWeights(matrix * size**-0.5, both[0], both[1], magnitude=2.0, epsilon=1e-6, rounds=20)
    own, far = streams.to("cpu", copy=True), replace(shares, matrix=shares.matrix.cpu(), scale=both[0].cpu(), base=both[1].cpu())
    with poisoned():
        mixed, found = hyper_connections.mix(streams, more, given, shares, 1e-5)
        mean, _ = hyper_connections.mix(streams, None, None, None, 1e-5)
    with dispatch.forced("reference"):
        hyper_connections.mix(own, more.cpu(), given.cpu(), far, 1e-5)
        seen, gives = hyper_connections.mix(streams.cpu().float(), None, None, far, 1e-5)  # of the streams as they were rounded
    assert found is not None
    assert gives is not None
    pairs = (streams, own), (mixed, seen), (found, gives), (mean, streams.double().mean(1))
    return max(error(ours.cpu(), theirs.cpu(), ROUNDINGS[dtype]) for ours, theirs in pairs)


def _pooled(bench: Bench, rows: int, dtype: torch.dtype) -> float:
    """Keys of an index's pools, against the CPU."""
    keys, gates = (torch.randn(rows, 128).to(dtype) for _ in range(2))
    places, cache, slots = torch.randn(16, 128), torch.randn(512, 1, 1, 256).to(dtype), torch.arange(13, 13 + rows)
    own = cache.to(bench.device, copy=True)
    keys, gates, places, slots = (x.to(bench.device) for x in (keys, gates, places, slots))
    with poisoned():
        pools.write_pools(keys, gates, places, slots, own)
    with dispatch.forced("reference"):
        pools.write_pools(keys.cpu(), gates.cpu(), places.cpu(), slots.cpu(), cache)
    return error(own.cpu(), cache, ROUNDINGS[dtype])


def ngrams_and_streams(bench: Bench, chance: random.Random, dtype: torch.dtype) -> float:
    """What `gpu_checks_ngrams` has, against the CPU."""
    worst, tolerance = 0.0, ROUNDINGS[dtype]
    if bench.tiny and dtype == torch.bfloat16:  # which the interpreter cuts off instead of rounding
        tolerance *= 2
    for run in gpu_checks_ngrams.runs(chance, dtype, bench.tiny):
        with poisoned():
            ours = run(bench.device)
        with dispatch.forced("reference"):
            theirs = run(torch.device("cpu"))
        worst = max(worst, *(error(one.cpu(), other, tolerance) for one, other in zip(ours, theirs, strict=True)))
    return worst


def recurrent(bench: Bench, chance: random.Random, rule: str, dtype: torch.dtype = torch.bfloat16, shortest: int = 2) -> float:
    """Recurrent layers for sequences that begin or go on, with drafts, and with padding after them: outputs and new states, against
    the CPU. shortest: least tokens of two of them."""
    key_heads, ratio, key_size, value_size, taps = RECURRENT[rule]
    if bench.tiny:
        key_heads, ratio, key_size, value_size = min(1, key_heads), min(2, ratio), min(12, key_size), 20
    heads = key_heads * ratio
    if bench.tiny and dtype == torch.bfloat16:  # which the interpreter cuts off instead of rounding
        dtype = torch.float32
    channels = 2 * key_heads * key_size + max(1, heads) * value_size
    longest = shortest + (20 if bench.tiny else 300)
    lengths = [1, chance.randint(shortest, longest), chance.randint(2, 9), chance.randint(shortest, longest), 1]
    tokens = sum(lengths) + chance.randint(0, 3)
    fading = heads * (key_size if rule.endswith("features") else 1)
    joint = torch.randn(tokens, 2 * channels + heads + fading).to(dtype)
    weights = [torch.randn(channels, taps).to(dtype), torch.randn(channels).to(dtype), -torch.rand(heads)]
    weights += torch.randn(fading), torch.randn(heads)
    strongest, bound = chance.choice([1.0, 2.0]), chance.choice([0.0, -5.0])
    windows = torch.randn(9, taps - 1, channels).to(dtype)
    states = RecurrentStates(windows, torch.randn(9, heads, key_size, value_size))
    numbers = [
        [0, *itertools.accumulate(lengths)],
        chance.sample(range(1, 9), len(lengths)),
        [chance.randint(0, 1) for _ in lengths],
        [chance.randint(1, length) for length in lengths],
    ]

    def found(device: torch.device) -> list[Tensor]:
        own = RecurrentStates(*(part.to(device, copy=True) for part in (states.windows, states.memories)))
        spans = Spans(tuple(lengths), *(torch.tensor(some, device=device) for some in numbers))
        x, (kernel, biases, rates, offsets, skips) = joint.to(device), (weight.to(device) for weight in weights)
        mixed, more = x[:, :channels], x[:, 2 * channels :]
        if not heads:
            answer = short_convolution.short_convolution(mixed, x[:, channels : 2 * channels], kernel, biases, spans, own)
        elif rule == "state spaces":
            how = kernel, biases, rates, offsets, skips, (0.1, 2.0)
            answer = state_space.state_space(mixed, more[:, :heads], *how, spans, own)
        else:
            strengths, fades = torch.split(more, [heads, fading], 1)
            answer = gated_delta.gated_delta(mixed, strengths, fades, kernel, rates, offsets, spans, own, strongest, bound)
        return [part.cpu() for part in (answer, own.windows, own.memories)]

    with poisoned():
        ours = found(bench.device)
    with dispatch.forced("reference"):
        answer, windows, memories = found(torch.device("cpu"))
    if not ours[1].equal(windows):
        return torch.inf
    return max(relative_error(ours[0], answer, dtype), relative_error(ours[2], memories, dtype) if heads else 0.0)


def gated_norms(bench: Bench, chance: random.Random) -> float:
    """Gated norms of heads and of groups, with the gate after the norm or before it."""
    worst, dtype = 0.0, torch.bfloat16
    for heads, size in ((3, 20),) if bench.tiny else ((32, 128), (1, 3072), (8, 1024)):
        tokens = chance.randint(1, 4 if bench.tiny else 300)
        x, gates = (random_values(tokens, 2 * heads * size, dtype=dtype, device=bench.device)[:, : heads * size] for _ in range(2))
        x, gates = x.view(tokens, heads, size), gates.view(tokens, heads, size)
        for before, sigmoid, gains in ((False, False, (size,)), (False, True, (size,)), (True, False, (heads, size))):
            weight = random_values(*gains, dtype=dtype, device=bench.device)
            factors = gates.double().sigmoid() * (1.0 if sigmoid else gates.double())
            expected = exact_norm(x.double() * factors, weight, 1e-5) if before else exact_norm(x, weight, 1e-5) * factors
            found = gated_delta.gated_norm(x, gates, weight, 1e-5, before, sigmoid)
            worst = max(worst, relative_error(found, expected, dtype))
    return worst


def rotary(bench: Bench, chance: random.Random, dtype: torch.dtype, eight_bits: bool) -> float:
    """Rotary embedding, with norms of heads and without; some tokens are padding. Queries by themselves, too."""
    worst, device = 0.0, bench.device
    for size in (16, 80) if bench.tiny else (64, 80, 96, 128, 256):
        heads, kv_heads = chance.choice([(2, 1), (4, 4), (3, 1)])
        tokens = chance.randint(1, 4 if bench.tiny else 200)
        joint = random_values(tokens, (heads + 2 * kv_heads) * size, dtype=dtype, device=device)
        frequencies = 1.0 / 10000.0 ** (torch.arange(0, size, 2).float() / size)
        table = reference.rotary_table(frequencies, torch.arange(tokens) * 3, dtype).to(device)
        slots = torch.tensor(
            [slot if chance.random() < 0.8 else -1 for slot in chance.sample(range(2 * tokens), tokens)], device=device
        )
        weights = [random_values(size, dtype=dtype, device=device) if chance.random() < 0.5 else None] * 2
        scales = torch.rand(2, kv_heads, device=device) + 0.5 if eight_bits else None
        cache = torch.zeros(2 * tokens, 2, kv_heads, size, dtype=torch.float8_e4m3fn if eight_bits else dtype, device=device)
        queries, stored = _turned(joint, table, heads, kv_heads, weights[0])
        # Between its steps it rounds as torch does, and a difference may be much smaller than its operands: plain torch is up to
        # 2.2 roundings from this, one time in six above one.
        tolerance = 4 * ROUNDINGS[dtype]
        alone = operations.rotate(joint[:, : heads * size].clone(), table, weights[0], 1e-5)
        worst = max(worst, error(alone, queries, tolerance))
        found = operations.rotate_and_write(joint, table, slots, cache, weights[0], weights[1], 1e-5, scales)
        worst = max(worst, error(found, queries, tolerance))
        expected = torch.zeros(cache.shape, dtype=torch.float64, device=device)
        expected[slots[slots >= 0]] = stored[slots >= 0]
        back = cache.double() if scales is None else cache.double() * scales.double()[:, :, None]
        worst = max(worst, error(back, expected, E4M3 if eight_bits else tolerance))
    return worst


def _turned(joint: Tensor, table: Tensor, heads: int, kv_heads: int, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Queries [tokens, heads, size], and keys and values [tokens, 2, kv_heads, size], in float64."""
    size = joint.shape[1] // (heads + 2 * kv_heads)
    every = joint.double().view(len(joint), -1, size)
    turned = every[:, : heads + kv_heads]
    if weight is not None:
        turned = exact_norm(turned, weight, 1e-5)
    half = size // 2
    swapped = torch.cat((turned[..., half:], turned[..., :half]), -1)
    turned = turned * table[:, 0].double() + swapped * table[:, 1].double()
    return turned[:, :heads], torch.stack((turned[:, heads:], every[:, heads + kv_heads :]), 1)


def copies(bench: Bench, chance: random.Random) -> float:
    """Page copies and slot moves: exactly what the plain branch does on a CPU."""
    wrong = 0.0
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        layers, count, page_size, width = (
            3,
            12,
            chance.choice([1, 4, 16]),
            chance.choice([8, 48] if bench.tiny else [48, 2048, 4100]),
        )
        pages = torch.randint(0, 100, (layers, count, page_size, width)).to(dtype)
        places = chance.sample(range(count), 8)
        filled = [chance.randint(0, page_size) for _ in range(4)]
        columns = torch.tensor([places[:4], places[4:], filled])
        wrong += _differ(bench, pages, columns, torch.empty(0, dtype=torch.int64))
        slots = pages.view(layers, count * page_size, width)
        order = chance.sample(range(count * page_size), min(count * page_size, 10) // 2 * 2)
        starts = torch.tensor(sorted({0, len(order) // 4, len(order) // 2}))
        wrong += _differ(bench, slots, torch.tensor([order[::2], order[1::2]]), starts)
    return wrong


def _differ(bench: Bench, before: Tensor, columns: Tensor, starts: Tensor) -> float:
    """Elements that differ between device and CPU. columns: sources, targets, and for pages the filled tokens."""
    own, plain = before.to(bench.device, copy=True), before.clone()
    _change(own, columns.to(bench.device), starts.to(bench.device))
    with dispatch.forced("reference"):
        _change(plain, columns, starts)
    return float((own.cpu() != plain).sum())


def _change(x: Tensor, columns: Tensor, starts: Tensor) -> None:
    if x.dim() == 4:
        paging.copy_pages(x, columns[0], columns[1], columns[2])
    else:
        paging.move_slots(x, columns[0], columns[1], starts)


def offloaded(bench: Bench, chance: random.Random) -> float:
    """KV offload: numbers that differ when they come back, while the device goes on writing to their pages."""
    parts = [torch.randn(layers, 40, 16, width, device=bench.device).bfloat16() for layers, width in ((4, 2048), (3, 576), (1, 7))]
    host, wrong = HostPages(parts, 32), 0.0
    for _ in range(4):
        pages, places, targets = chance.sample(range(40), 20), chance.sample(range(1, 33), 20), chance.sample(range(40), 20)
        before = [part[:, pages].clone() for part in parts]
        host.save(list(zip(pages, places, strict=True)))
        for part in parts:
            part.add_(1)
        host.load(list(zip(places, targets, strict=True)))
        wrong += sum(float((part[:, targets] != was).sum()) for part, was in zip(parts, before, strict=True))
    return wrong
