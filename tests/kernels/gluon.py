"""Executes Gluon kernels on a CPU with torch: as much of the language as `hopper_kernels` uses.

Each partition of warps (warp specialization) is a thread. One thread runs at a time; where it waits or signals, the next one is
drawn at random. Asynchronous hardware is modelled as late as it may be, so that code that does not wait for it gets wrong numbers:

- a wgmma product reads its operands from its launch until it is waited for, and has a result only then;
- what TMA copies is NaN until a random time, when the copy arrives at its barrier.

A kernel fails if it writes to shared memory and lets TMA or wgmma access it without a fence and a barrier after that, if all warps
wait for each other (deadlock), and if it loads or stores beyond a tensor. Layouts are ignored, and so are registers that a product
reads: the compiler takes care of them.
"""

import importlib.util
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

Value = Any  # an int, a float, or a tensor of a block
TIMEOUT = 120.0  # seconds until a thread that neither waits nor ends counts as an endless loop


# Memory


@dataclass(frozen=True)
class Pointer:
    """A pointer, or a block of pointers, to elements of a tensor's memory."""

    memory: Tensor  # flat
    at: Value = 0

    def __add__(self, by: Value) -> "Pointer":
        return Pointer(self.memory, self.at + by)

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.memory.dtype)


def pointer(tensor: Tensor) -> Pointer:
    """To the tensor's first element. After its last one the same memory may continue, as in a plan's buffer."""
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    return Pointer(tensor.as_strided((span,), (1,), tensor.storage_offset()))


