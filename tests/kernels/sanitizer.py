"""Detects faults of kernels that Triton's interpreter hides and a device would not: races between programs, races between threads,
accesses out of bounds, and use of values that a mask leaves out.

The interpreter runs one program after the other and each operation for a whole block at once, and it loads zeros where a mask is
false. On a device programs run concurrently, as do the threads of a program, and masked-out values are undefined. Modelled on
NVIDIA's compute-sanitizer, whose memcheck, racecheck and initcheck need a device.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

Numbers = NDArray[Any]
READS, WRITES, COUNTS = 0, 1, 2
WARP = 64  # most threads in a warp
SEVERAL_THREADS = -1  # a lane that several threads hold copies of
VERBS = ("reads", "writes", "counts in")


class Fault(AssertionError):
    """A fault of a kernel."""


class Accesses(NamedTuple):
    """Accesses to memory addresses, one row for each. COUNTS: atomic additions."""

    address: Numbers
    kind: Numbers
    program: Numbers
    phase: Numbers  # number of barriers that the program has passed before
    lane: Numbers  # index in the operation's block, which stands for a thread; SEVERAL_THREADS: held by several threads
    value: Numbers  # the bits that were written; 0 for reads

    def of(self, chosen: Any) -> "Accesses":
        return Accesses(*(column[chosen] for column in self))


@dataclass(frozen=True)
class Operation:
    """A load, store or atomic addition of one program on a block of addresses."""

    kind: int
    program: int
    phase: int
    addresses: Numbers
    mask: Numbers
    low: int  # the first address
    high: int  # after the last byte
    values: Numbers  # of the block: what was written or read
    threads: int  # of the program; threads of one warp run in lockstep

    def accesses(self, size: int) -> Accesses:
        """As accesses to units of `size` bytes."""
        item_size, shape = self.values.itemsize, self.addresses.shape
        lane = np.flatnonzero(np.broadcast_to(self.mask, shape))
        value = np.zeros(len(lane), np.uint64)
        if self.kind == WRITES:
            value = np.broadcast_to(self.values, shape).reshape(-1)[lane].view(f"u{item_size}").astype(np.uint64)
        address = self.addresses.reshape(-1)[lane]
        if self.kind == READS and self.addresses.size < self.threads > WARP:  # all threads with a copy read; one of them writes
            lane = np.full_like(lane, SEVERAL_THREADS)
        if count := item_size // size - 1:
            offsets = np.tile(np.arange(count + 1, dtype=np.uint64) * np.uint64(size), len(lane))
            address, lane, value = (np.repeat(column, count + 1) for column in (address, lane, value))
            address, value = address + offsets, value >> offsets * np.uint64(8) & np.uint64(2 ** (8 * size) - 1)
        return Accesses(address, *(np.full(len(lane), one) for one in (self.kind, self.program, self.phase)), lane, value)


@dataclass
class Launch:
    """The operations of a launch's programs."""

    starts: Numbers  # of the tensors' memory that the launch was given, sorted
    ends: Numbers
    threads: int
    program: int = -1
    phase: int = 0
    operations: list[Operation] = field(default_factory=list)

    def begin(self) -> None:
        self.program, self.phase = self.program + 1, 0

    def record(self, kind: int, addresses: Numbers, mask: Numbers, values: Numbers) -> None:
        """Records an operation and checks its bounds. values: what was written, or what a load has read."""
        accessed = addresses if mask.all() else addresses[np.broadcast_to(mask, addresses.shape)]
        if not accessed.size:
            return
        low, high = int(accessed.min()), int(accessed.max()) + values.itemsize
        tensor = int(np.searchsorted(self.starts, low, "right")) - 1
        if tensor < 0 or high > self.ends[tensor]:  # mostly all addresses lie in one tensor
            self._check_each(kind, accessed, values.itemsize)
        self.operations.append(Operation(kind, self.program, self.phase, addresses, mask, low, high, values, self.threads))

    def _check_each(self, kind: int, addresses: Numbers, size: int) -> None:
        tensor = np.searchsorted(self.starts, addresses, "right") - 1
        outside = (tensor < 0) | (addresses + np.uint64(size) > self.ends[tensor])
        if outside.any():
            raise Fault(f"a program {VERBS[kind]} memory that it was not given, in {outside.sum()} of {addresses.size} places")

    def check(self) -> None:
        """At the end of the launch: looks for races. Memory that is only read, which is most of it, is left out."""
        changes = [one for one in self.operations if one.kind != READS]
        if not changes:
            return
        low, high = min(one.low for one in changes), max(one.high for one in changes)
        relevant = [one for one in self.operations if one.low < high and one.high > low]
        size = min(one.values.itemsize for one in relevant)
        changed = np.unique(np.concatenate([one.accesses(size).address for one in changes]))
        parts = [_to_addresses(one.accesses(size), changed) for one in relevant]
        accesses = Accesses(*map(np.concatenate, zip(*parts, strict=True)))
        accesses = accesses.of(np.argsort(accesses.address, kind="stable"))
        is_new_address = accesses.address[1:] != accesses.address[:-1]
        _between_programs(accesses, np.flatnonzero(np.r_[True, is_new_address]))
        _between_threads(accesses.of(slice(None, -1)), accesses.of(slice(1, None)), ~is_new_address)


