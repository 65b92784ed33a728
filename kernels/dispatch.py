"""The choice between an operation's two implementations: Triton on accelerators, plain torch elsewhere.

One process has one kind of device, so this is a setting of the process: made once, at its start; changed later only by what
compares both, tests and benchmarks. Importing this imports no Triton; modules named `fused_*` do, and are imported where they are
called.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_forced = ""


def force(choice: str) -> None:
    """Makes everything use one implementation from now on; "" returns to the choice by device. On a CPU "triton" needs its
    interpreter. Raises ValueError for other choices."""
    global _forced
    if choice not in ("", "reference", "triton"):
        raise ValueError(f"no such kernels: {choice!r}")
    _forced = choice


@contextmanager
def forced(choice: str) -> Iterator[None]:
    """As `force`, within a context."""
    before = _forced
    force(choice)
    try:
        yield
    finally:
        force(before)


def triton_for(tensor: Tensor) -> bool:
    """Whether Triton is to do what works on `tensor`."""
    return tensor.is_cuda if not _forced else _forced == "triton"


def triton_on(device: torch.device) -> bool:
    """Whether Triton is to do what works on tensors of `device`."""
    return device.type == "cuda" if not _forced else _forced == "triton"


def on_hopper(device: torch.device) -> bool:
    """Whether it is a Hopper GPU, which kernels were tuned on. A CPU, where only the interpreter runs, counts as one."""
    return device.type != "cuda" or (torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9)


def on_nvidia(device: torch.device) -> bool:
    """Whether kernels for this device may contain PTX."""
    return device.type == "cuda" and torch.version.hip is None
