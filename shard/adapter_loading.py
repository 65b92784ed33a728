"""Loads and unloads LoRA adapters while the shard serves. Slow work is done beside the steps, on the caller's thread; rows can use
an adapter as soon as it is put into place, by a command like any other, so that all ranks do it between the same steps.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

from ..proto import shard_pb2 as wire
from .adapters import Adapter, digest_of, pinned, place_of
from .engine import Engine
from .models.shape import Unsupported

WAIT = 20.0  # seconds to wait for another load, perhaps for a router that has gone


class AdapterLoader:
    """Loads the LoRA adapters of one rank at run time."""

    def __init__(self, engine: Engine, cache: str) -> None:
        """cache: of downloads, see `proto.hub`."""
        self._engine = engine
        self._cache = cache
        self._reading = threading.Semaphore(1)  # one at a time: few threads may wait for a disk
        self._lock = threading.Lock()
        self._router = ""  # the latest one to connect
        # read but not in place, by key, with the router that asked
        self._read: dict[str, tuple[str, wire.LoadedAdapter, list[Any]]] = {}
        # in place, by key; replaced by a copy at each change, for concurrent readers
        self.there: dict[str, wire.LoadedAdapter] = {}

    def read(self, asked: wire.LoadedAdapter, router: str, wanted: Callable[[], bool]) -> wire.LoadAdapterReply:
        """Reads an adapter's files, on any thread. wanted: whether the caller still waits. Raises Unsupported, or whatever files
        may cause."""
        before = self._router
        if not self._reading.acquire(timeout=WAIT):
            raise Unsupported(f"adapter {asked.name}: another one is being read yet: come again later")
        try:
            adapters, dtype = self._engine.decoder.adapters, self._engine.decoder.embedding.dtype
            place = place_of(asked.name, asked.folder, self._cache)
            adapter = Adapter(asked.name, place, dtype, torch.device("cpu"), tame=True)
            digest = digest_of(place)
            if asked.digest not in ("", digest):
                raise Unsupported(f"adapter {asked.name}: its files in {place} are not those that were loaded first")
            prepared, known = adapters.prepared(adapter), wire.LoadedAdapter()
            known.CopyFrom(asked)
            known.folder, known.digest = pinned(asked.folder, place), digest
            with self._lock:
                if self._router not in (before, router) or not wanted():
                    raise Unsupported(f"adapter {asked.name}: nobody waits for it any more")
                self._read[asked.key] = router, known, prepared
            return wire.LoadAdapterReply(folder=known.folder, digest=digest)
        finally:
            self._reading.release()

    def adapt(self, request: wire.AdaptRequest) -> str:
        """Executes an Adapt command, between two steps. Returns why nothing was done; "": success."""
        add, drop = request.add, request.drop
        with self._lock:
            found = self._read.pop(add, None)
            self._read.pop(drop, None)
        if add and found is None and add not in self.there:
            return f"adapter {add} was not loaded"
        if problem := self._engine.adapt(add if found and add not in self.there else "", found[2] if found else (), drop):
            return problem
        there = dict(self.there)
        if found is not None:
            there[add] = found[1]
        if request.retire in there:
            retired = wire.LoadedAdapter()
            retired.CopyFrom(there[request.retire])
            retired.retired = True
            there[request.retire] = retired
        there.pop(drop, None)
        self.there = there
        return ""

    def welcome(self, router: str) -> None:
        """A router has connected: what was read for others, or is being read, is dropped."""
        if router:
            with self._lock:
                self._router = router
                self._read = {key: found for key, found in self._read.items() if found[0] == router}
