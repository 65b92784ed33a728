"""What a device would not forgive, looked for while Triton's interpreter runs a kernel.

The interpreter takes one program after the other, each operation for a whole block at once, and what a mask leaves out is zeros.
On a device programs run side by side, so do the threads of one, and what is left out holds anything. After NVIDIA's
compute-sanitizer, whose memcheck, racecheck and initcheck need a device.
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
WARP = 64  # threads of one at most
EVERYBODY = -1  # a lane that several threads hold
WORDS = ("reads", "writes", "counts in")


class Fault(AssertionError):
    """Of a kernel."""


class Touches(NamedTuple):
    """Of places in memory. COUNTS: atomic."""

    place: Numbers
    kind: Numbers
    program: Numbers
    phase: Numbers  # barriers of the program that came before
    lane: Numbers  # of the operation's block, which stands for a thread; EVERYBODY: for several
    value: Numbers  # the bits that were written; 0: none were

    def of(self, chosen: Any) -> "Touches":
        return Touches(*(column[chosen] for column in self))


@dataclass(frozen=True)
class Operation:
    """Of one program, with a block of memory."""

    kind: int
    program: int
    phase: int
    places: Numbers
    mask: Numbers
    low: int  # the first place
    high: int  # behind the last
    values: Numbers  # of the block: what was written
    threads: int  # of the program; those of one warp go in step

    def touches(self, size: int) -> Touches:
        """Of `size` bytes each."""
        whole, shape = self.values.itemsize, self.places.shape
        lane = np.flatnonzero(np.broadcast_to(self.mask, shape))
        value = np.zeros(len(lane), np.uint64)
        if self.kind == WRITES:
            value = np.broadcast_to(self.values, shape).reshape(-1)[lane].view(f"u{whole}").astype(np.uint64)
        place = self.places.reshape(-1)[lane]
        if self.kind == READS and self.places.size < self.threads > WARP:  # each that holds one reads it; one of them writes it
            lane = np.full_like(lane, EVERYBODY)
        if count := whole // size - 1:
            nth = np.tile(np.arange(count + 1, dtype=np.uint64) * np.uint64(size), len(lane))
            place, lane, value = (np.repeat(column, count + 1) for column in (place, lane, value))
            place, value = place + nth, value >> nth * np.uint64(8) & np.uint64(2 ** (8 * size) - 1)
        return Touches(place, *(np.full(len(lane), one) for one in (self.kind, self.program, self.phase)), lane, value)


@dataclass
class Launch:
    """What its programs do, one after the other."""

    starts: Numbers  # of the memory that it was given, in order
    ends: Numbers
    threads: int
    program: int = -1
    phase: int = 0
    done: list[Operation] = field(default_factory=list)

    def begin(self) -> None:
        self.program, self.phase = self.program + 1, 0

    def touch(self, kind: int, places: Numbers, mask: Numbers, values: Numbers) -> None:
        """values: what was written; of reads, what was read."""
        touched = places if mask.all() else places[np.broadcast_to(mask, places.shape)]
        if not touched.size:
            return
        low, high = int(touched.min()), int(touched.max()) + values.itemsize
        nth = int(np.searchsorted(self.starts, low, "right")) - 1
        if nth < 0 or high > self.ends[nth]:  # of one tensor, mostly
            self._check_each(kind, touched, values.itemsize)
        self.done.append(Operation(kind, self.program, self.phase, places, mask, low, high, values, self.threads))

    def _check_each(self, kind: int, places: Numbers, size: int) -> None:
        nth = np.searchsorted(self.starts, places, "right") - 1
        outside = (nth < 0) | (places + np.uint64(size) > self.ends[nth])
        if outside.any():
            raise Fault(f"a program {WORDS[kind]} memory that it was not given, in {outside.sum()} of {places.size} places")

    def check(self) -> None:
        """At the end. What is read and never written is most of all, and no matter."""
        changes = [one for one in self.done if one.kind != READS]
        if not changes:
            return
        low, high = min(one.low for one in changes), max(one.high for one in changes)
        near = [one for one in self.done if one.low < high and one.high > low]
        size = min(one.values.itemsize for one in near)
        changed = np.unique(np.concatenate([one.touches(size).place for one in changes]))
        kept = [_among(one.touches(size), changed) for one in near]
        touched = Touches(*map(np.concatenate, zip(*kept, strict=True)))
        touched = touched.of(np.argsort(touched.place, kind="stable"))
        other = touched.place[1:] != touched.place[:-1]
        _between_programs(touched, np.flatnonzero(np.r_[True, other]))
        _between_threads(touched.of(slice(None, -1)), touched.of(slice(1, None)), ~other)


def _among(touches: Touches, places: Numbers) -> Touches:
    """Those of some places, which are in order."""
    at = np.minimum(np.searchsorted(places, touches.place), len(places) - 1)
    return touches.of(places[at] == touches.place)


def _between_programs(touched: Touches, first: Numbers) -> None:
    """A place that several programs touch, and one changes, they all count in, or write the same to. first: touch of each place."""

    def differs(column: Numbers) -> Numbers:
        return np.asarray(np.maximum.reduceat(column, first) != np.minimum.reduceat(column, first))

    kind = np.minimum.reduceat(touched.kind, first)
    fault = differs(touched.program) & (differs(touched.kind) | (kind == WRITES) & differs(touched.value))
    if fault.any():
        one = touched.of(touched.place == touched.place[first[np.flatnonzero(fault)[0]]])
        words = sorted({f"{who} {WORDS[what]}" for who, what in zip(one.program, one.kind, strict=True)})
        raise Fault(f"programs race in {fault.sum()} places, of one of which program {', '.join(words[:6])} it")


def _between_threads(one: Touches, other: Touches, same_place: Numbers) -> None:
    """Two touches of a place one after the other by a program, of which one writes, are the same lane's, write the same, or have a
    barrier between them."""
    together = same_place & (one.program == other.program) & (one.phase == other.phase) & (one.lane != other.lane)
    both = (one.kind == WRITES) & (other.kind == WRITES)
    fault = together & ((one.kind == WRITES) | (other.kind == WRITES)) & ~(both & (one.value == other.value))
    if fault.any():
        place = int(np.flatnonzero(fault)[0])
        words = f"one {WORDS[one.kind[place]]}, another {WORDS[other.kind[place]]} it"
        raise Fault(f"threads race in {len(np.unique(one.place[fault]))} places, of one of which {words} with no barrier between")


def _memory(given: Iterable[Any]) -> tuple[Numbers, Numbers]:
    """Where that of tensors begins and ends, in order; of those that overlap, of all."""
    spans: list[tuple[int, int]] = []
    for low, high in sorted((one.data_ptr(), one.data_ptr() + _reach(one) * one.itemsize) for one in _tensors(given)):
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


def _reach(tensor: torch.Tensor) -> int:
    """Elements from the first to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _junk(like: Numbers) -> Numbers:
    junk = np.full(like.nbytes, 0xA5, np.uint8).view(like.dtype).reshape(like.shape)
    return np.full_like(like, np.nan) if like.dtype.kind == "f" else junk


