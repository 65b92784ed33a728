"""The parts into which output parsers split generated text: content, reasoning and tool calls. Knows no model's form of them."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """The beginning of a tool call. Its arguments follow."""

    index: int  # from 0, in the order of the text
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments; all of one call together are a JSON object, unless the answer was cut off in it."""

    index: int
    text: str


Part = Text | Reasoning | Call | Arguments


class Reader(Protocol):
    """An incremental parser of one answer. The parts are the same, adjacent ones joined, however the text is cut into deltas."""

    def push(self, delta: str) -> list[Part]:
        """Adds text, and returns the parts that are certain now. A marker is never split between parts, and never returned as
        text."""
        ...

    def end(self) -> list[Part]:
        """Ends the text, and returns what was held back. Nothing may be pushed afterwards."""
        ...
