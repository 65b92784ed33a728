"""The page that walks from a laptop to a cluster: what it tells to type works."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from penstock.tests.deploy import walk

RUN = [block for block in walk.blocks() if block.tags[:1] == ("run",)]
ASSIGNMENTS = re.compile(r"^(\w+=(\$\([^)]*\)|\S*) )*")  # before a command
LEFT = ("docker", "helm", "kind", "kubectl", "sbatch", "sudo")  # need an engine, a cluster, root


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.text.split("\n")[0][:40])
def test_its_commands_work(block: walk.Block, server: int, tmp_path: Path) -> None:
    missing = [tool for tool in block.tags[1:] if walk.find(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    text = block.text.replace("127.0.0.1:3000", f"127.0.0.1:{server}")
    answer = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=walk.ROOT,
        env={**os.environ, "PATH": walk.path(), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout


def test_what_is_not_run_can_not_be() -> None:
    for block in walk.blocks():
        assert block.tags[:1] in ((), ("serve",), ("run",))
        for line in block.text.splitlines() if not block.tags else ():
            assert ASSIGNMENTS.sub("", line).split()[0] in LEFT, line
            assert not line.startswith("kubectl kustomize"), line


def test_every_file_that_it_names_is_there() -> None:
    text = walk.PAGE.read_text()
    named = {word.strip("`,.:;()") for word in text.split() if word.strip("`(").startswith("deploy/")}
    assert len(named) > 10
    assert [name for name in named if not (walk.ROOT / name).exists()] == []


def test_everything_that_is_shipped_is_named() -> None:
    """A file that no page mentions, by its folder at least, is one that nobody finds."""
    text = walk.PAGE.read_text()
    folders = {path.relative_to(walk.ROOT / "deploy").parts for path in (walk.ROOT / "deploy").rglob("*") if path.is_dir()}
    leaves = {"/".join(parts[:3]) for parts in folders} - {"kubernetes/overlays", "monitoring/grafana"}
    assert [leaf for leaf in sorted(leaves) if leaf not in text and leaf.removeprefix("kubernetes/") not in text] == []
