"""Grammar checks: valid grammars are accepted, others refused with the reason; a slow check blocks neither router nor requests."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import llguidance
import pytest

from penstock.router import grammar as module
from penstock.router.grammar import Grammars, choice, json_object, json_schema, lark, problem, regex, rules, written
from penstock.router.request import Grammar, Overloaded, Refused
from penstock.router.worker_processes import Busy, Died, TimedOut, WorkerProcesses

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
OPTIONAL_NODE = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["next"],
}
pytestmark = pytest.mark.usefixtures("own_processes")

ANSWER = b'["", 0.01, "regex", "a"]'  # of the worker process: the grammar is valid


def special_id(name: str) -> int | None:
    return 0 if name == "<|user|>" else None


def run(test: Callable[[Grammars], Awaitable[None]]) -> None:
    async def main() -> None:
        grammars = Grammars(special_id)
        async with asyncio.timeout(60):
            await test(grammars)

    asyncio.run(main())


@pytest.fixture(scope="module")
def checked() -> Iterator[Callable[[Grammar], str]]:
    """A function from a grammar to why it is refused, or "" if it is accepted."""
    grammars = Grammars(special_id)
    with asyncio.Runner() as runner:

        def checked(grammar: Grammar) -> str:
            [found] = runner.run(gathered(grammar))
            if isinstance(found, Grammar):
                return ""
            assert isinstance(found, Refused)
            assert found.parameter == "grammar"
            return str(found)

        async def gathered(grammar: Grammar) -> list[Grammar | BaseException]:
            return await asyncio.gather(grammars.check(grammar), return_exceptions=True)

        yield checked


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


VALID = [
    json_object(),
    json_schema(True),
    json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}),
    json_schema({"$defs": {"node": OPTIONAL_NODE}, "$ref": "#/$defs/node"}),
    lark('// %json {"$ref": "#"}\nstart: "a"'),
    json_schema({"$defs": {"node": NODE}, "type": "array", "items": {"$ref": "#/$defs/node"}}),
    json_schema({"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    json_schema({"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(50)} | {"d50": {}}, "$ref": "#/$defs/d0"}),
    json_schema({"properties": {"a/b~c": {"enum": ["é", "😀", None, 1]}}, "items": {"$ref": "#/properties/a~1b~0c"}}),
    json_schema(nested(20)),
    json_schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}),
    regex(r"^[a-z]+@[a-z]+\.(com|org)$"),
    regex(""),
    lark('start: "a" <|user|> x\nx: /[0-9]+/'),
    rules('start: "a ::= b"'),
    rules('root ::= "%json {" x?\nx ::= "y" x | "<|nobody|>"'),
    lark('start: expression\nexpression: /[0-9]+/ | expression "+" expression'),
    choice(["a", "ab", ""]),
    choice(['"', "\\", "\n", "\x00", "é😀\u2028", ".*", "</s>", "-", "#"]),
]


@pytest.mark.parametrize("grammar", VALID, ids=range(len(VALID)))
def test_valid_grammar_is_accepted(checked: Callable[[Grammar], str], grammar: Grammar) -> None:
    assert checked(grammar) == ""


INVALID = [
    (
        lark(f'start: "a" (b | c)\nb: "%json "\nc: %json {json.dumps({"$defs": {"node": NODE}, "$ref": "#/$defs/node"})}'),
        "without end",
    ),
    (json_schema({"not": {"type": "string"}}), 'Unimplemented keys: ["not"]'),
    (json_schema({"type": "array", "uniqueItems": True}), 'Unimplemented keys: ["uniqueItems"]'),
    (json_schema({"type": "strin"}), "Invalid type: strin"),
    (json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum (5) is greater than maximum (3)"),
    (json_schema({"allOf": [{"type": "string"}, {"type": "integer"}]}), "incompatible types"),
    (json_schema({"enum": []}), "empty"),
    (json_schema(False), "schema is false"),
    (json_schema({"type": "string", "pattern": "a(?=b)"}), "look-around"),
    (json_schema({"type": "string", "format": "colour"}), "Unknown format: colour"),
    (json_schema({"$ref": "#/$defs/nobody"}), "'/$defs/nobody' does not exist"),
    (json_schema({"$ref": "http://example.com/schema"}), "http://example.com/schema"),
    (json_schema({"oneOf": [{"type": "string"}, {"type": "string"}]}), "oneOf"),
    (json_schema({"$ref": "#"}), "refers to itself without end"),
    (json_schema({"$defs": {"node": NODE}, "$ref": "#/$defs/node"}), "refers to itself without end"),
    (json_schema({"$defs": {"node": NODE}, "type": "array", "minItems": 1, "items": {"$ref": "#/$defs/node"}}), "without end"),
    (
        json_schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}),
        "without end",
    ),
    (lark("start: " + "x" * 65_536), "65536 characters"),
    (json_schema(nested(400)), "recursion limit exceeded"),
    (Grammar("json_schema", "{"), "EOF"),
    (Grammar("json_schema", "[" * 60_000), "nested too deeply"),
    (Grammar("json_schema", "[1]"), "schema must be an object or boolean"),
    (Grammar("json_schema", '{"enum":["\ud800"]}'), "half of a surrogate pair"),
    (regex("a(b"), "unclosed group"),
    (regex(r"(a)\1"), "backreferences"),
    (regex(r"[^\s\S]"), "no text"),
    (regex("x" * 70_000), "65536 characters"),
    (lark('start: "a" y'), 'unknown name: "y"'),
    (lark("start: <|nobody|>"), "unknown special token"),
    (lark('x: "a"'), "no start rule"),
    (lark(""), "Empty grammar"),
    (choice([]), "at least one"),
    (Grammar("choice", '["\\ud800"]'), "half of a surrogate pair"),
    (Grammar("choice", '"a"'), "list of strings"),
    (Grammar("abnf", "x"), "json_schema, regex, lark, choice"),
    (rules('root ::= "a"\n  | b'), "not possible: line 2: there is no rule b"),
    (rules("root ::= [" + "é" * 20_000 + "]"), "65536 characters when each is written"),
    (rules('root ::= "\ud800"'), "half of a surrogate pair"),
    (rules("root ::= root"), "no text that it allows"),
    (rules('root ::= ("a"?){3000} "a"{3000}'), "too many expressions"),
]


@pytest.mark.parametrize(("grammar", "reason"), INVALID, ids=range(len(INVALID)))
def test_invalid_grammar_is_refused_with_the_reason(checked: Callable[[Grammar], str], grammar: Grammar, reason: str) -> None:
    message = checked(grammar)
    assert reason in message
    assert "\n" not in message
    assert len(message) < 600


def test_regex_that_exceeds_the_expression_limit_is_refused_by_the_compiler() -> None:
    assert "too many expressions" in problem(regex("(a{60000}){60000}"))


EXPENSIVE = [
    rules("root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000),
    rules("root ::= " + "(" * 60_000),
    rules("root ::= " + "x " * 30_000 + "\nx ::= x x | "),
    rules("\n".join(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(2000)) + '\na2000 ::= "a"\nroot ::= a0'),
    rules("\n".join(f"a{i} ::= a{i + 1}* | a0" for i in range(2000)) + '\na2000 ::= "a"\nroot ::= a0'),
    rules('root ::= (((("a"{1,999}){1,999}){1,999}){1,999}){1,999}'),
    rules("root ::= " + "[^a]*" * 12_000),
    rules('root ::= "' + "\\" * 65_000),
    rules("root ::= {" + "1" * 60_000 + "}"),
    regex("((a{1,100}){1,100}){1,100}"),
    regex(".*a.{18}"),
    regex("(a{60000}){60000}"),
    regex("[a-z]*" * 10_000),
    regex("(a|" * 5000 + "b" + ")" * 5000),
    regex("|".join(f"w{i}x" for i in range(8000))),
    json_schema({"type": "array", "maxItems": 10**4, "items": {"type": "array", "maxItems": 10**4, "items": {"maxLength": 10**6}}}),
    json_schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2200)}}),
    json_schema({"enum": [f"value {i}" for i in range(4000)]}),
    json_schema(
        {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{j}"} for j in range(40)]} for i in range(40)}, "$ref": "#/$defs/d0"}
    ),
    json_schema({"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1500)}, "$ref": "#/$defs/d0"}),
    json_schema({"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {"type": "integer"}}} for j in range(4)]} for i in range(10)]}),
]


def test_expensive_grammars_block_neither_the_event_loop_nor_later_grammars() -> None:
    """Each is answered within a second or little more, the event loop runs meanwhile, and a grammar after them is accepted."""

    async def test(grammars: Grammars) -> None:
        ticks = 0

        async def count_ticks() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticker = asyncio.create_task(count_ticks())
        for grammar in EXPENSIVE:
            start = time.perf_counter()
            with suppress(Refused, Overloaded):
                await grammars.check(grammar)
            assert time.perf_counter() - start < module.MOST_SECONDS + 9
        ticker.cancel()
        assert ticks > 50
        await grammars.check(json_object())

    run(test)


def replace_workers(monkeypatch: pytest.MonkeyPatch, answer: Callable[[int], Awaitable[bytes]]) -> None:
    """Lets `answer` take the worker processes' place; it is called with the number of the job, from 0."""
    job_numbers = count()

    async def ask(self: WorkerProcesses, job: bytes, seconds: float, patience: float | None = None) -> bytes:
        return await answer(next(job_numbers))

    monkeypatch.setattr(WorkerProcesses, "ask", ask)


