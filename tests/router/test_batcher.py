"""Streams: what a reader gets, and what becomes of the shards' pages, whatever readers, shards and operators do."""

import asyncio
import gc
import random
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

from penstock.proto import shard_pb2
from penstock.router import steps as module
from penstock.router import streams
from penstock.router.batcher import Batcher
from penstock.router.bounds import bounds_of, policy_of
from penstock.router.commands import group_of
from penstock.router.config import Misconfigured, RouterConfig
from penstock.router.cost import Work
from penstock.router.drafting import Allowance
from penstock.router.metrics import Metrics
from penstock.router.policies import Mixed, Pause
from penstock.router.request import (
    Alternative,
    Beams,
    Broken,
    Expired,
    Finish,
    Grown,
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
from penstock.router.scheduler import Bounds, Decode, Filter
from penstock.router.steps import Steps, Underway
from penstock.router.streams import Pace, Stream
from penstock.tests.router.fakes import END, ByteTokenizer, FakeShards, letter

Test = Callable[[Batcher, FakeShards], Awaitable[None]]


def config(**changes: Any) -> RouterConfig:
    return RouterConfig(**{"folder": "", "model": "fake", "max_batch_prefill_tokens": 16, **changes})


def run(test: Test, shards: FakeShards | None = None, **changes: Any) -> None:
    """Runs `test` with a batcher that has started, then looks whether everything was given back."""

    async def main() -> None:
        fake = shards or FakeShards()
        batcher = Batcher(config(**changes), ByteTokenizer(), fake, Metrics())
        async with asyncio.timeout(60):
            await batcher.start()
            await test(batcher, fake)
            await batcher.close()
        assert fake.closed
        assert not batcher.ready
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


async def quiet(batcher: Batcher, shards: FakeShards) -> None:
    """Returns when the shard has forgotten everything."""
    while shards.model.groups or value(batcher, "penstock_pages_free") != shards.pages:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert shards.model.free == shards.pages
    for name in ("penstock_waiting", "penstock_running", "penstock_paused", "penstock_pages_held"):
        assert value(batcher, name) == 0


def value(batcher: Batcher, name: str) -> float:
    lines = batcher._metrics.render().decode().splitlines()
    return float(next(line.rsplit(" ", 1)[1] for line in lines if line.startswith(name + " ")))


async def read(batcher: Batcher, request: Request) -> list[Item]:
    return [item async for items in batcher.submit(request) for item in items]


def ask(text: str, most: int = 5, **changes: Any) -> Request:
    return Request(prompt=tuple(text.encode()), max_new_tokens=most, **changes)


def answer(text: str, most: int, choice: int = 0) -> str:
    return "".join(chr(letter(text.encode(), position, choice)) for position in range(most))


def test_a_stream_is_a_prompt_then_tokens_then_a_finish() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        first, *tokens, last = await read(batcher, ask("hello", 4))
        assert first == Prompt(())
        text = answer("hello", 4)
        assert tokens == [Token(ord(character), character, character, -1.0, False) for character in text]
        assert isinstance(last, Finish)
        assert (last.reason, last.text, last.delta, last.generated_tokens) == ("length", text, "", 4)
        assert 0 <= last.queue_seconds < 5
        assert 0 <= last.inference_seconds < 5
        await quiet(batcher, shards)
        assert value(batcher, "tgi_request_success") == 1
        assert value(batcher, "penstock_inter_token_latency_seconds_count") == 3

    run(test)


def test_the_end_token_is_part_of_the_stream() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        *_, end, last = await read(batcher, ask("hello", 9, end_ids=(END,)))
        assert end == Token(END, "<end>", "", -1.0, True)
        assert isinstance(last, Finish)
        assert (last.reason, last.text, last.generated_tokens) == ("eos_token", answer("hello", 2), 3)

    run(test, FakeShards(ends_at=lambda prompt: 3))


@pytest.mark.parametrize("include", [False, True])
def test_a_token_that_ends_an_answer_is_text_as_a_stop_string_is(include: bool) -> None:
    """Be it an ordinary one, or a special one where these are shown."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        whole = answer("hello", 3)
        ends = END, ord(whole[-1])
        *_, token, last = await read(batcher, ask("hello", 9, end_ids=ends, include_stop=include))
        assert isinstance(token, Token)
        assert isinstance(last, Finish)
        assert (token.text, last.text) == (whole[-1], whole if include else whole[:-1])
        *_, last = await read(batcher, ask("hello", 9, end_ids=ends, include_stop=include, shown=ends))
        assert isinstance(last, Finish)
        assert (last.reason, last.text) == ("eos_token", whole), "a reader wants to see it"

    run(test, FakeShards(ends_at=lambda prompt: 3))


def test_what_a_sink_takes_does_not_come_and_nothing_is_lost_or_overtaken() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        chance = random.Random(4)
        found: list[Item] = []
        took = in_hand = 0

        def sink(items: list[Item]) -> bool:
            nonlocal took
            free = not in_hand and chance.random() < 0.6
            if free:
                found.extend(items)
                took += 1
            return free

        async for items in batcher.submit(ask("hello", 200, choices=2), sink):
            in_hand = 1
            for _ in range(chance.randrange(12)):  # turns of the loop, for some steps or none: time would differ between machines
                await asyncio.sleep(0)
            found.extend(items)
            in_hand = 0
        assert 20 < took < 199
        for choice in range(2):
            tokens = [item.id for item in found if isinstance(item, Token) and item.choice == choice]
            assert "".join(map(chr, tokens)) == answer("hello", 200, choice)
        assert [type(item) for item in found[-4:]] == [Token, Finish] * 2
        await quiet(batcher, shards)

    run(test, FakeShards(pages=256, seconds=0))


def test_who_has_a_sink_that_takes_everything_is_told_of_the_end() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        found: list[Item] = []

        def sink(items: list[Item]) -> bool:
            found.extend(items)
            return True

        async with asyncio.timeout(5):
            assert [items async for items in batcher.submit(ask("hello", 4), sink)] == []
        assert len(found) == 6

    run(test)


def test_a_sink_is_offered_no_more_than_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it makes of items is bounded as well. The reader takes what is too much."""
    monkeypatch.setattr(streams, "MOST_ITEMS", 5)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        offered: list[int] = []

        def sink(items: list[Item]) -> bool:
            offered.append(len(items))
            return False

        async for _ in batcher.submit(ask("hello", 40), sink):
            for _ in range(50):
                await asyncio.sleep(0)
        assert offered
        assert max(offered) <= 5

    run(test)


def test_a_sink_that_raises_ends_its_own_stream_only() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        calls = 0

        def sink(items: list[Item]) -> bool:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise ZeroDivisionError("in the sink")
            return True

        async def watched() -> None:
            async for _ in batcher.submit(ask("bad", 50), sink):
                raise AssertionError("the sink took everything")

        bad, good = await asyncio.gather(watched(), read(batcher, ask("good", 50)), return_exceptions=True)
        assert isinstance(bad, ZeroDivisionError)
        assert isinstance(good, list)
        assert len(good) == 52
        assert calls == 3
        await quiet(batcher, shards)
        assert batcher.ready
        assert value(batcher, 'tgi_request_failure{err="generation"}') == 1

    run(test)


def test_who_reads_late_gets_few_lists_of_bounded_length_and_no_finish_without_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_ITEMS", 5)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.submit(ask("hello", 20, choices=3))
        lists = [await anext(stream)]
        while value(batcher, "tgi_request_success") < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        lists += [items async for items in stream]
        assert sum(map(len, lists)) == 1 + 3 * 21
        assert max(map(len, lists)) <= 6
        assert len(lists) <= 14
        assert not any(isinstance(items[0], Finish) for items in lists)

    run(test)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_and_drops_the_group(include: bool) -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        text = answer("hello", 10)
        stop = text[2:4]
        items = await read(batcher, ask("hello", 40, stop=("never", stop), include_stop=include))
        assert len(items) == 6, "tokens past the stop string are thrown away"
        last = items[-1]
        assert isinstance(last, Finish)
        assert (last.reason, last.generated_tokens) == ("stop_sequence", 4)
        assert last.text == text[: 4 if include else 2]
        await quiet(batcher, shards)
        assert [command.WhichOneof("kind") for command in shards.commands].count("filter") == 1

    run(test)


def test_alternatives_and_prompt_logprobs_come_where_they_were_asked_for() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        plain, rich = await asyncio.gather(read(batcher, ask("plain")), read(batcher, ask("rich", top_n=2, prompt_logprobs=True)))
        assert plain[0] == Prompt(())
        assert rich[0] == Prompt((None, -105.0, -99.0, -104.0))
        assert all(item.top == () for item in plain if isinstance(item, Token))
        assert all(
            item.top == (Alternative(32, " ", 0.0, False), Alternative(33, "!", -1.0, False))
            for item in rich
            if isinstance(item, Token)
        )

    run(test)


def test_many_at_once_get_what_each_gets_alone() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        choose = random.Random(1)
        texts = ["x" * choose.randint(1, 60) + str(number) for number in range(100)]
        lengths = [choose.randint(1, 30) for _ in texts]

        async def one(text: str, most: int) -> str:
            await asyncio.sleep(choose.random() / 20)
            last = (await read(batcher, ask(text, most)))[-1]
            assert isinstance(last, Finish)
            return last.text

        found = await asyncio.gather(*(one(text, most) for text, most in zip(texts, lengths, strict=True)))
        assert found == [answer(text, most) for text, most in zip(texts, lengths, strict=True)]
        await quiet(batcher, shards)
        assert shards.warmup is not None
        assert shards.model.largest <= shards.warmup.max_step_tokens

    run(test)


def test_the_next_step_is_asked_for_before_the_last_was_answered() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        sent = []
        execute = shards.execute

        def spy(command: shard_pb2.Command) -> "asyncio.Future[shard_pb2.Reply]":
            sent.append(command)
            return execute(command)

        shards.execute = spy  # type: ignore[method-assign]
        shards.gate.clear()
        task = asyncio.create_task(read(batcher, ask("hello", 9)))
        while len(sent) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert [command.WhichOneof("kind") for command in sent] == ["prefill", "decode"], "and no more than one ahead"
        assert not shards.commands
        shards.gate.set()
        assert len(await task) == 11

    run(test)


def test_a_command_leaves_before_tokens_are_made_into_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves when the loop turns, and shards that wait for it compute nothing."""
    sent = left = delivered = 0
    deliver = Batcher._deliver

    async def until_its_end(steps: Steps, step: Underway, began: float) -> None:
        await asyncio.wait([step.reply])  # it took less time than the one before

    def leaves() -> None:
        nonlocal left
        left += 1

    def looks(batcher: Batcher, reply: shard_pb2.StepReply) -> None:
        nonlocal delivered
        delivered += 1
        assert left == sent
        deliver(batcher, reply)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        execute = shards.execute

        def spy(command: shard_pb2.Command) -> "asyncio.Future[shard_pb2.Reply]":
            nonlocal sent
            sent += 1
            asyncio.get_running_loop().call_soon(leaves)
            return execute(command)

        shards.execute = spy  # type: ignore[method-assign]
        assert len(await read(batcher, ask("hello", 9))) == 11
        assert sent >= delivered >= 9

    monkeypatch.setattr(Batcher, "_deliver", looks)
    monkeypatch.setattr(Steps, "_near_end", until_its_end)
    run(test)


def test_a_long_step_is_followed_by_what_has_come_until_shortly_before_its_end() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        async with aclosing(batcher.submit(ask("runs", 90))) as running:
            for _ in range(4):
                await anext(running)
            before = len(shards.commands)
            items = await read(batcher, ask("late", 1))  # arrives in the middle of a step
            assert len(items) == 3
            assert len(shards.commands) - before <= 3, "the next step but one would be the fourth"

    run(test, FakeShards(seconds=0.05))


def test_choices_come_interleaved_and_each_ends_for_itself() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stop = answer("hello", 9, 1)[3:5]
        first, *items = await read(batcher, ask("hello", 10, choices=3, stop=(stop,)))
        assert first == Prompt(())
        assert [item.choice for item in items[:5] if isinstance(item, Token)] == [0, 1, 2, 0, 1]
        finishes = {item.choice: item for item in items if isinstance(item, Finish)}
        assert {index: (one.reason, one.generated_tokens) for index, one in finishes.items()} == {
            0: ("length", 10),
            1: ("stop_sequence", 5),
            2: ("length", 10),
        }
        assert [finishes[index].text for index in range(3)] == [
            answer("hello", 5 if index == 1 else 10, index) for index in range(3)
        ]
        await quiet(batcher, shards)
        assert value(batcher, "tgi_request_generated_tokens_sum") == 25
        ends = [list(command.filter.end_choices) for command in shards.commands if command.HasField("filter")]
        assert ends == [[1]], "the shard is told of the one that nobody wants any more"

    run(test)


def test_paused_streams_show_no_gap_no_repetition_and_no_loss() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        texts = ["a" * count for count in range(1, 9)]
        stops = [answer(text, 14, 1)[10:] for text in texts]  # which end one of several choices early
        requests = [ask(text, 30, choices=1 + i % 2 * 2, stop=(stops[i],) * (i % 2)) for i, text in enumerate(texts)]
        found = await asyncio.gather(*(read(batcher, request) for request in requests))
        for text, request, items in zip(texts, requests, found, strict=True):
            finishes = {item.choice: item.text for item in items if isinstance(item, Finish)}
            for choice in range(request.choices):
                whole, stop = answer(text, 30, choice), request.stop[0] if request.stop else "\0"
                assert finishes[choice] == (whole[: whole.find(stop) + len(stop)] if stop in whole else whole)
                tokens = [item.id for item in items if isinstance(item, Token) and item.choice == choice]
                assert "".join(map(chr, tokens)) == finishes[choice]
        await quiet(batcher, shards)
        assert value(batcher, "penstock_pauses_total") > 3
        assert value(batcher, "penstock_restored_tokens_total") > 0

    run(test, FakeShards(pages=30, page_size=4))


def test_who_leaves_while_its_pages_are_taken_back_is_gone() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        execute = shards.execute
        left: list[int] = []

        def spy(command: shard_pb2.Command) -> "asyncio.Future[shard_pb2.Reply]":
            if command.filter.pause and not left:
                left.extend(command.filter.pause)
                for uid in left:
                    asyncio.get_running_loop().call_soon(batcher._fail, uid, Broken("gone"), "generation")
            return execute(command)

        shards.execute = spy  # type: ignore[method-assign]
        ends = await asyncio.gather(*(read(batcher, ask("a" * n, 60)) for n in range(1, 5)), return_exceptions=True)
        assert left
        assert [isinstance(end, Broken) for end in ends] == [uid in left for uid in range(1, 5)]
        await quiet(batcher, shards)

    run(test, FakeShards(pages=32, seconds=0.001))


def steps_of(batcher: Batcher) -> Steps:
    """Others than those that it goes on with, of the same streams."""
    assert batcher._scheduler is not None
    return Steps(batcher._scheduler, batcher._shards, batcher._streams, batcher._metrics, batcher._fail)


def resumed(batcher: Batcher, request: Request, ended: Sequence[int], places: int) -> list[int]:
    """With which of so many continuations a request comes back that was paused, after some of its choices have ended."""
    stream = batcher.open(request, None)
    stream.continuations = [shard_pb2.Continuation(choice=place, tokens=[65]) for place in range(places)]
    for place in ended:
        stream.choices[place].running = False
    sent = group_of(stream)
    batcher.close_stream(stream)
    return [one.choice for one in sent.continuations]


def test_a_choice_that_ended_while_it_was_paused_does_not_come_back() -> None:
    """A stop string may be found when the pages were taken back already."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        assert resumed(batcher, ask("hello", 9, choices=3), [1], 3) == [0, 2]

    run(test)


def test_who_comes_back_began_when_it_began_first() -> None:
    """Or its time in the queue would be told to be longer."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.open(ask("hello"), None)
        for now in (5.0, 9.0):
            assert steps_of(batcher)._group(stream, now) is not None
            assert (stream.started, stream.run.started) == (5.0, 5.0)
        batcher.close_stream(stream)

    run(test)


def test_beams_come_back_all_of_them() -> None:
    """There are more of them than choices."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        assert resumed(batcher, ask("hello", 9, choices=2, beams=Beams(width=4)), [], 4) == [0, 1, 2, 3]

    run(test)


def test_what_was_told_of_beams_is_not_told_again() -> None:
    """Their search begins anew where the shards were lost."""

    def step(uid: int, length: int) -> shard_pb2.StepReply:
        grown = shard_pb2.Grown(uid=uid, parents=[0, 1], tokens=[64 + length, 90], scores=[-1.0, -2.0], length=length)
        return shard_pb2.StepReply(grown=[grown])

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.open(ask("hello", 9, choices=2, beams=Beams(width=2, watched=True)), None)
        for length in (1, 2, 1, 2, 3):
            batcher._deliver(step(stream.uid, length))
        first, *grown = stream.take()
        assert first == Prompt(())
        assert [item.live[0].id for item in grown if isinstance(item, Grown)] == [65, 66, 67]
        batcher.close_stream(stream)

    run(test)


def test_a_search_that_finds_too_few_ends_with_those() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.open(ask("hello", 9, choices=3, beams=Beams(width=3)), None)
        stream.started = 1.0
        scored: dict[str, Any] = {"scored_uids": [stream.uid], "scored_counts": [2], "scores": [-1.0, -2.0]}
        rows: dict[str, Any] = {"choices": [0, 1], "tokens": [65, 66], "logprobs": [-1.0] * 2, "finishes": [2, 2]}
        batcher._deliver(shard_pb2.StepReply(uids=[stream.uid] * 2, **rows, **scored))
        ends = [item for item in stream.take() if isinstance(item, Finish)]
        assert [(end.choice, end.score) for end in ends] == [(0, -1.0), (1, -2.0)]
        assert stream.left == 0
        assert not batcher.streams
        batcher.close_stream(stream)
        assert value(batcher, "tgi_request_success") == 1

    run(test)


def test_a_search_that_finds_no_more_than_a_stop_string_had_ended_ends() -> None:
    """The shards may see no stop string where a special token, which readers don't see, stands within it."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.open(ask("hello", 9, choices=2, beams=Beams(width=2), stop=("A",)), None)
        stream.started = 1.0
        told: dict[str, Any] = {"choices": [0], "tokens": [65], "logprobs": [-1.0]}
        batcher._deliver(shard_pb2.StepReply(uids=[stream.uid], **told, finishes=[0]))
        assert stream.left == 1
        scored: dict[str, Any] = {"scored_uids": [stream.uid], "scored_counts": [1], "scores": [-1.0]}
        batcher._deliver(shard_pb2.StepReply(uids=[stream.uid], **told, finishes=[2], **scored))
        assert (stream.left, len(batcher.streams)) == (0, 0)
        assert [item.reason for item in stream.take() if isinstance(item, Finish)] == ["stop_sequence"]
        batcher.close_stream(stream)
        assert value(batcher, "tgi_request_success") == 1

    run(test)


def test_what_was_found_of_a_prompt_counts_once_where_it_was_paused() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.open(ask("hello, hello", 9), None)
        found: dict[str, Any] = {"found_uids": [stream.uid], "found_tokens": [8]}
        batcher._deliver(shard_pb2.StepReply(**found))
        reply = shard_pb2.FilterReply(free=64, paused=[shard_pb2.Paused(uid=stream.uid, grow=3, lacking=12)])
        steps_of(batcher)._report(Filter(pause=(stream.uid,)), 0.0, shard_pb2.Reply(filter=reply))
        row: dict[str, Any] = {"choices": [0], "tokens": [65], "logprobs": [-1.0], "finishes": [0]}
        batcher._deliver(shard_pb2.StepReply(uids=[stream.uid], **row, **found))
        assert stream.take()[0] == Prompt((), cached_tokens=8)
        batcher.close_stream(stream)

    run(test)


def test_beams_of_which_one_meets_a_stop_string_end_together() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.open(ask("hello", 9, choices=2, beams=Beams(width=2), stop=("A",)), None)
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


def test_an_end_is_told_the_scheduler_once() -> None:
    """A choice may have met a stop string one step before the shards ended it, and its stream may be gone by then."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.open(ask("hello", 9, choices=3), None)
        ends: dict[str, Any] = {"uids": [stream.uid] * 3 + [99], "choices": [0, 1, 2, 0], "finishes": [1, 2, 0, 1]}
        stream.choices[1].running = False
        assert steps_of(batcher)._finished(shard_pb2.StepReply(**ends)) == [stream.uid]
        assert steps_of(batcher)._finished(shard_pb2.StepReply(**ends)) == []
        batcher.close_stream(stream)

    run(test)


def test_between_tokens_of_one_step_there_is_no_interval() -> None:
    def step(uid: int, count: int) -> shard_pb2.StepReply:
        same: dict[str, Any] = {"uids": [uid] * count, "choices": [0] * count, "finishes": [0] * count}
        return shard_pb2.StepReply(tokens=[65] * count, logprobs=[-1.0] * count, **same)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.open(ask("hello", 9, drafts=3), None)
        for count, intervals in ((2, 0), (3, 1), (1, 2)):
            batcher._deliver(step(stream.uid, count))
            assert value(batcher, "penstock_inter_token_latency_seconds_count") == intervals
            await asyncio.sleep(0)
        assert stream.run.steps == 3
        batcher.close_stream(stream)

    shards = FakeShards()
    shards.gate.clear()
    run(test, shards)


def test_a_fault_of_ours_is_told_to_everybody_and_ends_the_batcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*arguments: Any) -> None:
        raise ZeroDivisionError("/a/path")

    async def main() -> None:
        batcher = Batcher(config(), ByteTokenizer(), FakeShards(), Metrics())
        await batcher.start()
        monkeypatch.setattr(Steps, "_report", breaks)
        for end in await asyncio.gather(*(read(batcher, ask(text)) for text in ("a", "b")), return_exceptions=True):
            assert isinstance(end, Broken)
            assert str(end) == "the server failed (ZeroDivisionError): its log says why"
        with pytest.raises(ZeroDivisionError):
            await batcher.wait()
        assert not batcher.ready
        with pytest.raises(Broken, match="ZeroDivisionError"):
            batcher.submit(ask("c"))
        await batcher.close()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_step_lasts_from_when_the_one_before_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from when it was sent: then all together would take longer than there was time."""
    asked: set[Steps] = set()
    answer = Steps.answer

    def seen(steps: Steps) -> Awaitable[shard_pb2.StepReply | None]:
        asked.add(steps)
        return answer(steps)

    monkeypatch.setattr(Steps, "answer", seen)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        began = monotonic()
        await read(batcher, ask("hello", 50))
        taken = monotonic() - began
        lines = batcher._metrics.render().decode().splitlines()
        told = [float(line.split()[-1]) for line in lines if line.startswith("tgi_batch_inference_duration_sum")]
        assert 0.25 <= sum(told) <= taken
        [steps] = asked
        assert 0.005 <= steps._last["decode"] < taken

    run(test, FakeShards(seconds=0.005))


@pytest.mark.parametrize("overlaps", [False, True])
def test_where_steps_overlap_two_are_under_way_while_tokens_are_delivered(monkeypatch: pytest.MonkeyPatch, overlaps: bool) -> None:
    """The shards plan the second while they compute the first: planned only then, it would begin late."""
    monkeypatch.setattr(module, "LEAD", 60.0)  # they are always due
    monkeypatch.setattr(module, "OVERLAPPING_LEAD", 60.0)
    deliver, answer, ahead, asked = Batcher._deliver, Steps.answer, [], []

    async def listens(steps: Steps) -> shard_pb2.StepReply | None:
        asked[:] = [steps]
        return await answer(steps)

    def looks(batcher: Batcher, reply: shard_pb2.StepReply) -> None:
        ahead.append(sum(one.step for one in asked[0]._underway))
        deliver(batcher, reply)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        assert len(await read(batcher, ask("hello", 9))) == 11

    monkeypatch.setattr(Batcher, "_deliver", looks)
    monkeypatch.setattr(Steps, "answer", listens)
    shards = FakeShards()
    shards.info.overlaps = overlaps
    run(test, shards)
    assert set(ahead[1:6]) == {2 if overlaps else 1}, ahead


@pytest.mark.parametrize("drafts", [False, True])
def test_where_there_are_drafts_tokens_are_delivered_first(monkeypatch: pytest.MonkeyPatch, drafts: bool) -> None:
    """Who needs how many goes by what was delivered, and such steps don't overlap."""
    monkeypatch.setattr(module, "OVERLAPPING_LEAD", 60.0)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        steps, wanted = steps_of(batcher), []
        monkeypatch.setattr(steps, "send", wanted.append)
        action = Decode(Allowance(step=0.01, first=0.001, draft=0.001, round=0.001, most=3, target=0.1) if drafts else None)
        steps._underway.append(Underway(action, monotonic(), asyncio.get_running_loop().create_future()))
        steps.send_due()
        assert wanted == [1 if drafts else 2]

    shards = FakeShards()
    shards.info.overlaps = True
    run(test, shards)


