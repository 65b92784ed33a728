"""Tools, reasoning and structured output on /v1/chat/completions: prompts, grammars for the shards, and parsed responses."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import tokenizers

from penstock.router.grammar import WHITESPACE
from penstock.router.parsing import format_grammar
from penstock.router.request import Grammar, Thinking
from penstock.router.template import Chat
from penstock.router.text import Tokenizer
from penstock.tests.router.fake_batcher import LIMITS, Server, make_tokenizer, serve

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 99}
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}({{ tool.function.name }}){% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.tool_calls %}{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}{% endif %}"
    "{% if m.reasoning_content %}~{{ m.reasoning_content }}~{% endif %}{% endfor %}"
    "{% if enable_thinking %}!{% endif %}{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
    "{% for document in documents or [] %}{{ document.text }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}{# <think> </think> #}"
)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": sorted(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters, "strict": True}}


F, G = tool("f", x={"type": "integer"}), tool("g")


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The template of a model with reasoning, whose tool calls are in Hermes' format."""
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)
    assert tokenizer.parsers == ("hermes", "deepseek_r1")
    return tokenizer


def last_prompt(tokenizer: Tokenizer, server: Server) -> str:
    return tokenizer.decode(server.batcher.requests[-1].prompt)


def message_from_chunks(chunks: list[Any], index: int = 0) -> tuple[dict[str, Any], str]:
    """A stream's message and finish reason, put together as OpenAI's client does."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    reason = None
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            assert reason is None
            reason = choice["finish_reason"]
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    for part in value:
                        if part["index"] == len(calls):
                            assert set(part) == {"index", "id", "type", "function"}
                            calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
                        else:
                            assert set(part) == {"index", "function"}
                            assert part["index"] == len(calls) - 1
                            calls[-1]["function"]["arguments"] += part["function"]["arguments"]
                else:
                    message[name] = message.get(name, "") + value
    assert reason is not None
    message["content"] = message["content"] or (None if calls else "")
    return message | ({"tool_calls": calls} if calls else {}), reason


def comparable(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without ids, which differ each time, and without `refusal`, which no delta has."""
    found = {name: value for name, value in message.items() if name != "refusal"}
    if "tool_calls" in found:
        assert len({one["id"] for one in found["tool_calls"]}) == len(found["tool_calls"])
        found["tool_calls"] = [one["function"] for one in found["tool_calls"]]
    return found


async def post_and_stream(server: Server, **given: Any) -> tuple[dict[str, Any], str]:
    """The message and its finish reason; asserts that they are the same with and without streaming."""
    _, body, _ = await server.post(PATH, {**CHAT, **given})
    choice = body["choices"][0]
    message, reason = message_from_chunks(await server.events(PATH, {**CHAT, **given, "stream": True}))
    assert comparable(message) == comparable(choice["message"])
    assert reason == choice["finish_reason"]
    return comparable(message), reason


