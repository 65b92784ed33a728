"""Overlapped steps: a step that is begun before the previous one's tokens are known changes no token, page count or failure.
Compared with the same groups run without overlap. Planted faults show that the checks find them."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.shard import landing, logits
from penstock.shard.decoding.budget import Allowance, LinearCost
from penstock.shard.decoding.expansion import Candidate
from penstock.shard.decoding.hypotheses import Search, Stop, candidates_of
from penstock.shard.decoding.sampler import PendingPicks, Pick, Row
from penstock.shard.engine import Engine
from penstock.shard.flight import StepInFlight
from penstock.shard.out_of_memory import ALONE
from penstock.shard.parallel import Ranks
from penstock.shard.prefix import PrefixCache
from penstock.shard.sequence import Group, Sampling
from penstock.shard.step import BeamFront, DeviceSamples, Span
from penstock.tests.shard import audited_engine as audited_engine_module
from penstock.tests.shard import tiny
from penstock.tests.shard.audited_engine import POISON, AuditedEngine, FakeModel
from penstock.tests.shard.audited_engine import audited_engine as audited_engine  # a fixture
from penstock.tests.shard.driver import Driver, OverlappingEngine, Results, Traffic, drive, message
from penstock.tests.shard.test_against_transformers import ANSWER_LENGTH, all_pages_free, prompt
from penstock.tests.shard.test_beams import (
    NAME,
    check_others,
    mixed_with_other_groups,
    most_pages,
    part_of_cases,
    record_pages_and_forks,
)
from penstock.tests.shard.test_beams import check as check_beams
from penstock.tests.shard.test_grammar import grammar_groups, with_masks
from penstock.tests.shard.test_out_of_memory import (
    PAGE_SIZE,
    LimitedMemoryEngine,
    groups_of_which_half_are_too_long,
    random_requests,
)
from penstock.tests.shard.test_sharing import mixed_groups, pages_of_largest_group, random_small_groups

SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=77)


def drive_overlapped(engine: Engine, groups: Sequence[Group], traffic: Traffic, seed: int = 0) -> tuple[Results, int]:
    """`drive` with overlapped steps: its results, and how many steps were begun before the previous one had landed."""
    overlapping = OverlappingEngine(engine, random.Random(seed))
    results = Driver(overlapping, [message(group) for group in groups], traffic, seed).run()
    return results, overlapping.ahead


def pages_of_largest(groups: Sequence[Group], page_size: int) -> int:
    """Pages that the largest group needs if it runs alone, beam searches included."""
    return max(pages_of_largest_group([group for group in groups if not group.search], page_size), most_pages(groups, page_size))


def check(
    audited_engine: type[AuditedEngine], seeds: range, make_groups: Callable[[int], list[Group]] = random_small_groups
) -> int:
    """Runs random groups, some of which end early, in small pools; the number of overlapped steps."""
    ahead = 0
    for seed in seeds:
        chance = random.Random(seed)
        size = chance.choice([1, 2, 3, 4])
        groups = make_groups(seed)
        expected = drive(audited_engine(5000, size, prefix_caching=False), make_groups(seed), Traffic(), seed)
        engine = audited_engine(pages_of_largest(groups, size) + chance.randint(2, 14), size, chance.random() < 0.8, ahead=True)
        traffic = Traffic(chance.choice([1, 3, 8, 1 << 20]), pause=0.05, pauses=seed % 2, join=0.1)
        results, count = drive_overlapped(engine, groups, traffic, seed)
        assert results.failed == {}
        assert results.tokens == expected.tokens
        assert results.scores == {uid: pytest.approx(scores, rel=1e-5) for uid, scores in expected.scores.items()}
        assert engine.pool.free == engine.pool.pages
        ahead += count
    return ahead


def test_tokens_and_pages_are_the_same_with_overlapped_steps(audited_engine: type[AuditedEngine]) -> None:
    assert check(audited_engine, range(60)) > 1000


def random_groups_with_beams(seed: int) -> list[Group]:
    """Random small groups, some of which are beam searches."""
    chance = random.Random(seed)
    groups = random_small_groups(seed)
    for uid in chance.sample(range(len(groups)), 8):
        [first], most = groups[uid].sequences, chance.randint(1, 20)
        search = Search(chance.randint(2, 4), 1, chance.choice([1.0, 0.0, 2.0]), chance.choice(list(Stop)))
        ends = chance.choice([(), (3,)])
        groups[uid] = tiny.group(uid, first.tokens, most, end_ids=ends, search=search, cache_key=first.cache_key)
    return groups


def test_beams_fork_the_same_with_overlapped_steps(audited_engine: type[AuditedEngine]) -> None:
    heirs = 0
    original = audited_engine.land

    def land(self: AuditedEngine) -> None:
        nonlocal heirs
        heirs += sum(len(group.heirs) for group in self.books.groups.values())
        original(self)

    audited_engine.land = land
    assert check(audited_engine, range(60), random_groups_with_beams) > 1000
    assert heirs > 1000


@pytest.mark.parametrize("make_groups", [random_small_groups, random_groups_with_beams])
def test_cancelled_and_failed_groups_free_all_pages_with_overlapped_steps(
    audited_engine: type[AuditedEngine], make_groups: Callable[[int], list[Group]]
) -> None:
    for seed in range(30):
        groups = make_groups(seed)
        poisoned = [tiny.group(100 + i, (1, 2, POISON, i), 6, search=Search(2, 1) if i else None) for i in range(3)]
        engine = audited_engine(pages_of_largest(groups, 3) + 9, 3, ahead=True)
        traffic = Traffic(5, pause=0.05, cancel=0.1, end=0.1)
        results, _ = drive_overlapped(engine, groups + poisoned, traffic, seed)
        assert set(results.failed) <= {100, 101, 102}
        assert set(results.failed) | results.cancelled >= {100, 101, 102}
        assert engine.pool.free == engine.pool.pages


def ignoring_length(original: Any) -> Any:
    def follow(self: StepInFlight, group: Group, page_size: int) -> Any:
        most, group.max_new_tokens = group.max_new_tokens, 1 << 20
        try:
            return original(self, group, page_size)
        finally:
            group.max_new_tokens = most

    return follow


def publishing_unknown_tokens(original: Any) -> Any:
    def publish(self: PrefixCache, holder: Any, swap: bool) -> None:
        holder.tokens.append(0)  # as if the token that is not known yet were this one
        original(self, holder, swap)
        holder.tokens.pop()

    return publish


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (StepInFlight, "follow", ignoring_length),
        (PrefixCache, "_publish", publishing_unknown_tokens),
        (StepInFlight, "simple", lambda original: lambda self, alone: True),
    ],
)
def test_check_catches_faults_of_overlapped_steps(
    audited_engine: type[AuditedEngine], monkeypatch: pytest.MonkeyPatch, place: Any, name: str, fault: Any
) -> None:
    monkeypatch.setattr(place, name, fault(getattr(place, name)))
    with pytest.raises((AssertionError, ValueError, IndexError, KeyError)):
        check(audited_engine, range(60))


def wrong_parent(original: Any) -> Any:
    return lambda self, heir, parent: original(self, heir, (parent + 1) % len(self.beams))


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (FakeModel, "inherit", lambda original: lambda self, span, cache, picked: None),
        (BeamFront, "pages_of", wrong_parent),
        (Group, "standing", lambda original: lambda self, page_size: (*original(self, page_size)[:1], 0, self.lacking)),
    ],
)
def test_check_catches_faults_of_overlapped_beams(
    audited_engine: type[AuditedEngine], monkeypatch: pytest.MonkeyPatch, place: Any, name: str, fault: Any
) -> None:
    monkeypatch.setattr(place, name, fault(getattr(place, name)))
    with pytest.raises((AssertionError, ValueError, IndexError, KeyError)):
        check(audited_engine, range(60), random_groups_with_beams)


@pytest.mark.parametrize(
    ("part", "page_size", "chunk", "prefix_caching"), [(0, 16, 7, True), (1, 4, 1 << 20, False), (2, 1, 7, True)]
)
def test_overlapped_beam_searches_match_transformers(part: int, page_size: int, chunk: int, prefix_caching: bool) -> None:
    cases = part_of_cases(part)
    groups, beside = mixed_with_other_groups(cases)
    engine = tiny.engine(NAME, page_size, most_pages(groups, page_size) + 8 // page_size, prefix_caching, ahead=True)
    results, ahead = drive_overlapped(engine, groups, Traffic(chunk, pause=0.02), seed=part)
    check_beams(results, cases)
    check_others(results, beside[0].uid)
    assert ahead > 100
    assert all_pages_free(engine)


def candidates_that_never_merge(group: Group) -> list[Pick | None]:
    """Candidates such that every beam continues, so that beams never share later pages."""
    assert group.search is not None
    rows = range(len(group.sequences))
    best = [Candidate(token, -1.0, (), False, row, -float(token)) for token in range(group.search.width) for row in rows]
    return [*best[: candidates_of(group.search.width, 0)]]


def test_fewer_surviving_beams_than_planned_leak_no_page() -> None:
    """As when filters leave each beam one token: one beam goes on, while there was room for two."""
    engine = tiny.engine(NAME, 4, ahead=True)
    group = tiny.group(1, prompt(1, 10), ANSWER_LENGTH, Sampling(temperature=1.0, top_k=1), search=Search(2, 1))
    results, ahead = drive_overlapped(engine, [group], Traffic())
    assert results.failed == {}
    assert ahead > 0
    assert all_pages_free(engine)


def test_pages_of_overlapped_beams_stay_within_their_bound(
    audited_engine: type[AuditedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audited_engine_module, "candidates", candidates_that_never_merge)
    full = 0
    for seed in range(200):
        chance = random.Random(seed)
        size, width = chance.choice([3, 4, 5]), chance.randint(2, 4)
        length = size * chance.randint(1, 3) - chance.choice(
            [0, 1, 1, 2]
        )  # the bound would be exceeded where the last page is partly full ...
        count = size * chance.randint(1, 3) + chance.choice([-1, 0, 0])  # ... and the answer takes whole pages
        engine = audited_engine(200, size, prefix_caching=False, ahead=True)
        peak, _ = record_pages_and_forks(engine)
        tokens = [chance.randrange(3) for _ in range(length)]
        drive_overlapped(
            engine, [tiny.group(0, tokens, count, search=Search(width, 1, 0.0))], Traffic(cancel=0.1 * (seed % 2)), seed
        )
        bound = -(-length // size) + width * (1 + -(-count // size))
        assert max(peak) <= bound
        full += max(peak) == bound
        assert engine.pool.free == engine.pool.pages
    assert full, "no search reaches the bound"


def all_kinds_of_groups() -> list[Group]:
    """Requests of every kind; a few of them prevent steps from overlapping."""
    groups = mixed_groups(12)
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
    expected = drive(tiny.engine("llama", 16, 2000, prefix_caching=False), all_kinds_of_groups(), Traffic())
    engine = tiny.engine("llama", page_size, pages_of_largest_group(all_kinds_of_groups(), page_size) + 40 // page_size, ahead=True)
    results, ahead = drive_overlapped(engine, all_kinds_of_groups(), Traffic(chunk, pauses=1), seed=page_size)
    ends = [{len(expected.tokens[uid, choice]) for choice in range(4)} for uid in range(15, 19)]
    assert any(len(lengths) > 1 for lengths in ends), "no group has choices of different lengths"
    assert results.tokens == expected.tokens
    assert results.finishes == expected.finishes
    for key, logprobs in expected.logprobs.items():
        assert results.logprobs[key] == pytest.approx(logprobs, abs=1e-4)
    assert ahead > 20
    assert all_pages_free(engine)


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 20), (4, 7), (16, 1 << 20)])
def test_tokens_and_logprobs_are_the_same_with_overlapped_steps(page_size: int, chunk: int) -> None:
    check_tokens(page_size, chunk)


def test_check_catches_rows_of_ended_sequences_that_are_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "_remaining", lambda self, runs, hidden: (runs, hidden))
    with pytest.raises((AssertionError, ValueError, KeyError, RuntimeError)):
        check_tokens(4, 7)


@pytest.mark.parametrize("choices", [1, 3])
def test_non_finite_logits_fail_only_their_group_with_overlapped_steps(monkeypatch: pytest.MonkeyPatch, choices: int) -> None:
    """The step for its next token, which doesn't exist, is in flight by then."""
    original = logits.begin

    def begin(found: Tensor, rows: Sequence[Row], mask: Tensor | None = None) -> PendingPicks:
        bad = [row.sampling.seed == 999 and len(row.tokens) - row.prompt_length >= 3 for row in rows]
        return original(found.masked_fill(torch.tensor(bad).unsqueeze(1), torch.nan), rows, mask)

    def groups() -> list[Group]:
        good = [tiny.group(uid, prompt(uid, 5 + uid), 12, replace(SEEDED, seed=uid)) for uid in range(9)]
        return [*good, tiny.group(9, prompt(9, 4), 12, replace(SEEDED, seed=999), choices=choices)]

    monkeypatch.setattr(logits, "begin", begin)
    expected = drive(tiny.engine("llama", 4, 600), groups(), Traffic())
    for seed, chunk in enumerate((3, 7, 99)):
        engine = tiny.engine("llama", 4, 600, ahead=True)
        results, ahead = drive_overlapped(engine, groups(), Traffic(chunk), seed)
        assert results.failed.keys() == {9}
        assert {key: tokens for key, tokens in results.tokens.items() if key[0] < 9} == {
            key: tokens for key, tokens in expected.tokens.items() if key[0] < 9
        }
        assert ahead > 5
        assert all_pages_free(engine)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most", [1, 5, 23])
