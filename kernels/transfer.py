"""Between host and device without waiting: a wait for a copy is one for all that the device has been given before it."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy
import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device. On a GPU the host goes on at once; what the device is given later finds it there."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and len(tensor) else tensor.to(device)


def list_to_device(device: torch.device, values: Sequence[int]) -> Tensor:
    """As a tensor of int64. By numpy, which takes a third of the time that torch takes for a list."""
    return to_device(torch.from_numpy(numpy.array(values, numpy.int64)), device)


def lists_to_device(device: torch.device, *lists: Sequence[int]) -> tuple[Tensor, ...]:
    """Each as a tensor of int64, by one copy for all."""
    return torch.split(list_to_device(device, [*chain(*lists)]), [*map(len, lists)])


class HostCopy:
    """What a device computes, on its way to the host."""

    def __init__(self, *tensors: Tensor) -> None:
        self._found = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # into pinned memory
        self._event = None
        if any(tensor.is_cuda for tensor in tensors):
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        """Until it is there, and all that the device was given before. By any thread."""
        if self._event is not None:
            self._event.synchronize()

    def lists(self) -> list[Any]:
        """Each tensor as Python's numbers."""
        self.wait()
        return [tensor.tolist() for tensor in self._found]
