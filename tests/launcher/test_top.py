"""`penstock top`: from the text of /metrics to figures, and the command against a fake server, with and without its API key."""

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
from penstock.launcher.errors import UsageError
from penstock.launcher.machine import free_port
from penstock.launcher.top import MetricSums, Row
from penstock.router.metrics import REPLICA_GAUGES, Metrics

INF = float("inf")
FIRST, BETWEEN = top.HISTOGRAMS


def metrics_text(**values: float) -> str:
    """The text of /metrics with these metrics, and with lines that `top` does not read."""
    lines = [f"penstock_{name} {value}" for name, value in values.items()]
    return "\n".join(["# HELP penstock_running Requests", *lines, "python_info 1.0", 'tgi_request_failure{err="x"} 2.0', ""])


def histogram(name: str, *counts: float) -> str:
    bounds = ["0.1", "0.2", "+Inf"]
    return "".join(f'penstock_{name}_bucket{{le="{bound}"}} {count}\n' for bound, count in zip(bounds, counts, strict=True))


def test_every_metric_that_top_reads_is_exported_by_the_router() -> None:
    metrics = Metrics("model")
    for name in REPLICA_GAUGES.values():
        metrics.watch(name[0], lambda: 1.0, "0")
    parts = top.parse(metrics.render().decode())
    metrics_found = parts[""]
    assert {*top.GAUGES, *top.COUNTERS, top.RESTARTS} <= set(metrics_found.values)
    assert set(parts["0"].values) == {top.UP, "running", "waiting", "pages_total", "pages_free"}
    assert set(metrics_found.buckets) == set(top.HISTOGRAMS)
    assert all(INF in buckets for buckets in metrics_found.buckets.values())


def test_parse_reads_only_the_metrics_that_are_shown() -> None:
    found = top.parse(metrics_text(running=3, pages_total=10, pages_held=6) + histogram(FIRST, 1, 2, 3))[""]
    assert found == MetricSums({"running": 3, "pages_total": 10}, {FIRST: {0.1: 1, 0.2: 2, INF: 3}})
    with pytest.raises(ValueError, match="could not convert"):
        top.parse("penstock_running three\n")


@pytest.mark.parametrize("value", ["NaN", "+Inf"])
def test_metric_that_is_no_finite_number_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="penstock_running is"):
        top.parse(f"penstock_running {value}\n")


def test_gauges_of_replicas_are_added_up_for_the_server() -> None:
    lines = [f'penstock_replica_running{{replica="{name}"}} {count}' for name, count in (("0", 2), ("1", 5), ("10", 1))]
    parts = top.parse("\n".join([*lines, "penstock_generated_tokens_total 7", ""]))
    assert {name: sums.values["running"] for name, sums in parts.items()} == {"0": 2, "1": 5, "10": 1, "": 8}
    assert parts[""].values["generated_tokens_total"] == 7


def test_counters_become_rates_and_gauges_stay() -> None:
    before = MetricSums({"running": 9, "generated_tokens_total": 100, "restarts_total": 1}, {FIRST: {0.1: 10, INF: 20}})
    after = MetricSums({"running": 4, "generated_tokens_total": 160, "restarts_total": 2}, {FIRST: {0.1: 13, INF: 24}})
    expected = MetricSums({"running": 4, "generated_tokens_total": 30, "restarts_total": 2}, {FIRST: {0.1: 3, INF: 4}})
    assert top.since(before, after, 2.0) == expected
    assert top.since(None, after, 0.0) == MetricSums({"running": 4, "restarts_total": 2})


def test_counters_that_were_reset_count_from_0() -> None:
    before = MetricSums({"generated_tokens_total": 100}, {FIRST: {0.1: 10, INF: 20}})
    after = MetricSums({"generated_tokens_total": 60}, {FIRST: {0.1: 12, INF: 13}})
    assert top.since(before, after, 2.0) == MetricSums({"generated_tokens_total": 30}, {FIRST: {0.1: 12, INF: 13}})


