"""A server with known delays, in a separate thread, with OpenAI's routes and text-generation-inference's. It records all
requests.
"""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Behaviour:
    """How the fake server answers."""

    first: float = 0.0  # seconds to the first token
    gap: float = 0.0  # between events
    tokens_per_event: int = 1  # tokens in each event
    events_per_write: int = 1  # events in each write
    continuous: bool = False  # usage in each event, if the request asks for it
    one_at_a_time: bool = False
    status: int = 200
    cut_after: int = 0  # tokens after which it closes the connection; 0: never
    error_after: int = 0  # tokens after which it sends an error event; 0: never
    line_end: str = "\n"
    usage: bool = True
    usage_with_finish_reason: bool = False  # instead of in an event of its own


@dataclass
class FakeServer:
    """The requests that it received, and when it sent what."""

    behaviour: Behaviour
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    written: list[list[float]] = field(default_factory=list)  # times of the writes of each answer
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def models(self, http: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def answer(self, http: web.Request) -> web.StreamResponse:
        self.arrived.append(time.perf_counter())
        body = json.loads(await http.text())
        self.bodies.append(body)
        self.headers.append(dict(http.headers))
        calibration = (
            body.get("max_tokens", body.get("parameters", {}).get("max_new_tokens")) == 2
        )  # the requests by which the client measures tokens per word
        if self.behaviour.status != 200 and not calibration:
            return web.json_response({"error": {"message": "too many"}}, status=self.behaviour.status)
        if not self.behaviour.one_at_a_time:
            return await self._stream(http, body)
        async with self.lock:
            return await self._stream(http, body)

    async def _stream(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        behaviour = self.behaviour
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        written: list[float] = []
        self.written.append(written)
        await asyncio.sleep(behaviour.first)
        await reply.prepare(http)
        make_events = tgi_events if http.path == "/generate_stream" else openai_events
        events = make_events(body, behaviour, "chat" in http.path)
        for index in range(0, len(events), behaviour.events_per_write):
            if index:
                await asyncio.sleep(behaviour.gap)
            part = [event.replace("\n", behaviour.line_end) for event in events[index : index + behaviour.events_per_write]]
            written.append(time.perf_counter())
            await reply.write("".join(part).encode())
        if 0 < behaviour.cut_after < body.get("max_tokens", 0):
            assert http.transport is not None
            http.transport.close()
        return reply


def openai_events(body: dict[str, Any], behaviour: Behaviour, chat: bool) -> list[str]:
    """Role, tokens, finish reason, usage, [DONE]."""
    count = body.get("max_completion_tokens", body.get("max_tokens"))  # other load generators send the first
    text = str(body["messages"][-1]["content"] if chat else body["prompt"])
    usage = {"prompt_tokens": 5 + 2 * len(text.split()), "completion_tokens": 0}
    options = body["stream_options"]
    continuous_usage = behaviour.continuous and options.get("continuous_usage_stats")
    chunks: list[dict[str, Any]] = []

    def add(choice: dict[str, Any], tokens: int = 0) -> None:
        usage["completion_tokens"] += tokens
        chunks.append(
            {"choices": [{"index": 0, "finish_reason": None, **choice}], **({"usage": dict(usage)} if continuous_usage else {})}
        )

    if chat:
        add({"delta": {"role": "assistant", "content": ""}})
    for done in range(0, count, behaviour.tokens_per_event):
        if behaviour.cut_after and done >= behaviour.cut_after:
            return [event(chunk) for chunk in chunks]
        if behaviour.error_after and done >= behaviour.error_after:
            return [*(event(chunk) for chunk in chunks), event({"error": {"message": "it broke"}}), "data: [DONE]\n\n"]
        tokens = min(behaviour.tokens_per_event, count - done)
        text = "" if done == behaviour.tokens_per_event else "word " * tokens  # the second event holds part of a character
        add({"delta": {"content": text}} if chat else {"text": text}, tokens)
    add({"delta": {}, "finish_reason": "length"} if chat else {"text": "", "finish_reason": "length"})
    if behaviour.usage_with_finish_reason:
        chunks[-1]["usage"] = usage
    elif behaviour.usage and options.get("include_usage"):
        chunks.append({"choices": [], "usage": usage})
    return [": a comment\n\n", *(event(chunk) for chunk in chunks), "data: [DONE]\n\n"]


def tgi_events(body: dict[str, Any], behaviour: Behaviour, chat: bool) -> list[str]:
    """One event for each token; the last one has the whole text."""
    count = body["parameters"]["max_new_tokens"]
    chunks: list[dict[str, Any]] = [
        {"index": index + 1, "token": {"text": "word"}, "generated_text": None} for index in range(count)
    ]
    details = {"generated_tokens": count, "input_length": 5 + 2 * len(body["inputs"].split())}
    chunks[-1].update(generated_text="words", details=details)
    return [event(chunk) for chunk in chunks]


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[FakeServer]:
    """A fake server that listens within this context."""
    started = threading.Event()
    loop = asyncio.new_event_loop()
    found: list[FakeServer] = []

    async def start() -> web.AppRunner:
        fake = FakeServer(behaviour)
        app = web.Application()
        app.add_routes([web.get("/v1/models", fake.models)])
        app.add_routes([web.post(f"/v1/{route}", fake.answer) for route in ("chat/completions", "completions")])
        app.add_routes([web.post("/generate_stream", fake.answer)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        found.append(fake)
        return runner

    def work() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(10)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
