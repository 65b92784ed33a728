"""Types in which operators and the router describe replicas, and refuse what operators ask. They belong to no HTTP API, and know no
batcher."""

import msgspec

from .request import Failure, Refused


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of one replica."""

    name: str
    addresses: tuple[str, ...]  # of its ranks
    state: str  # "starting", "ready", "recovering", "draining", "drained", "failed"
    stage: str  # human-readable state
    requests: int  # that wait or run there
    load: int  # tokens of these: what placement balances
    pages: int  # in its KV pool; 0: not known yet


class Conflict(Failure):
    """An operator's request that can't be fulfilled now. One line that says what would help."""


class Unknown(Refused):
    """An operator's request names a replica, or an adapter, that isn't there."""
