"""Steps that are begun before the last one's tokens are known: nobody can tell, but for the time that it takes."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from penstock.shard.decoding.hypotheses import Search
from penstock.shard.engine import Engine
from penstock.shard.flight import Flight
from penstock.shard.parallel import Ranks
from penstock.shard.prefix import Prefixes
from penstock.shard.sequence import Group, Sampling
from penstock.tests.shard import tiny
from penstock.tests.shard.driver import Driver, Flying, Habits, World, drive, message
from penstock.tests.shard.paper import POISON, Paper
from penstock.tests.shard.paper import paper as paper  # a fixture
from penstock.tests.shard.test_grammar import groups as bound
from penstock.tests.shard.test_grammar import with_masks
from penstock.tests.shard.test_oracle import COUNT, at_rest, prompt
from penstock.tests.shard.test_sharing import crowd, mixed, room

SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=77)


def fly(engine: Engine, groups: Sequence[Group], habits: Habits, seed: int = 0) -> tuple[World, int]:
    """What `drive` returns, and how many steps were begun before the last one had landed."""
    flying = Flying(engine, random.Random(seed))
    world = Driver(flying, [message(group) for group in groups], habits, seed).run()
    return world, flying.ahead


def check(paper: type[Paper], seeds: range) -> int:
    """Runs crowds that end early at times, in little room; how many steps were begun ahead."""
    ahead = 0
    for seed in seeds:
        chance = random.Random(seed)
        size = chance.choice([1, 2, 3, 4])
        groups = crowd(seed)
        expected = drive(paper(5000, size, prefix_caching=False), crowd(seed), Habits(), seed).tokens
        engine = paper(room(groups, size) + chance.randint(2, 14), size, chance.random() < 0.8, ahead=True)
        habits = Habits(chance.choice([1, 3, 8, 1 << 20]), pause=0.05, pauses=seed % 2, join=0.1)
        world, count = fly(engine, groups, habits, seed)
        assert world.failed == {}
        assert world.tokens == expected
        assert engine.pool.free == engine.pool.pages
        ahead += count
    return ahead


def test_answers_and_pages_are_the_same_in_flight(paper: type[Paper]) -> None:
    assert check(paper, range(60)) > 1000


def test_cancelled_and_failed_ones_leave_nothing(paper: type[Paper]) -> None:
    for seed in range(30):
        groups = crowd(seed)
        poisoned = [tiny.group(100 + i, (1, 2, POISON, i), 6) for i in range(3)]
        engine = paper(room(groups, 3) + 9, 3, ahead=True)
        habits = Habits(5, pause=0.05, cancel=0.1, end=0.1)
        world, _ = fly(engine, groups + poisoned, habits, seed)
        assert set(world.failed) <= {100, 101, 102}
        assert set(world.failed) | world.cancelled >= {100, 101, 102}
        assert engine.pool.free == engine.pool.pages


def too_long(right: Any) -> Any:
    def follow(self: Flight, group: Group) -> Any:
        most, group.max_new_tokens = group.max_new_tokens, 1 << 20
        try:
            return right(self, group)
        finally:
            group.max_new_tokens = most

    return follow


def unknown(right: Any) -> Any:
    def publish(self: Prefixes, holder: Any, swap: bool) -> None:
        holder.tokens.append(0)  # as if the token that nobody knows were this one
        right(self, holder, swap)
        holder.tokens.pop()

    return publish


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (Flight, "follow", too_long),
        (Prefixes, "_publish", unknown),
        (Flight, "simple", lambda right: lambda self, alone: True),
    ],
)
def test_the_check_finds_faults(paper: type[Paper], monkeypatch: pytest.MonkeyPatch, place: Any, name: str, fault: Any) -> None:
    monkeypatch.setattr(place, name, fault(getattr(place, name)))
    with pytest.raises((AssertionError, ValueError, IndexError, KeyError)):
        check(paper, range(60))


def everything() -> list[Group]:
    """Requests of every kind; a few of them keep a step from being left under way."""
    groups = mixed(12)
    kinds: list[dict[str, Any]] = [
        {"sampling": replace(SEEDED, repetition_penalty=1.3, frequency_penalty=0.4)},
        {"sampling": Sampling(bias=((3, 2.0), (5, -1.0))), "top_n": 3},
        {"sampling": replace(SEEDED, final_logprobs=True), "top_n": 2},
        *({"sampling": replace(SEEDED, seed=seed), "choices": 4, "end_ids": tuple(range(0, 64, 9))} for seed in range(4)),
        {"end_ids": tuple(range(0, 64, 3)), "min_new_tokens": 4},
    ]
    for uid, kind in enumerate(kinds, len(groups)):
        sampling = kind.pop("sampling", Sampling())
        groups.append(tiny.group(uid, prompt(uid, 9 + uid), COUNT, sampling, **kind))
    return groups


def check_tokens(page_size: int, chunk: int) -> None:
    expected = drive(tiny.engine("llama", 16, 2000, prefix_caching=False), everything(), Habits())
    engine = tiny.engine("llama", page_size, room(everything(), page_size) + 40 // page_size, ahead=True)
    world, ahead = fly(engine, everything(), Habits(chunk, pauses=1), seed=page_size)
    ends = [{len(expected.tokens[uid, choice]) for choice in range(4)} for uid in range(15, 19)]
    assert any(len(lengths) > 1 for lengths in ends), "choices end at different times"
    assert world.tokens == expected.tokens
    assert world.finishes == expected.finishes
    for key, logprobs in expected.logprobs.items():
        assert world.logprobs[key] == pytest.approx(logprobs, abs=1e-4)
    assert ahead > 20
    assert at_rest(engine)


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 20), (4, 7), (16, 1 << 20)])
def test_tokens_are_the_same_in_flight(page_size: int, chunk: int) -> None:
    check_tokens(page_size, chunk)


def test_rows_of_what_has_ended_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "_remaining", lambda self, runs, hidden: (runs, hidden))
    with pytest.raises((AssertionError, ValueError, KeyError, RuntimeError)):
        check_tokens(4, 7)


def test_beams_and_drafts_beside_others_in_flight() -> None:
    def groups() -> list[Group]:
        beams = tiny.group(50, prompt(50, 11), COUNT, search=Search(3, 2))
        drafts = [tiny.group(60 + i, prompt(1, 5) * 4, COUNT, replace(SEEDED, seed=i), drafts=3) for i in range(2)]
        return [*mixed(5), beams, *drafts]

    expected = drive(tiny.engine("llama", 16, 2000), groups(), Habits())
    engine = tiny.engine("llama", 4, 2000, ahead=True)
    world, ahead = fly(engine, groups(), Habits(9), seed=2)
    assert world.tokens == expected.tokens
    assert world.scores.keys() == expected.scores.keys()
    assert ahead
    assert at_rest(engine)


def test_grammars_in_flight() -> None:
    """Their masks are found after the forward has begun; what completes one, or leads nowhere, ends as ever."""
    expected = drive(with_masks(tiny.engine("demo")), bound(), Habits())
    engine = with_masks(tiny.engine("demo", 4, 400, ahead=True))
    world, ahead = fly(engine, bound(), Habits(chunk=2, pauses=1), seed=3)
    assert (world.tokens, world.finishes, world.failed) == (expected.tokens, expected.finishes, expected.failed)
    assert ahead > 5
    assert at_rest(engine)


@pytest.mark.parametrize("masks", [False, True])
def test_two_ranks_agree_in_flight(masks: bool) -> None:
    name, groups = ("demo", bound) if masks else ("qwen2", lambda: mixed(8))
    alone = tiny.engine(name, 16, 2000, prefix_caching=False)
    expected = drive(with_masks(alone) if masks else alone, groups(), Habits()).tokens

    def work(ranks: Ranks) -> tuple[World, int]:
        engine = tiny.engine_of(name, ranks, 4, room(groups(), 4) + 9, ahead=True)
        if masks and not ranks.rank:
            with_masks(engine)
        return fly(engine, groups(), Habits(9, pauses=1), seed=5)

    (first, ahead), (second, _) = tiny.Pair().run(work)
    assert first.tokens == second.tokens == expected
    assert ahead > 3
