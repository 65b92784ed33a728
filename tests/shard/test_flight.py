"""Steps that are begun before the last one's tokens are known: nobody can tell, but for the time that it takes."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.shard import logits
from penstock.shard.decoding.budget import Allowance, LinearCost
from penstock.shard.decoding.expansion import Candidate
from penstock.shard.decoding.hypotheses import Search, Stop, candidates_of
from penstock.shard.decoding.sampler import PendingPicks, Pick, Row
from penstock.shard.engine import Engine
from penstock.shard.flight import StepInFlight
from penstock.shard.forks import BeamForks
from penstock.shard.out_of_memory import ALONE
from penstock.shard.parallel import Ranks
from penstock.shard.prefix import PrefixCache
from penstock.shard.sequence import Group, Sampling
from penstock.shard.step import BeamFront, DeviceSamples, Span
from penstock.tests.shard import paper as paper_module
from penstock.tests.shard import tiny
from penstock.tests.shard.driver import Driver, Flying, Habits, World, drive, message
from penstock.tests.shard.paper import POISON, Paper
from penstock.tests.shard.paper import paper as paper  # a fixture
from penstock.tests.shard.test_against_transformers import ANSWER_LENGTH, all_pages_free, prompt
from penstock.tests.shard.test_beams import NAME, check_beside, most_pages, some, watch
from penstock.tests.shard.test_beams import check as check_beams
from penstock.tests.shard.test_beams import mixed as among_others
from penstock.tests.shard.test_grammar import groups as bound
from penstock.tests.shard.test_grammar import with_masks
from penstock.tests.shard.test_out_of_memory import SIZE, Scarce, requests
from penstock.tests.shard.test_out_of_memory import crowd as many
from penstock.tests.shard.test_sharing import crowd, mixed, room

SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=77)


def fly(engine: Engine, groups: Sequence[Group], habits: Habits, seed: int = 0) -> tuple[World, int]:
    """What `drive` returns, and how many steps were begun before the last one had landed."""
    flying = Flying(engine, random.Random(seed))
    world = Driver(flying, [message(group) for group in groups], habits, seed).run()
    return world, flying.ahead


def room_of(groups: Sequence[Group], page_size: int) -> int:
    """Pages for the largest group alone."""
    return max(room([group for group in groups if not group.search], page_size), most_pages(groups, page_size))


def check(paper: type[Paper], seeds: range, crowd: Callable[[int], list[Group]] = crowd) -> int:
    """Runs crowds that end early at times, in little room; how many steps were begun ahead."""
    ahead = 0
    for seed in seeds:
        chance = random.Random(seed)
        size = chance.choice([1, 2, 3, 4])
        groups = crowd(seed)
        expected = drive(paper(5000, size, prefix_caching=False), crowd(seed), Habits(), seed)
        engine = paper(room_of(groups, size) + chance.randint(2, 14), size, chance.random() < 0.8, ahead=True)
        habits = Habits(chance.choice([1, 3, 8, 1 << 20]), pause=0.05, pauses=seed % 2, join=0.1)
        world, count = fly(engine, groups, habits, seed)
        assert world.failed == {}
        assert world.tokens == expected.tokens
        assert world.scores == {uid: pytest.approx(scores, rel=1e-5) for uid, scores in expected.scores.items()}
        assert engine.pool.free == engine.pool.pages
        ahead += count
    return ahead


def test_answers_and_pages_are_the_same_in_flight(paper: type[Paper]) -> None:
    assert check(paper, range(60)) > 1000


def with_beams(seed: int) -> list[Group]:
    """A crowd of which some search."""
    chance = random.Random(seed)
    groups = crowd(seed)
    for uid in chance.sample(range(len(groups)), 8):
        [first], most = groups[uid].sequences, chance.randint(1, 20)
        search = Search(chance.randint(2, 4), 1, chance.choice([1.0, 0.0, 2.0]), chance.choice(list(Stop)))
        ends = chance.choice([(), (3,)])
        groups[uid] = tiny.group(uid, first.tokens, most, end_ids=ends, search=search, cache_key=first.cache_key)
    return groups


def test_beams_part_in_flight(paper: type[Paper]) -> None:
    heirs = 0
    right = paper.land

    def land(self: Paper) -> None:
        nonlocal heirs
        heirs += sum(len(group.heirs) for group in self.books.groups.values())
        right(self)

    paper.land = land
    assert check(paper, range(60), with_beams) > 1000
    assert heirs > 1000


@pytest.mark.parametrize("crowd", [crowd, with_beams])
def test_cancelled_and_failed_ones_leave_nothing(paper: type[Paper], crowd: Callable[[int], list[Group]]) -> None:
    for seed in range(30):
        groups = crowd(seed)
        poisoned = [tiny.group(100 + i, (1, 2, POISON, i), 6, search=Search(2, 1) if i else None) for i in range(3)]
        engine = paper(room_of(groups, 3) + 9, 3, ahead=True)
        habits = Habits(5, pause=0.05, cancel=0.1, end=0.1)
        world, _ = fly(engine, groups + poisoned, habits, seed)
        assert set(world.failed) <= {100, 101, 102}
        assert set(world.failed) | world.cancelled >= {100, 101, 102}
        assert engine.pool.free == engine.pool.pages


def too_long(right: Any) -> Any:
    def follow(self: StepInFlight, group: Group, page_size: int) -> Any:
        most, group.max_new_tokens = group.max_new_tokens, 1 << 20
        try:
            return right(self, group, page_size)
        finally:
            group.max_new_tokens = most

    return follow


def unknown(right: Any) -> Any:
    def publish(self: PrefixCache, holder: Any, swap: bool) -> None:
        holder.tokens.append(0)  # as if the token that nobody knows were this one
        right(self, holder, swap)
        holder.tokens.pop()

    return publish


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (StepInFlight, "follow", too_long),
        (PrefixCache, "_publish", unknown),
        (StepInFlight, "simple", lambda right: lambda self, alone: True),
    ],
)
def test_the_check_finds_faults(paper: type[Paper], monkeypatch: pytest.MonkeyPatch, place: Any, name: str, fault: Any) -> None:
    monkeypatch.setattr(place, name, fault(getattr(place, name)))
    with pytest.raises((AssertionError, ValueError, IndexError, KeyError)):
        check(paper, range(60))


def another(right: Any) -> Any:
    return lambda self, heir, parent: right(self, heir, (parent + 1) % len(self.beams))


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (BeamForks, "bequeath", lambda right: lambda self, spans, picked: None),
        (BeamFront, "pages_of", another),
        (Group, "standing", lambda right: lambda self, page_size: (*right(self, page_size)[:1], 0, self.lacking)),
    ],
)
def test_the_check_finds_faults_of_beams(
    paper: type[Paper], monkeypatch: pytest.MonkeyPatch, place: Any, name: str, fault: Any
) -> None:
    monkeypatch.setattr(place, name, fault(getattr(place, name)))
    with pytest.raises((AssertionError, ValueError, IndexError, KeyError)):
        check(paper, range(60), with_beams)


@pytest.mark.parametrize(
    ("part", "page_size", "chunk", "prefix_caching"), [(0, 16, 7, True), (1, 4, 1 << 20, False), (2, 1, 7, True)]
)
def test_beams_are_those_of_transformers_in_flight(part: int, page_size: int, chunk: int, prefix_caching: bool) -> None:
    asked = some(part)
    groups, beside = among_others(asked)
    engine = tiny.engine(NAME, page_size, most_pages(groups, page_size) + 8 // page_size, prefix_caching, ahead=True)
    world, ahead = fly(engine, groups, Habits(chunk, pause=0.02), seed=part)
    check_beams(world, asked)
    check_beside(world, beside[0].uid)
    assert ahead > 100
    assert all_pages_free(engine)


def apart(group: Group) -> list[Pick | None]:
    """Candidates of beams that never meet: each goes on."""
    assert group.search is not None
    rows = range(len(group.sequences))
    best = [Candidate(token, -1.0, (), False, row, -float(token)) for token in range(group.search.width) for row in rows]
    return [*best[: candidates_of(group.search.width, 0)]]


def test_beams_that_are_fewer_than_their_heirs_leave_no_page() -> None:
    """As where filters leave each one token: then one goes on, and for two there was room."""
    engine = tiny.engine(NAME, 4, ahead=True)
    group = tiny.group(1, prompt(1, 10), ANSWER_LENGTH, Sampling(temperature=1.0, top_k=1), search=Search(2, 1))
    world, ahead = fly(engine, [group], Habits())
    assert world.failed == {}
    assert ahead > 0
    assert all_pages_free(engine)


def test_pages_of_beams_in_flight_stay_within_their_bound(paper: type[Paper], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_module, "candidates", apart)
    full = 0
    for seed in range(200):
        chance = random.Random(seed)
        size, width = chance.choice([3, 4, 5]), chance.randint(2, 4)
        length = size * chance.randint(1, 3) - chance.choice(
            [0, 1, 1, 2]
        )  # it would be broken where the last page is partly full ...
        count = size * chance.randint(1, 3) + chance.choice([-1, 0, 0])  # ... and the answer takes whole pages
        engine = paper(200, size, prefix_caching=False, ahead=True)
        peak, _ = watch(engine)
        tokens = [chance.randrange(3) for _ in range(length)]
        fly(engine, [tiny.group(0, tokens, count, search=Search(width, 1, 0.0))], Habits(cancel=0.1 * (seed % 2)), seed)
        bound = -(-length // size) + width * (1 + -(-count // size))
        assert max(peak) <= bound
        full += max(peak) == bound
        assert engine.pool.free == engine.pool.pages
    assert full, "somebody comes to it"


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
        groups.append(tiny.group(uid, prompt(uid, 9 + uid), ANSWER_LENGTH, sampling, **kind))
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
    assert all_pages_free(engine)


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 20), (4, 7), (16, 1 << 20)])
def test_tokens_are_the_same_in_flight(page_size: int, chunk: int) -> None:
    check_tokens(page_size, chunk)


def test_rows_of_what_has_ended_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "_remaining", lambda self, runs, hidden: (runs, hidden))
    with pytest.raises((AssertionError, ValueError, KeyError, RuntimeError)):
        check_tokens(4, 7)


@pytest.mark.parametrize("choices", [1, 3])
def test_logits_that_are_no_numbers_fail_their_group_alone(monkeypatch: pytest.MonkeyPatch, choices: int) -> None:
    """Its next token, of which there is none, is under way by then."""
    right = logits.begin

    def begin(found: Tensor, rows: Sequence[Row], mask: Tensor | None = None) -> PendingPicks:
        bad = [row.sampling.seed == 999 and len(row.tokens) - row.prompt_length >= 3 for row in rows]
        return right(found.masked_fill(torch.tensor(bad).unsqueeze(1), torch.nan), rows, mask)

    def groups() -> list[Group]:
        made = [tiny.group(uid, prompt(uid, 5 + uid), 12, replace(SEEDED, seed=uid)) for uid in range(9)]
        return [*made, tiny.group(9, prompt(9, 4), 12, replace(SEEDED, seed=999), choices=choices)]

    monkeypatch.setattr(logits, "begin", begin)
    expected = drive(tiny.engine("llama", 4, 600), groups(), Habits())
    for seed, chunk in enumerate((3, 7, 99)):
        engine = tiny.engine("llama", 4, 600, ahead=True)
        world, ahead = fly(engine, groups(), Habits(chunk), seed)
        assert world.failed.keys() == {9}
        assert {key: own for key, own in world.tokens.items() if key[0] < 9} == {
            key: own for key, own in expected.tokens.items() if key[0] < 9
        }
        assert ahead > 5
        assert all_pages_free(engine)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most", [1, 5, 23])
def test_memory_that_runs_out_in_flight_changes_no_token(seed: int, most: int) -> None:
    def groups() -> list[Group]:
        return [group for group in requests(20, seed) if not group.drafts]

    expected = drive(tiny.engine("llama", SIZE, 600), groups(), Habits())
    engine = Scarce(most, ahead=True)
    world, ahead = fly(engine, groups(), Habits((7, 40, 999)[seed % 3], pause=0.05), seed)
    assert world.failed == {}
    assert world.tokens == expected.tokens
    assert engine.memory_fallback._count > 0
    assert ahead
    assert all_pages_free(engine)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_too_large_alone_fails_alone_in_flight(seed: int) -> None:
    engine = Scarce(tokens=40, reach=(45, 50, 54, 58)[seed % 4], ahead=True)
    expected = drive(tiny.engine("llama", SIZE, 600), many(), Habits()).answers
    world, _ = fly(engine, many(), Habits(chunk=(3, 13, 40, 999)[seed % 4], arrivals=16), seed)
    assert world.failed == dict.fromkeys(range(8), ALONE)
    assert {uid: world.answers[uid] for uid in range(8, 16)} == {uid: expected[uid] for uid in range(8, 16)}
    assert all_pages_free(engine)


def test_who_can_not_go_on_is_told_at_once(paper: type[Paper]) -> None:
    """Nothing is planned on top of its step: what that would compute for it, and make known, has no beginning."""
    engine = paper(6, 4, ahead=True)
    assert not engine.begin_prefill(1, [tiny.group(1, [5] * 8, 20)], [(1, 8)], 8, []).done()
    lost = engine.begin_prefill(2, [tiny.group(2, [2 + i % 7 for i in range(28)], 9)], [(2, 28)], 28, [1])
    assert lost.done()
    assert [uid for uid, _ in lost.result().failed] == [2]
    assert not engine.begin_decode([1]).done()


def test_a_page_that_is_lost_under_way_is_not_made_known_by_the_step_before(paper: type[Paper]) -> None:
    """A group wants to hear of all of its prompt, which a neighbour's answer repeats: that one would take the lost page."""
    engine = paper(100, 2, ahead=True)
    alone = paper(100, 2)
    said = [alone.prefill(1, [tiny.group(1, (1, 2), 10)], [(1, 100)], 100, [1])] + [alone.decode([1]) for _ in range(9)]
    answer = [emitted.pick.token for outcome in said for _, emitted in outcome.emitted]
    right = engine.forward

    def forward(spans: Sequence[Span], picked: DeviceSamples | None = None) -> Tensor:
        if any(span.sequence.prompt_length == 8 and span.start + len(span.tokens) > 2 for span in spans):
            raise MemoryError
        return right(spans, picked)

    engine.forward = forward
    steps = [engine.begin_prefill(1, [tiny.group(1, (1, 2), 10)], [(1, 100)], 100, [1]), engine.begin_decode([1])]
    other = tiny.group(2, (1, 2, *answer[:6]), 4, prompt_logprobs=True)
    steps += [engine.begin_prefill(1, [other], [(2, 2)], 2, [1]), engine.begin_prefill(1, [], [(2, 4)], 4, [1])]
    while engine.books.groups:
        steps.append(engine.begin_decode([1]))
    engine.land()
    outcomes = [step.result(0) for step in steps]
    assert [emitted.pick.token for outcome in outcomes for uid, emitted in outcome.emitted if uid == 1] == answer
    assert [failed for outcome in outcomes for failed in outcome.failed] == [(2, ALONE)]


