"""Gated norms (A.X K2), before attention and before experts: each normalized feature is multiplied by a gate, a low-rank projection
of all of them. Every rank has them whole."""

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.linear import Weight
from ...kernels.reference import lane_invariant
from .holder import Holder
from .loader import Loader
from .stream import Stream


class NormGate(Holder):
    """The gate of one norm."""

    def __init__(self, load: Loader, name: str, size: int) -> None:
        """name: prefix of its tensors; size: rank of the projection."""
        hidden = load.shape.hidden
        self.inward = load.laid_out(load.unrounded_matrix(f"{name}.mlp.fc1", size))
        self.outward = load.laid_out(load.unrounded_matrix(f"{name}.mlp.fc2", hidden, size))

    def __call__(self, x: Tensor) -> Tensor:
        """x times its gates, [tokens, hidden]. The gates are computed in float32."""
        gates = self.outward(lane_invariant(functional.silu, self.inward(x)))
        return lane_invariant(torch.sigmoid, gates.float()).mul_(x).to(x.dtype)


class GatedStream(Stream):
    """A residual stream whose next norm may have a gate."""

    _gate: NormGate | None = None

    def turn(self, gate: NormGate | None) -> None:
        """Sets the gate of the next norm; None: it has none."""
        self._gate = gate

    def normalized(self, gains: Tensor | None) -> Tensor:
        """See `Stream`."""
        found = super().normalized(gains)
        if gains is None or self._gate is None:
            return found
        gate, self._gate = self._gate, None
        return gate(found)

    def through(self, gains: Tensor | None, weight: Weight, gates: bool = False) -> Tensor:
        """See `Stream`."""
        if self._gate is None:
            return super().through(gains, weight, gates)
        return self.apart(self.normalized(gains), weight, gates)
