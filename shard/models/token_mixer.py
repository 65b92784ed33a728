"""What all token mixers have in common: attention of each kind, and what may be in its place or beside it."""

from abc import ABC, abstractmethod

from torch import Tensor

from ...kernels.linear import Weight
from ..cache import Cache
from ..step import Step
from .holder import Holder
from .loader import Loader
from .rotary import Places
from .stream import Stream


class TokenMixer(Holder, ABC):
    """The part of a layer in which tokens see others of their sequence, between a projection from the stream and one back to it."""

    inward: Weight
    output: Weight

    def __init__(self, load: Loader) -> None:
        self.index, self.shape, self.window = load.index, load.shape, load.shape.windows[load.index]

    @abstractmethod
    def __call__(self, stream: Stream, norm: Tensor | None, step: Step, places: Places, cache: Cache) -> Tensor:
        """The input of the projection `output`, [tokens, this rank's part of its features]. Writes the tokens' keys and values to
        the cache, or updates recurrent states there.

        norm: gains of the norm before it; places: of the step's tokens.
        """
