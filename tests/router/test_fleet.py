"""`Fleet` with several replicas on fake shards: whatever replicas die, join, drain or leave, each stream gets the same items as on
one undisturbed replica."""

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
from penstock.tests.router.harness import config, expected_text, make_request
from penstock.tests.router.test_recovery import deterministic_parts

Test = Callable[["Fleet", "Shards"], Awaitable[None]]
Shards = dict[str, FakeShards]


def run(test: Test, count: int = 3, *, make: Callable[[], FakeShards] = lambda: FakeShards(seconds=0.001), **changes: Any) -> None:
    """Runs `test` with a fleet of `count` replicas, all of them ready, then checks that shards are closed and no task is left."""

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


async def until_idle(fleet: Fleet, shards: Shards) -> None:
    """Returns when no shard has a group left; checks that all pages, requests and loads were released."""
    names = {replica.name for replica in fleet.replicas}
    await until(lambda: not any(fake.model.groups for name, fake in shards.items() if name in names))
    await until(lambda: metric_value(fleet, "penstock_pages_free") == metric_value(fleet, "penstock_pages_total"))
    for name in ("penstock_waiting", "penstock_running", "penstock_paused"):
        assert metric_value(fleet, name) == 0
    assert [(replica.requests, replica.load) for replica in fleet.replicas] == [(0, 0)] * len(names)
    if fleet._placement is not None:
        assert [fleet._placement.load(name) for name in fleet._placement.names] == [0] * len(fleet._placement.names)


def metric_value(fleet: Fleet, name: str) -> float:
    """A metric's value, summed over its labels."""
    lines = fleet._metrics.render().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


async def read(fleet: Fleet, request: Request) -> list[Item]:
    return [item async for items in fleet.submit(request) for item in items]


def start_reading(fleet: Fleet, requests: Sequence[Request]) -> list["asyncio.Task[list[Item]]"]:
    return [asyncio.create_task(read(fleet, request)) for request in requests]


def mixed_requests(count: int = 12, most: int = 60) -> list[Request]:
    return [make_request(f"{chr(97 + number)}" * (5 + 3 * number), most, choices=1 + number % 3) for number in range(count)]


def states(fleet: Fleet) -> dict[str, str]:
    return {replica.name: replica.state for replica in fleet.replicas}


def expected_items() -> list[list[object]]:
    """What `mixed_requests` get on one replica without disturbances."""
    found: list[list[object]] = []

    async def undisturbed(fleet: Fleet, shards: Shards) -> None:
        found.extend([deterministic_parts(items) for items in await asyncio.gather(*start_reading(fleet, mixed_requests()))])

    run(undisturbed, 1)
    return found


async def serve_during(fleet: Fleet, shards: Shards, trouble: Callable[[], Awaitable[object]]) -> None:
    """Runs `trouble` while `mixed_requests` are served, and checks that their items are those of the undisturbed run."""
    reading = start_reading(fleet, mixed_requests())
    await until(lambda: metric_value(fleet, "penstock_generated_tokens_total") > 50)
    await trouble()
    found = await asyncio.gather(*reading)
    assert [deterministic_parts(items) for items in found] == EXPECTED
    await until_idle(fleet, shards)


EXPECTED: list[list[object]] = []


@pytest.fixture(scope="module", autouse=True)
def compute_expected() -> None:
    EXPECTED[:] = expected_items()


def test_requests_are_distributed_over_replicas_and_their_items_are_unchanged() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        async def nothing() -> None:
            assert fleet.ready
            assert all(replica.requests for replica in fleet.replicas)

        await serve_during(fleet, shards, nothing)
        assert metric_value(fleet, "tgi_request_success") == metric_value(fleet, "tgi_request_count") == 12
        assert metric_value(fleet, "penstock_placements_total") == 12
        assert metric_value(fleet, "penstock_replicas_ready") == metric_value(fleet, "penstock_replica_up") == 3
        assert metric_value(fleet, "penstock_pages_total") == metric_value(fleet, "penstock_replica_pages_total") == 3 * 64

    run(test)


