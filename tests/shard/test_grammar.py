"""Grammar-constrained decoding: token masks, masks along draft trees, compilation in the background, and groups whose grammar has
no continuation; with the demo model's tokenizer and vocabularies of other sizes."""

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

from penstock.shard import masks as shard_masks
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
from penstock.tests.shard.driver import Traffic, drive
from penstock.tests.shard.test_tree import path_to

DEMO = Path(__file__).parents[2] / "demo" / "model"
VOCABULARY = 2048  # the model's; its tokenizer has 1926
END = 2


def regex(pattern: str) -> str:
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def state_of(grammars: Grammars, grammar: str) -> GrammarState:
    """A grammar's state before any token."""
    return grammars.compile(grammar).result().copy()


def allowed_count(state: GrammarState, *path: int) -> int:
    """How many of these tokens, one after the other, the grammar allows next."""
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
    """The allowed token ids in one row of a mask."""
    return [int(token) for token in numpy.unpackbits(mask.view(numpy.uint8), bitorder="little").nonzero()[0]]


def test_mask_allows_exactly_the_tokens_that_can_come_next(grammars: Grammars, pieces: list[bytes]) -> None:
    """A grammar of ten words; the expected mask is computed by trying every token."""
    words = [b"one", b"on", b"once upon", b"two", b"tent", b"ten", b"one, two", b"\xf0\x9f\x98\x80", b"10", b"1"]
    grammar = regex("one|on|once upon|two|tent|ten|one, two|😀|10|1")
    chance = random.Random(1)
    for _ in range(20):
        state, text, tokens = state_of(grammars, grammar), b"", []
        while True:
            [mask] = grammars.masks([state])
            after = [text + piece if piece else b"?" for piece in pieces]
            allowed_by_trying = [id for id, one in enumerate(after) if any(word.startswith(one) for word in words)]
            following = {word[len(text) : len(text) + 1] for word in words if word.startswith(text)}
            if len(following) == 1 and following != {b""}:  # forced text is tokenized canonically
                assert allowed(mask)
                assert set(allowed(mask)) <= set(allowed_by_trying)
            else:
                assert allowed(mask) == allowed_by_trying
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


def test_following_tokens_at_once_or_one_by_one_gives_the_same_mask(grammars: Grammars) -> None:
    """Resumed sequences and copies of beams have the same masks. Validating tokens ahead doesn't change the state."""
    schema = {"type": "array", "minItems": 99, "items": {"type": ["integer", "string"]}}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    chance = random.Random(2)
    slow, tokens = state_of(grammars, grammar), []
    for _ in range(60):
        restored, copied = state_of(grammars, grammar), slow.copy()
        for one in (restored, copied, slow):
            one.follow(tokens)
        first, second, third = grammars.masks([slow, restored, copied])
        assert (first == second).all()
        assert (first == third).all()
        ids = allowed(first)
        wrong = next(id for id in range(VOCABULARY) if id not in ids)
        right = chance.choice(ids)
        assert (allowed_count(slow, right), allowed_count(slow, wrong), allowed_count(slow, right, wrong, right)) in (
            (1, 0, 1),
            (1, 0, 2),
            (1, 0, 3),
        )
        tokens.append(right)


SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["a dog", "a cat"]}, "legs": {"type": "integer"}}, "required": ["kind"]}
TREE_GRAMMARS = {
    "json": llguidance.LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA)),
    "text": regex("(.|\n)*"),
    "words": regex("(one|two|three|four hundred|a b c d){1,9}"),
    "nowhere": llguidance.LLMatcher.grammar_from_lark('start: "a" (x | /[a-c]+/)\nx: x "b"'),
    "short": regex("[ab]{3}"),
}


