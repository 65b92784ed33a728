"""The whole server as clients and operators see it: real processes, real HTTP, the demo model.

Expected tokens and log-probabilities come from transformers, or from another answer of the server; none are written down here.
"""

import asyncio
import io
import json
import math
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
import torch
import transformers

from penstock.demo import lessons
from penstock.tests import serving
from penstock.tests.serving import Server, serve

Result = TypeVar("Result")
Json = dict[str, Any]

DEMO = Path(lessons.__file__).parent / "model"
ANSWER_TOKENS = 24  # most tokens of a reference answer
TOLERANCE = 1e-3  # of log-probabilities
SMALL_POOL = 200  # pages of 4 tokens
CONCURRENT = 64  # requests that the server with the small pool accepts

torch.set_num_threads(1)


# Servers, and the reference


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    """A copy of the demo model, so that all tests of this file use the same weights even if the model is trained meanwhile."""
    with serving.scratch() as folder:
        yield Path(shutil.copytree(DEMO, folder / "model"))


@pytest.fixture(scope="module")
def one_rank(model: Path) -> Iterator[Server]:
    """One rank, with chunked prefill."""
    flags = ("--page-size", "4", "--kv-pages", "4096", "--max-batch-prefill-tokens", "16")
    with serve(str(model), *flags, stop=signal.SIGTERM) as server:
        yield server


@pytest.fixture(scope="module")
def two_ranks(model: Path) -> Iterator[Server]:
    """Two ranks."""
    flags = ("--num-shard", "2", "--page-size", "4", "--kv-pages", "4096", "--max-batch-prefill-tokens", "16")
    with serve(str(model), *flags) as server:
        yield server


@pytest.fixture(scope="module")
def small_pool(model: Path) -> Iterator[Server]:
    """A page pool that holds only a few requests at once."""
    flags = ("--page-size", "4", "--kv-pages", str(SMALL_POOL), "--max-batch-prefill-tokens", "32")
    with serve(str(model), *flags, "--max-concurrent-requests", str(CONCURRENT)) as server:
        yield server


class Reference:
    """transformers with the served model in float32."""

    def __init__(self, folder: Path) -> None:
        transformers.utils.logging.disable_progress_bar()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.end = self.tokenizer.eos_token_id
        # The logit bias of requests that must not generate an end token, or any other special token.
        self.no_end_bias = {str(id): -100 for id in self.tokenizer.all_special_ids}
        self.prompts = [self.text(messages) for messages in islice(questions(), 32)]
        self.story_text = " ".join(stories(40))
        self.prompts += [self.story_text[99 * i : 99 * i + 20 + 8 * i] for i in range(32)]  # from one or two words to many chunks
        random.Random(1).shuffle(self.prompts)
        self.answers = self.greedy(self.prompts)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text).input_ids)

    def text(self, messages: list[lessons.Message]) -> str:
        """A conversation as the prompt of a /generate request: without the begin token, which the tokenizer adds."""
        return self.rendered(messages).removeprefix(self.tokenizer.bos_token)

    def rendered(self, messages: list[lessons.Message]) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def greedy(self, prompts: Sequence[str]) -> list[list[int]]:
        """Up to ANSWER_TOKENS tokens for each prompt, the end token included. Prompts of similar length share a batch, for
        little padding."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        answers: dict[int, list[int]] = {}
        for begin in range(0, len(order), 16):
            indices = order[begin : begin + 16]
            answers |= zip(indices, self._greedy([prompts[index] for index in indices]), strict=True)
        return [answers[index] for index in range(len(prompts))]

    @torch.inference_mode()
    def _greedy(self, prompts: list[str]) -> list[list[int]]:
        batch = self.tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt", return_token_type_ids=False)
        output = self.model.generate(
            **batch, do_sample=False, max_new_tokens=ANSWER_TOKENS, pad_token_id=self.tokenizer.pad_token_id
        )
        answers = [row[batch.input_ids.shape[1] :].tolist() for row in output]
        return [row[: row.index(self.end) + 1] if self.end in row else row for row in answers]

    @torch.inference_mode()
    def logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """[tokens, vocabulary]: log-probabilities of the token that follows each token."""
        return self.model(torch.tensor([list(ids)])).logits[0].log_softmax(-1)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


def questions() -> Iterator[list[lessons.Message]]:
    """Conversations whose last message is the user's."""
    kinds = [lessons.questions(5, kind) for kind in lessons.KINDS]
    while True:
        yield from (list(next(kind).messages) for kind in kinds)


def stories(count: int) -> list[str]:
    """Texts that are no conversations."""
    plain = (messages[0]["content"] for messages in lessons.conversations(5) if messages[0]["role"] == "text")
    return list(islice(plain, count))


# Clients


