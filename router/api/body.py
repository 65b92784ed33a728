"""JSON in and out: decodes a request's body into the route's type, within its limits; writes an answer as a response."""

import json
import re
from collections import Counter
from collections.abc import Collection
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from ..request import Refused
from .errors import HttpError, Problem

BODY = web.RequestKey("body", bytes)  # the bytes of a request's body, once read: see `app`
LIMIT = web.AppKey("limit", int)  # the most bytes of a body
NAMES = web.RequestKey("names", Collection[str])  # names of the body's fields, kept because it may be decoded twice: see `either`
LARGE = 2_000_000  # bytes of a body that may hold anything. A larger one has room for images or long texts ...
MARKS_OF_LARGE = 300_000  # ... and for no more names, objects and lists than a body of that size: each takes 2 us of the event loop
DEEPEST = 200  # nested brackets; Python's own limit is 1,000 calls, of which parsers and templates need some
KEY = re.compile(rb'"(\w+)"\s*:')
# Pairs of surrogates, what is half of one (group 1), and all other escapes.
HEX = rb"[\da-fA-F]{2}"
ESCAPES = re.compile(rb"\\u[dD][89aAbB]%b\\u[dD][c-fC-F]%b|(\\u[dD][89a-fA-F]%b)|\\." % (HEX, HEX, HEX), re.DOTALL)
# more digits than Python reads; matches once in a row of digits, however many there are
LONG_NUMBER = re.compile(rb"(?<!\d)\d{4300}")
MARKS = re.compile(rb'"((?:[^"\\]|\\.)*)"|[\[{]|[\]}]', re.DOTALL)

Body = TypeVar("Body")


def decode(http: web.Request, kind: type[Body]) -> Body:
    """The body as this type. Raises HttpError if it is too large or no JSON, Refused if a field has a wrong type or comes twice."""
    body, _ = decode_named(http, kind)
    return body


def decode_named(http: web.Request, kind: type[Body]) -> tuple[Body, Collection[str]]:
    """The body, decoded as by `decode`, and the names of all its fields, known or not."""
    if http.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise HttpError(Problem(415, "unsupported_encoding", "compressed bodies are not supported: send plain JSON"))
    limit = http.app[LIMIT]
    if (http.content_length or 0) > limit:  # it was not read
        message = f"the body may have {limit} bytes (--payload-limit). Given: {http.content_length}"
        raise HttpError(Problem(413, "payload_too_large", message, headers={"Connection": "close"}))
    data = http.get(BODY, b"")
    _check_marks(data)
    try:
        text = data.decode()
        found = msgspec.json.decode(data, type=kind)
        if NAMES not in http:
            http[NAMES] = _names(text)
        return found, http[NAMES]
    except msgspec.ValidationError as error:
        raise Refused(str(error), _field(str(error))) from error
    except UnicodeDecodeError as error:
        raise _no_json("it is not in UTF-8", _near(data, error.start)) from error
    except msgspec.DecodeError as error:
        half = next((found for found in ESCAPES.finditer(data) if found[1]), None)  # JavaScript cuts texts within emojis
        if half is not None:
            why = f"{half[1].decode()} is half of a character: a text was cut within it"
            raise _no_json(why, _near(data, half.start())) from error
        raise _no_json(str(error), _near(data, _place(str(error), data))) from error
    except RecursionError as error:
        raise _no_json("it is nested too deeply", _deepest(data)) from error
    except ValueError as error:  # a huge number where no field expects one, so that msgspec has not looked at it
        digits = LONG_NUMBER.search(data)
        raise _no_json("a number has thousands of digits", _near(data, digits.start() if digits else 0)) from error


def _check_marks(data: bytes) -> None:
    """Raises HttpError if a large body consists of too many small values."""
    if len(data) > LARGE and (count := sum(map(data.count, (b":", b"{", b"[")))) > MARKS_OF_LARGE:
        message = f"a body of more than {LARGE} bytes may have {MARKS_OF_LARGE} colons and opening brackets. Given: {count}"
        raise HttpError(Problem(413, "payload_too_large", message))


def json_response(content: object, headers: dict[str, str] | None = None, status: int = 200) -> web.Response:
    """A response with anything that msgspec can encode."""
    return web.Response(status=status, body=msgspec.json.encode(content), content_type="application/json", headers=headers)


def _names(text: str) -> Collection[str]:
    """The field names of the outermost object. Raises Refused where a name comes twice in one object: which value was meant cannot
    be known."""
    found = json.loads(text, object_pairs_hook=_once)
    return tuple(found) if isinstance(found, dict) else ()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise Refused(f"`{twice}` comes twice in one object", twice)
    return found


def _no_json(why: str, field: str | None) -> HttpError:
    near = f" (at or behind `{field}`)" if field else ""
    return HttpError(Problem(400, "validation", f"the body is no JSON{near}: {why}", field))


def _field(message: str) -> str | None:
    """The field that msgspec's message blames: "... - at `$.parameters.top_k`", or one that is missing there."""
    missing = re.match(r"Object missing required field `(.+?)`", message)
    _, found, path = message.rpartition("`$.")
    names = [path.rstrip("`")] * bool(found) + ([missing[1]] if missing else [])
    return ".".join(names) or None


def _place(message: str, data: bytes) -> int:
    """The byte that msgspec's message blames: "... (byte 12)"."""
    match = re.search(r"\(byte (\d+)\)", message)
    return int(match[1]) if match else len(data)


def _near(data: bytes, place: int) -> str | None:
    """The last field that begins before that byte."""
    found = None
    for found in KEY.finditer(data, max(0, place - 65536), place):  # noqa: B007 (the last one is wanted)
        pass
    return found[1].decode() if found else None


def _deepest(data: bytes) -> str | None:
    """The outermost field whose value nests brackets too deeply."""
    depth, name = 0, None
    for mark in MARKS.finditer(data):
        if mark[1] is not None:
            name = mark[1] if depth == 1 else name
        else:
            depth += 1 if mark[0] in b"[{" else -1
            if depth > DEEPEST:
                break
    return name.decode(errors="replace") if name else None
