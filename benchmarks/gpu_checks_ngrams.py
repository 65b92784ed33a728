"""Checks of `gpu_checks` for gated hyper-connections, n-gram embeddings, and index keys that are means of pools: each as a function
that can run on any device.
"""

import itertools
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from penstock.kernels import gated_hyper_connections, means, ngrams, reference
from penstock.kernels.ngram_hashes import NgramHashes
from penstock.kernels.spans import RecurrentStates, Spans

# streams; dilation and number of convolution taps; tokens of a pool: Qwen 4 Exp's, as far as is known
COUNT, APART, TAPS, POOL = 4, 3, 4, 16

Run = Callable[[torch.device], list[Tensor]]


def runs(chance: random.Random, dtype: torch.dtype, tiny: bool) -> Iterator[Run]:
    """Functions of a device that return their results on it; the inputs are the same on every device."""
    rows, size = (3, 20) if tiny else (chance.randint(1, 200), chance.choice([2048, 4096, chance.randint(1, 999)]))
    yield _mixed(rows, size, dtype)
    yield _ngrams(chance, size, dtype)
    yield _pooled(rows, dtype)


def _mixed(rows: int, size: int, dtype: torch.dtype) -> Run:
    """Gated hyper-connections, with a layer's output added to the streams first."""
    streams, more = (torch.randn(rows, *shape).to(dtype) for shape in ((COUNT, size), (size,)))
    gates, giving = (torch.randn(rows, width).to(dtype) for width in (COUNT * size, COUNT))
    given, gains = torch.rand(rows, COUNT), torch.rand(COUNT, size)

    def run(device: torch.device) -> list[Tensor]:
        own = streams.to(device, copy=True)
        normal = gated_hyper_connections.spread(own, more.to(device), given.to(device), gains.to(device), 1e-5)
        seen, gives = gated_hyper_connections.gathered(normal, gates.to(device), giving.to(device), COUNT)
        assert gives is not None
        return [own, normal, seen, gives]

    return run


def _ngrams(chance: random.Random, size: int, dtype: torch.dtype) -> Run:
    """N-gram embeddings, for sequences that begin or go on, with drafts."""
    lengths = [1, 1, chance.randint(2, 9), chance.randint(2, 20), 1]
    tokens, channels, reach = sum(lengths), COUNT * size, (TAPS - 1) * APART
    joint, streams = torch.randn(tokens, channels + size).to(dtype), torch.randn(tokens, COUNT, size).to(dtype)
    taps, gains = torch.zeros(channels, reach + 1, dtype=dtype), torch.rand(3, COUNT, size)
    taps[:, ::APART] = torch.randn(channels, TAPS) / 2
    windows = torch.randn(9, reach, channels).to(dtype)
    ids, before = torch.randint(0, 5, (tokens,)), torch.randint(0, 5, (len(lengths), APART - 1))  # many of them ends of texts
    sizes, offsets = torch.randint(20_000_000, 20_000_400, (2, APART - 1, 8)), torch.arange(2 * (APART - 1) * 8) * 20_000_400
    hashes = torch.randint(0, 1 << 40, (2, APART)), sizes, offsets.view(sizes.shape)
    numbers = [
        [0, *itertools.accumulate(lengths)],
        chance.sample(range(1, 9), len(lengths)),
        [chance.randint(0, 1) for _ in lengths],
        [chance.randint(1, length) for length in lengths],
    ]

    def run(device: torch.device) -> list[Tensor]:
        own, states = (
            streams.to(device, copy=True),
            RecurrentStates(windows.to(device, copy=True), torch.zeros(9, 0, 0, 0, device=device)),
        )
        spans = Spans(tuple(lengths), *(torch.tensor(some, device=device) for some in numbers))
        taken, normal = ngrams.opened(joint.to(device), own, gains.to(device), 1e-5)
        ngrams.take(own, taken, normal, taps.to(device), APART, spans, states)
        multipliers, heads, first = (x.to(device) for x in hashes)
        rows = ngrams.rows_of(ids.to(device), before.to(device), spans, NgramHashes(multipliers, heads, first, 3))
        return [taken, own, states.windows, rows]

    return run


def _pooled(rows: int, dtype: torch.dtype) -> Run:
    keys, gains = torch.randn(rows, 130).to(dtype), torch.rand(128)
    table = reference.rotary_table(torch.rand(64), torch.arange(rows), dtype)
    cache, slots = torch.randn(512, 1, 1, 128).to(dtype), torch.arange(13, 13 + rows)

    def run(device: torch.device) -> list[Tensor]:
        own, wide = cache.to(device, copy=True), keys.to(device)
        means.write_means(wide[:, 2:], gains.to(device), table.to(device), slots.to(device), own, POOL, 1e-5)
        return [own]

    return run
