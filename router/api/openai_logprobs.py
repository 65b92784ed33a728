"""Log-probabilities in OpenAI's answers, of generated tokens and of prompts (`echo`, `prompt_logprobs`).

They are encoded in parts, between which the event loop serves others, and those of a prompt once for all answers to it: with 20
alternatives for each of 125,000 tokens that takes seconds.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from ..request import Alternative, Prompt, Request, Token
from ..text import Tokenizer

SPACES = re.compile(r"\s{1,64}")
LOWEST_LOGPROB = -9999.0  # JSON knows no infinity, and clients expect a number
PART = 1024  # log-probabilities encoded at a time, or tokens parsed: 2 ms (x86, one core)

encode = msgspec.json.Encoder().encode
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that answers are to begin with (`echo`)."""

    request: Request
    text: str  # as the client sent it; "" if it came as tokens


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """The encoded prompt that all answers to it begin with."""

    text: str
    length: int  # where the text offsets of the answer itself begin
    content: dict[str, msgspec.Raw | None] | None  # the prompt's log-probabilities as JSON lists


class LogprobWriter:
    """Builds and encodes log-probabilities; of all concurrent answers, one part per iteration of the event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._turn = asyncio.Lock()

    async def prompt_echo(self, echo: Echo, prompt: Prompt, logprobs: int | None) -> PromptEcho:
        """The echo of one prompt. logprobs: alternatives for each token; None: no log-probabilities."""
        if echo.text and logprobs is None:
            return PromptEcho(echo.text, 0, None)
        ids = echo.request.prompt
        stream = self._tokenizer.stream((), (), True, echo.request.skip_special_tokens)
        length = 0

        def offset(id: int) -> int:
            nonlocal length
            before, piece = length, stream.push(id)
            if echo.text and self._tokenizer.is_special(id):  # sent as text, or added by the tokenizer
                length += len(piece.text) * echo.text.startswith(piece.text, length)
            else:
                length = _behind(echo.text or "", length, piece.delta)
            return before

        offsets = await self.listed(ids, 0, offset)
        stream.end()
        text = echo.text or stream.text
        if logprobs is None:
            return PromptEcho(text, len(text), None)
        content = {
            "tokens": await self.listed(ids, 0, self._tokenizer.token_text),
            "token_logprobs": await self.listed(prompt.logprobs, 0, _bounded),
            "top_logprobs": await self._tops(echo.request, prompt) if logprobs else None,
            "text_offset": offsets,
        }
        return PromptEcho(text, len(text), content)

    async def entries(self, request: Request, prompt: Prompt) -> msgspec.Raw:
        """vLLM's `prompt_logprobs`: by token id. `rank` is null for a token that is not among the most probable ones asked for."""

        def entry(place: int) -> dict[str, object] | None:
            own = prompt.logprobs[place]
            if own is None:
                return None
            ranked = {each: (logprob, rank) for rank, (each, logprob) in enumerate(_top(request, prompt, place), 1)}
            id = request.prompt[place]
            return {
                str(each): {"logprob": _bounded(logprob), "rank": rank, "decoded_token": self._tokenizer.token_text(each)}
                for each, (logprob, rank) in ({id: ranked.get(id, (own, None))} | ranked).items()
            }

        return await self.listed(range(len(request.prompt)), request.prompt_top_n, entry)

    def logprob(self, token: Token) -> dict[str, object]:
        """A generated token's entry with its alternatives, in the shape of chats."""
        return self._entry(token) | {"top_logprobs": [self._entry(other) for other in tops_of(token)]}

    def _entry(self, token: Token | Alternative) -> dict[str, object]:
        """An entry of a token. A token that is part of a character has its own bytes, so that all tokens' bytes together are the
        text."""
        piece = self._tokenizer.piece(token.id)
        own = piece if isinstance(piece, bytes) else token.text.encode()
        return {"token": token.text, "logprob": max(token.logprob, LOWEST_LOGPROB), "bytes": list(own)}

    async def _tops(self, request: Request, prompt: Prompt) -> msgspec.Raw:
        """`top_logprobs` of each prompt token: the most probable tokens at its position, and itself. None for the first."""

        def top(place: int) -> dict[str, float] | None:
            own = prompt.logprobs[place]
            if own is None:
                return None
            pairs = [(request.prompt[place], own), *_top(request, prompt, place)]
            return most([(self._tokenizer.token_text(id), logprob) for id, logprob in pairs])

        return await self.listed(range(len(request.prompt)), request.prompt_top_n, top)

    async def listed(self, items: Sequence[Value], alternatives: int, of: Callable[[Value], object]) -> msgspec.Raw:
        """A JSON list with `of(item)` for each item, called in order."""
        parts: list[bytes] = []
        await self._in_parts(items, alternatives, lambda part: parts.append(encode([*map(of, part)])[1:-1]))
        return msgspec.Raw(b"[%b]" % b",".join(parts))

    async def each(self, items: Sequence[Value], alternatives: int, do: Callable[[Value], object]) -> None:
        """Calls `do` with each item, in order."""
        await self._in_parts(items, alternatives, lambda part: [*map(do, part)])

    async def _in_parts(self, items: Sequence[Value], alternatives: int, do: Callable[[Sequence[Value]], object]) -> None:
        """Calls `do` with one part of the items after the other, and yields to the event loop in between."""
        size = max(PART // (1 + alternatives), 1)
        for start in range(0, len(items), size):
            async with self._turn:
                do(items[start : start + size])
                if len(items) > size:
                    await asyncio.sleep(0)


def tops_of(token: Token) -> Iterable[Token | Alternative]:
    """The most probable tokens at a token's position. The token itself among them has the text that it has in the answer."""
    return (token if other.id == token.id else other for other in token.top)


def most(pairs: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Log-probabilities by text. Of several tokens of the same text the most probable counts."""
    found: dict[str, float] = {}
    for text, logprob in pairs:
        found[text] = max(logprob, LOWEST_LOGPROB, found.get(text, LOWEST_LOGPROB))
    return found


def _top(request: Request, prompt: Prompt, place: int) -> Sequence[tuple[int, float]]:
    """The alternatives of a prompt token that is not the first."""
    wide = request.prompt_top_n
    return prompt.top[(place - 1) * wide : place * wide]


def _behind(text: str, place: int, piece: str) -> int:
    """Where the text goes on behind a token's text, which stands at this place. SentencePiece adds a space behind a special token,
    and some special tokens take the spaces behind them away."""
    if text.startswith(piece, place):
        return place + len(piece)
    if piece.startswith(" ") and text.startswith(piece[1:], place):
        return place + len(piece) - 1
    spaces = SPACES.match(text, place)
    start = spaces.end() if spaces else place
    return (start if text.startswith(piece, start) else place) + len(piece)


def _bounded(logprob: float | None) -> float | None:
    return logprob if logprob is None else max(logprob, LOWEST_LOGPROB)
