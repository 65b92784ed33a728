"""What docs/benchmarking.md says can be run by `make bench WHAT=...`."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
STARTED_BY_OTHERS = {"gpu_shard", "peer"}


def test_every_benchmark_is_named_and_what_is_named_can_be_run() -> None:
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    table = (ROOT / "docs" / "benchmarking.md").read_text().partition("## `make bench WHAT=...`")[2]
    named = {name for line in table.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert named == scripts - STARTED_BY_OTHERS
