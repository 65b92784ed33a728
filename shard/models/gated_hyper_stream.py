"""Gated hyper-connections (Qwen 4 Exp): several residual streams, which elementwise gates mix for each part of a layer. See
`kernels.gated_hyper_connections`."""

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.gated_hyper_connections import gathered, spread
from ...kernels.reference import lane_invariant
from .hyper_stream import HyperConnection, HyperStream, StreamMixer
from .loader import Loader
from .traits import GatedHyperConnections, HyperConnections


class GatedHyperConnection(StreamMixer):
    """Mixes streams by gates, for one part of a layer or the LM head. Every rank has all of it, unquantized."""

    def __init__(self, load: Loader, name: str, hyper: GatedHyperConnections, gives: bool = True) -> None:
        """See `HyperConnection`."""
        count, hidden = hyper.count, load.shape.hidden
        self.gains = load.gains(f"{name}hc_norm", count * hidden).view(count, hidden)
        names = [("input_mix_weight_down", hyper.rank), *([("block_inject_weight", count)] if gives else [])]
        # The outputs of both projections are divided by the number of streams.
        inward = torch.cat([load.unrounded_matrix(f"{name}{part}", outputs, count * hidden) for part, outputs in names]) / count
        self.inward = load.laid_out(inward)
        self.opening = load.laid_out(load.unrounded_matrix(f"{name}input_mix_weight_up", count * hidden, hyper.rank))
        self.rank, self.gives = hyper.rank, gives


class GatedHyperStream(HyperStream):
    """A residual stream that is read through gated hyper-connections."""

    def turn(self, mixing: StreamMixer | None) -> None:
        """Prepares the stream for a part of a layer, or for the LM head."""
        assert isinstance(mixing, GatedHyperConnection)
        normal = spread(self._all, self._more, self._given, mixing.gains, self._epsilon)
        joint = mixing.inward(normal)
        few, giving = joint[:, : mixing.rank], joint[:, mixing.rank :] if mixing.gives else None
        gates = mixing.opening(lane_invariant(functional.silu, few.contiguous()))
        self._sums, self._given = gathered(normal, gates, giving, self._all.shape[1])
        self._more = None

    def settled(self) -> Tensor:
        """All streams, [tokens, count, hidden], with all outputs added; may be added to in place."""
        if self._more is not None and self._given is not None:
            self._all.copy_(self._all.float() + self._given.unsqueeze(2) * self._more.float().unsqueeze(1))
        self._more = None
        return self._all


def stream_mixer(load: Loader, part: str, hyper: HyperConnections, gives: bool = True) -> StreamMixer:
    """The mixer for a part of a layer, "attn" or "ffn", or for the LM head, "head"."""
    if isinstance(hyper, GatedHyperConnections):
        own = {"attn": "attn_hyper_connection.", "ffn": "mlp_hyper_connection.", "head": "hyper_connection_mixer."}
        return GatedHyperConnection(load, own[part], hyper, gives)
    return HyperConnection(load, f"{part}_hc." if gives else "hc_head.hc_", hyper, gives)
