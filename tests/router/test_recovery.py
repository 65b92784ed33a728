"""Who is found guilty of the shards' deaths, and after how many; and a batcher whose shards die."""

import asyncio
import random
from time import monotonic

import pytest

from penstock.proto import shard_pb2
from penstock.router import batcher as module
from penstock.router.batcher import Batcher
from penstock.router.recovery import FURTHER, Inquest
from penstock.router.request import Beams, Broken, Finish, Item, NotReady, Overloaded, Prompt, Request, Token
from penstock.tests.router.fakes import END, FakeShards, letter
from penstock.tests.router.harness import expected_text, make_request, metric_value, read, run, until_idle


class World:
    """Requests that run step by step, some of which kill the shards at some place."""

    def __init__(self, lengths: dict[int, int], killers: dict[int, int]) -> None:
        self.lengths = lengths  # steps that each takes
        self.killers = killers  # who kills, in which of its steps
        self.places = dict.fromkeys(lengths, 0)
        self.inquest = Inquest()
        self.deaths = 0
        self.failed: list[int] = []

    def step(self, killed: bool = False) -> None:
        """One step of all that may run; the shards die if a killer is at its place, or if they are `killed`."""
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


def test_who_kills_the_shards_twice_alone_fails() -> None:
    world = World({1: 100}, {1: 30})
    world.run()
    assert (world.failed, world.deaths) == ([1], 2)


