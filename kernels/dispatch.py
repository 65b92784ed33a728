"""Which of its two implementations an operation runs by: Triton on accelerators, plain torch elsewhere.

One process has one kind of device, so this is a setting of the process: made once, at its start; in between only by what compares
both, tests and benchmarks. Importing this imports no Triton; modules named `fused_*` do, and are imported where they are called.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_forced = ""


def force(choice: str) -> None:
    """Everything by one implementation from now on; "" is back to a choice by device. On a CPU "triton" needs its interpreter."""
    global _forced
    if choice not in ("", "reference", "triton"):
        raise ValueError(f"no such kernels: {choice!r}")
    _forced = choice


@contextmanager
def forced(choice: str) -> Iterator[None]:
    """The same for a while."""
    before = _forced
    force(choice)
    try:
        yield
    finally:
        force(before)


def triton_for(tensor: Tensor) -> bool:
    """What works on `tensor` is to be done by Triton."""
    return tensor.is_cuda if not _forced else _forced == "triton"


def triton_on(device: torch.device) -> bool:
    """What works on tensors of `device` is to be done by Triton."""
    return device.type == "cuda" if not _forced else _forced == "triton"


def on_hopper(device: torch.device) -> bool:
    """Whether it is what kernels were measured on. A CPU, where only the interpreter runs, passes for it."""
    return device.type != "cuda" or (torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9)


def on_nvidia(device: torch.device) -> bool:
    """Whether kernels for it may hold PTX."""
    return device.type == "cuda" and torch.version.hip is None