def with_session(server: Server, work: Callable[[aiohttp.ClientSession], Awaitable[Result]], seconds: float = 60) -> Result:
    """Runs `work` with a session of unlimited connections to the server, and returns its result."""

    async def main() -> Result:
        connector = aiohttp.TCPConnector(limit=0)
        async with asyncio.timeout(seconds), aiohttp.ClientSession(server.url, connector=connector) as session:
            return await work(session)

    return asyncio.run(main())


async def post(session: aiohttp.ClientSession, path: str, body: Json) -> Json:
    """The JSON of a response with status 200."""
    async with session.post(path, json=body) as response:
        text = await response.text()
        assert response.status == 200, text
        return json.loads(text)  # type: ignore[no-any-return]


async def generate(session: aiohttp.ClientSession, prompt: str, /, **parameters: Any) -> Json:
    """The response of /generate, with details, and with the token ids as "ids"."""
    answer = await post(session, "/generate", {"inputs": prompt, "parameters": {"details": True, **parameters}})
    answer["ids"] = [token["id"] for token in answer["details"]["tokens"]]
    assert answer["details"]["generated_tokens"] == len(answer["ids"])
    return answer


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of each server-sent event, as it arrives. Fails on anything that is not a well-formed event."""
    assert response.status == 200, await response.text()
    assert response.content_type == "text/event-stream"
    rest = b""
    async for part in response.content.iter_any():
        *whole, rest = (rest + part).split(b"\n\n")
        for event in whole:
            assert event.startswith(b"data: "), event
            assert b"\n" not in event, event
            yield event.removeprefix(b"data: ").decode()
    assert rest == b""


async def stream_events(session: aiohttp.ClientSession, path: str, body: Json) -> list[str]:
    """The data of all events of a stream."""
    async with session.post(path, json=body) as response:
        return [data async for data in events(response)]


async def metrics(session: aiohttp.ClientSession) -> dict[str, float]:
    """Metric samples by name and labels."""
    async with session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


async def until_metrics(session: aiohttp.ClientSession, holds: Callable[[dict[str, float]], bool], seconds: float) -> None:
    """Returns when `holds` is true of the metrics; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds(values := await metrics(session)):
        if time.monotonic() > deadline:
            raise AssertionError({name: value for name, value in values.items() if "_bucket" not in name})
        await asyncio.sleep(0.02)


def is_idle(values: dict[str, float]) -> bool:
    """No request is waiting or running, and all pages are free."""
    left = [values[f"penstock_{name}"] for name in ("waiting", "running", "pages_held")]
    return values["penstock_pages_free"] == values["penstock_pages_total"] and not any(left)


async def after_delay(seconds: float, work: Awaitable[Result]) -> Result:
    """Awaits `work` after a delay."""
    await asyncio.sleep(seconds)
    return await work


# Tokens


@pytest.fixture(params=["one_rank", "two_ranks"])
def one_or_two_ranks(request: pytest.FixtureRequest) -> Server:
    """The server with one rank, then the one with two."""
    server: Server = request.getfixturevalue(request.param)
    return server


def test_greedy_tokens_equal_transformers_alone_and_among_64_requests(one_or_two_ranks: Server, reference: Reference) -> None:
    assert any(answer[-1] == reference.end for answer in reference.answers)
    assert max(len(reference.ids(prompt)) for prompt in reference.prompts) > 3 * 16  # four chunks
    rng = random.Random(2)

    async def work(session: aiohttp.ClientSession) -> None:
        for prompt, expected in zip(reference.prompts[:4], reference.answers[:4], strict=True):
            answer = await generate(session, prompt, max_new_tokens=ANSWER_TOKENS)
            assert answer["ids"] == expected
            assert answer["details"]["finish_reason"] == ("eos_token" if expected[-1] == reference.end else "length")
        counts = [rng.randint(4, ANSWER_TOKENS) for _ in reference.prompts]
        requests = [
            after_delay(rng.uniform(0, 1), generate(session, prompt, max_new_tokens=count))
            for prompt, count in zip(reference.prompts, counts, strict=True)
        ]
        answers = await asyncio.gather(*requests)
        assert [answer["ids"] for answer in answers] == [
            expected[:count] for expected, count in zip(reference.answers, counts, strict=True)
        ]

    with_session(one_or_two_ranks, work)


