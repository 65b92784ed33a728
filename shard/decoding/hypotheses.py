"""Beam search's books: what a beam is worth, which complete ones are kept, and when nothing better can come. Plain numbers.

The rules are those of transformers' generate(num_beams=...), which counts in 32 bit: where two scores are nearly equal, rounding
decides which is the better one, so it is repeated here.
"""

from array import array
from dataclasses import dataclass, field
from enum import IntEnum

import numpy

Top = tuple[tuple[int, float], ...]


class Stop(IntEnum):
    """When a search ends that has kept as many as it is wide, in the numbers of the wire; transformers' early_stopping."""

    WORSE = 0  # the best beam, as long as it is now, is no better than the worst that is kept: False
    FULL = 1  # at once: True
    NEVER = 2  # no beam can become better than the worst that is kept: "never"


@dataclass(slots=True)
class Path:
    """What a beam remembers of how it came about."""

    score: float = 0.0  # sum of its tokens' log-probabilities, after penalties
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))  # of each generated token, the model's own
    tops: list[Top] = field(default_factory=list)  # most probable tokens at each place; empty if nobody asked

    def copy(self) -> "Path":
        """One that goes on by itself."""
        return Path(self.score, self.logprobs[:], self.tops[:])

    def append(self, score: float, logprob: float, top: Top, tops: bool) -> None:
        """Goes on by a token."""
        self.score = score
        self.logprobs.append(logprob)
        if tops:
            self.tops.append(top)


@dataclass(slots=True)
class Hypothesis:
    """A complete beam."""

    tokens: "array[int]"  # generated ones, the end token included
    path: Path
    score: float  # divided by length to the power of length_penalty
    ended: bool = True  # by an end token; else by length


@dataclass(slots=True)
class Search:
    """Of one group."""

    width: int  # beams, at least 2
    wanted: int  # of the complete ones, how many are answers
    length_penalty: float = 1.0
    stop: Stop = Stop.WORSE
    told: int = 0  # tokens of the best answer that were told: whatever it will be, it begins with them
    watched: bool = False
    kept: list[Hypothesis] = field(default_factory=list)  # complete ones, best first, at most `width`

    def final(self, score: float, length: int) -> float:
        """What a beam of so many generated tokens is worth if it is complete."""
        return float(numpy.float32(score) / numpy.float32(length**self.length_penalty))

    def keep(self, hypotheses: list[Hypothesis]) -> None:
        """Of all that are complete, the best."""
        self.kept = sorted(self.kept + hypotheses, key=lambda one: -one.score)[: self.width]

    def over(self, best: float, length: int, most: int) -> bool:
        """Whether it ends, while the best live beam has the score `best` and `length` generated tokens, of at most `most`."""
        if len(self.kept) < self.width:
            return False
        if self.stop is Stop.FULL:
            return True
        reach = most if self.stop is Stop.NEVER and self.length_penalty > 0 else length
        return self.final(best, reach) <= self.kept[-1].score


def candidates_of(width: int, end_ids: int) -> int:
    """How many continuations are looked at in a step: enough for `width` that go on, however many of them end."""
    return max(2, 1 + end_ids) * width
