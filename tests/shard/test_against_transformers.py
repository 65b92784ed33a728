"""The shard computes what transformers computes, to 1e-4 in the logits and to the token, however the work is cut into steps, spread
over ranks and pages, interrupted and mixed with other requests."""

import functools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from penstock.kernels import attention, noise, operations
from penstock.shard import step
from penstock.shard.engine import Engine
from penstock.shard.parallel import Ranks
from penstock.shard.scores import _score
from penstock.shard.sequence import Group, Sampling
from penstock.shard.sequence import Sequence as Tokens
from penstock.shard.sequence import sequences as tokens_of
from penstock.tests.shard import configurations, tiny
from penstock.tests.shard.configurations import VOCABULARY, WINDOW
from penstock.tests.shard.driver import UNLIMITED, Habits, World, drive

FAMILIES = sorted(configurations.FAMILIES)
COUNT = 12  # tokens generated
SOME = 7, 50  # prompts for every family, and the longest
TOLERANCE = 1e-4


def prompt(seed: int, length: int, vocabulary: int = VOCABULARY) -> tuple[int, ...]:
    chance = random.Random(seed)
    return tuple(chance.randrange(vocabulary) for _ in range(length))


def prompts(count: int, longest: int = 90, vocabulary: int = VOCABULARY) -> tuple[tuple[int, ...], ...]:
    """Of lengths from 1 on, some beyond the largest page."""
    chance = random.Random(count)
    lengths = [chance.choice([1, 2, 15, 16, 17, longest, chance.randint(1, longest)]) for _ in range(count)]
    return tuple(prompt(seed, length, vocabulary) for seed, length in enumerate(lengths))


def requests(asked: Sequence[Sequence[int]], sampling: Sampling | None = None) -> list[Group]:
    return [tiny.group(uid, tokens, COUNT, sampling) for uid, tokens in enumerate(asked)]


def at_rest(engine: Engine) -> bool:
    """Every page is back."""
    return engine.pool.free == engine.pool.pages and not any(engine.pool._references)


# Logits


class Bench:
    """A decoder and pages, without an engine: spans in, logits out."""

    def __init__(self, name: str, page_size: int) -> None:
        self.engine = tiny.engine(name, page_size, 1024)
        self.states = 0  # slots that sequences have

    @torch.inference_mode()
    def run(self, spans: Sequence[step.Span]) -> Tensor:
        """[wanted rows, vocabulary]. The spans' tokens count as computed then, unless they are a tree."""
        engine = self.engine
        for span in spans:
            engine.pool.extend(span.sequence.pages, span.start + len(span.tokens))
            if not span.sequence.state:
                self.states += 1
                span.sequence.state = self.states
        logits = engine.decoder.logits(engine.forward(spans))
        for span in spans:
            span.sequence.computed += len(span.tokens) if span.parents is None else 0
        assert logits is not None
        return logits

    def start(self, tokens: Sequence[int]) -> Tokens:
        """A sequence of which all of `tokens` is computed."""
        [sequence], _ = tokens_of(tokens, 1)
        if tokens:
            self.run([step.Span(sequence, 0, sequence.tokens)])
        return sequence


def close(found: Tensor, expected: Tensor) -> None:
    """Large logits may differ by more: sums are rounded otherwise on each kind of processor."""
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", [*FAMILIES, "demo"])
def test_logits_of_chunks_equal_transformers(name: str) -> None:
    """Five prompts side by side, each cut at random places."""
    chance = random.Random(1)
    bench = Bench(name, 16)
    asked = [prompt(seed, length) for seed, length in enumerate((1, 3, 17, 40, 90))]
    sequences = [tokens_of(tokens, 1)[0][0] for tokens in asked]
    found: list[list[Tensor]] = [[] for _ in asked]
    while any(sequence.computed < len(sequence.tokens) for sequence in sequences):
        going = [i for i, one in enumerate(sequences) if one.computed < len(one.tokens) and chance.random() < 0.7]
        cuts = [chance.randint(1, min(30, len(sequences[i].tokens) - sequences[i].computed)) for i in going]
        spans = [
            step.Span(sequences[i], start := sequences[i].computed, sequences[i].tokens[start : start + cut], wanted=cut)
            for i, cut in zip(going, cuts, strict=True)
        ]
        if spans:
            for i, part in zip(going, bench.run(spans).split(cuts), strict=True):
                found[i].append(part)
    for parts, expected in zip(found, tiny.expected_together(name, asked), strict=True):
        close(torch.cat(parts), expected)


