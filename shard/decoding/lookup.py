"""Drafts by looking up what followed when the last tokens came before, in the prompt or in the output (prompt lookup decoding:
Saxena 2023; Yang et al. 2023, arXiv:2304.04487). Plain ints; knows no sequence and no model.
"""

import math
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Listing

from .tree import Tree, chain, merge

LONGEST = 3  # tokens that are looked up, if no other number is asked for
# Earlier places that are looked at for each length: what repeats a lot has followers enough among its last places.
PLACES = 8


class Index:
    """Where the last tokens of a text came before. It grows with its text, at a cost per token that doesn't depend on its length.

    For every length there is the last place of each n-gram, and for every place the one before with the same n-gram.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self.tokens = array("I")
        self._last: list[dict[bytes, int]] = [{} for _ in range(longest)]  # by length - 1: n-gram > the place after it
        self._before = [array("i", [-1]) for _ in range(longest)]  # by length - 1 and place

    def follow(self, tokens: Listing[int]) -> None:
        """Goes on to the end of a text that begins with what it knows."""
        first = len(self.tokens) + 1
        self.tokens.extend(tokens[first - 1 :])
        text, width = memoryview(self.tokens).cast("B"), self.tokens.itemsize
        for length, (last, before) in enumerate(zip(self._last, self._before, strict=True), 1):
            for place in range(first, len(self.tokens) + 1):
                if place < length:
                    before.append(-1)
                    continue
                gram = bytes(text[(place - length) * width : place * width])
                before.append(last.get(gram, -1))
                last[gram] = place

    def earlier(self, length: int) -> Iterator[int]:
        """The places after which the last `length` tokens came before, the most recent first."""
        before = self._before[length - 1]
        place = before[-1]
        while place > 0:
            yield place
            place = before[place]

    @property
    def longest(self) -> int:
        """Tokens that are looked up at most."""
        return len(self._last)


def look_up(index: Index, nodes: int, depth: int, branches: int = 1) -> Tree:
    """A tree of what has followed: of the longest repeated end, the most recent continuation; then, as other branches, those that
    begin otherwise, older ones and those of shorter ends. Empty if the last token is a new one."""
    found: list[Tree] = []
    firsts: set[int] = set()
    left = 1.0  # the chance that none of the branches so far is right
    for length in range(index.longest, 0, -1):
        for _, place in zip(range(PLACES), index.earlier(length), strict=False):
            if len(found) == branches or not min(nodes, depth):
                break
            if index.tokens[place] not in firsts:
                firsts.add(index.tokens[place])
                chance = length / (length + 1)
                found.append(_branch(index.tokens, place, min(nodes, depth), left, chance))
                left *= 1 - chance
    return merge(found).cut(nodes) if len(found) > 1 else found[0] if found else Tree()


def _branch(tokens: Listing[int], place: int, count: int, left: float, chance: float) -> Tree:
    """What followed at `place`. What reaches the end of the text goes on with itself, as a repetition does. chance: of each token,
    if those before it are right; of the first, if no branch before this one is."""
    end = len(tokens)
    continued = list(tokens[place : place + count])
    while len(continued) < count:
        continued.append(continued[place + len(continued) - end])
    return chain(continued, [math.log(left * chance), *[math.log(chance)] * (count - 1)])
