"""The simulated shard: sharing, eviction and restoring of pages, in cases small enough to compute by hand. Pages of 4 tokens."""

import pytest

from penstock.simulator.shard import Asked, IntegerShard, Outcome


def prefill_alone(shard: IntegerShard, asked: Asked) -> Outcome:
    """Computes the group's whole prompt in one step."""
    return shard.prefill([asked], [(asked.uid, 1000)], 1000, False)


def standing(outcome: Outcome) -> dict[int, tuple[int, int, int]]:
    """(held, grow, lacking) by uid."""
    rows = zip(outcome.uids, outcome.held, outcome.grow, outcome.lacking, strict=True)
    return {uid: (held, grow, lacking) for uid, held, grow, lacking in rows}


def test_ten_identical_concurrent_prompts_are_computed_once() -> None:
    shard = IntegerShard(100, 4)
    groups = [Asked(uid=uid, prompt=22, most=9, prefix=[("same", 22)]) for uid in range(10)]
    outcome = shard.prefill(groups, [(uid, 1000) for uid in range(10)], 1000, False)
    assert outcome.prompt_tokens == 22 + 9 * 2  # 5 full pages are shared, and each has its own last page
    assert outcome.cached_tokens == 9 * 20
    assert outcome.first == list(range(10))
    assert shard.free == 100 - 5 - 10
    shard.audit()


def test_identical_prompts_share_pages_chunk_by_chunk() -> None:
    """With a budget of 8 tokens per step, neither group computes what the other has just computed."""
    shard = IntegerShard(100, 4)
    groups = [Asked(uid=uid, prompt=40, most=9, prefix=[("same", 40)]) for uid in (1, 2)]
    chunks, computed, cached = [(1, 4), (2, 4)], 0, 0
    for new in (groups, *[()] * 20):
        outcome = shard.prefill(new, chunks, 8, False)
        computed, cached = computed + outcome.prompt_tokens, cached + outcome.cached_tokens
    assert not any(group.lacking for group in shard.groups.values())
    assert (computed, cached) == (44, 36)


def test_fully_cached_prompt_still_computes_its_last_page() -> None:
    shard = IntegerShard(100, 4)
    prefill_alone(shard, Asked(uid=1, prompt=16, most=9, prefix=[("same", 16)]))
    outcome = prefill_alone(shard, Asked(uid=2, prompt=16, most=9, prefix=[("same", 16)]))
    assert (outcome.prompt_tokens, outcome.cached_tokens) == (4, 12)  # whole pages only
    assert standing(outcome)[2] == (4, 1, 0)
    assert shard.free == 96  # its last page is the first group's, too


def test_next_turn_of_a_chat_recomputes_less_than_a_page() -> None:
    shard = IntegerShard(100, 4)
    prefill_alone(shard, Asked(uid=1, prompt=10, most=12, prefix=[("chat", 22)]))
    for _ in range(11):
        outcome = shard.decode()
    assert outcome.finished == [(1, 0)]
    assert (shard.free, shard.pool.cached) == (100, 5)  # 21 tokens were computed: the last token never is
    outcome = prefill_alone(shard, Asked(uid=2, prompt=30, most=5, prefix=[("chat", 30)]))
    assert (outcome.prompt_tokens, outcome.cached_tokens) == (10, 20)


def test_choices_share_their_prompt_and_copy_its_last_page() -> None:
    shard = IntegerShard(100, 4, prefix_caching=False)
    outcome = prefill_alone(shard, Asked(uid=1, prompt=10, most=9, choices=3))
    assert (outcome.prompt_tokens, outcome.rows) == (10, 3)
    assert standing(outcome)[1] == (2 + 3, 0, 0)  # two more tokens fit into each choice's page
    outcome = prefill_alone(shard, Asked(uid=2, prompt=8, most=9, choices=3))
    assert standing(outcome)[2] == (2, 3, 0)  # nothing to copy; each choice's next token needs a page
    assert standing(shard.decode()) == {1: (5, 3, 0), 2: (5, 0, 0)}
    shard.filter(end=[(1, 1), (1, 2)])
    assert standing(shard.decode())[1] == (3, 1, 0)


