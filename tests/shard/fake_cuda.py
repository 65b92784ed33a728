"""A simulated CUDA device: tensors that claim to be on it and hold real numbers, as far as plain torch computes them.

The outputs of Triton kernels are made up, but their launches are checked: the devices and types of their arguments, and the
thread's current device. Every operation that would make the host wait for a real device is recorded, with the line that asks for
it. This finds faults that otherwise show only on a GPU; it doesn't check that numbers are right.

If `device` is called with a limit (`shapes`), larger tensors hold no numbers: their memory is never touched, and operations on them
compute shapes only.
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

from penstock.kernels import dispatch, lookahead, reference, transfer
from penstock.kernels.beam import RowSet, living
from penstock.kernels.sampling import allow
from penstock.shard.decoding import sampler

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")
PROCESSORS = 132  # an H200's
HBM = 141 * 10**9  # bytes of its memory
L2 = 60 << 20
OPERATION = 5e-6  # seconds that every operation takes on the device
NO_RESERVE = 0x4000  # MAP_NORESERVE of mmap(2): nothing is reserved for memory that is not touched
OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion", "launch_pdl"}  # of a launch, besides the kernel's arguments
# Operations whose result's size the host has to know, or that read a number on the host.
READING = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "unique2", "_unique2", "bincount"}
# Operations that accept tensors (or, for indexing, indices) on either device, and wait if they have to be copied.
COPYING = {"to", "_to_copy", "copy_", "copy"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class WrongDevice(AssertionError):
    """An error on a real GPU, or one that a GPU would not even report."""


@dataclass(frozen=True, order=True)
class Wait:
    """A place where the host waits for the device."""

    place: str  # module:function
    line: int
    why: str


@dataclass(frozen=True, order=True)
class Launch:
    """A kernel's launch: the kernel's name, and the type of each argument as Triton specializes it."""

    kernel: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, object], ...]


@dataclass
class Activity:
    """What happened on the device since `device` was entered."""

    waits: list[Wait] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    copies: int = 0  # copies between host and device that the host did not wait for
    replays: int = 0  # replayed graphs
    seconds: float = 0.0  # how long the device was busy, if every operation takes OPERATION
    held: int = 0  # bytes of large tensors that are allocated now
    most: int = 0  # the peak of `held`
    operations: int = 0  # operations that were launched one by one: torch's and penstock's kernels


activity = Activity()
large: int | None = None  # tensors with more elements than this hold no numbers; None: all tensors hold numbers
_pinned: dict[int, Tensor] = {}  # pinned tensors by address; kept alive, so that no other tensor gets that address
_current = threading.local()  # each thread's current device, as in CUDA
_tape: list[Callable[[], None]] | None = None  # the operations of the graph that is being recorded; None: none is


class OnDevice(Tensor):
    """A tensor on the device. To torch's C++ code it is a CPU tensor, since a CPU build of torch has no other device."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnDevice":
        wrapper: OnDevice = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device=CPU
        )
        wrapper.inner = inner
        return wrapper

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


class PendingHostCopy(Tensor):
    """The target of a copy to the host that isn't finished: it may be read only after the host waited for a later event."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    stamp: int

    def tolist(self) -> Any:
        if self.stamp >= _awaited:
            raise WrongDevice("what is on its way to the host is read before it is there")
        return self.as_subclass(Tensor).tolist()


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._stamp = 0
        self._timed = enable_timing
        self._seconds = 0.0

    def record(self, stream: object = None) -> None:
        global _events
        assert _tape is None, "an event is recorded in a graph"
        _events += 1
        self._stamp = _events
        self._seconds = activity.seconds

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds between two events. The host must have waited for both."""
        for one in (self, end):
            if not one._timed or not one._stamp or one._stamp > _awaited:
                raise RuntimeError("an event that measures no time, was not recorded, or is not over")
        return 1e3 * (end._seconds - self._seconds)

    def synchronize(self) -> None:
        global _awaited
        wait("event")
        _awaited = max(_awaited, self._stamp)


_events = 0  # number of events recorded so far
_awaited = 0  # the latest event that the host has waited for


