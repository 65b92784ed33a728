"""One stream of items, two ways out: folded into one answer, or sent event by event.

Knows server-sent events and clients that leave. Knows no API's shapes: `Events` makes whole events of items, as bytes.

Sending costs most of what a token costs the router, so a token takes the shortest way there is. The batcher offers what a step
gives a stream to that stream's sink; `send` makes bytes of it there and then, and no task wakes up. The bytes of many streams go to
their sockets one right after the other (`Outbox`): where Python's work and the kernel's take turns, a token costs 15 % more. Only
when the socket takes no more does the sink refuse. Then items wait in the batcher, as many as the client leaves unread, and the
handler's own task, the stream's reader, takes what has come when the socket is free again and writes it at once: events coalesce,
and a slow reader costs less than a fast one. The reader also begins the response, tells of failures and ends it. While it has items
in hand the sink refuses, so that nothing overtakes. The buffers between are small (`EventStream`, and TCP_NOTSENT_LOWAT on the
listening socket): events that wait there could not coalesce any more.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from time import monotonic
from types import TracebackType
from typing import Protocol

from aiohttp import HttpVersion11, web

from ..request import Failure, Finish, Item, Prompt, Request, Sink, Speculation, Token
from .errors import Problem, problem_of
from .ports import Batcher

KEEP_ALIVE = 15.0  # seconds of silence after which a blank line keeps proxies from cutting the connection; TGI's value
BLANK = b"\n\n"  # says nothing; after a line that begins with ":" vllm-rs 0.33 takes no more of an answer
# Line ends to some readers of SSE (huggingface_hub), though not to JSON.
LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
MOST_CHUNKS = 64  # that wait for each other: a millisecond's
COMPUTE_TYPE = "penstock"


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Patience:
    """With clients that do not read what is there for them: their items wait in the batcher, and others for their place."""

    seconds: float
    dropped: int = 0  # clients with whom it has ended

    async def until(self, written: Awaitable[None], http: web.Request) -> None:
        """Waits until an answer has left, as long as the client takes of it."""
        writing, silence = asyncio.ensure_future(written), Silence(self.seconds / 8)
        left = -1
        try:
            while not writing.done():
                await asyncio.wait([writing], timeout=silence.look)
                before, left = left, http.transport.get_write_buffer_size() if http.transport is not None else 0
                seconds = silence.lasts(left == before)
                if seconds >= self.seconds and http.transport is not None:
                    logger.warning("the client has read nothing for %g s: its answer is given up", seconds)
                    self.dropped += 1
                    http.transport.abort()
            await writing
        finally:
            writing.cancel()


class Silence:
    """How long a client has read nothing. What this process stood still itself does not count: the client may have, too."""

    def __init__(self, look: float) -> None:
        self.look = look  # seconds between two looks, at most
        self._since = self._looked = monotonic()

    def lasts(self, silent: bool) -> float:
        """Seconds so far, at a look at a client that is or is not."""
        now = monotonic()
        late, self._looked = now - self._looked - self.look, now
        self._since = self._since + max(late, 0.0) if silent else now
        return now - self._since


PATIENT = web.AppKey("patience", Patience)


class Outbox:
    """Chunks that leave for their sockets as soon as a step has no more of them, or when many are there."""

    def __init__(self) -> None:
        self._chunks: list[tuple[EventStream, bytes]] = []

    def put(self, out: "EventStream", chunk: bytes) -> None:
        """Whoever calls this lets go of the loop soon."""
        if not self._chunks:
            asyncio.get_running_loop().call_soon(self.flush)
        self._chunks.append((out, chunk))
        if len(self._chunks) >= MOST_CHUNKS:
            self.flush()

    def flush(self) -> None:
        """All leave now."""
        chunks, self._chunks = self._chunks, []
        for out, chunk in chunks:
            try:
                out.hand_over(chunk)
            except Exception:  # one socket's fault is no other's
                logger.exception("an event cannot be written")
                out.abort()


OUTBOX = web.AppKey("outbox", Outbox)


@dataclass(slots=True)
class Answer:
    """One choice of a stream, whole."""

    prompt: Prompt
    tokens: list[Token]
    finish: Finish

    @property
    def mean_logprob(self) -> float:
        """How probable it is, whatever its length."""
        return sum(token.logprob for token in self.tokens) / len(self.tokens)


def guesses(finishes: Iterable[Finish]) -> Speculation | None:
    """Of one request, of whose answers the last to end tells for all."""
    found = [finish.guessed for finish in finishes if finish.guessed is not None]
    return max(found, key=lambda one: (one.steps, one.drafted), default=None)


@dataclass(slots=True)
class Clock:
    """When a request came and when it was found to be valid."""

    arrived: float = field(default_factory=monotonic)
    validated: float = 0.0

    def valid(self) -> None:
        """It is, now."""
        self.validated = monotonic()


async def fold(streams: Sequence[AsyncGenerator[list[Item], None]], choices: int = 1) -> list[list[Answer]]:
    """Of each stream all its choices but those that never end: beams may find fewer. However it ends, all streams are closed."""
    prompts: dict[int, Prompt] = {}
    finishes: dict[tuple[int, int], Finish] = {}
    tokens: list[list[list[Token]]] = [[[] for _ in range(choices)] for _ in streams]

    async def take(index: int, items: list[Item]) -> None:
        for item in items:
            match item:
                case Token():
                    tokens[index][item.choice].append(item)
                case Prompt():
                    prompts[index] = item
                case Finish():
                    finishes[index, item.choice] = item

    await read_all(streams, take)
    return [
        [
            Answer(prompts[index], own, finishes[index, choice])
            for choice, own in enumerate(of_stream)
            if (index, choice) in finishes
        ]
        for index, of_stream in enumerate(tokens)
    ]


async def read_all(streams: Sequence[AsyncGenerator[list[Item], None]], take: Callable[[int, list[Item]], Awaitable[None]]) -> None:
    """Reads several streams side by side to their ends; `take` gets the index of the stream. The first failure ends all."""

    async def read(index: int, stream: AsyncGenerator[list[Item], None]) -> None:
        async with aclosing(stream):
            async for items in stream:
                await take(index, items)

    if len(streams) == 1:
        await read(0, streams[0])
        return
    tasks = [asyncio.create_task(read(index, stream)) for index, stream in enumerate(streams)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def escaped(data: bytes) -> bytes:
    """JSON text in which nothing may end a line."""
    if not data.isascii():
        for raw, escape in LINE_ENDS:
            data = data.replace(raw, escape)
    return data


def plain_frame(data: bytes) -> bytes:
    """An event on the wire: one space after the colon, since some clients insist, and nothing inside that may end a line."""
    return b"data: " + escaped(data) + b"\n\n"


def named_frame(data: bytes) -> bytes:
    """The same with the event's name, which is its first field: {"type":"name",...}."""
    start = len(b'{"type":"')
    return b"event: %b\n%b" % (data[start : data.index(b'"', start)], plain_frame(data))


