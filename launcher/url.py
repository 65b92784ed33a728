"""Parses the URL of a server that somebody has typed."""

from contextlib import suppress
from urllib.parse import SplitResult, urlsplit

from .errors import UsageError


def split(url: str, named: str) -> SplitResult:
    """The parts of a whole URL. Raises UsageError, which repeats what was `named`, if it cannot be a server's."""
    with suppress(ValueError):  # the port is no number, a bracket is missing, no host can have such a name
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and parts.hostname.encode("idna"):
            return parts
    raise UsageError(f"{named} is no URL of a server: http://HOST:PORT is needed")
