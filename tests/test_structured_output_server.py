"""Structured output over HTTP, from a server with two ranks: answers validate, and unsupported grammars are refused quickly."""

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
    started = Server(tmp_path_factory.mktemp("structured"), "--num-shard", "2", "--page-size", "4", "--kv-pages", "1024")
    try:
        started.wait_until_ready()
        yield started
        started.stop()
    finally:
        started.process.kill()


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


def generated_text(server: Server, request_body: dict[str, Any]) -> str:
    status, answer = post(server, "/generate", request_body)
    assert status == 200, answer
    answer_text: str = json.loads(answer)["generated_text"]
    return answer_text


def streamed_text(server: Server, request_body: dict[str, Any]) -> str:
    status, answer = post(server, "/generate_stream", request_body)
    assert status == 200, answer
    events = [json.loads(line.removeprefix(b"data:")) for line in answer.splitlines() if line.startswith(b"data:")]
    answer_text: str = events[-1]["generated_text"]
    assert "".join(event["token"]["text"] for event in events if not event["token"]["special"]) == answer_text
    return answer_text


def test_answers_validate_and_are_the_same_streamed_whole_and_repeated(server: Server) -> None:
    grammar = {"type": "json", "value": SCHEMA}
    bodies = [body(grammar, seed) for seed in range(1, 7)]
    with ThreadPoolExecutor(12) as threads:
        whole, streams = threads.map(partial(generated_text, server), bodies), threads.map(partial(streamed_text, server), bodies)
        found = list(whole)
        assert list(streams) == found
        assert list(threads.map(partial(generated_text, server), bodies)) == found
    for answer in found:
        jsonschema.validate(json.loads(answer), SCHEMA)
    assert len(set(found)) > 2


def test_answer_matches_its_regex(server: Server) -> None:
    pattern = "(25[0-5]|2[0-4][0-9]|1?[0-9]{1,2})(\\.(25[0-5]|2[0-4][0-9]|1?[0-9]{1,2})){3}"
    assert re.fullmatch(pattern, generated_text(server, body({"type": "regex", "value": pattern}, 1)))


REFUSED_GRAMMARS = [
    {"type": "json", "value": {"type": "object", "properties": {"a": {"not": {}}}}},
    {"type": "json", "value": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
    {"type": "json", "value": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}},
    {"type": "regex", "value": "a(b"},
    {"type": "regex", "value": "(a{60000}){60000}"},
    {"type": "regex", "value": "[a-z]*" * 10_000},
]


def test_unsupported_or_too_large_grammars_are_refused_quickly_while_others_stream(server: Server) -> None:
    """A valid request gets the same answer before, during and after."""
    valid = body({"type": "json", "value": SCHEMA}, 3)
    before = generated_text(server, valid)
    others: list[str] = []
    done = threading.Event()

    def stream() -> None:
        while not done.is_set():
            others.append(generated_text(server, valid))

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        for grammar in REFUSED_GRAMMARS:
            began = time.monotonic()
            status, answer = post(server, "/generate", body(grammar, 1))
            assert (status, json.loads(answer)["error_type"]) == (422, "validation"), answer
            assert time.monotonic() - began < 10  # at most a second on an idle machine
    finally:
        done.set()
        thread.join()
    assert set(others) == {generated_text(server, valid)} == {before}
