"""Rules of a grammar as they are made, in Lark as llguidance takes it. Knows no form, and no tokenizer but the texts that are
tokens, which a grammar has to name as such."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from ..grammar import MOST_CHARACTERS
from ..request import Refused

Special = Callable[[str], int | None]  # the id of a text that is one token wherever it stands
TOKEN_NAME = re.compile(r"<[^<>\s]+>")  # as llguidance spells tokens
MOST_KEYWORDS = 32  # of a call, whose order and number a grammar spells out: as many rules as half of their square
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # no room to ramble in spaces


class Lark:
    """Rules as they are made, each under a name of its own."""

    def __init__(self, special: Special, field: str = "tools", within: str = "") -> None:
        """special: see `constraint`; field: of a request, which is to blame; within: what may be a token within texts."""
        self._special = special
        self._within = within if within and special(within) is not None else ""
        self._field = field
        self._rules: list[str] = []
        self._size = 0  # characters of them

    @property
    def source(self) -> str:
        return "\n".join(self._rules)

    def rule(self, name: str, body: str, options: str = "") -> str:
        """Raises Refused where the rules come to more than a grammar may have, before they take more memory."""
        self._rules.append(f"{name}{options}: {body}")
        self._size += len(self._rules[-1]) + 1
        if self._size > MOST_CHARACTERS:
            raise Refused(f"`{self._field}` is too large: its grammar has more than {MOST_CHARACTERS} characters", self._field)
        return name

    def new(self, body: str, options: str = "") -> str:
        """A rule of any name."""
        return self.rule(f"r{len(self._rules)}", body, options)

    def text(self, *texts: str) -> str:
        """Literals one after the other; one that is a token is that token."""
        pieces = chain.from_iterable(map(self._pieces, texts))
        return " ".join(map(self._one, filter(None, pieces)))

    def _pieces(self, text: str) -> Sequence[str]:
        """Those of a text with a token within."""
        before, token, after = text.partition(self._within) if self._within else (text, "", "")
        return before, token, after

    def _one(self, text: str) -> str:
        id = self._special(text)
        if id is None:
            return quoted(text)
        return text if TOKEN_NAME.fullmatch(text) else f"<[{id}]>"

    def up_to(self, text: str) -> str:
        """Anything up to the first such text, and that."""
        if self._special(text) is not None:
            return f"{self.new('/(?s:.*)/')} {self.text(text)}"
        before, *token = self._pieces(text)
        if any(token):
            return f"{self.new(f'/(?s:.*){plainly(before)}/')} {self.text(*token)}"
        return self.new("/(?s:.*)/", f"[suffix={quoted(text)}]")

    def bounded(self, ends: Sequence[str], least: int, most: int | None) -> str:
        """So many characters, and these texts, the last of which is not among them. All in one, unless that is a token: a literal
        of its own would be asked for when most of it has been taken for characters."""
        last, anything = ends[-1], "/(?s:.*)/"
        text = f"/(?s:.{{{least},{'' if most is None else most}}})/ & ~({anything} {quoted(last)} {anything})"
        name = f"T{len(self._rules)}"
        if self._special(last) is not None:
            return f"{self.rule(name, text)} {self.text(*ends)}"
        before, *token = self._pieces(last)
        if any(token):
            return f"{self.rule(name, f'({text}) {quoted(before)}')} {self.text(*token)}"
        return self.rule(name, f"({text}) {quoted(''.join(ends))}")

    def json(self, schema: Any) -> str:
        """A value of the schema."""
        schema = schema if isinstance(schema, Mapping) else {}
        return self.new(f"%json {json.dumps({**schema, 'x-guidance': COMPACT})}")

    def some(self, rules: Sequence[tuple[str, bool]], between: str) -> str:
        """What is required, and of the rest any, in their order."""
        first = [rule for rule, required in rules if required]
        rest = [self.new(rule) for rule, required in rules if not required]  # which may stand there often
        comma = self.text(between)
        if first:
            return " ".join([f" {comma} ".join(first), *(f"({comma} {rule})?" for rule in rest)])
        chains = [" ".join([rule, *(f"({comma} {other})?" for other in rest[index:])]) for index, rule in enumerate(rest, 1)]
        return f"({' | '.join(chains)})?" if chains else ""


def plainly(text: str) -> str:
    """As a part of a pattern between slashes."""
    return re.escape(text).replace("/", r"\/")


def quoted(text: str) -> str:
    """As a literal."""
    return json.dumps(text, ensure_ascii=False)
