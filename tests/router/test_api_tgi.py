"""TGI's routes over real HTTP with a fake batcher: responses, order of events, statuses, invalid bodies, client disconnects."""

import asyncio
import contextlib
import io
import json
import threading
import time
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from penstock.router.api import stream, tgi
from penstock.router.request import Broken, Expired, Limits, Overloaded
from penstock.router.text import LONG_TEXT, Tokenizer
from penstock.tests.router.fake_batcher import LIMITS, TEMPLATE, Server, make_tokenizer, serve, until

TOO_MANY = "`inputs` tokens + `max_new_tokens` must be <= 128. Given: 3 `inputs` tokens and 10000 `max_new_tokens`"
HELLO = {"inputs": "hi", "parameters": {"max_new_tokens": 20}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def with_parameters(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "hi", "parameters": {"max_new_tokens": 20, **parameters}}


def test_generate_returns_text_and_timing_headers(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, body, response = await server.post("/generate", HELLO)
        assert (status, body) == (200, {"generated_text": "Hello you"})
        assert response.headers["Content-Type"] == "application/json"
        assert response.headers["x-prompt-tokens"] == "3"
        assert response.headers["x-generated-tokens"] == "10"
        assert response.headers["x-queue-time"] == "250"
        assert response.headers["x-inference-time"] == "500"
        assert response.headers["x-time-per-token"] == "50"
        assert response.headers["x-compute-characters"] == "2"
        for name in ("x-compute-type", "x-compute-time", "x-total-time", "x-validation-time"):
            assert name in response.headers
        _, _, response = await server.post("/generate", {"inputs": "日本"})  # characters, which are 6 bytes
        assert response.headers["x-compute-characters"] == "2"
        assert server.batcher.requests[0].sampling.final_logprobs

    serve(tokenizer, test)


def test_details_list_every_token_including_eos(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, body, _ = await server.post("/generate", with_parameters(details=True, decoder_input_details=True, top_n_tokens=2))
        details = body["details"]
        assert list(details) == ["finish_reason", "generated_tokens", "seed", "prefill", "tokens", "top_tokens"]
        assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("eos_token", 10, None)
        assert details["prefill"][0] == {"id": 0, "text": "<s>", "logprob": None}
        assert [token["text"] for token in details["prefill"]] == ["<s>", "h", "i"]
        assert "".join(token["text"] for token in details["tokens"]) == "Hello you</s>"
        assert details["tokens"][-1] == {"id": 1, "text": "</s>", "logprob": -0.5, "special": True}
        assert len(details["top_tokens"]) == 10
        assert set(details["top_tokens"][0][0]) == {"id", "text", "logprob", "special"}

    serve(tokenizer, test)


def test_details_without_prefill_and_top_tokens(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, body, _ = await server.post("/generate", with_parameters(details=True, do_sample=True, seed=7))
        assert body["details"]["prefill"] == []
        assert body["details"]["seed"] == 7
        assert "top_tokens" not in body["details"]

    serve(tokenizer, test)


def test_infinite_logprob_is_sent_as_null(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, body, _ = await server.post("/generate", with_parameters(details=True))
        assert body["details"]["tokens"][0]["logprob"] is None

    serve(tokenizer, test, logprob=float("-inf"))


def test_generate_stream_has_an_event_per_token_and_the_text_in_the_last(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        events = await server.events("/generate_stream", with_parameters(details=True, top_n_tokens=1))
        assert [event["index"] for event in events] == list(range(1, 11))
        assert list(events[0]) == ["index", "token", "top_tokens", "generated_text", "details"]
        assert [event["generated_text"] for event in events[:-1]] == [None] * 9
        assert [event["details"] for event in events[:-1]] == [None] * 9
        assert "".join(event["token"]["text"] for event in events) == "Hello you</s>"
        assert events[-1]["generated_text"] == "Hello you"
        assert events[-1]["details"] == {"finish_reason": "eos_token", "generated_tokens": 10, "seed": None, "input_length": 3}
        (first, *_, last) = await server.events("/generate_stream", HELLO)
        assert list(first) == ["index", "token", "generated_text", "details"]
        assert last["details"] is None

    serve(tokenizer, test)


@pytest.mark.parametrize(
    ("parameters", "text", "reason"),
    [
        ({"max_new_tokens": 4}, "Hell", "length"),
        ({"stop": ["lo y", "zz"]}, "Hello y", "stop_sequence"),
        ({"stop": ["x"]}, "Hello you", "eos_token"),
    ],
)
def test_streamed_and_unstreamed_responses_have_equal_text_tokens_and_finish_reason(
    tokenizer: Tokenizer, parameters: dict[str, Any], text: str, reason: str
) -> None:
    async def test(server: Server) -> None:
        body = with_parameters(details=True, **parameters)
        events = await server.events("/generate_stream", body)
        _, unstreamed, _ = await server.post("/generate", body)
        assert events[-1]["generated_text"] == unstreamed["generated_text"] == text
        assert events[-1]["details"]["finish_reason"] == unstreamed["details"]["finish_reason"] == reason
        assert [event["token"] for event in events] == unstreamed["details"]["tokens"]

    serve(tokenizer, test)


def test_root_route_returns_a_list_with_the_full_text_by_default(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        assert (await server.post("/", HELLO))[1] == [{"generated_text": "hiHello you"}]
        assert (await server.post("/", with_parameters(return_full_text=False)))[1] == [{"generated_text": "Hello you"}]
        assert (await server.post("/generate", with_parameters(return_full_text=True)))[1] == {"generated_text": "hiHello you"}
        events = await server.events("/", {**HELLO, "stream": True})
        assert events[-1]["generated_text"] == "hiHello you"
        assert len(events) == 10

    serve(tokenizer, test)


def test_missing_or_null_parameters_mean_sampling_and_empty_ones_greedy(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for body in ({"inputs": "hi"}, {"inputs": "hi", "parameters": {}}, {"inputs": "hi", "parameters": None}):
            await server.post("/generate", body)
        assert [request.sampling.temperature for request in server.batcher.requests] == [1.0, 0.0, 1.0]

    serve(tokenizer, test)


def test_adapter_id_selects_an_adapter_and_an_unknown_one_is_a_422(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for name in ("french", "", None):
            assert (await server.post("/generate", with_parameters(adapter_id=name)))[0] == 200
        status, body, _ = await server.post("/generate", with_parameters(adapter_id="german"))
        assert status == 422
        assert "`adapter_id` must be one of french, b (--lora-adapters). Given: german" in body["error"]
        assert [request.adapter for request in server.batcher.requests] == ["french", "", ""]

    serve(tokenizer, test, settings={"adapters": ("french", "b")})


def test_null_and_unknown_parameters_are_accepted(tokenizer: Tokenizer) -> None:
    names = "best_of temperature repetition_penalty frequency_penalty top_k top_p typical_p do_sample return_full_text stop "
    names += (
        "truncate watermark details decoder_input_details seed top_n_tokens grammar adapter_id presence_penalty min_p logit_bias"
    )

    async def test(server: Server) -> None:
        body = with_parameters(**dict.fromkeys(names.split())) | {"stream": None, "unknown": {"a": [1]}}
        assert (await server.post("/generate", body))[:2] == (200, {"generated_text": "Hello you"})

    serve(tokenizer, test)


def test_do_sample_false_with_sampling_parameters_as_langchain_sends_is_accepted(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        body = with_parameters(do_sample=False, temperature=0.8, top_p=0.95, typical_p=0.95, stop=[], watermark=False)
        assert (await server.post("/", body))[0] == 200

    serve(tokenizer, test)


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temperature": 0}, "`temperature` must be strictly positive"),
        (
            {"max_new_tokens": 10_000},
            "`inputs` tokens + `max_new_tokens` must be <= 128. Given: 3 `inputs` tokens and 10000 `max_new_tokens`",
        ),
        ({"grammar": {"type": "json", "value": 3}}, "grammar is not valid: the schema of type json must be an object"),
        ({"grammar": {"type": "json", "value": "[]"}}, "grammar is not valid: the schema of type json must be an object"),
        (
            {"grammar": {"type": "json_object", "value": "{"}},
            "the `value` of type json_object is no JSON: Input data was truncated",
        ),
        ({"grammar": {"type": "json", "value": "[" * 5_000}}, "the `value` of type json is no JSON: "),
        ({"grammar": {"type": "regex", "value": {}}}, "grammar is not valid: the `value` of type regex must be a string"),
        ({"grammar": {"type": "json_schema", "value": {}}}, "the `value` of type json_schema must be {"),
        (
            {"grammar": {"type": "lark", "value": ""}},
            "`grammar.type` must be one of json, json_object, json_schema, regex. Given: lark",
        ),
        ({"grammar": {"type": "json"}}, "Object missing required field `value` - at `$.parameters.grammar`"),
        ({"grammar": "[a-z]"}, "Expected `object | null`, got `str` - at `$.parameters.grammar`"),
        ({"watermark": True}, "`watermark` is not supported"),
        ({"adapter_id": "x"}, "`adapter_id` is not supported: the server has no adapters"),
        ({"top_k": "many"}, "Expected `int | null`, got `str` - at `$.parameters.top_k`"),
        ({"stop": "x"}, "Expected `array | null`, got `str` - at `$.parameters.stop`"),
    ],
)
def test_invalid_parameter_is_a_422_with_a_message(
    tokenizer: Tokenizer, path: str, parameters: dict[str, Any], message: str
) -> None:
    async def test(server: Server) -> None:
        status, body, _ = await server.post(path, with_parameters(**parameters) | {"stream": True})
        assert (status, body["error_type"], set(body)) == (422, "validation", {"error", "error_type"})
        assert body["error"].startswith("Input validation error: ")
        assert message in body["error"]
        assert server.metrics.failures == ["validation"]
        assert server.batcher.requests == []

    serve(tokenizer, test)


def test_best_of_and_decoder_input_details_are_refused_in_streams(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for parameters, message in (
            ({"best_of": 2, "do_sample": True}, "`best_of` != 1 is not supported when streaming tokens"),
            ({"decoder_input_details": True}, "`decoder_input_details` == true is not supported when streaming tokens"),
        ):
            status, body, _ = await server.post("/generate_stream", with_parameters(**parameters))
            assert (status, body["error"]) == (422, f"Input validation error: {message}")

    serve(tokenizer, test)


def parameters_of(text: str) -> bytes:
    return b'{"inputs": "a", "parameters": {' + text.encode() + b"}}"


DEEP_NESTING = "[" * 100_000
LONG_NUMBER = "9" * 5000
INVALID_BODIES: list[tuple[bytes, int, str]] = [  # body, status, a field or text that the error must name
    (b"", 400, "JSON"),
    (b"{", 400, "JSON"),
    (b'{"inputs": "a"} x', 400, "`inputs`"),
    (b'{"inputs": "a', 400, "`inputs`"),
    (b"\xef\xbb\xbf{}", 400, "JSON"),
    (b"[]", 422, "`object`"),
    (b"null", 422, "`object`"),
    (b"7", 422, "`object`"),
    (b"{}", 422, "`inputs`"),
    # wrong types
    (b'{"inputs": null}', 422, "inputs`"),
    (b'{"inputs": ["a"]}', 422, "inputs`"),
    (b'{"inputs": ""}', 422, "`inputs`"),
    (b'{"inputs": "a", "parameters": []}', 422, "parameters`"),
    (b'{"inputs": "a", "stream": "yes"}', 422, "stream`"),
    (parameters_of('"do_sample": "yes"'), 422, "do_sample`"),
    (parameters_of('"details": 1'), 422, "details`"),
    (parameters_of('"max_new_tokens": true'), 422, "max_new_tokens`"),
    (parameters_of('"max_new_tokens": "5"'), 422, "max_new_tokens`"),
    (parameters_of('"stop": [1]'), 422, "stop[0]`"),
    (parameters_of('"stop": {"a": "b"}'), 422, "stop`"),
    (parameters_of('"logit_bias": {"x": 1}'), 422, "logit_bias"),
    (parameters_of('"logit_bias": [1]'), 422, "logit_bias"),
    (parameters_of('"seed": 1.5'), 422, "seed`"),
    (parameters_of('"adapter_id": 3'), 422, "adapter_id`"),
    (parameters_of('"grammar": []'), 422, "grammar`"),
    (parameters_of('"priority": [1]'), 422, "`priority`"),
    # values that are no number, or out of range
    (parameters_of('"temperature": NaN'), 400, "`temperature`"),
    (parameters_of('"top_p": Infinity'), 400, "`top_p`"),
    (parameters_of('"temperature": 1e999'), 422, "temperature`"),
    (parameters_of('"temperature": -0.0'), 422, "`temperature`"),
    (parameters_of('"temperature": 1e-300'), 422, "`temperature`"),
    (parameters_of('"repetition_penalty": 1e300'), 422, "`repetition_penalty`"),
    (parameters_of('"frequency_penalty": 2.5'), 422, "`frequency_penalty`"),
    (parameters_of('"top_p": 1.0'), 422, "`top_p`"),
    (parameters_of('"typical_p": 0'), 422, "`typical_p`"),
    (parameters_of('"top_k": 0'), 422, "`top_k`"),
    (parameters_of('"best_of": 0'), 422, "`best_of`"),
    (parameters_of('"truncate": 0'), 422, "`truncate`"),
    (parameters_of('"top_n_tokens": 6'), 422, "`top_n_tokens`"),
    (parameters_of('"stop": ["a", "b", "c", "d", "e"]'), 422, "`stop`"),
    (parameters_of('"max_new_tokens": -1'), 422, "`max_new_tokens`"),
    (parameters_of('"max_new_tokens": 0'), 422, "`max_new_tokens`"),
    (parameters_of('"max_new_tokens": 4294967296'), 422, "`max_new_tokens`"),
    (parameters_of('"max_new_tokens": 99999999999999999999999999'), 422, "max_new_tokens`"),
    (parameters_of('"seed": 18446744073709551616'), 422, "seed`"),
    (parameters_of('"seed": -1'), 422, "`seed`"),
    (parameters_of(f'"seed": {LONG_NUMBER}'), 422, "seed`"),
    (parameters_of(f'"max_new_tokens": {LONG_NUMBER[:4000]}'), 422, "max_new_tokens`"),
    (parameters_of(f'"top_k": {LONG_NUMBER}'), 422, "top_k`"),
    (parameters_of(f'"temperature": {LONG_NUMBER[:400]}'), 422, "temperature`"),
    (parameters_of(f'"logit_bias": {{"{LONG_NUMBER}": 1}}'), 422, "logit_bias"),
    # invalid text
    (b'{"inputs": "\xff"}', 400, "`inputs`"),
    (b'{"inputs": "\xc3"}', 400, "`inputs`"),
    (b'{"inputs": "\\ud800"}', 400, "`inputs`"),
    (b'{"inputs": "\\ud800x"}', 400, "`inputs`"),
    (b'{"inputs": "\\udc00"}', 400, "`inputs`"),
    (b'{"inputs": "cut \\ud83d"}', 400, "(at or behind `inputs`): \\ud83d is half of a character: a text was cut within it"),
    (b'{"inputs": "\\ud83d\\ude00 \\\\ud83d \\uDE00"}', 400, "\\uDE00 is half of a character"),
    ('{"inputs": "\\ud8é'.encode(), 400, "`inputs`"),
    (b'{"inputs": "\\ud83d\\ude00 \\\\ud83d", "x": "', 400, "Input data was truncated"),
    (b'{"inputs": "a", "parameters": {"stop": ["\xed\xa0\x80"]}}', 400, "`stop`"),
    (b'{"inputs": "a\x00b"}', 400, "`inputs`"),
    # nesting
    (f'{{"inputs": {DEEP_NESTING}'.encode(), 422, "inputs`"),
    (f'{{"inputs": "a", "other": {DEEP_NESTING}'.encode(), 400, "`other`"),
    (parameters_of(f'"grammar": {{"type": "json", "value": {DEEP_NESTING}'), 400, "`parameters`"),
    (b'{"inputs": "a", "parameters": {"grammar": {"type": "json", "value": ' + b'{"a":' * 50_000, 400, "`parameters`"),
    # duplicate keys
    (b'{"inputs": "a", "inputs": "b"}', 422, "`inputs`"),
    (parameters_of('"seed": 1, "seed": 2'), 422, "`seed`"),
    (parameters_of('"grammar": {"type": "json", "value": {"type": "object", "type": "object"}}'), 422, "`type`"),
]


@pytest.mark.parametrize(("data", "expected", "cause"), INVALID_BODIES)
def test_invalid_body_is_refused_quickly_and_the_error_names_the_cause(
    tokenizer: Tokenizer, data: bytes, expected: int, cause: str
) -> None:
    async def test(server: Server) -> None:
        for path in ("/generate", "/generate_stream", "/"):
            start = time.monotonic()
            status, body, _ = await server.post(path, data)
            assert time.monotonic() - start < 9
            assert status == expected, body
            assert body["error_type"] == "validation"
            assert set(body) == {"error", "error_type"}
            assert cause in body["error"]
        assert server.metrics.failures == ["validation"] * 3
        assert server.batcher.requests == []
        assert (await server.post("/generate", HELLO))[:2] == (200, {"generated_text": "Hello you"})  # the server still works

    serve(tokenizer, test)


def test_body_above_the_size_limit_is_a_413_within_seconds(tokenizer: Tokenizer) -> None:
    """With or without Content-Length, and whether the body is JSON or not."""

    async def chunked(data: bytes) -> AsyncIterator[bytes]:
        for offset in range(0, len(data), 1 << 16):
            yield data[offset : offset + (1 << 16)]

    async def test(server: Server) -> None:
        valid = json.dumps({"inputs": "x" * 10_000_000}).encode()
        for data in (valid, b"[" * 10_000_000):
            for path in ("/generate", "/generate_stream", "/", "/tokenize"):
                for payload in (io.BytesIO(data), chunked(data)):
                    start = time.monotonic()
                    async with server.client.post(path, data=payload) as response:
                        assert response.status == 413
                        assert (await response.json())["error_type"] == "payload_too_large"
                    assert time.monotonic() - start < 9
        assert (await server.post("/generate", HELLO))[0] == 200

    serve(tokenizer, test)


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
@pytest.mark.parametrize(
    ("behaviour", "status", "body", "headers"),
    [
        ({"fails_with": Overloaded("x")}, 429, {"error": "Model is overloaded", "error_type": "overloaded"}, {"Retry-After": "1"}),
        (
            {"fails_with": Broken("rank 0 died")},
            424,
            {"error": "Request failed during generation: rank 0 died", "error_type": "generation"},
            {"x-should-retry": "false"},
        ),
        (
            {"ready": False, "stage": "loading weights", "limits": None},
            503,
            {"error": "not ready: loading weights", "error_type": "unavailable"},
            {"Retry-After": "1"},
        ),
        ({"ready": False, "stage": "draining"}, 503, {"error": "draining", "error_type": "unavailable"}, {"Retry-After": "1"}),
    ],
)
def test_failure_before_the_first_token_sets_status_and_retry_headers(
    tokenizer: Tokenizer, path: str, behaviour: dict[str, Any], status: int, body: dict[str, str], headers: dict[str, str]
) -> None:
    async def test(server: Server) -> None:
        found, answer, response = await server.post(path, HELLO)
        assert (found, answer) == (status, body)
        assert all(response.headers[name] == value for name, value in headers.items())

    serve(tokenizer, test, **behaviour)


def test_failure_during_a_stream_is_its_last_event(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        events = await server.events("/generate_stream", HELLO)
        assert [event["index"] for event in events[:-1]] == [1, 2, 3]
        assert events[-1] == {"error": "Request failed during generation: gone", "error_type": "generation"}
        status, body, _ = await server.post("/generate", HELLO)
        assert (status, body["error_type"]) == (424, "generation")

    serve(tokenizer, test, fails_after=(3, Broken("gone")))


def test_each_event_is_sent_before_the_next_token_is_generated(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        assert server.batcher.token_permits is not None
        server.batcher.token_permits.release()  # the response begins with the first token
        async with server.client.post("/generate_stream", json=HELLO) as response:
            for count in range(1, 11):
                line = await response.content.readline()
                assert json.loads(line.removeprefix(b"data: "))["index"] == count
                assert server.batcher.tokens_sent == count
                assert await response.content.readline() == b"\n"
                server.batcher.token_permits.release()

    serve(tokenizer, test, token_permits=asyncio.Semaphore(0))


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_client_disconnect_closes_the_stream(tokenizer: Tokenizer, path: str, tokens: int) -> None:
    async def test(server: Server) -> None:
        task = asyncio.create_task(server.post(path, HELLO))
        await until(lambda: server.batcher.opened == 1)
        assert server.batcher.token_permits is not None
        for _ in range(tokens):
            server.batcher.token_permits.release()
        await until(lambda: server.batcher.tokens_sent == tokens)
        assert server.batcher.closed == 0
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await until(lambda: server.batcher.closed == 1)

    serve(tokenizer, test, token_permits=asyncio.Semaphore(0))


def test_client_that_stops_reading_pauses_its_stream_and_disconnecting_closes_it(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    max_new_tokens = 100_000

    async def test(server: Server) -> None:
        response = await server.client.post("/generate_stream", json=with_parameters(max_new_tokens=max_new_tokens, top_n_tokens=5))
        sent = -1
        while sent != server.batcher.tokens_sent:  # until the socket buffers are full
            sent = server.batcher.tokens_sent
            await asyncio.sleep(0.3)
        assert sent < max_new_tokens
        assert server.batcher.closed == 0
        response.close()
        await until(lambda: server.batcher.closed == 1)
        assert caplog.records == []

    serve(
        tokenizer,
        test,
        generates="x" * max_new_tokens,
        limits=Limits(max_input_tokens=100, max_total_tokens=2 * max_new_tokens, vocabulary=300),
    )


def test_keep_alive_lines_are_sent_while_no_token_comes(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE", 0.05)

    async def test(server: Server) -> None:
        assert server.batcher.token_permits is not None
        async with server.client.post("/generate_stream", json=HELLO) as response:
            assert response.status == 200  # before the first token: it takes too long
            assert await response.content.readline() == b"\n"
            server.batcher.token_permits.release()
            lines = [await response.content.readline() for _ in range(12)]
            assert [line[:16] for line in lines if line != b"\n"] == [b'data: {"index":1']

    serve(tokenizer, test, token_permits=asyncio.Semaphore(0))


def test_unicode_line_separators_are_escaped_in_stream_events(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        async with server.client.post("/generate_stream", json=HELLO) as response:
            data = await response.read()
        assert b"\\u2028" in data
        assert len(data.decode().splitlines()) == data.count(b"\n")
        texts = [json.loads(line[6:])["token"]["text"] for line in data.split(b"\n") if line]
        assert "".join(texts) == "a\u2028b\u2029c\u0085d</s>"

    serve(tokenizer, test, generates="a\u2028b\u2029c\u0085d</s>")


def test_tokenize_of_long_text_runs_outside_the_event_loops_thread(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans and token texts are built in the tokenizer's thread: a text of 2 MB has a million of them."""
    in_main_thread = []

    class RecordingSpanJson(tgi.SpanJson):
        def __post_init__(self) -> None:
            in_main_thread.append(threading.current_thread() is threading.main_thread())

    def token_text(id: int) -> str:
        in_main_thread.append(threading.current_thread() is threading.main_thread())
        return "x"

    monkeypatch.setattr(tgi, "SpanJson", RecordingSpanJson)
    monkeypatch.setattr(tokenizer, "token_text", token_text)

    async def test(server: Server) -> None:
        for text in ("short", "x" * (LONG_TEXT + 1)):
            for body in ({"inputs": text}, {"prompt": text, "return_token_strs": True}):
                in_main_thread.clear()
                await server.post("/tokenize", body)
                assert set(in_main_thread) == {text == "short"}

    serve(tokenizer, test)


def test_tokenize_answers_in_tgis_format_to_inputs_and_in_vllms_to_prompt(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, spans, _ = await server.post("/tokenize", {"inputs": "hé"})
        assert spans[0] == {"id": 0, "text": "", "start": 0, "stop": 0}
        assert (spans[1]["text"], spans[1]["start"], spans[1]["stop"]) == ("h", 0, 1)
        assert spans[-1]["stop"] == 3
        _, counted, _ = await server.post("/tokenize", {"model": "m", "prompt": "hi"})
        assert (counted["count"], counted["max_model_len"]) == (3, 128)
        assert counted["tokens"] == tokenizer.encode("hi")
        assert (await server.post("/tokenize", {"prompt": "hi", "add_special_tokens": False}))[1]["count"] == 2
        assert len((await server.post("/tokenize", {"inputs": "abcd", "parameters": {"truncate": 2}}))[1]) == 2
        assert (await server.post("/tokenize", {}))[0] == 422
        for truncate in (0, -2):
            assert (await server.post("/tokenize", {"inputs": "abcd", "parameters": {"truncate": truncate}}))[0] == 422

    serve(tokenizer, test)


def test_tokenizer_info_names_special_tokens_and_the_chat_template(tokenizer: Tokenizer) -> None:
    """Roles without a token are null: lm-eval's remote tokenizer refuses a server whose answer lacks `eos_token`."""

    async def test(server: Server) -> None:
        status, data, _ = await server.get("/tokenizer_info")
        tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None}
        assert (status, json.loads(data)) == (200, {**tokens, "chat_template": TEMPLATE})

    serve(tokenizer, test)


def test_info_reports_model_and_limits(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, data, _ = await server.get("/info")
        assert json.loads(data) == {
            "model_id": "some/model",
            "model_sha": "main",
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": 7,
            "max_best_of": 6,
            "max_stop_sequences": 5,
            "max_input_tokens": 100,
            "max_total_tokens": 128,
            "validation_workers": 1,
            "max_client_batch_size": 3,
            "router": "penstock",
            "version": version("penstock"),
            "sha": None,
            "docker_label": None,
        }

    settings = {
        "revision": "main",
        "max_concurrent_requests": 7,
        "max_best_of": 6,
        "max_stop_sequences": 5,
        "max_client_batch_size": 3,
    }
    serve(tokenizer, test, settings=settings, limits=Limits(100, 128, 300))


def test_health_is_503_with_stage_and_progress_while_loading_then_200(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        stage = "loading weights: 40 %"
        for path in ("/health", "/ping", "/"):
            status, data, _ = await server.get(path)
            assert status == 503
            assert json.loads(data) == {"error": "unhealthy", "error_type": "healthcheck", "stage": stage, "progress": 0.4}
        server.batcher.ready, server.batcher.limits = True, LIMITS
        for path in ("/health", "/ping", "/"):
            assert (await server.get(path))[:2] == (200, b"")

    serve(tokenizer, test, ready=False, limits=None, stage="loading weights: 40 %")


def test_metrics_answer_get_and_head(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, data, response = await server.get("/metrics")
        assert (status, data) == (200, b"tgi_queue_size 0\n")
        assert response.headers["Content-Type"].startswith("text/plain")
        async with server.client.head("/metrics") as head:
            assert head.status == 200

    serve(tokenizer, test)


def test_api_key_is_required_everywhere_but_for_health_probes(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}, {"Authorization": "sésame"}):
            status, body, response = await server.post("/generate", HELLO, headers=headers)
            assert (status, body["error_type"]) == (401, "unauthorized")
            assert response.headers["WWW-Authenticate"] == "Bearer"
        for scheme in ("Bearer", "bearer"):
            assert (await server.post("/generate", HELLO, headers={"Authorization": f"{scheme} sésame"}))[0] == 200
        assert (await server.get("/health"))[0] == 200
        assert (await server.get("/metrics"))[0] == 401

    serve(tokenizer, test, settings={"api_keys": ("sésame",)})


def test_body_above_payload_limit_is_a_413(tokenizer: Tokenizer) -> None:
    async def chunks() -> Any:
        for _ in range(20):
            yield b" " * 100

    async def test(server: Server) -> None:
        assert (await server.post("/generate", {"inputs": "x" * 1000}))[:2] == (
            413,
            {"error": "the body may have 1000 bytes (--payload-limit). Given: 1014", "error_type": "payload_too_large"},
        )
        async with server.client.post("/generate", data=chunks()) as response:  # no Content-Length
            assert response.status == 413
            assert (await response.json())["error_type"] == "payload_too_large"
        assert (await server.post("/generate", HELLO))[0] == 200

    serve(tokenizer, test, settings={"payload_limit": 1000})


def test_compressed_body_is_a_415(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, body, _ = await server.post("/generate", b"\x1f\x8bnonsense", headers={"Content-Encoding": "gzip"})
        assert (status, body["error_type"]) == (415, "unsupported_encoding")

    serve(tokenizer, test)


def test_unknown_route_and_wrong_method_are_json_errors(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, body, _ = await server.post("/nowhere", {})
        assert (status, body["error_type"]) == (404, "not_found")
        status, data, response = await server.get("/generate")
        assert (status, json.loads(data)["error_type"]) == (405, "method_not_allowed")
        assert response.headers["Allow"] == "POST"

    serve(tokenizer, test)


def test_x_request_id_is_echoed(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for path in ("/generate", "/generate_stream", "/nowhere"):
            async with server.client.post(path, json=HELLO, headers={"X-Request-ID": "abc-1"}) as response:
                assert response.headers["X-Request-ID"] == "abc-1"

    serve(tokenizer, test)


def test_requests_work_with_the_demo_models_tokenizer(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "demo" / "model"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("no demo model here")
    tokenizer = Tokenizer(folder)
    (end,) = tokenizer.eos_ids

    async def test(server: Server) -> None:
        _, body, _ = await server.post("/generate", with_parameters(details=True))
        assert body["generated_text"] == "Once upon a time."
        assert body["details"]["tokens"][-1]["id"] == end
        chat = {"messages": [{"role": "user", "content": "Tell me a story."}]}
        _, body, _ = await server.post("/v1/chat/completions", chat)
        assert body["choices"][0]["message"]["content"] == "Once upon a time."

    limits = Limits(max_input_tokens=100, max_total_tokens=128, vocabulary=100_000)
    serve(tokenizer, test, generates="Once upon a time." + tokenizer.token_text(end), limits=limits)


def test_best_of_returns_the_most_probable_sequence_and_the_others_in_details(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        server.batcher.logprob = 0.5  # makes later choices more probable
        parameters = {"best_of": 3, "do_sample": True, "seed": 4, "details": True, "max_new_tokens": 20, "top_n_tokens": 1}
        status, body, response = await server.post("/generate", {"inputs": "hi", "parameters": parameters})
        assert status == 200
        assert body["generated_text"] == "2Hello you"
        others = body["details"]["best_of_sequences"]
        assert [other["generated_text"] for other in others] == ["Hello you", "1Hello you"]
        names = ["generated_text", "finish_reason", "generated_tokens", "seed", "prefill", "tokens", "top_tokens"]
        assert [list(other) for other in others] == [names] * 2
        assert (others[0]["finish_reason"], others[0]["generated_tokens"], others[0]["seed"]) == ("eos_token", 10, 4)
        assert len(others[0]["tokens"]) == len(others[0]["top_tokens"]) == 10
        assert response.headers["x-generated-tokens"] == "11", "the best one's, as in TGI"
        assert response.headers["x-prompt-tokens"] == str(len(server.batcher.requests[0].prompt))
        _, body, _ = await server.post("/generate", {"inputs": "hi", "parameters": {"best_of": 2, "do_sample": True}})
        assert list(body) == ["generated_text"]
        _, body, _ = await server.post("/generate", {"inputs": "hi", "parameters": {"details": True}})
        assert "best_of_sequences" not in body["details"]

    serve(tokenizer, test)


def test_best_of_compares_mean_log_probabilities_so_that_a_short_answer_has_no_advantage(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        server.batcher._texts = lambda request: ["Hello you</s>", "Hi</s>"]  # type: ignore[method-assign]
        parameters = {"best_of": 2, "do_sample": True, "details": True, "max_new_tokens": 20}
        _, body, _ = await server.post("/generate", {"inputs": "hi", "parameters": parameters})
        [other] = body["details"]["best_of_sequences"]
        sums = [sum(token["logprob"] for token in details["tokens"]) for details in (body["details"], other)]
        assert (body["generated_text"], sums) == ("Hello you", [-5.0, -3.0])

    serve(tokenizer, test)


def test_best_of_without_sampling_or_above_its_limit_is_a_422(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for given, message in (
            ({"best_of": 2}, "Input validation error: you must use sampling when `best_of` is > 1"),
            ({"best_of": 17, "do_sample": True}, "Input validation error: `best_of` must be > 0 and <= 16. Given: 17"),
            ({"best_of": 17}, "Input validation error: `best_of` must be > 0 and <= 16. Given: 17"),
        ):
            status, body, _ = await server.post("/generate", {"inputs": "hi", "parameters": given})
            assert (status, body["error"]) == (422, message)

    serve(tokenizer, test)


def test_priority_timeout_and_tenant_reach_the_batcher(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        body = {"inputs": "hi", "parameters": {"priority": "batch", "timeout": 1.5}}
        await server.post("/generate", body, headers={"Authorization": "Bearer k"})
        request = server.batcher.requests[-1]
        assert (request.priority, request.timeout, len(request.tenant)) == ("batch", 1.5, 16)
        for priority, given in ((1, "; numbers are not supported. Given: 1"), ("", '. Given: ""')):
            status, body, _ = await server.post("/generate", {"inputs": "hi", "parameters": {"priority": priority}})
            message = f'Input validation error: `priority` must be one of "interactive", "normal", "batch"{given}'
            assert (status, body) == (422, {"error": message, "error_type": "validation"})
        status, body, _ = await server.post("/generate", {"inputs": "hi", "parameters": {"timeout": 0}})
        assert (status, body["error"]) == (422, "Input validation error: `timeout` must be strictly positive")

    serve(tokenizer, test)


def test_expired_timeout_is_a_504_or_the_last_event_of_a_stream(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        server.batcher.fails_with = Expired("late: 7 tokens were there")
        for path in ("/generate", "/generate_stream"):
            status, body, response = await server.post(path, {"inputs": "hi"})
            assert (status, body) == (504, {"error": "late: 7 tokens were there", "error_type": "timeout"})
            assert response.headers["x-should-retry"] == "false"
        server.batcher.fails_with = None
        server.batcher.fails_after = (3, Expired("late: 3 tokens were there"))
        *tokens, last = await server.events("/generate_stream", {"inputs": "hi"})
        assert len(tokens) == 3
        assert last == {"error": "late: 3 tokens were there", "error_type": "timeout"}

    serve(tokenizer, test)


def test_max_batch_size_limits_best_of_and_n(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, body, _ = await server.get("/info")
        assert json.loads(body)["max_best_of"] == 3
        status, body, _ = await server.post("/generate", {"inputs": "hi", "parameters": {"best_of": 4, "do_sample": True}})
        assert (status, body["error"]) == (422, "Input validation error: `best_of` must be > 0 and <= 3. Given: 4")
        status, body, _ = await server.post("/v1/completions", {"model": "m", "prompt": "hi", "n": 4})
        assert (status, body["error"]["message"]) == (400, "`n` must be from 1 to 3 (--max-batch-size). Given: 4")

    serve(tokenizer, test, settings={"max_batch_size": 3})


def object_with_only(name: str) -> dict[str, Any]:
    """The schema that shards get for an object with this property and no others."""
    return {"type": "object", "properties": {name: {}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("grammar", "kind", "source"),
    [
        ({"type": "json", "value": {"properties": {"a": {}}}}, "json_schema", object_with_only("a")),
        ({"type": "json_object", "value": {"type": "object"}}, "json_schema", {"type": "object"}),
        ({"type": "json", "value": '{"properties": {"é": {}}}'}, "json_schema", object_with_only("é")),
        ({"type": "json_schema", "value": {"name": "x", "schema": {"type": "array"}}}, "json_schema", {"type": "array"}),
        ({"type": "json_schema", "value": {"schema": {"type": "array"}, "strict": True}}, "json_schema", {"type": "array"}),
        ({"type": "regex", "value": "[0-9]+"}, "regex", "[0-9]+"),
    ],
)
def test_grammar_of_each_type_reaches_the_batcher(tokenizer: Tokenizer, grammar: dict[str, Any], kind: str, source: object) -> None:
    async def test(server: Server) -> None:
        for path in ("/generate", "/"):
            assert (await server.post(path, with_parameters(grammar=grammar)))[0] == 200
        await server.events("/generate_stream", with_parameters(grammar=grammar))
        assert len(server.batcher.requests) == 3
        for request in server.batcher.requests:
            assert request.grammar is not None
            found = request.grammar.source
            assert (request.grammar.kind, found if kind == "regex" else json.loads(found)) == (kind, source)

    serve(tokenizer, test)


def test_disable_grammar_support_refuses_grammars(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, body, _ = await server.post("/generate", with_parameters(grammar={"type": "regex", "value": "a"}))
        assert (status, body["error"]) == (422, "Input validation error: grammar is not supported")
        assert (await server.post("/generate", HELLO))[0] == 200

    serve(tokenizer, test, settings={"disable_grammar_support": True})


def test_only_the_bodys_stream_field_selects_streaming_not_the_accept_header(tokenizer: Tokenizer) -> None:
    """Clients send `Accept: */*`, and a bearer token even if no key is configured."""

    async def test(server: Server) -> None:
        for accept in ("*/*", "text/event-stream", "application/json"):
            headers = {"Accept": accept, "Authorization": "Bearer ", "Content-Type": "text/plain"}
            assert (await server.post("/", HELLO, headers=headers))[1] == [{"generated_text": "hiHello you"}]
            async with server.client.post("/", json={**HELLO, "stream": True}, headers={"Accept": accept}) as response:
                assert response.headers["Content-Type"] == "text/event-stream"
                data = await response.read()
            assert b"[DONE]" not in data

    serve(tokenizer, test)


def test_vllms_tokenize_and_detokenize_round_trip(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, found, _ = await server.post("/tokenize", {"prompt": "hé", "return_token_strs": True})
        assert found["token_strs"][:2] == ["<s>", "h"]
        assert (await server.post("/detokenize", {"model": "m", "tokens": found["tokens"]}))[1] == {"prompt": "<s>hé"}
        for tokens in (["a"], [-1], [2**32], "a", None):
            status, body, _ = await server.post("/detokenize", {"tokens": tokens})
            assert (status, "tokens" in body["error"]) == (422, True)
        assert (await server.post("/detokenize", {"tokens": []}))[1] == {"prompt": ""}
        status, body, _ = await server.post("/detokenize", {"tokens": [*found["tokens"], 99_999, 2**32 - 1]})
        assert (status, body["error"]) == (
            422,
            "Input validation error: `tokens` has the id 99999, and the tokenizer has no such token",
        )

    serve(tokenizer, test)


MALFORMED_HTTP = [
    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nA: b\x00c\r\n\r\n",
    b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"A%d: b\r\n" % number for number in range(10_000)) + b"\r\n",
    b"nonsense\r\n\r\n",
]


@pytest.mark.parametrize("data", MALFORMED_HTTP)
def test_malformed_http_is_a_400_and_closes_the_connection(tokenizer: Tokenizer, data: bytes) -> None:
    async def test(server: Server) -> None:
        url = server.client._base_url
        assert url is not None
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(data)
        with contextlib.suppress(ConnectionError):  # closed before all was sent
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 400 ") or answer.startswith(b"HTTP/1.0 400 ")
            assert answer.count(b"HTTP/1.") == 1
            assert b"aiohttp" not in answer
        writer.close()
        assert (await server.post("/generate", HELLO))[:2] == (200, {"generated_text": "Hello you"})

    serve(tokenizer, test)


def test_pipelined_requests_are_answered_in_order_each_whole(tokenizer: Tokenizer) -> None:
    body = json.dumps(HELLO)

    def asked(path: str) -> str:
        return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}"

    async def test(server: Server) -> None:
        url = server.client._base_url
        assert url is not None
        reader, writer = await asyncio.open_connection(url.host, url.port)
        last = "GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        writer.write("".join((*map(asked, ("/generate_stream", "/generate", "/generate_stream")), last)).encode())
        before, *answers = (await reader.read()).decode().split("HTTP/1.1 200 OK\r\n")
        writer.close()
        assert before == ""
        stream, whole, again, probe = [answer.partition("\r\n\r\n")[2] for answer in answers]
        assert stream.endswith("\r\n0\r\n\r\n")
        assert '"generated_text":"Hello you"' in stream
        assert json.loads(whole) == {"generated_text": "Hello you"}
        assert again == stream
        assert "data:" not in probe

    serve(tokenizer, test)
