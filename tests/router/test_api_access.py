"""Request ids, the access log, health probes, API keys, CORS, and limits on the size and duration of request bodies."""

import asyncio
import gc
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from penstock.proto.process import configure_logging
from penstock.router.api import access, app, tenant, unanswered
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


def access_log(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == access.__name__]


def test_every_response_has_a_request_id_the_clients_if_it_is_valid(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        found = set()
        for given in ("", "a b", "x" * 257, "é"):
            _, _, response = await server.get("/nowhere", headers={"X-Request-ID": given})
            assert response.headers["X-Request-ID"].startswith("req-")
            found.add(response.headers["X-Request-ID"])
        assert len(found) == 4
        for path in ("/generate", "/generate_stream", "/v1/chat/completions", "/nowhere"):
            headers = {"X-Request-ID": "mine", "X-Correlation-ID": "ours", "X-Session-Affinity": "theirs"}
            _, response = await _post(server, path, headers)
            assert {name: response.headers[name] for name in headers} == headers
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Server"] == "penstock"

    serve(tokenizer, test)


async def _post(server: Server, path: str, headers: dict[str, str]) -> tuple[bytes, object]:
    async with server.client.post(path, json=HELLO | CHAT, headers=headers) as response:
        return await response.read(), response


def test_access_log_has_one_line_per_request_without_prompt_or_answer(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(server: Server) -> None:
        await server.post("/generate", HELLO, headers={"X-Request-ID": "one"})
        await server.events("/generate_stream", HELLO)
        await server.post("/generate", {"inputs": ""})
        await server.get("/nowhere/secret")

    with caplog.at_level(logging.INFO):
        serve(tokenizer, test)
    found = [record.values for record in access_log(caplog)]
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


def test_access_log_line_has_token_counts_and_times(caplog: pytest.LogCaptureFixture) -> None:
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


def test_probes_and_metrics_are_not_in_the_access_log(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async def test(server: Server) -> None:
        for path in (*PROBES, "/metrics", "/stats", "/docs"):
            await server.get(path)

    with caplog.at_level(logging.INFO):
        serve(tokenizer, test)
    assert access_log(caplog) == []


def test_client_disconnect_is_logged_with_status_499(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async def test(server: Server) -> None:
        leaving = asyncio.create_task(server.post("/generate", HELLO))
        await until(lambda: server.batcher.opened == 1)
        assert not access_log(caplog)
        leaving.cancel()
        await until(lambda: bool(access_log(caplog)))

    with caplog.at_level(logging.INFO):
        serve(tokenizer, test, token_permits=asyncio.Semaphore(0))
    [line] = access_log(caplog)
    assert (line.values["status"], line.values["error"]) == (499, "dropped")


def test_internal_error_is_a_json_500_without_details(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async def test(server: Server) -> None:
        status, body, _ = await server.post("/generate", HELLO, headers={"X-Request-ID": "one"})
        assert (status, body) == (500, {"error": "the server failed: its log says why", "error_type": "internal"})
        status, body, _ = await server.post("/v1/chat/completions", CHAT)
        assert (status, body["error"]["code"]) == (500, "internal")

    class UnexpectedFailure(Broken):
        """A kind of failure that no handler expects."""

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


def test_json_log_lines_have_values_and_the_request_id(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    previous = root.handlers[:], root.level
    try:
        configure_logging("router", True, "info", request_id)
        token = current.set(Record("one"))
        logging.info("told", extra={"values": {"status": 200}})
        logging.debug("not told")
        current.reset(token)
        logging.info("outside")
    finally:
        root.handlers[:] = previous[0]
        root.setLevel(previous[1])
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["message"], first["request_id"], first["status"]) == ("told", "one", 200)
    assert "request_id" not in second


def test_startup_readiness_and_liveness_probes_differ_in_their_statuses(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        async def statuses() -> list[int]:
            return [(await server.get(path))[0] for path in PROBES[:3]]

        assert await statuses() == [503, 503, 200]
        _, data, response = await server.get("/health/ready")
        assert json.loads(data) == {"ready": False, "stage": "loading weights: 40 %", "progress": 0.4}
        assert response.headers["Retry-After"] == "1"
        server.batcher.limits = LIMITS  # known once the model was loaded, whatever happens later
        for stage in ("recovering: loading weights: 40 %", "shutting down"):
            server.batcher.stage = stage
            assert await statuses() == [200, 503, 200]
        server.batcher.ready = True
        assert await statuses() == [200, 200, 200]

    serve(tokenizer, test, ready=False, limits=None, stage="loading weights: 40 %", settings={"api_keys": ("key",)})


def test_all_routes_but_health_probes_and_pages_require_an_api_key(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        found = set()
        for route in server.app.router.routes():
            assert route.resource is not None
            path = route.resource.canonical
            async with server.client.request(route.method, path) as response:
                is_open = route.method != "POST" and (path in PROBES or path.startswith(("/page/", "/docs")))
                assert (response.status == 401) != is_open, path
                found.add(path)
        assert found.issuperset((*PROBES, "/generate", "/v1/chat/completions", "/metrics", "/stats", "/docs", "/page/page.js"))
        for key in ("a", "b"):
            assert (await server.get("/metrics", headers={"Authorization": f"Bearer {key}"}))[0] == 200

    serve(tokenizer, test, settings={"api_keys": ("a", "b")})


def test_token_is_compared_with_every_key_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compare, compared = hmac.compare_digest, []

    def recorded(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr("hmac.compare_digest", recorded)
    keys = [tenant.digest(key) for key in (b"right", b"", b"a much longer one")]
    for token in ("right", "", "wrong"):
        http = make_mocked_request("GET", "/", {"Authorization": f"Bearer {token}"})
        assert tenant.bears(http, keys) == (token != "wrong")
        assert compared == [(tenant.digest(token.encode()), key) for key in keys]
        compared.clear()
    assert len({len(key) for key in keys}) == 1


ORIGIN = {"Origin": "https://chat.example"}
PREFLIGHT = {**ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}


@pytest.mark.parametrize(
    ("allowed", "granted"),
    [("*", "*"), ("https://a.example, https://chat.example/", "https://chat.example"), ("https://a.example", None), ("none", None)],
)
def test_cors_headers_follow_the_allowed_origins(tokenizer: Tokenizer, allowed: str, granted: str | None) -> None:
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


def test_shutdown_in_the_moment_when_a_body_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unanswered, "PATIENCE", 0.0)
    ended: list[asyncio.Event] = []

    async def late(requests: unanswered.Unanswered) -> None:
        with requests.one():
            async with requests.reading():
                asyncio.get_running_loop().call_soon(lambda: ended.append(requests.close()))  # between the timeout and its reader
                await asyncio.sleep(5)

    with pytest.raises(TimeoutError):
        asyncio.run(late(unanswered.Unanswered()))
    assert ended[0].is_set()


def test_body_that_does_not_arrive_in_time_is_a_408(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unanswered, "PATIENCE", 0.2)

    async def test(server: Server) -> None:
        host, port = str(server.client._base_url.host), int(server.client._base_url.port or 0)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b'POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"inputs":')
        answer = await reader.readuntil(b"}")
        writer.write_eof()  # until the client closes its side, the rest of its body is read and dropped
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
def test_arrival_time_of_a_request_is_that_of_its_headers(tokenizer: Tokenizer, path: str, body: bytes) -> None:
    """The client waits from then on, so its `timeout` begins there."""

    async def test(server: Server) -> None:
        start, rest_sent = time.monotonic(), 0.0

        async def slow_body() -> AsyncIterator[bytes]:
            nonlocal rest_sent
            yield body[:5]
            await until(lambda: server.app[UNANSWERED]._count == 1)
            rest_sent = time.monotonic()
            yield body[5:]

        async with server.client.post(path, data=slow_body(), headers={"Content-Type": "application/json"}) as response:
            assert response.status == 200
        [request] = server.batcher.requests
        assert start <= request.arrived < rest_sent

    serve(tokenizer, test)


def test_shutdown_gives_incomplete_bodies_a_503_after_a_short_time(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both an endless body that began before and one that begins during the shutdown."""
    monkeypatch.setattr(unanswered, "HURRY", 0.2)

    async def test(server: Server) -> None:
        async def endless_body() -> AsyncIterator[bytes]:
            while True:
                yield b" "
                await asyncio.sleep(0.01)

        early = asyncio.create_task(server.client.post("/generate", data=endless_body()))
        await until(lambda: server.app[UNANSWERED]._count == 1)
        answered = server.app[UNANSWERED].close()
        for response in (await early, await server.client.post("/generate", data=endless_body())):
            assert (response.status, response.headers["Retry-After"], response.headers["Connection"]) == (503, "1", "close")
            assert (await response.json())["error_type"] == "unavailable"
        await answered.wait()

    serve(tokenizer, test)


@pytest.mark.parametrize("disconnects", [False, True])
def test_shutdown_waits_for_earlier_requests_only(tokenizer: Tokenizer, disconnects: bool) -> None:
    """A request is earlier if its headers came before; later ones, which may be many, are not waited for."""

    async def test(server: Server) -> None:
        assert (await server.post("/generate", HELLO))[0] == 200
        sent, token_permits = asyncio.Event(), asyncio.Semaphore(0)

        async def slow_body() -> AsyncIterator[bytes]:
            yield b'{"inputs":'
            await sent.wait()
            yield b'"Hi"}'

        early = asyncio.create_task(server.client.post("/generate", data=slow_body()))
        await until(lambda: server.app[UNANSWERED]._count == 1)
        answered = server.app[UNANSWERED].close()
        server.batcher.token_permits = token_permits
        late = asyncio.create_task(server.post("/generate", HELLO))
        await until(lambda: server.batcher.opened == 2)
        assert not answered.is_set()
        if disconnects:
            early.cancel()
        else:
            sent.set()
            await until(lambda: server.batcher.opened == 3)
            assert not answered.is_set()
            server.batcher.token_permits = None
            token_permits.release()
            token_permits.release()
            assert (await early).status == 200
        await asyncio.wait_for(answered.wait(), 5)
        server.batcher.token_permits = None
        token_permits.release()
        assert (await late)[0] == 200
        assert answered.is_set()

    serve(tokenizer, test)


def test_body_of_one_byte_chunks_is_read_quickly(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        host, port = str(server.client._base_url.host), int(server.client._base_url.port or 0)
        reader, writer = await asyncio.open_connection(host, port)
        body = b'{"inputs":"Hi"' + b" " * 200_000 + b"}"
        start_time = time.monotonic()
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        for start in range(0, len(body), 1000):
            writer.write(b"".join(b"1\r\n%c\r\n" % byte for byte in body[start : start + 1000]))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert time.monotonic() - start_time < 10  # 1 is usual

    serve(tokenizer, test)


@pytest.mark.parametrize("failure", [Overloaded("all busy", 2.0), NotReady("not ready: loading"), Refused("no")])
@pytest.mark.parametrize("already_counted", [False, True])
def test_refused_request_is_counted_once_in_the_metrics(tokenizer: Tokenizer, failure: Failure, already_counted: bool) -> None:
    """By the API, unless whatever refused it has counted it already."""

    async def test(server: Server) -> None:
        failure.counted = already_counted
        server.batcher.fails_with = failure
        for path, body in (("/generate", {"inputs": "Hi"}), ("/v1/completions", {"prompt": "Hi"})):
            assert (await server.post(path, body))[0] >= 400
        assert len(server.metrics.failures) == 2 * (not already_counted)

    serve(tokenizer, test)


def test_payload_limit_total_bounds_all_bodies_together(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        host, port = str(server.client._base_url.host), int(server.client._base_url.port or 0)
        _, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n" + b" " * 800)
        while (await server.post("/generate", {"inputs": "Hi" * 100}))[0] == 200:  # noqa: ASYNC110 (until the other body has arrived)
            await asyncio.sleep(0.01)
        status, answer, response = await server.post("/v1/completions", {"prompt": "Hi" * 100})
        assert (status, answer["error"]["code"], response.headers["Retry-After"]) == (429, "overloaded", "1")
        assert set(server.metrics.failures) == {"overloaded"}
        writer.close()
        while (await server.post("/generate", {"inputs": "Hi" * 40}))[0] == 429:  # noqa: ASYNC110 (until the disconnect is noticed)
            await asyncio.sleep(0.01)
        assert (await server.post("/generate", {"inputs": "Hi" * 40}))[0] == 200

    serve(tokenizer, test, settings={"payload_limit_total": 900})


def test_body_counts_towards_the_total_limit_only_until_answered_or_given_up(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many bodies come in sequence, no two of which fit into the total limit at once."""
    monkeypatch.setattr(unanswered, "PATIENCE", 0.05)

    async def chunks() -> AsyncIterator[bytes]:
        yield b" " * 350
        yield b" " * 350

    async def test(server: Server) -> None:
        host, port = str(server.client._base_url.host), int(server.client._base_url.port or 0)
        for _ in range(3):
            assert (await server.post("/generate", {"inputs": "Hi" * 40}))[0] == 200
            assert (await server.post("/generate", b"{" + b" " * 300))[0] == 400
            async with server.client.post("/generate", data=chunks()) as answer:  # its size is not known before
                assert answer.status == 413
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 301\r\n\r\n" + b" " * 300)
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            writer.close()

    serve(tokenizer, test, settings={"payload_limit": 400, "payload_limit_total": 700})


def test_idle_keep_alive_connection_holds_no_body(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        assert (await server.post("/generate", {"inputs": "Hi"}))[0] == 200
        await asyncio.sleep(0.01)
        requests = [one for one in gc.get_objects() if type(one) is web.Request]
        assert not any(BODY in one for one in requests if one.transport is not None)

    serve(tokenizer, test)


def test_too_large_content_length_is_a_413_before_the_body_arrives(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        host, port = str(server.client._base_url.host), int(server.client._base_url.port or 0)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 401\r\n\r\n")
        async with asyncio.timeout(5):
            assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        writer.close()

    serve(tokenizer, test, settings={"payload_limit": 400})
