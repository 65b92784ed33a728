"""Grammars for forced tool calls, in the form that the model's parser reads, and for formatted answers behind reasoning. They are
in llguidance's dialect of Lark.

Knows the forms' markers; knows no tokenizer except for the markers that are tokens, which a grammar must name as such.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..grammar import objects, too_large, within
from ..request import Grammar, Refused
from . import gemma, harmony, nested
from .calls import MAX_NAME
from .lark import MOST_KEYWORDS, Lark, Special, quoted
from .marked import MarkedForm
from .parameters import TYPES, Parameters
from .pythonic import KEY, PythonicForm
from .readers import FORMS, HARMONY, MISTRAL_ARGS, REASONING_FORMS
from .tagged import TaggedForm
from .values import dump, typed

Json = Mapping[str, Any]
GIGACHAT = "<|function_call|>"
SLASH = re.compile(r"\\?[\s\S]")  # a character of a pattern, with its escape
# What stands before, between and after all calls of an answer ...
AROUND: dict[str, tuple[Sequence[str], str, Sequence[str]]] = {
    "llama3_json": ([], "; ", []),
    "json": (["["], ", ", ["]"]),
    "pythonic": (["["], ", ", ["]"]),
    "lfm2": (["<|tool_call_start|>", "["], ", ", ["]", "<|tool_call_end|>"]),
    "olmo3": (["<function_calls>"], "\n", ["</function_calls>"]),
    "cohere": (["<|START_ACTION|>", "["], ", ", ["]", "<|END_ACTION|>"]),
    "nemotron_json": (["<TOOLCALL>", "["], ", ", ["]", "</TOOLCALL>"]),
    "granite": (["<|tool_call|>", "["], ", ", ["]"]),
    "jamba": (["<tool_calls>", "["], ", ", ["]", "</tool_calls>"]),
    "phi4_mini_json": (["functools["], ", ", ["]"]),
    "mistral": (["[TOOL_CALLS]", "["], ", ", ["]"]),
    "apertus": (["<|tools_prefix|>", "["], ", ", ["]", "<|tools_suffix|>"]),
    "minimax_m3": ([nested.MARK, "<tool_call>", "\n"], "\n", ["\n", nested.MARK, "</tool_call>"]),
    "gigachat3": ([GIGACHAT], ", ", []),
}
# ... and before and after each call, where each has its own markers.
EACH = {
    "hermes": (["<tool_call>", "\n"], ["\n", "</tool_call>"]),
    "internlm": (["<|action_start|>", "<|plugin|>", "\n"], ["<|action_end|>"]),
}


def constraint(
    parser: str,
    schemas: Mapping[str, Json],
    parallel: bool,
    *,
    format: Grammar | None = None,
    reasoning: str | None = None,
    prompt: str = "",
    continued: str = "",
    special: Special = lambda text: None,
) -> Grammar:
    """The grammar for one call or, if they may be `parallel`, several; or else for an answer in a `format`.

    `schemas`: of the parameters of each tool that may be called. A model with a `reasoning` parser may reason first; it must end
    its reasoning if the `prompt`, or the `continued` part of the answer, has opened it. `special`: the id of a string that is one
    token wherever it stands, `Tokenizer.added_id`: llguidance takes most of them for special tokens, which no literal matches.
    Raises Refused.
    """
    parser = HARMONY if reasoning == HARMONY else parser
    form = FORMS.get(parser)
    lark = Lark(special, within=form.within if isinstance(form, TaggedForm) else "")
    header = parser == HARMONY and bool(harmony.begun(prompt))
    try:
        calls = [_call(lark, parser, name, schema, header) for name, schema in schemas.items()]
    except RecursionError:
        raise Refused("`tools` have parameters that are nested too deeply", "tools") from None
    before = _thinking(lark, parser, reasoning, prompt, continued)
    lark.rule("call", " | ".join(calls))
    written = _around(lark, parser, parallel and parser != HARMONY)  # gpt-oss ends its turn with a call
    if format is not None:
        answer = _answer(lark, parser, format, prompt)
        if answer is None:
            raise Refused("`tools` together with a format that is a grammar is not supported", "tools")
        written = f"({written} | {answer})"
    lark.rule("start", f"{before} {written}")
    return Grammar("lark", lark.source)


def format_grammar(format: Grammar, reasoning: str, *, prompt: str = "", continued: str = "", special: Special) -> Grammar | None:
    """The grammar for an answer in a format, behind the reasoning; None for formats that are grammars themselves. Parameters as in
    `constraint`."""
    lark = Lark(special, "grammar")
    before = _thinking(lark, reasoning, reasoning, prompt, continued)
    answer = _answer(lark, reasoning, format, prompt)
    if answer is None:
        return None
    lark.rule("start", f"{before} {answer}")
    return Grammar("lark", lark.source)


def _answer(lark: Lark, parser: str, format: Grammar, prompt: str) -> str | None:
    """The rule of an answer in a format; None if the format is a grammar itself."""
    match format.kind:
        case "json_schema":
            rule = lark.rule("answer", within(format))
        case "regex":
            rule = lark.rule("answer", f"/(?:{SLASH.sub(_escaped, format.source)})/")
        case "choice":
            rule = lark.rule("answer", " | ".join(map(quoted, json.loads(format.source))))
        case _:
            return None
    if parser == HARMONY and not harmony.answers(harmony.begun(prompt)):
        return f"{lark.text(harmony.CHANNEL, 'final', harmony.MESSAGE)} {rule}"
    return rule


def _escaped(match: re.Match[str]) -> str:
    """Escapes a slash, or a line end, for a pattern between slashes."""
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(match[0], match[0])


def _call(lark: Lark, parser: str, name: str, schema: Json, header: bool) -> str:
    """The rule of one call of this tool. `header`: the prompt ends behind a role, where gpt-oss often continues with the
    recipient."""
    if too_large(schema):
        raise lark.too_large
    schema = objects(schema if "$ref" in schema else {**schema, "type": "object"})
    if parser == HARMONY:
        to = f"to=functions.{name}"
        head = lark.text(harmony.CHANNEL, f"commentary {to} ", harmony.CONSTRAIN, "json")
        if header:
            head = f"({head} | {lark.text(f' {to}', harmony.CHANNEL, 'commentary json')})"
        return lark.new(f"{head} {lark.text(harmony.MESSAGE)} {lark.json(schema)}")
    form = FORMS[parser]
    if isinstance(form, MarkedForm):
        return lark.new(_marked(lark, parser, form, name, schema))
    if isinstance(form, TaggedForm):
        return lark.new(_tagged(lark, form, name, schema))
    if parser == "gemma4":
        return lark.new(gemma.call(lark, name, schema))
    if isinstance(form, PythonicForm):
        return lark.new(f"{lark.text(f'{name}(')} {_keywords(lark, schema)} {lark.text(')')}")
    if parser == MISTRAL_ARGS:
        return lark.new(f"{lark.text('[TOOL_CALLS]', name, '[ARGS]')} {lark.json(schema)}")
    if parser == "apertus":
        return lark.new(f"{lark.text(f'{{{quoted(name)}: ')} {lark.json(schema)} {lark.text('}')}")
    key = "parameters" if parser in ("llama3_json", "internlm", "cohere") else "arguments"
    named = '"tool_call_id": "0", "tool_name"' if parser == "cohere" else '"name"'
    head = f'{{{named}: {quoted(name)}, "{key}": '
    return lark.new(f"{lark.text(head)} {lark.json(schema)} {lark.text('}')}")


def _around(lark: Lark, parser: str, several: bool) -> str:
    """The rule of one or several calls, with the text before, between and after them."""
    form, one = FORMS.get(parser), "call"
    before, between, after = AROUND.get(parser, ((), "", ()))
    if parser in EACH:
        begin, end = EACH[parser]
        one, between = f"{lark.text(*begin)} call {lark.text(*end)}", "\n"
    elif parser == "gigachat3" and not lark.is_token(GIGACHAT):  # an older model, whose calls are messages of a role of their own
        before = ("<|message_sep|>", "\n\nfunction call", "<|role_sep|>", "\n")
    if isinstance(form, MarkedForm):
        before, after = [form.section], [form.section_end]
    elif isinstance(form, TaggedForm):
        between = "\n"
        if form.kinds is not None:  # all calls in one tag
            before, after = [form.call, "\n"], ["\n", form.call_end]
        elif form.section:
            before, after = [form.section, "\n"], ["\n", form.section_end]
    more = f"({lark.text(between)} {one})*" if several else ""
    return f"{lark.text(*before)} {one} {more} {lark.text(*after)}"


def _marked(lark: Lark, parser: str, form: MarkedForm, name: str, schema: Json) -> str:
    arguments = lark.json(schema)
    if parser == "kimi_k2":
        head = f"{lark.text(form.call, f'functions.{name}:')} /[0-9]{{1,3}}/ {lark.text(form.separator)}"
        return f"{head} {arguments} {lark.text(form.end)}"
    if parser == "deepseek_v3":
        head = lark.text(form.call, "function", form.separator, f"{name}\n```json\n")
        return f"{head} {arguments} {lark.text(f'{chr(10)}```', form.end)}"
    return f"{lark.text(form.call, name, form.separator)} {arguments} {lark.text(form.end)}"


def _tagged(lark: Lark, form: TaggedForm, name: str, schema: Json) -> str:
    """A call in tags or, where these cannot express exactly what the schema allows, in Hermes's form: the form's parser reads
    both."""
    arguments = _in_tags(lark, form, Parameters(schema))
    if form.kinds is not None and arguments is not None:
        return f"{lark.text(form.function, name, form.function_end, chr(10))} {arguments} {lark.text(form.end)}"
    if form.kinds is not None:
        head = f'{{"name": {quoted(name)}, "arguments": '
        return f"{lark.text(head)} {lark.json(schema)} {lark.text('}')}"
    if arguments is None:
        head = lark.text(form.call, f'\n{{"name": {quoted(name)}, "arguments": ')
        return f"{head} {lark.json(schema)} {lark.text(f'}}{chr(10)}', form.call_end)}"
    head = lark.text(form.call, "\n" if form.function else "", form.function, name, form.function_end, "\n")
    ends = [form.end] if form.end == form.call_end else [form.end, "\n", form.call_end]
    return f"{head} {arguments} {lark.text(*ends)}"


def _in_tags(lark: Lark, form: TaggedForm, parameters: Parameters) -> str | None:
    """All arguments in tags, in their order; None if some cannot be written so."""
    rules = []
    plain = parameters.plain
    for key, (schema, required) in () if plain is None else plain.items():
        value = (_bare if form.kinds is None else _of_kind)(lark, form, schema, parameters)
        if value is None or key != key.strip() or form.key_end in key or len(key) > MAX_NAME:
            return None
        head = lark.text(form.key, key, form.key_end, "\n" if form.value else "", form.value, "\n" if form.lines else "")
        argument = f"{head} {value} {lark.text(chr(10))}"
        rules.append(argument if required else f"({argument})?")
    return None if plain is None else " ".join(rules)


def _bare(lark: Lark, form: TaggedForm, schema: Any, parameters: Parameters) -> str | None:
    """A value, strings without quotes, and its end; None if the parser would not read exactly the schema's values."""
    ends = ["\n"] * form.lines + [form.value_end]
    end = lark.text(*ends)
    types = parameters.types_of(schema)
    if "string" not in types or types == TYPES:
        return f"{lark.json(schema)} {end}"
    listed = parameters.listed(schema)
    if listed is not None:
        texts = [value if isinstance(value, str) else dump(value) for value in listed]
        read = [
            form.value_end not in text and typed(text, types, form.python) == dump(value)
            for text, value in zip(texts, listed, strict=True)
        ]
        return f"({' | '.join(map(quoted, texts))}) {end}" if texts and all(read) else None
    lengths = parameters.lengths(schema)
    if lengths is None or types & {"array", "object"}:
        return None
    return lark.up_to(form.value_end) if lengths == (0, None) else lark.bounded(ends, *lengths)


