"""Bodies that no client should send: each is a 4xx at once that names the field, and the next answer is as it was."""

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
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}]},
}
SUBJECT = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input", "/v1/messages": "messages"}
DEEP = 100_000


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def bodies(path: str) -> list[tuple[bytes, str]]:
    """Each with the field that is wrong; "" where it is none."""
    subject = SUBJECT[path]
    good = b'"%b": %b' % (
        subject.encode(),
        b'[{"role": "user", "content": "hi"}]' if subject == "messages" else b'"hi"',
    )

    def with_field(name: str, value: bytes) -> tuple[bytes, str]:
        return b'{%b, "%b": %b}' % (good, name.encode(), value), name

    numbers = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "timeout")
    return [
        (b"", ""),
        (b"null", ""),
        (b"[]", ""),
        (b'"text"', ""),
        (b"{", ""),
        (b"{%b} {}" % good, ""),
        (b"{'a': 1}", ""),
        (b"\xff\xfe", ""),
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
        (b'{"%b": %b' % (subject.encode(), b"[" * DEEP), subject),
        (b'{%b, "x": %b%b}' % (good, b'{"a":' * DEEP, b"1" + b"}" * DEEP), "x"),
        (b"{%b, %b}" % (good, good), subject),
        (b'{%b, "seed": 1, "seed": 2}' % good, "seed"),
        (b'{%b, "logit_bias": {"1": 1, "1": 2}}' % good, "1"),
        *(with_field(name, b"NaN") for name in numbers),
        *(with_field(name, b"-Infinity") for name in numbers),
        *(with_field(name, b"1e999") for name in numbers),
        *(with_field(name, b'"1"') for name in numbers),
        *(with_field(name, b"true") for name in numbers),
        *(with_field(name, b"1e300") for name in ("temperature", "repetition_penalty", "timeout", "top_p")),
        *(with_field(name, b"9" * 5000) for name in ("seed", "top_k", "min_tokens", "unheard_of")),
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
        *([with_field("stream_options", b"[]")] if path != "/v1/messages" else []),  # which has none
        with_field("priority", b"{}"),
        with_field("min_tokens", b"-1"),
        with_field("guided_regex", b'"("'),
        with_field("guided_json", b'"{"'),
        with_field("guided_json", b'{"type": 5}'),
        with_field("guided_json", b'{"$ref": "#"}'),
        with_field("guided_grammar", b'"start: ???"'),
        (b'{%b, "x": {%b, "ea5f": 1}}' % (good, b",".join(b'"%x": 1' % n for n in range(60_000))), "ea5f"),
        (b'{%b, "x": "%b", "y": %b}' % (good, b" ".join([b"1" * 4299] * 200), b"1" * 5000), "y"),
    ]


@pytest.mark.parametrize("path", GOOD)
def test_every_bad_body_is_refused_at_once_and_harms_nobody(tokenizer: Tokenizer, path: str) -> None:
    async def test(server: Server) -> None:
        await server.post(path, {**GOOD[path], "guided_regex": "a"})  # starts the process that compiles
        server.batcher.requests.clear()
        for data, field in bodies(path):
            began = time.monotonic()
            status, body, _ = await server.post(path, data)
            seconds = time.monotonic() - began
            shown = (data[:80], status, body)
            assert 400 <= status < 500, shown
            error = body["error"]
            assert error["type"] == "invalid_request_error"
            assert not field or field in error["message"], shown
            assert not field or field in (error["param"] or field), shown
            assert seconds < 1, (shown, seconds)
            assert "0x" not in error["message"], shown
            assert "Traceback" not in error["message"], shown
            assert server.batcher.requests == [], shown
            assert (await server.post(path, GOOD[path]))[0] == 200
            server.batcher.requests.clear()

    serve(tokenizer, test)


