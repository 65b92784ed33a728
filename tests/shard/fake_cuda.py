"""A CUDA device without a GPU: tensors that say they are on it and hold real numbers, as far as plain torch computes them.

What kernels would compute is made up, but how they are launched is looked at: where their tensors are, of which types, and on
which device the thread is. Every operation that makes the host wait for a real device is noted with the line that asks for it.
So what is found here are faults that else show on a GPU only; that numbers are right is not.

Tensors of the size that a GPU is made for hold nothing where `device` is told so: their memory is never touched, and operations on
them are done by their shapes alone.
"""

import math
import mmap
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.kernels import reference
from penstock.kernels.sampling import allow

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")
PROCESSORS = 132  # an H200's
HBM = 141 * 10**9  # bytes of its memory
L2 = 60 << 20
OPERATION = 5e-6  # seconds that anything takes on the device
NO_RESERVE = 0x4000  # mmap(2): the system keeps nothing back for memory that is not touched
OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion", "launch_pdl"}  # of a launch, besides its arguments
# Operations whose result's size the host has to know, or that read a number.
READING = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "unique2", "_unique2", "bincount"}
# That take indices or whole tensors from anywhere, and wait for what is elsewhere.
CARRYING = {"to", "_to_copy", "copy_", "copy"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class WrongDevice(AssertionError):
    """What a GPU would refuse, or not even notice."""


@dataclass(frozen=True, order=True)
class Wait:
    """The host waits for the device."""

    place: str  # module:function
    line: int
    why: str


@dataclass(frozen=True, order=True)
class Launch:
    """Of a kernel: its name, and the type of each argument as Triton would see it."""

    kernel: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, object], ...]


@dataclass
class Noted:
    """What happened on the device."""

    waits: list[Wait] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    copies: int = 0  # to the device, without waiting
    replays: int = 0  # of graphs
    seconds: float = 0.0  # that the device has worked, if every operation takes as long
    held: int = 0  # bytes of large tensors
    most: int = 0  # of these, at any time
    operations: int = 0  # that were launched one by one, of torch and of our own


noted = Noted()
large: int | None = None  # elements of tensors that are more than shapes, at most
_pinned: dict[int, Tensor] = {}  # by where they are in memory; kept, so that no other tensor is there
_current = threading.local()  # a thread's device, as CUDA has it
_tape: list[Callable[[], None]] | None = None  # of the graph that is recorded


class OnDevice(Tensor):
    """A tensor on the device. To C++ it is one of a CPU, since torch's CPU build knows no device to be on."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnDevice":
        made: OnDevice = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device=CPU
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(function, args, kwargs or {})

    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def tolist(self) -> Any:
        wait("tolist")
        return self.inner.tolist()

    def cpu(self) -> Tensor:  # type: ignore[override]
        wait("cpu")
        return self.inner.clone()

    def numpy(self) -> Any:  # type: ignore[override]
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def record_stream(self, stream: object) -> None:  # type: ignore[override]
        pass

    def pin_memory(self) -> Tensor:  # type: ignore[override]
        raise RuntimeError("cannot pin 'torch.cuda.Tensor': only dense CPU tensors can be pinned")


class Arriving(Tensor):
    """A tensor on its way to the host: what is in it is the device's until an event after it was waited for."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    stamp: int

    def tolist(self) -> Any:
        if self.stamp >= _reached:
            raise WrongDevice("what is on its way to the host is read before it is there")
        return self.as_subclass(Tensor).tolist()


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._stamp = 0
        self._timed = enable_timing
        self._seconds = 0.0

    def record(self, stream: object = None) -> None:
        global _clock
        assert _tape is None, "an event to be looked at in a graph"
        _clock += 1
        self._stamp = _clock
        self._seconds = noted.seconds

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds. Both have to be over."""
        for one in (self, end):
            if not one._timed or not one._stamp or one._stamp > _reached:
                raise RuntimeError("an event that measures no time, was not recorded, or is not over")
        return 1e3 * (end._seconds - self._seconds)

    def synchronize(self) -> None:
        global _reached
        wait("event")
        _reached = max(_reached, self._stamp)


_clock = 0  # counts events
_reached = 0  # of those that were waited for, the last


def wait(why: str) -> None:
    """Notes who makes the host wait."""
    assert _tape is None, f"{why} while a graph is recorded"
    noted.waits.append(Wait(*_place(), why))


def _all_over() -> None:
    """`torch.cuda.synchronize`."""
    global _reached
    wait("synchronize")
    _reached = _clock


def _place() -> tuple[str, int]:
    """The innermost line of the package."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("penstock.") and not name.startswith("penstock.tests."):
            return f"{name.removeprefix('penstock.')}:{frame.f_code.co_name}", frame.f_lineno
        frame = frame.f_back
    return "?", 0


