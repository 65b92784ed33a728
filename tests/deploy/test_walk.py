"""The page that walks from a laptop to a cluster: what it tells to type works."""

import os
import re
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.launcher.machine import free_port
from penstock.tests import serving
from penstock.tests.deploy import conftest, walk

RUN = [block for block in walk.blocks() if block.tags[:1] == ("run",)]
STARTS = [block for block in walk.blocks() if block.tags[:1] == ("starts",)]
ASSIGNMENTS = re.compile(r"^(\w+=(\$\([^)]*\)|\S*) )*")  # before a command
LEFT = ("docker", "helm", "kind", "kubectl", "sbatch", "sudo")  # need an engine, a cluster, root


def need(block: walk.Block) -> None:
    """What it names as its tools."""
    missing = [tool for tool in block.tags[1:] if walk.find(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def name(block: walk.Block) -> str:
    return block.text.split("\n")[0][:40]


@pytest.mark.timeout(240)  # several servers at once, and torchrun's own processes, on a busy machine
@pytest.mark.parametrize("block", STARTS, ids=name)
def test_its_servers_start_and_end(block: walk.Block) -> None:
    """All lines together are one server. SIGTERM to the first ends all of it, and ends it well; rank groups of others go on."""
    need(block)
    port, meeting, elsewhere = free_port(), str(free_port()), str(free_port())
    lines = block.text.replace("29600", elsewhere).splitlines()
    own = {"MASTER_PORT": meeting, "PET_MASTER_PORT": meeting}  # the second is torchrun's name for it
    with serving.scratch() as folder:
        environment = dict(word.split("=", 1) for word in conftest.environment(port)) | own | {"TMPDIR": str(folder)}
        log = folder / "log"
        with log.open("w") as out:
            parts = [subprocess.Popen(shlex.split(line), env=environment, stdout=out, stderr=out) for line in lines]
        try:
            deadline = time.monotonic() + 2 * serving.START
            while not conftest.answers(port):
                assert all(part.poll() is None for part in parts), log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(serving.POLL)
            codes = []
            for line, part in zip(lines, parts, strict=True):
                if part is parts[0] or "--no-router" in line:
                    part.send_signal(signal.SIGTERM)
                codes.append(part.wait(2 * serving.STOP))
            # torchrun says by its own what it was ended by.
            assert "torchrun" in block.tags or not any(codes), log.read_text()
        finally:
            for part in parts:
                part.terminate()  # torchrun's own children would outlive it if it were killed
            for part in parts:
                with suppress(subprocess.TimeoutExpired):
                    part.wait(serving.STOP)
                part.kill()
                part.wait()


@pytest.mark.parametrize("block", RUN, ids=name)
def test_its_commands_work(block: walk.Block, server: int, tmp_path: Path) -> None:
    need(block)
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
        assert block.tags[:1] in ((), ("serve",), ("run",), ("starts",))
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
