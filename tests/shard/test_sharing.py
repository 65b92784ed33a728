"""What sequences share is computed once, and nobody can tell: prefixes, choices, pauses, and pages that are just enough."""

import functools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.shard import sequence
from penstock.shard.engine import Engine
from penstock.shard.pages import PagePool
from penstock.shard.parallel import Ranks
from penstock.shard.prefix import PrefixCache
from penstock.shard.prompts import Prompts
from penstock.shard.sequence import Group, Sampling
from penstock.tests.shard import tiny
from penstock.tests.shard.driver import UNLIMITED, Habits, World, drive
from penstock.tests.shard.paper import POISON, WORDS, Paper, Slots
from penstock.tests.shard.paper import paper as paper  # a fixture
from penstock.tests.shard.test_oracle import COUNT, at_rest, prompt

SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=77)


def family(count: int, longest: int = 40) -> list[tuple[int, ...]]:
    """Prompts of which many begin alike, and some are the same."""
    chance = random.Random(count)
    stems = [prompt(seed, longest) for seed in (1, 2)]
    made = []
    for seed in range(count):
        stem = chance.choice(stems)[: chance.choice([0, 7, 16, 33, longest])]
        made.append((*stem, *prompt(seed, chance.choice([0, 1, 5, 16]))) or (5,))
    return made


def mixed(count: int = 11) -> list[Group]:
    """Greedy ones, seeded ones, and some of four choices."""
    made = []
    for uid, tokens in enumerate(family(count)):
        choices = 4 if uid % 3 == 1 else 1
        sampling = replace(SEEDED, seed=uid) if uid % 3 else Sampling()
        made.append(tiny.group(uid, tokens, COUNT, sampling, choices=choices, prompt_logprobs=uid % 5 == 4))
    return made


@functools.cache
def calm(name: str, count: int = 11) -> dict[tuple[int, int], list[int]]:
    """The answers to `mixed` of an ample pool where nothing is shared and nobody is disturbed."""
    return drive(tiny.engine(name, 16, 2000, prefix_caching=False), mixed(count), Habits()).tokens


def room(groups: Sequence[Group], page_size: int) -> int:
    """Pages for the largest group alone."""
    return max(replace_most(group).worst(page_size) for group in groups)


