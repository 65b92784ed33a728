"""A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538): MLPs of which each token goes through a few, as a router chooses.

On a CPU every expert is a pair of products as `linear` lays them out, run for its tokens one expert after the other. On an
accelerator all of them are two launches (`fused_experts`), which ask the host nothing, so that graphs can hold them.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TypeAlias

import torch
from torch import Tensor

from .choose import triton_for
from .linear import Weight
from .reference import gated


def route(logits: Tensor, count: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """Shares and numbers of the `count` experts that each token goes through: [tokens, count] float32 and int64.

    logits: [tokens, experts]; normalized: a token's shares add up to 1.
    """
    shares, chosen = logits.float().softmax(-1).topk(count)
    return shares / shares.sum(-1, keepdim=True) if normalized else shares, chosen


@dataclass(frozen=True, slots=True)
class Gates:
    """What `reference.gated` is to do."""

    gelu: bool = False
    limit: float = 0.0


PLAIN = Gates()
Biases: TypeAlias = tuple[Tensor, Tensor] | None


class Experts(ABC):
    """All of them; `weights` is what they are kept in."""

    def __init__(self, weights: Sequence[Weight | Tensor], number: int, device: torch.device, gates: Gates) -> None:
        self.weights = weights
        self._edges = torch.arange(number + 1, device=device)
        self._gates = gates

    def __call__(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """What the experts make of x [tokens, hidden], added up by shares, of `route`. A token's result depends on no other."""
        numbers, order = chosen.flatten().sort(stable=True)  # of experts; of pairs of a token and an expert
        starts = torch.searchsorted(numbers, self._edges)
        return self._products(x, order, starts, shares).view(*shares.shape, x.shape[1]).sum(1)

    @abstractmethod
    def _products(self, x: Tensor, order: Tensor, starts: Tensor, shares: Tensor) -> Tensor:
        """What each expert makes of its tokens, times its share: [pairs, hidden].

        order: [pairs], sorted by expert, of which pair i is token i // pairs of a token; starts: [experts + 1], where each expert's
        begin there.
        """


class OneByOne(Experts):
    """By products as `linear` lays them out."""

    def __init__(self, gate_ups: Sequence[Tensor], downs: Sequence[Tensor], biases: Biases, gates: Gates) -> None:
        first, second = biases or (repeat(None), repeat(None))
        self._gate_ups = [Weight(weight, bias) for weight, bias in zip(gate_ups, first, strict=False)]
        self._downs = [Weight(weight, bias) for weight, bias in zip(downs, second, strict=False)]
        super().__init__([*self._gate_ups, *self._downs], len(downs), downs[0].device, gates)

    def _products(self, x: Tensor, order: Tensor, starts: Tensor, shares: Tensor) -> Tensor:
        found = x.new_empty(len(order), x.shape[1])
        for expert, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
            if end > start:
                pairs = order[start:end]
                inner = gated(self._gate_ups[expert](x[pairs // shares.shape[1]]), self._gates.gelu, self._gates.limit)
                found[pairs] = (self._downs[expert](inner) * shares.flatten()[pairs, None]).to(x.dtype)
        return found


class Together(Experts):
    """By Triton."""

    def __init__(self, gate_ups: Sequence[Tensor], downs: Sequence[Tensor], biases: Biases, gates: Gates) -> None:
        self._gate_up, self._down = torch.stack(list(gate_ups)), torch.stack(list(downs))
        self._biases = biases
        super().__init__([self._gate_up, self._down, *(biases or ())], len(downs), self._down.device, gates)

    def _products(self, x: Tensor, order: Tensor, starts: Tensor, shares: Tensor) -> Tensor:
        from .fused_experts import experts

        return experts(x, order, starts, shares, self._gate_up, self._down, self._biases, self._gates.gelu, self._gates.limit)


def lay_out(gate_ups: Sequence[Tensor], downs: Sequence[Tensor], biases: Biases = None, gates: Gates = PLAIN) -> Experts:
    """gate_ups: of each expert [2 * size, hidden], gates first; downs: [hidden, size]; biases: of all experts, [experts, 2 * size]
    and [experts, hidden]."""
    return (Together if triton_for(downs[0]) else OneByOne)(gate_ups, downs, biases, gates)
