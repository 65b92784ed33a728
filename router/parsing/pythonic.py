"""Tool calls in Python syntax: `[f(a=1, b="x"), g()]`. Llama 3.2 and 4, LFM 2, OLMo. An argument is emitted when it is complete."""

import re
from dataclasses import dataclass

from .calls import MAX_NAME, Calls
from .source import Source, Steps, after_space, ahead, expect, space
from .values import dump, literal

NAME = re.compile(r"[A-Za-z_][\w.]*")
CHARACTER = r"""[^\s()\[\]{}=,*"']"""
KEY = re.compile(rf"{CHARACTER}{{1,{MAX_NAME}}}")  # need not be Python's: names of the request's tools are read
WORD = re.compile(rf"{CHARACTER}{{0,{MAX_NAME + 1}}}")
BRACKETS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class PythonicForm:
    """A list of calls between these markers or, without markers, in brackets at the beginning of an answer; or one call on each
    line."""

    open: str
    close: str  # may be missing
    listed: bool = True

    @property
    def opens(self) -> tuple[str, ...]:
        return (self.open,)

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.open, self.close)

    @property
    def bare(self) -> bool:
        return self.listed

    def read(self, source: Source, calls: Calls, marker: str) -> Steps[bool]:
        found = yield from self._all(source, calls, strict=not marker)
        if found and marker:
            yield from after_space(source, self.close)
        return found

    def _all(self, source: Source, calls: Calls, strict: bool) -> Steps[bool]:
        yield from space(source)
        if self.listed and not (yield from expect(source, "[")):
            return False
        found = False
        while True:
            start = source.at
            if found and not (yield from after_space(source, ",")) and self.listed:
                break
            yield from space(source)
            if not (yield from _call(source, calls, strict)):
                source.at = start
                break
            found = True
        if found and self.listed:
            yield from after_space(source, "]")
        return found


def _call(source: Source, calls: Calls, strict: bool) -> Steps[bool]:
    """Reads a call. It is emitted with its first argument, so that "[f(x)]" stays text. Returns False if nothing was emitted."""
    name = yield from _word(source)
    known = calls.given(name) or (NAME.fullmatch(name) and (calls.known(name) or not strict))
    if not known or not (yield from expect(source, "(")):
        return False
    begun = False
    while True:
        start = source.at
        if (yield from after_space(source, ")")):
            break
        yield from space(source)
        argument = yield from _argument(source, calls, name)
        if argument is None:
            source.at = start
            return begun
        if argument and not begun:
            yield calls.begin(name)
        if argument:
            yield calls.arguments(f"{', ' if begun else '{'}{argument}")
            begun = True
        yield from after_space(source, ",")
    if not begun:
        yield calls.begin(name)
    yield calls.arguments("}" if begun else "{}")
    return True


def _argument(source: Source, calls: Calls, name: str) -> Steps[str | None]:
    """Reads `a=1`, or several arguments as `**{"a": 1}`. Returns them as members of a JSON object; None if it is neither."""
    if (yield from expect(source, "**")):
        value = literal((yield from _expression(source)))
        return value[1:-1].strip() if value is not None and value.startswith("{") else None
    key = yield from _word(source)
    if not (key.isidentifier() or calls.parameters(name).declares(key)) or not (yield from after_space(source, "=")):
        return None
    value = literal((yield from _expression(source)))
    return None if value is None else f"{dump(key)}: {value}"


def _word(source: Source) -> Steps[str]:
    """Reads a word, which may be empty."""
    word = yield from ahead(source, WORD)
    source.at += len(word)
    return word


def _expression(source: Source) -> Steps[str]:
    """Reads up to the comma or bracket that ends an expression; "" if the text ends first. Quotes and brackets within belong to
    it."""
    start = source.at
    closing: list[str] = []
    quote = ""
    escaped = False
    while True:
        if source.at == len(source.text):
            if source.ended:
                return ""
            yield None
            continue
        char = source.text[source.at]
        if escaped:
            escaped = False
        elif quote:
            escaped = char == "\\"
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in BRACKETS:
            closing.append(BRACKETS[char])
        elif closing and char == closing[-1]:
            closing.pop()
        elif not closing and char in ",)":
            return source.text[start : source.at]
        elif char in ")]}":
            return ""
        source.at += 1
