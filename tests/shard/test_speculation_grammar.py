"""Speculator change no token where a grammar is kept: every draft is bound by what may follow its own path."""

import functools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import llguidance
import numpy
import pytest
import torch
from numpy.typing import NDArray

from penstock.proto.speculation import parse
from penstock.shard.decoding.grammar import Grammars, GrammarState
from penstock.shard.decoding.proposers import DraftRequest, NgramProposer, Proposal, Proposer
from penstock.shard.decoding.strategy import Finish
from penstock.shard.decoding.tree import Tree, chain, merge
from penstock.shard.decoding.verify import Draft
from penstock.shard.drafter import Drafter
from penstock.shard.engine import Engine
from penstock.shard.masks import Masks
from penstock.shard.parallel import Ranks
from penstock.shard.sequence import Group, Sampling
from penstock.shard.speculator import Speculator
from penstock.tests.shard import tiny
from penstock.tests.shard.driver import Habits, World, drive
from penstock.tests.shard.test_drafter import free
from penstock.tests.shard.test_grammar import DEMO, END, VOCABULARY, allowed, regex
from penstock.tests.shard.test_oracle import at_rest

RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "legs": {"type": "integer", "maximum": 8}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}
GRAMMARS = [
    llguidance.LLMatcher.grammar_from_json_schema(json.dumps(RECORD)),
    regex("(a dog|a cat|two birds)( and (a dog|a cat|two birds))*"),
    regex("[a-c]{4,12}"),
    regex("Once upon a time|Once there was|One day"),
    regex("(yes|no|maybe)(, (yes|no|maybe)){2}"),
]
NOWHERE = llguidance.LLMatcher.grammar_from_lark('start: /[ab]{3}/ x\nx: x "b"')  # after the third letter
TWO_NOWHERE = 19  # a group of two choices that comes to where nothing goes on


GRAMMAR_TOKENS = Grammars(DEMO, VOCABULARY)


class Oracle:
    """Knows what will be said. Beside it, it proposes paths that leave it and keep the grammar for a while."""

    def __init__(self, said: dict[tuple[int, int], list[int]], right: float = 1.0, width: int = 0) -> None:
        self._said = said
        self._right = right  # how likely it leaves a token as it is
        self._width = width

    def propose(self, asked: Sequence[DraftRequest]) -> Proposal:
        return Proposal([Draft(self._tree(one)) for one in asked])

    def _tree(self, asked: DraftRequest) -> Tree:
        sequence = asked.sequence
        chance = random.Random(1000 * asked.group.uid + 7 * sequence.choice + sequence.generated)
        said = self._said[asked.group.uid, sequence.choice][sequence.generated :][: asked.depth]
        said = [token if chance.random() < self._right else chance.randrange(VOCABULARY) for token in said]
        own = list(sequence.tokens[sequence.prompt_length :])
        paths = [said, *(self._other(asked.group.grammar, own, said, chance)[: asked.depth] for _ in range(self._width))]
        return merge(chain(path, [-chance.random() for _ in path]) for path in paths).cut(asked.nodes)

    def _other(self, grammar: str, own: list[int], said: list[int], chance: random.Random) -> list[int]:
        path = said[: chance.randint(0, len(said))]
        for _ in range(chance.randint(1, 3)):
            state = GRAMMAR_TOKENS.compile(grammar).result().copy()
            state.follow([*own, *path])
            ids = allowed(GRAMMAR_TOKENS.masks([state])[0])
            path.append(chance.choice(ids) if ids else END)
        return [*path, chance.randrange(VOCABULARY), END]


def asked(drafts: int, uids: Sequence[int] = range(20)) -> list[Group]:
    """Greedy and seeded ones, with ends and without, with choices, penalties, filters, and at least so many tokens."""
    made = []
    for uid in uids:
        sampling = Sampling(temperature=1.0, top_p=0.95, seed=uid) if uid % 3 else Sampling()
        if uid % 4 == 3:
            sampling = replace(sampling, repetition_penalty=1.2, presence_penalty=0.3, final_logprobs=True)
        made.append(
            tiny.group(
                uid,
                [1, 5 + uid, 9, 300 + uid],
                9 if uid == 7 else 30,
                sampling,
                grammar=NOWHERE if uid % 10 == 9 else GRAMMARS[uid % len(GRAMMARS)],
                choices=2 if uid % 5 == 1 or uid == TWO_NOWHERE else 1,
                end_ids=[END] if uid % 2 else [],
                min_new_tokens=uid % 4 * 3,
                top_n=uid % 2,
                drafts=drafts,
            )
        )
    return [*made, tiny.group(99, [1, 70, 71], 20, drafts=drafts)]  # which is free


def with_masks(engine: Engine) -> Engine:
    engine._masks = Masks(Grammars(DEMO, VOCABULARY), VOCABULARY)
    return engine


@functools.cache
def expected() -> World:
    return drive(with_masks(tiny.engine("words", prefix_caching=False)), asked(0), Habits())


def proposers() -> dict[str, Proposer]:
    said = expected().tokens
    return {"lookup": NgramProposer(), "right": Oracle(said), "chains": Oracle(said, 0.8), "trees": Oracle(said, 0.8, 4)}


