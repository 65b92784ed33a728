"""Anthropic's /v1/messages: content blocks become a chat, answers become blocks and stream events, refusals and failures."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.router.request import Broken, Overloaded
from penstock.router.text import Tokenizer
from penstock.tests.router.fake_batcher import Server, make_tokenizer, serve

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}"
    "{% if m.tool_calls %}{% for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% endif %}{% if m.reasoning_content %}~{{ m.reasoning_content }}~{% endif %}{% endfor %}"
    "{% if enable_thinking is defined %}[thinks: {{ enable_thinking }}, {{ thinking }}]{% endif %}"
    "{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}"
    "{% if add_generation_prompt %}[a]{% endif %}{# tools <tool_call> <think> </think> #}"
)
BODY: dict[str, Any] = {"max_tokens": 99, "messages": [{"role": "user", "content": "hi"}]}
F = {"name": "f", "description": "Does.", "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
FORMAT = {"type": "json_schema", "schema": {"type": "object", "properties": {"n": {"type": "integer"}}}}
ANSWER = '<think>Hm?</think>Oh.<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call></s>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The template of a model with reasoning, whose tool calls are in Hermes' format."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


def message_from_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client builds from a stream's events."""
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == ["message_start", "message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    assert message["content"] == []
    open_block, pieces = None, ""
    for event in events[1:-2]:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert (open_block, index) == (None, len(message["content"]))
                open_block, pieces = block, ""
                message["content"].append(block)
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert index == len(message["content"]) - 1
                assert open_block is not None
                if delta["type"] == "signature_delta":
                    open_block["signature"] += delta["signature"]
                    continue
                name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}[delta["type"]]
                pieces += delta[name]
            case {"type": "content_block_stop"}:
                assert open_block is not None
                if open_block["type"] == "tool_use":
                    open_block["input"] = json.loads(pieces)
                else:
                    open_block[open_block["type"]] = pieces
                open_block = None
            case _:
                raise AssertionError(event)
    return message | events[-2]["delta"] | {"usage": message["usage"] | events[-2]["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Without ids, which differ each time."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {name: value for name, value in message.items() if name != "id"} | {"content": content}


def test_text_answer_has_anthropics_fields(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, body, response = await server.post(PATH, {**BODY, "model": "m", "system": "be", "metadata": {"user_id": "u"}})
        (request,) = server.batcher.requests
        assert tokenizer.decode(request.prompt) == "[system]be[user]hi[a]"
        assert (status, body.pop("id")[:4]) == (200, "msg_")
        assert body == {
            "type": "message",
            "role": "assistant",
            "model": "m",
            "content": [{"type": "text", "text": "Hello you"}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": len(request.prompt) - 4,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 4,
                "output_tokens": 10,
            },
        }
        assert request.session
        assert response.headers["x-generated-tokens"] == "10"
        assert response.headers["request-id"] == response.headers["x-request-id"]
        _, body, _ = await server.post(PATH, {**BODY, "max_tokens": 3})
        assert (body["content"], body["stop_reason"]) == ([{"type": "text", "text": "Hel"}], "max_tokens")

    serve(tokenizer, test, cached=4)


@pytest.mark.parametrize(
    ("max_tokens", "reason"),
    [(64_000, "model_context_window_exceeded"), (None, "model_context_window_exceeded"), (117, "max_tokens")],
)
def test_max_tokens_beyond_the_context_is_accepted_and_the_stop_reason_says_so(
    tokenizer: Tokenizer, max_tokens: int | None, reason: str
) -> None:
    """Claude Code sends such values."""

    async def test(server: Server) -> None:
        request_body = {**BODY, "max_tokens": max_tokens}
        _, unstreamed, _ = await server.post(PATH, request_body)
        for body in (unstreamed, message_from_events(await server.named_events(PATH, request_body))):
            assert len(server.batcher.requests[-1].prompt) + 117 == 128
            assert (body["usage"]["output_tokens"], body["stop_reason"]) == (117, reason)

    serve(tokenizer, test, generates="x" * 200)


def test_too_long_prompt_has_the_error_message_that_clients_parse(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for count, tokens in ((95, "104"), (100_000, "at least 25003")):
            _, body, _ = await server.post(PATH, {**BODY, "messages": [{"role": "user", "content": "x" * count}]})
            assert body["error"]["message"] == f"prompt is too long: {tokens} tokens > 100 maximum"
            assert (body["error"]["type"], body["error"]["param"]) == ("invalid_request_error", "messages")

    serve(tokenizer, test)


def test_claude_codes_billing_header_is_removed_from_the_prompt(tokenizer: Tokenizer) -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.84c; cc_entrypoint=cli; cch=fa690;"}

    async def test(server: Server) -> None:
        for system, expected in (([billing, {"type": "text", "text": "be"}], "[system]be"), ([billing], "")):
            await server.post(PATH, {**BODY, "system": system})
            assert tokenizer.decode(server.batcher.requests[-1].prompt) == f"{expected}[user]hi[a]"

    serve(tokenizer, test)


def test_tool_reference_in_a_tool_result_is_written_as_text(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        found = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "f"}]}
        tools = [{**F, "defer_loading": True}]
        status, body, _ = await server.post(PATH, {**BODY, "messages": [{"role": "user", "content": [found]}], "tools": tools})
        assert status == 200, body
        assert tokenizer.decode(server.batcher.requests[-1].prompt) == "[tool]<Found the tool f.\n>[a]"

    serve(tokenizer, test)


def test_later_system_message_stays_or_joins_the_message_before(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """It joins if the model's template can't write it in place. In OpenAI's API it is left to the template."""
    strict = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first!') }}{% endif %}"
    strict = make_tokenizer(tmp_path, strict + "[{{ m.role }}]{{ m.content }}{% endfor %}")
    request_body = {"max_tokens": 9, "system": "be", "messages": [*BODY["messages"], {"role": "system", "content": "so"}]}
    reminder = "\n\n<system-reminder>\nso\n</system-reminder>"
    for model_tokenizer, expected in ((tokenizer, "[system]be[user]hi[system]so[a]"), (strict, f"[system]be[user]hi{reminder}")):

        async def test(server: Server, model_tokenizer: Tokenizer = model_tokenizer, expected: str = expected) -> None:
            status, body, _ = await server.post(PATH, request_body)
            assert status == 200, body
            assert model_tokenizer.decode(server.batcher.requests[-1].prompt) == expected
            _, body, _ = await server.post(COUNT, request_body)
            assert body == {"input_tokens": len(server.batcher.requests[-1].prompt)}
            status, _, _ = await server.post("/v1/chat/completions", {"messages": [*request_body["messages"]]})
            assert status == (200 if model_tokenizer is tokenizer else 400)

        serve(model_tokenizer, test)


def test_stop_sequence_that_ended_the_answer_is_returned(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        request_body = {**BODY, "stop_sequences": ["xy", " you", "o y"]}
        _, unstreamed, _ = await server.post(PATH, request_body)
        for body in (unstreamed, message_from_events(await server.named_events(PATH, request_body))):
            assert body["content"] == [{"type": "text", "text": "Hell"}]
            assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "o y")

    serve(tokenizer, test)


def test_stream_events_build_the_same_message_as_without_streaming(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        request_body = {**BODY, "tools": [F]}
        _, unstreamed, _ = await server.post(PATH, request_body)
        assert without_ids(unstreamed)["content"] == [
            {"type": "thinking", "thinking": "Hm?", "signature": "unsigned"},
            {"type": "text", "text": "Oh."},
            {"type": "tool_use", "name": "f", "input": {"x": 1}},
        ]
        assert unstreamed["stop_reason"] == "tool_use"
        assert without_ids(message_from_events(await server.named_events(PATH, request_body))) == without_ids(unstreamed)

    serve(tokenizer, test, generates=ANSWER, cached=2)


def test_truncated_tool_call_has_empty_input(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, body, _ = await server.post(PATH, {**BODY, "tools": [F], "max_tokens": len(ANSWER) - 20})
        assert without_ids(body)["content"][-1] == {"type": "tool_use", "name": "f", "input": {}}
        assert body["stop_reason"] == "max_tokens"

    serve(tokenizer, test, generates=ANSWER)


def test_content_blocks_become_chat_messages(tokenizer: Tokenizer) -> None:
    text = {"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [text]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "mm", "signature": "s"},
                {"type": "redacted_thinking", "data": "..."},
                {"type": "text", "text": "well"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
                {"type": "tool_use", "id": "2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "3"},
                {"type": "tool_result", "tool_use_id": "2", "content": [text], "is_error": True},
                {"type": "tool_result", "tool_use_id": "3"},
                text,
            ],
        },
        {"role": "assistant", "content": "thr"},
    ]

    async def test(server: Server) -> None:
        request_body = {
            "max_tokens": 9,
            "messages": messages,
            "system": [{"type": "text", "text": "be"}, {"type": "text", "text": "!"}],
        }
        status, body, _ = await server.post(PATH, request_body)
        assert status == 200, body
        prompt = tokenizer.decode(server.batcher.requests[-1].prompt)
        assert prompt == '[system]be![user]<q>[assistant]wellf{"x": 1}g{}~mm~[tool]3[tool]<q>[tool][user]<q>[assistant]thr'
        status, body, _ = await server.post(COUNT, {name: request_body[name] for name in ("messages", "system")})
        assert (status, body) == (200, {"input_tokens": len(server.batcher.requests[-1].prompt)})

    serve(tokenizer, test)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "[thinks: True, True]"),
        ({"thinking": {"type": "disabled"}}, "[thinks: False, False]"),
        ({"thinking": {"type": "adaptive"}}, ""),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": True}}, "[thinks: False, True]"),
        ({"output_config": {"effort": "low"}}, "[low]"),
    ],
)
def test_thinking_and_effort_reach_the_chat_template(tokenizer: Tokenizer, given: dict[str, Any], expected: str) -> None:
    async def test(server: Server) -> None:
        status, body, _ = await server.post(PATH, {**BODY, "max_tokens": 9, **given})
        assert status == 200, body
        assert tokenizer.decode(server.batcher.requests[-1].prompt) == f"[user]hi{expected}[a]"

    serve(tokenizer, test)


def test_tool_choice_and_output_format_become_grammars(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for choice, forced in (({"type": "auto"}, False), ({"type": "none"}, False), ({"type": "any"}, True)):
            await server.post(PATH, {**BODY, "tools": [F], "tool_choice": choice})
            assert (server.batcher.requests[-1].grammar is not None) == forced, choice
        await server.post(PATH, {**BODY, "tools": [F, {**F, "name": "g"}], "tool_choice": {"type": "tool", "name": "g"}})
        grammar = server.batcher.requests[-1].grammar
        assert grammar is not None
        assert '"g' in grammar.source
        assert '"f' not in grammar.source
        for given in ({"output_config": {"format": FORMAT}}, {"output_config": {"format": None}, "output_format": FORMAT}):
            await server.post(PATH, {**BODY, **given})
            grammar = server.batcher.requests[-1].grammar
            assert grammar is not None
            assert "answer: %json" in grammar.source  # after the reasoning

    serve(tokenizer, test)


def test_disable_parallel_tool_use_returns_one_tool_call(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for alone, calls in ((False, 2), (True, 1)):
            choice = {"type": "auto", "disable_parallel_tool_use": alone}
            _, body, _ = await server.post(PATH, {**BODY, "tools": [F], "tool_choice": choice})
            assert [block["type"] for block in body["content"]] == ["tool_use"] * calls

    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    serve(tokenizer, test, generates=f"{call}{call}</s>")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            "messages[0].content[0].source",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 3}]}]}, "messages[0].content[0].content"),
        ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].name"),
        ({"system": [{"text": 3}]}, "system[0].text"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop": ["x"]}, "stop_sequences"),
        ({"stop_sequences": ["a", "b", "c", "d", "e"]}, "stop_sequences"),
        ({"stop_sequences": ["x"], "min_tokens": 2}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name"),
        ({"tools": [F, {"name": "g", "input_schema": {"type": "string"}}]}, "tools[1].input_schema.type"),
        ({"tools": [F], "tool_choice": {"type": "tool"}}, "tool_choice.type"),
        ({"tools": [F], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 3}}}, "output_config.format.schema"),
        ({"output_config": {"format": FORMAT}, "min_tokens": 2}, "min_tokens"),
        ({"output_config": {"format": FORMAT}, "output_format": FORMAT}, "output_format"),
        ({"output_config": {"format": FORMAT}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "x"}}, "response_format.type"),
        ({"output_config": {"effort": 5}}, "output_config.effort"),
        ({"service_tier": "best"}, "service_tier"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
    ],
)
def test_invalid_field_is_a_400_that_names_it(tokenizer: Tokenizer, given: dict[str, Any], field: str) -> None:
    async def test(server: Server) -> None:
        for streaming in (False, True):
            status, body, _ = await server.post(PATH, {**BODY, **given, "stream": streaming})
            assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error"), body
            assert f"`{field}`" in body["error"]["message"]
            assert server.batcher.requests == []

    serve(tokenizer, test)


