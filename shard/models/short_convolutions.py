"""Gated short convolutions in place of attention (LFM2: Liquid AI 2025, arXiv:2511.23404): see `kernels.short_convolution`. Loads
them from checkpoints, and runs them."""

from torch import Tensor

from ...kernels.short_convolution import short_convolution
from ..cache import Cache
from ..step import Step
from .loader import Loader
from .recurrent_shapes import ShortConvolutionShape
from .rotary import Places
from .stream import Stream
from .token_mixer import TokenMixer

NAME = "conv"


class ShortConvolutions(TokenMixer):
    """The short convolution of a layer, of whose channels every rank has some."""

    def __init__(self, load: Loader, convolution: ShortConvolutionShape) -> None:
        super().__init__(load)
        size, biased = convolution.size, convolution.biased
        self.inward = load.columns(f"{NAME}.in_proj", [""] * 3, [size] * 3, biased)
        self.taps = load.parts(f"{NAME}.conv.weight", (size,), (1, convolution.width))[0].squeeze(1)
        self.biases = load.parts(f"{NAME}.conv.bias", (size,))[0] if biased else None
        self.output = load.rows(f"{NAME}.out_proj", size, biased)

    def __call__(self, stream: Stream, norm: Tensor | None, step: Step, places: Places, cache: Cache) -> Tensor:
        """See `TokenMixer`: [tokens, this rank's channels]."""
        assert step.spans is not None
        before, behind, features = stream.through(norm, self.inward).chunk(3, 1)
        return short_convolution(before * features, behind, self.taps, self.biases, step.spans, cache.states[self.index])
