"""A draft model: with the target itself as its own, every guess is right, whatever becomes of pages."""

import random
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
from penstock.shard.parallel import Ranks
from penstock.shard.sequence import Group, Sampling
from penstock.shard.speculator import Speculator
from penstock.shard.step import Span, Step
from penstock.tests.shard import configurations, tiny
from penstock.tests.shard.driver import UNLIMITED, Habits, World, drive
from penstock.tests.shard.test_oracle import at_rest, prompt
from penstock.tests.shard.test_sharing import room
from penstock.tests.shard.test_speculation import asked, expected


def engine(said: str, page_size: int = 16, pages: int = 1024, prefix_caching: bool = True, draft: str = "llama") -> Engine:
    """A tiny model with another, or itself, as its draft model."""
    target = tiny.decoder("llama")
    drafter = Drafter(tiny.decoder(draft), configurations.VOCABULARY, tiny.CPU, all_of(said))
    speculator = Speculator(target.ranks, tiny.CPU, parse(f"draft=x,{said}"), drafter)
    result = Engine(target, tiny.CPU, page_size, prefix_caching, speculator=speculator)
    result.resize(pages)
    return result


def free(engine: Engine) -> Engine:
    """Drafts cost nothing there, so that there are as many as can be."""
    plain_prefill, plain_decode = engine.prefill, engine.decode
    allowance = Allowance(LinearCost(1.0, 0.0, 0.0), 1000)

    def prefill(*arguments: object) -> Outcome:
        return plain_prefill(*arguments, allowance)  # type: ignore[arg-type]

    def decode(batches: Sequence[int]) -> Outcome:
        return plain_decode(batches, allowance)

    engine.prefill, engine.decode = prefill, decode  # type: ignore[method-assign,assignment]
    return engine


def all_of(said: str) -> int:
    return parse(f"draft=x,{said}").most


