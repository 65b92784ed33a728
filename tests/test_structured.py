"""Structured output from outside: a server of two ranks, over HTTP, asked for the possible and the impossible."""

import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jsonschema
import pytest

from penstock.tests.serving import Server

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 15},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "colours": {"type": "array", "items": {"enum": ["braun", "weiß", "😀"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "legs", "colours"],
    "additionalProperties": False,
}
PROMPT = "<|begin|><|user|>Give me a record of a dog as JSON.<|end|><|assistant|>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with_two = Server(tmp_path_factory.mktemp("structured"), "--num-shard", "2", "--page-size", "4", "--kv-pages", "1024")
    try:
        with_two.wait_until_ready()
        yield with_two
        with_two.stop()
    finally:
        with_two.process.kill()


def post(server: Server, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def body(grammar: dict[str, Any] | None, seed: int, **more: Any) -> dict[str, Any]:
    parameters = {"max_new_tokens": 300, "seed": seed, "temperature": 1.0, "grammar": grammar, **more}
    return {"inputs": PROMPT, "parameters": parameters}


def text(server: Server, asked: dict[str, Any]) -> str:
    status, answer = post(server, "/generate", asked)
    assert status == 200, answer
    found: str = json.loads(answer)["generated_text"]
    return found


def streamed(server: Server, asked: dict[str, Any]) -> str:
    status, answer = post(server, "/generate_stream", asked)
    assert status == 200, answer
    events = [json.loads(line.removeprefix(b"data:")) for line in answer.splitlines() if line.startswith(b"data:")]
    found: str = events[-1]["generated_text"]
    assert "".join(event["token"]["text"] for event in events if not event["token"]["special"]) == found
    return found


def test_answers_validate_streamed_and_whole_and_again(server: Server) -> None:
    grammar = {"type": "json", "value": SCHEMA}
    asked = [body(grammar, seed) for seed in range(1, 7)]
    with ThreadPoolExecutor(12) as together:
        whole, stream = together.map(partial(text, server), asked), together.map(partial(streamed, server), asked)
        found = list(whole)
        assert list(stream) == found
        assert list(together.map(partial(text, server), asked)) == found
    for one in found:
        jsonschema.validate(json.loads(one), SCHEMA)
    assert len(set(found)) > 2


def test_patterns_hold(server: Server) -> None:
    pattern = "(25[0-5]|2[0-4][0-9]|1?[0-9]{1,2})(\\.(25[0-5]|2[0-4][0-9]|1?[0-9]{1,2})){3}"
    assert re.fullmatch(pattern, text(server, body({"type": "regex", "value": pattern}, 1)))


BAD = [
    {"type": "json", "value": {"type": "object", "properties": {"a": {"not": {}}}}},
    {"type": "json", "value": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
    {"type": "json", "value": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}},
    {"type": "regex", "value": "a(b"},
    {"type": "regex", "value": "(a{60000}){60000}"},
    {"type": "regex", "value": "[a-z]*" * 10_000},
]


def test_the_impossible_is_refused_within_a_second_while_others_stream(server: Server) -> None:
    """And the next answer is what it was before."""
    good = body({"type": "json", "value": SCHEMA}, 3)
    before = text(server, good)
    beside: list[str] = []
    done = threading.Event()

    def stream() -> None:
        while not done.is_set():
            beside.append(text(server, good))

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        for grammar in BAD:
            began = time.monotonic()
            status, answer = post(server, "/generate", body(grammar, 1))
            assert (status, json.loads(answer)["error_type"]) == (422, "validation"), answer
            assert time.monotonic() - began < 10  # a second, on a machine that does nothing else
    finally:
        done.set()
        thread.join()
    assert set(beside) == {text(server, good)} == {before}
