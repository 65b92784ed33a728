"""The results of `penstock bench --chaos`: what is recorded, how much memory growth is a leak, and the report."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy

from .chaos_requests import Json, difference

MATURE = 5.0  # seconds after which a process' memory use is meaningful
OLD = 60.0  # the same where shards are killed: each new one fills its caches again
GROWTH = 64 * 2**20  # bytes by which it may grow after its first minute, or after the first half of a shorter life
STEP, STEEPEST = 8 * 2**20, 2**20 / 60  # where nothing is killed: so many bytes, and so many more a second


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of a run."""

    seconds: float
    clients: int
    every: float  # seconds between the end of a recovery and the next fault, on average; 0: no faults
    seed: int
    think: float = 0.0  # seconds that a client waits before its next request, on average


@dataclass(slots=True)
class Found:
    """The results of a run."""

    answers: int = 0
    cut: int = 0  # disconnected by their clients
    wrong: list[Json] = field(default_factory=list)  # answers that differ: the request, what came, what was expected
    errors: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)  # seconds
    longest_pause: float = 0.0  # between two events of a stream
    drafted: int = 0  # draft tokens ...
    accepted: int = 0  # ... and those that were accepted
    leaks: list[str] = field(default_factory=list)
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)  # of each process, "router (12)": times and bytes

    @property
    def good(self) -> bool:
        """Whether every answer was right, and nothing is left behind."""
        return bool(self.answers) and not (self.wrong or self.errors or self.leaks)


def mature(plan: Plan) -> float:
    """Seconds that a process must have lived before its memory is judged."""
    return OLD if plan.every else MATURE


def age(samples: Sequence[tuple[float, int]]) -> float:
    """Seconds for which a process was sampled."""
    return samples[-1][0] - samples[0][0]


def settled(samples: Sequence[tuple[float, int]]) -> Sequence[tuple[float, int]]:
    """The samples without the time in which a process fills its caches: the first minute, or the first half of a shorter run."""
    warm = min(samples[0][0] + 60, (samples[0][0] + samples[-1][0]) / 2)
    return [sample for sample in samples if sample[0] >= warm]


def growth(samples: Sequence[tuple[float, int]]) -> float:
    """Bytes by which the median of the last quarter exceeds that of the first: a single sample says little."""
    sizes = [size for _, size in samples]
    part = max(1, len(sizes) // 4)
    return float(numpy.median(sizes[-part:]) - numpy.median(sizes[:part]))


def slope(samples: Sequence[tuple[float, int]]) -> float:
    """MiB a minute, by linear regression."""
    moments, sizes = numpy.array(samples, dtype=float).T
    return float(numpy.polyfit(moments, sizes, 1)[0]) * 60 / 2**20


def grown(plan: Plan, found: Found) -> list[str]:
    """Processes whose memory has grown too much, a line each."""
    lines = []
    for process, samples in found.memory.items():
        late = settled(samples)
        more, most = growth(late), GROWTH if plan.every else STEP + STEEPEST * age(late)
        if age(samples) >= mature(plan) and more > most:
            lines.append(f"memory of the {process} grew by {more / 2**20:.1f} MiB in {age(late):.0f} s once it was warm")
    return lines


def report(plan: Plan, found: Found) -> Json:
    """All results, for --json."""
    return {
        "seconds": plan.seconds,
        "clients": plan.clients,
        "seed": plan.seed,
        "answers": found.answers,
        "cut": found.cut,
        "faults": dict(found.faults),
        "recovery_seconds": found.recoveries,
        "longest_pause_seconds": found.longest_pause,
        "drafted": found.drafted,
        "accepted": found.accepted,
        "wrong": found.wrong,
        "errors": found.errors,
        "leaks": found.leaks,
        "memory": found.memory,
    }


def summary(plan: Plan, found: Found) -> list[str]:
    """All results as lines for people."""
    faults = ", ".join(f"{count} {name}" for name, count in sorted(found.faults.items())) or "none"
    lines = [
        f"faults: {faults}; recoveries: {max(found.recoveries, default=0):.1f} s at most",
        f"answers: {found.answers} of {plan.clients} clients; wrong: {len(found.wrong)}; errors: {len(found.errors)}; "
        f"cut by their clients: {found.cut}",
        f"longest pause of a stream: {found.longest_pause:.2f} s",
    ]
    if found.drafted:
        lines.append(f"drafts: {found.drafted}; accepted: {found.accepted}")
    for process, samples in found.memory.items():
        late = settled(samples)
        if age(samples) >= mature(plan):
            lines.append(
                f"memory of the {process}: {samples[0][1] / 2**20:.0f} MiB, {samples[-1][1] / 2**20:.0f} after "
                f"{age(samples):.0f} s; slope once it was warm: {slope(late):+.2f} MiB/min"
            )
    lines += [
        f"wrong: {wrong['path']} {json.dumps(wrong['body'])[:100]}: {difference(wrong['came'], wrong['expected'])}"
        for wrong in found.wrong[:5]
    ]
    lines += [f"error: {error}" for error in found.errors[:5]]
    lines.append("left behind: " + ("; ".join(found.leaks) or "no page, process, socket or file"))
    return lines