@pytest.mark.parametrize(
    ("said", "page_size", "chunk", "prefix_caching", "draft"),
    [
        ("tokens=8", 16, 7, True, "llama"),
        ("tokens=8", 1, 7, True, "llama-tied"),
        ("tree=3x2x1", 4, UNLIMITED, False, "llama"),
        ("tree=3x2x1", 1, 7, True, "llama-tied"),
        ("nodes=64", 16, 7, True, "llama"),
        ("nodes=64", 4, UNLIMITED, False, "llama"),
        ("tree=2x2,ngram=3", 16, 7, True, "llama"),
        ("tree=2x2,ngram=3", 1, 7, True, "llama-tied"),
        ("tokens=8", 4, 7, True, "gemma2"),  # of a window each round is planned anew
    ],
)
def test_a_draft_model_changes_no_token(said: str, page_size: int, chunk: int, prefix_caching: bool, draft: str) -> None:
    plain, groups = expected(), asked(all_of(said))
    own = free(engine(said, page_size, room(groups, page_size) + 200 // page_size, prefix_caching, draft))
    world = drive(own, groups, Habits(chunk, pause=0.1), seed=page_size)
    assert world.tokens == plain.tokens
    assert world.finishes == plain.finishes
    assert world.pauses
    assert world.drafted > 50
    assert draft != "llama" or world.accepted > 150
    assert at_rest(own)


@pytest.mark.parametrize(("page_size", "prefix_caching"), [(1, True), (4, False), (16, True)])
def test_who_drafts_for_itself_is_always_right(page_size: int, prefix_caching: bool) -> None:
    groups = asked(4)
    own = free(engine("tokens=4", page_size, 2000, prefix_caching))
    world = drive(own, groups, Habits(7, pause=0.1), seed=3)
    assert world.tokens == expected().tokens
    assert world.accepted > 300
    assert world.drafted - world.accepted <= wasted(world, groups)


def wasted(world: World, groups: Sequence[Group]) -> int:
    """Speculator behind an end."""
    return sum(4 for group in groups for _ in range(len(group.waiting)) if group.end_ids)


def test_trees_contain_what_the_target_says() -> None:
    own = free(engine("tree=3x2x1", 4, 2000))
    world = drive(own, asked(15), Habits(), seed=3)
    assert world.tokens == expected().tokens
    assert world.accepted > 200


@pytest.mark.parametrize("page_size", [4, 16])
def test_chains_that_go_on_see_what_plain_forwards_would(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are planned from those before them: for sequences of different lengths, two of which share their first pages, and of
    which two have more to compute at first."""
    drafter = Drafter(tiny.decoder("llama"), configurations.VOCABULARY, tiny.CPU, 8)
    drafter.resize(500, page_size)
    shared = prompt(1, 2 * SHORTEST_RUN)
    texts = [[*shared, *prompt(2, 5)], prompt(3, 9), [*shared, *prompt(4, 30)], prompt(5, 40)]
    sequences = [tiny.group(uid, text, 20).sequences[0] for uid, text in enumerate(texts)]
    common = len(shared) // page_size
    for i, sequence in enumerate(sequences):
        sequence.pages = [*range(1, 1 + common)] if i in (0, 2) else []
        sequence.pages += range(100 * (i + 1), 100 * (i + 1) + 20)
    assert all(drafter.ready(sequences))
    for sequence, left in zip(sequences, (1, 2, 1, 2), strict=True):
        draft_progress = sequence.draft_progress
        assert draft_progress is not None
        if count := len(sequence.tokens) - draft_progress.computed - left:
            drafter.forward([drafter._advance(sequence, draft_progress, count, wanted=0)])
    planned: list[int] = []
    plan = step.plan

    def counted(spans: Sequence[Span], *rest: Any, **more: Any) -> Step:
        planned.append(len(spans))
        return plan(spans, *rest, **more)

    monkeypatch.setattr(step, "plan", counted)
    drafts = [5, 6, 7, 8]
    for depth in range(len(drafts)):
        parents = list(range(-1, depth - 1))
        found = drafter.logits([Frontier(sequence, drafts[:depth], parents, [depth - 1]) for sequence in sequences])
        for row, text in zip(found, texts, strict=True):
            assert torch.allclose(row, tiny.expected_logits("llama", [*text, *drafts[:depth]])[-1], atol=1e-4)
    assert planned == [4]  # the first round, where two have two tokens


def test_long_prompts_are_caught_up_with_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.shard.drafter.CATCH_UP", 100)
    own = free(engine("tokens=4", 16))
    own.prefill(0, [tiny.group(0, prompt(3, 2 * 100 + SHORT + 5), 40, drafts=4)], [(0, UNLIMITED)], UNLIMITED, [])
    assert [own.decode([0]).drafted for _ in range(5)] == [0, 0, 4, 4, 4]


def test_who_finds_no_room_to_catch_up_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No span without tokens is computed for it."""
    monkeypatch.setattr("penstock.shard.drafter.CATCH_UP", 100)
    drafter = Drafter(tiny.decoder("llama"), configurations.VOCABULARY, tiny.CPU, 8)
    drafter.resize(200, 16)
    sequences = [tiny.group(uid, prompt(uid, 100 + 2 * SHORT), 20).sequences[0] for uid in range(3)]
    for uid, sequence in enumerate(sequences):
        sequence.pages = list(range(1 + 20 * uid, 21 + 20 * uid))
    computed: list[list[int]] = []
    forward = drafter.forward

    def noted(spans: Sequence[Span]) -> torch.Tensor:
        computed.append([len(span.tokens) for span in spans])
        return forward(spans)

    monkeypatch.setattr(drafter, "forward", noted)
    assert [drafter.ready(sequences) for _ in range(3)] == [[False] * 3, [True, False, False], [True, False, False]]
    assert computed == [[100]] * 3


def test_what_the_draft_model_did_not_come_to_compute_is_not_taken_for_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out in a round, at the first and at later ones: drafts are as good as ever after that."""
    own = free(engine("tokens=4", 4, 400))
    drafter, count = own.speculator.drafter, iter(range(999))
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
    world = drive(own, groups, Habits())
    assert own.memory_fallback._count > 5
    assert world.accepted == world.drafted > 60
    assert (
        world.answers
        == drive(tiny.engine("llama"), [tiny.group(uid, prompt(uid, 9 + uid), 60) for uid in range(3)], Habits()).answers
    )


def test_a_draft_model_with_fewer_positions_helps_as_far_as_these_go() -> None:
    own, drafted = free(engine("tokens=4", 16, draft="short")), []
    own.prefill(0, [tiny.group(0, prompt(3, 41), 60, drafts=4)], [(0, UNLIMITED)], UNLIMITED, [])
    while own.books.groups:
        drafted.append((len(own.books.groups[0].sequences[0].tokens), own.decode([0]).drafted))
    assert [length for length, count in drafted if count] == [42, 47, 52, 57]
    assert [length for length, count in drafted if not count] == list(range(62, 101))
    own.prefill(0, [tiny.group(1, prompt(4, 300), 10, drafts=4)], [(1, UNLIMITED)], UNLIMITED, [])
    assert own.decode([0]).drafted == 0


def test_drafts_see_what_the_target_would() -> None:
    """Its logits after a tree's nodes are those of plain forwards over the same tokens."""
    drafter = Drafter(tiny.decoder("llama"), configurations.VOCABULARY + 3, tiny.CPU, 8)
    drafter.resize(64, 4)
    tokens = prompt(1, 21)
    sequence = tiny.group(0, tokens, 20).sequences[0]
    sequence.pages = list(range(1, 12))
    assert drafter.ready([sequence]) == [True]
    first = drafter.logits([Frontier(sequence, [], [], [-1])])
    nodes, parents = [5, 6, 7, 8], [-1, -1, 0, 1]
    layer = drafter.logits([Frontier(sequence, nodes, parents, [0, 1])])
    leaves = drafter.logits([Frontier(sequence, nodes, parents, [2, 3])])
    for found, text in zip([first[0], *layer, *leaves], [[], [5], [6], [5, 7], [6, 8]], strict=True):
        assert torch.allclose(found[: configurations.VOCABULARY], tiny.expected_logits("llama", [*tokens, *text])[-1], atol=1e-4)
        assert found[configurations.VOCABULARY :].tolist() == [-torch.inf] * 3


def test_a_draft_model_with_another_vocabulary_only_drafts_worse() -> None:
    small = Drafter(tiny.decoder("llama"), configurations.VOCABULARY - 20, tiny.CPU, 8)
    small.resize(8, 16)
    sequence = tiny.group(0, [1, 2, 3], 20).sequences[0]
    sequence.pages = [1]
    small.ready([sequence])
    assert small.logits([Frontier(sequence, [], [], [-1])]).shape == (1, configurations.VOCABULARY - 20)


def test_two_ranks_draft_the_same() -> None:
    plain = expected()

    def work(ranks: Ranks) -> World:
        drafter = Drafter(tiny.decoder("llama"), configurations.VOCABULARY, tiny.CPU, 10) if ranks.rank == 0 else None
        half = tiny.engine_of("llama", ranks, 4, 300)
        half.speculator = Speculator(ranks, tiny.CPU, parse("draft=x,tree=2x2x1"), drafter)
        half.resize(300)
        return drive(free(half), asked(10), Habits(16, pause=0.03), seed=5)

    world, twin = tiny.Threads().run(work)
    assert world.tokens == twin.tokens == plain.tokens
    assert (world.drafted, world.accepted) == (twin.drafted, twin.accepted)
    assert world.accepted > 200


@pytest.mark.parametrize("said", ["tokens=3,verify=rejection", "tree=3x2,verify=rejection", "tree=3x2,verify=typical"])
def test_other_rules_are_greedy_without_a_temperature_and_alike_on_all_ranks(said: str) -> None:
    groups = [tiny.group(uid, prompt(uid, 9), 20, Sampling(), drafts=all_of(said)) for uid in range(6)]
    drawn = [tiny.group(uid, prompt(uid, 9), 20, Sampling(temperature=2.0, seed=uid), drafts=all_of(said)) for uid in range(6, 16)]
    plain = drive(engine("tokens=1"), [tiny.group(uid, prompt(uid, 9), 20) for uid in range(6)], Habits())

    def work(ranks: Ranks) -> World:
        drafter = (
            Drafter(tiny.decoder("llama-tied"), configurations.VOCABULARY, tiny.CPU, all_of(said)) if ranks.rank == 0 else None
        )
        half = tiny.engine_of("llama", ranks, 4, 300)
        half.speculator = Speculator(ranks, tiny.CPU, parse(f"draft=x,{said}"), drafter)
        half.resize(300)
        return drive(free(half), [*groups, *drawn], Habits(16), seed=5)

    world, twin = tiny.Threads().run(work)
    assert world.tokens == twin.tokens
    assert {key: world.tokens[key] for key in plain.tokens} == plain.tokens
    assert not world.failed
    assert world.accepted > 0


# Sketches


def test_accepted_drafts_stay_computed() -> None:
    draft_progress = DraftProgress(10, [1, 2, 3], [7, 8])
    assert draft_progress.accept([0] * 10 + [1, 2, 9], 4) == [7]
    assert (draft_progress.computed, draft_progress.ahead) == (12, [])
    draft_progress = DraftProgress(10, [1, 2, 3], [7, 8])
    assert draft_progress.accept([0] * 10 + [1, 2], 4) == []
    assert draft_progress.computed == 11, "the last token is always computed anew: its logits are wanted"
    draft_progress = DraftProgress(10, [1, 2, 3], [7, 8])
    assert draft_progress.accept([0] * 10 + [5, 2, 3], 4) == []
    assert draft_progress.computed == 10


def test_pages_that_others_have_computed_count() -> None:
    draft_progress = DraftProgress()
    draft_progress.look(13, [1, 2, 3, 4], 4, {1, 2, 4}, 0)
    assert draft_progress.computed == 8
    draft_progress.look(13, [1, 9, 3, 4], 4, {1, 2, 3, 4}, 0)  # the second was swapped for one that isn't
    assert draft_progress.computed == 4
    draft_progress.look(13, [1, 2, 3, 4], 4, {1, 2, 3, 4}, 3)
    assert (draft_progress.computed, draft_progress.settled) == (12, 1)
    draft_progress.look(16, [1, 2, 3, 4], 4, {1, 2, 3, 4}, 3)
    assert (draft_progress.computed, draft_progress.settled) == (16, 3)


def test_pages_that_can_still_be_swapped_are_looked_at_again() -> None:
    draft_progress = DraftProgress()
    for _ in range(2):
        draft_progress.look(13, [1, 2, 3, 4], 4, {1, 2, 3, 4}, 1)
        assert draft_progress.computed == 12
    assert draft_progress.settled == 1
    draft_progress.look(13, [1, 9, 3, 4], 4, {1, 2, 3, 4}, 1)
    assert draft_progress.computed == 4


def test_sampled_answers_are_guessed_with_their_noise() -> None:
    groups = [tiny.group(uid, prompt(uid, 9), 24, Sampling(temperature=1.0, seed=uid), drafts=3) for uid in range(8)]
    own = free(engine("tokens=3", 16))
    world = drive(own, groups, Habits())
    assert world.accepted == world.drafted > 100


@pytest.mark.parametrize("page", [4, 8])
def test_who_guesses_for_itself_is_always_right_though_pages_are_swapped(page: int) -> None:
    """Of those with the same prompt, pages go for which another has the same: what was computed there is computed no more."""
    self_drafting = free(engine(f"tokens={page}", page, 2000, True))
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
