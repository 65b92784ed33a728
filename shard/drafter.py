"""Runs a draft model for speculative decoding: its logits after sequences, and after drafts on top of them. Only the rank that
samples has one.

It has a KV cache of its own with the same page numbers as the target's: where a sequence's keys and values are in the target's
cache, the draft model's are in its own. They are not always there, since prompts are computed, found in the prefix cache and
resumed without it: every sequence knows how far the draft model has come, and a round begins with the tokens it lacks. Nothing here
can change an output token, only how good drafts are.

A draft model trained for its target (EAGLE, MTP) takes tokens together with the target's features of the token before each
(`DraftFeatures`). What it computes of a token is stored where the target's features of the one before are: everything is one place
further to the front, and the first token has none. It reads features there, where the target has written them; below drafts, which
the target has not computed, its own outputs for their parents are put there until the target computes them. What is computed for a
page's last place depends on the token after it, which others that share the page may not have: they use what is there.
"""

from collections.abc import Callable
from collections.abc import Sequence as Listing

import torch
from torch import Tensor
from torch.nn import functional

from .cache import Cache
from .decoding.growth import Frontier
from .decoding.tree import ROOT
from .draft_outputs import DraftOutputs
from .draft_progress import DraftProgress
from .forward import Forward, GraphExtent, Record
from .models.decoder import Decoder
from .rounds import Rounds
from .sequence import Sequence
from .step import Span

SHORT = 64  # tokens that a sequence may lack when drafts are wanted: they are computed in the same pass
CATCH_UP = 512  # tokens beyond that which are computed in a step; sequences that lack more have to wait for their drafts


