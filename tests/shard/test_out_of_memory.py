"""Memory that runs out in a step changes no token: the step is computed in parts, and only what is too large alone fails."""

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
from penstock.tests.shard.driver import Habits, World, drive
from penstock.tests.shard.test_oracle import at_rest, prompt

COUNT = 10  # tokens generated
SIZE = 4  # of a page


class Scarce(Engine):
    """Has no memory for forwards of more than so many tokens, nor for sequences beyond so many of theirs."""

    def __init__(self, tokens: int = 999, reach: int = 999, ahead: bool = False) -> None:
        super().__init__(tiny.decoder("llama"), tiny.CPU, SIZE, ahead=ahead)
        self.resize(600)
        self.refuses: Callable[[Span], bool] = lambda span: span.start + len(span.tokens) > reach
        self.failures = 0
        self.largest = 0  # number of tokens that was computed
        right = self.forward

        def forward(spans: Sequence[Span], picked: Tensor | None = None) -> Any:
            if any(map(self.refuses, spans)):
                self.fail()
            hidden = right(spans, picked)  # some keys and values are written, and then memory runs out
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
    """How many rows there is memory for."""
    most = {"rows": 999}
    right = logits._pending

    def bounded(means: Any, own: Tensor, *rest: Any) -> Any:
        if len(own) > most["rows"]:
            raise torch.OutOfMemoryError
        return right(means, own, *rest)

    monkeypatch.setattr(logits, "_pending", bounded)
    return most


def requests(count: int, seed: int) -> list[Group]:
    """Of all kinds. Many begin alike."""
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


def compare(engine: Engine, groups: Sequence[Group], expected: World, seed: int) -> None:
    world = drive(engine, groups, Habits(chunk=chunk(seed), pause=0.05), seed)
    assert world.failed == {}
    assert world.tokens == expected.tokens
    assert at_rest(engine)


def chunk(seed: int) -> int:
    return (7, 40, 999)[seed % 3]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("most", [(1, 999), (5, 3), (23, 1), (999, 2)])
def test_the_answers_are_the_same_in_parts(seed: int, most: tuple[int, int], rows: dict[str, int]) -> None:
    expected = drive(tiny.engine("llama", SIZE, 600), requests(12, seed), Habits())
    engine = Scarce(most[0])
    rows["rows"] = max(most[1], 4)  # a group's own rows are chosen from at once, those of three drafts here
    compare(engine, requests(12, seed), expected, seed)
    assert engine.memory_fallback._count > 0
    assert engine.largest <= most[0] + 3  # a tree of drafts is not divided


