"""`Scheduler`: single decisions against actions written by hand, all its rules in random workloads (`simulation.py`), and faulty
schedulers that the simulation must catch."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pytest

from penstock.router.cost import Cost, Work
from penstock.router.drafting import Allowance, DraftBudget
from penstock.router.policies import ChunkedPrefill, Policy, SchedulerState, WholePrefill
from penstock.router.prefix_sharing import PrefixSharing
from penstock.router.scheduler import Action, Bounds, Decode, Filter, Job, Prefill, Report, Scheduler, fill, most_pages
from penstock.tests.router.simulation import simulate


def make_scheduler(policy: ChunkedPrefill | WholePrefill | None = None, **changes: int) -> Scheduler:
    bounds = {"pages": 100, "page_size": 4, "step_tokens": 16, "sequences": 100, "headroom": 4, **changes}
    return Scheduler(Bounds(**bounds), policy)


def report(
    scheduler: Scheduler,
    *groups: tuple[int, int, int],
    free: int = 100,
    finished: Iterable[int] = (),
    failed: Iterable[int] = (),
    ahead: bool = False,
) -> None:
    """Reports a step. groups: (uid, pages it may still take, tokens it lacks until it decodes)."""
    uids, grow, lacking = ([group[i] for group in groups] for i in range(3))
    held = [1] * len(uids)
    scheduler.report(
        Report(free=free, uids=uids, held=held, grow=grow, lacking=lacking, finished=finished, failed=failed, ahead=ahead)
    )


def admitted(action: object) -> Sequence[int]:
    assert isinstance(action, Prefill)
    return action.new


def test_prompt_is_computed_in_chunks_and_then_decoded() -> None:
    scheduler = make_scheduler()
    scheduler.arrive(Job(7, 40, 2))
    assert scheduler.next() == Prefill((7,), ((7, 16),), 16, decode=False)
    report(scheduler, (7, 7, 24))
    assert scheduler.next() == Prefill((), ((7, 15),), 15, decode=False)
    report(scheduler, (7, 3, 9))
    assert scheduler.next() == Prefill((), ((7, 15),), 15, decode=False)
    report(scheduler, (7, 1, 0))
    assert scheduler.next() == Decode()
    report(scheduler, finished=[7])
    assert scheduler.next() is None


def test_next_step_may_be_requested_before_the_last_is_reported() -> None:
    scheduler = make_scheduler()
    scheduler.arrive(Job(7, 30, 5))
    assert scheduler.next() == Prefill((7,), ((7, 16),), 16, decode=False)
    assert scheduler.next() == Prefill((), ((7, 15),), 15, decode=False)
    report(scheduler, (7, 5, 14))
    assert scheduler.next() == Decode(), "what is under way completes the prompt"
    report(scheduler, (7, 1, 0))
    assert scheduler.next() == Decode()


def test_chunk_in_flight_is_not_counted_twice_after_a_report_that_includes_it() -> None:
    scheduler = make_scheduler()
    scheduler.arrive(Job(7, 40, 5))
    assert scheduler.next() == Prefill((7,), ((7, 16),), 16, decode=False)
    assert scheduler.next() == Prefill((), ((7, 15),), 15, decode=False)
    report(scheduler, (7, 5, 9), ahead=True)  # 24 without the chunk that the second step computes
    assert scheduler.next() == Prefill((), ((7, 15),), 15, decode=False)
    report(scheduler, (7, 2, 0), ahead=True)
    assert scheduler.next() == Decode()


def test_decodes_are_mixed_into_prefill_and_take_their_tokens_of_the_budget_first() -> None:
    scheduler = make_scheduler()
    scheduler.arrive(Job(1, 3, 9))
    scheduler.arrive(Job(2, 4, 9))
    assert scheduler.next() == Prefill((1, 2), ((1, 8), (2, 4)), 16, decode=False)
    report(scheduler, (1, 1, 0), (2, 1, 0))
    scheduler.arrive(Job(3, 30, 9))
    assert scheduler.next() == Prefill((3,), ((3, 14),), 14, decode=True)


def test_short_prompts_pass_a_long_one_which_keeps_half_of_every_step() -> None:
    scheduler = make_scheduler()
    scheduler.arrive(Job(1, 100, 5))
    assert scheduler.next() == Prefill((1,), ((1, 16),), 16, decode=False)
    report(scheduler, (1, 22, 84))
    scheduler.arrive(Job(2, 9, 5))
    scheduler.arrive(Job(3, 5, 5))
    assert scheduler.next() == Prefill((2,), ((1, 7), (2, 9)), 15, decode=False)
    report(scheduler, (1, 20, 77), (2, 2, 1))
    assert scheduler.next() == Prefill((3,), ((1, 7), (2, 1), (3, 5)), 14, decode=False)


def test_fill_divides_the_token_budget_in_order_and_deals_out_the_rest() -> None:
    assert fill([100, 9, 5], [8, 9, 5], 16) == [8, 8, 0]
    assert fill([100, 1, 2], [8, 1, 2], 16) == [13, 1, 2]
    assert fill([3, 100], [8, 100], 16) == [3, 13]
    assert fill([], [], 4) == []


def test_most_pages_counts_full_pages_of_the_prompt_once_for_all_choices() -> None:
    assert most_pages(8, 5, 1, 4) == 3
    assert most_pages(8, 6, 4, 4) == 2 + 4 * 2
    assert most_pages(9, 1, 4, 4) == 2 + 4, "a copy of the last page for each"
    assert most_pages(8, 1, 4, 4) == 2, "the only token is never computed"


def test_shared_prefix_pages_of_an_ended_job_are_counted_once() -> None:
    scheduler, same = make_scheduler(pages=8, headroom=1), [(4, 1), (8, 2)]
    scheduler.arrive(Job(1, 12, 8, prefix_keys=same))
    assert admitted(scheduler.next()) == (1,)
    report(scheduler, (1, 0, 0), free=4)
    assert scheduler.next() == Decode()
    scheduler.arrive(Job(2, 12, 8, prefix_keys=same))
    assert admitted(scheduler.next()) == (2,), "two of its four pages are the first one's"
    scheduler.arrive(Job(3, 16, 2))
    report(scheduler, free=8, finished=[1])  # the two shared pages are free now, until the second job takes them
    assert scheduler.next() == Decode()
    report(scheduler, free=8)
    assert scheduler._running[2].grow == 4, "they are counted once"


def test_no_job_is_preempted_for_pages_that_prompts_in_flight_may_have_found_in_the_cache() -> None:
    """The last holder of a shared prefix ends while others are on their way that were admitted without its pages."""
    scheduler, same = make_scheduler(pages=10, headroom=1), [(4 * page, page) for page in range(1, 6)]
    scheduler.arrive(Job(1, 24, 8, prefix_keys=same))
    assert admitted(scheduler.next()) == (1,)
    report(scheduler, (1, 0, 8))
    scheduler.next()
    report(scheduler, (1, 1, 0), free=4)
    assert scheduler.next() == Decode()
    for uid in (2, 3):
        scheduler.arrive(Job(uid, 24, 1, prefix_keys=same))
    assert admitted(scheduler.next()) == (2, 3)
    report(scheduler, free=10, finished=[1])
    assert scheduler.next() is None, "without the five pages that they share, the two may take twelve"
    report(scheduler, (2, 0, 0), (3, 0, 0), free=3)
    assert scheduler.next() == Decode()


def test_after_a_failure_prefixes_still_being_computed_do_not_count_as_shared() -> None:
    scheduler, same = make_scheduler(), [(4, 1), (8, 2)]
    for uid in (1, 2):
        scheduler.arrive(Job(uid, 12, 8, prefix_keys=same))
    assert admitted(scheduler.next()) == (1, 2)
    report(scheduler, (2, 2, 8), failed=[1])  # the second job's pages are not in the prefix cache, nor those it computes later
    scheduler.next()
    report(scheduler, (2, 2, 0))
    scheduler.arrive(Job(3, 12, 8, prefix_keys=same))
    assert admitted(scheduler.next()) == (3,)
    assert scheduler._running[3].grow == 4


def test_after_a_failure_prefixes_held_by_other_jobs_do_not_count_as_shared() -> None:
    scheduler, same = make_scheduler(), [(4, 1), (8, 2)]
    for uid in (1, 2):
        scheduler.arrive(Job(uid, 12, 8, prefix_keys=same))
    scheduler.next()
    report(scheduler, (1, 2, 0), (2, 2, 0))
    scheduler.next()
    report(scheduler, failed=[1])  # with scheduler, the prefix cache has lost the pages that the second job holds
    scheduler.arrive(Job(3, 12, 8, prefix_keys=same))
    assert admitted(scheduler.next()) == (3,)
    assert scheduler._running[3].grow == 4


def test_small_jobs_overtake_one_that_does_not_fit_at_most_overtakes_times() -> None:
    scheduler = make_scheduler(pages=10, overtakes=2)
    scheduler.arrive(Job(1, 20, 20))
    assert admitted(scheduler.next()) == (1,)
    report(scheduler, (1, 2, 4), free=6)
    scheduler.arrive(Job(2, 24, 8))  # 7 pages: not now
    for uid in (3, 4, 5):
        scheduler.arrive(Job(uid, 1, 3))  # 1 page each: all would fit
    assert admitted(scheduler.next()) == (3, 4)
    report(scheduler, (1, 1, 0), (3, 0, 0), (4, 0, 0), free=4)
    assert admitted(scheduler.next()) == (5,), "2 still waits for 1 alone, so nobody delays it"
    report(scheduler, (1, 1, 0), (3, 0, 0), (4, 0, 0), (5, 0, 0), free=3)
    assert scheduler.next() == Decode()
    report(scheduler, free=7, finished=[1])
    scheduler.arrive(Job(6, 1, 3))
    assert scheduler.next() == Decode(), "2 waits for those that passed it: 6 would delay it"
    report(scheduler, free=10, finished=[3, 4, 5])
    assert admitted(scheduler.next()) == (2, 6)


def test_overtaking_several_jobs_is_bounded_by_the_one_overtaken_most() -> None:
    scheduler = make_scheduler(pages=10, overtakes=2)
    scheduler.arrive(Job(1, 20, 20))
    scheduler.next()
    report(scheduler, (1, 2, 4), free=6)
    scheduler.arrive(Job(2, 24, 8))  # 7 pages: not now
    scheduler.arrive(Job(3, 1, 3))
    assert admitted(scheduler.next()) == (3,)
    report(scheduler, (1, 1, 0), (3, 0, 0), free=5)
    scheduler.arrive(Job(4, 24, 8))
    for uid in (5, 6):
        scheduler.arrive(Job(uid, 1, 3))
    assert admitted(scheduler.next()) == (5,), "4 could be passed twice, 2 only once more"


def test_admission_tries_at_most_one_job_more_than_may_be_overtaken() -> None:
    """However long the queue is, since it is searched in every step."""
    scheduler = make_scheduler(pages=10, overtakes=3)
    scheduler.arrive(Job(1, 4, 4))
    scheduler.next()
    report(scheduler, (1, 1, 0), free=9)
    for uid in range(2, 100):
        scheduler.arrive(Job(uid, 36, 4))  # 10 pages: not now
    tried, fits = 0, scheduler._fits

    def counted(job: Job) -> bool:
        nonlocal tried
        tried += 1
        return fits(job)

    scheduler._fits = counted  # type: ignore[method-assign]
    assert scheduler.next() == Decode()
    assert tried == 4


def test_job_begun_on_other_shards_is_resumed_like_a_preempted_one() -> None:
    scheduler = make_scheduler()
    job = Job(1, 10, 20, choices=3)
    scheduler.arrive(job, [3, 1])
    assert (scheduler.waiting, scheduler.paused_jobs) == (0, 1)
    assert scheduler.lacking(1) == 12, "the last token of each is for its first step"
    assert (job.running, job.grow) == (2, 5)
    assert scheduler.next() == Prefill((1,), ((1, 16),), 16, decode=False)
    assert scheduler.next() == Decode()


def scheduler_after_cached_prompts() -> Scheduler:
    """A scheduler whose previous prompts were all in the prefix cache, except for one token each."""
    scheduler = make_scheduler(pages=1000)
    for uid in range(1, 20):
        scheduler.arrive(Job(uid, 60, 1))
        scheduler.next()
        scheduler.report(Report(free=1000, prompt_tokens=1, cached_tokens=59, finished=[uid]))
    return scheduler


def test_jobs_begun_on_other_shards_are_not_expected_in_the_prefix_cache() -> None:
    scheduler = scheduler_after_cached_prompts()
    for uid in (50, 51, 52):
        scheduler.arrive(Job(uid, 40, 20), [1])
    assert admitted(scheduler.next()) == (50, 51), "these fill the step"


def test_preempted_jobs_are_not_expected_in_the_prefix_cache() -> None:
    scheduler = scheduler_after_cached_prompts()
    for uid in (50, 51, 52, 53):
        scheduler.arrive(Job(uid, 40, 20))
    assert admitted(scheduler.next()) == (50, 51, 52, 53)
    report(scheduler, *((uid, 5, 0) for uid in (50, 51, 52, 53)), free=2)
    assert scheduler.next() == Filter(pause=(53, 52, 51))
    scheduler.paused(1000, 0, [(uid, 20, 40) for uid in (51, 52, 53)])
    assert admitted(scheduler.next()) == (51, 52), "these fill the step"


def test_jobs_whose_prefix_is_held_by_others_are_admitted_together() -> None:
    scheduler, same = make_scheduler(), [(56, 1)]
    scheduler.arrive(Job(1, 60, 8, prefix_keys=same))
    scheduler.next()
    report(scheduler, (1, 2, 0))
    for uid in (2, 3, 4):
        scheduler.arrive(Job(uid, 60, 8, prefix_keys=same))
    assert admitted(scheduler.next()) == (2, 3, 4), "each computes four tokens"


def test_in_hand_lists_the_jobs_that_steps_in_flight_may_compute() -> None:
    """That includes jobs that are being preempted."""
    scheduler = make_scheduler(pages=20, headroom=1)
    for uid in (1, 2):
        scheduler.arrive(Job(uid, 4, 30))
    assert scheduler.in_hand == ()
    scheduler.next()
    assert scheduler.in_hand == (1, 2)
    scheduler.next()
    report(scheduler, (1, 3, 0), (2, 3, 0), free=2)
    assert scheduler.next() == Filter(pause=(2,))
    assert scheduler.in_hand == (1, 2)
    report(scheduler, free=2)
    assert scheduler.in_hand == ()


def test_jobs_are_admitted_by_rank_and_not_by_arrival() -> None:
    scheduler = make_scheduler(sequences=1)
    scheduler.arrive(Job(1, 4, 4, rank=60.0))
    scheduler.arrive(Job(2, 4, 4, rank=5.0))
    scheduler.arrive(Job(3, 4, 4, rank=5.0))
    order = []
    for _ in range(3):
        order += admitted(scheduler.next())
        report(scheduler, finished=order[-1:])
    assert order == [2, 3, 1]


def test_jobs_of_the_tenant_with_less_load_running_are_admitted_first() -> None:
    scheduler = make_scheduler(sequences=4)
    for uid in range(1, 9):
        scheduler.arrive(Job(uid, 4, 4, rank=uid, tenant="many"))
    scheduler.arrive(Job(9, 4, 4, rank=9, tenant="few"))
    scheduler.arrive(Job(10, 4, 4, rank=10, tenant="few"))
    assert admitted(scheduler.next()) == (1, 9, 2, 10)
    report(scheduler, finished=[9, 10])
    scheduler.arrive(Job(11, 4, 4, rank=11, tenant="few"))
    assert admitted(scheduler.next()) == (11, 3)


def test_next_looks_at_one_job_of_each_waiting_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without API keys, each token that clients send is a tenant; and jobs that do not fit are tried again in each step."""
    scheduler, tried = make_scheduler(), []
    for uid in range(1, 1001):
        scheduler.arrive(Job(uid, 390, 4, rank=uid, tenant=f"{uid}"))
    scheduler.next()
    order = Job.order.fget
    assert order is not None
    monkeypatch.setattr(Job, "order", property(lambda job: tried.append(job.uid) or order(job)))
    scheduler.next()
    assert len(tried) < 2000


