"""From a chat to a `Request`, and to the parser of its answers: chat template, tools, reasoning, response format. Shared by all
chat routes."""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from ..parsing import constraint, format_grammar, markers, reader, reasoning_markers
from ..request import Grammar, Limits, Refused, Request, Thinking
from ..template import Chat
from ..text import Tokenizer
from ..validation import Parameters, Validator, in_time
from .links import ImageLoader
from .openai_bodies import ChatBody, naming
from .openai_formats import format_name, grammar_of
from .openai_messages import images_of, messages_of
from .openai_shapes import MessageParser
from .openai_tools import Tools, tools_of

BUDGET = "thinking_token_budget"
MOST_THOUGHTS = 2**31 - 1
PLAIN_FORM = "json"  # the form of forced tool calls where nothing tells which one the model was trained on


class Chats:
    """Makes requests of chats, for one model."""

    def __init__(self, tokenizer: Tokenizer, validator: Validator, image_loader: ImageLoader) -> None:
        self._tokenizer = tokenizer
        self._validator = validator
        self._image_loader = image_loader
        self._parser, self._reasoning = tokenizer.parsers

    async def request(
        self, body: ChatBody, asked: Parameters, limits: Limits
    ) -> tuple[Request, Callable[[], MessageParser] | None]:
        """The request, and a factory of output parsers, one for each answer; None: answers are plain text."""
        tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
        images = images_of(body.messages)
        self._validator.check_images(len(images), limits)
        async with in_time(asked):
            prompt = await self._render(body, tools)
        continued = _text(messages_of(body.messages[-1:])[0]) if _continues(body) else ""
        format = None if tools.forced else grammar_of(body)
        parser = self._parser if tools.given else None
        reasoning, grammar = self._reasoning, format
        if tools.forced or (format is not None and tools.given):
            parser = parser or PLAIN_FORM
            grammar = self._calls(tools, parser, format, prompt, continued)
        elif format is not None and reasoning is not None:
            with naming(grammar=format_name(body)):
                grammar = format_grammar(format, reasoning, prompt=prompt, continued=continued, special=self._tokenizer.added_id)
            if grammar is None:  # no grammar can follow the reasoning, so it binds the answer from the first token on
                reasoning, grammar = None, format
        thinking = self._thinking(body, prompt, continued)
        asked = replace(asked, grammar=grammar, shown=self._shown(reasoning, parser), thinking=thinking)
        with naming(grammar="tools" if tools.forced else format_name(body)):
            async with in_time(asked), self._image_loader.opened(images) as opened:
                asked = replace(asked, images=opened)
                request = await self._validator.request(prompt, asked, limits, add_special_tokens=bool(body.add_special_tokens))
        if parser is None and reasoning is None:
            return request, None

        def make() -> MessageParser:
            own = reader(reasoning, parser, prompt=prompt, continued=continued, schemas=tools.schemas)
            return MessageParser(own, not tools.parallel, body.include_reasoning is False, tools.forced)

        return request, make

    async def text(self, body: ChatBody) -> str:
        """The prompt's text alone. Raises Refused if there are images, whose tokens cannot be counted without preprocessing
        them."""
        if images_of(body.messages):
            raise Refused("`messages` with images is not supported on this route", "messages")
        return await self._render(body, tools_of(body.tools, body.tool_choice, body.parallel_tool_calls))

    async def _render(self, body: ChatBody, tools: Tools) -> str:
        messages = messages_of(body.messages)
        if body.add_generation_prompt and body.continue_final_message:
            raise Refused("`continue_final_message` excludes `add_generation_prompt`", "continue_final_message")
        effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
        chat = Chat(
            messages=messages,
            tools=tools.given or None,
            documents=body.documents,
            variables=effort | (body.chat_template_kwargs or {}),
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=_continues(body),
            folds_system=body.folds_system,
        )
        return await self._tokenizer.chat_prompt(chat, body.chat_template)

    def _shown(self, reasoning: str | None, parser: str | None) -> tuple[int, ...]:
        """The special tokens that the output parser needs to see, which detokenization would otherwise leave out."""
        ids = [self._tokenizer.special_id(marker) for marker in markers(reasoning, parser)]
        return tuple(id for id in ids if id is not None)

    def _thinking(self, body: ChatBody, prompt: str, continued: str) -> Thinking | None:
        most = body.thinking_token_budget
        if most is None:
            return None
        if not 0 <= most <= MOST_THOUGHTS:
            raise Refused(f"`{BUDGET}` must be from 0 to {MOST_THOUGHTS}. Given: {most}", BUDGET)
        marks = None if self._reasoning is None else reasoning_markers(self._reasoning, prompt, continued)
        begin, end = (self._tokenizer.added_id(mark) if mark else None for mark in marks or ("", ""))
        if marks is not None and end is not None and (begin is not None or not marks[0]):
            return Thinking(most, end, begin)
        if body.bound_if_able:
            return None
        raise Refused(f"`{BUDGET}` is not supported: no token ends this model's reasoning (--reasoning-parser)", BUDGET)

    def _calls(self, tools: Tools, parser: str, format: Grammar | None, prompt: str, continued: str) -> Grammar:
        return constraint(
            parser,
            tools.schemas,
            tools.parallel,
            format=format,
            reasoning=self._reasoning,
            prompt=prompt,
            continued=continued,
            special=self._tokenizer.added_id,
        )


def message_parser_of(make: Callable[[], MessageParser] | None) -> MessageParser:
    """A new output parser from the factory of `Chats.request`; for plain text one that finds neither reasoning nor calls."""
    return make() if make else MessageParser(reader(None, None))


def _continues(body: ChatBody) -> bool:
    """Whether the last message is continued. As in TGI, an answer that the client has begun is, unless the request says
    otherwise."""
    if body.continue_final_message is not None:
        return body.continue_final_message
    last = body.messages[-1]
    begun = last.get("role") == "assistant" and isinstance(last.get("content"), str | list) and not last.get("tool_calls")
    return begun and not body.add_generation_prompt


def _text(message: Mapping[str, Any]) -> str:
    """All of a message's text, as the chat template gets it."""
    content = message["content"] or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
