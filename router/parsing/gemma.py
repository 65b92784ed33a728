"""Gemma 4's tool calls: `<|tool_call>call:f{a:<|"|>x<|"|>,b:[1,{c:true}]}<tool_call|>`, and FunctionGemma's, with other tokens.
Strings stand between special tokens and have no escapes, keys need no quotes. JSON is read as well.

Here are the parser, and the grammar rules for a call that is forced.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..grammar import MOST_CHARACTERS
from .calls import MAX_NAME, Calls, stream, usable
from .lark import MOST_KEYWORDS, Lark, quoted
from .parameters import LISTING, Parameters
from .source import Markers, Pieces, Source, Steps, after_space, ahead, space, up_to
from .values import CLOSING, NUMBER_OR_NAME, PYTHON_NAMES, dump, string, string_before

CALL = "call:"
BARE = re.compile(r'[^:,<>{}\[\]"\s](?:[^:,<>{}\[\]"\n\r\t]*[^:,<>{}\[\]"\s])?')  # a key that needs no quotes
# a value that is neither a string nor in brackets, with whitespace around it
ATOM = re.compile(rf"[^,<>{{}}\[\]\"]{{0,{MAX_NAME + 1}}}")
FLAT = ('"$ref": ', '"oneOf": ')  # with these in a schema, its parts cannot be judged separately
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GemmaForm:
    """Gemma's form, each call between its own markers."""

    open: str = "<|tool_call>"
    close: str = "<tool_call|>"
    quote: str = '<|"|>'
    bare: ClassVar[bool] = False

    @property
    def opens(self) -> tuple[str, ...]:
        return (self.open,)

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.open, self.close, self.quote)

    def read(self, source: Source, calls: Calls, marker: str) -> Steps[bool]:
        if not (yield from after_space(source, CALL)):
            return False
        name = yield from up_to(source, "{", MAX_NAME)
        if name is None or not usable(name.strip()):
            return False
        source.at -= 1
        yield calls.begin(name.strip())
        if (yield from stream(_value(source, self.quote), calls)):
            yield from after_space(source, self.close)
        return True


def _value(source: Source, quote: str) -> Pieces[bool]:
    """Emits one value as JSON, piece by piece. Returns False where it is broken or the text ends in it."""
    closing: list[str] = []  # brackets that are still to come
    while True:
        char = yield from space(source)
        if char in CLOSING:
            source.at += 1
            yield char
            closing.append(CLOSING[char])
            char = yield from space(source)
            if char != closing[-1]:
                if closing[-1] == "}" and not (yield from _key(source, quote)):
                    return False
                continue
        elif not (yield from _scalar(source, quote)):
            return False
        while closing:
            char = yield from space(source)
            if char == ",":
                source.at += 1
                char = yield from space(source)
                if char != closing[-1]:  # else it was a trailing comma
                    yield ", "
                    break
            if char != closing[-1]:
                return False
            source.at += 1
            yield closing.pop()
        else:
            return True
        if closing[-1] == "}" and not (yield from _key(source, quote)):
            return False


def _key(source: Source, quote: str) -> Pieces[bool]:
    """Emits a key and its colon."""
    char = yield from space(source)
    if char in ('"', "<"):
        if not (yield from _quoted(source, quote)):
            return False
        if (yield from space(source)) != ":":
            return False
        source.at += 1
        yield ": "
        return True
    start = source.at
    key = yield from up_to(source, ":", MAX_NAME)
    if key is None or not BARE.fullmatch(key.rstrip()):
        source.at = start
        return False
    yield f"{dump(key.rstrip())}: "
    return True


def _scalar(source: Source, quote: str) -> Pieces[bool]:
    """Emits a string, a number, true, false or null, which the template may show in Python's spelling. Anything else is taken for a
    string without quotes."""
    if source.text[source.at : source.at + 1] in ('"', "<"):
        return (yield from _quoted(source, quote))
    found = yield from ahead(source, ATOM)
    text = found.strip()
    if not text or source.at + len(found) == len(source.text) or len(found) > MAX_NAME:
        return False
    source.at += len(found)
    yield text if NUMBER_OR_NAME.fullmatch(text) else dump(PYTHON_NAMES.get(text, text))
    return True


