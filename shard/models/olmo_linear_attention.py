"""Linear attention as `linear_attention` has it, of matrices that are all apart: OLMo Hybrid's. Knows where checkpoints have
its tensors."""

import torch
from torch import Tensor

from .linear_attention import NAME, DeltaRule, LinearAttention
from .loader import Loader
from .remembering import LinearAttentionShape

EPSILON = 1e-5  # of the norm behind it, whatever other norms have


class OlmoDelta(DeltaRule):
    """The gated delta rule, whose gates may take out twice what is under a key, so that what was there comes back with its sign
    turned (Grazzi et al. 2024, arXiv:2411.12537)."""

    def __init__(self, load: Loader, linear: LinearAttentionShape) -> None:
        values, heads = linear.sizes[-1], linear.value_heads
        mixed = [f"{NAME}.{part}_proj" for part in "qkvg"], [*linear.sizes, values]
        gating = [f"{NAME}.{part}_proj" for part in "ba"], [heads, heads]
        inward = load.outwards(*mixed), load.changed(*mixed)
        LinearAttention.__init__(self, load, linear, NAME, inward, (load.unrounded(*gating), load.changed(*gating)), "o_proj")
        self.epsilon, self.strongest = EPSILON, linear.strongest
        self.taps = _taps(load, linear)
        self.gains = load.source.tensor(f"{load.prefix}{NAME}.o_norm.weight", (linear.value_size,))


def _taps(load: Loader, linear: LinearAttentionShape) -> Tensor:
    """Of this rank's queries, keys and values, which are of three tensors, or of one. As transformers 5.24 saves them, the three
    are cut into equal parts, whatever their sizes are."""
    joint, names = f"{NAME}.conv1d.weight", [f"{NAME}.{part}_conv1d.weight" for part in "qkv"]
    more = 1, linear.width
    if load.source.has(load.prefix + joint):
        return torch.cat(load.parts(joint, linear.sizes, more)).squeeze(1)
    alike = _cut_alike(sum(linear.sizes))
    if tuple(linear.sizes) != alike and load.source.has(load.prefix + names[0], (alike[0], *more)):
        stored = [load.source.tensor(load.prefix + name, (size, *more)) for name, size in zip(names, alike, strict=True)]
        parts = torch.split(torch.cat(stored), list(linear.sizes))
        return torch.cat([part[slice(*load.own(len(part)))] for part in parts]).squeeze(1)
    found = (load.parts(name, [size], more) for name, size in zip(names, linear.sizes, strict=True))
    return torch.cat([part for [part] in found]).squeeze(1)


def _cut_alike(total: int) -> tuple[int, ...]:
    """As `torch.chunk` cuts into three."""
    return tuple(len(part) for part in torch.empty(total, 0).chunk(3))
