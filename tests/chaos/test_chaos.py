"""Short runs of the chaos test (shards killed and stopped under load) and of a soak test. PENSTOCK_CHAOS_SECONDS: duration of each.

A soak requests many short answers, so that memory which each of them leaks adds up.

Longer runs, and more than one rank: `penstock bench --chaos`, docs/benchmarking.md.
"""

import asyncio
import json
import math
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from penstock.bench import chaos, chaos_report, chaos_requests, command
from penstock.bench.chaos import play
from penstock.bench.chaos_report import Plan
from penstock.bench.local_server import HeldResources, LocalServer
from penstock.tests.serving import scratch

FAULT_SECONDS, SOAK_SECONDS = 6.0, 60.0  # seconds
THINK = 1.6  # seconds between requests: leaves most of the machine to other tests that run at the same time
SECONDS = os.environ.get("PENSTOCK_CHAOS_SECONDS")
# Not the dtype that the model is stored in: in 16 bits the rest of the batch decides near ties, of which there are many.
FLAGS = "demo-draft --device cpu --dtype float32 --threads 1 --page-size 4 --kv-pages 4096 --max-batch-prefill-tokens 32"
SHORT_ANSWER = 8  # tokens
MOST_GROWTH = 3 * 2**20  # bytes by which a process may grow in the second half of a soak of that length; 1 MiB is usual
LEAST_ANSWERS = (
    150  # answers, half of them in that time, even on a busy machine; 550 are usual, enough to find a leak of 11 kB per answer
)
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with pytest.MonkeyPatch.context() as patch, scratch() as folder:
        patch.setenv("http_proxy", "http://127.0.0.1:9")  # is not used for a server of this machine
        with LocalServer(FLAGS.split(), folder / "log", start=120.0) as server:
            yield server
            assert server.stop() == 0


def test_no_stream_is_wrong_or_lost_when_shards_are_killed_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with scratch() as folder:
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        monkeypatch.setenv("TMPDIR", str(folder))
        flags = f"{FLAGS} --speculate 4 --step-timeout 1"
        arguments = ["--chaos", SECONDS or str(FAULT_SECONDS), "--chaos-every", "1", f"--serve={flags}", "--quiet"]
        code = command.main([*arguments, "--json", str(tmp_path / "found.json")])
        output = capsys.readouterr().out
        assert code == 0, output
        assert list(folder.iterdir()) == []
    result = json.loads((tmp_path / "found.json").read_text())
    assert sum(result["faults"].values()) >= 1
    assert result["answers"] >= 10  # with six other busy processes there were 29
    assert result["cut"] > 0
    assert result["drafted"] >= max(result["accepted"], 1)  # how many are accepted depends on the machine's load
    assert "wrong: 0; errors: 0" in output
    assert "longest pause of a stream: " in output
    assert "left behind: no page, process, socket or file" in output


def test_process_memory_does_not_grow_during_a_soak(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chaos_requests, "LENGTH", SHORT_ANSWER)
    monkeypatch.setattr(chaos, "SAMPLE", 0.25)
    plan = Plan(float(SECONDS or SOAK_SECONDS), 16, every=0, seed=1, think=THINK)
    result = asyncio.run(play(server, plan, QUIET))
    with capsys.disabled():
        print("\n" + "\n".join(line for line in chaos_report.summary(plan, result) if line.startswith(("answers", "memory"))))
    assert result.good, chaos_report.summary(plan, result)
    assert sorted(process.rpartition(" ")[0] for process in result.memory) == ["launcher", "router", "shard 0"]
    assert result.answers > LEAST_ANSWERS or SECONDS is not None
    for process, samples in result.memory.items():
        if SECONDS is None:
            assert chaos_report.growth(chaos_report.settled(samples)) < MOST_GROWTH, process