def wrapped(inner: Tensor) -> OnDevice:
    """As made by the engine: an inference tensor."""
    with nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode():  # to enter it once more takes its time
        return OnDevice(inner)


def compute(function: Any, args: Any, kwargs: Any) -> Any:
    """What any operation of torch does, on whichever device."""
    name = function.overloadpacket.__name__
    tensors = _tensors((args, kwargs))
    ours = [one for one in tensors if isinstance(one, OnDevice)]
    named = next((one for one in (kwargs.get("device"), *args) if isinstance(one, torch.device)), None)
    if name in ("pin_memory", "_pin_memory", "is_pinned"):
        return _pin(name, args[0])
    if kwargs.get("pin_memory"):
        assert named is None or named.type == "cpu", "only memory of the host can be pinned"
        return _pin("pin_memory", function(*args, **kwargs | {"pin_memory": False}))
    if not ours and (named is None or named.type != DEVICE.type):
        return function(*args, **kwargs)
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if name in CARRYING and (len(ours) < len(tensors) or (named is not None and named.type == "cpu")):
        return _carry(function, name, args, kwargs)
    _check(function, name, tensors, ours, args)
    if name in READING:
        wait(name)
    if name == "repeat_interleave" and len(args) > 1 and isinstance(args[1], Tensor) and kwargs.get("output_size") is None:
        wait("repeat_interleave of counts")
    if not (_views(function) or "empty" in name):
        _work()
    given = _changed(_inner, args), _changed(_inner, kwargs)
    if large is not None:
        if any(one.numel() > large for one in ours) and _in_place(function):
            return args[0]
        shaped = _shaped(function, *given)
        if shaped is not None:
            return shaped
    result = function(*given[0], **given[1])
    if name in ("empty", "empty_like", "empty_strided", "new_empty"):
        result.view(torch.uint8 if result.element_size() == 1 else result.dtype).zero_()  # what kernels would write into it
    elif _tape is not None:
        _tape.append(lambda: _again(result, function(*given[0], **given[1])))
    if _in_place(function):
        return args[0]
    return _changed(lambda one: wrapped(one) if isinstance(one, Tensor) else one, result)


@cache
def _in_place(function: Any) -> bool:
    first = next(iter(function._schema.arguments), None)
    return first is not None and first.alias_info is not None and first.alias_info.is_write


@cache
def _views(function: Any) -> bool:
    """The result is the memory of an argument, which is not written."""
    return any(one.alias_info is not None and not one.alias_info.is_write for one in function._schema.arguments)


def _work(seconds: float = OPERATION) -> None:
    """One more operation on the device."""
    noted.operations += 1
    noted.seconds += seconds if _tape is None else 0.0


class Memory(mmap.mmap):
    """Memory that is there when it is touched. Counted as the device's until nobody has it any more."""

    def __del__(self) -> None:
        if noted is not None:  # as at the end of the process
            noted.held -= len(self)


def _untouched(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    elements = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if math.prod(shape) else 0
    memory = Memory(-1, max(1, elements) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    noted.held += len(memory)
    noted.most = max(noted.most, noted.held)
    if noted.held > HBM:
        raise torch.OutOfMemoryError(f"{noted.held / 1e9:.1f} GB of large tensors")
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)


def _shaped(function: Any, args: Any, kwargs: Any) -> Any:
    """What a function returns, by shapes alone; None if nothing of it is large, if it is a view, or if that depends on numbers."""

    def abstract(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    if isinstance(kwargs.get("generator"), torch.Generator):
        kwargs = {**kwargs, "generator": None}
    given = _changed(abstract, args), _changed(abstract, kwargs)
    try:
        found = function(*given[0], **given[1])
    except (NotImplementedError, RuntimeError):
        return None
    told, made = _tensors(given), _tensors(found)
    held = {one.untyped_storage()._cdata for one in told}
    if not any(one.numel() > (large or 0) for one in told + made) or any(one.untyped_storage()._cdata in held for one in made):
        return None  # what lies in the memory of an argument costs nothing
    return _changed(lambda one: wrapped(_untouched(one.shape, one.stride(), one.dtype)) if isinstance(one, Tensor) else one, found)


def _changed(change: Callable[[Any], Any], value: Any) -> Any:
    """As torch's `tree_map`, which takes most of the time of such small operations."""
    if isinstance(value, (tuple, list)):
        return type(value)([_changed(change, one) for one in value])
    return {key: _changed(change, one) for key, one in value.items()} if isinstance(value, dict) else change(value)


def _tensors(value: Any) -> list[Tensor]:
    """All that are in it."""
    found = []
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else [value]:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, (tuple, list, dict)):
            found += _tensors(one)
    return found


def _inner(value: Any) -> Any:
    if isinstance(value, OnDevice):
        return value.inner
    return CPU if isinstance(value, torch.device) else value


def _again(before: Any, now: Any) -> None:
    """A replayed operation writes where it wrote when it was recorded."""
    for old, new in zip(_tensors(before), _tensors(now), strict=True):
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)