def test_reasoning_content_and_tool_calls_are_parsed(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        message, reason = await post_and_stream(server, max_tokens=200, tools=[F, G])
        assert last_prompt(tokenizer, server) == "(f)(g)<tool_call>[user]hi[a]"
        assert message == {
            "role": "assistant",
            "content": "Well.",
            "reasoning_content": "so é",
            "tool_calls": [{"name": "f", "arguments": '{"x": 1}'}, {"name": "g", "arguments": "{}"}],
        }
        assert reason == "tool_calls"
        message, _ = await post_and_stream(server, max_tokens=200, tools=[F, G], parallel_tool_calls=False)
        assert message["tool_calls"] == [{"name": "f", "arguments": '{"x": 1}'}]
        message, _ = await post_and_stream(server, max_tokens=200, tools=[F, G], include_reasoning=False)
        assert "reasoning_content" not in message
        assert [request.grammar for request in server.batcher.requests] == [None] * 6

    generates = "<think>so é</think>Well." + call("f", '{"x": 1}') + call("g", "{}") + "</s>"
    serve(tokenizer, test, generates=generates, limits=replace(LIMITS, max_total_tokens=300))


@pytest.mark.parametrize(
    ("stop", "called", "reason"),
    [
        ('": 2', [{"name": "f", "arguments": '{"x": 1}'}, {"name": "f", "arguments": '{"x'}], "stop"),
        ("}}</", [{"name": "f", "arguments": '{"x": 1'}], "stop"),
        ("</tool", [{"name": "f", "arguments": '{"x": 1}'}], "tool_calls"),  # the call is complete
        ("Then", [{"name": "f", "arguments": '{"x": 1}'}], "tool_calls"),
        ("So", None, "stop"),
    ],
)
def test_finish_reason_is_stop_if_a_stop_string_cuts_a_tool_call(
    tokenizer: Tokenizer, stop: str, called: list[dict[str, str]] | None, reason: str
) -> None:
    async def test(server: Server) -> None:
        message, found = await post_and_stream(server, max_tokens=200, tools=[F, G], stop=[stop])
        assert (message.get("tool_calls"), found) == (called, reason)

    generates = "<think>x</think>So" + call("f", '{"x": 1}') + "Then" + call("f", '{"x": 2}') + "</s>"
    serve(tokenizer, test, generates=generates, limits=replace(LIMITS, max_total_tokens=300))


def test_finish_reason_ignores_a_cut_call_that_parallel_tool_calls_drops(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        message, reason = await post_and_stream(server, max_tokens=200, tools=[F], stop=['": 2'], parallel_tool_calls=False)
        assert (message["tool_calls"], reason) == ([{"name": "f", "arguments": '{"x": 1}'}], "tool_calls")

    generates = "<think>x</think>" + call("f", '{"x": 1}') + call("f", '{"x": 2}') + "</s>"
    serve(tokenizer, test, generates=generates, limits=replace(LIMITS, max_total_tokens=300))


def test_content_is_null_if_the_answer_has_only_tool_calls(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, body, _ = await server.post(PATH, {**CHAT, "tools": [F]})
        message = body["choices"][0]["message"]
        assert message["content"] is None
        assert message["tool_calls"][0]["id"].startswith("call_")
        assert message["tool_calls"][0]["type"] == "function"
        # Truncated within the call: the finish reason is the length.
        _, body, _ = await server.post(PATH, {**CHAT, "tools": [F], "max_tokens": 48})
        assert body["choices"][0]["finish_reason"] == "length"

    serve(tokenizer, test, generates=call("f", '{"x": 1}') + "</s>")


@pytest.mark.parametrize("cut", [2, 20, 30])
def test_required_tool_calls_have_no_content_after_them_when_truncated(tokenizer: Tokenizer, cut: int) -> None:
    """`max_tokens` ends the answer within the next call, before its name is complete."""
    first = call("f", '{"x": 1}')

    async def test(server: Server) -> None:
        message, reason = await post_and_stream(server, tools=[F, G], tool_choice="required", max_tokens=len(first) + cut)
        assert (message["content"], reason) == (None, "length")
        assert message["tool_calls"] == [{"name": "f", "arguments": '{"x": 1}'}]

    serve(tokenizer, test, generates=first + "\n" + call("g", "{}") + "</s>", limits=replace(LIMITS, max_total_tokens=300))


def test_arguments_with_a_lone_surrogate_are_accepted_in_the_history(tokenizer: Tokenizer) -> None:
    """A model may generate one, and clients send it back in the next turn."""

    async def test(server: Server) -> None:
        message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"city": "\\ud83d"}'}}]}
        status, body, _ = await server.post(PATH, {"messages": [*CHAT["messages"], message, {"role": "user", "content": "and?"}]})
        assert status == 200, body

    serve(tokenizer, test)


def test_tool_call_is_text_if_the_request_has_no_tools(tokenizer: Tokenizer) -> None:
    generates = call("f", "{}")

    async def test(server: Server) -> None:
        for given in ({}, {"tools": []}, {"tools": [F], "tool_choice": "none"}):
            message, reason = await post_and_stream(server, **given)
            assert message == {"role": "assistant", "content": generates}
            assert reason == "stop"
            assert last_prompt(tokenizer, server) == "[user]hi[a]"

    serve(tokenizer, test, generates=generates + "</s>")


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["f", "g"]),
        ({"type": "function", "function": {"name": "g"}}, ["g"]),
        ("g", ["g"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "f"}}]}}, ["f"]),
    ],
)
def test_required_or_named_tool_choice_is_enforced_by_a_grammar(tokenizer: Tokenizer, choice: Any, names: list[str]) -> None:
    async def test(server: Server) -> None:
        _, reason = await post_and_stream(server, tools=[F, G], tool_choice=choice)
        assert reason == "tool_calls"
        grammar = server.batcher.requests[-1].grammar
        assert grammar is not None
        assert grammar.kind == "lark"
        assert [name for name in ("f", "g") if f'"name\\": \\"{name}\\"' in grammar.source] == names

    serve(tokenizer, test, generates=call(names[0], "{}") + "</s>")