def test_last_generated_token_is_never_computed() -> None:
    shard = IntegerShard(2, 4, prefix_caching=False)
    assert standing(prefill_alone(shard, Asked(uid=1, prompt=7, most=2)))[1] == (2, 0, 0)
    outcome = shard.decode()
    assert (outcome.finished, outcome.decode_keys, shard.free) == ([(1, 0)], 8, 2)


def test_least_recently_used_prefix_is_evicted_first() -> None:
    shard = IntegerShard(10, 4)
    for uid, name in enumerate("abc", 1):
        prefill_alone(shard, Asked(uid=uid, prompt=12, most=1, prefix=[(name, 12)]))
    prefill_alone(shard, Asked(uid=4, prompt=13, most=1, prefix=[("a", 12)]))  # used again
    assert (shard.pool.unused, shard.pool.cached) == (1, 9)
    prefill_alone(shard, Asked(uid=5, prompt=13, most=1))
    shard.audit()
    cached = [
        prefill_alone(shard, Asked(uid=6 + i, prompt=13, most=1, prefix=[(name, 12)])).cached_tokens for i, name in enumerate("ac")
    ]
    assert cached == [12, 12]
    assert prefill_alone(shard, Asked(uid=9, prompt=13, most=1, prefix=[("b", 12)])).cached_tokens == 0


@pytest.mark.parametrize(("choices", "restored"), [(1, 1), (2, 2)])
def test_preempted_group_finds_its_pages_in_the_prefix_cache(choices: int, restored: int) -> None:
    """10 tokens of prompt and 8 generated: 17 computed, 16 of them in full pages."""
    shard = IntegerShard(40, 4)
    group = Asked(uid=1, prompt=10, most=20, choices=choices)
    prefill_alone(shard, group)
    for _ in range(7):
        shard.decode()
    released = shard.filter(pause=[1])
    assert released.continuations == {1: tuple((choice, 8) for choice in range(choices))}
    assert released.paused == [(1, 2 + 3 * choices, 10 + 7 * choices)]
    assert released.free == 40
    resumed = Asked(uid=1, prompt=10, most=20, choices=choices, continuations=released.continuations[1])
    outcome = prefill_alone(shard, resumed)
    assert (outcome.prompt_tokens, outcome.restored_tokens, outcome.rows) == (restored, restored, 0)
    assert outcome.cached_tokens == 10 + 7 * choices - restored
    assert outcome.restored == [1]
    assert standing(outcome)[1] == (2 + 3 * choices, 0, 0)
    assert shard.decode().decode_keys == 18 * choices
    shard.audit()


def test_restored_group_computes_its_prompt_once_for_all_choices() -> None:
    shard = IntegerShard(40, 4, prefix_caching=False)
    prefill_alone(shard, Asked(uid=1, prompt=10, most=20, choices=3, ends_at=(2, 0, 0)))
    for _ in range(7):
        shard.decode()
    released = shard.filter(pause=[1])
    assert released.paused == [(1, 2 + 2 * 3, 10 + 2 * 7)]  # one of the three choices had ended
    resumed = Asked(uid=1, prompt=10, most=20, choices=3, ends_at=(2, 0, 0), continuations=released.continuations[1])
    outcome = shard.prefill([resumed], [(1, 1000)], 12, False)
    assert standing(outcome)[1] == (2 + 2, 4, 12)
    outcome = shard.prefill([], [(1, 5)], 100, False)
    assert (outcome.prompt_tokens, outcome.restored) == (12, [1])


def test_choice_may_end_before_the_prompt_is_computed() -> None:
    shard = IntegerShard(40, 4, prefix_caching=False)
    shard.prefill([Asked(uid=1, prompt=10, most=20, choices=3)], [(1, 1000)], 4, False)
    assert shard.filter(end=[(1, 1)]).free == 39
    outcome = shard.prefill([], [(1, 1000)], 100, False)
    assert (outcome.rows, outcome.held) == (2, [4])


