"""The systemd units, Slurm scripts and certificate script: checked by their own tools if these are installed, and consistent
with the launcher's flags.
"""

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
from penstock.tests.deploy import deploy_page

UNIT = deploy_page.ROOT / "deploy" / "systemd" / "penstock.service"
NODES_UNIT = UNIT.with_name("nodes.conf")
SLURM = deploy_page.ROOT / "deploy" / "slurm"
SBATCH, NODES_SBATCH = SLURM / "penstock.sbatch", SLURM / "penstock-nodes.sbatch"
CERTIFICATES = deploy_page.ROOT / "deploy" / "tls" / "certificates.sh"
needs_openssl = pytest.mark.skipif(deploy_page.find("openssl") is None, reason="openssl is not installed: apt-get install openssl")


def unit_settings() -> dict[str, str]:
    """The settings of the unit; the last of each name counts."""
    return dict(line.split("=", 1) for line in UNIT.read_text().splitlines() if re.match(r"\w+=", line))


def parse_flags(arguments: list[str], environment: dict[str, str]) -> options.Options:
    parser = command_line.Parser()
    command_line.add(parser)
    return command_line.parse(parser, arguments, environment)


def test_systemd_analyze_accepts_the_units_and_finds_misspelled_settings(tmp_path: Path) -> None:
    if deploy_page.find("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    text, nodes_text = UNIT.read_text(), NODES_UNIT.read_text()
    misspelled = (
        (text.replace("KillMode=", "KilMode="), "KilMode"),
        (text + nodes_text.replace("LoadCredential=", "LoadCredental="), "Credental"),
    )
    for content, expected in ((text, ""), (text + nodes_text, ""), *misspelled):
        # systemd would report that the program is not installed here.
        (tmp_path / "penstock.service").write_text(re.sub("^ExecStart=.*", "ExecStart=/bin/true", content, flags=re.MULTILINE))
        command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "penstock.service")]
        messages = subprocess.run(command, capture_output=True, text=True, timeout=30).stderr
        own_messages = "".join(line for line in messages.splitlines() if "penstock.service" in line)
        assert (expected in own_messages) if expected else own_messages == ""


def test_unit_uses_existing_flags_and_allows_enough_time_to_drain() -> None:
    unit = unit_settings()
    program, command, *arguments = unit["ExecStart"].split()
    assert (Path(program).name, command) == ("penstock", "serve")
    environment = dict(word.split("=", 1) for word in unit["Environment"].split())
    parsed = parse_flags(arguments, environment)
    assert "GRACEFUL_TERMINATION_TIMEOUT" in environment
    assert float(unit["TimeoutStopSec"]) > parsed.graceful_termination_timeout + 2 * parts.GRACE
    assert unit["KillMode"] == "mixed"  # the launcher alone gets SIGTERM
    assert unit["RestartPreventExitStatus"] == "2"  # launcher/cli.py's exit code for invalid settings
    assert unit["SuccessExitStatus"] == "143"  # launcher/serve.py's for SIGTERM before anything has started
    assert environment["HF_HOME"] == f"/var/cache/{unit['CacheDirectory']}"


def test_nodes_unit_passes_its_loaded_credentials_as_tls_files() -> None:
    lines = [line.split("=", 1) for line in NODES_UNIT.read_text().splitlines() if re.match(r"\w+=", line)]
    loaded = {f"%d/{value.partition(':')[0]}" for name, value in lines if name == "LoadCredential"}
    [environment] = [dict(word.split("=", 1) for word in value.split()) for name, value in lines if name == "Environment"]
    assert set(environment) == {"TLS_CERT", "TLS_KEY", "TLS_CA"}
    assert set(environment.values()) == loaded


@pytest.mark.parametrize("script", [SBATCH, NODES_SBATCH, CERTIFICATES], ids=lambda script: script.name)
def test_shellcheck_accepts_the_shell_scripts(script: Path) -> None:
    linter = deploy_page.find("shellcheck")
    if linter is None:
        pytest.skip("shellcheck is not installed: pip install 'penstock[deploy]' brings it")
    answer = subprocess.run([linter, str(script)], capture_output=True, text=True, timeout=30)
    assert answer.stdout + answer.stderr == ""