def test_out_of_memory_in_overlapped_steps_changes_no_token(seed: int, most: int) -> None:
    def groups() -> list[Group]:
        return [group for group in random_requests(20, seed) if not group.drafts]

    expected = drive(tiny.engine("llama", PAGE_SIZE, 600), groups(), Traffic())
    engine = LimitedMemoryEngine(most, ahead=True)
    results, ahead = drive_overlapped(engine, groups(), Traffic((7, 40, 999)[seed % 3], pause=0.05), seed)
    assert results.failed == {}
    assert results.tokens == expected.tokens
    assert engine.memory_fallback._count > 0
    assert ahead
    assert all_pages_free(engine)


@pytest.mark.parametrize("seed", range(8))
def test_groups_too_large_for_memory_fail_alone_with_overlapped_steps(seed: int) -> None:
    engine = LimitedMemoryEngine(tokens=40, reach=(45, 50, 54, 58)[seed % 4], ahead=True)
    expected = drive(tiny.engine("llama", PAGE_SIZE, 600), groups_of_which_half_are_too_long(), Traffic()).answers
    results, _ = drive_overlapped(
        engine, groups_of_which_half_are_too_long(), Traffic(chunk=(3, 13, 40, 999)[seed % 4], arrivals=16), seed
    )
    assert results.failed == dict.fromkeys(range(8), ALONE)
    assert {uid: results.answers[uid] for uid in range(8, 16)} == {uid: expected[uid] for uid in range(8, 16)}
    assert all_pages_free(engine)


