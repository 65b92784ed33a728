"""The benchmark of a step's host part runs, and restores the functions that it patches."""

import pytest

pytest.importorskip("triton")

from penstock.benchmarks import host
from penstock.kernels import dispatch
from penstock.shard import logits


@pytest.mark.parametrize("width", [0, 2])
def test_short_run_measures_and_restores_patched_functions(width: int) -> None:
    before = logits.begin, logits.expand
    assert 0 < host.measure(4, 40, 3, width, penalty=1.1) < 10
    assert (logits.begin, logits.expand) == before
    assert not dispatch._forced
