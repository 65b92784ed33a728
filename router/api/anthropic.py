"""Anthropic's Messages API: its messages become a chat's, a stream of items becomes its SSE events."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web
from msgspec.structs import replace

from ..config import RouterConfig
from ..request import Finish, Grown, Item, Limits, Prompt, Refused, Token, TooLong
from ..text import Tokenizer
from ..validation import Parameters, Validator
from .anthropic_messages import choice_of, messages_of, tools_of
from .anthropic_shapes import Blocks, Message, end_of, usage_json
from .body import decode, json_response
from .errors import Problem, anthropic_error, shown
from .openai_bodies import ChatBody, Common, body_of, effort_of, naming, parameters, placing, refuse_unsupported
from .openai_chats import MOST_THOUGHTS, Chats, message_parser_of
from .openai_formats import contradiction
from .openai_logprobs import LogprobWriter, encode
from .openai_shapes import Json, Usage
from .ports import Batcher, limits_of
from .stream import Clock, Encoder, fold, headers_of, send, sse_frame_with_event, stream_headers_of

TIERS = {"standard_only": "default"}
THINKING = {"enabled": True, "disabled": False, "adaptive": None}
SWITCHES = ("enable_thinking", "thinking")  # names of the thinking switch in chat templates
NAMES = {
    "inputs": "messages",
    "max_new_tokens": "max_tokens",
    "stop": "stop_sequences",
    "truncate": "truncate_prompt_tokens",
}
FORMAT_NAMES = {"response_format.json_schema": "output_config.format", "response_format": "output_config.format"}
# the place of a tool's fields in OpenAI's chats; in Anthropic's bodies they stand beside the type
FUNCTION = re.compile(r"^(`?tools\[\d+\])\.function(\.parameters)?")


class MessagesBody(Common, kw_only=True):
    """Body of POST /v1/messages."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # an earlier name of `output_config.format`
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Fields that would change the answer and cannot be honoured.
    container: Any = None
    mcp_servers: Any = None
    num_return_sequences: Any = None
    use_beam_search: Any = None
    beam_width: Any = None
    stream_beams: Any = None
    num_beam_groups: Any = None
    diversity_penalty: Any = None
    force_words_ids: Any = None


UNSUPPORTED = ("stop", *MessagesBody.__struct_fields__[MessagesBody.__struct_fields__.index("container") :])


class Conversation(ChatBody, kw_only=True):
    """A Messages body as an OpenAI chat. Almost all of Claude Code's conversations have system messages in the middle."""

    folds_system = True
    bound_if_able = True  # clients set a thinking budget whatever the model is


