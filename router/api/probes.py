"""Health probes: whether the server lives, has loaded, takes requests. Load balancers and orchestrators ask these separately.

/health         503 while the model loads for the first time, then 200 as long as this process lives: TGI's, to start by
/health/ready   200 exactly when a request would be computed now; 503 while the model loads, the server drains, or the shards were
                lost and others do not yet take their place, for which requests wait; of several replicas: when one takes requests
/health/live    200 as long as this process answers
"""

import re

from aiohttp import web

from ..replica import Unknown
from .body import json_response
from .errors import HttpError, Problem
from .ports import Batcher, Replicas

HEALTH, READY, LIVE = "/health", "/health/ready", "/health/live"
SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%")
RETRY = {"Retry-After": "1"}


class Probes:
    """The handlers of the health probes."""

    def __init__(self, batcher: Batcher, replicas: Replicas | None = None) -> None:
        self._batcher = batcher
        self._replicas = replicas

    async def health(self, http: web.Request) -> web.Response:
        """GET /health. The body is empty, or says why not."""
        if self._batcher.limits is not None:  # known once the model has been loaded, whatever happens later
            return web.Response()
        return self._refusal({"error": "unhealthy", "error_type": "healthcheck"})

    async def ready(self, http: web.Request) -> web.Response:
        """GET /health/ready; of one replica with ?replica=NAME."""
        name = http.query.get("replica")
        if self._batcher.ready if name is None or self._replicas is None else self._serves(self._replicas, name):
            return json_response({"ready": True, "stage": self._batcher.stage})
        return self._refusal({"ready": False})

    async def live(self, http: web.Request) -> web.Response:
        """GET /health/live."""
        return json_response({"live": True})

    def _serves(self, replicas: Replicas, name: str) -> bool:
        try:
            return replicas.serves(name)
        except Unknown as unknown:
            raise HttpError(Problem(404, "not_found", str(unknown))) from None

    def _refusal(self, content: dict[str, object]) -> web.Response:
        """The 503 response, with the stage, and its progress from 0 to 1 if that is known."""
        stage = self._batcher.stage
        share = SHARE.search(stage)
        return json_response({**content, "stage": stage, "progress": float(share[1]) / 100 if share else None}, RETRY, 503)
