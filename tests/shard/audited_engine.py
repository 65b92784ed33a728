"""An engine with a fake model and a fake KV cache that records what was computed in each slot: every step is checked against that,
and the engine's bookkeeping is audited.

Each token is a function of those before it, so the same request always gets the same answer. Runs thousands of steps a second.
"""

import zlib
from collections import Counter
from collections.abc import Container, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.shard import engine as engine_module
from penstock.shard.books import Books
from penstock.shard.decoding.expansion import Candidate
from penstock.shard.decoding.hypotheses import candidates_of
from penstock.shard.decoding.methods import strategy_of
from penstock.shard.decoding.sampler import PendingPicks, Pick
from penstock.shard.engine import Engine
from penstock.shard.logits import StepPicks
from penstock.shard.models.lora import LoraAdapters
from penstock.shard.pages import PADDING
from penstock.shard.sequence import Group
from penstock.shard.step import DeviceSamples, Run, Span

CPU = torch.device("cpu")
VOCABULARY = 4  # tokens that are sampled
KEPT = 3  # recurrent states that the prefix cache keeps
POISON = 9  # a token after which the logits of the sequence are not finite

Content = tuple[str, tuple[int, ...]] | None  # cache key and all tokens up to and including this one; None: zeros


class FakeCache:
    """Stands in for the KV cache and the recurrent states."""

    def __init__(self, page_size: int, states: int = 0) -> None:
        self.page_size = page_size
        self.content: dict[int, Content] = {}
        self.evicted = 0
        self.slots = states
        self.states: dict[int, Content] = dict.fromkeys(range(1, states + 1))  # the tokens that each state covers

    def clear(self, pages: Sequence[int], inherited: Container[int] = ()) -> None:
        for page in [page for page in pages if page not in inherited]:
            for place in range(self.page_size):
                self.content[page * self.page_size + place] = None

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        for source, page, rows in copies:
            for place in range(rows):
                self.content[page * self.page_size + place] = self.content[source * self.page_size + place]

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        assert not {source for source, _ in copies} & {target for _, target in copies}
        for source, target in copies:
            self.states[target] = self.states[source]


class FakeHostPages:
    """Stands in for offloaded pages in the host's memory."""

    def __init__(self, slots: FakeCache, places: int) -> None:
        self.places = places
        self.loaded = 0
        self._slots = slots
        self._held: dict[int, list[Content]] = {}

    def save(self, moves: Sequence[tuple[int, int]]) -> None:
        size, content = self._slots.page_size, self._slots.content
        for page, place in moves:
            self._held[place] = [content[page * size + i] for i in range(size)]

    def load(self, moves: Sequence[tuple[int, int]]) -> None:
        size, content = self._slots.page_size, self._slots.content
        for place, page in moves:
            self.loaded += 1
            content |= {page * size + i: self._held[place][i] for i in range(size)}


