"""The scheduler's rules: by hand in small scenes, at random in `simulation.py`, and against planted faults."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pytest

from penstock.router.cost import Cost, Work
from penstock.router.drafting import Allowance, DraftBudget
from penstock.router.policies import ChunkedPrefill, Policy, SchedulerState, WholePrefill
from penstock.router.prefix_sharing import PrefixSharing
from penstock.router.scheduler import Action, Bounds, Decode, Filter, Job, Prefill, Report, Scheduler, fill, most_pages
from penstock.tests.router.simulation import simulate


def scheduler(policy: ChunkedPrefill | WholePrefill | None = None, **changes: int) -> Scheduler:
    bounds = {"pages": 100, "page_size": 4, "step_tokens": 16, "sequences": 100, "headroom": 4, **changes}
    return Scheduler(Bounds(**bounds), policy)


def told(
    it: Scheduler,
    *groups: tuple[int, int, int],
    free: int = 100,
    finished: Iterable[int] = (),
    failed: Iterable[int] = (),
    ahead: bool = False,
) -> None:
    """Reports a step. groups: (uid, pages it may still take, tokens it lacks)."""
    uids, grow, lacking = ([group[i] for group in groups] for i in range(3))
    held = [1] * len(uids)
    it.report(Report(free=free, uids=uids, held=held, grow=grow, lacking=lacking, finished=finished, failed=failed, ahead=ahead))


def uids(action: object) -> Sequence[int]:
    assert isinstance(action, Prefill)
    return action.new


def test_a_prompt_is_computed_in_chunks_and_then_decoded() -> None:
    it = scheduler()
    it.arrive(Job(7, 40, 2))
    assert it.next() == Prefill((7,), ((7, 16),), 16, decode=False)
    told(it, (7, 7, 24))
    assert it.next() == Prefill((), ((7, 15),), 15, decode=False)
    told(it, (7, 3, 9))
    assert it.next() == Prefill((), ((7, 15),), 15, decode=False)
    told(it, (7, 1, 0))
    assert it.next() == Decode()
    told(it, finished=[7])
    assert it.next() is None


def test_the_next_step_may_be_asked_for_before_the_last_was_answered() -> None:
    it = scheduler()
    it.arrive(Job(7, 30, 5))
    assert it.next() == Prefill((7,), ((7, 16),), 16, decode=False)
    assert it.next() == Prefill((), ((7, 15),), 15, decode=False)
    told(it, (7, 5, 14))
    assert it.next() == Decode(), "what is under way completes the prompt"
    told(it, (7, 1, 0))
    assert it.next() == Decode()


def test_what_a_reply_says_of_the_next_step_is_not_counted_twice() -> None:
    it = scheduler()
    it.arrive(Job(7, 40, 5))
    assert it.next() == Prefill((7,), ((7, 16),), 16, decode=False)
    assert it.next() == Prefill((), ((7, 15),), 15, decode=False)
    told(it, (7, 5, 9), ahead=True)  # without what the second has computed by then it would be 24
    assert it.next() == Prefill((), ((7, 15),), 15, decode=False)
    told(it, (7, 2, 0), ahead=True)
    assert it.next() == Decode()


def test_decodes_ride_along_and_take_their_tokens_of_the_budget_first() -> None:
    it = scheduler()
    it.arrive(Job(1, 3, 9))
    it.arrive(Job(2, 4, 9))
    assert it.next() == Prefill((1, 2), ((1, 8), (2, 4)), 16, decode=False)
    told(it, (1, 1, 0), (2, 1, 0))
    it.arrive(Job(3, 30, 9))
    assert it.next() == Prefill((3,), ((3, 14),), 14, decode=True)


def test_a_short_prompt_passes_a_long_one_which_keeps_half_of_every_step() -> None:
    it = scheduler()
    it.arrive(Job(1, 100, 5))
    assert it.next() == Prefill((1,), ((1, 16),), 16, decode=False)
    told(it, (1, 22, 84))
    it.arrive(Job(2, 9, 5))
    it.arrive(Job(3, 5, 5))
    assert it.next() == Prefill((2,), ((1, 7), (2, 9)), 15, decode=False)
    told(it, (1, 20, 77), (2, 2, 1))
    assert it.next() == Prefill((3,), ((1, 7), (2, 1), (3, 5)), 14, decode=False)


def test_shards_fill_a_step_in_order_and_then_go_round_again() -> None:
    assert fill([100, 9, 5], [8, 9, 5], 16) == [8, 8, 0]
    assert fill([100, 1, 2], [8, 1, 2], 16) == [13, 1, 2]
    assert fill([3, 100], [8, 100], 16) == [3, 13]
    assert fill([], [], 4) == []


def test_choices_share_the_pages_of_their_prompt() -> None:
    assert most_pages(8, 5, 1, 4) == 3
    assert most_pages(8, 6, 4, 4) == 2 + 4 * 2
    assert most_pages(9, 1, 4, 4) == 2 + 4, "a copy of the last page for each"
    assert most_pages(8, 1, 4, 4) == 2, "the only token is never computed"


def test_pages_of_one_that_has_ended_are_not_promised_twice() -> None:
    it, same = scheduler(pages=8, headroom=1), [(4, 1), (8, 2)]
    it.arrive(Job(1, 12, 8, prefix_keys=same))
    assert uids(it.next()) == (1,)
    told(it, (1, 0, 0), free=4)
    assert it.next() == Decode()
    it.arrive(Job(2, 12, 8, prefix_keys=same))
    assert uids(it.next()) == (2,), "two of its four pages are the first one's"
    it.arrive(Job(3, 16, 2))
    told(it, free=8, finished=[1])  # the two are free now, until the second one takes them
    assert it.next() == Decode()
    told(it, free=8)
    assert it._running[2].grow == 4, "they are counted once"


def test_after_a_failure_nothing_counts_as_shared_that_was_begun_before() -> None:
    it, same = scheduler(), [(4, 1), (8, 2)]
    for uid in (1, 2):
        it.arrive(Job(uid, 12, 8, prefix_keys=same))
    assert uids(it.next()) == (1, 2)
    told(it, (2, 2, 8), failed=[1])  # what the second one has of it nobody finds, nor what it computes after that
    it.next()
    told(it, (2, 2, 0))
    it.arrive(Job(3, 12, 8, prefix_keys=same))
    assert uids(it.next()) == (3,)
    assert it._running[3].grow == 4


def test_after_a_failure_nothing_counts_as_shared_that_others_hold() -> None:
    it, same = scheduler(), [(4, 1), (8, 2)]
    for uid in (1, 2):
        it.arrive(Job(uid, 12, 8, prefix_keys=same))
    it.next()
    told(it, (1, 2, 0), (2, 2, 0))
    it.next()
    told(it, failed=[1])  # what the second one holds has gone from the cache with it
    it.arrive(Job(3, 12, 8, prefix_keys=same))
    assert uids(it.next()) == (3,)
    assert it._running[3].grow == 4


def test_a_small_job_passes_a_big_one_only_so_often() -> None:
    it = scheduler(pages=10, overtakes=2)
    it.arrive(Job(1, 20, 20))
    assert uids(it.next()) == (1,)
    told(it, (1, 2, 4), free=6)
    it.arrive(Job(2, 24, 8))  # 7 pages: not now
    for uid in (3, 4, 5):
        it.arrive(Job(uid, 1, 3))  # 1 page each: all would fit
    assert uids(it.next()) == (3, 4)
    told(it, (1, 1, 0), (3, 0, 0), (4, 0, 0), free=4)
    assert uids(it.next()) == (5,), "2 still waits for 1 alone, so nobody delays it"
    told(it, (1, 1, 0), (3, 0, 0), (4, 0, 0), (5, 0, 0), free=3)
    assert it.next() == Decode()
    told(it, free=7, finished=[1])
    it.arrive(Job(6, 1, 3))
    assert it.next() == Decode(), "2 waits for those that passed it: 6 would delay it"
    told(it, free=10, finished=[3, 4, 5])
    assert uids(it.next()) == (2, 6)


def test_who_passes_several_is_counted_for_the_one_that_was_passed_most() -> None:
    it = scheduler(pages=10, overtakes=2)
    it.arrive(Job(1, 20, 20))
    it.next()
    told(it, (1, 2, 4), free=6)
    it.arrive(Job(2, 24, 8))  # 7 pages: not now
    it.arrive(Job(3, 1, 3))
    assert uids(it.next()) == (3,)
    told(it, (1, 1, 0), (3, 0, 0), free=5)
    it.arrive(Job(4, 24, 8))
    for uid in (5, 6):
        it.arrive(Job(uid, 1, 3))
    assert uids(it.next()) == (5,), "4 could be passed twice, 2 only once more"


def test_no_more_are_looked_at_than_may_be_overtaken() -> None:
    """However long the queue is: it is asked for in every step."""
    it = scheduler(pages=10, overtakes=3)
    it.arrive(Job(1, 4, 4))
    it.next()
    told(it, (1, 1, 0), free=9)
    for uid in range(2, 100):
        it.arrive(Job(uid, 36, 4))  # 10 pages: not now
    looks, fits = 0, it._fits

    def counted(job: Job) -> bool:
        nonlocal looks
        looks += 1
        return fits(job)

    it._fits = counted  # type: ignore[method-assign]
    assert it.next() == Decode()
    assert looks == 4


def test_what_has_begun_elsewhere_goes_on_like_what_was_paused() -> None:
    it = scheduler()
    job = Job(1, 10, 20, choices=3)
    it.arrive(job, [3, 1])
    assert (it.waiting, it.paused_jobs) == (0, 1)
    assert it.lacking(1) == 12, "the last token of each is for its first step"
    assert (job.running, job.grow) == (2, 5)
    assert it.next() == Prefill((1,), ((1, 16),), 16, decode=False)
    assert it.next() == Decode()


def used_to_cached_prompts() -> Scheduler:
    """A scheduler all of whose prompts were in the cache but for a token."""
    it = scheduler(pages=1000)
    for uid in range(1, 20):
        it.arrive(Job(uid, 60, 1))
        it.next()
        it.report(Report(free=1000, prompt_tokens=1, cached_tokens=59, finished=[uid]))
    return it


def test_what_was_computed_before_does_not_count_as_cached() -> None:
    it = used_to_cached_prompts()
    for uid in (50, 51, 52):
        it.arrive(Job(uid, 40, 20), [1])
    assert uids(it.next()) == (50, 51), "these fill the step"


def test_what_was_paused_does_not_count_as_cached() -> None:
    it = used_to_cached_prompts()
    for uid in (50, 51, 52, 53):
        it.arrive(Job(uid, 40, 20))
    assert uids(it.next()) == (50, 51, 52, 53)
    told(it, *((uid, 5, 0) for uid in (50, 51, 52, 53)), free=2)
    assert it.next() == Filter(pause=(53, 52, 51))
    it.paused(1000, 0, [(uid, 20, 40) for uid in (51, 52, 53)])
    assert uids(it.next()) == (51, 52), "these fill the step"


def test_jobs_of_which_others_hold_most_are_admitted_together() -> None:
    it, same = scheduler(), [(56, 1)]
    it.arrive(Job(1, 60, 8, prefix_keys=same))
    it.next()
    told(it, (1, 2, 0))
    for uid in (2, 3, 4):
        it.arrive(Job(uid, 60, 8, prefix_keys=same))
    assert uids(it.next()) == (2, 3, 4), "each computes four tokens"


def test_in_hand_is_what_steps_under_way_may_compute() -> None:
    """Those that are being paused, too."""
    it = scheduler(pages=20, headroom=1)
    for uid in (1, 2):
        it.arrive(Job(uid, 4, 30))
    assert it.in_hand == ()
    it.next()
    assert it.in_hand == (1, 2)
    it.next()
    told(it, (1, 3, 0), (2, 3, 0), free=2)
    assert it.next() == Filter(pause=(2,))
    assert it.in_hand == (1, 2)
    told(it, free=2)
    assert it.in_hand == ()


def test_jobs_come_by_rank_not_by_arrival() -> None:
    it = scheduler(sequences=1)
    it.arrive(Job(1, 4, 4, rank=60.0))
    it.arrive(Job(2, 4, 4, rank=5.0))
    it.arrive(Job(3, 4, 4, rank=5.0))
    order = []
    for _ in range(3):
        order += uids(it.next())
        told(it, finished=order[-1:])
    assert order == [2, 3, 1]


def test_the_tenant_with_less_running_comes_first() -> None:
    it = scheduler(sequences=4)
    for uid in range(1, 9):
        it.arrive(Job(uid, 4, 4, rank=uid, tenant="many"))
    it.arrive(Job(9, 4, 4, rank=9, tenant="few"))
    it.arrive(Job(10, 4, 4, rank=10, tenant="few"))
    assert uids(it.next()) == (1, 9, 2, 10)
    told(it, finished=[9, 10])
    it.arrive(Job(11, 4, 4, rank=11, tenant="few"))
    assert uids(it.next()) == (11, 3)


def test_many_tenants_wait_at_the_cost_of_one_look_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no key is needed each token that clients send is a tenant; and some that do not fit are asked for in each step."""
    it, looks = scheduler(), []
    for uid in range(1, 1001):
        it.arrive(Job(uid, 390, 4, rank=uid, tenant=f"{uid}"))
    it.next()
    order = Job.order.fget
    assert order is not None
    monkeypatch.setattr(Job, "order", property(lambda job: looks.append(job.uid) or order(job)))
    it.next()
    assert len(looks) < 2000


