"""The OpenAPI document describes all routes, and responses match it; and the page that shows it."""

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from penstock.router.adapters import Adapters
from penstock.router.api.app import make_app
from penstock.router.api.docs import FILES
from penstock.router.api.openai_bodies import ChatBody
from penstock.router.api.openapi import document
from penstock.router.api.openapi_descriptions import FIELD_DESCRIPTIONS
from penstock.router.api.tgi_shapes import GenerateParameters
from penstock.router.config import RouterConfig
from penstock.router.metrics import Metrics
from penstock.router.text import Tokenizer
from penstock.tests.router.fake_batcher import FakeBatcher, Server, make_tokenizer, serve, serving

CONFIG = RouterConfig(folder="", model="some/model")
AIP = {"aip_predict_route": "/predict", "aip_health_route": "/alive"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("model"))


def test_document_is_valid_openapi() -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(document(CONFIG))


@pytest.mark.parametrize("settings", [{}, AIP])
def test_document_has_exactly_the_apps_routes(tokenizer: Tokenizer, settings: dict[str, str]) -> None:
    config = replace(CONFIG, **settings)
    app = make_app(config, tokenizer, FakeBatcher(tokenizer), Metrics())
    routes = {(route.method.lower(), route.resource.canonical) for route in app.router.routes() if route.resource is not None}
    pages = {("get", path) for path in ("/", *FILES)} | {route for route in routes if route[1].startswith("/page/")}
    paths = document(config)["paths"]
    described = {(method, path) for path, methods in paths.items() for method in methods}
    assert {route for route in routes if route[0] != "head"} - pages == described


def test_schemas_have_the_fields_of_the_body_types() -> None:
    schemas = document(CONFIG)["components"]["schemas"]
    assert tuple(schemas["GenerateParameters"]["properties"]) == GenerateParameters.__struct_fields__
    assert tuple(schemas["ChatBody"]["properties"]) == ChatBody.__struct_fields__
    assert schemas["ChatBody"]["required"] == ["messages"]


def test_own_and_unsupported_fields_have_descriptions() -> None:
    schemas = document(CONFIG)["components"]["schemas"]
    fields = [schemas[body]["properties"] for body in ("GenerateParameters", "CompletionBody", "ChatBody", "ResponsesBody")]
    assert set(FIELD_DESCRIPTIONS) <= {name for each in fields for name in each}
    assert [each["speculate"]["description"] for each in fields] == [FIELD_DESCRIPTIONS["speculate"]] * 4
    assert [each["num_beam_groups"]["description"] for each in fields] == ["`num_beam_groups` is not supported"] * 4
    assert (
        schemas["ChatBody"]["properties"]["functions"]["description"]
        == "`functions` is not supported: use `tools`, which chats have"
    )


def test_security_is_described_if_the_route_needs_an_api_key() -> None:
    paths = document(replace(CONFIG, api_keys=("k",)))["paths"]
    assert paths["/generate"]["post"]["security"] == [{"key": []}]
    assert "security" not in paths["/health"]["get"]
    assert "security" not in document(CONFIG)["paths"]["/generate"]["post"]


MESSAGES = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2, "n": 2}
COMPLETION = {"prompt": "Hi", "max_tokens": 20, "logprobs": 1, "echo": True}
DETAILS = {"max_new_tokens": 20, "details": True, "decoder_input_details": True, "top_n_tokens": 2}
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "Hi", "parameters": DETAILS}),
        ("/", {"inputs": "Hi", "parameters": DETAILS}),
        ("/generate", {"inputs": ""}),
        ("/vertex", {"instances": [{"inputs": "Hi", "parameters": {"max_new_tokens": 20}}]}),
        ("/tokenize", {"inputs": "Hi"}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/chat_tokenize", CHAT),
        ("/detokenize", {"tokens": [3]}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "prompt_logprobs": 1}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/completions", COMPLETION),
        ("/v1/completions", {**COMPLETION, "prompt_logprobs": 1, "echo": False}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", MESSAGES),
        ("/v1/messages", {"messages": []}),
        ("/v1/messages/count_tokens", MESSAGES),
    ],
)
def test_responses_match_their_schema(tokenizer: Tokenizer, path: str, body: object) -> None:
    async def test(server: Server) -> None:
        status, answer, _ = await server.post(path, body)
        check_schema(path, status, "application/json", answer)

    serve(tokenizer, test)


