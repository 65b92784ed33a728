"""Whether what has died is started again, and when. Pure: it is told the time, and starts nothing."""

from collections import deque

WINDOW = 600.0  # seconds in which restarts are counted
FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0  # seconds before another try of what did not come up; each time twice as long


class Restarts:
    """Of one part of a server: at most `limit` within WINDOW."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._times: deque[float] = deque()  # of the restarts that count
        self._failures = 0  # in a row, without having been ready in between

    @property
    def count(self) -> int:
        """Restarts that count now."""
        return len(self._times)

    def died(self, now: float) -> float | None:
        """Seconds until it shall be started again, 0 for what had been ready; None: it is given up."""
        while self._times and self._times[0] <= now - WINDOW:
            self._times.popleft()
        if len(self._times) >= self._limit:
            return None
        self._times.append(now)
        self._failures += 1
        return 0.0 if self._failures == 1 else min(FIRST_DELAY * 2.0 ** (self._failures - 2), LONGEST_DELAY)

    def ready(self) -> None:
        """It runs, and does what it is for."""
        self._failures = 0
