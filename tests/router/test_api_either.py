"""Routes that accept both TGI's and OpenAI's bodies: /invocations (SageMaker), /vertex, /tokenize, /chat_tokenize."""

import json
from collections.abc import Collection
from typing import Any

import pytest

from penstock.router.api import body
from penstock.router.config import Misconfigured
from penstock.router.request import Overloaded
from penstock.router.text import Tokenizer
from penstock.tests.router.fake_batcher import Server, make_tokenizer, serve

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEMPLATED = "[user]hi[assistant]"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_invocations_accepts_inputs_messages_and_prompt(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        assert (await server.post("/invocations", {"inputs": "hi"}))[1] == [{"generated_text": "hiHello you"}]
        _, body, _ = await server.post("/invocations", {**CHAT, "model": "tgi"})
        assert body["choices"][0]["message"]["content"] == "Hello you"
        assert body["object"] == "chat.completion"
        _, body, _ = await server.post("/invocations", {"prompt": "hi"})
        assert (body["object"], body["choices"][0]["text"]) == ("text_completion", "Hello you")
        events = await server.events("/invocations", {"inputs": "hi", "stream": True})
        assert (events[0]["index"], events[-1]["generated_text"]) == (1, "hiHello you")
        nulls = {"inputs": None, "messages": None, "prompt": None}
        for request_body in (CHAT, {"prompt": "hi"}, nulls | CHAT, nulls | {"prompt": "hi"}):
            assert (await server.events("/invocations", {**request_body, "stream": True}))[-1] == "[DONE]"

    serve(tokenizer, test)


def test_field_names_of_a_body_are_parsed_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    names_of = body._names

    def recording_names(text: str) -> Collection[str]:
        found.append(names_of(text))
        return found[-1]

    async def test(server: Server) -> None:
        for path, request_body in (("/invocations", {"prompt": "hi", "new": [1]}), ("/tokenize", CHAT)):
            status, _, response = await server.post(path, request_body)
            assert (status, found.pop(), found) == (200, tuple(request_body), [])
            assert response.headers.get("x-ignored-fields") == ("new" if "new" in request_body else None)

    monkeypatch.setattr(body, "_names", recording_names)
    serve(tokenizer, test)


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"{", 400, "JSON"),
        (b"[]", 422, "`object`"),
        (b"{}", 422, "`inputs`, `messages` or `prompt`"),
        (b'{"inputs": 1}', 422, "inputs`"),
        (b'{"inputs": "a", "inputs": "b"}', 422, "`inputs`"),
        (b'{"inputs": "a", "parameters": {"top_k": 0}}', 422, "`top_k`"),
        (b'{"messages": []}', 422, "`messages`"),
        (b'{"messages": 1}', 422, "messages`"),
        (b'{"prompt": []}', 422, "`prompt`"),
    ],
)
def test_invalid_bodies_of_invocations_have_tgis_error_format(tokenizer: Tokenizer, data: bytes, status: int, message: str) -> None:
    async def test(server: Server) -> None:
        found, body, _ = await server.post("/invocations", data)
        assert (found, set(body)) == (status, {"error", "error_type"})
        assert message in body["error"]

    serve(tokenizer, test)


