"""Several replicas behind one door: whatever dies, joins or leaves, every stream has the tokens that it would have had."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

import pytest

from penstock.router.batcher import Batcher
from penstock.router.config import Misconfigured
from penstock.router.fleet import Fleet
from penstock.router.metrics import Metrics
from penstock.router.recovery import Inquest
from penstock.router.replica import Conflict, Unknown
from penstock.router.request import Broken, Image, Item, NotReady, Overloaded, Prompt, Request, Token
from penstock.router.steps import Steps
from penstock.tests.router.fakes import ByteTokenizer, FakeShards, letter
from penstock.tests.router.harness import answer, ask, config
from penstock.tests.router.test_recovery import told

Test = Callable[["Fleet", "Shards"], Awaitable[None]]
Shards = dict[str, FakeShards]


def run(test: Test, count: int = 3, *, make: Callable[[], FakeShards] = lambda: FakeShards(seconds=0.001), **changes: Any) -> None:
    """Runs `test` with a fleet of so many replicas that are all ready."""

    async def main() -> None:
        shards: Shards = {}

        def connect(name: str, addresses: Sequence[str]) -> FakeShards:
            shards[name] = make()
            shards[name].adopts = True
            return shards[name]

        groups = tuple((f"unix:/{number}",) for number in range(count))
        fleet = Fleet(config(groups=groups, **changes), ByteTokenizer(), connect, Metrics())
        async with asyncio.timeout(60):
            await fleet.start()
            await until(lambda: all(replica.state == "ready" for replica in fleet.replicas))
            await test(fleet, shards)
            await fleet.close()
            await fleet.wait()
        assert all(fake.closed for fake in shards.values())
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def quiet(fleet: Fleet, shards: Shards) -> None:
    """Returns when no shard has anything left."""
    names = {replica.name for replica in fleet.replicas}
    await until(lambda: not any(fake.model.groups for name, fake in shards.items() if name in names))
    await until(lambda: value(fleet, "penstock_pages_free") == value(fleet, "penstock_pages_total"))
    for name in ("penstock_waiting", "penstock_running", "penstock_paused"):
        assert value(fleet, name) == 0
    assert [(replica.requests, replica.load) for replica in fleet.replicas] == [(0, 0)] * len(names)
    if fleet._placement is not None:
        assert [fleet._placement.load(name) for name in fleet._placement.names] == [0] * len(fleet._placement.names)


def value(fleet: Fleet, name: str) -> float:
    """A metric; the sum over its labels."""
    lines = fleet._metrics.render().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


async def read(fleet: Fleet, request: Request) -> list[Item]:
    return [item async for items in fleet.submit(request) for item in items]


def begin(fleet: Fleet, requests: Sequence[Request]) -> list["asyncio.Task[list[Item]]"]:
    return [asyncio.create_task(read(fleet, request)) for request in requests]


def crowd(count: int = 12, most: int = 60) -> list[Request]:
    return [ask(f"{chr(97 + number)}" * (5 + 3 * number), most, choices=1 + number % 3) for number in range(count)]


def states(fleet: Fleet) -> dict[str, str]:
    return {replica.name: replica.state for replica in fleet.replicas}


def expected() -> list[list[object]]:
    """What the crowd gets where nothing happens."""
    found: list[list[object]] = []

    async def calm(fleet: Fleet, shards: Shards) -> None:
        found.extend([told(items) for items in await asyncio.gather(*begin(fleet, crowd()))])

    run(calm, 1)
    return found


async def serve_through(fleet: Fleet, shards: Shards, trouble: Callable[[], Awaitable[object]]) -> None:
    """The crowd is served while something happens, as if it did not."""
    reading = begin(fleet, crowd())
    await until(lambda: value(fleet, "penstock_generated_tokens_total") > 50)
    await trouble()
    found = await asyncio.gather(*reading)
    assert [told(items) for items in found] == EXPECTED
    await quiet(fleet, shards)


EXPECTED: list[list[object]] = []


@pytest.fixture(scope="module", autouse=True)
def _expected() -> None:
    EXPECTED[:] = expected()


def test_requests_are_divided_and_nothing_is_different() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        async def nothing() -> None:
            assert fleet.ready
            assert all(replica.requests for replica in fleet.replicas)

        await serve_through(fleet, shards, nothing)
        assert value(fleet, "tgi_request_success") == value(fleet, "tgi_request_count") == 12
        assert value(fleet, "penstock_placements_total") == 12
        assert value(fleet, "penstock_replicas_ready") == value(fleet, "penstock_replica_up") == 3
        assert value(fleet, "penstock_pages_total") == value(fleet, "penstock_replica_pages_total") == 3 * 64

    run(test)


def test_with_one_replica_nothing_is_placed() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        assert len(await read(fleet, ask("a", 5))) == 7
        assert fleet._placement is None
        assert value(fleet, "penstock_placements_total") == 0
        shards["0"].break_at = 1
        shards["0"].die()
        await until(lambda: states(fleet) == {"0": "recovering"})
        assert fleet.stage.startswith("recovering")
        waiting = asyncio.create_task(read(fleet, ask("b", 5)))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        shards["0"].break_at = 0
        assert len(await waiting) == 7

    run(test, 1)


def test_a_replica_that_dies_hands_its_streams_to_the_others_at_once() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        async def kill() -> None:
            shards["1"].break_at = 1  # it does not come back
            shards["1"].die()
            await until(lambda: states(fleet)["1"] == "recovering")
            assert fleet.ready
            assert [replica.requests for replica in fleet.replicas][1] == 0
            assert not fleet.serves("1")

        await serve_through(fleet, shards, kill)
        assert value(fleet, "penstock_moved_requests_total") >= 3
        assert value(fleet, "penstock_replica_up") == 2
        assert len(await read(fleet, ask("later", 5))) == 7
        shards["1"].break_at = 0
        await until(lambda: states(fleet)["1"] == "ready")
        before = len(shards["1"].commands)
        await asyncio.gather(*begin(fleet, crowd()))
        assert shards["1"].groups_met == 2
        assert value(fleet, "penstock_restarts_total") == 1
        assert any(command.WhichOneof("kind") == "prefill" for command in shards["1"].commands[before:])  # it takes part again

    run(test)


def test_streams_with_images_do_not_move_to_who_sees_none(caplog: pytest.LogCaptureFixture) -> None:
    """They wait for those that do."""
    seeing = iter((True, False))

    async def test(fleet: Fleet, shards: Shards) -> None:
        assert fleet.limits is not None
        assert not fleet.limits.images  # no more of them are taken
        image = Image(start=0, rows=1, columns=1, pixels=b"abc", shape=(1, 3, 1, 1))
        reading = begin(fleet, [ask("a", 60, images=(image,)), ask("b", 60, images=(image,))])
        await until(lambda: value(fleet, "penstock_generated_tokens_total") > 10)
        shards["0"].break_at = 1
        shards["0"].die()
        await until(lambda: states(fleet)["0"] == "recovering")
        shards["0"].break_at = 0
        assert [len(items) for items in await asyncio.gather(*reading)] == [62, 62]
        assert not any(command.prefill.groups for command in shards["1"].commands)

    run(test, 2, make=lambda: FakeShards(seconds=0.001, images=next(seeing)))
    assert caplog.text.count("some replicas see images, and some don't") == 1


def test_while_all_are_dead_streams_wait_and_go_on_on_the_first_that_comes_back() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        async def kill() -> None:
            for fake in shards.values():
                fake.break_at = 1
                fake.die()
            await until(lambda: set(states(fleet).values()) == {"recovering"})
            assert not fleet.ready
            assert value(fleet, "penstock_moved_requests_total") == 0  # nobody went where shards were lost as well
            late = asyncio.create_task(read(fleet, ask("late", 5)))
            await asyncio.sleep(0.02)
            shards["2"].break_at = 0
            assert len(await late) == 7

        await serve_through(fleet, shards, kill)
        assert list(states(fleet).values()) == ["recovering", "recovering", "ready"]

    run(test)


@pytest.mark.parametrize("alone", [True, False])
def test_a_request_that_kills_kills_two_replicas_and_no_third(alone: bool) -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        for fake in shards.values():
            fake.killers = {b"killer"}
        others = [] if alone else crowd(9, 200)
        reading = begin(fleet, others)
        killer = asyncio.create_task(read(fleet, ask("killer", 40)))
        with pytest.raises(Broken, match="again and again"):
            await killer
        for request, items in zip(others, await asyncio.gather(*reading), strict=True):
            tokens = [item.id for item in items if isinstance(item, Token) and item.choice == 0]
            assert tokens == [letter(request.prompt, position) for position in range(200)]
        met = sorted(fake.groups_met for fake in shards.values())
        assert met[:2] == [1, 1]
        assert sum(met) <= (6 if alone else 12)
        await until(lambda: not any(replica.requests for replica in fleet.replicas))

    run(test, 4, make=lambda: FakeShards(512, seconds=0.001))


def test_what_was_cached_of_a_prompt_stays_where_it_was() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        for fake in shards.values():
            fake.gate.clear()
        reading = asyncio.create_task(read(fleet, ask("hello")))
        await until(lambda: sum(replica.requests for replica in fleet.replicas) == 1)
        [stream] = next(member.batcher.streams for member in fleet._members.values() if member.batcher.streams)
        stream.cached, stream.searched = 4, 7
        home = stream.owner
        fleet.retire(home.name, move=True)
        assert stream.owner is not home
        assert (stream.cached, stream.searched) == (0, 0)
        for fake in shards.values():
            fake.gate.set()
        assert (await reading)[0] == Prompt(())

    run(test, 2)


@pytest.mark.parametrize("fails", [False, True])
def test_requests_wait_where_there_will_be_shards_for_them(fails: bool) -> None:
    """Neither at a replica that leaves, nor at one that has failed."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        if fails:
            shards["0"].pages = 4
        else:
            fleet.retire("0")
            shards["0"].break_at = 1
        shards["1"].break_at = 1
        for fake in shards.values():
            fake.die()
        await until(lambda: states(fleet) == {"0": "failed" if fails else "drained", "1": "recovering"})
        reading = begin(fleet, [ask("a", 5)] * 3)
        await asyncio.sleep(0.01)
        assert [replica.requests for replica in fleet.replicas] == [0, 3]
        shards["1"].break_at = 0
        assert [len(items) for items in await asyncio.gather(*reading)] == [7] * 3

    run(test, 2, max_total_tokens=100)


