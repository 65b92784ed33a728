"""What a model makes of tokens, kept for a draft model that goes by it."""

from dataclasses import dataclass

from torch import Tensor

from ...kernels.linear import Weight
from ..cache import Cache
from ..step import Step


@dataclass(frozen=True, slots=True)
class Taps:
    """Where the model is listened to, on all ranks; only the one that guesses has a cache for it."""

    layers: tuple[int, ...]  # what enters these, side by side; (): what the last norm gives
    fuse: Weight | None = None  # [features, what that is together]; None: it is kept as it is, or another rank keeps it

    @property
    def last(self) -> bool:
        """Whether all tokens are to go through all layers."""
        return not self.layers

    def keep(self, found: Tensor, step: Step, cache: Cache) -> None:
        """found: of the step's tokens, [tokens, ...]. Written where their keys are; padding gives zeros to padding."""
        if cache.features is None:
            return
        features = self.fuse(found) if self.fuse is not None else found
        padding = (step.slots < 0).unsqueeze(1)
        cache.features.index_copy_(0, step.slots.clamp(min=0), features.masked_fill(padding, 0))
