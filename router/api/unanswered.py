"""Requests that have come and are not answered: who shuts the server down waits for them. Counts; knows no request."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web


class Unanswered:
    """All of an application's, until `close`; from then on those that came before."""

    def __init__(self) -> None:
        self._count = 0
        self._closed = False
        self._none = asyncio.Event()

    @contextmanager
    def one(self) -> Iterator[None]:
        """A request has come, and is answered at the end."""
        if self._closed:  # it will be refused, and so many may come that there is always one
            yield
            return
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            self._look()

    def close(self) -> asyncio.Event:
        """Set when there are none any more of those that have come by now."""
        self._closed = True
        self._look()
        return self._none

    def _look(self) -> None:
        if self._closed and not self._count:
            self._none.set()


UNANSWERED = web.AppKey("unanswered", Unanswered)
