"""Cost model of a step: a linear model of its duration, fitted online to measured steps. Pure arithmetic on a few floats.

    seconds = a + b tokens + c seen + d read + e rows + f, if it computes prompts                   a, b, c, d, e, f >= 0

Least squares of relative errors, so that steps of 3 ms count as much as steps of 3 s, with exponential forgetting. Steps with
prompts and steps without are accumulated separately, each kind fading only when one of its own comes: hours of plain decoding do
not wash out what is known of prompts.
"""

import math
from dataclasses import dataclass, field

FORGET = 0.96  # weight of an observation after the next of its kind: some 25 of each kind count
SIZE = 6
# Typical sizes of the features, which bring them to one scale.
SCALE = (1.0, 100.0, 10_000.0, 1_000.0, 10.0, 1.0)
MANY = 1_000_000_000
# How many times faster than predicted a step may be and be believed. The end of an overlapped step may be noticed late, as after
# its process was suspended. The next one then seems to have taken next to no time, and its relative error would outweigh hundreds
# of steps. A machine that really is faster is believed after a few.
FASTER = 3.0
FITTED = 16  # steps after which the model is refitted, unless a prediction needs it: a fit takes as long as many observations
TRUST = 1e-3  # weight of the initial estimate of a token's cost, against measured steps of weight 1
# Lower bound for the cost of a token, as a share of its cost if all measured time were for tokens: where other features explain
# that, a token would be free, and others divide by it. Not of the initial estimate, which may be off by any factor: the sampled
# step may have compiled, or its process was suspended.
LEAST = 0.01

Row = list[float]


@dataclass(frozen=True, slots=True)
class Work:
    """The features of a step that its cost depends on."""

    tokens: float = 0.0  # query tokens, of prompts and decodes
    seen: float = 0.0  # keys that each token of a prompt attends to, summed: arithmetic
    read: float = 0.0  # keys that are read for a row, however many tokens it has, summed: memory
    rows: float = 0.0  # that are sampled
    prompts: bool = False  # some of the tokens are of prompts


@dataclass(slots=True)
class Memory:
    """Weighted sums over the steps of one kind: of x x^T and of x, for relative errors (x divided by the seconds)."""

    squares: list[Row] = field(default_factory=lambda: [[0.0] * SIZE for _ in range(SIZE)])
    sums: Row = field(default_factory=lambda: [0.0] * SIZE)

    def add(self, x: Row) -> None:
        for i in range(SIZE):
            row = self.squares[i]
            for j in range(SIZE):
                row[j] = row[j] * FORGET + x[i] * x[j]
            self.sums[i] = self.sums[i] * FORGET + x[i]


class Cost:
    """The fitted model. It starts from one measured step, all of whose time is attributed to tokens: too slow rather than too
    fast."""

    def __init__(self, sample_tokens: int = 0, sample_seconds: float = 0.0) -> None:
        self._kinds = {True: Memory(), False: Memory()}
        self._prior = sample_seconds / sample_tokens if sample_tokens and sample_seconds > 0 else 1e-3
        self._fitted = [0.0] * SIZE  # by unit of the features
        self._since = FITTED  # steps observed since the fit

    def observe(self, work: Work, seconds: float, prompts: bool) -> None:
        """Adds a step of so many seconds. `prompts`: it computed some."""
        if work.tokens > 0 and seconds > 0:
            features = _features(work, prompts)
            if self._since >= FITTED or seconds < _product(features, self._fitted) / FASTER:
                seconds = max(seconds, _product(features, self._coefficients()) / FASTER)
            x = [value / scale / seconds for value, scale in zip(features, SCALE, strict=True)]
            self._kinds[prompts].add(x)
            self._since += 1

    def predict(self, work: Work) -> float:
        """Predicted seconds of a step."""
        return _product(_features(work, work.prompts), self._coefficients())

    @property
    def slopes(self) -> tuple[float, float, float]:
        """Seconds per sampled token, per key that a prompt token attends to, and per key that is read for a row."""
        _, b, c, d, e, _ = self._coefficients()
        return b + e, c, d

    def beside(self, position: int) -> float:
        """Fixed seconds of adding tokens of a prompt, of which `position` are computed: the different path of the step, and the
        keys that are read for them."""
        *_, d, _, f = self._coefficients()
        return f + d * position

    def tokens_within(self, seconds: float, position: int) -> int:
        """How many tokens of a prompt, of which `position` tokens are computed, can be added to a step for so much time."""
        _, b, c, d, _, _ = self._coefficients()
        seconds -= self.beside(position)
        linear, square = b + c * position + d, c / 2  # token i of them attends to position + i keys
        if seconds <= 0:
            return 0
        if square * seconds <= 1e-9 * linear * linear:  # keys cost next to nothing: the root below would cancel
            return int(min(seconds / linear, MANY)) if linear > 0 else MANY
        return int((math.sqrt(linear * linear + 4 * square * seconds) - linear) / (2 * square))

    def _coefficients(self) -> Row:
        if self._since:
            self._fitted, self._since = self._fit(), 0
        return self._fitted

    def _fit(self) -> Row:
        first, second = self._kinds[True], self._kinds[False]
        squares = [[p + q for p, q in zip(*rows, strict=True)] for rows in zip(first.squares, second.squares, strict=True)]
        sums = [p + q for p, q in zip(first.sums, second.sums, strict=True)]
        prior = self._prior * SCALE[1]
        squares[1][1] += TRUST / prior**2
        sums[1] += TRUST / prior
        for i in range(SIZE):
            squares[i][i] += 1e-9 * (squares[i][i] + 1.0)
        solution = nonnegative(squares, sums)
        solution[1] = max(solution[1], LEAST * sums[1] / squares[1][1])
        return [value / scale for value, scale in zip(solution, SCALE, strict=True)]


def _features(work: Work, prompts: bool) -> tuple[float, ...]:
    return 1.0, work.tokens, work.seen, work.read, work.rows, float(prompts)


def _product(features: tuple[float, ...], coefficients: Row) -> float:
    return sum(value * each for value, each in zip(features, coefficients, strict=True))


def nonnegative(squares: list[Row], sums: Row) -> Row:
    """The x >= 0 that solves squares x = sums approximately: the most negative feature is dropped, and the rest solved again."""
    used = list(range(len(sums)))
    while used:
        values = solve([[squares[i][j] for j in used] for i in used], [sums[i] for i in used])
        worst = min(values)
        if worst >= 0:
            result = [0.0] * len(sums)
            for i, value in zip(used, values, strict=True):
                result[i] = value
            return result
        del used[values.index(worst)]
    return [0.0] * len(sums)


def solve(matrix: list[Row], right: Row) -> Row:
    """Gaussian elimination with pivots. `matrix` is symmetric and positive definite."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for i in range(column + 1, size):
            factor = rows[i][column] / rows[column][column]
            for j in range(column, size + 1):
                rows[i][j] -= factor * rows[column][j]
    values = [0.0] * size
    for i in reversed(range(size)):
        values[i] = (rows[i][size] - sum(rows[i][j] * values[j] for j in range(i + 1, size))) / rows[i][i]
    return values
