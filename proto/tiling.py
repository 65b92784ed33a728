"""Image tiling of LLaVA-NeXT and LLaVA-OneVision ("anyres"): the whole image, resized to one tile, and besides in the best-matching
resolution, in tiles. There it is centered, with black padding on two sides; rows or columns of tokens that show only padding are
dropped again, and a token ends each row. Standard library only.

What is dropped depends on the image's own size, so that comes with its pixels. Sizes are height and width, as resolutions in
config.json.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

ENOUGH = 1.1  # factor by which an image's sides may exceed their target in tokens before they are scaled down
Size = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """The tiling of one model."""

    resolutions: tuple[Size, ...]
    side: int  # pixels of a tile, along each side
    tokens: int  # of a tile, along each side
    most: int = 0  # limit on an image's tokens beside those of the whole, in tiles; 0: none

    @property
    def least(self) -> int:
        """Pixels of an image in the smallest resolution, the whole included."""
        return min(map(self._pixels, self.resolutions))

    @property
    def longest(self) -> int:
        """The most tokens that an image can have."""
        tiles = [self._tiles(resolution) for resolution in self.resolutions]
        kept = math.ceil(ENOUGH**2 * self.most) or math.inf
        return self.tokens**2 + max(int(min(high * wide, kept)) * self.tokens**2 + high * self.tokens for high, wide in tiles)

    def within(self, pixels: int) -> "Tiling":
        """The tiling restricted to resolutions with at most so many pixels; the smallest always stays."""
        most = max(pixels, self.least)
        return replace(self, resolutions=tuple(one for one in self.resolutions if self._pixels(one) <= most))

    def best(self, size: Size) -> Size:
        """The resolution that keeps most of the pixels of an image of this size, and of several the one with the least padding: as
        transformers chooses it."""

        def kept(resolution: Size) -> int:
            scale = min(resolution[1] / size[1], resolution[0] / size[0])
            return min(int(size[1] * scale) * int(size[0] * scale), math.prod(size))

        return max(self.resolutions, key=lambda one: (kept(one), kept(one) - math.prod(one)))

    def tiles(self, resolution: Size) -> int:
        """Tiles of a resolution, the whole included."""
        return 1 + math.prod(self._tiles(resolution))

    def length(self, size: Size) -> int:
        """Tokens of an image of this size."""
        rows, columns = (count * self.tokens for count in self._tiles(self.best(size)))
        rows, columns = shown(size, rows, columns)
        ratio = math.sqrt(rows * columns / (self.most * self.tokens**2)) if self.most else 0.0
        if ratio > ENOUGH:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return self.tokens**2 + rows * (columns + 1)

    def _pixels(self, resolution: Size) -> int:
        return self.tiles(resolution) * self.side**2

    def _tiles(self, resolution: Size) -> Size:
        return resolution[0] // self.side, resolution[1] // self.side


def tiling(resolutions: Iterable[Sequence[int]], side: int, patch: int, said: str = "") -> Tiling:
    """The tiling by config.json. patch: pixels of a token; said: the limit on tokens, as in "anyres_max_9". Raises ValueError."""
    found = tuple((int(height), int(width)) for height, width in resolutions)
    if not found or not 0 < patch <= side or not all(edge > 0 and edge % side == 0 for size in found for edge in size):
        raise ValueError(
            f"image_grid_pinpoints {[*found]} must be multiples of image_size {side}, and that no less than patch_size"
        )
    return Tiling(resolutions=found, side=side, tokens=side // patch, most=int(said.rpartition("_")[2] or 0))


def shown(size: Size, rows: int, columns: int) -> Size:
    """Of so many rows and columns of tokens, those that are not padding, for a centered image of this size in pixels: as
    transformers computes it."""
    height, width = size
    if width / height > columns / rows:
        return rows - (rows - int(round(height * (columns / width), 7))) // 2 * 2, columns
    return rows, columns - (columns - int(round(width * (rows / height), 7))) // 2 * 2
