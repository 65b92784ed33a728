"""The same by memories of fixed size, in which each token puts its value under its key: linear attention by the gated delta rule
(Yang et al. 2024, arXiv:2412.06464): see `kernels.gated_delta`. Knows where checkpoints have its tensors."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.codes import QuantizedWeight
from ...kernels.gated_delta import gated_delta, gated_norm
from ...kernels.linear import Weight
from ...kernels.spans import Spans, States
from ..step import Step
from .changes import ColumnLora, side_by_side
from .loader import Loader
from .remembering import LinearAttentionShape
from .stream import Stream

NAME = "linear_attn"


class RecurrentAttention(ABC):
    """In the place of `HeadAttention`, with states of sequences instead of keys that are cached."""

    inward: Weight
    output: Weight

    @property
    def parts(self) -> tuple[object, ...]:
        """What has weights."""
        return (self,)

    @abstractmethod
    def __call__(self, stream: Stream, norm: Tensor | None, step: Step, states: States) -> Tensor:
        """What `output` is to be multiplied with, [tokens, this rank's part of them]. Sequences' states go on.

        norm: gains of the one before.
        """


# What leads away from the stream by a product, and how adapters change that.
Led = tuple[Tensor | QuantizedWeight, ColumnLora | None]


def together(load: Loader, inward: Led, gating: Led) -> tuple[Weight, Weight | None]:
    """One product for both, or two where the first has few bits, and the second all."""
    (first, change), (second, other) = inward, gating
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return load.laid_out(first, None, change), load.laid_out(second, None, other)
    return load.laid_out(torch.cat((first, second)), None, side_by_side(change, other)), None


def products(stream: Stream, norm: Tensor | None, inward: Weight, gating: Weight | None, outputs: int) -> tuple[Tensor, Tensor]:
    """Of what `together` has made; outputs: of the first. Both may be columns of something wider."""
    if gating is None:
        joint = stream.through(norm, inward)
        return joint[:, :outputs], joint[:, outputs:]
    x = stream.normalized(norm)
    return stream.product(x, inward), stream.product(x, gating)


class LinearAttention(RecurrentAttention):
    """By what rule, its kinds say."""

    def __init__(
        self, load: Loader, linear: LinearAttentionShape, name: str, inward: Led, gating: Led, output: str = "out_proj"
    ) -> None:
        """name: of what has its tensors; inward: to the convolution's channels, queries, keys and values, and to what gates the
        result; gating: to what else heads go by; output: what leads back."""
        self.epsilon = load.shape.norm_epsilon
        *_, values = linear.sizes
        self.channels, self.size = linear.channels(load.ranks.size), values // load.ranks.size
        self.inward, self.gating = together(load, inward, gating)
        self.rates = -load.each_head(f"{name}.A_log", linear.value_heads).exp()
        self.offsets = load.each_head(f"{name}.dt_bias", linear.value_heads)
        self.output = load.rows(f"{name}.{output}", values, bias=False)

    def __call__(self, stream: Stream, norm: Tensor | None, step: Step, states: States) -> Tensor:
        """As that of `RecurrentAttention`: [tokens, this rank's value heads * value size]."""
        assert step.spans is not None
        joint, gating = products(stream, norm, self.inward, self.gating, self.channels + self.size)
        return self.found(joint[:, : self.channels], joint[:, self.channels :], gating, step.spans, states)

    @abstractmethod
    def found(self, mixed: Tensor, gates: Tensor, gating: Tensor, spans: Spans, states: States) -> Tensor:
        """The same. mixed: [tokens, channels], gates: [tokens, value heads * value size], of which the result is to go through
        silu; gating: [tokens, value heads], or twice as many. All are columns of something wider."""


class DeltaRule(LinearAttention):
    """The gated delta rule."""

    strongest = 1.0  # see `gated_delta`
    sigmoid = False  # see `gated_norm`

    def __init__(self, load: Loader, linear: LinearAttentionShape) -> None:
        inward, gating = _by_heads(load, linear) if "in_proj_qkvz" in load.shape.joined else _by_parts(load, linear)
        super().__init__(load, linear, NAME, inward, gating)
        self.taps = torch.cat(load.parts(f"{NAME}.conv1d.weight", linear.sizes, (1, linear.width))).squeeze(1)
        self.gains = load.source.tensor(f"{load.prefix}{NAME}.norm.weight", (linear.value_size,))  # which are not less 1
        self.sigmoid = linear.sigmoid

    def found(self, mixed: Tensor, gates: Tensor, gating: Tensor, spans: Spans, states: States) -> Tensor:
        """As that of `LinearAttention`."""
        strengths, fades = gating.chunk(2, 1)
        found = gated_delta(mixed, strengths, fades, self.taps, self.rates, self.offsets, spans, states, self.strongest)
        return gated_norm(found, gates.view(found.shape), self.gains, self.epsilon, sigmoid=self.sigmoid).flatten(1)


def _by_parts(load: Loader, linear: LinearAttentionShape) -> tuple[Led, Led]:
    """As Qwen 3.5 has them: to queries, keys, values and what gates the result, and to strengths and fades."""
    mixed = ("", "", ""), linear.sizes, f"{NAME}.in_proj_qkv"
    gates = (f"{NAME}.in_proj_z",), linear.sizes[-1:]
    gating = (f"{NAME}.in_proj_b", f"{NAME}.in_proj_a"), (linear.value_heads,) * 2
    inward = load.joined((load.outwards(*mixed), load.outwards(*gates)))
    change = side_by_side(load.changed(*mixed), load.changed(*gates))
    return (inward, change), (load.unrounded(*gating), load.changed(*gating))


def _by_heads(load: Loader, linear: LinearAttentionShape) -> tuple[Led, Led]:
    """The same as Qwen3-Next has them: in one tensor, each key head's one after the other, and in another."""
    heads, times = linear.key_heads, linear.value_heads // linear.key_heads
    each = [linear.key_size] * 2 + [times * linear.value_size] * 2
    inward = (f"{NAME}.in_proj_qkvz",), (heads * sum(each),)
    gating = (f"{NAME}.in_proj_ba",), (2 * times * heads,)
    order, other = (_apart(heads // load.ranks.size, sizes) for sizes in (each, [times] * 2))
    return (
        (load.outwards(*inward)[order], load.changed(*inward, order=order)),
        (load.unrounded(*gating)[other], load.changed(*gating, order=other)),
    )


def _apart(heads: int, sizes: Sequence[int]) -> Tensor:
    """Where rows are, part by part, that stand head by head, of each head so many of every part."""
    places = torch.arange(heads * sum(sizes)).view(heads, -1)
    return torch.cat([part.flatten() for part in torch.split(places, list(sizes), 1)])
