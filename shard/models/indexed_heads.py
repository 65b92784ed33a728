"""Sparse attention for heads of keys and values: tokens attend to blocks (MiniMax M3) or pools (Qwen 4 Exp) of earlier tokens that
an index chooses. See `kernels.indexed`."""

import torch
from torch import Tensor

from ...kernels.indexed import BlockSelection
from ...kernels.operations import rotate_and_write
from ...kernels.ragged import needs_selection
from ..cache import Cache
from ..step import Step
from .heads import HeadAttention
from .holder import Holder
from .loader import Loader
from .mean_indexer import MeanIndexer
from .rotary import Places
from .stream import Stream
from .traits import HeadIndex


class BlockIndexer(Holder):
    """The index of block sparse attention: a query for each of this rank's key heads, and one key for all, of the size of
    attention's keys and rotated like them."""

    def __init__(self, load: Loader, index: HeadIndex) -> None:
        self.index = index
        self.epsilon = load.shape.norm_epsilon
        query, key = (f"self_attn.index_{part}" for part in "qk")
        features, size = load.shape.order(0), index.size
        order = load.ordered(torch.arange(index.own(load.ranks.size) * size), features)
        self.inward = load.fused(
            load.projection([f"{query}_proj"], [index.heads * size], wholes=[size], order=order),
            load.projection([f"{key}_proj"], [size], wholes=[size], order=order[:size]),
        )
        self.query_norm, self.key_norm = (load.ordered(load.gains(f"{one}_norm", index.size), features) for one in (query, key))

    def __call__(self, x: Tensor, stream: Stream, places: Places, step: Step, cache: Tensor) -> BlockSelection | None:
        """The index queries of a step's tokens; None if everything is attended to. Writes index keys to the cache.

        x: [tokens, hidden], of the stream; cache: a layer's index keys, [slots, 1, 1, size].
        """
        index = self.index
        queries = rotate_and_write(
            stream.product(x, self.inward), places.rotary, step.slots, cache, self.query_norm, self.key_norm, self.epsilon
        )
        if not needs_selection(step.attention, index.most):
            return None
        return BlockSelection(queries, cache, index.most, index.block, index.local)


class SparseHeadAttention(HeadAttention):
    """Attention of a layer with such an index, in the place of `HeadAttention`."""

    def __init__(self, load: Loader) -> None:
        super().__init__(load)
        index = load.shape.blocks
        assert index is not None
        self.indexer = BlockIndexer(load, index) if index.block else MeanIndexer(load, index)

    def __call__(self, stream: Stream, norm: Tensor | None, step: Step, places: Places, cache: Cache) -> Tensor:
        """See `HeadAttention`. Writes index keys, too."""
        x = stream.normalized(norm)
        asked = self.indexer(x, stream, places, step, cache.index_keys[self.index])
        return self.attend(stream.product(x, self.inward), step, places, cache.layers[self.index], asked)
