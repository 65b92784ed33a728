"""Results of `gpu.py`: lines with a ratio, a goal and a verdict; as a table, as JSON, as Markdown. Knows no device."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

MET, MISSED, WRONG, UNMEASURED = "met", "missed", "WRONG", "not measured"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call, over several repetitions."""

    seconds: float  # the median
    low: float  # 10th percentile
    high: float  # 90th percentile
    count: int
    way: str  # "graph": launched from a CUDA graph; "eager": one by one, launches included; "wall": by the wall clock


def timing(samples: Sequence[float], way: str) -> Timing:
    """Summary of all repetitions, at least one."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Timing(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered), way)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One measurement. Without a ratio: for orientation only, or not measured, as the note says."""

    section: str
    what: str
    timing: Timing | None = None
    value: float = math.nan  # in `unit`
    unit: str = ""
    ratio: float | None = None
    against: str = ""  # what the ratio is relative to
    goal: float | None = None
    most: bool = False  # the ratio should be at most the goal; else at least
    check: bool = False  # of a result's correctness, not of speed: if it misses its goal something is wrong
    note: str = ""

    @property
    def verdict(self) -> str:
        """Whether the goal is met; empty without a goal."""
        if self.goal is None:
            return ""
        if self.ratio is None:
            return UNMEASURED
        reached = self.ratio <= self.goal if self.most else self.ratio >= self.goal  # NaN meets no goal
        return MET if reached else WRONG if self.check else MISSED


def failed(section: str, what: str, why: BaseException | str, goal: float | None = None, check: bool = False) -> Line:
    """A line for what could not be measured."""
    text = why if isinstance(why, str) else f"{type(why).__name__}: {why}".strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    told = f"{lines[0]} ... {lines[-1]}" if lines[0].endswith(":") else lines[0]  # Triton's begin with a place in the code
    return Line(section=section, what=what, goal=goal, most=check, check=check, note=told[:160])


def wrong(lines: Iterable[Line]) -> list[Line]:
    """Results that were wrong, or could not be checked."""
    return [line for line in lines if line.check and line.verdict != MET]


def sum_up(lines: Sequence[Line]) -> int:
    """Prints how many goals are met, and all that is wrong. Returns the exit code."""
    verdicts = [line.verdict for line in lines]
    print("\ngoals: " + ", ".join(f"{verdicts.count(word)} {word}" for word in (MET, MISSED, UNMEASURED, WRONG)))
    found = wrong(lines)
    for line in found:
        print(f"WRONG: {line.section}: {line.what} {'' if line.ratio is None else line.ratio} {line.note}".rstrip())
    return 1 if found else 0


def _number(value: float) -> str:
    if not math.isfinite(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def _cells(line: Line) -> list[str]:
    took = line.timing
    spread = f"{_time(took.seconds)} ({_time(took.low)}..{_time(took.high)}, {took.count})" if took else ""
    bound = "" if line.goal is None else f"{'<=' if line.most else '>='} {line.goal:g}"
    ratio = "" if line.ratio is None else f"{line.ratio:.3f}"
    value = f"{_number(line.value)} {line.unit}".strip() if math.isfinite(line.value) else ""
    note = f"{took.way}; {line.note}".strip("; ") if took and took.way == "eager" else line.note
    return [line.what, spread, value, ratio, line.against, bound, line.verdict, note]


HEADS = ["what", "median (10 %..90 %, repetitions)", "value", "ratio", "to", "goal", "verdict", "note"]


def table(lines: Sequence[Line]) -> str:
    """As text, section by section."""
    rows = [_cells(line) for line in lines]
    widths = [max(len(HEADS[i]), *(len(row[i]) for row in rows)) if rows else len(HEADS[i]) for i in range(len(HEADS) - 1)]
    parts, section = [], ""
    for line, row in zip(lines, rows, strict=True):
        if line.section != section:
            section = line.section
            parts += ["", section, _padded(HEADS, widths)]
        parts.append(_padded(row, widths))
    return "\n".join(parts)


def _padded(row: Sequence[str], widths: Sequence[int]) -> str:
    return ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[-1]).rstrip()


ROOM = 10_000  # characters: of a remote machine's output often only the last 12,000 are visible


def digest(lines: Sequence[Line], facts: Mapping[str, str], room: int = ROOM) -> str:
    """The table in few characters: missed goals first, lines without a goal last, as far as there is room. Checks of results are
    left to `sum_up`."""
    parts, measured = [], [line for line in lines if not line.check]
    for verdict in (MISSED, UNMEASURED, MET, ""):
        section = ""
        for line in (line for line in measured if line.verdict == verdict):
            if line.section != section:
                section = line.section
                parts.append(f"{verdict or 'no goal'}, {section}:")
            parts.append(f"  {_short(line)}")
    head = ", ".join(f"{name} {value}" for name, value in facts.items())
    room -= len(head) + 40  # for the line about those left out
    kept = sum(end <= room for end in accumulate(len(part) + 1 for part in parts))
    left = [f"  and {len(parts) - kept} lines more, in the table"] if kept < len(parts) else []
    return "\n".join([head, *parts[:kept], *left])


def _short(line: Line) -> str:
    what, _, value, ratio, against, bound, _, note = _cells(line)
    took = _time(line.timing.seconds) if line.timing else ""
    return f"{what}: " + " ".join(filter(None, [took, value, ratio, against, bound, note[:60]]))


def markdown(lines: Sequence[Line], title: str) -> str:
    """A section for docs/performance.md."""
    parts = [f"## {title}", ""]
    section = ""
    for line in lines:
        if line.section != section:
            section = line.section
            parts += ["", f"### {section}", "", f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
        parts.append(f"| {' | '.join(cell.replace('|', '/') for cell in _cells(line))} |")
    return "\n".join(parts) + "\n"


def save(path: Path, lines: Sequence[Line], facts: dict[str, Any]) -> None:
    """Everything, as JSON; NaN and infinity become null."""
    found = [{**asdict(line), "verdict": line.verdict} for line in lines]
    path.write_text(json.dumps(_finite({"facts": facts, "lines": found}), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
