"""Log filters: what clients have sent is not logged, and repeated lines are rate-limited."""

import asyncio
import logging
from collections.abc import Iterator

import pytest
from aiohttp import web

from penstock.router.log_filters import HttpErrorFilter, RateLimited, calm

CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def server_log() -> Iterator[logging.Logger]:
    """aiohttp's server logger, with the filter as in the router."""
    found, error_filter = logging.getLogger("aiohttp.server"), HttpErrorFilter()
    found.addFilter(error_filter)
    yield found
    found.removeFilter(error_filter)


def response_to(data: bytes) -> bytes:
    """The response of a server that reads bodies to `data`."""

    async def read(http: web.Request) -> web.Response:
        return web.Response(text=str(len(await http.read())))

    async def run() -> bytes:
        app = web.Application()
        app.router.add_route("*", "/{any:.*}", read)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        await runner.cleanup()
        return answer

    return asyncio.run(run())


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO, logging.WARNING])
@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nAuthorization: Bearer SECRET\x01\r\n\r\n",
        b"GET / HTTP/1.1\r\nAuthorization: Bearer\r\n SECRET\r\n\r\n",
        b"SECRET\x01 / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /SECRET HTTP/9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01SECRET\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: SECRET\r\n\r\n",
        CHUNKED + b"SECRET\r\n",
        CHUNKED + b"2\r\nab\r\nSECRET\r\n",
    ],
)
def test_invalid_http_is_logged_in_one_line_without_its_content(
    data: bytes, level: int, server_log: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(level):
        assert b" 400 " in response_to(data).partition(b"\r\n")[0]
    assert "SECRET" not in caplog.text
    lines = [record for record in caplog.records if record.name == "aiohttp.server" and "no HTTP" in record.getMessage()]
    assert len(lines) <= 1
    for record in lines:
        assert record.getMessage().startswith("no HTTP from 127.0.0.1: ")
        assert record.exc_info is None
        assert level <= record.levelno <= logging.INFO
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_other_errors_are_logged_with_their_traceback(server_log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ZeroDivisionError("ours")
    except ZeroDivisionError as error:
        server_log.error("Error handling request from %s", "127.0.0.1", exc_info=error)
    [record] = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.ERROR, "Error handling request from 127.0.0.1")
    assert "ZeroDivisionError: ours" in caplog.text


def test_repeated_lines_pass_once_per_interval_with_their_count() -> None:
    times: list[float] = []
    limiter = RateLimited(60.0, lambda: times.pop())

    def passes(level: int, text: str, now: float) -> str | None:
        times.append(now)
        record = logging.LogRecord("some", level, "", 0, text, (), None)
        return record.getMessage() if limiter.filter(record) else None

    assert passes(logging.WARNING, "100% full", 0.0) == "100% full"
    assert passes(logging.ERROR, "lost", 0.0) == "lost"
    assert [passes(logging.WARNING, "100% full", now) for now in (1.0, 2.0, 59.9)] == [None] * 3
    assert passes(logging.WARNING, "100% full", 60.0) == "100% full (and 3 more like it since)"
    assert passes(logging.ERROR, "lost", 60.0) == "lost"
    assert passes(logging.WARNING, "100% full", 200.0) == "100% full"


def test_all_loggers_of_a_package_are_rate_limited(caplog: pytest.LogCaptureFixture) -> None:
    below, beside = logging.getLogger("chatty.below"), logging.getLogger("chattyness")
    calm("chatty")
    for _ in range(3):
        below.warning("down")
        beside.warning("down")
    assert [record.name for record in caplog.records] == ["chatty.below", *["chattyness"] * 3]
