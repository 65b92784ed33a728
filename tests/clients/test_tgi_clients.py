"""Real clients of TGI's API against a real server with the demo model: text-generation, huggingface_hub and LangChain parse its
responses, and raise their own exceptions for its errors.

In another environment than penstock's own (`text-generation` needs a huggingface_hub that transformers no longer supports),
PENSTOCK_TEST_URL names a running server, and --confcutdir=tests/clients keeps pytest from loading tests/conftest.py.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("default")  # the clients' own warnings

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"]}
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def full_server_url() -> Iterator[str]:
    """A server with one concurrent request at most: full while a test's stream runs."""
    serving = pytest.importorskip("penstock.tests.serving")
    with serving.serve("--max-concurrent-requests", "1") as server:
        yield server.url


# text-generation, the client of TGI's own repository


def test_text_generation_parses_details_and_prefill(url: str) -> None:
    client = pytest.importorskip("text_generation").Client(url, timeout=60)
    answer = client.generate(PROMPT, max_new_tokens=3, decoder_input_details=True, top_n_tokens=2)
    assert answer.generated_text
    details = answer.details
    assert (details.finish_reason.value, details.generated_tokens, details.seed) == ("length", 3, None)
    assert len(details.tokens) == len(details.top_tokens) == 3
    assert details.prefill[0].logprob is None
    assert all(token.logprob <= 0 for token in details.prefill[1:])
    assert [token.text for token in details.tokens] == [top[0].text for top in details.top_tokens]
    whole = client.generate(PROMPT, max_new_tokens=3, return_full_text=True)
    assert whole.generated_text == PROMPT + answer.generated_text
    assert client.generate("zzz " * 50 + PROMPT, max_new_tokens=1, truncate=4, decoder_input_details=True).details.prefill


def test_text_generation_parses_best_of_sequences(url: str) -> None:
    client = pytest.importorskip("text_generation").Client(url, timeout=60)
    details = client.generate(PROMPT, max_new_tokens=4, best_of=2, do_sample=True).details
    [other] = details.best_of_sequences
    assert details.seed is not None
    assert other.seed is not None
    assert other.generated_tokens == len(other.tokens)


def test_text_generation_stream_equals_the_whole_answer(url: str) -> None:
    client = pytest.importorskip("text_generation").Client(url, timeout=60)
    whole = client.generate(PROMPT, max_new_tokens=8)
    events = list(client.generate_stream(PROMPT, max_new_tokens=8))
    assert [event.token.id for event in events] == [token.id for token in whole.details.tokens]
    assert [event.generated_text for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].generated_text == whole.generated_text
    assert events[-1].details.generated_tokens == len(events)
    seeded = [client.generate(PROMPT, max_new_tokens=8, do_sample=True, seed=seed).generated_text for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]


def test_text_generation_stop_sequence_ends_the_text(url: str) -> None:
    client = pytest.importorskip("text_generation").Client(url, timeout=60)
    text = client.generate(PROMPT, max_new_tokens=20).generated_text
    word = text.split()[3]
    answer = client.generate(PROMPT, max_new_tokens=20, stop_sequences=[word])
    assert answer.details.finish_reason.value == "stop_sequence"
    assert answer.generated_text.endswith(word)
    assert text.startswith(answer.generated_text)


def test_text_generation_regex_and_json_grammars_are_kept(url: str) -> None:
    package = pytest.importorskip("text_generation")
    client, types = package.Client(url, timeout=60), package.types
    regex = types.Grammar(type=types.GrammarType.Regex, value="[0-9]{3}-[0-9]{4}")
    assert re.fullmatch(r"\d{3}-\d{4}", client.generate(PROMPT, max_new_tokens=20, grammar=regex).generated_text)
    schema = types.Grammar(type=types.GrammarType.Json, value=SCHEMA)
    found = json.loads(client.generate(PROMPT, max_new_tokens=200, grammar=schema, do_sample=True, seed=3).generated_text)
    assert isinstance(found["name"], str)
    assert isinstance(found["age"], int)


