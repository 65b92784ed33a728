"""Running out of memory in a step changes no token: the step is computed in parts, and only a group that is too large by itself
fails. Planted faults show that the checks find them."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.shard import logits
from penstock.shard.books import Books
from penstock.shard.decoding.hypotheses import Search
from penstock.shard.engine import Engine
from penstock.shard.messages import step_reply
from penstock.shard.out_of_memory import ALONE, PATIENCE, REMEDY, Limit, divide, pieces_of, ran_out
from penstock.shard.parallel import Ranks
from penstock.shard.sequence import Group, Sampling, sequences
from penstock.shard.step import Span
from penstock.tests.shard import tiny
from penstock.tests.shard.driver import Results, Traffic, drive
from penstock.tests.shard.test_against_transformers import all_pages_free, prompt

COUNT = 10  # tokens generated
PAGE_SIZE = 4  # of a page


class LimitedMemoryEngine(Engine):
    """Runs out of memory in forward passes of more than `tokens` tokens, and for sequences longer than `reach`."""

    def __init__(self, tokens: int = 999, reach: int = 999, ahead: bool = False) -> None:
        super().__init__(tiny.decoder("llama"), tiny.CPU, PAGE_SIZE, overlap=ahead)
        self.resize(600)
        self.refuses: Callable[[Span], bool] = lambda span: span.start + len(span.tokens) > reach
        self.failures = 0
        self.largest = 0  # the most tokens that one forward pass computed
        original = self.forward

        def forward(spans: Sequence[Span], picked: Tensor | None = None) -> Any:
            if any(map(self.refuses, spans)):
                self.fail()
            hidden = original(spans, picked)  # keys and values are written before memory runs out
            count = sum(len(span.tokens) for span in spans)
            if count > tokens:
                self.fail()
            self.largest = max(self.largest, count)
            return hidden

        self.forward: Any = forward

    def fail(self) -> None:
        self.failures += 1
        raise (torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("x] . can't allocate memory: y"))[
            self.failures % 3
        ]


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The number of logit rows that there is memory for."""
    limits = {"rows": 999}
    original = logits._pending

    def limited(means: Any, own: Tensor, *rest: Any) -> Any:
        if len(own) > limits["rows"]:
            raise torch.OutOfMemoryError
        return original(means, own, *rest)

    monkeypatch.setattr(logits, "_pending", limited)
    return limits


def random_requests(count: int, seed: int) -> list[Group]:
    """Random requests of all kinds, many with a shared prefix."""
    chance = random.Random(seed)
    shared = prompt(0, 40)
    groups = []
    for uid in range(count):
        tokens = (*shared[: chance.choice([0, 8, 30, 40])], *prompt(100 + uid, chance.randint(1, 30)))
        sampling = Sampling(temperature=chance.choice([0.0, 0.9]), seed=uid)
        more: dict[str, Any] = chance.choice(
            [{}, {"choices": 3}, {"prompt_logprobs": True}, {"drafts": 3}, {"search": Search(2, 2)}]
        )
        groups.append(tiny.group(uid, tokens, COUNT, Sampling() if "search" in more else sampling, **more))
    return groups


def check_results(engine: Engine, groups: Sequence[Group], expected: Results, seed: int) -> None:
    results = drive(engine, groups, Traffic(chunk=chunk_of(seed), pause=0.05), seed)
    assert results.failed == {}
    assert results.tokens == expected.tokens
    assert all_pages_free(engine)


def chunk_of(seed: int) -> int:
    return (7, 40, 999)[seed % 3]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("limits", [(1, 999), (5, 3), (23, 1), (999, 2)])
def test_tokens_are_the_same_when_steps_are_computed_in_parts(seed: int, limits: tuple[int, int], rows: dict[str, int]) -> None:
    expected = drive(tiny.engine("llama", PAGE_SIZE, 600), random_requests(12, seed), Traffic())
    engine = LimitedMemoryEngine(limits[0])
    rows["rows"] = max(limits[1], 4)  # a group's rows are sampled together: with three drafts there are four
    check_results(engine, random_requests(12, seed), expected, seed)
    assert engine.memory_fallback._count > 0
    assert engine.largest <= limits[0] + 3  # the tokens of a draft tree are not divided


