"""Hash-routed experts: a table maps token ids to experts (hash layers: Roller et al. 2021, arXiv:2106.04426), as in DeepSeek V4,
whose router gives their weights alone."""

import torch
from torch import Tensor

from ...kernels.experts import weights_of_chosen
from .fields import AGAIN
from .hyper_stream import HyperStream
from .loader import Loader
from .mlp import MixtureOfExperts
from .shape import Unsupported
from .stream import Stream
from .traits import Mixture


class HashRoutedExperts(MixtureOfExperts):
    """A mixture of experts with hash routing."""

    def __init__(self, load: Loader, mixture: Mixture) -> None:
        super().__init__(load, mixture)
        self.table = _table(load, load.prefix + self.mixture.named("gate.tid2eid"), mixture)

    def part(self, stream: Stream, before: Tensor | None) -> Tensor:
        """See `MixtureOfExperts`."""
        assert isinstance(stream, HyperStream)
        assert stream.tokens is not None
        x = stream.normalized(before)
        chosen = self.table.index_select(0, stream.tokens).long()
        mixture, logits = self.mixture, self.router(x.float())
        shares = weights_of_chosen(logits, chosen, mixture.factor, mixture.least, rooted=mixture.scores == "sqrtsoftplus")
        made = self.experts(x, shares, chosen)
        return made if self.shared is None else made.add_(self.shared(x, stream), alpha=mixture.shared_factor)


def _table(load: Loader, name: str, mixture: Mixture) -> Tensor:
    """The experts of each token id: [vocabulary, chosen] int32; made up where weights are random."""
    full = load.shape.vocabulary, mixture.chosen
    if not load.source.has(name):
        if load.source.has(f"{load.prefix}input_layernorm.weight"):
            raise Unsupported(f"there is no tensor {name}: is the download complete, and config.json the model's own?")
        numbers = torch.arange(full[0], device=load.source.device).unsqueeze(1) * 7 + torch.arange(
            full[1], device=load.source.device
        )
        return (numbers % mixture.experts).int()
    found = load.source.stored(name, ("I64", "I32"))
    if found.shape != full or not bool(((found >= 0) & (found < mixture.experts)).all()):
        raise Unsupported(
            f"tensor {name} is {list(found.shape)}, {list(full)} numbers of {mixture.experts} experts are needed: {AGAIN}"
        )
    return found.int()
