"""OpenAI's /v1/responses: input items become a chat, answers become output items and stream events, refusals and failures."""

from typing import Any

import pytest

from penstock.router.request import Broken
from penstock.router.text import Tokenizer
from penstock.tests.router.fake_batcher import Server, make_tokenizer, serve

PATH = "/v1/responses"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.tool_calls %}{% for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% endif %}{% if m.reasoning_content %}~{{ m.reasoning_content }}~{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}{# tools <tool_call> <think> </think> #}"
)
F = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The template of a model with reasoning, whose tool calls are in Hermes' format."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


async def events(server: Server, body: Any) -> list[dict[str, Any]]:
    """All events of a stream; asserts that they are numbered in order."""
    found = await server.named_events(PATH, body)
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    return found


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without ids, which differ each time."""
    assert len({item["id"] for item in items}) == len(items)
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def test_text_answer_has_openais_fields(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, body, response = await server.post(PATH, {"input": "hi", "model": "m", "metadata": {"a": "b"}})
        assert status == 200
        assert body["id"].startswith("resp_")
        assert (body["object"], body["status"], body["model"]) == ("response", "completed", "m")
        assert (body["metadata"], body["store"], body["error"], body["incomplete_details"]) == ({"a": "b"}, False, None, None)
        content = [{"type": "output_text", "text": "Hello you", "annotations": [], "logprobs": []}]
        message = {"type": "message", "status": "completed", "role": "assistant", "content": content}
        assert without_ids(body["output"]) == [message]
        (request,) = server.batcher.requests
        assert tokenizer.decode(request.prompt) == "[user]hi[a]"
        assert body["usage"] == {
            "input_tokens": len(request.prompt),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 10,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(request.prompt) + 10,
        }
        assert response.headers["x-generated-tokens"] == "10"
        _, body, _ = await server.post(PATH, {"input": "hi", "max_output_tokens": 3, "instructions": "be"})
        assert tokenizer.decode(server.batcher.requests[-1].prompt) == "[system]be[user]hi[a]"
        assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert body["output"][0]["status"] == "incomplete"

    serve(tokenizer, test)


@pytest.mark.parametrize(("stop", "status"), [('": 1', "incomplete"), ("</tool", "completed")])
def test_tool_call_cut_by_a_stop_string_is_incomplete(tokenizer: Tokenizer, stop: str, status: str) -> None:
    async def test(server: Server) -> None:
        request_body = {"input": "hi", "tools": [F], "max_output_tokens": 99, "stop": [stop]}
        _, unstreamed, _ = await server.post(PATH, request_body)
        for body in (unstreamed, (await events(server, request_body))[-1]["response"]):
            assert body["output"][-1]["type"] == "function_call"
            assert (body["status"], body["output"][-1]["status"]) == ("completed", status)

    serve(tokenizer, test, generates='<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call></s>')


def test_stream_events_build_the_same_response_as_without_streaming(tokenizer: Tokenizer) -> None:
    generates = '<think>Hm?</think>Oh.<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call></s>'

    async def test(server: Server) -> None:
        request_body = {"input": "hi", "tools": [F], "max_output_tokens": 99}
        _, unstreamed, _ = await server.post(PATH, request_body)
        found = await events(server, request_body)
        kinds = [event["type"].removeprefix("response.") for event in found]
        assert kinds[:2] == ["created", "in_progress"]
        assert kinds[-1] == "completed"
        assert list(dict.fromkeys(kinds[2:-1])) == [
            *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"),
            *("output_item.done", "output_text.delta", "output_text.done"),
            *("function_call_arguments.delta", "function_call_arguments.done"),
        ]
        last = found[-1]["response"]
        assert without_ids(last["output"]) == without_ids(unstreamed["output"])
        assert [item["type"] for item in last["output"]] == ["reasoning", "message", "function_call"]
        assert last["usage"] == unstreamed["usage"]
        assert last["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
        assert done == last["output"]
        added = [event["item"]["id"] for event in found if event["type"] == "response.output_item.added"]
        assert added == [item["id"] for item in last["output"]]
        for index, kind in enumerate(("reasoning_text", "output_text", "function_call_arguments")):
            deltas = [event for event in found if event["type"] == f"response.{kind}.delta"]
            assert {(event["output_index"], event["item_id"]) for event in deltas} == {(index, added[index])}
            text = "".join(event["delta"] for event in deltas)
            item = last["output"][index]
            assert text == (item["arguments"] if kind == "function_call_arguments" else item["content"][0]["text"])
        assert last["output"][2]["arguments"] == '{"x": 1}'
        assert last["output"][2]["name"] == "f"

    serve(tokenizer, test, generates=generates)


def test_logprobs_are_in_the_part_and_in_the_delta_of_their_text(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        request_body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 2}
        _, body, _ = await server.post(PATH, request_body)
        logprobs = body["output"][0]["content"][0]["logprobs"]
        assert [one["token"] for one in logprobs] == ["H", "e"]
        assert [len(one["top_logprobs"]) for one in logprobs] == [2, 2]
        deltas = [event for event in await events(server, request_body) if event["type"] == "response.output_text.delta"]
        assert [event["logprobs"] for event in deltas] == [[one] for one in logprobs]

    serve(tokenizer, test)


def test_logprobs_of_tokens_without_text_come_with_the_next_delta(tokenizer: Tokenizer) -> None:
    """Tokens within a character have no text, and a possible stop string is held back."""

    async def test(server: Server) -> None:
        request_body = {"input": "hi", "include": ["message.output_text.logprobs"], "stop": ["axx"]}
        found = await events(server, request_body)
        [part] = found[-1]["response"]["output"][0]["content"]
        assert part["text"] == "日本é ax"
        assert sum(len(one["bytes"]) for one in part["logprobs"]) == len("日本é ax".encode())
        deltas = [event for event in found if event["type"] == "response.output_text.delta"]
        assert [one for event in deltas for one in event["logprobs"]] == part["logprobs"]

    serve(tokenizer, test, generates="日本é ax</s>")


def test_input_items_become_chat_messages(tokenizer: Tokenizer) -> None:
    items = [
        {"type": None, "role": "developer", "content": "be"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "mm"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "3"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "three", "annotations": []}]},
    ]

    async def test(server: Server) -> None:
        status, body, _ = await server.post(PATH, {"input": items})
        assert status == 200, body
        prompt = tokenizer.decode(server.batcher.requests[-1].prompt)
        assert prompt == '[system]be[user]q[assistant]f{"x": 1}g{}~mm~[tool]3[assistant]three[a]'

    serve(tokenizer, test)


def test_reasoning_item_belongs_to_the_message_directly_after_it(tokenizer: Tokenizer) -> None:
    """Not to a later answer if its own was cut off. Several reasoning items before a message all belong to it."""

    def reasoning(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}

    def message(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": text}

    items = [message("user", "q"), reasoning("cut"), message("user", "go on"), message("assistant", "one"), message("user", "r")]
    items += [reasoning("m"), reasoning("n"), message("assistant", "two")]

    async def test(server: Server) -> None:
        status, body, _ = await server.post(PATH, {"input": items})
        assert status == 200, body
        prompt = tokenizer.decode(server.batcher.requests[-1].prompt)
        assert prompt == "[user]q[user]go on[assistant]one[user]r[assistant]two~mn~[a]"

    serve(tokenizer, test)


def test_text_format_and_tool_choice_become_grammars(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        format = {"type": "json_schema", "name": "n", "strict": True, "schema": {"const": 1}}
        _, body, _ = await server.post(PATH, {"input": "hi", "text": {"format": format}})
        grammar = server.batcher.requests[-1].grammar
        assert grammar is not None
        assert '"const":1' in grammar.source.splitlines()[-2]  # after the reasoning
        assert body["text"] == {"format": format}
        for choice in ("required", {"type": "function", "name": "f"}):
            await server.post(PATH, {"input": "hi", "tools": [F], "tool_choice": choice})
            grammar = server.batcher.requests[-1].grammar
            assert grammar is not None
            assert grammar.kind == "lark"

    serve(tokenizer, test)


def test_refused_item_is_named_by_its_index_in_the_input(tokenizer: Tokenizer) -> None:
    """Its index among the chat's messages differs: instructions come first, and adjacent items are merged."""

    async def test(server: Server) -> None:
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        items = [{"role": "assistant", "content": "a"}, call, {"role": "user", "content": [{"type": "input_file"}]}]
        status, body, _ = await server.post(PATH, {"instructions": "i", "input": items})
        assert (status, body["error"]["param"]) == (400, "input")
        assert body["error"]["message"].startswith("`input[2].content` has a part")
        for item, field in (({**call, "name": None}, "name"), ({"type": "function_call_output", "output": 5}, "output")):
            _, body, _ = await server.post(PATH, {"input": [items[0], item]})
            assert body["error"]["message"].startswith(f"`input[1].{field}` must be a string")
        for kind, shown in (("item_reference", '"item_reference"'), (False, "false")):
            _, body, _ = await server.post(PATH, {"input": [*items[:2], {"type": kind}]})
            assert body["error"]["message"] == f"`input[2].type` {shown} is not supported"

    serve(tokenizer, test)


