"""KV cache tensors in pages, and the recurrent states of layers that have them (linear attention, short convolutions)."""

from collections import Counter
from collections.abc import Callable, Container
from collections.abc import Sequence as Listing
from itertools import accumulate

import numpy
import torch
from torch import Tensor

from ..kernels.lookahead import Unknown, inherit
from ..kernels.paging import copy_each, copy_pages, move_slots
from ..kernels.spans import RecurrentStates
from ..kernels.transfer import list_to_device, lists_to_device, to_device
from .models.ngrams import NgramShape
from .models.shape import Shape
from .pages import PADDING


class Cache:
    """Keys and values of every layer in pages. Page 0 is padding and stays zero. Layers with recurrent state (`RecurrentShape`),
    instead of or beside attention, have it in slots of their own, one per sequence.

    A layer's KV cache is a tensor [slots, 2, kv_heads, size], keys first, or [slots, 1, 1, size], where values are a part of the
    keys (MLA latents); slot = page * page_size + place in the page. Layers with equal slot shapes share one tensor.
    """

    def __init__(
        self,
        shape: Shape,
        ranks: int,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        slots: int = 0,
        computed: torch.dtype | None = None,
        features: int = 0,
    ) -> None:
        """dtype: of keys and values; slots: for recurrent states; computed: dtype of convolution windows and of features, if
        different; features: per token, kept for a draft model."""
        computed, rows = computed or dtype, (pages + 1) * page_size
        self.page_size, self.slots = page_size, slots
        self.cleared: Callable[[Listing[int]], object] = lambda pages: None  # called with pages that get new owners
        each = {layer: shape.slot(ranks, layer) for layer in shape.keyed}
        wholes = {slot: _zeros((count, rows, *slot), dtype, device) for slot, count in Counter(each.values()).items()}
        following = {slot: iter(whole.unbind(0)) for slot, whole in wholes.items()}
        self.layers: dict[int, Tensor] = {layer: next(following[slot]) for layer, slot in each.items()}
        self.layers |= {layer: self.layers[shape.source(layer)] for layer in shape.attending if layer not in self.layers}
        parts = [*wholes.values()]
        # Keys of each layer's block-choosing index, [slots, 1, 1, size], copied and moved like those of attention.
        self.index_keys: dict[int, Tensor] = {}
        if shape.blocks:
            parts.append(_zeros((len(shape.blocks.layers), rows, 1, 1, shape.blocks.size), dtype, device))
            self.index_keys = dict(zip(sorted(shape.blocks.layers), parts[-1].unbind(0), strict=True))
        # [slots, features], of each token, copied and moved with its keys; a draft model's cache refers to those of its target.
        self.features: Tensor | None = None
        if features:
            parts.append(_zeros((1, rows, features), computed, device))
            self.features = parts[-1][0]
        # Each [layers, pages, page_size, width]. Copied and zeroed as bytes where torch's operations don't support the type.
        flat = (part.view(torch.uint8) if part.itemsize == 1 else part for part in parts)
        self.pages = [part.view(len(part), pages + 1, page_size, -1) for part in flat]
        self._remembered = _remembered(shape, ranks, slots, computed, device)
        recurrent = sorted(shape.recurrent.layers) if shape.recurrent else []
        self.states = {layer: RecurrentStates(*(whole[i] for whole in self._remembered)) for i, layer in enumerate(recurrent)}
        # Of layers with n-gram embeddings, the last inputs of their convolutions.
        self.ngrams: dict[int, RecurrentStates] = {}
        if shape.ngrams:
            self.ngrams = _convolutions(shape.ngrams, shape.hidden, slots, computed, device)
            self._remembered += tuple(own.windows.unsqueeze(0) for own in self.ngrams.values())
        self._device = device
        self._bytes = [part.view(torch.uint8).numpy() for part in self.pages] if device.type == "cpu" else []

    def clear(self, pages: Listing[int], inherited: Container[int] = ()) -> None:
        """Zeroes `pages`: masked values must still be finite, so NaN and infinity must not outlive their request. inherited: those
        that `inherit` zeroes later."""
        self.cleared(pages)
        pages = [page for page in pages if page not in inherited] if inherited else pages
        for part in self._bytes:  # numpy takes a quarter of torch's time
            part[:, pages] = 0
        # In few launches: `index_fill_` counts bytes in 32 bits, so that a large pool takes a launch per layer.
        if pages and not self._bytes:
            self.copy([(PADDING, page, self.page_size) for page in pages])

    def copy(self, copies: Listing[tuple[int, int, int]]) -> None:
        """Copies (source, target, rows): the first `rows` tokens of page `source` to `target`. Targets are distinct and no
        sources."""
        for part in self._bytes:
            copy_each(part, copies)
        if not self._bytes:
            self.copy_rows(*lists_to_device(self._device, *zip(*copies, strict=True)))

    def copy_rows(self, sources: Tensor, targets: Tensor, rows: Tensor) -> None:
        """The same, of tensors on the device: [copies] int64 each."""
        for part in self.pages:
            copy_pages(part, sources, targets, rows)

    def inherit(self, heirs: Unknown, parents: Tensor) -> None:
        """Copies to heirs what is in their parents' partial pages, and zeroes the rest, where so far only the device knows who is
        whose parent."""
        for part in self.pages:
            inherit(part, heirs, parents)

    def copy_states(self, copies: Listing[tuple[int, int]]) -> None:
        """Copies (source, target) slots. Targets are distinct and no sources. One after the other, without an intermediate tensor:
        they are large."""
        for source, target in copies:
            for whole in self._remembered:
                whole[:, target].copy_(whole[:, source])

    def move(self, rows: Listing[Listing[tuple[int, int]]]) -> None:
        """Moves (source, target) slots, of each row one after the other; no two rows have a slot in common."""
        moves = torch.tensor([pair for row in rows for pair in row], dtype=torch.int64).t().contiguous()
        moves = to_device(moves, self._device)
        starts = list_to_device(self._device, [0, *accumulate(map(len, rows))])
        for part in self.pages:
            move_slots(part.flatten(1, 2), moves[0], moves[1], starts)


def _remembered(shape: Shape, ranks: int, slots: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Convolution windows and recurrent states of all layers, [layers, 1 + slots, ...] each; (): there are none. Slot 0 is for
    padding."""
    recurrent = shape.recurrent
    if recurrent is None:
        return ()
    count = len(recurrent.layers)
    windows = _zeros((count, 1 + slots, recurrent.width - 1, recurrent.channels(ranks)), dtype, device)
    return windows, _zeros((count, 1 + slots, *recurrent.memory(ranks)), torch.float32, device)


def _convolutions(
    ngrams: NgramShape, hidden: int, slots: int, dtype: torch.dtype, device: torch.device
) -> dict[int, RecurrentStates]:
    """States of n-gram convolutions: windows alone, `memories` are empty."""
    none = torch.zeros(1 + slots, 0, 0, 0, device=device)
    size = (1 + slots, ngrams.reach, ngrams.channels(hidden))
    return {layer: RecurrentStates(_zeros(size, dtype, device), none) for layer in ngrams.layers}


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros which, on a CPU, take no memory until they are written: the system hands out zeroed pages on first touch."""
    if device.type != "cpu" or 0 in size:
        return torch.zeros(size, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=device).view(dtype)
    untouched = numpy.zeros(int(numpy.prod(size)) * dtype.itemsize, dtype=numpy.uint8)
    return torch.from_numpy(untouched).view(dtype).view(size)