@pytest.mark.parametrize(
    ("share", "buckets", "expected"),
    [
        (0.5, {0.1: 4, 0.2: 8, INF: 8}, 0.1),
        (0.75, {0.1: 4, 0.2: 8, INF: 8}, 0.15),  # halfway through the second bucket
        (0.25, {0.1: 4, 0.2: 8, INF: 8}, 0.05),
        (0.99, {0.1: 4, 0.2: 8, INF: 100}, 0.2),  # beyond the last bound
        (0.5, {0.1: 0, 0.2: 0, INF: 0}, None),
        (0.5, {}, None),
        (0.5, {0.1: 0, 0.2: 5, INF: 5}, 0.15),
    ],
)
def test_quantile_interpolates_within_a_bucket(share: float, buckets: dict[float, float], expected: float | None) -> None:
    assert top.quantile(share, buckets) == (None if expected is None else pytest.approx(expected))


def test_figures_of_a_server() -> None:
    values = {"running": 3, "pages_total": 200, "pages_free": 150, "pages_cached": 100, "restarts_total": 1}
    values |= {"generated_tokens_total": 80, "cached_prompt_tokens_total": 30, "prompt_tokens_total": 10}
    values |= {"drafted_tokens_total": 40, "accepted_tokens_total": 10}
    found = top.figures(MetricSums(values, {BETWEEN: {0.1: 4, 0.2: 8, INF: 8}}))
    figures_found = {name: value for name, value in asdict(found).items() if value is not None}
    assert figures_found == {
        **{"running": 3, "restarts": 1, "tokens_per_second": 80, "prompt_tokens_per_second": 10},
        **{"pages_held": 0.25, "pages_cached": 0.5, "prefix_hits": 0.75, "accepted": 0.25},
        **{"between_tokens_p50": pytest.approx(0.1), "between_tokens_p99": pytest.approx(0.198)},
    }


def row(url: str, state: str = "ready", **parts: MetricSums) -> Row:
    return Row(url, state, "a [model]", {name.removeprefix("whole"): sums for name, sums in parts.items()})


def test_figures_of_several_servers_are_added_up() -> None:
    one, other = MetricSums({"running": 1}, {FIRST: {0.1: 1, INF: 1}}), MetricSums({"running": 2}, {FIRST: {0.1: 0, INF: 1}})
    found = top.together([row("a", whole=one), row("b", whole=other), row("c", "no answer")])
    assert found.running == 3
    assert found.first_token_p50 == pytest.approx(0.1)


def table_lines(rows: list[Row], width: int = 200) -> list[list[str]]:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(top.table(rows, width))
    return [line.split() for line in capture.get().splitlines()[2:]]


def test_table_has_servers_replicas_and_a_total() -> None:
    replicas = {"0": MetricSums({"running": 1, "up": 1}), "1": MetricSums({"running": 2, "up": 0})}
    lines = table_lines(
        [row("http://a", whole=MetricSums({"running": 3}), **replicas), row("b", "\x1b[31mred", whole=MetricSums())]
    )
    assert [line[0] for line in lines] == ["a", "replica", "replica", "b", "all"]
    assert lines[0][1:5] == ["a", "[model]", "ready", "3"]
    assert lines[1][:4] == ["replica", "0", "ready", "1"]
    assert lines[2][:5] == ["replica", "1", "not", "ready", "2"]
    assert lines[3][1:4] == ["a", "[model]", "[31mred"]  # the escape character, which would have set a colour, is removed
    assert len(table_lines([row("a", whole=MetricSums(), **{"0": MetricSums()})])) == 1  # a single replica gets no line of its own


def test_reason_is_not_shortened_in_a_wide_table() -> None:
    [line] = table_lines([row("a", "no answer: Name or service not known")])
    assert " ".join(line) == "a a [model] no answer: Name or service not known"


@pytest.mark.parametrize(("width", "columns"), [(40, 1), (50, 2), (62, 3), (76, 4), (100, 5), (120, 8), (140, 9)])
def test_narrow_table_keeps_the_most_important_columns(width: int, columns: int) -> None:
    busy = MetricSums({"running": 128, "waiting": 99, "paused": 12, "generated_tokens_total": 12345, "prompt_tokens_total": 12345})
    busy.buckets = {name: {0.1: 4, 9.9: 8, INF: 8} for name in top.HISTOGRAMS}
    busy.values |= {"pages_total": 10, "pages_free": 1, "pages_cached": 10, "restarts_total": 3}
    [line] = table_lines([Row("http://10.0.0.123:3000", "ready", "model", {"": busy})], width)
    shown = " ".join(line).replace(" / ", "/").replace(" + ", "+")
    assert "…" not in shown
    first = ["10.0.0.123:3000", "ready", "128/99/12", "12,345", *["12,345" if width >= 110 else "100/9,704"]]
    assert shown.split()[:5] == first[: 2 + columns]
    assert len(shown.split()) == 2 + columns


