"""Figures of hand-made records, compared with hand-computed values; distributions of lengths and arrivals; parsing of
server-sent events and datasets.
"""

import itertools
import random
import statistics
from array import array
from pathlib import Path

import msgspec
import pytest

from penstock.bench import prompts
from penstock.bench.figures import Objective, duration, figures
from penstock.bench.load import Stage
from penstock.bench.protocols import AnswerState, OpenAI, SseParser, Tgi
from penstock.bench.record import Record
from penstock.bench.traffic import Arrivals, Lengths


def record(intended: float, sent: float, times: list[float], counts: list[int] | None = None, reported_tokens: int = 0) -> Record:
    """The record of an answered request."""
    answered = Record(intended, wanted=3, sent=sent, ended=times[-1] + 0.5, reads=len(times))
    answered.moments, answered.counts = array("d", times), array("l", counts or [1] * len(times))
    answered.told_tokens = reported_tokens or sum(answered.counts)
    return answered


def test_request_latencies_count_from_the_intended_start() -> None:
    answered = record(10.0, 10.5, [12.0, 13.0, 13.0, 16.0], [1, 1, 1, 2])
    assert answered.late == 0.5
    assert answered.ttft == 2.0  # from the intended start, not from when it was sent
    assert answered.e2e == 6.0
    assert answered.gaps() == [1.0, 0.0, 3.0, 0.0]  # no time between two tokens of one event
    assert answered.tpot == 1.0
    assert record(0, 0, [1.0], [3]).gaps() == [0.0, 0.0]
    assert record(0, 0, [1.0]).tpot is None


def test_stage_figures_equal_hand_computed_values() -> None:
    """Warm-up requests have no latencies, but their tokens count if they arrive within the measured time."""
    warm_up = record(0.0, 0.0, [1.0, 11.0])
    good = [record(10.0, 10.0, [11.0, 12.0, 13.0]), record(12.0, 12.0, [15.0, 16.0, 17.0])]
    slow = record(13.0, 13.0, [14.0, 19.0, 30.0])
    failed = Record(14.0, sent=14.0, ended=15.0, error="cut", detail="why")
    counted = [*good, slow, failed]
    stage = Stage("rate", 2.0, began=10.0, closed=20.0, ended=40.0, records=[warm_up, *counted], counted=counted)
    found = figures(stage, Objective.parse("ttft=2s,itl=6s"))
    assert found["seconds"] == 10.0
    assert found["requests"] == {"sent": 5, "counted": 4, "answered": 3, "failed": 1}
    assert found["errors"] == {"cut": 1}
    assert found["error_examples"] == {"cut": "why"}
    assert found["ttft"]["mean"] == pytest.approx((1 + 3 + 1) / 3)
    assert found["ttft"]["p50"] == 1.0
    assert found["ttft"]["p90"] == pytest.approx(1 + 0.8 * 2)  # linear between the second and the third
    assert found["itl"]["p50"] == statistics.median([1, 1, 1, 1, 5, 11])
    assert found["itl"]["most"] == 11.0
    assert found["output_tokens_per_second"] == (1 + 3 + 3 + 2) / 10
    assert (
        found["requests_per_second"] == 3 / 10
    )  # the warm-up request ended in the measured time, too; one of the counted ones ended later
    assert found["goodput"]["requests_per_second"] == 1 / 10
    assert found["goodput"]["share"] == 1 / 4  # one had a late first token, one a gap of 11 s, one failed
    assert found["in_flight"] == pytest.approx((1.5 + 3.5 + 5.5 + 7 + 1) / 10)
    assert found["tokens_by_second"] == [0, 2, 1, 1, 1, 1, 1, 1, 0, 1]


def test_tokens_without_events_are_spread_over_the_answers_time() -> None:
    """Half of the events came in the measured time, so half of the tokens without events count."""
    answered = record(0.0, 0.0, [1.0, 2.0, 11.0, 12.0], reported_tokens=40)
    assert answered.uncounted == 36
    stage = Stage("concurrency", 1.0, began=0.0, closed=10.0, ended=13.0, records=[answered], counted=[answered])
    found = figures(stage, None)
    assert found["output_tokens_per_second"] == 2.0
    assert found["tpot"]["mean"] == 11 / 39
    assert "40 tokens came in 4 events" in found["warnings"][0]


def test_objectives_with_units_are_parsed_and_checked() -> None:
    answered = record(0.0, 0.0, [1.0, 1.1, 1.2])
    for text, met in (("ttft=1s", True), ("ttft=999ms", False), ("itl=150ms", True), ("itl=50ms", False), ("e2e=1.1s", False)):
        assert Objective.parse(text).kept(answered) is met, text
    assert Objective.parse("tpot=1ms").kept(record(0.0, 0.0, [1.0]))  # a single token has no time per output token
    assert not Objective.parse("e2e=9s").kept(Record(0.0, error="cut"))
    assert duration("250us") == pytest.approx(250e-6)


def test_arrival_times_follow_the_given_distribution() -> None:
    rng = random.Random(1)
    poisson = list(itertools.islice(Arrivals.parse("poisson").moments(5.0, rng), 20_000))
    gaps = [after - before for before, after in itertools.pairwise(poisson)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)  # equals the mean: an exponential distribution
    assert list(itertools.islice(Arrivals.parse("constant").moments(4.0, rng), 4)) == [0.25, 0.5, 0.75, 1.0]
    bursts = list(itertools.islice(Arrivals.parse("burst:4").moments(5.0, rng), 20_000))
    assert all(len(set(bursts[index : index + 4])) == 1 for index in range(0, 20_000, 4))
    assert bursts[-1] / len(bursts) == pytest.approx(0.2, rel=0.05)


