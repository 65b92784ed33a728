"""CORS: which web pages of other origins may use the server from a browser. Knows no route.

Browser credentials (cookies) are never allowed, as there are none: a page sends its API key itself.
"""

from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ..config import ANY_ORIGIN, NO_ORIGIN

KEPT = "600"  # seconds for which a browser caches a preflight
METHODS = "GET, POST, HEAD, OPTIONS"

Hook = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


def cors(origins: str) -> tuple[Middleware, Hook]:
    """A middleware that answers preflights before an API key is asked for, and a hook that adds CORS headers to all other
    responses.

    origins: separated by commas; ANY_ORIGIN for all, NO_ORIGIN for none.
    """
    allowed = frozenset(origin.strip().rstrip("/") for origin in origins.split(","))

    def grant(http: web.Request) -> dict[str, str]:
        origin = http.headers.get("Origin", "")
        if not origin or NO_ORIGIN in allowed:
            return {}
        if ANY_ORIGIN in allowed:
            return {"Access-Control-Allow-Origin": "*"}
        return {"Access-Control-Allow-Origin": origin} if origin in allowed else {}

    @web.middleware
    async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        wanted = request.headers.get("Access-Control-Request-Headers")
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers or not grant(request):
            return await handler(request)
        headers = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": KEPT}
        if wanted:  # repeated, since `*` would not cover Authorization
            headers["Access-Control-Allow-Headers"] = wanted
        return web.Response(status=204, headers=headers)

    async def add_headers(http: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(grant(http))
        if ANY_ORIGIN not in allowed and NO_ORIGIN not in allowed:
            response.headers["Vary"] = ", ".join(filter(None, (response.headers.get("Vary"), "Origin")))
        if "Access-Control-Allow-Origin" in response.headers:
            response.headers["Access-Control-Expose-Headers"] = "*"

    return preflight, add_headers
