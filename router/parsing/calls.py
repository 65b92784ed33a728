"""The tool calls of one answer: their numbers, ids and names, and the JSON object in which most models write one."""

import json
import secrets
import string as characters
from collections.abc import Callable, Mapping
from typing import Any

from .parameters import Parameters
from .parts import Arguments, Call
from .source import Pieces, Source, Steps, after_space, expect, space
from .values import encodable, follow_json, string, whole

Schemas = Mapping[str, Mapping[str, Any]]  # the JSON schema of each tool's parameters, by the tool's name
MAX_NAME = 256  # characters; nothing longer is a name

NAME_KEYS = ("name", "function", "tool_name")
ARGUMENTS_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id", "tool_call_id")


class Calls:
    """The numbering of an answer's calls, and the tools that it may call."""

    def __init__(self, schemas: Schemas | None, make_id: Callable[[], str]) -> None:
        """`schemas`: None if the tools are not known."""
        self._tools = None if schemas is None else {name: Parameters(schema) for name, schema in schemas.items()}
        self._make_id = make_id
        self._count = 0

    def begin(self, name: str, id: str = "") -> Call:
        """The next call."""
        self._count += 1
        return Call(self._count - 1, id or self._make_id(), name)

    def arguments(self, text: str) -> Arguments:
        """A piece of arguments of the latest call."""
        return Arguments(self._count - 1, text)

    def known(self, name: str) -> bool:
        """Whether there may be such a tool; False only if there certainly is none."""
        return self._tools is None or name in self._tools

    def given(self, name: str) -> bool:
        """Whether there certainly is such a tool."""
        return self._tools is not None and name in self._tools

    def parameters(self, name: str) -> Parameters:
        """What the schema says of a tool's parameters; nothing, if it is not known."""
        return (self._tools or {}).get(name) or Parameters({})


def openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def mistral_id() -> str:
    """An id as Mistral's templates require it."""
    return "".join(secrets.choice(characters.ascii_letters + characters.digits) for _ in range(9))


def usable(name: str) -> bool:
    """Whether it can be a tool's name."""
    return 0 < len(name) <= MAX_NAME and encodable(name) and not any(char in name for char in "\r\n{}<>")


def stream(pieces: Pieces[bool], calls: Calls) -> Steps[bool]:
    """Emits a call's arguments as they arrive."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            return bool(end.value)
        yield None if piece is None else calls.arguments(piece)


def json_call(source: Source, calls: Calls, strict: bool) -> Steps[bool]:
    """Reads `{"name": "f", "arguments": {...}}`, keys in any order. Returns False, with nothing emitted, if it is no call.

    If the call turns out to be broken after it was emitted, reading stops where it broke. `strict`: the tool must exist.
    """
    if not (yield from expect(source, "{")):
        return False
    name = held = ""
    begun = False
    while (yield from space(source)) == '"':
        start = source.at
        key = yield from decoded(source)
        if key not in NAME_KEYS + ARGUMENTS_KEYS + OTHER_KEYS and not begun:
            return False
        if not (yield from after_space(source, ":")):
            source.at = start
            return begun
        first = yield from space(source)
        if key in NAME_KEYS and not begun:
            name = (yield from decoded(source)) if first == '"' else ""
            if not usable(name) or (strict and not calls.known(name)):
                return False
        elif key in ARGUMENTS_KEYS and name and not begun and first == "{":
            yield calls.begin(name)
            begun = True
            if not (yield from stream(follow_json(source), calls)):
                return True
        else:
            value = yield from whole(follow_json(source))
            if not value:
                source.at = start
                return begun
            held = value if key in ARGUMENTS_KEYS else held
        if not (yield from after_space(source, ",")):
            break
    if not (yield from after_space(source, "}")):
        return begun
    arguments = _object(held)
    if not begun and name and arguments is not None:
        yield calls.begin(name)
        yield calls.arguments(arguments)
        return True
    return begun


def decoded(source: Source) -> Steps[str]:
    """The text of a JSON string; "" if it is broken."""
    found = yield from whole(string(source))
    return str(json.loads(found)) if found else ""


def _object(held: str) -> str | None:
    """Arguments that were held back, as a JSON object; none at all are an empty one. None: they are something else.

    Some models write the object as a string, as OpenAI's answers have it.
    """
    if held in ("", "null", '""'):
        return "{}"
    if held.startswith("{"):
        return held
    if not held.startswith('"'):
        return None
    text = str(json.loads(held)).strip()
    try:
        return text if isinstance(json.loads(text), dict) and encodable(text) else None
    except (ValueError, RecursionError):
        return None
