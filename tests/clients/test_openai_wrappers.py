"""LangChain's and LiteLLM's classes for OpenAI against a real server with the demo model.

Heavy to install, so skipped where they are missing; PENSTOCK_TEST_URL names a server that runs elsewhere.
"""

import json
import os
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise importing it waits for the network
SCHEMA = {
    "title": "place",
    "description": "A place.",
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "place", "description": "A place.", "parameters": SCHEMA}}
pytestmark = pytest.mark.filterwarnings("default")  # the libraries warn about each other


@pytest.fixture
def api(url: str) -> str:
    return f"{url}/v1"


def test_langchain_chat_streams_batches_structured_output_and_tools(api: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(model="any", base_url=api, api_key="none", max_tokens=40, temperature=0)
    whole = chat.invoke("Tell me a story.")
    assert whole.usage_metadata["output_tokens"] == 40
    assert "".join(part.content for part in chat.stream("Tell me a story.")) == whole.content
    assert chat.batch(["Tell me a story."] * 3)[2].content == whole.content
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(SCHEMA, method=method).invoke("Where?")
        assert found["city"] in ("Paris", "Rome")
    called = chat.bind_tools([TOOL], tool_choice="place").invoke("Where?")
    [call] = called.tool_calls
    assert call["args"]["city"] in ("Paris", "Rome")
    messages: list[Any] = ["Where?", called, {"role": "tool", "tool_call_id": call["id"], "content": "there"}]
    assert chat.bind_tools([TOOL]).invoke(messages).response_metadata["finish_reason"] in ("stop", "length")
    with pytest.raises(Exception, match="max_completion_tokens"):
        chat.invoke("x", max_tokens=100_000)


def test_langchain_responses_api_is_the_same_whole_and_streamed(api: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(model="any", base_url=api, api_key="none", use_responses_api=True, temperature=0, max_tokens=9)
    whole = chat.invoke("Tell me a story.")
    assert whole.text
    parts = [part.text for part in chat.stream("Tell me a story.")]
    assert "".join(parts) == whole.text


def test_langchain_completion_is_the_same_whole_streamed_and_batched(api: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    text = langchain.OpenAI(model="any", base_url=api, api_key="none", max_tokens=8, temperature=0)
    whole = text.invoke("Once upon a time")
    assert whole
    assert "".join(text.stream("Once upon a time")) == whole
    answers = text.generate(["Once upon a time", "The cat"]).generations
    assert answers[0][0].text == whole


def completion_arguments(api: str, provider: str, count: int) -> dict[str, Any]:
    """Arguments of LiteLLM's completion for a chat."""
    return {
        "model": f"{provider}/any",
        "api_base": api,
        "api_key": "none",
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "temperature": 0,
        "max_tokens": count,
    }


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_chat_streams_structured_output_and_errors(api: str, provider: str) -> None:
    litellm = pytest.importorskip("litellm")
    whole = litellm.completion(**completion_arguments(api, provider, 8)).choices[0].message.content
    parts = [
        chunk.choices[0].delta.content or "" for chunk in litellm.completion(**completion_arguments(api, provider, 8), stream=True)
    ]
    assert "".join(parts) == whole
    format = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": SCHEMA}}
    answer = litellm.completion(**completion_arguments(api, provider, 40), response_format=format)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**completion_arguments(api, provider, 100_000))


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_tool_call_is_returned(api: str, provider: str) -> None:
    litellm = pytest.importorskip("litellm")
    pytest.importorskip("mcp")  # LiteLLM imports it if there are tools
    more: Any = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    [choice] = litellm.completion(**completion_arguments(api, provider, 40), **more).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.name == "place"