def test_group_without_pages_fails_before_the_next_step_is_planned(audited_engine: type[AuditedEngine]) -> None:
    """No step is planned on top of its step: it would compute tokens, and publish pages, whose predecessors are missing."""
    engine = audited_engine(6, 4, ahead=True)
    assert not engine.begin_prefill(1, [tiny.group(1, [5] * 8, 20)], [(1, 8)], 8, []).done()
    lost = engine.begin_prefill(2, [tiny.group(2, [2 + i % 7 for i in range(28)], 9)], [(2, 28)], 28, [1])
    assert lost.done()
    assert [uid for uid, _ in lost.result().failed] == [2]
    assert not engine.begin_decode([1]).done()


def test_page_lost_in_a_running_step_is_not_published_by_the_previous_step(audited_engine: type[AuditedEngine]) -> None:
    """A group with prompt_logprobs computes its whole prompt, which another group's answer repeats: that one would take the lost
    page."""
    engine = audited_engine(100, 2, ahead=True)
    alone = audited_engine(100, 2)
    alone_outcomes = [alone.prefill(1, [tiny.group(1, (1, 2), 10)], [(1, 100)], 100, [1])] + [alone.decode([1]) for _ in range(9)]
    answer = [emitted.pick.token for outcome in alone_outcomes for _, emitted in outcome.emitted]
    original = engine.forward

    def forward(spans: Sequence[Span], picked: DeviceSamples | None = None) -> Tensor:
        if any(span.sequence.prompt_length == 8 and span.start + len(span.tokens) > 2 for span in spans):
            raise MemoryError
        return original(spans, picked)

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