def replace_most(group: Group) -> Group:
    """As it is at its very end."""
    full = [[0] * (group.max_new_tokens - 1)] * len(group.waiting)
    tokens = group.sequences[0].tokens
    return tiny.group(group.uid, tokens, group.max_new_tokens, continuations=list(enumerate(full)))


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 20), (4, 16), (4, 7), (16, UNLIMITED)])
def test_pauses_in_a_tiny_pool_change_no_token(prefix_caching: bool, page_size: int, chunk: int) -> None:
    """Everybody is paused at least twice, in the prompt or after, and pages are hardly enough for two."""
    groups = mixed()
    expected = calm("llama")
    greedy = [uid for uid in range(len(groups)) if uid % 3 == 0]
    asked = tuple(tuple(groups[uid].sequences[0].tokens) for uid in greedy)
    assert [expected[uid, 0] for uid in greedy] == tiny.greedy("llama", asked, COUNT)
    engine = tiny.engine("llama", page_size, room(groups, page_size) + 8 // page_size, prefix_caching)
    evicted = watch(engine)
    world = drive(engine, groups, Habits(chunk, pauses=2), seed=page_size)
    assert world.tokens == expected
    assert min(world.pauses[uid] for uid in range(len(groups))) >= 2
    assert at_rest(engine)
    assert (world.cached > 100, len(evicted) > 10) == (prefix_caching, prefix_caching)


def watch(engine: Engine) -> list[int]:
    """Pages that are taken from the cache."""
    evicted: list[int] = []
    inner = engine.pool.evicted

    def both(page: int) -> None:
        evicted.append(page)
        inner(page)

    engine.pool.evicted = both
    return evicted


@pytest.mark.parametrize("seed", range(2))
def test_aborts_ends_and_pauses_change_nobodys_tokens(seed: int) -> None:
    groups = mixed(22)
    expected = calm("qwen3", 22)
    engine = tiny.engine("qwen3", 4, room(groups, 4) + 10)
    world = drive(engine, groups, Habits(chunk=16, pause=0.1, cancel=0.2, end=0.3), seed)
    for key, tokens in world.tokens.items():
        whole = key[0] not in world.cancelled and key not in world.ended
        assert tokens == (expected[key] if whole else expected[key][: len(tokens)])
    assert len(world.cancelled) > 2
    assert len(world.ended) > 2
    assert world.pauses.total() > 5
    assert world.failed == {}
    assert at_rest(engine)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_two_ranks_agree_on_every_page(prefix_caching: bool) -> None:
    groups = mixed(8)
    expected = calm("qwen2", 8)

    def work(ranks: Ranks) -> tuple[World, list[int]]:
        engine = tiny.engine_of("qwen2", ranks, 4, room(groups, 4) + 3, prefix_caching)
        evicted = watch(engine)
        return drive(engine, groups, Habits(chunk=9, pauses=2), seed=5), evicted

    (first, evicted), (second, others) = tiny.Threads().run(work)
    assert first.tokens == second.tokens == expected
    assert evicted == others
    assert bool(evicted) == prefix_caching


# Choices


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_choices_are_what_single_requests_with_their_number_get(length: int, prefix_caching: bool) -> None:
    asked = prompt(3, length)
    together = drive(
        tiny.engine("llama", 16, 99, prefix_caching), [tiny.group(1, asked, COUNT, SEEDED, choices=5)], Habits()
    ).tokens
    for choice in range(5):
        single = tiny.group(1, asked, COUNT, SEEDED)
        single.waiting = [choice]
        engine = tiny.engine("llama")
        outcomes = [engine.prefill(1, [single], [(1, 99)], 99, []), *(engine.decode([1]) for _ in range(COUNT - 1))]
        assert [emitted.pick.token for outcome in outcomes for _, emitted in outcome.emitted] == together[1, choice]
    assert len({tuple(tokens) for tokens in together.values()}) > 2


def test_first_tokens_of_choices_are_independent_draws() -> None:
    """Of 3,000 requests with two choices: pairs of tokens come as often as the product of their probabilities says."""
    asked, groups = [3, 1, 4], 3000
    sampling = Sampling(temperature=3.0, top_k=4)
    engine = tiny.engine("llama", 4, 4 * groups)
    many = [tiny.group(uid, asked, 2, replace(sampling, seed=uid), choices=2) for uid in range(groups)]
    outcome = engine.prefill(1, many, [(uid, 3) for uid in range(groups)], 3 * groups, [])
    drawn = [emitted.pick.token for _, emitted in outcome.emitted]
    pairs = Counter(zip(drawn[::2], drawn[1::2], strict=True))
    top = (tiny.expected_logits("llama", asked)[-1] / 3).topk(4)
    chances = dict(zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True))
    expected = {(one, other): groups * chances[one] * chances[other] for one in chances for other in chances}
    assert min(expected.values()) > 5
    assert set(pairs) <= set(expected)
    statistic = sum((pairs[pair] - count) ** 2 / count for pair, count in expected.items())
    assert statistic < 37.7  # chi-square with 15 degrees of freedom: exceeded once in a thousand
    same = torch.tensor([one == other for one, other in zip(drawn[::2], drawn[1::2], strict=True)]).float().mean()
    assert same == pytest.approx(sum(chance**2 for chance in chances.values()), abs=0.04)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_prompt_is_held_once_and_its_last_page_copied(prefix_caching: bool) -> None:
    engine = tiny.engine("llama", 16, 99, prefix_caching)
    outcome = engine.prefill(1, [tiny.group(1, prompt(1, 40), 99, SEEDED, choices=4)], [(1, 99)], 99, [])
    assert outcome.prompt_tokens == 40
    assert outcome.standing == [(1, 2 + 4, 0, 0)]
    assert outcome.free == 99 - 6
    outcome = engine.prefill(1, [tiny.group(2, prompt(2, 32), 99, SEEDED, choices=4)], [(2, 99)], 99, [])
    assert outcome.standing == [(2, 2, 4, 0)]  # nothing to copy
    engine.end([(1, 0), (1, 2)])
    assert engine.pool.free == 99 - 4 - 2
    assert [standing for standing in engine.decode([1]).standing if standing[0] == 1] == [(1, 4, 0, 0)]
    engine.end([(1, 1), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (3, 0)])
    assert at_rest(engine)
    assert engine.books.groups == engine.books.batches == {}


