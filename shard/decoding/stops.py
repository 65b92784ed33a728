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
        longest = max(map(len, strings))  # a token has at least a byte, or doesn't matter: it is special, and not seen
        text = self._tokenizer.bytes_of([*tokens[max(prompt_length, len(tokens) - longest) :], token])
        return any(string in text for string in strings)