@pytest.mark.parametrize("index", ["²", "1" * 5000, "99999999999"])
def test_reference_with_an_invalid_array_index_is_refused_with_a_reason(index: str) -> None:
    """Digits that are not decimal, or too many for Python's int."""
    message = problem(json_schema({"$ref": f"#/anyOf/{index}", "anyOf": [{}]}))
    assert message.startswith(("Invalid URI reference", "Failed to parse array index", "Pointer")), message


def test_grammar_with_multiplied_repetitions_is_refused(checked: Callable[[Grammar], str]) -> None:
    """llguidance gives up after 0.3 to 0.7 s, and the time limit is 0.5: either reason may come first."""
    message = checked(rules('root ::= ("a"{9000}){9000}'))
    assert "to compile; make it simpler" in message or "not possible: lexer error: too many expressions" in message


def test_grammar_that_exceeds_the_work_limit_is_refused_and_the_refusal_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the time limit: the worker process says so, and ends."""
    monkeypatch.setattr(module, "MOST_SECONDS", 60.0)

    async def test(grammars: Grammars) -> None:
        slow = lark("start: A\nA: " + " & ".join(f"/(.*a.{{{9 + n}}}b.*)/" for n in range(24)))  # some 40 s without a limit
        for _ in range(2):
            with pytest.raises(Refused, match="to compile; make it simpler"):
                await grammars.check(slow)
        assert (grammars.compiled, grammars.found) == (1, 1)
        await grammars.check(json_object())

    run(test)


def test_time_limit_refuses_a_request_and_caches_the_result_that_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a check that is late says nothing about the grammar."""
    monkeypatch.setattr(module, "MOST_SECONDS", 0.05)

    async def answer_slowly(job: int) -> bytes:
        await asyncio.sleep(0.3)
        return ANSWER

    replace_workers(monkeypatch, answer_slowly)

    async def test(grammars: Grammars) -> None:
        with pytest.raises(Refused, match="to compile; make it simpler"):
            await grammars.check(json_object())
        await asyncio.sleep(0.4)
        await grammars.check(json_object())
        assert (grammars.compiled, grammars.found) == (1, 1)

    run(test)


