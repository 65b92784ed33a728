"""Drafts change no token: the same answers with and without them, whoever guesses, whatever else happens."""

import functools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.shard.decoding.proposers import DraftRequest, NgramProposer, Proposal
from penstock.shard.decoding.tree import Tree, chain, merge
from penstock.shard.decoding.verify import Draft
from penstock.shard.engine import Engine
from penstock.shard.parallel import Ranks
from penstock.shard.sequence import Group, Sampling, Thinking
from penstock.tests.shard import configurations, tiny
from penstock.tests.shard.driver import UNLIMITED, Habits, World, drive
from penstock.tests.shard.test_oracle import at_rest, prompt
from penstock.tests.shard.test_sharing import room

COUNT = 18


class Oracle:
    """Knows what will be said, and now and then says something else; makes trees of any shape of it."""

    def __init__(self, said: dict[tuple[int, int], list[int]], right: float, width: int = 1) -> None:
        self._said = said
        self._right = right
        self._width = width

    def propose(self, asked: Sequence[DraftRequest]) -> Proposal:
        return Proposal([Draft(self._tree(one)) for one in asked])

    def _tree(self, asked: DraftRequest) -> Tree:
        sequence = asked.sequence
        chance = random.Random(1000 * asked.group.uid + sequence.generated)
        said = self._said[asked.group.uid, sequence.choice][sequence.generated : -1]  # nothing follows the last one
        count = chance.randint(0, asked.depth)
        paths = []
        for _ in range(self._width):
            drafts = [
                token if chance.random() < self._right else chance.randrange(configurations.VOCABULARY) for token in said[:count]
            ]
            paths.append(chain(drafts, [-chance.random() for _ in drafts]))
        return merge(paths).cut(asked.nodes)


def asked(drafts: int) -> list[Group]:
    """Greedy and seeded ones, with penalties, filters, choices, ends, log-probabilities."""
    made = []
    frequent = sorted(
        {token for answer in tiny.greedy("llama", tuple(prompt(seed, 8) for seed in range(20)), 6) for token in answer}
    )
    for uid in range(24):
        sampling = Sampling(temperature=0.7, top_p=0.95, top_k=30, seed=uid) if uid % 3 else Sampling()
        if uid % 4 == 3:
            sampling = replace(sampling, repetition_penalty=1.2, presence_penalty=0.3, bias=((3, 1.5),))
        repeated = prompt(uid, 6) * 4 if uid % 2 else prompt(uid, 5 + uid)
        made.append(
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
    return made


@functools.cache
def expected() -> World:
    return drive(tiny.engine("llama", 16, 2000, prefix_caching=False), asked(0), Habits())


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
    plain = expected()
    groups = asked(drafts)
    engine = tiny.engine("llama", page_size, room(groups, page_size) + 40 // page_size, prefix_caching)
    choose(engine, proposer, plain)
    world = drive(engine, groups, Habits(chunk, pause=0.05), seed=drafts)
    assert world.tokens == plain.tokens
    assert world.finishes == plain.finishes
    assert world.drafted > 0
    assert world.accepted > 0 or proposer == "lookup"  # these answers hardly repeat
    assert world.pauses
    assert at_rest(engine)


def choose(engine: Engine, name: str, plain: World) -> None:
    said = plain.tokens
    engine.speculator.proposer = {
        "lookup": NgramProposer(),
        "right": Oracle(said, 1.0),
        "chains": Oracle(said, 0.7),
        "trees": Oracle(said, 0.6, width=3),
    }[name]


def test_a_perfect_guesser_is_always_right() -> None:
    plain = expected()
    engine = tiny.engine("llama")
    choose(engine, "right", plain)
    world = drive(engine, asked(6), Habits())
    assert world.accepted == world.drafted > 200


def test_who_guesses_wrong_is_hardly_asked_again() -> None:
    plain = expected()
    engine = tiny.engine("llama")
    engine.speculator.proposer = Oracle(plain.tokens, 0.0)
    world = drive(engine, asked(4), Habits())
    assert world.tokens == plain.tokens
    assert world.drafted < len(plain.tokens) * 16  # of the 4 a step that it may have had


def test_two_ranks_guess_the_same() -> None:
    plain = expected()

    def work(ranks: Ranks) -> World:
        return drive(tiny.engine_of("llama", ranks, 4, 200), asked(4), Habits(16, pause=0.03), seed=5)

    world, twin = tiny.Threads().run(work)
    assert world.tokens == twin.tokens == plain.tokens
    assert world.accepted == twin.accepted
    assert world.drafted == twin.drafted > 0