@pytest.mark.parametrize(("seconds", "leak"), [(40, 1.0), (600, 0.06)])
def test_growing_memory_is_reported(seconds: int, leak: float) -> None:
    """leak: MiB per second. Growth at the start, noise around a constant and a single peak are not leaks."""
    rng = random.Random(1)
    for rate, expected in ((leak, True), (0.0, False)):
        sizes = [50 + 30 * min(1.0, 5 * t / seconds) + rate * t + rng.uniform(-1, 1) for t in range(seconds)]
        sizes[-1 if not rate else 0] += 40
        samples = [(float(t), int(size * 2**20)) for t, size in enumerate(sizes)]
        settled_samples = chaos_report.settled(samples)
        assert (
            chaos_report.growth(settled_samples) > chaos_report.STEP + chaos_report.STEEPEST * chaos_report.age(settled_samples)
        ) == expected
        assert not expected or 60 * leak / 2 < chaos_report.slope(settled_samples) < 60 * leak * 1.2


def test_wrong_answers_and_errors_are_reported(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    unseeded = {
        "prompt": "Once",
        "temperature": 1.0,
        "max_tokens": 20,
        "ignore_eos": True,
        "stream": True,
    }  # no seed, so answers differ
    refused = {"prompt": "Once", "max_tokens": 20, "stream": True}
    monkeypatch.setattr(chaos, "requests", lambda: [("/v1/completions", unseeded), ("/v1/completions", refused)])
    ask = chaos.Chaos._ask

    async def change_body(self: chaos.Chaos, path: str, body: chaos_requests.Json) -> dict[str, str]:
        answer = await ask(self, path, body)
        [original] = [original for _, original in self._asked if chaos_requests.undrafted(original) == body]
        original["temperature"] = 1.0 if "temperature" in original else -1.0  # the second body is invalid from now on
        return answer

    monkeypatch.setattr(chaos.Chaos, "_ask", change_body)
    plan = Plan(1.0, 4, every=0, seed=1)
    result = asyncio.run(play(server, plan, QUIET))
    assert result.wrong
    assert result.wrong[0]["body"]["prompt"] == "Once"
    assert "status 400" in result.errors[0]
    assert not result.good
    summary = chaos_report.summary(plan, result)
    assert f"wrong: {len(result.wrong)}; errors: {len(result.errors)}" in summary[1]
    first = result.wrong[0]
    difference = chaos_requests.difference(first["came"], first["expected"])
    assert any(line.endswith(difference) for line in summary if line.startswith("wrong: /"))


def test_server_that_goes_away_is_reported_with_all_that_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a key in the environment, which the server takes from there. No fault is waited for that would come after the end."""
    monkeypatch.setenv("API_KEY", "secret")
    load = chaos.Chaos._load

    async def lose(self: chaos.Chaos) -> None:
        await load(self)
        self._server._process.kill()
        self._server._process.wait()

    monkeypatch.setattr(chaos.Chaos, "_load", lose)
    arguments = ["--chaos", "1", "--chaos-every", "1000", f"--serve={FLAGS}", "--quiet", "--json", str(tmp_path / "found.json")]
    assert command.main(arguments, lambda given: given or "secret") == 1
    assert "error: the run ended early: ClientConnectorError: Cannot connect to host" in capsys.readouterr().out
    result = json.loads((tmp_path / "found.json").read_text())
    assert result["answers"] > 0
    assert result["errors"][-1] == "penstock serve ended with exit code -9"


def test_lack_of_shards_is_an_error(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalServer, "processes", lambda self: {"launcher": 1})
    run = chaos.Chaos(server, Plan(60.0, 1, every=0.01, seed=1), QUIET)
    run._end = math.inf
    with pytest.raises(ValueError, match="the server has no shards any more"):
        asyncio.run(run._faults())


def test_what_is_left_behind_is_reported(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    request = {"prompt": "Once", "temperature": 0, "max_tokens": 5, "ignore_eos": True, "stream": True}
    monkeypatch.setattr(chaos, "requests", lambda: [("/v1/completions", request)])
    monkeypatch.setattr(chaos, "SETTLE", 0.1)
    read, held = chaos.Chaos._metrics, LocalServer.held
    samples = 0

    async def read_with_a_lost_page(self: chaos.Chaos) -> dict[str, float]:
        values = await read(self)
        return {**values, "penstock_pages_free": values["penstock_pages_free"] - 1}

    def held_with_leaks(self: LocalServer) -> dict[str, HeldResources]:
        """From the second sample on, the router has more files and sockets, and there is another process."""
        nonlocal samples
        samples += 1
        found, more = held(self), chaos.SLACK + 1
        if samples == 1:
            return found
        router = found["router"]
        grown = replace(router, files=router.files + more, sockets=router.sockets + more)
        return {**found, "router": grown, "other": router}

    monkeypatch.setattr(chaos.Chaos, "_metrics", read_with_a_lost_page)
    monkeypatch.setattr(LocalServer, "held", held_with_leaks)
    result = asyncio.run(play(server, Plan(0.2, 1, every=0, seed=1), QUIET))
    assert (result.wrong, result.errors, result.good) == ([], [], False)
    lost_page, processes, *of_router = result.leaks
    assert lost_page == "pages_missing: 1 when nobody asked any more"
    assert processes == "processes: launcher, router, shard 0 before, launcher, other, router, shard 0 afterwards"
    assert [leak.partition(":")[0] for leak in of_router] == ["files of the router", "sockets of the router"]


def openai_answer(*texts: str, reason: str = "length", tokens: int = 3, end: str = "data: [DONE]\n\n") -> bytes:
    """A stream of OpenAI's completions."""
    events: list[chaos_requests.Json] = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in texts]
    events.append({"choices": [{"index": 0, "text": "", "finish_reason": reason or None}]})
    events.append({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": tokens}})
    return ("".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events) + end).encode()


def tgi_answer(*ids: int, reason: str = "length", last: int = -1) -> bytes:
    """A stream of TGI's; the text of all tokens is empty. `last`: the index of the token with the details; -1: the last token."""
    lines = []
    for index, id in enumerate(ids):
        details = {"finish_reason": reason, "generated_tokens": len(ids), "input_length": 2}
        end = index == len(ids) - 1 if last < 0 else index == last
        event = {"token": {"id": id, "text": ""}, "generated_text": "" if end else None, "details": details if end else None}
        lines.append(f"data:{json.dumps(event)}\n\n")
    return "".join(lines).encode()


def parse_answer(data: bytes) -> dict[str, str]:
    stream = chaos_requests.Stream()
    stream.data = data
    return stream.answer()


@pytest.mark.parametrize(
    "other",
    [
        openai_answer("a", "b", "b"),
        openai_answer("a", "", tokens=4),  # a token without text was sent twice
        openai_answer("a", tokens=2),
        openai_answer("a", "c"),
        openai_answer("a", "b", reason="stop"),
    ],
)
def test_changed_repeated_and_missing_tokens_are_noticed_by_text_and_count(other: bytes) -> None:
    whole = openai_answer("a", "b")
    assert parse_answer(whole) == parse_answer(openai_answer("ab"))  # the number of events does not matter
    assert parse_answer(whole) != parse_answer(other)


@pytest.mark.parametrize("other", [tgi_answer(1, 2, 2), tgi_answer(1, 3), tgi_answer(1), tgi_answer(1, 2, reason="stop_sequence")])
def test_changed_repeated_and_missing_tokens_are_noticed_by_token_id(other: bytes) -> None:
    assert parse_answer(tgi_answer(1, 2)) != parse_answer(other)


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b": alive\n\n",
        openai_answer("a", "b", end=""),  # cut between two events, and closed normally
        openai_answer("a", "b", reason=""),
        openai_answer("a", "b") + openai_answer("a"),
        tgi_answer(1, 2, last=2),
        tgi_answer(1, 2, 2, last=1),
    ],
)
def test_incomplete_or_overlong_stream_is_an_error(part: bytes) -> None:
    with pytest.raises(ValueError, match=r"ended before the answer did|after the end"):
        parse_answer(part)


def test_unicode_line_separators_in_a_text_do_not_end_an_event() -> None:
    assert parse_answer(openai_answer("a\u2028b\u0085"))["0"] == "a\u2028b\u0085length"


def test_report_shows_where_answers_differ() -> None:
    summary = chaos_requests.difference({"0": "same", "1": "named Lucy. It"}, {"0": "same", "1": "named Mia. It"})
    assert summary == "choice 1 has 'Lucy. It' after 6 characters, not 'Mia. It'"
    summary = chaos_requests.difference({"0": "a", chaos_requests.COUNT: "9 2"}, {"0": "a", chaos_requests.COUNT: "8 2"})
    assert summary == "the count of tokens has '9 2' after 0 characters, not '8 2'"
    assert chaos_requests.difference({}, {"0": "a"}) == "choice 0 has '' after 0 characters, not 'a'"
