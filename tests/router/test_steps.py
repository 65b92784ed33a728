"""`Steps`: commands are sent ahead of replies, and replies delivered in order; streams that are preempted and resumed; beams; the
times of steps."""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import aclosing
from time import monotonic
from typing import Any

import pytest

from penstock.proto import shard_pb2
from penstock.router import steps as module
from penstock.router.batcher import Batcher
from penstock.router.commands import group_of
from penstock.router.drafting import Allowance
from penstock.router.request import Beams, Broken, Finish, Grown, Prompt, Request, Token
from penstock.router.scheduler import Action, Decode, Filter, Prefill
from penstock.router.steps import Steps, Underway
from penstock.tests.router.fakes import FakeShards
from penstock.tests.router.harness import expected_text, make_request, metric_value, read, run, until_idle


def test_next_step_is_requested_before_the_last_is_answered() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        sent = []
        execute = shards.execute

        def spy(command: shard_pb2.Command) -> "asyncio.Future[shard_pb2.Reply]":
            sent.append(command)
            return execute(command)

        shards.execute = spy  # type: ignore[method-assign]
        shards.gate.clear()
        task = asyncio.create_task(read(batcher, make_request("hello", 9)))
        while len(sent) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert [command.WhichOneof("kind") for command in sent] == ["prefill", "decode"], "and no more than one ahead"
        assert not shards.commands
        shards.gate.set()
        assert len(await task) == 11

    run(test)


def test_next_command_is_sent_before_tokens_are_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent when the event loop runs, and until then idle shards compute nothing."""
    sent = dispatched = delivered = 0
    deliver = Batcher._deliver

    async def until_its_end(steps: Steps, step: Underway, began: float) -> None:
        await asyncio.wait([step.reply])  # as if the step were shorter than the one before

    def command_leaves() -> None:
        nonlocal dispatched
        dispatched += 1

    def checked_deliver(batcher: Batcher, reply: shard_pb2.StepReply) -> None:
        nonlocal delivered
        delivered += 1
        assert dispatched == sent
        deliver(batcher, reply)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        execute = shards.execute

        def spy(command: shard_pb2.Command) -> "asyncio.Future[shard_pb2.Reply]":
            nonlocal sent
            sent += 1
            asyncio.get_running_loop().call_soon(command_leaves)
            return execute(command)

        shards.execute = spy  # type: ignore[method-assign]
        assert len(await read(batcher, make_request("hello", 9))) == 11
        assert sent >= delivered >= 9

    monkeypatch.setattr(Batcher, "_deliver", checked_deliver)
    monkeypatch.setattr(Steps, "_near_end", until_its_end)
    run(test)


def test_request_that_arrives_during_a_long_step_joins_the_next_step() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        async with aclosing(batcher.submit(make_request("runs", 90))) as running:
            for _ in range(4):
                await anext(running)
            before = len(shards.commands)
            items = await read(batcher, make_request("late", 1))  # arrives in the middle of a step
            assert len(items) == 3
            assert len(shards.commands) - before <= 3, "the next step but one would be the fourth"

    run(test, FakeShards(seconds=0.05))


def test_preempted_streams_have_complete_text_without_repetition() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        texts = ["a" * count for count in range(1, 9)]
        stops = [expected_text(text, 14, 1)[10:] for text in texts]  # stop strings that end one of several choices early
        requests = [make_request(text, 30, choices=1 + i % 2 * 2, stop=(stops[i],) * (i % 2)) for i, text in enumerate(texts)]
        found = await asyncio.gather(*(read(batcher, request) for request in requests))
        for text, request, items in zip(texts, requests, found, strict=True):
            finishes = {item.choice: item.text for item in items if isinstance(item, Finish)}
            for choice in range(request.choices):
                whole, stop = expected_text(text, 30, choice), request.stop[0] if request.stop else "\0"
                assert finishes[choice] == (whole[: whole.find(stop) + len(stop)] if stop in whole else whole)
                tokens = [item.id for item in items if isinstance(item, Token) and item.choice == choice]
                assert "".join(map(chr, tokens)) == finishes[choice]
        await until_idle(batcher, shards)
        assert metric_value(batcher, "penstock_pauses_total") > 3
        assert metric_value(batcher, "penstock_restored_tokens_total") > 0

    run(test, FakeShards(pages=30, page_size=4))


def test_stream_that_fails_while_its_preemption_is_in_flight_is_not_resumed() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        execute = shards.execute
        preempted: list[int] = []

        def spy(command: shard_pb2.Command) -> "asyncio.Future[shard_pb2.Reply]":
            if command.filter.pause and not preempted:
                preempted.extend(command.filter.pause)
                for uid in preempted:
                    asyncio.get_running_loop().call_soon(batcher._fail, uid, Broken("gone"))
            return execute(command)

        shards.execute = spy  # type: ignore[method-assign]
        ends = await asyncio.gather(*(read(batcher, make_request("a" * n, 60)) for n in range(1, 5)), return_exceptions=True)
        assert preempted
        assert [isinstance(end, Broken) for end in ends] == [uid in preempted for uid in range(1, 5)]
        await until_idle(batcher, shards)

    run(test, FakeShards(pages=32, seconds=0.001))


def steps_of(batcher: Batcher) -> Steps:
    """A second `Steps` of the same batcher, with its streams."""
    return Steps(batcher.scheduler, batcher._shards, batcher._streams, batcher._metrics, batcher._fail)


def resumed_choices(batcher: Batcher, request: Request, ended: Sequence[int], places: int) -> list[int]:
    """Returns the choices that are sent when a preempted request with `places` continuations is resumed, after the choices
    in `ended` have ended."""
    stream = batcher.open(request, None)
    stream.continuations = [shard_pb2.Continuation(choice=place, tokens=[65]) for place in range(places)]
    for place in ended:
        stream.choices[place].running = False
    sent = group_of(stream)
    batcher.close_stream(stream)
    return [one.choice for one in sent.continuations]


def test_choice_that_ended_during_preemption_is_not_resumed() -> None:
    """A stop string may be found after the pages were taken back."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        assert resumed_choices(batcher, make_request("hello", 9, choices=3), [1], 3) == [0, 2]

    run(test)


