"""Speculative decoding in the router: how many draft tokens a request may have, the allowances in the shards' commands, and the
acceptance statistics in responses."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from penstock.proto import shard_pb2
from penstock.router.batcher import Batcher
from penstock.router.cost import Cost, Work
from penstock.router.drafting import Allowance, DraftBudget
from penstock.router.policies import Measured
from penstock.router.request import Finish, Priority, Request, Speculation, Token
from penstock.router.scheduler import Action, Decode, Filter, Job, Prefill, Scheduler
from penstock.router.text import Tokenizer
from penstock.simulator.shard import Released
from penstock.tests.router.fake_batcher import Server, make_tokenizer, serve
from penstock.tests.router.fakes import FakeShards
from penstock.tests.router.harness import read, run
from penstock.tests.router.simulation import Workload

SPECULATES = {"speculate": 4}
CHAT = {"model": "", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
COMPLETION = {"model": "", "prompt": "hi", "max_tokens": 20}
GENERATE = {"inputs": "hi", "parameters": {"max_new_tokens": 20, "details": True}}
USAGE = {"accepted_prediction_tokens": 20, "rejected_prediction_tokens": 10}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def body_for(path: str, speculate: int | None = None, **more: Any) -> dict[str, Any]:
    if path.startswith("/v1"):
        return {**(CHAT if "chat" in path else COMPLETION), "speculate": speculate, **more}
    return {"inputs": "hi", "parameters": {"max_new_tokens": 20, "details": True, "speculate": speculate, **more}}


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions"])
def test_request_may_lower_the_servers_number_of_drafts_but_not_raise_it(tokenizer: Tokenizer, path: str) -> None:
    async def test(server: Server) -> None:
        for speculate, drafts in ((None, 4), (3, 3), (0, 0)):
            async with server.client.post(path, json=body_for(path, speculate)) as response:
                assert response.status == 200
                await response.read()
            assert server.batcher.requests[-1].drafts == drafts
        status, body, _ = await server.post(path, body_for(path, 5))
        assert status in (400, 422)
        assert "`speculate` must be >= 0 and <= 4 (--speculate). Given: 5" in str(body)
        async with server.client.post(path, json=body_for(path, 4, num_beams=2)) as response:
            await response.read()
        assert server.batcher.requests[-1].drafts == 0, "beams have no drafts, and nobody minds"

    serve(tokenizer, test, settings=SPECULATES)


def test_responses_of_a_server_without_speculation_have_no_draft_statistics(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, body, _ = await server.post("/generate", GENERATE)
        assert "speculation" not in body["details"]
        _, body, _ = await server.post("/v1/completions", COMPLETION)
        assert "completion_tokens_details" not in body["usage"]
        status, _, _ = await server.post("/generate", body_for("/generate", 1))
        assert status == 422

    serve(tokenizer, test)


def test_generate_details_have_drafted_and_accepted_tokens_and_steps(tokenizer: Tokenizer) -> None:
    expected = {"drafted_tokens": 30, "accepted_tokens": 20, "steps": 10}

    async def test(server: Server) -> None:
        _, body, _ = await server.post("/generate", GENERATE)
        assert body["details"]["speculation"] == expected
        *_, last = await server.events("/generate_stream", GENERATE)
        assert last["details"]["speculation"] == expected
        _, body, _ = await server.post("/generate", body_for("/generate", None, do_sample=True, best_of=2))
        assert body["details"]["speculation"] == {"drafted_tokens": 33, "accepted_tokens": 22, "steps": 11}, "of both together"
        assert "speculation" not in body["details"]["best_of_sequences"][0]

    serve(tokenizer, test, settings=SPECULATES)


def test_openai_usage_has_accepted_and_rejected_prediction_tokens(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for path in ("/v1/completions", "/v1/chat/completions"):
            _, body, _ = await server.post(path, body_for(path))
            assert body["usage"]["completion_tokens_details"].items() >= USAGE.items()
            *_, last, done = await server.events(path, body_for(path, stream=True, stream_options={"include_usage": True}))
            assert last["usage"]["completion_tokens_details"].items() >= USAGE.items()
            assert done == "[DONE]"
        _, body, _ = await server.post("/v1/completions", {**COMPLETION, "prompt": ["hi", "you"], "n": 2, "temperature": 1.0})
        both = {"accepted_prediction_tokens": 44, "rejected_prediction_tokens": 22}
        assert body["usage"]["completion_tokens_details"] == both, "each prompt's answers are told of once"

    serve(tokenizer, test, settings=SPECULATES)


def decodes(shards: FakeShards) -> list[shard_pb2.DecodeRequest]:
    return [command.decode for command in shards.commands if command.WhichOneof("kind") == "decode"]


@pytest.mark.parametrize(("speculate", "drafts"), [(4, 4), (4, 0), (0, 0)])
def test_decode_commands_have_a_draft_allowance_only_if_a_request_may_have_drafts(speculate: int, drafts: int) -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        await read(batcher, Request(prompt=(1, 2, 3), max_new_tokens=10, drafts=drafts))
        has_allowance = [decode.HasField("allowance") for decode in decodes(shards)]
        assert has_allowance == [drafts > 0] * len(has_allowance)

    run(test, speculate=speculate)


@pytest.mark.parametrize("policy", ["mixed", "pause"])
def test_draft_allowance_follows_measured_step_times(policy: str) -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        await read(batcher, Request(prompt=(1, 2, 3), max_new_tokens=60, drafts=4))
        allowed = [decode.allowance for decode in decodes(shards)]
        assert [one.most for one in allowed[:2]] == [0, 0], "first what steps take without"
        assert any(one.most for one in allowed)
        assert allowed[-1].step_seconds == pytest.approx(0.002, rel=0.01)
        assert max(one.most for one in allowed) < 16

    run(test, FakeShards(seconds=0.002), speculate=4, prefill_policy=policy)


def test_allowance_names_only_interactive_requests_that_lack_tokens_for_their_latency_target() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        requests = [
            Request(prompt=(1, 2), max_new_tokens=60, drafts=4, priority=Priority.INTERACTIVE),
            Request(prompt=(1, 2), max_new_tokens=60, drafts=4),
            Request(prompt=(1, 2), max_new_tokens=60, priority=Priority.INTERACTIVE),
        ]
        await asyncio.gather(*(read(batcher, request) for request in requests))
        allowed = [decode.allowance for decode in decodes(shards) if decode.allowance.most]
        assert {uid for one in allowed for uid in one.needed_uids} == {1}
        # A token takes 2 ms, and the target is 1 ms: at the end some 60 tokens are lacking.
        lacking = [one.needed[0] for one in allowed if one.needed]
        assert lacking[0] < lacking[len(lacking) // 2] < lacking[-1]
        assert lacking[-1] > 30

    run(test, FakeShards(seconds=0.002), speculate=4, itl_target=0.001)


def test_step_that_accepts_drafts_counts_as_one_step_of_progress() -> None:
    """Otherwise a request that kills the shards after each step would seem to make progress."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.submit(Request(prompt=(1, 2), max_new_tokens=60, drafts=4))
        items = await anext(stream)
        assert items
        [live] = batcher._streams.values()
        before, tokens = batcher._place(live.uid), live.choices[0].generated
        columns = {"uids": [live.uid] * 5, "choices": [0] * 5, "tokens": [65] * 5, "logprobs": [0.0] * 5, "finishes": [0] * 5}
        batcher._deliver(shard_pb2.StepReply(**columns, draft_uids=[live.uid], draft_counts=[6], accepted_counts=[4]))
        assert live.choices[0].generated == tokens + 5
        assert batcher._place(live.uid) == before + 1
        assert (live.run.drafted, live.run.accepted) == (6, 4)
        await stream.aclose()

    run(test, FakeShards(seconds=0.05), speculate=4)


