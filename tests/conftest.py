"""Settings and fixtures for all tests."""

import atexit
import gc
import os
from collections.abc import Iterator

import pytest

# Set before numpy is imported: its idle threads spin, and take cores from the processes that compute. For shards the launcher sets
# them.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# While modules are imported nothing can be collected, and each garbage collection takes longer than the one before.
gc.disable()


def pytest_collection_finish() -> None:
    """Imported modules are exempt from garbage collection. Otherwise each collection, some of which bench and the servers request,
    would take half a second to scan them all."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # some objects raise errors if they are still frozen when Python exits


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch uses one thread in this process."""
    import torch  # most tests don't need it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
