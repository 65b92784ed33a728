"""Adapters come and go while requests are answered: each goes by the one that it began with, to its end, wherever that is."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from itertools import count

import pytest

from penstock.proto import shard_pb2
from penstock.router import adapters as module
from penstock.router.adapters import Adapters, Full
from penstock.router.fleet import Fleet
from penstock.router.metrics import Metrics
from penstock.router.request import Broken, NoModel, NotReady, Refused
from penstock.tests.router.fakes import ByteTokenizer, FakeShards
from penstock.tests.router.harness import config, make_request
from penstock.tests.router.test_fleet import Shards, metric_value, read, run, start_reading, states, until, until_idle


def served(test: Callable[[Fleet, Shards], Awaitable[None]], replicas: int = 2, room: int = 2) -> None:
    run(test, replicas, make=lambda: FakeShards(seconds=0.001, max_loras=room), max_loras=room)


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are told apart by numbers."""
    numbers = count(1)
    monkeypatch.setattr(module.secrets, "token_hex", lambda size: str(next(numbers)))


def held(shards: Shards) -> list[list[str]]:
    return [[adapter.key for adapter in fake.info.later] for fake in shards.values()]


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_that_is_loaded_is_on_all_replicas_and_answers(replicas: int) -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        assert fleet.adapters.key_of_model("fake") == fleet.adapters.key_of_model("") == fleet.adapters.key_of_model("tgi") == ""
        with pytest.raises(NoModel, match="the model `sql` does not exist: this server has `fake`"):
            fleet.adapters.key_of_model("sql")
        await fleet.adapters.load("sql", "/adapters/sql")
        assert held(shards) == [["sql#1"]] * replicas
        assert fleet.adapters.names == ("sql",)
        assert fleet.adapters.folder("sql") == "/adapters/sql"
        assert fleet.adapters.key("sql") == fleet.adapters.key_of_model("sql") == "sql#1"
        found = await asyncio.gather(*start_reading(fleet, [make_request("a", 5, adapter="sql#1"), make_request("b", 5)] * 4))
        assert [len(items) for items in found] == [7] * 8
        await fleet.adapters.unload("sql")
        assert held(shards) == [[]] * replicas
        assert fleet.adapters.names == ()
        with pytest.raises(NoModel, match="was unloaded"):
            await read(fleet, make_request("a", 5, adapter="sql#1"))
        assert metric_value(fleet, "tgi_request_failure") == 1
        await until_idle(fleet, shards)

    served(test, replicas)


def test_one_that_is_unloaded_stays_until_its_last_request_has_ended() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        reading = start_reading(
            fleet, [make_request("x", 40, adapter="a#1"), make_request("y", 40, adapter="a#1"), make_request("z", 60)]
        )
        await until(lambda: metric_value(fleet, "penstock_generated_tokens_total") > 10)
        await fleet.adapters.unload("a")
        assert fleet.adapters.names == ()
        assert 'max_lora="2",model_name="",running_lora_adapters="a",waiting_lora_adapters=""' in fleet._metrics.render().decode()
        assert held(shards) == [["a#1"], ["a#1"]]
        assert all(adapter.retired for fake in shards.values() for adapter in fake.info.later)
        assert [len(items) for items in await asyncio.gather(*reading[:2])] == [42, 42]
        await until(lambda: held(shards) == [[], []])
        assert len(await reading[2]) == 62
        await until_idle(fleet, shards)

    served(test)


