"""How answers of OpenAI's Responses API look: an object with output items, and the events by which it streams. Knows no HTTP."""

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..parsing import Call, Part, Reasoning, Text
from ..record import answer_id
from ..request import Finish, Token
from .openai_shapes import Json, MessageParser, Usage

INCOMPLETE = "max_output_tokens"  # the reason, if an answer reached its length
# By the kind of an output item: how ids begin, and what it has when it begins.
ITEMS: dict[str, tuple[str, Json]] = {
    "message": ("msg", {"role": "assistant", "content": []}),
    "reasoning": ("rs", {"summary": [], "content": []}),
    "function_call": ("fc", {"arguments": ""}),
}


@dataclass(slots=True)
class Response:
    """The fields that all events of one response have in common."""

    model: str
    echoed: Json  # the request's fields, as the response repeats them
    id: str = field(default_factory=partial(answer_id, "resp_"))
    created: float = field(default_factory=time.time)

    def json(self, status: str, output: list[Json], usage: Usage | None = None, error: Json | None = None) -> Json:
        """The response object so far."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": int(self.created),
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": INCOMPLETE} if status == "incomplete" else None,
            "model": self.model,
            "output": output,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            **self.echoed,
            "usage": None if usage is None else usage_json(usage),
        }


def usage_json(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        # Nobody pays for cache writes here; but OpenAI's client needs the number.
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class Output:
    """The output items of a response as they stream. Every method yields its changes as events, which only lack their sequence
    numbers."""

    def __init__(self, parser: MessageParser, logprob: Callable[[Token], Json] | None) -> None:
        """logprob: makes a token's log-probability entry; None: they are not asked for."""
        self.items: list[Json] = []
        self._parser = parser
        self._logprob = logprob
        self._open = ""  # kind of the last item, until it is complete
        self._pieces: list[str] = []  # of its text
        self._untold: list[Json] = []  # log-probabilities of tokens that have brought no text yet

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens

    def token(self, token: Token) -> Iterator[Json]:
        """Adds a token."""
        if self._logprob and (token.delta or not token.special):  # an end token has no text
            self._untold.append(self._logprob(token))
        yield from self._read(token)

    def finish(self, finish: Finish) -> Iterator[Json]:
        """Ends the output. There is at least one item then, and all are complete, except perhaps the last."""
        yield from self._read(finish)
        if not self.items:
            yield from self._begin("message")
        cut = finish.reason == "length" or (self._open == "function_call" and not self._parser.calling())
        yield from self._end("incomplete" if cut else "completed")

    def cut(self) -> None:
        """Ends the output of a failed answer: the last item keeps its text so far."""
        for _ in self._end("incomplete"):
            pass

    def _read(self, what: Token | Finish) -> Iterator[Json]:
        part: Part | None = None
        for part in self._parser.read(what):
            yield from self._part(part)
        if part is not None:  # tokens without text, followed by something other than text, belong to that
            self._untold = []

    def _part(self, part: Part) -> Iterator[Json]:
        match part:
            case Text(text):
                yield from self._begin("message")
                logprobs, self._untold = self._untold, []
                self._pieces.append(text)
                self.items[-1]["content"][0]["logprobs"] += logprobs
                yield self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)
            case Reasoning(text):
                yield from self._begin("reasoning")
                self._pieces.append(text)
                yield self._event("reasoning_text.delta", content_index=0, delta=text)
            case Call(_, id, name):
                yield from self._end("completed")
                yield from self._begin("function_call", call_id=id, name=name)
            case _:
                self._pieces.append(part.text)
                yield self._event("function_call_arguments.delta", delta=part.text)

    def _begin(self, kind: str, **more: str) -> Iterator[Json]:
        """Starts a new item, unless the last one is of this kind and incomplete."""
        if self._open == kind:
            return
        yield from self._end("completed")
        self._open, self._pieces = kind, []
        prefix, empty = ITEMS[kind]
        shown: Json = {"id": f"{prefix}_{secrets.token_hex(16)}", "type": kind, "status": "in_progress", **more, **empty}
        yield {"type": "response.output_item.added", "output_index": len(self.items), "item": shown}
        self.items.append(dict(shown))
        if kind != "function_call":
            self.items[-1]["content"] = [self._content()]
            yield self._event("content_part.added", content_index=0, part=self._content())

    def _end(self, status: str) -> Iterator[Json]:
        """Completes the last item."""
        if not self._open:
            return
        item, text = self.items[-1], "".join(self._pieces)
        if self._open == "function_call":
            item["arguments"] = text
            yield self._event("function_call_arguments.done", name=item["name"], arguments=text)
        else:
            [content] = item["content"]
            content["text"] = text
            if self._open == "message":
                yield self._event("output_text.done", content_index=0, text=text, logprobs=content["logprobs"])
            else:
                yield self._event("reasoning_text.done", content_index=0, text=text)
            yield self._event("content_part.done", content_index=0, part=content)
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
        self._open = ""

    def _content(self) -> Json:
        """The content part that an item starts with."""
        if self._open == "reasoning":
            return {"type": "reasoning_text", "text": ""}
        return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}

    def _event(self, kind: str, **content: Any) -> Json:
        return {"type": f"response.{kind}", "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **content}
