"""Beam search bookkeeping: scores, the complete hypotheses that are kept, and the stopping rule. Plain numbers.

The rules are those of transformers' generate(num_beams=...), which computes in float32: where two scores are nearly equal, rounding
decides which is better, so it is reproduced here.
"""

from array import array
from dataclasses import dataclass, field
from enum import IntEnum

import numpy

Top = tuple[tuple[int, float], ...]


class Stop(IntEnum):
    """The stopping rule once there are as many complete hypotheses as beams, by the wire protocol's numbers; transformers'
    early_stopping."""

    WORSE = 0  # when the best live beam, scored at its present length, is no better than the worst kept: False
    FULL = 1  # at once: True
    NEVER = 2  # when no beam can become better than the worst kept: "never"


@dataclass(slots=True)
class Path:
    """A beam's history: its score, and the log-probabilities of its tokens."""

    score: float = 0.0  # sum of its tokens' log-probabilities, after penalties
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))  # of each output token, by the model's own distribution
    tops: list[Top] = field(default_factory=list)  # top tokens at each position; empty if not asked for

    def copy(self) -> "Path":
        """An independent copy."""
        return Path(self.score, self.logprobs[:], self.tops[:])

    def append(self, score: float, logprob: float, top: Top, tops: bool) -> None:
        """Extends the path by a token."""
        self.score = score
        self.logprobs.append(logprob)
        if tops:
            self.tops.append(top)


@dataclass(slots=True)
class Hypothesis:
    """A complete beam: a possible answer."""

    tokens: "array[int]"  # output tokens, the end token included
    path: Path
    score: float  # divided by length to the power of length_penalty
    ended: bool = True  # it ended by an end token, else by length


@dataclass(slots=True)
class Search:
    """The state of one group's beam search."""

    width: int  # beams, at least 2
    wanted: int  # hypotheses to return as answers
    length_penalty: float = 1.0
    stop: Stop = Stop.WORSE
    streamed: int = 0  # tokens already streamed: the best answer begins with them, whichever it will be
    watched: bool = False  # a client watches the beams (`stream_beams`): each step reports them
    kept: list[Hypothesis] = field(default_factory=list)  # complete hypotheses, best first, at most `width`

    def final(self, score: float, length: int) -> float:
        """The final score of a hypothesis of `length` output tokens: with the length penalty."""
        return float(numpy.float32(score) / numpy.float32(length**self.length_penalty))

    def keep(self, hypotheses: list[Hypothesis]) -> None:
        """Adds complete hypotheses, and keeps the best `width` of all."""
        self.kept = sorted(self.kept + hypotheses, key=lambda one: -one.score)[: self.width]

    def over(self, best: float, length: int, most: int) -> bool:
        """Whether the search ends. best, length: score and output tokens of the best live beam; most: the most output tokens."""
        if len(self.kept) < self.width:
            return False
        if self.stop is Stop.FULL:
            return True
        reach = most if self.stop is Stop.NEVER and self.length_penalty > 0 else length
        return self.final(best, reach) <= self.kept[-1].score


def candidates_of(width: int, end_ids: int) -> int:
    """The candidates that a step considers: enough for `width` beams to live on, however many of the candidates end."""
    return max(2, 1 + end_ids) * width
