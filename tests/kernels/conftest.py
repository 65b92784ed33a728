"""Without a GPU the Triton kernels run in Triton's interpreter. That is decided when a kernel is defined, so before any import."""

import dataclasses
import importlib
import os
import random
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from penstock.kernels import dispatch
from penstock.tests.kernels import sanitizer

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def chance() -> random.Random:
    seed = random.randrange(1 << 32)
    print("seed", seed)  # shown when a test fails
    torch.manual_seed(seed)
    return random.Random(seed)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What kernels write to holds no numbers before; the plain ones run unless a test says otherwise."""

    def empty(*arguments: Any, **options: Any) -> torch.Tensor:
        return honest(*arguments, **options).fill_(torch.nan)

    honest = torch.empty
    monkeypatch.setattr(torch, "empty", empty)
    dispatch.force("reference")
    yield
    dispatch.force("")


@pytest.fixture
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors of floats hold no numbers before something is written to them."""

    def empty(*arguments: Any, **options: Any) -> torch.Tensor:
        result: torch.Tensor = honest(*arguments, **options)
        return result.fill_(torch.nan) if result.is_floating_point() else result

    honest = torch.empty
    monkeypatch.setattr(torch, "empty", empty)


@pytest.fixture(autouse=True)
def watched() -> Iterator[None]:
    """No kernel does what a device would not forgive."""
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        yield
        return
    with sanitizer.watching():
        yield


@pytest.fixture(scope="session", autouse=True)
def quick() -> None:
    """Two thirds of the interpreter's time go to what it has done before."""
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    if by_place():
        multiply_by_rows(interpreter)
    if hasattr(interpreter, "_LangPatchScope"):
        patch_once(interpreter)
        remember_types(interpreter, interpreter.tl.core)
        remember_operands(interpreter, interpreter.tl.core)


def by_place() -> bool:
    """Whether what numpy makes of a row depends on where the row is in its matrix, as some of OpenBLAS's code does."""
    row, others = np.random.default_rng(0).standard_normal((2, 1, 32), dtype=np.float32)
    columns = np.random.default_rng(1).standard_normal((32, 64), dtype=np.float32)
    found = [np.concatenate([others] * place + [row] + [others] * (63 - place)) @ columns for place in range(64)]
    return any(not np.array_equal(one[place], found[0][0]) for place, one in enumerate(found))


def multiply_by_rows(interpreter: Any) -> None:
    """An accelerator multiplies all rows of a tile in one way, and what rows come to is compared to the bit."""

    def create_dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        if any(operand.dtype.primitive_bitwidth == 8 for operand in (a, b)):
            return dot(self, a, b, d, *how)
        found = np.matmul(a.data[..., :, None, :], b.data[..., None, :, :], dtype=d.data.dtype)
        return interpreter.TensorHandle(found[..., 0, :] + d.data, d.dtype.scalar)

    dot = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = create_dot


def patch_once(interpreter: Any) -> None:
    """With every launch the interpreter puts its operations in the place of Triton's and takes them away again, and looks for what
    to put with every function that a kernel calls. They may stay: in a process that interprets nothing is compiled."""
    patch, semantic = interpreter._patch_lang, interpreter.interpreter_semantic

    def patch_new(function: Any) -> Any:
        module = function.__module__
        if module not in patched:
            patch(function)
            patched.add(module)
        return interpreter._LangPatchScope()

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        operation = getattr(member, "__wrapped__", member)  # without a check that `_semantic` is given

        def call(*given: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return operation(*given, **named)

        scope.set_attr(owner, name, call)

    patched: set[str] = set()
    interpreter._patch_lang, interpreter._patch_attr = patch_new, patch_attribute


def remember_types(interpreter: Any, core: Any) -> None:
    """With every number that it computes the interpreter makes its type anew, and its shape from that. A type's name says all."""
    begin = core.tensor.__init__

    def measures(kind: Any) -> tuple[Any, Any]:
        tensor = core.tensor.__new__(core.tensor)
        begin(tensor, None, kind)
        return tensor.shape, tensor.numel

    def begin_quickly(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = known(kind)

    known = remembered(measures, lambda kind: kind.name)
    core.tensor.__init__ = begin_quickly
    core.block_type.with_element_ty = remembered(core.block_type.with_element_ty, lambda block, kind: (block.name, kind.name))
    interpreter._get_np_dtype = remembered(interpreter._get_np_dtype, lambda kind: kind.scalar.name)


def remember_operands(interpreter: Any, core: Any) -> None:
    """What the operands of an operation become follows from their types, and of numbers from their values. Blocks are not made
    as large as each other: numpy does that by itself. Overflows are looked for, with operations of their own, and told nobody."""
    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    match, spread = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    make = getattr(semantic, "make_tensor", None) or semantic.tensor  # as Triton 3.6 calls it
    known: dict[Any, Any] = {}

    def name(operand: Any) -> Any:
        return operand.type.name if isinstance(operand, core.tensor) else (type(operand), repr(operand))

    def becoming(given: Any, found: Any) -> Callable[[Any], Any]:
        kind = found.type
        if not isinstance(given, core.tensor):
            number = make(interpreter.TensorHandle(found.handle.data.reshape(-1)[:1], kind.scalar), kind)
            return lambda operand: number
        if given.type == kind:
            return lambda operand: operand
        return lambda operand: make(semantic.cast(operand, kind.scalar).handle, kind)

    def match_quickly(left: Any, right: Any, *how: Any, **named: Any) -> Any:
        key = (name(left), name(right), how, *named.items())
        if key not in known:
            found = match(left, right, *how, **named)
            known[key] = becoming(left, found[0]), becoming(right, found[1])
        first, second = known[key]
        return first(left), second(right)

    def spread_quickly(left: Any, right: Any) -> Any:
        key = left.type.name, right.type.name
        if known.get(key):
            return left, right
        found = spread(left, right)
        known[key] = found[0] is left and found[1] is right
        return found

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = match_quickly, spread_quickly
    builder.get_block_ty = remembered(builder.get_block_ty, lambda kind, shape: (kind.name, *shape))
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def remembered(function: Callable[..., Any], name: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called once for all arguments that have the same name."""
    known: dict[Any, Any] = {}

    def quick(*arguments: Any) -> Any:
        key = name(*arguments)
        if key not in known:
            known[key] = function(*arguments)
        return known[key]

    return quick
