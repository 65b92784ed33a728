"""Finds the weights that parts of the decoder hold, wherever these keep them."""

from collections.abc import Iterator

from torch import Tensor

from ...kernels.experts import Experts
from ...kernels.linear import Weight


class Holder:
    """A part of the decoder whose attributes are weights, or parts that hold some, or lists of these, beside other things."""


def held(value: object) -> Iterator[Weight | Tensor]:
    """All weights of this rank that an attribute of a part holds, with what LoRA adapters add to them."""
    if isinstance(value, Holder):
        for each in vars(value).values():
            yield from held(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from held(each)
    elif isinstance(value, Experts):
        yield from value.weights
    elif isinstance(value, Weight):
        yield value
        if value.lora is not None:
            yield from value.lora.weights
    elif isinstance(value, Tensor):
        yield value