def check(world: World, plain: World) -> None:
    """The same tokens with the same log-probabilities, and the same groups that can't go on. A choice beside one that can't goes as
    far as it has come until then."""
    assert dict(sorted(world.failed.items())) == dict(sorted(plain.failed.items()))
    assert world.finishes == plain.finishes
    for key, tokens in plain.tokens.items():
        count = min(len(tokens), len(world.tokens[key])) if key[0] == TWO_NOWHERE else len(tokens)
        assert world.tokens[key][:count] == tokens[:count]
        found, wanted = (torch.tensor(one.logprobs[key][:count]) for one in (world, plain))
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        assert key[0] == TWO_NOWHERE or len(world.tokens[key]) == count


def test_without_drafts_grammars_are_kept() -> None:
    """So that what the others are compared with means something."""
    plain = expected()
    assert sorted(plain.failed) == [9, TWO_NOWHERE]
    assert len({len(tokens) for tokens in plain.tokens.values()}) > 8
    assert {plain.finishes[uid, 0] for uid in range(8)} == {Finish.END, Finish.LENGTH}


@pytest.mark.parametrize(
    ("name", "drafts", "page_size"),
    [
        ("lookup", 2, 16),
        ("lookup", 16, 4),
        ("right", 4, 16),
        ("chains", 2, 1),
        ("chains", 8, 4),
        ("trees", 4, 16),
        ("trees", 16, 4),
    ],
)
def test_drafts_change_no_token(name: str, drafts: int, page_size: int) -> None:
    engine = with_masks(tiny.engine("words", page_size))
    engine.speculator.proposer = proposers()[name]
    world = drive(engine, asked(drafts), Habits(7, pauses=1), seed=drafts)
    check(world, expected())
    assert world.drafted > 0
    assert world.accepted > 100 or name == "lookup"
    assert world.pauses
    assert at_rest(engine)


def test_who_is_always_right_is_always_believed() -> None:
    """But of the last token, which is never accepted: nothing comes after it."""
    engine = with_masks(tiny.engine("words"))
    engine.speculator.proposer = Oracle(expected().tokens)
    groups = [group for group in asked(8) if group.uid not in expected().failed]
    world = drive(engine, groups, Habits())
    assert 0 <= world.drafted - world.accepted <= len(world.tokens)
    assert world.accepted > 300


@pytest.mark.parametrize("said", ["tokens=4", "tree=3x2x1", "tokens=3,verify=rejection"])
def test_a_draft_model_keeps_grammars(said: str) -> None:
    """So that one which is the target is nearly always right: but of what comes after the end."""
    target, own_masks, shape = tiny.decoder("words"), Masks(Grammars(DEMO, VOCABULARY), VOCABULARY), parse(f"draft=x,{said}")
    speculator = Speculator(target.ranks, tiny.CPU, shape, Drafter(target, VOCABULARY, tiny.CPU, shape.most), own_masks)
    engine = Engine(target, tiny.CPU, 4, masks=own_masks, speculator=speculator)
    engine.resize(2000)
    world = drive(free(engine), asked(shape.most), Habits(7, pauses=1), seed=2)
    if "rejection" not in said:
        check(world, expected())
    assert world.accepted > 200
    if "tree" not in said:
        assert world.accepted > 0.9 * world.drafted - 3 * len(world.tokens)


def test_two_ranks_keep_the_same_books() -> None:
    """Only one of them sees masks."""

    def work(ranks: Ranks) -> World:
        engine = tiny.engine_of("words", ranks, 4, 400)
        if not ranks.rank:
            with_masks(engine)
        engine.speculator.proposer = Oracle(expected().tokens, 0.8, 4)
        return drive(engine, asked(9), Habits(16, pause=0.03), seed=5)

    world, twin = tiny.Threads().run(work)
    check(world, expected())
    assert (world.tokens, world.finishes, list(world.failed)) == (twin.tokens, twin.finishes, list(twin.failed))
    assert world.accepted == twin.accepted > 100


@pytest.mark.parametrize(
    "fault", ["the parent's mask", "no way back", "ends as at the root", "only the first token completes", "nothing is closed"]
)
def test_the_check_finds(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = expected()
    plant(fault, monkeypatch)
    engine = with_masks(tiny.engine("words"))
    engine.speculator.proposer = Oracle(plain.tokens, 0.8, 4)
    with pytest.raises(AssertionError):
        check(drive(engine, asked(16), Habits(), seed=1), plain)


def plant(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    along, allowing, completed = Grammars.masks_along, Masks._allowed, GrammarState.completed_by

    def parents(self: Grammars, states: Sequence[GrammarState], trees: Sequence[Tree]) -> tuple[NDArray[numpy.int32], list[bool]]:
        mask, complete = along(self, states, trees)
        start = 0
        for tree in trees:
            rows = mask[start : start + 1 + len(tree)]
            rows[1:] = rows[[1 + parent for parent in tree.parents]].copy()
            start += len(rows)
        return mask, complete

    def staying(self: GrammarState, path: list[int], depth: int, tree: Tree, spare: object) -> None:
        del path[depth:]

    def opened(self: Masks, bound: Any, problems: dict[int, str]) -> tuple[NDArray[numpy.int32], list[bool]]:
        mask, closed = allowing(self, bound, problems)
        return mask, [False] * len(closed)

    if fault == "the parent's mask":
        monkeypatch.setattr(Grammars, "masks_along", parents)
    elif fault == "no way back":
        monkeypatch.setattr(GrammarState, "_back", staying)
    elif fault == "ends as at the root":
        monkeypatch.setattr(Tree, "depths", property(lambda self: [-1] * len(self)))
    elif fault == "only the first token completes":
        monkeypatch.setattr(GrammarState, "completed_by", lambda self, tokens: completed(self, tokens[:1]))
    else:
        monkeypatch.setattr(Masks, "_allowed", opened)
