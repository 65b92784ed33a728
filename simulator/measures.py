"""Metrics of a replay: latencies, throughput, pool use. Knows seconds and counts; no scheduler."""

import bisect
import itertools
from array import array
from collections import defaultdict
from dataclasses import dataclass, field

from .shard import Outcome

PERCENTILES = (0.5, 0.9, 0.99, 1.0)
ALL = "all"


class Values:
    """Weighted numbers, and their exact percentiles."""

    def __init__(self) -> None:
        self._values = array("d")
        self._weights = array("q")

    def add(self, value: float, weight: int = 1) -> None:
        """Adds a value with a weight."""
        if weight > 0:
            self._values.append(value)
            self._weights.append(weight)

    @property
    def count(self) -> int:
        """Sum of the weights."""
        return sum(self._weights)

    @property
    def mean(self) -> float:
        """Weighted mean; 0 if there are no values."""
        total = sum(value * weight for value, weight in zip(self._values, self._weights, strict=True))
        return total / self.count if self.count else 0.0

    def percentiles(self, shares: tuple[float, ...] = PERCENTILES) -> list[float]:
        """For each share, the smallest value that at least this share does not exceed. Zeros if there are no values."""
        if not self._values:
            return [0.0] * len(shares)
        order = sorted(range(len(self._values)), key=self._values.__getitem__)
        sums = list(itertools.accumulate(self._weights[i] for i in order))
        return [self._values[order[min(bisect.bisect_left(sums, share * sums[-1]), len(order) - 1)]] for share in shares]


@dataclass(slots=True)
class Service:
    """Quality of service of the requests of one priority."""

    ttft: Values = field(default_factory=Values)  # seconds from arrival to the first token
    itl: Values = field(default_factory=Values)  # seconds between tokens of a choice, one value per gap
    pace: Values = field(default_factory=Values)  # seconds per token after the first, the mean of a request
    queue: Values = field(default_factory=Values)  # seconds from arrival to the first step that computed something of it
    whole: Values = field(default_factory=Values)  # seconds from arrival to the end
    finished: int = 0
    good: int = 0  # within the goals


@dataclass(slots=True)
class Sample:
    """Time series of the server's state, for plots."""

    seconds: "array[float]" = field(default_factory=lambda: array("d"))
    held: "array[float]" = field(default_factory=lambda: array("d"))  # share of the pages
    cached: "array[float]" = field(default_factory=lambda: array("d"))
    running: "array[float]" = field(default_factory=lambda: array("d"))
    waiting: "array[float]" = field(default_factory=lambda: array("d"))


class Measures:
    """All metrics of one run. Goals in seconds: a request is good if its first token and its pace meet them."""

    def __init__(self, pages: int, ttft_goal: float = 2.0, itl_goal: float = 0.1) -> None:
        self.services: dict[str, Service] = defaultdict(Service, {ALL: Service()})
        self.samples = Sample()
        self.seconds = 0.0  # of the trace's own time
        self.real_seconds = 0.0  # that the simulation took
        self.steps = self.prompt_tokens = self.restored_tokens = self.cached_tokens = self.output_tokens = 0
        self.pauses = 0
        self.impossible = 0  # requests that could never fit
        self.refused = 0  # because too many were in flight
        self.busy = 0.0  # seconds in which the shards computed
        self._pages = pages
        self._goals = ttft_goal, itl_goal

    @property
    def finished(self) -> int:
        """Requests that were answered."""
        return self.services[ALL].finished

    def of(self, priority: str) -> tuple[Service, Service]:
        """Where a request of this priority counts."""
        return self.services[priority], self.services[ALL]

    def begin(self, priority: str, queue: float) -> None:
        """Something of a request is computed for the first time."""
        for service in self.of(priority):
            service.queue.add(queue)

    def first(self, priority: str, ttft: float) -> None:
        """A request has its first token."""
        for service in self.of(priority):
            service.ttft.add(ttft)

    def gap(self, priority: str, seconds: float, count: int) -> None:
        """`count` choices waited so long for their next token."""
        for service in self.of(priority):
            service.itl.add(seconds, count)

    def step(self, done: Outcome, seconds: float) -> None:
        """A step was answered."""
        self.steps += done.prompt_tokens + done.decode_tokens > 0
        self.busy += seconds
        self.prompt_tokens += done.prompt_tokens
        self.restored_tokens += done.restored_tokens
        self.cached_tokens += done.cached_tokens
        self.output_tokens += done.rows

    def finish(self, priority: str, ttft: float, whole: float, tokens: int) -> None:
        """A request is answered, with `tokens` tokens in its longest choice."""
        pace = (whole - ttft) / (tokens - 1) if tokens > 1 else 0.0
        good = ttft <= self._goals[0] and pace <= self._goals[1]
        for service in self.of(priority):
            service.finished += 1
            service.good += good
            service.whole.add(whole)
            if tokens > 1:
                service.pace.add(pace)

    def sample(self, now: float, free: int, cached: int, running: int, waiting: int) -> None:
        """Records the state after a step, and when an idle server wakes: it holds for the time since the sample before."""
        samples = self.samples
        samples.seconds.append(now)
        samples.held.append(1 - free / self._pages)
        samples.cached.append(cached / self._pages)
        samples.running.append(running)
        samples.waiting.append(waiting)

    def mean(self, values: "array[float]") -> float:
        """Mean of a sampled value, over time."""
        seconds = self.samples.seconds
        if not seconds or seconds[0] == seconds[-1]:
            return values[-1] if values else 0.0
        total = sum(value * (after - before) for value, before, after in zip(values[1:], seconds, seconds[1:], strict=False))
        return total / (seconds[-1] - seconds[0])

    def summary(self) -> dict[str, object]:
        """Everything as plain numbers; seconds throughout."""
        samples = self.samples
        return {
            "requests": {"finished": self.finished, "impossible": self.impossible, "refused": self.refused},
            "seconds": self.seconds,
            "steps": self.steps,
            "busy": self.busy / self.seconds if self.seconds else 0.0,
            "tokens": {
                "output": self.output_tokens,
                "prompt": self.prompt_tokens,
                "cached": self.cached_tokens,
                "restored": self.restored_tokens,
            },
            "tokens_per_second": self.output_tokens / self.seconds if self.seconds else 0.0,
            "pauses": self.pauses,
            "pages_held": {"mean": self.mean(samples.held), "most": max(samples.held, default=0.0)},
            "pages_cached": self.mean(samples.cached),
            "running": self.mean(samples.running),
            "waiting": self.mean(samples.waiting),
            "services": {name: self._service(service) for name, service in self.services.items()},
            "simulated_requests_per_second": self.finished / self.real_seconds if self.real_seconds else 0.0,
        }

    def _service(self, service: Service) -> dict[str, object]:
        names = [f"p{share * 100:g}" if share < 1 else "max" for share in PERCENTILES]
        kinds = {"ttft": service.ttft, "itl": service.itl, "pace": service.pace, "queue": service.queue, "whole": service.whole}
        found: dict[str, object] = {
            "finished": service.finished,
            "goodput": service.good / self.seconds if self.seconds else 0.0,
            "good": service.good / service.finished if service.finished else 0.0,
        }
        return found | {name: dict(zip(names, values.percentiles(), strict=True)) for name, values in kinds.items()}
