"""From spans of ints to the tensors of one step. The only place where lists become tensors for the forward."""

from collections.abc import Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels import attention, batch_invariant, ragged, shared_prefixes, work_list
from ..kernels.layout import Layout
from ..kernels.spans import Spans
from ..kernels.transfer import list_to_device, lists_to_device, to_device
from .pictures import AXES, Picture
from .sequence import Group, Sequence

if TYPE_CHECKING:
    from ..kernels import paged_attention  # which imports Triton


@dataclass(frozen=True, slots=True, eq=False)  # each is one of its own
class Front:
    """A group's beams, while only the device knows which of them the next ones continue."""

    beams: Listing[Sequence]
    settled: int  # full pages that all of them begin with

    def pages_of(self, heir: Sequence, parent: int) -> list[int]:
        """Of one that continues beam number `parent`: its full pages, and a page of its own."""
        return self.beams[parent].pages[: len(heir.pages) - 1] + heir.pages[-1:]


@dataclass(frozen=True, slots=True)
class Picked:
    """What a step has picked, on the device, where the host doesn't know it yet."""

    tokens: Tensor  # [rows] int64; -1: none can be picked
    parents: Tensor | None = None  # [rows] int64: of beams, which of their group's sequences each continues; None: there are none


@dataclass(slots=True)  # many a step: frozen ones take three times as long to make
class Span:
    """Some tokens of a sequence, to be computed on top of those before: a prompt's chunk, the last sampled token, a token with its
    drafts. Pages for all of them are there. What is before them is computed, or is in another span of the same step."""

    sequence: Sequence
    start: int  # tokens before them
    tokens: Listing[int]
    parents: Listing[int] | None = None  # per token: index of its parent in `tokens`, -1: the token before; None: a chain
    wanted: int = 1  # of how many of the last tokens the logits are wanted
    drafts: int = 0  # how many of the last tokens are guesses
    source: int = -1  # if its one token isn't known to the host: its row in what the step before has picked
    front: Front | None = None  # it continues one of these: that one's full pages take the place of its sequence's
    whole: bool = False  # it is an image, or the rest of one, of which some layers see all: see `parted`

    @property
    def wanted_keys(self) -> int:
        """Keys that those tokens see, each itself and all before it, without windows."""
        return self.wanted * (2 * (self.start + len(self.tokens)) - self.wanted + 1) // 2


