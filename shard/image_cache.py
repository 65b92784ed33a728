"""Features of images, by what these show: whoever asks about an image that others have asked about lately finds them.

They are needed again where a prompt's chunk ends within an image, or with another question about one: of a cached prompt only full
pages are shared, so the end of an image that lies in the next page is computed anew.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable

from torch import Tensor

from .pictures import Picture

MOST = 8192  # tokens: eight images of a million pixels to Qwen 3 VL, 270 MB to that of 8 billion parameters


class ImageCache:
    """The latest ones."""

    def __init__(self, most: int = MOST) -> None:
        """most: tokens of all that are kept; of one larger image, that one."""
        self._most = most
        self._tokens = 0
        self._kept: OrderedDict[Hashable, Tensor] = OrderedDict()

    def of(self, picture: Picture, encode: Callable[[Picture], Tensor]) -> Tensor:
        """[tokens of the picture, levels, hidden]: those that are kept, or what `encode` makes of it."""
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
