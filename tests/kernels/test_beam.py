"""Candidates of beams are the best of log-softmax plus score, over all rows of a set; by both implementations."""

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

from penstock.kernels import choose, fused_top
from penstock.kernels.beam import candidates, most_probable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities that are meant


@pytest.fixture(params=["reference", "triton"], autouse=True)
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fused_top, "SPLIT", 64)
    choose.force(request.param)
    yield
    choose.force("")


@pytest.mark.parametrize("vocabulary", [8, 65, 333])
def test_candidates(vocabulary: int, chance: random.Random) -> None:
    sizes = [chance.randint(1, 5) for _ in range(4)]
    starts = [sum(sizes[:i]) for i in range(5)]
    count = chance.randint(1, 8)
    logits = torch.randn(starts[-1], vocabulary, device=DEVICE) * 3
    logits[0, :3] = -torch.inf  # as what a grammar forbids is
    scores = torch.randn(starts[-1], device=DEVICE) * 2
    sums, rows, ids = candidates(logits, scores, starts, count)
    assert sums.shape == rows.shape == ids.shape == (4, count)
    exact = logits.double().log_softmax(-1) + scores.double().unsqueeze(1)
    for i, (start, end) in enumerate(pairwise(starts)):
        possible = min(count, int(exact[start:end].isfinite().sum()))
        expected = exact[start:end].flatten().topk(possible)
        torch.testing.assert_close(sums[i, :possible].double(), expected.values, rtol=1e-5, atol=1e-5)
        assert rows[i, :possible].tolist() == (expected.indices // vocabulary + start).tolist()
        assert ids[i, :possible].tolist() == (expected.indices % vocabulary).tolist()


@pytest.mark.parametrize("vocabulary", [5, 64, 200])
def test_most_probable(vocabulary: int, chance: random.Random) -> None:
    whole = torch.full((3, vocabulary + 2), torch.nan, device=DEVICE)
    logits = whole[:, 1:-1]
    logits.copy_(torch.randn(3, vocabulary) * 3)
    count = chance.randint(1, 5)
    values, ids = most_probable(logits, count)
    expected = logits.double().log_softmax(-1).topk(count)
    assert ids.tolist() == expected.indices.tolist()
    torch.testing.assert_close(values.double(), expected.values, rtol=1e-5, atol=1e-5)


def test_equal_ones_count_each() -> None:
    logits = torch.zeros(1, 100, device=DEVICE)
    values, ids = most_probable(logits, 5)
    torch.testing.assert_close(values, torch.full_like(values, 0.01).log())
    assert len(set(ids[0].tolist())) == 5


def test_rows_do_not_know_their_neighbours() -> None:
    logits, scores = torch.randn(4, 100, device=DEVICE), torch.zeros(4, device=DEVICE)
    logits[1] = torch.nan
    among = candidates(logits, scores, [0, 1, 2, 4], 3)
    alone = candidates(logits[2:], scores[2:], [0, 2], 3)
    assert among[0][2].equal(alone[0][0])
    assert among[1][2].equal(alone[1][0] + 2)
    assert among[2][2].equal(alone[2][0])
