"""KV offload: copies of pages in host memory. What is copied, and where to, `offload` decides."""

from collections.abc import Sequence as Listing

import torch
from torch import Tensor

from ..kernels.transfer import list_to_device

# Bytes of one allocation: torch rounds pinned memory up to a power of two.
PIECE = 1 << 30
GATHERED = 1 << 26  # bytes gathered at once, unless a single page has more


class HostPages:
    """Places 1 to `places` in host memory, each with all layers' contents of a page, side by side.

    Pages to be saved are gathered first, and copied while the device goes on with its step; pages to be loaded are there before the
    step begins.
    """

    def __init__(self, parts: Listing[Tensor], places: int) -> None:
        """parts: of the cache, [layers, pages, ...] each, contiguous."""
        self.places = places
        self._parts = [_words(part) for part in parts]
        self._sizes = [part[:, 0].nbytes for part in self._parts]  # of a page
        self._device = self._parts[0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        size = sum(self._sizes)
        each = max(1, PIECE // size)
        self._pieces = [
            torch.empty((min(each, places - first), size), dtype=torch.uint8, pin_memory=self._stream is not None)
            for first in range(0, places, each)
        ]
        self._each = each
        self._together = max(1, GATHERED // size)

    @torch.inference_mode()
    def save(self, moves: Listing[tuple[int, int]]) -> None:
        """Copies (page, place) to the host, in order."""
        for first in range(0, len(moves), self._together):
            some = moves[first : first + self._together]
            pages = list_to_device(self._device, [page for page, _ in some])
            found = [part.index_select(1, pages).transpose(0, 1).flatten(1).view(torch.uint8) for part in self._parts]
            self._send(torch.cat(found, 1) if len(found) > 1 else found[0], [place for _, place in some])

    @torch.inference_mode()
    def load(self, moves: Listing[tuple[int, int]]) -> None:
        """Copies (place, page) to the device. Pages are distinct."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        for first in range(0, len(moves), self._together):
            some = moves[first : first + self._together]
            found = torch.empty((len(some), sum(self._sizes)), dtype=torch.uint8, device=self._device)
            for row, (place, _) in zip(found, some, strict=True):
                row.copy_(self._place(place), non_blocking=True)
            pages = list_to_device(self._device, [page for _, page in some])
            for part, own in zip(self._parts, torch.split(found, self._sizes, 1), strict=True):
                part.index_copy_(
                    1,
                    pages,
                    own.clone(memory_format=torch.contiguous_format).view(part.dtype).view(len(own), len(part), -1).transpose(0, 1),
                )

    def _send(self, rows: Tensor, places: Listing[int]) -> None:
        if self._stream is None:
            for row, place in zip(rows, places, strict=True):
                self._place(place).copy_(row)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for row, place in zip(rows, places, strict=True):
                self._place(place).copy_(row, non_blocking=True)
        rows.record_stream(self._stream)

    def _place(self, place: int) -> Tensor:
        return self._pieces[(place - 1) // self._each][(place - 1) % self._each]


def _words(part: Tensor) -> Tensor:
    """[layers, pages, words]: in the widest words that fit."""
    flat = part.view(torch.uint8).flatten(2)
    return flat.view(torch.int64) if flat.shape[2] % 8 == 0 else flat


def device_bytes(size: int) -> int:
    """Device memory needed to copy pages of `size` bytes: the gathered buffer, and its parts."""
    return 2 * max(GATHERED, size)


def page_bytes(parts: Listing[Tensor]) -> int:
    """Bytes of a page in all of `parts`."""
    return sum(part[:, 0].nbytes for part in parts)
