"""Loading and unloading LoRA adapters while requests are served: each request uses the adapter it began with until it ends, also
after restarts of the shards and moves between replicas."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from itertools import count

import pytest

from penstock.proto import shard_pb2
from penstock.router import adapters as module
from penstock.router.adapters import Adapters
from penstock.router.fleet import Fleet
from penstock.router.metrics import Metrics
from penstock.router.replica import Conflict, Unknown
from penstock.router.request import Broken, NoModel, NotReady, Refused
from penstock.tests.router.fakes import ByteTokenizer, FakeShards
from penstock.tests.router.harness import config, make_request
from penstock.tests.router.test_fleet import Shards, metric_value, read, run, start_reading, states, until, until_idle


def run_with_adapters(test: Callable[[Fleet, Shards], Awaitable[None]], replicas: int = 2, room: int = 2) -> None:
    run(test, replicas, make=lambda: FakeShards(seconds=0.001, max_loras=room), max_loras=room)


@pytest.fixture(autouse=True)
def numbered_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes adapter keys predictable: numbers instead of random hex digits."""
    numbers = count(1)
    monkeypatch.setattr(module.secrets, "token_hex", lambda size: str(next(numbers)))


def adapter_keys(shards: Shards) -> list[list[str]]:
    return [[adapter.key for adapter in fake.info.later] for fake in shards.values()]


@pytest.mark.parametrize("replicas", [1, 2])
def test_loaded_adapter_is_on_all_replicas_and_serves_until_it_is_unloaded(replicas: int) -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        assert fleet.adapters.key_of_model("fake") == fleet.adapters.key_of_model("") == fleet.adapters.key_of_model("tgi") == ""
        with pytest.raises(NoModel, match="the model `sql` does not exist: this server has `fake`"):
            fleet.adapters.key_of_model("sql")
        await fleet.adapters.load("sql", "/adapters/sql")
        assert adapter_keys(shards) == [["sql#1"]] * replicas
        assert fleet.adapters.names == ("sql",)
        assert fleet.adapters.folder("sql") == "/adapters/sql"
        assert fleet.adapters.key("sql") == fleet.adapters.key_of_model("sql") == "sql#1"
        found = await asyncio.gather(*start_reading(fleet, [make_request("a", 5, adapter="sql#1"), make_request("b", 5)] * 4))
        assert [len(items) for items in found] == [7] * 8
        await fleet.adapters.unload("sql")
        assert adapter_keys(shards) == [[]] * replicas
        assert fleet.adapters.names == ()
        with pytest.raises(NoModel, match="was unloaded"):
            await read(fleet, make_request("a", 5, adapter="sql#1"))
        assert metric_value(fleet, "tgi_request_failure") == 1
        await until_idle(fleet, shards)

    run_with_adapters(test, replicas)


def test_unloaded_adapter_stays_on_the_shards_until_its_last_request_has_ended() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        reading = start_reading(
            fleet, [make_request("x", 40, adapter="a#1"), make_request("y", 40, adapter="a#1"), make_request("z", 60)]
        )
        await until(lambda: metric_value(fleet, "penstock_generated_tokens_total") > 10)
        await fleet.adapters.unload("a")
        assert fleet.adapters.names == ()
        assert 'max_lora="2",model_name="",running_lora_adapters="a",waiting_lora_adapters=""' in fleet._metrics.render().decode()
        assert adapter_keys(shards) == [["a#1"], ["a#1"]]
        assert all(adapter.retired for fake in shards.values() for adapter in fake.info.later)
        assert [len(items) for items in await asyncio.gather(*reading[:2])] == [42, 42]
        await until(lambda: adapter_keys(shards) == [[], []])
        assert len(await reading[2]) == 62
        await until_idle(fleet, shards)

    run_with_adapters(test)


def test_replacing_an_adapter_keeps_the_old_one_for_its_running_requests() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        reading = start_reading(fleet, [make_request("x", 60, adapter="a#1")])
        await until(lambda: metric_value(fleet, "penstock_generated_tokens_total") > 5)
        with pytest.raises(Refused, match="an adapter called a is loaded already: unload it, or say `load_inplace`"):
            await fleet.adapters.load("a", "/b")
        await fleet.adapters.load("a", "/b", replace=True)
        assert fleet.adapters.key("a") == "a#2"
        assert fleet.adapters.folder("a") == "/b"
        assert adapter_keys(shards) == [["a#1", "a#2"], ["a#1", "a#2"]]
        assert len((await asyncio.gather(*start_reading(fleet, [make_request("x", 5, adapter="a#2")])))[0]) == 7
        with pytest.raises(Conflict, match=r"all 2 places for adapters are taken \(1 of them leave when their last requests end\)"):
            await fleet.adapters.load("c", "/c")
        assert len(await reading[0]) == 62
        await until(lambda: adapter_keys(shards) == [["a#2"], ["a#2"]])
        await fleet.adapters.load("c", "/c")

    run_with_adapters(test)