def test_beams_whose_heirs_are_too_large_alone_fail_alone(paper: type[Paper]) -> None:
    engine = paper(300, 3, ahead=True)
    right = engine.forward

    def forward(spans: Sequence[Span], picked: DeviceSamples | None = None) -> Tensor:
        if any(span.front and span.sequence.prompt_length == 7 and span.start > 10 for span in spans):
            raise MemoryError
        return right(spans, picked)

    engine.forward = forward

    def groups() -> list[Group]:
        return [tiny.group(uid, [1] * (6 + uid), 12, search=Search(3, 1, 0.0)) for uid in range(3)]

    expected = drive(paper(300, 3), groups(), Habits())
    world, _ = fly(engine, groups(), Habits(), seed=1)
    assert world.failed == {1: ALONE}
    assert {key: tokens for key, tokens in world.tokens.items() if key[0] != 1} == {
        key: tokens for key, tokens in expected.tokens.items() if key[0] != 1
    }
    assert engine.pool.free == engine.pool.pages


def test_a_group_that_takes_anothers_name_is_not_taken_for_it(paper: type[Paper]) -> None:
    engine = paper(100, 2, ahead=True)
    steps = [engine.begin_prefill(1, [tiny.group(1, (1, 2, 3), 8)], [(1, 100)], 100, [1]), engine.begin_decode([1])]
    twins = [tiny.group(1, (3, 2, 1, 2, 2), 8) for _ in range(2)]
    steps += [engine.begin_prefill(1, twins, [(1, 100)], 100, [1]), engine.begin_decode([1])]
    engine.land()
    assert [uid for step in steps for uid, _ in step.result(0).failed] == [1]


