"""Figures of records that are made by hand, against arithmetic that is done by hand; lengths, arrivals, events of the wire."""

import itertools
import random
import statistics
from array import array
from pathlib import Path

import pytest

from penstock.bench import prompts
from penstock.bench.figures import Objective, duration, figures
from penstock.bench.load import Stage
from penstock.bench.protocols import AnswerState, OpenAI, SseParser, Tgi
from penstock.bench.record import Record
from penstock.bench.traffic import Arrivals, Lengths


def record(intended: float, sent: float, moments: list[float], counts: list[int] | None = None, told: int = 0) -> Record:
    """One that was answered."""
    made = Record(intended, wanted=3, sent=sent, ended=moments[-1] + 0.5, reads=len(moments))
    made.moments, made.counts = array("d", moments), array("l", counts or [1] * len(moments))
    made.told_tokens = told or sum(made.counts)
    return made


def test_latencies_of_a_request() -> None:
    one = record(10.0, 10.5, [12.0, 13.0, 13.0, 16.0], [1, 1, 1, 2])
    assert one.late == 0.5
    assert one.ttft == 2.0  # from when it was due, not from when it was sent
    assert one.e2e == 6.0
    assert one.gaps() == [1.0, 0.0, 3.0, 0.0]  # two tokens of an event have nothing between them
    assert one.tpot == 1.0
    assert record(0, 0, [1.0], [3]).gaps() == [0.0, 0.0]
    assert record(0, 0, [1.0]).tpot is None


def test_figures_of_a_stage() -> None:
    """Warm-up requests have no latency, but their tokens count while they come in the time that is measured."""
    warm = record(0.0, 0.0, [1.0, 11.0])
    good = [record(10.0, 10.0, [11.0, 12.0, 13.0]), record(12.0, 12.0, [15.0, 16.0, 17.0])]
    late = record(13.0, 13.0, [14.0, 19.0, 30.0])
    lost = Record(14.0, sent=14.0, ended=15.0, error="cut", detail="why")
    counted = [*good, late, lost]
    stage = Stage("rate", 2.0, began=10.0, closed=20.0, ended=40.0, records=[warm, *counted], counted=counted)
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
    assert found["requests_per_second"] == 3 / 10  # the warm one ended in that time, too; one of the counted later
    assert found["goodput"]["requests_per_second"] == 1 / 10
    assert found["goodput"]["share"] == 1 / 4  # one was late, one had a gap of 11 s, one was lost
    assert found["in_flight"] == pytest.approx((1.5 + 3.5 + 5.5 + 7 + 1) / 10)
    assert found["tokens_by_second"] == [0, 2, 1, 1, 1, 1, 1, 1, 0, 1]


def test_tokens_that_no_event_showed() -> None:
    """Half of them came in the time that is measured, so half of the hidden ones did."""
    one = record(0.0, 0.0, [1.0, 2.0, 11.0, 12.0], told=40)
    assert one.uncounted == 36
    stage = Stage("concurrency", 1.0, began=0.0, closed=10.0, ended=13.0, records=[one], counted=[one])
    found = figures(stage, None)
    assert found["output_tokens_per_second"] == 2.0
    assert found["tpot"]["mean"] == 11 / 39
    assert "40 tokens came in 4 events" in found["warnings"][0]


def test_objectives() -> None:
    one = record(0.0, 0.0, [1.0, 1.1, 1.2])
    for text, kept in (("ttft=1s", True), ("ttft=999ms", False), ("itl=150ms", True), ("itl=50ms", False), ("e2e=1.1s", False)):
        assert Objective.parse(text).kept(one) is kept, text
    assert Objective.parse("tpot=1ms").kept(record(0.0, 0.0, [1.0]))  # one token has no pace
    assert not Objective.parse("e2e=9s").kept(Record(0.0, error="cut"))
    assert duration("250us") == pytest.approx(250e-6)


def test_arrivals() -> None:
    dice = random.Random(1)
    poisson = list(itertools.islice(Arrivals.parse("poisson").moments(5.0, dice), 20_000))
    gaps = [after - before for before, after in itertools.pairwise(poisson)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)  # as long as the mean: nothing tells when the next comes
    assert list(itertools.islice(Arrivals.parse("constant").moments(4.0, dice), 4)) == [0.25, 0.5, 0.75, 1.0]
    bursts = list(itertools.islice(Arrivals.parse("burst:4").moments(5.0, dice), 20_000))
    assert all(len(set(bursts[index : index + 4])) == 1 for index in range(0, 20_000, 4))
    assert bursts[-1] / len(bursts) == pytest.approx(0.2, rel=0.05)