def test_a_tenants_load_counts_at_most_256_generated_tokens_per_choice() -> None:
    """Most end long before `max_new_tokens`, which many clients leave at its maximum."""
    scheduler = make_scheduler(pages=10_000, step_tokens=2000, sequences=4)
    for uid in (1, 2):
        scheduler.arrive(Job(uid, 4, 9000, rank=uid, tenant="may be long"))
        scheduler.arrive(Job(2 + uid, 400, 9, rank=uid, tenant="is long"))
    assert admitted(scheduler.next()) == (1, 3, 2, 4)


def test_grow_of_a_new_job_includes_its_draft_tokens() -> None:
    plain, drafting = Job(1, 4, 50), Job(2, 4, 50, drafts=6)
    scheduler = make_scheduler()
    scheduler.arrive(plain)
    scheduler.arrive(drafting)
    assert (plain.grow, drafting.grow) == (2, 5), "4 tokens and 2 more in pages of 4; 4 and 2 * 7 more"


def test_prefix_sharing_keeps_nothing_of_prefixes_that_no_job_holds() -> None:
    sharing, same = PrefixSharing(4), [(4, 1), (8, 2)]
    sharing.hold(1, same)
    sharing.clear()
    sharing.release(1)
    sharing.hold(2, same)
    assert sharing.pages(same) == 2
    for uid in (2, 2):
        sharing.release(uid)
    assert (sharing._held, sharing._holders) == ({}, {})


