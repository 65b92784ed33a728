"""Layers of linear attention, which keep a recurrent state of fixed size per sequence in place of a KV cache: the base class, and
the gated delta rule of Qwen3-Next and Qwen 3.5 (Yang et al. 2024, arXiv:2412.06464): see `kernels.gated_delta`. Knows where
checkpoints have its tensors."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.codes import QuantizedWeight
from ...kernels.gated_delta import gated_delta, gated_norm
from ...kernels.linear import Weight
from ...kernels.spans import RecurrentStates, Spans
from ..cache import Cache
from ..step import Step
from .loader import Loader, Projection
from .recurrent_shapes import LinearAttentionShape
from .rotary import Places
from .stream import Stream
from .token_mixer import TokenMixer

NAME = "linear_attn"


def fuse_projections(load: Loader, inward: Projection, gating: Projection) -> tuple[Weight, Weight | None]:
    """Both projections fused into one product, or as two products where the first is quantized."""
    if isinstance(inward.weight, QuantizedWeight):
        return load.fused(inward), load.fused(gating)
    return load.fused(inward, gating), None


def project_both(stream: Stream, norm: Tensor | None, inward: Weight, gating: Weight | None, outputs: int) -> tuple[Tensor, Tensor]:
    """The outputs of the projections that `fuse_projections` returns. outputs: number of those of the first. Both may be
    columns of a wider tensor."""
    if gating is None:
        joint = stream.through(norm, inward)
        return joint[:, :outputs], joint[:, outputs:]
    x = stream.normalized(norm)
    return stream.product(x, inward), stream.product(x, gating)


class LinearAttention(TokenMixer):
    """A layer of linear attention after a convolution, whose subclasses define the update rule."""

    def __init__(
        self,
        load: Loader,
        linear: LinearAttentionShape,
        name: str,
        inward: Projection,
        gating: Projection,
        output: str = "out_proj",
    ) -> None:
        """name: the module that has its tensors; inward: the projection to the convolution's channels (queries, keys and values)
        and to the output gate; gating: that to the heads' beta and decay, or time steps; output: the output projection's name."""
        super().__init__(load)
        self.epsilon = load.shape.norm_epsilon
        *_, values = linear.sizes
        self.channels, self.size = linear.channels(load.ranks.size), values // load.ranks.size
        self.inward, self.gating = fuse_projections(load, inward, gating)
        self.rates = -load.each_head(f"{name}.A_log", linear.value_heads).exp()
        self.offsets = load.each_head(f"{name}.dt_bias", linear.value_heads)
        self.output = load.rows(f"{name}.{output}", values, bias=False)

    def __call__(self, stream: Stream, norm: Tensor | None, step: Step, places: Places, cache: Cache) -> Tensor:
        """See `TokenMixer`: [tokens, this rank's value heads * value size]."""
        assert step.spans is not None
        joint, gating = project_both(stream, norm, self.inward, self.gating, self.channels + self.size)
        return self.found(joint[:, : self.channels], joint[:, self.channels :], gating, step.spans, cache.states[self.index])

    @abstractmethod
    def found(self, mixed: Tensor, gates: Tensor, gating: Tensor, spans: Spans, states: RecurrentStates) -> Tensor:
        """The recurrence, with gate and norm: the same result. mixed: [tokens, channels], the convolution's input; gates: [tokens,
        value heads * value size], output gates before their activation; gating: [tokens, value heads], time steps, or [tokens, 2 *
        value heads], inputs of beta and decay. All are columns of a wider tensor."""


class GatedDelta(LinearAttention):
    """A layer of linear attention by the gated delta rule, as in Qwen3-Next and Qwen 3.5."""

    strongest = 1.0  # see `gated_delta`
    sigmoid = False  # see `gated_norm`

    def __init__(self, load: Loader, linear: LinearAttentionShape) -> None:
        inward, gating = _by_heads(load, linear) if "in_proj_qkvz" in load.shape.joined else _by_parts(load, linear)
        super().__init__(load, linear, NAME, inward, gating)
        self.taps = torch.cat(load.parts(f"{NAME}.conv1d.weight", linear.sizes, (1, linear.width))).squeeze(1)
        self.gains = load.source.tensor(f"{load.prefix}{NAME}.norm.weight", (linear.value_size,))  # which are not stored minus 1
        self.sigmoid = linear.sigmoid

    def found(self, mixed: Tensor, gates: Tensor, gating: Tensor, spans: Spans, states: RecurrentStates) -> Tensor:
        """See `LinearAttention`."""
        strengths, fades = gating.chunk(2, 1)
        found = gated_delta(mixed, strengths, fades, self.taps, self.rates, self.offsets, spans, states, self.strongest)
        return gated_norm(found, gates.view(found.shape), self.gains, self.epsilon, sigmoid=self.sigmoid).flatten(1)


def _by_parts(load: Loader, linear: LinearAttentionShape) -> tuple[Projection, Projection]:
    """The input projections as Qwen 3.5 stores them: to queries, keys, values and the output gate, and to beta and decay."""
    mixed = load.projection(("", "", ""), linear.sizes, f"{NAME}.in_proj_qkv")
    gates = load.projection((f"{NAME}.in_proj_z",), linear.sizes[-1:])
    gating = (f"{NAME}.in_proj_b", f"{NAME}.in_proj_a"), (linear.value_heads,) * 2
    return load.side_by_side(mixed, gates), load.projection(*gating, unrounded=True)


def _by_heads(load: Loader, linear: LinearAttentionShape) -> tuple[Projection, Projection]:
    """As `_by_parts`, as Qwen3-Next stores them: in two fused tensors, each with one key head's outputs after the other's."""
    heads, times = linear.key_heads, linear.value_heads // linear.key_heads
    each = [linear.key_size] * 2 + [times * linear.value_size] * 2
    order, other = (_apart(heads // load.ranks.size, sizes) for sizes in (each, [times] * 2))
    return (
        load.projection([f"{NAME}.in_proj_qkvz"], [heads * sum(each)], order=order),
        load.projection([f"{NAME}.in_proj_ba"], [2 * times * heads], order=other, unrounded=True),
    )


def _apart(heads: int, sizes: Sequence[int]) -> Tensor:
    """The order that groups rows by part, where they stand head by head. sizes: rows of each part in a head."""
    places = torch.arange(heads * sum(sizes)).view(heads, -1)
    return torch.cat([part.flatten() for part in torch.split(places, list(sizes), 1)])
