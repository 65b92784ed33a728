"""A server with --batch-invariant says the same in 16-bit numbers to a client that is alone and to one of a crowd, by tokens and
log-probabilities: in a pool that is too small for all, with drafts, and while its shard is killed."""

import asyncio
import os
import signal
from typing import Any

import aiohttp

from penstock.tests.serving import serve
from penstock.tests.test_server import post, talk, until

FLAGS = ("--dtype", "bfloat16", "--batch-invariant", "--kv-pages", "60", "--speculate", "ngram=3", "--max-restarts", "3")
REQUESTS = 15
STORY = "Once upon a time there was a little fox who liked the rain and the green hills. "


def body(number: int) -> dict[str, Any]:
    """Greedy, seeded and beams, of prompts that begin alike, of some lengths."""
    parameters: dict[str, Any] = {"max_new_tokens": 30 + number % 5, "details": True}
    if number % 3 == 1:
        parameters |= {"do_sample": True, "temperature": 1.2, "top_p": 0.9, "seed": number}
    elif number % 3 == 2:
        parameters["num_beams"] = 3
    return {"inputs": (STORY * 3)[: 30 + 11 * number], "parameters": parameters}


async def told(session: aiohttp.ClientSession, number: int) -> tuple[object, ...]:
    answer = await post(session, "/generate", body(number))
    details = answer["details"]
    return answer["generated_text"], details.get("score"), [(token["id"], token["logprob"]) for token in details["tokens"]]


def test_alone_and_in_a_crowd_and_across_a_death() -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        alone = [await told(session, number) for number in range(REQUESTS)]
        assert await asyncio.gather(*(told(session, number) for number in range(REQUESTS))) == alone
        crowd = asyncio.gather(*(told(session, number) for number in range(REQUESTS)))
        await until(session, lambda seen: seen["penstock_running"] > 5, 10)
        os.kill(server.child("penstock.shard"), signal.SIGKILL)
        assert await crowd == alone

    with serve(*FLAGS) as server:
        talk(server, work)
