"""Recurrent states of models with linear attention: their slots, their copies for prefixes, and their memory. `audited_engine`,
whose fake model has states, checks which tokens each state covers; real models are compared with transformers."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from penstock.shard import memory, prompts, states
from penstock.shard.decoding.hypotheses import Search
from penstock.shard.engine import Engine
from penstock.shard.outcome import Outcome
from penstock.shard.prefix import PrefixCache
from penstock.shard.prompts import Prompts
from penstock.shard.sequence import Group, Sampling, Sequence
from penstock.tests.shard import tiny
from penstock.tests.shard.audited_engine import KEPT, VOCABULARY, AuditedEngine, FakeCache
from penstock.tests.shard.audited_engine import audited_engine as audited_engine  # a fixture
from penstock.tests.shard.driver import UNLIMITED, Traffic, drive
from penstock.tests.shard.test_against_transformers import ANSWER_LENGTH, all_pages_free, prompt
from penstock.tests.shard.test_flight import drive_overlapped, pages_of_largest, random_groups_with_beams

SEQUENCES = 96  # the most sequences of random_groups_with_beams


@pytest.fixture(autouse=True)
def low_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "WORTH", 2)


def check(audited_engine: type[AuditedEngine], seeds: range, ahead: bool) -> tuple[int, int, int]:
    """Tokens equal those of a model without states. Returns the number of pauses, of overlapped steps, and of tokens found in the
    prefix cache."""
    pauses = overlaps = cached = 0
    for seed in seeds:
        chance, groups = random.Random(seed), random_groups_with_beams(seed)
        size = chance.choice([1, 2, 3, 4])
        expected = drive(audited_engine(5000, size, prefix_caching=False), random_groups_with_beams(seed), Traffic(), seed)
        engine = audited_engine(pages_of_largest(groups, size) + chance.randint(2, 14), size, seed % 4 > 0, ahead, SEQUENCES + KEPT)
        traffic = Traffic(chance.choice([1, 3, 8, UNLIMITED]), pause=0.05, pauses=seed % 2, join=0.1)
        results, count = drive_overlapped(engine, groups, traffic, seed) if ahead else (drive(engine, groups, traffic, seed), 0)
        assert (results.failed, results.tokens) == ({}, expected.tokens)
        assert engine.pool.free == engine.pool.pages
        pauses, overlaps, cached = pauses + results.pauses.total(), overlaps + count, cached + results.cached
    return pauses, overlaps, cached


@pytest.mark.parametrize("ahead", [False, True])
def test_states_cover_the_tokens_before_each_span_under_random_traffic(audited_engine: type[AuditedEngine], ahead: bool) -> None:
    pauses, overlaps, cached = check(audited_engine, range(16), ahead)
    assert pauses > 100
    assert overlaps > 100 or not ahead
    assert cached > 100


def whole_prompt(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, group, sequence: group.goal(sequence)


def without_states(original: Callable[..., Any]) -> Callable[..., Any]:
    """A fault: finds cached pages without regard to whether a state is kept for their end."""

    def adopt(self: PrefixCache, holder: Sequence, limit: int) -> Any:
        most, self.most = self.most, None
        try:
            return original(self, holder, limit)
        finally:
            self.most = most

    return adopt


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (FakeCache, "copy_states", lambda original: lambda self, copies: None),
        (Prompts, "_goal", whole_prompt),  # doesn't halt where a state should be kept for others
        (PrefixCache, "adopt", without_states),
        (Sequence, "twin", lambda original: lambda self, pages: without_state(original(self, pages))),
    ],
)
def test_check_catches_wrong_or_missing_states(
    audited_engine: type[AuditedEngine], monkeypatch: pytest.MonkeyPatch, place: Any, name: str, fault: Any
) -> None:
    monkeypatch.setattr(place, name, fault(getattr(place, name)))
    with pytest.raises(AssertionError):
        check(audited_engine, range(10), ahead=False)


def without_state(sequence: Sequence) -> Sequence:
    sequence.state = 0
    return sequence


def test_state_slots_of_ended_sequences_are_reused(audited_engine: type[AuditedEngine]) -> None:
    engine = audited_engine(200, 4, prefix_caching=False, states=4)
    for round_ in range(3):
        groups = [tiny.group(4 * round_ + number, (1, 2, number % 4), 3) for number in range(4)]
        assert not drive(engine, groups, Traffic()).failed


def test_group_without_a_free_state_slot_fails_alone(audited_engine: type[AuditedEngine]) -> None:
    """The router never asks for more sequences than there are slots. If it did, the other groups would go on, and no prefix of the
    failed group would be found."""
    engine = audited_engine(200, 4, states=3)
    engine.books.prefixes.most = 0  # all state slots are for sequences, none for cached prefixes

    def groups() -> list[Group]:
        return [tiny.group(uid, (uid, 1, 2, 3, 1, 2), 6, choices=1 + uid % 2) for uid in range(3)]

    expected = drive(audited_engine(200, 4), groups(), Traffic()).tokens
    results = drive(engine, groups(), Traffic(arrivals=9))
    [failed] = results.failed
    assert results.failed[failed] == "what 3 sequences remember has room, and there are more"
    assert all(tokens == expected[key] for key, tokens in results.tokens.items() if key[0] != failed)
    assert drive(engine, groups()[failed : failed + 1], Traffic()).tokens == {(failed, 0): expected[failed, 0]}
    assert engine.pool.free == engine.pool.pages


def test_settle_assigns_state_slots_and_copies_shared_states() -> None:
    def group_with_states(*numbers: int) -> Group:
        group = tiny.group(1, (1, 2), 3)
        group.sequences = [Sequence(group.sequences[0].tokens, 2, computed=2, state=number) for number in numbers]
        return group

    first, second = group_with_states(2, 2, 0), group_with_states(5)
    assert states.settle([first, second], 6) == ([(2, 1)], [])
    assert [sequence.state for sequence in (*first.sequences, *second.sequences)] == [2, 1, 3, 5]
    assert states.settle([first, second], 6) == ([], [])
    third = group_with_states(0, 5)
    assert states.settle([first, second, third], 5) == ([], [third])


def test_prefixes_are_found_where_prompts_ended_and_where_they_diverged(
    audited_engine: type[AuditedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "WORTH", 8)
    engine = audited_engine(400, 4, states=9)
    common = [number % VOCABULARY for number in range(41)]

    def cached(uid: int, *more: int) -> int:
        return drive(engine, [tiny.group(uid, (*common, *more), 3)], Traffic()).cached

    assert cached(1, *[1] * 20) == 0
    assert cached(2, *[1] * 20) == 60, "the same prompt, but for its last token, whose logits are needed"
    assert cached(3, *[1] * 20, *[3] * 9) == 60, "a second turn"
    assert cached(4, *[2] * 20) == 0, "no state is kept where it diverges"
    assert cached(5, *[3] * 20) == 40


def test_the_least_used_state_is_evicted(audited_engine: type[AuditedEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "WORTH", 8)
    engine = audited_engine(400, 4, states=9)

    def cached(number: int) -> int:
        return drive(engine, [tiny.group(1, [number % VOCABULARY] * (20 + number), 1)], Traffic()).cached

    assert [cached(number) for number in (0, 1, 2, 0, 3)] == [0, 0, 0, 16, 0]  # one more state than can be kept
    assert [cached(number) for number in (0, 2, 3, 1)] == [16, 20, 20, 0]


def test_halts_are_at_boundaries_that_save_others_enough_tokens() -> None:
    few, many = prompts.WORTH - 2, prompts.WORTH
    assert prompts.halts(0, 0, few) == ()
    assert prompts.halts(0, 0, many) == (many,)
    assert prompts.halts(0, many, many + few) == (many,)
    assert prompts.halts(0, many, 2 * many) == (many, 2 * many)
    assert prompts.halts(many, many, many + few) == ()


def sample_groups() -> list[Group]:
    """Prompts with partly shared prefixes: with one choice, several, and beams."""
    groups, stem = [], prompt(3, 40)
    for uid in range(12):
        tokens = (*stem[: (0, 17, 33, 40)[uid % 4]], *prompt(uid, 5 + uid * 3))
        if uid % 5 == 0:
            groups.append(tiny.group(uid, tokens, ANSWER_LENGTH, search=Search(3, 2)))
        elif uid % 5 == 1:
            groups.append(tiny.group(uid, tokens, ANSWER_LENGTH, Sampling(temperature=0.8, seed=uid), choices=3))
        else:
            groups.append(tiny.group(uid, tokens, ANSWER_LENGTH))
    return groups


@pytest.mark.parametrize(
    ("name", "size", "traffic"),
    [
        *(("lfm2", 4, Traffic(7, pauses=1)), ("qwen3-next", 4, Traffic(7, pauses=1)), ("qwen3.5", 16, Traffic(pauses=1))),
        ("olmo-hybrid", 4, Traffic(7, pauses=1)),
        *(("glm-5-next", 4, Traffic(7, pauses=1)), ("glm-5-next", 16, Traffic(pauses=1))),
        ("qwen4-exp", 4, Traffic(7, pauses=1)),
    ],
)
def test_tokens_of_real_models_are_the_same_with_cached_states(
    name: str, size: int, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "WORTH", 8)
    expected = drive(tiny.engine(name, 16, 2000, prefix_caching=False), sample_groups(), Traffic(arrivals=1)).tokens
    for group in sample_groups()[2:5]:
        assert [expected[group.uid, 0]] == tiny.greedy(name, (tuple(group.sequences[0].tokens),), ANSWER_LENGTH)
    engine = tiny.engine(name, size, 1200 // size, ahead=True)
    results, _ = drive_overlapped(engine, sample_groups(), traffic, seed=size)
    assert (results.failed, results.tokens) == ({}, expected)
    assert results.cached > 0
    assert all_pages_free(engine)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_states_take_at_most_half_of_the_memory(prefix_caching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.engine("qwen3.5", prefix_caching=prefix_caching)
    state = engine.decoder.shape.state_bytes(1, 4)
    for room in (0, state, 5 * state, 40 * state, 101 * state, 10_000 * state):
        count, taken = engine.sequences(100, room)
        assert taken == state * (1 + count + -(-count // 4) * prefix_caching)
        assert count == 1 or taken <= room / 2
        assert count == 100 or engine.sequences(101 + count, room)[0] <= count + 1
    monkeypatch.setattr(memory, "_available", lambda device: 1000 * state)
    pages, count, _ = memory.size_pool(engine, 0, 1.0, 64, 4, 1_000_000, 100)
    engine.resize(pages, count)
    taken = sum(part.nbytes for own in engine.cache.states.values() for part in (own.windows, own.memories))
    assert taken == engine.sequences(count, 1 << 60)[1]
    keys = sum(layer.nbytes for layer in engine.cache.layers.values())
    assert 0.9 < taken / keys <= 1.1, "the other half is for keys and values"


def test_measured_step_has_sample_tokens_though_few_rows_are_sampled() -> None:
    """As with --max-batch-size 1, where the sample measured on a CPU would have less than one sampled token."""
    *_, sample = memory.size_pool(tiny.engine("llama"), 4, 0.9, 512, 1, 1, 100)
    assert sample.tokens == memory.SAMPLE_TOKENS


def test_measured_step_has_no_more_states_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """If more tokens are sampled than sequences fit, as with drafts, each prompt has several: one state for each sampled token
    would not fit, and the start would fail."""
    engine, outcomes, original_run = tiny.engine("qwen3.5"), list[Outcome](), memory._run

    def run(engine: Engine, lengths: list[int], choices: int, sampling: Sampling) -> Outcome:
        outcomes.append(original_run(engine, lengths, choices, sampling))
        assert engine.cache.slots == len(lengths)
        return outcomes[-1]

    room = 200 * engine.decoder.shape.state_bytes(1, 4)
    monkeypatch.setattr(memory, "_available", lambda device: room)
    monkeypatch.setattr(memory, "_peak", lambda device, reset=False: 0)
    monkeypatch.setattr(memory, "SAMPLE_TOKENS", 512)
    monkeypatch.setattr(memory, "_run", run)
    memory.size_pool(engine, 1, 1.0, 512, 256, 128, 100)
    [*_, largest] = outcomes
    assert largest.prompt_tokens == 512
    assert len({uid for uid, _ in largest.emitted}) == engine.sequences(128, room)[0] < 100
    assert len(largest.emitted) >= 256
    assert not largest.failed
