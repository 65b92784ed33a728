"""Limits on expensive requests and slow clients: each is bounded, others continue; cache salts and sessions are separate."""

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
    """The number of bytes received until `length` is reached or the connection ends; the first reads are followed by pauses."""
    loop, found, reads = asyncio.get_running_loop(), 0, 0
    with suppress(ConnectionResetError):
        while found < length and (data := await loop.sock_recv(client, 1 << 20)):
            found += len(data)
            reads += 1
            await asyncio.sleep(pause if reads < 5 else 0)
    return found


def test_client_that_does_not_read_a_long_response_is_disconnected(tokenizer: Tokenizer) -> None:
    """The response would stay in memory. A client that reads slowly gets all of it."""
    body = json.dumps({"inputs": "a1!" * 120_000}).encode()

    async def test(server: Server) -> None:
        loop = asyncio.get_running_loop()
        async with server.client.post("/tokenize", data=io.BytesIO(body), headers={"Content-Type": "application/json"}) as answer:
            length = len(await answer.read())
        assert length > 15_000_000
        for pause, complete in ((1.5, False), (0.1, True)):
            with socket.create_connection(address(server)) as client:
                client.setblocking(False)
                await loop.sock_sendall(client, head("POST", "/tokenize", len(body)) + body)
                assert (await received(client, pause, length) >= length) == complete

    serve(tokenizer, test, settings={"slow_client_timeout": 1.0})


def test_get_with_a_body_is_answered_without_waiting_for_the_body(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        loop = asyncio.get_running_loop()
        with socket.create_connection(address(server)) as client:
            client.setblocking(False)
            await loop.sock_sendall(client, head("GET", "/health", 1_000_000) + b"x" * 100)
            async with asyncio.timeout(5):
                assert (await loop.sock_recv(client, 1000)).startswith(b"HTTP/1.1 200 ")

    serve(tokenizer, test)


def test_text_with_too_many_characters_for_the_limit_is_refused_untokenized(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tokenizer.longest
    validator = Validator(RouterConfig(folder="", model="m"), tokenizer)
    monkeypatch.setattr(Tokenizer, "encode", lambda *arguments: pytest.fail("it was"))
    with pytest.raises(Refused, match=f"at most {LIMITS.max_input_tokens} tokens, which are at most"):
        asyncio.run(validator.request("ab" * LONG_TEXT, Parameters(), LIMITS))


def test_text_of_only_the_longest_tokens_is_accepted(tokenizer: Tokenizer) -> None:
    """It has the most characters for its number of tokens."""
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
def test_longest_token_is_unknown_if_the_tokenizer_drops_characters(tmp_path: Path, part: str, value: object) -> None:
    make_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: value}))
    with_part = object.__new__(Tokenizer)
    with_part._tokenizer = tokenizers.Tokenizer.from_file(str(path))
    with_part._byte_level, with_part._byte_fallback = {"a": 97}, False
    assert with_part._longest() == 0


def test_long_texts_wait_for_tokenizer_threads_and_are_refused_if_too_many_wait(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_LONG", 3)
    validator, may_finish = Validator(RouterConfig(folder="", model="m"), tokenizer), threading.Event()
    running: list[int] = []

    def encode(self: Tokenizer, text: str, special: bool) -> list[int]:
        running.append(len(text))
        may_finish.wait(10)
        return [1] * len(text)

    monkeypatch.setattr(Tokenizer, "encode", encode)

    async def run() -> None:
        tasks = [asyncio.create_task(validator.encode("a" * (LONG_TEXT + 1))) for _ in range(3)]
        await until(lambda: len(running) == module.THREADS)
        with pytest.raises(Overloaded):
            await validator.encode("a" * (LONG_TEXT + 1))
        assert len(running) == module.THREADS
        may_finish.set()
        await asyncio.gather(*tasks)
        await validator.encode("a" * (LONG_TEXT + 1))

    asyncio.run(run())


def test_prompt_logprobs_repeated_in_many_choices_are_bounded(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        ids = [5] * 90
        request_body = {"prompt": [ids] * 4, "n": 16, "max_tokens": 1, "prompt_logprobs": 20}
        assert (await server.post("/v1/completions", request_body))[0] == 200
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("penstock.router.api.openai.MOST_SCORES", 4 * 16 * 90 * 21 - 1)
            status, body, _ = await server.post("/v1/completions", request_body)
            assert (status, body["error"]["param"]) == (400, "prompt_logprobs")
            status, _, _ = await server.post("/v1/completions", {**request_body, "n": 15})
            assert status == 200

    serve(tokenizer, test)


def test_cache_salt_separates_the_prefix_cache(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {"cache_salt": "a" * 100_000}):
            status, _, _ = await server.post("/v1/completions", {"prompt": "hi", **salt})
            assert status == 200
        keys = [request.cache_key for request in server.batcher.requests]
        assert keys[0] == ""
        assert keys[1] == keys[3] != keys[2] != ""
        assert len(set(keys)) == 4
        assert max(map(len, keys)) < 100, "shards keep keys as long as pages"
        assert (await server.post("/v1/completions", {"prompt": "hi", "cache_salt": 5}))[0] == 400

    serve(tokenizer, test)


def test_client_that_waits_for_a_slow_model_is_not_disconnected(tokenizer: Tokenizer) -> None:
    token_permits = asyncio.Semaphore(3)

    async def test(server: Server) -> None:
        reading = asyncio.create_task(server.events("/generate_stream", {"inputs": "Hi", "parameters": {"max_new_tokens": 5}}))
        await until(lambda: server.batcher.tokens_sent == 3)
        await asyncio.sleep(0.3)
        token_permits.release()
        token_permits.release()
        assert len(await reading) == 5

    serve(tokenizer, test, settings={"slow_client_timeout": 0.05}, token_permits=token_permits)


def test_sessions_of_different_tenants_differ(tokenizer: Tokenizer) -> None:
    """With the same session id a tenant must not learn which replica another's requests go to, or be sent there."""

    async def test(server: Server) -> None:
        for token in ("a", "b", "a", ""):
            headers = {"X-Session-ID": "s"} | ({"Authorization": f"Bearer {token}"} if token else {})
            status, _, _ = await server.post("/v1/completions", {"prompt": "hi"}, headers=headers)
            assert status == 200
        first, other, again, without_key = (request.session for request in server.batcher.requests)
        assert first == again
        assert len({first, other, without_key, ""}) == 4

    serve(tokenizer, test)
