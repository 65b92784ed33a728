"""The same by memories of fixed size, in which each token puts its value under its key: linear attention by the gated delta rule
(Yang et al. 2024, arXiv:2412.06464): see `kernels.gated_delta`. Knows where checkpoints have its tensors."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.codes import Codes
from ...kernels.gated_delta import Spans, States, gated_delta, gated_norm
from ...kernels.linear import Weight
from ..step import Step
from .loader import Loader
from .remembering import Linear
from .stream import Stream

NAME = "linear_attn"


class Remembered(ABC):
    """In the place of `Heads`, with states of sequences instead of keys that are cached."""

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


class Memories(Remembered):
    """By what rule, its kinds say."""

    def __init__(self, load: Loader, linear: Linear, name: str, inward: Tensor | Codes, gating: Tensor) -> None:
        """name: of what has its tensors; inward: to the convolution's channels, queries, keys and values, and to what gates the
        result; gating: to what else heads go by."""
        self.epsilon = load.shape.norm_epsilon
        *_, values = linear.sizes
        self.channels, self.size = linear.channels(load.ranks.size), values // load.ranks.size
        self.gating = None if isinstance(inward, Tensor) else load.laid_out(gating, None)  # apart where the others have few bits
        self.inward = load.laid_out(torch.cat((inward, gating)) if isinstance(inward, Tensor) else inward, None)
        self.rates = -load.each_head(f"{name}.A_log", linear.value_heads).exp()
        self.offsets = load.each_head(f"{name}.dt_bias", linear.value_heads)
        self.output = load.rows(f"{name}.out_proj", values, bias=False)

    def __call__(self, stream: Stream, norm: Tensor | None, step: Step, states: States) -> Tensor:
        """As that of `Remembered`: [tokens, this rank's value heads * value size]."""
        assert step.spans is not None
        if self.gating is None:
            joint = stream.through(norm, self.inward)
            gating = joint[:, self.channels + self.size :]
        else:
            x = stream.normalized(norm)
            joint, gating = stream.product(x, self.inward), stream.product(x, self.gating)
        mixed, gates = joint[:, : self.channels], joint[:, self.channels : self.channels + self.size]
        return self.found(mixed, gates, gating, step.spans, states)

    @abstractmethod
    def found(self, mixed: Tensor, gates: Tensor, gating: Tensor, spans: Spans, states: States) -> Tensor:
        """The same. mixed: [tokens, channels], gates: [tokens, value heads * value size], of which the result is to go through
        silu; gating: [tokens, value heads], or twice as many. All are columns of something wider."""


class DeltaRule(Memories):
    """The gated delta rule."""

    def __init__(self, load: Loader, linear: Linear) -> None:
        inward, gating = _by_heads(load, linear) if "in_proj_qkvz" in load.shape.joined else _by_parts(load, linear)
        super().__init__(load, linear, NAME, inward, gating)
        self.taps = torch.cat(load.parts(f"{NAME}.conv1d.weight", linear.sizes, (1, linear.width))).squeeze(1)
        self.gains = load.source.tensor(f"{load.prefix}{NAME}.norm.weight", (linear.value_size,))  # which are not less 1

    def found(self, mixed: Tensor, gates: Tensor, gating: Tensor, spans: Spans, states: States) -> Tensor:
        """As that of `Memories`."""
        strengths, fades = gating.chunk(2, 1)
        found = gated_delta(mixed, strengths, fades, self.taps, self.rates, self.offsets, spans, states)
        return gated_norm(found, gates.view(found.shape), self.gains, self.epsilon).flatten(1)


def _by_parts(load: Loader, linear: Linear) -> tuple[Tensor | Codes, Tensor]:
    """As Qwen 3.5 has them: to queries, keys, values and what gates the result, and to strengths and fades."""
    heads = linear.value_heads
    mixed = load.outwards(("", "", ""), linear.sizes, f"{NAME}.in_proj_qkv")
    gates = load.outwards((f"{NAME}.in_proj_z",), linear.sizes[-1:])
    return load.joined((mixed, gates)), load.unrounded((f"{NAME}.in_proj_b", f"{NAME}.in_proj_a"), (heads, heads))


def _by_heads(load: Loader, linear: Linear) -> tuple[Tensor | Codes, Tensor]:
    """The same as Qwen3-Next has them: in one tensor, each key head's one after the other, and in another."""
    heads, times = linear.key_heads, linear.value_heads // linear.key_heads
    each = [linear.key_size] * 2 + [times * linear.value_size] * 2
    inward = load.outwards((f"{NAME}.in_proj_qkvz",), (heads * sum(each),))
    gating = load.unrounded((f"{NAME}.in_proj_ba",), (2 * times * heads,))
    own = heads // load.ranks.size
    return inward[_apart(own, each)], gating[_apart(own, [times] * 2)]


def _apart(heads: int, sizes: Sequence[int]) -> Tensor:
    """Where rows are, part by part, that stand head by head, of each head so many of every part."""
    places = torch.arange(heads * sum(sizes)).view(heads, -1)
    return torch.cat([part.flatten() for part in torch.split(places, list(sizes), 1)])
