"""What operators see of requests: ids, lines of the log, probes, who may ask from where, how long a body may take."""

import asyncio
import gc
import json
import logging
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from penstock.proto.process import configure_logging
from penstock.router.api import access, app, unanswered
from penstock.router.api.body import BODY
from penstock.router.api.unanswered import UNANSWERED
from penstock.router.record import Record, Run, current, request_id
from penstock.router.request import Broken, Failure, NotReady, Overloaded, Refused, Request
from penstock.router.text import Tokenizer
from penstock.tests.router.fake_batcher import LIMITS, Server, make_tokenizer, serve, until

HELLO = {"inputs": "Hi secret", "parameters": {"max_new_tokens": 20}}
CHAT = {"messages": [{"role": "user", "content": "Hi secret"}]}
PROBES = ("/health", "/health/ready", "/health/live", "/ping", "/")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("model"))


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == access.__name__]


def test_every_response_has_an_id(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        found = set()
        for given in ("", "a b", "x" * 257, "é"):
            _, _, response = await server.get("/nowhere", headers={"X-Request-ID": given})
            assert response.headers["X-Request-ID"].startswith("req-")
            found.add(response.headers["X-Request-ID"])
        assert len(found) == 4
        for path in ("/generate", "/generate_stream", "/v1/chat/completions", "/nowhere"):
            headers = {"X-Request-ID": "mine", "X-Correlation-ID": "ours"}
            _, response = await _post(server, path, headers)
            assert (response.headers["X-Request-ID"], response.headers["X-Correlation-ID"]) == ("mine", "ours")
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Server"] == "penstock"

    serve(tokenizer, test)


async def _post(server: Server, path: str, headers: dict[str, str]) -> tuple[bytes, object]:
    async with server.client.post(path, json=HELLO | CHAT, headers=headers) as response:
        return await response.read(), response


def test_one_line_for_each_request_and_no_text_in_it(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async def test(server: Server) -> None:
        await server.post("/generate", HELLO, headers={"X-Request-ID": "one"})
        await server.events("/generate_stream", HELLO)
        await server.post("/generate", {"inputs": ""})
        await server.get("/nowhere/secret")

    with caplog.at_level(logging.INFO):
        serve(tokenizer, test)
    found = [record.values for record in lines(caplog)]
    assert [(one["method"], one["path"], one["status"]) for one in found] == [
        ("POST", "/generate", 200),
        ("POST", "/generate_stream", 200),
        ("POST", "/generate", 422),
        ("GET", "unknown route", 404),
    ]
    assert found[0]["request_id"] == "one"
    assert [one.get("error") for one in found] == [None, None, "validation", "not_found"]
    assert "secret" not in caplog.text
    assert "Hello" not in caplog.text


def test_a_line_tells_how_a_request_went(caplog: pytest.LogCaptureFixture) -> None:
    request = Request(prompt=(1, 2, 3), max_new_tokens=9)
    run = Run(request, 10.0, started=10.5, first=11.0, ended=12.0, cached_tokens=2, generated=7, reasons=["length", "length"])
    values = access._values(_Route(), Record("id", runs=[run, run]), 200)  # type: ignore[arg-type]
    del values["seconds"]
    assert values == {
        "request_id": "id",
        "method": "POST",
        "path": "/generate",
        "status": 200,
        "prompt_tokens": 6,
        "cached_tokens": 4,
        "generated_tokens": 14,
        "queue_seconds": 0.5,
        "first_token_seconds": 1.0,
        "inference_seconds": 1.5,
        "finish_reason": "length",
    }


class _Route:
    method = "POST"

    @property
    def match_info(self) -> "_Route":
        return self

    route = resource = property(lambda self: self)
    canonical = "/generate"


def test_probes_and_metrics_write_no_line(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async def test(server: Server) -> None:
        for path in (*PROBES, "/metrics", "/stats", "/docs"):
            await server.get(path)

    with caplog.at_level(logging.INFO):
        serve(tokenizer, test)
    assert lines(caplog) == []


def test_a_client_that_leaves_has_a_line_too(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async def test(server: Server) -> None:
        leaving = asyncio.create_task(server.post("/generate", HELLO))
        await until(lambda: server.batcher.opened == 1)
        assert not lines(caplog)
        leaving.cancel()
        await until(lambda: bool(lines(caplog)))

    with caplog.at_level(logging.INFO):
        serve(tokenizer, test, pace=asyncio.Semaphore(0))
    [line] = lines(caplog)
    assert (line.values["status"], line.values["error"]) == (499, "dropped")


def test_a_fault_of_ours_is_json_and_tells_nothing(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async def test(server: Server) -> None:
        status, body, _ = await server.post("/generate", HELLO, headers={"X-Request-ID": "one"})
        assert (status, body) == (500, {"error": "the server failed: its log says why", "error_type": "internal"})
        status, body, _ = await server.post("/v1/chat/completions", CHAT)
        assert (status, body["error"]["code"]) == (500, "internal")

    class Fault(Broken):
        """Of a kind that nobody expects."""

    def raise_fault(failure: object) -> None:
        raise ZeroDivisionError("secret")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "problem_of", raise_fault)
        patch.setattr("penstock.router.api.tgi.fold", _divide)
        patch.setattr("penstock.router.api.openai.fold", _divide)
        serve(tokenizer, test)
    assert "ZeroDivisionError" in caplog.text


async def _divide(*arguments: object) -> None:
    raise ZeroDivisionError("secret")


def test_json_lines_have_values_and_the_id(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    kept = root.handlers[:], root.level
    try:
        configure_logging("router", True, "info", request_id)
        token = current.set(Record("one"))
        logging.info("told", extra={"values": {"status": 200}})
        logging.debug("not told")
        current.reset(token)
        logging.info("outside")
    finally:
        root.handlers[:] = kept[0]
        root.setLevel(kept[1])
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["message"], first["request_id"], first["status"]) == ("told", "one", 200)
    assert "request_id" not in second


def test_probes_ask_three_questions(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        async def statuses() -> list[int]:
            return [(await server.get(path))[0] for path in PROBES[:3]]

        assert await statuses() == [503, 503, 200]
        _, data, response = await server.get("/health/ready")
        assert json.loads(data) == {"ready": False, "stage": "loading weights: 40 %", "progress": 0.4}
        assert response.headers["Retry-After"] == "1"
        server.batcher.limits = LIMITS  # known when it has loaded, whatever comes then
        for stage in ("recovering: loading weights: 40 %", "shutting down"):
            server.batcher.stage = stage
            assert await statuses() == [200, 503, 200]
        server.batcher.ready = True
        assert await statuses() == [200, 200, 200]

    serve(tokenizer, test, ready=False, limits=None, stage="loading weights: 40 %", settings={"api_keys": ("key",)})


def test_all_routes_but_open_ones_ask_for_the_key(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        from penstock.router.api.openapi import OPERATIONS

        for operation in OPERATIONS:
            async with server.client.request(operation.method, operation.path, json={} if operation.body else None) as response:
                assert (response.status == 401) == (operation.path not in PROBES or operation.method == "post"), operation.path
        for key in ("a", "b"):
            assert (await server.get("/metrics", headers={"Authorization": f"Bearer {key}"}))[0] == 200

    serve(tokenizer, test, settings={"api_keys": ("a", "b")})


ORIGIN = {"Origin": "https://chat.example"}
PREFLIGHT = {**ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}


@pytest.mark.parametrize(
    ("allowed", "granted"),
    [("*", "*"), ("https://a.example, https://chat.example/", "https://chat.example"), ("https://a.example", None), ("none", None)],
)
def test_pages_of_other_origins(tokenizer: Tokenizer, allowed: str, granted: str | None) -> None:
    async def test(server: Server) -> None:
        async with server.client.options("/v1/chat/completions", headers=PREFLIGHT) as response:
            assert response.headers.get("Access-Control-Allow-Origin") == granted
            assert response.status == (204 if granted else 401)
            if granted:
                assert response.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
                assert "POST" in response.headers["Access-Control-Allow-Methods"]
        for path in ("/generate", "/generate_stream", "/nowhere"):
            for headers in (ORIGIN, {**ORIGIN, "Authorization": "Bearer key"}):
                _, response = await _post(server, path, headers)
                assert response.headers.get("Access-Control-Allow-Origin") == granted
                assert "Access-Control-Allow-Credentials" not in response.headers
                assert ("Origin" in response.headers.get("Vary", "")) == (allowed not in ("*", "none"))
        _, _, response = await server.get("/health")
        assert "Access-Control-Allow-Origin" not in response.headers

    serve(tokenizer, test, settings={"cors_allow_origin": allowed, "api_keys": ("key",)})


def test_a_body_that_does_not_come_is_not_waited_for(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unanswered, "PATIENCE", 0.2)

    async def test(server: Server) -> None:
        host, port = str(server.client._base_url.host), int(server.client._base_url.port or 0)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b'POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"inputs":')
        answer = await reader.readuntil(b"}")
        writer.write_eof()  # until the client ends, too, the rest of its body is let in, and dropped
        assert await reader.read() == b""
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"error_type":"timeout"' in answer

    serve(tokenizer, test)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", b'{"inputs":"Hi"}'),
        ("/v1/completions", b'{"prompt":"Hi"}'),
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"Hi"}]}'),
        ("/v1/responses", b'{"input":"Hi"}'),
        ("/v1/messages", b'{"messages":[{"role":"user","content":"Hi"}]}'),
        ("/vertex", b'{"instances":[{"inputs":"Hi"}]}'),
    ],
)
def test_a_request_has_arrived_when_its_head_has(tokenizer: Tokenizer, path: str, body: bytes) -> None:
    """From then on its client waits: its own `timeout` begins there."""

    async def test(server: Server) -> None:
        came, rest = time.monotonic(), 0.0

        async def slowly() -> AsyncIterator[bytes]:
            nonlocal rest
            yield body[:5]
            await until(lambda: server.app[UNANSWERED]._count == 1)
            rest = time.monotonic()
            yield body[5:]

        async with server.client.post(path, data=slowly(), headers={"Content-Type": "application/json"}) as response:
            assert response.status == 200
        [request] = server.batcher.requests
        assert came <= request.arrived < rest

    serve(tokenizer, test)


