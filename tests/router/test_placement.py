"""`Placement`: which replica gets a request, by load, cached prefixes and sessions, also when replicas join and leave; and its
bounded memory."""

import random
from collections import Counter

import pytest

from penstock.router.placement import UNIT, Generations, Placement

SYSTEM_PROMPTS = [tuple(range(number, number + 64)) for number in range(0, 1000, 100)]


def make_placement(count: int, **settings: int) -> Placement:
    placement = Placement(**settings)
    for number in range(count):
        placement.join(str(number))
    return placement


class SimulatedUsers:
    """Simulated users who share system prompts. Each replica caches the last `room` of those that it has got."""

    def __init__(
        self,
        replicas: int,
        seed: int,
        *,
        systems: int = 10,
        length: int = 64,  # tokens of a system prompt
        room: int = 10,
        sessions: bool = False,
    ) -> None:
        self.chance = random.Random(seed)
        self.placement = make_placement(replicas)
        self.room = room
        self.cached: dict[str, dict[tuple[int, ...], None]] = {str(number): {} for number in range(replicas)}  # oldest first
        prompts = [tuple(self.chance.choices(range(2000), k=length)) for _ in range(systems)]
        self.users = [(self.chance.choice(prompts), str(number) if sessions else "") for number in range(100)]
        self.placed: Counter[str] = Counter()
        self.work: Counter[str] = Counter()
        self.hits = 0
        self.strays = 0  # requests of a session that were placed on another replica than the one before
        self.last: dict[str, str] = {}
        self.live: list[tuple[str, int]] = []

    def place(self, concurrency: int) -> None:
        system, session = self.chance.choice(self.users)
        prompt = (*system, *self.chance.choices(range(2000), k=self.chance.randint(4, 60)))
        work = len(prompt) + self.chance.choice((16, 64, 256))
        placed = self.placement.place(prompt, work, session=session)
        assert placed is not None
        cached = self.cached[placed.name]
        self.hits += system in cached
        if placed.hit and len(cached) < self.room:
            assert system in cached or placed.reason == "load"
        cached.pop(system, None)
        cached[system] = None
        if len(cached) > self.room:
            del cached[next(iter(cached))]
        self.strays += session != "" and self.last.get(session, placed.name) != placed.name
        self.last[session] = placed.name
        self.placed[placed.name] += 1
        self.work[placed.name] += work
        self.live.append((placed.name, work))
        if len(self.live) > concurrency:
            self.placement.release(*self.live.pop(self.chance.randrange(len(self.live))))


@pytest.mark.parametrize(("replicas", "concurrency"), [(2, 20), (3, 12), (3, 24), (8, 64)])
@pytest.mark.parametrize("seed", range(3))
def test_load_is_balanced_among_users_of_shared_prefixes(replicas: int, concurrency: int, seed: int) -> None:
    users = SimulatedUsers(replicas, seed)
    for _ in range(300 * replicas):
        users.place(concurrency)
        if len(users.live) == concurrency:
            loads = [users.placement.load(str(number)) for number in range(replicas)]
            assert max(loads) <= 1.2 * sum(loads) / replicas + 2 * 380  # two requests above the mean
    for counts in (users.placed, users.work):
        assert max(counts.values()) <= 1.2 * sum(counts.values()) / replicas
        assert min(counts.values()) >= 0.8 * sum(counts.values()) / replicas


@pytest.mark.parametrize("seed", range(3))
def test_prefixes_are_found_where_each_replica_caches_half_of_them(seed: int) -> None:
    """Placed by load alone, half of the requests would find their prefix."""
    users = SimulatedUsers(8, seed, length=1000, room=5)
    for _ in range(2400):
        users.place(64)
    assert users.hits >= 0.9 * 2400
    assert max(users.placed.values()) <= 1.2 * 300


def test_single_shared_prefix_is_spread_over_all_replicas() -> None:
    users = SimulatedUsers(4, 1, systems=1)
    for _ in range(400):
        users.place(40)
    assert max(users.placed.values()) <= 120