@contextmanager
def watching() -> Iterator[list[str]]:
    """Gives the names of kernels that the interpreter has run meanwhile. Raises a Fault of each."""
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
            fault = error
            while fault is not None and not isinstance(fault, Fault):
                fault = fault.__cause__
            if fault is None:
                raise
            raise Fault(f"{names[-1]}: {fault}") from error
        finally:
            launches.pop()

    def begin(run: Callable[..., None], self: Any, *place: int) -> None:
        run(self, *place)
        launches[-1].begin()

    def barrier(run: Callable[..., None], self: Any) -> None:
        launches[-1].phase += 1

    def load(run: Callable[..., Any], self: Any, places: Any, mask: Any, other: Any, *how: Any) -> Any:
        found = run(self, places, mask, other, *how)
        launches[-1].touch(READS, places.data, mask.data, found.data)
        if other is None and not mask.data.all():
            found.data = np.where(mask.data, found.data, _junk(found.data))
        return found

    def store(run: Callable[..., Any], self: Any, places: Any, value: Any, mask: Any, *how: Any) -> Any:
        launches[-1].touch(WRITES, places.data, mask.data, value.data)
        return run(self, places, value, mask, *how)

    def count(run: Callable[..., Any], self: Any, operation: Any, places: Any, value: Any, mask: Any, *how: Any) -> Any:
        launches[-1].touch(COUNTS, places.data, mask.data, value.data)
        return run(self, operation, places, value, mask, *how)

    builder = interpreter.InterpreterBuilder
    changes = [(builder, "set_grid_idx", begin), (builder, "create_barrier", barrier), (builder, "create_masked_load", load)]
    changes += [(builder, "create_masked_store", store), (builder, "create_atomic_rmw", count)]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, change in [(interpreter.GridExecutor, "__call__", launch), *changes]:
            patch.setattr(owner, name, _around(getattr(owner, name), change))
        yield names


def _around(run: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **named: change(run, *given, **named)
