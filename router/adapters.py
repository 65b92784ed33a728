"""Registry of LoRA adapters: those that the shards had from the start, and others that are loaded and unloaded while they serve.

Clients use a name, shards a *key*. A name may come to mean another adapter; a request continues with the one that it began with,
and never finds another's cached pages. So an adapter that was unloaded stays on the shards until the last of its requests has
ended. Knows replicas by the interface defined here, and no HTTP.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from ..proto import shard_pb2
from .replica import Conflict, Unknown
from .request import Broken, NoModel, NotReady, Refused

NAME = re.compile(r"[!-+\--~]{1,200}")  # without commas, which separate names in the label of a metric that gateways read
PLACEHOLDER = "tgi"  # the model name that TGI's clients send whatever is served

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class RuntimeAdapter:
    """An adapter that was loaded while the shards served."""

    key: str
    name: str
    folder: str
    digest: str = ""  # of its files; known when one replica has read them
    retired: bool = False  # clients can't name it any more
    users: int = 0  # requests that use it

    @property
    def message(self) -> shard_pb2.LoadedAdapter:
        """It, for the shards."""
        return shard_pb2.LoadedAdapter(key=self.key, name=self.name, folder=self.folder, digest=self.digest)


class Replica(Protocol):
    """The interface to a replica; see `batcher.Batcher`."""

    @property
    def adapters(self) -> Collection[str]:
        """Keys of the adapters that it has."""
        ...

    async def load(self, adapter: RuntimeAdapter, /) -> None:
        """Loads an adapter. Raises Refused, or Broken if its shards are lost."""
        ...

    async def retire(self, key: str, /) -> None:
        """Tells its shards that clients can't name the adapter any more. Raises Broken."""
        ...

    async def drop(self, key: str, /) -> None:
        """Unloads the adapter from its shards. Raises Broken."""
        ...


