"""Finds the names in PromQL expressions, and the names that a server exports, by regular expressions: not a parser."""

import re
from collections.abc import Iterator

WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}
GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
NAME = re.compile(r"(?<![\w.$])[a-zA-Z_:][\w:]*(?![\w:])(?!\s*\()")
TYPE = re.compile(r"^# TYPE (\S+) (\w+)$", re.MULTILINE)


def names(expression: str) -> set[str]:
    """The names of the metrics in an expression."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", GROUPING.sub("", expression))
    return set(NAME.findall(bare)) - WORDS


def matchers(expression: str) -> Iterator[tuple[str, str, str]]:
    """Each label matcher in an expression: metric, label, value."""
    for metric, conditions in SELECTOR.findall(expression):
        for label, value in MATCHER.findall(conditions):
            yield metric, label, value


def grouped(expression: str) -> set[str]:
    """Labels by which an expression groups or joins."""
    return {label.strip() for labels in GROUPING.findall(expression) for label in labels.split(",") if label.strip()}


def exported(text: str) -> set[str]:
    """Every name that can have samples, from the TYPE lines of /metrics, which are there before the first sample."""
    found: set[str] = set()
    for name, kind in TYPE.findall(text):
        found |= {name + suffix for suffix in ("_bucket", "_sum", "_count")} if kind == "histogram" else {name}
    return found
