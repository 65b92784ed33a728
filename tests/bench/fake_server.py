"""A server with known delays, in a thread of its own: OpenAI's routes and text-generation-inference's. It remembers all."""

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
class Manner:
    """How it answers."""

    first: float = 0.0  # seconds to the first token
    gap: float = 0.0  # between events
    bunch: int = 1  # tokens in an event
    together: int = 1  # events in a write
    continuous: bool = False  # usage with each event, if it is asked for
    one_at_a_time: bool = False
    status: int = 200
    cut_after: int = 0  # tokens after which it hangs up; 0: never
    error_after: int = 0  # tokens after which it tells of an error
    line_end: str = "\n"
    usage: bool = True


@dataclass
class Fake:
    """What it was asked, and when it sent what."""

    manner: Manner
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    written: list[list[float]] = field(default_factory=list)  # of each answer, when each write left
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def models(self, http: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def answer(self, http: web.Request) -> web.StreamResponse:
        self.arrived.append(time.perf_counter())
        body = json.loads(await http.text())
        self.bodies.append(body)
        self.headers.append(dict(http.headers))
        warm = body.get("max_tokens", body.get("parameters", {}).get("max_new_tokens")) == 2  # what measures prompts
        if self.manner.status != 200 and not warm:
            return web.json_response({"error": {"message": "too many"}}, status=self.manner.status)
        if not self.manner.one_at_a_time:
            return await self._stream(http, body)
        async with self.lock:
            return await self._stream(http, body)

    async def _stream(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        manner = self.manner
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        written: list[float] = []
        self.written.append(written)
        await asyncio.sleep(manner.first)
        await reply.prepare(http)
        make = tgi_events if http.path == "/generate_stream" else openai_events
        events = make(body, manner, "chat" in http.path)
        for index in range(0, len(events), manner.together):
            if index:
                await asyncio.sleep(manner.gap)
            part = [event.replace("\n", manner.line_end) for event in events[index : index + manner.together]]
            written.append(time.perf_counter())
            await reply.write("".join(part).encode())
        if 0 < manner.cut_after < body.get("max_tokens", 0):
            assert http.transport is not None
            http.transport.close()
        return reply


def openai_events(body: dict[str, Any], manner: Manner, chat: bool) -> list[str]:
    """Role, tokens, reason, usage, end."""
    count = body.get("max_completion_tokens", body.get("max_tokens"))  # the former is what other load generators send
    text = str(body["messages"][-1]["content"] if chat else body["prompt"])
    usage = {"prompt_tokens": 5 + 2 * len(text.split()), "completion_tokens": 0}
    options = body["stream_options"]
    told = manner.continuous and options.get("continuous_usage_stats")
    chunks: list[dict[str, Any]] = []

    def add(choice: dict[str, Any], tokens: int = 0) -> None:
        usage["completion_tokens"] += tokens
        chunks.append({"choices": [{"index": 0, "finish_reason": None, **choice}], **({"usage": dict(usage)} if told else {})})

    if chat:
        add({"delta": {"role": "assistant", "content": ""}})
    for done in range(0, count, manner.bunch):
        if manner.cut_after and done >= manner.cut_after:
            return [event(chunk) for chunk in chunks]
        if manner.error_after and done >= manner.error_after:
            return [*(event(chunk) for chunk in chunks), event({"error": {"message": "it broke"}}), "data: [DONE]\n\n"]
        tokens = min(manner.bunch, count - done)
        text = "" if done == manner.bunch else "word " * tokens  # the second is a part of a character
        add({"delta": {"content": text}} if chat else {"text": text}, tokens)
    add({"delta": {}, "finish_reason": "length"} if chat else {"text": "", "finish_reason": "length"})
    if manner.usage and options.get("include_usage"):
        chunks.append({"choices": [], "usage": usage})
    return [": a comment\n\n", *(event(chunk) for chunk in chunks), "data: [DONE]\n\n"]


def tgi_events(body: dict[str, Any], manner: Manner, chat: bool) -> list[str]:
    """A token each; the last with the whole."""
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
def serving(manner: Manner) -> Iterator[Fake]:
    """It listens while this lasts."""
    started = threading.Event()
    loop = asyncio.new_event_loop()
    found: list[Fake] = []

    async def start() -> web.AppRunner:
        fake = Fake(manner)
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
