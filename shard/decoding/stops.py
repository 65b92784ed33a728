"""Which tokens complete a text that some string ends. Only beams need it: of other answers the router sees the text in time.

Knows what bytes tokens stand for; no group and no score.
"""

from collections.abc import Sequence as Listing
from typing import Protocol


class Bytes(Protocol):
    """What is needed of `grammar.Grammars`."""

    def bytes_of(self, tokens: Listing[int]) -> bytes:
        """The text that they stand for."""


class Stops:
    """Of one model."""

    def __init__(self, tokenizer: Bytes) -> None:
        self._tokenizer = tokenizer

    def completed_by(self, tokens: Listing[int], prompt_length: int, token: int, stops: Listing[str]) -> bool:
        """Whether the generated text holds one of `stops` with this token; it has held none without it."""
        strings = [stop.encode() for stop in stops]
        longest = max(map(len, strings))
        text, start = self._tokenizer.bytes_of([token]), len(tokens)
        wanted = len(text) + longest
        while len(text) < wanted and start > prompt_length:  # again, if there were special tokens, which have no bytes
            end, start = start, max(prompt_length, start - longest)
            text = self._tokenizer.bytes_of(tokens[start:end]) + text
        return any(string in text for string in strings)