def test_a_server_that_takes_nothing_is_not_told_to_be_ready_for_a_replica_that_leaves() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        fleet.retire("0")
        shards["1"].break_at = 1
        shards["1"].die()
        await until(lambda: states(fleet) == {"0": "drained", "1": "recovering"})
        assert not fleet.ready
        assert fleet.stage.startswith("recovering")

    run(test, 2)


class Mortal(FakeShards):
    """They don't come back."""

    def die(self) -> None:
        super().die()
        self.break_at = 1


def test_what_is_known_of_a_killer_goes_along_with_it() -> None:
    """Those whom it has killed can't have it back, and be the ones who know."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        for fake in shards.values():
            fake.killers = {b"killer"}
        with pytest.raises(Broken, match="again and again"):
            await asyncio.wait_for(read(fleet, ask("killer", 40)), 10)
        assert sorted(states(fleet).values()) == ["ready", "ready", "recovering", "recovering"]

    run(test, 4, make=lambda: Mortal(seconds=0.001))


def test_a_replica_drains_and_its_requests_end_there() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        async def drain() -> None:
            assert fleet.retire("2").state == "draining"
            before = len(shards["2"].commands)
            await asyncio.gather(*begin(fleet, [ask("new", 3)] * 6))
            met = [group for command in shards["2"].commands[before:] for group in command.prefill.groups]
            assert not [group for group in met if bytes(group.tokens) == b"new"]

        await serve_through(fleet, shards, drain)
        assert states(fleet)["2"] == fleet.replicas[2].stage == "drained"
        assert value(fleet, "penstock_moved_requests_total") == 0
        await fleet.remove("2")
        assert list(states(fleet)) == ["0", "1"]
        assert value(fleet, "penstock_replica_up") == 2
        assert shards["2"].closed

    run(test)


def test_a_replica_leaves_at_once_and_its_requests_go_on_elsewhere() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        async def leave() -> None:
            fleet.retire("0", move=True)
            assert fleet.replicas[0].requests == 0
            await until(lambda: not shards["0"].model.groups)
            await fleet.remove("1")

        await serve_through(fleet, shards, leave)
        assert states(fleet) == {"0": "drained", "2": "ready"}
        assert value(fleet, "penstock_moved_requests_total") >= 6
        with pytest.raises(Conflict, match="replica 2 can't be spared"):
            fleet.retire("2")
        with pytest.raises(Conflict, match="replica 2 can't be spared"):
            await fleet.remove("2")
        twice = await asyncio.gather(fleet.remove("0"), fleet.remove("0"), return_exceptions=True)
        assert [type(one) for one in twice] == [type(None), Unknown]
        with pytest.raises(Conflict, match="no other replica"):
            await fleet.remove("2")
        with pytest.raises(Unknown, match="no replica 0; there are: 2"):
            await fleet.remove("0")
        assert len(await read(fleet, ask("a", 5))) == 7
        assert fleet._placement is None

    run(test)


def test_a_replica_joins_under_load_and_takes_its_share() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        async def join() -> None:
            joined = fleet.join(["unix:/new"], "fast")
            assert (joined.name, joined.state, joined.pages) == ("fast", "starting", 0)
            with pytest.raises(Conflict, match="unix:/new is replica fast already"):
                fleet.join(["unix:/new"])
            with pytest.raises(Conflict, match="a replica fast already"):
                fleet.join(["unix:/x"], "fast")
            await until(lambda: states(fleet) == {"0": "ready", "fast": "ready"})
            assert sum(replica.load for replica in fleet.replicas) > 0
            reading = begin(fleet, crowd(3, 30))
            await until(lambda: len(shards["fast"].model.groups) == 3)  # the other has the first crowd
            await asyncio.gather(*reading)

        await serve_through(fleet, shards, join)
        assert fleet.join(["unix:/third"]).name == "1"

    run(test, 1)


@pytest.mark.parametrize(
    ("what", "value", "expected"),
    [
        ("dtype", "bfloat16", "replica other has dtype bfloat16, replica 0 has float32"),
        ("quantize", "fp8", "replica other has quantize fp8, replica 0 has none"),
        ("kv_cache_dtype", "fp8_e4m3fn", "replica other has kv_cache_dtype fp8_e4m3fn, replica 0 has none"),
        ("batch_invariant", True, "replica other has batch_invariant True, replica 0 has none"),
    ],
)
def test_a_replica_that_would_say_other_tokens_is_left_out(what: str, value: object, expected: str) -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        async def join() -> None:
            fleet.join(["unix:/other"], "other")
            setattr(shards["other"].info, what, value)
            shards["other"].pages = 30
            await until(lambda: states(fleet)["other"] == "failed")
            assert expected in fleet.replicas[1].stage

        await serve_through(fleet, shards, join)
        assert fleet.limits is not None
        assert fleet.limits.pages == 64, "its size bounds nobody"
        fleet.join(["unix:/third"], "third")
        await until(lambda: states(fleet)["third"] != "starting")
        assert states(fleet)["third"] == "ready", "who has failed is nobody to be compared with"
        await fleet.remove("third")
        await fleet.remove("other")
        assert list(states(fleet)) == ["0"]

    run(test, 1)


def test_a_replica_that_does_not_start_is_tried_again_and_hinders_nobody() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        fleet.join(["unix:/late"], "late")
        late = shards["late"]
        failures = 0

        async def fail() -> None:
            nonlocal failures
            failures += 1
            late.lost = asyncio.get_running_loop().create_future()
            late.die()
            raise Broken("the shard at unix:/late is rank 1 of 2")

        late.connect = fail  # type: ignore[method-assign]
        await until(lambda: failures > 1)
        assert fleet.replicas[1].state == "starting"
        assert "rank 1 of 2" in fleet.replicas[1].stage
        assert len(await read(fleet, ask("a", 5))) == 7
        del late.connect
        await until(lambda: states(fleet)["late"] == "ready")

    run(test, 1)


def test_limits_hold_on_every_replica() -> None:
    sizes = iter((64, 30, 64))

    async def test(fleet: Fleet, shards: Shards) -> None:
        assert fleet.limits is not None
        assert (fleet.limits.max_total_tokens, fleet.limits.pages) == (120, 30)
        large = asyncio.create_task(read(fleet, ask("a", 110)))
        await asyncio.sleep(0.01)
        await fleet.remove("1")
        assert (fleet.limits.max_total_tokens, fleet.limits.pages) == (256, 64)
        assert len(await large) == 112

    run(test, make=lambda: FakeShards(next(sizes), seconds=0.001))


def test_what_no_replica_can_take_is_no_load_of_any() -> None:
    """Neither before it fails nor after: a load below zero would draw all other requests to its replica."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        with pytest.raises(Broken):
            await read(fleet, ask("a" * 60, 60, choices=9))
        await quiet(fleet, shards)

    run(test, 2)