@pytest.mark.parametrize("overlaps", [False, True])
def test_where_steps_overlap_the_next_is_sent_earlier(monkeypatch: pytest.MonkeyPatch, overlaps: bool) -> None:
    monkeypatch.setattr(module, "LEAD", 0.0)
    monkeypatch.setattr(module, "OVERLAPPING_LEAD", 60.0)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        steps = steps_of(batcher)
        steps._last["decode"] = 30.0
        step = Underway(Decode(), monotonic(), asyncio.get_running_loop().create_future())
        waiting = asyncio.create_task(steps._near_end(step, monotonic()))
        await asyncio.wait([waiting], timeout=0.1)
        assert waiting.done() == overlaps
        step.reply.set_result(shard_pb2.Reply())
        await waiting

    shards = FakeShards()
    shards.info.overlaps = overlaps
    run(test, shards)


def test_a_request_that_is_not_answered_in_time_ends() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        late, quick = await asyncio.gather(
            read(batcher, ask("late", 200, timeout=0.05)), read(batcher, ask("quick", 3, timeout=5.0)), return_exceptions=True
        )
        assert isinstance(late, Expired)
        assert "not complete 0.05 s after" in str(late)
        assert isinstance(quick, list)
        await quiet(batcher, shards)
        assert value(batcher, 'tgi_request_failure{err="timeout"}') == 1

    run(test, FakeShards(seconds=0.002))


