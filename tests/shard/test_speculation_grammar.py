"""Speculative decoding with grammars changes no token: every draft is masked by what the grammar allows after its own path. Planted
faults show that the check finds them."""

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
from penstock.tests.shard.driver import Results, Traffic, drive
from penstock.tests.shard.test_against_transformers import all_pages_free
from penstock.tests.shard.test_drafter import with_free_drafts
from penstock.tests.shard.test_grammar import DEMO, END, VOCABULARY, allowed, regex

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
NO_CONTINUATION = llguidance.LLMatcher.grammar_from_lark('start: /[ab]{3}/ x\nx: x "b"')  # no continuation after the third letter
TWO_WITHOUT_CONTINUATION = 19  # a group of two choices whose grammar has no continuation


GRAMMAR_TOKENS = Grammars(DEMO, VOCABULARY)


class OracleProposer:
    """Proposes the tokens that plain decoding would emit, and beside them other paths that follow the grammar at first."""

    def __init__(self, answers: dict[tuple[int, int], list[int]], right: float = 1.0, width: int = 0) -> None:
        self._answers = answers
        self._right = right  # the probability that a proposed token is right
        self._width = width

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        return Proposal([Draft(self._tree(one)) for one in requests])

    def _tree(self, request: DraftRequest) -> Tree:
        sequence = request.sequence
        chance = random.Random(1000 * request.group.uid + 7 * sequence.choice + sequence.generated)
        answers = self._answers[request.group.uid, sequence.choice][sequence.generated :][: request.depth]
        answers = [token if chance.random() < self._right else chance.randrange(VOCABULARY) for token in answers]
        own = list(sequence.tokens[sequence.prompt_length :])
        paths = [answers, *(self._other(request.group.grammar, own, answers, chance)[: request.depth] for _ in range(self._width))]
        return merge(chain(path, [-chance.random() for _ in path]) for path in paths).cut(request.nodes)

    def _other(self, grammar: str, generated: list[int], answers: list[int], chance: random.Random) -> list[int]:
        path = answers[: chance.randint(0, len(answers))]
        for _ in range(chance.randint(1, 3)):
            state = GRAMMAR_TOKENS.compile(grammar).result().copy()
            state.follow([*generated, *path])
            ids = allowed(GRAMMAR_TOKENS.masks([state])[0])
            path.append(chance.choice(ids) if ids else END)
        return [*path, chance.randrange(VOCABULARY), END]


def grammar_groups(drafts: int, uids: Sequence[int] = range(20)) -> list[Group]:
    """Greedy and seeded groups, with and without end tokens, with choices, penalties, filters, and min_new_tokens."""
    groups = []
    for uid in uids:
        sampling = Sampling(temperature=1.0, top_p=0.95, seed=uid) if uid % 3 else Sampling()
        if uid % 4 == 3:
            sampling = replace(sampling, repetition_penalty=1.2, presence_penalty=0.3, final_logprobs=True)
        groups.append(
            tiny.group(
                uid,
                [1, 5 + uid, 9, 300 + uid],
                9 if uid == 7 else 30,
                sampling,
                grammar=NO_CONTINUATION if uid % 10 == 9 else GRAMMARS[uid % len(GRAMMARS)],
                choices=2 if uid % 5 == 1 or uid == TWO_WITHOUT_CONTINUATION else 1,
                end_ids=[END] if uid % 2 else [],
                min_new_tokens=uid % 4 * 3,
                top_n=uid % 2,
                drafts=drafts,
            )
        )
    return [*groups, tiny.group(99, [1, 70, 71], 20, drafts=drafts)]  # without a grammar


def with_masks(engine: Engine) -> Engine:
    engine._masks = Masks(Grammars(DEMO, VOCABULARY), VOCABULARY)
    return engine


@functools.cache
def plain_results() -> Results:
    return drive(with_masks(tiny.engine("words", prefix_caching=False)), grammar_groups(0), Traffic())


def proposers() -> dict[str, Proposer]:
    answers = plain_results().tokens
    return {
        "lookup": NgramProposer(),
        "right": OracleProposer(answers),
        "chains": OracleProposer(answers, 0.8),
        "trees": OracleProposer(answers, 0.8, 4),
    }


def check_results(results: Results, plain: Results) -> None:
    """The same tokens with the same log-probabilities, and the same failed groups. When one choice of a group fails, the other has
    emitted any number of its tokens."""
    assert dict(sorted(results.failed.items())) == dict(sorted(plain.failed.items()))
    assert results.finishes == plain.finishes
    for key, tokens in plain.tokens.items():
        count = min(len(tokens), len(results.tokens[key])) if key[0] == TWO_WITHOUT_CONTINUATION else len(tokens)
        assert results.tokens[key][:count] == tokens[:count]
        found, wanted = (torch.tensor(one.logprobs[key][:count]) for one in (results, plain))
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        assert key[0] == TWO_WITHOUT_CONTINUATION or len(results.tokens[key]) == count


