"""What operators see of a real server from start to exit: probes, JSON log lines, traces."""

import http.client
import json
import signal
import threading
import time

import pytest

from penstock.tests import serving
from penstock.tests.router.test_tracing import PARENT, attributes, collecting

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

LISTEN_TIMEOUT = 10.0  # seconds until the server listens, on a busy machine; about 1 on an idle one


def send_request(server: serving.Server, path: str, body: object = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        method = "GET" if body is None else "POST"
        connection.request(method, path, None if body is None else json.dumps(body), {"Authorization": "Bearer two", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def statuses(server: serving.Server) -> list[int]:
    return [send_request(server, path)[0] for path in ("/health", "/health/ready", "/health/live")]


def wait_until_listening(server: serving.Server) -> list[int]:
    end = time.monotonic() + LISTEN_TIMEOUT
    while True:
        try:
            return statuses(server)
        except ConnectionRefusedError:
            assert time.monotonic() < end, server.log
            time.sleep(0.01)


def test_probes_json_log_and_traces_from_loading_to_draining() -> None:
    with collecting() as (collector, endpoint), serving.scratch() as folder:
        server = serving.Server(folder, "--json-output", "--api-key", "one,two", "--otlp-endpoint", endpoint)
        try:
            assert wait_until_listening(server) == [503, 503, 200]  # loading takes longer than that
            server.wait_until_ready()
            assert statuses(server) == [200, 200, 200]
            long = {"prompt": "Once upon a time", "max_tokens": 600, "ignore_eos": True, "stream": True}
            answers: list[tuple[int, bytes]] = []
            headers = {"traceparent": PARENT, "X-Request-ID": "mine"}
            thread = threading.Thread(target=lambda: answers.append(send_request(server, "/v1/completions", long, **headers)))
            thread.start()
            while b"penstock_running 1.0" not in send_request(server, "/metrics")[1]:
                time.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            while statuses(server)[1] == 200:
                time.sleep(0.01)
            assert statuses(server) == [200, 503, 200]
            assert send_request(server, "/generate", {"inputs": "Hi"})[0] == 503
            thread.join()
            assert answers[0][0] == 200
            assert answers[0][1].endswith(b"data: [DONE]\n\n")  # the stream was completed during the drain
            server.check_end(0)
        finally:
            server.kill()
        log = server.log
    lines = [json.loads(line) for line in log.splitlines()]
    request_line = {line["request_id"]: line for line in lines if "request_id" in line}["mine"]
    assert (request_line["path"], request_line["status"], request_line["generated_tokens"], request_line["finish_reason"]) == (
        "/v1/completions",
        200,
        600,
        "length",
    )
    assert request_line["trace"].split("-")[1] == PARENT.split("-")[1]
    assert "Once upon" not in log
    span = collector.named("text_completion penstock-demo")
    assert span.trace_id.hex() == PARENT.split("-")[1]  # type: ignore[attr-defined]
    found = attributes(span)
    assert (found["gen_ai.usage.output_tokens"], found["gen_ai.request.stream"]) == (600, True)
    assert answers[0][1].startswith(f'data: {{"id":"{found["gen_ai.response.id"]}"'.encode())
    phases = [each for each in collector.spans if each.parent_span_id == span.span_id]  # type: ignore[attr-defined]
    assert [each.name for each in phases] == ["tokenize", "queue", "prefill", "decode"]
