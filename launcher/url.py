"""Where a server is, as somebody has named it."""

from urllib.parse import SplitResult, urlsplit

from .mistake import Mistake


def split(url: str, named: str) -> SplitResult:
    """Of a whole URL. Raises Mistake, which says what was `named`, if no server can be there."""
    parts = urlsplit(url)
    try:
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        good = False
    if not good:
        raise Mistake(f"{named} is no URL of a server: http://HOST:PORT is needed")
    return parts
