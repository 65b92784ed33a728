"""The OpenAPI document: the routes, and for each what it takes and sends. Schemas come from the types that read and write them.

Answers that are no type of ours, but put together (OpenAI's), are described in `openapi_answers`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import msgspec

from ..config import RouterConfig
from . import anthropic, openai_bodies, responses, tgi_shapes
from . import openapi_answers as answers
from .adapters import LOAD, UNLOAD, LoadBody, UnloadBody
from .anthropic import MessagesBody
from .either import TokenizeChatBody
from .errors import ANTHROPIC_PATH, OPENAI_PATH
from .openai_bodies import ChatBody, CompletionBody, unsupported
from .openapi_descriptions import WORDS
from .page import Stats
from .responses import ResponsesBody
from .tgi_shapes import BeamsEvent, DetokenizeBody, Event, GenerateAnswer, GenerateBody, GenerateParameters, SpanJson, TokenizeBody

Json = dict[str, Any]

TEMPLATE = "#/components/schemas/{name}"
JSON, TEXT, SSE, HTML = "application/json", "text/plain", "text/event-stream", "text/html"
MEANINGS = {
    400: "The body is no JSON, or the request is invalid.",
    401: "An API key is needed.",
    404: "There is no such thing.",
    408: "The body did not come in time.",
    409: "Something else has to go first: the message says what.",
    413: "The body is too large.",
    415: "The body is compressed.",
    422: "The request is invalid: the message names the field and what would do.",
    424: "The shards failed while they computed the answer.",
    429: "Too many requests, or too large ones together, are in flight: come again after Retry-After.",
    500: "The server failed.",
    503: "The model loads, the server shuts down, or its shards are being started again.",
    504: "The answer was not complete by the request's own `timeout`.",
}
# Fields of bodies that are there to be refused by name.
REFUSED: dict[type, Collection[str]] = {
    GenerateParameters: tgi_shapes.UNSUPPORTED,
    CompletionBody: openai_bodies.UNSUPPORTED,
    ChatBody: openai_bodies.UNSUPPORTED_IN_CHATS,
    TokenizeChatBody: openai_bodies.UNSUPPORTED_IN_CHATS,
    ResponsesBody: responses.UNSUPPORTED,
    MessagesBody: anthropic.UNSUPPORTED,
}
BODY, RUN = (400, 401, 408, 413, 415, 429, 500), (503, 504)  # statuses of routes that read a body; that compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A route. Types are whatever msgspec makes a schema of; a tuple of them is any one of these."""

    path: str
    summary: str
    tag: str
    body: Any = None  # None: the route is GET
    answer: Any = None  # None: empty
    kind: str = JSON  # the answer's content type
    event: Any = None  # of a stream, if the route streams
    statuses: Sequence[int] = (401,)
    refusal: Any = None  # what 503 says, where that is no error
    query: str = ""  # a parameter that may be in the query

    @property
    def types(self) -> list[Any]:
        """All that it names."""
        named = (self.body, self.answer, self.event, self.refusal)
        return [each for one in named if one is not None for each in (one if isinstance(one, tuple) else (one,))]

    @property
    def method(self) -> str:
        return "get" if self.body is None else "post"