def test_answers_that_may_become_long_count_for_no_more_than_some_tokens() -> None:
    """Most end long before `max_new_tokens`, which many clients leave at what it can be."""
    it = scheduler(pages=10_000, step_tokens=2000, sequences=4)
    for uid in (1, 2):
        it.arrive(Job(uid, 4, 9000, rank=uid, tenant="may be long"))
        it.arrive(Job(2 + uid, 400, 9, rank=uid, tenant="is long"))
    assert uids(it.next()) == (1, 3, 2, 4)


def test_drafts_count_for_what_a_job_may_take_until_the_shards_say_it() -> None:
    plain, guessing = Job(1, 4, 50), Job(2, 4, 50, drafts=6)
    it = scheduler()
    it.arrive(plain)
    it.arrive(guessing)
    assert (plain.grow, guessing.grow) == (2, 5), "4 tokens and 2 more in pages of 4; 4 and 2 * 7 more"


def test_of_beginnings_that_nobody_holds_nothing_is_kept() -> None:
    sharing, same = PrefixSharing(4), [(4, 1), (8, 2)]
    sharing.hold(1, same)
    sharing.clear()
    sharing.release(1)
    sharing.hold(2, same)
    assert sharing.pages(same) == 2
    for uid in (2, 2):
        sharing.release(uid)
    assert (sharing._held, sharing._holders) == ({}, {})


