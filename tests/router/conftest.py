"""Fixtures of the router's tests: worker processes are reused between tests."""

from typing import ClassVar

import pytest

from penstock.router import grammar, pixels, rendering, worker_processes

MODULES_WITH_WORKERS = grammar, pixels, rendering  # which start worker processes


class ReusedWorkerProcesses(worker_processes.WorkerProcesses):
    """Takes over idle processes of earlier tests: starting one takes seconds where transformers has to be imported."""

    _left: ClassVar[dict[str, list[worker_processes._Process]]] = {}

    def __init__(self, module: str, processes: int, finishes: bool = False) -> None:
        super().__init__(module, processes, finishes)
        self._idle = self._left.setdefault(module, [])
        self._started = any(process.alive for process in self._idle)


@pytest.fixture
def own_processes() -> None:
    """For tests that inspect worker processes, or change files that these have read: they get new ones."""


@pytest.fixture(autouse=True)
def _reuse_worker_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "own_processes" not in request.fixturenames:
        for module in MODULES_WITH_WORKERS:
            monkeypatch.setattr(module, "WorkerProcesses", ReusedWorkerProcesses)
