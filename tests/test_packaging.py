"""Packaging: the wheel and the sdist contain what is in the tree, and pyproject.toml lists every package and dependency."""

import email
import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOT_INSTALLED = {"tests", "benchmarks", "build", "dist", "docs", "deploy", "shared"}


def folders_with_modules() -> set[str]:
    """The packages in the tree, found by the folders that have Python files."""
    found = {"penstock"}
    for path in ROOT.rglob("*.py"):
        parts = path.parent.relative_to(ROOT).parts
        if parts and not parts[0].startswith(".") and parts[0] not in NOT_INSTALLED:
            found.add(".".join(["penstock", *parts]))
    return found


def test_package_list_names_every_folder_with_modules() -> None:
    """A missing entry works in an editable install, but its package is missing in the wheel."""
    assert set(PROJECT["tool"]["setuptools"]["packages"]) - {"penstock.kernels"} == folders_with_modules() - {"penstock.kernels"}
    assert "penstock.kernels" in PROJECT["tool"]["setuptools"]["packages"]


def test_proto_and_kernels_are_namespace_packages() -> None:
    """If penstock is run from the root, regular packages of these names would shadow Hugging Face's `kernels` and Google's
    `proto-plus`."""
    assert not (ROOT / "proto" / "__init__.py").exists()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_every_other_package_has_an_init_file() -> None:
    for name in set(PROJECT["tool"]["setuptools"]["packages"]) - {"penstock.proto", "penstock.kernels"}:
        assert ROOT.joinpath(*name.split(".")[1:], "__init__.py").is_file(), name


def test_dependencies_page_has_one_line_for_each_dependency() -> None:
    """docs/dependencies.md also has no line for packages that are no dependency."""
    lines = (ROOT / "docs" / "dependencies.md").read_text().splitlines()
    documented = {line.split("`")[1] for line in lines if line.startswith("| `")}
    extras = [item for extra in PROJECT["project"]["optional-dependencies"].values() for item in extra]
    declared = {item.partition(";")[0] for item in [*PROJECT["project"]["dependencies"], *extras]}
    assert documented == {item.partition(">")[0].strip() for item in declared}


def test_penstock_command_is_an_entry_point() -> None:
    [entry] = importlib.metadata.entry_points(group="console_scripts", name="penstock")
    assert entry.value == "penstock.launcher.__main__:main"


def test_make_install_repairs_a_broken_virtual_environment(tmp_path: Path) -> None:
    """Where Python has no ensurepip, `python3 -m venv` fails and leaves a folder without pip behind."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    broken, python = tmp_path / ".venv/bin/python", tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    repair = "printf '#!/bin/sh\\ntest $2 != compileall\\n' > .venv/bin/python"
    python.write_text(f'#!/bin/sh\necho made "$@"\nif [ $1 = -m ]; then {repair}; fi\n')
    for path in (broken, python):
        path.chmod(0o755)
    first, second = (
        subprocess.run(["make", "-B", "install", "PYTHON=./python"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        for _ in range(2)
    )
    assert "made -m venv --clear .venv" in first.stdout, first.stderr
    assert (tmp_path / ".venv/installed").exists()
    assert "Error" not in first.stderr  # packages may contain files that can't be compiled
    assert "made -m venv" not in second.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the sdist, built from a copy of the tree without a network: setuptools is called as pip
    calls it."""
    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path_factory.mktemp("source")
    for path in ROOT.iterdir():
        if path.name.startswith(".") or path.name in ("build", "dist") or path.name.endswith(".egg-info"):
            continue
        if path.is_dir():
            shutil.copytree(path, copy / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, copy)
    out = tmp_path_factory.mktemp("dist")
    for kind in ("wheel", "sdist"):
        code = f"import setuptools.build_meta as build; build.build_{kind}({str(out)!r})"
        answer = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, timeout=60)
        assert answer.returncode == 0, answer.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Iterator[zipfile.ZipFile]:
    [path] = built.glob("*.whl")
    with zipfile.ZipFile(path) as file:
        yield file


def test_wheel_contains_every_file_of_the_packages_and_no_tests(wheel: zipfile.ZipFile) -> None:
    inside = set(wheel.namelist())
    expected = {
        path
        for folder in ("proto", "kernels", "shard", "router", "launcher", "demo", "simulator", "bench")
        for path in (found.relative_to(ROOT) for found in (ROOT / folder).rglob("*") if found.is_file())
        if path.suffix != ".md" and not any(part.startswith((".", "__pycache__")) for part in path.parts)
    }
    missing = {str(path) for path in expected if f"penstock/{path}" not in inside}
    assert missing == set()
    assert {name.split("/")[0].partition("-")[0] for name in inside} == {"penstock"}  # no other top-level package
    assert not any(name.startswith("penstock/tests/") for name in inside)


def test_wheel_metadata_has_the_license(wheel: zipfile.ZipFile) -> None:
    [metadata] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    values = email.message_from_bytes(wheel.read(metadata))
    assert values["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_sdist_contains_what_building_and_testing_needs(built: Path) -> None:
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as file:
        inside = {name.partition("/")[2] for name in file.getnames()}
    assert {"pyproject.toml", "Makefile", "README.md", "LICENSE", "proto/shard.proto", "tests/test_packaging.py"} <= inside
    assert "docs/dependencies.md" in inside
