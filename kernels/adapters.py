"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685): the interface to what they add to the products of a weight.

Many adapters are loaded side by side, and each row of a step uses its own or none (multi-LoRA batching). `low_rank` lays them out.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # A [rank, inputs], and B [outputs, rank] times the adapter's scaling factor


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """Which LoRA adapter each row of a step uses."""

    numbers: Tensor  # [rows] int64: index of the adapter; -1: none
    order: Tensor  # [rows]: rows sorted by adapter
    starts: Tensor  # [adapters + 1]: where each adapter's rows begin in `order`

    def select(self, rows: Tensor) -> "RowAdapters":
        """The adapters of some of the rows."""
        return choose(self.numbers.index_select(0, rows), len(self.starts) - 1)


def choose(numbers: Tensor, count: int) -> RowAdapters:
    """numbers: as in `RowAdapters`; count: how many adapters there are."""
    ordered, order = numbers.sort(stable=True)
    return RowAdapters(numbers, order, torch.searchsorted(ordered, torch.arange(count + 1, device=numbers.device)))


class LoraMatrices(ABC):
    """The LoRA matrices of all adapters for one weight. Each adapter has a number; that of an unloaded one may be reused."""

    later: int  # most bytes that an adapter takes which is loaded later

    @property
    @abstractmethod
    def weights(self) -> Sequence[Any]:
        """What holds their parameters: tensors, or weights laid out by `linear`."""

    @abstractmethod
    def add(self, x: Tensor, out: Tensor, chosen: RowAdapters) -> None:
        """Adds to `out` [rows, outputs], the products of x [rows, inputs], the LoRA product of each row's adapter, in place."""

    @abstractmethod
    def prepared(self, pair: Pair) -> Any:
        """The pair in the form that `put` takes: all work that takes time, on any thread."""

    @abstractmethod
    def put(self, number: int, prepared: Any) -> None:
        """Replaces the adapter with that number, between two steps; None: it adds nothing."""
