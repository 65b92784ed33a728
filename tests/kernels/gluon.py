"""Runs kernels that are written in Gluon on a CPU: as much of its language as `hopper_kernels` uses, by torch.

Warps that do different work are threads, of which one runs at a time; who is next is drawn, wherever one waits or has told another
something. What the hardware does beside them is done as late as it may be, so that who does not wait for it gets wrong numbers:

- a product of the matrix units reads its operands from when it is begun until it is waited for, and then only has a result;
- what TMA copies is no number until a drawn time, by when its barrier has been told.

Who writes to shared memory and lets TMA or the matrix units read it without a fence, and a barrier behind that, fails, and so do
warps that all wait for each other, and loads and stores beyond a tensor. Layouts mean nothing here, nor do registers that a product
reads: the compiler looks after these.
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
PATIENCE = 120.0  # seconds until one that does not wait is taken for a loop without an end


# Memory


@dataclass(frozen=True)
class Pointer:
    """To elements of a tensor's memory, or to one."""

    memory: Tensor  # flat
    at: Value = 0

    def __add__(self, by: Value) -> "Pointer":
        return Pointer(self.memory, self.at + by)

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.memory.dtype)


def pointer(tensor: Tensor) -> Pointer:
    """To its first element. Beyond its last one there may be others of the same memory, as in a plan's."""
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    return Pointer(tensor.as_strided((span,), (1,), tensor.storage_offset()))


