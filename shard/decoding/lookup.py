"""Prompt lookup decoding (n-gram speculation): drafts are the tokens that followed the last n-gram when it occurred before, in the
prompt or in the output (Saxena 2023; Yang et al. 2023, arXiv:2304.04487). Plain ints; knows no sequence and no model."""

import math
import sys
from array import array
from collections.abc import Sequence as Listing

from .tree import Tree, chain

LONGEST = 3  # the longest n-gram that is looked up, in tokens


class NgramIndex:
    """An index of a sequence's n-grams, to find where its last tokens occurred before. Extended as the sequence grows, at a
    constant cost per token."""

    def __init__(self) -> None:
        self.tokens = array("I")
        # by length - 1: n-gram > the position after its last occurrence
        self._last: list[dict[bytes, int]] = [{} for _ in range(LONGEST)]
        # by length - 1: the position after the previous occurrence of the last tokens; 0: there is none
        self._before = [0] * LONGEST

    def follow(self, tokens: Listing[int], most: int = sys.maxsize) -> int:
        """Extends the index towards all of `tokens`, which begin with those that it has, by at most so many. Returns by how
        many."""
        before = len(self.tokens)
        self.tokens.extend(tokens[before : before + most])
        begin = max(0, before + 1 - LONGEST)
        text, width = self.tokens[begin:].tobytes(), self.tokens.itemsize
        for length, last in enumerate(self._last, 1):
            for place in range(max(before + 1, length), len(self.tokens) + 1):
                gram = text[(place - length - begin) * width : (place - begin) * width]
                self._before[length - 1], last[gram] = last.get(gram, 0), place
        return len(self.tokens) - before

    def earlier(self) -> tuple[int, int]:
        """The length of the longest last n-gram that occurred before, and the position after its most recent occurrence; (0, 0):
        none did."""
        return next(((length, self._before[length - 1]) for length in range(LONGEST, 0, -1) if self._before[length - 1]), (0, 0))


def look_up(index: NgramIndex, nodes: int, depth: int) -> Tree:
    """A chain of drafts: what followed the longest repeated n-gram at its most recent occurrence. Empty if the last token never
    occurred before."""
    (length, place), count = index.earlier(), min(nodes, depth)
    if not (length and count):
        return Tree()
    found = list(index.tokens[place : place + count])
    while len(found) < count:  # past the end of the text, continue with the copy itself, as a repetition does
        found.append(found[place + len(found) - len(index.tokens)])
    return chain(found, [math.log(length / (length + 1))] * count)
