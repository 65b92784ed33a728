"""The benchmark of the host's part of a step runs, and leaves nothing in place of what it stands for."""

import pytest

pytest.importorskip("triton")

from penstock.benchmarks import host
from penstock.kernels import dispatch
from penstock.shard import logits


@pytest.mark.parametrize("width", [0, 2])
def test_a_short_run(width: int) -> None:
    before = logits.begin, logits.expand
    assert 0 < host.measure(4, 40, 3, width) < 10
    assert (logits.begin, logits.expand) == before
    assert not dispatch._forced
