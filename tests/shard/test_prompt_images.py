"""Images within a prompt: positions of their tokens (M-RoPE), rows of their features, and where steps may cut the prompt."""

import random

import pytest
import torch

from penstock.shard.pictures import PromptImage, PromptImages

NOTHING = torch.empty(0)


def image_at(start: int, rows: int, columns: int, row_ends: bool = False) -> PromptImage:
    return PromptImage(start, rows, columns, columns + row_ends, NOTHING)


def test_mrope_positions_of_a_prompt_with_one_image() -> None:
    found = PromptImages([image_at(2, 2, 3)], turned=True)
    assert found.positions(0, 0, 10) == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6]
    assert found.positions(1, 0, 10) == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6]
    assert found.positions(2, 0, 10) == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]
    assert found.position(8) == 5


@pytest.mark.parametrize("seed", range(20))
def test_mrope_positions_of_any_part_of_a_prompt_with_several_images(seed: int) -> None:
    """Against positions that are computed token by token."""
    generator = random.Random(seed)
    pictures, expected, token, position = [], [list[int](), list[int](), list[int]()], 0, 0
    for _ in range(generator.randint(1, 4)):
        for _ in range(generator.randint(0, 5)):
            for axis in expected:
                axis.append(position)
            token, position = token + 1, position + 1
        rows, columns = generator.randint(1, 4), generator.randint(1, 4)
        pictures.append(image_at(token, rows, columns))
        for row in range(rows):
            for column in range(columns):
                for axis, offset in zip(expected, (0, row, column), strict=True):
                    axis.append(position + offset)
        token, position = token + rows * columns, position + max(rows, columns)
    found = PromptImages(pictures, turned=True)
    for axis in expected:
        axis += range(position, position + 10)
    for axis, axis_positions in enumerate(expected):
        for _ in range(20):
            start, stop = sorted(generator.choices(range(len(axis_positions) + 1), k=2))
            assert found.positions(axis, start, stop) == axis_positions[start:stop]
    assert [found.position(token + i) for i in range(10)] == expected[0][-10:]


def test_positions_without_mrope_are_the_token_indices() -> None:
    found = PromptImages([image_at(2, 2, 3, row_ends=True)], turned=False)
    assert found.positions(0, 1, 14) == [*range(1, 14)]
    assert found.position(20) == 20
    assert not found.turned


def test_tokens_of_a_span_are_mapped_to_rows_of_image_features() -> None:
    first, second = image_at(1, 2, 2, row_ends=True), image_at(9, 1, 2, row_ends=True)
    found = PromptImages([first, second], turned=False)
    assert [*found.between(0, 20)] == [(first, [1, 2, 4, 5], [0, 1, 2, 3]), (second, [9, 10], [0, 1])]
    assert [*found.between(2, 5)] == [(first, [2, 4], [1, 2])]
    assert [*found.between(3, 4)] == []  # the token that ends a row
    assert [*found.between(11, 20)] == []


def test_steps_do_not_cut_images_whose_tokens_attend_to_each_other() -> None:
    """Images and the text between them are separate parts; a step ends before or behind an image."""
    found = PromptImages([image_at(2, 2, 3), image_at(8, 1, 2, row_ends=True)], turned=False, whole=True)
    assert [*found.parts(0, 20)] == [(2, False), (8, True), (11, True), (20, False)]
    assert [*found.parts(4, 9)] == [(8, True), (9, True)]
    assert [*found.parts(11, 12)] == [(12, False)]
    assert [*found.parts(0, 2)] == [(2, False)]
    ends = [found.reach(0, stop) for stop in (1, 2, 3, 7, 8, 9, 10, 11, 12)]
    assert ends == [(1, 1), (2, 2), (2, 8), (2, 8), (8, 8), (8, 11), (8, 11), (11, 11), (12, 12)]
    assert found.reach(4, 7) == (4, 8)


def test_steps_may_cut_images_with_causal_attention() -> None:
    found = PromptImages([image_at(2, 2, 3)], turned=True)
    assert [*found.parts(1, 5)] == [(5, False)]
    assert found.reach(1, 5) == (5, 5)