def _pin(name: str, tensor: Tensor) -> Any:
    if name == "is_pinned":
        return is_pinned(tensor)
    if is_pinned(tensor):
        return tensor
    copy = tensor.clone()
    _pinned[copy.untyped_storage().data_ptr()] = copy
    return copy


def is_pinned(tensor: Tensor) -> bool:
    """Whether the device can read it while the host goes on."""
    return not isinstance(tensor, OnDevice) and tensor.untyped_storage().data_ptr() in _pinned


def _carry(function: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Between host and device."""
    assert _tape is None, "a copy from or to the host while a graph is recorded"
    target, source = (args[0], args[1]) if name.startswith("copy") else (None, args[0])
    blocking = not kwargs.get("non_blocking") and not (name in ("copy_", "copy") and len(args) > 2 and args[2])
    blocking = blocking and not (name == "to" and "other" not in str(function) and len(args) > 3 and args[3])
    if isinstance(source, OnDevice) and not blocking and target is None:
        noted.copies += 1
        arriving = _inner(source).clone().as_subclass(Arriving)
        arriving.stamp = _clock
        return arriving
    if isinstance(source, OnDevice) and (blocking or target is None or not is_pinned(target)):
        wait("copy to the host")
    elif isinstance(source, OnDevice):
        noted.copies += 1
    elif source.numel() and not is_pinned(source):
        wait("copy of memory that is not pinned")
    elif source.numel() and blocking:
        wait("blocking copy of pinned memory")
    else:
        noted.copies += 1
    result = function(*_changed(_inner, args), **_changed(_inner, kwargs))
    if target is not None:
        return target
    to_host = isinstance(source, OnDevice)
    result = result.clone() if result.data_ptr() == _inner(source).data_ptr() else result
    return result if to_host else wrapped(result)


def _check(function: Any, name: str, tensors: Sequence[Tensor], ours: Sequence[Tensor], args: Any) -> None:
    """Raises WrongDevice where torch would."""
    others = [one for one in tensors if not isinstance(one, OnDevice)]
    if name in INDEXING:
        if not isinstance(args[0], OnDevice):
            raise WrongDevice(f"{name} of a tensor on the host by one on the device")
        indices = [one for one in args[1] if one is not None]
        if any(not isinstance(one, OnDevice) and one.numel() for one in indices):
            wait("index from the host")
        if any(one.dtype in (torch.bool, torch.uint8) for one in indices) and not _fills(name, args):
            wait("index of bools")
        others = [one for one in others if not any(one is index for index in indices)]
    if any(one.dim() or not {torch.Tag.pointwise} & set(function.tags) for one in others) and not _harmless(name, others):
        raise WrongDevice(f"{name} of tensors on both devices: {[(tuple(one.shape), str(one.device)) for one in tensors]}")


def _fills(name: str, args: Any) -> bool:
    """`x[bools] = number` is a masked fill, which needs no sizes."""
    return name.startswith("index_put") and len(args[1]) == 1 and args[2].numel() == 1 and not args[2].dim()


def _harmless(name: str, others: Sequence[Tensor]) -> bool:
    """A number on the host may be an operand."""
    return not any(one.dim() for one in others) and (name in INDEXING or name.startswith(("fill_", "masked_fill", "index_fill_")))


class Device(TorchDispatchMode):
    """Under this, what is made on a CUDA device is made: in the thread that enters it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """It costs every operation something, and nothing is compiled here."""
        return False

    def __enter__(self) -> "Device":
        self._before = torch._C._only_lift_cpu_tensors()  # a thread's own, too: `torch.tensor` brings its data to the device later
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._before)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(function, args, kwargs or {})


# Kernels


