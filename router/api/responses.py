"""OpenAI's Responses API: its items become a chat's messages, a stream of items becomes its SSE events. The server keeps no
answers."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from ..config import RouterConfig
from ..request import Finish, Grown, Item, Prompt, Refused, Token
from ..text import Tokenizer
from .body import json_response
from .errors import Problem, as_openai, shown
from .openai_bodies import (
    MOST_TOP_LOGPROBS,
    ChatBody,
    Common,
    StreamOptions,
    body_of,
    effort_of,
    naming,
    parameters,
    placing,
)
from .openai_chats import Chats, message_parser_of
from .openai_formats import contradiction
from .openai_logprobs import LogprobWriter, encode
from .openai_shapes import Json, Usage
from .ports import Batcher, limits_of
from .responses_shapes import Output, Response
from .stream import Clock, Encoder, fold, headers_of, send, sse_frame_with_event, stream_headers_of

LOGPROBS = "message.output_text.logprobs"
FUNCTION = re.compile(r"tools\[(\d+)\]\.function")  # the place of a tool's fields in chats; in this API they stand beside the type
NAMES = {
    "inputs": "input",
    "messages": "input",
    "max_new_tokens": "max_output_tokens",
    "top_n_tokens": "top_logprobs",
    "truncate": "truncate_prompt_tokens",
}
FORMAT_NAMES = {"response_format.json_schema": "text.format", "response_format": "text.format"}
NEUTRAL_TEXT = (("verbosity", None), ("verbosity", "medium"))
NOTHING = "reasoning.encrypted_content"  # may be named in `include`: there is none


class ResponsesBody(Common, kw_only=True):
    """Body of POST /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, Any] | None = None

    # Fields that would change the answer and cannot be honoured.
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: Any = None
    store: Any = None
    truncation: Any = None
    max_tool_calls: Any = None
    num_return_sequences: Any = None
    use_beam_search: Any = None
    beam_width: Any = None
    stream_beams: Any = None
    num_beam_groups: Any = None
    diversity_penalty: Any = None
    force_words_ids: Any = None

    @property
    def unknown(self) -> list[str]:
        """`text.verbosity`, unless it is OpenAI's default, and whatever else `text` has beside a format."""
        members = (self.text or {}).items()
        return [f"text.{name}" for name, value in members if name != "format" and (name, value) not in NEUTRAL_TEXT]


UNSUPPORTED = ResponsesBody.__struct_fields__[ResponsesBody.__struct_fields__.index("previous_response_id") :]