def wait(why: str) -> None:
    """Records that the host waits, and which line of the package makes it wait."""
    assert _tape is None, f"{why} while a graph is recorded"
    activity.waits.append(Wait(*_calling_line(), why))


def _synchronize() -> None:
    """`torch.cuda.synchronize`."""
    global _awaited
    wait("synchronize")
    _awaited = _events


def _calling_line() -> tuple[str, int]:
    """The innermost frame of the stack that is in the package, outside its tests: module:function, and line number."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("penstock.") and not name.startswith("penstock.tests."):
            return f"{name.removeprefix('penstock.')}:{frame.f_code.co_name}", frame.f_lineno
        frame = frame.f_back
    return "?", 0


def wrapped(inner: Tensor) -> OnDevice:
    """An inference tensor on the device, as the engine's tensors are."""
    with nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode():  # entering it a second time is slow
        return OnDevice(inner)


def compute(function: Any, args: Any, kwargs: Any) -> Any:
    """Executes one operation of torch, for tensors on the host or on the device."""
    name = function.overloadpacket.__name__
    tensors = _tensors((args, kwargs))
    on_device = [one for one in tensors if isinstance(one, OnDevice)]
    named = next((one for one in (kwargs.get("device"), *args) if isinstance(one, torch.device)), None)
    if name in ("pin_memory", "_pin_memory", "is_pinned"):
        return _pin(name, args[0])
    if kwargs.get("pin_memory"):
        assert named is None or named.type == "cpu", "only memory of the host can be pinned"
        return _pin("pin_memory", function(*args, **kwargs | {"pin_memory": False}))
    if not on_device and (named is None or named.type != DEVICE.type):
        return function(*args, **kwargs)
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if name in COPYING and (len(on_device) < len(tensors) or (named is not None and named.type == "cpu")):
        return _transfer(function, name, args, kwargs)
    _check(function, name, tensors, on_device, args)
    if name in READING:
        wait(name)
    if name == "repeat_interleave" and len(args) > 1 and isinstance(args[1], Tensor) and kwargs.get("output_size") is None:
        wait("repeat_interleave of counts")
    if not (_views(function) or "empty" in name):
        _count_operation()
    given = _mapped(_inner, args), _mapped(_inner, kwargs)
    if large is not None:
        if any(one.numel() > large for one in on_device) and _in_place(function):
            return args[0]
        shaped = _shaped(function, *given)
        if shaped is not None:
            return shaped
    result = function(*given[0], **given[1])
    if name in ("empty", "empty_like", "empty_strided", "new_empty"):
        result.view(torch.uint8 if result.element_size() == 1 else result.dtype).zero_()  # stands for what kernels would write
    elif _tape is not None:
        _tape.append(lambda: _replay_into(result, function(*given[0], **given[1])))
    if _in_place(function):
        return args[0]
    return _mapped(lambda one: wrapped(one) if isinstance(one, Tensor) else one, result)


@cache
def _in_place(function: Any) -> bool:
    first = next(iter(function._schema.arguments), None)
    return first is not None and first.alias_info is not None and first.alias_info.is_write


@cache
def _views(function: Any) -> bool:
    """Whether the result is a view of an argument, which is not written."""
    return any(one.alias_info is not None and not one.alias_info.is_write for one in function._schema.arguments)


def _count_operation(seconds: float = OPERATION) -> None:
    """Counts one more operation on the device."""
    activity.operations += 1
    activity.seconds += seconds if _tape is None else 0.0


class Memory(mmap.mmap):
    """Memory that is allocated lazily, when it is touched. It counts as device memory until it is freed."""

    def __del__(self) -> None:
        if activity is not None:  # it is None when the interpreter exits
            activity.held -= len(self)


