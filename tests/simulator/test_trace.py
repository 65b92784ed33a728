"""Traces of requests: generated reproducibly from a seed with the requested statistics, written and read, in our and in public
formats.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.simulator import trace
from penstock.simulator.trace import Request, Workload

MIXED_WORKLOAD = Workload(
    requests=400, rate=10, chat=0.5, think=1, system_prompts=3, system_tokens=40, choices=4, interactive=0.3, batch=0.2, tenants=3
)


def test_same_seed_generates_the_same_trace() -> None:
    assert trace.generate(MIXED_WORKLOAD, 5) == trace.generate(MIXED_WORKLOAD, 5)
    assert trace.generate(MIXED_WORKLOAD, 5) != trace.generate(MIXED_WORKLOAD, 6)


def test_generator_gives_the_recorded_requests_for_seed_0() -> None:
    """Figures in reports stay comparable only if the generator never changes."""
    first, second = trace.generate(Workload(requests=2), 0)
    assert (first.arrival, first.prompt, first.outputs, first.max_new_tokens) == (0.465152, 213, (131,), 256)
    assert (second.arrival, second.prompt, second.outputs, second.max_new_tokens) == (0.555506, 1214, (129,), 256)


def test_generated_trace_matches_its_workload() -> None:
    requests = trace.generate(Workload(requests=4000, rate=20, prompt=300, output=60, interactive=0.25, batch=0.5), 1)
    assert requests[-1].arrival == pytest.approx(200, rel=0.1)
    assert statistics.median(each.prompt for each in requests) == pytest.approx(300, rel=0.1)
    assert statistics.median(each.outputs[0] for each in requests) == pytest.approx(60, rel=0.1)
    shares = {priority: sum(each.priority == priority for each in requests) / 4000 for priority in trace.PRIORITIES}
    assert shares == pytest.approx({"interactive": 0.25, "normal": 0.25, "batch": 0.5}, abs=0.03)
    assert all(max(each.outputs) <= each.max_new_tokens for each in requests)


def test_bursts_and_waves_have_the_given_variation_and_period() -> None:
    def variation(workload: Workload) -> float:
        times = [each.arrival for each in trace.generate(workload, 2)]
        gaps = [after - before for before, after in itertools.pairwise(times)]
        return statistics.stdev(gaps) / statistics.mean(gaps)

    assert variation(Workload(requests=4000)) == pytest.approx(1, rel=0.15)
    assert variation(Workload(requests=4000, burstiness=3)) == pytest.approx(3, rel=0.25)
    waves = trace.generate(Workload(requests=1000, rate=10, wave=20), 2)
    assert all(each.arrival % 20 < 10.001 for each in waves)
    assert waves[-1].arrival == pytest.approx(100, rel=0.15)


def test_each_request_begins_with_one_of_the_system_prompts() -> None:
    requests = trace.generate(MIXED_WORKLOAD, 3)
    assert {each.prefix[0] for each in requests} == {(f"system {number}", 40) for number in range(3)}
    assert all(each.prompt > 40 for each in requests)


def test_chat_turns_begin_with_the_previous_turn() -> None:
    requests = trace.generate(MIXED_WORKLOAD, 3)
    last: dict[str, Request] = {}
    turns = 0
    for each in requests:
        if each.choices == 1:
            name, end = each.prefix[-1]
            assert end == each.prompt + each.outputs[0]
            if name in last:
                turns += 1
                assert each.prompt > last[name].prompt + last[name].outputs[0]
                assert each.arrival >= last[name].arrival + 1
                assert each.prefix[:-1] == last[name].prefix[:-1]
            last[name] = each
    assert turns > 100


def test_written_trace_is_read_back(tmp_path: Path) -> None:
    requests = trace.generate(MIXED_WORKLOAD, 4)
    trace.write(requests, tmp_path / "trace.jsonl")
    again = trace.read(tmp_path / "trace.jsonl")
    begin = requests[0].arrival
    assert [dataclasses.replace(each, arrival=0) for each in again] == [dataclasses.replace(each, arrival=0) for each in requests]
    assert [each.arrival for each in again] == pytest.approx([each.arrival - begin for each in requests])


def test_azure_and_mooncake_traces_are_read(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:05.4799600,396,109\n"
    )
    assert trace.read(azure) == [Request(0.0, 374, (44,), 44), Request(pytest.approx(1.5), 396, (109,), 109)]
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text(
        '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [46, 47]}\n'
        '{"timestamp": 2000, "input_length": 512, "output_length": 7, "hash_ids": [46]}\n'
    )
    assert trace.read(mooncake) == [
        Request(0.0, 512, (7,), 7, prefix=(("46", 512),)),
        Request(1.0, 600, (5,), 5, prefix=(("46", 512), ("47", 600))),
    ]


@pytest.fixture
def berlin_time_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("berlin_time_zone")
def test_trace_times_do_not_depend_on_the_time_zone(tmp_path: Path) -> None:
    """Azure's times have no time zone. In Berlin the hour between these two was skipped for daylight saving time."""
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-03-31 01:59:59,3,4\n2024-03-31 03:00:01,3,4\n")
    assert [each.arrival for each in trace.read(path)] == [0.0, 3602.0]


def test_lengths_are_read_as_whole_numbers_of_at_least_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 0, "output_length": 0}\n')
    assert trace.read(path) == [Request(0.0, 1, (1,), 1)]
    path.write_text('{"arrival": 0, "prompt": 3, "output": [2.5, 3]}\n')
    [request] = trace.read(path)
    assert request.outputs == (2, 3)
    assert all(isinstance(tokens, int) for tokens in request.outputs)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting property name"),
        ("[]", "line 2: "),
        ('{"prompt": 3, "output": 2}', "line 2: 'arrival' is missing"),
        ('{"arrival": 1, "prompt": 0, "output": 2}', "line 2: prompt, output and choices are at least 1"),
        ('{"arrival": 1, "prompt": 3, "output": 2, "max_new_tokens": 1}', "output at most max_new_tokens"),
        ('{"arrival": 1, "prompt": 3, "output": [2, 2], "choices": 3}', "2 outputs for 3 choices"),
        ('{"arrival": 1, "prompt": 3, "output": 2, "priority": "high"}', "priority high: expected interactive, normal, batch"),
        ('{"arrival": NaN, "prompt": 3, "output": 2}', "line 2: it arrives at nan"),
        ('{"arrival": 1e999, "prompt": 3, "output": 2}', "line 2: it arrives at inf"),
        ('{"timestamp": NaN, "input_length": 3, "output_length": 2}', "line 2: it arrives at nan"),
        ('{"arrival": 1, "prompt": 1e999, "output": 2}', "line 2: cannot convert float infinity to integer"),
        ('{"arrival": 1, "prompt": 3, "output": [0.5, 2]}', "line 2: prompt, output and choices are at least 1"),
        ("[" * 100_000, "line 2: "),
    ],
)
def test_invalid_line_is_reported_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 1, "prompt": 3, "output": 2}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 2") as caught:
        trace.read(path)
    assert message in str(caught.value)


def test_csv_field_that_is_too_long_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{'1' * 200_000},1,1\n")
    with pytest.raises(ValueError, match="field larger than field limit"):
        trace.read(path)
