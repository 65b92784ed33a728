"""Without a GPU the Triton kernels run in Triton's interpreter. That is decided when a kernel is defined, so before any import."""

import importlib
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def chance() -> random.Random:
    seed = random.randrange(1 << 32)
    print("seed", seed)  # shown when a test fails
    torch.manual_seed(seed)
    return random.Random(seed)


@pytest.fixture(scope="session", autouse=True)
def quick() -> None:
    """Two thirds of the interpreter's time go to what it has done before."""
    try:
        interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    except ImportError:
        return
    if hasattr(interpreter, "_LangPatchScope"):
        patch_once(interpreter)
        remember_types(interpreter, interpreter.tl.core)


def patch_once(interpreter: Any) -> None:
    """Whenever a kernel calls a function, the interpreter puts its operations in the place of Triton's, also where they are there
    already."""
    patch, language = interpreter._patch_lang, interpreter.tl

    def patch_new(function: Any) -> Any:
        seen = [value for value in function.__globals__.values() if value is language or value is language.core]
        there = seen and not any(language.core.is_builtin(each.load) for each in seen)
        return interpreter._LangPatchScope() if there else patch(function)

    interpreter._patch_lang = patch_new


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


def remembered(function: Callable[..., Any], name: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called once for all arguments that have the same name."""
    known: dict[Any, Any] = {}

    def quick(*arguments: Any) -> Any:
        key = name(*arguments)
        if key not in known:
            known[key] = function(*arguments)
        return known[key]

    return quick