def _untouched(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    elements = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if math.prod(shape) else 0
    memory = Memory(-1, max(1, elements) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    activity.held += len(memory)
    activity.most = max(activity.most, activity.held)
    if activity.held > HBM:
        raise torch.OutOfMemoryError(f"{activity.held / 1e9:.1f} GB of large tensors")
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)


def _shaped(function: Any, args: Any, kwargs: Any) -> Any:
    """A function's result, computed by shapes alone; None if no tensor is large, if it is a view, or if it depends on numbers."""

    def abstract(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    if isinstance(kwargs.get("generator"), torch.Generator):
        kwargs = {**kwargs, "generator": None}
    given = _mapped(abstract, args), _mapped(abstract, kwargs)
    try:
        found = function(*given[0], **given[1])
    except (NotImplementedError, RuntimeError):
        return None
    inputs, outputs = _tensors(given), _tensors(found)
    held = {one.untyped_storage()._cdata for one in inputs}
    if not any(one.numel() > (large or 0) for one in inputs + outputs) or any(
        one.untyped_storage()._cdata in held for one in outputs
    ):
        return None  # a view of an argument takes no memory
    return _mapped(lambda one: wrapped(_untouched(one.shape, one.stride(), one.dtype)) if isinstance(one, Tensor) else one, found)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Like torch's `tree_map`, which would take most of the time of such small operations."""
    if isinstance(value, (tuple, list)):
        return type(value)([_mapped(change, one) for one in value])
    return {key: _mapped(change, one) for key, one in value.items()} if isinstance(value, dict) else change(value)


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts."""
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


def _replay_into(before: Any, now: Any) -> None:
    """Copies a replayed operation's results to where it wrote when it was recorded."""
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
    """Whether the device can read it asynchronously."""
    return not isinstance(tensor, OnDevice) and tensor.untyped_storage().data_ptr() in _pinned


def _transfer(function: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Copies between host and device."""
    assert _tape is None, "a copy from or to the host while a graph is recorded"
    target, source = (args[0], args[1]) if name.startswith("copy") else (None, args[0])
    blocking = not kwargs.get("non_blocking") and not (name in ("copy_", "copy") and len(args) > 2 and args[2])
    blocking = blocking and not (name == "to" and "other" not in str(function) and len(args) > 3 and args[3])
    if isinstance(source, OnDevice) and not blocking and target is None:
        activity.copies += 1
        arriving = _inner(source).clone().as_subclass(PendingHostCopy)
        arriving.stamp = _events
        return arriving
    if isinstance(source, OnDevice) and (blocking or target is None or not is_pinned(target)):
        wait("copy to the host")
    elif isinstance(source, OnDevice):
        activity.copies += 1
    elif source.numel() and not is_pinned(source):
        wait("copy of memory that is not pinned")
    elif source.numel() and blocking:
        wait("blocking copy of pinned memory")
    else:
        activity.copies += 1
    result = function(*_mapped(_inner, args), **_mapped(_inner, kwargs))
    if target is not None:
        return target
    to_host = isinstance(source, OnDevice)
    result = result.clone() if result.data_ptr() == _inner(source).data_ptr() else result
    return result if to_host else wrapped(result)


def _check(function: Any, name: str, tensors: Sequence[Tensor], on_device: Sequence[Tensor], args: Any) -> None:
    """Raises WrongDevice where torch would."""
    on_host = [one for one in tensors if not isinstance(one, OnDevice)]
    if name in INDEXING:
        if not isinstance(args[0], OnDevice):
            raise WrongDevice(f"{name} of a tensor on the host by one on the device")
        indices = [one for one in args[1] if one is not None]
        if any(not isinstance(one, OnDevice) and one.numel() for one in indices):
            wait("index from the host")
        if any(one.dtype in (torch.bool, torch.uint8) for one in indices) and not _fills(name, args):
            wait("index of bools")
        on_host = [one for one in on_host if not any(one is index for index in indices)]
    if any(one.dim() or not {torch.Tag.pointwise} & set(function.tags) for one in on_host) and not _may_be_on_host(name, on_host):
        raise WrongDevice(f"{name} of tensors on both devices: {[(tuple(one.shape), str(one.device)) for one in tensors]}")


def _fills(name: str, args: Any) -> bool:
    """`x[bools] = number` is a masked fill, which needs no sizes."""
    return name.startswith("index_put") and len(args[1]) == 1 and args[2].numel() == 1 and not args[2].dim()


def _may_be_on_host(name: str, on_host: Sequence[Tensor]) -> bool:
    """A number on the host may be an operand."""
    return not any(one.dim() for one in on_host) and (name in INDEXING or name.startswith(("fill_", "masked_fill", "index_fill_")))


class Device(TorchDispatchMode):
    """Within this, tensors can be created on a CUDA device. It holds for the thread that enters it only."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """The check would slow down every operation, and nothing is compiled by torch here."""
        return False

    def __enter__(self) -> "Device":
        self._before = torch._C._only_lift_cpu_tensors()  # also per thread: `torch.tensor` moves its data to the device later
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
    """Replaces a kernel's launch: checks the arguments, and makes up the outputs that are read later (`EFFECTS`)."""
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
    activity.launches.append(Launch(name, types, constants))
    _count_operation()
    effect = EFFECTS.get(name)
    if large is not None and any(isinstance(value, Tensor) and value.numel() > large for value in given.values()):
        effect = SHAPED.get(name)
    if effect is not None:
        inner = SimpleNamespace(**_mapped(_inner, given))
        with torch._C._DisableTorchDispatch():
            effect(inner)
        if _tape is not None:
            _tape.append(lambda: effect(inner))
    if launch_hook is not None:
        launch_hook(kernel, grid, given, options)


launch_hook: Callable[[Any, Any, dict[str, Any], dict[str, Any]], None] | None = None


def _unspecialized(kernel: Any) -> tuple[Sequence[str], Sequence[str]]:
    """Arguments that Triton does not specialize, and arguments whose alignment it does not specialize on."""
    settings = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)  # the interpreter's kernels have kwargs
    return settings.get("do_not_specialize") or (), settings.get("do_not_specialize_on_alignment") or ()


def _type(value: Any, plain: bool, unaligned: bool) -> str:
    """The argument's type as Triton specializes it: pointers by alignment, integers by being 1 or divisible by 16."""
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
    given.tokens.copy_((allow(given.logits, given.mask) if given.mask_stride else given.logits).argmax(-1))
    given.finals.fill_(-0.5)


def _top(given: Any) -> None:
    values, ids = given.logits.topk(given.count)
    given.values.fill_(-torch.inf)[:, 0].copy_(values)
    given.ids[:, 0].copy_(ids)
    given.totals.fill_(-torch.inf)[:, 0].copy_(given.logits.logsumexp(-1))


def _expand(given: Any) -> None:
    fields, own, sets = given.sets[: 6 * given.found.shape[1]].view(-1, 6).tolist(), given.totals.logsumexp(1), []
    for i, (start, rows, most, width, _, ends) in enumerate(fields):
        some = slice(start, start + rows)
        sums = given.values[some] - own[some, None, None] + given.scores[some, None, None]
        best, places = sums.flatten().topk(given.count)
        parents = start + places // sums[0].numel()
        ids, values = (one[some].flatten()[places] for one in (given.ids, given.values))
        given.found[:, i].copy_(torch.stack((best, parents, ids, values - own[parents])))
        sets.append(RowSet(start, rows, most, width, given.ends[i * given.ends_stride :][:ends].tolist()))
    given.heirs.copy_(torch.stack(living(given.found, sets)))


def _unknown(given: Any) -> lookahead.Unknown:
    return lookahead.Unknown(given.entries, given.tables, True)


def _fill(given: Any) -> None:
    beams = (given.pages, given.parents) if given.BEAMS else (None, None)
    with dispatch.forced("reference"):
        lookahead.fill(given.tokens, beams[0], _unknown(given), given.picked, beams[1])


def _inherit(given: Any) -> None:
    with dispatch.forced("reference"):
        lookahead.inherit(given.cache, _unknown(given), given.parents)


# Kernels whose outputs are read by the host or by plain torch. All other kernels write nothing: their outputs stay zeros.
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
    "normalize_kernel": lambda given: given.normalizers.copy_(given.totals.logsumexp(1)),
    "expand_kernel": _expand,
    "fill_kernel": _fill,
    "inherit_kernel": _inherit,
}
# The same where the logits are too large to hold numbers.
SHAPED: dict[str, Callable[[Any], Any]] = {
    "survey_kernel": lambda given: given.sums.fill_(1 / given.sums.shape[1]),
    "draw_kernel": lambda given: given.sums.fill_(1),
}


# torch.cuda


_new_generator = torch.Generator.__new__


class Generator(torch.Generator):
    """A generator of random numbers that is always on the host."""

    @staticmethod
    def __new__(cls: Any, device: object = "cpu") -> Any:
        return _new_generator(cls, "cpu")


def current() -> int:
    """This thread's current device: 0 if it has not set one."""
    return int(getattr(_current, "index", 0))


def _set_device(device: Any) -> None:
    _current.index = device.index if isinstance(device, torch.device) else int(device)


class Graph:
    """`torch.cuda.CUDAGraph`: the recorded operations, which `replay` executes again on the same memory."""

    def __init__(self) -> None:
        self.tape: list[Callable[[], None]] = []
        self.operations: int | None = None  # None: nothing has been recorded

    def reset(self) -> None:
        """Drops the recorded operations."""
        self.__init__()  # type: ignore[misc]

    def replay(self) -> None:
        """Executes all operations, which counts as one launch."""
        assert self.operations is not None, "a graph is replayed that was not recorded"
        activity.replays += 1
        activity.seconds += self.operations * OPERATION
        with torch.inference_mode(), torch._C._DisableTorchDispatch():
            for operation in self.tape:
                operation()


@contextmanager
def recording(graph: Graph, pool: object = None) -> Iterator[None]:
    """`torch.cuda.graph`."""
    global _tape
    assert _tape is None
    assert graph.operations is None, "a graph is recorded twice"
    before = activity.operations
    _tape = graph.tape
    try:
        yield
    finally:
        _tape = None
    graph.operations = activity.operations - before


def stream(device: object = None) -> SimpleNamespace:
    """A stand-in for `torch.cuda.Stream`: all streams are the same."""
    return SimpleNamespace(device_index=current(), device=DEVICE, wait_stream=lambda other: None, wait_event=lambda event: None)


@contextmanager
def device(monkeypatch: pytest.MonkeyPatch, shapes: int | None = None) -> Iterator[Activity]:
    """Simulates a CUDA device. Yields what is recorded from now on. shapes: tensors with more elements hold no numbers."""
    global activity, large
    triton = pytest.importorskip("triton")
    from triton.runtime.interpreter import InterpretedFunction

    activity, large = Activity(), shapes
    sizes = {"total_memory": HBM, "L2_cache_size": L2}
    properties = SimpleNamespace(multi_processor_count=PROCESSORS, name="no GPU at all", is_integrated=0, **sizes)
    torch_cuda: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": current,
        "set_device": _set_device,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "get_arch_list": lambda: ["sm_80", "sm_90", "compute_90"],
        "mem_get_info": lambda device=None: (1 << 27, 1 << 28) if shapes is None else (HBM - activity.held, HBM),
        "reset_peak_memory_stats": lambda device=None: None,
        "max_memory_allocated": lambda device=None: 1 << 20,
        "empty_cache": lambda: wait("empty_cache"),
        "synchronize": lambda device=None: _synchronize(),
        "graph_pool_handle": object,
        "CUDAGraph": Graph,
        "Event": Event,
        "graph": recording,
        "is_current_stream_capturing": lambda: _tape is not None,
        "current_stream": stream,
        "Stream": stream,
        "stream": lambda stream: nullcontext(),
        "_sleep": lambda cycles: _count_operation(cycles / 2e9),
    }
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(sampler, "_kept", None)  # tensors of another device
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_target=lambda: None))
    for name, value in torch_cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for kind in (triton.JITFunction, InterpretedFunction):
        monkeypatch.setattr(kind, "__getitem__", lambda self, grid: lambda *args, **kwargs: launch(self, grid, args, kwargs))
    try:
        transfer._stream.cache_clear()
        with Device():
            yield activity
    finally:
        transfer._stream.cache_clear()  # a GPU of the same name has others
        large = None
        _pinned.clear()
        _set_device(0)
