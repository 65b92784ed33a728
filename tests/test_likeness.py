"""The simulator's shard beside a real one: told the same, step by step, both answer the same.

Without cached prefixes, and with one answer for each request. Where choices are restored, or chunks end inside pages that others
have in common, a real shard may take a step more.
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
from penstock.tests.inprocess import LIGHT, InProcess, Restless, together

PAGES = 20


class Twins(InProcess):
    """Every command goes to both."""

    def __init__(self, service: Any, differences: list[tuple[object, object]]) -> None:
        super().__init__(service)
        self.differences = differences
        self.counts = IntegerShard(PAGES, 16, prefix_caching=False)

    def execute(self, command: shard_pb2.Command) -> Any:
        expected = told(self._count(command))
        self.counts.audit()
        reply = super().execute(command)

        def compare(answered: Any) -> None:
            if not answered.cancelled() and answer(answered.result()) != expected:
                self.differences.append((expected, answer(answered.result())))

        reply.add_done_callback(compare)
        return reply

    def _count(self, command: shard_pb2.Command) -> Outcome | Released:
        match command.WhichOneof("kind"):
            case "prefill":
                asked = command.prefill
                chunks = list(zip(asked.chunk_uids, asked.chunk_lengths, strict=True))
                return self.counts.prefill(map(joins, asked.groups), chunks, asked.prompt_tokens, bool(asked.decode_batches))
            case "filter":
                return self.counts.filter(command.filter.drop, command.filter.pause)
        return self.counts.decode()


def joins(group: shard_pb2.Group) -> Asked:
    begun = [(each.choice, len(each.tokens)) for each in group.continuations]
    return Asked(uid=group.uid, prompt=len(group.tokens), most=group.max_new_tokens, continuations=begun)


def told(done: Outcome | Released) -> object:
    if isinstance(done, Released):
        return done.free, sorted(done.paused)
    standing = sorted(zip(done.uids, done.held, done.grow, done.lacking, strict=True))
    tokens = done.prompt_tokens, done.restored_tokens, done.cached_tokens, done.decode_tokens, done.prompt_keys, done.decode_keys
    return done.free, standing, tokens, done.rows, done.failed


def answer(reply: shard_pb2.Reply) -> object:
    if reply.WhichOneof("kind") == "filter":
        return reply.filter.free, sorted((one.uid, one.grow, one.lacking) for one in reply.filter.paused)
    it = reply.step
    standing = sorted(zip(it.held_uids, it.held, it.grow, it.lacking, strict=True))
    tokens = it.prompt_tokens, it.restored_tokens, it.cached_tokens, it.decode_tokens, it.prompt_keys, it.decode_keys
    return it.free, standing, tokens, len(it.uids), list(it.failed_uids)


@pytest.mark.parametrize("policy", ["mixed", "pause"])
@pytest.mark.parametrize("scheduler", [Scheduler, Restless])
def test_both_answer_the_same(monkeypatch: pytest.MonkeyPatch, scheduler: type[Scheduler], policy: str) -> None:
    chance, differences = random.Random(1), list[tuple[object, object]]()
    requests = [
        Request(
            prompt=tuple(chance.randrange(10, 1000) for _ in range(chance.choice((1, 5, 16, chance.randint(1, 90))))),
            max_new_tokens=chance.choice((1, 2, 17, 40)),
            sampling=Sampling(temperature=1.0, seed=seed),
        )
        for seed in range(20)
    ]

    async def test(batcher: Batcher) -> int:
        answers = await together(batcher, requests)
        assert [len(tokens) for [tokens] in answers] == [request.max_new_tokens for request in requests]
        return batcher._shards.steps  # type: ignore[attr-defined]

    monkeypatch.setattr(inprocess, "InProcess", functools.partial(Twins, differences=differences))
    router = {"max_batch_prefill_tokens": 64, "prefill_policy": policy}
    shard = {"kv_pages": PAGES, "prefix_caching": False}
    assert inprocess.run(test, folder=LIGHT, scheduler=scheduler, shard=shard, router=router) > 40
    assert not differences
