"""What each layer is told of a token apart, beside what the stream has of it (per-layer embeddings, as in Gemma 3n and 4).

What is told is the sum of a row of a table, by the token's number, and of what a matrix makes of its embedding. Behind its MLP a
layer gates that by what the stream has come to, and adds what another matrix makes of it. Every rank has a part of the features of
each layer.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.operations import rms_norm
from ...kernels.reference import by_lanes
from .loader import Loader
from .stream import Stream
from .traits import LayerInputs


class LayerInputTable:
    """Of all layers."""

    def __init__(self, load: Loader, inputs: LayerInputs) -> None:
        """load: of what is beside the layers."""
        shape = load.shape
        self._size, self._own = inputs.size, slice(*load.own(inputs.size))
        self._padding, self._epsilon = inputs.padding, shape.norm_epsilon
        self._lacking = inputs.vocabulary < shape.vocabulary
        self._of_embedding = shape.hidden**-0.5
        self.rows = load.features("embed_tokens_per_layer", inputs.vocabulary, shape.layers, inputs.size)
        self.matrix = load.whole("per_layer_model_projection", shape.layers * inputs.size)
        self.norm = load.gains("per_layer_projection_norm", inputs.size)
        # In the type of the weights, as they were trained.
        self._of_token = torch.tensor(inputs.size**0.5, dtype=self.rows.dtype).item()

    def __call__(self, tokens: Tensor, embedded: Tensor, shown: Tensor | None) -> Tensor:
        """[layers, tokens, this rank's features]. tokens: [tokens]; embedded: [tokens, hidden], for images what stands for that;
        shown: which of the tokens are images'."""
        if shown is not None:
            tokens = tokens.index_fill(0, shown, self._padding)
        if self._lacking:
            tokens = tokens.masked_fill(tokens >= len(self.rows), 0)
        told = functional.embedding(tokens, self.rows).mul_(self._of_token).view(len(tokens), -1, self._own.stop - self._own.start)
        made = self.matrix(embedded).mul_(self._of_embedding).view(-1, self._size)
        made = rms_norm(made, self.norm, self._epsilon).view(len(tokens), -1, self._size)[:, :, self._own]
        return told.add_(made).mul_(2**-0.5).transpose(0, 1)


class LayerInput:
    """A layer's part."""

    def __init__(self, load: Loader, inputs: LayerInputs) -> None:
        self.gate = load.columns("", ["per_layer_input_gate"], [inputs.size], False)
        self.output = load.rows("per_layer_projection", inputs.size, False)
        self.norm = load.gains("post_per_layer_input_norm", load.shape.hidden)

    def __call__(self, stream: Stream, told: Tensor) -> None:
        """Adds to the stream what it makes of it and of what is told, [tokens, this rank's features]."""
        gates = by_lanes(partial(functional.gelu, approximate="tanh"), stream.through(None, self.gate))
        stream.add(gates * told, self.output, self.norm)
