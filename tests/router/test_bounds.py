"""Limits of requests and of the scheduler, from the options and from what the shards report."""

from dataclasses import replace

import pytest

from penstock.proto import shard_pb2
from penstock.router.batcher import Batcher
from penstock.router.bounds import bounds_of, scheduler_of
from penstock.router.config import Misconfigured
from penstock.router.cost import Work
from penstock.router.policies import ChunkedPrefill, SchedulerState, WholePrefill
from penstock.router.scheduler import Bounds
from penstock.tests.router.fakes import FakeShards
from penstock.tests.router.harness import config, run


def test_warmup_requests_the_largest_step() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        expected = shard_pb2.WarmupRequest(max_step_tokens=16, max_step_rows=8, max_total_tokens=100, max_sequences=8)
        assert shards.warmup == expected

    run(test, max_concurrent_requests=20, max_batch_size=8, max_total_tokens=100)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, 128), ({"max_concurrent_requests": 4}, 16), ({"max_concurrent_requests": 5000}, 1024), ({"max_batch_size": 2}, 2)],
)
def test_max_sequences_follow_concurrent_requests_unless_max_batch_size_is_set(changes: dict[str, int], expected: int) -> None:
    info = shard_pb2.InfoReply(max_positions=1024)
    _, bounds = bounds_of(config(**changes), info, shard_pb2.WarmupReply(pages=100, page_size=16))
    assert bounds.sequences == expected


def test_prefill_policy_follows_the_options() -> None:
    bounds = Bounds(pages=1, page_size=1, step_tokens=64, sequences=1)
    warm = shard_pb2.WarmupReply(sample_tokens=10, sample_seconds=1.0)
    mixed = scheduler_of(config(itl_target=1.05), bounds, warm)._policy
    assert isinstance(mixed, ChunkedPrefill)
    assert mixed.cost is not None
    assert mixed.cost.predict(Work(10)) == pytest.approx(1.0, rel=0.01)
    now = SchedulerState(decodes=4, keys=0, sequences=4, prompts=1, position=0, waiting=7, steps=2)
    assert mixed.room(now) == 6, "of 1.05 s the decodes take 0.4"
    assert scheduler_of(config(), bounds, warm)._policy.room(now) == 4, "without a target, prompts get as much time as the decodes"
    options = config(prefill_policy="pause", waiting_served_ratio=2.0, max_waiting_tokens=3)
    pause = scheduler_of(options, bounds, warm)._policy
    assert isinstance(pause, WholePrefill)
    now = replace(now, prompts=0)
    assert [pause.admits(each) for each in (now, replace(now, waiting=8), replace(now, steps=3))] == [False, True, True]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (1023, 1024)),
        ({"max_total_tokens": 100}, (99, 100)),
        ({"max_total_tokens": 100, "max_input_tokens": 50}, (50, 100)),
        ({"max_total_tokens": 4000}, "--max-total-tokens 4000 is more than the model's 1024 positions"),
        ({"max_input_tokens": 1024}, "leaves no room for an answer within 1024 tokens"),
        ({"max_total_tokens": 1}, "no request fits"),
    ],
)
def test_token_limits_fit_the_models_positions_or_are_refused(changes: dict[str, int], expected: tuple[int, int] | str) -> None:
    info = shard_pb2.InfoReply(max_positions=1024, vocabulary=99)
    warm = shard_pb2.WarmupReply(pages=100, page_size=16)
    if isinstance(expected, str):
        with pytest.raises(Misconfigured, match=expected) as caught:
            bounds_of(config(**changes), info, warm)
        assert "\n" not in str(caught.value)
    else:
        limits, bounds = bounds_of(config(**changes), info, warm)
        assert (limits.max_input_tokens, limits.max_total_tokens) == expected
        assert (limits.pages, limits.page_size) == (100, 16)
        assert (limits.vocabulary, bounds.pages, bounds.page_size, bounds.step_tokens) == (99, 100, 16, 16)


def test_shards_that_lack_a_configured_adapter_are_refused() -> None:
    """For example shards that were started by hand: each request with that adapter would fail."""
    info = shard_pb2.InfoReply(max_positions=1024, vocabulary=99, adapters=["one", "another"])
    warm = shard_pb2.WarmupReply(pages=100, page_size=16)
    bounds_of(config(adapters=("one",)), info, warm)
    with pytest.raises(Misconfigured, match=r"the shards have no adapter two, three: give them .* the same --lora-adapters"):
        bounds_of(config(adapters=("one", "two", "three")), info, warm)


def test_shards_without_batch_invariance_are_refused_if_it_is_required() -> None:
    warm = shard_pb2.WarmupReply(pages=100, page_size=16)
    with pytest.raises(Misconfigured, match="the shards don't keep what --batch-invariant promises"):
        bounds_of(config(batch_invariant=True), shard_pb2.InfoReply(max_positions=1024), warm)
    bounds_of(config(batch_invariant=True), shard_pb2.InfoReply(max_positions=1024, batch_invariant=True), warm)


def test_full_requests_that_fit_at_once_are_limited_by_pages_and_sequences() -> None:
    bounds = Bounds(pages=100, page_size=16, step_tokens=16, sequences=20)
    assert [bounds.together(tokens) for tokens in (17, 100, 33, 1000)] == [20, 14, 20, 1]
    assert replace(bounds, pages=10).together(33) == 3


def test_shards_may_report_fewer_sequences_than_max_batch_size() -> None:
    info = shard_pb2.InfoReply(max_positions=1024)
    for reported, expected in ((0, 20), (7, 7), (30, 20)):
        warm = shard_pb2.WarmupReply(pages=100, page_size=16, sequences=reported)
        limits, bounds = bounds_of(config(max_batch_size=20), info, warm)
        assert limits.sequences == bounds.sequences == expected


def test_small_page_pool_limits_max_total_tokens() -> None:
    info = shard_pb2.InfoReply(max_positions=1024)
    limits, bounds = bounds_of(config(), info, shard_pb2.WarmupReply(pages=3, page_size=16))
    assert limits.max_total_tokens == 48
    assert bounds.together(limits.max_total_tokens) == 1
    with pytest.raises(Misconfigured, match="--max-total-tokens 100 is more than the pool's capacity of 48"):
        bounds_of(config(max_total_tokens=100), info, shard_pb2.WarmupReply(pages=3, page_size=16))
