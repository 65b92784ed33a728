"""The APIs that can be loaded: request bodies, and which stream events bring tokens. Knows no network and no clock.

Counting events instead of tokens would measure something else: a first chunk brings only a role, a last one only a finish reason,
and a server may send several tokens in one event. So each event is parsed, and the server's own token counts take precedence.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec

from .prompts import Prompt

DONE = b"[DONE]"
Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]  # more than any model has positions: each token seen is kept


@dataclass(slots=True)
class AnswerState:
    """What an answer's events have said so far."""

    prompt_tokens: int = 0
    output_tokens: int = 0  # as counted by the server; 0: it has not said
    finished: bool = False
    error: str = ""
    counted: bool = False  # each event says how many tokens there are so far


class Api(Protocol):
    """An API that can be loaded."""

    path: str

    def body(self, prompt: Prompt, fields: dict[str, Any]) -> dict[str, Any]:
        """The body of a streaming request."""
        ...

    def read(self, payload: bytes, state: AnswerState, begun: bool) -> int:
        """The number of tokens that an event brings, -1 if only the end will show it: it may be the last token. `begun`: some have
        come.

        Raises msgspec.MsgspecError for what is no event of this API.
        """
        ...


class _Delta(msgspec.Struct):
    role: str | None = None
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Tokens = 0
    completion_tokens: Tokens = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class OpenAI:
    """OpenAI's chat completions, or completions."""

    def __init__(self, chat: bool, ignore_eos: bool, continuous_usage: bool) -> None:
        self.path = "/v1/chat/completions" if chat else "/v1/completions"
        self._chat = chat
        self._fields: dict[str, Any] = {"ignore_eos": True} if ignore_eos else {}
        options = {"include_usage": True}
        self._options = options | {"continuous_usage_stats": True} if continuous_usage else options
        self._decode = msgspec.json.Decoder(_Chunk).decode

    def body(self, prompt: Prompt, fields: dict[str, Any]) -> dict[str, Any]:
        """See Api."""
        asked: dict[str, Any] = {"messages": prompt.chat()} if self._chat else {"prompt": prompt.text}
        return {"stream": True, "stream_options": self._options, "max_tokens": prompt.output, **asked, **self._fields, **fields}

    def read(self, payload: bytes, state: AnswerState, begun: bool) -> int:
        """See Api."""
        if payload == DONE:
            state.finished = True
            return 0
        chunk = self._decode(payload)
        if chunk.error is not None:
            state.error = _message(chunk.error)
            return 0
        usage = chunk.usage
        if usage is not None:
            before, state.output_tokens, state.prompt_tokens = state.output_tokens, usage.completion_tokens, usage.prompt_tokens
            # From the first token on, if at all: 0 may come with the role alone, and the whole answer's with its last token.
            if chunk.choices and (state.counted or (usage.completion_tokens and not begun)):
                state.counted = True
                return max(0, state.output_tokens - before)
        return self._tokens(chunk.choices[0], begun) if chunk.choices and not state.counted else 0

    def _tokens(self, choice: _Choice, begun: bool) -> int:
        delta = choice.delta
        if choice.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)):
            return 1
        if choice.finish_reason is not None:
            return -1
        # Without text: the announcement of the role, or a token that is only a part of a character.
        return 0 if delta is not None and delta.role is not None and not begun else 1


class _Details(msgspec.Struct):
    generated_tokens: Tokens = 0
    input_length: Tokens = 0


class _Event(msgspec.Struct):
    token: Any = None
    generated_text: str | None = None
    details: _Details | None = None
    error: Any = None


class Tgi:
    """text-generation-inference's own API. It cannot ignore end tokens."""

    path = "/generate_stream"

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_Event).decode

    def body(self, prompt: Prompt, fields: dict[str, Any]) -> dict[str, Any]:
        """See Api."""
        return {"inputs": prompt.text, "parameters": {"max_new_tokens": prompt.output, "details": True, **fields}}

    def read(self, payload: bytes, state: AnswerState, begun: bool) -> int:
        """See Api."""
        event = self._decode(payload)
        if event.error is not None:
            state.error = _message(event.error)
            return 0
        if event.generated_text is not None:
            state.finished = True
            if event.details is not None:
                state.output_tokens, state.prompt_tokens = event.details.generated_tokens, event.details.input_length
        return int(event.token is not None)


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)


@dataclass(slots=True)
class SseParser:
    """A parser of server-sent events from bytes as they come."""

    rest: bytes = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that are complete now."""
        data = self.rest + data if self.rest else data
        if b"\r" in data:
            if data.endswith(b"\r"):  # perhaps half of a line end
                self.rest = data
                return []
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *whole, self.rest = data.split(b"\n\n")
        return [payload for event in whole if (payload := _payload(event))]


def _payload(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
