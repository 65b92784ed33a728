"""Loads a rank's shard of the weights from a checkpoint. Tensor parallelism as in Megatron-LM (Shoeybi et al. 2019,
arXiv:1909.08053): heads and intermediate features are column-parallel, the projections after them row-parallel, embedding table and
LM head divided by vocabulary."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, repeat
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels import quantized
from ...kernels.codes import QuantizedWeight, alike, dequantized, joined
from ...kernels.linear import Invariance, Weight
from ..parallel import Ranks
from ..weights import Source
from .codes import READERS, matrix
from .lora import ColumnLora, LoraAdapters, LoraTarget, Part, RowLora, side_by_side
from .renamed import paired_name
from .shape import Shape

# Elements of a table that are read at once, before a rank's part is taken out of them.
FEATURES = 1 << 28

Cut = tuple[int, int, int] | None  # (dimension, start, stop) along it; None: all


class Projection(NamedTuple):
    """The weight of a column-parallel projection before it is laid out, and its LoRA change."""

    weight: Tensor | QuantizedWeight
    change: ColumnLora | None


class Loader:
    """Reads this rank's part of the named tensors of one layer (or of what is beside the layers)."""

    def __init__(
        self,
        source: Source,
        shape: Shape,
        ranks: Ranks,
        root: str,
        exact: Invariance,
        adapters: LoraAdapters | None = None,
        index: int = -1,
    ) -> None:
        """root: prefix of all tensor names; adapters: LoRA adapters that requests may use; index: the layer's number; -1: for what
        is beside the layers."""
        self.source = source
        self.adapters = adapters
        self.exact = exact
        self.shape = shape
        self.ranks = ranks
        self.root = root
        self.index = index
        self.prefix = f"{root}layers.{index}." if index >= 0 else root

    def layer(self, index: int) -> "Loader":
        """For one of the layers."""
        return Loader(self.source, self.shape, self.ranks, self.root, self.exact, self.adapters, index)

    def gains(self, name: str, size: int) -> Tensor:
        """The gains of a norm, which every rank has whole, in the form of `Stream`. Where they are stored minus 1, those of an RMS
        norm are in float32, so as not to lose precision."""
        source = self.source
        if self.shape.plain_norms:
            gains = torch.ones(size, dtype=source.dtype, device=source.device)
        else:
            gains = source.tensor(f"{self.prefix}{name}.weight", (size,))
        if self.shape.layer_norms:
            biased, gains = self.shape.norm_bias, gains + self.shape.centered_norms
            return torch.stack((gains, source.tensor(f"{self.prefix}{name}.bias", (size,)) if biased else gains * 0))
        return gains.float() + 1 if self.shape.centered_norms else gains

    def part_of_gains(self, name: str, size: int, whole: int) -> Tensor:
        """This rank's part of the gains of a norm over the heads of all ranks; whole: the size of a head."""
        return self.source.tensor(f"{self.prefix}{name}.weight", (size,), self._cut((size,), 0, 0, size, whole))

    def parts(self, name: str, sizes: Sequence[int], more: tuple[int, ...] = (), wholes: Iterable[int] = repeat(1)) -> list[Tensor]:
        """This rank's part of each of several parts of a tensor [sum of sizes, *more]; wholes: of each, see `_own`."""
        full = (sum(sizes), *more)
        return [self.source.tensor(self.prefix + name, full, cut) for cut in self._cuts(full, sizes, wholes)]

    def projections(self, name: str, sizes: Sequence[int], wholes: Iterable[int], factors: Sequence[float]) -> list[Projection]:
        """The same of a matrix [sum of sizes, hidden], each part times a factor. The last one is dense, as in `unrounded`."""
        full, names = (sum(sizes), self.shape.hidden), self._matrix_names(name)
        *cuts, last = self._cuts(full, sizes, wholes)
        weights = [*(self._matrix(name, full, cut) for cut in cuts), self._unrounded(name, full, last)]
        found = list[Projection]()
        for weight, cut, factor in zip(weights, (*cuts, last), factors, strict=True):
            _, start, stop = cut or (0, 0, full[0])
            change = ColumnLora([Part(names, full[0], start, stop, factor)], full[1]) if self.adapters is not None else None
            found.append(Projection(self.times(weight, factor), change))
        return [*found[:-1], Projection(self.dense(found[-1].weight), found[-1].change)]

    def _cuts(self, full: tuple[int, ...], sizes: Sequence[int], wholes: Iterable[int]) -> list[Cut]:
        firsts = accumulate(sizes, initial=0)
        return [self._cut(full, 0, *each) for each in zip(firsts, sizes, wholes, strict=False)]

    def each_head(self, name: str, heads: int, within: int = 0) -> Tensor:
        """This rank's part of a tensor with one number for each head: float32. within: the dimension of heads in the checkpoint's
        tensor, whose other dimensions are 1."""
        full = (*[1] * within, heads, *[1] * (within > 0))
        full, along = (full, within) if self.source.has(self.prefix + name, full) else ((heads,), 0)
        return self.source.tensor(self.prefix + name, full, self._cut(full, along, 0, heads), torch.float32).flatten()

    def whole(self, name: str, outputs: int, bias: bool = False, wide: bool = False) -> Weight:
        """A dense matrix [outputs, hidden] that every rank has whole, unpacked where the checkpoint has it quantized; wide: in
        float32."""
        dtype, full = torch.float32 if wide else self.source.dtype, (outputs, self.shape.hidden)
        added = self.source.tensor(f"{self.prefix}{name}.bias", (outputs,), dtype=dtype) if bias else None
        if wide:
            return Weight(self.source.tensor(f"{self.prefix}{name}.weight", full, dtype=dtype), added, self.exact)
        return self.laid_out(self.unrounded_matrix(name, outputs), added)

    def there(self, name: str) -> bool:
        """Whether the checkpoint has this matrix, quantized or not."""
        marks = {"weight", *(mark for _, mark in READERS)}
        return any(self.source.has(f"{self.prefix}{name}.{mark}") for mark in marks)

    def each(self, name: str, count: int) -> Tensor:
        """A tensor of `count` numbers that every rank has whole: [count] float32."""
        found = self.source.scale(self.prefix + name, count)
        return found if found is not None else self.source.tensor(self.prefix + name, (count,), dtype=torch.float32)

    def wide(self, name: str, *full: int) -> Tensor:
        """A tensor in float32 that every rank has whole."""
        return self.source.tensor(self.prefix + name, full, dtype=torch.float32)

    def number(self, name: str) -> float:
        """A scalar of the layer."""
        return self.source.tensor(self.prefix + name, (1,)).item()

    def columns(self, joint: str, names: list[str], sizes: list[int], bias: bool) -> Weight:
        """Column-parallel matrices [size, hidden], concatenated: of each this rank's part of the outputs. joint: the fused tensor's
        name, in checkpoints that have one."""
        added = self.biases(names, sizes, joint) if bias else None
        return self.fused(self.projection(names, sizes, joint), bias=added)

    def heads(
        self, joint: str, names: list[str], sizes: list[int], bias: bool, wholes: Sequence[int], features: Sequence[int]
    ) -> Weight:
        """As `columns`, for queries, keys and values, of which the first two are `ordered`, and for gates, which come last wherever
        they are stored. wholes: the size of a head of each; features: see `Shape.order`."""
        gated = self.shape.gates
        beside, apart = gated is not None and not gated.name, gated is not None and gated.name != ""
        if beside:
            sizes = [2 * sizes[0], *sizes[1:]]
        added = None
        if bias:
            kept = len(names) - apart
            added = self.biases(names[:kept], sizes[:kept], joint, wholes[:kept])
            if apart:  # gates with a matrix of their own have no biases
                added = functional.pad(added, (0, self._own(sizes[-1], wholes[-1])[1]))
        order = None
        if features or beside:
            own = [self._own(*each)[1] for each in zip(sizes, wholes, strict=True)]
            queries, keys, *others = torch.split(torch.arange(sum(own), device=self.source.device), own)
            if beside:
                queries, gates = queries.view(-1, 2, wholes[0]).transpose(0, 1).flatten(1)
                others.append(gates)
            order = torch.cat((self.ordered(torch.cat((queries, keys)), features), *others))
            added = added[order] if added is not None else None
        return self.fused(self.projection(names, sizes, joint, wholes, order, self.shape.attention_inputs), bias=added)

    def projection(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        joint: str = "",
        wholes: Iterable[int] = repeat(1),
        order: Tensor | None = None,
        inputs: int = 0,
        unrounded: bool = False,
    ) -> Projection:
        """`outwards` with its LoRA change; order: of its outputs in the weight, if another than the checkpoint's; unrounded: it is
        dense, see there."""
        weight = self.unrounded(names, sizes, wholes, inputs) if unrounded else self.outwards(names, sizes, joint, wholes, inputs)
        change = self._column_lora(names, sizes, joint, wholes, order, inputs)
        return Projection(weight if order is None else weight[order], change)

    def side_by_side(self, *parts: Projection) -> Projection:
        """Projections of the same input as one."""
        return Projection(self.joined([part.weight for part in parts]), side_by_side(*(part.change for part in parts)))

    def fused(self, *parts: Projection, bias: Tensor | None = None) -> Weight:
        """The same, laid out for matrix products."""
        weight, change = parts[0] if len(parts) == 1 else self.side_by_side(*parts)
        return self.laid_out(weight, bias, change)

    def ordered(self, heads: Tensor, order: Sequence[int]) -> Tensor:
        """Concatenated heads, [n * head size, ...], with their features in our order: see `Shape.order`."""
        return heads.view(-1, len(order), *heads.shape[1:])[:, list(order)].flatten(0, 1) if order else heads

    def rows(self, name: str, size: int, bias: bool, whole: int = 1) -> Weight:
        """A row-parallel matrix [hidden, size], of which this rank has a part of the inputs. Rank 0 adds the bias, so that the
        all-reduced sum has it once. whole: see `_own`."""
        added = None
        if bias and self.ranks.rank == 0:
            added = self.source.tensor(f"{self.prefix}{name}.bias", (self.shape.hidden,)) * self.shape.weight_factor
        return self.laid_out(self.inwards(name, size, whole=whole), added, self._row_lora(name, size, whole))

    def outwards(
        self, names: Sequence[str], sizes: Sequence[int], joint: str = "", wholes: Iterable[int] = repeat(1), inputs: int = 0
    ) -> Tensor | QuantizedWeight:
        """The weight of `columns`, before it is laid out; wholes: of each, see `_own`; inputs: if not the stream's."""
        places, inputs = self._places(names, sizes, joint, wholes), inputs or self.shape.hidden
        return self.joined([self._matrix(name, (full, inputs), cut) for name, full, cut in places])

    def unrounded(self, names: Sequence[str], sizes: Sequence[int], wholes: Iterable[int] = repeat(1), inputs: int = 0) -> Tensor:
        """As `outwards`, dense: never quantized at load, for so few outputs that quantization would save nothing."""
        places, inputs = self._places(names, sizes, "", wholes), inputs or self.shape.hidden
        return torch.cat([self.dense(self._unrounded(name, (full, inputs), cut)) for name, full, cut in places])

    def unrounded_matrix(self, name: str, outputs: int, inputs: int = 0) -> Tensor:
        """A dense matrix, never quantized at load, which every rank has whole; inputs: if not the stream's."""
        return self.dense(self._unrounded(name, (outputs, inputs or self.shape.hidden), None))

    def _unrounded(self, name: str, full: tuple[int, int], cut: Cut) -> Tensor | QuantizedWeight:
        how = self.shape.quantization
        return matrix(self.source, self.prefix + name, full, None if how and how.at_load else how, cut)

    def matrix(self, name: str, outputs: int, inputs: int, whole: bool = False) -> Tensor | QuantizedWeight:
        """The whole of a matrix, or this rank's part of its outputs."""
        full = outputs, inputs
        return self._matrix(name, full, None if whole else self._cut(full, 0, 0, outputs))

    def joined(self, parts: Sequence[Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight:
        """Matrices with the same inputs, concatenated along the outputs."""
        few = [part for part in parts if isinstance(part, QuantizedWeight)]
        if len(few) == len(parts) and alike(few):
            return joined(few)
        return torch.cat([self.dense(part) for part in parts])

    def biases(self, names: Sequence[str], sizes: Sequence[int], joint: str, wholes: Iterable[int] = repeat(1)) -> Tensor:
        """The biases of `outwards`."""
        places = self._places(names, sizes, joint, wholes)
        found = ((self.source.tensor(f"{self.prefix}{name}.bias", (full,), cut), self._factor(name)) for name, full, cut in places)
        return torch.cat([bias if factor == 1 else bias * factor for bias, factor in found])

    def inwards(self, name: str, size: int, outputs: int = 0, whole: int = 1) -> Tensor | QuantizedWeight:
        """The weight of `rows`, before it is laid out; outputs: if not the stream's."""
        full = outputs or self.shape.hidden, size
        return self.residual(self._matrix(name, full, self._cut(full, 1, 0, size, whole)))

    def residual(self, weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        """The weight times the factor of additions to the stream."""
        return self.times(weight, self.shape.weight_factor)

    def times(self, weight: Tensor | QuantizedWeight, factor: float) -> Tensor | QuantizedWeight:
        """The weight times a factor."""
        if factor == 1:
            return weight
        return weight.scaled(factor) if isinstance(weight, QuantizedWeight) else weight * factor

    def dense(self, weight: Tensor | QuantizedWeight) -> Tensor:
        """The dense form of a weight, unpacked if it is quantized."""
        return dequantized(weight, self.source.dtype) if isinstance(weight, QuantizedWeight) else weight

    def laid_out(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None, change: LoraTarget | None = None) -> Weight:
        """The weight laid out for matrix products; change: what LoRA adapters add to it."""
        found = quantized.lay_out(weight, bias, self.exact, self.source.dtype)
        if self.adapters is not None and change is not None:
            like = torch.empty(0, dtype=self.source.dtype, device=self.source.device)
            found.lora = self.adapters.lora(change, found.shape, self.exact, like)
        return found

    def _column_lora(
        self, names: Sequence[str], sizes: Sequence[int], joint: str, wholes: Iterable[int], order: Tensor | None, inputs: int
    ) -> ColumnLora | None:
        """The LoRA change of a `projection`."""
        if self.adapters is None:
            return None
        parts = []
        for before, (name, full, cut) in zip(accumulate(sizes, initial=0), self._places(names, sizes, joint, wholes), strict=False):
            _, start, stop = cut or (0, 0, full)
            factor, other = self._factor(name), None
            if joint and name != joint:
                other = Part(self._matrix_names(joint), sum(sizes), before + start, before + stop, factor)
            parts.append(Part(self._matrix_names(name), full, start, stop, factor, other))
        return ColumnLora(parts, inputs or self.shape.hidden, order)

    def _row_lora(self, name: str, size: int, whole: int = 1) -> RowLora | None:
        """The LoRA change of `rows`."""
        if self.adapters is None:
            return None
        start, own = self._own(size, whole)
        return RowLora(self._matrix_names(name), self.shape.hidden, size, start, own, self.shape.weight_factor * self._factor(name))

    def _matrix_names(self, name: str) -> tuple[str, ...]:
        """A matrix's names within the model, without its prefix: the checkpoint's, and that of transformers' module, if it
        differs."""
        own = self.prefix[self.prefix.index("layers.") :] + name
        own = paired_name(own, self.shape.paired) if self.shape.paired else own
        return own, *(own.replace(*pair) for pair in self.shape.modules if pair[0] in own)

    def _places(
        self, names: Sequence[str], sizes: Sequence[int], joint: str, wholes: Iterable[int]
    ) -> Iterator[tuple[str, int, Cut]]:
        """For each of several concatenated matrices: the tensor's name, its length, and this rank's part of the matrix in it."""
        if joint.rpartition(".")[2] in self.shape.joined or (joint and self.there(joint)):
            found = zip(repeat(joint), repeat(sum(sizes)), accumulate(sizes, initial=0), sizes, wholes, strict=False)
        else:
            found = zip(names, sizes, repeat(0), sizes, wholes, strict=False)
        return ((name, full, self._cut((full,), 0, *each)) for name, full, *each in found)

    def table(self, name: str, precise: bool = False) -> Tensor:
        """This rank's rows of a matrix [vocabulary, hidden], with zeros beyond its end. precise: in float32."""
        return self._rows(name, self.shape.hidden, dtype=torch.float32 if precise else None)

    def table_bias(self, name: str) -> Tensor:
        """This rank's part of a bias [vocabulary], with zeros beyond its end."""
        return self._rows(f"{name.removesuffix('weight')}bias")

    def _rows(self, name: str, *more: int, dtype: torch.dtype | None = None) -> Tensor:
        size = self.shape.vocabulary_slice(self.ranks.size)
        start = self.ranks.rank * size
        return self.source.tensor(name, (self.shape.vocabulary, *more), (0, start, start + size), dtype)

    def positions(self) -> Tensor:
        """The learned position embeddings, which every rank has whole: [positions, hidden]."""
        first, count = self.shape.learned or 0, self.shape.max_positions
        full = first + count, self.shape.hidden
        return self.source.tensor(f"{self.prefix}embed_positions.weight", full, (0, first, first + count))

    def features(self, name: str, rows: int, layers: int, size: int) -> Tensor:
        """This rank's part of each layer's features in a table [rows, layers * size]: [rows, layers * part]."""
        start, own = self._own(size)
        full = rows, layers * size
        if own == size:
            return self.source.tensor(f"{self.prefix}{name}.weight", full)
        # Whole rows are read, many at a time: they are contiguous in the file, and a layer's features are not.
        many = max(1, FEATURES // (layers * size))
        blocks = ((0, first, min(first + many, rows)) for first in range(0, rows, many))
        read = (self.source.tensor(f"{self.prefix}{name}.weight", full, block) for block in blocks)
        return torch.cat([block.view(-1, layers, size)[:, :, start : start + own].flatten(1) for block in read])

    def own(self, count: int, whole: int = 1) -> tuple[int, int]:
        """Start and end of this rank's part of `count`; whole: see `_own`."""
        start, size = self._own(count, whole)
        return start, start + size

    def cache_scales(self, count: int) -> Tensor | None:
        """Scales of FP8 keys and values in the KV cache, as calibrated with the checkpoint, for so many heads: [2, this rank's
        heads] float32; None: all are 1."""
        found = [self._cache_scale(name, count) for name in "kv"]
        if found[0] is None or found[1] is None:
            return None
        start, size = self._own(count)
        return torch.stack((found[0][start : start + size], found[1][start : start + size]))

    def _cache_scale(self, name: str, count: int) -> Tensor | None:
        """The scale of keys ("k") or values ("v"), by its usual name or ModelOpt's."""
        heads = self.prefix + self.shape.attention_name
        found = self.source.scale(f"{heads}.{name}_scale", count)
        return found if found is not None else self.source.scale(f"{heads}.{name}_proj.{name}_scale", count)

    def _matrix(self, name: str, full: tuple[int, int], cut: Cut) -> Tensor | QuantizedWeight:
        return self.times(matrix(self.source, self.prefix + name, full, self.shape.quantization, cut), self._factor(name))

    def _factor(self, name: str) -> float:
        return dict(self.shape.factors).get(name, 1.0)

    def _cut(self, full: tuple[int, ...], dimension: int, first: int, count: int, whole: int = 1) -> Cut:
        """The cut of this rank's part of `count` from `first` on."""
        start, size = self._own(count, whole)
        return None if size == full[dimension] else (dimension, first + start, first + start + size)

    def _own(self, count: int, whole: int = 1) -> tuple[int, int]:
        """Start and size of this rank's part of `count`. No part is smaller than `whole`: of fewer wholes than ranks, several ranks
        in a row have the same one."""
        size = max(count // self.ranks.size, whole)
        return self.ranks.rank * count // self.ranks.size // size * size, size
