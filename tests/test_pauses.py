"""Pausing, prefix caching, chunks and lookahead change no token: a real model under schedulers from calm to frantic."""

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
from penstock.tests.inprocess import DEMO, LIGHT, Restless, together, tokens, value

run = functools.partial(inprocess.run, folder=LIGHT)
SYSTEM = "You are a friendly teller of little stories. "
TEXTS = ["Tell me a story about a cat.", "How much is 12 plus 7?", "Tell me a story.", "Give me a record of a dog as JSON."]


def requests() -> list[Request]:
    """Greedy and seeded, one answer and four, with and without a common beginning."""
    tokenizer = Tokenizer(LIGHT)
    made = []
    for number in range(12):
        text = SYSTEM * (number % 3) + TEXTS[number % len(TEXTS)] + " " * (number % 2)
        sampling = Sampling(temperature=0.9, top_p=0.95, seed=number) if number % 2 else Sampling()
        made.append(
            Request(
                prompt=tuple(tokenizer.encode(text)),
                max_new_tokens=16 + 2 * number,
                sampling=sampling,
                choices=4 if number % 4 == 1 else 1,
            )
        )
    return made


def most_pages(request: Request, page_size: int) -> int:
    shared = len(request.prompt) // page_size
    total = -(-(len(request.prompt) + request.max_new_tokens - 1) // page_size)
    return shared + request.choices * (total - shared)


@pytest.fixture(scope="module")
def alone() -> list[list[list[int]]]:
    """Each request by itself, in an ample pool, its prompt in one piece."""

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        return [await tokens(batcher, request) for request in requests()]

    return run(test, shard={"kv_pages": 400, "prefix_caching": False})


# The larger model may well draft for the smaller one: it is wrong as often.
SETTINGS = [
    {"page_size": 16, "prefix_caching": True, "step": 512},
    {"page_size": 16, "prefix_caching": False, "step": 7},
    {"page_size": 4, "prefix_caching": True, "step": 16},
    {"page_size": 1, "prefix_caching": False, "step": 64},
    {"page_size": 1, "prefix_caching": True, "step": 33},
    {"page_size": 4, "prefix_caching": True, "step": 33, "drafts": 4},
    {"page_size": 16, "prefix_caching": False, "step": 64, "drafts": 7},
    {"page_size": 4, "prefix_caching": True, "step": 33, "drafts": 4, "speculate": f"draft={DEMO},tokens=4"},
    {"page_size": 1, "prefix_caching": False, "step": 64, "drafts": 9, "speculate": f"draft={DEMO},tree=2x2x1,ngram=2"},
    # What is taken goes to the host, which has room for 64 KiB of some thousand, or for all.
    {"page_size": 4, "prefix_caching": True, "step": 33, "offload": 64},
    {"page_size": 1, "prefix_caching": True, "step": 64, "offload": 4096},
    {"page_size": 4, "prefix_caching": True, "step": 33, "drafts": 4, "speculate": f"draft={DEMO},tokens=4", "offload": 4096},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ",".join(map(str, list(settings.values())[:4])))
def test_a_pool_in_which_everybody_is_paused_twice_changes_no_token(alone: list[list[list[int]]], settings: dict[str, Any]) -> None:
    drafts, offload = settings.get("drafts", 0), settings.get("offload", 0)  # drafts change no token either
    asked = [replace(request, drafts=drafts) for request in requests()]
    page_size = settings["page_size"]
    pages = max(most_pages(request, page_size) for request in asked) + 1  # room for little more than the largest of them

    async def test(batcher: Batcher) -> tuple[list[list[list[int]]], int]:
        found = await together(batcher, asked)
        assert isinstance(batcher._scheduler, Restless)
        assert offload or value(batcher, "penstock_restored_tokens_total") > 0
        assert (value(batcher, "penstock_loaded_pages_total") > 0) == (offload > 0)
        return found, min(batcher._scheduler.pauses[uid] for uid in range(1, len(asked) + 1))

    found, pauses = run(
        test,
        scheduler=Restless,
        shard={
            "kv_pages": pages,
            "page_size": page_size,
            "prefix_caching": settings["prefix_caching"],
            "speculate": settings.get("speculate", ""),
            "kv_offload_gib": offload / (1 << 20),
        },
        router={"max_batch_prefill_tokens": settings["step"]},
    )
    assert pauses >= 2
    assert found == alone


def test_a_pool_for_one_request_serves_many(alone: list[list[list[int]]]) -> None:
    asked = requests()
    pages = max(most_pages(request, 16) for request in asked)

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        return await together(batcher, asked)

    assert run(test, shard={"kv_pages": pages}) == alone


@pytest.mark.parametrize(("overlap", "offload"), [("off", 0), ("on", 0), ("on", 512)])
def test_aborts_at_random_steps_leave_the_others_alone(alone: list[list[list[int]]], overlap: str, offload: int) -> None:
    """offload: KiB of the host's memory."""
    asked = requests()
    chance = random.Random(3)

    async def impatient(batcher: Batcher, request: Request) -> None:
        await asyncio.sleep(chance.random() / 10)
        left = chance.randint(0, 15)
        async with aclosing(batcher.submit(request)) as stream:
            async for items in stream:
                left -= sum(isinstance(item, Token) for item in items)
                if left < 0:
                    break

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        noise = [asyncio.create_task(impatient(batcher, chance.choice(asked))) for _ in range(30)]
        found = await together(batcher, asked)
        await asyncio.gather(*noise)
        assert (value(batcher, "penstock_overlapped_steps_total") > 0) == (overlap == "on")
        return found

    shard = {"kv_pages": 60, "page_size": 8, "overlap": overlap, "kv_offload_gib": offload / (1 << 20)}
    assert run(test, scheduler=Restless, shard=shard, router={"max_batch_prefill_tokens": 24}) == alone


def test_one_step_of_lookahead_changes_no_token(alone: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of tests above looks ahead; here it does not."""
    send = Steps.send
    monkeypatch.setattr(Steps, "send", lambda self, steps: send(self, 1))

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        return await together(batcher, requests())

    assert run(test) == alone


def test_bursts_that_fill_budget_and_pool_to_the_last_token() -> None:
    """Prompts as long as a step, answers that end with a page, a pool without a page to spare."""
    chance = random.Random(5)
    prompts = [tuple(chance.randrange(10, 1000) for _ in range(64)) for _ in range(8)]
    sampling = Sampling(temperature=1.0, seed=9)
    asked = [Request(prompt=prompt, max_new_tokens=17, sampling=sampling, choices=1 + n % 2) for n, prompt in enumerate(prompts)]

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        return await together(batcher, asked)

    ample = run(test, shard={"kv_pages": 400, "prefix_caching": False})
    for pages in (6, 12, 13):
        for overlap in ("off", "on"):
            shard = {"kv_pages": pages, "overlap": overlap}
            assert run(test, scheduler=Restless, shard=shard, router={"max_batch_prefill_tokens": 64}) == ample


@pytest.mark.parametrize(
    "router", [{"prefill_policy": "pause", "max_waiting_tokens": 3}, {"itl_target": 0.001}, {"max_batch_size": 16}], ids=str
)
def test_no_policy_changes_a_token(alone: list[list[list[int]]], router: dict[str, Any]) -> None:
    chance = random.Random(6)
    asked = [replace(request, priority=chance.choice(list(Priority)), tenant=chance.choice("ab")) for request in requests()]

    async def test(batcher: Batcher) -> list[list[list[int]]]:
        return await together(batcher, asked)

    assert run(test, shard={"kv_pages": 80}, router={"max_batch_prefill_tokens": 32, **router}) == alone
