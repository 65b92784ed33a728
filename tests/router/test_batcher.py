"""`Batcher` on fake shards: the items of its streams, admission and overload, deadlines and priorities, failures and draining, and
that the shards' pages are free afterwards."""

import asyncio
import gc
import random
import weakref
from collections import deque
from contextlib import aclosing
from time import monotonic
from typing import Any

import pytest

from penstock.proto import shard_pb2
from penstock.router import streams
from penstock.router.batcher import Batcher
from penstock.router.metrics import Metrics
from penstock.router.request import (
    Alternative,
    Beams,
    Broken,
    Expired,
    Finish,
    Image,
    Item,
    Limits,
    NotReady,
    Overloaded,
    Priority,
    Prompt,
    Request,
    Token,
)
from penstock.router.steps import Steps
from penstock.router.streams import CompletionRate, Stream
from penstock.tests.router.fakes import END, ByteTokenizer, FakeShards
from penstock.tests.router.harness import config, expected_text, make_request, metric_value, read, run, until_idle


def test_stream_yields_a_prompt_then_tokens_then_a_finish() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        first, *tokens, last = await read(batcher, make_request("hello", 4))
        assert first == Prompt(())
        text = expected_text("hello", 4)
        assert tokens == [Token(ord(character), character, character, -1.0, False) for character in text]
        assert isinstance(last, Finish)
        assert (last.reason, last.text, last.delta, last.generated_tokens) == ("length", text, "", 4)
        assert 0 <= last.queue_seconds < 5
        assert 0 <= last.inference_seconds < 5
        await until_idle(batcher, shards)
        assert metric_value(batcher, "tgi_request_success") == 1
        assert metric_value(batcher, "penstock_inter_token_latency_seconds_count") == 3

    run(test)


def test_end_of_sequence_token_is_part_of_the_stream() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        *_, end, last = await read(batcher, make_request("hello", 9, end_ids=(END,)))
        assert end == Token(END, "<end>", "", -1.0, True)
        assert isinstance(last, Finish)
        assert (last.reason, last.text, last.generated_tokens) == ("eos_token", expected_text("hello", 2), 3)

    run(test, FakeShards(ends_at=lambda prompt: 3))


@pytest.mark.parametrize("include", [False, True])
def test_end_tokens_text_is_kept_only_with_include_stop_or_if_shown(include: bool) -> None:
    """That holds for ordinary tokens, and for special tokens that are shown."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        whole = expected_text("hello", 3)
        ends = END, ord(whole[-1])
        *_, token, last = await read(batcher, make_request("hello", 9, end_ids=ends, include_stop=include))
        assert isinstance(token, Token)
        assert isinstance(last, Finish)
        assert (token.text, last.text) == (whole[-1], whole if include else whole[:-1])
        *_, last = await read(batcher, make_request("hello", 9, end_ids=ends, include_stop=include, shown=ends))
        assert isinstance(last, Finish)
        assert (last.reason, last.text) == ("eos_token", whole), "a reader wants to see it"

    run(test, FakeShards(ends_at=lambda prompt: 3))


def test_items_go_either_to_the_sink_or_to_the_reader_complete_and_in_order() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        chance = random.Random(4)
        found: list[Item] = []
        taken = reader_has_items = 0

        def sink(items: list[Item]) -> bool:
            nonlocal taken
            free = not reader_has_items and chance.random() < 0.6
            if free:
                found.extend(items)
                taken += 1
            return free

        async for items in batcher.submit(make_request("hello", 200, choices=2), sink):
            reader_has_items = 1
            for _ in range(chance.randrange(12)):  # turns of the loop, for zero or more steps: times would differ between machines
                await asyncio.sleep(0)
            found.extend(items)
            reader_has_items = 0
        assert 20 < taken < 199
        for choice in range(2):
            tokens = [item.id for item in found if isinstance(item, Token) and item.choice == choice]
            assert "".join(map(chr, tokens)) == expected_text("hello", 200, choice)
        assert [type(item) for item in found[-4:]] == [Token, Finish] * 2
        await until_idle(batcher, shards)

    run(test, FakeShards(pages=256, seconds=0))


def test_stream_ends_for_its_reader_when_the_sink_takes_every_item() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        found: list[Item] = []

        def sink(items: list[Item]) -> bool:
            found.extend(items)
            return True

        async with asyncio.timeout(5):
            assert [items async for items in batcher.submit(make_request("hello", 4), sink)] == []
        assert len(found) == 6

    run(test)


def test_sink_is_offered_at_most_the_maximum_of_items_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the sink's output is bounded, too. The reader gets the remaining items."""
    monkeypatch.setattr(streams, "MOST_ITEMS", 5)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        offered: list[int] = []

        def sink(items: list[Item]) -> bool:
            offered.append(len(items))
            return False

        async for _ in batcher.submit(make_request("hello", 40), sink):
            for _ in range(50):
                await asyncio.sleep(0)
        assert offered
        assert max(offered) <= 5

    run(test)