def test_cancelling_a_check_just_before_its_result_cancels_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is done already, whatever else happens in these turns of the event loop."""
    released = asyncio.Event()

    async def wait_for_release(job: int) -> bytes:
        await released.wait()
        return ANSWER

    replace_workers(monkeypatch, wait_for_release)

    async def test(grammars: Grammars) -> None:
        released.set()
        await grammars.check(regex("b"))
        for turns in range(8):
            released.clear()
            task = asyncio.create_task(grammars.check(regex("a" * (turns + 1))))
            await asyncio.sleep(0.01)
            released.set()
            for _ in range(turns):
                await asyncio.sleep(0)
            done = task.done()
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() or done, turns

    run(test)


def test_grammar_that_kills_its_worker_is_refused_and_retried_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    expirations: list[Callable[[], None]] = []
    original = asyncio.BaseEventLoop.call_later

    def call_later(loop: Any, seconds: float, callback: Any, *arguments: Any, **options: Any) -> Any:
        if seconds == module.DOUBT:
            expirations.append(partial(callback, *arguments))
        return original(loop, seconds, callback, *arguments, **options)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_later", call_later)

    async def die_once(job: int) -> bytes:
        if job < 1:
            raise Died
        return ANSWER

    replace_workers(monkeypatch, die_once)

    async def test(grammars: Grammars) -> None:
        for _ in range(2):
            with pytest.raises(Refused, match="the library that compiles grammars fails for it"):
                await grammars.check(regex("a"))
        [expire] = expirations  # of the cached refusal
        expire()
        await grammars.check(regex("a"))

    run(test)


def test_worker_timeout_is_an_overload_and_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    async def time_out_once(job: int) -> bytes:
        if not job:
            raise TimedOut
        return ANSWER

    replace_workers(monkeypatch, time_out_once)

    async def test(grammars: Grammars) -> None:
        with pytest.raises(Overloaded):
            await grammars.check(regex("a"))
        await grammars.check(regex("a"))

    run(test)


def test_busy_workers_are_an_overload_and_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    async def busy_once(job: int) -> bytes:
        if not job:
            raise Busy
        return ANSWER

    replace_workers(monkeypatch, busy_once)

    async def test(grammars: Grammars) -> None:
        with pytest.raises(Overloaded):
            await grammars.check(regex("a"))
        await grammars.check(regex("a"))
        assert grammars.compiled == 2

    run(test)


DEEP_LARK = "start: r0\n" + "\n".join(f"r{depth}: r{depth + 1}" for depth in range(3000)) + '\nr3000: "a"'
CRASHING = [
    json_schema({"const": -(2**63)}),
    json_schema({"type": "object", "properties": {"a": {"enum": [-(2**63), 2]}}, "required": ["a"]}),
    json_schema({"type": "integer", "minimum": -(10**25), "maximum": -(10**24)}),
    lark(f'start: %json {{"const": {-(2**63)}}}'),
    lark(DEEP_LARK),
]


@pytest.mark.parametrize("grammar", CRASHING, ids=range(len(CRASHING)))
def test_grammar_that_crashes_llguidance_is_refused(checked: Callable[[Grammar], str], grammar: Grammar) -> None:
    """llguidance 1.9.1 crashes for some 64-bit integers, and on stack overflow."""
    assert "`grammar` is not possible" in checked(grammar)
    assert checked(json_object()) == ""


def test_bounds_at_the_limits_of_64_bit_integers_are_accepted(checked: Callable[[Grammar], str]) -> None:
    """Schema generators write them. llguidance can't handle the lowest: the grammar allows slightly less."""
    grammar = json_schema({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1})
    assert checked(grammar) == ""
    assert -(2**63) < json.loads(grammar.source)["minimum"] < -(2**63) + 2048


