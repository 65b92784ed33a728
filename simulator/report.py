"""Shows measures as a table and as a plot. The plot needs matplotlib, which nothing else does."""

import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .measures import ALL, PERCENTILES, Measures, Service, Values

POINTS = 130  # of a line in a plot


class Missing(Exception):
    """matplotlib is not installed."""


def table(measures: Measures) -> str:
    """The measures as human-readable text."""
    samples, seconds = measures.samples, measures.seconds or 1.0
    left_out = [
        f"{count} {why}"
        for count, why in ((measures.impossible, "could never fit"), (measures.refused, "refused: too many in flight"))
        if count
    ]
    lines = [
        f"{measures.finished} requests in {measures.seconds:.1f} s" + "".join(f", {text}" for text in left_out),
        f"  output tokens   {measures.output_tokens} ({measures.output_tokens / seconds:.0f} a second)",
        f"  prompt tokens   {measures.prompt_tokens} computed ({measures.restored_tokens} of them again), "
        f"{measures.cached_tokens} found in the cache",
        f"  steps           {measures.steps}, the shards busy {measures.busy / seconds:.0%} of the time",
        f"  pauses          {measures.pauses}",
        f"  pages held      {measures.mean(samples.held):.0%} on average, {max(samples.held, default=0):.0%} at most; "
        f"{measures.mean(samples.cached):.0%} cached",
        f"  running         {measures.mean(samples.running):.1f} on average, {max(samples.running, default=0):.0f} at most",
        f"  waiting         {measures.mean(samples.waiting):.1f} on average, {max(samples.waiting, default=0):.0f} at most",
        "",
        f"{'milliseconds':26}" + "".join(f"{name:>10}" for name in names()) + f"{'mean':>10}",
    ]
    services = measures.services
    shown = [ALL, *sorted(name for name in services if name != ALL)] if len(services) > 2 else [ALL]
    for name in shown:
        lines += _service("" if name == ALL else name, services[name], seconds)
    real = measures.real_seconds or 1e-9
    lines += ["", f"simulated in {measures.real_seconds:.2f} s: {measures.finished / real:.0f} requests a second"]
    return "\n".join(lines)


def names() -> list[str]:
    """Names of the percentiles."""
    return [f"p{share * 100:g}" if share < 1 else "most" for share in PERCENTILES]


def _service(name: str, service: Service, seconds: float) -> list[str]:
    rows = [
        ("to the first token", service.ttft),
        ("between tokens", service.itl),
        ("in the queue", service.queue),
        ("to the end", service.whole),
    ]
    head = [f"{name}: {service.finished} requests"] if name else []
    lines = head + [_row(text, values) for text, values in rows]
    good = service.good / max(service.finished, 1)
    return [*lines, f"{'  within the goals':26}{good:>10.1%}   {service.good / seconds:.2f} requests a second"]


def _row(text: str, values: Values) -> str:
    cells = [*values.percentiles(), values.mean]
    return f"{'  ' + text:26}" + "".join(f"{value * 1e3:10.1f}" for value in cells)


def plotter() -> Any:
    """The module that plots. Raises Missing."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        raise Missing("--plot needs matplotlib, which is not installed: pip install -e '.[bench]' in the checkout") from None
    matplotlib.use("svg")
    # Text as text, and no timestamps in the file: small, and identical for the same numbers.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "penstock", "path.simplify_threshold": 1.0})
    return importlib.import_module("matplotlib.pyplot")


def plot(runs: Mapping[str, Measures], path: Path, title: str = "") -> None:
    """Four plots, each with one line per run: how long clients wait, and the state of the server meanwhile."""
    pyplot = plotter()
    figure, ((first, between), (held, waiting)) = pyplot.subplots(2, 2, figsize=(10, 6.5), layout="constrained")
    for name, measures in runs.items():
        samples = measures.samples
        first.plot(*_distribution(measures.services[ALL].ttft), label=name)
        between.plot(*_distribution(measures.services[ALL].itl), label=name)
        held.plot(thin(samples.seconds), thin(samples.held), linewidth=1)
        waiting.plot(thin(samples.seconds), thin(samples.waiting), linewidth=1)
    for axes, label in ((first, "to the first token"), (between, "between tokens")):
        axes.set(xscale="log", xlabel=f"milliseconds {label}", ylabel="share", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    held.set(xlabel="seconds", ylabel="pages held", ylim=(0, 1.02))
    waiting.set(xlabel="seconds", ylabel="requests that wait", ylim=(0, None))
    if len(runs) > 1:
        between.legend(fontsize="small", loc="lower right")
    if title:
        figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    if path.suffix == ".svg":
        path.write_text(re.sub(r"(\d\.\d)\d+", r"\1", path.read_text(encoding="utf-8")), encoding="utf-8")  # a tenth of a point


def _distribution(values: Values) -> tuple[list[float], list[float]]:
    shares = tuple(i / POINTS for i in range(1, POINTS + 1))
    return [value * 1e3 for value in values.percentiles(shares)], list(shares)


def thin(values: Sequence[float]) -> list[float]:
    """Few enough points for a small file."""
    step = -(-len(values) // POINTS) or 1
    return list(values[::step])