@pytest.mark.parametrize("name", ["deepseek-v32", "llama", "llama4", "mistral"])
@pytest.mark.parametrize("cut", [0, 1, 64, 129])
def test_logits_of_a_long_prompt_equal_transformers(name: str, cut: int) -> None:
    """In one or two pieces, with no other row in the step."""
    bench = Bench(name, 16)
    tokens = prompt(cut, 200)
    sequence = bench.start(tokens[:cut])
    found = bench.run([step.Span(sequence, cut, tokens[cut:], wanted=200 - cut)])
    close(found, tiny.expected_logits(name, tokens)[cut:])


# Trees


def tree(nodes: int, seed: int) -> list[int]:
    """Parents: several roots, branches and chains."""
    chance = random.Random(seed)
    return [chance.choice([-1, *range(i), *[i - 1] * i]) for i in range(nodes)]


def check_tree(name: str, page_size: int) -> None:
    """Trees of two sequences, a chain of drafts, a decode and a prompt's chunk in one step."""
    bench = Bench(name, page_size)
    base = [prompt(seed, length) for seed, length in ((1, 21), (2, 3), (3, 9), (4, 30), (5, 4))]
    nodes = [prompt(10, 13), prompt(11, 9), prompt(12, 9), prompt(13, 1), prompt(14, 25)]
    parents = [tree(13, 7), tree(9, 8), None, None, None]
    sequences = [bench.start(tokens) for tokens in base]
    spans = [
        step.Span(sequence, sequence.computed, own, parents=above, wanted=len(own))
        for sequence, own, above in zip(sequences, nodes, parents, strict=True)
    ]
    paths = []
    for start, own, above in zip(base, nodes, parents, strict=True):
        for node in range(len(own)):
            path: list[int] = []
            while node >= 0:
                path.insert(0, own[node])
                node = above[node] if above is not None else node - 1
            paths.append([*start, *path])
    for logits, expected in zip(bench.run(spans), tiny.expected_together(name, paths), strict=True):
        close(logits, expected[-1])


@pytest.mark.parametrize(
    "name", ["bloom", "deepseek-v3", "gemma3n", "gemma4", "glm-5", "llama", "mistral", "mistral-large4", "qwen3"]
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_node_of_a_tree_sees_its_path(name: str, page_size: int) -> None:
    check_tree(name, page_size)


def test_the_tree_check_finds_positions_that_are_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "depths", lambda parents: list(range(len(parents))))
    with pytest.raises(AssertionError):
        check_tree("llama", 16)


def test_the_tree_check_finds_a_mask_that_is_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.ancestry
    triangle = [[j <= i for j in range(64)] for i in range(64)]
    monkeypatch.setattr(
        attention,
        "ancestry",
        lambda parents: ([row[: len(parents)] for row in triangle[: len(parents)]], right(parents)[1]),
    )
    with pytest.raises(AssertionError):
        check_tree("llama", 16)


# Tokens


@pytest.mark.parametrize("name", [*FAMILIES, "demo"])
def test_the_reference_is_what_generate_does(name: str) -> None:
    """`tiny.following`, which everything below is compared with, against the real thing."""
    asked = prompts(4)[-1]
    tokens = torch.tensor([list(asked)])
    options = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    answer = tiny.reference(name).generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    said = {0: answer[0, len(asked) :].tolist()}
    assert said == tiny.following(name, (asked,), said, 6)


