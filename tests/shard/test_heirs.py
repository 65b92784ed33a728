"""Heirs: the beams that the device selects before the host knows them are those that the host's beam search selects later."""

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
from penstock.shard.logits import _on_host
from penstock.shard.sequence import Group, Sampling, Sequence
from penstock.tests.shard import tiny


def test_beams_selected_on_the_device_match_the_hosts_beam_search() -> None:
    """For any logits: with ties, impossible tokens and NaN; and for searches of different widths in one step."""
    chance, survivors = random.Random(6), 0
    for trial in range(400):
        vocabulary = chance.choice([12, 17, 40])
        groups = [random_search(chance, uid, vocabulary) for uid in range(chance.randint(1, 4))]
        sets = [
            Beams(BEAM_SEARCH.rows(group), [score_of(one) for one in group.sequences], count, search.width, group.end_ids)
            for group, search, count in groups
        ]
        rows = sum(len(one.rows) for one in sets)
        logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(trial))
        if trial % 3 == 0:
            logits = logits.sign()
        if trial % 4 == 0:
            logits[:, chance.randrange(1, 5) :] = -torch.inf  # fewer tokens are left than candidates are taken
        if trial % 5 == 0:
            logits[chance.randrange(rows), 0] = chance.choice([torch.nan, torch.inf])
        pending = expand(logits, sets).pending()
        assert pending.picked is not None
        picked = pending.picked()
        assert picked.parents is not None
        first = 0
        for (group, search, _), found in zip(groups, pending.take(), strict=True):
            on_device = list(zip(picked.parents.tolist(), picked.tokens.tolist(), strict=True))[first : first + search.width]
            assert all(0 <= parent < len(group.sequences) and 0 <= token < vocabulary for parent, token in on_device)
            first += search.width
            children = BEAM_SEARCH.judge(group, found).children
            on_host = [(child.row, child.token) for child in children]
            assert on_device[: len(on_host)] == on_host
            survivors += len(on_host)
    assert survivors > 1000


def random_search(chance: random.Random, uid: int, vocabulary: int) -> tuple[Group, Search, int]:
    """A group in the middle of a search, perhaps with fewer beams than its width; its search, and its number of candidates."""
    search = Search(chance.randint(2, 4), 1, 1.0, Stop.FULL)
    end_ids = frozenset(chance.sample(range(vocabulary), chance.randint(0, 2)))
    if candidates_of(search.width, len(end_ids)) > vocabulary:
        return random_search(chance, uid, vocabulary)
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
def test_pages_requested_for_heirs_stay_within_their_bound(size: int, length: int, most: int, grow: int) -> None:
    """And the pages that the beams already hold are counted, however many they are."""
    group = tiny.group(1, (1, 2, 3), 9, search=Search(2, 1))
    first, second = ([1, 2], [3, 4]) if size == 4 else ([1, 2], [1, 3])
    group.sequences = [Sequence(array("I", [1] * length), 3, computed=length - 1, pages=pages) for pages in (first, second)]
    group.waiting, group.decodes, group.most = [], True, most
    assert group.standing(size) == (len({*first, *second}), grow, 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_with_stop_strings_or_grammars_are_not_left_in_flight(ranks: int) -> None:
    """Stop strings and grammars are checked on the host: steps of such beams are not left in flight."""
    begun = []
    for more in ({}, {"stops": ("a",)}, {"grammar": "x"}):
        for search in (None, Search(2, 1)):
            begun += [not _on_host(tiny.group(1, (1, 2), 5, search=search, **more), ranks > 1)]
    assert begun == ([True, True, True, False, True, False] if ranks == 1 else [True, True, True, False, False, False])


def test_shared_runs_contain_only_settled_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of the heirs' page tables behind the settled ones are meaningless."""
    monkeypatch.setattr(work_list, "SHORTEST_RUN", 4)
    pages = [5, 6, 0, 0, 9]
    for settled, end in ((2, 2), (1, 1), (None, 4)):
        runs = list(work_list.shared_runs([Row(1, 17, [*pages[:4], 8 + row], settled=settled) for row in range(3)], 4, 1))
        assert [(run.members, run.begin, run.end) for run in runs] == [([0, 1, 2], 0, end)]
