"""DeepSeek V4's attention: to a sliding window of keys, which double as values, and to compressed entries, each of which stands for
many earlier tokens. See `kernels.compressed` and `kernels.entries`."""

import torch
from torch import Tensor

from ...kernels.compressed import EntrySelection
from ...kernels.entries import EntryParameters, write_entries, write_series
from ...kernels.partial_rotary import rotate_last, write_keys
from ...kernels.ragged import AttentionOptions, attention, attention_with_entries, completed_entries
from ..cache import Cache
from ..step import Step
from .compression import CompressedLatent
from .holder import Holder
from .latents import LatentAttention, PerHeadWeight
from .loader import Loader
from .rotary import Places
from .stream import Stream
from .token_mixer import TokenMixer

QUERIES, MORE_QUERIES, KEYS = (f"self_attn.{name}_proj" for name in ("q_a", "q_b", "kv"))
COMPRESSOR = "self_attn.compressor"
INDEXER = f"{COMPRESSOR}.indexer"


class Compressor(Holder):
    """Computes a layer's compressed entries, and the index that selects among them. Every rank has all of it."""

    def __init__(self, load: Loader, latent: CompressedLatent, order: Tensor, index_order: Tensor) -> None:
        """order, index_order: the checkpoint's features of a key, and of an index key, in our order."""
        self.latent = latent
        series = 1 + latent.indexed
        parts, self.makings = [], list[EntryParameters]()
        for name, own, first in ((COMPRESSOR, order, latent.size), (INDEXER, index_order, latent.size * (1 + 2 * series))):
            if name == COMPRESSOR or latent.indexed:
                parts += _matrices(load, name, own, series)
                self.makings.append(_making(load, name, own, first, series, latent))
        self.inward = load.laid_out(torch.cat(parts))
        self.tensors = [tensor for making in self.makings for tensor in (making.places, making.gains)]
        self.query = self.weights = None
        if latent.indexed:
            name, size = f"{INDEXER}.q_b_proj", latent.index_heads * latent.index_size
            places = torch.arange(size).view(latent.index_heads, -1)[:, index_order].flatten()
            self.query = load.laid_out(load.matrix(name, size, latent.queries, whole=True)[places])
            self.weights = load.whole(f"{INDEXER}.scorer.weights_proj", latent.index_heads, wide=True)

    def __call__(self, x: Tensor, made: Tensor, stream: Stream, places: Places, step: Step, layer: Tensor) -> EntrySelection | None:
        """Writes a step's series to the cache, and the entries that its tokens complete; returns the index queries that select
        among entries, or None: all are attended to.

        x: [tokens, hidden]; made: query latents, [tokens, latent.queries]; layer: of the cache.
        """
        latent = self.latent
        write_series(step.slots, stream.product(x, self.inward), layer[..., latent.size : latent.size + latent.series])
        ends = completed_entries(step.attention, latent.rate, latent.indexed)
        assert places.every is not None
        table = places.every.index_select(0, ends.firsts)
        for making in self.makings:
            write_entries(layer, ends, making, table)
        if self.query is None or self.weights is None:
            return None
        queries = self.query(made).view(len(made), latent.index_heads, latent.index_size)
        rotate_last(queries, places.rotary)
        weights = self.weights(x.float()) * (latent.index_heads * latent.index_size) ** -0.5
        return EntrySelection(queries, weights, latent.index_most, members=latent.rate, first=self.makings[1].first)


def _matrices(load: Loader, name: str, order: Tensor, series: int) -> list[Tensor]:
    """The projections in the order of a slot: values and gates of the series of an entry's own tokens, then those of the
    overlapping series, which the checkpoint has first."""
    size = len(order)
    both = [load.unrounded_matrix(f"{name}.{part}_proj", series * size).view(series, size, -1).flip(0) for part in ("kv", "gate")]
    return [part[number][order] for number in range(series) for part in both]


