"""The unit of systemd and the script of Slurm: read by their own tools where these are there, and in accord with the launcher."""

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

from penstock.launcher import options, serve
from penstock.tests.deploy import walk

UNIT = walk.ROOT / "deploy" / "systemd" / "penstock.service"
SCRIPT = walk.ROOT / "deploy" / "slurm" / "penstock.sbatch"


def settings() -> dict[str, str]:
    """Of the unit; the last of each name."""
    return dict(line.split("=", 1) for line in UNIT.read_text().splitlines() if re.match(r"\w+=", line))


def check_flags(arguments: list[str], environment: dict[str, str]) -> options.Options:
    parser = options.Parser()
    options.add(parser)
    return options.parse(parser, arguments, environment)


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    if walk.find("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    text = UNIT.read_text()
    for content, expected in ((text, ""), (text.replace("KillMode=", "KilMode="), "KilMode")):
        # The program is not installed here, which systemd would complain about.
        (tmp_path / "penstock.service").write_text(re.sub("^ExecStart=.*", "ExecStart=/bin/true", content, flags=re.MULTILINE))
        command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "penstock.service")]
        said = subprocess.run(command, capture_output=True, text=True, timeout=30).stderr
        mine = "".join(line for line in said.splitlines() if "penstock.service" in line)
        assert (expected in mine) if expected else mine == ""


def test_the_unit_fits_the_launcher() -> None:
    unit = settings()
    program, command, *arguments = unit["ExecStart"].split()
    assert (Path(program).name, command) == ("penstock", "serve")
    environment = dict(word.split("=", 1) for word in unit["Environment"].split())
    asked = check_flags(arguments, environment)
    assert "GRACEFUL_TERMINATION_TIMEOUT" in environment
    assert float(unit["TimeoutStopSec"]) > asked.graceful_termination_timeout + 2 * serve.GRACE
    assert unit["KillMode"] == "mixed"  # the launcher alone gets SIGTERM
    assert unit["RestartPreventExitStatus"] == "2"  # as launcher/cli.py ends on a mistake
    assert environment["HF_HOME"] == f"/var/cache/{unit['CacheDirectory']}"


def test_the_shell_script_is_clean() -> None:
    linter = walk.find("shellcheck")
    if linter is None:
        pytest.skip("shellcheck is not installed: pip install 'penstock[deploy]' brings it")
    answer = subprocess.run([linter, str(SCRIPT)], capture_output=True, text=True, timeout=30)
    assert answer.stdout + answer.stderr == ""


def job(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the script as Slurm would, but for `srun`: that writes what it is told."""
    srun = folder / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nenv | grep -E "^(PORT|API_KEY|MODEL_ID|GRACEFUL|CORS)" > "$OUT"\n')
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    given = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "4711",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "16",
    }
    return subprocess.run(
        ["bash", str(SCRIPT)],
        env={**given, "OUT": str(folder / "environment"), **environment},
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_the_job_starts_a_server_with_flags_that_exist(tmp_path: Path) -> None:
    answer = job(tmp_path, API_KEY="secret", MODEL_ID="some/model")
    assert answer.returncode == 0, answer.stderr
    address, *words = answer.stdout.splitlines()
    environment = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines())
    asked = check_flags(words[words.index("serve") + 1 :], environment)
    assert (asked.num_shard, asked.model_id, asked.port) == (4, "some/model", 24711)
    assert address.endswith(f":{asked.port}")
    [signalled] = re.findall(r"--signal=TERM@(\d+)", SCRIPT.read_text())
    assert int(signalled) >= asked.graceful_termination_timeout + 2 * serve.GRACE


def test_the_job_wants_a_key(tmp_path: Path) -> None:
    answer = job(tmp_path, MODEL_ID="some/model")
    assert answer.returncode != 0
    assert "API_KEY" in answer.stderr
