"""Candidates of beams are the best of log-softmax plus score, over all rows of a set; by both implementations."""

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

from penstock.kernels import dispatch, fused_top
from penstock.kernels.beam import best, candidates, most_probable, normalizers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities that are meant


@pytest.fixture(params=["reference", "triton"], autouse=True)
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fused_top, "SPLIT", 64)
    dispatch.force(request.param)
    yield
    dispatch.force("")


@pytest.mark.parametrize("vocabulary", [8, 65, 333])
def test_candidates(vocabulary: int, rng: random.Random) -> None:
    sizes = [rng.randint(1, 5) for _ in range(4)]
    starts = [sum(sizes[:i]) for i in range(5)]
    count = rng.randint(1, 8)
    logits = torch.randn(starts[-1], vocabulary, device=DEVICE) * 3
    logits[0, :3] = -torch.inf  # as what a grammar forbids is
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
def test_most_probable(vocabulary: int, rng: random.Random) -> None:
    whole = torch.full((3, vocabulary + 2), torch.nan, device=DEVICE)
    logits = whole[:, 1:-1]
    logits.copy_(torch.randn(3, vocabulary) * 3)
    count = rng.randint(1, 5)
    values, ids = most_probable(logits, count)
    expected = logits.double().log_softmax(-1).topk(count)
    assert ids.tolist() == expected.indices.tolist()
    torch.testing.assert_close(values.double(), expected.values, rtol=1e-5, atol=1e-5)


def test_equal_ones_count_each() -> None:
    logits = torch.zeros(1, 100, device=DEVICE)
    values, ids = most_probable(logits, 5)
    torch.testing.assert_close(values, torch.full_like(values, 0.01).log())
    assert len(set(ids[0].tolist())) == 5


def tied(rows: int, vocabulary: int) -> torch.Tensor:
    """As 16 bits leave logits: many are equal. Of some rows most are impossible."""
    logits = (torch.randn(rows, vocabulary) * 2).round()
    logits[::3, vocabulary // 9 :] = -torch.inf
    return logits.to(DEVICE)


def test_of_equal_ones_the_first_come_first_however_many_are_wanted() -> None:
    logits = tied(9, 200)
    expected = logits.sort(descending=True, stable=True).indices
    for count in (1, 2, 5, 8, 30):
        possible = logits.isfinite().sum(1).clamp(max=count).tolist()
        for own, wanted, most in zip(most_probable(logits, count)[1].tolist(), expected.tolist(), possible, strict=True):
            assert own[:most] == wanted[:most]


@pytest.mark.parametrize("count", [4, 16])
def test_neighbours_that_want_more_change_nothing(count: int) -> None:
    logits, scores = tied(6, 200), torch.tensor([0.0, -1.0, 0.0, 0.0, -2.0, 0.0], device=DEVICE)
    logits[0] = logits[1]
    few, many = (candidates(logits, scores, [0, 2, 6], wanted) for wanted in (4, count))
    for first, second in zip(few[:3], many[:3], strict=True):
        assert first.equal(second[:, :4])
    rows, ids = few[1][0].tolist(), few[2][0].tolist()
    sums = (logits.log_softmax(-1) + scores.unsqueeze(1))[:2].flatten()
    assert [row * 200 + id for row, id in zip(rows, ids, strict=True)] == sums.sort(descending=True, stable=True).indices[
        :4
    ].tolist()


def test_rows_do_not_know_their_neighbours() -> None:
    logits, scores = torch.randn(4, 100, device=DEVICE), torch.zeros(4, device=DEVICE)
    logits[1] = torch.nan
    among = candidates(logits, scores, [0, 1, 2, 4], 3)
    alone = candidates(logits[2:], scores[2:], [0, 2], 3)
    assert among[0][2].equal(alone[0][0])
    assert among[1][2].equal(alone[1][0] + 2)
    assert among[2][2].equal(alone[2][0])


def test_the_best_of_sets(rng: random.Random) -> None:
    """Among equal ones, too, and where less is possible than is wanted."""
    sizes = [rng.randint(1, 4) for _ in range(5)]
    starts = [sum(sizes[:i]) for i in range(6)]
    order = tied(starts[-1], 200)
    order[starts[2] : starts[3], 2:] = -torch.inf
    found, rows, ids = best(order, starts, 9)
    assert rows.max() < starts[-1]
    for i, (start, end) in enumerate(pairwise(starts)):
        expected = order[start:end].flatten().sort(descending=True, stable=True)
        possible = min(9, int(order[start:end].isfinite().sum()))
        assert found[i].equal(expected.values[:9])
        assert (rows[i, :possible] * 200 + ids[i, :possible]).equal(expected.indices[:possible] + start * 200)