def test_resumed_request_keeps_its_first_start_time() -> None:
    """Otherwise its time in the queue would be reported too long."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.open(make_request("hello"), None)
        for now in (5.0, 9.0):
            assert steps_of(batcher)._group(stream, now) is not None
            assert (stream.started, stream.run.started) == (5.0, 5.0)
        batcher.close_stream(stream)

    run(test)


def test_all_beams_of_a_preempted_beam_search_are_resumed() -> None:
    """There are more beams than choices."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        assert resumed_choices(batcher, make_request("hello", 9, choices=2, beams=Beams(width=4)), [], 4) == [0, 1, 2, 3]

    run(test)


def test_restarted_beam_search_does_not_repeat_growth_already_delivered() -> None:
    """The search restarts when the shards were lost."""

    def step(uid: int, length: int) -> shard_pb2.StepReply:
        grown = shard_pb2.Grown(uid=uid, parents=[0, 1], tokens=[64 + length, 90], scores=[-1.0, -2.0], length=length)
        return shard_pb2.StepReply(grown=[grown])

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.open(make_request("hello", 9, choices=2, beams=Beams(width=2, watched=True)), None)
        for length in (1, 2, 1, 2, 3):
            batcher._deliver(step(stream.uid, length))
        first, *grown = stream.take()
        assert first == Prompt(())
        assert [item.live[0].id for item in grown if isinstance(item, Grown)] == [65, 66, 67]
        batcher.close_stream(stream)

    run(test)


def test_beam_search_that_finds_fewer_answers_than_choices_ends_with_those() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.open(make_request("hello", 9, choices=3, beams=Beams(width=3)), None)
        stream.started = 1.0
        scored: dict[str, Any] = {"scored_uids": [stream.uid], "scored_counts": [2], "scores": [-1.0, -2.0]}
        rows: dict[str, Any] = {"choices": [0, 1], "tokens": [65, 66], "logprobs": [-1.0] * 2, "finishes": [2, 2]}
        batcher._deliver(shard_pb2.StepReply(uids=[stream.uid] * 2, **rows, **scored))
        ends = [item for item in stream.take() if isinstance(item, Finish)]
        assert [(end.choice, end.score) for end in ends] == [(0, -1.0), (1, -2.0)]
        assert stream.left == 0
        assert not batcher.streams
        batcher.close_stream(stream)
        assert metric_value(batcher, "tgi_request_success") == 1

    run(test)


