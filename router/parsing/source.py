"""The base of incremental parsers: text that is still arriving, and generators that parse it. Knows no format.

A parser is a generator over a `Source`: it yields the parts that are certain, and None where it needs more text. So it is written
as if the whole text were there, and can stop at any character. It must depend on the text alone, never on where it is cut: whoever
looks at the next character waits for it.
"""

import re
import sys
from collections.abc import Callable, Generator
from typing import TypeVar

from .parts import Arguments, Part, Reasoning, Text

SPACES = " \t\r\n"
NOT_SPACE = re.compile(r"[^ \t\r\n]")

Result = TypeVar("Result")
Emitted = TypeVar("Emitted")
Steps = Generator[Part | None, None, Result]
Pieces = Generator[str | None, None, Result]
Waits = Generator[None, None, Result]  # yields nothing but None, and returns a result


class Source:
    """The text that has arrived, and how far it has been parsed."""

    __slots__ = ("at", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False  # nothing more will arrive

    def forget(self) -> None:
        """Drops the text that has been parsed, which is never parsed again: all positions change."""
        if self.at:
            self.text = self.text[self.at :]
            self.at = 0


class Markers:
    """Strings to be searched for together. None is a prefix of another."""

    def __init__(self, *markers: str) -> None:
        assert markers
        assert not any(one != other and one.startswith(other) for one in markers for other in markers)
        self._markers = markers
        self._pattern = re.compile("|".join(map(re.escape, markers)))

    def find(self, text: str, start: int) -> tuple[int, int] | None:
        """Start and end of the first of them."""
        match = self._pattern.search(text, start)
        return match and match.span()

    def begun(self, text: str, start: int) -> int:
        """Where a suffix of the text begins that may become one of them; the text's length if there is none."""
        first = len(text)
        for marker in self._markers:
            at = text.find(marker[0], max(start, len(text) - len(marker) + 1), first)
            while at >= 0 and not marker.startswith(text[at:]):
                at = text.find(marker[0], at + 1, first)
            first = at if at >= 0 else first
        return first


class IncrementalReader:
    """A Reader that runs one such generator."""

    def __init__(self, steps: Callable[[Source], Steps[None]]) -> None:
        self._source = Source()
        self._steps = steps(self._source)

    def push(self, delta: str) -> list[Part]:
        self._source.text += delta
        return self._parts()

    def end(self) -> list[Part]:
        self._source.ended = True
        return self._parts()

    def _parts(self) -> list[Part]:
        parts: list[Part] = []
        for part in self._steps:
            if part is None:
                break
            joined = _joined(parts[-1], part) if parts else None
            if joined is None:
                parts.append(part)
            else:
                parts[-1] = joined
        return parts


def _joined(last: Part, part: Part) -> Part | None:
    match last, part:
        case (Text(), Text()):
            return Text(last.text + part.text)
        case (Reasoning(), Reasoning()):
            return Reasoning(last.text + part.text)
        case (Arguments(), Arguments()) if last.index == part.index:
            return Arguments(last.index, last.text + part.text)
    return None


def before(
    source: Source, markers: Markers, make: Callable[[str], Emitted], spaces: str = SPACES
) -> Generator[Emitted | None, None, str]:
    """Emits the text before the first marker, and stops there. Returns the marker, "" if the text ends without one.

    `spaces` before the marker belong to it, and are not read either. Only for where nothing will be read again.
    """
    held = 0  # spaces that are not read: they are not searched again, since a model may write any number of them
    while True:
        fresh = source.at + held
        found = markers.find(source.text, fresh)
        start = found[0] if found else len(source.text) if source.ended else markers.begun(source.text, fresh)
        kept = source.text[fresh:start].rstrip(spaces)
        stop = fresh + len(kept) if kept else source.at
        if found is None and source.ended:
            stop = start  # there is no marker that they could belong to
        if stop > source.at:
            yield make(source.text[source.at : stop])
        marker = source.text[found[0] : found[1]] if found else ""
        source.at, held = stop, start - stop
        source.forget()
        if found or source.ended:
            return marker
        yield None


def space(source: Source) -> Waits[str]:
    """Skips whitespace. Returns the character that follows, "" at the end."""
    while True:
        match = NOT_SPACE.search(source.text, source.at)
        if match:
            source.at = match.start()
            return match[0]
        source.at = len(source.text)
        if source.ended:
            return ""
        yield None


def expect(source: Source, literal: str) -> Waits[bool]:
    """Reads the literal if it comes next, otherwise nothing."""
    while not source.text.startswith(literal, source.at):
        rest = source.text[source.at : source.at + len(literal)]
        if source.ended or not literal.startswith(rest):
            return False
        yield None
    source.at += len(literal)
    return True


def after_space(source: Source, literal: str) -> Waits[bool]:
    """Reads whitespace and the literal if they come next, otherwise nothing."""
    start = source.at
    yield from space(source)
    if (yield from expect(source, literal)):
        return True
    source.at = start
    return False


def ahead(source: Source, pattern: re.Pattern[str]) -> Waits[str]:
    """The text that comes next and that the pattern, which also matches nothing, describes. It is not read. Its end is seen only at
    the next character."""
    while True:
        match = pattern.match(source.text, source.at)
        assert match
        if match.end() < len(source.text) or source.ended:
            return match[0]
        yield None


def up_to(source: Source, literal: str, limit: int = sys.maxsize // 2) -> Waits[str | None]:
    """Reads the text up to and including the literal. Returns None, with nothing read, if it is not within `limit` characters."""
    searched = 0  # characters that are not searched again, since a model may write any number of them
    while True:
        stop = source.text.find(literal, source.at + searched, source.at + limit + len(literal))
        if stop >= 0:
            text = source.text[source.at : stop]
            source.at = stop + len(literal)
            return text
        if source.ended or len(source.text) >= source.at + limit + len(literal):
            return None
        searched = max(0, len(source.text) - source.at - len(literal) + 1)
        yield None
