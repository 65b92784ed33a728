"""Administration routes, for operators of a running server: list replicas, add one, drain one, remove one.

They need the admin key, since a replica that joins gets all prompts. On a server without one they are refused: a loopback address
proves nothing, as a proxy there may forward others' requests.
"""

import re
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from ..config import RouterConfig, addresses_of
from ..replica import Replica, Unknown
from ..request import Refused
from .body import decode, json_response
from .errors import unauthorized
from .ports import Replicas
from .tenant import bears, digest

PREFIX = "/admin/"
REPLICAS = PREFIX + "replicas"
NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
Handle = Callable[[web.Request], Awaitable[web.Response]]


class JoinBody(msgspec.Struct, forbid_unknown_fields=True):
    """A running rank group that is to become a replica."""

    address: str  # of rank 0, or of all ranks, separated by commas
    name: str = ""  # "": a number


class DrainBody(msgspec.Struct, forbid_unknown_fields=True):
    """How a replica is drained."""

    move: bool = False  # its requests continue on other replicas at once


class Listing(msgspec.Struct):
    """The list of all replicas."""

    replicas: list[Replica]


class Admin:
    """The handlers of the administration routes."""

    def __init__(self, config: RouterConfig, replicas: Replicas) -> None:
        self._replicas = replicas
        self._key = digest(config.admin_key.encode()) if config.admin_key else b""

    def routes(self) -> list[web.RouteDef]:
        """The routes. On a server without an admin key they answer how to get one."""
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
        """POST /admin/replicas: 202; it takes requests once it is connected."""
        body = decode(http, JoinBody)
        return json_response(self._replicas.join(_addresses(body.address), _name(body.name)), status=202)

    async def drain(self, http: web.Request) -> web.Response:
        """POST /admin/replicas/{name}/drain: 202; it is "drained" when no request is left on it."""
        body = decode(http, DrainBody) if http.body_exists else DrainBody()
        return json_response(self._replicas.retire(http.match_info["name"], body.move), status=202)

    async def remove(self, http: web.Request) -> web.Response:
        """DELETE /admin/replicas/{name}: returns the remaining replicas."""
        await self._replicas.remove(http.match_info["name"])
        return await self.list(http)

    def _guarded(self, handler: Handle) -> Handle:
        async def guarded(http: web.Request) -> web.Response:
            if not self._key:
                raise Unknown("these routes are there with --admin-key (ADMIN_KEY), which this server lacks")
            if not bears(http, [self._key]):
                raise unauthorized("the admin key")
            return await handler(http)

        return guarded


def _addresses(text: str) -> tuple[str, ...]:
    try:
        return addresses_of(text)
    except ValueError as error:
        raise Refused(f"`address`: {error}. Given: {text}", "address") from None


def _name(text: str) -> str:
    if text and not NAME.fullmatch(text):
        raise Refused("`name`: up to 64 letters, digits, _, . and -", "name")
    return text
