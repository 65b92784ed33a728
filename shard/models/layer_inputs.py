"""Per-layer embeddings (Gemma 3n and 4): an extra input of each token for each layer, beside the residual stream.

It is the sum of a row of a table, by the token's id, and a projection of its embedding. After its MLP a layer multiplies it by a
gate, computed from the stream, and adds a projection of the product to the stream. Every rank has a part of each layer's features.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.operations import rms_norm
from ...kernels.reference import lane_invariant
from .holder import Holder
from .loader import Loader
from .stream import Stream
from .traits import PerLayerShape


class PerLayerEmbedding(Holder):
    """The table and projection of all layers' inputs."""

    def __init__(self, load: Loader, inputs: PerLayerShape) -> None:
        """load: for tensors beside the layers."""
        shape = load.shape
        self._size, self._own = inputs.size, slice(*load.own(inputs.size))
        self._padding, self._epsilon = inputs.padding, shape.norm_epsilon
        self._lacking = inputs.vocabulary < shape.vocabulary
        self._of_embedding = shape.hidden**-0.5
        self.rows = load.features("embed_tokens_per_layer", inputs.vocabulary, shape.layers, inputs.size)
        self.matrix = load.whole("per_layer_model_projection", shape.layers * inputs.size)
        self.norm = load.gains("per_layer_projection_norm", inputs.size)
        # Rounded to the weights' type, as in training.
        self._of_token = torch.tensor(inputs.size**0.5, dtype=self.rows.dtype).item()

    def __call__(self, tokens: Tensor, embedded: Tensor, shown: Tensor | None) -> Tensor:
        """[layers, tokens, this rank's features]. tokens: [tokens] ids; embedded: [tokens, hidden], with image features for image
        tokens; shown: which tokens are image tokens."""
        if shown is not None:
            tokens = tokens.index_fill(0, shown, self._padding)
        if self._lacking:
            tokens = tokens.masked_fill(tokens >= len(self.rows), 0)
        per_layer = (
            functional.embedding(tokens, self.rows).mul_(self._of_token).view(len(tokens), -1, self._own.stop - self._own.start)
        )
        made = self.matrix(embedded).mul_(self._of_embedding).view(-1, self._size)
        made = rms_norm(made, self.norm, self._epsilon).view(len(tokens), -1, self._size)[:, :, self._own]
        return per_layer.add_(made).mul_(2**-0.5).transpose(0, 1)


class PerLayerInput(Holder):
    """The gate and projection of one layer."""

    def __init__(self, load: Loader, inputs: PerLayerShape) -> None:
        self.gate = load.columns("", ["per_layer_input_gate"], [inputs.size], False)
        self.output = load.rows("per_layer_projection", inputs.size, False)
        self.norm = load.gains("post_per_layer_input_norm", load.shape.hidden)

    def __call__(self, stream: Stream, per_layer: Tensor) -> None:
        """Adds the projection of the gated input `per_layer`, [tokens, this rank's features], to the stream."""
        gates = lane_invariant(partial(functional.gelu, approximate="tanh"), stream.through(None, self.gate))
        stream.add(gates * per_layer, self.output, self.norm)
