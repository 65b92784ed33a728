"""Runs draft heads that use the target's features alone (Medusa, MLP speculators): their logits after sequences, and after drafts
on top of them. Only the rank that samples has them.

They have no keys and values and so nothing to catch up with: of a sequence they read the features of its last computed token, where
the target's forward has written them (`Taps`), whoever has computed that page, and when.
"""

from collections.abc import Callable
from collections.abc import Sequence as Listing
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from ..kernels.linear import SAMPLES, compile_products
from ..kernels.transfer import list_to_device, lists_to_device
from .decoding.growth import Frontier
from .decoding.tree import ROOT
from .forward import GraphExtent, Record
from .models.readout_heads import ReadoutHead
from .rounds import Rounds
from .sequence import Sequence

BEFORE = ROOT - 1  # pseudo-node: the sequence without its last token


class Readout(Rounds):
    """Draft heads without a KV cache, on the rank that samples; see `speculator.DraftModel`."""

    recorded = False

    def __init__(self, head: ReadoutHead, dtype: torch.dtype, device: torch.device) -> None:
        """dtype: of features."""
        super().__init__()
        self.head = head
        self.features = head.shape.feature_elements
        self.token_bytes = self.features * dtype.itemsize
        self._device = device
        self._states = torch.empty(0, device=device)  # of all nodes of a step so far, [states, ...]
        self._nodes: dict[tuple[int, int], tuple[int, int]] = {}  # by sequence and node: its level, and the index of its state

    def resize(self, pages: int, page_size: int, features: Tensor | None = None) -> None:
        """See DraftModel."""
        assert features is not None
        self._features = features
        self._page_size = page_size

    def forget(self, pages: Listing[int]) -> None:
        """See DraftModel."""

    def compile(self, rows: int) -> None:
        """See DraftModel."""
        compile_products(self.head.weights(), rows)
        for count in SAMPLES:  # few rows use kernels of their own
            states = self._features.new_zeros(count, self.features)
            token = torch.zeros(count, dtype=torch.int64, device=self._device)
            for level in range(self.head.shape.levels):
                states = self.head.after(level, states, token)
                self.head.logits(level, states)

    def record(self, record: Record, extent: GraphExtent, progress: Callable[[str], None]) -> None:
        """See DraftModel: there is nothing to record."""

    def ready(self, sequences: Listing[Sequence]) -> list[bool]:
        """See `growth.Model`."""
        return [True] * len(sequences)

    def logits(self, wanted: Listing[Frontier]) -> Tensor:
        """See `growth.Model`. Nodes with equal states are computed once."""
        first = wanted[0].nodes[0] == ROOT  # the first round, which covers all sequences
        if first:
            self._begin([one.sequence for one in wanted])
        nodes = [(one, node) for one in wanted for node in one.nodes]
        steps = [self._step(*each) for each in nodes]
        unique = sorted(set(steps))
        states, logits = self._computed(unique)
        place, known = {step: i for i, step in enumerate(unique)}, 0 if first else len(self._states)
        self._states = states if first else torch.cat((self._states, states))
        for (one, node), step in zip(nodes, steps, strict=True):
            self._nodes[id(one.sequence), node] = step[0], known + place[step]
        if unique != steps:
            rows = list_to_device(self._device, [place[step] for step in steps])
            logits = logits.index_select(0, rows)
        self.ran(first)
        return logits

    def _begin(self, sequences: Listing[Sequence]) -> None:
        """The states before the last token are the target's features."""
        slots = list_to_device(self._device, [one.slot(len(one.tokens) - 2, self._page_size) for one in sequences])
        self._states = self._features.index_select(0, slots)
        self._nodes = {(id(sequence), BEFORE): (-1, row) for row, sequence in enumerate(sequences)}

    def _step(self, one: Frontier, node: int) -> tuple[int, int, int]:
        """How a node's state is computed: its level, the state before it, and the token between them, if the head uses it."""
        parent, token = (one.parents[node], one.tokens[node]) if node != ROOT else (BEFORE, one.sequence.tokens[-1])
        level, row = self._nodes[id(one.sequence), parent]
        return level + 1, row, token if self.head.by_tokens else 0

    def _computed(self, steps: Listing[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
        """The states of these steps, and logits. Levels come one after the other."""
        states, logits = list[Tensor](), list[Tensor]()
        for level, own in groupby(steps, key=itemgetter(0)):
            _, rows, tokens = zip(*own, strict=True)
            before, between = lists_to_device(self._device, rows, tokens)
            states.append(self.head.after(level, self._states.index_select(0, before), between))
            logits.append(self.head.logits(level, states[-1]))
        return torch.cat(states), torch.cat(logits)
