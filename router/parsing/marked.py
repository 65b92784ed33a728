"""Tool calls with a header and a JSON object, each between its own markers: DeepSeek V3 and R1, Kimi K2, Solar Open."""

import re
from dataclasses import dataclass
from typing import ClassVar

from .calls import MAX_NAME, Calls, stream, usable
from .source import Source, Steps, after_space, space, up_to
from .values import follow_json

KIMI = re.compile(r"functions\.(\S+):[0-9]+")
SOLAR_ID = re.compile(r"[a-z0-9]{10}")


@dataclass(frozen=True, slots=True)
class MarkedForm:
    """The form `SECTION (CALL header SEPARATOR {...} END)* SECTION_END`, with or without the section's markers."""

    section: str
    call: str
    separator: str
    end: str
    section_end: str
    name: str = ""  # in the header, between the call's id and the function's name
    bare: ClassVar[bool] = False

    @property
    def opens(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.section, self.call)))

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.opens, self.name, self.separator, self.end, self.section_end)))

    def read(self, source: Source, calls: Calls, marker: str) -> Steps[bool]:
        if marker == self.section and not (yield from after_space(source, self.call)):
            return False
        if not (yield from self._call(source, calls)):
            return False
        while (yield from after_space(source, self.call)):
            start = source.at - len(self.call)
            if not (yield from self._call(source, calls)):
                source.at = start
                return True
        yield from after_space(source, self.section_end)
        return True

    def _call(self, source: Source, calls: Calls) -> Steps[bool]:
        head = yield from up_to(source, self.separator, MAX_NAME)
        if head is None or self.call in head:  # else the separator is another call's
            return False
        id, _, name = head.strip().rpartition(self.name) if self.name else ("", "", head.strip())
        id, fenced = id if SOLAR_ID.fullmatch(id) else "", False
        if name == "function" and (yield from space(source)) != "{":  # DeepSeek V3: the name follows, and a code block
            line = yield from up_to(source, "```json", MAX_NAME)
            if line is None:
                return False
            name, fenced = line.strip(), True
        elif numbered := KIMI.fullmatch(name):  # functions.f:0, which its template wants back as the call's id
            id, name = name, numbered[1]
        if not usable(name) or (yield from space(source)) != "{":
            return False
        yield calls.begin(name, id)
        if (yield from stream(follow_json(source), calls)):
            if fenced:
                yield from after_space(source, "```")
            yield from after_space(source, self.end)
        return True