def test_beams_too_large_for_memory_in_a_planned_step_fail_alone(audited_engine: type[AuditedEngine]) -> None:
    engine = audited_engine(300, 3, ahead=True)
    original = engine.forward

    def forward(spans: Sequence[Span], picked: DeviceSamples | None = None) -> Tensor:
        if any(span.front and span.sequence.prompt_length == 7 and span.start > 10 for span in spans):
            raise MemoryError
        return original(spans, picked)

    engine.forward = forward

    def groups() -> list[Group]:
        return [tiny.group(uid, [1] * (6 + uid), 12, search=Search(3, 1, 0.0)) for uid in range(3)]

    expected = drive(audited_engine(300, 3), groups(), Traffic())
    results, _ = drive_overlapped(engine, groups(), Traffic(), seed=1)
    assert results.failed == {1: ALONE}
    assert {key: tokens for key, tokens in results.tokens.items() if key[0] != 1} == {
        key: tokens for key, tokens in expected.tokens.items() if key[0] != 1
    }
    assert engine.pool.free == engine.pool.pages


def test_group_reusing_a_running_groups_uid_fails(audited_engine: type[AuditedEngine]) -> None:
    engine = audited_engine(100, 2, ahead=True)
    steps = [engine.begin_prefill(1, [tiny.group(1, (1, 2, 3), 8)], [(1, 100)], 100, [1]), engine.begin_decode([1])]
    twins = [tiny.group(1, (3, 2, 1, 2, 2), 8) for _ in range(2)]
    steps += [engine.begin_prefill(1, twins, [(1, 100)], 100, [1]), engine.begin_decode([1])]
    engine.land()
    assert [uid for step in steps for uid, _ in step.result(0).failed] == [1]


