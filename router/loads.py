"""Measured cost and gain of steps with and without drafts at one load, that is a similar number of decoding sequences, as
exponentially fading sums.
"""

from dataclasses import dataclass, field

from .cost import FASTER, nonnegative

FORGET = 0.98  # weight of a step with drafts after the next one: some 50 count
FORGET_MEAN = 0.9  # the same of means: some 10 count
FORGET_GAIN = 0.95
TRUST = 4.0  # weight of the prior cost of a draft, against a measured step with one
DOUBT = 0.1  # the same of the prior that `first` is 0
TILT = 16  # steps with drafts after which one has more drafts, or fewer, in turns
FEW = 8.0  # sequences, summed over steps with drafts, that say little of the gain


@dataclass(slots=True)
class FadingMean:
    """Fading mean of measured steps. Errors are relative, so that a single slow step doesn't outweigh many fast ones."""

    weight: float = 0.0  # sum of the weights of ...
    count: float = 0.0  # ... so many steps
    seconds: float = 0.0
    sequences: float = 0.0
    keys: float = 0.0

    def add(self, seconds: float, sequences: float = 0.0, keys: float = 0.0) -> None:
        """Adds a step."""
        seconds = max(seconds, self.seconds / FASTER)
        weight = seconds**-2
        self.weight = self.weight * FORGET_MEAN + weight
        self.count = self.count * FORGET_MEAN + 1
        share = weight / self.weight
        self.seconds += share * (seconds - self.seconds)
        self.sequences += share * (sequences - self.sequences)
        self.keys += share * (keys - self.keys)


@dataclass(slots=True)
class LoadStatistics:
    """Statistics of pure decode steps at one load."""

    plain: FadingMean = field(default_factory=FadingMean)  # steps without drafts
    # first runs of the draft model, with all that is done before the second ...
    openings: FadingMean = field(default_factory=FadingMean)
    rounds: FadingMean = field(default_factory=FadingMean)  # ... and each later run
    since: int = 0  # steps with drafts since one without ...
    idle: int = 0  # ... and steps without since one with
    saved: float = 0.0  # seconds that a trial may lose; negative: lost by the last one, and not recovered yet
    turns: int = 0  # how often there was a step without after steps with
    trial: int = 0  # steps that remain of a trial
    trials: int = 0  # trials so far
    cost: float = 0.0  # seconds lost by the last trial
    _squares: tuple[float, float, float] = (0.0, 0.0, 0.0)  # weighted sums of 1, drafts, drafts squared ...
    _sums: tuple[float, float] = (0.0, 0.0)  # ... and of their extra seconds, and these times drafts
    _count: float = 0.0  # sequences in steps with drafts, fading
    _tokens: float = 0.0  # tokens that these generated ...
    _alike: float = 0.0  # ... and those that steps without drafts would have in their time

    def add(self, drafts: int, extra: float, seconds: float) -> None:
        """Adds a step with drafts that took so long, `extra` seconds of it for them."""
        weight = seconds**-2
        one, linear, square = (old * FORGET for old in self._squares)
        first, second = (old * FORGET for old in self._sums)
        self._squares = one + weight, linear + weight * drafts, square + weight * drafts * drafts
        self._sums = first + weight * extra, second + weight * extra * drafts

    def gain(self, sequences: int, tokens: int, alike: float) -> None:
        """Adds its gain: it generated `tokens`, and steps without drafts would have generated `alike` in its time, drafting
        included."""
        self._count = self._count * FORGET_GAIN + sequences
        self._tokens = self._tokens * FORGET_GAIN + tokens
        self._alike = self._alike * FORGET_GAIN + alike

    @property
    def loses(self) -> bool:
        """Whether steps with drafts were slower than those without, whatever was predicted."""
        return self._count >= FEW and self.lost

    @property
    def lost(self) -> bool:
        """The same, after even a few of them."""
        return self._tokens < self._alike

    def fit(self, draft: float, step: float) -> tuple[float, float]:
        """Seconds of having any drafts, and per draft. draft: prior estimate per draft; step: seconds without any."""
        one, linear, square = self._squares
        weight = 1 / step**2  # of a measured step
        first, second = self._sums
        squares = [[one + DOUBT * weight, linear], [linear, square + TRUST * weight]]
        found = nonnegative(squares, [first, second + TRUST * weight * draft])
        return found[0], found[1]

    @property
    def often(self) -> float:
        """The reciprocal of the mean number of drafts in steps that have any."""
        one, linear, _ = self._squares
        return one / linear if one else 1.0

    def tilted(self, first: float, draft: float) -> tuple[float, float]:
        """In some steps, costs under which the usual number of drafts costs the same, but other numbers get chosen."""
        if not self.since or self.since % TILT:
            return first, draft
        if (self.since // TILT + self.turns) % 2:
            return first + draft / 2 / self.often, draft / 2
        return first / 2, draft + first / 2 * self.often
