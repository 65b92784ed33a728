"""From generated text to reasoning, calls of tools and the text that is left: one file per way of writing them."""

from .constraint import constraint, formatted
from .parts import Arguments, Call, Part, Reader, Reasoning, Text
from .readers import chosen, detect, markers, marks_of, reader

__all__ = [
    "Arguments",
    "Call",
    "Part",
    "Reader",
    "Reasoning",
    "Text",
    "chosen",
    "constraint",
    "detect",
    "formatted",
    "markers",
    "marks_of",
    "reader",
]
