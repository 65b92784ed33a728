"""Servers' URLs as people type them, and connections to these servers."""

import http.client
from contextlib import suppress
from urllib.parse import SplitResult, quote, urlsplit

from .errors import UsageError


def split(text: str) -> SplitResult:
    """The parts of a server's URL, with or without http:// before it and /v1 behind it, which is left out. Raises UsageError."""
    with suppress(ValueError):  # the port is no number, a bracket is missing, no host can have such a name
        parts = urlsplit(text if "://" in text else f"http://{text}")
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and parts.hostname.encode("idna"):
            path = quote(parts.path, safe="/%:@!$&'()*+,;=~")  # http.client takes ASCII alone
            return parts._replace(path=path.rstrip("/").removesuffix("/v1"))
    raise UsageError(f"{text} is no URL of a server: http://HOST:PORT is needed")


def connection(url: SplitResult, timeout: float) -> http.client.HTTPConnection:
    """A connection that is made when it is first used. timeout: seconds until it is made, and for each wait after that."""
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    return kind(url.hostname or "", url.port, timeout=timeout)
