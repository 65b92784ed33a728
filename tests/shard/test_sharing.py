"""Sharing of KV pages between sequences (prefix cache, choices of one request), with preemption and pools that are just large
enough: shared prefixes are computed once, and no token changes. `audited_engine` checks the content of every slot. Planted faults
show that the checks find them."""

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
from penstock.tests.shard.audited_engine import POISON, VOCABULARY, AuditedEngine, FakeCache
from penstock.tests.shard.audited_engine import audited_engine as audited_engine  # a fixture
from penstock.tests.shard.driver import UNLIMITED, Results, Traffic, drive
from penstock.tests.shard.test_against_transformers import ANSWER_LENGTH, all_pages_free, prompt

SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=77)


def prompts_with_common_prefixes(count: int, longest: int = 40) -> list[tuple[int, ...]]:
    """Prompts of which many share a prefix, and some are identical."""
    chance = random.Random(count)
    stems = [prompt(seed, longest) for seed in (1, 2)]
    result = []
    for seed in range(count):
        stem = chance.choice(stems)[: chance.choice([0, 7, 16, 33, longest])]
        result.append((*stem, *prompt(seed, chance.choice([0, 1, 5, 16]))) or (5,))
    return result


def mixed_groups(count: int = 11) -> list[Group]:
    """Greedy requests, seeded ones, and some with four choices."""
    result = []
    for uid, tokens in enumerate(prompts_with_common_prefixes(count)):
        choices = 4 if uid % 3 == 1 else 1
        sampling = replace(SEEDED, seed=uid) if uid % 3 else Sampling()
        result.append(tiny.group(uid, tokens, ANSWER_LENGTH, sampling, choices=choices, prompt_logprobs=uid % 5 == 4))
    return result


@functools.cache
def undisturbed_tokens(name: str, count: int = 11) -> dict[tuple[int, int], list[int]]:
    """The tokens of `mixed_groups` in a large pool without prefix caching and preemption."""
    return drive(tiny.engine(name, 16, 2000, prefix_caching=False), mixed_groups(count), Traffic()).tokens


def pages_of_largest_group(groups: Sequence[Group], page_size: int) -> int:
    """Pages that the largest group needs if it runs alone."""
    return max(at_full_length(group).worst(page_size) for group in groups)


