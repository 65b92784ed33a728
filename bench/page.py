"""The report as one self-contained HTML page: tables, and charts drawn as SVG. Knows the results, not how they were measured."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .figures import LATENCIES, Figures, load_title

WIDTH, HEIGHT = 540, 280  # of a chart
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 30, 44  # margins of a chart
STEPS = (1, 2, 5, 10)  # between marks on an axis, times a power of ten
DOTS = 2000  # most dots of a chart: more are thinned out

MEANINGS = (
    "ttft: to the first token, from when the request was to be sent. itl: from each token to the next, as they reached the client. "
    "tpot: its mean within a request. e2e: to the last token. Percentiles are of answered requests."
)

Points = list[tuple[float, float]]

STYLE = """
:root { --ink: #1d2733; --faint: #6b7785; --line: #d5dce4; --back: #ffffff; --panel: #f6f8fa;
        --a: #0b6bcb; --b: #d9730d; --c: #b3261e; --d: #2e7d32; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9ef; --faint: #93a1b0; --line: #35414e; --back: #12181f; --panel: #1a222b;
          --a: #62b0ff; --b: #ffb066; --c: #ff8078; --d: #7bd389; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 2rem auto; max-width: 1160px;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
.faint { color: var(--faint) }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
th { color: var(--faint); font-weight: 600 }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(340px, 1fr)); gap: 1rem; margin: 1rem 0 }
figure { margin: 0; background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .5rem }
svg { width: 100%; height: auto; display: block } svg text { font: 12px system-ui, sans-serif; fill: var(--faint) }
svg .title { font-weight: 600; fill: var(--ink) } .grid { stroke: var(--line); stroke-width: 1 }
.a { --own: var(--a) } .b { --own: var(--b) } .c { --own: var(--c) } .d { --own: var(--d) }
polyline { fill: none; stroke: var(--own); stroke-width: 2; stroke-linejoin: round } circle { fill: var(--own) }
svg text.key { fill: var(--own); font-weight: 600 }
.warning { color: var(--b) } code { font-size: 13px }
"""


@dataclass(frozen=True, slots=True)
class Series:
    """A series of a chart, drawn as a line or as dots."""

    name: str
    points: Points
    color: str  # a class of STYLE
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a chart: maps values to coordinates."""

    low: float
    high: float
    begin: float  # coordinate of `low`
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """The coordinate of a value; beyond the ends for values beyond them."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = math.log(max(value, self.low)) if self.log else value
        return self.begin + (value - low) / (high - low) * (self.end - self.begin)

    def marks(self) -> list[float]:
        """Round numbers between the ends."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            factors = STEPS[:3] if self.high / self.low < 100 else STEPS[:1]
            found = [factor * 10.0**power for power in powers for factor in factors]
        else:
            rough = (self.high - self.low) / 5
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(factor * power for factor in STEPS if factor * power >= rough * 0.999)
            found = [step * index for index in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]
        return [mark for mark in found if self.low * 0.999 <= mark <= self.high * 1.001]


def axis(values: Sequence[float], begin: float, end: float, log: bool = False) -> Axis:
    """An axis that shows all values; from zero, unless it is logarithmic."""
    if log:
        above = [value for value in values if value > 0] or [1.0]
        low, high = min(above), max(above)
        return Axis(low / 1.1, max(high, low * 2) * 1.1, begin, end, True)
    return Axis(0.0, max([*values, 0.0]) * 1.06 or 1.0, begin, end)


def chart(title: str, across: str, series: Sequence[Series], *, log: bool = False) -> str:
    """A chart. `across`: title of the horizontal axis; `log`: that axis is logarithmic."""
    shown = [one for one in series if one.points]
    if not shown:
        return ""
    horizontal = axis([x for one in shown for x, _ in one.points], LEFT, WIDTH - RIGHT, log)
    vertical = axis([y for one in shown for _, y in one.points], HEIGHT - BOTTOM, TOP)
    parts = [f'<text class="title" x="{LEFT}" y="18">{html.escape(title)}</text>']
    for mark in vertical.marks():
        y = vertical.place(mark)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(mark)}</text>')
    for mark in horizontal.marks():
        x = horizontal.place(mark)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 4}"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{number(mark)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(across)}</text>')
    parts += [_drawn(one, horizontal, vertical) for one in shown]
    parts += _keys(shown)
    inside = "".join(parts)
    return f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">{inside}</svg></figure>'