def test_of_tenants_that_have_nothing_running_nothing_is_kept() -> None:
    """There may be any number of them."""
    it = scheduler()
    for uid in range(1, 4):
        it.arrive(Job(uid, 4, 4, choices=uid, tenant=f"{uid}"))
    it.next()
    assert len(it._loads) == 3
    it.cancel(1)
    it.next()
    it.paused(100, 0, [])
    told(it, finished=[2, 2, 3, 3, 3])
    assert not it._loads
    assert not it._lines


def test_the_youngest_are_paused_when_growth_would_not_fit_and_come_back_first() -> None:
    it = scheduler(pages=10, headroom=1)
    for uid in (1, 2, 3):
        it.arrive(Job(uid, 4, 30))
    assert uids(it.next()) == (1, 2, 3)
    told(it, (1, 0, 0), (2, 0, 0), (3, 0, 0), free=2)
    it.arrive(Job(4, 4, 4))
    assert it.next() == Decode()
    told(it, (1, 1, 0), (2, 1, 0), (3, 1, 0), free=2)
    assert it.next() == Filter(pause=(3,))
    assert it.next() == Decode(), "the others go on at once"
    told(it, free=3)
    it.paused(3, 0, [(3, 4, 8)])
    assert (it.running, it.paused_jobs, it.waiting) == (2, 1, 1)
    assert it.next() == Decode(), "4 would fit, but 3 comes first"
    told(it, free=9, finished=[1])
    action = it.next()
    assert isinstance(action, Prefill)
    assert action.new == (3, 4)
    assert dict(action.chunks)[3] == 7, "half of the step: it is the oldest"
    assert it.paused_jobs == 0


