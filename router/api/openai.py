"""OpenAI's routes: its JSON to requests, streams of items to its JSON. Nothing else.

Fields that nobody has heard of are ignored, since clients send many. Fields that would change the answer and that the server
can't honour are refused by name. vLLM's extra fields are taken where they cost nothing.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web

from ..config import RouterConfig
from ..request import Priority, Prompt, Refused, Request, Token
from ..text import Tokenizer
from ..validation import Parameters, Validator
from .body import json_response, read
from .errors import Problem, openai_body
from .openai_shapes import Chat, Completions, Envelope, Json, Shapes, Usage
from .ports import Batcher, Item, limits_of
from .stream import Answer, Clock, fold, headers_of, merge, send, stream_headers_of
from .tenant import tenant_of

COMPLETION_TOKENS = 16  # OpenAI's default of `max_tokens`, for completions only
DONE = b"[DONE]"

TIERS = {  # OpenAI's service tiers
    "auto": Priority.NORMAL,
    "default": Priority.NORMAL,
    "flex": Priority.BATCH,
    "priority": Priority.INTERACTIVE,
}

# Values of unsupported fields that ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "logits_processors": ([],),
    "bad_words": ([],),
    "documents": ([],),
    "chat_template_kwargs": ({},),
    "modalities": (["text"],),
}
REASONS = {
    "suffix": "Suffix is not supported and can be achieved by preprocessing the prompt.",
}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage on each chunk


class Unsupported(msgspec.Struct, kw_only=True):
    """What would change the answer, and can't be honoured yet: refused by name."""

    echo: Any = None
    suffix: Any = None
    tools: Any = None
    functions: Any = None
    tool_choice: Any = None
    function_call: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    use_beam_search: Any = None
    min_tokens: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    logits_processors: Any = None
    bad_words: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    documents: Any = None
    modalities: Any = None
    audio: Any = None