def test_what_follows_differs_from_every_other_answer() -> None:
    """And token by token it is the same."""
    asked = prompts(4)
    said = dict(enumerate(tiny.greedy("llama", asked, 5)))
    assert tiny.following("llama", asked, said, 5) == said
    for uid, right in said.items():
        changed = [[*right[:at], (right[at] + 1) % VOCABULARY, *right[at + 1 :]] for at in range(5)]
        for wrong in (*changed, right[:-1], [*right, 1], []):
            assert tiny.following("llama", asked, said | {uid: wrong}, 5) != said | {uid: wrong}
    assert tiny.following("llama", asked, {uid: said[uid] for uid in range(3)}, 5).keys() == said.keys()


def check_greedy(name: str, engine: Engine, asked: tuple[tuple[int, ...], ...], habits: Habits, seed: int = 0) -> World:
    world = drive(engine, requests(asked), habits, seed)
    assert world.failed == {}
    assert world.answers == tiny.following(name, asked, world.answers, COUNT)
    assert at_rest(engine)
    return world


def check_pauses(name: str, chunk: int) -> None:
    """Forgotten and computed anew, with pages that others had, and prefixes that are found: tokens stay."""
    asked = tuple(prompt(seed, length) for seed, length in ((1, 40), (1, 60), (3, 9), (1, 33)))
    for seed in range(2):
        check_greedy(name, tiny.engine(name, page_size=4, pages=90), asked, Habits(pause=0.2, chunk=chunk), seed)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("chunk", [1, 7, 64, UNLIMITED])
def test_64_staggered_requests_get_transformers_tokens(page_size: int, chunk: int) -> None:
    pages = 64 * -(-(90 + COUNT) // page_size)
    world = check_greedy("mistral", tiny.engine("mistral", page_size, pages), prompts(64), Habits(chunk), page_size + chunk)
    assert world.mixed > 5


@pytest.mark.parametrize("name", [*FAMILIES, "demo"])
def test_every_family_gets_transformers_tokens(name: str) -> None:
    check_greedy(name, tiny.engine(name), prompts(*SOME), Habits(chunk=7, pause=0.1))


def test_64_staggered_requests_get_the_trained_models_tokens() -> None:
    check_greedy("demo", tiny.engine("demo", 4, 64 * 9), prompts(64, 24), Habits(chunk=7))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_on_two_ranks(name: str) -> None:
    """Ranks as threads; test_processes.py has them as processes."""
    asked = prompts(*SOME)

    def work(ranks: Ranks) -> dict[int, list[int]]:
        engine = tiny.engine_of(name, ranks)
        answers = drive(engine, requests(asked), Habits(chunk=16, pause=0.1)).answers
        assert at_rest(engine)
        return answers

    first, second = tiny.Threads().run(work)
    assert first == second == tiny.following(name, asked, first, COUNT)


def test_two_ranks_have_the_logits_of_one() -> None:
    """Prompt log-probabilities and alternatives included: they are computed from joined slices."""
    asked = prompts(3, 40)
    sampling = Sampling(temperature=0.8, seed=3)

    def work(ranks: Ranks) -> list[float]:
        engine = tiny.engine_of("qwen2", ranks)
        groups = [tiny.group(uid, tokens, 4, sampling, top_n=3, prompt_logprobs=True) for uid, tokens in enumerate(asked)]
        outcome = engine.prefill(1, groups, [(uid, len(tokens)) for uid, tokens in enumerate(asked)], 999, [])
        scores = [score for _, values in outcome.prompts for score in values]
        return scores + [value for _, emitted in outcome.emitted for _, value in emitted.pick.top]

    first, _ = tiny.Threads().run(work)
    [alone] = [work(Ranks(0, 1, tiny.CPU))]
    assert first == pytest.approx(alone, abs=TOLERANCE)
    assert len(first) == sum(map(len, asked)) - 3 + 9


def test_the_token_check_finds_a_page_that_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    write = operations.write

    def forgetful(slots: Tensor, rows: Tensor, cache: Tensor, scales: Tensor | None = None) -> None:
        write(slots.where(slots % 16 != 5, -1), rows, cache, scales)

    monkeypatch.setattr(operations, "write", forgetful)
    with pytest.raises(AssertionError):
        check_greedy("llama", tiny.engine("llama"), prompts(10), Habits())


# Seeds


SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=12345, repetition_penalty=1.1)


