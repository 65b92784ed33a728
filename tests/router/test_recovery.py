"""`Inquest`: which requests count as poison after which deaths of the shards, in simulated steps; and a `Batcher` whose fake shards
die."""

import asyncio
import random
from contextlib import suppress
from time import monotonic

import pytest

from penstock.proto import shard_pb2
from penstock.router import batcher as module
from penstock.router.batcher import Batcher
from penstock.router.recovery import FURTHER, Inquest
from penstock.router.request import Beams, Broken, Finish, Item, NotReady, Overloaded, Prompt, Request, Superseded, Token
from penstock.tests.router.fakes import END, FakeShards, letter
from penstock.tests.router.harness import expected_text, make_request, metric_value, read, run, until_idle


class SimulatedRequests:
    """Simulates requests step by step, some of which kill the shards at a certain step of theirs."""

    def __init__(self, lengths: dict[int, int], killers: dict[int, int]) -> None:
        self.lengths = lengths  # steps that each takes
        self.killers = killers  # poison requests: uid, and the step at which it kills
        self.places = dict.fromkeys(lengths, 0)
        self.inquest = Inquest()
        self.deaths = 0
        self.failed: list[int] = []

    def step(self, killed: bool = False) -> None:
        """One step of all requests that may run; the shards die if one of them kills at its step, or if `killed`."""
        running = {uid: place for uid, place in self.places.items() if self.inquest.admits(uid)}
        assert running, "everybody waits for nobody"
        if killed or any(self.killers.get(uid) == place for uid, place in running.items()):
            self.deaths += 1
            guilty = self.inquest.died(running)
            if guilty is not None:
                self.failed.append(guilty)
                del self.places[guilty]
            return
        for uid, place in running.items():
            self.places[uid] = place + 1
            if place + 1 == self.lengths[uid]:
                del self.places[uid]
        self.inquest.hear(self.places.get)

    def run(self) -> None:
        for _ in range(10_000):
            if not self.places:
                return
            self.step()
        raise AssertionError("it never ends")


def test_request_that_kills_the_shards_twice_while_alone_fails() -> None:
    requests = SimulatedRequests({1: 100}, {1: 30})
    requests.run()
    assert (requests.failed, requests.deaths) == ([1], 2)