@pytest.mark.parametrize("count", [2, 3, 8, 50])
def test_one_among_many_is_found_and_the_others_go_on(count: int) -> None:
    for guilty in {1, 2, count // 2 + 1, count}:
        world = World(dict.fromkeys(range(1, count + 1), 60), {guilty: 20})
        world.run()
        assert world.failed == [guilty]
        assert world.deaths <= 4 + count.bit_length()


def test_the_youngest_is_found_with_few_deaths() -> None:
    world = World(dict.fromkeys(range(1, 65), 60), {64: 0})
    world.run()
    assert (world.failed, world.deaths) == ([64], 4)  # twice all, once with those who have passed, once alone


def test_two_guilty_ones_are_both_found() -> None:
    world = World(dict.fromkeys(range(1, 20), 60), {3: 20, 17: 40})
    world.run()
    assert sorted(world.failed) == [3, 17]


def test_shards_that_die_of_something_else_accuse_nobody_who_makes_progress() -> None:
    chance = random.Random(1)
    for _ in range(50):
        world = World({uid: chance.randint(1, 300) for uid in range(1, chance.randint(2, 20))}, {})
        since = 0
        while world.places:
            killed = since > FURTHER + 1 and chance.random() < 0.1
            since = 0 if killed else since + 1
            world.step(killed)
        assert world.failed == []


def test_a_death_where_the_shards_had_lived_with_it_counts_half() -> None:
    """A search of beams begins anew, and other deaths come before it is where it was. It is no suspect before the third."""
    inquest = Inquest()
    for place in (900, 300, 100):
        assert not inquest.open
        assert inquest.died({1: place, 2: place}) is None
    assert [inquest.suspects(uid) for uid in (1, 2)] == [True, True]
    alone = Inquest()
    assert [alone.died({1: place}) for place in (900, 300, 500, 200)] == [None] * 4, "further than where it died last"
    assert alone.died({1: 100}) == 1


def test_who_kills_sooner_when_it_is_computed_again_is_found_after_one_more_death() -> None:
    inquest = Inquest()
    assert [inquest.died({1: place}) for place in (100, 40, 40)] == [None, None, 1]


@pytest.mark.parametrize("spread", [4, 20, 100, 400])
def test_who_does_not_always_kill_in_the_same_place_is_found(spread: int) -> None:
    chance, deaths = random.Random(1), 0
    for _ in range(100):
        inquest, guilty = Inquest(), None
        while guilty is None:
            guilty = inquest.died({1: chance.randint(0, spread)})
            deaths += 1
    assert deaths / 100 < 9


def test_a_death_in_which_nothing_was_computed_says_nothing() -> None:
    inquest = Inquest()
    assert inquest.died({1: 5, 2: 5}) is None
    assert not inquest.open
    assert inquest.died({}) is None
    assert inquest.died({1: 5, 2: 5}) is None
    assert inquest.open
    assert inquest.died({}) is None
    assert (inquest.admits(1), inquest.admits(2), inquest.admits(3)) == (True, False, False)


def test_a_trial_ends_when_those_on_trial_have_left() -> None:
    inquest = Inquest()
    for _ in range(2):
        inquest.died({1: 5, 2: 5})
    assert not inquest.hear({1: 5 + FURTHER, 2: 5}.get)
    assert inquest.hear({2: 5}.get)
    assert (inquest.admits(2), inquest.admits(3)) == (True, False)
    assert inquest.hear({2: 6 + FURTHER}.get)
    assert not inquest.open
    assert inquest.admits(3)


def test_nobody_waits_for_a_trial_of_those_who_have_left() -> None:
    """There is no later step in which they could be heard."""
    inquest = Inquest()
    for _ in range(2):
        inquest.died({1: 5, 2: 5, 3: 5, 4: 5})
    assert inquest.hear({}.get)
    assert not inquest.open
    assert inquest.admits(5)


# A batcher whose shards die


async def restart(shards: FakeShards) -> None:
    """Kills them at once, whatever they do."""
    shards.die()
    met = shards.groups_met
    while shards.groups_met == met:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def test_streams_go_on_with_the_tokens_that_they_would_have_had() -> None:
    asked = [
        make_request("a" * 40, 160),
        make_request("b", 160, choices=3),
        make_request("cc", 150, end_ids=(END,)),
        make_request("d", 160, stop=(chr(letter(b"d", 20)) + chr(letter(b"d", 21)),)),
        make_request("f", 160, choices=3, stop=(expected_text("f", 8, 1)[4:],)),  # one of them ends early
        make_request("e" * 30, 120, prompt_logprobs=True),
    ]

    def fake() -> FakeShards:
        return FakeShards(pages=512, seconds=0.001, ends_at=lambda prompt: 73 if prompt[0] == ord("c") else 0)

    async def calm(batcher: Batcher, shards: FakeShards) -> None:
        expected.extend(await asyncio.gather(*(read(batcher, request) for request in asked)))

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        reading = [asyncio.create_task(read(batcher, request)) for request in asked]
        for pause in (0.0, 0.02, 0.04, 0.03, 0.05):
            await asyncio.sleep(pause)
            await restart(shards)
        found = await asyncio.gather(*reading)
        assert [told(items) for items in found] == [told(items) for items in expected]
        await until_idle(batcher, shards)
        assert metric_value(batcher, "penstock_restarts_total") == 5
        assert metric_value(batcher, "penstock_replayed_requests_total") > len(asked)
        assert metric_value(batcher, "penstock_recovery_seconds_count") == 5

    expected: list[list[Item]] = []
    run(calm, fake())
    run(test, fake())


def told(items: list[Item]) -> list[object]:
    """What of a stream may not depend on time: of each choice its own, since their order among each other may."""
    kept: list[object] = []
    for item in sorted(items, key=lambda item: item.choice if isinstance(item, Token | Finish) else -1):
        match item:
            case Prompt(logprobs):
                kept.append(logprobs)
            case Token(id, text, delta):
                kept.append((id, text, delta))
            case Finish(reason, text, delta, generated):
                kept.append((reason, text, delta, generated))
    return kept


def test_while_there_are_no_shards_requests_wait_and_may_leave() -> None:
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


def test_shards_that_die_while_nothing_runs_are_missed_at_once() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        await read(batcher, make_request("a"))
        await asyncio.sleep(0.02)  # until nothing is under way any more
        async with asyncio.timeout(5):
            await restart(shards)
        await asyncio.sleep(0.01)
        assert batcher.ready
        assert len(await read(batcher, make_request("a"))) == 7

    run(test)


def test_a_request_that_kills_the_shards_fails_alone() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        shards.killers = {b"killer"}
        asked = [make_request(text, 40) for text in ("a", "b", "killer", "c")]
        reading = [asyncio.create_task(read(batcher, request)) for request in asked]
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


def test_a_smaller_pool_fails_only_what_does_not_fit_any_more() -> None:
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


def test_who_shuts_down_waits_for_no_new_shards() -> None:
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


def test_what_is_known_goes_along_to_another_inquest() -> None:
    first, second = Inquest(), Inquest()
    assert first.died({1: 5, 2: 5}) is None
    assert not first.suspects(1)
    for uid in (1, 2):
        second.adopt(uid, first.release(uid))
    assert first.release(1) is None
    assert second.died({1: 6, 2: 6 + FURTHER, 3: 0}) is None  # one of them has got further
    assert [second.suspects(uid) for uid in (1, 2, 3)] == [True, False, False]
    assert second.release(1) == (2, 6)
    assert not second.open
    third = Inquest()
    third.adopt(1, (2, 6))
    assert third.died({1: 6}) == 1


def test_a_suspect_that_leaves_makes_place_for_the_next_trial() -> None:
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


def test_a_suspect_that_leaves_is_tried_no_more() -> None:
    inquest = Inquest()
    for _ in range(2):
        inquest.died({1: 5, 2: 5, 3: 5, 4: 5})
    assert inquest.release(3) == (2, 5)
    assert not inquest.suspects(3)
    assert inquest.hear({1: 6 + FURTHER, 2: 6 + FURTHER, 4: 5}.get)
    assert (inquest.admits(4), inquest.admits(3)) == (True, False)
    assert inquest.hear({4: 6 + FURTHER}.get)
    assert not inquest.open


def test_of_who_was_acquitted_nothing_goes_along() -> None:
    inquest = Inquest()
    for _ in range(2):
        inquest.died({1: 5, 2: 5})
    assert inquest.hear({1: 6 + FURTHER, 2: 5}.get)
    assert inquest.release(1) is None
    assert inquest.release(2) == (2, 5)


def test_a_second_killer_is_found_among_those_who_waited_for_the_first_ones_trial() -> None:
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


async def suspected(batcher: Batcher, shards: FakeShards) -> list["asyncio.Task[list[Item]]"]:
    """Two streams of which one has its trial, and the other waits for it."""
    reading = [asyncio.create_task(read(batcher, make_request(text, 100))) for text in ("a", "b")]
    for _ in range(2):
        await computed(batcher, 2)
        await restart(shards)
    assert batcher.trying
    return reading


async def computed(batcher: Batcher, count: int) -> None:
    """Returns when a step that computes so many is in flight."""
    while batcher._scheduler is None or len(batcher._scheduler.in_hand) < count:  # noqa: ASYNC110
        await asyncio.sleep(0)


def test_who_leaves_while_others_have_their_trial_is_not_admitted_after_it() -> None:
    async def test(batcher: Batcher, shards: FakeShards) -> None:
        reading = await suspected(batcher, shards)
        late = asyncio.create_task(read(batcher, make_request("late")))
        await asyncio.sleep(0)
        assert len(batcher._held) == 2
        late.cancel()
        await asyncio.wait([late])
        assert [len(items) for items in await asyncio.gather(*reading)] == [102] * 2
        assert not batcher.trying
        await until_idle(batcher, shards)

    run(test, FakeShards(pages=512, seconds=0.005))


def test_who_waits_for_trials_goes_on_when_all_suspects_leave() -> None:
    """Here while there are no shards, so that no reply of theirs wakes the loop."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        reading = [asyncio.create_task(read(batcher, make_request(text, 100))) for text in ("a", "b")]
        await computed(batcher, 2)
        await restart(shards)
        await computed(batcher, 2)
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


def test_what_was_cached_of_a_prompt_is_counted_where_it_goes_on() -> None:
    """And how far a search of beams has come: both begin anew."""

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        stream = batcher.open(make_request("hello", 200), None)
        found = shard_pb2.StepReply(found_uids=[stream.uid], found_tokens=[4], searched_uids=[stream.uid], searched_tokens=[7])
        batcher._deliver(found)
        assert (stream.cached, stream.searched) == (4, 7)
        await restart(shards)
        assert (stream.cached, stream.searched) == (0, 0)
        batcher.close_stream(stream)

    run(test)


def test_who_gets_further_with_its_prompt_is_not_guilty() -> None:
    """Though it has no token yet when the shards die again."""

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


def test_new_shards_that_are_lost_at_once_are_looked_for_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY", 0.05)

    async def test(batcher: Batcher, shards: FakeShards) -> None:
        reading = asyncio.create_task(read(batcher, make_request("a", 100)))
        await asyncio.sleep(0.01)
        connect, looks = shards.connect, 0

        async def fails() -> None:
            nonlocal looks
            looks += 1
            if looks < 3:
                raise Broken("lost at once")
            await connect()

        monkeypatch.setattr(shards, "connect", fails)
        began = monotonic()
        await restart(shards)
        assert monotonic() - began >= 0.1
        assert looks == 3
        assert len(await reading) == 102

    run(test, FakeShards(seconds=0.001))


def test_who_is_guilty_acquits_those_who_waited_for_their_trial() -> None:
    inquest = Inquest()
    for _ in range(2):
        inquest.died({1: 5, 2: 5, 3: 5, 4: 5})
    assert inquest.died({1: 5, 2: 5}) is None
    assert [inquest.suspects(uid) for uid in (1, 2, 3)] == [True, True, False]
    assert inquest.died({1: 5}) == 1
    assert not any(inquest.suspects(uid) for uid in (1, 2, 3, 4))
    assert inquest.release(1) is None


def test_a_stream_is_replayed_from_what_its_running_choices_have() -> None:
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
