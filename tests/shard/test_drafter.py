"""Drafting by a draft model. If the target drafts for itself, every draft is accepted, whatever happens to its pages."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from penstock.kernels.work_list import SHORTEST_RUN
from penstock.proto.speculation import parse
from penstock.shard import step
from penstock.shard.decoding.budget import Allowance, LinearCost
from penstock.shard.decoding.growth import Frontier
from penstock.shard.draft_progress import DraftProgress
from penstock.shard.drafter import SHORT, Drafter
from penstock.shard.engine import Engine
from penstock.shard.outcome import Outcome
from penstock.shard.pages import page_table
from penstock.shard.parallel import Ranks
from penstock.shard.sequence import Group, Sampling
from penstock.shard.speculator import Speculator
from penstock.shard.step import Span, Step
from penstock.tests.shard import configurations, tiny
from penstock.tests.shard.driver import UNLIMITED, Results, Traffic, drive
from penstock.tests.shard.test_against_transformers import all_pages_free, prompt
from penstock.tests.shard.test_sharing import pages_of_largest_group
from penstock.tests.shard.test_speculation import plain_results, sample_groups


def engine(options: str, page_size: int = 16, pages: int = 1024, prefix_caching: bool = True, draft: str = "llama") -> Engine:
    """A tiny model with another, or itself, as its draft model."""
    target = tiny.decoder("llama")
    drafter = Drafter(tiny.decoder(draft), configurations.VOCABULARY, tiny.CPU, max_drafts(options))
    speculator = Speculator(target.ranks, tiny.CPU, parse(f"draft=x,{options}"), drafter)
    result = Engine(target, tiny.CPU, page_size, prefix_caching, speculator=speculator)
    result.resize(pages)
    return result


def with_free_drafts(engine: Engine) -> Engine:
    """Makes drafts cost nothing, so that the engine drafts as many tokens as possible."""
    plain_prefill, plain_decode = engine.prefill, engine.decode
    allowance = Allowance(LinearCost(1.0, 0.0, 0.0), 1000)

    def prefill(*arguments: object) -> Outcome:
        return plain_prefill(*arguments, allowance)

    def decode(batches: Sequence[int]) -> Outcome:
        return plain_decode(batches, allowance)

    engine.prefill, engine.decode = prefill, decode  # type: ignore[method-assign]
    return engine


def max_drafts(options: str) -> int:
    return parse(f"draft=x,{options}").most


@pytest.mark.parametrize(
    ("options", "page_size", "chunk", "prefix_caching", "draft"),
    [
        ("tokens=8", 16, 7, True, "llama"),
        ("tokens=8", 1, 7, True, "llama-tied"),
        ("tree=3x2x1", 4, UNLIMITED, False, "llama"),
        ("tree=3x2x1", 1, 7, True, "llama-tied"),
        ("nodes=64", 16, 7, True, "llama"),
        ("nodes=64", 4, UNLIMITED, False, "llama"),
        ("tree=2x2,ngram=3", 16, 7, True, "llama"),
        ("tree=2x2,ngram=3", 1, 7, True, "llama-tied"),
        ("tokens=8", 4, 7, True, "gemma2"),  # with a sliding window each round is planned anew
    ],
)
def test_a_draft_model_changes_no_token(options: str, page_size: int, chunk: int, prefix_caching: bool, draft: str) -> None:
    plain, groups = plain_results(), sample_groups(max_drafts(options))
    drafting = with_free_drafts(
        engine(options, page_size, pages_of_largest_group(groups, page_size) + 200 // page_size, prefix_caching, draft)
    )
    results = drive(drafting, groups, Traffic(chunk, pause=0.1), seed=page_size)
    assert results.tokens == plain.tokens
    assert results.finishes == plain.finishes
    assert results.pauses
    assert results.drafted > 50
    assert draft != "llama" or results.accepted > 150
    assert all_pages_free(drafting)


@pytest.mark.parametrize(("page_size", "prefix_caching"), [(1, True), (4, False), (16, True)])
def test_target_as_its_own_draft_model_has_all_drafts_accepted(page_size: int, prefix_caching: bool) -> None:
    groups = sample_groups(4)
    drafting = with_free_drafts(engine("tokens=4", page_size, 2000, prefix_caching))
    results = drive(drafting, groups, Traffic(7, pause=0.1), seed=3)
    assert results.tokens == plain_results().tokens
    assert results.accepted > 300
    assert results.drafted - results.accepted <= wasted_drafts(results, groups)


def wasted_drafts(results: Results, groups: Sequence[Group]) -> int:
    """The most drafts that can be wasted behind end tokens."""
    return sum(4 for group in groups for _ in range(len(group.waiting)) if group.end_ids)


def test_trees_of_the_target_as_draft_model_contain_the_targets_tokens() -> None:
    drafting = with_free_drafts(engine("tree=3x2x1", 4, 2000))
    results = drive(drafting, sample_groups(15), Traffic(), seed=3)
    assert results.tokens == plain_results().tokens
    assert results.accepted > 200


@pytest.mark.parametrize("page_size", [4, 16])
def test_logits_of_later_draft_rounds_match_plain_forwards(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round's plan is derived from the previous one's: for sequences of different lengths, two of which share their first
    pages, and two of which have more tokens to compute at first."""
    drafter = Drafter(tiny.decoder("llama"), configurations.VOCABULARY, tiny.CPU, 8)
    drafter.resize(500, page_size)
    shared = prompt(1, 2 * SHORTEST_RUN)
    texts = [[*shared, *prompt(2, 5)], prompt(3, 9), [*shared, *prompt(4, 30)], prompt(5, 40)]
    sequences = [tiny.group(uid, text, 20).sequences[0] for uid, text in enumerate(texts)]
    common = len(shared) // page_size
    for i, sequence in enumerate(sequences):
        sequence.pages = page_table(range(1, 1 + common) if i in (0, 2) else ())
        sequence.pages += page_table(range(100 * (i + 1), 100 * (i + 1) + 20))
    assert all(drafter.ready(sequences))
    for sequence, left in zip(sequences, (1, 2, 1, 2), strict=True):
        draft_progress = sequence.draft_progress
        assert draft_progress is not None
        if count := len(sequence.tokens) - draft_progress.computed - left:
            drafter.forward([drafter._advance(sequence, draft_progress, count, wanted=0)])
    planned: list[int] = []
    plan = step.plan

    def counting_plan(spans: Sequence[Span], *rest: Any, **more: Any) -> Step:
        planned.append(len(spans))
        return plan(spans, *rest, **more)

    monkeypatch.setattr(step, "plan", counting_plan)
    drafts = [5, 6, 7, 8]
    for depth in range(len(drafts)):
        parents = list(range(-1, depth - 1))
        found = drafter.logits([Frontier(sequence, drafts[:depth], parents, [depth - 1]) for sequence in sequences])
        for row, text in zip(found, texts, strict=True):
            assert torch.allclose(row, tiny.expected_logits("llama", [*text, *drafts[:depth]])[-1], atol=1e-4)
    assert planned == [4]  # only the first round, in which two sequences have two tokens


