"""What chooses the tokens that each one attends to (DeepSeek-AI 2025, DeepSeek-V3.2, arXiv:2512.02556): see `kernels.indexed`."""

import torch
from torch import Tensor

from ...kernels.codes import Codes
from ...kernels.indexed import Choosing
from ...kernels.operations import rotate_and_write_index
from ...kernels.ragged import narrows
from ..step import Step
from .loader import Loader
from .traits import Index, Latent

NAME = "self_attn.indexer"


class Chooser:
    """An index's queries are made of the latents of queries, its keys and weights of the residual stream."""

    def __init__(self, load: Loader, latent: Latent, index: Index) -> None:
        self.index = index
        self._order = self._ordered(latent.turned)
        queries = load.matrix(f"{NAME}.wq_b", index.heads * index.size, latent.queries, whole=True)
        self.query = load.laid_out(self._by_order(queries), None)
        self.key = load.laid_out(self._by_order(load.matrix(f"{NAME}.wk", index.size, load.shape.hidden, whole=True)), None)
        self.weights = load.whole(f"{NAME}.weights_proj", index.heads, wide=True)
        prefix = f"{load.prefix}{NAME}.k_norm"
        self.norm = torch.stack([load.source.tensor(f"{prefix}.{name}", (index.size,)) for name in ("weight", "bias")])[
            :, self._order
        ]

    def __call__(self, x: Tensor, latents: Tensor, rotary: Tensor, step: Step, cache: Tensor) -> Choosing | None:
        """Of a step's tokens; None if there is nothing to choose. Writes their keys to the cache.

        x: [tokens, hidden]; latents: of their queries, [tokens, latent.queries]; cache: the part of a layer that is for keys.
        """
        index, asked = self.index, narrows(step.attention, self.index.most)
        queries = self.query(latents).view(len(x), index.heads, index.size) if asked else x.new_empty(len(x), 0, index.size)
        rotate_and_write_index(queries, self.key(x), self.norm, rotary, step.slots, cache, index.epsilon)
        return Choosing(queries, self.weights(x.float()) * (index.heads * index.size) ** -0.5, index.most) if asked else None

    def _ordered(self, turned: int) -> list[int]:
        """A head's features with those first that turn, of which two that turn together are half of these apart."""
        size = self.index.size
        own, others = range(turned), range(turned, size)
        if self.index.turned_last:
            own, others = range(size - turned, size), range(size - turned)
        return [*own[::2], *own[1::2], *others] if self.index.neighbours else [*own, *others]

    def _by_order(self, weight: Tensor | Codes) -> Tensor | Codes:
        if self._order == [*range(self.index.size)]:
            return weight
        count = len(weight.codes if isinstance(weight, Codes) else weight)
        return weight[torch.arange(count).view(-1, self.index.size)[:, self._order].flatten()]