def allows(grammar: Grammar, text: str) -> bool:
    matcher = llguidance.LLMatcher(module._byte_tokenizer(()), written(grammar), log_level=0)
    data = list(text.encode())
    return matcher.validate_tokens(data) == len(data) and matcher.consume_tokens(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("bounds", "valid", "invalid"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.01", "0.0000001"], ["0", "-0", "0.0", "0.51"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1e-6}, ["0.0000005"], ["0", "0.000001"]),
        ({"exclusiveMinimum": 2, "minimum": 1, "maximum": 2.5}, ["2.5", "2.001"], ["2", "2.0", "1.5", "3"]),
        ({"minimum": -3.5, "exclusiveMaximum": -3}, ["-3.5", "-3.001"], ["-3", "-3.0", "-2"]),
        ({"exclusiveMinimum": -0.5, "exclusiveMaximum": 0}, ["-0.25"], ["0", "-0", "-0.5"]),
        ({"minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}, ["0", "-1.5", "123456789"], []),
        ({"minimum": -(10**400), "exclusiveMaximum": 10**400}, ["0", "1.5"], []),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, ["0.5", "0.01"], ["0", "0.0", "0.51"]),
        (
            {"allOf": [{"allOf": [{"exclusiveMaximum": 0, "maximum": 7}]}, {"minimum": -1}], "minimum": -0.5},
            ["-0.5"],
            ["0", "-0.6"],
        ),
        ({"allOf": [{"exclusiveMinimum": 2}, True], "maximum": 2.5}, ["2.5", "2.001"], ["2", "2.51"]),
    ],
    ids=str,
)
def test_exclusive_and_extreme_bounds_of_numbers_are_enforced(
    checked: Callable[[Grammar], str], bounds: dict[str, float], valid: list[str], invalid: list[str]
) -> None:
    """llguidance 1.9.1 alone allows some numbers equal to an exclusive bound, and can't represent some bounds that are far away."""
    grammar = json_schema({"type": "number", **bounds})
    assert checked(grammar) == ""
    assert [text for text in valid + invalid if allows(grammar, text)] == valid


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("lower_keyword", "upper_keyword"), [("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
def test_integer_bounds_beyond_53_bits_allow_nothing_outside(
    checked: Callable[[Grammar], str], lower_keyword: str, upper_keyword: str, sign: int
) -> None:
    """llguidance holds them as floats, which lie inside or outside of such a bound, but not on it."""
    for low, high in ((2**53, 2**54), (2**60 + 1, 2**61 + 300), (2**60 + 200, 2**62), (2**53 + 1, 2**53 + 7), (2**62, 2**63 - 1)):
        first, last = sorted((sign * low, sign * high))
        grammar = json_schema({"type": "integer", lower_keyword: first, upper_keyword: last})
        assert checked(grammar) == ""
        exclusive = lower_keyword != "minimum"
        around = [
            number
            for bound in (first, last)
            for number in (*range(bound - 1100, bound + 1101, 7), *range(bound - 9, bound + 10))
            if abs(number) < 2**63
        ]
        allowed = [number for number in around if allows(grammar, str(number))]
        assert allowed
        assert all(first + exclusive <= number <= last - exclusive for number in allowed)


def test_bounds_of_deeply_nested_all_of_are_merged_quickly() -> None:
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"allOf": [schema]}
    start = time.thread_time()
    json_schema({"anyOf": [json.loads(json.dumps(schema)) for _ in range(15)]})
    assert time.thread_time() - start < 9


def test_unsatisfiable_bounds_are_refused(checked: Callable[[Grammar], str]) -> None:
    for bounds in ({"exclusiveMinimum": 10**400, "maximum": 5}, {"exclusiveMaximum": -(10**400), "minimum": 5}):
        assert "`grammar` is not possible" in checked(json_schema({"type": "number", **bounds}))


@pytest.mark.parametrize("kind", ["integer", "number", "string", None])
def test_bounds_that_are_no_numbers_are_left_unchanged(kind: str | None) -> None:
    """Drafts of JSON Schema before draft 6 have booleans there."""
    schema = {"type": kind, "exclusiveMinimum": False, "maximum": "x", "minimum": None, "exclusiveMaximum": 0.5}
    assert json.loads(json_schema(schema).source) == schema


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"enum": [1, 1234567890123456789]}, "1234567890123456789 can't be kept to its last digit: write it as a string"),
        ({"properties": {"const": {"const": {"a": [-(2**53) - 1]}}}}, "-9007199254740993 can't be kept"),
        ({"$defs": {"a": {"anyOf": [{"items": {"const": 2**53 + 1}}]}}, "$ref": "#/$defs/a"}, "9007199254740993 can't be kept"),
        (
            {"type": "integer", "minimum": 10**20, "maximum": 10**20 + 5},
            "minimum 100000000000000000000 is beyond integers of 64 bits",
        ),
    ],
    ids=str,
)
def test_constant_or_bound_that_a_float_cannot_hold_exactly_is_refused(
    checked: Callable[[Grammar], str], schema: dict[str, Any], reason: str
) -> None:
    """llguidance 1.9.1 would generate another integer."""
    assert reason in checked(json_schema(schema))
    assert reason in checked(lark(f"start: %json {json.dumps(schema)}"))
    assert checked(json_schema({"enum": [2**53, -(2**53)], "default": 2**60})) == ""


