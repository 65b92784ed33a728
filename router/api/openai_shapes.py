"""How OpenAI's chat completions and completions look, whole and as stream chunks. Items in, JSON out; no HTTP, no parsing of
bodies.

`Chat` and `Completions` differ only in these shapes, so each is a small class with the same methods. A whole answer's choice is a
JSON value; a chunk's is bytes, since there is one for each token: what is the same in all chunks is encoded once.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from ..parsing import Arguments, Call, Part, Reader, Reasoning, Text
from ..request import Finish, Prompt, Speculation, Token
from .openai_logprobs import LOWEST_LOGPROB, Echo, LogprobWriter, PromptEcho, encode, most, tops_of
from .stream import Answer

REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}
CALLED = "tool_calls"

Json = dict[str, Any]


@dataclass(slots=True)
class Usage:
    """OpenAI's `usage`: token counts of an answer so far."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    reasoning_tokens: int | None = None  # of the completion; None: reasoning is not parsed
    speculations: Sequence[Speculation | None] = ()  # draft tokens of each request; None: it could not have any

    @property
    def details(self) -> Json:
        """`completion_tokens_details`, by OpenAI's names."""
        found: Json = {}
        if self.reasoning_tokens is not None:
            found["reasoning_tokens"] = self.reasoning_tokens
        if speculations := list(filter(None, self.speculations)):
            found["accepted_prediction_tokens"] = sum(one.accepted for one in speculations)
            found["rejected_prediction_tokens"] = sum(one.drafted - one.accepted for one in speculations)
        return found

    def json(self) -> Json:
        found: Json = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if details := self.details:
            found["completion_tokens_details"] = details
        return found


class Shapes(Protocol):
    """One of OpenAI's two answer shapes. One object for each answer, since some remember what they have sent. By default an answer
    neither repeats its prompt nor has reasoning."""

    id_prefix: str
    whole: str  # the `object` of an answer
    part: str  # the `object` of its chunks

    async def open(self, place: int, prompt: Prompt) -> None:
        """Is called before all other methods for each prompt. place: the prompt's index within the answer."""
        return

    async def choice(self, index: int, answer: Answer) -> Json:
        """A choice of a whole answer."""
        ...

    def opening(self, index: int) -> bytes | None:
        """The choice of a chunk before the first token, if there is one."""
        ...

    def delta(self, index: int, item: Token | Finish) -> bytes | None:
        """The choice of a chunk for an item. Finish brings the text that was held back, and the finish reason."""
        ...

    def around(self, index: int) -> tuple[bytes, bytes] | None:
        """The bytes that `delta` has before and behind a Token's delta text, if only that text changes from token to token."""
        return None

    def reasoning_tokens(self) -> int | None:
        """Reasoning tokens of all choices that were sent."""
        return None


@dataclass(slots=True)
class Envelope:
    """The fields that all objects of one answer have in common."""

    shapes: Shapes
    model: str
    fingerprint: str
    id: str
    service_tier: str | None = None  # echoed if it was sent
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: list[Json], usage: Usage) -> Json:
        return self._object(self.shapes.whole, choices) | {"usage": usage.json()}

    def chunk(self) -> tuple[bytes, bytes]:
        """What stands before and behind the choices of every chunk; an object's closing brace is missing."""
        head, _, tail = encode(self._object(self.shapes.part, [])).rpartition(b'"choices":[]')
        return head + b'"choices":[', b"]" + tail[:-1]

    def _object(self, kind: str, choices: list[Json]) -> Json:
        head = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }
        return head if self.service_tier is None else head | {"service_tier": self.service_tier}


