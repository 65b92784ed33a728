"""Markdown pages: the files and headings that they link to exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = {path: path.read_text() for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("d*/**/*.md")])}
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([\w./-]*)(?:#([^\s)]*))?\)")


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w -]", "", words).replace(" ", "-")


def test_links_between_pages_point_to_existing_files_and_headings() -> None:
    anchors = {path: {anchor(heading) for heading in HEADING.findall(text)} for path, text in PAGES.items()}
    broken = []
    for path, text in PAGES.items():
        for name, heading_anchor in LINK.findall(text):
            target = (path.parent / name).resolve() if name else path
            if name != "URL" and (
                not target.exists() or (heading_anchor and target in anchors and heading_anchor not in anchors[target])
            ):
                broken.append(f"{path.name}: {name}#{heading_anchor}")
    assert broken == []
    assert len(PAGES) > 20
