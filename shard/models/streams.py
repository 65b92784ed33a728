"""Several residual streams of a token in the place of one: hyper-connections (Zhu et al. 2024, arXiv:2409.19606).

Each part of a layer sees a mixture of them, and so does the output matrix. What a part comes to is added to all, more to some than
to others. The shares follow from the streams themselves, and are computed in float32, whatever the rest is computed in. Hy 4's
streams are as they were but for what is added: they are not mixed with each other.
"""

import torch
from torch import Tensor

from ...kernels.adapters import Chosen
from ...kernels.linear import Weight
from ...kernels.operations import gated
from ..parallel import Ranks
from .loader import Loader
from .stream import Stream
from .traits import Hyper


class Mixing:
    """What a part of a layer sees of the streams, and what it gives to each of them."""

    def __init__(self, load: Loader, name: str, hyper: Hyper, gives: bool = True) -> None:
        """name: of its tensors, up to what tells these apart; gives: something is added afterwards."""
        count, kinds = hyper.count, 1 + gives
        self.hyper = hyper
        self.matrix = load.wide(f"{name}fn", kinds * count, count * load.shape.hidden)
        self.base, self.scale = load.wide(f"{name}base", kinds * count), load.wide(f"{name}scale", kinds)

    def __call__(self, streams: Tensor, epsilon: float) -> tuple[Tensor, Tensor | None]:
        """What is seen of streams [tokens, count, hidden]: [tokens, hidden]; and what each gets of what is added, [tokens, count]
        in float32."""
        count, wide = self.hyper.count, streams.float()
        flat = wide.flatten(1)
        products = flat @ self.matrix.t() * (flat.square().mean(1, keepdim=True) + epsilon).rsqrt()
        shares = torch.sigmoid(products * self.scale.repeat_interleave(count) + self.base)
        seen, given = shares[:, :count] + self.hyper.epsilon, shares[:, count:]
        mixed = (seen.unsqueeze(2) * wide).sum(1).to(streams.dtype)
        return mixed, given * self.hyper.magnitude + self.hyper.epsilon if given.shape[1] else None


class Streams(Stream):
    """As one, for each part of a layer that it is turned to."""

    def __init__(self, sums: Tensor, ranks: Ranks, epsilon: float, count: int, chosen: Chosen | None = None) -> None:
        """sums: [tokens, hidden], with which all begin."""
        super().__init__(sums, ranks, epsilon, chosen=chosen)
        self._all = sums.unsqueeze(1).repeat(1, count, 1)
        self._given: Tensor | None = None

    def turn(self, mixing: Mixing) -> None:
        """To a part of a layer: what that sees, and what it will give."""
        if self._more is not None and self._given is not None:
            added = self._given.unsqueeze(2) * self._more.float().unsqueeze(1)
            self._all = added.add_(self._all).to(self._all.dtype)
            self._more = None
        self._sums, self._given = mixing(self._all, self._epsilon)

    def normalized(self, gains: Tensor | None) -> Tensor:
        """As of `Stream`, of what is seen."""
        return self._sums if gains is None else self._norm(self._sums, gains)

    def through(self, gains: Tensor | None, weight: Weight, gates: bool = False) -> Tensor:
        """As of `Stream`."""
        found = self.product(self.normalized(gains), weight)
        return gated(found, self._gelu) if gates else found

    def add(self, x: Tensor, weight: Weight, gains: Tensor | None = None) -> None:
        """As of `Stream`."""
        self.add_part(self.product(x, weight), gains)

    def select(self, rows: Tensor) -> None:
        """As of `Stream`, before what a part comes to is added."""
        super().select(rows)
        self._all = self._all.index_select(0, rows)
        self._given = self._given.index_select(0, rows) if self._given is not None else None