def load(source: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Value:
    if not isinstance(source.at, Tensor):
        assert mask is None
        assert 0 <= source.at < len(source.memory)
        return source.memory[source.at].item()
    mask = torch.ones_like(source.at, dtype=torch.bool) if mask is None else mask.expand(source.at.shape)
    held = source.at[mask]
    assert not held.numel() or 0 <= int(held.min()) <= int(held.max()) < len(source.memory), "beyond a tensor's memory"
    found = torch.full(source.at.shape, other, dtype=source.memory.dtype)
    found[mask] = source.memory[held]
    return found


def store(target: Pointer, value: Tensor, mask: Tensor) -> None:
    mask = mask.expand(target.at.shape)
    held = target.at[mask]
    assert not held.numel() or 0 <= int(held.min()) <= int(held.max()) < len(target.memory), "beyond a tensor's memory"
    target.memory[held] = value.expand(target.at.shape)[mask].to(target.memory.dtype)


class Barrier:
    """Of PTX (mbarrier): a phase is over when there were so many arrivals, and as many bytes as these said."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, arrivals: int, more: int) -> None:
        assert self.count, "used before it was made"
        self.pending -= arrivals
        self.bytes += more
        if not self.pending and not self.bytes:
            self.phase, self.pending = self.phase + 1, self.count

    def over(self, parity: int) -> bool:
        """Whether who waits for a phase of that parity goes on."""
        return self.phase % 2 != parity


@dataclass
class Shared:
    """Shared memory: no numbers, until something is written."""

    numbers: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.numbers.dtype

    def index(self, place: int) -> "Shared":
        return Shared(self.numbers[place])

    def slice(self, start: int, length: int, dim: int) -> "Shared":
        return Shared(self.numbers.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.numbers.permute(*order))

    def load(self, layout: object) -> Tensor:
        return self.numbers.clone()

    def store(self, value: Tensor) -> None:
        self.numbers.copy_(value)
        Running.now.current.unfenced.add(self.numbers.untyped_storage().data_ptr())


@dataclass
class Barriers:
    """In shared memory, too."""

    all: list[Barrier]

    def index(self, place: int) -> Barrier:
        return self.all[place]


# Threads


class Stuck(AssertionError):
    """All wait for each other."""


@dataclass
class Warps:
    """That do the same work: a thread here."""

    name: str
    wait: Callable[[], bool] = lambda: True
    over: bool = False
    products: list["Product"] = field(default_factory=list)  # not waited for yet
    unfenced: set[int] = field(default_factory=set)  # memory that was written without a fence
    fenced: set[int] = field(default_factory=set)  # that was, and has not been told to all warps by a barrier


class Running:
    """A program: who runs, who waits for what, and what TMA has still to copy."""

    now: "ClassVar[Running]"

    def __init__(self, rng: random.Random) -> None:
        self.chance = rng
        self.baton = threading.Condition()
        self.current = self.first = Warps("all")
        self.all = [self.first]
        self.copies: list[Callable[[], None]] = []
        self.haste = rng.choice((0.0, 0.3))  # how likely one is done before all wait
        self.broken: BaseException | None = None
        self.place = self.places = 0

    def turn(self, wait: Callable[[], bool] = lambda: True) -> None:
        """Lets others run, at least until `wait` says yes."""
        own, own.wait = self.current, wait
        with self.baton:
            self._choose()
            self._until(own)

    def _until(self, own: Warps) -> None:
        if not self.baton.wait_for(lambda: self.current is own or self.broken is not None, PATIENCE):
            self.fail(Stuck(f"{self.current.name} neither waits nor ends"))
        if self.broken is not None:
            raise self.broken

    def _choose(self) -> None:
        """Who is next."""
        while self.broken is None:
            able = [one for one in self.all if not one.over and one.wait()]
            if self.copies and (not able or self.chance.random() < self.haste):
                self.copies.pop(self.chance.randrange(len(self.copies)))()
            elif able:
                self.current = self.chance.choice(able)
                self.baton.notify_all()
                return
            else:
                self.fail(Stuck(f"all wait for each other: {[one.name for one in self.all if not one.over]}"))

    def fail(self, problem: BaseException) -> None:
        self.broken = self.broken or problem
        self.baton.notify_all()

    def specialize(self, parts: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        """Runs them all, each in a thread."""
        self.first.wait = lambda: all(one.over for one in self.all if one is not self.first)
        for place, (function, given) in enumerate(parts):
            warps = Warps(f"{function.__name__} {place}")
            self.all.append(warps)
            threading.Thread(target=self._run, args=(warps, function, given), daemon=True).start()
        with self.baton:
            self._choose()
            self._until(self.first)

    def _run(self, own: Warps, function: Callable[..., None], given: tuple[Any, ...]) -> None:
        try:
            with self.baton:
                self._until(own)
            function(*given)
            assert not own.products, "ended before its products did"
        except BaseException as problem:
            with self.baton:
                self.fail(problem)
        finally:
            own.over = True
            with self.baton:
                if self.broken is None:
                    self._choose()


# Products of the matrix units, and TMA


@dataclass
class Product:
    """Begun, and without a result until it is waited for."""

    left: "Shared | Tensor"
    right: Shared
    sums: Tensor | None
    result: Tensor | None = None

    def __post_init__(self) -> None:
        self._begun = [one.clone() for one in self._operands()]

    def _operands(self) -> list[Tensor]:
        return [one.numbers if isinstance(one, Shared) else one for one in (self.left, self.right)]

    def end(self) -> None:
        left, right = self._operands()
        for one, begun in zip((left, right), self._begun, strict=True):
            assert one.view(torch.int16).equal(begun.view(torch.int16)), "an operand changed while it was multiplied"
        found = left.float() @ right.float()
        self.result = found if self.sums is None else found + self.sums


def multiply(left: "Shared | Tensor", right: Shared, sums: Tensor, use_acc: bool = True, is_async: bool = False) -> Product:
    for one in (left, right):
        if isinstance(one, Shared):
            _fenced(one)
    assert is_async
    product = Product(left.clone() if isinstance(left, Tensor) else left, right, sums if use_acc else None)
    Running.now.current.products.append(product)
    Running.now.turn()
    return product


def multiplied(still: int, deps: list[Any]) -> Any:
    """Waits for all products but the last `still`."""
    Running.now.turn()
    begun = Running.now.current.products
    for product in begun[: len(begun) - still]:
        product.end()
    del begun[: len(begun) - still]
    found = tuple(_result(one) if isinstance(one, Product) else one for one in deps)
    return found[0] if len(found) == 1 else found


def _result(product: Product) -> Tensor:
    assert product.result is not None, "was not waited for"
    return product.result


def _fenced(memory: Shared) -> None:
    own, place = Running.now.current, memory.numbers.untyped_storage().data_ptr()
    assert place not in own.unfenced, "read before a fence"
    assert place not in own.fenced, "read before a barrier"


def _fence() -> None:
    own = Running.now.current
    own.fenced |= own.unfenced
    own.unfenced.clear()


def copy_box(described: Any, corner: list[int], told: Barrier, target: Shared) -> None:
    """By TMA. described: a `TensorDescriptor`. What is beyond the tensor is zeros."""
    _fenced(target)
    rows, columns = described.block_shape
    assert target.numbers.shape == (rows, columns)
    assert corner[0] % 8 == 0, "a box that begins within the swizzle's period"
    base, (most_rows, most_columns) = described.base, described.shape
    flat = base.as_strided((most_rows, most_columns), described.strides, base.storage_offset())
    held = flat[corner[0] : corner[0] + rows, corner[1] : corner[1] + columns]
    target.numbers.fill_(torch.nan)

    def arrive() -> None:
        target.numbers.zero_()
        target.numbers[: held.shape[0], : held.shape[1]] = held
        told.arrive(0, -rows * columns * base.element_size())

    Running.now.copies.append(arrive)
    Running.now.turn()


def _arrive(told: Barrier, count: int = 1) -> None:
    told.arrive(count, 0)
    Running.now.turn()


def _expect(told: Barrier, more: int) -> None:
    told.arrive(1, more)


def _wait(told: Barrier, parity: int) -> None:
    Running.now.turn(lambda: told.over(parity))


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


def _allocate(dtype: torch.dtype, shape: list[int], layout: object) -> "Shared | Barriers":
    if dtype == torch.int64:
        return Barriers([Barrier() for _ in range(shape[0])])
    return Shared(torch.full(shape, torch.nan, dtype=dtype))


def _layout(*given: object, **more: object) -> None:
    """Nothing here."""


def language() -> dict[str, ModuleType]:
    """The modules that a kernel imports, by their names."""
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
        program_id=lambda axis: Running.now.place,
        num_programs=lambda axis: Running.now.places,
        allocate_shared_memory=_allocate,
        inline_asm_elementwise=lambda code, constraints, given, **how: given[0],
        warp_specialize=lambda parts, warps, registers: Running.now.specialize(parts),
        thread_barrier=lambda: Running.now.current.fenced.clear(),
    )
    mbarrier = SimpleNamespace(
        init=lambda told, count: told.init(count), expect=_expect, wait=_wait, arrive=_arrive, MBarrierLayout=_layout
    )
    hopper = {
        "fence_async_shared": _fence,
        "mbarrier": mbarrier,
        "tma": SimpleNamespace(async_load=copy_box, tensor_descriptor=object),
        "warpgroup_mma": multiply,
        "warpgroup_mma_wait": multiplied,
    }
    above = "triton.experimental"
    named = {
        above: {"gluon": SimpleNamespace(jit=_jit)},
        f"{above}.gluon": {"language": gl, "jit": _jit},
        f"{above}.gluon.language": {},
        f"{above}.gluon.language.nvidia": {},
        f"{above}.gluon.language.nvidia.hopper": hopper,
    }
    modules = {}
    for name, values in named.items():
        modules[name] = ModuleType(name)
        modules[name].__dict__.update(values)
    return modules


def _assert(condition: bool) -> None:
    assert condition


@contextmanager
def _instead(modules: dict[str, ModuleType]) -> Iterator[None]:
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
    """A function of a file of kernels, launched as Triton's are: kernel[grid](...)."""

    def __init__(self, file: Path, name: str, rng: random.Random, change: Callable[[str], str] = lambda source: source) -> None:
        """change: of the file's source, to plant a fault."""
        specification = importlib.util.spec_from_loader(f"{file.stem}_on_cpu", loader=None)
        assert specification is not None
        module = importlib.util.module_from_spec(specification)
        with _instead(language()):
            exec(compile(change(file.read_text(encoding="utf-8")), str(file), "exec"), module.__dict__)
        self.function: Callable[..., None] = getattr(module, name)
        self.chance = rng

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*given: Any, num_warps: int = 0, enable_fp_fusion: bool = False, **constants: Any) -> None:
            for place in range(grid[0]):
                Running.now = Running(self.chance)
                Running.now.place, Running.now.places = place, grid[0]
                self.function(*(pointer(one) if isinstance(one, Tensor) else one for one in given), **constants)
                assert not Running.now.copies, "ended before TMA has copied what it was asked for"

        return launch
