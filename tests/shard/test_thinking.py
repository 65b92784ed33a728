"""Thoughts end in time, whatever else is asked of the answer and of the shard, and behind their end all is as if the model had
ended them itself."""

import random
from dataclasses import replace

import pytest

from penstock.shard.engine import Engine
from penstock.shard.sequence import Group, Sampling, Thinking
from penstock.tests.shard import tiny
from penstock.tests.shard.driver import Flying, Habits, World, drive
from penstock.tests.shard.test_against_transformers import all_pages_free, prompt

END, BEGIN, COUNT = 7, 9, 24
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.3, seed=5),
    Sampling(temperature=0.01, top_p=0.9, seed=6, bias=((END, -100.0), (3, 2.0))),
    Sampling(temperature=0.8, min_p=0.1, repetition_penalty=1.3, seed=7, final_logprobs=True),
]


def asked(thinking: Thinking | None, **more: object) -> list[Group]:
    return [tiny.group(uid, prompt(uid, 9), COUNT, one, thinking=thinking, **more) for uid, one in enumerate(SAMPLINGS)]


def plain(groups: list[Group]) -> dict[int, list[int]]:
    return drive(tiny.engine("llama"), groups, Habits()).answers


def expected(most: int) -> dict[int, list[int]]:
    """What is said without a bound, up to it; the end, if it has not come; then what follows these."""
    found = {}
    for uid, said in plain(asked(None)).items():
        begun = said[:most] if END in said[:most] else [*said[:most], END]
        [group] = [one for one in asked(None, continuations=[(0, begun)]) if one.uid == uid]
        found[uid] = begun + drive(tiny.engine("llama"), [group], Habits()).answers[uid]
    return found


@pytest.mark.parametrize("most", [0, 1, 5, COUNT - 1, COUNT])
def test_thoughts_end_in_time(most: int) -> None:
    answers = plain(asked(Thinking(most, END)))
    assert answers == (expected(most) if most < COUNT - 1 else answers)
    for answer in answers.values():
        assert len(answer) == COUNT
        assert END in answer[: most + 1] or most == COUNT


def test_an_end_that_comes_by_itself_is_the_end() -> None:
    for uid, said in plain(asked(None)).items():
        most = 10
        end = said[most - 1]
        first = said.index(end)
        for bound, same in ((first + 1, True), (most, True), (first, True), (max(first - 1, 0), first == 0)):
            [group] = [one for one in asked(Thinking(bound, end)) if one.uid == uid]
            assert (plain([group])[uid] == said) == same or not same


def test_who_does_not_think_is_left_alone() -> None:
    said = plain(asked(None))
    never = max({*range(100)} - {token for answer in said.values() for token in answer})
    assert plain(asked(Thinking(0, END, never))) == said
    for uid, answer in said.items():
        for place, begins in ((0, True), (3, True), (9, False)):
            begin = answer[place]
            [group] = [one for one in asked(Thinking(2, never, begin)) if one.uid == uid]
            found = plain([group])[uid]
            first = answer.index(begin)
            if begins or first < 4:
                assert found.index(never) == first + 3
                assert found.count(never) == 1
            else:
                assert found == answer


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("choices", [1, 3])
def test_neither_pauses_nor_chunks_nor_steps_ahead_change_a_token(ahead: bool, choices: int) -> None:
    groups = asked(Thinking(4, END), choices=choices, top_n=2)
    calm = drive(tiny.engine("llama"), groups, Habits())
    engine = tiny.engine("llama", 4, 150, ahead=ahead)
    shard: Engine | Flying = Flying(engine, random.Random(1)) if ahead else engine
    world: World = drive(shard, groups, Habits(chunk=3, pause=0.2), seed=choices)
    assert world.pauses
    assert (world.tokens, world.failed) == (calm.tokens, {})
    engine.land()
    assert all_pages_free(engine)


def test_what_the_vocabulary_lacks_is_refused() -> None:
    for thinking in (Thinking(1, 100_000), Thinking(1, 1, 100_000)):
        world = drive(tiny.engine("llama"), [replace(one, thinking=thinking) for one in asked(None)], Habits())
        assert len(world.failed) == len(SAMPLINGS)
        assert "what thoughts begin and end with" in world.failed[0]