def _quoted(source: Source, quote: str) -> Pieces[bool]:
    """Emits a string between Gemma's quotes or JSON's."""
    if source.text[source.at] == '"':
        return (yield from string(source))
    if not (yield from after_space(source, quote)):
        return False
    return (yield from string_before(source, Markers(quote)))


def call(lark: Lark, form: GemmaForm, name: str, schema: Json) -> str:
    """The rule of a call whose arguments are valid under the schema. What this notation cannot express is written as JSON."""
    text = json.dumps(schema)
    arguments = None if len(text) > MOST_CHARACTERS else _object(lark, form.quote, schema, any(word in text for word in FLAT))
    return f"{lark.text(form.open, f'{CALL}{name}')} {arguments or lark.json(schema)} {lark.text(form.close)}"


def _object(lark: Lark, quote: str, schema: Json, flat: bool) -> str | None:
    """The rule of an object; None: it must be JSON. flat: objects and lists within it are JSON."""
    plain = Parameters(schema).plain
    if plain is None or len(plain) > MOST_KEYWORDS:
        return None
    rules = [
        (f"{lark.text(*_named(key, quote), ':')} {_any(lark, quote, value, flat)}", required)
        for key, (value, required) in plain.items()
    ]
    return f"{lark.text('{')} {lark.some(rules, ',')} {lark.text('}')}"


def _named(key: str, quote: str) -> tuple[str, ...]:
    if BARE.fullmatch(key) and len(key) < MAX_NAME:
        return (key,)
    return (dump(key),) if quote in key else (quote, key, quote)


def _any(lark: Lark, quote: str, schema: Any, flat: bool) -> str:
    """The rule of a value of a schema without references to the outside."""
    parts = Parameters(schema).alternatives(schema)
    rule = _either([_one(lark, quote, part, flat) for part in parts]) if len(parts) == 1 or not flat else None
    return rule or lark.json(schema)


def _one(lark: Lark, quote: str, schema: Json | None, flat: bool) -> str | None:
    """The rule of one alternative; None: it must be JSON."""
    if schema is None:
        return None
    kind = schema.get("type")
    if schema.keys() & LISTING:
        return _listed(lark, quote, Parameters(schema).listed(schema) or [])
    if isinstance(kind, list):
        return _either([_one(lark, quote, {**schema, "type": one}, flat) for one in dict.fromkeys(map(str, kind))])
    if kind == "string":
        lengths = Parameters(schema).lengths(schema)
        return f"{lark.text(quote)} {lark.bounded([quote], *lengths)}" if lengths is not None else None
    if kind not in ("object", "array"):
        return lark.json(schema) if kind is not None else None
    if flat:
        return None
    if kind == "object":
        return _object(lark, quote, schema, flat) if schema.get("properties") else None
    if schema.keys() != {"type", "items"} or not isinstance(schema["items"], Mapping):
        return None
    one = lark.new(_any(lark, quote, schema["items"], flat))
    return f"{lark.text('[')} ({one} ({lark.text(',')} {one})*)? {lark.text(']')}"


def _either(rules: list[str | None]) -> str | None:
    """An alternation of these rules. None: there are none, or one of them must be JSON."""
    found = [rule for rule in rules if rule is not None]
    return f"({' | '.join(found)})" if rules and len(found) == len(rules) else None


def _listed(lark: Lark, quote: str, values: list[Any]) -> str | None:
    """The rule of one of some listed values."""
    if not values or any(isinstance(value, str) and quote in value for value in values):
        return None
    rules = [lark.text(quote, value, quote) if isinstance(value, str) else quoted(dump(value)) for value in values]
    return f"({' | '.join(rules)})"
