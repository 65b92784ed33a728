"""What sequences remember, of models with linear attention: by an engine without a model, whose every slot says what was seen."""

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
from penstock.tests.shard.driver import UNLIMITED, Habits, drive
from penstock.tests.shard.paper import KEPT, WORDS, Paper, Slots
from penstock.tests.shard.paper import paper as paper  # a fixture
from penstock.tests.shard.test_against_transformers import ANSWER_LENGTH, all_pages_free, prompt
from penstock.tests.shard.test_flight import fly, room_of, with_beams

SEQUENCES = 96  # of a crowd, at most


@pytest.fixture(autouse=True)
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "WORTH", 2)


def check(paper: type[Paper], seeds: range, ahead: bool) -> tuple[int, int, int]:
    """Answers are those of a model that remembers nothing. How often some were paused, how many steps were begun ahead, and how
    many tokens were found."""
    pauses = overlaps = cached = 0
    for seed in seeds:
        chance, groups = random.Random(seed), with_beams(seed)
        size = chance.choice([1, 2, 3, 4])
        expected = drive(paper(5000, size, prefix_caching=False), with_beams(seed), Habits(), seed)
        engine = paper(room_of(groups, size) + chance.randint(2, 14), size, seed % 4 > 0, ahead, SEQUENCES + KEPT)
        habits = Habits(chance.choice([1, 3, 8, UNLIMITED]), pause=0.05, pauses=seed % 2, join=0.1)
        world, count = fly(engine, groups, habits, seed) if ahead else (drive(engine, groups, habits, seed), 0)
        assert (world.failed, world.tokens) == ({}, expected.tokens)
        assert engine.pool.free == engine.pool.pages
        pauses, overlaps, cached = pauses + world.pauses.total(), overlaps + count, cached + world.cached
    return pauses, overlaps, cached


@pytest.mark.parametrize("ahead", [False, True])
def test_every_sequence_remembers_what_is_before_it(paper: type[Paper], ahead: bool) -> None:
    pauses, overlaps, cached = check(paper, range(16), ahead)
    assert pauses > 100
    assert overlaps > 100 or not ahead
    assert cached > 100


def all_of(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, group, sequence: group.goal(sequence)


def regardless(right: Callable[..., Any]) -> Callable[..., Any]:
    """Finds pages, whether or not anybody remembers what is behind them."""

    def adopt(self: PrefixCache, holder: Sequence, limit: int) -> Any:
        most, self.most = self.most, None
        try:
            return right(self, holder, limit)
        finally:
            self.most = most

    return adopt


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (Slots, "copy_states", lambda right: lambda self, copies: None),
        (Prompts, "_goal", all_of),  # goes beyond what others want to be remembered
        (PrefixCache, "adopt", regardless),
        (Sequence, "twin", lambda right: lambda self, pages: forgetful(right(self, pages))),
    ],
)
def test_the_check_finds_faults(paper: type[Paper], monkeypatch: pytest.MonkeyPatch, place: Any, name: str, fault: Any) -> None:
    monkeypatch.setattr(place, name, fault(getattr(place, name)))
    with pytest.raises(AssertionError):
        check(paper, range(10), ahead=False)


def forgetful(sequence: Sequence) -> Sequence:
    sequence.state = 0
    return sequence


def test_what_ends_leaves_its_slot_to_others(paper: type[Paper]) -> None:
    engine = paper(200, 4, prefix_caching=False, states=4)
    for round_ in range(3):
        groups = [tiny.group(4 * round_ + number, (1, 2, number % 4), 3) for number in range(4)]
        assert not drive(engine, groups, Habits()).failed


def test_who_finds_no_slot_fails_alone(paper: type[Paper]) -> None:
    """The router asks for no more than there are; if one came all the same, the others would go on. Nobody finds what it would have
    computed."""
    engine = paper(200, 4, states=3)
    assert engine.books.prefixes is not None
    engine.books.prefixes.most = 0  # all slots are for sequences

    def groups() -> list[Group]:
        return [tiny.group(uid, (uid, 1, 2, 3, 1, 2), 6, choices=1 + uid % 2) for uid in range(3)]

    expected = drive(paper(200, 4), groups(), Habits()).tokens
    world = drive(engine, groups(), Habits(arrivals=9))
    [failed] = world.failed
    assert world.failed[failed] == "what 3 sequences remember has room, and there are more"
    assert all(tokens == expected[key] for key, tokens in world.tokens.items() if key[0] != failed)
    assert drive(engine, groups()[failed : failed + 1], Habits()).tokens == {(failed, 0): expected[failed, 0]}
    assert engine.pool.free == engine.pool.pages


