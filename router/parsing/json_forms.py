"""Tool calls as JSON objects, with or without markers: Hermes, Qwen, Llama, Granite, Mistral and many more."""

import re
from dataclasses import dataclass
from typing import ClassVar

from .calls import MAX_NAME, Calls, decoded, json_call, stream, usable
from .source import Source, Steps, after_space, expect, space, up_to
from .values import follow_json

MISTRAL = "[TOOL_CALLS]"
MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class JsonForm:
    """JSON objects between markers: one, several separated by commas or semicolons, or a list of them."""

    opens: tuple[str, ...]
    close: str = ""  # may be missing
    bare: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.opens, self.close) if self.close else self.opens

    def read(self, source: Source, calls: Calls, marker: str) -> Steps[bool]:
        found = yield from _objects(source, calls, strict=not marker)
        if found and marker and self.close:
            yield from after_space(source, self.close)
        return found


class MistralForm:
    """The form `[TOOL_CALLS][{...}, {...}]`, or in newer models `[TOOL_CALLS]f{...}` and `[TOOL_CALLS]f[CALL_ID]...[ARGS]{...}`."""

    opens = (MISTRAL,)
    markers = (MISTRAL, "[CALL_ID]", "[ARGS]")
    bare = False

    def read(self, source: Source, calls: Calls, marker: str) -> Steps[bool]:
        if (yield from space(source)) in ("[", "{"):
            return (yield from _objects(source, calls, strict=False))
        head = yield from up_to(source, "{", 2 * MAX_NAME)
        if head is None:
            return False
        name, _, id = head.strip().removesuffix("[ARGS]").partition("[CALL_ID]")
        if not usable(name.strip()):
            return False
        source.at -= 1
        yield calls.begin(name.strip(), id if MISTRAL_ID.fullmatch(id) else "")
        yield from stream(follow_json(source), calls)
        return True


@dataclass(frozen=True, slots=True)
class NamingForm:
    """A list of objects of one key each, the function's name: `[{"f": {...}}, {"g": {}}]`."""

    open: str
    close: str
    bare: ClassVar[bool] = False

    @property
    def opens(self) -> tuple[str, ...]:
        return (self.open,)

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.open, self.close)

    def read(self, source: Source, calls: Calls, marker: str) -> Steps[bool]:
        if not (yield from after_space(source, "[")):
            return False
        found = False
        while True:
            start = source.at
            if found and not (yield from after_space(source, ",")):
                break
            if not (yield from self._call(source, calls)):
                source.at = start
                return found
            found = True
            if not (yield from after_space(source, "}")):
                return True
        if (yield from after_space(source, "]")):
            yield from after_space(source, self.close)
        return True

    def _call(self, source: Source, calls: Calls) -> Steps[bool]:
        """Reads a call up to the end of its arguments, or to where they break."""
        if not (yield from after_space(source, "{")) or (yield from space(source)) != '"':
            return False
        name = yield from decoded(source)
        if not usable(name) or not (yield from after_space(source, ":")) or (yield from space(source)) != "{":
            return False
        yield calls.begin(name)
        yield from stream(follow_json(source), calls)
        return True


def _objects(source: Source, calls: Calls, strict: bool) -> Steps[bool]:
    """Reads call objects, and stops behind the last one. Returns whether there was one."""
    yield from space(source)
    listed = yield from expect(source, "[")
    found = False
    while True:
        start = source.at
        if found and not (yield from after_space(source, ",")) and not listed:
            yield from after_space(source, ";")
        yield from space(source)
        if not (yield from json_call(source, calls, strict)):
            source.at = start
            break
        found = True
    if found and listed:
        yield from after_space(source, "]")
    return found
