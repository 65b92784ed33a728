"""A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538): MLPs of which each token goes through a few, as a router chooses.

On a CPU every expert is a pair of products as `linear` lays them out, run for its tokens one expert after the other. On an
accelerator all of them are two launches (`fused_experts`), which ask the host nothing, so that graphs can hold them.
"""

import itertools
from collections.abc import Sequence

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


class Experts:
    """Weights of all experts; `bytes` is what they take in memory."""

    def __init__(self, gate_ups: Sequence[Tensor], downs: Sequence[Tensor], gelu: bool = False) -> None:
        """gate_ups: of each expert [2 * size, hidden], gates first; downs: [hidden, size]; gelu: of gates."""
        self.bytes = sum(weight.nbytes for weight in (*gate_ups, *downs))
        self._gelu = gelu
        self._edges = torch.arange(len(downs) + 1, device=downs[0].device)
        self._stacked = (torch.stack(list(gate_ups)), torch.stack(list(downs))) if triton_for(downs[0]) else None
        both = (gate_ups, downs) if self._stacked is None else ((), ())
        self.gate_ups, self.downs = ([Weight(weight) for weight in weights] for weights in both)

    def __call__(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """What the experts make of x [tokens, hidden], added up by shares, of `route`. A token's result depends on no other."""
        numbers, order = chosen.flatten().sort(stable=True)  # of experts; of pairs of a token and an expert
        starts = torch.searchsorted(numbers, self._edges)
        if self._stacked is None:
            found = self._one_by_one(x, order, starts.tolist(), shares)
        else:
            from .fused_experts import experts

            found = experts(x, order, starts, shares, *self._stacked, self._gelu)
        return found.view(*shares.shape, x.shape[1]).sum(1)

    def _one_by_one(self, x: Tensor, order: Tensor, starts: Sequence[int], shares: Tensor) -> Tensor:
        """[pairs, hidden]."""
        found = x.new_empty(len(order), x.shape[1])
        for expert, (start, end) in enumerate(itertools.pairwise(starts)):
            if end > start:
                pairs = order[start:end]
                inner = gated(self.gate_ups[expert](x[pairs // shares.shape[1]]), self._gelu)
                found[pairs] = (self.downs[expert](inner) * shares.flatten()[pairs, None]).to(x.dtype)
        return found