def test_only_what_is_missing_is_paused_and_the_oldest_never() -> None:
    it = scheduler(pages=10, headroom=1)
    for uid in (1, 2, 3):
        it.arrive(Job(uid, 4, 30))
    it.next()
    told(it, (1, 4, 0), (2, 4, 0), (3, 4, 0), free=1)
    assert it.next() == Filter(pause=(3, 2))
    it.paused(8, 0, [(3, 4, 8), (2, 4, 8)])
    assert it.next() == Decode()


@pytest.mark.parametrize(("prefix_keys", "paused"), [([(4, 5), (8, 6)], (3,)), ([(4, 1), (8, 2)], (3, 2))])
def test_a_pause_frees_what_nobody_else_holds(prefix_keys: Sequence[tuple[int, int]], paused: tuple[int, ...]) -> None:
    it = scheduler(step_tokens=64)
    it.arrive(Job(1, 12, 20, prefix_keys=[(4, 1), (8, 2)]))
    it.arrive(Job(2, 12, 20))
    it.arrive(Job(3, 12, 20, prefix_keys=prefix_keys))
    it.next()
    told(it, (1, 0, 0), (2, 0, 0), (3, 0, 0))
    it.next()
    it.report(Report(free=2, uids=(1, 2, 3), held=(3, 3, 3), grow=(5, 0, 0), lacking=(0, 0, 0)))
    assert it.next() == Filter(pause=paused)


