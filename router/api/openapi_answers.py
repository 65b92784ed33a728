"""Answers that handlers put together from dictionaries, as types for the OpenAPI document. Nothing is encoded with them.

They allow no field that they do not name, so that a test which compares them with what is sent finds what was forgotten here.
"""

from typing import Any, Literal

import msgspec

from .tgi_shapes import SpanJson

Maybe = msgspec.UnsetType


class Closed(msgspec.Struct, forbid_unknown_fields=True):
    """An object without other fields than these."""


class Error(Closed, kw_only=True):
    """An error as TGI's clients know it."""

    error: str
    error_type: str


class OpenAIProblem(Closed, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(Closed, kw_only=True):
    """An error as OpenAI's clients know it."""

    error: OpenAIProblem
    error_type: str


class AnthropicError(Closed, kw_only=True):
    """An error as Anthropic's clients know it."""

    type: Literal["error"]
    error: OpenAIProblem


class Unhealthy(Closed, kw_only=True):
    error: Literal["unhealthy"]
    error_type: Literal["healthcheck"]
    stage: str
    progress: float | None


class NotReady(Closed, kw_only=True):
    ready: Literal[False]
    stage: str
    progress: float | None


class Ready(Closed, kw_only=True):
    ready: Literal[True]
    stage: str


class Live(Closed, kw_only=True):
    live: Literal[True]


class Info(Closed, kw_only=True):
    model_id: str
    model_sha: str | None
    model_pipeline_tag: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None


class Instances(msgspec.Struct):
    """Body of POST /vertex: each instance is a body of /generate or of /v1/chat/completions."""

    instances: list[Any]


class Predictions(Closed, kw_only=True):
    predictions: list[str]


class Tokens(Closed, kw_only=True):
    """The answer of POST /tokenize to a body with `prompt`, as vLLM has it."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Closed, kw_only=True):
    prompt: str


class TokenizedChat(Closed, kw_only=True):
    tokenize_response: list[SpanJson]
    templated_text: str


class Model(Closed, kw_only=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | Maybe = msgspec.UNSET
    root: str | Maybe = msgspec.UNSET
    max_model_len: int | Maybe = msgspec.UNSET


class Models(Closed, kw_only=True):
    object: Literal["list"]
    data: list[Model]


class Cached(Closed, kw_only=True):
    cached_tokens: int


class CachedAndWritten(Cached, kw_only=True):
    cache_write_tokens: int


class Reasoned(Closed, kw_only=True):
    reasoning_tokens: int


class CompletionDetails(Closed, kw_only=True):
    reasoning_tokens: int | Maybe = msgspec.UNSET
    accepted_prediction_tokens: int | Maybe = msgspec.UNSET
    rejected_prediction_tokens: int | Maybe = msgspec.UNSET


class UsageJson(Closed, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Cached
    completion_tokens_details: CompletionDetails | Maybe = msgspec.UNSET


class Timings(Closed, kw_only=True):
    """Times of a request in milliseconds, as vLLM has them."""

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float | None


class OtherLogprob(Closed, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class Logprob(Closed, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[OtherLogprob]


class ChatLogprobs(Closed, kw_only=True):
    content: list[Logprob]
    refusal: None


class CalledFunction(Closed, kw_only=True):
    name: str | Maybe = msgspec.UNSET
    arguments: str


class ToolCall(Closed, kw_only=True):
    """A tool call. A chunk has the parts of it that are new."""

    index: int | Maybe = msgspec.UNSET
    id: str | Maybe = msgspec.UNSET
    type: Literal["function"] | Maybe = msgspec.UNSET
    function: CalledFunction


class Message(Closed, kw_only=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | Maybe = msgspec.UNSET
    tool_calls: list[ToolCall] | Maybe = msgspec.UNSET


class Delta(Closed, kw_only=True):
    role: Literal["assistant"] | Maybe = msgspec.UNSET
    content: str | Maybe | None = msgspec.UNSET
    refusal: Maybe | None = msgspec.UNSET
    reasoning_content: str | Maybe = msgspec.UNSET
    tool_calls: list[ToolCall] | Maybe = msgspec.UNSET


class ChatChoice(Closed, kw_only=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    score: float | Maybe = msgspec.UNSET
    token_ids: list[int] | Maybe = msgspec.UNSET


class ChatChunkChoice(Closed, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    score: float | Maybe = msgspec.UNSET
    token_ids: list[int] | Maybe = msgspec.UNSET


class CompletionLogprobs(Closed, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Closed, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    score: float | Maybe = msgspec.UNSET
    token_ids: list[int] | Maybe = msgspec.UNSET
    prompt_token_ids: list[int] | Maybe = msgspec.UNSET
    prompt_logprobs: list[dict[str, Any] | None] | Maybe = msgspec.UNSET


class Answered(Closed, kw_only=True):
    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | Maybe = msgspec.UNSET


class ChatCompletion(Answered, kw_only=True):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageJson
    prompt_token_ids: list[int] | Maybe = msgspec.UNSET
    prompt_logprobs: list[dict[str, Any] | None] | Maybe = msgspec.UNSET


class ChatChunk(Answered, kw_only=True):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageJson | Maybe | None = msgspec.UNSET
    prompt_token_ids: list[int] | Maybe = msgspec.UNSET
    metrics: Timings | Maybe = msgspec.UNSET


class Completion(Answered, kw_only=True):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageJson


class CompletionChunk(Answered, kw_only=True):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageJson | Maybe | None = msgspec.UNSET
    metrics: Timings | Maybe = msgspec.UNSET


class ResponseUsage(Closed, kw_only=True):
    input_tokens: int
    input_tokens_details: CachedAndWritten
    output_tokens: int
    output_tokens_details: Reasoned
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    """A response. It also repeats the request's parameters."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    background: Literal[False]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]]
    previous_response_id: None
    store: Literal[False]
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class ResponseEvent(msgspec.Struct, kw_only=True):
    """A server-sent event of a streamed response. Its other fields depend on `type`."""

    type: str
    sequence_number: int


class AnthropicUsage(Closed, kw_only=True):
    """Tokens that were used. `input_tokens` does not count those that were found in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(Closed, kw_only=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicEvent(msgspec.Struct, kw_only=True):
    """A server-sent event of a streamed message. Its other fields depend on `type`."""

    type: str


class CountedTokens(Closed, kw_only=True):
    input_tokens: int
