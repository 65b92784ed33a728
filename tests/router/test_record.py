"""`Record`: the times, counts and failures recorded of a request, and its trace id in commands and in the shards' log."""

import asyncio
import logging
from contextlib import aclosing

import pytest

from penstock.router.batcher import Batcher
from penstock.router.record import Record, current
from penstock.router.request import Broken
from penstock.shard.messages import group_from
from penstock.shard.outcome import Outcome
from penstock.tests.router.fakes import FakeShards
from penstock.tests.router.harness import make_request, read, run, until_idle


def test_run_has_its_times_in_order_and_its_token_counts() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        current.set(record := Record("one", trace="00-1-2-01"))
        await asyncio.gather(read(batcher, make_request("hello", 5, choices=2)), read(batcher, make_request("you", 3)))
        first, second = record.runs
        assert record.arrived <= first.arrived <= first.started < first.first < first.ended
        assert (first.generated, second.generated) == (10, 3)
        assert (first.reasons, first.failure) == (["length"] * 2, "")
        groups = [group for command in shards.commands for group in command.prefill.groups]
        assert {group.trace for group in groups} == {"00-1-2-01"}

    run(test)


def test_run_of_a_dropped_or_failed_request_has_its_failure() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        current.set(record := Record("one"))
        async with aclosing(batcher.submit(make_request("leave", 50))) as items:
            await anext(items)
            await anext(items)
        shards.fail[2] = "no"
        with pytest.raises(Broken):
            await read(batcher, make_request("break", 50))
        dropped, broken = record.runs
        assert (dropped.failure, broken.failure) == ("dropped", "generation")
        assert dropped.generated >= 1
        assert dropped.ended
        assert broken.ended
        await until_idle(batcher, shards)
        assert {group.trace for command in shards.commands for group in command.prefill.groups} == {"one"}

    run(test)


def test_without_a_record_groups_have_no_trace() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        current.set(None)
        await read(batcher, make_request("hello", 5))
        assert [group.trace for command in shards.commands for group in command.prefill.groups] == [""]

    run(test)


def test_shard_logs_the_trace_of_a_failed_request(caplog: pytest.LogCaptureFixture) -> None:
    from penstock.proto import shard_pb2

    message = shard_pb2.Group(uid=7, tokens=[1], trace="00-1-2-01", max_new_tokens=1)
    outcome = Outcome()
    with caplog.at_level(logging.WARNING):
        outcome.fail(group_from(message), "no room")
    assert outcome.failed == [(7, "no room")]
    assert "request 00-1-2-01 failed: no room" in caplog.text