def at_full_length(group: Group) -> Group:
    """The group as it is before its last token."""
    full = [[0] * (group.max_new_tokens - 1)] * len(group.waiting)
    tokens = group.sequences[0].tokens
    return tiny.group(group.uid, tokens, group.max_new_tokens, continuations=list(enumerate(full)))


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 20), (4, 16), (4, 7), (16, UNLIMITED)])
def test_pauses_in_a_tiny_pool_change_no_token(prefix_caching: bool, page_size: int, chunk: int) -> None:
    """Every group is paused at least twice, in its prompt or later, and the pool is hardly large enough for two."""
    groups = mixed_groups()
    expected = undisturbed_tokens("llama")
    greedy = [uid for uid in range(len(groups)) if uid % 3 == 0]
    greedy_prompts = tuple(tuple(groups[uid].sequences[0].tokens) for uid in greedy)
    assert [expected[uid, 0] for uid in greedy] == tiny.greedy("llama", greedy_prompts, ANSWER_LENGTH)
    engine = tiny.engine("llama", page_size, pages_of_largest_group(groups, page_size) + 8 // page_size, prefix_caching)
    evicted = record_evictions(engine)
    results = drive(engine, groups, Traffic(chunk, pauses=2), seed=page_size)
    assert results.tokens == expected
    assert min(results.pauses[uid] for uid in range(len(groups))) >= 2
    assert all_pages_free(engine)
    assert (results.cached > 100, len(evicted) > 10) == (prefix_caching, prefix_caching)


def record_evictions(engine: Engine) -> list[int]:
    """The pages that are evicted from the prefix cache from now on."""
    evicted: list[int] = []
    inner = engine.pool.evicted

    def both(page: int) -> None:
        evicted.append(page)
        inner(page)

    engine.pool.evicted = both
    return evicted


@pytest.mark.parametrize("seed", range(2))
def test_cancellations_ended_choices_and_pauses_change_no_other_tokens(seed: int) -> None:
    groups = mixed_groups(22)
    expected = undisturbed_tokens("qwen3", 22)
    engine = tiny.engine("qwen3", 4, pages_of_largest_group(groups, 4) + 10)
    results = drive(engine, groups, Traffic(chunk=16, pause=0.1, cancel=0.2, end=0.3), seed)
    for key, tokens in results.tokens.items():
        whole = key[0] not in results.cancelled and key not in results.ended
        assert tokens == (expected[key] if whole else expected[key][: len(tokens)])
    assert len(results.cancelled) > 2
    assert len(results.ended) > 2
    assert results.pauses.total() > 5
    assert results.failed == {}
    assert all_pages_free(engine)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_two_ranks_evict_the_same_pages(prefix_caching: bool) -> None:
    groups = mixed_groups(8)
    expected = undisturbed_tokens("qwen2", 8)

    def work(ranks: Ranks) -> tuple[Results, list[int]]:
        engine = tiny.rank_engine("qwen2", ranks, 4, pages_of_largest_group(groups, 4) + 3, prefix_caching)
        evicted = record_evictions(engine)
        return drive(engine, groups, Traffic(chunk=9, pauses=2), seed=5), evicted

    (first, evicted), (second, others) = tiny.ThreadedRanks().run(work)
    assert first.tokens == second.tokens == expected
    assert evicted == others
    assert bool(evicted) == prefix_caching


# Choices


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_choices_equal_single_requests_with_the_same_choice_number(length: int, prefix_caching: bool) -> None:
    prompt_tokens = prompt(3, length)
    together = drive(
        tiny.engine("llama", 16, 99, prefix_caching), [tiny.group(1, prompt_tokens, ANSWER_LENGTH, SEEDED, choices=5)], Traffic()
    ).tokens
    for choice in range(5):
        single = tiny.group(1, prompt_tokens, ANSWER_LENGTH, SEEDED)
        single.waiting = [choice]
        engine = tiny.engine("llama")
        outcomes = [engine.prefill(1, [single], [(1, 99)], 99, []), *(engine.decode([1]) for _ in range(ANSWER_LENGTH - 1))]
        assert [emitted.pick.token for outcome in outcomes for _, emitted in outcome.emitted] == together[1, choice]
    assert len({tuple(tokens) for tokens in together.values()}) > 2


def test_first_tokens_of_choices_are_independent_draws() -> None:
    """3,000 requests with two choices: pairs of tokens are as frequent as the product of their probabilities."""
    prompt_tokens, groups = [3, 1, 4], 3000
    sampling = Sampling(temperature=3.0, top_k=4)
    engine = tiny.engine("llama", 4, 4 * groups)
    many = [tiny.group(uid, prompt_tokens, 2, replace(sampling, seed=uid), choices=2) for uid in range(groups)]
    outcome = engine.prefill(1, many, [(uid, 3) for uid in range(groups)], 3 * groups, [])
    drawn = [emitted.pick.token for _, emitted in outcome.emitted]
    pairs = Counter(zip(drawn[::2], drawn[1::2], strict=True))
    top = (tiny.expected_logits("llama", prompt_tokens)[-1] / 3).topk(4)
    chances = dict(zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True))
    expected = {(one, other): groups * chances[one] * chances[other] for one in chances for other in chances}
    assert min(expected.values()) > 5
    assert set(pairs) <= set(expected)
    statistic = sum((pairs[pair] - count) ** 2 / count for pair, count in expected.items())
    assert statistic < 37.7  # chi-square with 15 degrees of freedom: exceeded once in a thousand
    same = torch.tensor([one == other for one, other in zip(drawn[::2], drawn[1::2], strict=True)]).float().mean()
    assert same == pytest.approx(sum(chance**2 for chance in chances.values()), abs=0.04)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_choices_share_the_prompts_full_pages_and_copy_its_last_page(prefix_caching: bool) -> None:
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
    assert all_pages_free(engine)
    assert engine.books.groups == engine.books.batches == {}


def test_choice_ended_before_the_prompt_is_computed_emits_nothing() -> None:
    engine = tiny.engine("llama", 4)
    prompt_tokens = prompt(1, 10)
    engine.prefill(1, [tiny.group(1, prompt_tokens, 9, SEEDED, choices=3)], [(1, 99)], 7, [])
    engine.end([(1, 0)])
    outcome = engine.prefill(1, [], [(1, 99)], 99, [])
    assert [emitted.choice for _, emitted in outcome.emitted] == [1, 2]


def test_ending_a_choice_of_a_resumed_group_needs_no_page(audited_engine: type[AuditedEngine]) -> None:
    """Not even in a resumed group of which the cache holds more than the prompt: its choices fork in the next step, which may fail
    for lack of pages."""
    engine = audited_engine(9, 2)
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


