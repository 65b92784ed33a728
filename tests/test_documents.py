"""The pages: what they link to is there, and so are the tests that they name."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = {path: path.read_text() for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("d*/**/*.md")])}
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([\w./-]*)(?:#([^\s)]*))?\)")
TEST = re.compile(r"`(?:tests/)?([\w/]+\.py)::(\w+)")


def anchor(heading: str) -> str:
    """What GitHub calls a heading in links."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w -]", "", words).replace(" ", "-")


def test_links_lead_somewhere() -> None:
    anchors = {path: {anchor(heading) for heading in HEADING.findall(text)} for path, text in PAGES.items()}
    dead = []
    for path, text in PAGES.items():
        for name, place in LINK.findall(text):
            target = (path.parent / name).resolve() if name else path
            if name != "URL" and (not target.exists() or (place and target in anchors and place not in anchors[target])):
                dead.append(f"{path.name}: {name}#{place}")
    assert dead == []
    assert len(PAGES) > 20


def test_tests_that_are_named_are_there() -> None:
    found = {(file, name) for text in PAGES.values() for file, name in TEST.findall(text)}
    assert found
    gone = [f"{file}::{name}" for file, name in found if f"def {name}(" not in (ROOT / "tests" / file).read_text()]
    assert gone == []
