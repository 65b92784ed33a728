"""LoRA adapters of a model (multi-LoRA): which adapters are loaded, each under a number, and what each adds to which weight.

Adapters may be loaded and dropped while the model serves, into slots reserved for them. The slow part can run beside the steps
(`prepared`); making one available (`put`) takes a moment between two steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels import low_rank
from ...kernels.adapters import LoraMatrices, Pair
from ...kernels.linear import Invariance
from ..adapters import Adapter
from .shape import Unsupported


class LoraTarget(Protocol):
    """How adapters change one weight, of which this rank holds a part."""

    @property
    def matrices(self) -> int:
        """The number of matrices fused in the weight: each adds as much rank as an adapter has."""
        ...

    def pair(self, adapter: Adapter) -> Pair | None:
        """The adapter's two matrices for this weight (down, up); None: it leaves the weight as it is. Raises Unsupported."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix of which this rank has some of the outputs."""

    names: tuple[str, ...]  # of the matrix within the model
    outputs: int  # of the whole matrix
    start: int
    stop: int
    factor: float  # the weight is multiplied by it
    joint: "Part | None" = None  # the same outputs in transformers' fused matrix, where the checkpoint has several

    def of(self, adapter: Adapter) -> "Part":
        """The part as this adapter names it: split or fused."""
        if self.joint is None or not adapter.has(self.joint.names):
            return self
        if adapter.has(self.names):
            raise Unsupported(
                f"adapter {adapter.name} changes {self.joint.names[0]} and {self.names[0]}, a part of it: save it again"
            )
        return self.joint


@dataclass(frozen=True, slots=True)
class ColumnLora:
    """The change of a column-parallel weight: matrices side by side, or parts of one, each changed on its own outputs."""

    parts: Sequence[Part]
    inputs: int
    order: Tensor | None = None  # the order of outputs in the weight

    @property
    def matrices(self) -> int:
        """See LoraTarget."""
        return len({part.names for part in self.parts})

    def pair(self, adapter: Adapter) -> Pair | None:
        """See LoraTarget."""
        parts = [part.of(adapter) for part in self.parts]
        sizes = {part.names: part.outputs for part in parts}
        pairs = {names: pair for names, size in sizes.items() if (pair := adapter.pair(names, size, self.inputs))}
        if not pairs:
            return None
        down = torch.cat([pair[0] for pair in pairs.values()])
        firsts = dict(zip(pairs, accumulate((len(pair[0]) for pair in pairs.values()), initial=0), strict=False))
        ups = []
        for part in parts:
            first, rows, up = firsts.get(part.names, 0), slice(part.start, part.stop), down.new_zeros(part.outputs, 0)
            if part.names in pairs:
                _, up = pairs[part.names]
            ups.append(pad(up[rows] * part.factor, (first, len(down) - first - up.shape[1])))
        up = torch.cat(ups)
        return down, up if self.order is None else up[self.order.to(up.device)]


def side_by_side(*changes: ColumnLora | None) -> ColumnLora | None:
    """The change of weights that are concatenated along their outputs; None: there are no adapters."""
    parts, orders, before, inputs = list[Part](), list[Tensor](), 0, 0
    for change in changes:
        if change is None:
            return None
        own, inputs = sum(part.stop - part.start for part in change.parts), change.inputs
        orders.append(before + (torch.arange(own) if change.order is None else change.order.cpu()))
        parts += change.parts
        before += own
    return ColumnLora(parts, inputs, torch.cat(orders))


@dataclass(frozen=True, slots=True)
class RowLora:
    """The change of a row-parallel weight: a matrix of which this rank has some of the inputs."""

    names: tuple[str, ...]
    outputs: int
    inputs: int  # of the whole matrix
    start: int
    own: int
    factor: float
    matrices = 1

    def pair(self, adapter: Adapter) -> Pair | None:
        """See LoraTarget."""
        found = adapter.pair(self.names, self.outputs, self.inputs)
        return found and (found[0].narrow(1, self.start, self.own).contiguous(), found[1] * self.factor)


class LoraAdapters:
    """The LoRA adapters of one model, and the weights that they change."""

    def __init__(self, first: Sequence[Adapter] = (), room: int = 0, rank: int = 0) -> None:
        """first: adapters that are loaded with the weights; room: slots in all, if there are to be more; rank: the highest rank of
        adapters loaded later."""
        self.first = first
        self.names = [adapter.name for adapter in first] + [""] * (room - len(first))  # or keys, by number; "": a free slot
        self._rank = rank if room > len(first) else 0
        self._changed: list[tuple[LoraMatrices, LoraTarget]] = []

    def lora(self, change: LoraTarget, weight: Sequence[int], exact: Invariance, like: Tensor) -> LoraMatrices | None:
        """What loaded adapters add to a weight [outputs, inputs], with room for later ones; like: a tensor of the type and device
        of computation."""
        pairs = [change.pair(adapter) for adapter in self.first]
        outputs, inputs = weight
        most = self._rank * change.matrices
        largest = (like.new_zeros(most, inputs), like.new_zeros(outputs, most)) if most else None
        found = low_rank.lay_out([*pairs, *[None] * (len(self.names) - len(pairs))], exact, largest)
        if found is not None and most:
            self._changed.append((found, change))
        return found

    def check(self) -> None:
        """To be called after all weights are read. Raises Unsupported if an adapter changes something else."""
        for adapter in self.first:
            adapter.check()

    @property
    def later(self) -> int:
        """Bytes that adapters in the free slots will take, at most."""
        return self.names.count("") * sum(lora.later for lora, _ in self._changed)

    def prepared(self, adapter: Adapter) -> list[Any]:
        """Another adapter's matrices, as `put` takes them; may run on any thread. Raises Unsupported."""
        if adapter.rank > self._rank:  # checked before it takes memory
            raise Unsupported(
                f"adapter {adapter.name} has rank {adapter.rank}, and there is room for {self._rank}: start the server with "
                f"--max-lora-rank {adapter.rank}"
            )
        pairs = [(lora, change.pair(adapter)) for lora, change in self._changed]
        adapter.check()
        return [pair and lora.prepared(pair) for lora, pair in pairs]

    def put(self, key: str, prepared: Sequence[Any]) -> str:
        """Puts an adapter into a free slot, for requests with this key. Returns the reason if it can't; "": it is there."""
        if "" not in self.names:
            return f"there is no room for adapter {key}: all {len(self.names)} places are taken"
        number = self.names.index("")
        for (lora, _), own in zip(self._changed, prepared, strict=True):
            lora.put(number, own)
        self.names[number] = key
        return ""

    def drop(self, key: str) -> None:
        """Frees the slot of an adapter that no request uses any more. An unknown key is ignored."""
        if key in self.names:
            number = self.names.index(key)
            self.names[number] = ""
            for lora, _ in self._changed:
                lora.put(number, None)
