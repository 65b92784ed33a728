"""What operators ask of a server that runs: which replicas there are; that one joins, takes no more requests, or leaves.

Who may: whoever has the admin key, since what joins gets all prompts. A server without one has nobody whom it could ask for more: a
loopback address is no proof, for a proxy on it may say nothing of those behind it.
"""

import re
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from ..config import RouterConfig, addresses_of
from ..replica import Conflict, Replica, Unknown
from ..request import Refused
from .body import json_response, read
from .errors import Problem, Rejected, unauthorized
from .ports import Replicas
from .tenant import bears, digest

PREFIX = "/admin/"
REPLICAS = PREFIX + "replicas"
NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
Handle = Callable[[web.Request], Awaitable[web.Response]]


class JoinBody(msgspec.Struct, forbid_unknown_fields=True):
    """A rank group that runs."""

    address: str  # of rank 0, or of all ranks with commas between them
    name: str = ""  # "": a number


class DrainBody(msgspec.Struct, forbid_unknown_fields=True):
    """How a replica ends what it has begun."""

    move: bool = False  # its requests go on on others at once


class Listing(msgspec.Struct):
    """All replicas."""

    replicas: list[Replica]


class Admin:
    """The handlers."""

    def __init__(self, config: RouterConfig, replicas: Replicas) -> None:
        self._limit = config.payload_limit
        self._replicas = replicas
        self._key = digest(config.admin_key.encode()) if config.admin_key else b""
        self._join, self._drain = msgspec.json.Decoder(JoinBody), msgspec.json.Decoder(DrainBody)

    def routes(self) -> list[web.RouteDef]:
        """Those of a server without a key say how to get one."""
        one = REPLICAS + "/{name}"
        return [
            web.get(REPLICAS, self._guarded(self.list)),
            web.post(REPLICAS, self._guarded(self.join)),
            web.post(one + "/drain", self._guarded(self.drain)),
            web.delete(one, self._guarded(self.remove)),
        ]

    async def list(self, http: web.Request) -> web.Response:
        """GET /admin/replicas."""
        return json_response(Listing(self._replicas.replicas))

    async def join(self, http: web.Request) -> web.Response:
        """POST /admin/replicas: 202, and it takes part as soon as it is there."""
        body = await read(http, self._join, self._limit)
        return json_response(self._replicas.join(_addresses(body.address), _name(body.name)), status=202)

    async def drain(self, http: web.Request) -> web.Response:
        """POST /admin/replicas/{name}/drain: 202, and it is "drained" as soon as nothing of it is left."""
        body = await read(http, self._drain, self._limit) if http.body_exists else DrainBody()
        return json_response(self._replicas.retire(http.match_info["name"], body.move), status=202)

    async def remove(self, http: web.Request) -> web.Response:
        """DELETE /admin/replicas/{name}: those that are left."""
        await self._replicas.remove(http.match_info["name"])
        return await self.list(http)

    def _guarded(self, handler: Handle) -> Handle:
        async def guarded(http: web.Request) -> web.Response:
            self._check(http)
            try:
                return await handler(http)
            except Unknown as unknown:
                raise Rejected(Problem(404, "not_found", str(unknown))) from None
            except Conflict as conflict:
                raise Rejected(Problem(409, "conflict", str(conflict))) from None

        return guarded

    def _check(self, http: web.Request) -> None:
        """Raises Rejected unless it may be asked."""
        if not self._key:
            raise Rejected(
                Problem(404, "not_found", "these routes are there with --admin-key (ADMIN_KEY), which this server lacks")
            )
        if not bears(http, [self._key]):
            raise unauthorized("the admin key")


def _addresses(text: str) -> tuple[str, ...]:
    try:
        return addresses_of(text)
    except ValueError as error:
        raise Refused(f"`address`: {error}. Given: {text}", "address") from None


def _name(text: str) -> str:
    if text and not NAME.fullmatch(text):
        raise Refused("`name`: up to 64 letters, digits, _, . and -", "name")
    return text
