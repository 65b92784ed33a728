"""OpenAI's chat and completion routes over real HTTP with a fake batcher: responses, stream chunks, parameters, errors."""

import asyncio
import contextlib
import json
from typing import Any

import pytest

from penstock.router.request import Alternative, Broken, Expired, Overloaded, Sampling
from penstock.router.text import Tokenizer
from penstock.tests.router.fake_batcher import Server, make_tokenizer, serve, until

TOO_MANY = "`prompt` tokens + `max_tokens` must be <= 128."
FORMATS = '`response_format.type` must be one of "text", "json_object", "json_schema". Given: '
CHAT_PATH = "/v1/chat/completions"
PATH = "/v1/completions"
CHAT = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "any", "prompt": "hi"}
CHAT_AND_COMPLETION = pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (PATH, COMPLETION)])


def usage(prompt: int, completion: int) -> dict[str, Any]:
    total = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return total | {"prompt_tokens_details": {"cached_tokens": 0}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_chat_response_has_openais_fields(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, body, response = await server.post(CHAT_PATH, CHAT)
        assert status == 200
        assert list(body) == ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"]
        assert body["id"].startswith("chatcmpl-")
        assert (body["object"], body["model"]) == ("chat.completion", "any")
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello you", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        (request,) = server.batcher.requests
        assert request.prompt == tuple(tokenizer.encode("[user]hi[assistant]", False))
        assert body["usage"] == usage(len(request.prompt), 10)
        assert request.max_new_tokens == 128 - len(request.prompt)
        assert request.sampling.temperature == 1.0
        assert not request.sampling.final_logprobs
        assert not request.include_stop
        assert response.headers["x-generated-tokens"] == "10"

    serve(tokenizer, test)


def test_chat_stream_has_a_role_chunk_one_chunk_per_token_and_a_finish_chunk(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        chunks = await server.events(CHAT_PATH, {**CHAT, "stream": True})
        assert chunks.pop() == "[DONE]"
        assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert all("usage" not in chunk for chunk in chunks)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert deltas[1:] == [*({"content": letter} for letter in "Hello you"), {"content": ""}, {}]  # one for each token
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 11 + ["stop"]

    serve(tokenizer, test)


def test_completion_response_has_openais_fields_and_16_default_max_tokens(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, body, _ = await server.post(PATH, COMPLETION)
        assert status == 200
        assert body["id"].startswith("cmpl-")
        assert body["object"] == "text_completion"
        assert body["choices"] == [{"index": 0, "text": "Hello you", "logprobs": None, "finish_reason": "stop"}]
        assert body["usage"] == usage(3, 10)
        assert server.batcher.requests[0].max_new_tokens == 16  # OpenAI's default
        _, body, _ = await server.post(PATH, {"prompt": "hi", "max_tokens": 4})
        assert (body["model"], body["choices"][0]["finish_reason"]) == ("some/model", "length")

    serve(tokenizer, test)


def test_completion_stream_reports_usage_at_the_end_or_in_every_chunk(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        body = {**COMPLETION, "max_tokens": 3, "stream": True}
        chunks = await server.events(PATH, {**body, "stream_options": {"include_usage": True}})
        assert chunks.pop() == "[DONE]"
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"] == usage(3, 3)
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["H", "e", "l", ""]
        assert [chunk["usage"] for chunk in chunks] == [None] * 4
        assert last["metrics"]["queue_time_ms"] == 250  # vLLM's, which its load generator reads
        assert last["metrics"]["time_to_first_token_ms"] > 0
        assert last["metrics"]["mean_itl_ms"] == pytest.approx(last["metrics"]["generation_time_ms"] / 2)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
        chunks = await server.events(PATH, {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]] == [1, 2, 3, 3, 3]
        chunks = await server.events(PATH, {**body, "stream_options": None})
        assert all("usage" not in chunk for chunk in chunks[:-1])

    serve(tokenizer, test)


@CHAT_AND_COMPLETION
def test_text_ends_before_the_stop_string(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    async def test(server: Server) -> None:
        for stop in ("o y", ["zz", "o y"]):
            _, unstreamed, _ = await server.post(path, {**body, "stop": stop})
            chunks = await server.events(path, {**body, "stop": stop, "stream": True})
            choices = [chunk["choices"][0] for chunk in chunks[:-1]]
            text = "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
            choice = unstreamed["choices"][0]
            assert text == (choice["text"] if "text" in choice else choice["message"]["content"]) == "Hell"
            assert choice["finish_reason"] == choices[-1]["finish_reason"] == "stop"

    serve(tokenizer, test)


def test_text_held_back_for_a_possible_stop_string_is_sent_at_the_end(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        chunks = await server.events(CHAT_PATH, {**CHAT, "stop": "you!", "stream": True})
        contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks[:-1]]
        assert contents == ["", "H", "e", "l", "l", "o", " ", "", "", "", "", "you"]

    serve(tokenizer, test)


def test_logprobs_of_tokens_within_a_character_give_each_tokens_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é", False)

    async def test(server: Server) -> None:
        server.batcher._top = lambda count: tuple(Alternative(id, "\ufffd", -0.5, False) for id in ids)  # type: ignore[method-assign]
        request_body = {**CHAT, "logprobs": True, "top_logprobs": 2, "max_tokens": 2}
        _, body, _ = await server.post(CHAT_PATH, request_body)
        entries = body["choices"][0]["logprobs"]["content"]
        assert [entry["bytes"] for entry in entries] == [[0xC3], [0xA9]]
        assert [[(other["token"], other["bytes"]) for other in entry["top_logprobs"]] for entry in entries] == [
            [("", [0xC3]), ("\ufffd", [0xA9])],
            [("\ufffd", [0xC3]), ("é", [0xA9])],
        ]
        chunks = await server.events(CHAT_PATH, {**request_body, "stream": True})
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
        assert [entry for part in parts if part for entry in part["content"]] == entries
        _, body, _ = await server.post("/v1/completions", {"prompt": "x", "logprobs": 2, "max_tokens": 2})
        assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"": -0.5, "\ufffd": -0.5}, {"é": -0.5, "\ufffd": -0.5}]

    serve(tokenizer, test, generates="é</s>")


def test_chat_logprobs_have_tokens_bytes_and_top_logprobs(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, body, _ = await server.post(CHAT_PATH, {**CHAT, "logprobs": True, "top_logprobs": 2, "max_tokens": 2})
        first, second = body["choices"][0]["logprobs"]["content"]
        assert (first["token"], first["logprob"], first["bytes"]) == ("H", -0.5, [72])
        assert [set(other) for other in first["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 2
        assert second["token"] == "e"
        chunks = await server.events(CHAT_PATH, {**CHAT, "logprobs": True, "max_tokens": 2, "stream": True})
        logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
        assert (logprobs[0], logprobs[3]) == (None, None)
        assert [entry["token"] for part in logprobs[1:3] for entry in part["content"]] == ["H", "e"]
        assert logprobs[1]["content"][0]["top_logprobs"] == []

    serve(tokenizer, test)


@pytest.mark.parametrize("parameters", [{}, {"logprobs": True}, {"n": 2}, {"max_tokens": 3}, {"stop": "lo"}], ids=str)
@CHAT_AND_COMPLETION
def test_return_token_ids_gives_all_generated_ids_and_the_prompts_ids_once(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], parameters: dict[str, Any]
) -> None:
    """Also the ids of tokens without text, such as those cut off by a stop string."""
    several_prompts = path == PATH
    request_body = body | parameters | {"return_token_ids": True}
    if several_prompts:
        request_body |= {"prompt": ["hi", "you"], "logprobs": 1 if "logprobs" in parameters else None}
    expected_text = (
        "Hello"[: 5 if "stop" in parameters else parameters.get("max_tokens", 99)]
        if parameters.keys() & {"stop", "max_tokens"}
        else "Hello you</s>"
    )

    def decoded(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False).lstrip("0123")  # a later choice begins with its number

    async def test(server: Server) -> None:
        _, without_ids, _ = await server.post(path, request_body | {"return_token_ids": False})
        _, with_ids, _ = await server.post(path, request_body)
        prompts = [list(request.prompt) for request in server.batcher.requests[-1 - several_prompts :]]
        choices_per_prompt = parameters.get("n", 1)
        for choice, plain_choice in zip(with_ids["choices"], without_ids["choices"], strict=True):
            assert decoded(choice.pop("token_ids")) == expected_text
            if several_prompts:
                assert choice.pop("prompt_token_ids") == prompts[choice["index"] // choices_per_prompt]
            assert choice == plain_choice
        assert with_ids.pop("prompt_token_ids", None) == (None if several_prompts else prompts[0])
        assert with_ids["usage"] == without_ids["usage"]
        *chunks, _ = await server.events(path, request_body | {"stream": True, "stream_options": {"include_usage": True}})
        ids_by_index: dict[int, list[int]] = {}
        prompts_sent = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
        assert prompts_sent == ([] if several_prompts else prompts)
        assert several_prompts or "prompt_token_ids" in chunks[0]
        for chunk in chunks:
            for choice in chunk["choices"]:
                index = choice["index"]
                assert ("prompt_token_ids" in choice) == (several_prompts and index not in ids_by_index)
                assert choice.get("prompt_token_ids", prompts[index // choices_per_prompt]) == prompts[index // choices_per_prompt]
                ids_by_index.setdefault(index, []).extend(choice["token_ids"])
        assert [*map(decoded, ids_by_index.values())] == [expected_text] * (1 + several_prompts) * choices_per_prompt

    serve(tokenizer, test)


def test_return_token_ids_with_max_tokens_0_gives_the_prompts_ids(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        body = {**COMPLETION, "max_tokens": 0, "echo": True, "return_token_ids": True}
        _, answer, _ = await server.post(PATH, body)
        [choice] = answer["choices"]
        assert (choice["token_ids"], choice["prompt_token_ids"]) == ([], list(server.batcher.requests[-1].prompt))
        chunks = await server.events(PATH, {**body, "stream": True})
        assert [choice["token_ids"] for chunk in chunks[:-1] for choice in chunk["choices"]] == [[], []]

    serve(tokenizer, test)


def test_completion_logprobs_have_tokens_offsets_and_top_logprobs(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        expected = {"tokens": ["H", "e", "l"], "token_logprobs": [-0.5] * 3, "text_offset": [0, 1, 2]}
        _, body, _ = await server.post(PATH, {**COMPLETION, "logprobs": 1, "max_tokens": 3})
        found = body["choices"][0]["logprobs"]
        assert {name: found[name] for name in expected} == expected
        assert [len(tops) for tops in found["top_logprobs"]] == [2, 2, 2]
        assert found["top_logprobs"][0]["H"] == -0.5
        _, body, _ = await server.post(PATH, {**COMPLETION, "logprobs": 0, "max_tokens": 3})
        assert body["choices"][0]["logprobs"] == {**expected, "top_logprobs": None}
        chunks = await server.events(PATH, {**COMPLETION, "logprobs": 0, "max_tokens": 3, "stream": True})
        assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks[:3]] == [[0], [1], [2]]

    serve(tokenizer, test)


def test_infinite_logprob_is_sent_as_minus_9999(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, body, _ = await server.post(PATH, {**COMPLETION, "logprobs": 0})
        assert body["choices"][0]["logprobs"]["token_logprobs"][0] == -9999.0

    serve(tokenizer, test, logprob=float("-inf"))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ["hi"]),
        (["hi", "you"], ["hi", "you"]),
        ([5, 6], [(5, 6)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
    ],
)
def test_completion_accepts_strings_token_ids_and_lists_of_them_as_prompt(
    tokenizer: Tokenizer, prompt: object, expected: list[Any]
) -> None:
    async def test(server: Server) -> None:
        _, body, _ = await server.post(PATH, {"prompt": prompt})
        prompts = [tuple(tokenizer.encode(entry)) if isinstance(entry, str) else entry for entry in expected]
        assert [request.prompt for request in server.batcher.requests] == prompts
        assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
        assert [choice["text"] for choice in body["choices"]] == ["Hello you"] * len(expected)
        assert body["usage"]["completion_tokens"] == 10 * len(expected)
        chunks = await server.events(PATH, {"prompt": prompt, "stream": True})
        for index in range(len(expected)):
            choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"] if choice["index"] == index]
            assert "".join(choice["text"] for choice in choices) == "Hello you"
            assert [choice["finish_reason"] for choice in choices] == [None] * 10 + ["stop"]

    serve(tokenizer, test)


def test_text_parts_of_a_message_are_joined(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
        await server.post(CHAT_PATH, {"messages": [{"role": "user", "content": parts}]})
        assert server.batcher.requests[0].prompt == tuple(tokenizer.encode("[user]hi[assistant]", False))

    serve(tokenizer, test)


def test_final_assistant_message_is_continued_unless_a_generation_prompt_is_added(tokenizer: Tokenizer) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "Well"}]  # type: ignore[misc]

    async def test(server: Server) -> None:
        parts = [*messages[:-1], {"role": "assistant", "content": [{"type": "text", "text": "Well"}]}]
        for extra in ({}, {"continue_final_message": True}, {"messages": parts}, {"add_generation_prompt": True}):
            await server.post(CHAT_PATH, {"messages": messages, **extra})
        default, continued, in_parts, new_turn = (tokenizer.decode(request.prompt) for request in server.batcher.requests)
        assert default == continued == in_parts == "[user]hi[assistant]Well"
        assert new_turn == "[user]hi[assistant]Well[assistant]"
        without_content = [*CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": []}]  # type: ignore[misc]
        assert (await server.post(CHAT_PATH, {"messages": without_content}))[0] == 200
        contradiction = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
        assert (await server.post(CHAT_PATH, contradiction))[0] == 400

    serve(tokenizer, test)


@CHAT_AND_COMPLETION
def test_sampling_parameters_reach_the_batcher(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    async def test(server: Server) -> None:
        given = {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "min_p": 0.1,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.1,
            "logit_bias": {"5": -100},
            "seed": -1,
            "max_tokens": 9,
            "stop_token_ids": [77],
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
        }
        await server.post(path, {**body, **given})
        (request,) = server.batcher.requests
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
        assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.1)
        assert (sampling.logit_bias, sampling.seed) == (((5, -100.0),), 2**64 - 1)
        assert (request.max_new_tokens, request.end_ids) == (9, (1, 77))
        assert (request.skip_special_tokens, request.include_stop) == (False, True)

    serve(tokenizer, test)


@CHAT_AND_COMPLETION
def test_top_p_0_is_accepted_and_becomes_tiny_but_positive(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    async def test(server: Server) -> None:
        status, answer, _ = await server.post(path, {**body, "top_p": 0})
        assert status == 200, answer
        (request,) = server.batcher.requests
        assert request.sampling.temperature == 1.0
        assert 0.0 < request.sampling.top_p < 1e-30

    serve(tokenizer, test)


@CHAT_AND_COMPLETION
def test_neutral_parameter_values_change_nothing(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    async def test(server: Server) -> None:
        neutral = {"top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
        neutral |= {"n": 1, "ignore_eos": True, "max_tokens": 10, "stop": [], "tools": [], "tool_choice": "none", "echo": False}
        neutral |= {"logit_bias": {}, "response_format": {"type": "text"}, "user": "me", "unheard_of": {"x": 1}}
        for temperature in (0, 1):  # of 0, that leaves one token, no filter would be seen
            status, answer, _ = await server.post(path, {**body, **neutral, "temperature": temperature, "seed": 7})
            assert status == 200, answer
            assert answer["choices"][0]["finish_reason"] == "length"  # the EOS token is the last of max_tokens, and is ignored
            request = server.batcher.requests[-1]
            assert request.sampling == Sampling(temperature=temperature, seed=7 * temperature)  # greedy decoding has no seed
            assert request.end_ids == ()

    serve(tokenizer, test)


@CHAT_AND_COMPLETION
def test_null_parameters_are_accepted(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    names = (
        "stream stream_options temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty logit_bias seed "
        "max_tokens max_completion_tokens stop stop_token_ids ignore_eos n best_of echo suffix tools tool_choice response_format "
        "logprobs top_logprobs user model"
    )

    async def test(server: Server) -> None:
        assert (await server.post(path, {**body, **dict.fromkeys(names.split())}))[0] == 200

    serve(tokenizer, test)


@CHAT_AND_COMPLETION
@pytest.mark.parametrize(
    ("given", "parameter", "message"),
    [
        ({"n": 0}, "n", "`n` must be from 1 to 16 (--max-best-of). Given: 0"),
        ({"n": 17}, "n", "`n` must be from 1 to 16 (--max-best-of). Given: 17"),
        (
            {"priority": 3},
            "priority",
            '`priority` must be one of "interactive", "normal", "batch"; numbers are not supported. Given: 3',
        ),
        ({"priority": "x"}, "priority", '`priority` must be one of "interactive", "normal", "batch". Given: "x"'),
        ({"service_tier": "x"}, "service_tier", '`service_tier` must be one of auto, default, flex, priority. Given: "x"'),
        ({"timeout": -1}, "timeout", "`timeout` must be strictly positive"),
        ({"suffix": "x"}, "suffix", "Suffix is not supported and can be achieved by preprocessing the prompt."),
        ({"bad_words": ["x"]}, "bad_words", "`bad_words` is not supported: forbid tokens with a `logit_bias` of -100"),
        ({"stop_regex": "a+"}, "stop_regex", "`stop_regex` is not supported"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": 5}},
            "structured_outputs.whitespace_pattern",
            "`structured_outputs.whitespace_pattern` must be a string",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "`functions` is not supported: use `tools`, which chats have"),
        ({"response_format": {}}, "response_format.type", FORMATS + "null"),
        ({"response_format": {"type": "xml"}}, "response_format.type", FORMATS + '"xml"'),
        ({"guided_json": {"enum": ["x" * 65_536]}}, "guided_json", "`guided_json` must have at most 65536 characters"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "`response_format.json_schema.schema` is missing",
        ),
        ({"guided_choice": []}, "guided_choice", "`guided_choice` must be a list of strings, not empty"),
        (
            {"guided_regex": "a+", "guided_choice": ["a"]},
            "guided_choice",
            "`guided_regex` and `guided_choice` both say what the answer must be: send one of them",
        ),
        ({"min_tokens": -1}, "min_tokens", "`min_tokens` must be at least 0. Given: -1"),
        (
            {"min_tokens": 1 << 32, "max_tokens": 2},
            "min_tokens",
            "`min_tokens` must be at most 2, the tokens that the answer may have. Given: 4294967296",
        ),
        (
            {"min_tokens": 3, "stop": "x"},
            "min_tokens",
            "`min_tokens` together with `stop` is not supported: strings would end the answer before",
        ),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "`prompt_logprobs` must be from 0 to 20. Given: 21"),
        ({"temperature": -1}, "temperature", "`temperature` must be at least 0. Given: -1.0"),
        ({"top_p": 1.5}, "top_p", "`top_p` must be from 0 to 1. Given: 1.5"),
        ({"top_p": -0.1, "temperature": 0}, "top_p", "`top_p` must be from 0 to 1. Given: -0.1"),
        ({"top_k": -2}, "top_k", "`top_k` must be at least 1, or 0 or -1 for all tokens. Given: -2"),
        ({"presence_penalty": 3}, "presence_penalty", "`presence_penalty` must be >= -2.0 and <= 2.0"),
        ({"max_tokens": 0}, "max_tokens", "`max_tokens` must be strictly positive"),
        ({"logit_bias": {"999": 1}}, "logit_bias", "`logit_bias` has the token id 999; the model knows 0 to 299"),
        ({"stop": ["a"] * 5}, "stop", "`stop` supports up to 4 stop sequences. Given: 5"),
        ({"stop": ""}, "stop", "`stop` sequences must have from 1 to 1024 characters"),
        ({"seed": "x"}, "seed", "Expected `int | null`, got `str` - at `$.seed`"),
        ({"logit_bias": [1.0]}, "logit_bias", "Expected `object | null`, got `array` - at `$.logit_bias`"),
    ],
)
def test_invalid_parameter_is_a_400_that_names_it(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], given: dict[str, Any], parameter: str, message: str
) -> None:
    async def test(server: Server) -> None:
        for streaming in (False, True):
            status, answer, _ = await server.post(path, {**body, **given, "stream": streaming})
            assert status == 400
            error = {"message": message, "type": "invalid_request_error", "param": parameter, "code": "validation"}
            assert answer["error"] == error
        assert server.metrics.failures == ["validation"] * 2

    serve(tokenizer, test)


def test_more_prompts_than_max_concurrent_requests_are_a_400_not_a_429(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, answer, _ = await server.post(PATH, {"prompt": ["a"] * 3})
        message = "Number of prompts exceeds the maximum allowed batch size of 2 (--max-concurrent-requests). Given: 3"
        assert (status, answer["error"]["message"]) == (400, message)
        assert json.loads((await server.get("/info"))[1])["max_client_batch_size"] == 2

    serve(tokenizer, test, settings={"max_concurrent_requests": 2})


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (PATH, {}, "Object missing required field `prompt`"),
        (CHAT_PATH, {**CHAT, "use_beam_search": True, "n": 2, "best_of": 1}, "`best_of` must be at least `n`. Given: 1 and 2"),
        (PATH, {"prompt": ""}, "`prompt` cannot be empty"),
        (PATH, {"prompt": []}, "`prompt` must be a string, a list of strings, a list of token ids or a list of such lists"),
        (PATH, {"prompt": ["a", 1]}, "`prompt` must be a string, a list of strings, a list of token ids or a list of such lists"),
        (PATH, {"prompt": [[]]}, "`prompt` cannot be empty"),
        (PATH, {"prompt": [10**30]}, f"`prompt` has the token id {10**30}; the model knows 0 to 299"),
        (
            PATH,
            {"prompt": ["a"] * 5},
            "Number of prompts exceeds the maximum allowed batch size of 4 (--max-client-batch-size). Given: 5",
        ),
        (
            PATH,
            {"prompt": "x" * 500},
            "`prompt` tokens + `max_tokens` must be <= 128. Given: 501 `prompt` tokens and 16 `max_tokens`",
        ),
        (PATH, {"prompt": "a", "logprobs": 21}, "`logprobs` must be >= 0 and <= 20. Given: 21"),
        (CHAT_PATH, {**CHAT, "logprobs": True, "top_logprobs": 21}, "`top_logprobs` must be >= 0 and <= 20. Given: 21"),
        (CHAT_PATH, {**CHAT, "max_completion_tokens": 0}, "`max_completion_tokens` must be strictly positive"),
        (CHAT_PATH, {"messages": []}, "`messages` cannot be empty"),
        (CHAT_PATH, {"messages": [{"content": "x"}]}, "`messages[0].role` must be a string"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": 5}]}, "`messages[0].content` must be a string or a list of parts"),
        (
            CHAT_PATH,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
            "`messages[0].content` has a part of type text whose `text` is no string",
        ),
        (
            CHAT_PATH,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "`messages` has an image, and only text is supported: the model sees no images, or the server was started without "
            "(--max-images)",
        ),
        (
            CHAT_PATH,
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}]},
            "`messages[0].content` has a part that is neither a text nor an image: only these are supported",
        ),
        (CHAT_PATH, {**CHAT, "echo": True}, "`echo` is not supported"),
        (CHAT_PATH, {**CHAT, "top_logprobs": 2}, "`top_logprobs` needs `logprobs`: true"),
    ],
)
def test_invalid_prompts_messages_and_limits_are_a_400_with_a_message(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], message: str
) -> None:
    async def test(server: Server) -> None:
        status, answer, _ = await server.post(path, body)
        assert (status, answer["error"]["message"]) == (400, message)

    serve(tokenizer, test)


@pytest.mark.parametrize(
    ("path", "body", "parameter"),
    [
        (PATH, {}, "prompt"),
        (CHAT_PATH, {}, "messages"),
        (PATH, {"prompt": "a", "temperature": "x"}, "temperature"),
    ],
)
def test_missing_or_mistyped_field_is_named_in_param(tokenizer: Tokenizer, path: str, body: dict[str, Any], parameter: str) -> None:
    async def test(server: Server) -> None:
        status, answer, _ = await server.post(path, body)
        assert (status, answer["error"]["param"]) == (400, parameter)

    serve(tokenizer, test)


@pytest.mark.parametrize("data", [b"", b"{", b'{"prompt": "\xff"}', b"[" * 100_000, b'{"x": ' + b"[" * 100_000])
def test_malformed_json_is_a_400_in_openais_error_format(tokenizer: Tokenizer, data: bytes) -> None:
    async def test(server: Server) -> None:
        for path in (PATH, CHAT_PATH):
            status, answer, _ = await server.post(path, data)
            assert status == 400
            assert set(answer["error"]) == {"message", "type", "param", "code"}

    serve(tokenizer, test)


@CHAT_AND_COMPLETION
@pytest.mark.parametrize(
    ("behaviour", "status", "kind"),
    [
        ({"fails_with": Overloaded("full")}, 429, "overloaded_error"),
        ({"fails_with": Broken("rank 0 died")}, 500, "server_error"),
        ({"ready": False, "stage": "loading", "limits": None}, 503, "server_error"),
    ],
)
def test_failure_before_the_first_token_sets_status_and_retry_headers(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], behaviour: dict[str, Any], status: int, kind: str
) -> None:
    async def test(server: Server) -> None:
        for streaming in (False, True):
            found, answer, response = await server.post(path, {**body, "stream": streaming})
            assert (found, answer["error"]["type"]) == (status, kind)
            assert ("Retry-After" in response.headers) == (status != 500)
            assert ("x-should-retry" in response.headers) == (status == 500)  # else the client would send what broke a shard again

    serve(tokenizer, test, **behaviour)


@CHAT_AND_COMPLETION
def test_failure_during_a_stream_is_an_error_event_before_done(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    async def test(server: Server) -> None:
        *_, error, done = await server.events(path, {**body, "stream": True})
        assert done == "[DONE]"
        assert error["error"]["message"] == "Request failed during generation: gone"
        assert error["error_type"] == "generation"

    serve(tokenizer, test, fails_after=(3, Broken("gone")))


def test_failure_of_one_prompt_fails_the_request_and_closes_all_streams(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, answer, _ = await server.post(PATH, {"prompt": ["a", "b", "c"]})
        assert (status, answer["error"]["code"]) == (500, "generation")
        await until(lambda: server.batcher.closed == 3)

    serve(tokenizer, test, fails_after=(3, Broken("gone")))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (PATH, {"prompt": ["a", "b", "c"]})])
@pytest.mark.parametrize("tokens", [0, 4])
def test_client_disconnect_closes_all_streams(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], tokens: int, streaming: bool
) -> None:
    count = 3 if path == PATH else 1

    async def test(server: Server) -> None:
        task = asyncio.create_task(server.post(path, {**body, "stream": streaming}))
        await until(lambda: server.batcher.opened == count)
        assert server.batcher.token_permits is not None
        for _ in range(tokens):
            server.batcher.token_permits.release()
        await until(lambda: server.batcher.tokens_sent == tokens)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await until(lambda: server.batcher.closed == count)

    serve(tokenizer, test, token_permits=asyncio.Semaphore(0))


def test_model_list_is_answered_while_shards_load(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        async with server.client.get("/v1/models") as response:
            body = await response.json()
        model = {"id": "some/model", "object": "model", "created": 0, "owned_by": "some/model"}
        assert body == {"object": "list", "data": [model]}

    serve(tokenizer, test, ready=False, limits=None)


ADAPTERS = {"adapters": ("french", "some/other")}


@CHAT_AND_COMPLETION
def test_model_name_selects_the_adapter_and_its_cache_key(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    """Every name that is no adapter's means the base model. Prefix cache entries are not shared between adapters."""

    async def test(server: Server) -> None:
        for name in ("french", "gpt-4", "some/model", "some/other"):
            status, content, _ = await server.post(path, {**body, "model": name})
            assert (status, content["model"]) == (200, name)
        await server.post(path, {**body, "model": "french", "cache_salt": "mine"})
        requests = server.batcher.requests
        assert [request.adapter for request in requests] == ["french", "", "", "some/other", "french"]
        assert len({request.cache_key for request in requests}) == 4
        assert requests[1].cache_key == requests[2].cache_key

    serve(tokenizer, test, settings=ADAPTERS)


def test_model_list_includes_adapters_with_their_parent(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        async with server.client.get("/v1/models") as response:
            found = (await response.json())["data"]
        assert [(model["id"], model.get("parent")) for model in found] == [
            ("some/model", None),
            ("french", "some/model"),
            ("some/other", "some/model"),
        ]
        status, content, _ = await server.get("/v1/models/some/other")
        assert (status, json.loads(content)["parent"]) == (200, "some/model")
        status, content, _ = await server.get("/v1/models/third")
        assert status == 404
        assert "this server has `some/model`, `french`, `some/other`" in json.loads(content)["error"]["message"]

    serve(tokenizer, test, settings=ADAPTERS)


def test_model_is_found_by_name_and_an_unknown_one_is_a_404(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, body, _ = await server.get("/v1/models/some/model")
        assert (status, json.loads(body)["id"]) == (200, "some/model")
        status, body, _ = await server.get("/v1/models/other")
        assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")

    serve(tokenizer, test)


@CHAT_AND_COMPLETION
def test_min_tokens_reach_the_batcher(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    async def test(server: Server) -> None:
        await server.post(path, {**body, "min_tokens": 3})
        assert server.batcher.requests[-1].min_new_tokens == 3

    serve(tokenizer, test)


def test_model_list_reports_max_model_len(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        async with server.client.get("/v1/models") as response:
            assert (await response.json())["data"][0]["max_model_len"] == 128

    serve(tokenizer, test)


def test_http_errors_have_openais_error_format(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        key = {"Authorization": "Bearer key"}
        cases: list[tuple[str, dict[str, str], int, str]] = [
            (CHAT_PATH, {}, 401, "authentication_error"),
            ("/v1/nothing", key, 404, "not_found_error"),
            ("/v1/models", key, 405, "invalid_request_error"),
            (CHAT_PATH, {**key, "Content-Encoding": "gzip"}, 415, "invalid_request_error"),
        ]
        for path, headers, status, kind in cases:
            found, answer, _ = await server.post(path, CHAT, headers=headers)
            assert (found, answer["error"]["type"]) == (status, kind)

    serve(tokenizer, test, settings={"api_keys": ("other", "key")})


def test_chat_with_n_returns_all_choices_and_sums_their_usage(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, body, _ = await server.post(CHAT_PATH, {**CHAT, "n": 3, "temperature": 0})
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert [choice["message"]["content"] for choice in body["choices"]] == ["Hello you", "1Hello you", "2Hello you"]
        (request,) = server.batcher.requests
        assert request.choices == 3
        assert body["usage"]["prompt_tokens"] == len(request.prompt)
        assert body["usage"]["completion_tokens"] == 10 + 11 + 11

    serve(tokenizer, test)


def test_streamed_choices_are_interleaved_and_told_apart_by_index(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        body = {**CHAT, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, last, done = await server.events(CHAT_PATH, body)
        assert (done, last["usage"]["completion_tokens"]) == ("[DONE]", 21)
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [choice["index"] for choice in choices[:6]] == [0, 1, 0, 1, 0, 1]
        assert [choice["delta"].get("role") for choice in choices[:3]] == ["assistant", "assistant", None]
        for index, text in enumerate(["Hello you", "1Hello you"]):
            own = [choice for choice in choices if choice["index"] == index]
            assert "".join(choice["delta"].get("content", "") for choice in own) == text
            assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["stop"]

    serve(tokenizer, test)


def test_choices_of_several_prompts_are_numbered_consecutively(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        request_body = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 16, "logprobs": 0}
        _, body, _ = await server.post(PATH, request_body)
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in body["choices"]] == ["Hello you", "1Hello you"] * 2
        assert body["usage"] == usage(5, 42)
        chunks = await server.events(PATH, {**request_body, "stream": True})
        texts = ["", "", "", ""]
        for chunk in chunks[:-1]:
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["text"]
        assert texts == ["Hello you", "1Hello you"] * 2

    serve(tokenizer, test)


def test_best_of_returns_the_n_most_probable_choices_best_first(tokenizer: Tokenizer) -> None:
    """The fake batcher's later choices are less probable by default."""

    async def test(server: Server) -> None:
        server.batcher.logprob = 0.5  # makes later choices more probable
        _, body, _ = await server.post(PATH, {**COMPLETION, "best_of": 4, "n": 2})
        assert [choice["text"] for choice in body["choices"]] == ["3Hello you", "2Hello you"]
        assert body["usage"]["completion_tokens"] == 10 + 3 * 11
        _, body, _ = await server.post(PATH, {**COMPLETION, "best_of": 3})
        assert [choice["text"] for choice in body["choices"]] == ["2Hello you"]
        server.batcher.logprob, server.batcher._texts = -0.5, lambda request: ["Hello you</s>", "Hi</s>"]  # type: ignore[method-assign]
        _, body, _ = await server.post(PATH, {**COMPLETION, "best_of": 2})
        assert [choice["text"] for choice in body["choices"]] == ["Hello you"], "by token: the sums are -5 and -3"
        status, body, _ = await server.post(PATH, {**COMPLETION, "best_of": 3, "stream": True})
        assert (status, body["error"]["message"]) == (400, "`best_of` > `n` is not supported when streaming tokens")
        status, body, _ = await server.post(PATH, {**COMPLETION, "best_of": 2, "n": 3})
        assert (status, body["error"]["message"]) == (400, "`best_of` must be at least `n`. Given: 2 and 3")
        status, body, _ = await server.post(CHAT_PATH, {**CHAT, "best_of": 2})
        assert (status, body["error"]["message"]) == (400, "`best_of` is not supported for chats: ask for `n` answers")

    serve(tokenizer, test)


def test_priority_service_tier_timeout_and_tenant_reach_the_batcher(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for given, expected in (
            ({"priority": "interactive"}, "interactive"),
            ({"service_tier": "flex"}, "batch"),
            ({"service_tier": "priority"}, "interactive"),
            ({"service_tier": "auto"}, "normal"),
            ({"service_tier": "flex", "priority": "normal"}, "normal"),
        ):
            _, body, _ = await server.post(CHAT_PATH, {**CHAT, **given, "timeout": 3})
            request = server.batcher.requests[-1]
            assert (request.priority, request.timeout, request.tenant) == (expected, 3.0, "")
            assert body.get("service_tier") == given.get("service_tier")
            chunk, *_ = await server.events(CHAT_PATH, {**CHAT, **given, "stream": True})
            assert chunk.get("service_tier") == given.get("service_tier")
        for token in ("a", "b", "a"):
            await server.post(CHAT_PATH, CHAT, headers={"Authorization": f"Bearer {token}"})
        first, second, third = (request.tenant for request in server.batcher.requests[-3:])
        assert first == third != second
        assert len(first) == 16

    serve(tokenizer, test)


def test_timeout_includes_the_time_spent_rendering_the_chat_template(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: Tokenizer, *arguments: object) -> str:
        await asyncio.sleep(30)
        return ""

    monkeypatch.setattr(Tokenizer, "chat_prompt", never)

    async def test(server: Server) -> None:
        for timeout in (0.05, 1e-9):
            status, body, _ = await server.post(CHAT_PATH, {**CHAT, "timeout": timeout})
            assert (status, body["error"]["code"]) == (504, "timeout")
            assert body["error"]["message"].endswith("s after the request came: 0 tokens were there")
        assert server.metrics.failures == ["timeout"] * 2
        assert not server.batcher.requests

    serve(tokenizer, test)


def test_timeout_is_a_504_without_retry_and_overload_a_429_with_retry_after(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        server.batcher.fails_with = Expired("the answer was not complete 3 s after the request came: 7 tokens were there")
        status, body, response = await server.post(CHAT_PATH, CHAT)
        assert (status, body["error"]["code"], response.headers["x-should-retry"]) == (504, "timeout", "false")
        server.batcher.fails_with = Overloaded("full", 2.3)
        status, _, response = await server.post(CHAT_PATH, CHAT)
        assert (status, response.headers["Retry-After"]) == (429, "3")

    serve(tokenizer, test)


@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (PATH, COMPLETION), ("/v1/responses", {"input": "hi"})])
def test_unicode_line_separators_are_escaped_in_stream_events(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    """huggingface_hub's client splits events at them."""

    async def test(server: Server) -> None:
        async with server.client.post(path, json={**body, "stream": True}) as response:
            data = await response.read()
        assert not any(end.encode() in data for end in "\u2028\u2029\u0085")
        events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
        if path == "/v1/responses":
            text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        else:
            choices = [event["choices"][0] for event in events]
            text = "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
        assert text == "a\u2028b\u2029c\u0085d"

    serve(tokenizer, test, generates="a\u2028b\u2029c\u0085d</s>")
