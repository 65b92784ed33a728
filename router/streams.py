"""A request in flight, between the loop that runs it and the one who reads its answer. Knows items and texts; no HTTP."""

import asyncio
from array import array
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from ..proto import shard_pb2
from .record import Run
from .request import Finish, Item, Request, Sink

MOST_ITEMS = 256  # that are taken at once, so that what is made of them is bounded, too


class Piece(Protocol):
    """What a token adds to a text."""

    @property
    def text(self) -> str: ...
    @property
    def delta(self) -> str: ...
    @property
    def stop(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Unseen:
    """The Piece of a token that is no part of the text."""

    text: str
    delta: str = ""
    stop: str = ""


class Text(Protocol):
    """The text of one stream; see `text.TextStream`."""

    @property
    def text(self) -> str: ...
    def push(self, id: int, /) -> Piece: ...
    def end(self) -> str: ...


class Tokenizer(Protocol):
    """What the batcher needs of `text.Tokenizer`."""

    def is_special(self, id: int, /) -> bool: ...
    def token_text(self, id: int, /) -> str: ...
    def stream(
        self,
        prompt: Sequence[int],
        stop: tuple[str, ...],
        include_stop: bool,
        skip_special_tokens: bool,
        shown: Collection[int],
        /,
    ) -> Text: ...


@dataclass(slots=True)
class Choice:
    """One of a request's answers."""

    index: int
    text: Text
    ids: "array[int]" = field(default_factory=lambda: array("I"))  # its tokens, as far as they were received
    generated: int = 0
    last: float = 0.0  # its last token
    running: bool = True  # on the shards, as far as is known
    done: bool = False  # its Finish is among the items


class Home(Protocol):
    """Who runs a stream."""

    def close_stream(self, stream: "Stream", /) -> None:
        """Its reader is gone."""

    def expire(self, stream: "Stream", /) -> None:
        """Its own deadline is over."""


@dataclass(slots=True, eq=False)
class Stream:
    """A request in flight, between the loop, which adds items, and the reader, who takes them."""

    uid: int
    request: Request
    choices: list[Choice]
    arrived: float
    left: int  # choices that are not done
    run: Run  # what is told of it when it has ended
    home: Home  # who runs it
    sink: Sink | None = None
    rank: float = 0.0  # see Job
    started: float = 0.0  # first step that was to compute something of it; 0: none yet
    continuations: Sequence[shard_pb2.Continuation] = ()  # where it goes on when it is restored
    cached: int = 0  # tokens of the prompt that were found
    finish: Finish | None = None  # of the choice that was done last
    grown: int = 0  # steps of its beams that were told
    searched: int = 0  # tokens of its beams, told or not, since their search began, on these shards
    stepped: float = 0.0  # when a step gave it tokens, lately
    opened: bool = False  # its Prompt is among the items, or was taken
    items: list[Item] = field(default_factory=list)  # not taken yet
    failure: Exception | None = None  # comes after the items
    waiter: "asyncio.Future[None] | None" = None  # the reader, when there was nothing to take
    alarm: asyncio.TimerHandle | None = None  # its own deadline

    @property
    def generated(self) -> int:
        """Tokens of all its choices."""
        return sum(choice.generated for choice in self.choices)

    def restart(self) -> None:
        """The shards that computed it are lost. It goes on elsewhere from the tokens that were received; a beam search starts anew,
        and is told how much of it is known already."""
        begun = [choice for choice in self.choices if choice.running and choice.ids] if self.request.beams is None else ()
        self.continuations = tuple(shard_pb2.Continuation(choice=choice.index, tokens=choice.ids) for choice in begun)
        self.cached, self.searched = 0, 0

    def place(self, lacking: int, step_tokens: int) -> int:
        """How far it has come, in steps. lacking: tokens to be computed before it decodes; step_tokens: most of a step."""
        computed = max(0, len(self.request.prompt) - lacking)
        if self.request.beams is not None:  # their search begins anew, and tells nothing before something is certain
            steps = self.searched
        elif self.request.drafts:  # else a step gives a choice one token
            steps = self.run.steps
        else:
            steps = max(choice.generated for choice in self.choices)
        return steps + computed // step_tokens

    def wake(self) -> None:
        """There is something to take. The reader runs when the loop lets go, and takes all that has come till then."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def push(self) -> None:
        """Hands the items to the sink, or else wakes the reader; also when there will be no more. Raises what the sink raises, as
        the reader does then."""
        if self.sink is not None and 0 < len(self.items) <= MOST_ITEMS:
            try:
                if self.sink(self.items):
                    self.items = []
            except Exception as error:
                self.items, self.sink, self.failure = [], None, error
                self.wake()
                raise
        if self.items or not self.left:
            self.wake()

    def take(self) -> list[Item]:
        """The oldest items. A Finish stays with its Token."""
        end = MOST_ITEMS
        while end < len(self.items) and isinstance(self.items[end], Finish):
            end += 1
        taken, self.items = self.items[:end], self.items[end:]
        return taken


async def read(open: Callable[[], Stream]) -> AsyncGenerator[list[Item], None]:
    """What its reader gets of a stream, wherever it runs. It is opened with the first item, and closed with the last."""
    stream = open()
    loop = asyncio.get_running_loop()  # asked for once: that is a system call
    try:
        while True:
            if stream.items:
                yield stream.take()
            elif stream.failure is not None:
                raise stream.failure
            elif not stream.left:
                return
            else:
                stream.waiter = loop.create_future()
                await stream.waiter
    finally:
        stream.home.close_stream(stream)
        stream.failure = None  # its traceback leads here: else stream, request and images would stay until rubbish is collected


class Pace:
    """How fast requests end: when there will be room for another."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=32)

    def ended(self, now: float) -> None:
        """A request was answered, or given up."""
        self._ends.append(now)

    def idled(self, seconds: float) -> None:
        """Nobody was there to be answered for so long, which says nothing of the pace."""
        self._ends = deque((end + seconds for end in self._ends), self._ends.maxlen)

    def seconds(self, now: float) -> float:
        """Until the next one ends, probably."""
        if not self._ends:
            return 1.0
        return min(max((now - self._ends[0]) / len(self._ends), 1.0), 60.0)


class Readers:
    """Of one batcher's streams, those that have ended included."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # by tenant; none has zero
        self.none = asyncio.Event()  # is set while there is none
        self.none.set()
        self.pace = Pace()
        self._left = 0.0  # when the last one had left

    def add(self, tenant: str) -> None:
        """One more."""
        if not self.counts:
            self.pace.idled(monotonic() - self._left)
        self.counts[tenant] += 1
        self.none.clear()

    def remove(self, tenant: str) -> None:
        """One less."""
        self.counts -= Counter((tenant,))  # drops zeros
        if not self.counts:
            self.none.set()
            self._left = monotonic()
