"""The kernel sanitizer reports each kind of planted fault, and reports none for correct kernels that look similar."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from penstock.tests.kernels.sanitizer import Fault  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the device, not in the interpreter")
SIZE = 16


@triton.jit
def shift(numbers, count, BARRIER: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Moves each number to the place of the one before."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(numbers + place + 1, mask=place + 1 < count, other=0.0)
    if BARRIER:
        tl.debug_barrier()
    tl.store(numbers + place, values, mask=place < count)


@triton.jit
def copy(source, target, count, MASKED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, BLOCK)
    values = tl.load(source + place, mask=place < count) if MASKED else tl.load(source + place)
    tl.store(target + place, values, mask=place < (BLOCK if MASKED else count))


@triton.jit
def scatter(target, places, values, ATOMIC: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if ATOMIC:
        tl.atomic_add(target + tl.load(places + lane), tl.load(values + lane))
    else:
        tl.store(target + tl.load(places + lane), tl.load(values + lane))


@triton.jit
def halves(words, parts, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes 32-bit words and then their 16-bit halves: `parts` is a view of the same memory."""
    lane = tl.arange(0, BLOCK)
    tl.store(words + lane, lane)
    tl.store(parts + 2 * (BLOCK - 1 - lane), lane.to(tl.int16) + BLOCK)


def test_threads_that_read_and_write_one_address_without_a_barrier_race() -> None:
    with pytest.raises(Fault, match=f"shift: threads race in {SIZE - 1} places, of one of which one reads, another writes it"):
        shift[(1,)](torch.zeros(SIZE), SIZE, BARRIER=False, BLOCK=SIZE)
    numbers = torch.arange(float(SIZE))
    shift[(1,)](numbers, SIZE, BARRIER=True, BLOCK=SIZE)
    assert numbers.tolist() == [*range(1, SIZE), 0]


@triton.jit
def double(numbers, BARRIER: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = numbers + tl.arange(0, BLOCK)
    values = 2 * tl.load(place)
    if BARRIER:
        tl.debug_barrier()
    tl.store(place, values)


def test_replicated_lanes_race_unless_there_is_a_barrier_or_a_single_warp() -> None:
    """In a block with fewer lanes than threads, several threads hold one lane, and one of them may read what another has
    written."""
    with pytest.raises(Fault, match=f"double: threads race in {SIZE} places, of one of which one reads, another writes it"):
        double[(1,)](torch.ones(SIZE), BARRIER=False, BLOCK=SIZE)
    for block, barrier, warps in ((SIZE, True, 4), (SIZE, False, 1), (256, False, 4)):
        numbers = torch.ones(block)
        double[(1,)](numbers, BARRIER=barrier, BLOCK=block, num_warps=warps)
        assert (numbers == 2).all()


def test_programs_that_read_and_write_one_address_race() -> None:
    with pytest.raises(Fault, match="shift: programs race in 1 places, of one of which program 0 reads, 1 writes it"):
        shift[(2,)](torch.zeros(2 * SIZE), 2 * SIZE, BARRIER=True, BLOCK=SIZE)


@pytest.mark.parametrize(("programs", "parties"), [(1, "threads"), (2, "programs")])
def test_writes_to_one_address_race_unless_equal_or_atomic(programs: int, parties: str) -> None:
    places, numbers = torch.zeros(SIZE, dtype=torch.int64), torch.ones(SIZE)
    target, block = torch.zeros(1), SIZE // programs
    scatter[(programs,)](target, places, numbers, ATOMIC=False, BLOCK=block)
    scatter[(programs,)](target, places, numbers, ATOMIC=True, BLOCK=block)
    assert target.item() == SIZE + 1
    with pytest.raises(Fault, match=f"scatter: {parties} race in 1 places"):
        scatter[(programs,)](target, places, torch.arange(float(SIZE)), ATOMIC=False, BLOCK=block)


def test_writes_of_different_sizes_that_overlap_race() -> None:
    words = torch.zeros(SIZE, dtype=torch.int32)
    with pytest.raises(Fault, match=f"halves: threads race in {SIZE} places"):
        halves[(1,)](words, words.view(torch.int16), BLOCK=SIZE)


def test_access_beyond_a_tensor_or_view_is_reported() -> None:
    """Also beyond a view, although its tensor goes on behind it: that memory belongs to others."""
    source = torch.arange(2.0 * SIZE)
    with pytest.raises(Fault, match=r"copy: a program reads memory that it was not given, in 1 of 16 places"):
        copy[(1,)](source[: SIZE - 1], torch.zeros(SIZE), SIZE, MASKED=False, BLOCK=SIZE)
    with pytest.raises(Fault, match=r"copy: a program writes memory that it was not given, in 2 of 16 places"):
        copy[(1,)](source, torch.zeros(SIZE - 2), SIZE, MASKED=False, BLOCK=SIZE)
    copy[(1,)](source, source[SIZE + 2 : SIZE + 4], 2, MASKED=False, BLOCK=SIZE)
    assert source[SIZE + 2 : SIZE + 5].tolist() == [0, 1, SIZE + 4]


def test_masked_out_values_are_loaded_as_nan() -> None:
    target = torch.zeros(SIZE)
    copy[(1,)](torch.ones(SIZE), target, 3, MASKED=True, BLOCK=SIZE)
    assert target.isnan().tolist() == [False] * 3 + [True] * (SIZE - 3)