def test_what_a_filter_frees_is_awaited_before_anybody_is_paused() -> None:
    it = scheduler(pages=10, headroom=1)
    for uid in (1, 2):
        it.arrive(Job(uid, 4, 30))
    it.next()
    told(it, (1, 1, 0), (2, 1, 0), free=2)
    it.arrive(Job(3, 4, 4))
    it.cancel(2)
    assert it.next() == Filter((2,))
    it.paused(8, 0, [])
    assert uids(it.next()) == (3,)


def test_a_group_that_ends_while_it_is_paused_is_gone() -> None:
    it = scheduler(pages=20, headroom=1)
    for uid in (1, 2):
        it.arrive(Job(uid, 4, 30, choices=uid))
    it.next()
    it.next()
    told(it, (1, 3, 0), (2, 3, 0), free=2)
    assert it.next() == Filter(pause=(2,))
    told(it, (1, 3, 0), free=2, finished=[2, 2])
    it.paused(8, 0, [])
    assert (it.running, it.paused_jobs) == (1, 0)


def test_a_choice_that_nobody_wants_ends_while_its_job_is_being_paused() -> None:
    it = scheduler(pages=20, headroom=1)
    for uid in (1, 2):
        it.arrive(Job(uid, 4, 30, choices=uid))
    it.next()
    told(it, (1, 3, 0), (2, 3, 0), free=2)
    assert it.next() == Filter(pause=(2,))
    it.end(2, 0)
    it.paused(20, 0, [(2, 3, 8)])
    assert uids(it.next()) == (2,)
    told(it, (2, 1, 0), free=20)
    assert it.next() == Decode()
    told(it, free=20, finished=[1, 2])
    assert (it.running, it.paused_jobs, it.next()) == (0, 0, None), "its other choice was its last"


def test_what_was_paused_has_no_pages_until_the_shards_say_so() -> None:
    """3 comes back, and before its step is answered others have grown: that it once held 9 pages helps nobody."""
    it = scheduler(headroom=1)
    for uid in (1, 2, 3):
        it.arrive(Job(uid, 4, 30))
    it.next()
    it.report(Report(free=2, uids=(1, 2, 3), held=(9, 9, 9), grow=(1, 1, 1), lacking=(0, 0, 0)))
    assert it.next() == Filter(pause=(3,))
    it.paused(12, 0, [(3, 2, 4)])
    assert uids(it.next()) == (3,)
    told(it, (1, 1, 0), (2, 7, 0), free=2)
    assert it.next() == Filter(pause=(3, 2))