def test_grammar_is_compiled_once_until_evicted_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(grammars: Grammars) -> None:
        for _ in range(3):
            await asyncio.gather(grammars.check(regex("ab")), grammars.check(regex("ab")))
        assert (grammars.compiled, grammars.found) == (1, 5)
        monkeypatch.setattr(module, "KEPT_GRAMMARS", 3)
        for number in range(4):
            await grammars.check(regex(f"c{number}"))
        await grammars.check(regex("ab"))
        assert grammars.compiled == 6

    run(test)


def test_cached_grammars_are_bounded_in_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_CHARACTERS", 100)

    async def test(grammars: Grammars) -> None:
        for number in range(20):
            await grammars.check(regex(f"{number}" * 15))
        assert sum(len(grammar.source) for grammar in grammars._kept) == grammars._size <= 100
        assert len(grammars._kept) >= 3

    run(test)


def test_schema_with_properties_but_no_type_is_an_object() -> None:
    """As in text-generation-inference, whose clients omit the type; nothing else is changed."""
    given = {
        "properties": {"a": {"properties": {"b": {}}}, "properties": {"enum": [{"properties": {}}]}, "c": {"$ref": "#/$defs/d"}},
        "$defs": {"d": {"properties": {}}, "e": {"type": ["object", "null"], "properties": {}}},
        "anyOf": [{"required": ["a"]}, {"properties": {"x": True}}],
        "items": {"properties": {}},
    }
    expected = {
        "type": "object",
        "properties": {
            "a": {"type": "object", "properties": {"b": {}}},
            "properties": {"enum": [{"properties": {}}]},
            "c": {"$ref": "#/$defs/d"},
        },
        "$defs": {"d": {"type": "object", "properties": {}}, "e": {"type": ["object", "null"], "properties": {}}},
        "anyOf": [{"required": ["a"]}, {"type": "object", "properties": {"x": True}}],
        "items": {"type": "object", "properties": {}},
    }
    assert json.loads(json_schema(given).source) == expected
    assert json.loads(json_schema(expected).source) == expected
    assert [json.loads(json_schema(unchanged).source) for unchanged in ({"const": 1}, {"type": "array"}, False)] == [
        {"const": 1},
        {"type": "array"},
        False,
    ]