@pytest.mark.parametrize(
    ("given", "parameter"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [F, {"type": "function", "name": "a b"}]}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "string"}}]}, "tools[0].parameters.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": 3}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1000}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": 3}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": 3}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "min_tokens": 2}, "min_tokens"),
        ({"text": {"format": {"type": "text"}}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "x"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "response_format.json_schema.schema"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_invalid_parameter_is_a_400_that_names_it(tokenizer: Tokenizer, given: dict[str, Any], parameter: str) -> None:
    async def test(server: Server) -> None:
        for streaming in (False, True):
            status, body, _ = await server.post(PATH, {"input": "hi", **given, "stream": streaming})
            assert (status, body["error"]["param"]) == (400, parameter), body
            assert f"`{parameter}`" in body["error"]["message"] or not parameter.startswith("tools")
            assert server.batcher.requests == []

    serve(tokenizer, test)


def test_neutral_and_null_parameters_are_accepted(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        neutral = {"store": False, "background": False, "truncation": "disabled", "include": ["reasoning.encrypted_content"]}
        nulls = dict.fromkeys(("instructions", "previous_response_id", "conversation", "text", "reasoning", "tools", "metadata"))
        status, body, response = await server.post(PATH, {"input": "hi", **neutral, **nulls, "user": "me", "zzz": 1})
        assert status == 200, body
        assert response.headers["x-ignored-fields"] == "zzz"
        for text, told in (({"verbosity": "low", "x": 1}, "text.verbosity, text.x"), ({"verbosity": "medium"}, None)):
            status, _, response = await server.post(PATH, {"input": "hi", "text": text})
            assert (status, response.headers.get("x-ignored-fields")) == (200, told)

    serve(tokenizer, test)


def test_failure_during_a_stream_is_its_last_event(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        *before, last = await events(server, {"input": "hi"})
        assert last["type"] == "response.failed"
        text = "".join(event["delta"] for event in before if event["type"] == "response.output_text.delta")
        [message] = last["response"]["output"]
        assert (message["status"], message["content"][0]["text"]) == ("incomplete", text)
        assert text
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"] == {"code": "server_error", "message": "Request failed during generation: gone"}
        server.batcher.fails_after = (0, Broken("gone"))
        status, body, _ = await server.post(PATH, {"input": "hi", "stream": True})
        assert (status, body["error"]["code"]) == (500, "generation")

    serve(tokenizer, test, fails_after=(3, Broken("gone")))
