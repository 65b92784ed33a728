"""AltUp (Baykal et al. 2023, arXiv:2301.13310), as in Gemma 3n: several residual streams per token, of which layers compute one.

Before a layer all streams are predicted: a mixture of all is added to each. After its MLP all are corrected, by the difference
between the computed stream and its prediction. The coefficients of both are computed from that stream. Per-layer inputs go to all
streams but the first. Every rank has all of it, unquantized.
"""

import torch
from torch import Tensor

from ...kernels.adapters import RowAdapters
from ...kernels.linear import Weight
from ...kernels.operations import rms_norm
from ...kernels.reference import lane_invariant
from ..parallel import Ranks
from .holder import Holder
from .loader import Loader
from .stream import Stream
from .traits import AltUpShape

LEAST = 1e-5  # least mean square by which a stream is divided


class AltUp(Holder):
    """The prediction and correction of one layer."""

    def __init__(self, load: Loader, how: AltUpShape) -> None:
        count, hidden = how.count, load.shape.hidden
        self.how, self._epsilon = how, load.shape.norm_epsilon
        self.norm = load.gains("altup.router_norm", hidden)
        self.router = Weight(load.unrounded_matrix("altup.modality_router", count).float() / hidden, None, load.exact)
        self.prediction, self.correction = (
            Weight(load.unrounded_matrix(f"altup.{name}_coefs", outputs, count).float(), None, load.exact)
            for name, outputs in (("prediction", count**2), ("correction", count))
        )
        self.scale = load.source.tensor(f"{load.prefix}altup.correct_output_scale", (hidden,))

    def predicted(self, every: Tensor) -> Tensor:
        """Predicts all streams. every: [tokens, count, hidden]."""
        count, wide = self.how.count, every.float()
        shares = self.prediction(self._routed(every[:, self.how.active])).view(-1, count, count)
        return torch.bmm(shares, wide).add_(wide).to(every.dtype)

    def corrected(self, every: Tensor, computed: Tensor) -> Tensor:
        """Corrects all streams. every: as predicted; computed: the layer's output, [tokens, hidden]."""
        shares = self.correction(self._routed(computed)).add_(1).unsqueeze(2)
        differs = computed.float() - every[:, self.how.active].float()
        return every.float().addcmul(shares, differs.unsqueeze(1)).to(every.dtype)

    def _routed(self, x: Tensor) -> Tensor:
        """The router's output, from which coefficients are computed: [tokens, count] float32."""
        return lane_invariant(torch.tanh, self.router(rms_norm(x.contiguous(), self.norm, self._epsilon).float()))


class Ends(Holder):
    """The projections from the embedding to all streams, and from all streams to one after the last layer; each stream is scaled to
    the magnitude of the first."""

    def __init__(self, load: Loader, how: AltUpShape) -> None:
        hidden, others = load.shape.hidden, range(how.count - 1)
        self.first, self.last = (
            [load.laid_out(load.unrounded_matrix(f"altup_{name}projections.{i}", hidden)) for i in others]
            for name in ("", "unembed_")
        )

    def begun(self, sums: Tensor) -> Tensor:
        """All streams from the embedding: [tokens, hidden] to [tokens, count, hidden]."""
        return torch.stack([sums, *(_as_large(weight(sums), sums) for weight in self.first)], 1)

    def joined(self, every: Tensor) -> Tensor:
        """One stream from all: [tokens, count, hidden] to [tokens, hidden]."""
        first, *others = (own.contiguous() for own in every.unbind(1))
        found = first.float()
        for weight, own in zip(self.last, others, strict=True):
            found = found + _as_large(weight(own), first).float()
        return (found / every.shape[1]).to(every.dtype)


def _as_large(x: Tensor, like: Tensor) -> Tensor:
    """x scaled, row by row, to the root mean square of `like`."""
    own, wanted = (part.float().square().mean(1, keepdim=True) for part in (x, like))
    return (x * (wanted / own.clamp_(min=LEAST)).sqrt_()).to(x.dtype)


class AltUpStream(Stream):
    """A residual stream for AltUp: it acts as the stream that is computed; after a layer's correction, per-layer inputs are added
    to the others."""

    def __init__(
        self, sums: Tensor, ranks: Ranks, epsilon: float, gelu: bool, ends: Ends, chosen: RowAdapters | None = None
    ) -> None:
        """See `Stream`; ends: see `Ends`."""
        super().__init__(sums, ranks, epsilon, gelu, chosen)
        self._ends = ends
        self._all: Tensor | None = None  # [tokens, count, hidden]; None: before the first layer

    def predict(self, layer: AltUp) -> None:
        """Predicts all streams for a layer, which computes the active one."""
        self._all = layer.predicted(self._ends.begun(self._sums) if self._all is None else self._settled())
        self._sums = self._all[:, layer.how.active].clone()

    def correct(self, layer: AltUp) -> None:
        """Corrects all streams by the layer's output; afterwards the stream is the gate's input for per-layer inputs."""
        assert self._all is not None
        self._all = layer.corrected(self._all, self.normalized(None))
        self._sums = self._all[:, layer.how.active].clone()
        if layer.how.scaled:
            self._sums.mul_(layer.scale)

    def join(self) -> None:
        """Merges all streams after the last layer."""
        self._sums = self._ends.joined(self._settled())

    def select(self, rows: Tensor) -> None:
        """As of `Stream`, before attention's output is added, or after a layer."""
        self._all = self._settled().index_select(0, rows)
        super().select(rows)

    def _settled(self) -> Tensor:
        """All streams, with the per-layer input that is still to be added."""
        assert self._all is not None
        more, self._more = self._more, None
        if more is not None:
            self._all[:, 1:] += more.unsqueeze(1)
        return self._all
