"""Structured output through the router's batcher and a real shard in one process: answers match their grammar, and are the same
alone, in a batch, and preempted. Oracles: jsonschema, re, and the answers of requests that ran alone.
"""

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
from penstock.tests.inprocess import SMALL_MODEL, PreemptingScheduler, generate_all, generate_tokens, metric_value

run = functools.partial(inprocess.run, folder=SMALL_MODEL)
TOKENIZER = Tokenizer(SMALL_MODEL)
[END_TOKEN] = TOKENIZER.eos_ids
TEXTS = ["Give me a record of a dog as JSON.", "Tell me a story about a cat.", "How much is 12 plus 7?"]
SHORTENING_BIAS = tuple((TOKENIZER.encode(word, False)[0], bias) for word, bias in {"null": 8.0, " null": 8.0, "}": 3.0}.items())
SHORT_STRING: dict[str, Any] = {"type": "string", "maxLength": 12}


def object_schema(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """The schema of an object with these properties and no others."""
    required_names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": required_names, "additionalProperties": False, **more}


SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": object_schema(
        {"name": SHORT_STRING, "age": {"type": "integer", "minimum": 0, "maximum": 120}, "tame": {"type": "boolean"}}
    ),
    "nested": object_schema(
        {"a": object_schema({"b": object_schema({"c": {"type": ["null", "boolean"]}, "d": SHORT_STRING})}), "e": {"type": "null"}}
    ),
    "arrays": object_schema(
        {"n": {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": -9}, "minItems": 2, "maxItems": 4}}
    ),
    "tuple": {"type": "array", "prefixItems": [SHORT_STRING, {"type": "boolean"}], "items": False, "minItems": 2},
    "enums": object_schema(
        {"colour": {"enum": ["red", "green", "blue", None]}, "size": {"const": 3}, "mixed": {"enum": [1, "1", [1], {"a": 1}]}}
    ),
    "optional": object_schema({"a": SHORT_STRING, "b": SHORT_STRING, "c": {"type": "boolean"}}, ["b"]),
    "references": {
        "$defs": {
            "node": object_schema(
                {"name": SHORT_STRING, "children": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/leaf"}}}
            ),
            "leaf": SHORT_STRING,
        },
        "$ref": "#/$defs/node",
    },
    "recursion": {
        "$defs": {
            "list": {"anyOf": [{"type": "null"}, object_schema({"head": {"enum": [0, 1]}, "tail": {"$ref": "#/$defs/list"}})]}
        },
        "$ref": "#/$defs/list",
    },
    "unicode": object_schema({"größe": {"enum": ["groß", "klein", "😀", "日本\u2028語"]}, 'a "quoted"\\name': {"type": "boolean"}}),
    "pattern": object_schema(
        {"id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, "date": {"type": "string", "format": "date"}}
    ),
    "numbers": object_schema(
        {
            "x": {"type": "number", "minimum": -1, "maximum": 1, "multipleOf": 0.25},
            "y": {"type": "integer", "exclusiveMinimum": 7, "maximum": 9},
        }
    ),
    "union": {
        "oneOf": [
            object_schema({"kind": {"const": "a"}, "x": {"type": "boolean"}}),
            object_schema({"kind": {"const": "b"}, "y": SHORT_STRING}),
        ]
    },
    "both": {"allOf": [{"type": "object", "required": ["a"]}, object_schema({"a": {"type": "boolean"}, "b": SHORT_STRING}, [])]},
    "map": {"type": "object", "patternProperties": {"^[a-c]{1,3}$": {"type": "boolean"}}, "additionalProperties": False},
    "anything": object_schema(
        {"value": {"type": ["integer", "boolean", "null"]}, "more": {"type": "array", "maxItems": 1, "items": {"type": "null"}}}
    ),
}


def request(grammar: Grammar | None, seed: int = 0, **more: Any) -> Request:
    """Sampled, unless `seed` is 0. A logit bias makes recursions and lists end early."""
    sampling = Sampling(temperature=1.0 if seed else 0.0, seed=seed, logit_bias=SHORTENING_BIAS)
    settings: dict[str, Any] = {"max_new_tokens": 400, "end_ids": (END_TOKEN,), "sampling": sampling, "grammar": grammar, **more}
    return Request(prompt=tuple(TOKENIZER.encode(TEXTS[seed % len(TEXTS)])), **settings)


def answer_text(ids: list[int]) -> str:
    """The text of a complete answer, which ends with the end token."""
    assert ids[-1] == END_TOKEN
    assert END_TOKEN not in ids[:-1]
    return TOKENIZER.decode(ids)


def cases() -> list[tuple[dict[str, Any], Request]]:
    """Every schema, greedy with one choice and sampled with four; every third schema also sampled with one."""
    return [
        (schema, request(json_schema(schema), seed=number * (n > 0) + n, choices=4 if n == 2 else 1))
        for number, schema in enumerate(SCHEMAS.values())
        for n in range(3)
        if n != 1 or number % 3 == 0
    ]


def requests() -> list[Request]:
    return [each for _, each in cases()]


@pytest.fixture(scope="module")
def alone() -> list[list[list[int]]]:
    """The answers of each request that runs alone, in a large pool."""

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        return [await generate_tokens(batcher, each) for each in requests()]

    return run(test, shard={"kv_pages": 900, "prefix_caching": False})


def test_every_answer_validates_against_its_json_schema(alone: list[list[list[int]]]) -> None:
    for (schema, _), answers in zip(cases(), alone, strict=True):
        for ids in answers:
            jsonschema.validate(json.loads(answer_text(ids)), schema, jsonschema.Draft202012Validator)
    different = {answer_text(ids) for answers in alone for ids in answers}
    assert len(different) > 2 * len(SCHEMAS)


@pytest.mark.parametrize("settings", [{"page_size": 4, "prefix_caching": True}, {"page_size": 1, "prefix_caching": False}], ids=str)
def test_preemption_chunks_and_batch_neighbours_change_no_token_under_a_grammar(
    alone: list[list[list[int]]], settings: dict[str, Any]
) -> None:
    constrained = requests()
    unconstrained = [request(None, seed=seed, max_new_tokens=30) for seed in range(1, 6)]

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        found = await generate_all(batcher, constrained + unconstrained)
        assert metric_value(batcher, "penstock_restored_tokens_total") > 0
        return found[: len(constrained)]

    pages = 2400 // settings["page_size"]
    assert (
        run(test, scheduler=PreemptingScheduler, shard={"kv_pages": pages, **settings}, router={"max_batch_prefill_tokens": 40})
        == alone
    )


def test_json_answer_of_more_than_1024_tokens_is_complete() -> None:
    schema = {
        "type": "array",
        "minItems": 130,
        "maxItems": 130,
        "items": object_schema({"n": {"type": "integer", "maximum": 99, "minimum": 10}}),
    }

    async def test(batcher: Batcher) -> list[list[int]]:
        return await generate_tokens(batcher, request(json_schema(schema), seed=3, max_new_tokens=2000, choices=2))

    for ids in run(test, scheduler=PreemptingScheduler, shard={"kv_pages": 400}):
        assert len(ids) > 1024
        jsonschema.validate(json.loads(answer_text(ids)), schema)


def test_regex_lark_ebnf_and_choice_answers_match_their_grammars() -> None:
    grammars = {
        r"[a-f]{3}-[0-9]{4}(\.é|😀)": regex(r"[a-f]{3}-[0-9]{4}(\.é|😀)"),
        "yes|no|maybe not|😀": choice(["yes", "no", "maybe not", "😀"]),
        r"SELECT [ab](, [ab])? FROM t": verdict(rules('root ::= "SELECT " list " FROM t"\nlist ::= c | c ", " c\nc ::= [ab]'))[1],
        r"[0-9]{1,3}([+*][0-9]{1,3}){0,4}": lark('start: n (("+" | "*") n){0,4}\nn: /[0-9]{1,3}/'),
    }

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        return await generate_all(batcher, [request(grammar, seed, choices=3) for seed, grammar in enumerate(grammars.values(), 1)])

    for pattern, answers in zip(grammars, run(test), strict=True):
        assert all(re.fullmatch(pattern, answer_text(ids)) for ids in answers), answers


def test_every_sampling_parameter_keeps_the_grammar() -> None:
    """Penalties and logit bias work against the allowed tokens, top-k and the like leave few, and the end token is as unlikely
    as possible."""
    samplings = [
        Sampling(repetition_penalty=5.0, frequency_penalty=2.0, presence_penalty=2.0),
        Sampling(temperature=5.0, seed=1, logit_bias=tuple((token, 100.0) for token in range(1000, 1040))),
        Sampling(temperature=1.0, seed=2, top_k=1),
        Sampling(temperature=1.0, seed=3, top_p=0.01, min_p=0.9),
        Sampling(temperature=1.0, seed=4, typical_p=0.2, final_logprobs=True),
        Sampling(temperature=0.1, seed=5, logit_bias=((END_TOKEN, -100.0),)),
    ]
    pattern = "[0-9]{3}(-[A-Z]{2})?"
    sampled = [replace(request(regex(pattern), choices=2), sampling=sampling, top_n=2) for sampling in samplings]

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        return await generate_all(batcher, sampled)

    for answers in run(test):
        assert all(re.fullmatch(pattern, answer_text(ids)) for ids in answers), answers


def test_without_end_tokens_an_answer_ends_with_its_grammar_or_at_max_new_tokens() -> None:
    """A grammar that never ends is cut at max_new_tokens."""
    constrained = [
        request(regex("[ab]{5}"), seed=1, end_ids=(), choices=3),
        request(json_schema(SCHEMAS["flat"]), seed=2, end_ids=()),
        request(regex("a*"), seed=3, end_ids=(), max_new_tokens=9),
    ]

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        return await generate_all(batcher, constrained)

    fixed, flat, endless = run(test, scheduler=PreemptingScheduler)
    assert all(re.fullmatch("[ab]{5}", TOKENIZER.decode(ids)) for ids in fixed)
    jsonschema.validate(json.loads(TOKENIZER.decode(flat[0])), SCHEMAS["flat"])
    assert len(endless[0]) == 9


def test_end_token_waits_for_min_new_tokens_unless_the_grammar_allows_nothing_else() -> None:
    end_bias = Sampling(temperature=1.0, seed=1, logit_bias=((END_TOKEN, 100.0),))  # makes the end token as likely as possible

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        grammars = [regex("a*"), regex("[ab]{3}")]
        return await generate_all(batcher, [request(grammar, sampling=end_bias, min_new_tokens=12) for grammar in grammars])

    [[unlimited], [limited]] = run(test)
    assert len(unlimited) == 13
    assert re.fullmatch("a*", answer_text(unlimited))
    assert re.fullmatch("[ab]{3}", answer_text(limited))


def test_grammar_that_allows_no_token_fails_its_own_request_only() -> None:
    """The router accepts the grammar, since its beginning is satisfiable."""

    async def test(batcher: Batcher) -> list[list[int]]:
        good = [request(json_schema(SCHEMAS["flat"]), seed=seed) for seed in (1, 2)]
        with pytest.raises(Broken, match="its grammar comes to a place where none of the model's tokens fits"):
            await generate_tokens(batcher, request(lark('start: "a" x\nx: x "b"'), seed=1, choices=2))
        with pytest.raises(Broken, match="unknown special token"):
            await generate_tokens(batcher, request(lark('start: "a" <|nobody|>'), seed=1))
        before = [await generate_tokens(batcher, each) for each in good]
        bad = [request(lark(f'start: "{word}" x\nx: x "b"'), seed=1) for word in "abcd"]
        mixed = await generate_good_and_broken(batcher, good, bad)
        assert before == mixed
        return before[0]

    run(test)


async def generate_good_and_broken(batcher: Batcher, good: list[Request], bad: list[Request]) -> list[list[list[int]]]:
    async def broken(each: Request) -> list[list[int]]:
        with pytest.raises(Broken):
            await generate_tokens(batcher, each)
        return []

    found = await asyncio.gather(*(generate_tokens(batcher, each) for each in good), *(broken(each) for each in bad))
    return list(found[: len(good)])


def test_mask_seconds_are_exported_as_metrics() -> None:
    async def test(batcher: Batcher) -> None:
        await generate_tokens(batcher, request(json_object(), seed=1, max_new_tokens=20))
        assert metric_value(batcher, "penstock_mask_seconds_total") > 0
        assert metric_value(batcher, "penstock_mask_wait_seconds_total") >= 0

    run(test)


@pytest.mark.parametrize("late", [False, True])
def test_mask_wait_counts_only_the_time_blocked_in_join(late: bool) -> None:
    """Not the time to compute the masks, which overlaps with the forward pass."""

    def result() -> StepMasks:
        if late:
            time.sleep(0.05)
        return StepMasks(torch.zeros(1, 1, dtype=torch.int32), [0], [False], {}, seconds=100.0)

    pending = PendingMasks([], result)
    pending.join(torch.device("cpu"))
    assert pending.seconds == 100.0
    assert (0.05 if late else 0.0) <= pending.waited < 100.0
