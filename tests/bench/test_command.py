"""`penstock bench` with a fake server: its figures are compared with the server's configured delays, and with the times that
the server recorded.
"""

import asyncio
import json
import re
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.bench import client, command, tables
from penstock.bench.client import Client
from penstock.bench.load import AGAIN, Extent, Load, Stage
from penstock.bench.prompts import Prompt, TokenScale
from penstock.bench.protocols import OpenAI
from penstock.bench.record import Record
from penstock.tests.bench.fake_server import Behaviour, serving

SLACK = 1.0  # seconds that a busy machine may add to any latency; none may be shorter than the server's delay
CALIBRATION_TIMEOUT = aiohttp.ClientTimeout(30)


def bench(behaviour: Behaviour, tmp_path: Path, *flags: str, code: int = 0) -> tuple[list[dict[str, Any]], Any]:
    """Runs the command; returns the stages in its JSON, and the fake server."""
    with serving(behaviour) as fake:
        path = tmp_path / "result.json"
        assert command.main([fake.url, "--quiet", "--json", str(path), *flags]) == code
    return json.loads(path.read_text())["stages"], fake


@pytest.fixture
def calibration_without_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `--timeout` apply to the stages' requests only, so that a stalled machine does not fail those that measure tokens
    per word before."""
    measure = command._scale

    async def measure_without_timeout(client: Client, seed: int) -> TokenScale:
        timeout, client._timeout = client._timeout, CALIBRATION_TIMEOUT
        try:
            return await measure(client, seed)
        finally:
            client._timeout = timeout

    monkeypatch.setattr(command, "_scale", measure_without_timeout)


@pytest.mark.parametrize("api", ["openai-chat", "openai-completions", "tgi"])
def test_measured_latencies_equal_the_servers_own_times(api: str, tmp_path: Path) -> None:
    [stage], fake = bench(
        Behaviour(first=0.08, gap=0.02), tmp_path, "--api", api, "--concurrency", "2", "--requests", "4", "--output", "10"
    )
    assert stage["requests"] == {"sent": 4, "counted": 4, "answered": 4, "failed": 0}
    assert stage["output_tokens"]["p50"] == 10
    assert stage["warnings"] == [] or "late" in stage["warnings"][0]
    # Time to first token: the delay; in a chat, a comment and the role come before the token.
    events_before = {"openai-chat": 2, "openai-completions": 1, "tgi": 0}[api]
    least_ttft = 0.08 + events_before * 0.02
    assert least_ttft <= stage["ttft"]["p50"] < least_ttft + SLACK
    # Between tokens: compared with the server's own times.
    writes = [
        written[events_before : events_before + 10] for written in fake.written[2:]
    ]  # the first two requests measured tokens per word
    gaps = sorted(after - first for written in writes for first, after in pairwise(written))
    assert stage["itl"]["p50"] == pytest.approx(gaps[len(gaps) // 2], abs=0.02)
    mean = sum(gaps) / len(gaps)
    assert stage["itl"]["mean"] == pytest.approx(mean, abs=0.02)
    assert stage["tpot"]["mean"] == pytest.approx(mean, abs=0.02)
    assert stage["e2e"]["mean"] == pytest.approx(stage["ttft"]["mean"] + 9 * stage["itl"]["mean"], abs=1e-6)


def test_open_loop_latencies_count_from_the_intended_start(tmp_path: Path) -> None:
    """A server that processes one request at a time, at half the arrival rate: each request waits longer than the one before."""
    for flags in ([], ["--max-in-flight", "1"]):
        [stage], _ = bench(
            Behaviour(first=0.1, one_at_a_time=True),
            tmp_path,
            *("--rate", "20", "--arrivals", "constant", "--requests", "8", "--output", "1", *flags),
        )
        waits = [row["ttft"] for row in stage["records"]]
        least_waits = [(index + 1) * 0.1 - index * 0.05 for index in range(8)]
        assert sum(waits) >= sum(least_waits)  # in whatever order they were processed
        if flags:
            assert stage["late"]["most"] >= 0.3


def test_load_generator_yields_to_other_tasks_at_rates_beyond_its_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it can send, and handle Ctrl-C."""
    drawn_so_far: list[int] = []

    async def one(self: Load, record: Any, room: Any) -> None:
        record.error = "not sent"
        drawn_so_far.append(len(stages[0].records))

    stages: list[Stage] = []
    monkeypatch.setattr(Load, "_one", one)
    run = Load.run

    async def run_recording_stages(self: Load, stage: Stage, most: int = 0) -> None:
        stages.append(stage)
        await run(self, stage, most)

    monkeypatch.setattr(Load, "run", run_recording_stages)
    bench(Behaviour(), tmp_path, "--rate", "1e9", "--requests", "5000", code=1)
    assert len(drawn_so_far) == 5000
    assert drawn_so_far[0] < 1000