def test_group_is_dropped_when_all_choices_end_before_the_prompt_is_computed() -> None:
    engine = tiny.engine("llama", 4)
    engine.prefill(1, [tiny.group(1, prompt(1, 10), 9, SEEDED, choices=2)], [(1, 99)], 7, [])
    engine.end([(1, 0), (1, 1)])
    assert all_pages_free(engine)
    assert engine.books.groups == engine.books.batches == {}


def test_resumed_group_is_computed_within_the_token_budget() -> None:
    engine = tiny.engine("llama", 4, prefix_caching=False)
    again = tiny.group(1, prompt(1, 10), ANSWER_LENGTH, SEEDED, continuations=[(choice, [5] * 8) for choice in range(3)])
    outcomes = [engine.prefill(1, groups, [(1, 99)], 8, []) for groups in ([again], [], [], [])]
    assert [outcome.prompt_tokens for outcome in outcomes] == [8, 8, 8, 7]
    assert [lacking for outcome in outcomes for *_, lacking in outcome.standing] == [23, 15, 7, 0]


@pytest.mark.parametrize("computed", [0, 3, 10])
def test_resumed_group_survives_the_end_of_the_choice_computing_its_prompt(computed: int) -> None:
    prompt_tokens, engine = prompt(1, 10), tiny.engine("llama", 4)
    expected = drive(engine, [tiny.group(1, prompt_tokens, ANSWER_LENGTH, SEEDED, choices=3)], Traffic()).tokens
    again = tiny.group(
        1, prompt_tokens, ANSWER_LENGTH, SEEDED, continuations=[(choice, expected[1, choice][:4]) for choice in range(3)]
    )
    engine = tiny.engine("llama", 4)
    engine.prefill(1, [again], [(1, 99)], computed, [])
    engine.end([(1, 0)])
    assert remaining_tokens(engine) == {choice: expected[1, choice][4:] for choice in (1, 2)}
    assert all_pages_free(engine)


def remaining_tokens(engine: Engine) -> dict[int, list[int]]:
    """The remaining tokens of the choices of group 1, which is resumed."""
    tokens: dict[int, list[int]] = {}
    for outcome in [
        engine.prefill(1, [], [(1, 99)], 99, []),
        *(engine.prefill(1, [], [(1, 99)], 99, [1]) for _ in range(ANSWER_LENGTH)),
    ]:
        for _, emitted in outcome.emitted:
            tokens.setdefault(emitted.choice, []).append(emitted.pick.token)
    return tokens


def test_resumed_group_survives_the_end_of_the_choice_with_a_cached_answer() -> None:
    """The choice ends before a step computes any token of the group, as when its grammar is still being compiled. The page with the
    prompt's end also holds that answer's first tokens, which no other choice shares."""
    prompt_tokens, engine = prompt(1, 10), tiny.engine("llama", 4)
    expected = drive(engine, [tiny.group(1, prompt_tokens, ANSWER_LENGTH, SEEDED, choices=3)], Traffic()).tokens
    again = tiny.group(
        1, prompt_tokens, ANSWER_LENGTH, SEEDED, continuations=[(choice, expected[1, choice][:4]) for choice in range(3)]
    )
    engine.prefill(1, [again], [], 99, [])
    assert again.sequences[0].computed == 12
    engine.end([(1, 0)])
    assert again.sequences[0].computed == 8
    assert remaining_tokens(engine) == {choice: expected[1, choice][4:] for choice in (1, 2)}
    assert all_pages_free(engine)


# Computed once


@pytest.mark.parametrize("cap", [UNLIMITED, 300, 64])
def test_identical_prompts_in_one_step_are_computed_once(audited_engine: type[AuditedEngine], cap: int) -> None:
    engine = audited_engine(2000, 16)
    prompt_tokens = [uid % 7 for uid in range(500)]
    groups = [tiny.group(uid, prompt_tokens, 9) for uid in range(100)]
    outcome = engine.prefill(1, groups, [(uid, cap) for uid in range(100)], 50_000, [])
    assert len(outcome.emitted) == 100
    assert outcome.prompt_tokens == 500 + 99 * 4  # 31 full pages are found; each computes the 4 tokens in the last one
    assert outcome.cached_tokens == 99 * 496
    assert engine.pool.free == 2000 - 31 - 100