def load(source: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Value:
    if not isinstance(source.at, Tensor):
        assert mask is None
        assert 0 <= source.at < len(source.memory)
        return source.memory[source.at].item()
    mask = torch.ones_like(source.at, dtype=torch.bool) if mask is None else mask.expand(source.at.shape)
    offsets = source.at[mask]
    assert not offsets.numel() or 0 <= int(offsets.min()) <= int(offsets.max()) < len(source.memory), "beyond a tensor's memory"
    found = torch.full(source.at.shape, other, dtype=source.memory.dtype)
    found[mask] = source.memory[offsets]
    return found


def store(target: Pointer, value: Tensor, mask: Tensor) -> None:
    mask = mask.expand(target.at.shape)
    offsets = target.at[mask]
    assert not offsets.numel() or 0 <= int(offsets.min()) <= int(offsets.max()) < len(target.memory), "beyond a tensor's memory"
    target.memory[offsets] = value.expand(target.at.shape)[mask].to(target.memory.dtype)


class Barrier:
    """PTX's mbarrier: a phase completes after `count` arrivals and as many bytes as they have announced."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, arrivals: int, expected_bytes: int) -> None:
        assert self.count, "used before it was made"
        self.pending -= arrivals
        self.bytes += expected_bytes
        if not self.pending and not self.bytes:
            self.phase, self.pending = self.phase + 1, self.count

    def completed(self, parity: int) -> bool:
        """Whether a wait for a phase of that parity returns."""
        return self.phase % 2 != parity


@dataclass
class SharedMemory:
    """Shared memory: NaN until it is written."""

    numbers: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.numbers.dtype

    def index(self, position: int) -> "SharedMemory":
        return SharedMemory(self.numbers[position])

    def slice(self, start: int, length: int, dim: int) -> "SharedMemory":
        return SharedMemory(self.numbers.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> "SharedMemory":
        return SharedMemory(self.numbers.permute(*order))

    def load(self, layout: object) -> Tensor:
        return self.numbers.clone()

    def store(self, value: Tensor) -> None:
        self.numbers.copy_(value)
        Program.now.current.unfenced.add(self.numbers.untyped_storage().data_ptr())


@dataclass
class Barriers:
    """An array of mbarriers in shared memory."""

    all: list[Barrier]

    def index(self, position: int) -> Barrier:
        return self.all[position]


# Threads


class Deadlock(AssertionError):
    """All warps wait for each other."""


@dataclass
class Warps:
    """A partition of warps, which runs as one thread."""

    name: str
    wait: Callable[[], bool] = lambda: True
    ended: bool = False
    products: list["Product"] = field(default_factory=list)  # launched and not waited for yet
    unfenced: set[int] = field(default_factory=set)  # memory that was written and not fenced yet
    fenced: set[int] = field(default_factory=set)  # memory that was fenced, with no barrier of all warps since


class Program:
    """A running program: its threads, what they wait for, and TMA's pending copies."""

    now: "ClassVar[Program]"

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.lock = threading.Condition()
        self.current = self.first = Warps("all")
        self.all = [self.first]
        self.copies: list[Callable[[], None]] = []
        self.early_completion = rng.choice((0.0, 0.3))  # probability that a copy completes while some thread can still run
        self.failure: BaseException | None = None
        self.program_id = self.num_programs = 0

    def switch(self, wait: Callable[[], bool] = lambda: True) -> None:
        """Lets other threads run, at least until `wait` returns True."""
        own, own.wait = self.current, wait
        with self.lock:
            self._choose()
            self._wait_for_turn(own)

    def _wait_for_turn(self, own: Warps) -> None:
        if not self.lock.wait_for(lambda: self.current is own or self.failure is not None, TIMEOUT):
            self.fail(Deadlock(f"{self.current.name} neither waits nor ends"))
        if self.failure is not None:
            raise self.failure

    def _choose(self) -> None:
        """Draws the next thread to run."""
        while self.failure is None:
            runnable = [one for one in self.all if not one.ended and one.wait()]
            if self.copies and (not runnable or self.rng.random() < self.early_completion):
                self.copies.pop(self.rng.randrange(len(self.copies)))()
            elif runnable:
                self.current = self.rng.choice(runnable)
                self.lock.notify_all()
                return
            else:
                self.fail(Deadlock(f"all wait for each other: {[one.name for one in self.all if not one.ended]}"))

    def fail(self, problem: BaseException) -> None:
        self.failure = self.failure or problem
        self.lock.notify_all()

    def specialize(self, parts: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        """Runs all partitions, each in a thread."""
        self.first.wait = lambda: all(one.ended for one in self.all if one is not self.first)
        for partition, (function, given) in enumerate(parts):
            warps = Warps(f"{function.__name__} {partition}")
            self.all.append(warps)
            threading.Thread(target=self._run, args=(warps, function, given), daemon=True).start()
        with self.lock:
            self._choose()
            self._wait_for_turn(self.first)

    def _run(self, own: Warps, function: Callable[..., None], given: tuple[Any, ...]) -> None:
        try:
            with self.lock:
                self._wait_for_turn(own)
            function(*given)
            assert not own.products, "ended before its products did"
        except BaseException as problem:
            with self.lock:
                self.fail(problem)
        finally:
            own.ended = True
            with self.lock:
                if self.failure is None:
                    self._choose()


# wgmma products, and TMA


@dataclass
class Product:
    """A wgmma product that was launched; it has no result until it is waited for."""

    left: "SharedMemory | Tensor"
    right: SharedMemory
    sums: Tensor | None
    result: Tensor | None = None

    def __post_init__(self) -> None:
        self._initial_operands = [one.clone() for one in self._operands()]

    def _operands(self) -> list[Tensor]:
        return [one.numbers if isinstance(one, SharedMemory) else one for one in (self.left, self.right)]

    def end(self) -> None:
        left, right = self._operands()
        for one, initial in zip((left, right), self._initial_operands, strict=True):
            assert one.view(torch.int16).equal(initial.view(torch.int16)), "an operand changed while it was multiplied"
        found = left.float() @ right.float()
        self.result = found if self.sums is None else found + self.sums


def multiply(
    left: "SharedMemory | Tensor", right: SharedMemory, sums: Tensor, use_acc: bool = True, is_async: bool = False
) -> Product:
    for one in (left, right):
        if isinstance(one, SharedMemory):
            _assert_fenced(one)
    assert is_async
    product = Product(left.clone() if isinstance(left, Tensor) else left, right, sums if use_acc else None)
    Program.now.current.products.append(product)
    Program.now.switch()
    return product


def wait_for_products(remaining: int, deps: list[Any]) -> Any:
    """Waits for all products but the last `remaining`."""
    Program.now.switch()
    products = Program.now.current.products
    for product in products[: len(products) - remaining]:
        product.end()
    del products[: len(products) - remaining]
    found = tuple(_result(one) if isinstance(one, Product) else one for one in deps)
    return found[0] if len(found) == 1 else found


def _result(product: Product) -> Tensor:
    assert product.result is not None, "was not waited for"
    return product.result


def _assert_fenced(memory: SharedMemory) -> None:
    own, address = Program.now.current, memory.numbers.untyped_storage().data_ptr()
    assert address not in own.unfenced, "read before a fence"
    assert address not in own.fenced, "read before a barrier"


def _fence() -> None:
    own = Program.now.current
    own.fenced |= own.unfenced
    own.unfenced.clear()


def copy_box(descriptor: Any, corner: list[int], barrier: Barrier, target: SharedMemory) -> None:
    """TMA's load of a box. descriptor: a `TensorDescriptor`. Elements beyond the tensor are zeros."""
    _assert_fenced(target)
    rows, columns = descriptor.block_shape
    assert target.numbers.shape == (rows, columns)
    assert corner[0] % 8 == 0, "a box that begins within the swizzle's period"
    base, (most_rows, most_columns) = descriptor.base, descriptor.shape
    flat = base.as_strided((most_rows, most_columns), descriptor.strides, base.storage_offset())
    source = flat[corner[0] : corner[0] + rows, corner[1] : corner[1] + columns]
    target.numbers.fill_(torch.nan)

    def arrive() -> None:
        target.numbers.zero_()
        target.numbers[: source.shape[0], : source.shape[1]] = source
        barrier.arrive(0, -rows * columns * base.element_size())

    Program.now.copies.append(arrive)
    Program.now.switch()


def _arrive(barrier: Barrier, count: int = 1) -> None:
    barrier.arrive(count, 0)
    Program.now.switch()


def _expect(barrier: Barrier, expected_bytes: int) -> None:
    barrier.arrive(1, expected_bytes)


def _wait(barrier: Barrier, parity: int) -> None:
    Program.now.switch(lambda: barrier.completed(parity))


# The language


def _jit(function: Any = None, **options: Any) -> Any:
    return function if function is not None else lambda one: one


def _where(condition: Value, one: Value, other: Value) -> Value:
    if isinstance(condition, Tensor) or isinstance(one, Tensor) or isinstance(other, Tensor):
        return torch.where(torch.as_tensor(condition), one, other)
    return one if condition else other


def _extreme(name: str, plain: Callable[..., Any]) -> Callable[[Value, Value], Value]:
    def either(one: Value, other: Value) -> Value:
        if not isinstance(one, Tensor) and not isinstance(other, Tensor):
            return plain(one, other)
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        found: Tensor = getattr(torch, name)(*torch.broadcast_tensors(one, other))
        return found

    return either


def _allocate(dtype: torch.dtype, shape: list[int], layout: object) -> "SharedMemory | Barriers":
    if dtype == torch.int64:
        return Barriers([Barrier() for _ in range(shape[0])])
    return SharedMemory(torch.full(shape, torch.nan, dtype=dtype))


def _layout(*given: object, **more: object) -> None:
    """Layouts are ignored."""


def language() -> dict[str, ModuleType]:
    """The Gluon modules that a kernel imports, by name."""
    gl = SimpleNamespace(
        **{name: getattr(torch, name) for name in ("exp2", "log2", "zeros_like", "float32", "int32", "int64")},
        **dict.fromkeys(("tensor", "constexpr", "shared_memory_descriptor"), object),
        **dict.fromkeys(
            ("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout"), _layout
        ),
        load=load,
        store=store,
        where=_where,
        maximum=_extreme("maximum", max),
        minimum=_extreme("minimum", min),
        max=lambda block, axis: block.amax(axis),
        sum=lambda block, axis: block.sum(axis),
        arange=lambda start, end, layout: torch.arange(start, end),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        expand_dims=lambda block, axis: block.unsqueeze(axis),
        convert_layout=lambda block, layout: block,
        static_range=range,
        static_assert=_assert,
        program_id=lambda axis: Program.now.program_id,
        num_programs=lambda axis: Program.now.num_programs,
        allocate_shared_memory=_allocate,
        inline_asm_elementwise=lambda code, constraints, given, **how: given[0],
        warp_specialize=lambda parts, warps, registers: Program.now.specialize(parts),
        thread_barrier=lambda: Program.now.current.fenced.clear(),
    )
    mbarrier = SimpleNamespace(
        init=lambda barrier, count: barrier.init(count), expect=_expect, wait=_wait, arrive=_arrive, MBarrierLayout=_layout
    )
    hopper = {
        "fence_async_shared": _fence,
        "mbarrier": mbarrier,
        "tma": SimpleNamespace(async_load=copy_box, tensor_descriptor=object),
        "warpgroup_mma": multiply,
        "warpgroup_mma_wait": wait_for_products,
    }
    package = "triton.experimental"
    contents = {
        package: {"gluon": SimpleNamespace(jit=_jit)},
        f"{package}.gluon": {"language": gl, "jit": _jit},
        f"{package}.gluon.language": {},
        f"{package}.gluon.language.nvidia": {},
        f"{package}.gluon.language.nvidia.hopper": hopper,
    }
    modules = {}
    for name, values in contents.items():
        modules[name] = ModuleType(name)
        modules[name].__dict__.update(values)
    return modules


def _assert(condition: bool) -> None:
    assert condition


@contextmanager
def _replaced_modules(modules: dict[str, ModuleType]) -> Iterator[None]:
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class Kernel:
    """A kernel from a source file, launched as Triton's are: kernel[grid](...)."""

    def __init__(self, file: Path, name: str, rng: random.Random, change: Callable[[str], str] = lambda source: source) -> None:
        """change: applied to the source, to plant a fault."""
        specification = importlib.util.spec_from_loader(f"{file.stem}_on_cpu", loader=None)
        assert specification is not None
        module = importlib.util.module_from_spec(specification)
        with _replaced_modules(language()):
            exec(compile(change(file.read_text(encoding="utf-8")), str(file), "exec"), module.__dict__)
        self.function: Callable[..., None] = getattr(module, name)
        self.rng = rng

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*given: Any, num_warps: int = 0, enable_fp_fusion: bool = False, **constants: Any) -> None:
            for program_id in range(grid[0]):
                Program.now = Program(self.rng)
                Program.now.program_id, Program.now.num_programs = program_id, grid[0]
                self.function(*(pointer(one) if isinstance(one, Tensor) else one for one in given), **constants)
                assert not Program.now.copies, "ended before TMA has copied what it was asked for"

        return launch
