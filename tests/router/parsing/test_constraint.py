"""Whatever a model writes under a constraint, its reader reads as calls of the tools, and as nothing else."""

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
from penstock.tests.router.parsing.test_readers import parts_of

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
            "parameters": {"properties": {"a": {"type": "null"}, "b": {"type": "boolean"}}},  # an object, though it doesn't say so
        },
    },
]
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}


BIG = {"type": "object", "properties": {f"q{i}": {"type": "string", "description": "x" * 50} for i in range(1000)}}


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_definitions_are_not_repeated_without_an_end(parser: str) -> None:
    """Each parameter by itself would need them again; a grammar that is too long is not even made."""

    def source(properties: Any, definitions: Any) -> str:
        parameters = {"type": "object", "properties": properties, "$defs": definitions}
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        return constraint(parser, [tool], None, True).source

    small = {f"d{i}": {"type": "object", "properties": {"a": {"type": "integer"}}} for i in range(61)}
    assert len(source({f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(25)}, small)) < 10_000
    assert len(source({f"p{i}": {"type": "integer"} for i in range(250)}, {})) < 65_536
    with pytest.raises(Refused, match="its grammar has more than 65536 characters"):
        source({f"p{i}": {"$ref": "#/$defs/x"} for i in range(1000)}, {"x": BIG})


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_parameters_that_are_too_large_are_not_looked_at(parser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[constraint.__module__], "objects", None)
    parameters = {"type": "object", "properties": {f"p{i}": {} for i in range(65_536 // 8)}}
    with pytest.raises(Refused, match="`tools` is too large: its grammar has more than 65536 characters"):
        constraint(parser, [{"type": "function", "function": {"name": "f", "parameters": parameters}}], None, True)


DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="unit" string="true">F</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="place" string="false">[true]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
# Ends of texts, which a monkey would not find letter by letter.
WORDS: dict[str, list[str]] = {
    "letters": [],
    "gemma4": ['<|"|>'],
    "minimax_m2": ["</parameter>"],
    "seed_oss": ["</parameter>"],
    "deepseek_v32": ["</｜DSML｜parameter>"],
}


class World:
    """A byte-level tokenizer in which some markers are special tokens, and a model that writes anything that is allowed."""

    def __init__(self, special: list[str], parser: str = "") -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.tokenizer = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens(["<end>", *special])
        words = [] if special else WORDS.get(parser, ["\n</parameter>", "</arg_value>"])
        self.tokenizer.add_tokens(words)
        self.end = self.tokenizer.token_to_id("<end>")
        self.size = self.tokenizer.get_vocab_size()
        self.special = {text: self.tokenizer.token_to_id(text) for text in [*special, *words]}
        self.llguidance = llguidance.LLTokenizer(self.tokenizer.to_str(), n_vocab=self.size, eos_token=self.end)
        self.matchers: dict[str, Any] = {}  # of each grammar, at its beginning
        self.closers = {self.tokenizer.token_to_id(char) for char in [*'"}])</>', *words]} | set(self.special.values()) | {self.end}

    def matcher(self, source: str) -> Any:
        if source not in self.matchers:
            grammar = llguidance.LLMatcher.grammar_from_lark(source)
            assert not llguidance.LLMatcher.validate_grammar(grammar, self.llguidance), source
            self.matchers[source] = llguidance.LLMatcher(self.llguidance, grammar)
        return self.matchers[source].deep_copy()

    def writes(self, source: str, luck: random.Random, most: int = 1500) -> str | None:
        """None if it doesn't come to an end."""
        matcher = self.matcher(source)
        ids: list[int] = []
        while len(ids) < most:
            mask = numpy.frombuffer(matcher.compute_bitmask(), dtype=numpy.uint8)
            allowed = numpy.flatnonzero(numpy.unpackbits(mask, bitorder="little")[: self.size]).tolist()
            closing = [id for id in allowed if id in self.closers]
            id = luck.choice(closing if closing and luck.random() < 0.4 else allowed)
            assert matcher.consume_token(id), matcher.get_error()
            if id == self.end:
                return str(self.tokenizer.decode(ids, skip_special_tokens=False))
            ids.append(id)
        return None

    def accepts(self, source: str, text: str) -> bool:
        matcher = self.matcher(source)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return bool(matcher.validate_tokens([*ids, self.end]) == len(ids) + 1)


def check(parts: list[Part]) -> list[str]:
    """The names of the calls, each with all arguments that its schema requires."""
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
def test_what_is_allowed_is_read(parser: str, special: bool) -> None:
    luck = random.Random(parser)
    world = World([marker for marker in markers(None, parser) if (special and marker[0] in "<[") or parser == "harmony"], parser)
    several = constraint(parser, TOOLS, None, True, special=world.special.get)
    assert several.kind == "lark"
    one = constraint(parser, TOOLS, None, False, special=world.special.get)
    named = constraint(parser, TOOLS, "weather", True, special=world.special.get)
    longest = ended = 0
    for _ in range(12):
        for grammar in (several, one, named):
            text = world.writes(grammar.source, luck)
            if text is None:
                continue
            ended += 1
            parts = parts_of([text], None, parser, schemas=SCHEMAS)
            if parser == "harmony":
                parts = [part for part in parts if not isinstance(part, Reasoning)]
            names = check(parts)
            assert names, text
            assert grammar is several or len(names) == 1
            assert grammar is not named or names == ["weather"]
            longest = max(longest, len(names))
    assert ended > 10
    assert longest > 1 or parser == "harmony"


@pytest.mark.parametrize("reasoning", REASONING_FORMS)
@pytest.mark.parametrize("special", [False, True])
def test_a_model_may_think_before(reasoning: str, special: bool) -> None:
    thoughts = REASONING_FORMS[reasoning]
    world = World([*thoughts.markers, "<tool_call>", "</tool_call>"] if special else [])
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'

    def grammar(prompt: str, continued: str = "") -> str:
        asked: dict[str, Any] = {"reasoning": reasoning, "prompt": prompt + continued, "continued": continued}
        return constraint("hermes", TOOLS, "now", True, **asked, special=world.special.get).source

    [opened, *_], [closed, *_] = thoughts.opens, thoughts.closes
    assert world.accepts(grammar("<user>"), call)
    assert world.accepts(grammar("<user>"), f"{opened}\nHm < ?\n{closed}\n\n{call}")
    assert world.accepts(grammar(f"<user>{opened}\n"), f"Hm < ?\n{closed}\n\n{call}")
    assert not world.accepts(grammar(f"<user>{opened}\n"), call)
    assert not world.accepts(grammar("<user>"), f"Hm. {call}")
    assert world.accepts(grammar("<bot>", f"{opened}\nH"), f"m < ?\n{closed}\n\n{call}")
    assert not world.accepts(grammar("<bot>", f"{opened}\nH"), call)
    assert world.accepts(grammar("<bot>", f"{opened}\nHm{closed}So"), call)


FORMATS = [
    (json_schema({"properties": {"a": {"type": "integer"}}}), '{"a": 1}', '{"a": "1"}'),
    (regex("a/b\n\\/c[/\n]"), "a/b\n/c/", "a/b/c/"),
    (regex("x|"), "", "xx"),
    (choice(['<b> /"', "b", ""]), '<b> /"', "bb"),
]


@pytest.mark.parametrize(("format", "answer", "other"), FORMATS)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("reasoning", REASONING_PARSERS)
def test_a_model_may_think_before_an_answer_with_a_format(
    reasoning: str, special: bool, format: Grammar, answer: str, other: str
) -> None:
    analysis = "<|channel|>analysis<|message|>"
    opened, closed, user, head = analysis, "<|end|><|start|>assistant", "<|start|>assistant", "<|channel|>final<|message|>"
    if reasoning != "harmony":
        [opened, *_], [closed, *_], user, head = REASONING_FORMS[reasoning].opens, REASONING_FORMS[reasoning].closes, "<user>", ""
    world = World([*markers(reasoning, None)] if special or reasoning == "harmony" else [], "letters")

    def accepts(prompt: str, text: str, continued: str = "") -> bool:
        asked: dict[str, Any] = {"prompt": prompt + continued, "continued": continued, "special": world.special.get}
        grammar = format_grammar(format, reasoning, **asked)
        assert grammar is not None
        accepted = world.accepts(grammar.source, text)
        if accepted and answer:
            last = parts_of(list(text), reasoning, None, prompt=prompt + continued, continued=continued)[-1]
            assert last == Text(answer)
        return accepted

    assert accepts(user, head + answer)
    assert accepts(user, f"{opened}Hm{closed}{head}{answer}")
    assert accepts(f"{user}{opened}", f"Hm{closed}{head}{answer}")
    assert not accepts(f"{user}{opened}", head + answer)
    assert not accepts(user, head + other)
    assert not accepts(user, f"{opened}Hm{closed}{head}{other}")
    assert not accepts(user, f"So {answer}")
    if reasoning == "harmony":
        assert accepts(f"{user}{head}", answer)
        assert not accepts(f"{user}{head}", head + answer)


def test_of_a_grammar_nobody_knows_what_else_it_names() -> None:
    for format in (lark('start: "a"'), rules('root ::= "a"')):
        assert format_grammar(format, "deepseek_r1", special=lambda text: None) is None
        with pytest.raises(Refused, match="a format that is a grammar is not supported"):
            constraint("hermes", TOOLS, None, True, format=format)


def test_who_has_begun_to_answer_thinks_no_more() -> None:
    world = World([], "letters")
    for continued, thinks in (("", True), ("[", False), ("<think>Hm</think>[", False), ("<think>H", True)):
        asked: dict[str, Any] = {"prompt": f"<user>{continued}", "continued": continued, "special": world.special.get}
        grammar = format_grammar(json_schema({"properties": {}}), "deepseek_r1", **asked)
        assert grammar is not None
        begin = "" if continued.endswith("H") else "<think>"
        assert world.accepts(grammar.source, begin + "m</think>{}") == thinks
        assert world.accepts(grammar.source, "{}") == (continued != "<think>H")


def test_of_gpt_oss_all_is_in_channels_whatever_its_calls_are_said_to_be() -> None:
    world = World(list(markers("harmony", None)))
    format = json_schema({"properties": {}})
    source = constraint("json", TOOLS, None, True, format=format, reasoning="harmony", special=world.special.get).source
    assert world.accepts(source, "<|channel|>final<|message|>{}")
    assert world.accepts(source, "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}")
    assert not world.accepts(source, "{}")
    begun: dict[str, Any] = {"prompt": "<|start|>assistant<|channel|>final<|message|>{", "special": world.special.get}
    assert world.accepts(constraint("harmony", TOOLS, None, True, format=format, **begun).source, "{}")


def test_what_types_repeat_takes_no_time() -> None:
    schema: Any = {"type": "string"}
    for _ in range(12):
        schema = {"type": ["object", "array"] * 9, "properties": {"a": schema}, "items": {"type": "integer"}}
    start = time.thread_time()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}}
    constraint("gemma4", [tool], None, True)
    assert time.thread_time() - start < 9


def test_gpt_oss_may_call_at_once_where_the_prompt_names_its_role() -> None:
    world = World(list(markers(None, "harmony")))
    assistant, analysis = "<|start|>assistant", "<|channel|>analysis<|message|>"
    direct = ' to=functions.pick<|channel|>commentary json<|message|>{"b": true}'
    channel = '<|channel|>commentary to=functions.pick <|constrain|>json<|message|>{"b": true}'

    def accepts(prompt: str, text: str) -> bool:
        grammar = constraint("harmony", TOOLS, None, True, prompt=prompt, special=world.special.get)
        parts = parts_of([text], None, "harmony", prompt=prompt, schemas=SCHEMAS)
        accepted = world.accepts(grammar.source, text)
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
        (
            "gemma4",
            '<|tool_call>call:weather{city:<|"|>Paris<|"|>,place:[true],unit:<|"|>F<|"|>}<tool_call|><|tool_call>call:now{}<tool_call|>',
        ),
    ],
)
def test_what_models_were_trained_to_write_is_allowed(parser: str, text: str) -> None:
    world = World([])
    source = constraint(parser, TOOLS, None, True, special=world.special.get).source
    assert world.accepts(source, text)
    assert not world.accepts(source, text.replace("name", "nome").replace("c", "k"))
    assert not world.accepts(source, f"{text} So.")


