"""Finds races between streams of the simulated device (`fake_cuda`): what is written on one stream while another may still read or
write it. By vector clocks (Lamport 1978, Mattern 1989): streams, events and the host know how much of each stream has come before.

A tensor's whole memory counts as one. A graph reads and writes at once all that was read and written when it was recorded.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from penstock.kernels import transfer
from penstock.tests.shard import fake_cuda
from penstock.tests.shard.fake_cuda import OnDevice

Clock = Counter[int]  # operations by stream
# Of kernels that store through other names than those of their arguments, what they only read, beside what other streams read, too.
READ = {"picked", "parents", "entries", "tables"}


class Stream:
    """`torch.cuda.Stream`."""

    device_index, device = 0, fake_cuda.DEVICE

    def __init__(self) -> None:
        self.clock = Clock()

    def wait_stream(self, other: "Stream") -> None:
        self.clock |= other.clock  # the larger numbers

    def wait_event(self, event: Any) -> None:
        self.clock |= event.clock


class StreamOrder:
    """What was done on each stream, and the races among that: (operation before, operation)."""

    def __init__(self) -> None:
        self.done = Counter[tuple[str, bool]]()  # by operation, and whether it was on the main stream
        self.races = Counter[tuple[str, str]]()
        self.current = self.main = Stream()
        self.host = Clock()
        self.recorded: tuple[set[int], set[int]] | None = None  # while a graph is: what it reads and writes
        self._last: dict[int, dict[tuple[Stream, bool], tuple[int, str]]] = {}  # by memory, stream, and whether it writes

    def act(self, name: str, read: set[int], written: set[int]) -> None:
        """An operation on the current stream, on memory at these addresses."""
        if self.recorded is not None:
            self.recorded[0].update(read)
            self.recorded[1].update(written)
            return
        here = self.current
        here.clock |= self.host
        here.clock[id(here)] += 1
        self.done[name, here is self.main] += 1
        for place in read | written:
            last = self._last.setdefault(place, {})
            for (stream, wrote), (count, before) in last.items():
                if (wrote or place in written) and here.clock[id(stream)] < count:
                    self.races[before, name] += 1
            last[here, place in written] = here.clock[id(here)], name

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """`torch.cuda.stream`."""
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What the simulation does by itself."""
        seen, self.recorded = self.recorded, (set(), set())
        yield
        self.recorded = seen


def _places(*values: Any) -> set[int]:
    return {one.inner.untyped_storage().data_ptr() for one in fake_cuda._tensors(values) if isinstance(one, OnDevice)}


@cache
def _stored(kernel: Any) -> set[str]:
    """Arguments that a kernel may write."""
    names = set(re.findall(r"tl\.(?:store|atomic_\w+)\(\s*(\w+)", inspect.getsource(kernel.fn)))
    return names if names <= {*kernel.arg_names} else {*kernel.arg_names} - READ


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamOrder]:
    """Within this, the order of streams is watched, on a device that is simulated already."""
    order = StreamOrder()
    compute, launch, recording, replay, to_list = (
        fake_cuda.compute, fake_cuda.launch, fake_cuda.recording, fake_cuda.Graph.replay, OnDevice.tolist
    )  # fmt: skip
    graphs: dict[Any, tuple[set[int], set[int]]] = {}

    def computed(function: Any, args: Any, kwargs: Any) -> Any:
        name, found = function.overloadpacket.__name__, compute(function, args, kwargs)
        if "empty" in name or (fake_cuda._views(function) and name not in fake_cuda.COPYING):
            return found
        read, result = _places(args, kwargs), _places(found)
        written = _places(args[0]) if fake_cuda._in_place(function) else result - read
        if read or result:
            order.act(name, read, written)
        if name in fake_cuda.READING:
            order.host |= order.current.clock
        return found

    def launched(kernel: Any, grid: Any, args: Any, kwargs: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        with order.unseen():
            launch(kernel, grid, args, kwargs)
        order.act(kernel.fn.__name__, _places(given), _places([given[name] for name in _stored(kernel) if name in given]))

    @contextmanager
    def recorded(graph: Any, pool: object = None) -> Iterator[None]:
        order.recorded = graphs[graph] = set(), set()
        with recording(graph, pool):
            yield
        order.recorded = None

    def replayed(graph: Any) -> None:
        with order.unseen():
            replay(graph)
        order.act("replay", *graphs[graph])

    def listed(tensor: Any) -> Any:
        order.act("tolist", _places(tensor), set())
        order.host |= order.current.clock
        return to_list(tensor)

    def synchronize(device: object = None) -> None:
        order.host |= order.main.clock
        fake_cuda._synchronize()

    class Event(fake_cuda.Event):
        def record(self, stream: object = None) -> None:
            super().record()
            self.clock = Clock(order.current.clock)

        def synchronize(self) -> None:
            super().synchronize()
            order.host |= self.clock

    changed: list[tuple[Any, str, Callable[..., Any]]] = [
        (fake_cuda, "compute", computed),
        (fake_cuda, "launch", launched),
        (fake_cuda.Graph, "replay", replayed),
        (OnDevice, "tolist", listed),
        (torch.cuda, "graph", recorded),
        (torch.cuda, "Event", Event),
        (torch.cuda, "Stream", lambda device=None: Stream()),
        (torch.cuda, "current_stream", lambda device=None: order.current),
        (torch.cuda, "stream", order.use),
        (torch.cuda, "synchronize", synchronize),
    ]
    for where, name, what in changed:
        monkeypatch.setattr(where, name, what)
    transfer._stream.cache_clear()
    yield order
    transfer._stream.cache_clear()