def test_lengths() -> None:
    dice = random.Random(1)
    assert Lengths.parse("128").draw(dice) == 128
    drawn = [Lengths.parse("uniform:3,5").draw(dice) for _ in range(300)]
    assert set(drawn) == {3, 4, 5}
    lognormal = Lengths.parse("lognormal:200,0.6")
    drawn = [lognormal.draw(dice) for _ in range(20_000)]
    assert statistics.median(drawn) == pytest.approx(200, rel=0.03)
    assert statistics.mean(drawn) == pytest.approx(200 * 2.718281828 ** (0.6**2 / 2), rel=0.03)
    assert str(lognormal) == "lognormal:200,0.6"


def test_events_in_any_pieces() -> None:
    """However the bytes are cut, the same events come."""
    text = b"data: one\n\n: comment\n\ndata:two\r\n\r\nevent: x\ndata: thr\ndata: ee\n\n\n\ndata: [DONE]\n\n"
    for size in range(1, len(text) + 1):
        lines = SseParser()
        found = [payload for at in range(0, len(text), size) for payload in lines.feed(text[at : at + size])]
        assert found == [b"one", b"two", b"thr\nee", b"[DONE]"], size


@pytest.mark.parametrize(
    ("payload", "begun", "tokens"),
    [
        (b'{"choices":[{"delta":{"role":"assistant","content":""}}]}', False, 0),  # the role, before anything
        (b'{"choices":[{"delta":{"role":"assistant","content":"a"}}]}', False, 1),  # TGI and others repeat it
        (b'{"choices":[{"delta":{"role":"assistant","content":""}}]}', True, 1),
        (b'{"choices":[{"delta":{"content":""},"finish_reason":null}]}', True, 1),  # a part of a character
        (b'{"choices":[{"delta":{"reasoning_content":"hm"}}]}', False, 1),
        (b'{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}', False, 1),
        (b'{"choices":[{"delta":{},"finish_reason":"stop"}]}', True, -1),
        (b'{"choices":[{"text":"","finish_reason":"length"}]}', True, -1),
        (b'{"choices":[{"text":"end","finish_reason":"length"}]}', True, 1),
        (b'{"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":7}}', True, 0),
        (b"[DONE]", True, 0),
    ],
)
def test_which_events_are_tokens(payload: bytes, begun: bool, tokens: int) -> None:
    assert OpenAI(True, True, False).read(payload, AnswerState(), begun) == tokens


def test_what_usage_says_wins() -> None:
    api, told = OpenAI(True, True, True), AnswerState()
    event = '{"choices":[{"delta":{"content":"x"}}],"usage":{"prompt_tokens":4,"completion_tokens":%d}}'
    assert [api.read((event % count).encode(), told, True) for count in (0, 3, 3, 4)] == [0, 3, 0, 1]
    assert (told.output_tokens, told.prompt_tokens) == (4, 4)


def test_events_of_tgi() -> None:
    api, told = Tgi(), AnswerState()
    assert api.read(b'{"index":1,"token":{"id":5,"text":"a"},"generated_text":null,"details":null}', told, False) == 1
    assert not told.finished
    last = b'{"token":{"id":5},"generated_text":"ab","details":{"generated_tokens":2,"input_length":9}}'
    assert api.read(last, told, True) == 1
    assert (told.finished, told.output_tokens, told.prompt_tokens) == (True, 2, 9)
    assert api.read(b'{"error":"overloaded","error_type":"overloaded"}', told, True) == 0
    assert told.error == "overloaded"


@pytest.mark.parametrize("text", ['{"prompt": 5}', "[1]", "", "{nonsense", '{"prompt": "a", "output_tokens": 0}'])
def test_files_that_are_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"prompts\.jsonl"):
        prompts.read(path, None, 64)


def test_rows_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = ['{"prompt": "a b", "output_tokens": 9}', "", '{"messages": [{"role": "user", "content": "c"}], "max_tokens": 3}']
    path.write_text("\n".join(rows))
    (first, _), (second, _) = prompts.read(path, None, 64).rows
    assert (first.text, first.output, first.chat()) == ("a b", 9, [{"role": "user", "content": "a b"}])
    assert (second.text, second.output, second.chat()) == ("c", 3, [{"role": "user", "content": "c"}])
