"""Counts and times the forward passes of a draft model."""

import time


class Rounds:
    """Statistics of drafting: `rounds` counts passes that drafts were grown from; `later` are the seconds of those that were not a
    step's first, which has to catch up with the target, including all work since the pass before."""

    def __init__(self) -> None:
        self.rounds = 0
        self.later = 0.0
        self._ended = 0.0

    def ran(self, first: bool) -> None:
        """A pass is over. first: it was the step's first."""
        now = time.perf_counter()
        self.rounds += 1
        self.later += 0.0 if first else now - self._ended
        self._ended = now
