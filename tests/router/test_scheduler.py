"""The scheduler's rules: by hand in small scenes, at random in `simulation.py`, and against planted faults."""

import pytest

from penstock.router.scheduler import Bounds, Decode, Filter, Job, Prefill, Scheduler, largest_step, prompt_share
from penstock.tests.router.simulation import simulate

WORLDS = range(2000)
# What the policy costs in these worlds. A change that makes them worse has to say why.
STEPS = 196_458
WAITS = 838_253


def scheduler(**changes: int) -> Scheduler:
    bounds = {"pages": 100, "page_size": 4, "step_tokens": 16, "total_tokens": 400, "groups": 100, **changes}
    return Scheduler(Bounds(**bounds))


def test_thousands_of_worlds_keep_every_promise() -> None:
    score = simulate(WORLDS)
    assert score.steps <= STEPS
    assert score.waits <= WAITS


def test_a_prompt_is_computed_in_chunks_and_then_decoded() -> None:
    it = scheduler()
    it.arrive(Job(7, 40, 2))
    assert it.next() == Prefill(1, (7,), ((7, 16),), decode=False)
    assert it.next() == Prefill(1, (), ((7, 16),), decode=False)
    assert it.next() == Prefill(1, (), ((7, 8),), decode=False)
    assert it.next() == Decode(1)
    it.report(free=100, ended=[7])
    assert it.next() is None


def test_decodes_ride_along_and_take_their_tokens_of_the_budget_first() -> None:
    it = scheduler()
    it.arrive(Job(1, 3, 9))
    it.arrive(Job(2, 4, 9))
    assert it.next() == Prefill(1, (1, 2), ((1, 3), (2, 4)), decode=False)
    it.arrive(Job(3, 30, 9))
    assert it.next() == Prefill(1, (3,), ((3, 14),), decode=True)
    assert it.next() == Prefill(1, (), ((3, 14),), decode=True)
    assert it.next() == Prefill(1, (), ((3, 2),), decode=True)
    assert it.next() == Decode(1)


def test_prompts_get_their_share_when_decodes_fill_the_budget() -> None:
    it = scheduler(step_tokens=16)
    for uid in range(40):
        it.arrive(Job(uid, 1, 3))
    it.next()
    steps = [it.next() for _ in range(13)]
    assert [len(step.chunks) for step in steps if isinstance(step, Prefill)] == [2] * 12
    assert largest_step(16, 40) == 39 + prompt_share(16) == 41


def test_a_small_job_passes_a_big_one_only_so_often() -> None:
    it = scheduler(pages=10, total_tokens=40, overtakes=2)
    it.arrive(Job(1, 4, 24))  # 7 pages
    it.arrive(Job(2, 12, 8))  # 5: does not fit beside 1
    for uid in (3, 4, 5):
        it.arrive(Job(uid, 1, 3))  # 1 page each: all would fit
    assert it.next() == Prefill(1, (1, 3, 4), ((1, 4), (3, 1), (4, 1)), decode=False)
    assert it.next() == Decode(1)
    it.report(free=10, ended=[3, 4])
    assert it.next() == Decode(1), "5 has to wait for 2 now"
    it.report(free=10, ended=[1])
    assert it.next() == Prefill(1, (2, 5), ((2, 12), (5, 1)), decode=False)


def test_cancelling_drops_what_runs_and_forgets_what_waits() -> None:
    it = scheduler(groups=2)
    for uid in (1, 2, 3, 4):
        it.arrive(Job(uid, 20, 5))
    assert it.next() == Prefill(1, (1,), ((1, 16),), decode=False)
    assert it.next() == Prefill(1, (2,), ((1, 4), (2, 12)), decode=False)
    it.cancel(3)
    it.cancel(2)
    it.cancel(2)
    it.cancel(99)
    assert (it.waiting, it.running) == (1, 1)
    assert it.next() == Filter((2,))
    assert it.next() == Prefill(1, (4,), ((4, 15),), decode=True)


