"""The pages: what they link to is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = {path: path.read_text() for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("d*/**/*.md")])}
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([\w./-]*)(?:#([^\s)]*))?\)")


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