def test_unloaded_adapter_is_dropped_when_its_clients_disconnect() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        reading = start_reading(fleet, [make_request("x", 60, adapter="a#1") for _ in range(3)])
        await until(lambda: metric_value(fleet, "penstock_generated_tokens_total") > 5)
        await fleet.adapters.unload("a")
        for each in reading:
            each.cancel()
        await until(lambda: adapter_keys(shards) == [[], []])
        await until_idle(fleet, shards)

    run_with_adapters(test)


def test_restarted_shards_load_all_adapters_again() -> None:
    """Streams continue with them, those of an adapter that was unloaded, too."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        await fleet.adapters.load("b", "/b")
        reading = start_reading(
            fleet, [make_request(text, 50, adapter=key) for text, key in [("x", "a#1"), ("y", "b#2"), ("z", "")] * 2]
        )
        await until(lambda: metric_value(fleet, "penstock_generated_tokens_total") > 20)
        await fleet.adapters.unload("b")
        for fake in shards.values():
            fake.die()
        assert adapter_keys(shards) == [[], []]
        assert [len(items) for items in await asyncio.gather(*reading)] == [52] * 6
        await until(lambda: adapter_keys(shards) == [["a#1"], ["a#1"]])
        await until_idle(fleet, shards)

    run_with_adapters(test)


def test_joining_and_recovering_replicas_get_the_current_adapters() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        fleet.join(["unix:/9"], "late")
        await until(lambda: states(fleet)["late"] == "ready")
        assert adapter_keys(shards) == [["a#1"]] * 3
        shards["0"].break_at = 1
        shards["0"].die()
        await until(lambda: states(fleet)["0"] == "recovering")
        await fleet.adapters.load("b", "/b")
        await fleet.adapters.unload("a")
        assert adapter_keys(shards) == [[], ["b#2"], ["b#2"]]
        shards["0"].break_at = 0
        await until(lambda: states(fleet)["0"] == "ready")
        assert adapter_keys(shards) == [["b#2"]] * 3

    run_with_adapters(test)


def test_replica_that_recovers_during_a_load_gets_the_adapter() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        shards["1"].break_at = 1
        shards["1"].die()
        await until(lambda: states(fleet)["1"] == "recovering")
        shards["0"].gate.clear()
        loading = asyncio.create_task(fleet.adapters.load("a", "/a"))
        await asyncio.sleep(0.01)
        shards["1"].break_at = 0
        await until(lambda: states(fleet)["1"] == "ready")
        assert adapter_keys(shards) == [[], []]
        shards["0"].gate.set()
        await loading
        assert adapter_keys(shards) == [["a#1"], ["a#1"]]

    run_with_adapters(test)


@pytest.mark.parametrize(("faulty", "kind"), [("adapter a has rank 64", Refused), ("die", Broken)])
def test_adapter_that_one_replica_cannot_load_is_on_none(faulty: str, kind: type[Exception]) -> None:
    """Shards that it has killed don't get it again, either."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        shards["1"].faulty = faulty
        with pytest.raises(kind, match="rank 64" if kind is Refused else "has ended"):
            await fleet.adapters.load("a", "/a")
        shards["1"].faulty = ""
        await until(lambda: states(fleet) == {"0": "ready", "1": "ready"})
        assert adapter_keys(shards) == [[], []]
        assert not any(fake.read for fake in shards.values())
        assert fleet.adapters.names == ()
        await fleet.adapters.load("a", "/a")
        assert adapter_keys(shards) == [["a#2"], ["a#2"]]

    run_with_adapters(test)


