"""Restart policy: whether a part that died is restarted, and when (exponential backoff). Pure: it is given the time, and starts
nothing."""

from collections import deque

WINDOW = 600.0  # seconds in which restarts are counted
FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0  # seconds before a retry of what did not come up, doubled each time


class Restarts:
    """The restarts of one part of a server: at most `limit` within WINDOW."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._times: deque[float] = deque()  # of the restarts that count
        self._failures = 0  # deaths in a row, without having been ready in between

    @property
    def count(self) -> int:
        """The number of restarts that count now."""
        return len(self._times)

    def died(self, now: float) -> float | None:
        """Records a death. Returns seconds until the restart, 0 for a part that had been ready; None: it is given up."""
        while self._times and self._times[0] <= now - WINDOW:
            self._times.popleft()
        if len(self._times) >= self.limit:
            return None
        self._times.append(now)
        self._failures += 1
        return 0.0 if self._failures == 1 else min(FIRST_DELAY * 2.0 ** (self._failures - 2), LONGEST_DELAY)

    def ready(self) -> None:
        """Records that the part runs and serves."""
        self._failures = 0
