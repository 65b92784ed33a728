"""Statistics of recorded requests. Every latency counts from when the request was to be sent; only answered requests have one."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from .load import Stage
from .record import Record

PERCENTILES = (50, 90, 95, 99)
BUSY = 0.8  # share of a core from which on this client may be the bottleneck
BUNCHED = 0.05  # share of events that came together with others, from which on gaps between tokens mean less
# The values that a request has of each latency.
LATENCIES: dict[str, Callable[[Record], list[float]]] = {
    "ttft": lambda record: [record.ttft],
    "itl": Record.gaps,
    "tpot": lambda record: [] if record.tpot is None else [record.tpot],
    "e2e": lambda record: [record.e2e],
}
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Objective:
    """A service-level objective of requests: most seconds, by latency. `itl` is the 99th percentile of the request's own gaps."""

    most: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, text: str) -> "Objective":
        """Parses "ttft=500ms,itl=50ms". Raises ValueError with what is needed."""
        found = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.partition("=")
            if name not in LATENCIES:
                raise ValueError(f"{part}: one of {', '.join(LATENCIES)} is needed, such as ttft=500ms")
            found[name] = duration(value)
        if not found:
            raise ValueError(f"{text!r}: an objective such as ttft=500ms,itl=50ms is needed")
        return cls(tuple(found.items()))

    def kept(self, record: Record) -> bool:
        """Whether the request met the objective. One without an answer did not."""
        return record.good and all(percentile(LATENCIES[name](record), 99) <= most for name, most in self.most)

    def __str__(self) -> str:
        return ", ".join(f"{name} {_text(most)}" for name, most in self.most)


def duration(text: str) -> float:
    """Parses "500ms", "2s", "0.5s", in seconds. Raises ValueError with what is needed."""
    number, unit = text.rstrip("smu"), text[len(text.rstrip("smu")) :]
    try:
        seconds = float(number) * UNITS[unit]
    except (ValueError, KeyError):
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{text!r}: a time with its unit is needed, such as 500ms or 2s")
    return seconds


def figures(stage: Stage, objective: Objective | None) -> Figures:
    """All figures of one stage, as JSON values; times in seconds."""
    counted = stage.counted
    good = [record for record in counted if record.good]
    answered = [record for record in stage.records if record.moments]
    end = stage.closed or stage.ended
    seconds = max(end - stage.began, 1e-9)
    inside = [record for record in stage.records if record.good and stage.began <= record.ended <= end]
    errors = Counter(record.error for record in counted if record.error)
    found: Figures = {
        stage.kind: stage.value,
        "seconds": seconds,
        "partial": stage.partial,
        "requests": {"sent": len(stage.records), "counted": len(counted), "answered": len(good), "failed": sum(errors.values())},
        "errors": dict(errors.most_common()),
        "error_examples": {kind: next(record.detail for record in counted if record.error == kind) for kind in errors},
        "requests_per_second": len(inside) / seconds,
        "output_tokens_per_second": _tokens_between(answered, stage.began, end) / seconds,
        "prompt_tokens": summary([record.prompt_tokens for record in good]),
        "output_tokens": summary([record.tokens for record in good]),
        **{name: summary(values(good, name)) for name in LATENCIES},
        "late": summary([record.late for record in counted if record.sent]),
        "in_flight": _in_flight(stage.records, stage.began, end),
        "client": {"cpu": stage.cpu, "lag_p99": percentile(stage.lags, 99), "lag_most": max(stage.lags, default=0.0)},
    }
    if objective is not None:
        share = sum(map(objective.kept, counted)) / max(len(counted), 1)
        speed = sum(map(objective.kept, inside)) / seconds
        found["goodput"] = {"objective": str(objective), "share": share, "requests_per_second": speed}
    found["curves"] = {name: _curve(values(good, name)) for name in ("ttft", "itl", "e2e")}
    found["tokens_by_second"] = _by_second(answered, stage.began, end)
    found["warnings"] = warnings(stage, good, found)
    found["records"] = [_row(record, stage.began) for record in counted]
    return found


