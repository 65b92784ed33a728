"""Mamba-2 layers, linear attention by state spaces (Dao and Gu 2024, arXiv:2405.21060): see `kernels.state_space`. Knows where
checkpoints have its tensors."""

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.gated_delta import gated_norm, scaled
from ...kernels.spans import RecurrentStates, Spans
from ...kernels.state_space import state_space
from .linear_attention import LinearAttention
from .loader import Loader
from .recurrent_shapes import StateSpaceShape


class Mamba2(LinearAttention):
    """A Mamba-2 layer. The heads of a group share queries (C) and keys (B); the norm is over all values of a group."""

    def __init__(self, load: Loader, linear: StateSpaceShape) -> None:
        keys, _, values = linear.sizes
        name = linear.home
        sizes, wholes = (values, keys, keys), (1, linear.key_size, linear.key_size)
        every = (values, *sizes, linear.value_heads), (1, *wholes, 1)
        *first, steps = load.projections(f"{name}.in_proj", *every, linear.factors)
        super().__init__(load, linear, name, load.side_by_side(*first[::-1]), steps)  # queries are last in the checkpoint
        self.ranks, self.limits = load.ranks, linear.limits
        self.taps = torch.cat(load.parts(f"{name}.conv1d.weight", sizes, (1, linear.width), wholes)[::-1]).squeeze(1)
        self.biases = torch.cat(load.parts(f"{name}.conv1d.bias", sizes, (), wholes)[::-1])
        self.skips = load.each_head(f"{name}.D", linear.value_heads)
        own = linear.keys(load.ranks.size)
        self.gains = load.part_of_gains(f"{name}.norm", values, 1).view(own, -1) if linear.normal else None
        self.groups, self.features = linear.key_heads, values // linear.key_heads  # groups of all ranks, and features of a group

    def found(self, mixed: Tensor, gates: Tensor, gating: Tensor, spans: Spans, states: RecurrentStates) -> Tensor:
        """See `LinearAttention`."""
        own = self.taps, self.biases, self.rates, self.offsets, self.skips, self.limits
        found = state_space(mixed, gating, *own, spans, states)
        if self.gains is None:
            return functional.silu(gates.float()).mul_(found.flatten(1)).to(found.dtype)
        found = found.view(len(mixed), *self.gains.shape)
        gates = gates.view(found.shape)
        if self.groups < self.ranks.size:
            return self._normal(found, gates, self.gains).flatten(1)
        return gated_norm(found, gates, self.gains, self.epsilon, before=True).flatten(1)

    def _normal(self, found: Tensor, gates: Tensor, gains: Tensor) -> Tensor:
        """The gated norm where several ranks have parts of one group: sums of squares are all-reduced."""
        gated = functional.silu(gates.float()).mul_(found)
        squares, group = gated.new_zeros(len(gated), self.groups, 1), self.ranks.rank * self.groups // self.ranks.size
        squares[:, group] = gated.square().sum(2)
        return scaled(gated, self.ranks.all_reduce(squares)[:, group : group + 1] / self.features, gains, self.epsilon)
