"""Parses the URL of a server that somebody has typed."""

from urllib.parse import SplitResult, urlsplit

from .mistake import Mistake


def split(url: str, named: str) -> SplitResult:
    """The parts of a whole URL. Raises Mistake, which repeats what was `named`, if it cannot be a server's."""
    parts = urlsplit(url)
    try:
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        good = False
    if not good:
        raise Mistake(f"{named} is no URL of a server: http://HOST:PORT is needed")
    return parts