def test_stop_string_among_accepted_drafts_ends_the_answer_as_in_plain_decoding() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.submit(Request(prompt=(1, 2), max_new_tokens=60, drafts=4, stop=("BC",), include_stop=False))
        first = await anext(stream)
        [live] = batcher._streams.values()
        tokens = live.choices[0].generated
        columns = {"uids": [live.uid] * 5, "choices": [0] * 5, "logprobs": [0.0] * 5, "finishes": [0] * 5}
        batcher._deliver(shard_pb2.StepReply(**columns, tokens=list(b"ABCBC")))
        *new, finish = [item async for items in stream for item in items]
        assert first
        assert [item.id for item in new if isinstance(item, Token)] == list(b"ABC")
        assert isinstance(finish, Finish)
        assert (finish.reason, finish.generated_tokens, finish.text) == ("stop_sequence", tokens + 3, "A" * tokens + "A")

    run(test, FakeShards(seconds=0.05, answer=lambda prompt, position, choice: ord("A")), speculate=4)


def test_finish_has_speculation_statistics_if_the_request_may_have_drafts() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        for drafts, expected in ((4, Speculation(0, 0, 9)), (0, None)):
            *_, finish = await read(batcher, Request(prompt=(1, 2), max_new_tokens=9, drafts=drafts))
            assert isinstance(finish, Finish)
            assert finish.speculation == expected

    run(test, speculate=4)


