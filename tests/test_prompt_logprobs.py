"""Log-probabilities of prompt tokens and of their alternatives, from the shard to the router's items: they equal transformers',
however the prompt is chunked and batched. Also the cached token count, and min_new_tokens.
"""

import asyncio
import random
from contextlib import aclosing
from typing import Any

import pytest

from penstock.router.batcher import Batcher
from penstock.router.request import Prompt, Request, Sampling
from penstock.tests.inprocess import DEMO_MODEL, generate_tokens, run
from penstock.tests.shard import tiny

TOLERANCE = 1e-3


def prompt(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(256) for _ in range(length))


async def prompt_item(batcher: Batcher, request: Request) -> Prompt:
    """The stream's Prompt item; the stream is read to its end."""
    async with aclosing(batcher.submit(request)) as stream:
        found = [item async for items in stream for item in items if isinstance(item, Prompt)]
    return found[0]


@pytest.mark.parametrize("step_tokens", [24, 512])
def test_prompt_logprobs_and_alternatives_equal_transformers(step_tokens: int) -> None:
    prompts = [prompt(1, 150), prompt(2, 1), prompt(3, 2), prompt(1, 150), prompt(4, 77)]
    top_counts = [5, 5, 0, 20, 1]

    async def test(batcher: Batcher) -> list[Prompt]:
        requests = [
            Request(prompt=ids, max_new_tokens=2, prompt_logprobs=True, prompt_top_n=count)
            for ids, count in zip(prompts, top_counts, strict=True)
        ]
        return await asyncio.gather(*(prompt_item(batcher, request) for request in requests))

    found = run(test, router={"max_batch_prefill_tokens": step_tokens})
    for ids, count, item in zip(prompts, top_counts, found, strict=True):
        expected = tiny.expected_logits("demo", ids).log_softmax(-1)[:-1]
        expected_logprobs = [expected[position, id].item() for position, id in enumerate(ids[1:])]
        assert item.logprobs[0] is None
        assert item.logprobs[1:] == pytest.approx(expected_logprobs, abs=TOLERANCE)
        assert len(item.top) == count * (len(ids) - 1)
        for position in range(len(ids) - 1):
            top = item.top[position * count : (position + 1) * count]
            assert [logprob for _, logprob in top] == pytest.approx(expected[position].topk(count).values.tolist(), abs=TOLERANCE)
            assert [expected[position, id].item() for id, _ in top] == pytest.approx([logprob for _, logprob in top], abs=TOLERANCE)


def test_most_probable_prompt_token_has_exactly_the_logprob_of_the_top_alternative() -> None:
    """lm-eval compares the two for equality to find whether a token is the greedy one."""

    async def test(batcher: Batcher) -> tuple[list[int], Prompt]:
        [answer] = await generate_tokens(batcher, Request(prompt=prompt(5, 20), max_new_tokens=30))
        whole = (*prompt(5, 20), *answer)
        return answer, await prompt_item(batcher, Request(prompt=whole, max_new_tokens=1, prompt_logprobs=True, prompt_top_n=1))

    answer, item = run(test)
    assert [id for id, _ in item.top[19:]] == answer
    assert [logprob for _, logprob in item.top[19:]] == list(item.logprobs[20:])


def test_prompt_item_reports_the_cached_token_count() -> None:
    async def test(batcher: Batcher) -> list[int]:
        request = Request(prompt=prompt(6, 100), max_new_tokens=1)
        return [(await prompt_item(batcher, request)).cached_tokens for _ in range(2)]

    fresh, again = run(test)
    assert fresh == 0
    assert 100 - 16 <= again < 100


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=1, logit_bias=((3, 1.0),))])
@pytest.mark.parametrize("choices", [1, 3])
def test_no_end_token_is_sampled_before_min_new_tokens(sampling: Sampling, choices: int) -> None:
    """All tokens that the model would generate are declared end tokens."""

    async def test(batcher: Batcher) -> Any:
        ids = prompt(7, 10)
        plain = Request(prompt=ids, max_new_tokens=40, sampling=sampling, choices=choices)
        ends = tuple(sorted({id for answer in await generate_tokens(batcher, plain) for id in answer}))
        at_once = Request(prompt=ids, max_new_tokens=40, sampling=sampling, choices=choices, end_ids=ends)
        later = Request(prompt=ids, max_new_tokens=40, sampling=sampling, choices=choices, end_ids=ends, min_new_tokens=9)
        return ends, await generate_tokens(batcher, at_once), await generate_tokens(batcher, later)

    ends, at_once, later = run(test, folder=DEMO_MODEL)
    assert {len(answer) for answer in at_once} == {1}
    for answer in later:
        assert len(answer) > 9
        assert not set(answer[:9]) & set(ends)
