"""A request in flight, as the link between the loop that runs it and the reader of its answer. Knows items and texts; no HTTP."""

import asyncio
from array import array
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from ..proto import shard_pb2
from .record import Run
from .request import Finish, Item, Piece, Request, Sink

MOST_ITEMS = 256  # most items taken at once, so that the chunk made of them is bounded, too


class Text(Protocol):
    """The incremental detokenizer of one choice; see `text.TextStream`."""

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
    last: float = 0.0  # when its last token came
    running: bool = True  # on the shards, as far as is known
    done: bool = False  # its Finish is among the items

    @property
    def generated(self) -> int:
        """How many tokens it has."""
        return len(self.ids)


class StreamOwner(Protocol):
    """The batcher that runs a stream."""

    def close_stream(self, stream: "Stream", /) -> None:
        """Its reader is gone."""

    def expire(self, stream: "Stream", /) -> None:
        """The request's own timeout is over."""


@dataclass(slots=True, eq=False)
class Stream:
    """A request in flight, between the loop, which adds items, and the reader, who takes them."""

    uid: int
    request: Request
    choices: list[Choice]
    arrived: float
    left: int  # choices that are not done
    run: Run  # its record, for logs and traces
    owner: StreamOwner  # the batcher that runs it
    sink: Sink | None = None
    rank: float = 0.0  # see Job
    started: float = 0.0  # when the first step that computes something of it was sent; 0: not yet
    continuations: Sequence[shard_pb2.Continuation] = ()  # the state from which it resumes on the shards
    cached: int = 0  # prompt tokens found in the prefix cache
    finish: Finish | None = None  # of the choice that was done last
    grown: int = 0  # steps of its beams that were sent to the reader
    searched: int = 0  # tokens of each beam since its search began on these shards, sent or not
    stepped: float = 0.0  # when a step last gave it tokens
    opened: bool = False  # its Prompt is among the items, or was taken
    items: list[Item] = field(default_factory=list)  # not taken yet
    failure: Exception | None = None  # raised after the items
    waiter: "asyncio.Future[None] | None" = None  # the reader, while there is nothing to take
    alarm: asyncio.TimerHandle | None = None  # timer of the request's timeout

    @property
    def generated(self) -> int:
        """Tokens of all its choices."""
        return sum(choice.generated for choice in self.choices)

    def restart(self) -> None:
        """Prepares it to resume after its shards are lost: from the tokens that were received; a beam search starts anew, and the
        shards are told how much of it is known already."""
        begun = [choice for choice in self.choices if choice.running and choice.ids] if self.request.beams is None else ()
        self.continuations = tuple(shard_pb2.Continuation(choice=choice.index, tokens=choice.ids) for choice in begun)
        self.cached, self.searched = 0, 0

    def place(self, lacking: int, step_tokens: int) -> int:
        """How far it has come, in steps. lacking: tokens to be computed before it decodes; step_tokens: the most of a step."""
        computed = max(0, len(self.request.prompt) - lacking)
        if self.request.beams is not None:  # the search begins anew, and yields nothing before something is certain
            steps = self.searched
        elif self.request.drafts:  # else a step gives a choice one token
            steps = self.run.steps
        else:
            steps = max(choice.generated for choice in self.choices)
        return steps + computed // step_tokens

    def wake(self) -> None:
        """Wakes the reader. It runs when the loop yields, and takes all that has come till then."""
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
    """The reader's generator of a stream, wherever that runs. It is opened with the first item, and closed with the last."""
    stream = open()
    loop = asyncio.get_running_loop()  # once: it is a system call
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
        stream.owner.close_stream(stream)
        stream.failure = None  # its traceback refers to this frame: stream, request and images would stay until garbage collection


class CompletionRate:
    """Estimates how fast requests end, and so when there is room for another."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=32)

    def ended(self, now: float) -> None:
        """A request was answered, or given up."""
        self._ends.append(now)

    def idled(self, seconds: float) -> None:
        """Excludes an idle period of so many seconds, which says nothing of the pace."""
        self._ends = deque((end + seconds for end in self._ends), self._ends.maxlen)

    def seconds(self, now: float) -> float:
        """Estimated seconds until the next one ends."""
        if not self._ends:
            return 1.0
        return min(max((now - self._ends[0]) / len(self._ends), 1.0), 60.0)


class Readers:
    """Counts the readers of one batcher's streams, those of finished streams included."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # by tenant; none has zero
        self.none = asyncio.Event()  # set while there is none
        self.none.set()
        self.completion_rate = CompletionRate()
        self._left = 0.0  # when the last one left

    def add(self, tenant: str) -> None:
        """A reader comes."""
        if not self.counts:
            self.completion_rate.idled(monotonic() - self._left)
        self.counts[tenant] += 1
        self.none.clear()

    def remove(self, tenant: str) -> None:
        """A reader leaves."""
        self.counts[tenant] -= 1
        if not self.counts[tenant]:
            del self.counts[tenant]
        if not self.counts:
            self.none.set()
            self._left = monotonic()
