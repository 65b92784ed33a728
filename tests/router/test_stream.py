"""Server-sent events to fast, slow and HTTP/1.0 clients over real sockets, from the real batcher with fake shards."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from penstock.router.__main__ import listen
from penstock.router.api import stream
from penstock.router.api.app import make_app, make_runner
from penstock.router.batcher import Batcher
from penstock.router.config import RouterConfig
from penstock.router.metrics import Metrics
from penstock.router.request import Broken, Item
from penstock.router.streams import MOST_ITEMS
from penstock.router.text import Tokenizer
from penstock.tests.router.fake_batcher import make_tokenizer, until
from penstock.tests.router.fakes import FakeShards

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

FEW, MANY = 400, 3000  # tokens
MAX_EVENT_BYTES = 512  # bytes of an event
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "temperature": 0, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": ["a", "b"], "stream": True, "temperature": 0, "ignore_eos": True},
    "/generate_stream": {"inputs": "Hi"},
}


def body_for(path: str, new: int) -> dict[str, Any]:
    """The body of a request for a stream of `new` tokens."""
    return BODIES[path] | ({"parameters": {"max_new_tokens": new}} if path == "/generate_stream" else {"max_tokens": new})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class SocketWrites:
    """Records the size of each piece written to sockets: `pushed` synchronously, or `written` by a task that may wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pushed: list[int] = []
        self.written: list[int] = []
        push, write = stream.EventStream.push, stream.EventStream.write

        def spy_push(out: stream.EventStream, frames: bytes) -> None:
            self.pushed.append(len(frames))
            push(out, frames)

        async def spy_write(out: stream.EventStream, frames: bytes) -> None:
            self.written.append(len(frames))
            await write(out, frames)

        monkeypatch.setattr(stream.EventStream, "push", spy_push)
        monkeypatch.setattr(stream.EventStream, "write", spy_write)


@asynccontextmanager
async def serving(tokenizer: Tokenizer, shards: FakeShards) -> AsyncIterator[tuple[int, Metrics]]:
    """Yields the port and the metrics."""
    config = RouterConfig(folder="", model="fake", hostname="127.0.0.1", port=0)
    metrics = Metrics()
    batcher = Batcher(config, tokenizer, shards, metrics)
    await batcher.start()
    runner = make_runner(make_app(config, tokenizer, batcher, metrics), 1.0)
    await runner.setup()
    with listen(config) as listening:
        await web.SockSite(runner, listening).start()
        try:
            yield listening.getsockname()[1], metrics
        finally:
            await runner.cleanup()
            await batcher.close()


