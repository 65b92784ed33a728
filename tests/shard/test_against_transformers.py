"""The shard against transformers (the oracle): logits within 1e-4 and equal tokens, for every model family, however prompts are cut
into chunks, weights are split over ranks and caches into pages, and however requests are batched with others and preempted. Also
seeded sampling, end tokens, page accounting, and requests that fail."""

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
from penstock.tests.shard.driver import UNLIMITED, Results, Traffic, drive

FAMILIES = sorted(configurations.FAMILIES)
ANSWER_LENGTH = 12  # tokens generated for each request
FEW_PROMPTS = 7, 50  # for tests of every family: how many prompts, and the length of the longest
TOLERANCE = 1e-4


def prompt(seed: int, length: int, vocabulary: int = VOCABULARY) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(vocabulary) for _ in range(length))


def prompts(count: int, longest: int = 90, vocabulary: int = VOCABULARY) -> tuple[tuple[int, ...], ...]:
    """Prompts of 1 token and more, some longer than the largest page that is tested."""
    generator = random.Random(count)
    lengths = [generator.choice([1, 2, 15, 16, 17, longest, generator.randint(1, longest)]) for _ in range(count)]
    return tuple(prompt(seed, length, vocabulary) for seed, length in enumerate(lengths))


def greedy_requests(token_lists: Sequence[Sequence[int]], sampling: Sampling | None = None) -> list[Group]:
    return [tiny.group(uid, tokens, ANSWER_LENGTH, sampling) for uid, tokens in enumerate(token_lists)]


def all_pages_free(engine: Engine) -> bool:
    """No page of the pool is used or referenced."""
    return engine.pool.free == engine.pool.pages and not any(engine.pool._references)


# Logits


class SpanRunner:
    """Runs spans through a decoder and pages, and returns their logits, without an engine's bookkeeping of groups."""

    def __init__(self, name: str, page_size: int) -> None:
        self.engine = tiny.engine(name, page_size, 1024)
        self.states = 0  # slots of recurrent states that sequences have

    @torch.inference_mode()
    def run(self, spans: Sequence[step.Span]) -> Tensor:
        """[wanted rows, vocabulary]. Marks the spans' tokens as computed, except those of a tree."""
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
        """A sequence all of whose `tokens` have been computed."""
        [sequence], _ = tokens_of(tokens, 1)
        if tokens:
            self.run([step.Span(sequence, 0, sequence.tokens)])
        return sequence


def assert_logits_close(found: Tensor, expected: Tensor) -> None:
    """With a relative tolerance beside the absolute one, since each kind of processor rounds sums differently."""
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", [*FAMILIES, "demo"])
def test_logits_of_randomly_chunked_prompts_equal_transformers(name: str) -> None:
    """Five prompts in one batch, each cut into chunks at random places."""
    generator = random.Random(1)
    runner = SpanRunner(name, 16)
    token_lists = [prompt(seed, length) for seed, length in enumerate((1, 3, 17, 40, 90))]
    sequences = [tokens_of(tokens, 1)[0][0] for tokens in token_lists]
    logits: list[list[Tensor]] = [[] for _ in token_lists]
    while any(one.computed < len(one.tokens) for one in sequences):
        running = [i for i, one in enumerate(sequences) if one.computed < len(one.tokens) and generator.random() < 0.7]
        cuts = [generator.randint(1, min(30, len(sequences[i].tokens) - sequences[i].computed)) for i in running]
        spans = [
            step.Span(sequences[i], start := sequences[i].computed, sequences[i].tokens[start : start + cut], wanted=cut)
            for i, cut in zip(running, cuts, strict=True)
        ]
        if spans:
            for i, part in zip(running, runner.run(spans).split(cuts), strict=True):
                logits[i].append(part)
    for parts, expected in zip(logits, tiny.expected_logits_batch(name, token_lists), strict=True):
        assert_logits_close(torch.cat(parts), expected)


