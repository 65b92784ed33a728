"""Protocols of what the HTTP API needs from the rest of the router. Tests use small objects of their own for them."""

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from ..replica import Replica
from ..request import Item, Limits, NotReady, Request, Sink


class Batcher(Protocol):
    """Runs requests; see `batcher.Batcher`."""

    @property
    def ready(self) -> bool: ...
    @property
    def stage(self) -> str: ...
    @property
    def limits(self) -> Limits | None: ...
    def submit(self, request: Request, sink: Sink | None = None, /) -> AsyncGenerator[list[Item], None]: ...


class Replicas(Protocol):
    """Manages the replicas over which the batcher distributes requests; see `fleet.Fleet`."""

    @property
    def replicas(self) -> list[Replica]: ...
    def serves(self, name: str, /) -> bool: ...
    def join(self, addresses: Sequence[str], name: str = "", /) -> Replica: ...
    def retire(self, name: str, move: bool = False, /) -> Replica: ...
    async def remove(self, name: str, /) -> None: ...


class Metrics(Protocol):
    """Counters and gauges; see `metrics.Metrics`."""

    def turned_away(self, kind: str, /) -> None: ...
    def validated(self, prompt: int, max_new_tokens: int, /) -> None: ...
    def watch(self, name: str, read: Callable[[], float], /) -> None: ...
    def render(self) -> bytes: ...
    def samples(self, names: Sequence[str], /) -> dict[str, float]: ...


def limits_of(batcher: Batcher) -> Limits:
    """The limits of a request. Raises NotReady while they are unknown."""
    if batcher.limits is None:
        raise NotReady(f"not ready: {batcher.stage}")
    return batcher.limits
