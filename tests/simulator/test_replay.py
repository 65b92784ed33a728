"""Replays whose numbers can be worked out by hand, and what must hold for any."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.router.policies import WholePrefill
from penstock.router.request import Priority
from penstock.router.scheduler import DELAYS, Bounds, Report
from penstock.router.steps import LEAD
from penstock.simulator import __main__ as command
from penstock.simulator import replay, report, trace
from penstock.simulator.machines import Speed
from penstock.simulator.measures import ALL, Measures, Values
from penstock.simulator.replay import Replay, Setting
from penstock.simulator.shard import Outcome
from penstock.simulator.trace import Request, Workload

SECOND = Speed(1.0, 0.0, 0.0, 0.0, 0.0)  # every step takes one
BOUNDS = Bounds(pages=100, page_size=4, step_tokens=64, sequences=8)


def play(setting: Setting, *requests: Request) -> Measures:
    return Replay(setting, requests).run()


def moments(measures: Measures) -> tuple[list[float], list[float]]:
    """All times to first tokens and all gaps between tokens, sorted."""
    service = measures.services[ALL]
    return service.ttft.percentiles(shares(service.ttft)), service.itl.percentiles(shares(service.itl))


def shares(values: Values) -> tuple[float, ...]:
    return tuple((i + 1) / values.count for i in range(values.count))


def test_one_request() -> None:
    measures = play(Setting(speed=SECOND, bounds=BOUNDS), Request(0.0, 10, (3,), 5))
    assert moments(measures) == ([1.0], [1.0, 1.0])
    assert (measures.seconds, measures.steps, measures.output_tokens, measures.prompt_tokens) == (3.0, 3, 3, 10)


def test_the_step_after_next_is_for_who_comes_too_late_for_the_next() -> None:
    """The second step is asked for shortly before the first one ends, at 0.99."""
    setting = Setting(speed=SECOND, bounds=BOUNDS)
    first = Request(0.0, 10, (5,), 5)
    assert moments(play(setting, first, Request(0.98, 10, (1,), 1)))[0] == pytest.approx([1.0, 1.02])
    assert moments(play(setting, first, Request(0.995, 10, (1,), 1)))[0] == pytest.approx([1.0, 2.005])


def test_without_lookahead_nobody_is_too_late() -> None:
    setting = Setting(speed=SECOND, bounds=BOUNDS, lookahead=False)
    measures = play(setting, Request(0.0, 10, (5,), 5), Request(0.995, 10, (1,), 1))
    assert moments(measures)[0] == pytest.approx([1.0, 1.005])


def test_what_a_step_costs() -> None:
    """Prompt of 10: 10 tokens, 55 keys, 1 row. Then decodes that see 11 and 12 keys."""
    speed = Speed(1.0, 0.01, 0.001, 0.1, 0.5)
    measures = play(Setting(speed=speed, bounds=BOUNDS), Request(0.0, 10, (3,), 3))
    ttft, gaps = moments(measures)
    assert ttft == pytest.approx([1 + 0.1 + 0.055 + 0.5])
    assert gaps == pytest.approx([1.51 + 1.1, 1.51 + 1.2])


def test_decodes_pause_for_prompts_if_the_policy_says_so() -> None:
    """The second prompt takes the step [2, 3] for itself, and the first request waits two seconds for its third token."""
    requests = Request(0.0, 10, (4,), 4), Request(1.5, 10, (2,), 2)
    mixed = play(Setting(speed=SECOND, bounds=BOUNDS), *requests)
    assert moments(mixed)[1] == [1.0] * 4
    paused = play(Setting(speed=SECOND, bounds=BOUNDS, policy=WholePrefill(64)), *requests)
    assert moments(paused)[1] == [1.0, 1.0, 1.0, 2.0]


def test_every_gap_of_a_pause_is_seen() -> None:
    """Two requests that do not fit together at full length: one is paused, and the gap is in its stream."""
    bounds = Bounds(pages=12, page_size=4, step_tokens=64, sequences=8, headroom=1)
    measures = play(Setting(speed=SECOND, bounds=bounds), Request(0.0, 8, (30,), 30), Request(0.0, 8, (30,), 30))
    assert measures.pauses >= 1
    assert measures.output_tokens == 60
    assert measures.services[ALL].itl.count == 58
    assert max(moments(measures)[1]) > 5
    assert max(measures.samples.held) <= 1


def test_what_runs_after_a_pause_did_not_run_during_it() -> None:
    """Three steps, a hundred seconds of nothing, and three steps: 4 s in which one ran, as the last step of each ends with none."""
    measures = play(Setting(speed=SECOND, bounds=BOUNDS), Request(0.0, 10, (3,), 3), Request(103.0, 10, (3,), 3))
    samples = measures.samples
    assert measures.seconds == 106
    assert measures.mean(samples.running) == pytest.approx(4 / 106)
    assert measures.mean(samples.held) == pytest.approx(4 * 0.03 / 106)
    woken = list(samples.seconds).index(103.0)
    assert (samples.held[woken], samples.running[woken], samples.waiting[woken]) == (0.0, 0.0, 0.0)


def test_the_queue_ends_where_the_first_step_begins() -> None:
    measures = play(Setting(speed=SECOND, bounds=BOUNDS), Request(0.0, 100, (3,), 3), Request(0.5, 10, (1,), 1))
    queue = measures.services[ALL].queue
    assert queue.count == 2, "once, however many chunks the prompt has"
    assert queue.percentiles((0.5, 1.0)) == [0.0, 0.5]


def test_priorities_and_tenants_are_told_to_the_scheduler() -> None:
    one = Setting(speed=SECOND, bounds=Bounds(pages=100, page_size=4, step_tokens=64, sequences=1))
    first, late, urgent = Request(0, 9, (3,), 3), Request(0.1, 9, (3,), 3, "batch"), Request(0.2, 9, (3,), 3, "interactive")
    measures = play(one, first, late, urgent)
    waits = {name: measures.services[name].ttft.percentiles((1.0,))[0] for name in ("batch", "interactive")}
    assert waits["interactive"] + 2 < waits["batch"]
    two = Setting(speed=SECOND, bounds=Bounds(pages=100, page_size=4, step_tokens=64, sequences=2))
    several = [Request(0.0, 9, (3,), 3, tenant="many")] * 4
    measures = play(two, *several, Request(0.0, 9, (3,), 3, "batch", tenant="few"))
    assert measures.services["batch"].ttft.percentiles((1.0,)) == [2.0], "in the second step: the first is the first one's"


def test_the_pace_is_the_longest_answers_and_a_pause_is_one_whatever_pauses() -> None:
    measures = play(Setting(speed=SECOND, bounds=BOUNDS), Request(0.0, 10, (2, 5), 5))
    assert measures.services[ALL].pace.percentiles((1.0,)) == [1.0]
    bounds = Bounds(pages=12, page_size=4, step_tokens=64, sequences=8, headroom=1)
    measures = play(Setting(speed=SECOND, bounds=bounds), Request(0.0, 8, (30,), 30), Request(0.0, 8, (14, 14), 14))
    assert measures.pauses == 1


def test_a_step_is_told_to_the_scheduler_as_it_was() -> None:
    numbers = {"prompt_tokens": 5, "cached_tokens": 6, "decode_tokens": 7, "prompt_keys": 8, "decode_keys": 9, "rows": 10}
    columns = {"uids": [1], "held": [2], "grow": [3], "lacking": [4]}
    done = Outcome(free=11, cached=12, finished=[(1, 0), (1, 2)], **columns, **numbers)  # type: ignore[arg-type]
    expected = Report(free=11, cached=12, finished=[1, 1], seconds=0.5, **columns, **numbers)  # type: ignore[arg-type]
    assert replay.report(done, 0.5) == expected


def test_sums() -> None:
    """Goals are kept by who just keeps them."""
    measures = Measures(100, ttft_goal=1.0, itl_goal=0.5)
    measures.begin("normal", 0.25)
    measures.first("normal", 1.0)
    measures.gap("normal", 0.5, 4)
    measures.finish("normal", 1.0, 3.0, 5)
    measures.finish("batch", 2.0, 2.5, 2)  # begins too late
    measures.finish("normal", 0.5, 3.0, 3)  # is too slow
    measures.step(Outcome(prompt_tokens=10, restored_tokens=4, cached_tokens=3, decode_tokens=2, rows=2), 1.5)
    measures.step(Outcome(), 1.5)
    for sample in ((0.0, 100, 0, 0, 0), (2.0, 60, 20, 2, 5), (4.0, 80, 10, 1, 0)):
        measures.sample(*sample)
    measures.seconds, measures.real_seconds = 4.0, 0.5
    said = measures.summary()
    services = said.pop("services")
    assert said == {
        "requests": {"finished": 3, "impossible": 0, "refused": 0},
        "seconds": 4.0,
        "steps": 1,
        "busy": 0.75,
        "tokens": {"output": 2, "prompt": 10, "cached": 3, "restored": 4},
        "tokens_per_second": 0.5,
        "pauses": 0,
        "pages_held": {"mean": pytest.approx(0.3), "most": pytest.approx(0.4)},
        "pages_cached": pytest.approx(0.15),
        "running": 1.5,
        "waiting": 2.5,
        "simulated_requests_per_second": 6.0,
    }
    assert isinstance(services, dict)
    assert services[ALL] == {
        "finished": 3,
        "goodput": 0.25,
        "good": pytest.approx(1 / 3),
        "ttft": dict.fromkeys(("p50", "p90", "p99", "max"), 1.0),
        "itl": dict.fromkeys(("p50", "p90", "p99", "max"), 0.5),
        "pace": {"p50": 0.5, "p90": 1.25, "p99": 1.25, "max": 1.25},
        "queue": dict.fromkeys(("p50", "p90", "p99", "max"), 0.25),
        "whole": {"p50": 3.0, "p90": 3.0, "p99": 3.0, "max": 3.0},
    }
    assert (services["normal"]["good"], services["batch"]["good"]) == (0.5, 0.0)
    table = report.table(measures)
    for line in (
        "3 requests in 4.0 s",
        "output tokens   2 (0 a second)",
        "10 computed (4 of them again), 3 found in the cache",
        "steps           1, the shards busy 75% of the time",
        "pages held      30% on average, 40% at most; 15% cached",
        "to the first token          1000.0    1000.0    1000.0    1000.0    1000.0",
        "within the goals" + " " * 13 + "33.3%   0.25 requests a second",
    ):
        assert line in table


def test_prefixes_are_found() -> None:
    setting = Setting(speed=SECOND, bounds=BOUNDS)
    same = [Request(float(10 * i), 40, (2,), 2, prefix=(("system", 36),)) for i in range(5)]
    assert play(setting, *same).prompt_tokens == 40 + 4 * 4
    assert play(Setting(speed=SECOND, bounds=BOUNDS, prefix_caching=False), *same).prompt_tokens == 5 * 40


def test_what_can_not_run_is_counted() -> None:
    setting = Setting(speed=SECOND, bounds=BOUNDS, concurrent=1)
    measures = play(setting, Request(0.0, 10, (3,), 3), Request(0.5, 10, (3,), 3), Request(9.0, 500, (3,), 3))
    assert (measures.finished, measures.refused, measures.impossible) == (1, 1, 1)


def test_who_has_little_in_flight_is_taken_beyond_the_bound_as_in_the_router() -> None:
    setting = Setting(speed=SECOND, bounds=BOUNDS, concurrent=2)
    first = [Request(0.1 * i, 10, (3,), 3, tenant="a") for i in range(3)]
    measures = play(setting, *first, Request(0.5, 10, (3,), 3, tenant="b"), Request(20.0, 10, (3,), 3, tenant="a"))
    assert (measures.finished, measures.refused) == (4, 1)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("lookahead", [True, False])
def test_any_trace_is_played_to_its_end(seed: int, lookahead: bool) -> None:
    dice = random.Random(seed)
    workload = Workload(requests=60, rate=30, prompt=30, output=12, longest_prompt=100, longest_output=60, chat=0.3, choices=3)
    found = trace.generate(workload, seed)
    bounds = Bounds(
        pages=dice.choice((90, 150, 1000)), page_size=dice.choice((4, 16)), step_tokens=32, sequences=dice.choice((3, 20))
    )
    speed = Speed(0.002, 1e-4, 1e-7, 1e-6, 1e-5)
    policy = dice.choice((None, WholePrefill(32)))
    played = Replay(Setting(speed=speed, bounds=bounds, policy=policy, lookahead=lookahead), found)
    measures = played.run()
    assert measures.finished + measures.impossible == 60
    fits = [each for each in found if played.scheduler.admissible(each.prompt, each.max_new_tokens, each.choices)]
    assert measures.output_tokens == sum(sum(each.outputs) for each in fits)
    assert measures.services[ALL].itl.count == sum(sum(each.outputs) - each.choices for each in fits)
    assert measures.services[ALL].itl.percentiles((0.01,))[0] > 0
    assert sum(service.finished for service in measures.services.values()) == 2 * measures.finished
    assert played.shard.free == bounds.pages
    played.shard.audit()


def test_it_knows_what_the_router_does() -> None:
    """It may not import the router's loop."""
    assert {*map(str, Priority)} == {*DELAYS}
    assert replay.LEAD == LEAD


