"""Counts requests that have arrived and are not answered yet, for a graceful shutdown to wait for. Knows no request."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web

PATIENCE = 60.0  # seconds that a client gets to send a body
HURRY = 5.0  # the same once the server is shutting down, when others wait for it


class Unanswered:
    """The unanswered requests of an application; after `close`, of those that arrived before."""

    def __init__(self) -> None:
        self._count = 0
        self.closed = False
        self._reading: set[asyncio.Timeout] = set()
        self._none = asyncio.Event()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Counts a request from its arrival until it is answered."""
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
        """Limits the time of reading a body. Raises TimeoutError if the client takes too long."""
        async with asyncio.timeout(HURRY if self.closed else PATIENCE) as limit:
            self._reading.add(limit)
            try:
                yield
            finally:
                self._reading.discard(limit)

    def close(self) -> asyncio.Event:
        """Stops counting new requests. Returns an event that is set when those that have arrived by now are answered."""
        self.closed = True
        soon = asyncio.get_running_loop().time() + HURRY
        for limit in self._reading:
            if not limit.expired():  # its reader may not have heard of it yet
                limit.reschedule(min(limit.when() or soon, soon))
        self._look()
        return self._none

    def _look(self) -> None:
        if self.closed and not self._count:
            self._none.set()


UNANSWERED = web.AppKey("unanswered", Unanswered)