def test_text_generation_raises_validation_errors(url: str) -> None:
    package = pytest.importorskip("text_generation")
    client, errors = package.Client(url, timeout=60), package.errors
    with pytest.raises(errors.ValidationError, match="must be <= 2048"):
        client.generate(PROMPT, max_new_tokens=10_000)
    with pytest.raises(errors.ValidationError, match="`watermark` is not supported"):
        client.generate(PROMPT, watermark=True)
    with pytest.raises(errors.ValidationError, match="must be <= 2048"):
        list(client.generate_stream(PROMPT, max_new_tokens=10_000))


def test_text_generation_chat_is_answered(url: str) -> None:
    package = pytest.importorskip("text_generation")
    messages = [package.types.Message(role="user", content="Tell me a story.")]
    answer = package.Client(url, timeout=60).chat(messages, max_tokens=6)
    assert answer.choices[0].message.content
    assert answer.usage["completion_tokens"] <= 6


def test_text_generation_async_client_generates_streams_and_raises(url: str) -> None:
    package = pytest.importorskip("text_generation")

    async def work() -> None:
        client = package.AsyncClient(url, timeout=60)
        answer = await client.generate(PROMPT, max_new_tokens=1, decoder_input_details=True)
        assert answer.details.generated_tokens == 1
        events = [event async for event in client.generate_stream(PROMPT, max_new_tokens=4)]
        assert len(events) == 4
        for call in (client.generate(PROMPT, max_new_tokens=10_000), anext(client.generate_stream(PROMPT, max_new_tokens=10_000))):
            with pytest.raises(package.errors.ValidationError):
                await call

    asyncio.run(work())


# huggingface_hub


def inference_client(url: str, **options: Any) -> Any:
    return pytest.importorskip("huggingface_hub").InferenceClient(model=url, timeout=60, **options)


