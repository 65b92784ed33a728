"""OpenAI's chat completions and completions: bodies become requests to the batcher, streams of items become answers or SSE chunks.

What the fields mean is in `openai_bodies`, how answers look in `openai_shapes`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from time import monotonic
from typing import cast

import msgspec
from aiohttp import web

from ..adapters import Adapters
from ..config import RouterConfig
from ..record import answer_id
from ..request import Finish, Grown, Item, Prompt, Refused, Request, Token
from ..text import Tokenizer
from ..validation import Validator
from .body import json_response
from .errors import HttpError, Problem, openai_body
from .openai_bodies import (
    COMPLETION_TOKENS,
    UNSUPPORTED,
    UNSUPPORTED_IN_CHATS,
    BeamWidth,
    Body,
    ChatBody,
    CompletionBody,
    StreamOptions,
    beam_width_of,
    body_of,
    naming,
    parameters,
    prompt_alternatives,
)
from .openai_chats import Chats
from .openai_formats import format_name, grammar_of
from .openai_ids import WithTokenIds
from .openai_logprobs import Echo, LogprobWriter, encode
from .openai_shapes import Chat, Completions, Envelope, Json, Shapes, Usage
from .ports import Batcher, limits_of
from .stream import Answer, Clock, Encoder, escaped, fold, headers_of, send, speculation_of, sse_frame, stream_headers_of

DONE = b"data: [DONE]\n\n"
MOST_SCORES = 1 << 20  # log-probabilities of prompts that an answer with several choices may hold: some 70 bytes each


@dataclass(slots=True)
class Asked:
    """The requests that one body becomes (one for each prompt), and how their answer is to look."""

    requests: list[Request]
    envelope: Envelope
    shown: int  # choices of each request that are in the answer
    chat: bool  # a chat: prompt_logprobs stand beside `choices`, and not in each choice
    silent: bool  # the one generated token, which a request must have, is left out of the answer (`max_tokens` 0)
    beside: Json  # fields beside `choices` in the answer, or in its first chunk

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)


class OpenAI:
    """The handlers of /v1/chat/completions, /v1/completions and /v1/models."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        validator: Validator,
        chats: Chats,
        batcher: Batcher,
        adapters: Adapters,
    ) -> None:
        self._config = config
        self._adapters = adapters
        self._validator = validator
        self._batcher = batcher
        self._chats = chats
        self._writer = LogprobWriter(tokenizer)
        self._fingerprint = f"{version('penstock')}-native"

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        clock = Clock()
        body, headers = body_of(http, ChatBody, self._config, UNSUPPORTED_IN_CHATS)
        if body.best_of not in (None, body.n or 1) and not body.use_beam_search:
            raise Refused("`best_of` is not supported for chats: ask for `n` answers", "best_of")
        if body.top_logprobs and not body.logprobs:
            raise Refused("`top_logprobs` needs `logprobs`: true", "top_logprobs")
        width = beam_width_of(body)
        shown, _ = self._drawn(body, width)
        alternatives = prompt_alternatives(body)
        limits = limits_of(self._batcher)
        asked = parameters(
            http,
            body,
            limits,
            choices=shown,
            width=width,
            max_new_tokens=body.most,
            top_n_tokens=body.top_logprobs,
            prompt_logprobs=alternatives is not None,
            prompt_top_n=alternatives or 0,
        )
        with naming(**body.names, **width.names):
            request, make = await self._chats.request(body, asked, limits)
        shapes = Chat(self._writer, bool(body.logprobs), make)
        return await self._answer(http, clock, body, self._asked(body, [request], shapes, shown), headers)

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        clock = Clock()
        body, headers = body_of(http, CompletionBody, self._config, UNSUPPORTED)
        prompts = _prompts(body.prompt)
        most = self._config.most_prompts
        if len(prompts) > most:
            flag = "--max-client-batch-size" if most == self._config.max_client_batch_size else "--max-concurrent-requests"
            raise Refused(
                f"Number of prompts exceeds the maximum allowed batch size of {most} ({flag}). Given: {len(prompts)}", "prompt"
            )
        width = beam_width_of(body)
        shown, drawn = self._drawn(body, width)
        scored = bool(body.echo) and body.logprobs is not None
        alternatives = prompt_alternatives(body)
        if scored and alternatives is not None:
            raise Refused("`prompt_logprobs` together with `echo` and `logprobs` says the same twice", "prompt_logprobs")
        silent = body.max_tokens == 0 and (bool(body.echo) or alternatives is not None)
        asked_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        if silent and width.beams is None:
            width = BeamWidth(1)  # nothing is generated, so there is nothing to search, whatever the operator's default is
        limits = limits_of(self._batcher)
        asked = parameters(
            http,
            body,
            limits,
            choices=drawn,
            width=width,
            max_new_tokens=1 if silent else asked_tokens,
            top_n_tokens=body.logprobs,
            prompt_logprobs=scored or alternatives is not None,
            prompt_top_n=(body.logprobs if scored else alternatives) or 0,
            grammar=grammar_of(body),
        )
        special = body.add_special_tokens is not False
        theirs = {"inputs": "prompt", "max_new_tokens": "max_tokens", "top_n_tokens": "logprobs", "grammar": format_name(body)}
        with naming(**theirs, **width.names, truncate="truncate_prompt_tokens"):
            requests = [await self._validator.request(prompt, asked, limits, add_special_tokens=special) for prompt in prompts]
        if asked.prompt_logprobs:
            _refuse_many_scores(requests, shown, "echo" if scored else "prompt_logprobs")
        echoes = _echoes(body, prompts, requests) if body.echo else ()
        shapes = Completions(self._writer, body.logprobs, echoes, shown, silent)
        return await self._answer(http, clock, body, self._asked(body, requests, shapes, shown, silent), headers)

    async def models(self, http: web.Request) -> web.Response:
        """GET /v1/models."""
        return json_response({"object": "list", "data": [self._model(id) for id in self._ids]})

    async def model(self, http: web.Request) -> web.Response:
        """GET /v1/models/{id}."""
        id = http.match_info["id"]
        if id not in self._ids:
            known = ", ".join(f"`{each}`" for each in self._ids)
            raise HttpError(Problem(404, "model_not_found", f"the model `{id}` does not exist: this server has {known}"))
        return json_response(self._model(id))

    @property
    def _ids(self) -> tuple[str, ...]:
        """The model's name, and those of its LoRA adapters."""
        return self._config.model, *self._adapters.names

    def _model(self, id: str) -> Json:
        base, limits = self._config.model, self._batcher.limits
        model: Json = {"id": id, "object": "model", "created": 0, "owned_by": base}
        if id != base:
            model["parent"] = base
            if folder := self._adapters.folder(id):
                model["root"] = folder
        return model if limits is None else model | {"max_model_len": limits.max_total_tokens}

    def _drawn(self, body: Body, width: BeamWidth) -> tuple[int, int]:
        """How many answers to a prompt are shown, and how many are sampled. A beam search returns just as many as are shown."""
        shown = self._choices("n", body.n)
        if width.searched and body.best_of not in (None, shown) and width.field != "best_of":
            raise Refused(f"`best_of` together with `{width.field}` > 1 is not supported: `n` are the best beams", "best_of")
        drawn = shown if body.best_of is None else self._choices("best_of", body.best_of)
        if drawn < shown:
            raise Refused(f"`best_of` must be at least `n`. Given: {drawn} and {shown}", "best_of")
        if body.use_beam_search:
            return shown, shown
        if drawn > shown and body.stream:
            raise Refused("`best_of` > `n` is not supported when streaming tokens", "best_of")
        return shown, drawn

    def _choices(self, name: str, given: int | None) -> int:
        most = self._config.most_choices
        if given is not None and not 0 < given <= most:
            flag = "--max-best-of" if most == self._config.max_best_of else "--max-batch-size"
            raise Refused(f"`{name}` must be from 1 to {most} ({flag}). Given: {given}", name)
        return given or 1

    def _asked(self, body: Body, requests: list[Request], shapes: Shapes, shown: int, silent: bool = False) -> Asked:
        chat = isinstance(body, ChatBody)
        beside: Json = {}
        if body.return_token_ids:
            if any(request.images for request in requests):
                raise Refused("`return_token_ids` together with images is not supported: they have no tokens", "return_token_ids")
            if chat:
                beside = {"prompt_token_ids": requests[0].prompt}
            shapes = WithTokenIds(shapes, () if chat else [request.prompt for request in requests], shown, silent)
        id = answer_id(shapes.id_prefix)
        envelope = Envelope(shapes, body.model or self._config.model, self._fingerprint, id, body.service_tier)
        return Asked(requests, envelope, shown, chat, silent, beside)

    async def _answer(
        self, http: web.Request, clock: Clock, body: Body, asked: Asked, headers: dict[str, str]
    ) -> web.StreamResponse:
        clock.valid()
        requests, shapes = asked.requests, asked.envelope.shapes
        if body.stream:
            events = Events(asked, body.stream_options or StreamOptions(), clock)
            return await send(http, self._batcher, requests, events, stream_headers_of(clock, requests) | headers, shapes.open)
        folded = await fold([self._batcher.submit(request) for request in requests], requests[0].choices)
        prompts = [drawn[0].prompt for drawn in folded]
        for place, prompt in enumerate(prompts):
            await shapes.open(place, prompt)
        pairs = zip(requests, prompts, strict=True) if body.prompt_logprobs is not None else ()
        entries = [await self._writer.entries(request, prompt) for request, prompt in pairs]
        headers = headers_of(clock, requests, _all(folded)) | headers
        if asked.silent:
            headers["x-generated-tokens"] = "0"
        return json_response(await _whole(asked, folded, entries), headers)