def _making(load: Loader, name: str, order: Tensor, first: int, series: int, latent: CompressedLatent) -> EntryParameters:
    """How entries are computed. first: offset of their series in a slot."""
    places = load.wide(f"{name}.position_bias", latent.rate, series * len(order)).view(latent.rate, series, -1)
    ordered = places[..., order].transpose(0, 1).flip(0).contiguous()
    return EntryParameters(first, ordered, load.gains(f"{name}.kv_norm", len(order))[order], latent.epsilon)


class CompressedAttention(LatentAttention):
    """DeepSeek V4's attention of one layer, in the place of `HeadAttention`."""

    def __init__(self, load: Loader) -> None:
        TokenMixer.__init__(self, load)
        shape, latent = self.shape, self.shape.latent_of(self.index)
        assert isinstance(latent, CompressedLatent)
        self.latent, size = latent, latent.size
        asked = shape.heads * size
        order, queries = self._order(size, latent.plain), self._order(asked // load.ranks.size, latent.plain)
        self.inward = load.fused(
            load.projection([QUERIES], [latent.queries], wholes=[latent.queries]),
            load.projection([KEYS], [size], wholes=[size], order=order),
        )
        self.query = load.fused(load.projection([MORE_QUERIES], [asked], order=queries, inputs=latent.queries))
        self.query_norm = load.gains("self_attn.q_a_norm", latent.queries)
        self.latent_norm = load.gains("self_attn.kv_norm", size)[order]
        self.sinks = load.each_head(f"self_attn.{shape.sinks}", shape.heads)
        self.heads = shape.heads // load.ranks.size
        self.to_values = PerHeadWeight(self._to_groups(load, latent), load.exact)
        self.indexer = None
        self.compressor = Compressor(load, latent, order, self._index_order(latent)) if latent.rate else None
        self.output = load.rows("self_attn.o_b_proj", latent.groups * latent.rank, False, latent.rank)

    def _index_order(self, latent: CompressedLatent) -> Tensor:
        return self._order(latent.index_size, latent.index_size - latent.turned) if latent.indexed else torch.empty(0)

    def _to_groups(self, load: Loader, latent: CompressedLatent) -> Tensor:
        """The output projection of this rank's head groups, or its part of a group: [groups, attention output of its heads,
        rank]."""
        each, rank = self.shape.heads // latent.groups * latent.size, latent.rank  # of a whole group
        found = load.unrounded(["self_attn.o_a_proj"], [latent.groups * rank], [rank], each)
        found = found[:, self._order(each, latent.plain)].view(-1, rank, each)
        own = self.heads * latent.size
        if own < each:
            first = load.ranks.rank * own % each
            found = found[:, :, first : first + own]
        return found.transpose(1, 2).contiguous()

    def __call__(self, stream: Stream, norm: Tensor | None, step: Step, places: Places, cache: Cache) -> Tensor:
        """See `TokenMixer`: [tokens, this rank's groups * rank]."""
        assert self.query is not None
        assert self.latent_norm is not None
        size, epsilon, layer = self.latent.size, self.latent.epsilon, cache.layers[self.index]
        x = stream.normalized(norm) if self.compressor else None
        joint = stream.through(norm, self.inward) if x is None else stream.product(x, self.inward)
        made = self._normalized(joint[:, :-size])
        query = stream.product(made, self.query).view(len(made), self.heads, size)
        rotate_last(query, places.rotary, epsilon)
        write_keys(joint[:, -size:], self.latent_norm, places.rotary, step.slots, layer[..., :size], epsilon)
        how = AttentionOptions(self.window, self.shape.attention_scale, sinks=self.sinks, latent=size)
        if self.compressor is not None and x is not None:
            asked = self.compressor(x, made, stream, places, step, layer)
            found = attention_with_entries(query, layer, step.attention, how, self.compressor.latent.rate, asked)
        else:
            found = attention(query, layer, step.attention, how)
        found = found.contiguous()
        rotate_last(found, places.rotary, back=True)
        return self.to_values(found.view(len(found), -1, self._inputs)).flatten(1)

    @property
    def _inputs(self) -> int:
        """Attention output features of a group's heads on this rank."""
        assert isinstance(self.latent, CompressedLatent)
        return min(self.heads, self.shape.heads // self.latent.groups) * self.latent.size
