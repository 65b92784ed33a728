"""What a generated text is made of: words for a reader, thoughts, calls of tools. Knows no model's way of writing them."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Some of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Some of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool begins. Its arguments follow."""

    index: int  # from 0, in the order of the text
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """Some of a call's arguments; all of one call together are a JSON object, unless the answer was cut off in it."""

    index: int
    text: str


Part = Text | Reasoning | Call | Arguments


class Reader(Protocol):
    """Reads one answer as it grows. The parts are the same, adjacent ones joined, however the text is cut into deltas."""

    def push(self, delta: str) -> list[Part]:
        """What is certain now. A marker never comes in parts, and never as text."""
        ...

    def end(self) -> list[Part]:
        """What was held back. Push no more."""
        ...