async def _whole(asked: Asked, folded: list[list[Answer]], entries: Sequence[msgspec.Raw]) -> Json:
    """A non-streamed answer. entries: `prompt_logprobs` of each prompt, if they are asked for."""
    shapes = asked.envelope.shapes
    shown = [
        (place, place * asked.shown + index, answer)
        for place, drawn in enumerate(folded)
        for index, answer in enumerate(_best(drawn, asked.shown))
    ]
    choices = [await shapes.choice(index, answer) for _, index, answer in shown]
    usage = Usage(
        prompt_tokens=asked.prompt_tokens,
        completion_tokens=0 if asked.silent else sum(answer.finish.generated_tokens for answer in _all(folded)),
        cached_tokens=sum(drawn[0].prompt.cached_tokens for drawn in folded),
        reasoning_tokens=shapes.reasoning_tokens(),
        speculations=[speculation_of(answer.finish for answer in drawn) for drawn in folded],
    )
    beside = asked.beside
    if entries and asked.chat:
        beside = {"prompt_logprobs": entries[0]} | beside
    elif entries:
        choices = [choice | {"prompt_logprobs": entries[place]} for choice, (place, _, _) in zip(choices, shown, strict=True)]
    return asked.envelope.whole(choices, usage) | beside


class Events(Encoder):
    """The SSE chunks of one streamed answer: one for each choice of each item, usage if it is asked for, [DONE]."""

    def __init__(self, asked: Asked, options: StreamOptions, clock: Clock) -> None:
        self._asked = asked
        self._options = options
        self._shapes = asked.envelope.shapes
        self._usage = Usage(asked.prompt_tokens)
        # choices of a beam search behind the best that have no opening chunk yet: there may be fewer than asked for
        self._unopened: set[int] = set()
        self._finishes: dict[int, Finish] = {}  # of each stream, the last so far
        self._timing = Timing(clock.arrived)
        self._head, self._tail = asked.envelope.chunk()
        usage = b',"usage":null}' if options.include_usage else b"}"
        self._rest = None if options.continuous_usage_stats else self._tail + usage
        # What stands in a frame before and behind a token's delta, by choice; None: more than the delta changes from token to
        # token.
        self._around = [self._find_around(place) for place in range(asked.shown * len(asked.requests))]

    def of(self, stream: int, items: Sequence[Item]) -> bytes:
        """See `Encoder`."""
        first = stream * self._asked.shown
        if len(items) == 1:  # the most common case
            return self._frames(first, items[0])
        return b"".join([self._frames(first, item) for item in items])

    def _frames(self, first: int, item: Item) -> bytes:
        if isinstance(item, Token):
            place = first + item.choice
            if place in self._unopened:
                self._unopened.remove(place)
                return self._framed(self._shapes.opening(place)) + self._frames(first, item)
            self._usage.completion_tokens += not self._asked.silent
            around = self._around[place]
            if around is None:
                return self._framed(self._shapes.delta(place, item))
            delta = encode(item.delta)
            return around[0] + (delta if delta.isascii() else escaped(delta)) + around[1]
        if isinstance(item, Prompt):
            self._timing.begin()
            self._usage.cached_tokens += item.cached_tokens
            places = range(first, first + self._asked.shown)
            if self._asked.requests[0].beams is not None:
                self._unopened.update(places[1:])
                places = places[:1]
            beside = encode(self._asked.beside)[1:-1] if first == 0 else b""
            return b"".join([self._framed(self._shapes.opening(place), beside if place == 0 else b"") for place in places])
        if isinstance(item, Grown):  # beams of each step, which cannot be asked for on these routes
            return b""
        self._timing.end(item)
        self._finishes[first] = item
        return self._framed(self._shapes.delta(first + item.choice, item))

    def end(self) -> bytes:
        """The chunk with the usage, if it was asked for, and [DONE]."""
        if not self._options.include_usage:
            return DONE
        self._usage.reasoning_tokens = self._shapes.reasoning_tokens()
        self._usage.speculations = [finish.speculation for finish in self._finishes.values()]
        usage, timing = encode(self._usage.json()), encode(self._timing.json(self._usage.completion_tokens))
        return sse_frame(b'%b%b,"usage":%b,"metrics":%b}' % (self._head, self._tail, usage, timing)) + DONE

    def failed(self, problem: Problem) -> bytes:
        """The error event that ends an answer that failed, and [DONE]."""
        return sse_frame(openai_body(problem)) + DONE

    def _find_around(self, place: int) -> tuple[bytes, bytes] | None:
        around = self._shapes.around(place)
        if around is None or self._rest is None:
            return None
        return b"data: " + escaped(self._head) + around[0], around[1] + escaped(self._rest) + b"\n\n"

    def _framed(self, choice: bytes | None, beside: bytes = b"") -> bytes:
        """A chunk with one choice; b"" without one. beside: encoded fields next to `choices`."""
        if choice is None:
            return b""
        rest = self._rest or b'%b,"usage":%b}' % (self._tail, encode(self._usage.json()))
        return sse_frame(self._head + choice + (rest[:-1] + b"," + beside + b"}" if beside else rest))


