"""The words in which operators and the router speak of replicas. They belong to no HTTP API, and know no batcher."""

import msgspec


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One, as it is now."""

    name: str
    addresses: tuple[str, ...]  # of its ranks
    state: str  # "starting", "ready", "recovering", "draining", "drained", "failed"
    stage: str  # the same for people
    requests: int  # that wait or run there
    load: int  # tokens of these: what placement goes by
    pages: int  # in its pool; 0: not known yet


class Conflict(Exception):
    """What an operator asks for can't be done now. One line that says what would do."""


class Unknown(Exception):
    """There is no replica of that name."""