def test_message_that_fills_the_context_matches_its_schema(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, answer, _ = await server.post("/v1/messages", MESSAGES | {"max_tokens": 64_000})
        assert answer["stop_reason"] == "model_context_window_exceeded"
        check_schema("/v1/messages", status, "application/json", answer)

    serve(tokenizer, test, generates="x" * 200)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate_stream", {"inputs": "Hi", "parameters": {"max_new_tokens": 20, "details": True, "top_n_tokens": 2}}),
        ("/v1/chat/completions", CHAT | STREAM),
        ("/v1/completions", COMPLETION | STREAM),
    ],
)
def test_stream_events_match_their_schema(tokenizer: Tokenizer, path: str, body: object) -> None:
    async def test(server: Server) -> None:
        events = [event for event in await server.events(path, body) if event != "[DONE]"]
        assert len(events) > 5
        for event in events:
            check_schema(path, 200, "text/event-stream", event, "properties", "data", "contentSchema")

    serve(tokenizer, test)


def test_responses_to_get_match_their_schema(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for path in ("/info", "/v1/models", "/v1/models/some/model", "/v1/models/other", "/stats", "/health/ready", "/health/live"):
            status, data, _ = await server.get(path)
            check_schema(
                "/v1/models/{id}" if path.count("/") > 2 else path, status, "application/json", json.loads(data), method="get"
            )
        server.batcher.ready = False
        for path in ("/health", "/health/ready"):
            status, data, _ = await server.get(path)
            if status == 503:
                check_schema(path, status, "application/json", json.loads(data), method="get")

    serve(tokenizer, test)


@pytest.mark.parametrize(
    ("settings", "expected"), [({"payload_limit_total": 3}, 429), ({"payload_limit": 3}, 413), ({"api_keys": ("k",)}, 401)]
)
def test_every_post_route_describes_429_413_and_401(tokenizer: Tokenizer, settings: dict[str, Any], expected: int) -> None:
    async def test(server: Server) -> None:
        for path, methods in document(CONFIG)["paths"].items():
            if "post" in methods:
                status, answer, _ = await server.post(path, {"inputs": "Hi"})
                assert status == expected
                check_schema(path, status, "application/json", answer)

    serve(tokenizer, test, settings=settings)


def test_every_route_with_a_model_describes_404(tokenizer: Tokenizer) -> None:
    """Names are checked where adapters may come and go."""
    bodies = {
        "/invocations": CHAT,
        "/vertex": {"instances": [{"messages": CHAT["messages"], "model": "unknown"}]},
        "/v1/chat/completions": CHAT,
        "/v1/completions": COMPLETION,
        "/v1/responses": {"input": "Hi"},
        "/v1/messages": MESSAGES,
    }

    async def test() -> None:
        adapters = Adapters(CONFIG.model, room=1)
        async with asyncio.timeout(20), serving(tokenizer, CONFIG, FakeBatcher(tokenizer), adapters=adapters) as server:
            for path, body in bodies.items():
                status, answer, _ = await server.post(path, {**body, "model": "unknown"})
                assert status == 404, path
                check_schema(path, status, "application/json", answer)

    asyncio.run(test())


def check_schema(path: str, status: int, kind: str, answer: object, *path_to_schema: str, method: str = "post") -> None:
    openapi = document(CONFIG)
    schema = openapi["paths"][path][method]["responses"][str(status)]["content"][kind]["schema"]
    for step in path_to_schema:
        schema = schema[step]
    Draft202012Validator({**schema, "components": openapi["components"]}).validate(answer)


def test_docs_page_is_complete_and_loads_nothing_external(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for path in FILES:
            status, data, response = await server.get(path)
            assert status == 200
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            assert not re.search(rb"(?:src|href)=\"(?:https?:)?//", data)
            assert b"innerHTML" not in data
            for found in re.findall(rb"(?:src|href)=\"([^\"]+)\"", data):
                assert f"/{found.decode()}" in {"/openapi.json", "/page/icon.svg", *FILES}
        status, data, _ = await server.get("/openapi.json")
        assert status == 401
        for path in ("/openapi.json", "/api-doc/openapi.json"):  # the second is TGI's
            status, data, response = await server.get(path, headers={"Authorization": "Bearer k"})
            assert json.loads(data)["openapi"] == "3.1.0"

    serve(tokenizer, test, settings={"api_keys": ("k",)})
