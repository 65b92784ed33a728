"""A fake batcher behind the real HTTP application: it generates the text that a test has set.

Also a small tokenizer for tests of the API, and the server with a client.
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
from penstock.router.api.app import make_app, make_runner
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
    """A token per byte; <s> is put in front, </s> ends. template: for chats."""
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
    """Answers every request with the text `generates`, like a shard: it ends at </s>, at a stop string, or after max_new_tokens."""

    tokenizer: Tokenizer
    generates: str = "Hello you</s>"
    ready: bool = True
    stage: str = "ready"
    limits: Limits | None = LIMITS
    fails_with: Failure | None = None  # raised instead of the first item
    fails_after: tuple[int, Failure] | None = None  # raised after that many tokens
    token_permits: asyncio.Semaphore | None = None  # one permit for each token
    logprob: float = -0.5
    cached: int = 0  # cached tokens of every prompt
    max_beams_found: int = 1 << 30  # maximum number of answers of a beam search
    requests: list[Request] = field(default_factory=list)
    opened: int = 0
    closed: int = 0
    tokens_sent: int = 0  # by all streams

    def submit(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[list[Item], None]:
        self.requests.append(request)
        return self._not_taken_by_sink(request, sink)

    async def _not_taken_by_sink(self, request: Request, sink: Sink | None) -> AsyncGenerator[list[Item], None]:
        async with aclosing(self._items(request)) as lists:
            async for items in lists:
                if sink is None or not sink(items):
                    yield items

    async def _items(self, request: Request) -> AsyncGenerator[list[Item], None]:
        """The choices' tokens in turn, one of each; later choices are less probable."""
        if self.fails_with is not None:
            raise self.fails_with
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
                self.tokenizer.encode(answer, add_special_tokens=False)[: request.max_new_tokens] for answer in self._texts(request)
            ]
            unfinished = dict(enumerate(answers))
            for count in range(1, request.max_new_tokens + 1):
                await self._wait_or_fail(count)
                if count == 1:
                    yield [self._prompt(request)]
                for choice, ids in list(unfinished.items()):
                    piece = texts[choice].push(id := ids[count - 1])
                    self.tokens_sent += 1
                    logprob = self.logprob * (1 + choice)
                    special = self.tokenizer.is_special(id)
                    token = Token(id, piece.text, piece.delta, logprob, special, self._top(request.top_n), choice)
                    reason = self._finish_reason(request, id, count, bool(piece.stop))
                    if reason:
                        delta = texts[choice].end()
                        speculation = Speculation(3 * count, 2 * count, count) if request.drafts else None
                        yield [
                            token,
                            Finish(reason, texts[choice].text, delta, count, 0.25, 0.5, choice, None, speculation, piece.stop),
                        ]
                        del unfinished[choice]
                    else:
                        yield [token]
                if not unfinished:
                    return
            raise AssertionError("`generates` must be as long as max_new_tokens, or end")
        finally:
            self.closed += 1

    async def _search(self, request: Request) -> AsyncGenerator[list[Item], None]:
        """The text `generates`, and variants with a number before their end: tokens that they share one by one, then the rest."""
        found = [self._found(request, choice) for choice in range(min(request.choices, self.max_beams_found))]
        longest = max(len(tokens) for tokens, _ in found)
        shared = next(
            (
                position
                for position, tokens in enumerate(zip(*(tokens_of_one for tokens_of_one, _ in found), strict=False))
                if len({t.id for t in tokens}) > 1
            ),
            longest - 1,
        )
        for count in range(1, longest + 1):
            await self._wait_or_fail(count)
            items: list[Item] = [self._prompt(request)] if count == 1 else []
            items += [self._grown(request, found[0][0], count)] if request.beams and request.beams.watched else []
            items += found[0][0][count - 1 : count] if count <= shared else []
            if count == longest:
                for tokens, finish in found:
                    items += [*(tokens if finish.choice else tokens[shared:]), finish]
            self.tokens_sent += sum(isinstance(item, Token) for item in items)
            if items:
                yield items

    def _found(self, request: Request, choice: int) -> tuple[list[Token], Finish]:
        """A whole answer of a beam search. Later ones have more probable tokens: by mean log-probability they would be first."""
        answer, number = self.generates, str(choice) if choice else ""
        answer = answer.removesuffix("</s>") + number + "</s>" * answer.endswith("</s>")
        tokens: list[Token] = []
        text = self._text(request)
        for count, id in enumerate(self.tokenizer.encode(answer, add_special_tokens=False), 1):
            piece = text.push(id)
            special = self.tokenizer.is_special(id)
            logprob = self.logprob / (1 + choice)
            tokens.append(Token(id, piece.text, piece.delta, logprob, special, self._top(request.top_n), choice))
            reason = self._finish_reason(request, id, count, bool(piece.stop))
            if reason:
                delta = text.end()
                return tokens, Finish(reason, text.text, delta, count, 0.25, 0.5, choice, -0.25 * (1 + choice))
        raise AssertionError("`generates` must be as long as max_new_tokens, or end")

    def _grown(self, request: Request, best: list[Token], count: int) -> Grown:
        """From the second step on the best answer is the second beam; the first has the same token, but another parent."""
        assert request.beams is not None
        last = request.beams.width - 1
        id = best[count - 1].id if count < len(best) else 100
        parents = [last, min(count - 2, 1), *range(1, last)] if count > 1 else [0] * (last + 1)
        ids = [id, id if count > 1 else 2, *range(3, 2 + last)]
        beams = tuple(
            Beam(parent, id, self.tokenizer.token_text(id), -0.5 * count - rank)
            for rank, (parent, id) in enumerate(zip(parents, ids, strict=True))
        )
        return Grown(beams, (Beam(1, best[-1].id, best[-1].text, -0.25),) if count == len(best) else ())

    def _text(self, request: Request) -> TextStream:
        return self.tokenizer.stream(request.prompt, request.stop, request.include_stop, request.skip_special_tokens, request.shown)

    def _prompt(self, request: Request) -> Prompt:
        scored = len(request.prompt) - 1 if request.prompt_logprobs else 0
        top = tuple((id, -0.5 - id) for id in range(2, 2 + request.prompt_top_n))
        return Prompt((None, *[-1.0] * scored) if request.prompt_logprobs else (), top * scored, self.cached)

    def _texts(self, request: Request) -> list[str]:
        """One text for each choice: all but the first begin with the choice's number."""
        return [self.generates if not choice else f"{choice}{self.generates}" for choice in range(request.choices)]

    async def _wait_or_fail(self, count: int) -> None:
        await asyncio.sleep(0)
        if self.fails_after is not None and count > self.fails_after[0]:
            raise self.fails_after[1]
        if self.token_permits is not None:
            await self.token_permits.acquire()

    def _top(self, count: int) -> tuple[Alternative, ...]:
        return tuple(Alternative(id, self.tokenizer.token_text(id), -1.0 - id, False) for id in range(2, 2 + count))

    def _finish_reason(self, request: Request, id: int, count: int, stopped: bool) -> str:
        if stopped:
            return "stop_sequence"
        if id in request.end_ids:
            return "eos_token"
        return "length" if count == request.max_new_tokens else ""


