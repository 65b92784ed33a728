"""OpenAI's own client against a real server: every feature of /v1, whole and streamed, and its errors."""

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any, get_args

import openai
import pydantic
import pytest

from penstock.tests.serving import Server, serve

STORY: list[Any] = [{"role": "user", "content": "Tell me a story."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}}
TIME: Any = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}, "required": []}}}


class City(pydantic.BaseModel):
    name: str = pydantic.Field(pattern="^[A-Z][a-z]{1,9}$")
    large: bool


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=30) as client:
        yield client


def test_models_are_listed_and_unknown_ones_are_not_found(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert client.models.retrieve(model.id) == model
    assert model.model_dump()["max_model_len"] == 2048
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no/such")


def test_seeded_chat_is_the_same_whole_repeated_and_streamed(client: openai.OpenAI) -> None:
    parameters: Any = {"model": "any", "messages": STORY, "max_tokens": 12, "temperature": 0.8, "seed": 7}
    whole = client.chat.completions.create(**parameters)
    again = client.chat.completions.create(**parameters)
    [choice] = whole.choices
    assert choice.message.content == again.choices[0].message.content
    assert (choice.finish_reason, choice.message.role) == ("length", "assistant")
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    chunks = list(client.chat.completions.create(**parameters, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 13 + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert whole.usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    with client.chat.completions.stream(**parameters) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text == choice.message.content
        with pytest.raises(openai.LengthFinishReasonError):
            stream.get_final_completion()


def test_usage_reports_cached_prompt_tokens(client: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": "Tell me a story of a cat, a dog, a bird, a fish and a king who lived by the sea."}]
    found = []
    for _ in range(2):
        usage = client.chat.completions.create(model="any", messages=long, max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        found.append(usage.prompt_tokens_details.cached_tokens)
    assert found[0] == 0
    assert found[1] is not None
    assert found[1] >= 16


def test_chat_accepts_all_sampling_parameters_and_returns_n_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="any",
        messages=STORY,
        n=3,
        max_completion_tokens=8,
        temperature=1.5,
        top_p=0.9,
        presence_penalty=0,
        frequency_penalty=0.5,
        logit_bias={"5": -100},
        stop=["zzz", "qqq"],
        seed=-3,
        user="me",
        extra_body={"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 0},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24


def test_stop_string_ends_the_text(client: openai.OpenAI) -> None:
    parameters: Any = {"model": "any", "messages": STORY, "temperature": 0, "max_tokens": 30}
    text = client.chat.completions.create(**parameters).choices[0].message.content
    assert text is not None
    stop = text[10:14]
    choice = client.chat.completions.create(**parameters, stop=stop).choices[0]
    assert (choice.message.content, choice.finish_reason) == (text[: text.index(stop)], "stop")


def test_chat_logprobs_agree_whole_and_streamed(client: openai.OpenAI) -> None:
    parameters: Any = {"model": "any", "messages": STORY, "temperature": 0, "max_tokens": 5, "logprobs": True, "top_logprobs": 20}
    choice = client.chat.completions.create(**parameters).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 20
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob)
    streamed = [
        entry
        for chunk in client.chat.completions.create(**parameters, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in choice.logprobs.content]


def test_completions_of_several_prompts_with_n_and_best_of_agree_whole_and_streamed(client: openai.OpenAI) -> None:
    parameters: Any = {"model": "any", "prompt": ["Once upon a time", "The cat"], "max_tokens": 6, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**parameters, n=2, best_of=3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[0].text == whole.choices[1].text
    texts = ["", ""]
    for chunk in client.completions.create(**parameters, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [whole.choices[0].text, whole.choices[2].text]
    assert client.completions.create(model="any", prompt="Once", seed=1).usage.completion_tokens == 16  # type: ignore[union-attr]


def test_echo_returns_the_logprobs_of_the_generated_tokens(client: openai.OpenAI) -> None:
    parameters: Any = {"model": "any", "prompt": "Once upon a time", "temperature": 0, "logprobs": 1}
    generated = client.completions.create(**parameters, max_tokens=6).choices[0]
    echo = client.completions.create(
        **(parameters | {"prompt": "Once upon a time" + generated.text}), max_tokens=0, echo=True
    ).choices[0]
    assert echo.text == "Once upon a time" + generated.text
    assert generated.logprobs is not None
    assert echo.logprobs is not None
    assert echo.logprobs.tokens is not None
    assert echo.logprobs.tokens[-6:] == generated.logprobs.tokens
    assert echo.logprobs.token_logprobs is not None
    assert generated.logprobs.token_logprobs is not None
    assert echo.logprobs.token_logprobs[-6:] == pytest.approx(generated.logprobs.token_logprobs, abs=1e-3)
    assert echo.logprobs.text_offset is not None
    assert echo.logprobs.top_logprobs is not None
    for index, token in list(enumerate(echo.logprobs.tokens))[-6:]:
        start = echo.logprobs.text_offset[index]
        assert echo.text[start : start + len(token)] == token
        assert (
            max(echo.logprobs.top_logprobs[index].values()) == echo.logprobs.token_logprobs[index]
        )  # the tokens were generated greedily


def test_structured_output_formats_are_kept(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model="any", messages=STORY, response_format=City, max_tokens=60)
    city = parsed.choices[0].message.parsed
    assert isinstance(city, City)
    answer = client.chat.completions.create(
        model="any",
        messages=STORY,
        max_tokens=60,
        n=3,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
    )
    for choice in answer.choices:
        found = json.loads(choice.message.content or "")
        assert found["city"] in ("Paris", "Rome")
        assert 1 <= found["days"] <= 9
    guided = client.completions.create(model="any", prompt="x", extra_body={"guided_choice": ["yes", "no"]})
    assert guided.choices[0].text in ("yes", "no")
    assert guided.choices[0].finish_reason == "stop"
    guided = client.completions.create(model="any", prompt="x", extra_body={"structured_outputs": {"regex": "[0-9]{4}-x"}})
    assert guided.choices[0].text[4:] == "-x"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_required_and_forced_tool_calls_are_the_same_whole_and_streamed(client: openai.OpenAI, choice: Any) -> None:
    parameters: Any = {
        "model": "any",
        "messages": STORY,
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 90,
        "seed": 3,
    }
    answer = client.chat.completions.create(**parameters).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    assert answer.message.tool_calls is not None
    [call] = answer.message.tool_calls
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    assert (call.function.name, set(arguments)) == ("weather", {"city", "days"})
    with client.chat.completions.stream(**parameters) as stream:
        stream.until_done()
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == arguments
    messages = [
        *STORY,
        answer.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    next_answer = client.chat.completions.create(
        model="any", messages=messages, tools=[WEATHER, TIME], max_tokens=5, extra_body={"ignore_eos": True}
    )
    assert next_answer.usage is not None
    assert next_answer.usage.completion_tokens == 5


def test_responses_api_text_tools_and_parsing(client: openai.OpenAI) -> None:
    parameters: Any = {"model": "any", "input": "Tell me a story.", "max_output_tokens": 9, "temperature": 0}
    whole = client.responses.create(**parameters)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    assert whole.usage is not None
    assert whole.usage.output_tokens == 9
    deltas = [
        event.delta for event in client.responses.create(**parameters, stream=True) if event.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == whole.output_text
    flat: Any = {"type": "function", "strict": True, **WEATHER["function"]}
    forced: Any = {"type": "function", "name": "weather"}
    parameters = {"model": "any", "input": "Weather?", "tools": [flat], "tool_choice": forced}
    with client.responses.stream(**parameters) as stream:
        stream.until_done()
        [call] = stream.get_final_response().output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"city", "days"}
    turn: Any = [
        {"role": "user", "content": "Weather?"},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    assert client.responses.create(model="any", input=turn, max_output_tokens=3, temperature=0).usage.output_tokens == 3  # type: ignore[union-attr]
    parsed = client.responses.parse(model="any", input="A city.", text_format=City).output_parsed
    assert isinstance(parsed, City)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="any", input="x", previous_response_id="resp_1")


@pytest.mark.parametrize("more", [{}, {"tools": [{"type": "function", **WEATHER["function"]}], "tool_choice": "required"}])
def test_responses_and_their_events_validate_against_the_clients_types(client: openai.OpenAI, more: Any) -> None:
    """The client doesn't validate what it receives: a missing field would only fail when it is read."""
    parameters = {"input": "Hi", "max_output_tokens": 60, "include": ["message.output_text.logprobs"], "top_logprobs": 2, **more}
    whole = client.responses.with_raw_response.create(model="any", **parameters)
    openai.types.responses.Response.model_validate_json(whole.text)
    union, _ = get_args(openai.types.responses.ResponseStreamEvent)
    types = {kind: each for each in get_args(union) for kind in get_args(each.model_fields["type"].annotation)}
    with client.responses.with_streaming_response.create(model="any", stream=True, **parameters) as stream:
        events = [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line.startswith("data: {")]
    assert len(events) > 10
    for event in events:
        types[event["type"]].model_validate(event)


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_requests_raise_bad_request_errors_that_name_the_parameter(client: openai.OpenAI, streaming: bool) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"messages": []}, "messages"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ]
    for invalid, parameter in cases:
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(**({"model": "any", "messages": STORY} | invalid), stream=streaming)
        assert raised.value.param == parameter
        assert raised.value.status_code == 400
        assert raised.value.type == "invalid_request_error"


def test_ignored_fields_and_request_id_are_returned_in_headers(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response
    response = raw.create(model="any", messages=STORY, max_tokens=1, extra_body={"zzz": 1}, extra_headers={"X-Request-ID": "r-1"})
    assert response.headers["x-ignored-fields"] == "zzz"
    assert response.headers["x-request-id"] == "r-1"
    assert response.parse().choices


def test_request_that_times_out_is_cancelled_on_the_server(server: Server, client: openai.OpenAI) -> None:
    long_request: Any = {"model": "any", "messages": STORY, "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3, max_retries=0).chat.completions.create(**long_request)
    _wait_until_idle(server)
    with pytest.raises(openai.InternalServerError) as raised:
        client.chat.completions.create(**(long_request | {"extra_body": {"ignore_eos": True, "timeout": 0.2}}))
    assert raised.value.status_code == 504
    assert raised.value.response.headers["x-should-retry"] == "false"


def test_closing_a_stream_cancels_the_request_on_the_server(server: Server, client: openai.OpenAI) -> None:
    long_request: Any = {"model": "any", "messages": STORY, "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(**long_request, stream=True) as stream:
        for _, _ in zip(range(5), stream, strict=False):
            pass
    _wait_until_idle(server)


def test_concurrent_requests_beyond_the_limit_are_retried_and_cancelled_ones_freed(server: Server) -> None:
    """The client retries requests that the full server refuses, until they are answered."""

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=8) as client:

            async def generate(count: int) -> str | None:
                answer = await client.chat.completions.create(model="any", messages=STORY, max_tokens=count, temperature=0)
                return answer.choices[0].message.content

            answers = await asyncio.gather(*(generate(6) for _ in range(24)))
            assert len(set(answers)) == 1
            tasks = [asyncio.create_task(generate(1900)) for _ in range(8)]
            await asyncio.sleep(0.2)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert await generate(6) == answers[0]

    asyncio.run(run())
    _wait_until_idle(server)


def test_wrong_api_key_raises_an_authentication_error() -> None:
    parameters: Any = {"model": "any", "messages": STORY, "max_tokens": 1}
    with (
        serve("--api-key", "right") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client,
    ):
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(**parameters)
        assert client.with_options(api_key="right").chat.completions.create(**parameters).choices


def _wait_until_idle(server: Server) -> None:
    """Returns when no request is running."""
    deadline = time.monotonic() + 10
    while True:
        with urllib.request.urlopen(f"{server.url}/metrics") as response:
            lines = response.read().decode().splitlines()
        [size] = [line.split()[1] for line in lines if line.startswith("tgi_batch_current_size ")]
        if float(size) == 0:
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)