def test_additional_properties_are_forbidden_by_default(checked: Callable[[Grammar], str]) -> None:
    """As in text-generation-inference and vLLM, unless the schema says otherwise."""
    inner = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/inner"}, "b": {"type": "array", "items": inner}},
        "$defs": {"inner": inner},
    }
    closed = json_schema(schema)
    assert checked(closed) == ""
    found = json.loads(closed.source)
    for one in (found, found["$defs"]["inner"], found["properties"]["b"]["items"]):
        assert one["additionalProperties"] is False
    for text, valid in (
        ('{"a":{"x":true}}', True),
        ('{"a":{"x":true,"y":1}}', False),
        ('{"c":1}', False),
        ('{"b":[{"x":true}]}', True),
    ):
        assert allows(closed, text) == valid, text
    assert allows(json_schema({**schema, "additionalProperties": True}), '{"c":1}')


@pytest.mark.parametrize(
    "keywords",
    [
        {"additionalProperties": True},
        {"additionalProperties": {"type": "integer"}},
        {"patternProperties": {"^z": {}}},
        {"minProperties": 2},
        {"required": ["z"]},
        {"anyOf": [{"properties": {"z": {}}}, {"required": ["a"]}]},
        {"allOf": [{"properties": {"z": {}}}]},
        {"$ref": "#/$defs/other", "$defs": {"other": {"properties": {"z": {}}}}},
    ],
)
def test_object_that_needs_or_allows_other_properties_stays_open(keywords: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, **keywords}
    found = json.loads(json_schema(schema).source)
    assert found.get("additionalProperties", "nothing") == keywords.get("additionalProperties", "nothing")
    assert "False" not in str(found.get("allOf", found.get("anyOf", found.get("$defs"))))


def test_one_of_alternatives_stay_open_and_any_of_alternatives_are_closed(checked: Callable[[Grammar], str]) -> None:
    """What the first of these allows, the second allows too while it is open: then it is valid for `oneOf` no more."""
    parts = [
        {"type": "object", "properties": {name: {}}, "required": [name][:required_count]}
        for name, required_count in (("a", 1), ("b", 0))
    ]
    given = json_schema({"oneOf": parts})
    assert json.loads(given.source) == {"oneOf": parts}
    assert "oneOf" in checked(given)
    any_of = json.loads(json_schema({"anyOf": parts}).source)
    assert all(part["additionalProperties"] is False for part in any_of["anyOf"])