@pytest.mark.parametrize("path", GOOD)
def test_a_body_of_10_mb_is_refused_at_once(tokenizer: Tokenizer, path: str) -> None:
    async def test(server: Server) -> None:
        for data in (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', b"[" * 10_000_000):
            began = time.monotonic()
            async with server.client.post(path, data=io.BytesIO(data)) as response:
                status, body = response.status, await response.json()
            assert (status, body["error"]["code"]) == (413, "payload_too_large")
            assert time.monotonic() - began < 9
            assert (await server.post(path, GOOD[path]))[0] == 200

    serve(tokenizer, test)


MANY = {
    "names": lambda: b"{%s}" % b",".join(b'"x%d":1' % i for i in range(900_000)),
    "objects": lambda: b'{"x":[%s{}]}' % (b"{}," * 4_000_000),
    "lists": lambda: b'{"x":%s%s}' % (b"[" * 9_000_000, b"]" * 9_000_000),
}


@pytest.mark.parametrize("what", MANY)
def test_large_bodies_of_small_things_are_not_read(tokenizer: Tokenizer, what: str) -> None:
    """Where bodies may be large for their pictures. To read them would take seconds, in which nobody's stream goes on."""

    async def test(server: Server) -> None:
        for data, expected in ((MANY[what](), 413), (json.dumps({**GOOD[CHAT_PATH], "user": "x" * 15_000_000}).encode(), 200)):
            async with server.client.post(CHAT_PATH, data=io.BytesIO(data)) as response:
                status, answer = response.status, await response.json()
            assert status == expected
            assert status == 200 or "colons and opening brackets" in answer["error"]["message"]

    serve(tokenizer, test, settings={"payload_limit": 20_000_000})


@pytest.mark.parametrize("path", GOOD)
def test_what_is_only_odd_is_taken(tokenizer: Tokenizer, path: str) -> None:
    """Unknown fields of any kind are ignored, and the answer says which; names that no header can hold are made harmless."""

    async def test(server: Server) -> None:
        odd = {"x": None, "a b\r\nSet-Cookie: c=1": {"deep": [1, 2, {"x": 1}]}, "é": 1, "user": "me", "metadata": {}}
        status, body, response = await server.post(path, {**GOOD[path], **odd})
        assert status == 200, body
        assert response.headers["x-ignored-fields"] == "a?b??Set-Cookie??c?1, x, ?"
        assert "Set-Cookie" not in response.headers
        async with server.client.post(path, json={**GOOD[path], "zzz": 1, "stream": True}) as streamed:
            assert streamed.headers["x-ignored-fields"] == "zzz"
        _, _, response = await server.post(path, GOOD[path])
        assert "x-ignored-fields" not in response.headers

    serve(tokenizer, test)


@pytest.mark.parametrize("path", GOOD)
def test_unknown_fields_are_refused_if_the_operator_says_so(tokenizer: Tokenizer, path: str) -> None:
    async def test(server: Server) -> None:
        status, body, _ = await server.post(path, {**GOOD[path], "temprature": 1})
        assert (status, body["error"]["param"]) == (400, "temprature")
        assert body["error"]["message"] == "`temprature` is not a field of this route (--unknown-fields refuse)"
        assert (await server.post(path, {**GOOD[path], "user": "me"}))[0] == 200

    serve(tokenizer, test, settings={"unknown_fields": "refuse"})


FUNCTION = {"type": "function", "name": "f", "function": {"name": "f"}}
ODD: list[Any] = [
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
def test_no_value_of_any_field_is_a_fault_of_ours(tokenizer: Tokenizer, path: str, body: type[Any]) -> None:
    """Those that look at tools with some and without."""

    async def test(server: Server) -> None:
        for name in sorted({*body.__struct_fields__} - {"stream", "ignore_eos"}):
            for value in ODD:
                for more in ({}, {"tools": [FUNCTION]}) if name in BESIDE_TOOLS else ({},):
                    status, answer, _ = await server.post(path, {**GOOD[path], **more, name: value})
                    assert status < 500, (name, value, answer)
                    assert (status < 400) == ("error" not in answer or answer["error"] is None), (name, value, answer)

    serve(tokenizer, test)
