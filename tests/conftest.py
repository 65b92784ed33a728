"""Settings and fixtures for all tests."""

import ast
import atexit
import functools
import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

# Set before numpy is imported: its idle threads spin, and take cores from the processes that compute. For shards the launcher sets
# them.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")

if sys.version_info < (3, 11, 8):  # if garbage is collected within ast.parse, and asyncio complains of it, that fails there
    _parse = ast.parse

    @functools.wraps(_parse)
    def parse_without_collection(*arguments: Any, **named: Any) -> Any:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return _parse(*arguments, **named)
        finally:
            if enabled:
                gc.enable()

    ast.parse = parse_without_collection  # type: ignore[assignment]

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
