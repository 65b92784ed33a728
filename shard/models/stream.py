"""The residual stream of a step's tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.adapters import RowAdapters
from ...kernels.linear import Weight
from ...kernels.operations import add_rms_norm, gated, layer_norm, rms_norm
from ...kernels.reference import Gates
from ..parallel import Ranks


class Stream:
    """The residual stream of some tokens: what was added up so far, and what is still to be added, in one go with the next norm.

    Few rows on an accelerator go by fewer launches (`fused_skinny_gemm`): products take SwiGLU with them, of one row the norm, too,
    and what they come to is added at once, or in parts by the next norm. With several ranks what they come to must be added up
    first: sums and norms go together.
    """

    def __init__(self, sums: Tensor, ranks: Ranks, epsilon: float, gelu: bool = False, chosen: RowAdapters | None = None) -> None:
        """sums: [tokens, hidden], the caller's no more; gelu: of gates; chosen: of adapters, if any token goes by one.

        Gains of norms are [hidden] where those are RMS norms, and [2, hidden] with their biases where they are layer norms.
        """
        self._sums = sums
        self._more: Tensor | None = None  # [tokens, hidden], or parts of that, [parts, tokens, hidden] float32
        self._ranks = ranks
        self._epsilon = epsilon
        self._gates = Gates(gelu)
        self._chosen = chosen

    def normalized(self, gains: Tensor | None) -> Tensor:
        """[tokens, hidden], not to be overwritten; without gains the sums themselves."""
        more, self._more = self._more, None
        if more is not None and gains is not None and gains.dim() == 1:
            return add_rms_norm(more, self._sums, gains, self._epsilon)
        if more is not None:
            self._sums.add_(more if more.dim() == 2 else more.sum(0))
        return self._sums if gains is None else self._norm(self._sums, gains)

    def through(self, gains: Tensor | None, weight: Weight, gates: bool = False) -> Tensor:
        """The product of what is `normalized` with `weight`, or what its gates let through."""
        few = weight.streams(self._sums, gates) and not self._adapted(weight)
        if few and self._more is None and (gains is None or gains.dim() == 1):
            return weight.streamed(self._sums, gains=gains, epsilon=self._epsilon, gated=gates, gelu=self._gates.gelu)
        x = self.normalized(gains)
        if few and gates:
            return weight.streamed(x, gated=True, gelu=self._gates.gelu)
        return self.apart(x, weight, gates, streams=not gates)

    def apart(self, x: Tensor, weight: Weight, gates: bool, streams: bool = True) -> Tensor:
        """The product of what is normalized already with `weight`, or what its gates let through; streams: as of `product`."""
        found = self.product(x, weight, streams)
        return gated(found, self._gates) if gates else found

    def add(self, x: Tensor, weight: Weight, gains: Tensor | None = None) -> None:
        """Adds the product of x with `weight`, this rank's part of it, or the norm of that."""
        if gains is None and self._ranks.size == 1 and weight.streams(x) and not self._adapted(weight):
            assert self._more is None
            self._more = weight.add(x, self._sums)
        else:
            self.add_part(self.product(x, weight), gains)

    def add_part(self, x: Tensor, gains: Tensor | None = None) -> None:
        """Adds x, this rank's part of it, or the norm of that."""
        assert self._more is None
        whole = self._ranks.add(x)
        self._more = whole if gains is None else self._norm(whole, gains)

    def add_each(self, parts: Sequence[Tensor], gains: Sequence[Tensor], last: Tensor | None) -> None:
        """Adds the norm of the sum of the norms of these, of which all are this rank's parts."""
        wholes = self._ranks.add(torch.stack([*parts]))
        found = sum(self._norm(whole, own) for whole, own in zip(wholes, gains, strict=True))
        assert isinstance(found, Tensor)
        self._more = found if last is None else self._norm(found, last)

    def add_whole(self, x: Tensor) -> None:
        """Adds x, which every rank has whole."""
        self.normalized(None).add_(x)

    def scale(self, factor: float) -> None:
        """Multiplies it."""
        self.normalized(None).mul_(factor)

    def replace(self, rows: Tensor, sums: Tensor) -> None:
        """Other sums for these rows, to which nothing was added yet."""
        self._sums.index_copy_(0, rows, sums)

    def put(self, rows: Tensor, x: Tensor) -> None:
        """Adds x to these rows, which every rank has whole."""
        self.normalized(None).index_add_(0, rows, x)

    def select(self, rows: Tensor) -> None:
        """Goes on with these rows alone."""
        self._sums = self.normalized(None).index_select(0, rows)
        self._chosen = self._chosen.select(rows) if self._chosen is not None else None

    def product(self, x: Tensor, weight: Weight, streams: bool = True) -> Tensor:
        """Of a row for each token of the stream with `weight`, and what adapters add to it; streams: it may, where rows are few."""
        found = weight(x) if streams else weight.product(x)
        if self._chosen is not None and weight.additions is not None:
            weight.additions.add(x, found, self._chosen)
        return found

    def _adapted(self, weight: Weight) -> bool:
        return self._chosen is not None and weight.additions is not None

    def _norm(self, x: Tensor, gains: Tensor) -> Tensor:
        return (rms_norm if gains.dim() == 1 else layer_norm)(x, gains, self._epsilon)