def test_percentiles() -> None:
    values = Values()
    for value, weight in ((3.0, 1), (1.0, 98), (2.0, 1), (9.0, 0)):
        values.add(value, weight)
    assert values.percentiles((0.5, 0.98, 0.981, 0.99, 1.0)) == [1.0, 1.0, 2.0, 2.0, 3.0]
    assert values.mean == pytest.approx(1.03)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--requests", "50", "--machine", "cpu-demo"]
    assert command.main([*flags, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["requests"] == {"finished": 50, "impossible": 0, "refused": 0}
    assert command.main([*flags, "--write", str(tmp_path / "trace.jsonl")]) == 0
    capsys.readouterr()
    assert command.main(["--trace", str(tmp_path / "trace.jsonl"), "--machine", "cpu-demo", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["tokens"] == said["tokens"]
    assert command.main([*flags, "--policy", "pause", "--interactive", "0.5"]) == 0
    pause = ["--policy", "pause", "--waiting-served-ratio", "0", "--max-waiting-tokens", "0"]  # as `penstock serve` takes them
    assert command.main([*flags, *pause]) == 0
    table = capsys.readouterr().out
    assert "50 requests in" in table
    assert "interactive: " in table


def test_a_machine_holds_as_many_tokens_in_pages_of_any_size() -> None:
    for size, pages in ((16, 50_000), (32, 25_000), (256, 3125), (10**9, 1)):
        options = command.make_parser().parse_args(["--page-size", str(size)])
        assert command.setting(options).bounds.pages == pages
    options = command.make_parser().parse_args(["--page-size", "32", "--kv-pages", "100"])
    assert command.setting(options).bounds.pages == 100


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--poisson", "0"], "argument --poisson: 0: a number above 0 is needed"),
        (["--chat", "1.5"], "argument --chat: 1.5: a number from 0 to 1 is needed"),
        (["--trace", "/nowhere/trace"], "error: /nowhere/trace: No such file or directory"),
        (["--system-prompts", "-1"], "argument --system-prompts: -1: a whole number from 0 is needed"),
        (["--itl-target", "50", "--policy", "pause"], "--itl-target is for --policy mixed"),
        (["--interactive", "0.8", "--batch", "0.8"], "--interactive 0.8 and --batch 0.8 are shares of one: above 1 together"),
        (["--cost", "1,2"], "argument --cost: 1,2: five numbers with commas between them are needed"),
        (
            ["--cost", "nan,1,1,1,1"],
            "argument --cost: nan,1,1,1,1: no number may be negative or without end, and a step takes time",
        ),
        (["--cost", "inf,1,1,1,1"], "argument --cost: inf,1,1,1,1: no number may be negative or without end"),
        (["--bursts", "1e-200"], "error: --poisson, --bursts or --waves is too near to 0 to reckon with"),
        (["--waves", "1e-320"], "error: --poisson, --bursts or --waves is too near to 0 to reckon with"),
        (["--hurry", "1e-320"], "error: --poisson, --bursts or --hurry is so near to 0 that requests never come"),
        (["--policy", "none"], "argument --policy/--prefill-policy: invalid choice: 'none'"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], says: str) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(flags)
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("penstock simulate: error: ")
    assert says in line


def test_without_matplotlib_a_line_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(report.importlib, "import_module", missing)
    with pytest.raises(SystemExit):
        command.main(["--requests", "5", "--plot", "out.svg"])
    assert "pip install -e '.[bench]' in the checkout" in capsys.readouterr().err


def test_whoever_reads_the_table_may_leave() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    arguments = [sys.executable, "-m", "penstock.simulator", "--requests", "5"]
    with open(theirs, "wb") as left:
        answer = subprocess.run(arguments, stdout=left, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert command.main(["--requests", "50", "--plot", str(tmp_path / "out.svg")]) == 0
    assert "milliseconds to the first token" in (tmp_path / "out.svg").read_text()


def test_a_trace_that_is_no_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"arrival": 0}\n\xff')
    with pytest.raises(SystemExit):
        command.main(["--trace", str(path)])
    assert capsys.readouterr().err == f"penstock simulate: error: {path}: no UTF-8 (byte 15)\n"
