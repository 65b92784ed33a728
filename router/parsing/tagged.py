"""Tool calls whose arguments stand in tags, without quotes: Qwen3-Coder's, GLM's, MiniMax M2's, DeepSeek V3.2's, Hy 3's and more.

Types come from the tool's schema, or, in DeepSeek V3.2, from the tag.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .calls import MAX_NAME, Calls, json_call, stream, usable
from .lark import Lark, quoted
from .parameters import KINDS, STRING, TYPES, Parameters, Types
from .source import Markers, Source, Steps, after_space, expect, space, up_to
from .values import dump, follow_json, string_before, typed, value_before

CDATA, CDATA_END = "<![CDATA[", "]]>"


@dataclass(frozen=True, slots=True)
class TaggedForm:
    """The form `{call}{function}f{function_end} ({key}k{key_end}{value}v{value_end})* {end}{call_end}`; there may be several
    within. Calls may all stand between a `section` and its end.

    With `kinds` one of them stands behind `{key_end}`: the first before a string, the second before any other value, as JSON.
    """

    function: str  # "": the name stands by itself
    function_end: str
    key: str
    key_end: str
    value: str  # "": the value begins where the key ends
    value_end: str
    end: str
    lines: bool  # a value stands on lines of its own
    call: str = "<tool_call>"  # "": a call has no other tag than the function's, in which the arguments may also be JSON
    call_end: str = "</tool_call>"
    kinds: tuple[str, str] | None = None
    within: tuple[str, ...] = ()  # tokens that these markers contain
    section: str = ""
    section_end: str = ""
    python: bool = False  # chat templates write null, lists and objects as Python does
    cdata: bool = False  # a value may stand between CDATA and CDATA_END
    bare: ClassVar[bool] = False

    @property
    def opens(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.section, self.call, self.function)))

    @property
    def markers(self) -> tuple[str, ...]:
        name_end = "" if self.function else self.function_end
        found = (*self.opens, name_end, self.key, self.key_end, self.value, self.value_end, self.end, self.call_end, *self.within)
        return tuple(filter(None, (*found, self.section_end)))

    def read(self, source: Source, calls: Calls, marker: str) -> Steps[bool]:
        if marker == self.section:
            if not (yield from after_space(source, self.call)):
                return False
            marker = self.call
        found = yield from self._call(source, calls, marker)
        if found and self.section_end:
            yield from after_space(source, self.section_end)
        return found

    def _call(self, source: Source, calls: Calls, marker: str) -> Steps[bool]:
        if marker == self.call and (yield from space(source)) == "{":  # Hermes's form, which such models sometimes write
            if not (yield from json_call(source, calls, strict=False)):
                return False
            yield from self._rest(source, calls)
            return True
        name = yield from self._name(source, marker)
        if not usable(name):
            return False
        yield calls.begin(name)
        if not self.call and (yield from space(source)) == "{":
            if (yield from stream(follow_json(source), calls)):
                yield from after_space(source, self.end)
            return True
        yield calls.arguments("{")
        if (yield from self._arguments(source, calls, name)):
            yield calls.arguments("}")
            if self.end != self.call_end:
                yield from self._rest(source, calls)
        return True

    def _rest(self, source: Source, calls: Calls) -> Steps[None]:
        """Reads the rest of a call tag. Further calls in tags have their own markers; calls in Hermes's form have none, and are
        read where one tag holds all calls."""
        while self.kinds is not None and (yield from space(source)) == "{":
            start = source.at
            if not (yield from json_call(source, calls, strict=True)):
                source.at = start
                return
        yield from after_space(source, self.call_end)

    def _name(self, source: Source, marker: str) -> Steps[str]:
        """The function's name; "" if there is none."""
        if self.function:
            if marker == self.call and not (yield from after_space(source, self.function)):
                return ""
            return ((yield from up_to(source, self.function_end, MAX_NAME)) or "").strip()
        start = source.at
        if self.function_end:
            name = ((yield from up_to(source, self.function_end, MAX_NAME)) or "").strip()
            source.at = source.at if usable(name) else start
            return name
        found = yield from up_to(source, "<", MAX_NAME)
        if found is None:
            return ""
        source.at -= 1
        for tag in (self.key, self.end):
            place = source.at
            if (yield from after_space(source, tag)):
                source.at = place
                return found.strip()
        source.at = start
        return ""

    def _arguments(self, source: Source, calls: Calls, name: str) -> Steps[bool]:
        """Reads all arguments. Returns False where they are broken or cut off."""
        opening = ""
        while not (yield from after_space(source, self.end)):
            if not (yield from after_space(source, self.key)):
                return False
            start = source.at - len(self.key)
            key = yield from up_to(source, self.key_end, MAX_NAME)
            if key is None or (self.value and not (yield from after_space(source, self.value))):
                source.at = start
                return False
            types = calls.parameters(name).types(key.strip())
            if self.kinds is not None:
                stated = yield from self._stated_types(source, self.kinds, types)
                if stated is None:
                    source.at = start
                    return False
                types = stated
            end = self.value_end
            if self.cdata and (yield from expect(source, CDATA)):
                end = f"{CDATA_END}{end}"
            yield calls.arguments(f"{opening}{dump(key.strip())}: ")
            if not (yield from self._string(source, calls, end) if types == STRING else self._value(source, calls, end, types)):
                return False
            opening = ", "
        return True

    def _stated_types(self, source: Source, kinds: tuple[str, str], types: Types) -> Steps[Types | None]:
        """What the tag says about the type of a value that may have these types; None if it says nothing."""
        string, other = kinds
        if (yield from after_space(source, string)):
            return STRING
        return (types - STRING or TYPES) if (yield from after_space(source, other)) else None

    def _string(self, source: Source, calls: Calls, end: str) -> Steps[bool]:
        """Reads a string, which is emitted as it arrives."""
        ends = Markers(f"\n{end}", end) if self.lines else Markers(end)
        if self.lines:
            yield from expect(source, "\n")
        return (yield from stream(string_before(source, ends), calls))

    def _value(self, source: Source, calls: Calls, end: str, types: Types) -> Steps[bool]:
        """Reads any other value, or one of unknown type, which is emitted when it is complete."""
        text = yield from value_before(source, end, types)
        if text is None:
            return False
        if self.lines:
            text = text.removeprefix("\n").removesuffix("\n")
        yield calls.arguments(typed(text, types, self.python))
        return True