def test_adapter_that_restarted_shards_cannot_load_fails_only_its_own_requests(caplog: pytest.LogCaptureFixture) -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        reading = start_reading(fleet, [make_request("x", 60, adapter="a#1"), make_request("y", 60)])
        await until(lambda: metric_value(fleet, "penstock_generated_tokens_total") > 5)
        shards["0"].faulty = "the folder is gone"
        shards["0"].die()
        with pytest.raises(Broken, match="the adapter by which it goes could not be loaded again"):
            await reading[0]
        assert len(await reading[1]) == 62
        with pytest.raises(Broken, match="could not be loaded again"):
            await read(fleet, make_request("x", 5, adapter="a#1"))
        # Other ranks may have read it.
        assert [command.adapt.drop for command in shards["0"].commands if command.HasField("adapt")][-1] == "a#1"
        await fleet.adapters.unload("a")
        shards["0"].faulty = ""
        await fleet.adapters.load("a", "/a")
        assert len(await read(fleet, make_request("x", 5, adapter="a#2"))) == 7

    run_with_adapters(test, 1)
    assert "requests that go by adapter a fail: it can't be loaded again: the folder is gone" in caplog.text


def test_adapter_whose_files_have_changed_is_not_reloaded_by_restarted_shards() -> None:
    """Its streams would continue with other weights."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        reading = start_reading(fleet, [make_request("x", 60, adapter="a#1")])
        await until(lambda: metric_value(fleet, "penstock_generated_tokens_total") > 5)
        shards["0"].revision = ", the second"
        shards["0"].die()
        with pytest.raises(Broken, match="could not be loaded again"):
            await reading[0]
        await fleet.adapters.load("a", "/a", replace=True)
        assert adapter_keys(shards) == [["a#2"]]

    run_with_adapters(test, 1)


@pytest.mark.parametrize("replicas", [1, 2])
def test_adapter_unloaded_while_restarted_shards_load_it_is_dropped(replicas: int) -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        await fleet.adapters.load("b", "/b")
        shards["0"].reading.clear()
        shards["0"].die()
        await until(lambda: shards["0"].groups_met == 2)
        await fleet.adapters.unload("a")
        shards["0"].reading.set()
        await until(lambda: states(fleet)["0"] == "ready")
        assert adapter_keys(shards) == [["b#2"]] * replicas
        await fleet.adapters.load("c", "/c")
        assert adapter_keys(shards) == [["b#2", "c#3"]] * replicas

    run_with_adapters(test, replicas)


def test_restarted_shards_know_which_adapters_are_retired() -> None:
    """Otherwise the next router would serve the retired adapter under its name."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        reading = start_reading(fleet, [make_request("x", 60, adapter="a#1")])
        await until(lambda: metric_value(fleet, "penstock_generated_tokens_total") > 5)
        await fleet.adapters.load("a", "/b", replace=True)
        shards["0"].die()
        await until(lambda: states(fleet)["0"] == "ready" and shards["0"].groups_met == 2)
        assert [(adapter.key, adapter.retired) for adapter in shards["0"].info.later] == [("a#1", True), ("a#2", False)]
        assert len(await reading[0]) == 62

    run_with_adapters(test, 1)


def test_adapter_unloaded_while_restarted_shards_load_it_is_retired_until_its_requests_end() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        reading = start_reading(fleet, [make_request("x", 300, adapter="a#1")])
        await until(lambda: metric_value(fleet, "penstock_generated_tokens_total") > 5)
        shards["0"].gate.clear()
        shards["0"].die()
        await until(lambda: bool(shards["0"].read))
        await fleet.adapters.unload("a")
        shards["0"].gate.set()
        await until(lambda: states(fleet)["0"] == "ready")
        assert [(adapter.key, adapter.retired) for adapter in shards["0"].info.later] == [("a#1", True)]
        reading[0].cancel()
        await until(lambda: adapter_keys(shards) == [[]])

    run(test, 1, make=lambda: FakeShards(pages=200, seconds=0.001, max_loras=2), max_loras=2)