def test_lengths_are_drawn_from_the_given_distribution() -> None:
    rng = random.Random(1)
    assert Lengths.parse("128").draw(rng) == 128
    lengths = [Lengths.parse("uniform:3,5").draw(rng) for _ in range(300)]
    assert set(lengths) == {3, 4, 5}
    lognormal = Lengths.parse("lognormal:200,0.6")
    lengths = [lognormal.draw(rng) for _ in range(20_000)]
    assert statistics.median(lengths) == pytest.approx(200, rel=0.03)
    assert statistics.mean(lengths) == pytest.approx(200 * 2.718281828 ** (0.6**2 / 2), rel=0.03)
    assert str(lognormal) == "lognormal:200,0.6"


def test_sse_events_are_the_same_however_the_bytes_are_split() -> None:
    """Split into pieces of every size."""
    text = b"data: one\n\n: comment\n\ndata:two\r\n\r\nevent: x\ndata: thr\ndata: ee\n\n\n\ndata: [DONE]\n\n"
    for size in range(1, len(text) + 1):
        parser = SseParser()
        found = [payload for start in range(0, len(text), size) for payload in parser.feed(text[start : start + size])]
        assert found == [b"one", b"two", b"thr\nee", b"[DONE]"], size


@pytest.mark.parametrize(
    ("payload", "begun", "tokens"),
    [
        (b'{"choices":[{"delta":{"role":"assistant","content":""}}]}', False, 0),  # the role, before any token
        (b'{"choices":[{"delta":{"role":"assistant","content":"a"}}]}', False, 1),  # TGI and others repeat the role
        (b'{"choices":[{"delta":{"role":"assistant","content":""}}]}', True, 1),
        (b'{"choices":[{"delta":{"content":""},"finish_reason":null}]}', True, 1),  # part of a character
        (b'{"choices":[{"delta":{"reasoning_content":"hm"}}]}', False, 1),
        (b'{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}', False, 1),
        (b'{"choices":[{"delta":{},"finish_reason":"stop"}]}', True, -1),
        (b'{"choices":[{"text":"","finish_reason":"length"}]}', True, -1),
        (b'{"choices":[{"text":"end","finish_reason":"length"}]}', True, 1),
        (b'{"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":7}}', True, 0),
        (b"[DONE]", True, 0),
    ],
)
def test_events_are_counted_as_tokens(payload: bytes, begun: bool, tokens: int) -> None:
    assert OpenAI(True, True, False).read(payload, AnswerState(), begun) == tokens


@pytest.mark.parametrize("count", ["-5", "99999999999999999999", "9000000000000000000"])
def test_impossible_token_counts_are_no_events(count: str) -> None:
    usage = f'{{"prompt_tokens":4,"completion_tokens":{count}}}'
    event = '{"choices":[{"delta":{"content":"x"}}],"usage":' + usage + "}"
    with pytest.raises(msgspec.MsgspecError):
        OpenAI(True, True, False).read(event.encode(), AnswerState(), False)


def test_usage_in_events_overrides_the_count_of_events() -> None:
    api, state = OpenAI(True, True, True), AnswerState()
    event = '{"choices":[{"delta":{"content":"x"}}],"usage":{"prompt_tokens":4,"completion_tokens":%d}}'
    assert [api.read((event % count).encode(), state, count > 3) for count in (3, 3, 4)] == [3, 0, 1]
    assert (state.output_tokens, state.prompt_tokens) == (4, 4)


def test_usage_that_comes_before_and_after_all_tokens_is_not_counted_as_theirs() -> None:
    api, state = OpenAI(True, True, False), AnswerState()
    events = [
        '{"choices":[{"delta":{"role":"assistant"}}],"usage":{"prompt_tokens":4,"completion_tokens":0}}',
        '{"choices":[{"delta":{"content":"x"}}]}',
        '{"choices":[{"delta":{"content":"y"}}]}',
        '{"choices":[{"delta":{},"finish_reason":"stop"}],"usage":{"prompt_tokens":4,"completion_tokens":2}}',
    ]
    assert [api.read(event.encode(), state, index > 1) for index, event in enumerate(events)] == [0, 1, 1, -1]
    assert (state.output_tokens, state.prompt_tokens) == (2, 4)


def test_tgi_events_are_parsed() -> None:
    api, state = Tgi(), AnswerState()
    assert api.read(b'{"index":1,"token":{"id":5,"text":"a"},"generated_text":null,"details":null}', state, False) == 1
    assert not state.finished
    last = b'{"token":{"id":5},"generated_text":"ab","details":{"generated_tokens":2,"input_length":9}}'
    assert api.read(last, state, True) == 1
    assert (state.finished, state.output_tokens, state.prompt_tokens) == (True, 2, 9)
    assert api.read(b'{"error":"overloaded","error_type":"overloaded"}', state, True) == 0
    assert state.error == "overloaded"


@pytest.mark.parametrize("text", ['{"prompt": 5}', "[1]", "", "{nonsense", '{"prompt": "a", "output_tokens": 0}'])
def test_invalid_dataset_is_refused_with_its_file_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"prompts\.jsonl"):
        prompts.read(path, None, 64)


def test_dataset_rows_are_read_as_prompts_and_chats(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = ['{"prompt": "a b", "output_tokens": 9}', "", '{"messages": [{"role": "user", "content": "c"}], "max_tokens": 3}']
    path.write_text("\n".join(rows))
    (first, _), (second, _) = prompts.read(path, None, 64).rows
    assert (first.text, first.output, first.chat()) == ("a b", 9, [{"role": "user", "content": "a b"}])
    assert (second.text, second.output, second.chat()) == ("c", 3, [{"role": "user", "content": "c"}])
