"""What is computed once is not computed again: counted in tokens, over a real model, scheduler and pool."""

import functools
import random

import pytest

from penstock.router.batcher import Batcher
from penstock.router.request import Request, Sampling
from penstock.router.scheduler import Action, Scheduler
from penstock.tests import inprocess
from penstock.tests.inprocess import LIGHT, together, tokens, value

run = functools.partial(inprocess.run, folder=LIGHT)
PAGE = 16


def prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    chance = random.Random(seed)
    return tuple(chance.randrange(10, 1000) for _ in range(length))


def computed(batcher: Batcher) -> float:
    return value(batcher, "penstock_prompt_tokens_total")


@pytest.mark.parametrize(("step", "most"), [(512, 1.1), (4096, 1.1), (64, 1.3)])
def test_a_hundred_identical_prompts_at_once_are_computed_about_once(step: int, most: float) -> None:
    """Small chunks end inside pages, which the next in line then computes, too."""
    requests = [Request(prompt=prompt(500), max_new_tokens=2) for _ in range(100)]

    async def test(batcher: Batcher) -> tuple[float, list[list[list[int]]]]:
        answers = await together(batcher, requests)
        return computed(batcher), answers

    count, answers = run(test, shard={"kv_pages": 2000}, router={"max_batch_prefill_tokens": step})
    partial = 99 * (500 % PAGE)  # the last page of each is not full, so it is its own
    assert count <= most * 500 + partial
    assert answers.count(answers[0]) == 100


def test_without_caching_each_is_computed() -> None:
    requests = [Request(prompt=prompt(100), max_new_tokens=2) for _ in range(5)]

    async def test(batcher: Batcher) -> float:
        await together(batcher, requests)
        return computed(batcher)

    assert run(test, shard={"kv_pages": 2000, "prefix_caching": False}) == 500


def test_a_second_turn_recomputes_less_than_a_page_of_what_was_seen() -> None:
    async def test(batcher: Batcher) -> None:
        seen = prompt(333)
        for turn in range(4):
            (answer,) = await tokens(
                batcher, Request(prompt=seen, max_new_tokens=41, sampling=Sampling(temperature=1.0, seed=turn))
            )
            new = prompt(57, seed=turn + 5)
            before = computed(batcher)
            following = (*seen, *answer, *new)
            await tokens(batcher, Request(prompt=following, max_new_tokens=1))
            assert computed(batcher) - before < len(new) + PAGE
            seen = following

    run(test, shard={"kv_pages": 2000})


def test_the_least_recently_used_prefixes_make_room() -> None:
    async def test(batcher: Batcher) -> None:
        first, second, third = (Request(prompt=prompt(160, seed), max_new_tokens=1) for seed in (1, 2, 3))
        for request in (first, second, first, third):  # room for two of them
            await tokens(batcher, request)
        before = computed(batcher)
        await tokens(batcher, first)
        assert computed(batcher) - before == PAGE, "it was used after the second: only the page of its last token is computed"
        await tokens(batcher, second)
        assert computed(batcher) - before == PAGE + 160

    run(test, shard={"kv_pages": 21})


def test_what_others_have_taken_comes_back_from_the_host() -> None:
    async def test(batcher: Batcher) -> None:
        asked = [Request(prompt=prompt(160, seed), max_new_tokens=9) for seed in range(4)]
        answers = [await tokens(batcher, request) for request in asked]  # room for one of them
        before = computed(batcher)
        for request, answer in [*zip(asked, answers, strict=True)] * 2:
            assert await tokens(batcher, request) == answer
        assert computed(batcher) - before == 8 * PAGE, "of each the page of its last token"
        assert value(batcher, "penstock_loaded_pages_total") == 8 * 9
        assert value(batcher, "penstock_saved_pages_total") == 4 * 10, "a copy that is there is not made again"

    run(test, shard={"kv_pages": 11, "kv_offload_gib": 1 / 1024})


def test_choices_share_the_pages_of_their_prompt() -> None:
    async def test(batcher: Batcher) -> None:
        request = Request(prompt=prompt(160), max_new_tokens=16, choices=8, sampling=Sampling(temperature=1.0, seed=2))
        answers = await tokens(batcher, request)
        assert len({tuple(answer) for answer in answers}) > 4
        assert computed(batcher) == 160

    run(test, shard={"kv_pages": 10 + 8})  # 80 + 8 pages if they did not


class Crowd(Scheduler):
    """Remembers how many ran at once."""

    most = 0

    def next(self) -> Action | None:
        action = super().next()
        Crowd.most = max(Crowd.most, self.running)
        return action


@pytest.mark.parametrize("kind", ["shared", "apart", "scored"])
def test_pages_that_others_hold_are_not_counted_twice(kind: str) -> None:
    """12 pages each, 10 of them a beginning that all have: as many run at once as the pool really holds. It holds them once for
    each that finds nothing of the others, and while prompts are computed whole for their scores."""
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
        Crowd.most = 0
        return await together(batcher, requests)

    scarce = run(test, scheduler=Crowd, shard={"kv_pages": 32})
    assert Crowd.most in {"shared": range(7, 10), "apart": range(1, 3), "scored": range(1, 7)}[kind]
    assert scarce == run(test, shard={"kv_pages": 2000})