def test_adapters_unknown_to_a_running_router_are_dropped_from_shards_it_reconnects_to() -> None:
    """Shards that the router reconnects to may have an adapter that was unloaded meanwhile."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        existing = shard_pb2.LoadedAdapter(name="b", key="b#9", folder="/b")
        die = shards["0"].die

        def survive() -> None:
            kept = [*shards["0"].info.later, existing]
            die()
            shards["0"].info.later.extend(kept)

        survive()
        await fleet.adapters.unload("a")
        await until(lambda: states(fleet)["0"] == "ready" and shards["0"].groups_met == 2)
        assert adapter_keys(shards) == [[]]
        assert fleet.adapters.names == ()

    run_with_adapters(test, 1)


def test_adapter_commands_for_lost_shards_raise_and_are_not_sent() -> None:
    """The shards that replace them have nothing loaded yet."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        batcher = fleet._members["0"].batcher
        shards["0"].break_at = 1
        shards["0"].die()
        before = len(shards["0"].commands)
        for call in (batcher.retire("a"), batcher.drop("a"), batcher.load(module.RuntimeAdapter("k", "a", "/a"))):
            with pytest.raises(Broken, match="the shards are lost"):
                await call
        with pytest.raises((Broken, NotReady)):
            await fleet.adapters.load("a", "/a")
        assert len(shards["0"].commands) == before
        shards["0"].break_at = 0

    run_with_adapters(test, 1)


@pytest.mark.parametrize("replicas", [1, 2])
def test_requests_wait_while_restarted_shards_load_their_adapter(replicas: int) -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        for fake in shards.values():
            fake.reading.clear()
            fake.die()
        await until(lambda: all(fake.groups_met == 2 for fake in shards.values()))
        reading = start_reading(fleet, [make_request("x", 9, adapter="a#1"), make_request("y", 9)])
        await asyncio.sleep(0.02)
        assert not any(one.done() for one in reading)
        for fake in shards.values():
            fake.reading.set()
        assert [len(items) for items in await asyncio.gather(*reading)] == [11, 11]
        await until_idle(fleet, shards)

    run_with_adapters(test, replicas)