def test_nothing_is_kept_of_tenants_without_running_jobs() -> None:
    """The number of tenants is unbounded."""
    scheduler = make_scheduler()
    for uid in range(1, 4):
        scheduler.arrive(Job(uid, 4, 4, choices=uid, tenant=f"{uid}"))
    scheduler.next()
    assert len(scheduler._loads) == 3
    scheduler.cancel(1)
    scheduler.next()
    scheduler.paused(100, 0, [])
    report(scheduler, finished=[2, 2, 3, 3, 3])
    assert not scheduler._loads
    assert not scheduler._lines


def test_youngest_job_is_preempted_when_growth_would_not_fit_and_resumed_first() -> None:
    scheduler = make_scheduler(pages=10, headroom=1)
    for uid in (1, 2, 3):
        scheduler.arrive(Job(uid, 4, 30))
    assert admitted(scheduler.next()) == (1, 2, 3)
    report(scheduler, (1, 0, 0), (2, 0, 0), (3, 0, 0), free=2)
    scheduler.arrive(Job(4, 4, 4))
    assert scheduler.next() == Decode()
    report(scheduler, (1, 1, 0), (2, 1, 0), (3, 1, 0), free=2)
    assert scheduler.next() == Filter(pause=(3,))
    assert scheduler.next() == Decode(), "the others go on at once"
    report(scheduler, free=3)
    scheduler.paused(3, 0, [(3, 4, 8)])
    assert (scheduler.running, scheduler.paused_jobs, scheduler.waiting) == (2, 1, 1)
    assert scheduler.next() == Decode(), "4 would fit, but 3 comes first"
    report(scheduler, free=9, finished=[1])
    action = scheduler.next()
    assert isinstance(action, Prefill)
    assert action.new == (3, 4)
    assert dict(action.chunks)[3] == 7, "half of the step: it is the oldest"
    assert scheduler.paused_jobs == 0


