"""The index that chooses pools of tokens for heads of keys and values, for all heads alike (Qwen 4 Exp): see `kernels.indexed` and
`kernels.means`."""

import torch
from torch import Tensor

from ...kernels.indexed import PoolSelection
from ...kernels.means import write_means
from ...kernels.operations import rotate
from ...kernels.ragged import needs_selection
from ..step import Step
from .holder import Holder
from .loader import Loader
from .rotary import Places
from .stream import Stream
from .traits import HeadIndex

NAME = "self_attn.indexer"


class MeanIndexer(Holder):
    """An index with query heads of its own, and one key for all. As many features of each rotate as of attention's heads."""

    def __init__(self, load: Loader, index: HeadIndex) -> None:
        self.index = index
        self.epsilon = load.shape.norm_epsilon
        order, outputs = load.shape.order(0, index.size), (index.heads + 1) * index.size
        both = load.matrix(f"{NAME}.index_qk_proj", outputs, load.shape.hidden, whole=True)
        self.inward = load.laid_out(both[load.ordered(torch.arange(outputs), order)])
        self.query_norm, self.key_norm = (load.ordered(load.gains(f"{NAME}.{one}_layernorm", index.size), order) for one in "qk")

    def __call__(self, x: Tensor, stream: Stream, places: Places, step: Step, cache: Tensor) -> PoolSelection | None:
        """The index queries of a step's tokens; None if everything is attended to. Writes index keys of tokens and of pools to the
        cache.

        x: [tokens, hidden], of the stream; cache: a layer's index keys, [slots, 1, 1, size].
        """
        index, joint = self.index, stream.product(x, self.inward)
        assert places.pools is not None
        queries, keys = joint[:, : -index.size], joint[:, -index.size :]
        write_means(keys, self.key_norm, places.pools.first, step.slots, cache, index.pool, self.epsilon)
        if not needs_selection(step.attention, index.most):
            return None
        asking = rotate(queries.contiguous(), places.pools.own, self.query_norm, self.epsilon)
        weights = torch.full((len(x), index.heads), index.size**-0.5, device=x.device)
        return PoolSelection(asking, weights, index.most, members=index.pool, keys=cache)
