"""Simulated traffic: replays whose figures can be computed by hand, invariants of any replay, and the command `penstock
simulate`.
"""

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
from penstock.simulator import command, replay, report, trace
from penstock.simulator.machines import Speed
from penstock.simulator.measures import ALL, Measures, Values
from penstock.simulator.replay import Replay, Setting
from penstock.simulator.shard import Outcome
from penstock.simulator.trace import Request, Workload

ONE_SECOND_STEPS = Speed(1.0, 0.0, 0.0, 0.0, 0.0)  # every step takes one second
BOUNDS = Bounds(pages=100, page_size=4, step_tokens=64, sequences=8)


def play(setting: Setting, *requests: Request) -> Measures:
    return Replay(setting, requests).run()


def latencies(measures: Measures) -> tuple[list[float], list[float]]:
    """All times to first token and all times between tokens, each sorted."""
    service = measures.services[ALL]
    return service.ttft.percentiles(quantiles(service.ttft)), service.itl.percentiles(quantiles(service.itl))


def quantiles(values: Values) -> tuple[float, ...]:
    return tuple((i + 1) / values.count for i in range(values.count))


def test_single_request_has_hand_computed_latencies_and_counts() -> None:
    measures = play(Setting(speed=ONE_SECOND_STEPS, bounds=BOUNDS), Request(0.0, 10, (3,), 5))
    assert latencies(measures) == ([1.0], [1.0, 1.0])
    assert (measures.seconds, measures.steps, measures.output_tokens, measures.prompt_tokens) == (3.0, 3, 3, 10)


def test_request_that_arrives_after_the_next_step_was_sent_waits_for_the_one_after() -> None:
    """The second step is sent shortly before the first one ends, at 0.99."""
    setting = Setting(speed=ONE_SECOND_STEPS, bounds=BOUNDS)
    first = Request(0.0, 10, (5,), 5)
    assert latencies(play(setting, first, Request(0.98, 10, (1,), 1)))[0] == pytest.approx([1.0, 1.02])
    assert latencies(play(setting, first, Request(0.995, 10, (1,), 1)))[0] == pytest.approx([1.0, 2.005])


def test_without_lookahead_a_late_request_joins_the_next_step() -> None:
    setting = Setting(speed=ONE_SECOND_STEPS, bounds=BOUNDS, lookahead=False)
    measures = play(setting, Request(0.0, 10, (5,), 5), Request(0.995, 10, (1,), 1))
    assert latencies(measures)[0] == pytest.approx([1.0, 1.005])


def test_step_time_follows_from_the_cost_model() -> None:
    """Prompt of 10: 10 tokens, 55 keys, 1 row. Then decodes that see 11 and 12 keys."""
    speed = Speed(1.0, 0.01, 0.001, 0.1, 0.5)
    measures = play(Setting(speed=speed, bounds=BOUNDS), Request(0.0, 10, (3,), 3))
    ttft, gaps = latencies(measures)
    assert ttft == pytest.approx([1 + 0.1 + 0.055 + 0.5])
    assert gaps == pytest.approx([1.51 + 1.1, 1.51 + 1.2])


def test_whole_prefill_policy_stalls_decodes_and_mixed_policy_does_not() -> None:
    """The second prompt takes the step [2, 3] alone, and the first request waits two seconds for its third token."""
    requests = Request(0.0, 10, (4,), 4), Request(1.5, 10, (2,), 2)
    mixed = play(Setting(speed=ONE_SECOND_STEPS, bounds=BOUNDS), *requests)
    assert latencies(mixed)[1] == [1.0] * 4
    paused = play(Setting(speed=ONE_SECOND_STEPS, bounds=BOUNDS, policy=WholePrefill(64)), *requests)
    assert latencies(paused)[1] == [1.0, 1.0, 1.0, 2.0]


def test_preemption_appears_as_a_gap_in_the_stream() -> None:
    """Two requests that don't fit together at full length: one is preempted, which delays its next token."""
    bounds = Bounds(pages=12, page_size=4, step_tokens=64, sequences=8, headroom=1)
    measures = play(Setting(speed=ONE_SECOND_STEPS, bounds=bounds), Request(0.0, 8, (30,), 30), Request(0.0, 8, (30,), 30))
    assert measures.pauses >= 1
    assert measures.output_tokens == 60
    assert measures.services[ALL].itl.count == 58
    assert max(latencies(measures)[1]) > 5
    assert max(measures.samples.held) <= 1