def groups_of_which_half_are_too_long() -> list[Group]:
    """Eight long groups with a shared prefix, each two with the same prompt, and eight short ones."""
    long = [prompt(0, 12) + prompt(1 + uid // 2, 40) for uid in range(8)]
    short = [prompt(0, 12) + prompt(50 + uid, uid) for uid in range(8)]
    return [tiny.group(uid, tokens, COUNT) for uid, tokens in enumerate([*long, *short])]


def check_too_long_groups_fail() -> None:
    """Too long groups fail, in their prompt or when they decode; no other group fails, and no uncomputed page is found."""
    for seed, reach in enumerate((45, 50, 54, 58)):
        engine = LimitedMemoryEngine(tokens=40, reach=reach)
        expected = drive(tiny.engine("llama", PAGE_SIZE, 600), groups_of_which_half_are_too_long(), Traffic()).answers
        results = drive(engine, groups_of_which_half_are_too_long(), Traffic(chunk=chunk_of(seed), arrivals=16), seed)
        assert results.failed == dict.fromkeys(range(8), ALONE)
        assert {uid: results.answers[uid] for uid in range(8, 16)} == {uid: expected[uid] for uid in range(8, 16)}
        assert all_pages_free(engine)
        engine.refuses = lambda span: False
        assert drive(engine, groups_of_which_half_are_too_long(), Traffic()).answers == expected


def test_groups_too_large_for_memory_fail_alone() -> None:
    check_too_long_groups_fail()


def test_check_catches_announced_pages_that_were_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Books, "withdraw", lambda books, group: None)
    with pytest.raises(AssertionError):
        check_too_long_groups_fail()


def check_equal_prompts() -> None:
    """Two groups with the same prompt compute it separately, since one has prompt_logprobs; only the other runs out of memory."""
    tokens_of_prompt = prompt(1, 30)
    engine = LimitedMemoryEngine()
    failing, surviving = tiny.group(1, tokens_of_prompt, COUNT), tiny.group(2, tokens_of_prompt, COUNT, prompt_logprobs=True)
    engine.refuses = lambda span: span.sequence is failing.sequences[0] and span.start + len(span.tokens) > 20
    outcome = engine.prefill(1, [failing, surviving], [(1, 99), (2, 99)], 99, [])
    assert outcome.failed == [(1, ALONE)]
    assert step_reply(1, outcome).step.exhausted == outcome.exhausted >= 2
    assert engine.decode([]).exhausted == 0
    tokens = [emitted.pick.token for _, emitted in outcome.emitted]
    while len(tokens) < COUNT:
        tokens += [emitted.pick.token for _, emitted in engine.decode([1]).emitted]
    assert tokens == drive(tiny.engine("llama"), [tiny.group(1, tokens_of_prompt, COUNT)], Traffic()).answers[1]
    assert all_pages_free(engine)


def test_lost_page_does_not_replace_an_equal_computed_page() -> None:
    check_equal_prompts()


def test_check_catches_lost_pages_that_replace_computed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Books.fail

    def failing_late(books: Books, group: Group, *rest: Any) -> None:
        monkeypatch.setattr(Books, "withdraw", withdraw)
        original(books, group, *rest)

    withdraw = Books.withdraw
    monkeypatch.setattr(Books, "withdraw", lambda books, group: None)
    monkeypatch.setattr(Books, "fail", failing_late)
    with pytest.raises(AssertionError):
        check_equal_prompts()


def test_group_that_depends_on_a_lost_page_fails_too() -> None:
    """A group that found pages which another was about to compute, and had no token of its own in the step, fails with it."""
    engine = LimitedMemoryEngine()
    engine.refuses = lambda span: span.sequence.tokens[0] == 1 and span.start + len(span.tokens) > 9
    tokens_of_prompt = (1, *prompt(2, 19))
    groups = [
        tiny.group(1, tokens_of_prompt, COUNT),
        tiny.group(2, (*tokens_of_prompt, 3, 4), COUNT),
        tiny.group(3, prompt(4, 5), COUNT),
    ]
    outcome = engine.prefill(1, groups, [(3, 9), (1, 99), (2, 99)], 25, [])
    assert sorted(outcome.failed) == [(1, ALONE), (2, ALONE)]
    assert [uid for uid, _ in outcome.emitted] == [3]
    assert engine.memory_fallback._tokens.most == 12  # half of the step, not what was tried for the group that is too large


def test_group_with_too_many_logit_rows_for_memory_fails_alone(rows: dict[str, int]) -> None:
    rows["rows"] = 2
    groups = [tiny.group(uid, prompt(uid, 9), COUNT, choices=3 if uid == 1 else 1) for uid in range(4)]
    results = drive(LimitedMemoryEngine(), groups, Traffic())
    assert results.failed == {1: ALONE}
    expected = drive(tiny.engine("llama"), groups_without(groups, 1), Traffic()).answers
    assert {uid: results.answers[uid] for uid in expected} == expected


def groups_without(groups: Sequence[Group], uid: int) -> list[Group]:
    return [tiny.group(one.uid, one.sequences[0].tokens[: one.prompt_length], COUNT) for one in groups if one.uid != uid]


def test_drafts_are_left_out_when_the_proposer_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tokens_of_prompt = tiny.engine("llama"), prompt(1, 5) * 4
    propose, count = engine.speculator.propose, iter(range(999))

    def fail(requests: Any) -> int:
        if next(count) % 2:
            raise torch.OutOfMemoryError
        return propose(requests)

    monkeypatch.setattr(engine.speculator, "propose", fail)
    results = drive(engine, [tiny.group(1, tokens_of_prompt, 40, drafts=4)], Traffic())
    assert results.answers == drive(tiny.engine("llama"), [tiny.group(1, tokens_of_prompt, 40)], Traffic()).answers
    assert results.drafted > 0
    assert next(count) > 3


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "Triton Error [CUDA]: out of memory",  # at a kernel's first launch, or if its threads need more memory than others'
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 34 bytes.",
    ],
)
def test_out_of_memory_errors_are_recognized_by_their_messages(message: str) -> None:
    assert ran_out(RuntimeError(message))
    assert not ran_out(RuntimeError(message.replace("memory", "bounds").replace("ALLOC", "MAPPING")))