class FakeHandler(BaseHTTPRequestHandler):
    """A fake server that has generated 10 tokens more at each scrape. Below /other it is not a penstock server."""

    tokens = 0

    def do_GET(self) -> None:
        if self.path.startswith("/other"):
            self.answer(200, "<html>Welcome</html>")
        elif self.headers["Authorization"] != "Bearer secret":
            self.answer(401, "{}")
        elif self.path == "/metrics":
            FakeHandler.tokens += 10
            self.answer(200, metrics_text(running=1, generated_tokens_total=FakeHandler.tokens))
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
def fake_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join(10)


def row_after_two_scrapes(url: str, key: str = "secret") -> Any:
    server = top.Server(url, key, 10.0)
    server.scrape()
    server.scrape()
    return server.row()


def test_scrape_gives_state_model_and_metrics_of_a_server(fake_server: str) -> None:
    found = row_after_two_scrapes(fake_server)
    assert (found.state, found.model) == ("loading weights: 50 %", "played")
    assert found.parts[""].values["running"] == 1
    assert found.parts[""].values["generated_tokens_total"] > 10
    assert row_after_two_scrapes(fake_server, "wrong").state == "wants a key"
    assert row_after_two_scrapes(f"localhost:{free_port()}").state == "no answer: Connection refused"
    assert row_after_two_scrapes(fake_server.replace("/v1", "/other")).state == "no penstock: its metrics are not there"


def test_scrapes_older_than_the_window_are_dropped(fake_server: str) -> None:
    server = top.Server(fake_server, "secret", 0.0)
    for _ in range(3):
        server.scrape()
    assert len(server._scrapes) == 2


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.launcher", "top", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin", **environment})


def test_command_prints_once_if_stdout_is_no_terminal(fake_server: str) -> None:
    """Without --once, too, if stdout is no terminal. The key comes from the environment at first, then from the flag."""
    unreachable = f"127.0.0.1:{free_port()}"
    answer = run(fake_server, unreachable, "--interval", "0.1", API_KEY="secret")
    assert answer.returncode == 1  # one server is loading, the other is not there
    assert "loading weights: 50 %" in answer.stdout
    assert "no answer: Connection refused" in answer.stdout
    answer = run(fake_server, "--once", "--json", "--interval", "0.1", "--api-key", "secret")
    [line] = answer.stdout.splitlines()
    [server] = json.loads(line)["servers"]
    assert server["model"] == "played"
    assert 0 < server["figures"]["tokens_per_second"] < 200
    assert json.loads(line)["all"]["running"] == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_command_runs_in_a_terminal_until_a_signal_and_restores_the_screen(fake_server: str, number: int, code: int) -> None:
    own_end, process_end = pty.openpty()
    command = [sys.executable, "-m", "penstock.launcher", "top", fake_server, "--interval", "0.1"]
    environment = {"PATH": "/usr/bin", "TERM": "xterm", "COLUMNS": "200", "API_KEY": "secret"}
    process = subprocess.Popen(command, stdin=process_end, stdout=process_end, stderr=subprocess.STDOUT, env=environment)
    os.close(process_end)
    try:
        output = b""
        while output.count(b"played") < 3:
            output += os.read(own_end, 65536)
        process.send_signal(number)
        assert process.wait(20) == code
        while b"\x1b[?1049l" not in output:  # back from the alternate screen; an error when there is no more output
            output += os.read(own_end, 65536)
        assert b"Traceback" not in output
    finally:
        process.kill()
        process.wait()
        os.close(own_end)


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "host:0", "http://[::1", "a..b"])
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is no URL of a server: http://HOST:PORT is needed"):
        top.Server(url, "", 1.0)


def test_invalid_interval_ends_with_one_line_and_exit_code_2() -> None:
    for interval, error in (("0", "a number above 0 is needed"), ("1e12", "1,000,000,000 is the most there can be")):
        answer = run("--interval", interval)
        assert answer.returncode == 2
        assert answer.stderr.count("\n") == 1
        assert f"{interval}: {error}" in answer.stderr
