"""Input preparation: turns spans of token ids into the tensors of one forward. The only place where lists become tensors for it."""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from ..kernels import attention, batch_invariant, expanded, lookahead, ragged, shared_prefixes, work_list
from ..kernels.dispatch import triton_on
from ..kernels.layout import AttentionLayout
from ..kernels.spans import Spans
from ..kernels.transfer import copy_into, lists_to_device, to_device
from .pages import PADDING
from .pictures import AXES, PromptImage
from .sequence import Group, Sequence

if TYPE_CHECKING:
    from ..kernels import paged_attention  # which imports Triton


@dataclass(slots=True, eq=False)  # compared by identity
class BeamFront:
    """A group's beams, while only the device knows which of them the next ones continue."""

    beams: Listing[Sequence]
    settled: int  # full pages that all of them share from the start

    def pages_of(self, heir: Sequence, parent: int) -> "array[int]":
        """Pages of an heir that continues beam number `parent`: the parent's full pages, and a page of its own."""
        return self.beams[parent].pages[: len(heir.pages) - 1] + heir.pages[-1:]


@dataclass(frozen=True, slots=True)
class DeviceSamples:
    """Tokens sampled by the step before, on the device, where the host doesn't know them yet."""

    tokens: Tensor  # [rows] int64; -1: none could be sampled
    parents: Tensor | None = None  # beam search, [rows] int64: index of the beam of the group that each continues; None: no beams


@dataclass(slots=True)  # many per step: frozen ones take three times as long to make
class Span:
    """Consecutive tokens of a sequence to be computed in one step: a chunk of a prompt, the last sampled token, or a token with its
    drafts. Their pages are allocated. The tokens before them are computed, or are in another span of the same step."""

    sequence: Sequence
    start: int  # tokens before them
    tokens: Listing[int]
    source: int = -1  # if its one token isn't known to the host: its row among what the step before has sampled
    front: BeamFront | None = None  # it continues one of these beams: that one's full pages take the place of its sequence's
    # of a draft tree, per token: index of its parent in `tokens`, -1: the token before; None: a chain
    parents: Listing[int] | None = None
    wanted: int = 1  # for how many of the last tokens logits are wanted
    drafts: int = 0  # how many of the last tokens are drafts
    whole: bool = False  # it is an image, or the rest of one, with bidirectional attention in some layers: see `parted`


