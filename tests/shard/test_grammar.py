"""Where a sequence stands in its grammar, in the demo model's tokens and in those of tokenizers of other sizes."""

import json
import random
import threading
import time
from collections import Counter
from pathlib import Path
from threading import Event
from typing import Any

import llguidance
import numpy
import pytest
import torch
from numpy.typing import NDArray

from penstock.shard.decoding import grammar as module
from penstock.shard.decoding.background import Background
from penstock.shard.decoding.grammar import Grammars, GrammarState, Unusable, bit
from penstock.shard.decoding.hypotheses import Search
from penstock.shard.decoding.sampler import Pick
from penstock.shard.decoding.stops import StopStrings
from penstock.shard.decoding.strategy import NOT_FINITE
from penstock.shard.decoding.tree import ROOT, Tree, chain, merge
from penstock.shard.engine import Engine
from penstock.shard.masks import Masks, _allow_ends
from penstock.shard.outcome import Outcome
from penstock.shard.parallel import Ranks
from penstock.shard.sequence import Group
from penstock.tests.shard import tiny
from penstock.tests.shard.driver import Habits, drive
from penstock.tests.shard.test_tree import path_to

DEMO = Path(__file__).parents[2] / "demo" / "model"
VOCABULARY = 2048  # the model's; its tokenizer has 1926
END = 2


def regex(pattern: str) -> str:
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def state_of(grammars: Grammars, grammar: str) -> GrammarState:
    """At its beginning."""
    return grammars.compile(grammar).result().copy()


def fitting(state: GrammarState, *path: int) -> int:
    """How many of these tokens, one after the other, may come next."""
    return state.matcher.validate_tokens(list(path))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(DEMO, VOCABULARY)


@pytest.fixture(scope="module")
def pieces() -> list[bytes]:
    """The text of each of the tokenizer's tokens."""
    tokenizer = llguidance.LLTokenizer((DEMO / "tokenizer.json").read_text())
    return [b"" if tokenizer.is_special_token(id) else tokenizer.decode_bytes([id]) for id in range(tokenizer.vocab_size)]


def allowed(mask: NDArray[numpy.int32]) -> list[int]:
    """Ids in one row."""
    return [int(token) for token in numpy.unpackbits(mask.view(numpy.uint8), bitorder="little").nonzero()[0]]


def test_a_mask_holds_all_tokens_that_can_come_next_and_no_others(grammars: Grammars, pieces: list[bytes]) -> None:
    """Of ten words, by looking at every token."""
    words = [b"one", b"on", b"once upon", b"two", b"tent", b"ten", b"one, two", b"\xf0\x9f\x98\x80", b"10", b"1"]
    grammar = regex("one|on|once upon|two|tent|ten|one, two|😀|10|1")
    chance = random.Random(1)
    for _ in range(20):
        state, text, tokens = state_of(grammars, grammar), b"", []
        while True:
            [mask] = grammars.masks([state])
            after = [text + piece if piece else b"?" for piece in pieces]
            fitting = [id for id, one in enumerate(after) if any(word.startswith(one) for word in words)]
            following = {word[len(text) : len(text) + 1] for word in words if word.startswith(text)}
            if len(following) == 1 and following != {b""}:  # what must come comes in the tokenizer's own way
                assert allowed(mask)
                assert set(allowed(mask)) <= set(fitting)
            else:
                assert allowed(mask) == fitting
            assert state.complete == (text in words)
            if not allowed(mask):
                break
            tokens.append(chance.choice(allowed(mask)))
            text = after[tokens[-1]]
            completed = text in words and not any(w != text and w.startswith(text) for w in words)
            assert state.completed_by(tokens[-1:]) == state.completed_by([*tokens[-1:], 1, 2]) == completed
            state.follow(tokens)
        assert text in words
        assert not state.problem