def test_beam_search_ends_when_its_only_answer_was_ended_by_a_stop_string() -> None:
    """The shards may not find a stop string if a special token, which is hidden from readers, is within it."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.open(make_request("hello", 9, choices=2, beams=Beams(width=2), stop=("A",)), None)
        stream.started = 1.0
        row: dict[str, Any] = {"choices": [0], "tokens": [65], "logprobs": [-1.0]}
        batcher._deliver(shard_pb2.StepReply(uids=[stream.uid], **row, finishes=[0]))
        assert stream.left == 1
        scored: dict[str, Any] = {"scored_uids": [stream.uid], "scored_counts": [1], "scores": [-1.0]}
        batcher._deliver(shard_pb2.StepReply(uids=[stream.uid], **row, finishes=[2], **scored))
        assert (stream.left, len(batcher.streams)) == (0, 0)
        assert [item.reason for item in stream.take() if isinstance(item, Finish)] == ["stop_sequence"]
        batcher.close_stream(stream)
        assert metric_value(batcher, "tgi_request_success") == 1

    run(test)


def test_cached_prompt_tokens_are_counted_once_for_a_request_preempted_in_its_prompt() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.open(make_request("hello, hello", 9), None)
        found: dict[str, Any] = {"found_uids": [stream.uid], "found_tokens": [8]}
        batcher._deliver(shard_pb2.StepReply(**found))
        reply = shard_pb2.FilterReply(free=64, paused=[shard_pb2.Paused(uid=stream.uid, grow=3, lacking=12)])
        steps_of(batcher)._report(Filter(pause=(stream.uid,)), 0.0, shard_pb2.Reply(filter=reply))
        row: dict[str, Any] = {"choices": [0], "tokens": [65], "logprobs": [-1.0], "finishes": [0]}
        batcher._deliver(shard_pb2.StepReply(uids=[stream.uid], **row, **found))
        assert stream.take()[0] == Prompt((), cached_tokens=8)
        batcher.close_stream(stream)

    run(test)


def test_end_of_a_choice_is_reported_to_the_scheduler_once() -> None:
    """A choice may have met a stop string one step before the shards ended it, and its stream may be closed by then."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.open(make_request("hello", 9, choices=3), None)
        ends: dict[str, Any] = {"uids": [stream.uid] * 3 + [99], "choices": [0, 1, 2, 0], "finishes": [1, 2, 0, 1]}
        stream.choices[1].running = False
        assert steps_of(batcher)._finished(shard_pb2.StepReply(**ends)) == [stream.uid]
        assert steps_of(batcher)._finished(shard_pb2.StepReply(**ends)) == []
        batcher.close_stream(stream)

    run(test)


def test_inter_token_latency_is_measured_between_steps_not_between_tokens_of_one() -> None:
    def step(uid: int, count: int) -> shard_pb2.StepReply:
        same: dict[str, Any] = {"uids": [uid] * count, "choices": [0] * count, "finishes": [0] * count}
        return shard_pb2.StepReply(tokens=[65] * count, logprobs=[-1.0] * count, **same)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.open(make_request("hello", 9, drafts=3), None)
        for count, intervals in ((2, 0), (3, 1), (1, 2)):
            batcher._deliver(step(stream.uid, count))
            assert metric_value(batcher, "penstock_inter_token_latency_seconds_count") == intervals
            await asyncio.sleep(0)
        assert stream.run.steps == 3
        batcher.close_stream(stream)

    shards = FakeShards()
    shards.gate.clear()
    run(test, shards)


