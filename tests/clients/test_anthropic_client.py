"""Anthropic's own client against a real server: messages whole and streamed, tools, formats, images that nobody sees, failures."""

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


def asked(extra: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """extra: fields of which this client knows nothing; some versions know of no temperature."""
    return {"model": "any", "max_tokens": 24, "messages": STORY, "extra_body": {"temperature": 0} | (extra or {}), **more}


def test_a_message_whole_and_streamed(client: Any) -> None:
    whole = client.messages.create(**asked())
    assert (whole.type, whole.role, whole.stop_reason) == ("message", "assistant", "max_tokens")
    assert whole.usage.output_tokens == 24
    with client.messages.stream(**asked()) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        streamed = stream.get_final_message()
    assert (streamed.content[0].text, streamed.stop_reason) == (whole.content[0].text, whole.stop_reason)
    usage = streamed.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert usage.output_tokens == 24
    counted = client.messages.count_tokens(model="any", messages=STORY)
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_stop_sequences_and_what_the_client_has_begun(client: Any) -> None:
    whole = client.messages.create(**asked())
    text = whole.content[0].text
    word = text.split()[4]
    found = client.messages.create(**asked(stop_sequences=["@@", word]))
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", word)
    assert found.content[0].text == text[: text.index(word)]
    begun = text[: text.index(word)].rstrip()
    found = client.messages.create(**asked(messages=[*STORY, {"role": "assistant", "content": begun}]))
    assert (begun + found.content[0].text).startswith(text[: len(begun) + 10])


def test_tools(client: Any) -> None:
    more = asked(tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=60)
    whole = client.messages.create(**more)
    [call] = [block for block in whole.content if block.type == "tool_use"]
    assert (whole.stop_reason, call.name) == ("tool_use", "weather")
    assert call.input["city"] in ("Paris", "Rome")
    with client.messages.stream(**more) as stream:
        [streamed] = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert streamed.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
    messages = [*STORY, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**asked(messages=messages, tools=[WEATHER])).usage.output_tokens > 0


def test_a_format(client: Any) -> None:
    format = {"type": "json_schema", "schema": SCHEMA}
    found = client.messages.create(**asked({"output_config": {"format": format}}))
    assert found.content[0].text.replace(" ", "") in ('{"city":"Paris"}', '{"city":"Rome"}')


def test_many_at_once_get_what_each_gets_alone(client: Any) -> None:
    def ask(seed: int) -> str:
        return str(client.messages.create(**asked({"temperature": 1.0, "seed": seed})).content[0].text)

    def note(seed: int) -> None:
        together[seed] = ask(seed)

    alone = {seed: ask(seed) for seed in range(6)}
    together: dict[int, str] = {}
    threads = [threading.Thread(target=note, args=(seed,)) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_failures_are_those_that_the_client_knows(client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"`max_tokens`"):
        client.messages.create(**asked(max_tokens=0))
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**asked(messages=[{"role": "user", "content": "many words " * 5000}]))
    with pytest.raises(anthropic.BadRequestError, match=r"`tools\[0\].type`"):
        client.messages.create(**asked(tools=[{"type": "web_search_20250305", "name": "web_search"}]))
    with pytest.raises(anthropic.NotFoundError):
        client.get("/v1/messages/batches", cast_to=object)
