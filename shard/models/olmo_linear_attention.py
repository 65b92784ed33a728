"""OLMo Hybrid's linear attention: the gated delta rule with a separate tensor for each projection. Knows where checkpoints have its
tensors."""

import torch
from torch import Tensor

from .linear_attention import NAME, GatedDelta, LinearAttention
from .loader import Loader
from .recurrent_shapes import LinearAttentionShape

EPSILON = 1e-5  # of the gated norm after the recurrence, whatever other norms have


class OlmoGatedDelta(GatedDelta):
    """A layer of OLMo Hybrid's gated delta rule. Its beta may be up to 2, so that the value under a key may change its sign
    (negative eigenvalues of the state transition: Grazzi et al. 2024, arXiv:2411.12537)."""

    def __init__(self, load: Loader, linear: LinearAttentionShape) -> None:
        values, heads = linear.sizes[-1], linear.value_heads
        mixed = load.projection([f"{NAME}.{part}_proj" for part in "qkvg"], [*linear.sizes, values])
        gating = load.projection([f"{NAME}.{part}_proj" for part in "ba"], [heads, heads], unrounded=True)
        LinearAttention.__init__(self, load, linear, NAME, mixed, gating, "o_proj")
        self.epsilon, self.strongest = EPSILON, linear.strongest
        self.taps = _taps(load, linear)
        self.gains = load.source.tensor(f"{load.prefix}{NAME}.o_norm.weight", (linear.value_size,))


def _taps(load: Loader, linear: LinearAttentionShape) -> Tensor:
    """The convolution's weights of this rank's queries, keys and values, which checkpoints have in one tensor or in three.
    transformers 5.24 saves the three as equal parts of their concatenation, whatever the sizes of queries, keys and values are."""
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
    """The sizes of three parts as `torch.chunk` cuts them."""
    return tuple(len(part) for part in torch.empty(total, 0).chunk(3))