PARAMETERS_TYPE = "tools[0].function.parameters.type"


@pytest.mark.parametrize(
    ("given", "parameter", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", ""),
        ({"tools": ["f"]}, "tools[0].type", ""),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "`tools[0].function` must be an object"),
        ({"tools": [F, {"type": "function", "function": {}}]}, "tools[1].function.name", ""),
        *(({"tools": [tool(name)]}, "tools[0].function.name", "") for name in ("", "a<b>", "my tool", 'a"b', "f()", "n" * 129)),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters", ""),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, PARAMETERS_TYPE, ""),
        ({"tools": [F, F]}, "tools", "two `tools` have the same name: f"),
        ({"tool_choice": "required"}, "tool_choice", '`tool_choice`: "required" needs `tools`'),
        ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice", ""),
        ({"tools": [F], "tool_choice": {"x": 1}}, "tool_choice", ""),
        ({"tools": [F], "guided_grammar": 'start: "a"'}, "tools", ""),
        ({"tools": [tool("f", x={"type": "string", "pattern": "("})], "tool_choice": "required"}, "tools", ""),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, "response_format", ""),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "response_format.json_schema.schema", ""),
        ({"guided_regex": "("}, "guided_regex", ""),
        ({"guided_json": "{"}, "guided_json", ""),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", ""),
        ({"structured_outputs": {}}, "structured_outputs", ""),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", ""),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", ""),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " " * 70_000}},
            "structured_outputs.whitespace_pattern",
            "`structured_outputs.whitespace_pattern` must have at most 65536 characters",
        ),
        (
            {"structured_outputs": {"json": {"x-guidance": {"whitespace_pattern": " "}}, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            "`structured_outputs.disable_any_whitespace` contradicts the schema's own `x-guidance`: leave one of them out",
        ),
        (
            {"structured_outputs": {"json": {"x-guidance": {"whitespace_flexible": False}}, "whitespace_pattern": " ?"}},
            "structured_outputs.whitespace_pattern",
            "`structured_outputs.whitespace_pattern` contradicts the schema's own `x-guidance`: leave one of them out",
        ),
        ({"structured_outputs": {"json": {"x-guidance": 3}, "whitespace_pattern": ""}}, "structured_outputs", ""),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens", ""),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages", "`messages[0].tool_calls` must be a list"),
        ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages", ""),
    ],
)
def test_invalid_tools_and_formats_are_a_400_that_names_the_parameter(
    tokenizer: Tokenizer, given: dict[str, Any], parameter: str, message: str
) -> None:
    async def test(server: Server) -> None:
        status, body, _ = await server.post(PATH, {**CHAT, **given})
        assert (status, body["error"]["param"]) == (400, parameter), body
        assert not message or body["error"]["message"] == message
        assert f"`{parameter}" in body["error"]["message"]
        assert server.batcher.requests == []

    serve(tokenizer, test)


