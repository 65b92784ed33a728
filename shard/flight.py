"""A step that the device works on, while the host plans the next one on top of it.

The device shall not wait for the host, so the next step's forward is begun before this one's tokens are known: they are filled in
on the device. What an end token would have ended is computed for one step more, and that is thrown away. Then this step lands:
its tokens come to the host, and sequences take them; only after that is sampled from the next step's logits, so penalties, grammars
and ends are what they always are.

Beams part, and who of the next ones continues whom is known on the device alone. So each is planned with a page of its own for what
is in its parent's last, partial one; the device copies that, and looks at its parent's full pages, by what it has picked.
"""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate

from .forks import heirs
from .logits import StepPicking
from .masks import Pending
from .outcome import Outcome
from .sequence import Group
from .step import Run, Span


@dataclass(slots=True)
class Flight:
    """One step."""

    runs: list[Run]
    picking: StepPicking
    masks: Pending | None
    outcome: Outcome
    began: float  # by perf_counter
    done: float = 0.0  # when the device was, as far as `wait` has seen
    landed: "Future[Outcome]" = field(default_factory=Future)
    _first: dict[int, int] = field(default_factory=dict)  # by id of a group that is sampled: its first row; made when asked for

    def wait(self) -> None:
        """Until the device has done it, on any thread."""
        self.picking.wait()
        self.done = time.perf_counter()

    def simple(self, alone: bool) -> bool:
        """Whether all that it leads to is known but what it picks: then `follow` says how it goes on. alone: on a single rank,
        since only rank 0 knows what becomes of a grammar."""
        return self.picking.picked is not None and all(_simple(run) and (alone or not run.group.grammar) for run in self.runs)

    def follow(self, group: Group, page_size: int) -> list[Span] | None:
        """What comes after its tokens, of sequences that they can't make too long; None: nothing of the group is sampled."""
        if not self._first:
            sampled = sorted((run.group for run in self.runs if run.sampled), key=lambda one: one.search is None)  # as it is picked
            counts = (one.search.width if one.search else len(one.waiting) or len(one.sequences) for one in sampled)
            self._first = dict(zip(map(id, sampled), accumulate(counts, initial=0), strict=False))
        first = self._first.get(id(group))
        if first is None:
            return None
        most = group.max_new_tokens
        if group.search is not None:
            more = group.sequences[0].generated + 1 < most
            return heirs(group, group.search.width, page_size, first) if more else []
        return [
            Span(sequence, sequence.computed, (0,), source=row)
            for row, sequence in enumerate(group.sequences, first)
            if sequence.generated + 1 < most
        ]


def _simple(run: Run) -> bool:
    """Each sequence gets one token; of all, only beams that are there already part."""
    group = run.group
    drafts = group.drafts > 0 and any(span.drafts for span in run.spans)
    parts = not group.decodes if group.search else len(group.waiting) > 1
    return not (run.problem or drafts or parts)