@dataclass(slots=True)
class Run:
    """A group's part of a step."""

    group: Group
    spans: list[Span]
    sampled: bool  # its last wanted rows become tokens
    found: int = 0  # tokens that were cached and are not in `spans`
    problem: str = ""  # why the group can't go on; what is in `spans` is computed all the same, since others may rely on it
    first: int = 0  # of its wanted rows among those of the step

    @property
    def tokens(self) -> int:
        """Query tokens."""
        return sum(len(span.tokens) for span in self.spans)

    @property
    def keys(self) -> int:
        """Keys that they see, without windows: each itself and all before it."""
        return sum(len(span.tokens) * (2 * span.start + len(span.tokens) + 1) // 2 for span in self.spans)

    @property
    def wanted(self) -> int:
        """Rows whose logits it wants."""
        return sum(span.wanted for span in self.spans)


@dataclass(frozen=True, slots=True)
class Room:
    """What a step is padded to, so that a graph can take it."""

    tokens: int
    rows: int
    attention: "paged_attention.Capacity"


@dataclass(frozen=True, slots=True)
class Shown:
    """Tokens of a step that are an image's."""

    picture: Picture
    tokens: Tensor  # which
    features: Tensor  # and which of its features each has


@dataclass(frozen=True, slots=True)
class Last:
    """Those of a step's tokens whose logits are wanted, by themselves: for layers that have no keys, and need no others."""

    tokens: Tensor  # which they are, as `attention` has them
    rows: Tensor  # where each is among these, in the order of the spans
    attention: ragged.Plan


@dataclass(frozen=True, slots=True)
class Step:
    """A forward's input: all spans' tokens one after the other, then padding, which has no slot."""

    buffer: Tensor  # int64: all of the following
    tokens: Tensor  # [tokens]
    positions: Tensor  # [tokens], for rotary: where images have three, the first
    slots: Tensor  # [tokens]: where each token's key and value go; -1: nowhere
    rows: Tensor  # [rows]: the tokens whose logits are wanted, in the order of the spans
    attention: ragged.Plan
    adapters: Tensor | None = None  # [tokens], for `adapters.choose`; None: no token goes by one
    spans: Spans | None = None  # for layers that remember; None: there are none
    before: Tensor | None = None  # [spans, so many]: tokens before each of them; None: nobody asks for them
    turned: Tensor | None = None  # [2, tokens]: the other two positions; None: there are none, or they are the same
    # [3, tokens]: positions of the first token of the pool that each one would be the last of; None: they follow from its own.
    firsts: Tensor | None = None
    shown: Listing[Shown] = ()
    last: Last | None = None  # None: all are wanted, or too many, or no layer asks for it

    def narrowed(self) -> "Step":
        """Of its last tokens alone."""
        assert self.last is not None
        positions = self.positions.index_select(0, self.last.tokens)
        return replace(self, positions=positions, rows=self.last.rows, attention=self.last.attention, last=None)

    def become(self, other: "Step") -> None:
        """Takes the contents of a step for the same room, in place."""
        assert not isinstance(self.attention, shared_prefixes.Plan | batch_invariant.Plan)
        assert not isinstance(other.attention, shared_prefixes.Plan | batch_invariant.Plan)
        self.buffer.copy_(other.buffer, non_blocking=True)
        self.attention.become(other.attention)


@dataclass(frozen=True, slots=True)
class Before:
    """What layers that go by n-grams want to know."""

    count: int  # of tokens before each one
    end: int  # a token that stands for those before a text's beginning
    image: int  # and one for those of images
    vocabulary: int  # numbers behind it are those of images

    def of(self, span: Span) -> list[int]:
        """A span's."""
        first = max(0, span.start - self.count)
        found = (token if token < self.vocabulary else self.image for token in span.sequence.tokens[first : span.start])
        return [*[self.end] * (self.count - span.start + first), *found]


@dataclass(slots=True)
class _Lists:
    """What a step's tensors are made of; see `Step`."""

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    numbers: list[int]  # of adapters; []: no token goes by one
    wanted: list[int]
    before: list[int] = field(default_factory=list)

    def pad(self, room: Room, adapted: bool) -> None:
        """Raises ragged.Full if there is no room. adapted: see `plan`."""
        lacking, unused = room.tokens - len(self.tokens), room.rows - len(self.wanted)
        if lacking < 0 or unused < 0:
            found = f"{len(self.tokens)} tokens and {len(self.wanted)} rows"
            raise ragged.Full(f"{found}, with room for {room.tokens} and {room.rows}")
        self.numbers += [-1] * lacking if adapted else ()
        self.tokens += [0] * lacking
        self.positions += [0] * lacking
        self.slots += [-1] * lacking
        self.wanted += [0] * unused


def plan(
    spans: Listing[Span],
    layout: Layout,
    room: Room | None = None,
    picked: Picked | None = None,
    adapted: bool = False,
    remembers: bool = False,
    narrows: bool = False,
    before: Before | None = None,
) -> Step:
    """The step that computes `spans`. picked: by the step before; adapted: the decoder has adapters; remembers: and layers that
    do, so a room is for spans of one token; narrows: and last layers without keys; before: and layers that go by n-grams. Raises
    ragged.Full if there is no room."""
    spans = [part for span in spans for part in _within(span, layout.chunk)] if layout.chunk else spans
    fronts = picked is not None and any(span.front for span in spans)
    later = fronts and ragged.by_triton(layout)  # only the device knows who continues whom
    tables = _tables(spans, picked if fronts and not later else None)
    rows = [_row(span, pages, later) for span, pages in zip(spans, tables, strict=True)]
    order, attended = ragged.plan(rows, layout, room.attention if room else None)
    lists, starts = _listed(spans, order, layout.page_size, adapted)
    if room is not None:
        lists.pad(room, adapted)
    elif not any(number >= 0 for number in lists.numbers):
        lists.numbers = []
    lengths, states = _states(spans, order, room) if remembers else ((), [])
    showing = [(starts[i], spans[i]) for i in order if spans[i].sequence.shows(spans[i].start)]
    marks = [mark for first, span in showing for mark in _marks(first, span)]
    for token in chain.from_iterable(tokens for _, tokens, _ in marks):
        lists.tokens[token] = before.image if before else 0  # which every vocabulary has: features will take its place
    lists.before = _before(spans, order, len(lengths), before) if before else []
    step = _step(lists, attended, layout, lengths, states)
    if showing:
        step = replace(step, turned=_turned(lists.positions, showing, layout), shown=[_shown(*mark, layout) for mark in marks])
    back = layout.members - 1
    early = [(starts[i], spans[i]) for i in order if back > 0 and spans[i].sequence.shows(spans[i].start - back)]
    if early:
        step = replace(step, firsts=_firsts(lists.positions, early, layout))
    if narrows and room is None and not fronts and len(lists.wanted) < len(lists.tokens):
        step = replace(step, last=_last(spans, starts, layout))
    if picked is not None:
        _fill_in(step, spans, starts, picked)
        if later:
            _inherit(step, rows, spans, layout.page_size, picked)
    return step


def _row(span: Span, pages: Listing[int], later: bool) -> attention.Row:
    """later: whose pages it goes on with is told to the device alone."""
    settled = span.front.settled if later and span.front else None
    return attention.Row(len(span.tokens), span.start, pages, span.parents, settled, span.whole)


def _listed(spans: Listing[Span], order: Listing[int], size: int, adapted: bool) -> tuple[_Lists, list[int]]:
    """And each span's first token in the step. size: of a page."""
    tokens, positions, slots, numbers = list[int](), list[int](), list[int](), list[int]()
    starts = [0] * len(spans)
    for i in order:
        span, start, own = spans[i], spans[i].start, spans[i].sequence.pages
        starts[i] = len(tokens)
        tokens += span.tokens
        places = range(start, start + len(span.tokens))
        positions += places if span.parents is None and span.sequence.pictures is None else _positions(span)
        slots += [own[place // size] * size + place % size for place in places]
        numbers += [span.sequence.adapter] * len(span.tokens) if adapted else ()
    return _Lists(tokens, positions, slots, numbers, _wanted(spans, starts)), starts


def _shown(picture: Picture, tokens: list[int], numbers: list[int], layout: Layout) -> Shown:
    return Shown(picture, *lists_to_device(layout.device, tokens, numbers))


def parted(spans: Listing[Span]) -> list[Span]:
    """The same, in which images are by themselves, where some layers see the whole of them at once."""
    return [part for span in spans for part in (_parts(span) if span.sequence.shows(span.start) else (span,))]


def _parts(span: Span) -> Iterator[Span]:
    assert span.sequence.pictures is not None
    start = span.start
    for end, whole in span.sequence.pictures.parts(start, start + len(span.tokens)):
        yield replace(_cut(span, start, end), whole=whole)
        start = end


def _within(span: Span, chunk: int) -> Iterator[Span]:
    """The same, cut where chunks of positions end, of which some layers see no others. Trees stay whole: they end there, or are a
    draft model's, which may see some keys more."""
    start, stop = span.start, span.start + len(span.tokens)
    if span.parents is not None or start // chunk == (stop - 1) // chunk:
        yield span
        return
    for first in range(start // chunk * chunk, stop, chunk):
        yield _cut(span, max(start, first), min(stop, first + chunk))


def _cut(span: Span, start: int, end: int) -> Span:
    """What of a chain is there."""
    left = span.start + len(span.tokens) - end
    own = span.tokens[start - span.start : end - span.start]
    return replace(span, start=start, tokens=own, wanted=min(end - start, max(0, span.wanted - left)))


def _positions(span: Span) -> list[int]:
    """Of its tokens, where these are not their places: of a tree, or behind images. Where images have three, the first."""
    sequence, start = span.sequence, span.start
    if span.parents is not None:
        return [sequence.position(start + depth) for depth in attention.depths(span.parents)]
    assert sequence.pictures is not None
    return sequence.pictures.positions(0, start, start + len(span.tokens))


def _turned(positions: Listing[int], showing: Listing[tuple[int, Span]], layout: Layout) -> Tensor | None:
    """See `Step.turned`. showing: spans with images, and their first tokens in the step."""
    axes = []
    for axis in range(1, AXES):
        axes.append([*positions])
        for first, span in showing:
            assert span.sequence.pictures is not None
            if not span.sequence.pictures.turned:
                return None
            stop = span.start + len(span.tokens)
            axes[-1][first : first + len(span.tokens)] = span.sequence.pictures.positions(axis, span.start, stop)
    return to_device(torch.tensor(axes), layout.device)


def _firsts(positions: Listing[int], early: Listing[tuple[int, Span]], layout: Layout) -> Tensor | None:
    """See `Step.firsts`. early: spans whose first pool begins with an image or before it, and their first tokens in the step."""
    back, axes = layout.members - 1, []
    for axis in range(AXES):
        axes.append([max(0, position - back) for position in positions])
        for first, span in early:
            assert span.sequence.pictures is not None
            if not span.sequence.pictures.turned:
                return None
            begin, end = max(0, span.start - back), max(0, span.start + len(span.tokens) - back)
            own = span.sequence.pictures.positions(axis, begin, end)
            axes[-1][first + len(span.tokens) - len(own) : first + len(span.tokens)] = own
    return to_device(torch.tensor(axes), layout.device)


def _marks(first: int, span: Span) -> Iterator[tuple[Picture, list[int], list[int]]]:
    """Images that some of a span's tokens are of: which of the step's tokens, and the numbers of their features."""
    assert span.sequence.pictures is not None
    for picture, places, numbers in span.sequence.pictures.between(span.start, span.start + len(span.tokens)):
        yield picture, [first + place - span.start for place in places], numbers


def _last(spans: Listing[Span], starts: Listing[int], layout: Layout) -> Last | None:
    """See `Step.last`. None: of a tree some nodes are wanted."""
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
    return Last(which, where, attended)


def _fill_in(step: Step, spans: Listing[Span], starts: Listing[int], picked: Picked) -> None:
    """Tokens that only the device knows. Where none could be picked, what is computed is thrown away."""
    pairs = [(start, span.source) for span, start in zip(spans, starts, strict=True) if span.source >= 0]
    if pairs:
        places, sources = lists_to_device(picked.tokens.device, *zip(*pairs, strict=True))
        step.tokens.index_copy_(0, places, picked.tokens.index_select(0, sources).clamp_(min=0))


def _tables(spans: Listing[Span], picked: Picked | None) -> list[list[int]]:
    """The pages that each span sees. picked: who continues whom, if the host may wait for that."""
    if picked is None:
        return [span.sequence.pages for span in spans]
    assert picked.parents is not None
    parents = picked.parents.tolist()
    return [span.front.pages_of(span.sequence, parents[span.source]) if span.front else span.sequence.pages for span in spans]


def _inherit(step: Step, rows: Listing[attention.Row], spans: Listing[Span], size: int, picked: Picked) -> None:
    """Those pages of a front that not all of its beams have, on the device, where it is known who continues whom."""
    assert not isinstance(step.attention, shared_prefixes.Plan | batch_invariant.Plan)
    assert picked.parents is not None
    offsets = [0, *accumulate(work_list.width(row, size) for row in rows)]
    tables: list[int] = []  # of every front's beams
    wanted: list[tuple[int, int, int, int]] = []  # per page: its place; its span's source; of the first beam; how far to the next's
    begins: dict[Front, int] = {}  # where a front's tables do
    for offset, span in zip(offsets, spans, strict=False):
        if span.front is None:
            continue
        settled, full = span.front.settled, span.start // size
        if span.front not in begins:
            begins[span.front] = len(tables)
            tables += chain.from_iterable(beam.pages[settled:full] for beam in span.front.beams)
        begin = begins[span.front] - settled
        wanted += [(offset + page, span.source, begin + page, full - settled) for page in range(settled, full)]
    if wanted:
        places, sources, firsts, strides, found = lists_to_device(picked.parents.device, *zip(*wanted, strict=True), tables)
        pages = found.index_select(0, firsts + picked.parents.index_select(0, sources) * strides)
        step.attention.pages.index_copy_(0, places, pages.int())


def follow(before: Step, spans: Listing[Span], layout: Layout) -> Step | None:
    """The step of one token more for each span of `before`, which wanted one row each, and in their order; much sooner made than by
    `plan`. None if it can't be. For a few tokens: see `shared_prefixes.follow`."""
    if type(before.attention) is not shared_prefixes.Plan or before.adapters is not None:
        return None
    rows = before.rows.tolist()
    order = sorted(range(len(rows)), key=rows.__getitem__)
    tokens = [spans[i].tokens[0] for i in order]
    places = [spans[i].start for i in order]
    positions = [spans[i].sequence.position(place) for i, place in zip(order, places, strict=True)]
    size = layout.page_size
    slots = [spans[i].sequence.pages[place // size] * size + place % size for i, place in zip(order, places, strict=True)]
    wanted = sorted(range(len(order)), key=order.__getitem__)
    attended = shared_prefixes.follow(before.attention, torch.tensor(slots, device=layout.device))
    return _step(_Lists(tokens, positions, slots, [], wanted), attended, layout) if attended is not None else None


def _step(lists: _Lists, attended: ragged.Plan, layout: Layout, lengths: tuple[int, ...] = (), states: Listing[int] = ()) -> Step:
    """lengths: of spans, with `states`: see `_states`; (): nobody asks for them."""
    parts = (lists.tokens, lists.positions, lists.slots, lists.wanted, lists.numbers, states, lists.before)
    buffer = list_to_device(layout.device, [*chain(*parts)])
    tokens, positions, slots, rows, adapters, own, before = torch.split(buffer, [*map(len, parts)])
    found = Spans(lengths, *torch.split(own, [len(lengths) + 1, *[len(lengths)] * 3])) if lengths else None
    earlier = before.view(len(lengths), -1) if lists.before else None
    return Step(buffer, tokens, positions, slots, rows, attended, adapters if lists.numbers else None, found, earlier)


def _states(spans: Listing[Span], order: Listing[int], room: Room | None) -> tuple[tuple[int, ...], list[int]]:
    """What `spans.Spans` has: lengths of spans, in that order; where they begin, their slots, whether they are fresh, and how
    many tokens of each are no guesses."""
    own = [spans[i] for i in order]
    unused = room.tokens - len(own) if room is not None else 0
    lengths = (*(len(span.tokens) for span in own), *[1] * unused)
    slots, fresh = [span.sequence.state for span in own], [int(not span.start) for span in own]
    sure = [len(span.tokens) - span.drafts for span in own]
    more = [1] * unused
    return lengths, [*accumulate(lengths, initial=0), *slots, *[0] * unused, *fresh, *more, *sure, *more]


def _before(spans: Listing[Span], order: Listing[int], count: int, before: Before) -> list[int]:
    """See `Step.before`. count: of spans, with those of padding."""
    found = [token for i in order for token in before.of(spans[i])]
    return found + [before.end] * (count * before.count - len(found))


def _wanted(spans: Listing[Span], starts: Listing[int]) -> list[int]:
    ends = [start + len(span.tokens) for span, start in zip(spans, starts, strict=True)]
    return [row for span, end in zip(spans, ends, strict=True) for row in range(end - span.wanted, end)]