def test_closed_loop_keeps_the_given_number_of_requests_in_flight(tmp_path: Path) -> None:
    stages, fake = bench(Behaviour(first=0.1), tmp_path, "--concurrency", "1,4", "--requests", "8", "--output", "1")
    assert [stage["requests"]["answered"] for stage in stages] == [8, 8]
    assert 3 < stages[1]["in_flight"] <= 4
    assert stages[0]["seconds"] > 0.8  # one after the other
    assert len(fake.bodies) == 2 + 8 + 8


def test_prompts_have_the_requested_token_count(tmp_path: Path) -> None:
    """The fake server counts 5 tokens, and 2 for each word."""
    [stage], _ = bench(Behaviour(), tmp_path, "--requests", "10", "--prompt", "uniform:100,200", "--output", "1")
    assert 99 <= stage["prompt_tokens"]["p50"] <= 201
    assert stage["prompt_tokens"]["most"] <= 201


def test_prompts_share_the_given_number_of_prefixes(tmp_path: Path) -> None:
    flags = ["--requests", "12", "--prompt", "110", "--shared-prefix", "90", "--prefixes", "2", "--output", "1"]
    _, fake = bench(Behaviour(), tmp_path, *flags)
    prompts = [body["messages"][0]["content"].split() for body in fake.bodies[2:]]
    assert len({tuple(words[:45]) for words in prompts}) == 2
    assert len({tuple(words) for words in prompts}) == 12


def test_seed_determines_prompts_and_output_lengths(tmp_path: Path) -> None:
    flags = ["--requests", "6", "--concurrency", "1", "--prompt", "lognormal:40,0.8", "--output", "uniform:1,9"]
    requests_by_seed = [
        [(body["messages"], body["max_tokens"]) for body in bench(Behaviour(), tmp_path, *flags, "--seed", seed)[1].bodies]
        for seed in ("1", "1", "2")
    ]
    assert requests_by_seed[0] == requests_by_seed[1]
    assert requests_by_seed[0] != requests_by_seed[2]


def test_tokens_per_event_are_exact_with_continuous_usage_and_warned_about_without(tmp_path: Path) -> None:
    """Without usage in each event, a warning says that tokens per event are unknown."""
    flags = ["--requests", "2", "--concurrency", "2", "--output", "12"]
    behaviour = Behaviour(first=0.05, gap=0.1, tokens_per_event=4, continuous=True)
    [exact], _ = bench(behaviour, tmp_path, *flags, "--continuous-usage")
    assert exact["output_tokens"]["mean"] == 12
    assert exact["itl"]["p50"] == 0.0  # 9 of 11 tokens came in the same event as the previous one
    assert exact["itl"]["most"] >= 0.05  # half of the gap: a client may see one event late and the next on time
    assert exact["tpot"]["mean"] >= 2 * 0.05 / 11
    assert exact["warnings"] == [] or "late" in exact["warnings"][0]
    [without_usage], _ = bench(behaviour, tmp_path, *flags)
    assert without_usage["output_tokens"]["mean"] == 12
    assert any("24 tokens came in 6 events" in warning for warning in without_usage["warnings"])
    assert without_usage["tpot"]["mean"] >= 2 * 0.05 / 11


def test_usage_with_the_finish_reason_is_not_counted_as_tokens_of_that_event(tmp_path: Path) -> None:
    """DeepSeek's and Mistral's servers report the whole answer's usage with its last choice, instead of in an event of its own."""
    behaviour = Behaviour(gap=0.05, usage_with_finish_reason=True)
    [stage], _ = bench(behaviour, tmp_path, "--requests", "2", "--concurrency", "1", "--output", "8")
    assert stage["output_tokens"]["mean"] == 8
    assert stage["itl"]["p50"] >= 0.025
    assert stage["output_tokens_per_second"] * stage["seconds"] == pytest.approx(16)


def test_results_are_printed_before_a_full_disk_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Behaviour()) as fake, pytest.raises(OSError, match="/dev/full"):
        command.main([fake.url, "--quiet", "--json", "/dev/full", "--requests", "1", "--output", "4"])
    assert "answered" in capsys.readouterr().out