def _of_kind(lark: Lark, form: TaggedForm, schema: Any, parameters: Parameters) -> str | None:
    """As `_bare`, where the tag says whether a value is a string."""
    assert form.kinds is not None
    string, other = (lark.text(f" {kind}") for kind in form.kinds)
    end = lark.text(form.value_end)
    types = parameters.types_of(schema)
    if "string" not in types:
        return f"{other} {lark.json(schema)} {end}"
    rules, shared = [], {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict) and key in schema}
    for part in parameters.alternatives(schema):
        if part is None:
            return None
        values = parameters.listed(part)
        lengths = parameters.lengths(part)
        if values is not None:
            if not values or any(form.value_end in value for value in values if isinstance(value, str)):
                return None
            for value in values:
                text = isinstance(value, str)
                rules.append(f"{string if text else other} {quoted(value if text else dump(value))} {end}")
            continue
        if lengths is not None:
            written = lark.up_to(form.value_end) if lengths == (0, None) else lark.bounded([form.value_end], *lengths)
            rules.append(f"{string} {written}")
        kinds = part.get("type", sorted(TYPES))
        others = [kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind != "string"]
        if others:
            rules.append(f"{other} {lark.json({**part, **shared, 'type': others})} {end}")
    return f"({' | '.join(rules)})" if rules else None