def test_warmup_requests_as_many_rows_as_a_step_with_drafts_may_have() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        sizes = shards.warmup.max_step_tokens, shards.warmup.max_step_rows, shards.warmup.max_sequences
        assert sizes == (64, 40, 8)

    run(test, max_batch_prefill_tokens=64, max_batch_size=8, max_best_of=2, max_total_tokens=100, speculate=4)

    async def many(batcher: Batcher, shards: FakeShards) -> None:
        assert (shards.warmup.max_step_tokens, shards.warmup.max_step_rows) == (64, 64)

    run(many, max_batch_prefill_tokens=64, max_batch_size=8, max_best_of=2, max_total_tokens=100, speculate=64)


class SpeculatingWorkload(Workload):
    """Every second job may have drafts. Checks that commands carry an allowance if, and only if, drafts are possible."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drafting = DraftBudget(Cost(8, 0.008), self.bounds.step_tokens, 4)
        self.scheduler = Scheduler(self.bounds, self.policy, self.drafting)
        self.allowances = 0

    def _job(self, uid: int) -> Job:
        return replace(super()._job(uid), drafts=4 * (uid % 2))

    def _execute(self, action: Action) -> None:
        if not isinstance(action, Filter):
            decodes = self.scheduler._expected_decodes()
            allowance = action.allowance
            able = any(self.live[uid].job.drafts for uid in self.live if uid in self.scheduler._running)
            if isinstance(action, Decode):
                assert (allowance is not None) is able
            elif not action.decode:
                assert allowance is None
            if allowance is not None:
                self.allowances += 1
                prompts = sum(self.scheduler._underway[-1].values())
                assert allowance.most == 0 or allowance.most + prompts < self.bounds.step_tokens, "more than was warmed up"
                assert decodes
        super()._execute(action)


def test_random_workloads_have_allowances_exactly_when_a_job_may_have_drafts() -> None:
    allowances = 0
    for seed in range(60):
        workload = SpeculatingWorkload(seed, Scheduler)
        workload.run()
        assert workload.scheduler._drafters == 0
        allowances += workload.allowances
    assert allowances > 500


class RecordingDraftBudget(DraftBudget):
    """Records the prompt work that the scheduler announces for the next step."""

    prompts = Work()

    def allow(self, decodes: int, keys: float, prompts: Work) -> Allowance:
        self.prompts = prompts
        return super().allow(decodes, keys, prompts)


class PredictedWorkload(Workload):
    """Checks that the prompt work announced to the draft budget equals the measured work, to which costs are fitted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drafting = RecordingDraftBudget(Cost(8, 0.008), self.bounds.step_tokens, 4)
        self.scheduler = Scheduler(self.bounds, self.policy, self.drafting)
        self.prompt_counts: Counter[str] = Counter()

    def _job(self, uid: int) -> Job:
        return replace(super()._job(uid), drafts=4)

    def _execute(self, action: Action) -> None:
        super()._execute(action)
        done = self.in_flight[-1].outcome
        if isinstance(done, Released) or not isinstance(action, Prefill) or action.allowance is None:
            return
        if not self.shard.pool.caching and not done.restored_tokens:
            assert self.drafting.prompts == Measured(prompt_tokens=done.prompt_tokens, prompt_keys=done.prompt_keys).work
            self.prompt_counts["one" if len(done.computed) == 1 else "several"] += 1


def test_prompt_work_given_to_the_draft_budget_equals_the_measured_work() -> None:
    prompt_counts: Counter[str] = Counter()
    for seed in range(120):
        workload = PredictedWorkload(seed, Scheduler)
        workload.run()
        prompt_counts += workload.prompt_counts
    assert min(prompt_counts["one"], prompt_counts["several"]) > 50


class RecordingMeasurements(DraftBudget):
    steps: "list[Measured]" = []  # noqa: RUF012

    def learn(self, step: Measured) -> None:
        self.steps.append(step)


def test_measured_rows_include_rejected_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.router.bounds.DraftBudget", RecordingMeasurements)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        reply = FakeShards._reply

        def reply_with_drafts(self: FakeShards, *arguments: Any) -> shard_pb2.Reply:
            found = reply(self, *arguments)
            step = found.step
            if step.decode_tokens:
                step.decode_tokens, step.decode_keys = 5, 50
                step.drafted_tokens, step.accepted_tokens, step.rounds, step.draft_seconds = 4, 0, 2, 0.001
            return found

        monkeypatch.setattr(FakeShards, "_reply", reply_with_drafts)
        await read(batcher, Request(prompt=(1, 2), max_new_tokens=9, drafts=4))
        step = next(one for one in reversed(RecordingMeasurements.steps) if one.decodes)  # a step without decodes may follow
        assert (step.rows, step.decodes, step.drafted, step.accepted, step.rounds) == (5, 1, 4, 0, 2)
        assert step.net == pytest.approx(step.seconds - 0.001)
        assert step.read == 10
        assert step.work.seen == 40

    run(test, speculate=4)