def test_events_that_arrive_together_are_warned_about(tmp_path: Path) -> None:
    [stage], _ = bench(Behaviour(gap=0.05, events_per_write=7), tmp_path, "--requests", "2", "--concurrency", "1", "--output", "20")
    assert any("came together" in warning for warning in stage["warnings"])


@pytest.mark.parametrize(
    ("behaviour", "kind", "detail"),
    [
        (Behaviour(status=429), "status 429", "too many"),
        (Behaviour(cut_after=3), "cut", ""),
        (Behaviour(error_after=3), "error event", "it broke"),
    ],
)
def test_errors_are_counted_by_kind(behaviour: Behaviour, kind: str, detail: str, tmp_path: Path) -> None:
    [stage], _ = bench(behaviour, tmp_path, "--requests", "3", "--output", "9", "--slo", "ttft=10s", code=1)
    assert stage["errors"] == {kind: 3}
    assert detail in stage["error_examples"][kind]
    assert stage["goodput"]["share"] == 0.0
    assert stage["ttft"] is None


def test_clients_wait_before_retrying_when_the_connection_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would fail a thousand times a second."""
    run = Load.run

    async def run_without_server(self: Load, stage: Stage, most: int = 0) -> None:
        with socket.create_server(("127.0.0.1", 0)) as unused:
            self._client._base = f"http://127.0.0.1:{unused.getsockname()[1]}"
        await run(self, stage, most)

    monkeypatch.setattr(Load, "run", run_without_server)
    [stage], _ = bench(Behaviour(), tmp_path, "--concurrency", "3", "--requests", "9", code=1)
    assert stage["requests"]["failed"] == stage["errors"]["connect"] == 9
    assert stage["seconds"] >= 2 * AGAIN  # one of the three clients tried three times or more


@pytest.mark.usefixtures("calibration_without_timeout")
def test_requests_that_exceed_the_timeout_are_counted_as_timeout_errors(tmp_path: Path) -> None:
    flags = ["--requests", "2", "--concurrency", "2", "--timeout", "0.4", "--output", "100", "--model", "m"]
    [stage], _ = bench(Behaviour(gap=0.05), tmp_path, *flags, code=1)
    assert stage["errors"] == {"timeout": 2}


def test_stage_without_counted_requests_reports_its_duration_and_a_warning(tmp_path: Path) -> None:
    """Its duration is the stage's own, not the time since the clock's zero."""
    answered = ["--concurrency", "1", "--warm-up", "9", "--output", "40"]
    for flags in (["--rate", "0.001"], ["--rate", "0.001", "--warm-up", "1s"], answered):
        [stage], _ = bench(Behaviour(gap=0.05), tmp_path, *flags, "--duration", "0.3", code=1)
        assert stage["requests"]["counted"] == 0
        assert 0.0 < stage["seconds"] < 9
        assert len(stage["tokens_by_second"]) <= 9
        assert "no request was answered" in stage["warnings"]


@pytest.mark.parametrize("load", [["--concurrency", "2"], ["--rate", "40", "--arrivals", "constant"]])
def test_number_of_requests_is_measured_after_seconds_of_warm_up(load: list[str], tmp_path: Path) -> None:
    """As after a number of requests, however many of them the warm-up takes."""
    [stage], _ = bench(Behaviour(gap=0.02), tmp_path, *load, "--requests", "6", "--warm-up", "0.5s", "--output", "3")
    assert stage["requests"]["counted"] == stage["requests"]["answered"] == 6


def test_progress_of_a_number_of_requests_is_that_of_the_measured_ones() -> None:
    stage, client = Stage("concurrency", 1), Client(None, "", OpenAI(True, True, False), {}, 1.0)  # type: ignore[arg-type]
    stage.records = [Record(0.0, ended=1.0, error="cut")] * 9
    for measured, blocks in ((0, 0), (2, 10), (4, 20)):
        stage.counted = stage.records[:measured]
        line = tables._line(stage, client, Extent(requests=4, warm_seconds=5.0), "", 100.0, 0.0)
        assert line.plain.count("█") == blocks


def test_timeout_of_a_connection_is_not_reported_as_that_of_the_answer() -> None:
    async def ask(url: str, record: Record) -> None:
        async with aiohttp.ClientSession() as session:
            asking = Client(session, url, OpenAI(True, True, False), {}, 600.0)
            asking._timeout = aiohttp.ClientTimeout(600, sock_connect=0.1)
            await asking.ask(Prompt("a", 1), record)

    record = Record(0.0)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as stack:
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        asyncio.run(ask(url, record))
    assert (record.error, record.detail) == ("timeout", f"Connection timeout to host {url}/v1/chat/completions")


@pytest.mark.usefixtures("calibration_without_timeout")
def test_requests_that_were_never_sent_have_no_lateness(tmp_path: Path) -> None:
    flags = ["--rate", "40", "--duration", "0.5", "--max-in-flight", "1", "--timeout", "0.5", "--output", "50", "--model", "m"]
    [stage], _ = bench(Behaviour(gap=0.05), tmp_path, *flags, code=1)
    unsent = [row for row in stage["records"] if row["error"] == "not sent"]
    assert unsent
    assert all(row["late"] is None and row["at"] >= 0 for row in unsent)
    assert stage["requests"]["failed"] == stage["requests"]["counted"] == len(stage["records"])


def test_events_with_crlf_line_ends_are_parsed(tmp_path: Path) -> None:
    [stage], _ = bench(Behaviour(line_end="\r\n", usage=True), tmp_path, "--requests", "2", "--output", "9")
    assert stage["output_tokens"]["mean"] == 9
    assert stage["errors"] == {}


def test_goodput_is_the_share_of_requests_within_all_objectives(tmp_path: Path) -> None:
    for objective, share in (("ttft=10s,itl=5s", 1.0), ("ttft=1ms", 0.0), ("ttft=10s,e2e=1ms", 0.0)):
        [stage], _ = bench(Behaviour(first=0.01), tmp_path, "--requests", "3", "--output", "3", "--slo", objective)
        assert stage["goodput"]["share"] == share


def test_printed_table_has_one_column_for_each_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--concurrency", "1,2", "--requests", "3", "--output", "4", "--slo", "ttft=10s"]
    [first, second], _ = bench(Behaviour(first=0.02), tmp_path, *flags)
    shown = capsys.readouterr().out
    rows = {name: cells for name, *cells in (line.rsplit(maxsplit=2) for line in shown.splitlines())}
    assert rows["at once"] == ["1", "2"]
    assert rows["answered"] == ["3", "3"]
    assert rows["good"] == ["100.0%", "100.0%"]
    expected = [stage["ttft"]["p50"] * 1e3 for stage in (first, second)]
    assert [float(cell) for cell in rows["ttft p50, ms"]] == pytest.approx(expected, rel=0.02)


@pytest.fixture
def default_sigint_handler() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also if the tests run in the background of a shell, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_stage(monkeypatch: pytest.MonkeyPatch, stage_number: int) -> None:
    """Raises SIGINT when stage `stage_number` has begun. No task of a stage may outlive it, since its session is closed then."""
    run, started = Load.run, []

    async def run_interrupted(load: Load, stage: Stage, most: int = 0) -> None:
        started.append(stage)
        if len(started) == stage_number:
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        before = asyncio.all_tasks()
        try:
            await run(load, stage, most)
        finally:
            assert asyncio.all_tasks() <= before

    monkeypatch.setattr(Load, "run", run_interrupted)


@pytest.mark.usefixtures("default_sigint_handler")
@pytest.mark.parametrize("flag", ["--concurrency", "--rate"])
def test_stages_measured_before_an_interruption_are_reported(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_stage(monkeypatch, 3)
    stages, _ = bench(Behaviour(first=0.01), tmp_path, flag, "50,60,70,80", "--requests", "5", code=130)
    assert [stage["requests"]["answered"] for stage in stages] == [5, 5]
    output = capsys.readouterr()
    assert output.err == "penstock bench: interrupted: 2 of 4 stages were measured\n"
    assert "answered" in output.out


@pytest.mark.usefixtures("default_sigint_handler")
@pytest.mark.parametrize("flag", ["--concurrency", "--rate"])
def test_answered_requests_of_an_interrupted_stage_are_reported_as_partial(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGINT when 7 requests of the last stage have ended. Running requests don't count as failed."""
    ask, ended = Client.ask, list[Record]()

    async def ask_and_interrupt(client: Client, prompt: Prompt, record: Record) -> None:
        await ask(client, prompt, record)
        ended.append(record)
        if len(ended) == 2 + 20 + 7:  # the first two requests measured tokens per word
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Client, "ask", ask_and_interrupt)
    page = tmp_path / "page.html"
    flags = [flag, "40,50", "--requests", "20", "--output", "1", "--html", str(page)]
    (complete, partial), _ = bench(Behaviour(first=0.1, one_at_a_time=True), tmp_path, *flags, code=130)
    assert (complete["partial"], complete["requests"]["answered"]) == (False, 20)
    requests = partial["requests"]
    assert partial["partial"]
    assert requests["counted"] == requests["answered"] == len(partial["records"]) >= 7
    assert requests["failed"] == 0
    assert requests["sent"] > requests["counted"]
    assert partial["ttft"]["p50"] >= 0.1
    assert partial["warnings"][0].startswith("interrupted: only what had been answered by then counts")
    output = capsys.readouterr()
    assert output.err == "penstock bench: interrupted: 1 of 2 stages were measured, and the next in part\n"
    assert "50, in part" in output.out
    assert ", in part</h2>" in page.read_text()


