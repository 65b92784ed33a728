"""Continuous-batching scheduler: decides which prompt chunks and decodes the shards compute in the next step. Pure: it works on
integers, without tokens, clock or IO. Of our modules it imports only those that model a step's cost (`policies`, `drafting`) and
prefixes shared between prompts (`prefix_sharing`).

    arrive, cancel, end   what clients do
    next() -> action      the next command for the shards, or None. Its effect is assumed at once, so that the next call may
                          come before the reply: one step of lookahead, or two decode steps beside one that is reported as begun
    report, paused        what replies have reported

The shards measure, the scheduler decides: they report for each group how many pages it may still take (`grow`) and how many tokens
it lacks until it decodes. Nothing here knows what a page holds or what a choice costs.

Rules, each checked by tests/router/simulation.py
  memory      The sum of `grow` over all admitted groups never exceeds the free pages when a step is requested. Where it would,
              whole groups are preempted (paused), those of the highest rank first (the youngest, unless priorities differ), never
              the last one. A job is admitted only if `headroom` remains for the running ones, so that it does not preempt them a
              moment later. Pages of its prompt that a running job holds already are not counted again (`prefix_sharing`);
              while such prompts are in flight nobody is preempted, since the reply may say that less is needed.
  budget      Chunked prefill: prompts get the tokens that the policy grants. Half of them belong to the oldest prompt, the rest to
              the shortest first: a short prompt passes a long one, which takes at most twice as long for it.
  order       Jobs come by rank (arrival and priority), preempted ones among the waiting; of several tenants the one with the least
              load running comes first. Where a job does not fit, later ones may overtake it, each job at most `overtakes` times,
              a preempted one never, and any number while those before it alone leave it no room. Then all wait.
  drafts      With speculative decoding, a step carries what a draft may cost and how many there may be (`drafting`). Prompts come
              first: drafts get the tokens that these leave of the step.
  cancelling  The groups of cancelled jobs, and ended choices, are dropped by a Filter before anything else is requested.
"""

import sys
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from .drafting import Allowance, DraftBudget
from .policies import ChunkedPrefill, Measured, Policy, SchedulerState
from .prefix_sharing import PrefixSharing