def test_exception_in_a_sink_ends_only_its_own_stream() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        calls = 0

        def sink(items: list[Item]) -> bool:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise ZeroDivisionError("in the sink")
            return True

        async def read_nothing() -> None:
            async for _ in batcher.submit(make_request("bad", 50), sink):
                raise AssertionError("the sink took everything")

        bad, good = await asyncio.gather(read_nothing(), read(batcher, make_request("good", 50)), return_exceptions=True)
        assert isinstance(bad, ZeroDivisionError)
        assert isinstance(good, list)
        assert len(good) == 52
        assert calls == 3
        await until_idle(batcher, shards)
        assert batcher.ready
        assert metric_value(batcher, 'tgi_request_failure{err="generation"}') == 1

    run(test)


def test_slow_reader_gets_few_lists_of_bounded_length_and_no_finish_without_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_ITEMS", 5)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.submit(make_request("hello", 20, choices=3))
        lists = [await anext(stream)]
        while metric_value(batcher, "tgi_request_success") < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        lists += [items async for items in stream]
        assert sum(map(len, lists)) == 1 + 3 * 21
        assert max(map(len, lists)) <= 6
        assert len(lists) <= 14
        assert not any(isinstance(items[0], Finish) for items in lists)

    run(test)


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_ends_the_text_and_drops_the_group(include: bool) -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        text = expected_text("hello", 10)
        stop = text[2:4]
        items = await read(batcher, make_request("hello", 40, stop=("never", stop), include_stop=include))
        assert len(items) == 6, "tokens past the stop string are thrown away"
        last = items[-1]
        assert isinstance(last, Finish)
        assert (last.reason, last.generated_tokens) == ("stop_sequence", 4)
        assert last.text == text[: 4 if include else 2]
        await until_idle(batcher, shards)
        assert [command.WhichOneof("kind") for command in shards.commands].count("filter") == 1

    run(test)


def test_top_alternatives_and_prompt_logprobs_are_returned_only_if_requested() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        plain, rich = await asyncio.gather(
            read(batcher, make_request("plain")), read(batcher, make_request("rich", top_n=2, prompt_logprobs=True))
        )
        assert plain[0] == Prompt(())
        assert rich[0] == Prompt((None, -105.0, -99.0, -104.0))
        assert all(item.top == () for item in plain if isinstance(item, Token))
        assert all(
            item.top == (Alternative(32, " ", 0.0, False), Alternative(33, "!", -1.0, False))
            for item in rich
            if isinstance(item, Token)
        )

    run(test)


def test_concurrent_requests_get_the_same_text_as_each_alone() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        choose = random.Random(1)
        texts = ["x" * choose.randint(1, 60) + str(number) for number in range(100)]
        lengths = [choose.randint(1, 30) for _ in texts]

        async def one(text: str, most: int) -> str:
            await asyncio.sleep(choose.random() / 20)
            last = (await read(batcher, make_request(text, most)))[-1]
            assert isinstance(last, Finish)
            return last.text

        found = await asyncio.gather(*(one(text, most) for text, most in zip(texts, lengths, strict=True)))
        assert found == [expected_text(text, most) for text, most in zip(texts, lengths, strict=True)]
        await until_idle(batcher, shards)
        assert shards.warmup is not None
        assert shards.model.largest <= shards.warmup.max_step_tokens

    run(test)