class Watched(ChunkedPrefill):
    """Keeps what it was last told."""

    seen: SchedulerState

    def room(self, now: SchedulerState) -> int:
        self.seen = now
        return super().room(now)


class Costly(DraftBudget):
    """Keeps what it was last asked."""

    asked: tuple[int, float, Work]

    def allow(self, decodes: int, keys: float, prompts: Work) -> Allowance:
        self.asked = decodes, keys, prompts
        return super().allow(decodes, keys, prompts)


def test_what_policies_and_drafting_are_told_of_the_keys_of_the_next_step() -> None:
    """Each sequence that decodes sees one key more than in the step before; a prompt's tokens those before them."""
    policy, drafting = Watched(16), Costly(Cost(16, 0.016), 16, 4)
    it = Scheduler(Bounds(pages=100, page_size=4, step_tokens=16, sequences=9), policy, drafting)
    for uid in (1, 2):
        it.arrive(Job(uid, 4, 30, drafts=4))
    it.next()
    told(it, (1, 1, 0), (2, 1, 0))
    it.next()
    it.report(Report(free=90, decode_tokens=2, decode_keys=2 * 11))
    it.next()
    assert drafting.asked == (2, 24, Work())
    it.report(Report(free=90, decode_tokens=2, decode_keys=2 * 12))
    it.arrive(Job(3, 40, 30))
    action = it.next()
    assert isinstance(action, Prefill)
    assert (policy.seen.decodes, policy.seen.keys, action.tokens) == (2, 26, 14)
    assert drafting.asked == (2, 26, Work(14, 14 * 15 / 2, 15 / 2, prompts=True))
    it.next()
    assert policy.seen.position == 14


def test_a_choice_ends_alone_and_the_job_with_its_last() -> None:
    it = scheduler()
    it.arrive(Job(1, 4, 30, choices=3))
    it.next()
    told(it, (1, 3, 0))
    it.end(1, 1)
    assert it.next() == Filter(end=((1, 1),))
    it.paused(100, 0, [])
    assert it.next() == Decode()
    told(it, finished=[1])
    it.end(1, 2)
    assert it.next() == Filter((1,))
    it.paused(100, 0, [])
    assert (it.running, it.next()) == (0, None)


def test_a_choice_that_nobody_wants_is_ended_even_if_the_others_end_in_the_meantime() -> None:
    it = scheduler()
    it.arrive(Job(1, 4, 30, choices=2))
    it.next()
    told(it, (1, 3, 0))
    it.next()
    it.end(1, 1)
    told(it, finished=[1])
    assert it.running == 0
    assert it.next() == Filter(end=((1, 1),)), "the shards still have it"


def test_cancelling_drops_what_runs_and_forgets_what_waits() -> None:
    it = scheduler(sequences=2)
    for uid in (1, 2, 3, 4):
        it.arrive(Job(uid, 20, 5))
    it.next()
    it.next()
    it.cancel(3)
    it.cancel(2)
    it.cancel(2)
    it.cancel(99)
    assert (it.waiting, it.running) == (1, 1)
    assert it.next() == Filter((2,))
    assert uids(it.next()) == (4,)


def test_reports_of_cancelled_groups_are_ignored() -> None:
    it = scheduler()
    it.arrive(Job(1, 2, 5))
    it.next()
    it.cancel(1)
    told(it, (1, 5, 1), free=99, failed=[1])
    assert it.next() == Filter((1,))
    it.paused(100, 0, [])
    assert it.next() is None


def test_what_can_never_run_is_not_admissible() -> None:
    it = scheduler(pages=10, sequences=3)
    assert it.admissible(30, 11)
    assert not it.admissible(30, 12)
    assert it.admissible(4, 2, 3)
    assert not it.admissible(4, 2, 4), "more choices than sequences may run"