def _drawn(series: Series, horizontal: Axis, vertical: Axis) -> str:
    points = series.points[:: -(-len(series.points) // DOTS)]
    places = [(horizontal.place(x), vertical.place(y)) for x, y in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    marked = places if series.dots or len(places) <= 12 else []
    size = 1.8 if series.dots else 3
    circles = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}"/>' for x, y in marked)
    polyline = "" if series.dots else f'<polyline points="{line}"/>'
    return f'<g class="{series.color}">{polyline}{circles}</g>'


def _keys(shown: Sequence[Series]) -> list[str]:
    """Names of the series, at the top right."""
    parts, x = [], float(WIDTH - RIGHT)
    for one in reversed(shown):
        if one.name:
            parts.append(f'<g class="{one.color}"><text class="key" x="{x:.0f}" y="18" text-anchor="end">{one.name}</text></g>')
            x -= 7 * len(one.name) + 14
    return parts


def number(value: float) -> str:
    """A number in few characters."""
    if value >= 10000:
        return f"{value / 1000:g}k"
    return f"{value:.3g}" if value < 1000 else f"{value:g}"


def render(result: dict[str, Any]) -> str:
    """The whole page."""
    stages: list[Figures] = result["stages"]
    asked = result["asked"]
    given = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in asked.items() if name not in ("url", "prompt_scale"))
    parts = [
        f"<h1>Load on {html.escape(str(asked['url']))}</h1>",
        f'<p class="faint">{html.escape(result["when"])}: {html.escape(given)}</p>',
        _table(stages),
        _sweep(stages) if len(stages) > 1 else "",
        *(_stage(found) for found in stages),
        f'<p class="faint">{MEANINGS}</p>',
    ]
    title = f"penstock bench: {html.escape(str(asked['url']))}"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _name(found: Figures) -> str:
    return f"{load_title(found)}, in part" if found["partial"] else load_title(found)


def _load(found: Figures) -> float:
    return float(found["rate"] if "rate" in found else found["concurrency"])


def _table(stages: Sequence[Figures]) -> str:
    goodput = "goodput" in stages[0]
    heads = ["load", "answered", "failed", "requests/s", "tokens/s", "in flight"]
    heads += [f"{name} {share}" for name in LATENCIES for share in ("p50", "p95", "p99")]
    heads += ["good", "good/s"] if goodput else []
    rows = [[f"<th>{head}</th>" for head in heads]]
    for found in stages:
        cells = [_name(found), str(found["requests"]["answered"]), str(found["requests"]["failed"])]
        cells += [f"{found['requests_per_second']:.2f}", f"{found['output_tokens_per_second']:,.0f}", f"{found['in_flight']:.1f}"]
        for name in LATENCIES:
            cells += [f"{found[name][share] * 1e3:,.1f}" if found[name] else "-" for share in ("p50", "p95", "p99")]
        if goodput:
            cells += [f"{found['goodput']['share']:.1%}", f"{found['goodput']['requests_per_second']:.2f}"]
        rows.append([f"<td>{cell}</td>" for cell in cells])
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    objective = f"; good: {html.escape(stages[0]['goodput']['objective'])}" if goodput else ""
    return f'<div class="scroll"><table>{body}</table></div><p class="faint">Times in milliseconds{objective}.</p>'


def _sweep(stages: Sequence[Figures]) -> str:
    across = "requests a second" if "rate" in stages[0] else "requests at once"
    charts = []
    for name, title in (("ttft", "time to first token, ms"), ("itl", "between tokens, ms"), ("e2e", "whole answer, ms")):
        lines = []
        for share, color in (("p50", "a"), ("p95", "b"), ("p99", "c")):
            points = [(_load(found), found[name][share] * 1e3) for found in stages if found[name]]
            lines.append(Series(share, points, color))
        charts.append(chart(title, across, lines))
    speed = [(_load(found), found["output_tokens_per_second"]) for found in stages]
    charts.append(chart("tokens a second", across, [Series("", speed, "d")]))
    if "goodput" in stages[0]:
        asked = [Series("answered", [(_load(found), found["requests_per_second"]) for found in stages], "a")]
        good = [Series("good", [(_load(found), found["goodput"]["requests_per_second"]) for found in stages], "d")]
        charts.append(chart("requests a second", across, asked + good))
    return f'<h2>By load</h2><div class="charts">{"".join(charts)}</div>'


def _stage(found: Figures) -> str:
    curves = [
        Series(name, [(value * 1e3, share) for share, value in enumerate(found["curves"][name])], color)
        for name, color in (("ttft", "a"), ("itl", "b"), ("e2e", "d"))
    ]
    rows = found["records"]
    answered = Series("first token", [(row["at"], row["ttft"] * 1e3) for row in rows if "ttft" in row], "a", dots=True)
    failed = Series("failed", [(row["at"], 0.0) for row in rows if "error" in row], "c", dots=True)
    second = Series("", [(moment, value) for moment, value in enumerate(found["tokens_by_second"])], "d")
    charts = [
        chart("percent of values below", "milliseconds", curves, log=True),
        chart("time to first token by arrival, ms", "seconds", [answered, failed]),
        chart("tokens in each second", "seconds", [second]),
    ]
    said = [f"{count} x {kind}: {found['error_examples'][kind]}" for kind, count in found["errors"].items()] + found["warnings"]
    remarks = "".join(f'<p class="warning">{html.escape(line)}</p>' for line in said)
    return f'<h2>{_name(found)}</h2>{remarks}<div class="charts">{"".join(charts)}</div>'