def test_preemption_stops_when_growth_fits_and_spares_the_oldest_job() -> None:
    scheduler = make_scheduler(pages=10, headroom=1)
    for uid in (1, 2, 3):
        scheduler.arrive(Job(uid, 4, 30))
    scheduler.next()
    report(scheduler, (1, 4, 0), (2, 4, 0), (3, 4, 0), free=1)
    assert scheduler.next() == Filter(pause=(3, 2))
    scheduler.paused(8, 0, [(3, 4, 8), (2, 4, 8)])
    assert scheduler.next() == Decode()


@pytest.mark.parametrize(("prefix_keys", "paused"), [([(4, 5), (8, 6)], (3,)), ([(4, 1), (8, 2)], (3, 2))])
def test_preemption_counts_only_pages_that_no_other_job_shares(
    prefix_keys: Sequence[tuple[int, int]], paused: tuple[int, ...]
) -> None:
    scheduler = make_scheduler(step_tokens=64)
    scheduler.arrive(Job(1, 12, 20, prefix_keys=[(4, 1), (8, 2)]))
    scheduler.arrive(Job(2, 12, 20))
    scheduler.arrive(Job(3, 12, 20, prefix_keys=prefix_keys))
    scheduler.next()
    report(scheduler, (1, 0, 0), (2, 0, 0), (3, 0, 0))
    scheduler.next()
    scheduler.report(Report(free=2, uids=(1, 2, 3), held=(3, 3, 3), grow=(5, 0, 0), lacking=(0, 0, 0)))
    assert scheduler.next() == Filter(pause=paused)


