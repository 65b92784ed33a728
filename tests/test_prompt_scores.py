"""Log-probabilities of prompts, with alternatives, from the shard to the router's items: they are transformers' own, however the
prompt is cut into steps and whoever runs beside it. And what else travels with a prompt: what was cached, how many tokens at least.
"""

import asyncio
import random
from contextlib import aclosing
from typing import Any

import pytest

from penstock.router.batcher import Batcher
from penstock.router.request import Prompt, Request, Sampling
from penstock.tests.inprocess import DEMO, run, tokens
from penstock.tests.shard import tiny

TOLERANCE = 1e-3


def prompt(seed: int, length: int) -> tuple[int, ...]:
    chance = random.Random(seed)
    return tuple(chance.randrange(256) for _ in range(length))


async def first(batcher: Batcher, request: Request) -> Prompt:
    """The item that tells of the prompt; the stream is read to its end."""
    async with aclosing(batcher.submit(request)) as stream:
        found = [item async for items in stream for item in items if isinstance(item, Prompt)]
    return found[0]


@pytest.mark.parametrize("step_tokens", [24, 512])
def test_scores_and_alternatives_equal_transformers(step_tokens: int) -> None:
    asked = [prompt(1, 150), prompt(2, 1), prompt(3, 2), prompt(1, 150), prompt(4, 77)]
    wide = [5, 5, 0, 20, 1]

    async def test(batcher: Batcher) -> list[Prompt]:
        requests = [
            Request(prompt=ids, max_new_tokens=2, prompt_logprobs=True, prompt_top_n=count)
            for ids, count in zip(asked, wide, strict=True)
        ]
        return await asyncio.gather(*(first(batcher, request) for request in requests))

    found = run(test, router={"max_batch_prefill_tokens": step_tokens})
    for ids, count, item in zip(asked, wide, found, strict=True):
        expected = tiny.expected_logits("demo", ids).log_softmax(-1)[:-1]
        own = [expected[place, id].item() for place, id in enumerate(ids[1:])]
        assert item.logprobs[0] is None
        assert item.logprobs[1:] == pytest.approx(own, abs=TOLERANCE)
        assert len(item.top) == count * (len(ids) - 1)
        for place in range(len(ids) - 1):
            top = item.top[place * count : (place + 1) * count]
            assert [logprob for _, logprob in top] == pytest.approx(expected[place].topk(count).values.tolist(), abs=TOLERANCE)
            assert [expected[place, id].item() for id, _ in top] == pytest.approx([logprob for _, logprob in top], abs=TOLERANCE)


def test_a_prompts_most_probable_token_has_its_alternatives_score_to_the_bit() -> None:
    """lm-eval tells by equality whether a token is the greedy one."""

    async def test(batcher: Batcher) -> tuple[list[int], Prompt]:
        [answer] = await tokens(batcher, Request(prompt=prompt(5, 20), max_new_tokens=30))
        whole = (*prompt(5, 20), *answer)
        return answer, await first(batcher, Request(prompt=whole, max_new_tokens=1, prompt_logprobs=True, prompt_top_n=1))

    answer, item = run(test)
    assert [id for id, _ in item.top[19:]] == answer
    assert [logprob for _, logprob in item.top[19:]] == list(item.logprobs[20:])


def test_what_was_cached_is_told() -> None:
    async def test(batcher: Batcher) -> list[int]:
        request = Request(prompt=prompt(6, 100), max_new_tokens=1)
        return [(await first(batcher, request)).cached_tokens for _ in range(2)]

    fresh, again = run(test)
    assert fresh == 0
    assert 100 - 16 <= again < 100


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=1, logit_bias=((3, 1.0),))])
@pytest.mark.parametrize("choices", [1, 3])
def test_no_end_token_is_drawn_before_so_many(sampling: Sampling, choices: int) -> None:
    """All tokens that the model would take are end tokens, but it may not take them."""

    async def test(batcher: Batcher) -> Any:
        ids = prompt(7, 10)
        plain = Request(prompt=ids, max_new_tokens=40, sampling=sampling, choices=choices)
        ends = tuple(sorted({id for answer in await tokens(batcher, plain) for id in answer}))
        at_once = Request(prompt=ids, max_new_tokens=40, sampling=sampling, choices=choices, end_ids=ends)
        later = Request(prompt=ids, max_new_tokens=40, sampling=sampling, choices=choices, end_ids=ends, min_new_tokens=9)
        return ends, await tokens(batcher, at_once), await tokens(batcher, later)

    ends, at_once, later = run(test, folder=DEMO)
    assert {len(answer) for answer in at_once} == {1}
    for answer in later:
        assert len(answer) > 9
        assert not set(answer[:9]) & set(ends)
