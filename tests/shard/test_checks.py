"""Checks of commands from the router: invalid commands are refused, impossible groups fail alone, unusual but valid commands are
executed, and the shard survives all of them."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.proto import shard_pb2 as wire
from penstock.shard.checks import LAST, MOST_CHOICES
from penstock.tests.shard import configurations
from penstock.tests.shard.test_service import WARMUP, InProcessShard

MAX_UINT32 = (1 << 32) - 1
TWO_BEAMS: dict[str, Any] = {"beams": wire.Beams(width=2)}


def continuation(**more: Any) -> wire.Continuation:
    """A valid continuation of a beam."""
    return wire.Continuation(**{"tokens": [3, 4], "score": -1.5, "logprobs": [-0.5, -1]} | more)


def group(**fields: Any) -> wire.Command:
    """A command that prefills one group."""
    one = wire.Group(**{"uid": 1, "tokens": [5, 6, 7, 8, 9], "max_new_tokens": 4} | fields)
    return prefill(batch=1, groups=[one], chunk_uids=[one.uid], chunk_lengths=[9], prompt_tokens=99)


def sampling(**fields: Any) -> wire.Command:
    return group(sampling=wire.Sampling(**fields))


def beams(*continuations: wire.Continuation, top_n: int = 0, **fields: Any) -> wire.Command:
    return group(beams=wire.Beams(**{"width": 2} | fields), continuations=continuations, top_n=top_n)


def prefill(**fields: Any) -> wire.Command:
    return wire.Command(prefill=wire.PrefillRequest(**fields))


def decode(**allowance: Any) -> wire.Command:
    defaults: dict[str, Any] = {"step_seconds": 0.01, "draft_seconds": 0.001, "most": 9}
    return wire.Command(decode=wire.DecodeRequest(batches=[1, 2], allowance=wire.Allowance(**defaults | allowance)))


REFUSED: dict[str, tuple[wire.Command, str]] = {
    "last step": (wire.Command(decode=wire.DecodeRequest(step=LAST)), "leaves none for the next"),
    "last step of all": (wire.Command(clear_cache=wire.ClearCacheRequest(step=LAST)), "leaves none for the next"),
    "chunks without lengths": (prefill(chunk_uids=[1, 2], chunk_lengths=[3]), "chunk_uids has 2 values and chunk_lengths has 1"),
    "lengths without chunks": (prefill(chunk_lengths=[3]), "chunk_uids has 0 values and chunk_lengths has 1"),
    "ends without choices": (wire.Command(filter=wire.FilterRequest(end_uids=[1])), "end_uids has 1 values and end_choices has 0"),
    "needed without uids": (decode(needed=[1]), "needed_uids has 0 values and needed has 1"),
    "needed without uids in a prefill": (
        prefill(allowance=wire.Allowance(needed=[1])),
        "needed_uids has 0 values and needed has 1",
    ),
    "needed is nan": (decode(needed_uids=[1], needed=[math.nan]), "needed is no finite number"),
    "step_seconds 0": (decode(step_seconds=0), "a step of 0.0 seconds"),
    "step_seconds negative": (decode(step_seconds=-1), "a step of -1.0 seconds"),
    "draft_seconds infinite": (decode(draft_seconds=math.inf), "draft_seconds is no finite number"),
    "draft_seconds negative": (decode(draft_seconds=-1), "draft_seconds -1.0 is negative"),
    "round_seconds negative": (decode(round_seconds=-1), "round_seconds -1.0 is negative"),
    "first_seconds negative": (decode(first_seconds=-1), "first_seconds -1.0 is negative"),
    "choices": (group(choices=MAX_UINT32), "group 1: 4294967295 choices are too many"),
    "choices of beams": (group(choices=MOST_CHOICES + 1, **TWO_BEAMS), "choices are too many"),
    "drafts": (group(drafts=128), "128 drafts are too many"),
    "temperature": (sampling(temperature=-1), "temperature -1.0 is negative"),
    "temperature infinite": (sampling(temperature=math.inf), "temperature is no finite number"),
    "temperature nan": (sampling(temperature=math.nan), "temperature is no finite number"),
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
    "more beams than wanted": (beams(*[continuation(choice=rank) for rank in range(3)]), "3 beams go on, 2 are wanted"),
    "beams of two lengths": (beams(continuation(), continuation(choice=1, tokens=[3], logprobs=[-1])), "differ in length"),
    "logprobs of beams": (beams(continuation(logprobs=[])), "logprobs or top_counts are not as many"),
    "logprobs of complete beams": (beams(continuation(complete=True, logprobs=[])), "logprobs or top_counts are not as many"),
    "top_counts": (beams(continuation(), top_n=1), "logprobs or top_counts are not as many"),
    "top_counts without top_n": (beams(continuation(top_counts=[0, 0])), "logprobs or top_counts are not as many"),
    "top_ids": (beams(continuation(top_counts=[1, 1], top_ids=[1], top_logprobs=[-1, -1]), top_n=1), "top_ids or top_logprobs"),
    "top_logprobs": (beams(continuation(top_counts=[1, 1], top_ids=[1, 1], top_logprobs=[-1]), top_n=1), "top_ids or top_logprobs"),
}
FAILING: dict[str, tuple[wire.Command, str]] = {
    "no prompt": (group(tokens=[]), "has no tokens"),
    "no prompt for beams": (group(tokens=[], **TWO_BEAMS), "has no tokens"),
    "max_new_tokens 0": (group(max_new_tokens=0), "has no tokens"),
    "max_new_tokens 0 for beams": (group(max_new_tokens=0, **TWO_BEAMS), "has no tokens"),
    "max_new_tokens too large": (group(max_new_tokens=MAX_UINT32), "too many: 512"),
    "prompt token outside the vocabulary": (group(tokens=[MAX_UINT32]), "not in the model's vocabulary"),
    "generated token outside the vocabulary": (
        group(continuations=[wire.Continuation(tokens=[131])]),
        "not in the model's vocabulary",
    ),
    "end_ids outside the vocabulary": (group(end_ids=[131]), "must be in the model's vocabulary"),
    "bias_ids outside the vocabulary": (sampling(bias_ids=[MAX_UINT32], bias_values=[1]), "must be in the model's vocabulary"),
    "empty continuation": (group(continuations=[wire.Continuation()]), "a continuation has from 1"),
    "complete continuation": (group(continuations=[wire.Continuation(tokens=[1] * 4)]), "a continuation has from 1"),
    "duplicate choice": (group(continuations=[wire.Continuation(tokens=[1])] * 2), "a choice comes twice"),
    "too many beams": (group(beams=wire.Beams(width=MAX_UINT32)), "too many for a vocabulary"),
    "too many choices for the pool": (group(choices=1000), "the pool is full"),
}
ANSWERED: dict[str, wire.Command] = {
    "empty prefill": prefill(),
    "chunks of unknown groups": prefill(
        chunk_uids=[1, 9], chunk_lengths=[MAX_UINT32, 0], prompt_tokens=MAX_UINT32, decode_batches=[9, 9]
    ),
    "group without chunks": prefill(groups=group().prefill.groups),
    "top_k": sampling(temperature=1, top_k=MAX_UINT32),
    "greedy top_k": sampling(top_k=MAX_UINT32),
    "top_k of beams": group(sampling=wire.Sampling(temperature=1, top_k=MAX_UINT32), **TWO_BEAMS),
    "top_p": sampling(temperature=1, top_p=1e-30, min_p=1, typical_p=1e-30),
    "tiny temperature": sampling(temperature=1e-38, top_p=0.5),
    "huge temperature": sampling(temperature=3e38, min_p=1),
    "penalties": sampling(repetition_penalty=1e-38, frequency_penalty=3e38, presence_penalty=-3e38),
    "bias": sampling(bias_ids=[1, 1, 1], bias_values=[3e38, 3e38, -3e38], final_logprobs=True),
    "seed": sampling(temperature=1, seed=(1 << 64) - 1),
    "top_n": group(top_n=MAX_UINT32, prompt_logprobs=True, prompt_top_n=MAX_UINT32),
    "top_n of beams": group(top_n=MAX_UINT32, **TWO_BEAMS),
    "min_new_tokens": group(min_new_tokens=MAX_UINT32, end_ids=list(range(131))),
    "choice": group(continuations=[wire.Continuation(choice=MAX_UINT32, tokens=[1])]),
    "complete, without beams": group(continuations=[wire.Continuation(complete=True)]),
    "only complete beams": beams(continuation(complete=True, score=-1)),
    "empty complete beams": beams(*[wire.Continuation(complete=True, score=-1)] * 3, stop=wire.Beams.FULL),
    "streamed": beams(continuation(), streamed=MAX_UINT32),
    "choices of beams": group(choices=MOST_CHOICES, **TWO_BEAMS),
    "length_penalty": beams(length_penalty=60, stop=wire.Beams.NEVER),
    "drafts": group(drafts=127, tokens=[5, 6, 7, 5, 6, 7, 5, 6]),
    "drafts of beams": group(drafts=127, **TWO_BEAMS),
    "odd strings": group(cache_key="\0 ü\n", trace="\n" * 9, stops=["", "x"]),
    "allowance of 0": decode(step_seconds=0, most=0),
    "large needed": decode(needed_uids=[1, 1, 9], needed=[1e300, -1, 0], most=MAX_UINT32),
    "filter of unknown groups": wire.Command(
        filter=wire.FilterRequest(drop=[7, 7], pause=[7, 7], end_uids=[7, 1], end_choices=[MAX_UINT32, MAX_UINT32])
    ),
    "concat of unknown batches": wire.Command(concat=wire.ConcatRequest(into=9, batches=[9, 8, 8])),
}


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessShard]:
    result = InProcessShard(tmp_path_factory.mktemp("checks") / "socket")
    result.start()
    yield result
    result.close()


@pytest.fixture
def warm(process: InProcessShard) -> InProcessShard:
    process.stub.Warmup(WARMUP, timeout=30)
    process.stub.ClearCache(wire.ClearCacheRequest(step=1), timeout=5)
    return process


def call(process: InProcessShard, command: wire.Command, step: int) -> Any:
    """Executes a command by its unary method. step: used if the command has none."""
    kind = command.WhichOneof("kind")
    assert kind is not None
    request = type(getattr(command, kind)).FromString(getattr(command, kind).SerializeToString())
    request.step = request.step or step
    return getattr(process.stub, "".join(map(str.capitalize, kind.split("_"))))(request, timeout=20)


def check_still_serving(process: InProcessShard, step: int) -> None:
    """Checks that the shard still serves a group."""
    assert list(call(process, group(uid=3), step).uids) == [3]
    assert process.codes == []


@pytest.mark.parametrize("name", list(REFUSED))
def test_invalid_command_is_refused_with_invalid_argument(warm: InProcessShard, name: str) -> None:
    """Both as a unary call and on the stream, where the commands before it are answered."""
    command, message = REFUSED[name]
    with pytest.raises(grpc.RpcError, match=message) as error:
        call(warm, command, 2)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    check_still_serving(warm, 2)
    replies = warm.stub.Steps(iter([wire.Command(decode=wire.DecodeRequest(step=3)), command]), timeout=20)
    assert next(replies).step.step == 3
    with pytest.raises(grpc.RpcError, match=message):
        next(replies)
    assert warm.codes == []


@pytest.mark.parametrize("name", list(FAILING))
def test_impossible_group_fails_alone(warm: InProcessShard, name: str) -> None:
    command, message = FAILING[name]
    reply = call(warm, command, 2)
    assert list(reply.failed_uids) == [1]
    assert message in reply.failed_messages[0]
    check_still_serving(warm, 3)


@pytest.mark.parametrize("name", list(ANSWERED))
def test_unusual_but_valid_command_is_executed(warm: InProcessShard, name: str) -> None:
    """The steps after it are executed as well."""
    call(warm, group(tokens=[7, 8, 7, 8, 7], uid=2, max_new_tokens=9, drafts=3), 2)
    call(warm, prefill(batch=2, chunk_uids=[2], chunk_lengths=[9], prompt_tokens=9), 3)
    call(warm, ANSWERED[name], 4)
    for step in range(5, 11):
        reply = call(warm, wire.Command(decode=wire.DecodeRequest(batches=[0, 1, 2])), step)
        assert not reply.failed_uids
    check_still_serving(warm, 11)


@pytest.mark.parametrize("fields", [{"max_step_tokens": 0}, {"max_step_rows": 0}])
def test_warmup_with_an_empty_largest_step_is_refused(tmp_path: Path, fields: dict[str, int]) -> None:
    process = InProcessShard(tmp_path / "socket")
    process.start()
    request = wire.WarmupRequest(**{"max_step_tokens": 9, "max_step_rows": 9} | fields)
    with pytest.raises(grpc.RpcError, match="the largest step would be none") as error:
        process.stub.Warmup(request, timeout=30)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert process.stub.Warmup(WARMUP, timeout=30).pages == 500
    assert process.codes == []
    process.close()


def test_vocabulary_size_assumed_above() -> None:
    """Token ids above are chosen to be within or beyond this vocabulary."""
    assert configurations.VOCABULARY == 131