def test_single_replica_bypasses_placement_and_queues_requests_while_recovering() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        assert len(await read(fleet, make_request("a", 5))) == 7
        assert fleet._placement is None
        assert metric_value(fleet, "penstock_placements_total") == 0
        shards["0"].break_at = 1
        shards["0"].die()
        await until(lambda: states(fleet) == {"0": "recovering"})
        assert fleet.stage.startswith("recovering")
        waiting = asyncio.create_task(read(fleet, make_request("b", 5)))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        shards["0"].break_at = 0
        assert len(await waiting) == 7

    run(test, 1)


def test_streams_of_a_dead_replica_continue_on_the_others_at_once() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        async def kill() -> None:
            shards["1"].break_at = 1  # it does not come back
            shards["1"].die()
            await until(lambda: states(fleet)["1"] == "recovering")
            assert fleet.ready
            assert [replica.requests for replica in fleet.replicas][1] == 0
            assert not fleet.serves("1")

        await serve_during(fleet, shards, kill)
        assert metric_value(fleet, "penstock_moved_requests_total") >= 3
        assert metric_value(fleet, "penstock_replica_up") == 2
        assert len(await read(fleet, make_request("later", 5))) == 7
        shards["1"].break_at = 0
        await until(lambda: states(fleet)["1"] == "ready")
        before = len(shards["1"].commands)
        await asyncio.gather(*start_reading(fleet, mixed_requests()))
        assert shards["1"].groups_met == 2
        assert metric_value(fleet, "penstock_restarts_total") == 1
        assert any(command.WhichOneof("kind") == "prefill" for command in shards["1"].commands[before:])  # it gets requests again

    run(test)


def test_streams_with_images_do_not_move_to_a_replica_without_vision(caplog: pytest.LogCaptureFixture) -> None:
    """They wait until the vision replica has shards again."""
    seeing = iter((True, False))

    async def test(fleet: Fleet, shards: Shards) -> None:
        assert fleet.limits is not None
        assert not fleet.limits.images  # no new requests with images are accepted
        image = Image(start=0, rows=1, columns=1, pixels=b"abc", shape=(1, 3, 1, 1))
        reading = start_reading(fleet, [make_request("a", 60, images=(image,)), make_request("b", 60, images=(image,))])
        await until(lambda: metric_value(fleet, "penstock_generated_tokens_total") > 10)
        shards["0"].break_at = 1
        shards["0"].die()
        await until(lambda: states(fleet)["0"] == "recovering")
        shards["0"].break_at = 0
        assert [len(items) for items in await asyncio.gather(*reading)] == [62, 62]
        assert not any(command.prefill.groups for command in shards["1"].commands)

    run(test, 2, make=lambda: FakeShards(seconds=0.001, images=next(seeing)))
    assert caplog.text.count("some replicas see images, and some don't") == 1


def test_while_all_replicas_are_dead_streams_wait_and_continue_on_the_first_to_recover() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        async def kill() -> None:
            for fake in shards.values():
                fake.break_at = 1
                fake.die()
            await until(lambda: set(states(fleet).values()) == {"recovering"})
            assert not fleet.ready
            assert (
                metric_value(fleet, "penstock_moved_requests_total") == 0
            )  # no request moved to a replica that lost its shards, too
            late = asyncio.create_task(read(fleet, make_request("late", 5)))
            await asyncio.sleep(0.02)
            shards["2"].break_at = 0
            assert len(await late) == 7

        await serve_during(fleet, shards, kill)
        assert list(states(fleet).values()) == ["recovering", "recovering", "ready"]

    run(test)


@pytest.mark.parametrize("alone", [True, False])
def test_poison_request_kills_two_replicas_and_no_third(alone: bool) -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        for fake in shards.values():
            fake.killers = {b"killer"}
        others = [] if alone else mixed_requests(9, 200)
        reading = start_reading(fleet, others)
        killer = asyncio.create_task(read(fleet, make_request("killer", 40)))
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


def test_cached_prompt_token_counts_are_reset_when_a_stream_moves_to_another_replica() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        for fake in shards.values():
            fake.gate.clear()
        reading = asyncio.create_task(read(fleet, make_request("hello")))
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
def test_requests_queue_at_the_recovering_replica_not_at_a_drained_or_failed_one(fails: bool) -> None:
    """Neither at a replica that drains, nor at one that has failed."""

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
        reading = start_reading(fleet, [make_request("a", 5)] * 3)
        await asyncio.sleep(0.01)
        assert [replica.requests for replica in fleet.replicas] == [0, 3]
        shards["1"].break_at = 0
        assert [len(items) for items in await asyncio.gather(*reading)] == [7] * 3

    run(test, 2, max_total_tokens=100)


