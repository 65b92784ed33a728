"""Stands where the batcher stands, in front of the real HTTP application: says the tokens that a test has written down.

Also the small tokenizer of the API's tests, and the server and client around it.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import tokenizers
from aiohttp import web
from tokenizers import decoders, models, pre_tokenizers

from penstock.router.adapters import Adapters
from penstock.router.api.app import make_app
from penstock.router.api.ports import Replicas
from penstock.router.config import RouterConfig
from penstock.router.request import (
    Alternative,
    Beam,
    Failure,
    Finish,
    Grown,
    Item,
    Limits,
    NotReady,
    Prompt,
    Request,
    Sink,
    Speculation,
    Token,
)
from penstock.router.text import TextStream, Tokenizer

LIMITS = Limits(max_input_tokens=100, max_total_tokens=128, vocabulary=300, images=True)
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


def make_tokenizer(folder: Path, template: str = TEMPLATE) -> Tokenizer:
    """A token per byte; <s> is put in front, </s> ends. template: of chats."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: index for index, name in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return Tokenizer(folder)


@dataclass
class FakeBatcher:
    """Answers every request with `says`, as a shard would: it ends at </s>, at a stop string, at max_new_tokens."""

    tokenizer: Tokenizer
    says: str = "Hello you</s>"
    ready: bool = True
    stage: str = "ready"
    limits: Limits | None = LIMITS
    refuses: Failure | None = None  # at the first item
    breaks: tuple[int, Failure] | None = None  # after so many tokens
    pace: asyncio.Semaphore | None = None  # a permit for each token
    logprob: float = -0.5
    cached: int = 0  # tokens of every prompt
    finds: int = 1 << 30  # answers, at most, where beams are searched
    requests: list[Request] = field(default_factory=list)
    opened: int = 0
    closed: int = 0
    told: int = 0  # tokens that left

    def submit(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[list[Item], None]:
        self.requests.append(request)
        return self._untaken(request, sink)

    async def _untaken(self, request: Request, sink: Sink | None) -> AsyncGenerator[list[Item], None]:
        async with aclosing(self._items(request)) as lists:
            async for items in lists:
                if sink is None or not sink(items):
                    yield items

    async def _items(self, request: Request) -> AsyncGenerator[list[Item], None]:
        """The choices in turn, each a token later than the one before; later ones are less probable."""
        if self.refuses is not None:
            raise self.refuses
        if not self.ready:
            raise NotReady(self.stage)
        self.opened += 1
        try:
            if request.beams is not None:
                async with aclosing(self._search(request)) as lists:
                    async for items in lists:
                        yield items
                return
            texts = [self._text(request) for _ in range(request.choices)]
            answers = [
                self.tokenizer.encode(says, add_special_tokens=False)[: request.max_new_tokens] for says in self._says(request)
            ]
            going = dict(enumerate(answers))
            for count in range(1, request.max_new_tokens + 1):
                await self._turn(count)
                if count == 1:
                    yield [self._prompt(request)]
                for choice, ids in list(going.items()):
                    piece = texts[choice].push(id := ids[count - 1])
                    self.told += 1
                    logprob = self.logprob * (1 + choice)
                    special = self.tokenizer.is_special(id)
                    token = Token(id, piece.text, piece.delta, logprob, special, self._top(request.top_n), choice)
                    reason = self._reason(request, id, count, bool(piece.stop))
                    if reason:
                        delta = texts[choice].end()
                        speculation = Speculation(3 * count, 2 * count, count) if request.drafts else None
                        yield [
                            token,
                            Finish(reason, texts[choice].text, delta, count, 0.25, 0.5, choice, None, speculation, piece.stop),
                        ]
                        del going[choice]
                    else:
                        yield [token]
                if not going:
                    return
            raise AssertionError("`says` must be as long as max_new_tokens, or end")
        finally:
            self.closed += 1

    async def _search(self, request: Request) -> AsyncGenerator[list[Item], None]:
        """`says`, then the same with a number before its end: what they share as it grows, of the best; the others come whole."""
        found = [self._found(request, choice) for choice in range(min(request.choices, self.finds))]
        longest = max(len(tokens) for tokens, _ in found)
        shared = next(
            (
                place
                for place, tokens in enumerate(zip(*(own for own, _ in found), strict=False))
                if len({t.id for t in tokens}) > 1
            ),
            longest - 1,
        )
        for count in range(1, longest + 1):
            await self._turn(count)
            items: list[Item] = [self._prompt(request)] if count == 1 else []
            items += [self._grown(request, found[0][0], count)] if request.beams and request.beams.watched else []
            items += found[0][0][count - 1 : count] if count <= shared else []
            if count == longest:
                for tokens, finish in found:
                    items += [*(tokens if finish.choice else tokens[shared:]), finish]
            self.told += sum(isinstance(item, Token) for item in items)
            if items:
                yield items

    def _found(self, request: Request, choice: int) -> tuple[list[Token], Finish]:
        """An answer of beam search, whole. Later ones have more probable tokens: by the mean they would be first."""
        says, number = self.says, str(choice) if choice else ""
        says = says.removesuffix("</s>") + number + "</s>" * says.endswith("</s>")
        tokens: list[Token] = []
        text = self._text(request)
        for count, id in enumerate(self.tokenizer.encode(says, add_special_tokens=False), 1):
            piece = text.push(id)
            special = self.tokenizer.is_special(id)
            logprob = self.logprob / (1 + choice)
            tokens.append(Token(id, piece.text, piece.delta, logprob, special, self._top(request.top_n), choice))
            reason = self._reason(request, id, count, bool(piece.stop))
            if reason:
                delta = text.end()
                return tokens, Finish(reason, text.text, delta, count, 0.25, 0.5, choice, -0.25 * (1 + choice))
        raise AssertionError("`says` must be as long as max_new_tokens, or end")

    def _grown(self, request: Request, best: list[Token], count: int) -> Grown:
        """The best answer is the second beam, from the second step on; the first says the same, and continues another."""
        assert request.beams is not None
        last = request.beams.width - 1
        id = best[count - 1].id if count < len(best) else 100
        parents = [last, min(count - 2, 1), *range(1, last)] if count > 1 else [0] * (last + 1)
        ids = [id, id if count > 1 else 2, *range(3, 2 + last)]
        beams = tuple(
            Beam(parent, id, self.tokenizer.token_text(id), -0.5 * count - place)
            for place, (parent, id) in enumerate(zip(parents, ids, strict=True))
        )
        return Grown(beams, (Beam(1, best[-1].id, best[-1].text, -0.25),) if count == len(best) else ())

    def _text(self, request: Request) -> TextStream:
        return self.tokenizer.stream(request.prompt, request.stop, request.include_stop, request.skip_special_tokens, request.shown)

    def _prompt(self, request: Request) -> Prompt:
        scored = len(request.prompt) - 1 if request.prompt_logprobs else 0
        top = tuple((id, -0.5 - id) for id in range(2, 2 + request.prompt_top_n))
        return Prompt((None, *[-1.0] * scored) if request.prompt_logprobs else (), top * scored, self.cached)

    def _says(self, request: Request) -> list[str]:
        """One text for each choice: the same with its number in front, but for the first."""
        return [self.says if not choice else f"{choice}{self.says}" for choice in range(request.choices)]

    async def _turn(self, count: int) -> None:
        await asyncio.sleep(0)
        if self.breaks is not None and count > self.breaks[0]:
            raise self.breaks[1]
        if self.pace is not None:
            await self.pace.acquire()

    def _top(self, count: int) -> tuple[Alternative, ...]:
        return tuple(Alternative(id, self.tokenizer.token_text(id), -1.0 - id, False) for id in range(2, 2 + count))

    def _reason(self, request: Request, id: int, count: int, stopped: bool) -> str:
        if stopped:
            return "stop_sequence"
        if id in request.end_ids:
            return "eos_token"
        return "length" if count == request.max_new_tokens else ""


@dataclass
class FakeMetrics:
    failures: list[str] = field(default_factory=list)
    looks: int = 0  # at samples

    def turned_away(self, kind: str) -> None:
        self.failures.append(kind)

    def watch(self, name: str, read: Callable[[], float]) -> None:
        pass

    def validated(self, seconds: float) -> None:
        pass

    def render(self) -> bytes:
        return b"tgi_queue_size 0\n"

    def samples(self, names: Sequence[str]) -> dict[str, float]:
        self.looks += 1
        return {name: float(place) for place, name in enumerate(names)}


@dataclass
class Server:
    """The application, served, and a client that talks to it."""

    batcher: FakeBatcher
    metrics: FakeMetrics
    client: aiohttp.ClientSession
    app: web.Application

    async def post(self, path: str, body: object, **options: Any) -> tuple[int, Any, aiohttp.ClientResponse]:
        """Status, JSON (None if the body is empty) and the response. Bytes are sent as they are."""
        content: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.client.post(path, **content, **options) as response:
            data = await response.read()
            return response.status, json.loads(data) if data else None, response

    async def get(self, path: str, **options: Any) -> tuple[int, bytes, aiohttp.ClientResponse]:
        async with self.client.get(path, **options) as response:
            return response.status, await response.read(), response

    async def events(self, path: str, body: object) -> list[Any]:
        """All events of a stream; "[DONE]" as a string. Fails on anything that is no `data: ` line with a blank line behind."""
        async with self.client.post(path, json=body) as response:
            assert response.status == 200
            assert response.headers["Content-Type"] == "text/event-stream"
            assert response.headers["X-Accel-Buffering"] == "no"
            blocks = (await response.read()).decode().split("\n\n")
        assert blocks.pop() == ""
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        texts = [block.removeprefix("data: ") for block in blocks]
        return ["[DONE]" if text == "[DONE]" else json.loads(text) for text in texts]

    async def named_events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a stream, in order, each under its own name."""
        async with self.client.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200
            assert response.headers["Content-Type"] == "text/event-stream"
            blocks = (await response.read()).decode().split("\n\n")
        assert blocks.pop() == ""
        found = []
        for block in blocks:
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
        return found


@asynccontextmanager
async def serving(
    tokenizer: Tokenizer,
    config: RouterConfig,
    batcher: FakeBatcher,
    replicas: Replicas | None = None,
    adapters: Adapters | None = None,
) -> AsyncIterator[Server]:
    """Real HTTP on a free port, with the runner's settings that the router uses."""
    metrics = FakeMetrics()
    app = make_app(config, tokenizer, batcher, metrics, None, replicas, adapters)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, auto_decompress=False, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        async with aiohttp.ClientSession(f"http://{host}:{port}") as client:
            yield Server(batcher, metrics, client, app)
    finally:
        await runner.cleanup()


def serve(
    tokenizer: Tokenizer, test: Callable[[Server], Awaitable[None]], *, settings: dict[str, Any] | None = None, **behaviour: Any
) -> None:
    """Runs a test against a server whose batcher behaves so. When it is over, every stream must be closed."""

    async def run() -> None:
        batcher = FakeBatcher(tokenizer, **behaviour)
        config = RouterConfig(**({"folder": "", "model": "some/model"} | (settings or {})))
        async with asyncio.timeout(60), serving(tokenizer, config, batcher) as server:
            await test(server)
        assert batcher.opened == batcher.closed

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    """Waits for it, a short while."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 (what is waited for tells nobody)
            await asyncio.sleep(0.005)