def test_each_replica_takes_as_many_requests_as_the_operator_says() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        reading = begin(fleet, [ask("a", 200)] * 6)
        await asyncio.sleep(0.01)
        with pytest.raises(Overloaded, match="6 requests are in flight"):
            fleet.submit(ask("b"))
        assert len(await read(fleet, ask("b", 3, tenant="another"))) == 5
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await quiet(fleet, shards)

    run(test, max_concurrent_requests=2)


def test_who_leaves_a_stream_leaves_it_wherever_it_runs() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        stream = fleet.submit(ask("a", 100, timeout=30.0))
        items = [item for item in await anext(stream) if not isinstance(item, Prompt)]
        home = next(replica.name for replica in fleet.replicas if replica.requests)
        fleet.retire(home, move=True)
        while len(items) < 50:
            items += await anext(stream)
        await stream.aclose()
        text = "".join(item.text for item in items if isinstance(item, Token))
        assert text == answer("a", 100)[: len(text)]
        await quiet(fleet, shards)

    run(test)


def test_a_deadline_goes_along() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        reading = asyncio.create_task(read(fleet, ask("a", 200, timeout=0.05)))
        await until(lambda: any(replica.requests for replica in fleet.replicas))
        fleet.retire(next(replica.name for replica in fleet.replicas if replica.requests), move=True)
        with pytest.raises(Exception, match=r"not complete 0\.05 s after"):
            await reading
        await quiet(fleet, shards)

    run(test)