class Body(Unsupported, kw_only=True):
    """What both routes take. An explicit null is the same as nothing."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    n: int | None = None
    priority: Any = None  # ours
    timeout: float | None = None  # ours: seconds
    service_tier: str | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None


class CompletionBody(Body, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: int | None = None


class ChatBody(Body, kw_only=True):
    messages: list[dict[str, Any]]
    best_of: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """The requests of one body, and how their answer shall look."""

    requests: list[Request]
    envelope: Envelope
    body: Body
    shown: int  # choices of each request that are in the answer


class OpenAI:
    """The handlers."""

    def __init__(self, config: RouterConfig, tokenizer: Tokenizer, validator: Validator, batcher: Batcher) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._validator = validator
        self._batcher = batcher
        self._fingerprint = f"{version('penstock')}-native"
        self._completion = msgspec.json.Decoder(CompletionBody)
        self._chat = msgspec.json.Decoder(ChatBody)

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        clock = Clock()
        body = await read(http, self._chat, self._config.payload_limit)
        _refuse_unsupported(body)
        if body.best_of not in (None, body.n or 1):
            raise Refused("`best_of` is not supported for chats: ask for `n` answers", "best_of")
        if body.top_logprobs and not body.logprobs:
            raise Refused("`top_logprobs` needs `logprobs`: true", "top_logprobs")
        asked_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        shown = self._choices("n", body.n)
        parameters = _parameters(http, body, asked_tokens, body.top_logprobs, shown)
        prompt = self._chat_prompt(body)
        request = await self._validator.request(
            prompt, parameters, limits_of(self._batcher), add_special_tokens=bool(body.add_special_tokens)
        )
        return await self._answer(http, clock, self._asked([request], Chat(bool(body.logprobs)), body, shown))

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        clock = Clock()
        body = await read(http, self._completion, self._config.payload_limit)
        _refuse_unsupported(body)
        prompts = _prompts(body.prompt)
        most = self._config.max_client_batch_size
        if len(prompts) > most:
            raise Refused(f"Number of prompts exceeds the maximum allowed batch size of {most}", "prompt")
        asked_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        shown = self._choices("n", body.n)
        drawn = shown if body.best_of is None else self._choices("best_of", body.best_of)
        if drawn < shown:
            raise Refused(f"`best_of` must be at least `n`. Given: {drawn} and {shown}", "best_of")
        if drawn > shown and body.stream:
            raise Refused("`best_of` > `n` is not supported when streaming tokens", "best_of")
        parameters = _parameters(http, body, asked_tokens, body.logprobs, drawn)
        limits = limits_of(self._batcher)
        special = body.add_special_tokens is not False
        requests = [await self._validator.request(prompt, parameters, limits, add_special_tokens=special) for prompt in prompts]
        return await self._answer(http, clock, self._asked(requests, Completions(body.logprobs), body, shown))

    async def models(self, http: web.Request) -> web.Response:
        """GET /v1/models."""
        config, limits = self._config, self._batcher.limits
        model: Json = {"id": config.model, "object": "model", "created": 0, "owned_by": config.model}
        if limits is not None:
            model["max_model_len"] = limits.max_total_tokens
        return json_response({"object": "list", "data": [model]})

    def _chat_prompt(self, body: ChatBody) -> str:
        if not body.messages:
            raise Refused("`messages` cannot be empty", "messages")
        messages = [_message(message, index) for index, message in enumerate(body.messages)]
        if body.add_generation_prompt and body.continue_final_message:
            raise Refused("`continue_final_message` excludes `add_generation_prompt`", "continue_final_message")
        # As in TGI, an answer that the client has begun is continued, unless it says otherwise.
        continued = body.continue_final_message
        if continued is None:
            last = messages[-1]
            begun = last["role"] == "assistant" and isinstance(last.get("content"), str)
            continued = begun and not body.add_generation_prompt
        return self._tokenizer.render_chat(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=continued,
        )

    def _choices(self, name: str, given: int | None) -> int:
        most = self._validator.most_choices
        if given is not None and not 0 < given <= most:
            flag = "--max-best-of" if most == self._config.max_best_of else "--max-batch-size"
            raise Refused(f"`{name}` must be from 1 to {most} ({flag}). Given: {given}", name)
        return given or 1

    def _asked(self, requests: list[Request], shapes: Shapes, body: Body, shown: int) -> Asked:
        envelope = Envelope(shapes, body.model or self._config.model, self._fingerprint, body.service_tier)
        return Asked(requests, envelope, body, shown)

    async def _answer(self, http: web.Request, clock: Clock, asked: Asked) -> web.StreamResponse:
        clock.valid()
        streams = [self._batcher.submit(request) for request in asked.requests]
        if asked.body.stream:
            headers = stream_headers_of(clock, asked.requests)
            return await send(http, _events(asked, streams), headers, _told)
        folded = await fold(streams, asked.requests[0].choices)
        answers = [answer for drawn in folded for answer in drawn]
        shown = [answer for drawn in folded for answer in _best(drawn, asked.shown)]
        usage = Usage(_prompt_tokens(asked), sum(answer.finish.generated_tokens for answer in answers))
        choices = [asked.envelope.shapes.choice(index, answer) for index, answer in enumerate(shown)]
        return json_response(asked.envelope.whole(choices, usage), headers_of(clock, asked.requests, answers))


async def _events(asked: Asked, streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[bytes, None]:
    envelope, shapes = asked.envelope, asked.envelope.shapes
    options = asked.body.stream_options or StreamOptions()
    usage = Usage(_prompt_tokens(asked))
    encode = msgspec.json.Encoder().encode

    def event(choices: list[Json], told: bool) -> bytes:
        extra = {"usage": usage.json() if told else None} if options.include_usage or told else {}
        return encode(envelope.chunk(choices) | extra)

    async with aclosing(merge(streams)) as items:
        async for index, item in items:
            first = index * asked.shown
            if isinstance(item, Prompt):
                choices = [shapes.opening(first + choice) for choice in range(asked.shown)]
            else:
                choices = [shapes.delta(first + item.choice, item)]
                usage.completion_tokens += isinstance(item, Token)
            for choice in choices:
                if choice is not None:
                    yield event([choice], bool(options.continuous_usage_stats))
    if options.include_usage:
        yield event([], True)
    yield DONE


def _told(problem: Problem) -> list[bytes]:
    """The end of a stream that failed."""
    return [openai_body(problem), DONE]


def _best(answers: list[Answer], count: int) -> list[Answer]:
    """All in order, or the most probable ones, best first, where more were drawn."""
    if len(answers) == count:
        return answers
    return sorted(answers, key=lambda answer: answer.mean_logprob, reverse=True)[:count]


def _prompt_tokens(asked: Asked) -> int:
    return sum(len(request.prompt) for request in asked.requests)


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """One or several, each a text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    texts = [entry for entry in prompt if isinstance(entry, str)]
    ids = [entry for entry in prompt if isinstance(entry, int)]
    lists = [entry for entry in prompt if isinstance(entry, list)]
    if not prompt or len(prompt) not in (len(texts), len(ids), len(lists)):
        raise Refused("`prompt` must be a string, a list of strings, a list of token ids or a list of such lists", "prompt")
    return [ids] if ids else [*texts, *lists]


