"""One stream of items, two ways out: folded into one answer, or sent event by event.

Knows server-sent events and clients that leave. Knows no API's shapes: events come here as JSON text.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic

from aiohttp import web

from ..request import Failure, Finish, Prompt, Request, Token
from .errors import Problem, problem_of
from .ports import Item

KEEP_ALIVE = 15.0  # seconds of silence after which a comment keeps proxies from cutting the connection; TGI's value
COMMENT = b":\n\n"
# Line ends to some readers of SSE (huggingface_hub), though not to JSON.
LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
COMPUTE_TYPE = "penstock"


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


@dataclass(slots=True)
class Clock:
    """When a request came and when it was found to be valid."""

    arrived: float = field(default_factory=monotonic)
    validated: float = 0.0

    def valid(self) -> None:
        """It is, now."""
        self.validated = monotonic()


async def fold(streams: Sequence[AsyncGenerator[Item, None]], choices: int = 1) -> list[list[Answer]]:
    """Of each stream all its choices. However it ends, all streams are closed."""
    prompts: dict[int, Prompt] = {}
    finishes: dict[tuple[int, int], Finish] = {}
    tokens: list[list[list[Token]]] = [[[] for _ in range(choices)] for _ in streams]
    async with aclosing(merge(streams)) as items:
        async for index, item in items:
            match item:
                case Token():
                    tokens[index][item.choice].append(item)
                case Prompt():
                    prompts[index] = item
                case Finish():
                    finishes[index, item.choice] = item
    return [
        [Answer(prompts[index], own, finishes[index, choice]) for choice, own in enumerate(of_stream)]
        for index, of_stream in enumerate(tokens)
    ]


async def merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Items of several streams as they come, each with the index of its stream. The first failure ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as items:
            async for item in items:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Item | Exception | None]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    left = len(tasks)
    try:
        while left:
            index, found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield index, found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(index: int, stream: AsyncGenerator[Item, None], queue: asyncio.Queue[tuple[int, Item | Exception | None]]) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                queue.put_nowait((index, item))
        queue.put_nowait((index, None))
    except Exception as error:  # raised again where the queue is read
        queue.put_nowait((index, error))


async def last_with_finish(
    stream: AsyncGenerator[Item, None], request: Request
) -> AsyncGenerator[tuple[Token, Finish | None], None]:
    """Each token; the last one together with the stream's Finish, as TGI tells both in one event.

    Only a token that may be the last waits for the next item: an end token, the last that is allowed, the end of a stop string,
    and where no token ends a text, any that may complete its grammar.
    """
    anywhere = request.grammar is not None and not request.end_ids
    longest = max((len(string) for string in request.stop), default=0)
    tail = ""  # of the text, as long as the longest stop string
    count = 0
    waiting: Token | None = None
    async with aclosing(stream):
        async for item in stream:
            if isinstance(item, Finish):
                assert waiting is not None, "a stream ended for a reason that its request does not name"
                yield waiting, item
            elif isinstance(item, Token):
                if waiting is not None:
                    yield waiting, None
                count += 1
                if longest:
                    tail = (tail + item.delta)[-longest:]
                may_end = item.id in request.end_ids or count == request.max_new_tokens or tail.endswith(request.stop) or anywhere
                waiting = item if may_end else None
                if not may_end:
                    yield item, None


def plain_frame(data: bytes) -> bytes:
    """An event on the wire: one space after the colon, since some clients insist, and nothing inside that may end a line."""
    if not data.isascii():
        for raw, escaped in LINE_ENDS:
            data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"


def named_frame(data: bytes) -> bytes:
    """The same with the event's name, which is its first field: {"type":"name",...}."""
    start = len(b'{"type":"')
    return b"event: %b\n%b" % (data[start : data.index(b'"', start)], plain_frame(data))


async def send(
    http: web.Request,
    events: AsyncGenerator[bytes, None],
    headers: dict[str, str],
    told: Callable[[Problem], Sequence[bytes]],
    frame: Callable[[bytes], bytes] = plain_frame,
) -> web.StreamResponse:
    """Sends each event as soon as it is there. `told` makes the events that end a stream which fails in the middle.

    What fails before the first event is raised, so that it becomes a status.
    """
    out = EventStream(http, headers, frame)
    with suppress(ConnectionResetError):  # the client has left: the events are closed, and nobody can be told
        async with _kept_alive(out), aclosing(events):
            try:
                async for event in events:
                    await out.event(event)
            except Failure as failure:
                if not out.begun:
                    raise
                for event in told(problem_of(failure)):
                    await out.event(event)
    return out.response


class EventStream:
    """A response made of server-sent events. It begins with the first of them."""

    def __init__(self, http: web.Request, headers: dict[str, str], frame: Callable[[bytes], bytes]) -> None:
        """frame: an event's data as it goes over the wire."""
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        )
        self.begun = False
        self._http = http
        self._frame = frame
        self._written = monotonic()
        self._lock = asyncio.Lock()  # the first event and the first comment may come at once, and only one can begin

    async def event(self, data: bytes) -> None:
        """One event of JSON text, or [DONE]."""
        await self._write(self._frame(data))

    async def keep_alive(self) -> None:
        """Sends a comment whenever nothing else has been sent for a while. Runs until it is cancelled or the client leaves."""
        with suppress(ConnectionResetError):  # the handler is told the same
            while True:
                silent = monotonic() - self._written
                if silent >= KEEP_ALIVE:
                    await self._write(COMMENT)
                await asyncio.sleep(KEEP_ALIVE - silent if silent < KEEP_ALIVE else KEEP_ALIVE)

    async def _write(self, data: bytes) -> None:
        async with self._lock:
            if not self.begun:
                self.begun = True
                await self.response.prepare(self._http)
            self._written = monotonic()
            await self.response.write(data)


@asynccontextmanager
async def _kept_alive(out: EventStream) -> AsyncIterator[None]:
    task = asyncio.create_task(out.keep_alive())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


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
