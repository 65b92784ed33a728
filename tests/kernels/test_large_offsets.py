"""Numbers that lie further into a tensor than 32 bits can say are found: on a GPU pools of keys and values are that large.

Offsets wrap around in Triton's interpreter where they would on a device. What is not touched takes no memory.
"""

import mmap
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from penstock.kernels import dispatch, operations, paging
from penstock.kernels.fused_sampling import sample
from penstock.kernels.fused_top import top
from penstock.kernels.sampling import Draws, Penalties
from penstock.tests.kernels.test_paged_attention import DEVICE, AttentionCase, random_paged_rows

FAR = 1 << 32  # elements: without a sign they wrap around, too
NO_RESERVE = 0x4000  # mmap(2): the system keeps nothing back for memory that is not touched
PAGE = 16


@pytest.fixture(autouse=True)
def by_triton() -> Iterator[None]:
    dispatch.force("triton")
    yield
    dispatch.force("")


def vast(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros, after as many: where an offset wraps around it is found that nothing is there."""
    count = torch.Size(shape).numel()
    if DEVICE.type == "cuda":
        return torch.zeros(shape, dtype=dtype, device=DEVICE)
    memory = mmap.mmap(-1, 2 * count * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    return torch.frombuffer(memory, dtype=dtype)[count:].view(tuple(shape))


def apart(rows: Tensor) -> Tensor:
    """The same rows, so far from each other that 32 bits can just say it."""
    stride = FAR // 4
    whole = vast(((len(rows) - 1) * stride + rows.shape[1],), rows.dtype)
    return whole.as_strided(rows.shape, (stride, 1)).copy_(rows)


@pytest.mark.parametrize("page_size", [PAGE, 64])
def test_attention(page_size: int) -> None:
    near = AttentionCase(
        random_paged_rows([(1, 40), (3, 9), (1, 100)], page_size, random.Random(0)), page_size, dtype=torch.float16
    )
    slots, *slot = near.cache.shape
    shift = FAR // torch.Size(slot).numel() // page_size + 1  # pages
    expected = near.attend(near.plan())
    cache = vast((shift * page_size + slots, *slot), torch.float16)
    cache[shift * page_size :] = near.cache
    near.cache, near.rows = cache, [replace(row, pages=[shift + page for page in row.pages]) for row in near.rows]
    assert near.attend(near.plan()).equal(expected)


def test_writes() -> None:
    table = torch.randn(3, 2, 1, 64, dtype=torch.float16, device=DEVICE)
    joint = torch.randn(3, 4 * 64, dtype=torch.float16, device=DEVICE)
    near = torch.zeros(3, 2, 1, 64, dtype=torch.float16, device=DEVICE)
    far = vast((FAR // 128 + 3, 2, 1, 64), torch.float16)
    slots = torch.arange(3, device=DEVICE)
    operations.rotate_and_write(joint.clone(), table, slots, near, None, None, 1e-5)
    operations.rotate_and_write(joint.clone(), table, slots + FAR // 128, far, None, None, 1e-5)
    assert near.count_nonzero() > 0
    assert far[-3:].equal(near)


def test_copies_and_moves() -> None:
    """In the first of two layers, which are as far from each other."""
    width, pages = 256, FAR // PAGE // 256 + 3
    pool = vast((2, pages, PAGE, width), torch.int8)
    numbers = torch.randint(-128, 127, (PAGE, width), dtype=torch.int8)
    pool[:, pages - 2] = numbers.to(DEVICE)
    source, target, filled = (torch.tensor([one], device=DEVICE) for one in (pages - 2, pages - 1, 5))
    paging.copy_pages(pool, source, target, filled)
    last = (pages - 1) * PAGE
    starts = torch.tensor([0, 1], device=DEVICE)
    paging.move_slots(pool.flatten(1, 2), torch.tensor([last + 2], device=DEVICE), torch.tensor([last + 7], device=DEVICE), starts)
    for layer in range(2):
        found = pool[layer, pages - 1].cpu()
        assert found[:5].equal(numbers[:5])
        assert found[7].equal(numbers[2])
        assert not found[8:].any()


def test_logits() -> None:
    """Some that are near, and two that are not: one is filtered, the other is not."""
    torch.manual_seed(0)
    logits = torch.randn(4, 5000, device=DEVICE) * 3
    masks = torch.randint(-(1 << 31), 1 << 31, (4, -(-5000 // 32)), device=DEVICE).int()
    ones, zeros = torch.ones(4, device=DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    places = torch.tensor([0, 3, 3], device=DEVICE), torch.tensor([7, 4999, 8], device=DEVICE)
    bias = torch.tensor([3], device=DEVICE), torch.tensor([33], device=DEVICE), torch.tensor([0.5], device=DEVICE)
    penalties = Penalties(*places, torch.ones(3, device=DEVICE), ones * 1.5, ones, ones, *bias)
    draws = Draws(ones, zeros, torch.tensor([0.9, 1.0, 0.9, 1.0], device=DEVICE), ones * 0, ones, zeros + 3, zeros, zeros)
    far = apart(logits)
    expected, found = sample(logits, draws, penalties, masks), sample(far, draws, penalties, apart(masks))
    assert found.tokens.equal(expected.tokens)
    assert found.logprobs.equal(expected.logprobs)
    assert found.final.equal(expected.final)
    for one, other in zip(top(far, 3), top(logits, 3), strict=True):
        assert one.equal(other)
