"""The GPU benchmark without a GPU, in Triton's interpreter and on tiny shapes; and its verdicts, reports, timing and time
limits.
"""

import json
import math
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from penstock.benchmarks import (
    gpu,
    gpu_busy,
    gpu_checks,
    gpu_checks_layers,
    gpu_comparisons,
    gpu_measure,
    gpu_model,
    gpu_report,
    gpu_worlds,
)
from penstock.benchmarks.gpu_report import Line, failed, timing
from penstock.kernels import operations
from penstock.kernels.attention import Row
from penstock.shard.decoding.sampler import Pick

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.timeout(300)  # 35 s of one core, which other tests may use as well
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be measured itself")
def test_correctness_section_passes_from_the_command_line(tmp_path: Path) -> None:
    numbers, tables = tmp_path / "numbers.json", tmp_path / "tables.md"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--only", "correctness"]
    command += ["--json", str(numbers), "--markdown", str(tables)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in json.loads(numbers.read_text())["lines"] if line["section"] == "correctness"]
    assert len(lines) >= 14
    assert {line["verdict"] for line in lines} == {"met"}
    assert "### correctness" in tables.read_text()


def test_wrong_kernel_is_reported_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Line] = []
    bench = gpu_measure.Bench(torch.device("cpu"), True, lines.append)
    norms = {"norms": partial(gpu_checks_layers.elementwise, dtype=torch.float32), "broken": lambda b, c: 1 / 0}
    monkeypatch.setattr(gpu_checks, "checks", lambda b: norms)
    gpu_checks.measure(bench, 1)
    correct = operations.rms_norm
    monkeypatch.setattr(operations, "rms_norm", lambda x, weight, epsilon: correct(x, weight, 2 * epsilon + 0.01))
    gpu_checks.measure(bench, 1)
    assert [line.verdict for line in lines] == ["met", "not measured", "WRONG", "not measured"]
    assert gpu_report.sum_up(lines) == 1
    assert "ZeroDivisionError" in lines[1].note


def test_hanging_check_is_reported_and_the_others_continue() -> None:
    class Results:
        def next(self, timeout: float) -> Line:
            assert 1 <= timeout <= gpu_checks.PATIENCE
            if not finished:
                raise multiprocessing.TimeoutError
            return Line(section="", what=finished.pop(), ratio=0.1, goal=1.0, most=True, check=True)

    lines: list[Line] = []
    finished = ["c", "b"]
    gpu_checks.gather(gpu_measure.Bench(torch.device("cpu"), True, lines.append, 0.0), Results(), ["a", "b", "c", "d"])
    assert [(line.what, line.verdict) for line in lines] == [
        ("b", "met"), ("c", "met"), ("a", "not measured"), ("d", "not measured")
    ]  # fmt: skip
    assert gpu_report.wrong(lines) == lines[2:]


def test_no_section_gets_more_than_the_remaining_time() -> None:
    names = [*gpu.USUAL]
    assert gpu.times(names, 570) == (
        pytest.approx(570 * gpu.SECTIONS["ceilings"].share),
        pytest.approx(570 * gpu.SECTIONS["ceilings"].share + 60),
    )
    assert gpu.times(["server"], 200) == (200, 215)
    for remaining in (300, 30, 0, -40):
        for i in range(len(names)):
            seconds, patience = gpu.times(names[i:], remaining)
            assert 0 <= seconds <= max(0, remaining)
            assert patience <= remaining + gpu.SLACK
    assert gpu.times(names, 4)[1] < gpu.LEAST  # the section is not started


def test_sections_without_remaining_time_are_skipped_except_the_ceilings() -> None:
    """All others need the ceilings (`whole`)."""
    calls: list[bool] = []
    bench = gpu_measure.Bench(torch.device("cpu"), True, print, 0.0)
    bench.each("", [lambda bench: calls.append(False)])
    bench.each("", [lambda bench: calls.append(True)] * 2, whole=True)
    assert calls == [True, True]


