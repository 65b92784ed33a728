"""Converts EBNF grammars of llama.cpp (GBNF), vLLM and SGLang, `root ::= ...`, to llguidance's Lark. Pure.

llguidance wants terminals (regular expressions): what it parses by characters alone takes it milliseconds a token. But a terminal
matches greedily, and leaves nothing to what comes after it. So non-recursive rules become terminals, unless they would then consume
text that belongs to what follows.
"""

import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

BEGIN = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)  # which never occurs in Lark
TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<name>[\w-]+)
    |(?P<define>::=)
    |(?P<literal>"(?:[^"\\\n]|\\.)*")
    |(?P<set>\[(?:[^\]\\\n]|\\.)*\])
    |(?P<times>[*+?]|\{\s*[0-9]{1,6}\s*(?:,\s*[0-9]{0,6}\s*)?\})
    |(?P<mark>[|().])""",
    re.VERBOSE,
)
CHARACTER = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|u\{([0-9A-Fa-f]{1,6})\}|([^\w\s]|[nrtfv0]))|([^\\])"
)
CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
SURROGATES, LAST = range(0xD800, 0xE000), 0x10FFFF
SHOWN = 20  # characters quoted in error messages
MOST_DEPTH = 100  # of brackets
OTHERS = 128  # bit for all non-ASCII characters, in character sets as bit masks
ALL = (1 << (OTHERS + 1)) - 1


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a rule. `kind`: "text", "set", "name", "all" (sequence) and "any" (alternatives) of its parts, "times": repetition
    of its part."""

    kind: str
    lark: str = ""  # a text or set in Lark; the repetition; or a name
    parts: tuple["Part", ...] = ()
    first: int = 0  # bit mask of the characters with which a text or a set begins
    line: int = 0

    def names(self) -> Iterator["Part"]:
        if self.kind == "name":
            yield self
        for part in self.parts:
            yield from part.names()

    @property
    def omitted(self) -> bool:
        return self.lark in ("*", "?") or self.lark.startswith(("{0,", "{0}"))

    @property
    def repeated(self) -> bool:
        """Whether another repetition may follow where it may end."""
        least, comma, most = self.lark.strip("{}").partition(",")
        return self.lark in ("*", "+") or bool(comma and (not most or int(most) > max(1, int(least))))


Sets = tuple[bool, int, int]  # of a part: see `_Rules._known`
UNKNOWN: Sets = (False, 0, 0)
NOTHING = Part("text", '""')
ANYTHING = Part("set", "/(?s:.)/", first=ALL)


def is_ebnf(text: str) -> bool:
    """Whether a line begins with a rule, `name ::=`. Else it is Lark."""
    return BEGIN.search(text) is not None


def lark(text: str) -> str:
    """The same grammar in llguidance's Lark. Raises ValueError, which names the line."""
    rules = _Rules(_read([*_tokens(text)]))
    new = {name: f"{'T' if name in rules.patterns else 'r'}{number}" for number, name in enumerate(rules.bodies)}
    return "\n".join([f"start: {new['root']}", *(f"{new[name]}: {_written(rules.bodies[name], new)}" for name in rules.reached())])


def _tokens(text: str) -> Iterator[Token]:
    place, line = 0, 1
    while place < len(text):
        found = TOKEN.match(text, place)
        if found is None:
            rest = text[place : place + SHOWN].partition("\n")[0]
            kinds = {'"': "a text without its end", "[": "a set of characters without its end"}
            raise ValueError(f"line {line}: {kinds.get(rest[0], 'nothing that is known here')}: {rest}")
        if found.lastgroup and found.lastgroup != "space":
            yield Token(found.lastgroup, found[0], line)
        line += found[0].count("\n")
        place = found.end()