def launch(kernel: Any, grid: Any, args: Any, kwargs: Any) -> None:
    """Stands for a launch: looks at it, and makes up what it would have written."""
    options = {key: value for key, value in kwargs.items() if key in OPTIONS}
    names = list(kernel.arg_names)
    given = dict(zip(names, args, strict=False)) | {key: value for key, value in kwargs.items() if key not in options}
    name = kernel.fn.__name__
    if set(given) != set(names):
        raise WrongDevice(f"{name} lacks {set(names) - set(given)} or is given {set(given) - set(names)}")
    if "enable_fp_fusion" not in options:
        raise WrongDevice(f"{name} is compiled as this version of Triton likes, and not as the gate does")
    for key, value in given.items():
        if isinstance(value, Tensor) and not isinstance(value, OnDevice):
            raise WrongDevice(f"{name} is given {key} on the host")
    if current() != DEVICE.index:
        raise WrongDevice(f"{name} is launched on device {current()}, its tensors are on {DEVICE}")
    if not all(size > 0 for size in grid) or any(size > 65535 for size in grid[1:]) or grid[0] >= 1 << 31:
        raise WrongDevice(f"{name} with a grid of {grid}")
    constant = {param for param in names if param.isupper()}
    plain, unaligned = _unspecialized(kernel)
    types = tuple((key, _type(value, key in plain, key in unaligned)) for key, value in given.items() if key not in constant)
    constants = tuple((key, value) for key, value in (given | options).items() if key in constant | OPTIONS)
    noted.launches.append(Launch(name, types, constants))
    _work()
    effect = EFFECTS.get(name)
    if large is not None and any(isinstance(value, Tensor) and value.numel() > large for value in given.values()):
        effect = SHAPED.get(name)
    if effect is not None:
        inner = SimpleNamespace(**_changed(_inner, given))
        with torch._C._DisableTorchDispatch():
            effect(inner)
        if _tape is not None:
            _tape.append(lambda: effect(inner))
    if watching is not None:
        watching(kernel, grid, given, options)


watching: Callable[[Any, Any, dict[str, Any], dict[str, Any]], None] | None = None


def _unspecialized(kernel: Any) -> tuple[Sequence[str], Sequence[str]]:
    """Arguments that Triton does not specialize, and those of which it does not look at the alignment."""
    told = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)  # in its interpreter, and else
    return told.get("do_not_specialize") or (), told.get("do_not_specialize_on_alignment") or ()


def _type(value: Any, plain: bool, unaligned: bool) -> str:
    """As Triton specializes it: for aligned pointers, and for what is 1 or divisible by 16."""
    if isinstance(value, OnDevice):
        aligned = not (plain or unaligned or value.inner.data_ptr() % 16)
        return f"*{str(value.dtype).removeprefix('torch.')}{':16' if aligned else ''}"
    if plain or isinstance(value, bool) or not isinstance(value, int):
        return type(value).__name__
    return "1" if value == 1 else f"i{32 if -(1 << 31) <= value < 1 << 31 else 64}{':16' if value % 16 == 0 else ''}"


def _norm(given: Any) -> None:
    if given.ADD:
        given.residual.add_(given.x.sum(0) if given.PARTS > 1 else given.x)
    wide = (given.residual if given.ADD else given.x).float()
    given.out.copy_(wide * (wide.square().mean(-1, keepdim=True) + given.epsilon).rsqrt() * given.weight.float())


def _gated(given: Any) -> None:
    given.out.copy_(reference.gated(given.gate_up.float(), reference.Activation(given.GELU)))


def _product(given: Any) -> None:
    x = given.x.float()
    if getattr(given, "NORM", False):
        x = x * (x.square().mean(-1, keepdim=True) + given.epsilon).rsqrt() * given.gains.float()
    found = torch.nn.functional.linear(x, given.weight.float(), given.bias.float() if given.BIASED else None)
    if given.GATED:
        found = reference.gated(found, reference.Activation(given.GELU))
    if given.out.dim() == 3:
        found = torch.stack((found, *(torch.zeros_like(found),) * (len(given.out) - 1)))
    given.out.copy_(found + given.out.float() if given.ADD else found)


def _survey(given: Any) -> None:
    given.sums.fill_(1 / given.sums.shape[1])
    given.peaks.copy_(given.logits.logsumexp(-1, keepdim=True).expand_as(given.peaks))


def _filter(given: Any) -> None:
    given.bests.copy_(given.logits.amax(-1))
    given.tokens.copy_((allow(given.logits, given.mask) if given.MASKED else given.logits).argmax(-1))
    given.finals.fill_(-0.5)