def test_preemption_waits_for_the_pages_that_a_filter_in_flight_frees() -> None:
    scheduler = make_scheduler(pages=10, headroom=1)
    for uid in (1, 2):
        scheduler.arrive(Job(uid, 4, 30))
    scheduler.next()
    report(scheduler, (1, 1, 0), (2, 1, 0), free=2)
    scheduler.arrive(Job(3, 4, 4))
    scheduler.cancel(2)
    assert scheduler.next() == Filter((2,))
    scheduler.paused(8, 0, [])
    assert admitted(scheduler.next()) == (3,)


def test_group_that_ends_while_its_preemption_is_in_flight_is_not_resumed() -> None:
    scheduler = make_scheduler(pages=20, headroom=1)
    for uid in (1, 2):
        scheduler.arrive(Job(uid, 4, 30, choices=uid))
    scheduler.next()
    scheduler.next()
    report(scheduler, (1, 3, 0), (2, 3, 0), free=2)
    assert scheduler.next() == Filter(pause=(2,))
    report(scheduler, (1, 3, 0), free=2, finished=[2, 2])
    scheduler.paused(8, 0, [])
    assert (scheduler.running, scheduler.paused_jobs) == (1, 0)


def test_choice_may_be_ended_while_its_jobs_preemption_is_in_flight() -> None:
    scheduler = make_scheduler(pages=20, headroom=1)
    for uid in (1, 2):
        scheduler.arrive(Job(uid, 4, 30, choices=uid))
    scheduler.next()
    report(scheduler, (1, 3, 0), (2, 3, 0), free=2)
    assert scheduler.next() == Filter(pause=(2,))
    scheduler.end(2, 0)
    scheduler.paused(20, 0, [(2, 3, 8)])
    assert admitted(scheduler.next()) == (2,)
    report(scheduler, (2, 1, 0), free=20)
    assert scheduler.next() == Decode()
    report(scheduler, free=20, finished=[1, 2])
    assert (scheduler.running, scheduler.paused_jobs, scheduler.next()) == (0, 0, None), "its other choice was its last"