def test_a_choice_that_ends_before_the_prompt_is_computed_is_not_begun() -> None:
    engine = tiny.engine("llama", 4)
    asked = prompt(1, 10)
    engine.prefill(1, [tiny.group(1, asked, 9, SEEDED, choices=3)], [(1, 99)], 7, [])
    engine.end([(1, 0)])
    outcome = engine.prefill(1, [], [(1, 99)], 99, [])
    assert [emitted.choice for _, emitted in outcome.emitted] == [1, 2]


def test_a_choice_that_ends_needs_no_page(paper: type[Paper]) -> None:
    """Not even of a resumed group of which the cache has more than the prompt: its choices part when there is a step, which may
    fail it."""
    engine = paper(9, 2)
    engine.prefill(1, [tiny.group(1, [1, 2, 3, 0, 0], 1)], [(1, 9)], 9, [])
    resumed = tiny.group(2, [1, 2, 3], 6, continuations=[(0, [0, 0, 1]), (1, [1]), (2, [2])])
    engine.prefill(1, [resumed], [], 0, [])
    engine.prefill(2, [tiny.group(3, [3] * 2 * engine.pool.free, 2)], [(3, 99)], 99, [])
    assert not engine.pool.free
    engine.end([(2, 2)])
    assert [sequence.choice for sequence in resumed.sequences] == [0, 1]
    assert [uid for uid, _ in engine.prefill(1, [], [(2, 9)], 9, []).failed] == [2]
    assert engine.decode([2]).failed == []
    engine.filter([3])
    assert engine.pool.free == 9


def test_a_group_whose_choices_all_end_before_they_begin_is_gone() -> None:
    engine = tiny.engine("llama", 4)
    engine.prefill(1, [tiny.group(1, prompt(1, 10), 9, SEEDED, choices=2)], [(1, 99)], 7, [])
    engine.end([(1, 0), (1, 1)])
    assert at_rest(engine)
    assert engine.books.groups == engine.books.batches == {}


def test_a_restored_group_gets_no_more_tokens_than_there_are() -> None:
    engine = tiny.engine("llama", 4, prefix_caching=False)
    again = tiny.group(1, prompt(1, 10), COUNT, SEEDED, continuations=[(choice, [5] * 8) for choice in range(3)])
    outcomes = [engine.prefill(1, groups, [(1, 99)], 8, []) for groups in ([again], [], [], [])]
    assert [outcome.prompt_tokens for outcome in outcomes] == [8, 8, 8, 7]
    assert [lacking for outcome in outcomes for *_, lacking in outcome.standing] == [23, 15, 7, 0]


@pytest.mark.parametrize("computed", [0, 3, 10])
def test_a_restored_group_loses_the_choice_that_computes_its_prompt(computed: int) -> None:
    asked, engine = prompt(1, 10), tiny.engine("llama", 4)
    expected = drive(engine, [tiny.group(1, asked, COUNT, SEEDED, choices=3)], Habits()).tokens
    again = tiny.group(1, asked, COUNT, SEEDED, continuations=[(choice, expected[1, choice][:4]) for choice in range(3)])
    engine = tiny.engine("llama", 4)
    engine.prefill(1, [again], [(1, 99)], computed, [])
    engine.end([(1, 0)])
    assert rest(engine) == {choice: expected[1, choice][4:] for choice in (1, 2)}
    assert at_rest(engine)


