"""Beam search against transformers' generate(num_beams=...): the same answers in the same order with the same scores, also in mixed
traffic, in small pools where groups are paused, and on two ranks. Those tests run a part of the cases each; with
PENSTOCK_BEAM_PARTS=1 all of them.
"""

import functools
import os
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers

from penstock.shard.decoding.beam import BeamSearch
from penstock.shard.decoding.expansion import Beams, Candidate, expand
from penstock.shard.decoding.hypotheses import Hypothesis, Path, Search, Stop
from penstock.shard.decoding.sampler import Row, pick
from penstock.shard.decoding.stops import StopStrings
from penstock.shard.engine import Engine
from penstock.shard.parallel import Ranks
from penstock.shard.sequence import Group, Sampling
from penstock.tests.shard import tiny
from penstock.tests.shard.driver import UNLIMITED, Results, Traffic, drive
from penstock.tests.shard.test_against_transformers import all_pages_free, prompt

NAME = "llama"
PROMPTS = 16  # for each combination of parameters
COMBINATIONS = 65
PARTS = int(os.environ.get("PENSTOCK_BEAM_PARTS", "6"))
NEVER = 1 << 20  # a token outside the vocabulary: without end tokens, transformers would take the model's own
STOPS: dict[Stop, bool | str] = {Stop.WORSE: False, Stop.FULL: True, Stop.NEVER: "never"}


@dataclass(frozen=True)
class Case:
    """A combination of parameters of beam search."""

    seed: int
    length: int  # of the prompts
    width: int
    wanted: int
    count: int
    penalty: float
    stop: Stop
    end_ids: tuple[int, ...]
    repetition: float
    min_tokens: int

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [prompt(self.seed * PROMPTS + index, self.length) for index in range(PROMPTS)]

    def groups(self, first: int = 0) -> list[Group]:
        """The groups as the shard receives them."""
        search = Search(self.width, self.wanted, self.penalty, self.stop)
        sampling = Sampling(repetition_penalty=self.repetition)
        return [
            tiny.group(
                first + index, tokens, self.count, sampling, end_ids=self.end_ids, min_new_tokens=self.min_tokens, search=search
            )
            for index, tokens in enumerate(self.prompts)
        ]


@functools.cache
def cases(count: int) -> list[Case]:
    """Random cases. End tokens are among the model's most frequent tokens."""
    chance = random.Random(count)
    found = []
    for seed in range(count):
        width = chance.choice([2, 2, 3, 4, 4, 5, 6, 7, 8])
        found.append(
            Case(
                seed=seed,
                length=chance.choice([1, 3, 8, 15, 16, 17, 30]),
                width=width,
                wanted=chance.randint(1, width),
                count=(count := chance.choice([1, 2, 5, 12, 20])),
                penalty=chance.choice([1.0, 1.0, 0.0, 2.0, -1.0, 0.7]),
                stop=chance.choice(list(Stop)),
                end_ids=tuple(chance.sample(frequent(), chance.choice([0, 1, 1, 2, 3]))),
                repetition=chance.choice([1.0, 1.0, 1.0, 1.3]),
                min_tokens=chance.choice([0, 0, 0, 1]) * min(count, 3),
            )
        )
    return found


@functools.cache
def frequent() -> list[int]:
    """The model's most frequent tokens."""
    prompts = tuple(prompt(seed, 8) for seed in range(40))
    answer_tokens = [token for answer in tiny.greedy(NAME, prompts, 8) for token in answer]
    return sorted(set(answer_tokens), key=lambda token: (-answer_tokens.count(token), token))[:12]


