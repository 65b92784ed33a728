"""Detects stop strings on the shard, in the bytes of the generated tokens. Only beam search needs it: for other requests the router
sees the text in time.

Knows the bytes of tokens; no group and no score.
"""

from collections.abc import Sequence as Listing

from .grammar import Grammars


class StopStrings:
    """Stop string detection with one model's tokenizer."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def completed_by(self, tokens: Listing[int], prompt_length: int, token: int, stops: Listing[str]) -> bool:
        """Whether the generated text contains one of `stops` once `token` is appended; it contained none before."""
        strings = [stop.encode() for stop in stops]
        longest = max(map(len, strings))
        text, start = self._grammars.bytes_of([token]), len(tokens)
        wanted = len(text) + longest
        while len(text) < wanted and start > prompt_length:  # repeated where special tokens, which have no bytes, left it too short
            end, start = start, max(prompt_length, start - longest)
            text = self._grammars.bytes_of(tokens[start:end]) + text
        return any(string in text for string in strings)
