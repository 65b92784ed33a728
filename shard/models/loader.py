"""Cuts a rank's weights out of a checkpoint. Weights are divided among ranks as in Megatron-LM (Shoeybi et al. 2019,
arXiv:1909.08053): heads and intermediate features by columns, what follows them by rows, tables by vocabulary.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ...kernels.linear import Weight
from ..parallel import Ranks
from ..weights import Source
from .shape import Shape


class Loader:
    """Cuts this rank's part out of the named tensors of one layer (or of the model, with an empty prefix)."""

    def __init__(self, source: Source, shape: Shape, ranks: Ranks, prefix: str, exact: bool) -> None:
        self.source = source
        self.exact = exact
        self.shape = shape
        self.ranks = ranks
        self.prefix = prefix

    def gains(self, name: str, size: int) -> Tensor:
        """The gains of a norm, which every rank has whole; where they are stored less 1, in float32, not to lose what is left."""
        gains = self.source.tensor(f"{self.prefix}{name}.weight", (size,))
        return gains.float() + 1 if self.shape.centered_norms else gains

    def part_of_gains(self, name: str, size: int) -> Tensor:
        """This rank's part of the gains of a norm that goes over the heads of all ranks."""
        return self._part(f"{name}.weight", (size,), 0)

    def whole(self, name: str, outputs: int) -> Weight:
        """A matrix [outputs, hidden] that every rank has whole."""
        return Weight(self.source.tensor(f"{self.prefix}{name}.weight", (outputs, self.shape.hidden)), None, self.exact)

    def columns(self, joint: str, names: list[str], sizes: list[int], bias: bool) -> Weight:
        """Matrices [size, hidden] side by side, of each this rank's part of the outputs. joint: what they are in checkpoints that
        have them so."""
        added = self.outwards(names, sizes, "bias", joint) if bias else None
        return Weight(self.outwards(names, sizes, "weight", joint), added, self.exact)

    def heads(self, joint: str, names: list[str], sizes: list[int], bias: bool) -> Weight:
        """As `columns`, of queries, keys and values, of which the first two are `ordered`."""
        turned = sum(sizes[:2]) // self.ranks.size

        def found(kind: str) -> Tensor:
            all_three = self.outwards(names, sizes, kind, joint)
            return torch.cat((self.ordered(all_three[:turned]), all_three[turned:])) if self.shape.order else all_three

        return Weight(found("weight"), found("bias") if bias else None, self.exact)

    def ordered(self, heads: Tensor) -> Tensor:
        """Some heads one after the other, [n * head size, ...], with their features in our order: see `Shape.order`."""
        order = list(self.shape.order)
        return heads.view(-1, self.shape.head_size, *heads.shape[1:])[:, order].flatten(0, 1) if order else heads

    def rows(self, name: str, size: int, bias: bool) -> Weight:
        """A matrix [hidden, size], this rank's part of the inputs. Rank 0 adds the bias, so that the sum has it once."""
        added = None
        if bias and self.ranks.rank == 0:
            added = self._scaled(self.source.tensor(f"{self.prefix}{name}.bias", (self.shape.hidden,)))
        return Weight(self.inwards(name, size), added, self.exact)

    def outwards(self, names: Sequence[str], sizes: Sequence[int], kind: str = "weight", joint: str = "") -> Tensor:
        """What leads away from the residual stream: as `columns`."""
        row = (self.shape.hidden,) if kind == "weight" else ()
        if joint.rpartition(".")[2] in self.shape.joined:
            places = zip(accumulate(sizes, initial=0), sizes, strict=False)
            return torch.cat([self._part(f"{joint}.{kind}", (sum(sizes), *row), 0, start, size) for start, size in places])
        return torch.cat([self._part(f"{name}.{kind}", (size, *row), 0) for name, size in zip(names, sizes, strict=True)])

    def inwards(self, name: str, size: int) -> Tensor:
        """What leads back to it: as `rows`."""
        return self._scaled(self._part(f"{name}.weight", (self.shape.hidden, size), 1))

    def _scaled(self, tensor: Tensor) -> Tensor:
        return tensor if self.shape.residual_factor == 1 else tensor * self.shape.residual_factor

    def table(self, name: str) -> Tensor:
        """This rank's rows of a matrix [vocabulary, hidden], with zeros beyond its end."""
        size = self.shape.vocabulary_slice(self.ranks.size)
        start = self.ranks.rank * size
        return self.source.tensor(name, (self.shape.vocabulary, self.shape.hidden), (0, start, start + size))

    def cache_scales(self) -> Tensor | None:
        """What cached keys and values of 8 bits are to be multiplied by, as calibrated with the checkpoint: [2, kv heads]
        float32; None: all are 1."""
        count = self.shape.kv_heads
        found = [self.source.scale(f"{self.prefix}self_attn.{name}_scale", count) for name in "kv"]
        if found[0] is None or found[1] is None:
            return None
        own = count // self.ranks.size
        part = slice(self.ranks.rank * own, (self.ranks.rank + 1) * own)
        return torch.stack((found[0][part], found[1][part]))

    def _part(self, name: str, full: tuple[int, ...], dimension: int, first: int = 0, count: int = 0) -> Tensor:
        """This rank's part of all along a dimension, or of `count` from `first` on."""
        size = (count or full[dimension]) // self.ranks.size
        start = first + self.ranks.rank * size
        return self.source.tensor(self.prefix + name, full, None if size == full[dimension] else (dimension, start, start + size))
