"""Whatever comes by the wire, the shard lives: what no shard can execute is refused, and what is only unusual is answered."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.proto import shard_pb2 as wire
from penstock.shard.checks import LAST, MOST_CHOICES
from penstock.tests.shard import configurations
from penstock.tests.shard.test_service import WARMUP, Process

MOST = (1 << 32) - 1
BEAMS: dict[str, Any] = {"beams": wire.Beams(width=2)}


def beam(**more: Any) -> wire.Continuation:
    """Of one that goes on, as it should be."""
    return wire.Continuation(**{"tokens": [3, 4], "score": -1.5, "logprobs": [-0.5, -1]} | more)


def group(**fields: Any) -> wire.Command:
    """A request for one group."""
    one = wire.Group(**{"uid": 1, "tokens": [5, 6, 7, 8, 9], "max_new_tokens": 4} | fields)
    return prefill(batch=1, groups=[one], chunk_uids=[one.uid], chunk_lengths=[9], prompt_tokens=99)


def sampling(**fields: Any) -> wire.Command:
    return group(sampling=wire.Sampling(**fields))


def beams(*continuations: wire.Continuation, top_n: int = 0, **fields: Any) -> wire.Command:
    return group(beams=wire.Beams(**{"width": 2} | fields), continuations=continuations, top_n=top_n)


def prefill(**fields: Any) -> wire.Command:
    return wire.Command(prefill=wire.PrefillRequest(**fields))


def decode(**allowance: Any) -> wire.Command:
    usual: dict[str, Any] = {"step_seconds": 0.01, "draft_seconds": 0.001, "most": 9}
    return wire.Command(decode=wire.DecodeRequest(batches=[1, 2], allowance=wire.Allowance(**usual | allowance)))


REFUSED: dict[str, tuple[wire.Command, str]] = {
    "last step": (wire.Command(decode=wire.DecodeRequest(step=LAST)), "leaves none for the next"),
    "last step of all": (wire.Command(clear_cache=wire.ClearCacheRequest(step=LAST)), "leaves none for the next"),
    "chunks without lengths": (prefill(chunk_uids=[1, 2], chunk_lengths=[3]), "chunk_uids has 2 values and chunk_lengths has 1"),
    "lengths without chunks": (prefill(chunk_lengths=[3]), "chunk_uids has 0 values and chunk_lengths has 1"),
    "ends": (wire.Command(filter=wire.FilterRequest(end_uids=[1])), "end_uids has 1 values and end_choices has 0"),
    "needs": (decode(needed=[1]), "needed_uids has 0 values and needed has 1"),
    "needs of a prefill": (prefill(allowance=wire.Allowance(needed=[1])), "needed_uids has 0 values and needed has 1"),
    "no number is needed": (decode(needed_uids=[1], needed=[math.nan]), "needed is no finite number"),
    "a step of no time": (decode(step_seconds=0), "a step of 0.0 seconds"),
    "a step of less": (decode(step_seconds=-1), "a step of -1.0 seconds"),
    "endless drafts": (decode(draft_seconds=math.inf), "draft_seconds is no finite number"),
    "drafts of less": (decode(draft_seconds=-1), "draft_seconds -1.0 is negative"),
    "rounds of less": (decode(round_seconds=-1), "round_seconds -1.0 is negative"),
    "any draft": (decode(first_seconds=-1), "first_seconds -1.0 is negative"),
    "choices": (group(choices=MOST), "group 1: 4294967295 choices are too many"),
    "choices of beams": (group(choices=MOST_CHOICES + 1, **BEAMS), "choices are too many"),
    "drafts": (group(drafts=128), "128 drafts are too many"),
    "temperature": (sampling(temperature=-1), "temperature -1.0 is negative"),
    "hot": (sampling(temperature=math.inf), "temperature is no finite number"),
    "nan": (sampling(temperature=math.nan), "temperature is no finite number"),
    "top_p": (sampling(top_p=0), r"top_p 0.0 is not within \(0, 1\]"),
    "large top_p": (sampling(top_p=1.5), "top_p 1.5"),
    "typical_p": (sampling(typical_p=-0.5), "typical_p -0.5"),
    "min_p": (sampling(min_p=1.5), r"min_p 1.5 is not within \[0, 1\]"),
    "repetition": (sampling(repetition_penalty=0), "repetition_penalty 0.0 is not above 0"),
    "frequency": (sampling(frequency_penalty=math.nan), "frequency_penalty is no finite number"),
    "presence": (sampling(presence_penalty=-math.inf), "presence_penalty is no finite number"),
    "bias": (sampling(bias_ids=[1]), "bias_ids has 1 values and bias_values has 0"),
    "bias of nan": (sampling(bias_ids=[1, 2], bias_values=[1, math.nan]), "bias_values is no finite number"),
    "no beams": (beams(width=0), "0 beams are too few"),
    "one beam": (beams(width=1), "1 beams are too few"),
    "unknown stop": (beams(stop=7), "nobody knows the stop 7"),  # type: ignore[arg-type]
    "negative stop": (beams(stop=-1), "nobody knows the stop -1"),  # type: ignore[arg-type]
    "length_penalty": (beams(length_penalty=100), "4 tokens to the power of length_penalty 100.0 are no number"),
    "low length_penalty": (beams(length_penalty=-100), "length_penalty -100.0"),
    "length_penalty nan": (beams(length_penalty=math.nan), "length_penalty is no finite number"),
    "more beams than wanted": (beams(*[beam(choice=rank) for rank in range(3)]), "3 beams go on, 2 are wanted"),
    "beams of two lengths": (beams(beam(), beam(choice=1, tokens=[3], logprobs=[-1])), "differ in length"),
    "logprobs of beams": (beams(beam(logprobs=[])), "logprobs or top_counts are not as many"),
    "of complete ones": (beams(beam(complete=True, logprobs=[])), "logprobs or top_counts are not as many"),
    "top_counts": (beams(beam(), top_n=1), "logprobs or top_counts are not as many"),
    "top_counts for nobody": (beams(beam(top_counts=[0, 0])), "logprobs or top_counts are not as many"),
    "top_ids": (beams(beam(top_counts=[1, 1], top_ids=[1], top_logprobs=[-1, -1]), top_n=1), "top_ids or top_logprobs"),
    "top_logprobs": (beams(beam(top_counts=[1, 1], top_ids=[1, 1], top_logprobs=[-1]), top_n=1), "top_ids or top_logprobs"),
}
FAILS: dict[str, tuple[wire.Command, str]] = {
    "no prompt": (group(tokens=[]), "has no tokens"),
    "no prompt for beams": (group(tokens=[], **BEAMS), "has no tokens"),
    "no answer": (group(max_new_tokens=0), "has no tokens"),
    "no answer of beams": (group(max_new_tokens=0, **BEAMS), "has no tokens"),
    "a long answer": (group(max_new_tokens=MOST), "too many: 512"),
    "a token": (group(tokens=[MOST]), "not in the model's vocabulary"),
    "a token that was generated": (group(continuations=[wire.Continuation(tokens=[131])]), "not in the model's vocabulary"),
    "an end": (group(end_ids=[131]), "must be in the model's vocabulary"),
    "a bias": (sampling(bias_ids=[MOST], bias_values=[1]), "must be in the model's vocabulary"),
    "no continuation": (group(continuations=[wire.Continuation()]), "a continuation has from 1"),
    "a whole one": (group(continuations=[wire.Continuation(tokens=[1] * 4)]), "a continuation has from 1"),
    "a choice": (group(continuations=[wire.Continuation(tokens=[1])] * 2), "a choice comes twice"),
    "beams": (group(beams=wire.Beams(width=MOST)), "too many for a vocabulary"),
    "many choices": (group(choices=1000), "the pool is full"),
}
ANSWERED: dict[str, wire.Command] = {
    "nothing": prefill(),
    "chunks of nobody": prefill(chunk_uids=[1, 9], chunk_lengths=[MOST, 0], prompt_tokens=MOST, decode_batches=[9, 9]),
    "a group that nothing is computed of": prefill(groups=group().prefill.groups),
    "top_k": sampling(temperature=1, top_k=MOST),
    "greedy top_k": sampling(top_k=MOST),
    "top_k of beams": group(sampling=wire.Sampling(temperature=1, top_k=MOST), **BEAMS),
    "top_p": sampling(temperature=1, top_p=1e-30, min_p=1, typical_p=1e-30),
    "cold": sampling(temperature=1e-38, top_p=0.5),
    "hot": sampling(temperature=3e38, min_p=1),
    "penalties": sampling(repetition_penalty=1e-38, frequency_penalty=3e38, presence_penalty=-3e38),
    "bias": sampling(bias_ids=[1, 1, 1], bias_values=[3e38, 3e38, -3e38], final_logprobs=True),
    "seed": sampling(temperature=1, seed=(1 << 64) - 1),
    "top_n": group(top_n=MOST, prompt_logprobs=True, prompt_top_n=MOST),
    "top_n of beams": group(top_n=MOST, **BEAMS),
    "min_new_tokens": group(min_new_tokens=MOST, end_ids=list(range(131))),
    "choice": group(continuations=[wire.Continuation(choice=MOST, tokens=[1])]),
    "complete, without beams": group(continuations=[wire.Continuation(complete=True)]),
    "only complete beams": beams(beam(complete=True, score=-1)),
    "empty complete beams": beams(*[wire.Continuation(complete=True, score=-1)] * 3, stop=wire.Beams.FULL),
    "streamed": beams(beam(), streamed=MOST),
    "choices of beams": group(choices=MOST_CHOICES, **BEAMS),
    "length_penalty": beams(length_penalty=60, stop=wire.Beams.NEVER),
    "drafts": group(drafts=127, tokens=[5, 6, 7, 5, 6, 7, 5, 6]),
    "drafts of beams": group(drafts=127, **BEAMS),
    "words": group(cache_key="\0 ü\n", trace="\n" * 9, stops=["", "x"]),
    "an allowance of nothing": decode(step_seconds=0, most=0),
    "large needs": decode(needed_uids=[1, 1, 9], needed=[1e300, -1, 0], most=MOST),
    "ends of nobody": wire.Command(filter=wire.FilterRequest(drop=[7, 7], pause=[7, 7], end_uids=[7, 1], end_choices=[MOST, MOST])),
    "batches of nobody": wire.Command(concat=wire.ConcatRequest(into=9, batches=[9, 8, 8])),
}


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    result = Process(tmp_path_factory.mktemp("checks") / "socket")
    result.start()
    yield result
    result.close()


@pytest.fixture
def warm(process: Process) -> Process:
    process.stub.Warmup(WARMUP, timeout=30)
    process.stub.ClearCache(wire.ClearCacheRequest(step=1), timeout=5)
    return process


def call(process: Process, command: wire.Command, step: int) -> Any:
    """By its own method. step: if it has none."""
    kind = command.WhichOneof("kind")
    assert kind is not None
    request = type(getattr(command, kind)).FromString(getattr(command, kind).SerializeToString())
    request.step = request.step or step
    return getattr(process.stub, "".join(map(str.capitalize, kind.split("_"))))(request, timeout=20)


def lives(process: Process, step: int) -> None:
    """As if nothing had been."""
    assert list(call(process, group(uid=3), step).uids) == [3]
    assert process.codes == []


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_can_not_be_executed_is_refused(warm: Process, name: str) -> None:
    """By a call as by the stream, where what came before it is answered."""
    command, words = REFUSED[name]
    with pytest.raises(grpc.RpcError, match=words) as error:
        call(warm, command, 2)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    lives(warm, 2)
    replies = warm.stub.Steps(iter([wire.Command(decode=wire.DecodeRequest(step=3)), command]), timeout=20)
    assert next(replies).step.step == 3
    with pytest.raises(grpc.RpcError, match=words):
        next(replies)
    assert warm.codes == []


@pytest.mark.parametrize("name", list(FAILS))
def test_a_group_that_can_not_be_fails_alone(warm: Process, name: str) -> None:
    command, words = FAILS[name]
    reply = call(warm, command, 2)
    assert list(reply.failed_uids) == [1]
    assert words in reply.failed_messages[0]
    lives(warm, 3)


@pytest.mark.parametrize("name", list(ANSWERED))
def test_what_is_only_unusual_is_answered(warm: Process, name: str) -> None:
    """And so are the steps after it."""
    call(warm, group(tokens=[7, 8, 7, 8, 7], uid=2, max_new_tokens=9, drafts=3), 2)
    call(warm, prefill(batch=2, chunk_uids=[2], chunk_lengths=[9], prompt_tokens=9), 3)
    call(warm, ANSWERED[name], 4)
    for step in range(5, 11):
        reply = call(warm, wire.Command(decode=wire.DecodeRequest(batches=[0, 1, 2])), step)
        assert not reply.failed_uids
    lives(warm, 11)


@pytest.mark.parametrize("fields", [{"max_step_tokens": 0}, {"max_step_rows": 0}])
def test_a_largest_step_of_nothing_is_refused(tmp_path: Path, fields: dict[str, int]) -> None:
    process = Process(tmp_path / "socket")
    process.start()
    request = wire.WarmupRequest(**{"max_step_tokens": 9, "max_step_rows": 9} | fields)
    with pytest.raises(grpc.RpcError, match="the largest step would be none") as error:
        process.stub.Warmup(request, timeout=30)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert process.stub.Warmup(WARMUP, timeout=30).pages == 500
    assert process.codes == []
    process.close()


def test_the_vocabulary_is_the_tables() -> None:
    """Which numbers above are beyond it follows from that."""
    assert configurations.VOCABULARY == 131
