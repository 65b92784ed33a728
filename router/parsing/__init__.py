"""Output parsers: split generated text into reasoning, tool calls and content, incrementally. One module for each form that models
use."""

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
