"""The unit of systemd and the script of Slurm: read by their own tools where these are there, and in accord with the launcher."""

import os
import re
import ssl
import stat
import subprocess
from pathlib import Path

import pytest

from penstock.launcher import command_line, options, parts
from penstock.proto import certificates
from penstock.proto.certificates import Certificates
from penstock.tests.deploy import walk

UNIT = walk.ROOT / "deploy" / "systemd" / "penstock.service"
OF_NODES = UNIT.with_name("nodes.conf")
SLURM = walk.ROOT / "deploy" / "slurm"
SCRIPT, SCRIPT_OF_NODES = SLURM / "penstock.sbatch", SLURM / "penstock-nodes.sbatch"
CERTIFICATES = walk.ROOT / "deploy" / "tls" / "certificates.sh"
needs_openssl = pytest.mark.skipif(walk.find("openssl") is None, reason="openssl is not installed: apt-get install openssl")


def settings() -> dict[str, str]:
    """Of the unit; the last of each name."""
    return dict(line.split("=", 1) for line in UNIT.read_text().splitlines() if re.match(r"\w+=", line))


def check_flags(arguments: list[str], environment: dict[str, str]) -> options.Options:
    parser = command_line.Parser()
    command_line.add(parser)
    return command_line.parse(parser, arguments, environment)


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    if walk.find("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    text, more = UNIT.read_text(), OF_NODES.read_text()
    wrong = (
        (text.replace("KillMode=", "KilMode="), "KilMode"),
        (text + more.replace("LoadCredential=", "LoadCredental="), "Credental"),
    )
    for content, expected in ((text, ""), (text + more, ""), *wrong):
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
    assert float(unit["TimeoutStopSec"]) > asked.graceful_termination_timeout + 2 * parts.GRACE
    assert unit["KillMode"] == "mixed"  # the launcher alone gets SIGTERM
    assert unit["RestartPreventExitStatus"] == "2"  # as launcher/cli.py ends on a mistake
    assert environment["HF_HOME"] == f"/var/cache/{unit['CacheDirectory']}"


def test_the_unit_of_a_node_names_its_certificates() -> None:
    lines = [line.split("=", 1) for line in OF_NODES.read_text().splitlines() if re.match(r"\w+=", line)]
    loaded = {f"%d/{value.partition(':')[0]}" for name, value in lines if name == "LoadCredential"}
    [environment] = [dict(word.split("=", 1) for word in value.split()) for name, value in lines if name == "Environment"]
    assert set(environment) == {"TLS_CERT", "TLS_KEY", "TLS_CA"}
    assert set(environment.values()) == loaded


@pytest.mark.parametrize("script", [SCRIPT, SCRIPT_OF_NODES, CERTIFICATES], ids=lambda script: script.name)
def test_the_shell_scripts_are_clean(script: Path) -> None:
    linter = walk.find("shellcheck")
    if linter is None:
        pytest.skip("shellcheck is not installed: pip install 'penstock[deploy]' brings it")
    answer = subprocess.run([linter, str(script)], capture_output=True, text=True, timeout=30)
    assert answer.stdout + answer.stderr == ""


def job(script: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs it as Slurm would, but for `srun`: that writes what it is told."""
    srun = folder / "srun"
    srun.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$@"\nenv | grep -E "^(PORT|API_KEY|MODEL_ID|GRACEFUL|CORS|MASTER|TLS)" > "$OUT"\n'
        'if [ -n "${TLS_KEY:-}" ]; then stat -c %a "$TLS_KEY" "${TLS_KEY%/*}" > "$OUT.modes"; fi\n'
    )
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    given = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "4711",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "16",
        "SLURM_SUBMIT_DIR": str(folder),
    }
    return subprocess.run(
        ["bash", str(script)],
        env={**given, "OUT": str(folder / "environment"), **environment},
        capture_output=True,
        text=True,
        timeout=30,
    )


def told(folder: Path) -> dict[str, str]:
    """What of its environment the step got."""
    return dict(line.split("=", 1) for line in (folder / "environment").read_text().splitlines())


def test_the_job_starts_a_server_with_flags_that_exist(tmp_path: Path) -> None:
    answer = job(SCRIPT, tmp_path, API_KEY="secret", MODEL_ID="some/model")
    assert answer.returncode == 0, answer.stderr
    address, *words = answer.stdout.splitlines()
    asked = check_flags(words[words.index("serve") + 1 :], told(tmp_path))
    assert (asked.num_shard, asked.model_id, asked.port) == (4, "some/model", 24711)
    assert address.endswith(f":{asked.port}")


@needs_openssl
def test_the_job_of_several_nodes_brings_its_own_certificates(tmp_path: Path) -> None:
    (tmp_path / "deploy").symlink_to(walk.ROOT / "deploy")
    answer = job(SCRIPT_OF_NODES, tmp_path, API_KEY="secret", MODEL_ID="some/model")
    assert answer.returncode == 0, answer.stderr
    environment = told(tmp_path)
    files = {name: Path(environment.pop(name)) for name in ("TLS_CERT", "TLS_KEY", "TLS_CA")}
    words = answer.stdout.splitlines()
    asked = check_flags(words[words.index("serve") + 1 :], environment)
    assert (asked.num_shard, asked.port, asked.master_port) == (8, 24711, 44711)
    assert (tmp_path / "environment.modes").read_text().split() == ["600", "700"]
    assert {path.name for path in files.values()} == {"tls.crt", "tls.key", "ca.crt"}
    assert not any(path.parent.exists() for path in files.values())  # gone with the job


@needs_openssl
def test_the_certificates_are_good_for_both_sides(tmp_path: Path) -> None:
    """Whoever has one of the same authority is let in, a stranger is not, and the name is the one that penstock asks for."""
    ours, strange = tmp_path / "ours", tmp_path / "strange"
    for folder in (ours, strange):
        subprocess.run(["sh", str(CERTIFICATES), str(folder)], check=True, timeout=30)
        assert sorted(path.name for path in folder.iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
    assert shake_hands(ours, ours, certificates.NAME) == ""
    assert "certificate verify failed" in shake_hands(ours, strange, certificates.NAME)
    assert "Hostname mismatch" in shake_hands(ours, ours, "elsewhere")


def shake_hands(one: Path, other: Path, name: str) -> str:
    """A server with the certificates of `one`, a client with those of `other`: what goes wrong."""
    paths = [[str(folder / name) for name in ("tls.crt", "tls.key", "ca.crt")] for folder in (one, other)]
    server, client = Certificates(*paths[0]).server(), Certificates(*paths[1]).client()
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(back, there, server_hostname=name), server.wrap_bio(there, back, server_side=True)]
    for _ in range(4):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                return str(error)
    return ""


@pytest.mark.parametrize("script", [SCRIPT, SCRIPT_OF_NODES], ids=lambda script: script.name)
def test_the_job_wants_a_key_and_has_time_to_drain(script: Path, tmp_path: Path) -> None:
    answer = job(script, tmp_path, MODEL_ID="some/model")
    assert answer.returncode != 0
    assert "API_KEY" in answer.stderr
    [signalled] = re.findall(r"--signal=TERM@(\d+)", script.read_text())
    [drains] = re.findall(r"GRACEFUL_TERMINATION_TIMEOUT=(\d+)", script.read_text())
    assert int(signalled) >= int(drains) + 2 * parts.GRACE