def test_a_name_may_come_to_mean_another_one_while_requests_go_by_the_first() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        reading = start_reading(fleet, [make_request("x", 60, adapter="a#1")])
        await until(lambda: metric_value(fleet, "penstock_generated_tokens_total") > 5)
        with pytest.raises(Refused, match="an adapter called a is loaded already: unload it, or say `load_inplace`"):
            await fleet.adapters.load("a", "/b")
        await fleet.adapters.load("a", "/b", replace=True)
        assert fleet.adapters.key("a") == "a#2"
        assert fleet.adapters.folder("a") == "/b"
        assert held(shards) == [["a#1", "a#2"], ["a#1", "a#2"]]
        assert len((await asyncio.gather(*start_reading(fleet, [make_request("x", 5, adapter="a#2")])))[0]) == 7
        with pytest.raises(Full, match=r"all 2 places for adapters are taken \(1 of them leave when their last requests end\)"):
            await fleet.adapters.load("c", "/c")
        assert len(await reading[0]) == 62
        await until(lambda: held(shards) == [["a#2"], ["a#2"]])
        await fleet.adapters.load("c", "/c")

    served(test)


def test_clients_that_leave_let_it_go() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        reading = start_reading(fleet, [make_request("x", 60, adapter="a#1") for _ in range(3)])
        await until(lambda: metric_value(fleet, "penstock_generated_tokens_total") > 5)
        await fleet.adapters.unload("a")
        for each in reading:
            each.cancel()
        await until(lambda: held(shards) == [[], []])
        await until_idle(fleet, shards)

    served(test)


def test_shards_that_come_anew_have_them_again() -> None:
    """Streams go on by them, those of one that was unloaded, too."""

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
        assert held(shards) == [[], []]
        assert [len(items) for items in await asyncio.gather(*reading)] == [52] * 6
        await until(lambda: held(shards) == [["a#1"], ["a#1"]])
        await until_idle(fleet, shards)

    served(test)


def test_a_replica_that_comes_later_has_them_as_well() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        fleet.join(["unix:/9"], "late")
        await until(lambda: states(fleet)["late"] == "ready")
        assert held(shards) == [["a#1"]] * 3
        shards["0"].break_at = 1
        shards["0"].die()
        await until(lambda: states(fleet)["0"] == "recovering")
        await fleet.adapters.load("b", "/b")
        await fleet.adapters.unload("a")
        assert held(shards) == [[], ["b#2"], ["b#2"]]
        shards["0"].break_at = 0
        await until(lambda: states(fleet)["0"] == "ready")
        assert held(shards) == [["b#2"]] * 3

    served(test)


def test_a_replica_that_comes_while_one_is_loaded_has_it_in_the_end() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        shards["1"].break_at = 1
        shards["1"].die()
        await until(lambda: states(fleet)["1"] == "recovering")
        shards["0"].gate.clear()
        loading = asyncio.create_task(fleet.adapters.load("a", "/a"))
        await asyncio.sleep(0.01)
        shards["1"].break_at = 0
        await until(lambda: states(fleet)["1"] == "ready")
        assert held(shards) == [[], []]
        shards["0"].gate.set()
        await loading
        assert held(shards) == [["a#1"], ["a#1"]]

    served(test)