def test_what_is_followed_at_once_and_one_by_one_is_the_same(grammars: Grammars) -> None:
    """A sequence that is restored, or a beam's twin, has the masks that it would have had; and looking ahead moves nothing."""
    schema = {"type": "array", "minItems": 99, "items": {"type": ["integer", "string"]}}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    chance = random.Random(2)
    slow, tokens = state_of(grammars, grammar), []
    for _ in range(60):
        restored, twin = state_of(grammars, grammar), slow.copy()
        for one in (restored, twin, slow):
            one.follow(tokens)
        first, second, third = grammars.masks([slow, restored, twin])
        assert (first == second).all()
        assert (first == third).all()
        ids = allowed(first)
        wrong = next(id for id in range(VOCABULARY) if id not in ids)
        right = chance.choice(ids)
        assert (fitting(slow, right), fitting(slow, wrong), fitting(slow, right, wrong, right)) in ((1, 0, 1), (1, 0, 2), (1, 0, 3))
        tokens.append(right)


SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["a dog", "a cat"]}, "legs": {"type": "integer"}}, "required": ["kind"]}
VISITED = {
    "json": llguidance.LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA)),
    "text": regex("(.|\n)*"),
    "words": regex("(one|two|three|four hundred|a b c d){1,9}"),
    "nowhere": llguidance.LLMatcher.grammar_from_lark('start: "a" (x | /[a-c]+/)\nx: x "b"'),
    "short": regex("[ab]{3}"),
}


@pytest.mark.parametrize("name", list(VISITED))
def test_what_may_follow_a_draft_is_what_may_follow_its_path(name: str, grammars: Grammars) -> None:
    """As a state that has come there by itself says; what may not come is of no interest. Two stand at different places."""
    chance = random.Random(name)
    told: list[list[int]] = [[], []]
    states = [state_of(grammars, VISITED[name]) for _ in told]
    refused = followed = 0
    ends = grammars._tokenizer.result().eos_tokens
    for _ in range(12):
        trees = [drafted(grammars, VISITED[name], own, chance) for own in told]
        masks, complete = grammars.masks_along(states, trees)
        row = 0
        for own, tree in zip(told, trees, strict=True):
            paths = [own, *([*own, *(tree.tokens[one] for one in path_to(tree, node))] for node in range(len(tree)))]
            for path in paths:
                alone = state_of(grammars, VISITED[name])
                if all(token not in ends and fitting(alone, token) and alone.matcher.consume_token(token) for token in path):
                    assert (masks[row] == grammars.masks([alone])[0]).all()
                    assert complete[row] == alone.complete
                    followed += 1
                else:
                    assert masks[row].any()
                    refused += 1
                row += 1
        for state, own, tree in zip(states, told, trees, strict=True):
            assert not state.problem or name == "nowhere"
            first = [tree.tokens[node] for node, parent in enumerate(tree.parents) if parent < 0]
            own += [token for token in first if fitting(state, token) and token not in ends][:1]
            state.follow(own)
    assert refused > 50
    assert followed > 50 or name == "short"


@pytest.mark.parametrize("drafts", [[b'{"', b' "'], [b' "', b'{"'], [b'{"']], ids=["a name first", "a text first", "a name alone"])
def test_what_may_follow_one_draft_is_not_taken_for_what_may_follow_another(
    drafts: list[bytes], grammars: Grammars, pieces: list[bytes]
) -> None:
    """Names of an object and texts are read alike, and other tokens end them. llguidance keeps its last mask, by how it reads."""
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps({"type": "object"}))
    own = [pieces.index(piece) for piece in (b'{"', b"city", b'":')]
    tokens = [pieces.index(piece) for piece in drafts]
    state = state_of(grammars, grammar)
    state.follow(own)
    masks, _ = grammars.masks_along([state], [Tree(tuple(tokens), (ROOT,) * len(tokens))])
    for token, mask in zip(tokens, masks[1:], strict=True):
        assert (mask == afresh(grammars, grammar, [*own, token])).all()
    own.append(pieces.index(b' "'))
    state.follow(own)
    assert (grammars.masks([state])[0] == afresh(grammars, grammar, own)).all()


def afresh(grammars: Grammars, grammar: str, tokens: list[int]) -> NDArray[numpy.int32]:
    """The mask after tokens, by a state that has been nowhere else."""
    state = state_of(grammars, grammar)
    state.follow(tokens)
    return grammars.masks([state])[0]