def test_resumed_job_counts_as_holding_no_pages_until_it_is_reported() -> None:
    """Job 3 is resumed, and others have grown before its step is reported: the 9 pages it once held can't be taken back again."""
    scheduler = make_scheduler(headroom=1)
    for uid in (1, 2, 3):
        scheduler.arrive(Job(uid, 4, 30))
    scheduler.next()
    scheduler.report(Report(free=2, uids=(1, 2, 3), held=(9, 9, 9), grow=(1, 1, 1), lacking=(0, 0, 0)))
    assert scheduler.next() == Filter(pause=(3,))
    scheduler.paused(12, 0, [(3, 2, 4)])
    assert admitted(scheduler.next()) == (3,)
    report(scheduler, (1, 1, 0), (2, 7, 0), free=2)
    assert scheduler.next() == Filter(pause=(3, 2))


class RecordingPolicy(ChunkedPrefill):
    """Records the last state that it got."""

    state: SchedulerState

    def room(self, now: SchedulerState) -> int:
        self.state = now
        return super().room(now)


class RecordingDraftBudget(DraftBudget):
    """Records the arguments of the last call."""

    arguments: tuple[int, float, Work]

    def allow(self, decodes: int, keys: float, prompts: Work) -> Allowance:
        self.arguments = decodes, keys, prompts
        return super().allow(decodes, keys, prompts)


def test_policy_and_draft_budget_get_the_keys_that_the_next_step_attends_to() -> None:
    """Each decoding sequence attends to one key more than in the step before, a prompt's tokens to those before them."""
    policy, drafting = RecordingPolicy(16), RecordingDraftBudget(Cost(16, 0.016), 16, 4)
    scheduler = Scheduler(Bounds(pages=100, page_size=4, step_tokens=16, sequences=9), policy, drafting)
    for uid in (1, 2):
        scheduler.arrive(Job(uid, 4, 30, drafts=4))
    scheduler.next()
    report(scheduler, (1, 1, 0), (2, 1, 0))
    scheduler.next()
    scheduler.report(Report(free=90, decode_tokens=2, decode_keys=2 * 11))
    scheduler.next()
    assert drafting.arguments == (2, 24, Work())
    scheduler.report(Report(free=90, decode_tokens=2, decode_keys=2 * 12))
    scheduler.arrive(Job(3, 40, 30))
    action = scheduler.next()
    assert isinstance(action, Prefill)
    assert (policy.state.decodes, policy.state.keys, action.tokens) == (2, 26, 14)
    assert drafting.arguments == (2, 26, Work(14, 14 * 15 / 2, 15 / 2, prompts=True))
    scheduler.next()
    assert policy.state.position == 14


def test_ending_a_choice_filters_it_alone_and_ending_the_last_one_drops_the_job() -> None:
    scheduler = make_scheduler()
    scheduler.arrive(Job(1, 4, 30, choices=3))
    scheduler.next()
    report(scheduler, (1, 3, 0))
    scheduler.end(1, 1)
    assert scheduler.next() == Filter(end=((1, 1),))
    scheduler.paused(100, 0, [])
    assert scheduler.next() == Decode()
    report(scheduler, finished=[1])
    scheduler.end(1, 2)
    assert scheduler.next() == Filter((1,))
    scheduler.paused(100, 0, [])
    assert (scheduler.running, scheduler.next()) == (0, None)


def test_choice_is_ended_on_the_shards_even_if_the_other_choices_finish_meanwhile() -> None:
    scheduler = make_scheduler()
    scheduler.arrive(Job(1, 4, 30, choices=2))
    scheduler.next()
    report(scheduler, (1, 3, 0))
    scheduler.next()
    scheduler.end(1, 1)
    report(scheduler, finished=[1])
    assert scheduler.running == 0
    assert scheduler.next() == Filter(end=((1, 1),)), "the shards still have it"


def test_cancel_drops_running_jobs_and_dequeues_waiting_ones() -> None:
    scheduler = make_scheduler(sequences=2)
    for uid in (1, 2, 3, 4):
        scheduler.arrive(Job(uid, 20, 5))
    scheduler.next()
    scheduler.next()
    scheduler.cancel(3)
    scheduler.cancel(2)
    scheduler.cancel(2)
    scheduler.cancel(99)
    assert (scheduler.waiting, scheduler.running) == (1, 1)
    assert scheduler.next() == Filter((2,))
    assert admitted(scheduler.next()) == (4,)


def test_reports_of_cancelled_groups_are_ignored() -> None:
    scheduler = make_scheduler()
    scheduler.arrive(Job(1, 2, 5))
    scheduler.next()
    scheduler.cancel(1)
    report(scheduler, (1, 5, 1), free=99, failed=[1])
    assert scheduler.next() == Filter((1,))
    scheduler.paused(100, 0, [])
    assert scheduler.next() is None


