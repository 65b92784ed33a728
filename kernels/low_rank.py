"""LoRA products, laid out for the machine that they run on. Knows tensors only.

On a CPU each adapter is a pair of products as `linear` lays them out, for its rows; on an accelerator all adapters are two launches
(`fused_experts`), which need no answer from the host, so that CUDA graphs can hold them. A row's result depends on no other row.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from .adapters import LoraMatrices, Pair, RowAdapters
from .dispatch import triton_for
from .linear import Invariance, Weight, compile_products

Products = tuple[Weight, Weight]
COMPILED = 32  # most rows of one adapter in a step for which oneDNN's products are compiled ahead


class LoopedLowRank(LoraMatrices):
    """LoRA on a CPU, one adapter after the other, with products as `linear` lays them out."""

    def __init__(self, pairs: Sequence[Pair | None], largest: Pair, exact: Invariance) -> None:
        self._exact, self._device = exact, largest[0].device
        self.later = sum(factor.nbytes for factor in largest)
        self._products = [pair and self.prepared(pair) for pair in pairs]

    @property
    def weights(self) -> list[Weight]:
        """See LoraMatrices."""
        return [weight for each in self._products if each for weight in each]

    def add(self, x: Tensor, out: Tensor, chosen: RowAdapters) -> None:
        """See LoraMatrices."""
        for products, (start, end) in zip(self._products, pairwise(chosen.starts.tolist()), strict=True):
            if products is not None and end > start:
                down, up = products
                rows = chosen.order[start:end]
                out.index_add_(0, rows, up(down(x[rows])))

    def prepared(self, pair: Pair) -> Products:
        """See LoraMatrices."""
        down, up = (Weight(factor.to(self._device), None, self._exact) for factor in pair)
        compile_products((down, up), COMPILED)  # or the first steps with it would wait for that
        return down, up

    def put(self, number: int, prepared: Products | None) -> None:
        """See LoraMatrices."""
        self._products[number] = prepared


class FusedLowRank(LoraMatrices):
    """LoRA in Triton: all adapters' matrices stacked, padded with zeros to the largest rank."""

    later = 0  # its place is allocated already

    def __init__(self, pairs: Sequence[Pair | None], largest: Pair, exact: Invariance) -> None:
        self._invariant = exact is Invariance.INVARIANT
        down, up = largest
        self._downs = down.new_zeros(len(pairs), *down.shape)
        self._ups = up.new_zeros(len(pairs), *up.shape)
        for number, pair in enumerate(pairs):
            self.put(number, pair and self.prepared(pair))

    @property
    def weights(self) -> list[Tensor]:
        """See LoraMatrices."""
        return [self._downs, self._ups]

    def add(self, x: Tensor, out: Tensor, chosen: RowAdapters) -> None:
        """See LoraMatrices."""
        from .fused_experts import add_products

        inner = x.new_zeros(len(x), self._downs.shape[1])
        add_products(inner, x, self._downs, chosen.order, chosen.starts, self._invariant)
        add_products(out, inner, self._ups, chosen.order, chosen.starts, self._invariant)

    def prepared(self, pair: Pair) -> Pair:
        """See LoraMatrices: padded, so that only a copy remains."""
        lacking = self._downs.shape[1] - len(pair[0])
        return pad(pair[0], (0, 0, 0, lacking)), pad(pair[1], (0, lacking))

    @torch.inference_mode()
    def put(self, number: int, prepared: Pair | None) -> None:
        """See LoraMatrices. In place, since CUDA graphs read from there."""
        self._downs[number], self._ups[number] = prepared or (0, 0)


def lay_out(pairs: Sequence[Pair | None], exact: Invariance = Invariance.USUAL, largest: Pair | None = None) -> LoraMatrices | None:
    """The LoRA matrices of one weight. pairs: of each adapter; None: an adapter that doesn't change this weight, or isn't loaded;
    exact: see `linear`; largest: the largest shapes that may be loaded later. None if nothing can ever be added."""
    there = [pair for pair in (*pairs, largest) if pair]
    if not there:
        return None
    highest = max(there, key=lambda pair: len(pair[0]))
    return (FusedLowRank if triton_for(highest[0]) else LoopedLowRank)(pairs, highest, exact)