def test_prefixes_stay_on_their_replica_at_low_load() -> None:
    placement = make_placement(3)
    homes: dict[tuple[int, ...], set[str]] = {}
    for round in range(20):
        for prompt in SYSTEM_PROMPTS:
            placed = placement.place((*prompt, round, round), 100)
            assert placed is not None
            homes.setdefault(prompt, set()).add(placed.name)
            assert (placed.reason, placed.hit) == (("prefix", 64) if round else ("load", 0))
            placement.release(placed.name, 100)
    assert all(len(home) == 1 for home in homes.values())
    assert sorted(Counter(next(iter(home)) for home in homes.values()).values()) == [3, 3, 4]


@pytest.mark.parametrize("seed", range(3))
def test_sessions_stay_on_their_replica_while_load_is_balanced(seed: int) -> None:
    with_sessions, without_sessions = SimulatedUsers(3, seed, sessions=True), SimulatedUsers(3, seed)
    for _ in range(1500):
        with_sessions.place(24)
        without_sessions.place(24)
    assert with_sessions.strays <= 0.05 * 1500
    assert max(with_sessions.placed.values()) <= 1.2 * 500
    assert with_sessions.hits >= without_sessions.hits - 15


def test_replica_with_the_longest_cached_prefix_is_chosen_unless_overloaded() -> None:
    placement = make_placement(3)
    short, long = tuple(range(40)), tuple(range(200))
    first, second = placement.place(short, 1000), placement.place((*short, 9, 9), 1000)
    assert first is not None
    assert second is not None
    assert (second.reason, second.name != first.name) == ("load", True)  # the first is overloaded, though it has the prefix
    placement.release(first.name, 1000)
    placement.release(second.name, 1000)
    third = placement.place(long, 10)
    assert third is not None
    assert third.hit == 32
    again = placement.place((*long, 1), 10)
    assert again is not None
    assert (again.name, again.reason, again.hit) == (third.name, "prefix", 192)


def test_prefix_hits_exclude_the_last_token_and_other_cache_keys() -> None:
    placement = make_placement(1)
    prompt = tuple(range(4 * UNIT))
    placement.place(prompt, 1, key="a")
    same, other = placement.place(prompt, 1, key="a"), placement.place(prompt, 1, key="b")
    assert same is not None
    assert other is not None
    assert (same.hit, other.hit) == (3 * UNIT, 0)


def test_replica_that_left_is_not_chosen_and_has_no_prefixes_after_rejoining() -> None:
    placement = make_placement(2)
    prompt = tuple(range(100))
    home = placement.place(prompt, 10, session="s")
    assert home is not None
    placement.leave(home.name)
    assert home.name not in placement
    placement.release(home.name, 10)  # too late, without effect
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


def test_late_joining_replica_gets_an_equal_share_of_requests() -> None:
    users = SimulatedUsers(2, 5)
    for _ in range(500):
        users.place(24)
    users.placement.join("2")
    users.cached["2"] = {}
    users.placed.clear()
    for _ in range(600):
        users.place(24)
    assert 0.8 * 200 <= users.placed["2"] <= 1.2 * 200


def test_prefix_and_session_memory_is_bounded_and_recently_used_entries_are_kept() -> None:
    chance = random.Random(3)
    placement = make_placement(4, prefixes=500, sessions=100)
    repeated = tuple(range(64))
    for number in range(5000):
        prompt = tuple(chance.choices(range(2000), k=100))
        placed = placement.place(prompt, 10, session=str(number))
        assert placed is not None
        placement.release(placed.name, 10)
        assert placement.remembered <= 2 * 500 + 2 * 100
        if number % 50 == 0:
            found = placement.place((*repeated, number), 10)
            assert found is not None
            assert found.hit == (64 if number else 0)
            placement.release(found.name, 10)
    old = placement.place(prompt, 10, session="0")
    assert old is not None
    assert old.reason == "prefix"  # the session was evicted, the most recent prompt was not


def test_unused_bit_expires_while_another_bit_of_its_key_is_used() -> None:
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


def test_loads_are_zero_after_all_requests_are_released() -> None:
    users = SimulatedUsers(3, 9)
    for _ in range(2000):
        users.place(users.chance.randint(1, 30))
    for live in users.live:
        users.placement.release(*live)
    assert [users.placement.load(str(number)) for number in range(3)] == [0, 0, 0]
    assert users.placement._total == 0