@pytest.mark.parametrize("budget", [512, 100, 37])
def test_identical_prompts_in_several_steps_are_computed_once(audited_engine: type[AuditedEngine], budget: int) -> None:
    engine = audited_engine(2000, 16)
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
    """Only full pages are shared: each computes the last one, since its last row's logits are needed."""
    prompt_tokens = prompt(1, 64)
    engine = tiny.engine("llama")
    outcome = engine.prefill(
        1, [tiny.group(uid, prompt_tokens, ANSWER_LENGTH) for uid in range(10)], [(uid, 99) for uid in range(10)], 999, []
    )
    assert outcome.prompt_tokens == 64 + 9 * 16
    tokens = [[emitted.pick.token] for _, emitted in outcome.emitted]
    for _ in range(ANSWER_LENGTH - 1):
        for uid, emitted in engine.decode([1]).emitted:
            tokens[uid].append(emitted.pick.token)
    assert tokens == tiny.greedy("llama", (prompt_tokens,), ANSWER_LENGTH) * 10
    assert all_pages_free(engine)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_second_turn_of_a_chat_recomputes_less_than_a_page(page_size: int) -> None:
    engine = tiny.engine("qwen3", page_size)
    prompt_tokens = prompt(1, 33)
    answer = drive(engine, [tiny.group(1, prompt_tokens, ANSWER_LENGTH)], Traffic()).answers[1]
    second = (*prompt_tokens, *answer, *prompt(2, 9))
    results = drive(engine, [tiny.group(2, second, ANSWER_LENGTH)], Traffic(arrivals=1))
    computed = len(prompt_tokens) + ANSWER_LENGTH - 1  # the last token of an answer is never computed
    assert results.cached == computed // page_size * page_size
    assert results.answers[2] == tiny.greedy("qwen3", (second,), ANSWER_LENGTH)[0]


def test_nothing_is_shared_across_cache_keys_or_without_prefix_caching() -> None:
    prompt_tokens = prompt(1, 33)
    for engine, keys in ((tiny.engine("llama"), "ab"), (tiny.engine("llama", prefix_caching=False), "aa")):
        for uid, key in enumerate(keys):
            engine.prefill(1, [tiny.group(uid, prompt_tokens, 1, cache_key=key)], [(uid, 99)], 99, [])
            outcome = engine.prefill(1, [tiny.group(9, prompt_tokens, 1, cache_key=key)], [(9, 99)], 99, [])
            assert outcome.cached_tokens == (32 if "b" in keys else 0)
    engine.clear()
    assert engine.pool.cached == 0


def test_clear_empties_the_prefix_cache() -> None:
    engine = tiny.engine("llama")
    engine.prefill(1, [tiny.group(1, prompt(1, 33), 1), tiny.group(2, prompt(2, 33), 9)], [(1, 99), (2, 99)], 99, [])
    assert engine.pool.cached == 2
    engine.clear()
    assert all_pages_free(engine)
    assert engine.pool.cached == 0
    assert engine.prefill(1, [tiny.group(1, prompt(1, 33), 1)], [(1, 99)], 99, []).cached_tokens == 0


def test_prompt_logprobs_cover_all_tokens_of_a_cached_prompt() -> None:
    prompt_tokens = prompt(1, 40)
    engine = tiny.engine("llama")
    for uid in range(2):
        outcome = engine.prefill(1, [tiny.group(uid, prompt_tokens, 9, prompt_logprobs=True)], [(uid, 99)], 99, [])
        logits = tiny.expected_logits("llama", prompt_tokens).log_softmax(-1)[:-1]
        expected = logits.gather(1, torch.tensor(prompt_tokens[1:]).unsqueeze(1)).squeeze(1)
        assert outcome.prompts[0][1] == pytest.approx(expected.tolist(), abs=1e-4)
    assert engine.pool.free == 1024 - 2 - 2  # the second one gave up its own full pages for the first one's


# Pools that are just large enough


def random_small_groups(seed: int) -> list[Group]:
    """Small requests that often share prefixes in the trie, and some of which end early."""
    chance = random.Random(seed)
    stem = [chance.randrange(VOCABULARY) for _ in range(12)]
    result = []
    for uid in range(24):
        tokens = stem[: chance.randint(0, 12)] + [chance.randrange(2) for _ in range(chance.randint(1, 9))]
        more: dict[str, Any] = {"choices": chance.choice([1, 1, 2, 4]), "cache_key": chance.choice(["", "", "a"])}
        more["prompt_logprobs"] = chance.random() < 0.1
        end_ids = chance.choice([(), (), (VOCABULARY - 1,)])
        result.append(tiny.group(uid, tokens, chance.randint(1, 14), Sampling(seed=uid % 3), end_ids=end_ids, **more))
    return result


