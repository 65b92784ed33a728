"""Speculator, as the router sees them: who may have how many, what the shards are told of them, and what clients are told."""

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
from penstock.router.request import Finish, Priority, Request, Speculation
from penstock.router.scheduler import Action, Decode, Filter, Job, Prefill, Scheduler
from penstock.router.text import Tokenizer
from penstock.simulator.shard import Released
from penstock.tests.router.fake_batcher import Server, make_tokenizer, serve
from penstock.tests.router.fakes import FakeShards
from penstock.tests.router.harness import read, run
from penstock.tests.router.simulation import World

SPECULATES = {"speculate": 4}
CHAT = {"model": "", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
COMPLETION = {"model": "", "prompt": "hi", "max_tokens": 20}
GENERATE = {"inputs": "hi", "parameters": {"max_new_tokens": 20, "details": True}}
USAGE = {"accepted_prediction_tokens": 20, "rejected_prediction_tokens": 10}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def asked(path: str, speculate: int | None = None, **more: Any) -> dict[str, Any]:
    if path.startswith("/v1"):
        return {**(CHAT if "chat" in path else COMPLETION), "speculate": speculate, **more}
    return {"inputs": "hi", "parameters": {"max_new_tokens": 20, "details": True, "speculate": speculate, **more}}


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions"])
def test_a_request_may_have_fewer_than_the_server_offers(tokenizer: Tokenizer, path: str) -> None:
    async def test(server: Server) -> None:
        for speculate, drafts in ((None, 4), (3, 3), (0, 0)):
            async with server.client.post(path, json=asked(path, speculate)) as response:
                assert response.status == 200
                await response.read()
            assert server.batcher.requests[-1].drafts == drafts
        status, body, _ = await server.post(path, asked(path, 5))
        assert status in (400, 422)
        assert "`speculate` must be >= 0 and <= 4 (--speculate). Given: 5" in str(body)
        async with server.client.post(path, json=asked(path, 4, num_beams=2)) as response:
            await response.read()
        assert server.batcher.requests[-1].drafts == 0, "beams have no drafts, and nobody minds"

    serve(tokenizer, test, settings=SPECULATES)


def test_where_nothing_is_drafted_nothing_is_told_of_it(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, body, _ = await server.post("/generate", GENERATE)
        assert "speculation" not in body["details"]
        _, body, _ = await server.post("/v1/completions", COMPLETION)
        assert "completion_tokens_details" not in body["usage"]
        status, _, _ = await server.post("/generate", asked("/generate", 1))
        assert status == 422

    serve(tokenizer, test)


def test_details_say_what_drafts_were_worth(tokenizer: Tokenizer) -> None:
    expected = {"drafted_tokens": 30, "accepted_tokens": 20, "steps": 10}

    async def test(server: Server) -> None:
        _, body, _ = await server.post("/generate", GENERATE)
        assert body["details"]["speculation"] == expected
        *_, last = await server.events("/generate_stream", GENERATE)
        assert last["details"]["speculation"] == expected
        _, body, _ = await server.post("/generate", asked("/generate", None, do_sample=True, best_of=2))
        assert body["details"]["speculation"] == {"drafted_tokens": 33, "accepted_tokens": 22, "steps": 11}, "of both together"
        assert "speculation" not in body["details"]["best_of_sequences"][0]

    serve(tokenizer, test, settings=SPECULATES)


def test_usage_says_it_in_openais_words(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for path in ("/v1/completions", "/v1/chat/completions"):
            _, body, _ = await server.post(path, asked(path))
            assert body["usage"]["completion_tokens_details"].items() >= USAGE.items()
            *_, last, done = await server.events(path, asked(path, stream=True, stream_options={"include_usage": True}))
            assert last["usage"]["completion_tokens_details"].items() >= USAGE.items()
            assert done == "[DONE]"
        _, body, _ = await server.post("/v1/completions", {**COMPLETION, "prompt": ["hi", "you"], "n": 2, "temperature": 1.0})
        both = {"accepted_prediction_tokens": 44, "rejected_prediction_tokens": 22}
        assert body["usage"]["completion_tokens_details"] == both, "each prompt's answers are told of once"

    serve(tokenizer, test, settings=SPECULATES)


def decodes(shards: FakeShards) -> list[shard_pb2.DecodeRequest]:
    return [command.decode for command in shards.commands if command.WhichOneof("kind") == "decode"]


@pytest.mark.parametrize(("speculate", "drafts"), [(4, 4), (4, 0), (0, 0)])
def test_shards_are_told_what_drafts_may_cost_only_where_there_may_be_any(speculate: int, drafts: int) -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        await read(batcher, Request(prompt=(1, 2, 3), max_new_tokens=10, drafts=drafts))
        told = [decode.HasField("allowance") for decode in decodes(shards)]
        assert told == [drafts > 0] * len(told)

    run(test, speculate=speculate)


@pytest.mark.parametrize("policy", ["mixed", "pause"])
def test_what_they_are_told_is_what_was_measured(policy: str) -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        await read(batcher, Request(prompt=(1, 2, 3), max_new_tokens=60, drafts=4))
        allowed = [decode.allowance for decode in decodes(shards)]
        assert [one.most for one in allowed[:2]] == [0, 0], "first what steps take without"
        assert any(one.most for one in allowed)
        assert allowed[-1].step_seconds == pytest.approx(0.002, rel=0.01)
        assert max(one.most for one in allowed) < 16

    run(test, FakeShards(seconds=0.002), speculate=4, prefill_policy=policy)


def test_who_is_in_a_hurry_is_named() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        requests = [
            Request(prompt=(1, 2), max_new_tokens=60, drafts=4, priority=Priority.INTERACTIVE),
            Request(prompt=(1, 2), max_new_tokens=60, drafts=4),
            Request(prompt=(1, 2), max_new_tokens=60, priority=Priority.INTERACTIVE),
        ]
        await asyncio.gather(*(read(batcher, request) for request in requests))
        allowed = [decode.allowance for decode in decodes(shards) if decode.allowance.most]
        assert {uid for one in allowed for uid in one.needed_uids} == {1}
        # It takes 2 ms a token, and shall take 1: at the end some 60 are lacking.
        lacking = [one.needed[0] for one in allowed if one.needed]
        assert lacking[0] < lacking[len(lacking) // 2] < lacking[-1]
        assert lacking[-1] > 30

    run(test, FakeShards(seconds=0.002), speculate=4, itl_target=0.001)


def test_a_step_that_gives_several_tokens_is_one_step() -> None:
    """Else a request would seem to get on, which kills the shards again and again after a step."""

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


def test_an_answer_tells_what_its_drafts_were_worth() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        for drafts, expected in ((4, Speculation(0, 0, 9)), (0, None)):
            *_, finish = await read(batcher, Request(prompt=(1, 2), max_new_tokens=9, drafts=drafts))
            assert isinstance(finish, Finish)
            assert finish.speculation == expected

    run(test, speculate=4)


def test_memory_is_measured_with_as_many_drafts_as_a_step_may_have() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        sizes = shards.warmup.max_step_tokens, shards.warmup.max_step_rows, shards.warmup.max_sequences
        assert sizes == (64, 40, 8)

    run(test, max_batch_prefill_tokens=64, max_batch_size=8, max_best_of=2, max_total_tokens=100, speculate=4)

    async def many(batcher: Batcher, shards: FakeShards) -> None:
        assert (shards.warmup.max_step_tokens, shards.warmup.max_step_rows) == (64, 64)

    run(many, max_batch_prefill_tokens=64, max_batch_size=8, max_best_of=2, max_total_tokens=100, speculate=64)


class Speculating(World):
    """Jobs may have drafts, some of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drafting = DraftBudget(Cost(8, 0.008), self.bounds.step_tokens, 4)
        self.scheduler = Scheduler(self.bounds, self.policy, self.drafting)
        self.told = 0

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
                self.told += 1
                prompts = sum(self.scheduler._underway[-1].values())
                assert allowance.most == 0 or allowance.most + prompts < self.bounds.step_tokens, "more than was warmed up"
                assert decodes
        super()._execute(action)


def test_random_worlds_know_who_may_have_drafts() -> None:
    told = 0
    for seed in range(60):
        world = Speculating(seed, Scheduler)
        world.run()
        assert world.scheduler._drafters == 0
        told += world.told
    assert told > 500


class Listening(DraftBudget):
    """Remembers what the next step will compute beside decodes, as the scheduler says."""

    prompts = Work()

    def allow(self, decodes: int, keys: float, prompts: Work) -> Allowance:
        self.prompts = prompts
        return super().allow(decodes, keys, prompts)


class Foreseen(World):
    """What drafts are reckoned with is what is measured then, and costs are fitted to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drafting = Listening(Cost(8, 0.008), self.bounds.step_tokens, 4)
        self.scheduler = Scheduler(self.bounds, self.policy, self.drafting)
        self.seen: Counter[str] = Counter()

    def _job(self, uid: int) -> Job:
        return replace(super()._job(uid), drafts=4)

    def _execute(self, action: Action) -> None:
        super()._execute(action)
        done = self.underway[-1].outcome
        if isinstance(done, Released) or not isinstance(action, Prefill) or action.allowance is None:
            return
        if not self.shard.pool.caching and not done.restored_tokens:
            assert self.drafting.prompts == Measured(prompt_tokens=done.prompt_tokens, prompt_keys=done.prompt_keys).work
            self.seen["one" if len(done.computed) == 1 else "several"] += 1


def test_prompts_are_reckoned_as_they_are_measured() -> None:
    seen: Counter[str] = Counter()
    for seed in range(120):
        world = Foreseen(seed, Scheduler)
        world.run()
        seen += world.seen
    assert min(seen["one"], seen["several"]) > 50


class Measuring(DraftBudget):
    told: "list[Measured]" = []  # noqa: RUF012

    def learn(self, step: Measured) -> None:
        self.told.append(step)


def test_rows_are_those_that_were_sampled_not_those_that_were_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.router.bounds.DraftBudget", Measuring)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        reply = FakeShards._reply

        def guessing(self: FakeShards, *given: Any) -> shard_pb2.Reply:
            found = reply(self, *given)
            step = found.step
            if step.decode_tokens:
                step.decode_tokens, step.decode_keys = 5, 50
                step.drafted_tokens, step.accepted_tokens, step.rounds, step.draft_seconds = 4, 0, 2, 0.001
            return found

        monkeypatch.setattr(FakeShards, "_reply", guessing)
        await read(batcher, Request(prompt=(1, 2), max_new_tokens=9, drafts=4))
        step = next(one for one in reversed(Measuring.told) if one.decodes)  # one that was asked for too early may follow
        assert (step.rows, step.decodes, step.drafted, step.accepted, step.rounds) == (5, 1, 4, 0, 2)
        assert step.net == pytest.approx(step.seconds - 0.001)
        assert step.read == 10
        assert step.work.seen == 40

    run(test, speculate=4)