def test_simulated_time_between_requests_counts_as_idle() -> None:
    """Three steps, a hundred idle seconds, three steps: one request runs for 4 s, as the last step of each ends with none."""
    measures = play(Setting(speed=ONE_SECOND_STEPS, bounds=BOUNDS), Request(0.0, 10, (3,), 3), Request(103.0, 10, (3,), 3))
    samples = measures.samples
    assert measures.seconds == 106
    assert measures.mean(samples.running) == pytest.approx(4 / 106)
    assert measures.mean(samples.held) == pytest.approx(4 * 0.03 / 106)
    second_start = list(samples.seconds).index(103.0)
    assert (samples.held[second_start], samples.running[second_start], samples.waiting[second_start]) == (0.0, 0.0, 0.0)


def test_queue_time_ends_when_the_first_step_begins() -> None:
    measures = play(Setting(speed=ONE_SECOND_STEPS, bounds=BOUNDS), Request(0.0, 100, (3,), 3), Request(0.5, 10, (1,), 1))
    queue = measures.services[ALL].queue
    assert queue.count == 2, "once per request, however many chunks its prompt has"
    assert queue.percentiles((0.5, 1.0)) == [0.0, 0.5]


def test_priorities_and_tenants_reach_the_scheduler() -> None:
    one_sequence = Setting(speed=ONE_SECOND_STEPS, bounds=Bounds(pages=100, page_size=4, step_tokens=64, sequences=1))
    first, late, urgent = Request(0, 9, (3,), 3), Request(0.1, 9, (3,), 3, "batch"), Request(0.2, 9, (3,), 3, "interactive")
    measures = play(one_sequence, first, late, urgent)
    waits = {name: measures.services[name].ttft.percentiles((1.0,))[0] for name in ("batch", "interactive")}
    assert waits["interactive"] + 2 < waits["batch"]
    two_sequences = Setting(speed=ONE_SECOND_STEPS, bounds=Bounds(pages=100, page_size=4, step_tokens=64, sequences=2))
    several = [Request(0.0, 9, (3,), 3, tenant="many")] * 4
    measures = play(two_sequences, *several, Request(0.0, 9, (3,), 3, "batch", tenant="few"))
    assert measures.services["batch"].ttft.percentiles((1.0,)) == [2.0], "in the second step: the first step is the first request's"


def test_pace_is_that_of_the_longest_choice_and_a_preempted_group_counts_once() -> None:
    measures = play(Setting(speed=ONE_SECOND_STEPS, bounds=BOUNDS), Request(0.0, 10, (2, 5), 5))
    assert measures.services[ALL].pace.percentiles((1.0,)) == [1.0]
    bounds = Bounds(pages=12, page_size=4, step_tokens=64, sequences=8, headroom=1)
    measures = play(Setting(speed=ONE_SECOND_STEPS, bounds=bounds), Request(0.0, 8, (30,), 30), Request(0.0, 8, (14, 14), 14))
    assert measures.pauses == 1


def test_step_outcome_is_reported_to_the_scheduler_unchanged() -> None:
    numbers = {"prompt_tokens": 5, "cached_tokens": 6, "decode_tokens": 7, "prompt_keys": 8, "decode_keys": 9, "rows": 10}
    columns = {"uids": [1], "held": [2], "grow": [3], "lacking": [4]}
    outcome = Outcome(free=11, cached=12, finished=[(1, 0), (1, 2)], **columns, **numbers)  # type: ignore[arg-type]
    expected = Report(free=11, cached=12, finished=[1, 1], seconds=0.5, **columns, **numbers)  # type: ignore[arg-type]
    assert replay.report(outcome, 0.5) == expected


