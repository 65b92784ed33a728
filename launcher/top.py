"""`penstock top`: shows the state of servers in a terminal, as a table or as JSON. Knows HTTP and the names of metrics.

Everything shown is a gauge of the last scrape, or what counters and histograms gained since one some seconds earlier.
"""

import argparse
import http.client
import json
import math
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live
from rich.table import Table

from . import option_types
from .chat import DEFAULT_URL, tame
from .command_line import Parser
from .url import connection, split

TIMEOUT = 5.0  # seconds for an answer
LARGEST = 16 << 20  # bytes of an answer
INTERVAL, WINDOW = 2.0, 10.0  # seconds between two scrapes, and that rates and latencies cover
AT_ONCE = 32  # servers that are scraped at the same time
WIDTH = 200  # of a table that goes to no terminal

PREFIX = "penstock_"
GAUGES = ("running", "waiting", "paused", "pages_total", "pages_free", "pages_cached")
COUNTERS = (
    *("generated_tokens_total", "prompt_tokens_total", "cached_prompt_tokens_total"),
    *("drafted_tokens_total", "accepted_tokens_total"),
)
HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds")
RESTARTS = "restarts_total"  # since the server began: shown unchanged
REPLICA = "replica"  # the label by which a server distinguishes its rank groups
OF_REPLICA = "replica_"  # prefix of the names of their gauges
UP = "up"  # whether a replica takes requests
WANTED = (*(PREFIX + name for name in (*GAUGES, *COUNTERS, *HISTOGRAMS, RESTARTS)), PREFIX + OF_REPLICA)

Buckets = dict[float, float]  # upper bound -> observations up to it


@dataclass(slots=True)
class MetricSums:
    """Metrics of a server, a replica or several of them, by names without penstock's prefix."""

    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, Buckets] = field(default_factory=dict)

    def add(self, other: "MetricSums") -> None:
        """Adds the other's metrics."""
        for name, value in other.values.items():
            self.values[name] = self.values.get(name, 0.0) + value
        for name, found in other.buckets.items():
            mine = self.buckets.setdefault(name, {})
            for bound, count in found.items():
                mine[bound] = mine.get(bound, 0.0) + count


@dataclass(frozen=True, slots=True)
class Scrape:
    """One scrape of a server."""

    moment: float
    state: str  # "ready", or what is the case instead
    model: str = ""
    parts: dict[str, MetricSums] = field(default_factory=dict)  # of the whole server under ""; of its replicas under their names


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures shown to people: counts, rates, seconds, and shares from 0 to 1. None where there is nothing to show."""

    running: int | None
    waiting: int | None
    paused: int | None
    tokens_per_second: float | None
    prompt_tokens_per_second: float | None
    first_token_p50: float | None
    first_token_p99: float | None
    between_tokens_p50: float | None
    between_tokens_p99: float | None
    pages_held: float | None  # share of KV pages held by requests
    pages_cached: float | None
    prefix_hits: float | None  # share of prompt tokens that were found in the prefix cache
    accepted: float | None  # share of draft tokens that were accepted
    restarts: int | None


@dataclass(frozen=True, slots=True)
class Row:
    """What is shown of a server."""

    url: str
    state: str
    model: str
    parts: dict[str, MetricSums]  # as in a Scrape, but counters are per second, over the window


def parse(text: str) -> dict[str, MetricSums]:
    """The wanted metrics of a Prometheus text. Raises ValueError if Prometheus could not read it."""
    lines = "\n".join(line for line in text.splitlines() if line.startswith(WANTED))
    parts: dict[str, MetricSums] = {}
    for family in text_string_to_metric_families(lines + "\n"):
        for sample in family.samples:
            if not math.isfinite(sample.value):  # allowed there, and no count
                raise ValueError(f"{sample.name} is {sample.value}")
            name = sample.name.removeprefix(PREFIX).removeprefix(OF_REPLICA)
            sums = parts.setdefault(sample.labels.get(REPLICA, ""), MetricSums())
            base = name.removesuffix("_bucket")
            if base in HISTOGRAMS and "le" in sample.labels:
                buckets, bound = sums.buckets.setdefault(base, {}), float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
            elif name in (*GAUGES, *COUNTERS, RESTARTS, UP):
                sums.values[name] = sums.values.get(name, 0.0) + sample.value
    return whole(parts)


def whole(parts: dict[str, MetricSums]) -> dict[str, MetricSums]:
    """Completes the whole server's metrics: what only the replicas have is their sum."""
    total = parts.setdefault("", MetricSums())
    together = MetricSums()
    for name, sums in parts.items():
        if name:
            together.add(sums)
    total.values = {**together.values, **total.values}
    total.buckets = {**together.buckets, **total.buckets}
    return parts