def test_plain_results_cover_all_kinds_of_ends() -> None:
    """The results that the other tests compare with have failures and ends of all kinds."""
    plain = plain_results()
    assert sorted(plain.failed) == [9, TWO_WITHOUT_CONTINUATION]
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
def test_drafts_change_no_token_of_grammar_groups(name: str, drafts: int, page_size: int) -> None:
    engine = with_masks(tiny.engine("words", page_size))
    engine.speculator.proposer = proposers()[name]
    results = drive(engine, grammar_groups(drafts), Traffic(7, pauses=1), seed=drafts)
    check_results(results, plain_results())
    assert results.drafted > 0
    assert results.accepted > 100 or name == "lookup"
    assert results.pauses
    assert all_pages_free(engine)


def test_all_drafts_are_accepted_if_the_proposer_is_always_right() -> None:
    """All but the last token, which is never accepted as a draft: nothing comes after it."""
    engine = with_masks(tiny.engine("words"))
    engine.speculator.proposer = OracleProposer(plain_results().tokens)
    groups = [group for group in grammar_groups(8) if group.uid not in plain_results().failed]
    results = drive(engine, groups, Traffic())
    assert 0 <= results.drafted - results.accepted <= len(results.tokens)
    assert results.accepted > 300


@pytest.mark.parametrize("options", ["tokens=4", "tree=3x2x1", "tokens=3,verify=rejection"])
def test_draft_model_drafts_within_the_grammar(options: str) -> None:
    """So drafts of the target itself are nearly always accepted, except behind the end."""
    target, own_masks, shape = tiny.decoder("words"), Masks(Grammars(DEMO, VOCABULARY), VOCABULARY), parse(f"draft=x,{options}")
    speculator = Speculator(target.ranks, tiny.CPU, shape, Drafter(target, VOCABULARY, tiny.CPU, shape.most), own_masks)
    engine = Engine(target, tiny.CPU, 4, masks=own_masks, speculator=speculator)
    engine.resize(2000)
    results = drive(with_free_drafts(engine), grammar_groups(shape.most), Traffic(7, pauses=1), seed=2)
    if "rejection" not in options:
        check_results(results, plain_results())
    assert results.accepted > 200
    if "tree" not in options:
        assert results.accepted > 0.9 * results.drafted - 3 * len(results.tokens)


def test_rank_without_masks_keeps_the_same_bookkeeping() -> None:
    """Only rank 0 has masks."""

    def work(ranks: Ranks) -> Results:
        engine = tiny.rank_engine("words", ranks, 4, 400)
        if not ranks.rank:
            with_masks(engine)
        engine.speculator.proposer = OracleProposer(plain_results().tokens, 0.8, 4)
        return drive(engine, grammar_groups(9), Traffic(16, pause=0.03), seed=5)

    results, other_rank = tiny.ThreadedRanks().run(work)
    check_results(results, plain_results())
    assert (results.tokens, results.finishes, list(results.failed)) == (
        other_rank.tokens,
        other_rank.finishes,
        list(other_rank.failed),
    )
    assert results.accepted == other_rank.accepted > 100


@pytest.mark.parametrize(
    "fault", ["parent's mask", "no rollback", "depths of the root", "only the first token completes", "never complete"]
)
def test_check_catches_planted_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_results()
    plant_fault(fault, monkeypatch)
    engine = with_masks(tiny.engine("words"))
    engine.speculator.proposer = OracleProposer(plain.tokens, 0.8, 4)
    with pytest.raises(AssertionError):
        check_results(drive(engine, grammar_groups(16), Traffic(), seed=1), plain)


def plant_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    along, allowing, completed = Grammars.masks_along, Masks._allowed, GrammarState.completed_by

    def parents_masks(
        self: Grammars, states: Sequence[GrammarState], trees: Sequence[Tree]
    ) -> tuple[NDArray[numpy.int32], list[bool]]:
        mask, complete = along(self, states, trees)
        start = 0
        for tree in trees:
            rows = mask[start : start + 1 + len(tree)]
            rows[1:] = rows[[1 + parent for parent in tree.parents]].copy()
            start += len(rows)
        return mask, complete

    def without_rollback(self: GrammarState, path: list[int], depth: int, tree: Tree, spare: object) -> None:
        del path[depth:]

    def never_complete(self: Masks, bound: Any, problems: dict[int, str]) -> tuple[NDArray[numpy.int32], list[bool]]:
        mask, closed = allowing(self, bound, problems)
        return mask, [False] * len(closed)

    if fault == "parent's mask":
        monkeypatch.setattr(Grammars, "masks_along", parents_masks)
    elif fault == "no rollback":
        monkeypatch.setattr(GrammarState, "_back", without_rollback)
    elif fault == "depths of the root":
        monkeypatch.setattr(Tree, "depths", property(lambda self: [-1] * len(self)))
    elif fault == "only the first token completes":
        monkeypatch.setattr(GrammarState, "completed_by", lambda self, tokens: completed(self, tokens[:1]))
    else:
        monkeypatch.setattr(Masks, "_allowed", never_complete)