@pytest.mark.parametrize("name", ["deepseek-v32", "llama", "llama4", "mistral"])
@pytest.mark.parametrize("cut", [0, 1, 64, 129])
def test_logits_of_a_long_prompt_equal_transformers(name: str, cut: int) -> None:
    """In one or two chunks, with no other sequence in the step."""
    runner = SpanRunner(name, 16)
    tokens = prompt(cut, 200)
    sequence = runner.start(tokens[:cut])
    found = runner.run([step.Span(sequence, cut, tokens[cut:], wanted=200 - cut)])
    assert_logits_close(found, tiny.expected_logits(name, tokens)[cut:])


# Trees


def random_tree(nodes: int, seed: int) -> list[int]:
    """The parents of a random tree's nodes, with several roots, branches and chains."""
    generator = random.Random(seed)
    return [generator.choice([-1, *range(i), *[i - 1] * i]) for i in range(nodes)]


def check_tree(name: str, page_size: int) -> None:
    """One step with draft trees of two sequences, a chain of draft tokens, a decode and a chunk of a prompt: the logits of each
    node equal transformers' for the path to it."""
    runner = SpanRunner(name, page_size)
    base = [prompt(seed, length) for seed, length in ((1, 21), (2, 3), (3, 9), (4, 30), (5, 4))]
    nodes = [prompt(10, 13), prompt(11, 9), prompt(12, 9), prompt(13, 1), prompt(14, 25)]
    parents = [random_tree(13, 7), random_tree(9, 8), None, None, None]
    sequences = [runner.start(tokens) for tokens in base]
    spans = [
        step.Span(sequence, sequence.computed, tokens_of_nodes, parents=parents_of_nodes, wanted=len(tokens_of_nodes))
        for sequence, tokens_of_nodes, parents_of_nodes in zip(sequences, nodes, parents, strict=True)
    ]
    paths = []
    for start, tokens_of_nodes, parents_of_nodes in zip(base, nodes, parents, strict=True):
        for node in range(len(tokens_of_nodes)):
            path: list[int] = []
            while node >= 0:
                path.insert(0, tokens_of_nodes[node])
                node = parents_of_nodes[node] if parents_of_nodes is not None else node - 1
            paths.append([*start, *path])
    for logits, expected in zip(runner.run(spans), tiny.expected_logits_batch(name, paths), strict=True):
        assert_logits_close(logits, expected[-1])


@pytest.mark.parametrize(
    "name", ["bloom", "deepseek-v3", "gemma3n", "gemma4", "glm-5", "llama", "mistral", "mistral-large4", "qwen3"]
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_draft_tree_nodes_attend_to_their_own_path_only(name: str, page_size: int) -> None:
    check_tree(name, page_size)


def test_tree_check_fails_if_positions_are_slots_instead_of_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "depths", lambda parents: list(range(len(parents))))
    with pytest.raises(AssertionError):
        check_tree("llama", 16)