def test_huggingface_hub_client_parses_details_and_all_parameters(url: str) -> None:
    client = inference_client(url)
    text = client.text_generation(PROMPT, max_new_tokens=8, return_full_text=False)
    assert text
    assert client.text_generation(PROMPT, max_new_tokens=8) == PROMPT + text, "the default of TGI's route /"
    answer = client.text_generation(PROMPT, max_new_tokens=8, details=True, decoder_input_details=True, top_n_tokens=2)
    assert answer.generated_text == PROMPT + text
    assert answer.details.finish_reason == "length"
    assert answer.details.generated_tokens == len(answer.details.tokens) == len(answer.details.top_tokens)
    assert answer.details.prefill[0].logprob is None
    several = client.text_generation(PROMPT, max_new_tokens=8, details=True, best_of=2, do_sample=True, seed=1, temperature=0.9)
    assert len(several.details.best_of_sequences) == 1
    everything = {"top_k": 10, "top_p": 0.9, "typical_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.1, "truncate": 3}
    assert client.text_generation(PROMPT, max_new_tokens=8, seed=1, **everything) == client.text_generation(
        PROMPT, max_new_tokens=8, seed=1, **everything
    )


def test_huggingface_hub_client_stream_equals_the_whole_answer(url: str) -> None:
    client = inference_client(url)
    whole = client.text_generation(PROMPT, max_new_tokens=8)
    assert PROMPT + "".join(client.text_generation(PROMPT, max_new_tokens=8, stream=True)) == whole
    events = list(client.text_generation(PROMPT, max_new_tokens=8, stream=True, details=True))
    assert [event.index for event in events] == list(range(1, 9))
    assert events[-1].details.input_length > 0
    assert events[-1].generated_text == whole


def test_huggingface_hub_client_grammars_are_kept(url: str) -> None:
    client = inference_client(url)
    sampled = {"temperature": 0.9, "seed": 5, "return_full_text": False}
    for grammar in ({"type": "json", "value": SCHEMA}, {"type": "json_schema", "value": {"name": "person", "schema": SCHEMA}}):
        text = client.text_generation(PROMPT, max_new_tokens=200, grammar=grammar, **sampled)
        assert isinstance(json.loads(text)["age"], int)
    regex = {"type": "regex", "value": "[a-c]{5}"}
    *_, last = client.text_generation(PROMPT, max_new_tokens=9, grammar=regex, stream=True, details=True, return_full_text=False)
    assert re.fullmatch("[a-c]{5}", last.generated_text)
    assert last.details.finish_reason == "eos_token"


def test_huggingface_hub_client_raises_validation_and_overloaded_errors(url: str, full_server_url: str) -> None:
    errors = pytest.importorskip("huggingface_hub.errors")
    client = inference_client(url)
    for stream in (False, True):
        with pytest.raises(errors.ValidationError, match="must be <= 2048"):
            list(client.text_generation(PROMPT, max_new_tokens=10_000, stream=stream))
    client = inference_client(full_server_url)
    running = client.text_generation(PROMPT, max_new_tokens=1500, stream=True)
    assert next(running)
    for stream in (False, True):
        with pytest.raises(errors.OverloadedError, match="overloaded"):
            list(client.text_generation(PROMPT, max_new_tokens=2, stream=stream))
    running.close()


def test_huggingface_hub_client_chat_is_the_same_whole_and_streamed(url: str) -> None:
    client = inference_client(url)
    messages = [{"role": "user", "content": "Tell me a story."}]
    answer = client.chat_completion(messages, max_tokens=8, seed=1, temperature=0.7, logprobs=True, top_logprobs=2)
    text = answer.choices[0].message.content
    assert text
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
    chunks = list(client.chat_completion(messages, max_tokens=8, seed=1, temperature=0.7, stream=True))
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == text


def test_huggingface_hub_client_reads_health_and_endpoint_info(url: str) -> None:
    client = inference_client(url, provider="hf-inference")  # the client refuses the request without a provider
    assert client.health_check()
    assert client.get_endpoint_info()["max_total_tokens"] == 2048


def test_huggingface_hub_async_client_stream_equals_the_whole_answer(url: str) -> None:
    client = pytest.importorskip("huggingface_hub").AsyncInferenceClient(model=url, timeout=60)

    async def work() -> None:
        whole = await client.text_generation(PROMPT, max_new_tokens=8)
        parts = [part async for part in await client.text_generation(PROMPT, max_new_tokens=8, stream=True)]
        assert PROMPT + "".join(parts) == whole
        await client.close()

    asyncio.run(work())


# langchain


def test_langchain_endpoint_invokes_streams_and_stops(url: str) -> None:
    package = pytest.importorskip("langchain_huggingface")
    endpoint = package.HuggingFaceEndpoint(endpoint_url=url, max_new_tokens=8, seed=1, huggingfacehub_api_token="none")
    text = endpoint.invoke(PROMPT)
    assert text
    assert not text.startswith(PROMPT)
    assert "".join(endpoint.stream(PROMPT)) == text
    word = text.split()[1]
    assert endpoint.invoke(PROMPT, stop=[word]) == text[: text.index(word)]

    async def work() -> None:
        assert await endpoint.ainvoke(PROMPT)
        await endpoint.async_client.close()

    asyncio.run(work())


def test_langchain_chat_is_answered_and_streamed(url: str) -> None:
    package = pytest.importorskip("langchain_huggingface")
    endpoint = package.HuggingFaceEndpoint(endpoint_url=url, max_new_tokens=8, seed=1, huggingfacehub_api_token="none")
    chat = package.ChatHuggingFace(llm=endpoint, model_id="none", tokenizer=object())
    assert chat.invoke("Tell me a story.").content
    assert "".join(str(chunk.content) for chunk in chat.stream("Tell me a story."))
