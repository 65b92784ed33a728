"""Without a GPU the Triton kernels run in Triton's interpreter. That is decided when a kernel is defined, so before any import."""

import importlib
import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def quick() -> None:
    """Whenever a kernel calls a function, the interpreter puts its operations in the place of Triton's, also where they are there
    already: a third of the time that these tests would take."""
    try:
        interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    except ImportError:
        return
    patch, language = interpreter._patch_lang, interpreter.tl
    if not hasattr(interpreter, "_LangPatchScope"):
        return

    def patch_once(function: Any) -> Any:
        seen = [value for value in function.__globals__.values() if value is language or value is language.core]
        there = seen and not any(language.core.is_builtin(each.load) for each in seen)
        return interpreter._LangPatchScope() if there else patch(function)

    interpreter._patch_lang = patch_once
