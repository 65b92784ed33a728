"""Additions of low rank, laid out for the machine that they run on. Knows tensors only.

On a CPU each adapter is a pair of products as `linear` lays them out, for its rows; on an accelerator all of them are two launches
(`fused_experts`), which ask the host nothing, so that graphs can hold them. A row's result depends on no other row.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from .adapters import Additions, Chosen
from .choose import triton_for
from .linear import Exact, Weight

Pair = tuple[Tensor, Tensor]  # [rank, inputs], and [outputs, rank] times the adapter's factor


class OneByOne(Additions):
    """By products as `linear` lays them out."""

    def __init__(self, pairs: Sequence[Pair | None], exact: Exact) -> None:
        self._pairs = [pair and (Weight(pair[0], None, exact), Weight(pair[1], None, exact)) for pair in pairs]
        super().__init__([weight for pair in self._pairs if pair for weight in pair])

    def add(self, x: Tensor, out: Tensor, chosen: Chosen) -> None:
        """See Additions."""
        for pair, (start, end) in zip(self._pairs, pairwise(chosen.starts.tolist()), strict=True):
            if pair is not None and end > start:
                down, up = pair
                rows = chosen.order[start:end]
                out.index_add_(0, rows, up(down(x[rows])))


class Together(Additions):
    """By Triton: stacked, as high as the highest of them, with zeros."""

    def __init__(self, pairs: Sequence[Pair | None], exact: Exact) -> None:
        self._steady = exact is Exact.STEADY
        there = [pair for pair in pairs if pair is not None]
        rank, (down, up) = max(len(pair[0]) for pair in there), there[0]
        nothing = down[:0], up[:, :0]
        lacking = [(pair or nothing, rank - len((pair or nothing)[0])) for pair in pairs]
        self._downs = torch.stack([pad(pair[0], (0, 0, 0, rows)) for pair, rows in lacking])
        self._ups = torch.stack([pad(pair[1], (0, columns)) for pair, columns in lacking])
        super().__init__([self._downs, self._ups])

    def add(self, x: Tensor, out: Tensor, chosen: Chosen) -> None:
        """See Additions."""
        from .fused_experts import add_products

        inner = x.new_zeros(len(x), self._downs.shape[1])
        add_products(inner, x, self._downs, chosen.order, chosen.starts, self._steady)
        add_products(out, inner, self._ups, chosen.order, chosen.starts, self._steady)


def lay_out(pairs: Sequence[Pair | None], exact: Exact = Exact.USUAL) -> Additions | None:
    """pairs: of each adapter; None: it leaves this weight as it is; exact: see `linear`. None, if all do."""
    first = next((pair for pair in pairs if pair), None)
    return (Together if triton_for(first[0]) else OneByOne)(pairs, exact) if first else None
