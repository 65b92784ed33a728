"""Prefix cache: how many prompt tokens are computed, with a real model, scheduler and page pool in one process."""

import functools
import random

import pytest

from penstock.router.batcher import Batcher
from penstock.router.request import Request, Sampling
from penstock.router.scheduler import Action, Scheduler
from penstock.tests import inprocess
from penstock.tests.inprocess import SMALL_MODEL, generate_all, generate_tokens, metric_value

run = functools.partial(inprocess.run, folder=SMALL_MODEL)
PAGE_SIZE = 16


def prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(10, 1000) for _ in range(length))


def computed_prompt_tokens(batcher: Batcher) -> float:
    return metric_value(batcher, "penstock_prompt_tokens_total")


@pytest.mark.parametrize(("step", "pages", "most"), [(512, 2000, 1.1), (512, 300, 1.1), (4096, 2000, 1.1), (64, 2000, 1.3)])
def test_a_hundred_identical_concurrent_prompts_are_computed_about_once(step: int, pages: int, most: float) -> None:
    """Small chunks end inside pages; the next request then computes those pages too. In the smaller pool requests wait, but none
    is preempted when those whose pages it shares end."""
    requests = [Request(prompt=prompt(500), max_new_tokens=2) for _ in range(100)]

    async def test(batcher: Batcher) -> tuple[float, list[list[list[int]]]]:
        answers = await generate_all(batcher, requests)
        assert metric_value(batcher, "penstock_pauses_total") == 0
        return computed_prompt_tokens(batcher), answers

    count, answers = run(test, shard={"kv_pages": pages}, router={"max_batch_prefill_tokens": step})
    partial = 99 * (500 % PAGE_SIZE)  # the last page of each prompt is not full, so it can't be shared
    assert count <= most * 500 + partial
    assert answers.count(answers[0]) == 100


def test_every_prompt_is_computed_without_prefix_caching() -> None:
    requests = [Request(prompt=prompt(100), max_new_tokens=2) for _ in range(5)]

    async def test(batcher: Batcher) -> float:
        await generate_all(batcher, requests)
        return computed_prompt_tokens(batcher)

    assert run(test, shard={"kv_pages": 2000, "prefix_caching": False}) == 500


def test_next_turn_of_a_chat_recomputes_less_than_a_page_of_its_prefix() -> None:
    async def test(batcher: Batcher) -> None:
        prefix = prompt(333)
        for turn in range(4):
            (answer,) = await generate_tokens(
                batcher, Request(prompt=prefix, max_new_tokens=41, sampling=Sampling(temperature=1.0, seed=turn))
            )
            new_tokens = prompt(57, seed=turn + 5)
            before = computed_prompt_tokens(batcher)
            following = (*prefix, *answer, *new_tokens)
            await generate_tokens(batcher, Request(prompt=following, max_new_tokens=1))
            assert computed_prompt_tokens(batcher) - before < len(new_tokens) + PAGE_SIZE
            prefix = following

    run(test, shard={"kv_pages": 2000})


def test_least_recently_used_prefix_is_evicted_first() -> None:
    async def test(batcher: Batcher) -> None:
        first, second, third = (Request(prompt=prompt(160, seed), max_new_tokens=1) for seed in (1, 2, 3))
        for request in (first, second, first, third):  # the pool holds two of them
            await generate_tokens(batcher, request)
        before = computed_prompt_tokens(batcher)
        await generate_tokens(batcher, first)
        assert computed_prompt_tokens(batcher) - before == PAGE_SIZE, (
            "it was used after the second: only the page of its last token is computed"
        )
        await generate_tokens(batcher, second)
        assert computed_prompt_tokens(batcher) - before == PAGE_SIZE + 160

    run(test, shard={"kv_pages": 21})


def test_pages_evicted_to_host_memory_are_loaded_back() -> None:
    async def test(batcher: Batcher) -> None:
        requests = [Request(prompt=prompt(160, seed), max_new_tokens=9) for seed in range(4)]
        answers = [await generate_tokens(batcher, request) for request in requests]  # the pool holds one of them
        before = computed_prompt_tokens(batcher)
        for request, answer in [*zip(requests, answers, strict=True)] * 2:
            assert await generate_tokens(batcher, request) == answer
        assert computed_prompt_tokens(batcher) - before == 8 * PAGE_SIZE, "only the page of the last token is computed for each"
        assert metric_value(batcher, "penstock_loaded_pages_total") == 8 * 9
        assert metric_value(batcher, "penstock_saved_pages_total") == 4 * 10, (
            "a page that has a copy in host memory is not saved again"
        )

    run(test, shard={"kv_pages": 11, "kv_offload_gib": 1 / 1024})


def test_choices_share_the_pages_of_their_prompt() -> None:
    async def test(batcher: Batcher) -> None:
        request = Request(prompt=prompt(160), max_new_tokens=16, choices=8, sampling=Sampling(temperature=1.0, seed=2))
        answers = await generate_tokens(batcher, request)
        assert len({tuple(answer) for answer in answers}) > 4
        assert computed_prompt_tokens(batcher) == 160

    run(test, shard={"kv_pages": 10 + 8})  # 80 + 8 pages would be needed if they did not share


class RunningCounter(Scheduler):
    """Records the highest number of running requests."""

    most_running = 0

    def next(self) -> Action | None:
        action = super().next()
        RunningCounter.most_running = max(RunningCounter.most_running, self.running)
        return action


@pytest.mark.parametrize("kind", ["shared", "apart", "scored"])
def test_shared_pages_are_counted_once_when_requests_are_admitted(kind: str) -> None:
    """12 pages for each request, 10 of them a shared prefix: as many run at once as the pool really holds. Requests with
    different cache keys don't share pages, nor do prompts whose log-probabilities are wanted while they are computed as a
    whole."""
    requests = [
        Request(
            prompt=(*prompt(160), *prompt(8, seed + 2)),
            max_new_tokens=24,
            cache_key=f"{seed}" if kind == "apart" else "",
            prompt_logprobs=kind == "scored",
        )
        for seed in range(9)
    ]

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        RunningCounter.most_running = 0
        return await generate_all(batcher, requests)

    found = run(test, scheduler=RunningCounter, shard={"kv_pages": 32})
    assert RunningCounter.most_running in {"shared": range(7, 10), "apart": range(1, 3), "scored": range(1, 7)}[kind]
    assert found == run(test, shard={"kv_pages": 2000})
