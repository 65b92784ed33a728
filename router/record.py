"""Record of an HTTP request while it is served and when it has ended, for logs and traces. Numbers, never its text.

The API opens a record (`current`), the batcher adds a run for each request within it, and fills it as it goes: a few assignments
per request, none per token. Log lines within a request get its id from here.
"""

import secrets
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic

from .request import Request


@dataclass(slots=True)
class Run:
    """A request on the shards. Times are of the monotonic clock; 0 is not yet."""

    request: Request
    arrived: float
    name: str = ""  # see `Record.name`
    started: float = 0.0  # when the first step that computes something of it was sent
    first: float = 0.0  # when its first token came
    ended: float = 0.0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    generated: int = 0  # tokens of all choices
    drafted: int = 0  # draft tokens
    accepted: int = 0  # of these, accepted
    steps: int = 0  # steps that gave it tokens
    reasons: list[str] = field(default_factory=list)  # why its choices ended, in order
    failure: str = ""  # the kind, if it was not answered to its end

    def fail(self, kind: str, generated: int) -> None:
        """The run ends with a failure."""
        self.failure, self.generated, self.ended = kind, generated, monotonic()


@dataclass(slots=True)
class Record:
    """What is recorded of an HTTP request, with its runs on the shards."""

    id: str  # request id for clients, proxies and logs
    trace: str = ""  # W3C traceparent of its span; "": it is not traced
    arrived: float = field(default_factory=monotonic)
    runs: list[Run] = field(default_factory=list)
    begun: bool = False  # whether its response has begun
    streamed: bool = False  # as server-sent events
    answer: str = ""  # the id that the answer has in its body, where it has one
    error: str = ""  # kind of error it was answered with

    @property
    def name(self) -> str:
        """Its name for other processes, so that their logs can be related to it."""
        return self.trace or self.id

    @property
    def failure(self) -> str:
        """Kind of the request's failure, or of that of its first run that failed; "": none."""
        return self.error or next((run.failure for run in self.runs if run.failure), "")


current: ContextVar[Record | None] = ContextVar("record", default=None)


def begin(request: Request, now: float) -> Run:
    """The run of a new request, added to the record of its HTTP request, if there is one."""
    record = current.get()
    if record is None:
        return Run(request, now)
    run = Run(request, now, record.name)
    record.runs.append(run)
    return run


def answer_id(prefix: str) -> str:
    """A new id for the answer to the current HTTP request, by which its trace can be found."""
    id = f"{prefix}{secrets.token_hex(16)}"
    if (record := current.get()) is not None:
        record.answer = id
    return id


def arrival() -> float:
    """Arrival time of the current HTTP request."""
    record = current.get()
    return monotonic() if record is None else record.arrived


def request_id() -> dict[str, str]:
    """Id of the current HTTP request, as a value for a log line."""
    record = current.get()
    return {} if record is None else {"request_id": record.id}
