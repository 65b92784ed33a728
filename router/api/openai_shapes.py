"""How OpenAI's answers look: the two objects and their chunks. Items in, JSON values out; no HTTP and no parsing.

`Chat` and `Completions` differ only in these shapes, so each is a small class with the same three methods.
"""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..request import Alternative, Finish, Token
from .stream import Answer

REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}
LOWEST_LOGPROB = -9999.0  # JSON knows no infinity, and clients expect a number

Json = dict[str, Any]


@dataclass(slots=True)
class Usage:
    """Tokens so far."""

    prompt_tokens: int
    completion_tokens: int = 0

    def json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class Shapes(Protocol):
    """One of OpenAI's two ways to answer."""

    id_prefix: str
    whole: str  # the `object` of an answer
    part: str  # and of its chunks

    def choice(self, index: int, answer: Answer) -> Json:
        """A whole answer's."""
        ...

    def opening(self, index: int) -> Json | None:
        """A chunk's, before the first token, if there is one."""
        ...

    def delta(self, index: int, item: Token | Finish) -> Json:
        """A chunk's. Finish brings the text that was held back, and the reason."""
        ...


@dataclass(slots=True)
class Envelope:
    """What all objects of one answer have in common."""

    shapes: Shapes
    model: str
    fingerprint: str
    service_tier: str | None = None  # echoed if it was sent
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: list[Json], usage: Usage) -> Json:
        return self._object(self.shapes.whole, choices) | {"usage": usage.json()}

    def chunk(self, choices: list[Json]) -> Json:
        """Without usage."""
        return self._object(self.shapes.part, choices)

    def _object(self, kind: str, choices: list[Json]) -> Json:
        head = {
            "id": self.shapes.id_prefix + self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }
        return head if self.service_tier is None else head | {"service_tier": self.service_tier}


class Chat:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def __init__(self, logprobs: bool) -> None:
        self._logprobs = logprobs

    def choice(self, index: int, answer: Answer) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.finish.text, "refusal": None},
            "logprobs": self._content(answer.tokens),
            "finish_reason": REASONS[answer.finish.reason],
        }

    def opening(self, index: int) -> Json:
        return _chunk_choice(index, {"delta": {"role": "assistant", "content": ""}, "logprobs": None})

    def delta(self, index: int, item: Token | Finish) -> Json:
        if isinstance(item, Token):
            return _chunk_choice(index, {"delta": {"content": item.delta}, "logprobs": self._content([item])})
        content = {"delta": {"content": item.delta} if item.delta else {}, "logprobs": None}
        return _chunk_choice(index, content, REASONS[item.reason])

    def _content(self, tokens: list[Token]) -> Json | None:
        if not self._logprobs:
            return None
        return {
            "content": [_logprob(token) | {"top_logprobs": [_logprob(other) for other in token.top]} for token in tokens],
            "refusal": None,
        }


class Completions:
    """/v1/completions. Remembers how long each choice's text is, for `text_offset`: one object for each answer."""

    id_prefix = "cmpl-"
    whole = "text_completion"
    part = "text_completion"

    def __init__(self, logprobs: int | None) -> None:
        self._logprobs = logprobs
        self._offsets: dict[int, int] = {}

    def choice(self, index: int, answer: Answer) -> Json:
        content = {"text": answer.finish.text, "logprobs": self._content(index, answer.tokens)}
        return _chunk_choice(index, content, REASONS[answer.finish.reason])

    def opening(self, index: int) -> None:
        return None

    def delta(self, index: int, item: Token | Finish) -> Json:
        if isinstance(item, Token):
            return _chunk_choice(index, {"text": item.delta, "logprobs": self._content(index, [item])})
        return _chunk_choice(index, {"text": item.delta, "logprobs": None}, REASONS[item.reason])

    def _content(self, index: int, tokens: list[Token]) -> Json | None:
        if self._logprobs is None:
            return None
        offset = self._offsets.get(index, 0)
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        self._offsets[index] = offset
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [max(token.logprob, LOWEST_LOGPROB) for token in tokens],
            "top_logprobs": [_top_logprobs(token) for token in tokens] if self._logprobs else None,
            "text_offset": offsets,
        }


def _chunk_choice(index: int, content: Json, reason: str | None = None) -> Json:
    return {"index": index, **content, "finish_reason": reason}


def _logprob(token: Token | Alternative) -> Json:
    logprob = max(token.logprob, LOWEST_LOGPROB)
    return {"token": token.text, "logprob": logprob, "bytes": list(token.text.encode())}


def _top_logprobs(token: Token) -> dict[str, float]:
    """The most probable, and the one that was taken."""
    taken = {token.text: max(token.logprob, LOWEST_LOGPROB)}
    return taken | {other.text: max(other.logprob, LOWEST_LOGPROB) for other in token.top}
