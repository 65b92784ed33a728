"""Which replica gets a request: balance, cached prefixes, sessions, memory; and what becomes of those that come and go."""

import random
from collections import Counter

import pytest

from penstock.router.placement import UNIT, Generations, Placement

TEN = [tuple(range(number, number + 64)) for number in range(0, 1000, 100)]  # system prompts


def fleet(count: int, **settings: int) -> Placement:
    placement = Placement(**settings)
    for number in range(count):
        placement.join(str(number))
    return placement


class World:
    """Users of shared system prompts, so many of whose requests are under way at once; each replica caches all that it has seen."""

    def __init__(self, replicas: int, seed: int, *, systems: int = 10, users: int = 100, sessions: bool = False) -> None:
        self.chance = random.Random(seed)
        self.placement = fleet(replicas)
        self.seen: dict[str, set[tuple[int, ...]]] = {str(number): set() for number in range(replicas)}
        own = [tuple(self.chance.choices(range(2000), k=64)) for _ in range(systems)]
        self.users = [(self.chance.choice(own), str(number) if sessions else "") for number in range(users)]
        self.given: Counter[str] = Counter()
        self.work: Counter[str] = Counter()
        self.hits = 0
        self.strays = 0  # requests of a session that went elsewhere than the one before
        self.last: dict[str, str] = {}
        self.live: list[tuple[str, int]] = []

    def ask(self, together: int) -> None:
        system, session = self.chance.choice(self.users)
        prompt = (*system, *self.chance.choices(range(2000), k=self.chance.randint(4, 60)))
        work = len(prompt) + self.chance.choice((16, 64, 256))
        placed = self.placement.place(prompt, work, session=session)
        assert placed is not None
        self.hits += system in self.seen[placed.name]
        if placed.hit:
            assert system in self.seen[placed.name] or placed.reason == "load"
        self.seen[placed.name].add(system)
        self.strays += session != "" and self.last.get(session, placed.name) != placed.name
        self.last[session] = placed.name
        self.given[placed.name] += 1
        self.work[placed.name] += work
        self.live.append((placed.name, work))
        if len(self.live) > together:
            self.placement.release(*self.live.pop(self.chance.randrange(len(self.live))))


@pytest.mark.parametrize(("replicas", "together"), [(2, 20), (3, 12), (3, 24), (8, 64)])
@pytest.mark.parametrize("seed", range(3))
def test_shared_prefixes_are_hit_and_load_is_even(replicas: int, together: int, seed: int) -> None:
    world = World(replicas, seed)
    for _ in range(300 * replicas):
        world.ask(together)
        if len(world.live) == together:
            loads = [world.placement.load(str(number)) for number in range(replicas)]
            assert max(loads) <= 1.2 * sum(loads) / replicas + 2 * 380  # two requests more than even
    assert world.hits / sum(world.given.values()) >= 0.9
    for counts in (world.given, world.work):
        assert max(counts.values()) <= 1.2 * sum(counts.values()) / replicas
        assert min(counts.values()) >= 0.8 * sum(counts.values()) / replicas


def test_one_popular_prefix_makes_no_bottleneck() -> None:
    world = World(4, 1, systems=1)
    for _ in range(400):
        world.ask(40)
    assert max(world.given.values()) <= 120


def test_while_there_is_little_to_do_a_prefix_stays_where_it_is() -> None:
    placement = fleet(3)
    homes: dict[tuple[int, ...], set[str]] = {}
    for round in range(20):
        for prompt in TEN:
            placed = placement.place((*prompt, round, round), 100)
            assert placed is not None
            homes.setdefault(prompt, set()).add(placed.name)
            assert (placed.reason, placed.hit) == (("prefix", 64) if round else ("load", 0))
            placement.release(placed.name, 100)
    assert all(len(home) == 1 for home in homes.values())
    assert sorted(Counter(next(iter(home)) for home in homes.values()).values()) == [3, 3, 4]


@pytest.mark.parametrize("seed", range(3))
def test_sessions_stay_where_they_are(seed: int) -> None:
    sticky, loose = World(3, seed, sessions=True), World(3, seed)
    for _ in range(1500):
        sticky.ask(24)
        loose.ask(24)
    assert sticky.strays <= 0.05 * 1500
    assert max(sticky.given.values()) <= 1.2 * 500
    assert sticky.hits >= loose.hits - 15