def test_slots_are_given_and_copied() -> None:
    def of(*numbers: int) -> Group:
        made = tiny.group(1, (1, 2), 3)
        made.sequences = [Sequence(made.sequences[0].tokens, 2, computed=2, state=number) for number in numbers]
        return made

    first, second = of(2, 2, 0), of(5)
    assert states.settle([first, second], 6) == ([(2, 1)], [])
    assert [sequence.state for sequence in (*first.sequences, *second.sequences)] == [2, 1, 3, 5]
    assert states.settle([first, second], 6) == ([], [])
    third = of(0, 5)
    assert states.settle([first, second, third], 5) == ([], [third])


def test_a_prompt_is_found_where_others_ended_and_where_they_parted(paper: type[Paper], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "WORTH", 8)
    engine = paper(400, 4, states=9)
    common = [number % WORDS for number in range(41)]

    def cached(uid: int, *more: int) -> int:
        return drive(engine, [tiny.group(uid, (*common, *more), 3)], Habits()).cached

    assert cached(1, *[1] * 20) == 0
    assert cached(2, *[1] * 20) == 60, "the same prompt, but for its last token, which is wanted"
    assert cached(3, *[1] * 20, *[3] * 9) == 60, "a second turn"
    assert cached(4, *[2] * 20) == 0, "nobody has remembered what is where it parts"
    assert cached(5, *[3] * 20) == 40


def test_what_is_found_most_seldom_gives_way(paper: type[Paper], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "WORTH", 8)
    engine = paper(400, 4, states=9)

    def cached(number: int) -> int:
        return drive(engine, [tiny.group(1, [number % WORDS] * (20 + number), 1)], Habits()).cached

    assert [cached(number) for number in (0, 1, 2, 0, 3)] == [0, 0, 0, 16, 0]  # one more than can be kept
    assert [cached(number) for number in (0, 2, 3, 1)] == [16, 20, 20, 0]


def test_halts_are_where_others_are_saved_enough() -> None:
    few, many = prompts.WORTH - 2, prompts.WORTH
    assert prompts.halts(0, 0, few) == ()
    assert prompts.halts(0, 0, many) == (many,)
    assert prompts.halts(0, many, many + few) == (many,)
    assert prompts.halts(0, many, 2 * many) == (many, 2 * many)
    assert prompts.halts(many, many, many + few) == ()


def asked() -> list[Group]:
    """Prompts that begin alike in part: for one answer, several, and beams."""
    made, stem = [], prompt(3, 40)
    for uid in range(12):
        tokens = (*stem[: (0, 17, 33, 40)[uid % 4]], *prompt(uid, 5 + uid * 3))
        if uid % 5 == 0:
            made.append(tiny.group(uid, tokens, ANSWER_LENGTH, search=Search(3, 2)))
        elif uid % 5 == 1:
            made.append(tiny.group(uid, tokens, ANSWER_LENGTH, Sampling(temperature=0.8, seed=uid), choices=3))
        else:
            made.append(tiny.group(uid, tokens, ANSWER_LENGTH))
    return made


@pytest.mark.parametrize(
    ("name", "size", "habits"),
    [
        *(("lfm2", 4, Habits(7, pauses=1)), ("qwen3-next", 4, Habits(7, pauses=1)), ("qwen3.5", 16, Habits(pauses=1))),
        ("olmo-hybrid", 4, Habits(7, pauses=1)),
        *(("glm-5-next", 4, Habits(7, pauses=1)), ("glm-5-next", 16, Habits(pauses=1))),
        ("qwen4-exp", 4, Habits(7, pauses=1)),
    ],
)
def test_answers_are_the_same_whoever_remembers(name: str, size: int, habits: Habits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "WORTH", 8)
    expected = drive(tiny.engine(name, 16, 2000, prefix_caching=False), asked(), Habits(arrivals=1)).tokens
    for group in asked()[2:5]:
        assert [expected[group.uid, 0]] == tiny.greedy(name, (tuple(group.sequences[0].tokens),), ANSWER_LENGTH)
    engine = tiny.engine(name, size, 1200 // size, ahead=True)
    world, _ = fly(engine, asked(), habits, seed=size)
    assert (world.failed, world.tokens) == ({}, expected)
    assert world.cached > 0
    assert all_pages_free(engine)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_what_is_remembered_takes_half_of_the_memory_at_most(prefix_caching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_step_of_many_tokens_of_which_few_are_drawn_is_measured() -> None:
    """As with --max-batch-size 1: of the part that is measured on a CPU, less than one token would be."""
    *_, sample = memory.size_pool(tiny.engine("llama"), 4, 0.9, 512, 1, 1, 100)
    assert sample.tokens == memory.SAMPLE_TOKENS


def test_what_is_measured_remembers_no_more_than_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where more tokens are drawn, as with drafts, prompts have several: memory for as many prompts would end the start."""
    engine, outcomes, honest = tiny.engine("qwen3.5"), list[Outcome](), memory._run

    def run(engine: Engine, lengths: list[int], choices: int, sampling: Sampling) -> Outcome:
        outcomes.append(honest(engine, lengths, choices, sampling))
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
