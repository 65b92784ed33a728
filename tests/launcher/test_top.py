"""Watching servers: from the text of /metrics to figures, and the command with servers that are locked, gone, or played."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from penstock.launcher import top
from penstock.launcher.machine import free_port
from penstock.launcher.mistake import Mistake
from penstock.launcher.top import MetricSums, Row
from penstock.router.metrics import REPLICA_GAUGES, Metrics

INF = float("inf")
FIRST, BETWEEN = top.HISTOGRAMS


def text(**values: float) -> str:
    """As a server would show it, with a histogram of first tokens."""
    lines = [f"penstock_{name} {value}" for name, value in values.items()]
    return "\n".join(["# HELP penstock_running Requests", *lines, "python_info 1.0", 'tgi_request_failure{err="x"} 2.0', ""])


def histogram(name: str, *counts: float) -> str:
    bounds = ["0.1", "0.2", "+Inf"]
    return "".join(f'penstock_{name}_bucket{{le="{bound}"}} {count}\n' for bound, count in zip(bounds, counts, strict=True))


def test_every_name_is_one_that_a_server_exports() -> None:
    metrics = Metrics("model")
    for name in REPLICA_GAUGES.values():
        metrics.watch(name[0], lambda: 1.0, "0")
    parts = top.parse(metrics.render().decode())
    found = parts[""]
    assert {*top.GAUGES, *top.COUNTERS, top.RESTARTS} <= set(found.values)
    assert set(parts["0"].values) == {top.UP, "running", "waiting", "pages_total", "pages_free"}
    assert set(found.buckets) == set(top.HISTOGRAMS)
    assert all(INF in buckets for buckets in found.buckets.values())


def test_only_what_is_wanted_is_read() -> None:
    found = top.parse(text(running=3, pages_total=10, pages_held=6) + histogram(FIRST, 1, 2, 3))[""]
    assert found == MetricSums({"running": 3, "pages_total": 10}, {FIRST: {0.1: 1, 0.2: 2, INF: 3}})
    with pytest.raises(ValueError, match="could not convert"):
        top.parse("penstock_running three\n")


def test_a_server_shows_what_its_replicas_do() -> None:
    lines = [f'penstock_replica_running{{replica="{name}"}} {count}' for name, count in (("0", 2), ("1", 5), ("10", 1))]
    parts = top.parse("\n".join([*lines, "penstock_generated_tokens_total 7", ""]))
    assert {name: sums.values["running"] for name, sums in parts.items()} == {"0": 2, "1": 5, "10": 1, "": 8}
    assert parts[""].values["generated_tokens_total"] == 7


def test_what_was_gained() -> None:
    before = MetricSums({"running": 9, "generated_tokens_total": 100, "restarts_total": 1}, {FIRST: {0.1: 10, INF: 20}})
    after = MetricSums({"running": 4, "generated_tokens_total": 160, "restarts_total": 2}, {FIRST: {0.1: 13, INF: 24}})
    expected = MetricSums({"running": 4, "generated_tokens_total": 30, "restarts_total": 2}, {FIRST: {0.1: 3, INF: 4}})
    assert top.since(before, after, 2.0) == expected
    assert top.since(None, after, 0.0) == MetricSums({"running": 4, "restarts_total": 2})


def test_a_server_that_began_anew_has_gained_all_it_shows() -> None:
    before = MetricSums({"generated_tokens_total": 100}, {FIRST: {0.1: 10, INF: 20}})
    after = MetricSums({"generated_tokens_total": 60}, {FIRST: {0.1: 12, INF: 13}})
    assert top.since(before, after, 2.0) == MetricSums({"generated_tokens_total": 30}, {FIRST: {0.1: 12, INF: 13}})


@pytest.mark.parametrize(
    ("share", "buckets", "expected"),
    [
        (0.5, {0.1: 4, 0.2: 8, INF: 8}, 0.1),
        (0.75, {0.1: 4, 0.2: 8, INF: 8}, 0.15),  # halfway through the second
        (0.25, {0.1: 4, 0.2: 8, INF: 8}, 0.05),
        (0.99, {0.1: 4, 0.2: 8, INF: 100}, 0.2),  # beyond the last bound
        (0.5, {0.1: 0, 0.2: 0, INF: 0}, None),
        (0.5, {}, None),
        (0.5, {0.1: 0, 0.2: 5, INF: 5}, 0.15),
    ],
)
def test_quantiles(share: float, buckets: dict[float, float], expected: float | None) -> None:
    assert top.quantile(share, buckets) == (None if expected is None else pytest.approx(expected))


def test_figures() -> None:
    values = {"running": 3, "pages_total": 200, "pages_free": 150, "pages_cached": 100, "restarts_total": 1}
    values |= {"generated_tokens_total": 80, "cached_prompt_tokens_total": 30, "prompt_tokens_total": 10}
    values |= {"drafted_tokens_total": 40, "accepted_tokens_total": 10}
    found = top.figures(MetricSums(values, {BETWEEN: {0.1: 4, 0.2: 8, INF: 8}}))
    told = {name: value for name, value in asdict(found).items() if value is not None}
    assert told == {
        **{"running": 3, "restarts": 1, "tokens_per_second": 80, "prompt_tokens_per_second": 10},
        **{"pages_held": 0.25, "pages_cached": 0.5, "prefix_hits": 0.75, "accepted": 0.25},
        **{"between_tokens_p50": pytest.approx(0.1), "between_tokens_p99": pytest.approx(0.198)},
    }


def row(url: str, state: str = "ready", **parts: MetricSums) -> Row:
    return Row(url, state, "a [model]", {name.removeprefix("whole"): sums for name, sums in parts.items()})


def test_servers_together() -> None:
    one, other = MetricSums({"running": 1}, {FIRST: {0.1: 1, INF: 1}}), MetricSums({"running": 2}, {FIRST: {0.1: 0, INF: 1}})
    found = top.together([row("a", whole=one), row("b", whole=other), row("c", "no answer")])
    assert found.running == 3
    assert found.first_token_p50 == pytest.approx(0.1)


def shown(rows: list[Row], width: int = 200) -> list[list[str]]:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(top.table(rows, width))
    return [line.split() for line in capture.get().splitlines()[2:]]


def test_the_table() -> None:
    replicas = {"0": MetricSums({"running": 1, "up": 1}), "1": MetricSums({"running": 2, "up": 0})}
    lines = shown([row("http://a", whole=MetricSums({"running": 3}), **replicas), row("b", "\x1b[31mred", whole=MetricSums())])
    assert [line[0] for line in lines] == ["a", "replica", "replica", "b", "all"]
    assert lines[0][1:5] == ["a", "[model]", "ready", "3"]
    assert lines[1][:4] == ["replica", "0", "ready", "1"]
    assert lines[2][:5] == ["replica", "1", "not", "ready", "2"]
    assert lines[3][1:4] == ["a", "[model]", "[31mred"]  # what would have been a colour
    assert len(shown([row("a", whole=MetricSums(), **{"0": MetricSums()})])) == 1  # a single replica says nothing new


def test_a_reason_is_whole_where_there_is_room() -> None:
    [line] = shown([row("a", "no answer: Name or service not known")])
    assert " ".join(line) == "a a [model] no answer: Name or service not known"


@pytest.mark.parametrize(("width", "columns"), [(80, 4), (100, 5), (120, 8), (140, 9)])
def test_a_narrow_terminal_has_the_more_important_columns(width: int, columns: int) -> None:
    busy = MetricSums({"running": 128, "waiting": 99, "paused": 12, "generated_tokens_total": 12345, "prompt_tokens_total": 12345})
    busy.buckets = {name: {0.1: 4, 9.9: 8, INF: 8} for name in top.HISTOGRAMS}
    busy.values |= {"pages_total": 10, "pages_free": 1, "pages_cached": 10, "restarts_total": 3}
    [line] = shown([Row("http://10.0.0.123:3000", "ready", "model", {"": busy})], width)
    text = " ".join(line).replace(" / ", "/").replace(" + ", "+")
    assert "…" not in text
    assert text.split()[:5] == ["10.0.0.123:3000", "ready", "128/99/12", "12,345", *["12,345" if width >= 110 else "100/9,704"]]
    assert len(text.split()) == 2 + columns


class Handler(BaseHTTPRequestHandler):
    """Plays a server: each look finds 10 tokens more. Below /other it is one of another kind."""

    tokens = 0

    def do_GET(self) -> None:
        if self.path.startswith("/other"):
            self.answer(200, "<html>Welcome</html>")
        elif self.headers["Authorization"] != "Bearer secret":
            self.answer(401, "{}")
        elif self.path == "/metrics":
            Handler.tokens += 10
            self.answer(200, text(running=1, generated_tokens_total=Handler.tokens))
        elif self.path == "/info":
            self.answer(200, '{"model_id": "played"}')
        else:
            self.answer(503, '{"stage": "loading weights: 50 %", "progress": 0.5}')

    def answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def played() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join(10)


def told(url: str, key: str = "secret") -> Any:
    server = top.Server(url, key, 10.0)
    server.scrape()
    server.scrape()
    return server.row()


def test_a_look(played: str) -> None:
    found = told(played)
    assert (found.state, found.model) == ("loading weights: 50 %", "played")
    assert found.parts[""].values["running"] == 1
    assert found.parts[""].values["generated_tokens_total"] > 10
    assert told(played, "wrong").state == "wants a key"
    assert told(f"localhost:{free_port()}").state == "no answer: Connection refused"
    assert told(played.replace("/v1", "/other")).state == "no penstock: its metrics are not there"


def test_the_window_moves(played: str) -> None:
    server = top.Server(played, "secret", 0.0)
    for _ in range(3):
        server.scrape()
    assert len(server._scrapes) == 2


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.launcher", "top", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin", **environment})


def test_the_command_tells_once(played: str) -> None:
    """Where stdout is no terminal, too. The key comes from the environment."""
    nobody = f"127.0.0.1:{free_port()}"
    answer = run(played, nobody, "--interval", "0.1", API_KEY="secret")
    assert answer.returncode == 1  # one is loading, nobody is the other
    assert "loading weights: 50 %" in answer.stdout
    assert "no answer: Connection refused" in answer.stdout
    answer = run(played, "--once", "--json", "--interval", "0.1", "--api-key", "secret")
    [line] = answer.stdout.splitlines()
    [server] = json.loads(line)["servers"]
    assert server["model"] == "played"
    assert 0 < server["figures"]["tokens_per_second"] < 200
    assert json.loads(line)["all"]["running"] == 1


def test_in_a_terminal_it_goes_on_until_ctrl_c(played: str) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "penstock.launcher", "top", played, "--interval", "0.1"]
    environment = {"PATH": "/usr/bin", "TERM": "xterm", "COLUMNS": "200", "API_KEY": "secret"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.STDOUT, env=environment)
    os.close(theirs)
    try:
        seen = b""
        while seen.count(b"played") < 3:
            seen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert b"Traceback" not in seen
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "host:0"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(Mistake, match="is no URL of a server: http://HOST:PORT is needed"):
        top.Server(url, "", 1.0)


def test_mistakes_are_one_line() -> None:
    answer = run("--interval", "0")
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1
    assert "0: a number of seconds above 0 is needed" in answer.stderr