def test_choices_are_interleaved_and_a_stop_string_ends_one_choice_alone() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stop = expected_text("hello", 9, 1)[3:5]
        first, *items = await read(batcher, make_request("hello", 10, choices=3, stop=(stop,)))
        assert first == Prompt(())
        assert [item.choice for item in items[:5] if isinstance(item, Token)] == [0, 1, 2, 0, 1]
        finishes = {item.choice: item for item in items if isinstance(item, Finish)}
        assert {index: (one.reason, one.generated_tokens) for index, one in finishes.items()} == {
            0: ("length", 10),
            1: ("stop_sequence", 5),
            2: ("length", 10),
        }
        assert [finishes[index].text for index in range(3)] == [
            expected_text("hello", 5 if index == 1 else 10, index) for index in range(3)
        ]
        await until_idle(batcher, shards)
        assert metric_value(batcher, "tgi_request_generated_tokens_sum") == 25
        ends = [list(command.filter.end_choices) for command in shards.commands if command.HasField("filter")]
        assert ends == [[1]], "the shard is told of the one that nobody wants any more"

    run(test)


def test_beam_search_ends_when_all_its_choices_have_met_a_stop_string() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.open(make_request("hello", 9, choices=2, beams=Beams(width=2), stop=("A",)), None)
        stream.started = 1.0
        scheduler = batcher._scheduler
        assert scheduler is not None
        for choice, waiting in ((0, 1), (1, 0)):
            row = shard_pb2.StepReply(uids=[stream.uid], choices=[choice], tokens=[65], logprobs=[-1.0], finishes=[0])
            batcher._deliver(row)
            assert scheduler.waiting == waiting
        assert [item.reason for item in stream.take() if isinstance(item, Finish)] == ["stop_sequence"] * 2
        batcher.close_stream(stream)

    run(test)


def test_internal_error_fails_every_stream_and_ends_the_batcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*arguments: Any) -> None:
        raise ZeroDivisionError("/a/path")

    async def main() -> None:
        batcher = Batcher(config(), ByteTokenizer(), FakeShards(), Metrics())
        await batcher.start()
        monkeypatch.setattr(Steps, "_report", breaks)
        for end in await asyncio.gather(*(read(batcher, make_request(text)) for text in ("a", "b")), return_exceptions=True):
            assert isinstance(end, Broken)
            assert str(end) == "the server failed (ZeroDivisionError): its log says why"
        with pytest.raises(ZeroDivisionError):
            await batcher.wait()
        assert not batcher.ready
        with pytest.raises(Broken, match="ZeroDivisionError"):
            batcher.submit(make_request("c"))
        await batcher.close()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_request_that_exceeds_its_timeout_expires() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        late, quick = await asyncio.gather(
            read(batcher, make_request("late", 200, timeout=0.05)),
            read(batcher, make_request("quick", 3, timeout=5.0)),
            return_exceptions=True,
        )
        assert isinstance(late, Expired)
        assert "not complete 0.05 s after" in str(late)
        assert isinstance(quick, list)
        await until_idle(batcher, shards)
        assert metric_value(batcher, 'tgi_request_failure{err="timeout"}') == 1

    run(test, FakeShards(seconds=0.002))


def test_duration_of_a_request_begins_with_its_arrival() -> None:
    """As in TGI, validation is a part of it."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        await read(batcher, make_request("a", 3, arrived=monotonic() - 20.0))
        await read(batcher, make_request("a", 3))
        assert 20 <= metric_value(batcher, "tgi_request_validation_duration_sum") < 21
        assert metric_value(batcher, "tgi_request_validation_duration_count") == 2
        parts = sum(metric_value(batcher, f"tgi_request_{name}_duration_sum") for name in ("validation", "queue", "inference"))
        assert metric_value(batcher, "tgi_request_duration_sum") == pytest.approx(parts)

    run(test)


def test_deadline_counts_from_the_arrival_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the end of its validation."""
    streams = record_streams(monkeypatch)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        now = monotonic()
        async with asyncio.timeout(10):
            with pytest.raises(Expired, match="not complete 30 s after"):
                await read(batcher, make_request("a", 200, timeout=30.0, arrived=now - 29.9))
            with pytest.raises(Expired, match=": 0 tokens"):
                await read(batcher, make_request("a", 200, timeout=30.0, arrived=now - 31.0))
        stream = batcher.submit(make_request("a", 3, priority=Priority.BATCH, timeout=30.0, arrived=now - 20.0))
        await anext(stream)
        assert streams[-1].rank - streams[-1].arrived == pytest.approx((now + 10.0 - streams[-1].arrived) / 2)
        await stream.aclose()
        await until_idle(batcher, shards)

    run(test, FakeShards(seconds=0.005))