class Events(Protocol):
    """How the items of one answer's streams look on the wire: any number of whole events, as frames. b"": nothing is to be told."""

    def of(self, stream: int, items: Sequence[Item]) -> bytes:
        """Called by who computes for everybody: it must be quick."""
        ...

    def end(self) -> bytes:
        """After the last item of all."""
        ...

    def failed(self, problem: Problem) -> bytes:
        """The end of an answer that fails in the middle."""
        ...


async def send(
    http: web.Request,
    batcher: Batcher,
    requests: Sequence[Request],
    events: Events,
    headers: dict[str, str],
    open: Callable[[int, Prompt], Awaitable[None]] | None = None,
) -> web.StreamResponse:
    """Answers the requests event by event, each as soon as it is there. `open` is waited for before a stream's first events.

    What fails before the first event is raised, so that it becomes a status.
    """
    out = EventStream(http, headers)
    unopened = set(range(len(requests))) if open else set()

    def sink(stream: int) -> Sink:
        def offer(items: list[Item]) -> bool:
            if not out.free or stream in unopened:
                return False
            out.push(events.of(stream, items))
            return True

        return offer

    async def take(stream: int, items: list[Item]) -> None:
        if open is not None and isinstance(items[0], Prompt):
            await open(stream, items[0])
            unopened.remove(stream)
        await out.write(events.of(stream, items))

    streams = [batcher.submit(request, sink(index)) for index, request in enumerate(requests)]
    async with out:
        try:
            await read_all(streams, take)
            await out.end(events.end())
        except Failure as failure:
            if not out.begun:
                raise
            await out.write(events.failed(problem_of(failure)))
    return out.response