@pytest.mark.parametrize(("faulty", "kind"), [("adapter a has rank 64", Refused), ("die", Broken)])
def test_one_that_a_replica_can_not_load_is_on_none(faulty: str, kind: type[Exception]) -> None:
    """Nor do shards that it has killed get it again."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        shards["1"].faulty = faulty
        with pytest.raises(kind, match="rank 64" if kind is Refused else "has ended"):
            await fleet.adapters.load("a", "/a")
        shards["1"].faulty = ""
        await until(lambda: states(fleet) == {"0": "ready", "1": "ready"})
        assert held(shards) == [[], []]
        assert not any(fake.read for fake in shards.values())
        assert fleet.adapters.names == ()
        await fleet.adapters.load("a", "/a")
        assert held(shards) == [["a#2"], ["a#2"]]

    served(test)


def test_one_that_can_not_be_loaded_again_fails_its_own_requests_alone(caplog: pytest.LogCaptureFixture) -> None:
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
        assert [command.adapt.drop for command in shards["0"].commands if command.HasField("adapt")][-1] == "a#1"  # of other ranks
        await fleet.adapters.unload("a")
        shards["0"].faulty = ""
        await fleet.adapters.load("a", "/a")
        assert len(await read(fleet, make_request("x", 5, adapter="a#2"))) == 7

    served(test, 1)
    assert "requests that go by adapter a fail: it can't be loaded again: the folder is gone" in caplog.text


def test_one_whose_files_have_changed_is_not_loaded_again() -> None:
    """Its streams would go on by another."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        reading = start_reading(fleet, [make_request("x", 60, adapter="a#1")])
        await until(lambda: metric_value(fleet, "penstock_generated_tokens_total") > 5)
        shards["0"].revision = ", the second"
        shards["0"].die()
        with pytest.raises(Broken, match="could not be loaded again"):
            await reading[0]
        await fleet.adapters.load("a", "/a", replace=True)
        assert held(shards) == [["a#2"]]

    served(test, 1)


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_that_goes_while_shards_load_it_anew_is_not_there(replicas: int) -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        await fleet.adapters.load("b", "/b")
        shards["0"].reading.clear()
        shards["0"].die()
        await until(lambda: shards["0"].groups_met == 2)
        await fleet.adapters.unload("a")
        shards["0"].reading.set()
        await until(lambda: states(fleet)["0"] == "ready")
        assert held(shards) == [["b#2"]] * replicas
        await fleet.adapters.load("c", "/c")
        assert held(shards) == [["b#2", "c#3"]] * replicas

    served(test, replicas)


def test_shards_that_come_anew_know_which_ones_have_no_new_requests() -> None:
    """Or the next router would take an old one for what its name means."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        reading = start_reading(fleet, [make_request("x", 60, adapter="a#1")])
        await until(lambda: metric_value(fleet, "penstock_generated_tokens_total") > 5)
        await fleet.adapters.load("a", "/b", replace=True)
        shards["0"].die()
        await until(lambda: states(fleet)["0"] == "ready" and shards["0"].groups_met == 2)
        assert [(adapter.key, adapter.retired) for adapter in shards["0"].info.later] == [("a#1", True), ("a#2", False)]
        assert len(await reading[0]) == 62

    served(test, 1)


def test_one_is_retired_where_shards_load_it_anew_in_that_moment() -> None:
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
        await until(lambda: held(shards) == [[]])

    run(test, 1, make=lambda: FakeShards(pages=200, seconds=0.001, max_loras=2), max_loras=2)


def test_what_came_while_a_router_was_there_is_nobodys() -> None:
    """Shards that it meets again may have one that was unloaded meanwhile."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        left = shard_pb2.LoadedAdapter(name="b", key="b#9", folder="/b")
        die = shards["0"].die

        def survive() -> None:
            kept = [*shards["0"].info.later, left]
            die()
            shards["0"].info.later.extend(kept)

        survive()
        await fleet.adapters.unload("a")
        await until(lambda: states(fleet)["0"] == "ready" and shards["0"].groups_met == 2)
        assert held(shards) == [[]]
        assert fleet.adapters.names == ()

    served(test, 1)


def test_shards_that_are_lost_are_asked_nothing() -> None:
    """Whoever is met in their place knows nothing yet."""

    async def test(fleet: Fleet, shards: Shards) -> None:
        batcher = fleet._members["0"].batcher
        shards["0"].break_at = 1
        shards["0"].die()
        before = len(shards["0"].commands)
        for asked in (batcher.retire("a"), batcher.drop("a"), batcher.load(module.RuntimeAdapter("k", "a", "/a"))):
            with pytest.raises(Broken, match="the shards are lost"):
                await asked
        with pytest.raises((Broken, NotReady)):
            await fleet.adapters.load("a", "/a")
        assert len(shards["0"].commands) == before
        shards["0"].break_at = 0

    served(test, 1)


@pytest.mark.parametrize("replicas", [1, 2])
def test_who_comes_while_shards_load_it_anew_waits(replicas: int) -> None:
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

    served(test, replicas)