def test_tokens_are_not_delayed_by_another_groups_grammar_compilation(audited_engine: type[AuditedEngine]) -> None:
    engine, landed = audited_engine(100, 2, ahead=True), []

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


def test_step_times_sum_to_no_more_than_the_elapsed_time(audited_engine: type[AuditedEngine]) -> None:
    """A step's time excludes the time in which the device still worked on the previous step."""
    engine = audited_engine(100, 2, ahead=True)
    original = engine.forward

    def slow(spans: Sequence[Span], picked: DeviceSamples | None = None) -> Tensor:
        time.sleep(0.002)
        return original(spans, picked)

    engine.forward = slow
    began = time.perf_counter()
    steps = [engine.begin_prefill(1, [tiny.group(1, (1, 2, 3), 20)], [(1, 100)], 100, [1])]
    while engine.books.groups:
        steps.append(engine.begin_decode([1]))
        if engine.underway and len(steps) % 2:
            engine.underway()  # as the thread does that waits for the device
    engine.land()
    outcomes = [step.result(0) for step in steps]
    assert sum(outcome.ahead for outcome in outcomes) > 15
    assert all(outcome.seconds >= 0 for outcome in outcomes)
    assert sum(outcome.seconds for outcome in outcomes) <= time.perf_counter() - began


