"""The key/value tensors, nothing else."""

from collections.abc import Sequence as Listing

import numpy
import torch
from torch import Tensor

from .models.families import Shape


class Cache:
    """Keys and values of every layer in pages. Page 0 is padding and stays zero.

    A layer is a tensor [slots, 2, kv_heads, size], keys first; slot = page * page_size + place in the page.
    """

    def __init__(self, shape: Shape, ranks: int, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        size = (shape.layers, (pages + 1) * page_size, 2, shape.kv_heads // ranks, shape.head_size)
        whole = _zeros(size, dtype, device)
        self.page_size = page_size
        self.layers = list(whole.unbind(0))
        self._pages = whole.view(shape.layers, pages + 1, page_size, -1)

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """rows: [tokens, 2 * kv_heads * size], rotated keys and values, to `slots` [tokens]."""
        cache = self.layers[layer]
        cache.view(len(cache), -1).index_copy_(0, slots, rows)

    def clear(self, pages: Listing[int]) -> None:
        """Zeroes `pages`: what is masked must still be finite, so numbers that are not must not outlive their request."""
        self._pages.index_fill_(1, torch.tensor(pages, dtype=torch.int64, device=self._pages.device), 0)

    def copy(self, source: int, targets: Listing[int], rows: int) -> None:
        """The first `rows` tokens of page `source` to each of `targets`."""
        self._pages[:, targets, :rows] = self._pages[:, source, None, :rows]


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros which, on a CPU, take no memory until they are written: the system hands out zeroed pages on first touch."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    bytes_each = torch.empty((), dtype=dtype).element_size()
    untouched = numpy.zeros(int(numpy.prod(size)) * bytes_each, dtype=numpy.uint8)
    return torch.from_numpy(untouched).view(dtype).view(size)
