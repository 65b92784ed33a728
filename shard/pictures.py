"""The images of a prompt: the places of their tokens, and where these turn to. Plain ints, but for pixels.

An image is a grid of tokens. In most families each has three positions for its rotary embedding, one for time, one for its row and
one for its column, and what follows goes on behind the larger side of the grid (multimodal rotary embedding: Wang et al. 2024,
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
class Picture:
    """One image."""

    start: int  # place in the prompt
    rows: int
    columns: int
    width: int  # tokens of a row, with one that ends it in some families
    pixels: Tensor | None  # uint8, see Image in shard.proto; None: the prompt is computed, so nobody needs them
    key: Hashable = None  # two that show the same have the same; None: nobody knows what it shows
    size: tuple[int, ...] = ()  # of the picture that pixels were made of, see there

    @property
    def end(self) -> int:
        """The place behind it."""
        return self.start + self.rows * self.width

    @property
    def tokens(self) -> int:
        """Without what ends rows."""
        return self.rows * self.columns

    def between(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """(place, number of its feature) of its tokens among these places, without what ends rows."""
        for place in range(max(start, self.start), min(stop, self.end)):
            row, column = divmod(place - self.start, self.width)
            if column < self.columns:
                yield place, row * self.columns + column


class Pictures:
    """Those of a prompt, in its order."""

    def __init__(self, pictures: Listing[Picture], turned: bool, whole: bool = False) -> None:
        """turned: their tokens have positions of their own; whole: each sees all of its image, which is computed at once."""
        self._all = pictures
        self._whole = whole
        self.end = pictures[-1].end  # the place behind them all
        self._axes = tuple(array("I") for _ in range(AXES)) if turned else ()  # positions of all places before that
        following = place = 0
        for picture in pictures if turned else ():
            following = self._turn(picture, following + picture.start - place)
            place = picture.end
        self._shift = following - place  # of positions behind them, from places

    def _turn(self, picture: Picture, first: int) -> int:
        """Positions of the text before it, and its own, from `first` on. Returns the next one."""
        time, rows, columns = self._axes
        for axis in self._axes:
            axis.extend(range(first - (picture.start - len(axis)), first))
        grid = range(picture.rows * picture.columns)
        time.extend(first for _ in grid)
        rows.extend(first + number // picture.columns for number in grid)
        columns.extend(first + number % picture.columns for number in grid)
        return first + max(picture.rows, picture.columns)

    def __iter__(self) -> Iterator[Picture]:
        return iter(self._all)

    @property
    def turned(self) -> bool:
        return bool(self._axes)

    def position(self, place: int) -> int:
        """Of a token behind them."""
        return place + self._shift

    def positions(self, axis: int, start: int, stop: int) -> list[int]:
        """Of the tokens at these places: time, rows or columns."""
        first = max(start, self.end)
        within = self._axes[axis][start:stop] if self._axes else range(start, min(stop, self.end))
        return [*within, *range(first + self._shift, stop + self._shift)]

    def between(self, start: int, stop: int) -> Iterator[tuple[Picture, list[int], list[int]]]:
        """Those with tokens among these places, with the places and the numbers of their features."""
        for picture in self._all:
            found = [*picture.between(start, stop)]
            if found:
                places, numbers = zip(*found, strict=True)
                yield picture, [*places], [*numbers]

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, bool]]:
        """Where what is computed at once ends among these places, and whether each of its tokens sees all of it."""
        for picture in self._all if self._whole else ():
            if start < picture.start < stop:
                yield picture.start, False
            if start < picture.end and picture.start < stop:
                yield min(picture.end, stop), True
                start = picture.end
        if start < stop:
            yield stop, False

    def reach(self, start: int, stop: int) -> tuple[int, int]:
        """Where a step from `start` may end that is to end at `stop`, within no image that is computed at once: the last place up
        to there, and the first from there on."""
        for picture in self._all if self._whole else ():
            if picture.start < stop < picture.end:
                return max(start, picture.start), picture.end
        return stop, stop

    def forget(self) -> None:
        """The prompt is computed: nobody needs pixels again."""
        for picture in self._all:
            picture.pixels = None