def test_fleet_is_not_ready_while_its_only_replica_with_shards_is_drained() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        fleet.retire("0")
        shards["1"].break_at = 1
        shards["1"].die()
        await until(lambda: states(fleet) == {"0": "drained", "1": "recovering"})
        assert not fleet.ready
        assert fleet.stage.startswith("recovering")

    run(test, 2)


class NotRestarted(FakeShards):
    """Shards that don't come back after they died."""

    def die(self) -> None:
        super().die()
        self.break_at = 1


def test_death_counts_of_a_poison_request_move_with_it_to_other_replicas() -> None:
    """The replicas that it killed stay dead, so they can't be the ones that remember its deaths."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        for fake in shards.values():
            fake.killers = {b"killer"}
        with pytest.raises(Broken, match="again and again"):
            await asyncio.wait_for(read(fleet, make_request("killer", 40)), 10)
        assert sorted(states(fleet).values()) == ["ready", "ready", "recovering", "recovering"]

    run(test, 4, make=lambda: NotRestarted(seconds=0.001))


def test_draining_replica_finishes_its_requests_and_gets_no_new_ones() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        async def drain() -> None:
            assert fleet.retire("2").state == "draining"
            before = len(shards["2"].commands)
            await asyncio.gather(*start_reading(fleet, [make_request("new", 3)] * 6))
            met = [group for command in shards["2"].commands[before:] for group in command.prefill.groups]
            assert not [group for group in met if bytes(group.tokens) == b"new"]

        await serve_during(fleet, shards, drain)
        assert states(fleet)["2"] == fleet.replicas[2].stage == "drained"
        assert metric_value(fleet, "penstock_moved_requests_total") == 0
        await fleet.remove("2")
        assert list(states(fleet)) == ["0", "1"]
        assert metric_value(fleet, "penstock_replica_up") == 2
        assert shards["2"].closed

    run(test)


def test_requests_of_a_removed_replica_continue_on_the_others_and_the_last_cannot_be_removed() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        async def leave() -> None:
            fleet.retire("0", move=True)
            assert fleet.replicas[0].requests == 0
            await until(lambda: not shards["0"].model.groups)
            await fleet.remove("1")

        await serve_during(fleet, shards, leave)
        assert states(fleet) == {"0": "drained", "2": "ready"}
        assert metric_value(fleet, "penstock_moved_requests_total") >= 6
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
        assert len(await read(fleet, make_request("a", 5))) == 7
        assert fleet._placement is None

    run(test)


def test_replica_that_joins_under_load_gets_requests() -> None:
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
            reading = start_reading(fleet, mixed_requests(3, 30))
            await until(lambda: len(shards["fast"].model.groups) == 3)  # the other replica has the first requests
            await asyncio.gather(*reading)

        await serve_during(fleet, shards, join)
        assert fleet.join(["unix:/third"]).name == "1"

    run(test, 1)


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("dtype", "bfloat16", "replica other has dtype bfloat16, replica 0 has float32"),
        ("quantize", "fp8", "replica other has quantize fp8, replica 0 has none"),
        ("kv_cache_dtype", "fp8_e4m3fn", "replica other has kv_cache_dtype fp8_e4m3fn, replica 0 has none"),
        ("batch_invariant", True, "replica other has batch_invariant True, replica 0 has none"),
    ],
)
def test_replica_with_other_number_formats_or_batch_invariance_fails_to_join(setting: str, value: object, expected: str) -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        async def join() -> None:
            fleet.join(["unix:/other"], "other")
            setattr(shards["other"].info, setting, value)
            shards["other"].pages = 30
            await until(lambda: states(fleet)["other"] == "failed")
            assert expected in fleet.replicas[1].stage

        await serve_during(fleet, shards, join)
        assert fleet.limits is not None
        assert fleet.limits.pages == 64, "its size bounds nobody"
        fleet.join(["unix:/third"], "third")
        await until(lambda: states(fleet)["third"] != "starting")
        assert states(fleet)["third"] == "ready", "who has failed is nobody to be compared with"
        await fleet.remove("third")
        await fleet.remove("other")
        assert list(states(fleet)) == ["0"]

    run(test, 1)


def test_start_of_a_joining_replica_is_retried_while_the_others_serve() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        fleet.join(["unix:/late"], "late")
        late = shards["late"]
        failures = 0

        async def fail() -> None:
            nonlocal failures
            failures += 1
            late.lost = asyncio.get_running_loop().create_future()
            late.die()
            raise Broken("address 1 of 1 leads to rank 1 of 2")

        late.connect = fail  # type: ignore[method-assign]
        await until(lambda: failures > 1)
        assert fleet.replicas[1].state == "starting"
        assert "rank 1 of 2" in fleet.replicas[1].stage
        assert len(await read(fleet, make_request("a", 5))) == 7
        del late.connect
        await until(lambda: states(fleet)["late"] == "ready")

    run(test, 1)


def test_limits_are_those_of_the_replica_with_the_smallest_pool() -> None:
    sizes = iter((64, 30, 64))

    async def test(fleet: Fleet, shards: Shards) -> None:
        assert fleet.limits is not None
        assert (fleet.limits.max_total_tokens, fleet.limits.pages) == (120, 30)
        large = asyncio.create_task(read(fleet, make_request("a", 110)))
        await asyncio.sleep(0.01)
        await fleet.remove("1")
        assert (fleet.limits.max_total_tokens, fleet.limits.pages) == (256, 64)
        assert len(await large) == 112

    run(test, make=lambda: FakeShards(next(sizes), seconds=0.001))


def test_request_that_fits_no_replica_leaves_every_load_at_zero() -> None:
    """Neither before it fails nor after: a load below zero would attract all other requests to its replica."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        with pytest.raises(Broken):
            await read(fleet, make_request("a" * 60, 60, choices=9))
        await until_idle(fleet, shards)

    run(test, 2)