def since(before: MetricSums | None, after: MetricSums, seconds: float) -> MetricSums:
    """The metrics between two scrapes: gauges as they are, counters per second, buckets by growth. What shrank was reset, and
    counts from 0."""
    if before is None:
        return MetricSums({name: value for name, value in after.values.items() if name not in COUNTERS})
    values = {
        name: _growth(before.values.get(name, 0.0), value) / seconds if name in COUNTERS else value
        for name, value in after.values.items()
    }
    buckets = {}
    for name, found in after.buckets.items():
        old = before.buckets.get(name, {})
        anew = any(count < old.get(bound, 0.0) for bound, count in found.items())
        buckets[name] = {bound: count - (0.0 if anew else old.get(bound, 0.0)) for bound, count in found.items()}
    return MetricSums(values, buckets)


def _growth(before: float, after: float) -> float:
    return after - before if after >= before else after


def quantile(share: float, buckets: Buckets) -> float | None:
    """A quantile as PromQL's histogram_quantile computes it: linear within a bucket; beyond the last bound, that bound. None
    without data."""
    bounds = sorted(buckets)
    rank = share * buckets[bounds[-1]] if bounds else 0.0
    if not rank:
        return None
    lower, below = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= rank:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (rank - below) / (buckets[bound] - below)
        lower, below = bound, buckets[bound]
    return lower


def figures(sums: MetricSums) -> Figures:
    """The figures of metrics that are as in a Row."""

    def value(name: str) -> int | None:
        return int(sums.values[name]) if name in sums.values else None

    def share(part: str, *names: str) -> float | None:
        every = sum(sums.values.get(name, 0.0) for name in names)
        return sums.values[part] / every if every and part in sums.values else None

    def held() -> float | None:
        total = sums.values.get("pages_total")
        return 1 - sums.values.get("pages_free", 0.0) / total if total else None

    def spread(name: str, part: float) -> float | None:
        return quantile(part, sums.buckets.get(name, {}))

    first, between = HISTOGRAMS
    return Figures(
        running=value("running"),
        waiting=value("waiting"),
        paused=value("paused"),
        tokens_per_second=sums.values.get("generated_tokens_total"),
        prompt_tokens_per_second=sums.values.get("prompt_tokens_total"),
        first_token_p50=spread(first, 0.5),
        first_token_p99=spread(first, 0.99),
        between_tokens_p50=spread(between, 0.5),
        between_tokens_p99=spread(between, 0.99),
        pages_held=held(),
        pages_cached=share("pages_cached", "pages_total"),
        prefix_hits=share("cached_prompt_tokens_total", "cached_prompt_tokens_total", "prompt_tokens_total"),
        accepted=share("accepted_tokens_total", "drafted_tokens_total"),
        restarts=value(RESTARTS),
    )