@pytest.mark.parametrize("count", [2, 3, 8, 50])
def test_poison_request_among_many_is_found_and_the_others_continue(count: int) -> None:
    for guilty in {1, 2, count // 2 + 1, count}:
        requests = SimulatedRequests(dict.fromkeys(range(1, count + 1), 60), {guilty: 20})
        requests.run()
        assert requests.failed == [guilty]
        assert requests.deaths <= 4 + count.bit_length()


def test_poison_request_that_is_the_youngest_of_64_is_found_after_four_deaths() -> None:
    requests = SimulatedRequests(dict.fromkeys(range(1, 65), 60), {64: 0})
    requests.run()
    assert (requests.failed, requests.deaths) == ([64], 4)  # twice with all, once with the acquitted, once alone


def test_two_poison_requests_are_both_found() -> None:
    requests = SimulatedRequests(dict.fromkeys(range(1, 20), 60), {3: 20, 17: 40})
    requests.run()
    assert sorted(requests.failed) == [3, 17]


def test_random_deaths_fail_no_request_that_makes_progress() -> None:
    chance = random.Random(1)
    for _ in range(50):
        requests = SimulatedRequests({uid: chance.randint(1, 300) for uid in range(1, chance.randint(2, 20))}, {})
        since = 0
        while requests.places:
            killed = since > FURTHER + 1 and chance.random() < 0.1
            since = 0 if killed else since + 1
            requests.step(killed)
        assert requests.failed == []


def test_death_at_an_earlier_step_of_a_request_than_before_counts_half() -> None:
    """A beam search restarts, and other deaths come before it is as far as it was. It is no suspect before the third death."""
    inquest = Inquest()
    for place in (900, 300, 100):
        assert not inquest.open
        assert inquest.died({1: place, 2: place}) is None
    assert [inquest.suspects(uid) for uid in (1, 2)] == [True, True]
    alone = Inquest()
    assert [alone.died({1: place}) for place in (900, 300, 500, 200)] == [None] * 4, "further than where it died last"
    assert alone.died({1: 100}) == 1


def test_request_that_kills_earlier_on_replay_is_found_after_three_deaths() -> None:
    inquest = Inquest()
    assert [inquest.died({1: place}) for place in (100, 40, 40)] == [None, None, 1]


@pytest.mark.parametrize("spread", [4, 20, 100, 400])
def test_request_that_kills_at_varying_steps_is_found_within_nine_deaths_on_average(spread: int) -> None:
    chance, deaths = random.Random(1), 0
    for _ in range(100):
        inquest, guilty = Inquest(), None
        while guilty is None:
            guilty = inquest.died({1: chance.randint(0, spread)})
            deaths += 1
    assert deaths / 100 < 9


def test_death_in_which_nothing_was_computed_changes_no_suspicion() -> None:
    inquest = Inquest()
    assert inquest.died({1: 5, 2: 5}) is None
    assert not inquest.open
    assert inquest.died({}) is None
    assert inquest.died({1: 5, 2: 5}) is None
    assert inquest.open
    assert inquest.died({}) is None
    assert (inquest.admits(1), inquest.admits(2), inquest.admits(3)) == (True, False, False)


def test_trial_ends_when_the_requests_on_trial_have_ended() -> None:
    inquest = Inquest()
    for _ in range(2):
        inquest.died({1: 5, 2: 5})
    assert not inquest.hear({1: 5 + FURTHER, 2: 5}.get)
    assert inquest.hear({2: 5}.get)
    assert (inquest.admits(2), inquest.admits(3)) == (True, False)
    assert inquest.hear({2: 6 + FURTHER}.get)
    assert not inquest.open
    assert inquest.admits(3)


def test_no_trial_is_held_for_suspects_that_have_all_ended() -> None:
    """There would be no later step in which they could be acquitted."""
    inquest = Inquest()
    for _ in range(2):
        inquest.died({1: 5, 2: 5, 3: 5, 4: 5})
    assert inquest.hear({}.get)
    assert not inquest.open
    assert inquest.admits(5)


# A batcher whose shards die


async def restart(shards: FakeShards, loss: Broken | None = None) -> None:
    """Kills the shards, and returns when they have restarted."""
    shards.die(loss)
    groups_met = shards.groups_met
    while shards.groups_met == groups_met:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def test_streams_have_the_same_items_after_five_restarts_of_the_shards() -> None:
    requests = [
        make_request("a" * 40, 160),
        make_request("b", 160, choices=3),
        make_request("cc", 150, end_ids=(END,)),
        make_request("d", 160, stop=(chr(letter(b"d", 20)) + chr(letter(b"d", 21)),)),
        make_request("f", 160, choices=3, stop=(expected_text("f", 8, 1)[4:],)),  # one of the choices ends early
        make_request("e" * 30, 120, prompt_logprobs=True),
    ]

    def fake() -> FakeShards:
        return FakeShards(pages=512, seconds=0.001, ends_at=lambda prompt: 73 if prompt[0] == ord("c") else 0)

    async def undisturbed(batcher: Batcher, shards: FakeShards) -> None:
        expected.extend(await asyncio.gather(*(read(batcher, request) for request in requests)))

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        reading = [asyncio.create_task(read(batcher, request)) for request in requests]
        for pause in (0.0, 0.02, 0.04, 0.03, 0.05):
            await asyncio.sleep(pause)
            await restart(shards)
        found = await asyncio.gather(*reading)
        assert [deterministic_parts(items) for items in found] == [deterministic_parts(items) for items in expected]
        await until_idle(batcher, shards)
        assert metric_value(batcher, "penstock_restarts_total") == 5
        assert metric_value(batcher, "penstock_replayed_requests_total") > len(requests)
        assert metric_value(batcher, "penstock_recovery_seconds_count") == 5

    expected: list[list[Item]] = []
    run(undisturbed, fake())
    run(test, fake())


def deterministic_parts(items: list[Item]) -> list[object]:
    """The parts of a stream that must not depend on timing, sorted by choice, since the choices' order may."""
    parts: list[object] = []
    for item in sorted(items, key=lambda item: item.choice if isinstance(item, Token | Finish) else -1):
        match item:
            case Prompt(logprobs):
                parts.append(logprobs)
            case Token(id, text, delta):
                parts.append((id, text, delta))
            case Finish(reason, text, delta, generated):
                parts.append((reason, text, delta, generated))
    return parts


def test_requests_queue_without_shards_and_may_be_cancelled() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        begun = batcher.submit(make_request("a", 30))
        items = await anext(begun)
        shards.break_at = 1
        shards.die()
        while batcher.ready:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert batcher.stage == "recovering: connected"
        leaving, waiting = (
            asyncio.create_task(read(batcher, make_request("b", 5))),
            asyncio.create_task(read(batcher, make_request("c", 5))),
        )
        await asyncio.sleep(0.01)
        assert metric_value(batcher, "penstock_waiting") + metric_value(batcher, "penstock_paused") == 3
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        third = asyncio.create_task(read(batcher, make_request("d", 5)))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            batcher.submit(make_request("e", 5))
        shards.break_at = 0
        assert len(await waiting) == len(await third) == 7
        assert batcher.ready
        items += [item async for more in begun for item in more]
        assert [item.id for item in items if isinstance(item, Token)] == [letter(b"a", position) for position in range(30)]
        await until_idle(batcher, shards)

    run(test, FakeShards(seconds=0.001), max_concurrent_requests=3)


def test_death_of_idle_shards_is_noticed_at_once() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        await read(batcher, make_request("a"))
        await asyncio.sleep(0.02)  # until no step is in flight
        async with asyncio.timeout(5):
            await restart(shards)
        await asyncio.sleep(0.01)
        assert batcher.ready
        assert len(await read(batcher, make_request("a"))) == 7

    run(test)


def test_poison_request_fails_alone() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        shards.killers = {b"killer"}
        requests = [make_request(text, 40) for text in ("a", "b", "killer", "c")]
        reading = [asyncio.create_task(read(batcher, request)) for request in requests]
        late = asyncio.create_task(read_later(batcher, make_request("late")))
        *others, last = await asyncio.gather(*reading, late, return_exceptions=True)
        killer = others.pop(2)
        assert isinstance(killer, Broken)
        assert "again and again" in str(killer)
        for text, items in zip(("a", "b", "c"), others, strict=True):
            assert isinstance(items, list)
            tokens = [item.id for item in items if isinstance(item, Token)]
            assert tokens == [letter(text.encode(), position) for position in range(40)]
        assert isinstance(last, list)
        assert shards.groups_met <= 8
        await until_idle(batcher, shards)
        assert batcher.ready

    async def read_later(batcher: Batcher, request: Request) -> list[Item]:
        await asyncio.sleep(0.02)
        return await read(batcher, request)

    run(test, FakeShards(seconds=0.001))


@pytest.mark.parametrize("loss", [Broken("they died"), Superseded("another router has them")])
def test_request_is_not_guilty_of_what_another_router_does(loss: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AWAY", 0.02)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        reading = asyncio.create_task(read(batcher, make_request("a", 20)))
        await asyncio.sleep(0.01)
        with suppress(TimeoutError):
            async with asyncio.timeout(2):
                for _ in range(5):
                    began = monotonic()
                    await restart(shards, loss)
                    assert monotonic() - began >= (0.02 if isinstance(loss, Superseded) else 0)
        if isinstance(loss, Superseded):
            assert len(await reading) == 22
        else:
            with pytest.raises(Broken, match="again and again"):
                await reading

    run(test, FakeShards(seconds=0.005))


def test_restart_with_a_smaller_pool_fails_only_requests_that_no_longer_fit() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        large, small = (
            asyncio.create_task(read(batcher, make_request("a", 200))),
            asyncio.create_task(read(batcher, make_request("b", 40))),
        )
        await asyncio.sleep(0.02)
        shards.pages = 30
        await restart(shards)
        with pytest.raises(Broken, match="too little memory"):
            await large
        assert len(await small) == 42
        assert batcher.limits is not None
        assert batcher.limits.max_total_tokens == 120
        await until_idle(batcher, shards)

    run(test, FakeShards(seconds=0.001))


def test_drain_without_shards_ends_at_once() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        reading = asyncio.create_task(read(batcher, make_request("a", 200)))
        await asyncio.sleep(0.01)
        shards.break_at = 1
        shards.die()
        while batcher.ready:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await batcher.drain(30)
        with pytest.raises(NotReady, match="shuts down"):
            await reading

    run(test, FakeShards(seconds=0.001))


def test_death_counts_move_to_another_inquest_with_the_request() -> None:
    first, second = Inquest(), Inquest()
    assert first.died({1: 5, 2: 5}) is None
    assert not first.suspects(1)
    for uid in (1, 2):
        second.adopt(uid, first.release(uid))
    assert first.release(1) is None
    assert second.died({1: 6, 2: 6 + FURTHER, 3: 0}) is None  # request 2 has made progress
    assert [second.suspects(uid) for uid in (1, 2, 3)] == [True, False, False]
    assert second.release(1) == (2, 6)
    assert not second.open
    third = Inquest()
    third.adopt(1, (2, 6))
    assert third.died({1: 6}) == 1


def test_next_trial_starts_when_the_suspects_on_trial_are_released() -> None:
    inquest = Inquest()
    for _ in range(2):
        inquest.died({1: 0, 2: 0, 3: 0})
    assert [inquest.admits(uid) for uid in (1, 2, 3)] == [True, True, False]
    inquest.release(1)
    assert not inquest.admits(3)
    inquest.release(2)
    assert [inquest.admits(uid) for uid in (3, 4)] == [True, False]
    inquest.release(3)
    assert not inquest.open


def test_released_suspect_is_not_tried() -> None:
    inquest = Inquest()
    for _ in range(2):
        inquest.died({1: 5, 2: 5, 3: 5, 4: 5})
    assert inquest.release(3) == (2, 5)
    assert not inquest.suspects(3)
    assert inquest.hear({1: 6 + FURTHER, 2: 6 + FURTHER, 4: 5}.get)
    assert (inquest.admits(4), inquest.admits(3)) == (True, False)
    assert inquest.hear({4: 6 + FURTHER}.get)
    assert not inquest.open


def test_release_of_an_acquitted_request_returns_nothing() -> None:
    inquest = Inquest()
    for _ in range(2):
        inquest.died({1: 5, 2: 5})
    assert inquest.hear({1: 6 + FURTHER, 2: 5}.get)
    assert inquest.release(1) is None
    assert inquest.release(2) == (2, 5)


def test_second_poison_request_is_found_after_the_first_and_the_others_continue() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        shards.killers = {b"killer", b"second"}
        others = [asyncio.create_task(read(batcher, make_request(text, 300))) for text in ("a", "b", "c")]
        for text in shards.killers:
            with pytest.raises(Broken, match="again and again"):
                await read(batcher, make_request(text.decode(), 40))
            assert not any(reading.done() for reading in others)
        for text, items in zip(("a", "b", "c"), await asyncio.gather(*others), strict=True):
            assert [item.id for item in items if isinstance(item, Token)] == [letter(text.encode(), place) for place in range(300)]
        await until_idle(batcher, shards)

    run(test, FakeShards(pages=512, seconds=0.001))


async def start_trial(batcher: Batcher, shards: FakeShards) -> list["asyncio.Task[list[Item]]"]:
    """Starts two streams and restarts the shards twice, so that one stream is on trial, and the other waits for it."""
    reading = [asyncio.create_task(read(batcher, make_request(text, 100))) for text in ("a", "b")]
    for _ in range(2):
        await until_computed(batcher, 2)
        await restart(shards)
    assert batcher.trying
    return reading


async def until_computed(batcher: Batcher, count: int) -> None:
    """Returns when a step that computes at least `count` requests is in flight."""
    while batcher._scheduler is None or len(batcher._scheduler.in_hand) < count:  # noqa: ASYNC110
        await asyncio.sleep(0)


def test_request_cancelled_during_a_trial_is_not_admitted_after_it() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        reading = await start_trial(batcher, shards)
        late = asyncio.create_task(read(batcher, make_request("late")))
        await asyncio.sleep(0)
        assert len(batcher._held) == 2
        late.cancel()
        await asyncio.wait([late])
        assert [len(items) for items in await asyncio.gather(*reading)] == [102] * 2
        assert not batcher.trying
        await until_idle(batcher, shards)

    run(test, FakeShards(pages=512, seconds=0.005))


def test_request_waiting_for_a_trial_continues_when_all_suspects_are_cancelled() -> None:
    """They leave while there are no shards, so that no reply wakes the loop."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        reading = [asyncio.create_task(read(batcher, make_request(text, 100))) for text in ("a", "b")]
        await until_computed(batcher, 2)
        await restart(shards)
        await until_computed(batcher, 2)
        shards.break_at = 1
        shards.die()
        while not batcher.trying:  # noqa: ASYNC110
            await asyncio.sleep(0)
        late = asyncio.create_task(read(batcher, make_request("late")))
        for one in reading:
            one.cancel()
        await asyncio.wait(reading)
        assert batcher._held
        shards.break_at = 0
        assert len(await asyncio.wait_for(late, 10)) == 7
        await until_idle(batcher, shards)

    run(test, FakeShards(pages=512, seconds=0.005))


def test_cached_prompt_token_counts_are_reset_when_the_shards_restart() -> None:
    """And so are the tokens that a beam search has searched: both start again."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.open(make_request("hello", 200), None)
        found = shard_pb2.StepReply(found_uids=[stream.uid], found_tokens=[4], searched_uids=[stream.uid], searched_tokens=[7])
        batcher._deliver(found)
        assert (stream.cached, stream.searched) == (4, 7)
        await restart(shards)
        assert (stream.cached, stream.searched) == (0, 0)
        batcher.close_stream(stream)

    run(test)


def test_request_that_makes_progress_in_its_prompt_is_not_guilty() -> None:
    """Even if it has no token yet when the shards die again."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        reading = asyncio.create_task(read(batcher, make_request("x" * 220, 3)))
        await asyncio.sleep(0)
        [stream] = batcher.streams
        for steps in (1, 2 + FURTHER):
            while (batcher._place(stream.uid) or 0) < steps:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert not stream.run.first
            await restart(shards)
        assert len(await reading) == 5

    run(test, FakeShards(seconds=0.002))


def test_connecting_is_retried_after_a_delay_when_new_shards_are_lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY", 0.05)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        reading = asyncio.create_task(read(batcher, make_request("a", 100)))
        await asyncio.sleep(0.01)
        connect, attempts = shards.connect, 0

        async def fails() -> None:
            nonlocal attempts
            attempts += 1
            if attempts < 3:
                raise Broken("lost at once")
            await connect()

        monkeypatch.setattr(shards, "connect", fails)
        began = monotonic()
        await restart(shards)
        assert monotonic() - began >= 0.1
        assert attempts == 3
        assert len(await reading) == 102

    run(test, FakeShards(seconds=0.001))


def test_finding_the_guilty_request_clears_all_other_suspects() -> None:
    inquest = Inquest()
    for _ in range(2):
        inquest.died({1: 5, 2: 5, 3: 5, 4: 5})
    assert inquest.died({1: 5, 2: 5}) is None
    assert [inquest.suspects(uid) for uid in (1, 2, 3)] == [True, True, False]
    assert inquest.died({1: 5}) == 1
    assert not any(inquest.suspects(uid) for uid in (1, 2, 3, 4))
    assert inquest.release(1) is None


def test_restarted_stream_continues_from_the_tokens_of_its_running_choices() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        for beams, begun, expected in ((None, True, [0, 2]), (None, False, []), (Beams(width=3), True, [])):
            stream = batcher.open(make_request("hello", 9, choices=3, beams=beams), None)
            stream.choices[1].running = False
            for choice in stream.choices if begun else ():
                choice.ids.append(65 + choice.index)
            stream.restart()
            assert [one.choice for one in stream.continuations] == expected
            assert [list(one.tokens) for one in stream.continuations] == [[65 + index] for index in expected]
            batcher.close_stream(stream)

    run(test)