def test_summary_and_table_equal_hand_computed_values() -> None:
    """A request whose latencies equal the goals is within them."""
    measures = Measures(100, ttft_goal=1.0, itl_goal=0.5)
    measures.begin("normal", 0.25)
    measures.first("normal", 1.0)
    measures.gap("normal", 0.5, 4)
    measures.finish("normal", 1.0, 3.0, 5)
    measures.finish("batch", 2.0, 2.5, 2)  # its first token is too late
    measures.finish("normal", 0.5, 3.0, 3)  # its pace is too slow
    measures.step(Outcome(prompt_tokens=10, restored_tokens=4, cached_tokens=3, decode_tokens=2, rows=2), 1.5)
    measures.step(Outcome(), 1.5)
    for sample in ((0.0, 100, 0, 0, 0), (2.0, 60, 20, 2, 5), (4.0, 80, 10, 1, 0)):
        measures.sample(*sample)
    measures.seconds, measures.real_seconds = 4.0, 0.5
    summary = measures.summary()
    services = summary.pop("services")
    assert summary == {
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


def test_prefix_cache_saves_prompt_tokens() -> None:
    setting = Setting(speed=ONE_SECOND_STEPS, bounds=BOUNDS)
    same = [Request(float(10 * i), 40, (2,), 2, prefix=(("system", 36),)) for i in range(5)]
    assert play(setting, *same).prompt_tokens == 40 + 4 * 4
    assert play(Setting(speed=ONE_SECOND_STEPS, bounds=BOUNDS, prefix_caching=False), *same).prompt_tokens == 5 * 40


def test_refused_and_impossible_requests_are_counted() -> None:
    setting = Setting(speed=ONE_SECOND_STEPS, bounds=BOUNDS, concurrent=1)
    measures = play(setting, Request(0.0, 10, (3,), 3), Request(0.5, 10, (3,), 3), Request(9.0, 500, (3,), 3))
    assert (measures.finished, measures.refused, measures.impossible) == (1, 1, 1)


def test_requests_of_the_same_moment_that_never_fit_take_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 0, "prompt": 900, "output": 5}\n' * 3)
    assert command.main(["--trace", str(path), "--kv-pages", "2"]) == 0
    assert "0 requests in 0.0 s, 3 could never fit" in capsys.readouterr().out


def test_tenant_with_few_requests_is_admitted_beyond_the_limit_as_in_the_router() -> None:
    setting = Setting(speed=ONE_SECOND_STEPS, bounds=BOUNDS, concurrent=2)
    first = [Request(0.1 * i, 10, (3,), 3, tenant="a") for i in range(3)]
    measures = play(setting, *first, Request(0.5, 10, (3,), 3, tenant="b"), Request(20.0, 10, (3,), 3, tenant="a"))
    assert (measures.finished, measures.refused) == (4, 1)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("lookahead", [True, False])
def test_any_trace_is_replayed_to_its_end_with_all_tokens_and_pages_accounted(seed: int, lookahead: bool) -> None:
    rng = random.Random(seed)
    workload = Workload(requests=60, rate=30, prompt=30, output=12, longest_prompt=100, longest_output=60, chat=0.3, choices=3)
    requests = trace.generate(workload, seed)
    bounds = Bounds(pages=rng.choice((90, 150, 1000)), page_size=rng.choice((4, 16)), step_tokens=32, sequences=rng.choice((3, 20)))
    speed = Speed(0.002, 1e-4, 1e-7, 1e-6, 1e-5)
    policy = rng.choice((None, WholePrefill(32)))
    simulation = Replay(Setting(speed=speed, bounds=bounds, policy=policy, lookahead=lookahead), requests)
    measures = simulation.run()
    assert measures.finished + measures.impossible == 60
    fits = [each for each in requests if simulation.scheduler.admissible(each.prompt, each.max_new_tokens, each.choices)]
    assert measures.output_tokens == sum(sum(each.outputs) for each in fits)
    assert measures.services[ALL].itl.count == sum(sum(each.outputs) - each.choices for each in fits)
    assert measures.services[ALL].itl.percentiles((0.01,))[0] > 0
    assert sum(service.finished for service in measures.services.values()) == 2 * measures.finished
    assert simulation.shard.free == bounds.pages
    simulation.shard.audit()


def test_constants_equal_the_routers() -> None:
    """The simulator may not import the router's loop, and so has copies."""
    assert {*map(str, Priority)} == {*DELAYS}
    assert replay.LEAD == LEAD


def test_percentiles_and_mean_of_weighted_values() -> None:
    values = Values()
    for value, weight in ((3.0, 1), (1.0, 98), (2.0, 1), (9.0, 0)):
        values.add(value, weight)
    assert values.percentiles((0.5, 0.98, 0.981, 0.99, 1.0)) == [1.0, 1.0, 2.0, 2.0, 3.0]
    assert values.mean == pytest.approx(1.03)


