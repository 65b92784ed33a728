"""Requests that cost more than they look, and clients that take nothing: each is bounded, and others go on."""

import asyncio
import io
import json
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import tokenizers

from penstock.router import validation as module
from penstock.router.config import RouterConfig
from penstock.router.request import Limits, Overloaded, Refused
from penstock.router.text import LONG_TEXT, Tokenizer
from penstock.router.validation import Parameters, Validator
from penstock.tests.router.fake_batcher import LIMITS, Server, make_tokenizer, serve, until


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def address(server: Server) -> tuple[str, int]:
    base = server.client._base_url
    assert base is not None
    return base.host or "", base.port or 0


def head(method: str, path: str, length: int) -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode()


async def received(client: socket.socket, pause: float, length: int) -> int:
    """Bytes of the answer that come until there are so many, or the connection ends; it is read with a few pauses."""
    loop, found, reads = asyncio.get_running_loop(), 0, 0
    with suppress(ConnectionResetError):
        while found < length and (data := await loop.sock_recv(client, 1 << 20)):
            found += len(data)
            reads += 1
            await asyncio.sleep(pause if reads < 5 else 0)
    return found


def test_who_does_not_read_a_long_answer_is_left(tokenizer: Tokenizer) -> None:
    """It is held in memory meanwhile. Who reads slowly gets all of it."""
    body = json.dumps({"inputs": "a1!" * 120_000}).encode()

    async def test(server: Server) -> None:
        loop = asyncio.get_running_loop()
        async with server.client.post("/tokenize", data=io.BytesIO(body), headers={"Content-Type": "application/json"}) as answer:
            length = len(await answer.read())
        assert length > 15_000_000
        for pause, whole in ((1.5, False), (0.1, True)):
            with socket.create_connection(address(server)) as client:
                client.setblocking(False)
                await loop.sock_sendall(client, head("POST", "/tokenize", len(body)) + body)
                assert (await received(client, pause, length) >= length) == whole

    serve(tokenizer, test, settings={"slow_client_timeout": 1.0})


def test_a_get_with_a_body_is_answered_before_that_is_there(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        loop = asyncio.get_running_loop()
        with socket.create_connection(address(server)) as client:
            client.setblocking(False)
            await loop.sock_sendall(client, head("GET", "/health", 1_000_000) + b"x" * 100)
            async with asyncio.timeout(5):
                assert (await loop.sock_recv(client, 1000)).startswith(b"HTTP/1.1 200 ")

    serve(tokenizer, test)


def test_a_text_that_must_be_too_long_is_not_tokenized(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokenizer.longest
    validator = Validator(RouterConfig(folder="", model="m"), tokenizer)
    monkeypatch.setattr(Tokenizer, "encode", lambda *arguments: pytest.fail("it was"))
    with pytest.raises(Refused, match=f"at most {LIMITS.max_input_tokens} tokens, which are at most"):
        asyncio.run(validator.request("ab" * LONG_TEXT, Parameters(), LIMITS))


def test_a_text_of_the_longest_tokens_is_taken(tokenizer: Tokenizer) -> None:
    """Each of as many characters as a token can stand for."""
    [longest] = sorted((tokenizer.token_text(id) for id in range(tokenizer.size)), key=len)[-1:]
    assert len(longest) == tokenizer.longest
    count = -(-LONG_TEXT // len(longest)) + 1
    limits = Limits(max_input_tokens=count, max_total_tokens=count + 10, vocabulary=tokenizer.size)
    validator = Validator(RouterConfig(folder="", model="m"), tokenizer)
    request = asyncio.run(validator.request(longest * count, Parameters(max_new_tokens=5), limits, add_special_tokens=False))
    assert len(request.prompt) == count


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "NFKC"}),
        ("normalizer", {"type": "Replace", "pattern": {"String": "a"}, "content": ""}),
        ("pre_tokenizer", {"type": "Whitespace"}),
    ],
)
def test_nobody_knows_how_long_texts_may_be_of_which_something_is_left_out(tmp_path: Path, part: str, value: object) -> None:
    make_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: value}))
    with_part = object.__new__(Tokenizer)
    with_part._tokenizer = tokenizers.Tokenizer.from_file(str(path))
    with_part._byte_level, with_part._byte_fallback = {"a": 97}, False
    assert with_part.longest == 0


def test_long_texts_wait_for_each_other_and_not_for_ever(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LONG", 3)
    validator, free = Validator(RouterConfig(folder="", model="m"), tokenizer), threading.Event()
    running: list[int] = []

    def encode(self: Tokenizer, text: str, special: bool) -> list[int]:
        running.append(len(text))
        free.wait(10)
        return [1] * len(text)

    monkeypatch.setattr(Tokenizer, "encode", encode)

    async def run() -> None:
        tasks = [asyncio.create_task(validator.encode("a" * (LONG_TEXT + 1))) for _ in range(3)]
        await until(lambda: len(running) == module.THREADS)
        with pytest.raises(Overloaded):
            await validator.encode("a" * (LONG_TEXT + 1))
        assert len(running) == module.THREADS
        free.set()
        await asyncio.gather(*tasks)
        await validator.encode("a" * (LONG_TEXT + 1))

    asyncio.run(run())


def test_scores_of_prompts_that_many_answers_repeat_are_bounded(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        ids = [5] * 90
        asked = {"prompt": [ids] * 4, "n": 16, "max_tokens": 1, "prompt_logprobs": 20}
        assert (await server.post("/v1/completions", asked))[0] == 200
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("penstock.router.api.openai.MOST_SCORES", 4 * 16 * 90 * 21 - 1)
            status, body, _ = await server.post("/v1/completions", asked)
            assert (status, body["error"]["param"]) == (400, "prompt_logprobs")
            status, _, _ = await server.post("/v1/completions", {**asked, "n": 15})
            assert status == 200

    serve(tokenizer, test)


def test_only_the_same_salt_finds_what_is_cached(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}):
            status, _, _ = await server.post("/v1/completions", {"prompt": "hi", **salt})
            assert status == 200
        keys = [request.cache_key for request in server.batcher.requests]
        assert keys[0] == ""
        assert keys[1] == keys[3] != keys[2] != ""
        assert (await server.post("/v1/completions", {"prompt": "hi", "cache_salt": 5}))[0] == 400

    serve(tokenizer, test)


def test_a_client_that_waits_for_a_slow_model_is_no_slow_client(tokenizer: Tokenizer) -> None:
    pace = asyncio.Semaphore(3)

    async def test(server: Server) -> None:
        reading = asyncio.create_task(server.events("/generate_stream", {"inputs": "Hi", "parameters": {"max_new_tokens": 5}}))
        await until(lambda: server.batcher.told == 3)
        await asyncio.sleep(0.3)
        pace.release()
        pace.release()
        assert len(await reading) == 5

    serve(tokenizer, test, settings={"slow_client_timeout": 0.05}, pace=pace)


def test_a_session_is_its_tenants(tokenizer: Tokenizer) -> None:
    """Nobody learns where the requests of another go by the same name for a session, or has his own go there."""

    async def test(server: Server) -> None:
        for token in ("a", "b", "a", ""):
            headers = {"X-Session-ID": "s"} | ({"Authorization": f"Bearer {token}"} if token else {})
            status, _, _ = await server.post("/v1/completions", {"prompt": "hi"}, headers=headers)
            assert status == 200
        first, other, again, nobody = (request.session for request in server.batcher.requests)
        assert first == again
        assert len({first, other, nobody, ""}) == 4

    serve(tokenizer, test)