def test_many_jobs_of_which_little_is_new_are_admitted_together() -> None:
    it = scheduler(pages=1000, step_tokens=64)
    for uid in range(40):
        it.arrive(Job(uid, 60, 4))
        if uid < 10:
            assert len(uids(it.next())) == 1
            it.report(
                Report(free=900, uids=[uid], held=[1], grow=[1], lacking=[0], prompt_tokens=2, cached_tokens=58, finished=[uid])
            )
    assert len(uids(it.next())) > 5


def test_jobs_that_bring_much_are_not_admitted_together() -> None:
    """They come in order, and one that brings too much comes alone."""
    it = scheduler(attached=100)
    for uid, attached in enumerate((60, 40, 1, 0, 300, 0, 100)):
        it.arrive(Job(uid, 1, 4, attached=attached))
    assert uids(it.next()) == (0, 1)
    assert uids(it.next()) == (2, 3)
    assert uids(it.next()) == (4,)
    assert uids(it.next()) == (5, 6)


def test_decodes_pause_for_whole_prompts_if_the_policy_says_so() -> None:
    it = scheduler(WholePrefill(16, waiting_served_ratio=2.0, waiting_tokens=3))
    it.arrive(Job(1, 4, 30))
    it.next()
    told(it, (1, 1, 0))
    it.arrive(Job(2, 20, 30))
    for _ in range(3):
        assert it.next() == Decode(), "one waits, two are needed"
        told(it, (1, 1, 0))
    assert it.next() == Prefill((2,), ((2, 16),), 16, decode=False)
    told(it, (2, 2, 4))
    assert it.next() == Prefill((), ((2, 16),), 16, decode=False)
    told(it, (2, 1, 0))
    assert it.next() == Decode()


def test_streams_get_a_token_between_the_prompts_of_a_burst() -> None:
    it = scheduler(WholePrefill(16))
    for uid in range(1, 7):
        it.arrive(Job(uid, 8, 30))
    for uid in (1, 3, 5):
        assert uids(it.next()) == (uid, uid + 1)
        told(it, (uid, 1, 0), (uid + 1, 1, 0))
        assert it.next() == Decode()
        told(it)


WORLDS = range(1500)
# What the policy costs in these worlds. A change that makes them worse has to say why.
STEPS = 112_705
WAITS = 438_379
# A fifth more since who waits for older ones alone is passed by any number: before, all stood still behind it. Half a percent more
# since streams get a token between a burst's prompts under `pause`: fewer are paused (538, not 545), which have come further.
# 42 more since pages that jobs share are counted once: more of them run where pages are few.
RESTORED = 11_842


def test_thousands_of_worlds_keep_every_promise() -> None:
    score = simulate(WORLDS)
    assert score.pauses > 300, "these worlds are too easy"
    assert score.steps <= STEPS
    assert score.waits <= WAITS
    assert score.restored <= RESTORED


class Overcommits(Scheduler):
    """Takes every job for half as large."""

    def arrive(self, job: Job) -> None:
        super().arrive(job)
        job.grow //= 2


class Blind(Scheduler):
    """Does not see who was admitted a moment ago."""

    def _fits(self, job: Job) -> bool:
        return super()._fits(replace(job, grow=job.grow - self._grow))


class NeverPauses(Scheduler):
    """Hopes that somebody ends in time."""

    def next(self) -> Action | None:
        kept, self._grow = self._grow, min(self._grow, self.free)
        try:
            return super().next()
        finally:
            self._grow += kept - min(kept, self.free)


class PausesTheOldest(Scheduler):
    """Takes pages back from the wrong end."""

    def _pause(self) -> Filter:
        return self._take_back([min(self._running.values(), key=lambda job: job.order)])


class PausesForFun(Scheduler):
    """Takes pages back that nobody needs."""

    def next(self) -> Action | None:
        if len(self._running) > 2 and not self._dropped and not self._ended:
            return self._take_back([max(self._running.values(), key=lambda job: job.order)])
        return super().next()