def test_who_comes_while_one_replica_is_lost_and_another_is_new_waits() -> None:
    """Nobody waits where there has never been anything to wait for, nor is counted there for ever."""

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

    served(test, 1)


def test_all_replicas_that_come_meanwhile_have_it_though_one_is_lost() -> None:
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
        assert held(shards)[2] == ["a#1"]
        await until(lambda: held(shards) == [["a#1"]] * 3)

    served(test, 3)


def test_of_two_that_were_left_by_one_name_the_later_one_is_meant() -> None:
    """A router died before the first was retired, or one of two replicas had heard of it."""
    numbers = count()

    def make() -> FakeShards:
        fake = FakeShards(seconds=0.001 * next(numbers), max_loras=9)
        retired = fake._seconds > 0
        for name, key, gone in (("a", "k1", False), ("a", "k2", False), ("b", "k3", retired)):
            fake.info.later.append(shard_pb2.LoadedAdapter(name=name, key=key, folder=f"/{key}", retired=gone))
        return fake

    async def test(fleet: Fleet, shards: Shards) -> None:
        assert fleet.adapters.key("a") == "k2"
        assert held(shards)[0][:1] == ["k2"]

    run(test, 2, make=make, max_loras=9)


def test_a_stream_moves_only_to_where_its_adapter_is() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        await fleet.adapters.load("a", "/a")
        shards["1"].faulty = "the folder is gone"
        shards["1"].die()
        await until(lambda: states(fleet)["1"] == "ready" and shards["1"].groups_met == 2)
        assert held(shards) == [["a#1"], []]
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

    served(test)


def test_what_one_replica_knows_to_be_unloaded_is_not_adopted_from_another() -> None:
    adapters = Adapters("fake", (), 3)
    told = shard_pb2.LoadedAdapter(name="a", key="k", folder="/a")
    assert adapters.adopt(told)
    assert adapters.names == ("a",)
    told.retired = True
    assert not adapters.adopt(told)
    assert adapters.names == ()


def test_whoever_asked_for_it_may_leave() -> None:
    async def test(fleet: Fleet, shards: Shards) -> None:
        shards["0"].gate.clear()
        asking = asyncio.create_task(fleet.adapters.load("a", "/a"))
        await asyncio.sleep(0.01)
        asking.cancel()
        shards["0"].gate.set()
        await until(lambda: fleet.adapters.names == ("a",))
        assert held(shards) == [["a#1"], ["a#1"]]

    served(test)


def test_what_another_router_has_left_is_adopted() -> None:
    """But for what it had unloaded, and what there is no room for."""
    left = [("old", "k0", True), ("a", "k2", False), ("a", "k1", False), ("b", "k3", False), ("c", "k4", False)]

    def make() -> FakeShards:
        fake = FakeShards(seconds=0.001, max_loras=9)
        for name, key, retired in left:
            fake.info.later.append(shard_pb2.LoadedAdapter(name=name, key=key, folder=f"/{name}", retired=retired))
        return fake

    async def test(fleet: Fleet, shards: Shards) -> None:
        assert held(shards) == [["k1", "k3"], ["k1", "k3"]]
        assert {*fleet.adapters.names} == {"a", "b"}
        assert fleet.adapters.key("a") == "k1"
        await fleet.adapters.unload("a")
        assert held(shards) == [["k3"], ["k3"]]

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
def test_names(name: str, words: str) -> None:
    adapters = Adapters("fake", ("one",), 3)
    with pytest.raises(Refused, match=words):
        asyncio.run(adapters.load(name, "/a"))


