"""A `Batcher` on fake shards, and helpers of its tests: requests, their expected text, and metrics."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.router.batcher import Batcher
from penstock.router.config import RouterConfig
from penstock.router.metrics import Metrics
from penstock.router.request import Item, Request
from penstock.tests.router.fakes import ByteTokenizer, FakeShards, letter

Test = Callable[[Batcher, FakeShards], Awaitable[None]]


def config(**changes: Any) -> RouterConfig:
    return RouterConfig(**{"folder": "", "model": "fake", "max_batch_prefill_tokens": 16, **changes})


def run(test: Test, shards: FakeShards | None = None, **changes: Any) -> None:
    """Runs `test` with a batcher that has started, then closes it and checks that no task is left."""

    async def main() -> None:
        fake = shards or FakeShards()
        batcher = Batcher(config(**changes), ByteTokenizer(), fake, Metrics())
        async with asyncio.timeout(60):
            await batcher.start()
            await test(batcher, fake)
            await batcher.close()
        assert fake.closed
        assert not batcher.ready
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


async def until_idle(batcher: Batcher, shards: FakeShards) -> None:
    """Returns when the shard has no group left; checks that all pages are free and nothing is waiting, running or paused."""
    while shards.model.groups or metric_value(batcher, "penstock_pages_free") != shards.pages:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert shards.model.free == shards.pages
    for name in ("penstock_waiting", "penstock_running", "penstock_paused", "penstock_pages_held"):
        assert metric_value(batcher, name) == 0


def metric_value(batcher: Batcher, name: str) -> float:
    lines = batcher._metrics.render().decode().splitlines()
    return float(next(line.rsplit(" ", 1)[1] for line in lines if line.startswith(name + " ")))


async def read(batcher: Batcher, request: Request) -> list[Item]:
    return [item async for items in batcher.submit(request) for item in items]


def make_request(text: str, most: int = 5, **changes: Any) -> Request:
    return Request(prompt=tuple(text.encode()), max_new_tokens=most, **changes)


def expected_text(text: str, most: int, choice: int = 0) -> str:
    return "".join(chr(letter(text.encode(), position, choice)) for position in range(most))