def test_nobodys_tokens_wait_for_a_grammar_of_others(paper: type[Paper]) -> None:
    engine, landed = paper(100, 2, ahead=True), []

    class Compiling:
        def ready(self, groups: list[Group], wait: bool) -> list[bool]:
            landed.append(last.done())
            return [wait] * len(groups)

        def begin(self, runs: object) -> None:
            return None

    engine._masks = Compiling()  # type: ignore[assignment]
    engine.begin_prefill(1, [tiny.group(1, (1, 2, 3), 2)], [(1, 100)], 100, [1])
    last = engine.begin_decode([1])
    engine.begin_prefill(1, [tiny.group(2, (3, 2, 1), 2, grammar="x")], [(2, 100)], 100, [1])
    assert landed == [True]
    engine.land()


def test_the_seconds_of_steps_are_no_more_than_there_were(paper: type[Paper]) -> None:
    """What a step takes does not count what the device still had to do for the one before."""
    engine = paper(100, 2, ahead=True)
    right = engine.forward

    def slow(spans: Sequence[Span], picked: DeviceSamples | None = None) -> Tensor:
        time.sleep(0.002)
        return right(spans, picked)

    engine.forward = slow
    began = time.perf_counter()
    steps = [engine.begin_prefill(1, [tiny.group(1, (1, 2, 3), 20)], [(1, 100)], 100, [1])]
    while engine.books.groups:
        steps.append(engine.begin_decode([1]))
        if engine.underway and len(steps) % 2:
            engine.underway()  # as the thread does that watches the device
    engine.land()
    outcomes = [step.result(0) for step in steps]
    assert sum(outcome.ahead for outcome in outcomes) > 15
    assert all(outcome.seconds >= 0 for outcome in outcomes)
    assert sum(outcome.seconds for outcome in outcomes) <= time.perf_counter() - began


