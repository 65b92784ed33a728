"""Norms behind which each feature goes through a gate that is made of all of them, by two small matrices: A.X K2's, before
attention and before experts. Every rank has them whole."""

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.linear import Weight
from ...kernels.reference import by_lanes
from .loader import Loader
from .stream import Stream


class NormGate:
    """Of one norm."""

    def __init__(self, load: Loader, name: str, size: int) -> None:
        """name: of what has its tensors; size: features between the two."""
        hidden = load.shape.hidden
        self.inward = load.laid_out(load.all_bits(f"{name}.mlp.fc1", size), None)
        self.outward = load.laid_out(load.all_bits(f"{name}.mlp.fc2", hidden, size), None)

    def __call__(self, x: Tensor) -> Tensor:
        """What is let through of x, [tokens, hidden]. The gates are computed in float32."""
        gates = self.outward(by_lanes(functional.silu, self.inward(x)))
        return by_lanes(torch.sigmoid, gates.float()).mul_(x).to(x.dtype)


class GatedStream(Stream):
    """As one, with a gate behind the next norm, if that has one."""

    _gate: NormGate | None = None

    def turn(self, gate: NormGate | None) -> None:
        """To a part of a layer, whose norm has this one."""
        self._gate = gate

    def normalized(self, gains: Tensor | None) -> Tensor:
        """As of `Stream`."""
        found = super().normalized(gains)
        if gains is None or self._gate is None:
            return found
        gate, self._gate = self._gate, None
        return gate(found)

    def through(self, gains: Tensor | None, weight: Weight, gates: bool = False) -> Tensor:
        """As of `Stream`."""
        if self._gate is None:
            return super().through(gains, weight, gates)
        return self.apart(self.normalized(gains), weight, gates)