def rest(engine: Engine) -> dict[int, list[int]]:
    """Tokens of the choices of group 1, which is restored."""
    tokens: dict[int, list[int]] = {}
    for outcome in [engine.prefill(1, [], [(1, 99)], 99, []), *(engine.prefill(1, [], [(1, 99)], 99, [1]) for _ in range(COUNT))]:
        for _, emitted in outcome.emitted:
            tokens.setdefault(emitted.choice, []).append(emitted.pick.token)
    return tokens


def test_a_restored_group_loses_the_choice_whose_answer_is_cached() -> None:
    """Before a step computes anything of it, as where its grammar is being compiled. In a page with the prompt's end are that
    answer's first tokens, which are nobody else's."""
    asked, engine = prompt(1, 10), tiny.engine("llama", 4)
    expected = drive(engine, [tiny.group(1, asked, COUNT, SEEDED, choices=3)], Habits()).tokens
    again = tiny.group(1, asked, COUNT, SEEDED, continuations=[(choice, expected[1, choice][:4]) for choice in range(3)])
    engine.prefill(1, [again], [], 99, [])
    assert again.sequences[0].computed == 12
    engine.end([(1, 0)])
    assert again.sequences[0].computed == 8
    assert rest(engine) == {choice: expected[1, choice][4:] for choice in (1, 2)}
    assert at_rest(engine)


# Computed once


@pytest.mark.parametrize("cap", [UNLIMITED, 300, 64])
def test_identical_prompts_in_one_step_are_computed_once(paper: type[Paper], cap: int) -> None:
    engine = paper(2000, 16)
    asked = [uid % 7 for uid in range(500)]
    groups = [tiny.group(uid, asked, 9) for uid in range(100)]
    outcome = engine.prefill(1, groups, [(uid, cap) for uid in range(100)], 50_000, [])
    assert len(outcome.emitted) == 100
    assert outcome.prompt_tokens == 500 + 99 * 4  # 31 full pages are found, 4 tokens in the last one are everybody's own
    assert outcome.cached_tokens == 99 * 496
    assert engine.pool.free == 2000 - 31 - 100


@pytest.mark.parametrize("budget", [512, 100, 37])
def test_identical_prompts_in_several_steps_are_computed_once(paper: type[Paper], budget: int) -> None:
    engine = paper(2000, 16)
    groups = [tiny.group(uid, [uid % 7 for uid in range(500)], 9) for uid in range(100)]
    emitted = tokens = 0
    while emitted < 100:
        fresh = [groups.pop() for _ in range(min(7, len(groups)))]
        lacking = [(group.uid, 500) for group in [*engine.books.groups.values(), *fresh] if not group.decodes]
        outcome = engine.prefill(1, fresh, lacking, budget, [])
        assert outcome.prompt_tokens <= budget
        tokens, emitted = tokens + outcome.prompt_tokens, emitted + len(outcome.emitted)
    assert tokens == 500 + 99 * 4


def test_ten_identical_prompts_get_transformers_tokens_from_one_computation() -> None:
    """Full pages only: the last one is computed by everybody, since its last row is wanted."""
    asked = prompt(1, 64)
    engine = tiny.engine("llama")
    outcome = engine.prefill(1, [tiny.group(uid, asked, COUNT) for uid in range(10)], [(uid, 99) for uid in range(10)], 999, [])
    assert outcome.prompt_tokens == 64 + 9 * 16
    tokens = [[emitted.pick.token] for _, emitted in outcome.emitted]
    for _ in range(COUNT - 1):
        for uid, emitted in engine.decode([1]).emitted:
            tokens[uid].append(emitted.pick.token)
    assert tokens == tiny.greedy("llama", (asked,), COUNT) * 10
    assert at_rest(engine)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_second_turn_recomputes_less_than_a_page(page_size: int) -> None:
    engine = tiny.engine("qwen3", page_size)
    asked = prompt(1, 33)
    answer = drive(engine, [tiny.group(1, asked, COUNT)], Habits()).answers[1]
    second = (*asked, *answer, *prompt(2, 9))
    world = drive(engine, [tiny.group(2, second, COUNT)], Habits(arrivals=1))
    seen = len(asked) + COUNT - 1  # the last token of an answer is never computed
    assert world.cached == seen // page_size * page_size
    assert world.answers[2] == tiny.greedy("qwen3", (second,), COUNT)[0]


