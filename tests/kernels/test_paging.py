"""Page copies and slot moves: what they leave is what copying one by one leaves, in every layer."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from penstock.kernels import dispatch, paging

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, PAGES = 3, 9


@pytest.fixture(params=["reference", "triton"], autouse=True)
def either(request: pytest.FixtureRequest) -> Iterator[None]:
    dispatch.force(request.param)
    yield
    dispatch.force("")


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    """All bit patterns, NaNs among them, as floats of 8 bits and 16 bits are moved as they are."""
    return torch.randint(-128, 127, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.int8).view(dtype).to(DEVICE)


def same(found: Tensor, expected: Tensor) -> bool:
    return found.view(torch.int8).equal(expected.view(torch.int8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_copies(dtype: torch.dtype, rng: random.Random) -> None:
    page_size, width = rng.choice([1, 3, 16]), rng.choice([2, 12, 300])
    pages = numbers(LAYERS, PAGES, page_size, width, dtype=dtype)
    expected = pages.clone()
    order = rng.sample(range(PAGES), PAGES)
    targets = order[:4]
    sources = [rng.choice(order[4:]) for _ in targets]
    filled = [rng.randint(0, page_size) for _ in targets]
    for source, target, count in zip(sources, targets, filled, strict=True):
        for layer in range(LAYERS):
            for slot in range(count):
                expected[layer, target, slot] = pages[layer, source, slot]
    paging.copy_pages(pages, ints(sources), ints(targets), ints(filled))
    assert same(pages, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_moves_in_order(dtype: torch.dtype, rng: random.Random) -> None:
    """As trees are committed: the accepted nodes, ascending, to the places after the root; rows of any length, slots anywhere."""
    width, count = rng.choice([2, 12, 300]), 40
    slots = numbers(LAYERS, count, width, dtype=dtype)
    places = rng.sample(range(count), count)
    sources, targets, starts = [], [], [0]
    for row in (places[:15], places[15:18], places[18:]):
        kept = sorted(rng.sample(range(len(row)), rng.randint(0, len(row))))
        sources += [row[i] for i in kept]
        targets += row[: len(kept)]
        starts.append(len(sources))
    expected = slots.clone()
    for source, target in zip(sources, targets, strict=True):
        expected[:, target] = expected[:, source].clone()
    paging.move_slots(slots, ints(sources), ints(targets), ints(starts))
    assert same(slots, expected)


def test_layers_may_lie_apart(rng: random.Random) -> None:
    whole = numbers(LAYERS, 2, PAGES, 4, 6, dtype=torch.float32)
    before, pages = whole.clone(), whole[:, 1]
    paging.copy_pages(pages, ints([2]), ints([5]), ints([3]))
    assert same(whole[:, 0].contiguous(), before[:, 0].contiguous())
    assert same(whole[:, 1, 5, :3].contiguous(), before[:, 1, 2, :3].contiguous())
    assert same(whole[:, 1, 5, 3:].contiguous(), before[:, 1, 5, 3:].contiguous())


def test_nothing_to_do() -> None:
    pages = numbers(LAYERS, PAGES, 4, 6, dtype=torch.float32)
    before = pages.clone()
    paging.copy_pages(pages, ints([]), ints([]), ints([]))
    paging.move_slots(pages.view(LAYERS, -1, 6), ints([]), ints([]), ints([0]))
    assert same(pages, before)