def stated(lark: Lark, kinds: Mapping[str, str], value_end: str, schema: Any, parameters: Parameters) -> str | None:
    """The rule of a value behind a statement of its type, and its end; None if the parser would not read exactly the schema's
    values. kinds: what states each type."""
    end = lark.text(value_end)
    types = parameters.types_of(schema)
    if types <= TYPES - STRING and len({kinds[kind] for kind in types}) == 1:
        return f"{lark.text(kinds[min(types)])} {lark.json(schema)} {end}"
    rules, shared = [], {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict) and key in schema}
    for part in parameters.alternatives(schema):
        if part is None:
            return None
        values = parameters.listed(part)
        lengths = parameters.lengths(part)
        if values is not None:
            if not values or any(value_end in value for value in values if isinstance(value, str)):
                return None
            for value in values:
                text = value if isinstance(value, str) else dump(value)
                rules.append(f"{lark.text(kinds[KINDS[type(value)]])} {quoted(text)} {end}")
            continue
        if lengths is not None:
            written = lark.up_to(value_end) if lengths == (0, None) else lark.bounded([value_end], *lengths)
            rules.append(f"{lark.text(kinds['string'])} {written}")
        allowed = part.get("type", sorted(TYPES))
        allowed = [allowed] if isinstance(allowed, str) else allowed
        if not isinstance(allowed, list) or any(kind not in (*TYPES, "integer") for kind in allowed):
            return None
        others: dict[str, list[str]] = {}
        for kind in allowed:
            if kind != "string":
                others.setdefault(kinds["number" if kind == "integer" else kind], []).append(kind)
        for statement, group in others.items():
            rules.append(f"{lark.text(statement)} {lark.json({**part, **shared, 'type': group})} {end}")
    return f"({' | '.join(rules)})" if rules else None
