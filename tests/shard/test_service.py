"""The shard's gRPC service on a unix socket, with one rank in this process: refused calls, repeated steps, warmup, the columns of
replies, and adapters that are loaded while it serves."""

import dataclasses
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import huggingface_hub
import pytest
import torch

from penstock.proto import rpc
from penstock.proto import shard_pb2 as wire
from penstock.shard import __main__ as entry
from penstock.shard import adapter_loading, memory
from penstock.shard.config import ShardConfig
from penstock.shard.decoding.budget import Allowance, LinearCost
from penstock.shard.loading import load
from penstock.shard.messages import allowance_from, group_from, step_reply
from penstock.shard.models.lora import LoraAdapters
from penstock.shard.outcome import Outcome
from penstock.shard.relay import Sender
from penstock.shard.sequence import Sampling
from penstock.shard.service import Service
from penstock.tests.shard import configurations, lora, tiny
from penstock.tests.shard.driver import Remote, Traffic, drive, message
from penstock.tests.shard.test_against_transformers import ANSWER_LENGTH, greedy_requests, prompt, prompts

NAME = "llama"
WARMUP = wire.WarmupRequest(max_step_tokens=128, max_step_rows=8, max_total_tokens=256)


class InProcessShard:
    """A shard's service as `__main__` builds it, without a process of its own."""

    def __init__(self, socket: Path, **settings: Any) -> None:
        self.config = ShardConfig(folder=str(tiny.folder(NAME)), model=NAME, page_size=4, **{"kv_pages": 500} | settings)
        self.codes: list[int] = []
        self.service = Service(self.config, self.codes.append)
        self.server = grpc.server(ThreadPoolExecutor(4), handlers=[rpc.handler(self.service)], options=rpc.OPTIONS)
        self.server.add_insecure_port(f"unix:{socket}")
        self.server.start()
        self.channel = grpc.insecure_channel(f"unix:{socket}")
        self.stub = rpc.Stub(self.channel)

    def start(self, settle: Callable[[], None] = lambda: None) -> None:
        """Starts the service, as when the model has been loaded."""
        self.service.start(tiny.engine(NAME, page_size=4, pages=0), Sender(ShardConfig(folder="", model="")), settle)

    def close(self) -> None:
        self.channel.close()
        self.server.stop(None).wait(5)


