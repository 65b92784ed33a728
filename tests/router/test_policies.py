"""How much of a step prompts get: by tokens, by time, and as text-generation-inference decides it."""

import random
from dataclasses import replace

import pytest

from penstock.router.cost import Cost, Work
from penstock.router.policies import ChunkedPrefill, Measured, SchedulerState, WholePrefill, largest_step, prompt_share

NOBODY = SchedulerState(decodes=0, keys=0, sequences=0, prompts=0, position=0, waiting=1, steps=100)


def busy(**changes: int) -> SchedulerState:
    return replace(NOBODY, decodes=10, keys=1000, sequences=10, **changes)


def measured(tokens: int, seconds: float) -> Measured:
    return Measured(prompt_tokens=tokens, seconds=seconds)


def mixed(target: float = 0.0, token: float = 1e-3) -> ChunkedPrefill:
    """On a machine that takes so many seconds for a token and nothing for anything else."""
    policy = ChunkedPrefill(512, Cost(64, 64 * token), target)
    for tokens in (1, 10, 50, 200, 500):
        policy.learn(measured(tokens, tokens * token))
    return policy


def test_decodes_take_their_tokens_of_the_budget_first() -> None:
    assert ChunkedPrefill(100).room(NOBODY) == 100
    assert ChunkedPrefill(100).room(busy()) == 90
    assert ChunkedPrefill(100).room(replace(busy(), sequences=98)) == prompt_share(100) == 12
    assert largest_step(100, 98) == 110


def test_a_step_with_decodes_stays_within_the_target() -> None:
    assert mixed(0.2).room(busy()) == pytest.approx(190, abs=2)
    assert mixed(0.2).room(NOBODY) == 512, "nobody waits for a token"


def test_without_a_target_prompts_take_as_much_time_as_decodes_but_fast_machines_are_not_slowed() -> None:
    assert mixed(token=0.02).room(busy()) == pytest.approx(10, abs=1)
    assert mixed(token=1e-3).room(busy()) == pytest.approx(40, abs=2)


def test_prompts_get_something_even_if_decodes_alone_miss_the_target() -> None:
    assert mixed(0.001, token=0.01).room(busy()) in (2, 3)
    assert mixed(0.001, token=0.01).room(replace(NOBODY, decodes=1)) == 1


def test_longer_contexts_take_more_time_so_fewer_tokens_fit() -> None:
    policy = ChunkedPrefill(4096, Cost(64, 0.064), 0.2)
    for tokens, keys in ((10, 1000), (100, 500_000), (300, 100_000), (50, 0), (200, 2_000_000)):
        policy.learn(Measured(prompt_tokens=tokens, prompt_keys=keys, seconds=tokens * 1e-4 + keys * 1e-7))
    near, far = (policy.room(replace(busy(), position=position)) for position in (0, 20_000))
    assert far < near / 3


def test_a_prompt_gets_its_share_of_time_beside_what_reading_its_context_takes() -> None:
    """8 ms a step, 0.04 ms a token, 1 ms per 20,000 keys read: from token 50,000 on a target of 10 ms would leave nothing."""
    policy, chance = ChunkedPrefill(4096, Cost(4096, 0.2), 0.01), random.Random(1)
    for _ in range(200):
        tokens, position = chance.randint(1, 600), chance.randint(0, 100_000)
        seen = tokens * position + tokens**2 // 2
        policy.learn(Measured(prompt_tokens=tokens, prompt_keys=seen, seconds=0.008 + 4e-5 * tokens + 5e-8 * seen / tokens))
        policy.learn(Measured(decode_tokens=1, decode_keys=100, rows=1, seconds=0.008))
    decoding = SchedulerState(decodes=1, keys=100, sequences=2, prompts=1, position=0, waiting=9, steps=0)
    rooms = [policy.room(replace(decoding, position=position)) for position in (0, 50_000, 100_000)]
    assert rooms == [pytest.approx(50, abs=3)] * 3


def test_a_prompt_gets_its_share_of_time_beside_what_any_of_its_tokens_take() -> None:
    """8 ms a step, 4 ms more with prompts, 0.04 ms a token: few would be left, which would seem dear, and one in the end."""
    policy = ChunkedPrefill(4096, Cost(4096, 0.2), 0.01)
    decoding = SchedulerState(decodes=1, keys=100, sequences=2, prompts=1, position=0, waiting=9, steps=0)
    for _ in range(200):
        room = policy.room(decoding)
        policy.learn(Measured(decode_tokens=1, decode_keys=100, rows=1, seconds=0.008))
        policy.learn(Measured(room, 0, 1, 100, 1, 0.012 + 4e-5 * room))
    assert policy.room(decoding) > 20


class Known(Cost):
    """1 ms a token and a row, 0.01 ms a key that is read."""

    def predict(self, work: Work) -> float:
        return 1e-3 * work.tokens + 1e-3 * work.rows + 1e-5 * work.read

    def tokens_within(self, seconds: float, position: int) -> int:
        return int(seconds / 1e-3 + 1e-6)


def test_what_decodes_read_and_sample_is_no_time_for_prompts() -> None:
    policy = ChunkedPrefill(512, Known(), 0.2)
    assert policy.room(busy()) == 200 - 10 - 10 - 10
    assert policy.room(replace(busy(), keys=5000)) == 200 - 10 - 10 - 50


@pytest.mark.parametrize("policy", [ChunkedPrefill(512, Cost(64, 0.064)), WholePrefill(512, cost=Cost(64, 0.064))])
def test_hours_of_decoding_do_not_wash_out_what_a_policy_knows_of_prompts(policy: ChunkedPrefill | WholePrefill) -> None:
    for tokens in (10, 400, 50, 200, 100) * 3:
        policy.learn(Measured(prompt_tokens=tokens, seconds=0.01 + tokens * 1e-4))
    for _ in range(2000):
        policy.learn(Measured(decode_tokens=8, decode_keys=800, rows=8, seconds=0.02))
    assert policy.cost is not None
    assert policy.cost.predict(Work(300)) == pytest.approx(0.04, rel=0.1)


def test_looking_for_drafts_in_the_text_is_a_part_of_the_step() -> None:
    """Only runs of a draft model are another's time."""
    assert Measured(seconds=0.5, draft_seconds=0.1).net == 0.5
    assert Measured(seconds=0.5, draft_seconds=0.1, rounds=2).net == 0.4


def test_decoding_pauses_when_enough_wait_or_have_waited_long_enough() -> None:
    policy = WholePrefill(64, waiting_served_ratio=0.3, waiting_tokens=20)
    assert policy.room(busy()) == 64
    assert policy.admits(NOBODY)
    assert not policy.admits(busy(waiting=2, steps=19))
    assert policy.admits(replace(busy(steps=1), waiting=3))
    assert policy.admits(replace(busy(steps=20), waiting=1))
    assert not policy.admits(replace(busy(steps=20), waiting=9, prompts=1)), "whole prompts first"
    assert not policy.admits(replace(busy(steps=0), waiting=9)), "a token for everybody between two batches of prompts"
    assert policy.admits(replace(NOBODY, steps=0))