def test_waiting_requests_are_served_by_priority() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        ends: list[str] = []

        async def one(text: str, priority: Priority, tenant: str = "") -> None:
            await read(batcher, make_request(text, 3, priority=priority, tenant=tenant))
            ends.append(text)

        tasks = [asyncio.create_task(one("first", Priority.NORMAL))]
        await asyncio.sleep(0.01)
        for text, priority in (("batch", Priority.BATCH), ("normal", Priority.NORMAL), ("now", Priority.INTERACTIVE)):
            tasks.append(asyncio.create_task(one(text, priority)))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert ends == ["first", "now", "normal", "batch"]

    run(test, FakeShards(seconds=0.01), max_batch_size=1)


def test_requests_of_a_tenant_that_has_less_running_pass_those_of_another() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        ends: list[str] = []

        async def one(text: str, most: int, tenant: str) -> None:
            await read(batcher, make_request(text, most, tenant=tenant))
            ends.append(text)

        shards.gate.clear()
        tasks = [asyncio.create_task(one(text, 40, "a")) for text in ("a1", "a2", "a3")]
        while batcher._scheduler is None or batcher._scheduler.running < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        tasks += [asyncio.create_task(one("a4", 1, "a")), asyncio.create_task(one("b1", 1, "b"))]
        while len(batcher._streams) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0)
        shards.gate.set()
        await asyncio.gather(*tasks)
        assert ends.index("b1") < min(ends.index("a3"), ends.index("a4"))

    run(test, max_batch_size=2)


def test_completion_rate_estimates_the_seconds_until_a_request_ends() -> None:
    rate = CompletionRate()
    assert rate.seconds(5.0) == 1.0
    for second in range(10):
        rate.ended(4.0 * second)
    assert rate.seconds(38.0) == pytest.approx(3.8)
    assert rate.seconds(10_000.0) == 60.0
    rate.idled(10_000.0 - 38.0)
    assert rate.seconds(10_000.0) == pytest.approx(3.8)


def test_seconds_to_room_follow_the_rate_of_completed_requests() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        assert batcher.seconds_to_room(monotonic() + 40) == 1.0
        for _ in range(2):
            await read(batcher, make_request("a", 3))
        assert batcher.seconds_to_room(monotonic() + 40) == pytest.approx(20, abs=2)

    run(test)


def test_idle_time_does_not_lower_the_completion_rate_in_retry_after() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        await asyncio.gather(*(read(batcher, make_request("a", 3)) for _ in range(8)))
        batcher._readers._left -= 3600.0  # an hour ago
        rate = batcher._readers.completion_rate
        rate._ends = deque((end - 3600.0 for end in rate._ends), 32)
        held = [batcher.submit(make_request("b", 90)) for _ in range(8)]
        for stream in held:
            await anext(stream)
        with pytest.raises(Overloaded) as refused:
            batcher.submit(make_request("c"))
        assert refused.value.retry_after == 1.0
        for stream in held:
            await stream.aclose()

    run(test, max_concurrent_requests=8)


def test_closing_a_stream_cancels_it_while_queued_prefilling_or_decoding() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        async with aclosing(batcher.submit(make_request("runs", 90))) as running:
            await anext(running)
            shards.gate.clear()
            prefilling = asyncio.create_task(read(batcher, make_request("p" * 100, 20)))
            queued = asyncio.create_task(read(batcher, make_request("q" * 100, 20)))
            for _ in range(3):  # the gate lets the steps in flight and the next one through
                shards.gate.set()
                await asyncio.sleep(0.001)
                shards.gate.clear()
            await asyncio.sleep(0.01)
            assert metric_value(batcher, "penstock_running") == 2
            assert metric_value(batcher, "penstock_waiting") == 1
            for task in (prefilling, queued):
                task.cancel()
            await asyncio.wait([prefilling, queued])
            assert metric_value(batcher, "penstock_running") == 1
            assert metric_value(batcher, "penstock_waiting") == 0
            shards.gate.set()
            await anext(running)
        await until_idle(batcher, shards)
        assert metric_value(batcher, "penstock_client_disconnects_total") == 3

    run(test, FakeShards(pages=64, page_size=4, seconds=0.001), max_batch_size=2)