class EventStream:
    """A response made of server-sent events. It begins with the first of them.

    As a context it sends a blank line whenever nothing else has been sent for a while, closes the connection of who does not read,
    and does not mind a client that leaves: nobody can be told.
    """

    def __init__(self, http: web.Request, headers: dict[str, str]) -> None:
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        )
        self.begun = False
        self._ended = False
        self.free = False  # `push` may be called: it has begun, nobody writes, and the socket has taken all that it was given
        self._http = http
        self._protocol = http.protocol
        self._transport: asyncio.Transport | None = None  # whose chunks we write ourselves; before HTTP/1.1 there are none
        self._written = monotonic()
        self._patience = http.app[PATIENT]
        self._outbox = http.app[OUTBOX]
        self._writing = 0  # calls of `write` that have not returned
        self._beginning = asyncio.Lock()  # the first event and a first blank line may come at once, and only one can begin
        self._blank: asyncio.Task[None] | None = None  # that is or was written
        self._next_look: asyncio.TimerHandle | None = None
        self._left = (0.0, 0)  # when something was written, and what of it the socket had not taken, at the last look ...
        self._silence = Silence(self._patience.seconds / 8)  # ... and since when that was so

    def push(self, frames: bytes) -> None:
        """Whole frames leave soon, as a chunk of HTTP. Is there nobody any more, the handler will be told."""
        if frames:
            self._outbox.put(self, b"%x\r\n%b\r\n" % (len(frames), frames))

    def hand_over(self, chunk: bytes) -> None:
        """What was pushed, to the socket."""
        transport = self._transport
        assert transport is not None
        if not transport.is_closing():
            self._written = monotonic()
            transport.write(chunk)
            self.free = not self._writing and not transport.get_write_buffer_size()

    def abort(self) -> None:
        """Closes the connection at once: the handler will be told."""
        if self._http.transport is not None:
            self._http.transport.abort()

    async def write(self, frames: bytes) -> None:
        """The same at any time: begins the response, and returns when the socket has taken all."""
        await self._leave(frames, self.response.write)

    async def end(self, frames: bytes) -> None:
        """The same with the last of them: the response's end leaves with them."""
        self._ended = True
        await self._leave(frames, self.response.write_eof)

    async def _leave(self, frames: bytes, write: Callable[[bytes], Awaitable[None]]) -> None:
        self._outbox.flush()  # what was pushed comes before, even if this is nothing, and the end
        if not frames:
            return
        self.free = False
        self._writing += 1
        try:
            if not self.begun:
                await self._begin()
            self._written = monotonic()
            await write(frames)
            if self._http.version >= HttpVersion11:  # the headers have left with the first write
                self._transport = self._http.transport
            await self._http.writer.drain()
        finally:
            self._writing -= 1
        self.free = self._transport is not None and not self._writing and not self._protocol.writing_paused

    async def _begin(self) -> None:
        async with self._beginning:
            if not self.begun:
                if self._http.version < HttpVersion11:
                    self.response.force_close()  # where the stream ends the connection's end alone tells, and aiohttp would keep it
                await self.response.prepare(self._http)
                if self._http.transport is not None:
                    self._http.transport.set_write_buffer_limits(high=0)
                self.begun = True

    async def __aenter__(self) -> "EventStream":
        self._loop = asyncio.get_running_loop()
        self._look()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if self._next_look is not None:
            self._next_look.cancel()
        if self._blank is not None:
            self._blank.cancel()
            await asyncio.wait([self._blank])
        return isinstance(error, ConnectionResetError)

    def _look(self) -> None:
        """From time to time: whether there was silence for too long, and whether the client takes what was written."""
        transport, now, paused = self._http.transport, monotonic(), self._protocol.writing_paused
        if transport is None:  # the handler is told the same
            return
        before, self._left = self._left, (self._written, transport.get_write_buffer_size())
        silent = self._silence.lasts(paused and self._left == before)
        if silent >= self._patience.seconds:
            logger.warning("the client has read nothing for %g s: its stream is closed", silent)
            self._patience.dropped += 1
            self.abort()
            return
        wait = KEEP_ALIVE - (now - self._written)
        if wait <= 0:
            wait = KEEP_ALIVE
            if not paused and (self._blank is None or self._blank.done()):  # who has not read what was sent needs none
                self._blank = self._loop.create_task(self._tell())
        self._next_look = self._loop.call_later(min(wait, self._silence.look), self._look)

    async def _tell(self) -> None:
        """That we are there."""
        with suppress(ConnectionResetError):  # the handler is told the same
            await self._begin()
            if not self._ended:  # what comes behind the end is the next answer's to clients who keep their connection
                await self.write(BLANK)


def headers_of(clock: Clock, requests: Sequence[Request], answers: Sequence[Answer]) -> dict[str, str]:
    """TGI's headers of a whole answer; times in milliseconds, except the first."""
    total = monotonic() - clock.arrived
    generated = sum(answer.finish.generated_tokens for answer in answers)
    inference = max(answer.finish.inference_seconds for answer in answers)
    return {
        "x-compute-type": COMPUTE_TYPE,
        "x-compute-time": f"{total:.6f}",
        "x-total-time": _milliseconds(total),
        "x-validation-time": _milliseconds(clock.validated - clock.arrived),
        "x-queue-time": _milliseconds(max(answer.finish.queue_seconds for answer in answers)),
        "x-inference-time": _milliseconds(inference),
        "x-time-per-token": _milliseconds(inference / max(generated, 1)),
        "x-prompt-tokens": str(sum(len(request.prompt) for request in requests)),
        "x-generated-tokens": str(generated),
    }


def stream_headers_of(clock: Clock, requests: Sequence[Request]) -> dict[str, str]:
    """What of these is known when a stream begins."""
    return {
        "x-compute-type": COMPUTE_TYPE,
        "x-validation-time": _milliseconds(clock.validated - clock.arrived),
        "x-prompt-tokens": str(sum(len(request.prompt) for request in requests)),
    }


def _milliseconds(seconds: float) -> str:
    return str(round(seconds * 1000))