def neighbours(count: int) -> list[Group]:
    """Requests with all kinds of parameters."""
    chance = random.Random(4)
    result = []
    for uid, tokens in enumerate(prompts(count, 40)):
        sampling = Sampling(
            temperature=chance.choice([0, 0.5, 1.5]),
            top_k=chance.choice([0, 1, 5, 1000]),
            top_p=chance.choice([1, 0.5]),
            min_p=chance.choice([0, 0.1]),
            typical_p=chance.choice([1, 0.8]),
            repetition_penalty=chance.choice([1, 1.3]),
            presence_penalty=chance.choice([0, 0.7]),
            bias=chance.choice([(), ((3, 5.0),)]),
            seed=chance.getrandbits(64),
            final_logprobs=chance.random() < 0.5,
        )
        more = {"top_n": chance.choice([0, 0, 4]), "prompt_logprobs": chance.random() < 0.3}
        result.append(tiny.group(1000 + uid, tokens, chance.randint(1, 20), sampling, **more))
    return result


@functools.cache
def alone(uid: int, asked: tuple[int, ...], sampling: Sampling) -> list[int]:
    return drive(tiny.engine("qwen3"), [tiny.group(uid, asked, 24, sampling)], Habits()).answers[uid]


OBSERVED = [Sampling(), SEEDED, Sampling(temperature=1.0, seed=2**64 - 1)]


