"""The thinking budget: thinking ends within its number of tokens, with any sampling parameters, preemption and overlapped steps;
the tokens after a forced end are as if the model had ended its thinking itself."""

import random
from dataclasses import replace

import pytest

from penstock.shard.engine import Engine
from penstock.shard.sequence import Group, Sampling, Thinking
from penstock.tests.shard import tiny
from penstock.tests.shard.driver import OverlappingEngine, Results, Traffic, drive
from penstock.tests.shard.test_against_transformers import all_pages_free, prompt

END, BEGIN, COUNT = 7, 9, 24
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.3, seed=5),
    Sampling(temperature=0.01, top_p=0.9, seed=6, bias=((END, -100.0), (3, 2.0))),
    Sampling(temperature=0.8, min_p=0.1, repetition_penalty=1.3, seed=7, final_logprobs=True),
]


def sample_groups(thinking: Thinking | None, **more: object) -> list[Group]:
    return [tiny.group(uid, prompt(uid, 9), COUNT, one, thinking=thinking, **more) for uid, one in enumerate(SAMPLINGS)]


def plain_answers(groups: list[Group]) -> dict[int, list[int]]:
    return drive(tiny.engine("llama"), groups, Traffic()).answers


def expected(budget: int) -> dict[int, list[int]]:
    """The tokens without a budget, cut at the budget; the end token, if it is not among them; then the continuation of these."""
    found = {}
    for uid, answer in plain_answers(sample_groups(None)).items():
        forced = answer[:budget] if END in answer[:budget] else [*answer[:budget], END]
        [group] = [one for one in sample_groups(None, continuations=[(0, forced)]) if one.uid == uid]
        found[uid] = forced + drive(tiny.engine("llama"), [group], Traffic()).answers[uid]
    return found


@pytest.mark.parametrize("budget", [0, 1, 5, COUNT - 1, COUNT])
def test_thinking_ends_within_its_budget(budget: int) -> None:
    answers = plain_answers(sample_groups(Thinking(budget, END)))
    assert answers == (expected(budget) if budget < COUNT - 1 else answers)
    for answer in answers.values():
        assert len(answer) == COUNT
        assert END in answer[: budget + 1] or budget == COUNT


def test_end_token_sampled_within_the_budget_changes_nothing() -> None:
    for uid, answer in plain_answers(sample_groups(None)).items():
        budget = 10
        end = answer[budget - 1]
        first = answer.index(end)
        for budget_tried, unchanged in ((first + 1, True), (budget, True), (first, True), (max(first - 1, 0), first == 0)):
            [group] = [one for one in sample_groups(Thinking(budget_tried, end)) if one.uid == uid]
            assert (plain_answers([group])[uid] == answer) == unchanged or not unchanged


def test_answers_without_thinking_are_unchanged() -> None:
    answers = plain_answers(sample_groups(None))
    unused = max({*range(100)} - {token for answer in answers.values() for token in answer})
    assert plain_answers(sample_groups(Thinking(0, END, unused))) == answers
    for uid, answer in answers.items():
        for place, begins in ((0, True), (3, True), (9, False)):
            begin = answer[place]
            [group] = [one for one in sample_groups(Thinking(2, unused, begin)) if one.uid == uid]
            found = plain_answers([group])[uid]
            first = answer.index(begin)
            if begins or first < 4:
                assert found.index(unused) == first + 3
                assert found.count(unused) == 1
            else:
                assert found == answer


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("choices", [1, 3])
def test_thinking_tokens_are_the_same_with_pauses_chunks_and_overlapped_steps(ahead: bool, choices: int) -> None:
    groups = sample_groups(Thinking(4, END), choices=choices, top_n=2)
    undisturbed = drive(tiny.engine("llama"), groups, Traffic())
    engine = tiny.engine("llama", 4, 150, ahead=ahead)
    shard: Engine | OverlappingEngine = OverlappingEngine(engine, random.Random(1)) if ahead else engine
    results: Results = drive(shard, groups, Traffic(chunk=3, pause=0.2), seed=choices)
    assert results.pauses
    assert (results.tokens, results.failed) == (undisturbed.tokens, {})
    engine.land()
    assert all_pages_free(engine)


def test_thinking_tokens_outside_the_vocabulary_are_refused() -> None:
    for thinking in (Thinking(1, 100_000), Thinking(1, 1, 100_000)):
        results = drive(tiny.engine("llama"), [replace(one, thinking=thinking) for one in sample_groups(None)], Traffic())
        assert len(results.failed) == len(SAMPLINGS)
        assert "what thoughts begin and end with" in results.failed[0]