def test_a_deadline_counts_from_when_the_request_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from when it was found to be valid."""
    streams = opened(monkeypatch)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        now = monotonic()
        async with asyncio.timeout(10):
            with pytest.raises(Expired, match="not complete 30 s after"):
                await read(batcher, ask("a", 200, timeout=30.0, arrived=now - 29.9))
            with pytest.raises(Expired, match=": 0 tokens"):
                await read(batcher, ask("a", 200, timeout=30.0, arrived=now - 31.0))
        asked = batcher.submit(ask("a", 3, priority=Priority.BATCH, timeout=30.0, arrived=now - 20.0))
        await anext(asked)
        assert streams[-1].rank - streams[-1].arrived == pytest.approx((now + 10.0 - streams[-1].arrived) / 2)
        await asked.aclose()
        await quiet(batcher, shards)

    run(test, FakeShards(seconds=0.005))


def test_an_interactive_request_passes_those_that_came_before() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        ends: list[str] = []

        async def one(text: str, priority: Priority, tenant: str = "") -> None:
            await read(batcher, ask(text, 3, priority=priority, tenant=tenant))
            ends.append(text)

        tasks = [asyncio.create_task(one("first", Priority.NORMAL))]
        await asyncio.sleep(0.01)
        for text, priority in (("batch", Priority.BATCH), ("normal", Priority.NORMAL), ("now", Priority.INTERACTIVE)):
            tasks.append(asyncio.create_task(one(text, priority)))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert ends == ["first", "now", "normal", "batch"]

    run(test, FakeShards(seconds=0.01), max_batch_size=1)


def test_those_who_come_too_many_are_told_when_to_come_again() -> None:
    pace = Pace()
    assert pace.seconds(5.0) == 1.0
    for second in range(10):
        pace.ended(4.0 * second)
    assert pace.seconds(38.0) == pytest.approx(3.8)
    assert pace.seconds(10_000.0) == 60.0
    pace.idled(10_000.0 - 38.0)
    assert pace.seconds(10_000.0) == pytest.approx(3.8)


def test_the_pace_is_that_of_requests_that_end() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        assert batcher.seconds_to_room(monotonic() + 40) == 1.0
        for _ in range(2):
            await read(batcher, ask("a", 3))
        assert batcher.seconds_to_room(monotonic() + 40) == pytest.approx(20, abs=2)

    run(test)


def test_a_time_in_which_nobody_came_slows_no_pace() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        await asyncio.gather(*(read(batcher, ask("a", 3)) for _ in range(8)))
        batcher._readers._left -= 3600.0  # an hour ago
        pace = batcher._readers.pace
        pace._ends = deque((end - 3600.0 for end in pace._ends), 32)
        held = [batcher.submit(ask("b", 90)) for _ in range(8)]
        for stream in held:
            await anext(stream)
        with pytest.raises(Overloaded) as refused:
            batcher.submit(ask("c"))
        assert refused.value.retry_after == 1.0
        for stream in held:
            await stream.aclose()

    run(test, max_concurrent_requests=8)


def test_closing_a_stream_cancels_it_wherever_it_is() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        async with aclosing(batcher.submit(ask("runs", 90))) as running:
            await anext(running)
            shards.gate.clear()
            prefilling = asyncio.create_task(read(batcher, ask("p" * 100, 20)))
            queued = asyncio.create_task(read(batcher, ask("q" * 100, 20)))
            for _ in range(3):  # the gate lets the steps that are under way and the next one through
                shards.gate.set()
                await asyncio.sleep(0.001)
                shards.gate.clear()
            await asyncio.sleep(0.01)
            assert value(batcher, "penstock_running") == 2
            assert value(batcher, "penstock_waiting") == 1
            for task in (prefilling, queued):
                task.cancel()
            await asyncio.wait([prefilling, queued])
            assert value(batcher, "penstock_running") == 1
            assert value(batcher, "penstock_waiting") == 0
            shards.gate.set()
            await anext(running)
        await quiet(batcher, shards)
        assert value(batcher, "penstock_client_disconnects_total") == 3

    run(test, FakeShards(pages=64, page_size=4, seconds=0.001), max_batch_size=2)


def test_a_thousand_random_cancels_leave_all_pages_free() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        choose, room = random.Random(2), asyncio.Semaphore(60)  # never all at once, however late they are

        async def one(number: int) -> None:
            await asyncio.sleep(choose.random() / 2)
            async with room:
                await visit(number)

        async def visit(number: int) -> None:
            try:
                async with aclosing(batcher.submit(ask("y" * choose.randint(1, 80), choose.randint(1, 40)))) as stream:
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
        await quiet(batcher, shards)
        assert value(batcher, "penstock_client_disconnects_total") > 100  # on a slow machine more are refused instead

    run(test, max_concurrent_requests=50)


def test_more_than_allowed_are_refused_until_one_ends() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        first, second = batcher.submit(ask("a", 90)), batcher.submit(ask("b", 3))
        await anext(first)
        rest = asyncio.create_task(read(batcher, ask("c", 3)))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 requests are in flight"):
            batcher.submit(ask("d"))
        with pytest.raises(Overloaded):
            await anext(second)
        await rest
        assert len(await read(batcher, ask("d", 3))) == 5
        await first.aclose()
        await quiet(batcher, shards)

    run(test, max_concurrent_requests=2)


def test_who_has_all_places_shuts_no_other_tenant_out() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        greedy = [batcher.submit(ask("a", 90, tenant="many")) for _ in range(8)]
        for stream in greedy:
            await anext(stream)
        with pytest.raises(Overloaded, match="8 requests are in flight"):
            batcher.submit(ask("a", tenant="many"))
        assert len(await read(batcher, ask("b", 3, tenant="one"))) == 5
        assert len(await read(batcher, ask("b", 3, tenant="one"))) == 5
        held = batcher.submit(ask("b", 90, tenant="one"))
        await anext(held)
        with pytest.raises(Overloaded, match="9 requests are in flight"):
            batcher.submit(ask("b", tenant="one"))
        for stream in (*greedy, held):
            await stream.aclose()
        assert not batcher.readers
        await quiet(batcher, shards)

    run(test, max_concurrent_requests=8)


def opened(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """Streams from now on."""
    streams: list[Stream] = []
    begin = Batcher.open

    def open(batcher: Batcher, *arguments: Any) -> Stream:
        stream = begin(batcher, *arguments)
        streams.append(stream)
        return stream

    monkeypatch.setattr(Batcher, "open", open)
    return streams


def test_no_alarm_keeps_a_stream_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = opened(monkeypatch)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        await read(batcher, ask("a", 3, timeout=1000.0))
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
def test_who_has_little_time_is_set_back_by_no_more_than_half_of_it(
    monkeypatch: pytest.MonkeyPatch, priority: Priority, timeout: float, delay: float
) -> None:
    streams = opened(monkeypatch)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        asked = batcher.submit(ask("a", 3, priority=priority, timeout=timeout))
        await anext(asked)
        assert streams[0].rank - streams[0].arrived == pytest.approx(delay)
        await asked.aclose()

    run(test)


def test_the_first_token_of_a_request_is_counted_once() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        await read(batcher, ask("a", 4, choices=3))
        assert value(batcher, "penstock_time_to_first_token_seconds_count") == 1

    run(test)


def test_a_group_that_fails_fails_alone() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        shards.fail = {2: "not finite"}
        assert str(await failing_alone(batcher, shards, ask("b"))) == "not finite"
        assert not any(command.HasField("filter") for command in shards.commands), "the shards have dropped it themselves"

    run(test)


async def failing_alone(batcher: Batcher, shards: FakeShards, request: Request) -> Broken:
    """How the second of three requests fails, while the others don't notice."""
    asked = ask("a"), request, ask("c")
    good, bad, other = await asyncio.gather(*(read(batcher, one) for one in asked), return_exceptions=True)
    assert isinstance(bad, Broken)
    assert isinstance(good, list)
    assert isinstance(other, list)
    assert len(good) == len(other) == 7
    await quiet(batcher, shards)
    assert batcher.ready
    return bad