@pytest.mark.parametrize("tools", [{}, {"tools": []}])
def test_forced_choice_without_tools_is_refused_in_anthropics_words(tokenizer: Tokenizer, tools: dict[str, Any]) -> None:
    async def test(server: Server) -> None:
        status, body, _ = await server.post(PATH, {**BODY, **tools, "tool_choice": {"type": "any"}})
        assert (status, body["error"]["message"]) == (400, '`tool_choice` of type "any" needs `tools`')

    serve(tokenizer, test)


def test_refused_message_is_named_by_its_index_in_the_body(tmp_path: Path) -> None:
    """Its index in the chat differs: `system` comes first."""
    tokenizer = make_tokenizer(tmp_path, "{% for m in messages if m.role != 'tool' %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]}

    async def test(server: Server) -> None:
        status, body, _ = await server.post(PATH, {**BODY, "system": "s", "messages": [*BODY["messages"], result]})
        assert (status, body["error"]["param"]) == (400, "messages")
        assert body["error"]["message"].startswith('`messages[1].role` "tool"')

    serve(tokenizer, test)


def test_failures_have_anthropics_error_format(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        server.batcher.fails_with = Overloaded("full", retry_after=2.0)
        status, body, response = await server.post(PATH, BODY)
        assert (status, body["error"]["type"], response.headers["Retry-After"]) == (429, "rate_limit_error", "2")
        server.batcher.fails_with = None
        server.batcher.fails_after = (3, Broken("a shard died"))
        found = await server.named_events(PATH, BODY)
        assert found[-1]["type"] == "error"
        assert found[-1]["error"]["type"] == "api_error"
        assert "a shard died" in found[-1]["error"]["message"]

    serve(tokenizer, test)


def test_api_key_is_read_from_x_api_key_or_authorization(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for headers, expected in (({}, 401), ({"X-Api-Key": "x"}, 401), ({"X-Api-Key": "k"}, 200)):
            status, body, _ = await server.post(PATH, BODY, headers=headers)
            assert status == expected
            assert status == 200 or body["error"]["type"] == "authentication_error"
        status, _, _ = await server.post(PATH, BODY, headers={"X-Api-Key": "x", "Authorization": "Bearer k"})
        assert status == 200

    serve(tokenizer, test, settings={"api_keys": ("k",)})