def test_max_concurrent_requests_counts_per_replica_and_per_tenant() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        reading = start_reading(fleet, [make_request("a", 200)] * 6)
        await asyncio.sleep(0.01)
        with pytest.raises(Overloaded, match="6 requests are in flight"):
            fleet.submit(make_request("b"))
        assert len(await read(fleet, make_request("b", 3, tenant="another"))) == 5
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await until_idle(fleet, shards)

    run(test, max_concurrent_requests=2)


def test_closing_a_stream_after_it_moved_frees_its_pages_on_the_new_replica() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        stream = fleet.submit(make_request("a", 100, timeout=30.0))
        items = [item for item in await anext(stream) if not isinstance(item, Prompt)]
        home = next(replica.name for replica in fleet.replicas if replica.requests)
        fleet.retire(home, move=True)
        while len(items) < 50:
            items += await anext(stream)
        await stream.aclose()
        text = "".join(item.text for item in items if isinstance(item, Token))
        assert text == expected_text("a", 100)[: len(text)]
        await until_idle(fleet, shards)

    run(test)


def test_deadline_of_a_request_holds_after_it_moved_to_another_replica() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        reading = asyncio.create_task(read(fleet, make_request("a", 200, timeout=0.05)))
        await until(lambda: any(replica.requests for replica in fleet.replicas))
        fleet.retire(next(replica.name for replica in fleet.replicas if replica.requests), move=True)
        with pytest.raises(Exception, match=r"not complete 0\.05 s after"):
            await reading
        await until_idle(fleet, shards)

    run(test)


def test_session_stays_on_the_replica_with_its_cached_prefix() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        async def homes(session: str, text: str) -> str:
            before = {name: len(fake.commands) for name, fake in shards.items()}
            await read(fleet, make_request(text, 3, session=session))
            [home] = [name for name, fake in shards.items() if len(fake.commands) > before[name]]
            return home

        first = [await homes(f"s{number}", "shared beginning of all conversations" * 2) for number in range(3)]
        assert len(set(first)) == 1  # nothing else runs, so the replica with the cached prefix is chosen
        assert [await homes(f"s{number}", "x" * (number + 1)) for number in range(3)] == first

    run(test)