def test_all_pages_are_free_after_a_thousand_random_cancels() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        choose, room = random.Random(2), asyncio.Semaphore(60)  # bounds the requests at once, however late they are

        async def one(number: int) -> None:
            await asyncio.sleep(choose.random() / 2)
            async with room:
                await visit(number)

        async def visit(number: int) -> None:
            try:
                async with aclosing(batcher.submit(make_request("y" * choose.randint(1, 80), choose.randint(1, 40)))) as stream:
                    patience = choose.randint(0, 20)
                    async with asyncio.timeout(choose.random() / 50 if number % 2 else None):
                        async for _ in stream:
                            patience -= 1
                            if patience < 0:
                                break
            except TimeoutError:
                pass
            except Overloaded:
                await asyncio.sleep(choose.random() / 50)

        await asyncio.gather(*(one(number) for number in range(1000)))
        await until_idle(batcher, shards)
        assert (
            metric_value(batcher, "penstock_client_disconnects_total") > 100
        )  # on a slow machine more requests are refused instead

    run(test, max_concurrent_requests=50)


def test_requests_beyond_max_concurrent_requests_are_refused_until_one_ends() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        first, second = batcher.submit(make_request("a", 90)), batcher.submit(make_request("b", 3))
        await anext(first)
        rest = asyncio.create_task(read(batcher, make_request("c", 3)))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 requests are in flight"):
            batcher.submit(make_request("d"))
        with pytest.raises(Overloaded):
            await anext(second)
        await rest
        assert len(await read(batcher, make_request("d", 3))) == 5
        await first.aclose()
        await until_idle(batcher, shards)

    run(test, max_concurrent_requests=2)