class Anthropic:
    """The handlers of /v1/messages and /v1/messages/count_tokens."""

    def __init__(self, config: RouterConfig, tokenizer: Tokenizer, validator: Validator, chats: Chats, batcher: Batcher) -> None:
        self._config = config
        self._validator = validator
        self._batcher = batcher
        self._chats = chats
        self._writer = LogprobWriter(tokenizer)

    async def messages(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/messages."""
        clock = Clock()
        body, headers = body_of(http, MessagesBody, self._config, UNSUPPORTED)
        limits = limits_of(self._batcher)
        messages, places = messages_of(body.messages, body.system)
        chat = _chat(body, messages)
        format_names = {} if chat.response_format is body.response_format else FORMAT_NAMES
        with _wording(places, format_names):
            asked = _parameters(http, body, chat, limits)
            request, make = await self._chats.request(chat, asked, limits)
        clock.valid()
        blocks = Blocks(message_parser_of(make))
        message, usage = Message(body.model or self._config.model), Usage(len(request.prompt))
        full = body.max_tokens is None or body.max_tokens > request.max_new_tokens
        if body.stream:
            events = Events(message, blocks, usage, full)
            return await send(http, self._batcher, [request], events, stream_headers_of(clock, [request]) | headers)
        [[answer]] = await fold([self._batcher.submit(request)])
        await self._writer.each(answer.items, 0, lambda item: list(blocks.read(item)))
        usage.cached_tokens, usage.completion_tokens = answer.prompt.cached_tokens, len(answer.tokens)
        content = message.json(blocks.blocks, usage, end_of(answer.finish, blocks.parser, full))
        return json_response(content, headers_of(clock, [request], [answer]) | headers)

    async def count_tokens(self, http: web.Request) -> web.Response:
        """POST /v1/messages/count_tokens. It needs no shard."""
        body = decode(http, MessagesBody)
        refuse_unsupported(body, UNSUPPORTED)
        messages, places = messages_of(body.messages, body.system)
        chat = _chat(body, messages)
        with _wording(places, {}):
            ids = await self._validator.encode(await self._chats.text(chat), bool(body.add_special_tokens))
        return json_response({"input_tokens": len(ids)})


class Events(Encoder):
    """The SSE events of one streamed message."""

    def __init__(self, message: Message, blocks: Blocks, usage: Usage, full: bool) -> None:
        """full: see `end_of`."""
        self._message = message
        self._blocks = blocks
        self._usage = usage
        self._full = full

    def of(self, stream: int, items: Sequence[Item]) -> bytes:
        """See `Encoder`."""
        return b"".join(sse_frame_with_event(encode(event)) for item in items for event in self._events(item))

    def failed(self, problem: Problem) -> bytes:
        """The error event that ends a stream that failed."""
        return sse_frame_with_event(encode(anthropic_error(problem)))

    def _events(self, item: Item) -> Iterator[Json]:
        usage = self._usage
        if isinstance(item, Prompt):
            usage.cached_tokens = item.cached_tokens
            yield {"type": "message_start", "message": self._message.json([], usage)}
        elif not isinstance(item, Grown):  # beams of each step, which cannot be asked for on this route
            usage.completion_tokens += isinstance(item, Token)
            yield from self._blocks.read(item)
            if isinstance(item, Finish):
                end = end_of(item, self._blocks.parser, self._full)
                yield {"type": "message_delta", "delta": end, "usage": usage_json(usage)}
                yield {"type": "message_stop"}


def _parameters(http: web.Request, body: MessagesBody, chat: Conversation, limits: Limits) -> Parameters:
    tier = None if body.service_tier is None else TIERS.get(body.service_tier, body.service_tier)
    user = (body.metadata or {}).get("user_id") if body.user is None else body.user
    meant = replace(chat, stop=body.stop_sequences, service_tier=tier, user=user)
    return parameters(http, meant, limits, max_new_tokens=body.max_tokens, fitting=True)


@contextmanager
def _wording(places: Sequence[str], format_names: Mapping[str, str]) -> Iterator[None]:
    """Refusals inside the context are raised with Anthropic's field names and wording: clients look for those about a prompt that
    is too long, and shorten it. places: of the chat's messages."""
    try:
        with naming(**NAMES, **format_names), placing(places):
            yield
    except TooLong as refused:
        raise Refused(f"prompt is too long: {refused.found} tokens > {refused.most} maximum", "messages") from refused
    except Refused as refused:
        refused.args = (FUNCTION.sub(_own, str(refused)),)
        refused.parameter = FUNCTION.sub(_own, refused.parameter or "") or None
        raise


def _own(found: re.Match[str]) -> str:
    return f"{found[1]}.input_schema" if found[2] else found[1]


def _chat(body: MessagesBody, messages: list[dict[str, Any]]) -> Conversation:
    """The body as an OpenAI chat."""
    same = {name: getattr(body, name) for name in Common.__struct_fields__}
    output = body.output_config or {}
    said = {"output_config.format": output.get("format"), "output_format": body.output_format}
    given = {name: value for name, value in (said | {"response_format": body.response_format}).items() if value is not None}
    if len(given) > 1:
        raise contradiction(*list(given)[:2])
    format = given.get("output_config.format", body.output_format)
    if format is not None:
        if not isinstance(format, dict) or format.get("type") != "json_schema" or "schema" not in format:
            raise Refused('`output_config.format` must have the type "json_schema", and a `schema`', "output_config.format")
        same["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": format["schema"]}}
    choice, parallel = choice_of(body.tool_choice)
    if choice == "required" and not body.tools:  # in Anthropic's words
        raise Refused('`tool_choice` of type "any" needs `tools`', "tool_choice")
    return Conversation(
        **same,
        messages=messages,
        tools=tools_of(body.tools),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        chat_template_kwargs=_thinking(body.thinking) | (body.chat_template_kwargs or {}),
        reasoning_effort=effort_of(output.get("effort"), "output_config.effort"),
        thinking_token_budget=_budget(body.thinking or {}),
    )


def _thinking(given: Json | None) -> dict[str, Any]:
    """The variables of the chat template that switch thinking on or off."""
    if given is None:
        return {}
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in THINKING:
        raise Refused(f"`thinking.type` must be one of {', '.join(THINKING)}. Given: {shown(kind)}", "thinking.type")
    return {} if THINKING[kind] is None else dict.fromkeys(SWITCHES, THINKING[kind])


def _budget(given: Json) -> int | None:
    """The thinking budget in tokens; None: unlimited."""
    most = given.get("budget_tokens")
    if most is None or given.get("type") != "enabled":
        return None
    if type(most) is not int or most < 0:
        raise Refused(f"`thinking.budget_tokens` must be an integer, 0 or more. Given: {shown(most)}", "thinking.budget_tokens")
    return min(most, MOST_THOUGHTS)
