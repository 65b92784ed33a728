"""docs/deploy.md: its commands work, the files that it names exist, and it names every folder of deploy/."""

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
from penstock.tests.deploy import conftest, deploy_page

COMMAND_BLOCKS = [block for block in deploy_page.blocks() if block.tags[:1] == ("run",)]
SERVER_BLOCKS = [block for block in deploy_page.blocks() if block.tags[:1] == ("starts",)]
ASSIGNMENTS = re.compile(r"^(\w+=(\$\([^)]*\)|\S*) )*")  # variables before a command
NOT_RUN = ("docker", "helm", "kind", "kubectl", "sbatch", "sudo")  # need a container engine, a cluster or root


def skip_if_tools_are_missing(block: deploy_page.Block) -> None:
    """Skips the test if a tool in the block's tags is not installed."""
    missing = [tool for tool in block.tags[1:] if deploy_page.find(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def name(block: deploy_page.Block) -> str:
    return block.text.split("\n")[0][:40]


@pytest.mark.timeout(240)  # several servers at once, and torchrun's own processes, on a busy machine
@pytest.mark.parametrize("block", SERVER_BLOCKS, ids=name)
def test_servers_of_the_page_start_and_exit_on_sigterm(block: deploy_page.Block) -> None:
    """All lines of a block together are one server. SIGTERM to the first ends all of it, with exit code 0; rank groups that
    were started on their own (--no-router) need their own signal."""
    skip_if_tools_are_missing(block)
    port, master_port, other_port = free_port(), str(free_port()), str(free_port())
    lines = block.text.replace("29600", other_port).splitlines()
    ports = {"MASTER_PORT": master_port, "PET_MASTER_PORT": master_port}  # the second is torchrun's variable
    with serving.scratch() as folder:
        environment = dict(word.split("=", 1) for word in conftest.environment(port)) | ports | {"TMPDIR": str(folder)}
        log = folder / "log"
        with log.open("w") as out:
            processes = [subprocess.Popen(shlex.split(line), env=environment, stdout=out, stderr=out) for line in lines]
        try:
            deadline = time.monotonic() + 2 * serving.START
            while not conftest.is_healthy(port):
                assert all(process.poll() is None for process in processes), log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(serving.POLL)
            codes = []
            for line, process in zip(lines, processes, strict=True):
                if process is processes[0] or "--no-router" in line:
                    process.send_signal(signal.SIGTERM)
                codes.append(process.wait(2 * serving.STOP))
            # torchrun's own exit code tells which signal it received.
            assert "torchrun" in block.tags or not any(codes), log.read_text()
        finally:
            for process in processes:
                process.terminate()  # torchrun's own children would outlive it if it were killed
            for process in processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(serving.STOP)
                process.kill()
                process.wait()


@pytest.mark.parametrize("block", COMMAND_BLOCKS, ids=name)
def test_commands_of_the_page_succeed(block: deploy_page.Block, server: int, tmp_path: Path) -> None:
    skip_if_tools_are_missing(block)
    text = block.text.replace("127.0.0.1:3000", f"127.0.0.1:{server}")
    answer = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=deploy_page.ROOT,
        env={**os.environ, "PATH": deploy_page.path(), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout


def test_untagged_commands_need_a_container_engine_a_cluster_or_root() -> None:
    for block in deploy_page.blocks():
        assert block.tags[:1] in ((), ("serve",), ("run",), ("starts",))
        for line in block.text.splitlines() if not block.tags else ():
            assert ASSIGNMENTS.sub("", line).split()[0] in NOT_RUN, line
            assert not line.startswith("kubectl kustomize"), line


def test_every_deploy_file_named_on_the_page_exists() -> None:
    text = deploy_page.PAGE.read_text()
    paths = {word.strip("`,.:;()") for word in text.split() if word.strip("`(").startswith("deploy/")}
    assert len(paths) > 10
    assert [name for name in paths if not (deploy_page.ROOT / name).exists()] == []


def test_page_names_every_folder_of_deploy() -> None:
    """Nobody would find files that no page mentions, by their folder at least."""
    text = deploy_page.PAGE.read_text()
    folders = {
        path.relative_to(deploy_page.ROOT / "deploy").parts for path in (deploy_page.ROOT / "deploy").rglob("*") if path.is_dir()
    }
    leaves = {"/".join(parts[:3]) for parts in folders} - {"kubernetes/overlays", "monitoring/grafana"}
    assert [leaf for leaf in sorted(leaves) if leaf not in text and leaf.removeprefix("kubernetes/") not in text] == []
