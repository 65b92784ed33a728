"""The measurements of one request: timestamps, and the latencies that follow from them. Knows no network."""

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class Record:
    """Timestamps of one request, in seconds of one clock. Tokens of one event came together: there is no time between them for a
    reader."""

    intended: float  # when it was to be sent
    wanted: int = 0  # tokens
    sent: float = 0.0
    ended: float = 0.0  # 0: not yet
    moments: "array[float]" = field(default_factory=lambda: array("d"))  # of events that brought tokens
    counts: "array[int]" = field(default_factory=lambda: array("l"))  # tokens of each such event
    reads: int = 0  # reads from the network that brought such events
    prompt_tokens: int = 0  # as counted by the server; 0: it did not say
    told_tokens: int = 0  # of the answer, as counted by the server; 0: it did not say
    error: str = ""  # kind of error
    detail: str = ""

    @property
    def good(self) -> bool:
        """Whether it was answered to its end, with at least one token."""
        return bool(self.ended and not self.error)

    @property
    def tokens(self) -> int:
        """Tokens of the answer: as counted by the server, else as seen."""
        return self.told_tokens or sum(self.counts)

    @property
    def uncounted(self) -> int:
        """Tokens that no event showed: the server sends several in one event and does not say how many."""
        return max(0, self.told_tokens - sum(self.counts))

    @property
    def ttft(self) -> float:
        """Time to the first token, from when the request was to be sent, so that delays of the client or of a queue count."""
        return self.moments[0] - self.intended

    @property
    def e2e(self) -> float:
        """Time to the last token, from when the request was to be sent."""
        return self.moments[-1] - self.intended

    @property
    def late(self) -> float:
        """How long it waited to be sent."""
        return self.sent - self.intended

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None if there was only one."""
        return (self.moments[-1] - self.moments[0]) / (self.tokens - 1) if self.tokens > 1 else None

    def gaps(self) -> list[float]:
        """Inter-token latencies: from each token to the next."""
        found = [0.0] * (self.counts[0] - 1)
        last = self.moments[0]
        for moment, count in zip(self.moments[1:], self.counts[1:], strict=True):
            found.append(moment - last)
            if count > 1:
                found += [0.0] * (count - 1)
            last = moment
        return found
