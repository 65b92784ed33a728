"""MiniMax M3's tool calls: each parameter has a tag of its own, and so have the values within lists and objects, whose types come
from the tool's schema. A special token stands before each tag. JSON objects are read as well.
"""

import sys
from typing import Any

from .calls import MAX_NAME, Calls, json_call, stream_text, usable
from .parameters import STRING, Parameters
from .source import Source, Steps, after_space, expect, space, up_to
from .values import dump, typed

MARK = "]<]minimax[>["
OPEN, CLOSE = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
INVOKE, INVOKE_END, NAME_END = f'{MARK}<invoke name="', f"{MARK}</invoke>", '">'
ITEM = "item"  # the tag of a list's values
DEEPEST = 32  # tags within each other
Node = str | list[tuple[str, "Node"]]  # of a tag: its text, or the tags within it


class NestedForm:
    """The form `OPEN (INVOKE f"> (<key>value</key>)* INVOKE_END)* CLOSE`, with MARK before each tag."""

    opens = (OPEN, INVOKE)
    markers = (MARK, OPEN, CLOSE)

    def first(self, source: Source, calls: Calls) -> Steps[bool]:
        return False
        yield

    def read(self, source: Source, calls: Calls, marker: str) -> Steps[bool]:
        found = False
        if marker == INVOKE:
            found = yield from self._call(source, calls)
            if not found:
                return False
        while True:
            start = source.at
            if (yield from space(source)) == "{":
                read = yield from json_call(source, calls, strict=False)
            else:
                read = (yield from after_space(source, INVOKE)) and (yield from self._call(source, calls))
            if not read:
                source.at = start
                break
            found = True
        if found:
            yield from after_space(source, CLOSE)
        return found

    def _call(self, source: Source, calls: Calls) -> Steps[bool]:
        name = ((yield from up_to(source, NAME_END, MAX_NAME)) or "").strip()
        if not usable(name):
            return False
        yield calls.begin(name)
        yield calls.arguments("{")
        comma = ""
        while not (yield from after_space(source, INVOKE_END)):
            if not (yield from self._argument(source, calls, name, comma)):
                return True
            comma = ", "
        yield calls.arguments("}")
        return True

    def _argument(self, source: Source, calls: Calls, name: str, comma: str) -> Steps[bool]:
        """Reads one parameter. Returns False where it is broken or cut off."""
        start = source.at
        if not (yield from after_space(source, f"{MARK}<")):
            return False
        key = yield from up_to(source, ">", MAX_NAME)
        if not key or key.startswith("/"):
            source.at = start
            return False
        head, parameters = f"{comma}{dump(key)}: ", calls.parameters(name)
        if calls.types(name, key) == STRING:
            yield calls.arguments(head)
            return (yield from stream_text(source, calls, f"{MARK}</{key}>"))
        node = yield from _node(source, key, 1)
        if node is None:
            source.at = start
            return False
        yield calls.arguments(f"{head}{_json(node, parameters.part(parameters.schema, key), parameters)}")
        return True


def _node(source: Source, tag: str, depth: int) -> Steps[Node | None]:
    """Reads what stands in a tag, and its end. None: it is broken or cut off."""
    found: list[tuple[str, Node]] = []
    text = yield from up_to(source, MARK, sys.maxsize // 2)
    while text is not None and not (text.strip() and found):
        if (yield from expect(source, f"</{tag}>")):
            return found or text
        if depth == DEEPEST or text.strip() or not (yield from expect(source, "<")):
            return None
        inner = yield from up_to(source, ">", MAX_NAME)
        node = (yield from _node(source, inner, depth + 1)) if inner else None
        if inner is None or node is None:
            return None
        found.append((inner, node))
        text = yield from up_to(source, MARK, sys.maxsize // 2)
    return None


def _json(node: Node, schema: Any, parameters: Parameters) -> str:
    """The value as JSON of a type that the schema allows, as far as that is possible."""
    types = parameters.types_of(schema)
    if not node and "string" not in types and types & {"array", "object"}:
        return "[]" if "array" in types else "{}"
    if isinstance(node, str):
        return typed(node, types)
    if "array" in types and ("object" not in types or all(tag == ITEM for tag, _ in node)):
        inner = parameters.part(schema, None)
        return f"[{', '.join(_json(value, inner, parameters) for _, value in node)}]"
    fields = {tag: _json(value, parameters.part(schema, tag), parameters) for tag, value in node}
    return f"{{{', '.join(f'{dump(tag)}: {text}' for tag, text in fields.items())}}}"
