"""/v1/messages: messages of blocks to a chat, an answer to blocks, and the events in which these grow."""

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
ASKED: dict[str, Any] = {"max_tokens": 99, "messages": [{"role": "user", "content": "hi"}]}
F = {"name": "f", "description": "Does.", "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
SAYS = '<think>Hm?</think>Oh.<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call></s>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of a model that thinks, and calls as Hermes does."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


def grown(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together."""
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


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """Without ids, which differ each time."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {name: value for name, value in message.items() if name != "id"} | {"content": content}


def test_a_text(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, body, response = await server.post(PATH, {**ASKED, "model": "m", "system": "be", "metadata": {"user_id": "u"}})
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
        _, body, _ = await server.post(PATH, {**ASKED, "max_tokens": 3})
        assert (body["content"], body["stop_reason"]) == ([{"type": "text", "text": "Hel"}], "max_tokens")

    serve(tokenizer, test, cached=4)


@pytest.mark.parametrize(
    ("most", "reason"),
    [(64_000, "model_context_window_exceeded"), (None, "model_context_window_exceeded"), (117, "max_tokens")],
)
def test_more_tokens_than_fit_may_be_asked_for(tokenizer: Tokenizer, most: int | None, reason: str) -> None:
    """As Claude Code does."""

    async def test(server: Server) -> None:
        asked = {**ASKED, "max_tokens": most}
        _, whole, _ = await server.post(PATH, asked)
        for body in (whole, grown(await server.named_events(PATH, asked))):
            assert len(server.batcher.requests[-1].prompt) + 117 == 128
            assert (body["usage"]["output_tokens"], body["stop_reason"]) == (117, reason)

    serve(tokenizer, test, says="x" * 200)


def test_a_prompt_that_is_too_long_is_told_in_words_that_clients_look_for(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for count, said in ((95, "104"), (100_000, "at least 25003")):
            _, body, _ = await server.post(PATH, {**ASKED, "messages": [{"role": "user", "content": "x" * count}]})
            assert body["error"]["message"] == f"prompt is too long: {said} tokens > 100 maximum"
            assert (body["error"]["type"], body["error"]["param"]) == ("invalid_request_error", "messages")

    serve(tokenizer, test)


def test_what_claude_code_tells_only_anthropic_is_no_part_of_the_prompt(tokenizer: Tokenizer) -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.84c; cc_entrypoint=cli; cch=fa690;"}

    async def test(server: Server) -> None:
        for system, said in (([billing, {"type": "text", "text": "be"}], "[system]be"), ([billing], "")):
            await server.post(PATH, {**ASKED, "system": system})
            assert tokenizer.decode(server.batcher.requests[-1].prompt) == f"{said}[user]hi[a]"

    serve(tokenizer, test)


def test_what_a_search_among_tools_has_found_is_named(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        found = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "f"}]}
        tools = [{**F, "defer_loading": True}]
        status, body, _ = await server.post(PATH, {**ASKED, "messages": [{"role": "user", "content": [found]}], "tools": tools})
        assert status == 200, body
        assert tokenizer.decode(server.batcher.requests[-1].prompt) == "[tool]<Found the tool f.\n>[a]"

    serve(tokenizer, test)


def test_a_system_message_in_the_middle_stays_where_it_is(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Or joins the one before it, where the model's template has no place for it. OpenAI's are the template's affair."""
    strict = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first!') }}{% endif %}"
    strict = make_tokenizer(tmp_path, strict + "[{{ m.role }}]{{ m.content }}{% endfor %}")
    asked = {"max_tokens": 9, "system": "be", "messages": [*ASKED["messages"], {"role": "system", "content": "so"}]}
    reminder = "\n\n<system-reminder>\nso\n</system-reminder>"
    for own, said in ((tokenizer, "[system]be[user]hi[system]so[a]"), (strict, f"[system]be[user]hi{reminder}")):

        async def test(server: Server, own: Tokenizer = own, said: str = said) -> None:
            status, body, _ = await server.post(PATH, asked)
            assert status == 200, body
            assert own.decode(server.batcher.requests[-1].prompt) == said
            _, body, _ = await server.post(COUNT, asked)
            assert body == {"input_tokens": len(server.batcher.requests[-1].prompt)}
            status, _, _ = await server.post("/v1/chat/completions", {"messages": [*asked["messages"]]})
            assert status == (200 if own is tokenizer else 400)

        serve(own, test)


def test_a_stop_sequence_is_named(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        asked = {**ASKED, "stop_sequences": ["xy", " you", "o y"]}
        _, whole, _ = await server.post(PATH, asked)
        for body in (whole, grown(await server.named_events(PATH, asked))):
            assert body["content"] == [{"type": "text", "text": "Hell"}]
            assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "o y")

    serve(tokenizer, test)


def test_a_stream_grows_into_the_same(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        asked = {**ASKED, "tools": [F]}
        _, whole, _ = await server.post(PATH, asked)
        assert plain(whole)["content"] == [
            {"type": "thinking", "thinking": "Hm?", "signature": "unsigned"},
            {"type": "text", "text": "Oh."},
            {"type": "tool_use", "name": "f", "input": {"x": 1}},
        ]
        assert whole["stop_reason"] == "tool_use"
        assert plain(grown(await server.named_events(PATH, asked))) == plain(whole)

    serve(tokenizer, test, says=SAYS, cached=2)


def test_a_call_that_was_cut_off_has_no_arguments(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, body, _ = await server.post(PATH, {**ASKED, "tools": [F], "max_tokens": len(SAYS) - 20})
        assert plain(body)["content"][-1] == {"type": "tool_use", "name": "f", "input": {}}
        assert body["stop_reason"] == "max_tokens"

    serve(tokenizer, test, says=SAYS)


def test_blocks_become_messages(tokenizer: Tokenizer) -> None:
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
        asked = {"max_tokens": 9, "messages": messages, "system": [{"type": "text", "text": "be"}, {"type": "text", "text": "!"}]}
        status, body, _ = await server.post(PATH, asked)
        assert status == 200, body
        prompt = tokenizer.decode(server.batcher.requests[-1].prompt)
        assert prompt == '[system]be![user]<q>[assistant]wellf{"x": 1}g{}~mm~[tool]3[tool]<q>[tool][user]<q>[assistant]thr'
        status, body, _ = await server.post(COUNT, {name: asked[name] for name in ("messages", "system")})
        assert (status, body) == (200, {"input_tokens": len(server.batcher.requests[-1].prompt)})

    serve(tokenizer, test)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "[thinks: True, True]"),
        ({"thinking": {"type": "disabled"}}, "[thinks: False, False]"),
        ({"thinking": {"type": "adaptive"}}, ""),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": True}}, "[thinks: False, True]"),
        ({"output_config": {"effort": "low"}}, "[low]"),
    ],
)
def test_what_the_template_is_told(tokenizer: Tokenizer, given: dict[str, Any], said: str) -> None:
    async def test(server: Server) -> None:
        status, body, _ = await server.post(PATH, {**ASKED, "max_tokens": 9, **given})
        assert status == 200, body
        assert tokenizer.decode(server.batcher.requests[-1].prompt) == f"[user]hi{said}[a]"

    serve(tokenizer, test)


def test_choices_of_tools_and_formats(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for choice, forced in (({"type": "auto"}, False), ({"type": "none"}, False), ({"type": "any"}, True)):
            await server.post(PATH, {**ASKED, "tools": [F], "tool_choice": choice})
            assert (server.batcher.requests[-1].grammar is not None) == forced, choice
        await server.post(PATH, {**ASKED, "tools": [F, {**F, "name": "g"}], "tool_choice": {"type": "tool", "name": "g"}})
        grammar = server.batcher.requests[-1].grammar
        assert grammar is not None
        assert '"g' in grammar.source
        assert '"f' not in grammar.source
        format = {"type": "json_schema", "schema": {"type": "object", "properties": {"n": {"type": "integer"}}}}
        for given in ({"output_config": {"format": format}}, {"output_format": format}):
            await server.post(PATH, {**ASKED, **given})
            grammar = server.batcher.requests[-1].grammar
            assert grammar is not None
            assert "answer: %json" in grammar.source  # behind what the model thinks

    serve(tokenizer, test)


def test_tools_may_be_used_one_at_a_time(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for alone, calls in ((False, 2), (True, 1)):
            choice = {"type": "auto", "disable_parallel_tool_use": alone}
            _, body, _ = await server.post(PATH, {**ASKED, "tools": [F], "tool_choice": choice})
            assert [block["type"] for block in body["content"]] == ["tool_use"] * calls

    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    serve(tokenizer, test, says=f"{call}{call}</s>")


@pytest.mark.parametrize(
    ("given", "named"),
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
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].tool_calls[0].function"),
        (
            {"system": "s", "messages": [ASKED["messages"][0], {"role": "assistant", "content": [{"type": "tool_use"}]}]},
            "messages[1].tool_calls[0].function",
        ),
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
        ({"output_config": {"effort": 5}}, "output_config.effort"),
        ({"service_tier": "best"}, "service_tier"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
    ],
)
def test_what_is_refused_is_named(tokenizer: Tokenizer, given: dict[str, Any], named: str) -> None:
    async def test(server: Server) -> None:
        for streaming in (False, True):
            status, body, _ = await server.post(PATH, {**ASKED, **given, "stream": streaming})
            assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error"), body
            assert f"`{named}`" in body["error"]["message"]
            assert server.batcher.requests == []

    serve(tokenizer, test)


def test_failures_are_told_in_their_shape(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        server.batcher.refuses = Overloaded("full", retry_after=2.0)
        status, body, response = await server.post(PATH, ASKED)
        assert (status, body["error"]["type"], response.headers["Retry-After"]) == (429, "rate_limit_error", "2")
        server.batcher.refuses = None
        server.batcher.breaks = (3, Broken("a shard died"))
        found = await server.named_events(PATH, ASKED)
        assert found[-1]["type"] == "error"
        assert found[-1]["error"]["type"] == "api_error"
        assert "a shard died" in found[-1]["error"]["message"]

    serve(tokenizer, test)


def test_a_key_comes_in_their_header(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for headers, expected in (({}, 401), ({"X-Api-Key": "x"}, 401), ({"X-Api-Key": "k"}, 200)):
            status, body, _ = await server.post(PATH, ASKED, headers=headers)
            assert status == expected
            assert status == 200 or body["error"]["type"] == "authentication_error"
        status, _, _ = await server.post(PATH, ASKED, headers={"X-Api-Key": "x", "Authorization": "Bearer k"})
        assert status == 200

    serve(tokenizer, test, settings={"api_keys": ("k",)})
