"""Captures a target model's hidden states as features for a draft model (EAGLE-3, MTP, Medusa, MLP speculator)."""

from dataclasses import dataclass

from torch import Tensor

from ...kernels.linear import Weight
from ..cache import Cache
from ..step import Step


@dataclass(frozen=True, slots=True)
class Taps:
    """Where hidden states are captured, on all ranks; only the rank that drafts has a cache for them."""

    layers: tuple[int, ...]  # layers whose inputs are captured, concatenated; (): the output of the last norm
    # Projection [features, concatenated inputs]; None: features are stored as they are, or another rank stores them.
    fuse: Weight | None = None

    @property
    def last(self) -> bool:
        """Whether all tokens must go through all layers."""
        return not self.layers

    def keep(self, found: Tensor, step: Step, cache: Cache) -> None:
        """Stores features in the slots of the tokens' keys. found: hidden states of the step's tokens, [tokens, ...]; padding
        writes zeros to the padding slot."""
        if cache.features is None:
            return
        features = self.fuse(found) if self.fuse is not None else found
        padding = (step.slots < 0).unsqueeze(1)
        cache.features.index_copy_(0, step.slots.clamp(min=0), features.masked_fill(padding, 0))
