"""For all tests of the shard."""

import pytest

from penstock.shard import masks


@pytest.fixture(autouse=True)
def patient_with_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that drive an engine step by step count on grammars that are compiled, however busy the machine is."""
    monkeypatch.setattr(masks, "PATIENCE", 60.0)
