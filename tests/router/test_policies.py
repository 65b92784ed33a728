"""Prefill policies: the token budget that prompts get in a step, by tokens or by time (`ChunkedPrefill`), and when decoding stops
for whole prompts, as in text-generation-inference (`WholePrefill`)."""

import random
from dataclasses import replace

import pytest

from penstock.router.cost import Cost, Work
from penstock.router.policies import ChunkedPrefill, Measured, SchedulerState, WholePrefill, largest_step, prompt_share

IDLE = SchedulerState(decodes=0, keys=0, sequences=0, prompts=0, position=0, waiting=1, steps=100)


def busy(**changes: int) -> SchedulerState:
    return replace(IDLE, decodes=10, keys=1000, sequences=10, **changes)


def measured(tokens: int, seconds: float) -> Measured:
    return Measured(prompt_tokens=tokens, seconds=seconds)


def fitted_policy(target: float = 0.0, token: float = 1e-3) -> ChunkedPrefill:
    """A policy that has learned a machine on which a token takes `token` seconds, and nothing else takes time."""
    policy = ChunkedPrefill(512, Cost(64, 64 * token), target)
    for tokens in (1, 10, 50, 200, 500):
        policy.learn(measured(tokens, tokens * token))
    return policy


def test_chunked_prefill_subtracts_decodes_from_the_token_budget() -> None:
    assert ChunkedPrefill(100).room(IDLE) == 100
    assert ChunkedPrefill(100).room(busy()) == 90
    assert ChunkedPrefill(100).room(replace(busy(), sequences=98)) == prompt_share(100) == 12
    assert largest_step(100, 98) == 110


def test_prompt_budget_keeps_steps_with_decodes_within_the_time_target() -> None:
    assert fitted_policy(0.2).room(busy()) == pytest.approx(190, abs=2)
    assert fitted_policy(0.2).room(IDLE) == 512, "nobody waits for a token"


def test_without_a_target_prompts_get_the_time_of_decodes_or_more_on_fast_machines() -> None:
    assert fitted_policy(token=0.02).room(busy()) == pytest.approx(10, abs=1)
    assert fitted_policy(token=1e-3).room(busy()) == pytest.approx(40, abs=2)


def test_prompts_get_some_tokens_even_if_decodes_alone_miss_the_target() -> None:
    assert fitted_policy(0.001, token=0.01).room(busy()) in (2, 3)
    assert fitted_policy(0.001, token=0.01).room(replace(IDLE, decodes=1)) == 1


def test_prompt_budget_shrinks_with_the_length_of_the_context() -> None:
    policy = ChunkedPrefill(4096, Cost(64, 0.064), 0.2)
    for tokens, keys in ((10, 1000), (100, 500_000), (300, 100_000), (50, 0), (200, 2_000_000)):
        policy.learn(Measured(prompt_tokens=tokens, prompt_keys=keys, seconds=tokens * 1e-4 + keys * 1e-7))
    near, far = (policy.room(replace(busy(), position=position)) for position in (0, 20_000))
    assert far < near / 3


def test_prompt_budget_excludes_the_time_of_reading_a_long_context() -> None:
    """8 ms a step, 0.04 ms a token, 1 ms per 20,000 keys read: from token 50,000 on, a target of 10 ms would leave no time."""
    policy, chance = ChunkedPrefill(4096, Cost(4096, 0.2), 0.01), random.Random(1)
    for _ in range(200):
        tokens, position = chance.randint(1, 600), chance.randint(0, 100_000)
        seen = tokens * position + tokens**2 // 2
        policy.learn(Measured(prompt_tokens=tokens, prompt_keys=seen, seconds=0.008 + 4e-5 * tokens + 5e-8 * seen / tokens))
        policy.learn(Measured(decode_tokens=1, decode_keys=100, rows=1, seconds=0.008))
    decoding = SchedulerState(decodes=1, keys=100, sequences=2, prompts=1, position=0, waiting=9, steps=0)
    rooms = [policy.room(replace(decoding, position=position)) for position in (0, 50_000, 100_000)]
    assert rooms == [pytest.approx(50, abs=3)] * 3


def test_prompt_budget_excludes_the_fixed_cost_of_steps_with_prompts() -> None:
    """8 ms a step, 4 ms more with prompts, 0.04 ms a token: few tokens would fit, seem expensive, and in the end be one."""
    policy = ChunkedPrefill(4096, Cost(4096, 0.2), 0.01)
    decoding = SchedulerState(decodes=1, keys=100, sequences=2, prompts=1, position=0, waiting=9, steps=0)
    for _ in range(200):
        room = policy.room(decoding)
        policy.learn(Measured(decode_tokens=1, decode_keys=100, rows=1, seconds=0.008))
        policy.learn(Measured(room, 0, 1, 100, 1, 0.012 + 4e-5 * room))
    assert policy.room(decoding) > 20


class KnownCost(Cost):
    """A cost model of 1 ms a token, 1 ms a row, and 0.01 ms a key that is read."""

    def predict(self, work: Work) -> float:
        return 1e-3 * work.tokens + 1e-3 * work.rows + 1e-5 * work.read

    def tokens_within(self, seconds: float, position: int) -> int:
        return int(seconds / 1e-3 + 1e-6)


def test_prompt_budget_excludes_the_keys_and_rows_of_decodes() -> None:
    policy = ChunkedPrefill(512, KnownCost(), 0.2)
    assert policy.room(busy()) == 200 - 10 - 10 - 10
    assert policy.room(replace(busy(), keys=5000)) == 200 - 10 - 10 - 50


@pytest.mark.parametrize("policy", [ChunkedPrefill(512, Cost(64, 0.064)), WholePrefill(512, cost=Cost(64, 0.064))])
def test_policy_keeps_the_cost_of_prompts_during_long_decoding(policy: ChunkedPrefill | WholePrefill) -> None:
    for tokens in (10, 400, 50, 200, 100) * 3:
        policy.learn(Measured(prompt_tokens=tokens, seconds=0.01 + tokens * 1e-4))
    for _ in range(2000):
        policy.learn(Measured(decode_tokens=8, decode_keys=800, rows=8, seconds=0.02))
    assert policy.cost is not None
    assert policy.cost.predict(Work(300)) == pytest.approx(0.04, rel=0.1)


def test_net_step_time_includes_ngram_lookup_and_excludes_the_draft_model() -> None:
    """Only the time of a draft model's runs is excluded."""
    assert Measured(seconds=0.5, draft_seconds=0.1).net == 0.5
    assert Measured(seconds=0.5, draft_seconds=0.1, rounds=2).net == 0.4


def test_whole_prefill_admits_when_enough_requests_wait_or_after_enough_steps() -> None:
    policy = WholePrefill(64, waiting_served_ratio=0.3, waiting_tokens=20)
    assert policy.room(busy()) == 64
    assert policy.admits(IDLE)
    assert not policy.admits(busy(waiting=2, steps=19))
    assert policy.admits(replace(busy(steps=1), waiting=3))
    assert policy.admits(replace(busy(steps=20), waiting=1))
    assert not policy.admits(replace(busy(steps=20), waiting=9, prompts=1)), "whole prompts first"
    assert not policy.admits(replace(busy(steps=0), waiting=9)), "a token for everybody between two batches of prompts"
    assert policy.admits(replace(IDLE, steps=0))