CONST = Grammar("json_schema", '{"const":1}')
RULE = Grammar("lark", 'start: T0\nT0: "a"')  # what EBNF is translated to


def const_with_whitespace(pattern: str) -> Grammar:
    """CONST with another pattern for white space."""
    return Grammar("json_schema", f'{{"const":1,"x-guidance":{{"whitespace_pattern":"{pattern}"}}}}')


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_schema", '{"type":"object"}')),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"const": "é"}}}},
            Grammar("json_schema", '{"const":"é"}'),
        ),
        ({"response_format": {"type": "json", "value": {"const": 1}}}, Grammar("json_schema", '{"const":1}')),
        ({"response_format": {"type": "json_schema", "value": {"name": "n", "schema": {"const": 1}}}}, CONST),
        ({"response_format": {"type": "json_schema", "value": {"const": 1}}}, CONST),
        ({"response_format": {"type": "regex", "value": "a+"}}, Grammar("regex", "a+")),
        ({"guided_json": {"const": 1}}, Grammar("json_schema", '{"const":1}')),
        ({"guided_json": '{"const":1}'}, Grammar("json_schema", '{"const":1}')),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, Grammar("choice", '["a", "b"]')),
        ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"json_schema": '{"const":1}'}, CONST),
        ({"structured_outputs": {"json": {"const": 1}}}, Grammar("json_schema", '{"const":1}')),
        ({"structured_outputs": {"json_object": True, "regex": None}}, Grammar("json_schema", '{"type":"object"}')),
        ({"structured_outputs": {"json": {"const": 1}, "whitespace_pattern": " ?"}}, const_with_whitespace(" ?")),
        (
            {"structured_outputs": {"json": '{"const":1}', "disable_any_whitespace": True, "whitespace_pattern": None}},
            const_with_whitespace(""),
        ),
        (
            {"structured_outputs": {"json": {"const": 1, "x-guidance": {"lenient": True}}, "whitespace_pattern": " ?"}},
            Grammar("json_schema", '{"const":1,"x-guidance":{"lenient":true,"whitespace_pattern":" ?"}}'),
        ),
        ({"structured_outputs": {"json": {"const": 1}, "disable_any_whitespace": False}}, CONST),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar("choice", '["a"]')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, RULE),
        ({"guided_grammar": '# a rule\n root\n  ::= "a"'}, RULE),
        ({"ebnf": 'root ::= "a"'}, RULE),
    ],
)
def test_response_formats_and_guided_parameters_become_grammars(
    tokenizer: Tokenizer, given: dict[str, Any], grammar: Grammar | None
) -> None:
    async def test(server: Server) -> None:
        for path, body in ((PATH, CHAT), ("/v1/completions", {"prompt": "hi"})):
            status, answer, _ = await server.post(path, {**body, **given})
            assert status == 200, answer
            expected = grammar
            if (
                path == PATH and grammar is not None
            ):  # in chats, reasoning may come before an answer with a format, but for a grammar of the request's own
                expected = format_grammar(grammar, "deepseek_r1", special=tokenizer.added_id) or grammar
                assert (expected == grammar) == (grammar.kind in ("lark", "ebnf"))
            assert server.batcher.requests[-1].grammar == expected

    serve(tokenizer, test)


@pytest.mark.parametrize("tools_fields", [{}, {"tools": [F]}])
def test_reasoning_before_structured_output_is_separated(tokenizer: Tokenizer, tools_fields: dict[str, Any]) -> None:
    async def test(server: Server) -> None:
        for given in ({"response_format": {"type": "json_object"}}, {"guided_choice": ["{}", '{"a": "<think>"}']}):
            message, _ = await post_and_stream(server, **given, **tools_fields)
            assert message == {"role": "assistant", "content": '{"a": "<think>"}', "reasoning_content": "Hm?"}

    serve(tokenizer, test, generates='<think>Hm?</think>\n\n{"a": "<think>"}</s>')


