"""What holds for all tests."""

import os
from collections.abc import Iterator

import pytest

# Before numpy comes: its threads wait by spinning, and take the cores of those who compute. For shards the launcher says so.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Of torch, in this process."""
    import torch  # most tests do without

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
