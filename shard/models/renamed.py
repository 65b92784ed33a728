"""Adapts checkpoints whose tensors have other names, or another layout, than the decoder asks for."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from ..weights import Source, sliced
from .shape import Shape
from .traits import Layout

PARTS = ("q_proj", "k_proj", "v_proj")


class MappedSource(ABC):
    """A checkpoint whose tensor names are mapped from ours."""

    def __init__(self, source: Source) -> None:
        self.dtype = source.dtype
        self.device = source.device
        self.progress = source.progress
        self._source = source

    def tensor(
        self, name: str, shape: tuple[int, ...], cut: tuple[int, int, int] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See Source."""
        return self._source.tensor(self.name(name), shape, cut, dtype)

    def stored(self, name: str, kinds: tuple[str, ...]) -> Tensor:
        """See Source."""
        return self._source.stored(self.name(name), kinds)

    def has(self, name: str, shape: tuple[int, ...] | None = None) -> bool:
        """See Source."""
        return self._source.has(self.name(name), shape)

    def scale(self, name: str, size: int) -> Tensor | None:
        """See Source."""
        return self._source.scale(self.name(name), size)

    @abstractmethod
    def name(self, name: str) -> str:
        """The checkpoint's name for ours."""


class PrefixedSource(MappedSource):
    """A checkpoint with other prefixes."""

    def __init__(self, source: Source, beginnings: Sequence[tuple[str, str]]) -> None:
        """beginnings: our prefixes and the checkpoint's; the first that fits is used."""
        super().__init__(source)
        self._beginnings = beginnings

    def name(self, name: str) -> str:
        """See MappedSource."""
        for ours, theirs in self._beginnings:
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name


def paired_name(name: str, paired: Sequence[str]) -> str:
    """The checkpoint's name of a tensor, where two of our layers are one that has two of each of the modules `paired`."""
    before, layers, rest = name.partition("layers.")
    if not layers:
        return name
    index, module, end = rest.split(".", 2)
    both, second = divmod(int(index), 2)
    return f"{before}layers.{both}.{module}.{f'{second}.' if module in paired else ''}{end}"


class PairedSource(MappedSource):
    """A checkpoint in which two of our layers are one."""

    def __init__(self, source: Source, paired: Sequence[str]) -> None:
        """paired: see `paired_name`."""
        super().__init__(source)
        self._paired = paired

    def name(self, name: str) -> str:
        """See MappedSource."""
        return paired_name(name, self._paired)


class EitherSource(MappedSource):
    """A checkpoint whose names may be ours, or others."""

    def __init__(self, source: Source, aliases: Sequence[tuple[str, str]]) -> None:
        """aliases: parts of our names, and what may stand there instead; the first by which there is such a tensor counts, or all,
        one after the other."""
        super().__init__(source)
        self._aliases = aliases

    def name(self, name: str) -> str:
        """See MappedSource."""
        if self._source.has(name):
            return name
        others = [name.replace(*pair) for pair in self._aliases if pair[0] in name]
        others.append(reduce(lambda found, pair: found.replace(*pair), self._aliases, name))
        return next(filter(self._source.has, others), name)


class LegacySource(MappedSource):
    """A checkpoint of an older family: with names of its own, fused queries, keys and values, or transposed matrices."""

    def __init__(self, source: Source, shape: Shape, layout: Layout) -> None:
        super().__init__(source)
        self._shape = shape
        self._layout = layout
        self._theirs = dict(layout.names)
        table = f"{self._theirs[shape.table]}.weight"
        self._root = next((root for root in layout.roots if source.has(root + table)), layout.roots[0])
        self._joint = "", torch.empty(0)  # name and content of the last fused tensor that was read

    def tensor(
        self, name: str, shape: tuple[int, ...], cut: tuple[int, int, int] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See Source."""
        part = name.split(".")[-2]
        if self._layout.joint and part in PARTS:
            return sliced(self._part(name, PARTS.index(part), shape, dtype), cut)
        return self._read(name, shape, cut, dtype)

    def name(self, name: str) -> str:
        """See MappedSource."""
        module, _, kind = name.removeprefix("model.").rpartition(".")
        place = ""
        if module.startswith("layers."):
            _, index, module = module.split(".", 2)
            place = f"{self._layout.layers}.{index}."
        root = self._root if name.startswith("model.") else ""
        return f"{root}{place}{self._theirs.get(module, module)}.{kind}"

    def _part(self, name: str, part: int, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        """The queries', keys' or values' part of a fused tensor."""
        keys, heads, inputs = self._shape.keys(0), self._shape.heads, shape[1:]
        rows = [heads * keys.size, keys.heads * keys.size, keys.heads * keys.size]
        there = self.name(name)
        if self._joint[0] != there:  # the three parts are asked for one after the other
            self._joint = there, self._read(name, (sum(rows), *inputs), None, dtype)
        joint = self._joint[1]
        if not self._layout.grouped:
            return torch.split(joint, rows)[part]
        each = joint.view(keys.heads, -1, keys.size, *inputs)
        return (each[:, :-2], each[:, -2], each[:, -1])[part].reshape(shape)

    def _read(self, name: str, shape: tuple[int, ...], cut: tuple[int, int, int] | None, dtype: torch.dtype | None) -> Tensor:
        if not self._layout.transposed or len(shape) != 2 or not name.startswith("model.layers."):
            return super().tensor(name, shape, cut, dtype)
        other = cut and (1 - cut[0], *cut[1:])
        return super().tensor(name, shape[::-1], other, dtype).t().contiguous()
