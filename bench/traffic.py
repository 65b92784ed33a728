"""The traffic model: when requests are sent and how long they are, drawn reproducibly from a seed. Knows no network and no text."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

LONGEST = 1 << 20  # tokens


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of the lengths of prompts or answers, in tokens: "128", "uniform:64,256" (both included) or
    "lognormal:200,0.6" (median, sigma)."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Raises ValueError with what is needed."""
        kind, _, numbers = text.rpartition(":")
        try:
            values = [float(number) for number in numbers.split(",")]
        except ValueError:
            values = []
        match kind, values:
            case "", [tokens] if 1 <= tokens <= LONGEST and tokens == int(tokens):
                return cls("fixed", tokens)
            case "uniform", [low, high] if 1 <= low <= high <= LONGEST:
                return cls(kind, low, high)
            case "lognormal", [median, sigma] if 1 <= median <= LONGEST and 0 < sigma <= 5:
                return cls(kind, median, sigma)
        raise ValueError(f"{text}: a number of tokens is needed, uniform:LEAST,MOST or lognormal:MEDIAN,SIGMA")

    def draw(self, dice: random.Random) -> int:
        """A length, at least 1."""
        match self.kind:
            case "uniform":
                return dice.randint(round(self.first), round(self.second))
            case "lognormal":
                return max(1, min(round(dice.lognormvariate(math.log(self.first), self.second)), LONGEST))
        return round(self.first)

    def __str__(self) -> str:
        return f"{self.first:g}" if self.kind == "fixed" else f"{self.kind}:{self.first:g},{self.second:g}"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The arrival process of an open loop: "poisson", "constant" or "burst:8" (so many at once, bursts at random)."""

    kind: str
    burst: int = 1

    @classmethod
    def parse(cls, text: str) -> "Arrivals":
        """Raises ValueError with what is needed."""
        kind, _, size = text.partition(":")
        if text in ("poisson", "constant"):
            return cls(text)
        if kind == "burst" and size.isdecimal() and int(size) > 0:
            return cls(kind, int(size))
        raise ValueError(f"{text}: poisson, constant or burst:SIZE is needed")

    def moments(self, rate: float, dice: random.Random) -> Iterator[float]:
        """Arrival times in seconds from the beginning, without end; `rate` requests a second on average."""
        moment = 0.0
        while True:
            moment += self.burst / rate if self.kind == "constant" else dice.expovariate(rate / self.burst)
            for _ in range(self.burst):
                yield moment

    def __str__(self) -> str:
        return f"{self.kind}:{self.burst}" if self.kind == "burst" else self.kind