@functools.cache
@torch.inference_mode()
def by_transformers(case: Case) -> list[list[tuple[list[int], float]]]:
    """For each prompt the answers of transformers with their scores."""
    given = torch.tensor(case.prompts)
    settings = transformers.GenerationConfig(
        num_beams=case.width,
        num_return_sequences=case.wanted,
        max_new_tokens=case.count,
        length_penalty=case.penalty,
        early_stopping=STOPS[case.stop],
        eos_token_id=list(case.end_ids) or [NEVER],
        min_new_tokens=(case.min_tokens if case.end_ids else 0) or None,
        repetition_penalty=case.repetition,
        pad_token_id=0,
        bos_token_id=None,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    model = tiny.reference(NAME)
    found = model.generate(given, attention_mask=torch.ones_like(given), generation_config=settings)
    answers = []
    for row, beams, score in zip(found.sequences, found.beam_indices, found.sequences_scores, strict=True):
        answers.append((row[case.length :][: int((beams >= 0).sum())].tolist(), float(score)))
    return [answers[start : start + case.wanted] for start in range(0, len(answers), case.wanted)]


def answers_of(results: Results, group: Group) -> list[tuple[list[int], float]]:
    """A group's answers from the shard with their scores."""
    return [(results.tokens[group.uid, choice], score) for choice, score in enumerate(results.scores[group.uid])]


def same(found: Sequence[tuple[list[int], float]], expected: Sequence[tuple[list[int], float]]) -> bool:
    """If two scores are equal but for rounding, either order is right. A negative length penalty makes scores of hundreds."""
    if len(found) != len(expected):
        return False
    if any(abs(ours - theirs) > 1e-4 + 2e-6 * abs(theirs) for (_, ours), (_, theirs) in zip(found, expected, strict=True)):
        return False
    near = [score for (ours, score), (theirs, _) in zip(found, expected, strict=True) if ours != theirs]
    tied = sorted(tokens for tokens, score in found if any(abs(score - one) < 1e-5 for one in near))
    return tied == sorted(tokens for tokens, score in expected if any(abs(score - one) < 1e-5 for one in near))


def with_transformers_answers(part_of_cases: Sequence[Case]) -> list[tuple[Case, list[list[tuple[list[int], float]]]]]:
    """Cases and transformers' answers to them."""
    return [(case, by_transformers(case)) for case in part_of_cases]


def check(results: Results, cases_and_answers: Sequence[tuple[Case, Any]]) -> None:
    """Group i * PROMPTS + j is of prompt j of case i."""
    assert not results.failed
    for index, (case, expected) in enumerate(cases_and_answers):
        for group, answers in zip(case.groups(index * PROMPTS), expected, strict=True):
            assert same(answers_of(results, group), answers), (case, group.uid, answers_of(results, group), answers)


def test_a_thousand_beam_searches_match_transformers() -> None:
    cases_and_answers = with_transformers_answers(cases(COMBINATIONS))
    engine = tiny.engine(NAME, 16, 4000)
    groups = [group for index, (case, _) in enumerate(cases_and_answers) for group in case.groups(index * PROMPTS)]
    results = drive(engine, groups, Traffic())
    assert len(groups) > 1000
    check(results, cases_and_answers)
    assert all_pages_free(engine)


def other_groups(first: int, count: int = 12) -> list[Group]:
    """Other groups in the batch: greedy ones, and seeded ones with one choice or three."""
    groups = []
    for index in range(count):
        sampling = Sampling(temperature=0.9, top_p=0.95, seed=index) if index % 2 else Sampling()
        tokens = prompt(500 + index, 3 + 5 * (index % 4))
        groups.append(tiny.group(first + index, tokens, 15, sampling, choices=3 if index % 4 == 1 else 1))
    return groups


def part_of_cases(part: int, parts: int = PARTS) -> list[tuple[Case, list[list[tuple[list[int], float]]]]]:
    """A part of the cases, with transformers' answers."""
    return with_transformers_answers(cases(COMBINATIONS)[part % parts :: parts])


def mixed_with_other_groups(cases_and_answers: Sequence[tuple[Case, Any]]) -> tuple[list[Group], list[Group]]:
    """The beam searches together with other groups, shuffled; and the other groups alone."""
    beams = [group for index, (case, _) in enumerate(cases_and_answers) for group in case.groups(index * PROMPTS)]
    others = other_groups(len(beams))
    together = beams + others
    random.Random(len(beams)).shuffle(together)
    return together, others


@functools.cache
def others_without_beams() -> dict[int, list[int]]:
    """The other groups' tokens without beam searches in the batch, by 100 * index + choice."""
    results = drive(tiny.engine(NAME, 16, 2000, prefix_caching=False), other_groups(0), Traffic())
    return {100 * uid + choice: tokens for (uid, choice), tokens in results.tokens.items()}


def check_others(results: Results, first: int) -> None:
    for uid_and_choice, tokens in others_without_beams().items():
        assert results.tokens[first + uid_and_choice // 100, uid_and_choice % 100] == tokens


def most_pages(groups: Sequence[Group], page_size: int) -> int:
    """Pages that the largest group holds at its full length, if it runs alone."""
    most = 0
    for group in groups:
        shared = group.prompt_length // page_size
        total = -(-(group.prompt_length + group.max_new_tokens - 1) // page_size)
        width = group.search.width if group.search else len(group.waiting)
        most = max(most, shared + width * (total - shared))
    return most


@pytest.mark.parametrize(
    ("part", "page_size", "chunk", "prefix_caching"),
    [(0, 16, 7, True), (1, 4, 7, False), (2, 1, 7, True), (3, 4, UNLIMITED, True), (4, 1, UNLIMITED, False)],
)
def test_beam_searches_in_mixed_traffic_match_transformers(part: int, page_size: int, chunk: int, prefix_caching: bool) -> None:
    """Other groups aren't changed either. Groups are paused, and the pool is hardly larger than the largest group needs."""
    cases_and_answers = part_of_cases(part)
    groups, others = mixed_with_other_groups(cases_and_answers)
    engine = tiny.engine(NAME, page_size, most_pages(groups, page_size) + 8 // page_size, prefix_caching)
    results = drive(engine, groups, Traffic(chunk, pause=0.02), seed=part)
    check(results, cases_and_answers)
    check_others(results, others[0].uid)
    assert sum(1 for group in groups if group.search and results.pauses[group.uid]) > len(groups) // 10
    assert all_pages_free(engine)


def test_beam_searches_on_two_ranks_match_transformers() -> None:
    cases_and_answers = part_of_cases(5)
    groups, others = mixed_with_other_groups(cases_and_answers)
    pages = most_pages(groups, 4) + 2

    def work(ranks: Ranks) -> tuple[Results, bool]:
        engine = tiny.rank_engine(NAME, ranks, 4, pages)
        return drive(engine, groups, Traffic(16, pause=0.02), seed=5), all_pages_free(engine)

    (results, first), (other_rank, second) = tiny.ThreadedRanks().run(work)
    check(results, cases_and_answers)
    check_others(results, others[0].uid)
    assert other_rank.tokens == results.tokens
    assert (first, second) == (True, True)


def test_pages_stay_within_their_bound_and_are_freed_at_any_end() -> None:
    """Never more than as many independent continuations of the prompt would need; only partial pages are copied."""
    for index, (case, _) in enumerate(part_of_cases(0, 5)):
        for page_size in (1, 4, 16):
            [group, *_] = case.groups()
            engine = tiny.engine(NAME, page_size, 600, prefix_caching=False)
            peak, forks = record_pages_and_forks(engine)
            results = drive(engine, [group], Traffic(cancel=0.1 * (index % 2)), seed=index)
            assert results.cancelled or results.scores
            bound = -(-case.length // page_size) + case.width * (1 + -(-case.count // page_size))
            assert max(peak) <= bound
            assert engine.books.forks.copied <= forks[0] * (page_size - 1)
            assert all_pages_free(engine)


def record_pages_and_forks(engine: Engine) -> tuple[list[int], list[int]]:
    """Records the pages held whenever some are taken, and the number of forks."""
    peak, forks = [0], [0]
    take, fork = engine.pool.take, engine.books.forks.fork

    def taken(count: int) -> list[int]:
        pages = take(count)
        peak.append(engine.pool.pages - engine.pool.free)
        return pages

    def forked(group: Group, children: Sequence[Candidate]) -> None:
        forks[0] += len(children)
        fork(group, children)

    engine.pool.take, engine.books.forks.fork = taken, forked  # type: ignore[method-assign]
    return peak, forks


def test_sampled_beams_depend_only_on_their_seed() -> None:
    """Whatever else is in the batch; other seeds sample other beams."""

    def groups(first: int) -> list[Group]:
        search = Search(4, 4)
        return [
            tiny.group(first + seed, prompt(3, 9), 12, Sampling(temperature=1.5, top_k=40, seed=seed), search=search)
            for seed in range(8)
        ]

    alone = [drive(tiny.engine(NAME), [group], Traffic()) for group in groups(0)]
    expected = [answers_of(results, group) for results, group in zip(alone, groups(0), strict=True)]
    others = other_groups(100)
    engine = tiny.engine(NAME, 4, 60)
    results = drive(engine, groups(0) + others, Traffic(7, pause=0.05), seed=1)
    assert [[tokens for tokens, _ in answers_of(results, group)] for group in groups(0)] == [
        [tokens for tokens, _ in answers] for answers in expected
    ]
    assert len({tuple(answers[0][0]) for answers in expected}) == 8


@pytest.mark.parametrize("stop", [Stop.WORSE, Stop.NEVER])
def test_search_ends_when_the_best_beam_only_ties_the_worst_kept_hypothesis(stop: Stop) -> None:
    """As in transformers, where the search continues only for better beams."""
    kept = [Hypothesis(array("I", [1]), Path(), score) for score in (-0.5, -1.0)]
    search = Search(2, 2, 0.0, stop, kept=kept)
    assert search.over(-1.0, 3, 9)
    assert search.over(-1.5, 3, 9)
    assert not search.over(-0.75, 3, 9)
    assert not Search(3, 2, 0.0, stop, kept=kept).over(-1.5, 3, 9), "fewer hypotheses are kept than the search is wide"


@pytest.mark.parametrize("score", [-1.0, -2.0])
def test_only_the_kept_one_of_two_equal_complete_beams_is_reported(score: float) -> None:
    """Of two with equal scores only one is kept: beside a better one, or beside one that had the same score before."""
    group = tiny.group(1, [4, 5], 9, end_ids=(7, 8), search=Search(2, 2, 0.0, watched=True))
    assert group.search is not None
    group.search.kept = [Hypothesis(array("I", [1]), Path(score, array("f", [score])), score)]
    verdict = BeamSearch().judge(group, [Candidate(token, -2.0, score=-2.0) for token in (7, 8, 9, 10)])
    assert verdict.grown is not None
    assert verdict.grown.complete == [(0, 7, -2.0)]


@pytest.mark.parametrize(
    ("answer", "token", "stop", "expected"),
    [
        ("a", "b", "abcdefgh", False),
        ("abcdefg", "h", "abcdefgh", True),
        ("xabcdefg", "h", "abcdefgh", True),
        ("bcdefg", "h", "abcdefgh", False),  # the prompt has the beginning, but doesn't count
        ("", "ab", "b", True),
        ("", "b", "ab", False),
        ("ac", "b", "ab", False),
        ("ü", "ber", "über", True),
        ("a\0\0\0\0\0", "b", "ab", True),  # special tokens, which have no text
        ("a\0\0\0\0\0", "bcd", "ab", True),
        ("\0\0", "b", "ab", False),
    ],
)
def test_stop_strings_complete_a_text_at_the_token_that_ends_them(answer: str, token: str, stop: str, expected: bool) -> None:
    """Tokens are single characters here, except the new one; \\0 is a special token."""

    class Characters:
        def bytes_of(self, tokens: Sequence[int]) -> bytes:
            return b"".join(token.encode() if place == NEVER else chr(place).encode() for place in tokens if place)

    stops = StopStrings(Characters())
    for prompt_text in ("a", "abcdefghijkl"):
        tokens = [ord(letter) for letter in prompt_text + answer]
        assert stops.completed_by(tokens, len(prompt_text), NEVER, [stop]) == expected
        assert stops.completed_by(tokens, len(prompt_text), NEVER, ["no", stop, "neither"]) == expected


def test_check_catches_a_wrong_length_in_final_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of complete beams are divided by their length, end token included; here the length is 1 less."""
    cases_and_answers = part_of_cases(0, 20)
    groups = [group for index, (case, _) in enumerate(cases_and_answers) for group in case.groups(index * PROMPTS)]
    original = Search.final
    monkeypatch.setattr(Search, "final", lambda self, score, length: original(self, score, max(1, length - 1)))
    with pytest.raises(AssertionError):
        check(drive(tiny.engine(NAME), groups, Traffic()), cases_and_answers)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(repetition_penalty=1.3), Sampling(temperature=0.8, seed=2)])
def test_top_alternatives_of_beams_have_the_models_own_logprobs(sampling: Sampling) -> None:
    """Like the beams' log-probabilities: penalties, temperature and final_logprobs change only the scores."""
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(3))
    rows = [Row(replace(sampling, final_logprobs=True), [4, 7], 1, rank, top_n=3) for rank in range(2)]
    [found] = expand(logits, [Beams(rows, [-1.0, -2.0], 4, 2, frozenset())]).pending().take()
    for one in found:
        assert isinstance(one, Candidate)
        values, ids = logits[one.row].log_softmax(-1).topk(3)
        assert [id for id, _ in one.top] == ids.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-5)
        assert one.logprob == pytest.approx(float(logits[one.row].log_softmax(-1)[one.token]), abs=1e-5)


@pytest.mark.parametrize("given", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"typical_p": 0.5}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_other_beams_continue_when_a_grammar_mask_forbids_all_tokens_of_one(temperature: float, given: dict[str, Any]) -> None:
    logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    rows = [Row(Sampling(temperature=temperature, seed=1, **given), [1], 1, rank) for rank in range(2)]
    for dead in (0, 1):
        mask = torch.full((2, 2), -1, dtype=torch.int32)
        mask[dead] = 0
        [found] = expand(logits, [Beams(rows, [-1.0, -2.0], 4, 2, frozenset())], mask).pending().take()
        assert {one.row for one in found if isinstance(one, Candidate)} == {1 - dead}
        assert None not in found


@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_ties_between_candidates_do_not_depend_on_a_wider_search_in_the_batch(penalty: float) -> None:
    for seed in range(40):
        logits = (torch.randn(10, 300, generator=torch.Generator().manual_seed(seed)) * 3).bfloat16().float()

        def rows(count: int) -> list[Row]:
            return [Row(Sampling(repetition_penalty=penalty), [1], 1, rank) for rank in range(count)]

        mine = Beams(rows(2), [0.0, -0.25], 4, 2, frozenset({2}))
        other = Beams(rows(8), [0.0] * 8, 16, 8, frozenset({2}))
        alone, among = expand(logits[:2], [mine]), expand(logits, [mine, other])
        assert alone.pending().take()[0] == among.pending().take()[0]


@pytest.mark.parametrize(("filters", "more_alternatives"), [({"top_k": 1}, 5), ({"top_k": 1}, 20), ({"min_p": 0.4}, 20), ({}, 20)])
def test_top_alternatives_do_not_depend_on_a_larger_top_n_in_the_batch(filters: dict[str, Any], more_alternatives: int) -> None:
    """Both for the filtered distribution, in which most tokens are equally impossible, and for the model's own."""
    logits = (torch.randn(2, 2048, generator=torch.Generator().manual_seed(0)) * 2).bfloat16().float()
    for final in (False, True):
        mine = Row(Sampling(temperature=1.0, seed=1, final_logprobs=final, **filters), [1], 1, 0, top_n=3)
        other = Row(Sampling(temperature=1.0, seed=2, final_logprobs=final, top_k=5), [1], 1, 0, top_n=more_alternatives)
        alone, among = pick(logits[:1], [mine])[0], pick(logits, [mine, other])[0]
        assert alone is not None
        assert among is not None
        assert alone.top == among.top