def test_drain_lets_streams_finish_and_refuses_new_requests() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        reading = start_reading(fleet, mixed_requests())
        await asyncio.sleep(0.02)
        draining = asyncio.create_task(fleet.drain(30))
        await asyncio.sleep(0)
        assert (fleet.ready, fleet.stage) == (False, "shutting down")
        with pytest.raises(NotReady, match="shutting down"):
            fleet.submit(make_request("b"))
        assert [deterministic_parts(items) for items in await asyncio.gather(*reading)] == EXPECTED
        await draining

    run(test)


@pytest.mark.parametrize("count", [1, 3])
def test_drain_accepts_and_finishes_requests_that_arrived_before_it(count: int) -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        before, answered = monotonic(), asyncio.Event()
        await asyncio.sleep(0.001)
        draining = asyncio.create_task(fleet.drain(30, answered))
        await asyncio.sleep(0.02)
        assert not draining.done()
        with pytest.raises(NotReady, match="shutting down"):
            fleet.submit(make_request("b", arrived=monotonic()))
        reading = asyncio.create_task(read(fleet, make_request("a", 20, arrived=before)))
        await asyncio.sleep(0.001)
        answered.set()
        await draining
        assert reading.done()
        assert len(reading.result()) == 22

    run(test, count)


def test_request_that_arrived_before_the_drain_is_refused_if_no_replica_has_shards() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        before, answered = monotonic(), asyncio.Event()
        for fake in shards.values():
            fake.break_at = 1
            fake.die()
        await until(lambda: all(replica.state == "recovering" for replica in fleet.replicas))
        draining = asyncio.create_task(fleet.drain(30, answered))
        await asyncio.sleep(0.001)
        with pytest.raises(NotReady, match="shutting down"):
            await read(fleet, make_request("a", 20, arrived=before))
        answered.set()
        await draining

    run(test)


def test_start_raises_if_a_replica_fails_before_any_is_ready() -> None:
    async def main() -> None:
        fake = FakeShards(pages=4)
        fleet = Fleet(
            config(groups=(("a",), ("b",)), max_total_tokens=100), ByteTokenizer(), lambda name, addresses: fake, Metrics()
        )
        with pytest.raises(NotReady):
            fleet.submit(make_request("a"))
        assert fleet.stage == "waiting"
        with pytest.raises(Misconfigured, match="--max-total-tokens 100 is more than the pool's capacity of 16"):
            await fleet.start()
        with suppress(Misconfigured):
            await fleet.close()

    asyncio.run(main())


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_stream_that_moves_between_a_step_report_and_its_delivery_loses_no_token(
    monkeypatch: pytest.MonkeyPatch, choices: int, last: bool
) -> None:
    """last: the replica drains at the report after which the scheduler knows that choices have ended."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        undisturbed = deterministic_parts(await read(fleet, make_request("hello", 6, choices=choices)))
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
        assert deterministic_parts(await asyncio.wait_for(read(fleet, make_request("hello", 6, choices=choices)), 5)) == undisturbed
        assert moved
        await until_idle(fleet, shards)

    run(test, 2)


class DelayedShards(FakeShards):
    """Shards whose connection waits for the event `reachable`."""

    def __init__(self) -> None:
        super().__init__(seconds=0.001)
        self.reachable = asyncio.Event()
        self.error = ""  # if set, connecting fails with this error
        self.lost = asyncio.get_running_loop().create_future()

    async def connect(self) -> None:
        await self.reachable.wait()
        if self.error:
            self.lost = asyncio.get_running_loop().create_future()
            self.die()
            raise Broken(self.error)
        await super().connect()


def run_delayed(test: Callable[["Fleet", dict[str, DelayedShards]], Awaitable[None]]) -> None:
    """Runs `test` with a fleet of one replica whose shards are delayed, before `Fleet.start`."""

    async def main() -> None:
        shards: dict[str, DelayedShards] = {}

        def connect(name: str, addresses: Sequence[str]) -> DelayedShards:
            shards[name] = DelayedShards()
            shards[name].adopts = True
            return shards[name]

        fleet = Fleet(config(groups=(("unix:/0",),)), ByteTokenizer(), connect, Metrics())
        async with asyncio.timeout(30):
            await test(fleet, shards)
            await fleet.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_broken_replica_that_joins_during_the_start_does_not_fail_the_start() -> None:
    async def test(fleet: Fleet, shards: dict[str, DelayedShards]) -> None:
        starting = asyncio.create_task(fleet.start())
        fleet.join(["h:1"])
        shards["1"].error = "address 1 of 1 leads to rank 1 of 2, rank 0 of 1 was expected"
        shards["1"].reachable.set()
        await asyncio.sleep(0.02)
        assert not starting.done()
        shards["0"].reachable.set()
        await starting
        assert len(await read(fleet, make_request("a", 3))) == 5
        assert "rank 1 of 2" in next(replica.stage for replica in fleet.replicas if replica.name == "1")

    run_delayed(test)


def test_requests_are_refused_when_all_replicas_that_ever_had_shards_are_removed() -> None:
    async def test(fleet: Fleet, shards: dict[str, DelayedShards]) -> None:
        shards["0"].reachable.set()
        await fleet.start()
        shards["0"].reachable.clear()
        shards["0"].die()
        await until(lambda: fleet.replicas[0].state == "recovering")
        fleet.join(["h:1"])
        fleet.join(["h:2"])
        await fleet.remove("0")
        with pytest.raises(NotReady, match="not ready"):
            await read(fleet, make_request("a", 3))
        shards["2"].reachable.set()
        await until(lambda: fleet.ready)
        assert len(await read(fleet, make_request("a", 3))) == 5

    run_delayed(test)


def test_removal_completes_even_if_its_caller_is_cancelled() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        removal = asyncio.create_task(fleet.remove("1"))
        await asyncio.sleep(0)
        removal.cancel()
        await asyncio.wait([removal])
        await until(lambda: shards["1"].closed)
        assert [replica.name for replica in fleet.replicas] == ["0", "2"]

    run(test)


def test_metrics_of_a_removed_replica_disappear_and_return_when_it_joins_again() -> None:
    """Otherwise every replica that joins and leaves would leave some time series behind, forever."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        await asyncio.gather(*(read(fleet, make_request(text, 3)) for text in "abcdefghi"))
        assert {'replica="0"', 'replica="1"', 'replica="2"'} == replicas_in_metrics(fleet)
        await fleet.remove("1")
        assert {'replica="0"', 'replica="2"'} == replicas_in_metrics(fleet)
        await asyncio.gather(*(read(fleet, make_request(text, 3)) for text in "abcdefghi"))
        fleet.join(["h:1"], "1")
        await until(lambda: all(replica.state == "ready" for replica in fleet.replicas))
        await asyncio.gather(*(read(fleet, make_request(text, 3)) for text in "abcdefghi"))
        assert {'replica="0"', 'replica="1"', 'replica="2"'} == replicas_in_metrics(fleet)

    run(test)