@pytest.mark.parametrize("names", [{"type": "string"}, {}, True])
def test_property_names_that_allow_any_name_are_dropped_and_others_refused(
    checked: Callable[[Grammar], str], names: object
) -> None:
    """zod writes records so, within Claude Code's tools. llguidance refuses names that are constrained."""
    record = {"type": "object", "propertyNames": names, "additionalProperties": {"propertyNames": names}}
    given = json_schema({"properties": {"metadata": record, "propertyNames": {"const": 1}}})
    assert "propertyNames" not in str(json.loads(given.source)["properties"]["metadata"])
    assert json.loads(given.source)["properties"]["propertyNames"] == {"const": 1}
    assert checked(given) == ""
    assert "propertyNames" in checked(json_schema({"type": "object", "propertyNames": {"pattern": "a"}}))


def test_unique_items_that_say_nothing_are_dropped_and_others_refused(checked: Callable[[Grammar], str]) -> None:
    items = {"type": "array", "items": {"type": "integer"}}
    assert checked(json_schema({"properties": {"a": {**items, "uniqueItems": False}, "uniqueItems": items}})) == ""
    assert "uniqueItems" in checked(json_schema({**items, "uniqueItems": True}))


def test_too_deeply_nested_schema_is_refused() -> None:
    schema: dict[str, object] = {}
    for _ in range(5_000):
        schema = {"items": schema}
    with pytest.raises(Refused, match="nested too deeply"):
        json_schema(schema)


@pytest.mark.parametrize("part", [{}, [], "é", 1, {"a": {"b": []}}, {"": [{}, [""]]}, ["x", ["y", {}]]])
def test_size_limit_of_a_schema_is_exact_and_checked_before_any_other_work(part: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """All other work takes long for each part of a schema."""
    schema = {
        "enum": [part] * (module.MOST_CHARACTERS // (1 + len(json.dumps(part, ensure_ascii=False, separators=(",", ":")))) - 9)
    }
    schema["x"] = "x" * (module.MOST_CHARACTERS - len(json.dumps(schema | {"x": ""}, ensure_ascii=False, separators=(",", ":"))))
    assert len(json_schema(schema).source) == module.MOST_CHARACTERS
    schema["x"] += "x"
    monkeypatch.setattr(module, "objects", None)
    with pytest.raises(Refused, match="`grammar` must have at most 65536 characters"):
        json_schema(schema)


def test_size_check_stops_at_the_limit_without_reading_the_rest() -> None:
    class RecordingList(list[object]):
        def __len__(self) -> int:
            return 1 << 30

        def __iter__(self) -> Iterator[object]:
            lists_read.append(self)
            return super().__iter__()

    lists_read: list[object] = []
    assert module.too_large({"anyOf": [[0] * module.MOST_CHARACTERS, *[RecordingList()] * 1000]})
    assert len(lists_read) <= 1


def test_white_space_pattern_is_added_unless_the_schema_has_one() -> None:
    [default] = json.loads(written(json_object()))["grammars"]
    assert default["json_schema"]["x-guidance"]["whitespace_pattern"] == module.WHITESPACE
    [own] = json.loads(written(json_schema({"x-guidance": {"whitespace_pattern": "x"}})))["grammars"]
    assert own["json_schema"]["x-guidance"]["whitespace_pattern"] == "x"


def test_grammar_may_name_added_tokens_by_id_and_unknown_ids_are_refused() -> None:
    """Forced calls name tokens of DeepSeek V3.2 and MiniMax M3 so, whose texts are not between < and >."""
    by_id = lark('start: "a" <[128825]> "b" <[128825]>')

    async def main() -> None:
        for is_added in (lambda id: id == 128825, lambda id: False):
            grammars = Grammars(special_id, is_added)
            if is_added(128825):
                assert await grammars.check(by_id) == by_id
            else:
                with pytest.raises(Refused, match="128825"):
                    await grammars.check(by_id)

    asyncio.run(main())