@dataclass
class FakeMetrics:
    failures: list[str] = field(default_factory=list)
    samplings: int = 0  # calls of `samples`

    def turned_away(self, kind: str) -> None:
        self.failures.append(kind)

    def watch(self, name: str, read: Callable[[], float]) -> None:
        pass

    def validated(self, prompt: int, max_new_tokens: int) -> None:
        pass

    def render(self) -> bytes:
        return b"tgi_queue_size 0\n"

    def samples(self, names: Sequence[str]) -> dict[str, float]:
        self.samplings += 1
        return {name: float(index) for index, name in enumerate(names)}


@dataclass
class Server:
    """The served application, and a client for it."""

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
        """All events of a stream; "[DONE]" as a string. Fails unless each is one `data: ` line followed by a blank line."""
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
        """All events of a stream whose events have names; each name must equal the event's `type`."""
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
    """Serves real HTTP on a free port, with the settings for the runner that the router uses."""
    metrics = FakeMetrics()
    app = make_app(config, tokenizer, batcher, metrics, None, replicas, adapters)
    runner = make_runner(app, 1.0)
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
    """Runs a test against a server whose fake batcher has this behaviour. At the end every stream must be closed."""

    async def run() -> None:
        batcher = FakeBatcher(tokenizer, **behaviour)
        config = RouterConfig(**({"folder": "", "model": "some/model"} | (settings or {})))
        async with asyncio.timeout(60), serving(tokenizer, config, batcher) as server:
            await test(server)
        assert batcher.opened == batcher.closed

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    """Waits for the condition, for at most five seconds."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 (nothing signals the change)
            await asyncio.sleep(0.005)
