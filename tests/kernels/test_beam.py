"""Beam search candidates, by the reference and by Triton's kernels, compared with log-softmax plus score in float64 over all rows
of a search; and the most probable tokens of rows."""

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

from penstock.kernels import dispatch, fused_top
from penstock.kernels.beam import RowSet, best, candidates, continuations, living, most_probable, normalizers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of intended infinities


@pytest.fixture(params=["reference", "triton"], autouse=True)
def each_implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fused_top, "SPLIT", 64)
    dispatch.force(request.param)
    yield
    dispatch.force("")


@pytest.mark.parametrize("vocabulary", [8, 65, 333])
def test_candidates_match_exact_log_softmax_plus_score(vocabulary: int, rng: random.Random) -> None:
    sizes = [rng.randint(1, 5) for _ in range(4)]
    starts = [sum(sizes[:i]) for i in range(5)]
    count = rng.randint(1, 8)
    logits = torch.randn(starts[-1], vocabulary, device=DEVICE) * 3
    logits[0, :3] = -torch.inf  # as tokens that a grammar forbids
    scores = torch.randn(starts[-1], device=DEVICE) * 2
    sums, rows, ids, totals = candidates(logits, scores, starts, count)
    assert totals.equal(normalizers(logits))
    torch.testing.assert_close(totals.double(), logits.double().logsumexp(-1), rtol=1e-6, atol=1e-6)
    assert sums.shape == rows.shape == ids.shape == (4, count)
    exact = logits.double().log_softmax(-1) + scores.double().unsqueeze(1)
    for i, (start, end) in enumerate(pairwise(starts)):
        possible = min(count, int(exact[start:end].isfinite().sum()))
        expected = exact[start:end].flatten().topk(possible)
        torch.testing.assert_close(sums[i, :possible].double(), expected.values, rtol=1e-5, atol=1e-5)
        assert rows[i, :possible].tolist() == (expected.indices // vocabulary + start).tolist()
        assert ids[i, :possible].tolist() == (expected.indices % vocabulary).tolist()


@pytest.mark.parametrize("vocabulary", [5, 64, 200])
def test_most_probable_tokens_match_exact_log_softmax(vocabulary: int, rng: random.Random) -> None:
    whole = torch.full((3, vocabulary + 2), torch.nan, device=DEVICE)
    logits = whole[:, 1:-1]
    logits.copy_(torch.randn(3, vocabulary) * 3)
    count = rng.randint(1, 5)
    values, ids = most_probable(logits, count)
    expected = logits.double().log_softmax(-1).topk(count)
    assert ids.tolist() == expected.indices.tolist()
    torch.testing.assert_close(values.double(), expected.values, rtol=1e-5, atol=1e-5)


def test_equal_logits_are_each_counted() -> None:
    logits = torch.zeros(1, 100, device=DEVICE)
    values, ids = most_probable(logits, 5)
    torch.testing.assert_close(values, torch.full_like(values, 0.01).log())
    assert len(set(ids[0].tolist())) == 5


def tied_logits(rows: int, vocabulary: int) -> torch.Tensor:
    """Many equal logits, as with 16 bits. In some rows most tokens are impossible."""
    logits = (torch.randn(rows, vocabulary) * 2).round()
    logits[::3, vocabulary // 9 :] = -torch.inf
    return logits.to(DEVICE)


def test_ties_are_ordered_by_id_for_any_count() -> None:
    logits = tied_logits(9, 200)
    expected = logits.sort(descending=True, stable=True).indices
    for count in (1, 2, 5, 8, 30):
        possible = logits.isfinite().sum(1).clamp(max=count).tolist()
        for ids, expected_ids, limit in zip(most_probable(logits, count)[1].tolist(), expected.tolist(), possible, strict=True):
            assert ids[:limit] == expected_ids[:limit]


@pytest.mark.parametrize("count", [4, 16])
def test_candidates_do_not_depend_on_the_largest_requested_count(count: int) -> None:
    logits, scores = tied_logits(6, 200), torch.tensor([0.0, -1.0, 0.0, 0.0, -2.0, 0.0], device=DEVICE)
    logits[0] = logits[1]
    few, many = (candidates(logits, scores, [0, 2, 6], requested) for requested in (4, count))
    for first, second in zip(few[:3], many[:3], strict=True):
        assert first.equal(second[:, :4])
    rows, ids = few[1][0].tolist(), few[2][0].tolist()
    sums = (logits.log_softmax(-1) + scores.unsqueeze(1))[:2].flatten()
    assert [row * 200 + id for row, id in zip(rows, ids, strict=True)] == sums.sort(descending=True, stable=True).indices[
        :4
    ].tolist()


def test_candidates_are_bit_identical_beside_rows_of_nan() -> None:
    logits, scores = torch.randn(4, 100, device=DEVICE), torch.zeros(4, device=DEVICE)
    logits[1] = torch.nan
    together = candidates(logits, scores, [0, 1, 2, 4], 3)
    alone = candidates(logits[2:], scores[2:], [0, 2], 3)
    assert together[0][2].equal(alone[0][0])
    assert together[1][2].equal(alone[1][0] + 2)
    assert together[2][2].equal(alone[2][0])


def test_best_of_each_set_orders_ties_by_row_and_id(rng: random.Random) -> None:
    """Also where fewer are possible than are requested."""
    sizes = [rng.randint(1, 4) for _ in range(5)]
    starts = [sum(sizes[:i]) for i in range(6)]
    order = tied_logits(starts[-1], 200)
    order[starts[2] : starts[3], 2:] = -torch.inf
    found, rows, ids = best(order, starts, 9)
    assert rows.max() < starts[-1]
    for i, (start, end) in enumerate(pairwise(starts)):
        expected = order[start:end].flatten().sort(descending=True, stable=True)
        possible = min(9, int(order[start:end].isfinite().sum()))
        assert found[i].equal(expected.values[:9])
        assert (rows[i, :possible] * 200 + ids[i, :possible]).equal(expected.indices[:possible] + start * 200)


def row_sets(rng: random.Random, most: int) -> list[RowSet]:
    """Searches of several sizes; their end tokens are among the first, which `tied_logits` makes likely."""
    found: list[RowSet] = []
    for _ in range(5):
        rows, width = rng.randint(1, 5), rng.randint(2, 5)
        ends = rng.sample(range(12), rng.choice([0, 0, 1, 3]))
        start = found[-1].start + found[-1].rows if found else 0
        found.append(RowSet(start, rows, min(most, max(2, 1 + len(ends)) * width), width, ends))
    return found


@pytest.mark.parametrize("vocabulary", [20, 64, 333])
def test_continuations_match_candidates_and_their_log_probabilities(vocabulary: int, rng: random.Random) -> None:
    sets = row_sets(rng, vocabulary)
    last, count = sets[-1].start + sets[-1].rows, max(one.count for one in sets)
    logits = tied_logits(last, vocabulary)
    scores = [rng.choice([0.0, -1.0, -2.5]) for _ in range(last)]
    found = continuations(logits, scores, sets)
    starts = [*(one.start for one in sets), last]
    sums, rows, ids, own = candidates(logits, torch.tensor(scores, device=DEVICE), starts, count)
    assert found.found[0].equal(sums.double())
    possible = sums > -torch.inf
    assert found.found[1:3, possible].equal(torch.stack((rows, ids))[:, possible].double())
    assert found.found[3, possible].equal((logits[rows, ids] - own[rows]).double()[possible])


@pytest.mark.parametrize("vocabulary", [20, 333])
def test_beams_that_live_on_are_the_best_that_do_not_end(vocabulary: int, rng: random.Random) -> None:
    sets = row_sets(rng, vocabulary)
    last = sets[-1].start + sets[-1].rows
    made = continuations(tied_logits(last, vocabulary), [rng.choice([0.0, -1.0]) for _ in range(last)], sets)
    tokens, parents = made.alive or living(made.found, sets)
    assert len(tokens) == len(parents) == sum(one.width for one in sets)
    for i, one in enumerate(sets):
        considered = made.found[:3, i, : one.count].t().tolist()
        lives = [
            (int(row) - one.start, int(token)) for total, row, token in considered if token not in one.ends and total > -torch.inf
        ]
        expected, tokens = lives[: one.width], tokens[:] if not i else tokens[sets[i - 1].width :]
        parents = parents[:] if not i else parents[sets[i - 1].width :]
        own = [*zip(parents[: one.width].tolist(), tokens[: one.width].tolist(), strict=True)]
        assert own[: len(expected)] == expected
        assert all(0 <= parent < one.rows and 0 <= token < vocabulary for parent, token in own)


def test_continuations_of_a_search_beside_rows_of_nan() -> None:
    logits = torch.randn(5, 100, device=DEVICE)
    logits[1], logits[4, 7] = torch.nan, torch.inf
    sets = [RowSet(0, 2, 6, 3), RowSet(2, 2, 4, 2), RowSet(4, 1, 4, 2)]
    together = continuations(logits, [0.0, -1.0, -2.0, -3.0, 0.0], sets)
    alone = continuations(logits[2:4], [-2.0, -3.0], [RowSet(0, 2, 6, 2)])
    assert together.found[0].isnan().all(1).tolist() == [True, False, True]
    assert together.found[:, 1].sub(torch.tensor([0, 2, 0, 0], device=DEVICE).unsqueeze(1)).equal(alone.found[:, 0])
    tokens, parents = together.alive or living(together.found, sets)
    assert tokens.min() >= 0
    assert tokens.max() < 100
    assert [parents[:3].max() < 2, parents[3:5].max() < 2, parents[5:].max() < 1] == [True] * 3


def test_searches_of_too_many_rows_to_merge_are_expanded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, scores, sets = tied_logits(6, 200), [0.0, -1.0, 0.0, -2.0, 0.0, -1.0], [RowSet(0, 2, 8, 4, [3]), RowSet(2, 4, 8, 4)]
    usual = continuations(logits, scores, sets)
    monkeypatch.setattr(fused_top, "LISTS", 8)
    unmerged = continuations(logits, scores, sets)
    assert unmerged.alive is None
    assert unmerged.found.equal(usual.found)
    if usual.alive is not None:
        assert all(one.equal(other) for one, other in zip(living(usual.found, sets), usual.alive, strict=True))
