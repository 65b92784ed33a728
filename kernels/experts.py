"""Mixture of experts (Shazeer et al. 2017, arXiv:1701.06538): a router chooses a few MLPs (experts) for each token; their outputs
are summed with the router's weights.

On a CPU every expert is a pair of products as `quantized` lays them out, run for its tokens one expert after the other. On an
accelerator all of them are two grouped-GEMM launches (`fused_experts`, or for quantized weights `packed_experts`), which need no
answer from the host, so that CUDA graphs can hold them.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from . import quantized
from .codes import QuantizedWeight, dequantized
from .dispatch import triton_for
from .linear import Invariance, Weight
from .reference import PLAIN, Activation, lane_invariant

LEAST_SUM = 1e-20


def route(
    logits: Tensor,
    count: int,
    normalized: bool,
    *,
    sigmoid: bool = False,
    correction: Tensor | None = None,
    sets: tuple[int, int, int] = (1, 1, 2),
    factor: float = 1.0,
    near: float = 0.0,
    least: float = LEAST_SUM,
    by_logits: bool = False,
    zeroed: bool = False,
    rooted: bool = False,
) -> tuple[Tensor, Tensor]:
    """Top-k routing: weights ("shares") and indices of the `count` experts of each token: [tokens, count] float32 and int64.

    logits: router logits, [tokens, experts]; normalized: a token's weights sum to `factor`; sigmoid: each score is a sigmoid of its
    own logit, instead of a softmax over all; correction: [experts], a bias that is added for the choice of experts, but not to
    their weights; sets: expert groups: how many there are, how many of them a token may use, and how many of a group's best experts
    rank it (DeepSeek-AI 2024, arXiv:2412.19437); near: tolerance of `_mixed`, which ignores all the other options; least: added to
    the sum that weights are divided by; by_logits: the bias is added to logits, and these decide the choice; zeroed: experts of
    other groups count as 0 in the choice, which precedes lower scores; rooted: each score is the square root of the softplus of its
    own logit (DeepSeek V4).
    """
    if near:
        return _mixed(logits.float(), count, near)
    if triton_for(logits):
        from .fused_routing import route as fused

        return fused(logits, count, normalized, sigmoid, correction, sets, factor, least, by_logits, zeroed, rooted)
    scores = apart(logits, rooted) if sigmoid or rooted else logits.float().softmax(-1)
    judged = logits.float() if by_logits else scores
    judged = judged if correction is None else judged + correction
    chosen = _within(judged, *sets, 0.0 if zeroed else -torch.inf).topk(count).indices
    shares = scores.gather(1, chosen)
    if normalized:
        shares = shares / (shares.sum(-1, keepdim=True) + least)
    return shares * factor if factor != 1 else shares, chosen


def weights_of_chosen(logits: Tensor, chosen: Tensor, factor: float, least: float, rooted: bool) -> Tensor:
    """Normalized weights of experts that were chosen otherwise (hash routing), from independent scores: [tokens, count]
    float32, as from `route`. By torch."""
    shares = apart(logits, rooted).gather(1, chosen)
    return shares * (factor / (shares.sum(-1, keepdim=True) + least))


def apart(logits: Tensor, rooted: bool) -> Tensor:
    """Independent scores of experts, each from its own logit, in float32."""
    return lane_invariant((lambda x: functional.softplus(x).sqrt_()) if rooted else torch.sigmoid, logits.float())


def _mixed(logits: Tensor, count: int, near: float) -> tuple[Tensor, Tensor]:
    """Routing by sparse mixers (Liu et al. 2024, arXiv:2409.12136): one expert after the other, whose weight is by a softmax over
    itself and those still left whose logits differ from its own by no more than the fraction `near`."""
    shares, chosen, left = list[Tensor](), list[Tensor](), logits
    for _ in range(count):
        most, best = left.max(-1, keepdim=True)
        far = (most - logits) / torch.maximum(logits.abs(), most) > near
        shares.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(1, best))
        chosen.append(best)
        left = left.scatter(1, best, -torch.inf)
    return torch.cat(shares, 1), torch.cat(chosen, 1)


def _within(judged: Tensor, sets: int, chosen: int, best: int, others_count: float) -> Tensor:
    """Group-limited routing: `judged`, with `others_count` for all experts outside of the `chosen` groups whose `best` best experts
    have the highest sums."""
    if chosen >= sets:
        return judged
    divided = judged.view(len(judged), sets, judged.shape[1] // sets)
    opened = divided.topk(best).values.sum(-1).topk(chosen).indices
    others = torch.ones_like(divided[:, :, 0], dtype=torch.bool).scatter_(1, opened, False)
    return divided.masked_fill(others.unsqueeze(2), others_count).view(judged.shape)


Biases: TypeAlias = tuple[Tensor, Tensor] | None
Weights: TypeAlias = Sequence[Tensor | QuantizedWeight]
FusedProducts: TypeAlias = Callable[..., Tensor]  # as `fused_experts.experts`, the first four of whose arguments are given per step


class Experts(ABC):
    """All experts of one layer on this rank; `weights` is what holds their parameters."""

    def __init__(self, weights: Sequence[Weight | Tensor], number: int, device: torch.device) -> None:
        self.weights = weights
        self._edges = torch.arange(number + 1, device=device)

    def __call__(self, x: Tensor, shares: Tensor, chosen: Tensor, idle: Tensor | None = None) -> Tensor:
        """The sum of the chosen experts' outputs for x [tokens, hidden], with weights from `route`. A token's result depends on no
        other token.

        idle: [tokens, count], which choices are zero-computation experts, behind these (LongCat): they contribute nothing here.
        """
        if idle is None:
            return self._each(x, shares, chosen).sum(1)
        behind = chosen.masked_fill(idle, len(self._edges) - 1)
        return self._each(x, shares, behind).masked_fill_(idle.unsqueeze(2), 0).sum(1)  # nothing was written there

    def _each(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Weighted outputs of each token's experts: [tokens, count, hidden]."""
        order, starts = self._sorted(chosen)
        return self._products(x, order, starts, shares).view(*shares.shape, x.shape[1])

    def _sorted(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs of a token and an expert sorted by expert, and where each expert's pairs begin, as `_products` takes them."""
        if triton_for(chosen):
            from .fused_routing import PAIRS, sort

            if 0 < chosen.numel() <= PAIRS:
                return sort(chosen, len(self._edges) - 1)
        numbers, order = chosen.flatten().sort(stable=True)  # of experts; of pairs of a token and an expert
        return order, torch.searchsorted(numbers, self._edges)

    @abstractmethod
    def _products(self, x: Tensor, order: Tensor, starts: Tensor, shares: Tensor) -> Tensor:
        """Output of every expert for its tokens, times its weight: [pairs, hidden].

        order: [pairs], sorted by expert, where pair i belongs to token i // (experts of a token); starts: [experts + 1], where each
        expert's pairs begin in `order`.
        """


class LoopedExperts(Experts):
    """Experts on a CPU, one after the other, with products as `quantized` lays them out."""

    def __init__(
        self, gate_ups: Weights, downs: Weights, biases: Biases, gates: Activation, dtype: torch.dtype, exact: Invariance
    ) -> None:
        first, second = biases or (repeat(None), repeat(None))
        self._gate_ups, self._downs = (
            [quantized.lay_out(weight, bias, exact, dtype) for weight, bias in zip(weights, added, strict=False)]
            for weights, added in ((gate_ups, first), (downs, second))
        )
        self._gates = gates
        super().__init__([*self._gate_ups, *self._downs], len(downs), _first(downs).device)

    def _products(self, x: Tensor, order: Tensor, starts: Tensor, shares: Tensor) -> Tensor:
        found = x.new_empty(len(order), x.shape[1])
        for expert, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
            if end > start:
                pairs = order[start:end]
                inner = self._gates(self._gate_ups[expert](x[pairs // shares.shape[1]]))
                found[pairs] = (self._downs[expert](inner) * shares.flatten()[pairs, None]).to(x.dtype)
        return found


class FusedExperts(Experts):
    """Experts in Triton, unquantized (`fused_experts`) or quantized (`packed_experts`)."""

    def __init__(self, products: FusedProducts, held: Sequence[Tensor], number: int) -> None:
        """held: the tensors that `products` reads."""
        self._fused = products
        super().__init__(held, number, held[0].device)

    def _products(self, x: Tensor, order: Tensor, starts: Tensor, shares: Tensor) -> Tensor:
        return self._fused(x, order, starts, shares)


def lay_out(
    gate_ups: Weights,
    downs: Weights,
    dtype: torch.dtype,
    biases: Biases = None,
    gates: Activation = PLAIN,
    exact: Invariance = Invariance.USUAL,
) -> Experts:
    """The experts of a layer, laid out for this machine. gate_ups: of each expert [2 * size, hidden], gates first, or [size,
    hidden] without gates; downs: [hidden, size]; dtype: of rows; biases: of all experts, [experts, 2 * size] and [experts, hidden];
    exact: see `linear`."""
    if not triton_for(_first(downs)):
        return LoopedExperts(gate_ups, downs, biases, gates, dtype, exact)
    held, products = _packed(gate_ups, downs, dtype) or _stacked(gate_ups, downs, dtype)
    products = partial(products, biases=biases, gates=gates, invariant=exact is Invariance.INVARIANT)
    return FusedExperts(products, [*held, *(biases or ())], len(downs))


def _packed(gate_ups: Weights, downs: Weights, dtype: torch.dtype) -> tuple[list[Tensor], FusedProducts] | None:
    """The matrices of experts that are all quantized, as the kernel reads them, and products with these; None if it can't."""
    few = [[weight for weight in weights if isinstance(weight, QuantizedWeight)] for weights in (gate_ups, downs)]
    if not len(few[0]) == len(few[1]) == len(downs):
        return None
    from .packed_experts import experts, pack

    gate_up, down = pack(few[0], dtype), pack(few[1], dtype)
    if gate_up is None or down is None:
        return None
    return [*gate_up.tensors, *down.tensors], partial(experts, gate_up=gate_up, down=down)


def _stacked(gate_ups: Weights, downs: Weights, dtype: torch.dtype) -> tuple[list[Tensor], FusedProducts]:
    """The matrices of all experts, unquantized, and products with these."""
    from .fused_experts import experts

    gate_up, down = (
        torch.stack([dequantized(weight, dtype) if isinstance(weight, QuantizedWeight) else weight for weight in weights])
        for weights in (gate_ups, downs)
    )
    return [gate_up, down], partial(experts, gate_up=gate_up, down=down)


def _first(weights: Weights) -> Tensor:
    return weights[0].codes if isinstance(weights[0], QuantizedWeight) else weights[0]