@pytest.mark.usefixtures("default_sigint_handler")
def test_interruption_before_the_first_stage_ends_leaves_no_new_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_stage(monkeypatch, 1)
    new, old = tmp_path / "new.json", tmp_path / "old.html"
    old.touch()
    with serving(Behaviour(first=0.01)) as fake:
        assert command.main([fake.url, "--quiet", "--json", str(new), "--html", str(old)]) == 130
    assert capsys.readouterr().err == "penstock bench: interrupted: 0 of 1 stages were measured\n"
    with pytest.raises(SystemExit):
        command.main(["http://127.0.0.1:9", "--json", str(new)])
    with pytest.raises(SystemExit):
        command.main(["http://127.0.0.1:9", "--json", str(new), "--html", str(tmp_path / "nowhere" / "page.html")])
    assert list(tmp_path.iterdir()) == [old]


def test_api_key_fields_and_sampling_parameters_are_sent(tmp_path: Path) -> None:
    flags = ["--requests", "1", "--api-key", "secret", "--field", "top_p=0.5", "--field", 'stop=["x"]', "--temperature", "0.7"]
    _, fake = bench(Behaviour(), tmp_path, *flags)
    body, headers = fake.bodies[-1], fake.headers[-1]
    assert headers["Authorization"] == "Bearer secret"
    assert {key: body[key] for key in ("top_p", "stop", "temperature", "model", "ignore_eos", "stream")} == {
        "top_p": 0.5,
        "stop": ["x"],
        "temperature": 0.7,
        "model": "fake",
        "ignore_eos": True,
        "stream": True,
    }
    assert "secret" not in (tmp_path / "result.json").read_text()


