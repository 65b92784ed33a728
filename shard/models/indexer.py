"""The indexer of DeepSeek sparse attention, which chooses the tokens that each token attends to (DeepSeek-AI 2025, DeepSeek-V3.2,
arXiv:2512.02556): see `kernels.indexed`."""

import torch
from torch import Tensor

from ...kernels.codes import QuantizedWeight
from ...kernels.indexed import TokenSelection
from ...kernels.operations import layer_norm, rotate_and_write_index
from ...kernels.ragged import needs_selection
from ..step import Step
from .holder import Holder
from .loader import Loader
from .rotary import Places
from .sharpening import ScalableSoftmax
from .traits import Index, Latent

NAME = "self_attn.indexer"
EPSILON = 1e-6  # of the layer norm on the queries' input, whatever other norms have


class Indexer(Holder):
    """An indexer. Its queries are projected from query latents or from the residual stream; its keys and head weights from the
    stream."""

    def __init__(self, load: Loader, latent: Latent, index: Index) -> None:
        self.index = index
        self._order = self._ordered(latent.turned)
        hidden = load.shape.hidden
        self.inputs = hidden if index.streaming else latent.queries  # features that queries are projected from
        queries = load.matrix(f"{NAME}.wq_b", index.heads * index.size, self.inputs, whole=True)
        self.query = load.laid_out(self._by_order(queries))
        self.key = load.laid_out(self._by_order(load.matrix(f"{NAME}.wk", index.size, hidden, whole=True)))
        self.weights = load.whole(f"{NAME}.weights_proj", index.heads, wide=True)
        self.norm = _layer_norm(load, f"{NAME}.k_norm", index.size)[:, self._order]
        self.query_norm = _layer_norm(load, f"{NAME}.q_input_norm", hidden) if index.streaming else None
        self.sharpening = (
            ScalableSoftmax(load, f"{NAME}.softmax_scaling", index.heads, whole=True) if index.scalable_softmax else None
        )

    def __call__(self, x: Tensor, made: Tensor, places: Places, step: Step, cache: Tensor) -> TokenSelection | None:
        """The index queries of a step's tokens; None if everything is attended to. Writes index keys to the cache.

        x: [tokens, hidden]; made: that, or query latents, [tokens, latent.queries]; cache: a layer's part for index keys.
        """
        index, asked = self.index, needs_selection(step.attention, self.index.most)
        queries = self._queries(made, places) if asked else x.new_empty(len(x), 0, index.size)
        rotate_and_write_index(queries, self.key(x), self.norm, places.rotary, step.slots, cache, index.epsilon)
        return TokenSelection(queries, self.weights(x.float()) * (index.heads * index.size) ** -0.5, index.most) if asked else None

    def _queries(self, made: Tensor, places: Places) -> Tensor:
        """Queries before the rotary embedding: [tokens, heads, size]."""
        made = made if self.query_norm is None else layer_norm(made, self.query_norm, EPSILON)
        queries = self.query(made).view(len(made), self.index.heads, self.index.size)
        return queries if self.sharpening is None else self.sharpening(queries, places)

    def _ordered(self, turned: int) -> list[int]:
        """The order of a head's features with the rotary ones first, of which those that rotate together are half of these
        apart."""
        size = self.index.size
        own, others = range(turned), range(turned, size)
        if self.index.turned_last:
            own, others = range(size - turned, size), range(size - turned)
        return [*own[::2], *own[1::2], *others] if self.index.neighbours else [*own, *others]

    def _by_order(self, weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        if self._order == [*range(self.index.size)]:
            return weight
        count = len(weight.codes if isinstance(weight, QuantizedWeight) else weight)
        return weight[torch.arange(count).view(-1, self.index.size)[:, self._order].flatten()]


def _layer_norm(load: Loader, name: str, size: int) -> Tensor:
    """Gains and biases: [2, size]."""
    return torch.stack([load.source.tensor(f"{load.prefix}{name}.{part}", (size,)) for part in ("weight", "bias")])
