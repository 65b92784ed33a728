"""Grammars for tool calls: whatever a model generates under one is parsed by its reader as calls with valid arguments."""

import json
import random
import sys
import time
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from penstock.router.api.openai_tools import tools_of
from penstock.router.grammar import choice, json_schema, lark, problem, regex, rules
from penstock.router.parsing import Arguments, Call, Part, Reasoning, Text, constraint, format_grammar, markers, reader
from penstock.router.parsing.readers import REASONING_FORMS, REASONING_PARSERS, TOOL_PARSERS
from penstock.router.request import Grammar, Refused
from penstock.tests.router.parsing.deltas import parts_of

jsonschema = pytest.importorskip("jsonschema")
llguidance = pytest.importorskip("llguidance")
numpy = pytest.importorskip("numpy")

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "place"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "sun?", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
    {
        "type": "function",
        "function": {
            "name": "pick",
            "parameters": {"properties": {"a": {"type": "null"}, "b": {"type": "boolean"}}},  # an object, though `type` is missing
        },
    },
]
SCHEMAS = tools_of(TOOLS, "required", None).schemas


LARGE_SCHEMA = {"type": "object", "properties": {f"q{i}": {"type": "string", "description": "x" * 50} for i in range(1000)}}


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_definitions_in_a_grammar_are_shared_and_too_large_grammars_refused(parser: str) -> None:
    """Each parameter alone would need all definitions again. A grammar that would be too long is not built."""

    def source(properties: Any, definitions: Any) -> str:
        parameters = {"type": "object", "properties": properties, "$defs": definitions}
        return constraint(parser, {"f": parameters}, True).source

    small = {f"d{i}": {"type": "object", "properties": {"a": {"type": "integer"}}} for i in range(61)}
    assert len(source({f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(25)}, small)) < 10_000
    assert len(source({f"p{i}": {"type": "integer"} for i in range(250)}, {})) < 65_536
    with pytest.raises(Refused, match="its grammar has more than 65536 characters"):
        source({f"p{i}": {"$ref": "#/$defs/x"} for i in range(1000)}, {"x": LARGE_SCHEMA})


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_too_large_parameters_are_refused_before_they_are_read(parser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[constraint.__module__], "objects", None)
    parameters = {"type": "object", "properties": {f"p{i}": {} for i in range(65_536 // 8)}}
    with pytest.raises(Refused, match="`tools` is too large: its grammar has more than 65536 characters"):
        constraint(parser, {"f": parameters}, True)


DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="unit" string="true">F</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="place" string="false">[true]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
# End markers that are tokens of their own: random bytes would never spell them.
END_MARKER_TOKENS: dict[str, list[str]] = {
    "letters": [],
    "gemma4": ['<|"|>'],
    "minimax_m2": ["</parameter>"],
    "seed_oss": ["</parameter>"],
    "deepseek_v32": ["</｜DSML｜parameter>"],
    "deepseek_v4": ["</｜DSML｜parameter>"],
    "hy_v3": ["</arg_value:opensource>"],
    "hy_v4": ["</arg_value:6124c78e>"],
    "deepseek_v41": ["</｜DSML｜ parameter>"],
    "functiongemma": ["<escape>"],
    "kimi_k3": ["<|close|>"],
    "solar_open2": ["<|tool_arg:end|>"],
    "minicpm5": ["</param>"],
    "step3": ["</steptml:parameter>"],
    "longcat": ["</longcat_arg_value>"],
    "gigachat35": ["</｜GCML｜parameter>"],
}


class ConstrainedModel:
    """A byte-level tokenizer, in which some markers are special tokens, and a random model that generates any allowed token."""

    def __init__(self, special: list[str], parser: str = "") -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.tokenizer = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens(["<end>", *special])
        end_markers = [] if special else END_MARKER_TOKENS.get(parser, ["\n</parameter>", "</arg_value>"])
        self.tokenizer.add_tokens(end_markers)
        self.end = self.tokenizer.token_to_id("<end>")
        self.size = self.tokenizer.get_vocab_size()
        self.special = {text: self.tokenizer.token_to_id(text) for text in [*special, *end_markers]}
        self.llguidance = llguidance.LLTokenizer(self.tokenizer.to_str(), n_vocab=self.size, eos_token=self.end)
        self.matchers: dict[str, Any] = {}  # by grammar, in their initial state
        self.closing_ids = (
            {self.tokenizer.token_to_id(char) for char in [*'"}])</>', *end_markers]} | set(self.special.values()) | {self.end}
        )

    def matcher(self, source: str) -> Any:
        if source not in self.matchers:
            grammar = llguidance.LLMatcher.grammar_from_lark(source)
            assert not llguidance.LLMatcher.validate_grammar(grammar, self.llguidance), source
            self.matchers[source] = llguidance.LLMatcher(self.llguidance, grammar)
        return self.matchers[source].deep_copy()

    def generate(self, source: str, rng: random.Random, max_tokens: int = 1500) -> str | None:
        """Random text that the grammar allows; None if it doesn't end within `max_tokens`."""
        matcher = self.matcher(source)
        ids: list[int] = []
        while len(ids) < max_tokens:
            mask = numpy.frombuffer(matcher.compute_bitmask(), dtype=numpy.uint8)
            allowed = numpy.flatnonzero(numpy.unpackbits(mask, bitorder="little")[: self.size]).tolist()
            closing = [id for id in allowed if id in self.closing_ids]
            id = rng.choice(closing if closing and rng.random() < 0.4 else allowed)
            assert matcher.consume_token(id), matcher.get_error()
            if id == self.end:
                return str(self.tokenizer.decode(ids, skip_special_tokens=False))
            ids.append(id)
        return None

    def accepts(self, source: str, text: str) -> bool:
        matcher = self.matcher(source)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return bool(matcher.validate_tokens([*ids, self.end]) == len(ids) + 1)


def check_calls(parts: list[Part]) -> list[str]:
    """The names of the calls; asserts that each has the arguments that its schema requires."""
    names = []
    for part in parts:
        match part:
            case Call():
                names.append(part.name)
            case Arguments():
                given = json.loads(part.text)
                schema = SCHEMAS[names[-1]]
                assert set(schema.get("required", ())) <= set(given)
                assert names[-1] == "pick" or set(given) <= set(schema.get("properties", ()))
                assert isinstance(given.get("city", ""), str)
                assert isinstance(given.get("place", []), list)
                assert given.get("unit", "C") in ("C", "F")
            case _:
                raise AssertionError(part)
    return names


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_random_text_under_the_grammar_is_parsed_as_valid_calls(parser: str, special: bool) -> None:
    rng = random.Random(parser)
    model = ConstrainedModel(
        [marker for marker in markers(None, parser) if (special and marker[0] in "<[") or parser == "harmony"], parser
    )
    parallel = constraint(parser, SCHEMAS, True, special=model.special.get)
    assert parallel.kind == "lark"
    single = constraint(parser, SCHEMAS, False, special=model.special.get)
    named = constraint(parser, {"weather": WEATHER}, False, special=model.special.get)
    most_calls = complete = 0
    for _ in range(12):
        for grammar in (parallel, single, named):
            text = model.generate(grammar.source, rng)
            if text is None:
                continue
            complete += 1
            parts = parts_of([text], None, parser, schemas=SCHEMAS)
            if parser == "harmony":
                parts = [part for part in parts if not isinstance(part, Reasoning)]
            names = check_calls(parts)
            assert names, text
            assert grammar is parallel or len(names) == 1
            assert grammar is not named or names == ["weather"]
            most_calls = max(most_calls, len(names))
    assert complete > 10
    assert most_calls > 1 or parser == "harmony"


@pytest.mark.parametrize("reasoning", REASONING_FORMS)
@pytest.mark.parametrize("special", [False, True])
def test_grammar_allows_reasoning_before_a_forced_call(reasoning: str, special: bool) -> None:
    form = REASONING_FORMS[reasoning]
    model = ConstrainedModel([*form.markers, "<tool_call>", "</tool_call>"] if special else [])
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'

    def grammar(prompt: str, continued: str = "") -> str:
        options: dict[str, Any] = {"reasoning": reasoning, "prompt": prompt + continued, "continued": continued}
        return constraint("hermes", {"now": SCHEMAS["now"]}, False, **options, special=model.special.get).source

    [opened, *_], [closed, *_] = form.opens, form.closes
    assert model.accepts(grammar("<user>"), call)
    assert model.accepts(grammar("<user>"), f"{opened}\nHm < ?\n{closed}\n\n{call}")
    assert model.accepts(grammar(f"<user>{opened}\n"), f"Hm < ?\n{closed}\n\n{call}")
    assert not model.accepts(grammar(f"<user>{opened}\n"), call)
    assert not model.accepts(grammar("<user>"), f"Hm. {call}")
    assert model.accepts(grammar("<bot>", f"{opened}\nH"), f"m < ?\n{closed}\n\n{call}")
    assert not model.accepts(grammar("<bot>", f"{opened}\nH"), call)
    assert model.accepts(grammar("<bot>", f"{opened}\nHm{closed}So"), call)


K3_CALL = (
    '<|open|>tools<|sep|><|open|>call tool="now" index="1"<|sep|><|open|>json type="object"<|sep|>{}<|close|>json<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>"
)
SOLAR_CALL = "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|><|calls|>"
HYPERCLOVAX_CALL = ' -> tool/function_call\n[{"name": "now", "arguments": {}}]'


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("parser", "prompt", "frames", "call"),
    [
        ("kimi_k3", "<|open|>think<|sep|>", "Hm<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>", K3_CALL),
        ("kimi_k3", "<|open|>response<|sep|>", "<|close|>response<|sep|>", K3_CALL),
        ("solar_open", "<|begin|>assistant", "<|think|>Hm<|end|><|begin|>assistant", SOLAR_CALL),
        ("solar_open", "<|think|><|end|><|begin|>assistant", "", SOLAR_CALL),
        ("hyperclovax", "<|im_start|>assistant", "/think\nHm<|im_end|>\n<|im_start|>assistant", HYPERCLOVAX_CALL),
    ],
)
def test_tokens_around_the_parts_of_an_answer_are_allowed_before_a_call(
    parser: str, special: bool, prompt: str, frames: str, call: str
) -> None:
    model = ConstrainedModel([marker for marker in markers(parser, parser) if special and marker[0] == "<"])
    schemas = {"now": {"properties": {"a": {"pattern": "x"}}}}
    source = constraint(parser, schemas, True, reasoning=parser, prompt=prompt, special=model.special.get).source
    assert model.accepts(source, f"{frames}{call}")
    assert not model.accepts(source, f"So {call}")
    parts = [part for part in parts_of([f"{frames}{call}"], parser, parser, prompt=prompt) if not isinstance(part, Reasoning)]
    assert parts == [Call(0, "", "now"), Arguments(0, "{}")]


FORMATS = [
    (json_schema({"properties": {"a": {"type": "integer"}}}), '{"a": 1}', '{"a": "1"}'),
    (regex("a/b\n\\/c[/\n]"), "a/b\n/c/", "a/b/c/"),
    (regex("x|"), "", "xx"),
    (choice(['<b> /"', "b", ""]), '<b> /"', "bb"),
    (choice(["\x7f", "é\u2028"]), "\x7f", "\\u007f"),
]


@pytest.mark.parametrize(("format", "answer", "invalid"), FORMATS)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("reasoning", REASONING_PARSERS)
def test_grammar_allows_reasoning_before_structured_output(
    reasoning: str, special: bool, format: Grammar, answer: str, invalid: str
) -> None:
    analysis = "<|channel|>analysis<|message|>"
    opened, closed, user, header = analysis, "<|end|><|start|>assistant", "<|start|>assistant", "<|channel|>final<|message|>"
    if reasoning != "harmony":
        [opened, *_], [closed, *_], user, header = REASONING_FORMS[reasoning].opens, REASONING_FORMS[reasoning].closes, "<user>", ""
    model = ConstrainedModel([*markers(reasoning, None)] if special or reasoning == "harmony" else [], "letters")

    def accepts(prompt: str, text: str, continued: str = "") -> bool:
        options: dict[str, Any] = {"prompt": prompt + continued, "continued": continued, "special": model.special.get}
        grammar = format_grammar(format, reasoning, **options)
        assert grammar is not None
        accepted = model.accepts(grammar.source, text)
        if accepted and answer:
            last = parts_of(list(text), reasoning, None, prompt=prompt + continued, continued=continued)[-1]
            assert last == Text(answer)
        return accepted

    assert accepts(user, header + answer)
    assert accepts(user, f"{opened}Hm{closed}{header}{answer}")
    assert accepts(f"{user}{opened}", f"Hm{closed}{header}{answer}")
    assert not accepts(f"{user}{opened}", header + answer)
    assert not accepts(user, header + invalid)
    assert not accepts(user, f"{opened}Hm{closed}{header}{invalid}")
    assert not accepts(user, f"So {answer}")
    if reasoning == "harmony":
        assert accepts(f"{user}{header}", answer)
        assert not accepts(f"{user}{header}", header + answer)


def test_lark_and_ebnf_formats_are_not_combined_with_reasoning_or_tools() -> None:
    for format in (lark('start: "a"'), rules('root ::= "a"')):
        assert format_grammar(format, "deepseek_r1", special=lambda text: None) is None
        with pytest.raises(Refused, match="a format that is a grammar is not supported"):
            constraint("hermes", SCHEMAS, True, format=format)


def test_reasoning_is_not_allowed_after_a_continued_answer_has_begun() -> None:
    model = ConstrainedModel([], "letters")
    for continued, reasoning_allowed in (("", True), ("[", False), ("<think>Hm</think>[", False), ("<think>H", True)):
        options: dict[str, Any] = {"prompt": f"<user>{continued}", "continued": continued, "special": model.special.get}
        grammar = format_grammar(json_schema({"properties": {}}), "deepseek_r1", **options)
        assert grammar is not None
        opening = "" if continued.endswith("H") else "<think>"
        assert model.accepts(grammar.source, opening + "m</think>{}") == reasoning_allowed
        assert model.accepts(grammar.source, "{}") == (continued != "<think>H")


def test_harmony_reasoning_puts_calls_of_any_parser_and_formats_into_channels() -> None:
    model = ConstrainedModel(list(markers("harmony", None)))
    format = json_schema({"properties": {}})
    source = constraint("json", SCHEMAS, True, format=format, reasoning="harmony", special=model.special.get).source
    assert model.accepts(source, "<|channel|>final<|message|>{}")
    assert model.accepts(source, "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}")
    assert not model.accepts(source, "{}")
    options: dict[str, Any] = {"prompt": "<|start|>assistant<|channel|>final<|message|>{", "special": model.special.get}
    assert model.accepts(constraint("harmony", SCHEMAS, True, format=format, **options).source, "{}")


def test_schema_with_repeated_types_is_translated_quickly() -> None:
    schema: Any = {"type": "string"}
    for _ in range(12):
        schema = {"type": ["object", "array"] * 9, "properties": {"a": schema}, "items": {"type": "integer"}}
    start = time.thread_time()
    constraint("gemma4", {"f": {"type": "object", "properties": {"a": schema}}}, True)
    assert time.thread_time() - start < 9


def test_harmony_call_without_channel_is_allowed_if_the_prompt_ends_with_the_role() -> None:
    model = ConstrainedModel(list(markers(None, "harmony")))
    assistant, analysis = "<|start|>assistant", "<|channel|>analysis<|message|>"
    direct = ' to=functions.pick<|channel|>commentary json<|message|>{"b": true}'
    channel = '<|channel|>commentary to=functions.pick <|constrain|>json<|message|>{"b": true}'

    def accepts(prompt: str, text: str) -> bool:
        grammar = constraint("harmony", SCHEMAS, True, prompt=prompt, special=model.special.get)
        parts = parts_of([text], None, "harmony", prompt=prompt, schemas=SCHEMAS)
        accepted = model.accepts(grammar.source, text)
        assert not accepted or [part for part in parts if not isinstance(part, Reasoning)] == [
            Call(0, "", "pick"),
            Arguments(0, '{"b": true}'),
        ]
        return accepted

    for call in (direct, channel):
        assert accepts(assistant, call)
        assert accepts(assistant, f"{analysis}Hm<|end|>{assistant}{call}")
        assert accepts(f"{assistant}{analysis}H", f"m<|end|>{assistant}{call}")
        assert not accepts(f"{assistant}{analysis}H", call)
    assert accepts("", channel)
    assert not accepts("", direct)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "place": [true]}}\n</tool_call>'),
        ("llama3_json", '{"name": "now", "parameters": {}}'),
        ("mistral_args", '[TOOL_CALLS]weather[ARGS]{"city": "Paris", "place": []}'),
        (
            "qwen3_coder",
            "<tool_call>\n<function=weather>\n<parameter=city>\nNew\nYork\n</parameter>\n<parameter=unit>\nF\n</parameter>\n"
            "<parameter=place>\n[true]\n</parameter>\n</function>\n</tool_call>",
        ),
        ("glm45", "<tool_call>pick\n<arg_key>b</arg_key>\n<arg_value>true</arg_value>\n</tool_call>"),
        ("pythonic", '[weather(city="Paris", place=[true, false]), now(), pick(b=true)]'),
        ("deepseek_v32", DSML),
        ("deepseek_v4", DSML.replace("function_calls", "tool_calls")),
        (
            "hy_v3",
            "<tool_calls:opensource>\n<tool_call:opensource>pick<tool_sep:opensource>\n<arg_key:opensource>b</arg_key:opensource>\n"
            "<arg_value:opensource>true</arg_value:opensource>\n</tool_call:opensource>\n"
            "<tool_call:opensource>now<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
        ),
        ("apertus", '<|tools_prefix|>[{"weather": {"city": "Paris", "place": [true]}}, {"now": {}}]<|tools_suffix|>'),
        ("glm45", "<tool_call>pick<arg_key>b</arg_key><arg_value>true</arg_value></tool_call><tool_call>now</tool_call>"),
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n<tool_call>{"name": "pick", "arguments": {}}</tool_call>',
        ),
        (
            "kimi_k3",
            '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>'
            '<b> "x"<|close|>argument<|sep|><|open|>argument key="place" type="array"<|sep|>[true]<|close|>argument<|sep|>'
            '<|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        ),
        (
            "solar_open",
            "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>pick<|tool_call:args|>"
            '{"b": true}<|tool_call:end|><|calls|>',
        ),
        (
            "solar_open2",
            "<|tool_call:start|>pick\n<|tool_arg:start|>b<|tool_arg:value|>true<|tool_arg:end|>\n<|tool_call:end|>\n"
            "<|tool_call:start|>now\n<|tool_call:end|>",
        ),
        (
            "minicpm5",
            '<function name="weather"><param name="city">Paris</param><param name="unit">F</param>'
            '<param name="place">[true]</param></function>\n<function name="now"></function>',
        ),
        (
            "minicpm5",
            '<function name="weather"><param name="city"><![CDATA[< & ]] <b>]]></param><param name="place">[]</param></function>',
        ),
        (
            "step3",
            "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
            '<steptml:invoke name="pick">\n<steptml:parameter name="b">true</steptml:parameter>\n</steptml:invoke>'
            "<｜tool_call_end｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
            '<steptml:invoke name="now"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
        ),
        (
            "longcat",
            "<longcat_tool_call>pick\n<longcat_arg_key>b</longcat_arg_key>\n<longcat_arg_value>true</longcat_arg_value>\n"
            "</longcat_tool_call>",
        ),
        ("longcat_json", '<longcat_tool_call>{"name": "pick", "arguments": {"b": true}}</longcat_tool_call>'),
        ("gigachat35", DSML.replace("function_calls", "tool_calls").replace("DSML", "GCML")),
        ("deepseek_v41", DSML.replace("function_calls", "calls").replace("DSML｜", "DSML｜ ")),
        (
            "hy_v4",
            "<tool_calls:6124c78e>\n<tool_call:6124c78e>pick\n<arg_key:6124c78e>b</arg_key:6124c78e>\n"
            "<arg_value:6124c78e>true</arg_value:6124c78e>\n</tool_call:6124c78e>\n</tool_calls:6124c78e>",
        ),
        (
            "hy_v3_preview",
            "<tool_calls>\n<tool_call>pick<tool_sep>\n<arg_key>b</arg_key>\n<arg_value>true</arg_value>\n</tool_call>\n</tool_calls>",
        ),
        ("command_r", 'Action:\n```json\n[{"tool_name": "pick", "parameters": {"b": true}}\n]```'),
        ("hyperclovax", ' -> tool/function_call\n[{"name": "pick", "arguments": {"b": true}}, {"name": "now", "arguments": {}}]'),
        ("functionary_v31", '<function=pick>{"b": true}</function>'),
        ("functionary_v32", 'pick\n{"b": true}>>>now\n{}'),
        (
            "functiongemma",
            "<start_function_call>call:weather{city:<escape>Paris<escape>,place:[true]}<end_function_call>"
            "<start_function_call>call:now{}<end_function_call>",
        ),
        (
            "gemma4",
            '<|tool_call>call:weather{city:<|"|>Paris<|"|>,place:[true],unit:<|"|>F<|"|>}<tool_call|><|tool_call>call:now{}<tool_call|>',
        ),
    ],
)
def test_trained_call_format_of_each_family_is_allowed(parser: str, text: str) -> None:
    for tokens in ([], [marker for marker in markers(None, parser) if marker[0] == "<"]):
        model = ConstrainedModel(tokens)
        source = constraint(parser, SCHEMAS, True, special=model.special.get).source
        assert model.accepts(source, text), tokens
        assert not model.accepts(source, text.replace("name", "nome").replace("c", "k"))
        assert not model.accepts(source, f"{text} So.")