def test_a_stream_that_fails_leaves_no_rubbish() -> None:
    """Images may be large."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        async def fail() -> "weakref.ref[Image]":
            image = Image(start=0, rows=1, columns=1, pixels=b"abc", shape=(1, 3, 1, 1))
            try:
                await read(batcher, ask("a", images=(image,)))
            except Broken:
                return weakref.ref(image)
            raise AssertionError

        shards.fail = {1: "not finite"}
        gc.disable()
        try:
            image = await fail()
            await quiet(batcher, shards)
            assert image() is None
        finally:
            gc.enable()

    run(test)


def test_a_request_that_cannot_be_said_fails_alone() -> None:
    """Its value should have been refused."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        await failing_alone(batcher, shards, ask("b", min_new_tokens=1 << 32))

    run(test)


def test_when_the_shards_break_while_it_drains_every_stream_is_told_and_the_batcher_ends() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        shards.break_at = 4
        reading = [asyncio.create_task(read(batcher, ask(text))) for text in ("a", "b")]
        await asyncio.sleep(0)
        await batcher.drain(30)
        ends = await asyncio.gather(*reading, return_exceptions=True)
        assert [(type(end), str(end)) for end in ends] == [(NotReady, "the server shuts down, and shard rank 0 has ended")] * 2
        with pytest.raises(Broken):
            await batcher.wait()
        assert not batcher.ready
        assert batcher.stage == "shard rank 0 has ended"
        with pytest.raises(NotReady):
            batcher.submit(ask("c", arrived=1e-9))  # whose head came before

    run(test)