def test_a_session_stays_and_its_prefix_is_found() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        async def homes(session: str, text: str) -> str:
            before = {name: len(fake.commands) for name, fake in shards.items()}
            await read(fleet, ask(text, 3, session=session))
            [home] = [name for name, fake in shards.items() if len(fake.commands) > before[name]]
            return home

        first = [await homes(f"s{number}", "shared beginning of all conversations" * 2) for number in range(3)]
        assert len(set(first)) == 1  # nothing else runs: the prefix is there
        assert [await homes(f"s{number}", "x" * (number + 1)) for number in range(3)] == first

    run(test)


def test_shutting_down_lets_streams_end_and_refuses_new_ones() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        reading = begin(fleet, crowd())
        await asyncio.sleep(0.02)
        draining = asyncio.create_task(fleet.drain(30))
        await asyncio.sleep(0)
        assert (fleet.ready, fleet.stage) == (False, "shutting down")
        with pytest.raises(NotReady, match="shutting down"):
            fleet.submit(ask("b"))
        assert [told(items) for items in await asyncio.gather(*reading)] == EXPECTED
        await draining

    run(test)


@pytest.mark.parametrize("count", [1, 3])
def test_shutting_down_waits_for_those_that_came_before_and_takes_them(count: int) -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        before, answered = monotonic(), asyncio.Event()
        await asyncio.sleep(0.001)
        draining = asyncio.create_task(fleet.drain(30, answered))
        await asyncio.sleep(0.02)
        assert not draining.done()
        with pytest.raises(NotReady, match="shutting down"):
            fleet.submit(ask("b", arrived=monotonic()))
        reading = asyncio.create_task(read(fleet, ask("a", 20, arrived=before)))
        await asyncio.sleep(0.001)
        answered.set()
        await draining
        assert reading.done()
        assert len(reading.result()) == 22

    run(test, count)


