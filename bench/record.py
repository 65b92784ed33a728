"""What is kept of one request: moments, and what they mean. Knows no network."""

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class Record:
    """Moments in seconds of one clock. An event's tokens came together: there is no time between them, for whoever reads."""

    intended: float  # when it was to be sent
    wanted: int = 0  # tokens
    sent: float = 0.0
    ended: float = 0.0  # 0: not yet
    moments: "array[float]" = field(default_factory=lambda: array("d"))  # of events that brought tokens
    counts: "array[int]" = field(default_factory=lambda: array("l"))  # how many each
    reads: int = 0  # from the network that brought such events
    prompt_tokens: int = 0  # as the server counted; 0: it did not say
    told_tokens: int = 0  # of the answer, likewise
    error: str = ""  # its kind
    detail: str = ""

    @property
    def good(self) -> bool:
        """Answered to its end, with at least a token."""
        return bool(self.ended and not self.error)

    @property
    def tokens(self) -> int:
        """Of the answer: as the server says, else as they were seen."""
        return self.told_tokens or sum(self.counts)

    @property
    def uncounted(self) -> int:
        """Tokens that no event showed: the server sends several in one and does not say how many."""
        return max(0, self.told_tokens - sum(self.counts)) if self.told_tokens else 0

    @property
    def ttft(self) -> float:
        """Until the first token; from when it was to be sent, so that a client or a queue that is late does not hide."""
        return self.moments[0] - self.intended

    @property
    def e2e(self) -> float:
        """Until the last token."""
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
        """Between each token and the next."""
        found = [0.0] * (self.counts[0] - 1)
        last = self.moments[0]
        for moment, count in zip(self.moments[1:], self.counts[1:], strict=True):
            found.append(moment - last)
            if count > 1:
                found += [0.0] * (count - 1)
            last = moment
        return found