def test_what_there_is_not_can_not_go() -> None:
    adapters = Adapters("fake", ("one",), 1)
    with pytest.raises(NoModel, match="there is no adapter `two`; loaded are: one"):
        asyncio.run(adapters.unload("two"))
    with pytest.raises(Refused, match=r"adapter one was there from the start \(--lora-adapters\), and stays"):
        asyncio.run(adapters.unload("one"))
    with pytest.raises(Full, match="all 1 places"):
        asyncio.run(adapters.load("two", "/a"))
    with pytest.raises(NotReady, match="no replica has shards"):
        asyncio.run(Adapters("fake", (), 1).load("two", "/a"))


def test_adapters_that_stay_leave_all_other_names_to_the_model() -> None:
    adapters = Adapters("fake", ("one",))
    assert [adapters.key_of_model(name) for name in ("one", "gpt-4", "", "fake")] == ["one", "", "", ""]


def test_shards_without_room_are_refused() -> None:
    async def main() -> None:
        fleet = Fleet(config(groups=(("unix:/0",),), max_loras=2), ByteTokenizer(), lambda name, addresses: FakeShards(), Metrics())
        with pytest.raises(Exception, match="the shards have room for 0 adapters that come later"):
            await fleet.start()
        await fleet.close()

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(12))
def test_random_worlds(seed: int) -> None:
    """Whatever comes, goes and dies in whatever order: requests are answered by what they began with, or are told that it was gone,
    and in the end all shards have what clients may name and nothing else."""
    luck = random.Random(seed)
    replicas, room = luck.randint(1, 3), luck.randint(1, 3)

    async def test(fleet: Fleet, shards: Shards) -> None:
        asked: list[asyncio.Task[int]] = []
        changes: list[asyncio.Task[None]] = []

        async def answered(key: str, most: int) -> int:
            return len(await read(fleet, make_request(f"{key}?" * luck.randint(1, 4), most, adapter=key)))

        async def change(name: str) -> None:
            act = luck.choice(["load", "load", "replace", "unload"])
            try:
                if act == "unload":
                    await fleet.adapters.unload(name)
                else:
                    await fleet.adapters.load(name, f"/{name}", replace=act == "replace")
            except (Refused, Full, NotReady, Broken):
                pass

        async def die(fake: FakeShards) -> None:
            fake.break_at = 1
            fake.die()
            await asyncio.sleep(luck.choice([0, 0.001, 0.01, 0.03]))
            fake.break_at = 0

        deaths: list[asyncio.Task[None]] = []
        for _ in range(60):
            act = luck.random()
            if act < 0.3:
                changes.append(asyncio.create_task(change(luck.choice("abc"))))
            elif act < 0.75:
                name = luck.choice(["", *fleet.adapters.names])
                asked.append(asyncio.create_task(answered(fleet.adapters.key(name) or "", luck.choice([1, 5, 30]))))
            elif act < 0.82 and all(death.done() for death in deaths):
                deaths.append(asyncio.create_task(die(luck.choice([*shards.values()]))))
            elif act < 0.88 and asked:
                luck.choice(asked).cancel()
            else:
                await asyncio.sleep(luck.choice([0, 0, 0.001, 0.003]))
        for each in (*deaths, *changes):
            await each
        ended = await asyncio.gather(*asked, return_exceptions=True)
        told = [str(end) for end in ended if isinstance(end, Exception)]  # who chose it just before it went; who was always there
        assert all("was unloaded" in words or "again and again" in words for words in told)
        assert all(end > 2 for end in ended if isinstance(end, int))
        await until(lambda: all(state == "ready" for state in states(fleet).values()))
        await until_idle(fleet, shards)
        keys = sorted(fleet.adapters.key(name) or "" for name in fleet.adapters.names)
        await until(lambda: [sorted(own) for own in held(shards)] == [keys] * replicas)
        assert not any(fake.read for fake in shards.values())
        assert not any(adapter.retired for fake in shards.values() for adapter in fake.info.later)
        assert all(not adapter.users for adapter in fleet.adapters._later.values())
        assert len(fleet.adapters._later) == len(keys)

    served(test, replicas, room)