TGI, OPENAI, ANTHROPIC, VLLM, OPERATION = "text-generation-inference", "OpenAI", "Anthropic", "tokens", "operation"
OURS = (*BODY, 422, 424, *RUN)
THEIRS = (*BODY, 404, *RUN)
OPERATIONS = (
    Operation(
        path="/",
        summary="Completes a text, as `stream` says",
        tag=TGI,
        body=GenerateBody,
        answer=list[GenerateAnswer],
        event=(Event, BeamsEvent),
        statuses=OURS,
    ),
    Operation(path="/generate", summary="Completes a text", tag=TGI, body=GenerateBody, answer=GenerateAnswer, statuses=OURS),
    Operation(
        path="/generate_stream",
        summary="Completes a text, an event for each token",
        tag=TGI,
        body=GenerateBody,
        event=(Event, BeamsEvent),
        statuses=OURS,
    ),
    Operation(
        path="/invocations",
        summary="Amazon SageMaker's: whatever the body is of",
        tag=TGI,
        body=(GenerateBody, ChatBody, CompletionBody),
        answer=(list[GenerateAnswer], answers.ChatCompletion, answers.Completion),
        event=(Event, BeamsEvent, answers.ChatChunk, answers.CompletionChunk),
        statuses=OURS,
    ),
    Operation(
        path="/vertex",
        summary="Vertex AI's: several prompts and chats",
        tag=TGI,
        body=answers.Instances,
        answer=answers.Predictions,
        statuses=OURS,
    ),
    Operation(path="/info", summary="The model, and what a request may ask", tag=TGI, answer=answers.Info),
    Operation(
        path="/tokenize",
        summary="A text's tokens, or a chat's, in TGI's shape or in vLLM's",
        tag=VLLM,
        body=(TokenizeBody, TokenizeChatBody),
        answer=(list[SpanJson], answers.Tokens),
        statuses=(*BODY, 422),
    ),
    Operation(
        path="/detokenize",
        summary="The text of tokens",
        tag=VLLM,
        body=DetokenizeBody,
        answer=answers.Detokenized,
        statuses=(*BODY, 422),
    ),
    Operation(
        path="/chat_tokenize",
        summary="The prompt that a chat becomes, and its tokens",
        tag=VLLM,
        body=ChatBody,
        answer=answers.TokenizedChat,
        statuses=(*BODY, 422),
    ),
    Operation(
        path="/v1/chat/completions",
        summary="Answers a chat",
        tag=OPENAI,
        body=ChatBody,
        answer=answers.ChatCompletion,
        event=answers.ChatChunk,
        statuses=THEIRS,
    ),
    Operation(
        path="/v1/completions",
        summary="Completes a text",
        tag=OPENAI,
        body=CompletionBody,
        answer=answers.Completion,
        event=answers.CompletionChunk,
        statuses=THEIRS,
    ),
    Operation(
        path="/v1/responses",
        summary="Answers a conversation of items",
        tag=OPENAI,
        body=ResponsesBody,
        answer=answers.Response,
        event=answers.ResponseEvent,
        statuses=THEIRS,
    ),
    Operation(
        path="/v1/messages",
        summary="Answers a conversation of messages",
        tag=ANTHROPIC,
        body=MessagesBody,
        answer=answers.AnthropicMessage,
        event=answers.AnthropicEvent,
        statuses=THEIRS,
    ),
    Operation(
        path="/v1/messages/count_tokens",
        summary="How many tokens its prompt has",
        tag=ANTHROPIC,
        body=MessagesBody,
        answer=answers.CountedTokens,
        statuses=BODY,
    ),
    Operation(path="/v1/models", summary="The model that is served, and its adapters", tag=OPENAI, answer=answers.Models),
    Operation(path="/v1/models/{id}", summary="One of these", tag=OPENAI, answer=answers.Model, statuses=(401, 404)),
    Operation(
        path=LOAD,
        summary="An adapter is loaded while the server runs (--max-loras)",
        tag=OPERATION,
        body=LoadBody,
        answer=str,
        kind=TEXT,
        statuses=(*BODY, 404, 409, 503),
    ),
    Operation(
        path=UNLOAD,
        summary="And unloaded: its requests end as they would have",
        tag=OPERATION,
        body=UnloadBody,
        answer=str,
        kind=TEXT,
        statuses=(*BODY, 404, 503),
    ),
    Operation(path="/health", summary="200 once the model has loaded", tag=OPERATION, statuses=(503,), refusal=answers.Unhealthy),
    Operation(path="/ping", summary="The same", tag=OPERATION, statuses=(503,), refusal=answers.Unhealthy),
    Operation(
        path="/health/ready",
        summary="200 if a request would be taken now, by any replica or by the one that is named",
        tag=OPERATION,
        answer=answers.Ready,
        statuses=(404, 503),
        refusal=answers.NotReady,
        query="replica",
    ),
    Operation(path="/health/live", summary="200 as long as the process answers", tag=OPERATION, answer=answers.Live, statuses=()),
    Operation(path="/metrics", summary="Numbers for Prometheus", tag=OPERATION, answer=str, kind=TEXT),
    Operation(
        path="/stats",
        summary="How the batch stands; an event a second for who accepts them",
        tag=OPERATION,
        answer=Stats,
        event=Stats,
    ),
    Operation(path="/openapi.json", summary="This document", tag=OPERATION, answer=dict[str, Any]),
    Operation(path="/api-doc/openapi.json", summary="The same, where TGI has it", tag=OPERATION, answer=dict[str, Any]),
)


