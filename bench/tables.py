"""Terminal output: a progress line while a stage runs, and tables of figures at the end."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .client import CLOCK, Client
from .figures import Figures, load_title, percentile
from .load import Extent, Stage

REFRESH = 0.25  # seconds
RECENT = 50  # latest requests, whose time to the first token is shown


async def watch(console: Console, stage: Stage, client: Client, extent: Extent, position: str) -> None:
    """Shows a stage's progress until it is cancelled. Does nothing without a terminal."""
    if not console.is_terminal:
        return
    began, before, moment = CLOCK(), client.tokens, CLOCK()
    speed = 0.0
    with Live(console=console, auto_refresh=False, transient=True) as live, suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(REFRESH)
            now, tokens = CLOCK(), client.tokens
            speed = 0.7 * speed + 0.3 * (tokens - before) / (now - moment)
            before, moment = tokens, now
            live.update(_line(stage, client, extent, position, now - began, speed), refresh=True)


def _line(stage: Stage, client: Client, extent: Extent, position: str, elapsed: float, speed: float) -> Text:
    ended = [record for record in stage.records if record.ended]
    recent = [record.ttft for record in ended[-RECENT:] if record.moments]
    answered = sum(bool(record.ended) for record in stage.counted)
    done = elapsed / (extent.seconds + extent.warm_seconds) if extent.seconds else answered / extent.requests
    blocks = round(20 * min(done, 1.0))
    failed = sum(bool(record.error) for record in ended)
    line = Text(f"{position} {load_title({stage.kind: stage.value})} ", style="bold")
    line.append("█" * blocks + "░" * (20 - blocks), style="cyan")
    line.append(f"  {elapsed:.0f} s  sent {len(stage.records)}  running {client.running}  answered {len(ended) - failed}")
    line.append(f"  failed {failed}", style="red" if failed else "")
    line.append(f"  {speed:,.0f} tokens/s")
    if recent:
        line.append(f"  first token {milliseconds(percentile(recent, 50))} ms")
    return line


def overview(stages: Sequence[Figures]) -> Table:
    """A table with a column for each stage, since there are more figures than stages."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    kind = "rate" if "rate" in stages[0] else "concurrency"
    table.add_column("requests a second" if kind == "rate" else "at once")
    for found in stages:
        table.add_column(f"{found[kind]:g}{', in part' if found['partial'] else ''}", justify="right")
    columns = [_column(found) for found in stages]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _column(found: Figures) -> dict[str, str]:
    """A stage's figures by name."""
    requests = found["requests"]
    cells = {"answered": str(requests["answered"]), "failed": str(requests["failed"])}
    cells |= {"requests/s": f"{found['requests_per_second']:.2f}", "tokens/s": f"{found['output_tokens_per_second']:,.0f}"}
    cells["in flight"] = f"{found['in_flight']:.1f}"
    for name, shares in (("ttft", (50, 95, 99)), ("itl", (50, 95, 99)), ("tpot", (50,)), ("e2e", (50, 95, 99))):
        for share in shares:
            cells[f"{name} p{share}, ms"] = milliseconds(found[name][f"p{share}"]) if found[name] else "-"
    if "goodput" in found:
        cells |= {"good": f"{found['goodput']['share']:.1%}", "good/s": f"{found['goodput']['requests_per_second']:.2f}"}
    return cells


def remarks(stages: Sequence[Figures]) -> list[str]:
    """Errors and warnings, by stage."""
    lines = []
    for found in stages:
        name = load_title(found)
        lines += [f"{name}: {count} x {kind}: {found['error_examples'][kind]}" for kind, count in found["errors"].items()]
        lines += [f"{name}: {warning}" for warning in found["warnings"]]
    return lines


def milliseconds(seconds: float) -> str:
    """Seconds in milliseconds, with about three digits."""
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
