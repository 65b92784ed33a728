"""Adapters of low rank (LoRA; Hu et al. 2021, arXiv:2106.09685): what they add to the products of a weight.

Many stand beside each other, and each row goes by its own or by none. How they are laid out stands in `low_rank`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # [rank, inputs], and [outputs, rank] times the adapter's factor


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """By which adapter each row of a step goes."""

    numbers: Tensor  # [rows] int64; -1: none
    order: Tensor  # [rows]: rows sorted by adapter
    starts: Tensor  # [adapters + 1]: where each one's begin there

    def select(self, rows: Tensor) -> "RowAdapters":
        """Of some of the rows."""
        return choose(self.numbers.index_select(0, rows), len(self.starts) - 1)


def choose(numbers: Tensor, count: int) -> RowAdapters:
    """numbers: as in `RowAdapters`; count: adapters that there are."""
    ordered, order = numbers.sort(stable=True)
    return RowAdapters(numbers, order, torch.searchsorted(ordered, torch.arange(count + 1, device=numbers.device)))


class Additions(ABC):
    """What adapters add to the products of one weight. Each has a number; that of one which is gone may become another's."""

    later: int  # bytes that one takes which comes later, at most

    @property
    @abstractmethod
    def weights(self) -> Sequence[Any]:
        """What they are kept in: tensors, or laid out by `linear`."""

    @abstractmethod
    def add(self, x: Tensor, out: Tensor, chosen: RowAdapters) -> None:
        """Adds to `out` [rows, outputs], the products of x [rows, inputs], what each row's adapter adds, in place."""

    @abstractmethod
    def prepared(self, pair: Pair) -> Any:
        """What `put` takes, on any thread: all of it that takes time."""

    @abstractmethod
    def put(self, number: int, prepared: Any) -> None:
        """An adapter with that number is another from now on; None: it adds nothing. Between two steps."""