def test_other_cache_keys_and_no_caching_share_nothing() -> None:
    asked = prompt(1, 33)
    for engine, keys in ((tiny.engine("llama"), "ab"), (tiny.engine("llama", prefix_caching=False), "aa")):
        for uid, key in enumerate(keys):
            engine.prefill(1, [tiny.group(uid, asked, 1, cache_key=key)], [(uid, 99)], 99, [])
            outcome = engine.prefill(1, [tiny.group(9, asked, 1, cache_key=key)], [(9, 99)], 99, [])
            assert outcome.cached_tokens == (32 if "b" in keys else 0)
    engine.clear()
    assert engine.pool.cached == 0


def test_a_cleared_cache_is_empty() -> None:
    engine = tiny.engine("llama")
    engine.prefill(1, [tiny.group(1, prompt(1, 33), 1), tiny.group(2, prompt(2, 33), 9)], [(1, 99), (2, 99)], 99, [])
    assert engine.pool.cached == 2
    engine.clear()
    assert at_rest(engine)
    assert engine.pool.cached == 0
    assert engine.prefill(1, [tiny.group(1, prompt(1, 33), 1)], [(1, 99)], 99, []).cached_tokens == 0


def test_prompt_log_probabilities_are_of_all_tokens_though_they_are_cached() -> None:
    asked = prompt(1, 40)
    engine = tiny.engine("llama")
    for uid in range(2):
        outcome = engine.prefill(1, [tiny.group(uid, asked, 9, prompt_logprobs=True)], [(uid, 99)], 99, [])
        logits = tiny.expected_logits("llama", asked).log_softmax(-1)[:-1]
        expected = logits.gather(1, torch.tensor(asked[1:]).unsqueeze(1)).squeeze(1)
        assert outcome.prompts[0][1] == pytest.approx(expected.tolist(), abs=1e-4)
    assert engine.pool.free == 1024 - 2 - 2  # the second one gave its own full pages for those of the first


# Just enough


def crowd(seed: int) -> list[Group]:
    """Small requests that often meet in the trie, and end early at times."""
    chance = random.Random(seed)
    stem = [chance.randrange(WORDS) for _ in range(12)]
    made = []
    for uid in range(24):
        tokens = stem[: chance.randint(0, 12)] + [chance.randrange(2) for _ in range(chance.randint(1, 9))]
        more: dict[str, Any] = {"choices": chance.choice([1, 1, 2, 4]), "cache_key": chance.choice(["", "", "a"])}
        more["prompt_logprobs"] = chance.random() < 0.1
        end_ids = chance.choice([(), (), (WORDS - 1,)])
        made.append(tiny.group(uid, tokens, chance.randint(1, 14), Sampling(seed=uid % 3), end_ids=end_ids, **more))
    return made


def check_room(paper: type[Paper], seeds: range) -> tuple[int, int]:
    """Runs what is always just admitted; (evictions, pauses)."""
    evictions = pauses = 0
    for seed in seeds:
        chance = random.Random(seed)
        size = chance.choice([1, 2, 3, 4])
        groups = crowd(seed)
        engine = paper(room(groups, size) + chance.randint(0, 12), size, chance.random() < 0.8)
        habits = Habits(chance.choice([1, 3, 8, UNLIMITED]), pause=0.1, pauses=seed % 2, cancel=0.05, end=0.1, join=0.1)
        world = drive(engine, groups, habits, seed)
        assert world.failed == {}
        assert engine.pool.free == engine.pool.pages
        evictions, pauses = evictions + engine.evictions, pauses + world.pauses.total()
    return evictions, pauses


