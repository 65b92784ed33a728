"""How many threads torch computes with, for a while. Knows nothing of what is computed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many, for what this thread calls. Takes 3 us where it is another number."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def by_threads(count: int, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function, always computed by so many."""

    def computed(x: Tensor) -> Tensor:
        with threads(count):
            return function(x)

    return computed