def test_command_replays_its_own_trace_file_with_the_same_result(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--requests", "50", "--machine", "cpu-demo"]
    assert command.main([*flags, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["requests"] == {"finished": 50, "impossible": 0, "refused": 0}
    assert command.main([*flags, "--write", str(tmp_path / "trace.jsonl")]) == 0
    capsys.readouterr()
    assert command.main(["--trace", str(tmp_path / "trace.jsonl"), "--machine", "cpu-demo", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["tokens"] == summary["tokens"]
    assert command.main([*flags, "--policy", "pause", "--interactive", "0.5"]) == 0
    pause = ["--policy", "pause", "--waiting-served-ratio", "0", "--max-waiting-tokens", "0"]  # as `penstock serve` takes them
    assert command.main([*flags, *pause]) == 0
    table = capsys.readouterr().out
    assert "50 requests in" in table
    assert "interactive: " in table


def test_machine_holds_the_same_number_of_tokens_with_any_page_size() -> None:
    for size, pages in ((16, 50_000), (32, 25_000), (256, 3125), (10**9, 1)):
        options = command.make_parser().parse_args(["--page-size", str(size)])
        assert command.setting(options).bounds.pages == pages
    options = command.make_parser().parse_args(["--page-size", "32", "--kv-pages", "100"])
    assert command.setting(options).bounds.pages == 100


@pytest.mark.parametrize(
    ("flags", "expected"),
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
        (["--prompt", "9" * 400], "to reckon with, or a length too large"),
        (["--hurry", "1e-320"], "error: --poisson, --bursts or --hurry is so near to 0 that requests never come"),
        (["--write", "/dev/full"], "error: /dev/full: No space left on device"),
        (["--policy", "none"], "argument --policy/--prefill-policy: invalid choice: 'none'"),
    ],
)
def test_invalid_flags_exit_with_2_and_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], expected: str) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(flags)
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("penstock simulate: error: ")
    assert expected in line


def test_plot_without_matplotlib_is_refused_with_the_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(report.importlib, "import_module", missing)
    with pytest.raises(SystemExit):
        command.main(["--requests", "5", "--plot", "out.svg"])
    assert "pip install -e '.[bench]' in the checkout" in capsys.readouterr().err


def test_plot_that_cannot_be_drawn_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def plot(*_: object) -> None:
        raise ValueError("Format 'xyz' is not supported")

    monkeypatch.setattr(report, "plot", plot)
    monkeypatch.setattr(report, "plotter", lambda: None)
    with pytest.raises(SystemExit):
        command.main(["--requests", "5", "--plot", "out.xyz"])
    assert capsys.readouterr().err == "penstock simulate: error: --plot out.xyz: Format 'xyz' is not supported\n"


def test_file_name_that_stdout_cannot_encode_is_escaped(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "penstock.simulator", "--requests", "5", "--write", str(tmp_path / "ü")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    answer = subprocess.run(arguments, capture_output=True, text=True, timeout=60, env=environment)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "\\xfc" in answer.stdout


def test_closed_stdout_pipe_is_not_an_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    arguments = [sys.executable, "-m", "penstock.simulator", "--requests", "5"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open(write_end, "wb") as pipe:
        answer = subprocess.run(arguments, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60, env=environment)
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.parametrize(
    "interrupted",
    [
        "from penstock.simulator.replay import Replay\nReplay.run = press",
        "sys.meta_path.insert(0, types.SimpleNamespace(find_spec=lambda name, *_: press() if name.endswith('.replay') else None))",
    ],
    ids=["replay", "imports"],
)
def test_ctrl_c_ends_with_exit_code_130_and_no_traceback(interrupted: str) -> None:
    code = (
        f"import runpy, sys, types\ndef press(*_): raise KeyboardInterrupt\n{interrupted}\n"
        "runpy.run_module('penstock.simulator', run_name='__main__', alter_sys=True)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stderr) == (130, "")


def test_plot_is_written_as_svg(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert command.main(["--requests", "50", "--plot", str(tmp_path / "out.svg")]) == 0
    assert "milliseconds to the first token" in (tmp_path / "out.svg").read_text()


def test_trace_that_is_not_utf8_is_reported_with_file_and_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"arrival": 0}\n\xff')
    with pytest.raises(SystemExit):
        command.main(["--trace", str(path)])
    assert capsys.readouterr().err == f"penstock simulate: error: {path}: no UTF-8 (byte 15)\n"