def load_title(found: Figures) -> str:
    """The load of a stage, for people."""
    return f"{found['rate']:g} requests a second" if "rate" in found else f"{found['concurrency']:g} at once"


def warnings(stage: Stage, good: Sequence[Record], found: Figures) -> list[str]:
    """What a reader must know before trusting the figures."""
    said = []
    if stage.partial:
        said.append("interrupted: only what had been answered by then counts, which the shorter answers are")
    events, reads = sum(len(record.moments) for record in good), sum(record.reads for record in good)
    uncounted, tokens = sum(record.uncounted for record in good), sum(record.tokens for record in good)
    short = sum(record.tokens < record.wanted for record in good)
    if stage.cpu > BUSY:
        said.append(f"this client used {stage.cpu:.0%} of a core: it may be slower than the server; load from several processes")
    elif found["client"]["lag_p99"] > max(0.005, (found["itl"] or {}).get("p50", 0.0) / 2):
        said.append(f"this client was late by {_text(found['client']['lag_p99'])} (p99): its machine is too busy for such figures")
    if uncounted:
        said.append(
            f"{tokens} tokens came in {events} events, and the server did not say how many each held: itl is between events; "
            "--continuous-usage asks for it"
        )
    if events and 1 - reads / events > BUNCHED:
        share = 1 - reads / events
        said.append(f"{share:.0%} of the events came together with others: itl shows bunches; tpot is the mean")
    if short:
        said.append(f"{short} of {len(good)} answers were shorter than asked")
    if not good:
        said.append("no request was answered")
    return said


def values(records: Sequence[Record], name: str) -> list[float]:
    """All values of that latency."""
    return [value for record in records for value in LATENCIES[name](record)]


def summary(found: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles (linear between the values) and maximum; None without values."""
    data = numpy.asarray(found, dtype=numpy.float64)
    if not data.size:
        return None
    shares = zip(PERCENTILES, numpy.percentile(data, PERCENTILES), strict=True)
    return {"mean": float(data.mean()), **{f"p{share}": float(value) for share, value in shares}, "most": float(data.max())}


def percentile(values: Sequence[float], share: float) -> float:
    """A percentile; 0 without values."""
    return float(numpy.percentile(values, share)) if len(values) else 0.0


def _tokens_between(records: Iterable[Record], first: float, last: float) -> int:
    """Tokens that came in that time; those that no event showed are spread over their answer."""
    total = 0.0
    for record in records:
        seen = sum(count for moment, count in zip(record.moments, record.counts, strict=True) if first <= moment <= last)
        total += seen * (1 + record.uncounted / sum(record.counts))
    return round(total)


def _by_second(records: Iterable[Record], first: float, last: float) -> list[int]:
    """Tokens that came in each whole second."""
    found = [0] * int(last - first)
    for record in records:
        for moment, count in zip(record.moments, record.counts, strict=True):
            second = math.floor(moment - first)
            if 0 <= second < len(found):
                found[second] += count
    return found


def _curve(data: Sequence[float]) -> list[float]:
    """Percentiles 0 to 100."""
    return [float(value) for value in numpy.percentile(data, range(101))] if data else []


def _in_flight(records: Iterable[Record], first: float, last: float) -> float:
    """The average number of requests in flight, including those that wait to be sent."""
    spans = (min(record.ended or last, last) - max(record.intended, first) for record in records)
    return sum(span for span in spans if span > 0) / max(last - first, 1e-9)


def _row(record: Record, began: float) -> Figures:
    """One request, in brief."""
    row: Figures = {"at": round(record.intended - began, 6), "late": round(record.late, 6) if record.sent else None}
    if record.error:
        return row | {"error": record.error}
    spent = {"ttft": round(record.ttft, 6), "e2e": round(record.e2e, 6)}
    return row | spent | {"prompt_tokens": record.prompt_tokens, "output_tokens": record.tokens}


def _text(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