def test_jobs_beyond_the_pools_pages_or_sequences_are_not_admissible() -> None:
    scheduler = make_scheduler(pages=10, sequences=3)
    assert scheduler.admissible(30, 11)
    assert not scheduler.admissible(30, 12)
    assert scheduler.admissible(4, 2, 3)
    assert not scheduler.admissible(4, 2, 4), "more choices than sequences may run"


def test_more_jobs_are_admitted_together_after_most_prompt_tokens_were_cached() -> None:
    scheduler = make_scheduler(pages=1000, step_tokens=64)
    for uid in range(40):
        scheduler.arrive(Job(uid, 60, 4))
        if uid < 10:
            assert len(admitted(scheduler.next())) == 1
            scheduler.report(
                Report(free=900, uids=[uid], held=[1], grow=[1], lacking=[0], prompt_tokens=2, cached_tokens=58, finished=[uid])
            )
    assert len(admitted(scheduler.next())) > 5


def test_jobs_admitted_together_stay_within_the_limit_of_attached_bytes() -> None:
    """They are admitted in order, and a job with more bytes than the limit is admitted alone."""
    scheduler = make_scheduler(attached=100)
    for uid, attached in enumerate((60, 40, 1, 0, 300, 0, 100)):
        scheduler.arrive(Job(uid, 1, 4, attached=attached))
    assert admitted(scheduler.next()) == (0, 1)
    assert admitted(scheduler.next()) == (2, 3)
    assert admitted(scheduler.next()) == (4,)
    assert admitted(scheduler.next()) == (5, 6)


def test_whole_prefill_stops_decodes_once_enough_jobs_or_steps_have_waited() -> None:
    scheduler = make_scheduler(WholePrefill(16, waiting_served_ratio=2.0, waiting_tokens=3))
    scheduler.arrive(Job(1, 4, 30))
    scheduler.next()
    report(scheduler, (1, 1, 0))
    scheduler.arrive(Job(2, 20, 30))
    for _ in range(3):
        assert scheduler.next() == Decode(), "one waits, two are needed"
        report(scheduler, (1, 1, 0))
    assert scheduler.next() == Prefill((2,), ((2, 16),), 16, decode=False)
    report(scheduler, (2, 2, 4))
    assert scheduler.next() == Prefill((), ((2, 16),), 16, decode=False)
    report(scheduler, (2, 1, 0))
    assert scheduler.next() == Decode()


def test_whole_prefill_decodes_one_step_between_the_prompts_of_a_burst() -> None:
    scheduler = make_scheduler(WholePrefill(16))
    for uid in range(1, 7):
        scheduler.arrive(Job(uid, 8, 30))
    for uid in (1, 3, 5):
        assert admitted(scheduler.next()) == (uid, uid + 1)
        report(scheduler, (uid, 1, 0), (uid + 1, 1, 0))
        assert scheduler.next() == Decode()
        report(scheduler)


SEEDS = range(1500)
# What the policy costs in these workloads. A change that makes them worse has to say why.
STEPS = 112_705
WAITS = 438_379
# A fifth more since any number of jobs may overtake one that waits for older ones alone: before, all waited behind it. Half a
# percent more since streams get a token between a burst's prompts under `pause`: fewer jobs are preempted (538, not 545), and they
# have more tokens by then. 42 more since pages that jobs share are counted once: more jobs run where pages are few.
RESTORED = 11_842


def test_random_workloads_keep_every_rule_and_cost_no_more_than_recorded() -> None:
    score = simulate(SEEDS)
    assert score.pauses > 300, "these worlds are too easy"
    assert score.steps <= STEPS
    assert score.waits <= WAITS
    assert score.restored <= RESTORED


class HalvesPages(Scheduler):
    """Assumes half the pages of every job."""

    def arrive(self, job: Job) -> None:
        super().arrive(job)
        job.grow //= 2


class IgnoresAdmitted(Scheduler):
    """Ignores the pages that admitted jobs may still take."""

    def _fits(self, job: Job) -> bool:
        return super()._fits(replace(job, grow=job.grow - self._grow))


class NeverPauses(Scheduler):
    """Does not preempt when growth would not fit."""

    def next(self) -> Action | None:
        kept, self._grow = self._grow, min(self._grow, self.free)
        try:
            return super().next()
        finally:
            self._grow += kept - min(kept, self.free)


class PausesOldest(Scheduler):
    """Preempts the oldest job, not the youngest."""

    def _pause(self) -> Filter:
        return self._take_back([min(self._running.values(), key=lambda job: job.order)])


class PausesNeedlessly(Scheduler):
    """Preempts although no pages are needed."""

    def next(self) -> Action | None:
        if len(self._running) > 2 and not self._dropped and not self._ended:
            return self._take_back([max(self._running.values(), key=lambda job: job.order)])
        return super().next()


