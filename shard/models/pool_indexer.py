"""The indexer that chooses pools of tokens instead of single tokens (GLM 5 Next): see `kernels.pools` and `kernels.indexed`."""

from torch import Tensor

from ...kernels.indexed import PoolSelection
from ...kernels.operations import layer_norm
from ...kernels.pools import write_pools
from ...kernels.ragged import needs_selection
from ..step import Step
from .indexer import NAME, Indexer
from .loader import Loader
from .rotary import Places
from .traits import Index, Latent


class PoolIndexer(Indexer):
    """An `Indexer` whose tokens have gates beside keys, by which they are pooled. It has no rotary embedding."""

    def __init__(self, load: Loader, latent: Latent, index: Index) -> None:
        super().__init__(load, latent, index)
        name, full = f"{load.prefix}{NAME}.index_kpool_compress_gate", (index.size, load.shape.hidden)
        self.gate = load.laid_out(load.source.tensor(name, full))
        self.places = load.wide(f"{NAME}.index_kpool_compress_ape", index.pool, index.size)

    def __call__(self, x: Tensor, made: Tensor, places: Places, step: Step, cache: Tensor) -> PoolSelection | None:
        """See `Indexer`. Writes gates, and keys of pools, too."""
        index = self.index
        write_pools(layer_norm(self.key(x), self.norm, index.epsilon), self.gate(x), self.places, step.slots, cache)
        if not needs_selection(step.attention, index.most):
            return None
        weights = self.weights(x.float()) * (index.heads * index.size) ** -0.5
        return PoolSelection(self._queries(made, places), weights, index.most, members=index.pool)