@pytest.fixture
def process(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[InProcessShard]:
    result = InProcessShard(tmp_path / "socket", **getattr(request, "param", {}))
    yield result
    result.close()


@pytest.fixture
def warm(process: InProcessShard) -> InProcessShard:
    process.start()
    process.stub.Warmup(WARMUP, timeout=30)
    return process


def code_of(error: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.StatusCode:
    return error.value.code()  # type: ignore[no-any-return]


def prefill(step: int, uid: int, tokens: list[int], count: int = 4, **fields: Any) -> wire.PrefillRequest:
    one = wire.Group(uid=uid, tokens=tokens, max_new_tokens=count, **fields)
    return wire.PrefillRequest(step=step, batch=1, groups=[one], chunk_uids=[uid], chunk_lengths=[1], prompt_tokens=len(tokens))


def test_info_and_health_answer_before_the_model_is_there(process: InProcessShard) -> None:
    process.service.stage = "loading weights 40 %"
    info = process.stub.Info(wire.InfoRequest(), timeout=5)
    assert (info.model, info.ranks, info.page_size, info.dtype, info.device) == (NAME, 1, 4, "float32", "cpu")
    assert (info.quantize, info.kv_cache_dtype, info.batch_invariant) == ("", "auto", False)
    assert (info.stage, info.loaded, info.vocabulary) == ("loading weights 40 %", False, 0)
    assert process.stub.Health(wire.HealthRequest(), timeout=5) == wire.HealthReply()
    process.start()
    info = process.stub.Info(wire.InfoRequest(), timeout=5)
    assert (info.loaded, info.vocabulary, info.max_positions) == (True, configurations.VOCABULARY, 512)


def test_warmup_sizes_the_pool_and_repeats_its_answer(warm: InProcessShard) -> None:
    reply = warm.stub.Warmup(WARMUP, timeout=5)
    shape = warm.service.engine.decoder.shape
    assert (reply.pages, reply.page_size) == (500, 4)
    assert reply.bytes_per_page == 2 * shape.layers * shape.kv_heads * shape.head_size * 4 * 4
    assert reply.weight_bytes == (shape.parameters() + shape.rotary_elements) * 4
    assert reply.sample_tokens == 64
    assert 0 < reply.sample_seconds < 1
    assert reply == warm.stub.Warmup(WARMUP, timeout=5)
    assert warm.stub.Info(wire.InfoRequest(), timeout=5).stage == "ready"


def test_long_lived_objects_leave_garbage_collection_at_the_end_of_warm_up(process: InProcessShard) -> None:
    """Also those of warm-up, which are many on a GPU; once only, since there are no more afterwards."""
    stages = list[str]()
    process.start(lambda: stages.append(process.service.stage))
    for _ in range(2):
        process.stub.Warmup(WARMUP, timeout=30)
    assert stages == ["measuring memory"]


def test_frozen_objects_are_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    monkeypatch.setattr(entry.gc, "collect", lambda: calls.append("collect"))
    monkeypatch.setattr(entry.gc, "freeze", lambda: calls.append("freeze"))
    entry._freeze()
    assert calls == ["collect", "freeze"]


@pytest.mark.parametrize("process", [{"kv_pages": 0}], indirect=True)
def test_default_pool_is_no_larger_than_the_largest_batch_can_use(
    process: InProcessShard, caplog: pytest.LogCaptureFixture
) -> None:
    process.start()
    with caplog.at_level("INFO"):
        assert process.stub.Warmup(WARMUP, timeout=30).pages == 8 * 256 // 4
    [line] = [line for line in caplog.messages if line.startswith("pool:")]
    assert line.startswith("pool: 512 pages of 4 tokens (2048 tokens, all that 8 sequences of 256 can fill, ")


@pytest.mark.parametrize("process", [{"kv_pages": 0}], indirect=True)
def test_rows_of_drafts_do_not_enlarge_the_pool(process: InProcessShard) -> None:
    """The pool doesn't grow with the rows of drafts."""
    process.start()
    request = wire.WarmupRequest(max_step_tokens=128, max_step_rows=72, max_total_tokens=256, max_sequences=8)
    assert process.stub.Warmup(request, timeout=30).pages == 8 * 256 // 4


@pytest.mark.parametrize("process", [{"kv_pages": 1 << 31}], indirect=True)
def test_too_many_pages_are_refused_with_the_remedy(process: InProcessShard) -> None:
    process.start()
    with pytest.raises(grpc.RpcError, match=r"room for \d+ pages of 2048 bytes, 2147483648 are wanted\. Lower --kv-pages") as error:
        process.stub.Warmup(WARMUP, timeout=30)
    assert code_of(error) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert process.codes == [2]


@pytest.mark.parametrize("process", [{"kv_pages": 0}], indirect=True)
def test_out_of_memory_in_warmup_is_logged_in_one_line_with_the_remedy(
    process: InProcessShard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU whose memory the weights nearly fill. Another process may hold the memory, so a restart may help: exit code 1."""

    def measure(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has 1 GiB free.")

    monkeypatch.setattr("penstock.shard.service.size_pool", measure)
    process.start()
    with pytest.raises(grpc.RpcError, match="the shard failed and ends"):
        process.stub.Warmup(WARMUP, timeout=30)
    assert process.codes == [1]
    [record] = [one for one in caplog.records if one.levelname == "ERROR"]
    assert record.exc_info is None
    assert "A lower --max-batch-prefill-tokens" in record.getMessage()
    assert record.getMessage().endswith("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB free.")


def test_measured_step_stays_within_the_models_positions(process: InProcessShard, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the measured step is as large as the largest step."""
    monkeypatch.setattr("penstock.shard.memory.SAMPLE_TOKENS", 2000)  # of 512 positions
    process.start()
    request = wire.WarmupRequest(max_step_tokens=2000, max_step_rows=1, max_total_tokens=512)
    assert process.stub.Warmup(request, timeout=30).sample_tokens == 2000


@pytest.mark.parametrize(
    "unreadable", [("clear_refs",), ("clear_refs", "status")], ids=["clear_refs unwritable", "status unreadable too"]
)
@pytest.mark.parametrize("process", [{"kv_pages": 0}], indirect=True)
def test_memory_is_measured_without_writable_or_readable_proc_files(
    process: InProcessShard, unreadable: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The peak can't be reset: only memory beyond the previous peak is measured."""

    def denied(original: Callable[..., Any]) -> Callable[..., Any]:
        def deny_absent(path: Path, *rest: Any, **more: Any) -> Any:
            if path.parent == Path("/proc/self") and path.name in unreadable:
                raise PermissionError(13, "Permission denied", str(path))
            return original(path, *rest, **more)

        return deny_absent

    monkeypatch.setattr(Path, "write_text", denied(Path.write_text))
    monkeypatch.setattr(Path, "read_text", denied(Path.read_text))
    process.start()
    assert process.stub.Warmup(WARMUP, timeout=30).pages == 8 * 256 // 4
    assert any("can't be reset ([Errno 13] Permission denied: '/proc/self/clear_refs')" in line for line in caplog.messages)
    before = memory._peak(tiny.CPU, reset=True)
    taken: list[torch.Tensor] = []
    while memory._peak(tiny.CPU) - before <= 32 << 20:  # other memory may be freed meanwhile
        now = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        assert len(taken) < 10
        taken.append(torch.ones(max(0, before - now) + (64 << 20), dtype=torch.uint8))
    assert all(part.all() for part in taken)


def test_commands_before_warmup_are_refused(process: InProcessShard) -> None:
    process.start()
    calls = [
        lambda: process.stub.Decode(wire.DecodeRequest(step=1), timeout=5),
        lambda: process.stub.ClearCache(wire.ClearCacheRequest(step=1), timeout=5),
        lambda: list(process.stub.Steps(iter([wire.Command(decode=wire.DecodeRequest(step=1))]), timeout=5)),
    ]
    for call in calls:
        with pytest.raises(grpc.RpcError, match="call Warmup first") as error:
            call()
        assert code_of(error) == grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("process", [{"rank": 1, "ranks": 2}], indirect=True)
def test_other_ranks_refuse_commands(process: InProcessShard) -> None:
    with pytest.raises(grpc.RpcError, match="send commands to rank 0") as error:
        process.stub.Decode(wire.DecodeRequest(step=1), timeout=5)
    assert code_of(error) == grpc.StatusCode.FAILED_PRECONDITION
    assert process.stub.Info(wire.InfoRequest(), timeout=5).rank == 1


def test_repeated_step_is_answered_from_memory_and_older_step_is_refused(warm: InProcessShard) -> None:
    request = prefill(5, 7, [1, 2, 3])
    first = warm.stub.Prefill(request, timeout=5)
    assert warm.stub.Prefill(request, timeout=5).SerializeToString() == first.SerializeToString()
    assert warm.service.engine.books.groups[7].sequences[0].generated == 1
    second = warm.stub.Decode(wire.DecodeRequest(step=8, batches=[1]), timeout=5)
    assert warm.stub.Decode(wire.DecodeRequest(step=8, batches=[1]), timeout=5) == second
    assert warm.service.engine.books.groups[7].sequences[0].generated == 2
    with pytest.raises(grpc.RpcError, match="step 7 is older than the last one, 8") as error:
        warm.stub.Decode(wire.DecodeRequest(step=7, batches=[1]), timeout=5)
    assert code_of(error) == grpc.StatusCode.INVALID_ARGUMENT
    cleared = warm.stub.ClearCache(wire.ClearCacheRequest(step=1), timeout=5)
    assert (cleared.step, cleared.free) == (1, 500)
    assert warm.stub.Prefill(prefill(2, 7, [1, 2, 3]), timeout=5).tokens == first.tokens


@pytest.mark.parametrize("stream", [False, True])
def test_random_traffic_over_grpc_gets_transformers_tokens(warm: InProcessShard, stream: bool) -> None:
    token_lists = prompts(12, 40)
    shard = Remote(warm.channel, stream, pages=500, page_size=4)
    results = drive(shard, greedy_requests(token_lists), Traffic(chunk=16, pause=0.1))
    assert (results.failed, results.answers) == ({}, dict(enumerate(tiny.greedy(NAME, token_lists, ANSWER_LENGTH))))
    assert warm.service.engine.pool.free == 500


def test_end_of_a_stream_drops_all_its_groups(warm: InProcessShard) -> None:
    commands = [wire.Command(prefill=prefill(step, step, [1, 2, 3])) for step in (1, 2)]
    replies = list(warm.stub.Steps(iter(commands), timeout=10))
    assert [reply.step.free for reply in replies] == [499, 498]
    deadline = time.monotonic() + 5
    while warm.service.engine.books.batches and time.monotonic() < deadline:  # the client sees the end before the shard has cleared
        time.sleep(0.01)
    assert warm.service.engine.books.batches == {}
    assert warm.service.engine.pool.free == 500
    assert warm.codes == []


def test_end_of_an_old_stream_keeps_the_groups_of_a_new_router(warm: InProcessShard) -> None:
    old = Remote(warm.channel, stream=True, pages=500, page_size=4)
    old.call("Prefill", prefill=prefill(0, 1, [1, 2, 3]))
    warm.stub.ClearCache(wire.ClearCacheRequest(step=1), timeout=5)
    warm.stub.Prefill(prefill(2, 2, [1, 2, 3]), timeout=5)
    with pytest.raises(grpc.RpcError) as refusal:
        old.call("Decode", decode=wire.DecodeRequest(step=2))
    assert refusal.value.code() is grpc.StatusCode.ABORTED
    old.close()
    time.sleep(0.2)
    assert list(warm.stub.Decode(wire.DecodeRequest(step=3, batches=[1]), timeout=5).uids) == [2]


def test_filter_and_concat_over_grpc(warm: InProcessShard) -> None:
    warm.stub.Prefill(prefill(1, 1, [1, 2, 3], 9, end_ids=[5]), timeout=5)
    other = prefill(2, 2, [4, 5], 9, top_n=2)
    other.batch = 6
    first = warm.stub.Prefill(other, timeout=5)
    assert warm.stub.Concat(wire.ConcatRequest(step=3, into=1, batches=[6, 99]), timeout=5).step == 3
    assert warm.stub.Decode(wire.DecodeRequest(step=4, batches=[6]), timeout=5).uids == []
    reply = warm.stub.Decode(wire.DecodeRequest(step=5, batches=[1]), timeout=5)
    assert list(reply.uids) == [1, 2]
    paused = warm.stub.Filter(wire.FilterRequest(step=6, drop=[1, 77], pause=[2, 78]), timeout=5)
    assert paused.free == 500
    [group] = paused.paused
    assert (group.uid, group.grow, group.lacking) == (2, 2, 3)
    [part] = group.continuations
    assert (part.choice, list(part.tokens)) == (0, [first.tokens[0], reply.tokens[1]])


def test_pause_returns_continuations_of_the_choices_that_have_not_ended(warm: InProcessShard) -> None:
    request = prefill(1, 1, [1, 2, 3, 4, 5], 9, choices=3, sampling=wire.Sampling(temperature=1, seed=5))
    first = warm.stub.Prefill(request, timeout=5)
    assert (list(first.choices), list(first.held), list(first.grow), first.prompt_tokens) == ([0, 1, 2], [4], [0], 5)
    assert warm.stub.Filter(wire.FilterRequest(step=2, end_uids=[1, 1, 7], end_choices=[1, 9, 0]), timeout=5).free == 500 - 3
    second = warm.stub.Decode(wire.DecodeRequest(step=3, batches=[1]), timeout=5)
    assert (list(second.choices), list(second.held), second.decode_tokens, second.decode_keys) == ([0, 2], [3], 2, 12)
    reply = warm.stub.Filter(wire.FilterRequest(step=4, pause=[1]), timeout=5)
    assert (reply.free, reply.cached) == (500, 1)
    [paused] = reply.paused
    answers = {part.choice: list(part.tokens) for part in paused.continuations}
    assert answers == {0: [first.tokens[0], second.tokens[0]], 2: [first.tokens[2], second.tokens[1]]}
    assert (paused.grow, paused.lacking) == (1 + 2, 5 + 1 + 1)  # two more steps fit into their second pages
    again = prefill(5, 1, [1, 2, 3, 4, 5], 9, choices=3, sampling=request.groups[0].sampling, continuations=paused.continuations)
    third = warm.stub.Prefill(again, timeout=5)
    assert (list(third.lacking), third.cached_tokens, third.prompt_tokens, third.restored_tokens) == ([1], 4, 2, 2)
    again = wire.PrefillRequest(step=6, chunk_uids=[1], chunk_lengths=[9], prompt_tokens=9, batch=1, decode_batches=[1])
    assert (list(warm.stub.Prefill(again, timeout=5).lacking), third.uids) == ([0], [])
    assert list(warm.stub.Decode(wire.DecodeRequest(step=7, batches=[1]), timeout=5).choices) == [0, 2]


def test_prefix_caching_follows_the_setting() -> None:
    for wanted in (True, False):
        config = ShardConfig(folder=str(tiny.folder(NAME)), model=NAME, prefix_caching=wanted)
        assert load(config, lambda stage: None).books.prefixes.enabled == wanted


def test_group_survives_serialization() -> None:
    sampling = Sampling(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        typical_p=0.75,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        presence_penalty=2.0,
        bias=((3, 1.5), (9, -100.0)),
        seed=2**64 - 1,
        final_logprobs=True,
    )
    more = {"end_ids": [4, 5], "top_n": 3, "cache_key": "tenant"}
    assert all(getattr(sampling, field.name) != field.default for field in dataclasses.fields(Sampling))
    for one in (
        tiny.group(2**63 + 1, [1, 2, 3], 9, sampling, **more, prompt_logprobs=True, choices=3),
        tiny.group(2**63 + 1, [1, 2, 3], 9, sampling, **more, continuations=[(2, [7, 8]), (0, [9])]),
    ):
        assert group_from(wire.Group.FromString(message(one).SerializeToString())) == one
    plain = tiny.group(1, [1], 1)
    assert group_from(message(plain)) == plain
    resumed = message(tiny.group(1, [1, 2, 3], 9, prompt_logprobs=True, continuations=[(0, [9])]))
    assert not group_from(resumed).prompt_logprobs, "they were reported before it was paused"
    assert group_from(wire.Group(tokens=[1])).sampling == Sampling()


def test_draft_allowance_survives_serialization() -> None:
    allowance = wire.Allowance(step_seconds=0.5, first_seconds=0.25, draft_seconds=0.125, round_seconds=2.0, most=7)
    allowance.needed_uids.extend([1 << 40, 3])
    allowance.needed.extend([1.5, 0.0])
    for request in (wire.DecodeRequest(allowance=allowance), wire.PrefillRequest(allowance=allowance)):
        found = allowance_from(type(request).FromString(request.SerializeToString()))
        assert found is not None
        assert found == Allowance(LinearCost(step=0.5, draft=0.125, round=2.0, first=0.25), 7, {1 << 40: 1.5, 3: 0.0})
        assert found.cost.seconds(2, 1) == 0.5 + 0.25 + 2 * 0.125 + 2.0
        assert found.cost.seconds(0, 0) == 0.5
        assert allowance_from(type(request)()) is None


def test_reply_columns_hold_draft_counts() -> None:
    outcome = Outcome(
        drafted=5,
        accepted=3,
        drafts=[(7, 2, 1), (9, 3, 2)],
        tried=[2, 1],
        kept=[2, 1],
        draft_seconds=0.5,
        later_seconds=0.375,
        rounds=4,
    )
    step = step_reply(1, outcome).step
    columns = zip(step.draft_uids, step.draft_counts, step.accepted_counts, strict=True)
    assert (list(columns), step.drafted_tokens, step.accepted_tokens) == (outcome.drafts, 5, 3)
    assert (list(step.tried_by_depth), list(step.kept_by_depth)) == ([2, 1], [2, 1])
    assert (step.draft_seconds, step.later_seconds, step.rounds) == (0.5, 0.375, 4)


def test_reply_columns_hold_transformers_logprobs(warm: InProcessShard) -> None:
    """Log-probabilities of the tokens, of the alternatives, and of the prompt, which is computed in two chunks."""
    tokens = list(prompt(8, 30))
    request = prefill(1, 1, tokens, top_n=3, prompt_logprobs=True)
    request.prompt_tokens = 13
    assert list(warm.stub.Prefill(request, timeout=5).prompt_uids) == []
    other = prefill(2, 2, [7, 8])
    other.chunk_uids.append(1)
    other.chunk_lengths.append(1)
    other.prompt_tokens = 19
    reply = warm.stub.Prefill(other, timeout=5)
    assert list(reply.uids) == [2, 1]
    assert (list(reply.top_counts), list(reply.finishes), list(reply.choices)) == ([0, 3], [0, 0], [0, 0])
    assert (list(reply.prompt_uids), list(reply.prompt_counts)) == ([1], [29])
    expected = tiny.expected_logits(NAME, tokens).log_softmax(-1)
    predicted = expected[:-1].gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
    assert list(reply.prompt_logprobs) == pytest.approx(predicted.tolist(), abs=1e-4)
    values, ids = expected[-1].topk(3)
    assert list(reply.top_ids) == ids.tolist()
    assert list(reply.top_logprobs) == pytest.approx(values.tolist(), abs=1e-4)
    assert reply.tokens[1] == ids[0]
    assert reply.logprobs[1] == pytest.approx(values[0].item(), abs=1e-4)
    assert reply.logprobs[0] == pytest.approx(tiny.expected_logits(NAME, [7, 8])[-1].log_softmax(-1).max().item(), abs=1e-4)
    standing = zip(reply.held, reply.grow, reply.lacking, strict=True)
    assert dict(zip(reply.held_uids, standing, strict=True)) == {2: (1, 0, 0), 1: (8, 0, 0)}
    assert (reply.free, reply.cached) == (500 - 9, 0)
    assert (reply.prompt_tokens, reply.restored_tokens, reply.cached_tokens, reply.decode_tokens) == (19, 0, 0, 0)
    assert (reply.prompt_keys, reply.decode_keys) == (1 + 2 + sum(range(14, 31)), 0)
    assert reply.seconds > 0


def test_reply_columns_hold_failures(warm: InProcessShard) -> None:
    request = prefill(1, 1, [1, 2])
    request.groups.append(wire.Group(uid=2, tokens=[configurations.VOCABULARY], max_new_tokens=1))
    request.chunk_uids.append(2)
    request.chunk_lengths.append(1)
    reply = warm.stub.Prefill(request, timeout=5)
    assert (list(reply.uids), list(reply.failed_uids)) == ([1], [2])
    assert "token 131 is not in the model's vocabulary" in reply.failed_messages[0]


def test_internal_error_ends_the_process_with_code_1(warm: InProcessShard, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*rest: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(warm.service.engine, "begin_decode", broken)
    with pytest.raises(grpc.RpcError, match="the shard failed and ends; its log says why") as error:
        warm.stub.Decode(wire.DecodeRequest(step=1), timeout=5)
    assert code_of(error) == grpc.StatusCode.INTERNAL
    assert warm.codes == [1]


# Adapters that are loaded while the shard serves


@pytest.fixture
def with_adapter_room(tmp_path: Path) -> Iterator[InProcessShard]:
    result = InProcessShard(tmp_path / "roomy", max_loras=2, max_lora_rank=4)
    engine = load(result.config, lambda stage: None)
    result.service.start(engine, Sender(ShardConfig(folder="", model="")))
    yield result
    result.close()


def test_adapters_are_loaded_replaced_and_dropped_while_serving(with_adapter_room: InProcessShard, tmp_path: Path) -> None:
    first, second = (lora.adapter(tiny.folder(NAME), tmp_path / name, seed) for seed, name in enumerate(("first", "second")))
    stub, one = with_adapter_room.stub, wire.LoadedAdapter(key="k1", name="one", folder=str(first))
    with pytest.raises(grpc.RpcError, match="call Warmup first"):
        stub.LoadAdapter(wire.LoadAdapterRequest(adapter=one), timeout=10)
    stub.Warmup(WARMUP, timeout=30)
    assert (stub.Info(wire.InfoRequest()).max_loras, list(stub.Info(wire.InfoRequest()).later)) == (2, [])
    plain = tokens_of_adapter(stub, 1, "")
    assert stub.Adapt(wire.AdaptRequest(step=10, add="k1")).problem == "adapter k1 was not loaded"
    stub.LoadAdapter(wire.LoadAdapterRequest(adapter=one), timeout=10)
    assert list(stub.Info(wire.InfoRequest()).later) == []
    assert stub.Adapt(wire.AdaptRequest(step=11, add="k1")).problem == ""
    assert later_adapters(stub) == [("k1", "one", str(first), False)]
    changed = tokens_of_adapter(stub, 12, "k1")
    again = wire.LoadedAdapter(key="k2", name="one", folder=str(second))
    stub.LoadAdapter(wire.LoadAdapterRequest(adapter=again), timeout=10)
    stub.Adapt(wire.AdaptRequest(step=20, add="k2", retire="k1"))
    assert later_adapters(stub) == [("k1", "one", str(first), True), ("k2", "one", str(second), False)]
    assert tokens_of_adapter(stub, 21, "k1") == changed
    assert len({tuple(plain), tuple(changed), tuple(tokens_of_adapter(stub, 30, "k2"))}) == 3
    stub.Adapt(wire.AdaptRequest(step=40, drop="k1"))
    assert later_adapters(stub) == [("k2", "one", str(second), False)]
    assert stub.Prefill(prefill(41, 1, [3, 4], adapter="k1")).failed_messages == ["the shards have no adapter 'k1'"]
    assert with_adapter_room.codes == []


def test_adapter_that_cannot_be_loaded_is_refused_and_changes_nothing(
    with_adapter_room: InProcessShard, warm: InProcessShard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = wire.LoadAdapterRequest(adapter=wire.LoadedAdapter(key="k", name="mine", folder=str(tmp_path)))
    with pytest.raises(grpc.RpcError, match="no room for other adapters: see --max-loras") as error:
        warm.stub.LoadAdapter(request, timeout=10)
    assert code_of(error) == grpc.StatusCode.FAILED_PRECONDITION
    with_adapter_room.stub.Warmup(WARMUP, timeout=30)
    with pytest.raises(grpc.RpcError, match=r"adapter mine: .*adapter_config.json can't be read") as error:
        with_adapter_room.stub.LoadAdapter(request, timeout=10)
    assert code_of(error) == grpc.StatusCode.INVALID_ARGUMENT
    request.adapter.folder = "x" * 300
    with pytest.raises(grpc.RpcError, match=r"adapter mine: .*File name too long") as error:
        with_adapter_room.stub.LoadAdapter(request, timeout=10)
    assert code_of(error) == grpc.StatusCode.INVALID_ARGUMENT
    high = lora.adapter(tiny.folder(NAME), tmp_path / "high", 1, rank=5)
    request.adapter.folder = str(high)
    with pytest.raises(grpc.RpcError, match="adapter mine has rank 5, and there is room for 4"):
        with_adapter_room.stub.LoadAdapter(request, timeout=10)
    monkeypatch.setattr(LoraAdapters, "prepared", lambda *given: 1 / 0)
    request.adapter.folder = str(lora.adapter(tiny.folder(NAME), tmp_path / "good", 1))
    with pytest.raises(grpc.RpcError, match="adapter mine can't be loaded: ZeroDivisionError") as error:
        with_adapter_room.stub.LoadAdapter(request, timeout=10)
    assert code_of(error) == grpc.StatusCode.INVALID_ARGUMENT
    assert with_adapter_room.stub.Adapt(wire.AdaptRequest(step=1, add="k")).problem == "adapter k was not loaded"
    assert tokens_of_adapter(with_adapter_room.stub, 2, "")
    assert with_adapter_room.codes == []


def block_adapter_reading(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Blocks the reading of adapters: the first event is set when reading begins, and reading goes on when the second is set."""
    begun, proceed = threading.Event(), threading.Event()
    original = LoraAdapters.prepared

    def prepared(changes: LoraAdapters, adapter: Any) -> Any:
        begun.set()
        assert proceed.wait(10)
        return original(changes, adapter)

    monkeypatch.setattr(LoraAdapters, "prepared", prepared)
    return begun, proceed


@pytest.mark.parametrize("cause", ["router", "deadline"])
def test_adapter_is_dropped_if_no_router_waits_for_it_any_more(
    with_adapter_room: InProcessShard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    """Another router has connected, or its own has given up: no one would ask for it to be dropped."""
    place = lora.adapter(tiny.folder(NAME), tmp_path / "one", 1)
    with_adapter_room.stub.Warmup(WARMUP, timeout=30)
    begun, proceed = block_adapter_reading(monkeypatch)
    monkeypatch.setattr(adapter_loading, "WAIT", 0.1)
    waiting: list[Any] = []
    read = adapter_loading.AdapterLoader.read
    monkeypatch.setattr(
        adapter_loading.AdapterLoader, "read", lambda loader, *request: waiting.append(request[-1]) or read(loader, *request)
    )
    request = wire.LoadAdapterRequest(adapter=wire.LoadedAdapter(key="k", name="one", folder=str(place)))
    call = with_adapter_room.stub.LoadAdapter.future(request, timeout=10 if cause == "router" else 0.3)
    assert begun.wait(5)
    with pytest.raises(grpc.RpcError, match="another one is being read yet: come again later"):
        with_adapter_room.stub.LoadAdapter(request, timeout=10)
    if cause == "router":
        with_adapter_room.stub.ClearCache(wire.ClearCacheRequest(step=1, router="another"))
        proceed.set()
        with pytest.raises(grpc.RpcError, match="adapter one: nobody waits for it any more"):
            call.result()
    else:
        with pytest.raises(grpc.RpcError, match="Deadline"):
            call.result()
        while waiting[0]():  # the server has a clock of its own
            time.sleep(0.01)
        proceed.set()
    monkeypatch.undo()
    request.adapter.key = "another"
    with_adapter_room.stub.LoadAdapter(request, timeout=10)  # once the thread that reads the first one is done
    assert list(with_adapter_room.service.adapter_loader._read) == ["another"]


def test_load_adapter_may_arrive_before_its_routers_first_clear_cache(
    with_adapter_room: InProcessShard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ranks to which commands are passed on, its first ClearCache may arrive after its LoadAdapter: loaded adapters stay."""
    place = lora.adapter(tiny.folder(NAME), tmp_path / "one", 1)
    with_adapter_room.stub.Warmup(WARMUP, timeout=30)
    with_adapter_room.stub.ClearCache(wire.ClearCacheRequest(step=1, router="first"))
    request = wire.LoadAdapterRequest(adapter=wire.LoadedAdapter(key="k1", name="one", folder=str(place)), router="second")
    with_adapter_room.stub.LoadAdapter(request, timeout=10)
    with_adapter_room.stub.ClearCache(wire.ClearCacheRequest(step=2))  # the first one's stream has ended
    begun, proceed = block_adapter_reading(monkeypatch)
    request.adapter.key = "k2"
    call = with_adapter_room.stub.LoadAdapter.future(request, timeout=10)
    assert begun.wait(5)
    with_adapter_room.stub.ClearCache(wire.ClearCacheRequest(step=3, router="second"))
    proceed.set()
    call.result()
    assert [with_adapter_room.stub.Adapt(wire.AdaptRequest(step=step, add=f"k{step - 3}")).problem for step in (4, 5)] == ["", ""]
    request.adapter.key = "k3"
    with_adapter_room.stub.LoadAdapter(request, timeout=10)
    with_adapter_room.stub.ClearCache(wire.ClearCacheRequest(step=6, router="third"))
    assert not with_adapter_room.service.adapter_loader._read


def test_adapter_digest_detects_changed_files(with_adapter_room: InProcessShard, tmp_path: Path) -> None:
    place = lora.adapter(tiny.folder(NAME), tmp_path / "one", 1)
    with_adapter_room.stub.Warmup(WARMUP, timeout=30)
    request = wire.LoadAdapterRequest(adapter=wire.LoadedAdapter(key="k", name="one", folder=str(place)))
    first = with_adapter_room.stub.LoadAdapter(request, timeout=10)
    assert first.folder == str(place)
    request.adapter.digest = first.digest
    assert with_adapter_room.stub.LoadAdapter(request, timeout=10) == first
    config = place / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))
    with pytest.raises(grpc.RpcError, match=r"adapter one: its files in .* are not those that were loaded first"):
        with_adapter_room.stub.LoadAdapter(request, timeout=10)
    request.adapter.digest = ""
    assert with_adapter_room.stub.LoadAdapter(request, timeout=10).digest != first.digest


def later_adapters(stub: Any) -> list[tuple[str, str, str, bool]]:
    """The adapters that were loaded later, as Info reports them."""
    return [(one.key, one.name, one.folder, one.retired) for one in stub.Info(wire.InfoRequest()).later]


def tokens_of_adapter(stub: Any, step: int, adapter: str) -> list[int]:
    """Three tokens of an adapter's answer; its cache key keeps it from finding pages of other adapters."""
    found = list(stub.Prefill(prefill(step, step, [3, 4, 5], 3, adapter=adapter, cache_key=adapter)).tokens)
    return found + [token for more in (1, 2) for token in stub.Decode(wire.DecodeRequest(step=step + more, batches=[1])).tokens]


@pytest.mark.parametrize(("source", "revision"), [("some/adapter", None), ("some/adapter@v2", "v2")])
def test_adapter_is_downloaded_from_the_hub_at_a_revision(
    with_adapter_room: InProcessShard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, revision: str | None
) -> None:
    place, downloads = lora.adapter(tiny.folder(NAME), tmp_path / "0123abc", 1), list[object]()

    def download(repository: str, **given: object) -> str:
        downloads.append((repository, given["revision"], given["allow_patterns"]))
        return str(place)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with_adapter_room.stub.Warmup(WARMUP, timeout=30)
    one = wire.LoadedAdapter(key="k", name="one", folder=source)
    assert with_adapter_room.stub.LoadAdapter(wire.LoadAdapterRequest(adapter=one), timeout=10).folder == "some/adapter@0123abc"
    assert downloads == [("some/adapter", revision, ["adapter_config.json", "adapter_model.safetensors"])]
    assert with_adapter_room.stub.Adapt(wire.AdaptRequest(step=1, add="k")).problem == ""
    assert later_adapters(with_adapter_room.stub) == [("k", "one", "some/adapter@0123abc", False)]


def test_adapter_missing_from_the_hub_is_refused(with_adapter_room: InProcessShard, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repository: str, **given: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with_adapter_room.stub.Warmup(WARMUP, timeout=30)
    request = wire.LoadAdapterRequest(adapter=wire.LoadedAdapter(key="k", name="mine", folder="some/adapter"))
    with pytest.raises(grpc.RpcError, match=r"adapter mine: no folder some/adapter, no copy .* in the cache"):
        with_adapter_room.stub.LoadAdapter(request, timeout=10)