@pytest.mark.parametrize("name", list(TREE_GRAMMARS))
def test_masks_along_a_draft_tree_equal_masks_of_states_following_each_path(name: str, grammars: Grammars) -> None:
    """The mask at each draft is that of a fresh state that followed the draft's path. Masks behind forbidden drafts don't matter.
    Two sequences are at different positions."""
    chance = random.Random(name)
    generated: list[list[int]] = [[], []]
    states = [state_of(grammars, TREE_GRAMMARS[name]) for _ in generated]
    refused = followed = 0
    ends = grammars._tokenizer.result().eos_tokens
    for _ in range(12):
        trees = [draft_tree(grammars, TREE_GRAMMARS[name], own, chance) for own in generated]
        masks, complete = grammars.masks_along(states, trees)
        row = 0
        for own, tree in zip(generated, trees, strict=True):
            paths = [own, *([*own, *(tree.tokens[one] for one in path_to(tree, node))] for node in range(len(tree)))]
            for path in paths:
                alone = state_of(grammars, TREE_GRAMMARS[name])
                if all(token not in ends and allowed_count(alone, token) and alone.matcher.consume_token(token) for token in path):
                    assert (masks[row] == grammars.masks([alone])[0]).all()
                    assert complete[row] == alone.complete
                    followed += 1
                else:
                    assert masks[row].any()
                    refused += 1
                row += 1
        for state, own, tree in zip(states, generated, trees, strict=True):
            assert not state.problem or name == "nowhere"
            first = [tree.tokens[node] for node, parent in enumerate(tree.parents) if parent < 0]
            own += [token for token in first if allowed_count(state, token) and token not in ends][:1]
            state.follow(own)
    assert refused > 50
    assert followed > 50 or name == "short"


@pytest.mark.parametrize(
    "drafts", [[b'{"', b' "'], [b' "', b'{"'], [b'{"']], ids=["property name first", "string value first", "property name alone"]
)
def test_masks_of_sibling_drafts_are_not_confused(drafts: list[bytes], grammars: Grammars, pieces: list[bytes]) -> None:
    """Property names and string values of JSON share a lexer state, but different tokens end them. llguidance caches its last mask
    by the lexer's state."""
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps({"type": "object"}))
    own = [pieces.index(piece) for piece in (b'{"', b"city", b'":')]
    tokens = [pieces.index(piece) for piece in drafts]
    state = state_of(grammars, grammar)
    state.follow(own)
    masks, _ = grammars.masks_along([state], [Tree(tuple(tokens), (ROOT,) * len(tokens))])
    for token, mask in zip(tokens, masks[1:], strict=True):
        assert (mask == mask_of_fresh_state(grammars, grammar, [*own, token])).all()
    own.append(pieces.index(b' "'))
    state.follow(own)
    assert (grammars.masks([state])[0] == mask_of_fresh_state(grammars, grammar, own)).all()


def mask_of_fresh_state(grammars: Grammars, grammar: str, tokens: list[int]) -> NDArray[numpy.int32]:
    """The mask after tokens, by a fresh state."""
    state = state_of(grammars, grammar)
    state.follow(tokens)
    return grammars.masks([state])[0]


def draft_tree(grammars: Grammars, grammar: str, own: list[int], chance: random.Random) -> Tree:
    """A draft tree whose paths follow the grammar at first."""
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


def test_forbidden_token_invalidates_only_its_own_state(grammars: Grammars) -> None:
    good, bad = state_of(grammars, regex("a+")), state_of(grammars, regex("a+"))
    bad.follow([END])
    masks = grammars.masks([bad, good])
    assert "can't be followed" in bad.problem
    assert not masks[0].any()
    assert masks[1].any()
    assert not good.problem
    assert not grammars.masks([bad]).any()