@pytest.mark.parametrize(("page_size", "chunk", "pause"), [(1, 7, 0.0), (16, UNLIMITED, 0.0), (4, 1, 0.1), (64, 16, 0.3)])
def test_answers_are_the_same_alone_and_among_64_neighbours(page_size: int, chunk: int, pause: float) -> None:
    """Also when they are paused and resumed: with chance 0.3 that happens several times in each answer."""
    groups = neighbours(64)
    asked = prompt(5, 33)
    for uid, sampling in enumerate(OBSERVED):
        groups.insert(10 + 20 * uid, tiny.group(uid, asked, 24, sampling))
    world = drive(tiny.engine("qwen3", page_size, 8192 // page_size), groups, Habits(chunk, pause), seed=chunk)
    for uid, sampling in enumerate(OBSERVED):
        assert world.answers[uid] == alone(uid, asked, sampling)
        assert len(world.answers[uid]) == 24
    assert world.pauses.total() > 10 or not pause


def test_the_check_for_neighbours_finds_noise_that_knows_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    right = noise.gumbel

    def keyed_by_row(seeds: Tensor, choices: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        return right(seeds, choices + torch.arange(len(choices)), positions, ids)

    monkeypatch.setattr(noise, "gumbel", keyed_by_row)
    with pytest.raises(AssertionError):
        test_answers_are_the_same_alone_and_among_64_neighbours(16, UNLIMITED, 0.0)


@pytest.mark.parametrize("sampling", [Sampling(), SEEDED])
@pytest.mark.parametrize("computed", [0, 1, 6, 9])
def test_a_group_that_was_dropped_goes_on_where_it_was(sampling: Sampling, computed: int) -> None:
    """Paused after `computed` tokens (0: within its prompt), it is added again with them, as after a crash."""
    asked = prompt(9, 20)
    engine = tiny.engine("llama", 4)
    group = tiny.group(1, asked, 12, sampling)
    first = engine.prefill(1, [group], [(1, 99)], len(asked) if computed else 7, [])
    got = [emitted.pick.token for _, emitted in first.emitted]
    while len(got) < computed:
        got += [emitted.pick.token for _, emitted in engine.decode([1]).emitted]
    [paused] = engine.pause([1])
    assert at_rest(engine)
    assert list(paused.sequences[0].tokens) == [*asked, *got]
    again = tiny.group(1, asked, 12, sampling, continuations=[(0, got)] if got else [])
    got += drive(engine, [again], Habits(chunk=5)).answers[1]
    expected = drive(tiny.engine("llama"), [tiny.group(1, asked, 12, sampling)], Habits()).answers[1]
    assert got == expected


def test_a_restored_group_goes_on_when_the_choice_that_it_lacked_ends() -> None:
    """Nothing else would make it decode: no chunk of it is asked for any more."""
    engine = tiny.engine("llama", 4)
    said = tiny.greedy("llama", (tuple(range(1, 9)),), 4)[0]
    group = tiny.group(1, list(range(1, 9)), 40, continuations=[(0, said[:2]), (1, [11] * 12)])
    engine.prefill(1, [group], [(1, 12)], 12, [])
    assert group.lacking > 0
    engine.end([(1, 1)])
    assert group.lacking == 0
    assert [emitted.pick.token for _, emitted in engine.decode([1]).emitted] == said[2:3]


def test_a_group_that_lacks_one_token_of_its_restoration_is_not_decoded() -> None:
    """It looks like one whose last token was just chosen."""
    engine = tiny.engine("llama")
    outcome = engine.prefill(1, [tiny.group(1, [5, 6], 9, continuations=[(0, [7, 8])])], [(1, 3)], 2, [])
    assert outcome.emitted == engine.decode([1]).emitted == engine.prefill(1, [], [(1, 1)], 1, [1]).emitted == []
    assert [emitted.pick.token for _, emitted in engine.decode([1]).emitted] == tiny.greedy("llama", ((5, 6, 7, 8),), 1)[0]


# Ends, pages and failures


def test_an_end_token_ends_its_sequence_and_is_part_of_it() -> None:
    asked = prompts(10)
    full = tiny.greedy("llama", asked, COUNT)
    groups = [tiny.group(uid, tokens, COUNT, end_ids={full[uid][uid], VOCABULARY - 1}) for uid, tokens in enumerate(asked)]
    engine = tiny.engine("llama")
    world = drive(engine, groups, Habits())
    for uid, tokens in enumerate(full):
        ends = [i for i, token in enumerate(tokens) if token in (full[uid][uid], VOCABULARY - 1)]
        assert world.answers[uid] == tokens[: ends[0] + 1]
        assert world.finishes[uid, 0] == 1
    assert at_rest(engine)


@pytest.mark.parametrize("seed", range(6))
def test_random_cancels_and_pauses_leave_every_page_free(seed: int) -> None:
    engine = tiny.engine("llama", page_size=4, pages=64 * 26)
    asked = prompts(64)
    world = drive(engine, requests(asked), Habits(chunk=16, cancel=0.6, pause=0.1), seed)
    expected = tiny.greedy("llama", asked, COUNT)
    assert len(world.cancelled) > 15
    assert at_rest(engine)
    for uid, tokens in world.answers.items():
        assert tokens == (expected[uid] if uid not in world.cancelled else expected[uid][: len(tokens)])


def test_held_grow_and_free_are_exact() -> None:
    engine = tiny.engine("llama", page_size=4, pages=100)
    asked = prompts(8, 30)
    outcome = engine.prefill(1, requests(asked), [(uid, len(tokens)) for uid, tokens in enumerate(asked)], 999, [])
    standing: dict[int, tuple[int, ...]] = {}
    for _ in range(COUNT - 1):
        assert all(standing.get(uid) != tuple(now) for uid, *now in outcome.standing)  # only what has changed
        standing |= {uid: tuple(now) for uid, *now in outcome.standing}
        for uid, group in engine.books.groups.items():
            [sequence] = group.sequences
            after = min(sequence.computed + 2, len(asked[uid]) + COUNT - 1)
            assert standing[uid] == (len(sequence.pages), -(-after // 4) - len(sequence.pages), 0)
        assert engine.pool.free == 100 - sum(held for held, _, _ in standing.values())
        outcome = engine.decode([1])
    assert at_rest(engine)


def test_a_full_pool_fails_only_who_asked() -> None:
    asked = prompts(10)
    expected = tiny.greedy("llama", asked, COUNT)
    engine = tiny.engine("llama", page_size=4, pages=60)
    world = drive(engine, requests(asked), Habits(arrivals=10, careful=False))
    assert 0 < len(world.failed) < 10
    assert all(message.startswith("the pool is full") for message in world.failed.values())
    for uid, tokens in world.answers.items():
        assert tokens == (expected[uid] if uid not in world.failed else expected[uid][: len(tokens)])
    assert at_rest(engine)


BEFORE, AFTER = prompts(4, 20), prompts(5, 20)  # of users of a pool with a poisoned prompt


@pytest.fixture
def poison() -> int:
    """A token that they neither have nor get."""
    used = [tokens for asked in (BEFORE, AFTER) for tokens in (*asked, *tiny.greedy("mistral", asked, COUNT))]
    return min(set(range(VOCABULARY)).difference(*used))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch, poison: int) -> Engine:
    """An engine in which the embedding of `poison` is not a number; its pool is small, so that pages are reused at once."""
    engine = tiny.engine("mistral", page_size=16, pages=16)
    embedding = engine.decoder.embedding.clone()
    embedding[poison] = torch.nan
    monkeypatch.setattr(engine.decoder, "embedding", embedding)
    return engine


def unharmed(engine: Engine) -> None:
    """Later users of the pool's pages get what they should."""
    assert at_rest(engine)
    world = drive(engine, requests(AFTER), Habits(arrivals=5))
    assert (world.failed, world.answers) == ({}, tiny.following("mistral", AFTER, world.answers, COUNT))


def test_logits_that_are_not_numbers_fail_only_their_group(poisoned: Engine, poison: int) -> None:
    groups = requests(BEFORE)
    groups.insert(2, tiny.group(9, [1, 2, poison, *range(30)], COUNT))
    world = drive(poisoned, groups, Habits(arrivals=6))
    assert world.failed.keys() == {9}
    assert "non_finite_logits" in world.failed[9]
    assert [world.answers[uid] for uid in range(4)] == tiny.greedy("mistral", BEFORE, COUNT)
    unharmed(poisoned)


def test_both_ranks_fail_what_has_no_token() -> None:
    """Rank 1 sees no logits: it has to be told."""

    def work(ranks: Ranks) -> tuple[dict[int, list[int]], list[int]]:
        engine = tiny.engine_of("llama", ranks)
        if ranks.rank == 1:
            engine.decoder.embedding[-2] = torch.nan  # of the last token: this rank's table has a row of padding
        world = drive(engine, [tiny.group(9, [1, VOCABULARY - 1], COUNT), tiny.group(1, [1, 2, 3], 2)], Habits())
        assert at_rest(engine)
        return world.answers, list(world.failed)

    first, second = tiny.Threads().run(work)
    assert first == second == ({9: [], 1: tiny.greedy("llama", ((1, 2, 3),), 2)[0]}, [9])


@pytest.mark.parametrize("how", ["cancelled", "paused", "out of pages", "cleared"])
def test_pages_of_a_poisoned_prompt_that_was_never_judged_harm_nobody(poisoned: Engine, poison: int, how: str) -> None:
    room = poisoned.pool.pages * poisoned.pool.page_size
    poisoned.prefill(1, [tiny.group(9, [poison] * (room + 1), COUNT)], [(9, room)], room, [])
    if how == "cancelled":
        poisoned.filter([9])
    elif how == "paused":
        poisoned.pause([9])
    elif how == "cleared":
        poisoned.clear()
    else:
        assert poisoned.prefill(1, [], [(9, 1)], 1, []).failed
    unharmed(poisoned)


def test_bad_groups_fail_alone() -> None:
    engine = tiny.engine("llama")
    good = prompt(3, 12)
    engine.prefill(1, [tiny.group(1, good, COUNT), tiny.group(10, good, COUNT)], [(1, 5), (10, 5)], 10, [])
    bad = [
        tiny.group(1, [1], 1),
        tiny.group(2, [], 1),
        tiny.group(3, [1, VOCABULARY], 1),
        tiny.group(4, [1], 1, end_ids=[VOCABULARY]),
        tiny.group(5, [1], 1, Sampling(bias=((VOCABULARY, 1.0),))),
        tiny.group(6, [1, 2], COUNT),
        tiny.group(7, [1, 2], 2, continuations=[(0, [1, 2])]),
        tiny.group(8, [1, 2], 9, continuations=[(0, [1]), (0, [2])]),
        tiny.group(9, [1, 2], 0),
        tiny.group(11, [1, 2], 511),
    ]
    outcome = engine.prefill(2, bad, [(2, 1), (3, 2), (4, 1), (5, 1), (6, 2), (77, 4)], 99, [])
    failed = dict(outcome.failed)
    assert set(failed) == {1, 2, 3, 4, 5, 7, 8, 9, 11}  # 77 may just have ended
    assert {uid for batch in engine.books.batches.values() for uid in batch.groups} == {6, 10}  # what failed is gone,
    # and what was there before it by the same name
    assert engine.pool.pages - engine.pool.free == len(
        {page for uid in (6, 10) for page in engine.books.groups[uid].sequences[0].pages}
    )
    assert "already" in failed[1]
    assert "no tokens" in failed[2]
    assert "token 131 is not in the model's vocabulary of 131" in failed[3]
    assert "from 1 to 1 tokens" in failed[7]
    assert "twice among [0, 0]" in failed[8]
    assert "no tokens" in failed[9]
    assert "2 tokens and 511 more are too many: 512" in failed[11]
    assert [uid for uid, _ in outcome.emitted] == [6]
    got = [emitted.pick.token for _, emitted in engine.prefill(1, [], [(10, 7)], 7, [2]).emitted][:1]
    for _ in range(COUNT):
        got += [emitted.pick.token for uid, emitted in engine.decode([1, 2]).emitted if uid == 10]
    assert got == tiny.greedy("llama", (good,), COUNT)[0]
    assert not engine.prefill(3, [tiny.group(12, [1, 2], 510)], [(12, 1)], 1, []).failed, "as many as there are positions"
    engine.filter([12])
    assert at_rest(engine)


@pytest.mark.parametrize("count", [2, 5, 20])
def test_of_equal_alternatives_of_a_prompt_the_first_come_first(count: int) -> None:
    """However many are asked for, as of an answer's."""
    logits = torch.zeros(1, 2048)
    logits[0, ::3] = 1.0
    asked = tiny.group(1, [1, 2], 1, prompt_top_n=count)
    _score(asked, logits, torch.tensor([0]))
    assert [token for token, _ in asked.prompt_tops] == list(range(0, 3 * count, 3))


def test_a_window_is_smaller_than_what_is_tested() -> None:
    """Else the families with windows would show nothing."""
    for name in ("mistral", "qwen2-window"):
        windows = tiny.decoder(name).shape.windows
        assert max(windows) == WINDOW < 20
    assert tiny.decoder("qwen2-window").shape.windows == (0, WINDOW)