def check_tight_pools(audited_engine: type[AuditedEngine], seeds: range) -> tuple[int, int]:
    """Runs groups in pools that are just large enough for them; (evictions, pauses)."""
    evictions = pauses = 0
    for seed in seeds:
        chance = random.Random(seed)
        size = chance.choice([1, 2, 3, 4])
        groups = random_small_groups(seed)
        engine = audited_engine(pages_of_largest_group(groups, size) + chance.randint(0, 12), size, chance.random() < 0.8)
        habits = Traffic(chance.choice([1, 3, 8, UNLIMITED]), pause=0.1, pauses=seed % 2, cancel=0.05, end=0.1, join=0.1)
        results = drive(engine, groups, habits, seed)
        assert results.failed == {}
        assert engine.pool.free == engine.pool.pages
        evictions, pauses = evictions + engine.evictions, pauses + results.pauses.total()
    return evictions, pauses


def test_admitted_groups_never_exhaust_a_pool_that_is_just_large_enough(audited_engine: type[AuditedEngine]) -> None:
    evictions, pauses = check_tight_pools(audited_engine, range(70))
    assert evictions > 1000
    assert pauses > 1000


def test_tokens_do_not_depend_on_shared_pages(audited_engine: type[AuditedEngine]) -> None:
    for seed in range(20):
        alone = drive(audited_engine(5000, 4, prefix_caching=False), random_small_groups(seed), Traffic(), seed).tokens
        groups = random_small_groups(seed)
        assert drive(audited_engine(pages_of_largest_group(groups, 3) + 5, 3), groups, Traffic(5, pauses=2), seed).tokens == alone


def one_step_less(original: Any) -> Any:
    return lambda self, size: (lambda held, grow, lacking: (held, max(0, grow - 1), lacking))(*original(self, size))


def one_page_less(original: Any) -> Any:
    return lambda self, size: max(1, original(self, size) - 1)


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [(Group, "standing", one_step_less), (Group, "worst", one_page_less), (sequence, "AHEAD", lambda original: 1)],
)
def test_check_catches_page_bounds_that_are_too_low(
    audited_engine: type[AuditedEngine], monkeypatch: pytest.MonkeyPatch, place: Any, name: str, fault: Any
) -> None:
    monkeypatch.setattr(AuditedEngine, "audit", lambda self: None)
    monkeypatch.setattr(place, name, fault(getattr(place, name)))
    with pytest.raises(AssertionError, match="pool is full"):
        check_tight_pools(audited_engine, range(60))


def too_early(original: Any) -> Any:
    """A fault: announces a page that the step will not fill."""

    def announce(self: PrefixCache, holder: Any) -> None:
        holder.computed += 1
        original(self, holder)
        holder.computed -= 1

    return announce


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (PrefixCache, "announce", too_early),
        (PrefixCache, "announce", lambda original: PrefixCache.publish),  # gives up a page that the step writes to
        (PagePool, "taken", lambda original: lambda self: []),  # pages are not cleared
        (FakeCache, "copy", lambda original: lambda *remaining_tokens: None),
        (Prompts, "_fork", lambda original: lambda self, first, others: original(self, first, others[:-1])),  # leaves out a choice
    ],
)
def test_check_catches_slots_with_wrong_content(
    audited_engine: type[AuditedEngine], monkeypatch: pytest.MonkeyPatch, place: type, name: str, fault: Any
) -> None:
    monkeypatch.setattr(place, name, fault(getattr(place, name)))
    with pytest.raises((AssertionError, KeyError, IndexError)):
        check_tight_pools(audited_engine, range(20))


# Failures


def check_failures(audited_engine: type[AuditedEngine], seeds: range) -> None:
    """Groups whose logits are not finite fail, among others that share their prefixes."""
    for seed in seeds:
        groups = random_small_groups(seed)
        for number, group in enumerate(groups[:6]):
            tokens = group.sequences[0].tokens
            tokens[min(len(tokens) - 1, 3 * number)] = POISON
        engine = audited_engine(pages_of_largest_group(groups, 2) + 20, 2)
        results = drive(engine, groups, Traffic(4, pause=0.05), seed)
        assert set(results.failed) == set(range(6))
        found = [engine.cache.content[2 * page + 1] for page in engine.books.prefixes._nodes]
        assert not any(POISON in content[1] for content in found if content)
        assert engine.pool.free == engine.pool.pages


def test_prefixes_of_failed_groups_are_not_cached(audited_engine: type[AuditedEngine]) -> None:
    check_failures(audited_engine, range(30))


def test_check_catches_failed_prefixes_that_were_not_withdrawn(
    audited_engine: type[AuditedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixCache, "withdraw", lambda self, holder: None)
    with pytest.raises(AssertionError):
        check_failures(audited_engine, range(5))
