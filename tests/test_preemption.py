"""Preemption, prefix caching, chunked prefill, lookahead, draft tokens and KV offload change no token: a real model in one
process, with several schedulers and settings, compared with each request alone in a large pool.
"""

import asyncio
import functools
import random
from contextlib import aclosing
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.router.batcher import Batcher
from penstock.router.request import Priority, Request, Sampling, Token
from penstock.router.steps import Steps
from penstock.router.text import Tokenizer
from penstock.tests import inprocess
from penstock.tests.inprocess import DEMO_MODEL, SMALL_MODEL, PreemptingScheduler, generate_all, generate_tokens, metric_value

run = functools.partial(inprocess.run, folder=SMALL_MODEL)
SYSTEM = "You are a friendly teller of little stories. "
TEXTS = ["Tell me a story about a cat.", "How much is 12 plus 7?", "Tell me a story.", "Give me a record of a dog as JSON."]


def requests() -> list[Request]:
    """Greedy and seeded, with one choice and four, with and without a shared prefix."""
    tokenizer = Tokenizer(SMALL_MODEL)
    built = []
    for number in range(12):
        text = SYSTEM * (number % 3) + TEXTS[number % len(TEXTS)] + " " * (number % 2)
        sampling = Sampling(temperature=0.9, top_p=0.95, seed=number) if number % 2 else Sampling()
        built.append(
            Request(
                prompt=tuple(tokenizer.encode(text)),
                max_new_tokens=16 + 2 * number,
                sampling=sampling,
                choices=4 if number % 4 == 1 else 1,
            )
        )
    return built