def test_who_came_before_is_refused_where_no_replica_has_shards() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        before, answered = monotonic(), asyncio.Event()
        for fake in shards.values():
            fake.break_at = 1
            fake.die()
        await until(lambda: all(replica.state == "recovering" for replica in fleet.replicas))
        draining = asyncio.create_task(fleet.drain(30, answered))
        await asyncio.sleep(0.001)
        with pytest.raises(NotReady, match="shutting down"):
            await read(fleet, ask("a", 20, arrived=before))
        answered.set()
        await draining

    run(test)


def test_before_any_replica_is_there_a_failure_ends_the_start() -> None:
    async def main() -> None:
        fake = FakeShards(pages=4)
        fleet = Fleet(
            config(groups=(("a",), ("b",)), max_total_tokens=100), ByteTokenizer(), lambda name, addresses: fake, Metrics()
        )
        with pytest.raises(NotReady):
            fleet.submit(ask("a"))
        assert fleet.stage == "waiting"
        with pytest.raises(Misconfigured, match="--max-total-tokens 100 is more than the pool's capacity of 16"):
            await fleet.start()
        with suppress(Misconfigured):
            await fleet.close()

    asyncio.run(main())


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_who_moves_between_a_report_and_its_delivery_has_the_tokens_of_both(
    monkeypatch: pytest.MonkeyPatch, choices: int, last: bool
) -> None:
    """last: the scheduler knows by then that choices have ended."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        calm = told(await read(fleet, ask("hello", 6, choices=choices)))
        moved = []
        report = Steps._report

        def reporting(steps: Steps, *arguments: Any) -> Any:
            answered = report(steps, *arguments)
            if answered is not None and not moved and (any(answered.finishes) or (answered.tokens and not last)):
                [name] = (name for name, member in fleet._members.items() if member.batcher._shards is steps._shards)
                moved.append(name)
                asyncio.get_running_loop().call_soon(fleet.retire, name, True)
            return answered

        monkeypatch.setattr(Steps, "_report", reporting)
        assert told(await asyncio.wait_for(read(fleet, ask("hello", 6, choices=choices)), 5)) == calm
        assert moved
        await quiet(fleet, shards)

    run(test, 2)


class Late(FakeShards):
    """They are there when they are told to be."""

    def __init__(self) -> None:
        super().__init__(seconds=0.001)
        self.there = asyncio.Event()
        self.wrong = ""  # what is
        self.lost = asyncio.get_running_loop().create_future()

    async def connect(self) -> None:
        await self.there.wait()
        if self.wrong:
            self.lost = asyncio.get_running_loop().create_future()
            self.die()
            raise Broken(self.wrong)
        await super().connect()


def late(test: Callable[["Fleet", dict[str, Late]], Awaitable[None]]) -> None:
    """Runs `test` with a fleet of one replica that hasn't started."""

    async def main() -> None:
        shards: dict[str, Late] = {}

        def connect(name: str, addresses: Sequence[str]) -> Late:
            shards[name] = Late()
            shards[name].adopts = True
            return shards[name]

        fleet = Fleet(config(groups=(("unix:/0",),)), ByteTokenizer(), connect, Metrics())
        async with asyncio.timeout(30):
            await test(fleet, shards)
            await fleet.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_one_that_joins_while_the_first_loads_may_be_broken() -> None:
    async def test(fleet: Fleet, shards: dict[str, Late]) -> None:
        starting = asyncio.create_task(fleet.start())
        fleet.join(["h:1"])
        shards["1"].wrong = "the shard at h:1 is rank 1 of 2, rank 0 of 1 was expected"
        shards["1"].there.set()
        await asyncio.sleep(0.02)
        assert not starting.done()
        shards["0"].there.set()
        await starting
        assert len(await read(fleet, ask("a", 3))) == 5
        assert "rank 1 of 2" in next(replica.stage for replica in fleet.replicas if replica.name == "1")

    late(test)