def test_draft_model_catches_up_with_long_prompts_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.shard.drafter.CATCH_UP", 100)
    drafting = with_free_drafts(engine("tokens=4", 16))
    drafting.prefill(0, [tiny.group(0, prompt(3, 2 * 100 + SHORT + 5), 40, drafts=4)], [(0, UNLIMITED)], UNLIMITED, [])
    assert [drafting.decode([0]).drafted for _ in range(5)] == [0, 0, 4, 4, 4]


def test_catch_up_budget_is_given_to_one_sequence_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """No empty span is computed for it."""
    monkeypatch.setattr("penstock.shard.drafter.CATCH_UP", 100)
    drafter = Drafter(tiny.decoder("llama"), configurations.VOCABULARY, tiny.CPU, 8)
    drafter.resize(200, 16)
    sequences = [tiny.group(uid, prompt(uid, 100 + 2 * SHORT), 20).sequences[0] for uid in range(3)]
    for uid, sequence in enumerate(sequences):
        sequence.pages = page_table(range(1 + 20 * uid, 21 + 20 * uid))
    computed: list[list[int]] = []
    forward = drafter.forward

    def recording_forward(spans: Sequence[Span]) -> torch.Tensor:
        computed.append([len(span.tokens) for span in spans])
        return forward(spans)

    monkeypatch.setattr(drafter, "forward", recording_forward)
    assert [drafter.ready(sequences) for _ in range(3)] == [[False] * 3, [True, False, False], [True, False, False]]
    assert computed == [[100]] * 3