@pytest.mark.parametrize("vocabulary", [1900, 1926, 1927, 2047, 4096])
def test_mask_allows_only_ids_of_both_model_and_tokenizer(vocabulary: int) -> None:
    """Ids that only one of them has are never allowed."""
    masks = Grammars(DEMO, vocabulary)
    state = state_of(masks, regex("(.|\n)*"))
    [mask] = masks.masks([state])
    assert mask.shape == (-(-vocabulary // 32),)
    ids = allowed(mask)
    assert max(ids) < min(vocabulary, 1926)
    assert len(ids) > 1000


def test_grammars_without_a_usable_tokenizer_are_refused(tmp_path: Path) -> None:
    """The model still serves requests without grammars."""
    absent = Grammars(tmp_path, VOCABULARY)
    with pytest.raises(Unusable, match=r"grammars need .*tokenizer\.json"):
        state_of(absent, regex("a"))
    whole = json.loads((DEMO / "tokenizer.json").read_text())
    for broken, message in (
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
        with pytest.raises(Unusable, match=message):
            state_of(Grammars(tmp_path, VOCABULARY), regex("a"))


def test_compiled_grammars_are_cached_lru_up_to_a_number_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_end_tokens_are_allowed_after_min_new_tokens(generated: int, expected: list[int]) -> None:
    """If the grammar is complete and may go on, end tokens are allowed after min_new_tokens. If it can't go on they are allowed at
    once; if it has to go on they are not."""
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


def test_mask_bits_are_set_in_signed_words() -> None:
    row = numpy.zeros(2, numpy.int32)
    for token in (0, 31, 32, 63):
        row[token // 32] |= bit(token)
    assert allowed(row) == [0, 31, 32, 63]


def grammar_groups() -> list[Group]:
    """Groups with and without grammars and end tokens, one with a grammar that has no continuation."""
    no_continuation = llguidance.LLMatcher.grammar_from_lark('start: "a" x\nx: x "b"')
    ends: dict[str, Any] = {"end_ids": [END]}
    return [
        tiny.group(1, [1, 5, 9], 20, grammar=regex("[a-c]{4,6}"), choices=3, **ends),
        tiny.group(2, [1, 5, 9], 20, grammar=regex("[a-c]{4}"), choices=2),
        tiny.group(3, [1, 7], 20),
        tiny.group(4, [1, 8], 20, grammar=no_continuation, **ends),
        tiny.group(5, [1, 8, 9, 10], 20, grammar=regex("x*"), **ends),
    ]


def with_masks(engine: Engine) -> Engine:
    engine._masks = Masks(Grammars(DEMO, VOCABULARY), VOCABULARY)
    return engine


@pytest.mark.parametrize("traffic", [Traffic(), Traffic(chunk=2, pause=0.2, pauses=2)], ids=["no pauses", "chunks and pauses"])
def test_rank_without_masks_keeps_the_same_bookkeeping(traffic: Traffic) -> None:
    """Rank 0 tells the others which groups end, fail or wait because of their grammars."""

    def work(ranks: Ranks) -> tuple[Any, ...]:
        engine = tiny.rank_engine("demo", ranks)
        if not ranks.rank:
            with_masks(engine)
        results = drive(engine, grammar_groups(), traffic)
        assert not engine.books.groups
        assert engine.pool.free == engine.pool.pages
        return results.tokens, results.finishes, list(results.failed)

    first, second = tiny.ThreadedRanks().run(work)
    assert first == second
    found, finishes, failed = first
    assert failed == [4]
    assert all(len(found[2, choice]) <= 4 and finishes[2, choice] == 1 for choice in (0, 1))
    alone = drive(with_masks(tiny.engine("demo")), grammar_groups(), Traffic())
    assert alone.tokens == found


def test_groups_go_on_while_another_groups_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group waits while others go on; if there are no others, the step waits for the compilation."""
    engine = with_masks(tiny.engine("demo"))
    assert engine._masks is not None
    waits: list[bool] = []

    def ready(groups: list[Group], wait: bool) -> list[bool]:
        waits.append(wait)
        return [wait] * len(groups)

    monkeypatch.setattr(engine._masks, "ready", ready)
    engine.prefill(1, [tiny.group(1, [1, 2, 3], 9)], [(1, 3)], 99, [])
    waiting = tiny.group(2, [1, 2, 3], 9, grammar=regex("ab"), end_ids=[END])
    outcome = engine.prefill(1, [waiting], [(2, 3)], 99, [1])
    assert [uid for uid, _ in outcome.emitted] == [1]
    assert engine.books.groups[2].lacking == 3
    engine.filter([1])
    outcome = engine.prefill(1, [], [(2, 3)], 99, [1])
    assert [uid for uid, _ in outcome.emitted] == [2]
    assert waits == [False, True]
    assert isinstance(outcome.emitted[0][1].pick, Pick)


def test_group_waiting_for_its_grammar_holds_its_cached_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router has counted on those pages, and they could be evicted when other groups end."""
    engine = with_masks(tiny.engine("demo", 4))
    prompt = list(range(1, 11))
    engine.prefill(1, [tiny.group(1, prompt, 9)], [(1, 10)], 99, [])
    monkeypatch.setattr(engine._masks, "ready", lambda groups, wait: [wait] * len(groups))
    waiting = tiny.group(2, prompt, 9, grammar=regex("ab"), end_ids=[END])
    outcome = engine.prefill(1, [waiting], [(2, 10)], 99, [1])
    assert waiting.sequences[0].computed == 8
    assert (2, 2, 1, 2) in outcome.standing  # two pages held, one more needed, two tokens lacking
    assert not outcome.found
    engine.filter([1])
    outcome = engine.prefill(1, [], [(2, 2)], 99, [1])
    assert outcome.found == [(2, 8)]


def test_resumed_group_lacks_tokens_until_its_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if all its tokens are cached: the router requests no chunk for a group that lacks nothing."""
    engine, prompt, fields = with_masks(tiny.engine("demo", 4)), list(range(1, 10)), {"grammar": regex("[a-z ]*"), "end_ids": [END]}
    [answer] = drive(engine, [tiny.group(1, prompt, 9, **fields)], Traffic()).tokens.values()
    monkeypatch.setattr(engine._masks, "ready", lambda groups, wait: [wait] * len(groups))
    waiting = tiny.group(2, prompt, 9, continuations=[(0, answer[:4])], **fields)
    other = tiny.group(3, [1, 2], 9)
    engine.prefill(1, [other], [(3, 2)], 99, [])
    outcome = engine.prefill(1, [waiting], [(2, 12)], 99, [1])
    [lacking] = [lacking for uid, _, _, lacking in outcome.standing if uid == 2]
    assert lacking
    assert not waiting.decodes
    engine.filter([3])
    engine.prefill(1, [], [(2, lacking)], 99, [])
    assert [uid for uid, _ in engine.decode([1]).emitted] == [2]


def test_ranks_cache_the_same_prefixes_after_a_grammar_without_continuation() -> None:
    """Only rank 0 knows why the group fails. The step in which it fails fills its pages, which are published already."""
    no_continuation = llguidance.LLMatcher.grammar_from_lark('start: /[ab]{4}/ x\nx: x "b"')

    def work(ranks: Ranks) -> tuple[Any, ...]:
        engine = tiny.rank_engine("demo", ranks)
        engine.resize(64)
        if not ranks.rank:
            with_masks(engine)

        def fail(uid: int) -> list[int]:
            outcome = engine.prefill(1, [tiny.group(uid, [5, 6], 20, grammar=no_continuation, end_ids=(2,))], [(uid, 100)], 100, [])
            tokens = [emitted.pick.token for _, emitted in outcome.emitted]
            while uid in engine.books.groups:
                tokens += [emitted.pick.token for _, emitted in engine.decode([1]).emitted]
            return tokens

        def request(uid: int, tokens: list[int]) -> tuple[int, int]:
            outcome = engine.prefill(1, [tiny.group(uid, [*tokens, 7], 2)], [(uid, 100)], 100, [])
            while uid in engine.books.groups:
                engine.decode([1])
            return outcome.prompt_tokens, outcome.cached_tokens

        full = [5, 6, *fail(1)][:4]
        found = [request(2, full)]
        fail(3)
        assert engine.books.prefixes is not None
        return found, request(4, full), sorted(engine.books.prefixes._nodes), engine.pool._unused

    first, second = tiny.ThreadedRanks().run(work)
    assert first == second


def test_special_tokens_and_unknown_ids_have_no_text(grammars: Grammars) -> None:
    [space] = [id for id in range(3, 1926) if grammars.bytes_of([id]) == b" "][:1]
    assert grammars.bytes_of([3, space, 2047, 1930]) == b" "


def test_added_tokens_that_are_not_special_have_text(tmp_path: Path) -> None:
    """As <think> and <tool_call> are in some models."""
    source = json.loads((DEMO / "tokenizer.json").read_text())
    for token in source["added_tokens"]:
        token["special"] = token["content"] != "<|user|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(source))
    grammars = Grammars(tmp_path, VOCABULARY)
    assert grammars.bytes_of([2, 3, 4]) == b"<|user|>"
    assert StopStrings(grammars).completed_by([9, 9], 2, 3, ["<|user|>"])
    assert not StopStrings(grammars).completed_by([9, 9], 2, 2, ["<|end|>"])


def test_background_reports_a_thread_that_cannot_start_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    background, default_size = Background(1), threading.stack_size()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            background.submit(lambda: 3).result(10)
    assert threading.stack_size() == default_size
    assert background.submit(lambda: 3).result(10) == 3


def test_group_whose_grammar_thread_cannot_start_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = with_masks(tiny.engine("demo"))
    assert engine._masks is not None
    engine._masks._grammars._tokenizer.result()
    engine.prefill(1, [tiny.group(1, [1, 2, 3], 9)], [(1, 3)], 99, [])
    fields = {"grammar": regex("[ab]{3}"), "end_ids": [END]}

    def request(uid: int) -> Outcome:
        outcome = engine.prefill(1, [tiny.group(uid, [1, 2, 3], 9, **fields)], [(uid, 3)], 99, [])
        while not outcome.failed and not outcome.emitted:  # while it is being compiled
            outcome = engine.prefill(1, [], [(uid, 3)], 99, [])
        return outcome

    with monkeypatch.context() as patch:
        patch.setattr(Background, "_start", lambda self: RuntimeError("can't start new thread"))
        assert request(2).failed == [(2, "its grammar can't be compiled now: can't start new thread")]
    assert [uid for uid, _ in request(3).emitted] == [3]
    assert [uid for uid, _ in engine.decode([1]).emitted] == [1, 3]
    assert engine._masks._grammars._size == len(regex("[ab]{3}"))


def test_cancelled_background_job_is_skipped() -> None:
    background, go = Background(1), Event()
    background.submit(go.wait)
    cancelled, following = background.submit(lambda: 3), background.submit(lambda: 4)
    assert cancelled.cancel()
    go.set()
    assert following.result(10) == 4


def test_panic_in_the_background_is_raised_to_the_waiter() -> None:
    class Panic(BaseException):
        """Like pyo3's PanicException."""

    def panics() -> None:
        raise Panic

    background = Background(1)
    for _ in range(2):
        with pytest.raises(Panic):
            background.submit(panics).result(10)
    assert background.submit(lambda: 3).result(10) == 3


@pytest.mark.parametrize("waiting", [4, 9])
def test_more_grammars_are_compiled_at_once_than_are_cached(monkeypatch: pytest.MonkeyPatch, waiting: int) -> None:
    """Each is compiled exactly once, and its group begins."""
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


def test_waiting_ends_when_the_first_grammar_is_compiled() -> None:
    slow, fast = Event(), tiny.group(2, [1], 9, grammar="fast")

    class SlowAndFast(Grammars):
        def _state(self, grammar: str) -> GrammarState:
            assert grammar == "fast" or slow.wait(30)
            return super()._state(regex("a"))

    masks = Masks(SlowAndFast(DEMO, VOCABULARY), VOCABULARY)
    assert masks.ready([tiny.group(1, [1], 9, grammar="slow"), fast], wait=True) == [False, True]
    slow.set()


def test_prompt_is_not_delayed_by_another_groups_grammar() -> None:
    """Not even if no group decodes."""
    slow = Event()

    class SlowGrammars(Grammars):
        def _state(self, grammar: str) -> GrammarState:
            assert slow.wait(30)
            return super()._state(grammar)

    engine = tiny.engine("demo")
    engine._masks = Masks(SlowGrammars(DEMO, VOCABULARY), VOCABULARY)
    groups = [tiny.group(1, [1, 2, 3], 9, grammar=regex("a")), tiny.group(2, [1, 2, 3], 9)]
    assert [uid for uid, _ in engine.prefill(1, groups, [(1, 3), (2, 3)], 99, []).emitted] == [2]
    slow.set()


NO_CONTINUATION = llguidance.LLMatcher.grammar_from_lark('start: /[ab]{3}/ x\nx: x "b"')
FAILING: dict[str, dict[str, Any]] = {
    "grammar": {"grammar": NO_CONTINUATION},
    "grammar at once": {"grammar": llguidance.LLMatcher.grammar_from_lark('start: x\nx: x "b"')},
    "no tokenizer": {"search": Search(2, 1), "stops": ("x",)},
}


@pytest.mark.parametrize("two_ranks", [False, True], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("why", list(FAILING))
def test_group_failing_by_its_grammar_leaves_its_prefix_in_the_cache(why: str, two_ranks: bool, tmp_path: Path) -> None:
    """The pages computed for its prompt stay valid, also on ranks that don't know why it fails."""
    prefix = list(range(100, 140))

    def work(ranks: Ranks) -> tuple[int, list[int]]:
        engine = tiny.rank_engine("demo", ranks, 4, 200)
        if not ranks.rank:
            with_masks(engine)._stops = StopStrings(Grammars(tmp_path, VOCABULARY))  # there is no tokenizer
        engine.prefill(1, [tiny.group(1, [*prefix, 150], 90)], [(1, 99)], 99, [])
        outcome = engine.prefill(1, [tiny.group(2, [*prefix, 151], 20, **FAILING[why])], [(2, 99)], 99, [])
        while 2 in engine.books.groups:
            outcome = engine.decode([1])
        assert [uid for uid, _ in outcome.failed] == [2]
        found = engine.prefill(1, [tiny.group(3, [*prefix, 152], 2)], [(3, 99)], 99, []).cached_tokens
        node = engine.books.groups[1].sequences[0].node
        assert node is not None
        assert node.attached
        assert engine.books.prefixes is not None
        return found, sorted(engine.books.prefixes._nodes)

    both = tiny.ThreadedRanks().run(work) if two_ranks else [work(Ranks(0, 1, tiny.CPU))]
    assert both[0] == both[-1]
    assert both[0][0] == len(prefix)


def test_non_finite_logits_take_precedence_over_a_failing_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages that they come from must not be found by other groups."""
    engine = with_masks(tiny.engine("demo", 4, 200))
    logits = engine.decoder.logits
    monkeypatch.setattr(engine.decoder, "logits", lambda hidden: logits(hidden) * torch.nan)
    outcome = engine.prefill(1, [tiny.group(1, list(range(100, 120)), 20, **FAILING["grammar at once"])], [(1, 99)], 99, [])
    assert outcome.failed == [(1, NOT_FINITE)]
    assert engine.books.prefixes is not None
    assert not engine.books.prefixes._nodes


def test_step_without_other_work_waits_only_a_moment_for_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request that comes next is computed while the first one's grammar is still being compiled."""
    monkeypatch.setattr(shard_masks, "PATIENCE", 0.05)
    compiled = Event()

    class Slow(Grammars):
        def _state(self, grammar: str) -> GrammarState:
            assert compiled.wait(60)
            return super()._state(grammar)

    engine = tiny.engine("demo")
    engine._masks = Masks(Slow(DEMO, VOCABULARY), VOCABULARY)
    try:
        outcome = engine.prefill(1, [tiny.group(1, [1, 2, 3], 9, grammar=regex("a"), end_ids=[END])], [(1, 3)], 99, [])
        assert not outcome.emitted
        outcome = engine.prefill(1, [tiny.group(2, [1, 2, 3], 9)], [(1, 3), (2, 3)], 99, [])
        assert [uid for uid, _ in outcome.emitted] == [2]
    finally:
        compiled.set()
    monkeypatch.setattr(shard_masks, "PATIENCE", 60)
    engine.filter([2])
    assert [uid for uid, _ in engine.prefill(1, [], [(1, 3)], 99, []).emitted] == [1]
