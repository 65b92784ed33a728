"""OpenTelemetry traces of requests, sent over OTLP/HTTP. Its packages are imported only when an operator asks for traces.

A request is a span of kind SERVER, named and described by the semantic conventions for generative AI, with a child for each of its
phases: tokenize (all that comes before the queue), queue, prefill, decode. The children are made when the request has ended, from
timestamps that are taken anyway, so that nothing is done per token. They contain no text of a request.
"""

import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from .record import Record, Run

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

PATH = "/v1/traces"  # of OTLP/HTTP, where the operator gives only a host
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/messages": "chat"}  # all others are text completions

LAST_SPANS = 2.0  # seconds that a collector gets for them at the end
DROPPED = "dropped"  # failure kind of a run whose client has left

# Names of the conventions, whose status is still "development": here and nowhere else.
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
TOP_K = "gen_ai.request.top_k"
FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
SEED = "gen_ai.request.seed"
CHOICES = "gen_ai.request.choice.count"
STREAM = "gen_ai.request.stream"
RESPONSE_ID = "gen_ai.response.id"
FINISH_REASONS = "gen_ai.response.finish_reasons"
FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"

logger = logging.getLogger(__name__)


class Missing(Exception):
    """Traces are wanted, and the packages for them are not installed. One line that says what would help."""


class Tracing(Protocol):
    """What the API needs of tracing."""

    def begin(self, headers: Mapping[str, str], record: Record, /) -> Any:
        """A span for a request, below the client's own if `headers` name one. Sets `record.trace`."""
        ...

    def end(self, span: Any, record: Record, route: str, status: int, /) -> None:
        """The request has ended."""
        ...


class Tracer:
    """`Tracing` with OpenTelemetry's SDK, which sends spans in batches from a thread of its own."""

    def __init__(self, endpoint: str, service: str, model: str, exporter: "SpanExporter | None" = None) -> None:
        """endpoint: a URL, with a path or without. exporter: for tests, instead of one that sends. Raises Missing."""
        try:  # lazy: the packages are needed, and slow to import, only with traces
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise Missing(
                f"--otlp-endpoint needs packages that are not installed: pip install -e '.[otel]' in the checkout ({error})"
            ) from None
        self._trace = trace
        self._model = model
        self._propagator = TraceContextTextMapPropagator()
        self._provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=_url(endpoint))))
        self._tracer = self._provider.get_tracer("penstock")

    def begin(self, headers: Mapping[str, str], record: Record) -> Any:
        # The propagator looks names up as they are written; HTTP's are case-insensitive.
        parents, states = (_all(headers, name) for name in ("traceparent", "tracestate"))
        given = {"traceparent": parents[0], "tracestate": ",".join(states)} if len(parents) == 1 else {}  # as W3C specifies
        context = self._propagator.extract(given)
        span = self._tracer.start_span("request", context, kind=self._trace.SpanKind.SERVER, start_time=time.time_ns())
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._trace.set_span_in_context(span))
        record.trace = carrier.get("traceparent", "")
        return span

    def end(self, span: Any, record: Record, route: str, status: int) -> None:
        now, ended = time.monotonic(), time.time_ns()
        operation = OPERATIONS.get(route, "text_completion")
        span.update_name(f"{operation} {self._model}" if record.runs else f"POST {route}")
        span.set_attributes(
            {"http.request.method": "POST", "http.route": route, "http.response.status_code": status, "request.id": record.id}
        )
        if record.runs:
            span.set_attributes({OPERATION: operation, PROVIDER: "penstock", **_attributes(record, self._model)})
        failure = record.failure
        if failure or status >= 500:
            span.set_attribute("error.type", failure or str(status))
        # Not for 4xx, as the conventions have it: nor for 499, a client that has left.
        if status >= 500 or (status < 400 and failure not in ("", DROPPED)):
            span.set_status(self._trace.StatusCode.ERROR)
        context = self._trace.set_span_in_context(span)
        for run in record.runs:
            for name, start, end in _phases(record, run, now):
                child = self._tracer.start_span(name, context, start_time=ended - round((now - start) * 1e9))
                child.end(ended - round((now - end) * 1e9))
        span.end(ended)

    def close(self) -> None:
        """Sends what is left, if the collector takes it in time."""
        # On a daemon thread with a bounded wait: the SDK would wait for a collector for half a minute.
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(LAST_SPANS)
        if sending.is_alive():
            logger.warning("the last spans are lost: the collector of --otlp-endpoint has not taken them within %g s", LAST_SPANS)


def _all(headers: Mapping[str, str], name: str) -> list[str]:
    return [value for each, value in headers.items() if each.lower() == name]


def _url(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    return endpoint if parts.path.strip("/") else parts._replace(path=PATH).geturl()


def _attributes(record: Record, model: str) -> dict[str, Any]:
    runs = record.runs
    request = runs[0].request
    sampling = request.sampling
    found: dict[str, Any] = {
        MODEL: model,
        RESPONSE_MODEL: model,
        MAX_TOKENS: request.max_new_tokens,
        TEMPERATURE: sampling.temperature,
        INPUT_TOKENS: sum(len(run.request.prompt) for run in runs),
        OUTPUT_TOKENS: sum(run.generated for run in runs),
        CACHED_TOKENS: sum(run.cached_tokens for run in runs),
        FINISH_REASONS: [reason for run in runs for reason in run.reasons],
    }
    neutral = ((TOP_P, sampling.top_p, 1.0), (TOP_K, sampling.top_k, 0), (CHOICES, request.choices, 1))
    penalties = ((FREQUENCY_PENALTY, sampling.frequency_penalty, 0.0), (PRESENCE_PENALTY, sampling.presence_penalty, 0.0))
    found |= {name: value for name, value, nothing in (*neutral, *penalties) if value != nothing}
    if sampling.temperature and sampling.seed < 2**63:  # OpenTelemetry's integers are signed
        found[SEED] = sampling.seed
    if record.streamed:
        found[STREAM] = True
    if record.answer:
        found[RESPONSE_ID] = record.answer
    first = min((run.first for run in runs if run.first), default=0.0)
    if first:
        found[FIRST_CHUNK] = first - record.arrived
    return found


def _phases(record: Record, run: Run, now: float) -> list[tuple[str, float, float]]:
    """Name, beginning and end of each phase that the run reached."""
    moments = [("tokenize", record.arrived), ("queue", run.arrived), ("prefill", run.started), ("decode", run.first)]
    reached = [(name, moment) for name, moment in moments if moment]
    ends = [*(moment for _, moment in reached[1:]), run.ended or now]
    return [(name, start, end) for (name, start), end in zip(reached, ends, strict=True)]