def test_who_shuts_down_does_not_wait_long_for_a_body(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be it one that always goes on, or that comes to a server that stops already."""
    monkeypatch.setattr(unanswered, "HURRY", 0.2)

    async def test(server: Server) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield b" "
                await asyncio.sleep(0.01)

        early = asyncio.create_task(server.client.post("/generate", data=pieces()))
        await until(lambda: server.app[UNANSWERED]._count == 1)
        answered = server.app[UNANSWERED].close()
        for response in (await early, await server.client.post("/generate", data=pieces())):
            assert (response.status, response.headers["Retry-After"], response.headers["Connection"]) == (503, "1", "close")
            assert (await response.json())["error_type"] == "unavailable"
        await answered.wait()

    serve(tokenizer, test)


@pytest.mark.parametrize("leaves", [False, True])
def test_who_shuts_down_waits_for_the_answers_to_those_that_came_before(tokenizer: Tokenizer, leaves: bool) -> None:
    """From their heads on; not for those that come later, who may be many."""

    async def test(server: Server) -> None:
        assert (await server.post("/generate", HELLO))[0] == 200
        sent, pace = asyncio.Event(), asyncio.Semaphore(0)

        async def slowly() -> AsyncIterator[bytes]:
            yield b'{"inputs":'
            await sent.wait()
            yield b'"Hi"}'

        early = asyncio.create_task(server.client.post("/generate", data=slowly()))
        await until(lambda: server.app[UNANSWERED]._count == 1)
        answered = server.app[UNANSWERED].close()
        server.batcher.pace = pace
        late = asyncio.create_task(server.post("/generate", HELLO))
        await until(lambda: server.batcher.opened == 2)
        assert not answered.is_set()
        if leaves:
            early.cancel()
        else:
            sent.set()
            await until(lambda: server.batcher.opened == 3)
            assert not answered.is_set()
            server.batcher.pace = None
            pace.release()
            pace.release()
            assert (await early).status == 200
        await asyncio.wait_for(answered.wait(), 5)
        server.batcher.pace = None
        pace.release()
        assert (await late)[0] == 200
        assert answered.is_set()

    serve(tokenizer, test)


def test_a_body_of_as_many_chunks_as_bytes_is_read_in_no_time(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        host, port = str(server.client._base_url.host), int(server.client._base_url.port or 0)
        reader, writer = await asyncio.open_connection(host, port)
        body = b'{"inputs":"Hi"' + b" " * 200_000 + b"}"
        began = time.monotonic()
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        for start in range(0, len(body), 1000):
            writer.write(b"".join(b"1\r\n%c\r\n" % byte for byte in body[start : start + 1000]))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert time.monotonic() - began < 10  # 1 is usual

    serve(tokenizer, test)


@pytest.mark.parametrize("failure", [Overloaded("all busy", 2.0), NotReady("not ready: loading"), Refused("no")])
@pytest.mark.parametrize("counted", [False, True])
def test_who_is_turned_away_is_counted_once(tokenizer: Tokenizer, failure: Failure, counted: bool) -> None:
    """By us, or by those who have turned it away."""

    async def test(server: Server) -> None:
        failure.counted = counted
        server.batcher.refuses = failure
        for path, body in (("/generate", {"inputs": "Hi"}), ("/v1/completions", {"prompt": "Hi"})):
            assert (await server.post(path, body))[0] >= 400
        assert len(server.metrics.failures) == 2 * (not counted)

    serve(tokenizer, test)


def test_bodies_have_a_limit_together(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        host, port = str(server.client._base_url.host), int(server.client._base_url.port or 0)
        _, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n" + b" " * 800)
        while (await server.post("/generate", {"inputs": "Hi" * 100}))[0] == 200:  # noqa: ASYNC110 (until the others have come)
            await asyncio.sleep(0.01)
        status, answer, response = await server.post("/v1/completions", {"prompt": "Hi" * 100})
        assert (status, answer["error"]["code"], response.headers["Retry-After"]) == (429, "overloaded", "1")
        assert set(server.metrics.failures) == {"overloaded"}
        writer.close()
        while (await server.post("/generate", {"inputs": "Hi" * 40}))[0] == 429:  # noqa: ASYNC110 (until its leaving was noticed)
            await asyncio.sleep(0.01)
        assert (await server.post("/generate", {"inputs": "Hi" * 40}))[0] == 200

    serve(tokenizer, test, settings={"payload_limit_total": 900})


def test_a_body_counts_until_it_was_answered_or_given_up(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many come, one after the other, of which no two may be there at once."""
    monkeypatch.setattr(unanswered, "PATIENCE", 0.05)

    async def pieces() -> AsyncIterator[bytes]:
        yield b" " * 350
        yield b" " * 350

    async def test(server: Server) -> None:
        host, port = str(server.client._base_url.host), int(server.client._base_url.port or 0)
        for _ in range(3):
            assert (await server.post("/generate", {"inputs": "Hi" * 40}))[0] == 200
            assert (await server.post("/generate", b"{" + b" " * 300))[0] == 400
            async with server.client.post("/generate", data=pieces()) as answer:  # nobody knows before that it is too large
                assert answer.status == 413
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 301\r\n\r\n" + b" " * 300)
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            writer.close()

    serve(tokenizer, test, settings={"payload_limit": 400, "payload_limit_total": 700})


def test_a_connection_that_waits_keeps_no_body(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        assert (await server.post("/generate", {"inputs": "Hi"}))[0] == 200
        await asyncio.sleep(0.01)
        requests = [one for one in gc.get_objects() if type(one) is web.Request]
        assert not any(BODY in one for one in requests if one.transport is not None)

    serve(tokenizer, test)


def test_a_body_that_is_said_to_be_too_large_is_not_waited_for(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        host, port = str(server.client._base_url.host), int(server.client._base_url.port or 0)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 401\r\n\r\n")
        async with asyncio.timeout(5):
            assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        writer.close()

    serve(tokenizer, test, settings={"payload_limit": 400})