class Responses:
    """The handler of /v1/responses."""

    def __init__(self, config: RouterConfig, tokenizer: Tokenizer, chats: Chats, batcher: Batcher) -> None:
        self._config = config
        self._batcher = batcher
        self._chats = chats
        self._writer = LogprobWriter(tokenizer)

    async def create(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        clock = Clock()
        body, headers = body_of(http, ResponsesBody, self._config, UNSUPPORTED)
        limits = limits_of(self._batcher)
        logprobs = _logprobs(body)
        messages, places = messages_of(body)
        chat = _chat(body, messages)
        format_names = {} if chat.response_format is body.response_format else FORMAT_NAMES
        with _flat(body.tools), naming(**NAMES, **format_names), placing(places):
            top = body.top_logprobs if logprobs else None
            asked = parameters(http, chat, limits, max_new_tokens=body.max_output_tokens, top_n_tokens=top)
            request, make = await self._chats.request(chat, asked, limits)
        clock.valid()
        output = Output(message_parser_of(make), self._writer.logprob if logprobs else None)
        response = Response(body.model or self._config.model, _echoed(body))
        if body.stream:
            events = Events(response, output, Usage(len(request.prompt)))
            return await send(http, self._batcher, [request], events, stream_headers_of(clock, [request]) | headers)
        [[answer]] = await fold([self._batcher.submit(request)])
        tokens = answer.tokens
        await self._writer.each(tokens, len(tokens[0].top), lambda token: list(output.token(token)))
        for _ in output.finish(answer.finish):
            pass
        usage = Usage(len(request.prompt), len(tokens), answer.prompt.cached_tokens, output.reasoning_tokens)
        content = response.json(_status(answer.finish), output.items, usage)
        return json_response(content, headers_of(clock, [request], [answer]) | headers)


class Events(Encoder):
    """The SSE events of one streamed response, numbered."""

    def __init__(self, response: Response, output: Output, usage: Usage) -> None:
        self._response = response
        self._output = output
        self._usage = usage
        self._number = 0

    def of(self, stream: int, items: Sequence[Item]) -> bytes:
        """See `Encoder`."""
        return b"".join(self._framed(event) for item in items for event in self._events(item))

    def failed(self, problem: Problem) -> bytes:
        """The event that ends a stream that failed."""
        problem = as_openai(problem)
        self._output.cut()
        error = {"code": "server_error", "message": problem.message}
        content = self._response.json("failed", self._output.items, error=error)
        return self._framed({"type": "response.failed", "response": content})

    def _events(self, item: Item) -> Iterator[Json]:
        output, response = self._output, self._response
        if isinstance(item, Token):
            self._usage.completion_tokens += 1
            yield from output.token(item)
        elif isinstance(item, Prompt):
            self._usage.cached_tokens = item.cached_tokens
            for kind in ("created", "in_progress"):
                yield {"type": f"response.{kind}", "response": response.json("in_progress", [])}
        elif not isinstance(item, Grown):  # beams of each step, which cannot be asked for on this route
            yield from output.finish(item)
            self._usage.reasoning_tokens = output.reasoning_tokens
            status = _status(item)
            yield {"type": f"response.{status}", "response": response.json(status, output.items, self._usage)}

    def _framed(self, event: Json) -> bytes:
        event["sequence_number"] = self._number
        self._number += 1
        return sse_frame_with_event(encode(event))


def _status(finish: Finish) -> str:
    return "incomplete" if finish.reason == "length" else "completed"


def _logprobs(body: ResponsesBody) -> bool:
    """Whether log-probabilities are wanted. Raises Refused."""
    for name in body.include or ():
        if name not in (LOGPROBS, NOTHING):
            raise Refused(f'`include` of "{name}" is not supported', "include")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MOST_TOP_LOGPROBS:
        raise Refused(f"`top_logprobs` must be from 0 to {MOST_TOP_LOGPROBS}. Given: {body.top_logprobs}", "top_logprobs")
    return LOGPROBS in (body.include or ())


def _chat(body: ResponsesBody, messages: list[dict[str, Any]]) -> ChatBody:
    """The body as a chat."""
    same = {name: getattr(body, name) for name in (*Common.__struct_fields__, "tool_choice", "parallel_tool_calls")}
    format = (body.text or {}).get("format")
    if format is not None:
        if not isinstance(format, dict):
            raise Refused("`text.format` must be an object", "text.format")
        if body.response_format is not None:
            raise contradiction("text.format", "response_format")
        if format.get("type") == "json_schema" and "schema" not in format:
            raise Refused("`text.format.schema` is missing", "text.format.schema")
        wrapped = {"type": "json_schema", "json_schema": format} if format.get("type") == "json_schema" else format
        same["response_format"] = wrapped
    return ChatBody(
        **same,
        messages=messages,
        tools=[_tool(tool) for tool in body.tools or ()],
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=effort_of((body.reasoning or {}).get("effort"), "reasoning.effort"),
        add_generation_prompt=True,
    )


def _tool(tool: Any) -> Any:
    """A tool as in chats; in this API a function's fields stand beside its type."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or _nested(tool):
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


@contextmanager
def _flat(tools: Sequence[Any] | None) -> Iterator[None]:
    """Refusals of tools inside the context name fields by their places in this API, unless the client has sent them as in chats."""
    try:
        yield
    except Refused as refused:
        found = FUNCTION.match(refused.parameter or "")
        if found and not _nested((tools or ())[int(found[1])]):
            refused.args = (str(refused).replace(found[0], found[0].removesuffix(".function")),)
            refused.parameter = (refused.parameter or "").replace(".function", "", 1)
        raise


def _nested(tool: Any) -> bool:
    return isinstance(tool, dict) and "function" in tool


def messages_of(body: ResponsesBody) -> tuple[list[dict[str, Any]], list[str]]:
    """A chat's messages from items, and the place of each in the body. Reasoning and function calls become parts of the assistant's
    message that they belong to."""
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
        places.append("instructions")
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}], [*places, "input"]
    reasoning = None
    for index, item in enumerate(body.input):
        match item.get("type"):
            case "message" | None:
                message = {"role": item.get("role"), "content": item.get("content")}
            case "reasoning":
                reasoning = (reasoning or "") + _reasoning(item, f"input[{index}]")
                continue
            case "function_call":
                if not isinstance(item.get("name"), str):
                    raise Refused(f"`input[{index}].name` must be a string", "input")
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                last = messages[-1] if messages else {}
                if reasoning is None and last.get("role") == "assistant":
                    last.setdefault("tool_calls", []).append(call)
                    continue
                message = {"role": "assistant", "content": None, "tool_calls": [call]}
            case "function_call_output":
                if not isinstance(item.get("output"), str | list | None):
                    raise Refused(f"`input[{index}].output` must be a string or a list of parts", "input")
                message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
            case kind:
                raise Refused(f"`input[{index}].type` {shown(kind)} is not supported", "input")
        if reasoning is not None and message["role"] == "assistant":
            message["reasoning_content"] = reasoning
        reasoning = None  # of an answer that was cut off while reasoning: it does not belong to the next one
        messages.append(message)
        places.append(f"input[{index}]")
    return messages, places


def _reasoning(item: dict[str, Any], place: str) -> str:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        raise Refused(f"`{place}.content` must be a list of parts", "input")
    return "".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def _echoed(body: ResponsesBody) -> Json:
    """The fields of the request that clients expect to find in the response."""
    reasoning = body.reasoning or {}
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "service_tier": body.service_tier or "default",
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
    }