def _top(given: Any) -> None:
    values, ids = given.logits.topk(given.count)
    given.values.fill_(-torch.inf)[:, 0].copy_(values)
    given.ids[:, 0].copy_(ids)
    given.totals.fill_(-torch.inf)[:, 0].copy_(given.logits.logsumexp(-1))


# What the host, or plain torch, goes on with. All others write nothing: what they were to write into is zeros.
EFFECTS: dict[str, Callable[[Any], None]] = {
    "norm_kernel": _norm,
    "gated_kernel": _gated,
    "product_kernel": _product,
    "vector_kernel": _product,
    "survey_kernel": _survey,
    "filter_kernel": _filter,
    "draw_kernel": lambda given: given.sums.fill_(1),
    "settle_kernel": lambda given: given.logprobs.fill_(-1),
    "top_kernel": _top,
}
# Where the logits hold nothing.
SHAPED: dict[str, Callable[[Any], Any]] = {
    "survey_kernel": lambda given: given.sums.fill_(1 / given.sums.shape[1]),
    "draw_kernel": lambda given: given.sums.fill_(1),
}


# torch.cuda


_made = torch.Generator.__new__


class Generator(torch.Generator):
    """Of random numbers: all are made on the host."""

    @staticmethod
    def __new__(cls: Any, device: object = "cpu") -> Any:
        return _made(cls, "cpu")


def current() -> int:
    """This thread's device: 0 in one that has not chosen."""
    return int(getattr(_current, "index", 0))


def _choose(device: Any) -> None:
    _current.index = device.index if isinstance(device, torch.device) else int(device)


class Graph:
    """What was recorded, to be done again on the same memory."""

    def __init__(self) -> None:
        self.tape: list[Callable[[], None]] = []
        self.operations: int | None = None  # None: nothing was recorded

    def reset(self) -> None:
        """Forgets it."""
        self.__init__()  # type: ignore[misc]

    def replay(self) -> None:
        """All of it, as one launch."""
        assert self.operations is not None, "a graph is replayed that was not recorded"
        noted.replays += 1
        noted.seconds += self.operations * OPERATION
        with torch.inference_mode(), torch._C._DisableTorchDispatch():
            for operation in self.tape:
                operation()


@contextmanager
def recording(graph: Graph, pool: object = None) -> Iterator[None]:
    """`torch.cuda.graph`."""
    global _tape
    assert _tape is None
    assert graph.operations is None, "a graph is recorded twice"
    before = noted.operations
    _tape = graph.tape
    try:
        yield
    finally:
        _tape = None
    graph.operations = noted.operations - before


def stream(device: object = None) -> SimpleNamespace:
    """All are one."""
    return SimpleNamespace(device_index=current(), device=DEVICE, wait_stream=lambda other: None)


@contextmanager
def device(monkeypatch: pytest.MonkeyPatch, shapes: int | None = None) -> Iterator[Noted]:
    """There is a CUDA device. Yields what is noted from now on. shapes: tensors of more elements are nothing but shapes."""
    global noted, large
    triton = pytest.importorskip("triton")
    from triton.runtime.interpreter import InterpretedFunction

    noted, large = Noted(), shapes
    sizes = {"total_memory": HBM, "L2_cache_size": L2}
    properties = SimpleNamespace(multi_processor_count=PROCESSORS, name="no GPU at all", is_integrated=0, **sizes)
    torch_cuda: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": current,
        "set_device": _choose,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "get_arch_list": lambda: ["sm_80", "sm_90", "compute_90"],
        "mem_get_info": lambda device=None: (1 << 27, 1 << 28) if shapes is None else (HBM - noted.held, HBM),
        "reset_peak_memory_stats": lambda device=None: None,
        "max_memory_allocated": lambda device=None: 1 << 20,
        "empty_cache": lambda: wait("empty_cache"),
        "synchronize": lambda device=None: _all_over(),
        "graph_pool_handle": object,
        "CUDAGraph": Graph,
        "Event": Event,
        "graph": recording,
        "is_current_stream_capturing": lambda: _tape is not None,
        "current_stream": stream,
        "Stream": stream,
        "stream": lambda stream: nullcontext(),
        "_sleep": lambda cycles: _work(cycles / 2e9),
    }
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_target=lambda: None))
    for name, value in torch_cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for kind in (triton.JITFunction, InterpretedFunction):
        monkeypatch.setattr(kind, "__getitem__", lambda self, grid: lambda *args, **kwargs: launch(self, grid, args, kwargs))
    try:
        with Device():
            yield noted
    finally:
        large = None
        _pinned.clear()
        _choose(0)
