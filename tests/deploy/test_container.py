"""The container and Compose files, without a container engine: linted, consistent with the project, and their health check and
sandbox tried with a running server.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.launcher import options, tgi
from penstock.launcher.machine import free_port
from penstock.router.config import RouterConfig
from penstock.tests.deploy import deploy_page
from penstock.tests.deploy.conftest import RunningServer

DEPLOY = deploy_page.ROOT / "deploy"
DOCKERFILE = DEPLOY / "container" / "Dockerfile"
HEALTH = DEPLOY / "container" / "health.py"
PROJECT = tomllib.loads((deploy_page.ROOT / "pyproject.toml").read_text())
HOW_TO_INSTALL = "pip install 'penstock[deploy]' brings it"


def instructions(name: str) -> list[str]:
    """The arguments of each instruction `name` in the Dockerfile, with continued lines joined."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    return [line.partition(" ")[2].strip() for line in text.splitlines() if line.split(" ")[0] == name]


def environment() -> dict[str, str]:
    return dict(word.split("=", 1) for line in instructions("ENV") for word in line.split())


def copied_sources() -> set[str]:
    """What the Dockerfile copies from the source tree."""
    copies = [line.split() for line in instructions("COPY") if not line.startswith("--from")]
    return {source for words in copies for source in words[:-1]}


def test_hadolint_accepts_the_dockerfile() -> None:
    linter = deploy_page.find("hadolint")
    if linter is None:
        pytest.skip(f"hadolint is not installed: {HOW_TO_INSTALL}")
    answer = subprocess.run([linter, str(DOCKERFILE)], capture_output=True, text=True, timeout=30)
    assert answer.stdout + answer.stderr == ""


def test_image_contains_every_package() -> None:
    packages = {name.split(".")[1] for name in PROJECT["tool"]["setuptools"]["packages"] if "." in name}
    files = {"pyproject.toml", "README.md", "LICENSE", "__init__.py", str(HEALTH.relative_to(deploy_page.ROOT))}
    assert copied_sources() == packages | files
    allowed = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in allowed if line.startswith("!")} == copied_sources()


def test_torch_version_is_that_of_the_makefile() -> None:
    [torch] = [line for line in instructions("ARG") if line.startswith("TORCH=")]
    assert f"TORCH := {torch.removeprefix('TORCH=')}" in (deploy_page.ROOT / "Makefile").read_text().splitlines()
    assert torch.removeprefix("TORCH=") in compose("compose.yaml")["services"]["penstock"]["build"]["args"]["TORCH"]


def test_image_does_not_run_as_root() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE.read_text(), flags=re.MULTILINE)
    users = [re.findall(r"^USER (\d+):\d+$", stage, flags=re.MULTILINE) for stage in stages]
    assert [each[-1] for each in users if each] == ["10001", "10001"]  # stage runtime, the base of cpu, and stage cuda


def test_entrypoint_port_and_health_check_exist_in_the_project() -> None:
    [entry] = instructions("ENTRYPOINT")
    assert json.loads(entry)[0] in PROJECT["project"]["scripts"]
    [port] = instructions("EXPOSE")
    assert port == str(RouterConfig(folder="", model="").port)
    copied = [line.split() for line in instructions("COPY")]
    [health_script] = [words[-1] for words in copied if words[0].endswith("health.py")]
    [check] = instructions("HEALTHCHECK")
    assert json.loads(check.partition("CMD ")[2]) == ["python", "-I", health_script]


def test_image_sets_no_variable_that_would_override_a_cloud_providers() -> None:
    assert not environment().keys() & set(tgi.ALIASES.values())


def test_image_has_no_secret_variables() -> None:
    names = [line.partition("=")[0] for line in instructions("ARG")] + list(environment())
    assert not [name for name in names if re.search("KEY|TOKEN|SECRET|PASSWORD", name)]


def test_health_check_exits_0_with_a_server_and_1_without(server: int) -> None:
    here, nowhere = str(server), str(free_port())
    for named, code in (({"PORT": here}, 0), ({"PORT": nowhere}, 1), ({"PORT": "", "AIP_HTTP_PORT": here}, 0)):
        variables = {**os.environ, **named}
        answer = subprocess.run([sys.executable, "-I", str(HEALTH)], env=variables, capture_output=True, text=True, timeout=30)
        assert answer.returncode == code, answer.stderr


def compose(name: str) -> Any:
    return yaml.safe_load((DEPLOY / "compose" / name).read_text())


def test_compose_files_match_the_compose_schema() -> None:
    checker = deploy_page.find("check-jsonschema")
    if checker is None:
        pytest.skip(f"check-jsonschema is not installed: {HOW_TO_INSTALL}")
    files = [str(path) for path in sorted((DEPLOY / "compose").glob("*.yaml"))]
    command = [checker, "--builtin-schema", "vendor.compose-spec", *files]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_compose_mounts_build_context_and_targets_exist() -> None:
    services = compose("compose.yaml")["services"]
    mounts = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    assert [mount for mount in mounts if mount.startswith(".") and not (DEPLOY / "compose" / mount).is_file()] == []
    build = services["penstock"]["build"]
    context = (DEPLOY / "compose" / build["context"]).resolve()
    assert context == deploy_page.ROOT
    assert context / build["dockerfile"] == DOCKERFILE
    targets = {line.partition(" AS ")[2] for line in instructions("FROM")}
    for name in ("compose.yaml", "gpu.yaml"):
        service = compose(name)["services"]["penstock"]
        assert service["build"]["target"] in targets
        assert service["image"] == f"penstock:{service['build']['target']}"


def test_compose_variables_are_flags_and_stop_grace_exceeds_the_drain_timeout() -> None:
    service = compose("compose.yaml")["services"]["penstock"]
    flags = {spelling.upper() for field in options.FIELDS.values() for spelling in (field.name, field.metadata["also"]) if spelling}
    assert set(service["environment"]) - {"HF_TOKEN"} <= flags
    grace = float(service["stop_grace_period"].removesuffix("s"))
    assert grace >= float(service["environment"]["GRACEFUL_TERMINATION_TIMEOUT"]) + 10
    assert service["read_only"]
    assert all(port.startswith("127.0.0.1:") for each in compose("compose.yaml")["services"].values() for port in each["ports"])


def test_server_runs_as_pid_1_without_capabilities_on_a_read_only_root(running: RunningServer) -> None:
    """That the other tests pass in the sandbox shows that it works; this one checks that the sandbox was applied."""
    if not running.sandboxed:
        pytest.skip("this machine can't make namespaces (unshare --user), in which the server would be shut in")
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{running.pid}/status").read_text().splitlines() if ":\t" in line)
    assert status["NSpid"].split()[-1] == "1"
    assert int(status["CapEff"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    mounts = [line.split() for line in Path(f"/proc/{running.pid}/mountinfo").read_text().splitlines()]
    [options_of_root] = [fields[5] for fields in mounts if fields[4] == "/"]
    assert "ro" in options_of_root.split(",")
