"""Loads the images that requests name by URLs: decodes data URLs, and fetches http(s) URLs with protection against SSRF.

A URL makes this server send a request to somebody else, perhaps to a host that only this server can reach. So either any public
address may be fetched from, or only the hosts that the operator names (--image-hosts). Addresses are checked when a socket is
created for them, that is after name resolution, odd notations of numbers, redirects, and names that resolve differently the second
time.
"""

import asyncio
import base64
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from yarl import URL

from ..config import RouterConfig
from ..request import Overloaded, Refused

PUBLIC, NOBODY = "public", "none"  # values of --image-hosts other than hosts
SECONDS = 10.0  # for an image, including redirects
TOGETHER = 32  # images that are fetched at once
REDIRECTS = 3
PIECE = 65536  # bytes
BASE64 = ";base64"
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # embeds an IPv4 address, as 6to4 does
LOCAL_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")
Hold = Callable[[int], None]  # accounts for so many more bytes; raises Overloaded
HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "penstock"}


class ImageLoader:
    """The loader of images."""

    def __init__(self, config: RouterConfig) -> None:
        hosts = config.image_hosts.strip().lower()
        self._public = hosts == PUBLIC
        self._hosts = frozenset() if hosts in (PUBLIC, NOBODY) else frozenset(host.strip() for host in hosts.split(","))
        self._most = config.payload_limit
        self._most_together = config.payload_limit_total
        self._held = 0  # fetched bytes of all requests that are being processed
        self._free = asyncio.Semaphore(TOGETHER)
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def opened(self, urls: Sequence[str]) -> AsyncIterator[list[bytes]]:
        """The images' bytes, in order; within the context they count as held. Raises Refused, or Overloaded."""
        if not urls:
            yield []
            return
        held = 0

        def hold(length: int) -> None:
            nonlocal held
            held += length
            self._held += length
            if self._held > self._most_together:
                raise Overloaded(f"images that were fetched have more than {self._most_together} bytes together")

        tasks = [asyncio.create_task(self._get(url, f"image {number}", hold)) for number, url in enumerate(urls, 1)]
        try:
            try:
                found = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
            yield found
        finally:
            self._held -= held

    async def close(self) -> None:
        """Ends fetches that are under way."""
        if self._session is not None:
            await self._session.close()

    async def _get(self, text: str, name: str, hold: Hold) -> bytes:
        if text[:5].lower() == "data:":
            return from_data(text, name)
        try:
            url = URL(text)
        except ValueError:
            raise Refused(f"{name} has a URL that is none", "inputs") from None
        if url.scheme not in ("http", "https") or not url.raw_host:
            raise Refused(f"{name} must be a URL that begins with data:, http:// or https://", "inputs")
        if not self._public and not self._hosts:
            raise Refused(f"{name} must be a data: URL, since the server fetches none (--image-hosts none)", "inputs")
        try:
            async with asyncio.timeout(SECONDS), self._free:
                return await self._follow(url, name, hold)
        except TimeoutError:
            raise _failed(name, url, f"that takes more than {SECONDS:g} s") from None

    async def _follow(self, url: URL, name: str, hold: Hold) -> bytes:
        for _ in range(1 + REDIRECTS):
            self._check(url, name)
            try:
                async with self._client().get(url, allow_redirects=False) as response:
                    if response.status not in (301, 302, 303, 307, 308):
                        return await self._read(response, url, name, hold)
                    url = url.join(URL(response.headers.get("Location", "")))
            except aiohttp.ClientConnectorError:
                raise _failed(name, url, f"it can't be reached{' at a public address' * self._public}") from None
            except (aiohttp.InvalidURL, ValueError):
                raise _failed(name, url, "that is no URL, or it redirects to what is none") from None
            except (aiohttp.ClientError, OSError) as error:
                raise _failed(name, url, f"it ends the connection, or answers nonsense ({type(error).__name__})") from None
        raise _failed(name, url, f"there are more than {REDIRECTS} redirects")

    def _check(self, url: URL, name: str) -> None:
        """Raises Refused if the URL may not be fetched."""
        if url.scheme not in ("http", "https") or not url.raw_host:
            raise Refused(f"{name} is redirected to a URL that is none of http or https", "inputs")
        if url.user is not None or url.password is not None:
            raise _failed(name, url, "a URL must not hold a name or a password")
        host = url.host_subcomponent  # as it is looked up: --image-hosts has names in ASCII, too
        if not self._public and not {host, f"{host}:{url.port}"} & self._hosts:
            raise _failed(name, url, "it is none of the hosts that images may come from (--image-hosts)")

    async def _read(self, response: aiohttp.ClientResponse, url: URL, name: str, hold: Hold) -> bytes:
        if response.status != 200:
            raise _failed(name, url, f"it answers {response.status}")
        found = bytearray()
        async for piece in response.content.iter_chunked(PIECE):
            hold(len(piece))
            found += piece
            if len(found) > self._most:
                raise _failed(name, url, f"it has more than {self._most} bytes (--payload-limit)")
        return bytes(found)

    def _client(self) -> aiohttp.ClientSession:
        """The HTTP client, created at first use, since it needs a running event loop."""
        if self._session is None:
            connector = aiohttp.TCPConnector(
                socket_factory=_public_socket if self._public else None, use_dns_cache=False, force_close=True, limit=TOGETHER
            )
            self._session = aiohttp.ClientSession(
                connector=connector, headers=HEADERS, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
            )
        return self._session


def from_data(url: str, name: str) -> bytes:
    """The bytes of data:image/...;base64,..."""
    head, comma, body = url.partition(",")
    if not head[5:].lower().startswith("image/") or not head.lower().endswith(BASE64) or not comma:
        raise Refused(f"{name} must be data:image/...;base64,... if it is a data: URL", "inputs")
    body = "".join(body.split())  # some clients break lines (RFC 2045)
    try:
        return base64.b64decode(body + "=" * (-len(body) % 4), validate=True)
    except ValueError:  # binascii's error too; and for what is not ASCII
        raise Refused(f"{name} is not in base64", "inputs") from None


def is_public(address: str) -> bool:
    """Whether an address is reachable by anybody, and not only from this server."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # a number in another notation
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if found in NAT64:
            inner = ipaddress.IPv4Address(found.packed[-4:])
        if inner is not None:
            return is_public(str(inner))
        if found.teredo is not None or found in LOCAL_NAT64 or found.is_site_local:  # which is_global takes for public
            return False
    return found.is_global and not found.is_multicast


def _public_socket(address: Any) -> socket.socket:
    """A socket for this address, a tuple of getaddrinfo. Raises OSError if it is not public."""
    family, kind, protocol, _, place = address
    if not is_public(place[0]):
        raise OSError(f"{place[0]} is no public address")
    return socket.socket(family, kind, protocol)


def _failed(name: str, url: URL, why: str) -> Refused:
    """The refusal, without the rest of the URL, which may be a secret."""
    return Refused(f"{name} can't be had from {url.raw_host}: {why}", "inputs")
