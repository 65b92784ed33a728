"""The cache of encoded images: hits, eviction of the least recently used, and size limit."""

import torch
from torch import Tensor

from penstock.shard.image_cache import ImageCache
from penstock.shard.pictures import PromptImage


def image_with_key(key: object, tokens: int = 4) -> PromptImage:
    return PromptImage(0, 1, tokens, tokens, torch.empty(0), key)  # type: ignore[arg-type]


def encoded_keys(cache: ImageCache, *requested: PromptImage) -> list[object]:
    """Requests these images from the cache in turn; returns the keys of those that had to be encoded."""
    keys = list[object]()

    def encode(image: PromptImage) -> Tensor:
        keys.append(image.key)
        return torch.full((image.tokens, 1, 2), float(len(keys)))

    for image in requested:
        assert cache.of(image, encode).shape == (image.tokens, 1, 2)
    return keys


def test_cached_images_are_not_encoded_again() -> None:
    cache = ImageCache(10)
    assert encoded_keys(cache, image_with_key("a"), image_with_key("b"), image_with_key("a"), image_with_key("b")) == ["a", "b"]


def test_least_recently_used_image_is_evicted() -> None:
    cache = ImageCache(10)
    assert encoded_keys(
        cache,
        image_with_key("a"),
        image_with_key("b"),
        image_with_key("a"),
        image_with_key("c"),
        image_with_key("a"),
        image_with_key("b"),
    ) == [
        "a",
        "b",
        "c",
        "b",
    ]


def test_image_larger_than_the_cache_is_kept_as_its_only_entry() -> None:
    cache = ImageCache(10)
    assert encoded_keys(
        cache, image_with_key("a"), image_with_key("b", 12), image_with_key("b", 12), image_with_key("a"), image_with_key("b", 12)
    ) == [
        "a",
        "b",
        "a",
        "b",
    ]


def test_large_image_evicts_several_smaller_ones() -> None:
    a, b, c, large = image_with_key("a"), image_with_key("b"), image_with_key("c"), image_with_key("large", 8)
    assert encoded_keys(ImageCache(12), a, b, c, large, c, large, b) == ["a", "b", "c", "large", "b"]


def test_images_without_a_key_are_not_cached() -> None:
    cache = ImageCache(10)
    assert encoded_keys(cache, image_with_key(None), image_with_key(None)) == [None, None]