def most_pages(request: Request, page_size: int) -> int:
    shared = len(request.prompt) // page_size
    total = -(-(len(request.prompt) + request.max_new_tokens - 1) // page_size)
    return shared + request.choices * (total - shared)


@pytest.fixture(scope="module")
def alone() -> list[list[list[int]]]:
    """The answers of each request that runs alone, in a large pool, its prompt in one chunk."""

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        return [await generate_tokens(batcher, request) for request in requests()]

    return run(test, shard={"kv_pages": 400, "prefix_caching": False})


# The larger model may be the draft model of the smaller one: its draft tokens are rejected as often.
SETTINGS = [
    {"page_size": 16, "prefix_caching": True, "step": 512},
    {"page_size": 16, "prefix_caching": False, "step": 7},
    {"page_size": 4, "prefix_caching": True, "step": 16},
    {"page_size": 1, "prefix_caching": False, "step": 64},
    {"page_size": 1, "prefix_caching": True, "step": 33},
    {"page_size": 4, "prefix_caching": True, "step": 33, "drafts": 4},
    {"page_size": 16, "prefix_caching": False, "step": 64, "drafts": 7},
    {"page_size": 4, "prefix_caching": True, "step": 33, "drafts": 4, "speculate": f"draft={DEMO_MODEL},tokens=4"},
    {"page_size": 1, "prefix_caching": False, "step": 64, "drafts": 9, "speculate": f"draft={DEMO_MODEL},tree=2x2x1,ngram=2"},
    # Evicted pages go to host memory, which holds 64 KiB of about a thousand, or all of them.
    {"page_size": 4, "prefix_caching": True, "step": 33, "offload": 64},
    {"page_size": 1, "prefix_caching": True, "step": 64, "offload": 4096},
    {"page_size": 4, "prefix_caching": True, "step": 33, "drafts": 4, "speculate": f"draft={DEMO_MODEL},tokens=4", "offload": 4096},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ",".join(map(str, list(settings.values())[:4])))
def test_preempting_each_request_twice_in_a_small_pool_changes_no_token(
    alone: list[list[list[int]]], settings: dict[str, Any]
) -> None:
    drafts, offload = settings.get("drafts", 0), settings.get("offload", 0)  # draft tokens change no token either
    with_drafts = [replace(request, drafts=drafts) for request in requests()]
    page_size = settings["page_size"]
    pages = max(most_pages(request, page_size) for request in with_drafts) + 1  # little more than the largest request needs

    async def test(batcher: Batcher) -> tuple[list[list[list[int]]], int]:
        found = await generate_all(batcher, with_drafts)
        assert isinstance(batcher._scheduler, PreemptingScheduler)
        assert offload or metric_value(batcher, "penstock_restored_tokens_total") > 0
        assert (metric_value(batcher, "penstock_loaded_pages_total") > 0) == (offload > 0)
        return found, min(batcher._scheduler.preemptions[uid] for uid in range(1, len(with_drafts) + 1))

    found, preemptions = run(
        test,
        scheduler=PreemptingScheduler,
        shard={
            "kv_pages": pages,
            "page_size": page_size,
            "prefix_caching": settings["prefix_caching"],
            "speculate": settings.get("speculate", ""),
            "kv_offload_gib": offload / (1 << 20),
        },
        router={"max_batch_prefill_tokens": settings["step"]},
    )
    assert preemptions >= 2
    assert found == alone


def test_small_pool_that_holds_only_the_largest_request_changes_no_token(alone: list[list[list[int]]]) -> None:
    all_requests = requests()
    pages = max(most_pages(request, 16) for request in all_requests)

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        return await generate_all(batcher, all_requests)

    assert run(test, shard={"kv_pages": pages}) == alone


@pytest.mark.parametrize(("overlap", "offload"), [("off", 0), ("on", 0), ("on", 512)])
def test_cancelling_requests_at_random_steps_does_not_change_the_others(
    alone: list[list[list[int]]], overlap: str, offload: int
) -> None:
    """offload: KiB of host memory for evicted pages."""
    all_requests = requests()
    rng = random.Random(3)

    async def cancel_early(batcher: Batcher, request: Request) -> None:
        await asyncio.sleep(rng.random() / 10)
        tokens_left = rng.randint(0, 15)
        async with aclosing(batcher.submit(request)) as stream:
            async for items in stream:
                tokens_left -= sum(isinstance(item, Token) for item in items)
                if tokens_left < 0:
                    break

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        cancelled = [asyncio.create_task(cancel_early(batcher, rng.choice(all_requests))) for _ in range(30)]
        found = await generate_all(batcher, all_requests)
        await asyncio.gather(*cancelled)
        assert (metric_value(batcher, "penstock_overlapped_steps_total") > 0) == (overlap == "on")
        return found

    shard = {"kv_pages": 60, "page_size": 8, "overlap": overlap, "kv_offload_gib": offload / (1 << 20)}
    assert run(test, scheduler=PreemptingScheduler, shard=shard, router={"max_batch_prefill_tokens": 24}) == alone


def test_sending_no_step_ahead_changes_no_token(alone: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the tests above the batcher sends a step before the reply to the previous one; here it doesn't."""
    send = Steps.send
    monkeypatch.setattr(Steps, "send", lambda self, steps: send(self, 1))

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        return await generate_all(batcher, requests())

    assert run(test) == alone


def test_requests_that_exactly_fill_step_budget_and_pool_change_no_token() -> None:
    """Prompts as long as a step, answers that end at a page's end, a pool without spare pages."""
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(10, 1000) for _ in range(64)) for _ in range(8)]
    sampling = Sampling(temperature=1.0, seed=9)
    bursts = [Request(prompt=prompt, max_new_tokens=17, sampling=sampling, choices=1 + n % 2) for n, prompt in enumerate(prompts)]

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        return await generate_all(batcher, bursts)

    expected = run(test, shard={"kv_pages": 400, "prefix_caching": False})
    for pages in (6, 12, 13):
        for overlap in ("off", "on"):
            shard = {"kv_pages": pages, "overlap": overlap}
            assert run(test, scheduler=PreemptingScheduler, shard=shard, router={"max_batch_prefill_tokens": 64}) == expected


@pytest.mark.parametrize(
    "router", [{"prefill_policy": "pause", "max_waiting_tokens": 3}, {"itl_target": 0.001}, {"max_batch_size": 16}], ids=str
)
def test_scheduling_policies_priorities_and_tenants_change_no_token(alone: list[list[list[int]]], router: dict[str, Any]) -> None:
    rng = random.Random(6)
    prioritized = [replace(request, priority=rng.choice(list(Priority)), tenant=rng.choice("ab")) for request in requests()]

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        return await generate_all(batcher, prioritized)

    assert run(test, shard={"kv_pages": 80}, router={"max_batch_prefill_tokens": 32, **router}) == alone
