"""Invalid bodies on OpenAI's and Anthropic's routes: a quick 4xx that names the field, after which the server still works."""

import io
import json
import time
from typing import Any

import pytest

from penstock.router.api.anthropic import MessagesBody
from penstock.router.api.openai_bodies import ChatBody, CompletionBody
from penstock.router.api.openai_formats import Format
from penstock.router.api.responses import ResponsesBody
from penstock.router.text import Tokenizer
from penstock.tests.router.fake_batcher import Server, make_tokenizer, serve

CHAT_PATH, PATH, RESPONSES_PATH = "/v1/chat/completions", "/v1/completions", "/v1/responses"
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}]},
}
SUBJECT = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input", "/v1/messages": "messages"}
NESTING_DEPTH = 100_000


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def invalid_bodies(path: str) -> list[tuple[bytes, str]]:
    """Each with the field that is invalid; "" if it is the whole body."""
    subject = SUBJECT[path]
    valid = b'"%b": %b' % (
        subject.encode(),
        b'[{"role": "user", "content": "hi"}]' if subject == "messages" else b'"hi"',
    )

    def with_field(name: str, value: bytes) -> tuple[bytes, str]:
        return b'{%b, "%b": %b}' % (valid, name.encode(), value), name

    numbers = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "timeout")
    return [
        (b"", ""),
        (b"null", ""),
        (b"[]", ""),
        (b'"text"', ""),
        (b"{", ""),
        (b"{%b} {}" % valid, ""),
        (b"{'a': 1}", ""),
        (b"\xff\xfe", ""),
        (b"\xef\xbb\xbf{%b}" % valid, ""),  # a byte order mark
        (b"\x00" * 100, ""),
        (b"{}", subject),
        (b'{"%b": 5}' % subject.encode(), subject),
        (b'{"%b": {}}' % subject.encode(), subject),
        (b'{"%b": [null]}' % subject.encode(), subject),
        (b'{"%b": []}' % subject.encode(), subject),
        (b'{"%b": "a\xff"}' % subject.encode(), subject),
        (b'{"%b": "\\ud800"}' % subject.encode(), subject),
        (b'{"%b": "a\nb"}' % subject.encode(), subject),
        (b'{"%b": "open' % subject.encode(), subject),
        (b'{"%b": %b' % (subject.encode(), b"[" * NESTING_DEPTH), subject),
        (b'{%b, "x": %b%b}' % (valid, b'{"a":' * NESTING_DEPTH, b"1" + b"}" * NESTING_DEPTH), "x"),
        (b"{%b, %b}" % (valid, valid), subject),
        (b'{%b, "seed": 1, "seed": 2}' % valid, "seed"),
        (b'{%b, "logit_bias": {"1": 1, "1": 2}}' % valid, "1"),
        *(with_field(name, b"NaN") for name in numbers),
        *(with_field(name, b"-Infinity") for name in numbers),
        *(with_field(name, b"1e999") for name in numbers),
        *(with_field(name, b'"1"') for name in numbers),
        *(with_field(name, b"true") for name in numbers),
        *(with_field(name, b"1e300") for name in ("temperature", "repetition_penalty", "timeout", "top_p")),
        *(with_field(name, b"9" * 5000) for name in ("seed", "top_k", "min_tokens", "unheard_of")),
        with_field("model", b'"%b"' % (b"x" * 4097)),  # each chunk of a stream repeats it
        with_field("seed", b"1.5"),
        with_field("seed", str(2**64).encode()),
        with_field("top_k", b"-5"),
        with_field("stop", b"5"),
        with_field("stop", b'[""]'),
        with_field("stop", b'["a", 5]'),
        with_field("stop_token_ids", b"[-1]"),
        with_field("stop_token_ids", b"[99999999999999999999]"),
        with_field("logit_bias", b'{"a": 1}'),
        with_field("logit_bias", b'{"1": 1e999}'),
        with_field("logit_bias", b'{"1": 101}'),
        with_field("logit_bias", b'{"99999999999999999999999": 1}'),
        with_field("stream", b'"yes"'),
        *([with_field("stream_options", b"[]")] if path != "/v1/messages" else []),  # which has no such field
        with_field("priority", b"{}"),
        with_field("num_beam_groups", b"true"),
        with_field("diversity_penalty", b"false"),
        with_field("min_tokens", b"-1"),
        with_field("guided_regex", b'"("'),
        with_field("guided_json", b'"{"'),
        with_field("guided_json", b'{"type": 5}'),
        with_field("guided_json", b'{"$ref": "#"}'),
        with_field("guided_grammar", b'"start: ???"'),
        (b'{%b, "x": {%b, "ea5f": 1}}' % (valid, b",".join(b'"%x": 1' % n for n in range(60_000))), "ea5f"),
        (b'{%b, "x": "%b", "y": %b}' % (valid, b" ".join([b"1" * 4299] * 200), b"1" * 5000), "y"),
    ]