def test_seeded_tokens_are_the_same_alone_and_among_64_requests(one_rank: Server, reference: Reference) -> None:
    rng = random.Random(3)
    samplings: list[Json] = [
        {"temperature": 0.7, "seed": 1},
        {"temperature": 1.5, "top_p": 0.9, "seed": 2**64 - 1},
        {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.2, "seed": 3},
        {"do_sample": True, "typical_p": 0.8, "frequency_penalty": 0.5, "presence_penalty": 0.5, "seed": 4},
        {"temperature": 1.2, "min_p": 0.05, "frequency_penalty": -0.5, "seed": 5},
    ]
    messages = next(questions())
    chat_samplings: list[Json] = [
        {"temperature": 1.0, "seed": 6},
        {"temperature": 1.3, "top_p": 0.8, "presence_penalty": 1.0, "frequency_penalty": 0.3, "seed": -7},
    ]

    async def generate_seeded(session: aiohttp.ClientSession, index: int) -> list[int]:
        parameters = samplings[index] | {"logit_bias": reference.no_end_bias}
        return list((await generate(session, reference.prompts[index], max_new_tokens=16, **parameters))["ids"])

    async def chat_seeded(session: aiohttp.ClientSession, index: int) -> Json:
        body = {
            "messages": messages,
            "max_tokens": 16,
            "logprobs": True,
            "logit_bias": reference.no_end_bias,
            **chat_samplings[index],
        }
        [choice] = (await post(session, "/v1/chat/completions", body))["choices"]
        return {
            "text": choice["message"]["content"],
            "tokens": [token["token"] for token in choice["logprobs"]["content"]],
            "logprobs": pytest.approx([token["logprob"] for token in choice["logprobs"]["content"]], abs=TOLERANCE),
        }

    async def neighbour(session: aiohttp.ClientSession) -> None:
        parameters = rng.choice([*samplings, {}, {"repetition_penalty": 1.3}]) | {"seed": rng.getrandbits(64)}
        await generate(session, rng.choice(reference.prompts), max_new_tokens=rng.randint(1, 24), **parameters)

    async def work(session: aiohttp.ClientSession) -> None:
        alone = [await generate_seeded(session, index) for index in range(len(samplings))]
        alone_chats = [await chat_seeded(session, index) for index in range(len(chat_samplings))]
        assert len({tuple(ids) for ids in alone}) == len(alone)
        assert all(len(ids) == 16 for ids in alone)
        neighbours = [after_delay(rng.uniform(0, 0.8), neighbour(session)) for _ in range(64)]
        again = [after_delay(rng.uniform(0.1, 0.5), generate_seeded(session, index)) for index in range(len(samplings))]
        again_chats = [after_delay(rng.uniform(0.1, 0.5), chat_seeded(session, index)) for index in range(len(chat_samplings))]
        others_done = asyncio.gather(*neighbours)
        assert await asyncio.gather(*again) == alone
        for found, expected in zip(await asyncio.gather(*again_chats), alone_chats, strict=True):
            assert found["tokens"] == expected["tokens"]
            assert found["text"] == expected["text"]
        await others_done

    with_session(one_rank, work)


# Streams


@dataclass
class Arrivals:
    """When the events of a stream arrived, and how many tokens had been computed when the first did."""

    session: aiohttp.ClientSession
    times: list[float] = field(default_factory=list)
    computed_before_first: float = 0.0  # tokens

    async def of(self, path: str, body: Json) -> list[str]:
        """Reads a stream, and returns the data of its events."""
        found = []
        before = await self._generated()
        async with self.session.post(path, json=body) as response:
            async for data in events(response):
                self.times.append(time.monotonic())
                if not found:
                    self.computed_before_first = await self._generated() - before
                found.append(data)
        return found

    async def _generated(self) -> float:
        return (await metrics(self.session))["penstock_generated_tokens_total"]

    def check(self, count: int) -> None:
        """The first event arrived long before the last token was computed, and the events did not arrive all at once."""
        assert self.computed_before_first < count / 2
        assert len({round(seconds, 3) for seconds in self.times}) > 10


