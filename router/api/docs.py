"""API documentation routes: `/openapi.json`, and `/docs`, a page that shows the document and can send requests. It works
offline."""

from functools import cached_property
from pathlib import Path

import msgspec
from aiohttp import web

from ..config import RouterConfig
from .page import KINDS, file_response

DESCRIPTION = "/openapi.json", "/api-doc/openapi.json"  # the second is text-generation-inference's
FOLDER = Path(__file__).parent / "docs"
INDEX = FOLDER / "index.html"
FILES = {"/docs": INDEX} | {
    f"/docs/{path.name}": path for path in sorted(FOLDER.iterdir()) if path.suffix in KINDS and path != INDEX
}


class Docs:
    """The handlers of the documentation routes."""

    # open without a key, since no secret is in them; /openapi.json needs one, as the routes that it describes do
    paths = FILES.keys()

    def __init__(self, config: RouterConfig) -> None:
        self._config = config

    def routes(self) -> list[web.RouteDef]:
        """The routes; HEAD is included."""
        return [*(web.get(path, self.description) for path in DESCRIPTION), *(web.get(path, self.file) for path in FILES)]

    async def description(self, http: web.Request) -> web.Response:
        """GET /openapi.json."""
        return web.Response(body=self._description, content_type="application/json")

    async def file(self, http: web.Request) -> web.FileResponse:
        """GET /docs."""
        return file_response(FILES[http.path])

    @cached_property
    def _description(self) -> bytes:
        """The encoded document, made at the first request: that takes a while, and most servers are never asked."""
        from .openapi import document  # imported here, since its types take 40 ms, which no start should wait for

        return msgspec.json.encode(document(self._config))
