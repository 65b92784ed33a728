"""What there is of each of many tokens in OpenAI's answers, found in parts, between which the event loop has turns for others; and
what they tell of their prompts, once for all answers to one: with 20 alternatives for each of 125,000 tokens that takes seconds.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from ..request import Alternative, Prompt, Request, Token
from ..text import Tokenizer

LOWEST_LOGPROB = -9999.0  # JSON knows no infinity, and clients expect a number
PART = 1024  # log-probabilities that are written at a time, or tokens that are read: 2 ms (x86, one core)

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt, as an answer begins with it."""

    request: Request
    text: str  # as it was sent; "" if it came as tokens


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """The beginning of all answers to a prompt."""

    text: str
    length: int  # where the answer's own offsets begin
    content: dict[str, msgspec.Raw | None] | None  # its log-probabilities: lists, already written


class LogprobWriter:
    """Finds and writes it: however many ask at once, one part at each turn of the loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._turn = asyncio.Lock()

    async def told(self, echo: Echo, prompt: Prompt, logprobs: int | None) -> PromptEcho:
        """Of one prompt. logprobs: alternatives for each token; None: no log-probabilities either."""
        if echo.text and logprobs is None:
            return PromptEcho(echo.text, 0, None)
        ids = echo.request.prompt
        stream = self._tokenizer.stream((), (), True, echo.request.skip_special_tokens)
        length = 0

        def offset(place: int) -> int:
            nonlocal length
            before, id = length, ids[place]
            piece = stream.push(id)
            if echo.text and self._tokenizer.is_special(id):  # sent by its text, or put before what was sent
                length += len(piece.text) * echo.text.startswith(piece.text, length)
            else:
                length += len(piece.delta)
            return before

        offsets = await self.listed(len(ids), 0, offset)
        length += len(stream.end())
        text = echo.text or stream.text
        if logprobs is None:
            return PromptEcho(text, length, None)
        content = {
            "tokens": await self.listed(len(ids), 0, lambda place: self._tokenizer.token_text(ids[place])),
            "token_logprobs": await self.listed(len(ids), 0, lambda place: _bounded(prompt.logprobs[place])),
            "top_logprobs": await self._tops(echo.request, prompt) if logprobs else None,
            "text_offset": offsets,
        }
        return PromptEcho(text, length, content)

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

        return await self.listed(len(request.prompt), request.prompt_top_n, entry)

    def logprob(self, token: Token) -> dict[str, object]:
        """A generated token's, with its alternatives, as chats have it."""
        return self._entry(token) | {"top_logprobs": [self._entry(other) for other in tops_of(token)]}

    def _entry(self, token: Token | Alternative) -> dict[str, object]:
        """Of parts of a character the bytes are their own, so that those of all tokens together are the text."""
        piece = self._tokenizer.piece(token.id)
        own = piece if isinstance(piece, bytes) else token.text.encode()
        return {"token": token.text, "logprob": max(token.logprob, LOWEST_LOGPROB), "bytes": list(own)}

    async def _tops(self, request: Request, prompt: Prompt) -> msgspec.Raw:
        """Of each token: the most probable ones in its place, and itself. None for the first."""

        def top(place: int) -> dict[str, float] | None:
            own = prompt.logprobs[place]
            if own is None:
                return None
            pairs = [(request.prompt[place], own), *_top(request, prompt, place)]
            return most([(self._tokenizer.token_text(id), logprob) for id, logprob in pairs])

        return await self.listed(len(request.prompt), request.prompt_top_n, top)

    async def listed(self, tokens: int, alternatives: int, of: Callable[[int], object]) -> msgspec.Raw:
        """A list with what there is `of` each place, asked for in order."""
        parts: list[bytes] = []
        await self.each(tokens, alternatives, lambda places: parts.append(encode([of(place) for place in places])[1:-1]))
        return msgspec.Raw(b"[%b]" % b",".join(parts))

    async def each(self, tokens: int, alternatives: int, do: Callable[[range], object]) -> None:
        """Does it for all places, in order."""
        size = max(PART // (1 + alternatives), 1)
        for start in range(0, tokens, size):
            async with self._turn:
                do(range(start, min(start + size, tokens)))
                if tokens > size:
                    await asyncio.sleep(0)


def tops_of(token: Token) -> Iterable[Token | Alternative]:
    """The most probable tokens in its place. Among them it is itself: with the text that it has in the answer, not by itself."""
    return (token if other.id == token.id else other for other in token.top)


def most(pairs: Sequence[tuple[str, float]]) -> dict[str, float]:
    """By text. Of several tokens that are written alike the most probable counts."""
    found: dict[str, float] = {}
    for text, logprob in pairs:
        found[text] = max(logprob, LOWEST_LOGPROB, found.get(text, LOWEST_LOGPROB))
    return found


def _top(request: Request, prompt: Prompt, place: int) -> Sequence[tuple[int, float]]:
    """Of a token that is not the first."""
    wide = request.prompt_top_n
    return prompt.top[(place - 1) * wide : place * wide]


def _bounded(logprob: float | None) -> float | None:
    return logprob if logprob is None else max(logprob, LOWEST_LOGPROB)