class LosesThePaused(Scheduler):
    """Forgets whom it has paused."""

    def paused(self, free: int, cached: int, groups: Iterable[tuple[int, int, int]]) -> None:
        super().paused(free, cached, [])
        self._pausing.clear()


class Leaks(Scheduler):
    """Keeps what a cancelled job might have taken."""

    def cancel(self, uid: int) -> None:
        grow = self._grow
        super().cancel(uid)
        self._grow = grow


class Unfair(Scheduler):
    """Lets everybody pass for ever."""

    def _patience(self, job: Job) -> int:
        return 1_000_000


class Rude(Scheduler):
    """Lets new jobs pass those that were paused."""

    def _patience(self, job: Job) -> int:
        return self._bounds.overtakes - job.overtaken


class Youngest(Scheduler):
    """Last come, first served."""

    def _candidates(self) -> Iterator[Job]:
        return iter(list(super()._candidates())[::-1])


class Greedy(ChunkedPrefill):
    """Forgets that decodes are part of the budget."""

    def room(self, now: SchedulerState) -> int:
        return self._step_tokens


class Separate(Scheduler):
    """Lets running groups wait while it computes prompts."""

    def next(self) -> Action | None:
        action = super().next()
        return replace(action, decode=False) if isinstance(action, Prefill) else action


class Forgets(Scheduler):
    """Does not tell the shards of cancels."""

    def cancel(self, uid: int) -> None:
        super().cancel(uid)
        self._dropped.clear()


class ForgetsChoices(Scheduler):
    """Does not tell the shards of choices that nobody wants."""

    def end(self, uid: int, choice: int) -> None:
        super().end(uid, choice)
        self._ended.clear()


class Chatters(Scheduler):
    """Tells the shards of cancels that are none of their business."""

    def cancel(self, uid: int) -> None:
        if uid in self._waiting:
            self._dropped.append(uid)
        super().cancel(uid)


class Late(Scheduler):
    """Drops cancelled groups when nothing else is left to do."""

    def next(self) -> Action | None:
        dropped, self._dropped = self._dropped, []
        action = super().next()
        if action is None and dropped:
            self._filters += 1
            return Filter(tuple(dropped))
        self._dropped = dropped
        return action


class Crowds(Scheduler):
    """Looks at pages only."""

    def _fits(self, job: Job) -> bool:
        return self._grow + job.grow + self._headroom(self._sequences) <= self.free


class Believes(Scheduler):
    """Takes what jobs hold that have gone for held."""

    def _release(self, uid: int) -> bool:
        sharing, self._sharing = self._sharing, PrefixSharing(self._bounds.page_size)
        try:
            return super()._release(uid)
        finally:
            self._sharing = sharing


class Hasty(Scheduler):
    """Takes a prompt for held as soon as it is asked for."""

    def _enter(self, job: Job) -> None:
        super()._enter(job)
        self._sharing.hold(job.uid, job.prefix_keys)


class Timid(Scheduler):
    """Keeps pages in reserve even when nobody runs."""

    def _headroom(self, sequences: int) -> int:
        return max(1, super()._headroom(sequences))


class Stubborn(Scheduler):
    """Gives the oldest prompt whatever is left by the others."""

    def _plan(self, decodes: int) -> tuple[tuple[tuple[int, int], ...], list[Job]]:
        chunks, new = super()._plan(decodes)
        return chunks[::-1], new


FAULTS = [
    Overcommits, Blind, NeverPauses, PausesTheOldest, PausesForFun, LosesThePaused, Leaks, Unfair, Rude, Youngest, Separate,
    Forgets, ForgetsChoices, Chatters, Late, Crowds, Believes, Hasty, Timid, Stubborn,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: type[Scheduler]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        simulate(range(400), fault)


@pytest.mark.parametrize("fault", [Greedy])
def test_a_planted_fault_of_a_policy_is_caught(fault: type[ChunkedPrefill]) -> None:
    def make(bounds: Bounds, policy: Policy) -> Scheduler:
        return Scheduler(bounds, fault(bounds.step_tokens) if policy.mixes else policy)

    with pytest.raises((AssertionError, KeyError)):
        simulate(range(400), make)