class Server:
    """A server that is scraped repeatedly."""

    def __init__(self, url: str, api_key: str, window: float) -> None:
        """Raises UsageError if `url` is not a URL."""
        self._parts = split(url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._window = window
        self._scrapes: deque[Scrape] = deque()
        self._model = ""

    def scrape(self) -> None:
        """Scrapes once more."""
        self._scrapes.append(self._scrape())
        while len(self._scrapes) > 2 and self._scrapes[1].moment <= self._scrapes[-1].moment - self._window:
            self._scrapes.popleft()

    def row(self) -> Row:
        """What the scrapes within the window show."""
        last = self._scrapes[-1]
        first = next((scrape for scrape in self._scrapes if scrape.parts), last)
        before = first.parts if first is not last else {}
        seconds = last.moment - first.moment
        return Row(
            self._parts.geturl(),
            last.state,
            last.model,
            {name: since(before.get(name), sums, seconds) for name, sums in last.parts.items()},
        )

    def _scrape(self) -> Scrape:
        moment = time.monotonic()
        try:
            state = self._state()
            status, text = self._get("/metrics")
            if status != 200:
                return Scrape(moment, "wants a key" if status in (401, 403) else f"/metrics: {status}")
            if not self._model:
                status, answer = self._get("/info")
                self._model = str(_object(answer).get("model_id", "")) if status == 200 else ""
            parts = parse(text)
            if state == "ready" and not parts[""].values:  # some servers answer 200 to anything
                return Scrape(moment, "no penstock: its metrics are not there")
            return Scrape(moment, state, self._model, parts)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._model = ""
            return Scrape(moment, f"no answer: {getattr(error, 'strerror', None) or error or type(error).__name__}")

    def _state(self) -> str:
        status, text = self._get("/health/ready")
        return "ready" if status == 200 else str(_object(text).get("stage") or f"not ready: {status}")

    def _get(self, route: str) -> tuple[int, str]:
        with closing(connection(self._parts, TIMEOUT)) as connected:
            connected.request("GET", self._parts.path + route, headers=self._headers)
            answer = connected.getresponse()
            return answer.status, answer.read(LARGEST).decode(errors="replace")


def _object(text: str) -> dict[str, Any]:
    """A JSON object; {} if the text is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def together(rows: Iterable[Row]) -> Figures:
    """The figures of all servers together. In latencies, all observations count alike."""
    total = MetricSums()
    for row in rows:
        total.add(row.parts.get("", MetricSums()))
    return figures(total)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Everything that the table shows."""
    servers = [
        {
            **{"url": row.url, "state": row.state, "model": row.model},
            "figures": asdict(figures(row.parts.get("", MetricSums()))),
            "replicas": {name: {"ready": _up(sums), **asdict(figures(sums))} for name, sums in _replicas(row)},
        }
        for row in rows
    ]
    return {"servers": servers, "all": asdict(together(rows))}


def _replicas(row: Row) -> list[tuple[str, MetricSums]]:
    return sorted(((name, sums) for name, sums in row.parts.items() if name), key=lambda item: (len(item[0]), item[0]))


def _up(replica: MetricSums) -> bool:
    return replica.values.get(UP) != 0.0


@dataclass(frozen=True, slots=True)
class Column:
    """A column of figures."""

    title: str
    least: int  # width of a terminal that has room for it
    cell: Callable[[Figures], str]


COLUMNS = (
    Column("requests\nrun/wait/pause", 0, lambda shown: " / ".join(map(_count, (shown.running, shown.waiting, shown.paused)))),
    Column("tokens/s", 50, lambda shown: _whole(shown.tokens_per_second)),
    Column("prompt\ntokens/s", 110, lambda shown: _whole(shown.prompt_tokens_per_second)),
    Column("first token\nms", 62, lambda shown: _pair(shown.first_token_p50, shown.first_token_p99)),
    Column("between\ntokens ms", 76, lambda shown: _pair(shown.between_tokens_p50, shown.between_tokens_p99)),
    Column("pages held\n+ cached", 90, lambda shown: _pages(shown.pages_held, shown.pages_cached)),
    Column("prefix\nhits", 120, lambda shown: _share(shown.prefix_hits)),
    Column("drafts\naccepted", 130, lambda shown: _share(shown.accepted)),
    Column("restarts", 120, lambda shown: _whole(shown.restarts)),
)
MODEL = 150  # least width for the column of the model's name


def table(rows: Sequence[Row], width: int = WIDTH) -> Table:
    """A row for each server, each of its replicas if it has several, and all servers together."""
    found = Table(box=None, header_style="bold", pad_edge=False)
    found.add_column("server", no_wrap=True, overflow="fold")
    for title in ["model"] * (width >= MODEL) + ["state"]:
        found.add_column(title, min_width=5, max_width=None if width >= WIDTH else 30)
    columns = [column for column in COLUMNS if width >= column.least]
    for column in columns:
        found.add_column(column.title, justify="right", no_wrap=True)

    def add(name: str, model: str, state: str, shown: Figures | None, style: str = "") -> None:
        cells = [column.cell(shown) for column in columns] if shown else []
        names = [name, *[model] * (width >= MODEL), state]
        found.add_row(*(_clean(text) for text in names), *cells, style=style)

    for row in rows:
        add(row.url.removeprefix("http://"), row.model, row.state, figures(row.parts[""]) if row.parts else None)
        replicas = _replicas(row)
        for name, sums in replicas if len(replicas) > 1 else ():
            add(f"  replica {name}", "", "ready" if _up(sums) else "not ready", figures(sums))
    if len(rows) > 1:
        add("all", "", "", together(rows), "bold")
    return found


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _pages(held: float | None, cached: float | None) -> str:
    return _share(held) + ("" if cached is None else f" + {_share(cached)}")


def _pair(median: float | None, slow: float | None) -> str:
    """A latency's median and 99th percentile, in milliseconds."""
    return "-" if median is None or slow is None else f"{median * 1e3:,.0f} / {slow * 1e3:,.0f}"


def _clean(text: str) -> str:
    """A server's text without characters that could control the terminal or be taken for markup."""
    return tame(text).replace("[", r"\[")


def make_parser() -> argparse.ArgumentParser:
    """The parser of all flags."""
    parser = Parser(
        prog="penstock top",
        usage="penstock top [URL ...] [FLAG ...]",
        description="Shows what servers do right now: gauges as they are, rates and latencies of the last seconds (--window).",
        epilog="Latencies are medians / 99th percentiles of the window. Ctrl-C ends it; where stdout is no terminal it tells once.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("urls", nargs="*", metavar="URL", help=f"of servers (default {DEFAULT_URL})")
    add("--api-key", default="", help="(default: API_KEY or OPENAI_API_KEY of the environment)")
    add("--interval", type=_positive, default=INTERVAL, metavar="X", help=f"seconds between two looks (default {INTERVAL:g})")
    add(
        "--window", type=_positive, default=WINDOW, metavar="X", help=f"seconds that rates and latencies cover (default {WINDOW:g})"
    )
    add("--once", action="store_true", help="tell once, after two looks; exit code 1 if a server is not ready")
    add("--json", action="store_true", help="a line of JSON for each look")
    return parser


def _positive(text: str) -> float:
    try:
        return option_types.positive(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def main(arguments: Sequence[str], key: Callable[[str], str] = str) -> int:
    """Runs the command. key: the API key to send, given the value of `--api-key`. Returns the exit code."""
    options = make_parser().parse_args(arguments)
    shown = key(options.api_key)
    servers = [Server(url, shown, options.window) for url in options.urls or [DEFAULT_URL]]
    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else WIDTH, highlight=False)
    once = options.once or not (terminal or options.json)
    if not once:  # Ctrl-C ends it, also where a script has started it with `&`, which has the signal ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # `timeout 10 penstock top`: the screen is restored
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            scrapes = _scrapes(servers, pool, options.interval)
            if once:
                return _tell(console, next(scrapes), options.json)
            if options.json:
                for rows in scrapes:
                    print(json.dumps(as_json(rows)), flush=True)
            with Live(console=console, screen=True, auto_refresh=False) as live:
                for rows in scrapes:
                    live.update(table(rows, console.width), refresh=True)
    except KeyboardInterrupt:
        pass
    return 0


def _scrapes(servers: Sequence[Server], pool: ThreadPoolExecutor, interval: float) -> Iterator[list[Row]]:
    """Every server's row, again and again; the first time after two scrapes."""
    turn = time.monotonic()
    list(pool.map(Server.scrape, servers))
    while True:
        turn = max(turn + interval, time.monotonic())
        time.sleep(max(0.0, turn - time.monotonic()))
        list(pool.map(Server.scrape, servers))
        yield [server.row() for server in servers]


def _tell(console: Console, rows: Sequence[Row], as_text: bool) -> int:
    if as_text:
        print(json.dumps(as_json(rows)))
    else:
        console.print(table(rows, console.width))
    return int(any(row.state != "ready" for row in rows))
