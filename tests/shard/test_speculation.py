"""Speculative decoding changes no token: answers are the same with and without drafts, by every proposer, also with preemption,
prefix caching and two ranks."""

import functools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.shard.decoding.budget import Allowance, LinearCost
from penstock.shard.decoding.proposers import DraftRequest, NgramProposer, Proposal
from penstock.shard.decoding.tree import Tree, chain, merge
from penstock.shard.decoding.verify import Draft
from penstock.shard.engine import Engine
from penstock.shard.parallel import Ranks
from penstock.shard.sequence import Group, Sampling, Thinking
from penstock.tests.shard import configurations, tiny
from penstock.tests.shard.driver import UNLIMITED, Results, Traffic, drive
from penstock.tests.shard.test_against_transformers import all_pages_free, prompt
from penstock.tests.shard.test_sharing import pages_of_largest_group

COUNT = 18


class OracleProposer:
    """Proposes the tokens that plain decoding would emit, each with probability `right`, as chains or trees of any shape."""

    def __init__(self, answers: dict[tuple[int, int], list[int]], right: float, width: int = 1) -> None:
        self._answers = answers
        self._right = right
        self._width = width

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        return Proposal([Draft(self._tree(one)) for one in requests])

    def _tree(self, request: DraftRequest) -> Tree:
        sequence = request.sequence
        chance = random.Random(1000 * request.group.uid + sequence.generated)
        answers = self._answers[request.group.uid, sequence.choice][sequence.generated : -1]  # the last token is never a draft
        count = chance.randint(0, request.depth)
        paths = []
        for _ in range(self._width):
            drafts = [
                token if chance.random() < self._right else chance.randrange(configurations.VOCABULARY) for token in answers[:count]
            ]
            paths.append(chain(drafts, [-chance.random() for _ in drafts]))
        return merge(paths).cut(request.nodes)


def sample_groups(drafts: int) -> list[Group]:
    """Greedy and seeded requests, with penalties, filters, choices, end tokens, log-probabilities."""
    groups = []
    frequent = sorted(
        {token for answer in tiny.greedy("llama", tuple(prompt(seed, 8) for seed in range(20)), 6) for token in answer}
    )
    for uid in range(24):
        sampling = Sampling(temperature=0.7, top_p=0.95, top_k=30, seed=uid) if uid % 3 else Sampling()
        if uid % 4 == 3:
            sampling = replace(sampling, repetition_penalty=1.2, presence_penalty=0.3, bias=((3, 1.5),))
        repeated = prompt(uid, 6) * 4 if uid % 2 else prompt(uid, 5 + uid)
        groups.append(
            tiny.group(
                uid,
                repeated,
                COUNT + uid % 5,
                sampling,
                choices=2 if uid % 5 == 1 else 1,
                end_ids=frequent[: uid % 3],
                min_new_tokens=uid % 4,
                thinking=Thinking(uid % 7, uid) if uid % 6 == 2 else None,
                top_n=uid % 2,
                drafts=drafts,
            )
        )
    return groups


@functools.cache
def plain_results() -> Results:
    return drive(tiny.engine("llama", 16, 2000, prefix_caching=False), sample_groups(0), Traffic())


@pytest.mark.parametrize(
    ("proposer", "drafts", "page_size", "chunk", "prefix_caching"),
    [
        ("lookup", 1, 16, 7, True),
        ("lookup", 4, 4, UNLIMITED, False),
        ("right", 4, 4, UNLIMITED, False),
        ("right", 8, 1, 7, True),
        ("chains", 1, 16, 7, True),
        ("chains", 8, 1, 7, True),
        ("trees", 4, 4, UNLIMITED, False),
        ("trees", 8, 1, 7, True),
    ],
)
def test_drafts_change_no_token(proposer: str, drafts: int, page_size: int, chunk: int, prefix_caching: bool) -> None:
    plain = plain_results()
    groups = sample_groups(drafts)
    engine = tiny.engine("llama", page_size, pages_of_largest_group(groups, page_size) + 40 // page_size, prefix_caching)
    set_proposer(engine, proposer, plain)
    results = drive(engine, groups, Traffic(chunk, pause=0.05), seed=drafts)
    assert results.tokens == plain.tokens
    assert results.finishes == plain.finishes
    assert results.drafted > 0
    assert results.accepted > 0 or proposer == "lookup"  # these answers hardly repeat themselves
    assert results.pauses
    assert all_pages_free(engine)


def set_proposer(engine: Engine, name: str, plain: Results) -> None:
    answers = plain.tokens
    engine.speculator.proposer = {
        "lookup": NgramProposer(),
        "right": OracleProposer(answers, 1.0),
        "chains": OracleProposer(answers, 0.7),
        "trees": OracleProposer(answers, 0.6, width=3),
    }[name]


def test_all_drafts_are_accepted_if_the_proposer_is_always_right() -> None:
    plain = plain_results()
    engine = tiny.engine("llama")
    set_proposer(engine, "right", plain)
    results = drive(engine, sample_groups(6), Traffic())
    assert results.accepted == results.drafted > 200


def test_few_drafts_are_requested_from_a_proposer_that_is_always_wrong() -> None:
    plain = plain_results()
    engine = tiny.engine("llama")
    engine.speculator.proposer = OracleProposer(plain.tokens, 0.0)
    results = drive(engine, sample_groups(4), Traffic())
    assert results.tokens == plain.tokens
    assert results.drafted < len(plain.tokens) * 16  # it could have had 4 in each step


class OneDraft:
    """Proposes one draft, for a single sequence."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        assert len(requests) == 1
        return Proposal([Draft(self._tree)])


def test_drafts_are_counted_by_position_up_to_the_first_rejected_one() -> None:
    group, *_ = sample_groups(4)
    answer = plain_results().tokens[group.uid, 0]
    engine = tiny.engine("llama")
    engine.prefill(0, [group], [(group.uid, 99)], 99, [])
    engine.speculator.proposer = OneDraft(chain([answer[1], answer[2], answer[3] - 1, answer[4]], [-1.0, -2.0, -3.0, -4.0]))
    outcome = engine.decode([0], Allowance(LinearCost(1.0, 0.0), 4))
    assert [emitted.pick.token for _, emitted in outcome.emitted] == answer[1:4]
    assert (outcome.drafted, outcome.accepted) == (4, 2)
    assert (outcome.tried, outcome.kept) == ([1, 1, 1], [1, 1, 0])


def test_two_ranks_draft_and_accept_alike() -> None:
    plain = plain_results()

    def work(ranks: Ranks) -> Results:
        return drive(tiny.rank_engine("llama", ranks, 4, 200), sample_groups(4), Traffic(16, pause=0.03), seed=5)

    results, other_rank = tiny.ThreadedRanks().run(work)
    assert results.tokens == other_rank.tokens == plain.tokens
    assert results.accepted == other_rank.accepted
    assert results.drafted == other_rank.drafted > 0
