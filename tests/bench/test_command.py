"""`penstock bench` against a server whose delays are known, and against what that server itself wrote down."""

import asyncio
import json
import re
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.bench import command
from penstock.bench.client import Client
from penstock.bench.load import AGAIN, Load, Stage
from penstock.bench.prompts import Prompt, TokenScale
from penstock.bench.record import Record
from penstock.tests.bench.fake_server import Manner, serving

SLACK = 1.0  # seconds that a busy machine may add to any of them; nothing may ever be less than the server's delay
PATIENT = aiohttp.ClientTimeout(30)


def bench(manner: Manner, tmp_path: Path, *flags: str, code: int = 0) -> tuple[list[dict[str, Any]], Any]:
    """Its stages, and the server."""
    with serving(manner) as fake:
        path = tmp_path / "result.json"
        assert command.main([fake.url, "--quiet", "--json", str(path), *flags]) == code
    return json.loads(path.read_text())["stages"], fake


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--timeout` is of a stage's requests only: a machine that stands still fails none of those that measure prompts before."""
    measure = command._scale

    async def patiently(client: Client, seed: int) -> TokenScale:
        asked, client._timeout = client._timeout, PATIENT
        try:
            return await measure(client, seed)
        finally:
            client._timeout = asked

    monkeypatch.setattr(command, "_scale", patiently)


@pytest.mark.parametrize("api", ["openai-chat", "openai-completions", "tgi"])
def test_it_measures_what_the_server_did(api: str, tmp_path: Path) -> None:
    [stage], fake = bench(
        Manner(first=0.08, gap=0.02), tmp_path, "--api", api, "--concurrency", "2", "--requests", "4", "--output", "10"
    )
    assert stage["requests"] == {"sent": 4, "counted": 4, "answered": 4, "failed": 0}
    assert stage["output_tokens"]["p50"] == 10
    assert stage["warnings"] == [] or "late" in stage["warnings"][0]
    # To the first token: the delay, in a chat a comment and a role come before it.
    before = {"openai-chat": 2, "openai-completions": 1, "tgi": 0}[api]
    least = 0.08 + before * 0.02
    assert least <= stage["ttft"]["p50"] < least + SLACK
    # Between tokens: as the server itself saw them leave.
    writes = [written[before : before + 10] for written in fake.written[2:]]  # the first two measured the prompts
    gaps = sorted(after - first for written in writes for first, after in pairwise(written))
    assert stage["itl"]["p50"] == pytest.approx(gaps[len(gaps) // 2], abs=0.02)
    mean = sum(gaps) / len(gaps)
    assert stage["itl"]["mean"] == pytest.approx(mean, abs=0.02)
    assert stage["tpot"]["mean"] == pytest.approx(mean, abs=0.02)
    assert stage["e2e"]["mean"] == pytest.approx(stage["ttft"]["mean"] + 9 * stage["itl"]["mean"], abs=1e-6)


def test_open_loops_count_from_the_moment_when_a_request_was_due(tmp_path: Path) -> None:
    """A server that takes one at a time, twice as slow as they come: each waits longer than the one before."""
    for flags in ([], ["--max-in-flight", "1"]):
        [stage], _ = bench(
            Manner(first=0.1, one_at_a_time=True),
            tmp_path,
            *("--rate", "20", "--arrivals", "constant", "--requests", "8", "--output", "1", *flags),
        )
        waits = [row["ttft"] for row in stage["records"]]
        least = [(index + 1) * 0.1 - index * 0.05 for index in range(8)]
        assert sum(waits) >= sum(least)  # in whatever order they were taken
        if flags:
            assert stage["late"]["most"] >= 0.3


def test_a_rate_beyond_what_a_client_can_send_leaves_it_time_to_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And to hear Ctrl-C."""
    drawn: list[int] = []

    async def one(self: Load, record: Any, room: Any) -> None:
        record.error = "not sent"
        drawn.append(len(stages[0].records))

    stages: list[Stage] = []
    monkeypatch.setattr(Load, "_one", one)
    run = Load.run

    async def running(self: Load, stage: Stage, most: int = 0) -> None:
        stages.append(stage)
        await run(self, stage, most)

    monkeypatch.setattr(Load, "run", running)
    bench(Manner(), tmp_path, "--rate", "1e9", "--requests", "5000", code=1)
    assert len(drawn) == 5000
    assert drawn[0] < 1000


def test_closed_loops_keep_so_many_in_flight(tmp_path: Path) -> None:
    stages, fake = bench(Manner(first=0.1), tmp_path, "--concurrency", "1,4", "--requests", "8", "--output", "1")
    assert [stage["requests"]["answered"] for stage in stages] == [8, 8]
    assert 3 < stages[1]["in_flight"] <= 4
    assert stages[0]["seconds"] > 0.8  # one after the other
    assert len(fake.bodies) == 2 + 8 + 8


def test_prompts_have_the_length_that_was_asked(tmp_path: Path) -> None:
    """The fake's prompts have 5 tokens, and 2 for each word."""
    [stage], _ = bench(Manner(), tmp_path, "--requests", "10", "--prompt", "uniform:100,200", "--output", "1")
    assert 99 <= stage["prompt_tokens"]["p50"] <= 201
    assert stage["prompt_tokens"]["most"] <= 201


def test_prefixes_are_shared(tmp_path: Path) -> None:
    flags = ["--requests", "12", "--prompt", "110", "--shared-prefix", "90", "--prefixes", "2", "--output", "1"]
    _, fake = bench(Manner(), tmp_path, *flags)
    prompts = [body["messages"][0]["content"].split() for body in fake.bodies[2:]]
    assert len({tuple(words[:45]) for words in prompts}) == 2
    assert len({tuple(words) for words in prompts}) == 12


def test_the_seed_decides_what_is_asked(tmp_path: Path) -> None:
    flags = ["--requests", "6", "--concurrency", "1", "--prompt", "lognormal:40,0.8", "--output", "uniform:1,9"]
    asked = [
        [(body["messages"], body["max_tokens"]) for body in bench(Manner(), tmp_path, *flags, "--seed", seed)[1].bodies]
        for seed in ("1", "1", "2")
    ]
    assert asked[0] == asked[1]
    assert asked[0] != asked[2]


def test_events_of_several_tokens(tmp_path: Path) -> None:
    """Counted exactly where the server says how many; else it is said that it does not."""
    flags = ["--requests", "2", "--concurrency", "2", "--output", "12"]
    manner = Manner(first=0.05, gap=0.1, bunch=4, continuous=True)
    [exact], _ = bench(manner, tmp_path, *flags, "--continuous-usage")
    assert exact["output_tokens"]["mean"] == 12
    assert exact["itl"]["p50"] == 0.0  # 9 of 11 tokens came with the one before
    assert exact["itl"]["most"] >= 0.05  # half of the gap: a client may see an event late, and the next in time
    assert exact["tpot"]["mean"] >= 2 * 0.05 / 11
    assert exact["warnings"] == [] or "late" in exact["warnings"][0]
    [vague], _ = bench(manner, tmp_path, *flags)
    assert vague["output_tokens"]["mean"] == 12
    assert any("24 tokens came in 6 events" in warning for warning in vague["warnings"])
    assert vague["tpot"]["mean"] >= 2 * 0.05 / 11


def test_events_that_come_together_are_noticed(tmp_path: Path) -> None:
    [stage], _ = bench(Manner(gap=0.05, together=7), tmp_path, "--requests", "2", "--concurrency", "1", "--output", "20")
    assert any("came together" in warning for warning in stage["warnings"])


@pytest.mark.parametrize(
    ("manner", "kind", "detail"),
    [
        (Manner(status=429), "status 429", "too many"),
        (Manner(cut_after=3), "cut", ""),
        (Manner(error_after=3), "error event", "it broke"),
    ],
)
def test_errors_are_counted_by_kind(manner: Manner, kind: str, detail: str, tmp_path: Path) -> None:
    [stage], _ = bench(manner, tmp_path, "--requests", "3", "--output", "9", "--slo", "ttft=10s", code=1)
    assert stage["errors"] == {kind: 3}
    assert detail in stage["error_examples"][kind]
    assert stage["goodput"]["share"] == 0.0
    assert stage["ttft"] is None


def test_where_nobody_listens_clients_wait_a_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would fail a thousand times a second."""
    run = Load.run

    async def deserted(self: Load, stage: Stage, most: int = 0) -> None:
        with socket.create_server(("127.0.0.1", 0)) as unused:
            self._client._base = f"http://127.0.0.1:{unused.getsockname()[1]}"
        await run(self, stage, most)

    monkeypatch.setattr(Load, "run", deserted)
    [stage], _ = bench(Manner(), tmp_path, "--concurrency", "3", "--requests", "9", code=1)
    assert stage["requests"]["failed"] == stage["errors"]["connect"] == 9
    assert stage["seconds"] >= 2 * AGAIN  # one of the three asked three times or more


@pytest.mark.usefixtures("prepared")
def test_a_request_that_takes_too_long(tmp_path: Path) -> None:
    flags = ["--requests", "2", "--concurrency", "2", "--timeout", "0.4", "--output", "100", "--model", "m"]
    [stage], _ = bench(Manner(gap=0.05), tmp_path, *flags, code=1)
    assert stage["errors"] == {"timeout": 2}


def test_a_stage_in_which_nothing_counts(tmp_path: Path) -> None:
    """It lasted as long as it did, and not since the machine's clock began."""
    answered = ["--concurrency", "1", "--warm-up", "9", "--output", "40"]
    for flags in (["--rate", "0.001"], ["--rate", "0.001", "--warm-up", "1s"], answered):
        [stage], _ = bench(Manner(gap=0.05), tmp_path, *flags, "--duration", "0.3", code=1)
        assert stage["requests"]["counted"] == 0
        assert 0.0 < stage["seconds"] < 9
        assert len(stage["tokens_by_second"]) <= 9
        assert "no request was answered" in stage["warnings"]


@pytest.mark.usefixtures("prepared")
def test_a_request_that_was_never_sent_was_not_late_by_anything(tmp_path: Path) -> None:
    flags = ["--rate", "40", "--duration", "0.5", "--max-in-flight", "1", "--timeout", "0.5", "--output", "50", "--model", "m"]
    [stage], _ = bench(Manner(gap=0.05), tmp_path, *flags, code=1)
    unsent = [row for row in stage["records"] if row["error"] == "not sent"]
    assert unsent
    assert all(row["late"] is None and row["at"] >= 0 for row in unsent)
    assert stage["requests"]["failed"] == stage["requests"]["counted"] == len(stage["records"])


def test_line_ends_of_other_servers(tmp_path: Path) -> None:
    [stage], _ = bench(Manner(line_end="\r\n", usage=True), tmp_path, "--requests", "2", "--output", "9")
    assert stage["output_tokens"]["mean"] == 9
    assert stage["errors"] == {}


def test_goodput(tmp_path: Path) -> None:
    for objective, share in (("ttft=10s,itl=5s", 1.0), ("ttft=1ms", 0.0), ("ttft=10s,e2e=1ms", 0.0)):
        [stage], _ = bench(Manner(first=0.01), tmp_path, "--requests", "3", "--output", "3", "--slo", objective)
        assert stage["goodput"]["share"] == share


def test_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--concurrency", "1,2", "--requests", "3", "--output", "4", "--slo", "ttft=10s"]
    [first, second], _ = bench(Manner(first=0.02), tmp_path, *flags)
    shown = capsys.readouterr().out
    rows = {name: cells for name, *cells in (line.rsplit(maxsplit=2) for line in shown.splitlines())}
    assert rows["at once"] == ["1", "2"]
    assert rows["answered"] == ["3", "3"]
    assert rows["good"] == ["100.0%", "100.0%"]
    expected = [stage["ttft"]["p50"] * 1e3 for stage in (first, second)]
    assert [float(cell) for cell in rows["ttft p50, ms"]] == pytest.approx(expected, rel=0.02)


@pytest.fixture
def keyboard() -> Iterator[None]:
    """Ctrl-C counts, also where these tests run in the background of a shell, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupting(monkeypatch: pytest.MonkeyPatch, stage_of: int) -> None:
    """Ctrl-C as soon as a stage has begun. Nothing of a stage may outlive it: its session would be gone."""
    run, begun = Load.run, []

    async def interrupted(load: Load, stage: Stage, most: int = 0) -> None:
        begun.append(stage)
        if len(begun) == stage_of:
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        before = asyncio.all_tasks()
        try:
            await run(load, stage, most)
        finally:
            assert asyncio.all_tasks() <= before

    monkeypatch.setattr(Load, "run", interrupted)


@pytest.mark.usefixtures("keyboard")
@pytest.mark.parametrize("flag", ["--concurrency", "--rate"])
def test_what_was_measured_before_an_interruption_is_told(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupting(monkeypatch, 3)
    stages, _ = bench(Manner(first=0.01), tmp_path, flag, "50,60,70,80", "--requests", "5", code=130)
    assert [stage["requests"]["answered"] for stage in stages] == [5, 5]
    told = capsys.readouterr()
    assert told.err == "penstock bench: interrupted: 2 of 4 stages were measured\n"
    assert "answered" in told.out


@pytest.mark.usefixtures("keyboard")
@pytest.mark.parametrize("flag", ["--concurrency", "--rate"])
def test_what_had_ended_of_an_interrupted_stage_is_told_as_a_part(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C when 7 of the last stage have ended. What was under way is nobody's failure."""
    ask, ended = Client.ask, list[Record]()

    async def asking(client: Client, prompt: Prompt, record: Record) -> None:
        await ask(client, prompt, record)
        ended.append(record)
        if len(ended) == 2 + 20 + 7:  # the first two measured the prompts
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Client, "ask", asking)
    page = tmp_path / "page.html"
    flags = [flag, "40,50", "--requests", "20", "--output", "1", "--html", str(page)]
    (whole, part), _ = bench(Manner(first=0.1, one_at_a_time=True), tmp_path, *flags, code=130)
    assert (whole["partial"], whole["requests"]["answered"]) == (False, 20)
    asked = part["requests"]
    assert part["partial"]
    assert asked["counted"] == asked["answered"] == len(part["records"]) >= 7
    assert asked["failed"] == 0
    assert asked["sent"] > asked["counted"]
    assert part["ttft"]["p50"] >= 0.1
    assert part["warnings"][0].startswith("interrupted: only what had been answered by then counts")
    told = capsys.readouterr()
    assert told.err == "penstock bench: interrupted: 1 of 2 stages were measured, and the next in part\n"
    assert "50, in part" in told.out
    assert ", in part</h2>" in page.read_text()


@pytest.mark.usefixtures("keyboard")
def test_nothing_is_left_where_nothing_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupting(monkeypatch, 1)
    new, old = tmp_path / "new.json", tmp_path / "old.html"
    old.touch()
    with serving(Manner(first=0.01)) as fake:
        assert command.main([fake.url, "--quiet", "--json", str(new), "--html", str(old)]) == 130
    assert capsys.readouterr().err == "penstock bench: interrupted: 0 of 1 stages were measured\n"
    with pytest.raises(SystemExit):
        command.main(["http://127.0.0.1:9", "--json", str(new)])
    with pytest.raises(SystemExit):
        command.main(["http://127.0.0.1:9", "--json", str(new), "--html", str(tmp_path / "nowhere" / "page.html")])
    assert list(tmp_path.iterdir()) == [old]


def test_what_is_sent(tmp_path: Path) -> None:
    flags = ["--requests", "1", "--api-key", "secret", "--field", "top_p=0.5", "--field", 'stop=["x"]', "--temperature", "0.7"]
    _, fake = bench(Manner(), tmp_path, *flags)
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


def test_a_file_of_prompts(tmp_path: Path) -> None:
    recorded = tmp_path / "shared.json"
    talks = [
        {"conversations": [{"from": "human", "value": f"question {n}"}, {"from": "gpt", "value": "word " * 4}]} for n in range(3)
    ]
    recorded.write_text(json.dumps([*talks, {"conversations": []}]))
    _, fake = bench(Manner(), tmp_path, "--dataset", str(recorded), "--requests", "6", "--concurrency", "1")
    asked = [body["messages"][0]["content"] for body in fake.bodies[2:]]
    assert Counter(asked) == {f"question {number}": 2 for number in range(3)}
    assert {body["max_tokens"] for body in fake.bodies[2:]} == {8}  # words of the fake have 2 tokens


def test_the_page(tmp_path: Path) -> None:
    """One file that asks nobody for anything, without a value that is none."""
    path = tmp_path / "page.html"
    flags = ["--rate", "20,40", "--requests", "10", "--output", "5", "--slo", "ttft=1s", "--html", str(path), "--model", "<b>"]
    stages, _ = bench(Manner(first=0.01, gap=0.005), tmp_path, *flags)
    page = path.read_text()
    longer = sum(stage["seconds"] >= 1 for stage in stages)  # less than a second is usual
    assert page.count("<svg") == 5 + 2 * 2 + longer  # by load, and of each stage
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
        (["--chaos-every", "1"], "--chaos-every is for --chaos SECONDS"),
        (["--prompt", "10", "--shared-prefix", "20"], "leaves nothing of its own"),
        (["ftp://127.0.0.1"], "ftp://127.0.0.1 is no URL of a server: http://HOST:PORT is needed"),
        (["http://127.0.0.1:port"], "is no URL of a server"),
        (["--field", "x={"], "x={: this begins like JSON, and is none"),
        (["--field", 'x="'], "this begins like JSON, and is none"),
        (["127.0.0.1:9"], "nobody answers at http://127.0.0.1:9"),
        (["http://127.0.0.1:9"], "nobody answers at http://127.0.0.1:9"),
    ],
)
def test_mistakes_are_one_line(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(flags)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert text in message
    assert message.count("\n") == 1


def test_who_does_not_answer_in_time_is_told_by_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(SystemExit):
        command.main([f"http://127.0.0.1:{silent.getsockname()[1]}", "--timeout", "0.2"])
    assert "(within 0.2 s)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{"prompt": "a", "output_tokens": "x"}', 'row 1: output_tokens "x": a whole number from 1 is needed'),
        (b'{"prompt": "a"}\n{"prompt": "a", "max_tokens": -5}', "row 2: max_tokens -5: a whole number from 1 is needed"),
        (b'{"output_tokens": 3}', 'row 1 has no "prompt" text'),
        (b'{"prompt": "\xff"}', "no UTF-8"),
        (b'{"messages": ["a"]}', 'row 1 has no "prompt" text'),
    ],
)
def test_a_file_that_is_no_dataset_is_named(content: bytes, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(SystemExit):
        command.main(["--dataset", str(path)])
    [line] = capsys.readouterr().err.splitlines()
    assert f"{path}: {text}" in line
