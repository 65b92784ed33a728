"""Several residual streams of a token in the place of one: hyper-connections (Zhu et al. 2024, arXiv:2409.19606).

Each part of a layer sees a mixture of them, and so does the output matrix. What a part comes to is added to all, more to some than
to others: see `kernels.hyper_connections`. Hy 4's streams are as they were but for what is added; DeepSeek V4's and GLM 5 Next's
are mixed with each other, too, and of the latter the output matrix sees the mean.
"""

import torch
from torch import Tensor

from ...kernels.adapters import RowAdapters
from ...kernels.hyper_connections import mix
from ...kernels.linear import Weight
from ...kernels.reference import Shares
from ..parallel import Ranks
from .loader import Loader
from .stream import Stream
from .traits import HyperConnections


class StreamMixer:
    """Of a part of a layer: what it goes by, its kinds know."""


class HyperConnection(StreamMixer):
    """By shares."""

    def __init__(self, load: Loader, name: str, hyper: HyperConnections, gives: bool = True) -> None:
        """name: of its tensors, up to what tells these apart; gives: something is added afterwards."""
        kinds = hyper.kinds if gives else hyper.kinds[:1]
        self.matrix = load.wide(f"{name}fn", sum(kinds), hyper.count * load.shape.hidden)
        self.base, self.scale = load.wide(f"{name}base", sum(kinds)), load.wide(f"{name}scale", len(kinds))
        scale = self.scale.repeat_interleave(torch.tensor(kinds, device=self.scale.device))
        self.shares = Shares(self.matrix, scale, self.base, hyper.magnitude, hyper.epsilon, hyper.rounds if gives else 0)


class HyperStream(Stream):
    """As one, for each part of a layer that it is turned to."""

    def __init__(self, sums: Tensor, ranks: Ranks, epsilon: float, count: int, chosen: RowAdapters | None = None) -> None:
        """sums: [tokens, hidden], with which all begin."""
        super().__init__(sums, ranks, epsilon, chosen=chosen)
        self._all = sums.unsqueeze(1).repeat(1, count, 1)
        self._given: Tensor | None = None  # what each gets of what is added next
        self.tokens: Tensor | None = None  # their numbers, where experts go by these

    def turn(self, mixing: StreamMixer | None) -> None:
        """To a part of a layer: what that sees, and what it will give. None: to the output matrix, which sees their mean."""
        assert mixing is None or isinstance(mixing, HyperConnection)
        shares = mixing.shares if mixing is not None else None
        self._sums, self._given = mix(self._all, self._more, self._given, shares, self._epsilon)
        self._more = None

    def normalized(self, gains: Tensor | None) -> Tensor:
        """As of `Stream`, of what is seen."""
        return self._sums if gains is None else self._norm(self._sums, gains)

    def through(self, gains: Tensor | None, weight: Weight, gates: bool = False) -> Tensor:
        """As of `Stream`."""
        return self.apart(self.normalized(gains), weight, gates)

    def add(self, x: Tensor, weight: Weight, gains: Tensor | None = None) -> None:
        """As of `Stream`."""
        self.add_part(self.product(x, weight), gains)

    def replace(self, rows: Tensor, sums: Tensor) -> None:
        """As of `Stream`."""
        self._all.index_copy_(0, rows, sums.unsqueeze(1).expand(-1, self._all.shape[1], -1))

    def select(self, rows: Tensor) -> None:
        """As of `Stream`, before what a part comes to is added."""
        super().select(rows)
        self._all = self._all.index_select(0, rows)
        self._given = self._given.index_select(0, rows) if self._given is not None else None
        self.tokens = self.tokens.index_select(0, rows) if self.tokens is not None else None
