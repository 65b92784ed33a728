"""What grammars allow the rows of a step, found while the forward runs: the next mask depends only on tokens that are known.

Only rank 0 has it, as only rank 0 samples. Knows groups and rows, no logits. A group whose grammar can't go on fails alone.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Listing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from .decoding.grammar import NOWHERE, Grammars, Guide, Unusable, bit
from .decoding.sampler import Pick
from .sequence import Group, Sequence
from .step import Run


@dataclass(slots=True)
class Found:
    """The masks of a step."""

    mask: Tensor  # [rows of the step, words]; all bits of rows that are free
    problems: dict[int, str]  # uid of a group that can't go on > why
    seconds: float


class Masks:
    """Of one engine."""

    def __init__(self, grammars: Grammars, vocabulary: int) -> None:
        self._grammars = grammars
        self._words = -(-vocabulary // 32)
        self._thread = ThreadPoolExecutor(1, "masks")

    def ready(self, groups: Listing[Group], wait: bool) -> list[bool]:
        """Whose grammars are compiled. wait: until one is."""
        ready = [self._grammars.ready(group.grammar) for group in groups]
        if wait and groups and not any(ready):
            ready[0] = self._grammars.ready(groups[0].grammar, wait=True)
        return ready

    def begin(self, runs: Listing[Run]) -> "Pending | None":
        """Starts on the masks of those runs that are sampled; None if no grammar binds any of them."""
        sampled = [run for run in runs if run.sampled]
        if not any(run.group.grammar for run in sampled):
            return None
        return Pending(sampled, self._thread.submit(self._find, sampled).result)

    def _find(self, sampled: Listing[Run]) -> Found:
        began = time.perf_counter()
        problems: dict[int, str] = {}
        bound: list[tuple[Group, Sequence, Guide]] = []
        places: list[int] = []  # of each row of the step: its sequence in `bound`, or -1
        for run in sampled:
            group = run.group
            guides = self._guides(group, problems)
            for sequence, guide in zip(group.sequences, guides, strict=False):
                places += [len(bound)] * (len(group.waiting) or 1)
                bound.append((group, sequence, guide))
            if not guides:
                places += [-1] * (len(group.waiting) or run.wanted)
        mask = numpy.full((len(places), self._words), -1, numpy.int32)
        if bound:
            own = self._grammars.masks([guide for _, _, guide in bound])
            for row, (group, sequence, guide) in zip(own, bound, strict=True):
                _allow_ends(row, group, sequence, guide)
                if not row.any() and group.search is None:  # beams have others
                    problems[group.uid] = guide.problem or NOWHERE
            rows = [row for row, place in enumerate(places) if place >= 0 and bound[place][0].uid not in problems]
            mask[rows] = own[[places[row] for row in rows]]
        return Found(torch.from_numpy(mask), problems, time.perf_counter() - began)

    def _guides(self, group: Group, problems: dict[int, str]) -> list[Guide]:
        """Of its sequences, each where its sequence is. They are made here, be it that the group begins or is restored."""
        guides: list[Guide] = []
        if not group.grammar:
            return guides
        try:
            for sequence in group.sequences:
                guide = sequence.guide = sequence.guide or self._grammars.guide(group.grammar)
                guide.follow(sequence.tokens[sequence.prompt_length :])
                guides.append(guide)
        except Unusable as error:
            problems[group.uid] = str(error)
            return []
        return guides


class Pending:
    """Masks that are being computed."""

    def __init__(self, sampled: Listing[Run], result: Callable[[], Found]) -> None:
        self._sampled = sampled
        self._result = result
        self.waited = 0.0  # seconds

    @property
    def seconds(self) -> float:
        """What they took."""
        return self._result().seconds

    def join(self, device: torch.device) -> Tensor:
        """[rows, words], for the rows of all runs that are sampled, in order."""
        began = time.perf_counter()
        mask = self._result().mask
        self.waited = time.perf_counter() - began
        return mask.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else mask

    def settle(self, picks: Listing[list[Pick | None]]) -> list[list[Pick | None]]:
        """The picks of these runs, without those of groups that can't go on, whose runs are told why. Where no token ends a group,
        a pick that completes its grammar does."""
        problems = self._result().problems
        settled = []
        for run, own in zip(self._sampled, picks, strict=True):
            group = run.group
            if group.uid in problems:
                run.problem = problems[group.uid]
                own = [None] * len(own)
            elif group.grammar and not group.end_ids:
                own = [_completed(pick, group.sequences[_row(pick, place, group)].guide) for place, pick in enumerate(own)]
            settled.append(own)
        return settled


def _row(pick: Pick | None, place: int, group: Group) -> int:
    """Which of the group's sequences it continues."""
    return 0 if group.waiting else getattr(pick, "row", place)


def _completed(pick: Pick | None, guide: Guide | None) -> Pick | None:
    if pick is None or guide is None or not guide.completed_by(pick.token):
        return pick
    return replace(pick, complete=True)


def _allow_ends(row: NDArray[numpy.int32], group: Group, sequence: Sequence, guide: Guide) -> None:
    """Ends are allowed where the text may end, but not too early, unless nothing else can come."""
    early = sequence.generated < group.min_new_tokens
    if early:
        others = row.copy()
        for token in group.end_ids:
            others[token // 32] &= ~bit(token)
        if others.any():
            row[:] = others
            return
    if guide.complete:
        for token in group.end_ids:
            row[token // 32] |= bit(token)