def _to_addresses(accesses: Accesses, addresses: Numbers) -> Accesses:
    """The accesses to some addresses, which are sorted."""
    index = np.minimum(np.searchsorted(addresses, accesses.address), len(addresses) - 1)
    return accesses.of(addresses[index] == accesses.address)


def _between_programs(accesses: Accesses, first: Numbers) -> None:
    """Fails if several programs access an address and one of them changes it, unless all count in it or all write the same. first:
    index of each address's first access."""

    def differs(column: Numbers) -> Numbers:
        return np.asarray(np.maximum.reduceat(column, first) != np.minimum.reduceat(column, first))

    kind = np.minimum.reduceat(accesses.kind, first)
    fault = differs(accesses.program) & (differs(accesses.kind) | (kind == WRITES) & differs(accesses.value))
    if fault.any():
        culprits = accesses.of(accesses.address == accesses.address[first[np.flatnonzero(fault)[0]]])
        parties = sorted({f"{program} {VERBS[kind]}" for program, kind in zip(culprits.program, culprits.kind, strict=True)})
        raise Fault(f"programs race in {fault.sum()} places, of one of which program {', '.join(parties[:6])} it")


def _between_threads(first: Accesses, second: Accesses, same_address: Numbers) -> None:
    """Fails if two successive accesses of a program to an address, one of them a write, are of different lanes, unless they write
    the same or a barrier lies between them."""
    unordered = same_address & (first.program == second.program) & (first.phase == second.phase) & (first.lane != second.lane)
    both_write = (first.kind == WRITES) & (second.kind == WRITES)
    fault = unordered & ((first.kind == WRITES) | (second.kind == WRITES)) & ~(both_write & (first.value == second.value))
    if fault.any():
        index = int(np.flatnonzero(fault)[0])
        who = f"one {VERBS[first.kind[index]]}, another {VERBS[second.kind[index]]} it"
        raise Fault(f"threads race in {len(np.unique(first.address[fault]))} places, of one of which {who} with no barrier between")


def _memory(given: Iterable[Any]) -> tuple[Numbers, Numbers]:
    """Start and end addresses of the tensors' memory, sorted; overlapping tensors are merged."""
    spans: list[tuple[int, int]] = []
    for low, high in sorted((one.data_ptr(), one.data_ptr() + _extent(one) * one.itemsize) for one in _tensors(given)):
        if spans and low < spans[-1][1]:
            low, high = spans[-1][0], max(spans.pop()[1], high)
        spans.append((low, high))
    return np.array([low for low, _ in spans], np.uint64), np.array([high for _, high in spans], np.uint64)


def _tensors(given: Iterable[Any]) -> Iterator[torch.Tensor]:
    for one in given:
        if isinstance(one, tuple):
            yield from _tensors(one)
        elif isinstance(one, torch.Tensor) and one.numel():
            yield one


def _extent(tensor: torch.Tensor) -> int:
    """Number of elements from the first to the last, with gaps."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _junk(like: Numbers) -> Numbers:
    junk = np.full(like.nbytes, 0xA5, np.uint8).view(like.dtype).reshape(like.shape)
    return np.full_like(like, np.nan) if like.dtype.kind == "f" else junk


@contextmanager
def checking() -> Iterator[list[str]]:
    """Checks all kernels that the interpreter runs meanwhile, and raises a Fault for the first that has one. Yields the kernels'
    names."""
    import triton.runtime.interpreter as interpreter

    launches: list[Launch] = []
    names: list[str] = []

    def launch(run: Callable[..., None], self: Any, *given: Any, **named: Any) -> None:
        launches.append(Launch(*_memory((*given, *named.values())), WARP * named.get("num_warps", 4)))
        names.append(self.fn.__name__)
        try:
            run(self, *given, **named)
            launches[-1].check()
        except Exception as error:
            cause = error
            while cause is not None and not isinstance(cause, Fault):
                cause = cause.__cause__
            if cause is None:
                raise
            raise Fault(f"{names[-1]}: {cause}") from error
        finally:
            launches.pop()

    def begin(run: Callable[..., None], self: Any, *place: int) -> None:
        run(self, *place)
        launches[-1].begin()

    def barrier(run: Callable[..., None], self: Any) -> None:
        launches[-1].phase += 1

    def load(run: Callable[..., Any], self: Any, addresses: Any, mask: Any, other: Any, *rest: Any) -> Any:
        result = run(self, addresses, mask, other, *rest)
        launches[-1].record(READS, addresses.data, mask.data, result.data)
        if other is None and not mask.data.all():
            result.data = np.where(mask.data, result.data, _junk(result.data))
        return result

    def store(run: Callable[..., Any], self: Any, addresses: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launches[-1].record(WRITES, addresses.data, mask.data, value.data)
        return run(self, addresses, value, mask, *rest)

    def count(run: Callable[..., Any], self: Any, operation: Any, addresses: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launches[-1].record(COUNTS, addresses.data, mask.data, value.data)
        return run(self, operation, addresses, value, mask, *rest)

    builder = interpreter.InterpreterBuilder
    replacements = [(builder, "set_grid_idx", begin), (builder, "create_barrier", barrier), (builder, "create_masked_load", load)]
    replacements += [(builder, "create_masked_store", store), (builder, "create_atomic_rmw", count)]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, replacement in [(interpreter.GridExecutor, "__call__", launch), *replacements]:
            patch.setattr(owner, name, _wrap(getattr(owner, name), replacement))
        yield names


def _wrap(run: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **options: replacement(run, *arguments, **options)
