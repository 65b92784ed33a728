"""The residual stream of a step's tokens, with its norms and additions fused."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.adapters import RowAdapters
from ...kernels.linear import Weight
from ...kernels.operations import add_rms_norm, gated, layer_norm, rms_norm
from ...kernels.reference import Activation
from ..parallel import Ranks


def of_rows(x: Tensor, rows: Tensor) -> Tensor:
    """These rows of x; x itself if it has but one, which costs no launch."""
    return x if len(x) == len(rows) == 1 else x.index_select(0, rows)


class Stream:
    """The residual stream of some tokens: the sums so far, and an addition still pending, which is done together with the next
    norm.

    Few rows on an accelerator take fewer kernel launches (`fused_skinny_gemm`): a product includes SwiGLU, and for a single row the
    norm before it, and its result is added at once, or as split-K parts by the next norm. With several ranks products must be
    all-reduced first: the addition is then fused with the next norm.
    """

    def __init__(self, sums: Tensor, ranks: Ranks, epsilon: float, gelu: bool = False, chosen: RowAdapters | None = None) -> None:
        """sums: [tokens, hidden], owned by the stream from now on; gelu: of gates; chosen: LoRA adapters by row, if any token uses
        one.

        Gains of norms are [hidden] for RMS norms, and [2, hidden] with their biases for layer norms.
        """
        self._sums = sums
        self._more: Tensor | None = None  # [tokens, hidden], or parts of that, [parts, tokens, hidden] float32
        self._ranks = ranks
        self._epsilon = epsilon
        self._gates = Activation(gelu)
        self._chosen = chosen

    def normalized(self, gains: Tensor | None) -> Tensor:
        """The norm of the sums, [tokens, hidden], not to be overwritten; without gains the sums themselves."""
        more, self._more = self._more, None
        if more is not None and gains is not None and gains.dim() == 1:
            return add_rms_norm(more, self._sums, gains, self._epsilon)
        if more is not None:
            self._sums.add_(more if more.dim() == 2 else more.sum(0))
        return self._sums if gains is None else self._norm(self._sums, gains)

    def through(self, gains: Tensor | None, weight: Weight, gates: bool = False) -> Tensor:
        """The product of the `normalized` stream with `weight`; gates: followed by the gated activation."""
        few = weight.streams(self._sums) and not self._adapted(weight)
        if few and self._more is None and (gains is None or gains.dim() == 1):
            return weight.streamed(self._sums, gains=gains, epsilon=self._epsilon, gated=gates, gelu=self._gates.gelu)
        x = self.normalized(gains)
        if few and gates:
            return weight.streamed(x, gated=True, gelu=self._gates.gelu)
        return self.apart(x, weight, gates)

    def apart(self, x: Tensor, weight: Weight, gates: bool) -> Tensor:
        """The same for x, which is normalized already."""
        found = self.product(x, weight)
        return gated(found, self._gates) if gates else found

    def add(self, x: Tensor, weight: Weight, gains: Tensor | None = None) -> None:
        """Adds the product of x with `weight`, all-reduced over the ranks' parts, or its norm."""
        if gains is None and self._ranks.size == 1 and weight.streams(x) and not self._adapted(weight):
            assert self._more is None
            self._more = weight.add(x, self._sums)
        else:
            self.add_part(self.product(x, weight), gains)

    def add_part(self, x: Tensor, gains: Tensor | None = None) -> None:
        """Adds x, all-reduced over the ranks' parts, or its norm."""
        assert self._more is None
        whole = self._ranks.all_reduce(x)
        self._more = whole if gains is None else self._norm(whole, gains)

    def add_each(self, parts: Sequence[Tensor], gains: Sequence[Tensor], last: Tensor | None) -> None:
        """Adds the sum of the norms of these, each all-reduced over the ranks' parts, or the norm `last` of that sum."""
        wholes = self._ranks.all_reduce(torch.stack([*parts]))
        found = sum(self._norm(whole, own) for whole, own in zip(wholes, gains, strict=True))
        assert isinstance(found, Tensor)
        self._more = found if last is None else self._norm(found, last)

    def add_whole(self, x: Tensor) -> None:
        """Adds x, which every rank has whole."""
        self.normalized(None).add_(x)

    def scale(self, factor: float) -> None:
        """Multiplies the stream."""
        self.normalized(None).mul_(factor)

    def replace(self, rows: Tensor, sums: Tensor) -> None:
        """Replaces the sums of these rows, to which nothing was added yet."""
        self._sums.index_copy_(0, rows, sums)

    def put(self, rows: Tensor, x: Tensor) -> None:
        """Adds x to these rows, which every rank has whole."""
        self.normalized(None).index_add_(0, rows, x)

    def select(self, rows: Tensor) -> None:
        """Keeps these rows alone."""
        self._sums = of_rows(self.normalized(None), rows)
        self._chosen = self._chosen.select(rows) if self._chosen is not None else None

    def product(self, x: Tensor, weight: Weight) -> Tensor:
        """The product of x, a row for each token of the stream, with `weight`, and what LoRA adapters add."""
        found = weight(x)
        if self._chosen is not None and weight.lora is not None:
            weight.lora.add(x, found, self._chosen)
        return found

    def _adapted(self, weight: Weight) -> bool:
        return self._chosen is not None and weight.lora is not None

    def _norm(self, x: Tensor, gains: Tensor) -> Tensor:
        return (rms_norm if gains.dim() == 1 else layer_norm)(x, gains, self._epsilon)