def crowd() -> list[Group]:
    """Eight that reach far and begin alike, in twos with the same prompt, and eight that don't."""
    long = [prompt(0, 12) + prompt(1 + uid // 2, 40) for uid in range(8)]
    short = [prompt(0, 12) + prompt(50 + uid, uid) for uid in range(8)]
    return [tiny.group(uid, tokens, COUNT) for uid, tokens in enumerate([*long, *short])]


def check_alone() -> None:
    """What is too large fails, at its end or when it decodes; nobody else does, and nobody finds what was not computed."""
    for seed, reach in enumerate((45, 50, 54, 58)):
        engine = Scarce(tokens=40, reach=reach)
        expected = drive(tiny.engine("llama", SIZE, 600), crowd(), Habits()).answers
        world = drive(engine, crowd(), Habits(chunk=chunk(seed), arrivals=16), seed)
        assert world.failed == dict.fromkeys(range(8), ALONE)
        assert {uid: world.answers[uid] for uid in range(8, 16)} == {uid: expected[uid] for uid in range(8, 16)}
        assert at_rest(engine)
        engine.refuses = lambda span: False
        assert drive(engine, crowd(), Habits()).answers == expected


def test_what_is_too_large_alone_fails_alone() -> None:
    check_alone()


def test_the_check_finds_pages_that_were_announced_and_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Books, "withdraw", lambda books, group: None)
    with pytest.raises(AssertionError):
        check_alone()


def check_twins() -> None:
    """Two with the same prompt compute it apart, since one wants to hear of all of it, and only the other has no memory."""
    asked = prompt(1, 30)
    engine = Scarce()
    poor, rich = tiny.group(1, asked, COUNT), tiny.group(2, asked, COUNT, prompt_logprobs=True)
    engine.refuses = lambda span: span.sequence is poor.sequences[0] and span.start + len(span.tokens) > 20
    outcome = engine.prefill(1, [poor, rich], [(1, 99), (2, 99)], 99, [])
    assert outcome.failed == [(1, ALONE)]
    assert step_reply(1, outcome).step.exhausted == outcome.exhausted >= 2
    assert engine.decode([]).exhausted == 0
    tokens = [emitted.pick.token for _, emitted in outcome.emitted]
    while len(tokens) < COUNT:
        tokens += [emitted.pick.token for _, emitted in engine.decode([1]).emitted]
    assert tokens == drive(tiny.engine("llama"), [tiny.group(1, asked, COUNT)], Habits()).answers[1]
    assert at_rest(engine)


def test_a_lost_page_does_not_take_the_place_of_one_that_is_computed() -> None:
    check_twins()


def test_the_check_for_twins_finds_lost_pages_that_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Books.fail

    def late(books: Books, group: Group, *rest: Any) -> None:
        monkeypatch.setattr(Books, "withdraw", withdraw)
        right(books, group, *rest)

    withdraw = Books.withdraw
    monkeypatch.setattr(Books, "withdraw", lambda books, group: None)
    monkeypatch.setattr(Books, "fail", late)
    with pytest.raises(AssertionError):
        check_twins()


def test_what_hangs_on_a_lost_page_goes_with_it() -> None:
    """A group that found what another was about to compute, and had no token of its own left in the step."""
    engine = Scarce()
    engine.refuses = lambda span: span.sequence.tokens[0] == 1 and span.start + len(span.tokens) > 9
    asked = (1, *prompt(2, 19))
    groups = [tiny.group(1, asked, COUNT), tiny.group(2, (*asked, 3, 4), COUNT), tiny.group(3, prompt(4, 5), COUNT)]
    outcome = engine.prefill(1, groups, [(3, 9), (1, 99), (2, 99)], 25, [])
    assert sorted(outcome.failed) == [(1, ALONE), (2, ALONE)]
    assert [uid for uid, _ in outcome.emitted] == [3]
    assert engine.memory_fallback._tokens.most == 12  # half of the step, and not what was tried for the one that is too large


def test_rows_that_are_too_many_alone_fail_alone(rows: dict[str, int]) -> None:
    rows["rows"] = 2
    groups = [tiny.group(uid, prompt(uid, 9), COUNT, choices=3 if uid == 1 else 1) for uid in range(4)]
    world = drive(Scarce(), groups, Habits())
    assert world.failed == {1: ALONE}
    expected = drive(tiny.engine("llama"), groups_without(groups, 1), Habits()).answers
    assert {uid: world.answers[uid] for uid in expected} == expected


def groups_without(groups: Sequence[Group], uid: int) -> list[Group]:
    return [tiny.group(one.uid, one.sequences[0].tokens[: one.prompt_length], COUNT) for one in groups if one.uid != uid]


def test_drafts_that_memory_does_not_suffice_for_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = tiny.engine("llama"), prompt(1, 5) * 4
    propose, count = engine.speculator.propose, iter(range(999))

    def fail(asked: Any) -> int:
        if next(count) % 2:
            raise torch.OutOfMemoryError
        return propose(asked)

    monkeypatch.setattr(engine.speculator, "propose", fail)
    world = drive(engine, [tiny.group(1, asked, 40, drafts=4)], Habits())
    assert world.answers == drive(tiny.engine("llama"), [tiny.group(1, asked, 40)], Habits()).answers
    assert world.drafted > 0
    assert next(count) > 3


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "Triton Error [CUDA]: out of memory",  # a kernel that is launched first, or whose threads need more memory than others'
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 34 bytes.",
    ],
)
def test_whose_errors_say_that_memory_ran_out(said: str) -> None:
    assert ran_out(RuntimeError(said))
    assert not ran_out(RuntimeError(said.replace("memory", "bounds").replace("ALLOC", "MAPPING")))


def test_other_errors_are_nobodys_memory() -> None:
    engine = tiny.engine("llama")

    def fail(spans: Sequence[Span]) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine.forward = fail  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="illegal"):
        engine.prefill(1, [tiny.group(1, prompt(1, 9), COUNT)], [(1, 9)], 9, [])


def test_of_several_ranks_none_tries_again() -> None:
    def work(ranks: Ranks) -> None:
        engine = tiny.engine_of("llama", ranks)

        def fail(spans: Sequence[Span]) -> Tensor:
            raise torch.OutOfMemoryError

        engine.forward = fail  # type: ignore[assignment]
        engine.prefill(1, [tiny.group(1, prompt(1, 9), COUNT)], [(1, 9)], 9, [])

    with pytest.raises(torch.OutOfMemoryError):
        tiny.Threads().run(work)


def test_a_limit_is_lifted_when_all_goes_well() -> None:
    limit = Limit()
    limit.fail(100)
    assert limit.most == 50
    for _ in range(PATIENCE):
        assert limit.most == 50
        limit.succeed(20)  # within it: that says nothing
        limit.succeed(80)
    assert limit.most == 100


def test_pieces_are_in_an_order_in_which_none_lacks_another() -> None:
    chance = random.Random(1)
    for _ in range(200):
        spans, rows = [], []
        for number in range(chance.randint(1, 6)):
            count = chance.randint(1, 9)
            [sequence], _ = sequences([0] * 99, 1)
            parents = [-1] * count if chance.random() < 0.3 else None
            wanted = chance.randint(0, count)
            spans.append(Span(sequence, chance.randint(0, 20), [number] * count, parents, wanted))
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


def test_who_can_not_try_again_says_what_helps(caplog: pytest.LogCaptureFixture) -> None:
    """Of several ranks, and of models that remember, the shards end."""
    with pytest.raises(MemoryError):
        tiny.engine("qwen3.5").memory_fallback.attempt(lambda: (_ for _ in ()).throw(MemoryError()))
    assert caplog.messages == [f"memory ran out. {REMEDY}"]
