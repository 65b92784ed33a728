"""A step in flight: the device computes it while the host plans the next one on top of it (asynchronous scheduling).

The device must not wait for the host, so the next step's forward is begun before this one's tokens are known: they are filled in on
the device. What an end token would have ended is computed for one step more, and that is thrown away. Then this step lands: its
tokens come to the host, and sequences take them. Only after that the next step's logits are sampled, so penalties, grammars and
ends work as without overlap.

Beams fork, and which beam each next one continues is known on the device alone. So each of these (an heir) is planned with a page
of its own for what is in its parent's last, partial one; the device copies that, and reads its parent's full pages, by what it
sampled.
"""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate

from .forks import heirs
from .logits import StepPicks
from .masks import PendingMasks
from .outcome import Outcome
from .sequence import Group
from .step import Run, Span


@dataclass(slots=True)
class StepInFlight:
    """A step in flight."""

    runs: list[Run]
    pending: StepPicks
    masks: PendingMasks | None
    outcome: Outcome
    began: float  # by perf_counter
    done: float = 0.0  # when the device was done, as observed by `wait`
    landed: "Future[Outcome]" = field(default_factory=Future)
    _first: dict[int, int] = field(default_factory=dict)  # by id of a sampled group: its first row; filled on first use

    def wait(self) -> None:
        """Waits, on any thread, until the device is done with it."""
        self.pending.wait()
        self.done = time.perf_counter()

    def simple(self, alone: bool) -> bool:
        """Whether its effect is known except for the tokens it samples: each sequence gets one, and none fork but the beams that
        exist already. Then `follow` can plan the next step. alone: on a single rank, since only rank 0 knows grammars."""
        for run in self.runs:
            group = run.group
            drafts = group.drafts > 0 and any(span.drafts for span in run.spans)
            parts = not group.decodes if group.search else len(group.waiting) > 1
            if run.problem or drafts or parts or (group.grammar and not alone):
                return False
        return self.pending.picked is not None

    def follow(self, group: Group, page_size: int) -> list[Span] | None:
        """Spans that follow its tokens, of sequences that will not have reached their maximum length; None: nothing of the group is
        sampled."""
        if not self._first:
            sampled = [run.group for run in self.runs if run.sampled]
            ordered = [one for one in sampled if one.search] + [one for one in sampled if not one.search]  # as they are sampled
            sizes = [one.search.width if one.search else len(one.waiting) or len(one.sequences) for one in ordered]
            self._first = dict(zip(map(id, ordered), accumulate(sizes, initial=0), strict=False))
        first = self._first.get(id(group))
        if first is None:
            return None
        most = group.max_new_tokens
        if group.search is not None:
            more = group.sequences[0].generated + 1 < most
            return heirs(group, group.search.width, page_size, first) if more else []
        return [
            Span(sequence, sequence.computed, (0,), row)
            for row, sequence in enumerate(group.sequences, first)
            if len(sequence.tokens) - sequence.prompt_length + 1 < most
        ]
