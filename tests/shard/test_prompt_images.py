"""Where an image's tokens are, and what positions they have."""

import random

import pytest
import torch

from penstock.shard.pictures import PromptImage, PromptImages

NOTHING = torch.empty(0)


def picture(start: int, rows: int, columns: int, breaks: bool = False) -> PromptImage:
    return PromptImage(start, rows, columns, columns + breaks, NOTHING)


def test_as_the_drawing_has_it() -> None:
    found = PromptImages([picture(2, 2, 3)], turned=True)
    assert found.positions(0, 0, 10) == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6]
    assert found.positions(1, 0, 10) == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6]
    assert found.positions(2, 0, 10) == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]
    assert found.position(8) == 5


@pytest.mark.parametrize("seed", range(20))
def test_positions_of_several(seed: int) -> None:
    """Whatever part is asked for, against what is said of them one token after the other."""
    chance = random.Random(seed)
    pictures, expected, place, position = [], [list[int](), list[int](), list[int]()], 0, 0
    for _ in range(chance.randint(1, 4)):
        for _ in range(chance.randint(0, 5)):
            for axis in expected:
                axis.append(position)
            place, position = place + 1, position + 1
        rows, columns = chance.randint(1, 4), chance.randint(1, 4)
        pictures.append(picture(place, rows, columns))
        for row in range(rows):
            for column in range(columns):
                for axis, more in zip(expected, (0, row, column), strict=True):
                    axis.append(position + more)
        place, position = place + rows * columns, position + max(rows, columns)
    found = PromptImages(pictures, turned=True)
    for axis in expected:
        axis += range(position, position + 10)
    for axis, every in enumerate(expected):
        for _ in range(20):
            start, stop = sorted(chance.choices(range(len(every) + 1), k=2))
            assert found.positions(axis, start, stop) == every[start:stop]
    assert [found.position(place + i) for i in range(10)] == expected[0][-10:]


def test_positions_that_nothing_turns() -> None:
    found = PromptImages([picture(2, 2, 3, breaks=True)], turned=False)
    assert found.positions(0, 1, 14) == [*range(1, 14)]
    assert found.position(20) == 20
    assert not found.turned


def test_places_of_features() -> None:
    first, second = picture(1, 2, 2, breaks=True), picture(9, 1, 2, breaks=True)
    found = PromptImages([first, second], turned=False)
    assert [*found.between(0, 20)] == [(first, [1, 2, 4, 5], [0, 1, 2, 3]), (second, [9, 10], [0, 1])]
    assert [*found.between(2, 5)] == [(first, [2, 4], [1, 2])]
    assert [*found.between(3, 4)] == []  # what ends a row
    assert [*found.between(11, 20)] == []


def test_what_is_computed_at_once() -> None:
    """Images by themselves, and what is between them; a step ends before an image or behind it."""
    found = PromptImages([picture(2, 2, 3), picture(8, 1, 2, breaks=True)], turned=False, whole=True)
    assert [*found.parts(0, 20)] == [(2, False), (8, True), (11, True), (20, False)]
    assert [*found.parts(4, 9)] == [(8, True), (9, True)]
    assert [*found.parts(11, 12)] == [(12, False)]
    assert [*found.parts(0, 2)] == [(2, False)]
    ends = [found.reach(0, stop) for stop in (1, 2, 3, 7, 8, 9, 10, 11, 12)]
    assert ends == [(1, 1), (2, 2), (2, 8), (2, 8), (8, 8), (8, 11), (8, 11), (11, 11), (12, 12)]
    assert found.reach(4, 7) == (4, 8)


def test_what_is_not() -> None:
    found = PromptImages([picture(2, 2, 3)], turned=True)
    assert [*found.parts(1, 5)] == [(5, False)]
    assert found.reach(1, 5) == (5, 5)
