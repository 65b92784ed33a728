"""Builds grammars in llguidance's dialect of Lark, rule by rule. Knows no form of calls, and no tokenizer except for the texts that
are single tokens, which a grammar must name as such."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from ..grammar import MOST_CHARACTERS
from ..request import Refused

Special = Callable[[str], int | None]  # the id of a text that is one token wherever it stands
TOKEN_NAME = re.compile(r"<[^<>\s]+>")  # as llguidance spells tokens
TOKEN = re.compile(r"<\|[^<>]*?\|>|<｜[^<>]*?｜>")  # how most special tokens look, which may be part of longer markers
MOST_KEYWORDS = 32  # of a call whose arguments' order and presence a grammar spells out: rules for half of their square
# no whitespace in which the model could ramble
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Lark:
    """The rules of a grammar under construction, each with a unique name."""

    def __init__(self, special: Special, field: str = "tools", within: Sequence[str] = ()) -> None:
        """special: see `constraint`; field: the request's field to blame; within: tokens beside TOKEN that may be part of longer
        texts."""
        self._special = special
        self._tokens = re.compile(f"({'|'.join([TOKEN.pattern, *map(re.escape, within)])})")
        self._field = field
        self._rules: list[str] = []
        self._size = 0  # characters of all rules

    @property
    def source(self) -> str:
        return "\n".join(self._rules)

    def rule(self, name: str, body: str, options: str = "") -> str:
        """Adds a rule. Raises Refused where the rules exceed a grammar's maximum size, before they take more memory."""
        self._rules.append(f"{name}{options}: {body}")
        self._size += len(self._rules[-1]) + 1
        if self._size > MOST_CHARACTERS:
            raise self.too_large
        return name

    @property
    def too_large(self) -> Refused:
        """The refusal of rules that exceed a grammar's maximum size."""
        return Refused(f"`{self._field}` is too large: its grammar has more than {MOST_CHARACTERS} characters", self._field)

    def new(self, body: str, options: str = "") -> str:
        """Adds a rule under a generated name."""
        return self.rule(f"r{len(self._rules)}", body, options)

    def text(self, *texts: str) -> str:
        """Literals in sequence; a literal that is a token becomes that token."""
        pieces = chain.from_iterable(map(self._pieces, texts))
        return " ".join(map(self._one, filter(None, pieces)))

    @property
    def line(self) -> str:
        """A line end, or nothing."""
        return f"({self.text(chr(10))})?"

    def is_token(self, text: str) -> bool:
        """Whether the text is one token wherever it stands."""
        return self._special(text) is not None

    def _pieces(self, text: str) -> list[str]:
        """The text split around the tokens within it, which are every second piece."""
        if self.is_token(text):
            return ["", text, ""]
        found = [""]
        for index, piece in enumerate(self._tokens.split(text)):
            if index % 2 and self.is_token(piece):
                found += [piece, ""]
            else:
                found[-1] += piece
        return found

    def _one(self, text: str) -> str:
        id = self._special(text)
        if id is None:
            return quoted(text)
        return text if TOKEN_NAME.fullmatch(text) else f"<[{id}]>"

    def up_to(self, text: str) -> str:
        """Anything up to the first such text, including that text."""
        before, *rest = self._pieces(text)
        if rest:
            return f"{self.new(f'/(?s:.*){plainly(before)}/')} {self.text(*rest)}"
        return self.new("/(?s:.*)/", f"[suffix={quoted(text)}]")

    def bounded(self, ends: Sequence[str], least: int, most: int | None, unlike: str = "") -> str:
        """A number of characters, and the end texts, the last of which may not occur in them. It is one regular expression, unless
        the last is a token: as a literal of its own it would only be expected after most of it had been taken for characters.
        unlike: how they may not begin."""
        last, anything = ends[-1], "/(?s:.*)/"
        text = f"/(?s:.{{{least},{'' if most is None else most}}})/ & ~({anything} {quoted(last)} {anything})"
        if unlike:
            text = f"{text} & ~({quoted(unlike)} {anything})"
        before, *rest = self._pieces(last)
        end = "".join([*ends[:-1], before])
        name = self.rule(f"T{len(self._rules)}", f"({text}) {quoted(end)}" if end else text)
        return f"{name} {self.text(*rest)}"

    def json(self, schema: Any) -> str:
        """A JSON value that is valid under the schema."""
        schema = schema if isinstance(schema, Mapping) else {}
        return self.new(f"%json {json.dumps({**schema, 'x-guidance': COMPACT})}")

    def some(self, rules: Sequence[tuple[str, bool]], between: str) -> str:
        """The required rules, and any of the others, in their order."""
        first = [rule for rule, required in rules if required]
        rest = [self.new(rule) for rule, required in rules if not required]  # which may be used several times
        comma = self.text(between)
        if first:
            return " ".join([f" {comma} ".join(first), *(f"({comma} {rule})?" for rule in rest)])
        chains = [" ".join([rule, *(f"({comma} {other})?" for other in rest[index:])]) for index, rule in enumerate(rest, 1)]
        return f"({' | '.join(chains)})?" if chains else ""


def plainly(text: str) -> str:
    """The text escaped as part of a pattern between slashes."""
    return re.escape(text).replace("/", r"\/")


def quoted(text: str) -> str:
    """The text as a literal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")  # which llguidance takes for no part of a literal
