"""Which beams live on, as the device says while the host does not know it yet: those that the books say later."""

import math
import random
from array import array
from typing import Any

import pytest
import torch

from penstock.kernels import work_list
from penstock.kernels.attention import Row
from penstock.shard.decoding.expansion import Beams, expand
from penstock.shard.decoding.hypotheses import Path, Search, Stop, candidates_of
from penstock.shard.decoding.methods import BEAM_SEARCH
from penstock.shard.logits import WantedRows, _on_host
from penstock.shard.sequence import Group, Sampling, Sequence
from penstock.shard.step import Run
from penstock.tests.shard import tiny


def test_the_device_lets_those_live_on_that_the_books_do() -> None:
    """Whatever the logits are: with ties, with what can't be, with no numbers; and of sets of different sizes."""
    chance, lived = random.Random(6), 0
    for trial in range(400):
        vocabulary = chance.choice([12, 17, 40])
        groups = [searching(chance, uid, vocabulary) for uid in range(chance.randint(1, 4))]
        sets = [
            Beams(BEAM_SEARCH.rows(group), [score_of(one) for one in group.sequences], count, search.width, group.end_ids)
            for group, search, count in groups
        ]
        rows = sum(len(one.rows) for one in sets)
        logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(trial))
        if trial % 3 == 0:
            logits = logits.sign()
        if trial % 4 == 0:
            logits[:, chance.randrange(1, 5) :] = -torch.inf  # fewer are left than are looked at
        if trial % 5 == 0:
            logits[chance.randrange(rows), 0] = chance.choice([torch.nan, torch.inf])
        pending = expand(logits, sets).pending()
        assert pending.picked is not None
        picked = pending.picked()
        assert picked.parents is not None
        first = 0
        for (group, search, _), found in zip(groups, pending.take(), strict=True):
            told = list(zip(picked.parents.tolist(), picked.tokens.tolist(), strict=True))[first : first + search.width]
            assert all(0 <= parent < len(group.sequences) and 0 <= token < vocabulary for parent, token in told)
            first += search.width
            children = BEAM_SEARCH.judge(group, found).children
            own = [([one is child.parent for one in group.sequences].index(True), child.token) for child in children]
            assert told[: len(own)] == own
            lived += len(own)
    assert lived > 1000


def searching(chance: random.Random, uid: int, vocabulary: int) -> tuple[Group, Search, int]:
    """A group in the middle of a search, perhaps with fewer beams than it is wide; and how many candidates it looks at."""
    search = Search(chance.randint(2, 4), 1, 1.0, Stop.FULL)
    end_ids = frozenset(chance.sample(range(vocabulary), chance.randint(0, 2)))
    if candidates_of(search.width, len(end_ids)) > vocabulary:
        return searching(chance, uid, vocabulary)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "top_k": 3, "seed": uid},
        {"repetition_penalty": 1.2, "bias": ((3, -math.inf), (4, 5.0))},
    ]
    group = tiny.group(uid, (1, 2, 3), 20, Sampling(**chance.choice(kinds)), end_ids=end_ids, search=search)
    group.sequences = []
    for _ in range(chance.randint(1, search.width)):
        sequence = Sequence(array("I", [1, 2, 3, chance.randrange(vocabulary)]), 3, computed=3)
        sequence.path = Path(-chance.choice([0.0, 1.0, chance.random()]), array("f", [0.0]))
        group.sequences.append(sequence)
    group.waiting, group.min_new_tokens = [], chance.choice([0, 9])
    assert group.search is not None
    return group, group.search, candidates_of(search.width, len(end_ids))


def score_of(sequence: Sequence) -> float:
    assert sequence.path is not None
    return sequence.path.score


@pytest.mark.parametrize(("size", "length", "most", "grow"), [(4, 6, 4, 0), (4, 6, 9, 2), (2, 4, 4, 2)])
def test_room_for_heirs_is_asked_for_within_their_bound(size: int, length: int, most: int, grow: int) -> None:
    """And what beams without heirs take, whatever that is."""
    group = tiny.group(1, (1, 2, 3), 9, search=Search(2, 1))
    first, second = ([1, 2], [3, 4]) if size == 4 else ([1, 2], [1, 3])
    group.sequences = [Sequence(array("I", [1] * length), 3, computed=length - 1, pages=pages) for pages in (first, second)]
    group.waiting, group.decodes, group.most = [], True, most
    assert group.standing(size) == (len({*first, *second}), grow, 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_who_ends_is_known_on_the_host_where_somebody_has_to_read(ranks: int) -> None:
    """Texts and grammars: such beams are not left under way."""
    begun = []
    for more in ({}, {"stops": ("a",)}, {"grammar": "x"}):
        for search in (None, Search(2, 1)):
            run = Run(tiny.group(1, (1, 2), 5, search=search, **more), [], sampled=True)
            begun.append(not _on_host(WantedRows(run, [], 4 if search else 0), ranks > 1))
    assert begun == ([True, True, True, False, True, False] if ranks == 1 else [True, True, True, False, False, False])


def test_only_pages_that_are_settled_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in the tables of heirs behind those is nobody's."""
    monkeypatch.setattr(work_list, "SHORTEST_RUN", 4)
    pages = [5, 6, 0, 0, 9]
    for settled, end in ((2, 2), (1, 1), (None, 4)):
        runs = list(work_list.shared_runs([Row(1, 17, [*pages[:4], 8 + row], settled=settled) for row in range(3)], 4, 1))
        assert [(run.members, run.begin, run.end) for run in runs] == [([0, 1, 2], 0, end)]
