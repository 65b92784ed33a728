"""Several residual streams of a token, of which layers compute one: AltUp (Baykal et al. 2023, arXiv:2301.13310), as in Gemma 3n.

Before a layer all are predicted: each is as it was, and a mixture of all is added to it. Behind its MLP all are corrected by what
the one that is computed differs from its prediction. What mixes and corrects follows from that one. What a layer is told of a token
apart goes to all but the first. Every rank has all of it, whatever bits others have.
"""

import torch
from torch import Tensor

from ...kernels.adapters import RowAdapters
from ...kernels.linear import Weight
from ...kernels.operations import rms_norm
from ...kernels.reference import by_lanes
from ..parallel import Ranks
from .loader import Loader
from .stream import Stream
from .traits import AltUpShape

LEAST = 1e-5  # that a mean square is taken for, by which a stream is divided


class AltUp:
    """Of a layer."""

    def __init__(self, load: Loader, how: AltUpShape) -> None:
        count, hidden = how.count, load.shape.hidden
        self.how, self._epsilon = how, load.shape.norm_epsilon
        self.norm = load.gains("altup.router_norm", hidden)
        self.router = Weight(load.all_bits("altup.modality_router", count).float() / hidden, None, load.exact)
        self.prediction, self.correction = (
            Weight(load.all_bits(f"altup.{name}_coefs", outputs, count).float(), None, load.exact)
            for name, outputs in (("prediction", count**2), ("correction", count))
        )
        self.scale = load.source.tensor(f"{load.prefix}altup.correct_output_scale", (hidden,))

    def predicted(self, every: Tensor) -> Tensor:
        """every: [tokens, count, hidden]."""
        count, wide = self.how.count, every.float()
        shares = self.prediction(self._routed(every[:, self.how.active])).view(-1, count, count)
        return torch.bmm(shares, wide).add_(wide).to(every.dtype)

    def corrected(self, every: Tensor, computed: Tensor) -> Tensor:
        """every: as they were predicted; computed: [tokens, hidden]."""
        shares = self.correction(self._routed(computed)).add_(1).unsqueeze(2)
        differs = computed.float() - every[:, self.how.active].float()
        return every.float().addcmul(shares, differs.unsqueeze(1)).to(every.dtype)

    def _routed(self, x: Tensor) -> Tensor:
        """What shares are made of: [tokens, count] float32."""
        return by_lanes(torch.tanh, self.router(rms_norm(x.contiguous(), self.norm, self._epsilon).float()))


class Ends:
    """What all streams begin with, and what they come to behind all layers: each is as large as the first one."""

    def __init__(self, load: Loader, how: AltUpShape) -> None:
        hidden, others = load.shape.hidden, range(how.count - 1)
        self.first, self.last = (
            [load.laid_out(load.all_bits(f"altup_{name}projections.{i}", hidden), None) for i in others]
            for name in ("", "unembed_")
        )

    def begun(self, sums: Tensor) -> Tensor:
        """[tokens, count, hidden] of [tokens, hidden]."""
        return torch.stack([sums, *(_as_large(weight(sums), sums) for weight in self.first)], 1)

    def joined(self, every: Tensor) -> Tensor:
        """[tokens, hidden]."""
        first, *others = (own.contiguous() for own in every.unbind(1))
        found = first.float()
        for weight, own in zip(self.last, others, strict=True):
            found = found + _as_large(weight(own), first).float()
        return (found / every.shape[1]).to(every.dtype)


def _as_large(x: Tensor, like: Tensor) -> Tensor:
    """x by a factor of each row."""
    own, wanted = (part.float().square().mean(1, keepdim=True) for part in (x, like))
    return (x * (wanted / own.clamp_(min=LEAST)).sqrt_()).to(x.dtype)


class AltUpStream(Stream):
    """As one, the one that is computed; behind a layer's correction what that is told apart goes to others."""

    def __init__(
        self, sums: Tensor, ranks: Ranks, epsilon: float, gelu: bool, ends: Ends, chosen: RowAdapters | None = None
    ) -> None:
        """As of `Stream`."""
        super().__init__(sums, ranks, epsilon, gelu, chosen)
        self._ends = ends
        self._all: Tensor | None = None  # [tokens, count, hidden]; None: before the first layer

    def predict(self, layer: AltUp) -> None:
        """Turns to a layer."""
        self._all = layer.predicted(self._ends.begun(self._sums) if self._all is None else self._settled())
        self._sums = self._all[:, layer.how.active].clone()

    def correct(self, layer: AltUp) -> None:
        """Turns to what the layer is told apart, of which it has computed the rest."""
        assert self._all is not None
        self._all = layer.corrected(self._all, self.normalized(None))
        self._sums = self._all[:, layer.how.active].clone()
        if layer.how.scaled:
            self._sums.mul_(layer.scale)

    def join(self) -> None:
        """Turns to what is behind all layers."""
        self._sums = self._ends.joined(self._settled())

    def select(self, rows: Tensor) -> None:
        """As of `Stream`, before what attention comes to is added, or behind a layer."""
        self._all = self._settled().index_select(0, rows)
        super().select(rows)

    def _settled(self) -> Tensor:
        """All, with what was told apart."""
        assert self._all is not None
        more, self._more = self._more, None
        if more is not None:
            self._all[:, 1:] += more.unsqueeze(1)
        return self._all