def test_vertex_returns_a_prediction_for_each_instance(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        instances: list[Any] = [
            {"inputs": "hi", "messages": None},
            {"inputs": "ho", "parameters": {"max_new_tokens": 4, "return_full_text": True}},
            {**CHAT, "max_tokens": 5, "temperature": 0.7, "top_p": 0.9, "truncate_prompt_tokens": 3},
        ]
        status, body, response = await server.post("/vertex", {"instances": instances})
        assert (status, body) == (200, {"predictions": ["Hello you", "hoHell", "Hello"]})
        assert response.headers["x-generated-tokens"] == "19"
        default, truncated, chat = server.batcher.requests
        assert default.sampling.temperature == 1.0, "no parameters: sampled, as /generate"
        assert truncated.max_new_tokens == 4
        assert (chat.max_new_tokens, chat.sampling.temperature, chat.sampling.top_p) == (5, 0.7, 0.9)
        assert len(chat.prompt) == 3

    serve(tokenizer, test)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"instances": []}, "`instances` must have from 1 to 3 entries. Given: 0"),
        ({"instances": [{"inputs": "a"}] * 4}, "`instances` must have from 1 to 3 entries. Given: 4"),
        ({}, "`instances`"),
        ({"instances": {"inputs": "a"}}, "instances`"),
        ({"instances": [{"inputs": "a"}, 3]}, "instances[1]: "),
        ({"instances": [{"inputs": "a"}, {"inputs": 3}]}, "instances[1]: Expected `str`, got `int` - at `$.inputs`"),
        ({"instances": [{"prompt": "a"}]}, "instances[0]: Object missing required field `inputs`"),
        (
            {"instances": [{"inputs": "a"}, {"inputs": "a", "parameters": {"top_k": -1}}]},
            "error: instances[1]: `top_k` must be strictly positive",
        ),
        ({"instances": [{"inputs": "a", "parameters": {"best_of": 2, "do_sample": True}}]}, "neither `stream` nor `best_of`"),
        ({"instances": [{"inputs": "a", "stream": True}]}, "neither `stream` nor `best_of`"),
        ({"instances": [{**CHAT, "n": 2}]}, "`n` is not allowed for this endpoint"),
        ({"instances": [{**CHAT, "prompt_logprobs": 0}]}, "`prompt_logprobs` is not allowed for this endpoint"),
        ({"instances": [{**CHAT, "echo": True}]}, "`echo` is not supported"),
        ({"instances": [{**CHAT, "max_completion_tokens": 0}]}, "`max_completion_tokens` must be strictly positive"),
        ({"instances": [{**CHAT, "truncate_prompt_tokens": 0}]}, "`truncate_prompt_tokens` must be strictly positive"),
        ({"instances": [{**CHAT, "beam_width": 99}]}, "`beam_width` must be > 0"),
        ({"instances": [{**CHAT, "stream": True}]}, "`stream` is not allowed for this endpoint"),
        ({"instances": [{**CHAT, "max_tokens": 0}]}, "error: instances[0]: `max_tokens` must be strictly positive"),
    ],
)
def test_invalid_vertex_instances_are_a_422_that_names_them(tokenizer: Tokenizer, body: dict[str, Any], message: str) -> None:
    async def test(server: Server) -> None:
        status, answer, _ = await server.post("/vertex", body)
        assert (status, answer["error_type"]) == (422, "validation")
        assert message in answer["error"]
        assert server.batcher.requests == []

    serve(tokenizer, test, settings={"max_concurrent_requests": 3})