class FakeModel:
    """Stands in for the decoder: writes all slots of a step, then checks the slots that its rows attend to."""

    shape = SimpleNamespace(
        max_positions=1 << 20,
        layers=1,
        expandable=None,
        windows=(0,),
        softcap=0.0,
        image_factor=1.0,
        whole_images=(),
        chunked=False,
        chunk=0,
        sinks=False,
        heads=1,
        kv_heads=1,
        head_size=1,
        vocabulary=POISON + 1,
        latent=None,
        compressed=None,
        recurrent=None,
        kept_states=lambda sequences, caching: 0,
        attending=[0],
        keyed=[0],
        kv_shared_layers=0,
        index=None,
        cached_size=lambda window: 1,
        query_heads=lambda window: 1,
        key_heads=lambda ranks, window: 1,
        slot=lambda ranks, layer: (2, 1, 1),
        kv_elements=lambda ranks: 2,
        blocks=None,
        ngrams=None,
        pool=0,
        most=0,
    )
    ranks = SimpleNamespace(size=1, rank=0)
    embedding = torch.zeros(1)
    adapters = LoraAdapters()
    invariant = False

    def __init__(self) -> None:
        self.engine: Any = None

    def __call__(self, spans: Sequence[Span], cache: FakeCache, picked: DeviceSamples | None) -> torch.Tensor:
        size, written = cache.page_size, set()
        named = [(span, *self.tokens_and_pages(span, picked)) for span in spans]
        for span in spans:
            if span.front is not None:
                self.inherit(span, cache, picked)
        for span, tokens, pages in named:
            for place in range(span.start, span.start + len(span.tokens)):
                slot = pages[place // size] * size + place % size
                assert slot >= size * (PADDING + 1)
                assert slot not in written, "two tokens are written to one slot"
                assert cache.content[slot] is None, "a token is written to a slot in use"
                written.add(slot)
                cache.content[slot] = span.sequence.cache_key, tokens[: place + 1]
        if cache.states:
            self.update_states([(span, tokens) for span, tokens, _ in named], cache)
        for span, tokens, pages in named:
            for place in range(span.start + len(span.tokens)):
                slot = pages[place // size] * size + place % size
                assert cache.content[slot] == (span.sequence.cache_key, tokens[: place + 1]), (
                    "a token attends to a slot with other content than its prefix"
                )
        return torch.zeros(sum(span.wanted for span in spans), 1)

    @staticmethod
    def update_states(spans: Sequence[tuple[Span, tuple[int, ...]]], cache: FakeCache) -> None:
        """Checks that the sequences' states cover the tokens before the spans, and updates them."""
        assert len({span.sequence.state for span, _ in spans}) == len(spans), "two sequences share a state slot"
        for span, tokens in spans:
            slot, end = span.sequence.state, span.start + len(span.tokens)
            assert not span.start or cache.states[slot] == (span.sequence.cache_key, tokens[: span.start])
            cache.states[slot] = span.sequence.cache_key, tokens[:end]

    @staticmethod
    def inherit(span: Span, cache: FakeCache, picked: DeviceSamples | None) -> None:
        """Copies the parent's partial page to an heir."""
        assert span.front is not None
        assert picked is not None
        assert picked.parents is not None
        full, rows = divmod(span.start, cache.page_size)
        cache.clear(span.sequence.pages[full:])
        if rows:
            parent = span.front.beams[int(picked.parents[span.source])]
            cache.copy([(parent.pages[full], span.sequence.pages[full], rows)])

    @staticmethod
    def tokens_and_pages(span: Span, picked: DeviceSamples | None) -> tuple[tuple[int, ...], Sequence[int]]:
        """All tokens of a span's sequence, including the one that only the device knows, and its pages."""
        tokens, pages = tuple(span.sequence.tokens), span.sequence.pages
        if span.source < 0:
            return tokens, pages
        assert picked is not None
        if span.front is not None:
            assert picked.parents is not None
            parent = int(picked.parents[span.source])
            tokens, pages = tuple(span.front.beams[parent].tokens), span.front.pages_of(span.sequence, parent)
            settled = {tuple(beam.pages[: span.front.settled]) for beam in span.front.beams}
            assert settled == {tuple(pages[: span.front.settled])}
        assert len(tokens) == span.start, "the span's token is known on the host"
        return (*tokens, max(0, int(picked.tokens[span.source]))), pages


def choose(decoder: object, runs: Sequence[Run], hidden: object, *rest: object) -> StepPicks:
    """Stands in for `logits.choose`: each token is a hash of the tokens before it."""

    def draw(row: Any) -> Pick | None:
        key = repr((list(row.tokens), row.choice, row.sampling.seed))
        return None if POISON in row.tokens else Pick(zlib.crc32(key.encode()) % VOCABULARY, 0.0)

    sampled = [run.group for run in runs if run.sampled]
    found = {
        group.uid: candidates(group) if group.search else [draw(row) for row in strategy_of(group).rows(group)] for group in sampled
    }
    rows = [row for group in sampled if group.search for row in heirs(group, found[group.uid])]
    rows += [(pick.token if pick else -1, 0) for group in sampled if not group.search for pick in found[group.uid]]
    tokens, parents = torch.tensor(rows, dtype=torch.int64).view(-1, 2).unbind(1)
    return PendingPicks(lambda: DeviceSamples(tokens, parents), lambda: None, lambda: found)


def candidates(group: Group) -> list[Pick | None]:
    """Candidates of a beam search: the score of each continuation is a function of its tokens."""
    if any(POISON in sequence.tokens for sequence in group.sequences):
        return [None]
    assert group.search is not None
    found = []
    for row, sequence in enumerate(group.sequences):
        assert sequence.path is not None
        for token in range(POISON):
            logprob = -1 - zlib.crc32(repr((list(sequence.tokens), token)).encode()) / (1 << 32)
            found.append(Candidate(token, logprob, (), False, row, sequence.path.score + logprob))
    best = sorted(found, key=lambda one: -one.score)[: candidates_of(group.search.width, len(group.end_ids))]
    return [*best]


def heirs(group: Group, found: Sequence[Pick | None]) -> list[tuple[int, int]]:
    """Tokens and parents of the surviving beams, padded with zeros to the search's width."""
    assert group.search is not None
    living = [(one.token, one.row) for one in found if isinstance(one, Candidate) and one.token not in group.end_ids]
    return [*living, *[(0, 0)] * group.search.width][: group.search.width]


class AuditedEngine(Engine):
    """Audits its own bookkeeping after every step."""

    def __init__(
        self, pages: int, page_size: int, prefix_caching: bool = True, ahead: bool = False, states: int = 0, copies: int = 0
    ) -> None:
        """states: the model has recurrent states, for so many sequences; copies: places for offloaded pages on the host."""
        self._states, self._copies = states, copies
        super().__init__(FakeModel(), CPU, page_size, prefix_caching, overlap=ahead)  # type: ignore[arg-type]
        self.resize(pages)
        self.evictions = self.computed = 0

    def resize(self, pages: int, sequences: int = 0) -> None:  # type: ignore[override]
        super().resize(pages, sequences)
        self.cache: Any = FakeCache(self.page_size, self._states)
        self.host: Any = FakeHostPages(self.cache, self._copies)
        kept_states = 0 if self._states else None
        self.books = Books(self.pool, self.cache, self._prefix_caching, kept_states, self.host if self._copies else None)
        if self._states and self.books.prefixes.enabled:
            self.books.prefixes.most = KEPT
        self.forward: Any = lambda spans, picked=None: self.decoder(spans, self.cache, picked)
        evicted = self.pool.evicted

        def count(page: int) -> None:
            self.evictions += 1
            evicted(page)

        self.pool.evicted = count

    def land(self) -> None:
        flight = self._flight
        super().land()
        if flight is not None:
            self.computed += flight.outcome.prompt_tokens
            self.audit()

    def audit(self) -> None:
        pool, size = self.pool, self.pool.page_size
        sequences = [sequence for group in self.books.groups.values() for sequence in group.sequences]
        references = Counter(page for sequence in sequences for page in sequence.pages)
        assert not any(group.heirs for group in self.books.groups.values())
        assert {page: count for page, count in enumerate(pool._references) if count} == references
        assert pool.free == pool.pages - len(references)
        for group in self.books.groups.values():
            pages = {page for sequence in group.sequences for page in sequence.pages}
            assert group.reported == (len(pages), self.most(group) - len(pages), group.lacking)
            assert min(group.reported) >= 0
            for sequence in group.sequences:
                assert len(sequence.pages) == -(-sequence.computed // size)
        for page, node in self.books.prefixes._nodes.items():
            assert all(self.cache.content[page * size + place] is not None for place in range(size)), (
                "a cached page is not computed"
            )
            assert node.parent is not None
            assert references[node.parent.page] >= references[page] or not node.parent.depth, (
                "a page is held without its predecessor"
            )
        assert {node.state: node for node in self.books.prefixes._nodes.values() if node.state} == self.books.prefixes.states
        for slot, node in self.books.prefixes.states.items():
            assert self.cache.states[slot] == self.cache.content[(node.page + 1) * size - 1], (
                "a kept state covers other tokens than its page"
            )

    def most(self, group: Any) -> int:
        """Pages that the group needs for its next two decode steps; shared pages count once."""
        size, full = self.pool.page_size, group.prompt_length // self.pool.page_size
        if not group.decodes:
            return int(group.worst(size))
        last = group.prompt_length + group.max_new_tokens - 1
        own = {page for sequence in group.sequences for page in sequence.pages}
        assert full <= len(own)
        if group.search is not None:
            return len(own) + int(group.standing(size)[1])
        return len(own) + sum(-(-min(s.computed + 2, last) // size) - len(s.pages) for s in group.sequences)


@pytest.fixture
def audited_engine(monkeypatch: pytest.MonkeyPatch) -> type[AuditedEngine]:
    """The engine, with steps that compute no tensors."""
    monkeypatch.setattr(engine_module, "choose", choose)
    monkeypatch.setattr(engine_module, "score_prompts", lambda *rest: None)
    return AuditedEngine