def test_nan_is_never_within_the_tolerance() -> None:
    assert gpu_comparisons.error(torch.tensor([1.0, math.nan]), torch.ones(2), 0.1) == math.inf
    assert gpu_comparisons.error(torch.tensor([1.1]), torch.tensor([1.0]), 0.1) == pytest.approx(0.5, rel=1e-5)
    assert Line(section="", what="", ratio=math.nan, goal=1.0, most=True, check=True).verdict == "WRONG"


@pytest.mark.parametrize(
    ("ratio", "most", "verdict"), [(0.93, False, "met"), (0.91, False, "missed"), (0.91, True, "met"), (0.93, True, "missed")]
)
def test_verdict_follows_from_ratio_and_goal(ratio: float, most: bool, verdict: str) -> None:
    assert Line(section="s", what="w", ratio=ratio, goal=0.92, most=most).verdict == verdict


def test_report_tables_and_json_have_all_lines(tmp_path: Path) -> None:
    timed = timing([3e-6, 1e-6, 2e-6, 9e-6], "eager")
    assert (timed.low, timed.high, timed.count) == (1e-6, 9e-6, 4)
    assert timed.seconds == pytest.approx(2.5e-6)
    lines = [
        Line(section="a", what="b", timing=timed, ratio=0.5, against="of c", goal=0.92),
        failed("a", "peer", "not installed", 1.0),
        Line(section="d", what="e", value=math.nan),
    ]
    table = gpu_report.table(lines)
    assert "2.5 us (1.0 us..9.0 us, 4)" in table
    assert "not installed" in table
    assert gpu_report.markdown(lines, "t").count("\n### ") == 2
    gpu_report.save(tmp_path / "x", lines, {"device": "none"})
    found = json.loads((tmp_path / "x").read_text())
    assert [line["verdict"] for line in found["lines"]] == ["missed", "not measured", ""]
    assert found["lines"][2]["value"] is None


def test_digest_shows_missed_and_wrong_lines_within_its_size_limit() -> None:
    """Only the last 12,000 characters of an output may be seen: the digest fits, however many lines there are."""
    timed = timing([3e-6], "graph")
    others = [Line(section="a", what=f"number {i}", timing=timed, value=1e6, unit="GB/s", note="x" * 200) for i in range(400)]
    missed = Line(section="b", what="slow", timing=timed, ratio=0.5, against="of c", goal=0.92)
    checks = [
        Line(section="c", what="right", ratio=0.1, goal=1.0, most=True, check=True),
        failed("c", "hung", "no", 1.0, check=True),
    ]
    found = gpu_report.digest([*others, missed, *checks], {"device": "H100"})
    assert 9000 < len(found) <= gpu_report.ROOM
    assert found.splitlines()[:3] == ["device H100", "missed, b:", "  slow: 3.0 us 0.500 of c >= 0.92"]
    assert found.splitlines()[-1].endswith("lines more, in the table")
    assert "hung" not in found  # it is reported as wrong
    assert gpu_report.digest([missed], {}).splitlines() == ["", "missed, b:", "  slow: 3.0 us 0.500 of c >= 0.92"]


def test_bytes_and_operations_of_attention_are_counted() -> None:
    """Shared pages count once, unfilled slots don't count, and a causal prompt is half a square."""
    shape = gpu_worlds.Shape(kv_heads=1, ratio=2, size=64, page_size=16)
    device = torch.device("cpu")
    world = gpu_worlds.World(shape, [Row(1, 39, ()), Row(1, 34, ())], 2, device, shared=32)
    assert world.bytes == (32 + 8 + 3) * 2 * 64 * 2 + 2 * (2 * 2 * 64 * 2)
    assert world.operations == 4 * 2 * 64 * (40 + 35)
    assert len({page for rows in world.rows for row in rows for page in row.pages}) == 2 * (2 + 1 + 1)
    assert gpu_worlds.World(shape, [Row(10, 0, ())], 1, device).operations == 4 * 2 * 64 * 55
    assert gpu_worlds.World(shape, [Row(3, 7, (), [-1, 0, 0])], 1, device).operations == 4 * 2 * 64 * (3 * 7 + 1 + 2 + 2)