def test_failure_of_one_vertex_instance_fails_the_request(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, body, response = await server.post("/vertex", {"instances": [{"inputs": "a"}, {"inputs": "b"}]})
        assert (status, body["error_type"], response.headers["Retry-After"]) == (429, "overloaded", "1")

    serve(tokenizer, test, fails_with=Overloaded("full"))


def test_aip_predict_and_health_routes_are_served(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        request_body = {"instances": [{"inputs": "hi"}]}
        path = "/v1/endpoints/1/deployedModels/2:predict"
        assert (await server.post(path, request_body))[0] == 401
        for each in (path, "/vertex"):
            assert (await server.post(each, request_body, headers={"Authorization": "Bearer k"}))[1] == {
                "predictions": ["Hello you"]
            }
        assert (await server.get("/ready"))[:2] == (200, b"")
        assert (await server.get("/health"))[:2] == (200, b"")

    settings = {"aip_predict_route": "/v1/endpoints/1/deployedModels/2:predict", "aip_health_route": "/ready", "api_keys": ("k",)}
    serve(tokenizer, test, settings=settings)
    same = {"aip_predict_route": "/vertex", "aip_health_route": "/health", "api_keys": ("k",)}

    async def alive(server: Server) -> None:
        assert (await server.get("/health"))[0] == 200

    serve(tokenizer, alive, settings=same)


@pytest.mark.parametrize(
    ("setting", "path", "owner"),
    [
        ("aip_predict_route", "/generate", "POST /generate"),
        ("aip_predict_route", "/", "POST /"),
        ("aip_health_route", "/metrics", "GET /metrics"),
        ("aip_health_route", "/v1/models/x", "GET /v1/models/{id}"),
        ("aip_health_route", "/docs", "GET /docs"),
    ],
)
def test_aip_route_that_the_server_has_already_is_refused_at_startup(
    tokenizer: Tokenizer, setting: str, path: str, owner: str
) -> None:
    """Otherwise the other handler would answer, and metrics would need no API key."""

    async def test(server: Server) -> None:
        raise AssertionError("it starts")

    with pytest.raises(Misconfigured) as caught:
        serve(tokenizer, test, settings={setting: path})
    assert str(caught.value) == f"--{setting.replace('_', '-')} {path} is the server's own {owner}: choose another path"


def test_aip_route_below_admin_is_refused_at_startup(tokenizer: Tokenizer) -> None:
    """Otherwise it would need no API key: below /admin/ each handler checks for the admin key itself."""

    async def test(server: Server) -> None:
        raise AssertionError(f"it starts, and says {await server.post('/admin/vertex', {'instances': [{'inputs': 'hi'}]})}")

    settings = {"aip_predict_route": "/admin/vertex", "api_keys": ("k",), "admin_key": "a"}
    with pytest.raises(Misconfigured, match="--aip-predict-route /admin/vertex is below the server's own /admin/: choose another"):
        serve(tokenizer, test, settings=settings)


def test_aip_health_route_may_be_an_existing_probe(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        assert (await server.get("/health/live"))[0] == 200
        assert (await server.post("/info", {"instances": [{"inputs": "hi"}]}))[1] == {"predictions": ["Hello you"]}

    serve(tokenizer, test, settings={"aip_health_route": "/health/live", "aip_predict_route": "/info"})


def test_chat_tokenize_returns_the_templated_text_and_tokens(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, body, _ = await server.post("/chat_tokenize", {**CHAT, "max_tokens": 5})
        assert body["templated_text"] == TEMPLATED
        tokens = body["tokenize_response"]
        assert "".join(token["text"] for token in tokens) == TEMPLATED
        assert tokens[1] == {"id": tokenizer.encode("u", False)[0], "text": "u", "start": 1, "stop": 2}
        _, body, _ = await server.post("/chat_tokenize", {"messages": [{"role": "assistant", "content": "é"}]})
        assert body["templated_text"] == "[assistant]é", "continued, as in an answer"
        for request_body in ({}, {"messages": []}, {"messages": [{"role": 1}]}, {"messages": "hi"}):
            status, body, _ = await server.post("/chat_tokenize", request_body)
            assert (status, "messages" in body["error"]) == (422, True)
        assert server.batcher.requests == []

    serve(tokenizer, test, ready=False, limits=None)


def test_tokenize_of_a_chat_answers_in_vllms_format(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, body, _ = await server.post("/tokenize", {**CHAT, "model": "m"})
        ids = tokenizer.encode(TEMPLATED, False)
        assert body == {"count": len(ids), "max_model_len": 128, "tokens": ids, "token_strs": None}
        _, body, _ = await server.post("/tokenize", {**CHAT, "return_token_strs": True})
        assert "".join(body["token_strs"]) == TEMPLATED
        _, body, _ = await server.post("/tokenize", {"messages": None, "prompt": "hi"})
        assert body["count"] == 3
        status, data, _ = await server.post("/tokenize", b'{"messages": [')
        assert (status, "`messages`" in json.dumps(data)) == (400, True)

    serve(tokenizer, test)
