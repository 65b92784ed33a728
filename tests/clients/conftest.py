"""One server with the demo model for the tests of all clients; PENSTOCK_TEST_URL can name a server that runs elsewhere instead.

Imports penstock only when it is needed: some clients are tested in environments without it.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def server() -> Iterator[Any]:
    from penstock.tests.serving import serve

    with serve("--max-concurrent-requests", "16") as server:
        yield server


@pytest.fixture(scope="session")
def url(request: pytest.FixtureRequest) -> str:
    return os.environ.get("PENSTOCK_TEST_URL") or str(request.getfixturevalue("server").url)
