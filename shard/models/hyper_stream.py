"""Hyper-connections: several residual streams per token instead of one (Zhu et al. 2024, arXiv:2409.19606).

Attention, MLP and the LM head each read a mixture of the streams. The output of attention or MLP is added to all of them, with
different weights: see `kernels.hyper_connections`. In Hy 4 streams change by these additions alone; in DeepSeek V4 and GLM 5 Next
they are also mixed with each other, and in the latter the LM head reads their mean.
"""

import torch
from torch import Tensor

from ...kernels.adapters import RowAdapters
from ...kernels.hyper_connections import mix
from ...kernels.linear import Weight
from ...kernels.reference import HyperConnectionWeights
from ..parallel import Ranks
from .holder import Holder
from .loader import Loader
from .stream import Stream
from .traits import HyperConnections


class StreamMixer(Holder):
    """Mixes the streams for one part of a layer; see the subclasses."""


class HyperConnection(StreamMixer):
    """Mixes the streams with computed weights."""

    def __init__(self, load: Loader, name: str, hyper: HyperConnections, gives: bool = True) -> None:
        """name: prefix of its tensors; gives: an output is added afterwards."""
        kinds = hyper.kinds if gives else hyper.kinds[:1]
        self.matrix = load.wide(f"{name}fn", sum(kinds), hyper.count * load.shape.hidden)
        self.base, self.scale = load.wide(f"{name}base", sum(kinds)), load.wide(f"{name}scale", len(kinds))
        scale = self.scale.repeat_interleave(torch.tensor(kinds, device=self.scale.device))
        self.shares = HyperConnectionWeights(
            self.matrix, scale, self.base, hyper.magnitude, hyper.epsilon, hyper.rounds if gives else 0
        )


class HyperStream(Stream):
    """A residual stream that is read and written through hyper-connections."""

    def __init__(
        self, sums: Tensor, ranks: Ranks, epsilon: float, count: int, chosen: RowAdapters | None, tokens: Tensor | None
    ) -> None:
        """sums: [tokens, hidden], the initial value of all streams; tokens: their ids, for hash-routed experts."""
        super().__init__(sums, ranks, epsilon, chosen=chosen)
        self._all = sums.unsqueeze(1).repeat(1, count, 1)
        self._given: Tensor | None = None  # the weights by which the next output is added to the streams
        self.tokens = tokens

    def turn(self, mixing: StreamMixer | None) -> None:
        """Prepares the stream for a part of a layer: computes its input, and the weights for its output. None: for the LM head,
        which reads the mean."""
        assert mixing is None or isinstance(mixing, HyperConnection)
        shares = mixing.shares if mixing is not None else None
        self._sums, self._given = mix(self._all, self._more, self._given, shares, self._epsilon)
        self._more = None

    def normalized(self, gains: Tensor | None) -> Tensor:
        """See `Stream`; of the mixture that is read."""
        return self._sums if gains is None else self._norm(self._sums, gains)

    def through(self, gains: Tensor | None, weight: Weight, gates: bool = False) -> Tensor:
        """See `Stream`."""
        return self.apart(self.normalized(gains), weight, gates)

    def add(self, x: Tensor, weight: Weight, gains: Tensor | None = None) -> None:
        """See `Stream`."""
        self.add_part(self.product(x, weight), gains)

    def replace(self, rows: Tensor, sums: Tensor) -> None:
        """See `Stream`."""
        self._all.index_copy_(0, rows, sums.unsqueeze(1).expand(-1, self._all.shape[1], -1))

    def select(self, rows: Tensor) -> None:
        """See `Stream`; before the output of a part is added."""
        super().select(rows)
        self._all = self._all.index_select(0, rows)
        self._given = self._given.index_select(0, rows) if self._given is not None else None
        self.tokens = self.tokens.index_select(0, rows) if self.tokens is not None else None
