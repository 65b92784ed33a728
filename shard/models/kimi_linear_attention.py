"""Kimi Delta Attention: linear attention by the gated delta rule with a decay for each feature of a key (Kimi Team 2025,
arXiv:2510.26692). Knows where checkpoints have its tensors."""

import torch
from torch import Tensor

from ...kernels.gated_delta import gated_delta, gated_norm
from ..cache import Cache
from ..step import Step
from .linear_attention import fuse_projections, project_both
from .loader import Loader
from .recurrent_shapes import KimiDeltaShape
from .rotary import Places
from .stream import Stream
from .token_mixer import TokenMixer

NAME = "self_attn"


class KimiDeltaAttention(TokenMixer):
    """A layer of Kimi Delta Attention. Decays and output gates have low-rank projections; every rank has the down-projections
    whole."""

    def __init__(self, load: Loader, linear: KimiDeltaShape) -> None:
        super().__init__(load)
        heads, few = linear.value_heads, linear.value_size
        self.epsilon = load.shape.norm_epsilon
        self.few, self.channels, self.bound = few, linear.channels(load.ranks.size), linear.bound
        mixed = load.projection([f"{NAME}.{part}_proj" for part in "qkv"], linear.sizes)
        making = [f"{NAME}.{part}_proj" for part in ("f_a", "g_a", "b")]
        gating = load.projection(making, [few, few, heads], wholes=(few, few, 1), unrounded=True)
        self.inward, self.gating = fuse_projections(load, mixed, gating)
        self.fades, self.gates = (
            load.fused(load.projection([f"{NAME}.{part}_b_proj"], linear.sizes[-1:], inputs=few, unrounded=True)) for part in "fg"
        )
        self.rates = -load.each_head(f"{NAME}.A_log", heads, within=2).exp()
        self.offsets = load.each_head(f"{NAME}.dt_bias", linear.sizes[-1])
        parts = zip("qkv", linear.sizes, strict=True)
        taps = [load.parts(f"{NAME}.{part}_conv1d.weight", [size], (1, linear.width)) for part, size in parts]
        self.taps = torch.cat([part for [part] in taps]).squeeze(1)
        self.gains = load.source.tensor(f"{load.prefix}{NAME}.o_norm.weight", (few,))
        self.output = load.rows(f"{NAME}.o_proj", linear.sizes[-1], bias=False)

    def __call__(self, stream: Stream, norm: Tensor | None, step: Step, places: Places, cache: Cache) -> Tensor:
        """See `TokenMixer`: [tokens, this rank's heads * value size]."""
        assert step.spans is not None
        mixed, gating = project_both(stream, norm, self.inward, self.gating, self.channels)
        fading, opening, strengths = gating.split_with_sizes((self.few, self.few, gating.shape[1] - 2 * self.few), 1)
        fades, gates = stream.product(fading.contiguous(), self.fades), stream.product(opening.contiguous(), self.gates)
        by = self.taps, self.rates, self.offsets, step.spans, cache.states[self.index]
        found = gated_delta(mixed, strengths, fades, *by, bound=self.bound)
        return gated_norm(found, gates.view(found.shape), self.gains, self.epsilon, sigmoid=True).flatten(1)