def test_dataset_prompts_and_output_lengths_are_used(tmp_path: Path) -> None:
    dataset = tmp_path / "shared.json"
    conversations = [
        {"conversations": [{"from": "human", "value": f"question {n}"}, {"from": "gpt", "value": "word " * 4}]} for n in range(3)
    ]
    dataset.write_text(json.dumps([*conversations, {"conversations": []}]))
    _, fake = bench(Behaviour(), tmp_path, "--dataset", str(dataset), "--requests", "6", "--concurrency", "1")
    prompts = [body["messages"][0]["content"] for body in fake.bodies[2:]]
    assert Counter(prompts) == {f"question {number}": 2 for number in range(3)}
    assert {body["max_tokens"] for body in fake.bodies[2:]} == {8}  # the fake server counts 2 tokens for each word


def test_html_report_names_a_dataset_that_is_no_utf8(tmp_path: Path) -> None:
    dataset, page = tmp_path / "\udcff.jsonl", tmp_path / "page.html"
    dataset.write_text('{"prompt": "a"}')
    bench(Behaviour(), tmp_path, "--dataset", str(dataset), "--requests", "1", "--html", str(page))
    assert "\\udcff.jsonl" in page.read_text()


def test_error_of_a_server_is_one_line_without_control_characters() -> None:
    record = Record(0.0)
    client._fail(record, "status 502", "<html>\r\n<h1>502\x1b[2J</h1>\n")
    assert record.detail == "<html> <h1>502 [2J</h1>"


@pytest.mark.parametrize("text", ["half \\ud83d of a character", "lines \u2028 \x85 apart"])
def test_dataset_prompts_are_sent_as_they_are(text: str, tmp_path: Path) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text(f'{{"prompt": "{text}"}}\n', encoding="utf-8")
    _, fake = bench(Behaviour(), tmp_path, "--dataset", str(dataset), "--requests", "1", "--field", "user=\udcff")
    assert fake.bodies[-1]["messages"][0]["content"] == json.loads(f'"{text}"')
    assert fake.bodies[-1]["user"] == "\udcff"


