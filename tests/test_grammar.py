"""Answers keep their grammars: a model, whatever it would rather say, alone and among others, paused and resumed."""

import asyncio
import functools
import json
import re
import time
from typing import Any

import jsonschema
import pytest
import torch
from msgspec.structs import replace

from penstock.router.batcher import Batcher
from penstock.router.grammar import choice, json_object, json_schema, lark, regex, rules, verdict
from penstock.router.request import Broken, Grammar, Request, Sampling
from penstock.router.text import Tokenizer
from penstock.shard.masks import PendingMasks, StepMasks
from penstock.tests import inprocess
from penstock.tests.inprocess import LIGHT, Restless, together, tokens, value

run = functools.partial(inprocess.run, folder=LIGHT)
TOKENIZER = Tokenizer(LIGHT)
[END] = TOKENIZER.eos_ids
TEXTS = ["Give me a record of a dog as JSON.", "Tell me a story about a cat.", "How much is 12 plus 7?"]
SOON = tuple((TOKENIZER.encode(word, False)[0], bias) for word, bias in {"null": 8.0, " null": 8.0, "}": 3.0}.items())
WORD: dict[str, Any] = {"type": "string", "maxLength": 12}


def closed(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """An object with these properties and no other."""
    named = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": named, "additionalProperties": False, **more}


SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": closed({"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 120}, "tame": {"type": "boolean"}}),
    "nested": closed({"a": closed({"b": closed({"c": {"type": ["null", "boolean"]}, "d": WORD})}), "e": {"type": "null"}}),
    "arrays": closed(
        {"n": {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": -9}, "minItems": 2, "maxItems": 4}}
    ),
    "tuple": {"type": "array", "prefixItems": [WORD, {"type": "boolean"}], "items": False, "minItems": 2},
    "enums": closed(
        {"colour": {"enum": ["red", "green", "blue", None]}, "size": {"const": 3}, "mixed": {"enum": [1, "1", [1], {"a": 1}]}}
    ),
    "optional": closed({"a": WORD, "b": WORD, "c": {"type": "boolean"}}, ["b"]),
    "references": {
        "$defs": {
            "node": closed({"name": WORD, "children": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/leaf"}}}),
            "leaf": WORD,
        },
        "$ref": "#/$defs/node",
    },
    "recursion": {
        "$defs": {"list": {"anyOf": [{"type": "null"}, closed({"head": {"enum": [0, 1]}, "tail": {"$ref": "#/$defs/list"}})]}},
        "$ref": "#/$defs/list",
    },
    "unicode": closed({"größe": {"enum": ["groß", "klein", "😀", "日本\u2028語"]}, 'a "quoted"\\name': {"type": "boolean"}}),
    "pattern": closed({"id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, "date": {"type": "string", "format": "date"}}),
    "numbers": closed(
        {
            "x": {"type": "number", "minimum": -1, "maximum": 1, "multipleOf": 0.25},
            "y": {"type": "integer", "exclusiveMinimum": 7, "maximum": 9},
        }
    ),
    "union": {"oneOf": [closed({"kind": {"const": "a"}, "x": {"type": "boolean"}}), closed({"kind": {"const": "b"}, "y": WORD})]},
    "both": {"allOf": [{"type": "object", "required": ["a"]}, closed({"a": {"type": "boolean"}, "b": WORD}, [])]},
    "map": {"type": "object", "patternProperties": {"^[a-c]{1,3}$": {"type": "boolean"}}, "additionalProperties": False},
    "anything": closed(
        {"value": {"type": ["integer", "boolean", "null"]}, "more": {"type": "array", "maxItems": 1, "items": {"type": "null"}}}
    ),
}


def request(grammar: Grammar | None, seed: int = 0, **more: Any) -> Request:
    """Sampled, unless its seed is 0. Its recursions and lists end rather soon."""
    sampling = Sampling(temperature=1.0 if seed else 0.0, seed=seed, logit_bias=SOON)
    settings: dict[str, Any] = {"max_new_tokens": 400, "end_ids": (END,), "sampling": sampling, "grammar": grammar, **more}
    return Request(prompt=tuple(TOKENIZER.encode(TEXTS[seed % len(TEXTS)])), **settings)


def text(ids: list[int]) -> str:
    """Of a complete answer, whose last token is the end."""
    assert ids[-1] == END
    assert END not in ids[:-1]
    return TOKENIZER.decode(ids)


def cases() -> list[tuple[dict[str, Any], Request]]:
    """Every schema, greedy with one answer and sampled with four; every third one also sampled with one."""
    return [
        (schema, request(json_schema(schema), seed=number * (n > 0) + n, choices=4 if n == 2 else 1))
        for number, schema in enumerate(SCHEMAS.values())
        for n in range(3)
        if n != 1 or number % 3 == 0
    ]


def requests() -> list[Request]:
    return [asked for _, asked in cases()]


@pytest.fixture(scope="module")
def alone() -> list[list[list[int]]]:
    """Each request by itself, in an ample pool."""

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        return [await tokens(batcher, each) for each in requests()]

    return run(test, shard={"kv_pages": 900, "prefix_caching": False})


def test_every_answer_validates(alone: list[list[list[int]]]) -> None:
    for (schema, _), answers in zip(cases(), alone, strict=True):
        for ids in answers:
            jsonschema.validate(json.loads(text(ids)), schema, jsonschema.Draft202012Validator)
    different = {text(ids) for answers in alone for ids in answers}
    assert len(different) > 2 * len(SCHEMAS)


@pytest.mark.parametrize("settings", [{"page_size": 4, "prefix_caching": True}, {"page_size": 1, "prefix_caching": False}], ids=str)
def test_pauses_chunks_and_neighbours_change_no_token(alone: list[list[list[int]]], settings: dict[str, Any]) -> None:
    asked = requests()
    free = [request(None, seed=seed, max_new_tokens=30) for seed in range(1, 6)]

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        found = await together(batcher, asked + free)
        assert value(batcher, "penstock_restored_tokens_total") > 0
        return found[: len(asked)]

    pages = 2400 // settings["page_size"]
    assert run(test, scheduler=Restless, shard={"kv_pages": pages, **settings}, router={"max_batch_prefill_tokens": 40}) == alone


def test_an_answer_of_more_than_1024_tokens_is_complete() -> None:
    schema = {
        "type": "array",
        "minItems": 130,
        "maxItems": 130,
        "items": closed({"n": {"type": "integer", "maximum": 99, "minimum": 10}}),
    }

    async def test(batcher: Batcher) -> list[list[int]]:
        return await tokens(batcher, request(json_schema(schema), seed=3, max_new_tokens=2000, choices=2))

    for ids in run(test, scheduler=Restless, shard={"kv_pages": 400}):
        assert len(ids) > 1024
        jsonschema.validate(json.loads(text(ids)), schema)


def test_patterns_rules_and_lists() -> None:
    asked = {
        r"[a-f]{3}-[0-9]{4}(\.é|😀)": regex(r"[a-f]{3}-[0-9]{4}(\.é|😀)"),
        "yes|no|maybe not|😀": choice(["yes", "no", "maybe not", "😀"]),
        r"SELECT [ab](, [ab])? FROM t": verdict(rules('root ::= "SELECT " list " FROM t"\nlist ::= c | c ", " c\nc ::= [ab]'))[1],
        r"[0-9]{1,3}([+*][0-9]{1,3}){0,4}": lark('start: n (("+" | "*") n){0,4}\nn: /[0-9]{1,3}/'),
    }

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        return await together(batcher, [request(grammar, seed, choices=3) for seed, grammar in enumerate(asked.values(), 1)])

    for pattern, answers in zip(asked, run(test), strict=True):
        assert all(re.fullmatch(pattern, text(ids)) for ids in answers), answers


def test_every_way_of_choosing_keeps_the_grammar() -> None:
    """Penalties and bias speak against all that is allowed, filters leave little over; the end is as unlikely as can be."""
    ways = [
        Sampling(repetition_penalty=5.0, frequency_penalty=2.0, presence_penalty=2.0),
        Sampling(temperature=5.0, seed=1, logit_bias=tuple((token, 100.0) for token in range(1000, 1040))),
        Sampling(temperature=1.0, seed=2, top_k=1),
        Sampling(temperature=1.0, seed=3, top_p=0.01, min_p=0.9),
        Sampling(temperature=1.0, seed=4, typical_p=0.2, final_logprobs=True),
        Sampling(temperature=0.1, seed=5, logit_bias=((END, -100.0),)),
    ]
    pattern = "[0-9]{3}(-[A-Z]{2})?"
    asked = [replace(request(regex(pattern), choices=2), sampling=sampling, top_n=2) for sampling in ways]

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        return await together(batcher, asked)

    for answers in run(test):
        assert all(re.fullmatch(pattern, text(ids)) for ids in answers), answers


def test_where_no_token_ends_it_the_grammar_does() -> None:
    """And where that never happens, the length."""
    asked = [
        request(regex("[ab]{5}"), seed=1, end_ids=(), choices=3),
        request(json_schema(SCHEMAS["flat"]), seed=2, end_ids=()),
        request(regex("a*"), seed=3, end_ids=(), max_new_tokens=9),
    ]

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        return await together(batcher, asked)

    fixed, flat, endless = run(test, scheduler=Restless)
    assert all(re.fullmatch("[ab]{5}", TOKENIZER.decode(ids)) for ids in fixed)
    jsonschema.validate(json.loads(TOKENIZER.decode(flat[0])), SCHEMAS["flat"])
    assert len(endless[0]) == 9


def test_the_end_waits_for_the_shortest_length_unless_there_is_nothing_else() -> None:
    soon = Sampling(temperature=1.0, seed=1, logit_bias=((END, 100.0),))  # as likely as can be

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        grammars = [regex("a*"), regex("[ab]{3}")]
        return await together(batcher, [request(grammar, sampling=soon, min_new_tokens=12) for grammar in grammars])

    [[long], [short]] = run(test)
    assert len(long) == 13
    assert re.fullmatch("a*", text(long))
    assert re.fullmatch("[ab]{3}", text(short))


def test_a_grammar_that_leads_nowhere_fails_alone() -> None:
    """The router takes it, since nothing is wrong with its beginning."""

    async def test(batcher: Batcher) -> list[list[int]]:
        good = [request(json_schema(SCHEMAS["flat"]), seed=seed) for seed in (1, 2)]
        with pytest.raises(Broken, match="its grammar comes to a place where none of the model's tokens fits"):
            await tokens(batcher, request(lark('start: "a" x\nx: x "b"'), seed=1, choices=2))
        with pytest.raises(Broken, match="unknown special token"):
            await tokens(batcher, request(lark('start: "a" <|nobody|>'), seed=1))
        before = [await tokens(batcher, each) for each in good]
        bad = [request(lark(f'start: "{word}" x\nx: x "b"'), seed=1) for word in "abcd"]
        mixed = await together_or_broken(batcher, good, bad)
        assert before == mixed
        return before[0]

    run(test)


async def together_or_broken(batcher: Batcher, good: list[Request], bad: list[Request]) -> list[list[list[int]]]:
    async def broken(each: Request) -> list[list[int]]:
        with pytest.raises(Broken):
            await tokens(batcher, each)
        return []

    found = await asyncio.gather(*(tokens(batcher, each) for each in good), *(broken(each) for each in bad))
    return list(found[: len(good)])


def test_masks_and_their_time_are_counted() -> None:
    async def test(batcher: Batcher) -> None:
        await tokens(batcher, request(json_object(), seed=1, max_new_tokens=20))
        assert value(batcher, "penstock_mask_seconds_total") > 0
        assert value(batcher, "penstock_mask_wait_seconds_total") >= 0

    run(test)


@pytest.mark.parametrize("late", [False, True])
def test_waiting_for_masks_is_what_is_left_when_they_are_wanted(late: bool) -> None:
    """Not what they take: they are found while the forward runs."""

    def result() -> StepMasks:
        if late:
            time.sleep(0.05)
        return StepMasks(torch.zeros(1, 1, dtype=torch.int32), [False], {}, seconds=100.0)

    pending = PendingMasks([], result)
    pending.join(torch.device("cpu"))
    assert pending.seconds == 100.0
    assert (0.05 if late else 0.0) <= pending.waited < 100.0
