"""Beam search in TGI's and OpenAI's APIs: parameters, answers, scores, events, and searches that find too few answers."""

import asyncio
import json
from typing import Any

import pytest

from penstock.router.request import Beams, Stopping
from penstock.router.text import Tokenizer
from penstock.tests.router.fake_batcher import Server, make_tokenizer, serve
from penstock.tests.router.test_openapi import check_schema

CHAT_AND_COMPLETION = pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 20}),
    ],
)
BEAM_TEXTS = ["Hello you", "Hello you1", "Hello you2"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def tgi_body(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "hi", "parameters": {"max_new_tokens": 20, **parameters}}


async def events(server: Server, body: object) -> tuple[list[Any], list[Any]]:
    """Events of /generate_stream: those without a name, and those named `beams`."""
    unnamed: list[Any] = []
    named: list[Any] = []
    async with server.client.post("/generate_stream", json=body) as response:
        assert response.status == 200
        for block in (await response.read()).decode().split("\n\n")[:-1]:
            name, found, rest = block.rpartition("\n")
            assert name == ("event: beams" if found else "")
            (named if found else unnamed).append(json.loads(rest.removeprefix("data: ")))
    for event in [*unnamed, *named]:
        check_schema("/generate_stream", 200, "text/event-stream", event, "properties", "data", "contentSchema")
    return unnamed, named


def choice_texts(events: list[Any], field: str) -> dict[int, str]:
    """The text of each choice of an OpenAI stream."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"] if event != "[DONE]" else ():
            text = choice["delta"].get("content", "") if field == "delta" else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


def test_generate_returns_the_best_beam_and_the_others_in_details(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        request_body = tgi_body(
            num_beams=4, num_return_sequences=3, length_penalty=-0.5, early_stopping="never", details=True, top_n_tokens=1
        )
        status, body, response = await server.post("/generate", request_body)
        check_schema("/generate", status, "application/json", body)
        assert body["generated_text"] == BEAM_TEXTS[0]
        details = body["details"]
        assert (details["score"], details["seed"], details["finish_reason"]) == (-0.25, None, "eos_token")
        assert "".join(token["text"] for token in details["tokens"]) == "Hello you</s>"
        assert [(one["generated_text"], one["score"]) for one in details["best_of_sequences"]] == [
            (BEAM_TEXTS[1], -0.5),
            (BEAM_TEXTS[2], -0.75),
        ]
        assert [token["text"] for token in details["best_of_sequences"][1]["tokens"]][-2:] == ["2", "</s>"]
        assert len(details["best_of_sequences"][1]["top_tokens"]) == 11
        assert response.headers["x-generated-tokens"] == "10"
        [request] = server.batcher.requests
        assert request.beams == Beams(width=4, length_penalty=-0.5, stopping=Stopping.NEVER)
        assert (request.choices, request.sampling.temperature) == (3, 0.0)

    serve(tokenizer, test)


def test_generate_without_details_returns_only_the_best_text(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        assert (await server.post("/generate", tgi_body(num_beams=4, num_return_sequences=3)))[1] == {
            "generated_text": BEAM_TEXTS[0]
        }
        assert (await server.post("/", tgi_body(num_beams=4)))[1] == [{"generated_text": "hiHello you"}]
        _, body, _ = await server.post("/generate", tgi_body(num_beams=4, details=True))
        assert "best_of_sequences" not in body["details"]
        _, body, _ = await server.post("/generate", tgi_body(details=True))
        assert "score" not in body["details"]

    serve(tokenizer, test)


def test_other_parameters_work_together_with_beams(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        parameters = {"return_full_text": True, "stop": ["o"], "decoder_input_details": True, "do_sample": True, "seed": 3}
        request_body = tgi_body(num_beams=4, num_return_sequences=2, grammar={"type": "regex", "value": ".*"}, **parameters)
        _, body, _ = await server.post("/generate", request_body)
        assert (body["generated_text"], body["details"]["finish_reason"]) == ("hiHello", "stop_sequence")
        assert len(body["details"]["prefill"]) == len(body["details"]["best_of_sequences"][0]["prefill"]) == 3
        assert body["details"]["seed"] == 3
        [request] = server.batcher.requests
        assert request.grammar is not None
        assert (request.stop, request.sampling.temperature, request.sampling.seed) == (("o",), 1.0, 3)

    serve(tokenizer, test)


def test_stream_has_the_best_beam_and_the_others_in_its_last_event(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        unnamed, named = await events(server, tgi_body(num_beams=4, num_return_sequences=3, details=True, return_full_text=True))
        assert not named
        assert [event["index"] for event in unnamed] == list(range(1, 11))
        assert "".join(event["token"]["text"] for event in unnamed) == "Hello you</s>"
        assert [event["generated_text"] for event in unnamed] == [None] * 9 + ["hiHello you"]
        details = unnamed[-1]["details"]
        assert (details["score"], details["input_length"], details["generated_tokens"]) == (-0.25, 3, 10)
        assert [one["generated_text"] for one in details["best_of_sequences"]] == ["hiHello you1", "hiHello you2"]
        assert [token["text"] for token in details["best_of_sequences"][0]["tokens"]] == [*"Hello you1", "</s>"]
        assert details["best_of_sequences"][1]["score"] == -0.75
        del details["best_of_sequences"]
        unnamed, _ = await events(server, tgi_body(num_beams=4, details=True))
        assert unnamed[-1]["details"] == details
        unnamed, _ = await events(server, tgi_body(num_beams=4, num_return_sequences=2))
        assert (unnamed[-1]["generated_text"], unnamed[-1]["details"]) == ("Hello you", None)

    serve(tokenizer, test)


def test_tokens_that_all_beams_share_are_streamed_before_the_search_ends(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        request_body = tgi_body(num_beams=4, num_return_sequences=2, details=True)
        async with server.client.post("/generate_stream", json=request_body) as response:
            for letter in "Hell":
                event = json.loads((await response.content.readuntil(b"\n\n")).removeprefix(b"data: "))
                assert event["token"]["text"] == letter
                token_permits.release()
            for _ in range(20):
                token_permits.release()
            assert b'"best_of_sequences"' in await response.read()

    token_permits = asyncio.Semaphore(1)
    serve(tokenizer, test, token_permits=token_permits)


@pytest.mark.parametrize("found", [1, 2])
def test_search_that_finds_fewer_answers_than_requested_returns_those(tokenizer: Tokenizer, found: int) -> None:
    async def test(server: Server) -> None:
        request_body = tgi_body(num_beams=4, num_return_sequences=3, details=True)
        _, body, _ = await server.post("/generate", request_body)
        assert len(body["details"].get("best_of_sequences", [])) == found - 1
        unnamed, _ = await events(server, request_body)
        assert unnamed[-1]["generated_text"] == "Hello you"
        assert len(unnamed[-1]["details"].get("best_of_sequences", [])) == found - 1
        body = {"prompt": ["hi", "ho"], "num_beams": 4, "n": 3, "max_tokens": 20}
        _, unstreamed, _ = await server.post("/v1/completions", body)
        indices = [prompt * 3 + index for prompt in range(2) for index in range(found)]
        assert [choice["index"] for choice in unstreamed["choices"]] == indices
        tokens = 2 * [10, 21][found - 1]
        assert unstreamed["usage"]["completion_tokens"] == tokens
        stream = await server.events("/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}})
        ended = [choice["index"] for event in stream[:-1] for choice in event["choices"] if choice["finish_reason"]]
        assert sorted(ended) == indices
        assert stream[-2]["usage"]["completion_tokens"] == tokens
        body = {"messages": [{"role": "user", "content": "hi"}], "num_beams": 4, "n": 3, "max_tokens": 20, "stream": True}
        stream = await server.events("/v1/chat/completions", body)
        started = [choice["index"] for event in stream[:-1] for choice in event["choices"] if "role" in choice["delta"]]
        assert started == list(range(found))

    serve(tokenizer, test, max_beams_found=found)


def test_stream_beams_sends_live_and_complete_beams_at_each_step(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        unnamed, named = await events(server, tgi_body(num_beams=3, stream_beams=True))
        assert [event["step"] for event in named] == list(range(1, 11))
        assert named[0] == {
            "step": 1,
            "live": [
                {"parent": 0, "id": unnamed[0]["token"]["id"], "text": "H", "score": -0.5},
                {"parent": 0, "id": 2, "text": "!", "score": -1.5},
                {"parent": 0, "id": 3, "text": '"', "score": -2.5},
            ],
            "complete": [],
        }
        assert [[beam["parent"] for beam in event["live"]] for event in named[1:3]] == [[2, 0, 1], [2, 1, 1]]
        assert named[-1]["complete"] == [{"parent": 1, "id": 1, "text": "</s>", "score": -0.25}]
        assert "".join(event["token"]["text"] for event in unnamed) == "Hello you</s>"
        assert server.batcher.requests[0].beams == Beams(width=3, watched=True)

    serve(tokenizer, test)


@pytest.mark.parametrize(
    ("path", "parameters", "message"),
    [
        ("/generate", {"num_beams": 2, "best_of": 2}, "`best_of` together with `num_beams` > 1 is not supported"),
        (
            "/generate",
            {"num_beams": 2, "best_of": 2, "do_sample": True},
            "`best_of` together with `num_beams` > 1 is not supported",
        ),
        ("/generate_stream", {"num_beams": 2, "best_of": 2}, "`best_of` != 1 is not supported when streaming tokens"),
        ("/generate", {"num_return_sequences": 2}, "`num_return_sequences` needs beams: ask for them with `num_beams` > 1"),
        ("/generate", {"length_penalty": 2}, "`length_penalty` needs beams"),
        ("/generate", {"early_stopping": True}, "`early_stopping` needs beams"),
        ("/generate", {"num_beams": 2, "early_stopping": "x"}, '`early_stopping` must be true, false or "never". Given: "x"'),
        (
            "/generate",
            {"num_beams": 2, "stream_beams": True},
            "`stream_beams` needs a stream: send the request to /generate_stream",
        ),
        ("/generate_stream", {"stream_beams": True}, "`stream_beams` needs beams"),
        ("/generate", {"num_beams": 9}, "`num_beams` must be > 0 and <= 8 (--max-num-beams). Given: 9"),
        ("/generate", {"num_beams": 2.5}, "Expected `int | null`, got `float` - at `$.parameters.num_beams`"),
        ("/generate", {"num_beams": 4, "num_beam_groups": 2}, "`num_beam_groups` is not supported"),
        ("/generate", {"num_beams": 4, "diversity_penalty": 0.5}, "`diversity_penalty` is not supported"),
        ("/generate_stream", {"num_beams": 4, "force_words_ids": [[3]]}, "`force_words_ids` is not supported"),
        ("/vertex", {"num_beams": 2, "num_return_sequences": 2}, "nor `num_return_sequences` is allowed for this endpoint"),
    ],
)
def test_invalid_beam_parameters_of_tgi_are_a_422(
    tokenizer: Tokenizer, path: str, parameters: dict[str, Any], message: str
) -> None:
    async def test(server: Server) -> None:
        body = tgi_body(**parameters)
        status, answer, _ = await server.post(path, {"instances": [body]} if path == "/vertex" else body)
        assert status == 422
        assert message in answer["error"]
        assert not server.batcher.requests

    serve(tokenizer, test)


def test_servers_default_num_beams_applies_to_greedy_requests_only(tokenizer: Tokenizer) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
    prompt = {"prompt": "hi", "max_tokens": 20}

    async def test(server: Server) -> None:
        for path, body, searched in (
            ("/generate", tgi_body(), True),
            ("/generate", tgi_body(num_beams=1), False),
            ("/generate", tgi_body(do_sample=True), False),
            ("/vertex", {"instances": [tgi_body()]}, True),
            ("/v1/chat/completions", chat, False),
            ("/v1/chat/completions", chat | {"temperature": 0}, True),
            ("/v1/completions", prompt | {"temperature": 0}, True),
            ("/v1/completions", prompt | {"temperature": 0, "n": 2}, False),
            ("/v1/completions", prompt | {"temperature": 0, "max_tokens": 0, "echo": True}, False),
            ("/v1/responses", {"input": "hi", "temperature": 0, "max_output_tokens": 20}, True),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 20}, False),
        ):
            status, _, _ = await server.post(path, body)
            assert status == 200
            assert server.batcher.requests[-1].beams == (Beams(width=4) if searched else None), (path, body)

    serve(tokenizer, test, settings={"num_beams": 4})


@CHAT_AND_COMPLETION
@pytest.mark.parametrize(
    "parameters",
    [
        {"num_beams": 4, "n": 3},
        {"num_beams": 4, "n": 3, "best_of": 3},  # adds nothing
        {"beam_width": 4, "n": 3},
        {"use_beam_search": True, "num_beams": 4, "n": 3},
        {"use_beam_search": True, "best_of": 4, "n": 3},
        {"use_beam_search": True, "beam_width": 4, "n": 3, "temperature": 0, "top_p": 0.9},
        {"num_beams": 4, "n": 3, "temperature": 0.0, "top_k": -1, "min_p": 0.0, "top_p": 1.0},
        {"num_beams": 4, "n": 3, "top_k": -1, "min_p": 0.0, "top_p": 1.0},
    ],
)
def test_openai_choices_are_the_best_beams_with_scores(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], parameters: dict[str, Any]
) -> None:
    async def test(server: Server) -> None:
        choice_texts = {"length_penalty": 2.0, "early_stopping": True, **parameters}
        status, answer, response = await server.post(path, body | choice_texts)
        check_schema(path, status, "application/json", answer)
        assert "x-ignored-fields" not in response.headers
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert [choice["score"] for choice in answer["choices"]] == [-0.25, -0.5, -0.75]
        texts = [choice["message"]["content"] if "message" in choice else choice["text"] for choice in answer["choices"]]
        assert texts == BEAM_TEXTS
        [request] = server.batcher.requests
        assert (request.choices, request.sampling.temperature) == (3, 0.0)
        assert request.beams == Beams(width=4, length_penalty=2.0, stopping=Stopping.FULL)

    serve(tokenizer, test)


@CHAT_AND_COMPLETION
def test_use_beam_search_has_as_many_beams_as_n(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    async def test(server: Server) -> None:
        _, answer, _ = await server.post(path, body | {"use_beam_search": True, "n": 3, "temperature": 0})
        assert len(answer["choices"]) == 3
        _, answer, _ = await server.post(path, body | {"use_beam_search": True, "n": 1})
        assert "score" not in answer["choices"][0]
        beams, greedy = server.batcher.requests
        assert (beams.beams, beams.choices) == (Beams(width=3), 3)
        assert (greedy.beams, greedy.choices, greedy.sampling.temperature) == (None, 1, 0.0)

    serve(tokenizer, test)


@CHAT_AND_COMPLETION
def test_sampling_parameters_with_num_beams_sample_the_beams(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    async def test(server: Server) -> None:
        for given, temperature in (({"temperature": 0.7, "seed": 5}, 0.7), ({"top_p": 0.5}, 1.0), ({}, 0.0)):
            assert (await server.post(path, body | {"num_beams": 2} | given))[0] == 200
            request = server.batcher.requests[-1]
            assert (request.beams, request.sampling.temperature) == (Beams(width=2), temperature)
        assert server.batcher.requests[0].sampling.seed == 5

    serve(tokenizer, test)


@CHAT_AND_COMPLETION
def test_openai_stream_has_all_beams_texts_and_their_scores_at_the_end(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    async def test(server: Server) -> None:
        request_body = body | {"num_beams": 4, "n": 3, "stream": True, "stream_options": {"include_usage": True}}
        stream = await server.events(path, request_body)
        for event in stream[:-1]:
            check_schema(path, 200, "text/event-stream", event, "properties", "data", "contentSchema")
        field = "delta" if "chat" in path else "text"
        assert choice_texts(stream, field) == dict(enumerate(BEAM_TEXTS))
        ends = [choice for event in stream[:-1] for choice in event["choices"] if choice["finish_reason"]]
        assert [(choice["index"], choice["score"]) for choice in ends] == [(0, -0.25), (1, -0.5), (2, -0.75)]
        others = [choice for event in stream[:-1] for choice in event["choices"] if not choice["finish_reason"]]
        assert not any("score" in choice for choice in others)
        assert stream[-2]["usage"]["completion_tokens"] == 10 + 11 + 11

    serve(tokenizer, test)


@CHAT_AND_COMPLETION
@pytest.mark.parametrize(
    ("given", "parameter", "message"),
    [
        ({"use_beam_search": True}, "use_beam_search", "`use_beam_search` needs to know how many beams: send `n`, or `num_beams`"),
        ({"use_beam_search": True, "n": 9}, "n", "`n` must be > 0 and <= 8 (--max-num-beams). Given: 9"),
        ({"use_beam_search": True, "n": 17}, "n", "`n` must be from 1 to 16 (--max-best-of). Given: 17"),
        ({"use_beam_search": True, "num_beams": 2, "n": 3}, "n", "`n` must be > 0 and <= 2 (`num_beams`). Given: 3"),
        ({"use_beam_search": True, "n": 1, "length_penalty": 2}, "length_penalty", "ask for them with `n` > 1, or leave it out"),
        ({"use_beam_search": True, "n": 2, "temperature": 0.7}, "temperature", "`temperature` together with `use_beam_search` is"),
        ({"use_beam_search": True, "n": 2, "top_k": 5}, "top_k", "`top_k` together with `use_beam_search` is not supported"),
        ({"use_beam_search": False, "num_beams": 2}, "use_beam_search", "`use_beam_search`: false contradicts `num_beams`"),
        ({"num_beams": 2, "beam_width": 3}, "beam_width", "`num_beams` and `beam_width` say the same"),
        ({"beam_width": 9}, "beam_width", "`beam_width` must be > 0 and <= 8"),
        ({"num_beams": 2, "n": 3}, "n", "`n` must be > 0 and <= 2 (`num_beams`). Given: 3"),
        ({"num_beams": 2, "best_of": 3}, "best_of", "`best_of`"),
        ({"num_beams": 3, "n": 2, "best_of": 1}, "best_of", "`best_of`"),
        ({"length_penalty": 0.5}, "length_penalty", "`length_penalty` needs beams: ask for them with `num_beams` > 1"),
        ({"early_stopping": "never"}, "early_stopping", "`early_stopping` needs beams"),
        ({"num_beams": 2, "num_return_sequences": 2}, "num_return_sequences", "use `n`, which chats and completions have"),
        ({"num_beams": 2, "stream_beams": True}, "stream_beams", "is not supported on this route: use /generate_stream"),
        ({"num_beams": 4, "num_beam_groups": 2}, "num_beam_groups", "`num_beam_groups` is not supported"),
        ({"num_beams": 4, "diversity_penalty": 0.5}, "diversity_penalty", "`diversity_penalty` is not supported"),
        ({"num_beams": 4, "force_words_ids": [[3]]}, "force_words_ids", "`force_words_ids` is not supported"),
    ],
)
def test_invalid_beam_parameters_of_openai_are_a_400_that_names_them(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], given: dict[str, Any], parameter: str, message: str
) -> None:
    async def test(server: Server) -> None:
        status, answer, _ = await server.post(path, body | given)
        assert status == 400
        assert message in answer["error"]["message"]
        assert answer["error"]["param"] == parameter
        assert not server.batcher.requests

    serve(tokenizer, test)


def test_neutral_beam_parameters_are_accepted_without_beams(tokenizer: Tokenizer) -> None:
    neutral = {"num_beams": 1, "length_penalty": 1.0, "early_stopping": False}
    unsupported = {"num_beam_groups": 1, "diversity_penalty": 0.0, "force_words_ids": []}
    tgi_parameters = {"num_return_sequences": 1, "stream_beams": False, **unsupported}
    openai_parameters = {"use_beam_search": False, "beam_width": 1, **tgi_parameters}

    async def test(server: Server) -> None:
        for path, body in (
            ("/generate", tgi_body(**neutral, **tgi_parameters)),
            ("/v1/completions", {"prompt": "hi", "max_tokens": 20, **neutral, **openai_parameters}),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 20, **neutral, **openai_parameters}),
        ):
            status, _, response = await server.post(path, body)
            assert (status, response.headers.get("x-ignored-fields")) == (200, None)
            assert server.batcher.requests[-1].beams is None

    serve(tokenizer, test)


def test_responses_route_returns_the_best_beam(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        body = {"input": "hi", "max_output_tokens": 20, "num_beams": 4, "length_penalty": 0.0}
        _, answer, _ = await server.post("/v1/responses", body)
        assert answer["output"][0]["content"][0]["text"] == "Hello you"
        assert server.batcher.requests[0].beams == Beams(width=4, length_penalty=0.0)
        assert server.batcher.requests[0].sampling.temperature == 0.0
        status, answer, _ = await server.post("/v1/responses", body | {"use_beam_search": True})
        assert (status, answer["error"]["param"]) == (400, "use_beam_search")

    serve(tokenizer, test)