def test_html_report_is_one_self_contained_file_without_invalid_numbers(tmp_path: Path) -> None:
    """It loads nothing, and escapes names."""
    path = tmp_path / "page.html"
    flags = ["--rate", "20,40", "--requests", "10", "--output", "5", "--slo", "ttft=1s", "--html", str(path), "--model", "<b>"]
    stages, _ = bench(Behaviour(first=0.01, gap=0.005), tmp_path, *flags)
    page = path.read_text()
    longer = sum(stage["seconds"] >= 1 for stage in stages)  # usually less than a second
    assert page.count("<svg") == 5 + 2 * 2 + longer  # charts over load, and charts of each stage
    assert not re.search(r"(src|href)=|@import|url\(", page)
    assert not re.search(r"\bnan\b|\binf\b|None", page)
    assert "model &lt;b&gt;" in page


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--prompt", "many"], "uniform:LEAST,MOST"),
        (["--output", "uniform:9,3"], "uniform:9,3: a number of tokens is needed"),
        (["--rate", "0"], "a number above 0 is needed"),
        (["--rate", "1", "--concurrency", "1"], "exclude each other"),
        (["--requests", "1", "--duration", "1"], "exclude each other"),
        (["--slo", "speed=1s"], "one of ttft, itl, tpot, e2e is needed"),
        (["--slo", "ttft=5"], "a time with its unit is needed"),
        (["--arrivals", "burst"], "burst:SIZE"),
        (["--dataset", "nowhere.jsonl"], "error: nowhere.jsonl: No such file or directory"),
        (["--chaos", "5", "--rate", "2"], "--chaos has a server and a load of its own: leave --rate out"),
        (["--chaos", "5", "--seed", "2", "--html", "x"], "leave --html out"),
        (["other", "--chaos", "5"], "leave URL out"),
        (["--chaos", "5", "--json", "/dev/null/found.json"], "Not a directory: '/dev/null/found.json'"),
        (["--chaos-every", "1"], "--chaos-every is for --chaos SECONDS"),
        (["--prompt", "10", "--shared-prefix", "20"], "leaves nothing of its own"),
        (["ftp://127.0.0.1"], "ftp://127.0.0.1 is no URL of a server: http://HOST:PORT is needed"),
        (["http://127.0.0.1:port"], "is no URL of a server"),
        (["http://[::1"], "http://[::1 is no URL of a server"),
        (["http://a..b"], "http://a..b is no URL of a server"),
        (["--field", "x={"], "x={: this begins like JSON, and is none"),
        (["--field", 'x="'], "this begins like JSON, and is none"),
        (["--field", "x=" + "[" * 100_000], "this begins like JSON, and is none"),
        (["--json", "x", "--html", "x"], "--json and --html both name x"),
        (["--chaos", "5", "--chaos-every", "-1"], "-1: a number above 0 is needed"),
        (["--chaos-every", "0.0"], "--chaos-every is for --chaos SECONDS"),
        (["127.0.0.1:9"], "nobody answers at http://127.0.0.1:9 (Connect call failed"),
        (["http://127.0.0.1:9"], "nobody answers at http://127.0.0.1:9"),
    ],
)
def test_invalid_flags_exit_with_2_and_one_line(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(flags)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert text in message
    assert message.count("\n") == 1


def test_silent_server_is_reported_with_the_timeout(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout of a request, or of the list of models if that is less."""
    for flags, connect in ((["--timeout", "0.2"], 30.0), ([], 0.2)):
        monkeypatch.setattr(client, "CONNECT", connect)
        with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(SystemExit):
            command.main([f"http://127.0.0.1:{silent.getsockname()[1]}", *flags])
        assert "(within 0.2 s)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{"prompt": "a", "output_tokens": "x"}', 'row 1: output_tokens "x": a whole number from 1 is needed'),
        (b'{"prompt": "a"}\n{"prompt": "a", "max_tokens": -5}', "row 2: max_tokens -5: a whole number from 1 is needed"),
        (b'{"output_tokens": 3}', 'row 1: no "prompt" text'),
        (b'{"prompt": "\xff"}', "no UTF-8"),
        (b'{"messages": ["a"]}', 'row 1: no "prompt" text'),
        (b"[" * 100_000, "no JSON: maximum recursion depth exceeded"),
    ],
)
def test_invalid_dataset_is_reported_with_file_and_row(
    content: bytes, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(SystemExit):
        command.main(["--dataset", str(path)])
    [line] = capsys.readouterr().err.splitlines()
    assert f"{path}: {text}" in line
