"""Server-sent events (SSE) with backpressure: a stream of items is either folded into one whole answer or sent event by event.

Knows SSE and clients that disconnect or read slowly, and no API's shapes: an `Encoder` turns items into whole events, as bytes.

Sending is most of what a token costs the router, so a token takes the shortest way there is. The batcher offers what a step
produced for a stream to that stream's sink; `send` encodes it there and then, and no task wakes up. The bytes of many streams are
written to their sockets one right after the other (`Outbox`): where Python's work and the kernel's take turns, a token costs 15 %
more. Only when the socket takes no more does the sink refuse (backpressure). Then items wait in the batcher, as many as the client
leaves unread, and the handler's own task, the stream's reader, takes what has come when the socket is free again and writes it at
once: events coalesce, and a slow reader costs less than a fast one. The reader also begins the response, sends errors and ends it.
While it holds items the sink refuses, so that nothing overtakes them. The buffers between are small (`EventStream`, and
TCP_NOTSENT_LOWAT on the listening socket): events that wait there can no longer coalesce.
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
BLANK = b"\n\n"  # means nothing in SSE; after a comment, a line that begins with ":", vllm-rs 0.33 reads no more of an answer
# Characters that end a line for some SSE parsers (huggingface_hub), though not in JSON.
LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
MOST_CHUNKS = 64  # chunks that the outbox collects before it writes: a millisecond's work
COMPUTE_TYPE = "penstock"


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SlowClientTimeout:
    """The timeout for clients that do not read their answers, whose items fill the batcher while others wait for a place."""

    seconds: float
    dropped: int = 0  # clients that were disconnected for it

    async def until(self, written: Awaitable[None], http: web.Request) -> None:
        """Waits until an answer is written, as long as the client keeps reading some of it; else closes the connection."""
        writing, stall_timer = asyncio.ensure_future(written), StallTimer(self.seconds / 8)
        left = -1
        try:
            while not writing.done():
                await asyncio.wait([writing], timeout=stall_timer.look)
                before, left = left, http.transport.get_write_buffer_size() if http.transport is not None else 0
                seconds = stall_timer.lasts(left == before)
                if seconds >= self.seconds and http.transport is not None:
                    logger.warning("the client has read nothing for %g s: its answer is given up", seconds)
                    self.dropped += 1
                    http.transport.abort()
            await writing
        finally:
            writing.cancel()


class StallTimer:
    """Measures how long a client has read nothing. Time in which this process itself was blocked does not count: the client may
    have read."""

    def __init__(self, look: float) -> None:
        self.look = look  # seconds between two looks, at most
        self._since = self._looked = monotonic()

    def lasts(self, silent: bool) -> float:
        """Seconds of silence so far. silent: whether the client has read nothing since the look before."""
        now = monotonic()
        late, self._looked = now - self._looked - self.look, now
        self._since = self._since + max(late, 0.0) if silent else now
        return now - self._since


PATIENT = web.AppKey("patience", SlowClientTimeout)


class Outbox:
    """The shared write buffer of all streams: chunks are written to their sockets when a step has no more of them, or at
    `MOST_CHUNKS`."""

    def __init__(self) -> None:
        self._chunks: list[tuple[EventStream, bytes]] = []

    def put(self, out: "EventStream", chunk: bytes) -> None:
        """Adds a chunk. The caller must yield to the event loop soon, since that flushes."""
        if not self._chunks:
            asyncio.get_running_loop().call_soon(self.flush)
        self._chunks.append((out, chunk))
        if len(self._chunks) >= MOST_CHUNKS:
            self.flush()

    def flush(self) -> None:
        """Writes all chunks to their sockets now."""
        chunks, self._chunks = self._chunks, []
        for out, chunk in chunks:
            try:
                out.hand_over(chunk)
            except Exception:  # one socket's failure is no other's
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
    def items(self) -> list[Token | Finish]:
        """All that an output parser reads."""
        return [*self.tokens, self.finish]

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of its tokens, by which answers of different lengths are compared."""
        return sum(token.logprob for token in self.tokens) / len(self.tokens)


def speculation_of(finishes: Iterable[Finish]) -> Speculation | None:
    """The draft statistics of one request: those of the choice that ended last, which cover all choices."""
    found = [finish.speculation for finish in finishes if finish.speculation is not None]
    return max(found, key=lambda one: (one.steps, one.drafted), default=None)


@dataclass(slots=True)
class Clock:
    """When a request arrived and when it was found to be valid."""

    arrived: float = field(default_factory=monotonic)
    validated: float = 0.0

    def valid(self) -> None:
        """Validation has ended now."""
        self.validated = monotonic()


async def fold(streams: Sequence[AsyncGenerator[list[Item], None]], choices: int = 1) -> list[list[Answer]]:
    """Collects each stream's choices, except for those that never end, since a beam search may find fewer. All streams are closed
    in the end, however it ends."""
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
    """Reads several streams concurrently to their ends; `take` gets the index of the stream. The first failure ends all."""

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
    """JSON text with all line-ending characters escaped."""
    if not data.isascii():
        for raw, escape in LINE_ENDS:
            data = data.replace(raw, escape)
    return data


def sse_frame(data: bytes) -> bytes:
    """An SSE frame: one space after the colon, since some clients insist, and nothing inside that could end a line."""
    return b"data: " + escaped(data) + b"\n\n"


def sse_frame_with_event(data: bytes) -> bytes:
    """An SSE frame with an event name, which is the first field of the data: {"type":"name",...}."""
    start = len(b'{"type":"')
    return b"event: %b\n%b" % (data[start : data.index(b'"', start)], sse_frame(data))


