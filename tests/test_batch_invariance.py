"""A server with --batch-invariant in bfloat16 gives each request the same tokens and log-probabilities alone, in a batch, and
when its shard is killed: with a KV cache too small for all requests (so with preemption), and with n-gram draft tokens.
"""

import asyncio
import os
import signal
from typing import Any

import aiohttp

from penstock.tests.serving import serve
from penstock.tests.test_server import post, until_metrics, with_session

FLAGS = ("--dtype", "bfloat16", "--batch-invariant", "--kv-pages", "60", "--speculate", "ngram=3", "--max-restarts", "3")
REQUESTS = 15
STORY = "Once upon a time there was a little fox who liked the rain and the green hills. "


def body(number: int) -> dict[str, Any]:
    """Greedy, seeded and beam search requests with prompts of different lengths that share a prefix."""
    parameters: dict[str, Any] = {"max_new_tokens": 30 + number % 5, "details": True}
    if number % 3 == 1:
        parameters |= {"do_sample": True, "temperature": 1.2, "top_p": 0.9, "seed": number}
    elif number % 3 == 2:
        parameters["num_beams"] = 3
    return {"inputs": (STORY * 3)[: 30 + 11 * number], "parameters": parameters}


async def tokens_and_logprobs(session: aiohttp.ClientSession, number: int) -> tuple[object, ...]:
    answer = await post(session, "/generate", body(number))
    details = answer["details"]
    return answer["generated_text"], details.get("score"), [(token["id"], token["logprob"]) for token in details["tokens"]]


def test_bfloat16_tokens_and_logprobs_are_the_same_alone_batched_and_after_a_shard_is_killed() -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        alone = [await tokens_and_logprobs(session, number) for number in range(REQUESTS)]
        assert await asyncio.gather(*(tokens_and_logprobs(session, number) for number in range(REQUESTS))) == alone
        batched = asyncio.gather(*(tokens_and_logprobs(session, number) for number in range(REQUESTS)))
        await until_metrics(session, lambda values: values["penstock_running"] > 5, 10)
        os.kill(server.child("penstock.shard"), signal.SIGKILL)
        assert await batched == alone

    with serve(*FLAGS) as server:
        with_session(server, work)
