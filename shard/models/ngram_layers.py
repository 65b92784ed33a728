"""N-gram embeddings (Qwen 4 Exp): some layers, before all else, add embeddings of each token's hashed n-grams to the streams. See
`kernels.ngrams` and `ngrams`.

Their tables may be larger than the rest of the model, so each rank has some of the rows; a row that it lacks counts as 0, and
lookups are all-reduced. What follows every rank computes whole, as the streams are whole on each.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.ngram_hashes import NgramHashes
from ...kernels.ngrams import opened, rows_of, take
from ...kernels.spans import RecurrentStates
from ..step import Step
from .fields import AGAIN
from .gated_hyper_stream import GatedHyperStream
from .holder import Holder
from .loader import Loader
from .ngrams import NgramShape
from .shape import Unsupported

EMBEDDING = "ple.ple_embedding"
# Tensors that follow from config.json, which checkpoints have all the same.
KNOWN = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


class NgramHasher:
    """Computes the rows of all layers' tables that a step's tokens look up."""

    def __init__(self, ngrams: NgramShape, device: torch.device) -> None:
        multipliers, sizes, offsets = (
            torch.tensor([of(layer) for layer in ngrams.layers], device=device)
            for of in (ngrams.multipliers, ngrams.sizes, ngrams.offsets)
        )
        heads = len(ngrams.layers), ngrams.before, ngrams.heads
        self._hashes = NgramHashes(multipliers, sizes.view(heads), offsets.view(heads), ngrams.end)
        self._layers = ngrams.layers

    def __call__(self, step: Step) -> dict[int, Tensor]:
        """The rows by layer, [tokens, heads] each."""
        assert step.spans is not None
        assert step.before is not None
        found = rows_of(step.tokens, step.before, step.spans, self._hashes)
        return dict(zip(self._layers, found.unbind(0), strict=True))


class NgramLayer(Holder):
    """The n-gram embedding of one layer."""

    def __init__(self, load: Loader, ngrams: NgramShape) -> None:
        hidden, streams = load.shape.hidden, ngrams.streams
        _check(load, ngrams, load.index)
        self.table = _table(load, ngrams, load.index)
        names = ("ple.key_proj", streams * hidden), ("ple.value_proj", hidden)
        self.inward = load.laid_out(torch.cat([load.unrounded_matrix(name, size, ngrams.size) for name, size in names]))
        norms = [load.gains(f"ple.norm_{part}", streams * hidden).view(streams, hidden) for part in ("key", "query", "conv")]
        self.gains = torch.stack(norms)
        self.apart, channels = ngrams.most, ngrams.channels(hidden)
        taps = load.source.tensor(f"{load.prefix}ple.conv1d.weight", (channels, 1, ngrams.width)).squeeze(1)
        zeros = self.apart - 1  # between the taps
        self.taps = functional.pad(taps.unsqueeze(2), (zeros, 0)).flatten(1)[:, zeros:].contiguous()
        self._ranks, self._epsilon = load.ranks, load.shape.norm_epsilon

    def __call__(self, stream: GatedHyperStream, rows: Tensor, step: Step, states: RecurrentStates) -> None:
        """Adds to the streams what they take of the embeddings at these rows of the table, [tokens, heads]. Updates the sequences'
        states."""
        assert step.spans is not None
        streams = stream.settled()
        embedded = self._ranks.look_up(self.table, rows).flatten(1)
        taken, normal = opened(self.inward(embedded), streams, self.gains, self._epsilon)
        take(streams, taken, normal, self.taps, self.apart, step.spans, states)


def _check(load: Loader, ngrams: NgramShape, layer: int) -> None:
    """Raises Unsupported if a checkpoint's hash parameters differ from those that follow from config.json."""
    for part, values in zip(KNOWN, (ngrams.multipliers(layer), ngrams.sizes(layer), ngrams.offsets(layer)), strict=True):
        name = f"{load.prefix}{EMBEDDING}.{part}"
        if load.source.has(name) and load.source.stored(name, ("I64",)).flatten().tolist() != [*values]:
            raise Unsupported(f"tensor {name} is not what follows from config.json: {AGAIN}")


@torch.inference_mode()
def _table(load: Loader, ngrams: NgramShape, layer: int) -> Tensor:
    """This rank's rows, with zeros beyond the end, read part by part: they may be most of the memory that there is."""
    source, name = load.source, f"{load.prefix}{EMBEDDING}.ngram_embedding"
    rows, size, own = ngrams.rows(layer), ngrams.size // ngrams.count, ngrams.slice(layer, load.ranks.size)
    first = load.ranks.rank * own
    if source.has(f"{name}.weight"):
        return source.tensor(f"{name}.weight", (rows, size), (0, first, first + own))
    found = torch.zeros(own, size, dtype=source.dtype, device=source.device)
    part = -(-rows // ngrams.parts)
    for number in range(first // part, -(-min(first + own, rows) // part)):
        begin, end = number * part, min((number + 1) * part, rows)
        start, stop = max(first, begin), min(first + own, end)
        cut = (0, start - begin, stop - begin)
        found[start - first : stop - first] = source.tensor(f"{name}.shard_{number}.weight", (end - begin, size), cut)
    return found