@pytest.mark.parametrize("word", ["｜DSML｜", "</｜DSML｜parameter>"])
def test_a_token_may_be_within_a_tag(word: str) -> None:
    """As DeepSeek V3.2's is: no literal matches it."""
    world = World([word])
    source = constraint("deepseek_v32", TOOLS, None, True, special=world.special.get).source
    assert world.accepts(source, DSML)
    assert world.accepts(source, DSML.replace("Paris", "</Pa<ris</"))
    assert not world.accepts(source, DSML.replace('string="true">Paris', 'string="false">Paris'))


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
    ],
)
def test_a_string_ends_also_where_its_end_is_no_token(parser: str, text: str, schema: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", **schema}}, "required": ["a"]}
    world = World([], "letters")
    source = constraint(parser, [{"type": "function", "function": {"name": "f", "parameters": parameters}}], None, False).source
    assert world.accepts(source, text)
    assert world.accepts(source, text.replace("<b>", "</bb>"))
    assert world.accepts(source, text.replace("<b>", "<")) == (schema != {"minLength": 2})
    assert world.accepts(source, text.replace("<b>", "nine letters")) == (schema != {"maxLength": 9})


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


def wrapped(schema: dict[str, Any], way: str) -> dict[str, Any]:
    """The same schema in another way."""
    match way:
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


@pytest.mark.parametrize("way", ["plain", "reference", "all", "twice", "any", "undeclared", "map"])
@pytest.mark.parametrize("parser", ["gemma4", "qwen3_coder", "minimax_m2", "deepseek_v32", "glm45", "pythonic", "hermes"])
def test_arguments_are_valid(parser: str, way: str) -> None:
    """Whatever a schema says, and however: what is written under the grammar validates when it was read."""
    luck = random.Random(f"{parser} {way}")
    world = World([], parser)
    ended: set[str] = set()
    every = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES]}
    jsonschema.Draft202012Validator.check_schema(wrapped(every, way))  # once: it takes longer than all below
    for round in range(30):
        names = [[*PROPERTIES][round % len(PROPERTIES)], *luck.sample([*PROPERTIES], luck.randrange(2))]
        # llguidance 1.9.1 offers a token whose text stands in a constant, and doesn't take it.
        names = [name for name in names if PROPERTIES[name] != {"const": [*world.special][-1]}]
        properties = {"digit": DIGIT, **{name: PROPERTIES[name] for name in names}}
        required = [name for name in properties if name != "never" and luck.random() < 0.7]
        schema = wrapped({"type": "object", "properties": properties, "required": required}, way)
        tool = {"type": "function", "function": {"name": "get-it", "parameters": schema}}
        grammar = constraint(parser, [tool], None, False, special=world.special.get)
        for _ in range(3):
            text = world.writes(grammar.source, luck, 600)
            if text is None:
                continue
            ended.update(names)
            [call, *rest] = parts_of([text], None, parser, schemas={"get-it": schema})
            assert isinstance(call, Call)
            assert call.name == "get-it"
            [arguments] = rest
            assert isinstance(arguments, Arguments)
            jsonschema.Draft202012Validator(schema).validate(json.loads(arguments.text))
    assert ended == set(PROPERTIES) - ({"tag"} if "</parameter>" in world.special else set())


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_every_form_holds_every_name(parser: str) -> None:
    luck = random.Random(parser)
    world = World([marker for marker in markers(None, parser) if parser == "harmony"])
    for name in ("get-it", "srv/tool", "ns:tool", "@a/b.c", "$f", "3d", "-", "größe", "function", "n" * 128):
        [tool] = tools_of([{"type": "function", "function": {"name": name}}], "required", None).given
        text = world.writes(constraint(parser, [tool], None, False, special=world.special.get).source, luck)
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
        {"properties": {"a": {"type": "string", "minLength": "x", "maxLength": []}}},
        {"properties": {"a": {"$ref": "#/nowhere/0"}}, "allOf": [3]},
        {"$ref": "#"},
    ],
)
def test_what_is_no_schema_is_a_grammars_affair(parser: str, schema: dict[str, Any]) -> None:
    """Whoever checks the grammar may refuse it."""
    assert constraint(parser, [{"type": "function", "function": {"name": "f", "parameters": schema}}], None, True).source


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_a_value_that_nothing_fits_is_refused(parser: str) -> None:
    parameters = {"properties": {"a": {"anyOf": []}}, "required": ["a"]}
    found = constraint(parser, [{"type": "function", "function": {"name": "f", "parameters": parameters}}], None, True)
    assert "nsatisfiable" in problem(found)


@pytest.mark.parametrize("parser", ["gemma4", "qwen3_coder", "deepseek_v32", "glm45", "pythonic"])
def test_many_parts_take_no_time(parser: str) -> None:
    parts = [{"properties": {f"p{index}": {}}, "required": [f"p{index}"]} for index in range(15_000)]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"allOf": parts}}}
    start = time.thread_time()
    with pytest.raises(Refused, match="its grammar has more than"):
        constraint(parser, [tool], None, True)
    assert time.thread_time() - start < 1


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_parameters_that_are_nested_too_deeply_are_refused(parser: str) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(3000):
        schema = {"anyOf": [schema]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    with pytest.raises(Refused, match="nested too deeply") as refused:
        constraint(parser, [tool], None, True)
    assert refused.value.parameter == "tools"