def test_reports_of_cancelled_groups_are_ignored() -> None:
    it = scheduler()
    it.arrive(Job(1, 2, 5))
    it.next()
    it.cancel(1)
    it.report(free=99, uids=[1], held=[1], grow=[0])
    assert (it.free, it.held) == (99, 0)
    assert it.next() == Filter((1,))
    it.report(free=100)
    assert it.next() is None


def test_what_can_never_run_is_not_admissible() -> None:
    it = scheduler(pages=10, total_tokens=36)
    assert it.admissible(30, 6)
    assert not it.admissible(30, 7)
    assert not scheduler(pages=2, total_tokens=36).admissible(7, 2)


class Overcommits(Scheduler):
    """Takes every answer for half as long."""

    def _pages(self, tokens: int) -> int:
        return super()._pages(-(-tokens // 2))


class Leaks(Scheduler):
    """Keeps the reservation of a cancelled job."""

    def cancel(self, uid: int) -> None:
        pages = self._reserved_pages
        super().cancel(uid)
        self._reserved_pages = pages


class Unfair(Scheduler):
    """Lets everybody pass for ever."""

    def _patience(self, job: Job) -> int:
        return 1_000_000


class Youngest(Scheduler):
    """Last come, first served."""

    def arrive(self, job: Job) -> None:
        super().arrive(job)
        self._waiting = {job.uid: job, **{uid: other for uid, other in self._waiting.items() if uid != job.uid}}


class Starves(Scheduler):
    """Prompts get what decodes leave, be it nothing."""

    def _room(self, decodes: int) -> int:
        return max(0, self._bounds.step_tokens - decodes)


class Greedy(Scheduler):
    """Forgets that decodes are part of the budget."""

    def _room(self, decodes: int) -> int:
        return self._bounds.step_tokens


class Separate(Scheduler):
    """Lets running groups wait while it computes prompts."""

    def next(self) -> Prefill | Decode | Filter | None:
        action = super().next()
        return Prefill(1, action.new, action.chunks, decode=False) if isinstance(action, Prefill) else action


class Repeats(Scheduler):
    """Asks for a chunk twice."""

    def next(self) -> Prefill | Decode | Filter | None:
        action = super().next()
        return Prefill(1, action.new, action.chunks + action.chunks[:1], action.decode) if isinstance(action, Prefill) else action


class Forgets(Scheduler):
    """Does not tell the shards of cancels."""

    def cancel(self, uid: int) -> None:
        super().cancel(uid)
        self._dropped.clear()


class Chatters(Scheduler):
    """Tells the shards of cancels that are none of their business."""

    def cancel(self, uid: int) -> None:
        if uid in self._waiting:
            self._dropped.append(uid)
        super().cancel(uid)


class Late(Scheduler):
    """Drops cancelled groups when nothing else is left to do."""

    def next(self) -> Prefill | Decode | Filter | None:
        dropped, self._dropped = self._dropped, []
        action = super().next()
        if action is None and dropped:
            return Filter(tuple(dropped))
        self._dropped = dropped
        return action


class Sleeps(Scheduler):
    """Does not notice that pages came back."""

    def _release(self, uid: int) -> bool:
        stuck = self._stuck
        released = super()._release(uid)
        self._stuck = stuck
        return released


class Crowds(Scheduler):
    """Looks at pages only."""

    def _fits(self, job: Job) -> bool:
        return self._reserved_pages + self._pages(job.tokens) <= self._bounds.pages


class Timid(Scheduler):
    """Keeps a page in reserve."""

    def _fits(self, job: Job) -> bool:
        spare = self._reserved_groups > 0
        return super()._fits(job) and self._reserved_pages + self._pages(job.tokens) + spare <= self._bounds.pages


FAULTS = [
    Overcommits, Leaks, Unfair, Youngest, Starves, Greedy, Separate, Repeats, Forgets, Chatters, Late, Sleeps, Crowds, Timid,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: type[Scheduler]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        simulate(range(200), fault)