def test_requests_wait_while_one_replica_recovers_and_a_new_one_loads_adapters() -> None:
    """Requests don't wait at the replica that never had shards, nor are they counted there for ever."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        fleet.join(["unix:/9"], "late")
        shards["late"].reading.clear()
        await until(lambda: shards["late"].groups_met == 1)
        shards["0"].break_at = 1
        shards["0"].die()
        await until(lambda: states(fleet)["0"] == "recovering")
        reading = start_reading(fleet, [make_request("x", 9, adapter="a#1"), make_request("y", 9)])
        await asyncio.sleep(0.02)
        assert not any(one.done() for one in reading)
        shards["late"].reading.set()
        assert [len(items) for items in await asyncio.gather(*reading)] == [11, 11]
        shards["0"].break_at = 0
        await until(lambda: states(fleet)["0"] == "ready")
        await until_idle(fleet, shards)
        assert all(not member.batcher.readers for member in fleet._members.values())

    run_with_adapters(test, 1)


def test_requests_wait_for_the_recovering_replica_while_a_new_one_still_loads_their_adapter() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        shards["0"].reading.clear()
        loading = asyncio.create_task(fleet.adapters.load("a", "/a"))
        await asyncio.sleep(0.01)
        fleet.join(["unix:/9"], "late")
        await until(lambda: states(fleet)["late"] == "ready")
        shards["late"].reading.clear()
        shards["0"].reading.set()
        await until(lambda: "a" in fleet.adapters.names)
        shards["0"].break_at = 1
        shards["0"].die()
        await until(lambda: states(fleet)["0"] == "recovering")
        reading = start_reading(fleet, [make_request(text, 9, adapter="a#1") for text in "xyz"])
        await asyncio.sleep(0.02)
        assert not any(command.prefill.groups for command in shards["late"].commands)
        shards["0"].break_at = 0
        assert [len(items) for items in await asyncio.gather(*reading)] == [11] * 3
        shards["late"].reading.set()
        await loading

    run_with_adapters(test, 1)


def test_replicas_that_recover_during_a_load_get_the_adapter_although_another_dies() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        for name in ("1", "2"):
            shards[name].break_at = 1
            shards[name].die()
        await until(lambda: [*states(fleet).values()][1:] == ["recovering"] * 2)
        shards["0"].gate.clear()
        loading = asyncio.create_task(fleet.adapters.load("a", "/a"))
        await asyncio.sleep(0.01)
        for name in ("1", "2"):
            shards[name].break_at = 0
        await until(lambda: [*states(fleet).values()][1:] == ["ready"] * 2)
        shards["1"].faulty = "die"
        shards["0"].gate.set()
        await loading
        shards["1"].faulty = ""
        assert adapter_keys(shards)[2] == ["a#1"]
        await until(lambda: adapter_keys(shards) == [["a#1"]] * 3)

    run_with_adapters(test, 3)


def test_later_of_two_adapters_with_one_name_left_by_a_router_is_adopted() -> None:
    """A router died before the first one was retired, or when only one of two replicas had retired it."""
    numbers = count()

    def make() -> FakeShards:
        fake = FakeShards(seconds=0.001 * next(numbers), max_loras=9)
        retired = fake._seconds > 0
        for name, key, is_retired in (("a", "k1", False), ("a", "k2", False), ("b", "k3", retired)):
            fake.info.later.append(shard_pb2.LoadedAdapter(name=name, key=key, folder=f"/{key}", retired=is_retired))
        return fake

    async def test(fleet: Fleet, shards: Shards) -> None:
        assert fleet.adapters.key("a") == "k2"
        assert adapter_keys(shards)[0][:1] == ["k2"]

    run(test, 2, make=make, max_loras=9)


def test_streams_run_only_on_replicas_that_have_their_adapter() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        shards["1"].faulty = "the folder is gone"
        shards["1"].die()
        await until(lambda: states(fleet)["1"] == "ready" and shards["1"].groups_met == 2)
        assert adapter_keys(shards) == [["a#1"], []]
        found = await asyncio.gather(*start_reading(fleet, [make_request(text, 9, adapter="a#1") for text in "uvwxyz"]))
        assert [len(items) for items in found] == [11] * 6
        assert not any(command.prefill.groups for command in shards["1"].commands)
        shards["0"].break_at = 1
        shards["0"].die()
        await until(lambda: states(fleet)["0"] == "recovering")
        assert len(await read(fleet, make_request("y", 9))) == 11
        reading = start_reading(fleet, [make_request("x", 9, adapter="a#1"), make_request("y", 9, adapter="a#1")])
        await asyncio.sleep(0.02)
        assert not any(one.done() for one in reading)
        shards["0"].break_at = 0
        assert [len(items) for items in await asyncio.gather(*reading)] == [11, 11]

    run_with_adapters(test)


def test_adapter_retired_on_one_replica_is_not_adopted_from_another() -> None:
    adapters = Adapters("fake", (), 3)
    message = shard_pb2.LoadedAdapter(name="a", key="k", folder="/a")
    assert adapters.adopt(message)
    assert adapters.names == ("a",)
    message.retired = True
    assert not adapters.adopt(message)
    assert adapters.names == ()


def test_adapter_load_completes_even_if_its_caller_is_cancelled() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        shards["0"].gate.clear()
        loading = asyncio.create_task(fleet.adapters.load("a", "/a"))
        await asyncio.sleep(0.01)
        loading.cancel()
        shards["0"].gate.set()
        await until(lambda: fleet.adapters.names == ("a",))
        assert adapter_keys(shards) == [["a#1"], ["a#1"]]

    run_with_adapters(test)


def test_adapters_left_on_the_shards_by_a_previous_router_are_adopted() -> None:
    """Except for those that it had retired, and those for which there is no room."""
    existing = [("old", "k0", True), ("a", "k2", False), ("a", "k1", False), ("b", "k3", False), ("c", "k4", False)]

    def make() -> FakeShards:
        fake = FakeShards(seconds=0.001, max_loras=9)
        for name, key, retired in existing:
            fake.info.later.append(shard_pb2.LoadedAdapter(name=name, key=key, folder=f"/{name}", retired=retired))
        return fake

    async def test(fleet: Fleet, shards: Shards) -> None:
        assert adapter_keys(shards) == [["k1", "k3"], ["k1", "k3"]]
        assert {*fleet.adapters.names} == {"a", "b"}
        assert fleet.adapters.key("a") == "k1"
        await fleet.adapters.unload("a")
        assert adapter_keys(shards) == [["k3"], ["k3"]]

    run(test, 2, make=make, max_loras=2)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "from 1 to 200 characters"),
        ("a b", "no spaces"),
        ("ä", "ASCII"),
        ("x" * 201, "from 1 to 200 characters"),
        ("fake", "the model is called fake itself"),
        ("tgi", "the model is called tgi itself"),
        ("one", "an adapter called one was there from the start, and stays: give this one another name"),
    ],
)
def test_invalid_and_taken_adapter_names_are_refused(name: str, words: str) -> None:
    adapters = Adapters("fake", ("one",), 3)
    with pytest.raises(Refused, match=words):
        asyncio.run(adapters.load(name, "/a"))


def test_unload_and_load_errors_of_unknown_fixed_and_surplus_adapters() -> None:
    adapters = Adapters("fake", ("one",), 1)
    with pytest.raises(Unknown, match="there is no adapter `two`; loaded are: one"):
        asyncio.run(adapters.unload("two"))
    with pytest.raises(Refused, match=r"adapter one was there from the start \(--lora-adapters\), and stays"):
        asyncio.run(adapters.unload("one"))
    with pytest.raises(Conflict, match="all 1 places"):
        asyncio.run(adapters.load("two", "/a"))
    with pytest.raises(NotReady, match="no replica has shards"):
        asyncio.run(Adapters("fake", (), 1).load("two", "/a"))


def test_without_runtime_loading_unknown_model_names_mean_the_base_model() -> None:
    adapters = Adapters("fake", ("one",))
    assert [adapters.key_of_model(name) for name in ("one", "gpt-4", "", "fake")] == ["one", "", "", ""]


def test_start_fails_if_the_shards_have_no_room_for_runtime_adapters() -> None:
    async def main() -> None:
        fleet = Fleet(config(groups=(("unix:/0",),), max_loras=2), ByteTokenizer(), lambda name, addresses: FakeShards(), Metrics())
        with pytest.raises(Exception, match="the shards have room for 0 adapters that come later"):
            await fleet.start()
        await fleet.close()

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(12))
def test_random_loads_unloads_requests_and_deaths(seed: int) -> None:
    """Random loads, unloads, requests and deaths of shards: each request is served by the adapter it began with, or fails because
    that was unloaded, and in the end all shards have exactly the adapters that clients can name."""
    chance = random.Random(seed)
    replicas, room = chance.randint(1, 3), chance.randint(1, 3)

    async def test(fleet: Fleet, shards: Shards) -> None:
        requests: list[asyncio.Task[int]] = []
        changes: list[asyncio.Task[None]] = []

        async def answered(key: str, most: int) -> int:
            return len(await read(fleet, make_request(f"{key}?" * chance.randint(1, 4), most, adapter=key)))

        async def change(name: str) -> None:
            action = chance.choice(["load", "load", "replace", "unload"])
            try:
                if action == "unload":
                    await fleet.adapters.unload(name)
                else:
                    await fleet.adapters.load(name, f"/{name}", replace=action == "replace")
            except (Refused, Conflict, NotReady, Broken):
                pass

        async def die(fake: FakeShards) -> None:
            fake.break_at = 1
            fake.die()
            await asyncio.sleep(chance.choice([0, 0.001, 0.01, 0.03]))
            fake.break_at = 0

        deaths: list[asyncio.Task[None]] = []
        for _ in range(60):
            draw = chance.random()
            if draw < 0.3:
                changes.append(asyncio.create_task(change(chance.choice("abc"))))
            elif draw < 0.75:
                name = chance.choice(["", *fleet.adapters.names])
                requests.append(asyncio.create_task(answered(fleet.adapters.key(name) or "", chance.choice([1, 5, 30]))))
            elif draw < 0.82 and all(death.done() for death in deaths):
                deaths.append(asyncio.create_task(die(chance.choice([*shards.values()]))))
            elif draw < 0.88 and requests:
                chance.choice(requests).cancel()
            else:
                await asyncio.sleep(chance.choice([0, 0, 0.001, 0.003]))
        for each in (*deaths, *changes):
            await each
        ended = await asyncio.gather(*requests, return_exceptions=True)
        # Requests may name an adapter just before it is unloaded, and may be computed in every step that kills the shards.
        errors = [str(end) for end in ended if isinstance(end, Exception)]
        assert all("was unloaded" in words or "again and again" in words for words in errors)
        assert all(end > 2 for end in ended if isinstance(end, int))
        await until(lambda: all(state == "ready" for state in states(fleet).values()))
        await until_idle(fleet, shards)
        keys = sorted(fleet.adapters.key(name) or "" for name in fleet.adapters.names)
        await until(lambda: [sorted(own) for own in adapter_keys(shards)] == [keys] * replicas)
        assert not any(fake.read for fake in shards.values())
        assert not any(adapter.retired for fake in shards.values() for adapter in fake.info.later)
        assert all(not adapter.users for adapter in fleet.adapters._later.values())
        assert len(fleet.adapters._later) == len(keys)

    run_with_adapters(test, replicas, room)
