"""TGI's routes over real HTTP: shapes, order of events, statuses, and clients that leave."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.router.api import stream
from penstock.router.request import Broken, Expired, Limits, Overloaded
from penstock.router.text import Tokenizer
from penstock.tests.router.fake_batcher import Server, make_tokenizer, serve, until

TOO_MANY = "`inputs` tokens + `max_new_tokens` must be <= 128. Given: 3 `inputs` tokens and 10000 `max_new_tokens`"
HELLO = {"inputs": "hi", "parameters": {"max_new_tokens": 20}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def with_parameters(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "hi", "parameters": {"max_new_tokens": 20, **parameters}}


def test_generate(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, body, response = await server.post("/generate", HELLO)
        assert (status, body) == (200, {"generated_text": "Hello you"})
        assert response.headers["Content-Type"] == "application/json"
        assert response.headers["x-prompt-tokens"] == "3"
        assert response.headers["x-generated-tokens"] == "10"
        assert response.headers["x-queue-time"] == "250"
        assert response.headers["x-inference-time"] == "500"
        assert response.headers["x-time-per-token"] == "50"
        assert response.headers["x-compute-characters"] == "2"
        for name in ("x-compute-type", "x-compute-time", "x-total-time", "x-validation-time"):
            assert name in response.headers
        assert server.batcher.requests[0].sampling.final_logprobs

    serve(tokenizer, test)


def test_details_list_every_token_the_end_token_included(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, body, _ = await server.post("/generate", with_parameters(details=True, decoder_input_details=True, top_n_tokens=2))
        details = body["details"]
        assert list(details) == ["finish_reason", "generated_tokens", "seed", "prefill", "tokens", "top_tokens"]
        assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("eos_token", 10, None)
        assert details["prefill"][0] == {"id": 0, "text": "<s>", "logprob": None}
        assert [token["text"] for token in details["prefill"]] == ["<s>", "h", "i"]
        assert "".join(token["text"] for token in details["tokens"]) == "Hello you</s>"
        assert details["tokens"][-1] == {"id": 1, "text": "</s>", "logprob": -0.5, "special": True}
        assert len(details["top_tokens"]) == 10
        assert set(details["top_tokens"][0][0]) == {"id", "text", "logprob", "special"}

    serve(tokenizer, test)


def test_details_without_more(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, body, _ = await server.post("/generate", with_parameters(details=True, do_sample=True, seed=7))
        assert body["details"]["prefill"] == []
        assert body["details"]["seed"] == 7
        assert "top_tokens" not in body["details"]

    serve(tokenizer, test)


def test_infinite_logprobs_are_null(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, body, _ = await server.post("/generate", with_parameters(details=True))
        assert body["details"]["tokens"][0]["logprob"] is None

    serve(tokenizer, test, logprob=float("-inf"))


def test_generate_stream(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        events = await server.events("/generate_stream", with_parameters(details=True, top_n_tokens=1))
        assert [event["index"] for event in events] == list(range(1, 11))
        assert list(events[0]) == ["index", "token", "top_tokens", "generated_text", "details"]
        assert [event["generated_text"] for event in events[:-1]] == [None] * 9
        assert [event["details"] for event in events[:-1]] == [None] * 9
        assert "".join(event["token"]["text"] for event in events) == "Hello you</s>"
        assert events[-1]["generated_text"] == "Hello you"
        assert events[-1]["details"] == {"finish_reason": "eos_token", "generated_tokens": 10, "seed": None, "input_length": 3}
        (first, *_, last) = await server.events("/generate_stream", HELLO)
        assert list(first) == ["index", "token", "generated_text", "details"]
        assert last["details"] is None

    serve(tokenizer, test)


@pytest.mark.parametrize(
    ("parameters", "text", "reason"),
    [
        ({"max_new_tokens": 4}, "Hell", "length"),
        ({"stop": ["lo y", "zz"]}, "Hello y", "stop_sequence"),
        ({"stop": ["x"]}, "Hello you", "eos_token"),
    ],
)
def test_streamed_and_whole_answers_end_alike(tokenizer: Tokenizer, parameters: dict[str, Any], text: str, reason: str) -> None:
    async def test(server: Server) -> None:
        body = with_parameters(details=True, **parameters)
        events = await server.events("/generate_stream", body)
        _, whole, _ = await server.post("/generate", body)
        assert events[-1]["generated_text"] == whole["generated_text"] == text
        assert events[-1]["details"]["finish_reason"] == whole["details"]["finish_reason"] == reason
        assert [event["token"] for event in events] == whole["details"]["tokens"]

    serve(tokenizer, test)


def test_root_answers_as_hugging_faces_clients_expect(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        assert (await server.post("/", HELLO))[1] == [{"generated_text": "hiHello you"}]
        assert (await server.post("/", with_parameters(return_full_text=False)))[1] == [{"generated_text": "Hello you"}]
        assert (await server.post("/generate", with_parameters(return_full_text=True)))[1] == {"generated_text": "hiHello you"}
        events = await server.events("/", {**HELLO, "stream": True})
        assert events[-1]["generated_text"] == "hiHello you"
        assert len(events) == 10

    serve(tokenizer, test)


def test_missing_parameters_sample_and_empty_ones_do_not(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for body in ({"inputs": "hi"}, {"inputs": "hi", "parameters": {}}, {"inputs": "hi", "parameters": None}):
            await server.post("/generate", body)
        assert [request.sampling.temperature for request in server.batcher.requests] == [1.0, 0.0, 1.0]

    serve(tokenizer, test)


def test_nulls_are_nothing(tokenizer: Tokenizer) -> None:
    names = "best_of temperature repetition_penalty frequency_penalty top_k top_p typical_p do_sample return_full_text stop "
    names += (
        "truncate watermark details decoder_input_details seed top_n_tokens grammar adapter_id presence_penalty min_p logit_bias"
    )

    async def test(server: Server) -> None:
        body = with_parameters(**dict.fromkeys(names.split())) | {"stream": None, "unknown": {"a": [1]}}
        assert (await server.post("/generate", body))[:2] == (200, {"generated_text": "Hello you"})

    serve(tokenizer, test)


def test_langchains_contradictions_are_fine(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        body = with_parameters(do_sample=False, temperature=0.8, top_p=0.95, typical_p=0.95, stop=[], watermark=False)
        assert (await server.post("/", body))[0] == 200

    serve(tokenizer, test)


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temperature": 0}, "`temperature` must be strictly positive"),
        (
            {"max_new_tokens": 10_000},
            "`inputs` tokens + `max_new_tokens` must be <= 128. Given: 3 `inputs` tokens and 10000 `max_new_tokens`",
        ),
        ({"grammar": {"type": "json", "value": {}}}, "grammar is not supported"),
        ({"watermark": True}, "`watermark` is not supported"),
        ({"adapter_id": "x"}, "`adapter_id` is not supported: the server has no adapters"),
        ({"top_k": "many"}, "Expected `int | null`, got `str` - at `$.parameters.top_k`"),
        ({"stop": "x"}, "Expected `array | null`, got `str` - at `$.parameters.stop`"),
    ],
)
def test_what_is_invalid_is_a_422(tokenizer: Tokenizer, path: str, parameters: dict[str, Any], message: str) -> None:
    async def test(server: Server) -> None:
        status, body, _ = await server.post(path, with_parameters(**parameters) | {"stream": True})
        assert (status, body) == (422, {"error": f"Input validation error: {message}", "error_type": "validation"})
        assert server.metrics.failures == ["validation"]
        assert server.batcher.requests == []

    serve(tokenizer, test)


def test_what_a_stream_lacks(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for parameters, message in (
            ({"best_of": 2, "do_sample": True}, "`best_of` != 1 is not supported when streaming tokens"),
            ({"decoder_input_details": True}, "`decoder_input_details` == true is not supported when streaming tokens"),
        ):
            status, body, _ = await server.post("/generate_stream", with_parameters(**parameters))
            assert (status, body["error"]) == (422, f"Input validation error: {message}")

    serve(tokenizer, test)


BODIES: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"{", 400),
    (b'{"inputs": "a"} x', 400),
    (b'{"inputs": "a", "parameters": {"temperature": NaN}}', 400),
    (b'{"inputs": "a", "parameters": {"temperature": 1e999}}', 422),
    (b'{"inputs": "a", "parameters": {"seed": 1.5}}', 422),
    (b'{"inputs": "\xff"}', 400),
    (b'{"inputs": "\\ud800"}', 400),
    (b'{"inputs": "\\ud800x"}', 400),
    (b'{"inputs": "\\udc00"}', 400),
    (b"\xef\xbb\xbf{}", 400),
    (b'{"inputs": ' + b"[" * 100_000, 422),
    (b'{"inputs": "a", "other": ' + b"[" * 100_000, 400),
    (b'{"inputs": "a", "parameters": {"grammar": ' + b"[" * 100_000, 400),
    (b"[]", 422),
    (b"null", 422),
    (b"7", 422),
    (b"{}", 422),
    (b'{"inputs": null}', 422),
    (b'{"inputs": ["a"]}', 422),
    (b'{"inputs": ""}', 422),
    (b'{"inputs": "a", "parameters": []}', 422),
    (b'{"inputs": "a", "parameters": {"do_sample": "yes"}}', 422),
    (b'{"inputs": "a", "parameters": {"max_new_tokens": -1}}', 422),
    (b'{"inputs": "a", "parameters": {"max_new_tokens": 99999999999999999999999999}}', 422),
    (b'{"inputs": "a", "parameters": {"logit_bias": {"x": 1}}}', 422),
    (b'{"inputs": "a", "parameters": {"seed": ' + b"9" * 5000 + b"}}", 422),
    (b'{"inputs": "a", "parameters": {"max_new_tokens": ' + b"9" * 4000 + b"}}", 422),
    (b'{"inputs": "a", "parameters": {"top_k": ' + b"9" * 5000 + b"}}", 422),
    (b'{"inputs": "a", "parameters": {"temperature": ' + b"9" * 400 + b"}}", 422),
    (b'{"inputs": "a", "parameters": {"logit_bias": {"' + b"9" * 5000 + b'": 1}}}', 422),
]


@pytest.mark.parametrize(("data", "expected"), BODIES)
def test_bad_bodies(tokenizer: Tokenizer, data: bytes, expected: int) -> None:
    async def test(server: Server) -> None:
        for path in ("/generate", "/generate_stream", "/"):
            status, body, _ = await server.post(path, data)
            assert status == expected, body
            assert body["error_type"] == "validation"
            assert set(body) == {"error", "error_type"}
        assert server.metrics.failures == ["validation"] * 3
        assert (await server.post("/generate", HELLO))[0] == 200  # unharmed

    serve(tokenizer, test)


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
@pytest.mark.parametrize(
    ("behaviour", "status", "body", "headers"),
    [
        ({"refuses": Overloaded("x")}, 429, {"error": "Model is overloaded", "error_type": "overloaded"}, {"Retry-After": "1"}),
        (
            {"refuses": Broken("rank 0 died")},
            424,
            {"error": "Request failed during generation: rank 0 died", "error_type": "generation"},
            {},
        ),
        (
            {"ready": False, "stage": "loading weights", "limits": None},
            503,
            {"error": "not ready: loading weights", "error_type": "unavailable"},
            {"Retry-After": "1"},
        ),
        ({"ready": False, "stage": "draining"}, 503, {"error": "draining", "error_type": "unavailable"}, {"Retry-After": "1"}),
    ],
)
def test_failures_before_the_first_byte_are_statuses(
    tokenizer: Tokenizer, path: str, behaviour: dict[str, Any], status: int, body: dict[str, str], headers: dict[str, str]
) -> None:
    async def test(server: Server) -> None:
        found, answer, response = await server.post(path, HELLO)
        assert (found, answer) == (status, body)
        assert all(response.headers[name] == value for name, value in headers.items())

    serve(tokenizer, test, **behaviour)


def test_a_failure_in_the_middle_is_an_event(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        events = await server.events("/generate_stream", HELLO)
        assert [event["index"] for event in events[:-1]] == [1, 2, 3]
        assert events[-1] == {"error": "Request failed during generation: gone", "error_type": "generation"}
        status, body, _ = await server.post("/generate", HELLO)
        assert (status, body["error_type"]) == (424, "generation")

    serve(tokenizer, test, breaks=(3, Broken("gone")))


def test_the_first_event_leaves_before_the_last_token_is_there(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        assert server.batcher.pace is not None
        server.batcher.pace.release()  # the response begins with the first token
        async with server.client.post("/generate_stream", json=HELLO) as response:
            for count in range(1, 11):
                line = await response.content.readline()
                assert json.loads(line.removeprefix(b"data: "))["index"] == count
                assert server.batcher.told == count
                assert await response.content.readline() == b"\n"
                server.batcher.pace.release()

    serve(tokenizer, test, pace=asyncio.Semaphore(0))


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_a_client_that_leaves_closes_the_stream(tokenizer: Tokenizer, path: str, tokens: int) -> None:
    async def test(server: Server) -> None:
        task = asyncio.create_task(server.post(path, HELLO))
        await until(lambda: server.batcher.opened == 1)
        assert server.batcher.pace is not None
        for _ in range(tokens):
            server.batcher.pace.release()
        await until(lambda: server.batcher.told == tokens)
        assert server.batcher.closed == 0
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await until(lambda: server.batcher.closed == 1)

    serve(tokenizer, test, pace=asyncio.Semaphore(0))


def test_a_client_that_stops_reading_holds_the_stream_and_leaving_closes_it(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    most = 100_000

    async def test(server: Server) -> None:
        response = await server.client.post("/generate_stream", json=with_parameters(max_new_tokens=most, top_n_tokens=5))
        told = -1
        while told != server.batcher.told:  # buffers between us fill
            told = server.batcher.told
            await asyncio.sleep(0.3)
        assert told < most
        assert server.batcher.closed == 0
        response.close()
        await until(lambda: server.batcher.closed == 1)
        assert caplog.records == []

    serve(tokenizer, test, says="x" * most, limits=Limits(max_input_tokens=100, max_total_tokens=2 * most, vocabulary=300))


def test_silence_is_filled_with_comments(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE", 0.05)

    async def test(server: Server) -> None:
        assert server.batcher.pace is not None
        async with server.client.post("/generate_stream", json=HELLO) as response:
            assert response.status == 200  # before the first token: it takes too long
            assert await response.content.readline() == b":\n"
            server.batcher.pace.release()
            lines = [await response.content.readline() for _ in range(12)]
            assert any(line.startswith(b'data: {"index":1') for line in lines)
            assert lines.count(b":\n") > 2

    serve(tokenizer, test, pace=asyncio.Semaphore(0))


def test_line_ends_of_others_are_escaped(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        async with server.client.post("/generate_stream", json=HELLO) as response:
            data = await response.read()
        assert b"\\u2028" in data
        assert len(data.decode().splitlines()) == data.count(b"\n")
        texts = [json.loads(line[6:])["token"]["text"] for line in data.split(b"\n") if line]
        assert "".join(texts) == "a\u2028b\u2029c\u0085d</s>"

    serve(tokenizer, test, says="a\u2028b\u2029c\u0085d</s>")


def test_tokenize_speaks_two_dialects(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, spans, _ = await server.post("/tokenize", {"inputs": "hé"})
        assert spans[0] == {"id": 0, "text": "", "start": 0, "stop": 0}
        assert (spans[1]["text"], spans[1]["start"], spans[1]["stop"]) == ("h", 0, 1)
        assert spans[-1]["stop"] == 3
        _, counted, _ = await server.post("/tokenize", {"model": "m", "prompt": "hi"})
        assert (counted["count"], counted["max_model_len"]) == (3, 128)
        assert counted["tokens"] == tokenizer.encode("hi")
        assert (await server.post("/tokenize", {"prompt": "hi", "add_special_tokens": False}))[1]["count"] == 2
        assert len((await server.post("/tokenize", {"inputs": "abcd", "parameters": {"truncate": 2}}))[1]) == 2
        assert (await server.post("/tokenize", {}))[0] == 422

    serve(tokenizer, test)


def test_info(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, data, _ = await server.get("/info")
        info = json.loads(data)
        assert (info["model_id"], info["max_input_tokens"], info["max_total_tokens"]) == ("some/model", 100, 128)
        assert info["max_client_batch_size"] == 4

    serve(tokenizer, test, limits=Limits(100, 128, 300))


def test_health_tells_ready_from_loading(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for path in ("/health", "/ping", "/"):
            assert (await server.get(path))[:2] == (200, b"")
        server.batcher.ready, server.batcher.stage = False, "loading weights: 40 %"
        status, data, _ = await server.get("/health")
        assert status == 503
        assert json.loads(data) == {"error": "unhealthy", "error_type": "healthcheck", "stage": "loading weights: 40 %"}

    serve(tokenizer, test)


def test_metrics_also_by_head(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, data, response = await server.get("/metrics")
        assert (status, data) == (200, b"tgi_queue_size 0\n")
        assert response.headers["Content-Type"].startswith("text/plain")
        async with server.client.head("/metrics") as head:
            assert head.status == 200

    serve(tokenizer, test)


def test_a_key_is_asked_of_all_but_probes(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}, {"Authorization": "sésame"}):
            status, body, response = await server.post("/generate", HELLO, headers=headers)
            assert (status, body["error_type"]) == (401, "unauthorized")
            assert response.headers["WWW-Authenticate"] == "Bearer"
        for scheme in ("Bearer", "bearer"):
            assert (await server.post("/generate", HELLO, headers={"Authorization": f"{scheme} sésame"}))[0] == 200
        assert (await server.get("/health"))[0] == 200
        assert (await server.get("/metrics"))[0] == 401

    serve(tokenizer, test, settings={"api_keys": ("sésame",)})


def test_large_bodies_are_refused_before_they_are_read(tokenizer: Tokenizer) -> None:
    async def pieces() -> Any:
        for _ in range(20):
            yield b" " * 100

    async def test(server: Server) -> None:
        assert (await server.post("/generate", {"inputs": "x" * 1000}))[:2] == (
            413,
            {"error": "the body may have 1000 bytes", "error_type": "payload_too_large"},
        )
        async with server.client.post("/generate", data=pieces()) as response:  # no Content-Length
            assert response.status == 413
            assert (await response.json())["error_type"] == "payload_too_large"
        assert (await server.post("/generate", HELLO))[0] == 200

    serve(tokenizer, test, settings={"payload_limit": 1000})


def test_compressed_bodies_are_refused(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, body, _ = await server.post("/generate", b"\x1f\x8bnonsense", headers={"Content-Encoding": "gzip"})
        assert (status, body["error_type"]) == (415, "unsupported_encoding")

    serve(tokenizer, test)


def test_unknown_routes_and_methods_are_json(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, body, _ = await server.post("/nowhere", {})
        assert (status, body["error_type"]) == (404, "not_found")
        status, data, response = await server.get("/generate")
        assert (status, json.loads(data)["error_type"]) == (405, "method_not_allowed")
        assert response.headers["Allow"] == "POST"

    serve(tokenizer, test)


def test_a_request_id_comes_back(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for path in ("/generate", "/generate_stream", "/nowhere"):
            async with server.client.post(path, json=HELLO, headers={"X-Request-ID": "abc-1"}) as response:
                assert response.headers["X-Request-ID"] == "abc-1"

    serve(tokenizer, test)


def test_the_demo_models_tokenizer_serves(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "demo" / "model"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("no demo model here")
    tokenizer = Tokenizer(folder)
    (end,) = tokenizer.eos_ids

    async def test(server: Server) -> None:
        _, body, _ = await server.post("/generate", with_parameters(details=True))
        assert body["generated_text"] == "Once upon a time."
        assert body["details"]["tokens"][-1]["id"] == end
        chat = {"messages": [{"role": "user", "content": "Tell me a story."}]}
        _, body, _ = await server.post("/v1/chat/completions", chat)
        assert body["choices"][0]["message"]["content"] == "Once upon a time."

    limits = Limits(max_input_tokens=100, max_total_tokens=128, vocabulary=100_000)
    serve(tokenizer, test, says="Once upon a time." + tokenizer.token_text(end), limits=limits)


def test_the_best_answer_and_the_others(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        server.batcher.logprob = 0.5  # so that later choices are more probable
        parameters = {"best_of": 3, "do_sample": True, "seed": 4, "details": True, "max_new_tokens": 20, "top_n_tokens": 1}
        status, body, response = await server.post("/generate", {"inputs": "hi", "parameters": parameters})
        assert status == 200
        assert body["generated_text"] == "2Hello you"
        others = body["details"]["best_of_sequences"]
        assert [other["generated_text"] for other in others] == ["Hello you", "1Hello you"]
        names = ["generated_text", "finish_reason", "generated_tokens", "seed", "prefill", "tokens", "top_tokens"]
        assert [list(other) for other in others] == [names] * 2
        assert (others[0]["finish_reason"], others[0]["generated_tokens"], others[0]["seed"]) == ("eos_token", 10, 4)
        assert len(others[0]["tokens"]) == len(others[0]["top_tokens"]) == 10
        assert response.headers["x-generated-tokens"] == "11", "the best one's, as in TGI"
        assert response.headers["x-prompt-tokens"] == str(len(server.batcher.requests[0].prompt))
        _, body, _ = await server.post("/generate", {"inputs": "hi", "parameters": {"best_of": 2, "do_sample": True}})
        assert list(body) == ["generated_text"]
        _, body, _ = await server.post("/generate", {"inputs": "hi", "parameters": {"details": True}})
        assert "best_of_sequences" not in body["details"]

    serve(tokenizer, test)


def test_the_best_of_many_needs_sampling(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for given, message in (
            ({"best_of": 2}, "Input validation error: you must use sampling when `best_of` is > 1"),
            ({"best_of": 17, "do_sample": True}, "Input validation error: `best_of` must be > 0 and <= 16. Given: 17"),
            ({"best_of": 17}, "Input validation error: `best_of` must be > 0 and <= 16. Given: 17"),
        ):
            status, body, _ = await server.post("/generate", {"inputs": "hi", "parameters": given})
            assert (status, body["error"]) == (422, message)

    serve(tokenizer, test)


def test_priority_and_timeout_are_parameters(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        body = {"inputs": "hi", "parameters": {"priority": "batch", "timeout": 1.5}}
        await server.post("/generate", body, headers={"Authorization": "Bearer k"})
        request = server.batcher.requests[-1]
        assert (request.priority, request.timeout, len(request.tenant)) == ("batch", 1.5, 16)
        for priority, given in ((1, "; numbers are not supported. Given: 1"), ("", '. Given: ""')):
            status, body, _ = await server.post("/generate", {"inputs": "hi", "parameters": {"priority": priority}})
            message = f'Input validation error: `priority` must be one of "interactive", "normal", "batch"{given}'
            assert (status, body) == (422, {"error": message, "error_type": "validation"})
        status, body, _ = await server.post("/generate", {"inputs": "hi", "parameters": {"timeout": 0}})
        assert (status, body["error"]) == (422, "Input validation error: `timeout` must be strictly positive")

    serve(tokenizer, test)


def test_a_deadline_that_is_over_is_a_504(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        server.batcher.refuses = Expired("late: 7 tokens were there")
        for path in ("/generate", "/generate_stream"):
            status, body, response = await server.post(path, {"inputs": "hi"})
            assert (status, body) == (504, {"error": "late: 7 tokens were there", "error_type": "timeout"})
            assert response.headers["x-should-retry"] == "false"
        server.batcher.refuses = None
        server.batcher.breaks = (3, Expired("late: 3 tokens were there"))
        *tokens, last = await server.events("/generate_stream", {"inputs": "hi"})
        assert len(tokens) == 3
        assert last == {"error": "late: 3 tokens were there", "error_type": "timeout"}

    serve(tokenizer, test)


def test_no_more_answers_than_may_run_at_once(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, body, _ = await server.get("/info")
        assert json.loads(body)["max_best_of"] == 3
        status, body, _ = await server.post("/generate", {"inputs": "hi", "parameters": {"best_of": 4, "do_sample": True}})
        assert (status, body["error"]) == (422, "Input validation error: `best_of` must be > 0 and <= 3. Given: 4")
        status, body, _ = await server.post("/v1/completions", {"model": "m", "prompt": "hi", "n": 4})
        assert (status, body["error"]["message"]) == (400, "`n` must be from 1 to 3 (--max-batch-size). Given: 4")

    serve(tokenizer, test, settings={"max_batch_size": 3})
