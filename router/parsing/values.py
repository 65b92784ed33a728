"""Values in tool calls: JSON that is followed as it arrives, Python literals, and unquoted texts whose type comes from a schema."""

import ast
import json
import re
import warnings
from typing import Any, NoReturn

from .parameters import TYPES, Types
from .source import NOT_SPACE, Markers, Pieces, Source, Steps, after_space, before, space, up_to

PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})')
BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9A-Fa-f]{0,3})?")
ATOM = re.compile(r"[-+.\w]*")
NUMBER_OR_NAME = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
PYTHON_NAMES = {"True": True, "False": False, "None": None}
BEGINNINGS = {"n": "null", "[": "array", "{": "object"}
JSON_BEGINNINGS = '"[{'  # of values that may contain any text
PYTHON_BEGINNINGS = tuple("N[{")  # of what Python writes in another way than JSON
CLOSING = {"{": "}", "[": "]"}


def follow_json(source: Source) -> Pieces[bool]:
    """Emits one JSON value as it was written, piece by piece. Returns False where it is broken or the text ends in it.

    Only one fault is mended: a raw control character in a string, which models write for a line end, comes out escaped.
    """
    closing: list[str] = []  # brackets that are still to come
    wanted = "value"  # or a "key", ":", ","; or "first": a value or key, or the end of what has just begun
    while True:
        char = yield from _after_space(source)
        if closing and char == closing[-1] and wanted in ("first", ","):
            closing.pop()
            wanted = ","
            yield _read(source)
        elif char and char == wanted:
            wanted = "value" if char == ":" or closing[-1] == "]" else "key"
            yield _read(source)
            continue
        elif wanted == "key" or (wanted == "first" and closing[-1] == "}"):
            if char != '"' or not (yield from string(source)):
                return False
            wanted = ":"
            continue
        elif wanted in (":", ",") or not char:
            return False
        elif char in CLOSING:
            closing.append(CLOSING[char])
            wanted = "first"
            yield _read(source)
            continue
        elif not (yield from (string(source) if char == '"' else _atom(source))):
            return False
        if not closing:
            return True
        wanted = ","


def string(source: Source) -> Pieces[bool]:
    """Emits a JSON string, quotes included."""
    assert source.text[source.at] == '"'
    yield _read(source)
    while True:
        if match := PLAIN.match(source.text, source.at):
            source.at = match.end()
            yield match[0]
        if source.at == len(source.text):
            if source.ended:
                return False
            yield None
            continue
        char = source.text[source.at]
        if char == '"':
            yield _read(source)
            return True
        if char != "\\":
            source.at += 1
            yield json.dumps(char)[1:-1]
        elif match := ESCAPE.match(source.text, source.at):
            source.at = match.end()
            yield match[0]
        elif source.ended or not BEGUN_ESCAPE.fullmatch(source.text, source.at):
            return False
        else:
            yield None


def string_before(source: Source, ends: Markers) -> Pieces[bool]:
    """Emits the text before one of these ends, which is read as well, as a JSON string. Returns False if there is no end."""
    yield '"'
    end = yield from before(source, ends, lambda text: json.dumps(text, ensure_ascii=False)[1:-1], spaces="")
    if not end:
        return False
    source.at += len(end)
    yield '"'
    return True


def value_before(source: Source, end: str, types: Types) -> Steps[str | None]:
    """Reads a value of one of the `types` that was written without quotes, or as JSON, and the end behind it. Returns None, with
    nothing read, if there is no end. In JSON, of types that are written so, the end may be part of a string."""
    start = source.at
    if "string" not in types or types == TYPES:
        first = yield from space(source)
        found = (yield from whole(follow_json(source))) if first and first in JSON_BEGINNINGS else ""
        if found and (yield from after_space(source, end)):
            return found
        source.at = start
    return (yield from up_to(source, end))


def whole(pieces: Pieces[bool]) -> Steps[str]:
    """All pieces joined, when they are complete; "" if they are broken. Nothing is emitted before."""
    found: list[str] = []
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            return "".join(found) if end.value else ""
        if piece is None:
            yield None
        else:
            found.append(piece)


def _atom(source: Source) -> Pieces[bool]:
    """Reads a number, true, false or null. It is not searched again with each digit, since a model may write any number of them."""
    start = stop = source.at
    while match := ATOM.match(source.text, stop):
        stop = match.end()
        if stop < len(source.text) or source.ended:
            break
        yield None
    if not NUMBER_OR_NAME.fullmatch(source.text, start, stop):
        return False
    source.at = stop
    yield source.text[start:stop]
    return True


def _after_space(source: Source) -> Pieces[str]:
    """Emits whitespace. Returns the character that follows, "" at the end."""
    while True:
        match = NOT_SPACE.search(source.text, source.at)
        start, source.at = source.at, match.start() if match else len(source.text)
        if source.at > start:
            yield source.text[start : source.at]
        if match or source.ended:
            return match[0] if match else ""
        yield None


def _read(source: Source) -> str:
    source.at += 1
    return source.text[source.at - 1]


def dump(value: Any) -> str:
    """JSON as models write it; what UTF-8 cannot encode (half a surrogate pair) is escaped. Raises ValueError, TypeError."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if encodable(text) else json.dumps(value)


def encodable(text: str) -> bool:
    """Whether UTF-8 can encode the text; it cannot if JSON escapes spelled half a surrogate pair."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def literal(text: str) -> str | None:
    """A Python literal, or a JSON value, as JSON; None if it is neither. Models write line ends within strings as they are."""
    if _is_json(text):
        return text.strip()
    return _from_python(text.strip()) or _from_python(text.strip().replace("\r", r"\r").replace("\n", r"\n"))


def _from_python(text: str) -> str | None:
    try:
        with warnings.catch_warnings():  # "\d" is meant literally
            warnings.simplefilter("ignore")
            return dump(ast.literal_eval(text))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def typed(text: str, types: Types, python: bool = False) -> str:
    """A value that was written without quotes, as JSON of one of the `types`; a string if it is none of them.

    Where a string is one of several types, text that looks like a number or a boolean is a string, too, since it could not be
    written otherwise. Where the type is unknown, the value is what it looks like. `python`: null, lists and objects may be written
    as Python writes them.
    """
    found = literal(text) if python and text.lstrip()[:1] in PYTHON_BEGINNINGS else text.strip() if _is_json(text) else None
    if "string" in types and types != TYPES:
        return found if found is not None and BEGINNINGS.get(found[:1]) in types else dump(text)
    if text.strip() in PYTHON_NAMES:
        return dump(PYTHON_NAMES[text.strip()])
    return dump(text) if found is None else found


def _is_json(text: str) -> bool:
    """Whether it is JSON. Numbers of any size are; NaN, which Python reads, is not."""
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return False
    return True


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")