def test_think_tag_within_structured_output_is_content(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        message, _ = await post_and_stream(server, response_format={"type": "json_object"})
        assert message == {"role": "assistant", "content": '{"a": "<think>"}'}
        message, _ = await post_and_stream(server, guided_grammar='start: "{"')  # such a grammar covers all tokens of the answer
        assert message == {"role": "assistant", "content": '{"a": "<think>"}'}

    serve(tokenizer, test, generates='{"a": "<think>"}</s>')


@pytest.fixture(scope="module", params=[TEMPLATE, TEMPLATE + "<think>\n"])
def token_marked_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Reasoning begins and ends with single tokens; with the second template the prompt begins it."""
    folder = tmp_path_factory.mktemp("thinker")
    make_tokenizer(folder, request.param)
    with_tokens = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    with_tokens.add_tokens(["<think>", "</think>"])
    with_tokens.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def test_thinking_token_budget_reaches_the_batcher(token_marked_tokenizer: Tokenizer) -> None:
    in_prompt = prompt_of(token_marked_tokenizer).endswith("<think>")
    start_id, end_id = token_marked_tokenizer.added_id("<think>"), token_marked_tokenizer.added_id("</think>")

    async def test(server: Server) -> None:
        for budget in (0, 7):
            status, body, _ = await server.post(PATH, {**CHAT, "thinking_token_budget": budget, "tools": [F]})
            assert status == 200, body
            assert server.batcher.requests[-1].thinking == Thinking(budget, end_id, None if in_prompt else start_id)
        await server.post(PATH, CHAT)
        assert server.batcher.requests[-1].thinking is None
        for budget in (-1, 2**40):
            status, body, _ = await server.post(PATH, {**CHAT, "thinking_token_budget": budget})
            assert (status, body["error"]["param"]) == (400, "thinking_token_budget")
        status, body, _ = await server.post(PATH, {**CHAT, "thinking_token_budget": 7, "num_beams": 2})
        assert (status, body["error"]["param"]) == (400, "thinking_token_budget")
        request_body = {**CHAT, "model": "m", "thinking": {"type": "enabled", "budget_tokens": 9}}
        await server.post("/v1/messages", request_body)
        assert server.batcher.requests[-1].thinking == Thinking(9, end_id, None if in_prompt else start_id)
        await server.post("/v1/messages", {**request_body, "thinking": {"type": "disabled", "budget_tokens": 9}})
        assert server.batcher.requests[-1].thinking is None
        status, body, _ = await server.post("/v1/messages", {**request_body, "thinking": {"type": "enabled", "budget_tokens": "9"}})
        assert (status, "`thinking.budget_tokens`" in body["error"]["message"]) == (400, True)

    serve(token_marked_tokenizer, test)


def prompt_of(tokenizer: Tokenizer) -> str:
    """A chat's prompt; its end is compared."""
    return asyncio.run(tokenizer.chat_prompt(Chat(messages=[{"role": "user", "content": "hi"}], add_generation_prompt=True), None))


def test_thinking_budget_needs_a_single_end_token(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, body, _ = await server.post(PATH, {**CHAT, "thinking_token_budget": 7})
        assert (status, body["error"]["param"]) == (400, "thinking_token_budget")
        thinking = {"type": "enabled", "budget_tokens": 9}
        status, body, _ = await server.post("/v1/messages", {**CHAT, "model": "m", "thinking": thinking})
        assert status == 200, body  # Anthropic's clients send a budget to every model
        assert server.batcher.requests[-1].thinking is None

    serve(tokenizer, test)


def test_tools_with_a_response_format_allow_a_call_or_the_format(tokenizer: Tokenizer) -> None:
    given = {"tools": [F], "response_format": {"type": "json_object"}}

    async def test(server: Server) -> None:
        message, reason = await post_and_stream(server, **given)
        assert (message["content"], reason) == ('{"a": 1}', "stop")
        server.batcher.generates = call("f", '{"x": 1}') + "</s>"
        message, reason = await post_and_stream(server, **given)
        assert (message["tool_calls"], reason) == ([{"name": "f", "arguments": '{"x": 1}'}], "tool_calls")
        grammar = server.batcher.requests[-1].grammar
        assert grammar is not None
        answer, start = grammar.source.splitlines()[-2:]
        assert json.loads(answer.removeprefix("answer: %json ")) == {
            "type": "object",
            "x-guidance": {"whitespace_pattern": WHITESPACE},  # as without tools
        }
        assert start.startswith('start: ("<think>" ')
        assert start.endswith(" | answer)")

    serve(tokenizer, test, generates='{"a": 1}</s>')


def test_reasoning_content_is_separated_and_its_tokens_are_counted(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        message, _ = await post_and_stream(server)
        assert message == {"role": "assistant", "content": "No.", "reasoning_content": "Hm?"}
        _, body, _ = await server.post(PATH, CHAT)
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3 + len("</think>")}
        request_body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True}
        *chunks, last, _ = await server.events(PATH, request_body)
        assert last["usage"]["completion_tokens_details"] == body["usage"]["completion_tokens_details"]
        # One chunk for each token with its log-probability, though most have no text.
        logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks[1:-1]]
        assert "".join(one["content"][0]["token"] for one in logprobs) == "<think>Hm?</think>No.</s>"

    serve(tokenizer, test, generates="<think>Hm?</think>No.</s>")


