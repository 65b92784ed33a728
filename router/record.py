"""What is known of an HTTP request while it is served and when it has ended: for the log, for traces. Numbers, never its text.

The API opens a record (`current`), the batcher adds a run for each request that it takes from there, and fills it as it goes: a few
assignments a request, none a token. Whoever logs within a request finds its id here.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic

from .request import Request


@dataclass(slots=True)
class Run:
    """A request on the shards. Moments are of the monotonic clock; 0 is not yet."""

    request: Request
    arrived: float
    name: str = ""  # see `Record.name`
    started: float = 0.0  # first step that was to compute something of it
    first: float = 0.0  # token
    ended: float = 0.0
    cached_tokens: int = 0  # of the prompt
    generated: int = 0  # tokens of all choices
    drafted: int = 0  # tokens that were guessed for it
    accepted: int = 0  # those of them that were right
    steps: int = 0  # that gave it tokens
    reasons: list[str] = field(default_factory=list)  # why its choices ended, in the order in which they did
    failure: str = ""  # what kind, if it was not answered to its end

    def fail(self, kind: str, generated: int) -> None:
        """It ends here."""
        self.failure, self.generated, self.ended = kind, generated, monotonic()


@dataclass(slots=True)
class Record:
    """An HTTP request."""

    id: str  # as clients, proxies and logs know it
    trace: str = ""  # W3C's traceparent of the span that stands for it; "": it is not traced
    arrived: float = field(default_factory=monotonic)
    runs: list[Run] = field(default_factory=list)
    begun: bool = False  # its response
    error: str = ""  # what kind of problem it was answered with

    @property
    def name(self) -> str:
        """What others are told, so that their words can be tied to it."""
        return self.trace or self.id


current: ContextVar[Record | None] = ContextVar("record", default=None)


def begin(request: Request, now: float) -> Run:
    """The run of a request that was taken, in the record of the HTTP request that it came with, if it came with one."""
    record = current.get()
    if record is None:
        return Run(request, now)
    run = Run(request, now, record.name)
    record.runs.append(run)
    return run


def arrival() -> float:
    """When the HTTP request came within which this is called."""
    record = current.get()
    return monotonic() if record is None else record.arrived


def request_id() -> dict[str, str]:
    """Of the HTTP request within which this is called, as a value for a log line."""
    record = current.get()
    return {} if record is None else {"request_id": record.id}