def test_other_errors_are_raised() -> None:
    engine = tiny.engine("llama")

    def fail(spans: Sequence[Span]) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine.forward = fail  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="illegal"):
        engine.prefill(1, [tiny.group(1, prompt(1, 9), COUNT)], [(1, 9)], 9, [])


def test_out_of_memory_is_raised_with_several_ranks() -> None:
    def work(ranks: Ranks) -> None:
        engine = tiny.rank_engine("llama", ranks)

        def fail(spans: Sequence[Span]) -> Tensor:
            raise torch.OutOfMemoryError

        engine.forward = fail  # type: ignore[assignment]
        engine.prefill(1, [tiny.group(1, prompt(1, 9), COUNT)], [(1, 9)], 9, [])

    with pytest.raises(torch.OutOfMemoryError):
        tiny.ThreadedRanks().run(work)


def test_token_limit_is_lifted_after_enough_successful_steps() -> None:
    limit = Limit()
    limit.fail(100)
    assert limit.most == 50
    for _ in range(PATIENCE):
        assert limit.most == 50
        limit.succeed(20)  # far below the limit: this doesn't count
        limit.succeed(80)
    assert limit.most == 100


def test_pieces_of_a_step_are_ordered_by_their_dependencies() -> None:
    chance = random.Random(1)
    for _ in range(200):
        spans, rows = [], []
        for number in range(chance.randint(1, 6)):
            count = chance.randint(1, 9)
            [sequence], _ = sequences([0] * 99, 1)
            parents = [-1] * count if chance.random() < 0.3 else None
            wanted = chance.randint(0, count)
            spans.append(Span(sequence, chance.randint(0, 20), [number] * count, parents=parents, wanted=wanted))
            rows += [(number, spans[-1].start + count - wanted + i) for i in range(wanted)]
        most, left, found, last = chance.randint(1, 8), pieces_of(spans), {}, 0
        computed = dict.fromkeys(range(len(spans)), 0)
        while left:
            part, left = divide(left, most)
            assert sum(piece.tokens for piece in part) <= most or len(part) == 1
            for piece in part:
                span, number = piece.span, piece.span.tokens[0]
                assert span.start == spans[number].start + computed[number]
                assert spans[number].start >= last
                last = spans[number].start
                computed[number] += piece.tokens
                for i in range(span.wanted):
                    found[piece.row + i] = number, span.start + piece.tokens - span.wanted + i
        assert computed == {number: len(span.tokens) for number, span in enumerate(spans)}
        assert [found[row] for row in range(len(rows))] == rows


def test_out_of_memory_with_recurrent_states_is_logged_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    """With several ranks, and with recurrent states, the shards end."""
    with pytest.raises(MemoryError):
        tiny.engine("qwen3.5").memory_fallback.attempt(lambda: (_ for _ in ()).throw(MemoryError()))
    assert caplog.messages == [f"memory ran out. {REMEDY}"]