def test_step_time_counts_from_the_end_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from its sending: otherwise the times would add up to more than the elapsed time."""
    used: set[Steps] = set()
    answer = Steps.answer

    def recording_answer(steps: Steps) -> Awaitable[shard_pb2.StepReply | None]:
        used.add(steps)
        return answer(steps)

    monkeypatch.setattr(Steps, "answer", recording_answer)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        began = monotonic()
        await read(batcher, make_request("hello", 50))
        taken = monotonic() - began
        lines = batcher._metrics.render().decode().splitlines()
        durations = [float(line.split()[-1]) for line in lines if line.startswith("tgi_batch_inference_duration_sum")]
        assert 0.25 <= sum(durations) <= taken
        [steps] = used
        assert 0.005 <= steps._last["decode"] < taken

    run(test, FakeShards(seconds=0.005))


def test_steps_are_counted_when_requested_and_have_failed_when_their_shards_are_lost() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        def count(what: str) -> float:
            name = f"tgi_batch_inference_{what}_total"
            return batcher._metrics.samples([name]).get(name, 0.0)

        shards.gate.clear()
        reading = asyncio.create_task(read(batcher, make_request("hello", 9)))
        while count("count") < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert (count("success"), count("failure")) == (0, 0)
        shards.die()
        shards.gate.set()
        assert len(await reading) == 11
        assert count("failure") == 2
        assert count("count") >= count("success") + 2

    run(test)


@pytest.mark.parametrize("overlaps", [False, True])
def test_two_steps_are_in_flight_during_delivery_only_with_overlapping_steps(
    monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    """The shards plan the second step while they compute the first: if it were sent later, it would begin late."""
    monkeypatch.setattr(module, "LEAD", 60.0)  # steps are always due
    monkeypatch.setattr(module, "OVERLAPPING_LEAD", 60.0)
    deliver, answer, ahead, used = Batcher._deliver, Steps.answer, [], []

    async def recording_answer(steps: Steps) -> shard_pb2.StepReply | None:
        used[:] = [steps]
        return await answer(steps)

    def checked_deliver(batcher: Batcher, reply: shard_pb2.StepReply) -> None:
        ahead.append(sum(one.step for one in used[0]._underway))
        deliver(batcher, reply)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        assert len(await read(batcher, make_request("hello", 9))) == 11

    monkeypatch.setattr(Batcher, "_deliver", checked_deliver)
    monkeypatch.setattr(Steps, "answer", recording_answer)
    shards = FakeShards()
    shards.info.overlaps = overlaps
    run(test, shards)
    assert set(ahead[1:6]) == {2 if overlaps else 1}, ahead


@pytest.mark.parametrize("drafts", [False, True])
def test_overlap_sends_one_step_ahead_with_drafts_and_two_without(monkeypatch: pytest.MonkeyPatch, drafts: bool) -> None:
    """The number of drafts depends on the delivered tokens, and steps with drafts don't overlap."""
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


@pytest.mark.parametrize(
    ("action", "ahead", "seconds", "most"),
    [
        (Decode(), True, 0.002, [2, 3]),
        (Decode(), True, 0.02, [2]),
        (Decode(), False, 0.002, [2]),
        (Prefill((), (), 8, True), True, 0.002, [2]),
    ],
    ids=["short", "long", "not begun", "prompts"],
)
def test_third_step_is_sent_ahead_of_short_decode_steps_once_the_first_has_begun(
    monkeypatch: pytest.MonkeyPatch, action: Action, ahead: bool, seconds: float, most: list[int]
) -> None:
    """Groups say what they may take in two steps: one that the shards have begun when they say so is none of these."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        steps, wanted = steps_of(batcher), []
        monkeypatch.setattr(batcher.scheduler, "report", lambda report: None)
        monkeypatch.setattr(steps, "send", wanted.append)
        steps._underway.append(Underway(action, monotonic(), asyncio.get_running_loop().create_future()))
        steps._report(Decode(), seconds, shard_pb2.Reply(step=shard_pb2.StepReply(ahead=ahead)))
        steps.send_due()
        assert wanted == most

    shards = FakeShards()
    shards.info.overlaps = True
    run(test, shards)


@pytest.mark.parametrize("overlaps", [False, True])
def test_next_step_is_sent_earlier_with_overlapping_steps(monkeypatch: pytest.MonkeyPatch, overlaps: bool) -> None:
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