def test_markers_of_a_format_may_be_special_tokens() -> None:
    """MiniMax M3 has one before all its tags; GigaChat's token decides which of its two formats a model knows."""
    call, marker = '{"name": "now", "arguments": {}}', "]<]minimax[>["
    for special in ([], [marker]):
        model = ConstrainedModel(special, "letters")
        source = constraint("minimax_m3", SCHEMAS, True, special=model.special.get).source
        for text in (
            f"{marker}<tool_call>\n{call}\n{marker}</tool_call>",
            f"{marker}<tool_call>\n{call}\n{call}\n{marker}</tool_call>",
        ):
            assert model.accepts(source, text)
            assert check_calls(parts_of([text], None, "minimax_m3", schemas=SCHEMAS))
        assert not model.accepts(source, f"<tool_call>\n{call}\n</tool_call>")
    new, old = f"<|function_call|>{call}", f"<|message_sep|>\n\nfunction call<|role_sep|>\n{call}"
    for special in ("<|function_call|>", "<|role_sep|>"):
        model = ConstrainedModel([special])
        source = constraint("gigachat3", SCHEMAS, False, special=model.special.get).source
        assert [model.accepts(source, text) for text in (new, old)] == [special == "<|function_call|>", special == "<|role_sep|>"]


@pytest.mark.parametrize("token", ["｜DSML｜", "</｜DSML｜parameter>"])
def test_token_within_a_tag_is_allowed(token: str) -> None:
    """As in DeepSeek V3.2's vocabulary: no literal of the grammar equals the token."""
    model = ConstrainedModel([token])
    source = constraint("deepseek_v32", SCHEMAS, True, special=model.special.get).source
    assert model.accepts(source, DSML)
    assert model.accepts(source, DSML.replace("Paris", "</Pa<ris</"))
    assert not model.accepts(source, DSML.replace('string="true">Paris', 'string="false">Paris'))