class Timing:
    """vLLM's `metrics` of an answer, in milliseconds, which its load generator reads."""

    def __init__(self, arrived: float) -> None:
        self._arrived = arrived
        self._first = 0.0
        self._last = 0.0
        self._queued = 0.0

    def begin(self) -> None:
        """The prompt is computed and its first token sampled."""
        self._first = self._first or monotonic()

    def end(self, finish: Finish) -> None:
        """A choice has ended."""
        self._last = monotonic()
        self._queued = max(self._queued, finish.queue_seconds)

    def json(self, tokens: int) -> Json:
        generation = self._last - self._first
        return {
            "time_to_first_token_ms": 1000 * (self._first - self._arrived),
            "generation_time_ms": 1000 * generation,
            "queue_time_ms": 1000 * self._queued,
            "mean_itl_ms": 1000 * generation / (tokens - 1) if tokens > 1 else None,
            "tokens_per_second": tokens / generation if generation else None,
        }


def _all(folded: list[list[Answer]]) -> list[Answer]:
    return [answer for drawn in folded for answer in drawn]


def _best(answers: list[Answer], count: int) -> list[Answer]:
    """All answers in order, or, where more were sampled than are shown, the most probable per token, best first."""
    if len(answers) <= count:
        return answers
    return sorted(answers, key=lambda answer: answer.mean_logprob, reverse=True)[:count]


def _refuse_many_scores(requests: Sequence[Request], shown: int, name: str) -> None:
    """Raises Refused for answers that repeat more log-probabilities of prompts than a single one may need. name: the field to
    blame."""
    scores = shown * sum(len(request.prompt) * (1 + request.prompt_top_n) for request in requests)
    if scores > MOST_SCORES and len(requests) * shown > 1:
        raise Refused(
            f"the answers would hold {scores} log-probabilities of prompts, and {MOST_SCORES} can be had at once: ask for fewer "
            "prompts, answers or alternatives",
            name,
        )


def _echoes(body: CompletionBody, prompts: Sequence[str | list[int]], requests: Sequence[Request]) -> list[Echo]:
    """The prompts that answers begin with because of `echo`."""
    whole = body.truncate_prompt_tokens is None
    texts = [prompt if isinstance(prompt, str) and whole else "" for prompt in prompts]
    return [Echo(request, text) for request, text in zip(requests, texts, strict=True)]


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """`prompt` as a list of prompts, each a text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {*map(type, prompt)}
    if len(kinds) != 1:
        raise Refused("`prompt` must be a string, a list of strings, a list of token ids or a list of such lists", "prompt")
    return cast("list[str | list[int]]", [prompt] if kinds == {int} else prompt)
