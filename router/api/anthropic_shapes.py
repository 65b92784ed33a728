"""How answers of Anthropic's Messages API look: a message of content blocks, and the events by which it streams. Knows no HTTP."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import msgspec

from ..parsing import Call, Part, Reasoning, Text
from ..record import answer_id
from ..request import Finish, Token
from .openai_shapes import CALLED, Json, MessageParser, Usage

# Of thinking blocks. Nobody checks it, but clients (OpenCode, Vercel's AI SDK) that get none treat thinking as text, or leave it
# out, when they send the conversation again.
SIGNATURE = "unsigned"
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
    "signature": ("signature_delta", "signature"),
}


@dataclass(slots=True)
class Message:
    """The fields of a message that stay the same while it streams."""

    model: str
    id: str = field(default_factory=partial(answer_id, "msg_"))

    def json(self, content: list[Json], usage: Usage, end: Json | None = None) -> Json:
        """The message object. end: its stop reason, from `end_of`."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **(end or {"stop_reason": None, "stop_sequence": None}),
            "usage": usage_json(usage),
        }


def usage_json(usage: Usage) -> Json:
    """Anthropic's `usage`. Cached prompt tokens do not count as input, and nothing counts as cache creation, since nobody pays for
    it."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def end_of(finish: Finish, parser: MessageParser, full: bool) -> Json:
    """The stop reason and stop sequence. full: `max_tokens` was more than there was room for."""
    if parser.reason(finish) == CALLED:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    length = "model_context_window_exceeded" if full else "max_tokens"
    reason = {"length": length, "stop_sequence": "stop_sequence"}.get(finish.reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": finish.stop or None}


class Blocks:
    """The content blocks of an answer as they stream. Every method yields its changes as events."""

    def __init__(self, parser: MessageParser) -> None:
        self.blocks: list[Json] = []
        self.parser = parser
        self._open = ""  # type of the last block, until it is complete
        self._pieces: list[str] = []  # of the last block

    def read(self, item: Token | Finish) -> Iterator[Json]:
        """Adds a token, or the finish, which completes all blocks."""
        for part in self.parser.read(item):
            yield from self._part(part)
        if isinstance(item, Finish):
            yield from self._end()

    def _part(self, part: Part) -> Iterator[Json]:
        match part:
            case Text(text):
                yield from self._begin("text", text="")
            case Reasoning(text):
                yield from self._begin("thinking", thinking="", signature="")
            case Call(_, id, name):
                yield from self._end()
                yield from self._begin("tool_use", id=id, name=name, input={})
                return
            case _:
                text = part.text
        self._pieces.append(text)
        yield self._delta(self._open, text)

    def _delta(self, what: str, text: str) -> Json:
        kind, name = DELTAS[what]
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": {"type": kind, name: text}}

    def _begin(self, kind: str, **content: object) -> Iterator[Json]:
        """Starts a new block, unless the last one is of this type and incomplete."""
        if self._open == kind:
            return
        yield from self._end()
        self._open, self._pieces = kind, []
        self.blocks.append({"type": kind, **content})
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(self.blocks[-1])}

    def _end(self) -> Iterator[Json]:
        if not self._open:
            return
        text = "".join(self._pieces)
        if self._open == "tool_use":
            self.blocks[-1]["input"] = _arguments(text)
        else:
            self.blocks[-1][self._open] = text
        if self._open == "thinking":
            self.blocks[-1]["signature"] = SIGNATURE
            yield self._delta("signature", SIGNATURE)
        self._open = ""
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}


def _arguments(text: str) -> object:
    """A call's arguments; {} if they were cut off, which the stop reason says."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return {}
