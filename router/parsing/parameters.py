"""Analyses the JSON schema of a tool's parameters: which types they may have, and which can be written without JSON."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..grammar import parts_of, target

Json = Mapping[str, Any]
Types = frozenset[str]
TYPES: Types = frozenset({"string", "number", "boolean", "null", "array", "object"})  # an integer is a number
STRING: Types = frozenset({"string"})
KINDS = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null", list: "array", dict: "object"}
REMARKS = {"title", "description", "default", "examples", "$defs", "definitions", "$schema", "$comment", "$id"}
MOST_SHARED = 16_384  # characters of definitions that are repeated where each parameter has a grammar of its own
EITHER = {"anyOf", "oneOf"}
LISTING = {"const", "enum"}
# Keywords that restrict values in ways that only a validator, and the grammar of a whole JSON text, implements.
SUBTLE = {
    *("not", "if", "then", "else", "pattern", "format", "$dynamicRef", "$recursiveRef", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
}
ELSEWHERE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)')  # a reference to something other than a definition


class Parameters:
    """The parameters of one tool. Schemas come from clients: each reference is followed once per query, so that none takes long."""

    def __init__(self, schema: Any) -> None:
        self.schema = schema  # of all parameters together
        self._referred: dict[str, Types | None] = {}  # types behind references
        self._found: dict[str, Types] = {}  # of parameters, by name

    def declares(self, name: str) -> bool:
        """Whether the schema mentions the parameter."""
        try:
            return self._types(self.schema, lambda level: TYPES if name in _properties(level) else None, {}) is not None
        except RecursionError:
            return False

    def types(self, name: str) -> Types:
        """The types that the parameter may have; all, where the schema says nothing."""
        if name not in self._found:
            self._found[name] = self._find_types(name)
        return self._found[name]

    def _find_types(self, name: str) -> Types:
        def own(level: Json) -> Types | None:
            properties = _properties(level)
            value = properties[name] if name in properties else level.get("additionalProperties")
            return self.types_of(value) if isinstance(value, Mapping) else None

        try:
            return self._types(self.schema, own, {}) or TYPES
        except RecursionError:
            return TYPES

    def types_of(self, schema: Any) -> Types:
        """The types that a value of a part of the tool's schema may have. Raises RecursionError."""
        return self._types(schema, _own_types, self._referred) or TYPES

    @property
    def plain(self) -> dict[str, tuple[Any, bool]] | None:
        """Each parameter's schema and whether it is required; None if valid arguments need more than that. Raises
        RecursionError."""
        found = self._merged(self.schema)
        if found is None or found.keys() & (SUBTLE | EITHER | LISTING) or ELSEWHERE.search(json.dumps(self.schema)):
            return None
        required = {name for name in parts_of(found, "required") if isinstance(name, str)}
        others = sorted(required - _properties(found).keys())
        declared = _properties(found) | dict.fromkeys(others, found.get("additionalProperties", True))
        if any(not isinstance(value, dict | bool) or (value is False and name in required) for name, value in declared.items()):
            return None
        shared = {key: self.schema[key] for key in ("$defs", "definitions") if key in self.schema}
        referring = {name for name, value in declared.items() if isinstance(value, dict) and '"$ref": ' in json.dumps(value)}
        if len(referring) * len(json.dumps(shared)) > MOST_SHARED:
            return None
        return {
            name: ({**value, **shared} if name in referring else value, name in required)
            for name, value in declared.items()
            if value is not False
        }

    def listed(self, schema: Any) -> list[Any] | None:
        """All values that a part of the schema allows, if it lists them."""
        found: list[Any] = []
        for part in self.alternatives(schema):
            values = None if part is None else _listed(part)
            if values is None:
                return None
            found += values
        return found

    def part(self, schema: Any, key: str | None) -> Any:
        """The schema of an object's value with this key; None: of a list's items. {} if nothing is said of it."""
        for found in self.alternatives(schema):
            inner = None if found is None else found.get("items") if key is None else _properties(found).get(key)
            if isinstance(inner, Mapping):
                return inner
            inner = None if found is None or key is None else found.get("additionalProperties")
            if isinstance(inner, Mapping):
                return inner
        return {}

    def lengths(self, schema: Any) -> tuple[int, int | None] | None:
        """The minimum and maximum length of strings that a part of the schema allows freely; None if there are none."""
        for part in self.alternatives(schema):
            if part is not None and "string" in _own_types(part) and not part.keys() & LISTING:
                return part.get("minLength", 0), part.get("maxLength")
        return None

    def alternatives(self, schema: Any) -> list[Json | None]:
        """Alternatives, without references, one of which a value of the schema matches; None stands for one that is too complex."""
        found = self._merged(schema)
        either = EITHER & found.keys() if found else EITHER
        if found is None or not either:
            return [_simple(found)]
        [key, *others] = either
        parts = parts_of(found, key)
        ambiguous = key == "oneOf" and sum("string" in self.types_of(part) for part in parts) > 1
        if others or ambiguous or found.keys() & {"type", "minLength", "maxLength", *LISTING, *SUBTLE}:
            return [None]
        return [_simple(self._merged(part)) for part in parts]

    def _merged(self, schema: Any) -> Json | None:
        """A schema, what it refers to and all of its `allOf` merged, without annotations; None if they cannot be merged."""
        levels = [*self._levels(schema, set())]
        found: dict[str, Any] = {}
        properties: dict[str, Any] = {}
        required: list[Any] = []
        for level in levels:
            for key, value in level.items():
                if key == "properties" and isinstance(value, dict):
                    if any(properties.setdefault(name, one) != one for name, one in value.items()):
                        return None
                    found[key] = properties
                elif key == "required" and isinstance(value, list):
                    required += value
                    found[key] = required
                elif key not in REMARKS and found.setdefault(key, value) != value:
                    return None
        closed = [level for level in levels if "additionalProperties" in level]  # it counts only the properties of its own level
        return None if any(_properties(level).keys() != _properties(found).keys() for level in closed) else found

    def _levels(self, schema: Any, seen: set[str]) -> Iterator[Json]:
        """The schemas that a value must match at the same time: itself, its reference, its `allOf`."""
        if not isinstance(schema, Mapping):
            return
        yield {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            yield from self._levels(target(self.schema, reference), seen)
        for part in parts_of(schema, "allOf"):
            yield from self._levels(part, seen)

    def _types(self, schema: Any, own: Callable[[Json], Types | None], seen: dict[str, Types | None]) -> Types | None:
        """The types that a schema allows, given what each level says on its `own`; None where none says anything. `seen`: by
        reference."""
        if not isinstance(schema, Mapping):
            schema = {}
        found = [own(schema)]
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference not in seen:
                seen[reference] = None
                seen[reference] = self._types(target(self.schema, reference), own, seen)
            found.append(seen[reference])
        found += [self._types(part, own, seen) for part in parts_of(schema, "allOf")]
        for key in EITHER:
            either = [types for part in parts_of(schema, key) if (types := self._types(part, own, seen)) is not None]
            found += [frozenset().union(*either)] if either else []
        known = [types for types in found if types is not None]
        return frozenset.intersection(*known) if known else None


def _own_types(level: Json) -> Types:
    kinds = level.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    found = TYPES
    if isinstance(kinds, list):
        found = frozenset("number" if kind == "integer" else kind for kind in kinds if isinstance(kind, str))
    if LISTING & level.keys():
        values = [level["const"]] if "const" in level else parts_of(level, "enum")
        found &= {KINDS[type(value)] for value in values}
    return found


def _simple(schema: Json | None) -> Json | None:
    """The schema, if types, lists and lengths describe its values completely."""
    if schema is None or schema.keys() & (SUBTLE | EITHER):
        return None
    listing = schema.keys() & LISTING
    if listing and (len(listing) > 1 or schema.keys() - {"type", *listing}):  # then perhaps not every listed value is allowed
        return None
    lengths = [schema[key] for key in ("minLength", "maxLength") if key in schema]
    return schema if all(isinstance(length, int) for length in lengths) else None


def _listed(schema: Json) -> list[Any] | None:
    if not LISTING & schema.keys():
        return [None] if schema.get("type") == "null" else None
    types = _own_types(schema)
    values = [schema["const"]] if "const" in schema else parts_of(schema, "enum")
    return [value for value in values if KINDS[type(value)] in types]


def _properties(level: Json) -> dict[str, Any]:
    found = level.get("properties")
    return found if isinstance(found, dict) else {}
