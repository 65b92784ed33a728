"""docs/benchmarking.md names exactly the scripts that `make bench WHAT=...` can run."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
HELPER_SCRIPTS = {"gpu_shard", "peer"}


def test_page_names_every_benchmark_script_and_no_others() -> None:
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    table = (ROOT / "docs" / "benchmarking.md").read_text().partition("## `make bench WHAT=...`")[2]
    documented = {
        name for line in table.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert documented == scripts - HELPER_SCRIPTS
