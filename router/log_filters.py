"""Log filters for libraries' loggers: drop what clients have sent, and rate-limit repeated lines.

Knows neither a request nor a trace.
"""

import logging
import time
from collections.abc import Callable

from aiohttp.client_exceptions import ClientPayloadError
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import RequestPayloadError

SELDOM = 60.0  # seconds between two lines of a kind
NO_HTTP = (HttpProcessingError, RequestPayloadError, ClientPayloadError)  # their messages quote what was sent, perhaps a key


def calm(package: str) -> None:
    """Rate-limits the loggers of an imported package."""
    limiter = RateLimited()
    for name in sorted(logging.root.manager.loggerDict):  # each of them: a filter does not apply to child loggers
        if name == package or name.startswith(f"{package}."):
            logging.getLogger(name).addFilter(limiter)


class HttpErrorFilter(logging.Filter):
    """For aiohttp's server: invalid HTTP gets one line, which quotes nothing of it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrites records of invalid HTTP; all others pass as they are."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, NO_HTTP):
            return True
        address = record.args[0] if isinstance(record.args, tuple) and record.args else "a client"
        record.msg, record.args = "no HTTP from %s: %s", (address, type(error).__name__)
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = min((record.levelno, record.levelname), (logging.INFO, "INFO"))
        return logging.getLogger(record.name).isEnabledFor(record.levelno)


class RateLimited(logging.Filter):
    """Rate limit: of each kind, a logger's lines of a level, one passes per interval, and reports how many were dropped."""

    def __init__(self, seconds: float = SELDOM, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._seconds = seconds
        self._clock = clock
        self._kinds: dict[tuple[str, int], tuple[float, int]] = {}  # when one passed, and how many were dropped since

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record passes."""
        kind, now = (record.name, record.levelno), self._clock()
        last, withheld = self._kinds.get(kind, (now - self._seconds, 0))
        if now < last + self._seconds:
            self._kinds[kind] = last, withheld + 1
            return False
        self._kinds[kind] = now, 0
        if withheld:
            record.msg, record.args = f"{record.getMessage()} (and {withheld} more like it since)", ()
        return True