def _keywords(lark: Lark, schema: Json) -> str:
    """`a=1, b=2`: required arguments first, then any of the others, in their order. `**{"a": 1}` where that cannot express them
    all."""
    plain = Parameters(schema).plain
    if plain is None or len(plain) > MOST_KEYWORDS or not all(map(KEY.fullmatch, plain)):
        return f"{lark.text('**')} {lark.json(schema)}"
    rules = [(f"{lark.text(f'{key}=')} {lark.json(value)}", required) for key, (value, required) in plain.items()]
    return lark.some(rules, ", ")


def _thinking(lark: Lark, parser: str, reasoning: str | None, prompt: str, continued: str) -> str:
    """The rule of the reasoning that may stand before the calls."""
    if parser == HARMONY:
        if harmony.answers(harmony.begun(prompt)):
            return ""
        thinking = f"{lark.up_to(harmony.END)} {lark.text(harmony.START, 'assistant')}"
        begun = harmony.begun(prompt).endswith(harmony.MESSAGE)
        return thinking if begun else f"({lark.text(harmony.CHANNEL, 'analysis', harmony.MESSAGE)} {thinking})?"
    if reasoning is None:
        return ""
    markers = REASONING_FORMS[reasoning]
    begun = markers.begun(prompt, continued)
    if continued.strip() and not begun:
        return ""  # an answer that has begun is not followed by reasoning
    thinking = f"{lark.up_to(markers.closes[0])} /[ \\n]{{0,4}}/"
    return thinking if begun else f"({lark.text(markers.opens[0])} {thinking})?"
