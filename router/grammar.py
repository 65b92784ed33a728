"""Structured output: builds grammars from client requests, checks that they are satisfiable, and encodes them for the shards.

The check compiles a grammar over single bytes; the shards do the same with the model's tokens: what compiles here within
`proto.grammar`'s limits compiles there. In a separate process, because llguidance crashes for some. Knows no HTTP and no tokens.
"""

import asyncio
import itertools
import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import llguidance

from ..proto.grammar import limits
from . import ebnf
from .request import Grammar, Overloaded, Refused
from .worker_processes import Busy, Died, TimedOut, WorkerProcesses, serve

KINDS = ("json_schema", "regex", "lark", "choice")
MOST_CHARACTERS = 65_536  # of a grammar's source
MOST_WORK = 0.5  # CPU seconds that compiling may take
MOST_SECONDS = 1.0  # that a client waits for that
MOST_VISITS = 100_000  # of parts of a schema, in search of an end to its references
KEPT_GRAMMARS, KEPT_CHARACTERS = 256, 4_000_000  # limits of the cache of checked grammars
LONGEST = 5.0  # seconds after which the compiling process is killed: it hangs, or the machine is very busy
DOUBT = 60.0  # seconds for which a grammar that killed its process is remembered
LOOK = 0.02  # seconds between checks of the CPU time
PROCESSES = 2
# Bytes of the stack on which it is compiled. The shards have more, so what is too deeply nested for them ends a process here.
STACK = 1 << 21
SPECIAL = re.compile(r"<[^<>\s]+>")  # in a lark grammar: perhaps a special token's name
NUMBERED = re.compile(r"<\[([0-9]{1,9})\]>")
PART = re.compile(r"%json\s*")  # in a lark grammar: a schema follows
# Between the parts of a JSON text: none, a space, or a line's end and an indentation. Without a bound, a model may go on with
# spaces for ever, and small models do.
WHITESPACE = r" |\n[ \t]{0,32}"
SLOW = f"it takes more than {MOST_WORK:g} s to compile; make it simpler"
HALF = "it has half of a surrogate pair, which is no character"
BYTES = 256
LEAST, MOST = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
BOUNDING = {*LEAST, *MOST, "allOf"}  # keywords without which a schema has no numeric bounds
LOWEST = -(2**63) + 1024  # lowest bound of an integer that llguidance accepts; generators write -(2**63)
HIGHEST = 2**63 - 1  # it treats every integer beyond as this one
FARTHEST = 1e17  # bound of a number; generators write the largest of 32 or 64 bits
NEAR, NEAREST = 1e-12, 1e-30  # how near a number comes to an excluded one: relative, and to 0
EXACT = 2**53  # integers beyond lose digits in llguidance
SCHEMAS = {"items", "additionalProperties"}  # keywords of JSON Schema: of a schema,
LISTS_OF_SCHEMAS = {"allOf", "anyOf", "oneOf", "prefixItems"}
NAMED_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions"}
# Keywords that may each name properties of one object ...
COMPOSING = ("properties", "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependencies")
# ... and those by which an object says of other properties whether it has any.
OTHER_PROPERTIES = {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties"}
ANY_NAME: tuple[Any, ...] = ({}, True, {"type": "string"})  # of a property
DIGITS = 10  # an index of a list that fits into a body has fewer
SCALARS = ("string", "number", "integer", "boolean", "null")

Known = dict[int, dict[str, float]]  # bounds of schemas, by id
Verdict = tuple[str, Grammar]  # the problem with a grammar, if any, and the grammar that the shards get instead of it


def json_schema(schema: Mapping[str, Any] | bool) -> Grammar:
    """A JSON text that validates against the schema. Raises Refused if it is too large, or nested too deeply."""
    if too_large(schema):
        raise Refused(f"`grammar` must have at most {MOST_CHARACTERS} characters", "grammar")
    try:
        meant = {} if schema is True else objects(schema)
        return Grammar("json_schema", json.dumps(meant, ensure_ascii=False, separators=(",", ":")))
    except RecursionError:
        raise Refused("`grammar` is not possible: it is nested too deeply", "grammar") from None


def too_large(schema: Any) -> bool:
    """Whether the schema's JSON has more characters than a grammar may have. Looks at no more of it than that: all else that is
    done with a schema here takes a few us of the event loop for each of its parts."""
    left, parts = MOST_CHARACTERS, [schema]
    while parts and left >= 0:
        part = parts.pop()
        if isinstance(part, Mapping):
            left -= max(2, 1 + sum(map(len, part)) + 4 * len(part))  # quotes, a colon, and a comma or the last bracket
            parts += part.values()
        elif isinstance(part, list):
            left -= max(2, 1 + len(part))
            parts += part
        else:
            left -= len(part) + 2 if isinstance(part, str) else 1
    return left < 0


def objects(schema: Any) -> Any:
    """The schema, with bounds that llguidance can enforce, and with type "object" wherever it has properties. JSON Schema would
    accept any number there, if no type is given; nobody who asks for an answer means that, and text-generation-inference's clients
    leave the type out. zod's `propertyNames` of type string says nothing, nor does Swagger's `uniqueItems` that is false, and
    llguidance doesn't know these keywords.

    Objects get no properties but those that are named, unless the schema says so, as in text-generation-inference and in vLLM: what
    is generated validates all the same, and models don't go on with properties of their own. A schema stays open as a whole if
    subschemas may name properties of the same object: to close each would forbid what the others name, or make alternatives of
    `oneOf` exclude each other that don't.
    """
    return _changed(schema, partial(_meant, {}, not any(map(_composed, _all(schema)))))


def _meant(known: Known, close: bool, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The transformation of `objects`, for one schema without its subschemas."""
    meant = _bounded(schema, known)
    if meant.get("propertyNames") in ANY_NAME:
        del meant["propertyNames"]
    if meant.get("uniqueItems") is False:
        del meant["uniqueItems"]
    if "properties" not in meant:
        return meant
    if close and _open_by_default(meant):
        meant["additionalProperties"] = False
    return meant if meant.keys() & {"type", "$ref"} else {"type": "object", **meant}


def _composed(schema: Mapping[str, Any]) -> bool:
    """Whether subschemas may name properties of the same object."""
    named = [name for name in COMPOSING if name in schema]
    return len(named) > 1 or any(len(parts_of(schema, name)) > 1 for name in ("allOf", "oneOf"))


def _open_by_default(schema: Mapping[str, Any]) -> bool:
    """Whether it names all properties that it asks for, and says nothing of others."""
    properties, required = schema["properties"], schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list) or schema.keys() & OTHER_PROPERTIES:
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def _changed(schema: Any, change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Any:
    """The schema, changed, and then all its subschemas."""
    if not isinstance(schema, Mapping):
        return schema
    meant = change(schema)
    for name in SCHEMAS & meant.keys():
        meant[name] = _changed(meant[name], change)
    for name in LISTS_OF_SCHEMAS & meant.keys():
        meant[name] = [_changed(one, change) for one in meant[name]] if isinstance(meant[name], list) else meant[name]
    for name in NAMED_SCHEMAS & meant.keys():
        if isinstance(meant[name], Mapping):
            meant[name] = {key: _changed(one, change) for key, one in meant[name].items()}
    return meant


def _all(schema: Any) -> list[Mapping[str, Any]]:
    """The schema and all its subschemas."""
    found: list[Mapping[str, Any]] = []

    def seen(one: Mapping[str, Any]) -> dict[str, Any]:
        found.append(one)
        return dict(one)

    _changed(schema, seen)
    return found


def _bounded(schema: Mapping[str, Any], known: Known) -> dict[str, Any]:
    """The schema, with its own numeric bounds as llguidance can enforce them: where it had others they become a little narrower."""
    if not schema.keys() & BOUNDING:
        return dict(schema)
    bounds = {name: _inward(name, bound) for name, bound in _bounds(schema).items()}
    types = schema.get("type", "number")
    whole = "number" not in (types if isinstance(types, list) else [types])
    for name in bounds:
        if name in LEAST:
            bounds[name] = max(bounds[name], LOWEST if whole else -FARTHEST)
        elif not whole:
            bounds[name] = min(bounds[name], FARTHEST)
    if not whole:
        every = _narrowest([bounds, *(_bounds_of_all(part, known) for part in parts_of(schema, "allOf"))])
        bounds = _apart(bounds, every)
    others = {name: value for name, value in schema.items() if name not in LEAST | MOST or not _is_number(value)}
    return others | bounds


def _apart(bounds: dict[str, float], every: Mapping[str, float]) -> dict[str, float]:
    """A schema's own bounds, moved away from exclusive ones that llguidance lets through: above 2 and up to 2.5, it allows 2, too;
    not above 2 alone, or with integers. every: the bounds of everything that applies together."""
    low, high = every.get("exclusiveMinimum", -1), every.get("exclusiveMaximum", 1)
    least = max((every[name] for name in LEAST & every.keys()), default=-math.inf)
    most = min((every[name] for name in MOST & every.keys()), default=math.inf)
    if 0 <= low <= FARTHEST and low % 1 == 0 and most < low + 1:
        bounds["minimum"] = max(least, low * (1 + NEAR) or NEAREST)
        bounds.pop("exclusiveMinimum", None)
    if -FARTHEST <= high <= 0 and high % 1 == 0 and least > high - 1:
        bounds["maximum"] = min(most, high * (1 + NEAR) or -NEAREST)
        bounds.pop("exclusiveMaximum", None)
    return bounds


def _bounds(schema: Any) -> dict[str, float]:
    """A schema's own numeric bounds."""
    names = (LEAST | MOST) & schema.keys() if isinstance(schema, Mapping) else ()
    return {name: bound for name in names if _is_number(bound := schema[name])}


def _bounds_of_all(schema: Any, known: Known) -> dict[str, float]:
    """The numeric bounds of a schema and its `allOf` parts. known: results so far."""
    if id(schema) not in known:
        parts = parts_of(schema, "allOf") if isinstance(schema, Mapping) else ()
        found = _narrowest([_bounds(schema), *(_bounds_of_all(part, known) for part in parts)])
        known[id(schema)] = found
    return known[id(schema)]


def _narrowest(some: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The narrowest of each bound."""
    names = {name for bounds in some for name in bounds}
    each = {name: [bounds[name] for bounds in some if name in bounds] for name in names}
    return {name: max(found) if name in LEAST else min(found) for name, found in each.items()}


def _inward(name: str, bound: float) -> float:
    """A number that llguidance represents exactly, within this bound and as near as possible. It holds all of them as floats of 64
    bits, treats long exclusive bounds as inclusive, and is off by one bit for long ones written with a point."""
    if not EXACT <= abs(bound) < HIGHEST + (name == "exclusiveMaximum"):
        return bound
    bound, out = int(bound), name.startswith("exclusive")  # so long that it has no fraction
    near, far = float(bound), math.inf if name in LEAST else -math.inf
    within = near >= bound + out if name in LEAST else near <= bound - out
    return int(near if within else math.nextafter(near, far))


def _is_number(value: object) -> bool:
    """Whether it is a number. Booleans are not, though Python counts with them; JSON Schema before draft 6 has boolean exclusive
    bounds."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def json_object() -> Grammar:
    """Any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> Grammar:
    """A text that the pattern matches from its beginning to its end."""
    return Grammar("regex", pattern)


def within(grammar: Grammar) -> str:
    """A JSON schema grammar as a part of one in Lark."""
    schema = json.loads(grammar.source)
    if isinstance(schema, dict):  # as in `written`
        schema = {"x-guidance": {"whitespace_pattern": WHITESPACE}} | schema
    return f"%json {json.dumps(schema, ensure_ascii=False, separators=(',', ':'))}"


def lark(text: str) -> Grammar:
    """A text derived from the rule `start`, in llguidance's dialect of Lark (EBNF)."""
    return Grammar("lark", text)


def rules(text: str) -> Grammar:
    """A text derived from rules: in Lark, or in EBNF, recognized by `root ::= ...`."""
    return Grammar("ebnf", text) if ebnf.is_ebnf(text) else lark(text)


def choice(options: Sequence[str]) -> Grammar:
    """One of these texts."""
    return Grammar("choice", json.dumps(list(options), ensure_ascii=False))


def written(grammar: Grammar) -> str:
    """The grammar for the shards, in llguidance's own form. Raises ValueError if its source is not JSON where it has to be."""
    match grammar.kind:
        case "json_schema":
            options: Any = {"whitespace_pattern": WHITESPACE} if grammar.source.lstrip().startswith("{") else None
            return llguidance.LLMatcher.grammar_from_json_schema(grammar.source, defaults=options)
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(grammar.source)
        case "lark":
            return llguidance.LLMatcher.grammar_from_lark(grammar.source)
        case "choice":
            return llguidance.LLMatcher.grammar_from_regex("|".join(map(_literally, _options(grammar.source))))
    raise ValueError(f"its kind must be one of {', '.join(KINDS)}. Given: {grammar.kind}")


class Grammars:
    """Checks grammars in worker processes, each once as long as the result is cached."""

    def __init__(self, added_id: Callable[[str], int | None], is_added: Callable[[int], bool] = lambda id: False) -> None:
        """added_id: the id of an added token with this text, special or not, if there is one; is_added: whether it is one's id."""
        self.found = 0  # cache hits
        self.compiled = 0
        self._added_id = added_id
        self._is_added = is_added
        self._workers = WorkerProcesses("penstock.router.grammar", PROCESSES)
        self._kept: OrderedDict[Grammar, asyncio.Task[Verdict]] = OrderedDict()  # checks by grammar, the most recent last
        self._size = 0  # characters of their sources

    async def check(self, grammar: Grammar) -> Grammar:
        """The grammar, of a kind that `written` takes. Raises Refused if no answer could satisfy it, or only at too high a cost;
        Overloaded if it could not be checked."""
        if len(grammar.source) > MOST_CHARACTERS:
            raise Refused(f"`grammar` must have at most {MOST_CHARACTERS} characters. Given: {len(grammar.source)}", "grammar")
        try:
            await self._workers.start()
            async with asyncio.timeout(MOST_SECONDS):
                problem, meant = await asyncio.shield(self._ask(grammar))
        except Busy:
            raise Overloaded("too many grammars are being compiled") from None
        except TimeoutError:  # perhaps only the machine is busy: a retry gets the result found meanwhile
            problem, meant = SLOW, grammar
        if problem:
            raise Refused(f"`grammar` is not possible: {problem}", "grammar")
        return meant

    def _ask(self, grammar: Grammar) -> "asyncio.Task[Verdict]":
        verdict = self._kept.get(grammar)
        if verdict is not None:
            self.found += 1
            self._kept.move_to_end(grammar)
            return verdict
        self.compiled += 1
        verdict = self._kept[grammar] = asyncio.create_task(self._verdict(grammar))
        verdict.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody waits for it any more
        self._size += len(grammar.source)
        while len(self._kept) > 1 and (len(self._kept) > KEPT_GRAMMARS or self._size > KEPT_CHARACTERS):
            self._forget(next(iter(self._kept)))
        return verdict

    def _forget(self, grammar: Grammar) -> None:
        if self._kept.pop(grammar, None) is not None:
            self._size -= len(grammar.source)

    async def _verdict(self, grammar: Grammar) -> Verdict:
        """Runs the check; it goes on when the client was told to retry, who then gets its result. Raises Busy."""
        names = SPECIAL.findall(grammar.source) if grammar.kind == "lark" else ()
        specials = [name for name in names if self._added_id(name) is not None or self._numbers(name)]
        job = json.dumps([grammar.kind, grammar.source, specials]).encode()
        try:
            problem, spent, kind, source = json.loads(await self._workers.ask(job, LONGEST, MOST_SECONDS / 2))
        except (Busy, TimedOut):
            self._forget(grammar)
            raise Busy from None
        except Died:  # or something kills every process that is started
            asyncio.get_running_loop().call_later(DOUBT, self._forget, grammar)
            return "the library that compiles grammars fails for it; make it simpler", grammar
        return problem or (SLOW if spent > MOST_WORK else ""), Grammar(kind, source)

    def _numbers(self, name: str) -> bool:
        """Whether this is how a grammar names an added token by its id, as it must where the text is not between < and >."""
        match = NUMBERED.fullmatch(name)
        return match is not None and self._is_added(int(match[1]))


def verdict(grammar: Grammar, specials: Sequence[str] = ()) -> Verdict:
    """Checks a grammar, converting EBNF to Lark first; see `problem`."""
    if grammar.kind != "ebnf":
        return problem(grammar, specials), grammar
    try:
        grammar.source.encode()
        meant = lark(ebnf.lark(grammar.source))
    except UnicodeEncodeError:
        return HALF, grammar
    except ValueError as error:
        return str(error), grammar
    if len(meant.source) > MOST_CHARACTERS:
        return f"it has more than {MOST_CHARACTERS} characters when each is written as llguidance wants it", grammar
    return problem(meant), meant


def problem(grammar: Grammar, specials: Sequence[str] = ()) -> str:
    """What is wrong with the grammar; "": nothing. specials: special tokens that it may name. Runs here and now: the library may
    take a long time, or crash the process."""
    try:
        grammar.source.encode()
        source = written(grammar)
        if not all(_Schema(schema).ends for schema in _schemas(grammar)):
            return "the schema refers to itself without end: no text of finite length validates"
        each = itertools.chain.from_iterable(map(_all, _schemas(grammar)))
        for said in itertools.chain.from_iterable(map(_lost, each)):
            return said
    except UnicodeEncodeError:
        return HALF
    except RecursionError:
        return "it is nested too deeply"
    except ValueError as error:
        return str(error)
    for name in filter(NUMBERED.fullmatch, specials):  # here are no tokens with such ids
        source = source.replace(name, f"<{name[2:-2]}>")
    names = tuple(f"<{name[2:-2]}>" if NUMBERED.fullmatch(name) else name for name in specials)
    matcher = llguidance.LLMatcher(_byte_tokenizer(names), source, log_level=0, limits=limits())
    said = _said(matcher.get_error())
    if said:
        return said
    allowed = int.from_bytes(matcher.compute_bitmask(), "little")
    if matcher.is_error():
        return _said(matcher.get_error()) if "too" in matcher.stop_reason().lower() else "there is no text that it allows"
    first = (allowed & -allowed).bit_length() - 1
    if 0 <= first < BYTES and not matcher.consume_token(first):  # some that are too large are only found to be so in use
        return _said(matcher.get_error())
    return ""


class _Bytes:
    """A tokenizer whose tokens are the bytes, an end and special tokens, as llguidance takes it."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = BYTES

    def __init__(self, specials: Sequence[str]) -> None:
        self.tokens = [bytes([byte]) for byte in range(BYTES)] + [b"<end>"] + [name.encode() for name in specials]
        self.special_token_ids = list(range(BYTES, len(self.tokens)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@lru_cache(maxsize=16)
def _byte_tokenizer(specials: tuple[str, ...]) -> llguidance.LLTokenizer:
    wrapper: Any = _Bytes(list(dict.fromkeys(specials)))
    return llguidance.LLTokenizer(wrapper)


def _said(error: str) -> str:
    """llguidance's message in one line, without the text of the grammar."""
    return " ".join(line.strip() for line in error.splitlines() if not re.match(r"\s*(\d+ \||\^|<state>)", line)).strip()


def _options(source: str) -> list[str]:
    options = json.loads(source)
    if not isinstance(options, list) or not options or not all(isinstance(option, str) for option in options):
        raise ValueError("a choice is a list of strings, at least one")
    return options


def _literally(text: str) -> str:
    """A pattern that matches only this text."""
    text.encode()  # llguidance would misread half of a surrogate pair
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _schemas(grammar: Grammar) -> Iterator[Any]:
    """The JSON schemas in a grammar. Raises ValueError if its source is not JSON where it has to be."""
    if grammar.kind == "json_schema":
        yield json.loads(grammar.source)
    for part in PART.finditer(grammar.source) if grammar.kind == "lark" else ():
        if "//" in grammar.source[grammar.source.rfind("\n", 0, part.start()) + 1 : part.start()]:
            continue  # a comment, or what llguidance has to find out
        with suppress(ValueError):  # within quotes, perhaps; llguidance reports it
            yield json.JSONDecoder().raw_decode(grammar.source, part.end())[0]


def _lost(schema: Mapping[str, Any]) -> Iterator[str]:
    """Problems with a schema's own integers, for which llguidance would allow others."""
    for number in _integers([schema.get("const"), schema.get("enum")]):
        if abs(number) > EXACT:
            yield f"{number} can't be kept to its last digit: write it as a string"
    for name in LEAST & schema.keys():
        if _is_number(schema[name]) and schema[name] >= HIGHEST:
            yield f"{name} {schema[name]} is beyond integers of 64 bits"


def _integers(value: Any) -> Iterator[int]:
    """All integers in a JSON value."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _integers(part)


class _Schema:
    """Checks that a schema has finite instances: a required property of the schema's own kind never ends.

    Everything else that makes a schema unsatisfiable llguidance finds. What can't be followed here counts as possible.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._ending: set[str] = set()  # references known to have finite instances
        self._visits = itertools.count()

    @property
    def ends(self) -> bool:
        """Whether the schema has finite instances. Each round may find references that are finite because others are."""
        while True:
            known = len(self._ending)
            if self._ends(self._root, frozenset()):
                return True
            if len(self._ending) == known:
                return False

    def _ends(self, schema: Any, open_references: frozenset[str]) -> bool:
        if next(self._visits) > MOST_VISITS:
            raise ValueError("too many of the schema's references lead to each other")
        if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
            return True
        if "$ref" in schema and not self._reference_ends(schema["$ref"], open_references):
            return False
        if not all(self._ends(part, open_references) for part in parts_of(schema, "allOf")):
            return False
        for name in ("anyOf", "oneOf"):
            parts = parts_of(schema, name)
            if parts and not any(self._ends(part, open_references) for part in parts):
                return False
        return all(self._ends(part, open_references) for part in _needed(schema))

    def _reference_ends(self, reference: Any, open_references: frozenset[str]) -> bool:
        if not isinstance(reference, str) or reference in self._ending:
            return True
        if reference in open_references:
            return False
        found = self._ends(target(self._root, reference), open_references | {reference})
        if found:
            self._ending.add(reference)
        return found


def target(root: Any, reference: str) -> Any:
    """What a schema's reference `#/$defs/x` leads to; None: it can't be followed here."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    place = root
    for key in reference.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list):
            place = place[int(key)] if key.isdecimal() and len(key) < DIGITS and int(key) < len(place) else None
        else:
            place = place.get(key) if isinstance(place, Mapping) else None
    return place


def parts_of(schema: Mapping[str, Any], name: str) -> list[Any]:
    """A schema's list of this name; [] if there is none."""
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _needed(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The parts without which nothing validates, unless a value of a simpler type would."""
    types = schema.get("type", SCALARS)
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or any(name in SCALARS for name in types):
        return
    if "array" not in types:
        properties, required = schema.get("properties"), parts_of(schema, "required")
        if isinstance(properties, dict):
            yield from (properties[name] for name in required if isinstance(name, str) and name in properties)
    elif "object" not in types:
        least = schema.get("minItems", 0)
        first = parts_of(schema, "prefixItems")
        if isinstance(least, int) and least:
            yield from first[:least]
            if least > len(first):
                yield schema.get("items", True)


def _work(job: bytes) -> bytes:
    """The worker's job for one grammar, on a thread with a stack of a known size. If it takes too much CPU time the thread is
    abandoned."""
    kind, source, specials = json.loads(job)
    found = [("", Grammar(kind, source))]
    thread = threading.Thread(target=lambda: found.append(verdict(found[0][1], specials)), daemon=True)
    began = time.process_time()
    thread.start()
    while thread.is_alive() and time.process_time() - began <= MOST_WORK:
        thread.join(LOOK)
    said, meant = found[0 if thread.is_alive() else 1]
    return json.dumps([said, time.process_time() - began, meant.kind, meant.source]).encode()


if __name__ == "__main__":
    threading.stack_size(STACK)
    serve(_work)