class MessageParser:
    """The output parser of one chat answer: splits its text into reasoning, tool calls and content as it arrives."""

    __slots__ = ("_arguments", "_forced", "_hidden", "_reader", "_single", "called", "reasoning_tokens", "thinking")

    def __init__(self, reader: Reader, single: bool = False, hidden: bool = False, forced: bool = False) -> None:
        """single: only the first call is kept (no parallel calls); hidden: reasoning is left out; forced: a call can only be
        followed by calls, so that text behind one is the beginning of a call that was cut off."""
        self._reader = reader
        self._forced = forced
        self._single = single
        self._hidden = hidden
        self._arguments: list[str] = []  # of the latest call, in pieces
        self.called = False
        self.thinking = False
        self.reasoning_tokens = 0

    def read(self, item: Token | Finish) -> list[Part]:
        """The parts that are certain with this item. With Finish, all are."""
        if isinstance(item, Token):
            parts = self._reader.push(item.delta)
            self._look(parts)
            self.reasoning_tokens += self.thinking
        else:
            parts = self._reader.push(item.delta) + self._reader.end()
            self._look(parts)
        wanted = [part for part in parts if self._wanted(part)]
        for part in wanted:
            if isinstance(part, Call):
                self._arguments = []
            elif isinstance(part, Arguments):
                self._arguments.append(part.text)
        return wanted

    def _look(self, parts: Sequence[Part]) -> None:
        if parts:
            self.thinking = isinstance(parts[-1], Reasoning)
            self.called = self.called or any(isinstance(part, Call) for part in parts)

    def _wanted(self, part: Part) -> bool:
        match part:
            case Reasoning():
                return not self._hidden
            case Call() | Arguments():
                return part.index == 0 or not self._single
        return not (self._forced and self.called)

    def calling(self) -> bool:
        """Whether there is a call, and the last one is complete: a stop string, or an end token, may come within one."""
        try:
            return self.called and bool(msgspec.json.decode("".join(self._arguments), type=msgspec.Raw))
        except (ValueError, RecursionError):
            return False

    def reason(self, finish: Finish) -> str:
        """OpenAI's finish reason. `tool_calls` is only said of complete calls, since clients then execute them."""
        reason = REASONS[finish.reason]
        return CALLED if reason == "stop" and self.calling() else reason


def message_of(parts: Sequence[Part], *, whole: bool) -> Json:
    """The parts as a message, or as the delta of a chunk: there a call has its index, and only what is new is included."""
    content = "".join(part.text for part in parts if isinstance(part, Text))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls: dict[int, Json] = {}
    for part in parts:
        if isinstance(part, Call):
            calls[part.index] = {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}}
        elif isinstance(part, Arguments):
            calls.setdefault(part.index, {"function": {"arguments": ""}})["function"]["arguments"] += part.text
    if whole:
        message: Json = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
    else:
        message = {"content": content} if content else {}
        calls = {index: {"index": index, **call} for index, call in calls.items()}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls.values())
    return message


