"""Images of a prompt: which token places they take, and their positions for the rotary embedding. Plain ints, but for pixels.

An image is a grid of tokens. In most families each has three rotary positions, one for time, one for its row and one for its
column, and text after it continues behind the larger side of the grid (multimodal rotary embedding, M-RoPE: Wang et al. 2024,
arXiv:2409.12191), so that positions fall behind places:

    tokens      w  w  [ 2 rows of 3 ]   w  w
    places      0  1  2  3  4  5  6  7  8  9
    time        0  1  2  2  2  2  2  2  5  6
    row         0  1  2  2  2  3  3  3  5  6
    column      0  1  2  3  4  2  3  4  5  6
"""

from array import array
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass

from torch import Tensor

AXES = 3  # time, row, column


@dataclass(slots=True, eq=False)
class PromptImage:
    """One image of a prompt: its grid of tokens and its pixels."""

    start: int  # index of its first token in the prompt
    rows: int
    columns: int
    width: int  # tokens per row, in some families with one that ends the row
    pixels: Tensor | None  # uint8, see Image in shard.proto; None: the prompt is computed, and pixels are not needed any more
    key: Hashable = None  # equal for equal images; None: unknown
    size: tuple[int, ...] = ()  # of the original image, see Image in shard.proto

    @property
    def end(self) -> int:
        """Index of the token after it."""
        return self.start + self.rows * self.width

    @property
    def tokens(self) -> int:
        """Number of its tokens with features, without those that end rows."""
        return self.rows * self.columns

    def between(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """(place, index of its feature) of its tokens between these places, without those that end rows."""
        for place in range(max(start, self.start), min(stop, self.end)):
            row, column = divmod(place - self.start, self.width)
            if column < self.columns:
                yield place, row * self.columns + column


class PromptImages:
    """All images of a prompt, in order."""

    def __init__(self, pictures: Listing[PromptImage], turned: bool, whole: bool = False) -> None:
        """turned: their tokens have rotary positions of their own; whole: attention within an image is bidirectional, so it is
        computed at once."""
        self._all = pictures
        self._whole = whole
        self.end = pictures[-1].end  # the place after all of them
        self._axes = tuple(array("I") for _ in range(AXES)) if turned else ()  # positions of all places before `end`, by axis
        following = place = 0
        for picture in pictures if turned else ():
            following = self._turn(picture, following + picture.start - place)
            place = picture.end
        self._shift = following - place  # of positions after all images, relative to places

    def _turn(self, picture: PromptImage, first: int) -> int:
        """Appends positions of the text before an image, and its own, from `first` on. Returns the next one."""
        time, rows, columns = self._axes
        for axis in self._axes:
            axis.extend(range(first - (picture.start - len(axis)), first))
        grid = range(picture.rows * picture.columns)
        time.extend(first for _ in grid)
        rows.extend(first + number // picture.columns for number in grid)
        columns.extend(first + number % picture.columns for number in grid)
        return first + max(picture.rows, picture.columns)

    def __iter__(self) -> Iterator[PromptImage]:
        return iter(self._all)

    @property
    def turned(self) -> bool:
        return bool(self._axes)

    def position(self, place: int) -> int:
        """Position of a token after all images."""
        return place + self._shift

    def positions(self, axis: int, start: int, stop: int) -> list[int]:
        """Positions of the tokens at these places along one axis: time, rows or columns."""
        first = max(start, self.end)
        within = self._axes[axis][start:stop] if self._axes else range(start, min(stop, self.end))
        return [*within, *range(first + self._shift, stop + self._shift)]

    def between(self, start: int, stop: int) -> Iterator[tuple[PromptImage, list[int], list[int]]]:
        """Images with tokens between these places, with their places and the indexes of their features."""
        for picture in self._all:
            found = [*picture.between(start, stop)]
            if found:
                places, numbers = zip(*found, strict=True)
                yield picture, [*places], [*numbers]

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, bool]]:
        """Ends of the parts that are computed separately between these places, and whether attention in each is bidirectional."""
        for picture in self._all if self._whole else ():
            if start < picture.start < stop:
                yield picture.start, False
            if start < picture.end and picture.start < stop:
                yield min(picture.end, stop), True
                start = picture.end
        if start < stop:
            yield stop, False

    def reach(self, start: int, stop: int) -> tuple[int, int]:
        """Where a step from `start` that should end at `stop` may end without cutting an image that is computed at once: the last
        such place up to `stop`, and the first from there on."""
        for picture in self._all if self._whole else ():
            if picture.start < stop < picture.end:
                return max(start, picture.start), picture.end
        return stop, stop

    def forget(self) -> None:
        """Drops the pixels: the prompt is computed."""
        for picture in self._all:
            picture.pixels = None