def test_it_is_the_same_failure_when_the_shards_broke_just_before_it_drains() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        reading = [asyncio.create_task(read(batcher, ask(text, 200))) for text in ("a", "b")]
        await asyncio.sleep(0.01)
        shards.break_at = 1
        shards.die()
        while batcher.ready:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await batcher.drain(30)
        ends = await asyncio.gather(*reading, return_exceptions=True)
        assert [(type(end), str(end)) for end in ends] == [(NotReady, "the server shuts down, and shard rank 0 has ended")] * 2
        assert value(batcher, 'tgi_request_failure{err="unavailable"}') == 2

    run(test)


def test_nothing_is_taken_before_the_start() -> None:
    async def main() -> None:
        shards = FakeShards()
        batcher = Batcher(config(), ByteTokenizer(), shards, Metrics())
        assert (batcher.ready, batcher.limits, batcher.stage) == (False, None, "waiting")
        with pytest.raises(NotReady, match="waiting"):
            batcher.submit(ask("a"))
        shards.stage = "ready"  # by a router before this one
        assert (batcher.ready, batcher.stage) == (False, "taking over shards that are ready")
        await batcher.start()
        assert (batcher.ready, batcher.stage) == (True, "ready")
        most = config().sequences
        assert batcher.limits == Limits(255, 256, vocabulary=256, pages=64, page_size=4, sequences=most)
        assert batcher.info is not None
        assert batcher.info.dtype == "float32"
        await batcher.close()

    asyncio.run(main())