def document(config: RouterConfig) -> Json:
    """The whole of it."""
    operations = list(OPERATIONS)
    if config.aip_predict_route not in ("", "/vertex"):
        vertex = next(operation for operation in OPERATIONS if operation.path == "/vertex")
        operations.append(replace(vertex, path=config.aip_predict_route))
    if config.aip_health_route not in ("", "/", *(operation.path for operation in OPERATIONS)):
        health = next(operation for operation in OPERATIONS if operation.path == "/health")
        operations.append(replace(health, path=config.aip_health_route))
    schemas = Schemas(
        [
            *(each for operation in operations for each in operation.types),
            answers.Error,
            answers.OpenAIError,
            answers.AnthropicError,
        ]
    )
    paths: dict[str, Json] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schemas, bool(config.api_keys))
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "penstock",
            "version": version("penstock"),
            "description": f"The HTTP API of a server of {config.model}: TGI's, OpenAI's, and what operators ask.",
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": schemas.components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


class Schemas:
    """Of types, with what they refer to."""

    def __init__(self, types: Sequence[Any]) -> None:
        found, self.components = msgspec.json.schema_components(types, ref_template=TEMPLATE)
        self._known = {repr(each): schema for each, schema in zip(types, found, strict=True)}
        for body, refused in REFUSED.items():
            for name, field in self.components[body.__name__]["properties"].items():
                if words := unsupported(name) if name in refused else WORDS.get(name):
                    field["description"] = words

    def of(self, wanted: Any) -> Json:
        """One type's, or of several any one."""
        if isinstance(wanted, tuple):
            return {"anyOf": [self.of(each) for each in wanted]}
        return self._known[repr(wanted)]


def _operation(operation: Operation, schemas: Schemas, keys: bool) -> Json:
    responses = {"200": {"description": "The answer.", "content": _content(operation, schemas)}}
    error = schemas.of(_error(operation))
    for status in sorted(operation.statuses):
        schema = error if operation.refusal is None or status != 503 else schemas.of(operation.refusal)
        responses[str(status)] = {"description": MEANINGS[status], "content": {JSON: {"schema": schema}}}
    found: Json = {
        "operationId": operation.method + "".join(c if c.isalnum() else "_" for c in operation.path),
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": responses,
    }
    if operation.body is not None:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas.of(operation.body)}}}
    if "{id}" in operation.path:
        found["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.query:
        found["parameters"] = [{"name": operation.query, "in": "query", "schema": {"type": "string"}}]
    if keys and 401 in operation.statuses:
        found["security"] = [{"key": []}]
    return found


def _content(operation: Operation, schemas: Schemas) -> Json:
    content: Json = {}
    if operation.answer is not None:
        content[operation.kind] = {"schema": schemas.of(operation.answer)}
    if operation.event is not None:
        content[SSE] = {"schema": _events(operation, schemas)}
    return content


def _events(operation: Operation, schemas: Schemas) -> Json:
    """Of each event of a stream."""
    content = {"anyOf": [schemas.of(operation.event), schemas.of(_error(operation))]}
    return {
        "type": "object",
        "description": "Server-sent events that carry JSON. After an error nothing follows. OpenAI's streams end with `[DONE]`. "
        "Events that `stream_beams` asks for are named `beams`; others of these routes have no name.",
        "properties": {
            "event": {"type": "string"},
            "data": {"type": "string", "contentMediaType": JSON, "contentSchema": content},
        },
        "required": ["data"],
    }


def _error(operation: Operation) -> Any:
    if operation.path.startswith(ANTHROPIC_PATH):
        return answers.AnthropicError
    return answers.OpenAIError if operation.path.startswith(OPENAI_PATH) else answers.Error
