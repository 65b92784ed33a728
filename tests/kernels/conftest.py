"""Fixtures of the kernel tests. Without a GPU, Triton's kernels run in Triton's interpreter. Triton decides that when a kernel is
defined, so the environment variable is set here, before any kernel is imported."""

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
def rng() -> random.Random:
    seed = random.randrange(1 << 32)
    print("seed", seed)  # shown when a test fails
    torch.manual_seed(seed)
    return random.Random(seed)


@pytest.fixture
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.empty returns tensors of NaN, so that unwritten outputs show. The reference implementations run unless a test forces
    Triton's kernels."""

    def empty(*arguments: Any, **options: Any) -> torch.Tensor:
        return original(*arguments, **options).fill_(torch.nan)

    original = torch.empty
    monkeypatch.setattr(torch, "empty", empty)
    dispatch.force("reference")
    yield
    dispatch.force("")


@pytest.fixture
def poisoned_float_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty returns NaN in tensors of floats, so that unwritten outputs show."""

    def empty(*arguments: Any, **options: Any) -> torch.Tensor:
        result: torch.Tensor = original(*arguments, **options)
        return result.fill_(torch.nan) if result.is_floating_point() else result

    original = torch.empty
    monkeypatch.setattr(torch, "empty", empty)


@pytest.fixture(autouse=True)
def sanitized() -> Iterator[None]:
    """Checks every kernel launch in the interpreter for races, accesses out of bounds and use of masked-out values."""
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        yield
        return
    with sanitizer.checking():
        yield


@pytest.fixture(scope="session", autouse=True)
def faster_interpreter() -> None:
    """Makes Triton's interpreter about three times as fast: two thirds of its time go to results that it has computed before."""
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    if depends_on_row_position():
        multiply_by_rows(interpreter)
    if hasattr(interpreter, "_LangPatchScope"):
        patch_modules_once(interpreter)
        memoize_types(interpreter, interpreter.tl.core)
        memoize_operand_promotion(interpreter, interpreter.tl.core)


def depends_on_row_position() -> bool:
    """Whether numpy's product of a row depends, bit by bit, on the row's position in its matrix, as with some of OpenBLAS's
    kernels."""
    row, others = np.random.default_rng(0).standard_normal((2, 1, 32), dtype=np.float32)
    columns = np.random.default_rng(1).standard_normal((32, 64), dtype=np.float32)
    products = [np.concatenate([others] * position + [row] + [others] * (63 - position)) @ columns for position in range(64)]
    return any(not np.array_equal(product[position], products[0][0]) for position, product in enumerate(products))


def multiply_by_rows(interpreter: Any) -> None:
    """Multiplies each row of a tile by itself: an accelerator computes all rows of a tile in the same way, and tests compare the
    results of rows bit by bit."""

    def create_dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        if any(operand.dtype.primitive_bitwidth == 8 for operand in (a, b)):
            return original(self, a, b, d, *how)
        products = np.matmul(a.data[..., :, None, :], b.data[..., None, :, :], dtype=d.data.dtype)
        return interpreter.TensorHandle(products[..., 0, :] + d.data, d.dtype.scalar)

    original = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = create_dot


def patch_modules_once(interpreter: Any) -> None:
    """With every launch the interpreter replaces Triton's operations by its own and restores them afterwards, and it searches for
    operations to replace with every function that a kernel calls. Here they stay replaced: a process that interprets kernels
    compiles none."""
    patch, semantic = interpreter._patch_lang, interpreter.interpreter_semantic

    def patch_new(function: Any) -> Any:
        module = function.__module__
        if module not in patched_modules:
            patch(function)
            patched_modules.add(module)
        return interpreter._LangPatchScope()

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        operation = getattr(member, "__wrapped__", member)  # without a check that `_semantic` is given

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return operation(*arguments, **named)

        scope.set_attr(owner, name, call)

    patched_modules: set[str] = set()
    interpreter._patch_lang, interpreter._patch_attr = patch_new, patch_attribute


def memoize_types(interpreter: Any, core: Any) -> None:
    """The interpreter builds the type of every value anew, and the shape from the type. A type's name identifies it, so both are
    computed once for each name."""
    original_init = core.tensor.__init__

    def shape_and_numel(dtype: Any) -> tuple[Any, Any]:
        tensor = core.tensor.__new__(core.tensor)
        original_init(tensor, None, dtype)
        return tensor.shape, tensor.numel

    def cached_init(self: Any, handle: Any, dtype: Any) -> None:
        self.handle, self.type, self.dtype = handle, dtype, dtype.scalar
        self.shape, self.numel = cached_shape_and_numel(dtype)

    cached_shape_and_numel = memoized(shape_and_numel, lambda dtype: dtype.name)
    core.tensor.__init__ = cached_init
    core.block_type.with_element_ty = memoized(core.block_type.with_element_ty, lambda block, dtype: (block.name, dtype.name))
    interpreter._get_np_dtype = memoized(interpreter._get_np_dtype, lambda dtype: dtype.scalar.name)


def memoize_operand_promotion(interpreter: Any, core: Any) -> None:
    """Which types the operands of an operation are promoted to follows from their types, and for Python numbers from their values:
    it is computed once for each combination. Blocks are not broadcast beforehand, since numpy broadcasts by itself. The
    interpreter's additional operations that detect overflows are turned off: nobody reads their result."""
    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    promote, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    make_tensor = getattr(semantic, "make_tensor", None) or semantic.tensor  # as Triton 3.6 calls it
    cache: dict[Any, Any] = {}

    def key_of(operand: Any) -> Any:
        return operand.type.name if isinstance(operand, core.tensor) else (type(operand), repr(operand))

    def conversion(operand: Any, promoted: Any) -> Callable[[Any], Any]:
        dtype = promoted.type
        if not isinstance(operand, core.tensor):
            number = make_tensor(interpreter.TensorHandle(promoted.handle.data.reshape(-1)[:1], dtype.scalar), dtype)
            return lambda operand: number
        if operand.type == dtype:
            return lambda operand: operand
        return lambda operand: make_tensor(semantic.cast(operand, dtype.scalar).handle, dtype)

    def cached_promotion(left: Any, right: Any, *how: Any, **named: Any) -> Any:
        key = (key_of(left), key_of(right), how, *named.items())
        if key not in cache:
            promoted = promote(left, right, *how, **named)
            cache[key] = conversion(left, promoted[0]), conversion(right, promoted[1])
        first, second = cache[key]
        return first(left), second(right)

    def cached_broadcast(left: Any, right: Any) -> Any:
        key = left.type.name, right.type.name
        if cache.get(key):
            return left, right
        promoted = broadcast(left, right)
        cache[key] = promoted[0] is left and promoted[1] is right
        return promoted

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = cached_promotion, cached_broadcast
    builder.get_block_ty = memoized(builder.get_block_ty, lambda dtype, shape: (dtype.name, *shape))
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def memoized(function: Callable[..., Any], key_of: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called once for all arguments with the same key."""
    known: dict[Any, Any] = {}

    def cached(*arguments: Any) -> Any:
        key = key_of(*arguments)
        if key not in known:
            known[key] = function(*arguments)
        return known[key]

    return cached