@pytest.mark.parametrize("schema", [{}, {"maxLength": 9}, {"minLength": 2}], ids=str)
@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n<b>\n</parameter>\n</function>\n</tool_call>"),
        (
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a"><b></parameter>\n</invoke>\n</minimax:tool_call>',
        ),
        (
            "deepseek_v32",
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true"><b>'
            "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value><b></arg_value>\n</tool_call>"),
        ("gemma4", '<|tool_call>call:f{a:<|"|><b><|"|>}<tool_call|>'),
        ("minicpm5", '<function name="f"><param name="a"><b></param></function>'),
        ("minicpm5", '<function name="f"><param name="a"><![CDATA[<b>]]></param></function>'),
        (
            "kimi_k3",
            '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|><b>'
            "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        ),
    ],
)
def test_string_argument_ends_at_a_marker_that_is_no_token(parser: str, text: str, schema: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", **schema}}, "required": ["a"]}
    model = ConstrainedModel([], "letters")
    source = constraint(parser, {"f": parameters}, False).source
    assert model.accepts(source, text)
    assert model.accepts(source, text.replace("<b>", "</bb>"))
    assert model.accepts(source, text.replace("<b>", "<")) == (schema != {"minLength": 2})
    assert model.accepts(source, text.replace("<b>", "nine letters")) == (schema != {"maxLength": 9})


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
PROPERTIES: dict[str, Any] = {
    "digit": DIGIT,
    "text": {"type": "string"},
    "x-y": {"type": "boolean"},
    "$top": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    "größe": {"enum": ["1", "2", "true", "null"]},
    "class": {"const": "42"},
    "lines": {"type": "string", "enum": ["x\n", "\ny", " z ", ""]},
    "mixed": {"enum": ["a", 1, None]},
    "either": {"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]},
    "short": {"type": "string", "minLength": 1, "maxLength": 30},
    "may be short": {"type": ["string", "null"], "maxLength": 2},
    "digits": {"type": "string", "pattern": "^[0-9]{3}$"},
    "day": {"type": "string", "format": "date"},
    "text or digit": {"anyOf": [{"type": "string"}, DIGIT]},
    "text or list": {"anyOf": [{"type": "string"}, {"type": "array", "items": DIGIT, "maxItems": 2}]},
    "unit": {"allOf": [{"$ref": "#/$defs/unit"}], "description": "which"},
    "other": {"$ref": "#/properties/digit"},
    "node": {"$ref": "#/$defs/node"},
    "tag": {"const": "</parameter>"},
    "any": {"enum": [True, False, 7, "t"]},
    " a b ": {"type": "null"},
    "never": False,
    "": {"type": "null"},
    "large": {"type": "number"},
}
DEFINITIONS = {
    "unit": {"type": "string", "enum": ["1", "C"]},
    "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False},
}


def equivalent_schema(schema: dict[str, Any], form: str) -> dict[str, Any]:
    """The schema, expressed in another way."""
    match form:
        case "reference":
            return {"$ref": "#/$defs/root", "$defs": {"root": schema, **DEFINITIONS}, "properties": {"digit": DIGIT}}
        case "all":
            return {"allOf": [schema, {"type": "object"}], "$defs": DEFINITIONS, "properties": {"digit": DIGIT}}
        case "twice":
            looser = {"properties": {"digit": {"type": ["integer", "string"]}}}
            return {"allOf": [schema, looser], "$defs": DEFINITIONS, "properties": {"digit": DIGIT}}
        case "any":
            return {"anyOf": [schema, {"required": ["digit"]}], "$defs": DEFINITIONS, "properties": {"digit": DIGIT}}
        case "undeclared":
            return {**schema, "required": [*schema["required"], "more"], "additionalProperties": DIGIT, "$defs": DEFINITIONS}
        case "map":
            return {"additionalProperties": {"type": "string", "maxLength": 2}, "minProperties": 1, "maxProperties": 2}
    return {**schema, "additionalProperties": False, "$defs": DEFINITIONS}


@pytest.mark.parametrize("form", ["plain", "reference", "all", "twice", "any", "undeclared", "map"])
@pytest.mark.parametrize(
    "parser",
    ["gemma4", "qwen3_coder", "minimax_m2", "deepseek_v32", "glm45", "pythonic", "hermes", "kimi_k3", "minicpm5", "functiongemma"],
)
def test_random_arguments_under_the_grammar_validate_against_the_schema(parser: str, form: str) -> None:
    """For every keyword of PROPERTIES, and however the schema is expressed."""
    rng = random.Random(f"{parser} {form}")
    model = ConstrainedModel([], parser)
    generated: set[str] = set()
    full = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES]}
    jsonschema.Draft202012Validator.check_schema(equivalent_schema(full, form))  # once: it takes longer than everything below
    for round in range(30):
        names = [[*PROPERTIES][round % len(PROPERTIES)], *rng.sample([*PROPERTIES], rng.randrange(2))]
        # llguidance 1.9.1 allows a token whose text is part of a constant in its mask, but doesn't accept it.
        names = [name for name in names if PROPERTIES[name] != {"const": [*model.special][-1]}]
        properties = {"digit": DIGIT, **{name: PROPERTIES[name] for name in names}}
        required = [name for name in properties if name != "never" and rng.random() < 0.7]
        schema = equivalent_schema({"type": "object", "properties": properties, "required": required}, form)
        grammar = constraint(parser, {"get-it": schema}, False, special=model.special.get)
        for _ in range(3):
            text = model.generate(grammar.source, rng, 600)
            if text is None:
                continue
            generated.update(names)
            [call, *rest] = parts_of([text], None, parser, schemas={"get-it": schema})
            assert isinstance(call, Call)
            assert call.name == "get-it"
            [arguments] = rest
            assert isinstance(arguments, Arguments)
            jsonschema.Draft202012Validator(schema).validate(json.loads(arguments.text))
    assert generated == set(PROPERTIES) - ({"tag"} if "</parameter>" in model.special else set())


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_every_parsers_format_can_contain_every_tool_name(parser: str) -> None:
    rng = random.Random(parser)
    model = ConstrainedModel([marker for marker in markers(None, parser) if parser == "harmony"])
    for name in ("get-it", "srv/tool", "ns:tool", "@a/b.c", "$f", "3d", "-", "größe", "function", "n" * 128):
        schemas = tools_of([{"type": "function", "function": {"name": name}}], "required", None).schemas
        text = model.generate(constraint(parser, schemas, False, special=model.special.get).source, rng)
        assert text is not None
        read = reader(None, parser, schemas={name: {}})
        found = [part for part in [*read.push(text), *read.end()] if not isinstance(part, Reasoning)]
        assert [type(part) for part in found] == [Call, Arguments], text
        assert isinstance(found[0], Call)
        assert found[0].name == name


