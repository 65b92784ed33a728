"""docs/faults.md: each test that it names exists, and each fault has a test or the reason why it has none."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "faults.md"
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def missing_tests(page: str) -> list[str]:
    """Tests that the page names and that don't exist."""
    return [f"{file}::{name}" for file, name in NAMED.findall(page) if name not in functions(TESTS / file)]


def functions(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


def test_each_test_that_the_page_names_exists() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert missing_tests(page) == []
    assert len(NAMED.findall(page)) > 80
    assert page.count("::test_") == len(NAMED.findall(page)), "a test is not written as `file.py::name`"


def test_no_row_of_the_page_has_an_empty_cell() -> None:
    rows = [line.strip("|").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert len(rows) > 60
    for row in rows:
        assert all(cell.strip() for cell in row[:-1]), row


@pytest.mark.parametrize("name", ["test_faults_page.py::test_nothing", "nowhere.py::test_each_test_that_the_page_names_exists"])
def test_missing_test_is_reported(name: str) -> None:
    assert missing_tests(f"| x | y | `test_faults_page.py::test_no_row_of_the_page_has_an_empty_cell`, `{name}` |") == [name]