def test_tenant_that_uses_all_concurrent_requests_does_not_lock_out_another() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        streams = [batcher.submit(make_request("a", 90, tenant="many")) for _ in range(8)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(Overloaded, match="8 requests are in flight"):
            batcher.submit(make_request("a", tenant="many"))
        assert len(await read(batcher, make_request("b", 3, tenant="one"))) == 5
        assert len(await read(batcher, make_request("b", 3, tenant="one"))) == 5
        held = batcher.submit(make_request("b", 90, tenant="one"))
        await anext(held)
        with pytest.raises(Overloaded, match="9 requests are in flight"):
            batcher.submit(make_request("b", tenant="one"))
        for stream in (*streams, held):
            await stream.aclose()
        assert not batcher.readers
        await until_idle(batcher, shards)

    run(test, max_concurrent_requests=8)


def record_streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """Returns a list to which each stream record_streams from now on is added."""
    streams: list[Stream] = []
    begin = Batcher.open

    def open(batcher: Batcher, *arguments: Any) -> Stream:
        stream = begin(batcher, *arguments)
        streams.append(stream)
        return stream

    monkeypatch.setattr(Batcher, "open", open)
    return streams


def test_timeout_alarm_is_cancelled_when_the_stream_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = record_streams(monkeypatch)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        await read(batcher, make_request("a", 3, timeout=1000.0))
        assert streams[0].alarm is not None
        assert streams[0].alarm.cancelled()

    run(test)


@pytest.mark.parametrize(
    ("priority", "timeout", "delay"),
    [
        (Priority.BATCH, 0.0, 60.0),
        (Priority.BATCH, 10.0, 5.0),
        (Priority.NORMAL, 4.0, 2.0),
        (Priority.NORMAL, 40.0, 5.0),
        (Priority.INTERACTIVE, 4.0, 0.0),
    ],
)
def test_priority_delay_is_at_most_half_of_the_requests_timeout(
    monkeypatch: pytest.MonkeyPatch, priority: Priority, timeout: float, delay: float
) -> None:
    streams = record_streams(monkeypatch)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.submit(make_request("a", 3, priority=priority, timeout=timeout))
        await anext(stream)
        assert streams[0].rank - streams[0].arrived == pytest.approx(delay)
        await stream.aclose()

    run(test)


def test_time_to_first_token_is_observed_once_per_request_with_several_choices() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        await read(batcher, make_request("a", 4, choices=3))
        assert metric_value(batcher, "penstock_time_to_first_token_seconds_count") == 1

    run(test)


def test_time_to_first_token_includes_the_time_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = record_streams(monkeypatch)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        reading = asyncio.create_task(read(batcher, make_request("a")))
        while not streams:  # noqa: ASYNC110
            await asyncio.sleep(0)
        streams[0].arrived -= 1000
        await reading
        assert metric_value(batcher, "penstock_time_to_first_token_seconds_sum") > 1000

    run(test)


def test_gauges_show_requests_pages_and_the_prompt_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever a command is sent. The pool is too small for all of the requests."""
    names = [f"penstock_{name}" for name in ("waiting", "running", "paused", "pages_held", "pages_cached", "prompt_budget")]
    tgis = ("tgi_queue_size", "tgi_batch_current_size", "tgi_batch_current_max_tokens", "tgi_batch_max_total_tokens")
    shown: list[list[float]] = []

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        execute = shards.execute

        def recording_execute(command: shard_pb2.Command) -> "asyncio.Future[shard_pb2.Reply]":
            samples = batcher._metrics.samples([*names, *tgis, "penstock_pages_free"])
            waiting, running, paused, held, _, _ = now = [samples[name] for name in names]
            shown.append(now)
            assert waiting + running + paused <= 8
            assert held + samples["penstock_pages_free"] == 30
            assert [samples[name] for name in tgis] == [waiting, running, 4 * held, 120]
            return execute(command)

        monkeypatch.setattr(shards, "execute", recording_execute)
        await asyncio.gather(*(read(batcher, make_request("a" * count, 30)) for count in range(1, 9)))

    run(test, FakeShards(pages=30, page_size=4))
    most = [max(column) for column in zip(*shown, strict=True)]
    assert min(most) > 0, dict(zip(names, most, strict=True))
    assert most[-1] == 16, "all of a step's tokens, as long as no sequence runs"


def test_group_that_fails_on_the_shards_fails_alone() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        shards.fail = {2: "not finite"}
        assert str(await failing_alone(batcher, shards, make_request("b"))) == "not finite"
        assert not any(command.HasField("filter") for command in shards.commands), "the shards have dropped it themselves"

    run(test)


async def failing_alone(batcher: Batcher, shards: FakeShards, request: Request) -> Broken:
    """Serves `request` between two others, and checks that it fails and these succeed. Returns its error."""
    requests = make_request("a"), request, make_request("c")
    good, bad, other = await asyncio.gather(*(read(batcher, one) for one in requests), return_exceptions=True)
    assert isinstance(bad, Broken)
    assert isinstance(good, list)
    assert isinstance(other, list)
    assert len(good) == len(other) == 7
    await until_idle(batcher, shards)
    assert batcher.ready
    return bad


def test_failed_stream_leaves_no_reference_cycle_that_holds_its_images() -> None:
    """Images may be large, and must not wait for the garbage collector."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        async def fail() -> "weakref.ref[Image]":
            image = Image(start=0, rows=1, columns=1, pixels=b"abc", shape=(1, 3, 1, 1))
            try:
                await read(batcher, make_request("a", images=(image,)))
            except Broken:
                return weakref.ref(image)
            raise AssertionError

        shards.fail = {1: "not finite"}
        gc.disable()
        try:
            image = await fail()
            await until_idle(batcher, shards)
            assert image() is None
        finally:
            gc.enable()

    run(test)


def test_request_that_cannot_be_encoded_as_a_message_fails_alone() -> None:
    """Validation should have refused the value."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        await failing_alone(batcher, shards, make_request("b", min_new_tokens=1 << 32))

    run(test)


def test_shards_lost_during_the_drain_fail_every_stream_and_end_the_batcher() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        shards.break_at = 4
        reading = [asyncio.create_task(read(batcher, make_request(text))) for text in ("a", "b")]
        await asyncio.sleep(0)
        await batcher.drain(30)
        ends = await asyncio.gather(*reading, return_exceptions=True)
        assert [(type(end), str(end)) for end in ends] == [(NotReady, "the server shuts down, and shard rank 0 has ended")] * 2
        with pytest.raises(Broken):
            await batcher.wait()
        assert not batcher.ready
        assert batcher.stage == "shard rank 0 has ended"
        with pytest.raises(NotReady):
            batcher.submit(make_request("c", arrived=1e-9))  # its headers arrived before the drain

    run(test)


def test_shards_lost_just_before_the_drain_fail_every_stream_the_same_way() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        reading = [asyncio.create_task(read(batcher, make_request(text, 200))) for text in ("a", "b")]
        await asyncio.sleep(0.01)
        shards.break_at = 1
        shards.die()
        while batcher.ready:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await batcher.drain(30)
        ends = await asyncio.gather(*reading, return_exceptions=True)
        assert [(type(end), str(end)) for end in ends] == [(NotReady, "the server shuts down, and shard rank 0 has ended")] * 2
        assert metric_value(batcher, 'tgi_request_failure{err="unavailable"}') == 2

    run(test)


def test_requests_are_refused_before_the_start() -> None:
    async def main() -> None:
        shards = FakeShards()
        batcher = Batcher(config(), ByteTokenizer(), shards, Metrics())
        assert (batcher.ready, batcher.limits, batcher.stage) == (False, None, "waiting")
        with pytest.raises(NotReady, match="waiting"):
            batcher.submit(make_request("a"))
        shards.stage = "ready"  # warmed up by a previous router
        assert (batcher.ready, batcher.stage) == (False, "taking over shards that are ready")
        await batcher.start()
        assert (batcher.ready, batcher.stage) == (True, "ready")
        most = config().sequences
        assert batcher.limits == Limits(255, 256, vocabulary=256, pages=64, page_size=4, sequences=most)
        assert batcher.info is not None
        assert batcher.info.dtype == "float32"
        await batcher.close()

    asyncio.run(main())


def test_drain_lets_streams_finish_and_refuses_new_requests() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        running = asyncio.create_task(read(batcher, make_request("a", 20)))
        await asyncio.sleep(0.01)
        drain = asyncio.create_task(batcher.drain(30))
        await asyncio.sleep(0)
        assert (batcher.ready, batcher.stage) == (False, "shutting down")
        with pytest.raises(NotReady, match="shutting down"):
            batcher.submit(make_request("b"))
        await drain
        assert running.done()
        assert len(running.result()) == 22

    run(test, FakeShards(seconds=0.002))


def test_drain_accepts_and_finishes_requests_that_arrived_before_it() -> None:
    """Such a request may still be in validation."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        before, answered = monotonic(), asyncio.Event()
        await asyncio.sleep(0.001)
        drain = asyncio.create_task(batcher.drain(30, answered))
        await asyncio.sleep(0.02)
        assert not drain.done()
        for came in (0.0, monotonic()):
            with pytest.raises(NotReady, match="shutting down"):
                batcher.submit(make_request("b", arrived=came))
        running = asyncio.create_task(read(batcher, make_request("a", 20, arrived=before)))
        await asyncio.sleep(0.001)
        answered.set()
        await drain
        assert running.done()
        assert len(running.result()) == 22
        with pytest.raises(NotReady, match="shutting down"):
            batcher.submit(make_request("b", arrived=before))

    run(test, FakeShards(seconds=0.002))


def test_drain_timeout_refuses_requests_whose_validation_takes_longer() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        before = monotonic()
        await asyncio.sleep(0.001)
        await batcher.drain(0.02, asyncio.Event())
        with pytest.raises(NotReady, match="shutting down"):
            batcher.submit(make_request("b", arrived=before))

    run(test)


def test_drain_without_shards_refuses_requests_that_arrived_before_it() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        before, answered = monotonic(), asyncio.Event()
        shards.break_at = 1
        shards.die()
        await asyncio.sleep(0.02)
        drain = asyncio.create_task(batcher.drain(30, answered))
        await asyncio.sleep(0)
        with pytest.raises(NotReady, match="shutting down"):
            batcher.submit(make_request("b", arrived=before))
        answered.set()
        await drain

    run(test)


def test_drain_waits_for_the_longest_stream() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        reading = [asyncio.create_task(read(batcher, make_request("a", most))) for most in (3, 40)]
        await asyncio.sleep(0)
        await batcher.drain(30)
        assert [task.done() for task in reading] == [True, True]
        assert [len(task.result()) for task in reading] == [5, 42]

    run(test, FakeShards(seconds=0.001))


def test_stream_cut_by_the_drain_is_counted_once_as_a_failure() -> None:
    """The code that turns failures into HTTP statuses counts those not marked as counted."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        shards.gate.clear()
        running = asyncio.create_task(read(batcher, make_request("a", 200)))
        await asyncio.sleep(0)
        await batcher.drain(0)
        with pytest.raises(NotReady) as cut:
            await running
        assert cut.value.counted
        assert metric_value(batcher, 'tgi_request_failure{err="unavailable"}') == 1

    run(test)


def test_drain_timeout_cuts_streams_that_last_longer() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        running = asyncio.create_task(read(batcher, make_request("a", 200)))
        waiting = asyncio.create_task(read(batcher, make_request("b", 200)))
        await asyncio.sleep(0.01)
        await batcher.drain(0.02)
        for task in (running, waiting):
            with pytest.raises(NotReady, match="shut down"):
                await task
        await until_idle(batcher, shards)

    run(test, FakeShards(seconds=0.002))
