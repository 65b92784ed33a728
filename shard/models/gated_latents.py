"""Latents whose heads' queries, and gates of what they find, are one product: of latents of queries behind their norm, and of these
before it (A.X K2's)."""

import torch
from torch import Tensor

from ...kernels.codes import QuantizedWeight
from .changes import ColumnLora
from .latents import LatentAttention
from .loader import Loader
from .stream import Stream

NAME = "self_attn.q_gate_proj"


class GatedLatentAttention(LatentAttention):
    """In the place of `LatentAttention`."""

    def _asking(self, load: Loader) -> tuple[Tensor | QuantizedWeight, ColumnLora | None]:
        """As that of `LatentAttention`; gates of all heads come first."""
        latent, inputs = self.latent, 2 * self.latent.queries
        size = latent.plain + latent.turned
        places = torch.arange(load.shape.heads // load.ranks.size * (size + latent.values)).view(-1, size + latent.values)
        queries, gates = places[:, :size].flatten(), places[:, size:].flatten()
        order = torch.cat((gates, queries[self._order(len(queries), latent.plain)]))
        self.opened = len(gates)  # columns of what queries are made by, the first
        outputs = load.shape.heads * (size + latent.values)
        return load.matrix(NAME, outputs, inputs)[order], load.changed([NAME], [outputs], order=order, inputs=inputs)

    def _made(self, stream: Stream, latents: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As that of `LatentAttention`."""
        assert self.query is not None
        made = self._normalized(latents)
        both = stream.product(torch.cat((made, latents), 1), self.query)
        return both[:, : self.opened], both[:, self.opened :], made