def _read(tokens: Sequence[Token]) -> dict[str, Part]:
    """Parses the rules. One ends where the next begins, whatever lines it has."""
    pairs = enumerate(itertools.pairwise(tokens))
    begins = [place for place, (name, after) in pairs if (name.kind, after.kind) == ("name", "define")]
    if tokens and begins[:1] != [0]:
        raise ValueError(f"line {tokens[0].line}: {tokens[0].text[:SHOWN]}, where a rule has to begin: name ::= ...")
    rules: dict[str, Part] = {}
    lines: dict[str, int] = {}
    for begin, end in zip(begins, [*begins[1:], len(tokens)] if begins else [], strict=True):
        head = tokens[begin]
        if head.text in rules:
            raise ValueError(f"line {head.line}: {head.text} is a rule already, of line {lines[head.text]}")
        lines[head.text] = head.line
        rules[head.text] = _body(tokens[begin + 2 : end])
    for rule in rules.values():
        for name in rule.names():
            if name.lark not in rules:
                raise ValueError(f"line {name.line}: there is no rule {name.lark}")
    if "root" not in rules:
        raise ValueError("there is no rule root, by which an answer begins")
    return rules


def _body(tokens: Sequence[Token]) -> Part:
    """Parses alternatives, each a sequence of parts, with a stack of open brackets."""
    opened: list[tuple[int, list[list[Part]]]] = [(0, [[]])]
    before = ""
    for token in tokens:
        alternatives = opened[-1][1]
        match token.kind, token.text:
            case "define", _:
                raise ValueError(f"line {token.line}: ::= without the name of a rule before it")
            case "times", text:
                if before in ("", "|", "(", "times"):
                    raise ValueError(f"line {token.line}: {text}, and nothing before it that could be repeated")
                alternatives[-1].append(_times(text, alternatives[-1].pop(), token.line))
            case "mark", "(":
                opened.append((token.line, [[]]))
                if len(opened) > MOST_DEPTH:
                    raise ValueError(f"line {token.line}: more than {MOST_DEPTH} brackets are open")
            case "mark", "|":
                alternatives.append([])
            case "mark", ")":
                if len(opened) == 1:
                    raise ValueError(f"line {token.line}: ) without its (")
                opened.pop()
                opened[-1][1][-1].append(_any(alternatives))
            case "mark", _:
                alternatives[-1].append(ANYTHING)
            case "name", name:
                alternatives[-1].append(Part("name", name, line=token.line))
            case kind, text:
                alternatives[-1].append(_text(text[1:-1], token.line) if kind == "literal" else _set(text[1:-1], token.line))
        before = token.text if token.kind == "mark" else token.kind
    if len(opened) > 1:
        raise ValueError(f"line {opened[-1][0]}: ( without its )")
    return _any(opened[0][1])


def _any(alternatives: Sequence[Sequence[Part]]) -> Part:
    made = [parts[0] if len(parts) == 1 else Part("all", parts=tuple(parts)) if parts else NOTHING for parts in alternatives]
    return made[0] if len(made) == 1 else Part("any", parts=tuple(made))


def _times(text: str, part: Part, line: int) -> Part:
    least, comma, most = "".join(text.strip("{}").split()).partition(",")
    if most and int(most) < int(least):
        raise ValueError(f"line {line}: {text} ends before it begins")
    if text not in "*+?" and int(most or least) == 0 and (most or not comma):
        return NOTHING  # which llguidance does not accept
    return Part("times", text if text in "*+?" else f"{{{least}{comma}{most}}}", (part,))


def _text(body: str, line: int) -> Part:
    text = "".join(character for character, _ in _characters(body, line))
    # Else text could be taken for llguidance's schema directive.
    return Part("text", json.dumps(text).replace("%", "\\u0025"), first=_bit(text[0]) if text else 0)


