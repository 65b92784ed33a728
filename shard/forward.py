"""Model runner: runs steps of the model, eagerly or padded to the size of a recorded CUDA graph that is replayed.

A step of few tokens is hundreds of small kernel launches, which take the CPU longer than the accelerator needs for the work; a
graph is one launch. Graphs are recorded after warm-up, since they hold the addresses of the cache.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels import lookahead, ragged
from ..kernels.layout import AttentionLayout, Expansion, kind
from . import graph_sizes, step
from .cache import Cache
from .models.decoder import Decoder
from .step import DeviceSamples, NgramContext, Room, Span, Step

log = logging.getLogger(__name__)

# Decode steps for which no lean graph is tried after one did not hold a step: the next ones are like that, and planning takes long.
FULL = 16

Compute = Callable[[], Tensor]
# Records what a function does on the device; the result replays it, with the same tensors, and returns the same output tensor.
Record = Callable[[Compute], Compute]


@dataclass(frozen=True, slots=True)
class GraphExtent:
    """The largest step, and the sizes for which graphs are recorded (`graph_sizes.parse`)."""

    tokens: int
    rows: int
    total: int  # most tokens of a sequence
    pages: int  # in the pool
    chosen: tuple[int, ...] | None = None
    drafts: bool = False  # sequences come with drafts ...
    trees: bool = False  # ... that form trees, not only chains


@dataclass(frozen=True, slots=True)
class Graph:
    """A recorded CUDA graph of a forward, with its size and input buffers."""

    room: Room
    input: Step
    replay: Compute  # returns [rows of the room, hidden]


class Forward:
    """The model over one cache. `replayed` and `eager` count steps."""

    def __init__(self, decoder: Decoder, cache: Cache) -> None:
        self.replayed = 0
        self.eager = 0
        self._decoder = decoder
        self._cache = cache
        self._layout = _layout_of(decoder, cache)
        self._adapted = bool(decoder.adapters.names)
        self._remembers = decoder.shape.recurrent is not None
        ngrams = decoder.shape.ngrams
        self._before = NgramContext(ngrams.before, ngrams.end, ngrams.image, decoder.shape.vocabulary) if ngrams else None
        self.narrows = decoder.shape.kv_shared_layers > 0
        self._decodes: list[Graph] = []  # for spans of one token (pure decode); by size
        self._lean: list[Graph] = []  # for those of them whose attention has one item for each row; by size
        self._mixed: list[Graph] = []  # for any spans; by size
        self._full = 0  # decode steps until a lean graph is tried again
        self._last: Step | None = None  # the last step, if it ran without a graph
        # Recorded on the device when the last graph has run: from then on its inputs, and those of the others, may be written. None
        # if they were written since.
        self._inputs_read: torch.cuda.Event | None = None

    def __call__(self, spans: Listing[Span], picked: DeviceSamples | None = None) -> Tensor:
        """Computes spans, writes their keys and values, and returns the hidden states of the wanted rows: [rows, hidden], valid
        until the next call. picked: see `step.plan`."""
        tokens = sum([len(span.tokens) for span in spans])
        # Also where a pool of positions that ends here may begin within an image: graphs do not take the image's rotary positions.
        back = max(0, self._layout.members - 1)
        shows = any(span.sequence.shows(span.start - back) for span in spans if span.sequence.pictures is not None)
        own, graph = (None, None) if shows else self._padded(spans, tokens, picked)
        if own is None:
            own = self._plan(spans, picked=picked)
        if own.heirs is not None:
            assert picked is not None
            assert picked.parents is not None
            self._cache.inherit(own.heirs, picked.parents)
        if graph is None:
            return self._compute(own)
        self.replayed += 1
        self._last = None
        found = graph.replay()
        if found.is_cuda:
            self._inputs_read = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._inputs_read.record()
        return found[: sum([span.wanted for span in spans])]

    def follow(self, spans: Listing[Span]) -> Tensor:
        """The same for spans of one token each, which continue those of the last call in their order; these wanted one row each.
        The last call's plan is reused, unless a recorded graph would be quicker."""
        own = step.follow(self._last, spans, self._layout) if self._last is not None else None
        return self._compute(own) if own is not None else self(spans)

    def _compute(self, own: Step) -> Tensor:
        self.eager += 1
        self._last = own
        return self._decoder(own, self._cache)

    def compile(self) -> None:
        """Compiles what a step needs that is begun before the last one's tokens are known."""
        entries = [(0, 0, 0, 0, 0, -1, 0, 0)]  # a token without a beam
        token, tables = (torch.zeros(1, dtype=dtype, device=self._layout.device) for dtype in (torch.int64, torch.int32))
        none = lookahead.unknown(self._layout.device, entries, [])
        for own in (none, replace(none, beams=True)):
            lookahead.fill(token, tables if own.beams else None, own, token, token)
        self._cache.inherit(none, token)

    def record(self, record: Record, extent: GraphExtent, progress: Callable[[str], None]) -> None:
        """Records the graphs, the largest first: the others find room in the memory that it takes."""
        if not self._decoder.shape.replayed:
            return
        began = time.perf_counter()
        mixed = graph_sizes.mixed(extent.chosen, extent.tokens, extent.drafts, self._remembers)
        lean = [] if self._layout.invariant else graph_sizes.lean(extent.chosen, extent.rows)
        sizes = [(size, self._mixed) for size in mixed] + [(size, self._lean) for size in lean]
        sizes += [(size, self._decodes) for size in graph_sizes.decodes(extent.chosen, extent.rows)]
        for count, (size, graphs) in enumerate(sorted(sizes, key=lambda one: -one[0])):
            progress(f"recording graphs: {count} of {len(sizes)}")
            mixes, most = graphs is self._mixed, (extent.total, extent.pages)
            rows = min(size, graph_sizes.MIXED_ROWS) if mixes else size
            capacity = ragged.capacity(self._layout, size, rows, *most, mixes, mixes and extent.trees, graphs is self._lean)
            room = Room(size, rows, capacity)
            # Nothing but padding, which is computed and written nowhere.
            own = self._plan([], room=room)
            replay = record(lambda own=own: self._decoder(own, self._cache))  # type: ignore[misc]
            graphs.insert(0, Graph(room, own, replay))
        log.info(f"recorded {len(sizes)} graphs in {time.perf_counter() - began:.1f} s")

    def _plan(
        self,
        spans: Listing[Span],
        room: Room | None = None,
        into: Step | None = None,
        picked: DeviceSamples | None = None,
        after: torch.cuda.Event | None = None,
    ) -> Step:
        narrows = self.narrows and self._decoder.kept is None
        return step.plan(spans, self._layout, room, into, picked, self._adapted, self._remembers, narrows, self._before, after)

    def _padded(self, spans: Listing[Span], tokens: int, picked: DeviceSamples | None) -> tuple[Step, Graph] | tuple[None, None]:
        """The step, in the input buffers of a graph that holds it, and this graph; a lean one if possible."""
        decodes = tokens == len(spans)
        self._full -= decodes and self._full > 0
        usual = _fitting(self._decodes if decodes else self._mixed, tokens)
        tried = self._lean if decodes and usual is not None and not self._full else []
        lean = next((one for one in tried if usual is not None and one.room.tokens == usual.room.tokens), None)
        for graph in (lean, usual):
            if graph is None:
                continue
            try:
                own = self._plan(spans, graph.room, graph.input, picked, self._inputs_read)
            except ragged.CapacityExceeded:  # it shares more prefixes, or wants more rows, than steps usually do
                self._full = FULL if graph is lean else self._full
            else:
                self._inputs_read = None
                return own, graph
        return None, None


