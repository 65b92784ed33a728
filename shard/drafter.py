"""A draft model at work: its logits after sequences, and after drafts on top of them. Only the rank that samples has one.

It has keys and values of its own, in a second cache with the same page numbers: where a sequence's keys and values are in the
target's cache, there the draft model's are in its own. What is in its pages is not always there, since prompts are computed, found
and restored without it: every sequence has a sketch of how far the draft model has come, and a round begins with what it lacks.
Nothing here can change a token, only how good guesses are.
"""

import time
from collections.abc import Sequence as Listing

import torch
from torch import Tensor
from torch.nn import functional

from .cache import Cache
from .decoding.growth import Frontier
from .decoding.tree import ROOT
from .forward import Forward, layout_of
from .models.decoder import Decoder
from .sequence import Sequence
from .sketch import Sketch
from .step import Span

SHORT = 64  # tokens that a sequence may lack when drafts are wanted: they are computed on the way to these
CATCH_UP = 512  # tokens beyond that which are computed in a step; sequences that lack more have to wait for their drafts


class Drafter:
    """See `growth.Model`. `rounds` counts forwards that drafts were grown from; `later` are the seconds of those that were not a
    step's first, which has to catch up with the model, with all that was done since the one before."""

    def __init__(self, decoder: Decoder, vocabulary: int, device: torch.device, reach: int) -> None:
        """vocabulary: the target's; reach: how deep a tree may be, so that its nodes have positions that the draft model knows."""
        self.decoder = decoder
        self.device = device
        self.rounds = 0
        self.later = 0.0
        self._ended = 0.0
        self._vocabulary = vocabulary
        self._longest = decoder.shape.max_positions - reach + 1  # sequence with drafts; the last of these it does not compute
        self.resize(0, 1)

    def resize(self, pages: int, page_size: int) -> None:
        """Starts anew with an empty cache of that size."""
        self.cache = Cache(self.decoder.shape, 1, pages, page_size, self.decoder.embedding.dtype, self.device)
        self.forward = Forward(self.decoder, self.cache, layout_of(self.decoder, page_size, self.device))
        self._full: set[int] = set()  # pages in which all keys and values are there
        self._before = 0  # spans of the last round

    @property
    def token_bytes(self) -> int:
        """What keys and values of a token take."""
        return self.decoder.shape.kv_elements(1) * self.decoder.embedding.dtype.itemsize

    def forget(self, pages: Listing[int]) -> None:
        """What is in these pages is nobody's any more."""
        self._full.difference_update(pages)
        self.cache.clear(pages)

    def ready(self, sequences: Listing[Sequence]) -> list[bool]:
        """See `growth.Model`."""
        spans, left = [], CATCH_UP
        for sequence in sequences:
            sketch = self._follow(sequence)
            lacking = len(sequence.tokens) - sketch.computed
            if lacking > SHORT and left and len(sequence.tokens) <= self._longest:
                spans.append(self._advance(sequence, sketch, min(left, lacking - 1), wanted=0))
                left -= len(spans[-1].tokens)
        if spans:
            self.forward(spans)
        return [self._able(sequence) for sequence in sequences]

    def _able(self, sequence: Sequence) -> bool:
        assert sequence.sketch is not None
        return len(sequence.tokens) - sequence.sketch.computed <= SHORT and len(sequence.tokens) <= self._longest

    def _follow(self, sequence: Sequence) -> Sketch:
        sketch = sequence.sketch = sequence.sketch or Sketch()
        size, final = self.cache.page_size, sequence.node.depth if sequence.node else 0
        filled = sketch.accept(sequence.tokens, size)
        self._full.update(page for page in filled if page in sequence.pages)  # else another's took its place meanwhile
        sketch.look(len(sequence.tokens) - 1, sequence.pages, size, self._full, final)
        return sketch

    def logits(self, wanted: Listing[Frontier]) -> Tensor:
        """See `growth.Model`. Pages for all nodes are there."""
        self.rounds += 1
        spans: list[Span] = []
        rows: list[int] = []
        first = 0
        for one in wanted:
            span, places = self._span(one)
            spans.append(span)
            rows += [first + place for place in places]
            first += span.wanted
        hidden = self.forward.follow(spans) if self._go_on(wanted, spans) else self.forward(spans)
        found = self.decoder.logits(hidden if len(rows) == len(hidden) else hidden[rows])
        assert found is not None
        now = time.perf_counter()
        self.later += now - self._ended if wanted[0].nodes[0] != ROOT else 0.0
        self._ended = now
        lacking = self._vocabulary - found.shape[1]
        return functional.pad(found, (0, lacking), value=-torch.inf) if lacking > 0 else found[:, : self._vocabulary]

    def _go_on(self, wanted: Listing[Frontier], spans: list[Span]) -> bool:
        """Whether all are one token more of the chains of the last round."""
        before, self._before = self._before, len(spans)  # of the last round's sequences some may be missing, and none is new
        return len(spans) == before and all(
            one.nodes[0] != ROOT and own.parents is None for one, own in zip(wanted, spans, strict=True)
        )

    def _span(self, one: Frontier) -> tuple[Span, list[int]]:
        """What has to be computed, and which of its wanted rows are asked for. A chain goes on from what is computed; of a tree all
        that leads to the nodes is computed anew, so that each sees its ancestors alone."""
        sequence, end = one.sequence, len(one.sequence.tokens)
        sketch, [last, *others] = sequence.sketch, one.nodes
        assert sketch is not None
        if last == ROOT:
            span = self._advance(sequence, sketch, end - sketch.computed, wanted=1)
            sketch.behind = sequence.pages[end // self.cache.page_size :]
            return span, [0]
        if not others and last == len(sketch.ahead) and list(one.parents[: last + 1]) == list(range(ROOT, last)):
            sketch.ahead.append(one.tokens[last])
            return Span(sequence, end + last, self._known(one.tokens[last : last + 1])), [0]
        sketch.ahead = []
        needed = sorted(_with_ancestors(one))
        place = {ROOT: ROOT} | {node: i for i, node in enumerate(needed)}
        parents = [place[one.parents[node]] for node in needed]
        tokens = self._known([one.tokens[node] for node in needed])
        return Span(sequence, end, tokens, parents, len(needed)), [place[node] for node in one.nodes]

    def _advance(self, sequence: Sequence, sketch: Sketch, count: int, wanted: int) -> Span:
        """The next so many of the sequence's own tokens."""
        start, size = sketch.computed, self.cache.page_size
        sketch.computed += count
        self._full.update(sequence.pages[start // size : sketch.computed // size])
        return Span(sequence, start, self._known(sequence.tokens[start : sketch.computed]), wanted=wanted)

    def _known(self, tokens: Listing[int]) -> list[int]:
        """A table that the draft model's maker did not pad as the target's is too short for ids that no text has."""
        most = self.decoder.shape.vocabulary - 1
        return [min(token, most) for token in tokens]


def _with_ancestors(one: Frontier) -> set[int]:
    found: set[int] = set()
    for node in one.nodes:
        while node != ROOT and node not in found:
            found.add(node)
            node = one.parents[node]
    return found