def test_recomputed_last_page_needs_a_free_page_although_it_is_already_cached() -> None:
    """A prompt's last page is computed again, and only then replaced by the cached one."""
    shard = IntegerShard(4, 4)
    prefill_alone(shard, Asked(uid=1, prompt=16, most=1 + 1, prefix=[("same", 16)]))
    with pytest.raises(AssertionError, match="1 are needed, 0 are free"):
        prefill_alone(shard, Asked(uid=2, prompt=16, most=1, prefix=[("same", 16)]))


def test_rest_of_the_step_budget_is_given_out_beyond_chunk_limits() -> None:
    shard = IntegerShard(100, 4, prefix_caching=False)
    groups = [Asked(uid=uid, prompt=20, most=5) for uid in (1, 2, 3)]
    outcome = shard.prefill(groups, [(1, 4), (2, 6), (3, 1)], 30, False)
    assert outcome.computed == {1: 20, 2: 9, 3: 1}


def test_pages_of_a_failed_group_are_not_cached() -> None:
    shard = IntegerShard(100, 4)
    shard.failing.add(1)
    outcome = prefill_alone(shard, Asked(uid=1, prompt=30, most=9, prefix=[("good", 8)]))
    assert (outcome.failed, outcome.uids, outcome.rows) == ([1], [], 0)
    assert (shard.free, shard.pool.cached) == (100, 2)
    shard.audit()


def test_command_may_name_a_group_that_has_just_ended() -> None:
    """With a step of lookahead, the router sends a command before it learns of the end."""
    shard = IntegerShard(100, 4)
    prefill_alone(shard, Asked(uid=1, prompt=5, most=1))
    outcome = shard.prefill([], [(1, 5)], 10, True)
    assert (outcome.prompt_tokens, outcome.decode_tokens, outcome.uids) == (0, 0, [])
    assert shard.filter(pause=[1], end=[(1, 0)]).paused == []
    assert shard.decode().rows == 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (lambda shard: prefill_alone(shard, Asked(uid=1, prompt=5, most=5)), "joins twice"),
        (lambda shard: prefill_alone(shard, Asked(uid=2, prompt=5, most=5)), "joins again"),
        (lambda shard: prefill_alone(shard, Asked(uid=3, prompt=5, most=5)), "starts anew"),
        (lambda shard: prefill_alone(shard, Asked(uid=3, prompt=5, most=5, continuations=[(0, 3)])), "not what was paused"),
        (lambda shard: prefill_alone(shard, Asked(uid=4, prompt=5, most=5, continuations=[(0, 2)])), "not what was paused"),
        (lambda shard: prefill_alone(shard, Asked(uid=4, prompt=100, most=5)), "overcommitted"),
        (lambda shard: shard.filter(drop=[9]), "never was here"),
        (lambda shard: shard.filter(pause=[9]), "never was here"),
        (lambda shard: shard.prefill([], [(1, 5), (1, 5)], 5, True), "two chunks of a group"),
        (lambda shard: shard.prefill([], [(1, 5)], 0, True), "without tokens"),
        (lambda shard: shard.prefill([], [], 5, True), "without prompts"),
        (lambda shard: [shard.decode() for _ in range(20)], "overcommitted"),
    ],
)
def test_invalid_commands_fail_an_assertion(command, message: str) -> None:  # type: ignore[no-untyped-def]
    shard = IntegerShard(10, 4, prefix_caching=False)
    prefill_alone(shard, Asked(uid=1, prompt=5, most=50))
    prefill_alone(shard, Asked(uid=2, prompt=5, most=1))
    prefill_alone(shard, Asked(uid=3, prompt=5, most=5))
    shard.decode()
    shard.filter(pause=[3])
    prefill_alone(shard, Asked(uid=5, prompt=20, most=30))
    with pytest.raises(AssertionError, match=message):
        command(shard)
