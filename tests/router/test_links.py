"""Images by URL: allowed hosts, redirects, private addresses (SSRF), limits, and data: URLs."""

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from penstock.router.api import links as module
from penstock.router.api.links import ImageLoader, from_data, is_public
from penstock.router.config import RouterConfig
from penstock.router.request import Overloaded, Refused

DATA = b"\x89PNG whatever"
Get = Callable[..., Awaitable[bytes]]


def serving(test: Callable[[int, Get], Awaitable[None]], **settings: Any) -> list[web.Request]:
    """Runs a test with an image server at 127.0.0.1 and a function that loads a URL. Returns the requests to that server."""
    requests: list[web.Request] = []

    async def handler(http: web.Request) -> web.StreamResponse:
        requests.append(http)
        match http.path:
            case "/image":
                return web.Response(body=DATA)
            case "/gone":
                raise web.HTTPNotFound
            case "/large":
                return web.Response(body=bytes(5000))
            case "/endless":
                response = web.StreamResponse()
                await response.prepare(http)
                while True:
                    await response.write(bytes(1000))
            case "/slow":
                await asyncio.sleep(5)
            case "/broken":
                assert http.transport is not None
                http.transport.close()
            case "/loop":
                raise web.HTTPFound("/loop?secret")
            case "/to":
                return web.Response(status=301, headers={"Location": http.query["url"]})
        return web.Response()

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", handler)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        hosts = settings.pop("image_hosts", f"127.0.0.1:{port}")
        links = ImageLoader(RouterConfig(folder="", model="m", payload_limit=4000, image_hosts=hosts, **settings))

        async def get(url: str) -> bytes:
            async with links.opened([url]) as [found]:
                return found

        try:
            async with asyncio.timeout(30):
                await test(port, get)
            assert links._held == 0
        finally:
            await links.close()
            await runner.cleanup()

    asyncio.run(run())
    return requests


async def refusal(getting: Awaitable[bytes]) -> str:
    """Awaits a load that must be refused; returns the message, which must not contain the query."""
    with pytest.raises(Refused) as error:
        await getting
    assert error.value.parameter == "inputs"
    assert "secret" not in str(error.value)
    return str(error.value)


def test_image_of_an_allowed_host_is_fetched_with_few_headers_and_redirects() -> None:
    async def test(port: int, get: Get) -> None:
        assert await get(f"http://127.0.0.1:{port}/image?secret") == DATA
        assert await get(f"HTTP://127.0.0.1:{port}/to?url=/to?url=http://127.0.0.1:{port}/image") == DATA

    requests = serving(test)
    assert {name for http in requests for name in http.headers} == {"Host", "Connection", "Accept", "Accept-Encoding", "User-Agent"}
    assert len(requests) == 4


def test_image_hosts_match_with_or_without_a_port_also_after_redirects() -> None:
    async def test(port: int, get: Get) -> None:
        assert await get(f"http://localhost:{port}/image") == DATA
        assert "none of the hosts" in await refusal(get(f"http://127.0.0.1:{port}/image"))
        assert "none of the hosts" in await refusal(get(f"http://localhost:{port}/to?url=http://127.0.0.1:{port}/image"))
        assert "none of the hosts" in await refusal(get("http://elsewhere:80/image"))
        assert "can't be reached" in await refusal(get("http://elsewhere:1/image?secret"))

    assert [http.path for http in serving(test, image_hosts="LocalHost, elsewhere:1")] == ["/image", "/to"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("gone?secret", "it answers 404"),
        ("large?secret", "it has more than 4000 bytes (--payload-limit)"),
        ("endless?secret", "it has more than 4000 bytes (--payload-limit)"),
        ("slow?secret", "that takes more than 0.5 s"),
        ("broken?secret", "it ends the connection, or answers nonsense (ServerDisconnectedError)"),
        ("loop?secret", "there are more than 3 redirects"),
        ("to?url=http://user:secret@127.0.0.1/image", "a URL must not hold a name or a password"),
        ("to?url=http://:1", "that is no URL, or it redirects to what is none"),
    ],
)
def test_failed_fetch_is_refused_with_the_reason_without_the_query(monkeypatch: pytest.MonkeyPatch, path: str, reason: str) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.5)

    async def test(port: int, get: Get) -> None:
        assert await refusal(get(f"http://127.0.0.1:{port}/{path}")) == f"image 1 can't be had from 127.0.0.1: {reason}"

    serving(test)


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:{}/image", "http://localhost:{}/image", "http://2130706433:{}/image", "http://127.1:{}/image"),
        *(
            "http://0x7f000001:{}/image",
            "http://0177.0.0.1:{}/image",
            "http://[::ffff:127.0.0.1]:{}/image",
            "http://0.0.0.0:{}/image",
        ),
        *(
            "http://[::1]:{}/image",
            "http://169.254.169.254/latest",
            "http://10.0.0.1/",
            "http://[fe80::1]/",
            "http://[64:ff9b::7f00:1]/",
        ),
        *("https://localhost:{}/image", "http://１２７.0.0.1:{}/image"),
    ],
)
def test_private_address_is_never_contacted(url: str) -> None:
    async def test(port: int, get: Get) -> None:
        message = await refusal(get(url.format(port)))
        assert "it can't be reached at a public address" in message or "that is no URL" in message

    assert serving(test, image_hosts="public") == []