def replicas_in_metrics(fleet: Fleet) -> set[str]:
    """The replica labels in the metrics."""
    return set(re.findall('replica="[^"]*"', fleet._metrics.render().decode()))


def test_replica_removed_while_its_shards_become_ready_is_in_no_metric() -> None:
    async def test(fleet: Fleet, shards: dict[str, DelayedShards]) -> None:
        shards["0"].reachable.set()
        await fleet.start()
        pages = metric_value(fleet, "penstock_pages_total")
        fleet.join(["h:1"])
        await until(lambda: "1" in shards and fleet._members["1"].batcher.stage == "waiting")
        await asyncio.sleep(0.01)
        shards["1"].reachable.set()
        await fleet.remove("1")
        assert metric_value(fleet, "penstock_pages_total") == pages
        assert replicas_in_metrics(fleet) == {'replica="0"'}

    run_delayed(test)


def test_callbacks_of_a_removed_replica_do_not_affect_its_namesake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shards may end during its removal."""

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
        stream = next(iter(fleet._members.values())).batcher.open(make_request("a"), None)
        fleet.ended(gone, stream)
        monkeypatch.undo()
        stream.owner.close_stream(stream)

    run(test)


def test_suspects_of_poison_requests_move_when_their_replica_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica that leaves holds no further trial."""
    monkeypatch.setattr(Inquest, "suspects", lambda inquest, uid: True)

    async def test(fleet: Fleet, shards: Shards) -> None:
        reading = asyncio.create_task(read(fleet, make_request("a", 60)))
        await until(lambda: any(replica.requests for replica in fleet.replicas))
        home = next(replica.name for replica in fleet.replicas if replica.requests)
        assert fleet.retire(home, move=True).requests == 1
        await fleet.remove(home)
        assert len(await reading) == 62

    run(test, 2)