def test_draft_rounds_that_run_out_of_memory_do_not_count_as_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out in first and later rounds: drafts are as good as before afterwards."""
    drafting = with_free_drafts(engine("tokens=4", 4, 400))
    drafter, count = drafting.speculator.drafter, iter(range(999))
    assert drafter is not None
    forward, follow = drafter.forward, drafter.forward.follow

    def fail(compute: Any, spans: Sequence[Span]) -> torch.Tensor:
        if next(count) % 11 in (2, 7):
            raise torch.OutOfMemoryError
        return compute(spans)  # type: ignore[no-any-return]

    class Failing:
        def __call__(self, spans: Sequence[Span]) -> torch.Tensor:
            return fail(forward, spans)

        def follow(self, spans: Sequence[Span]) -> torch.Tensor:
            return fail(follow, spans)

    monkeypatch.setattr(drafter, "forward", Failing())
    groups = [tiny.group(uid, prompt(uid, 9 + uid), 60, drafts=4) for uid in range(3)]
    results = drive(drafting, groups, Traffic())
    assert drafting.memory_fallback._count > 5
    assert results.accepted == results.drafted > 60
    assert (
        results.answers
        == drive(tiny.engine("llama"), [tiny.group(uid, prompt(uid, 9 + uid), 60) for uid in range(3)], Traffic()).answers
    )


def test_draft_model_with_fewer_positions_drafts_up_to_its_limit() -> None:
    drafting, drafted = with_free_drafts(engine("tokens=4", 16, draft="short")), []
    drafting.prefill(0, [tiny.group(0, prompt(3, 41), 60, drafts=4)], [(0, UNLIMITED)], UNLIMITED, [])
    while drafting.books.groups:
        drafted.append((len(drafting.books.groups[0].sequences[0].tokens), drafting.decode([0]).drafted))
    assert [length for length, count in drafted if count] == [42, 47, 52, 57]
    assert [length for length, count in drafted if not count] == list(range(62, 101))
    drafting.prefill(0, [tiny.group(1, prompt(4, 300), 10, drafts=4)], [(1, UNLIMITED)], UNLIMITED, [])
    assert drafting.decode([0]).drafted == 0


def test_draft_logits_of_tree_nodes_match_plain_forwards() -> None:
    """The draft model's logits after a tree's nodes are those of plain forward passes over the same tokens."""
    drafter = Drafter(tiny.decoder("llama"), configurations.VOCABULARY + 3, tiny.CPU, 8)
    drafter.resize(64, 4)
    tokens = prompt(1, 21)
    sequence = tiny.group(0, tokens, 20).sequences[0]
    sequence.pages = page_table(range(1, 12))
    assert drafter.ready([sequence]) == [True]
    first = drafter.logits([Frontier(sequence, [], [], [-1])])
    nodes, parents = [5, 6, 7, 8], [-1, -1, 0, 1]
    layer = drafter.logits([Frontier(sequence, nodes, parents, [0, 1])])
    leaves = drafter.logits([Frontier(sequence, nodes, parents, [2, 3])])
    for found, text in zip([first[0], *layer, *leaves], [[], [5], [6], [5, 7], [6, 8]], strict=True):
        assert torch.allclose(found[: configurations.VOCABULARY], tiny.expected_logits("llama", [*tokens, *text])[-1], atol=1e-4)
        assert found[configurations.VOCABULARY :].tolist() == [-torch.inf] * 3


def test_draft_model_may_have_a_smaller_vocabulary() -> None:
    small = Drafter(tiny.decoder("llama"), configurations.VOCABULARY - 20, tiny.CPU, 8)
    small.resize(8, 16)
    sequence = tiny.group(0, [1, 2, 3], 20).sequences[0]
    sequence.pages = page_table([1])
    small.ready([sequence])
    assert small.logits([Frontier(sequence, [], [], [-1])]).shape == (1, configurations.VOCABULARY - 20)


def test_two_ranks_draft_and_accept_alike() -> None:
    plain = plain_results()

    def work(ranks: Ranks) -> Results:
        drafter = Drafter(tiny.decoder("llama"), configurations.VOCABULARY, tiny.CPU, 10) if ranks.rank == 0 else None
        rank_engine = tiny.rank_engine("llama", ranks, 4, 300)
        rank_engine.speculator = Speculator(ranks, tiny.CPU, parse("draft=x,tree=2x2x1"), drafter)
        rank_engine.resize(300)
        return drive(with_free_drafts(rank_engine), sample_groups(10), Traffic(16, pause=0.03), seed=5)

    results, other_rank = tiny.ThreadedRanks().run(work)
    assert results.tokens == other_rank.tokens == plain.tokens
    assert (results.drafted, results.accepted) == (other_rank.drafted, other_rank.accepted)
    assert results.accepted > 200


@pytest.mark.parametrize("options", ["tokens=3,verify=rejection", "tree=3x2,verify=rejection", "tree=3x2,verify=typical"])
def test_rejection_and_typical_are_greedy_at_temperature_0_and_agree_on_both_ranks(options: str) -> None:
    groups = [tiny.group(uid, prompt(uid, 9), 20, Sampling(), drafts=max_drafts(options)) for uid in range(6)]
    drawn = [
        tiny.group(uid, prompt(uid, 9), 20, Sampling(temperature=2.0, seed=uid), drafts=max_drafts(options)) for uid in range(6, 16)
    ]
    plain = drive(engine("tokens=1"), [tiny.group(uid, prompt(uid, 9), 20) for uid in range(6)], Traffic())

    def work(ranks: Ranks) -> Results:
        drafter = (
            Drafter(tiny.decoder("llama-tied"), configurations.VOCABULARY, tiny.CPU, max_drafts(options))
            if ranks.rank == 0
            else None
        )
        rank_engine = tiny.rank_engine("llama", ranks, 4, 300)
        rank_engine.speculator = Speculator(ranks, tiny.CPU, parse(f"draft=x,{options}"), drafter)
        rank_engine.resize(300)
        return drive(with_free_drafts(rank_engine), [*groups, *drawn], Traffic(16), seed=5)

    results, other_rank = tiny.ThreadedRanks().run(work)
    assert results.tokens == other_rank.tokens
    assert {key: results.tokens[key] for key in plain.tokens} == plain.tokens
    assert not results.failed
    assert results.accepted > 0


# DraftProgress


def test_accepted_drafts_count_as_computed_by_the_draft_model() -> None:
    draft_progress = DraftProgress(10, [1, 2, 3], [7, 8])
    assert draft_progress.accept([0] * 10 + [1, 2, 9], 4) == [7]
    assert (draft_progress.computed, draft_progress.drafts) == (12, [])
    draft_progress = DraftProgress(10, [1, 2, 3], [7, 8])
    assert draft_progress.accept([0] * 10 + [1, 2], 4) == []
    assert draft_progress.computed == 11, "the last token is always computed anew: its logits are wanted"
    draft_progress = DraftProgress(10, [1, 2, 3], [7, 8])
    assert draft_progress.accept([0] * 10 + [5, 2, 3], 4) == []
    assert draft_progress.computed == 10


def test_shared_pages_computed_by_the_draft_model_count_as_computed() -> None:
    draft_progress = DraftProgress()
    draft_progress.look(13, [1, 2, 3, 4], 4, {1, 2, 4}, 0)
    assert draft_progress.computed == 8
    draft_progress.look(13, [1, 9, 3, 4], 4, {1, 2, 3, 4}, 0)  # the second page was swapped for one that isn't computed
    assert draft_progress.computed == 4
    draft_progress.look(13, [1, 2, 3, 4], 4, {1, 2, 3, 4}, 3)
    assert (draft_progress.computed, draft_progress.settled) == (12, 1)
    draft_progress.look(16, [1, 2, 3, 4], 4, {1, 2, 3, 4}, 3)
    assert (draft_progress.computed, draft_progress.settled) == (16, 3)


def test_pages_that_can_still_be_swapped_are_checked_again() -> None:
    draft_progress = DraftProgress()
    for _ in range(2):
        draft_progress.look(13, [1, 2, 3, 4], 4, {1, 2, 3, 4}, 1)
        assert draft_progress.computed == 12
    assert draft_progress.settled == 1
    draft_progress.look(13, [1, 9, 3, 4], 4, {1, 2, 3, 4}, 1)
    assert draft_progress.computed == 4


def test_sampled_drafts_use_the_targets_noise_and_are_all_accepted() -> None:
    groups = [tiny.group(uid, prompt(uid, 9), 24, Sampling(temperature=1.0, seed=uid), drafts=3) for uid in range(8)]
    drafting = with_free_drafts(engine("tokens=3", 16))
    results = drive(drafting, groups, Traffic())
    assert results.accepted == results.drafted > 100


@pytest.mark.parametrize("page", [4, 8])
def test_all_own_drafts_are_accepted_though_pages_are_swapped(page: int) -> None:
    """Sequences with the same prompt give up pages for equal ones of others: those are not computed by the draft model again."""
    self_drafting = with_free_drafts(engine(f"tokens={page}", page, 2000, True))
    chance = random.Random(0)
    shared = [chance.randrange(2, 130) for _ in range(9)]
    groups = [
        tiny.group(uid, shared if uid % 2 else [chance.randrange(2, 130) for _ in range(9 + uid)], 200, drafts=page)
        for uid in range(10)
    ]
    self_drafting.prefill(1, groups, [(group.uid, 100) for group in groups], 1000, [])
    drafted = accepted = 0
    while self_drafting.books.groups:
        outcome = self_drafting.decode([1])
        drafted, accepted = drafted + outcome.drafted, accepted + outcome.accepted
    assert accepted == drafted > 1000


def test_only_a_group_behind_its_latency_target_gets_drafts_that_do_not_pay() -> None:
    drafting = engine("tokens=4")
    groups = [tiny.group(uid, prompt(uid, 8), 20, drafts=4) for uid in range(3)]
    drafting.prefill(0, groups, [(group.uid, 99) for group in groups], 999, [])
    outcome = drafting.decode([0], Allowance(LinearCost(step=1.0, draft=10.0), 100, needed={1: 5.0}))
    assert outcome.drafts == [(1, 4, 4)]
    assert Counter(uid for uid, _ in outcome.emitted) == {0: 1, 1: 5, 2: 1}