class Drafter(Rounds):
    """A draft model with a KV cache of its own, on the rank that samples; see `speculator.DraftModel`."""

    recorded = True

    def __init__(self, decoder: Decoder, vocabulary: int, device: torch.device, reach: int) -> None:
        """vocabulary: the target's; reach: depth of the deepest tree, whose nodes must have positions that the draft model
        supports."""
        super().__init__()
        self.decoder = decoder
        self.device = device
        self._vocabulary = vocabulary
        # longest sequence with drafts; the last of these tokens is not computed
        self._longest = decoder.shape.max_positions - reach + 1
        self._skipped = int(decoder.shape.features is not None)  # tokens at the beginning of each sequence that it doesn't compute
        self.resize(0, 1)

    def resize(self, pages: int, page_size: int, features: Tensor | None = None) -> None:
        """See DraftModel."""
        self.cache = Cache(self.decoder.shape, 1, pages, page_size, self.decoder.embedding.dtype, self.device)
        self.cache.features = features
        self._made = DraftOutputs(features, page_size) if features is not None else None
        self.forward = Forward(self.decoder, self.cache)
        self._full: set[int] = set()  # pages in which it has computed all keys and values
        self._before = 0  # spans of the last round

    @property
    def token_bytes(self) -> int:
        """See DraftModel."""
        shape = self.decoder.shape
        return (shape.kv_elements(1) + shape.feature_elements) * self.decoder.embedding.dtype.itemsize

    @property
    def features(self) -> int:
        """See DraftModel."""
        return self.decoder.shape.feature_elements

    def forget(self, pages: Listing[int]) -> None:
        """See DraftModel."""
        self._full.difference_update(pages)
        self.cache.clear(pages)

    def compile(self, rows: int) -> None:
        """See DraftModel."""
        self.decoder.compile(rows)

    def record(self, record: Record, extent: GraphExtent, progress: Callable[[str], None]) -> None:
        """See DraftModel."""
        self.forward.record(record, extent, progress)

    def ready(self, sequences: Listing[Sequence]) -> list[bool]:
        """See `growth.Model`."""
        spans, left = [], CATCH_UP
        for sequence in sequences:
            draft_progress = self._follow(sequence)
            lacking = len(self._own(sequence)) - draft_progress.computed
            if lacking > SHORT and left and len(sequence.tokens) <= self._longest:
                spans.append(self._advance(sequence, draft_progress, min(left, lacking - 1), wanted=0))
                left -= len(spans[-1].tokens)
        if spans:
            self.forward(spans)
        return [self._able(sequence) for sequence in sequences]

    def _able(self, sequence: Sequence) -> bool:
        assert sequence.draft_progress is not None
        return len(self._own(sequence)) - sequence.draft_progress.computed <= SHORT and len(sequence.tokens) <= self._longest

    def _own(self, sequence: Sequence) -> memoryview:
        """A sequence's tokens that the draft model computes."""
        return memoryview(sequence.tokens)[self._skipped :]

    def _follow(self, sequence: Sequence) -> DraftProgress:
        draft_progress = sequence.draft_progress = sequence.draft_progress or DraftProgress()
        size, final = self.cache.page_size, sequence.node.depth if sequence.node else 0
        tokens = self._own(sequence)
        if self._made:
            draft_progress.drafts = []  # computed from its own outputs; now the target's features are there
        filled = draft_progress.accept(tokens, size)
        self._full.update(page for page in filled if page in sequence.pages)  # else another page took its place meanwhile
        draft_progress.look(len(tokens) - 1, sequence.pages, size, self._full, final)
        return draft_progress

    def logits(self, wanted: Listing[Frontier]) -> Tensor:
        """See `growth.Model`. Pages for all nodes are allocated."""
        spans: list[Span] = []
        nodes: list[Listing[int]] = []  # of each span's wanted rows
        rows: list[int] = []
        first = 0
        for one in wanted:
            span, own = self._span(one)
            spans.append(span)
            nodes.append(own)
            rows += [first + own.index(node) for node in one.nodes]
            first += span.wanted
        if self._made:
            self._made.put(wanted, spans, nodes)
        hidden = self.forward.follow(spans) if self._go_on(wanted, spans) else self.forward(spans)
        hidden = hidden if len(rows) == len(hidden) else hidden[rows]
        if self._made:
            self._made.keep(wanted, hidden)
        found = self.decoder.logits(hidden)
        assert found is not None
        self.ran(first=wanted[0].nodes[0] == ROOT)
        lacking = self._vocabulary - found.shape[1]
        return functional.pad(found, (0, lacking), value=-torch.inf) if lacking > 0 else found[:, : self._vocabulary]

    def _go_on(self, wanted: Listing[Frontier], spans: list[Span]) -> bool:
        """Whether all spans are one more token of the chains of the last round."""
        before, self._before = self._before, len(spans)  # some of the last round's sequences may be missing, and none is new
        return len(spans) == before and all(
            one.nodes[0] != ROOT and own.parents is None for one, own in zip(wanted, spans, strict=True)
        )

    def _span(self, one: Frontier) -> tuple[Span, Listing[int]]:
        """The span to be computed, and the nodes of its wanted rows, ascending. A chain continues what is computed; in a tree the
        whole path to the nodes is computed anew, so that each attends to its ancestors alone."""
        sequence, end = one.sequence, len(self._own(one.sequence))
        draft_progress, [last, *others] = sequence.draft_progress, one.nodes
        assert draft_progress is not None
        if last == ROOT:
            span = self._advance(sequence, draft_progress, end - draft_progress.computed, wanted=1)
            draft_progress.draft_pages = sequence.pages[end // self.cache.page_size :]
            return span, one.nodes
        if not others and last == len(draft_progress.drafts) and list(one.parents[: last + 1]) == list(range(ROOT, last)):
            draft_progress.drafts.append(one.tokens[last])
            return Span(sequence, end + last, self._known(one.tokens[last : last + 1])), one.nodes
        draft_progress.drafts = []
        needed = sorted(_with_ancestors(one))
        place = {ROOT: ROOT} | {node: i for i, node in enumerate(needed)}
        parents = [place[one.parents[node]] for node in needed]
        tokens = self._known([one.tokens[node] for node in needed])
        return Span(sequence, end, tokens, parents=parents, wanted=len(needed)), needed

    def _advance(self, sequence: Sequence, draft_progress: DraftProgress, count: int, wanted: int) -> Span:
        """A span of the next `count` tokens of the sequence."""
        start, size = draft_progress.computed, self.cache.page_size
        draft_progress.computed += count
        self._full.update(sequence.pages[start // size : draft_progress.computed // size])
        return Span(sequence, start, self._known(self._own(sequence)[start : draft_progress.computed]), wanted=wanted)

    def _known(self, tokens: Listing[int]) -> list[int]:
        """Token ids within the draft model's embedding: if it is not padded like the target's, it lacks ids that no text has."""
        most = len(self.decoder.embedding) - 1
        return [min(token, most) for token in tokens]


def _with_ancestors(one: Frontier) -> set[int]:
    found: set[int] = set()
    for node in one.nodes:
        while node != ROOT and node not in found:
            found.add(node)
            node = one.parents[node]
    return found