def test_beams_and_drafts_beside_others_in_flight() -> None:
    def groups() -> list[Group]:
        beams = tiny.group(50, prompt(50, 11), ANSWER_LENGTH, search=Search(3, 2))
        drafts = [tiny.group(60 + i, prompt(1, 5) * 4, ANSWER_LENGTH, replace(SEEDED, seed=i), drafts=3) for i in range(2)]
        return [*mixed(5), beams, *drafts]

    expected = drive(tiny.engine("llama", 16, 2000), groups(), Habits())
    engine = tiny.engine("llama", 4, 2000, ahead=True)
    world, ahead = fly(engine, groups(), Habits(9), seed=2)
    assert world.tokens == expected.tokens
    assert world.scores.keys() == expected.scores.keys()
    assert ahead
    assert all_pages_free(engine)


def test_steps_overlap_while_drafts_are_not_allowed() -> None:
    """As under load, where they don't pay; when they do again, they follow from the tokens that are there."""
    cost = LinearCost(1.0, 0.0)

    def groups() -> list[Group]:
        return [tiny.group(uid, prompt(1, 5) * 4, 30, drafts=3) for uid in range(3)]

    expected = drive(tiny.engine("llama", 16, 2000), groups(), Habits()).tokens
    engine = tiny.engine("llama", 16, 2000, ahead=True)
    steps = [engine.begin_prefill(1, groups(), [(uid, 99) for uid in range(3)], 999, [])]
    underway = []
    while engine.books.groups:
        most = 0 if len(steps) % 8 < 5 else 9
        steps.append(engine.begin_decode([1], Allowance(cost, most)))
        underway.append((most, engine.underway is not None))
    engine.land()
    outcomes = [step.result(0) for step in steps]
    found: dict[tuple[int, int], list[int]] = {}
    for uid, emitted in (pair for outcome in outcomes for pair in outcome.emitted):
        found.setdefault((uid, emitted.choice), []).append(emitted.pick.token)
    assert found == expected
    assert sum(outcome.ahead for outcome in outcomes) > 5
    assert sum(outcome.drafted for outcome in outcomes) > 5
    assert all(up for most, up in underway[:-3] if not most)