# Seconds by which a request's priority delays its arrival time. An interactive request passes a batch one that came up to a minute
# before it, and nobody waits for ever.
DELAYS = {"interactive": 0.0, "normal": 5.0, "batch": 60.0}
CHARGED = 256  # generated tokens of a choice that count in a load, at most: few answers use all of max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits on what may run at once. Every number is positive."""

    pages: int  # in the shards' KV pool
    page_size: int  # tokens per page
    step_tokens: int  # query tokens of a step (max_batch_prefill_tokens)
    sequences: int  # of all admitted jobs (max_batch_size)
    overtakes: int = 16  # how often a job that does not fit may be overtaken
    headroom: int = 32  # tokens that each running sequence must still be able to grow by when another job is admitted
    attached: int = sys.maxsize  # bytes of images that jobs admitted together may bring; one alone may bring more

    def together(self, tokens: int) -> int:
        """How many sequences of `tokens` tokens fit at once."""
        return min(self.pages // -(-tokens // self.page_size), self.sequences)


@dataclass(slots=True)
class Job:
    """A request as the scheduler sees it: its size, and its current standing."""

    uid: int
    prompt_tokens: int
    max_new_tokens: int  # of each choice
    choices: int = 1
    rank: float = 0.0  # effective arrival time: arrival plus the delay of its priority. Smaller goes first
    tenant: str = ""
    drafts: int = 0  # most draft tokens per choice in a step
    attached: int = 0  # bytes of images that it brings
    # (tokens, key) of the prompt's prefixes, where shards cache prefixes: see `prefix_keys`
    prefix_keys: Sequence[tuple[int, int]] = ()
    running: int = 0  # choices that have not ended
    overtaken: int = 0  # later jobs that were admitted before it
    lacking: int = 0  # tokens to be computed before it decodes, by the last report
    held: int = 0  # pages, by the last report
    grow: int = 0  # pages that it may still take, by the last report
    shared: int = 0  # pages left out of `grow` because other jobs held them, until the shards report its own `grow`
    fresh: bool = True  # `lacking` is the full length: the prefix cache was not looked up yet
    paused: bool = False  # it was preempted and waits to be resumed

    @property
    def order(self) -> tuple[float, int]:
        """Sort key of the queue; unique."""
        return self.rank, self.uid

    @property
    def load(self) -> int:
        """Tokens that it counts in its tenant's load."""
        return load_of(self.prompt_tokens, self.max_new_tokens, self.choices)


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute chunks of prompts, in this order; with `decode`, the decodable groups of the batch decode in the same step."""

    new: tuple[int, ...]  # uids that join the batch
    chunks: tuple[tuple[int, int], ...]  # (uid, most tokens of it), of new and earlier groups
    tokens: int  # budget of all chunks together; what the bounds per chunk leave is dealt out in a second pass
    decode: bool
    allowance: Allowance | None = None  # budget of drafts for the decoding groups; None: no drafts


@dataclass(frozen=True, slots=True)
class Decode:
    """One decode step of every decodable group of the batch."""

    allowance: Allowance | None = None  # budget of drafts; None: no drafts


@dataclass(frozen=True, slots=True)
class Filter:
    """Drop groups, end single choices, preempt groups and take their pages back."""

    drop: tuple[int, ...] = ()
    pause: tuple[int, ...] = ()
    end: tuple[tuple[int, int], ...] = ()  # (uid, choice)


Action = Prefill | Decode | Filter


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Measured):
    """What the reply to a Prefill or Decode reports of the step and of the running groups."""

    free: int  # pages that can be taken, cached prefixes included
    cached: int = 0  # of these, pages that hold cached prefixes
    uids: Sequence[int] = ()  # groups that go on and whose standing has changed ...
    held: Sequence[int] = ()
    grow: Sequence[int] = ()
    lacking: Sequence[int] = ()
    finished: Iterable[int] = ()  # the uid of each choice that has ended on the shards
    failed: Iterable[int] = ()
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    ahead: bool = False  # steps overlap: standings and free pages include what the next step takes and computes


def load_of(prompt_tokens: int, max_new_tokens: int, choices: int) -> int:
    """Tokens that a request counts in the load of its tenant or of its replica."""
    return prompt_tokens + choices * min(max_new_tokens, CHARGED)


def most_pages(prompt_tokens: int, max_new_tokens: int, choices: int, page_size: int) -> int:
    """Pages of a request at full length: choices share the prompt's full pages. The last token of each is never computed."""
    shared = prompt_tokens // page_size
    return shared + choices * (-(-(prompt_tokens + max_new_tokens - 1) // page_size) - shared)


def fill(lacking: Sequence[int], most: Sequence[int], tokens: int) -> list[int]:
    """How the shards divide the token budget of a Prefill: in order, up to `most` for each; a second pass deals out the rest."""
    taken = []
    for wanted, bound in zip(lacking, most, strict=True):
        taken.append(min(wanted, bound, tokens))
        tokens -= taken[-1]
    for i, wanted in enumerate(lacking):
        more = min(wanted - taken[i], tokens)
        taken[i] += more
        tokens -= more
    return taken


class Scheduler:
    """Schedules one running batch, filled from one queue."""

    def __init__(self, bounds: Bounds, policy: Policy | None = None, draft_budget: DraftBudget | None = None) -> None:
        """draft_budget: the budget of drafts, where the shards speculate."""
        self.bounds = bounds
        self._policy = policy or ChunkedPrefill(bounds.step_tokens)
        self._draft_budget = draft_budget
        self._waiting: dict[int, Job] = {}  # by uid, preempted ones included
        self._lines: dict[str, list[Job]] = {}  # the same jobs by tenant, each list in order
        self._running: dict[int, Job] = {}  # admitted jobs
        self._prompts: dict[int, Job] = {}  # admitted jobs that do not decode yet
        self._sharers: dict[int, Job] = {}  # admitted jobs whose `shared` is not 0
        self._pausing: dict[int, Job] = {}  # a Filter that preempts them is in flight
        self._paused = 0  # preempted jobs among the waiting
        self._dropped: list[int] = []
        self._ended: list[tuple[int, int]] = []
        self._underway: deque[dict[int, int]] = deque()  # per step that was not reported yet: prompt tokens requested, by uid
        self._filters = 0  # Filters in flight
        self._loads: dict[str, int] = {}  # by tenant that has something running
        self._grow = 0  # pages that admitted jobs may still take
        self._sequences = 0  # of admitted jobs
        self._decodes = 0  # sequences that decode
        self._drafters = 0  # admitted jobs that may have drafts
        self._keys = 0.0  # that a decoded token attended to in the last step, on average
        self._steps = 0  # since the last one that computed a prompt
        self._uncached = 1.0  # moving average: share of prompt tokens not found in the prefix cache
        self._sharing = PrefixSharing(bounds.page_size)
        self.free = bounds.pages  # pages that can be taken, by the last report
        self.cached = 0  # of these, pages that hold cached prefixes
        self.room = 0  # token budget for prompts in the last step that had any

    @property
    def waiting(self) -> int:
        """Jobs that have not begun."""
        return len(self._waiting) - self._paused

    @property
    def running(self) -> int:
        """Admitted jobs."""
        return len(self._running)

    @property
    def held(self) -> int:
        """Pages of admitted jobs, by the last report."""
        return self.bounds.pages - self.free

    @property
    def paused_jobs(self) -> int:
        """Preempted jobs: their pages were taken back until they are resumed."""
        return self._paused + len(self._pausing)

    def admissible(self, prompt_tokens: int, max_new_tokens: int, choices: int = 1) -> bool:
        """Whether a job of this size can run at all, if need be alone."""
        bounds = self.bounds
        pages = most_pages(prompt_tokens, max_new_tokens, choices, bounds.page_size)
        return pages <= bounds.pages and choices <= bounds.sequences

    @property
    def in_hand(self) -> tuple[int, ...]:
        """Uids of all jobs that the steps in flight may compute."""
        return (*self._running, *self._pausing) if self._underway else ()

    def lacking(self, uid: int) -> int:
        """Tokens of a job to be computed before it decodes, as far as is known."""
        job = self._job(uid)
        return job.lacking if job is not None else 0

    def arrive(self, job: Job, generated: Sequence[int] = ()) -> None:
        """The job joins the queue. generated: tokens generated by each of its choices that has not ended, if it has begun on other
        shards: it goes on there, like a preempted one."""
        assert job.prompt_tokens > 0
        assert job.max_new_tokens > 0
        assert self.admissible(job.prompt_tokens, job.max_new_tokens, job.choices), job
        assert job.uid not in self._waiting
        begun = generated or [1] * job.choices
        shared = job.prompt_tokens // self.bounds.page_size
        # Until it decodes, and in two steps after that: the shards report the same as soon as they know it.
        size, steps = self.bounds.page_size, 2 * (1 + job.drafts)
        most = (most_pages(job.prompt_tokens, min(job.max_new_tokens, count + steps), 1, size) for count in begun)
        job.grow = shared + sum(pages - shared for pages in most)
        job.running, job.lacking = len(begun), job.prompt_tokens
        if generated:
            job.lacking += sum(generated) - len(generated)  # the last token of each is the input of its first step
            job.fresh, job.paused = False, True
        self._queue(job)

    def cancel(self, uid: int) -> None:
        """Cancels a job. Nothing happens if it has ended already."""
        job = self._waiting.get(uid)
        if job is not None:
            self._leave_queue(job)
        elif self._pausing.pop(uid, None) is None and self._release(uid):
            self._dropped.append(uid)
            self._ended = [end for end in self._ended if end[0] != uid]

    def end(self, uid: int, choice: int) -> None:
        """Ends one choice early, which has not ended yet; the job's other choices go on."""
        job = self._job(uid)
        if job is None:
            return
        if job.running == 1:
            self.cancel(uid)
            return
        if uid in self._running:
            self._ended.append((uid, choice))
        self._finish(uid)

    def report(self, report: Report) -> None:
        """The reply to the oldest Prefill or Decode in flight. Jobs that are not here any more are ignored."""
        self._underway.popleft()
        if report.ahead:  # `lacking` already excludes what the next step computes
            self._underway[0] = {}
        self.free, self.cached = report.free, report.cached
        for uid in report.finished:
            self._finish(uid)
        for uid in report.failed:
            self.forget(uid)
        if report.failed:  # the prefix cache loses what they computed, and what others computed, or still compute, on top of it
            self._sharing.clear()
            for one in self._running.values():
                one.prefix_keys = ()
        for uid, held, grow, lacking in zip(report.uids, report.held, report.grow, report.lacking, strict=True):
            job = self._running.get(uid)
            if job is not None:
                self._sharers.pop(uid, None)
                self._grow += grow - job.grow
                job.held, job.grow, job.fresh = held, grow, False
                if lacking != job.lacking:
                    self._progress(job, lacking)
        for job in self._sharers.values():  # pages that no other job holds any more went back to the free ones
            more = max(0, job.shared - self._sharing.pages(job.prefix_keys))
            job.shared, job.grow, self._grow = job.shared - more, job.grow + more, self._grow + more
        self._learn(report)

    def paused(self, free: int, cached: int, groups: Iterable[tuple[int, int, int]]) -> None:
        """The reply to a Filter. groups: (uid, grow, lacking) of the preempted ones."""
        self._filters -= 1
        self.free, self.cached = free, cached
        for uid, grow, lacking in groups:
            job = self._pausing.pop(uid, None)
            if job is not None:
                job.grow, job.lacking, job.held, job.paused = grow, lacking, 0, True
                self._queue(job)

    def next(self) -> Action | None:
        """The next command for the shards. It counts as done, so that the next call may come before the reply."""
        if self._dropped or self._ended:
            dropped, self._dropped = tuple(self._dropped), []
            ended, self._ended = tuple(self._ended), []
            self._filters += 1
            return Filter(dropped, (), ended)
        if self._grow > self.free:
            # What a Filter in flight frees is not known yet, and may be enough; nor what prompts in flight have found in the cache.
            return None if self._filters or (self._sharers and self._underway) else self._pause()
        decodes = self._expected_decodes()
        chunks, new = self._plan(decodes)
        if chunks:
            self._steps = 0
            mixed = self._policy.mixes and decodes > 0
            allowance = self._allowance(decodes) if mixed else None
            return Prefill(tuple(job.uid for job in new), chunks, self.room, mixed, allowance)
        if not decodes:
            return None
        self._steps += 1
        self._underway.append({})
        return Decode(self._allowance(decodes))

    def _allowance(self, decodes: int) -> Allowance | None:
        """Budget of drafts for the step just added to those in flight. Its prompts are counted the way steps are measured, since
        that is what `cost` is fitted to."""
        if self._draft_budget is None or not self._drafters:
            return None
        asked = self._underway[-1]
        keys = 0
        for uid, count in asked.items():
            job = self._running[uid]
            keys += count * max(0, job.prompt_tokens - self._expected(job) - count) + count * (count + 1) // 2
        prompts = Measured(prompt_tokens=sum(asked.values()), prompt_keys=keys).work
        return self._draft_budget.allow(decodes, decodes * (self._keys + 1), prompts)

    # Prompts

    def _plan(self, decodes: int) -> tuple[tuple[tuple[int, int], ...], list[Job]]:
        """Chunks of prompts for the next step, and the jobs that it admits. Counts them as in flight."""
        prompts = sorted((job for job in self._prompts.values() if self._expected(job) > 0), key=_order)
        if not prompts and not self._waiting:
            return (), []
        now = self._scheduler_state(prompts, decodes)
        room = self._policy.room(now)
        new = self._admit(room, prompts) if self._policy.admits(now) else []
        prompts = sorted(prompts + new, key=_order) if new else prompts
        if not prompts:
            return (), []
        self.room = room
        oldest, others = prompts[0], sorted(prompts[1:], key=self._expected)
        ordered = [oldest, *others]
        lacking = [self._expected(job) for job in ordered]
        most = [max(1, room // 2) if others else room, *lacking[1:]]
        taken = fill(lacking, most, room)
        self._underway.append({job.uid: count for job, count in zip(ordered, taken, strict=True) if count})
        # Chunks that get no tokens are listed all the same: where prefixes are cached, there will be more room than it seems.
        return tuple((job.uid, bound) for job, bound in zip(ordered, most, strict=True)), new

    def _expected(self, job: Job) -> int:
        """Tokens that it will lack after the steps in flight."""
        return job.lacking - sum(asked.get(job.uid, 0) for asked in self._underway)

    def _expected_decodes(self) -> int:
        """Sequences that will decode after the steps in flight."""
        return self._decodes + sum(job.running for job in self._prompts.values() if self._expected(job) <= 0)

    def _scheduler_state(self, prompts: Sequence[Job], decodes: int) -> SchedulerState:
        return SchedulerState(
            decodes=decodes,
            keys=round(decodes * (self._keys + 1)),
            sequences=self._sequences,
            prompts=len(prompts),
            position=max(0, prompts[0].prompt_tokens - self._expected(prompts[0])) if prompts else 0,
            waiting=len(self._waiting),
            steps=self._steps,
        )

    # Admission

    def _admit(self, room: int, prompts: Sequence[Job]) -> list[Job]:
        """Moves jobs into the batch, in order, as many as fit and will get tokens in this step."""
        admitted: list[Job] = []
        if self._sequences >= self.bounds.sequences:
            return admitted
        half = max(1, room // 2)  # the share of the oldest, if it wants so much
        used = sum(min(self._expected(job), half if job is prompts[0] else room) for job in prompts)
        attached = 0
        overtaken: list[Job] = []
        refused = 0
        patience = self.bounds.overtakes  # how many more jobs may pass those in `overtaken`
        for job in self._candidates():
            if used >= room or (attached and attached + job.attached > self.bounds.attached):
                break
            if self._fits(job):
                self._enter(job)
                attached += job.attached
                lacking = self._uncomputed(job)
                used += lacking if prompts or admitted else min(lacking, half)
                admitted.append(job)
                for earlier in overtaken:
                    earlier.overtaken += 1
                patience -= 1 if overtaken else 0
            else:
                refused += 1
                if self._patience(job) > 0 or not self._waits_for_older(job):  # else any number may pass it
                    overtaken.append(job)
                    patience = min(patience, self._patience(job))
            if patience <= 0 or refused > self.bounds.overtakes:
                break
        for job in admitted:
            self._leave_queue(job)
        return admitted

    def _candidates(self) -> Iterator[Job]:
        """Waiting jobs in the order of admission. Lazy: what one tenant got so far counts when the next is chosen."""
        heap = [(self._loads.get(tenant, 0), line[0].order, tenant, 0) for tenant, line in self._lines.items()]
        heapify(heap)
        while heap:
            _, _, tenant, place = heap[0]
            line = self._lines[tenant]
            yield line[place]
            place += 1
            if place < len(line):
                heapreplace(heap, (self._loads.get(tenant, 0), line[place].order, tenant, place))
            else:
                heappop(heap)

    def _patience(self, job: Job) -> int:
        """How many more later jobs may be admitted before this one."""
        return 0 if job.paused else self.bounds.overtakes - job.overtaken

    def _waits_for_older(self, job: Job) -> bool:
        """Whether the running jobs before it would leave it no room even if they were alone: then admitting later jobs does not
        delay it, however many they are. Once the older ones have made room nobody passes it any more."""
        if self._filters or self._dropped or self._pausing:
            return False  # what they free is not known yet
        younger = [one for one in self._running.values() if one.order > job.order]
        sequences = self._sequences - sum(one.running for one in younger)
        if sequences + job.running > self.bounds.sequences:
            return True
        grow = self._grow - sum(one.grow for one in younger)
        return grow + self._taken(job) + self._headroom(sequences) > self.free + sum(one.held for one in younger)

    def _fits(self, job: Job) -> bool:
        bounds = self.bounds
        if self._sequences + job.running > bounds.sequences:
            return False
        return self._grow + self._taken(job) + self._headroom(self._sequences) <= self.free

    def _taken(self, job: Job) -> int:
        """Pages that a waiting job may take, if it were admitted now."""
        return job.grow - self._sharing.pages(job.prefix_keys)

    def _uncomputed(self, job: Job) -> int:
        """Tokens that a just admitted job probably has to be computed before it decodes."""
        if not job.fresh:
            return job.lacking
        return max(1, min(round(job.lacking * self._uncached), job.lacking - job.shared * self.bounds.page_size))

    def _headroom(self, sequences: int) -> int:
        """Pages that must stay free for `sequences` running ones when another job is admitted."""
        bounds = self.bounds
        return min(sequences * -(-bounds.headroom // bounds.page_size), bounds.pages // 8)

    def _enter(self, job: Job) -> None:
        self._running[job.uid] = job
        job.shared = self._sharing.pages(job.prefix_keys)
        job.grow -= job.shared
        if job.shared:
            self._sharers[job.uid] = job
        self._grow += job.grow
        self._sequences += job.running
        self._drafters += job.drafts > 0
        self._loads[job.tenant] = self._loads.get(job.tenant, 0) + job.load
        self._prompts[job.uid] = job  # nothing of it is computed: it lacks tokens

    def _queue(self, job: Job) -> None:
        self._waiting[job.uid] = job
        self._paused += job.paused
        insort(self._lines.setdefault(job.tenant, []), job, key=_order)

    def _leave_queue(self, job: Job) -> None:
        del self._waiting[job.uid]
        self._paused -= job.paused
        line = self._lines[job.tenant]
        del line[bisect_left(line, job.order, key=_order)]
        if not line:
            del self._lines[job.tenant]

    # Leaving

    def _pause(self) -> Filter:
        """Preempts as many groups as needed, from the back of the order. The first is never among them."""
        missing = self._grow - self.free
        victims: list[Job] = []
        for job in sorted(self._running.values(), key=_order, reverse=True)[:-1]:
            if missing > 0:
                missing -= job.held - self._sharing.pages(job.prefix_keys, 2) + job.grow  # without pages that others hold, too
                victims.append(job)
        assert victims, "one group alone may not take more than there is"
        return self._take_back(victims)

    def _take_back(self, jobs: Sequence[Job]) -> Filter:
        for job in jobs:
            self._release(job.uid)
            self._pausing[job.uid] = job
        self._filters += 1
        return Filter(pause=tuple(job.uid for job in jobs))

    def _job(self, uid: int) -> Job | None:
        return self._running.get(uid) or self._pausing.get(uid) or self._waiting.get(uid)

    def _finish(self, uid: int) -> None:
        """One of its choices has ended."""
        job = self._job(uid)
        if job is None:
            return
        if job.running == 1:
            self.forget(uid)
            return
        job.running -= 1
        if uid in self._running:
            self._sequences -= 1
            self._decodes -= uid not in self._prompts

    def forget(self, uid: int) -> None:
        """Removes a job that is not on the shards: it has failed there, or could not be sent to them."""
        if self._pausing.pop(uid, None) is None:
            self._release(uid)

    def _release(self, uid: int) -> bool:
        """Takes an admitted job out of the batch. False if there is none."""
        job = self._running.pop(uid, None)
        if job is None:
            return False
        if self._prompts.pop(uid, None) is None:
            self._decodes -= job.running
        self._sharing.release(uid)
        self._sharers.pop(uid, None)
        self._sequences -= job.running
        self._drafters -= job.drafts > 0
        self._grow -= job.grow
        self._loads[job.tenant] -= job.load
        if not self._loads[job.tenant]:
            del self._loads[job.tenant]
        return True

    # Learning

    def _progress(self, job: Job, lacking: int) -> None:
        job.lacking = lacking
        if not lacking and self._prompts.pop(job.uid, None) is not None:
            self._decodes += job.running
            self._sharing.hold(job.uid, job.prefix_keys)

    def _learn(self, report: Report) -> None:
        if report.decode_tokens:
            self._keys = report.decode_keys / report.decode_tokens
        prompt = report.prompt_tokens + report.cached_tokens
        if prompt:
            self._uncached += 0.2 * (report.prompt_tokens / prompt - self._uncached)
        self._policy.learn(report)
        if self._draft_budget is not None:
            self._draft_budget.learn(report)


def _order(job: Job) -> tuple[float, int]:
    return job.order