def drafted(grammars: Grammars, grammar: str, own: list[int], chance: random.Random) -> Tree:
    """A tree of paths that keep the grammar for a while."""
    paths = []
    for _ in range(4):
        state, path = state_of(grammars, grammar), []
        state.follow(own)
        for _ in range(chance.randint(0, 5)):
            ids = allowed(grammars.masks([state])[0])
            wrong = not ids or chance.random() < 0.2
            path.append(chance.choice([END, 0, 2000, 2047, chance.randrange(VOCABULARY)]) if wrong else chance.choice(ids))
            if not wrong:
                state.follow([*own, *path])
        paths.append(chain(path, [-chance.random() for _ in path]))
    return merge(paths)


def test_a_token_that_does_not_fit_is_a_problem_of_its_guide_alone(grammars: Grammars) -> None:
    good, bad = state_of(grammars, regex("a+")), state_of(grammars, regex("a+"))
    bad.follow([END])
    masks = grammars.masks([bad, good])
    assert "can't be followed" in bad.problem
    assert not masks[0].any()
    assert masks[1].any()
    assert not good.problem
    assert not grammars.masks([bad]).any()


@pytest.mark.parametrize("vocabulary", [1900, 1926, 1927, 2047, 4096])
def test_model_and_tokenizer_may_differ_in_size(vocabulary: int) -> None:
    """Ids that only one of them has are never allowed."""
    masks = Grammars(DEMO, vocabulary)
    state = state_of(masks, regex("(.|\n)*"))
    [mask] = masks.masks([state])
    assert mask.shape == (-(-vocabulary // 32),)
    ids = allowed(mask)
    assert max(ids) < min(vocabulary, 1926)
    assert len(ids) > 1000


def test_without_a_tokenizer_there_are_no_grammars(tmp_path: Path) -> None:
    """It is no fault of the model, which serves on."""
    absent = Grammars(tmp_path, VOCABULARY)
    with pytest.raises(Unusable, match=r"grammars need .*tokenizer\.json"):
        state_of(absent, regex("a"))
    whole = json.loads((DEMO / "tokenizer.json").read_text())
    for broken, said in (
        (None, "writes it"),
        ({}, "writes it"),
        ({**whole, "model": {}}, "writes it"),
        ({**whole, "added_tokens": []}, "none"),
        ({**whole, "added_tokens": [7]}, "writes it"),
        ({**whole, "added_tokens": [{"id": -1, "special": True}]}, "writes it"),
        ({**whole, "added_tokens": [{"id": 1 << 70, "special": True}]}, "writes it"),
        ({**whole, "added_tokens": [{"id": "a", "special": True}]}, "writes it"),
        ([whole], "writes it"),
        ("[" * 200_000, "writes it"),
    ):
        (tmp_path / "tokenizer.json").write_text(broken if isinstance(broken, str) else json.dumps(broken))
        with pytest.raises(Unusable, match=said):
            state_of(Grammars(tmp_path, VOCABULARY), regex("a"))


def test_the_latest_grammars_stay_compiled_as_far_as_their_number_and_size_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    class Counted(Grammars):
        def _state(self, grammar: str) -> GrammarState:
            compiled.append(grammar)
            return super()._state(grammar)

    long = "a" * 2000
    size = len(regex(long))
    monkeypatch.setattr(module, "KEPT", 3)
    monkeypatch.setattr(module, "KEPT_CHARACTERS", 2 * size)
    kept = Counted(DEMO, VOCABULARY)
    for text, times in (("a", 1), ("b", 1), ("c", 1), ("a", 0), ("d", 1), ("a", 0), ("b", 1)):  # b was the least recently used
        compiled.clear()
        state_of(kept, regex(text))
        assert len(compiled) == times, text
    for text, times in (
        (long, 1),
        (long, 0),
        (long[1:], 1),
        (long, 0),
        (long + "a", 1),
        (long[1:], 1),
        (3 * long, 1),
        (3 * long, 0),
    ):
        compiled.clear()
        state_of(kept, regex(text))
        assert len(compiled) == times, len(text)


@pytest.mark.parametrize(("generated", "expected"), [(0, [3, 9]), (2, [3, 9]), (3, [2, 3, 9, 31]), (4, [2, 3, 9, 31])])
def test_ends_are_allowed_from_the_token_on_that_they_may_come(generated: int, expected: list[int]) -> None:
    """The grammar is complete, and may go on. Where it may not, ends come however early it is; where it has to, they don't."""
    one = tiny.group(1, [5], 9, end_ids=(2, 31), min_new_tokens=3)
    for row, complete, wanted in (
        ([3, 9], True, expected),
        ([2, 3, 9], True, expected),
        ([], True, [2, 31]),
        ([3, 9], False, [3, 9]),
        ([], False, []),
    ):
        mask = numpy.zeros(1, numpy.int32)
        for token in row:
            mask[0] |= bit(token)
        _allow_ends(mask, one, generated, complete)
        assert allowed(mask) == wanted


def test_bits_are_those_of_signed_words() -> None:
    row = numpy.zeros(2, numpy.int32)
    for token in (0, 31, 32, 63):
        row[token // 32] |= bit(token)
    assert allowed(row) == [0, 31, 32, 63]


def groups() -> list[Group]:
    """Bound and free ones, with an end and without, one that leads nowhere."""
    nowhere = llguidance.LLMatcher.grammar_from_lark('start: "a" x\nx: x "b"')
    ends: dict[str, Any] = {"end_ids": [END]}
    return [
        tiny.group(1, [1, 5, 9], 20, grammar=regex("[a-c]{4,6}"), choices=3, **ends),
        tiny.group(2, [1, 5, 9], 20, grammar=regex("[a-c]{4}"), choices=2),
        tiny.group(3, [1, 7], 20),
        tiny.group(4, [1, 8], 20, grammar=nowhere, **ends),
        tiny.group(5, [1, 8, 9, 10], 20, grammar=regex("x*"), **ends),
    ]


def with_masks(engine: Engine) -> Engine:
    engine._masks = Masks(Grammars(DEMO, VOCABULARY), VOCABULARY)
    return engine


@pytest.mark.parametrize("habits", [Habits(), Habits(chunk=2, pause=0.2, pauses=2)], ids=["calm", "restless"])
def test_ranks_that_see_no_masks_keep_the_same_books(habits: Habits) -> None:
    """What ends by its grammar, what fails by it and what waits for it is told."""

    def work(ranks: Ranks) -> tuple[Any, ...]:
        engine = tiny.engine_of("demo", ranks)
        if not ranks.rank:
            with_masks(engine)
        world = drive(engine, groups(), habits)
        assert not engine.books.groups
        assert engine.pool.free == engine.pool.pages
        return world.tokens, world.finishes, list(world.failed)

    first, second = tiny.Threads().run(work)
    assert first == second
    found, finishes, failed = first
    assert failed == [4]
    assert all(len(found[2, choice]) <= 4 and finishes[2, choice] == 1 for choice in (0, 1))
    alone = drive(with_masks(tiny.engine("demo")), groups(), Habits())
    assert alone.tokens == found


def test_nobody_waits_for_a_grammar_that_is_being_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group stands still, others go on; when there is nobody else, the step waits."""
    engine = with_masks(tiny.engine("demo"))
    assert engine._masks is not None
    waits: list[bool] = []

    def ready(groups: list[Group], wait: bool) -> list[bool]:
        waits.append(wait)
        return [wait] * len(groups)

    monkeypatch.setattr(engine._masks, "ready", ready)
    engine.prefill(1, [tiny.group(1, [1, 2, 3], 9)], [(1, 3)], 99, [])
    bound = tiny.group(2, [1, 2, 3], 9, grammar=regex("ab"), end_ids=[END])
    outcome = engine.prefill(1, [bound], [(2, 3)], 99, [1])
    assert [uid for uid, _ in outcome.emitted] == [1]
    assert engine.books.groups[2].lacking == 3
    engine.filter([1])
    outcome = engine.prefill(1, [], [(2, 3)], 99, [1])
    assert [uid for uid, _ in outcome.emitted] == [2]
    assert waits == [False, True]
    assert isinstance(outcome.emitted[0][1].pick, Pick)


def test_who_waits_for_a_grammar_holds_what_is_cached_of_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router has counted on it, and others might go and leave it to be evicted."""
    engine = with_masks(tiny.engine("demo", 4))
    prompt = list(range(1, 11))
    engine.prefill(1, [tiny.group(1, prompt, 9)], [(1, 10)], 99, [])
    monkeypatch.setattr(engine._masks, "ready", lambda groups, wait: [wait] * len(groups))
    bound = tiny.group(2, prompt, 9, grammar=regex("ab"), end_ids=[END])
    outcome = engine.prefill(1, [bound], [(2, 10)], 99, [1])
    assert bound.sequences[0].computed == 8
    assert (2, 2, 1, 2) in outcome.standing  # two pages held, one to come, two tokens lacking
    assert not outcome.found
    engine.filter([1])
    outcome = engine.prefill(1, [], [(2, 2)], 99, [1])
    assert outcome.found == [(2, 8)]


def test_who_is_restored_lacks_something_until_its_grammar_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though all of it is cached: the router asks no chunk for who lacks nothing."""
    engine, prompt, how = with_masks(tiny.engine("demo", 4)), list(range(1, 10)), {"grammar": regex("[a-z ]*"), "end_ids": [END]}
    [answer] = drive(engine, [tiny.group(1, prompt, 9, **how)], Habits()).tokens.values()
    monkeypatch.setattr(engine._masks, "ready", lambda groups, wait: [wait] * len(groups))
    bound = tiny.group(2, prompt, 9, continuations=[(0, answer[:4])], **how)
    other = tiny.group(3, [1, 2], 9)
    engine.prefill(1, [other], [(3, 2)], 99, [])
    outcome = engine.prefill(1, [bound], [(2, 12)], 99, [1])
    [lacking] = [lacking for uid, _, _, lacking in outcome.standing if uid == 2]
    assert lacking
    assert not bound.decodes
    engine.filter([3])
    engine.prefill(1, [], [(2, lacking)], 99, [])
    assert [uid for uid, _ in engine.decode([1]).emitted] == [2]


def test_ranks_find_the_same_prefixes_after_a_grammar_that_leads_nowhere() -> None:
    """Only the first knows why the group fails. Its pages fill with the step in which it does, and are known already."""
    nowhere = llguidance.LLMatcher.grammar_from_lark('start: /[ab]{4}/ x\nx: x "b"')

    def work(ranks: Ranks) -> tuple[Any, ...]:
        engine = tiny.engine_of("demo", ranks)
        engine.resize(64)
        if not ranks.rank:
            with_masks(engine)

        def fail(uid: int) -> list[int]:
            outcome = engine.prefill(1, [tiny.group(uid, [5, 6], 20, grammar=nowhere, end_ids=(2,))], [(uid, 100)], 100, [])
            tokens = [emitted.pick.token for _, emitted in outcome.emitted]
            while uid in engine.books.groups:
                tokens += [emitted.pick.token for _, emitted in engine.decode([1]).emitted]
            return tokens

        def ask(uid: int, tokens: list[int]) -> tuple[int, int]:
            outcome = engine.prefill(1, [tiny.group(uid, [*tokens, 7], 2)], [(uid, 100)], 100, [])
            while uid in engine.books.groups:
                engine.decode([1])
            return outcome.prompt_tokens, outcome.cached_tokens

        full = [5, 6, *fail(1)][:4]
        found = [ask(2, full)]
        fail(3)
        assert engine.books.prefixes is not None
        return found, ask(4, full), sorted(engine.books.prefixes._nodes), engine.pool._unused

    first, second = tiny.Threads().run(work)
    assert first == second


def test_special_tokens_and_ids_without_a_token_are_no_text(grammars: Grammars) -> None:
    [space] = [id for id in range(3, 1926) if grammars.bytes_of([id]) == b" "][:1]
    assert grammars.bytes_of([3, space, 2047, 1930]) == b" "


def test_tokens_that_were_added_and_are_not_special_are_text(tmp_path: Path) -> None:
    """As <think> and <tool_call> of some models are."""
    source = json.loads((DEMO / "tokenizer.json").read_text())
    for token in source["added_tokens"]:
        token["special"] = token["content"] != "<|user|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(source))
    grammars = Grammars(tmp_path, VOCABULARY)
    assert grammars.bytes_of([2, 3, 4]) == b"<|user|>"
    assert StopStrings(grammars).completed_by([9, 9], 2, 3, ["<|user|>"])
    assert not StopStrings(grammars).completed_by([9, 9], 2, 2, ["<|end|>"])


def test_background_without_a_thread_says_so_and_works_again(monkeypatch: pytest.MonkeyPatch) -> None:
    background, usual = Background(1), threading.stack_size()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            background.submit(lambda: 3).result(10)
    assert threading.stack_size() == usual
    assert background.submit(lambda: 3).result(10) == 3


def test_who_finds_no_thread_for_its_grammar_fails_alone_and_the_next_finds_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = with_masks(tiny.engine("demo"))
    assert engine._masks is not None
    engine._masks._grammars._tokenizer.result()
    engine.prefill(1, [tiny.group(1, [1, 2, 3], 9)], [(1, 3)], 99, [])
    bound = {"grammar": regex("[ab]{3}"), "end_ids": [END]}

    def ask(uid: int) -> Outcome:
        outcome = engine.prefill(1, [tiny.group(uid, [1, 2, 3], 9, **bound)], [(uid, 3)], 99, [])
        while not outcome.failed and not outcome.emitted:  # as long as it is compiled
            outcome = engine.prefill(1, [], [(uid, 3)], 99, [])
        return outcome

    with monkeypatch.context() as patch:
        patch.setattr(Background, "_start", lambda self: RuntimeError("can't start new thread"))
        assert ask(2).failed == [(2, "its grammar can't be compiled now: can't start new thread")]
    assert [uid for uid, _ in ask(3).emitted] == [3]
    assert [uid for uid, _ in engine.decode([1]).emitted] == [1, 3]
    assert engine._masks._grammars._size == len(regex("[ab]{3}"))


def test_a_cancelled_job_is_left_out() -> None:
    background, go = Background(1), Event()
    background.submit(go.wait)
    cancelled, following = background.submit(lambda: 3), background.submit(lambda: 4)
    assert cancelled.cancel()
    go.set()
    assert following.result(10) == 4


def test_a_panic_in_the_background_is_raised_to_who_waits() -> None:
    class Panic(BaseException):
        """As pyo3's."""

    def panics() -> None:
        raise Panic

    background = Background(1)
    for _ in range(2):
        with pytest.raises(Panic):
            background.submit(panics).result(10)
    assert background.submit(lambda: 3).result(10) == 3


@pytest.mark.parametrize("waiting", [4, 9])
def test_more_grammars_wait_than_are_kept(monkeypatch: pytest.MonkeyPatch, waiting: int) -> None:
    """Each is compiled once all the same, and its group begins."""
    compiled = Counter[str]()

    class Slow(Grammars):
        def _state(self, grammar: str) -> GrammarState:
            compiled[grammar] += 1
            time.sleep(0.02)
            return super()._state(grammar)

    monkeypatch.setattr(module, "KEPT", 4)
    engine = tiny.engine("demo", 16, 400)
    engine._masks = Masks(Slow(DEMO, VOCABULARY), VOCABULARY)
    engine.prefill(1, [tiny.group(1, [5, 6, 7], 500)], [(1, 9)], 9, [])
    groups = [tiny.group(10 + i, [5, 6, 7 + i], 9, grammar=regex(f"[a-z]{{3,9}}{i}")) for i in range(waiting)]
    began: set[int] = set()
    outcome = engine.prefill(1, groups, [(group.uid, 9) for group in groups], 999, [1])
    deadline = time.monotonic() + 30
    while len(began) < waiting and time.monotonic() < deadline:
        began |= {uid for uid, _ in outcome.emitted} - {1}
        left = [(group.uid, 9) for group in groups if group.uid not in began]
        outcome = engine.prefill(1, [], left, 999, [])
    assert began == {group.uid for group in groups}
    assert set(compiled.values()) == {1}


def test_who_has_nothing_else_to_do_waits_for_the_grammar_that_is_there_first() -> None:
    slow, fast = Event(), tiny.group(2, [1], 9, grammar="fast")

    class Two(Grammars):
        def _state(self, grammar: str) -> GrammarState:
            assert grammar == "fast" or slow.wait(30)
            return super()._state(regex("a"))

    masks = Masks(Two(DEMO, VOCABULARY), VOCABULARY)
    assert masks.ready([tiny.group(1, [1], 9, grammar="slow"), fast], wait=True) == [False, True]
    slow.set()


def test_a_prompt_that_could_go_on_is_not_held_up_by_a_grammar() -> None:
    """Not even where nothing decodes."""
    slow = Event()

    class One(Grammars):
        def _state(self, grammar: str) -> GrammarState:
            assert slow.wait(30)
            return super()._state(grammar)

    engine = tiny.engine("demo")
    engine._masks = Masks(One(DEMO, VOCABULARY), VOCABULARY)
    groups = [tiny.group(1, [1, 2, 3], 9, grammar=regex("a")), tiny.group(2, [1, 2, 3], 9)]
    assert [uid for uid, _ in engine.prefill(1, groups, [(1, 3), (2, 3)], 99, []).emitted] == [2]
    slow.set()


NOWHERE = llguidance.LLMatcher.grammar_from_lark('start: /[ab]{3}/ x\nx: x "b"')
LOST: dict[str, dict[str, Any]] = {
    "grammar": {"grammar": NOWHERE},
    "at once": {"grammar": llguidance.LLMatcher.grammar_from_lark('start: x\nx: x "b"')},
    "no text": {"search": Search(2, 1), "stops": ("x",)},
}


@pytest.mark.parametrize("several", [False, True], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("why", list(LOST))
def test_a_group_that_can_not_go_on_takes_no_prefix_from_others(why: str, several: bool, tmp_path: Path) -> None:
    """What was computed for its prompt is as good as any, also on ranks that don't know why it fails."""
    prefix = list(range(100, 140))

    def work(ranks: Ranks) -> tuple[int, list[int]]:
        engine = tiny.engine_of("demo", ranks, 4, 200)
        if not ranks.rank:
            with_masks(engine)._stops = StopStrings(Grammars(tmp_path, VOCABULARY))  # there is no tokenizer
        engine.prefill(1, [tiny.group(1, [*prefix, 150], 90)], [(1, 99)], 99, [])
        outcome = engine.prefill(1, [tiny.group(2, [*prefix, 151], 20, **LOST[why])], [(2, 99)], 99, [])
        while 2 in engine.books.groups:
            outcome = engine.decode([1])
        assert [uid for uid, _ in outcome.failed] == [2]
        found = engine.prefill(1, [tiny.group(3, [*prefix, 152], 2)], [(3, 99)], 99, []).cached_tokens
        node = engine.books.groups[1].sequences[0].node
        assert node is not None
        assert node.attached
        assert engine.books.prefixes is not None
        return found, sorted(engine.books.prefixes._nodes)

    both = tiny.Threads().run(work) if several else [work(Ranks(0, 1, tiny.CPU))]
    assert both[0] == both[-1]
    assert both[0][0] == len(prefix)


def test_logits_that_are_no_numbers_are_a_worse_problem_than_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they come from must not be found by others."""
    engine = with_masks(tiny.engine("demo", 4, 200))
    logits = engine.decoder.logits
    monkeypatch.setattr(engine.decoder, "logits", lambda hidden: logits(hidden) * torch.nan)
    outcome = engine.prefill(1, [tiny.group(1, list(range(100, 120)), 20, **LOST["at once"])], [(1, 99)], 99, [])
    assert outcome.failed == [(1, NOT_FINITE)]
    assert engine.books.prefixes is not None
    assert not engine.books.prefixes._nodes
