"""How often a draft model ran, and how long runs took."""

import time


class Rounds:
    """`rounds` counts runs that drafts were grown from; `later` are the seconds of those that were not a step's first, which has to
    catch up with the model, with all that was done since the one before."""

    def __init__(self) -> None:
        self.rounds = 0
        self.later = 0.0
        self._ended = 0.0

    def ran(self, first: bool) -> None:
        """One is over. first: it was the step's first."""
        now = time.perf_counter()
        self.rounds += 1
        self.later += 0.0 if first else now - self._ended
        self._ended = now
