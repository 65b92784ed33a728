"""Output parsers: split generated text into reasoning, tool calls and content, incrementally. One module for each form that models
use."""

from .constraint import constraint, format_grammar
from .parts import Arguments, Call, Part, Reader, Reasoning, Text
from .readers import chosen, detect, markers, reader, reasoning_markers

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
    "format_grammar",
    "markers",
    "reader",
    "reasoning_markers",
]