def test_draining_lets_streams_end_and_takes_no_more() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        running = asyncio.create_task(read(batcher, ask("a", 20)))
        await asyncio.sleep(0.01)
        drain = asyncio.create_task(batcher.drain(30))
        await asyncio.sleep(0)
        assert (batcher.ready, batcher.stage) == (False, "shutting down")
        with pytest.raises(NotReady, match="shutting down"):
            batcher.submit(ask("b"))
        await drain
        assert running.done()
        assert len(running.result()) == 22

    run(test, FakeShards(seconds=0.002))


def test_draining_takes_what_came_before_and_waits_for_it() -> None:
    """It may still be on its way through validation."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        before, answered = monotonic(), asyncio.Event()
        await asyncio.sleep(0.001)
        drain = asyncio.create_task(batcher.drain(30, answered))
        await asyncio.sleep(0.02)
        assert not drain.done()
        for came in (0.0, monotonic()):
            with pytest.raises(NotReady, match="shutting down"):
                batcher.submit(ask("b", arrived=came))
        running = asyncio.create_task(read(batcher, ask("a", 20, arrived=before)))
        await asyncio.sleep(0.001)
        answered.set()
        await drain
        assert running.done()
        assert len(running.result()) == 22
        with pytest.raises(NotReady, match="shutting down"):
            batcher.submit(ask("b", arrived=before))

    run(test, FakeShards(seconds=0.002))


def test_what_does_not_become_valid_in_time_is_not_waited_for_and_refused() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        before = monotonic()
        await asyncio.sleep(0.001)
        await batcher.drain(0.02, asyncio.Event())
        with pytest.raises(NotReady, match="shutting down"):
            batcher.submit(ask("b", arrived=before))

    run(test)


def test_who_came_before_draining_does_not_wait_for_shards_that_nobody_starts() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        before, answered = monotonic(), asyncio.Event()
        shards.break_at = 1
        shards.die()
        await asyncio.sleep(0.02)
        drain = asyncio.create_task(batcher.drain(30, answered))
        await asyncio.sleep(0)
        with pytest.raises(NotReady, match="shutting down"):
            batcher.submit(ask("b", arrived=before))
        answered.set()
        await drain

    run(test)


def test_draining_waits_for_the_last() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        reading = [asyncio.create_task(read(batcher, ask("a", most))) for most in (3, 40)]
        await asyncio.sleep(0)
        await batcher.drain(30)
        assert [task.done() for task in reading] == [True, True]
        assert [len(task.result()) for task in reading] == [5, 42]

    run(test, FakeShards(seconds=0.001))


def test_who_is_cut_is_counted_once() -> None:
    """Who turns its failure into a status counts those that nobody has counted."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        shards.gate.clear()
        running = asyncio.create_task(read(batcher, ask("a", 200)))
        await asyncio.sleep(0)
        await batcher.drain(0)
        with pytest.raises(NotReady) as cut:
            await running
        assert cut.value.counted
        assert value(batcher, 'tgi_request_failure{err="unavailable"}') == 1

    run(test)


