"""Routes to load and unload LoRA adapters while the server runs. They are vLLM's, so that tools of Kubernetes know them.

They need the admin key, if there is one, since what an adapter's name means concerns all clients; else an API key, as with vLLM.
Without `--max-loras` they are refused.
"""

import msgspec
from aiohttp import web

from ..adapters import Adapters
from ..config import RouterConfig
from ..replica import Unknown
from ..request import Broken, NotReady, Refused
from .body import Body, decode
from .errors import unauthorized
from .tenant import bears, digest

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class LoadBody(msgspec.Struct):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadBody(msgspec.Struct):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: str


class AdapterRoutes:
    """The handlers of the adapter routes."""

    def __init__(self, config: RouterConfig, adapters: Adapters) -> None:
        self._able = config.max_loras > 0
        self._adapters = adapters
        self._key = digest(config.admin_key.encode()) if config.admin_key else b""

    def routes(self) -> list[web.RouteDef]:
        """The routes. Without `--max-loras` they answer how to enable them."""
        return [web.post(LOAD, self.load), web.post(UNLOAD, self.unload)]

    async def load(self, http: web.Request) -> web.Response:
        """POST /v1/load_lora_adapter: the folder is read on every machine that has shards."""
        body = self._decoded(http, LoadBody)
        if not body.lora_path.strip():  # shards would look where they were started
            raise Refused("`lora_path` is empty: name a folder, or OWNER/MODEL of the hub", "lora_path")
        try:
            await self._adapters.load(body.lora_name, body.lora_path, body.load_inplace)
        except Broken as lost:
            raise NotReady(f"the shards were lost meanwhile ({lost}): nothing has changed, try again") from None
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, http: web.Request) -> web.Response:
        """POST /v1/unload_lora_adapter: running requests of the adapter are completed."""
        body = self._decoded(http, UnloadBody)
        await self._adapters.unload(body.lora_name)
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _decoded(self, http: web.Request, kind: type[Body]) -> Body:
        if self._key and not bears(http, [self._key]):
            raise unauthorized("the admin key")
        body = decode(http, kind)
        if not self._able:
            raise Unknown("adapters are loaded while the server runs if it is started with --max-loras")
        return body
