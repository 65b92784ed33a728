"""What holds for all tests."""

import atexit
import gc
import os
from collections.abc import Iterator

import pytest

# Before numpy comes: its threads wait by spinning, and take the cores of those who compute. For shards the launcher says so.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# While modules come nothing of theirs goes: each look for what might takes longer than the one before.
gc.disable()


def pytest_collection_finish() -> None:
    """What has come stays. Else each collection, of which bench and servers ask for some, takes half a second to look at it all."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # some of it complains where it outlives Python


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Of torch, in this process."""
    import torch  # most tests do without

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