def test_the_longest_prefix_wins_and_an_overloaded_replica_does_not() -> None:
    placement = fleet(3)
    short, long = tuple(range(40)), tuple(range(200))
    first, second = placement.place(short, 1000), placement.place((*short, 9, 9), 1000)
    assert first is not None
    assert second is not None
    assert (second.reason, second.name != first.name) == ("load", True)  # it is full, though it knows the beginning
    placement.release(first.name, 1000)
    placement.release(second.name, 1000)
    third = placement.place(long, 10)
    assert third is not None
    assert third.hit == 32
    again = placement.place((*long, 1), 10)
    assert again is not None
    assert (again.name, again.reason, again.hit) == (third.name, "prefix", 192)


def test_the_last_token_of_a_prompt_is_no_hit_and_other_keys_find_nothing() -> None:
    placement = fleet(1)
    prompt = tuple(range(4 * UNIT))
    placement.place(prompt, 1, key="a")
    same, other = placement.place(prompt, 1, key="a"), placement.place(prompt, 1, key="b")
    assert same is not None
    assert other is not None
    assert (same.hit, other.hit) == (3 * UNIT, 0)


def test_a_replica_that_left_is_chosen_no_more_and_knows_nothing_when_it_comes_back() -> None:
    placement = fleet(2)
    prompt = tuple(range(100))
    home = placement.place(prompt, 10, session="s")
    assert home is not None
    placement.leave(home.name)
    assert home.name not in placement
    placement.release(home.name, 10)  # too late: nothing happens
    placement.leave(home.name)
    elsewhere = placement.place(prompt, 10, session="s")
    assert elsewhere is not None
    assert (elsewhere.name != home.name, elsewhere.reason) == (True, "load")
    placement.join(home.name, 5)
    assert placement.load(home.name) == 5
    for _ in range(3):
        assert (placed := placement.place(prompt, 1)) is not None
        assert placed.name == elsewhere.name
    assert placement.place(prompt, 1, fits=lambda name: name == home.name) is not None
    assert placement.place(prompt, 1, fits=lambda name: False) is None
    placement.leave(home.name)
    placement.leave(elsewhere.name)
    assert placement.place(prompt, 1) is None


def test_a_replica_that_joins_late_gets_its_share_and_no_more() -> None:
    world = World(2, 5)
    for _ in range(500):
        world.ask(24)
    world.placement.join("2")
    world.seen["2"] = set()
    world.given.clear()
    for _ in range(600):
        world.ask(24)
    assert 0.8 * 200 <= world.given["2"] <= 1.2 * 200


def test_memory_is_bounded_and_what_is_used_is_kept() -> None:
    chance = random.Random(3)
    placement = fleet(4, prefixes=500, sessions=100)
    kept = tuple(range(64))
    for number in range(5000):
        prompt = tuple(chance.choices(range(2000), k=100))
        placed = placement.place(prompt, 10, session=str(number))
        assert placed is not None
        placement.release(placed.name, 10)
        assert placement.remembered <= 2 * 500 + 2 * 100
        if number % 50 == 0:
            found = placement.place((*kept, number), 10)
            assert found is not None
            assert found.hit == (64 if number else 0)
            placement.release(found.name, 10)
    old = placement.place(prompt, 10, session="0")
    assert old is not None
    assert old.reason == "prefix"  # the session is forgotten, the prompt of a moment ago is not


def test_a_bit_is_forgotten_by_itself_while_another_of_its_key_is_used() -> None:
    generations = Generations(10)
    generations.add(0, 1)
    for round in range(10):
        generations.add(0, 2)
        for key in range(9):
            generations.add(100 + 9 * round + key, 1)
    assert generations.get(0) == 2
    generations.clear(2)
    assert generations.get(0) == 0
    assert len(generations) < 20


def test_loads_never_drift() -> None:
    world = World(3, 9)
    for _ in range(2000):
        world.ask(world.chance.randint(1, 30))
    for live in world.live:
        world.placement.release(*live)
    assert [world.placement.load(str(number)) for number in range(3)] == [0, 0, 0]
    assert world.placement._total == 0