class Adapters:
    """All adapters, by their names for clients."""

    def __init__(
        self,
        model: str = "",
        first: Sequence[str] = (),
        room: int = 0,
        replicas: Callable[[], Iterable[Replica]] = lambda: (),
    ) -> None:
        """model: name of the base model; first: adapters that were there from the start; room: the most adapters at once; replicas:
        those that have shards now."""
        self._model = model
        self._first = tuple(first)
        self._room = room
        self._replicas = replicas
        self._later: dict[str, RuntimeAdapter] = {}  # by key, in the order in which they came
        self._begun = False  # a client may have named one already
        self._order = asyncio.Lock()  # loads and unloads run one at a time
        self._sweeps: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Names that clients may use."""
        return *self._first, *(adapter.name for adapter in self._later.values() if not adapter.retired)

    def folder(self, name: str) -> str:
        """The folder of an adapter loaded later; "": unknown."""
        found = self._named(name)
        return found.folder if found else ""

    def key(self, name: str) -> str | None:
        """The key of the adapter with this name; None: there is none."""
        if name in self._first:
            return name
        found = self._named(name)
        return found.key if found else None

    def name(self, key: str) -> str:
        """The name of an adapter for clients, now or before it was unloaded."""
        return self._later[key].name if key in self._later else key

    def key_of_model(self, name: str) -> str:
        """The key, where clients name a model; "": the base model. Any unknown name means that, as with TGI, unless adapters can be
        loaded and unloaded: an unloaded one must not be mistaken for it. Raises NoModel then."""
        key = self.key(name)
        if key is None and self._room and name not in ("", self._model, PLACEHOLDER):
            known = ", ".join(f"`{each}`" for each in (self._model, *self.names))
            raise NoModel(f"the model `{name}` does not exist: this server has {known}")
        return key or ""

    def _named(self, name: str) -> RuntimeAdapter | None:
        return next((adapter for adapter in self._later.values() if adapter.name == name and not adapter.retired), None)

    # Requests

    def knows(self, key: str) -> bool:
        """Whether an adapter exists; "": none is needed. It may have been unloaded since a request was validated."""
        return not key or key in self._first or key in self._later

    def enter(self, key: str) -> None:
        """A request uses it."""
        if key in self._later:
            self._later[key].users += 1

    def leave(self, key: str) -> None:
        """The request has ended."""
        adapter = self._later.get(key)
        if adapter is not None:
            adapter.users -= 1
            if adapter.retired and not adapter.users:
                sweep = asyncio.ensure_future(self._sweep())
                self._sweeps.add(sweep)
                sweep.add_done_callback(self._sweeps.discard)

    # Requests of operators

    async def load(self, name: str, folder: str, replace: bool = False) -> None:
        """Loads an adapter: clients may name it from now on; replace: it takes over a name in use. Goes on if the caller
        disconnects. Raises Refused, Conflict, NotReady or Broken."""
        await asyncio.shield(asyncio.ensure_future(self._load(name, folder, replace)))

    async def unload(self, name: str) -> None:
        """Clients can't name it any more. Raises Unknown or Refused."""
        await asyncio.shield(asyncio.ensure_future(self._unload(name)))

    async def _load(self, name: str, folder: str, replace: bool) -> None:
        async with self._order:
            before = self._named(name)
            self._check_new(name, before if replace else None)
            adapter = RuntimeAdapter(f"{name}#{secrets.token_hex(8)}", name, folder)
            self._begun, replicas = True, list(self._replicas())
            if not replicas:
                raise NotReady("not ready: no replica has shards")
            try:
                for replica in replicas:
                    if replica in self._replicas():  # one that was lost meanwhile gets it when it is back
                        await replica.load(adapter)
            except BaseException:
                await self._drop(adapter.key)
                raise
            self._later[adapter.key] = adapter
            if before is not None:
                before.retired = True
            await self._complete(adapter)
            logger.info("adapter %s is loaded from %s", name, folder)
            if before is not None:
                await self._retire(before)

    def _check_new(self, name: str, replaced: RuntimeAdapter | None) -> None:
        if not NAME.fullmatch(name):
            raise Refused("`lora_name` must have from 1 to 200 characters of ASCII, and no spaces or commas", "lora_name")
        if name in (self._model, PLACEHOLDER):
            raise Refused(f"`lora_name`: the model is called {name} itself: give the adapter another name", "lora_name")
        if replaced is None and name in self.names:
            which = "was there from the start, and stays" if name in self._first else "is loaded already"
            remedy = "give this one another name" if name in self._first else "unload it, or say `load_inplace`"
            raise Refused(f"`lora_name`: an adapter called {name} {which}: {remedy}", "lora_name")
        if len(self._first) + len(self._later) >= self._room:
            leaving = sum(adapter.retired for adapter in self._later.values())
            wait = f" ({leaving} of them leave when their last requests end)" if leaving else ""
            raise Conflict(
                f"all {self._room} places for adapters are taken{wait}: unload one (POST /v1/unload_lora_adapter), or start the "
                "server with more (--max-loras)"
            )

    async def _complete(self, adapter: RuntimeAdapter) -> None:
        """Loads it on replicas whose shards came up while others loaded it."""
        tried: list[Replica] = []
        while lacking := [one for one in self._replicas() if adapter.key not in one.adapters and one not in tried]:
            tried.append(lacking[0])
            try:
                await lacking[0].load(adapter)
            except (Refused, Broken) as error:  # a lost one gets it when it is back
                logger.error("a replica does without adapter %s: %s", adapter.name, error)

    async def _unload(self, name: str) -> None:
        async with self._order:
            if name in self._first:
                raise Refused(f"`lora_name`: adapter {name} was there from the start (--lora-adapters), and stays", "lora_name")
            adapter = self._named(name)
            if adapter is None:
                raise Unknown(f"there is no adapter `{name}`; loaded are: {', '.join(self.names) or 'none'}", "lora_name")
            adapter.retired = True
            logger.info("adapter %s is unloaded; requests that go by it yet: %d", name, adapter.users)
            await self._retire(adapter)

    async def _retire(self, adapter: RuntimeAdapter) -> None:
        for replica in self._replicas():
            with suppress(Broken):  # new shards don't have it
                await replica.retire(adapter.key)
        await self._drop_unused()

    async def _sweep(self) -> None:
        async with self._order:
            await self._drop_unused()

    async def _drop_unused(self) -> None:
        for adapter in [adapter for adapter in self._later.values() if adapter.retired and not adapter.users]:
            del self._later[adapter.key]  # from now on no request can use it
            await self._drop(adapter.key)

    async def _drop(self, key: str) -> None:
        for replica in self._replicas():
            with suppress(Broken):
                await replica.drop(key)

    # Replicas that come up

    def adopt(self, loaded: shard_pb2.LoadedAdapter) -> bool:
        """Registers an adapter that shards have, perhaps from an earlier router. Returns whether it is one of ours."""
        if self._begun:
            return loaded.key in self._later
        if loaded.retired:  # another replica's shards may not have heard that
            self._later.pop(loaded.key, None)
        before = self._named(loaded.name)
        if before is not None and before.key != loaded.key:  # it was to be replaced: shards report later adapters later
            del self._later[before.key]
        if loaded.key in self._later:
            return True
        if loaded.retired or loaded.name in self._first or len(self._first) + len(self._later) >= self._room:
            return False
        self._later[loaded.key] = RuntimeAdapter(loaded.key, loaded.name, loaded.folder, loaded.digest)
        return True

    def begin(self) -> None:
        """A replica takes requests: adapters not known by now are not adopted any more."""
        self._begun = True

    def lacking(self, known: Collection[str]) -> list[RuntimeAdapter]:
        """Adapters that shards which have `known` lack."""
        return [adapter for adapter in self._later.values() if adapter.key not in known]

    def retired(self, known: Collection[str]) -> list[str]:
        """Keys among `known` that clients can't name any more."""
        return [key for key in known if key in self._later and self._later[key].retired]