def test_while_a_step_is_concluded_the_next_ones_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no thread waits for the device, as none does while commands are queued."""
    engine, original = tiny.engine("llama", ahead=True), landing.conclude
    monkeypatch.setattr(landing, "conclude", lambda *arguments: (time.sleep(0.5), original(*arguments)))
    first = engine.begin_prefill(1, [tiny.group(1, (1, 2, 3), 20)], [(1, 100)], 100, [1])
    second = engine.begin_decode([1])
    engine.land()
    assert first.result(0).ahead
    assert first.result(0).seconds < 0.5 < second.result(0).seconds


def test_beams_and_drafts_in_one_batch_are_the_same_with_overlapped_steps() -> None:
    def groups() -> list[Group]:
        beams = tiny.group(50, prompt(50, 11), ANSWER_LENGTH, search=Search(3, 2))
        drafts = [tiny.group(60 + i, prompt(1, 5) * 4, ANSWER_LENGTH, replace(SEEDED, seed=i), drafts=3) for i in range(2)]
        return [*mixed_groups(5), beams, *drafts]

    expected = drive(tiny.engine("llama", 16, 2000), groups(), Traffic())
    engine = tiny.engine("llama", 4, 2000, ahead=True)
    results, ahead = drive_overlapped(engine, groups(), Traffic(9), seed=2)
    assert results.tokens == expected.tokens
    assert results.scores.keys() == expected.scores.keys()
    assert ahead
    assert all_pages_free(engine)


def test_steps_overlap_while_no_drafts_are_allowed() -> None:
    """As under load, where drafts don't pay. When they pay again, they are proposed from the tokens known by then."""
    cost = LinearCost(1.0, 0.0)

    def groups() -> list[Group]:
        return [tiny.group(uid, prompt(1, 5) * 4, 30, drafts=3) for uid in range(3)]

    expected = drive(tiny.engine("llama", 16, 2000), groups(), Traffic()).tokens
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
    assert all(overlapped for most, overlapped in underway[:-3] if not most)


def test_grammars_are_the_same_with_overlapped_steps() -> None:
    """Masks are computed after the forward pass has begun; groups whose grammar is complete or has no continuation end as usual."""
    expected = drive(with_masks(tiny.engine("demo")), grammar_groups(), Traffic())
    engine = with_masks(tiny.engine("demo", 4, 400, ahead=True))
    results, ahead = drive_overlapped(engine, grammar_groups(), Traffic(chunk=2, pauses=1), seed=3)
    assert (results.tokens, results.finishes, results.failed) == (expected.tokens, expected.finishes, expected.failed)
    assert ahead > 5
    assert all_pages_free(engine)


def test_two_ranks_agree_on_overlapped_beams() -> None:
    cases = part_of_cases(3)
    groups, beside = mixed_with_other_groups(cases)
    pages = most_pages(groups, 4) + 9

    def work(ranks: Ranks) -> tuple[Results, int, bool]:
        engine = tiny.rank_engine(NAME, ranks, 4, pages, ahead=True)
        return *drive_overlapped(engine, groups, Traffic(16, pause=0.02), seed=6), all_pages_free(engine)

    (results, ahead, first), (other_rank, _, second) = tiny.ThreadedRanks().run(work)
    check_beams(results, cases)
    check_others(results, beside[0].uid)
    assert other_rank.tokens == results.tokens
    assert ahead > 100
    assert first
    assert second


@pytest.mark.parametrize("masks", [False, True])
def test_two_ranks_agree_with_overlapped_steps(masks: bool) -> None:
    name, groups = ("demo", grammar_groups) if masks else ("qwen2", lambda: mixed_groups(8))
    alone = tiny.engine(name, 16, 2000, prefix_caching=False)
    expected = drive(with_masks(alone) if masks else alone, groups(), Traffic()).tokens

    def work(ranks: Ranks) -> tuple[Results, int]:
        engine = tiny.rank_engine(name, ranks, 4, pages_of_largest_group(groups(), 4) + 9, ahead=True)
        if masks and not ranks.rank:
            with_masks(engine)
        return drive_overlapped(engine, groups(), Traffic(9, pauses=1), seed=5)

    (first, ahead), (second, _) = tiny.ThreadedRanks().run(work)
    assert first.tokens == second.tokens == expected
    assert ahead > 3
