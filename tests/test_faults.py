"""What docs/faults.md says is tried is tried, and every fault has a test or a word on why it has none."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "faults.md"
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def missing(page: str) -> list[str]:
    """Tests that it names and that are not there."""
    return [f"{file}::{name}" for file, name in NAMED.findall(page) if name not in functions(TESTS / file)]


def functions(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


def test_every_test_of_the_page_is_there() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert missing(page) == []
    assert len(NAMED.findall(page)) > 80
    assert page.count("::test_") == len(NAMED.findall(page)), "a test is written in another way"


def test_every_row_says_something() -> None:
    rows = [line.strip("|").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert len(rows) > 60
    for row in rows:
        assert all(cell.strip() for cell in row[:-1]), row


@pytest.mark.parametrize("name", ["test_faults.py::test_nothing", "nowhere.py::test_every_test_of_the_page_is_there"])
def test_a_test_that_is_not_there_is_found(name: str) -> None:
    assert missing(f"| x | y | `test_faults.py::test_every_row_says_something`, `{name}` |") == [name]