@pytest.mark.parametrize("path", VALID)
def test_invalid_body_is_a_quick_4xx_that_names_the_field(tokenizer: Tokenizer, path: str) -> None:
    async def test(server: Server) -> None:
        await server.post(path, {**VALID[path], "guided_regex": "a"})  # starts the worker that checks grammars
        server.batcher.requests.clear()
        for data, field in invalid_bodies(path):
            start = time.monotonic()
            status, body, _ = await server.post(path, data)
            seconds = time.monotonic() - start
            details = (data[:80], status, body)
            assert 400 <= status < 500, details
            error = body["error"]
            assert error["type"] == "invalid_request_error"
            assert not field or field in error["message"], details
            assert not field or field in (error["param"] or field), details
            assert seconds < 1, (details, seconds)
            assert "0x" not in error["message"], details
            assert "Traceback" not in error["message"], details
            assert server.batcher.requests == [], details
            assert (await server.post(path, VALID[path]))[0] == 200
            server.batcher.requests.clear()

    serve(tokenizer, test)


@pytest.mark.parametrize("path", VALID)
def test_body_of_10_mb_is_a_413_within_seconds(tokenizer: Tokenizer, path: str) -> None:
    async def test(server: Server) -> None:
        for data in (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', b"[" * 10_000_000):
            start = time.monotonic()
            async with server.client.post(path, data=io.BytesIO(data)) as response:
                status, body = response.status, await response.json()
            assert (status, body["error"]["code"]) == (413, "payload_too_large")
            assert time.monotonic() - start < 9
            assert (await server.post(path, VALID[path]))[0] == 200

    serve(tokenizer, test)


LARGE_BODIES = {
    "names": lambda: b"{%s}" % b",".join(b'"x%d":1' % i for i in range(900_000)),
    "objects": lambda: b'{"x":[%s{}]}' % (b"{}," * 4_000_000),
    "lists": lambda: b'{"x":%s%s}' % (b"[" * 9_000_000, b"]" * 9_000_000),
}


@pytest.mark.parametrize("kind", LARGE_BODIES)
def test_large_body_with_too_many_json_items_is_refused_unparsed(tokenizer: Tokenizer, kind: str) -> None:
    """The size limit may be high because of images. Parsing would take seconds, in which no stream continues."""

    async def test(server: Server) -> None:
        for data, expected in (
            (LARGE_BODIES[kind](), 413),
            (json.dumps({**VALID[CHAT_PATH], "user": "x" * 15_000_000}).encode(), 200),
        ):
            async with server.client.post(CHAT_PATH, data=io.BytesIO(data)) as response:
                status, answer = response.status, await response.json()
            assert status == expected
            assert status == 200 or "colons and opening brackets" in answer["error"]["message"]

    serve(tokenizer, test, settings={"payload_limit": 20_000_000})


@pytest.mark.parametrize("path", VALID)
def test_unknown_fields_are_ignored_and_named_in_a_header(tokenizer: Tokenizer, path: str) -> None:
    """Characters that a header can't hold are replaced."""

    async def test(server: Server) -> None:
        unknown = {"x": None, "a b\r\nSet-Cookie: c=1": {"deep": [1, 2, {"x": 1}]}, "é": 1, "user": "me", "metadata": {}}
        status, body, response = await server.post(path, {**VALID[path], **unknown})
        assert status == 200, body
        assert response.headers["x-ignored-fields"] == "a?b??Set-Cookie??c?1, x, ?"
        assert "Set-Cookie" not in response.headers
        async with server.client.post(path, json={**VALID[path], "zzz": 1, "stream": True}) as streamed:
            assert streamed.headers["x-ignored-fields"] == "zzz"
        _, _, response = await server.post(path, VALID[path])
        assert "x-ignored-fields" not in response.headers

    serve(tokenizer, test)


@pytest.mark.parametrize("path", VALID)
def test_unknown_fields_refuse_option_makes_them_a_400(tokenizer: Tokenizer, path: str) -> None:
    async def test(server: Server) -> None:
        status, body, _ = await server.post(path, {**VALID[path], "temprature": 1})
        assert (status, body["error"]["param"]) == (400, "temprature")
        assert body["error"]["message"] == "`temprature` is not a field of this route (--unknown-fields refuse)"
        assert (await server.post(path, {**VALID[path], "user": "me"}))[0] == 200

    serve(tokenizer, test, settings={"unknown_fields": "refuse"})


FUNCTION = {"type": "function", "name": "f", "function": {"name": "f"}}
UNUSUAL_VALUES: list[Any] = [
    *(0, 1, -1, 1.5, 2**70, True, False, "", "x", "auto", "required", "none"),
    *([], {}, [None], [0], ["a"], [[]], [{}], {"a": 1}, {"type": []}, {"type": "function"}, {"name": 5}, {"effort": 5}),
    *({"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/x"}}}, {"format": {"type": []}}),
    *({"type": "allowed_tools"}, {"type": "allowed_tools", "allowed_tools": {"tools": 3}}, {"type": "allowed_tools", "tools": "f"}),
    *({"type": "allowed_tools", "mode": 5, "tools": [{"name": "f"}]}, {"json": 5}, {"regex": 5}, {"choice": [1]}),
    [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 5}, "required": 7}}}],
    [{"type": "function", "function": {"name": 'a"b\n', "parameters": None}}],
    *([{"role": "user"}], [{"role": 5}], [{"role": "user", "content": [{"type": []}]}], [{"role": "user", "content": 5}]),
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
    *([{"type": "reasoning", "content": 5}], [{"type": "reasoning", "summary": [5]}], [{"type": []}]),
    *([{"type": "tool_use"}], [{"role": "user", "content": [{"type": "tool_result", "content": [5]}]}], {"type": "any"}),
    *([{"role": "assistant", "content": [{"type": "tool_use", "name": [], "input": 5, "id": 5}]}], {"type": "tool", "name": "f"}),
    *([{"type": "function_call"}], [{"type": "function_call", "name": 5}], [{"type": "function_call_output"}]),
]


TOOLS = {"tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"}
FORMATS = {*Format.__struct_fields__, "reasoning"}
BESIDE_TOOLS = TOOLS | FORMATS | {"messages", "input", "text", "n", "num_beams", "stop"}


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT_PATH, ChatBody), (PATH, CompletionBody), (RESPONSES_PATH, ResponsesBody), ("/v1/messages", MessagesBody)],
)
def test_unusual_value_of_any_field_never_causes_a_500(tokenizer: Tokenizer, path: str, body: type[Any]) -> None:
    """Fields that depend on tools are tried with and without them."""

    async def test(server: Server) -> None:
        for name in sorted({*body.__struct_fields__} - {"stream", "ignore_eos"}):
            for value in UNUSUAL_VALUES:
                for tools_fields in ({}, {"tools": [FUNCTION]}) if name in BESIDE_TOOLS else ({},):
                    status, answer, _ = await server.post(path, {**VALID[path], **tools_fields, name: value})
                    assert status < 500, (name, value, answer)
                    assert (status < 400) == ("error" not in answer or answer["error"] is None), (name, value, answer)

    serve(tokenizer, test)
