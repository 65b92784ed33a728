"""`Tracer`: the spans as received by a small collector that accepts OTLP over HTTP."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict

from penstock.router.api.app import make_app, make_runner
from penstock.router.config import RouterConfig
from penstock.router.metrics import Metrics
from penstock.router.record import Record, Run
from penstock.router.request import Request, Sampling
from penstock.router.text import Tokenizer
from penstock.router.tracing import Tracer, _url
from penstock.tests.router.fake_batcher import FakeBatcher, make_tokenizer

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """Stores the received spans."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.services: set[str] = set()
        self.spans: list[object] = []

    def take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        request = trace_service.ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            self.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def named(self, name: str) -> object:
        [span] = [span for span in self.spans if span.name == name]  # type: ignore[attr-defined]
        return span


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers.get("Content-Encoding") is None
            collector.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def attributes(span: object) -> dict[str, object]:
    found = {}
    for each in span.attributes:  # type: ignore[attr-defined]
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


def test_request_span_has_its_attributes_and_its_phases_as_child_spans() -> None:
    request = Request(prompt=(1, 2, 3), max_new_tokens=9, sampling=Sampling(temperature=0.5, top_p=0.9, seed=7), choices=2)
    with collecting() as (collector, endpoint):
        tracer = Tracer(endpoint, "mine", "some/model")
        record = Record("id", streamed=True, answer="chatcmpl-1")
        span = tracer.begin({"traceparent": PARENT, "tracestate": "a=b"}, record)
        assert record.trace.split("-")[1] == PARENT.split("-")[1]
        assert record.name == record.trace
        now = record.arrived
        run = Run(
            request, now + 0.5, started=now + 1, first=now + 3, ended=now + 6, cached_tokens=2, generated=8, reasons=["length"] * 2
        )
        record.runs.append(run)
        tracer.end(span, record, "/v1/chat/completions", 200)
        tracer.close()
    assert set(collector.paths) == {"/v1/traces"}
    assert collector.services == {"mine"}
    root = collector.named("chat some/model")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == tuple(PARENT.split("-")[1:3])
    assert (root.kind, root.trace_state, root.span_id.hex()) == (2, "a=b", record.trace.split("-")[2])
    found = attributes(root)
    assert found["gen_ai.response.time_to_first_chunk"] == pytest.approx(3.0)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": "some/model",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 7,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": True,
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "request.id": "id",
    }
    assert {name: found[name] for name in expected} == expected
    for name, seconds in (("tokenize", 0.5), ("queue", 0.5), ("prefill", 2), ("decode", 3)):
        child = collector.named(name)
        assert (child.parent_span_id, child.trace_id) == (root.span_id, root.trace_id)
        assert (child.end_time_unix_nano - child.start_time_unix_nano) / 1e9 == pytest.approx(seconds, abs=1e-3)


def failed_record(failure: str) -> Record:
    return Record("id", runs=[Run(Request(prompt=(1,), max_new_tokens=1), 1.0, failure=failure)])


@pytest.mark.parametrize(
    ("record", "status", "kind", "error"),
    [
        (Record("id", error="validation"), 422, "validation", False),
        (failed_record("dropped"), 499, "dropped", False),
        (failed_record("dropped"), 200, "dropped", False),
        (failed_record("shards"), 200, "shards", True),  # a stream that had started
        (Record("id"), 500, "500", True),
        (failed_record(""), 200, None, False),
    ],
)
def test_span_of_a_failed_request_has_its_error_type_and_status(record: Record, status: int, kind: str | None, error: bool) -> None:
    """The span's status is set for internal errors only, following the conventions for HTTP servers."""
    with collecting() as (collector, endpoint):
        tracer = Tracer(endpoint, "mine", "m")
        tracer.end(tracer.begin({}, record), record, "/generate", status)
        tracer.close()
    span = collector.named("text_completion m" if record.runs else "POST /generate")
    assert attributes(span).get("error.type") == kind
    assert span.status.code == (2 if error else 0)
    assert len([span for span in collector.spans if span.name == "decode"]) == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(("parents", "known"), [([PARENT], True), ([PARENT, PARENT], False), ([], False)])
def test_trace_continues_only_with_exactly_one_traceparent_header(parents: list[str], known: bool) -> None:
    """By W3C's specification a new trace begins then."""
    headers = CIMultiDict([("Traceparent", parent) for parent in parents] + [("Tracestate", "a=b"), ("Tracestate", "c=d")])
    with collecting() as (collector, endpoint):
        tracer = Tracer(endpoint, "mine", "m")
        record = Record("id")
        tracer.end(tracer.begin(headers, record), record, "/generate", 200)
        tracer.close()
    span = collector.named("POST /generate")
    assert (span.trace_id.hex() == PARENT.split("-")[1]) == known
    assert span.trace_state == ("a=b,c=d" if known else "")


SILENT_COLLECTOR = """
import socket, time
from penstock.router import tracing
from penstock.router.record import Record
tracing.LAST_SPANS = 0.5
with socket.create_server(("127.0.0.1", 0)) as listening:
    tracer = tracing.Tracer(f"http://127.0.0.1:{listening.getsockname()[1]}", "mine", "m")
    record = Record("id")
    tracer.end(tracer.begin({}, record), record, "/generate", 200)
    tracer.close()
    print("closed", flush=True)
"""


def test_silent_collector_does_not_delay_closing() -> None:
    """Neither the end of the server nor that of the interpreter waits for it. The SDK alone would wait for 30 s."""
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_TIMEOUT": "600"}
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", SILENT_COLLECTOR], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert ended.stdout == "closed\n"
    assert "the last spans are lost" in ended.stderr
    assert 0.5 <= time.monotonic() - began < 29


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("model"))


def test_http_requests_are_traced_and_probes_are_not(tokenizer: Tokenizer) -> None:
    async def run(endpoint: str) -> None:
        tracer = Tracer(endpoint, "mine", "m")
        app = make_app(RouterConfig(folder="", model="m"), tokenizer, FakeBatcher(tokenizer), Metrics(), tracer)
        runner = make_runner(app, 1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession(f"http://{host}:{port}") as client:
            body = {"inputs": "Hi secret", "parameters": {"max_new_tokens": 20}}
            async with client.post("/generate_stream", json=body, headers={"Traceparent": PARENT}) as response:
                await response.read()
            async with client.get("/health") as response:
                await response.read()
        await runner.cleanup()
        await asyncio.to_thread(tracer.close)

    with collecting() as (collector, endpoint):
        asyncio.run(run(endpoint))
    [span] = collector.spans
    assert span.trace_id.hex() == PARENT.split("-")[1]  # type: ignore[attr-defined]
    assert "secret" not in str(span)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://a:4318", "http://a:4318/v1/traces"),
        ("http://a:4318/", "http://a:4318/v1/traces"),
        ("https://a/otlp/v1/traces", "https://a/otlp/v1/traces"),
    ],
)
def test_collector_url_gets_the_traces_path_if_it_has_none(given: str, url: str) -> None:
    assert _url(given) == url
