"""The simulator's shard beside a real one: each command goes to both, and both must reply the same.

Without prefix caching, and with one choice per request: a real shard may take one step more if choices are restored, or if
chunks end inside pages that several sequences share.
"""

import functools
import random
from typing import Any

import pytest

from penstock.proto import shard_pb2
from penstock.router.batcher import Batcher
from penstock.router.request import Request, Sampling
from penstock.router.scheduler import Scheduler
from penstock.simulator.shard import Asked, IntegerShard, Outcome, Released
from penstock.tests import inprocess
from penstock.tests.inprocess import SMALL_MODEL, InProcessShards, PreemptingScheduler, generate_all

PAGES = 20


class BothShards(InProcessShards):
    """Sends every command to the real and to the simulated shard, and records differences between their replies."""

    def __init__(self, service: Any, differences: list[tuple[object, object]]) -> None:
        super().__init__(service)
        self.differences = differences
        self.simulated = IntegerShard(PAGES, 16, prefix_caching=False)

    def execute(self, command: shard_pb2.Command) -> Any:
        expected = simulated_outcome(self._count(command))
        self.simulated.audit()
        reply = super().execute(command)

        def compare(future: Any) -> None:
            if not future.cancelled() and real_outcome(future.result()) != expected:
                self.differences.append((expected, real_outcome(future.result())))

        reply.add_done_callback(compare)
        return reply

    def _count(self, command: shard_pb2.Command) -> Outcome | Released:
        match command.WhichOneof("kind"):
            case "prefill":
                prefill = command.prefill
                chunks = list(zip(prefill.chunk_uids, prefill.chunk_lengths, strict=True))
                return self.simulated.prefill(
                    map(group_for_simulator, prefill.groups), chunks, prefill.prompt_tokens, bool(prefill.decode_batches)
                )
            case "filter":
                return self.simulated.filter(command.filter.drop, command.filter.pause)
        return self.simulated.decode()


def group_for_simulator(group: shard_pb2.Group) -> Asked:
    begun = [(each.choice, len(each.tokens)) for each in group.continuations]
    return Asked(uid=group.uid, prompt=len(group.tokens), most=group.max_new_tokens, continuations=begun)


def simulated_outcome(done: Outcome | Released) -> object:
    if isinstance(done, Released):
        return done.free, sorted(done.paused)
    standing = sorted(zip(done.uids, done.held, done.grow, done.lacking, strict=True))
    tokens = done.prompt_tokens, done.restored_tokens, done.cached_tokens, done.decode_tokens, done.prompt_keys, done.decode_keys
    return done.free, standing, tokens, done.rows, done.failed


def real_outcome(reply: shard_pb2.Reply) -> object:
    if reply.WhichOneof("kind") == "filter":
        return reply.filter.free, sorted((one.uid, one.grow, one.lacking) for one in reply.filter.paused)
    step = reply.step
    standing = sorted(zip(step.held_uids, step.held, step.grow, step.lacking, strict=True))
    tokens = step.prompt_tokens, step.restored_tokens, step.cached_tokens, step.decode_tokens, step.prompt_keys, step.decode_keys
    return step.free, standing, tokens, len(step.uids), list(step.failed_uids)


@pytest.mark.parametrize("policy", ["mixed", "pause"])
@pytest.mark.parametrize("scheduler", [Scheduler, PreemptingScheduler])
def test_simulated_shard_replies_as_a_real_shard(monkeypatch: pytest.MonkeyPatch, scheduler: type[Scheduler], policy: str) -> None:
    rng, differences = random.Random(1), list[tuple[object, object]]()
    requests = [
        Request(
            prompt=tuple(rng.randrange(10, 1000) for _ in range(rng.choice((1, 5, 16, rng.randint(1, 90))))),
            max_new_tokens=rng.choice((1, 2, 17, 40)),
            sampling=Sampling(temperature=1.0, seed=seed),
        )
        for seed in range(20)
    ]

    async def test(batcher: Batcher) -> int:
        answers = await generate_all(batcher, requests)
        assert [len(tokens) for [tokens] in answers] == [request.max_new_tokens for request in requests]
        return batcher._shards.steps  # type: ignore[attr-defined]

    monkeypatch.setattr(inprocess, "InProcessShards", functools.partial(BothShards, differences=differences))
    router = {"max_batch_prefill_tokens": 64, "prefill_policy": policy}
    shard = {"kv_pages": PAGES, "prefix_caching": False}
    assert inprocess.run(test, folder=SMALL_MODEL, scheduler=scheduler, shard=shard, router=router) > 40
    assert not differences