def test_grammars_in_flight() -> None:
    """Their masks are found after the forward has begun; what completes one, or leads nowhere, ends as ever."""
    expected = drive(with_masks(tiny.engine("demo")), bound(), Habits())
    engine = with_masks(tiny.engine("demo", 4, 400, ahead=True))
    world, ahead = fly(engine, bound(), Habits(chunk=2, pauses=1), seed=3)
    assert (world.tokens, world.finishes, world.failed) == (expected.tokens, expected.finishes, expected.failed)
    assert ahead > 5
    assert all_pages_free(engine)


def test_two_ranks_agree_on_beams_in_flight() -> None:
    asked = some(3)
    groups, beside = among_others(asked)
    pages = most_pages(groups, 4) + 9

    def work(ranks: Ranks) -> tuple[World, int, bool]:
        engine = tiny.rank_engine(NAME, ranks, 4, pages, ahead=True)
        return *fly(engine, groups, Habits(16, pause=0.02), seed=6), all_pages_free(engine)

    (world, ahead, first), (twin, _, second) = tiny.ThreadedRanks().run(work)
    check_beams(world, asked)
    check_beside(world, beside[0].uid)
    assert twin.tokens == world.tokens
    assert ahead > 100
    assert first
    assert second


@pytest.mark.parametrize("masks", [False, True])
def test_two_ranks_agree_in_flight(masks: bool) -> None:
    name, groups = ("demo", bound) if masks else ("qwen2", lambda: mixed(8))
    alone = tiny.engine(name, 16, 2000, prefix_caching=False)
    expected = drive(with_masks(alone) if masks else alone, groups(), Habits()).tokens

    def work(ranks: Ranks) -> tuple[World, int]:
        engine = tiny.rank_engine(name, ranks, 4, room(groups(), 4) + 9, ahead=True)
        if masks and not ranks.rank:
            with_masks(engine)
        return fly(engine, groups(), Habits(9, pauses=1), seed=5)

    (first, ahead), (second, _) = tiny.ThreadedRanks().run(work)
    assert first.tokens == second.tokens == expected
    assert ahead > 3