def test_join_with_the_address_of_another_replicas_rank_is_refused() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        with pytest.raises(Conflict, match="unix:/new, unix:/1 is replica 1 already"):
            fleet.join(["unix:/new", "unix:/1"])

    run(test, 2)


def test_replica_with_waiting_requests_cannot_drain_while_no_other_takes_requests() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        for fake in shards.values():
            fake.break_at = 1
            fake.die()
        await until(lambda: set(states(fleet).values()) == {"recovering"})
        reading = asyncio.create_task(read(fleet, make_request("a", 5)))
        await until(lambda: any(replica.requests for replica in fleet.replicas))
        home, other = sorted(fleet.replicas, key=lambda replica: replica.requests == 0)
        with pytest.raises(Conflict, match=f"replica {home.name} can't be spared"):
            fleet.retire(home.name)
        fleet.retire(other.name)
        shards[home.name].break_at = 0
        assert len(await reading) == 7

    run(test, 2)


def test_draining_and_failed_replicas_do_not_count_for_the_limit_on_concurrent_requests() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        shards["2"].pages = 4
        shards["2"].die()
        await until(lambda: states(fleet)["2"] == "failed")
        fleet.retire("1")
        streams = [fleet.submit(make_request("a", 50)) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(Overloaded, match="2 requests are in flight"):
            fleet.submit(make_request("b"))
        for stream in streams:
            await stream.aclose()

    run(test, 3, max_concurrent_requests=2, max_total_tokens=100)


def test_limit_on_concurrent_requests_is_checked_again_at_the_first_read_of_a_stream() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        streams = [fleet.submit(make_request("a", 50)) for _ in range(4)]
        for stream in streams[:3]:
            await anext(stream)
        with pytest.raises(Overloaded, match="3 requests are in flight"):
            await anext(streams[3])
        for stream in streams:
            await stream.aclose()
        await until_idle(fleet, shards)

    run(test, max_concurrent_requests=1)


def test_streams_of_a_replica_that_dies_during_the_drain_do_not_move() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        reading = asyncio.create_task(read(fleet, make_request("a", 200)))
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


def test_replica_that_tries_suspects_gets_requests_only_if_no_other_can_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for the trial's end. A replica without shards is worse."""
    trying = {"0"}
    monkeypatch.setattr(Batcher, "trying", property(lambda batcher: batcher.name in trying))

    async def test(fleet: Fleet, shards: Shards) -> None:
        reading = start_reading(fleet, [make_request("a" * number, 150) for number in range(1, 7)])
        await until(lambda: [replica.requests for replica in fleet.replicas] == [0, 6])
        trying.add("1")
        shards["1"].break_at = 1  # it does not come back
        shards["1"].die()
        await until(lambda: states(fleet)["1"] == "recovering")
        assert [replica.requests for replica in fleet.replicas] == [6, 0]
        for number, items in enumerate(await asyncio.gather(*reading), 1):
            text = "".join(item.text for item in items if isinstance(item, Token))
            assert text == expected_text("a" * number, 150)

    run(test, 2, make=lambda: FakeShards(512, seconds=0.001))


def test_retire_with_move_during_the_drain_moves_no_stream() -> None:
    """`drain` does not wait for streams that move to another replica."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        reading = asyncio.create_task(read(fleet, make_request("a", 100)))
        await until(lambda: sum(replica.requests for replica in fleet.replicas) == 1)
        draining = asyncio.create_task(fleet.drain(30))
        await asyncio.sleep(0.01)
        fleet.retire(next(replica.name for replica in fleet.replicas if replica.requests), move=True)
        await draining
        assert reading.done()
        assert len(reading.result()) == 102

    run(test)


def test_failure_of_the_last_replica_ends_the_fleet() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        for fake in shards.values():
            fake.pages = 4
        shards["0"].die()
        await until(lambda: states(fleet) == {"0": "failed", "1": "ready"})
        assert len(await read(fleet, make_request("a", 5))) == 7
        shards["1"].die()
        with pytest.raises(Misconfigured):
            await asyncio.wait_for(fleet.wait(), 10)
        await fleet.close()

    with pytest.raises(Misconfigured, match="--max-total-tokens 100 is more than the pool's capacity of 16"):
        run(test, 2, max_total_tokens=100)