def test_who_is_admitted_only_where_there_is_room_never_fills_the_pool(paper: type[Paper]) -> None:
    evictions, pauses = check_room(paper, range(70))
    assert evictions > 1000
    assert pauses > 1000


def test_answers_do_not_depend_on_who_shares(paper: type[Paper]) -> None:
    for seed in range(20):
        alone = drive(paper(5000, 4, prefix_caching=False), crowd(seed), Habits(), seed).tokens
        groups = crowd(seed)
        assert drive(paper(room(groups, 3) + 5, 3), groups, Habits(5, pauses=2), seed).tokens == alone


def one_step(right: Any) -> Any:
    return lambda self, size: (lambda held, grow, lacking: (held, max(0, grow - 1), lacking))(*right(self, size))


def one_less(right: Any) -> Any:
    return lambda self, size: max(1, right(self, size) - 1)


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [(Group, "standing", one_step), (Group, "worst", one_less), (sequence, "AHEAD", lambda right: 1)],
)
def test_the_check_finds_a_bound_that_is_too_low(
    paper: type[Paper], monkeypatch: pytest.MonkeyPatch, place: Any, name: str, fault: Any
) -> None:
    monkeypatch.setattr(Paper, "audit", lambda self: None)
    monkeypatch.setattr(place, name, fault(getattr(place, name)))
    with pytest.raises(AssertionError, match="pool is full"):
        check_room(paper, range(60))


def too_early(right: Any) -> Any:
    """Announces a page that the step will not fill."""

    def announce(self: PrefixCache, holder: Any) -> None:
        holder.computed += 1
        right(self, holder)
        holder.computed -= 1

    return announce


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (PrefixCache, "announce", too_early),
        (PrefixCache, "announce", lambda right: PrefixCache.publish),  # gives up a page that the step writes to
        (PagePool, "taken", lambda right: lambda self: []),  # what was in a page stays there
        (Slots, "copy", lambda right: lambda *rest: None),
        (Prompts, "_part", lambda right: lambda self, first, others: right(self, first, others[:-1])),  # forgets a choice
    ],
)
def test_the_check_finds_a_slot_that_holds_something_else(
    paper: type[Paper], monkeypatch: pytest.MonkeyPatch, place: type, name: str, fault: Any
) -> None:
    monkeypatch.setattr(place, name, fault(getattr(place, name)))
    with pytest.raises((AssertionError, KeyError, IndexError)):
        check_room(paper, range(20))


# Failures


def check_failures(paper: type[Paper], seeds: range) -> None:
    """Groups whose logits are not finite, among others that begin alike."""
    for seed in seeds:
        groups = crowd(seed)
        for number, group in enumerate(groups[:6]):
            tokens = group.sequences[0].tokens
            tokens[min(len(tokens) - 1, 3 * number)] = POISON
        engine = paper(room(groups, 2) + 20, 2)
        world = drive(engine, groups, Habits(4, pause=0.05), seed)
        assert set(world.failed) == set(range(6))
        assert engine.books.prefixes is not None
        found = [engine.cache.content[2 * page + 1] for page in engine.books.prefixes._nodes]
        assert not any(POISON in content[1] for content in found if content)
        assert engine.pool.free == engine.pool.pages


def test_what_fails_is_found_by_nobody(paper: type[Paper]) -> None:
    check_failures(paper, range(30))


def test_the_check_finds_what_failed_and_was_not_withdrawn(paper: type[Paper], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "withdraw", lambda self, holder: None)
    with pytest.raises(AssertionError):
        check_failures(paper, range(5))