class LosesPaused(Scheduler):
    """Does not requeue preempted jobs."""

    def paused(self, free: int, cached: int, groups: Iterable[tuple[int, int, int]]) -> None:
        super().paused(free, cached, [])
        self._pausing.clear()


class LeaksPages(Scheduler):
    """Keeps counting the pages that a cancelled job might have taken."""

    def cancel(self, uid: int) -> None:
        grow = self._grow
        super().cancel(uid)
        self._grow = grow


class UnlimitedOvertaking(Scheduler):
    """Lets any number of jobs overtake one that does not fit."""

    def _patience(self, job: Job) -> int:
        return 1_000_000


class OvertakesPaused(Scheduler):
    """Lets new jobs overtake preempted ones."""

    def _patience(self, job: Job) -> int:
        return self.bounds.overtakes - job.overtaken


class YoungestFirst(Scheduler):
    """Last come, first served."""

    def _candidates(self) -> Iterator[Job]:
        return iter(list(super()._candidates())[::-1])


class IgnoresDecodes(ChunkedPrefill):
    """Does not subtract decodes from the token budget."""

    def room(self, now: SchedulerState) -> int:
        return self._step_tokens


class NeverMixes(Scheduler):
    """Does not decode in steps that compute prompts."""

    def next(self) -> Action | None:
        action = super().next()
        return replace(action, decode=False) if isinstance(action, Prefill) else action


class NeverDrops(Scheduler):
    """Does not drop cancelled groups on the shards."""

    def cancel(self, uid: int) -> None:
        super().cancel(uid)
        self._dropped.clear()


class NeverEndsChoices(Scheduler):
    """Does not end choices on the shards that were ended early."""

    def end(self, uid: int, choice: int) -> None:
        super().end(uid, choice)
        self._ended.clear()


class DropsWaiting(Scheduler):
    """Also drops cancelled groups that the shards do not have."""

    def cancel(self, uid: int) -> None:
        if uid in self._waiting:
            self._dropped.append(uid)
        super().cancel(uid)


class DropsLast(Scheduler):
    """Drops cancelled groups only when there is no other command."""

    def next(self) -> Action | None:
        dropped, self._dropped = self._dropped, []
        action = super().next()
        if action is None and dropped:
            self._filters += 1
            return Filter(tuple(dropped))
        self._dropped = dropped
        return action


class IgnoresSequences(Scheduler):
    """Admits by pages only, without the bound on sequences."""

    def _fits(self, job: Job) -> bool:
        return self._grow + job.grow + self._headroom(self._sequences) <= self.free


class KeepsReleasedPrefixes(Scheduler):
    """Counts prefixes of jobs that have ended as still held."""

    def _release(self, uid: int) -> bool:
        sharing, self._sharing = self._sharing, PrefixSharing(self.bounds.page_size)
        try:
            return super()._release(uid)
        finally:
            self._sharing = sharing


class CountsPrefixesEarly(Scheduler):
    """Counts a prompt's prefixes as held as soon as the job is admitted."""

    def _enter(self, job: Job) -> None:
        super()._enter(job)
        self._sharing.hold(job.uid, job.prefix_keys)


class AlwaysKeepsHeadroom(Scheduler):
    """Keeps headroom even when no job runs."""

    def _headroom(self, sequences: int) -> int:
        return max(1, super()._headroom(sequences))


class OldestPromptLast(Scheduler):
    """Gives the oldest prompt the tokens that the others leave."""

    def _plan(self, decodes: int) -> tuple[tuple[tuple[int, int], ...], list[Job]]:
        chunks, new = super()._plan(decodes)
        return chunks[::-1], new


FAULTS = [
    HalvesPages, IgnoresAdmitted, NeverPauses, PausesOldest, PausesNeedlessly, LosesPaused, LeaksPages, UnlimitedOvertaking,
    OvertakesPaused, YoungestFirst, NeverMixes, NeverDrops, NeverEndsChoices, DropsWaiting, DropsLast, IgnoresSequences,
    KeepsReleasedPrefixes, CountsPrefixesEarly, AlwaysKeepsHeadroom, OldestPromptLast,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_simulation_catches_a_faulty_scheduler(fault: type[Scheduler]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        simulate(range(400), fault)


@pytest.mark.parametrize("fault", [IgnoresDecodes])
def test_simulation_catches_a_faulty_policy(fault: type[ChunkedPrefill]) -> None:
    def make(bounds: Bounds, policy: Policy) -> Scheduler:
        return Scheduler(bounds, fault(bounds.step_tokens) if policy.mixes else policy)

    with pytest.raises((AssertionError, KeyError)):
        simulate(range(400), make)
