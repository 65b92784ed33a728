"""Decides what the shards compute next. Pure: it knows integers; no token, clock, IO or other module of ours.

    arrive, cancel      what clients do
    next() -> action    what the shards shall do now; None: nothing. Its effect on a group's standing is assumed at once
    report(...)         what a reply has said

Rules, each held by tests/router/simulation.py
  budget      A step takes one token of every decodable group first; chunks of prompts fill the rest of `step_tokens`. Where
              decodes leave less than an eighth of `step_tokens`, prompts get that eighth all the same (at least one token), so
              that they never starve: `largest_step` bounds the sum.
  order       Prompts are computed in the order of admission, each as far as the budget goes. A step with prompts carries the
              decodes too, so no running group ever waits for a prompt of another.
  admission   A job is admitted in the step that computes its first tokens, when it `_fits`, first come first served. One
              that fits may overtake earlier ones that don't, but each of those at most `overtakes` times; then all wait.
  cancelling  The groups of cancelled jobs are dropped by a Filter before anything else is asked.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BATCH = 1  # the one batch on the shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What may run at once. Every number is positive."""

    pages: int  # in the shards' pool
    page_size: int  # tokens
    step_tokens: int  # query tokens of a step (max_batch_prefill_tokens)
    total_tokens: int  # prompts and answers at full length, of all admitted jobs (max_batch_total_tokens)
    groups: int  # admitted jobs (max_batch_size)
    overtakes: int = 16  # how often a waiting job may be overtaken
    # For operators who pause decodes for prompts instead of mixing both. Nothing reads them until the scheduler can pause.
    waiting_tokens: int = 20  # max_waiting_tokens
    waiting_served_ratio: float = 0.3

    def together(self, tokens: int) -> int:
        """How many jobs of so many tokens fit at once."""
        return min(self.pages // -(-tokens // self.page_size), self.total_tokens // tokens, self.groups)


@dataclass(slots=True)
class Job:
    """A request as the scheduler sees it, and its standing."""

    uid: int
    prompt_tokens: int
    max_new_tokens: int
    computed: int = 0  # prompt tokens that the shards were asked to compute
    overtaken: int = 0  # later jobs that were admitted before it
    held: int = 0  # pages, by the last report
    grow: int = 0  # pages that the next decode may add, by the last report

    @property
    def tokens(self) -> int:
        """At full length."""
        return self.prompt_tokens + self.max_new_tokens


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute chunks of prompts; with `decode`, a step of the batch's decodable groups rides along."""

    batch: int
    new: tuple[int, ...]  # uids that join the batch
    chunks: tuple[tuple[int, int], ...]  # (uid, prompt tokens), of new and earlier groups
    decode: bool


@dataclass(frozen=True, slots=True)
class Decode:
    """One step of every decodable group of the batch."""

    batch: int


@dataclass(frozen=True, slots=True)
class Filter:
    """Forget groups."""

    drop: tuple[int, ...]


Action = Prefill | Decode | Filter


def prompt_share(step_tokens: int) -> int:
    """Tokens that prompts get in every step, however many groups decode."""
    return max(1, step_tokens // 8)


def largest_step(step_tokens: int, groups: int) -> int:
    """Most query tokens that a step with at most so many groups can have."""
    return max(step_tokens, groups - 1 + prompt_share(step_tokens))


class Scheduler:
    """One running batch, filled from one queue."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        # By uid, in the order of arrival or admission. An admitted job moves from prompts to decodes with its last chunk.
        self._waiting: dict[int, Job] = {}
        self._prompts: dict[int, Job] = {}
        self._decodes: dict[int, Job] = {}
        self._dropped: list[int] = []
        self._reserved_pages = 0
        self._reserved_tokens = 0
        self._reserved_groups = 0
        self._stuck = False  # nobody in the queue can be admitted until something arrives or ends
        self.free = bounds.pages  # pages, by the last report

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Admitted jobs."""
        return self._reserved_groups

    @property
    def held(self) -> int:
        """Pages of all admitted jobs, by the last reports; a page that several share counts for each."""
        return sum(job.held for jobs in (self._prompts, self._decodes) for job in jobs.values())

    def admissible(self, prompt_tokens: int, max_new_tokens: int) -> bool:
        """Whether a job of this size can run at all, if need be alone."""
        tokens = prompt_tokens + max_new_tokens
        return tokens <= self._bounds.total_tokens and self._pages(tokens) <= self._bounds.pages

    def arrive(self, job: Job) -> None:
        """The job joins the queue."""
        assert job.prompt_tokens > 0
        assert job.max_new_tokens > 0
        assert self.admissible(job.prompt_tokens, job.max_new_tokens), job
        assert job.uid not in self._waiting
        self._waiting[job.uid] = job
        self._stuck = False

    def cancel(self, uid: int) -> None:
        """Nobody wants it any more. Nothing happens if it has ended already."""
        if self._waiting.pop(uid, None) is not None:
            self._stuck = False
        elif self._release(uid):
            self._dropped.append(uid)

    def report(
        self,
        *,
        free: int,
        uids: Sequence[int] = (),
        held: Sequence[int] = (),
        grow: Sequence[int] = (),
        ended: Iterable[int] = (),
    ) -> None:
        """What a reply says: pages of each group that lives on, and who has ended or failed. Cancelled uids are ignored."""
        self.free = free
        for uid in ended:
            self._release(uid)
        for uid, pages, more in zip(uids, held, grow, strict=True):
            job = self._decodes.get(uid) or self._prompts.get(uid)
            if job is not None:
                job.held = pages
                job.grow = more

    def next(self) -> Action | None:
        """What the shards shall do now. It counts as done, so that the next call may come before the reply."""
        if self._dropped:
            dropped, self._dropped = tuple(self._dropped), []
            return Filter(dropped)
        decodes = len(self._decodes)
        room = self._room(decodes)
        chunks: list[tuple[int, int]] = []
        room = self._chunk(tuple(self._prompts.values()), room, chunks)
        new = self._admit(room)
        self._chunk(new, room, chunks)
        if chunks:
            return Prefill(BATCH, tuple(job.uid for job in new), tuple(chunks), decode=decodes > 0)
        return Decode(BATCH) if decodes else None

    def _room(self, decodes: int) -> int:
        """Tokens of the next step that prompts may take."""
        step_tokens = self._bounds.step_tokens
        return max(step_tokens - decodes, prompt_share(step_tokens))

    def _chunk(self, jobs: Sequence[Job], room: int, chunks: list[tuple[int, int]]) -> int:
        """Adds a chunk of each job while there is room. Returns what is left of it."""
        for job in jobs:
            if room == 0:
                break
            length = min(room, job.prompt_tokens - job.computed)
            chunks.append((job.uid, length))
            room -= length
            job.computed += length
            if job.computed == job.prompt_tokens:
                self._decodes[job.uid] = self._prompts.pop(job.uid)
        return room

    def _admit(self, room: int) -> list[Job]:
        """Moves jobs from the queue into the batch, as many as fit and find room for at least one token."""
        admitted: list[Job] = []
        overtaken: list[Job] = []
        patience: float = math.inf  # how many more may pass those in `overtaken`
        if self._stuck:
            return admitted
        for job in self._waiting.values():
            if room <= 0:
                break
            if not self._fits(job):
                overtaken.append(job)
                patience = min(patience, self._patience(job))
            else:
                self._reserve(job)
                admitted.append(job)
                room -= job.prompt_tokens
                for earlier in overtaken:
                    earlier.overtaken += 1
                patience -= 1
            if patience <= 0:
                break
        self._stuck = room > 0
        for job in admitted:
            self._prompts[job.uid] = self._waiting.pop(job.uid)
        return admitted

    def _patience(self, job: Job) -> int:
        """How many more later jobs may be admitted before this one."""
        return self._bounds.overtakes - job.overtaken

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._bounds.page_size)

    # The policy for memory. A job that runs never waits for pages, because all that it may ever need is set aside when it is
    # admitted. To be replaced by growth and pauses, for which `held`, `grow` and `free` are kept.

    def _fits(self, job: Job) -> bool:
        bounds = self._bounds
        return (
            self._reserved_pages + self._pages(job.tokens) <= bounds.pages
            and self._reserved_tokens + job.tokens <= bounds.total_tokens
            and self._reserved_groups < bounds.groups
        )

    def _reserve(self, job: Job) -> None:
        self._reserved_pages += self._pages(job.tokens)
        self._reserved_tokens += job.tokens
        self._reserved_groups += 1

    def _release(self, uid: int) -> bool:
        """Forgets an admitted job. False if there is none."""
        job = self._decodes.pop(uid, None) or self._prompts.pop(uid, None)
        if job is None:
            return False
        self._reserved_pages -= self._pages(job.tokens)
        self._reserved_tokens -= job.tokens
        self._reserved_groups -= 1
        self._stuck = False
        return True
