"""Features that a draft model computed for the drafts of a step, as input for drafts on top of those: see `drafter`."""

from collections.abc import Sequence as Listing

import torch
from torch import Tensor

from ..kernels.transfer import lists_to_device
from .decoding.growth import Frontier
from .decoding.tree import ROOT
from .step import Span


class DraftOutputs:
    """Output features of all draft nodes of a step, and of the last tokens they are on top of."""

    def __init__(self, features: Tensor, page_size: int) -> None:
        """features: [slots, features], the target's cache, where a token reads those of the one before it."""
        self._features = features
        self._page_size = page_size
        self._found: Tensor | None = None  # [nodes so far, features]
        self._rows: dict[tuple[int, int], int] = {}  # rows of `_found`, by sequence and node

    def put(self, wanted: Listing[Frontier], spans: Listing[Span], nodes: Listing[Listing[int]]) -> None:
        """Writes the features of their parents for the nodes that are computed next, of each span."""
        if wanted[0].nodes[0] == ROOT:  # the first round, which covers all sequences
            return
        pairs = [
            (span.sequence.slot(place, self._page_size), self._rows[id(one.sequence), one.parents[node]])
            for one, span, own in zip(wanted, spans, nodes, strict=True)
            for place, node in enumerate(own, span.start)
        ]
        slots, rows = lists_to_device(self._features.device, *zip(*pairs, strict=True))
        assert self._found is not None
        self._features.index_copy_(0, slots, self._found.index_select(0, rows))

    def keep(self, wanted: Listing[Frontier], hidden: Tensor) -> None:
        """hidden: of the wanted nodes, [nodes, features], valid until the next call of the model."""
        if wanted[0].nodes[0] == ROOT:
            self._found, self._rows = None, {}
        first = len(self._rows)
        keys = [(id(one.sequence), node) for one in wanted for node in one.nodes]
        self._rows |= {key: row for row, key in enumerate(keys, first)}
        self._found = hidden.clone() if self._found is None else torch.cat((self._found, hidden))