class Encoder(Protocol):
    """Encodes the items of one answer's streams as SSE frames, any number of whole ones. b"": nothing is sent."""

    def of(self, stream: int, items: Sequence[Item]) -> bytes:
        """The frames of some items of a stream. Runs on the event loop for every token of all clients: it must be quick."""
        ...

    def end(self) -> bytes:
        """The frames after the last item of all streams. By default there are none: a Finish has ended the stream already."""
        return b""

    def failed(self, problem: Problem) -> bytes:
        """The frames that end an answer that fails in the middle."""
        ...


async def send(
    http: web.Request,
    batcher: Batcher,
    requests: Sequence[Request],
    events: Encoder,
    headers: dict[str, str],
    open: Callable[[int, Prompt], Awaitable[None]] | None = None,
) -> web.StreamResponse:
    """Answers the requests by SSE, each event as soon as it is there. `open` is awaited before a stream's first events.

    What fails before the first event is raised, so that it becomes an HTTP status.
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
    """A response of server-sent events, which begins with the first of them.

    As a context it sends a blank line as a keep-alive whenever nothing has been sent for a while, closes the connection of a client
    that does not read, and swallows the error of a client that has disconnected, since nobody can be told.
    """

    def __init__(self, http: web.Request, headers: dict[str, str]) -> None:
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        )
        self.begun = False
        self._ended = False
        # `push` may be called: the response has begun, no `write` is under way, and the socket has taken all bytes
        self.free = False
        self._http = http
        self._protocol = http.protocol
        self._transport: asyncio.Transport | None = None  # set where chunks can be written directly; HTTP/1.0 has no chunks
        self._written = monotonic()
        self._patience = http.app[PATIENT]
        self._outbox = http.app[OUTBOX]
        self._writing = 0  # calls of `write` that have not returned
        # the first event and a first blank line may come at once, and only one may begin the response
        self._beginning = asyncio.Lock()
        self._blank: asyncio.Task[None] | None = None  # the task that writes, or wrote, a blank line
        self._next_look: asyncio.TimerHandle | None = None
        self._left = (0.0, 0)  # At the last look: when something was written last, and how much of it the socket had not taken ...
        self._stall_timer = StallTimer(self._patience.seconds / 8)  # ... and since when that has been so

    def push(self, frames: bytes) -> None:
        """Sends whole frames soon, as one HTTP chunk. If the client has disconnected, the handler is told elsewhere."""
        if frames:
            self._outbox.put(self, b"%x\r\n%b\r\n" % (len(frames), frames))

    def hand_over(self, chunk: bytes) -> None:
        """Writes a pushed chunk to the socket."""
        transport = self._transport
        assert transport is not None
        if not transport.is_closing():
            self._written = monotonic()
            transport.write(chunk)
            self.free = not self._writing and not transport.get_write_buffer_size()

    def abort(self) -> None:
        """Closes the connection at once. The handler is cancelled or gets an error."""
        if self._http.transport is not None:
            self._http.transport.abort()

    async def write(self, frames: bytes) -> None:
        """Writes frames at any time: begins the response, and returns when the socket has taken all."""
        await self._leave(frames, self.response.write)

    async def end(self, frames: bytes) -> None:
        """Writes the last frames together with the end of the response."""
        self._ended = True
        await self._leave(frames, self.response.write_eof)

    async def _leave(self, frames: bytes, write: Callable[[bytes], Awaitable[None]]) -> None:
        self._outbox.flush()  # pushed chunks come first, also before an empty write, and before the end
        if not frames:
            return
        self.free = False
        self._writing += 1
        try:
            if not self.begun:
                await self._begin()
            self._written = monotonic()
            await write(frames)
            if self._http.version >= HttpVersion11:  # the headers leave with the first write
                self._transport = self._http.transport
            await self._http.writer.drain()
        finally:
            self._writing -= 1
        self.free = self._transport is not None and not self._writing and not self._protocol.writing_paused

    async def _begin(self) -> None:
        async with self._beginning:
            if not self.begun:
                if self._http.version < HttpVersion11:
                    # without chunks only the closed connection ends a stream, and aiohttp would keep it open
                    self.response.force_close()
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
        """The periodic check: whether a keep-alive is due, and whether the client reads what was written."""
        transport, now, paused = self._http.transport, monotonic(), self._protocol.writing_paused
        if transport is None:  # disconnected: the handler is told the same
            return
        before, self._left = self._left, (self._written, transport.get_write_buffer_size())
        silent = self._stall_timer.lasts(paused and self._left == before)
        if silent >= self._patience.seconds:
            logger.warning("the client has read nothing for %g s: its stream is closed", silent)
            self._patience.dropped += 1
            self.abort()
            return
        wait = KEEP_ALIVE - (now - self._written)
        if wait <= 0:
            wait = KEEP_ALIVE
            # a client that has not read what was sent needs no keep-alive
            if not paused and (self._blank is None or self._blank.done()):
                self._blank = self._loop.create_task(self._tell())
        self._next_look = self._loop.call_later(min(wait, self._stall_timer.look), self._look)

    async def _tell(self) -> None:
        """Sends a keep-alive."""
        with suppress(ConnectionResetError):  # the handler is told the same
            await self._begin()
            if not self._ended:  # what follows the end would belong to the next answer on a kept connection
                await self.write(BLANK)


def headers_of(clock: Clock, requests: Sequence[Request], answers: Sequence[Answer]) -> dict[str, str]:
    """TGI's headers of a whole answer; times in milliseconds, except for the first."""
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
    """Those of TGI's headers that are known when a stream begins."""
    return {
        "x-compute-type": COMPUTE_TYPE,
        "x-validation-time": _milliseconds(clock.validated - clock.arrived),
        "x-prompt-tokens": str(sum(len(request.prompt) for request in requests)),
    }


def _milliseconds(seconds: float) -> str:
    return str(round(seconds * 1000))
