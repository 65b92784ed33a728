"""Anthropic's own client against a real server: messages whole and streamed, stop sequences, tools, output formats, errors."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.tests.serving import Server

anthropic = pytest.importorskip("anthropic")

STORY: list[Any] = [{"role": "user", "content": "Tell me a story."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=30, max_retries=0) as client:
        yield client


def parameters(extra: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Arguments of messages.create. `extra` are fields that this client lacks; some versions lack temperature."""
    return {"model": "any", "max_tokens": 24, "messages": STORY, "extra_body": {"temperature": 0} | (extra or {}), **more}


def test_message_text_usage_and_token_count_agree_whole_and_streamed(client: Any) -> None:
    whole = client.messages.create(**parameters())
    assert (whole.type, whole.role, whole.stop_reason) == ("message", "assistant", "max_tokens")
    assert whole.usage.output_tokens == 24
    with client.messages.stream(**parameters()) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        streamed = stream.get_final_message()
    assert (streamed.content[0].text, streamed.stop_reason) == (whole.content[0].text, whole.stop_reason)
    usage = streamed.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert usage.output_tokens == 24
    counted = client.messages.count_tokens(model="any", messages=STORY)
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_stop_sequences_and_prefilled_assistant_messages(client: Any) -> None:
    whole = client.messages.create(**parameters())
    text = whole.content[0].text
    word = text.split()[4]
    found = client.messages.create(**parameters(stop_sequences=["@@", word]))
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", word)
    assert found.content[0].text == text[: text.index(word)]
    prefill = text[: text.index(word)].rstrip()
    found = client.messages.create(**parameters(messages=[*STORY, {"role": "assistant", "content": prefill}]))
    assert (prefill + found.content[0].text).startswith(text[: len(prefill) + 10])


def test_forced_tool_call_is_the_same_whole_and_streamed(client: Any) -> None:
    more = parameters(tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=60)
    whole = client.messages.create(**more)
    [call] = [block for block in whole.content if block.type == "tool_use"]
    assert (whole.stop_reason, call.name) == ("tool_use", "weather")
    assert call.input["city"] in ("Paris", "Rome")
    with client.messages.stream(**more) as stream:
        [streamed] = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert streamed.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
    messages = [*STORY, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**parameters(messages=messages, tools=[WEATHER])).usage.output_tokens > 0


def test_json_schema_output_format_is_kept(client: Any) -> None:
    format = {"type": "json_schema", "schema": SCHEMA}
    found = client.messages.create(**parameters({"output_config": {"format": format}}))
    assert found.content[0].text.replace(" ", "") in ('{"city":"Paris"}', '{"city":"Rome"}')


def test_concurrent_seeded_messages_equal_each_alone(client: Any) -> None:
    def generate(seed: int) -> str:
        return str(client.messages.create(**parameters({"temperature": 1.0, "seed": seed})).content[0].text)

    def generate_in_thread(seed: int) -> None:
        concurrent[seed] = generate(seed)

    alone = {seed: generate(seed) for seed in range(6)}
    concurrent: dict[int, str] = {}
    threads = [threading.Thread(target=generate_in_thread, args=(seed,)) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert concurrent == alone


def test_errors_raise_the_clients_own_exceptions(client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"`max_tokens`"):
        client.messages.create(**parameters(max_tokens=0))
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**parameters(messages=[{"role": "user", "content": "many words " * 5000}]))
    with pytest.raises(anthropic.BadRequestError, match=r"`tools\[0\].type`"):
        client.messages.create(**parameters(tools=[{"type": "web_search_20250305", "name": "web_search"}]))
    with pytest.raises(anthropic.NotFoundError):
        client.get("/v1/messages/batches", cast_to=object)
