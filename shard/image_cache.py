"""Cache of image features, keyed by image content: requests about a recently encoded image reuse them.

They are needed again where a prompt's chunk ends within an image, or with another question about one: of a cached prompt only full
pages are shared, so the end of an image that lies in the next page is computed anew.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable

from torch import Tensor

from .pictures import PromptImage

MOST = 8192  # tokens: eight images of a million pixels to Qwen 3 VL, 270 MB to that of 8 billion parameters


class ImageCache:
    """LRU cache of image features, limited by tokens."""

    def __init__(self, most: int = MOST) -> None:
        """most: tokens of all that are kept; a single larger image is kept alone."""
        self._most = most
        self._tokens = 0
        self._kept: OrderedDict[Hashable, Tensor] = OrderedDict()

    def of(self, picture: PromptImage, encode: Callable[[PromptImage], Tensor]) -> Tensor:
        """[tokens of the image, levels, hidden]: cached, or computed by `encode`."""
        if picture.key is None:
            return encode(picture)
        if picture.key in self._kept:
            self._kept.move_to_end(picture.key)
            return self._kept[picture.key]
        while self._kept and self._tokens + picture.tokens > self._most:  # before there are more
            self._tokens -= len(self._kept.popitem(last=False)[1])
        found = self._kept[picture.key] = encode(picture)
        self._tokens += len(found)
        return found