@dataclass(slots=True)
class Run:
    """A group's part of a step."""

    group: Group
    spans: list[Span]
    sampled: bool  # its last wanted rows are sampled
    found: int = 0  # tokens found in the prefix cache, which are not in `spans`
    problem: str = ""  # why the group can't go on; its `spans` are computed all the same, since others may rely on them
    first: int = 0  # index of its first wanted row in the step

    @property
    def tokens(self) -> int:
        """Query tokens."""
        return sum(len(span.tokens) for span in self.spans)

    @property
    def keys(self) -> int:
        """Keys that they attend to, without sliding windows: each itself and all before it."""
        return sum(len(span.tokens) * (2 * span.start + len(span.tokens) + 1) // 2 for span in self.spans)

    @property
    def wanted(self) -> int:
        """Rows whose logits it wants."""
        return sum([span.wanted for span in self.spans])


@dataclass(frozen=True, slots=True)
class Room:
    """The size that a step is padded to, to fit a recorded graph."""

    tokens: int
    rows: int
    attention: "paged_attention.Capacity"


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The tokens of a step that belong to one image."""

    picture: PromptImage
    tokens: Tensor  # their indexes in the step
    features: Tensor  # the index of each one's feature vector


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The tokens of a step whose logits are wanted, as a step of their own: for last layers without keys of their own, which need
    no others."""

    tokens: Tensor  # their indexes in the step, in the order of `attention`
    rows: Tensor  # the index of each among these, in the order of the spans
    attention: ragged.Plan


@dataclass(frozen=True, slots=True)
class Step:
    """Input of a forward: all spans' tokens one after the other, then padding, which has no slot."""

    buffer: Tensor  # int64: holds all of the following
    tokens: Tensor  # [tokens]
    positions: Tensor  # [tokens], for the rotary embedding: of multi-axis positions (images), the first axis
    slots: Tensor  # [tokens]: slot in the KV cache for each token's key and value; -1: none
    rows: Tensor  # [rows]: indexes of the tokens whose logits are wanted, in the order of the spans
    attention: ragged.Plan
    adapters: Tensor | None = None  # [tokens], for `adapters.choose`; None: no token uses an adapter
    spans: Spans | None = None  # for layers with recurrent state; None: there are none
    before: Tensor | None = None  # [spans, count]: tokens before each span, for n-gram embeddings; None: not needed
    turned: Tensor | None = None  # [2, tokens]: the other two axes of positions; None: there are none, or they equal the first
    # [3, tokens]: position of the first token of the pool that would end with each token; None: follows from its own position.
    firsts: Tensor | None = None
    shown: Listing[ImageTokens] = ()
    last: LastTokens | None = None  # None: all are wanted, or too many, or no layer uses it
    heirs: lookahead.Unknown | None = None  # beams whose parents only the device knows: their pages are still to be inherited

    def narrowed(self) -> "Step":
        """The step of its last tokens alone."""
        assert self.last is not None
        positions = self.positions.index_select(0, self.last.tokens)
        return replace(self, positions=positions, rows=self.last.rows, attention=self.last.attention, last=None)


def _paged(plan: ragged.Plan) -> "paged_attention.Plan":
    """The attention plan of a step that may be a recorded graph, or have heirs: one of pages."""
    assert not isinstance(plan, shared_prefixes.Plan | batch_invariant.Plan | expanded.Plan)
    return plan


@dataclass(frozen=True, slots=True)
class NgramContext:
    """What n-gram embeddings need to know of the tokens before a span."""

    count: int  # tokens of context before each one
    end: int  # token that stands for those before the beginning of the text
    image: int  # token that stands for those of images
    vocabulary: int  # token ids from here on are placeholders of images

    def of(self, span: Span) -> list[int]:
        """The context tokens of a span."""
        first = max(0, span.start - self.count)
        found = (token if token < self.vocabulary else self.image for token in span.sequence.tokens[first : span.start])
        return [*[self.end] * (self.count - span.start + first), *found]


@dataclass(slots=True)
class _Lists:
    """The lists that a step's tensors are made of; see `Step`."""

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    numbers: list[int]  # LoRA adapter of each token; []: none uses one
    wanted: list[int]
    states: list[int] = field(default_factory=list)  # of recurrent layers, see `_states`; []: there are none
    before: list[int] = field(default_factory=list)

    @property
    def parts(self) -> tuple[list[int], ...]:
        """All of them, in the order of the step's buffer."""
        return self.tokens, self.positions, self.slots, self.wanted, self.numbers, self.states, self.before

    def buffer(self) -> Tensor:
        """The contents of the step's buffer, on the host."""
        return torch.from_numpy(numpy.fromiter(chain(*self.parts), numpy.int64))

    def pad(self, room: Room, adapted: bool) -> None:
        """Pads to the room. Raises ragged.CapacityExceeded if it is too small. adapted: see `plan`."""
        lacking, unused = room.tokens - len(self.tokens), room.rows - len(self.wanted)
        if lacking < 0 or unused < 0:
            found = f"{len(self.tokens)} tokens and {len(self.wanted)} rows"
            raise ragged.CapacityExceeded(f"{found}, with room for {room.tokens} and {room.rows}")
        self.numbers += [-1] * lacking if adapted else ()
        self.tokens += [0] * lacking
        self.positions += [0] * lacking
        self.slots += [-1] * lacking
        self.wanted += [0] * unused


def plan(
    spans: Listing[Span],
    layout: AttentionLayout,
    room: Room | None = None,
    into: Step | None = None,
    picked: DeviceSamples | None = None,
    adapted: bool = False,
    remembers: bool = False,
    narrows: bool = False,
    before: NgramContext | None = None,
    after: torch.cuda.Event | None = None,
) -> Step:
    """The step that computes `spans`. into: the input of a recorded graph of that room, whose tensors take this step's contents,
    after what is queued on the device (or was before the event `after`), and are those of the result; picked: what the step before
    has sampled, if the host doesn't know it; adapted: the decoder has LoRA adapters; remembers: it has layers with recurrent state,
    so a room is for spans of one token; narrows: its last layers have no keys of their own; before: it has n-gram embeddings.
    Raises ragged.CapacityExceeded if there is no room."""
    spans = [part for span in spans for part in _within(span, layout.chunk)] if layout.chunk else spans
    fronts = picked is not None and any(span.front for span in spans)
    later = fronts and triton_on(layout.device)  # only the device knows which beam each heir continues
    tables = _tables(spans, picked if fronts and not later else None)
    rows = [
        attention.Row(
            len(span.tokens), span.start, pages, span.parents, span.front.settled if later and span.front else None, span.whole
        )
        for span, pages in zip(spans, tables, strict=True)
    ]
    held = _paged(into.attention) if into is not None else None
    order, attended = ragged.plan(rows, layout, room.attention if room else None, held, after)
    pictured = [i for i in order if spans[i].sequence.pictures is not None]
    lists, starts = _listed(spans, order, layout.page_size, adapted, plain=not pictured)
    if room is not None:
        lists.pad(room, adapted)
    elif not any(number >= 0 for number in lists.numbers):
        lists.numbers = []
    lengths, lists.states = _states(spans, order, room) if remembers else ((), [])
    showing = [(starts[i], spans[i]) for i in pictured if spans[i].sequence.shows(spans[i].start)]
    marks = [mark for first, span in showing for mark in _marks(first, span)]
    for token in chain.from_iterable(tokens for _, tokens, _ in marks):
        lists.tokens[token] = before.image if before else 0  # an id in every vocabulary: image features replace its embedding
    lists.before = _before(spans, order, len(lengths), before) if before else []
    if into is not None:
        copy_into(lists.buffer(), into.buffer, after)
    step = into or _step(lists, attended, layout, lengths)
    if showing:
        shown = [ImageTokens(picture, *lists_to_device(layout.device, *both)) for picture, *both in marks]
        step = replace(step, turned=_axes(range(1, AXES), lists.positions, showing, 0, layout), shown=shown)
    back = layout.members - 1
    early = [(starts[i], spans[i]) for i in pictured if back > 0 and spans[i].sequence.shows(spans[i].start - back)]
    if early:
        step = replace(step, firsts=_axes(range(AXES), lists.positions, early, back, layout))
    if narrows and room is None and not fronts and len(lists.wanted) < len(lists.tokens):
        step = replace(step, last=_last(spans, starts, layout))
    lacked = None
    if picked is not None:
        lacked = _lacked_by_heirs(spans, rows, starts, layout) if fronts else _lacked(spans, starts, layout)
    if picked is not None and lacked is not None:
        pages = _paged(step.attention).pages if later else None
        lookahead.fill(step.tokens, pages, lacked, picked.tokens, picked.parents)
        step = replace(step, heirs=lacked) if fronts else step
    return step


def _listed(spans: Listing[Span], order: Listing[int], size: int, adapted: bool, plain: bool) -> tuple[_Lists, list[int]]:
    """The lists of a step, and the index of each span's first token. size: of a page; plain: there are no images."""
    ordered = [spans[i] for i in order]
    numbers = [span.sequence.adapter for span in ordered for _ in span.tokens] if adapted else []
    if plain and max(map(len, [span.tokens for span in ordered]), default=1) == 1:
        return _listed_single(ordered, order, size, numbers)
    tokens, positions, slots = list[int](), list[int](), list[int]()
    starts = [0] * len(spans)
    for i, span in zip(order, ordered, strict=True):
        start, own = span.start, span.sequence.pages
        starts[i] = len(tokens)
        tokens += span.tokens
        places = range(start, start + len(span.tokens))
        positions += places if span.parents is None and span.sequence.pictures is None else _positions(span)
        slots += [own[place // size] * size + place % size for place in places]
    return _Lists(tokens, positions, slots, numbers, _wanted(spans, starts)), starts


def _listed_single(ordered: Listing[Span], order: Listing[int], size: int, numbers: list[int]) -> tuple[_Lists, list[int]]:
    """The same for spans of one token each, without images. ordered: the spans, in that order."""
    places, starts = [span.start for span in ordered], [0] * len(ordered)
    slots = [span.sequence.pages[place // size] * size + place % size for span, place in zip(ordered, places, strict=True)]
    for k, i in enumerate(order):
        starts[i] = k
    wanted = [start for start in starts if ordered[start].wanted]
    return _Lists([span.tokens[0] for span in ordered], places, slots, numbers, wanted), starts


def parted(spans: Listing[Span]) -> Listing[Span]:
    """The spans, cut so that images are spans of their own, where some layers attend bidirectionally within an image."""
    if not any(span.sequence.pictures for span in spans):  # quicker than to ask each of them what follows
        return spans
    return [part for span in spans for part in (_parts(span) if span.sequence.shows(span.start) else (span,))]


def _parts(span: Span) -> Iterator[Span]:
    assert span.sequence.pictures is not None
    start = span.start
    for end, whole in span.sequence.pictures.parts(start, start + len(span.tokens)):
        yield replace(_cut(span, start, end), whole=whole)
        start = end


def _within(span: Span, chunk: int) -> Iterator[Span]:
    """The span, cut at the boundaries of chunks for layers with chunked attention. Trees stay whole: they end at a boundary, or are
    a draft model's, which may see some keys more."""
    start, stop = span.start, span.start + len(span.tokens)
    if span.parents is not None or start // chunk == (stop - 1) // chunk:
        yield span
        return
    for first in range(start // chunk * chunk, stop, chunk):
        yield _cut(span, max(start, first), min(stop, first + chunk))


def _cut(span: Span, start: int, end: int) -> Span:
    """The part of a chain from `start` to `end`."""
    left = span.start + len(span.tokens) - end
    own = span.tokens[start - span.start : end - span.start]
    return replace(span, start=start, tokens=own, wanted=min(end - start, max(0, span.wanted - left)))


def _positions(span: Span) -> list[int]:
    """Positions of a span's tokens where they differ from their indexes: in a tree, or after images. Of multi-axis positions, the
    first."""
    sequence, start = span.sequence, span.start
    if span.parents is not None:
        return [sequence.position(start + depth) for depth in attention.depths(span.parents)]
    assert sequence.pictures is not None
    return sequence.pictures.positions(0, start, start + len(span.tokens))


def _axes(
    axes: range, positions: Listing[int], showing: Listing[tuple[int, Span]], back: int, layout: AttentionLayout
) -> Tensor | None:
    """Positions along these axes of the tokens that are `back` places before those of the step: [axes, tokens]; of a sequence's
    first tokens, before which there are fewer, 0. None: axes are equal. positions: along the first axis; showing: spans for which
    some of these tokens stand within images or before them, and the index of each one's first token in the step."""
    found = []
    for axis in axes:
        found.append([max(0, position - back) for position in positions])
        for first, span in showing:
            assert span.sequence.pictures is not None
            if not span.sequence.pictures.turned:
                return None
            begin, end = max(0, span.start - back), max(0, span.start + len(span.tokens) - back)
            own = span.sequence.pictures.positions(axis, begin, end)
            found[-1][first + len(span.tokens) - len(own) : first + len(span.tokens)] = own
    return to_device(torch.tensor(found), layout.device)


def _marks(first: int, span: Span) -> Iterator[tuple[PromptImage, list[int], list[int]]]:
    """Images that some of a span's tokens belong to: the tokens' indexes in the step, and those of their features."""
    assert span.sequence.pictures is not None
    for picture, places, numbers in span.sequence.pictures.between(span.start, span.start + len(span.tokens)):
        yield picture, [first + place - span.start for place in places], numbers


def _last(spans: Listing[Span], starts: Listing[int], layout: AttentionLayout) -> LastTokens | None:
    """See `Step.last`. None: only some nodes of a tree are wanted."""
    asked = [(span, start + len(span.tokens)) for span, start in zip(spans, starts, strict=True) if span.wanted]
    if any(span.parents is not None and span.wanted < len(span.tokens) for span, _ in asked):
        return None
    rows = [
        attention.Row(span.wanted, span.start + len(span.tokens) - span.wanted, span.sequence.pages, span.parents, whole=span.whole)
        for span, _ in asked
    ]
    order, attended = ragged.plan(rows, layout)
    tokens, firsts = list[int](), [0] * len(asked)
    for i in order:
        span, end = asked[i]
        firsts[i] = len(tokens)
        tokens += range(end - span.wanted, end)
    places = [first + k for first, (span, _) in zip(firsts, asked, strict=True) for k in range(span.wanted)]
    which, where = lists_to_device(layout.device, tokens, places)
    return LastTokens(which, where, attended)


def _tables(spans: Listing[Span], picked: DeviceSamples | None) -> "list[array[int]]":
    """The page table of each span. picked: which beam each heir continues, if the host may wait for that."""
    if picked is None:
        return [span.sequence.pages for span in spans]
    assert picked.parents is not None
    parents = picked.parents.tolist()
    return [span.front.pages_of(span.sequence, parents[span.source]) if span.front else span.sequence.pages for span in spans]


def _lacked(spans: Listing[Span], starts: Listing[int], layout: AttentionLayout) -> lookahead.Unknown | None:
    """The tokens that only the device knows. starts: index of each span's first token. None: it knows all."""
    sources = numpy.array([span.source for span in spans])
    [own] = (sources >= 0).nonzero()
    return lookahead.unknown_tokens(layout.device, sources[own], numpy.array(starts)[own]) if len(own) else None


def _lacked_by_heirs(
    spans: Listing[Span], rows: Listing[attention.Row], starts: Listing[int], layout: AttentionLayout
) -> lookahead.Unknown:
    """The same, and of heirs the pages that the beams of their front don't all share."""
    size, offset = layout.page_size, 0
    entries, tables = list[tuple[int, ...]](), list[int]()
    begins: dict[BeamFront, int] = {}  # where the tables of a front's beams begin
    for span, row, token in zip(spans, rows, starts, strict=True):
        if (front := span.front) is not None:
            full, filled = divmod(span.start, size)
            if front not in begins:
                begins[front] = len(tables)
                for beam in front.beams:
                    tables += beam.pages[front.settled : full + 1] if filled else (*beam.pages[front.settled : full], PADDING)
            count = full - front.settled
            own = span.sequence.pages[full]
            entries.append((span.source, token, offset + front.settled, begins[front], count, own, filled, 0))
        elif span.source >= 0:
            entries.append((span.source, token, 0, 0, 0, -1, 0, 0))
        offset += work_list.width(row, size)
    return lookahead.unknown(layout.device, entries, tables)


def follow(before: Step, spans: Listing[Span], layout: AttentionLayout) -> Step | None:
    """The step of one more token for each span of `before`, which wanted one row each, in their order; much cheaper than `plan`.
    None if that is not possible. For a few tokens: see `shared_prefixes.follow`."""
    if type(before.attention) is not shared_prefixes.Plan or before.adapters is not None:
        return None
    rows = before.rows.tolist()
    order = sorted(range(len(rows)), key=rows.__getitem__)
    tokens = [spans[i].tokens[0] for i in order]
    places = [spans[i].start for i in order]
    positions = [spans[i].sequence.position(place) for i, place in zip(order, places, strict=True)]
    slots = [spans[i].sequence.slot(place, layout.page_size) for i, place in zip(order, places, strict=True)]
    wanted = sorted(range(len(order)), key=order.__getitem__)
    attended = shared_prefixes.follow(before.attention, torch.tensor(slots, device=layout.device))
    return _step(_Lists(tokens, positions, slots, [], wanted), attended, layout) if attended is not None else None


def _step(lists: _Lists, attended: ragged.Plan, layout: AttentionLayout, lengths: tuple[int, ...] = ()) -> Step:
    """lengths: of recurrent layers, see `_states`; (): there are none."""
    buffer = to_device(lists.buffer(), layout.device)
    tokens, positions, slots, rows, adapters, own, before = torch.split(buffer, [*map(len, lists.parts)])
    found = Spans(lengths, *torch.split(own, [len(lengths) + 1, *[len(lengths)] * 3])) if lengths else None
    earlier = before.view(len(lengths), -1) if lists.before else None
    return Step(buffer, tokens, positions, slots, rows, attended, adapters if lists.numbers else None, found, earlier)


def _states(spans: Listing[Span], order: Listing[int], room: Room | None) -> tuple[tuple[int, ...], list[int]]:
    """The fields of `spans.Spans`: lengths of spans, in that order; then their starts, their state slots, whether they are
    fresh, and how many tokens of each are not drafts."""
    own = [spans[i] for i in order]
    unused = room.tokens - len(own) if room is not None else 0
    lengths = (*(len(span.tokens) for span in own), *[1] * unused)
    slots, fresh = [span.sequence.state for span in own], [int(not span.start) for span in own]
    sure = [len(span.tokens) - span.drafts for span in own]
    more = [1] * unused
    return lengths, [*accumulate(lengths, initial=0), *slots, *[0] * unused, *fresh, *more, *sure, *more]


def _before(spans: Listing[Span], order: Listing[int], count: int, before: NgramContext) -> list[int]:
    """See `Step.before`. count: number of spans, padding included."""
    found = [token for i in order for token in before.of(spans[i])]
    return found + [before.end] * (count * before.count - len(found))


def _wanted(spans: Listing[Span], starts: Listing[int]) -> list[int]:
    return [
        row
        for span, start in zip(spans, starts, strict=True)
        for row in range(start + len(span.tokens) - span.wanted, start + len(span.tokens))
    ]
