"""Drafts by looking up what followed when the last tokens came before, in the prompt or in the output (prompt lookup decoding:
Saxena 2023; Yang et al. 2023, arXiv:2304.04487). Plain ints; knows no sequence and no model.
"""

import math
from array import array
from collections.abc import Sequence as Listing

from .tree import Tree, chain

LONGEST = 3  # tokens that are looked up


class NgramIndex:
    """Where the last tokens of a text came before. It grows with the text, at a cost per token that is always the same."""

    def __init__(self) -> None:
        self.tokens = array("I")
        self._last: list[dict[bytes, int]] = [{} for _ in range(LONGEST)]  # by length - 1: n-gram > the place after its last one
        self._before = [0] * LONGEST  # by length - 1: the same of the last tokens, but for themselves; 0: they are new

    def follow(self, tokens: Listing[int]) -> None:
        """Goes on to the end of a text that begins with what it knows."""
        first = len(self.tokens) + 1
        self.tokens.extend(tokens[first - 1 :])
        text, width = memoryview(self.tokens).cast("B"), self.tokens.itemsize
        for length, last in enumerate(self._last, 1):
            for place in range(max(first, length), len(self.tokens) + 1):
                gram = bytes(text[(place - length) * width : place * width])
                self._before[length - 1], last[gram] = last.get(gram, 0), place

    def earlier(self) -> tuple[int, int]:
        """How many of the last tokens came before, and the place behind them where they did most recently; (0, 0): none."""
        return next(((length, self._before[length - 1]) for length in range(LONGEST, 0, -1) if self._before[length - 1]), (0, 0))


def look_up(repeats: NgramIndex, nodes: int, depth: int) -> Tree:
    """What followed the longest repeated end when it came most recently. Empty if the last token is a new one."""
    (length, place), count = repeats.earlier(), min(nodes, depth)
    if not (length and count):
        return Tree()
    found = list(repeats.tokens[place : place + count])
    while len(found) < count:  # what reaches the end of the text goes on with itself, as a repetition does
        found.append(found[place + len(found) - len(repeats.tokens)])
    return chain(found, [math.log(length / (length + 1))] * count)