@pytest.mark.parametrize(
    ("last", "reasoning", "content"),
    [
        ("<think>\nI should", " add.", "4"),
        ([{"type": "text", "text": "<think>\nI should"}], " add.", "4"),
        ([{"type": "refusal", "refusal": "<think>\nI should", "text": 5}], " add.", "4"),
        ("<think>\nI add.</think>It is", None, " add.</think>4"),
        ("It is <think>", None, " add.</think>4"),
    ],
)
def test_reasoning_of_a_continued_assistant_message_goes_on(
    tokenizer: Tokenizer, last: Any, reasoning: str | None, content: str
) -> None:
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": last}]

    async def test(server: Server) -> None:
        message, _ = await post_and_stream(server, messages=messages, max_tokens=30)
        assert message.get("reasoning_content") == reasoning
        assert message["content"] == content

    serve(tokenizer, test, generates=" add.</think>4</s>")


def test_each_choice_is_parsed_separately(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        chunks = await server.events(PATH, {**CHAT, "n": 2, "stream": True})
        assert [message_from_chunks(chunks, index)[0]["content"] for index in range(2)] == ["No.", "1<think>Hm?</think>No."]

    serve(tokenizer, test, generates="<think>Hm?</think>No.</s>")


def test_messages_and_template_arguments_are_normalized_for_the_chat_template(tokenizer: Tokenizer) -> None:
    function = {"name": "f", "arguments": '{"x": 1}'}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "!"}]},
        {"role": "user", "content": "q", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "assistant", "content": "three", "reasoning_content": "mm", "tool_calls": None, "refusal": None},
        {"role": "user", "content": "w"},
    ]

    async def test(server: Server) -> None:
        await server.post(PATH, {"messages": messages, "max_tokens": 9})
        assert last_prompt(tokenizer, server) == '[system]be![user]q[assistant]{"x": 1}[tool]3[assistant]three~mm~[user]w[a]'
        extra = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low", "documents": [{"text": "d"}]}
        await server.post(PATH, {**CHAT, **extra})
        assert last_prompt(tokenizer, server) == "[user]hi!lowd[a]"
        status, body, _ = await server.post(PATH, {**CHAT, "chat_template": "{{ 1 }}"})
        assert (status, body["error"]["param"]) == (400, "chat_template")

    serve(tokenizer, test)
