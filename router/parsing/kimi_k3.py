"""Kimi K3's tool calls: `<|open|>call tool="f" index="1"<|sep|>`, and each argument in an element of its own, which names its type.
All arguments may also stand in one element as JSON.

Here are the parser, and the grammar rules for a call that is forced.
"""

import re
from collections.abc import Mapping
from typing import Any

from .calls import MAX_NAME, Calls, stream, usable
from .lark import Lark
from .parameters import STRING, TYPES, Parameters
from .source import Markers, Source, Steps, after_space, space, up_to
from .tagged import stated
from .values import dump, follow_json, string_before, typed, value_before

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
TOOLS, TOOLS_END = f"{OPEN}tools{SEP}", f"{CLOSE}tools{SEP}"
CALL, CALL_END = f'{OPEN}call tool="', f"{CLOSE}call{SEP}"
ARGUMENT, ARGUMENT_END = f'{OPEN}argument key="', f"{CLOSE}argument{SEP}"
JSON, JSON_END = f'{OPEN}json type="object"{SEP}', f"{CLOSE}json{SEP}"
NUMBERED = re.compile(r'([^"]*)" index="[0-9]+"')
TYPED = re.compile(r'([^"]*)" type="([a-z]+)"')


class KimiK3Form:
    """The form `TOOLS (CALL f" index="1"SEP (ARGUMENT k" type="t"SEP value ARGUMENT_END)* CALL_END)* TOOLS_END`."""

    opens = (TOOLS, CALL)
    markers = (OPEN, CLOSE, SEP)
    bare = False

    def read(self, source: Source, calls: Calls, marker: str) -> Steps[bool]:
        if marker == TOOLS and not (yield from after_space(source, CALL)):
            return False
        found = yield from _call(source, calls)
        if found:
            yield from after_space(source, TOOLS_END)
        return found


def _call(source: Source, calls: Calls) -> Steps[bool]:
    head = NUMBERED.fullmatch((yield from up_to(source, SEP, 2 * MAX_NAME)) or "")
    if head is None or not usable(name := _unescaped(head[1])):
        return False
    yield calls.begin(name)
    if (yield from after_space(source, JSON)) and (yield from space(source)) == "{":
        if (yield from stream(follow_json(source), calls)) and (yield from after_space(source, JSON_END)):
            yield from after_space(source, CALL_END)
        return True
    yield calls.arguments("{")
    comma = ""
    while not (yield from after_space(source, CALL_END)):
        if not (yield from _argument(source, calls, name, comma)):
            return True
        comma = ", "
    yield calls.arguments("}")
    return True


def _argument(source: Source, calls: Calls, name: str, comma: str) -> Steps[bool]:
    """Reads one argument. Returns False where it is broken or cut off."""
    start = source.at
    if not (yield from after_space(source, ARGUMENT)):
        return False
    head = TYPED.fullmatch((yield from up_to(source, SEP, 2 * MAX_NAME)) or "")
    if head is None:
        source.at = start
        return False
    key = _unescaped(head[1])
    yield calls.arguments(f"{comma}{dump(key)}: ")
    if head[2] == "string":
        return (yield from stream(string_before(source, Markers(ARGUMENT_END)), calls))
    types = calls.parameters(name).types(key) - STRING or TYPES
    text = yield from value_before(source, ARGUMENT_END, types)
    if text is None:
        return False
    yield calls.arguments(typed(text, types))
    return True


def _unescaped(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def call(lark: Lark, name: str, schema: Mapping[str, Any]) -> str:
    """The rule of a call whose arguments are valid under the schema, as JSON where elements cannot express exactly that."""
    index, end = '" index="', f'"{SEP}'
    head = f"{lark.text(f'{CALL}{_escaped(name)}{index}')} /[1-9][0-9]{{0,2}}/ {lark.text(end)}"
    arguments = _elements(lark, Parameters(schema))
    if arguments is None:
        arguments = f"{lark.text(JSON)} {lark.json(schema)} {lark.text(JSON_END)}"
    return f"{head} {arguments} {lark.text(CALL_END)}"


def _elements(lark: Lark, parameters: Parameters) -> str | None:
    """All arguments in elements, in their order; None if some cannot be written so."""
    plain, rules = parameters.plain, []
    kinds = {kind: f'" type="{kind}"{SEP}' for kind in TYPES}
    for key, (schema, required) in (plain or {}).items():
        value = stated(lark, kinds, ARGUMENT_END, schema, parameters)
        if value is None or SEP in key or len(key) > MAX_NAME:
            return None
        argument = f"{lark.text(f'{ARGUMENT}{_escaped(key)}')} {value}"
        rules.append(argument if required else f"({argument})?")
    return None if plain is None else " ".join(rules)