def test_draining_cuts_what_lasts_longer() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        running = asyncio.create_task(read(batcher, ask("a", 200)))
        waiting = asyncio.create_task(read(batcher, ask("b", 200)))
        await asyncio.sleep(0.01)
        await batcher.drain(0.02)
        for task in (running, waiting):
            with pytest.raises(NotReady, match="shut down"):
                await task
        await quiet(batcher, shards)

    run(test, FakeShards(seconds=0.002))


def test_warm_up_covers_the_largest_step() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        expected = shard_pb2.WarmupRequest(max_step_tokens=16, max_step_rows=8, max_total_tokens=100, max_sequences=8)
        assert shards.warmup == expected

    run(test, max_concurrent_requests=20, max_batch_size=8, max_total_tokens=100)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, 128), ({"max_concurrent_requests": 4}, 16), ({"max_concurrent_requests": 5000}, 1024), ({"max_batch_size": 2}, 2)],
)
def test_as_many_sequences_run_as_requests_are_taken_unless_the_operator_says(changes: dict[str, int], expected: int) -> None:
    info = shard_pb2.InfoReply(max_positions=1024)
    _, bounds = bounds_of(config(**changes), info, shard_pb2.WarmupReply(pages=100, page_size=16))
    assert bounds.sequences == expected