def _message(message: dict[str, Any], index: int) -> dict[str, Any]:
    """A message as templates expect it: content in parts becomes one text. Other fields are the template's affair."""
    if not isinstance(message.get("role"), str):
        raise Refused(f"`messages[{index}].role` must be a string", "messages")
    content = message.get("content")
    if isinstance(content, list):
        return message | {"content": "".join(_part(part, index) for part in content)}
    if content is not None and not isinstance(content, str):
        raise Refused(f"`messages[{index}].content` must be a string or a list of parts", "messages")
    return message


def _part(part: object, index: int) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise Refused(f"`messages[{index}].content` has a part that is no text: only text is supported", "messages")


def _priority(body: Body) -> object:
    """Ours by name; OpenAI's tiers mean the same."""
    if body.priority is None and body.service_tier is not None:
        if body.service_tier not in TIERS:
            raise Refused(f'`service_tier` must be one of {", ".join(TIERS)}. Given: "{body.service_tier}"', "service_tier")
        return TIERS[body.service_tier]
    return body.priority


def _parameters(http: web.Request, body: Body, max_new_tokens: int | None, top_n: int | None, choices: int) -> Parameters:
    """OpenAI's neutral values, and vLLM's, are TGI's absence."""
    greedy = body.temperature == 0.0
    return Parameters(
        choices=choices,
        priority=_priority(body),
        timeout=body.timeout,
        tenant=tenant_of(http),
        temperature=None if greedy else body.temperature,
        do_sample=not greedy,
        top_k=None if greedy or body.top_k in (0, -1) else body.top_k,
        top_p=None if greedy or body.top_p == 1.0 else body.top_p,
        min_p=None if greedy else body.min_p,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias or {},
        seed=_seed(body.seed),
        max_new_tokens=max_new_tokens,
        stop=[body.stop] if isinstance(body.stop, str) else body.stop or (),
        include_stop=bool(body.include_stop_str_in_output),
        end_ids=body.stop_token_ids or (),
        ignore_eos=bool(body.ignore_eos),
        top_n_tokens=top_n,
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _seed(seed: int | None) -> int | None:
    """OpenAI's seeds are signed."""
    return seed + 2**64 if seed is not None and -(2**63) <= seed < 0 else seed


def _refuse_unsupported(body: Body) -> None:
    for name in Unsupported.__struct_fields__:
        value = getattr(body, name)
        if value is not None and value not in NEUTRAL.get(name, ()):
            raise Refused(REASONS.get(name, f"`{name}` is not supported yet"), name)
