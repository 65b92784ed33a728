"""Shortcut experts, beside two layers, as in LongCat Flash: they read what the first layer's MLP reads, and their output is added
together with that of the second layer's MLP (Cai et al. 2024, arXiv:2404.05019), in one all-reduce."""

from torch import Tensor

from .loader import Loader
from .mlp import MixtureOfExperts, Mlp
from .stream import Stream
from .traits import Mixture


class ShortcutStream(Stream):
    """A residual stream that holds the experts' output until it is added."""

    _held: Tensor | None = None  # this rank's part of the experts' output, [tokens, hidden]

    def hold(self, part: Tensor) -> None:
        """Holds the experts' output."""
        self._held = part

    def held(self) -> Tensor:
        """Takes the held output."""
        found, self._held = self._held, None
        assert found is not None
        return found

    def select(self, rows: Tensor) -> None:
        """See `Stream`."""
        super().select(rows)
        self._held = self._held.index_select(0, rows) if self._held is not None else None


class ShortcutExperts(MixtureOfExperts):
    """The first layer's experts and MLP, which is the shared expert. Identity experts, numbered after the others, return their
    input."""

    def __init__(self, load: Loader, mixture: Mixture) -> None:
        super().__init__(load, mixture)
        self._gives = load.ranks.rank == 0  # the all-reduced sum must have it once

    def __call__(self, stream: Stream, before: Tensor | None, behind: Tensor | None) -> None:
        """See `Mlp`."""
        assert isinstance(stream, ShortcutStream)
        assert self.shared is not None
        x = stream.normalized(before)
        stream.hold(self.made(x))
        stream.add_part(self.shared(x, stream), behind)

    def made(self, x: Tensor) -> Tensor:
        """See `MixtureOfExperts`."""
        shares, chosen = self.route(x)
        idle = chosen >= self.mixture.experts
        found = self.experts(x, shares, chosen, idle)
        return found.add_(x * (shares * idle).sum(1, keepdim=True)) if self._gives else found


class ShortcutMlp(Mlp):
    """The second layer's MLP."""

    def __call__(self, stream: Stream, before: Tensor | None, behind: Tensor | None) -> None:
        """See `Mlp`; adds the held output, too."""
        assert isinstance(stream, ShortcutStream)
        stream.add_part(self.part(stream, before).add_(stream.held()), behind)
