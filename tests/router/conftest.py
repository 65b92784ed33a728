"""What holds for the router's tests."""

from typing import ClassVar

import pytest

from penstock.router import grammar, pixels, rendering, worker_processes

PLACES = grammar, pixels, rendering  # which work in processes of their own


class Kept(worker_processes.WorkerProcesses):
    """Takes over the processes that others have left: to start one takes seconds where transformers has to be imported."""

    _left: ClassVar[dict[str, list[worker_processes._Process]]] = {}

    def __init__(self, module: str, processes: int, finishes: bool = False) -> None:
        super().__init__(module, processes, finishes)
        self._idle = self._left.setdefault(module, [])
        self._started = any(process.alive for process in self._idle)


@pytest.fixture
def own_processes() -> None:
    """For tests that look at processes, or change what these have read."""


@pytest.fixture(autouse=True)
def _kept_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "own_processes" not in request.fixturenames:
        for place in PLACES:
            monkeypatch.setattr(place, "WorkerProcesses", Kept)
