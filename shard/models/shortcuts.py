"""Experts beside two layers, as in LongCat Flash: they see what the first one's MLP sees, and what they make is added with what the
second one's MLP makes (Cai et al. 2024, arXiv:2404.05019). One sum of all ranks is for both."""

from torch import Tensor

from .loader import Loader
from .mlp import MixtureOfExperts, Mlp
from .stream import Stream
from .traits import Mixture


class ShortcutStream(Stream):
    """As one, beside which something waits to be added."""

    _held: Tensor | None = None  # this rank's part of it, [tokens, hidden]

    def hold(self, part: Tensor) -> None:
        """Lets it wait."""
        self._held = part

    def held(self) -> Tensor:
        """What waited."""
        found, self._held = self._held, None
        assert found is not None
        return found

    def select(self, rows: Tensor) -> None:
        """As of `Stream`."""
        super().select(rows)
        self._held = self._held.index_select(0, rows) if self._held is not None else None


class Shortcut(MixtureOfExperts):
    """The first layer's, whose MLP is the one for all tokens. Experts behind the last one give back what they see."""

    def __init__(self, load: Loader, mixture: Mixture) -> None:
        super().__init__(load, mixture)
        self._gives = load.ranks.rank == 0  # the sum of all ranks has it once

    def __call__(self, stream: Stream, before: Tensor | None, behind: Tensor | None) -> None:
        """As that of `Mlp`."""
        assert isinstance(stream, ShortcutStream)
        assert self.shared is not None
        x = stream.normalized(before)
        stream.hold(self.made(x))
        stream.add_part(self.shared(x, stream), behind)

    def made(self, x: Tensor) -> Tensor:
        """As that of `MixtureOfExperts`."""
        shares, chosen = self.route(x)
        idle = chosen >= self.mixture.experts
        found = self.experts(x, shares, chosen, idle)
        return found.add_(x * (shares * idle).sum(1, keepdim=True)) if self._gives else found


class Rejoined(Mlp):
    """The second layer's MLP."""

    def __call__(self, stream: Stream, before: Tensor | None, behind: Tensor | None) -> None:
        """As that of `Mlp`, with what waited."""
        assert isinstance(stream, ShortcutStream)
        stream.add_part(self.part(stream, before).add_(stream.held()), behind)
