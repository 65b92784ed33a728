"""Structured output: the format that an answer must have, in all the fields by which clients of OpenAI's API ask for it, as a
`Grammar`.

Knows JSON bodies and the kinds of grammars. Whether a grammar can be honoured is decided elsewhere.
"""

import json
from typing import Any

import msgspec

from .. import grammar
from ..request import Grammar, Refused
from .errors import shown


class Format(msgspec.Struct, kw_only=True):
    """Fields that ask for structured output: OpenAI's, vLLM's and SGLang's."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None  # this and the next two are SGLang's
    json_schema: Any = None
    ebnf: str | None = None


def grammar_of(body: Format) -> Grammar | None:
    """The grammar of the answer; None if it is free. Raises Refused."""
    asked = [(name, one) for name in _given(body) if (one := _grammar(name, getattr(body, name))) is not None]
    if len(asked) > 1:
        raise contradiction(asked[0][0], asked[1][0])
    return asked[0][1] if asked else None


def contradiction(one: str, other: str) -> Refused:
    """The refusal of two fields that both set the answer's format."""
    return Refused(f"`{one}` and `{other}` both say what the answer must be: send one of them", other)


def format_name(body: Format) -> str:
    """The field that sets the answer's format, for error messages; "tools" if none does."""
    return next(iter(_given(body)), "tools")


def _given(body: Format) -> list[str]:
    return [name for name in Format.__struct_fields__ if getattr(body, name) is not None]


def _json_schema(schema: Any, name: str) -> Grammar:
    """A grammar of answers that are valid under the schema. `name`: the field, for error messages."""
    if isinstance(schema, str):  # vLLM's clients may send it as text
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise Refused(f"`{name}` is no JSON: {error}", name) from error
    if not isinstance(schema, dict | bool):
        raise Refused(f"`{name}` must be a JSON schema: an object", name)
    try:
        return grammar.json_schema(schema)
    except Refused as refused:
        raise Refused(str(refused).replace("`grammar`", f"`{name}`"), name) from None


def _grammar(name: str, value: Any) -> Grammar | None:
    match name:
        case "response_format":
            return _response_format(value)
        case "structured_outputs":
            return _structured(value)
    return _constraint(name.removeprefix("guided_"), value, name)


def _response_format(given: dict[str, Any]) -> Grammar | None:
    """`response_format`: OpenAI's, and TGI's, where `value` holds the schema or the expression."""
    match given.get("type"):
        case "text":
            return None
        case "json_object" if "value" not in given:
            return grammar.json_object()
        case "json_schema" if "value" not in given:
            wrapped = given.get("json_schema")
            if not isinstance(wrapped, dict) or "schema" not in wrapped:
                raise Refused("`response_format.json_schema.schema` is missing", "response_format.json_schema.schema")
            return _json_schema(wrapped["schema"], "response_format.json_schema.schema")
        case "json_schema" if isinstance(given["value"], dict) and "schema" in given["value"]:  # beside its name, as TGI has it
            return _json_schema(given["value"]["schema"], "response_format.value.schema")
        case "json" | "json_object" | "json_schema":
            return _json_schema(given.get("value"), "response_format.value")
        case "regex":
            return _constraint("regex", given.get("value"), "response_format.value")
    raise Refused(
        f'`response_format.type` must be one of "text", "json_object", "json_schema". Given: {shown(given.get("type"))}',
        "response_format.type",
    )


def _structured(given: dict[str, Any]) -> Grammar | None:
    """vLLM's `structured_outputs`: exactly one constraint."""
    found = {kind: value for kind, value in given.items() if value is not None and value is not False}
    constraints = [kind for kind in ("json", "regex", "choice", "grammar", "json_object") if kind in found]
    others = sorted(found.keys() - set(constraints) - {"disable_any_whitespace", "disable_fallback", "whitespace_pattern"})
    if others:
        raise Refused(f"`structured_outputs.{others[0]}` is not supported", f"structured_outputs.{others[0]}")
    if len(constraints) != 1:
        raise Refused(
            "`structured_outputs` must have exactly one of json, regex, choice, grammar, json_object", "structured_outputs"
        )
    [kind] = constraints
    asked = _constraint(kind, found[kind], f"structured_outputs.{kind}")
    name = "disable_any_whitespace" if found.get("disable_any_whitespace") else "whitespace_pattern"
    pattern = "" if name == "disable_any_whitespace" else found.get(name)
    if pattern is None or asked.kind != "json_schema":
        return asked
    return _spaced(asked, pattern, f"structured_outputs.{name}")


def _spaced(asked: Grammar, pattern: Any, name: str) -> Grammar:
    """A schema with this whitespace pattern for its answers, beside its own options. `name`: the field that asks for it. Raises
    Refused."""
    if not isinstance(pattern, str):
        raise Refused(f"`{name}` must be a string", name)
    schema = json.loads(asked.source)
    own = {} if schema is False else schema.get("x-guidance", {})
    if schema is False or not isinstance(own, dict):  # nothing fits the one, and the other is refused for what it is
        return asked
    if own.get("whitespace_pattern", pattern) != pattern or (pattern and own.get("whitespace_flexible") is False):
        raise Refused(f"`{name}` contradicts the schema's own `x-guidance`: leave one of them out", name)
    return _json_schema({**schema, "x-guidance": own | {"whitespace_pattern": pattern}}, name)


def _constraint(kind: str, value: Any, name: str) -> Grammar:
    """The grammar of one kind of constraint. `name`: the field, for error messages."""
    match kind:
        case "json" | "json_schema":
            return _json_schema(value, name)
        case "json_object":
            return grammar.json_object()
        case "choice":
            if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
                raise Refused(f"`{name}` must be a list of strings, not empty", name)
            return grammar.choice(value)
    if not isinstance(value, str) or not value:
        raise Refused(f"`{name}` must be a string, not empty", name)
    match kind:
        case "regex":
            return grammar.regex(value)
        case "ebnf":
            return Grammar("ebnf", value)
    return grammar.rules(value)
