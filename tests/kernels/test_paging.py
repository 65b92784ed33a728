"""Page copies and slot moves, by the reference and by Triton's kernels, compared with copying slots one by one, in every layer."""

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
def each_implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    dispatch.force(request.param)
    yield
    dispatch.force("")


def int64_tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def random_bits(*shape: int, dtype: torch.dtype) -> Tensor:
    """All bit patterns, NaNs included: floats of 8 and 16 bits are copied bit by bit."""
    return torch.randint(-128, 127, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.int8).view(dtype).to(DEVICE)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return found.view(torch.int8).equal(expected.view(torch.int8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_page_copies_match_slot_by_slot_copies(dtype: torch.dtype, rng: random.Random) -> None:
    page_size, width = rng.choice([1, 3, 16]), rng.choice([2, 12, 300])
    pages = random_bits(LAYERS, PAGES, page_size, width, dtype=dtype)
    expected = pages.clone()
    shuffled_pages = rng.sample(range(PAGES), PAGES)
    targets = shuffled_pages[:4]
    sources = [rng.choice(shuffled_pages[4:]) for _ in targets]
    filled = [rng.randint(0, page_size) for _ in targets]
    for source, target, count in zip(sources, targets, filled, strict=True):
        for layer in range(LAYERS):
            for slot in range(count):
                expected[layer, target, slot] = pages[layer, source, slot]
    paging.copy_pages(pages, int64_tensor(sources), int64_tensor(targets), int64_tensor(filled))
    assert same_bits(pages, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_slot_moves_match_moves_one_by_one_in_order(dtype: torch.dtype, rng: random.Random) -> None:
    """As a draft tree is committed: the accepted nodes, ascending, move to the slots after the root. Rows of any length, slots
    anywhere."""
    width, count = rng.choice([2, 12, 300]), 40
    slots = random_bits(LAYERS, count, width, dtype=dtype)
    row_slots = rng.sample(range(count), count)
    sources, targets, starts = [], [], [0]
    for row in (row_slots[:15], row_slots[15:18], row_slots[18:]):
        accepted = sorted(rng.sample(range(len(row)), rng.randint(0, len(row))))
        sources += [row[i] for i in accepted]
        targets += row[: len(accepted)]
        starts.append(len(sources))
    expected = slots.clone()
    for source, target in zip(sources, targets, strict=True):
        expected[:, target] = expected[:, source].clone()
    paging.move_slots(slots, int64_tensor(sources), int64_tensor(targets), int64_tensor(starts))
    assert same_bits(slots, expected)


def test_page_copies_support_layers_that_are_not_contiguous(rng: random.Random) -> None:
    storage = random_bits(LAYERS, 2, PAGES, 4, 6, dtype=torch.float32)
    before, pages = storage.clone(), storage[:, 1]
    paging.copy_pages(pages, int64_tensor([2]), int64_tensor([5]), int64_tensor([3]))
    assert same_bits(storage[:, 0].contiguous(), before[:, 0].contiguous())
    assert same_bits(storage[:, 1, 5, :3].contiguous(), before[:, 1, 2, :3].contiguous())
    assert same_bits(storage[:, 1, 5, 3:].contiguous(), before[:, 1, 5, 3:].contiguous())


def test_empty_copies_and_moves_change_nothing() -> None:
    pages = random_bits(LAYERS, PAGES, 4, 6, dtype=torch.float32)
    before = pages.clone()
    paging.copy_pages(pages, int64_tensor([]), int64_tensor([]), int64_tensor([]))
    paging.move_slots(pages.view(LAYERS, -1, 6), int64_tensor([]), int64_tensor([]), int64_tensor([0]))
    assert same_bits(pages, before)