class Chat(Shapes):
    """The shapes of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def __init__(self, writer: LogprobWriter, logprobs: bool, make: Callable[[], MessageParser] | None) -> None:
        """`make` gives an output parser for each choice; None: an answer is its plain text."""
        self._writer = writer
        self._logprobs = logprobs
        self._make = make
        self._parsers: dict[int, MessageParser] = {}

    async def choice(self, index: int, answer: Answer) -> Json:
        tokens = answer.tokens
        parser = self._parser(index)
        if parser is None:
            message: Json = {"role": "assistant", "content": answer.finish.text, "refusal": None}
            reason = REASONS[answer.finish.reason]
        else:
            parts: list[Part] = []
            await self._writer.each(answer.items, 0, lambda item: parts.extend(parser.read(item)))
            message = message_of(parts, whole=True)
            reason = parser.reason(answer.finish)
        logprobs = None
        if self._logprobs:
            logprobs = {
                "content": await self._writer.listed(tokens, len(tokens[0].top), self._writer.logprob),
                "refusal": None,
            }
        return _choice(index, {"message": message, "logprobs": logprobs}, reason) | _score(answer.finish)

    def opening(self, index: int) -> bytes:
        return encode(_choice(index, {"delta": {"role": "assistant", "content": ""}, "logprobs": None}))

    def delta(self, index: int, item: Token | Finish) -> bytes:
        parser = self._parser(index) if self._make else None
        if isinstance(item, Token):
            delta = {"content": item.delta} if parser is None else message_of(parser.read(item), whole=False)
            logprobs = {"content": [self._writer.logprob(item)], "refusal": None} if self._logprobs else None
            return encode(_choice(index, {"delta": delta, "logprobs": logprobs}))
        delta = {"content": item.delta} if item.delta else {}
        reason = REASONS[item.reason]
        if parser is not None:
            delta = message_of(parser.read(item), whole=False)
            reason = parser.reason(item)
        return encode(_choice(index, {"delta": delta, "logprobs": None}, reason) | _score(item))

    def around(self, index: int) -> tuple[bytes, bytes] | None:
        if self._make is not None or self._logprobs:
            return None
        return b'{"index":%d,"delta":{"content":' % index, b'},"logprobs":null,"finish_reason":null}'

    def reasoning_tokens(self) -> int | None:
        if self._make is None:
            return None
        return sum(parser.reasoning_tokens for parser in self._parsers.values())

    def _parser(self, index: int) -> MessageParser | None:
        parser = self._parsers.get(index)
        if parser is None and self._make is not None:
            parser = self._parsers[index] = self._make()
        return parser


class Completions(Shapes):
    """The shapes of /v1/completions."""

    id_prefix = "cmpl-"
    whole = "text_completion"
    part = "text_completion"

    def __init__(self, writer: LogprobWriter, logprobs: int | None, echoes: Sequence[Echo], shown: int, silent: bool) -> None:
        """echoes: of each prompt, if answers begin with it; shown: answers for each prompt; silent: no generated token is shown."""
        self._writer = writer
        self._logprobs = logprobs
        self._echoes = echoes
        self._shown = shown
        self._silent = silent
        self._prompt_echoes: dict[int, PromptEcho] = {}  # by prompt, if answers begin with it
        self._offsets: dict[int, int] = {}  # length of each choice's text so far

    async def open(self, place: int, prompt: Prompt) -> None:
        """Prepares the echoed prompt that the answers begin with."""
        if self._echoes:
            self._prompt_echoes[place] = await self._writer.prompt_echo(self._echoes[place], prompt, self._logprobs)

    async def choice(self, index: int, answer: Answer) -> Json:
        text, content = self._begin(index)
        if not self._silent:
            text += answer.finish.text
            tokens, tops = answer.tokens, None
            if self._logprobs:
                tops = await self._writer.listed(tokens, self._logprobs, _most_probable)
            generated = self._content(index, tokens, tops)
            content = generated if content is None or generated is None else _joined(content, generated)
        reason = "length" if self._silent else REASONS[answer.finish.reason]
        return _choice(index, {"text": text, "logprobs": content}, reason) | self._score(answer.finish)

    def opening(self, index: int) -> bytes | None:
        if not self._echoes:
            return None
        text, content = self._begin(index)
        return encode(_choice(index, {"text": text, "logprobs": content}))

    def delta(self, index: int, item: Token | Finish) -> bytes | None:
        if isinstance(item, Finish):
            text, reason = ("", "length") if self._silent else (item.delta, REASONS[item.reason])
            return encode(_choice(index, {"text": text, "logprobs": None}, reason) | self._score(item))
        if self._silent:
            return None
        tops = [_most_probable(item)] if self._logprobs else None
        return encode(_choice(index, {"text": item.delta, "logprobs": self._content(index, [item], tops)}))

    def around(self, index: int) -> tuple[bytes, bytes] | None:
        if self._silent or self._logprobs is not None:
            return None
        return b'{"index":%d,"text":' % index, b',"logprobs":null,"finish_reason":null}'

    def _score(self, finish: Finish) -> Json:
        return {} if self._silent else _score(finish)

    def _begin(self, index: int) -> tuple[str, Json | None]:
        """The echoed prompt's text and log-probabilities, if the answer begins with them."""
        prompt_echo = self._prompt_echoes.get(index // self._shown)
        if prompt_echo is None:
            return "", None
        self._offsets[index] = prompt_echo.length
        return prompt_echo.text, prompt_echo.content

    def _content(self, index: int, tokens: list[Token], tops: object) -> Json | None:
        if self._logprobs is None:
            return None
        offset = self._offsets.get(index, 0)
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text) if token.delta or not token.special else 0
        self._offsets[index] = offset
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [max(token.logprob, LOWEST_LOGPROB) for token in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _joined(first: Json, second: Json) -> Json:
    """The prompt's lists, which are already encoded, followed by the answer's."""
    rest = {name: encode(values)[1:] for name, values in second.items()}
    return {name: None if raw is None else msgspec.Raw(b"%b,%b" % (bytes(raw)[:-1], rest[name])) for name, raw in first.items()}


def _choice(index: int, content: Json, reason: str | None = None) -> Json:
    return {"index": index, **content, "finish_reason": reason}


def _score(finish: Finish) -> Json:
    """The `score` field of a choice of a beam search."""
    if finish.score is None:
        return {}
    return {"score": finish.score if math.isfinite(finish.score) else LOWEST_LOGPROB}


def _most_probable(token: Token) -> dict[str, float]:
    """Log-probabilities of the sampled token and of the most probable ones."""
    return most([(each.text, each.logprob) for each in (token, *tops_of(token))])