def _fitting(graphs: Listing[Graph], tokens: int) -> Graph | None:
    place = bisect_left(graphs, tokens, key=lambda graph: graph.room.tokens)
    return graphs[place] if place < len(graphs) else None


def _layout_of(decoder: Decoder, cache: Cache) -> AttentionLayout:
    """Describes to the kernels what the decoder's attention reads."""
    shape, ranks, latent = decoder.shape, decoder.ranks.size, decoder.shape.latent is not None
    return AttentionLayout(
        page_size=cache.page_size,
        kinds=tuple(
            kind(
                window,
                shape.query_heads(window) // ranks,
                shape.key_heads(ranks, window),
                shape.cached_size(window),
                latent,
                window in shape.whole_images,
                shape.chunked and window > 0,
            )
            for window in sorted(set(shape.windows))
        ),
        latent=shape.latent.size if shape.latent else 0,
        expansion=expansion_of(decoder),
        softcap=shape.softcap,
        sinks=shape.sinks != "",
        most=shape.most,
        block=shape.blocks.block if shape.blocks else 0,
        members=shape.pool,
        near=shape.compressed.window if shape.compressed else 0,
        entries=shape.compressed.kinds if shape.compressed else (),
        dtype=decoder.embedding.dtype,
        device=decoder.embedding.device,
        eight_bits=any(layer.element_size() == 1 for layer in cache.layers.values()),
        invariant=decoder.invariant,
    )


def expansion_of(decoder: Decoder) -> Expansion | None:
    """What a rank's latents can be expanded to; None: they can't, or a token's bits may not depend on how many are computed with
    it."""
    shape, latent = decoder.shape, decoder.shape.expandable
    if latent is None or decoder.invariant:
        return None
    return Expansion(shape.query_heads(0) // decoder.ranks.size, latent.size, latent.plain, latent.turned, latent.values)