def test_comparison_of_texts_ends_at_a_near_tie() -> None:
    def pick(token: int, top: tuple[tuple[int, float], ...] = ()) -> Pick:
        return Pick(token, -1.0, top)

    expected = [pick(1), pick(2, ((2, -1.0), (5, -1.05))), pick(3)]
    assert gpu_model.compare([expected], [expected], 0.1) == (0, 0, 3)
    assert gpu_model.compare([[pick(1), pick(5), pick(9)]], [expected], 0.1) == (
        0,
        1,
        2,
    )  # the tokens after a near tie are not compared
    assert gpu_model.compare([[pick(1), pick(5), pick(9)]], [expected], 0.01) == (1, 0, 2)
    assert gpu_model.compare([[pick(1), pick(6)]], [expected[:2]], 0.1) == (1, 0, 2)


def test_graph_is_recaptured_with_more_calls_until_it_can_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of 10 us takes 100 us if it is launched alone: the first graph has too few calls, and is captured again with more."""

    class Graph:
        def __init__(self, calls: int) -> None:
            self.calls = calls

        def replay(self) -> None:
            replayed.append(self.calls)

        def reset(self) -> None:
            pass

    def once(calls: list[Callable[[], None]], before: Callable[[], None]) -> float:
        before()
        for call in calls:
            call()
        return replayed[-1] * 10e-6

    replayed: list[int] = []
    monkeypatch.setattr(gpu_measure, "_captured", lambda calls, rounds: Graph(len(calls) * rounds))
    monkeypatch.setattr(gpu_measure, "_once", once)
    bench = gpu_measure.Bench(torch.device("cpu"), True, print)
    timed = bench._by_graph([lambda: None] * 2, 100e-6)
    assert timed.way == "graph"
    assert timed.seconds == pytest.approx(10e-6)
    assert replayed[0] == 30
    assert replayed[-1] == 300
    assert timed.count == gpu_measure.MOST


class FakeMachine:
    """A device and a host with a manual clock. Launched work starts after all work that was launched before."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.device_free_at = self.now  # when the device has finished all work

    def perf_counter(self) -> float:
        return self.now

    def launch(self, seconds: float) -> None:
        self.device_free_at = max(self.device_free_at, self.now) + seconds

    def moment(self) -> "FakeEvent":
        self.launch(0.0)
        return FakeEvent(self, self.device_free_at)


@dataclass
class FakeEvent:
    machine: FakeMachine
    at: float

    def until(self, other: "FakeEvent") -> float:
        return other.at - self.at

    def wait(self) -> None:
        """Other threads run for 10 us before this one continues."""
        self.machine.now = max(self.machine.now, self.at) + 1e-5


@pytest.mark.parametrize("late", [*gpu_busy.LATE, "nobody"])
def test_busy_reports_which_part_was_late(monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    """Also if the device is working when the first event is recorded."""
    machine = FakeMachine()
    monkeypatch.setattr(gpu_busy, "time", machine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    busy = gpu_busy.Busy(machine.moment)
    machine.launch(0.013)
    busy.reset()
    for _ in range(4):
        for part_name, part in (("a command", busy.ask), ("a plan", busy.begin), ("sampling", lambda: busy.go_on(2))):
            if part_name == late:
                machine.now = machine.device_free_at + 0.002
            part()
            if part_name == "a plan":
                machine.launch(0.010)
                busy.go_on(1)
        machine.launch(0.001)
        busy.go_on(3)
    found = busy.read()
    assert found["busy"] == pytest.approx([0.011] * 4)
    assert found["gaps"] == pytest.approx([0.0 if late == "nobody" else 0.002] * 3)
    for name in gpu_busy.LATE:
        assert found[name] == pytest.approx([0.002 if name == late else 0.0] * 3, abs=1e-4)
