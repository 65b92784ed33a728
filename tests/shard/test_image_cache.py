"""What is kept of images."""

import torch
from torch import Tensor

from penstock.shard.image_cache import ImageCache
from penstock.shard.pictures import PromptImage


def picture(key: object, tokens: int = 4) -> PromptImage:
    return PromptImage(0, 1, tokens, tokens, torch.empty(0), key)  # type: ignore[arg-type]


def encoded(cache: ImageCache, *asked: PromptImage) -> list[object]:
    """Those that had to be."""
    found = list[object]()

    def encode(one: PromptImage) -> Tensor:
        found.append(one.key)
        return torch.full((one.tokens, 1, 2), float(len(found)))

    for one in asked:
        assert cache.of(one, encode).shape == (one.tokens, 1, 2)
    return found


def test_the_same_image_is_kept() -> None:
    cache = ImageCache(10)
    assert encoded(cache, picture("a"), picture("b"), picture("a"), picture("b")) == ["a", "b"]


def test_the_one_that_nobody_asked_for_longest_goes() -> None:
    cache = ImageCache(10)
    assert encoded(cache, picture("a"), picture("b"), picture("a"), picture("c"), picture("a"), picture("b")) == [
        "a",
        "b",
        "c",
        "b",
    ]


def test_one_that_is_too_large_is_kept_alone() -> None:
    cache = ImageCache(10)
    assert encoded(cache, picture("a"), picture("b", 12), picture("b", 12), picture("a"), picture("b", 12)) == [
        "a",
        "b",
        "a",
        "b",
    ]


def test_a_large_one_takes_the_places_of_several() -> None:
    a, b, c, large = picture("a"), picture("b"), picture("c"), picture("large", 8)
    assert encoded(ImageCache(12), a, b, c, large, c, large, b) == ["a", "b", "c", "large", "b"]


def test_what_nobody_knows_is_not_kept() -> None:
    cache = ImageCache(10)
    assert encoded(cache, picture(None), picture(None)) == [None, None]