def run_job(script: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script with Slurm's variables and a fake `srun`, which prints its arguments and writes its environment to a file."""
    srun = folder / "srun"
    srun.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$@"\nenv | grep -E "^(PORT|API_KEY|MODEL_ID|GRACEFUL|CORS|MASTER|TLS)" > "$OUT"\n'
        'if [ -n "${TLS_KEY:-}" ]; then stat -c %a "$TLS_KEY" "${TLS_KEY%/*}" > "$OUT.modes"; fi\n'
    )
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    slurm_environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "4711",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "16",
        "SLURM_SUBMIT_DIR": str(folder),
    }
    return subprocess.run(
        ["bash", str(script)],
        env={**slurm_environment, "OUT": str(folder / "environment"), **environment},
        capture_output=True,
        text=True,
        timeout=30,
    )


def step_environment(folder: Path) -> dict[str, str]:
    """The environment variables that the fake srun wrote."""
    return dict(line.split("=", 1) for line in (folder / "environment").read_text().splitlines())


def test_slurm_job_starts_a_server_with_valid_flags(tmp_path: Path) -> None:
    answer = run_job(SBATCH, tmp_path, API_KEY="secret", MODEL_ID="some/model")
    assert answer.returncode == 0, answer.stderr
    address, *words = answer.stdout.splitlines()
    parsed = parse_flags(words[words.index("serve") + 1 :], step_environment(tmp_path))
    assert (parsed.num_shard, parsed.model_id, parsed.port) == (4, "some/model", 24711)
    assert address.endswith(f":{parsed.port}")


@needs_openssl
def test_multi_node_slurm_job_creates_and_removes_its_certificates(tmp_path: Path) -> None:
    (tmp_path / "deploy").symlink_to(deploy_page.ROOT / "deploy")
    answer = run_job(NODES_SBATCH, tmp_path, API_KEY="secret", MODEL_ID="some/model")
    assert answer.returncode == 0, answer.stderr
    environment = step_environment(tmp_path)
    files = {name: Path(environment.pop(name)) for name in ("TLS_CERT", "TLS_KEY", "TLS_CA")}
    words = answer.stdout.splitlines()
    parsed = parse_flags(words[words.index("serve") + 1 :], environment)
    assert (parsed.num_shard, parsed.port, parsed.master_port) == (8, 24711, 44711)
    assert (tmp_path / "environment.modes").read_text().split() == ["600", "700"]
    assert {path.name for path in files.values()} == {"tls.crt", "tls.key", "ca.crt"}
    assert not any(path.parent.exists() for path in files.values())  # removed at the job's end


@needs_openssl
def test_certificates_of_one_authority_are_accepted_and_foreign_ones_and_names_refused(tmp_path: Path) -> None:
    """The script's certificates work for both sides of a connection, and are issued for the name that penstock verifies."""
    ours, foreign = tmp_path / "ours", tmp_path / "strange"
    for folder in (ours, foreign):
        subprocess.run(["sh", str(CERTIFICATES), str(folder)], check=True, timeout=30)
        assert sorted(path.name for path in folder.iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
    assert shake_hands(ours, ours, certificates.NAME) == ""
    assert "certificate verify failed" in shake_hands(ours, foreign, certificates.NAME)
    assert "Hostname mismatch" in shake_hands(ours, ours, "elsewhere")


@needs_openssl
def test_failure_of_openssl_is_told(tmp_path: Path) -> None:
    (tmp_path / "tls.key").mkdir()
    answer = subprocess.run(["sh", str(CERTIFICATES), str(tmp_path)], capture_output=True, text=True, timeout=30)
    assert answer.returncode == 1
    assert "Is a directory" in answer.stderr


def shake_hands(one: Path, other: Path, name: str) -> str:
    """The TLS error between a server with the certificates of `one` and a client with those of `other`; empty if there is none."""
    paths = [[str(folder / name) for name in ("tls.crt", "tls.key", "ca.crt")] for folder in (one, other)]
    server, client = Certificates(*paths[0]).server(), Certificates(*paths[1]).client()
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(to_client, to_server, server_hostname=name), server.wrap_bio(to_server, to_client, server_side=True)]
    for _ in range(4):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                return str(error)
    return ""


@pytest.mark.parametrize("script", [SBATCH, NODES_SBATCH], ids=lambda script: script.name)
def test_slurm_jobs_require_an_api_key_and_signal_early_enough_to_drain(script: Path, tmp_path: Path) -> None:
    answer = run_job(script, tmp_path, MODEL_ID="some/model")
    assert answer.returncode != 0
    assert "API_KEY" in answer.stderr
    [signal_seconds] = re.findall(r"--signal=TERM@(\d+)", script.read_text())
    [drain_seconds] = re.findall(r"GRACEFUL_TERMINATION_TIMEOUT=(\d+)", script.read_text())
    assert int(signal_seconds) >= int(drain_seconds) + 2 * parts.GRACE
