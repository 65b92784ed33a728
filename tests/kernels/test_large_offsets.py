"""Elements at offsets beyond 32 bits are accessed correctly: on a GPU, pools of keys and values are that large.

Offsets wrap around in Triton's interpreter as they would on a device. Memory that is not touched is not allocated.
"""

import mmap
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from penstock.kernels import dispatch, means, operations, paging, pools
from penstock.kernels.entries import CompletedEntries, EntryParameters, write_entries
from penstock.kernels.fused_sampling import sample
from penstock.kernels.fused_top import top
from penstock.kernels.gated_delta import gated_delta
from penstock.kernels.reference import rotary_table
from penstock.kernels.sampling import Draws, Penalties
from penstock.kernels.spans import RecurrentStates
from penstock.tests.kernels.recurrent import make_spans
from penstock.tests.kernels.test_paged_attention import DEVICE, AttentionCase, random_paged_rows

FAR = 1 << 32  # elements: unsigned 32-bit offsets wrap around, too
NO_RESERVE = 0x4000  # mmap(2): the system reserves nothing for memory that is not touched
PAGE = 16


@pytest.fixture(autouse=True)
def triton_kernels() -> Iterator[None]:
    dispatch.force("triton")
    yield
    dispatch.force("")


def sparse_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros after as many others, so that an access whose offset wraps around reads zeros."""
    count = torch.Size(shape).numel()
    if DEVICE.type == "cuda":
        return torch.zeros(shape, dtype=dtype, device=DEVICE)
    memory = mmap.mmap(-1, 2 * count * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    return torch.frombuffer(memory, dtype=dtype)[count:].view(tuple(shape))


def spread_rows(rows: Tensor) -> Tensor:
    """The same rows, so far apart that 32 bits are just enough for an offset within them."""
    stride = FAR // 4
    whole = sparse_zeros(((len(rows) - 1) * stride + rows.shape[1],), rows.dtype)
    return whole.as_strided(rows.shape, (stride, 1)).copy_(rows)


@pytest.mark.parametrize("page_size", [PAGE, 64])
def test_attention_reads_pages_beyond_32_bit_offsets(page_size: int) -> None:
    case = AttentionCase(
        random_paged_rows([(1, 40), (3, 9), (1, 100)], page_size, random.Random(0)), page_size, dtype=torch.float16
    )
    slots, *slot = case.cache.shape
    first_page = FAR // torch.Size(slot).numel() // page_size + 1  # pages
    expected = case.attend(case.plan())
    cache = sparse_zeros((first_page * page_size + slots, *slot), torch.float16)
    cache[first_page * page_size :] = case.cache
    case.cache, case.rows = cache, [replace(row, pages=[first_page + page for page in row.pages]) for row in case.rows]
    assert case.attend(case.plan()).equal(expected)


def test_cache_writes_beyond_32_bit_offsets() -> None:
    table = torch.randn(3, 2, 1, 64, dtype=torch.float16, device=DEVICE)
    joint = torch.randn(3, 4 * 64, dtype=torch.float16, device=DEVICE)
    expected = torch.zeros(3, 2, 1, 64, dtype=torch.float16, device=DEVICE)
    found = sparse_zeros((FAR // 128 + 3, 2, 1, 64), torch.float16)
    slots = torch.arange(3, device=DEVICE)
    operations.rotate_and_write(joint.clone(), table, slots, expected, None, None, 1e-5)
    operations.rotate_and_write(joint.clone(), table, slots + FAR // 128, found, None, None, 1e-5)
    assert expected.count_nonzero() > 0
    assert found[-3:].equal(expected)


def test_page_copies_and_slot_moves_beyond_32_bit_offsets() -> None:
    """In two layers that are as far apart."""
    width, pages = 256, FAR // PAGE // 256 + 3
    pool = sparse_zeros((2, pages, PAGE, width), torch.int8)
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


def test_sampling_of_logits_beyond_32_bit_offsets() -> None:
    """Rows at small and at large offsets, with and without filters."""
    torch.manual_seed(0)
    logits = torch.randn(4, 5000, device=DEVICE) * 3
    masks = torch.randint(-(1 << 31), 1 << 31, (4, -(-5000 // 32)), device=DEVICE).int()
    ones, zeros = torch.ones(4, device=DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    starts, ids, counts = (torch.tensor(own, device=DEVICE).int() for own in ([0, 1, 1, 1, 4], [7, 4999, 8, 33], [1, 1, 1, -1]))
    biases = torch.tensor([0.0, 0.0, 0.0, 0.5], device=DEVICE)
    penalties = Penalties(starts, ids, counts, biases, ones * 1.5, ones, ones)
    draws = Draws(ones, zeros, torch.tensor([0.9, 1.0, 0.9, 1.0], device=DEVICE), ones * 0, ones, zeros + 3, zeros, zeros)
    distant_logits = spread_rows(logits)
    expected, found = sample(logits, draws, penalties, masks), sample(distant_logits, draws, penalties, spread_rows(masks))
    assert distant_logits.equal(logits)
    assert found.tokens.equal(expected.tokens)
    assert found.logprobs.equal(expected.logprobs)
    assert found.final.equal(expected.final)
    for one, other in zip(top(distant_logits, 3), top(logits, 3), strict=True):
        assert one.equal(other)


def write_special_caches(cache: Tensor, first: int) -> None:
    """All that layers other than usual attention write to slots from `first` on, a multiple of 4: latents, index keys, pools by
    gates and by means, and compressed entries, which read the slots as well. cache: [slots, 1, 1, 64]."""
    torch.manual_seed(0)
    slots, table = torch.arange(first, first + 4, device=DEVICE), rotary_table(torch.rand(8), torch.arange(4), torch.float16)
    numbers, gains = torch.randn(4, 64).half().to(DEVICE), torch.ones(64, device=DEVICE)
    table, halves = table.to(DEVICE), gains.half()
    queries = numbers[:, :32].reshape(4, 1, 32)
    operations.rotate_and_write_latents(queries.clone(), numbers[:, :32].clone(), halves[:16], table, slots, cache[..., :32], 1e-5)
    operations.rotate_and_write_index(queries.clone(), numbers[:, :32].clone(), halves.view(2, 32), table, slots, cache[..., 32:])
    pools.write_pools(*numbers[:, :32].reshape(2, 4, 16), gains.view(4, 16), slots + 4, cache[..., :32])
    wide = rotary_table(torch.rand(32), torch.zeros(4), torch.float16).to(DEVICE)
    means.write_means(numbers, gains, wide, slots + 8, cache, 4, 1e-5)
    making = EntryParameters(0, gains[:32].view(1, 2, 16), halves[:16], 1e-5)
    write_entries(cache, CompletedEntries(slots[None, 2:] + 8, slots[:1] * 0), making, table[:1])


def test_latents_index_keys_pools_and_entries_beyond_32_bit_offsets() -> None:
    near = torch.zeros(16, 1, 1, 64, dtype=torch.float16, device=DEVICE)
    distant = sparse_zeros((FAR // 64 + 12, 1, 1, 64), torch.float16)
    write_special_caches(near, 4)
    write_special_caches(distant, FAR // 64)
    assert near[4:].flatten(1).any(1).all()
    assert distant[-12:].equal(near[4:])


def test_recurrent_states_beyond_32_bit_offsets() -> None:
    """Those of the convolution are beyond 31 bits."""
    near = RecurrentStates(torch.zeros(2, 3, 48, device=DEVICE), torch.zeros(2, 1, 16, 16, device=DEVICE))
    far = FAR // 256
    distant = RecurrentStates(sparse_zeros((far + 1, 3, 48), torch.float32), sparse_zeros((far + 1, 1, 16, 16), torch.float32))
    mixed, taps, one = torch.randn(3, 50, device=DEVICE), torch.randn(48, 4, device=DEVICE), torch.ones(1, device=DEVICE)
    for states, slot in ((near, 1), (distant, far)):
        gated_delta(mixed[:, :48], mixed[:, 48:49], mixed[:, 49:], taps, -one, one, make_spans([3], [slot], [0]), states)
    for expected, found in ((near.windows, distant.windows), (near.memories, distant.memories)):
        assert expected[1].all()
        assert found[far].equal(expected[1])