def test_tree_check_fails_if_the_mask_is_causal_instead_of_the_tree_mask(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_expected_next_tokens_equal_transformers_generate(name: str) -> None:
    """`tiny.expected_next_tokens` is the oracle of the tests below; transformers' `generate` is the oracle here."""
    tokens_of_prompt = prompts(4)[-1]
    tokens = torch.tensor([list(tokens_of_prompt)])
    options = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    answer = tiny.reference(name).generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    generated = {0: answer[0, len(tokens_of_prompt) :].tolist()}
    assert generated == tiny.expected_next_tokens(name, (tokens_of_prompt,), generated, 6)


def test_expected_next_tokens_differ_from_every_wrong_answer() -> None:
    """And equal the right answer: with a token changed, missing or added, they differ."""
    token_lists = prompts(4)
    answers = dict(enumerate(tiny.greedy("llama", token_lists, 5)))
    assert tiny.expected_next_tokens("llama", token_lists, answers, 5) == answers
    for uid, right in answers.items():
        changed = [[*right[:at], (right[at] + 1) % VOCABULARY, *right[at + 1 :]] for at in range(5)]
        for wrong in (*changed, right[:-1], [*right, 1], []):
            assert tiny.expected_next_tokens("llama", token_lists, answers | {uid: wrong}, 5) != answers | {uid: wrong}
    assert tiny.expected_next_tokens("llama", token_lists, {uid: answers[uid] for uid in range(3)}, 5).keys() == answers.keys()


def check_greedy(name: str, engine: Engine, asked: tuple[tuple[int, ...], ...], habits: Traffic, seed: int = 0) -> Results:
    result = drive(engine, greedy_requests(asked), habits, seed)
    assert result.failed == {}
    assert result.answers == tiny.expected_next_tokens(name, asked, result.answers, ANSWER_LENGTH)
    assert all_pages_free(engine)
    return result


def check_preemption(name: str, chunk: int) -> None:
    """Tokens stay the same if requests are preempted and recomputed, in reused pages, with hits in the prefix cache."""
    token_lists = tuple(prompt(seed, length) for seed, length in ((1, 40), (1, 60), (3, 9), (1, 33)))
    for seed in range(2):
        check_greedy(name, tiny.engine(name, page_size=4, pages=90), token_lists, Traffic(pause=0.2, chunk=chunk), seed)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("chunk", [1, 7, 64, UNLIMITED])
def test_64_staggered_requests_get_transformers_greedy_tokens(page_size: int, chunk: int) -> None:
    pages = 64 * -(-(90 + ANSWER_LENGTH) // page_size)
    result = check_greedy("mistral", tiny.engine("mistral", page_size, pages), prompts(64), Traffic(chunk), page_size + chunk)
    assert result.mixed > 5


@pytest.mark.parametrize("name", [*FAMILIES, "demo"])
def test_greedy_tokens_of_every_family_equal_transformers(name: str) -> None:
    check_greedy(name, tiny.engine(name), prompts(*FEW_PROMPTS), Traffic(chunk=7, pause=0.1))


def test_64_staggered_requests_to_the_demo_model_get_transformers_tokens() -> None:
    check_greedy("demo", tiny.engine("demo", 4, 64 * 9), prompts(64, 24), Traffic(chunk=7))


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_of_every_family_on_two_ranks_equal_transformers(name: str) -> None:
    """Ranks are threads here; in test_processes.py they are processes."""
    token_lists = prompts(*FEW_PROMPTS)

    def work(ranks: Ranks) -> dict[int, list[int]]:
        engine = tiny.rank_engine(name, ranks)
        answers = drive(engine, greedy_requests(token_lists), Traffic(chunk=16, pause=0.1)).answers
        assert all_pages_free(engine)
        return answers

    first, second = tiny.ThreadedRanks().run(work)
    assert first == second == tiny.expected_next_tokens(name, token_lists, first, ANSWER_LENGTH)


def test_logprobs_of_two_ranks_equal_those_of_one() -> None:
    """Of prompts and of alternatives, which are computed from the gathered slices of the vocabulary."""
    token_lists = prompts(3, 40)
    sampling = Sampling(temperature=0.8, seed=3)

    def work(ranks: Ranks) -> list[float]:
        engine = tiny.rank_engine("qwen2", ranks)
        groups = [tiny.group(uid, tokens, 4, sampling, top_n=3, prompt_logprobs=True) for uid, tokens in enumerate(token_lists)]
        outcome = engine.prefill(1, groups, [(uid, len(tokens)) for uid, tokens in enumerate(token_lists)], 999, [])
        scores = [score for _, values, _ in outcome.prompts for score in values]
        return scores + [value for _, emitted in outcome.emitted for _, value in emitted.pick.top]

    first, _ = tiny.ThreadedRanks().run(work)
    [single_rank] = [work(Ranks(0, 1, tiny.CPU))]
    assert first == pytest.approx(single_rank, abs=TOLERANCE)
    assert len(first) == sum(map(len, token_lists)) - 3 + 9


def test_greedy_check_fails_if_a_slot_of_a_page_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    write = operations.write

    def skip_one_slot_in_16(slots: Tensor, rows: Tensor, cache: Tensor, scales: Tensor | None = None) -> None:
        write(slots.where(slots % 16 != 5, -1), rows, cache, scales)

    monkeypatch.setattr(operations, "write", skip_one_slot_in_16)
    with pytest.raises(AssertionError):
        check_greedy("llama", tiny.engine("llama"), prompts(10), Traffic())


# Seeded sampling


SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=12345, repetition_penalty=1.1)


def neighbour_requests(count: int) -> list[Group]:
    """Requests with random sampling parameters."""
    generator = random.Random(4)
    requests = []
    for uid, tokens in enumerate(prompts(count, 40)):
        sampling = Sampling(
            temperature=generator.choice([0, 0.5, 1.5]),
            top_k=generator.choice([0, 1, 5, 1000]),
            top_p=generator.choice([1, 0.5]),
            min_p=generator.choice([0, 0.1]),
            typical_p=generator.choice([1, 0.8]),
            repetition_penalty=generator.choice([1, 1.3]),
            presence_penalty=generator.choice([0, 0.7]),
            bias=generator.choice([(), ((3, 5.0),)]),
            seed=generator.getrandbits(64),
            final_logprobs=generator.random() < 0.5,
        )
        more = {"top_n": generator.choice([0, 0, 4]), "prompt_logprobs": generator.random() < 0.3}
        requests.append(tiny.group(1000 + uid, tokens, generator.randint(1, 20), sampling, **more))
    return requests


@functools.cache
def answer_alone(uid: int, tokens: tuple[int, ...], sampling: Sampling) -> list[int]:
    return drive(tiny.engine("qwen3"), [tiny.group(uid, tokens, 24, sampling)], Traffic()).answers[uid]


OBSERVED_SAMPLING = [Sampling(), SEEDED, Sampling(temperature=1.0, seed=2**64 - 1)]


@pytest.mark.parametrize(("page_size", "chunk", "pause"), [(1, 7, 0.0), (16, UNLIMITED, 0.0), (4, 1, 0.1), (64, 16, 0.3)])
def test_answers_are_the_same_alone_and_in_a_batch_with_64_others(page_size: int, chunk: int, pause: float) -> None:
    """Also if they are preempted: with a probability of 0.3 per step that happens several times in each answer."""
    groups = neighbour_requests(64)
    tokens = prompt(5, 33)
    for uid, sampling in enumerate(OBSERVED_SAMPLING):
        groups.insert(10 + 20 * uid, tiny.group(uid, tokens, 24, sampling))
    result = drive(tiny.engine("qwen3", page_size, 8192 // page_size), groups, Traffic(chunk, pause), seed=chunk)
    for uid, sampling in enumerate(OBSERVED_SAMPLING):
        assert result.answers[uid] == answer_alone(uid, tokens, sampling)
        assert len(result.answers[uid]) == 24
    assert result.pauses.total() > 10 or not pause


def test_batch_check_fails_if_sampling_noise_depends_on_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    right = noise.gumbel

    def keyed_by_row(seeds: Tensor, choices: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        return right(seeds, choices + torch.arange(len(choices)), positions, ids)

    monkeypatch.setattr(noise, "gumbel", keyed_by_row)
    with pytest.raises(AssertionError):
        test_answers_are_the_same_alone_and_in_a_batch_with_64_others(16, UNLIMITED, 0.0)


@pytest.mark.parametrize("sampling", [Sampling(), SEEDED])
@pytest.mark.parametrize("computed", [0, 1, 6, 9])
def test_paused_group_that_is_added_again_continues_with_the_same_tokens(sampling: Sampling, computed: int) -> None:
    """Paused after `computed` tokens (0: within its prompt), then added again with these tokens, as after a crash."""
    tokens = prompt(9, 20)
    engine = tiny.engine("llama", 4)
    group = tiny.group(1, tokens, 12, sampling)
    first = engine.prefill(1, [group], [(1, 99)], len(tokens) if computed else 7, [])
    received = [emitted.pick.token for _, emitted in first.emitted]
    while len(received) < computed:
        received += [emitted.pick.token for _, emitted in engine.decode([1]).emitted]
    [paused] = engine.pause([1])
    assert all_pages_free(engine)
    assert list(paused.sequences[0].tokens) == [*tokens, *received]
    again = tiny.group(1, tokens, 12, sampling, continuations=[(0, received)] if received else [])
    received += drive(engine, [again], Traffic(chunk=5)).answers[1]
    expected = drive(tiny.engine("llama"), [tiny.group(1, tokens, 12, sampling)], Traffic()).answers[1]
    assert received == expected


def test_restored_group_decodes_once_its_choice_that_is_not_yet_recomputed_ends() -> None:
    """Nothing else would make it decode: no further chunk of it is requested."""
    engine = tiny.engine("llama", 4)
    expected = tiny.greedy("llama", (tuple(range(1, 9)),), 4)[0]
    group = tiny.group(1, list(range(1, 9)), 40, continuations=[(0, expected[:2]), (1, [11] * 12)])
    engine.prefill(1, [group], [(1, 12)], 12, [])
    assert group.lacking > 0
    engine.end([(1, 1)])
    assert group.lacking == 0
    assert [emitted.pick.token for _, emitted in engine.decode([1]).emitted] == expected[2:3]


def test_restored_group_is_not_decoded_before_its_last_token_is_recomputed() -> None:
    """Its state looks like that of a group whose last token was just sampled."""
    engine = tiny.engine("llama")
    outcome = engine.prefill(1, [tiny.group(1, [5, 6], 9, continuations=[(0, [7, 8])])], [(1, 3)], 2, [])
    assert outcome.emitted == engine.decode([1]).emitted == engine.prefill(1, [], [(1, 1)], 1, [1]).emitted == []
    assert [emitted.pick.token for _, emitted in engine.decode([1]).emitted] == tiny.greedy("llama", ((5, 6, 7, 8),), 1)[0]


# End tokens, pages and failures


def test_eos_token_ends_its_sequence_and_is_included_in_the_answer() -> None:
    asked = prompts(10)
    full = tiny.greedy("llama", asked, ANSWER_LENGTH)
    groups = [tiny.group(uid, tokens, ANSWER_LENGTH, end_ids={full[uid][uid], VOCABULARY - 1}) for uid, tokens in enumerate(asked)]
    engine = tiny.engine("llama")
    result = drive(engine, groups, Traffic())
    for uid, tokens in enumerate(full):
        ends = [i for i, token in enumerate(tokens) if token in (full[uid][uid], VOCABULARY - 1)]
        assert result.answers[uid] == tokens[: ends[0] + 1]
        assert result.finishes[uid, 0] == 1
    assert all_pages_free(engine)


@pytest.mark.parametrize("seed", range(6))
def test_all_pages_are_free_after_random_cancellations_and_preemptions(seed: int) -> None:
    engine = tiny.engine("llama", page_size=4, pages=64 * 26)
    token_lists = prompts(64)
    result = drive(engine, greedy_requests(token_lists), Traffic(chunk=16, cancel=0.6, pause=0.1), seed)
    expected = tiny.greedy("llama", token_lists, ANSWER_LENGTH)
    assert len(result.cancelled) > 15
    assert all_pages_free(engine)
    for uid, tokens in result.answers.items():
        assert tokens == (expected[uid] if uid not in result.cancelled else expected[uid][: len(tokens)])


def test_reported_held_grow_and_free_pages_are_exact() -> None:
    engine = tiny.engine("llama", page_size=4, pages=100)
    asked = prompts(8, 30)
    outcome = engine.prefill(1, greedy_requests(asked), [(uid, len(tokens)) for uid, tokens in enumerate(asked)], 999, [])
    standing: dict[int, tuple[int, ...]] = {}
    for _ in range(ANSWER_LENGTH - 1):
        assert all(standing.get(uid) != tuple(reported) for uid, *reported in outcome.standing)  # only what has changed
        standing |= {uid: tuple(reported) for uid, *reported in outcome.standing}
        for uid, group in engine.books.groups.items():
            [sequence] = group.sequences
            final_length = min(sequence.computed + 2, len(asked[uid]) + ANSWER_LENGTH - 1)
            assert standing[uid] == (len(sequence.pages), -(-final_length // 4) - len(sequence.pages), 0)
        assert engine.pool.free == 100 - sum(held for held, _, _ in standing.values())
        outcome = engine.decode([1])
    assert all_pages_free(engine)


def test_full_pool_fails_only_the_requests_that_need_pages() -> None:
    token_lists = prompts(10)
    expected = tiny.greedy("llama", token_lists, ANSWER_LENGTH)
    engine = tiny.engine("llama", page_size=4, pages=60)
    result = drive(engine, greedy_requests(token_lists), Traffic(arrivals=10, careful=False))
    assert 0 < len(result.failed) < 10
    assert all(message.startswith("the pool is full") for message in result.failed.values())
    for uid, tokens in result.answers.items():
        assert tokens == (expected[uid] if uid not in result.failed else expected[uid][: len(tokens)])
    assert all_pages_free(engine)


EARLIER_PROMPTS, LATER_PROMPTS = (
    prompts(4, 20),
    prompts(5, 20),
)  # before and after a prompt with a NaN


@pytest.fixture
def nan_token() -> int:
    """A token that occurs neither in these prompts nor in their answers."""
    used = [
        tokens for asked in (EARLIER_PROMPTS, LATER_PROMPTS) for tokens in (*asked, *tiny.greedy("mistral", asked, ANSWER_LENGTH))
    ]
    return min(set(range(VOCABULARY)).difference(*used))


@pytest.fixture
def nan_engine(monkeypatch: pytest.MonkeyPatch, nan_token: int) -> Engine:
    """An engine in which the embedding of `nan_token` is NaN; its pool is so small that pages are reused at once."""
    engine = tiny.engine("mistral", page_size=16, pages=16)
    embedding = engine.decoder.embedding.clone()
    embedding[nan_token] = torch.nan
    monkeypatch.setattr(engine.decoder, "embedding", embedding)
    return engine


def assert_later_requests_unaffected(engine: Engine) -> None:
    """Requests that reuse the pool's pages get transformers' tokens."""
    assert all_pages_free(engine)
    result = drive(engine, greedy_requests(LATER_PROMPTS), Traffic(arrivals=5))
    assert (result.failed, result.answers) == (
        {},
        tiny.expected_next_tokens("mistral", LATER_PROMPTS, result.answers, ANSWER_LENGTH),
    )


def test_nan_logits_fail_only_their_own_group(nan_engine: Engine, nan_token: int) -> None:
    groups = greedy_requests(EARLIER_PROMPTS)
    groups.insert(2, tiny.group(9, [1, 2, nan_token, *range(30)], ANSWER_LENGTH))
    result = drive(nan_engine, groups, Traffic(arrivals=6))
    assert result.failed.keys() == {9}
    assert "non_finite_logits" in result.failed[9]
    assert [result.answers[uid] for uid in range(4)] == tiny.greedy("mistral", EARLIER_PROMPTS, ANSWER_LENGTH)
    assert_later_requests_unaffected(nan_engine)


def test_nan_logits_on_one_rank_fail_the_group_on_both_ranks() -> None:
    """Rank 1 has no logits of the whole vocabulary: rank 0 must broadcast the failure."""

    def work(ranks: Ranks) -> tuple[dict[int, list[int]], list[int]]:
        engine = tiny.rank_engine("llama", ranks)
        if ranks.rank == 1:
            engine.decoder.embedding[-2] = torch.nan  # the last token's: behind it is a row of padding
        result = drive(engine, [tiny.group(9, [1, VOCABULARY - 1], ANSWER_LENGTH), tiny.group(1, [1, 2, 3], 2)], Traffic())
        assert all_pages_free(engine)
        return result.answers, list(result.failed)

    first, second = tiny.ThreadedRanks().run(work)
    assert first == second == ({9: [], 1: tiny.greedy("llama", ((1, 2, 3),), 2)[0]}, [9])


@pytest.mark.parametrize("ending", ["cancelled", "paused", "out of pages", "cleared"])
def test_pages_of_an_unfinished_nan_prompt_do_not_affect_later_requests(nan_engine: Engine, nan_token: int, ending: str) -> None:
    slots = nan_engine.pool.pages * nan_engine.pool.page_size
    nan_engine.prefill(1, [tiny.group(9, [nan_token] * (slots + 1), ANSWER_LENGTH)], [(9, slots)], slots, [])
    if ending == "cancelled":
        nan_engine.filter([9])
    elif ending == "paused":
        nan_engine.pause([9])
    elif ending == "cleared":
        nan_engine.clear()
    else:
        assert nan_engine.prefill(1, [], [(9, 1)], 1, []).failed
    assert_later_requests_unaffected(nan_engine)


def test_invalid_groups_fail_without_affecting_others() -> None:
    engine = tiny.engine("llama")
    good = prompt(3, 12)
    engine.prefill(1, [tiny.group(1, good, ANSWER_LENGTH), tiny.group(10, good, ANSWER_LENGTH)], [(1, 5), (10, 5)], 10, [])
    bad = [
        tiny.group(1, [1], 1),
        tiny.group(2, [], 1),
        tiny.group(3, [1, VOCABULARY], 1),
        tiny.group(4, [1], 1, end_ids=[VOCABULARY]),
        tiny.group(5, [1], 1, Sampling(bias=((VOCABULARY, 1.0),))),
        tiny.group(6, [1, 2], ANSWER_LENGTH),
        tiny.group(7, [1, 2], 2, continuations=[(0, [1, 2])]),
        tiny.group(8, [1, 2], 9, continuations=[(0, [1]), (0, [2])]),
        tiny.group(9, [1, 2], 0),
        tiny.group(11, [1, 2], 511),
    ]
    outcome = engine.prefill(2, bad, [(2, 1), (3, 2), (4, 1), (5, 1), (6, 2), (77, 4)], 99, [])
    failed = dict(outcome.failed)
    assert set(failed) == {1, 2, 3, 4, 5, 7, 8, 9, 11}  # not 77, an unknown uid: it may have ended just before
    assert {uid for batch in engine.books.batches.values() for uid in batch} == {6, 10}  # failed groups are gone,
    # and so is the earlier group with the same uid
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
    received = [emitted.pick.token for _, emitted in engine.prefill(1, [], [(10, 7)], 7, [2]).emitted][:1]
    for _ in range(ANSWER_LENGTH):
        received += [emitted.pick.token for uid, emitted in engine.decode([1, 2]).emitted if uid == 10]
    assert received == tiny.greedy("llama", (good,), ANSWER_LENGTH)[0]
    assert not engine.prefill(3, [tiny.group(12, [1, 2], 510)], [(12, 1)], 1, []).failed, "as many as there are positions"
    engine.filter([12])
    assert all_pages_free(engine)


@pytest.mark.parametrize("count", [2, 5, 20])
def test_prompt_alternatives_of_equal_logits_are_ordered_by_token_id(count: int) -> None:
    """As in answers, however many alternatives are requested."""
    logits = torch.zeros(1, 2048)
    logits[0, ::3] = 1.0
    group = tiny.group(1, [1, 2], 1, prompt_top_n=count)
    _score(group, logits, torch.tensor([0]))
    assert [token for token, _ in group.prompt_tops] == list(range(0, 3 * count, 3))


def test_sliding_windows_are_shorter_than_the_tested_prompts() -> None:
    """Otherwise the models with sliding windows would not test them."""
    for name in ("mistral", "qwen2-window"):
        windows = tiny.decoder(name).shape.windows
        assert max(windows) == WINDOW < 20
    assert tiny.decoder("qwen2-window").shape.windows == (0, WINDOW)
