"""MLA with output gates that share the queries' projection, whose input is the query latent after its norm and before it,
concatenated (A.X K2)."""

import torch
from torch import Tensor

from .latents import LatentAttention
from .loader import Loader, Projection
from .stream import Stream

NAME = "self_attn.q_gate_proj"


class GatedLatentAttention(LatentAttention):
    """`LatentAttention` with output gates computed along with the queries."""

    def _asking(self, load: Loader) -> Projection:
        """See `LatentAttention`; the gates of all heads come first among the outputs."""
        latent, inputs = self.latent, 2 * self.latent.queries
        size = latent.plain + latent.turned
        places = torch.arange(load.shape.heads // load.ranks.size * (size + latent.values)).view(-1, size + latent.values)
        queries, gates = places[:, :size].flatten(), places[:, size:].flatten()
        order = torch.cat((gates, queries[self._order(len(queries), latent.plain)]))
        self.opened = len(gates)  # number of columns of the query projection that are gates, the first ones
        outputs = load.shape.heads * (size + latent.values)
        return load.projection([NAME], [outputs], order=order, inputs=inputs)

    def _made(self, stream: Stream, latents: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `LatentAttention`."""
        assert self.query is not None
        made = self._normalized(latents)
        both = stream.product(torch.cat((made, latents), 1), self.query)
        return both[:, : self.opened], both[:, self.opened :], made
