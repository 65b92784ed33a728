"""What steps with and without drafts take at one load: about as many sequences that decode. Sums that fade."""

from dataclasses import dataclass, field

from .cost import FASTER, nonnegative

FORGET = 0.98  # what a step with drafts weighs after the next one: some 50 count
FORGET_MEAN = 0.9  # the same of what has one number only: some 10 count
FORGET_GAIN = 0.95
TRUST = 4.0  # in what a draft costs as far as others know, against a measured step with one
DOUBT = 0.1  # the same in that there is no `first`
TILT = 16  # steps with drafts after which there is one of which more are asked, or fewer, in turns
FEW = 8.0  # sequences, of all steps with drafts together, that say little of what these gain


@dataclass(slots=True)
class Mean:
    """Of some numbers, lately. Errors are relative, so that a single slow step doesn't count for many fast ones."""

    weight: float = 0.0  # of ...
    count: float = 0.0  # ... so many
    seconds: float = 0.0
    sequences: float = 0.0
    keys: float = 0.0

    def add(self, seconds: float, sequences: float = 0.0, keys: float = 0.0) -> None:
        """One more."""
        seconds = max(seconds, self.seconds / FASTER)
        weight = seconds**-2
        self.weight = self.weight * FORGET_MEAN + weight
        self.count = self.count * FORGET_MEAN + 1
        share = weight / self.weight
        self.seconds += share * (seconds - self.seconds)
        self.sequences += share * (sequences - self.sequences)
        self.keys += share * (keys - self.keys)


@dataclass(slots=True)
class Load:
    """Steps that do nothing but decode."""

    plain: Mean = field(default_factory=Mean)  # those without drafts
    openings: Mean = field(default_factory=Mean)  # first runs of the draft model, with all that is done before the second ...
    rounds: Mean = field(default_factory=Mean)  # ... and each of the others
    since: int = 0  # steps with drafts since one without ...
    idle: int = 0  # ... and steps without since one with
    saved: float = 0.0  # seconds that may be spent on a trial; negative: that the last one has cost, and that are not saved yet
    turns: int = 0  # how often there was one without after steps with
    trial: int = 0  # steps with drafts that are still to come of it
    trials: int = 0  # so far
    cost: float = 0.0  # seconds that were lost by the last one
    _squares: tuple[float, float, float] = (0.0, 0.0, 0.0)  # weighted sums of 1, drafts, drafts squared ...
    _sums: tuple[float, float] = (0.0, 0.0)  # ... and of what these took
    _count: float = 0.0  # sequences in steps with drafts, lately
    _tokens: float = 0.0  # that they brought ...
    _alike: float = 0.0  # ... and that would have been brought without in their time

    def add(self, drafts: int, extra: float, seconds: float) -> None:
        """A step with drafts took so long, `extra` of it for them."""
        weight = seconds**-2
        one, linear, square = (old * FORGET for old in self._squares)
        first, second = (old * FORGET for old in self._sums)
        self._squares = one + weight, linear + weight * drafts, square + weight * drafts * drafts
        self._sums = first + weight * extra, second + weight * extra * drafts

    def gain(self, sequences: int, tokens: int, alike: float) -> None:
        """It brought so many tokens, and without drafts there would have been `alike` in its time, the draft model's included."""
        self._count = self._count * FORGET_GAIN + sequences
        self._tokens = self._tokens * FORGET_GAIN + tokens
        self._alike = self._alike * FORGET_GAIN + alike

    @property
    def loses(self) -> bool:
        """Steps with drafts were slower than those without, whatever was expected of them."""
        return self._count >= FEW and self.lost

    @property
    def lost(self) -> bool:
        """So it seems, after a few of them already."""
        return self._tokens < self._alike

    def fit(self, draft: float, step: float) -> tuple[float, float]:
        """Seconds that any draft at all takes, and each. draft: what each takes as far as others know; step: without any."""
        one, linear, square = self._squares
        weight = 1 / step**2  # of a measured step
        first, second = self._sums
        squares = [[one + DOUBT * weight, linear], [linear, square + TRUST * weight]]
        found = nonnegative(squares, [first, second + TRUST * weight * draft])
        return found[0], found[1]

    @property
    def often(self) -> float:
        """One divided by the drafts of a step that has any."""
        one, linear, _ = self._squares
        return one / linear if one else 1.0

    def tilted(self, first: float, draft: float) -> tuple[float, float]:
        """Costs under which the usual number of drafts takes the same, but others are asked for, in some steps."""
        if not self.since or self.since % TILT:
            return first, draft
        if (self.since // TILT + self.turns) % 2:
            return first + draft / 2 / self.often, draft / 2
        return first / 2, draft + first / 2 * self.often