def serve(tokenizer: Tokenizer, test: Callable[[int, Metrics], Awaitable[None]], **behaviour: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(30), serving(tokenizer, FakeShards(pages=8192, **behaviour)) as (port, metrics):
            await test(port, metrics)

    asyncio.run(run())


async def post(
    port: int, path: str, body: dict[str, Any], version: str = "1.1", connection: str = "close"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a request through a socket with a small receive buffer."""
    small = socket.socket()
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    small.setblocking(False)
    await asyncio.get_running_loop().sock_connect(small, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=small, limit=4096)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    writer.write(f"{head}Connection: {connection}\r\n\r\n".encode() + data)
    return reader, writer


def unchunked(data: bytes) -> bytes:
    """Decodes chunked transfer encoding; fails if it is malformed."""
    found = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        assert data[length : length + 2] == b"\r\n"
        if not length:
            assert data == b"\r\n"
            return found
        found, data = found + data[:length], data[length + 2 :]


def contents(path: str, body: bytes) -> list[str]:
    """The text of each choice of a stream."""
    *frames, rest = body.decode().split("\n\n")
    assert rest == ""
    events = [json.loads(frame.removeprefix("data: ")) for frame in frames if frame not in ("data: [DONE]", ":")]
    if path == "/generate_stream":
        assert [event["index"] for event in events] == list(range(1, len(events) + 1))
        return ["".join(event["token"]["text"] for event in events)]
    texts: dict[int, str] = {}
    for event in events:
        [choice] = event["choices"]
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        texts[choice["index"]] = texts.get(choice["index"], "") + text
    return [texts[index] for index in sorted(texts)]


async def unstreamed(port: int, path: str, new: int) -> list[str]:
    """The same texts without streaming."""
    body = body_for(path, new) | {"stream": False}
    reader, writer = await post(port, path.removesuffix("_stream"), body, "1.0")
    answer = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
    writer.close()
    if "choices" not in answer:
        return [answer["generated_text"]]
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]


@pytest.mark.parametrize("path", BODIES)
def test_events_to_a_fast_reader_are_sent_one_by_one_without_waking_a_task(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def test(port: int, metrics: Metrics) -> None:
        writes = SocketWrites(monkeypatch)
        reader, writer = await post(port, path, body_for(path, FEW))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert b"Transfer-Encoding: chunked" in head
        assert contents(path, unchunked(body)) == await unstreamed(port, path, FEW)
        assert len(writes.pushed) > 10 * len(writes.written), "most leave without a task that wakes up"

    serve(tokenizer, test, seconds=0.0002)


@pytest.mark.parametrize("path", BODIES)
def test_events_to_a_slow_reader_are_merged_and_none_is_lost(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def test(port: int, metrics: Metrics) -> None:
        writes = SocketWrites(monkeypatch)
        reader, writer = await post(port, path, body_for(path, MANY))
        requests = 2 if path == "/v1/completions" else 1
        await until(lambda: metrics.samples(["tgi_request_success_total"])["tgi_request_success_total"] == requests)
        sent = sum(writes.pushed) + sum(writes.written)
        assert sent < 300 * MAX_EVENT_BYTES, "the rest waits as items: buffers take little"
        body = (await reader.read()).partition(b"\r\n\r\n")[2]
        writer.close()
        assert contents(path, unchunked(body)) == await unstreamed(port, path, MANY)
        assert max(writes.written) > 100 * 100
        assert max(writes.written) <= (MOST_ITEMS + 1) * MAX_EVENT_BYTES
        assert len(writes.pushed) + len(writes.written) < MANY / 4

    serve(tokenizer, test)


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_http_1_0_stream_is_not_chunked_and_ends_with_the_connection(tokenizer: Tokenizer, connection: str) -> None:
    async def test(port: int, metrics: Metrics) -> None:
        path = "/v1/chat/completions"
        reader, writer = await post(port, path, body_for(path, FEW), "1.0", connection)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert b"chunked" not in head
        assert contents(path, body) == await unstreamed(port, path, FEW)

    serve(tokenizer, test)


def test_keep_alive_lines_are_blank_and_come_between_events(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE", 0.02)

    async def test(port: int, metrics: Metrics) -> None:
        reader, writer = await post(port, "/v1/chat/completions", CHAT | {"max_tokens": 5})
        body = unchunked((await reader.read()).partition(b"\r\n\r\n")[2])
        writer.close()
        frames = body.split(b"\n\n")
        assert frames.count(b"") >= 5 + 1  # and the empty rest after the last event
        assert b"\n:" not in b"\n" + body, "vllm-rs 0.33 would take no more of the answer"
        assert len([frame for frame in frames if frame.startswith(b"data: {")]) == 7

    serve(tokenizer, test, seconds=0.1)


def test_nothing_is_sent_after_the_last_event() -> None:
    """Even if a keep-alive line is due just then, and the client reads the end slowly."""
    big = b"data: " + b"x" * 5_000_000 + b"\n\n"

    async def handler(http: web.Request) -> web.StreamResponse:
        async with stream.EventStream(http, {}) as out:
            await out.write(b"data: a\n\n")
            out._written -= stream.KEEP_ALIVE
            out._look()
            await out.end(big)
        return out.response

    async def run() -> None:
        app = web.Application()
        app[stream.PATIENT], app[stream.OUTBOX] = stream.SlowClientTimeout(60.0), stream.Outbox()
        app.add_routes([web.post("/", handler)])
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await post(runner.addresses[0][1], "/", {})
        await asyncio.sleep(0.1)
        data = await reader.read()
        writer.close()
        await runner.cleanup()
        assert unchunked(data.partition(b"\r\n\r\n")[2]).endswith(big)

    asyncio.run(asyncio.wait_for(run(), 20))


def test_exception_while_formatting_events_aborts_only_this_stream(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from penstock.router.api.openai import Events

    of, calls = Events.of, 0

    def raise_at_fifth_call(self: Events, stream: int, items: Any) -> bytes:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise ZeroDivisionError
        return of(self, stream, items)

    async def test(port: int, metrics: Metrics) -> None:
        path = "/v1/chat/completions"
        reader, writer = await post(port, "/generate_stream", body_for("/generate_stream", FEW))
        broken, other = await post(port, path, body_for(path, FEW))
        monkeypatch.setattr(Events, "of", raise_at_fifth_call)
        assert not (await broken.read()).endswith(b"0\r\n\r\n"), "the client sees that it is not complete"
        assert calls == 5
        assert len(contents("/generate_stream", unchunked((await reader.read()).partition(b"\r\n\r\n")[2]))[0]) == FEW
        for each in (writer, other):
            each.close()
        assert "ZeroDivisionError" in caplog.text

    serve(tokenizer, test, seconds=0.0002)


def test_awaited_write_never_overtakes_pushed_events(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_in_outbox(self: stream.Outbox, out: stream.EventStream, chunk: bytes) -> None:
        self._chunks.append((out, chunk))  # until the next write

    async def test(port: int, metrics: Metrics) -> None:
        monkeypatch.setattr(stream.Outbox, "put", keep_in_outbox)
        for path in BODIES:
            reader, writer = await post(port, path, body_for(path, FEW))
            body = unchunked((await reader.read()).partition(b"\r\n\r\n")[2])
            writer.close()
            assert contents(path, body) == await unstreamed(port, path, FEW)

    serve(tokenizer, test)


def test_exception_while_writing_to_a_socket_aborts_only_its_stream(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hand_over, faulty = stream.EventStream.hand_over, set[stream.EventStream]()

    def fail_for_one_stream(self: stream.EventStream, chunk: bytes) -> None:
        if not faulty or self in faulty:
            faulty.add(self)
            raise ZeroDivisionError
        hand_over(self, chunk)

    async def test(port: int, metrics: Metrics) -> None:
        path = "/v1/chat/completions"
        connections = [await post(port, path, body_for(path, FEW)) for _ in range(4)]
        monkeypatch.setattr(stream.EventStream, "hand_over", fail_for_one_stream)
        bodies = await asyncio.gather(*(read_body(reader) for reader, _ in connections))
        complete = [body for body in bodies if body.endswith(b"0\r\n\r\n")]
        assert len(complete) == 3
        assert all(len(contents(path, unchunked(body))[0]) == FEW for body in complete)
        for _, writer in connections:
            writer.close()
        assert "ZeroDivisionError" in caplog.text

    serve(tokenizer, test, seconds=0.0002)


async def read_body(reader: asyncio.StreamReader) -> bytes:
    """Reads a body, up to where the connection breaks."""
    found = b""
    with suppress(ConnectionResetError):
        while data := await reader.read(65536):
            found += data
    return found.partition(b"\r\n\r\n")[2]


def test_first_failure_closes_all_streams_of_a_request() -> None:
    """The others are closed when it is raised, so that nothing more is computed for them."""
    closed: list[int] = []

    async def endless(index: int) -> AsyncGenerator[list[Item], None]:
        try:
            while True:
                yield []
                await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0)
            closed.append(index)

    async def failing() -> AsyncGenerator[list[Item], None]:
        yield []
        await asyncio.sleep(0)
        raise Broken("lost")

    async def take(index: int, items: list[Item]) -> None:
        pass

    async def run() -> None:
        async with asyncio.timeout(10):
            with pytest.raises(Broken, match="lost"):
                await stream.read_all([endless(0), failing(), endless(2)], take)
        assert sorted(closed) == [0, 2]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_outbox_sends_at_its_limit_without_waiting_for_the_event_loop() -> None:
    """Fewer chunks are sent in the loop's next turn: the first chunks wait no longer than it takes to make MOST_CHUNKS of them."""
    sent: list[bytes] = []

    class Out:
        def hand_over(self, chunk: bytes) -> None:
            sent.append(chunk)

    async def run() -> None:
        outbox, out = stream.Outbox(), Out()
        chunks = [b"%d" % number for number in range(stream.MOST_CHUNKS + 2)]
        for number, chunk in enumerate(chunks, 1):
            outbox.put(out, chunk)  # type: ignore[arg-type]
            assert len(sent) == (stream.MOST_CHUNKS if number >= stream.MOST_CHUNKS else 0)
        await asyncio.sleep(0)
        assert sent == chunks

    asyncio.run(run())


def test_no_keep_alive_and_few_checks_while_the_client_does_not_read(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE", 0.02)
    tell, look, checks = stream.EventStream._tell, stream.EventStream._look, 0
    paused: list[bool] = []  # at each keep-alive line: was writing paused?

    def recording_tell(out: stream.EventStream) -> Awaitable[None]:
        paused.append(out._protocol.writing_paused)
        return tell(out)

    def counting_look(out: stream.EventStream) -> None:
        nonlocal checks
        checks += 1
        look(out)

    async def test(port: int, metrics: Metrics) -> None:
        monkeypatch.setattr(stream.EventStream, "_tell", recording_tell)
        monkeypatch.setattr(stream.EventStream, "_look", counting_look)
        reader, writer = await post(port, "/generate_stream", body_for("/generate_stream", MANY))
        await until(lambda: metrics.samples(["tgi_request_success_total"])["tgi_request_success_total"] == 1)
        before, start = checks, asyncio.get_running_loop().time()
        await asyncio.sleep(0.3)
        assert checks - before <= (asyncio.get_running_loop().time() - start) / 0.02 + 2
        body = (await reader.read()).partition(b"\r\n\r\n")[2]
        writer.close()
        assert body.endswith(b"\r\n0\r\n\r\n")
        assert not any(paused)

    serve(tokenizer, test)


def test_nothing_is_written_to_a_closing_connection() -> None:
    class Closing:
        def is_closing(self) -> bool:
            return True

        def write(self, chunk: bytes) -> None:
            pytest.fail("it was")

    out = object.__new__(stream.EventStream)
    out._transport = Closing()  # type: ignore[assignment]
    out.hand_over(b"chunk")


def test_cancelled_handler_cancels_its_write() -> None:
    async def run() -> None:
        writing = asyncio.get_running_loop().create_future()
        http = SimpleNamespace(transport=None)
        handler = asyncio.create_task(stream.SlowClientTimeout(10.0).until(writing, http))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        handler.cancel()
        await asyncio.wait([handler])
        assert writing.cancelled()

    asyncio.run(run())


@pytest.mark.parametrize("is_unstreamed", [True, False])
def test_blocked_event_loop_does_not_count_as_a_slow_client(is_unstreamed: bool) -> None:
    """What blocked the router may have blocked the client too. Eight checks of unread bytes are needed, however late they are."""
    checks, aborted = 0, asyncio.Event()

    def size() -> int:
        nonlocal checks
        checks += 1
        return 5

    async def run() -> None:
        timeout, loop = stream.SlowClientTimeout(0.4), asyncio.get_running_loop()
        http: Any = SimpleNamespace(transport=SimpleNamespace(get_write_buffer_size=size, abort=aborted.set))
        if is_unstreamed:
            writing = asyncio.create_task(timeout.until(loop.create_future(), http))
        else:
            http.app, http.protocol = {stream.PATIENT: timeout, stream.OUTBOX: None}, SimpleNamespace(writing_paused=True)
            writing = asyncio.ensure_future(stream.EventStream(http, {}).__aenter__())
        await until(lambda: checks >= 2)
        loop.call_soon(time.sleep, 1.0)
        await asyncio.wait_for(aborted.wait(), 30)
        assert checks >= 1 + 8
        assert timeout.dropped == 1
        writing.cancel()

    asyncio.run(run())
