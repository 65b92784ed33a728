"""Requests that have come and are not answered: who shuts the server down waits for them. Counts; knows no request."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web

PATIENCE = 60.0  # seconds that a client gets to send a body
HURRY = 5.0  # from when the server is being shut down, on which others wait by then


class Unanswered:
    """All of an application's, until `close`; from then on those that came before."""

    def __init__(self) -> None:
        self._count = 0
        self.closed = False
        self._reading: set[asyncio.Timeout] = set()
        self._none = asyncio.Event()

    @contextmanager
    def one(self) -> Iterator[None]:
        """A request has come, and is answered at the end."""
        if self.closed:  # it will be refused, and so many may come that there is always one
            yield
            return
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            self._look()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Of a body. Raises TimeoutError if its client takes too long."""
        async with asyncio.timeout(HURRY if self.closed else PATIENCE) as limit:
            self._reading.add(limit)
            try:
                yield
            finally:
                self._reading.discard(limit)

    def close(self) -> asyncio.Event:
        """Set when there are none any more of those that have come by now."""
        self.closed = True
        soon = asyncio.get_running_loop().time() + HURRY
        for limit in self._reading:
            limit.reschedule(min(limit.when() or soon, soon))
        self._look()
        return self._none

    def _look(self) -> None:
        if self.closed and not self._count:
            self._none.set()


UNANSWERED = web.AppKey("unanswered", Unanswered)
