"""Health probes: whether the server lives, has loaded, takes requests. Load balancers and orchestrators ask these separately.

/health         503 while the model loads for the first time, then 200 as long as this process lives: TGI's, to start by
/health/ready   200 exactly when a request would be computed now; 503 while the model loads, the server drains, or the shards were
                lost and others do not yet take their place, for which requests wait; of several replicas: when one takes requests
/health/live    200 as long as this process answers
"""

import re

from aiohttp import web

from ..config import RouterConfig
from ..replica import Unknown
from .body import json_response
from .errors import RETRY
from .ports import Batcher, Replicas

HEALTH, READY, LIVE = "/health", "/health/ready", "/health/live"
SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%")


class Probes:
    """The handlers of the health probes."""

    def __init__(self, config: RouterConfig, batcher: Batcher, replicas: Replicas | None = None) -> None:
        self._groups = config.groups
        self._batcher = batcher
        self._replicas = replicas

    async def health(self, http: web.Request) -> web.Response:
        """GET /health. The body is empty, or says why not."""
        if self._batcher.limits is not None:  # known once the model has been loaded, whatever happens later
            return web.Response()
        return self._refusal({"error": "unhealthy", "error_type": "healthcheck"}, self._batcher.stage)

    async def ready(self, http: web.Request) -> web.Response:
        """GET /health/ready; of one replica with ?replica=NAME, or ?group=NUMBER."""
        ready, stage = self._batcher.ready, self._batcher.stage
        if self._replicas is not None and not http.query.keys().isdisjoint(("replica", "group")):
            name = http.query["replica"] if "replica" in http.query else self._of_group(self._replicas, http.query["group"])
            ready, own = self._one(self._replicas, name)
            stage = own if ready or own != "ready" else stage  # one that could, if the server did
        return json_response({"ready": True, "stage": stage}) if ready else self._refusal({"ready": False}, stage)

    async def live(self, http: web.Request) -> web.Response:
        """GET /health/live."""
        return json_response({"live": True})

    def _one(self, replicas: Replicas, name: str) -> tuple[bool, str]:
        """Whether a replica takes requests, and what is the case with it. Raises Unknown."""
        return replicas.serves(name), next(each.stage for each in replicas.replicas if each.name == name)

    def _of_group(self, replicas: Replicas, number: str) -> str:
        """The name of the replica of one of the settings' rank groups: it may have left, and joined again under another name.
        Raises Unknown."""
        addresses = {str(place): group for place, group in enumerate(self._groups)}.get(number)
        for each in replicas.replicas:
            if each.addresses == addresses:
                return each.name
        raise Unknown(f"no replica is of rank group {number} now")

    def _refusal(self, content: dict[str, object], stage: str) -> web.Response:
        """The 503 response, with the stage, and its progress from 0 to 1 if that is known."""
        share = SHARE.search(stage)
        return json_response({**content, "stage": stage, "progress": float(share[1]) / 100 if share else None}, RETRY, 503)