def test_redirect_to_a_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_public", lambda address: address == "127.0.0.1")

    async def test(port: int, get: Get) -> None:
        assert await get(f"http://127.0.0.1:{port}/to?url=/image") == DATA
        for other in (f"http://127.0.0.2:{port}/image", f"http://[::1]:{port}/image", "http://169.254.169.254/latest"):
            assert "it can't be reached at a public address" in await refusal(get(f"http://127.0.0.1:{port}/to?url={other}"))
        message = await refusal(get(f"http://127.0.0.1:{port}/to?url=file:///etc/passwd"))
        assert message == "image 1 is redirected to a URL that is none of http or https"

    assert [http.path for http in serving(test, image_hosts="public")] == ["/to", "/image", "/to", "/to", "/to", "/to"]


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("2002:808:808::1", True),  # 6to4's 8.8.8.8
        ("2002:7f00:1::1", False),
        ("64:ff9b::808:808", True),
        ("64:ff9b::a00:1", False),
        ("64:ff9b:1::808:808", False),
        ("::ffff:8.8.8.8", True),
        ("::ffff:10.0.0.1", False),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", False),  # Teredo
        ("224.0.0.1", False),
        ("ff0e::1", False),
        ("fec0::1", False),  # site-local
        *(
            (one, False)
            for one in ("127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1")
        ),
        *(
            (one, False)
            for one in ("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "255.255.255.255", "2130706433", "127.1", "")
        ),
    ],
)
def test_is_public_classifies_addresses(address: str, public: bool) -> None:
    assert is_public(address) == public


@pytest.mark.parametrize("hosts", ["public", "x"])
def test_host_that_is_no_internationalized_name_is_refused(hosts: str) -> None:
    async def test(port: int, get: Get) -> None:
        assert (await refusal(get("http://xn--/image"))).startswith("image 1 can't be had from xn--: ")

    assert serving(test, image_hosts=hosts) == []


def test_image_hosts_match_internationalized_names_in_ascii() -> None:
    async def test(port: int, get: Get) -> None:
        for host in ("xn--tda.invalid", "ü.invalid"):
            assert await refusal(get(f"http://{host}/")) == "image 1 can't be had from xn--tda.invalid: it can't be reached"

    assert serving(test, image_hosts="xn--tda.invalid") == []


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x/y", "gopher://x", "x.png", "", "http://", "//x/y", "http:x"])
@pytest.mark.parametrize("hosts", ["public", "none", "x"])
def test_other_schemes_and_malformed_urls_are_refused(url: str, hosts: str) -> None:
    async def test(port: int, get: Get) -> None:
        message = await refusal(get(url))
        assert message in ("image 1 must be a URL that begins with data:, http:// or https://", "image 1 has a URL that is none")

    assert serving(test, image_hosts=hosts) == []


def test_image_hosts_none_allows_only_data_urls() -> None:
    async def test(port: int, get: Get) -> None:
        assert "the server fetches none (--image-hosts none)" in await refusal(get(f"http://127.0.0.1:{port}/image"))
        assert await get("data:image/png;base64," + base64.b64encode(DATA).decode()) == DATA

    assert serving(test, image_hosts="none") == []


def test_payload_limit_total_bounds_fetched_images_together() -> None:
    async def test(port: int, get: Get) -> None:
        assert await get(f"http://127.0.0.1:{port}/image") == DATA
        with pytest.raises(Overloaded):
            await get(f"http://127.0.0.1:{port}/large")
        assert await get(f"http://127.0.0.1:{port}/image") == DATA  # the failed load released its bytes

    serving(test, payload_limit_total=2000)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("data:image/png;base64,AAEC", b"\0\1\2"),
        ("DATA:image/JPEG;charset=x;BASE64,AAE=", b"\0\1"),
        ("data:image/png;base64,AAE", b"\0\1"),  # some clients omit the padding
        ("data:image/png;base64,AA\r\nEC\n", b"\0\1\2"),
        ("data:image/png;base64,", b""),
    ],
)
def test_data_url_is_decoded(url: str, found: bytes) -> None:
    assert from_data(url, "image 1") == found


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64,A!==", "image 1 is not in base64"),
        ("data:image/png;base64,AAAAA", "image 1 is not in base64"),
        ("data:image/png;base64,é", "image 1 is not in base64"),
        ("data:image/png,AAEC", "image 1 must be data:image/...;base64,... if it is a data: URL"),
        ("data:text/plain;base64,AAEC", "image 1 must be data:image/...;base64,... if it is a data: URL"),
        ("data:image/png;base64", "image 1 must be data:image/...;base64,... if it is a data: URL"),
    ],
)
def test_malformed_data_url_is_refused(url: str, message: str) -> None:
    with pytest.raises(Refused) as refused:
        from_data(url, "image 1")
    assert str(refused.value) == message