def test_requests_have_nowhere_to_wait_when_all_that_ever_had_shards_have_left() -> None:
    async def test(fleet: Fleet, shards: dict[str, Late]) -> None:
        shards["0"].there.set()
        await fleet.start()
        shards["0"].there.clear()
        shards["0"].die()
        await until(lambda: fleet.replicas[0].state == "recovering")
        fleet.join(["h:1"])
        fleet.join(["h:2"])
        await fleet.remove("0")
        with pytest.raises(NotReady, match="not ready"):
            await read(fleet, ask("a", 3))
        shards["2"].there.set()
        await until(lambda: fleet.ready)
        assert len(await read(fleet, ask("a", 3))) == 5

    late(test)


def test_one_that_leaves_ends_though_who_asked_for_it_has_left() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        removal = asyncio.create_task(fleet.remove("1"))
        await asyncio.sleep(0)
        removal.cancel()
        await asyncio.wait([removal])
        await until(lambda: shards["1"].closed)
        assert [replica.name for replica in fleet.replicas] == ["0", "2"]

    run(test)


def test_of_who_has_left_no_metric_tells_any_more() -> None:
    """Else each replica that comes and goes leaves some behind, for ever."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        await asyncio.gather(*(read(fleet, ask(text, 3)) for text in "abcdefghi"))
        assert {'replica="0"', 'replica="1"', 'replica="2"'} == named(fleet)
        await fleet.remove("1")
        assert {'replica="0"', 'replica="2"'} == named(fleet)
        await asyncio.gather(*(read(fleet, ask(text, 3)) for text in "abcdefghi"))
        fleet.join(["h:1"], "1")
        await until(lambda: all(replica.state == "ready" for replica in fleet.replicas))
        await asyncio.gather(*(read(fleet, ask(text, 3)) for text in "abcdefghi"))
        assert {'replica="0"', 'replica="1"', 'replica="2"'} == named(fleet)

    run(test)


def named(fleet: Fleet) -> set[str]:
    """Replicas of which metrics tell."""
    return set(re.findall('replica="[^"]*"', fleet._metrics.render().decode()))


def test_who_leaves_when_its_shards_come_is_in_no_metric() -> None:
    async def test(fleet: Fleet, shards: dict[str, Late]) -> None:
        shards["0"].there.set()
        await fleet.start()
        pages = value(fleet, "penstock_pages_total")
        fleet.join(["h:1"])
        await until(lambda: "1" in shards and fleet._members["1"].batcher.stage == "waiting")
        await asyncio.sleep(0.01)
        shards["1"].there.set()
        await fleet.remove("1")
        assert value(fleet, "penstock_pages_total") == pages
        assert named(fleet) == {'replica="0"'}

    late(test)


def test_who_has_left_is_not_heard_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shards may end while it does."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        gone = fleet._members["1"].batcher
        await fleet.remove("1")
        fleet.join(["h:1"], "1")
        await until(lambda: all(replica.state == "ready" for replica in fleet.replicas))
        fleet.lost(gone)
        assert {replica.state for replica in fleet.replicas} == {"ready"}
        fleet._members["1"].up = False
        fleet.found(gone)
        assert not fleet._members["1"].up
        placement = fleet._placement
        assert placement is not None
        monkeypatch.setattr(type(placement), "release", lambda *arguments: pytest.fail("another has its name"))
        stream = next(iter(fleet._members.values())).batcher.open(ask("a"), None)
        fleet.ended(gone, stream)
        monkeypatch.undo()
        stream.owner.close_stream(stream)

    run(test)


def test_suspects_go_along_when_a_replica_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """There will be no other trial."""
    monkeypatch.setattr(Inquest, "suspects", lambda inquest, uid: True)

    async def test(fleet: Fleet, shards: Shards) -> None:
        reading = asyncio.create_task(read(fleet, ask("a", 60)))
        await until(lambda: any(replica.requests for replica in fleet.replicas))
        home = next(replica.name for replica in fleet.replicas if replica.requests)
        assert fleet.retire(home, move=True).requests == 1
        await fleet.remove(home)
        assert len(await reading) == 62

    run(test, 2)


def test_a_rank_is_no_part_of_two_replicas() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        with pytest.raises(Conflict, match="unix:/new, unix:/1 is replica 1 already"):
            fleet.join(["unix:/new", "unix:/1"])

    run(test, 2)


def test_who_has_requests_that_wait_is_needed_while_nobody_else_takes_any() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        for fake in shards.values():
            fake.break_at = 1
            fake.die()
        await until(lambda: set(states(fleet).values()) == {"recovering"})
        reading = asyncio.create_task(read(fleet, ask("a", 5)))
        await until(lambda: any(replica.requests for replica in fleet.replicas))
        home, other = sorted(fleet.replicas, key=lambda replica: replica.requests == 0)
        with pytest.raises(Conflict, match=f"replica {home.name} can't be spared"):
            fleet.retire(home.name)
        fleet.retire(other.name)
        shards[home.name].break_at = 0
        assert len(await reading) == 7

    run(test, 2)


def test_who_leaves_or_has_failed_counts_for_no_place() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        shards["2"].pages = 4
        shards["2"].die()
        await until(lambda: states(fleet)["2"] == "failed")
        fleet.retire("1")
        streams = [fleet.submit(ask("a", 50)) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(Overloaded, match="2 requests are in flight"):
            fleet.submit(ask("b"))
        for stream in streams:
            await stream.aclose()

    run(test, 3, max_concurrent_requests=2, max_total_tokens=100)


def test_places_are_counted_again_when_a_stream_is_first_read() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        streams = [fleet.submit(ask("a", 50)) for _ in range(4)]
        for stream in streams[:3]:
            await anext(stream)
        with pytest.raises(Overloaded, match="3 requests are in flight"):
            await anext(streams[3])
        for stream in streams:
            await stream.aclose()
        await quiet(fleet, shards)

    run(test, max_concurrent_requests=1)


def test_a_server_that_shuts_down_moves_nobody() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        reading = asyncio.create_task(read(fleet, ask("a", 200)))
        await until(lambda: sum(replica.requests for replica in fleet.replicas) == 1)
        [stream] = next(member.batcher.streams for member in fleet._members.values() if member.batcher.streams)
        draining = asyncio.create_task(fleet.drain(20))
        await asyncio.sleep(0)
        home = stream.owner
        shards[home.name].break_at = 1
        shards[home.name].die()
        with pytest.raises((NotReady, Broken)):
            await reading
        await draining
        assert stream.owner is home

    run(test)


def test_who_has_a_trial_gets_requests_only_if_all_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for its end. A replica without shards is worse."""
    trying = {"0"}
    monkeypatch.setattr(Batcher, "trying", property(lambda batcher: batcher.name in trying))

    async def test(fleet: Fleet, shards: Shards) -> None:
        reading = begin(fleet, [ask("a" * number, 150) for number in range(1, 7)])
        await until(lambda: [replica.requests for replica in fleet.replicas] == [0, 6])
        trying.add("1")
        shards["1"].break_at = 1  # it does not come back
        shards["1"].die()
        await until(lambda: states(fleet)["1"] == "recovering")
        assert [replica.requests for replica in fleet.replicas] == [6, 0]
        for number, items in enumerate(await asyncio.gather(*reading), 1):
            text = "".join(item.text for item in items if isinstance(item, Token))
            assert text == answer("a" * number, 150)

    run(test, 2, make=lambda: FakeShards(512, seconds=0.001))


def test_while_the_server_shuts_down_streams_end_where_they_are() -> None:
    """Elsewhere nobody waits for them."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        reading = asyncio.create_task(read(fleet, ask("a", 100)))
        await until(lambda: sum(replica.requests for replica in fleet.replicas) == 1)
        draining = asyncio.create_task(fleet.drain(30))
        await asyncio.sleep(0.01)
        fleet.retire(next(replica.name for replica in fleet.replicas if replica.requests), move=True)
        await draining
        assert reading.done()
        assert len(reading.result()) == 102

    run(test)


def test_the_last_replica_that_fails_ends_the_server() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        for fake in shards.values():
            fake.pages = 4
        shards["0"].die()
        await until(lambda: states(fleet) == {"0": "failed", "1": "ready"})
        assert len(await read(fleet, ask("a", 5))) == 7
        shards["1"].die()
        with pytest.raises(Misconfigured):
            await asyncio.wait_for(fleet.wait(), 10)
        await fleet.close()

    with pytest.raises(Misconfigured, match="--max-total-tokens 100 is more than the pool's capacity of 16"):
        run(test, 2, max_total_tokens=100)