def test_the_policy_is_the_operators() -> None:
    bounds = Bounds(pages=1, page_size=1, step_tokens=64, sequences=1)
    warm = shard_pb2.WarmupReply(sample_tokens=10, sample_seconds=1.0)
    mixed = policy_of(config(itl_target=0.3), bounds, warm)
    assert isinstance(mixed, Mixed)
    assert mixed.cost is not None
    assert mixed.cost.predict(Work(10)) == pytest.approx(1.0, rel=0.01)
    assert isinstance(policy_of(config(prefill_policy="pause"), bounds, warm), Pause)


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
def test_settings_fit_model_and_memory_or_are_refused(changes: dict[str, int], expected: tuple[int, int] | str) -> None:
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


def test_shards_without_an_adapter_are_refused() -> None:
    """Such as somebody else has started: each request by it would fail."""
    info = shard_pb2.InfoReply(max_positions=1024, vocabulary=99, adapters=["one", "another"])
    warm = shard_pb2.WarmupReply(pages=100, page_size=16)
    bounds_of(config(adapters=("one",)), info, warm)
    with pytest.raises(Misconfigured, match=r"the shards have no adapter two, three: give them .* the same --lora-adapters"):
        bounds_of(config(adapters=("one", "two", "three")), info, warm)


def test_shards_that_promise_less_than_was_asked_for_are_refused() -> None:
    warm = shard_pb2.WarmupReply(pages=100, page_size=16)
    with pytest.raises(Misconfigured, match="the shards don't keep what --batch-invariant promises"):
        bounds_of(config(batch_invariant=True), shard_pb2.InfoReply(max_positions=1024), warm)
    bounds_of(config(batch_invariant=True), shard_pb2.InfoReply(max_positions=1024, batch_invariant=True), warm)


def test_how_many_full_requests_fit_at_once() -> None:
    """By pages, by number."""
    bounds = Bounds(pages=100, page_size=16, step_tokens=16, sequences=20)
    assert [bounds.together(tokens) for tokens in (17, 100, 33, 1000)] == [20, 14, 20, 1]
    assert replace(bounds, pages=10).together(33) == 3


def test_shards_may_have_room_for_fewer_sequences() -> None:
    info = shard_pb2.InfoReply(max_positions=1024)
    for told, expected in ((0, 20), (7, 7), (30, 20)):
        warm = shard_pb2.WarmupReply(pages=100, page_size=16, sequences=told)
        limits, bounds = bounds_of(config(max_batch_size=20), info, warm)
        assert limits.sequences == bounds.sequences == expected


def test_a_small_pool_bounds_what_a_request_may_ask() -> None:
    info = shard_pb2.InfoReply(max_positions=1024)
    limits, bounds = bounds_of(config(), info, shard_pb2.WarmupReply(pages=3, page_size=16))
    assert limits.max_total_tokens == 48
    assert bounds.together(limits.max_total_tokens) == 1
    with pytest.raises(Misconfigured, match="--max-total-tokens 100 is more than the pool's capacity of 48"):
        bounds_of(config(max_total_tokens=100), info, shard_pb2.WarmupReply(pages=3, page_size=16))