def test_stream_begins_before_its_last_token_is_computed_in_both_apis(one_rank: Server, reference: Reference) -> None:
    count = 200
    prompt = reference.prompts[0]

    async def tgi(session: aiohttp.ClientSession) -> None:
        arrivals = Arrivals(session)
        parameters = {"max_new_tokens": count, "details": True, "logit_bias": reference.no_end_bias}
        found = [json.loads(data) for data in await arrivals.of("/generate_stream", {"inputs": prompt, "parameters": parameters})]
        arrivals.check(count)
        assert [event["index"] for event in found] == list(range(1, count + 1))
        assert all(event["generated_text"] is None and event["details"] is None for event in found[:-1])
        assert found[-1]["generated_text"] == "".join(event["token"]["text"] for event in found)
        assert found[-1]["details"] == {
            "finish_reason": "length",
            "generated_tokens": count,
            "seed": None,
            "input_length": len(reference.ids(prompt)),
        }

    async def openai(session: aiohttp.ClientSession) -> None:
        arrivals = Arrivals(session)
        body = {"messages": next(questions()), "max_tokens": count, "temperature": 0, "logit_bias": reference.no_end_bias}
        await post(session, "/v1/chat/completions", body)  # from now on requests find the same tokens in the prefix cache
        whole = await post(session, "/v1/chat/completions", body)
        more = {"stream": True, "stream_options": {"include_usage": True}}
        *found, done = await arrivals.of("/v1/chat/completions", body | more)
        arrivals.check(count)
        assert done == "[DONE]"
        *chunks, usage = [json.loads(data) for data in found]
        assert usage["choices"] == []
        assert usage["usage"] == whole["usage"]
        assert {chunk["id"] for chunk in chunks} == {usage["id"]}
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert choices[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == whole["choices"][0]["message"]["content"]

    async def work(session: aiohttp.ClientSession) -> None:
        await tgi(session)
        await openai(session)

    with_session(one_rank, work)


# Clients that disconnect, and more requests than fit


@dataclass
class LeavingClients:
    """Clients that disconnect before their answer is complete."""

    port: int
    reference: Reference
    rng: random.Random
    finished: bool = False
    disconnected: dict[str, int] = field(default_factory=lambda: {"silent": 0, "mid-stream": 0})

    async def client(self) -> None:
        """Sends one request after the other."""
        while not self.finished:
            await self.visit()

    async def visit(self) -> None:
        """Sends a request, reads a few events or nothing, and disconnects."""
        events_to_read = self.rng.choice([0, 0, 0, 0, 1, 5])
        path = "/generate_stream" if events_to_read else self.rng.choice(["/generate_stream", "/generate", "/v1/completions"])
        prompt = self.rng.choice(self.reference.prompts)[: self.rng.choice([20, 40, 400])]
        count = self.rng.randint(50, 200)
        bias = {"logit_bias": self.reference.no_end_bias}
        if path == "/v1/completions":
            body = {"prompt": prompt, "max_tokens": count, **bias}
        else:
            body = {"inputs": prompt, "parameters": {"max_new_tokens": count, **bias}}
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            data = json.dumps(body).encode()
            writer.write(f"POST {path} HTTP/1.1\r\nHost: penstock\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
            if events_to_read:
                for _ in range(events_to_read):
                    await reader.readuntil(b"data: ")
                self.disconnected["mid-stream"] += 1
            else:
                await asyncio.sleep(self.rng.choice([0.002, 0.02, 0.1]) * self.rng.random())
                self.disconnected["silent"] += 1
        finally:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()


def test_a_thousand_disconnecting_clients_leave_no_pages_or_requests_behind(small_pool: Server, reference: Reference) -> None:
    prompts, expected = reference.prompts[:6], reference.answers[:6]

    async def work(session: aiohttp.ClientSession) -> None:
        clients = LeavingClients(small_pool.port, reference, random.Random(4))
        before = await metrics(session)
        assert before["penstock_pages_total"] == SMALL_POOL
        assert is_idle(before)
        values: list[dict[str, float]] = []

        async def watch() -> None:
            """Stops the clients when the server has counted a thousand disconnects."""
            name = "penstock_client_disconnects_total"
            while not values or values[-1][name] < before[name] + 1000:
                values.append(await metrics(session))
                await asyncio.sleep(0.05)
            clients.finished = True

        async with asyncio.TaskGroup() as group:
            group.create_task(watch())
            for _ in range(40):
                group.create_task(clients.client())
        assert min(clients.disconnected.values()) > 100, clients.disconnected
        assert min(each["penstock_pages_free"] for each in values) < SMALL_POOL
        assert max(each["penstock_waiting"] for each in values) > 0
        assert max(each["penstock_running"] for each in values) > 1
        await until_metrics(session, is_idle, 2)
        answers = await asyncio.gather(*(generate(session, prompt, max_new_tokens=ANSWER_TOKENS) for prompt in prompts))
        assert [answer["ids"] for answer in answers] == expected

    with_session(small_pool, work, 100)


def test_choices_differ_are_reproducible_and_compute_the_prompt_once(one_rank: Server, reference: Reference) -> None:
    body = {"model": "", "prompt": reference.story_text[:400], "max_tokens": 12, "temperature": 1.0, "seed": 7, "ignore_eos": True}

    async def work(session: aiohttp.ClientSession) -> None:
        before = (await metrics(session))["penstock_prompt_tokens_total"]
        first = await post(session, "/v1/completions", {**body, "n": 4})
        computed = (await metrics(session))["penstock_prompt_tokens_total"] - before
        assert 0 < computed <= first["usage"]["prompt_tokens"]
        texts = [choice["text"] for choice in first["choices"]]
        assert len(set(texts)) == 4
        second, alone = await asyncio.gather(
            post(session, "/v1/completions", {**body, "n": 4}), post(session, "/v1/completions", {**body, "n": 1})
        )
        assert [choice["text"] for choice in second["choices"]] == texts
        assert alone["choices"][0]["text"] == texts[0]
        streamed = ["", "", "", ""]
        for event in await stream_events(session, "/v1/completions", {**body, "n": 4, "stream": True}):
            if event != "[DONE]":
                for choice in json.loads(event)["choices"]:
                    streamed[choice["index"]] += choice["text"]
        assert streamed == texts

    with_session(one_rank, work)


def test_best_of_returns_the_answer_with_the_highest_mean_logprob(one_rank: Server, reference: Reference) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        answer = await generate(session, reference.prompts[0], best_of=3, do_sample=True, seed=3, details=True, max_new_tokens=8)
        others = answer["details"].pop("best_of_sequences")

        def mean(details: Json) -> float:
            return float(sum(token["logprob"] for token in details["tokens"]) / len(details["tokens"]))

        assert len(others) == 2
        assert mean(answer["details"]) >= max(mean(other) for other in others)

    with_session(one_rank, work)


def test_second_chat_turn_computes_only_its_new_tokens(one_rank: Server, reference: Reference) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        messages = [{"role": "user", "content": reference.story_text[:600]}]
        body = {"model": "", "messages": messages, "temperature": 0, "max_tokens": 40}
        first = await post(session, "/v1/chat/completions", body)
        before = await metrics(session)
        answer = first["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "How many are there?"}]
        second = await post(session, "/v1/chat/completions", body)
        after = await metrics(session)
        computed = after["penstock_prompt_tokens_total"] - before["penstock_prompt_tokens_total"]
        cached = after["penstock_cached_prompt_tokens_total"] - before["penstock_cached_prompt_tokens_total"]
        assert computed + cached == second["usage"]["prompt_tokens"]
        new = second["usage"]["prompt_tokens"] - first["usage"]["total_tokens"]
        assert 0 < computed <= new + 4, "a page of what it has seen, since the last token was not computed yet"

    with_session(one_rank, work)


def test_request_past_its_timeout_gets_504_and_frees_its_pages(one_rank: Server, reference: Reference) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        parameters = {"max_new_tokens": 1500, "timeout": 0.05, "priority": "batch", "logit_bias": reference.no_end_bias}
        async with session.post("/generate", json={"inputs": "Once", "parameters": parameters}) as response:
            assert response.status == 504
            assert (await response.json())["error_type"] == "timeout"
        await until_metrics(session, is_idle, 5)

    with_session(one_rank, work)


def test_full_server_answers_429_with_retry_after(small_pool: Server, reference: Reference) -> None:
    long = {"inputs": reference.prompts[0], "parameters": {"max_new_tokens": 500, "logit_bias": reference.no_end_bias}}

    async def work(session: aiohttp.ClientSession) -> None:
        tasks = [asyncio.create_task(stream_events(session, "/generate_stream", long)) for _ in range(CONCURRENT)]
        await until_metrics(session, lambda values: values["penstock_waiting"] + values["penstock_running"] == CONCURRENT, 10)
        async with session.post("/generate", json=long) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) > 0
            assert await response.json() == {"error": "Model is overloaded", "error_type": "overloaded"}
        async with session.post("/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) > 0
            assert (await response.json())["error"]["message"] == "Model is overloaded"
        async with session.post("/generate", data=b"nonsense") as response:
            assert response.status == 400
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await until_metrics(session, is_idle, 2)
        await generate(session, "x", max_new_tokens=1)

    with_session(small_pool, work)


def test_requests_that_do_not_fit_in_the_pool_at_once_are_queued(small_pool: Server, reference: Reference) -> None:
    ids = reference.ids(reference.story_text)[1:400]  # with the answer, more than half of the pool
    prompt = reference.tokenizer.decode(ids)
    length = len(reference.ids(prompt))
    assert SMALL_POOL * 4 / 2 < length + 16 <= SMALL_POOL * 4

    async def work(session: aiohttp.ClientSession) -> None:
        requests = [generate(session, prompt, max_new_tokens=16, logit_bias=reference.no_end_bias) for _ in range(5)]
        others = [generate(session, prompt, max_new_tokens=ANSWER_TOKENS) for prompt in reference.prompts[:6]]
        answers = await asyncio.gather(*requests, *others)
        assert {tuple(answer["ids"]) for answer in answers[:5]} == {tuple(answers[0]["ids"])}
        assert len(answers[0]["ids"]) == 16
        assert [answer["ids"] for answer in answers[5:]] == reference.answers[:6]
        await until_metrics(session, is_idle, 2)

    with_session(small_pool, work)


# Parameters of requests


def test_stop_strings_cut_the_text_across_token_borders(one_rank: Server, reference: Reference) -> None:
    prompt, count = reference.prompts[1], 30
    parameters = {"max_new_tokens": count, "logit_bias": reference.no_end_bias}

    async def check(session: aiohttp.ClientSession, texts: list[str], stop: list[str]) -> None:
        whole = "".join(texts)
        end, begin = min((whole.index(string) + len(string), whole.index(string)) for string in stop if string in whole)
        answer = await generate(session, prompt, **parameters, stop=stop)
        assert answer["generated_text"] == whole[:end]
        assert answer["details"]["finish_reason"] == "stop_sequence"
        needed = next(number for number in range(count + 1) if len("".join(texts[:number])) >= end)
        assert answer["details"]["generated_tokens"] == needed
        body = {"inputs": prompt, "parameters": parameters | {"stop": stop}}
        found = [json.loads(data) for data in await stream_events(session, "/generate_stream", body)]
        assert found[-1]["generated_text"] == whole[:end]
        assert [event["token"]["text"] for event in found] == texts[:needed]
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "logit_bias": reference.no_end_bias, "stop": stop}
        [choice] = (await post(session, "/v1/completions", body))["choices"]
        assert (choice["text"], choice["finish_reason"]) == (whole[:begin], "stop")
        *chunks, done = await stream_events(session, "/v1/completions", body | {"stream": True})
        assert done == "[DONE]"
        assert "".join(json.loads(data)["choices"][0]["text"] for data in chunks) == whole[:begin]

    async def work(session: aiohttp.ClientSession) -> None:
        answer = await generate(session, prompt, **parameters)
        texts = [token["text"] for token in answer["details"]["tokens"]]
        assert "".join(texts) == answer["generated_text"]
        across_two_borders = [[texts[index][-1:] + texts[index + 1] + texts[index + 2][:1]] for index in (4, 11, 18, 26)]
        long = "".join(texts[10:14])
        several = [texts[20][-1:] + texts[21], long, long[1:] + "?!"]
        await asyncio.gather(*(check(session, texts, stop) for stop in [*across_two_borders, several]))

    with_session(one_rank, work)


def test_answer_has_exactly_max_new_tokens_tokens(one_rank: Server, reference: Reference) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        for count in (1, 2, 7, 20):
            answer = await generate(session, reference.prompts[2], max_new_tokens=count, logit_bias=reference.no_end_bias)
            assert len(answer["ids"]) == count
            assert answer["details"]["finish_reason"] == "length"
            body = {"prompt": reference.prompts[2], "max_tokens": count, "ignore_eos": True}
            found = await post(session, "/v1/completions", body)
            assert found["usage"]["completion_tokens"] == count
            assert found["choices"][0]["finish_reason"] == "length"

    with_session(one_rank, work)


def test_too_long_inputs_are_refused_with_tgis_messages(one_rank: Server, reference: Reference) -> None:
    max_length = json.loads((DEMO / "config.json").read_text())["max_position_embeddings"]
    prompt = "x " * max_length
    length = len(reference.ids(prompt))

    async def refused(session: aiohttp.ClientSession, path: str, inputs: str, message: str, **parameters: Any) -> None:
        async with session.post(path, json={"inputs": inputs, "parameters": parameters}) as response:
            assert response.status == 422
            assert await response.json() == {"error": f"Input validation error: {message}", "error_type": "validation"}

    async def work(session: aiohttp.ClientSession) -> None:
        for path in ("/generate", "/generate_stream", "/"):
            await refused(session, path, prompt, f"`inputs` must have less than {max_length - 1} tokens. Given: {length}")
            await refused(
                session,
                path,
                reference.prompts[0],
                f"`inputs` tokens + `max_new_tokens` must be <= {max_length}. "
                f"Given: {len(reference.ids(reference.prompts[0]))} `inputs` tokens and {max_length} `max_new_tokens`",
                max_new_tokens=max_length,
            )
        async with session.post("/v1/completions", json={"prompt": prompt}) as response:
            assert response.status == 400
            assert "`prompt` tokens + `max_tokens` must be" in (await response.json())["error"]["message"]

    with_session(one_rank, work)


INVALID_REQUESTS: list[tuple[str, bytes, int]] = [
    ("/generate", b"", 400),
    ("/generate", b"{", 400),
    ("/generate", b"\xff\xfe", 400),
    ("/generate", b'{"inputs": "x", "parameters": {"grammar": ' + b"[" * 100_000, 422),
    ("/generate", b"[]", 422),
    ("/generate", b"{}", 422),
    ("/generate", b'{"inputs": 1}', 422),
    ("/generate", b'{"inputs": ""}', 422),
    ("/generate", b'{"inputs": "x", "parameters": {"temperature": -1}}', 422),
    ("/generate", b'{"inputs": "x", "parameters": {"top_k": 1e400}}', 422),
    ("/generate", b'{"inputs": "x", "parameters": {"seed": 18446744073709551616}}', 422),
    ("/generate", b'{"inputs": "x", "parameters": {"logit_bias": {"1000000": 1}}}', 422),
    ("/generate_stream", b'{"inputs": "x", "parameters": {"stop": [""]}}', 422),
    ("/generate", b" " * 2_000_001, 413),
    ("/v1/chat/completions", b"{", 400),
    ("/v1/chat/completions", b'{"messages": []}', 400),
    ("/v1/chat/completions", b'{"messages": [{"role": 1}]}', 400),
    ("/v1/completions", b'{"prompt": [1, 1000000]}', 400),
    ("/v1/nothing", b"{}", 404),
    ("/nothing", b"{}", 404),
]


def test_invalid_requests_are_refused_and_do_not_disturb_running_ones(one_rank: Server, reference: Reference) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        running = asyncio.create_task(generate(session, reference.prompts[3], max_new_tokens=ANSWER_TOKENS))
        for path, body, status in INVALID_REQUESTS:
            async with session.post(path, data=io.BytesIO(body), headers={"Content-Type": "application/json"}) as response:
                assert response.status == status, (path, body[:80], await response.text())
                assert "error" in await response.json()
        async with session.get("/generate") as response:
            assert response.status == 405
        assert (await running)["ids"] == reference.answers[3]
        assert (await generate(session, reference.prompts[0], max_new_tokens=ANSWER_TOKENS))["ids"] == reference.answers[0]
        await until_metrics(session, is_idle, 2)

    with_session(one_rank, work)
    for request in (b"nonsense\r\n\r\n", b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{", b"\0" * 1000):
        with socket.create_connection(("127.0.0.1", one_rank.port), timeout=10) as connection:
            connection.sendall(request)
    assert one_rank.health() == 200


# Log-probabilities


def all_close(found: Sequence[float], expected: torch.Tensor) -> bool:
    return bool((torch.tensor(found) - expected).abs().max() < TOLERANCE)


def test_logprobs_of_all_apis_equal_transformers(one_rank: Server, reference: Reference) -> None:
    prompt = reference.story_text[:600]
    ids = reference.ids(prompt)
    messages = next(questions())

    async def tgi(session: aiohttp.ClientSession) -> None:
        answer = await generate(session, prompt, max_new_tokens=8, decoder_input_details=True, top_n_tokens=4)
        details, logprobs = answer["details"], reference.logprobs([*ids, *answer["ids"]])
        assert [token["id"] for token in details["prefill"]] == ids
        first, *others = [token["logprob"] for token in details["prefill"]]
        assert first is None
        assert all_close(others, logprobs[range(len(ids) - 1), ids[1:]])
        own = logprobs[len(ids) - 1 : -1]
        assert all_close([token["logprob"] for token in details["tokens"]], own.max(-1).values)
        for top, row in zip(details["top_tokens"], own, strict=True):
            # If two are nearly equal, either order is correct.
            assert all_close([token["logprob"] for token in top], row[[token["id"] for token in top]])
            assert all_close([token["logprob"] for token in top], row.topk(4).values)

    async def completions(session: aiohttp.ClientSession) -> None:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 3}
        [choice] = (await post(session, "/v1/completions", body))["choices"]
        found = choice["logprobs"]
        own = reference.logprobs([*ids, *(await generate(session, prompt, max_new_tokens=8))["ids"]])[len(ids) - 1 : -1]
        assert all_close(found["token_logprobs"], own.max(-1).values)
        for top, row in zip(found["top_logprobs"], own, strict=True):
            assert all_close(list(top.values()), row.topk(3).values[: len(top)])
        assert found["text_offset"] == [len("".join(found["tokens"][:index])) for index in range(len(found["tokens"]))]

    async def chat(session: aiohttp.ClientSession) -> None:
        body = {"messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 2}
        [choice] = (await post(session, "/v1/chat/completions", body))["choices"]
        content = choice["logprobs"]["content"]
        begin = reference.tokenizer(reference.rendered(messages), add_special_tokens=False).input_ids
        answer = await generate(session, reference.text(messages), max_new_tokens=8)
        own = reference.logprobs([*begin, *answer["ids"]])[len(begin) - 1 : -1]
        assert [token["token"] for token in content] == [token["text"] for token in answer["details"]["tokens"]]
        assert all_close([token["logprob"] for token in content], own.max(-1).values)
        for token, row in zip(content, own, strict=True):
            assert all_close([other["logprob"] for other in token["top_logprobs"]], row.topk(2).values)
            assert bytes(token["bytes"]).decode() == token["token"]

    async def work(session: aiohttp.ClientSession) -> None:
        await tgi(session)
        await completions(session)
        await chat(session)

    with_session(one_rank, work)


# Start and stop. A start takes seconds, so each of these tests checks something else of its server too.


async def check_answers(session: aiohttp.ClientSession, reference: Reference) -> list[Json]:
    """Answers to a few prompts at once; checks that none is empty, and that all log-probabilities are finite and not positive."""
    prompts = reference.prompts[:8]
    answers = await asyncio.gather(
        *(generate(session, prompt, max_new_tokens=16, decoder_input_details=True) for prompt in prompts)
    )
    for answer in answers:
        assert answer["generated_text"]
        logprobs = [token["logprob"] for token in answer["details"]["tokens"] + answer["details"]["prefill"][1:]]
        assert all(math.isfinite(value) and value <= 0 for value in logprobs)
    return answers


def test_sigkilled_launcher_leaves_no_process_and_a_dead_shard_ends_streams_with_an_error(
    model: Path, reference: Reference
) -> None:
    with serving.scratch() as folder:
        # The default model, rounded to bfloat16.
        with serve("--dtype", "bfloat16", "--kv-pages", "256", folder=folder) as server:
            assert "penstock-demo on cpu, bfloat16" in server.log
            with_session(server, lambda session: check_answers(session, reference))
            assert len(server.children()) == 2
            server.process.kill()
            server.process.wait()
            server.wait_until_no_children(5)
            [leftover] = server.run_folder.iterdir()

        async def work(session: aiohttp.ClientSession) -> Json:
            """Returns the last event of a stream whose shard is killed."""
            answers = await check_answers(session, reference)
            for prompt, answer in zip(reference.prompts, answers, strict=False):
                ids = reference.ids(prompt)
                expected = reference.logprobs(ids)[range(len(ids) - 1), ids[1:]]
                found = torch.tensor([token["logprob"] for token in answer["details"]["prefill"][1:]])
                assert (found - expected).abs().mean() < 0.1  # the same model, rounded to 16 bits
            body = {"inputs": "x", "parameters": {"max_new_tokens": 900, "logit_bias": reference.no_end_bias}}
            async with session.post("/generate_stream", json=body) as response:
                found_events = events(response)
                last = await anext(found_events)
                os.kill(server.child('"rank":1'), signal.SIGKILL)
                async for data in found_events:
                    last = data
            return json.loads(last)  # type: ignore[no-any-return]

        flags = ("--dtype", "float16", "--num-shard", "2", "--kv-pages", "256", "--max-restarts", "0")
        with serve(str(model), *flags, folder=folder) as server:
            assert not leftover.exists()  # the new server has removed it
            assert len(server.children()) == 3
            assert with_session(server, work, 30)["error_type"] == "unavailable"
            server.check_end(1)
            assert "on cpu, float16" in server.log
            assert "penstock: shard 1 was killed by SIGKILL" in server.log
            assert "the shards died more than 0 times" in server.log


def test_sigint_drains_earlier_requests_and_dummy_weights_need_only_config_and_tokenizer(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, tmp_path)
    count = 300
    body = {"inputs": "x", "parameters": {"max_new_tokens": count, "details": True, "logit_bias": reference.no_end_bias}}

    async def work(session: aiohttp.ClientSession) -> None:
        arrived, draining_seen = asyncio.Event(), asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            arrived.set()  # the server has asked for the body
            yield b'{"inputs":'
            await draining_seen.wait()
            yield b'"x","parameters":{"max_new_tokens":3}}'

        early_request = asyncio.create_task(session.post("/generate", data=slowly(), expect100=True))
        async with session.post("/generate_stream", json=body) as response:
            found = events(response)
            first = json.loads(await anext(found))
            await arrived.wait()
            server.process.send_signal(signal.SIGINT)
            _, others = await asyncio.gather(draining(session), rest(found))
            draining_seen.set()
        async with await early_request as response:
            assert response.status == 200, "it came before the signal"
        assert [event["index"] for event in [first, *others]] == list(range(1, count + 1))
        assert all(math.isfinite(event["token"]["logprob"]) for event in [first, *others])
        assert others[-1]["details"]["finish_reason"] == "length"

    async def draining(session: aiohttp.ClientSession) -> None:
        """While the stream continues, the server soon refuses new requests."""
        status = 200
        while status == 200:
            async with session.get("/health/ready") as response:
                status = response.status
        assert status == 503
        async with session.post("/generate", json={"inputs": "x"}) as response:
            assert response.status == 503
            assert "shutting down" in (await response.json())["error"]

    async def rest(found: AsyncIterator[str]) -> list[Json]:
        return [json.loads(data) async for data in found]

    with serve(str(tmp_path), "--load-format", "dummy", "--kv-pages", "256") as server:
        with_session(server, work)
        server.check_end(0)


def test_plan_command_prints_the_plan_and_leaves_no_files(tmp_path: Path) -> None:
    answer = serving.run("plan", folder=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    for word in ("LlamaForCausalLM", "ranks", "weights", "pages", "capacity"):
        assert word in answer.stdout
    assert list(tmp_path.iterdir()) == []


def test_failed_start_exits_at_once_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "run").mkdir()
    began = time.monotonic()
    answer = serving.run("serve", str(tmp_path / "model"), "--port", str(serving.free_port()), folder=tmp_path / "run")
    assert time.monotonic() - began < 30
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith("penstock: error: ")
    assert "config.json" in answer.stderr
    assert answer.stderr.count("\n") == 1
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        answer = serving.run("serve", "--hostname", "127.0.0.1", "--port", str(port), folder=tmp_path / "run")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith(f"penstock: error: port {port} is in use")
    assert "--port" in answer.stderr
    assert answer.stderr.count("\n") == 1
    assert list((tmp_path / "run").iterdir()) == []
