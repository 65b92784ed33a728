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
from . import functionary, gemma, harmony, kimi_k3, nested
from .calls import MAX_NAME
from .gemma import GemmaForm
from .lark import MOST_KEYWORDS, Lark, Special, quoted
from .marked import MarkedForm
from .parameters import TYPES, Parameters
from .pythonic import KEY, PythonicForm
from .readers import FORMS, HARMONY, MISTRAL_ARGS, REASONING_FORMS
from .tagged import CDATA, CDATA_END, TaggedForm, stated
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
    "command_r": (["Action:\n```json\n["], ",\n", ["\n]```"]),
    "functionary_v32": ([], functionary.NEXT, []),
    "hyperclovax": ([" -> tool/function_call\n["], ", ", ["]"]),
    "kimi_k3": ([kimi_k3.TOOLS], "", [kimi_k3.TOOLS_END]),
}
# ... and before and after each call, where each has its own markers.
EACH = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "longcat_json": ("<longcat_tool_call>", "</longcat_tool_call>"),
    "internlm": ("<|action_start|><|plugin|>", "<|action_end|>"),
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
    lark = Lark(special, within=form.within if isinstance(form, TaggedForm) else ())
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
    if isinstance(form, GemmaForm):
        return lark.new(gemma.call(lark, form, name, schema))
    if parser == "kimi_k3":
        return lark.new(kimi_k3.call(lark, name, schema))
    if parser == "functionary_v32":
        return lark.new(f"{lark.text(f'{name}{chr(10)}')} {lark.json(schema)}")
    if isinstance(form, PythonicForm):
        return lark.new(f"{lark.text(f'{name}(')} {_keywords(lark, schema)} {lark.text(')')}")
    if parser == MISTRAL_ARGS:
        return lark.new(f"{lark.text('[TOOL_CALLS]', name, '[ARGS]')} {lark.json(schema)}")
    if parser == "apertus":
        return lark.new(f"{lark.text(f'{{{quoted(name)}: ')} {lark.json(schema)} {lark.text('}')}")
    key = "parameters" if parser in ("llama3_json", "internlm", "cohere", "command_r") else "arguments"
    named = {"cohere": '"tool_call_id": "0", "tool_name"', "command_r": '"tool_name"'}.get(parser, '"name"')
    head = f'{{{named}: {quoted(name)}, "{key}": '
    return lark.new(f"{lark.text(head)} {lark.json(schema)} {lark.text('}')}")


def _around(lark: Lark, parser: str, several: bool) -> str:
    """The rule of one or several calls, with the text before, between and after them."""
    form = FORMS.get(parser)
    if parser in EACH:  # on lines of their own or not, as the model was trained
        begin, end = EACH[parser]
        one = f"{lark.text(begin)} {lark.line} call {lark.line} {lark.text(end)}"
        return f"{one} ({lark.line} {one})*" if several else one
    if isinstance(form, TaggedForm):
        first, last = (form.section, form.section_end) if form.kinds is None else (form.call, form.call_end)
        more = f"({lark.line} call)*" if several else ""
        return f"{lark.text(first)} {lark.line} call {more} {lark.line} {lark.text(last)}" if first else f"call {more}"
    before, between, after = AROUND.get(parser, ((), "", ()))
    if isinstance(form, MarkedForm):
        before, after = [form.section], [form.section_end]
    elif parser == "gigachat3" and not lark.is_token(GIGACHAT):  # an older model, whose calls are messages of a role of their own
        before = ["<|message_sep|>", "\n\nfunction call", "<|role_sep|>", "\n"]
    more = f"({lark.text(between)} call)*" if several else ""
    return f"{lark.text(*before)} call {more} {lark.text(*after)}"


def _marked(lark: Lark, parser: str, form: MarkedForm, name: str, schema: Json) -> str:
    arguments = lark.json(schema)
    if parser == "kimi_k2":
        head = f"{lark.text(form.call, f'functions.{name}:')} /[0-9]{{1,3}}/ {lark.text(form.separator)}"
        return f"{head} {arguments} {lark.text(form.end)}"
    if form.name:
        head = f"{lark.text(form.call)} /[a-z0-9]{{10}}/ {lark.text(form.name, name, form.separator)}"
        return f"{head} {arguments} {lark.text(form.end)}"
    if parser == "deepseek_v3":
        head = lark.text(form.call, "function", form.separator, f"{name}\n```json\n")
        return f"{head} {arguments} {lark.text(f'{chr(10)}```', form.end)}"
    return f"{lark.text(form.call, name, form.separator)} {arguments} {lark.text(form.end)}"


def _tagged(lark: Lark, form: TaggedForm, name: str, schema: Json) -> str:
    """A call in tags or, where these cannot express exactly what the schema allows, with JSON: the form's parser reads both. Line
    ends between tags are left to the model: templates of one family differ in them."""
    arguments = _in_tags(lark, form, Parameters(schema))
    function = lark.text(form.function, name, form.function_end)
    call, call_end = (lark.text(form.call), lark.text(form.call_end)) if form.kinds is None else ("", "")
    if arguments is None and form.call:  # as Hermes writes it
        head = lark.text(f'{{"name": {quoted(name)}, "arguments": ')
        return f"{call} {lark.line} {head} {lark.json(schema)} {lark.text('}')} {lark.line} {call_end}"
    if arguments is None:
        return f"{function} {lark.json(schema)} {lark.text(form.end)}"
    head = f"{call} {lark.line if call and form.function else ''} {function} {lark.line}"
    return f"{head} {arguments} {lark.text(form.end)} {'' if form.end == form.call_end else f'{lark.line} {call_end}'}"


def _in_tags(lark: Lark, form: TaggedForm, parameters: Parameters) -> str | None:
    """All arguments in tags, in their order; None if some cannot be written so."""
    rules = []
    plain = parameters.plain
    for key, (schema, required) in () if plain is None else plain.items():
        if form.kinds is None:
            value = _bare(lark, form, schema, parameters)
        else:
            value = stated(lark, {kind: f" {form.kinds[kind != 'string']}" for kind in TYPES}, form.value_end, schema, parameters)
        if value is None or key != key.strip() or form.key_end in key or len(key) > MAX_NAME:
            return None
        head = lark.text(form.key, key, form.key_end)
        if form.value:
            head = f"{head} {lark.line} {lark.text(form.value)}"
        argument = f"{head} {lark.text(chr(10)) if form.lines else ''} {value} {lark.line}"
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
            form.value_end not in text and not text.startswith(CDATA) and typed(text, types, form.python) == dump(value)
            for text, value in zip(texts, listed, strict=True)
        ]
        return f"({' | '.join(map(quoted, texts))}) {end}" if texts and all(read) else None
    lengths = parameters.lengths(schema)
    if lengths is None or types & {"array", "object"}:
        return None
    if form.cdata:
        marked = f"{lark.text(CDATA)} {lark.bounded([f'{CDATA_END}{form.value_end}'], *lengths)}"
        return f"({lark.bounded(ends, *lengths, unlike=CDATA)} | {marked})"
    return lark.up_to(form.value_end) if lengths == (0, None) else lark.bounded(ends, *lengths)


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
    frames = f"({' | '.join(map(lark.text, markers.frames))}){{0,2}}" if markers.frames else ""
    return f"{thinking if begun else f'({lark.text(markers.opens[0])} {thinking})?'} {frames}"