@pytest.mark.parametrize("parser", TOOL_PARSERS)
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": 5}},
        {"properties": 5, "required": 5},
        {"properties": {"a": {}}, "required": [["a"], {}]},
        {"properties": {"a": {"type": {}, "enum": 3, "anyOf": 4, "$ref": []}}},
        *({"properties": {"a": {"type": kind}}} for kind in ("float", None, 5, {}, ["string", "any"], ["string", 5], [["string"]])),
        {"properties": {"a": {"type": "string", "minLength": "x", "maxLength": []}}},
        {"properties": {"a": {"$ref": "#/nowhere/0"}}, "allOf": [3]},
        {"$ref": "#"},
    ],
)
def test_malformed_schema_is_translated_without_an_exception(parser: str, schema: dict[str, Any]) -> None:
    """Checking the grammar may refuse it."""
    assert constraint(parser, {"f": schema}, True).source


@pytest.mark.parametrize("argument", [{"anyOf": []}, {"allOf": [{"type": "null"}, {"enum": ["x"]}]}], ids=str)
@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_unsatisfiable_argument_is_refused(parser: str, argument: Any) -> None:
    parameters = {"properties": {"a": argument}, "required": ["a"]}
    found = constraint(parser, {"f": parameters}, True)
    assert "nsatisfiable" in problem(found)


@pytest.mark.parametrize("parser", ["gemma4", "qwen3_coder", "deepseek_v32", "glm45", "pythonic"])
def test_schema_with_thousands_of_all_of_parts_is_refused_quickly(parser: str) -> None:
    parts = [{"properties": {f"p{index}": {}}, "required": [f"p{index}"]} for index in range(15_000)]
    start = time.thread_time()
    with pytest.raises(Refused, match="its grammar has more than"):
        constraint(parser, {"f": {"allOf": parts}}, True)
    assert time.thread_time() - start < 1


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_too_deeply_nested_parameters_are_refused(parser: str) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(3000):
        schema = {"anyOf": [schema]}
    with pytest.raises(Refused, match="nested too deeply") as refused:
        constraint(parser, {"f": {"properties": {"a": schema}}}, True)
    assert refused.value.parameter == "tools"