def _set(body: str, line: int) -> Part:
    negated = body.startswith("^")
    found, characters = list[tuple[str, str]](), [*_characters(body[negated:], line)]
    while characters:
        first = last = characters.pop(0)[0]
        if characters[:1] == [("-", False)] and len(characters) > 1:
            last = characters[1][0]
            del characters[:2]
            if last < first:
                raise ValueError(f"line {line}: from {first!r} to {last!r} there is nothing")
        found.append((first, last))
    if not found and negated:
        return ANYTHING
    if not found:
        raise ValueError(f"line {line}: [] is a set of no characters: nothing fits")
    bits = 0
    for first, last in found:
        bits |= (2 << min(ord(last), OTHERS)) - (1 << min(ord(first), OTHERS))
    ranges = "".join(_exactly(first) if first == last else f"{_exactly(first)}-{_exactly(last)}" for first, last in found)
    return Part("set", f"/[{'^' * negated}{ranges}]/", first=(ALL & ~bits) | 1 << OTHERS if negated else bits)


def _bit(character: str) -> int:
    return 1 << min(ord(character), OTHERS)


def _exactly(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"


def _characters(text: str, line: int) -> Iterator[tuple[str, bool]]:
    """Each character, and whether it is written by an escape."""
    place = 0
    while place < len(text):
        found = CHARACTER.match(text, place)
        if found is None:
            raise ValueError(f"line {line}: {text[place : place + 2]} is no escape that is known here")
        code = next((int(digits, 16) for digits in found.groups()[:4] if digits), 0)
        if code in SURROGATES or code > LAST:
            raise ValueError(f"line {line}: {found[0]} is no character")
        escaped, plain = found[5], found[6]
        yield plain or (CONTROLS.get(escaped, escaped) if escaped else chr(code)), not plain
        place = found.end()


def _written(part: Part, new: dict[str, str]) -> str:
    match part.kind:
        case "name":
            return new[part.lark]
        case "all":
            return " ".join(_bracketed(one, new, ("any",)) for one in part.parts)
        case "any":
            return " | ".join(_written(one, new) for one in part.parts)
        case "times":
            return _bracketed(part.parts[0], new, ("any", "all", "times")) + part.lark
    return part.lark


def _bracketed(part: Part, new: dict[str, str], kinds: Sequence[str]) -> str:
    return f"({_written(part, new)})" if part.kind in kinds else _written(part, new)


class _Rules:
    """The rules, and which of them become terminals ("patterns"). Character sets are bit masks."""

    def __init__(self, bodies: dict[str, Part]) -> None:
        self.bodies = {name: _looped(name, body) for name, body in bodies.items()}
        self.patterns = self._regular()
        self._sets = dict.fromkeys(self.bodies, UNKNOWN)  # of each rule: see `_known`
        if "root" not in self.patterns:  # which nothing follows
            for name in [name for name in self.bodies if name not in self.patterns]:
                self._take_apart(name)
            self._settle()
            while none := [
                name
                for name, follow in self._follows().items()
                if name in self.patterns and (self._sets[name][2] & follow or not self._made_of_patterns(self.bodies[name]))
            ]:
                for name in none:
                    self.patterns.discard(name)
                    self._take_apart(name)
                self._settle()

    def reached(self) -> list[str]:
        """Names of root and all rules reachable from it."""
        found = {"root": None}
        todo = ["root"]
        while todo:
            for name in self.bodies[todo.pop()].names():
                if name.lark not in found:
                    found[name.lark] = None
                    todo.append(name.lark)
        return list(found)

    def _regular(self) -> set[str]:
        """Names of the rules that are not recursive, and use no recursive ones."""
        users, waiting = defaultdict(list), Counter[str]()
        for user, body in self.bodies.items():
            for used in {name.lark for name in body.names()}:
                users[used].append(user)
                waiting[user] += 1
        found = [name for name in self.bodies if not waiting[name]]
        for name in found:  # it grows while iterating
            for user in users[name]:
                waiting[user] -= 1
                if not waiting[user]:
                    found.append(user)
        return set(found)

    def _take_apart(self, name: str) -> None:
        """Moves parts of a non-terminal rule that can be terminals into rules of their own."""

        def within(part: Part) -> Part:
            if part.kind in ("any", "all", "times"):
                return replace(part, parts=tuple(map(alone, part.parts)))
            return part

        def alone(part: Part) -> Part:
            if part.kind not in ("any", "times") or not self._made_of_patterns(part):
                return within(part)
            made = f" {len(self.bodies)}"  # no name that a client can give
            self.bodies[made] = part
            self.patterns.add(made)
            self._sets[made] = UNKNOWN
            return Part("name", made)

        self.bodies[name] = within(self.bodies[name])

    def _made_of_patterns(self, part: Part) -> bool:
        return all(name.lark in self.patterns for name in part.names())

    def _settle(self) -> None:
        """Computes the sets of rules from those of the rules that they use, up to a fixed point."""
        changed, upwards = True, self.reached()[::-1]  # most are known before those that use them
        while changed:
            changed = False
            for name in upwards:
                found = self._known(self.bodies[name])
                if found != self._sets[name]:
                    self._sets[name], changed = found, True

    def _known(self, part: Part) -> Sets:
        """Whether a part may be empty, with what its texts begin (its FIRST set), and what may extend a text of it that might be
        complete."""
        match part.kind:
            case "name":
                return self._sets[part.lark]
            case "any":
                each = [*map(self._known, part.parts)]
                return (
                    any(empty for empty, _, _ in each),
                    _union(first for _, first, _ in each),
                    _union(tail for _, _, tail in each),
                )
            case "all":
                whole, first, tail = True, 0, 0
                for empty, its_first, its_tail in map(self._known, part.parts):
                    tail = its_tail | (tail | its_first if empty else 0)
                    first |= its_first if whole else 0
                    whole = whole and empty
                return whole, first, tail
            case "times":
                empty, first, tail = self._known(part.parts[0])
                return empty or part.omitted, first, tail | first if part.repeated or empty else tail
        return part.lark == NOTHING.lark, part.first, 0

    def _follows(self) -> dict[str, int]:
        """FOLLOW sets: what may come right after each name in the rules that are not terminals."""
        follows = dict.fromkeys(self.bodies, 0)
        plain = [name for name in self.reached() if name not in self.patterns]
        while True:
            before = dict(follows)
            for name in plain:
                self._go_on(self.bodies[name], follows[name], follows)
            if follows == before:
                return follows

    def _go_on(self, part: Part, after: int, follows: dict[str, int]) -> None:
        match part.kind:
            case "name":
                follows[part.lark] |= after
            case "any":
                for one in part.parts:
                    self._go_on(one, after, follows)
            case "all":
                for one in reversed(part.parts):
                    self._go_on(one, after, follows)
                    empty, first, _ = self._known(one)
                    after = first | (after if empty else 0)
            case "times":
                again = 0 if part.lark in ("?", "{1}", "{0,1}", "{1,1}") else self._known(part)[1]
                self._go_on(part.parts[0], after | again, follows)


def _looped(name: str, body: Part) -> Part:
    """A rule that is recursive only at its end, as a loop: `x ::= a x | b` is `a* b`."""
    if body.kind == "times" and body.lark == "?":
        alternatives: tuple[Part, ...] = (*(body.parts[0].parts if body.parts[0].kind == "any" else body.parts), NOTHING)
    else:
        alternatives = body.parts if body.kind == "any" else (body,)
    again = [one for one in alternatives if one.kind == "all" and (one.parts[-1].kind, one.parts[-1].lark) == ("name", name)]
    ends = [one for one in alternatives if one not in again]
    rounds = [one.parts[:-1] for one in again]
    others = [*ends, *(part for each in rounds for part in each)]
    if not again or not ends or any(one.lark == name for part in others for one in part.names()):
        return body
    return _any([[Part("times", "*", (_any(rounds),)), _any([[one] for one in ends])]])


def _union(sets: Iterator[int]) -> int:
    found = 0
    for one in sets:
        found |= one
    return found
